"""Gate files and gate arithmetic, against plain ``nn.Sequential``; refusals; those in assets/."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mpmath
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mmkv.engine.backends import kernels_for
from mmkv.engine.errors import GateError, ModelError
from mmkv.engine.model.fingerprint import fingerprint
from mmkv.engine.model.gates import (
    gate_kind,
    load_gates,
    load_write_gates,
    make_random_gates,
    make_random_write_gates,
    save_gates,
)
from mmkv.engine.model.spec import DecoderSpec
from mmkv.engine.runtime import Runtime
from mmkv.resources import bundled_model
from mmkv.training.student import TrainableGates
from tests.conftest import make_spec
from tests.support.chat_models import save_llama

INNER = 512


def published(spec: DecoderSpec, kind: str, seed: int = 0) -> dict[str, Tensor]:
    """Return a state dict as in ``trimkv_weights.pth``."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

    shared = {"linear3.weight": normal(spec.num_kv_heads, INNER), "bias": normal(spec.num_kv_heads)}
    tensors = {}
    for layer in range(spec.num_layers):
        part = {
            "linear1.weight": normal(INNER, spec.hidden_size),
            "linear1.bias": normal(INNER),
        }
        if kind == "rg":
            part["linear2.weight"] = normal(spec.num_kv_heads, INNER)
            part["bias"] = normal(spec.num_kv_heads)
        else:
            part |= {"linear2.weight": normal(INNER, INNER), "linear2.bias": normal(INNER)}
            part |= {name: value.clone() for name, value in shared.items()}
        for name, value in part.items():
            tensors[f"model.layers.{layer}.self_attn.retention_gate.{name}"] = value
    return tensors


def write(tensors: dict[str, Tensor], folder: Path) -> Path:
    """Return the folder as published: weights and a config.json beside them."""
    folder.mkdir(exist_ok=True)
    torch.save(tensors, folder / "trimkv_weights.pth")
    (folder / "config.json").write_text("{}")
    return folder


def sequential(tensors: dict[str, Tensor], layer: int, kind: str) -> nn.Sequential:
    """Return one layer's gate (before logsigmoid) out of torch's own modules, in float64."""
    prefix = f"model.layers.{layer}.self_attn.retention_gate."
    names = ["linear1", "linear2"] if kind == "rg" else ["linear1", "linear2", "linear3"]
    modules: list[nn.Module] = []
    for name in names:
        weight = tensors[f"{prefix}{name}.weight"]
        bias = tensors.get(f"{prefix}{name}.bias", tensors[f"{prefix}bias"])
        linear = nn.Linear(weight.shape[1], weight.shape[0])
        linear.load_state_dict({"weight": weight, "bias": bias})
        modules += [linear, nn.SiLU()]
    return nn.Sequential(*modules[:-1]).double()


@pytest.mark.parametrize("kind", ["rg", "rg10"])
@pytest.mark.parametrize("heads", [1, 3])
def test_published_layouts(kind: str, heads: int, tmp_path: Path) -> None:
    spec = make_spec(layers=3, kv_heads=heads)
    tensors = published(spec, kind)
    folder = write(tensors, tmp_path / "gates")
    hidden = torch.randn(7, spec.hidden_size, generator=torch.Generator().manual_seed(1))
    for source in (folder, folder / "trimkv_weights.pth"):
        gates = load_gates(source, spec)
        assert gates.kind == kind
        for layer in range(spec.num_layers):
            expected = F.logsigmoid(sequential(tensors, layer, kind)(hidden.double()))
            got = gates.log_beta(layer, hidden)
            assert got.dtype == torch.float32 and got.shape == (7, heads)
            torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["tied", "rg", "rg10"])
@pytest.mark.parametrize(
    ("field", "value"), [("hidden", 32), ("layers", 4), ("layers", 2), ("kv_heads", 4)]
)
def test_gates_of_another_model(kind: str, field: str, value: int, tmp_path: Path) -> None:
    sizes = {"layers": 3, "kv_heads": 2, "hidden": 24}
    made = make_spec(**sizes)
    if kind == "tied":
        save_gates(make_random_gates(made), tmp_path / "gates", made)
    else:
        write(published(made, kind), tmp_path / "gates")
    with pytest.raises(GateError) as error:
        load_gates(tmp_path / "gates", make_spec(**(sizes | {field: value})))
    message = str(error.value)
    assert str(value) in message and str(sizes[field]) in message and "\n" not in message


