"""Trace: the record of a session together with its words and pictures, ready to be shown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from mmkv.engine.errors import InputError, SessionError
from mmkv.engine.policies import make_policy
from mmkv.engine.policies.base import kernel_of
from mmkv.engine.policies.scoring import Retention
from mmkv.engine.trace import Recorder
from mmkv.explain.snapshot import Rule, Snapshot, write

if TYPE_CHECKING:
    from torch import Tensor

    from mmkv.engine.sequence import CachedSequence

_MOST_QUERIES = 64  # of a reply that are asked what they look at


class Trace:
    """Records a session from now on, and shows what it kept; made by :meth:`Session.trace`.

    A context manager: recording ends with it, and what was recorded can still be shown.
    """

    MOST_FULL: ClassVar[int] = 2**30  # bytes that the cache of measure_attention may take

    def __init__(self, session: CachedSequence) -> None:
        self._session = session
        self._began = session.recorder is None
        session.record()
        self._last: Snapshot | None = None
        # What a reply looked at, the tokens that it was read with, and what it says.
        self._attention: tuple[np.ndarray, list[int], str] | None = None

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
        last = getattr(session, "last", None)
        reply, attention = "" if last is None else last.content, None
        if self._attention is not None:
            measured, ids, said = self._attention
            if record.token_ids[: len(ids)].tolist() == ids:  # not taken back since
                reply, attention = said, measured
        return Snapshot(
            record,
            _rule(session),
            ["" if kind else text for text, kind in zip(texts, record.modality, strict=True)],
            frames,
            session.engine.policy.name,
            _budget(session),
            _model(session),
            reply,
            attention,
        )

    def measure_attention(self, inputs: dict[str, Tensor]) -> bool:
        """Read the conversation again with a full cache, and note what the latest reply looks at.

        Pages say then what the answer needed. It takes as long as reading the prompt and writing
        the reply, and memory for all of it; of a long reply its last 64 tokens are asked.

        Args:
            inputs: those of the conversation before the reply, as :meth:`Engine.inputs` makes them.

        Returns:
            False, with nothing noted, where these are not the inputs of the latest reply, or a
            full cache would take more than :attr:`MOST_FULL` bytes.
        """
        session, last = self._session, getattr(self._session, "last", None)
        if last is None or not last.token_ids:
            return False
        engine, tokens = session.engine, last.token_ids
        ids = inputs["input_ids"][0].tolist()
        spec, seen = engine.spec, len(ids) + len(tokens)
        with engine.lock:
            read = self._recorder().read(session).token_ids.tolist()
        if len(read) < len(ids) or read != [*ids, *tokens][: len(read)]:
            return False
        if seen * spec.rows * 2 * spec.head_dim * engine.dtype.itemsize > self.MOST_FULL:
            return False
        window = min(len(tokens), _MOST_QUERIES)
        whole = type(engine)(
            engine.family,
            spec,
            engine.decoder.weights,
            None,
            make_policy(f"snapkv:window={window}"),
            seen,
            prefill_chunk=engine.prefill_chunk,
            kv=engine.cache.pool.form.name,
        )
        with whole.session() as again:
            again.prefill(inputs)
            for token in tokens[:-1]:  # the last one was chosen, but asked nothing
                again.decode(token)
            view = again.view()
            paid = np.zeros((view.rows, seen), np.float32)
            where = (view.row.cpu().numpy(), view.position.cpu().numpy())
            paid[where] = view.attention().float().cpu().numpy()
        self._attention = paid[:, : len(ids)], read, last.content
        return True

    def retained(self, step: int) -> list[list[np.ndarray]]:
        """Token indices kept after ``step``, ``[layer][kv_head]``, each ascending int64."""
        if self._last is not None:
            return self._last.record.retained(step)
        with self._session.engine.lock:
            record = self._recorder().read(self._session)
        return record.retained(step)

    def report(self, path: str | Path, compare: str | Path | None = None) -> Path:
        """Write the page: one HTML file that needs no network. Raises InputError.

        Args:
            compare: another such page, of the same conversation with another policy or budget; the
                page shows both side by side.
        """
        from mmkv.explain.page import read_page, render

        other = None if compare is None else read_page(compare)
        return write(path, render(self.snapshot(), other).encode())

    def figures(self, folder: str | Path) -> list[Path]:
        """Write each view as a PNG file; needs matplotlib. Raises InputError."""
        from mmkv.explain.figures import draw

        return draw(self.snapshot(), folder)

    def _repr_html_(self) -> str:
        """Show the page in a notebook, in a frame of its own."""
        from html import escape

        from mmkv.explain.page import render

        page = escape(render(self.snapshot()))
        frame = 'width="100%" height="900" sandbox="allow-scripts allow-downloads"'
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
        shares = policy.shares(allowed, engine.spec.entry_layers, engine.spec.num_kv_heads)
        prompt = session.prompt_tokens * policy.keeps_prompt
        group, recent = shares.group.numpy(), policy.recent(allowed // rows - prompt)
    scoring, kernel = policy.scoring, kernel_of(policy.scoring)
    kernel = kernel if policy.evicts and kernel in ("retention", "recency") else "other"
    lookahead, shift = 1.0, 0
    if isinstance(scoring, Retention):
        lookahead, shift = scoring.lookahead, scoring.age_shift
    shared, bonus = engine.shared is not None, math.log(engine.budgets.weight(session))
    if engine.shared is not None and engine.shared.by_risk:
        kernel = "other"  # what sessions have forgotten decides, and scores alone do not
    predicts = policy.evicts and isinstance(scoring, Retention)
    first = policy.protect_first
    return Rule(kernel, lookahead, shift, first, recent, group, shared, bonus, predicts)


def _budget(session: CachedSequence) -> str:
    kept = session.engine.cache.pool.form
    form = "" if kept.plain else f", kv {kept.name}"
    shared = session.engine.shared
    if shared is None:
        return session.budget.describe().replace(" per row", " per head") + form
    each = shared.entries / session.engine.spec.rows
    return f"{each:g} entries per head, shared by all sessions{form}"


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
