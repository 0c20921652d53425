"""Messages in the form of lmms-eval's tasks."""

from __future__ import annotations

import random
from typing import Any

from PIL import Image

from mmkv.training.data.scenes import make_scene, render


def picture(seed: int) -> Image.Image:
    return render(make_scene(random.Random(seed), "heldout")).resize((96, 64))


def user(*parts: Any) -> dict[str, Any]:
    content = [
        {"type": "text", "text": p} if isinstance(p, str) else {"type": "image", "url": p}
        for p in parts
    ]
    return {"role": "user", "content": content}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": [{"type": "text", "text": text}]}
