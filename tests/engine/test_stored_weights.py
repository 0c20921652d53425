"""Weights read from the files equal those that transformers loads, bit for bit, in every family."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from mmkv.engine.backends import kernels_for
from mmkv.engine.errors import ModelError
from mmkv.engine.model.families import Family, TextFamily, family_for, loading
from mmkv.engine.model.families.base import DeferredModel
from mmkv.engine.model.families.vision import held_matrices
from mmkv.engine.model.product import Kernels, WeightForm, multiply
from mmkv.engine.model.product import plain as numbers
from mmkv.engine.model.spec import DecoderSpec, RopeSpec
from mmkv.engine.model.stored import StoredTensors
from mmkv.engine.model.weights import DecoderWeights
from tests.support.factories import CHECKPOINTS, FAMILIES, checkpoint, stored_in_bfloat16
from tests.support.model_configs import config_of
from tests.support.tiers import long_but, one_in


def through_transformers(
    folder: Path, dtype: torch.dtype
) -> tuple[Family, DecoderSpec, DecoderWeights]:
    """Load as families of other packages are loaded: a whole model, emptied."""
    config = transformers.AutoConfig.from_pretrained(folder)
    kind = family_for(config)
    model = getattr(transformers, kind.auto_class).from_pretrained(folder, dtype=dtype).eval()
    text, family = kind.text_model(model), kind(model)
    spec = DecoderSpec.from_hf(text, sees=kind.has_vision)
    return family, spec, DecoderWeights.take(text, kind.output_head(model), spec)


def named(weights: DecoderWeights) -> dict[str, Tensor]:
    found: dict[str, Tensor | None] = {
        "embed": weights.embed,
        "norm": weights.norm,
        "head": weights.head,
    }
    for index, layer in enumerate(weights.layers):
        found |= {f"{index}.{part}": tensor for part, tensor in layer.parts()}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def assert_same(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        other = theirs[name]
        assert tensor.dtype == other.dtype and torch.equal(tensor, other), name


def plain(spec: DecoderSpec | RopeSpec) -> dict[str, Any]:
    def value(part: Any) -> Any:
        if isinstance(part, RopeSpec):
            return plain(part)
        return part.tolist() if isinstance(part, Tensor) else part

    return {one.name: value(getattr(spec, one.name)) for one in fields(spec)}


def buffers_of(model: Any) -> dict[str, Tensor]:
    """What the weights are not, but for Gemma's scale and angles, which its layers alone read."""
    own = ("embed_scale", "_attention_inv_freq", "_attention_original_inv_freq")
    return {name: each for name, each in model.named_buffers() if not name.endswith(own)}


def assert_loads_alike(folder: Path, dtype: torch.dtype, direct: bool = True) -> Family:
    family, spec, weights = loading.load(folder, dtype, "cpu")
    assert isinstance(family._hf, DeferredModel) == direct
    other, wanted, theirs = through_transformers(folder, dtype)
    assert_same(named(weights), named(theirs))
    ours_tied, theirs_tied = (w.head.data_ptr() == w.embed.data_ptr() for w in (weights, theirs))
    assert ours_tied == theirs_tied
    assert spec.entry_index == wanted.entry_index
    assert plain(spec) == plain(wanted)
    for name in ("eos_token_ids", "vocab_size", "placeholder"):
        assert getattr(family, name) == getattr(other, name)
    assert_same(dict(family.hf.named_parameters()), dict(other.hf.named_parameters()))
    assert_same(buffers_of(family.hf), buffers_of(other.hf))
    assert family.hf.config.get_text_config().num_hidden_layers == spec.num_layers
    return family


# Read as others here are; test_parity.py loads them, too.
ALIKE = ("qwen2_vl", "idefics3", "llava_next_video", "qwen3_5_moe", "gemma3", "glm46v")
QUICK = [name for name in FAMILIES if name not in ALIKE]


