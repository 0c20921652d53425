"""What ``benchmarks.quality`` compares: methods, their budgets and the cells that these make.

A cell is a policy with one set of gates under one budget. Its key names all that decides a run.

A budget is a share of the dialogue (``1/8``) or entries (``64``). A number of 1 or less is a share
of the dialogue's tokens; a larger one is the mean number of entries per layer and KV head.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from tqdm import tqdm

from mmkv.engine.config import KV_FORMS, EngineConfig
from mmkv.engine.errors import InputError
from mmkv.engine.model.gates import (
    foreign_note,
    gate_folder,
    load_gates,
    load_write_gates,
    trained_age,
)
from mmkv.engine.policies import Budget, Policy, make_policy
from mmkv.engine.policies.scoring import Retention
from mmkv.engine.runtime import Runtime


def is_share(budget: str) -> bool:
    """Return whether a budget is a share, which grows with the dialogue."""
    return Fraction(budget) <= 1


def axis_label(budgets: Sequence[str]) -> str:
    """Return the label of a plot's axis over these budgets."""
    kinds = {is_share(budget) for budget in budgets}
    if len(kinds) > 1:
        return "budget"
    if kinds == {True}:
        return "budget, share of the context"
    return "budget, entries per layer and KV head"


_BRACKETS = re.compile(r"\[[^\[\]]*\]")


@dataclass(frozen=True)
class ComparedMethod:
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
    def parse(cls, text: str) -> ComparedMethod:
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
        folders = tuple(str(gate_folder(one)) for one in gates.split(",") if one)
        return cls(name or label, policy, number, folders, kv or "auto")


@dataclass(frozen=True)
class Cell:
    """One run over every dialogue: a policy with one set of gates under one budget.

    Attributes:
        gates: a folder, or None.
        budget: as :mod:`benchmarks.quality.methods` writes it; None: none.
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
            gates += f"+{digest(str(gate_folder(made.admission.gates)))}"
        scoring = made.scoring
        # Runs from before there were other ages than equation 9's do not name theirs.
        newest = scoring.newest_age if isinstance(scoring, Retention) else 1
        age = "" if newest == 1 else f" age {newest}"
        # Nor do runs at each step name their interval, which was the default of all policies.
        age += "" if made.interval == 1 else f" every {made.interval}"
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

    def unbudgeted(self) -> Cell:
        """Return what is run alike at every budget."""
        return dataclasses.replace(self, budget=None)

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
        budgets: as :mod:`benchmarks.quality.methods` writes them.
        max_length: longest dialogue in tokens.
        device: ``cpu`` or ``cuda``.
        in_bytes: a budget stands for the bytes that its entries take in bfloat16, so a cache that
            holds fewer bits keeps more of them.

    Raises:
        InputError: a budget that cannot be read, or methods or budgets that nothing tells apart.
    """

    model: str
    dtype: str
    methods: tuple[ComparedMethod, ...]
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
