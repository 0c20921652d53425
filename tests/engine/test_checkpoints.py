"""Checkpoints that are damaged, unsupported or not there, and how weights are read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from mmkv.engine.errors import ModelError
from mmkv.engine.model.families import family_for
from mmkv.engine.model.families.loading import load, resolve_device, resolve_dtype
from mmkv.engine.model.settings import require_sizes
from mmkv.engine.model.spec import Routing
from tests.engine.test_families import CPU, one_line
from tests.support.factories import CHECKPOINTS, checkpoint, make_model


@pytest.mark.parametrize("name", ["qwen3_vl", "llava_next", "qwen2", "qwen3_moe", "phi3"])
def test_text_weights_are_not_copied(name: str) -> None:
    reader, spec, weights = load(checkpoint(name), "float32", "cpu")
    assert len(reader.text_model(reader.hf).layers) == 0
    left = {p.untyped_storage().data_ptr(): p.nbytes for p in reader.hf.parameters()}
    ours = {weights.embed.untyped_storage().data_ptr(), weights.norm.untyped_storage().data_ptr()}
    ours.add(weights.head.untyped_storage().data_ptr())
    vision = sum(size for where, size in left.items() if where not in ours)
    whole = sum(p.nbytes for p in make_model(CHECKPOINTS[name]).parameters())
    # The gains of q and k are kept once per head, a few hundred bytes.
    gains = [w.qk_norm.nbytes for w in weights.layers if w.qk_norm is not None]
    assert whole <= vision + weights.nbytes() <= whole + sum(gains)
    assert spec.rope.axes == reader.rope_axes


def test_end_tokens() -> None:
    model = make_model(CHECKPOINTS["llama"])
    assert family_for(model.config)(model).eos_token_ids == ()
    model.config.eos_token_id = 7
    assert family_for(model.config)(model).eos_token_ids == (7,)
    model.generation_config.eos_token_id = [3, 4]
    assert family_for(model.config)(model).eos_token_ids == (3, 4)


@pytest.mark.parametrize("kind", ["gpt2", "mixtral", "gemma3"])
def test_unsupported_types_are_named(kind: str) -> None:
    with pytest.raises(ModelError) as error:
        family_for(transformers.CONFIG_MAPPING[kind]())
    assert repr(kind) in one_line(error) and "qwen3_vl" in one_line(error)


def test_unsupported_text_part_and_quantisation() -> None:
    config = transformers.LlavaConfig(text_config=transformers.Gemma2Config())
    with pytest.raises(ModelError, match="'gemma2' language model"):
        family_for(config)
    config = transformers.LlamaConfig()
    config.quantization_config = {"quant_method": "awq"}
    with pytest.raises(ModelError, match="quantised"):
        family_for(config)


def copy_of(name: str, folder: Path) -> Path:
    return Path(shutil.copytree(checkpoint(name), folder / "model"))


def lose_an_expert(folder: Path) -> None:
    lose_a_tensor(folder, "model.layers.1.mlp.experts.3.up_proj.weight")


def lose_a_tensor(folder: Path, name: str = "model.layers.1.mlp.up_proj.weight") -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors.pop(name)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def shrink_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    key = "model.layers.1.mlp.up_proj.weight"
    tensors[key] = tensors[key][:-1].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5000])


def scribble(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"not a safetensors file at all" * 9)


def as_pickle(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def configured(**values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **values}))

    return change


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lose_a_tensor, "lacks 1 weights (model.layers.1.mlp.up_proj.weight"),
        (shrink_a_tensor, "not a readable checkpoint"),
        (truncate, "corrupt"),
        (scribble, "corrupt"),
        (as_pickle, "pytorch_model.bin alone, a pickle"),
        (lambda folder: (folder / "model.safetensors").unlink(), "not a readable checkpoint"),
        (lambda folder: (folder / "config.json").unlink(), "no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "not a readable checkpoint"),
        (configured(model_type="no_such_model"), "no_such_model"),
        (configured(model_type="mixtral"), "'mixtral' is not supported"),
        (configured(hidden_act="gelu"), "'gelu' is not supported"),
        (configured(rope_parameters={"rope_type": "no_such_rope"}), "no_such_rope"),
    ],
)
def test_damaged_checkpoints(tmp_path: Path, damage: Callable[[Path], Any], message: str) -> None:
    folder = copy_of("llama", tmp_path)
    damage(folder)
    with pytest.raises(ModelError) as error:
        load(folder, "auto", "cpu")
    assert message in one_line(error)


def test_no_experts_are_a_dense_model() -> None:
    config = transformers.AutoConfig.from_pretrained(checkpoint("qwen3_moe"), num_experts=0)
    require_sizes(config)
    assert Routing.of(config) is None


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lose_an_expert, "lacks weights of experts"),
        (
            configured(num_experts_per_tok=9),
            "num_experts_per_tok is 9, not at most num_experts (8)",
        ),
        (
            configured(num_local_experts=10**9),
            "num_experts or num_local_experts is 1000000000, not a whole",
        ),
        (configured(num_local_experts=4000), "describes a text model of more numbers than"),
        (configured(decoder_sparse_step=0), "decoder_sparse_step is 0, not a whole number"),
    ],
)
def test_damaged_experts(tmp_path: Path, damage: Callable[[Path], Any], message: str) -> None:
    folder = copy_of("qwen3_moe", tmp_path)
    damage(folder)
    with pytest.raises(ModelError) as error:
        load(folder, "auto", "cpu")
    assert message in one_line(error)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("/no/such/folder", "no folder"),
        ("./missing", "no folder"),
        ("a/b/c", "no folder"),
        ("", "name is empty"),
        ("nobody/no-such-model", "cannot get 'nobody/no-such-model' from the hub"),
        (__file__, "is a file"),
    ],
)
def test_names_without_a_checkpoint(name: str, message: str) -> None:
    """Offline, as conftest sets it: a hub id that is not cached."""
    with pytest.raises(ModelError) as error:
        load(name, "auto", "cpu")
    assert message in one_line(error)


def test_dtypes_and_devices() -> None:
    config = transformers.LlamaConfig(dtype=torch.bfloat16)
    assert resolve_dtype("auto", config, CPU) == torch.float32
    assert resolve_dtype("auto", config, torch.device("cuda")) == torch.bfloat16
    assert resolve_dtype("auto", transformers.LlamaConfig(), torch.device("cuda")) == torch.float32
    assert resolve_dtype("bfloat16", config, CPU) == torch.bfloat16
    assert resolve_dtype(torch.float16, config, CPU) == torch.float16
    for bad in ("int8", torch.int64):
        with pytest.raises(ModelError, match="not supported; use auto"):
            resolve_dtype(bad, config, CPU)
    assert resolve_device("cpu") == CPU
    for bad in ("cuda:99", "gpu", "meta"):
        with pytest.raises(ModelError) as error:
            resolve_device(bad)
        one_line(error)
    for odd in (torch.zeros(3), torch.tensor([[1, 2]]), None, b"cpu", 0.5):
        with pytest.raises(TypeError, match=r"must be a string or a torch\.device"):
            resolve_device(odd)
        with pytest.raises(TypeError, match=r"must be a string or a torch\.dtype"):
            resolve_dtype(odd, config, CPU)


def test_progress_is_reported() -> None:
    message: list[str] = []
    load(checkpoint("llama"), "auto", "cpu", message.append)
    assert message == ["reading the config", "reading the weights", "preparing the decoder"]
