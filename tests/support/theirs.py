"""transformers' own processors, videos included, without torchvision.

Its video processors import torchvision, whose builds on the package index want another torch than
a CPU's. All they call of it is the scaling of a tensor and its normalisation, which
``torch.nn.functional.interpolate`` and arithmetic give here; the rules are theirs.
"""

from __future__ import annotations

import importlib
import json
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
import transformers
from torch import Tensor
from torch.nn import functional
from transformers.models.auto.image_processing_auto import AutoImageProcessor
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

_OF_VIDEOS = {
    "qwen3_vl": ("qwen3_vl", "Qwen3VLVideoProcessor"),
    "qwen3_vl_moe": ("qwen3_vl", "Qwen3VLVideoProcessor"),
    "qwen2_5_vl": ("qwen2_vl", "Qwen2VLVideoProcessor"),
    "internvl": ("internvl", "InternVLVideoProcessor"),
    "qwen2_vl": ("qwen2_vl", "Qwen2VLVideoProcessor"),
    "smolvlm": ("smolvlm", "SmolVLMVideoProcessor"),
}
# A processor whose module imports torchvision.
_APART = {"PixtralProcessor": "transformers.models.pixtral.processing_pixtral"}
_MODES = {0: "nearest-exact", 2: "bilinear", 3: "bicubic"}


@cache
def video_processor_class(model_type: str) -> Any:
    """Return the video processor of a family as a class that can be used."""
    folder, name = _OF_VIDEOS[model_type]
    module = _imported(f"transformers.models.{folder}.video_processing_{folder}")
    base: Any = importlib.import_module("transformers.video_processing_utils").BaseVideoProcessor

    class WithoutTorchvision(base):
        def resize(self, image: Tensor, size: Any, resample: Any = None, **_: Any) -> Tensor:
            mode = _MODES[int(resample)]
            more = {} if mode == "nearest-exact" else {"antialias": True}
            flat = image.flatten(0, -4)  # levels of 8 bits stay so, as in torchvision
            made = functional.interpolate(flat, (size.height, size.width), mode=mode, **more)
            return made.reshape(*image.shape[:-2], size.height, size.width)

        def convert_to_rgb(self, video: Tensor) -> Tensor:
            return video

        def rescale_and_normalize(
            self,
            videos: Tensor,
            do_rescale: bool,
            factor: float,
            do_normalize: bool,
            mean: Any,
            std: Any,
        ) -> Tensor:
            made = videos.float() * (factor if do_rescale else 1)
            if do_normalize:
                mean, std = (torch.tensor(each)[:, None, None] for each in (mean, std))
                made = (made - mean) / std
            return made

    return type(name, (getattr(module, name), WithoutTorchvision), {})


def _imported(name: str) -> Any:
    """Import a module as if torchvision were there."""
    names = ("torchvision", "transforms", "v2", "functional")
    absent = {".".join(names[: i + 1]): ModuleType(names[i]) for i in range(len(names))}
    with patch.dict(sys.modules, absent):
        for parent, child in zip(list(absent)[:-1], list(absent)[1:], strict=True):
            setattr(absent[parent], child.rpartition(".")[2], absent[child])
        absent["torchvision.transforms.v2.functional"].InterpolationMode = None  # type: ignore[attr-defined]
        return importlib.import_module(name)


def processor_of(folder: Path) -> Any:
    """Load transformers' processor of a checkpoint; its videos' part where mmkv reads videos."""
    model_type = json.loads((folder / "config.json").read_text())["model_type"]
    name = PROCESSOR_MAPPING_NAMES[model_type]
    kind: Any = getattr(_imported(_APART[name]) if name in _APART else transformers, name)
    if model_type == "smolvlm":  # which refuses to start without this package
        importlib.import_module(kind.__module__).num2words = str  # type: ignore[attr-defined]

    class AsAssembled(kind):
        def check_argument_for_proper_class(self, name: str, argument: Any) -> Any:
            if argument is None or name == "video_processor":
                return type(argument)
            return super().check_argument_for_proper_class(name, argument)

    file = folder / "processor_config.json"
    stored = json.loads(file.read_text()) if file.exists() else {}
    aside = ("processor_class", "image_processor", "video_processor")
    parts = {key: value for key, value in stored.items() if key not in aside}
    pictures, form = AutoImageProcessor, {"backend": "pil"}
    if model_type in ("idefics3", "smolvlm"):  # which transformers 5.17 does not find in this form
        where = f"transformers.models.{model_type}.image_processing_pil_{model_type}"
        module = importlib.import_module(where)
        pictures, form = getattr(module, module.__all__[0]), {}
    parts["image_processor"] = pictures.from_pretrained(folder, **form)
    parts["tokenizer"] = transformers.AutoTokenizer.from_pretrained(folder)
    if model_type in _OF_VIDEOS:
        parts["video_processor"] = video_processor_class(model_type).from_pretrained(folder)
    return AsAssembled(**parts)
