"""``python -m tests.support.lmms_builtin ...``: lmms-eval with its Qwen3-VL adapter, for pictures.

That adapter imports decord and qwen-vl-utils, and its processor wants torchvision, whose builds on
the package index need a CUDA torch. For pictures none of them does anything that matters here: the
scenes have sizes that need no scaling. So two empty modules stand in for the packages, and the
processor goes without its video part. The adapter's own code, the model and generate are untouched,
except that weights are widened to float32: the adapter insists on bfloat16, in which two programs
that add in different orders choose different words once in a while.
"""

from __future__ import annotations

import importlib.machinery
import sys
from types import ModuleType
from typing import Any


def _module(name: str, **names: Any) -> None:
    made = ModuleType(name)
    made.__spec__ = importlib.machinery.ModuleSpec(name, None)
    vars(made).update(names)
    sys.modules[name] = made


def _vision_info(conversations: Any, **_: Any) -> tuple[Any, None, dict[str, Any]]:
    parts = [p for c in conversations for m in c for p in m["content"] if not isinstance(p, str)]
    images = [part["image"].convert("RGB") for part in parts if part["type"] == "image"]
    assert all(size >= 64 and size % 32 == 0 for image in images for size in image.size)
    return images, None, {"do_sample_frames": False}


def _processor(name: str, **_: Any) -> Any:
    from transformers import AutoTokenizer

    from mmkv.prompt.loading import without_video

    tokenizer = AutoTokenizer.from_pretrained(name)
    made = without_video(name, tokenizer, ImportError("torchvision"))
    made.chat_template = tokenizer.chat_template
    return made


def main() -> None:
    """Prepare, then hand over to lmms-eval's own command line."""
    _module("decord", VideoReader=None, cpu=None)
    _module("qwen_vl_utils", process_vision_info=_vision_info, fetch_video=None)
    from lmms_eval.models.simple import qwen3_vl as adapter

    class Processors:
        from_pretrained = staticmethod(_processor)

    adapter.AutoProcessor = Processors
    loaded = adapter.Qwen3_VL.__init__

    def widened(self: Any, *args: Any, **kwargs: Any) -> None:
        loaded(self, *args, **kwargs)
        self._model.float()

    adapter.Qwen3_VL.__init__ = widened
    from lmms_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