@pytest.mark.parametrize("what", ["linear3.weight", "bias"])
def test_a_broken_tie_is_refused(what: str, tmp_path: Path) -> None:
    spec = make_spec(layers=3)
    tensors = published(spec, "rg10")
    tensors[f"model.layers.2.self_attn.retention_gate.{what}"][0] += 1e-3
    with pytest.raises(GateError, match="tie"):
        load_gates(write(tensors, tmp_path / "gates"), spec)


def test_other_published_layouts_are_refused(tmp_path: Path) -> None:
    spec = make_spec()
    tensors = published(spec, "rg")
    del tensors["model.layers.1.self_attn.retention_gate.linear1.bias"]
    with pytest.raises(GateError, match=r"linear1\.bias"):
        load_gates(write(tensors, tmp_path / "a"), spec)
    with pytest.raises(GateError, match="retention_gate"):
        load_gates(write({"model.embed": torch.ones(2)}, tmp_path / "b"), spec)
    tensors = published(spec, "rg10")
    tensors["model.layers.0.self_attn.retention_gate.linear2.weight"] = torch.ones(INNER, 9)
    with pytest.raises(GateError):
        load_gates(write(tensors, tmp_path / "c"), spec)


@pytest.mark.parametrize("damage", ["empty", "truncated", "noise"])
@pytest.mark.parametrize("own", [True, False])
def test_damaged_files(damage: str, own: bool, tmp_path: Path) -> None:
    spec = make_spec()
    folder = tmp_path / "gates"
    if own:
        save_gates(make_random_gates(spec), folder, spec)
    else:
        write(published(spec, "rg"), folder)
    path = folder / ("gates.safetensors" if own else "trimkv_weights.pth")
    data = path.read_bytes()
    path.write_bytes(
        {"empty": b"", "truncated": data[: len(data) // 2], "noise": b"\x93" * 99}[damage]
    )
    with pytest.raises(GateError) as error:
        load_gates(folder, spec)
    assert "\n" not in str(error.value)


def test_own_format_round_trip(tmp_path: Path) -> None:
    spec = make_spec(layers=3, kv_heads=3)
    gates = make_random_gates(spec, seed=5)
    save_gates(gates, tmp_path / "g", spec, base_model="some/model", training_budget=256)
    assert sorted(p.name for p in (tmp_path / "g").iterdir()) == ["gates.json", "gates.safetensors"]
    info = json.loads((tmp_path / "g" / "gates.json").read_text())
    assert info["base_model"] == "some/model" and info["training_budget"] == 256
    assert (info["hidden_size"], info["num_layers"], info["num_kv_heads"]) == (24, 3, 3)
    hidden = torch.randn(5, spec.hidden_size)
    for source in (tmp_path / "g", tmp_path / "g" / "gates.safetensors"):
        again = load_gates(source, spec)
        for layer in range(3):
            assert torch.equal(again.log_beta(layer, hidden), gates.log_beta(layer, hidden))
        assert again.info["base_model"] == "some/model"


def test_files_that_are_not_there(tmp_path: Path) -> None:
    spec = make_spec()
    for source in (tmp_path / "nowhere", tmp_path, "no-such-gates"):
        with pytest.raises(GateError):
            load_gates(source, spec)
    save_gates(make_random_gates(spec), tmp_path, spec)
    (tmp_path / "gates.json").unlink()
    with pytest.raises(GateError, match=r"gates\.json"):
        load_gates(tmp_path, spec)
    for text in ("{}", "[]", "not json", '{"format": "mmkv-gates-0"}'):
        (tmp_path / "gates.json").write_text(text)
        with pytest.raises(GateError):
            load_gates(tmp_path, spec)


@pytest.mark.parametrize("tying", ["paper", "layer", "none"])
def test_tied_formula(tying: str, tmp_path: Path) -> None:
    """z = w_g . Proj_{l,h}(x) + b_g; (w_g, b_g) of all layers and heads, of a layer, or of a head.

    Through a file, as trained gates come.
    """
    spec = make_spec(layers=3, kv_heads=2)
    trained = TrainableGates(spec, d_gate=12, tying=tying, bias=1.0, seed=2)
    with torch.no_grad():
        trained.readout.bias.add_(
            torch.arange(trained.readout.bias.numel()).view_as(trained.readout.bias)
        )
    save_gates(trained.gates(), tmp_path, spec)
    gates = load_gates(tmp_path, spec)
    assert gates.info["tying"] == tying and gates.info["d_gate"] == 12
    tensors = {name: value.double() for name, value in trained.file_tensors().items()}
    hidden = torch.randn(6, spec.hidden_size, generator=torch.Generator().manual_seed(3))
    block = 6
    for layer in range(spec.num_layers):
        x = hidden.double()
        for name in ("linear1", "linear2"):
            prefix = f"layers.{layer}.{name}"
            x = F.silu(x @ tensors[f"{prefix}.weight"].T + tensors[f"{prefix}.bias"])
        for head in range(spec.num_kv_heads):
            which = {"paper": (), "layer": (layer,), "none": (layer, head)}[tying]
            w_g, b_g = tensors["readout.weight"][which], tensors["readout.bias"][which]
            z = x[:, head * block : (head + 1) * block] @ w_g + b_g
            got = gates.log_beta(layer, hidden)[:, head].double()
            torch.testing.assert_close(got, F.logsigmoid(z), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("gate", "stored"), [("rg", None), ("rg", torch.float16), ("rg10", None), ("linear", None)]
)
def test_trained_gates_are_kept_and_learn(
    gate: str, stored: torch.dtype | None, tmp_path: Path
) -> None:
    """Under the names and with the start of their authors; a linear one is W x + b, kept as rg."""
    spec = make_spec(layers=3, kv_heads=2)
    tying: Any = "none" if gate == "rg" else "paper"
    trained = TrainableGates(spec, d_gate=64, tying=tying, bias=18.0, seed=2, gate=gate)
    own, tensors = dict(trained.named_parameters()), trained.file_tensors()
    if gate != "linear":
        shapes = {
            name: tuple(64 if n == INNER else n for n in tensor.shape)
            for name, tensor in published(spec, gate).items()
        }
        assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == shapes
        assert all((x == 18.0).all() for name, x in tensors.items() if name.endswith("gate.bias"))
    if gate == "rg10":
        assert float(own["layers.1.linear2.weight"].detach().std()) == pytest.approx(0.02, rel=0.1)
        assert not own["layers.1.linear2.bias"].any()
    save_gates(trained.gates(), tmp_path, spec, stored)
    held = load_file(tmp_path / "gates.safetensors")
    half = {name for name, tensor in held.items() if tensor.dtype == torch.float16}
    assert half == {name for name in held if stored and ".linear1." in name}
    gates, kind = load_gates(tmp_path, spec), "rg10" if gate == "rg10" else "rg"
    assert gates.kind == gates.info["layout"] == kind
    assert gate == "linear" or gates.info["d_gate"] == 64
    hidden = torch.randn(6, spec.hidden_size, generator=torch.Generator().manual_seed(3))
    for layer in range(spec.num_layers):
        if gate != "linear":
            expected = sequential(tensors, layer, gate)(hidden.double())
        else:
            weight, bias = (own[f"layers.{layer}.{name}"].double() for name in ("weight", "bias"))
            expected = hidden.double() @ weight.T + bias
        got = gates.logits(layer, hidden)
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-3 if stored else 1e-5)
    sum(trained.gates().log_beta(layer, hidden).sum() for layer in range(3)).backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in own.values())


