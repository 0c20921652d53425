"""Presets: a policy by name, with parameters that a text such as ``snapkv:window=32`` sets."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from keyword import iskeyword

from mmkv.engine.errors import PolicyError
from mmkv.engine.policies.base import GROUPS, Policy

Value = int | float | bool | str

_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
# The number of newest tokens to keep has a short form: NAME+32 is NAME:recent=32.
NEWEST = "recent"


@dataclass(frozen=True)
class Parameter:
    """One setting of a preset. Its default says its type: int, float, bool, or one of some words.

    Attributes:
        place: where the paper gives the default, empty where it is a choice of this project.
        least, most: bounds of a number, both allowed.
        choices: the words that a text may be.
        path: whether the text is a path, such as that of gates; not part of the policy's name.
    """

    default: Value
    help: str
    place: str = ""
    least: float = -math.inf
    most: float = math.inf
    choices: tuple[str, ...] = ()
    path: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.default, str) and not self.path and self.default not in self.choices:
            raise PolicyError(
                f"a parameter's default {self.default!r} is none of its choices {self.choices}; "
                "text needs choices"
            )

    def parse(self, text: str) -> Value:
        """Return the value that ``text`` writes.

        Raises:
            PolicyError: it is of another type, out of bounds, or no choice; says what is taken.
        """
        value: Value | None = None
        try:
            if isinstance(self.default, str):
                value = text if self.path or text in self.choices else None
            elif isinstance(self.default, bool):
                value = {**dict.fromkeys(_TRUE, True), **dict.fromkeys(_FALSE, False)}[text.lower()]
            else:
                value = type(self.default)(text)
        except (ValueError, KeyError):
            pass
        number = value if isinstance(value, (int, float)) else self.least
        if value is None or not self.least <= number <= self.most:
            raise PolicyError(f"give {self.taken()}")
        return value

    def taken(self) -> str:
        """Say in a few words which values are taken."""
        if isinstance(self.default, str):
            return "a path" if self.path else " or ".join(self.choices)
        if isinstance(self.default, bool):
            return "true or false"
        kind = "a whole number" if isinstance(self.default, int) else "a number"
        bounds = [(self.least, "at least"), (self.most, "at most")]
        limits = [f"{words} {bound:g}" for bound, words in bounds if math.isfinite(bound)]
        return " of ".join([kind, *([" and ".join(limits)] if limits else [])])


@dataclass(frozen=True)
class Preset:
    """A published method and its parameters.

    Attributes:
        make: returns the policy; called with every parameter by keyword (``lambda_`` for the
            parameter ``lambda``). The name and the source of what it returns are set here.
        source: the paper's arXiv id, such as ``arXiv 2404.14469``; title: the paper's title.
        parameters: by name. One called ``lookahead`` is ``--lookahead`` where it is not given;
            one called ``age`` then follows the gates; ``recent``, a whole number, has the short
            form ``NAME+32``.
    """

    make: Callable[..., Policy]
    source: str = ""
    title: str = ""
    parameters: Mapping[str, Parameter] = field(default_factory=dict)

    def policy(
        self, name: str, given: Mapping[str, str], fallback: Mapping[str, Value] | None = None
    ) -> Policy:
        """Make the policy for parameters written as text.

        Args:
            name: the preset's. The policy's name adds what differs from the defaults.
            fallback: values for parameters of these names that are not given, in place of their
                defaults.

        Raises:
            PolicyError: an unknown parameter, or a value that cannot be.
        """
        default = {key: parameter.default for key, parameter in self.parameters.items()}
        default |= {key: value for key, value in (fallback or {}).items() if key in default}
        values = dict(default)
        for key, text in given.items():
            if key not in self.parameters:
                raise PolicyError(f"policy {name!r} has no parameter {key!r}; {self.describe()}")
            try:
                values[key] = self.parameters[key].parse(text)
            except PolicyError as error:
                raise PolicyError(f"policy {name!r}: {key} is {text!r}; {error}") from None
        made = self.make(**{key + "_" * iskeyword(key): value for key, value in values.items()})
        if not isinstance(made, Policy):
            return made  # the registry says what is wrong
        changed = {
            key: value
            for key, value in values.items()
            if value != default[key] and not self.parameters[key].path
        }
        return replace(made, name=full_name(name, changed), source=self.source or made.source)

    @property
    def takes_plus(self) -> bool:
        """Whether ``NAME+32`` sets how many of the newest tokens stay."""
        return NEWEST in self.parameters and isinstance(self.parameters[NEWEST].default, int)

    def describe(self) -> str:
        """Return the parameters and their defaults in one line."""
        if not self.parameters:
            return "it takes none"
        pairs = (
            f"{key}={'PATH' if one.path else show(one.default)}"
            for key, one in self.parameters.items()
        )
        return f"it takes {', '.join(pairs)}"


@dataclass(frozen=True)
class PolicyText:
    """A policy as users write it: ``NAME``, ``NAME+32``, ``NAME:key=value,...`` or
    ``NAME[key=value,...]``.

    ``;`` may stand for each comma, for places that split their text at commas.

    Attributes:
        given: the parameters as written; what follows ``+`` is ``recent``.
        plus: whether that short form was used.
    """

    name: str
    given: Mapping[str, str]
    plus: bool = False

    @classmethod
    def parse(cls, text: str) -> PolicyText:
        """Split ``text``. Raises PolicyError for text that is in none of the forms."""
        name, inside = text.strip(), ""
        if name.endswith("]") and "[" in name:
            name, _, inside = name[:-1].partition("[")
        elif ":" in name:
            name, _, inside = name.partition(":")
        name = name.strip()
        bare, plus, recent = name.rpartition("+")
        plus = "" if recent[:1].isalpha() else plus  # wgkv+snapkv is a name
        name = bare if plus else name
        given = {NEWEST: recent} if plus else {}
        for pair in filter(None, (part.strip() for part in inside.replace(";", ",").split(","))):
            key, equals, value = (part.strip() for part in pair.partition("="))
            if not (key and equals and value):
                raise PolicyError(
                    f"policy {text!r}: {pair!r} is not understood; write {name}:key=value,key=value"
                )
            if key in given:
                raise PolicyError(f"policy {text!r} sets {key} twice; give it once")
            given[key] = value
        return cls(name, given, bool(plus))


def full_name(name: str, changed: Mapping[str, Value]) -> str:
    """Return ``name`` with the parameters that differ from their defaults, in one order."""
    rest = dict(changed)
    if isinstance(rest.get(NEWEST), int):
        name += f"+{rest.pop(NEWEST)}"
    pairs = ",".join(f"{key}={show(rest[key])}" for key in sorted(rest))
    return f"{name}:{pairs}" if pairs else name


def show(value: Value) -> str:
    """Return a value as :meth:`Parameter.parse` reads it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


RECENT = Parameter(0, "newest tokens of every row that stay, whatever their scores", least=0)
WINDOW = Parameter(16, "newest queries, which observe and always stay", least=1)
KERNEL = Parameter(5, "positions that are pooled together, an odd number", least=1)
INTERVAL = Parameter(1, "decode steps between evictions, fewer under a small budget", least=1)
FLOOR = Parameter(
    0.2, "part of an equal share that a head is sure of", "its safeguard", least=0, most=1
)
POOL = Parameter("avg", "pooling over neighbouring positions", choices=("avg", "max"))


def group(default: str = "mean", place: str = "") -> Parameter:
    """How the query heads of a KV head are joined."""
    return Parameter(default, "how the query heads of a KV head are joined", place, choices=GROUPS)
