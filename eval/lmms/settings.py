"""``--model_args`` of ``--model mmkv``: what they are, and the engine they describe."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Self

from engine.errors import InputError
from eval.lmms.messages import Frames

if TYPE_CHECKING:
    from mmkv import Engine

# What lmms-eval's own Qwen3-VL adapter takes by default, so that scores compare.
SYSTEM_PROMPT = "You are a helpful assistant."
FRAMES = 32
# Arguments of that adapter that people will try, and what to do about them here.
_ELSEWHERE = {
    "device_map": "write device=cuda:0 or device=cpu",
    "attn_implementation": "the engine has attention of its own; drop it",
    "use_cache": "the engine always has a cache; drop it",
    "model_path": "write pretrained=...",
    "torch_dtype": "write dtype=...",
}


@dataclass(frozen=True)
class Settings:
    """The model arguments, by the names used in ``--model_args``.

    Attributes:
        budget: entries per row (256), a share (25%) or bytes (64MiB).
        min_pixels, max_pixels: bounds on a picture, and on a video frame; None: those that
            lmms-eval's Qwen3-VL adapter applies (:mod:`eval.lmms.pixels`).
        max_num_frames, fps: frames of a video; total_pixels: bound on all of them together.
        system_prompt: empty for none; None: that adapter's for Qwen3-VL, none for other models.
        seed: of sampling, where a task asks for a temperature.
    """

    pretrained: str
    policy: str | None = None
    budget: str = "256"
    gates: str | None = None
    lookahead: float = 2.0
    evict_every: int = 1
    prefill_chunk: int = 2048
    page_size: int = 16
    device: str = "auto"
    dtype: str = "auto"
    min_pixels: int | None = None
    max_pixels: int | None = None
    max_num_frames: int = FRAMES
    fps: float | None = None
    total_pixels: int | None = None
    system_prompt: str | None = None
    seed: int = 1234
    batch_size: int = 1

    @classmethod
    def of(cls, given: dict[str, Any]) -> Self:
        """Settings from what lmms-eval hands over. Raises InputError for a name or value."""
        names = {field.name: str(field.type) for field in fields(cls)}
        unknown = sorted(set(given) - set(names))
        if unknown:
            hints = [f"{name}: {_ELSEWHERE[name]}" for name in unknown if name in _ELSEWHERE]
            raise InputError(
                f"mmkv does not know the model argument {', '.join(unknown)}"
                + (f" ({'; '.join(hints)})" if hints else "")
                + f"; it knows {', '.join(name for name in names if name != 'batch_size')}"
            )
        if not given.get("pretrained"):
            raise InputError(
                "no model is named; add pretrained=FOLDER_OR_HUB_ID to --model_args "
                "(assets/tiny-vlm is the bundled one)"
            )
        return cls(**{name: _typed(name, value, names[name]) for name, value in given.items()})

    def load(self, images: tuple[int, int]) -> Engine:
        """The engine. ``images``: bounds on a picture's pixels where none are given.

        Raises:
            ModelError, GateError, PolicyError, BudgetError, InputError.
        """
        import mmkv
        from eval.lmms.pixels import apply_frame_rule
        from mmkv.chat.options import parse_budget

        qwen = model_type(self.pretrained) == "qwen3_vl"
        bounds = {"min_pixels": self.min_pixels, "max_pixels": self.max_pixels}
        if qwen:
            low, high = images
            bounds = {"min_pixels": self.min_pixels or low, "max_pixels": self.max_pixels or high}
        engine = mmkv.Engine.from_pretrained(
            self.pretrained,
            policy=self.policy,
            budget=parse_budget(self.budget),
            lookahead=self.lookahead,
            evict_every=self.evict_every,
            prefill_chunk=self.prefill_chunk,
            page_size=self.page_size,
            gates=self.gates,
            device=self._device(),
            dtype=self.dtype,
            **bounds,
        )
        if qwen:
            apply_frame_rule(engine.processor, self)
        return engine

    def frames(self) -> Frames:
        """How videos are sampled."""
        return Frames(self.max_num_frames, self.fps)

    def opening(self) -> str:
        """The system prompt to use, empty for none."""
        if self.system_prompt is not None:
            return self.system_prompt
        return SYSTEM_PROMPT if model_type(self.pretrained) == "qwen3_vl" else ""

    def _device(self) -> str:
        """``auto`` gives each process of a run on several GPUs one of its own."""
        import torch

        several = int(os.environ.get("WORLD_SIZE", "1")) > 1 and torch.cuda.is_available()
        if self.device == "auto" and several:
            return f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        return self.device


def model_type(pretrained: str) -> str:
    """The architecture that a checkpoint names. Raises ModelError when there is none."""
    from engine.errors import ModelError
    from mmkv import api as _  # noqa: F401 (hides a broken torchvision before transformers)

    # isort: split
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(pretrained).model_type
    except (OSError, ValueError) as error:
        raise ModelError(
            f"no model at {pretrained}: {str(error).splitlines()[0]}; check pretrained=..."
        ) from error


def _typed(name: str, value: Any, kind: str) -> Any:
    """``value`` as the field's type: lmms-eval guesses types (256.0, True) from the text."""
    if value is None or ("None" in kind and str(value).lower() == "none"):
        return None
    try:
        if kind.startswith("int"):
            if int(value) != float(value) or int(value) < (name != "seed"):
                raise ValueError
            return int(value)
        return float(value) if kind.startswith("float") else str(value)
    except (ValueError, OverflowError) as error:
        wanted = "a whole number of at least 1" if kind.startswith("int") else "a number"
        raise InputError(
            f"the model argument {name}={value} is not {wanted}; correct it"
        ) from error