def wgkv_checkpoint(spec: DecoderSpec, width: int = 5) -> tuple[dict[str, torch.Tensor], Any]:
    """A file as WG-KV's authors publish it, and what each layer's g is, by grouped convolutions."""
    random = torch.Generator().manual_seed(4)
    heads, size = spec.num_kv_heads, spec.head_dim

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random)

    tensors = {}
    for layer in range(spec.num_layers):
        for name, tensor in {
            "pre_key_norm.weight": 1 + 0.1 * draw(size),
            "post_key_norm.weight": 1 + 0.1 * draw(size),
            "conv1.weight": draw(heads * width, 2 * size, 1) / 4,
            "conv1.bias": draw(heads * width),
            "conv2.weight": draw(heads, width, 1),
            "conv2.bias": draw(heads),
        }.items():
            tensors[f"model.layers.{layer}.self_attn.g_predictors.{name}"] = tensor

    def g(layer: int, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        own = {k.split("g_predictors.")[1]: t for k, t in tensors.items() if f".{layer}." in k}
        both = [
            F.rms_norm(key, (size,), own[f"{name}_key_norm.weight"], 1e-6)
            for name, key in (("pre", before), ("post", after))
        ]
        x = torch.cat(both, -1).permute(1, 2, 0).reshape(1, heads * 2 * size, -1)
        x = F.gelu(F.conv1d(x, own["conv1.weight"], own["conv1.bias"], groups=heads))
        return F.conv1d(x, own["conv2.weight"], own["conv2.bias"], groups=heads)[0].T.sigmoid()

    return tensors, g


def test_wgkvs_checkpoints_are_read(tmp_path: Path) -> None:
    spec = make_spec(layers=3, kv_heads=2)
    tensors, g = wgkv_checkpoint(spec)
    path = tmp_path / "llama-3.1-8b-instruct-0.16.pt"
    torch.save(tensors | {"model.norm.weight": torch.ones(3)}, path)  # what else it may hold
    assert gate_kind(path) == "write"
    gates = load_write_gates(path, spec)
    before, after = torch.randn(2, 7, 2, spec.head_dim)
    for layer in range(3):
        got = gates.log_g(layer, before, after).exp()
        torch.testing.assert_close(got, g(layer, before, after), rtol=1e-5, atol=1e-6)
    save_gates(gates, tmp_path / "copy", spec)  # and may be kept without the pickle
    assert load_write_gates(tmp_path / "copy", spec).fingerprint() == gates.fingerprint()
    with pytest.raises(GateError, match="write gates"):
        load_gates(path, spec)
    name = "model.layers.1.self_attn.g_predictors.conv1.weight"
    torch.save(tensors | {name: tensors[name][:, :-2]}, path)
    with pytest.raises(GateError, match=r"layer 1 .*'conv1\.weight' of the shape"):
        load_write_gates(path, spec)
    with pytest.raises(GateError, match="cover 3 layers, the model has 2"):
        load_write_gates(path, make_spec(layers=2, kv_heads=2))


def test_trunks_stored_in_half_read_the_same_within_its_rounding(tmp_path: Path) -> None:
    spec = make_spec(layers=3, kv_heads=2)
    made = TrainableGates(spec, d_gate=32, bias=18.0, seed=4).gates()
    save_gates(made, tmp_path / "whole", spec)
    save_gates(made, tmp_path / "half", spec, torch.float16)
    whole, half = (tmp_path / name / "gates.safetensors" for name in ("whole", "half"))
    assert half.stat().st_size < 0.6 * whole.stat().st_size
    stored = load_file(half)
    assert stored["layers.1.linear2.weight"].dtype == torch.float16
    assert torch.equal(stored["readout.bias"], torch.tensor(18.0))
    hidden = torch.randn(50, spec.hidden_size, generator=torch.Generator().manual_seed(1))
    cpu = (torch.device("cpu"), torch.float32)
    one, two = (load_gates(tmp_path / name, spec).to(*cpu) for name in ("whole", "half"))
    for layer in range(spec.num_layers):
        z, rounded = one.logits(layer, hidden), two.logits(layer, hidden)
        assert 0 < (z - rounded).abs().max() < 2e-3


def test_trunks_in_bfloat16_have_no_wider_copy(tmp_path: Path) -> None:
    spec, cpu = make_spec(layers=3, kv_heads=2), torch.device("cpu")
    made = TrainableGates(spec, d_gate=32, bias=18.0, seed=4).gates()
    save_gates(made, tmp_path, spec, torch.bfloat16)
    gates = load_gates(tmp_path, spec)
    held = gates.in_bf16(kernels_for("int8", cpu), cpu, torch.float32)
    assert held.exact is gates and held.fingerprint() == gates.fingerprint()
    assert {w.dtype for gate in gates.layers for w, _ in gate.trunk} == {torch.bfloat16}
    hidden = torch.randn(50, spec.hidden_size, generator=torch.Generator().manual_seed(1))
    wide = gates.to(cpu, torch.float32)
    for layer in range(spec.num_layers):
        z = held.logits(layer, hidden)
        torch.testing.assert_close(z, wide.logits(layer, hidden), rtol=0, atol=1e-5)


def test_gates_of_another_checkpoint_of_the_same_shape_are_named(tmp_path: Path) -> None:
    """They load (the shapes agree) and would keep the wrong entries; front ends show the note."""
    model = tmp_path / "model"
    shutil.copytree(bundled_model(), model)
    assert Runtime.from_pretrained(str(model)).policy_note is None
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"note": "thinking"}))
    # The weights are the same; gates of before their fingerprints know the config's alone.
    assert Runtime.from_pretrained(str(model)).policy_note is None
    file = model / "gates" / "gates.json"
    info = json.loads(file.read_text())
    old = {name: value for name, value in info.items() if name != "base_fingerprint"}
    file.write_text(json.dumps(old))
    notes = [Runtime.from_pretrained(str(model)).policy_note]
    shutil.copy(bundled_model() / "config.json", model)
    assert Runtime.from_pretrained(str(model)).policy_note is None
    file.write_text(json.dumps(info))
    weights = load_file(model / "model.safetensors")
    weights[min(weights)].view(-1)[0] += 1
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    notes.append(Runtime.from_pretrained(str(model)).policy_note)
    for note, part in zip(notes, ("another config.json", "other weights"), strict=True):
        assert note is not None and "(tiny-vlm)" in note and str(model) in note
        assert part in note and "\n" not in note
    # Gates that do not say what they were trained for, and models without gates, get no note.
    del old["base_config_sha256"]
    file.write_text(json.dumps(old))
    assert Runtime.from_pretrained(str(model)).policy_note is None


