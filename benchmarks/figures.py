"""Draw the figures of the documents: ``python -m benchmarks.figures``.

``accuracy.svg`` shows accuracy against the bytes of the cache, for every form of keys and values
and for other methods in bfloat16, from the result files. ``kept.svg`` shows which entries of one
dialogue the bundled model still holds at its end.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.serving.load import draw_speed, speed_values
from mmkv.engine.cache.layout import Layout
from mmkv.engine.policies import Budget
from mmkv.engine.runtime import Runtime
from mmkv.resources import bundled_model
from mmkv.training.data.examples import examples
from mmkv.training.measure.record import RESULTS, ROOT
from mmkv.training.measure.teacher_forced import spans

README_FIGURES = ROOT / "docs" / "figures"
FIGURES = ROOT / "benchmarks" / "notes" / "figures"
# Forms of the cache under dbtrimkv; then other methods, whose entries are counted in bfloat16.
_FORMS = {"int4": "#e07a1f", "k8v4": "#0b6e4f", "int8": "#3d7ea6", "bf16": "#22304a"}
_OTHERS = {"trimkv": "#d1495b", "snapkv": "#7a6fb0", "streamingllm": "#8d99ae"}


@dataclass(frozen=True)
class _Panel:
    """One kind of dialogue: its title, the result file of other methods, and head_dim."""

    title: str
    others: str
    head_dim: int


_PANELS = {
    "quality-bytes-dense": _Panel("dense: any picture may be asked", "quality-tiny-vlm-dense", 32),
    "quality-bytes-sparse": _Panel("sparse: most never matter", "quality-tiny-vlm-sparse", 32),
    "quality-bytes-256-distractors": _Panel(
        "256 distractors", "quality-tiny-vlm-256-distractors", 32
    ),
    "quality-bytes-recall": _Panel("facts in text, SmolLM2", "quality-smollm2-recall", 64),
}
# Token kinds of kept.svg; evicted ones are pale.
_KINDS = {
    "text, evicted": "#ffffff",
    "ignored picture, evicted": "#e3e5ea",
    "numbered picture, evicted": "#bfe3d4",
    "text, kept": "#22304a",
    "ignored picture, kept": "#d1495b",
    "numbered picture, kept": "#0b6e4f",
}


def accuracy_values(results: Path) -> dict[str, Any]:
    """Return the values that ``accuracy.svg`` draws.

    Returns:
        per result file ``full``; ``bytes``: of a whole dialogue in bfloat16, on average; and per
        form and method ``[budget, value, low, high]`` rows, budgets as shares of these bytes.
    """
    drawn: dict[str, Any] = {}
    for name, panel in _PANELS.items():
        (page,), (other,) = (
            json.loads((results / f"{file}.json").read_text())["results"].values()
            for file in (name, panel.others)
        )
        entry = Layout(1, panel.head_dim, torch.bfloat16).entry_bytes()
        rows = np.size(page["rows"][0]["entries_by_row"])
        drawn[name] = {
            "full": page["rows"][0]["accuracy"]["value"],
            "bytes": round(page["context_tokens"]["mean"] * rows * entry),
        }
        budgets = {row["budget"] for row in page["rows"]}
        for source, methods in ((page, _FORMS), (other, _OTHERS)):
            for method in methods:
                drawn[name][method] = [
                    [row["budget"], *(row["accuracy"][key] for key in ("value", "low", "high"))]
                    for row in source["rows"]
                    if row["method"] == method and row["budget"] in budgets
                ]
    return drawn


def digest(values: Mapping[str, Any]) -> str:
    """Identify what a figure was drawn from; it stands in the file, and a test compares it."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def draw_accuracy(values: Mapping[str, Any], path: Path) -> None:
    """Draw accuracy and its interval against bytes: a panel per result, a line per method."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.9 * len(_PANELS) + 1.2, 3.4), layout="constrained")
    panels = figure.subplots(1, len(_PANELS), sharey=True, squeeze=False)[0]
    for shown, (name, panel) in zip(panels, _PANELS.items(), strict=True):
        drawn = values[name]
        shown.axhline(drawn["full"], color="0.4", linestyle="--", linewidth=1, label="full cache")
        for method, colour in {**_FORMS, **_OTHERS}.items():
            rows, ours = drawn[method], method in _FORMS
            x = [float(Fraction(row[0])) for row in rows]
            label = f"dbtrimkv, {method}" if ours else f"{method}, bf16"
            shown.plot(
                x,
                [row[1] for row in rows],
                "o-" if ours else "s:",
                color=colour,
                markersize=4 if ours else 2.5,
                linewidth=1.5 if ours else 1,
                label=label,
            )
            if ours:
                low, high = ([row[i] for row in rows] for i in (2, 3))
                shown.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
        budgets = [row[0] for row in drawn["bf16"]]
        shares = [Fraction(budget) for budget in budgets]
        labels = [
            f"{float(share) * drawn['bytes'] / 2**10:,.0f} KiB\n({budget})"
            for share, budget in zip(shares, budgets, strict=True)
        ]
        shown.set(xscale="log", ylim=(0, 1.02), title=panel.title)
        shown.set_xticks([float(share) for share in shares], labels, fontsize=7)
        shown.minorticks_off()
        shown.grid(alpha=0.25)
        shown.title.set_fontsize(9)
    panels[0].set_ylabel("right answers")
    figure.supxlabel(
        "bytes of the cache's entries (share of the whole dialogue in bfloat16)", fontsize=9
    )
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", fontsize=7)
    _save(figure, path, digest(values))


def draw_kept(path: Path, share: Fraction = Fraction(1, 16), seed: int = 4) -> None:
    """Draw what each (layer, KV head) of the bundled model keeps of one sparse dialogue."""
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    model = str(bundled_model())
    example = examples(model, ["scenes:sparse"], 1, seed, split="heldout")[0]
    fraction = Budget.fraction(float(share))
    runtime = Runtime.from_pretrained(model, budget=fraction, prefill_chunk=16)
    sequence = runtime.session()
    inputs = {key: value for key, value in example.items() if key not in ("labels", "cuts")}
    sequence.prefill(inputs)
    kinds = _token_kinds(model, inputs)
    shown = np.stack([kinds] * runtime.spec.rows)
    for index, kept in enumerate(row for layer in sequence.retained() for row in layer):
        shown[index, kept.numpy()] += 3  # from evicted to kept, in the order of _KINDS

    figure = Figure(figsize=(10, 3.4), layout="constrained")
    panel = figure.subplots()
    colours = ListedColormap(list(_KINDS.values()))
    panel.imshow(shown, aspect="auto", cmap=colours, vmin=0, vmax=5, interpolation="nearest")
    heads = runtime.spec.num_kv_heads
    layers = range(runtime.spec.entry_layers)
    panel.set_yticks(
        [heads * layer + (heads - 1) / 2 for layer in layers], [str(layer) for layer in layers]
    )
    for layer in layers[1:]:
        panel.axhline(heads * layer - 0.5, color="0.7", linewidth=0.6)
    panel.set(xlabel="token of the dialogue", ylabel=f"layer, {heads} KV heads each")
    patches = [Patch(facecolor=c, edgecolor="0.6", label=kind) for kind, c in _KINDS.items()]
    figure.legend(handles=patches, loc="outside upper center", ncols=3, fontsize=8)
    _save(figure, path, f"{share} of {shown.shape[1]} tokens")


def _token_kinds(model: str, inputs: Mapping[str, Any]) -> np.ndarray:
    """Return per token 0 for text, 1 for an ignored picture, 2 for a numbered one."""
    from mmkv.prompt.loading import load_processor

    tokenizer = load_processor(model).tokenizer
    ids: torch.Tensor = inputs["input_ids"][0]
    image = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    kinds = np.zeros(ids.numel(), int)
    for start, stop in spans(torch.where(ids == image, ids, -100).tolist()):
        before = tokenizer.decode(ids[max(start - 4, 0) : start])
        kinds[start:stop] = 1 if "ignore" in before else 2
    return kinds


def _save(figure: Any, path: Path, drawn_from: str) -> None:
    import matplotlib

    # The same figure is the same file: no date, no random ids.
    with matplotlib.rc_context({"svg.hashsalt": "mmkv", "svg.fonttype": "path"}):
        figure.savefig(path, metadata={"Date": None, "Description": drawn_from}, dpi=100)


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw all figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.figures", description=__doc__)
    parser.add_argument("--output", type=Path, help="one folder for all, not where they belong")
    args = parser.parse_args(arguments)
    figures, kept = args.output or FIGURES, args.output or README_FIGURES
    for folder in (figures, kept):
        folder.mkdir(parents=True, exist_ok=True)
    draw_accuracy(accuracy_values(RESULTS), figures / "accuracy.svg")
    draw_kept(kept / "kept.svg")
    speeds = speed_values(RESULTS)
    _save(draw_speed(speeds), figures / "serving.svg", digest(speeds))


if __name__ == "__main__":
    main()
