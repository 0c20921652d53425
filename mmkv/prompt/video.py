"""Read frames of a video with the reader that is installed.

decord, PyAV and torchcodec are tried in this order, imported only when a video is read. Each is
an optional package; any of them may also be installed but broken (a torch extension built for
another torch raises RuntimeError or OSError on import), which counts as absent.
"""

from __future__ import annotations

import base64
import importlib
import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from mmkv.engine.errors import STOPS, InputError, first_line, require_real, require_whole
from mmkv.prompt.media import describe, load_image, local_file, other, other_kind
from mmkv.prompt.part_settings import (
    LOOSE_FPS,
    MAX_FRAMES,
    MediaSettings,
    evenly,
)

if TYPE_CHECKING:
    from PIL.Image import Image

DEFAULT_FPS = 2.0
MIN_FRAMES = 4
_ASSUMED_FPS = 24.0
# One reader is enough, and PyAV's wheels hold all that it needs, for every Python and machine.
REMEDY = "run pip install av"
# Containers whose header tells how long they are, also where the end is missing.
_TIMED = ("mp4", "matroska", "avi")
_MISSING_S = 0.25  # less is not worth a word
_EARLY = 1 / 1024  # seconds; times in containers are rounded

FrameMap = Callable[[np.ndarray], np.ndarray]
SizeRule = Callable[[int, int, int], FrameMap]


@dataclass(frozen=True)
class Clip:
    """Sampled frames of one video.

    ``frames`` uint8 [F, height, width, 3]; ``indices``: their numbers in the source;
    ``fps``: frame rate of the source (not of the sampling), so index / fps is the time in seconds;
    ``total``: the source's frames, None where the last one is among those sampled;
    ``times``: seconds of the frames, where the source has no steady rate;
    ``note``: for the user, where a part of the source could not be read;
    ``sized``: they have their size already, by the model's rule or a message's. (The rule again
    may give another one.)
    """

    frames: np.ndarray
    indices: tuple[int, ...]
    fps: float
    total: float | None = None
    times: tuple[float, ...] | None = None
    note: str | None = None
    sized: bool = False

    @property
    def sampled_fps(self) -> float:
        """Return the frames sampled per second of the source, as transformers counts them."""
        return len(self.indices) / (self.total or self.indices[-1] + 1) * self.fps

    @property
    def timestamps(self) -> list[float]:
        """Return seconds from the start of the video, one per frame."""
        if self.times is not None:
            return list(self.times)
        return [index / self.fps for index in self.indices]


