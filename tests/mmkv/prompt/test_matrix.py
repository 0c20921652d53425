"""Drawn conversations against transformers' own processor and model, for every family.

Several pictures and videos, odd counts and sizes, bounds and rates of the checkpoint and of the
message, pictures over turns: token ids and grids are equal, pixels within one level of 255, logits
within 1e-4. A key of a message that a family does not follow is refused by name. Videos are decoded
by one reader for both; what a message's keys give is written down here from qwen-vl-utils 0.0.14,
whose own functions ``test_video.py`` compares where it is installed.
"""

from __future__ import annotations

import json
import math
import tempfile
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor
from transformers import AutoModelForImageTextToText

from mmkv import Engine
from mmkv.engine.errors import InputError
from mmkv.prompt.loading import load_processor
from tests.support.chat_models import (
    save_internvl,
    save_llava,
    save_llava_next,
    save_llava_onevision,
    save_qwen2_5_vl,
    save_qwen3_vl,
    save_qwen3_vl_moe,
)
from tests.support.hf_models import with_positions_of_the_paper
from tests.support.theirs import processor_of
from tests.support.tiers import long_but

av = pytest.importorskip("av")
SAVES = {
    "qwen3_vl": save_qwen3_vl,
    "qwen3_vl_moe": save_qwen3_vl_moe,
    "qwen2_5_vl": save_qwen2_5_vl,
    "internvl": save_internvl,
    "llava": save_llava,
    "llava_next": save_llava_next,
    "llava_onevision": save_llava_onevision,
}
QWEN = ("qwen3_vl", "qwen3_vl_moe", "qwen2_5_vl")
WATCHING = (*QWEN, "internvl")
FACTOR = 16  # pixels of a token's edge
# What the checkpoint says of videos.
VIDEOS: list[dict[str, Any]] = [
    {},
    {"fps": 1.0},
    {"fps": None, "num_frames": 5},
    {"fps": 3.0, "min_frames": 2, "max_frames": 7},
]
# And of pictures: bounds on their pixels, edges, or tiles.
_PIXELS = [{"size": {"shortest_edge": 256, "longest_edge": 4096}}]
_PIXELS += [{"size": {"shortest_edge": 1024, "longest_edge": 2048}}]
_TILES = [{}, {"image_grid_pinpoints": [[32, 32], [32, 96], [96, 32], [64, 64]]}]
PICTURES: dict[str, list[dict[str, Any]]] = {
    **dict.fromkeys(QWEN, _PIXELS),
    "internvl": [{}, {"crop_to_patches": False, "min_patches": 2, "max_patches": 6}],
    "llava": [{}, {"size": {"shortest_edge": 40}}],
    "llava_next": _TILES,
    "llava_onevision": _TILES,
}
CLIPS = [(2, 8), (5, 8), (24, 8), (31, 10), (40, 25)]  # frames and rate
SIZES = [(64, 48), (50, 34)]
# A message's keys: those of a picture and of a video.
PICTURE_KEYS: list[dict[str, Any]] = [
    {},
    {},
    {"max_pixels": 1300},
    {"min_pixels": 3000, "max_pixels": 5000},
    {"resized_height": 70, "resized_width": 33},
]
VIDEO_KEYS: list[dict[str, Any]] = [
    {},
    {},
    {"fps": 1.5},
    {"nframes": 2},
    {"fps": 4.0, "max_frames": 4},
    {"min_pixels": 500, "max_pixels": 1100},
    {"nframes": 2, "min_pixels": 300, "total_pixels": 1500},
]


# Of InternVL, whose own rule takes the frames.
INTERNVL_KEYS: list[dict[str, Any]] = [{}, {}, {"fps": 1.5}, {"nframes": 4}, {"num_frames": 3}]
# Keys that are not followed: of a family with a size of its own for pictures, and of any.
SCALING: list[dict[str, Any]] = [
    {"max_pixels": 1300},
    {"min_pixels": 3000, "max_pixels": 5000},
    {"resized_height": 70, "resized_width": 33},
]
UNKNOWN: list[dict[str, Any]] = [{"fps": 2.0}, {"total_pixels": 1500}, {"longest_edge": 64}]


