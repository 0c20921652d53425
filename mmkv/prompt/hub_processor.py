"""Pictures for the families whose transformers processor is used, and InternVL's videos."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from mmkv.engine.errors import ModelError, first_line
from mmkv.prompt.picture_settings import require_frames, require_settings, require_tile
from mmkv.prompt.processing import (
    BOTH,
    PICTURES,
    Processor,
    load_image_processor,
    read_json,
    template_of,
    video_settings,
)
from mmkv.prompt.special import CUT, CuttingTokenizer
from mmkv.prompt.template import ChatTemplate
from mmkv.prompt.video import DEFAULT_FPS, Clip, FrameMap, FrameRule

if TYPE_CHECKING:
    import numpy as np
    import torch
    from PIL.Image import Image


_OF_A_FRAME = (
    "size",
    "resample",
    "image_mean",
    "image_std",
    "do_rescale",
    "rescale_factor",
    "do_normalize",
)


class HubProcessor(Processor):
    """Any family whose transformers processor can be used as it is (the LLaVA models)."""

    sees = True

    def __init__(self, processor: Any, template: ChatTemplate) -> None:
        super().__init__(processor.tokenizer, template)
        self.processor = processor
        self.image_token = processor.image_token

    def _inputs(
        self, text: str, images: Sequence[Image], clips: Sequence[Clip], continuing: bool
    ) -> dict[str, torch.Tensor]:
        special = not continuing and not self._starts_itself(text)
        if CUT in text:  # one caller at a time: see encode
            self.processor.tokenizer = CuttingTokenizer(self.tokenizer)
        try:
            return dict(
                self.processor(
                    text=[text],
                    # Nested: all of one prompt (LLaVA-OneVision cuts a lone picture into tiles).
                    images=[list(images)] if images else None,
                    add_special_tokens=special,
                    return_tensors="pt",
                )
            )
        finally:
            self.processor.tokenizer = self.tokenizer


class OneVisionProcessor(HubProcessor):
    """LLaVA-OneVision, which cuts the picture of a prompt into tiles if it is the only one."""

    def rule(self, pictures: int) -> bool:
        """See :meth:`Processor.rule`."""
        return pictures == 1

    def _inputs(
        self, text: str, images: Sequence[Image], clips: Sequence[Clip], continuing: bool
    ) -> dict[str, torch.Tensor]:
        if len(images) != 1 or self.rule(self._pictures):
            return super()._inputs(text, images, clips, continuing)
        # A part with one picture of a prompt with several: read beside a copy, which goes again.
        made = super()._inputs(text + self.image_token, [*images] * 2, clips, continuing)
        picture = self.tokenizer.convert_tokens_to_ids(self.image_token)
        count = int((made["input_ids"] == picture).sum()) // 2
        for key in ("input_ids", "attention_mask"):
            made[key] = made[key][:, :-count]
        return made | {key: made[key][:1] for key in ("pixel_values", "image_sizes")}


class InternVLProcessor(HubProcessor):
    """As it is for pictures. The frames of a video are pictures in one tile each, behind their
    numbers; transformers' part for videos needs torchvision.
    """

    watches = True

    def __init__(
        self, processor: Any, template: ChatTemplate, videos: Mapping[str, Any] | None = None
    ) -> None:
        """Take the processor; ``videos``: the checkpoint's settings of videos."""
        super().__init__(processor, template)
        own = videos or {}
        images = processor.image_processor
        # Of a frame: its tile and colours, where the checkpoint has others for it.
        self._frames_of = {
            key: own[key] if own.get(key) is not None else getattr(images, key)
            for key in _OF_A_FRAME
        }
        rate = own.get("fps") or (None if own.get("num_frames") else DEFAULT_FPS)
        shift = own.get("initial_shift")
        self.frame_rule = FrameRule(
            "centred",
            None if own.get("num_frames") else rate,
            own.get("num_frames"),
            1,
            shift=True if shift is None else shift,
        )
        self.video_token = processor.video_token
        self.image_frame = (processor.start_image_token, processor.end_image_token)

    @property
    def size_rule(self) -> Any:
        """Return the rule that scales frames to a tile while they are read."""
        return self._scaler

    def _scaler(self, frames: int, height: int, width: int) -> FrameMap:
        from PIL import Image as pil

        size, resample = self._frames_of["size"], pil.Resampling(self._frames_of["resample"])
        tile = (size["width"], size["height"])

        def scale(frame: np.ndarray) -> np.ndarray:
            import numpy as np

            return np.asarray(pil.fromarray(frame).resize(tile, resample))

        return scale

    def video_texts(self, clips: Sequence[Clip], inputs: dict[str, torch.Tensor]) -> list[str]:
        """See :meth:`Processor.video_texts`."""
        return [self._frames(len(clip.frames)) for clip in clips]

    def _frames(self, count: int) -> str:
        tile = self._picture(1)
        return "\n".join(f"Frame{number}: {tile}" for number in range(1, count + 1))

    def _picture(self, tiles: int) -> str:
        start, end = self.image_frame
        return f"{start}{self.image_token * self.processor.image_seq_length * tiles}{end}"

    def _inputs(
        self, text: str, images: Sequence[Image], clips: Sequence[Clip], continuing: bool
    ) -> dict[str, torch.Tensor]:
        if not clips:
            return super()._inputs(text, images, clips, continuing)
        import torch
        from PIL import Image as pil

        read = self.processor.image_processor
        parts: dict[str, list[tuple[str, torch.Tensor]]] = {self.image_token: []}
        for image in images:
            made = read([image], crop_to_patches=True, return_tensors="pt")["pixel_values"]
            parts[self.image_token].append((self._picture(len(made)), made))
        parts[self.video_token] = [
            (
                self._frames(len(clip.frames)),
                read(
                    [pil.fromarray(frame) for frame in clip.frames],
                    crop_to_patches=False,
                    return_tensors="pt",
                    **self._frames_of,
                )["pixel_values"],
            )
            for clip in clips
        ]
        waiting = {token: iter(media) for token, media in parts.items()}
        pixels: list[torch.Tensor] = []

        def fill(match: re.Match[str]) -> str:
            filled, made = next(waiting[match[0]])
            pixels.append(made)
            return filled

        expanded = re.sub("|".join(map(re.escape, parts)), fill, text)
        inputs = self._tokenized(expanded, not continuing and not self._starts_itself(text))
        return inputs | {"pixel_values": torch.cat(pixels)}


