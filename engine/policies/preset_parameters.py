"""Parameters that several presets share."""

from __future__ import annotations

from mmkv.engine.policies.base import GROUPS
from mmkv.engine.policies.preset import Parameter

RECENT = Parameter(0, "newest tokens of every row that stay, whatever their scores", least=0)
WINDOW = Parameter(16, "newest queries, which observe and always stay", least=1)
KERNEL = Parameter(5, "positions that are pooled together, an odd number", least=1)
POOL = Parameter("avg", "pooling over neighbouring positions", choices=("avg", "max"))


def group(default: str = "mean", place: str = "") -> Parameter:
    """How the query heads of a KV head are joined."""
    return Parameter(default, "how the query heads of a KV head are joined", place, choices=GROUPS)
