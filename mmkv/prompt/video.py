"""Read frames of a video with the reader that is installed.

decord, PyAV and torchcodec are tried in this order, imported only when a video is read. Each is
an optional package; any of them may also be installed but broken (a torch extension built for
another torch raises RuntimeError or OSError on import), which counts as absent.
"""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from engine.errors import STOPS, InputError, first_line
from mmkv.prompt.media import describe, local_file

# What Qwen3-VL's own video processor samples by default.
DEFAULT_FPS = 2.0
MIN_FRAMES, MAX_FRAMES = 4, 768
_ASSUMED_FPS = 24.0
# One reader is enough, and PyAV's wheels hold all that it needs, for every Python and machine.
REMEDY = "run pip install av"

FrameMap = Callable[[np.ndarray], np.ndarray]
SizeRule = Callable[[int, int, int], FrameMap]


@dataclass(frozen=True)
class Clip:
    """Sampled frames of one video.

    ``frames`` uint8 [F, height, width, 3]; ``indices``: their numbers in the source;
    ``fps``: frame rate of the source (not of the sampling), so index / fps is the time in seconds;
    ``total``: the source's frames, None where the last one is among those sampled.
    """

    frames: np.ndarray
    indices: tuple[int, ...]
    fps: float
    total: int | None = None

    @property
    def sampled_fps(self) -> float:
        """Return the frames sampled per second of the source, as transformers counts them."""
        return len(self.indices) / (self.total or self.indices[-1] + 1) * self.fps

    @property
    def timestamps(self) -> list[float]:
        """Return seconds from the start of the video, one per frame."""
        return [index / self.fps for index in self.indices]


class Reader(Protocol):
    """An opened video."""

    count: int
    fps: float

    def read(self, indices: Sequence[int], keep: FrameMap) -> list[np.ndarray]:
        """Read frames [height, width, 3] uint8 at ascending ``indices``, each passed through
        keep.
        """
        ...


def load_video(
    source: str | Path | Clip,
    fps: float | None = None,
    num_frames: int | None = None,
    size_rule: SizeRule | None = None,
) -> Clip:
    """Sample a video file or URL evenly: at ``fps`` (default 2), or ``num_frames`` in all.

    ``size_rule(frames, height, width)`` returns what to do with each frame as it is decoded
    (scaling it down), so that a long video is never held in full size. A Clip passes through.
    Raises InputError: no reader installed, unreadable file, contradictory sampling options.
    """
    if isinstance(source, Clip):
        return source
    check_sampling(fps, num_frames)
    with local_file(source) as path:
        if path.stat().st_size == 0:
            raise InputError(f"{describe(source)} is empty; give a video file")
        return _sample(path, describe(source), fps, num_frames, size_rule)


def check_sampling(fps: float | None, num_frames: int | None) -> None:
    """Raise InputError for options that cannot be followed."""
    if fps is not None and num_frames is not None:
        raise InputError("fps and num_frames exclude each other; give one of them")
    if fps is not None and not 0 < fps <= 1000:
        raise InputError(f"fps is {fps}; it must be above 0 and at most 1000")
    if num_frames is not None and not 1 <= num_frames <= MAX_FRAMES:
        raise InputError(f"num_frames is {num_frames}; it must be 1 to {MAX_FRAMES}")


def sample_indices(
    total: int, source_fps: float, fps: float | None = None, num_frames: int | None = None
) -> list[int]:
    """Choose evenly spread frame numbers, first and last included (Qwen3-VL's rule)."""
    if num_frames is None:
        wanted = int(total / source_fps * (DEFAULT_FPS if fps is None else fps))
        num_frames = min(max(wanted, MIN_FRAMES), MAX_FRAMES)
    spread = np.linspace(0, total - 1, min(num_frames, total)).round().astype(int)
    return [int(index) for index in spread]


def _sample(
    path: Path, name: str, fps: float | None, num_frames: int | None, size_rule: SizeRule | None
) -> Clip:
    failures: list[str] = []
    for package, opener in _READERS.items():
        module = import_reader(package)
        if module is None:
            continue
        try:
            reader = opener(module, str(path))
            indices = sample_indices(reader.count, reader.fps, fps, num_frames)
            return read_clip(reader, indices, size_rule)
        except STOPS:
            raise
        # Readers raise types of their own (DECORDError, av.error.*, RuntimeError, ...), and
        # another reader may know the format: try the next, and report all errors when none does.
        except BaseException as error:
            failures.append(f"{package}: {first_line(error)}")
    if not failures:
        raise InputError(f"no video reader works here; {REMEDY}")
    raise InputError(f"cannot read the video {name} ({'; '.join(failures)}); convert it to H.264")


