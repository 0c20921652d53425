"""Vision features, the turn and placeholder token of each row of them, and a cache."""

from __future__ import annotations

import hashlib
import operator
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from mmkv.engine.errors import InputError

TEXT, IMAGE, VIDEO = 0, 1, 2
# Patches that a tower takes in one pass, or one picture: two of 1,024 x 1,024 pixels in Qwen3-VL.
# A layer's states in float32 take some 130 MB in its 2B model then.
MOST_PATCHES = 8192
# Inputs of the text side. All else may steer the vision side.
_OF_TOKENS = {"input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids"}


@dataclass(frozen=True)
class Features:
    """Output of the vision side for one modality: rows ``[V, hidden]``, deepstack likewise.

    Attributes:
        kept: bool ``[V]``, which a policy's merger keeps; None: nothing was merged.
    """

    rows: Tensor
    deepstack: tuple[Tensor, ...] = ()
    kept: Tensor | None = None

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """Return all its tensors."""
        return (self.rows, *self.deepstack) + (() if self.kept is None else (self.kept,))

    def each(self, change: Callable[[Tensor], Tensor]) -> Features:
        """Return these with every tensor changed in the same way."""
        kept = None if self.kept is None else change(self.kept)
        return Features(change(self.rows), tuple(map(change, self.deepstack)), kept)

    def split(self, counts: Sequence[int]) -> list[Features]:
        """Return parts of so many rows each."""
        ends = list(accumulate(counts))
        spans = [slice(end - count, end) for count, end in zip(counts, ends, strict=True)]
        return [self.each(operator.itemgetter(span)) for span in spans]


def rows_of(features: Any) -> Tensor:
    """Return features as ``[V, hidden]`` from one tensor or a list per picture."""
    if isinstance(features, (list, tuple)):
        return torch.cat([rows_of(part) for part in features])
    return features.reshape(-1, features.shape[-1])


def passes(patches: Sequence[int]) -> Iterator[slice]:
    """Yield the pictures of each pass: neighbours of ``MOST_PATCHES`` together, or one.

    Args:
        patches: of each picture.
    """
    first = taken = 0
    for number, count in enumerate(patches):
        if number > first and taken + count > MOST_PATCHES:
            yield slice(first, number)
            first, taken = number, 0
        taken += count
    if len(patches) > first:
        yield slice(first, len(patches))


def joined(parts: Sequence[Features]) -> Features:
    """Return the features of several passes as those of one."""
    if len(parts) == 1:
        return parts[0]
    levels = zip(*(part.deepstack for part in parts), strict=True)
    kept = [part.kept for part in parts if part.kept is not None]
    return Features(
        torch.cat([part.rows for part in parts]),
        tuple(map(torch.cat, levels)),
        torch.cat(kept) if kept else None,
    )


def in_token_order(features: dict[int, Features], modality: Tensor) -> Features | None:
    """Merge the features of all modalities into the order of their tokens.

    No family that merges patches has more than one modality.
    """
    if len(features) < 2:
        return next(iter(features.values()), None)
    kinds = modality[modality != TEXT]

    def merge(parts: dict[int, Tensor]) -> Tensor:
        first = next(iter(parts.values()))
        merged = first.new_empty(kinds.numel(), first.shape[-1])
        for kind, part in parts.items():
            merged[(kinds == kind).to(first.device)] = part
        return merged

    levels = min(len(part.deepstack) for part in features.values())
    return Features(
        merge({kind: part.rows for kind, part in features.items()}),
        tuple(
            merge({kind: part.deepstack[i] for kind, part in features.items()})
            for i in range(levels)
        ),
    )


def covers_seen(
    features: dict[int, Features], new: Sequence[Tensor], held: Sequence[Tensor]
) -> bool:
    """Return whether features came for the placeholders seen before, too."""
    covers = {
        len(made.rows) != sum(int((part == kind).sum()) for part in new)
        for kind, made in features.items()
        if any(bool((part == kind).any()) for part in held)
    }
    if len(covers) == 2:
        raise InputError(
            "the pictures or the videos of the whole conversation came with only the new ones of "
            "the other; pass the pixels of the new turn alone"
        )
    return True in covers


def shared_out(features: dict[int, Features], spans: Sequence[Tensor]) -> list[dict[int, Features]]:
    """Give each span of tokens, by its modality ``[T]``, its part of the features of all."""
    shares: list[dict[int, Features]] = [{} for _ in spans]
    for kind, made in features.items():
        counts = [int((span == kind).sum()) for span in spans]
        for i, part in enumerate(made.split(counts)):
            if counts[i]:
                shares[i][kind] = part
    return shares


