"""Video frames: which are read, and that the tensors are what transformers makes of them."""

from __future__ import annotations

import importlib
import json
import re
import struct
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import mmkv.environment
from mmkv.engine.errors import InputError, ModelError
from mmkv.prompt import video
from mmkv.prompt.loading import load_processor
from mmkv.prompt.qwen_vision import RUN, VideoRules
from mmkv.prompt.video import Clip, FrameRule, load_video
from tests.support.chat_models import save_internvl
from tests.support.media import RATE, write_clip

pytest.importorskip("av")


@pytest.fixture(scope="module")
def clip_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_clip(tmp_path_factory.mktemp("video") / "steps.mp4")


def levels(clip: Clip) -> list[int]:
    return [round(float(frame.mean()) / 10) for frame in clip.frames]


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, [0, 5, 9, 14, 18, 23]),  # 2 frames a second of 3 seconds
        ({"num_frames": 3}, [0, 12, 23]),
        ({"num_frames": 1}, [0]),
        ({"fps": 8.0}, list(range(24))),
        ({"fps": 0.1}, [0, 8, 15, 23]),  # never below four
        ({"num_frames": 100}, list(range(24))),  # never more than there are
    ],
)
def test_the_right_frames_are_read(
    clip_file: Path, options: dict[str, Any], wanted: list[int]
) -> None:
    clip = load_video(clip_file, **options)
    assert list(clip.indices) == wanted and levels(clip) == wanted
    assert clip.timestamps == [index / RATE for index in wanted]


def test_frames_are_scaled_while_they_are_read(clip_file: Path) -> None:
    rules = VideoRules(patch_size=8, shortest_edge=16 * 16, longest_edge=6 * 32 * 32)
    whole, scaled = load_video(clip_file), load_video(clip_file, size_rule=rules.scaler)
    assert scaled.frames.shape[1:3] == rules.size(6, 48, 64) != (48, 64)
    one, grid = rules.patches(whole)
    other, same_grid = rules.patches(scaled)
    assert grid == same_grid and np.array_equal(one, other)