@cache
def clip(count: int, rate: int, size: tuple[int, int]) -> tuple[Path, np.ndarray]:
    """Return a video of noise that moves, and its frames as they are decoded."""
    path = Path(tempfile.mkdtemp(prefix="mmkv-matrix-")) / "a.mp4"
    rng = np.random.default_rng(count)
    # Without overshoots of the filter, which PIL clips between its two passes.
    small = rng.integers(64, 192, (size[1] // 8 + 1, size[0] // 8 + 1, 3), dtype=np.uint8)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=rate)
        (stream.width, stream.height), stream.pix_fmt = size, "yuv420p"
        stream.bit_rate = 4_000_000
        for number in range(count):
            shown = Image.fromarray(np.roll(small, number, axis=1)).resize(size)
            container.mux(stream.encode(av.VideoFrame.from_image(shown)))
        container.mux(stream.encode())
    with av.open(str(path)) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    return path, np.stack(frames)


@cache
def folder_of(family: str, videos: int, pictures: int) -> Path:
    folder = SAVES[family](Path(tempfile.mkdtemp(prefix="mmkv-matrix-")))
    set_pictures(folder, PICTURES[family][pictures])
    said = dict(VIDEOS[videos])
    if family in QWEN:
        # Of a frame in Qwen2.5-VL, of all of them in Qwen3-VL.
        volume = 1 if family == "qwen2_5_vl" else 4
        bounds = PICTURES[family][pictures]["size"]
        said |= {"patch_size": 8, "temporal_patch_size": 2, "merge_size": 2}
        said |= {
            "size": {key: value * volume for key, value in bounds.items()},
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
        }
    if family == "internvl":
        said = {key: value for key, value in said.items() if key[:3] not in ("min", "max")}
        said |= {"size": {"height": 32, "width": 32}}
    if family in WATCHING:
        (folder / "video_preprocessor_config.json").write_text(json.dumps(said))
    return folder


def set_pictures(folder: Path, said: dict[str, Any]) -> None:
    """Write what a checkpoint says of pictures to where it says it."""
    file = folder / "preprocessor_config.json"
    file = file if file.exists() else folder / "processor_config.json"
    stored = json.loads(file.read_text())
    stored.get("image_processor", stored).update(said)
    file.write_text(json.dumps(stored))
    if "image_grid_pinpoints" in said:  # the model puts the tiles together again
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | said))


def weights_of(family: str, pictures: int) -> Path:
    """Return the folder whose model reads pictures of these settings."""
    return folder_of(family, 0, pictures if PICTURES[family] is _TILES else 0)


@cache
def engine_of(folder: Path) -> Engine:
    return Engine.from_pretrained(
        folder, policy="full", dtype="float32", device="cpu", prefill_chunk=64
    )


@cache
def ours(folder: Path) -> Any:
    return load_processor(folder)


@cache
def theirs(folder: Path) -> Any:
    return processor_of(folder)


@cache
def model_of(folder: Path) -> Any:
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    return with_positions_of_the_paper(model.eval())


def within(height: int, width: int, least: float, most: float) -> tuple[int, int]:
    """Return the size that qwen-vl-utils 0.0.14 scales to (``smart_resize``)."""
    rows, columns = (max(FACTOR, round(edge / FACTOR) * FACTOR) for edge in (height, width))
    if rows * columns > most:
        ratio = math.sqrt(height * width / most)
        rows, columns = (math.floor(e / ratio / FACTOR) * FACTOR for e in (height, width))
    elif rows * columns < least:
        ratio = math.sqrt(least / (height * width))
        rows, columns = (math.ceil(e * ratio / FACTOR) * FACTOR for e in (height, width))
    return rows, columns


