"""The vision tower on a CPU: matrices in forms, and transformers' features all the same."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from itertools import cycle, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mmkv.engine.backends import kernels_for
from mmkv.engine.backends.cpu import kernels as native
from mmkv.engine.backends.cpu import levels
from mmkv.engine.backends.cpu.kernels import attend_patches
from mmkv.engine.errors import ModelError
from mmkv.engine.model.families import (
    IMAGE,
    VIDEO,
    Family,
    Features,
    family_for,
    features,
    qwen_vl,
    vision,
)
from mmkv.engine.model.families.loading import load
from mmkv.engine.model.families.vision import (
    HeldLinear,
    HeldPatches,
    attend_at_once,
    held_matrices,
    hold_tower,
)
from mmkv.engine.model.panels import Panels
from mmkv.engine.model.product import Kernels, WeightForm, attend_rounded, multiply
from mmkv.engine.model.rounded import Int8Matrix
from mmkv.hf import retain
from tests.support.factories import checkpoint, make_turn, stored_in_bfloat16
from tests.support.hf_models import model_of, prompts_of
from tests.support.native import needs_native
from tests.support.tiers import one_in

# One of each tower, and two levels of CLIP's at once.
NAMES = ["qwen3_vl", "qwen2_5_vl", "internvl", "llava", "llava_next", "llava_onevision"]
NAMES += ["llava_mistral", "qwen2_vl", "smolvlm", "mistral3"]
PIECES: list[Any] = [3, ("image", 32, 32), 4, ("image", 16, 48), 2]
ON_VIDEO = {"qwen3_vl", "qwen2_5_vl", "qwen2_vl", "llava_onevision"}


@pytest.fixture(scope="module", params=NAMES)
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose tensors lie in bfloat16, as those on the hub."""
    folder = stored_in_bfloat16(request.param, tmp_path_factory.mktemp(request.param))
    (folder / "name").write_text(request.param)
    return folder


@pytest.fixture(scope="module")
def theirs(stored: Path) -> list[Tensor]:
    """What transformers makes of the turn for ``stored``, in float32."""
    kind = family_for(transformers.AutoConfig.from_pretrained(stored))
    model = transformers.AutoModelForImageTextToText.from_pretrained(stored, dtype=torch.float32)
    return read(kind(model.eval()), turn_for(stored))


def turn_for(folder: Path) -> dict[str, Tensor]:
    name = (folder / "name").read_text()
    return make_turn(name, [*PIECES, *([("video", 4, 16, 32), 3] if name in ON_VIDEO else [])])


def read(family: Family, inputs: dict[str, Tensor]) -> list[Tensor]:
    """Return all features of a turn: of pictures, of videos, and their deepstack levels."""
    readers = {IMAGE: family.image_features, VIDEO: family.video_features}
    made: list[Features] = []
    with torch.inference_mode():
        for kind, key in family.pixel_keys.items():
            if key in inputs:
                made.append(readers[kind](inputs, torch.device("cpu")))
    return [tensor for each in made for tensor in (each.rows, *each.deepstack)]


