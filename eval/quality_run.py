"""The readings of :mod:`eval.quality`: every dialogue through every side, in worker processes.

Each finished dialogue is one line of a journal, so that a run that was killed goes on where it was.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from engine.errors import InputError
from engine.gates import load_gates
from engine.policies import Budget, make_policy
from engine.runtime import Engine
from eval.forced import Reading, full_logits, read
from training.sources import examples

Record = dict[str, Any]

_ENDLESS = 2**31  # dialogue n of a source does not depend on how many are read


@dataclass(frozen=True)
class Side:
    """One of the things compared.

    Attributes:
        name: what tables call it. lookahead: n of the retention score, None for the preset's.
        gates: gate folders, one per training seed; their readings are averaged.
    """

    name: str
    policy: str
    lookahead: float | None
    gates: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Side:
        """``[NAME=]POLICY[@LOOKAHEAD][:GATES[,GATES]]``.

        Raises:
            InputError: for a lookahead that is no number.
        """
        name, _, rest = text.rpartition("=")
        policy, _, gates = rest.partition(":")
        policy, _, lookahead = policy.partition("@")
        try:
            number = float(lookahead) if lookahead else None
        except ValueError:
            raise InputError(
                f"--side {text!r}: lookahead {lookahead!r} is not a number; write POLICY@5:GATES"
            ) from None
        return cls(
            name or rest.partition(":")[0], policy, number, tuple(filter(None, gates.split(",")))
        )

    def engines(self, base: Engine) -> list[Engine]:
        """One engine per gate folder over the weights of ``base``.

        Raises:
            InputError: a policy that scores with gates, and none given.
        """
        policy = make_policy(self.policy, 2 if self.lookahead is None else self.lookahead)
        if policy.scoring.needs_gates and policy.evicts and not self.gates:
            raise InputError(f"side {self.name!r} needs gates: write {self.policy}:GATES")
        made = [load_gates(folder, base.spec) for folder in self.gates] or [None]
        return [
            Engine(base.family, base.spec, base.decoder.weights, gates, policy) for gates in made
        ]


@dataclass(frozen=True)
class Comparison:
    """What is read, and how.

    Attributes:
        fractions: budgets as shares of each dialogue's length, such as ``1/8``.
        max_length: longest dialogue in tokens.
    """

    model: str
    dtype: str
    sides: tuple[Side, ...]
    fractions: tuple[str, ...]
    max_length: int = 8192

    def digest(self) -> str:
        """Changes with anything that changes a reading, the gates' own bytes included."""
        digest = hashlib.sha256(json.dumps(asdict(self)).encode())
        for folder in itertools.chain.from_iterable(side.gates for side in self.sides):
            for path in sorted(Path(folder).glob("gates.*")):
                digest.update(path.read_bytes())
        return digest.hexdigest()[:16]


class Reader:
    """The loaded sides of a comparison."""

    def __init__(self, comparison: Comparison) -> None:
        self.comparison = comparison
        self.base = Engine.from_pretrained(
            comparison.model, policy="full", dtype=comparison.dtype, device="cpu"
        )
        self._engines = {side.name: side.engines(self.base) for side in comparison.sides}
        self._data: dict[str, Any] = {}

    @torch.inference_mode()
    def read(self, source: str, index: int) -> dict[str, list[Record]]:
        """One held-out dialogue through every side.

        Returns:
            ``"side at fraction"`` -> per gate folder what :func:`record` keeps. The full cache
            stands under ``"full"``.
        """
        if source not in self._data:
            self._data[source] = examples(
                self.comparison.model, [source], _ENDLESS, seed=0,
                max_length=self.comparison.max_length, split="heldout",
            )  # fmt: skip
        example = self._data[source][index]
        inputs = {name: value for name, value in example.items() if name != "labels"}
        labels = example["labels"].flatten().clone()
        labels[0] = -100
        full = full_logits(self.base, self.base.family.turn(inputs, 0, self.base.device), labels)
        found = {"full": [record(read(self.base, inputs, labels, full=full))]}
        for side, fraction in itertools.product(self._engines, self.comparison.fractions):
            # The budget is a share of the whole dialogue, known to none of the sides in advance.
            budget = Budget.of(max(1.0, float(Fraction(fraction)) * labels.numel()))
            found[f"{side} at {fraction}"] = [
                record(read(engine, inputs, labels, budget, full)) for engine in self._engines[side]
            ]
        return found


def record(reading: Reading) -> Record:
    """What the result file keeps of one dialogue."""
    return {
        "right": [answer.right for answer in reading.answers],
        "tokens": [answer.tokens for answer in reading.answers],
        "kl": [round(answer.kl, 5) for answer in reading.answers],
        "nll": [round(answer.nll, 5) for answer in reading.answers],
        "agree": [answer.agree for answer in reading.answers],
        "seen": reading.tokens_seen,
        "entries": reading.entries,
        "evicted": reading.evicted,
        "visual": sum(n for name, n in reading.by_modality.items() if name != "text"),
        "per_row": reading.per_row,
    }


def compare(
    comparison: Comparison, source: str, count: int, journal: Path, workers: int = 1
) -> dict[str, list[list[Record]]]:
    """Read ``count`` dialogues, those in the journal excepted.

    Args:
        journal: JSONL of finished dialogues; lines of another comparison are left alone.

    Returns:
        ``"side at fraction"`` -> per gate folder -> per dialogue what :func:`record` keeps.
    """
    key = f"{comparison.digest()} {source}"
    done = {i: found for i, found in _read_journal(journal, key) if i < count}
    left = [index for index in range(count) if index not in done]
    console = Console(stderr=True)
    if done:
        console.print(f"{source}: {len(done)} of {count} dialogues are in {journal}")
    with journal.open("a+") as file:
        file.write("\n")  # ends a line that was cut off
        for index, found in track(
            _readings(comparison, source, left, workers),
            f"reading {source}",
            len(left),
            console=console,
        ):
            done[index] = found
            file.write(json.dumps({"key": key, "index": index, "found": found}) + "\n")
            file.flush()
    names = done[0]
    return {
        name: [[done[i][name][seed] for i in range(count)] for seed in range(len(names[name]))]
        for name in names
    }


def _read_journal(path: Path, key: str) -> Iterator[tuple[int, dict[str, list[Record]]]]:
    if not path.is_file():
        return
    for line in path.read_text().splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue  # blank, or the line that was being written when the run was killed
        if row["key"] == key:
            yield row["index"], row["found"]


def _readings(
    comparison: Comparison, source: str, indices: Sequence[int], workers: int
) -> Iterator[tuple[int, dict[str, list[Record]]]]:
    if workers <= 1:
        reader = Reader(comparison)
        for index in indices:
            yield index, reader.read(source, index)
        return
    # Spawned, not forked: torch's threads do not survive a fork.
    with ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), _start, (comparison, torch.get_num_threads())
    ) as pool:
        waiting = {pool.submit(_read, source, index): index for index in indices}
        for future in as_completed(waiting):
            yield waiting[future], future.result()


_reader: Reader | None = None


def _start(comparison: Comparison, threads: int) -> None:
    global _reader
    torch.set_num_threads(threads)
    _reader = Reader(comparison)


def _read(source: str, index: int) -> dict[str, list[Record]]:
    assert _reader is not None
    return _reader.read(source, index)
