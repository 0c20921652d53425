"""The vision tower and projector: their matrices in the forms of the decoder's.

On a CPU attention runs in C where it can: towers ask transformers' ``AttentionInterface`` for it by
name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from mmkv.engine.model.families.base import Family
from mmkv.engine.model.product import Matrix, PatchAttention, Product, WeightForm
from mmkv.engine.system import give_back

MANY_BYTES = 2**26  # that are freed before the heap gives them back


class HeldLinear(nn.Module):
    """A linear layer whose matrix is held in a form.

    Attributes:
        matrix: ``[out, in]``. It is no parameter: nothing but ``product`` reads it.
        bias: ``[out]`` in the dtype of states, or None.
    """

    def __init__(
        self,
        matrix: Matrix,
        bias: Tensor | None,
        product: Product,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.matrix, self._product, self._dtype = matrix, product, dtype
        self.bias = None if bias is None else nn.Parameter(bias.to(dtype), requires_grad=False)

    @property
    def weight(self) -> Tensor:
        """Return what transformers asks layers for: the shape, and the dtype of states."""
        return torch.empty(self.matrix.shape, dtype=self._dtype, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        """Compute ``weight x + bias``, ``[..., out]`` of ``x [..., in]`` in the dtype of states."""
        return self._product(x, self.matrix, self.bias)


class HeldPatches(HeldLinear):
    """A convolution whose patches lie side by side: one product for all of them."""

    def __init__(
        self,
        matrix: Matrix,
        bias: Tensor | None,
        product: Product,
        patch: tuple[int, ...],
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(matrix, bias, product, dtype)
        self.patch = patch

    def forward(self, x: Tensor) -> Tensor:
        """Compute ``[n, out, *patches]`` of pixels ``[n, channels, *pixels]``.

        Pixels at the end of an axis that fill no patch are not read, as in the convolution.
        """
        axes = len(self.patch)
        for axis, size in enumerate(self.patch):
            x = x.unfold(2 + axis, size, size)
        patches = x.movedim(1, 1 + axes).flatten(-1 - axes)
        return super().forward(patches).movedim(-1, 1)


# Towers without masks: patches see all of a picture, or of the parts that flash attention gets.
_UNMASKED = {
    "clip_vision_model",
    "glm4v_vision",
    "idefics3_vision",
    "internvl_vision",
    "pixtral",
    "qwen2_5_vl_vision",
    "qwen2_vl_vision",
    "qwen3_vl_moe_vision",
    "qwen3_vl_vision",
    "siglip_vision_model",
    "smolvlm_vision",
}


def hold_tower(
    model: Any,
    family: type[Family],
    form: WeightForm,
    take: Callable[[Tensor], Matrix | None] = lambda weight: None,
) -> None:
    """Hold the matrices of a model's vision tower and projector in a form, in place.

    Linear layers and patch embeddings become modules that multiply by :attr:`WeightForm.product`;
    the text model and the output head stay. A matrix that the form leaves in float32 stays as it
    is, and so does all that is no matrix.

    Args:
        model: a transformers model of ``family``, in a floating dtype. What stays is not converted.
        take: gives the matrix of a layer's weight; None: it is to be made of the weight.
    """
    freed = 0
    for parent, name in list(layers_to_hold(model, family)):
        layer = getattr(parent, name)
        if (matrix := take(layer.weight)) is None:
            matrix = _matrix_of(layer.weight, form)
        if isinstance(matrix, Tensor) and matrix.dtype == torch.float32:
            continue
        setattr(parent, name, _holding(layer, matrix, form))
        del layer
        freed += matrix.nbytes
        if freed >= MANY_BYTES:  # of others: the heap keeps what lies between by itself
            give_back()
            freed = 0
    _set_attention(model, form)


def layers_to_hold(model: Any, family: type[Family]) -> Iterator[tuple[nn.Module, str]]:
    """Yield where tower and projector have layers that multiply: parent, name in it."""
    text: Any = family.text_model(model)
    apart = {*text.modules(), model.get_output_embeddings()}
    for parent in model.modules():
        for name, child in parent.named_children():
            # Of these types alone: a subclass may compute something else.
            patches = type(child) in (nn.Conv2d, nn.Conv3d) and _side_by_side(child)
            if not {parent, child} & apart and (patches or type(child) is nn.Linear):
                yield parent, name


def _set_attention(model: Any, form: WeightForm) -> None:
    """Have a tower's layers attend by the form's kernels, if they have one for such a tower."""
    kernel = form.attention
    vision: Any = getattr(getattr(model, "config", None), "vision_config", None)
    if kernel is None or getattr(vision, "model_type", None) not in _UNMASKED:
        return
    # With "flash" in the name, Qwen's towers call it once, and not once for each window.
    # All models of the process read that registry: another one's kernel stays as it is.
    name = f"mmkv_flash_{form.name}_{'torch' if form.kernels.attention is None else 'c'}"
    transformers.AttentionInterface.register(name, functools.partial(_attend, kernel))
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if type(config) is type(vision):
            config._attn_implementation = name


def _attend(
    kernel: PatchAttention,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    cu_seq_lens_q: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers' interface asks for it; what ``kernel`` does not do is torch's.

    Args:
        query: ``[n, H, T, D]``; key and value likewise.
        cu_seq_lens_q: where each part of the tokens begins, and T; without it all see all.

    Returns:
        ``[n, T, H, D]``, and no weights.
    """
    tokens = query.shape[2]
    starts = [0, tokens] if cu_seq_lens_q is None else cu_seq_lens_q.tolist()
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    causal = options.get("is_causal")
    masked = attention_mask is not None or (module.is_causal if causal is None else causal)
    three = (query, key, value)
    if _plain(three) and not (masked or dropout):
        return kernel(query, key, value, scale, starts), None
    torchs = transformers.AttentionInterface()["sdpa"]
    made = [
        torchs(
            module,
            *(x[:, :, first:after] for x in three),
            attention_mask,
            dropout=dropout,
            scaling=scale,
            **options,
        )[0]
        for first, after in pairwise(starts)
    ]
    return torch.cat(made, 1), None


