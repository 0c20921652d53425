"""LoRA adapters: the merged weights are peft's own, or those of the formula; others are refused.

The adapters in tests/support/quantised and what peft merged them to were made by make.py there.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mmkv import Engine
from mmkv.engine.backends import kernels_for
from mmkv.engine.errors import ModelError
from mmkv.engine.model import panel_files
from mmkv.engine.model.families.loading import load
from mmkv.engine.model.source import SINGLE, find_adapter, locate
from tests.engine.test_quantised import HERE, SAID, configure, folder_of, numbers, plain_of
from tests.support.factories import checkpoint
from tests.support.quantised.make import digest

ADAPTERS = SAID["adapters"]
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def base_of(name: str, folder: Path, method: str = "fp8") -> Path:
    """Write the base of an adapter: plain, or quantised in FP8, which are the same numbers."""
    base = folder_of("fp8", folder) if method == "fp8" else plain_of("fp8", folder)
    if not ADAPTERS[name]["tied"]:
        configure(base, tie_word_embeddings=False)
        file = base / ("plain.safetensors" if method == "fp8" else SINGLE)
        tensors = load_file(file)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].flip(0)
        save_file(tensors, file, metadata={"format": "pt"})
        if method == "fp8":
            index = base / "model.safetensors.index.json"
            listed = json.loads(index.read_text())
            listed["weight_map"]["lm_head.weight"] = file.name
            index.write_text(json.dumps(listed))
    return base


@pytest.mark.parametrize("method", ["plain", "fp8"])
@pytest.mark.parametrize("name", ADAPTERS)
def test_merged_weights_are_what_peft_merges(name: str, method: str, tmp_path: Path) -> None:
    base = base_of(name, tmp_path / "base", method)
    expected = ADAPTERS[name]["sha256"]
    weights = load(base, "bfloat16", "cpu", adapter=HERE / f"lora_{name}")[2]
    before = load(base, "bfloat16", "cpu")[2]
    at, layer = "model.layers.0.", weights.layers[0]
    found = {
        "model.embed_tokens.weight": weights.embed,
        "lm_head.weight": weights.head,
        f"{at}self_attn.o_proj.weight": layer.out,
        f"{at}mlp.down_proj.weight": layer.down,
    }
    for part, tensor in zip("qkv", layer.qkv.split([64, 32, 32]), strict=True):  # type: ignore[union-attr]
        found[f"{at}self_attn.{part}_proj.weight"] = tensor
    for part, tensor in zip(("gate", "up"), layer.gate_up.chunk(2), strict=True):  # type: ignore[union-attr]
        found[f"{at}mlp.{part}_proj.weight"] = tensor
    for key, tensor in found.items():
        assert isinstance(tensor, Tensor) and digest(tensor) == expected[key], key
    assert not torch.equal(layer.out, before.layers[0].out) or name == "embedding"  # type: ignore[arg-type]


def adapter(
    folder: Path, tensors: dict[str, Tensor], prefix: str = "base_model.model.", **said: Any
) -> Path:
    """Write an adapter as peft does."""
    folder.mkdir(exist_ok=True)
    named = {f"{prefix}{name}": tensor for name, tensor in tensors.items()}
    save_file(named, folder / WEIGHTS, metadata={"format": "pt"})
    settings = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "target_modules": ["q_proj"]} | said
    (folder / CONFIG).write_text(json.dumps(settings))
    return folder


LAYER = "layers.1.mlp.up_proj"


@pytest.mark.parametrize(
    ("name", "module", "stored"),
    [
        ("qwen2_5_vl", f"model.language_model.{LAYER}", f"model.{LAYER}"),
        ("qwen2_5_vl", f"model.{LAYER}", f"model.{LAYER}"),
        ("qwen2_5_vl", "model.visual.blocks.0.attn.qkv", "visual.blocks.0.attn.qkv"),
        ("llava", f"model.language_model.{LAYER}", f"language_model.model.{LAYER}"),
        ("llava", "model.multi_modal_projector.linear_1", "multi_modal_projector.linear_1"),
        ("qwen3_moe", "model.layers.0.mlp.experts.2.up_proj", ""),
    ],
)
def test_names_of_all_versions_reach_text_tower_and_experts(
    name: str, module: str, stored: str, tmp_path: Path
) -> None:
    """An independent sum: a plain checkpoint in which one matrix is W + 2 B A."""
    merged = Path(shutil.copytree(checkpoint(name), tmp_path / "merged"))
    tensors, stored = load_file(merged / SINGLE), stored or module
    weight = tensors[f"{stored}.weight"]
    down, up = torch.randn(3, weight.shape[1]), torch.randn(len(weight), 3)
    tensors[f"{stored}.weight"] = weight + 2 * (up @ down)
    save_file(tensors, merged / SINGLE, metadata={"format": "pt"})
    factors = {f"{module}.lora_A.weight": down, f"{module}.lora_B.weight": up}
    place = adapter(tmp_path / "adapter", factors)
    ours = load(checkpoint(name), "float32", "cpu", adapter=place)
    theirs = load(merged, "float32", "cpu")
    for key, part in ours[2].named():
        torch.testing.assert_close(part, dict(theirs[2].named())[key], rtol=1e-6, atol=1e-6)
    others = dict(theirs[0].hf.named_parameters())
    for key, part in ours[0].hf.named_parameters():
        torch.testing.assert_close(part, others[key], rtol=1e-6, atol=1e-6)


def test_packed_weights_and_sessions_tell_an_adapter_from_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MMKV_PANELS", "1GB")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(panel_files, "LEAST_BYTES", 1)
    base = base_of("rslora", tmp_path / "base", "plain")
    place = Path(shutil.copytree(HERE / "lora_rslora", tmp_path / "adapter"))

    def read(adapter: Path | None) -> tuple[Tensor, str]:
        made = load(base, form="int8", kernels=kernels_for("int8"), adapter=adapter)[2]
        return numbers(made)["layers.0.out"].clone(), made.fingerprint()

    first, adapted, again = read(None), read(place), read(None)
    assert torch.equal(first[0], again[0]) and first[1] == again[1] != adapted[1]
    assert not torch.equal(first[0], adapted[0])
    assert torch.equal(adapted[0], read(place)[0])
    said = json.loads((place / CONFIG).read_text())
    (place / CONFIG).write_text(json.dumps(said | {"lora_alpha": 30}))
    assert not torch.equal(adapted[0], read(place)[0]), "another scale of the same factors"


def test_an_engine_answers_with_it(tmp_path: Path) -> None:
    base = base_of("rslora", tmp_path / "base", "plain")
    ids = {"input_ids": torch.arange(9)[None]}
    logits = [
        Engine.from_pretrained(base, policy="full", adapter=each).session().prefill(ids)
        for each in (None, HERE / "lora_rslora", str(HERE / "lora_rslora"))
    ]
    assert torch.equal(logits[1], logits[2]) and not torch.allclose(logits[0], logits[1])


FACTORS = {
    "model.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(3, 64),
    "model.layers.0.self_attn.q_proj.lora_B.weight": torch.ones(64, 3),
}


def without_weights(folder: Path) -> None:
    adapter(folder, FACTORS)
    (folder / WEIGHTS).unlink()


def scribbled(folder: Path) -> None:
    adapter(folder, FACTORS)
    (folder / WEIGHTS).write_bytes(b"no safetensors" * 9)


def torn(folder: Path) -> None:
    adapter(folder, FACTORS)
    (folder / CONFIG).write_text("{")


def written(changes: dict[str, Any] | None = None, **said: Any) -> Callable[[Path], Any]:
    kept = {n: t for n, t in (FACTORS | (changes or {})).items() if t is not None}
    return lambda folder: adapter(folder, kept, **said)


A, B = FACTORS
EMBEDDING = "model.embed_tokens"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder: None, "no adapter"),
        (Path.mkdir, "has no adapter_config.json"),
        (without_weights, "has no adapter_model.safetensors"),
        (torn, "adapter_config.json cannot be read"),
        (written(use_dora=True), "has DoRA, which mmkv does not merge; merge it by peft"),
        (written(lora_bias=True), "has biases of its own"),
        (written(init_lora_weights="pissa_niter_4"), "changes the base"),
        (written(peft_type="IA3"), "is of the type 'IA3'; mmkv merges LoRA alone"),
        (written({B: None}), "has one factor of two"),
        (written({A: torch.ones(3, 65)}), "[64, 3] x [3, 65] and r = 3"),
        (written(r=4), "and r = 4 for"),
        (written({"model.layers.7.mlp.up_proj.lora_A.weight": torch.ones(3, 64)}), "no place for"),
        (written({"model.norm.lora_magnitude_vector": torch.ones(3)}), "no place for"),
        (written({"lm_head.weight": torch.ones(97, 64)}), "of the shape [97, 64] for [96, 64]"),
        (
            written(
                {
                    f"{EMBEDDING}.lora_embedding_A": torch.ones(3, 96),
                    f"{EMBEDDING}.lora_embedding_B": torch.ones(64, 3),
                }
            ),
            "the embedding or the head of a model where both are one matrix",
        ),
        (written({A: None, B: None}), "changes nothing"),
        (written({A: torch.ones(3, 64).int()}), "q_proj.lora_A.weight in I32"),
        (written({A.replace("model.", "", 1): torch.ones(3, 64)}), "has two of"),
        (written(lora_alpha=float("nan")), "NaN or infinity in its factors for"),
        (written({A: torch.full((3, 64), float("inf"))}), "NaN or infinity in its factors for"),
        (written(rank_pattern={r"((\w|\.)+)+!": 3}), "which may take forever"),
        (scribbled, "the weights of the adapter adapter are corrupt"),
        (
            written(lora_alpha="6"),
            "the adapter adapter is not a readable checkpoint: a value in one of its",
        ),
    ],
)
def test_other_adapters_are_refused_by_a_line(
    make: Callable[[Path], Any], words: str, tmp_path: Path
) -> None:
    base = base_of("rslora", tmp_path / "base", "plain")
    make(tmp_path / "adapter")
    with pytest.raises(ModelError) as error:
        load(base, "float32", "cpu", adapter=tmp_path / "adapter")
    assert words in str(error.value) and "\n" not in str(error.value)


def test_an_adapter_alone_names_the_command(tmp_path: Path) -> None:
    place = adapter(tmp_path / "mine", FACTORS, base_model_name_or_path="Qwen/Qwen3-4B")
    with pytest.raises(ModelError) as error:
        locate(str(place))
    assert f"name both: mmkv chat Qwen/Qwen3-4B --adapter {place}" in str(error.value)
    assert find_adapter(str(place)) == (place / CONFIG, place / WEIGHTS)
    with pytest.raises(ModelError, match="mmkv pull OWNER/NAME"):
        find_adapter("owner/never-fetched")
