"""Check measured speeds against the project's targets (one H200, random weights in true shapes)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mmkv.eval.bench.names import DYNAMIC, FULL, OWN

# tokens/s on one H200 that a paper states for (shape, batch, context, M).
PUBLISHED = {
    ("qwen3-4b", 4, 32768, 1024): {"full": 68, "SnapKV": 125, "TRIM-KV": 130},
    ("qwen3-4b", 8, 16384, 1024): {"full": 139, "SnapKV": 245, "TRIM-KV": 280},
}


def checks(shape: str, case: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the targets that apply to a measured case: name, value, bound, whether it is met."""

    def target(what: str, value: float, wanted: float, at_least: bool) -> dict[str, Any]:
        met = value >= wanted if at_least else value <= wanted
        sign = ">=" if at_least else "<="
        return {"target": what, "value": value, "wanted": f"{sign} {wanted:g}", "met": met}

    methods, where = case["methods"], (case["batch"], case["context"], case["budget"])
    own = methods.get(OWN, {})
    if "ms_per_step" not in own:
        return
    at = f"{shape}, B={where[0]}, {where[1]} tokens, M={where[2]}"
    if case.get("kind") != "largest" and where[0] in (1, 16, 64):
        yield target(f"step / floor, {at}", own["step_over_floor"], 1.20, False)
    if "eviction_of_step" in case.get("parts", {}):
        yield target(f"eviction / step, {at}", case["parts"]["eviction_of_step"], 0.03, False)
    if where[2] >= 64:
        ratio = own["memory"]["physical_over_logical"]
        yield target(f"physical / logical KV, {at}", ratio, 1.10, False)
    if shape == "qwen3-4b" and where == (4, 32768, 1024):
        yield target(f"tokens/s, {at}", own["tokens_per_second"], 1500, True)
    full = methods.get(FULL, {})
    if "ms_per_step" in full and case.get("kind") == "largest":
        ratio = own["tokens_per_second"] / full["tokens_per_second"]
        yield target(f"tokens/s over own full, largest batches, {shape}", ratio, 8, True)
    elif "ms_per_step" in full and where[:1] + where[2:] == (16, 256):
        allowed = full["floor_ms"] / own["floor_ms"]
        got = full["ms_per_step"]["median"] / own["ms_per_step"]["median"]
        yield target(
            f"speed-up over own full / what the bytes allow, {at}", got / allowed, 0.85, True
        )
    if where[0] == 16 and DYNAMIC in case.get("beside", {}):
        ratio = case["beside"][DYNAMIC]["ours_over_peers_tokens_per_second"]["median"]
        yield target(f"tokens/s over transformers, {at}", ratio, 8, True)