def test_bad_videos_give_one_line(tmp_path: Path) -> None:
    noise, empty = tmp_path / "noise.mp4", tmp_path / "empty.mp4"
    noise.write_bytes(bytes(range(256)) * 20)
    empty.touch()
    for source, says in (
        (noise, "cannot read the video"),
        (empty, "empty"),
        (tmp_path / "no.mp4", "not found"),
        (tmp_path, "folder"),
    ):
        with pytest.raises(InputError, match=says) as caught:
            load_video(source)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "options", [{"fps": 0}, {"fps": -1}, {"num_frames": 0}, {"fps": 1, "num_frames": 1}]
)
def test_sampling_that_cannot_be_followed(clip_file: Path, options: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        load_video(clip_file, **options)


@pytest.mark.parametrize("name", ["fps", "num_frames"])
@pytest.mark.parametrize("value", [{}, "2", [2], 2j, True])
def test_sampling_options_of_another_type_are_named(clip_file: Path, name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"{name} must be a (whole )?number, not"):
        load_video(clip_file, **{name: value})


@pytest.mark.parametrize("failure", [ImportError, RuntimeError, OSError])
def test_absent_and_broken_readers(
    clip_file: Path, monkeypatch: pytest.MonkeyPatch, failure: type[Exception]
) -> None:
    real = importlib.import_module

    def importing(name: str, *rest: Any) -> Any:
        if name in ("decord", "av", "torchcodec"):
            raise failure(f"{name} does not load")
        return real(name, *rest)

    monkeypatch.setattr(importlib, "import_module", importing)
    with pytest.raises(InputError, match=r"no video reader works here; run pip install av$"):
        load_video(clip_file)
    # The report gives the same remedy, once.
    monkeypatch.setattr("mmkv.environment.find_spec", lambda name: name)
    assert mmkv.environment.describe().count("run pip install av") == 1


def test_readers_are_not_imported_before_a_video_is() -> None:
    code = (
        "import sys, mmkv.prompt.video, mmkv.prompt.media, mmkv.environment; "
        "print({'decord', 'av', 'torchcodec', 'torchvision'} & set(sys.modules))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "set()\n"


@given(st.integers(2, 40), st.integers(1, 2000), st.integers(1, 2000), st.sampled_from([8, 14, 16]))
@settings(max_examples=300, deadline=None)
def test_sizes_are_those_of_transformers(frames: int, height: int, width: int, patch: int) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
        smart_resize as of_a_frame,  # the frames of a video are sized alike
    )
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize

    for rules in (VideoRules(patch_size=patch), replace(RUN, patch_size=patch)):
        bounds = (rules.shortest_edge, rules.longest_edge)
        try:
            if not rules.frames_apart:
                wanted = of_a_frame(height, width, 2 * patch, *bounds)
            else:
                wanted = smart_resize(frames, height, width, 2, 2 * patch, *bounds)
        except ValueError:
            with pytest.raises(InputError):
                rules.size(frames, height, width)
        else:
            assert rules.size(frames, height, width) == wanted


@given(st.integers(1, 5000), st.sampled_from([8.0, 23.976, 25.0, 60.0]), st.integers(1, 50))
@settings(max_examples=100, deadline=None)
def test_frame_numbers_are_those_of_transformers(total: int, rate: float, count: int) -> None:
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    theirs = Qwen3VLVideoProcessor.sample_frames
    settings_ = SimpleNamespace(fps=2, num_frames=None, min_frames=4, max_frames=768)
    metadata = SimpleNamespace(total_num_frames=total, fps=rate)
    assert FrameRule().chosen(total, rate) == theirs(settings_, metadata).tolist()
    if count <= total:
        settings_.fps = None
        wanted = theirs(settings_, metadata, num_frames=count).tolist()
        assert FrameRule().chosen(total, rate, num_frames=count) == wanted


@pytest.mark.parametrize("frames", [1, 2, 5])
def test_patches_and_text_are_those_of_transformers(frames: int) -> None:
    from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    rules = VideoRules(patch_size=8, shortest_edge=16, longest_edge=10**6)
    pixels = np.random.default_rng(0).integers(0, 256, (frames, 32, 48, 3), dtype=np.uint8)
    clip = Clip(pixels, tuple(3 * n for n in range(frames)), 8.0)
    patches, grid = rules.patches(clip)

    scaled = torch.from_numpy(pixels).permute(0, 3, 1, 2)[None].float() / 255
    wanted, *their_grid = Qwen3VLVideoProcessor.patchify(None, (scaled - 0.5) / 0.5, 8, 2, 2)
    assert list(grid) == their_grid
    assert np.abs(patches - wanted[0].numpy()).max() < 1e-6

    processor = SimpleNamespace(
        video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=2),
        vision_start_token="<|vision_start|>",
        vision_end_token="<|vision_end|>",
        video_token="<|video_pad|>",
    )
    processor._calculate_timestamps = lambda *a: Qwen3VLProcessor._calculate_timestamps(None, *a)
    made = {
        "video_grid_thw": np.array([grid]),
        "video_metadata": [SimpleNamespace(fps=8.0, frames_indices=list(clip.indices))],
    }
    theirs = Qwen3VLProcessor.replace_video_token(processor, made, 0)
    assert rules.expand(clip, grid) == theirs
    run = replace(RUN, patch_size=8)
    older = Qwen2_5_VLProcessor.replace_video_token
    processor.video_processor.merge_size = run.merge_size
    assert run.expand(clip, grid) == older(processor, made, 0)


@pytest.mark.parametrize("count", [1, 4, 6])
def test_seconds_between_patches_are_those_of_transformers(clip_file: Path, count: int) -> None:
    from transformers.video_utils import VideoMetadata

    clip = load_video(clip_file, num_frames=count)
    indices = list(clip.indices)
    theirs = VideoMetadata(total_num_frames=24, fps=float(RATE), frames_indices=indices)
    wanted = pytest.approx([RUN.temporal_patch_size / theirs.sampled_fps])
    assert RUN.times([clip])["second_per_grid_ts"] == wanted
    if count > 1:  # the last frame is among them
        assert RUN.times([replace(clip, total=None)])["second_per_grid_ts"] == wanted


def test_tiles_of_internvl_are_scaled_as_the_checkpoint_says(tmp_path: Path) -> None:
    folder = save_internvl(tmp_path)
    file = folder / "preprocessor_config.json"
    stored = json.loads(file.read_text()) | {"resample": 0}
    file.write_text(json.dumps(stored))
    frame = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    nearest = np.asarray(Image.fromarray(frame).resize((32, 32), Image.Resampling.NEAREST))
    assert np.array_equal(load_processor(folder).size_rule(3, 48, 64)(frame), nearest)
    for key, value in (("size", {"shortest_edge": 32}), ("resample", 9)):
        file.write_text(json.dumps(stored | {key: value}))
        with pytest.raises(ModelError, match=f"{key} is "):
            load_processor(folder)


