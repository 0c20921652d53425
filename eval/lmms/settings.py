"""The ``--model_args`` of ``--model mmkv``, and the engine that they describe."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Self

from mmkv.engine.config import EngineConfig, options
from mmkv.engine.errors import InputError
from mmkv.eval.lmms.messages import Frames
from mmkv.resources import bundled_model_name

if TYPE_CHECKING:
    from mmkv import Engine

# The defaults of lmms-eval's own Qwen3-VL adapter, so that scores are comparable.
SYSTEM_PROMPT = "You are a helpful assistant."
# Whose lmms-eval adapter is followed.
_QWEN = ("qwen3_vl", "qwen3_vl_moe")
FRAMES = 32
# Arguments of that adapter that are not taken here, with the remedy.
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
        engine: those of :class:`mmkv.engine.config.EngineConfig`; ``pretrained`` is its model.
        min_pixels, max_pixels: bounds on a picture, and on a video frame; None: those that
            lmms-eval's Qwen3-VL adapter applies (:mod:`mmkv.eval.lmms.pixels`).
        max_num_frames, fps: frames of a video; total_pixels: bound on all of them together.
        system_prompt: empty for none; None: that adapter's for Qwen3-VL, none for other models.
        seed: of sampling, where a task asks for a temperature.
    """

    engine: EngineConfig
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
        """Read the settings from lmms-eval's arguments. Raises InputError for a name or value."""
        kinds = _kinds()
        unknown = sorted(set(given) - set(kinds))
        if unknown:
            hints = [f"{name}: {_ELSEWHERE[name]}" for name in unknown if name in _ELSEWHERE]
            raise InputError(
                f"mmkv does not know the model argument {', '.join(unknown)}"
                + (f" ({'; '.join(hints)})" if hints else "")
                + f"; it knows {', '.join(name for name in kinds if name != 'batch_size')}"
            )
        if not given.get("pretrained"):
            raise InputError(
                "no model is named; add pretrained=FOLDER_OR_HUB_ID to --model_args "
                f"({bundled_model_name()} is the bundled one)"
            )
        typed = {name: _typed(name, value, kinds[name]) for name, value in given.items()}
        loading = {name: typed.pop(name) for name in options() if name in typed}
        return cls(EngineConfig(model=typed.pop("pretrained"), **loading), **typed)

    @property
    def pretrained(self) -> str:
        """Return the checkpoint's folder or hub id."""
        return self.engine.checkpoint()

    def load(self, images: tuple[int, int]) -> Engine:
        """Load the engine. ``images``: bounds on a picture's pixels where none are given.

        Raises:
            ModelError, GateError, PolicyError, BudgetError, InputError.
        """
        import mmkv
        from mmkv.eval.lmms.pixels import apply_frame_rule

        qwen = model_type(self.pretrained) in _QWEN
        least, most = self.min_pixels, self.max_pixels
        if qwen:
            least, most = least or images[0], most or images[1]
        config = replace(self.engine, device=self._device())
        engine = mmkv.Engine.from_config(config, min_pixels=least, max_pixels=most)
        if qwen:
            apply_frame_rule(engine.processor, self)
        return engine

    def frames(self) -> Frames:
        """Return how videos are sampled."""
        return Frames(self.max_num_frames, self.fps)

    def opening(self) -> str:
        """Return the system prompt to use, empty for none."""
        if self.system_prompt is not None:
            return self.system_prompt
        return SYSTEM_PROMPT if model_type(self.pretrained) in _QWEN else ""

    def _device(self) -> str:
        """Return the device; ``auto`` gives each process of a run its own GPU."""
        import torch

        device = self.engine.device
        several = int(os.environ.get("WORLD_SIZE", "1")) > 1 and torch.cuda.is_available()
        if device == "auto" and several:
            return f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        return device


def model_type(pretrained: str) -> str:
    """Read the architecture that a checkpoint names. Raises ModelError when there is none."""
    from mmkv import api as _  # noqa: F401 (hides a broken torchvision before transformers)
    from mmkv.engine.errors import ModelError

    # isort: split
    from transformers import AutoConfig

    from mmkv.engine.model.families import find_for

    try:
        find_for(pretrained)
        return AutoConfig.from_pretrained(pretrained).model_type
    except (OSError, ValueError) as error:
        raise ModelError(
            f"no model at {pretrained}: {str(error).splitlines()[0]}; check pretrained=..."
        ) from error


def _kinds() -> dict[str, tuple[type, bool]]:
    """Return each argument's type, and whether ``None`` may be written for it."""
    kinds: dict[str, tuple[type, bool]] = {"pretrained": (str, False)}
    for name, option in options().items():
        if name not in ("model", "kv_limit"):
            kinds[name] = (option.metadata["kind"], option.default is None)
    for own in fields(Settings):
        if own.name != "engine":
            kind, *empty = str(own.type).split(" | ")
            kinds[own.name] = ({"int": int, "float": float, "str": str}[kind], bool(empty))
    return kinds


def _typed(name: str, value: Any, kind: tuple[type, bool]) -> Any:
    """Convert ``value`` to the field's type: lmms-eval guesses types (256.0, True) from text."""
    wanted, may_be_none = kind
    if value is None or (may_be_none and str(value).lower() == "none"):
        return None
    try:
        if wanted is not int:
            return wanted(value)
        if int(value) != float(value) or int(value) < (name != "seed"):
            raise ValueError
        return int(value)
    except (ValueError, OverflowError) as error:
        noun = "a whole number of at least 1" if wanted is int else "a number"
        raise InputError(f"the model argument {name}={value} is not {noun}; correct it") from error
