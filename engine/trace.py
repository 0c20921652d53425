"""Recorder: which entries of a sequence were dropped at which step, and with what scores.

An entry dies once, and what still lives lies in the cache; so a list of deaths, in their order, and
the cache at the end give the retained sets of every step in between. A death is 20 bytes. C writes
it where it drops the entry; on a GPU it stays on the device until somebody reads, or until there
are many, at an eviction, which reads lengths anyway.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from mmkv.engine.policies.base import kernel_of
from mmkv.engine.policies.selection import MOST_ENTRIES

if TYPE_CHECKING:
    from mmkv.engine.policies import CacheView
    from mmkv.engine.sequence import CachedSequence

# ``struct death`` of native.h.
DEATH = np.dtype(
    [("row", "<i4"), ("position", "<i4"), ("log_beta", "<f4"), ("score", "<f4"), ("cause", "<i4")]
)
# Why: its score, a write gate, a pruner, or as it was asked.
EVICTED, REFUSED, PRUNED, FORGOTTEN = range(4)
KINDS = ("start", "prompt", "reply", "budget", "shared", "forget", "context")
_BLOCK = 2**15  # deaths in a block of the list
_MOST_WAITING = 2**14  # deaths that may stay on a device
_MOST_STEPS = 2**20
_MOST_SAMPLES = 32


@dataclass(frozen=True)
class Record:
    """A recorded sequence up to now; S steps, T tokens.

    A step is a chunk of a prompt, a token of a reply, a change of the budget, an eviction by a
    budget that sessions share, the end of a thought that is forgotten, or what goes since a row is
    too long for the context; step 0 is where the recording begins, or the last step before the
    oldest one that is still known.

    Attributes:
        layers, kv_heads: a row is ``layer * kv_heads + head``.
        seen: int64 ``[S]`` tokens seen after each step; allowed: int64 ``[S]`` entries that the
            budget allows, -1 without one of its own; kind: uint8 ``[S]``, of :data:`KINDS`.
        token_ids: int64 ``[T]``, -1 where unknown; modality: uint8 ``[T]``.
        deaths: :data:`DEATH` ``[D]`` in the order of ``died_at``, then row, then position.
        died_at: int64 ``[D]`` the step of each.
        row, position, log_beta: ``[N]`` of the entries that live, in the order of rows, then
            positions.
        samples: for scores that do not follow from log_beta or position: (step, row, position,
            score) of what stood at some steps, before that step's cut.
    """

    layers: int
    kv_heads: int
    seen: np.ndarray
    allowed: np.ndarray
    kind: np.ndarray
    token_ids: np.ndarray
    modality: np.ndarray
    deaths: np.ndarray
    died_at: np.ndarray
    row: np.ndarray
    position: np.ndarray
    log_beta: np.ndarray
    samples: tuple[tuple[int, np.ndarray, np.ndarray, np.ndarray], ...] = ()

    def born_at(self, position: np.ndarray) -> np.ndarray:
        """Steps after which entries at ``position`` stood first, 0 for what was there before."""
        return np.searchsorted(self.seen, position, side="right")

    def retained(self, step: int) -> list[list[np.ndarray]]:
        """Token indices kept after ``step``, ``[layer][kv_head]``, each ascending int64.

        Steps below 0 count from the end. Raises IndexError: no such step.
        """
        step = range(len(self.seen))[step]
        later = self.deaths[self.died_at > step]
        row = np.concatenate([self.row, later["row"]])
        position = np.concatenate([self.position, later["position"]]).astype(np.int64)
        there = position < self.seen[step]
        row, position = row[there], position[there]
        order = np.lexsort((position, row))
        ends = np.bincount(row, minlength=self.layers * self.kv_heads).cumsum()
        rows = np.split(position[order], ends[:-1])
        return [rows[i : i + self.kv_heads] for i in range(0, len(rows), self.kv_heads)]

    def visible_until(self) -> np.ndarray:
        """Return int32 ``[L, H, T]``: the first token that no longer sees each entry.

        Token t sees entry i if ``i <= t < until[..., i]``: a step's tokens are read before its cut.
        It is T, or more, for what lives; of tokens from before the first step nothing is known.
        """
        tokens = int(self.seen[-1])
        until = np.full((self.layers * self.kv_heads, tokens), tokens, np.int32)
        until[self.deaths["row"], self.deaths["position"]] = self.seen[self.died_at]
        return until.reshape(self.layers, self.kv_heads, tokens)


class Recorder:
    """Takes down steps and deaths; made by :meth:`CachedSequence.record`.

    The list of deaths takes ``limit`` bytes: beyond, the oldest steps are forgotten, and the record
    begins later; only the present step stays whole, however many die in it. A token takes 5 bytes
    more, a step 25.
    """

    LIMIT: ClassVar[int] = 2**26

    def __init__(self, session: CachedSequence, limit: int) -> None:
        self.limit = limit
        self._most_blocks = max(limit // (_BLOCK * DEATH.itemsize), 2)
        self._blocks, self._used = [np.empty(_BLOCK, DEATH)], [0]
        self._addressed: np.ndarray | None = None
        self._address = 0
        self._waiting: list[tuple[Tensor, Tensor, int]] = []
        self._many_wait = 0
        self._seen, self._allowed, self._died = array("q"), array("q"), array("q")
        self._kind = bytearray()
        self._ids, self._modality = array("i"), bytearray()
        self._given: list[tuple[int, Tensor, Tensor]] = []  # of prompts, wherever they lie
        self._next: int | tuple[Tensor, Tensor] | None = None
        kernel = kernel_of(session.engine.policy.scoring)
        self._samples: list[tuple[int, Tensor, Tensor, Tensor]] = []
        self._samples_every = 0 if kernel in ("retention", "recency") else 1
        self._offered = 0  # to be sampled
        self._first = 0  # steps that are forgotten
        # Position of the first token, what readers show beside the tokens from there, its bytes.
        self.media: list[tuple[int, Any, int]] = []
        self._ids.extend([-1] * session.seen)
        self._modality.extend(bytes(session.seen))
        view = session.view()
        modality = view.modality.cpu().numpy()
        for at, kind in zip(view.position.tolist(), modality.tolist(), strict=True):
            self._modality[at] = kind
        self.step(session, "start")

    @property
    def nbytes(self) -> int:
        """Bytes that the record takes."""
        columns = (self._seen, self._allowed, self._died, self._ids)
        taken = sum(len(column) * column.itemsize for column in columns)
        taken += sum(12 * len(scores) for *_, scores in self._samples)
        taken += sum(size for *_, size in self.media)
        return taken + len(self._kind) + len(self._modality) + len(self._blocks) * _BLOCK * 20

    # What the engine calls.

    def expect(self, tokens: int | tuple[Tensor, Tensor]) -> None:
        """Note what the next step appends: a token, or ids and modality ``[C]`` of a prompt."""
        self._next = tokens

    def step(self, session: CachedSequence, kind: str = "") -> None:
        """Begin a step: what dies from now on dies in it."""
        given, new = self._next, session.seen - len(self._ids)
        one = -1
        if isinstance(given, tuple):
            self._given.append((len(self._ids), *given))
            kind = kind or "prompt"
        elif given is not None:
            one = given
        self._ids.extend([one] * new)
        self._modality.extend(bytes(new))
        self._next = None
        self._seen.append(session.seen)
        engine = session.engine
        allowed = session.allowed_entries if engine.policy.evicts else MOST_ENTRIES
        self._allowed.append(allowed if allowed < MOST_ENTRIES else -1)
        self._died.append(0)
        self._kind.append(KINDS.index(kind or "reply"))
        if len(self._seen) > _MOST_STEPS:
            self._flush()
            self._forget(_MOST_STEPS // 4)

    def room(self, most: int) -> int:
        """Return the address at which C may write ``most`` deaths."""
        if self._used[-1] + most > _BLOCK:
            self._make_room(most)
            self._trim()
        if self._addressed is not self._blocks[-1]:  # numpy takes microseconds to tell
            self._addressed = self._blocks[-1]
            self._address = self._addressed.ctypes.data
        return self._address + self._used[-1] * DEATH.itemsize

    def filled(self, count: int) -> None:
        """Count deaths that C has written."""
        self._used[-1] += count
        self._died[-1] += count

    def died(self, view: CacheView, victims: Tensor, scores: Tensor, cause: int = EVICTED) -> None:
        """Note entries of ``view``, by their indices ``[K]``, with ``scores [N]`` of all."""
        whole = torch.stack([view.row[victims].int(), view.position[victims].int()])
        real = torch.stack([view.log_beta[victims], scores[victims].float()])
        self._note(whole, real, cause)

    @property
    def samples_next(self) -> bool:
        """Whether the next scores that are offered would be kept."""
        return bool(self._samples_every) and self._offered % self._samples_every == 0

    def sample(self, view: CacheView, scores: Tensor) -> None:
        """Keep ``scores [N]`` of ``view``, now and then: fewer the longer the record is."""
        if self.samples_next:
            kept = (view.row.int(), view.position.int(), scores.float().clone())
            self._samples.append((self._first + len(self._seen) - 1, *kept))
            if len(self._samples) > _MOST_SAMPLES:
                del self._samples[1::2]
                self._samples_every *= 2
        self._offered += 1

    def missing(self, view: CacheView, count: int, cause: int) -> None:
        """Note the entries of the newest ``count`` tokens that are not in ``view``."""
        there = torch.zeros(view.rows, count, dtype=torch.bool, device=view.row.device)
        new = view.position >= view.seen - count
        there[view.row[new], view.position[new] - (view.seen - count)] = True
        gone = (~there).nonzero().T.int()
        gone[1] += view.seen - count
        nothing = torch.full(gone.shape, torch.nan, device=gone.device)
        self._note(gone, nothing, cause)

    def rewind(self, seen: int) -> None:
        """Go back to the last step after which ``seen`` tokens had been seen."""
        self._flush()  # which may forget steps
        keep = len(self._seen)
        while keep > 1 and self._seen[keep - 1] > seen:
            keep -= 1
        gone = sum(self._died[keep:])
        while gone:
            taken = min(gone, self._used[-1])
            self._used[-1] -= taken
            gone -= taken
            if gone:
                self._blocks.pop()
                self._used.pop()
        self._blocks[-1] = self._blocks[-1].copy()  # a fork may have this one, too
        for column in (self._seen, self._allowed, self._died, self._kind):
            del column[keep:]
        self._seen[-1] = min(self._seen[-1], seen)
        self._samples = [sample for sample in self._samples if sample[0] < self._first + keep]
        self.media = [one for one in self.media if one[0] < seen]
        self._resolve()
        del self._ids[seen:], self._modality[seen:]
        self._next = None

    def fork(self) -> Self:
        """Copy the record; both go on, each for itself."""
        self._flush()
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other._blocks = [*self._blocks[:-1], self._blocks[-1].copy()]  # full ones stay as they are
        other._used, other._waiting = list(self._used), []
        lists = ("seen", "allowed", "died", "kind", "ids", "modality", "given", "samples")
        for name in (*(f"_{name}" for name in lists), "media"):
            setattr(other, name, getattr(self, name)[:])
        return other

    # What readers call.

    def read(self, session: CachedSequence) -> Record:
        """Copy what is known to the host, together with what the sequence holds now."""
        with session.engine.lock:
            self._flush()
            self._resolve()
            view = session.view()
            held = [x.cpu().numpy() for x in (view.row, view.position, view.log_beta)]
            order = np.lexsort((held[1], held[0]))
            died = np.array(self._died, np.int64)
            deaths = np.concatenate(
                [block[:used] for block, used in zip(self._blocks, self._used, strict=True)]
            )
            at = np.repeat(np.arange(len(died)), died)
            by_step = np.lexsort((deaths["position"], deaths["row"], at))
            return Record(
                view.layers,
                view.kv_heads,
                np.array(self._seen, np.int64),
                np.array(self._allowed, np.int64),
                np.frombuffer(bytes(self._kind), np.uint8),
                np.array(self._ids, np.int64),
                np.frombuffer(bytes(self._modality), np.uint8),
                deaths[by_step],
                at[by_step],
                held[0][order],
                held[1][order],
                held[2][order],
                tuple(
                    (
                        step - self._first,
                        row.cpu().numpy(),
                        position.cpu().numpy(),
                        score.cpu().numpy(),
                    )
                    for step, row, position, score in self._samples
                    if step >= self._first
                ),
            )

    def _note(self, whole: Tensor, real: Tensor, cause: int) -> None:
        count = whole.shape[1]
        self._died[-1] += count
        self._waiting.append((whole, real, cause))
        self._many_wait += count
        if whole.device.type == "cpu" or self._many_wait > _MOST_WAITING:
            self._flush()

    def _flush(self) -> None:
        """Bring what waits on a device to the list."""
        for whole, real, cause in self._waiting:
            (row, position), (log_beta, score) = whole.cpu().numpy(), real.cpu().numpy()
            for start in range(0, len(row), _BLOCK):
                part = slice(start, start + _BLOCK)
                count = len(row[part])
                self._make_room(count)
                note = self._blocks[-1][self._used[-1] : self._used[-1] + count]
                note["row"], note["position"] = row[part], position[part]
                note["log_beta"], note["score"], note["cause"] = log_beta[part], score[part], cause
                self._used[-1] += count
        self._waiting, self._many_wait = [], 0
        self._trim()  # now that all who died are in the list

    def _resolve(self) -> None:
        """Bring the token ids of prompts to the host."""
        for start, ids, modality in self._given:
            self._ids[start : start + len(ids)] = array("i", ids.tolist())
            self._modality[start : start + len(ids)] = bytes(modality.tolist())
        self._given = []

    def _make_room(self, count: int) -> None:
        if self._used[-1] + count > _BLOCK:
            self._blocks.append(np.empty(_BLOCK, DEATH))
            self._used.append(0)

    def _trim(self) -> None:
        """Forget the steps that the first blocks tell of, while there are too many blocks."""
        before = len(self._blocks) + 1
        while self._most_blocks < len(self._blocks) < before:
            before = len(self._blocks)
            steps, left = 0, self._used[0]
            while left > 0 and steps < len(self._died) - 1:  # the present step stays whole
                left -= self._died[steps]
                steps += 1
            self._forget(steps)

    def _forget(self, steps: int) -> None:
        """Let the oldest steps go, and who died in them; the last of them is the new start.

        Nothing may wait on a device.
        """
        gone = sum(self._died[:steps])
        self._first += max(steps - 1, 0)
        for column in (self._seen, self._allowed, self._died, self._kind):
            del column[: max(steps - 1, 0)]
        self._died[0], self._kind[0] = 0, 0
        while gone:
            taken = min(gone, self._used[0])
            gone -= taken
            if taken == self._used[0] and len(self._blocks) > 1:
                del self._blocks[0], self._used[0]
            else:
                self._blocks[0] = np.roll(self._blocks[0], -taken)
                self._used[0] -= taken
