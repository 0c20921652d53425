"""Tables and figure of the decode benchmark."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmkv.eval.bench.names import FULL, OWN
from mmkv.eval.bench.output import curves, table
from mmkv.eval.bench.targets import PUBLISHED


def show(shape: str, case: dict[str, Any]) -> None:
    """Print one case."""
    rows = []
    for name, method in case["methods"].items():
        if "failed" in method:
            rows.append([name, "-", "-", "-", "-", method["failed"]])
            continue
        low, high = method["ms_per_step"]["quartiles"]
        over = f"{method['step_over_floor']:.2f}" if "step_over_floor" in method else ""
        memory = method.get("memory")
        kv = f"{memory['kv_bytes'] / 1e9:.3f} GB KV" if memory else ""
        rows.append(
            [
                name,
                method["batch"],
                f"{method['ms_per_step']['median']:.3f} ({low:.3f} .. {high:.3f})",
                f"{method['tokens_per_second']:,.0f}",
                over,
                kv,
            ]
        )
    for name, speed in PUBLISHED.get(
        (shape, case["batch"], case["context"], case["budget"]), {}
    ).items():
        rows.append(
            [f"{name} (paper)", case["batch"], "", f"{speed:,}", "", "published, on one H200"]
        )
    names = ("method", "batch", "ms per step", "tokens/s", "step / floor", "")
    kind = f"{case['kind']}: {case['context']} tokens seen, M = {case['budget']}"
    table(f"{shape}, {kind}", names, rows)
    parts = case.get("parts", {})
    if "failed" in parts:
        print(f"the parts of a step could not be measured: {parts['failed']}")
    elif parts:
        parts = parts["ms"]
        table("ms of our evicting step", list(parts), [[f"{v:.3f}" for v in parts.values()]])


def figure(args: argparse.Namespace, cases: Sequence[dict[str, Any]]) -> Path | None:
    """Plot the tokens per second against the batch, for the cases of the grid."""
    lines: dict[str, tuple[list[Any], list[Any]]] = {}
    for case in cases:
        for method, name in ((OWN, f"M = {case['budget']}"), (FULL, f"full, {case['context']}")):
            speed = case["methods"].get(method, {}).get("tokens_per_second")
            if case["kind"] == "grid" and speed:
                x, y = lines.setdefault(name, ([], []))
                x.append(case["batch"])
                y.append(speed)
    if not lines:
        return None
    path: Path = args.output / f"{args.name or f'gpu-decode-{args.shape}'}.png"
    return curves(path, args.shape, ("sequences in a batch", "tokens/s"), lines)


def show_targets(targets: Sequence[dict[str, Any]]) -> None:
    """Print which targets are met."""
    rows = [
        [
            target["target"],
            f"{target['value']:.3f}",
            target["wanted"],
            "yes" if target["met"] else "NO",
        ]
        for target in targets
    ]
    table("Targets", ("target", "value", "wanted", "met"), rows)
