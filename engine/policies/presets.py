"""The presets: one row for each published method, with its parameters and their places."""

from __future__ import annotations

from mmkv.engine.policies.allocation import HeadAllocation
from mmkv.engine.policies.attention_presets import ATTENTION_PRESETS
from mmkv.engine.policies.base import Policy
from mmkv.engine.policies.frozen_presets import FROZEN_PRESETS
from mmkv.engine.policies.key_presets import KEY_PRESETS
from mmkv.engine.policies.preset import Parameter, Preset
from mmkv.engine.policies.pruning_presets import PRUNING_PRESETS
from mmkv.engine.policies.retention_presets import RETENTION_PRESETS
from mmkv.engine.policies.scoring import Recency
from mmkv.engine.policies.write_presets import WRITE_PRESETS


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
