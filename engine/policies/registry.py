"""Policies by name: the presets, and those that others register.

Programs call :func:`register_policy`; packages use the entry-point group ``mmkv.policies``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import is_dataclass, replace

from mmkv.engine.errors import DEFAULT_LOOKAHEAD, STOPS, PolicyError, check_lookahead
from mmkv.engine.policies.allocation import HeadAllocation
from mmkv.engine.policies.attention import ATTENTION_PRESETS
from mmkv.engine.policies.base import Needs, Policy
from mmkv.engine.policies.frozen import FROZEN_PRESETS
from mmkv.engine.policies.preset import NEWEST, Parameter, PolicyText, Preset, Value, full_name
from mmkv.engine.policies.pruning import PRUNING_PRESETS
from mmkv.engine.policies.scoring import KEY_PRESETS, RETENTION_PRESETS, Age, Recency, Retention
from mmkv.engine.policies.write_gate import WRITE_PRESETS
from mmkv.engine.registry import Registry


def _full() -> Policy:
    return Policy("full", Recency(), None)


def _streamingllm(sinks: int) -> Policy:
    return Policy("streamingllm", Recency(), HeadAllocation(), protect_first=sinks)


PRESETS: dict[str, Preset] = {
    "full": Preset(_full, "baseline", "every entry stays"),
    **RETENTION_PRESETS,
    "streamingllm": Preset(
        _streamingllm,
        "arXiv 2309.17453",
        "Efficient Streaming Language Models with Attention Sinks",
        {"sinks": Parameter(4, "first tokens, which always stay", "table 2", least=0)},
    ),
    **ATTENTION_PRESETS,
    **KEY_PRESETS,
    **FROZEN_PRESETS,
    **PRUNING_PRESETS,
    **WRITE_PRESETS,
}


Make = Callable[[float], Policy]

_REGISTRY: Registry[Policy | Preset | Make] = Registry(
    "policy", "mmkv.policies", PRESETS, PolicyError
)


def register_policy(name: str, policy: Policy | Preset | Make) -> None:
    """Give a policy a name for this process: ``policy=NAME`` and ``--policy NAME`` find it.

    Args:
        policy: a :class:`Policy`, a :class:`Preset`, or what makes a policy from a lookahead. It
            takes the name over.

    Raises:
        PolicyError: a preset's name, one that a command line cannot carry, or not a policy.
    """
    if isinstance(policy, Policy):
        check_policy(policy)
    elif not isinstance(policy, Preset) and not callable(policy):
        raise PolicyError(_not_a_policy(name, policy))
    _REGISTRY.register(name, policy)


def names() -> list[str]:
    """Return the names that :func:`make_policy` knows: presets, then those of others."""
    return _REGISTRY.names()


def describe_added() -> list[str]:
    """Return one line for each policy that is not a preset, saying where it comes from."""
    return _REGISTRY.describe_added()


def find_preset(name: str) -> Preset | None:
    """Return the preset ``name``, one of mmkv's or of others; None if it is not a preset."""
    found = _REGISTRY.find(name)
    return found if isinstance(found, Preset) else None


def make_policy(text: str, lookahead: float = DEFAULT_LOOKAHEAD, age: Age = "paper") -> Policy:
    """Make a policy from its name and parameters: a preset or one that was registered.

    ``snapkv:window=32,kernel=7`` and ``snapkv[window=32,kernel=7]`` set parameters; ``;`` may
    stand for a comma. ``dbtrimkv+N`` and ``trimkv+N`` (``recent=N``) also keep the newest N tokens
    of every row, whatever their scores: what TRIM-KV and DBTrimKV leave to the gates, for streams
    longer than gates were trained for. The policy's name holds what differs from the defaults.

    Args:
        lookahead: n = T - t (DBTrimKV, arXiv 2605.09649, equation 9) where the text gives none; of
            the presets only dbtrimkv reads it.
        age: how entries age where the text does not say: as the gates' makers count
            (:func:`mmkv.engine.model.gates.trained_age`).

    Raises:
        PolicyError: for an unknown name or parameter, or a value that cannot be.
    """
    asked = PolicyText.parse(text)
    name = asked.name
    found = _REGISTRY.find(name)
    if found is None:
        raise PolicyError(f"unknown policy {name!r}; choose one of {', '.join(names())}")
    check_lookahead(lookahead)
    if isinstance(found, Preset):
        if asked.plus and not (found.takes_plus and asked.given[NEWEST].isdecimal()):
            raise PolicyError(_no_plus(text))
        return _of_preset(name, found, asked, {"lookahead": lookahead, "age": age})
    policy = replace(_made(name, found, lookahead), name=name)
    if not asked.given:
        return policy
    recent = asked.given.get(NEWEST, "")
    if not asked.plus or len(asked.given) > 1:
        raise PolicyError(f"policy {name!r} takes no parameters; register a Preset to give it some")
    if not recent.isdecimal() or not isinstance(policy.scoring, Retention):
        raise PolicyError(_no_plus(text))
    return replace(policy, name=full_name(name, {NEWEST: int(recent)}), protect_recent=int(recent))


