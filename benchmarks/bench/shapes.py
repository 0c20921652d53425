"""Published sizes of the benchmarked models, with random weights: nothing is downloaded.

The time of a decode step depends on its bytes and not on their values, so random weights in
published sizes take the same time. The text decoder of Qwen3-VL is that of Qwen3 (for text tokens
M-RoPE rotates all frequencies alike), and that of LLaVA-1.5 is Llama's. Vision encoders take no
part in decoding.

Only torch and transformers are imported at the top, because the peers' environments import this
module, too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import transformers

if TYPE_CHECKING:
    from mmkv.engine.policies import Policy
    from mmkv.engine.runtime import Runtime

# Largest position: speed runs exceed the trained length of some of these models.
MOST_POSITIONS = 2**20


@dataclass(frozen=True)
class Shape:
    """Sizes of one text decoder, as its published config.json gives them.

    Attributes:
        kind: ``qwen3``, ``qwen2`` or ``llama``; inner: width f of the MLP; theta: base of the rope.
        tied: whether the output head is the embedding; gate: width of the retention gates' trunk.
    """

    kind: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    tied: bool
    theta: float
    eps: float
    gate: int = 512

    @property
    def rows(self) -> int:
        """Count the cache rows of one sequence."""
        return self.layers * self.kv_heads

    @property
    def parameters(self) -> int:
        """Count the weights of the decoder; a tied head counts once."""
        wide, narrow = self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer = self.hidden * (2 * wide + 2 * narrow + 3 * self.inner) + 2 * self.hidden
        if self.kind == "qwen3":
            layer += 2 * self.head_dim
        if self.kind == "qwen2":
            layer += wide + 2 * narrow
        ends = self.vocab * self.hidden * (1 if self.tied else 2) + self.hidden
        return self.layers * layer + ends

    def weight_bytes(self, itemsize: int = 2) -> int:
        """Count the bytes of the weights."""
        return self.parameters * itemsize

    def kv_token_bytes(self, itemsize: int = 2) -> int:
        """Count the bytes of the keys and values of one token in all layers."""
        return 2 * self.rows * self.head_dim * itemsize


# kind, layers, hidden, heads, KV heads, head_dim, MLP, vocabulary, tied, theta, eps
SHAPES = {
    "qwen3-vl-2b": Shape("qwen3", 28, 2048, 16, 8, 128, 6144, 151936, True, 5e6, 1e-6),
    "qwen3-4b": Shape("qwen3", 36, 2560, 32, 8, 128, 9728, 151936, True, 1e6, 1e-6),
    "qwen3-vl-4b": Shape("qwen3", 36, 2560, 32, 8, 128, 9728, 151936, True, 5e6, 1e-6),
    "qwen3-vl-8b": Shape("qwen3", 36, 4096, 32, 8, 128, 12288, 151936, False, 5e6, 1e-6),
    "llama-3.1-8b": Shape("llama", 32, 4096, 32, 8, 128, 14336, 128256, False, 5e5, 1e-5),
    "qwen2.5-7b": Shape("qwen2", 28, 3584, 28, 4, 128, 18944, 152064, False, 1e6, 1e-6),
    "llava-1.5-7b": Shape("llama", 32, 4096, 32, 32, 128, 11008, 32064, False, 1e4, 1e-5),
    "smollm2-135m": Shape("llama", 30, 576, 9, 3, 64, 1536, 49152, True, 1e5, 1e-5, gate=96),
    "tiny-vlm": Shape("qwen3", 6, 192, 6, 3, 32, 576, 643, True, 1e4, 1e-6, gate=96),
    "tiny": Shape("qwen3", 2, 64, 4, 2, 32, 96, 128, True, 1e4, 1e-6, gate=16),
}


def config_of(shape: Shape) -> Any:
    """Return the transformers config of a shape (transformers 4.57 to 5)."""
    kind = getattr(transformers, f"{shape.kind.capitalize()}Config")
    return kind(**config_arguments(shape))


def config_arguments(shape: Shape) -> dict[str, Any]:
    """Return the config values of a shape; the base of the rope under its old and new name."""
    return {
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "tie_word_embeddings": shape.tied,
        "rms_norm_eps": shape.eps,
        "max_position_embeddings": MOST_POSITIONS,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    } | (
        {"rope_parameters": {"rope_type": "default", "rope_theta": shape.theta}}
        if int(transformers.__version__.split(".")[0]) >= 5
        else {"rope_theta": shape.theta}
    )


@torch.no_grad()
def build_model(shape: Shape, device: torch.device | str, dtype: torch.dtype, seed: int = 0) -> Any:
    """Build a transformers model of this shape, made where it stays; equal for equal seeds."""
    config = config_of(shape)
    with torch.device("meta"):
        model = getattr(transformers, f"{shape.kind.capitalize()}ForCausalLM")(config)
    return randomise(model, config, device, dtype, seed)


@torch.no_grad()
def randomise(
    model: Any, config: Any, device: torch.device | str, dtype: torch.dtype, seed: int = 0
) -> Any:
    """Give a causal language model that lies on ``meta`` its memory and random weights."""
    model = model.to(dtype).to_empty(device=device)
    model.tie_weights()
    generator = torch.Generator(device).manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.fill_(1.0)  # norm gains
        else:
            parameter.normal_(0.0, 0.02, generator=generator)
    # Its frequencies are a buffer, and were on meta.
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.requires_grad_(False).eval()


def build_engine(
    shape: Shape,
    policy: str | Policy = "dbtrimkv",
    budget: float = 256,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    weights_of: Runtime | None = None,
    form: str = "auto",
    **settings: Any,
) -> Runtime:
    """Build an engine of this shape with random weights, and random gates if the policy reads
    them.

    Args:
        weights_of: an engine of the same shape, device and dtype whose weights to share.
        form: how matrices are held, as ``--weights`` takes it.
        settings: as of :class:`mmkv.engine.runtime.Runtime`.
    """
    from mmkv.engine.backends import kernels_for
    from mmkv.engine.model.families import Family, TextFamily
    from mmkv.engine.model.gates import make_random_gates, make_random_write_gates
    from mmkv.engine.model.product import WeightForm
    from mmkv.engine.model.spec import DecoderSpec
    from mmkv.engine.model.weights import DecoderWeights
    from mmkv.engine.policies import make_policy
    from mmkv.engine.runtime import Runtime

    chosen = make_policy(policy) if isinstance(policy, str) else policy
    if weights_of is None:
        model = build_model(shape, torch.device(device), dtype)
        family: Family = TextFamily(model)
        spec = DecoderSpec.from_hf(model.model)
        weights = DecoderWeights.take(model.model, family.output_head(model), spec)
        where = torch.device(device)
        holding = WeightForm.of(form, kernels_for(form, where), dtype, where, experts=False)
        if holding is not None and form != "auto":
            weights.hold(holding)
    else:
        family, spec = weights_of.family, weights_of.spec
        weights = weights_of.decoder.weights
    gates: Any = None
    if chosen.gates == "write":
        gates = make_random_write_gates(spec)
    elif chosen.gates:
        gates = make_random_gates(spec, d_gate=shape.gate)
    if chosen.gates and chosen.admission is not None:
        chosen = replace(chosen, admission=replace(chosen.admission, gates="random"))
    return Runtime(family, spec, weights, gates, chosen, budget, **settings)
