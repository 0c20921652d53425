"""Everything between a layer's qkv projection and its attention, for one decode step.

q/k norm, rotation and the store of the new keys and values: one kernel instead of some dozen. And
what gates say of the new entries, of all layers at once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mmkv.engine.backends.cuda.kernels.available import in_triton
from mmkv.engine.cache import Columns
from mmkv.engine.model.elementwise import normed_heads
from mmkv.engine.model.rope import rotate


def store_layer_reference(
    qkv: Tensor,
    rope: tuple[Tensor, Tensor],
    qk_norm: Tensor | None,
    eps: float,
    pool: Columns,
    slots: Tensor,
    position: Tensor,
) -> Tensor:
    """Normalise, rotate and store one layer's new entries; one token of each of B sequences.

    Batch slots whose slots are -1 do nothing: nothing of theirs is stored, and their rows of the
    result mean nothing. Every intermediate is rounded where the eager decoder rounds it, so
    that both agree to the last bit but for the order of the sum of squares.

    Args:
        qkv: ``[B, (Hq + 2 H) D]`` in the model's dtype, heads ordered q, k, v. Rows contiguous;
            a slice of a wider product will do.
        rope: cos and signed sin ``[B, rot]`` in the model's dtype (``Rope``);
            features past ``rot`` pass through.
        qk_norm: ``[Hq + H, D]`` gains of the per-head RMSNorm of q and k, in the model's dtype or
            float32, or None; eps: of it.
        pool: written at ``slots``, rounded as its form says, with modality 0 (text) and state 0.
        slots: ``[B, H]`` int64 flat slots ``page * P + offset``, all different; or -1. May be
            ``[:, layer]`` of those of all layers.
        position: ``[B]`` int64 token indices.

    Returns:
        queries ``[B, Hq, D]``, normalised and rotated; and turned where the pool's form is.
    """
    batch_slots, heads = slots.shape
    head_dim = pool.form.key.head_dim(pool.keys.shape[-1])
    fused = qkv.reshape(batch_slots, -1, head_dim)
    rotated = fused.shape[1] - heads
    turned, value = fused[:, :rotated], fused[:, rotated:]
    turned = rotate(normed_heads(turned, qk_norm, eps), *rope)
    query, key = turned[:, :-heads], turned[:, -heads:]
    live = slots >= 0
    where = slots[live]
    pool.store(where, key[live], value[live])
    pool.position.view(-1)[where] = position.int()[:, None].expand_as(slots)[live]
    pool.modality.view(-1)[where] = 0
    pool.state.flatten(0, 1)[where] = 0
    return pool.form.rotate(query)


store_layer = in_triton(store_layer_reference, "qkv")


def store_log_beta_reference(
    trunk: Tensor, weight: Tensor, bias: Tensor, log_beta: Tensor, slots: Tensor
) -> None:
    """Store ``logsigmoid(weight . silu(trunk) + bias)`` of one token of each of B sequences.

    Args:
        trunk: ``[L, B, w]`` in the model's dtype, the last product of each layer's gate, *before*
            SiLU, which is rounded to the dtype.
        weight: ``[L, H, w]`` float32; bias: ``[L, H]`` float32.
        log_beta: the pool's, written at ``slots [B, L, H]`` int64; where these are -1 nothing is.
    """
    layers = zip(trunk, weight, bias, strict=True)
    z = torch.stack([F.linear(F.silu(x).float(), *own) for x, *own in layers], 1)
    live = slots >= 0
    log_beta.view(-1)[slots[live]] = F.logsigmoid(z)[live]


store_log_beta = in_triton(store_log_beta_reference, "trunk")
