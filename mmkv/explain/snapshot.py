"""What a recorded session kept and lost, as a program reads it."""

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

from mmkv.engine.contents import MODALITIES
from mmkv.engine.errors import InputError
from mmkv.engine.policies.scoring import lookahead_log_score
from mmkv.engine.trace import EVICTED, KINDS, Record

if TYPE_CHECKING:
    from PIL.Image import Image

    from mmkv.prompt.video import Clip


@dataclass(frozen=True)
class Rule:
    """How scores are made, as far as they follow from what is recorded.

    Attributes:
        kernel: ``retention``, ``recency``, or anything else: scores are known of
            those that went, and of samples.
        lookahead, age_shift: of retention; first, recent: tokens protected at either end.
        group: int64 ``[rows]``, rows of the same number compete.
        shared: whether other sessions' entries do, too; bonus: what is added to scores there.
        predicts: whether log betas predict weights, whatever scores are.
    """

    kernel: str
    lookahead: float
    age_shift: int
    first: int
    recent: int
    group: np.ndarray
    shared: bool = False
    bonus: float = 0.0
    predicts: bool = False


@dataclass(frozen=True)
class Region:
    """A picture, a frame of a video, or the words of a turn, and how much of it is forgotten.

    Attributes:
        held, forgotten: predicted weight of its entries that stand, and of those that went
            (:mod:`mmkv.engine.risk`).
    """

    name: str
    held: float
    forgotten: float

    @property
    def risk(self) -> float:
        """Return the share that is forgotten, 0 where nothing has any weight."""
        total = self.held + self.forgotten
        return self.forgotten / total if total else 0.0