@dataclass(frozen=True)
class FrameRule:
    """Which frames of a video a model is shown, as transformers' video processor has it.

    Attributes:
        way: ``spread`` from the first frame to the last (Qwen3-VL), the first of each of equal
            sections (``strided``, Qwen2.5-VL), or the one in its middle (``centred``, InternVL);
            ``trimmed`` (SmolVLM2): spread, without the first and last second of a long video.
        fps: frames a second, where ``num_frames`` is None; None: every frame.
        min_frames, max_frames: bounds on them. Not for ``centred``, which has at least one.
        step: frames of a temporal patch; a ``strided`` count is a multiple of it.
        shift: where in its section a ``centred`` frame lies, in frames; True: in the middle.
    """

    way: Literal["spread", "strided", "centred", "trimmed"] = "spread"
    fps: float | None = DEFAULT_FPS
    num_frames: int | None = None
    min_frames: int = MIN_FRAMES
    max_frames: int = MAX_FRAMES
    step: int = 2
    shift: float | bool = True

    def chosen(
        self,
        total: int,
        rate: float,
        fps: float | None = None,
        num_frames: int | None = None,
        settings: MediaSettings | None = None,
    ) -> list[int]:
        """Choose frame numbers of a video of ``total`` frames at ``rate`` a second.

        Args:
            fps, num_frames: asked for instead of what the checkpoint says.
            settings: of the message's part; they go before both. For Qwen-VL models they are
                followed as qwen-vl-utils does: an even number, the first and last frame included.

        Raises:
            InputError: the settings ask for frames that the video does not have.
        """
        own = settings or MediaSettings()
        if own.fps or own.nframes or own.num_frames:
            fps, num_frames = own.fps, own.num_frames
        first, last = own.frame_span(total, rate)
        count = last - first + 1
        qwens = self.way in ("spread", "strided")
        as_qwen = own.samples and qwens and num_frames is None
        if as_qwen and count > 1:
            default = fps or self.fps or DEFAULT_FPS
            return evenly(
                first, last, own.frame_count(count, rate, default, self.min_frames, self.max_frames)
            )
        rule = replace(
            self,
            min_frames=own.min_frames or self.min_frames,
            max_frames=own.max_frames or self.max_frames,
        )
        wanted = num_frames or own.nframes
        return [first + index for index in rule._of_all(count, rate, fps, wanted)]

    def _of_all(
        self, total: int, rate: float, fps: float | None, num_frames: int | None
    ) -> list[int]:
        if num_frames is None and fps is None:
            fps, num_frames = self.fps, self.num_frames
        if num_frames is not None:
            fps = None
        if self.way == "trimmed":
            return self._trimmed(total, rate, fps or self.fps or 1, num_frames)
        wanted = total / rate * fps if fps is not None else num_frames or total
        if self.way == "spread":
            wanted = int(wanted)
            if num_frames is None:
                wanted = min(max(wanted, self.min_frames), self.max_frames)
            spread = np.linspace(0, total - 1, min(wanted, total)).round().astype(int)
            return [int(index) for index in spread]
        if self.way == "strided":
            return self._strided(total, self._pairs(total, wanted, num_frames), 0.0)
        count = max(1, min(int(wanted), total, MAX_FRAMES))
        shift = total / count / 2 if self.shift is True else float(self.shift)
        return self._strided(total, count, shift)

    def _trimmed(self, total: int, rate: float, fps: float, asked: int | None) -> list[int]:
        most = asked or self.max_frames
        count = asked or max(1, min(round(fps * total / rate), most))
        first, last = 0, total - 1
        if total / rate - 2 > most * fps:
            first, last = int(rate), min(int(total - rate), last)
        if first >= last:
            first, last = 0, total - 1
        return sorted({int(index) for index in np.linspace(first, last, count, dtype=int)})

    def _pairs(self, total: int, wanted: float, num_frames: int | None) -> int:
        if num_frames is not None:
            count = round(wanted / self.step) * self.step
        else:
            most = min(self.max_frames, total) // self.step * self.step
            bounded = min(max(wanted, self.min_frames), most, total)
            count = int(bounded // self.step * self.step)
        # transformers refuses a video of one frame, and more frames than there are.
        return max(1, min(count, total))

    @staticmethod
    def _strided(total: int, count: int, start: float) -> list[int]:
        steps = (start + np.arange(count) * (total / count)).astype(np.float32)
        return [int(index) for index in steps if index < total] or [total - 1]


class FrameReader(Protocol):
    """An opened video.

    ``times``: seconds of its frames, where it knows them; ``note``: see :class:`Clip`.
    """

    count: int
    fps: float
    times: Sequence[float] | None
    note: str | None

    def read(self, indices: Sequence[int], keep: FrameMap) -> list[np.ndarray]:
        """Read frames [height, width, 3] uint8 at ascending ``indices``, each passed through
        keep. Fewer where the file ends before; ``count`` and ``note`` then say so.
        """
        ...


def load_video(
    source: Any,
    fps: float | None = None,
    num_frames: int | None = None,
    size_rule: SizeRule | None = None,
    rule: FrameRule | None = None,
    settings: MediaSettings | None = None,
) -> Clip:
    """Sample a video file or URL as ``rule`` says: at ``fps``, or ``num_frames`` in all.

    ``source``: a path or URL; or the frames: a list of pictures, paths and URLs, or an array
    [T, H, W, C] or [T, C, H, W], uint8 or 0 to 1. Their rate is that of ``settings``, or ``fps``,
    or 2. A Clip passes through.
    ``size_rule(frames, height, width)`` returns what to do with each frame as it is decoded
    (scaling it down), so that a long video is never held in full size.
    Raises InputError: no reader installed, unreadable file, contradictory sampling options.
    """
    own = settings or MediaSettings()
    if isinstance(source, Clip):
        for name in own.given():
            raise InputError(f"the frames of this video are chosen already; drop {name}")
        return source
    check_sampling(fps, num_frames)
    if not isinstance(source, (str, Path)):
        if num_frames is not None and not own.given():
            own = MediaSettings(num_frames=num_frames)
        return _clip_of_frames(source, own, fps, size_rule)
    own.refuse_rates()

    def choose(total: int, rate: float) -> list[int]:
        return (rule or FrameRule()).chosen(total, rate, fps, num_frames, own)

    with local_file(source) as path:
        if path.stat().st_size == 0:
            raise InputError(f"{describe(source)} is empty; give a video file")
        return _sample(path, describe(source), choose, size_rule)


def check_sampling(fps: float | None, num_frames: int | None) -> None:
    """Raise InputError for options that cannot be followed, TypeError for those of other types."""
    if fps is not None:
        require_real("fps", fps)
    if num_frames is not None:
        require_whole("num_frames", num_frames)
    if fps is not None and num_frames is not None:
        raise InputError("fps and num_frames exclude each other; give one of them")
    if fps is not None and not 0 < fps <= 1000:
        raise InputError(f"fps is {fps}; it must be above 0 and at most 1000")
    if num_frames is not None and not 1 <= num_frames <= MAX_FRAMES:
        raise InputError(f"num_frames is {num_frames}; it must be 1 to {MAX_FRAMES}")


def _clip_of_frames(
    source: Any, own: MediaSettings, fps: float | None, size_rule: SizeRule | None
) -> Clip:
    """Make a clip of frames that are given one by one."""
    own.refuse_sampling()
    frames = _arrays(source)
    if not frames:
        raise InputError("the video has no frames; give at least one")
    if len(frames) > MAX_FRAMES:
        raise InputError(
            f"the video has {len(frames)} frames; at most {MAX_FRAMES} are read: leave some out"
        )
    if len({frame.shape for frame in frames}) > 1:
        raise InputError("the frames of a video differ in size; scale them to one size")
    keep = _Scaler(len(frames), size_rule)
    rate = own.sample_fps or own.fps or fps or LOOSE_FPS
    made = np.stack([keep(frame) for frame in frames])
    numbers = tuple(range(len(frames)))
    raw = own.raw_fps or rate
    return Clip(made, numbers, raw, len(frames) / rate * raw, sized=size_rule is not None)


SMALL = 32  # edge of the copies by which frames are compared


@dataclass(frozen=True)
class FramesSeen:
    """What a session remembers of the frames that it was shown one after the other.

    Attributes:
        kept, skipped: how many were read, and were not since they were like the one before.
        last: grey levels of a small copy of the last one that was kept; empty before the first.
    """

    kept: int = 0
    skipped: int = 0
    last: bytes = b""

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        last = base64.b64encode(self.last).decode()
        return {"kept": self.kept, "skipped": self.skipped, "last": last}

    def chosen(
        self, frames: Sequence[Image], threshold: float | None
    ) -> tuple[list[int], FramesSeen]:
        """Return which frames differ from the last one kept, and what is remembered then.

        Args:
            threshold: mean difference of grey levels (0 to 255) up to which a frame is the same;
                None: all are kept.
        """
        last, kept = self.last, []
        for number, frame in enumerate(frames):
            grey = _small(frame)
            if last and threshold is not None:
                one, other = (np.frombuffer(part, np.uint8).astype(float) for part in (last, grey))
                if float(np.abs(one - other).mean()) <= threshold:
                    continue
            kept.append(number)
            last = grey
        skipped = self.skipped + len(frames) - len(kept)
        return kept, FramesSeen(self.kept + len(kept), skipped, last)


def _small(frame: Image) -> bytes:
    from PIL import Image as pil

    return frame.convert("L").resize((SMALL, SMALL), pil.Resampling.BOX).tobytes()


def load_frames(source: Any) -> list[Image]:
    """Load a frame, or a list or array [T, H, W, C] of them, as RGB pictures.

    ``source``: as :func:`load_video` takes frames; or one of them, also an array [H, W, C].
    Raises InputError, TypeError.
    """
    from PIL import Image as pil

    if isinstance(source, (list, tuple)):
        return [picture for one in source for picture in load_frames(one)]
    if hasattr(source, "shape") and hasattr(source, "dtype"):
        return [
            pil.fromarray(frame) for frame in _arrays(source[None] if source.ndim == 3 else source)
        ]
    return [load_image(source)]


def _arrays(source: Any) -> list[np.ndarray]:
    """Return frames uint8 [height, width, 3]. Raises InputError, TypeError."""
    if isinstance(source, (list, tuple)):
        return [
            _rgb(np.asarray(frame)[None])[0]
            if hasattr(frame, "__array_interface__") and not hasattr(frame, "convert")
            else np.asarray(load_image(frame))
            for frame in source
        ]
    if not (hasattr(source, "shape") and hasattr(source, "dtype")):
        raise TypeError(
            "a video is a path, a URL, a list of frames or an array [T, H, W, C], not a "
            f"{type(source).__name__}"
        )
    if hasattr(source, "detach"):  # a tensor
        source = source.detach().cpu().numpy()
    return list(_rgb(np.asarray(source)))


def _rgb(array: np.ndarray) -> np.ndarray:
    """Return frames uint8 [T, height, width, 3] of an array of levels."""
    if array.ndim != 4 or 0 in array.shape:
        raise InputError(
            f"an array of frames has shape {list(array.shape)}; give [T, H, W, C] with colours"
        )
    if array.shape[-1] not in (1, 3, 4) and array.shape[1] in (1, 3, 4):
        array = array.transpose(0, 2, 3, 1)
    if array.shape[-1] not in (1, 3, 4):
        raise InputError(f"frames of {array.shape[-1]} colours are not understood; give RGB")
    if array.shape[-1] == 4:
        from PIL import Image as pil

        made = [np.asarray(load_image(pil.fromarray(_levels(frame)))) for frame in array]
        return np.stack(made)
    return np.ascontiguousarray(np.broadcast_to(_levels(array), (*array.shape[:-1], 3)))


def _levels(array: np.ndarray) -> np.ndarray:
    """Return levels as uint8: those of a float array that is nowhere above 1 count to 1."""
    if array.dtype == np.uint8:
        return array
    if not np.issubdtype(array.dtype, np.number) or not np.isfinite(array).all():
        raise InputError("the frames of a video are not levels of 0 to 255; give an uint8 array")
    if array.min() < 0 or array.max() > 255:
        raise InputError(
            f"the frames of a video have levels of {array.min():g} to {array.max():g}; give 0 to "
            "255, or 0 to 1"
        )
    if np.issubdtype(array.dtype, np.floating) and array.max() <= 1:
        array = array * 255
    return array.round().astype(np.uint8)


def _sample(
    path: Path, name: str, choose: Callable[[int, float], list[int]], size_rule: SizeRule | None
) -> Clip:
    failure: BaseException | None = None
    for package, opener in _READERS.items():
        module = import_reader(package)
        if module is None:
            continue
        try:
            return read_clip(opener(module, str(path)), choose, size_rule, name)
        except Missing as error:
            failure = error
        except (InputError, *STOPS):  # the first: of what was asked for
            raise
        # Readers raise types of their own (DECORDError, av.error.*, RuntimeError, ...), and
        # another reader may know the format: try the next, and report the last error.
        except BaseException as error:
            failure = error
    if failure is None:
        raise InputError(f"no video reader works here; {REMEDY}")
    with path.open("rb") as file:
        raise unreadable(name, file.read(1024), failure) from failure


def unreadable(name: str, content: bytes, error: BaseException) -> InputError:
    """Return what is said of a video that no reader could read.

    Args:
        content: its first bytes; error: the reader's.
    """
    told = other(content, "a video")
    if told is not None or isinstance(error, Missing):
        return InputError(f"{name} {told or error}")
    reason = first_line(error)
    if isinstance(error, OSError | ValueError):  # without FFmpeg's number, and the name again
        reason = getattr(error, "strerror", None) or reason
    if other_kind(content) == "video":
        return InputError(f"{name} is damaged, or its end is missing ({reason}); get another copy")
    told = f"is no video that can be read here ({reason}); give an MP4, WebM, Matroska or AVI"
    return InputError(f"{name} {told}")


def read_clip(
    reader: FrameReader,
    choose: Callable[[int, float], list[int]],
    size_rule: SizeRule | None,
    name: str = "the video",
) -> Clip:
    """Read the frames that ``choose(total, fps)`` picks, each scaled as it is decoded.

    Where they come at no steady rate, it picks from as many that would, over the same time, and
    the frame on the screen then is read.
    """
    while True:
        total = reader.count
        rate, times = _timing(reader)
        slots = choose(total, rate)
        indices = slots if times is None else _shown_at(times, [slot / rate for slot in slots])
        frames = reader.read(indices, _Scaler(len(indices), size_rule))
        if len(frames) == len(indices):
            break
        if not 0 < reader.count < total:
            raise ValueError("no frame could be decoded")
    found = None if times is None else tuple(float(times[index]) for index in indices)
    note = None if reader.note is None else f"{name} {reader.note}"
    sized = size_rule is not None
    return Clip(np.stack(frames), tuple(indices), rate, total, found, note, sized)


def _timing(reader: FrameReader) -> tuple[float, np.ndarray | None]:
    """Return the frame rate, and the frames' times from the first one's where it is not steady.

    Steady is a rate from which no frame is half a frame away.
    """
    if reader.times is None or reader.count < 3:
        return reader.fps, None
    times = np.sort(np.asarray(reader.times[: reader.count], dtype=np.float64))
    times -= times[0]
    if not np.isfinite(times).all() or times[-1] <= 0:
        return reader.fps, None
    mean = (len(times) - 1) / float(times[-1])
    for rate in (reader.fps, mean):
        if np.abs(times * rate - np.arange(len(times))).max() <= 0.5:
            return rate, None
    return mean, times


def _shown_at(times: np.ndarray, seconds: list[float]) -> list[int]:
    """Return the numbers of the frames on the screen at ``seconds``."""
    return [int(i) for i in np.searchsorted(times, np.array(seconds) + _EARLY, side="right") - 1]


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
    note: str | None = None

    def __init__(self, module: Any, path: str) -> None:
        self._video = module.VideoReader(path, num_threads=1)
        self.count = len(self._video)
        self.fps = float(self._video.get_avg_fps()) or _ASSUMED_FPS
        self.times: Sequence[float] | None = None
        if self.count:
            self.times = self._video.get_frame_timestamp(range(self.count))[:, 0].tolist()

    def read(self, indices: Sequence[int], keep: FrameMap) -> list[np.ndarray]:
        return [keep(self._rgb(self._video[index].asnumpy())) for index in indices]

    @staticmethod
    def _rgb(frame: np.ndarray) -> np.ndarray:
        """Return a frame, turned as the file says, without padding.

        Of small frames that it turns, decord 0.6 takes the padding of a row for a fourth colour.
        """
        height, width, colours = frame.shape
        rows = frame.reshape(height, width * colours)[:, : width * 3]
        return np.ascontiguousarray(rows).reshape(height, width, 3)


class Missing(InputError):
    """What a file lacks of a video: the sentence's end, behind the file's name."""


class PyAVReader:
    """A video opened by PyAV.

    ``source``: a path, or the content. ``container``: FFmpeg's name of its format; None: as the
    content looks. ``size``: width and height of a frame as it is stored (it may have to be turned).
    """

    def __init__(self, module: Any, source: str | bytes, container: str | None = None) -> None:
        self._module, self._source, self._format = module, source, container
        self.note: str | None = None
        self.times: Sequence[float] | None = None
        with self._open() as opened:
            if not opened.streams.video:
                held = "sound and no video" if opened.streams.audio else "no video"
                raise Missing(f"holds {held}; give a file with one")
            stream = opened.streams.video[0]
            if stream.codec_context is None:
                raise Missing("is in a codec that FFmpeg does not know; convert it to H.264")
            self.size = (int(stream.width), int(stream.height))
            # FFmpeg means nothing by the average of a raw stream.
            rates = (stream.average_rate, stream.guessed_rate)
            raw = stream.duration is None and opened.duration is None and stream.start_time is None
            self.fps = float(next(filter(None, rates[::-1] if raw else rates), _ASSUMED_FPS))
            self._announced = self._length(opened)
            self._count_packets(opened, stream)
        if self.count < 1:
            raise Missing("has no frames; get another copy")

    def read(self, indices: Sequence[int], keep: FrameMap) -> list[np.ndarray]:
        wanted, kept, decoded = set(indices), {}, 0
        with self._open() as opened:
            for number, frame in enumerate(self._frames(opened)):
                decoded = number + 1
                if number in wanted:
                    kept[number] = keep(_upright(frame))
                if number >= indices[-1]:
                    break
        if decoded <= indices[-1]:  # fewer than there are packets: some cannot be decoded
            self.count = decoded
            if self.times is not None:
                self.times = self.times[:decoded]
            self.note = self.note or (f"could be read in part: {decoded} frames; get another copy")
        return [kept[index] for index in indices if index in kept]

    def _frames(self, opened: Any) -> Iterator[Any]:
        stream = opened.streams.video[0]
        stream.thread_type = "AUTO"
        for packet in opened.demux(stream):
            with suppress(self._module.error.InvalidDataError):  # of this packet alone
                yield from packet.decode()

    def _count_packets(self, opened: Any, stream: Any) -> None:
        """Count the frames, which not every container stores; it decodes nothing."""
        stamps: list[float] = []
        self.count, end = 0, 0.0
        for packet in opened.demux():
            if packet.size and packet.pts is not None and packet.time_base is not None:
                end = max(end, float((packet.pts + (packet.duration or 0)) * packet.time_base))
            if packet.stream_index != stream.index or not packet.size:
                continue
            if packet.is_corrupt or packet.is_discard:
                continue
            self.count += 1
            if packet.pts is not None:
                stamps.append(float(packet.pts * stream.time_base))
        self.times = sorted(stamps) if len(stamps) == self.count else None
        if self._announced is not None and self._announced - end > _MISSING_S:
            self.note = (
                f"breaks off: {max(end, 0):.1f} of {self._announced:.1f} seconds are there, and "
                "were read; get a whole copy"
            )

    @staticmethod
    def _length(opened: Any) -> float | None:
        """Return the seconds that the container's header promises, None where it does not."""
        known = set(opened.format.name.split(",")) & set(_TIMED)
        if not known or opened.duration is None:
            return None
        return (opened.duration + (opened.start_time or 0)) / 1_000_000

    def _open(self) -> Any:
        source = self._source
        file = io.BytesIO(source) if isinstance(source, bytes) else source
        return self._module.open(file, format=self._format)


def _upright(frame: Any) -> np.ndarray:
    """Return a frame of PyAV's [height, width, 3], turned as the file says."""
    made = frame.to_ndarray(format="rgb24")
    turns = round(getattr(frame, "rotation", 0) / 90)  # counterclockwise
    return np.ascontiguousarray(np.rot90(made, turns)) if turns % 4 else made


class _TorchCodec:
    note: str | None = None

    def __init__(self, module: Any, path: str) -> None:
        self._video = module.decoders.VideoDecoder(path, dimension_order="NHWC")
        self.count = int(self._video.metadata.num_frames)
        self.fps = float(self._video.metadata.average_fps or _ASSUMED_FPS)
        self.times: Sequence[float] | None = None  # it tells them of decoded frames alone

    def read(self, indices: Sequence[int], keep: FrameMap) -> list[np.ndarray]:
        return [keep(self._video.get_frame_at(index).data.numpy()) for index in indices]


_READERS: dict[str, Callable[[Any, str], FrameReader]] = {
    "decord": _Decord,
    "av": PyAVReader,
    "torchcodec": _TorchCodec,
}
READERS = tuple(_READERS)
