"""Quantised checkpoints: each library's own numbers, bit for bit, in every form of weights.

The matrices in tests/support/quantised were made by the libraries themselves (make.py there).
"""

from __future__ import annotations

import json
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig

from mmkv.engine.backends import kernels_for
from mmkv.engine.errors import ModelError
from mmkv.engine.model import panel_files, quantised, rounded
from mmkv.engine.model.families.loading import load
from mmkv.engine.model.product import Kernels, WeightForm
from mmkv.engine.model.quantised import QuantisedTensors, settings_of
from mmkv.engine.model.rounded import Int4Matrix, IntegerMatrix
from mmkv.engine.model.source import INDEX, SINGLE
from mmkv.engine.model.stored import StoredTensors
from mmkv.engine.model.weights import DecoderWeights
from mmkv.planner import planned
from tests.support.factories import checkpoint
from tests.support.quantised.make import digest
from tests.support.tiers import one_in

HERE = Path(__file__).resolve().parents[1] / "support" / "quantised"
SAID: dict[str, Any] = json.loads((HERE / "expected.json").read_text())
METHODS = SAID["methods"]
CPU = torch.device("cpu")


def folder_of(method: str, folder: Path, **settings: Any) -> Path:
    """Write the checkpoint: two files and an index, as the hub has them."""
    folder.mkdir()
    said = METHODS[method]["settings"] | settings
    config = SAID["config"] | {"quantization_config": said}
    (folder / "config.json").write_text(json.dumps(config))
    weight_map = {}
    for file in ("plain.safetensors", f"{method}.safetensors"):
        shutil.copy(HERE / file, folder)
        weight_map |= dict.fromkeys(load_file(HERE / file), file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def opened(method: str) -> QuantisedTensors:
    files = [HERE / "plain.safetensors", HERE / f"{method}.safetensors"]
    return QuantisedTensors(StoredTensors(files), METHODS[method]["settings"], torch.bfloat16)


def plain_of(method: str, folder: Path) -> Path:
    """Write the plain checkpoint of the numbers that the library reads."""
    stored = opened(method)
    folder.mkdir()
    tensors = {name: stored.tensor(name).contiguous() for name in stored.names}
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(SAID["config"]))
    return folder


def numbers(weights: DecoderWeights) -> dict[str, Tensor]:
    return {
        name: part if isinstance(part, Tensor) else part.wide() for name, part in weights.named()
    }