def their_picture(shown: Image.Image, said: dict[str, Any]) -> Image.Image:
    """Scale as ``fetch_image``."""
    least, most = 4 * FACTOR**2, 16384 * FACTOR**2
    if "resized_height" in said:
        rows, columns = within(said["resized_height"], said["resized_width"], least, most)
    else:
        bounds = said.get("min_pixels", least), said.get("max_pixels", most)
        rows, columns = within(shown.height, shown.width, *bounds)
    return shown.resize((columns, rows))


def their_frames(
    frames: np.ndarray, rate: float, said: dict[str, Any], processor: Any
) -> tuple[np.ndarray, list[int], bool]:
    """Return the frames that ``fetch_video`` chooses, their numbers, and whether it scaled them.

    Of InternVL those that its own video processor chooses, asked for the message's rate or number.
    """
    total, video = len(frames), processor.video_processor
    internvl = type(video).__name__.startswith("InternVL")
    if internvl and said:
        count = 0
        asked = {"num_frames" if key == "nframes" else key: value for key, value in said.items()}
        metadata = type("M", (), {"total_num_frames": total, "fps": rate})()
        with patch.object(video, "num_frames", None):
            numbers = [int(index) for index in video.sample_frames(metadata, **asked)]
    elif "nframes" in said:
        count = round(said["nframes"] / 2) * 2
    elif "fps" in said:
        most = math.floor(min(said.get("max_frames", video.max_frames), total) / 2) * 2
        least = math.ceil(video.min_frames / 2) * 2
        count = min(min(max(total / rate * said["fps"], least), most), total) // 2 * 2
    else:
        metadata = type("M", (), {"total_num_frames": total, "fps": rate})()
        fps = video.fps if video.num_frames or video.fps else 2.0
        asked = {"fps": fps}
        if video.num_frames:  # not more than there are
            asked = {"num_frames": min(video.num_frames, total)}
        numbers = [int(index) for index in video.sample_frames(metadata, **asked)]
        numbers = [index for index in numbers if index < total]
        count = 0
    if count:
        numbers = torch.linspace(0, total - 1, int(count)).round().long().tolist()
    chosen = frames[numbers]
    if "max_pixels" not in said and "total_pixels" not in said:
        return chosen, numbers, False
    least = said.get("min_pixels", 128 * FACTOR**2)
    most = max(
        min(768 * FACTOR**2, said.get("total_pixels", 1e12) / len(numbers) * 2), int(least * 1.05)
    )
    rows, columns = within(*chosen.shape[1:3], least, min(said.get("max_pixels", most), most))
    scaled = [np.asarray(Image.fromarray(one).resize((columns, rows))) for one in chosen]
    return np.stack(scaled), numbers, True


@st.composite
def cases(draw: st.DrawFn, family: str) -> dict[str, Any]:
    """Draw a checkpoint's settings and up to three turns of parts."""
    turns: list[list[tuple[Any, ...]]] = []
    alone: dict[str, tuple[Any, ...]] = {}
    for number in range(draw(st.integers(1, 3))):
        parts: list[tuple[Any, ...]] = []
        for _ in range(draw(st.integers(0, 2))):
            watches = family in WATCHING and draw(st.booleans())
            if watches:
                # transformers gives no frame of InternVL's short ones.
                known = CLIPS if family in QWEN else CLIPS[2:]
                count, rate = draw(st.sampled_from(known))
                said = draw(st.sampled_from(VIDEO_KEYS if family in QWEN else INTERNVL_KEYS))
                part: tuple[Any, ...] = ("video", count, rate, draw(st.sampled_from(SIZES)), said)
                # transformers takes one size and number of frames for all of InternVL's videos.
                part = alone.setdefault("video", part) if family == "internvl" else part
            else:
                size = (draw(st.integers(17, 90)), draw(st.integers(17, 90)))
                said = draw(st.sampled_from(PICTURE_KEYS)) if family in QWEN else {}
                if "max_pixels" in said and not all(
                    within(size[1], size[0], 0, said["max_pixels"])
                ):
                    said = {}  # qwen-vl-utils scales a narrow one to nothing, which is refused
                part = ("image", *size, draw(st.integers(0, 9)), said)
            parts.append(part)
        parts.append(("text", "ab" * draw(st.integers(1, 3)) + str(number)))
        turns.append(parts)
    videos = draw(st.integers(0, len(VIDEOS) - 1)) if family in WATCHING else 0
    pictures = draw(st.integers(0, len(PICTURES[family]) - 1))
    refused = draw(st.none() | st.sampled_from(UNKNOWN if family in QWEN else [*UNKNOWN, *SCALING]))
    return {"turns": turns, "videos": videos, "pictures": pictures, "refused": refused}