def check_policy(policy: Policy) -> None:
    """Check what an engine relies on, so that a mistake shows before a model is loaded.

    Raises:
        PolicyError: a scorer without needs or score, or one that is not a dataclass.
    """
    scorer = policy.scoring
    _check_scorer(policy)
    if type(policy.interval) is not int or policy.interval < 1:
        raise PolicyError(
            f"policy {policy.name!r} has interval={policy.interval!r}; give a whole number of "
            "decode steps, at least 1"
        )
    needs = scorer.needs
    reads = needs.gates or needs.queries or needs.state or needs.taps
    if policy.pruner is not None and (reads or policy.keeps_prompt):
        raise PolicyError(
            f"policy {policy.name!r} prunes visual tokens, which have no entries in some layers; "
            "its scorer may read keys, values and positions only"
        )
    if policy.admission is not None and (needs.state or policy.keeps_prompt or policy.pruner):
        raise PolicyError(
            f"policy {policy.name!r} has write gates, whose numbers lie where a scorer's state "
            "would; give it a scorer without state, and no pruner or kept prompts"
        )


def _check_scorer(policy: Policy) -> None:
    scorer, kind = policy.scoring, type(policy.scoring).__name__
    if isinstance(scorer, type):
        raise PolicyError(
            f"policy {policy.name!r} has the class {scorer.__name__} for a scorer; give an "
            f"instance: {scorer.__name__}()"
        )
    scores = callable(getattr(scorer, "score", None))
    if not scores or not isinstance(getattr(scorer, "needs", None), Needs):
        raise PolicyError(
            f"the scorer {kind} of policy {policy.name!r} lacks needs = Needs(...) or score(view); "
            "see docs/how-to/add-a-policy.md"
        )
    if not is_dataclass(scorer):
        raise PolicyError(
            f"the scorer {kind} of policy {policy.name!r} is not a dataclass; decorate it with "
            "@dataclass(frozen=True): a session file names its settings"
        )


def _of_preset(
    name: str, preset: Preset, asked: PolicyText, fallback: Mapping[str, Value]
) -> Policy:
    """Return the preset's policy for the parameters asked for, checked."""
    try:
        made: object = preset.policy(name, asked.given, fallback)
    except (PolicyError, *STOPS):
        raise
    except BaseException as error:
        raise PolicyError(
            f"policy {name!r} cannot be made: {type(error).__name__}: {error}; its preset's make "
            "must take the preset's parameters by keyword and return a Policy"
        ) from error
    return _checked(name, made)


def _no_plus(text: str) -> str:
    taking = [name for name, preset in PRESETS.items() if preset.takes_plus]
    return (
        f"policy {text!r}: only {', '.join(taking)} take +N, the number of newest tokens to keep; "
        "write dbtrimkv+32"
    )


def _made(name: str, found: Policy | Make, lookahead: float) -> Policy:
    """Return the policy of ``found``, checked."""
    made: object = found
    if not isinstance(found, Policy) and callable(found):
        try:
            made = found(lookahead)
        except STOPS:
            raise
        except BaseException as error:
            raise PolicyError(
                f"policy {name!r} cannot be made: {type(error).__name__}: {error}; it must be a "
                "Policy, or a function of the lookahead that returns one"
            ) from error
    return _checked(name, made)


def _checked(name: str, made: object) -> Policy:
    if not isinstance(made, Policy):
        raise PolicyError(_not_a_policy(name, made))
    check_policy(made)
    return made


def _not_a_policy(name: str, value: object) -> str:
    return (
        f"policy {name!r} is a {type(value).__name__}; it must be a Policy, a Preset, or a "
        "function of the lookahead that returns a Policy"
    )
