"""Find pictures and videos of local tasks below the folder that --data names.

The functions take the task's ``lmms_eval_specific_kwargs``, into which ``eval.lmms.tasks`` has
written the task's folder.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from mmkv.engine.errors import InputError

FOLDER = "mmkv_data"  # the key in lmms_eval_specific_kwargs
_VIDEOS = frozenset((".mp4", ".mkv", ".webm", ".avi", ".mov"))


def video_by_video_id(doc: dict[str, Any], kwargs: dict[str, Any]) -> list[str]:
    """Return the video named by ``videoID`` (Video-MME, VideoMathQA). Raises InputError."""
    return [_video(kwargs[FOLDER], str(doc["videoID"]))]


def video_by_id(doc: dict[str, Any], kwargs: dict[str, Any]) -> list[str]:
    """Return the video named by ``id`` (Video-MMMU). Raises InputError."""
    return [_video(kwargs[FOLDER], str(doc["id"]))]


def gqa_picture(doc: dict[str, Any], kwargs: dict[str, Any]) -> list[Any]:
    """Return GQA's picture: the row's own, or that of the picture files by ``imageId``.

    Raises InputError.
    """
    if doc.get("image") is not None:
        return [doc["image"].convert("RGB")]
    from mmkv.eval.lmms.messages import picture

    file, row = _gqa_index(kwargs[FOLDER]).get(str(doc["imageId"]), (None, 0))
    if file is None:
        raise InputError(
            f"no picture {doc['imageId']} below {kwargs[FOLDER]}; put GQA's "
            "testdev_balanced_images parquet files there"
        )
    return [picture(_gqa_column(file)[row].as_py()).convert("RGB")]


def _video(folder: str, name: str) -> str:
    found = _videos(folder).get(name)
    if found is None:
        raise InputError(
            f"no video {name}.mp4 below {folder} ({len(_videos(folder))} videos there); unpack the "
            "data set's video archives into that folder"
        )
    return found


@cache
def _videos(folder: str) -> dict[str, str]:
    files = sorted(Path(folder).rglob("*"))
    return {f.stem: str(f) for f in files if f.suffix.lower() in _VIDEOS and f.is_file()}


@cache
def _gqa_index(folder: str) -> dict[str, tuple[str, int]]:
    """Return file and row of every picture; a name decides nothing, the columns do."""
    from pyarrow import parquet

    found: dict[str, tuple[str, int]] = {}
    for path in sorted(Path(folder).rglob("*.parquet")):
        if {"id", "image"} <= set(parquet.read_schema(path).names):
            ids = parquet.read_table(path, columns=["id"])["id"].to_pylist()
            found |= {str(name): (str(path), row) for row, name in enumerate(ids)}
    return found


@cache
def _gqa_column(file: str) -> Any:
    from pyarrow import parquet

    return parquet.read_table(file, columns=["image"], memory_map=True)["image"]
