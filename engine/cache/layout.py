"""The columns of the cache: what an entry holds, its types and its bytes, named here once.

A column to be added is a line of :class:`Columns`. ``COLUMNS`` of native.h and two Triton kernels
name them again, in the same order; tests/engine/cache/test_layout.py compares them with this list.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Annotated, Literal, get_type_hints

import torch
from torch import Tensor

from mmkv.engine.cache.forms import AUTO, Codec, KVForm


@dataclass(frozen=True)
class Column:
    """What one column holds for each entry.

    Attributes:
        dtype: of its tensor; None for the codes of keys and values, where the form says it.
        holds: ``one`` number; the ``codes`` or ``scales`` of a key or value; or the K numbers of
            ``state`` that the policy asks for.
        values: whether codes or scales are those of values; else of keys.
    """

    dtype: torch.dtype | None
    holds: Literal["one", "codes", "scales", "state"] = "one"
    values: bool = False


@dataclass(frozen=True)
class Layout:
    """The sizes that all columns of a pool follow from.

    Attributes:
        page_size: P; dtype: the model's; form: of keys and values; state: K.
    """

    page_size: int
    head_dim: int
    dtype: torch.dtype = torch.float32
    form: KVForm = AUTO
    state: int = 0

    def dtype_of(self, column: Column) -> torch.dtype:
        """Return the dtype of a column's tensor."""
        return column.dtype or self._codec(column).dtype(self.dtype)

    def shape(self, column: Column) -> tuple[int, ...]:
        """Return the shape of one page of a column."""
        if column.holds == "one":
            return (self.page_size,)
        if column.holds == "state":
            return (self.page_size, self.state)
        codec = self._codec(column)
        width = codec.scales if column.holds == "scales" else codec.width(self.head_dim)
        return (self.page_size, width)

    def page_bytes(self, column: Column) -> int:
        """Count the bytes of one page of a column."""
        return math.prod(self.shape(column)) * self.dtype_of(column).itemsize

    def entry_bytes(self) -> int:
        """Count the bytes of one entry in all columns."""
        return sum(map(self.page_bytes, COLUMNS.values())) // self.page_size

    def _codec(self, column: Column) -> Codec:
        return self.form.value if column.values else self.form.key


class Columns:
    """The tensors of a page pool, each ``[pages, *column.shape]`` and contiguous.

    Attributes:
        keys, values: their codes, which are the numbers themselves in the form ``auto``; keys are
            stored after RoPE.
        key_scale, value_scale: ``[pages, P, n]`` float16 beside the codes
            (:attr:`mmkv.engine.cache.forms.Codec.scales`); n is 0 in the form ``auto``.
        log_beta: log of the retention (DBTrimKV, arXiv 2605.09649, section 4); 0 where the policy
            reads no gates.
        position: 0-based token index (not the rope position).
        modality: 0 text, 1 image, 2 video.
        state: ``[pages, P, K]``, what the policy's scorer keeps with each entry
            (:attr:`mmkv.engine.policies.Needs.state`); K is 0 for most.
    """

    form = AUTO  # of a pool: its own

    keys: Annotated[Tensor, Column(None, "codes")]
    values: Annotated[Tensor, Column(None, "codes", values=True)]
    key_scale: Annotated[Tensor, Column(torch.float16, "scales")]
    value_scale: Annotated[Tensor, Column(torch.float16, "scales", values=True)]
    log_beta: Annotated[Tensor, Column(torch.float32)]
    position: Annotated[Tensor, Column(torch.int32)]
    modality: Annotated[Tensor, Column(torch.uint8)]
    state: Annotated[Tensor, Column(torch.float32, "state")]

    def columns(self) -> list[Tensor]:
        """Return the tensors in the order of :data:`COLUMNS`."""
        return list(_all(self))  # in every decode step: a loop over the names takes longer

    def store(self, slots: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Put keys and values ``[..., D]`` of the model into flat ``slots [...]``.

        Returns:
            both as attention reads them from now on: rounded, and rotated where the form is.
        """
        if self.form.plain:
            for column, made in ((self.keys, key), (self.values, value)):
                if made.device.type == "cpu":
                    column.flatten(0, 1).index_copy_(0, slots.flatten(), made.flatten(0, -2))
                else:  # whose rows need not lie together for this
                    column.flatten(0, 1)[slots] = made
            return key, value
        form = self.form
        return (
            self._store(self.keys, self.key_scale, form.key, slots, form.rotate(key)),
            self._store(self.values, self.value_scale, form.value, slots, form.rotate(value)),
        )

    def put_keys(self, slots: Tensor, key: Tensor) -> None:
        """Put keys ``[N, D]`` of the model in the place of those in flat ``slots [N]``."""
        if self.form.plain:
            self.keys.flatten(0, 1).index_copy_(0, slots, key)
        else:
            self._store(self.keys, self.key_scale, self.form.key, slots, self.form.rotate(key))

    def _store(
        self, column: Tensor, scale_column: Tensor, codec: Codec, slots: Tensor, x: Tensor
    ) -> Tensor:
        codes, scales = codec.encode(x)
        column.flatten(0, 1)[slots] = codes
        scale_column.flatten(0, 1)[slots] = scales
        return codec.decode(codes, scales, x.dtype)


COLUMNS: dict[str, Column] = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(Columns, include_extras=True).items()
}
_all = operator.attrgetter(*COLUMNS)