def furthest(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """Return the greatest error, in root mean squares of the features."""
    assert [a.shape for a in ours] == [b.shape for b in theirs]
    return max(
        float((a.double() - b.double()).abs().max() / b.double().square().mean().sqrt())
        for a, b in zip(ours, theirs, strict=True)
    )


def held_in(folder: Path, form: str, kernels: Kernels | None = None) -> Family:
    return load(folder, "auto", "cpu", form=form, kernels=kernels or kernels_for(form))[0]


def loose(folder: Path) -> float:
    """Return by how much the bounds on rounding are wider for this tower."""
    return LOOSE.get((folder / "name").read_text(), 1.0)


def layers_left(family: Family) -> list[str]:
    """Return the linear layers and convolutions that nobody holds, but for the output head."""
    text: Any = family.text_model(family.hf)
    apart = {*text.modules(), family.hf.get_output_embeddings()}
    kinds = (nn.Linear, nn.Conv2d, nn.Conv3d)
    return [n for n, m in family.hf.named_modules() if isinstance(m, kinds) and m not in apart]


@one_in(3)
@needs_native
def test_in_panels_features_are_those_of_transformers(stored: Path, theirs: list[Tensor]) -> None:
    """C attends once a layer, windows or not: the text model keeps transformers' attention."""
    calls: list[tuple[int, ...]] = []

    def counted(*arguments: Any) -> Tensor:
        calls.append(tuple(arguments[-1]))
        return attend_patches(*arguments)

    kernels = dataclasses.replace(kernels_for("auto"), attention=counted)
    inputs, family = turn_for(stored), held_in(stored, "auto", kernels)
    # Both round in float32; what they round differs, as the order of sums does.
    assert furthest(read(family, inputs), theirs) < 1e-4
    assert not layers_left(family)
    assert all(isinstance(matrix, Panels) for _, matrix in held_matrices(family.hf))
    vision = family.hf.config.vision_config
    depth = getattr(vision, "depth", None) or vision.num_hidden_layers
    videos = "pixel_values_videos" in inputs and "pixel_values_videos" in family.pixel_keys.values()
    alone = len(inputs["image_sizes"]) if family.config.model_type == "mistral3" else 1
    assert len(calls) == depth * (alone + videos)
    if family.config.model_type == "qwen2_5_vl":  # windows of 4 x 4 patches in one of the layers
        assert calls[0] == (0, 16, 32, 48, 64, 80, 96, 112) and calls[1] == (0, 64, 112)
    assert family.hf.config.get_text_config()._attn_implementation == "sdpa"


# Root mean square of the error of features over that of the features: 0.021 is the most here of 8
# bits, 0.004 of states in bfloat16.
WORST_INT8, WORST_BF16 = 0.03, 0.01
# Pixtral's MLPs have gates, and no norm stands behind the last layer.
LOOSE = {"mistral3": 2.5}


@one_in(3)
@needs_native
def test_in_8_bits_c_and_torch_agree_and_the_error_is_small(
    stored: Path, theirs: list[Tensor]
) -> None:
    inputs, worst = turn_for(stored), WORST_INT8 * loose(stored)
    native, torch_alone = held_in(stored, "int8"), held_in(stored, "int8", Kernels())
    pairs = [dict(held_matrices(family.hf)) for family in (native, torch_alone)]
    assert pairs[0].keys() == pairs[1].keys() and len(pairs[0]) > 6
    for name, matrix in pairs[0].items():
        other = pairs[1][name]
        assert isinstance(matrix, Int8Matrix) and isinstance(other, Int8Matrix)
        assert torch.equal(matrix.codes, other.codes) and torch.equal(matrix.scales, other.scales)
    ours, reference = read(native, inputs), read(torch_alone, inputs)
    for a, b, wanted in zip(ours, reference, theirs, strict=True):
        size = wanted.square().mean().sqrt()
        errors = [float((x - wanted).square().mean().sqrt() / size) for x in (a, b)]
        assert 0 < max(errors) < worst
        # A state that lies between two codes may get either, and C rounds attention's shares, too.
        assert float((a - b).square().mean().sqrt() / size) < worst / 2
    assert not layers_left(native)


@needs_native
@pytest.mark.parametrize("stored", ["qwen3_vl"], indirect=True)
def test_models_with_other_kernels_leave_each_other_theirs(stored: Path) -> None:
    inputs, native = turn_for(stored), held_in(stored, "int8")
    wanted = read(native, inputs)
    read(held_in(stored, "int8", Kernels()), inputs)
    assert all(map(torch.equal, read(native, inputs), wanted))


def test_what_bfloat16_does_not_hold_stays() -> None:
    """These weights are of float32, so that ``auto`` would change numbers."""
    family = held_in(checkpoint("internvl"), "auto")
    assert not list(held_matrices(family.hf)) and layers_left(family)


@one_in(3)
@pytest.mark.parametrize(
    ("stored", "kernels"),
    [
        *(pytest.param(name, None, id=name) for name in NAMES),
        *(pytest.param(name, Kernels(), id=f"{name}-torch") for name in NAMES[::3]),
    ],
    indirect=["stored"],
)
def test_in_bfloat16_the_error_is_smaller(
    kernels: Kernels | None, stored: Path, theirs: list[Tensor]
) -> None:
    inputs, family = turn_for(stored), held_in(stored, "bf16", kernels)
    worst = WORST_BF16 * loose(stored)
    for made, wanted in zip(read(family, inputs), theirs, strict=True):
        assert (made - wanted).square().mean() < worst**2 * wanted.square().mean()
    assert not layers_left(family)


@pytest.mark.parametrize(("form", "value"), [("auto", torch.nan), ("int8", torch.inf)])
def test_a_held_matrix_that_is_no_number_is_refused(
    form: str, value: float, tmp_path: Path
) -> None:
    tensors = load_file(stored_in_bfloat16("qwen3_vl", tmp_path) / "model.safetensors")
    name = "model.visual.blocks.1.mlp.linear_fc2.weight"
    tensors[name][-1, -1] = value
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    family = held_in(tmp_path, form)
    with pytest.raises(ModelError, match=f"NaN or infinity .in {name}"):
        _ = family.hf


PATCHES: list[tuple[Callable[..., nn.Module], tuple[int, ...], tuple[int, ...]]] = [
    (nn.Conv2d, (3, 4), (7, 9)),  # a row and a column of pixels are left over
    (nn.Conv2d, (4, 4), (8, 12)),
    (nn.Conv3d, (2, 4, 4), (2, 4, 4)),
    (nn.Conv3d, (2, 3, 4), (5, 7, 8)),
]


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("kind", "patch", "size"), PATCHES, ids=str)
def test_patches_are_the_convolution(
    kind: Callable[..., Any], patch: tuple[int, ...], size: tuple[int, ...], biased: bool
) -> None:
    torch.manual_seed(0)
    layer = kind(3, 10, patch, stride=patch, bias=biased)
    made = HeldPatches(layer.weight.detach().flatten(1), layer.bias, multiply, patch)
    for count in (1, 5):
        x = torch.randn(count, 3, *size)
        with torch.no_grad():
            torch.testing.assert_close(made(x), layer(x), rtol=0, atol=1e-5)


