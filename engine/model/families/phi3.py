"""Phi-3 and Phi-4-mini: fused projections, partial rotary, long-context rope factors."""

from __future__ import annotations

from typing import ClassVar

from mmkv.engine.model.families.text import TextFamily


class Phi3Family(TextFamily):
    """As other text models to a session.

    What differs lies below: q, k, v and gate, up arrive fused (``engine.weights``), a part of
    each head may stay unrotated, and ``longrope`` checkpoints have two sets of frequencies, of
    which a whole sequence must use one (``engine.spec``).
    """

    model_types: ClassVar[tuple[str, ...]] = ("phi3",)
