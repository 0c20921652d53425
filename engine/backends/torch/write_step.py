"""What write gates add to a pass: log g of new entries, and what a chunk sees (WG-KV)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from mmkv.engine.backends.cuda.kernels import write_gated_attention as on_gpu
from mmkv.engine.backends.cuda.kernels.available import on_triton
from mmkv.engine.backends.torch.attention import SortedRows, write_gated_attention
from mmkv.engine.cache import PagePool
from mmkv.engine.errors import GateError, PolicyError
from mmkv.engine.model.gates import Gates, WriteGates, load_write_gates
from mmkv.engine.model.rope import rotate
from mmkv.engine.model.spec import DecoderSpec
from mmkv.engine.policies.base import Admission, Policy
from mmkv.engine.policies.write_gate import PAPER_WINDOW, with_window
from mmkv.engine.scorer_state import Rows


class WriteGatePass:
    """The gates of one pass, whose tokens have the rope angles ``rope``.

    Keys lie in the cache after RoPE; what they were before is the same rotation back.

    Args:
        rope: cos and signed sin ``[T, rot]``; scale: factor that both carry (long rope).

    Attributes:
        tiles: takes, where a program has put a list here, the tiles of entries that each chunk and
            layer multiplied on a GPU, and those of plain causal attention.
    """

    tiles: ClassVar[list[tuple[Tensor, Tensor]] | None] = None

    def __init__(
        self,
        gates: WriteGates,
        admission: Admission,
        rope: tuple[Tensor, Tensor],
        scale: float,
    ) -> None:
        self.gates, self.admission = gates, admission
        cos, sin = rope
        if scale != 1:  # keys carry it once, and turned back by these angles they would twice
            cos, sin = cos / scale**2, sin / scale**2
        self._back = cos, -sin

    def log_g(self, layer: int, key: Tensor) -> Tensor:
        """Log g of keys ``[T, H, D]`` after RoPE, float32 ``[T, H]``."""
        return self.gates.log_g(layer, rotate(key, *self._back), key)

    def attend(
        self,
        pool: PagePool,
        layer: int,
        slot: Tensor,
        query: Tensor,
        position: Tensor,
        length: Tensor,
        table: Tensor,
    ) -> Tensor:
        """Store log g of a chunk's entries of one layer and attend to what each token may see.

        Args:
            slot: ``[H, C]`` flat slots of the chunk's entries, already filled.
            query: ``[H, G, C, D]``, rotated where the pool's form is; position: ``[C]`` token
                indices.
            length: ``[H]``, table: ``[H, W]`` of the layer's rows, the chunk included.

        Returns:
            ``[H, G, C, D]``.
        """
        state = pool.state.flatten(0, 1)
        state[slot, 0] = self.log_g(layer, pool.keys_at(slot).transpose(0, 1)).T
        rows = Rows.of(length, table, pool.page_size)
        last = torch.iinfo(torch.int64).max
        at = pool.position.view(-1)[rows.slot].long().masked_fill(~rows.live, last)
        order = at.argsort(-1)
        slots = rows.slot.gather(-1, order)
        window, threshold = self.admission.window, self.admission.threshold
        scale = query.shape[-1] ** -0.5
        if on_triton(pool.keys) and pool.form.plain:
            gated = on_gpu.GatedRows(slots, at.gather(-1, order), state[slots, 0])
            parts = pool.keys.flatten(0, 1), pool.values.flatten(0, 1), gated
            made = on_gpu.write_gated_attention(query, position, *parts, window, threshold, scale)
            if self.tiles is not None:
                self.tiles.append((made[1].sum(), made[2].sum()))
            return made[0]
        entries = SortedRows(
            pool.stored_keys.flatten(0, 1)[slots],
            pool.stored_values.flatten(0, 1)[slots],
            at.gather(-1, order),
            state[slots, 0],
        )
        return write_gated_attention(query, position, entries, window, threshold, scale)

    def store(self, pool: PagePool, slots: Tensor) -> None:
        """Store log g of one new entry a row of B sequences: ``slots [B, L, H]``."""
        state = pool.state.flatten(0, 1)
        for layer in range(slots.shape[1]):
            where = slots[:, layer]
            state[where, 0] = self.log_g(layer, pool.keys_at(where))


def attach_write_gates(
    policy: Policy, gates: object, spec: DecoderSpec
) -> tuple[Policy, WriteGates]:
    """Give a policy with write gates its window, and the gates; checks that a model can run so.

    Args:
        gates: what the engine was given: the write gates, or the retention gates beside which the
            policy itself names write gates.

    Raises:
        GateError: gates are missing, or others than the policy reads; PolicyError: sliding-window
            layers.
    """
    if policy.gates == "retention":
        check_named(policy)
        if not isinstance(gates, Gates):
            raise GateError(
                f"policy {policy.name!r} needs retention gates; load them with gates=PATH, and "
                "name the write gates as the policy's write_gates"
            )
        assert policy.admission is not None
        gates = load_write_gates(policy.admission.gates, spec)
    if not isinstance(gates, WriteGates):
        raise GateError(f"policy {policy.name!r} needs write gates; load them with gates=PATH")
    if any(spec.sliding_window):
        raise PolicyError(
            f"policy {policy.name!r}: write gates are not made for sliding-window layers; choose "
            "another policy"
        )
    admission = policy.admission
    assert admission is not None
    return with_window(policy, admission.window or _trained_window(gates) or PAPER_WINDOW), gates


def check_named(policy: Policy) -> None:
    """Check that a policy with two sets of gates names its write gates. Raises GateError."""
    if policy.admission is not None and policy.gates == "retention" and not policy.admission.gates:
        raise GateError(
            f"policy {policy.name!r} needs write gates beside its retention gates; name them: "
            f"--policy '{policy.name}:write_gates=PATH'"
        )


def _trained_window(gates: WriteGates) -> int | None:
    """W_local of the gates' training, as ``gates.json`` has it."""
    settings = gates.info.get("settings")
    window = settings.get("window") if isinstance(settings, dict) else None
    return window if isinstance(window, int) and window > 0 else None
