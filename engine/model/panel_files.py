"""Keep packed weights on disk: later starts map them, and processes share their pages.

A file holds the panels of one checkpoint in one form. It is a safetensors file, whose metadata say
how matrices are made of its tensors, so any class of :class:`Panels` can be kept.

A file answers for a checkpoint while the size, the time of the last write and of the last change of
every one of its files, and name, dtype, shape and first KiB of every tensor are as they were. What
this does not see is a file that is written between two ticks of its file system's clock, with other
numbers behind the first KiB of the same tensors. Of a file itself the header, the length and the
ends of every tensor are checked; a bit that turns on the disk in between is not found, as it is not
in a checkpoint. Panels lie alike on all CPUs, so a file serves every one that reads its folder.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import mmap
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch
from torch import Tensor

from mmkv.engine.budget import format_bytes
from mmkv.engine.model.fingerprint import identity
from mmkv.engine.model.kept_files import (
    FOREIGN,
    FORMAT,
    SWITCH,
    folder,
    limit,
    make_room,
    read_header,
    turn,
)
from mmkv.engine.model.panels import Fill, Panels, Room, filled_by
from mmkv.engine.paths import open_regular, whole_file
from mmkv.engine.system import count_mapped, free_bytes, give_back

# To pack less takes less than a tenth of a second.
LEAST_BYTES = 2**26
_ALIGNED = 64  # a cache line: tensors in C begin with one
_SAMPLE = 1024  # bytes of both ends of a tensor that are checked
_AT_ONCE = 2**26  # bytes of a write, and of what is read ahead
_IN_CACHE = 2**20  # bytes that a thread packs, before they are written
# Of Linux 5.14; elsewhere the same hint once more.
_MADV_POPULATE_READ = 22 if sys.platform == "linux" else mmap.MADV_WILLNEED
_DTYPES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.int16: "I16",
    torch.int32: "I32",
}
_BY_NAME = {short: dtype for dtype, short in _DTYPES.items()}

_T = TypeVar("_T")
_M = TypeVar("_M", bound=Tensor | Panels)


class PanelStore:
    """Gives matrices: this one has them made."""

    def matrix(self, name: str, make: Callable[[], _M]) -> _M:
        """Return the matrix of that name; ``make`` packs it where it is not at hand."""
        return make()

    def fact(self, name: str, find: Callable[[], bool]) -> bool:
        """Return what ``find`` says of these matrices, without calling it where that is known."""
        return find()

    def knows(self, matrix: Tensor | Panels) -> bool:
        """Whether the matrix was checked when its file was made: then it is finite."""
        return False


class MappedFile:
    """A file that is mapped; what is written to its tensors stays in this process."""

    def __init__(self, descriptor: int, begin: int = 0, size: int = 0) -> None:
        # Private and writable: torch warns of tensors that cannot be written. MAP_NORESERVE (of
        # Linux, in Python since 3.13): no memory is set aside for copies that nobody makes.
        flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
        access = mmap.PROT_READ | mmap.PROT_WRITE
        self._map = mmap.mmap(descriptor, size, flags=flags, prot=access, offset=begin)

    def tensor(self, begin: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        """Return the tensor that begins at that byte; it keeps the mapping alive."""
        count = math.prod(shape)
        if not count:
            return torch.empty(*shape, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=begin).view(*shape)

    def forget(self, begin: int, size: int) -> None:
        """Let go of pages that were read; they come again when they are asked for."""
        page = mmap.PAGESIZE
        first, end = begin // page * page, min(-(-(begin + size) // page) * page, len(self._map))
        if hasattr(mmap, "MADV_DONTNEED") and end > first:
            self._map.madvise(mmap.MADV_DONTNEED, first, end - first)

    def stay(self) -> None:
        """Have it read now, if it fits into memory, and count it among what is in use."""
        free = free_bytes(torch.device("cpu"))
        if free is None or len(self._map) < free:
            for begin in range(0, len(self._map), _AT_ONCE):  # Ctrl-C comes in between
                size = min(_AT_ONCE, len(self._map) - begin)
                self._map.madvise(mmap.MADV_WILLNEED, begin, size)
                with contextlib.suppress(OSError):  # an older kernel: pages come when asked for
                    self._map.madvise(_MADV_POPULATE_READ, begin, size)
        count_mapped(self._map, len(self._map))


def with_panels(
    read: Callable[[PanelStore], _T | None],
    files: Sequence[Path],
    model: str,
    form: str,
    numbers: int,
    size: int,
    part: str = "text",
    settings: str = "",
    seen: str = "",
) -> tuple[_T | None, str | None]:
    """Run ``read`` with the packed matrices of a checkpoint, and keep those that it made.

    Args:
        read: takes its matrices from the store that it is given, and raises where one is not
            finite. It is called again when a file has been written, or could not be. None: nothing
            was read, and nothing is kept.
        files: of the checkpoint. model: its name, for people.
        form: of the weights, as ``--weights`` takes it.
        numbers: about how many numbers the matrices hold; size: about how many bytes in panels.
        part: which part of the checkpoint they are; each has a file.
        settings: what the numbers depend on beside the files.
        seen: what :func:`identity` said of the files, where they were read before.

    Returns:
        What ``read`` returned, and a line on what was written or could not be; None: neither.

    Raises:
        ModelError: the environment variable MMKV_PANELS is no amount of memory.
    """
    most = limit()
    if most == 0 or 2 * numbers < LEAST_BYTES:
        return read(PanelStore()), None
    path = folder() / _name(files, model, form, part)
    about = {"format": FORMAT, "model": model, "form": form, "part": part}
    try:
        return _read_kept(read, path, files, about, size, most, settings, seen)
    except _Discarded as discarded:
        return discarded.found, None
    except OSError as error:
        reason = error.strerror or str(error)
    # Here nothing holds what has been mapped any more.
    return read(PanelStore()), (
        f"packed weights are not kept in {path.parent}: {reason}; {SWITCH}=0 keeps none"
    )


def _read_kept(
    read: Callable[[PanelStore], _T | None],
    path: Path,
    files: Sequence[Path],
    about: Mapping[str, str],
    size: int,
    most: int | None,
    settings: str,
    seen: str,
) -> tuple[_T | None, str | None]:
    """Do as :func:`with_panels`. Raises OSError where nothing can be kept."""
    of_these = functools.partial(_key, files, about["form"], about["part"], settings, seen)
    key = of_these()
    if (store := _opened(path, key, files)) is not None:
        return read(store), None
    path.parent.mkdir(parents=True, exist_ok=True)
    with turn(path):
        # Another process may have been first.
        if (store := _opened(path, key, files)) is not None:
            return read(store), None
        with whole_file(path, sync=True) as draft, FileIO(draft, "rb+") as file:
            writing = _Draft(file, draft.parent, {**about, "key": key}, size, most)
            found = read(writing)
            if found is None or not writing.made or of_these() != key:
                raise _Discarded(found)
            writing.finish()
    # As every later start reads it: one mapping and one descriptor, not one for each matrix.
    # Those go first, or their pages would count twice.
    del found, writing
    took = format_bytes(path.stat().st_size)
    written: PanelStore = _opened(path, key, files) or PanelStore()
    note = f"packed weights are kept in {path.parent} ({took}); see mmkv cache --help"
    return read(written), note


class _Discarded(Exception):
    """The draft is to be dropped."""

    def __init__(self, found: Any) -> None:
        super().__init__("")
        self.found = found


def _name(files: Sequence[Path], model: str, form: str, part: str) -> str:
    # A checkpoint that changes takes the place of what it was.
    places = json.dumps([str(path.resolve()) for path in files] + [form, part])
    readable = re.sub(r"[^\w.-]+", "-", Path(model).name)[:60] or "model"
    return f"{readable}-{form}-{hashlib.sha256(places.encode()).hexdigest()[:12]}.safetensors"


def _key(files: Sequence[Path], form: str, part: str, settings: str, seen: str) -> str:
    known = [form, part, seen or identity(files)] + ([settings] if settings else [])
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()


def _opened(path: Path, key: str, files: Sequence[Path]) -> _Kept | None:
    """Return the store of a file that answers for this checkpoint, None where none does.

    Whoever wrote it decides what the model says: this user, the system's, or the checkpoint's.
    """
    try:
        with open_regular(path) as file:
            writers = {os.geteuid(), 0, *(each.stat().st_uid for each in files)}
            if os.fstat(file.fileno()).st_uid not in writers:
                return None
            begin, header = read_header(file)
            if header["__metadata__"]["key"] != key:
                return None
            store = _Kept(file, begin, header)
    except FOREIGN:
        return None
    with contextlib.suppress(OSError):  # not ours, or read-only: then others are deleted first
        os.utime(path)
    return store


class _Kept(PanelStore):
    """Gives the matrices of a file."""

    def __init__(self, file: BinaryIO, begin: int, header: Mapping[str, Any]) -> None:
        about = header["__metadata__"]
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name[:2] != "__"]
        if os.fstat(file.fileno()).st_size != begin + max(ends):
            raise ValueError("the file has another length than its header says")
        mapped = MappedFile(file.fileno())
        self._facts: dict[str, bool] = json.loads(about["facts"])
        self._made: dict[str, Panels] = {}
        sample = hashlib.sha256()
        for name, saved in json.loads(about["matrices"]).items():
            parts = {}
            for field in saved["parts"]:
                entry = header[f"{name}:{field}"]
                dtype = _BY_NAME[entry["dtype"]]
                start = begin + entry["data_offsets"][0]
                parts[field] = mapped.tensor(start, dtype, entry["shape"])
                _add_sample(sample, parts[field])
            kind = Panels.kinds[saved["class"]]
            if kind.layout != saved["layout"]:
                raise ValueError("panels of an older layout")
            made = kind(shape=tuple(saved["shape"]), **saved["others"], **parts)
            if not made.fills_its_shape():
                raise ValueError("panels of another size than their shape says")
            self._made[name] = made
        if sample.hexdigest() != about["sample"]:
            raise ValueError("the file has been damaged")
        mapped.stay()

    def matrix(self, name: str, make: Callable[[], Any]) -> Any:
        found = self._made.get(name)
        return make() if found is None else found

    def fact(self, name: str, find: Callable[[], bool]) -> bool:
        return self._facts[name] if name in self._facts else find()

    def knows(self, matrix: Tensor | Panels) -> bool:
        return any(matrix is one for one in self._made.values())


class _Draft(PanelStore):
    """Writes the matrices that are made one after the other to a file, and gives those there.

    Only some panels are in memory of their own at a time: they are written from the cache.
    """

    def __init__(
        self, file: FileIO, place: Path, about: Mapping[str, str], size: int, most: int | None
    ) -> None:
        self._file, self._about = file, dict(about)
        self._place, self._size, self._most = place, size, most
        self._tensors: dict[str, Any] = {}
        self._matrices: dict[str, Any] = {}
        self._facts: dict[str, bool] = {}
        self._sample = hashlib.sha256()
        self._places: dict[int, int] = {}  # address of a tensor -> where it begins in the file
        self.made: dict[str, Panels] = {}
        # The header comes last, into the room before the tensors; its length is not known yet.
        self._begin = self._at = 2**20
        file.truncate(0)

    def matrix(self, name: str, make: Callable[[], Any]) -> Any:
        with filled_by(self._fill):
            made: Any = make()
        if not isinstance(made, Panels):
            return made
        parts, others = [], {}
        for field in fields(made):  # type: ignore[arg-type]  # every class of panels is a dataclass
            value = getattr(made, field.name)
            if isinstance(value, Tensor):
                parts.append(field.name)
                self._note(f"{name}:{field.name}", self._places[value.data_ptr()], value)
                _add_sample(self._sample, value)
            elif field.name != "shape":
                others[field.name] = value
        self._matrices[name] = {
            "class": type(made).__name__,
            "layout": made.layout,
            "shape": made.shape,
            "others": others,
            "parts": parts,
        }
        self.made[name] = made
        # Small tensors that stay would keep the heap around them from being used again.
        give_back()
        return self.made[name]

    def fact(self, name: str, find: Callable[[], bool]) -> bool:
        self._facts[name] = find()
        return self._facts[name]

    def finish(self) -> None:
        """Write the header. Raises OSError."""
        about = self._about | {
            "matrices": json.dumps(self._matrices),
            "facts": json.dumps(self._facts),
            "sample": self._sample.hexdigest(),
        }
        places = sorted(self._tensors.items(), key=lambda each: each[1]["data_offsets"])
        header = json.dumps({"__metadata__": about} | dict(places)).encode()
        room = self._begin - 8
        if len(header) > room:
            raise OSError(f"too many matrices for a header of {room:,} bytes")
        self._file.seek(0)
        _write_all(self._file, room.to_bytes(8, "little") + header.ljust(room))
        with contextlib.suppress(OSError):  # cut short while mapped, it would end its readers
            os.fchmod(self._file.fileno(), 0o400)

    def _fill(self, fill: Fill, rooms: Sequence[Room]) -> list[Tensor]:
        """Do as :func:`filled`: give tensors of the file."""
        if not self._tensors:
            # Gates take no model's place: it would be packed anew, and take theirs.
            deletes = self._about["part"] != "gates"
            make_room(self._place, self._begin + self._size, self._most, deletes)
        count = rooms[0][0][0]
        each = [math.prod(shape[1:]) * dtype.itemsize for shape, dtype in rooms]
        start = self._reserve(0, mmap.ALLOCATIONGRANULARITY)
        places = [self._reserve(count * size) for size in each]
        # As torch rounds them, which sums errors over so many panels.
        some = max(16, _IN_CACHE * torch.get_num_threads() // each[0] // 16 * 16)
        memory = [torch.empty(min(some, count), *shape[1:], dtype=dtype) for shape, dtype in rooms]
        for first in range(0, count, some):
            own = [tensor[: count - first] for tensor in memory]
            fill(first, *own)
            for place, size, tensor in zip(places, each, own, strict=True):
                self._file.seek(place + first * size)
                _write_all(self._file, tensor.reshape(-1).view(torch.uint8).numpy().data)
        mapped = MappedFile(self._file.fileno(), start, self._at - start)
        mapped.stay()
        made = [
            mapped.tensor(place - start, dtype, shape)
            for place, (shape, dtype) in zip(places, rooms, strict=True)
        ]
        self._places = {tensor.data_ptr(): at for tensor, at in zip(made, places, strict=True)}
        return made

    def _reserve(self, size: int, step: int = _ALIGNED) -> int:
        """Return where the next ``size`` bytes begin: at a multiple of ``step``.

        What is left out before them is a tensor, too: the format allows no holes.
        """
        if left := -self._at % step:
            self._note(f"pad:{self._at}", self._at, torch.empty(left, dtype=torch.uint8))
        at = self._at + left
        self._at = at + size
        return at

    def _note(self, name: str, at: int, tensor: Tensor) -> None:
        start = at - self._begin
        self._tensors[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": tuple(tensor.shape),
            "data_offsets": (start, start + tensor.nbytes),
        }


def _write_all(file: FileIO, content: bytes | memoryview) -> None:
    view, at = memoryview(content), 0
    while at < len(view):
        at += file.write(view[at : at + _AT_ONCE]) or 0


def _add_sample(digest: hashlib._Hash, tensor: Tensor) -> None:
    """Add the bytes of both ends."""
    flat = tensor.reshape(-1)
    some = max(1, _SAMPLE // flat.element_size())
    for end in (flat[:some], flat[-some:]):
        digest.update(end.contiguous().view(torch.uint8).numpy().tobytes())
