"""Policies by name: one row per published method, and those that others register.

Programs call :func:`register_policy`; packages use the entry-point group ``mmkv.policies``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import is_dataclass, replace

from engine.config import EngineConfig, check_lookahead
from engine.errors import PolicyError
from engine.policies.allocation import GlobalAllocation, HeadAllocation
from engine.policies.base import Needs, Policy
from engine.policies.scoring import Recency, Retention, WindowAttention
from engine.registry import Registry

Make = Callable[[float], Policy]

PRESETS: dict[str, Callable[[float], Policy]] = {
    "full": lambda n: Policy("full", Recency(), None, source="baseline"),
    "dbtrimkv": lambda n: Policy(
        "dbtrimkv", Retention(n), GlobalAllocation(), source="arXiv 2605.09649"
    ),
    "trimkv": lambda n: Policy("trimkv", Retention(1), HeadAllocation(), source="arXiv 2512.03324"),
    "streamingllm": lambda n: Policy(
        "streamingllm",
        Recency(),
        HeadAllocation(),
        protect_first=4,
        source="arXiv 2309.17453",
    ),
    "snapkv": lambda n: Policy(
        "snapkv",
        WindowAttention(window=16, kernel=5),
        HeadAllocation(),
        protect_recent=16,
        source="arXiv 2404.14469",
    ),
}
_REGISTRY: Registry[Policy | Make] = Registry("policy", "mmkv.policies", PRESETS, PolicyError)


def register_policy(name: str, policy: Policy | Make) -> None:
    """Give a policy a name for this process: ``policy=NAME`` and ``--policy NAME`` find it.

    Args:
        policy: a :class:`Policy`, or what makes one from a lookahead. It takes the name over.

    Raises:
        PolicyError: a preset's name, one that a command line cannot carry, or not a policy.
    """
    if isinstance(policy, Policy):
        check_policy(policy)
    elif not callable(policy):
        raise PolicyError(_not_a_policy(name, policy))
    _REGISTRY.register(name, policy)


def names() -> list[str]:
    """Return the names that :func:`make_policy` knows: presets, then those of others."""
    return _REGISTRY.names()


def describe_added() -> list[str]:
    """Return one line for each policy that is not a preset, saying where it comes from."""
    return _REGISTRY.describe_added()


def make_policy(name: str, lookahead: float = EngineConfig.lookahead) -> Policy:
    """Make the policy ``name``, a preset or one that was registered.

    ``dbtrimkv+N`` and ``trimkv+N`` also keep the newest N tokens of every row, whatever their
    scores: what TRIM-KV and DBTrimKV leave to the gates, for streams longer than gates were trained
        for.

    Args:
        lookahead: n = T - t (DBTrimKV, arXiv 2605.09649, equation 9); of the presets only
            dbtrimkv reads it.

    Raises:
        PolicyError: for an unknown name, a lookahead below 1, or an N that cannot be.
    """
    name, plus, recent = name.partition("+")
    found = _REGISTRY.find(name)
    if found is None:
        raise PolicyError(f"unknown policy {name!r}; choose one of {', '.join(names())}")
    check_lookahead(lookahead)
    if name in PRESETS:
        policy = PRESETS[name](lookahead)
    else:
        policy = replace(_made(name, found, lookahead), name=name)
    if not plus:
        return policy
    if not recent.isdecimal() or not isinstance(policy.scoring, Retention):
        raise PolicyError(
            f"policy {name + plus + recent!r}: only dbtrimkv and trimkv take +N, the number of "
            "newest tokens to keep; write dbtrimkv+32"
        )
    return replace(policy, name=f"{name}+{int(recent)}", protect_recent=int(recent))


def check_policy(policy: Policy) -> None:
    """Check what an engine relies on, so that a mistake shows before a model is loaded.

    Raises:
        PolicyError: a scorer without needs or score, or one that is not a dataclass.
    """
    scorer = policy.scoring
    kind = type(scorer).__name__
    if isinstance(scorer, type):
        raise PolicyError(
            f"policy {policy.name!r} has the class {scorer.__name__} for a scorer; give an "
            f"instance: {scorer.__name__}()"
        )
    if not isinstance(getattr(scorer, "needs", None), Needs) or not callable(
        getattr(scorer, "score", None)
    ):
        raise PolicyError(
            f"the scorer {kind} of policy {policy.name!r} lacks needs = Needs(...) or score(view); "
            "see docs/add-a-policy.md"
        )
    if not is_dataclass(scorer):
        raise PolicyError(
            f"the scorer {kind} of policy {policy.name!r} is not a dataclass; decorate it with "
            "@dataclass(frozen=True): a session file names its settings"
        )


def _made(name: str, found: Policy | Make, lookahead: float) -> Policy:
    """Return the policy of ``found``, checked."""
    made: object = found
    if not isinstance(found, Policy) and callable(found):
        try:
            made = found(lookahead)
        except Exception as error:
            raise PolicyError(
                f"policy {name!r} cannot be made: {type(error).__name__}: {error}; it must be a "
                "Policy, or a function of the lookahead that returns one"
            ) from error
    if not isinstance(made, Policy):
        raise PolicyError(_not_a_policy(name, made))
    check_policy(made)
    return made


def _not_a_policy(name: str, value: object) -> str:
    return (
        f"policy {name!r} is a {type(value).__name__}; it must be a Policy, or a function of the "
        "lookahead that returns one"
    )