def read_clip(reader: Reader, indices: Sequence[int], size_rule: SizeRule | None) -> Clip:
    """Read frames at ascending ``indices``, each scaled as it is decoded; see load_video."""
    frames = reader.read(indices, _Scaler(len(indices), size_rule))
    return Clip(np.stack(frames), tuple(indices[: len(frames)]), reader.fps, reader.count)


class _Scaler:
    """Applies the size rule, which needs the first frame's shape, to every frame."""

    def __init__(self, frames: int, rule: SizeRule | None) -> None:
        self._frames, self._rule = frames, rule
        self._map: FrameMap | None = None

    def __call__(self, frame: np.ndarray) -> np.ndarray:
        if self._rule is None:
            return frame
        if self._map is None:
            self._map = self._rule(self._frames, frame.shape[0], frame.shape[1])
        return self._map(frame)


def import_reader(package: str) -> Any | None:
    """Import a reader package; None when it is absent or broken."""
    try:
        module = importlib.import_module(package)
        if package == "torchcodec":
            importlib.import_module("torchcodec.decoders")
    except (ImportError, RuntimeError, OSError, AttributeError):
        return None
    return module


class _Decord:
    def __init__(self, module: Any, path: str) -> None:
        self._video = module.VideoReader(path, num_threads=1)
        self.count = len(self._video)
        self.fps = float(self._video.get_avg_fps()) or _ASSUMED_FPS

    def read(self, indices: Sequence[int], keep: FrameMap) -> list[np.ndarray]:
        return [keep(self._video[index].asnumpy()) for index in indices]


class PyAVReader:
    """A video opened by PyAV.

    ``source``: a path, or the content. ``container``: FFmpeg's name of its format; None: as the
    content looks. ``size``: width and height of a frame.
    """

    def __init__(self, module: Any, source: str | bytes, container: str | None = None) -> None:
        self._module, self._source, self._format = module, source, container
        with self._open() as opened:
            if not opened.streams.video:
                raise ValueError("the file has no video stream")
            stream = opened.streams.video[0]
            self.size = (int(stream.width), int(stream.height))
            self.fps = float(stream.average_rate or stream.guessed_rate or _ASSUMED_FPS)
            # Some containers do not store the number of frames: count the packets instead,
            # which reads the file but decodes nothing.
            self.count = stream.frames or sum(
                1 for packet in opened.demux(stream) if packet.dts is not None
            )
        if self.count < 1:
            raise ValueError("the video has no frames")

    def read(self, indices: Sequence[int], keep: FrameMap) -> list[np.ndarray]:
        """See :class:`Reader`."""
        wanted, kept, last = set(indices), {}, None
        with self._open() as opened:
            stream = opened.streams.video[0]
            stream.thread_type = "AUTO"
            for number, frame in enumerate(opened.decode(stream)):
                last = frame
                if number in wanted:
                    kept[number] = keep(frame.to_ndarray(format="rgb24"))
                if number >= indices[-1]:
                    break
        if last is None:
            raise ValueError("no frame could be decoded")
        # A container can announce more frames than it holds: the last one replaces the missing
        # ones.
        end = keep(last.to_ndarray(format="rgb24"))
        return [kept.get(index, end) for index in indices]

    def _open(self) -> Any:
        source = self._source
        file = io.BytesIO(source) if isinstance(source, bytes) else source
        return self._module.open(file, format=self._format)


class _TorchCodec:
    def __init__(self, module: Any, path: str) -> None:
        self._video = module.decoders.VideoDecoder(path, dimension_order="NHWC")
        self.count = int(self._video.metadata.num_frames)
        self.fps = float(self._video.metadata.average_fps or _ASSUMED_FPS)

    def read(self, indices: Sequence[int], keep: FrameMap) -> list[np.ndarray]:
        return [keep(self._video.get_frame_at(index).data.numpy()) for index in indices]


_READERS: dict[str, Callable[[Any, str], Reader]] = {
    "decord": _Decord,
    "av": PyAVReader,
    "torchcodec": _TorchCodec,
}
READERS = tuple(_READERS)
