"""Trace: the record of a session together with its words and pictures, ready to be shown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mmkv.engine.contents import MODALITIES
from mmkv.engine.errors import InputError, SessionError
from mmkv.engine.policies.base import kernel_of
from mmkv.engine.policies.scoring import Retention, lookahead_log_score
from mmkv.engine.trace import EVICTED, Record, Recorder

if TYPE_CHECKING:
    from mmkv.engine.sequence import CachedSequence
    from mmkv.explain.frames import Frame


@dataclass(frozen=True)
class Rule:
    """How scores are made, as far as they follow from what is recorded.

    Attributes:
        kernel: ``retention``, ``recency``, or anything else: scores are known of
            those that went, and of samples.
        lookahead, age_shift: of retention; first, recent: tokens protected at either end.
        group: int64 ``[rows]``, rows of the same number compete.
        shared: whether other sessions' entries do, too; bonus: what is added to scores there.
    """

    kernel: str
    lookahead: float
    age_shift: int
    first: int
    recent: int
    group: np.ndarray
    shared: bool = False
    bonus: float = 0.0


@dataclass(frozen=True)
class Snapshot:
    """A trace up to now, on the host; see :class:`mmkv.engine.trace.Record` for S, T and D.

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


class Trace:
    """Records a session from now on, and shows what it kept; made by :meth:`Session.trace`.

    A context manager: recording ends with it, and what was recorded can still be shown.
    """

    def __init__(self, session: CachedSequence) -> None:
        self._session = session
        self._began = session.recorder is None
        session.record()
        self._last: Snapshot | None = None

    def snapshot(self) -> Snapshot:
        """Read everything up to now; after :meth:`stop`, up to then.

        Raises:
            SessionError: the session is closed, or the trace that began the recording has ended.
        """
        session = self._session
        if self._last is not None:
            return self._last
        with session.engine.lock:
            recorder = self._recorder()
            record, frames = recorder.read(session), [frame for _, frame, _ in recorder.media]
        texts = texts_of(_tokenizer(session), record.token_ids.tolist())
        return Snapshot(
            record,
            _rule(session),
            ["" if kind else text for text, kind in zip(texts, record.modality, strict=True)],
            frames,
            session.engine.policy.name,
            _budget(session),
            _model(session),
        )

    def retained(self, step: int) -> list[list[np.ndarray]]:
        """Token indices kept after ``step``, ``[layer][kv_head]``, each ascending int64."""
        if self._last is not None:
            return self._last.record.retained(step)
        with self._session.engine.lock:
            record = self._recorder().read(self._session)
        return record.retained(step)

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
        """End the recording, if this trace began it; what was recorded stays readable here.

        Raises:
            SessionError: as :meth:`snapshot`.
        """
        with self._session.engine.lock:
            if self._last is None:
                self._last = self.snapshot()
                if self._began:
                    self._session.recorder = None

    def _recorder(self) -> Recorder:
        if self._session.recorder is None and not self._session.closed:
            raise SessionError(
                "the session is no longer recorded: the trace that began the recording has ended; "
                "end it last, or begin another trace"
            )
        return self._session.record()

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._session.closed and self._session.recorder is not None:
            self.stop()


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
        # Of a shared budget all sessions' entries, as scores are made of it; not what one may hold.
        allowed = engine.budgets.competing(session)
        shares = policy.shares(allowed, engine.spec.num_layers, engine.spec.num_kv_heads)
        prompt = session.prompt_tokens * policy.keeps_prompt
        group, recent = shares.group.numpy(), policy.recent(allowed // rows - prompt)
    scoring, kernel = policy.scoring, kernel_of(policy.scoring)
    kernel = kernel if policy.evicts and kernel in ("retention", "recency") else "other"
    lookahead, shift = 1.0, 0
    if isinstance(scoring, Retention):
        lookahead, shift = scoring.lookahead, scoring.age_shift
    shared, bonus = engine.shared is not None, math.log(engine.budgets.weight(session))
    return Rule(kernel, lookahead, shift, policy.protect_first, recent, group, shared, bonus)


def _budget(session: CachedSequence) -> str:
    kept = session.engine.cache.pool.form
    form = "" if kept.plain else f", kv {kept.name}"
    shared = session.engine.shared
    if shared is None:
        return session.budget.describe() + form
    each = shared.entries / session.engine.spec.rows
    return f"{each:g} entries per row, shared by all sessions{form}"


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