class Doubled(nn.Linear):
    """A layer that is none of torch's own."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Eyes(nn.Module):
    """Layers of all kinds, of which ``parts`` and ``patches`` can be held."""

    def __init__(self) -> None:
        super().__init__()
        self.overlapping = nn.Conv2d(3, 4, 3, stride=2)
        self.padded = nn.Conv2d(3, 4, 2, stride=2, padding=1)
        self.grouped = nn.Conv2d(4, 4, 2, stride=2, groups=2)
        self.dilated = nn.Conv2d(3, 4, 2, stride=2, dilation=2)
        self.doubled = Doubled(4, 4)
        self.heads = nn.MultiheadAttention(4, 2)
        self.patches = nn.Conv2d(3, 4, 2, stride=2, padding="valid")
        self.parts = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2, bias=False))
        self.language_model = nn.Sequential(nn.Linear(4, 4))
        self.lm_head = nn.Linear(4, 4)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head


class Seeing(Family):
    """A family of a model without an outer layer."""

    @staticmethod
    def text_model(hf_model: Any) -> nn.Module:
        module: nn.Module = hf_model.language_model
        return module


def test_other_layers_stay() -> None:
    model = Eyes()
    before = dict(model.named_modules())
    hold_tower(model, Seeing, WeightForm("bf16"))
    after = dict(model.named_modules())
    changed = {name for name in before if after[name] is not before[name]}
    assert changed == {"patches", "parts.0", "parts.2"}
    assert {name for name, _ in held_matrices(model)} == {f"{name}.weight" for name in changed}
    first = after["parts.0"]
    assert isinstance(first, HeldLinear) and first.bias is not None
    assert first.weight.shape == (4, 4) and first.weight.dtype == torch.float32


def test_a_model_of_the_user_keeps_its_modules() -> None:
    model = copy.deepcopy(model_of("qwen3_vl"))
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.bfloat16().float())  # the engine could hold all of it in bfloat16
    before = dict(model.named_modules())
    with retain(model, gates="random", budget=64):
        model.generate(**prompts_of("qwen3_vl")[0], max_new_tokens=2, do_sample=False)
    after = dict(model.named_modules())
    assert before.keys() == after.keys() and all(after[name] is before[name] for name in before)
    assert model.config.vision_config._attn_implementation == "sdpa"


def three(tokens: int, heads: int, dim: int, count: int = 1, sharp: float = 1.0) -> list[Tensor]:
    """Return queries, keys and values ``[count, heads, tokens, dim]`` as one product makes them."""
    source = torch.Generator().manual_seed(tokens + dim)
    made = torch.randn(count, tokens, 3, heads, dim, generator=source)
    made[:, :, 0] *= sharp
    return [made[:, :, i].transpose(1, 2) for i in range(3)]


def exact(query: Tensor, key: Tensor, value: Tensor, scale: float, starts: list[int]) -> Tensor:
    """Return attention in float64, ``[count, tokens, heads, dim]``."""
    q, k, v = (x.double() for x in (query, key, value))
    made = torch.zeros_like(q)
    for first, after in pairwise(starts):
        own = slice(first, after)
        scores = q[:, :, own] @ k[:, :, own].mT * scale
        made[:, :, own] = scores.softmax(-1) @ v[:, :, own]
    return made.transpose(1, 2)


# Sizes of heads in towers (CLIP, SigLIP, Qwen2.5-VL) and some that no vector divides; one block of
# keys and more, one of queries and more, and what is left over of both.
DIMS, TOKENS = [64, 72, 80, 5, 1], [1, 2, 7, 64, 255, 257, 257, 530]


@one_in(3)
@needs_native
@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("dim", DIMS)
def test_attention_is_that_in_float64(
    dim: int, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MMKV_NATIVE", level)
    for tokens, sharp in zip(TOKENS, cycle((1.0, 30.0))):  # scores of hundreds: only one counts
        asked = three(tokens, 2, dim, count=2, sharp=sharp)
        made = attend_patches(*asked, dim**-0.5, [0, tokens])
        wanted = exact(*asked, dim**-0.5, [0, tokens])
        assert made.shape == wanted.shape and made.dtype == torch.float32
        # A score of s is off by s times 2^-24 and a few more of them, and its share likewise.
        assert (made - wanted).abs().max() < 2e-5 * sharp


@one_in(3)
@pytest.mark.parametrize("level", ["torch", *levels()])
@pytest.mark.parametrize("dim", DIMS)
def test_rounded_attention_is_that_of_rounded_numbers(
    dim: int, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On v4 two numbers are multiplied at once where the CPU can, on the other levels one."""
    attend: Callable[..., Tensor] = attend_rounded
    if level != "torch":
        monkeypatch.setenv("MMKV_NATIVE", level)
        attend = functools.partial(attend_patches, rounds=True)
    for tokens in TOKENS:
        asked = three(tokens, 2, dim, count=2, sharp=3.0)
        made = attend(*asked, dim**-0.5, [0, tokens])
        wanted = exact(*(x.bfloat16() for x in asked), dim**-0.5, [0, tokens])
        # A share in bfloat16 is off by one part in 512 at most.
        assert (made - wanted).abs().max() < asked[2].abs().max() / 512
        if tokens > 2:  # and what went in was rounded
            unrounded = exact(*asked, dim**-0.5, [0, tokens])
            rms = [(made - each).square().mean().sqrt() for each in (wanted, unrounded)]
            assert rms[0] < rms[1] < 0.01


