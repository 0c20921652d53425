"""The views of a trace as PNG files, by matplotlib."""

from __future__ import annotations

import io
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mmkv.engine.contents import MODALITIES
from mmkv.engine.errors import InputError
from mmkv.explain.snapshot import Snapshot, write

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    View = Callable[[Figure, Snapshot], None]

_COLOURS = ("#1d4ed8", "#c2410c", "#0f766e")
_MOST_FRAMES = 24
_MOMENTS = 4  # at which pictures and texts are shown


def draw(snapshot: Snapshot, folder: str | Path) -> list[Path]:
    """Write kept.png, rows.png, curves.png, text.png, pictures.png, why.png and tokens.png.

    Pictures only where there are some, ``why`` only where something was evicted.

    Raises:
        InputError: no matplotlib, or the folder cannot be written to.
    """
    require_matplotlib()  # before anything is written
    from mmkv.engine.paths import user_path

    target = user_path(folder)
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"cannot make the folder {target} ({error.strerror}); choose another"
        ) from error
    views: dict[str, View] = {
        "kept": _kept,
        "rows": _rows,
        "curves": _curves,
        "text": _text,
        "tokens": _tokens,
    }
    if snapshot.frames:
        views["pictures"] = _pictures
    if len(snapshot.record.deaths):
        views["why"] = _why
    return [write(target / f"{name}.png", _png(view, snapshot)) for name, view in views.items()]


def require_matplotlib() -> None:
    """Raise InputError where matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        raise InputError("figures need matplotlib; pip install 'mmkv[explain]' brings it")


def _png(view: View, snapshot: Snapshot) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5), layout="constrained")
    FigureCanvasAgg(figure)
    view(figure, snapshot)
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=110)
    return data.getvalue()


def held(snapshot: Snapshot, step: int) -> np.ndarray:
    """Which entries are held after ``step``, bool ``[rows, T]``."""
    row, position, _, born, died = snapshot.entries
    there = (born <= step) & (died > step)
    found = np.zeros((snapshot.rows, snapshot.tokens), bool)
    found[row[there], position[there]] = True
    return found


def _kept(figure: Figure, snapshot: Snapshot) -> None:
    row, position, _, born, died = snapshot.entries
    last = np.full((snapshot.rows, snapshot.tokens), np.nan)
    last[row, position] = np.minimum(died, len(snapshot.record.seen)) - born
    axes = figure.subplots()
    image = axes.imshow(last, aspect="auto", interpolation="nearest", cmap="viridis")
    axes.set(xlabel="token", ylabel="layer x KV head", title="Steps that each entry was held")
    figure.colorbar(image, ax=axes)


def _rows(figure: Figure, snapshot: Snapshot) -> None:
    axes = figure.subplots()
    counts = snapshot.per_row(np.arange(len(snapshot.record.seen)))
    image = axes.imshow(counts, aspect="auto", interpolation="nearest", cmap="Blues")
    axes.set(xlabel="step", ylabel="layer x KV head", title="Entries held by each (layer, KV head)")
    figure.colorbar(image, ax=axes)


def _curves(figure: Figure, snapshot: Snapshot) -> None:
    axes, counts, allowed = figure.subplots(), snapshot.counts(), snapshot.record.allowed
    for name, colour, line in zip(MODALITIES, _COLOURS, counts, strict=True):
        if line.any():
            axes.step(np.arange(len(line)), line, where="post", color=colour, label=name)
    most = counts.sum(0).max(initial=1)
    bound = np.where((allowed >= 0) & (allowed <= 2 * most), allowed, np.nan)
    axes.step(np.arange(len(bound)), bound, where="post", color="#be123c", ls="--", label="budget")
    axes.set(xlabel="step", ylabel="entries", title="Entries held by modality")
    axes.legend()


def _text(figure: Figure, snapshot: Snapshot) -> None:
    """Draw the share of heads that hold each token, at a few steps, over the tokens' words."""
    steps = _moments(snapshot)
    shares = np.stack([held(snapshot, step).mean(0) for step in steps])
    if snapshot.tokens <= 160:
        figure.set_size_inches(max(11, snapshot.tokens * 0.16), 4)
    axes = figure.subplots()
    image = axes.imshow(shares, aspect="auto", interpolation="nearest", cmap="Blues", vmin=0)
    axes.set_yticks(range(len(steps)), [f"step {step}" for step in steps])
    if snapshot.tokens <= 160:
        words = [_word(snapshot, at) for at in range(snapshot.tokens)]
        axes.set_xticks(range(snapshot.tokens), words, rotation=90, fontsize=7)
    axes.set_title("Share of the (layer, KV head)s that hold each token")
    figure.colorbar(image, ax=axes)


