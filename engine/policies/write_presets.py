"""Presets with write gates."""

from __future__ import annotations

from engine.policies.base import Policy
from engine.policies.preset import Parameter, Preset
from engine.policies.scoring import Recency
from engine.policies.write_gate import Admission


def _wgkv(window: int, threshold: float) -> Policy:
    return Policy("wgkv", Recency(), None, admission=Admission(window, threshold))


WRITE_PRESETS: dict[str, Preset] = {
    "wgkv": Preset(
        _wgkv,
        "arXiv 2512.17452",
        "KV Admission: Learning What to Write for Efficient Long-Context Inference",
        {
            "window": Parameter(
                0,
                "newest tokens, which all are kept and seen; 0: as many as in the gates' training",
                "appendix E: 256",
                least=0,
            ),
            "threshold": Parameter(
                0.1, "tau: an older entry stays if g >= tau", "appendix F", least=0.0, most=1.0
            ),
        },
    ),
}
