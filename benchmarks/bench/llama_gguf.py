"""Write a Llama or Qwen3 as GGUF: ``python -m benchmarks.bench.llama_gguf MODEL FILE=FORM``.

``python -m benchmarks.bench.peers_cpu`` runs it in llama.cpp's environment, which needs ``numpy``
and ``gguf`` for it and no torch. FORM is f32, f16, q8_0 or q4_0, of every matrix; vectors are
float32. No tokenizer is written: the comparison gives every method the same token ids. Of a
vision-language model the text half is written, which is a Llama or Qwen3 for tokens of text.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

# A tensor of a layer, as transformers and as llama.cpp call it.
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
# Models whose rope turns neighbours in llama.cpp, and those whose rope turns halves in both.
_KINDS = {"llama": "llama", "qwen3": "qwen3", "qwen3_vl_text": "qwen3"}
_OTHERS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def tensors(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Read every tensor of a safetensors checkpoint as float32, without torch."""
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
        header.pop("__metadata__", None)
        data = np.memmap(path, np.uint8, "r", 8 + size)
        for name, about in header.items():
            start, stop = about["data_offsets"]
            raw = data[start:stop]
            if about["dtype"] == "BF16":
                wide = raw.view(np.uint16).astype(np.uint32) << 16
                values = wide.view(np.float32)
            else:
                values = raw.view({"F16": np.float16, "F32": np.float32}[about["dtype"]])
            yield name, values.astype(np.float32).reshape(about["shape"])


_TOWER_PARTS = ("model.visual.", "vision_tower.", "multi_modal_projector.")


def renamed(name: str) -> str:
    """Return llama.cpp's name of a tensor. Raises ValueError for one that it has not."""
    stem, _, kind = name.rpartition(".")
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem)
    if layer and layer[2] in _LAYER:
        return f"blk.{layer[1]}.{_LAYER[layer[2]]}.{kind}"
    if stem in _OTHERS:
        return f"{_OTHERS[stem]}.{kind}"
    raise ValueError(f"llama.cpp's Llama has no tensor for {name}")


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorder the rows of a head so that the two numbers that rope turns together are neighbours.

    transformers keeps them half a head apart.
    """
    half = weight.shape[0] // heads // 2
    pairs = np.arange(half)[:, None] + np.array([0, half])
    rows = np.arange(heads)[:, None] * 2 * half + pairs.reshape(-1)
    made: np.ndarray = weight[rows.reshape(-1)]
    return made


def write(folder: Path, target: Path, form: str) -> None:
    """Write one file.

    Raises:
        ValueError: another kind of model, or a form that is not known.
    """
    gguf: Any = importlib.import_module("gguf")

    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    config = config.get("text_config", config)
    kind = _KINDS.get(config["model_type"])
    if kind is None:
        known = ", ".join(_KINDS)
        raise ValueError(f"{folder} is a {config['model_type']}; written as GGUF are {known}")
    types = gguf.GGMLQuantizationType
    kinds = {"f32": types.F32, "f16": types.F16, "q8_0": types.Q8_0, "q4_0": types.Q4_0}
    if form not in kinds:
        raise ValueError(f"form {form!r} is none of {', '.join(kinds)}")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    rope = config.get("rope_parameters") or config
    draft = target.with_name(f"{target.name}.part")
    writer = gguf.GGUFWriter(str(draft), kind)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_rope_dimension_count(head_dim)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    for name, values in tensors(folder):
        name = name.replace("model.language_model.", "model.")
        if name.startswith(_TOWER_PARTS):
            continue
        name = name.removeprefix("language_model.")
        if kind == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            values = interleaved(values, heads if "q_proj" in name else kv_heads)
        form_of = kinds[form] if values.ndim > 1 else types.F32
        writer.add_tensor(renamed(name), gguf.quants.quantize(values, form_of), raw_dtype=form_of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    draft.replace(target)


def main(arguments: list[str]) -> int:
    """Write the files; an error is one line on stderr."""
    folder, *wanted = arguments
    try:
        for pair in wanted:
            target, _, form = pair.rpartition("=")
            write(Path(folder), Path(target), form)
    except (OSError, ValueError, KeyError, ImportError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