def test_frames_of_internvl_are_pictures_in_one_tile(tmp_path: Path) -> None:
    """Text as transformers' processor writes it; pixels of frames that need no scaling."""
    from transformers.models.internvl.processing_internvl import InternVLProcessor

    processor = load_processor(save_internvl(tmp_path))
    theirs = processor.processor
    rng = np.random.default_rng(0)
    clip = Clip(rng.integers(0, 256, (3, 32, 32, 3), dtype=np.uint8), (0, 4, 8), 8.0)
    message = {"role": "user", "content": [{"type": k} for k in ("video", "image", "video")]}
    text = processor.template.render([message], opening=True)
    made = processor.encode(text, [Image.new("RGB", (64, 32))], [clip, clip])
    shape = {"pixel_values_videos": [clip.frames]}
    wanted = text.replace("<video>", InternVLProcessor.replace_video_token(theirs, shape, 0))
    cells = f"<img>{'<IMG_CONTEXT>' * 4 * 3}</img>"  # two tiles and the whole
    wanted = wanted.replace("\n<IMG_CONTEXT>\n", f"\n{cells}\n")
    assert processor.tokenizer.decode(made["input_ids"][0]) == wanted
    images = theirs.image_processor
    mean, std = np.array(images.image_mean), np.array(images.image_std)
    frames = torch.tensor((clip.frames / 255 - mean) / std).permute(0, 3, 1, 2).float()
    assert made["pixel_values"].shape == (3 + 3 + 3, 3, 32, 32)
    for found in (made["pixel_values"][:3], made["pixel_values"][6:]):
        torch.testing.assert_close(found, frames, rtol=1e-5, atol=1e-5)
    assert processor.size_rule(3, 48, 64)(np.zeros((48, 64, 3), np.uint8)).shape == (32, 32, 3)
    alone = processor.encode("x<video>", [], [clip])["input_ids"]
    assert processor.video_texts([clip], {}) == [processor.tokenizer.decode(alone[0])[1:]]


def write_frames(
    path: Path,
    count: int,
    rate: int = 8,
    codec: str = "mpeg4",
    stamps: list[int] | None = None,
    **options: Any,
) -> Path:
    """Write ``count`` frames of 64 x 48 pixels, frame n of grey level 10 (n mod 25).

    ``stamps``: their times in milliseconds; else by ``rate``. ``options``: of PyAV's container.
    """
    import av

    with av.open(str(path), "w", **options) as container:
        stream = container.add_stream(codec, rate=rate)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        stream.bit_rate = 4_000_000
        if codec == "libx264":
            stream.codec_context.max_b_frames = 2
        if stamps is not None:
            stream.codec_context.time_base = Fraction(1, 1000)
        for number in range(count):
            level = np.full((48, 64, 3), 10 * (number % 25), dtype=np.uint8)
            frame = av.VideoFrame.from_ndarray(level, format="rgb24")
            if stamps is not None:
                frame.pts, frame.time_base = stamps[number], Fraction(1, 1000)
            for packet in stream.encode(frame):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return path


