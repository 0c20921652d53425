"""Make the quantised matrices of this folder, and what each library itself reads of them.

Run from the top of a checkout, in an environment of its own, which tests do not need::

    pip install torch==2.13.0 safetensors transformers==5.23.0 peft==0.21.2
    pip install compressed-tensors==0.20.0 bitsandbytes==0.50.2
    python -m tests.support.quantised.make AUTOAWQ GPTQMODEL

AUTOAWQ and GPTQMODEL are the unpacked sources of autoawq 0.2.9 and gptqmodel 7.7.0, whose wheels
need a GPU; of both the parts in torch alone are used.

Each METHOD.safetensors holds the matrices of a Llama of one layer; plain.safetensors what stays
plain. ``expected.json`` holds the SHA-256 of each matrix as its library dequantises it.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

HERE = Path(__file__).parent
HIDDEN, INNER, PAIR, VOCAB, GROUP = 64, 96, 32, 96, 32
SHAPES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (PAIR, HIDDEN),
    "self_attn.v_proj": (PAIR, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}
AT = "model.layers.0."
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": VOCAB,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("autoawq", type=Path)
    parser.add_argument("gptqmodel", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    plain = {f"{AT}{name}.weight": torch.ones(HIDDEN) for name in _norms()}
    plain["model.embed_tokens.weight"] = torch.randn(VOCAB, HIDDEN)
    plain["model.norm.weight"] = torch.ones(HIDDEN)
    plain = {name: tensor.bfloat16() for name, tensor in plain.items()}
    save_file(plain, HERE / "plain.safetensors", metadata={"format": "pt"})
    in_fp8 = fp8()
    base = plain | {f"{AT}{name}.weight": part for name, part in in_fp8[2].items()}
    with torch.random.fork_rng():
        adapted = adapters(base)
    made = {
        "fp8": in_fp8,
        "compressed-tensors": compressed(),
        "awq": awq(args.autoawq),
        "gptq": gptq(args.gptqmodel, 4, "gptq"),
        "gptq_v2": gptq(args.gptqmodel, 8, "gptq_v2"),
        "gptq_3": gptq(args.gptqmodel, 3, "gptq"),
        "bitsandbytes": bitsandbytes(),
    }
    expected: dict[str, Any] = {}
    for method, (settings, tensors, matrices) in made.items():
        kept = {f"{AT}{name}": tensor.contiguous() for name, tensor in tensors.items()}
        save_file(kept, HERE / f"{method}.safetensors", metadata={"format": "pt"})
        hashes = {f"{AT}{name}.weight": digest(matrix) for name, matrix in matrices.items()}
        expected[method] = {"settings": settings, "sha256": hashes}
    said = {"config": CONFIG, "methods": expected, "adapters": adapted}
    (HERE / "expected.json").write_text(json.dumps(said, indent=1) + "\n")


def _norms() -> tuple[str, ...]:
    return "input_layernorm", "post_attention_layernorm"


def weights() -> dict[str, Tensor]:
    return {name: torch.randn(shape) * shape[1] ** -0.5 for name, shape in SHAPES.items()}


def digest(matrix: Tensor) -> list[str]:
    """Return dtype and SHA-256 of the numbers, row after row."""
    raw = matrix.detach().contiguous().view(torch.uint8).numpy().tobytes()
    return [str(matrix.dtype).removeprefix("torch."), hashlib.sha256(raw).hexdigest()]


Made = tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor]]


def fp8() -> Made:
    """Quantise in blocks of 32 x 32, as the hub's -FP8 repositories do in blocks of 128 x 128."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    tensors, matrices = {}, {}
    for name, weight in weights().items():
        rows, columns = weight.shape
        blocks = weight.view(rows // 32, 32, columns // 32, 32)
        inverse = blocks.abs().amax((1, 3)) / 448
        values = (blocks / inverse[:, None, :, None]).view(rows, columns).to(torch.float8_e4m3fn)
        tensors |= {f"{name}.weight": values, f"{name}.weight_scale_inv": inverse}
        read = Fp8Dequantize(None)._dequantize_one(values, inverse, torch.bfloat16)
        matrices[name] = read
    settings = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [32, 32],
        "modules_to_not_convert": ["lm_head"],
    }
    return settings, tensors, matrices


