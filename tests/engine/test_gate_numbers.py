"""Gates and weights that are no finite numbers are refused: when they are loaded and when saved."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from mmkv.engine.errors import GateError, ModelError
from mmkv.engine.model.gates import (
    load_gates,
    load_write_gates,
    make_random_gates,
    make_random_write_gates,
    save_gates,
)
from mmkv.engine.model.spec import DecoderSpec
from tests.conftest import make_spec
from tests.engine.test_gates import published, write
from tests.support.chat_models import save_llama

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


@quick
@given(st.sampled_from(["rg", "rg10"]), st.sampled_from(sorted(SHAPES)), st.data())
def test_published_gates_of_odd_tensors_are_refused(
    gate_folders: dict[str, Path], tmp_path: Path, layout: str, shape: str, data: st.DataObject
) -> None:
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
        load_gates(folder, make_spec())
    assert "\n" not in str(error.value)


@quick
@given(st.sampled_from(["tied", "write"]), st.sampled_from(["0-d", "1-d", "empty"]), st.data())
def test_own_gates_of_odd_shapes_are_refused(
    gate_folders: dict[str, Path], tmp_path: Path, layout: str, shape: str, data: st.DataObject
) -> None:
    shapes: list[object] = []

    def change(tensors: dict[str, Tensor]) -> None:
        name = data.draw(st.sampled_from(sorted(tensors)))
        shapes.append(tensors[name].shape)
        tensors[name] = SHAPES[shape](tensors[name])  # type: ignore[assignment]
        shapes.append(tensors[name].shape)

    folder = changed(gate_folders[layout], change, tmp_path / f"{layout}-changed")
    if shapes[0] == shapes[1]:
        return
    with pytest.raises(GateError):
        load(layout, folder, make_spec())


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


def test_gates_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mmkv.engine.model.gates.files.save_file", full)
    with pytest.raises(GateError, match="No space left"):
        save_gates(make_random_gates(make_spec()), tmp_path, make_spec())


def test_a_refused_pickle_is_not_called_a_bad_download(tmp_path: Path) -> None:
    class Payload:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (print, ("executed",))

    torch.save({"x": Payload()}, tmp_path / "trimkv_weights.pth")
    with pytest.raises(GateError) as error:
        load_gates(tmp_path, make_spec())
    message = str(error.value)
    assert "could run code" in message and "print" in message
    for wrong in ("can still be loaded", "weights_only", "fetch the file again"):
        assert wrong not in message


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("value", ODD_VALUES)
def test_weights_that_are_no_numbers_are_refused(checkpoint: Path, value: float) -> None:
    from mmkv.engine.model.families.loading import load as load_checkpoint

    file = checkpoint / "model.safetensors"
    whole = load_file(file)
    load_checkpoint(checkpoint)
    names = sorted(whole)
    for name in (names[0], names[len(names) // 2], names[-1]):
        odd = {key: tensor.clone() for key, tensor in whole.items()}
        odd[name].view(-1)[-1] = value
        save_file(odd, file, metadata={"format": "pt"})
        try:
            with pytest.raises(ModelError, match="NaN or infinity"):
                load_checkpoint(checkpoint)
        finally:
            save_file(whole, file, metadata={"format": "pt"})