def test_random_gates_are_spread_and_seeded() -> None:
    spec = make_spec(layers=4, kv_heads=4, hidden=64)
    gates, same = make_random_gates(spec, seed=7), make_random_gates(spec, seed=7)
    hidden = torch.randn(500, 64, generator=torch.Generator().manual_seed(0))
    log_beta = torch.stack([gates.log_beta(layer, hidden) for layer in range(4)])
    assert torch.equal(log_beta[1], same.log_beta(1, hidden))
    assert not torch.equal(log_beta[1], make_random_gates(spec, seed=8).log_beta(1, hidden))
    assert bool((log_beta < 0).all())
    low, high = log_beta.quantile(0.02).item(), log_beta.quantile(0.98).item()
    assert low < -2 and -0.05 < high < 0
    uneven = make_random_gates(make_spec(kv_heads=3), d_gate=64)  # as many for each head, or more
    assert len(uneven.tensors["layers.0.linear1.bias"]) == 66


@pytest.mark.parametrize("kind", ["tied", "rg", "rg10"])
def test_readout_stays_float32_in_a_bfloat16_model(kind: str, tmp_path: Path) -> None:
    """At z = 18 a bfloat16 readout would move in steps of 0.125, and its bias would be 18."""
    spec = make_spec()
    if kind == "tied":
        gates = make_random_gates(spec)
        gates.tensors["readout.bias"] = torch.tensor(18.03)
        save_gates(gates, tmp_path, spec)
        gates = load_gates(tmp_path, spec)
    else:
        tensors = published(spec, kind)
        for name in tensors:
            if name.endswith("retention_gate.bias"):
                tensors[name] = torch.full((spec.num_kv_heads,), 18.03)
        gates = load_gates(write(tensors, tmp_path), spec)
    half = gates.to(torch.device("cpu"), torch.bfloat16)
    hidden = torch.randn(64, spec.hidden_size, generator=torch.Generator().manual_seed(0))
    for layer in range(spec.num_layers):
        assert bool((half.layers[layer].bias == torch.tensor(18.03)).all())
        z = half.logits(layer, hidden.bfloat16())
        assert z.dtype == torch.float32 and half.log_beta(layer, hidden.bfloat16()).dtype == z.dtype
        # The trunk's output is bfloat16; the readout of exactly that output is float32.
        x = hidden.bfloat16()
        for weight, bias in half.layers[layer].trunk:
            assert weight.dtype == torch.bfloat16
            x = F.silu(F.linear(x, weight, bias))
        readout = gates.layers[layer].readout.double()
        exact = x.double() @ readout.T + 18.03
        torch.testing.assert_close(z.double(), exact, rtol=1e-6, atol=1e-5)
        steps = z / 0.125
        assert bool(((steps - steps.round()).abs() > 1e-2).any()), "z sits on the bfloat16 grid"


