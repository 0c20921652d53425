"""Convert messages of lmms-eval's tasks to mmkv's form."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from mmkv.engine.errors import InputError
from mmkv.prompt.messages import Message
from mmkv.prompt.part_settings import taken_apart
from mmkv.prompt.video import Clip

if TYPE_CHECKING:
    from mmkv.prompt.processing import Processor

_VIDEOS = (".mp4", ".avi", ".mov", ".mkv", ".webm", ".mpeg", ".mpg", ".m4v", ".gif")
# What datasets call a section of a video.
_SECTION = {"start_time": "video_start", "end_time": "video_end"}
_NO_SETTINGS = ("type", "url", "image", "video", "path", "text")
Key = tuple[str, ...]


@dataclass(frozen=True)
class Frames:
    """The number of frames taken of a video: ``most``, or ``fps`` a second up to ``most``."""

    most: int
    fps: float | None = None

    def load(self, source: Any, processor: Processor) -> Clip:
        """Read the frames of a video, those that its message asks for where it does.

        Raises InputError.
        """
        found, settings = taken_apart(source)
        if isinstance(found, Clip) or settings.samples or not isinstance(found, (str, Path)):
            return processor.load_clip(source)
        if self.fps is None:
            return processor.load_clip(source, num_frames=self.most)
        clip = processor.load_clip(source, self.fps)
        if len(clip.indices) <= self.most:
            return clip
        return processor.load_clip(source, num_frames=self.most)


def conversation(messages: Any, opening: str) -> list[Message]:
    """Convert the messages of a task to mmkv's form, media not yet read, ``opening`` as system
    message.

    A system message of the task's own takes the place of ``opening``. Raises InputError.
    """
    if not isinstance(messages, (list, tuple)) or not messages:
        raise InputError("the task's doc_to_messages gave no messages; correct the task")
    made = [_message(message) for message in messages]
    if opening and made[0]["role"] != "system":
        made.insert(0, {"role": "system", "content": [{"type": "text", "text": opening}]})
    return made


def visual_part(visual: Any) -> dict[str, Any]:
    """Return a message part for what a task's doc_to_visual gives. Raises InputError."""
    if isinstance(visual, Image.Image):
        return {"type": "image", "url": visual}
    if isinstance(visual, Mapping) and "bytes" not in visual:
        if "array" in visual or visual.get("type") == "audio":
            raise InputError("the task hands over sound; mmkv's models take pictures and videos")
        return _medium(str(visual.get("type", "video")), visual)
    if isinstance(visual, (list, tuple)):
        return {"type": "video", "url": list(visual)}
    if isinstance(visual, (str, os.PathLike)) and Path(visual).suffix.lower() in _VIDEOS:
        return {"type": "video", "url": str(visual)}
    return {"type": "image", "url": picture(visual)}


def picture(source: Any) -> Any:
    """Return a picture source as mmkv.prompt.media.load_image takes it: a PIL image or a path.

    Arrays and the undecoded form of the datasets library ({"bytes", "path"}) become images.
    """
    if isinstance(source, (bytes, bytearray)):
        source = {"bytes": source}
    if isinstance(source, Mapping):
        content = source.get("bytes")
        if content is None and source.get("path"):
            return str(source["path"])
        try:
            return Image.open(io.BytesIO(content or b""))
        except (OSError, TypeError) as error:
            raise InputError(
                f"a picture of the data set is not one that Pillow reads ({error})"
            ) from error
    if isinstance(source, np.ndarray):
        return Image.fromarray(source)
    return source.removeprefix("file://") if isinstance(source, str) else source


def keys(messages: Sequence[Message]) -> list[Key]:
    """Return one comparable value per message: equal values mean the same words and media.

    Pictures count by their pixels, for a task may decode the same picture anew for each round;
    replies count without the blanks around them, which tasks like to strip.
    """
    made = []
    for message in messages:
        parts = [_part_key(part) for part in message["content"]]
        own = message["role"] == "assistant"
        made.append((message["role"], *(part.strip() if own else part for part in parts)))
    return made


def _message(message: Any) -> Message:
    if hasattr(message, "model_dump"):  # a pydantic ChatMessage
        message = message.model_dump()
    content = message["content"]
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    return {"role": message["role"], "content": [_part(part) for part in content]}


def _part(part: Mapping[str, Any]) -> dict[str, Any]:
    kind = str(part.get("type"))
    if kind == "text":
        return {"type": "text", "text": part["text"]}
    if kind not in ("image", "video"):
        raise InputError(f"the task's messages hold a part of type {kind!r}; mmkv takes pictures")
    return _medium(kind, part)


def _medium(kind: str, part: Mapping[str, Any]) -> dict[str, Any]:
    """Return a picture or video with the settings that stand beside it. Raises InputError."""
    found = _source(part)
    if kind == "image":
        found["url"] = picture(found["url"])
    return {"type": kind, **found}


def _source(part: Mapping[str, Any]) -> dict[str, Any]:
    """Return the source of a picture or video, and its settings."""
    source = next(
        (part[k] for k in ("url", "image", "video", "path") if part.get(k) is not None), None
    )
    settings = {
        _SECTION.get(key, key): value
        for key, value in part.items()
        if key not in _NO_SETTINGS and value is not None
    }
    if isinstance(source, Mapping) and "bytes" not in source:
        return settings | _source(source)
    if source is None:
        raise InputError("a picture or video of the task names no source; correct the task")
    source = source.removeprefix("file://") if isinstance(source, str) else source
    return {"url": source, **settings}


def _part_key(part: dict[str, Any]) -> str:
    if part["type"] == "text":
        return part["text"]
    settings = {key: part[key] for key in sorted(part) if key not in _NO_SETTINGS}
    return f"<{part['type']} {_digest(part['url'])} {settings or ''}>"


def _digest(source: Any) -> str:
    if isinstance(source, (str, os.PathLike)):
        return str(source)
    digest = hashlib.sha256()
    for image in source if isinstance(source, (list, tuple)) else [source]:
        if not isinstance(image, Image.Image):
            image = Image.fromarray(np.asarray(image))
        digest.update(f"{image.mode}{image.size}".encode() + image.tobytes())
    return digest.hexdigest()
