"""Trace: the record of a session together with its words and pictures, ready to be shown."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from engine.errors import InputError
from engine.policies.base import kernel_of
from engine.policies.score import lookahead_log_score
from engine.policies.scoring import Retention
from engine.sequence import MODALITIES
from engine.trace import EVICTED, Record

if TYPE_CHECKING:
    from PIL.Image import Image

    from engine.sequence import CachedSequence
    from mmkv.prompt.video import Clip

# Longest edge of what is kept of a picture, of a video's frame, in pixels.
PICTURE_EDGE, FRAME_EDGE = 512, 256
_QUALITY = 80


@dataclass(frozen=True)
class Frame:
    """A picture, or what one temporal patch of a video shows, and the tokens that stand for it.

    Attributes:
        kind: an index of ``MODALITIES``; media: number of the picture or video in the session.
        caption: what it is; start: position of its first token; the token of row y and column x is
            ``start + y * stride + x``, for ``high`` rows of ``wide`` columns.
        jpeg: the picture, encoded anew.
    """

    kind: int
    media: int
    caption: str
    start: int
    high: int
    wide: int
    stride: int
    jpeg: bytes


@dataclass(frozen=True)
class Rule:
    """How scores are made, as far as they follow from what is recorded.

    Attributes:
        kernel: ``retention``, ``recency``, or anything else: scores are known of
            those that went, and of samples.
        lookahead, age_shift: of retention; first, recent: tokens protected at either end.
        group: int64 ``[rows]``, rows of the same number compete.
    """

    kernel: str
    lookahead: float
    age_shift: int
    first: int
    recent: int
    group: np.ndarray


@dataclass(frozen=True)
class Snapshot:
    """A trace up to now, on the host; see :class:`engine.trace.Record` for S, T and D.

    Attributes:
        texts: what each token says, ``[T]``; frames: pictures and video frames in order.
        policy, budget, model: in words.
    """

    record: Record
    rule: Rule
    texts: list[str]
    frames: list[Frame]
    policy: str
    budget: str
    model: str

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.record.layers * self.record.kv_heads

    @property
    def tokens(self) -> int:
        """T."""
        return len(self.record.token_ids)

    @cached_property
    def entries(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Row, position, log beta, first step, and step of death of each entry that ever stood.

        Those that live have S for a step of death.
        """
        record, dead = self.record, self.record.deaths
        row = np.concatenate([dead["row"], record.row]).astype(np.int64)
        position = np.concatenate([dead["position"], record.position]).astype(np.int64)
        log_beta = np.concatenate([dead["log_beta"], record.log_beta])
        alive = np.full(len(record.row), len(record.seen))
        return row, position, log_beta, record.born_at(position), np.append(record.died_at, alive)

    def counts(self) -> np.ndarray:
        """Entries held after each step, int64 ``[modalities, S]``."""
        _, position, _, born, died = self.entries
        steps, kind = len(self.record.seen), self.record.modality[position].astype(np.int64)
        change = np.zeros((len(MODALITIES), steps + 1), np.int64)
        np.add.at(change, (kind, born), 1)
        np.add.at(change, (kind, died), -1)
        return change[:, :steps].cumsum(1)

    def per_row(self, frames: np.ndarray) -> np.ndarray:
        """Entries held in each row after the steps ``frames`` (ascending), int64 ``[rows, F]``."""
        row, _, _, born, died = self.entries
        change = np.zeros((self.rows, len(frames) + 1), np.int64)
        np.add.at(change, (row, np.searchsorted(frames, born)), 1)
        np.add.at(change, (row, np.searchsorted(frames, died)), -1)
        return change[:, :-1].cumsum(1)

    def cuts(self) -> np.ndarray:
        """Highest score that went at each step, float32 ``[groups, S]``; NaN where nothing did."""
        dead, group = self.record.deaths, self.rule.group
        cut = np.full((int(group.max()) + 1, len(self.record.seen)), -np.inf, np.float32)
        real = (dead["cause"] == EVICTED) & np.isfinite(dead["score"])
        which = (group[dead["row"][real]], self.record.died_at[real])
        np.maximum.at(cut, which, dead["score"][real])
        cut[np.isneginf(cut)] = np.nan
        return cut

    def scores(self, step: int, position: np.ndarray, log_beta: np.ndarray) -> np.ndarray | None:
        """Scores of entries at ``step``, float32; None where they do not follow from the record."""
        rule, seen = self.rule, int(self.record.seen[step])
        if rule.kernel == "recency":
            value = position.astype(np.float32)
        elif rule.kernel == "retention":
            age = torch.from_numpy(seen - position + rule.age_shift)
            beta = torch.from_numpy(np.ascontiguousarray(log_beta))
            made = lookahead_log_score(beta, age, rule.lookahead, 1 + min(rule.age_shift, 0))
            value = made.numpy()
        else:
            return None
        protected = (position < rule.first) | (position >= seen - rule.recent) * bool(rule.recent)
        return np.where(protected, np.float32(np.inf), value)

    def just_above(self, step: int, row: int, count: int = 5) -> list[tuple[int, int, float]]:
        """Lowest entries that stayed at ``step`` where ``row`` competes: row, position, score.

        Where scores do not follow from the record, the nearest sample at or before ``step`` has to
        know them; without one nothing is returned.
        """
        rows, position, log_beta, born, died = self.entries
        stayed = (born <= step) & (died > step) & (self.rule.group[rows] == self.rule.group[row])
        rows, position = rows[stayed], position[stayed]
        value = self.scores(step, position, log_beta[stayed])
        if value is None:
            known = [sample for sample in self.record.samples if sample[0] <= step]
            if not known:
                return []
            _, at_row, at_position, score = known[-1]
            there = np.isin(
                at_row * np.int64(self.tokens) + at_position, rows * self.tokens + position
            )
            rows, position, value = at_row[there], at_position[there], score[there]
        order = np.lexsort((rows, position, value))[:count]
        return [(int(rows[i]), int(position[i]), float(value[i])) for i in order]


