"""Given answers read through an engine under its budget, beside the full cache's predictions.

A dialogue is fed token by token as it would have been decoded: prompts in prefill chunks, answers
one token at a time, eviction after each. At every answer token the logits are compared with those
of plain full attention over the same tokens. An answer all of whose tokens are the most likely ones
is what greedy decoding would have said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.families.base import Turn
from engine.policies import Budget
from engine.runtime import Engine


@dataclass(frozen=True)
class Answer:
    """One answer, T tokens.

    Attributes:
        right: whether every token was the most likely one.
        kl: sum over tokens of KL(full || ours); nll: sum of negative log-likelihoods of the tokens.
        agree: tokens whose most likely continuation is that of the full cache.
    """

    tokens: int
    right: bool
    kl: float
    nll: float
    agree: int


@dataclass(frozen=True)
class Reading:
    """What one dialogue gave.

    Attributes:
        answers: in order.
        tokens_seen: length of the dialogue; entries: held at its end, over all rows; evicted: gone.
        per_row: entries at the end by layer and KV head; by_modality: over all of them.
    """

    answers: list[Answer]
    tokens_seen: int
    entries: int
    evicted: int
    per_row: list[list[int]]
    by_modality: dict[str, int]


@torch.inference_mode()
def full_logits(engine: Engine, turn: Turn, labels: Tensor) -> Tensor:
    """Logits float32 ``[N, vocab]`` of plain full attention where answers are predicted."""
    from training.losses import predicted
    from training.student import lay_out_turns, teacher_states

    states = teacher_states(engine, lay_out_turns(engine, [turn]))
    return engine.decoder.logits(states[predicted(labels)[0]])


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
    engine: Engine,
    inputs: Mapping[str, Any],
    labels: Tensor,
    budget: Budget | float | None = None,
    full: Tensor | None = None,
) -> Reading:
    """Feed one dialogue through a session under ``budget``.

    Args:
        inputs: what the processor returns for the whole dialogue; labels: int64 ``[T]``.
        full: what :func:`full_logits` gave, when several policies are compared.
    """
    turn = engine.family.turn(inputs, 0, engine.device)
    if full is None:
        full = full_logits(engine, turn, labels)
    reference = F.log_softmax(full, -1)
    answers: list[Answer] = []
    done, seen = 0, 0
    with engine.session(budget) as session:
        for start, stop in spans(labels.tolist()):
            if start > done:
                logits = session.extend(turn.part(done, start))
            given = []
            for index in range(start, stop):
                given.append(logits)
                logits = session.decode(int(labels[index]))
            done = stop
            count = stop - start
            ours = F.log_softmax(torch.stack(given), -1)
            theirs = reference[seen : seen + count]
            seen += count
            best = ours.argmax(-1)
            target = labels[start:stop].to(best.device)
            answers.append(
                Answer(
                    tokens=count,
                    right=bool((best == target).all()),
                    kl=float((theirs.exp() * (theirs - ours)).sum()),
                    nll=float(F.nll_loss(ours, target, reduction="sum")),
                    agree=int((best == theirs.argmax(-1)).sum()),
                )
            )
        memory = session.memory()
        per_row = engine.cache.length[session.seq].tolist()
    return Reading(
        answers, memory.tokens_seen, memory.entries, memory.evicted, per_row, memory.by_modality
    )
