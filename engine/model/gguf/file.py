"""Read what a GGUF file says of itself: its metadata, and where its tensors lie. No torch.

The format is ggml's: a head, metadata by name, then name, sizes, type and
place of every tensor, and their numbers.
"""

from __future__ import annotations

import functools
import math
import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmkv.engine.errors import ModelError
from mmkv.engine.paths import is_file, is_lfs_pointer

SUFFIX = ".gguf"
_MAGIC = b"GGUF"
_HEAD = struct.Struct("<4sIQQ")
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$", re.IGNORECASE)
_SPLIT = {"no": 0, "count": 1}  # metadata of a part, and what they are of a file by itself
_IN_ALL = "split.tensors.count"  # of all parts: each says it, and nothing else of the model
_MOST_PARTS = 1000
# How the format numbers kinds of metadata; text is 8 and an array 9.
_NUMBERS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_TEXT, _ARRAY = 8, 9
_MOST = 2**20  # tensors, or entries of metadata
_LONGEST = 2**24  # values of an array, as many as a vocabulary may have
_LONGEST_TEXT = 2**28  # bytes; a tokenizer's page takes tens of millions
# ggml's number of a type: its name, numbers in a block, bytes of a block.
_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}
PLAIN = {"F32", "F16", "BF16"}


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of a file.

    Attributes:
        path: the file, or the part of a split one.
        kind: ggml's name of its type, such as ``Q4_0``.
        number: ggml's number of that type.
        shape: as torch has it: rows before columns.
        begin: byte in the file. nbytes: of all of it.
    """

    path: Path
    name: str
    kind: str
    number: int
    shape: tuple[int, ...]
    begin: int
    nbytes: int

    @property
    def rows(self) -> int:
        """Count the rows of all but the last axis."""
        return math.prod(self.shape[:-1])


class GgufFile:
    """The head of a GGUF file; of one that is split, of all its parts.

    Args:
        path: the file, or the first part.
        part: its number from 0 on and how many there are, of a part that another one asks for.

    Attributes:
        metadata: by name; arrays are lists. Those of a split file lie in its first part.
        tensors: by name; each says in which part it lies.

    Raises:
        ModelError: no GGUF file, one of an unknown version, a damaged one, or a split one of which
            this is not the first part or another one is missing.
    """

    def __init__(self, path: Path, part: tuple[int, int] = (0, 1)) -> None:
        self.path, self._place = path, part
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        try:
            with path.open("rb") as file:
                head = file.read(_HEAD.size)
                self._require_head(head)
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                    self._read(data, *_HEAD.unpack(head)[2:])
        except OSError as error:
            raise ModelError(f"cannot read {path} ({error.strerror}); mend that") from error
        except (struct.error, ValueError, LookupError, OverflowError) as error:
            raise self._damaged("its header makes no sense") from error
        if not part[0]:
            self._take_parts()

    def _take_parts(self) -> None:
        """Add the tensors of the other parts. Raises ModelError: one is missing or another's."""
        number, count = (self.metadata.get(f"split.{name}", n) for name, n in _SPLIT.items())
        count = count or 1  # llama.cpp says 0 in a file that it joined of parts
        named = parts_of(self.path)
        if count == 1 and len(named) == 1:
            return
        if named[0] != self.path and not is_file(named[0]):
            raise _missing(named[0], 1, len(named))
        if number != 0 or named[0] != self.path:
            raise ModelError(
                f"{self.path} is not the first part of a split GGUF file; name that one, "
                "...-00001-of-0000N.gguf"
            )
        if len(named) != count:
            raise ModelError(
                f"{self.path} has {ascii(count)[:9]} parts by what it says and {len(named)} by its "
                "name; give all parts the names that they were written with"
            )
        for at, path in enumerate(named[1:], 1):
            if not is_file(path):
                raise _missing(path, at + 1, count)
            other = GgufFile(path, (at, count))
            if other.metadata.get(_IN_ALL) != self.metadata.get(_IN_ALL):
                raise ModelError(
                    f"{path} is a part of another split file than {self.path}; get both from the "
                    "same place"
                )
            if len(self.tensors | other.tensors) != len(self.tensors) + len(other.tensors):
                raise other._damaged("it has a tensor of another part, too")
            self.tensors |= other.tensors
        if len(self.tensors) != self.metadata.get(_IN_ALL, len(self.tensors)):
            raise self._damaged("its parts have not the tensors that it names")

    @property
    def architecture(self) -> str:
        """Return llama.cpp's name of the kind of model; ``clip`` for a tower."""
        return str(self.metadata.get("general.architecture"))

    def get(self, name: str, default: Any = None) -> Any:
        """Return metadata of the architecture: ``name`` without its prefix."""
        return self.metadata.get(f"{self.architecture}.{name}", default)

    def whole(self, name: str, default: int | None = None) -> int:
        """Return a whole number of the architecture's metadata, one for all layers.

        Raises:
            ModelError: there is none, or one beyond any model.
        """
        found = self._same(name, default)
        if isinstance(found, bool) or not isinstance(found, int) or not 0 <= found < 2**32:
            raise self._without(name, found, "one whole number")
        return found

    def layers(self, name: str) -> int:
        """Return a number of layers, before anything is made for each: a file of so many has as
        many tensors, and more. Raises as :meth:`whole`.
        """
        found = self.whole(name)
        if not 0 < found <= len(self.tensors):
            raise ModelError(
                f"{self.path}: {self.architecture}.{name} is {found} for {len(self.tensors)} "
                "tensors; get the original file"
            )
        return found

    def real(self, name: str, default: float | None = None) -> float:
        """Return a number of 0 or more of the architecture's metadata. Raises as :meth:`whole`."""
        found = self._same(name, default)
        if isinstance(found, bool) or not isinstance(found, (int, float)) or not 0 <= found < 1e30:
            raise self._without(name, found, "a number")
        return float(found)

    def _same(self, name: str, default: Any) -> Any:
        """Return a value; of a list, the number that all layers share, else the list."""
        found = self.get(name, default)
        return found[0] if isinstance(found, list) and found == found[:1] * len(found) else found

    def _without(self, name: str, found: Any, wanted: str) -> ModelError:
        what = "is missing" if found is None else f"is {ascii(found)[:60]}"
        if isinstance(found, (list, str)):
            what = f"is {ascii(found[:20])[:60]} ({len(found)} long)"
        return ModelError(
            f"{self.path}: {self.architecture}.{name} {what}; get a file that says {wanted} "
            "for all layers"
        )

    def shapes(self) -> list[tuple[str, str, list[int]]]:
        """Return name, dtype and shape of each tensor, as a safetensors file would list them.

        What is quantised is widened to float32. Of names, those parts are transformers' that tell
        layers, embedding and head.
        """
        found = []
        for name, tensor in self.tensors.items():
            for theirs, ours in (
                ("blk.", "model.layers."),
                ("token_embd.", "model.embed_tokens."),
            ):
                name = ours + name.removeprefix(theirs) if name.startswith(theirs) else name
            name = name.replace("output.", "lm_head.") if name == "output.weight" else name
            dtype = tensor.kind if tensor.kind in PLAIN else "F32"
            found.append((name, dtype, list(tensor.shape)))
        return found

    def floats(self, name: str) -> list[float]:
        """Return the numbers of a small tensor of type F32. Raises ModelError for another one."""
        found = self.tensors[name]
        if found.kind != "F32" or found.nbytes > 2**20:
            raise self._damaged(f"its tensor {name} is of type {found.kind}")
        with found.path.open("rb") as file:
            file.seek(found.begin)
            return list(struct.unpack(f"<{found.nbytes // 4}f", file.read(found.nbytes)))

    def _damaged(self, why: str) -> ModelError:
        return ModelError(f"{self.path} is damaged ({why}); copy or download it again")

    def _require_head(self, head: bytes) -> None:
        if head[:4] != _MAGIC:
            if is_lfs_pointer(Path(self.path)):
                raise ModelError(
                    f"{self.path} is a pointer of Git LFS and not the file; run `git lfs pull` "
                    "there"
                )
            raise ModelError(f"{self.path} is no GGUF file; name one, or a checkpoint's folder")
        if len(head) < _HEAD.size:
            raise self._damaged("it is cut off")
        version = _HEAD.unpack(head)[1]
        if not version & 0xFFFF:
            raise ModelError(
                f"{self.path} is a GGUF file for big-endian machines, which mmkv does not read; "
                "get the usual one"
            )
        if version not in (2, 3):
            raise ModelError(
                f"{self.path} is GGUF of version {version}, and mmkv reads 2 and 3; convert it "
                "anew with llama.cpp"
            )

    def _read(self, data: mmap.mmap, tensors: int, entries: int) -> None:
        if max(tensors, entries) > _MOST:
            raise self._damaged("its counts make no sense")
        reader = _Reader(data, _HEAD.size)
        for _ in range(entries):
            name = reader.text()
            self.metadata[name] = reader.value()
        said = tuple(self.metadata.get(f"split.{name}") for name in _SPLIT)
        if self._place[0] and said != self._place:
            raise self._damaged("it is not the part that its name says")
        found = [reader.tensor() for _ in range(tensors)]
        aligned = self.metadata.get("general.alignment", 32)
        if not isinstance(aligned, int) or aligned < 8 or aligned % 8:
            raise self._damaged("its alignment makes no sense")
        begin = -(-reader.at // aligned) * aligned
        for name, shape, number, offset in found:
            self._place_tensor(name, shape, number, begin + offset, len(data))

    def _place_tensor(
        self, name: str, shape: tuple[int, ...], number: int, begin: int, end: int
    ) -> None:
        """Note a tensor. Raises ModelError: it cannot lie there in a file of ``end`` bytes."""
        if number not in _TYPES:
            raise ModelError(
                f"{self.path}: {ascii(name)[:80]} is of ggml's type {number}, which mmkv does "
                "not read; take a file of another type, such as Q8_0 or Q4_K"
            )
        kind, block, width = _TYPES[number]
        if name in self.tensors or begin % 8 or not shape or min(shape) < 1:
            raise self._damaged(f"its tensor {ascii(name)[:80]} makes no sense")
        if shape[-1] % block:
            raise self._damaged(f"rows of {ascii(name)[:80]} are no whole blocks of {kind}")
        nbytes = math.prod(shape) // block * width
        if begin + nbytes > end:
            raise self._damaged(f"it ends before its tensor {ascii(name)[:80]} does")
        self.tensors[name] = GgufTensor(self.path, name, kind, number, shape, begin, nbytes)


def read_gguf(path: Path) -> GgufFile:
    """Return what a file says of itself, read once while the file stays as it is.

    Raises:
        ModelError: as :class:`GgufFile`.
    """
    try:
        return _read_once(path, state(path))
    except OSError as error:
        raise ModelError(f"cannot read {path} ({error.strerror}); mend that") from error


def state(path: Path) -> tuple[int, ...]:
    """Return what changes whenever a file or a part of it does. Raises OSError."""
    found = [path.stat(), *(one.stat() for one in parts_of(path) if is_file(one))]
    return tuple(n for one in found for n in (one.st_size, one.st_mtime_ns, one.st_ctime_ns))


def _missing(path: Path, number: int, count: int) -> ModelError:
    return ModelError(
        f"{path} is missing, part {number} of {count} of this model; put all parts into one folder"
    )


def parts_of(path: Path) -> list[Path]:
    """Return the files that a split file has by its name, this one included; else itself."""
    found = _PART.search(path.name)
    if found is None or not 0 < int(found[1]) <= int(found[2]):
        return [path]
    stem, end = path.name[: found.start()], found[0][-len(SUFFIX) :]
    count = min(int(found[2]), _MOST_PARTS)
    return [path.with_name(f"{stem}-{n:05}-of-{found[2]}{end}") for n in range(1, count + 1)]


@functools.lru_cache(maxsize=4)  # a vocabulary takes tens of megabytes
def _read_once(path: Path, state: tuple[int, ...]) -> GgufFile:
    return GgufFile(path)


class _Reader:
    """Reads values one after the other. What lies beyond the end raises ``struct.error``."""

    def __init__(self, data: mmap.mmap, at: int) -> None:
        self._data, self.at = data, at

    def number(self, kind: str) -> Any:
        """Return one number of a kind of ``struct``."""
        return self.numbers(kind, 1)[0]

    def numbers(self, kind: str, count: int) -> tuple[Any, ...]:
        """Return so many numbers."""
        layout = f"<{self._fitting(count, struct.calcsize(kind), _LONGEST)}{kind}"
        made = struct.unpack_from(layout, self._data, self.at)
        self.at += struct.calcsize(layout)
        return made

    def text(self) -> str:
        """Return text, which its length precedes."""
        size = self._fitting(self.number("Q"), 1, _LONGEST_TEXT)
        self.at += size
        return self._data[self.at - size : self.at].decode()

    def value(self, depth: int = 0) -> Any:
        """Return a value, which its kind precedes."""
        return self._of(self.number("I"), depth)

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Return name, shape, number of the type and offset of a tensor."""
        name, axes = self.text(), self.number("I")
        if axes > 4:
            raise ValueError("too many axes")
        sizes = self.numbers("Q", axes)
        return name, tuple(reversed(sizes)), self.number("I"), self.number("Q")

    def _of(self, kind: int, depth: int) -> Any:
        if kind == _TEXT:
            return self.text()
        if kind != _ARRAY:
            return self.number(_NUMBERS[kind])
        if depth:
            raise ValueError("arrays of arrays")
        kind, count = self.number("I"), self.number("Q")
        if kind in _NUMBERS:
            return list(self.numbers(_NUMBERS[kind], count))
        count = self._fitting(count, 8, _LONGEST)
        return self._texts(count) if kind == _TEXT else [self._of(kind, 1) for _ in range(count)]

    def _texts(self, count: int) -> list[str]:
        """Do as :meth:`text` so many times."""
        data, at, found = self._data, self.at, []
        for _ in range(count):
            begin = at + 8
            at = begin + int.from_bytes(data[at:begin], "little")
            if at - begin > _LONGEST_TEXT:
                raise struct.error("too long")
            found.append(data[begin:at].decode())
        if at > len(data):
            raise struct.error("beyond the end")
        self.at = at
        return found

    def _fitting(self, count: int, size: int, most: int) -> int:
        """Return ``count`` if so many things of at least ``size`` bytes can follow.

        ``most``: what is taken at all. A file may seem to be larger than the disk.
        """
        if count > most or count * size > len(self._data) - self.at:
            raise struct.error("too many, or beyond the end")
        return int(count)
