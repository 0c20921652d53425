"""Write gates: how useful an entry is once it has left the window of the newest tokens.

Source: WG-KV, arXiv 2512.17452, section 3.2. A gate per layer and KV head reads the key before
and after RoPE, each after an RMSNorm, and says how much of the entry later tokens may see:

    x = [RMSNorm(k); RMSNorm(rope(k))],   g = sigmoid(W2 . GELU(W1 x + b1) + b2)

What the paper leaves open follows the authors' released code: the gains of the two norms are
learned, one pair per layer for all its heads, with eps 1e-6, and the keys of families that norm
their keys (Qwen3) are taken after that norm.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from mmkv.engine.errors import GateError
from mmkv.engine.model.spec import DecoderSpec

NORM_EPS = 1e-6


@dataclass
class LayerWriteGate:
    """The gates of one layer's H heads, of width w.

    Attributes:
        before, after: float32 ``[D]``, gains of the norms of the keys before and after RoPE.
        weight: ``[H, w, 2 D]``; offset: ``[H, w]``: W1 and b1.
        readout: float32 ``[H, w]``; bias: float32 ``[H]``: W2 and b2.
    """

    before: Tensor
    after: Tensor
    weight: Tensor
    offset: Tensor
    readout: Tensor
    bias: Tensor

    def logits(self, key_pre: Tensor, key_post: Tensor) -> Tensor:
        """Return what g is the sigmoid of: float32 ``[T, H]``. W1 runs in its own dtype."""
        width = self.before.shape
        pre = F.rms_norm(key_pre.float(), width, self.before, NORM_EPS)
        post = F.rms_norm(key_post.float(), width, self.after, NORM_EPS)
        x = torch.cat([pre, post], -1).transpose(0, 1).to(self.weight.dtype)
        x = F.gelu(torch.baddbmm(self.offset[:, None], x, self.weight.mT))
        return torch.baddbmm(self.bias[:, None, None], x.float(), self.readout[..., None])[..., 0].T


@dataclass
class WriteGates:
    """The write gates of a whole model.

    Attributes:
        tensors: the parameters as stored in a gate file, name -> float tensor.
        info: what ``gates.json`` says beside the sizes (base model, settings, results).
        kind: ``write``, to tell them from retention gates.
    """

    layers: list[LayerWriteGate]
    tensors: dict[str, Tensor]
    info: dict[str, object] = field(default_factory=dict)
    kind: str = "write"

    def logits(self, layer: int, key_pre: Tensor, key_post: Tensor) -> Tensor:
        """Return what g of one layer is the sigmoid of, float32 ``[T, H]``."""
        return self.layers[layer].logits(key_pre, key_post)

    def log_g(self, layer: int, key_pre: Tensor, key_post: Tensor) -> Tensor:
        """Compute log g of one layer.

        Args:
            key_pre: ``[T, H, D]`` keys before RoPE (after the key norm of families that have one);
                key_post: the same keys after RoPE, as the cache holds them.

        Returns:
            float32 ``[T, H]``, ``logsigmoid`` of :meth:`logits`: finite where g itself would be 0.
        """
        return F.logsigmoid(self.logits(layer, key_pre, key_post))

    @property
    def width(self) -> int:
        """Return the width of the hidden layer."""
        return self.layers[0].readout.shape[1]

    def fingerprint(self) -> str:
        """Hash every parameter, in a few hex digits."""
        digest = hashlib.sha256()
        for gate in self.layers:
            for tensor in vars(gate).values():
                digest.update(tensor.detach().float().cpu().numpy().tobytes())
        return digest.hexdigest()[:16]

    def to(self, device: torch.device, dtype: torch.dtype) -> WriteGates:
        """Return the gates on ``device``, W1 and b1 in ``dtype``; all else stays float32."""
        layers = [
            LayerWriteGate(
                gate.before.to(device, torch.float32),
                gate.after.to(device, torch.float32),
                gate.weight.to(device, dtype),
                gate.offset.to(device, dtype),
                gate.readout.to(device, torch.float32),
                gate.bias.to(device, torch.float32),
            )
            for gate in self.layers
        ]
        return WriteGates(layers, self.tensors, self.info)


def write_gates(
    tensors: dict[str, Tensor], spec: DecoderSpec, info: dict[str, object] | None = None
) -> WriteGates:
    """Build write gates from the tensors of a gate file, for gates of any width w.

    Names: ``norm.before [L, D]``, ``norm.after [L, D]``, ``layers.{l}.linear1.weight
    [H, w, 2 D]``, ``layers.{l}.linear1.bias [H, w]``, ``readout.weight [L, H, w]``,
    ``readout.bias [L, H]``. Gradients flow to ``tensors``: training builds its gates here too.

    Raises:
        GateError: when tensors are missing, too many, or do not have these shapes.
    """
    count, heads, size = spec.entry_layers, spec.num_kv_heads, spec.head_dim
    width = tensors["readout.weight"].shape[-1:].numel() if "readout.weight" in tensors else 1
    shapes: dict[str, tuple[int, ...]] = {
        "norm.before": (count, size),
        "norm.after": (count, size),
        "readout.weight": (count, heads, width),
        "readout.bias": (count, heads),
    }
    for index in range(count):
        shapes[f"layers.{index}.linear1.weight"] = (heads, width, 2 * size)
        shapes[f"layers.{index}.linear1.bias"] = (heads, width)
    if odd := sorted(shapes.keys() ^ tensors.keys()):
        lacks = "lack" if odd[0] in shapes else "have, beyond those of this model,"
        raise GateError(
            f"the write gates {lacks} the tensor {odd[0]!r}; use gates trained for this model"
        )
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != shape or not width:
            raise GateError(
                f"write gate tensor {name!r} is {list(tensors[name].shape)}, the model needs "
                f"{list(shape)}; use gates trained for this model"
            )
    layers = [
        LayerWriteGate(
            tensors["norm.before"][index].float(),
            tensors["norm.after"][index].float(),
            tensors[f"layers.{index}.linear1.weight"].float(),
            tensors[f"layers.{index}.linear1.bias"].float(),
            tensors["readout.weight"][index].float(),
            tensors["readout.bias"][index].float(),
        )
        for index in range(count)
    ]
    return WriteGates(layers, tensors, info or {})


def make_random_write_gates(spec: DecoderSpec, seed: int = 0, width: int = 32) -> WriteGates:
    """Return untrained gates for tests and speed runs, about half of them with g above 0.1."""
    generator = torch.Generator().manual_seed(seed)
    count, heads, size = spec.entry_layers, spec.num_kv_heads, spec.head_dim

    def normal(*shape: int, std: float) -> Tensor:
        return torch.randn(*shape, generator=generator) * std

    tensors = {
        "norm.before": 1 + normal(count, size, std=0.1),
        "norm.after": 1 + normal(count, size, std=0.1),
        # GELU of a unit normal has a second moment of 0.43: logits spread by about 2.
        "readout.weight": normal(count, heads, width, std=2 / (0.65 * width**0.5)),
        "readout.bias": torch.full((count, heads), -2.2),  # log(0.1 / 0.9)
    }
    for index in range(count):
        name = f"layers.{index}.linear1"
        tensors[f"{name}.weight"] = normal(heads, width, 2 * size, std=(2 * size) ** -0.5)
        tensors[f"{name}.bias"] = torch.zeros(heads, width)
    return write_gates(tensors, spec, {"trained": False, "seed": seed})
