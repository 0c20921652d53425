"""The decoding loop: transformers' processors and criteria on the engine's logits.

Each row of a batch is a session of its own.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.generation import (
    EosTokenCriteria,
    LogitsProcessorList,
    MaxLengthCriteria,
    MinPLogitsWarper,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from mmkv.engine.backends.cuda.kernels.sample import Draw
from mmkv.engine.errors import InputError
from mmkv.engine.interrupts import OpenToCtrlC
from mmkv.engine.runtime import Runtime
from mmkv.engine.sequence import CachedSequence
from mmkv.engine.steps import BURST


@dataclass
class BatchRow:
    """One conversation.

    Attributes:
        session: what holds its keys and values.
        ids: every token that the session has seen.
        prompt: how many of them the first prompt had.
        pending: the latest token that was generated; the session has not seen it.
    """

    session: CachedSequence
    ids: list[int] = field(default_factory=list)
    prompt: int = 0
    pending: int | None = None

    def fork(self) -> BatchRow:
        """Return an independent copy."""
        return BatchRow(self.session.fork(), list(self.ids), self.prompt, self.pending)

    def can_go_back(self, count: int) -> bool:
        """Whether it can stand behind its first ``count`` tokens again as if it had read no more.

        Not once something has been evicted, nor behind a picture that it would have to read again.
        """
        session, engine = self.session, self.session.engine
        media = set(engine.family.placeholder.values())
        exact = session.can_cut_back and not session.evicted and not engine.policy.keeps_prompt
        return exact and media.isdisjoint(self.ids[count:])

    def go_back(self, count: int) -> None:
        """Let go what follows its first ``count`` tokens; see :meth:`can_go_back`."""
        if count == len(self.ids):
            return
        session = self.session
        position = session.next_position - (session.seen - count)
        session.cut_back(count, position, min(session.prompt_tokens, count))
        self.ids, self.pending, self.prompt = self.ids[:count], None, min(self.prompt, count)

    def fed(self, token: int) -> None:
        """Note that the session has seen ``token``."""
        self.ids.append(token)
        self.pending = None


def without_padding(input_ids: Tensor, mask: Tensor | None) -> list[Tensor]:
    """Return the tokens int64 ``[T]`` of each row, on the CPU, without those that are masked.

    Args:
        input_ids: ``[B, W]``.
        mask: ``[B, W]`` or, where tokens came before, ``[B, more than W]``.

    Raises:
        InputError: for a mask of another shape.
    """
    ids = input_ids.cpu().long()
    if mask is None:
        return list(ids)
    if mask.dim() != 2 or mask.shape[0] != ids.shape[0] or mask.shape[1] < ids.shape[1]:
        raise InputError(
            f"attention_mask has shape {list(mask.shape)} and input_ids {list(ids.shape)}; pass "
            "the mask that the processor returns"
        )
    own = mask[:, mask.shape[1] - ids.shape[1] :].cpu().bool()
    return [row[kept] for row, kept in zip(ids, own, strict=True)]


def masked_before(input_ids: Tensor, mask: Tensor | None) -> list[int] | None:
    """Count the tokens that the mask names before ``input_ids``, per row; None: it names none."""
    if mask is None or mask.shape[1] == input_ids.shape[1]:
        return None
    return mask[:, : mask.shape[1] - input_ids.shape[1]].bool().sum(1).tolist()


def tokens_to_read(
    rows: Sequence[BatchRow],
    input_ids: Sequence[Tensor],
    before: Sequence[int] | None,
    only_new: bool,
) -> list[tuple[int, Tensor]]:
    """Return, per conversation, how many cached tokens stay and which ids are to be read then.

    What is generated is what a reader of all ids would say: where they differ from the cached ones
    (an edited question, a template that dropped earlier thoughts) the conversation goes back to
    what both share, if nothing is lost by that.

    Args:
        rows: the conversations so far.
        input_ids: per row the ids of the whole conversation, or those after the latest reply.
        before: per row how many tokens stand before ``input_ids``, where the mask says so: the ids
            are the new ones then, as transformers takes them.
        only_new: they are the new ones in any case.

    Raises:
        InputError: the conversation cannot go back to where the ids differ.
    """
    if len(rows) != len(input_ids):
        raise InputError(
            f"the cache holds {len(rows)} conversations and the batch has {len(input_ids)} rows; "
            "pass as many rows as the generate call that filled it returned"
        )
    if before is not None:
        joined = [_after(*parts) for parts in zip(rows, input_ids, before, strict=True)]
        return [(len(row.ids), ids) for row, ids in zip(rows, joined, strict=True)]
    if only_new:
        return [(len(row.ids), _joined(row, ids)) for row, ids in zip(rows, input_ids, strict=True)]
    kept = [_shared(row, ids) for row, ids in zip(rows, input_ids, strict=True)]
    return [(count, ids[count:]) for count, ids in zip(kept, input_ids, strict=True)]


def _shared(row: BatchRow, ids: Tensor) -> int:
    """Count the cached tokens that stay when a row's whole conversation is ``ids [T]``.

    Raises:
        InputError: it would have to go back, and cannot.
    """
    count = _common(row.ids, ids)
    if count == len(row.ids) < ids.numel():
        return count
    policy = row.session.engine.policy
    # A policy that scores with the newest queries needs as many tokens to be read again.
    window = policy.scoring.needs.queries if policy.evicts else 0
    kept = max(min(count, ids.numel() - max(window, 1)), 0)
    if not row.can_go_back(kept):
        raise InputError(
            f"input_ids repeat the conversation up to token {count} of the {len(row.ids)} in the "
            "cache, which cannot go back there; pass what generate returned and the new tokens, a "
            "new RetainedCache(), or new tokens alone to RetainedCache(only_new=True)"
        )
    if count < row.prompt:
        warnings.warn(
            f"input_ids differ from the cached conversation at token {count}, in its first prompt: "
            "it goes back there; new tokens alone are for RetainedCache(only_new=True)",
            stacklevel=2,
        )
    return kept


def _after(row: BatchRow, ids: Tensor, before: int) -> Tensor:
    """Return the new tokens of a row whose mask names ``before`` tokens ahead of ``ids``."""
    if before == len(row.ids):
        return ids
    joined = _joined(row, ids)
    if before == len(row.ids) + joined.numel() - ids.numel():
        return joined
    raise InputError(
        f"attention_mask names {before} tokens before input_ids, and the cache holds "
        f"{len(row.ids)}; leave the mask out, or make it cover exactly these"
    )


def _joined(row: BatchRow, ids: Tensor) -> Tensor:
    """Put the latest reply's last token before the new ones: the session has not seen it."""
    return ids if row.pending is None else torch.cat([torch.tensor([row.pending]), ids])