@one_in(3)
@pytest.mark.parametrize("name", long_but(QUICK, CHECKPOINTS, "a variant of another"))
def test_every_family(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tower reads its own tensors, each once, when it is asked for."""
    read: list[str] = []
    plain = StoredTensors.read_as_stored

    def noted(self: StoredTensors, tensor: str) -> Tensor:
        read.append(tensor)
        return plain(self, tensor)

    monkeypatch.setattr(StoredTensors, "read_as_stored", noted)
    family = assert_loads_alike(checkpoint(name), torch.float32)
    if family.has_vision:
        text = ("model.language_model.", "language_model.", "model.layers.", "model.norm.")
        text += ("model.text_model.", "model.embed_tokens.", "lm_head.")
        stored = load_file(checkpoint(name) / "model.safetensors")
        assert sorted(read) == sorted(part for part in stored if not part.startswith(text))


def narrow(folder: Path) -> None:
    stored_in_bfloat16("llama_biased", folder)


def head_beside_the_embedding(folder: Path) -> None:
    """A head is stored although the config ties it, and it is another one."""
    tensors = load_file(folder / "model.safetensors")
    rewrite(folder, tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] * 2})


def copy_of_the_embedding(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    rewrite(folder, tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})


def computed_buffer(folder: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(folder, load_file(folder / "model.safetensors") | {name: torch.ones(4)})


def newer_llava(folder: Path) -> None:
    """Write the names of transformers' own modules; it saves LLaVA under those of old."""
    found = load_file(folder / "model.safetensors")
    tensors = {
        name.replace("language_model.lm_head.", "lm_head.")
        .replace("language_model.model.", "model.language_model.")
        .replace("vision_tower.", "model.vision_tower.")
        .replace("multi_modal_projector.", "model.multi_modal_projector."): tensor
        for name, tensor in found.items()
    }
    assert {"lm_head.weight", "model.language_model.norm.weight"} <= tensors.keys() - found.keys()
    rewrite(folder, tensors)


def newer_qwen(folder: Path) -> None:
    """Write the names of transformers' own modules; it saves Qwen2.5-VL under those of old."""
    found = load_file(folder / "model.safetensors")
    tensors = {
        name.replace("model.", "model.language_model.").replace("visual.", "model.visual."): tensor
        for name, tensor in found.items()
    }
    assert {"model.visual.merger.ln_q.weight"} <= tensors.keys() - found.keys()
    rewrite(folder, tensors)


def stacked(turned: bool) -> Callable[[Path], None]:
    """Return a change to the matrices of all experts in one tensor, as on the hub or not turned."""

    def change(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        at = "model.language_model.layers.{}.mlp.experts.{}"
        for layer, part in itertools.product(range(2), ("gate_up_proj", "down_proj")):
            whole = tensors.pop(at.format(layer, part), None)
            if whole is None:
                names = ("gate_proj", "up_proj") if part == "gate_up_proj" else ("down_proj",)
                each = [
                    torch.cat([tensors.pop(at.format(layer, f"{e}.{n}.weight")) for n in names])
                    for e in range(8)
                ]
                whole = torch.stack(each)
            inputs = 128 if part == "gate_up_proj" else 48
            if (whole.shape[1] == inputs) != turned:
                whole = whole.transpose(1, 2).contiguous()
            tensors[at.format(layer, part)] = whole
        rewrite(folder, tensors)

    return change


def shards(folder: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="200KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2


def base_model(folder: Path) -> None:
    """Leave the prefix of the text model out, as a model without a head is saved."""
    tensors = load_file(folder / "model.safetensors")
    rewrite(folder, {name.removeprefix("model."): tensor for name, tensor in tensors.items()})


def rewrite(folder: Path, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@one_in(3)
@pytest.mark.parametrize(
    ("name", "change", "direct"),
    [
        ("llama_biased", narrow, True),
        ("llama", head_beside_the_embedding, True),
        ("llama", copy_of_the_embedding, True),
        ("llama", computed_buffer, True),
        ("llama_biased", shards, True),
        ("llava", newer_llava, True),
        ("qwen2_5_vl_dim128", newer_qwen, True),
        ("qwen3_vl_moe", stacked(turned=True), True),
        ("qwen3_vl_moe", stacked(turned=False), True),
        ("llama", base_model, False),
    ],
)
def test_other_forms(
    name: str, change: Callable[[Path], None], direct: bool, tmp_path: Path
) -> None:
    """``direct``: whether the files are read; transformers has to understand the others."""
    folder = Path(shutil.copytree(checkpoint(name), tmp_path / "model"))
    change(folder)
    assert_loads_alike(folder, torch.float32, direct)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("llama", "model.layers.0.self_attn.q_norm.weight"),
        ("qwen3_moe", "model.layers.0.mlp.shared_expert.up_proj.weight"),
        ("qwen3_vl", "model.language_model.layers.0.mlp.gate.weight"),
    ],
)
def test_weights_that_the_decoder_does_not_have_are_refused(
    name: str, part: str, tmp_path: Path
) -> None:
    """transformers would leave them out with a warning."""
    folder = Path(shutil.copytree(checkpoint(name), tmp_path / "model"))
    stored = load_file(folder / "model.safetensors")
    rewrite(folder, stored | {part: torch.ones(64)})
    with pytest.raises(ModelError, match=rf"has 1 text weights .*\({part}"):
        loading.load(folder, "float32", "cpu")


def test_axes_of_a_rotary_module_and_of_its_family_agree(tmp_path: Path) -> None:
    """A rotary module of another package need not hold the sections that its config names."""

    class Plain:
        attention_scaling, inv_freq = 1.0, torch.ones(4)

        def __init__(self, **named: Any) -> None:
            rope = {"rope_type": "default", "rope_theta": 1e4} | named
            self.config = SimpleNamespace(rope_parameters=rope)

    read = RopeSpec.from_rotary
    assert read(Plain()).mrope_axes is None
    assert read(Plain(mrope_section=[2, 1, 1]), None, False).mrope_axes == (0, 0, 1, 2)
    assert read(Plain(mrope_section=[2, 1, 1]), (1, 1, 2)).mrope_axes == (0, 1, 2, 0)
    assert read(Plain(mrope_section=[2, 1, 1]), (1, 1, 2), False).mrope_axes == (0, 0, 1, 2)
    assert read(Plain(), (1, 1, 2), False).mrope_axes == (0, 1, 2, 2)
    with pytest.raises(ModelError, match="sections of 64 frequencies do not fit the 4 of a head"):
        read(Plain(), (16, 24, 24))
    folder = Path(shutil.copytree(checkpoint("qwen2_5_vl"), tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["rope_parameters"].pop("mrope_section")
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="sections of 64 frequencies do not fit the 16 of a head"):
        loading.load(folder, "float32", "cpu")


def test_a_family_of_other_axes_than_its_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Turning(TextFamily):
        model_types, rope_axes = ("llama",), 3

    monkeypatch.setattr(loading, "family_for", lambda config: Turning)
    with pytest.raises(ModelError, match=r"Turning has positions of 3 axes and .* rotates by 1"):
        loading.load(checkpoint("llama"), "float32", "cpu")


def test_end_tokens_come_from_the_generation_config(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert loading.load(folder, "auto", "cpu")[0].eos_token_ids == (7, 9)
    (folder / "generation_config.json").write_text("{")
    assert loading.load(folder, "auto", "cpu")[0].eos_token_ids == ()


def test_a_tower_that_cannot_be_read_is_refused_when_it_is_needed(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoint("qwen3_vl"), tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("model.visual.merger.norm.weight")
    rewrite(folder, tensors)
    family = loading.load(folder, "auto", "cpu")[0]
    for _ in range(2):
        with pytest.raises(ModelError, match=r"lacks 1 weights \(model.visual.merger.norm"):
            _ = family.hf


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32, torch.float16])
def test_matrices_that_bfloat16_holds_are_read_in_it(tmp_path: Path, stored: torch.dtype) -> None:
    """Of whatever dtype in the file; gains and biases are float32, as is a matrix that is not."""
    folder = shutil.copytree(checkpoint("qwen2"), tmp_path / "model")
    file = folder / "model.safetensors"
    tensors = {name: t.bfloat16().to(stored) for name, t in load_file(file).items()}
    odd = "model.layers.0.mlp.down_proj.weight"
    if stored == torch.float32:
        tensors[odd][0, 0] += 2.0**-20
    save_file(tensors, file, {"format": "pt"})
    weights = loading.load(folder, "float32", "cpu", kernels=Kernels(multiply))[2]
    plain = loading.load(folder, "float32", "cpu")[2]
    assert weights.product is multiply
    assert weights.fingerprint() == plain.fingerprint()
    for (name, ours), (_, theirs) in zip(weights.named(), plain.named(), strict=True):
        assert torch.equal(ours.float(), theirs), name
    kept = {id(m): m.dtype for m in weights.matrices()}
    wide = [m for m, dtype in kept.items() if dtype == torch.float32]
    assert wide == ([id(weights.layers[0].down)] if stored == torch.float32 else [])
    assert weights.layers[0].qkv_bias.dtype == weights.dtype == torch.float32


def test_a_model_of_transformers_is_narrowed_too() -> None:
    weights = through_transformers(checkpoint("qwen3"), torch.float32)[2]
    for matrix in weights.matrices():
        matrix.copy_(matrix.bfloat16())
    before = dict(weights.named())
    weights.hold(WeightForm("auto"))
    assert all(matrix.dtype == torch.bfloat16 for matrix in weights.matrices())
    for name, tensor in weights.named():
        assert torch.equal(tensor.float(), before[name])


SEEING = [name for name in FAMILIES if hasattr(config_of(CHECKPOINTS[name]), "vision_config")]


def peak_growth(make: Callable[[], Any]) -> int:
    """Count the bytes by which this process' resident memory grew at its peak."""
    about = Path("/proc/self")
    try:
        (about / "clear_refs").write_text("5")  # the peak is what is resident now
    except OSError as error:
        pytest.skip(f"this system does not measure a peak anew: {error.strerror}")

    def kib(field: str) -> int:
        lines = (about / "status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(field))

    before = kib("VmRSS:")
    make()
    return (kib("VmHWM:") - before) * 1024


def test_a_tower_takes_no_memory_for_the_embedding(tmp_path: Path) -> None:
    folder = stored_in_bfloat16("qwen3_vl", tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    width = tensors["model.language_model.norm.weight"].numel()
    rows, first = 400_000, tensors["model.language_model.embed_tokens.weight"]
    tensors["model.language_model.embed_tokens.weight"] = first[:1].expand(rows, width).contiguous()
    rewrite(folder, tensors)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["vocab_size"] = rows
    (folder / "config.json").write_text(json.dumps(config))
    _ = loading.load(checkpoint("qwen3_vl"), "float32", "cpu")[0].hf  # its modules are imported
    family = loading.load(folder, "float32", "cpu", kernels=Kernels(multiply))[0]
    embedding = rows * width * 2
    assert embedding > 150e6
    assert peak_growth(lambda: family.hf) < 0.2 * embedding


@pytest.mark.parametrize(
    ("name", "dtype", "several"),
    [
        *long_but(
            [(name, torch.bfloat16, True) for name in ("qwen3_vl", "internvl", "gemma3")],
            [(name, torch.bfloat16, True) for name in SEEING if name not in ALIKE],
            "test_every_family has every family",
        ),
        ("llava", torch.bfloat16, False),
        ("qwen3_vl", torch.float16, False),
        ("llava", torch.float32, False),
    ],
)
def test_a_tower_stored_in_another_dtype(
    name: str, dtype: torch.dtype, several: bool, tmp_path: Path
) -> None:
    """Beside a decoder whose matrices stay narrow the tower is widened tensor by tensor.

    ``several``: one of its tensors is wider in the file, too, and torch multiplies.
    """
    folder = Path(shutil.copytree(checkpoint(name), tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    some = ("norm", "stem.bias")
    odd = next(
        part for part in sorted(tensors) if "language" not in part and any(o in part for o in some)
    )
    changed = {p: t.to(dtype) if t.is_floating_point() else t for p, t in tensors.items()}
    kernels = Kernels(multiply) if several else kernels_for("auto")
    rewrite(folder, changed | ({odd: tensors[odd]} if several else {}))
    family = loading.load(folder, "float32", "cpu", kernels=kernels)[0]
    theirs = through_transformers(folder, torch.float32)[0].hf
    wanted = {k: t for k, t in theirs.named_parameters() if not is_text(k)}
    ours = {k: t for k, t in family.hf.named_parameters() if not is_text(k)}
    held = dict(held_matrices(family.hf))
    assert bool(held) == (dtype == torch.bfloat16)
    ours |= {k: numbers(matrix).float().view_as(wanted[k]) for k, matrix in held.items()}
    assert_same(ours, wanted)
    assert_same(buffers_of(family.hf), buffers_of(theirs))
    assert family.hf.dtype == family.hf.config.vision_config.dtype == torch.float32


def is_text(name: str) -> bool:
    return name.startswith(("model.language_model.", "model.text_model.", "lm_head."))


@pytest.mark.parametrize("number", [float("nan"), float("-inf")])
def test_a_tower_of_broken_numbers_is_refused(
    number: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = stored_in_bfloat16("qwen3_vl", tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.visual.merger.norm.weight"][1] = number
    rewrite(folder, tensors)
    for kernels in (None, Kernels(multiply)):
        family = loading.load(folder, "float32", "cpu", kernels=kernels)[0]
        with pytest.raises(ModelError, match=r"NaN or infinity \(in model.visual.merger.norm"):
            _ = family.hf
    monkeypatch.setattr(loading, "FAMILIES", ())  # those of others are loaded whole
    with pytest.raises(ModelError, match=r"NaN or infinity \(in model.visual.merger.norm"):
        loading.load(folder, "float32", "cpu")


def test_a_tower_whose_files_are_gone_is_refused(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoint("qwen3_vl"), tmp_path / "model"))
    family = loading.load(folder, "float32", "cpu")[0]
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"the weights of .* are gone; get the checkpoint again"):
        _ = family.hf