class Trace:
    """Records a session from now on, and shows what it kept; made by :meth:`Session.trace`.

    A context manager: recording ends with it, and what was recorded can still be shown.
    """

    def __init__(self, session: CachedSequence) -> None:
        self._session = session
        self._recorder = session.record()
        self._last: Snapshot | None = None

    def snapshot(self) -> Snapshot:
        """Read everything up to now; after :meth:`stop`, up to then.

        Raises:
            SessionError: the session is closed.
        """
        session = self._session
        if self._last is not None:
            return self._last
        with session.engine.lock:
            recorder = session.record()
            record, frames = recorder.read(session), [frame for _, frame in recorder.media]
        texts = texts_of(_tokenizer(session), record.token_ids.tolist())
        return Snapshot(
            record,
            _rule(session),
            ["" if kind else text for text, kind in zip(texts, record.modality, strict=True)],
            frames,
            session.engine.policy.name,
            session.budget.describe(),
            _model(session),
        )

    def retained(self, step: int) -> list[list[np.ndarray]]:
        """Token indices kept after ``step``, ``[layer][kv_head]``, each ascending int64."""
        if self._last is not None:
            return self._last.record.retained(step)
        return self._session.record().read(self._session).retained(step)

    def report(self, path: str | Path) -> Path:
        """Write the page: one HTML file that needs no network. Raises InputError."""
        from mmkv.explain.page import render

        return write(path, render(self.snapshot()).encode())

    def figures(self, folder: str | Path) -> list[Path]:
        """Write each view as a PNG file; needs matplotlib. Raises InputError."""
        from mmkv.explain.figures import draw

        return draw(self.snapshot(), folder)

    def _repr_html_(self) -> str:
        """Show the page in a notebook, in a frame of its own."""
        from html import escape

        from mmkv.explain.page import render

        page = escape(render(self.snapshot()))
        frame = 'width="100%" height="800" sandbox="allow-scripts"'
        return f'<iframe {frame} srcdoc="{page}"></iframe>'

    def stop(self) -> None:
        """End the recording; what was recorded stays readable here."""
        if self._last is None:
            self._last = self.snapshot()
            self._session.recorder = None

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._session.closed:
            self.stop()


def write(path: str | Path, content: bytes) -> Path:
    """Write a file whole or not at all. Raises InputError."""
    from engine.paths import user_path

    target = user_path(path)
    part = target.with_name(f"{target.name}.part")
    try:
        part.write_bytes(content)
        part.replace(target)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise InputError(
            f"cannot write {target} ({error.strerror}); name a file in a folder that you may write"
        ) from error
    return target


