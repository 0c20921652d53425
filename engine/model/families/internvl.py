"""InternVL3: tiles of a picture through one tower, four patches a token; frames are pictures."""

from __future__ import annotations

from typing import ClassVar

from mmkv.engine.model.families.llava import LlavaFamily


class InternVLFamily(LlavaFamily):
    """Checkpoints in transformers' form (``OpenGVLab/InternVL3-1B-hf``).

    How many tiles a picture has is in the number of its tokens alone. The processor gives the
    frames of a video as pictures, with picture tokens.
    """

    model_types: ClassVar[tuple[str, ...]] = ("internvl",)
