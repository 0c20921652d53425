"""C in the place of single torch functions: products, elementwise work, attention.

Each wrapper has the name and arguments of what it stands for.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from ctypes import byref, c_int64
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from mmkv.engine.backends.cpu.binding import (
    JOINS,
    DeltaTokens,
    Library,
    Linear,
    Patches,
    Window,
    library,
)
from mmkv.engine.backends.cpu.cache_views import CacheViews
from mmkv.engine.cache import RaggedCache
from mmkv.engine.model import delta as torch_delta
from mmkv.engine.model import product as reference
from mmkv.engine.model.elementwise import Elementwise, TorchElementwise
from mmkv.engine.model.panels import PANEL, Bf16Matrix, Rows
from mmkv.engine.model.product import (
    INTEGERS,
    Kernels,
    Matrix,
    Product,
    attend,
    attend_rounded,
    narrowed,
)
from mmkv.engine.model.rounded import PANEL as ROUNDED_PANEL
from mmkv.engine.model.rounded import IntegerMatrix
from mmkv.engine.policies.base import WindowReduction

# Multiplications that a further thread is worth: some 10 microseconds of one.
PER_THREAD = 2**20
# States that are multiplied together, which stay in the caches: 4,096 at once, as a picture has,
# took up to 1.6 times as long in 8 bits.
_TOGETHER = 768
# Rows of a matrix that are unpacked together for a gradient, a multiple of those of a panel.
_ROWS_BACK = 4096
# Copies in bfloat16 come on top of weights that a transformers model holds in float32.
_MOST_BF16_BYTES = 2**31


def rounded(weight: Tensor | Rows, bits: int = 8) -> IntegerMatrix:
    """Round a matrix to 8 or 4 bits like :meth:`IntegerMatrix.of`, to the same codes, in C.

    It runs there for float32 and bfloat16 weights on the CPU.
    """
    found, half, kind = library(), weight.dtype == torch.bfloat16, INTEGERS[bits]
    if isinstance(found, str) or not (half or weight.dtype == torch.float32):
        return kind.of(weight)
    rows, width = weight.shape
    sums = torch.empty(-(-rows // ROUNDED_PANEL), 2, dtype=torch.float64)
    threads = min(torch.get_num_threads(), 1 + rows * width // PER_THREAD)

    def fill(first: int, codes: Tensor, scales: Tensor) -> None:
        own = weight[first * ROUNDED_PANEL : (first + len(codes)) * ROUNDED_PANEL].contiguous()
        places = (each.data_ptr() for each in (codes, scales, sums[first:]))
        found.mmkv_round(own.data_ptr(), half, *own.shape, bits, *places, threads)

    codes, scales = kind.filled(rows, width, fill)
    wrong, whole = sums.sum(0).tolist()
    return kind(codes, scales, (rows, width), (wrong / whole) ** 0.5 if whole else 0.0)


def packed(weight: Tensor | Rows) -> Bf16Matrix:
    """Lay out a bfloat16 matrix like :meth:`Bf16Matrix.of`, in C where there is a library."""
    found = library()
    if isinstance(found, str):
        return Bf16Matrix.of(weight)
    rows, width = weight.shape
    threads = min(torch.get_num_threads(), 1 + rows * width // PER_THREAD)

    def fill(first: int, panels: Tensor) -> None:
        own = weight[first * PANEL : (first + len(panels)) * PANEL].contiguous()
        found.mmkv_pack(own.data_ptr(), *own.shape, panels.data_ptr(), threads)

    return Bf16Matrix.filled(rows, width, fill)


class Bf16Copies:
    """Copies of matrices in bfloat16, as long as nothing is lost and they stay small together."""

    def __init__(self) -> None:
        self.kept: list[Bf16Matrix] = []
        self._room = _MOST_BF16_BYTES

    def of(self, weight: Tensor) -> Bf16Matrix | None:
        """Return the copy; None where there is none."""
        if weight.numel() * 2 > self._room:
            return None
        short = narrowed(weight)
        if short is weight:
            return None
        copied = packed(short)
        self._room -= copied.nbytes
        self.kept.append(copied)
        return copied


def linear(
    weight: Matrix,
    bias: Tensor | None = None,
    bf16: Bf16Copies | None = None,
    rounds: bool = False,
) -> Linear:
    """Describe a matrix and its bias to C, which reads them where they lie.

    Args:
        bf16: takes copies of what bfloat16 holds exactly.
        rounds: whether panels in bfloat16 are multiplied by rounded states.
    """
    of_bias = None if bias is None else bias.data_ptr()
    if isinstance(weight, IntegerMatrix):
        pointers = weight.codes.data_ptr(), weight.scales.data_ptr()
        return Linear(None, of_bias, None, *pointers, *weight.shape, weight.bits, 0)
    short = weight if isinstance(weight, Bf16Matrix) else None if bf16 is None else bf16.of(weight)
    if short is not None:
        return Linear(None, of_bias, short.panels.data_ptr(), None, None, *weight.shape, 0, rounds)
    return Linear(weight.data_ptr(), of_bias, None, None, None, *weight.shape, 0, 0)


def native_kernels(form: str = "auto") -> Kernels:
    """Return the functions in C for weights in a form; those of torch where C is not there."""
    attention = functools.partial(attend_patches, rounds=form != "auto")
    return Kernels(
        native_product(form),
        rounded,
        packed,
        native_elementwise(),
        attention=None if isinstance(library(), str) else attention,
    )


def native_product(form: str = "auto") -> Product | None:
    """Return the product in C for weights in a form; None where there is none.

    Apple's clang compiles it for one thread only: there, torch's product of float32 is the faster,
    and ``auto`` takes it.
    """
    if isinstance(library(), str) or (sys.platform == "darwin" and form == "auto"):
        return None
    return multiply_rounded if form == "bf16" else multiply


def multiply_rounded(x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
    """Compute :func:`mmkv.engine.model.product.multiply_rounded`, in C where :func:`multiply` does.

    With AVX512-BF16, numbers below 2^-126 count as 0.
    """
    return multiply(x, weight, bias, rounds=True)


def multiply(x: Tensor, weight: Matrix, bias: Tensor | None = None, rounds: bool = False) -> Tensor:
    """Compute ``weight x + bias`` like :func:`mmkv.engine.model.product.multiply`.

    It runs in C for float32 ``x`` and weights in panels, of bfloat16, 8 or 4 bits, summed in
    float32 in vectors of the CPU's width; a row of the result does not depend on the others of
    ``x``.
    Gradients reach ``x`` alone. Where states are rounded, so are the gradients of what is made, and
    their products with the weights.
    """
    found = library()
    if isinstance(weight, Tensor) or isinstance(found, str) or x.dtype != torch.float32:
        return (reference.multiply_rounded if rounds else reference.multiply)(x, weight, bias)
    if torch.is_grad_enabled() and x.requires_grad:
        made: Tensor = _Frozen.apply(x, weight, bias, rounds)
        return made
    return _multiply(found, x, weight, bias, rounds)


class _Frozen(torch.autograd.Function):
    """The product with weights that are not trained."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Bf16Matrix | IntegerMatrix, bias: Tensor | None, rounds: bool
    ) -> Tensor:
        ctx.weight, ctx.rounds, found = weight, rounds, library()
        assert not isinstance(found, str)
        return _multiply(found, x, weight, bias, rounds)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        rows, width = ctx.weight.shape
        made = _multiply_back(grads[0].reshape(-1, rows), ctx.weight, ctx.rounds)
        return made.reshape(*grads[0].shape[:-1], width), None, None, None


