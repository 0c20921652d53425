"""Video frames: which are read, how they are scaled, and tensors beside those of transformers."""

from __future__ import annotations

import importlib
import json
import random
import re
import struct
import subprocess
import sys
from dataclasses import asdict, replace
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
from transformers.video_utils import VideoMetadata

import mmkv.environment
from mmkv import Engine
from mmkv.engine.errors import InputError, ModelError
from mmkv.prompt import part_settings, video
from mmkv.prompt.loading import load_processor
from mmkv.prompt.media import load_image
from mmkv.prompt.messages import take_media
from mmkv.prompt.part_settings import MediaSettings, Sourced, evenly
from mmkv.prompt.processing import IdeficsProcessor
from mmkv.prompt.qwen_vision import RUN, VideoRules, frame_rule
from mmkv.prompt.video import Clip, FrameRule, load_video
from mmkv.server.media import worker
from mmkv.training.data.conversations import read_row
from tests.support.chat_models import (
    picture,
    save_internvl,
    save_llava,
    save_qwen2_5_vl,
    save_qwen3_vl,
    save_smolvlm,
)
from tests.support.media import RATE, write_clip
from tests.support.theirs import processor_of, video_processor_class

av = pytest.importorskip("av")


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
        (noise, "is no video that can be read here"),
        (empty, "empty"),
        (tmp_path / "no.mp4", "not found"),
        (tmp_path, "folder"),
    ):
        with pytest.raises(InputError, match=says) as caught:
            load_video(source)
        assert "\n" not in str(caught.value)


