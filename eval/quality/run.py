"""Run every dialogue of ``eval.quality`` through every method, in worker processes.

Each run of a dialogue is one row of a journal. A killed comparison continues from the journal, and
a larger one runs only what is new.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import multiprocessing
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from engine.cache.forms import FORMS
from engine.cache.layout import Layout
from engine.config import KV_FORMS, EngineConfig
from engine.errors import InputError
from engine.model.gates import foreign_note, load_gates, load_write_gates, trained_age
from engine.policies import Budget, Policy, make_policy
from engine.policies.scoring import Retention
from engine.runtime import Runtime
from eval.budgets import is_share
from eval.domains import held_out
from mmkv.measure.journal import Journal
from mmkv.measure.teacher_forced import DialogueRun, FullCache, read_at

Record = dict[str, Any]
_BRACKETS = re.compile(r"\[[^\[\]]*\]")


@dataclass(frozen=True)
class Method:
    """One of the compared methods: a policy with its gates.

    Attributes:
        name: its name in tables. lookahead: n of the retention score, None for the preset's.
        gates: gate folders, one per training seed; their runs are averaged.
        kv: the form of the cache.
    """

    name: str
    policy: str
    lookahead: float | None
    gates: tuple[str, ...]
    kv: str = "auto"

    @classmethod
    def parse(cls, text: str) -> Method:
        """Parse ``[NAME=]POLICY[@LOOKAHEAD][/KV][:GATES[,GATES]]``.

        Parameters of the policy stand in square brackets, since gates follow the colon:
        ``snapkv[window=32,kernel=7]``. ``dbtrimkv+N`` is a policy, too.

        Raises:
            InputError: for a lookahead that is no number, a form of the cache that is not known,
                or brackets that do not close.
        """
        outside, inside = _BRACKETS.sub("[]", text), "".join(_BRACKETS.findall(text))
        name, _, rest = outside.rpartition("=")
        label, _, gates = rest.partition(":")
        asked, _, kv = label.partition("/")
        policy, _, lookahead = asked.partition("@")
        if kv and kv not in KV_FORMS:
            raise InputError(f"--method {text!r}: {kv!r} is none of {', '.join(KV_FORMS)}")
        if not outside.count("[") == outside.count("]") == policy.endswith("[]"):
            raise InputError(
                f"--method {text!r}: brackets hold the policy's parameters and stand behind its "
                "name; write NAME=POLICY[key=value,key=value]@N:GATES"
            )
        policy, label = (part.replace("[]", inside) for part in (policy, label))
        try:
            number = float(lookahead) if lookahead else None
        except ValueError:
            raise InputError(
                f"--method {text!r}: lookahead {lookahead!r} is not a number; write POLICY@5:GATES"
            ) from None
        folders = tuple(filter(None, gates.split(",")))
        return cls(name or label, policy, number, folders, kv or "auto")


@dataclass(frozen=True)
class Cell:
    """One run over every dialogue: a policy with one set of gates under one budget.

    Attributes:
        gates: a folder, or None.
        budget: as :mod:`eval.budgets` writes it; None: none.
        kv: the form of the cache; in_bytes: as of :class:`Comparison`.
    """

    policy: str
    lookahead: float | None
    gates: str | None
    budget: str | None
    kv: str = "auto"
    in_bytes: bool = False

    def key(self) -> str:
        """Return all that decides a run, the gates by their bytes."""
        gates = "none" if self.gates is None else digest(self.gates)
        made = self.made()
        if made.admission is not None and made.admission.gates:
            gates += f"+{digest(made.admission.gates)}"
        scoring = made.scoring
        # Runs from before there were other ages than equation 9's do not name theirs.
        newest = scoring.newest_age if isinstance(scoring, Retention) else 1
        age = "" if newest == 1 else f" age {newest}"
        form = "" if self.kv == "auto" else f" kv {self.kv}"
        unit = " in bytes" if self.in_bytes else ""
        return f"{self.policy}@{self.lookahead}:{gates}{age}{form} at {self.budget}{unit}"

    def made(self) -> Policy:
        """Make the policy. Raises PolicyError, GateError."""
        lookahead = EngineConfig.lookahead if self.lookahead is None else self.lookahead
        age = "paper" if self.gates is None else trained_age(self.gates)
        return make_policy(self.policy, lookahead, age)

    def budget_for(self, tokens: int, worth: float = 1) -> Budget:
        """Compute the budget for a dialogue of ``tokens``; no method knows it in advance.

        ``worth``: entries of this cell's cache that stand for one.
        """
        written = self.budget or "1"
        amount = float(Fraction(written)) * worth
        return Budget.of(max(1.0, amount * tokens) if is_share(written) else amount)

    def engine(self, base: Runtime, model: str) -> Runtime:
        """Build an engine over the weights of ``base``, which were read from ``model``.

        Gates that were trained for another checkpoint are named on stderr.

        Raises:
            InputError: a policy that needs gates, and none given.
        """
        policy = self.made()
        if policy.gates and self.gates is None:
            raise InputError(f"policy {self.policy!r} needs gates: write {self.policy}:GATES")
        load = load_write_gates if policy.gates == "write" else load_gates
        gates = None if self.gates is None else load(self.gates, base.spec)
        note = None if gates is None else foreign_note(gates, model)
        if note is not None:
            _say_once(f"{self.gates}: {note}")
        weights = base.decoder.weights
        return Runtime(base.family, base.spec, weights, gates, policy, kv=self.kv)


@functools.cache  # some programs build an engine for every budget of a method
def _say_once(line: str) -> None:
    tqdm.write(line, file=sys.stderr)


@functools.cache
def digest(source: str) -> str:
    """Hash the weights in a folder, or one file of them; a hub id stands for itself."""
    folder = Path(source)
    files = [path for kind in ("*.safetensors", "*.pth") for path in sorted(folder.glob(kind))]
    held = hashlib.sha256()
    for path in files or [folder] * folder.is_file():
        held.update(path.read_bytes())
    if not files and not folder.is_file():
        held.update(source.encode())
    return held.hexdigest()[:16]


@dataclass(frozen=True)
class Comparison:
    """The compared methods and budgets, and how they are run.

    Attributes:
        budgets: as :mod:`eval.budgets` writes them.
        max_length: longest dialogue in tokens.
        device: ``cpu`` or ``cuda``.
        in_bytes: a budget stands for the bytes that its entries take in bfloat16, so a cache that
            holds fewer bits keeps more of them.

    Raises:
        InputError: a budget that cannot be read, or methods or budgets that nothing tells apart.
    """

    model: str
    dtype: str
    methods: tuple[Method, ...]
    budgets: tuple[str, ...]
    max_length: int = 8192
    device: str = "cpu"
    in_bytes: bool = False

    def described(self) -> str:
        """Return the model, by its bytes, and how it is run."""
        # A CPU is not named, so that older journals, which name no device, stay valid.
        where = "" if self.device == "cpu" else f" {self.device}"
        return f"{self.model} {digest(self.model)} {self.dtype}{where}"

    def __post_init__(self) -> None:
        names = [method.name for method in self.methods]
        for name in names:
            if name == "full":
                raise InputError(
                    "'full' is the full cache, which is always read; leave out that --method, or "
                    "write --method NAME=POLICY:GATES"
                )
            if names.count(name) > 1:
                raise InputError(
                    f"two methods are called {name!r}; write --method NAME=POLICY:GATES to tell "
                    "them apart"
                )
        amounts: dict[Fraction, str] = {}
        for text in self.budgets:
            try:
                amount = Fraction(text)
            except (ValueError, ZeroDivisionError):
                amount = Fraction(0)
            if amount <= 0:
                raise InputError(
                    f"budget {text!r}: give a share of the dialogue such as 1/8, or entries per "
                    "layer and head such as 64"
                )
            if amount in amounts:
                raise InputError(f"budget {text!r} is {amounts[amount]!r} again; leave one out")
            amounts[amount] = text

    def cells(self) -> dict[str, list[Cell]]:
        """Return one cell per gate folder under ``"method at budget"``.

        The full cache is under ``"full"``.
        """
        found = {"full": [Cell("full", None, None, None)]}
        for method, budget in itertools.product(self.methods, self.budgets):
            found[f"{method.name} at {budget}"] = [
                Cell(method.policy, method.lookahead, gates, budget, method.kv, self.in_bytes)
                for gates in method.gates or (None,)
            ]
        return found


class Reader:
    """The loaded model of a comparison and its engines, one per policy and gates."""

    def __init__(self, comparison: Comparison) -> None:
        self.comparison = comparison
        self.base = Runtime.from_pretrained(
            comparison.model, policy="full", dtype=comparison.dtype, device=comparison.device
        )
        self._engines: dict[Cell, Runtime] = {}
        for cell in itertools.chain.from_iterable(comparison.cells().values()):
            self._engine(cell)  # wrong gates show before the long run starts
        self._data: dict[str, Any] = {}

    def _engine(self, cell: Cell) -> Runtime:
        key = _unbudgeted(cell)
        if key not in self._engines:
            self._engines[key] = cell.engine(self.base, self.comparison.model)
        return self._engines[key]

    @torch.inference_mode()
    def read(self, source: str, index: int, cells: Sequence[Cell]) -> list[Record]:
        """Run one held-out dialogue through every cell; return a :func:`record` of each."""
        if source not in self._data:
            self._data[source] = held_out(self.comparison.model, source, self.comparison.max_length)
        example = self._data[source][index]
        inputs = {k: v for k, v in example.items() if k not in ("labels", "cuts")}
        labels, cuts = example["labels"].flatten().clone(), example.get("cuts", ())
        labels[0] = -100
        turn = self.base.family.turn(inputs, 0, self.base.device)
        if turn.next_position > self.base.spec.max_position:
            raise InputError(
                f"dialogue {index} of {source} reaches position {turn.next_position:,}, the model "
                f"was trained for {self.base.spec.max_position:,}; give shorter dialogues"
            )
        full = FullCache.of(self.base, turn, labels)
        found: dict[Cell, Record] = {}
        alike: dict[Cell, list[Cell]] = {}
        for cell in cells:
            alike.setdefault(_unbudgeted(cell), []).append(cell)
        for key, mine in alike.items():
            engine = self._engine(key)
            worth = bf16_worth(engine.cache.pool.layout) if key.in_bytes else 1
            budgets = [cell.budget_for(labels.numel(), worth) for cell in mine]
            made = read_at(engine, turn, labels, budgets, full, cuts)
            found.update(zip(mine, map(record, made), strict=True))
        return [found[cell] for cell in cells]


def _unbudgeted(cell: Cell) -> Cell:
    return dataclasses.replace(cell, budget=None)


def bf16_worth(layout: Layout) -> float:
    """Return how many entries of a cache take the bytes of one in bfloat16, metadata included."""
    half = dataclasses.replace(layout, form=FORMS["bf16"])
    return half.entry_bytes() / layout.entry_bytes()


def record(run: DialogueRun) -> Record:
    """Return the record of one dialogue in the result file."""
    return {
        "right": [answer.right for answer in run.answers],
        "tokens": [answer.tokens for answer in run.answers],
        "kl": [round(answer.kl, 5) for answer in run.answers],
        "nll": [round(answer.nll, 5) for answer in run.answers],
        "agree": [answer.agree for answer in run.answers],
        "wrong": [answer.wrong for answer in run.answers],
        "seen": run.tokens_seen,
        "entries": run.entries,
        "evicted": run.evicted,
        "visual": sum(n for name, n in run.by_modality.items() if name != "text"),
        "per_row": run.per_row,
        "bytes": run.nbytes,
    }


class ComparisonRuns:
    """All runs of a comparison: from the journal, or run when they are asked for.

    A context manager. The model is loaded once for all sources, and only if something is left to
    read; so are the workers.

    Args:
        journal: finished runs. They are kept under what decides them, so methods, seeds, budgets
            and dialogues can be added later.
        reader: what reads them, for programs that keep something else of each.
    """

    def __init__(
        self,
        comparison: Comparison,
        journal: Journal,
        workers: int = 1,
        reader: type[Reader] = Reader,
    ) -> None:
        self.comparison, self.journal = comparison, journal
        self.workers, self.kind = workers, reader
        self._reader: Reader | None = None
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> ComparisonRuns:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    def of(self, source: str, count: int, first: int = 0) -> dict[str, list[list[Record]]]:
        """Run ``count`` dialogues of a source, from the one with index ``first``, through every
        cell.

        Returns:
            ``"method at budget"`` -> per gate folder -> per dialogue what the reader keeps.
        """
        compared = self.comparison
        cells = compared.cells()
        keys = {cell: cell.key() for cell in itertools.chain.from_iterable(cells.values())}
        where = f"{compared.described()} {compared.max_length} {source} {self.kind.__name__}"
        done = {
            (row["cell"], row["index"]): row["record"] for row in self.journal.rows("where", where)
        }
        wanted = range(first, first + count)
        left = {
            index: [cell for cell in keys if (keys[cell], index) not in done] for index in wanted
        }
        todo = {index: missing for index, missing in left.items() if missing}
        if done:
            note = f"{source}: {len(done)} runs are in {self.journal.path}"
            tqdm.write(note, file=sys.stderr)
        made = self._read(source, todo)
        for index, records in tqdm(made, f"reading {source}", len(todo), unit="dialogue"):
            rows = [
                {"where": where, "cell": keys[cell], "index": index, "record": found}
                for cell, found in zip(todo[index], records, strict=True)
            ]
            for row in self.journal.add(rows):
                done[row["cell"], index] = row["record"]
        return {
            name: [[done[keys[cell], index] for index in wanted] for cell in seeds]
            for name, seeds in cells.items()
        }

    def _read(
        self, source: str, todo: Mapping[int, list[Cell]]
    ) -> Iterator[tuple[int, list[Record]]]:
        if not todo:
            return
        if self.workers <= 1:
            self._reader = self._reader or self.kind(self.comparison)
            for index, cells in todo.items():
                yield index, self._reader.read(source, index, cells)
            return
        if self._pool is None:
            # Spawned, not forked: torch's threads do not survive a fork.
            self._pool = ProcessPoolExecutor(
                self.workers,
                multiprocessing.get_context("spawn"),
                _start,
                (self.kind, self.comparison, torch.get_num_threads()),
            )
        waiting = {
            self._pool.submit(_read, source, index, cells): index for index, cells in todo.items()
        }
        for future in as_completed(waiting):
            yield waiting[future], future.result()


_reader: Reader | None = None


def _start(kind: type[Reader], comparison: Comparison, threads: int) -> None:
    global _reader
    torch.set_num_threads(threads)
    _reader = kind(comparison)


def _read(source: str, index: int, cells: list[Cell]) -> list[Record]:
    assert _reader is not None
    return _reader.read(source, index, cells)