def _plain(three: tuple[Tensor, Tensor, Tensor]) -> bool:
    """Whether these are what kernels read: float32 on the CPU, of one shape, without gradients."""
    here = all(x.dtype == torch.float32 and x.device.type == "cpu" for x in three)
    asked = torch.is_grad_enabled() and any(x.requires_grad for x in three)
    return here and len({x.shape for x in three}) == 1 and not asked


def move(model: nn.Module, device: torch.device) -> None:
    """Move a model to a device, with what :func:`hold_tower` holds; what is on meta stays there."""
    for module in model.modules():
        if isinstance(module, HeldLinear):
            module.matrix = module.matrix.to(device)
    model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))


def held_matrices(model: nn.Module) -> Iterator[tuple[str, Matrix]]:
    """Yield the matrices that :func:`hold_tower` holds, by the names of the weights they were."""
    for name, module in model.named_modules():
        if isinstance(module, HeldLinear):
            yield f"{name}.weight", module.matrix


def _matrix_of(weight: Tensor, form: WeightForm) -> Matrix:
    plain = weight.detach().flatten(1)
    # No form is made of float16.
    return form.hold(plain.float() if plain.dtype == torch.float16 else plain)


def _holding(layer: nn.Module, matrix: Matrix, form: WeightForm) -> HeldLinear:
    """Return what takes a layer's place."""
    bias = layer.bias
    assert bias is None or isinstance(bias, Tensor)
    if isinstance(layer, (nn.Conv2d, nn.Conv3d)):
        return HeldPatches(matrix, bias, form.product, layer.kernel_size, form.dtype)
    return HeldLinear(matrix, bias, form.product, form.dtype)


def _side_by_side(layer: Any) -> bool:
    """Whether a convolution reads every pixel once."""
    padded = layer.padding not in ("valid", (0,) * len(layer.kernel_size))
    dilated = any(step != 1 for step in layer.dilation)
    whole = layer.stride == layer.kernel_size and not padded and not dilated
    return whole and layer.groups == 1