def _common(held: Sequence[int], ids: Tensor) -> int:
    """Count the tokens that both begin with."""
    most = min(len(held), ids.numel())
    differs = (torch.tensor(held[:most], dtype=torch.long) != ids[:most]).nonzero()
    return int(differs[0]) if differs.numel() else most


@dataclass(frozen=True)
class LoopSettings:
    """What decides the tokens of one call.

    Attributes:
        pad: the id that follows a reply that has ended, or None.
        keep_scores, keep_logits: whether those of every step are returned.
        streamer: takes the tokens of each step, or None.
    """

    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    do_sample: bool
    pad: int | None
    keep_scores: bool
    keep_logits: bool
    streamer: Any


@dataclass
class Generated:
    """The ids ``[B, W + new]`` and, where asked for, float32 ``[B, vocab]`` of every step."""

    ids: Tensor
    scores: tuple[Tensor, ...] | None
    logits: tuple[Tensor, ...] | None


class Loop:
    """Generates the replies of B rows, one step of all at a time, as transformers does.

    A row that has ended takes no more steps; its logits in later steps are its last ones.

    Args:
        logits: float32 ``[B, vocab]`` of the prompts' last tokens.
        input_ids: ``[B, W]``, as the caller passed them.
    """

    def __init__(
        self,
        engine: Runtime,
        rows: Sequence[BatchRow],
        logits: Tensor,
        input_ids: Tensor,
        how: LoopSettings,
    ) -> None:
        self.engine, self.rows, self.how, self.logits = engine, rows, how, logits
        self.made = Generated(
            input_ids, () if how.keep_scores else None, () if how.keep_logits else None
        )
        self._unfinished = torch.ones(len(rows), dtype=torch.long, device=input_ids.device)
        self._alive = [1] * len(rows)  # what the host has read of it
        self.ends_at_eos = any(hasattr(criterion, "eos_token_id") for criterion in how.criteria)
        self._full: set[int] = set()
        self._burst = _Burst.of(engine, how, len(rows))

    def run(self) -> Generated:
        """Generate until every row has ended.

        Ctrl-C is let through while others' processors, criteria and streamers run.
        """
        self._read(self._chosen())
        while any(self._alive):
            going = self._going()
            if not going:
                break
            if self._burst is None:
                self._step(going)
                self._read(self._chosen())
            else:
                columns = self._burst.columns(self, going)
                with OpenToCtrlC():
                    for column in columns:
                        self._take(column)
                self._alive = self._unfinished.tolist()
        return self.made

    def _going(self) -> list[int]:
        """Return the rows that take the next step. Those without a position left have ended."""
        going = self._running()
        for i in going:
            if not self.rows[i].session.has_room:
                warnings.warn(
                    f"row {i} ended at the model's last position; start a new conversation",
                    stacklevel=2,
                )
                self._full.add(i)
                self._unfinished[i] = self._alive[i] = 0
        return [i for i in going if i not in self._full]

    def _running(self) -> list[int]:
        """Return the rows that had not ended when the host last looked."""
        return [
            i
            for i, alive in enumerate(self._alive)
            if i not in self._full and (alive or not self.ends_at_eos)
        ]

    def _step(self, going: Sequence[int]) -> None:
        """Let the sessions read their rows' latest tokens."""
        rows = [self.rows[i] for i in going]
        tokens = [_pending(row) for row in rows]
        fresh = self.engine.decode([row.session for row in rows], tokens)
        for row, token in zip(rows, tokens, strict=True):
            row.fed(token)
        if len(going) < len(self.rows):
            at = torch.tensor(going, device=self.logits.device)
            fresh = self.logits.index_copy(0, at, fresh)
        self.logits = fresh

    def _chosen(self) -> Tensor:
        with OpenToCtrlC():
            return self._take(self._choose())

    def _choose(self) -> Tensor:
        """Return the next token of every row, int64 ``[B]``."""
        ids, made = self.made.ids, self.made
        logits = self.logits.to(ids.device, copy=True)
        scores = self.how.processors(ids, logits)
        if made.scores is not None:
            made.scores += (scores,)
        if made.logits is not None:
            made.logits += (logits,)
        if not self.how.do_sample:
            return scores.argmax(-1)
        return torch.multinomial(scores.softmax(-1), num_samples=1).squeeze(1)

    def _take(self, chosen: Tensor) -> Tensor:
        """Append a token to every row, padding to those that have ended; the tokens ``[B]``."""
        made, how = self.made, self.how
        if self.ends_at_eos and how.pad is not None:
            chosen = torch.where(self._unfinished.bool(), chosen, how.pad)
        made.ids = torch.cat([made.ids, chosen[:, None]], dim=-1)
        self._unfinished = self._unfinished & ~how.criteria(made.ids, made.scores)
        if how.streamer is not None:
            how.streamer.put(chosen.cpu())
        return chosen

    def _read(self, chosen: Tensor) -> None:
        """Read the tokens and which rows go on: the one time a step that the host waits."""
        tokens, alive = torch.stack([chosen, self._unfinished]).tolist()
        for i in self._running():
            self.rows[i].pending = tokens[i]
        self._alive = alive