def compressed() -> Made:
    """Quantise each matrix in another way that compressed-tensors has."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    ways: dict[str, tuple[str, dict[str, Any]]] = {
        "self_attn.q_proj": ("pack-quantized", _args(4, "group", group_size=GROUP)),
        "self_attn.k_proj": (
            "pack-quantized",
            _args(4, "group", group_size=GROUP, symmetric=False),
        ),
        "self_attn.v_proj": ("pack-quantized", _args(3, "channel")),
        "self_attn.o_proj": ("int-quantized", _args(8, "channel")),
        "mlp.gate_proj": ("float-quantized", _args(8, "channel", type="float")),
        "mlp.up_proj": (
            "nvfp4-pack-quantized",
            _args(4, "tensor_group", type="float", group_size=16),
        ),
        "mlp.down_proj": (
            "naive-quantized",
            _args(8, "block", type="float", block_structure=[32, 32]),
        ),
    }
    tensors, matrices, groups = {}, {}, {}
    for number, (name, weight) in enumerate(weights().items()):
        form, said = ways[name]
        args = QuantizationArgs(**said)
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        rows, columns = weight.shape
        blocks = {
            "group": weight.view(rows, columns // GROUP, 1, GROUP),
            "tensor_group": weight.view(rows, columns // 16, 1, 16),
            "channel": weight.view(rows, 1, 1, columns),
            "block": weight.view(rows // 32, 32, columns // 32, 32).transpose(1, 2),
        }[said["strategy"]]
        low, high = blocks.amin((2, 3)), blocks.amax((2, 3))
        state: dict[str, Tensor] = {"weight": weight.bfloat16()}
        of_all = None
        if args.group_size == 16:
            of_all = (448 * 6 / weight.abs().max()).reshape(1)
            state["weight_global_scale"] = of_all
        scale, zero = calculate_qparams(low, high, args, of_all)
        if args.group_size != 16:
            scale = scale.bfloat16()
        state |= {"weight_scale": scale, "weight_zero_point": zero.to(torch.int8)}
        compressor = BaseCompressor.get_value_from_registry(form)
        stored = compressor.compress(state, scheme)
        read = compressor.decompress(stored, scheme)["weight"]
        assert (read.float() - weight).abs().max() < 0.4 * weight.abs().max()
        tensors |= {f"{name}.{part}": tensor for part, tensor in stored.items()}
        if number == 0:  # what activations are rounded by; not the weights'
            tensors[f"{name}.input_scale"] = torch.ones(1)
        matrices[name] = read
        groups[f"group_{number}"] = {"targets": [f"re:.*{name}"], "weights": said}
    settings = {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ["lm_head"],
    }
    return settings, tensors, matrices


def _args(bits: int, strategy: str, **others: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "int", "strategy": strategy, "symmetric": True} | others


def awq(source: Path) -> Made:
    """Pack as autoawq's WQLinear_GEMM does, whose module needs a GPU; read with its function."""
    place = source / "awq" / "utils" / "packing_utils.py"
    found = importlib.util.spec_from_file_location("packing_utils", place)
    assert found is not None and found.loader is not None
    packing = importlib.util.module_from_spec(found)
    found.loader.exec_module(packing)
    tensors, matrices = {}, {}
    for name, weight in weights().items():
        scales, zeros = _steps(weight, 4)
        codes = (weight.T / scales.repeat_interleave(GROUP, 0)).round()
        codes = (codes + zeros.repeat_interleave(GROUP, 0)).clamp(0, 15)

        def words(part: Tensor) -> Tensor:
            each = part.int().view(part.shape[0], -1, 8)[:, :, packing.AWQ_ORDER]
            first = torch.zeros(1, dtype=torch.int32)
            return sum((each[:, :, i] << 4 * i for i in range(8)), first).contiguous()

        stored = {"qweight": words(codes), "qzeros": words(zeros), "scales": scales.half()}
        tensors |= {f"{name}.{part}": tensor for part, tensor in stored.items()}
        read = packing.dequantize_gemm(**stored, bits=4, group_size=GROUP)
        matrices[name] = read.T
    settings = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": GROUP,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": ["lm_head"],
    }
    return settings, tensors, matrices


