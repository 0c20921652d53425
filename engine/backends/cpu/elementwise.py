"""What is between the products of a prompt, in C (elementwise.c)."""

from __future__ import annotations

import torch
from torch import Tensor

from mmkv.engine.backends.cpu.binding import Library, library
from mmkv.engine.model.elementwise import Elementwise, TorchElementwise

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
        """See :class:`Elementwise`."""
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

    def gated(self, gate_up: Tensor) -> Tensor:
        """See :class:`Elementwise`."""
        if not _plain(gate_up):
            return super().gated(gate_up)
        gate_up, inner = gate_up.contiguous(), gate_up.shape[-1] // 2
        made = gate_up.new_empty(*gate_up.shape[:-1], inner)
        threads, tokens = _threads(gate_up), made.numel() // inner
        self._library.mmkv_gated(gate_up.data_ptr(), tokens, inner, threads, made.data_ptr())
        return made


def _plain(*tensors: Tensor) -> bool:
    """Whether C can read these, and nobody asks for gradients of them."""
    asked = torch.is_grad_enabled() and any(each.requires_grad for each in tensors)
    here = (each.dtype == torch.float32 and each.device.type == "cpu" for each in tensors)
    return not asked and all(here)


def _threads(x: Tensor) -> int:
    return min(torch.get_num_threads(), 1 + x.numel() // _PER_THREAD)
