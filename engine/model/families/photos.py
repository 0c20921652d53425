"""Photographs behind a Llama: a picture becomes the words that name what it shows.

``python -m mmkv.training.photos`` writes such checkpoints.
"""

from __future__ import annotations

from importlib import import_module
from typing import ClassVar

from mmkv.engine.model.families.llava import LlavaFamily


class PhotosFamily(LlavaFamily):
    """A classifier and a table of words in place of LLaVA's tower and projector."""

    model_types: ClassVar[tuple[str, ...]] = ("mmkv_photos",)

    @classmethod
    def prepare(cls) -> None:
        """Add config and model to transformers' auto classes; they import its modelling code."""
        import_module("mmkv.engine.model.families.photos_model")
