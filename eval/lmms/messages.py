"""Convert messages of lmms-eval's tasks to mmkv's form."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from engine.errors import InputError
from mmkv.prompt.template import Message
from mmkv.prompt.video import Clip, load_video

_VIDEOS = (".mp4", ".avi", ".mov", ".mkv", ".webm", ".mpeg", ".mpg", ".m4v", ".gif")
# The frame rate that qwen-vl-utils assumes for loose frames.
_LOOSE_FPS = 2.0
Key = tuple[str, ...]


@dataclass(frozen=True)
class Frames:
    """The number of frames taken of a video: ``most``, or ``fps`` a second up to ``most``."""

    most: int
    fps: float | None = None

    def load(self, source: Any, size_rule: Any) -> Clip:
        """Read the frames of a path, or pack a list of pictures. Raises InputError."""
        if isinstance(source, Clip):
            return source
        if not isinstance(source, (str, Path)):
            return _pack(source, size_rule)
        if self.fps is None:
            return load_video(source, num_frames=self.most, size_rule=size_rule)
        clip = load_video(source, fps=self.fps, size_rule=size_rule)
        if len(clip.indices) <= self.most:
            return clip
        return load_video(source, num_frames=self.most, size_rule=size_rule)


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
        return {"type": visual.get("type", "video"), **_source(visual)}
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
    found = _source(part)
    if kind == "image":
        found = {"url": picture(found["url"])}
    return {"type": kind, **found}


def _source(part: Mapping[str, Any]) -> dict[str, Any]:
    """Return the source of a picture or video. There is no source for a part of a video."""
    source = next(
        (part[k] for k in ("url", "image", "video", "path") if part.get(k) is not None), None
    )
    if isinstance(source, Mapping) and "bytes" not in source:
        return _source(source)
    if any(part.get(k) is not None for k in ("start_time", "end_time", "video_start", "video_end")):
        raise InputError(
            "the task asks for a section of a video (start and end time); mmkv reads whole files: "
            "cut the sections into files of their own"
        )
    if source is None:
        raise InputError("a picture or video of the task names no source; correct the task")
    return {"url": source.removeprefix("file://") if isinstance(source, str) else source}


def _part_key(part: dict[str, Any]) -> str:
    if part["type"] == "text":
        return part["text"]
    return f"<{part['type']} {_digest(part['url'])}>"


def _digest(source: Any) -> str:
    if isinstance(source, (str, os.PathLike)):
        return str(source)
    digest = hashlib.sha256()
    for image in source if isinstance(source, (list, tuple)) else [source]:
        if not isinstance(image, Image.Image):
            image = Image.fromarray(np.asarray(image))
        digest.update(f"{image.mode}{image.size}".encode() + image.tobytes())
    return digest.hexdigest()


def _pack(frames: Any, size_rule: Any) -> Clip:
    """Make a clip of a list or array of frames, which carries no times of its own."""
    pictures = [
        np.asarray(
            (f if isinstance(f, Image.Image) else Image.fromarray(np.asarray(f))).convert("RGB")
        )
        for f in frames
    ]
    if not pictures:
        raise InputError("a video of the task has no frames; correct the task")
    if len({p.shape for p in pictures}) > 1:
        raise InputError("the frames of a video differ in size; scale them to one size")
    scale = size_rule(len(pictures), *pictures[0].shape[:2]) if size_rule else lambda frame: frame
    stacked = np.stack([scale(p) for p in pictures])
    return Clip(stacked, tuple(range(len(stacked))), _LOOSE_FPS)
