"""Choose among the gates that ship for a checkpoint."""

from __future__ import annotations

import functools
from dataclasses import replace

from mmkv.engine.config import EngineConfig
from mmkv.engine.policies import Policy
from mmkv.engine.policies.allocation import HeadAllocation
from mmkv.engine.policy_choice import named_gates, named_policy
from mmkv.resources import gates_made_for


def with_shipped_gates(config: EngineConfig) -> tuple[EngineConfig, str | None]:
    """Name the gates that ship for the checkpoint of ``config``, if its policy lacks some.

    Of several sets the first is taken that was trained as the policy shares its budget: one budget
    per head, or one for all. A policy with write gates beside its retention gates gets both.

    Returns:
        The config, and a line that says which gates were taken; None where none were.

    Raises:
        PolicyError.
    """
    policy = named_policy(config)
    made_for = functools.cache(lambda: gates_made_for(config.checkpoint()))
    taken: list[str] = []

    def shipped(kind: str, scope: str = "") -> str | None:
        fitting = {
            folder: info
            for folder, info in made_for().items()
            if (info.get("kind") == "write") == (kind == "write")
        }
        alike = [f for f, info in fitting.items() if info.get("settings", {}).get("scope") == scope]
        folder = next(iter([*alike, *fitting]), None)
        if folder is None:
            return None
        taken.append(folder.name)
        return str(folder)

    if policy.gates and named_gates(config) is None:
        scope = "head" if isinstance(policy.allocation, HeadAllocation) else "global"
        if (found := shipped(policy.gates, scope)) is not None:
            config = replace(config, gates=found)
    admission = policy.admission
    lacks = policy.gates == "retention" and admission is not None and not admission.gates
    if lacks and (found := shipped("write")) is not None:
        # Beside its retention gates the policy itself names write gates.
        config = replace(config, policy=_with_write_gates(config.policy, found))
    if not taken:
        return config, None
    which = " and ".join(taken)
    without = "" if config.adapter is None else " without the adapter"
    return config, (
        f"running with the gates {which}, which were trained for this checkpoint{without}"
    )


def _with_write_gates(policy: str | Policy | None, folder: str) -> str | Policy | None:
    if isinstance(policy, str):
        text, end = (policy.strip()[:-1], "]") if policy.strip().endswith("]") else (policy, "")
        before = "," if end or ":" in text else ":"
        return f"{text}{before}write_gates={folder}{end}"
    assert policy is not None and policy.admission is not None
    return replace(policy, admission=replace(policy.admission, gates=folder))
