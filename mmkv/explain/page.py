"""The page of a trace: one HTML file with its data, that needs no network and sends nothing.

All that it draws follows from three matrices: after which step each entry was gone, each entry's
log beta, and the highest score that went at each step. They are compressed; what is too much for
the page's size is left out, in an order that :func:`_levels` fixes, and the page says so.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import math
import zlib
from collections.abc import Container, Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from mmkv.engine.errors import InputError
from mmkv.engine.paths import user_path
from mmkv.engine.trace import KINDS
from mmkv.explain.snapshot import Region, Rule, Snapshot
from mmkv.web import web_file

MOST_BYTES = 2_900_000  # of a page
_MOST_CELLS = 1_500_000  # (row, token) pairs
_MOST_STEPS, _MOST_TOKENS = 4096, 2**16
_FEW_CELLS = 50_000  # so many may have numbers of four bytes each
_PICTURE_BYTES, _MOST_PICTURES = 900_000, 256
_EDGES = (512, 384, 256, 192, 128, 96, 64)
_NEVER = 65535
_MOST_REGIONS = 100
_FORMAT = 2  # of the data, for read_page


@dataclass(frozen=True)
class _Detail:
    """How much of a trace goes on a page.

    ``levels``: of log beta, 0: as they are; ``tokens``: the latest ones.
    """

    cells: int
    steps: int
    levels: int
    tokens: int
    pictures: bool = True


def render(snapshot: Snapshot, other: dict[str, Any] | None = None) -> str:
    """Return the page, beside ``other`` from :func:`read_page`; the same again for the same input.

    Raises:
        InputError: the other page leaves no room for this one.
    """
    pictures, beside = _pictures(snapshot), {} if other is None else {"other": other}
    page = ""
    packed: dict[tuple[int, ...], Any] = {}
    for detail in _levels(snapshot):
        shown = pictures if detail.pictures else {"frames": [], "jpegs": []}
        page = _page(_data(snapshot, detail, packed) | shown | beside)
        if len(page) <= MOST_BYTES:
            break
    else:
        if other is not None:
            raise InputError(
                "the page to compare with leaves no room on this one; compare shorter conversations"
            )
    return page


def page_data(path: str | Path) -> dict[str, Any]:
    """Return all that a page of :func:`render` draws from, as :func:`_data` makes it.

    Raises:
        InputError: it cannot be read, is no such page, or was written by another version.
    """
    file = user_path(path)
    try:
        with file.open("rb") as opened:
            text = opened.read(2 * MOST_BYTES).decode("utf-8", "replace")
    except OSError as error:
        raise InputError(
            f"cannot read {file} ({error.strerror}); name a page of mmkv explain"
        ) from error
    try:
        data: dict[str, Any] = json.loads(text.partition('id="data">')[2].partition("</script>")[0])
        if data["format"] != _FORMAT or not {"lives", "curves"} <= data["blobs"].keys():
            raise ValueError(data["format"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(
            f"{file} is no page of this version's mmkv explain; write it again, and name that"
        ) from error
    return data


def read_page(path: str | Path) -> dict[str, Any]:
    """Return what a page of :func:`render` shows, to be put beside another one.

    What only a page of its own shows is left out: scores, and what it was compared with.

    Raises:
        InputError: as :func:`page_data`.
    """
    data = page_data(path)
    blobs = {name: data["blobs"][name] for name in ("lives", "curves")}
    return data | {"blobs": blobs, "other": None, "sampleSteps": [], "notes": []}


def _levels(snapshot: Snapshot) -> Iterator[_Detail]:
    """Ever less to show, until it fits."""
    cells = snapshot.rows * min(snapshot.tokens, _MOST_TOKENS)
    if cells <= _FEW_CELLS:
        yield _Detail(cells, _MOST_STEPS, 0, _MOST_TOKENS)
    for levels in (255, 63, 15) if snapshot.rule.kernel == "retention" else (15,):
        yield _Detail(_MOST_CELLS, _MOST_STEPS, levels, _MOST_TOKENS)
    cells, steps = min(cells, _MOST_CELLS), min(_MOST_STEPS, 1024)
    for part in (2, 4, 8, 16, 32):
        yield _Detail(cells // part, steps, 15, _MOST_TOKENS)
    tokens = min(_MOST_TOKENS, snapshot.tokens)
    for part in (2, 4, 8, 16):
        yield _Detail(cells // 32, steps, 15, tokens // part)
    for part in (16, 64, 256, 1024):  # a page without a text says at least how much was held
        yield _Detail(cells // 32, steps // 4, 15, tokens // part, False)


def _page(data: dict[str, Any]) -> str:
    folder = files("mmkv.explain")
    style = web_file("base.css").decode() + (folder / "page.css").read_text("utf-8")
    theme = web_file("theme.js").decode()
    names = ("model.js", "draw.js", "view.js")
    script = "".join((folder / name).read_text("utf-8") for name in names)

    def allowed(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    policy = (
        f"default-src 'none'; img-src data:; script-src {allowed(theme)} "
        f"{allowed(script)}; style-src {allowed(style)}; base-uri 'none'; form-action 'none'"
    )
    # No text of a prompt can end the element that it lies in.
    text = json.dumps(data, ensure_ascii=True, separators=(",", ":")).replace("<", "\\u003c")
    page = (folder / "page.html").read_text("utf-8")
    parts = {"policy": policy, "style": style, "theme": theme, "script": script, "data": text}
    head, *rest = page.split("{{")
    pieces = [head]
    for part in rest:
        name, _, after = part.partition("}}")
        pieces += [parts[name], after]
    return "".join(pieces)


def _data(
    snapshot: Snapshot, detail: _Detail, packed: dict[tuple[int, ...], Any]
) -> dict[str, Any]:
    """Return what the page reads; ``packed`` keeps what is long in the making for a next try."""
    record, rule = snapshot.record, snapshot.rule
    first = max(snapshot.tokens - max(detail.tokens, 1), 0)
    tokens, heads = snapshot.tokens - first, record.kv_heads
    steps = _chosen(len(record.seen), detail.steps)
    per_row = snapshot.per_row(steps)
    room = max(detail.cells // max(tokens, 1), 1)
    rows = np.sort(np.argsort(-per_row.sum(1), kind="stable")[:room])
    cells = _cells(snapshot, rows, first, tokens, steps)
    shape = (len(rows), len(steps), tokens)
    if shape not in packed:
        packed[shape] = _blob(cells["life"], "u2")
    blobs: dict[str, Any] = {
        "lives": packed[shape],
        "curves": _blob(snapshot.counts()[:, steps], "u4"),
    }
    made, scale = _score_blobs(rule, detail, cells)
    blobs |= made
    if cells["cause"].any():
        blobs["causes"] = _blob(cells["cause"], "u1")
    cuts = _by_frame(snapshot.cuts(), steps)
    if cuts.size <= _FEW_CELLS:
        blobs["cuts"] = _blob(cuts, "f4")
    samples = _samples(snapshot, rows, first, tokens, steps)
    if len(samples):
        blobs["sampled"] = _blob(np.stack([values for _, values in samples]), "f4")
    needed, attention, paid = snapshot.needed(), snapshot.attention, []
    if attention is not None:
        mean = np.zeros(snapshot.tokens, np.float32)
        mean[: attention.shape[1]] = attention.mean(0)
        blobs["attention"] = _blob(mean[first:], "f4")
        if needed is not None:
            paid = [float(f"{share:.4g}") for share in attention[rows, needed]]
    return {
        "format": _FORMAT,
        "headline": snapshot.headline(),
        "detail": snapshot.detail(),
        "needed": -1 if needed is None or needed < first else needed - first,
        "paid": paid,
        "forgotten": [[one.name, round(one.risk, 4)] for one in _regions(snapshot)],
        "reply": snapshot.reply,
        "run": f"{snapshot.policy}, {snapshot.budget}",
        "facts": _facts(snapshot),
        "notes": _notes(snapshot, detail, rows, steps, first, blobs),
        "rows": rows.tolist(),
        "names": [f"layer {row // heads}, KV head {row % heads}" for row in rows.tolist()],
        "heads": heads,
        "seen": record.seen[steps].tolist(),
        "allowed": record.allowed[steps].tolist(),
        "kinds": "".join(map(str, record.kind[steps].tolist())),
        "kindNames": KINDS,
        "texts": snapshot.texts[first:],
        "modality": "".join(map(str, record.modality[first:].tolist())),
        "first": first,
        "range": scale,
        "rule": {
            "kernel": rule.kernel,
            "lookahead": None if math.isinf(rule.lookahead) else rule.lookahead,
            "shift": rule.age_shift,
            "first": rule.first,
            "recent": rule.recent,
            "shared": rule.shared,
            "bonus": rule.bonus,
            "group": rule.group[rows].tolist(),
            "sizes": np.bincount(rule.group).tolist(),  # shown or not
        },
        "sampleSteps": [step for step, _ in samples],
        "blobs": blobs,
    }


def _score_blobs(
    rule: Rule, detail: _Detail, cells: dict[str, np.ndarray]
) -> tuple[dict[str, Any], list[float] | None]:
    """Return what the page makes scores of, and the range of log betas that are rounded."""
    if rule.kernel == "retention" and detail.levels:
        codes, scale = _coded(cells["log_beta"], detail.levels)
        return {"beta": _blob(codes, "u1")}, scale
    if rule.kernel == "retention":
        return {"beta": _blob(cells["log_beta"], "f4")}, None
    few = cells["score"].size <= _FEW_CELLS
    return {"lastScores": _blob(cells["score"], "f4")} if few else {}, None


def _chosen(steps: int, most: int) -> np.ndarray:
    """Return the steps that are shown, ascending, the first and the last among them."""
    if steps <= most:
        return np.arange(steps)
    return np.unique(np.linspace(0, steps - 1, most).round().astype(np.int64))


def _cells(
    snapshot: Snapshot, rows: np.ndarray, first: int, tokens: int, steps: np.ndarray
) -> dict[str, np.ndarray]:
    """Return per shown row and token: how long the entry stood, its log beta, score, and cause.

    ``life``: 1 more than the shown steps from the first to the one it was gone at; 0 where it was
    gone before the recording, :data:`_NEVER` where it still stands.
    """
    row, position, log_beta, _, died = snapshot.entries
    place = np.full(snapshot.rows, -1)
    place[rows] = np.arange(len(rows))
    dead = len(snapshot.record.deaths)
    score, cause = np.zeros(len(row), np.float32), np.zeros(len(row), np.uint8)
    score[:dead] = snapshot.record.deaths["score"]
    cause[:dead] = snapshot.record.deaths["cause"]
    shown = (place[row] >= 0) & (position >= first)
    at = (place[row[shown]], position[shown] - first)
    born = np.searchsorted(snapshot.record.seen[steps], position, side="right")
    life = np.searchsorted(steps, died) - born + 1
    life[died == len(snapshot.record.seen)] = _NEVER
    made = {}
    for name, values, fill, kind in (
        ("life", life, 0, np.uint16),
        ("log_beta", log_beta, 0, np.float32),
        ("score", score, np.nan, np.float32),
        ("cause", cause, 0, np.uint8),
    ):
        made[name] = np.full((len(rows), tokens), fill, kind)
        made[name][at] = values[shown]
    return made


def _coded(log_beta: np.ndarray, levels: int) -> tuple[np.ndarray, list[float]]:
    """Round the logarithm of -log beta to ``levels`` steps; code 255 is a log beta of 0."""
    never = log_beta == 0
    size = np.log(np.where(never, 1, -log_beta.astype(np.float64)))
    real = size[~never]
    low, high = (float(real.min()), float(real.max())) if real.size else (0.0, 0.0)
    code = np.rint((size - low) / ((high - low) or 1.0) * (levels - 1)).clip(0, levels - 1)
    return np.where(never, 255, code).astype(np.uint8), [low, high, levels]


def _by_frame(cuts: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Return ``cuts [G, S]`` by shown step: the highest of those that it stands for."""
    if len(steps) == cuts.shape[1]:
        return cuts
    found = np.full((len(cuts), len(steps)), -np.inf, np.float32)
    where = np.broadcast_to(np.searchsorted(steps, np.arange(cuts.shape[1])), cuts.shape)
    group = np.broadcast_to(np.arange(len(cuts))[:, None], cuts.shape)
    real = ~np.isnan(cuts)
    np.maximum.at(found, (group[real], where[real]), cuts[real])
    found[np.isneginf(found)] = np.nan
    return found


