"""The fingerprint of a checkpoint: the same however it is cut into files, else its own."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from mmkv.engine.model.fingerprint import SAMPLE, fingerprint, language_fingerprint
from mmkv.engine.model.product import plain
from mmkv.engine.runtime import Runtime
from tests.support.factories import checkpoint

Tensors = dict[str, np.ndarray]


def load(name: str) -> Runtime:
    return Runtime.from_pretrained(checkpoint(name), policy="full", dtype="float32", device="cpu")


@pytest.fixture
def tensors() -> Tensors:
    numbers = np.random.default_rng(0)
    shapes = {"embed": (50, 16), "norm": (16,), "layers.0.q": (16, 16), "layers.0.bias": (3,)}
    return {
        name: numbers.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()
    }


def of(folder: Path, *shards: Tensors) -> str | None:
    """Write a checkpoint of these files into an empty folder; return its fingerprint."""
    folder.mkdir()
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors", {"format": "pt"})
    else:
        names = [f"model-{number}.safetensors" for number in range(len(shards))]
        for name, shard in zip(names, shards, strict=True):
            save_file(shard, folder / name)
        home = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        index = folder / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": home}))
    return fingerprint(str(folder))


def test_files_and_order_do_not_matter(tmp_path: Path, tensors: Tensors) -> None:
    whole = of(tmp_path / "whole", tensors)
    assert whole is not None and len(whole) == 64
    names = list(tensors)
    shards = [{name: tensors[name] for name in part} for part in (names[:1], names[1:])]
    assert of(tmp_path / "shards", *shards) == whole


def test_every_tensor_matters(tmp_path: Path, tensors: Tensors) -> None:
    """Its name, dtype, shape and each number of its first KiB."""
    rng, found = random.Random(1), [of(tmp_path / "whole", tensors)]
    for number, (name, tensor) in enumerate(tensors.items()):
        changed = tensor.copy()
        changed.flat[rng.randrange(min(tensor.size, SAMPLE // 4))] += 1
        others = {key: value for key, value in tensors.items() if key != name}
        for kind, part in {
            "value": {name: changed},
            "name": {f"{name}.weight": tensor},
            "dtype": {name: tensor.view(np.int32)},
            "shape": {name: tensor[None]},
            "absent": {},
        }.items():
            found.append(of(tmp_path / f"{kind}{number}", others | part))
    assert None not in found and len(set(found)) == len(found) == 21


def test_what_cannot_be_read_has_none(tmp_path: Path, tensors: Tensors) -> None:
    of(tmp_path / "good", tensors)
    good = (tmp_path / "good" / "model.safetensors").read_bytes()
    size = int.from_bytes(good[:8], "little")
    (tmp_path / "empty").mkdir()
    assert fingerprint(str(tmp_path / "empty")) is None
    assert fingerprint(str(tmp_path / "missing")) is None
    assert fingerprint("owner/never-downloaded") is None
    rng = random.Random(2)
    for number in range(200):
        header = bytearray(good[: 8 + size])
        for _ in range(rng.randrange(1, 4)):
            header[rng.randrange(len(header))] = rng.randrange(256)
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(header + good[8 + size :][: rng.randrange(900)])
        made = fingerprint(str(folder))  # of a damaged file: none or another, and no exception
        assert made is None or made != fingerprint(str(tmp_path / "good"))


@pytest.mark.parametrize(
    ("model", "head"),
    [
        ("language_model.model.", "language_model.lm_head.weight"),  # LLaVA on the hub
        ("model.language_model.", "lm_head.weight"),
    ],
)
def test_a_language_model_is_told_inside_a_vision_model(
    tmp_path: Path, tensors: Tensors, model: str, head: str
) -> None:
    eyes = {"vision_tower.norm": tensors["norm"], "model.visual.norm": tensors["norm"]}
    inside = {model + name: tensor for name, tensor in tensors.items()} | {head: tensors["embed"]}
    alone = {f"model.{name}": tensor for name, tensor in tensors.items()}
    alone["lm_head.weight"] = tensors["embed"]
    expected = of(tmp_path / "alone", alone)
    joined = of(tmp_path / "joined", eyes, inside)
    assert joined != expected and language_fingerprint(str(tmp_path / "alone")) is None
    assert language_fingerprint(str(tmp_path / "joined")) == expected
    inside[head] = inside[head] + 1
    of(tmp_path / "other", eyes | inside)
    assert language_fingerprint(str(tmp_path / "other")) not in (None, expected)
    assert language_fingerprint(str(tmp_path / "none")) is None


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_every_matrix_of_a_loaded_decoder_matters(name: str) -> None:
    """A session file of other weights is refused, whichever matrix of whichever layer they are."""
    weights = load(name).decoder.weights
    parts = {"embed": weights.embed, "norm": weights.norm, "head": weights.head}
    for index, layer in enumerate(weights.layers):
        for part in ("qkv", "out", "gate_up", "down", "router"):
            if (matrix := getattr(layer, part)) is not None:
                parts[f"{index} {part}"] = matrix
    assert len(parts) == 3 + len(weights.layers) * (4 + ("moe" in name))
    found = {weights.fingerprint()}
    for matrix in map(plain, parts.values()):
        before = matrix.clone()
        with torch.inference_mode():
            matrix.add_(1)
            found.add(weights.fingerprint())
            matrix.copy_(before)
    assert weights.fingerprint() in found
    # A tied head is the embedding.
    assert len(found) == 1 + len({plain(matrix).data_ptr() for matrix in parts.values()})