@dataclass(frozen=True)
class Snapshot:
    """A trace up to now, on the host; see :class:`mmkv.engine.trace.Record` for S, T and D.

    Attributes:
        texts: what each token says, ``[T]``; frames: pictures and video frames in order.
        policy, budget, model: in words; reply: the one that ``attention`` is of, or the latest.
        attention: float32 ``[rows, P]``: what a reply's tokens paid on average to each of the P
            tokens of the conversation before it, with a cache that forgets nothing; None where it
            was not measured.
    """

    record: Record
    rule: Rule
    texts: list[str]
    frames: list[Frame]
    policy: str
    budget: str
    model: str
    reply: str = ""
    attention: np.ndarray | None = None

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

    @cached_property
    def fates(self) -> tuple[np.ndarray, np.ndarray]:
        """Say of each token how many (layer, KV head) hold it at the end, and when the last let go.

        Both int64 ``[T]``; the step is S where one still holds it, and 0 where it was gone before
        the recording.
        """
        _, position, _, _, died = self.entries
        held = np.bincount(self.record.position, minlength=self.tokens)
        last = np.zeros(self.tokens, np.int64)
        np.maximum.at(last, position, died)
        return held, last

    def needed(self) -> int | None:
        """Return the token that the reply paid most attention to; None where nothing tells.

        Of pictures and videos, where there are some; else of words, without the marks of the chat
        template and the role that follows one.
        """
        if self.attention is None:
            return None
        paid = self.attention.mean(0)
        told = self.record.modality[: len(paid)] > 0
        if not told.any():
            marks = [text.startswith("<") and text.rstrip().endswith(">") for text in self.texts]
            words = [any(letter.isalnum() for letter in text) for text in self.texts]
            told = np.array(words) & ~np.array(marks) & ~np.roll(marks, 1)
            told = told[: len(paid)]
            told[:1] = False  # many models look at the first token, whatever it says
        return int(np.where(told, paid, -1).argmax()) if told.any() else None

    def name(self, token: int) -> str:
        """Say what a token is: a word, a part of one, or a place in a picture or video."""
        for frame in self.frames:
            y, x = divmod(token - frame.start, frame.stride)
            if 0 <= y < frame.high and x < frame.wide:
                return f"row {y + 1}, column {x + 1} of {frame.caption}"
        if self.record.modality[token]:
            return f"a token of the {MODALITIES[self.record.modality[token]]}"
        first, last, texts = token, token + 1, self.texts
        while first and texts[first][:1].isalnum() and texts[first - 1][-1:].isalnum():
            first -= 1
        while last < len(texts) and texts[last][:1].isalnum() and texts[last - 1][-1:].isalnum():
            last += 1
        part, word = texts[token].strip(), "".join(texts[first:last]).strip()
        return f"the word “{word}”" if part == word else f"the “{part}” of “{word}”"

    def regions(self) -> list[Region]:
        """Sum the predicted weights of every entry by picture, and by the words of each turn.

        Exactly, as the record has every eviction. Of tokens from before the recording nothing is
        said. Empty for policies that predict no weights.
        """
        record, seen = self.record, int(self.record.seen[-1])
        if not self.rule.predicts:
            return []
        # A turn begins with the first chunk behind a reply.
        kind = np.array(KINDS)[record.kind]
        begins = (kind == "prompt") & (np.roll(kind, 1) != "prompt")
        begins[0] = False
        starts = record.seen[np.flatnonzero(begins) - 1]
        turn = np.searchsorted(starts, np.arange(self.tokens), side="right")
        region, names = turn.copy(), [f"turn {at}" for at in range(len(starts) + 1)]
        for frame in self.frames:
            stop = frame.start + frame.stride * (frame.high - 1) + frame.wide
            region[frame.start : stop] = len(names)
            names.append(frame.caption)
        known = np.arange(self.tokens) >= record.seen[0]
        sums = np.zeros((2, len(names)))
        _, position, log_beta, _, died = self.entries
        weight = np.exp(log_beta.astype(np.float64) * (seen - position))
        real = known[position] & np.isfinite(weight)
        gone = (died < len(record.seen)).astype(np.int64)
        np.add.at(sums, (gone[real], region[position[real]]), weight[real])
        there = np.isin(np.arange(len(names)), region[known])  # turn 0: before the recording
        return [
            Region(name, float(held), float(lost))
            for name, held, lost, shown in zip(names, *sums, there, strict=True)
            if shown
        ]

    def forgetting(self, most: int = 4) -> str:
        """Say which pictures and turns are forgotten most; "" where none is, by a per cent."""
        found = [one for one in self.regions() if one.risk >= 0.01]
        found = sorted(found, key=lambda one: -one.risk)[:most]
        said = ", ".join(f"{100 * one.risk:.0f} % of {one.name}" for one in found)
        return f"forgotten, as the gates predict: {said}" if said else ""

    def headline(self) -> str:
        """Say in one or two sentences what the answer needed, what of it is left, and what went."""
        held, total = len(self.record.row), self.tokens * self.rows
        freed = "Nothing was forgotten."
        if held < total:
            freed = f"{_percent(total - held, total)} of the memory was freed."
        count, token = self.fates[0], self.needed()
        if token is not None:
            reply = " ".join(self.reply.split())
            reply = reply if len(reply) <= 40 else f"{reply[:40].rstrip()}…"
            said, what = f"The answer “{reply}”" if reply else "The answer", self.name(token)
            left = f"{count[token]} of {self.rows} heads still hold it"
            if count[token] in (0, self.rows):
                left = f"all {self.rows} heads hold it" if count[token] else "no head holds it now"
            return f"{said} looked most at {what}: {left}. {freed}"
        visual = self.record.modality > 0
        kind, noun = (visual, "patches") if visual.any() else (~visual, "tokens")
        left = f"{int((count[kind] > 0).sum()):,} of {int(kind.sum()):,} {noun}"
        return f"At the end {left} are still held by some head. {freed}"

    def detail(self) -> str:
        """Say what share of the attention to what the answer needed is of heads that hold it."""
        token = self.needed()
        if token is None or self.attention is None:
            return ""
        paid = self.attention[:, token]
        holding = np.zeros(self.rows, bool)
        holding[self.record.row[self.record.position == token]] = True
        name = self.name(token)
        said = (
            f"{name[0].upper()}{name[1:]} gets {100 * paid.mean():.0f} % of the reply's attention "
            "where nothing is forgotten"
        )
        if not holding.any():
            return f"{said}."
        share = float(paid[holding].sum() / max(paid.sum(), 1e-30))
        return f"{said}; the heads that still hold it pay {100 * share:.0f} % of that."

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
            value = made.numpy() + np.float32(rule.bonus)
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


def _percent(part: int, whole: int) -> str:
    """Say a share; never 0 % or 100 % of what is some or not all."""
    share = round(100 * part / whole)
    if 0 < part < whole and share in (0, 100):
        return "more than 99 %" if share else "less than 1 %"
    return f"{share} %"


def write(path: str | Path, content: bytes) -> Path:
    """Write a file whole or not at all. Raises InputError."""
    from mmkv.engine.paths import user_path, whole_file

    target = user_path(path)
    try:
        with whole_file(target) as draft:
            draft.write_bytes(content)
    except OSError as error:
        raise InputError(
            f"cannot write {target} ({error.strerror}); name a file in a folder that you may write"
        ) from error
    return target


# Longest edge of what is kept of a picture, of a video's frame, in pixels.
PICTURE_EDGE, FRAME_EDGE = 512, 256
MOST_BYTES = 2**24  # of JPEGs that a recorder keeps
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