def test_log_beta_is_precise_for_saturated_gates() -> None:
    """log_beta = logsigmoid(z), to float32, for z from -60 to 60 (at 18: -1.52e-8, not 0)."""
    spec = make_spec(layers=1, kv_heads=1, hidden=4)
    gates = make_random_gates(spec)
    gate = gates.layers[0]
    gate.readout.zero_()
    for z in (-60.0, -18.0, -1.0, 0.0, 1.0, 8.0, 18.0, 30.0, 60.0):
        gate.bias.fill_(z)
        got = gates.log_beta(0, torch.zeros(1, 4)).item()
        with mpmath.workdps(50):
            exact = -mpmath.log1p(mpmath.exp(-mpmath.mpf(z)))
            assert abs(got - exact) <= 3 * 2.0**-24 * abs(exact), z


# Gates and weights that are no finite numbers are refused: when they are loaded and when saved.


ODD_VALUES = [float("nan"), float("inf"), float("-inf")]
ODD_DTYPES = [torch.bool, torch.int8, torch.uint8, torch.int64, torch.complex64]
LAYOUTS = ["tied", "rg", "rg10", "write"]
quick = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="module")
def gate_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root, spec = tmp_path_factory.mktemp("gates"), make_spec()
    save_gates(make_random_gates(spec), root / "tied", spec)
    save_gates(make_random_write_gates(spec, width=4), root / "write", spec)
    for layout in ("rg", "rg10"):
        write(published(spec, layout), root / layout)
    return {layout: root / layout for layout in LAYOUTS}


