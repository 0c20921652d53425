"""Choose among the gates that ship for a checkpoint."""

from __future__ import annotations

from dataclasses import replace

from engine.config import EngineConfig
from engine.policies.allocation import HeadAllocation
from engine.policy_choice import named_gates, named_policy
from mmkv.resources import gates_made_for


def with_shipped_gates(config: EngineConfig) -> tuple[EngineConfig, str | None]:
    """Name the gates that ship for the checkpoint of ``config``, if its policy lacks some.

    Of several sets the first is taken that was trained as the policy shares its budget: one budget
    per head, or one for all.

    Returns:
        The config, and a line that says which gates were taken; None where none were.

    Raises:
        PolicyError.
    """
    policy = named_policy(config)
    if not policy.gates or named_gates(config) is not None:
        return config, None
    fitting = {
        folder: info
        for folder, info in gates_made_for(config.checkpoint()).items()
        if (info.get("kind") == "write") == (policy.gates == "write")
    }
    if not fitting:
        return config, None
    scope = "head" if isinstance(policy.allocation, HeadAllocation) else "global"
    alike = [f for f, info in fitting.items() if info.get("settings", {}).get("scope") == scope]
    folder = next(iter([*alike, *fitting]))
    note = f"running with the gates {folder.name}, which were trained for this checkpoint"
    return replace(config, gates=str(folder)), note
