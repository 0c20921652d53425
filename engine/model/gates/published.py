"""The gate layouts that authors publish: ``rg`` and ``rg10`` of TRIM-KV and DBTrimKV, and WG-KV's.

``rg`` is the gate of TRIM-KV (arXiv 2512.03324, section 5.1), ``rg10`` that of DBTrimKV's released
code; training writes both, too.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

from mmkv.engine.errors import GateError
from mmkv.engine.model.gates.module import Gates, LayerGate
from mmkv.engine.model.gates.write import WriteGates, write_gates
from mmkv.engine.model.spec import DecoderSpec

GATE_KEY = "self_attn.retention_gate."
_KEY = re.compile(r"layers\.(\d+)\.self_attn\.retention_gate\.(.+)$")


WRITE_KEY = "self_attn.g_predictors."
_WRITE = re.compile(r"layers\.(\d+)\.self_attn\.g_predictors\.(.+)$")


def layer_name(name: str) -> str:
    """Return the published name of ``layers.{l}.PART``."""
    _, layer, part = name.split(".", 2)
    return f"model.layers.{layer}.self_attn.retention_gate.{part}"


def published_gates(
    tensors: dict[str, Tensor], spec: DecoderSpec, info: dict[str, object] | None = None
) -> Gates:
    """Build gates from published tensors; the layout follows from the presence of ``linear3``.

    ``rg``: linear1 [512, d] + bias, SiLU, linear2 [H, 512], + bias [H].
    ``rg10``: linear1, SiLU, linear2, SiLU, linear3 [H, 512], + bias [H]; linear3 and the bias
    are one and the same in every layer, which is verified. Gradients flow to ``tensors``.

    Raises:
        GateError: other layouts, other shapes (both named), or a tie that does not hold.
    """
    parts: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items() if isinstance(tensors, dict) else ():
        match = _KEY.search(str(key))
        if match and isinstance(tensor, Tensor):
            parts.setdefault(int(match[1]), {})[match[2]] = tensor.float()
    if not parts:
        raise GateError("the file holds no 'self_attn.retention_gate' tensors; name a gate file")
    if sorted(parts) != list(range(spec.entry_layers)):
        raise GateError(
            f"the gates cover {len(parts)} layers, the model has {spec.entry_layers}; use gates "
            "trained for this model"
        )
    kind = "rg10" if "linear3.weight" in parts[0] else "rg"
    last = "linear3" if kind == "rg10" else "linear2"
    layers = [_layer(index, parts[index], last, spec) for index in range(spec.entry_layers)]
    if kind == "rg10":
        tied = all(
            torch.equal(layer.readout, layers[0].readout)
            and torch.equal(layer.bias, layers[0].bias)
            for layer in layers
        )
        if not tied:
            raise GateError(
                "the rg10 gates differ in linear3 or bias between layers, so the tie that makes "
                "scores comparable does not hold; use the original file"
            )
    return Gates(kind, layers, tensors, {"layout": kind, **(info or {})})


def _layer(index: int, part: dict[str, Tensor], last: str, spec: DecoderSpec) -> LayerGate:
    """Build the gate of one layer from its tensors; ``last`` is the readout. Raises GateError."""
    try:
        readout, bias = part[f"{last}.weight"], _bias(part, last)
        trunk = [(part["linear1.weight"], part["linear1.bias"])]
        if last == "linear3":
            width = part["linear2.weight"].shape[:1]
            second = part.get("linear2.bias", torch.zeros(width))
            trunk.append((part["linear2.weight"], second))
    except KeyError as error:
        raise GateError(
            f"layer {index} of the gates lacks {error.args[0]!r}; layouts rg and rg10 are read"
        ) from error
    matrices = [weight for weight, _ in trunk] + [readout]
    if odd := [weight for weight in matrices if weight.dim() != 2 or not weight.numel()]:
        raise GateError(
            f"layer {index} of the gates has a weight of the shape {list(odd[0].shape)}, which "
            "is no matrix; the file is damaged, use another"
        )
    hidden, heads = trunk[0][0].shape[1], readout.shape[0]
    if (hidden, heads) != (spec.hidden_size, spec.num_kv_heads):
        raise GateError(
            f"the gates are for hidden size {hidden} and {heads} KV heads; this model has "
            f"{spec.hidden_size} and {spec.num_kv_heads}; use gates trained for it"
        )
    for (weight, offset), inner in zip(
        [*trunk, (readout, bias)], [hidden, *(w.shape[0] for w, _ in trunk)], strict=True
    ):
        if weight.shape != (offset.numel(), inner) or offset.dim() != 1:
            raise GateError(
                f"layer {index} of the gates has a weight {list(weight.shape)} between "
                f"{inner} inputs and {offset.numel()} outputs; the file is damaged"
            )
    return LayerGate(trunk, readout, bias)


def _bias(part: dict[str, Tensor], last: str) -> Tensor:
    return part["bias"] if "bias" in part else part[f"{last}.bias"]


def published_write_gates(tensors: dict[str, Tensor], spec: DecoderSpec) -> WriteGates:
    """Build write gates from a checkpoint of WG-KV (arXiv 2512.17452), a ``.pt`` file.

    Its gates are two convolutions of width 1 with a group for each KV head: ``conv1 [H w, 2 D, 1]``
    reads the keys before and after RoPE, each after its norm (``pre_key_norm``, ``post_key_norm``),
    and ``conv2 [H, w, 1]`` its hidden layer.

    Raises:
        GateError: gates that read something else, or of another shape.
    """
    parts: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        if match := _WRITE.search(key):
            parts.setdefault(int(match[1]), {})[match[2]] = tensor.float()
    if sorted(parts) != list(range(spec.entry_layers)):
        raise GateError(
            f"the write gates cover {len(parts)} layers, the model has {spec.entry_layers}; use "
            "gates trained for this model"
        )
    heads, size = spec.num_kv_heads, spec.head_dim
    width = parts[0]["conv2.weight"].shape[1:2].numel() if "conv2.weight" in parts[0] else 0
    wanted = {
        "pre_key_norm.weight": (size,),
        "post_key_norm.weight": (size,),
        "conv1.weight": (heads * width, 2 * size, 1),
        "conv1.bias": (heads * width,),
        "conv2.weight": (heads, width, 1),
        "conv2.bias": (heads,),
    }
    for index, part in sorted(parts.items()):
        found = {name: tuple(tensor.shape) for name, tensor in part.items()}
        if found != wanted:
            odd = next(n for n in [*wanted, *found] if found.get(n) != wanted.get(n))
            raise GateError(
                f"layer {index} of the write gates has {odd!r} of the shape {found.get(odd)}, this "
                f"model needs {wanted.get(odd)}; use gates trained for it that read its keys "
                "before and after rope"
            )
    layers = [parts[index] for index in range(spec.entry_layers)]
    made = {
        "norm.before": torch.stack([part["pre_key_norm.weight"] for part in layers]),
        "norm.after": torch.stack([part["post_key_norm.weight"] for part in layers]),
        "readout.weight": torch.stack([part["conv2.weight"][..., 0] for part in layers]),
        "readout.bias": torch.stack([part["conv2.bias"] for part in layers]),
    }
    for index, part in enumerate(layers):
        name = f"layers.{index}.linear1"
        made[f"{name}.weight"] = part["conv1.weight"].view(heads, width, 2 * size)
        made[f"{name}.bias"] = part["conv1.bias"].view(heads, width)
    return write_gates(made, spec, {"layout": "WG-KV"})