def changed(folder: Path, change: Callable[[dict[str, Tensor]], None], into: Path) -> Path:
    """Return a copy of a gate folder whose tensors went through ``change``."""
    into.mkdir(exist_ok=True)
    (source,) = [f for f in folder.iterdir() if f.suffix in (".pth", ".safetensors")]
    if source.suffix == ".pth":
        tensors = torch.load(source, weights_only=True)
        change(tensors)
        torch.save(tensors, into / source.name)
    else:
        tensors = load_file(source)
        change(tensors)
        save_file(tensors, into / source.name)
        (into / "gates.json").write_text((folder / "gates.json").read_text())
    return into


def load(layout: str, folder: Path, spec: DecoderSpec) -> object:
    return (load_write_gates if layout == "write" else load_gates)(folder, spec)


@quick
@given(st.sampled_from(LAYOUTS), st.data())
def test_odd_numbers_are_refused(
    gate_folders: dict[str, Path], tmp_path: Path, layout: str, data: st.DataObject
) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        name = data.draw(st.sampled_from(sorted(tensors)))
        if data.draw(st.booleans()):
            flat = tensors[name].view(-1)
            flat[data.draw(st.integers(0, flat.numel() - 1))] = data.draw(
                st.sampled_from(ODD_VALUES)
            )
        else:
            tensors[name] = tensors[name].to(data.draw(st.sampled_from(ODD_DTYPES)))

    folder = changed(gate_folders[layout], change, tmp_path / f"{layout}-changed")
    with pytest.raises(GateError, match=r"NaN or infinity|is of (bool|u?int|complex)") as error:
        load(layout, folder, make_spec())
    assert "\n" not in str(error.value)


SHAPES: dict[str, Callable[[Tensor], object]] = {
    "0-d": lambda tensor: tensor.flatten()[0].clone(),
    "1-d": lambda tensor: tensor.flatten()[:7].clone(),
    "empty": lambda tensor: tensor.flatten()[:0],
    "4-d": lambda tensor: tensor[None, None, None],
    "sparse": lambda tensor: tensor.to_sparse(),
    "meta": lambda tensor: tensor.to("meta"),
    "list": lambda tensor: tensor.tolist(),
    "text": lambda tensor: "x",
}


