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
import fcntl
import hashlib
import json
import math
import mmap
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from mmkv.engine.budget import format_bytes, parse_bytes
from mmkv.engine.errors import BudgetError, ModelError
from mmkv.engine.memory import count_mapped, free_bytes, give_back
from mmkv.engine.model.fingerprint import identity
from mmkv.engine.model.panels import Panels
from mmkv.engine.paths import cache_folder, whole_file

SWITCH = "MMKV_PANELS"  # 0: keep none; an amount of memory: what all files may take
# To pack less takes less than a tenth of a second.
LEAST_BYTES = 2**26
MOST_BYTES = 20 * 10**9
_FORMAT = "mmkv panels 1"
_SPARE = 2**30  # that a disk keeps free
_ALIGNED = 64  # a cache line: tensors in C begin with one
_SAMPLE = 1024  # bytes of both ends of a tensor that are checked
_PATIENCE = 60.0  # seconds that another process may take for its next matrix, or to sync
_AT_ONCE = 2**26  # bytes of a write, and of what is read ahead
_MADV_POPULATE_READ = 22  # of Linux 5.14
_DTYPES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.int16: "I16",
    torch.int32: "I32",
}
# What a file of other content raises while it is read.
_FOREIGN = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)

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
            with contextlib.suppress(OSError):  # an older kernel reads what is asked for, then
                for begin in range(0, len(self._map), _AT_ONCE):  # Ctrl-C comes in between
                    size = min(_AT_ONCE, len(self._map) - begin)
                    self._map.madvise(mmap.MADV_WILLNEED, begin, size)
                    self._map.madvise(_MADV_POPULATE_READ, begin, size)
        count_mapped(self._map, len(self._map))


@dataclass(frozen=True)
class KeptFile:
    """A file of packed weights.

    Attributes:
        model: the checkpoint as it was named; form: of the weights; bytes: of the file.
        used: when it was last used, in seconds since 1970.
    """

    path: Path
    model: str
    form: str
    bytes: int
    used: float


def folder() -> Path:
    """Return the folder of all files; it need not exist."""
    return cache_folder() / "panels"


def kept() -> list[KeptFile]:
    """List the files, the last used one first. What is no such file is left out."""
    found = []
    for path in folder().glob("*.safetensors"):
        try:
            about, state = _header(path)[1]["__metadata__"], path.stat()
            model, form = str(about["model"]), str(about["form"])
        except _FOREIGN:
            continue
        found.append(KeptFile(path, model, form, state.st_size, state.st_mtime))
    return sorted(found, key=lambda file: -file.used)


def clear(model: str | None = None) -> list[KeptFile]:
    """Delete the files of a checkpoint, or all. Processes that have one mapped keep it.

    Args:
        model: the checkpoint as :func:`kept` names it, or the last part of that name.

    Returns:
        What was deleted.

    Raises:
        ModelError: there is none, or one cannot be deleted.
    """
    wanted = [
        file for file in kept() if model is None or model in (file.model, Path(file.model).name)
    ]
    if model is not None and not wanted:
        raise ModelError(f"no packed weights of {model} are kept; `mmkv cache` lists what is")
    _drop_left_drafts(folder())
    for file in wanted:
        try:
            file.path.unlink(missing_ok=True)
        except OSError as error:
            raise ModelError(f"cannot delete {file.path} ({error.strerror})") from error
    return wanted


