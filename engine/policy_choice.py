"""Choose the policy and load the gates that an engine's options name."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Literal

from mmkv.engine.backends.torch.write_step import check_named
from mmkv.engine.config import DEFAULT_POLICY, EngineConfig
from mmkv.engine.errors import GateError, PolicyError
from mmkv.engine.model.gates import (
    Gates,
    WriteGates,
    foreign_note,
    gate_kind,
    load_gates,
    load_write_gates,
    trained_age,
)
from mmkv.engine.model.spec import DecoderSpec
from mmkv.engine.policies import Policy, make_policy
from mmkv.engine.policies.registry import check_policy

# Without gates, under a budget: what answered best of the policies that need none
# (quality-no-gates-pictures.json, benchmarks/notes/leaderboard.md). On text rkv is level with
# streamingllm and takes four times as long a step.
BEST_WITH_PICTURES, BEST_WITH_TEXT = "rkv", "streamingllm"


def choose(
    config: EngineConfig,
    spec: DecoderSpec,
    gates: Gates | WriteGates | None = None,
    pictures: bool = False,
) -> tuple[Policy, Gates | WriteGates | None, str | None]:
    """Return the policy, its gates, and a note for the user.

    Args:
        config: ``model`` is where gates of its own may lie.
        gates: those to use; None: those that ``config`` names, or the checkpoint's own.
        pictures: whether the model reads any.

    Raises:
        GateError, PolicyError.
    """
    require_named_gates(config, gates)
    name, source = str(config.model), named_gates(config)
    chosen, note = named_policy(config), None
    if config.policy is None and _is_write(source if gates is None else gates):
        chosen = make_policy("wgkv")
    if gates is None and source is not None:
        if chosen.gates == "write":
            gates = load_write_gates(source, spec)
        else:
            gates = load_gates(source, spec)
            chosen = named_policy(config, trained_age(source))
        with contextlib.suppress(OSError):  # a model in memory has no file to compare with
            note = foreign_note(gates, str(config.model))
    if gates is None and chosen.gates:
        if config.policy is not None:
            raise GateError(
                f"policy {chosen.name!r} needs retention gates and {name} has none; name "
                "them with gates=PATH (--gates PATH), train them with `mmkv distill`, or "
                "choose policy 'streamingllm' or 'snapkv'"
            )
        best = BEST_WITH_PICTURES if pictures else BEST_WITH_TEXT
        chosen = make_policy("full" if config.budget is None else best)
        note = f"{name} has no retention gates: "
        note += (
            f"nothing is evicted; with a budget policy {best!r} would decide what stays"
            if config.budget is None
            else f"running policy {best!r}"
        )
    return chosen, gates, note


def _is_write(gates: Gates | WriteGates | str | Path | None) -> bool:
    if isinstance(gates, str | Path):
        return gate_kind(gates) == "write"
    return isinstance(gates, WriteGates)


def named_gates(config: EngineConfig) -> str | Path | None:
    """Return where the gates lie that ``config`` names, or else the checkpoint's own.

    The checkpoint's own are none for a policy that reads the other kind.
    """
    own = Path(config.checkpoint()) / "gates"
    if config.gates is not None or not (own / "gates.safetensors").is_file():
        return config.gates
    if config.policy is None:
        return own
    return own if gate_kind(own) == (named_policy(config).gates or "retention") else None


def require_named_gates(config: EngineConfig, gates: object = None) -> None:
    """Check, before anything is read, that a policy for write gates comes with some.

    Raises:
        GateError, PolicyError.
    """
    chosen = named_policy(config)
    check_named(chosen)
    if chosen.gates == "write" and gates is None and named_gates(config) is None:
        raise GateError(
            f"policy {chosen.name!r} needs write gates; name them with gates=PATH (--gates "
            "PATH), or train them with `mmkv distill --method wgkv`"
        )


def named_policy(config: EngineConfig, age: Literal["paper", "released"] = "paper") -> Policy:
    """Return the policy that ``config`` names or holds; ``age``: its gates'. Raises PolicyError."""
    policy = config.policy
    if policy is None or isinstance(policy, str):
        return make_policy(policy or DEFAULT_POLICY, config.lookahead, age)
    if not isinstance(policy, Policy):
        raise PolicyError(
            f"policy is a {type(policy).__name__}; give a name such as 'dbtrimkv' or a mmkv.Policy"
        )
    if config.lookahead != EngineConfig.lookahead:
        raise PolicyError(
            "lookahead belongs to the policy's scorer when the policy is an object; set it there"
        )
    check_policy(policy)
    return policy