def _multiply_back(grad: Tensor, weight: Bf16Matrix | IntegerMatrix, rounds: bool) -> Tensor:
    """Multiply float32 ``[n, out]`` by a matrix ``[out, in]``: ``[n, in]``.

    Some rows after the others, so that what is unpacked stays in the caches.
    """
    if not isinstance(weight, Bf16Matrix):
        return grad @ weight.wide()
    made, whole = None, weight.shape[0]
    for first in range(0, whole, _ROWS_BACK):
        after = min(first + _ROWS_BACK, whole)
        panels = weight.panels[first // PANEL : -(-after // PANEL)]
        rows = Bf16Matrix(panels, (after - first, weight.shape[1])).in_rows()
        part = grad[:, first:after]
        if rounds:
            product = (part.bfloat16() @ rows).float()
            made = product if made is None else made.add_(product)
        else:
            made = part @ rows.float() if made is None else made.addmm_(part, rows.float())
    assert made is not None
    return made


def _multiply(
    found: Library,
    x: Tensor,
    weight: Bf16Matrix | IntegerMatrix,
    bias: Tensor | None,
    rounds: bool,
) -> Tensor:
    """Multiply in C: float32 ``x [..., in]`` and ``[..., out]``. The caller has checked both."""
    rows, width = weight.shape
    x = x.contiguous()
    made = x.new_empty(*x.shape[:-1], rows)
    tokens = x.numel() // width
    map_, threads = byref(linear(weight, bias, rounds=rounds)), torch.get_num_threads()
    threads = min(threads, 1 + tokens * weight.numel() // PER_THREAD)
    parts = max(1, round(tokens / _TOGETHER))
    ends = [tokens * part // parts for part in range(parts + 1)]
    scratch = torch.empty(found.mmkv_product_scratch(map_, -(-tokens // parts)))
    for first, after in pairwise(ends):
        places = (4 * first * width + x.data_ptr(), 4 * first * rows + made.data_ptr())
        found.mmkv_product(map_, *places, after - first, threads, scratch.data_ptr())
    return made


# Numbers that are worth a thread.
_PER_THREAD = 2**15


def native_elementwise() -> Elementwise:
    """Return the functions in C; those of torch where C is not there."""
    found = library()
    return TorchElementwise() if isinstance(found, str) else NativeElementwise(found)


class NativeElementwise(TorchElementwise):
    """Computes in C for float32 on a CPU, where no gradient is asked for; else in torch."""

    def __init__(self, found: Library) -> None:
        self._library = found

    def norm(self, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        if not _plain(x, gain):
            return super().norm(x, gain, eps)
        x, gain = x.contiguous(), gain.contiguous()
        made, size = torch.empty_like(x), x.shape[-1]
        pointers = x.data_ptr(), gain.data_ptr()
        tokens = x.numel() // size
        self._library.mmkv_norm(*pointers, tokens, size, eps, _threads(x), made.data_ptr())
        return made

    def turned(
        self, heads: Tensor, gain: Tensor | None, eps: float, rope: tuple[Tensor, Tensor]
    ) -> Tensor:
        """See :class:`Elementwise`: the result lies where ``heads`` lay."""
        tokens, count, dim = heads.shape
        cos, sin = rope
        lies_together = heads.stride()[1:] == (dim, 1)
        if not lies_together or not _plain(heads, cos, sin, *([] if gain is None else [gain])):
            return super().turned(heads, gain, eps, rope)
        cos, sin = cos.contiguous(), sin.contiguous()
        gain = None if gain is None else gain.contiguous()
        self._library.mmkv_turn(
            heads.data_ptr(),
            tokens,
            heads.stride(0),
            count,
            dim,
            cos.shape[-1],
            None if gain is None else gain.data_ptr(),
            eps,
            cos.data_ptr(),
            sin.data_ptr(),
            _threads(heads),
        )
        return heads

    def gated(self, gate_up: Tensor, activation: str = "silu") -> Tensor:
        if not _plain(gate_up):
            return super().gated(gate_up, activation)
        gate_up, inner = gate_up.contiguous(), gate_up.shape[-1] // 2
        made = gate_up.new_empty(*gate_up.shape[:-1], inner)
        threads, tokens = _threads(gate_up), made.numel() // inner
        how = tokens, inner, activation == "gelu_tanh", threads
        self._library.mmkv_gated(gate_up.data_ptr(), *how, made.data_ptr())
        return made


def _plain(*tensors: Tensor) -> bool:
    """Whether C can read these, and nobody asks for gradients of them."""
    asked = torch.is_grad_enabled() and any(each.requires_grad for each in tensors)
    here = (each.dtype == torch.float32 and each.device.type == "cpu" for each in tensors)
    return not asked and all(here)


def _threads(x: Tensor) -> int:
    return min(torch.get_num_threads(), 1 + x.numel() // _PER_THREAD)


def native_window_attention(
    cache: RaggedCache, seq: int, queries: Tensor, seen: int, reduction: WindowReduction
) -> Tensor:
    """Compute what the last queries pay to every entry of a sequence, row after row.

    Args:
        queries: float32 ``[L, Hq, w, D]``, the query of token p in slot ``p % w``.
        seen: tokens of the sequence so far; reduction: how heads and queries are joined.

    Returns:
        float32 ``[N]``.
    """
    loaded = library()
    assert not isinstance(loaded, str), loaded
    length = cache.length[seq]
    threads, dim = torch.get_num_threads(), queries.shape[-1]
    queries = queries.contiguous()
    what = Window(
        queries=queries.data_ptr(),
        group=queries.shape[1] // cache.kv_heads,
        size=queries.shape[2],
        seen=seen,
        join=JOINS.index(reduction.group),
        logits=reduction.of == "logits",
        greatest=reduction.queries == "max",
    )
    room = loaded.mmkv_window_scratch(byref(what), dim, int(length.max()), threads)
    scratch, out = torch.empty(room), torch.empty(int(length.sum()))
    what.scratch, what.out = scratch.data_ptr(), out.data_ptr()
    views = CacheViews().of(cache, [seq])
    loaded.mmkv_window(views, byref(what), threads)
    return out


def native_chunk_attention() -> NativeChunkAttention | None:
    """Return the function in C; None where C is not there."""
    found = library()
    return None if isinstance(found, str) else NativeChunkAttention(found)


class NativeChunkAttention:
    """Attends from a chunk's queries to what its sequence held before it, and to the chunk.

    Stands for :func:`chunk_attention` and :func:`ragged_attention` of
    :mod:`mmkv.engine.backends.torch` together, where the pool computes in float32 and no window
    limits what is seen. The softmax runs on from one stretch of entries to the next (arXiv
    1805.02867).
    """

    def __init__(self, found: Library) -> None:
        self._library, self._views = found, CacheViews()
        self._scratch = torch.empty(0)

    @staticmethod
    def takes(cache: RaggedCache) -> bool:
        """Whether C can read this cache."""
        return cache.length.device.type == "cpu" and cache.pool.dtype == torch.float32

    def __call__(self, cache: RaggedCache, seq: int, layer: int, query: Tensor) -> Tensor:
        """Compute the attention of the last T tokens of a chunk.

        Args:
            query: float32 ``[T, Hq, D]``, rotated as the pool's keys are. The chunk's entries are
                stored already, as the last ones of each row of the layer.

        Returns:
            float32 ``[T, Hq D]``, rotated as the pool's values are.
        """
        tokens, heads, dim = query.shape
        if query.stride()[1:] != (dim, 1):
            query = query.contiguous()
        out, threads = query.new_empty(tokens, heads * dim), c_int64()
        rows = layer * cache.kv_heads, cache.kv_heads, heads // cache.kv_heads
        views = self._views.of(cache, [seq])
        most = torch.get_num_threads()
        size = self._library.mmkv_attend_chunk_plan(views, *rows, tokens, most, byref(threads))
        if self._scratch.numel() < threads.value * size:
            self._scratch = torch.empty(threads.value * size)
        places = self._scratch.data_ptr(), out.data_ptr()
        asked = query.data_ptr(), query.stride(0), tokens
        self._library.mmkv_attend_chunk(views, *rows, *asked, threads.value, size, *places)
        return out


def attend_patches(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    starts: Sequence[int],
    rounds: bool = False,
) -> Tensor:
    """Attend from pictures' patches to each other, as :class:`PatchAttention` says, in C.

    Keys are taken block by block, so that there is never a score for each pair of patches (arXiv
    1805.02867). Sums are float32.

    Args:
        rounds: whether queries, keys, values and what they are weighted by are rounded to bfloat16:
            a CPU with AVX512-BF16 then multiplies them at twice the rate.
    """
    loaded = library()
    if isinstance(loaded, str):  # switched off since the model was loaded
        return (attend_rounded if rounds else attend)(query, key, value, scale, starts)
    three = [x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value)]
    batch, heads, tokens, dim = query.shape
    out, places = query.new_empty(batch, tokens, heads, dim), torch.tensor(starts)
    what = Patches(
        *(x.data_ptr() for x in three),
        out=out.data_ptr(),
        batch=batch,
        heads=heads,
        tokens=tokens,
        dim=dim,
        parts=len(starts) - 1,
        start=places.data_ptr(),
        scale=scale,
        rounds=rounds,
    )
    for own, x in zip(what.stride, three, strict=True):
        own[:] = x.stride()[:3]
    pairs = sum((after - first) ** 2 for first, after in pairwise(starts))
    most = 1 + batch * heads * dim * pairs // PER_THREAD
    threads = min(torch.get_num_threads(), most)
    scratch = torch.empty(threads * loaded.mmkv_attend_patches_scratch(byref(what)))
    loaded.mmkv_attend_patches(byref(what), threads, scratch.data_ptr())
    return out


def causal_conv(x: Tensor, weight: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Compute :func:`mmkv.engine.model.delta.causal_conv`, in C for float32 on a CPU."""
    found = library()
    if isinstance(found, str) or not _plain(x, weight, state):
        return torch_delta.causal_conv(x, weight, state)
    states = state.clone(memory_format=torch.contiguous_format)[None]
    made = _convolve(found, x[None], weight, states, torch.zeros(1, dtype=torch.int64))
    return made[0], states[0]


def conv_step(x: Tensor, weight: Tensor, states: Tensor, slot: Tensor) -> Tensor:
    """Compute :func:`mmkv.engine.model.delta.conv_step`, in C for float32 on a CPU."""
    found = library()
    if isinstance(found, str) or not (_plain(x, weight, states) and states.is_contiguous()):
        return torch_delta.conv_step(x, weight, states, slot)
    return _convolve(found, x[:, None], weight, states, slot)[:, 0]


def _convolve(found: Library, x: Tensor, weight: Tensor, states: Tensor, slot: Tensor) -> Tensor:
    """Convolve ``x [B, T, C]``, where B or T is 1, after the states of its slots, in place."""
    batch, tokens, channels = x.shape
    x = x if x.stride(2) == 1 else x.contiguous()
    stride = x.stride(1 if batch == 1 else 0)
    weight, slot, made = weight.contiguous(), slot.contiguous(), torch.empty(*x.shape)
    sizes = batch, tokens, channels, weight.data_ptr(), weight.shape[1]
    places = states.data_ptr(), slot.data_ptr()
    found.mmkv_conv(x.data_ptr(), stride, *sizes, *places, _threads(x), made.data_ptr())
    return made


def delta_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor, slot: Tensor
) -> Tensor:
    """Compute :func:`mmkv.engine.model.delta.delta_step`, in C for float32 on a CPU."""
    found = library()
    if isinstance(found, str) or not (_plain(q, k, v, g, beta, states) and states.is_contiguous()):
        return torch_delta.delta_step(q, k, v, g, beta, states, slot)
    slot = slot.contiguous()
    what, out, _kept = _delta(q, k, v, g, beta)
    threads = min(_delta_threads(what), what.tokens * what.key_heads)
    found.mmkv_delta_step(byref(what), states.data_ptr(), slot.data_ptr(), threads)
    return out


def delta_chunk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute :func:`mmkv.engine.model.delta.delta_chunk`, in C for float32 on a CPU.

    A value head's numbers do not depend on threads.
    """
    found = library()
    if isinstance(found, str) or not _plain(q, k, v, g, beta, state):
        return torch_delta.delta_chunk(q, k, v, g, beta, state)
    state = state.clone(memory_format=torch.contiguous_format)
    what, out, _kept = _delta(q, k, v, g, beta)
    threads = min(_delta_threads(what), what.value_heads)
    scratch = torch.empty(threads * found.mmkv_delta_scratch(what.dk, what.dv))
    found.mmkv_delta_chunk(byref(what), state.data_ptr(), threads, scratch.data_ptr())
    return out, state


def _delta(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
) -> tuple[DeltaTokens, Tensor, list[Tensor]]:
    """Describe tokens to C: the structure, where its result goes, and what must live meanwhile."""
    three = [x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous() for x in (q, k, v)]
    rates = [x.contiguous() for x in (g, beta)]
    out = v.new_empty(v.shape)
    what = DeltaTokens(
        *(x.data_ptr() for x in (*three, *rates)),
        out=out.data_ptr(),
        tokens=len(v),
        key_heads=k.shape[1],
        value_heads=v.shape[1],
        dk=k.shape[2],
        dv=v.shape[2],
    )
    what.stride[:] = [x.stride(0) for x in three]
    return what, out, [*three, *rates]


def _delta_threads(what: DeltaTokens) -> int:
    numbers = what.tokens * what.value_heads * what.dk * what.dv
    return min(torch.get_num_threads(), 1 + 3 * numbers // PER_THREAD)
