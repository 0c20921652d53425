"""Merging of patches before the projector, against transformers' own tower in float64.

The reference asks the tower for its attention, takes keys where its layer makes them, and follows
the formulas of docs/reference/policies.md patch by patch, in Python.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from mmkv.engine.errors import PolicyError
from mmkv.engine.model.families import IMAGE, Features
from mmkv.engine.model.families.features import VisionCache
from mmkv.engine.policies import make_policy
from mmkv.engine.policies.preset import PolicyText
from mmkv.engine.prefill import extend_together
from mmkv.engine.runtime import Runtime
from mmkv.hf import retain
from tests.support.factories import CHECKPOINTS, checkpoint, enliven, make_turn
from tests.support.model_configs import IMAGE_ID, PATCH, Checkpoint, config_of
from tests.support.oracle import Oracle
from tests.support.sessions import load, save_checkpoint, text_ids
from tests.support.tiers import one_in

METHODS = ["visionzip:keep=0.4", "visionzip:tokens=7,contextual=0.5", "prumerge:neighbours=3"]
METHODS += ["prumerge:tokens=4,neighbours=99"]
TOWERS = ["llava", "llava_next", "siglip"]
TURNS = [
    (5, ("image", 24, 32), 4),
    (2, ("image", 16, 24), 1, ("image", 24, 24), 3),
    (6,),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two checkpoints, and one whose tower has no class token."""
    config = config_of(CHECKPOINTS["llava"])
    config.vision_feature_select_strategy, plain = "full", config.vision_config
    names = "hidden_size intermediate_size num_hidden_layers num_attention_heads image_size"
    config.vision_config = transformers.SiglipVisionConfig(
        **{name: getattr(plain, name) for name in names.split()},
        patch_size=PATCH,
        vision_use_head=False,
    )
    model: Any = transformers.LlavaForConditionalGeneration(config)
    enliven(model, 3)
    folder = tmp_path_factory.mktemp("merging") / "siglip"
    model.save_pretrained(folder)
    return {"siglip": folder, **{name: checkpoint(name) for name in ("llava", "llava_next")}}


@cache
def reference_model(folder: Path) -> Any:
    """The checkpoint in float64, with attention that gives its shares."""
    kind = transformers.AutoModelForImageTextToText
    return kind.from_pretrained(folder, dtype="float64", attn_implementation="eager").eval()