@settings(quick, max_examples=80)
@given(st.sampled_from(LAYOUTS), st.sampled_from(sorted(SHAPES)), st.data())
def test_gates_of_odd_tensors_are_refused(
    gate_folders: dict[str, Path], tmp_path: Path, layout: str, shape: str, data: st.DataObject
) -> None:
    """A safetensors file holds plain tensors alone."""
    assume(layout.startswith("rg") or shape in ("0-d", "1-d", "empty"))
    shapes: list[object] = []

    def change(tensors: dict[str, Tensor]) -> None:
        name = data.draw(st.sampled_from(sorted(tensors)))
        made = SHAPES[shape](tensors[name])
        same = isinstance(made, Tensor) and made.shape == tensors[name].shape
        shapes.append(same and made.layout == torch.strided and not made.is_meta)
        tensors[name] = made  # type: ignore[assignment]

    folder = changed(gate_folders[layout], change, tmp_path / f"{layout}-changed")
    if shapes[0]:
        return
    with pytest.raises(GateError) as error:
        load(layout, folder, make_spec())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("value", ODD_VALUES)
@pytest.mark.parametrize("kind", ["tied", "write"])
def test_gates_that_are_no_numbers_are_not_saved(tmp_path: Path, kind: str, value: float) -> None:
    spec = make_spec()
    gates = make_random_gates(spec) if kind == "tied" else make_random_write_gates(spec)
    for name in gates.tensors:
        odd = copy.deepcopy(gates)
        odd.tensors[name].view(-1)[-1] = value
        with pytest.raises(GateError, match=name):
            save_gates(odd, tmp_path / "gates", spec)
    assert not (tmp_path / "gates").exists()


def test_trunks_that_pass_half_precision_are_not_saved_in_it(tmp_path: Path) -> None:
    spec = make_spec()
    gates = make_random_gates(spec)
    gates.tensors["layers.0.linear1.weight"][0, 0] = 1e6  # float16 ends at 65,504
    with pytest.raises(GateError, match="infinity"):
        save_gates(gates, tmp_path, spec, torch.float16)
    save_gates(gates, tmp_path, spec)


@pytest.mark.parametrize("name", ["gates", "a/b/c", "./a", "/a/b", "~/a"])
def test_what_is_no_folder_and_no_hub_id_is_not_asked_for(name: str) -> None:
    with pytest.raises(GateError, match="give a folder, a file, a hub id"):
        load_gates(name, make_spec())


def test_gates_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mmkv.engine.model.gates.files.save_file", full)
    with pytest.raises(GateError, match="No space left"):
        save_gates(make_random_gates(make_spec()), tmp_path, make_spec())


def test_a_pickle_runs_no_code_and_is_not_called_a_bad_download(tmp_path: Path) -> None:
    class Payload:
        def __reduce__(self) -> tuple[object, tuple[str, str]]:
            return (os.rename, (str(tmp_path / "a"), str(tmp_path / "ran")))

    (tmp_path / "a").touch()
    torch.save({"x": Payload()}, tmp_path / "trimkv_weights.pth")
    with pytest.raises(GateError) as error:
        load_gates(tmp_path, make_spec())
    message = str(error.value)
    assert "could run code" in message and "rename" in message
    assert not (tmp_path / "ran").exists()
    for wrong in ("can still be loaded", "weights_only", "fetch the file again"):
        assert wrong not in message
    save_gates(make_random_gates(make_spec()), tmp_path, make_spec())
    (tmp_path / "gates.json").write_text("{")
    with pytest.raises(GateError, match=r"gates\.json: .*; fetch the file again"):
        load_gates(tmp_path, make_spec())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama"))


def test_weights_that_are_no_numbers_are_refused(checkpoint: Path) -> None:
    from mmkv.engine.model.families.loading import load as load_checkpoint

    file = checkpoint / "model.safetensors"
    whole = load_file(file)
    load_checkpoint(checkpoint)
    names = sorted(whole)
    ends = (names[0], names[len(names) // 2], names[-1])
    for name, value in zip(ends, ODD_VALUES, strict=True):
        odd = {key: tensor.clone() for key, tensor in whole.items()}
        odd[name].view(-1)[-1] = value
        save_file(odd, file, metadata={"format": "pt"})
        try:
            with pytest.raises(ModelError, match="NaN or infinity"):
                load_checkpoint(checkpoint)
        finally:
            save_file(whole, file, metadata={"format": "pt"})


# The gates in assets/ fit their models, and differ in what their names say.


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


def test_committed_gates_are_small_and_keep_what_decides_in_float32() -> None:
    """A trunk bears rounding, the readout and its bias near 10 do not."""
    assets = bundled_model().parent
    files = sorted([*assets.glob("gates/*/*.safetensors"), *assets.glob("tiny-vlm/gates/*.saf*")])
    assert len(files) == 12
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