def _samples(
    snapshot: Snapshot, rows: np.ndarray, first: int, tokens: int, steps: np.ndarray
) -> list[tuple[int, np.ndarray]]:
    """Return (shown step, scores ``[rows, tokens]``, NaN elsewhere) as far as there is room."""
    place = np.full(snapshot.rows, -1)
    place[rows] = np.arange(len(rows))
    shown = [sample for sample in snapshot.record.samples if sample[0] in steps]
    room = 3 * _FEW_CELLS // max(len(rows) * tokens, 1)
    every = max(-(-len(shown) // room), 1) if room else len(shown) + 1
    found = []
    for step, row, position, score in shown[::every] if room else []:
        values = np.full((len(rows), tokens), np.nan, np.float32)
        inside = (place[row] >= 0) & (position >= first)
        values[place[row[inside]], position[inside] - first] = score[inside]
        found.append((int(np.searchsorted(steps, step)), values))
    return found


def _blob(values: np.ndarray, kind: str) -> dict[str, Any]:
    """Compress numbers, the lowest bytes of all first, then the next."""
    whole = np.ascontiguousarray(values.astype(f"<{kind}"))
    width = whole.itemsize
    planes = whole.view(np.uint8).reshape(-1, width).T.tobytes()
    packed = base64.b64encode(zlib.compress(planes, 9)).decode()
    return {"kind": kind, "width": width, "base64": packed}


def _pictures(snapshot: Snapshot) -> dict[str, Any]:
    """Return frames and their JPEGs, smaller ones where there are many."""
    unique = list(dict.fromkeys(frame.jpeg for frame in snapshot.frames))[:_MOST_PICTURES]
    made = unique
    for edge in _EDGES:
        if sum(map(len, made)) <= _PICTURE_BYTES:
            break
        made = [_smaller(jpeg, edge) for jpeg in unique]
    if sum(map(len, made)) > _PICTURE_BYTES:
        made = []
    number = {jpeg: 1 + at for at, jpeg in enumerate(unique[: len(made)])}
    frames = []
    for frame in snapshot.frames[:_MOST_PICTURES]:
        given = {name: value for name, value in vars(frame).items() if name != "jpeg"}
        frames.append(given | {"jpeg": number.get(frame.jpeg, 0)})
    return {"frames": frames, "jpegs": [base64.b64encode(jpeg).decode() for jpeg in made]}


def _smaller(jpeg: bytes, edge: int) -> bytes:
    from PIL import Image

    from mmkv.explain.snapshot import encoded

    return encoded(Image.open(io.BytesIO(jpeg)), edge)


def _regions(snapshot: Snapshot) -> list[Region]:
    """Return the regions that are listed, in their order: those that are forgotten most."""
    found = snapshot.regions()
    most = sorted(range(len(found)), key=lambda at: -found[at].risk)[:_MOST_REGIONS]
    return [found[at] for at in sorted(most)]


def _facts(snapshot: Snapshot) -> str:
    record = snapshot.record
    held, total = len(record.row), snapshot.tokens * snapshot.rows
    return (
        f"{snapshot.model}, {record.layers} layers of {record.kv_heads} KV heads; policy "
        f"{snapshot.policy}, budget {snapshot.budget}; {snapshot.tokens:,} tokens seen, {held:,} "
        f"of {total:,} entries held at the end."
    )


def _notes(
    snapshot: Snapshot,
    detail: _Detail,
    rows: np.ndarray,
    steps: np.ndarray,
    first: int,
    blobs: Container[str],
) -> list[str]:
    """Say what the page leaves out."""
    notes, record = [], snapshot.record
    if record.seen[0]:
        notes.append(
            f"The recording begins after {int(record.seen[0]):,} tokens; what was gone by then is "
            "not shown."
        )
    if len(rows) < snapshot.rows:
        notes.append(
            f"{len(rows)} of {snapshot.rows} heads (layer, KV head) are shown, those that hold "
            "most; the first sentence and the timeline are of all, everything else of those."
        )
    if len(steps) < len(record.seen):
        notes.append(f"{len(steps):,} of {len(record.seen):,} steps are shown.")
    if first:
        notes.append(f"The first {first:,} tokens are not shown.")
    if (regions := len(snapshot.regions())) > _MOST_REGIONS:
        notes.append(f"Of {regions:,} pictures and turns the most forgotten are listed.")
    if detail.levels and snapshot.rule.kernel == "retention":
        notes.append(
            f"Log beta is rounded to {detail.levels} levels, so that scores on this page are "
            "approximate; what was kept is exact."
        )
    if snapshot.rule.kernel == "other" and len(record.deaths):
        places = {"lastScores": "where an entry went", "sampled": "of others at some steps"}
        shown = [place for name, place in places.items() if name in blobs]
        notes.append(
            "This policy's scores do not follow from what is recorded: they are "
            + (f"known {', and '.join(shown)}." if shown else "not shown, for want of room.")
        )
    if snapshot.frames and not detail.pictures:
        notes.append("Pictures and video frames are not shown.")
    elif len(snapshot.frames) > _MOST_PICTURES:
        notes.append(f"The first {_MOST_PICTURES} pictures and video frames are shown.")
    return notes
