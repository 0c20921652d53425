"""What a decode step, an eviction or a burst of steps runs on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from mmkv.engine.backends.base import Backend, Batch, LoadedModel
from mmkv.engine.backends.cpu import kernels as cpu_kernels
from mmkv.engine.backends.cpu.backend import CpuBackend
from mmkv.engine.backends.cpu.kernels import native_kernels, rounded
from mmkv.engine.backends.cuda.backend import CudaBackend
from mmkv.engine.backends.cuda.kernels import delta as cuda_delta
from mmkv.engine.backends.cuda.kernels.experts import experts
from mmkv.engine.backends.cuda.kernels.pointwise import TritonElementwise
from mmkv.engine.backends.cuda.kernels.product import product_for
from mmkv.engine.backends.torch.backend import TorchBackend
from mmkv.engine.model.delta import DeltaFunctions
from mmkv.engine.model.product import Kernels
from mmkv.engine.scorer_state import WindowAttention, window_attention

if TYPE_CHECKING:
    from mmkv.engine.backends.base import ChunkFunction
    from mmkv.engine.cache import RaggedCache

# All there are, and the order in which they are asked; the last one runs everything.
BACKENDS: tuple[type[Backend], ...] = (CpuBackend, CudaBackend, TorchBackend)


def kernels_for(form: str, device: torch.device | None = None) -> Kernels:
    """Return the functions that prompts are computed with, for weights in a form.

    Those in C; on a GPU its own, while weights are still rounded in C.
    """
    native = native_kernels(form)
    if device is None or device.type == "cpu":
        return native
    return replace(
        native,
        product=product_for(form),
        rounded=lambda weight, bits: rounded(weight.cpu(), bits).to(weight.device),
        packed=None,
        elementwise=TritonElementwise(),
        experts=experts,
        attention=None,
    )


def delta_functions(device: torch.device) -> DeltaFunctions:
    """Return what layers of the gated delta rule compute with on a device."""
    found = cuda_delta if device.type == "cuda" else cpu_kernels
    return DeltaFunctions(found.causal_conv, found.conv_step, found.delta_step, found.delta_chunk)


class Backends:
    """The backends of one engine; each is an attribute by its name, too (``backends.cpu``)."""

    def __init__(self, model: LoadedModel, cache: RaggedCache) -> None:
        self._model = model
        self.each = [kind(model, cache) for kind in BACKENDS]
        self._by_name = {backend.name: backend for backend in self.each}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._by_name:
            raise AttributeError(f"there is no backend {name!r}")
        return self._by_name[name]

    @property
    def stepping(self) -> list[Backend]:
        """Those that decode steps where the model is."""
        here = self._model.device.type
        return [each for each in self.each if each.steps and here in each.devices]

    def for_step(self, batch: Batch) -> Backend:
        """Return the first that can decode a step of this batch."""
        for backend in self.stepping:
            if not backend.unsupported_reason(batch):
                return backend
        raise AssertionError("the last backend runs everything")

    def first(self, why_not: Callable[[Backend], str]) -> tuple[Backend, str]:
        """Return the first that steps and that ``why_not`` says nothing against.

        And what it says against the one before, or "".
        """
        why = ""
        for backend in self.stepping:
            before, why = why, why_not(backend)
            if not why:
                return backend, before
        raise AssertionError("the last backend runs everything")

    def for_bursts(self) -> Backend:
        """Return the first that can decode bursts; where none can, the first that ever does."""
        bursting = [backend for backend in self.each if backend.bursts]
        return next((each for each in bursting if not each.burst_reason()), bursting[0])

    @property
    def chunk_attention(self) -> ChunkFunction | None:
        """The first form there is of a chunk's attention, or None: torch's."""
        found = (backend.chunk_attention for backend in self.each)
        return next((each for each in found if each is not None), None)

    @property
    def window_attention(self) -> WindowAttention:
        """The first form there is of what scorers ask for of the newest queries."""
        found = (backend.window_attention for backend in self.each)
        return next((each for each in found if each is not None), window_attention)

    def reset(self) -> None:
        """Have all let go of tensors of the cache that have been replaced."""
        for backend in self.each:
            backend.reset()
