"""Read the matrices of quantised checkpoints: as plain numbers, or as the whole numbers they are.

Every method here stores values and steps; a number of the matrix is the one times the other,
rounded once to the dtype that the method's own library gives it. A matrix is made by itself, some
rows at a time. Where a checkpoint's values are whole numbers and its steps serve whole blocks of
32 columns, :class:`Grid` passes both on, so that 4 bits stay those 4 bits.

Scales of activations and of a quantised KV cache say how to round what a model computes, and not
what it is: they are not used here.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmkv.engine.errors import ModelError
from mmkv.engine.model.source import (
    GPTQ_BITS,
    gptq_packing,
    quantisation_method,
    require_known_quantisation,
)
from mmkv.engine.model.stored import ChangedTensors, Grid, StoredTensors

_BLOCK = 128  # rows and columns that share a step in FP8, unless the config says otherwise
_AT_ONCE = 2**20  # numbers that are made together
_OF_ACTIVATIONS = re.compile(
    r"\.(?:(?:input|output|activation|[qkv]|prob_output)_(?:global_)?(?:scale(?:_inv)?|zero_point))$"
)
_QUANT_STATE = ".weight.quant_state.bitsandbytes__"
# What may stand beside a matrix of bitsandbytes, in 4 and in 8 bits.
_NF = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")
_SHORT = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_FP8 = {"F8_E4M3", "F8_E5M2"}
_STEPS = {*_SHORT.values(), "F8_E4M3", "F8_E8M0"}
_WORDS = {"I32"}
# Values of a 4-bit float with 2 bits of exponent and 1 of mantissa.
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
# AWQ has column 8 i + n of a row in the n-th of these nibbles of word i.
_AWQ_NIBBLES = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])

_Rows = Callable[[int, int], Tensor]


@dataclass(frozen=True)
class _Read:
    """A matrix ``[out, in]`` that was read: its parts are in memory.

    Attributes:
        values: gives rows as numbers ``[rows, in]``. steps: gives float32 ``[rows, groups]``, one
            for every ``in / groups`` columns.
        order: int64 ``[in]``, the group of each column; None: one group after the other.
    """

    values: _Rows
    steps: _Rows
    order: Tensor | None = None

    def rows(self, first: int, after: int) -> Tensor:
        """Return rows in float32."""
        values, steps = self.values(first, after).float(), self.steps(first, after).float()
        if self.order is not None:
            return values.mul_(steps[:, self.order])
        return (values.unflatten(1, (steps.shape[1], -1)) * steps.unsqueeze(2)).flatten(1)


@dataclass(frozen=True)
class _Matrix:
    """A matrix that can be read.

    Attributes:
        shape: ``(out, in)``. dtype: of its numbers. read: reads its parts.
        whole: its values are whole numbers.
    """

    shape: tuple[int, int]
    dtype: torch.dtype
    read: Callable[[], _Read]
    whole: bool = False


def settings_of(config: Any) -> dict[str, Any] | None:
    """Take what a config says of quantisation out of it; None where it says nothing.

    transformers would look for the method's own library.

    Raises:
        ModelError: the method, or this variant of it, is none of those that are read.
    """
    found = None
    for part in (config.get_text_config(), config):
        for name in ("compression_config", "quantization_config"):
            if (said := vars(part).pop(name, None)) is not None:
                found = said if isinstance(said, dict) else said.to_dict()
    if found is None:
        return None
    require_known_quantisation(found)
    return found


class QuantisedTensors(ChangedTensors):
    """Shows quantised matrices under the names and in the shapes of plain ones.

    What the checkpoint left plain stays as it is.

    Args:
        below: the checkpoint's files. settings: what :func:`settings_of` gave.
        dtype: of the matrices where neither the method nor its steps say one.

    Raises:
        ModelError: parts of a matrix are missing or do not fit each other.
    """

    def __init__(
        self, below: StoredTensors, settings: Mapping[str, Any], dtype: torch.dtype
    ) -> None:
        super().__init__(below)
        self._method, self._said, self._dtype = quantisation_method(settings), settings, dtype
        self.settings += json.dumps(settings, sort_keys=True, default=str)
        self._names = below.names
        self._matrices: dict[str, _Matrix] = {}
        scales = {name for name in self._names if _OF_ACTIVATIONS.search(name)}
        self.hidden |= scales
        for name in sorted(self._names - scales):
            self._look_at(name)
        for name, matrix in self._matrices.items():
            self.changed[name] = matrix.shape, _SHORT[matrix.dtype]
        for name in sorted(self._names - self.hidden):
            if len(below.shape(name)) > 1 and below.kind(name) in {*_FP8, "I8", "U8", *_WORDS}:
                raise ModelError(
                    f"{name} holds {below.kind(name)} without the parts that {self._method} has "
                    "beside it under these names; get the complete checkpoint"
                )
        if scales:
            self.note = (
                f"scales of activations or of the KV cache in this {self._method} checkpoint are "
                "not used; its weights are"
            )

    def made(self, name: str) -> Tensor:
        """See :class:`ChangedTensors`."""
        matrix = self._matrices[name]
        rows, columns = matrix.shape
        read, made = matrix.read(), torch.empty(matrix.shape, dtype=matrix.dtype)
        each = max(1, _AT_ONCE // columns)
        for first in range(0, rows, each):
            made[first : first + each] = read.rows(first, min(first + each, rows))
        return made

    def grid(self, name: str) -> Grid | None:
        """See :class:`StoredTensors`."""
        if name not in self._matrices:
            return self.below.grid(name)
        matrix = self._matrices[name]
        rows, columns = matrix.shape
        read = matrix.read() if matrix.whole else None
        if read is None or read.order is not None:
            return None
        codes = torch.empty(matrix.shape, dtype=torch.int8)
        each = max(1, _AT_ONCE // columns)
        for first in range(0, rows, each):
            values = read.values(first, min(first + each, rows))
            if int(values.min()) < -128 or int(values.max()) > 127:
                return None
            codes[first : first + each] = values
        return Grid(codes, read.steps(0, rows).float())

    def _look_at(self, name: str) -> None:
        """Note the matrix that a tensor is the first part of, if it is one."""
        module, _, part = name.rpartition(".")
        match self._method, part:
            case "awq" | "gptq", "qweight":
                parts = {p: f"{module}.{p}" for p in ("qweight", "qzeros", "scales", "g_idx")}
                made = self._awq(parts) if self._method == "awq" else self._gptq(parts)
            case "compressed-tensors", "weight_packed":
                parts = self._beside(module, "packed", "scale", "shape", "zero_point", "g_idx")
                parts["global"] = f"{module}.weight_global_scale"
                packed = self.below.kind(name)
                made = self._fp4(parts) if packed == "U8" else self._packed(parts)
            case "compressed-tensors" | "fp8", "weight" if self.below.kind(name) in {*_FP8, "I8"}:
                parts = self._beside(module, "scale_inv", "scale", "zero_point")
                made = self._scaled(name, parts)
            case "bitsandbytes", "weight" if f"{name}.absmax" in self._names:
                parts = {"weight": name} | {part[1:]: f"{name}{part}" for part in _NF}
                made = self._four_bits(name, parts)
            case "bitsandbytes", "weight" if f"{module}.SCB" in self._names:
                parts = {p: f"{module}.{p}" for p in ("weight", "SCB", "weight_format")}
                made = self._eight_bits(parts)
            case _:
                return
        self._matrices[f"{module}.weight"] = made
        self.hidden |= {*parts.values(), name} & self._names

    @staticmethod
    def _beside(module: str, *parts: str) -> dict[str, str]:
        return {part: f"{module}.weight_{part}" for part in parts}

    def _needed(
        self,
        name: str,
        shape: tuple[int | None, ...] | None = None,
        kinds: Collection[str] = (),
    ) -> tuple[int, ...]:
        """Return the shape of a part.

        Raises:
            ModelError: it is not there, or has another shape or another dtype than one of these.
        """
        if name not in self._names:
            raise ModelError(
                f"{name} is missing, which {self._method} has beside its weights; get the complete "
                "checkpoint"
            )
        found, kind = self.below.shape(name), self.below.kind(name)
        alike = shape is None or (
            len(found) == len(shape)
            and all(n in (None, m) for m, n in zip(found, shape, strict=True))
        )
        if not alike or 0 in found or (kinds and kind not in kinds):
            raise ModelError(
                f"{name} is {kind} {list(found)}, which does not fit the other parts of this "
                f"{self._method} matrix; get the original file"
            )
        return found

    def _steps(self, name: str, shape: tuple[int | None, ...] | None = None) -> tuple[int, ...]:
        return self._needed(name, shape, _STEPS)

    def _part(self, name: str) -> Tensor:
        return self.below.read_as_stored(name)

    def _order(self, name: str, groups: int) -> Tensor:
        """Return the group of each column. Raises ModelError: there are fewer groups."""
        order = self._part(name).long()
        if int(order.min()) < 0 or int(order.max()) >= groups:
            raise ModelError(f"{name} names groups that have no steps; get the original file")
        return order

    def _dtype_of(self, scales: str) -> torch.dtype:
        """Return the dtype of a matrix: that of its steps if they have 16 bits."""
        return {"F16": torch.float16, "BF16": torch.bfloat16}.get(
            self.below.kind(scales), self._dtype
        )

    def _scaled(self, name: str, parts: Mapping[str, str]) -> _Matrix:
        """Look at values in FP8 or int8, with a step for all, each row, its groups or a block."""
        rows, columns = self._needed(name, (None, None))
        inverse = parts["scale_inv"] in self._names
        scales, zeros = parts["scale_inv" if inverse else "scale"], parts["zero_point"]
        shape = self._steps(scales)
        high, wide = (*shape, 1, 1)[:2]
        tall, broad = self._block(inverse)
        if (high, wide) != (-(-rows // tall), -(-columns // broad)) or len(shape) > 2:
            if high not in (1, rows) or columns % wide or len(shape) > 2:
                self._steps(scales, (-1,))
            tall, broad = rows // high, columns // wide
        order = None if wide * broad == columns else torch.arange(columns) // broad
        if offsets := zeros in self._names:
            self._needed(zeros, shape)
        whole = self.below.kind(name) == "I8"

        def read() -> _Read:
            stored, steps = self._part(name), self._part(scales).float().view(high, wide)
            zero = self._part(zeros).view(high, wide) if offsets else None

            def values(first: int, after: int) -> Tensor:
                if zero is None:
                    return stored[first:after]
                return _less(stored[first:after].short(), zero[places(first, after)].short(), order)

            def places(first: int, after: int) -> Tensor:
                return torch.arange(first, after) // tall

            return _Read(values, lambda first, after: steps[places(first, after)], order)

        dtype = self._dtype if inverse else self._dtype_of(scales)
        return _Matrix((rows, columns), dtype, read, whole)

    def _block(self, inverse: bool) -> tuple[int, int]:
        """Return rows and columns of a block that shares a step; ``inverse``: in FP8."""
        said = self._said.get("weight_block_size")
        for group in (self._said.get("config_groups") or {}).values():
            said = said or (group.get("weights") or {}).get("block_structure")
        if said is None:
            return (_BLOCK, _BLOCK) if inverse else (1, 1)
        rows, columns = said
        return max(int(rows), 1), max(int(columns), 1)

    def _packed(self, parts: Mapping[str, str]) -> _Matrix:
        """Look at compressed-tensors' whole numbers: bits one after the other along a row."""
        name, scales, zeros, places = (parts[p] for p in ("packed", "scale", "zero_point", "g_idx"))
        rows, words = self._needed(name, (None, None), _WORDS)
        self._needed(parts["shape"], (2,))
        shape = tuple(self.below.tensor(parts["shape"]).tolist())
        bits = 32 * words // shape[1] if shape[0] == rows and shape[1] > 0 else 0
        if not 1 <= bits <= 8 or words != -(-shape[1] * bits // 32):
            self._needed(name, (shape[0], -1))
        groups = self._groups(scales, rows, shape[1])
        if offsets := zeros in self._names:
            self._needed(zeros, (-(-rows * bits // 32), groups), _WORDS)
        if ordered := places in self._names:
            self._needed(places, (shape[1],))

        def read() -> _Read:
            packed, steps = self._part(name), self._part(scales).view(rows, groups)
            zero = _unpacked(self._part(zeros).T, bits, rows).T if offsets else 2 ** (bits - 1)
            order = self._order(places, groups) if ordered else None

            def values(first: int, after: int) -> Tensor:
                found = _unpacked(packed[first:after], bits, shape[1])
                away = zero[first:after] if isinstance(zero, Tensor) else zero
                return _less(found, away, order)

            return _Read(values, lambda first, after: steps[first:after], order)

        return _Matrix((rows, shape[1]), self._dtype_of(scales), read, True)

    def _groups(self, scales: str, rows: int, columns: int) -> int:
        """Return how many steps ``[rows, groups]`` or ``[rows]`` a row has."""
        found = self._steps(scales)
        groups = found[1] if len(found) > 1 else 1
        if found[0] != rows or len(found) > 2 or columns % groups:
            self._steps(scales, (rows, -1))
        return groups

    def _fp4(self, parts: Mapping[str, str]) -> _Matrix:
        """Look at NVFP4: 4-bit floats, a step in FP8 for 16 of them, and one for all."""
        name, scales, of_all = parts["packed"], parts["scale"], parts["global"]
        rows, half = self._needed(name, (None, None))
        self._groups(scales, rows, 2 * half)
        self._steps(of_all, (1,))

        def read() -> _Read:
            packed, steps, scale = map(self._part, (name, scales, of_all))

            def values(first: int, after: int) -> Tensor:
                codes = _nibbles(packed[first:after])
                return _E2M1[(codes & 7).long()] * (1 - 2 * (codes >> 3).float())

            return _Read(values, lambda first, after: steps[first:after].float() / scale.float())

        return _Matrix((rows, 2 * half), torch.bfloat16, read)

    def _awq(self, parts: Mapping[str, str]) -> _Matrix:
        """Look at AWQ: each row of ``qweight`` is an input, eight outputs are in a word."""
        name, scales, zeros = (parts[part] for part in ("qweight", "scales", "qzeros"))
        columns, words = self._needed(name, (None, None), _WORDS)
        groups, rows = self._steps(scales, (None, 8 * words))
        self._needed(zeros, (groups, words), _WORDS)
        if columns % groups:
            self._steps(scales, (-1, rows))

        def read() -> _Read:
            packed, steps, zero = map(self._part, (name, scales, zeros))

            def outputs(part: Tensor, first: int, after: int) -> Tensor:
                inside = part[:, first // 8 : -(-after // 8)].contiguous()
                each = (inside.unsqueeze(2) >> (4 * _AWQ_NIBBLES).int()) & 15
                return each.flatten(1).T[first % 8 :][: after - first]

            def values(first: int, after: int) -> Tensor:
                return _less(outputs(packed, first, after), outputs(zero, first, after), None)

            return _Read(values, lambda first, after: steps.T[first:after])

        return _Matrix((rows, columns), self._dtype_of(scales), read, True)

    def _gptq(self, parts: Mapping[str, str]) -> _Matrix:
        """Look at GPTQ: inputs lie one behind the other in words, each column is an output."""
        name, scales, zeros, places = (parts[p] for p in ("qweight", "scales", "qzeros", "g_idx"))
        bits = int(self._said.get("bits", 4))
        words, rows = self._needed(name, (None, None), _WORDS)
        if self._said.get("dynamic"):  # some modules have bits of their own: zero points tell
            bits = 32 * self._needed(zeros, (None, None), _WORDS)[1] // rows
            if bits not in GPTQ_BITS:
                self._needed(zeros, (-1, -1))
        mask = 2**bits - 1
        columns = 32 * words // bits
        if 32 * words % bits:  # 32 inputs of 3 bits are in three words
            self._needed(name, (-1, rows))
        groups, _ = self._steps(scales, (None, rows))
        self._needed(zeros, (groups, -(-rows * bits // 32)), _WORDS)
        ordered = places in self._names
        if ordered:
            self._needed(places, (columns,))
        # The first form stores a zero point less one, which wraps around.
        more = 0 if gptq_packing(self._said) == "gptq_v2" else 1
        size = -(-columns // groups)

        def read() -> _Read:
            packed, steps = self._part(name), self._part(scales)
            zero = (_unpacked(self._part(zeros), bits, rows) + more).T & mask
            order = in_turn = torch.arange(columns) // size
            if ordered:
                order = self._order(places, groups)
            even = columns % groups == 0 and torch.equal(order, in_turn)
            places_of = None if even else order

            def values(first: int, after: int) -> Tensor:
                found = _unpacked(packed.T[first:after], bits, columns)
                return _less(found, zero[first:after], places_of)

            return _Read(values, lambda first, after: steps.T[first:after], places_of)

        return _Matrix((rows, columns), self._dtype_of(scales), read, True)

    def _four_bits(self, name: str, parts: dict[str, str]) -> _Matrix:
        """Look at bitsandbytes' nf4 or fp4: codes of a table, the greatest number of each block."""
        state = next((n for n in self._names if n.startswith(f"{name}.quant_state.")), "")
        if not state.removeprefix(name).startswith(_QUANT_STATE.removeprefix(".weight")):
            self._needed(f"{name}.quant_state.bitsandbytes__nf4")
        parts["state"] = state
        try:
            said = json.loads(bytes(self.below.tensor(state).tolist()))
            rows, columns = map(int, said["shape"])
            size, dtype = int(said["blocksize"]), getattr(torch, said["dtype"])
            nested = parts["nested_absmax"] in self._names
            said |= {} if nested else {"nested_offset": 0, "nested_blocksize": 1}
            offset, nested_size = float(said["nested_offset"]), int(said["nested_blocksize"])
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ModelError(f"{state} cannot be read; get the original file") from error
        count, whole = rows * columns, self.below.shape(name)
        stored = math.prod(whole) * self._part(name).element_size() if 0 not in whole else 0
        if dtype not in _SHORT or size < 1 or nested_size < 1 or stored != -(-count // 2):
            self._needed(name, (-1,))
        blocks = -(-count // size)
        # Codes of a table where they are quantised themselves, else numbers.
        self._needed(parts["absmax"], (blocks,), {"U8"} if nested else _SHORT.values())
        self._needed(parts["quant_map"], (16,))
        if nested:
            self._needed(parts["nested_absmax"], (-(-blocks // nested_size),))
            self._needed(parts["nested_quant_map"], (256,))

        def read() -> _Read:
            packed = self._part(name).view(torch.uint8).flatten()
            table, absmax = self._part(parts["quant_map"]), self._part(parts["absmax"])
            if nested:
                codes, of_all = (self._part(parts[f"nested_{p}"]) for p in ("quant_map", "absmax"))
                absmax = codes[absmax.long()] * of_all[torch.arange(blocks) // nested_size] + offset
            even = columns % size == 0

            def values(first: int, after: int) -> Tensor:
                begin, end = first * columns, after * columns
                pairs = packed[begin // 2 : -(-end // 2)]
                both = torch.stack((pairs >> 4, pairs & 15), 1).flatten()
                inside = both[begin % 2 :][: end - begin]
                return table[inside.long()].view(after - first, columns)

            def steps(first: int, after: int) -> Tensor:
                if even:
                    return absmax.view(rows, -1)[first:after]
                places = torch.arange(first * columns, after * columns) // size
                return absmax[places].view(after - first, columns)

            return _Read(values, steps)

        return _Matrix((rows, columns), dtype, read)

    def _eight_bits(self, parts: Mapping[str, str]) -> _Matrix:
        """Look at bitsandbytes' int8: the greatest number of a row is 127."""
        name, scales = parts["weight"], parts["SCB"]
        rows, columns = self._needed(name, (None, None))
        self._steps(scales, (rows,))

        def read() -> _Read:
            stored, steps = self._part(name), self._part(scales).float().unsqueeze(1) / 127
            return _Read(lambda first, after: stored[first:after], lambda f, a: steps[f:a])

        return _Matrix((rows, columns), self._dtype, read, True)


def _less(codes: Tensor, zeros: Tensor | int, order: Tensor | None) -> Tensor:
    """Return ``codes [rows, in]`` without their zero points ``[rows, groups]``."""
    if isinstance(zeros, int):
        return codes - zeros
    if order is not None:
        return codes - zeros[:, order]
    return (codes.unflatten(1, (zeros.shape[1], -1)) - zeros.unsqueeze(2)).flatten(1)


def _unpacked(words: Tensor, bits: int, count: int) -> Tensor:
    """Return int32 ``[rows, count]`` of int32 words ``[rows, ...]``, the lowest bits first."""
    if bits == 4:
        return _nibbles(words.contiguous().view(torch.uint8))[:, :count].int()
    begin = torch.arange(count) * bits
    word, shift = begin // 32, begin % 32
    wide = words.long() & 0xFFFFFFFF
    following = wide[:, (word + 1).clamp(max=words.shape[1] - 1)]
    both = wide[:, word] | torch.where(shift + bits > 32, following << 32, 0)
    return (both >> shift & 2**bits - 1).int()


def _nibbles(stored: Tensor) -> Tensor:
    """Return uint8 ``[rows, 2 n]`` of bytes ``[rows, n]``, the lower half first."""
    return torch.stack((stored & 15, stored >> 4), 2).flatten(1)