def with_panels(
    read: Callable[[PanelStore], _T | None],
    files: Sequence[Path],
    model: str,
    form: str,
    numbers: int,
    part: str = "text",
) -> tuple[_T | None, str | None]:
    """Run ``read`` with the packed matrices of a checkpoint, and keep those that it made.

    Args:
        read: takes its matrices from the store that it is given, and raises where one is not
            finite. It is called again, with a store that keeps nothing, where one fails. None:
            nothing was read, and nothing is kept.
        files: of the checkpoint. model: its name, for people.
        form: of the weights, as ``--weights`` takes it.
        numbers: about how many numbers the matrices hold.
        part: which part of the checkpoint they are; each has a file.

    Returns:
        What ``read`` returned, and a line on what was written or could not be; None: neither.

    Raises:
        ModelError: the environment variable MMKV_PANELS is no amount of memory.
    """
    limit = _limit()
    if limit == 0 or 2 * numbers < LEAST_BYTES:
        return read(PanelStore()), None
    path = folder() / _name(files, model, form, part)
    try:
        key = _key(files, form, part)
        if (store := _opened(path, key)) is not None:
            return read(store), None
        path.parent.mkdir(parents=True, exist_ok=True)
        with _turn(path):
            # Another process may have been first.
            if (store := _opened(path, key)) is not None:
                return read(store), None
            about = {"format": _FORMAT, "key": key, "model": model, "form": form}
            with whole_file(path, sync=True) as draft, FileIO(draft, "rb+") as file:
                writing = _Draft(file, draft.parent, about, numbers, limit)
                found = read(writing)
                if found is None or not writing.made or _key(files, form, part) != key:
                    raise _Discarded(found)
                writing.finish()
        size = format_bytes(path.stat().st_size)
        return found, f"packed weights are kept in {path.parent} ({size}); see mmkv cache --help"
    except _Discarded as discarded:
        return discarded.found, None
    except OSError as error:
        reason = error.strerror or str(error)
        return read(PanelStore()), (
            f"packed weights are not kept in {path.parent}: {reason}; {SWITCH}=0 keeps none"
        )


class _Discarded(Exception):
    """The draft is to be dropped."""

    def __init__(self, found: Any) -> None:
        super().__init__("")
        self.found = found


def _limit() -> int | None:
    """Return what all files together may take: 0: there are to be none; None: nobody said."""
    text = os.environ.get(SWITCH, "").strip()
    try:
        return parse_bytes(text) if text else None
    except BudgetError as error:
        raise ModelError(
            f"{SWITCH}: {error}; it bounds the packed weights on disk, 0 keeps none"
        ) from error


def _name(files: Sequence[Path], model: str, form: str, part: str) -> str:
    # A checkpoint that changes takes the place of what it was.
    places = json.dumps([str(path.resolve()) for path in files] + [form, part])
    readable = re.sub(r"[^\w.-]+", "-", Path(model).name)[:60] or "model"
    return f"{readable}-{form}-{hashlib.sha256(places.encode()).hexdigest()[:12]}.safetensors"


def _key(files: Sequence[Path], form: str, part: str) -> str:
    return hashlib.sha256(json.dumps([form, part, identity(files)]).encode()).hexdigest()


