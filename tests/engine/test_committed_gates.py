"""The gates in assets/ fit their models, and differ in what their names say."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from mmkv.engine.model.fingerprint import fingerprint
from mmkv.engine.model.gates import load_gates
from mmkv.engine.runtime import Runtime
from mmkv.resources import bundled_model
from mmkv.training.settings import recipe_options
from tests.conftest import make_spec


@pytest.mark.parametrize("name", ["", "-trimkv-0"])
def test_the_gates_of_smollm2_fit_it_and_the_repository(name: str) -> None:
    """30 layers, 3 KV heads, 576 features: what SmolLM2-135M's config says."""
    folder = bundled_model().parent / "gates" / f"smollm2-135m{name}"
    assert (folder / "gates.safetensors").stat().st_size <= 4 * 2**20
    spec = make_spec(layers=30, kv_heads=3, hidden=576)
    gates = load_gates(folder, spec).to(torch.device("cpu"), torch.float32)
    scope, tying = ("head", "none") if "trimkv" in name.split("-") else ("global", "paper")
    assert gates.info["tying"] == tying and gates.info["settings"]["scope"] == scope
    assert gates.info["trained"] is True and gates.info["settings"]["seed"] == int(name[-1:] or 0)
    # Trained gates tell tokens apart: some are forgotten within tens of steps, some never.
    hidden = torch.randn(400, 576, generator=torch.Generator().manual_seed(0))
    log_beta = torch.stack([gates.log_beta(layer, hidden) for layer in range(30)])
    assert bool((log_beta <= 0).all()) and bool(log_beta.isfinite().all())
    assert log_beta.quantile(0.05) < -0.03 and log_beta.quantile(0.95) > -0.003


@pytest.mark.parametrize("name", ["dbtrimkv-1", "trimkv-0", "trimkv-1"])
def test_the_gates_that_results_compare_with_differ_in_what_their_names_say(name: str) -> None:
    """The methods and seeds of the README's table: one recipe, other seed or other method."""
    folder = bundled_model().parent / "gates" / f"tiny-vlm-{name}"
    engine = Runtime.from_pretrained(str(bundled_model()), gates=str(folder))
    assert engine.policy_note is None, "trained for other weights of the bundled model"
    ours = json.loads((bundled_model() / "gates" / "gates.json").read_text())
    theirs = json.loads((folder / "gates.json").read_text())
    assert theirs["base_sha256"] == ours["base_sha256"] and theirs["data"] == ours["data"]
    changed = {k: v for k, v in theirs["settings"].items() if ours["settings"][k] != v}
    del changed["output"]
    method, seed = name.split("-")
    wanted: dict[str, object] = {"scope": "head", "tying": "none"} if method == "trimkv" else {}
    assert changed == (wanted | {"seed": 1} if seed == "1" else wanted)


@pytest.mark.parametrize("seed", [0, 1])
def test_the_gates_of_trim_kvs_recipe_saw_what_the_others_did(seed: int) -> None:
    folder = bundled_model().parent / "gates" / f"tiny-vlm-trimkv-recipe-{seed}"
    engine = Runtime.from_pretrained(str(bundled_model()), gates=str(folder))
    assert engine.policy_note is None, "trained for other weights of the bundled model"
    assert load_gates(folder, engine.spec).kind == "rg"
    theirs = json.loads((folder / "gates.json").read_text())
    ours = json.loads((bundled_model() / "gates" / "gates.json").read_text())
    assert theirs["base_sha256"] == ours["base_sha256"] and theirs["data"] == ours["data"]
    numbers = dict(recipe_options("trimkv")) | {"seed": seed}
    for name in ("budget", "steps", "batch", "accumulate", "lr", "d_gate"):
        numbers[name] = ours["settings"][name]
    assert {name: theirs["settings"][name] for name in numbers} == numbers


def test_committed_gates_are_small_and_keep_what_decides_in_float32() -> None:
    """A trunk bears rounding, the readout and its bias near 10 do not."""
    assets = bundled_model().parent
    files = sorted([*assets.glob("gates/*/*.safetensors"), *assets.glob("tiny-vlm/gates/*.saf*")])
    assert len(files) == 10
    for file in files:
        for name, tensor in load_file(file).items():
            trunk = name.startswith("layers.") or ".linear1." in name
            assert tensor.dtype == (torch.float16 if trunk else torch.float32), (file, name)


def test_all_name_the_weights_that_they_were_trained_for() -> None:
    """The bundled model's fingerprint; SmolLM2's weights are not in the repository."""
    ours = fingerprint(str(bundled_model()))
    found: dict[str, set[str]] = {"tiny": set(), "smollm2": set()}
    for file in [
        *bundled_model().parent.glob("gates/*/gates.json"),
        bundled_model() / "gates" / "gates.json",
    ]:
        info = json.loads(file.read_text())
        found["smollm2" if "smollm2" in file.parent.name else "tiny"].add(info["base_fingerprint"])
    assert found["tiny"] == {ours} and len(found["smollm2"]) == 1 and ours not in found["smollm2"]