@pytest.mark.parametrize("method", METHODS)
def test_each_matrix_is_bit_for_bit_what_its_library_reads(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five rows of 64 or three of 96 at a time; its codes times steps are the same numbers."""
    monkeypatch.setattr(quantised, "_AT_ONCE", 5 * 64)
    stored, expected = opened(method), METHODS[method]["sha256"]
    assert len(expected) == 7
    for name, wanted in expected.items():
        tensor = stored.tensor(name)
        assert digest(tensor) == wanted, name
        if (grid := stored.grid(name)) is not None:
            steps = grid.steps.repeat_interleave(tensor.shape[1] // grid.steps.shape[1], 1)
            torch.testing.assert_close(grid.codes * steps, tensor.float(), rtol=2**-8, atol=0)
    assert stored.names == {*expected, *load_file(HERE / "plain.safetensors")}
    assert ("activations" in str(stored.note)) == (method == "compressed-tensors")


@one_in(3)
@pytest.mark.parametrize(
    ("method", "form"),
    [
        *((method, form) for method in METHODS for form in ("auto", "int8", "int4")),
        *(("gptq", form) for form in ("torch", "bf16")),
    ],
)
def test_it_loads_as_the_plain_checkpoint_of_these_numbers(
    method: str, form: str, tmp_path: Path
) -> None:
    kernels = Kernels() if form == "torch" else kernels_for(form)
    named = "auto" if form == "torch" else form
    quantised, plain = (
        load(make(method, tmp_path / make.__name__), form=named, kernels=kernels)[2]
        for make in (folder_of, plain_of)
    )
    for name, part in quantised.named():
        theirs = dict(plain.named())[name]
        assert type(part) is type(theirs), name
        if not isinstance(part, IntegerMatrix) or part.error == theirs.error:
            assert torch.equal(numbers(quantised)[name], numbers(plain)[name]), name
            continue
        # The codes stayed, and steps became the next bfloat16: off by 2^-9 of a number at most.
        assert part.error < 2**-9 < theirs.error, name
    kept = {n for n, e in quantised.errors().items() if e != plain.errors()[n]}
    layers = {"qkv", "out", "gate_up", "down"}
    whole = {
        ("awq", "int8"): layers,
        ("gptq", "int8"): layers - {"down"},
        ("gptq_v2", "int8"): layers - {"down"},
        ("compressed-tensors", "int8"): {"qkv"},
    }.get((method, form), set())
    assert {name.removeprefix("layers.0.") for name in kept} >= whole


def test_modules_of_gptq_with_bits_of_their_own(tmp_path: Path) -> None:
    """GPTQModel's ``dynamic``: attention has 4 bits here, and the MLP 3."""
    methods = {"self_attn": "gptq", "mlp": "gptq_3"}
    tensors = {
        name: part
        for module, method in methods.items()
        for name, part in load_file(HERE / f"{method}.safetensors").items()
        if f".{module}." in name
    }
    folder = folder_of("gptq", tmp_path / "model", dynamic={r"+:.*\.mlp\..*": {"bits": 3}})
    damaged(lambda all_of_4: all_of_4.update(tensors))("gptq", folder)
    stored = QuantisedTensors(
        StoredTensors([folder / "gptq.safetensors"]),
        METHODS["gptq"]["settings"] | {"dynamic": {"x": {}}},
        torch.bfloat16,
    )
    for name in stored.names:
        method = next(of for module, of in methods.items() if f".{module}." in name)
        assert digest(stored.tensor(name)) == METHODS[method]["sha256"][name]
    count = load(folder, "float32", "cpu")[2].numbers()
    made = planned(str(folder))
    assert made is not None and made["auto"].weights >= 2 * count


def test_four_symmetric_bits_stay_those_four_bits() -> None:
    stored, name = opened("compressed-tensors"), "model.layers.0.self_attn.q_proj.weight"
    form = WeightForm("int4", kernels_for("int4"))
    held = stored.read_matrix([name], torch.float32, CPU, form, "layers.0.self_attn.q_proj")
    assert isinstance(held, Int4Matrix) and held.error == 0
    # compressed-tensors rounds each number to bfloat16; codes times steps do not.
    assert torch.equal(held.wide().bfloat16(), stored.tensor(name))
    again = form.hold(stored.tensor(name).float(), "layers.0.self_attn.q_proj")
    assert isinstance(again, Int4Matrix) and again.error > 0.005


@pytest.mark.parametrize("zero", [0, -1])
def test_codes_that_no_byte_holds_are_no_grid(zero: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 8 bits less a zero point of 0, or of 255."""
    stored, name = opened("gptq_v2"), "model.layers.0.self_attn.q_proj.weight"
    part = stored._part
    assert stored.grid(name) is not None

    def changed(name: str) -> Tensor:
        return part(name).fill_(zero) if name.endswith("qzeros") else part(name)

    monkeypatch.setattr(stored, "_part", changed)
    assert stored.grid(name) is None


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_settings_stand_in_the_whole_config_or_in_its_text(key: str, inside: bool) -> None:
    config = AutoConfig.from_pretrained(checkpoint("qwen3_vl"))
    part, said = config.get_text_config() if inside else config, METHODS["gptq"]["settings"]
    setattr(part, key, said)
    assert settings_of(config) == said and key not in vars(part)
    assert settings_of(config) is None


def test_text_in_fp8_beside_a_plain_tower(tmp_path: Path) -> None:
    """Blocks of 128 x 128 that the edges cut, names with prefixes, and a tower left as it is."""
    folder = Path(shutil.copytree(checkpoint("qwen2_5_vl"), tmp_path / "plain"))
    tensors = {n: t.bfloat16() for n, t in load_file(folder / SINGLE).items()}
    stored, expected = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        if ".layers." not in name or "visual" in name or weight.dim() != 2:
            continue
        rows, columns = weight.shape
        steps = torch.rand(-(-rows // 128), -(-columns // 128)) / 100
        if "o_proj" in name:
            steps = steps[0, 0]  # one for all, as Ministral has it
        spread = steps.expand(-(-rows // 128), -(-columns // 128)).repeat_interleave(128, 0)[:rows]
        spread = spread.repeat_interleave(128, 1)[:, :columns]
        values = (weight.float() / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
        stored |= {name: values, f"{name}_scale_inv": steps}
        expected[name] = (values.float() * spread).bfloat16()
    assert any(max(weight.shape) > 128 for weight in expected.values())
    save_file(expected, folder / SINGLE, metadata={"format": "pt"})
    quantised = Path(shutil.copytree(folder, tmp_path / "quantised"))
    save_file(stored, quantised / SINGLE, metadata={"format": "pt"})
    said = {"quant_method": "fp8", "modules_to_not_convert": ["lm_head", "visual"]}
    configure(quantised, quantization_config=said)
    ours, theirs = (load(each, "float32", "cpu") for each in (quantised, folder))
    for name, part in ours[2].named():
        assert torch.equal(part, dict(theirs[2].named())[name]), name
    tower, other = (dict(each[0].hf.named_parameters()) for each in (ours, theirs))
    assert tower.keys() == other.keys()
    assert all(torch.equal(part, other[name]) for name, part in tower.items())


@pytest.mark.parametrize(
    ("scale", "said"),
    [
        ("weight_scale_inv", {"weight_block_size": [24, 40]}),
        ("weight_scale", {"config_groups": {"0": {"weights": {"block_structure": [24, 40]}}}}),
    ],
)
def test_blocks_need_not_be_square(scale: str, said: dict[str, Any], tmp_path: Path) -> None:
    values, steps = torch.randn(50, 90).to(torch.float8_e4m3fn), torch.rand(3, 3)
    save_file({"a.weight": values, f"a.{scale}": steps}, tmp_path / SINGLE)
    method = "fp8" if scale.endswith("inv") else "compressed-tensors"
    stored = StoredTensors([tmp_path / SINGLE])
    read = QuantisedTensors(stored, said | {"quant_method": method}, torch.float32)
    spread = steps.repeat_interleave(24, 0)[:50].repeat_interleave(40, 1)[:, :90]
    assert torch.equal(read.tensor("a.weight"), values.float() * spread)


def configure(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_packed_weights_of_other_settings_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MMKV_PANELS", "1GB")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(panel_files, "LEAST_BYTES", 1)

    def read() -> dict[str, Tensor]:
        weights = load(folder, form="int8", kernels=kernels_for("int8"))[2]
        return {name: part.clone() for name, part in numbers(weights).items()}

    folder = folder_of("gptq", tmp_path / "model")
    first = read()
    assert list((tmp_path / "cache").rglob("*.safetensors"))
    assert all(torch.equal(part, read()[name]) for name, part in first.items())
    said = METHODS["gptq"]["settings"] | {"checkpoint_format": "gptq_v2"}
    configure(folder, quantization_config=said)
    second = read()["layers.0.out"]
    assert not torch.equal(first["layers.0.out"], second)
    del said["checkpoint_format"]
    configure(folder, quantization_config=said | {"format": "gptq_v2"})  # its other name
    assert torch.equal(second, read()["layers.0.out"])


class Peak(TorchDispatchMode):
    """Counts the bytes of all tensors that live."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for each in made if isinstance(made, (list, tuple)) else [made]:
            if isinstance(each, Tensor) and each.device == CPU:
                self._count(each.untyped_storage())
        return made

    def _count(self, storage: Any) -> None:
        address, size = storage._cdata, storage.nbytes()
        if address in self._seen:
            return

        def gone() -> None:
            self._seen.discard(address)
            self.now -= size

        self._seen.add(address)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, gone)


def damaged(change: Callable[[dict[str, Tensor]], Any]) -> Callable[[str, Path], None]:
    def damage(method: str, folder: Path) -> None:
        file = folder / f"{method}.safetensors"
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, metadata={"format": "pt"})
        index = json.loads((folder / INDEX).read_text())
        others = {n: f for n, f in index["weight_map"].items() if f != file.name}
        index["weight_map"] = others | dict.fromkeys(tensors, file.name)
        (folder / INDEX).write_text(json.dumps(index))

    return damage