@needs_native
@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("at", [3, 290])  # in the first stretch of keys, or in the second
def test_what_is_no_number_shows(
    at: int, rounds: bool, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MMKV_NATIVE", level)
    query, key, value = three(300, 1, 20)
    query[:, :, at] = torch.nan
    made = attend_patches(query, key, value, 0.2, [0, 300], rounds)
    assert made[:, at].isnan().all() and made.isnan().sum() == made[:, at].numel()
    query, key, value = three(300, 1, 20)
    key[:, :, at] = torch.nan
    assert attend_patches(query, key, value, 0.2, [0, 300], rounds).isnan().all()


@needs_native
@pytest.mark.parametrize("level", levels())
def test_parts_see_themselves_alone(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MMKV_NATIVE", level)
    monkeypatch.setattr(native, "PER_THREAD", 1)
    starts = [0, 64, 64, 65, 129, 700]  # one of them is empty
    asked = three(700, 3, 40, count=2)
    torchs = torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    together = [attend_patches(*asked, 0.2, starts, rounds) for rounds in (False, True)]
    assert (together[0] - exact(*asked, 0.2, starts)).abs().max() < 2e-5
    assert (together[1] - attend_rounded(*asked, 0.2, starts)).abs().max() < 0.01
    monkeypatch.setattr(torch, "get_num_threads", lambda: torchs)
    for first, after in pairwise(starts):
        own = [x[:, :, first:after] for x in asked]
        for rounds, whole in enumerate(together):
            alone = attend_patches(*own, 0.2, [0, after - first], bool(rounds))
            assert torch.equal(alone, whole[:, first:after])


class FlashOnCPU(TorchDispatchMode):
    """Computes torch's kernel for parts, which is for GPUs, part by part in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten._flash_attention_forward.default:
            return func(*args, **(kwargs or {}))
        query, key, value, starts, others, longest, *_ = args
        assert starts.dtype == torch.int32 and torch.equal(starts, others)
        parts = starts.diff().tolist()
        assert longest == max(parts)
        self.parts.append(len(parts))
        made = []
        for q, k, v in zip(*(x.double().split(parts) for x in (query, key, value)), strict=True):
            scores = torch.einsum("qhd,khd->hqk", q, k) * kwargs["scale"]
            made.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
        return (torch.cat(made).to(query.dtype), *[None] * 4)


def test_on_a_gpu_all_parts_are_one_launch(stored: Path, theirs: list[Tensor]) -> None:
    """Where a tower has parts; in float32 here, so that a wrong part would show."""
    kind = family_for(transformers.AutoConfig.from_pretrained(stored))
    model = transformers.AutoModelForImageTextToText.from_pretrained(stored, dtype=torch.float32)
    attend_at_once(model.eval())
    with FlashOnCPU() as flash:
        ours = read(kind(model), turn_for(stored))
    assert furthest(ours, theirs) < 1e-4
    parted = (stored / "name").read_text() in ("qwen3_vl", "qwen2_5_vl", "qwen2_vl")
    passes = 2  # pictures, and the video
    depth = model.config.vision_config.depth if parted else 0
    assert len(flash.parts) == passes * depth and (not parted or max(flash.parts) > 1)


@pytest.mark.parametrize("why", ["mask", "causal", "dropout", "width", "whole"])
def test_what_flash_attention_does_not_do_is_torch_s(why: str) -> None:
    query, key, value = three(40, 2, 12 if why == "width" else 16)
    module, starts = SimpleNamespace(is_causal=False, training=False), torch.tensor([0, 30, 40])
    mask = torch.rand(40, 40) if why == "mask" else None
    given: dict[str, Any] = {"cu_seq_lens_q": starts, "max_length_q": 30, "scaling": 0.3}
    if why in ("mask", "whole"):
        given |= {"cu_seq_lens_q": None, "max_length_q": None}
    given |= {"is_causal": True} if why == "causal" else {}
    given |= {"dropout": 1e-9} if why == "dropout" else {}
    with FlashOnCPU() as flash:
        made, _ = vision._attend_at_once(cast(Any, module), query, key, value, mask, **given)
    ends = [0, 40] if given["cu_seq_lens_q"] is None else [0, 30, 40]
    wanted = [
        torch.nn.functional.scaled_dot_product_attention(
            *(x[:, :, first:after] for x in (query, key, value)),
            attn_mask=mask,
            is_causal=why == "causal",
            scale=0.3,
        ).transpose(1, 2)
        for first, after in pairwise(ends)
    ]
    torch.testing.assert_close(made, torch.cat(wanted, 1), rtol=1e-5, atol=1e-6)
    assert not flash.parts


@needs_native
@pytest.mark.parametrize("why", ["mask", "causal", "dropout", "bfloat16", "gradient", "widths"])
def test_what_c_does_not_do_is_torchs(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Tensor:
        raise AssertionError("C was called")

    attend = functools.partial(vision._attend, refuse)
    query, key, value = three(9, 2, 8)
    options: dict[str, Any] = {"attention_mask": None, "scaling": 0.3, "is_causal": False}
    if why == "mask":
        options["attention_mask"] = torch.randn(1, 1, 9, 9)
    elif why == "causal":
        options["is_causal"] = True
    elif why == "dropout":
        options["dropout"] = 0.5
    elif why == "bfloat16":
        query, key, value = (x.bfloat16() for x in (query, key, value))
    elif why == "gradient":
        query.requires_grad_()
    else:
        value = value[..., :3]
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
    torch.manual_seed(0)
    wanted = sdpa(Doubled(2, 2), query, key, value, **options)[0]
    torch.manual_seed(0)
    made, weights = attend(Doubled(2, 2), query, key, value, **options)
    assert weights is None and torch.equal(made, wanted)


@needs_native
@pytest.mark.parametrize("form", ["bf16", "int8"])
def test_many_states_are_multiplied_in_parts(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, bias = WeightForm(form, kernels_for(form)).hold(torch.randn(40, 36)), torch.randn(40)
    x = torch.randn(3, 67, 36)
    whole = native.multiply(x, weight, bias)
    monkeypatch.setattr(native, "_TOGETHER", 17)  # 201 states: no part is a whole number of tiles
    assert torch.equal(native.multiply(x, weight, bias), whole)


BOUNDED = ["qwen3_vl", "qwen2_5_vl", "internvl", "llava"]


@pytest.mark.parametrize("name", BOUNDED)
def test_a_pass_takes_so_many_patches_at_most(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = [1, ("image", 32, 32), 1, ("image", 16, 16), 1, ("image", 16, 48), 1]
    inputs = make_turn(name, pieces + ([("video", 6, 16, 32)] if name in ON_VIDEO else []))
    family = held_in(checkpoint(name), "auto")
    together = read(family, inputs)
    seen: list[int] = []
    vision = family.hf.model.visual if name in ON_VIDEO else family.hf.model.vision_tower
    vision.register_forward_pre_hook(
        lambda _, arguments, named: seen.append(
            len(arguments[0] if arguments else named["pixel_values"])
        ),
        with_kwargs=True,
    )
    for module in (features, qwen_vl):
        monkeypatch.setattr(module, "MOST_PATCHES", 80)
    apart = read(family, inputs)
    if name in ON_VIDEO:  # 64, 16 and 48 patches; frames of 32
        assert seen == [80, 48, 64, 32]
    else:  # tiles of 16
        assert (
            set(seen[:-1]) <= {5} and 0 < seen[-1] <= 5 and sum(seen) == len(inputs["pixel_values"])
        )
    assert furthest(apart, together) < 1e-5


def test_passes_end_before_they_are_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "MOST_PATCHES", 10)
    found = [[9], [11], [5, 5], [5, 6], [20, 1, 9, 1, 30, 30], []]
    runs = [[(one.start, one.stop) for one in features.passes(sizes)] for sizes in found]
    assert runs == [
        [(0, 1)],
        [(0, 1)],
        [(0, 2)],
        [(0, 1), (1, 2)],
        [(0, 1), (1, 3), (3, 4), (4, 5), (5, 6)],
        [],
    ]


@pytest.mark.parametrize("rounds", [False, True])
def test_without_c_torch_attends(rounds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """C may be switched off after a model was loaded."""
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, 7, 8)
    in_c = attend_patches(query, key, value, 0.3, [0, 3, 7], rounds)
    monkeypatch.setenv("MMKV_NATIVE", "0")
    in_torch = attend_patches(query, key, value, 0.3, [0, 3, 7], rounds)
    torch.testing.assert_close(in_c, in_torch, rtol=0, atol=2e-2 if rounds else 1e-5)
