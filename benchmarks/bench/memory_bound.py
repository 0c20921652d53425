"""Measure physical KV bytes and the process's peak memory against prompt length.

``python -m benchmarks.bench.memory_bound`` prefills prompts of 1k .. 128k tokens into a small
random model and decodes a few tokens. Each prompt has its own process, because a process has one
peak. It prints a table and writes ``benchmarks/results/memory-cpu.json``. With ``--generate``
transformers' ``generate`` runs under ``mmkv.hf.retain`` instead; name another output file then.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from mmkv.training.measure.record import write_results

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
DECODED = 32


def build_model(folder: Path) -> None:
    """Write a random Qwen3 checkpoint: 8 layers, 4 KV heads of 32, context 256k."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        tie_word_embeddings=True,
        max_position_embeddings=262144,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def peak_bytes() -> int:
    """Return the largest resident set that this program had so far.

    On Linux ``ru_maxrss`` of a process begins with the peak of the one that started it.
    """
    status = Path("/proc/self/status")
    if status.exists():
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
        if "VmHWM" in fields:
            return int(fields["VmHWM"].split()[0]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def measure(
    folder: str, policy: str, budget: float, chunk: int, length: int, generate: bool = False
) -> dict[str, Any]:
    """Run one prompt in this process: measure memory at the end and the peak resident set.

    Returns:
        bytes; ``peak_growth_bytes`` is the peak above the resident set before the prompt.
    """
    import torch

    from mmkv.engine.runtime import Runtime

    torch.set_num_threads(1)
    options: dict[str, Any] = {
        "policy": policy,
        "budget": budget,
        "prefill_chunk": chunk,
        "gates": "random",
    }
    model: Any = None
    if generate:
        from transformers import AutoModelForCausalLM

        from mmkv.hf import RetainedCache, retain

        model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
        engine = retain(model, **options).engine
        model.generate(torch.zeros(1, 64, dtype=torch.int64), max_new_tokens=2, do_sample=False)
    else:
        engine = Runtime.from_pretrained(folder, **options)
        with engine.session() as warm:
            warm.prefill({"input_ids": torch.zeros(1, 64, dtype=torch.int64)})
    before = peak_bytes()
    generator = torch.Generator().manual_seed(length)
    prompt = torch.randint(0, 256, (1, length), generator=generator)
    if generate:
        cache = RetainedCache()
        options = {"max_new_tokens": DECODED + 1, "do_sample": False, "past_key_values": cache}
        model.generate(prompt, **options)
        (memory,) = cache.memory()
    else:
        session = engine.session()
        token = int(session.prefill({"input_ids": prompt}).argmax())
        for _ in range(DECODED):
            token = int(session.decode(token).argmax())
        memory = session.memory()
    entry_bytes = engine.cache.pool.kv_page_bytes // engine.cache.pool.page_size
    logical = memory.entries * entry_bytes
    peak = peak_bytes()
    return {
        "policy": policy,
        "prompt_tokens": length,
        "tokens_seen": memory.tokens_seen,
        "entries": memory.entries,
        "evicted": memory.evicted,
        "kv_bytes": memory.kv_bytes,
        "logical_kv_bytes": logical,
        "physical_over_logical": memory.kv_bytes / logical,
        "metadata_bytes": memory.metadata_bytes,
        "pool_bytes": engine.cache.pool.num_pages * engine.cache.pool.page_bytes,
        "peak_growth_bytes": peak - before,
        "process_peak_bytes": peak,
    }


def show(rows: list[dict[str, Any]], console: Console) -> None:
    """Print the rows as one table; bytes in MiB."""
    table = Table(title="Physical memory against prompt length")
    for name in (
        "policy",
        "prompt",
        "entries",
        "KV MiB",
        "physical/logical",
        "pool MiB",
        "peak growth MiB",
        "process peak MiB",
    ):
        table.add_column(name, justify="left" if name == "policy" else "right")
    for row in rows:
        table.add_row(
            row["policy"],
            f"{row['prompt_tokens']:,}",
            f"{row['entries']:,}",
            f"{row['kv_bytes'] / 2**20:.3f}",
            f"{row['physical_over_logical']:.3f}",
            f"{row['pool_bytes'] / 2**20:.2f}",
            f"{row['peak_growth_bytes'] / 2**20:.1f}",
            f"{row['process_peak_bytes'] / 2**20:.0f}",
        )
    console.print(table)


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", type=float, default=64.0, help="M, entries per row")
    parser.add_argument("--chunk", type=int, default=1024, help="prefill chunk, tokens")
    parser.add_argument("--longest", type=int, default=LENGTHS[-1], help="longest prompt, tokens")
    parser.add_argument("--policies", nargs="+", default=["dbtrimkv", "full"])
    parser.add_argument(
        "--generate", action="store_true", help="transformers' generate under mmkv.hf.retain"
    )
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/memory-cpu.json"))
    args = parser.parse_args()
    console = Console(width=120)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        build_model(Path(folder))
        context = multiprocessing.get_context("spawn")
        for policy in args.policies:
            for length in (n for n in LENGTHS if n <= args.longest):
                with context.Pool(1) as pool:
                    job = (folder, policy, args.budget, args.chunk, length, args.generate)
                    rows.append(pool.apply(measure, job))
                console.print(json.dumps(rows[-1]), style="dim", soft_wrap=True)
    show(rows, console)
    settings = {"budget": args.budget, "chunk": args.chunk, "decoded": DECODED}
    write_results(args.output, settings, rows)


if __name__ == "__main__":
    main()