def conversation(case: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the case as messages, with a word of the assistant between the turns."""
    made: list[dict[str, Any]] = []
    for turn in case["turns"]:
        if made:
            made.append({"role": "assistant", "content": [{"type": "text", "text": "so"}]})
        content: list[dict[str, Any]] = []
        for kind, *rest in turn:
            if kind == "text":
                content.append({"type": "text", "text": rest[0]})
            elif kind == "image":
                content.append({"type": "image", "image": noise(*rest[:3]), **rest[3]})
            else:
                path, _ = clip(*rest[:3])
                content.append({"type": "video", "video": str(path), **rest[3]})
        made.append({"role": "user", "content": content})
    return made


def noise(width: int, height: int, seed: int) -> Image.Image:
    """Return a picture without sharp edges, on which filters differ little."""
    small = np.random.default_rng(seed).integers(0, 256, (5, 5, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


def of_transformers(family: str, case: dict[str, Any], text: str, folder: Path) -> dict[str, Any]:
    """Return their inputs of a whole prompt, media by media, joined."""
    processor = theirs(folder)
    parts = [part for turn in case["turns"] for part in turn if part[0] != "text"]
    if family not in QWEN:
        pictures = [noise(*part[1:4]) for part in parts if part[0] == "image"]
        options: dict[str, Any] = {"images": [pictures]} if pictures else {}
        films = [part for part in parts if part[0] == "video"]
        if films:
            read = [
                their_frames(clip(*part[1:4])[1], part[2], part[4], processor)[0] for part in films
            ]
            options |= {"videos": read, "do_sample_frames": False}
        return dict(processor(text=[text], return_tensors="pt", **options))
    inputs: dict[str, list[Tensor]] = {}
    for kind, *rest in parts:  # each by itself: some are scaled already
        if kind == "image":
            scaled = bool(rest[3])
            shown = noise(*rest[:3])
            shown = their_picture(shown, rest[3]) if scaled else shown
            more = {"do_resize": False} if scaled else {}
            made = processor.image_processor([shown], return_tensors="pt", **more)
        else:
            frames, numbers, scaled = their_frames(clip(*rest[:3])[1], rest[1], rest[3], processor)
            facts = {"total_num_frames": rest[0], "fps": rest[1], "frames_indices": numbers}
            more = {"do_resize": False} if scaled else {}
            made = processor(
                text=["<|vision_start|><|video_pad|><|vision_end|>"],
                videos=[frames],
                video_metadata=[facts],
                do_sample_frames=False,
                return_tensors="pt",
                **more,
            )
            filled = processor.tokenizer.decode(made.pop("input_ids")[0])
            inner = filled.removeprefix("<|vision_start|>").removesuffix("<|vision_end|>")
            text = text.replace("<|video_pad|>", inner.replace("<|video_pad|>", "\0"), 1)
            made.pop("attention_mask"), made.pop("mm_token_type_ids")
        if kind == "image":
            tokens = int(made["image_grid_thw"].prod()) // 4
            text = text.replace("<|image_pad|>", "\1" * tokens, 1)
        for key, value in made.items():
            if key != "video_metadata":
                inputs.setdefault(key, []).append(torch.as_tensor(value))
    text = text.replace("\0", "<|video_pad|>").replace("\1", "<|image_pad|>")
    joined: dict[str, Any] = dict(processor.tokenizer([text], return_tensors="pt"))
    return joined | {key: torch.cat(values) for key, values in inputs.items()}


def check(family: str, case: dict[str, Any]) -> None:
    folder = folder_of(family, case["videos"], case["pictures"])
    weights = weights_of(family, case["pictures"])
    engine = engine_of(weights)
    engine.processor = ours(folder)
    talk = conversation(case)
    check_refusals(engine, family, talk, case["refused"])
    made = engine.inputs(talk)
    bare = [
        {
            "role": message["role"],
            "content": [
                {key: part[key] for key in ("type", "text") if key in part}
                for part in message["content"]
            ],
        }
        for message in talk
    ]
    text = engine.processor.tokenizer.apply_chat_template(
        bare, tokenize=False, add_generation_prompt=True
    )
    wanted = of_transformers(family, case, text, folder)
    assert torch.equal(made["input_ids"], wanted["input_ids"])
    for key, value in wanted.items():
        if key.startswith("pixel_values"):
            level = 1 / 255 / min(theirs(folder).image_processor.image_std)
            assert made[key].shape == value.shape
            assert float((made[key] - value).abs().max()) <= 1.02 * level, key
        elif key == "second_per_grid_ts":
            torch.testing.assert_close(made[key], value.to(made[key].dtype))
        elif key != "video_metadata":
            assert torch.equal(made[key], torch.as_tensor(value)), key
    model = model_of(weights)
    arguments = {key: value for key, value in made.items() if key != "token_type_ids"}
    with torch.inference_mode():
        if family == "qwen2_5_vl":
            kinds = made["mm_token_type_ids"]
            grids = {key: made.get(key) for key in ("image_grid_thw", "video_grid_thw")}
            arguments["position_ids"], _ = model.model.get_rope_index(
                made["input_ids"], kinds, second_per_grid_ts=made.get("second_per_grid_ts"), **grids
            )
        logits = model(**arguments).logits[0, -1]
    with engine.session() as session:
        found = session.prefill(made)
    assert float((found - logits).abs().max() / logits.abs().max()) <= 1e-4


def check_refusals(
    engine: Engine, family: str, talk: list[dict[str, Any]], said: dict[str, Any] | None
) -> None:
    """A key, or a video, that the family cannot follow is named, wherever it stands."""
    *before, last = talk
    refused: list[tuple[dict[str, Any], str]] = []
    if said is not None:
        keys = "|".join(said)
        why = (
            rf"'({keys})' of the image is not understood" if said in UNKNOWN else rf"drop ({keys})"
        )
        refused.append(({"type": "image", "image": noise(40, 30, 0), **said}, why))
    if said in SCALING and family == "internvl":
        refused.append(({"type": "video", "video": str(clip(24, 8, SIZES[0])[0]), **said}, why))
    if family not in WATCHING:
        film = {"type": "video", "video": str(clip(24, 8, SIZES[0])[0])}
        refused.append((film, "takes no videos here"))
    for part, why in refused:
        with pytest.raises(InputError, match=why):
            engine.inputs([*before, {**last, "content": [part, *last["content"]]}])


@pytest.mark.parametrize(
    "family",
    long_but(
        ("qwen3_vl", "qwen2_5_vl", "internvl", "llava_onevision"),
        SAVES,
        "test_processing.py and test_held.py have every family",
    ),
)
@settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_drawn_conversations(family: str, data: st.DataObject) -> None:
    check(family, data.draw(cases(family)))


@pytest.mark.drawn("sixty conversations of each family")
@pytest.mark.parametrize("family", SAVES)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_many_drawn_conversations(family: str, data: st.DataObject) -> None:
    check(family, data.draw(cases(family)))
