"""Measure exact answers on held-out scenes, per kind of question, with intervals.

``python -m benchmarks.accuracy.scenes`` asks single-picture questions one by one. With
``--dialogues N`` it also runs dialogues of 3 pictures and 6 turns. The model runs in transformers'
generate (``--backend transformers``, the full cache) or in mmkv under any policy and budget.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from mmkv.resources import bundled_model_name
from mmkv.training.data.scenes import Question, SceneTurn, make_scene, questions, render
from mmkv.training.measure.record import write_results

# Answers the turns of a dialogue in order, with its own earlier answers as history.
Answerer = Callable[[list[SceneTurn]], list[str]]


def transformers_answerer(folder: str) -> Answerer:
    """Answer with transformers' generate on the whole history at every turn (the reference)."""
    from transformers import AutoTokenizer, Qwen2VLImageProcessor, Qwen3VLForConditionalGeneration

    model = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    images = Qwen2VLImageProcessor.from_pretrained(folder)
    pad = tokenizer.convert_tokens_to_ids("<|image_pad|>")

    def answer(turns: list[SceneTurn]) -> list[str]:
        messages: list[dict[str, Any]] = []
        pictures, given = [], []
        for turn in turns:
            content: list[dict[str, str]] = [{"type": "image"} for _ in turn.pictures]
            messages.append(
                {
                    "role": "user",
                    "content": [*content, {"type": "text", "text": turn.question.text}],
                }
            )
            pictures += [render(scene) for scene in turn.scenes()]
            pixels = images(images=pictures, return_tensors="pt")
            text = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
            parts = text.split("<|image_pad|>")
            counts = (pixels["image_grid_thw"].prod(-1) // images.merge_size**2).tolist()
            text = parts[0] + "".join(
                "<|image_pad|>" * count + part
                for count, part in zip(counts, parts[1:], strict=True)
            )
            ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
            out = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                mm_token_type_ids=(ids == pad).int(),
                **pixels,
                max_new_tokens=96,
                do_sample=False,
            )
            reply = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
            messages.append({"role": "assistant", "content": reply})
            given.append(reply)
        return given

    return answer


def mmkv_answerer(folder: str, policy: str | None, budget: float, gates: str | None) -> Answerer:
    """Answer in one session per dialogue; every turn adds its own tokens only."""
    import mmkv

    engine = mmkv.Engine.from_pretrained(folder, policy=policy, budget=budget, gates=gates)
    sampling = mmkv.Sampling.greedy(max_new_tokens=96)

    def answer(turns: list[SceneTurn]) -> list[str]:
        with engine.session() as session:
            return [
                "".join(
                    session.send(
                        turn.question.text,
                        images=[render(scene) for scene in turn.scenes()],
                        sampling=sampling,
                    )
                )
                for turn in turns
            ]

    return answer


def wilson(right: int, total: int) -> tuple[float, float]:
    """Compute the 95 % Wilson interval of a share (Wilson 1927)."""
    if not total:
        return (0.0, 1.0)
    z, share = 1.96, right / total
    middle = (share + z * z / (2 * total)) / (1 + z * z / total)
    half = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total**2))
    half /= 1 + z * z / total
    return (middle - half, middle + half)


def single_picture(seed: int, count: int) -> list[SceneTurn]:
    """Make ``count`` held-out questions, each about a picture of its own, kinds in turn."""
    import random

    rng = random.Random(f"accuracy-{seed}")
    kinds = ("cell", "locate", "colour", "count", "exists", "read", "list")
    asked: list[SceneTurn] = []
    while len(asked) < count:
        wanted = kinds[len(asked) % len(kinds)]
        found: Question | None = None
        while found is None:
            scene = make_scene(rng, "heldout")
            found = next((q for q in questions(scene, rng) if q.kind == wanted), None)
        asked.append(SceneTurn((scene,), found))
    return asked


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default=bundled_model_name())
    parser.add_argument("--backend", choices=("transformers", "mmkv"), default="transformers")
    parser.add_argument("--policy", default="full", help="mmkv only")
    parser.add_argument("--budget", type=float, default=256, help="M, entries per row (mmkv only)")
    parser.add_argument("--gates", help="mmkv only")
    parser.add_argument("--samples", type=int, default=1400, help="single-picture questions to ask")
    parser.add_argument(
        "--dialogues", type=int, default=0, help="dialogues of 3 pictures and 6 turns"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--output", type=Path, default=Path("benchmarks/results/accuracy-scenes.json")
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.backend == "transformers":
        answer = transformers_answerer(args.model)
    else:
        answer = mmkv_answerer(args.model, args.policy, args.budget, args.gates)
    from mmkv.training.data.scenes import dialogue

    jobs = [[turn] for turn in single_picture(args.seed, args.samples)]
    jobs += [dialogue(args.seed * 10**6 + i, "heldout", 3, 6) for i in range(args.dialogues)]
    right: dict[str, list[bool]] = defaultdict(list)
    console = Console(stderr=True)
    for turns in track(jobs, "asking", console=console):
        for turn, reply in zip(turns, answer(turns), strict=True):
            where = "" if len(turns) == 1 else "dialogue "
            right[where + turn.question.kind].append(reply.strip() == turn.question.answer)
    single = [hit for kind, hits in right.items() if " " not in kind for hit in hits]
    right["all single-picture"] = single
    rows = []
    table = Table(title=f"Exact answers, {args.model}, {args.backend}")
    for name in ("kind", "right", "of", "share", "95 % interval"):
        table.add_column(name)
    for kind, hits in sorted(right.items()):
        low, high = wilson(sum(hits), len(hits))
        share = sum(hits) / max(len(hits), 1)
        rows.append(
            {"kind": kind, "right": sum(hits), "of": len(hits), "share": share, "ci": [low, high]}
        )
        table.add_row(kind, str(sum(hits)), str(len(hits)), f"{share:.3f}", f"{low:.3f} {high:.3f}")
    Console().print(table)
    settings = {k: v for k, v in vars(args).items() if k != "output"}
    write_results(args.output, settings, rows)


if __name__ == "__main__":
    main()
