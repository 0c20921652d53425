"""What a model takes is known before it is loaded: beside what it takes once it is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from safetensors.torch import load_file, save_file
from torch import nn

from mmkv import Engine
from mmkv.engine.model.families.vision import HeldLinear
from mmkv.planner import FORMS, MemoryPlan, WeightCount, _unpacked, advice, planned, plans
from mmkv.resources import bundled_model
from tests.support.factories import checkpoint
from tests.support.model_configs import Checkpoint
from tests.support.sessions import save_checkpoint

if TYPE_CHECKING:
    from tests.support.cli_fixtures import Ran

pytest_plugins = ("tests.support.cli_fixtures",)

GIB = 2**30


def held(model: nn.Module) -> int:
    """Return the bytes of what sees, of a model whose decoder is taken out."""
    inside = sum(one.matrix.nbytes for one in model.modules() if isinstance(one, HeldLinear))
    return inside + sum(one.nbytes for one in model.parameters())


@pytest.mark.parametrize("form", FORMS)
def test_weights_take_what_was_said(form: str) -> None:
    engine = Engine.from_pretrained(bundled_model(), weights=form)
    made = planned(str(bundled_model()))
    assert made is not None
    real = engine.decoder.weights.nbytes() + held(engine.family.hf)
    # Panels of this small model are filled up, and what sees shares its embedding.
    assert abs(made[form].weights - real) < 0.15 * real


def test_a_head_that_is_the_embedding_counts_once(tmp_path: Path) -> None:
    for tied in (False, True):
        text = {"tie_word_embeddings": tied}
        folder = save_checkpoint(Checkpoint("llama", 4, 2, 32, text=text), tmp_path / str(tied))
        engine = Engine.from_pretrained(folder)
        made = planned(str(folder))
        assert made is not None
        # "auto" of what is stored in float32 keeps it, unless bfloat16 holds every number.
        assert made["auto"].weights == engine.decoder.weights.nbytes()
    head = [("lm_head.weight", "BF16", [10, 64]), ("model.embed_tokens.weight", "BF16", [10, 64])]
    assert WeightCount.of(head).bytes("bf16") == 2 * WeightCount.of(head, True).bytes("bf16")
    mixed = [("model.layers.0.mlp.up_proj.weight", "BF16", [8, 4])]
    mixed.append(("model.vision_tower.head.weight", "F32", [3, 5]))
    assert WeightCount.of(mixed).bytes("auto") == 2 * 8 * 4 + 4 * 3 * 5


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_vl_moe"])
def test_experts_are_float32_and_have_no_other_form(
    name: str, tmp_path: Path, mmkv: Callable[..., Ran]
) -> None:
    folder = Path(shutil.copytree(checkpoint(name), tmp_path / "model"))
    file = folder / "model.safetensors"
    tensors = {part: tensor.bfloat16() for part, tensor in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})
    engine, made = Engine.from_pretrained(folder), planned(str(folder))
    assert made is not None and list(made) == ["auto"]
    eyes = held(engine.family.hf) if "vl" in name else 0
    assert made["auto"].weights == pytest.approx(engine.decoder.weights.nbytes() + eyes, rel=0.15)
    assert "in no form" in advice(made, "auto", made["auto"].fixed)
    ran = mmkv("chat", str(folder), "--memory", "8GiB", "--weights", "int8", "-p", "x")
    assert "are not for a mixture of experts" in ran.error_line()


def test_the_text_inside_of_smolvlm_is_told_from_its_tower() -> None:
    shapes = {"text_model.layers.0.mlp.up_proj": [128, 64], "text_model.embed_tokens": [100, 64]}
    shapes |= {"vision_model.encoder.layers.0.mlp.fc1": [48, 32], "text_model.norm": [64]}
    made = WeightCount.of([(f"model.{n}.weight", "BF16", shape) for n, shape in shapes.items()])
    assert (made.layers, made.tables, made.eyes, made.plain) == (128 * 64, 100 * 64, 48 * 32, 64)


def test_the_arithmetic_by_hand() -> None:
    shape = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 128,
        "vocab_size": 100,
        "max_position_embeddings": 1000,
    }
    tensors = [
        ("model.layers.0.mlp.up_proj.weight", "BF16", [128, 64]),
        ("model.embed_tokens.weight", "BF16", [100, 64]),
        ("model.norm.weight", "BF16", [64]),
        ("model.visual.blocks.0.attn.qkv.weight", "BF16", [96, 32]),
        ("model.visual.pos_embed.weight", "BF16", [10, 32]),
    ]
    count = WeightCount.of(tensors)
    assert (count.layers, count.tables, count.eyes, count.plain) == (8192, 6400, 3072, 384)
    assert count.bytes("bf16") == 2 * (8192 + 6400 + 3072) + 4 * 384
    assert count.bytes("int8") == 34 * (256 + 200 + 96) + 4 * 384
    assert count.bytes("int4") == 18 * 256 + 34 * (200 + 96) + 4 * 384
    plan = plans({"text_config": shape}, count, chunk=8)["bf16"]
    assert plan.entry == 2 * 2 * (2 * 2 * 16 + 9)
    assert plan.work == 4 * 8 * (16 * 64 + 6 * 128) + 8 * plan.entry + 4 * 100


@pytest.mark.parametrize(
    ("config", "tensors", "said"),
    [
        ({"bits": 4, "group_size": 32}, {"qweight": ("I32", [8, 96])}, "BF16"),
        ({"bits": 3}, {"qweight": ("I32", [6, 96]), "scales": ("F16", [1, 96])}, "F16"),
        (
            {"bits": 4, "dynamic": {"x": {}}},
            {"qweight": ("I32", [16, 96]), "qzeros": ("I32", [1, 24]), "scales": ("F16", [1, 96])},
            "F16",
        ),
        ({"config_groups": {"g": {"weights": {"num_bits": 8}}}}, {"w": ("I8", [96, 64])}, "BF16"),
        ({}, {"weight": ("F8_E4M3", [96, 64]), "weight_scale": ("BF16", [1])}, "BF16"),
        ({}, {"weight": ("U8", [96, 32]), "weight_scale": ("F8_E4M3", [96, 4])}, "BF16"),
    ],
)
def test_matrices_of_quantised_checkpoints_have_all_their_numbers(
    config: dict[str, Any], tensors: dict[str, tuple[str, list[int]]], said: str
) -> None:
    """Of 96 x 64, in words of 32 bits, bytes and halves of bytes."""
    given = [(f"model.layers.0.up.{name}", *one) for name, one in tensors.items()]
    given.append(("model.norm.weight", "BF16", [64]))
    made = list(_unpacked(given, {"quantization_config": {"quant_method": "x"} | config}))
    assert made == [("model.layers.0.up.weight", said, [1, 96 * 64]), given[-1]]
    assert list(_unpacked(given, {})) == given


def test_linear_layers_have_no_entries_but_a_state() -> None:
    folder = checkpoint("qwen3_5")
    engine = Engine.from_pretrained(folder, policy="full", dtype="float32", page_size=8)
    config, made = json.loads((folder / "config.json").read_text()), planned(str(folder))
    assert made is not None
    assert made["auto"].entry == engine.spec.rows * (2 * 2 * engine.spec.head_dim + 9)
    config["text_config"]["layer_types"] = ["full_attention"] * 4
    dense = plans(config, WeightCount(), chunk=16)["auto"]
    config["text_config"]["layer_types"] = ["linear_attention"] * 2 + ["full_attention"] * 2
    hybrid = plans(config, WeightCount(), chunk=16)["auto"]
    states = hybrid.work - 16 * hybrid.entry - (dense.work - 16 * dense.entry)
    assert states == 2 * engine.cache.state_bytes
    assert abs(made["auto"].weights - engine.decoder.weights.nbytes()) < 0.3 * made["auto"].weights
    config["text_config"]["layer_types"] = ["linear_attention"] * 4
    with pytest.raises(ValueError, match="no layer has entries"):
        plans(config, WeightCount())
    unread = ("mtp.layers.0.self_attn.q_proj.weight", "BF16", [64, 64])  # published beside it
    assert WeightCount.of([unread]) == WeightCount()


def test_advice_names_the_form_that_fits() -> None:
    made = {
        form: MemoryPlan(form, weights, work=GIB, entry=2**20, longest=4096, process=0)
        for form, weights in zip(FORMS, (8 * GIB, 8 * GIB, 4 * GIB, 2 * GIB), strict=True)
    }
    assert "9.0 GiB" not in (said := advice(made, "auto", 16 * GIB)) and "all 4,096" in said
    assert "1,024 entries" in advice(made, "auto", 10 * GIB)
    assert "--weights int8 takes 4.0 GiB and leaves 1.0 GiB" in advice(made, "auto", 6 * GIB)
    assert "--weights int4 takes 2.0 GiB" in advice(made, "int8", 4 * GIB)
    assert "in no form does it take less than 3.0 GiB" in advice(made, "auto", GIB)


def test_a_chat_is_told_what_fits_before_it_loads(
    mmkv: Callable[..., Ran], model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ("-p", "hello", "--max-new-tokens", "2", "--json")
    made = planned(model, features=2**28)
    assert made is not None
    plan = made["auto"]
    short = plan.fixed + 100 * plan.entry
    ran = mmkv("chat", model, "--memory", str(short), *asked)
    assert ran.code == 0 and "100 entries per layer and KV head" in ran.err
    budget = json.loads(ran.out)["budget"]
    assert json.dumps(short - plan.fixed) in json.dumps(budget)
    named = mmkv("chat", model, "--memory", str(short), "--budget-bytes", str(short), *asked)
    assert named.code == 1 and "lower one or leave it out" in named.error_line()

    def never(*_: object, **__: object) -> None:
        raise AssertionError("it was loaded")

    monkeypatch.setattr(Engine, "from_config", never)
    ran = mmkv("chat", model, "--memory", "64MiB", *asked)
    assert ran.code == 1 and "in no form does it take less than" in ran.error_line()
    ran = mmkv("chat", "someone/model", "--memory", "8GiB", *asked)
    assert ran.code == 1 and "nothing tells what someone/model takes" in ran.error_line()
    ran = mmkv("chat", model, "--memory", "much", *asked)
    assert ran.code in (1, 2) and "not an amount of memory" in ran.error_line()
    ran = mmkv("serve", model, "--memory", "900000GiB")
    assert ran.code == 1 and "lower --memory" in ran.error_line()
