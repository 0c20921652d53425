"""The set of token ids that a sequence has read, as a whole number with a bit for each id.

A number does not change, so forks and earlier states share it; a vocabulary of 150,000 takes 19 KB.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# Below, setting bits one by one takes less time than a mask of the vocabulary.
_FEW = 8


def with_ids(read: int, ids: Sequence[int] | np.ndarray) -> int:
    """Return ``read`` with the bits of ``ids`` (whole numbers of 0 or more) set."""
    if len(ids) <= _FEW:
        for token in ids:
            read |= 1 << int(token)
        return read
    given = np.asarray(ids)
    mask = np.zeros(int(given.max()) + 1, dtype=bool)
    mask[given] = True
    return read | int.from_bytes(np.packbits(mask, bitorder="little").tobytes(), "little")


def mask_of(read: int, vocabulary: int) -> np.ndarray:
    """Return bool ``[vocabulary]``: which ids have been read."""
    size = max(-(-vocabulary // 8), -(-read.bit_length() // 8))
    packed = np.frombuffer(read.to_bytes(size, "little"), dtype=np.uint8)
    return np.unpackbits(packed, count=vocabulary, bitorder="little").view(bool)