def frames_of(
    inputs: dict[str, Any],
    placeholder: dict[int, int],
    pictures: Sequence[Image],
    clips: Sequence[Clip],
    start: int,
    vision: Any,
    known: int,
) -> list[Frame]:
    """Say which tokens of a turn stand for which part of which picture.

    Args:
        inputs: the model inputs of the turn; start: position of its first token.
        placeholder: token id of each visual modality.
        vision: the model's vision config: how many patches of a grid are one token.
        known: pictures and videos before these.
    """
    ids, merge = inputs["input_ids"][0].numpy(), getattr(vision, "spatial_merge_size", 1)
    size, patch = (getattr(vision, name, 0) for name in ("image_size", "patch_size"))
    side = size // patch if isinstance(size, int) and patch else 0
    found: list[Frame] = []
    kinds = {name: MODALITIES.index(name) for name in ("image", "video")}
    at = np.flatnonzero(ids == placeholder.get(kinds["image"], -1)) + start
    grids = inputs.get("image_grid_thw")
    if grids is not None:
        sizes = [(h // merge, w // merge) for _, h, w in grids.tolist()]
    else:
        sizes = [(0, 0)] * len(pictures)
    runs = [] if grids is not None else np.split(at, np.flatnonzero(np.diff(at) > 1) + 1)
    for number, (picture, (high, wide)) in enumerate(zip(pictures, sizes, strict=True)):
        if grids is not None:
            first, at = int(at[0]), at[high * wide :]
            parts = [(0, high, wide, wide)]
        elif number < len(runs) and len(runs) == len(pictures):
            first, parts = int(runs[number][0]), layout(len(runs[number]), *picture.size, side)
        else:
            break  # pictures whose tokens touch cannot be told apart
        jpeg, media = encoded(picture, PICTURE_EDGE), known + number
        for part, (offset, rows, columns, stride) in enumerate(parts):
            caption = f"picture {media + 1}" + (", close up" if part else "")
            frame = (caption, first + offset, rows, columns, stride, jpeg)
            found.append(Frame(kinds["image"], media, *frame))
    grids = inputs.get("video_grid_thw")
    if grids is None:
        return found
    from PIL import Image as pil

    at = np.flatnonzero(ids == placeholder.get(kinds["video"], -1)) + start
    for number, (clip, (times, high, wide)) in enumerate(zip(clips, grids.tolist(), strict=True)):
        media, high, wide = known + len(pictures) + number, high // merge, wide // merge
        each = math.ceil(len(clip.frames) / times)
        for time in range(times):
            shown = min(time * each, len(clip.frames) - 1)
            jpeg = encoded(pil.fromarray(clip.frames[shown]), FRAME_EDGE)
            caption = f"video {number + 1} at {clip.timestamps[shown]:.1f} s"
            frame = (caption, int(at[0]), high, wide, wide, jpeg)
            found.append(Frame(kinds["video"], media, *frame))
            at = at[high * wide :]
    return found


def layout(count: int, width: int, height: int, side: int) -> list[tuple[int, int, int, int]]:
    """Lay ``count`` tokens out over a picture: parts of (offset, rows, columns, stride).

    LLaVA-NeXT and LLaVA-OneVision put a thumbnail of ``side x side`` tokens first and then rows
    that end with a token of their own; of the shapes that fit, the nearest to the picture's.
    Nothing is returned for a count that fits neither this nor a square.
    """
    edge = math.isqrt(count)
    if edge * edge == count:
        return [(0, edge, edge, edge)]
    rest = count - side * side
    shapes = [(rest // line, line - 1) for line in range(2, max(rest, 0) + 1) if rest % line == 0]
    if not side or not shapes:
        return []
    high, wide = min(shapes, key=lambda s: abs(math.log(s[1] / s[0] * height / width)))
    return [(0, side, side, side), (side * side, high, wide, wide + 1)]


def encoded(picture: Image, edge: int) -> bytes:
    """Encode a picture as JPEG, no longer than ``edge`` on either side and free of metadata."""
    from PIL import Image as pil

    small = pil.new("RGB", picture.size, "white")
    small.paste(picture, mask=picture.getchannel("A") if "A" in picture.getbands() else None)
    small.thumbnail((edge, edge))
    data = io.BytesIO()
    small.save(data, "JPEG", quality=_QUALITY)
    return data.getvalue()


def texts_of(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Return what each token says, between the one before it and the one after it."""
    if tokenizer is None:
        return [f"{token} " for token in ids]
    known: dict[tuple[int, int], str] = {}

    def decoded(*part: int) -> str:
        return tokenizer.decode(
            [token for token in part if token >= 0],
            skip_special_tokens=False,
            clean_up_tokenization_spaces=False,
        )

    texts, before = [], -1
    for token in ids:
        if (before, token) not in known:
            # Some tokenizers decode a token differently at the start of a text.
            known[before, token] = decoded(before, token)[len(decoded(before)) :]
        texts.append(known[before, token])
        before = token
    return texts


def _rule(session: CachedSequence) -> Rule:
    engine, policy = session.engine, session.engine.policy
    rows = engine.spec.rows
    group = np.zeros(rows, np.int64)
    recent = policy.protect_recent
    if policy.evicts:
        allowed = session.allowed_entries
        shares = policy.shares(allowed, engine.spec.num_layers, engine.spec.num_kv_heads)
        group, recent = shares.group.numpy(), policy.recent(allowed // rows)
    scoring, kernel = policy.scoring, kernel_of(policy.scoring)
    kernel = kernel if policy.evicts and kernel in ("retention", "recency") else "other"
    lookahead, shift = 1.0, 0
    if isinstance(scoring, Retention):
        lookahead, shift = scoring.lookahead, scoring.age_shift
    return Rule(kernel, lookahead, shift, policy.protect_first, recent, group)


def _model(session: CachedSequence) -> str:
    """Name the model as on the hub, or by its folder alone: a page may be passed on."""
    source = getattr(session.engine, "_source", None)
    if source is None:
        return "a model in memory"
    return Path(source).name if Path(source).exists() else str(source)


def _tokenizer(session: CachedSequence) -> Any:
    """Return the tokenizer, None for an engine that was built without a checkpoint."""
    try:
        processor = getattr(session.engine, "processor", None)
    except InputError:
        return None
    return None if processor is None else processor.tokenizer