def frames_of(
    inputs: dict[str, Any],
    placeholder: dict[int, int],
    pictures: Sequence[Image],
    clips: Sequence[Clip],
    start: int,
    config: Any,
    before: Sequence[tuple[int, Frame, int]] = (),
) -> list[tuple[int, Frame, int]]:
    """Say which tokens of a turn stand for which part of which picture.

    Args:
        inputs: the model inputs of the turn; start: position of its first token.
        placeholder: token id of each visual modality.
        config: the model's: how many patches of a grid are one token, and the size of a tile.
        before: what this returned for the turns before.

    Returns:
        position of the first token, frame, and the bytes that the frame takes; no more frames
        once those of all turns take :data:`MOST_BYTES`.
    """
    vision = getattr(config, "vision_config", None)
    ids, merge = inputs["input_ids"][0].numpy(), getattr(vision, "spatial_merge_size", 1)
    found: list[tuple[int, Frame, int]] = []
    known = max((frame.media + 1 for _, frame, _ in before), default=0)
    room = MOST_BYTES - sum(taken for *_, taken in before)
    kinds = {name: MODALITIES.index(name) for name in ("image", "video")}
    at = np.flatnonzero(ids == placeholder.get(kinds["image"], -1)) + start
    grids = inputs.get("image_grid_thw")
    if grids is not None:
        places = _grid_places(at, grids.tolist(), merge)
    else:
        tiled = getattr(config, "model_type", "") == "internvl"
        places = _run_places(at, pictures, _side(config, vision), tiled)
    for media, (picture, (first, parts)) in enumerate(zip(pictures, places, strict=False), known):
        if room <= 0:
            return found
        jpeg = encoded(picture, PICTURE_EDGE)
        for part, (offset, rows, columns, stride) in enumerate(parts):
            caption = f"picture {media + 1}" + (", close up" if part else "")
            place = (first + offset, rows, columns, stride)
            frame = Frame(kinds["image"], media, caption, *place, jpeg)
            found.append((frame.start, frame, 0 if part else len(jpeg)))
        room -= len(jpeg)
    grids = inputs.get("video_grid_thw")
    if grids is None:
        return found
    from PIL import Image as pil

    at = np.flatnonzero(ids == placeholder.get(kinds["video"], -1)) + start
    for number, (clip, (times, high, wide)) in enumerate(zip(clips, grids.tolist(), strict=True)):
        media, high, wide = known + len(pictures) + number, high // merge, wide // merge
        each = math.ceil(len(clip.frames) / times)
        for time in range(times):
            if room <= 0:
                return found
            shown = min(time * each, len(clip.frames) - 1)
            jpeg = encoded(pil.fromarray(clip.frames[shown]), FRAME_EDGE)
            caption = f"video {number + 1} at {clip.timestamps[shown]:.1f} s"
            frame = Frame(kinds["video"], media, caption, int(at[0]), high, wide, wide, jpeg)
            found.append((frame.start, frame, len(jpeg)))
            room -= len(jpeg)
            at = at[high * wide :]
    return found


# Position of a picture's first token, and its parts as :func:`layout` gives them.
_Place = tuple[int, list[tuple[int, int, int, int]]]


def _grid_places(at: np.ndarray, grids: list[list[int]], merge: int) -> list[_Place]:
    """Return where pictures lie whose tokens fill grids, one behind the other."""
    places: list[_Place] = []
    for _, *edges in grids:
        high, wide = (edge // merge for edge in edges)
        places.append((int(at[0]), [(0, high, wide, wide)]))
        at = at[high * wide :]
    return places


def _run_places(at: np.ndarray, pictures: Sequence[Image], side: int, tiled: bool) -> list[_Place]:
    """Return where pictures lie that each are a run of tokens; [] where runs touch."""
    runs = np.split(at, np.flatnonzero(np.diff(at) > 1) + 1)
    if len(runs) != len(pictures):
        return []
    return [
        (int(run[0]), layout(len(run), *picture.size, side, tiled))
        for run, picture in zip(runs, pictures, strict=True)
    ]


def _side(config: Any, vision: Any) -> int:
    """Return the tokens along an edge of a tile; 0 where the config does not tell."""
    sizes = [getattr(vision, name, 0) for name in ("image_size", "patch_size")]
    size, patch = (one[0] if isinstance(one, (list, tuple)) else one for one in sizes)
    if not (isinstance(size, int) and isinstance(patch, int) and patch):
        return 0
    return round(size // patch * getattr(config, "downsample_ratio", 1))


def layout(
    count: int, width: int, height: int, side: int, tiled: bool = False
) -> list[tuple[int, int, int, int]]:
    """Lay ``count`` tokens out over a picture: parts of (offset, rows, columns, stride).

    ``side``: tokens along an edge of a tile, 0 where it is not known; ``tiled``: whether a
    picture's tiles lie one after the other (InternVL), so that only one tile has a known place.
    LLaVA-NeXT and LLaVA-OneVision put a thumbnail of ``side x side`` tokens first and then rows
    that end with a token of their own; of the shapes that fit, the nearest to the picture's.
    Nothing is returned for a count that fits neither this nor a tile.
    """
    edge = side or math.isqrt(count)
    if edge * edge == count and (side or not tiled):
        return [(0, edge, edge, edge)]
    rest = count - side * side
    shapes = [(rest // line, line - 1) for line in range(2, max(rest, 0) + 1) if rest % line == 0]
    if not side or tiled or not shapes:
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