def test_a_video_of_a_phone_is_turned(tmp_path: Path) -> None:
    """The matrix of the track (ISO 14496-12, 8.3.2) turns by 90 degrees clockwise."""
    import av

    path = tmp_path / "a.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=8)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        corner = np.zeros((48, 64, 3), dtype=np.uint8)
        corner[:24, :32] = 255  # at the top left
        for _ in range(4):
            frame = av.VideoFrame.from_ndarray(corner, format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    content = bytearray(path.read_bytes())
    at = content.index(b"tkhd") + 44
    for matrix, shape, bright in (
        ((1, 0, 0, 1), (48, 64), (0, 0)),
        ((0, 1, -1, 0), (64, 48), (0, -1)),  # clockwise
        ((-1, 0, 0, -1), (48, 64), (-1, -1)),
        ((0, -1, 1, 0), (64, 48), (-1, 0)),
    ):
        a, b, c, d = (value << 16 for value in matrix)
        content[at : at + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
        path.write_bytes(content)
        clip = load_video(path)
        assert clip.frames.shape[1:] == (*shape, 3)
        for row, column in ((0, 0), (0, -1), (-1, 0), (-1, -1)):
            light = clip.frames[0, row, column].mean()
            assert (light > 200) == ((row, column) == bright), (matrix, row, column)


def test_what_decord_gives_of_small_turned_frames() -> None:
    """As seen with decord 0.6.0: rows of packed RGB, their padding counted as a fourth colour."""
    frame = np.random.default_rng(0).integers(0, 256, (5, 6, 3), dtype=np.uint8)
    padded = np.zeros((5, 24), dtype=np.uint8)
    padded[:, :18] = frame.reshape(5, 18)
    given = [frame, padded.reshape(5, 6, 4)]

    class VideoReader:
        def __init__(self, path: str, num_threads: int) -> None: ...

        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> Any:
            return SimpleNamespace(asnumpy=lambda: given[index])

        def get_avg_fps(self) -> float:
            return 8.0

        def get_frame_timestamp(self, numbers: range) -> np.ndarray:
            return np.array([[0.5, 0.6], [0.625, 0.7]])

    reader = video._READERS["decord"](SimpleNamespace(VideoReader=VideoReader), "a.mp4")
    for read in reader.read([0, 1], lambda kept: kept):
        assert np.array_equal(read, frame)


@pytest.mark.parametrize("suffix", ["mp4", "mkv"])
def test_frames_of_a_variable_rate_have_their_own_times(tmp_path: Path, suffix: str) -> None:
    """30 frames a second for 2 s, then one a second: 20 frames in 19 s are about a second apart."""
    stamps = [number * 1000 // 30 for number in range(60)] + [2000 + 1000 * n for n in range(18)]
    path = write_frames(tmp_path / f"a.{suffix}", len(stamps), 30, stamps=stamps)
    clip = load_video(path, num_frames=20)
    assert len(clip.indices) == 20 and clip.indices[0] == 0 and clip.indices[-1] == 77
    for index, seconds in zip(clip.indices, clip.timestamps, strict=True):
        assert seconds == pytest.approx(stamps[index] / 1000, abs=0.002)
    for number, seconds in enumerate(clip.timestamps):  # on the screen at that time
        assert number - 1.05 <= seconds <= number + 0.05
    assert levels(clip) == [index % 25 for index in clip.indices]
    assert clip.sampled_fps == pytest.approx(20 / 19, rel=0.02)


@pytest.mark.parametrize(
    ("name", "codec", "options"),
    [
        ("live.mkv", "libx264", {"format": "matroska", "options": {"live": "1"}}),
        ("raw.h264", "libx264", {"format": "h264"}),
        ("raw.m4v", "mpeg4", {"format": "m4v"}),
        ("a.ts", "libx264", {"format": "mpegts"}),
        ("a.avi", "mpeg4", {}),
        ("a.webm", "libvpx", {}),
        ("whole.mp4", "libx264", {"options": {"movflags": "frag_keyframe+empty_moov"}}),
    ],
)
def test_every_frame_of_a_container_is_counted(
    tmp_path: Path, name: str, codec: str, options: dict[str, Any]
) -> None:
    path = write_frames(tmp_path / name, 30, 30, codec, **options)
    clip = load_video(path, num_frames=30)
    assert clip.indices == tuple(range(30)) and clip.note is None
    assert levels(clip) == [number % 25 for number in range(30)]
    assert clip.fps == pytest.approx(30 if name != "raw.m4v" else 25, abs=5.1)


def test_of_a_cut_video_is_shown_what_there_is(tmp_path: Path) -> None:
    start = {"options": {"movflags": "faststart"}}
    whole = write_frames(tmp_path / "whole.mp4", 48, **start).read_bytes()
    path = tmp_path / "cut.mp4"
    path.write_bytes(whole[: len(whole) * 55 // 100])
    clip = load_video(path, num_frames=12)
    there = clip.total
    assert there is not None and 15 < there < 30 and clip.indices[-1] == there - 1
    assert len(set(clip.indices)) == 12
    assert levels(clip) == [index % 25 for index in clip.indices]  # none is a copy
    assert clip.note is not None and "\n" not in clip.note
    said = re.search(r"breaks off: (\d+\.\d) of (\d+\.\d) seconds", clip.note)
    assert said is not None and float(said[2]) == pytest.approx(6, abs=0.06)
    assert float(said[1]) == pytest.approx(float(there) / 8, abs=0.2)
    engine_note = load_video(write_frames(tmp_path / "b.mp4", 48), num_frames=12).note
    assert engine_note is None


def test_packets_that_cannot_be_decoded_are_no_copies(tmp_path: Path) -> None:
    content = bytearray(write_frames(tmp_path / "a.avi", 24).read_bytes())
    last = content.rindex(b"00dc", 0, content.rindex(b"idx1"))
    size = struct.unpack("<I", content[last + 4 : last + 8])[0]
    content[last + 8 : last + 8 + size] = bytes(size)
    path = tmp_path / "b.avi"
    path.write_bytes(content)
    clip = load_video(path, num_frames=24)
    assert levels(clip) == list(clip.indices) and len(clip.indices) in (22, 23, 24)
