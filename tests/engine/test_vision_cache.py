"""The same picture is encoded once; nothing else is taken for it, and memory stays bounded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import mmkv.hf
from mmkv.engine.config import EngineConfig
from mmkv.engine.errors import BudgetError, InputError, PolicyError
from mmkv.engine.model.families import IMAGE, VIDEO, Features
from mmkv.engine.model.families.features import VisionCache
from mmkv.engine.runtime import Runtime
from tests.support.factories import CHECKPOINTS, FAMILIES, QWEN_VL, checkpoint, make_turn
from tests.support.model_configs import config_of
from tests.support.sessions import load
from tests.support.tiers import long_but

SEEING = [name for name in FAMILIES if hasattr(config_of(CHECKPOINTS[name]), "vision_config")]
APART = ["qwen3_vl", "qwen2_5_vl", "llava", "internvl", "smolvlm"]
SHOWN = [3, ("image", 16, 16), 4]


def open_engine(name: str, **options: Any) -> Runtime:
    return load(checkpoint(name), policy="full", gates=None, **options)


def tower_of(engine: Runtime) -> nn.Module:
    model = engine.family.hf.model
    names = ("visual", "vision_tower", "vision_model")
    return next(getattr(model, name) for name in names if hasattr(model, name))


@contextmanager
def counted(engine: Runtime) -> Iterator[list[None]]:
    """Note each pass of the vision tower."""
    passes: list[None] = []
    hook = tower_of(engine).register_forward_hook(lambda *_: passes.append(None))
    try:
        yield passes
    finally:
        hook.remove()


def read(engine: Runtime, turn: dict[str, Tensor], salt: str = "") -> Tensor:
    with engine.session() as session:
        session.cache_salt = salt
        return session.prefill(turn)


@pytest.mark.parametrize(
    "name",
    long_but(APART, SEEING, "the others are read as one of these"),
)
def test_a_picture_that_comes_again_is_encoded_once(name: str) -> None:
    engine, without = open_engine(name), open_engine(name, vision_cache=0)
    turn, other = make_turn(name, SHOWN), make_turn(name, SHOWN, seed=1)
    with counted(without) as passes:
        wanted = [read(without, one) for one in (turn, other, turn)]
    alone = len(passes) // 3
    assert alone >= 1
    with counted(engine) as passes:
        found = [read(engine, one) for one in (turn, other, turn)]
    assert len(passes) == 2 * alone
    assert all(map(torch.equal, found, wanted))
    assert not torch.equal(found[0], found[1])


def part_of(name: str, turn: dict[str, Tensor], first: int, after: int) -> dict[str, Tensor]:
    """Return some of the pictures of a turn, each of 16 x 16 pixels, with other text."""
    pieces: list[Any] = [2, *[("image", 16, 16)] * (after - first), 3]
    part = make_turn(name, pieces, seed=7)
    pixels = tiles_of(turn["pixel_values"])
    each = len(pixels) // 6
    return part | {
        "pixel_values": pixels[first * each : after * each].view(part["pixel_values"].shape)
    }


def tiles_of(pixels: Tensor) -> Tensor:
    """Return pixels with the tiles, or patches, of all pictures on the first axis."""
    return pixels.flatten(0, 1) if pixels.dim() == 5 else pixels


@contextmanager
def patches_read(engine: Runtime) -> Iterator[list[int]]:
    """Note how many rows of pixels each pass of the tower reads."""
    read: list[int] = []

    def note(module: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        read.append(len(given[0] if given else named["pixel_values"]))

    hook = tower_of(engine).register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield read
    finally:
        hook.remove()


@pytest.mark.parametrize("name", APART)
def test_of_pictures_that_come_again_with_a_new_one_that_is_encoded(name: str) -> None:
    engine, without = open_engine(name), open_engine(name, vision_cache=0)
    whole = make_turn(name, [2, *[("image", 16, 16)] * 6, 3], seed=7)
    rows = len(tiles_of(whole["pixel_values"]))
    with patches_read(engine) as read:
        engine.turn(part_of(name, whole, 0, 5), 0)
        found = engine.turn(whole, 0)
        last_two = engine.turn(part_of(name, whole, 4, 6), 0)
    assert read == [rows // 6 * 5, rows // 6]
    wanted = without.turn(whole, 0)
    assert found.visual is not None and wanted.visual is not None and last_two.visual is not None
    for ours, theirs in zip(
        (found.visual, *found.deepstack), (wanted.visual, *wanted.deepstack), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert torch.equal(last_two.visual, found.visual[-len(last_two.visual) :])
    assert torch.equal(found.positions, wanted.positions)
    tiles = 3 if name == "internvl" else 1  # of a picture; each is kept by itself
    counted_as = (engine.vision_cache.queries, engine.vision_cache.hits)
    assert counted_as == ((5 + 6 + 2) * tiles, (5 + 2) * tiles)


def test_a_picture_that_is_shown_twice_at_once_is_encoded_once() -> None:
    engine = open_engine("qwen3_vl")
    turn = make_turn("qwen3_vl", [2, ("image", 16, 32), 1, ("image", 16, 32), 3])
    half = len(turn["pixel_values"]) // 2
    turn["pixel_values"][half:] = turn["pixel_values"][:half]
    with patches_read(engine) as read:
        made = engine.turn(turn, 0).visual
    assert read == [half] and made is not None
    assert torch.equal(*made.chunk(2))


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen2_5_vl", "llava_onevision"])
def test_each_video_is_kept(name: str) -> None:
    engine = open_engine(name)
    video = ("video", 4, 16, 16)
    two = make_turn(name, [3, video, 2, video, 4])
    turns = [engine.turn(two, 0)]
    assert engine.vision_cache.queries == 2
    half = len(two["pixel_values_videos"]) // 2
    one = make_turn(name, [3, video, 4])
    with counted(engine) as passes:
        turns.append(
            engine.turn(one | {"pixel_values_videos": two["pixel_values_videos"][half:]}, 0)
        )
    assert passes == [] and engine.vision_cache.hits == 1
    both, second = (turn.visual for turn in turns)
    assert both is not None and second is not None
    assert torch.equal(second, both[len(both) // 2 :])


def test_who_changes_weights_in_place_clears() -> None:
    engine = open_engine("qwen3_vl")
    turn = make_turn("qwen3_vl", SHOWN)
    before = engine.turn(turn, 0).visual
    with torch.no_grad():
        next(engine.family.hf.model.visual.merger.parameters()).mul_(2)
    engine.vision_cache.clear()
    assert engine.vision_cache.nbytes == engine.vision_cache.bytes_of("") == 0
    after = engine.turn(turn, 0).visual
    assert before is not None and after is not None and not torch.equal(before, after)


def test_other_settings_of_the_same_pixels_are_others() -> None:
    """Other grids, other numbers, other kinds."""
    engine = open_engine("qwen3_vl")
    wide = make_turn("qwen3_vl", [3, ("image", 16, 32), 4])
    high = {**wide, "image_grid_thw": wide["image_grid_thw"][:, [0, 2, 1]]}
    brighter = {**wide, "pixel_values": wide["pixel_values"] * 1.01}
    one_off = {**wide, "pixel_values": wide["pixel_values"].clone()}
    one_off["pixel_values"][-1, -1] += 1e-3
    seen = []
    with counted(engine) as passes:
        for turn in (wide, high, brighter, one_off):
            seen.append(engine.turn(turn, 0).visual)
        assert len(passes) == 4
    assert not any(torch.equal(a, b) for i, a in enumerate(seen) for b in seen[:i])
    cache, made = VisionCache(2**20), Features(torch.ones(2, 2))
    rows = {"pixel_values": torch.ones(4)}
    for kind, inputs in (
        (IMAGE, rows),
        (VIDEO, rows),
        (IMAGE, {"pixel_values": torch.ones(2, 2)}),
        (IMAGE, {"pixel_values": torch.ones(4).int()}),
        (IMAGE, {"pixel_values": torch.ones(4).view(torch.int32)}),
        (IMAGE, rows | {"image_sizes": torch.ones(1, 2)}),
        (IMAGE, {"pixel_value": torch.ones(4)}),
    ):
        calls = call_twice(cache, kind, inputs, made)
        assert calls == 1, (kind, inputs)


def call_twice(cache: VisionCache, kind: int, inputs: dict[str, Tensor], made: Features) -> int:
    calls: list[None] = []

    def encode(new: list[Any]) -> list[Features]:
        calls.append(None)
        return [made]

    for _ in range(2):
        cache.features(kind, [inputs], "", encode)
    return len(calls)


def test_the_same_tiles_of_a_picture_of_another_size_are_others() -> None:
    """LLaVA-NeXT cuts the borders off by it."""
    engine = open_engine("llava_next")
    turn = make_turn("llava_next", [3, ("image", 16, 32), 4])
    sizes = turn["image_sizes"] - torch.tensor([1, 0])
    engine.turn(turn, 0)
    with counted(engine) as passes:
        engine.turn({**turn, "image_sizes": sizes}, 0)
    assert len(passes) == 1


def test_salts_share_nothing() -> None:
    engine = open_engine("qwen3_vl")
    turn = make_turn("qwen3_vl", SHOWN)
    with counted(engine) as passes:
        for salt in ("one", "two", "one", "two"):
            read(engine, turn, salt)
    assert len(passes) == 2
    with engine.session() as session:
        assert session.memory().vision_bytes == 0
        session.cache_salt = "one"
        assert session.memory().vision_bytes == engine.vision_cache.nbytes // 2 > 0


def test_memory_counts_what_is_kept() -> None:
    engine = open_engine("qwen3_vl")
    turn = make_turn("qwen3_vl", SHOWN)
    with engine.session() as session:
        session.prefill(turn)
        made = engine.family.turn(turn, 0)
        assert made.visual is not None and made.deepstack
        wanted = made.visual.nbytes + sum(level.nbytes for level in made.deepstack)
        assert session.memory().vision_bytes == engine.vision_cache.nbytes == wanted


def test_forks_share() -> None:
    engine = open_engine("qwen3_vl")
    turn = make_turn("qwen3_vl", SHOWN)
    with counted(engine) as passes, engine.session() as session:
        session.cache_salt = "mine"
        session.prefill(make_turn("qwen3_vl", [3]))
        with session.fork() as one, session.fork() as two:
            assert torch.equal(one.prefill(turn), two.prefill(turn))
            assert one.memory().vision_bytes == session.memory().vision_bytes > 0
    assert len(passes) == 1


def test_zero_keeps_nothing() -> None:
    engine = open_engine("qwen3_vl", vision_cache="0MiB")
    turn = make_turn("qwen3_vl", SHOWN)
    with counted(engine) as passes:
        read(engine, turn)
        read(engine, turn)
    assert len(passes) == 2 and engine.vision_cache.nbytes == 0


def test_a_limit_of_the_cache_holds_features_too() -> None:
    for limit, asked, taken in ((2**24, "256MiB", 2**21), (2**24, "1MiB", 2**20), (2**24, 0, 0)):
        engine = open_engine("qwen3_vl", kv_limit=limit, vision_cache=asked)
        pool = engine.cache.pool
        assert pool.limit is not None and engine.vision_cache.limit == taken
        free = limit - taken - pool.limit * pool.page_bytes
        assert 0 <= free < pool.page_bytes
    assert open_engine("qwen3_vl").vision_cache.limit == 256 * 2**20
    text = open_engine("qwen2", kv_limit=limit)
    assert text.vision_cache.limit == 0
    assert text.cache.pool.limit == limit // text.cache.pool.page_bytes


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        (-1, PolicyError, "vision_cache is -1; give 0 or more bytes"),
        ("much", BudgetError, "'much' is not an amount of memory"),
        (True, TypeError, "vision_cache"),
        (1.5, TypeError, "vision_cache"),
    ],
)
def test_amounts_that_are_none(given: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        EngineConfig(vision_cache=given)


def test_a_retained_model_takes_none() -> None:
    """Its weights may be trained between two calls."""
    from tests.support.factories import make_model

    model = make_model(CHECKPOINTS["qwen3_vl"])
    with pytest.raises(InputError, match="retain takes no vision_cache"):
        mmkv.hf.retain(model, policy="full", vision_cache="1MiB")
    with mmkv.hf.retain(model, policy="full", kv_limit=2**20) as handle:
        assert handle._engine is not None and handle._engine.vision_cache.limit == 0


LIMIT = 4096


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from(["a", "b"])), max_size=60))
def test_the_latest_used_stay_within_the_bound(asked: list[tuple[int, str]]) -> None:
    cache, wanted = VisionCache(LIMIT), []  # wanted: names and sizes, the latest used last
    for number, salt in asked:
        rows, calls = 64 * (number + 1) ** 2, []

        def encode(new: Any, rows: int = rows, calls: list[None] = calls) -> list[Features]:
            calls.append(None)
            return [Features(torch.zeros(rows // 8), (torch.zeros(rows // 8),))]

        inputs = {"pixel_values": torch.tensor([number])}
        cache.features(IMAGE, [inputs], salt, encode)
        assert len(calls) == ((number, salt, rows) not in wanted)
        wanted = [one for one in wanted if one != (number, salt, rows)]
        if rows <= LIMIT:
            wanted.append((number, salt, rows))
        while sum(size for *_, size in wanted) > LIMIT:
            wanted.pop(0)
        assert cache.nbytes == sum(size for *_, size in wanted) <= LIMIT
        for name in ("a", "b"):
            own = sum(size for _, owner, size in wanted if owner == name)
            assert cache.bytes_of(name) == own


def test_views_of_larger_tensors_are_copied() -> None:
    cache, whole = VisionCache(LIMIT), torch.zeros(2**20)
    one = [{"pixel_values": torch.ones(1)}]
    cache.features(IMAGE, one, "", lambda new: [Features(whole[:64].view(8, 8))])
    found = cache.features(IMAGE, one, "", _never)
    assert found.rows.shape == (8, 8) and found.rows.untyped_storage().nbytes() == 256


def _never(new: Any) -> list[Features]:
    raise AssertionError("it was encoded again")


def test_what_fails_is_not_kept() -> None:
    cache, inputs = VisionCache(LIMIT), {"pixel_values": torch.ones(1)}

    def failing(new: Any) -> list[Features]:
        raise InputError("no")

    for _ in range(2):
        with pytest.raises(InputError):
            cache.features(IMAGE, [inputs], "", failing)
    odd: dict[str, Any] = {"pixel_values": object()}
    assert call_twice(cache, IMAGE, odd, Features(torch.ones(2, 2))) == 2
    assert cache.nbytes == 0


def test_pixels_in_a_narrow_dtype() -> None:
    engine = open_engine(QWEN_VL[0])
    turn = make_turn(QWEN_VL[0], SHOWN)
    narrow = {**turn, "pixel_values": turn["pixel_values"].bfloat16()}
    with counted(engine) as passes:
        assert torch.equal(read(engine, narrow), read(engine, narrow))
    assert len(passes) == 1