def _steps(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return steps and zero points ``[groups, out]`` between the least and the greatest number."""
    groups = weight.T.unflatten(0, (-1, GROUP))
    low, high = groups.amin(1).clamp(max=0), groups.amax(1).clamp(min=0)
    scales = (high - low) / (2**bits - 1)
    return scales, (-low / scales).round().clamp(0, 2**bits - 1)


def gptq(source: Path, bits: int, form: str) -> Made:
    """Pack and read as gptqmodel does; ``down_proj`` has its columns in another order of groups."""
    sys.path.insert(0, str(source))
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    tensors, matrices = {}, {}
    for name, weight in weights().items():
        rows, columns = weight.shape
        ordered = name == "mlp.down_proj"
        layer = TorchLinear(bits, GROUP, bits == 8, ordered, columns, rows, False)
        order = torch.arange(columns, dtype=torch.int32) // GROUP
        if ordered:
            order = order[torch.randperm(columns)].contiguous()
        linear = nn.Linear(columns, rows, bias=False)
        linear.weight.data = weight
        scales, zeros = _steps(weight, bits)
        zeros = zeros.clamp(min=1)  # zero less one is stored: of the first form
        if bits == 8:  # symmetric
            scales = weight.T.unflatten(0, (-1, GROUP)).abs().amax(1) / 127
            zeros = torch.full_like(zeros, 128)
        elif name == "self_attn.q_proj":  # symmetric, too, in 4 bits
            scales = weight.T.unflatten(0, (-1, GROUP)).abs().amax(1) / 7
            zeros = torch.full_like(zeros, 8)
        layer.pack_original(linear, scales.T, zeros.T, order)
        layer.post_init()
        read = layer.dequantize_weight()
        assert read.dtype == torch.float16
        matrices[name] = read.T
        if form == "gptq":
            convert_gptq_v2_to_v1_format_module(
                layer, SimpleNamespace(bits=bits, pack_dtype=torch.int32)
            )
        parts = ("qweight", "qzeros", "scales", "g_idx")
        tensors |= {f"{name}.{part}": getattr(layer, part).clone() for part in parts}
    settings = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": GROUP,
        "desc_act": True,
        "sym": bits == 8,
        "checkpoint_format": form,
        "lm_head": False,
    }
    return settings, tensors, matrices


def bitsandbytes() -> Made:
    """Quantise to nf4 with steps that are quantised, too, to fp4, and to int8, in turn."""
    import bitsandbytes.functional as bnb
    from bitsandbytes.backends.default.ops import _dequantize_4bit_compute as of_torch

    tensors, matrices = {}, {}
    for number, (name, weight) in enumerate(weights().items()):
        if number % 3 == 2:
            codes, scale, _ = bnb.int8_vectorwise_quant(weight.half())
            tensors |= {f"{name}.weight": codes, f"{name}.SCB": scale}
            tensors[f"{name}.weight_format"] = torch.zeros((), dtype=torch.uint8)
            matrices[name] = bnb.int8_vectorwise_dequant(codes, scale).bfloat16()
            continue
        kind = ("nf4", "fp4")[number % 3]
        codes, state = bnb.quantize_4bit(
            weight.bfloat16(), blocksize=64, compress_statistics=kind == "nf4", quant_type=kind
        )
        tensors[f"{name}.weight"] = codes
        tensors |= {f"{name}.weight.{k}": v for k, v in state.as_dict(packed=True).items()}
        absmax = state.absmax
        if state.nested:
            absmax = bnb.dequantize_blockwise(absmax, state.state2) + state.offset
        # Its product for CPUs takes rows of 96 for whole blocks of 64; this is its reference.
        read = of_torch(codes.flatten(), absmax, state.code, 64, state.shape, state.dtype)
        assert weight.shape[1] % 64 or torch.equal(read, bnb.dequantize_4bit(codes, state))
        matrices[name] = read
    settings = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "llm_int8_skip_modules": ["lm_head"],
    }
    return settings, tensors, matrices


def adapters(base: dict[str, Tensor]) -> dict[str, Any]:
    """Write adapters of peft for a base, and return what it merges both to."""
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    def model(tied: bool) -> Any:
        config = LlamaConfig(**{**CONFIG, "tie_word_embeddings": tied, "dtype": "bfloat16"})
        made = LlamaForCausalLM(config).bfloat16()
        head = {} if tied else {"lm_head.weight": base["model.embed_tokens.weight"].flip(0)}
        left = made.load_state_dict(base | head, strict=False)
        assert set(left.missing_keys) <= {"lm_head.weight"} and not left.unexpected_keys
        return made

    settings: dict[str, tuple[bool, dict[str, Any]]] = {
        # Untied: the embedding itself by factors, ranks and alphas of their own.
        "embedding": (
            False,
            {
                "r": 2,
                "lora_alpha": 6,
                "target_modules": ["q_proj", "v_proj", "down_proj", "embed_tokens"],
                "rank_pattern": {"v_proj": 4},
                "alpha_pattern": {"mlp.down_proj": 5},
                "fan_in_fan_out": True,
            },
        ),
        "rslora": (
            True,
            {
                "r": 4,
                "lora_alpha": 3,
                "use_rslora": True,
                "target_modules": "all-linear",
                "modules_to_save": ["embed_tokens"],
            },
        ),
        "head": (
            True,
            {"r": 2, "target_modules": ["o_proj"], "modules_to_save": ["lm_head"]},
        ),
    }
    expected = {}
    for name, (tied, said) in settings.items():
        adapted = get_peft_model(model(tied), LoraConfig(task_type="CAUSAL_LM", **said))
        for key, part in adapted.named_parameters():
            if "lora_" in key or "modules_to_save" in key:
                part.data = (torch.randn(part.shape) * part.shape[-1] ** -0.5).to(part.dtype)
        place = HERE / f"lora_{name}"
        adapted.save_pretrained(place, save_embedding_layers=False)
        (place / "README.md").unlink(missing_ok=True)
        merged = PeftModel.from_pretrained(model(tied), place).merge_and_unload()
        hashes = {key: digest(part) for key, part in merged.state_dict().items()}
        expected[name] = {"tied": tied, "sha256": hashes}
    return expected


if __name__ == "__main__":
    main()