class _Burst:
    """Several steps by one call, where a CUDA graph runs them and nothing has to look between."""

    def __init__(self, how: LoopSettings, draws: list[Draw] | None) -> None:
        self._draws = draws
        lengths = [c.max_length for c in how.criteria if isinstance(c, MaxLengthCriteria)]
        self._most = min(lengths, default=None)
        ends = [c.eos_token_id for c in how.criteria if isinstance(c, EosTokenCriteria)]
        self._stop = [int(token) for ids in ends for token in ids.tolist()]

    @classmethod
    def of(cls, engine: Runtime, how: LoopSettings, rows: int) -> _Burst | None:
        """Return None where each token has to be looked at, or nothing is gained."""
        kinds = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)
        # The sampler of bursts has one order: a user's own warpers may come in another.
        order = [kinds.index(type(one)) if type(one) in kinds else -1 for one in how.processors]
        plain = -1 not in order and order == sorted(set(order))
        plain &= all(getattr(one, "min_tokens_to_keep", 1) == 1 for one in how.processors)
        plain &= all(type(one) in (MaxLengthCriteria, EosTokenCriteria) for one in how.criteria)
        if not plain or how.keep_scores or how.keep_logits or not in_bursts(engine):
            return None
        if not how.do_sample:
            return None if how.processors else cls(how, None)
        given = {type(one): one for one in how.processors}
        warmth, best, mass, least = (given.get(kind) for kind in kinds)
        # From torch's own generator, so that torch.manual_seed decides.
        seeds = torch.randint(2**62, (rows,)).tolist()
        return cls(
            how,
            [
                Draw(
                    temperature=1.0 if warmth is None else warmth.temperature,
                    top_k=0 if best is None else best.top_k,
                    top_p=1.0 if mass is None else mass.top_p,
                    min_p=0.0 if least is None else least.min_p,
                    seed=seed,
                )
                for seed in seeds
            ],
        )

    def columns(self, loop: Loop, going: Sequence[int]) -> list[Tensor]:
        """Return the next tokens ``[B]`` of some steps; the sessions have read all but the last."""
        engine, rows = loop.engine, [loop.rows[i] for i in going]
        ids = loop.made.ids
        left = BURST if self._most is None else self._most - ids.shape[1]
        room = min(engine.spec.max_position - row.session.next_position for row in rows)
        generated = engine.decode_many(
            [row.session for row in rows],
            [_pending(row) for row in rows],
            max(1, min(BURST, left, room)),
            self._stop,
            None if self._draws is None else [self._draws[i] for i in going],
        )
        for row, tokens in zip(rows, generated, strict=True):
            for token in [_pending(row), *tokens[:-1]]:
                row.fed(token)
            row.pending = tokens[-1]
        block = torch.zeros((max(map(len, generated)), ids.shape[0]), dtype=torch.long)
        for i, tokens in zip(going, generated, strict=True):
            block[: len(tokens), i] = torch.tensor(tokens)
        return list(block.to(ids.device))


def in_bursts(engine: Runtime) -> bool:
    """Return whether several steps cost less by one call."""
    return engine.many_path == "graph"


def _pending(row: BatchRow) -> int:
    assert row.pending is not None
    return row.pending