def _header(path: Path) -> tuple[int, dict[str, Any]]:
    """Return where the tensors begin, and the header. Raises what _FOREIGN lists."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > os.fstat(file.fileno()).st_size:
            raise ValueError("not a safetensors file")
        header = json.loads(file.read(size))
    if header["__metadata__"]["format"] != _FORMAT:
        raise ValueError("not a file of packed weights")
    return 8 + size, header


def _opened(path: Path, key: str) -> _Kept | None:
    """Return the store of a file that answers for this checkpoint, None where none does."""
    try:
        begin, header = _header(path)
        if header["__metadata__"]["key"] != key:
            return None
        store = _Kept(path, begin, header)
    except _FOREIGN:
        return None
    with contextlib.suppress(OSError):  # not ours, or read-only: then others are deleted first
        os.utime(path)
    return store


class _Kept(PanelStore):
    """Gives the matrices of a file."""

    def __init__(self, path: Path, begin: int, header: Mapping[str, Any]) -> None:
        about = header["__metadata__"]
        with path.open("rb") as file:
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
                dtype = next(one for one, short in _DTYPES.items() if short == entry["dtype"])
                start = begin + entry["data_offsets"][0]
                parts[field] = mapped.tensor(start, dtype, entry["shape"])
                _add_sample(sample, parts[field])
            kind = Panels.kinds[saved["class"]]
            if kind.layout != saved["layout"]:
                raise ValueError("panels of an older layout")
            self._made[name] = kind(shape=tuple(saved["shape"]), **saved["others"], **parts)
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

    Only one of them is in memory of its own at a time.
    """

    def __init__(
        self,
        file: FileIO,
        folder: Path,
        about: Mapping[str, str],
        numbers: int,
        limit: int | None,
    ) -> None:
        self._file, self._folder, self._about = file, folder, dict(about)
        self._numbers, self._limit = numbers, limit
        self._tensors: dict[str, Any] = {}
        self._matrices: dict[str, Any] = {}
        self._facts: dict[str, bool] = {}
        self._sample = hashlib.sha256()
        self.made: dict[str, Panels] = {}
        # The header comes last, into the room before the tensors; its length is not known yet.
        self._begin = self._at = 2**20
        file.truncate(0)

    def matrix(self, name: str, make: Callable[[], Any]) -> Any:
        made: Any = make()
        if not isinstance(made, Panels):
            return made
        if not self.made:
            need = round(self._numbers * made.nbytes / max(1, made.numel()))
            _make_room(self._folder, need, self._limit)
        self._pad_to(mmap.ALLOCATIONGRANULARITY)
        start, parts, others = self._at, {}, {}
        for field in fields(made):  # type: ignore[arg-type]  # every class of panels is a dataclass
            value = getattr(made, field.name)
            if isinstance(value, Tensor):
                self._pad_to(_ALIGNED)
                parts[field.name] = self._at, value.dtype, tuple(value.shape)
                self._write(f"{name}:{field.name}", value)
                _add_sample(self._sample, value)
            elif field.name != "shape":
                others[field.name] = value
        self._matrices[name] = {
            "class": type(made).__name__,
            "layout": made.layout,
            "shape": made.shape,
            "others": others,
            "parts": list(parts),
        }
        mapped = MappedFile(self._file.fileno(), start, self._at - start)
        mapped.stay()
        views = {
            field: mapped.tensor(at - start, dtype, shape)
            for field, (at, dtype, shape) in parts.items()
        }
        self.made[name] = type(made)(shape=made.shape, **others, **views)
        del made, value
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
        header = json.dumps({"__metadata__": about} | self._tensors).encode()
        room = self._begin - 8
        if len(header) > room:
            raise OSError(f"too many matrices for a header of {room:,} bytes")
        self._file.seek(0)
        _write_all(self._file, room.to_bytes(8, "little") + header.ljust(room))

    def _pad_to(self, step: int) -> None:
        """Fill up to the next multiple of ``step``: the format allows no holes between tensors."""
        if left := -self._at % step:
            self._note(f"pad:{self._at}", torch.uint8, (left,), left)

    def _write(self, name: str, tensor: Tensor) -> None:
        self._file.seek(self._at)
        self._note(name, tensor.dtype, tuple(tensor.shape), tensor.nbytes)
        _write_all(self._file, memoryview(tensor.contiguous().view(torch.uint8).numpy()).cast("B"))

    def _note(self, name: str, dtype: torch.dtype, shape: tuple[int, ...], size: int) -> None:
        start = self._at - self._begin
        place = {"dtype": _DTYPES[dtype], "shape": shape, "data_offsets": (start, start + size)}
        self._tensors[name], self._at = place, self._at + size


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


@contextmanager
def _turn(path: Path) -> Iterator[None]:
    """Hold the lock on the draft of ``path``: one process writes, and others wait for it.

    Raises:
        OSError: that process makes no headway, or nothing can be written there.
    """
    draft = path.with_name(f"{path.name}.part")
    size, since = -1, time.monotonic()
    while True:
        lock = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The one before may have renamed or deleted it meanwhile.
            if _same_file(lock, draft):
                break
        except BlockingIOError:
            if (now := os.fstat(lock).st_size) != size:
                size, since = now, time.monotonic()
            elif time.monotonic() - since > _PATIENCE:
                os.close(lock)
                raise OSError("another process has been writing them for too long") from None
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)
        time.sleep(0.1)
    try:
        yield
    finally:
        # What is left of it is nothing that anyone may use.
        if _same_file(lock, draft):
            draft.unlink(missing_ok=True)
        os.close(lock)


def _same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


def _make_room(folder: Path, need: int, limit: int | None) -> None:
    """Delete the files that were used longest ago until ``need`` bytes fit.

    Raises:
        OSError: they never will; nothing has been deleted then.
    """
    _drop_left_drafts(folder)
    files = kept()
    held, free = sum(file.bytes for file in files), shutil.disk_usage(folder).free
    most = min(MOST_BYTES, (held + free) // 2) if limit is None else limit
    most = min(most, held + free - _SPARE)
    if need > most:
        raise OSError(f"they take {format_bytes(need)}, and may take {format_bytes(max(most, 0))}")
    while files and held + need > most:
        oldest = files.pop()
        oldest.path.unlink(missing_ok=True)
        held -= oldest.bytes


def _drop_left_drafts(folder: Path) -> None:
    """Delete drafts of processes that were killed."""
    for draft in folder.glob("*.part"):
        with contextlib.suppress(OSError), draft.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            draft.unlink(missing_ok=True)