@dataclass(frozen=True)
class _Kept:
    features: Features
    salt: str
    bytes: int


class VisionCache:
    """Features by a hash of all that the vision side reads for them, the latest used ones.

    Each picture or video is an entry, where its family tells them apart: what is new in a turn is
    encoded in one pass. So features that are found were computed beside other pictures, and may
    round otherwise where a product depends on how many rows it has: those of torch do.

    How a picture was prepared is in the hash by its pixels. One cache is for one model in one form:
    who changes the weights of a tower in place calls :meth:`clear`. Threads may share it.

    Whoever reads under another salt never finds an entry, so that no client learns from the time
    of a reply that another one has sent the same picture.

    Args:
        limit: most bytes that it holds; 0: it keeps nothing.

    Attributes:
        queries: pictures and videos that were asked for; hits: those of them that were found.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.queries = self.hits = 0
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def features(
        self,
        kind: int,
        pictures: Sequence[Mapping[str, Any]],
        salt: str,
        encode: Callable[[list[Mapping[str, Any]]], list[Features]],
        merger: str = "",
    ) -> Features:
        """Return the features of pictures or videos, in order.

        Args:
            kind: which of both. pictures: the inputs of each.
            salt: whose entries may be found.
            encode: computes the features of those that are not found, each once.
            merger: names what merges patches, with its settings; other entries are not found.

        Raises:
            whatever ``encode`` does; nothing is kept then.
        """
        keyed = salt if not merger else f"{salt}\0{merger}"
        keys = [hash_of(kind, picture, keyed) if self.limit else None for picture in pictures]
        found: dict[Any, Features] = {}
        with self._lock:
            for key in keys:
                if key is not None and (one := self._kept.get(key)) is not None:
                    self._kept.move_to_end(key)
                    found[key] = one.features
            self.queries += len(keys)
            self.hits += sum(key in found for key in keys)
        # Without a key each is its own; of equal ones the first is encoded.
        names = [at if key is None else key for at, key in enumerate(keys)]
        new = {name: picture for name, picture in zip(names, pictures, strict=True)}
        new = {name: picture for name, picture in new.items() if name not in found}
        if new:
            for name, made in zip(new, encode(list(new.values())), strict=True):
                if isinstance(name, bytes):
                    made = made.each(_own)
                    self._keep(name, salt, made)
                found[name] = made
        return joined([found[name] for name in names])

    def clear(self) -> None:
        """Forget all features."""
        with self._lock:
            self._kept.clear()
            self._bytes = 0

    def bytes_of(self, salt: str) -> int:
        """Count the bytes of what is kept under a salt."""
        with self._lock:
            return sum(kept.bytes for kept in self._kept.values() if kept.salt == salt)

    @property
    def nbytes(self) -> int:
        """Count the bytes of all that is kept."""
        return self._bytes

    def _keep(self, key: bytes, salt: str, features: Features) -> None:
        size = sum(part.nbytes for part in features.parts)
        if size > self.limit:
            return
        with self._lock:
            if key in self._kept:  # another thread was faster
                return
            while self._bytes + size > self.limit:
                _, gone = self._kept.popitem(last=False)
                self._bytes -= gone.bytes
            self._kept[key] = _Kept(features, salt, size)
            self._bytes += size


def _own(tensor: Tensor) -> Tensor:
    """Return a tensor whose memory is no larger than it."""
    whole = tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if whole else tensor.clone(memory_format=torch.contiguous_format)


def as_tensor(value: Any, name: str) -> Tensor:
    """Return ``value`` as a tensor on the CPU's terms: tensors pass through, lists are converted.

    Raises:
        InputError: for ragged or non-numeric values.
    """
    if isinstance(value, Tensor):
        return value
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            f"{name} is not a tensor ({type(value).__name__}); ask the processor for "
            "return_tensors='pt'"
        ) from error


def hash_of(kind: int, inputs: Mapping[str, Any], salt: str = "") -> bytes | None:
    """Hash what the vision side reads; None where it is not tensors, or numbers of their like."""
    digest = hashlib.sha256(repr((salt, kind)).encode())
    for name in sorted(inputs.keys() - _OF_TOKENS):
        if inputs[name] is None:
            continue
        try:
            tensor = as_tensor(inputs[name], name).detach()
        except InputError:
            return None
        digest.update(repr((name, tensor.dtype, tuple(tensor.shape))).encode())
        flat = tensor.cpu().contiguous().reshape(-1)
        if flat.numel():
            digest.update(flat.view(torch.uint8).numpy().data)
    return digest.digest()