def _tokens(figure: Figure, snapshot: Snapshot) -> None:
    """Draw the tokens that most heads hold at the end, and those that none does: see fates."""
    count, last = snapshot.fates
    stay = np.argsort(-count, kind="stable")[: min(12, int((count > 0).sum()))]
    went = np.argsort(-last, kind="stable")  # the latest first
    went = went[count[went] == 0][:12]
    left, right = figure.subplots(1, 2)
    for axes, chosen, values in ((left, stay, count), (right, went, last)):
        axes.barh(range(len(chosen)), values[chosen], color=_COLOURS[0])
        axes.set_yticks(range(len(chosen)), [_word(snapshot, at) for at in chosen])
        axes.invert_yaxis()
    left.set(xlabel="(layer, KV head)s that hold it at the end", title="What stayed")
    right.set(
        xlabel="step at which the last (layer, KV head) let go", title="What went, latest first"
    )


def _pictures(figure: Figure, snapshot: Snapshot) -> None:
    from PIL import Image

    frames, steps = snapshot.frames[:_MOST_FRAMES], _moments(snapshot)
    figure.set_size_inches(2.4 * len(frames) + 0.6, 2.4 * len(steps) + 0.4)
    panes = figure.subplots(len(steps), len(frames), squeeze=False)
    for step, line in zip(steps, panes, strict=True):
        share = held(snapshot, step).mean(0)
        for frame, axes in zip(frames, line, strict=True):
            where = frame.start + np.arange(frame.high)[:, None] * frame.stride
            patches = share[where + np.arange(frame.wide)]
            box = (0, frame.wide, frame.high, 0)
            axes.imshow(np.asarray(Image.open(io.BytesIO(frame.jpeg))), extent=box)
            over = np.zeros((*patches.shape, 4))  # dark, or white where nothing is read yet
            over[..., 3] = 0.85 * (1 - np.sqrt(patches))
            over[where + np.arange(frame.wide) >= snapshot.record.seen[step]] = (1, 1, 1, 0.9)
            axes.imshow(over, extent=box, interpolation="nearest")
            axes.set(xticks=[], yticks=[], title=f"{frame.caption}, step {step}")
            axes.title.set_fontsize(8)


def _why(figure: Figure, snapshot: Snapshot) -> None:
    """Draw the score of the entry that was held longest before it went, and the cut."""
    row, position, log_beta, born, died = snapshot.entries
    age = np.where(died < len(snapshot.record.seen), died - born, -1)
    one = int(np.argmax(age))
    axes: Axes = figure.subplots()
    cut = snapshot.cuts()[snapshot.rule.group[row[one]]]
    steps = np.arange(born[one], died[one] + 1)
    this = slice(one, one + 1)
    scores = [snapshot.scores(step, position[this], log_beta[this]) for step in steps]
    known = [score for score in scores if score is not None]
    if known:
        axes.plot(steps, np.concatenate(known), color=_COLOURS[0], label="its score")
    else:
        last = snapshot.record.deaths["score"][one]
        axes.plot(died[one], last, "o", color=_COLOURS[0], label="its last score")
    axes.plot(np.arange(len(cut)), cut, color="#be123c", ls="--", label="highest score that went")
    for other, token, score in snapshot.just_above(int(died[one]), int(row[one]), 3):
        label = f"just above: {_head(snapshot, other)}, {_word(snapshot, token)}"
        axes.plot(died[one], score, "^", label=label)
    axes.set(
        xlabel="step",
        ylabel="score",
        title=f"Why {_head(snapshot, int(row[one]))} lost {_word(snapshot, int(position[one]))} "
        f"at step {died[one]}",
    )
    axes.legend()


def _moments(snapshot: Snapshot) -> list[int]:
    last = len(snapshot.record.seen) - 1
    return sorted({round(last * (at + 1) / _MOMENTS) for at in range(_MOMENTS)})


def _head(snapshot: Snapshot, row: int) -> str:
    layer, head = divmod(row, snapshot.record.kv_heads)
    return f"layer {layer}, KV head {head}"


def _word(snapshot: Snapshot, token: int) -> str:
    for frame in snapshot.frames:
        y, x = divmod(token - frame.start, frame.stride)
        if 0 <= y < frame.high and x < frame.wide:
            return f"{frame.caption} ({y + 1}, {x + 1})"
    text = snapshot.texts[token] or MODALITIES[snapshot.record.modality[token]]
    # Dollar signs begin mathematics in matplotlib's texts.
    return ascii(text)[1:-1].replace("$", r"\$")[:24]
