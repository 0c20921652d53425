"""Counts what makes the host wait for a GPU, or what a graph cannot hold: on a CPU, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mmkv.engine.backends.cuda import policy_step, static_step
from mmkv.engine.backends.cuda.kernels import delta
from mmkv.engine.backends.cuda.static_step import StaticStep

aten = torch.ops.aten
# Their result, or its shape, is known to the host once it has waited: .item(), .tolist(), int(),
# bool(), .nonzero(), torch.unique ... And a tensor made of the host's own numbers is a copy.
READS = {
    aten._local_scalar_dense,
    aten.nonzero,
    aten.masked_select,
    aten._unique2,
    aten.unique_dim,
    aten.unique_consecutive,
    aten.bincount,
    aten.equal,
    aten.is_nonzero,
    aten.lift_fresh,
}
# What has a form in Triton beside the reference that runs here.
KERNELS = {
    static_step: "make_room build_worklist rms_norm store_layer decode_attention gated evict",
    policy_step: "drop window_scores",
    delta: "conv_step delta_step",
}


class HostReads(TorchDispatchMode):
    """Notes each read of the steps that run in it, outside of kernels.

    Attributes:
        found: the operations, in their order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._inside:
            return func(*args, **kwargs)
        with self:  # an operation that is made of others is seen before these are
            made = func.decompose(*args, **kwargs)
        if made is not NotImplemented:
            return made
        if self._reads(func, args):
            self.found.append(str(func))
        return func(*args, **kwargs)

    @staticmethod
    def _reads(func: Any, args: Any) -> bool:
        packet = func.overloadpacket
        if func in (aten.repeat_interleave.Tensor, aten.repeat_interleave.self_Tensor):
            return True
        if packet in (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_):
            return any(
                one is not None and one.dtype in (torch.bool, torch.uint8) for one in args[1]
            )
        return packet in READS

    def kernel(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return a kernel's reference, whose own reads do not count."""

        def uncounted(*args: Any, **kwargs: Any) -> Any:
            before, self._inside = self._inside, True
            try:
                return run(*args, **kwargs)
            finally:
                self._inside = before

        return uncounted


@pytest.fixture
def host_reads(monkeypatch: pytest.MonkeyPatch) -> HostReads:
    """What each static step of a test reads back, as it is first run."""
    reads = HostReads()
    for module, names in KERNELS.items():
        for name in names.split():
            monkeypatch.setattr(module, name, reads.kernel(getattr(module, name)))
    run = StaticStep.run

    seen: set[tuple[StaticStep, bool]] = set()

    def counted(step: StaticStep, cut: bool = True) -> None:
        if (step, cut) in seen:  # what it does is the same each time
            return run(step, cut)
        seen.add((step, cut))
        with reads:
            return run(step, cut)

    monkeypatch.setattr(StaticStep, "run", counted)
    return reads