@torch.no_grad()
def tower_of(model: Any, pixels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What the projector would read ``[n, P, d]``, attention ``[n, P]``, keys ``[n, P, H, D]``."""
    tower, vision = model.model.vision_tower, model.config.vision_config
    layer = vision.num_hidden_layers - 1  # number of the one whose output is hidden_states[-2]
    assert model.config.vision_feature_layer == -2
    caught: list[Tensor] = []
    projection = tower.encoder.layers[layer - 1].self_attn.k_proj
    hook = projection.register_forward_hook(lambda *given: caught.append(given[2]))
    asked = {"output_attentions": True, "output_hidden_states": True}
    made = tower(pixels.double(), **asked)
    hook.remove()
    keys = caught[0].unflatten(-1, (vision.num_attention_heads, -1))
    shares = made.attentions[layer - 1].mean(1)
    if vision.model_type == "clip_vision_model":
        return made.hidden_states[layer][:, 1:], shares[:, 0, 1:], keys[:, 1:]
    return made.hidden_states[layer], shares.mean(1), keys


def cosine(a: Tensor, b: Tensor) -> float:
    return float(a.flatten() @ b.flatten() / a.norm() / b.norm())


def visionzip(
    states: Tensor, paid: Tensor, keys: Tensor, keep: float = 0.111, tokens: int = 0, **more: float
) -> dict[int, Tensor]:
    """Which patches stay, with their new states."""
    total = len(states)
    count = min(max(tokens or round(keep * total), 1), total)
    contextual = round(more.get("contextual", 0.156) * count)
    ranked = sorted(range(total), key=lambda at: -float(paid[at]))
    dominant, rest = ranked[: count - contextual], sorted(ranked[count - contextual :])
    made = {at: states[at] for at in dominant}
    if not contextual:
        return made
    targets = [rest[number * (len(rest) // contextual)] for number in range(contextual)]
    given: dict[int, list[Tensor]] = {at: [] for at in targets}
    for at in rest:
        if at not in targets:
            alike = [cosine(keys[at].mean(0), keys[target].mean(0)) for target in targets]
            given[targets[alike.index(max(alike))]].append(states[at])
    for at, all_of in given.items():
        made[at] = states[at] + sum(all_of, torch.zeros_like(states[at])) / max(len(all_of), 1)
    return made


def prumerge(
    states: Tensor, paid: Tensor, keys: Tensor, tokens: int = 0, neighbours: int = 32
) -> dict[int, Tensor]:
    """Which patches stay, with their new states."""
    ranked = sorted(range(len(states)), key=lambda at: -float(paid[at]))
    low, high = np.percentile(paid.numpy(), [25, 75])
    outliers = sum(float(each) > high + 1.5 * (high - low) for each in paid)
    made = {}
    for at in ranked[: min(tokens or max(outliers, 1), len(states))]:
        others = [other for other in range(len(states)) if other != at]
        others.sort(key=lambda other: -cosine(keys[at], keys[other]))
        made[at] = states[at] + sum(
            (paid[other] * states[other] for other in others[:neighbours]),
            torch.zeros_like(states[at]),
        )
    return made


@torch.no_grad()
def merged(folder: Path, text: str, pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Features ``[n, P, d]`` of grids of patches in float64, and which stay."""
    asked, model = PolicyText.parse(text), reference_model(folder)
    choose: Any = {"visionzip": visionzip, "prumerge": prumerge}[asked.name]
    given = {
        key: float(value) if "." in value else int(value) for key, value in asked.given.items()
    }
    new, kept = [], []
    for states, paid, keys in zip(*tower_of(model, pixels), strict=True):
        made = choose(states, paid, keys, **given)
        new.append(torch.stack([made.get(at, states[at]) for at in range(len(states))]))
        kept.append(torch.tensor([at in made for at in range(len(states))]))
    return model.model.multi_modal_projector(torch.stack(new)), torch.stack(kept)


def in_tokens(folder: Path, text: str, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Features ``[V, d]`` of a turn and bool ``[V]``, which stay."""
    model, pixels = reference_model(folder), inputs["pixel_values"]
    if pixels.dim() == 4:
        rows, kept = merged(folder, text, pixels)
        return rows.flatten(0, 1), kept.flatten()
    # transformers tells which patch each token of LLaVA-NeXT shows, from patches that are numbered.
    tiles = [own[own.flatten(1).any(1)] for own in pixels]
    rows, kept = merged(folder, text, torch.cat(tiles))
    numbers = torch.arange(kept.numel()).view(*kept.shape, 1)
    sizes = inputs["image_sizes"]
    where = model.model.pack_image_features(
        numbers.split([len(own) for own in tiles]), sizes, "default", torch.tensor([-1])
    )[0]
    at = torch.cat(list(where)).flatten()
    newline = model.model.image_newline.expand(len(at), -1)
    shown = torch.where((at < 0)[:, None], newline, rows.flatten(0, 1)[at])
    return shown, kept.flatten()[at] | (at < 0)


@one_in(3)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", TOWERS)
def test_features_are_those_of_the_formulas(
    name: str, method: str, folders: dict[str, Path]
) -> None:
    engine, counts = load(folders[name], policy=method), set()
    for seed, pieces in enumerate(TURNS[:2]):
        inputs = make_turn("llava_next" if name == "llava_next" else "llava", pieces, seed)
        rows, kept = in_tokens(folders[name], method, inputs)
        turn = engine.turn(inputs, 0)
        assert turn.kept is not None and turn.visual is not None
        assert turn.kept.tolist() == kept.tolist()
        torch.testing.assert_close(turn.visual.double(), rows, rtol=1e-4, atol=1e-5)
        counts.add(int(kept.sum()))
        assert 0 < int(kept.sum()) < len(kept)
    plain = load(folders[name], policy="full").turn(inputs, 0)
    assert plain.kept is None and plain.visual is not None
    changed = (plain.visual != turn.visual).any(-1)
    assert bool(changed.any()) and not bool((changed & ~turn.kept).any())


class Masked(Oracle):
    """The reference on whole sequences: merged features, and patches that go out of sight."""

    def __init__(self, folder: Path, text: str, chunk: int) -> None:
        kind = transformers.AutoModelForImageTextToText
        super().__init__(kind.from_pretrained(folder).eval(), None, "full", prefill_chunk=chunk)
        self.folder, self.text_of_policy = folder, text
        self.goes: list[int] = []

    def _embed(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
        hidden, levels = super()._embed(inputs)
        if "pixel_values" in inputs:
            rows, kept = in_tokens(self.folder, self.text_of_policy, inputs)
            visual = (inputs["input_ids"][0] == IMAGE_ID).nonzero().flatten()
            hidden = hidden.index_copy(0, visual, rows.to(hidden.dtype))
            self.goes += (self.seen + visual[~kept]).tolist()
        return hidden, levels

    def _attention(
        self, layer: int, query: Tensor, at: Tensor, window: int | None = None
    ) -> Tensor:
        if layer == 0:
            first = self.seen - self.new
            gone = [token for token in self.goes if first <= token < self.seen - 1]
            self.keep[:, :, gone] = False
        return super()._attention(layer, query, at, window)


@one_in(2)
@pytest.mark.parametrize(
    ("name", "method", "chunk"),
    [
        (name, method, (512, 7)[(at + other) % 2])
        for at, name in enumerate(TOWERS)
        for other, method in enumerate(METHODS[1:3])
    ],
)
def test_a_dialogue_is_that_of_a_masked_model(
    name: str, method: str, chunk: int, folders: dict[str, Path]
) -> None:
    """With two pictures in a prompt, and pictures that chunks cut."""
    engine = load(folders[name], policy=method, prefill_chunk=chunk)
    session, oracle = engine.session(), Masked(folders[name], method, chunk)
    for seed, pieces in enumerate(TURNS):
        inputs = make_turn("llava_next" if name == "llava_next" else "llava", pieces, seed)
        ours, theirs = session.prefill(inputs), oracle.prefill(inputs)
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
        for token in text_ids(3, 5).tolist():
            both = session.decode(token), oracle.decode(token)
            torch.testing.assert_close(*both, rtol=1e-3, atol=1e-4)
    for got, want in zip(session.retained(), oracle.retained(), strict=True):
        assert all(map(torch.equal, got, want))
    memory = session.memory()
    held = sum(row.numel() for layer in session.retained() for row in layer)
    assert memory.entries == held
    assert memory.evicted == session.seen * engine.spec.rows - held > 0
    engine.cache.check()


@pytest.mark.parametrize("method", ["visionzip:tokens=5", "prumerge:tokens=5"])
def test_a_picture_has_the_tokens_that_were_asked_for_however_it_is_cut(
    method: str, folders: dict[str, Path]
) -> None:
    inputs = make_turn("llava", TURNS[1], 3)
    texts = int((inputs["input_ids"] != IMAGE_ID).sum())
    engine = load(folders["llava"], policy=method, prefill_chunk=512)
    session = engine.session()
    session.prefill(inputs)
    assert session.entries == (texts + 2 * 5) * engine.spec.rows
    kept = {int(token) for token in session.retained()[0][0]}
    cut = load(folders["llava"], policy=method, prefill_chunk=7).session()
    cut.prefill(inputs)
    # A chunk's last token goes on, whatever it is.
    assert {int(token) for token in cut.retained()[0][0]} == kept | set(range(6, cut.seen, 7))


def test_features_are_found_again_under_the_same_settings_alone(folders: dict[str, Path]) -> None:
    inputs = make_turn("llava", TURNS[1], 3)
    with_cache = load(folders["llava"], policy="visionzip:tokens=5")
    without = load(folders["llava"], policy="visionzip:tokens=5", vision_cache=0)
    turns = [engine.turn(inputs, 0) for engine in (with_cache, with_cache, without)]
    assert with_cache.vision_cache.hits == 2 and without.vision_cache.hits == 0
    rows, kept = turns[0].visual, turns[0].kept
    assert rows is not None and kept is not None
    for turn in turns[1:]:
        assert turn.visual is not None and turn.kept is not None
        assert torch.equal(turn.visual, rows) and torch.equal(turn.kept, kept)
    assert with_cache.vision_cache.nbytes == rows.nbytes + kept.nbytes
    shared, counts = VisionCache(2**20), []
    for method in ("full", "visionzip:tokens=5", "visionzip:tokens=6", "prumerge:tokens=3"):
        made = load(folders["llava"], policy=method).family.turn(inputs, 0, cache=shared)
        assert shared.hits == 0
        counts.append(None if made.kept is None else int(made.kept.sum()))
    assert counts == [None, 10, 12, 6]


def test_prompts_in_one_pass_keep_what_they_keep_alone(folders: dict[str, Path]) -> None:
    engine = load(folders["llava"], policy="visionzip:tokens=5", prefill_chunk=64)
    prompts = [make_turn("llava", pieces, seed) for seed, pieces in enumerate(TURNS)]
    packed, alone = ([engine.session() for _ in prompts] for _ in range(2))
    found = extend_together(packed, [engine.turn(each, 0) for each in prompts])
    wanted = torch.stack([s.prefill(p) for s, p in zip(alone, prompts, strict=True)])
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert [one.retained()[0][0].tolist() for one in packed] == [
        one.retained()[0][0].tolist() for one in alone
    ]


def test_an_engine_without_a_merger_reads_all_patches_with_a_family_that_had_one(
    folders: dict[str, Path],
) -> None:
    merging, inputs = load(folders["llava"], policy="visionzip"), make_turn("llava", TURNS[0], 1)
    parts = merging.family, merging.spec, merging.decoder.weights
    plain = Runtime(*parts, None, make_policy("divprune"))
    assert plain.turn(inputs, 0).kept is None and merging.turn(inputs, 0).kept is not None


def test_a_model_that_is_retained_merges_as_an_engine_does(folders: dict[str, Path]) -> None:
    kind, inputs = transformers.AutoModelForImageTextToText, make_turn("llava", TURNS[1], 1)
    model, tokens = kind.from_pretrained(folders["llava"]).eval(), []
    retain(model, policy="prumerge:tokens=3")
    made = model.generate(**inputs, max_new_tokens=5, do_sample=False)
    engine = load(folders["llava"], policy="prumerge:tokens=3", prefill_chunk=512)
    session = engine.session()
    logits = session.prefill(inputs)
    for _ in range(5):
        tokens.append(int(logits.argmax()))
        logits = session.decode(tokens[-1])
    assert made[0, -5:].tolist() == tokens


def changed(**fields: Any) -> Checkpoint:
    return Checkpoint("llava", 4, 2, 32, text_type="llama", extra=fields)


def test_other_towers_are_refused_by_name(tmp_path: Path) -> None:
    families = ["qwen3_vl", "internvl", "llava_onevision", "mistral3", "smolvlm", "qwen3"]
    for name in families:
        kind = config_of(CHECKPOINTS[name]).model_type
        with pytest.raises(PolicyError, match=rf"this model \({kind}\) has none") as error:
            load(checkpoint(name), policy="visionzip")
        assert "\n" not in str(error.value)
    several = changed(vision_feature_layer=[-2, -1])
    classed = changed(vision_feature_select_strategy="full")
    embedded = changed(vision_feature_layer=0)
    for number, spec in enumerate((several, classed, embedded)):
        with pytest.raises(PolicyError, match="the policy merges patches"):
            load(save_checkpoint(spec, tmp_path / str(number)), policy="prumerge")


def test_equal_patches_and_the_ends_of_what_can_stay() -> None:
    same, paid = torch.ones(6, 4), torch.full((6,), 0.1)
    keys = torch.ones(6, 2, 2)
    zip_ = make_policy("visionzip:tokens=2,contextual=0.5").merger
    outliers = make_policy("prumerge").merger
    assert zip_ is not None and outliers is not None and make_policy("fastv").merger is None
    states, kept = zip_.merge(same, paid, keys)
    assert kept.tolist() == [True, True, False, False, False, False]
    assert states[:, 0].tolist() == [1, 2, 1, 1, 1, 1]  # a target and the mean of four others
    states, kept = outliers.merge(same, paid, keys)
    assert kept.tolist() == [True, *[False] * 5]
    torch.testing.assert_close(states[0], torch.full((4,), 1.5))
    for text in ("visionzip:tokens=9", "visionzip:tokens=9,contextual=1", "prumerge:tokens=9"):
        merger = make_policy(text).merger
        assert merger is not None
        states, kept = merger.merge(same, paid, keys)
        assert kept.all(), "no more than there are"
        if text.startswith("visionzip"):
            assert torch.equal(states, same), "each is a target"
        one, kept = merger.merge(same[:1], paid[:1], keys[:1])
        assert kept.tolist() == [True] and torch.equal(one, same[:1])


def test_features_of_parts_keep_what_stays() -> None:
    rows, kept = torch.arange(10.0).view(5, 2), torch.tensor([True, False, True, True, False])
    first, none, rest = Features(rows, (rows + 1,), kept).split([2, 0, 3])
    assert torch.equal(first.rows, rows[:2]) and torch.equal(rest.deepstack[0], rows[2:] + 1)
    assert first.kept is not None and rest.kept is not None and not len(none.rows)
    assert [*first.kept.tolist(), *rest.kept.tolist()] == kept.tolist()
    cache = VisionCache(2**20)
    given: list[Mapping[str, Any]] = [{"pixel_values": torch.ones(1)}]
    for _ in range(2):
        found = cache.features(IMAGE, given, "", lambda new: [rest], "a")
        assert found.kept is not None and torch.equal(found.kept, rest.kept)
