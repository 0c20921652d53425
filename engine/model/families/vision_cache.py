"""Keep the features of pictures and videos, so that the same ones are encoded once."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmkv.engine.errors import InputError
from mmkv.engine.model.families.base import as_tensor
from mmkv.engine.model.families.features import Features

# Inputs of the text side. All else may steer the vision side.
_OF_TOKENS = {"input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids"}


@dataclass(frozen=True)
class _Kept:
    features: Features
    salt: str
    bytes: int


class VisionCache:
    """Features by a hash of all that the vision side reads for them, the latest used ones.

    The pictures of a turn are one entry, for they are encoded in one pass: what is found is what
    would be computed, bit for bit. How a picture was prepared is in the hash by its pixels. One
    cache is for one model in one form. Threads may share it.

    Whoever reads under another salt never finds an entry, so that no client learns from the time
    of a reply that another one has sent the same picture.

    Args:
        limit: most bytes that it holds; 0: it keeps nothing.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def features(
        self,
        kind: int,
        inputs: Mapping[str, Any],
        others: set[str],
        salt: str,
        encode: Callable[[], Features],
    ) -> Features:
        """Return the features of a turn's pictures or videos, which ``encode`` computes.

        Args:
            kind: which of both. inputs: of the processor. others: those that are not of this kind.
            salt: whose entries may be found.

        Raises:
            whatever ``encode`` does; nothing is kept then.
        """
        key = _key(kind, inputs, others, salt) if self.limit else None
        if key is None:
            return encode()
        with self._lock:
            if (found := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
                return found.features
        made = encode()
        self._keep(key, salt, Features(_own(made.rows), tuple(map(_own, made.deepstack))))
        return made

    def bytes_of(self, salt: str) -> int:
        """Count the bytes of what is kept under a salt."""
        with self._lock:
            return sum(kept.bytes for kept in self._kept.values() if kept.salt == salt)

    @property
    def nbytes(self) -> int:
        """Count the bytes of all that is kept."""
        return self._bytes

    def _keep(self, key: bytes, salt: str, features: Features) -> None:
        size = sum(part.nbytes for part in (features.rows, *features.deepstack))
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


def _key(kind: int, inputs: Mapping[str, Any], others: set[str], salt: str) -> bytes | None:
    """Hash what the vision side reads; None where it is not tensors, or numbers of their like."""
    digest = hashlib.sha256(repr((salt, kind)).encode())
    for name in sorted(inputs.keys() - _OF_TOKENS - others):
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