def load_hub(name: str | Path, tokenizer: Any, config: Any) -> HubProcessor:
    from transformers import AutoProcessor

    try:
        processor = AutoProcessor.from_pretrained(name, backend="pil")
    # Without torchvision the video processor of LLaVA-OneVision refuses to load, with it broken
    # transformers raises RuntimeError; the rest of the processor works without it.
    except (ImportError, RuntimeError, ValueError, OSError) as error:
        processor = without_video(name, tokenizer, error)
    vision = config.vision_config
    require_settings(processor.image_processor, PICTURES, vision, pixels=False)
    template = template_of(name, tokenizer, True)
    placeholders = {"image": processor.image_token + "\n"}
    tokens = [processor.image_token]
    kind: Callable[..., HubProcessor] = HubProcessor
    if config.model_type == "llava_onevision":
        kind = OneVisionProcessor
    if config.model_type == "internvl":
        require_tile(processor.image_processor, PICTURES)
        settings, file = video_settings(name)
        require_settings(settings, file, vision, pixels=False)
        require_frames(settings, file, either=False)
        if settings.get("size") is not None:
            require_tile(SimpleNamespace(size=settings["size"], resample=3), file)
        kind = partial(InternVLProcessor, videos=settings)
        placeholders["video"] = processor.video_token + "\n"
        tokens += [processor.video_token, processor.start_image_token, processor.end_image_token]
    return kind(processor, ChatTemplate(processor.tokenizer, template, True, placeholders, tokens))


def without_video(name: str | Path, tokenizer: Any, cause: Exception) -> Any:
    """Assemble a transformers processor from its parts, leaving out the video processor."""
    import transformers

    config = read_json(name, BOTH)
    settings = read_json(name, PICTURES) | config
    base = getattr(transformers, str(settings.get("processor_class")), None)
    image_processor = load_image_processor(name)
    if base is None or image_processor is None:
        raise ModelError(
            f"cannot load the picture processor of {name}: {first_line(cause)}; check "
            f"{PICTURES} and {BOTH}"
        ) from cause

    class PicturesOnly(base):  # type: ignore[misc, valid-type]
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            if argument is None:
                return type(None)
            return super().check_argument_for_proper_class(argument_name, argument)

    known = {
        key: value
        for key, value in config.items()
        if key not in ("processor_class", "image_processor", "video_processor")
    }
    return PicturesOnly(image_processor, tokenizer, None, **known)
