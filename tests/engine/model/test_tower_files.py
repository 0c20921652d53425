"""Packed weights of vision towers on disk: bit-equal, instead of the checkpoint, never stale."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mmkv.engine.backends import kernels_for
from mmkv.engine.model import panel_files, stored
from mmkv.engine.model.families import vision
from mmkv.engine.model.families.loading import load
from mmkv.engine.model.families.vision import held_matrices
from mmkv.engine.model.kept_files import KeptFile, kept
from mmkv.engine.model.panels import Panels
from tests.support.factories import checkpoint, make_turn, stored_in_bfloat16
from tests.support.native import needs_native
from tests.support.tiers import long_but

pytestmark = needs_native
NAMES = ["qwen3_vl", "qwen2_5_vl", "internvl", "llava", "llava_next", "llava_onevision"]
SHOWN: list[Any] = [3, ("image", 32, 32), 4, ("image", 16, 48), 2]


@pytest.fixture(autouse=True)
def keep_any_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("MMKV_PANELS", "1GiB")
    monkeypatch.setattr(panel_files, "LEAST_BYTES", 0)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return stored_in_bfloat16("qwen3_vl", tmp_path / "qwen3_vl")


def seen(model: Path, form: str = "auto", name: str = "qwen3_vl") -> list[Tensor]:
    """Return what a model sees in two pictures, and all of its tower that is no matrix."""
    family = load(model, "auto", "cpu", form=form, kernels=kernels_for(form))[0]
    turn = family.turn(make_turn(name, SHOWN), 0)
    assert turn.visual is not None
    held = [matrix for _, matrix in held_matrices(family.hf)]
    assert len(held) > 6 and all(isinstance(matrix, Panels) for matrix in held)
    left = [tensor for _, tensor in sorted(family.hf.named_parameters()) if not tensor.is_meta]
    return [turn.visual, *turn.deepstack, *left, *family.hf.buffers()]


def anew(model: Path, form: str = "auto", name: str = "qwen3_vl") -> list[Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MMKV_PANELS", "0")
        return seen(model, form, name)


def same(ones: list[Tensor], others: list[Tensor]) -> bool:
    return len(ones) == len(others) and all(map(torch.equal, ones, others))


def of_tower() -> list[KeptFile]:
    return [file for file in kept() if file.part == "vision"]


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the stored matrices of towers that have been packed since."""
    names: list[str] = []
    original = stored.StoredTensors.read_matrix

    def read(self: Any, wanted: Any, *rest: Any) -> Any:
        names.extend(name for name in wanted if "language_model" not in name)
        return original(self, wanted, *rest)

    monkeypatch.setattr(stored.StoredTensors, "read_matrix", read)
    return names


@pytest.mark.parametrize(
    ("name", "form"),
    long_but(
        (("llava", "auto"), ("qwen3_vl", "int8")),
        [*((name, "auto") for name in NAMES), ("qwen3_vl", "int8"), ("llava", "int8")],
        "their towers are held as these are",
    ),
)
def test_features_from_a_file_are_bit_equal(
    name: str, form: str, tmp_path: Path, packed: list[str]
) -> None:
    model = stored_in_bfloat16(name, tmp_path / name)
    expected = anew(model, form, name)
    packed.clear()
    assert same(seen(model, form, name), expected)
    assert len(packed) > 6 and len(set(packed)) == len(packed)
    (file,) = of_tower()
    assert (file.model, file.form) == (str(model), "bf16" if form == "auto" else form)
    packed.clear()
    assert same(seen(model, form, name), expected) and packed == []


def test_a_later_start_reads_no_matrix_of_the_checkpoint(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = seen(model)
    read: list[str] = []
    original = stored.StoredTensors.read_as_stored

    def noted(self: Any, name: str) -> Tensor:
        read.append(name)
        return original(self, name)

    monkeypatch.setattr(stored.StoredTensors, "read_as_stored", noted)
    assert same(seen(model), expected)
    tower = [name for name in load_file(model / "model.safetensors") if ".visual." in name]
    left = {name for name in tower if name.endswith(".bias") or "norm" in name or "pos_" in name}
    assert sorted(read) == sorted(left), "each once, and no more"


def test_who_holds_towers_alike_shares_their_file(model: Path, packed: list[str]) -> None:
    """Exact weights have two names, and of four bits there are none in a tower."""
    for one, other in (("auto", "bf16"), ("int8", "int4")):
        seen(model, one)
        packed.clear()
        assert same(seen(model, other), anew(model, other))
        seen(model, other)
        packed.clear()
        seen(model, other)
        assert packed == []
    assert sorted(file.form for file in of_tower()) == ["bf16", "int8"]


def test_the_first_start_alone_says_where_they_are(model: Path) -> None:
    for said in ("packed weights are kept in", "None"):
        family = load(model, "auto", "cpu", kernels=kernels_for("auto"))[0]
        assert family.vision_note is None
        _ = family.hf
        assert said in str(family.vision_note)


def test_where_transformers_makes_others_of_tensors_it_gets_them(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = anew(model)
    given = vision._StandIn.__getitem__

    def copied(self: Any, index: Any) -> Tensor:
        return given(self, index).clone()

    monkeypatch.setattr(vision._StandIn, "__getitem__", copied)
    for _ in range(2):
        assert same(seen(model), expected)
    assert of_tower() == []


def test_weights_that_no_form_holds_exactly_stay(tmp_path: Path) -> None:
    """Of float32, one matrix of which bfloat16 holds."""
    model = Path(shutil.copytree(checkpoint("qwen3_vl"), tmp_path / "model"))
    tensors = load_file(model / "model.safetensors")
    name = "model.visual.blocks.0.mlp.linear_fc1.weight"
    tensors[name] = tensors[name].bfloat16().float()
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    for _ in range(2):
        family = load(model, "auto", "cpu", kernels=kernels_for("auto"))[0]
        assert [part for part, _ in held_matrices(family.hf)] == [name]
        ours = dict(family.hf.named_parameters())
        for part, tensor in tensors.items():
            if ".visual." in part and part != name:
                assert torch.equal(ours[part], tensor), part
    assert [file.form for file in of_tower()] == ["auto"]
