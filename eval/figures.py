"""Draw the figures of README.md: ``python -m eval.figures`` writes docs/figures/.

``accuracy.svg`` shows accuracy against the budget, from the result files. ``kept.svg`` shows which
entries of one dialogue the bundled model still holds at its end.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.policies import Budget
from engine.runtime import Runtime
from eval.serving.tables import draw_speed, speed_values
from mmkv.data.sources import examples
from mmkv.measure.record import RESULTS, ROOT
from mmkv.measure.teacher_forced import spans
from mmkv.resources import bundled_model

FIGURES = ROOT / "docs" / "figures"
_COLOURS = {
    "dbtrimkv": "#0b6e4f",
    "trimkv": "#d1495b",
    "snapkv": "#7a6fb0",
    "streamingllm": "#8d99ae",
}
_PANELS = {
    "quality-tiny-vlm-dense": "dense: any picture may be asked about",
    "quality-tiny-vlm-sparse": "sparse: most pictures never matter",
    "quality-smollm2-recall": "facts in text, SmolLM2-135M",
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
        per result file ``full`` and, per method, ``[budget, value, low, high]`` rows.
    """
    drawn: dict[str, Any] = {}
    for name in _PANELS:
        (page,) = json.loads((results / f"{name}.json").read_text())["results"].values()
        drawn[name] = {"full": page["rows"][0]["accuracy"]["value"]}
        for method in _COLOURS:
            rows = [row for row in page["rows"] if row["method"] == method]
            drawn[name][method] = [
                [row["budget"], *(row["accuracy"][key] for key in ("value", "low", "high"))]
                for row in rows
            ]
    return drawn


def digest(values: Mapping[str, Any]) -> str:
    """Identify what a figure was drawn from; it stands in the file, and a test compares it."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def draw_accuracy(values: Mapping[str, Any], path: Path) -> None:
    """Draw accuracy and its interval against the budget: a panel per result, a line per method."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.3), layout="constrained")
    panels = figure.subplots(1, len(_PANELS), sharey=True)
    for panel, (name, title) in zip(panels, _PANELS.items(), strict=True):
        drawn = values[name]
        panel.axhline(drawn["full"], color="0.4", linestyle="--", linewidth=1, label="full cache")
        for method, colour in _COLOURS.items():
            rows = drawn[method]
            x = [float(Fraction(row[0])) for row in rows]
            panel.plot(x, [r[1] for r in rows], "o-", color=colour, markersize=4, label=method)
            low, high = ([row[i] for row in rows] for i in (2, 3))
            panel.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
        budgets = [row[0] for row in drawn["dbtrimkv"] if row[0] != "1/5"]
        panel.set(xscale="log", ylim=(0, 1.02), title=title, xlabel="budget, share of the dialogue")
        panel.set_xticks([float(Fraction(budget)) for budget in budgets], budgets)
        panel.minorticks_off()
        panel.grid(alpha=0.25)
        panel.title.set_fontsize(10)
        panel.invert_xaxis()
    panels[0].set_ylabel("right answers")
    panels[0].legend(fontsize=8, loc="lower left")
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
        shown[index, kept.numpy()] += 3

    figure = Figure(figsize=(10, 3.4), layout="constrained")
    panel = figure.subplots()
    colours = ListedColormap(list(_KINDS.values()))
    panel.imshow(shown, aspect="auto", cmap=colours, vmin=0, vmax=5, interpolation="nearest")
    heads = runtime.spec.num_kv_heads
    layers = range(runtime.spec.num_layers)
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
    from mmkv.prompt.processing import load_processor

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
    parser = argparse.ArgumentParser(prog="python -m eval.figures", description=__doc__)
    parser.add_argument("--output", type=Path, default=FIGURES, help="folder of the figures")
    args = parser.parse_args(arguments)
    args.output.mkdir(parents=True, exist_ok=True)
    draw_accuracy(accuracy_values(RESULTS), args.output / "accuracy.svg")
    draw_kept(args.output / "kept.svg")
    speeds = speed_values(RESULTS)
    _save(draw_speed(speeds), args.output / "serving.svg", digest(speeds))


if __name__ == "__main__":
    main()
