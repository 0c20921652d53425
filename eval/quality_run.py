"""The readings of :mod:`eval.quality`: every dialogue through every side, in worker processes.

Each reading is one line of a journal: a run that was killed goes on where it was, and a larger
comparison reads only what is new.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Cell:
    """One reading of every dialogue: a policy with one set of gates under one budget.

    Attributes:
        gates: a folder, or None. fraction: budget as a share of the dialogue; None: no budget.
    """

    policy: str
    lookahead: float | None
    gates: str | None
    fraction: str | None

    def key(self) -> str:
        """Says all that decides a reading, the gates by their bytes."""
        gates = "none"
        if self.gates is not None:
            files = sorted(Path(self.gates).glob("*.safetensors")) or [Path(self.gates)]
            held = b"".join(path.read_bytes() for path in files if path.is_file())
            gates = hashlib.sha256(held or self.gates.encode()).hexdigest()[:16]
        return f"{self.policy}@{self.lookahead}:{gates} at {self.fraction}"

    def engine(self, base: Engine) -> Engine:
        """An engine over the weights of ``base``.

        Raises:
            InputError: a policy that scores with gates, and none given.
        """
        policy = make_policy(self.policy, 2 if self.lookahead is None else self.lookahead)
        if policy.scoring.needs_gates and policy.evicts and self.gates is None:
            raise InputError(f"policy {self.policy!r} needs gates: write {self.policy}:GATES")
        gates = None if self.gates is None else load_gates(self.gates, base.spec)
        return Engine(base.family, base.spec, base.decoder.weights, gates, policy)


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

    def cells(self) -> dict[str, list[Cell]]:
        """``"side at fraction"`` -> one cell per gate folder; the full cache under ``"full"``."""
        found = {"full": [Cell("full", None, None, None)]}
        for side, fraction in itertools.product(self.sides, self.fractions):
            found[f"{side.name} at {fraction}"] = [
                Cell(side.policy, side.lookahead, gates, fraction)
                for gates in side.gates or (None,)
            ]
        return found


class Reader:
    """The loaded model of a comparison and its engines, one per policy and gates."""

    def __init__(self, comparison: Comparison) -> None:
        self.comparison = comparison
        self.base = Engine.from_pretrained(
            comparison.model, policy="full", dtype=comparison.dtype, device="cpu"
        )
        self._engines: dict[Cell, Engine] = {}
        for cell in itertools.chain.from_iterable(comparison.cells().values()):
            self._engine(cell)  # wrong gates are found before hours of reading
        self._data: dict[str, Any] = {}

    def _engine(self, cell: Cell) -> Engine:
        whatever = dataclasses.replace(cell, fraction=None)
        if whatever not in self._engines:
            self._engines[whatever] = cell.engine(self.base)
        return self._engines[whatever]

    @torch.inference_mode()
    def read(self, source: str, index: int, cells: Sequence[Cell]) -> list[Record]:
        """One held-out dialogue through every cell; what :func:`record` keeps of each."""
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
        found = []
        for cell in cells:
            # The budget is a share of the whole dialogue, known to none of the sides in advance.
            share = float(Fraction(cell.fraction or 1))
            budget = Budget.of(max(1.0, share * labels.numel()))
            found.append(record(read(self._engine(cell), inputs, labels, budget, full)))
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
    """Read ``count`` dialogues through every cell, but for what the journal holds.

    Args:
        journal: JSONL of finished readings. They are kept under what decides them, so sides,
            seeds, budgets and dialogues can be added later.

    Returns:
        ``"side at fraction"`` -> per gate folder -> per dialogue what :func:`record` keeps.
    """
    cells = comparison.cells()
    keys = {cell: cell.key() for cell in itertools.chain.from_iterable(cells.values())}
    where = f"{comparison.model} {comparison.dtype} {comparison.max_length} {source}"
    done = _read_journal(journal, where)
    left = {
        index: [cell for cell in keys if (keys[cell], index) not in done] for index in range(count)
    }
    todo = {index: missing for index, missing in left.items() if missing}
    console = Console(stderr=True)
    if done:
        console.print(f"{source}: {len(done)} readings are in {journal}")
    with journal.open("a+") as file:
        file.write("\n")  # ends a line that was cut off
        made = _readings(comparison, source, todo, workers)
        for index, records in track(made, f"reading {source}", len(todo), console=console):
            for cell, found in zip(todo[index], records, strict=True):
                done[keys[cell], index] = found
                row = {"where": where, "cell": keys[cell], "index": index, "record": found}
                file.write(json.dumps(row) + "\n")
            file.flush()
    return {
        name: [[done[keys[cell], index] for index in range(count)] for cell in seeds]
        for name, seeds in cells.items()
    }


def _read_journal(path: Path, where: str) -> dict[tuple[str, int], Record]:
    found: dict[tuple[str, int], Record] = {}
    for line in path.read_text().splitlines() if path.is_file() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue  # blank, or the line that was being written when the run was killed
        if row["where"] == where:
            found[row["cell"], row["index"]] = row["record"]
    return found


def _readings(
    comparison: Comparison, source: str, todo: Mapping[int, list[Cell]], workers: int
) -> Iterator[tuple[int, list[Record]]]:
    if workers <= 1:
        reader = Reader(comparison)
        for index, cells in todo.items():
            yield index, reader.read(source, index, cells)
        return
    # Spawned, not forked: torch's threads do not survive a fork.
    with ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), _start, (comparison, torch.get_num_threads())
    ) as pool:
        waiting = {pool.submit(_read, source, index, cells): index for index, cells in todo.items()}
        for future in as_completed(waiting):
            yield waiting[future], future.result()


_reader: Reader | None = None


def _start(comparison: Comparison, threads: int) -> None:
    global _reader
    torch.set_num_threads(threads)
    _reader = Reader(comparison)


def _read(source: str, index: int, cells: list[Cell]) -> list[Record]:
    assert _reader is not None
    return _reader.read(source, index, cells)