def without(name: str) -> Callable[[str, Path], None]:
    return damaged(lambda tensors: tensors.pop(f"model.layers.0.{name}"))


def shorter(name: str) -> Callable[[str, Path], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        whole = f"model.layers.0.{name}"
        tensors[whole] = tensors[whole][:-1].clone()

    return damaged(change)


def of_no_group(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.0.mlp.down_proj.g_idx"][5] = -1


def of_uneven_groups(tensors: dict[str, Tensor]) -> None:
    name = "model.layers.0.self_attn.q_proj.weight_scale"
    tensors[name] = tensors[name][:, :1].repeat(1, 3)


def stacked_experts(tensors: dict[str, Tensor]) -> None:
    """As no library of those here names them: their steps would be left out."""
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name.replace("mlp.down_proj.weight", "mlp.experts.gate_up_proj")] = tensors[name]
    del tensors[name]


def said(**settings: Any) -> Callable[[str, Path], None]:
    def change(method: str, folder: Path) -> None:
        configure(folder, quantization_config=METHODS[method]["settings"] | settings)

    return change


def truncated(method: str, folder: Path) -> None:
    file = folder / f"{method}.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


@pytest.mark.parametrize(
    ("method", "damage", "words"),
    [
        ("fp8", truncated, "are corrupt"),
        ("fp8", without("mlp.up_proj.weight_scale_inv"), "up_proj.weight_scale is missing"),
        ("fp8", shorter("mlp.up_proj.weight_scale_inv"), "up_proj.weight_scale_inv is F32 [2, 2]"),
        ("awq", without("mlp.up_proj.qzeros"), "up_proj.qzeros is missing, which awq has"),
        ("awq", shorter("mlp.up_proj.scales"), "up_proj.qzeros is I32 [2, 12], which does not"),
        ("gptq", without("mlp.up_proj.scales"), "up_proj.scales is missing, which gptq has"),
        ("gptq", shorter("mlp.down_proj.g_idx"), "down_proj.g_idx is I32 [95]"),
        ("gptq", damaged(of_no_group), "down_proj.g_idx names groups that have no steps"),
        ("gptq", said(bits=5), "quantised by gptq in 5 bits, which mmkv does not read"),
        ("gptq", said(bits=2), "down_proj.qzeros is I32 [3, 8], which does not fit"),
        ("gptq", said(bits=2, dynamic={}), "down_proj.qzeros is I32 [3, 8], which does not fit"),
        ("gptq", said(is_marlin_format=True), "by gptq in the packing 'marlin'"),
        ("awq", said(version="gemv"), "by awq in the packing 'gemv'"),
        ("fp8", said(quant_method="hqq"), "quantised by 'hqq', which mmkv does not read"),
        ("fp8", said(quant_method="awq"), "without the parts that awq has beside it"),
        ("compressed-tensors", said(format="marlin-24"), "in the format 'marlin-24'"),
        ("compressed-tensors", said(transform_config={"a": 1}), "with rotations"),
        ("fp8", damaged(stacked_experts), "experts.gate_up_proj holds F8_E4M3 without the parts"),
        ("compressed-tensors", damaged(of_uneven_groups), "q_proj.weight_scale is BF16 [64, 3]"),
        (
            "compressed-tensors",
            without("self_attn.q_proj.weight_scale"),
            "q_proj.weight_scale is missing",
        ),
        (
            "compressed-tensors",
            shorter("self_attn.k_proj.weight_zero_point"),
            "k_proj.weight_zero_point is I32 [3, 2]",
        ),
        ("bitsandbytes", shorter("self_attn.q_proj.weight"), "q_proj.weight is U8 [2047, 1]"),
        (
            "bitsandbytes",
            without("self_attn.q_proj.weight.quant_state.bitsandbytes__nf4"),
            "q_proj.weight.quant_state.bitsandbytes__nf4 is missing",
        ),
        ("bitsandbytes", shorter("self_attn.k_proj.weight.absmax"), "k_proj.weight.absmax is F32"),
        (
            "bitsandbytes",  # whose codes would be taken for numbers
            without("mlp.down_proj.weight.nested_absmax"),
            "down_proj.weight.absmax is U8",
        ),
    ],
)
def test_bad_files_and_variants_are_refused_by_a_line(
    method: str, damage: Callable[[str, Path], None], words: str, tmp_path: Path
) -> None:
    folder = folder_of(method, tmp_path / "model")
    damage(method, folder)
    with pytest.raises(ModelError) as error:
        load(folder, "float32", "cpu")
    assert words in str(error.value) and "\n" not in str(error.value)


def test_no_more_memory_than_the_form_and_one_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is made together is small beside such a layer, too.
    monkeypatch.setattr(quantised, "_AT_ONCE", 2**12)
    monkeypatch.setattr(rounded, "_PANELS_AT_ONCE", 1)
    folder, layers = folder_of("gptq", tmp_path / "model"), 8
    tensors = load_file(folder / "gptq.safetensors") | load_file(folder / "plain.safetensors")
    for index in range(1, layers):
        tensors |= {
            name.replace(".0.", f".{index}.", 1): tensor.clone()
            for name, tensor in tensors.items()
            if ".layers.0." in name
        }
    (folder / INDEX).unlink()
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    configure(folder, num_hidden_layers=layers)
    for form in ("auto", "int8"):
        with Peak() as peak:
            weights = load(folder, "float32", "cpu", form=form)[2]
        numbers = sum(each.numel() for each in vars(weights.layers[0]).values() if each is not None)
        assert weights.nbytes() < peak.most < weights.nbytes() + 4 * numbers, form


def test_biases_of_zeros_that_tools_add_are_left_out(tmp_path: Path) -> None:
    folder = folder_of("gptq", tmp_path / "model")
    before = load(folder, "float32", "cpu")[2]

    bias = "model.layers.0.mlp.up_proj.bias"
    damaged(lambda tensors: tensors.update({bias: torch.zeros(96)}))("gptq", folder)
    found = dict(load(folder, "float32", "cpu")[2].named())
    assert all(torch.equal(part, found[name]) for name, part in before.named())
    damaged(lambda tensors: tensors.update({bias: torch.ones(96)}))("gptq", folder)
    with pytest.raises(ModelError, match=r"has 1 text weights .*up_proj\.bias"):
        load(folder, "float32", "cpu")


def test_older_names_go_by_way_of_transformers(tmp_path: Path) -> None:
    folder = folder_of("awq", tmp_path / "model")
    tensors = load_file(folder / "awq.safetensors") | load_file(folder / "plain.safetensors")
    (folder / INDEX).unlink()
    tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    ours = load(folder, "float32", "cpu")[2]
    theirs = load(plain_of("awq", tmp_path / "plain"), "float32", "cpu")[2]
    for name, part in ours.named():
        assert torch.equal(part, dict(theirs.named())[name]), name


@pytest.mark.parametrize("method", METHODS)
def test_the_plan_counts_all_numbers_of_packed_matrices(method: str, tmp_path: Path) -> None:
    packed, plain = (
        planned(str(make(method, tmp_path / make.__name__))) for make in (folder_of, plain_of)
    )
    assert packed is not None and plain is not None
    mixed = method == "compressed-tensors"  # 3 and 4 bits: those of the first group count
    for form in ("bf16", "int8"):
        assert abs(packed[form].weights / plain[form].weights - 1) < (0.05 if mixed else 1e-9)


def test_the_plan_knows_the_dtype_of_packed_matrices(tmp_path: Path) -> None:
    """Of float16 a CPU makes float32; one of the steps counts, or the config's."""
    folder = folder_of("fp8", tmp_path / "model")
    before = planned(str(folder))
    configure(folder, dtype="float16")
    made, held = planned(str(folder)), load(folder, kernels=kernels_for("auto"))[2].nbytes()
    assert before is not None and made is not None
    assert before["auto"].weights < 0.8 * held <= made["auto"].weights
    configure(folder, quantization_config={"quant_method": "gptq", "bits": 0})
    assert planned(str(folder)) is None