def _sound(path: Path) -> bytes:
    with av.open(str(path), "w") as file:
        stream = file.add_stream("aac", rate=8000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
        frame.rate = 8000
        file.mux([*stream.encode(frame), *stream.encode()])
    return path.read_bytes()


# What a file is -> what is said of it as a video, and as a picture.
_CUT, _VIDEO = "its end is missing .*; get another copy", "is a video, not a picture"
WRONG: dict[str, tuple[str, str]] = {
    "sound in MP4": ("holds sound and no video; give a file with one", _VIDEO),
    "MP4 without its last tenth": (_CUT, _VIDEO),
    "unknown codec": ("a codec that FFmpeg does not know; convert it to H.264", _VIDEO),
    "PDF": ("is a PDF, not a video; save its page", "is a PDF, not a picture; save its page"),
    "page": ("is a web page, not a video; download", "is a web page, not a picture; download"),
    "pointer": ("Git LFS, not a video; run git lfs pull", "Git LFS, not a picture; run git lfs"),
    "SVG": ("SVG, not a video; save it as PNG", "SVG, not a picture; save it as PNG"),
    "ZIP": ("archive, not a video; name a file", "archive, not a picture; name a file"),
    "head of a JPEG": ("a picture, not a video; give it as one", "is damaged; get another copy"),
    "raw file": ("is no video .* here .*; give an MP4", "a camera's raw file; .*save it as JPEG"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_a_file_is_fits_what_is_to_be_done(kind: str, clip_file: Path, tmp_path: Path) -> None:
    """In a terminal and in a server's process."""
    clip, unknown = clip_file.read_bytes(), write_clip(tmp_path / "clip.mkv").read_bytes()
    content = {
        "MP4 without its last tenth": clip[: len(clip) * 9 // 10],
        "unknown codec": unknown.replace(b"V_MPEG4/ISO/ASP", b"V_MPEG9/ISO/ASP"),
        "PDF": b"%PDF-1.4\n1 0 obj\n",
        "page": b"\n<!DOCTYPE html><html><body>404</body></html>",
        "pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
        "SVG": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        "ZIP": b"PK\3\4" + bytes(99),
        "head of a JPEG": b"\xff\xd8\xff\xe0" + bytes(16),
        "raw file": b"II*\0\x10\0\0\0CR\2\0" + bytes(99),
    }.get(kind) or _sound(tmp_path / "sound.mp4")
    file = tmp_path / "given"
    file.write_bytes(content)
    frames = {"frame_rule": asdict(FrameRule()), "pixels": 10**6, "frames": 99}
    task = {"kind": "video", "name": "given", "rules": None, "settings": {}} | frames
    as_video, as_picture = WRONG[kind]
    with pytest.raises(InputError, match=f"^{re.escape(str(file))} .*{as_video}"):
        load_video(file)
    served = worker._decoded(task, content)[0]["error"]
    assert re.search(f"^given .*{as_video}", served) or "is no MP4, WebM" in served
    with pytest.raises(InputError, match=as_picture):
        load_image(file)


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
    seconds = RUN.temporal_patch_size / theirs.sampled_fps
    clips = [replace(clip, fps=2 * clip.fps), clip]  # one of a source twice as fast
    if count > 1:  # the last frame is among them
        clips += [replace(clip, total=None)]
    wanted = pytest.approx([seconds / 2, seconds, seconds][: len(clips)])
    assert RUN.times(clips)["second_per_grid_ts"] == wanted


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


def test_frames_of_smolvlm_stand_behind_their_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text as transformers' processor writes it, also its template's; pixels of whole frames."""
    theirs = processor_of(save_smolvlm(tmp_path))
    processor = load_processor(tmp_path)
    words = {3: "three", 21: "twenty-one"}
    monkeypatch.setattr(sys.modules[type(theirs).__mro__[1].__module__], "num2words", words.get)
    rng = np.random.default_rng(0)
    content = [{"type": kind} for kind in ("video", "image", "video")]
    text = processor.template.render([{"role": "user", "content": content}], opening=True)
    shown = theirs.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
    assert text == shown + "Assistant:"
    picture, clips, expanded = Image.new("RGB", (64, 32)), [], text
    for count, step in ((3, 40), (21, 8)):
        frames = rng.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
        indices = tuple(step * number for number in range(count))
        clips.append(Clip(frames, indices, 8.0, total=1000))
        times = VideoMetadata(
            total_num_frames=1000, fps=8.0, duration=125.0, frames_indices=list(indices)
        )
        made = {"pixel_values": frames[None], "video_metadata": [times]}
        expanded = expanded.replace("<video>", theirs.replace_video_token(made, 0), 1)
    tiles = theirs.replace_image_token({"rows": [[1]], "cols": [[2]]}, 0)
    head, _, tail = expanded.partition("\n\n<image>")
    inputs = processor.encode(text, [picture], clips)
    assert processor.tokenizer.decode(inputs["input_ids"][0]) == f"{head}\n\n{tiles}{tail}"
    assert inputs["pixel_values"].shape == (1, 3 + 3 + 21, 3, 32, 32)
    for found, clip in zip(inputs["pixel_values"][0].split([6, 21]), clips, strict=True):
        wanted = torch.tensor((clip.frames / 255 - 0.5) / 0.5).permute(0, 3, 1, 2).float()
        torch.testing.assert_close(found[: len(wanted)], wanted, rtol=1e-5, atol=1e-5)


def test_frames_of_smolvlm_have_a_longest_edge(tmp_path: Path) -> None:
    made = load_processor(save_smolvlm(tmp_path))
    given = made.tokenizer, made.template, made.image_processor, made.tile, 4
    for said, edge in ((None, 4 * made.tile), (40, 40), (8000, 4096)):
        other = IdeficsProcessor(*given, {"size": {"longest_edge": said}, "fps": 2})
        assert other._frame_edge == edge and other.frame_rule.fps == 2


@pytest.mark.parametrize("seed", range(3))
def test_frames_of_smolvlm_are_chosen_as_by_transformers(seed: int) -> None:
    """Also without the first and last second of a long video."""
    theirs, rng, trimmed = video_processor_class("smolvlm")(), random.Random(seed), 0
    for _ in range(60):
        total, rate = rng.choice([1, 2, 30, 200, 5000]), rng.choice([0.5, 8.0, 23.976, 60.0])
        fps, most = rng.choice([0.3, 1, 2]), rng.choice([1, 6, 64])
        times = VideoMetadata(total_num_frames=total, fps=rate, duration=total / rate)
        wanted = theirs.sample_frames(times, num_frames=most, fps=fps).tolist()
        assert FrameRule("trimmed", fps, max_frames=most).chosen(total, rate) == wanted
        trimmed += wanted[0] > 0
    assert trimmed
    assert FrameRule("trimmed", 1).chosen(100, 20.0, num_frames=4) == [0, 33, 66, 99]


# Which frames are read and how they are scaled: by transformers' rules and by a message's keys.


pytest.importorskip("av")
RULES = {
    "qwen3_vl": lambda config: frame_rule(config, apart=True),
    "qwen2_5_vl": lambda config: frame_rule(config, apart=False),
    "internvl": lambda config: FrameRule(
        "centred",
        config.get("fps"),
        config.get("num_frames"),
        shift=config.get("initial_shift", True),
    ),
}
RATES = st.sampled_from([8.0, 10.0, 23.976, 25.0, 30000 / 1001, 60.0])


@pytest.mark.parametrize("family", RULES)
@settings(max_examples=50, deadline=None)
@given(
    st.integers(1, 5000),
    RATES,
    st.fixed_dictionaries(
        {},
        optional={
            "fps": st.sampled_from([0.1, 0.5, 1, 2, 3.7, 24]),
            "min_frames": st.integers(1, 6),
            "max_frames": st.integers(6, 900),
            "initial_shift": st.sampled_from([True, False, 0, 1, 2.5]),
        },
    ),
    st.none() | st.integers(1, 200),
)
def test_frames_are_those_of_each_family(
    family: str, total: int, rate: float, config: dict[str, Any], count: int | None
) -> None:
    """Whatever the checkpoint says of them; and ``num_frames`` that a call asks for."""
    theirs = video_processor_class(family)(do_sample_frames=True, **config)
    if count is None:
        asked = {"fps": config.get("fps", 2.0)}
        config = {"fps": 2.0} | config
    else:
        asked = {"num_frames": count}
        theirs.fps = None
    metadata = SimpleNamespace(total_num_frames=total, fps=rate)
    own = RULES[family](config).chosen(total, rate, num_frames=count)
    try:
        wanted = theirs.sample_frames(metadata, **asked).tolist()
    except (ValueError, ZeroDivisionError, RuntimeError):  # more frames than there are, or none
        assert 1 <= len(own) <= total
    else:
        if count is not None and count > total:  # each as often as it fits
            wanted = sorted(set(wanted))
        if family == "internvl" and len(wanted) > 768:  # its have no bound there
            assert len(own) == 768
            return
        # In float32 its steps may end behind the last frame, which then cannot be read.
        # A shift behind the end leaves none; one frame is read then.
        assert own == ([index for index in wanted if index < total] or [total - 1])


SAVES = {"qwen3_vl": save_qwen3_vl, "qwen2_5_vl": save_qwen2_5_vl, "internvl": save_internvl}


@pytest.mark.parametrize("family", SAVES)
@pytest.mark.parametrize("place", ["video_preprocessor_config.json", "processor_config.json"])
def test_the_checkpoint_says_which_frames(
    family: str, place: str, tmp_path: Path, clip_file: Path
) -> None:
    """24 frames in 3 s; each value by hand. The part of processor_config.json goes first."""
    folder = SAVES[family](tmp_path)
    bounds = {} if family == "internvl" else {"patch_size": 8, "temporal_patch_size": 2}

    def frames(**said: Any) -> tuple[int, ...]:
        file = folder / place
        stored = json.loads(file.read_text()) if file.exists() and place[0] == "p" else {}
        own = bounds | said
        file.write_text(json.dumps(stored | ({"video_processor": own} if stored else own)))
        if place[0] == "p":  # overridden
            (folder / "video_preprocessor_config.json").write_text(json.dumps(bounds | {"fps": 8}))
        return load_processor(folder).load_clip(clip_file).indices

    if family != "internvl" and place[0] == "p":
        (folder / place).write_text(json.dumps({"processor_class": "x"}))
    by_hand = {
        "qwen3_vl": ((0, 8, 15, 23), (0, 12, 23), (0, 23)),
        "qwen2_5_vl": ((0, 6, 12, 18), (0, 6, 12, 18), (0, 12)),
        "internvl": ((4, 12, 20), (4, 12, 20), (6, 18)),
    }[family]
    assert frames(fps=1) == by_hand[0]
    assert frames(fps=None, num_frames=3) == by_hand[1]
    if family == "internvl":
        assert frames(num_frames=2) == by_hand[2]
        assert frames(num_frames=2, initial_shift=False) == (0, 12)
    else:
        assert frames(fps=1, min_frames=2, max_frames=2) == by_hand[2]
    for wrong in ({"fps": 0}, {"num_frames": 0}, {"fps": "2"}, {"resample": 9}):
        with pytest.raises(ModelError, match=f"{next(iter(wrong))} is "):
            frames(**wrong)
    if family != "internvl":
        with pytest.raises(ModelError, match="exclude each other"):
            frames(fps=1, num_frames=2)
        with pytest.raises(ModelError, match="min_frames is 3"):
            frames(min_frames=3, max_frames=2)


def test_frames_that_are_not_to_be_sampled_are_all_read() -> None:
    """transformers writes ``do_sample_frames: false`` into every file of Qwen2.5-VL."""
    said = {"do_sample_frames": False}
    assert frame_rule(said, apart=True).chosen(24, 8.0) == list(range(24))
    assert frame_rule(said, apart=False).chosen(20, 8.0) == [0, 5, 10, 15]


def test_a_message_says_which_frames_and_sizes(tmp_path: Path, clip_file: Path) -> None:
    """24 frames in 3 s of 64 x 48 pixels; values of qwen-vl-utils 0.0.14 (patches of 8 pixels)."""
    for save in (save_qwen3_vl, save_qwen2_5_vl):
        processor = load_processor(save(tmp_path / save.__name__))
        for said, indices, size in (
            ({"fps": 0.5}, (0, 8, 15, 23), None),
            ({"fps": 1.7}, (0, 8, 15, 23), None),
            ({"nframes": 7}, (0, 3, 7, 10, 13, 16, 20, 23), None),
            ({"fps": 8.0, "max_frames": 5}, (0, 8, 15, 23), None),
            ({"fps": 0.1, "min_frames": 5}, (0, 5, 9, 14, 18, 23), None),
            ({"video_start": 1.0, "video_end": 2.0}, (8, 11, 13, 16), None),
            ({"fps": 2, "min_pixels": 2048, "max_pixels": 2048}, (0, 5, 9, 14, 18, 23), (32, 48)),
            ({"nframes": 2, "min_pixels": 256, "total_pixels": 999}, (0, 23), (16, 32)),
            ({"nframes": 2, "resized_height": 30, "resized_width": 50}, (0, 23), (32, 48)),
        ):
            clip = processor.load_clip(Sourced(str(clip_file), MediaSettings.of("video", said)))
            assert clip.indices == indices, said
            if size is not None:
                assert clip.frames.shape[1:3] == size and clip.sized, said
            made = processor.encode("<|video_pad|>", [], [clip])
            rows, columns = (edge * 8 for edge in made["video_grid_thw"][0, 1:].tolist())
            assert (rows, columns) == (clip.frames.shape[1:3]), said
        for said, size in (
            ({"max_pixels": 1024}, (32, 32)),
            ({"min_pixels": 5000}, (80, 80)),
            ({"resized_height": 70, "resized_width": 20}, (64, 16)),
        ):
            shown = processor.load_picture(Sourced(picture("red", (64, 64)), MediaSettings(**said)))
            assert shown.size == size[::-1], said
            grid = processor.encode("<|image_pad|>" * 2, [shown, picture()])["image_grid_thw"]
            assert [edge * 8 for edge in grid[0, 1:].tolist()] == list(size), said


BAD = [
    ("video", {"fpz": 1}, "'fpz' of the video is not understood"),
    ("image", {"fps": 1}, "'fps' of the image is not understood"),
    ("video", {"fps": 1, "nframes": 4}, "fps and nframes exclude each other"),
    ("video", {"fps": -1}, "fps is -1; it must be above 0"),
    ("video", {"nframes": 2.5}, "nframes is 2.5, not a whole number"),
    ("video", {"video_start": "1"}, "video_start is '1', not a number"),
    ("video", {"video_start": 3, "video_end": 1}, "video_start 3.0 is above video_end 1.0"),
    ("image", {"resized_height": 32}, "go together"),
    ("image", {"min_pixels": 9, "max_pixels": 3}, "min_pixels 9 is above max_pixels 3"),
    ("image", {"max_pixels": True}, "max_pixels is True, not a whole number"),
    ("video", {"nframes": 999}, "at most 768"),
]


@pytest.mark.parametrize(("kind", "said", "message"), BAD)
def test_settings_of_a_part_that_cannot_be_followed(
    kind: str, said: dict[str, Any], message: str, tmp_path: Path
) -> None:
    part = {"type": kind, kind: "a.mp4", "text": None, **said}
    with pytest.raises(InputError, match=message) as caught:
        take_media([{"role": "user", "content": [part]}])
    assert "\n" not in str(caught.value)


def test_settings_that_a_model_or_video_does_not_take(tmp_path: Path, clip_file: Path) -> None:
    qwen = load_processor(save_qwen3_vl(tmp_path / "qwen"))
    others = [
        load_processor(save(tmp_path / save.__name__)) for save in (save_llava, save_internvl)
    ]
    for processor in others:
        with pytest.raises(InputError, match=r"size of its own.*drop max_pixels"):
            processor.load_picture(Sourced(picture(), MediaSettings(max_pixels=1024)))
    with pytest.raises(InputError, match="a picture of 17 x 88 cannot be read; change"):
        MediaSettings(max_pixels=1300).picture_size(
            88, 17, 16
        )  # qwen-vl-utils scales it to nothing
    asked = Sourced(str(clip_file), MediaSettings(num_frames=2))
    assert others[1].load_clip(asked).indices == (6, 18)
    section = MediaSettings(video_start=1.0, num_frames=2)
    assert others[1].load_clip(Sourced(str(clip_file), section)).indices == (12, 20)
    for said, message in (
        ({"max_pixels": 100}, "at most 100 pixels are below at least 1024"),
        ({"nframes": 60}, "60 frames of 24"),
        ({"video_start": 2.9}, "no section of a video"),
        ({"sample_fps": 2}, "sample_fps is for frames that are given one by one"),
    ):
        kind = "video" if "max_pixels" not in said else "image"
        made = Sourced(clip_file if kind == "video" else picture(), MediaSettings(**said))
        with pytest.raises(InputError, match=message):
            (qwen.load_clip if kind == "video" else qwen.load_picture)(made)
    read = Clip(np.zeros((1, 32, 32, 3), np.uint8), (0,), 8.0)
    with pytest.raises(InputError, match="chosen already; drop fps"):
        qwen.load_clip(Sourced(read, MediaSettings(fps=1)))


def test_all_doors_follow_a_part(tmp_path: Path, clip_file: Path) -> None:
    """``Engine.inputs``, a session, a chat file: the same number of tokens."""
    engine = Engine.from_pretrained(save_qwen3_vl(tmp_path), dtype="float32", policy="full")
    file = tmp_path / "p.png"
    picture("red", (64, 64)).save(file)
    parts: list[dict[str, Any]] = [
        {"type": "image", "image": str(file), "max_pixels": 1024},
        {"type": "video", "video": str(clip_file), "nframes": 2, "resized_height": 48}
        | {"resized_width": 32},
        {"type": "text", "text": "what?"},
    ]
    talk = [{"role": "user", "content": parts}]
    ids = engine.inputs(talk)
    assert ids["image_grid_thw"].tolist() == [[1, 4, 4]]
    assert ids["video_grid_thw"].tolist() == [[1, 6, 4]]
    nested = [
        {"type": "image_url", "image_url": {"url": str(file), "max_pixels": 1024, "detail": "low"}},
        {"type": "video_url", "video_url": {"url": str(clip_file), **parts[1], "video": None}},
        parts[2],
    ]
    del nested[1]["video_url"]["type"]
    assert torch.equal(
        engine.inputs([{"role": "user", "content": nested}])["input_ids"], ids["input_ids"]
    )
    with engine.session() as session:
        list(session.send(parts, sampling=None))
        assert session.last is not None
        assert session.last.prompt_tokens == ids["input_ids"].shape[1]
    row = {"messages": [*talk, {"role": "assistant", "content": "a"}]}
    made = read_row(row, "chat", tmp_path, "a.jsonl", 1).messages  # type: ignore[union-attr]
    kept = take_media(made)
    assert kept[1][0].settings.given() == {"max_pixels": 1024}
    sized = {"nframes": 2, "resized_height": 48, "resized_width": 32}
    assert kept[2][0].settings.given() == sized


def test_a_video_of_frames(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    array = rng.integers(0, 256, (5, 32, 48, 3), dtype=np.uint8)
    pictures = [Image.fromarray(frame) for frame in array]
    files = [tmp_path / f"{number}.png" for number in range(5)]
    for file, frame in zip(files, pictures, strict=True):
        frame.save(file)
    forms: list[Any] = [
        pictures,
        tuple(pictures),
        [str(file) for file in files],
        files,
        list(array),
        array,
        array.astype(np.int64),
        array.astype(np.float32) / 255,
        np.maximum(array - 0.4, 0),
        array.transpose(0, 3, 1, 2),
        torch.from_numpy(array),
        (torch.from_numpy(array) / 255).requires_grad_(),
    ]
    for form in forms:
        clip = load_video(form)
        assert np.array_equal(clip.frames, array) and clip.timestamps == [0, 0.5, 1, 1.5, 2]
    assert np.array_equal(load_video(array[:, :3]).frames, array[:, :3])  # rows, no colours
    clip = load_video(array, settings=MediaSettings(fps=4.0))
    assert (clip.fps, clip.sampled_fps) == (4.0, 4.0)
    clip = load_video(array, settings=MediaSettings(sample_fps=2.0, raw_fps=10.0))
    assert (clip.fps, clip.sampled_fps) == (10.0, 2.0)
    grey = load_video(array[..., :1])
    assert np.array_equal(grey.frames, np.repeat(array[..., :1], 3, axis=-1))
    clear = np.concatenate([array, np.zeros_like(array[..., :1])], axis=-1)
    assert (load_video(clear).frames == 255).all()
    for wrong, message in (
        ([], "no frames"),
        ([pictures[0], picture("red", (9, 9))], "differ in size"),
        (array[0, 0], "shape"),
        (array[..., :2], "colours"),
        (array.astype(np.float32) * 2, "levels of 0 to 510"),
        (array.astype(np.float32) * np.nan, "not levels"),
        ([picture()] * 769, "at most 768"),
    ):
        with pytest.raises(InputError, match=message):
            load_video(wrong)
    for said in ({"nframes": 2}, {"max_frames": 3}, {"video_start": 1.0}):
        with pytest.raises(InputError, match=f"{next(iter(said))} cannot be followed"):
            load_video(array, settings=MediaSettings(**said))
    with pytest.raises(InputError, match="num_frames cannot be followed"):
        load_video(array, num_frames=3)
    with pytest.raises(TypeError, match="a video is a path"):
        load_video(3)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 300), st.integers(1, 3000), st.integers(1, 384))
def test_even_numbers_are_those_of_torch(first: int, span: int, half: int) -> None:
    count = min(2 * half, span + 1)
    wanted = torch.linspace(first, first + span, count).round().long().tolist()
    assert evenly(first, first + span, count) == wanted


ELEMENTS = st.fixed_dictionaries(
    {},
    optional={
        "fps": st.sampled_from([0.25, 0.5, 1.0, 1.7, 4.0]),
        "min_frames": st.integers(1, 8),
        "max_frames": st.integers(8, 60),
        "video_start": st.floats(0, 2, width=16),
        "video_end": st.floats(2, 9, width=16),
        "min_pixels": st.integers(1, 60_000),
        "max_pixels": st.integers(60_000, 900_000),
        "total_pixels": st.integers(10_000, 9_000_000),
    },
)


@given(ELEMENTS, st.integers(2, 400), RATES, st.integers(20, 900), st.integers(20, 900))
@settings(max_examples=200, deadline=None)
def test_numbers_are_those_of_qwen_vl_utils(
    said: dict[str, Any], total: int, rate: float, height: int, width: int
) -> None:
    library = pytest.importorskip(
        "qwen_vl_utils.vision_process", reason="qwen-vl-utils wants torchvision", exc_type=Exception
    )
    own = MediaSettings(**said)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(part_settings, "_library", lambda: None)
        try:
            first, last, count = library.calculate_video_frame_range(said, total, rate)
            frames = library.smart_nframes(said, count, rate)
        except (ValueError, AssertionError):
            with pytest.raises(InputError):
                first, last = own.frame_span(total, rate)
                own.frame_count(last - first + 1, rate, 2.0, 4, 768)
            return
        assert own.frame_span(total, rate) == (first, last)
        assert own.frame_count(count, rate, 2.0, 4, 768) == frames
        clip = torch.zeros(frames, 3, height, width, dtype=torch.uint8)
        with pytest.MonkeyPatch.context() as reading:
            reading.setitem(
                library.VIDEO_READER_BACKENDS, "torchvision", lambda ele: (clip, {}, 1.0)
            )
            reading.setattr(library, "get_video_reader_backend", lambda: "torchvision")
            try:
                made = library.fetch_video({"video": "x", **said}, image_patch_size=14)
            except (ValueError, AssertionError, RuntimeError):  # the last of an edge of 0
                with pytest.raises(InputError):
                    own.frame_size(frames, height, width, 28)
            else:
                assert own.frame_size(frames, height, width, 28) == tuple(made.shape[-2:])
        bounds = {k: v for k, v in said.items() if k in ("min_pixels", "max_pixels")}
        try:
            shown = library.fetch_image({"image": Image.new("RGB", (width, height)), **bounds})
        except (ValueError, AssertionError):
            with pytest.raises(InputError):
                MediaSettings(**bounds).picture_size(height, width, 28)
        else:
            assert MediaSettings(**bounds).picture_size(height, width, 28) == shown.size[::-1]


def test_qwen_vl_utils_is_asked_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def smart_nframes(element: dict[str, Any], total: int, rate: float) -> int:
        asked.append(element)
        return 6

    library = SimpleNamespace(smart_nframes=smart_nframes)
    monkeypatch.setattr(part_settings, "_library", lambda: library)
    assert MediaSettings(fps=1.0).frame_count(24, 8.0, 2.0, 4, 768) == 6
    assert asked == [{"fps": 1.0, "min_frames": 4, "max_frames": 24}]
    monkeypatch.delitem(sys.modules, "torch")  # as in a process that decodes
    assert MediaSettings(fps=1.0).frame_count(24, 8.0, 2.0, 4, 768) == 4


@pytest.mark.parametrize(("rate", "wanted"), [(12.5, 12.5), (None, 24.0)])
def test_torchcodec_tells_the_rate_of_frames(rate: float | None, wanted: float) -> None:
    told = SimpleNamespace(metadata=SimpleNamespace(num_frames=5, average_fps=rate))
    module = SimpleNamespace(decoders=SimpleNamespace(VideoDecoder=lambda path, **_: told))
    reader = video._TorchCodec(module, "x.mp4")
    assert (reader.count, reader.fps, reader.times) == (5, wanted, None)
