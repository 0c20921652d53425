"""Run given answers under a budget and compare the predictions with the full cache's.

A dialogue is fed as in decoding: prompts in prefill chunks, answers one token at a time, with
eviction after each. At every answer token the logits are compared with those of full attention over
the same tokens. An answer is right when all its tokens are the most likely ones, which is what
greedy decoding would have generated.

The reference is full causal attention over whole documents, without a cache. It runs the engine's
decoder over documents laid end to end, so every family of the engine has it.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmkv.engine.errors import InputError
from mmkv.engine.model.decoder import Decoder
from mmkv.engine.model.families.base import Turn
from mmkv.engine.model.state_layer import StateLayer
from mmkv.engine.policies import Budget
from mmkv.engine.prefill import extend_together
from mmkv.engine.runtime import Runtime
from mmkv.engine.sequence import CachedSequence
from mmkv.training.data.labels import predicted


@dataclass(frozen=True)
class Documents:
    """Documents laid end to end, ready for the decoder; T tokens in all.

    Attributes:
        hidden: ``[T, d]`` embeddings, visual features in their places.
        positions: int64 ``[A, T]`` rope positions, from 0 in each document.
        deepstack: per layer from the first: token indices ``[V]``, features ``[V, d]``.
        start: int64 ``[T]``, index of the first token of each token's document.
        modality: uint8 ``[T]``: 0 text, 1 image, 2 video.
        lengths: tokens of each document.
    """

    hidden: Tensor
    positions: Tensor
    deepstack: tuple[tuple[Tensor, Tensor], ...]
    start: Tensor
    modality: Tensor
    lengths: list[int]


def lay_out(engine: Runtime, inputs: Sequence[Mapping[str, Any]]) -> Documents:
    """Run the vision side of every document and lay them end to end.

    Args:
        inputs: per document what the processor returns (``input_ids [1, t]``, pixels, ...);
            ``labels`` beside that are not looked at.

    Raises:
        InputError: for a malformed document.
    """
    rows = [{name: own for name, own in row.items() if name != "labels"} for row in inputs]
    return lay_out_turns(engine, [engine.family.turn(row, 0, engine.device) for row in rows])


def lay_out_turns(engine: Runtime, turns: Sequence[Turn]) -> Documents:
    """Return :func:`lay_out` of documents already built as turns."""
    hidden, positions, start, modality, lengths = [], [], [], [], []
    levels: dict[int, list[tuple[Tensor, Tensor]]] = {}
    first = 0
    for turn in turns:
        if turn.whole_pictures and turn.visual is not None:
            raise InputError(
                "a picture of this model is seen at once, also by its own first tokens, which a "
                "pass over whole documents does not do; use text alone"
            )
        states, deepstack = engine.decoder.embed_turn(turn)
        for level, (where, features) in enumerate(deepstack):
            levels.setdefault(level, []).append((where + first, features.clone()))
        length = turn.token_ids.numel()
        # A clone made outside inference mode may take part in a graph.
        hidden.append(states.clone())
        positions.append(turn.positions.to(engine.device, copy=True))
        start.append(torch.full((length,), first, device=engine.device))
        modality.append(turn.modality.to(engine.device, copy=True))
        lengths.append(length)
        first += length
    deepstack = tuple(
        (torch.cat([w for w, _ in levels[i]]), torch.cat([f for _, f in levels[i]]))
        for i in range(len(levels))
    )
    return Documents(
        torch.cat(hidden),
        torch.cat(positions, -1),
        deepstack,
        torch.cat(start),
        torch.cat(modality),
        lengths,
    )


class FullAttention:
    """The attention of a pass without a cache: causal within each document.

    A subclass may weigh the entries of a document otherwise (:meth:`attend_document`).
    """

    def __init__(self, engine: Runtime, documents: Documents) -> None:
        self.documents = documents
        self.scale, self._dtype = engine.spec.head_dim**-0.5, engine.dtype

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        lengths = self.documents.lengths
        parts = []
        for index, (q, k, v) in enumerate(
            zip(*(x.split(lengths) for x in (query, key, value)), strict=True)
        ):
            q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
            out = self.attend_document(index, q, k, v)
            parts.append(out[0].transpose(0, 1).flatten(1))
        return torch.cat(parts)

    def mix(self, layer: int, by: StateLayer, inputs: tuple[Tensor, ...]) -> Tensor:
        """Mix each document's tokens in a layer that keeps a state, which begins as zeros."""
        parts, x = [], inputs[0]
        for own in zip(*(part.split(self.documents.lengths) for part in inputs), strict=True):
            shapes = by.states(self._dtype).items()
            empty = {name: x.new_zeros(shape, dtype=kind) for name, (shape, kind) in shapes}
            parts.append(by.chunk(own, empty)[0])
        return torch.cat(parts)

    def attend_document(self, index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend within document ``index``: ``[1, Hq, t, D]`` and ``[1, H, t, D]`` each.

        Returns:
            ``[1, Hq, t, D]``.
        """
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self.scale, enable_gqa=True
        )


@torch.no_grad()
def full_attention_states(engine: Runtime, documents: Documents) -> Tensor:
    """Compute the states ``[T, d]`` before the final norm under full attention."""
    decoder = Decoder(engine.spec, engine.decoder.weights, None)
    rope = engine.rope.at(documents.positions)
    step = FullAttention(engine, documents)
    return decoder.forward(documents.hidden, rope, step, documents.deepstack)[0]


BLOCK = 256  # answer tokens whose logits are held at once: a vocabulary of 152k takes 156 MB


@dataclass(frozen=True)
class ReadAnswer:
    """One answer, T tokens.

    Attributes:
        right: whether every token was the most likely one.
        kl: sum over tokens of KL(full || ours); nll: sum of negative log-likelihoods of the tokens.
        agree: tokens whose most likely continuation is that of the full cache.
        wrong: (index in the answer, id generated instead) of every token that was not the most
            likely.
    """

    tokens: int
    right: bool
    kl: float
    nll: float
    agree: int
    wrong: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class DialogueRun:
    """The results of one dialogue.

    Attributes:
        answers: in order.
        tokens_seen: length of the dialogue; entries: held at its end, over all rows; evicted: all
            evicted ones.
        per_row: entries at the end by layer and KV head; by_modality: over all of them.
        nbytes: physical bytes of the pages held at the end, block tables left out (they grow with
            what an engine has held before).
    """

    answers: list[ReadAnswer]
    tokens_seen: int
    entries: int
    evicted: int
    per_row: list[list[int]]
    by_modality: dict[str, int]
    nbytes: int


@dataclass(frozen=True)
class FullCache:
    """Predictions of full attention at the N answer tokens of a dialogue, in order.

    It holds states and computes logits on demand, because logits of 8k tokens take 5 GB.

    Attributes:
        decoder: makes logits of states; states: ``[N, d]`` before the final norm.
    """

    decoder: Decoder
    states: Tensor

    @classmethod
    @torch.inference_mode()
    def of(cls, engine: Runtime, turn: Turn, labels: Tensor) -> FullCache:
        """Read a whole dialogue; ``labels``: int64 ``[T]``, -100 where no answer stands."""
        states = full_attention_states(engine, lay_out_turns(engine, [turn]))
        return cls(engine.decoder, states[predicted(labels)[0]])

    def logits(self) -> Iterator[Tensor]:
        """Yield float32 ``[vocab]`` for one answer token after the other.

        A block of :data:`BLOCK` is held at a time.
        """
        for states in self.states.split(BLOCK):
            yield from self.decoder.logits(states)


def spans(labels: Sequence[int]) -> list[tuple[int, int]]:
    """Start and stop of every run of labels (-100 between them)."""
    found, start = [], None
    for index, label in enumerate([*labels, -100]):
        if label != -100 and start is None:
            start = index
        elif label == -100 and start is not None:
            found.append((start, index))
            start = None
    return found


@torch.inference_mode()
def read(
    engine: Runtime,
    inputs: Mapping[str, Any],
    labels: Tensor,
    budget: Budget | float | None = None,
    full: FullCache | None = None,
) -> DialogueRun:
    """Feed one dialogue through a session under ``budget``.

    Args:
        inputs: what the processor returns for the whole dialogue; labels: int64 ``[T]``.
        full: of this dialogue, when several policies are compared.
    """
    turn = engine.family.turn(inputs, 0, engine.device)
    made = engine.budget if budget is None else Budget.of(budget)
    return read_at(engine, turn, labels, [made], full)[0]


@dataclass(frozen=True)
class Reading:
    """One dialogue to be read by sessions that differ in their budget only.

    Attributes:
        turn: the whole dialogue; labels: int64 ``[T]``, -100 where no answer stands.
        budgets: of the sessions; full: of this dialogue.
        cuts: token indices at which the prefill is cut: memory is brought down to the budget before
            what follows is known.
    """

    turn: Turn
    labels: Tensor
    budgets: Sequence[Budget]
    full: FullCache
    cuts: Sequence[int] = ()


def read_at(
    engine: Runtime,
    turn: Turn,
    labels: Tensor,
    budgets: Sequence[Budget],
    full: FullCache | None = None,
    cuts: Sequence[int] = (),
) -> list[DialogueRun]:
    """Feed one dialogue through sessions that differ in their budget only, side by side.

    Returns:
        One run per budget, in order.
    """
    full = FullCache.of(engine, turn, labels) if full is None else full
    return read_together(engine, [Reading(turn, labels, budgets, full, cuts)])[0]


@torch.inference_mode()
def read_together(engine: Runtime, readings: Sequence[Reading]) -> list[list[DialogueRun]]:
    """Feed several dialogues through sessions of one engine, in shared passes over the weights.

    What is read before the first eviction of a dialogue is read once for all its budgets.

    Returns:
        Per dialogue one run per budget, in order.
    """
    found: dict[int, list[DialogueRun]] = {}
    with ExitStack() as stack:
        walks = [stack.enter_context(closing(_walk(engine, reading))) for reading in readings]
        going = {index: next(walk) for index, walk in enumerate(walks)}
        while going:
            # Prompts wait for the answers under way: more of each then share a pass.
            answers = {index: one for index, one in going.items() if isinstance(one[1], int)}
            chosen = answers or going
            sessions = [session for mine, _ in chosen.values() for session in mine]
            given: list[Any] = [what for mine, what in chosen.values() for _ in mine]
            step = engine.decode if answers else extend_together
            logits = step(sessions, given).split([len(mine) for mine, _ in chosen.values()])
            for index, rows in zip(list(chosen), logits, strict=True):
                try:
                    going[index] = walks[index].send(rows)
                except StopIteration as end:
                    del going[index]
                    found[index] = end.value
    return [found[index] for index in range(len(readings))]


@torch.inference_mode()
def compare_states(
    decoder: Decoder, states: Tensor, full: Tensor, labels: Tensor
) -> list[ReadAnswer]:
    """Compare the answers of a dialogue that two passes have read whole, without a cache.

    Args:
        decoder: makes logits of states; states: ``[T, d]`` before the final norm; full: those of
            full attention.
        labels: int64 ``[T]``, -100 where no answer stands and at the first token.
    """
    found = []
    for start, stop in spans(labels.tolist()):
        blocks = []
        for block in torch.arange(start, stop).split(BLOCK):
            ours, theirs = (F.log_softmax(decoder.logits(x[block - 1]), -1) for x in (states, full))
            blocks.append(_answer(ours, theirs, labels[block]))
        found.append(_joined(blocks))
    return found


def _walk(
    engine: Runtime, reading: Reading
) -> Generator[tuple[list[CachedSequence], Turn | int], Tensor, list[DialogueRun]]:
    """Walk through a dialogue, one session per budget.

    Yields:
        the sessions that read next, and what: a part of the dialogue, or one token of an answer.
        Their logits ``[B, vocab]`` are sent back.
    """
    turn, labels = reading.turn, reading.labels
    where = spans(labels.tolist())
    parts = sorted({*reading.cuts, *(start for start, _ in where)} - {0})
    reference, answers = reading.full.logits(), [list[ReadAnswer]() for _ in reading.budgets]
    with ExitStack() as stack:
        sessions = []
        # Nothing is evicted inside a chunk, so budgets make no difference in the first one.
        done = min(parts[0], engine.prefill_chunk)
        own = float(done) if engine.policy.evicts else None
        with engine.session(own) as whole:
            logits = (yield [whole], turn.part(0, done)).expand(len(reading.budgets), -1)
            for budget in reading.budgets:
                sessions.append(stack.enter_context(whole.fork()))
                if engine.policy.evicts:
                    sessions[-1].set_budget(budget)
        for start, stop in where:
            for part in [part for part in parts if done < part <= start]:
                logits = yield sessions, turn.part(done, part)
                done = part
            blocks = [list[ReadAnswer]() for _ in reading.budgets]
            for target in labels[start:stop].split(BLOCK):
                given = []
                for token in target.tolist():
                    given.append(logits)
                    logits = yield sessions, token
                theirs = torch.stack([next(reference) for _ in given])
                _compare(blocks, torch.stack(given, 1), theirs, target)
            done = stop
            for kept, found in zip(answers, blocks, strict=True):
                kept.append(_joined(found))
        return [_dialogue_run(*pair) for pair in zip(sessions, answers, strict=True)]


def _compare(blocks: list[list[ReadAnswer]], ours: Tensor, theirs: Tensor, target: Tensor) -> None:
    """Record a part of an answer for each budget.

    Args:
        blocks: of each budget. ours: logits ``[B, T, vocab]`` under each; theirs: ``[T, vocab]``
            with all entries.
    """
    theirs = F.log_softmax(theirs, -1)
    for found, own in zip(blocks, ours, strict=True):
        found.append(_answer(F.log_softmax(own, -1), theirs, target))


def _answer(ours: Tensor, theirs: Tensor, target: Tensor) -> ReadAnswer:
    """Record one answer ``[T]`` from its log-probabilities ``[T, vocab]``."""
    best, target = ours.argmax(-1), target.to(ours.device)
    miss = (best != target).nonzero().flatten().tolist()
    return ReadAnswer(
        tokens=target.numel(),
        right=not miss,
        kl=float((theirs.exp() * (theirs - ours)).sum()),
        nll=float(F.nll_loss(ours, target, reduction="sum")),
        agree=int((best == theirs.argmax(-1)).sum()),
        wrong=tuple((index, int(best[index])) for index in miss),
    )


def _joined(blocks: Sequence[ReadAnswer]) -> ReadAnswer:
    """Join the blocks of one answer, each of :data:`BLOCK` tokens, the last maybe smaller."""
    return ReadAnswer(
        tokens=sum(block.tokens for block in blocks),
        right=all(block.right for block in blocks),
        kl=sum(block.kl for block in blocks),
        nll=sum(block.nll for block in blocks),
        agree=sum(block.agree for block in blocks),
        wrong=tuple(
            (number * BLOCK + index, generated)
            for number, block in enumerate(blocks)
            for index, generated in block.wrong
        ),
    )


def _dialogue_run(session: CachedSequence, answers: list[ReadAnswer]) -> DialogueRun:
    memory = session.memory()
    per_row = session.engine.cache.length[session.seq].tolist()
    return DialogueRun(
        answers,
        memory.tokens_seen,
        memory.entries,
        memory.evicted,
        per_row,
        memory.by_modality,
        memory.pages * session.engine.cache.pool.page_bytes,
    )
