"""Record the attention logits of single decode steps beside the engine's own computation.

The engine computes the step's attention as always. The probe reads the same keys from the pages and
computes the logits in float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mmkv.engine.backends.torch.step import DecodeStep
from mmkv.engine.sequence import CachedSequence


class _ProbedStep(DecodeStep):
    """A decode step of one sequence that appends its attention logits, layer by layer."""

    seq: int
    attended: list[Tensor]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = super().attend(layer, query, key, value)
        spec, pool = self.spec, self.cache.pool
        entries = self.cache.entries(self.seq)
        mine = entries.row // spec.num_kv_heads == layer
        slot, head = entries.slot[mine], entries.row[mine] % spec.num_kv_heads
        position = pool.position.view(-1)[slot].long()
        keys = pool.keys.flatten(0, 1)[slot].double()
        grouped = query[0].view(spec.num_kv_heads, spec.group, spec.head_dim).double()
        products = torch.einsum("ed,egd->eg", keys, grouped[head]) * spec.head_dim**-0.5
        shape = (spec.num_kv_heads, spec.group, self.seen)
        logits = torch.full(shape, -torch.inf, dtype=products.dtype, device=products.device)
        logits[head, :, position] = products
        self.attended.append(logits)
        return out


@contextmanager
def _probing(session: CachedSequence, attended: list[Tensor]) -> Iterator[None]:
    """Decode steps of this session are probed; the native step, which cannot be, is put aside."""

    def step(*arguments: Any) -> DecodeStep:
        made = _ProbedStep(*arguments)
        made.seq, made.attended = session.seq, attended
        return made

    engine = session.engine
    cpu, reference = engine.backends.cpu, engine.backends.torch
    native, plain = cpu.decoder, reference.make_step
    cpu.decoder, reference.make_step = None, step
    try:
        yield
    finally:
        cpu.decoder, reference.make_step = native, plain


def probed_decode(session: CachedSequence, token: int) -> tuple[Tensor, Tensor]:
    """Append a token as :meth:`CachedSequence.decode` does.

    Returns:
        logits ``[vocab]``, and the attention logits float64 ``[L, H, G, T]``, T the tokens seen:
        q k / sqrt(d) of KV head and query head in its group, -inf where the entry is gone (nothing
        is in the cache); both on the CPU.
    """
    attended: list[Tensor] = []
    with _probing(session, attended):
        logits = session.decode(token)
    return logits.cpu(), torch.stack(attended).cpu()
