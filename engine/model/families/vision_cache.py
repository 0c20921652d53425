"""Keep the features of pictures and videos, so that the same ones are encoded once."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmkv.engine.errors import InputError
from mmkv.engine.model.families.base import Family, as_tensor
from mmkv.engine.model.families.features import Features, joined

# Inputs of the text side. All else may steer the vision side.
_OF_TOKENS = {"input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids"}


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
        keys = [_key(kind, picture, keyed) if self.limit else None for picture in pictures]
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


def looks(family: Family, inputs: Mapping[str, Any]) -> dict[int, list[bytes | None]]:
    """Hash each picture and video, or each of its tiles and frames, per modality.

    Raises:
        InputError: pixels that are no tensor.
    """
    made: dict[int, list[bytes | None]] = {}
    for kind, key in family.pixel_keys.items():
        if inputs.get(key) is None:
            continue
        others = {name for other, name in family.pixel_keys.items() if other != kind}
        parts: list[Mapping[str, Any]] = []
        own = {name: value for name, value in inputs.items() if name not in others}
        for picture in family.pictures(kind, own):
            pixels = as_tensor(picture[key], key)
            if pixels.dim() < 4:
                parts.append(picture)
            else:  # tiles of zeros fill up a batch, with other pictures more or fewer of them
                parts += [{key: tile} for tile in pixels.flatten(0, -4) if bool(tile.any())]
        made[kind] = [_key(kind, part, "") for part in parts]
    return made


def _key(kind: int, inputs: Mapping[str, Any], salt: str) -> bytes | None:
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
