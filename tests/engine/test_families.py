"""Families: turns, positions, and errors for wrong inputs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mmkv.engine.errors import InputError
from mmkv.engine.model.families import IMAGE, VIDEO, Family
from mmkv.engine.model.families.loading import load
from tests.support.factories import (
    checkpoint,
    join_turns,
    make_turn,
    pad_left,
)
from tests.support.model_configs import IMAGE_ID, VIDEO_ID, VOCAB
from tests.support.tiers import long_but

CPU = torch.device("cpu")


def family(name: str) -> Family:
    return load(checkpoint(name), "float32", "cpu")[0]


@pytest.fixture(scope="module")
def qwen() -> Family:
    return family("qwen3_vl")


@pytest.fixture(scope="module")
def onevision() -> Family:
    return family("llava_onevision")


@pytest.fixture(scope="module")
def llama() -> Family:
    return family("llama")


def one_line(error: pytest.ExceptionInfo[Any]) -> str:
    text = str(error.value)
    assert text and "\n" not in text and len(text) < 300
    return text


def conversation() -> list[dict[str, Tensor]]:
    name = "qwen3_vl"
    return [
        make_turn(name, [4, ("image", 24, 40), 6, ("image", 8, 16), 2], seed=1),
        make_turn(name, [9], seed=2),
        make_turn(name, [3, ("video", 4, 32, 16), 7, ("image", 16, 48), 1], seed=3),
    ]


def test_positions_are_those_of_the_whole_conversation(qwen: Family) -> None:
    turns = conversation()
    whole = join_turns(*turns)
    wanted, delta = qwen.hf.model.get_rope_index(
        whole["input_ids"],
        whole["mm_token_type_ids"],
        whole["image_grid_thw"],
        whole["video_grid_thw"],
    )
    offset, found = 0, []
    for turn in turns:
        made = qwen.turn(turn, offset, CPU)
        found.append(made.positions)
        offset = made.next_position
    assert torch.equal(torch.cat(found, 1), wanted[:, 0])
    assert offset == whole["input_ids"].shape[1] + int(delta)


def test_positions_ignore_what_the_model_remembers(qwen: Family) -> None:
    turn = conversation()[0]
    clean = qwen.turn(turn, 10, CPU)
    qwen.hf.model.rope_deltas = torch.tensor([[1234]])
    try:
        again = qwen.turn(turn, 10, CPU)
    finally:
        qwen.hf.model.rope_deltas = None
    assert torch.equal(clean.positions, again.positions)
    assert clean.next_position == again.next_position


def test_token_types_are_optional(qwen: Family) -> None:
    turn = conversation()[2]
    bare = {key: value for key, value in turn.items() if key != "mm_token_type_ids"}
    assert torch.equal(qwen.turn(bare, 5, CPU).positions, qwen.turn(turn, 5, CPU).positions)


def test_features_follow_the_order_of_the_tokens(qwen: Family) -> None:
    """A picture behind a video: each token gets its own modality's features."""
    turn = conversation()[2]
    made = qwen.turn(turn, 0, CPU)
    kinds = made.modality[made.modality > 0]
    picture = qwen.image_features(turn, CPU)
    video = qwen.video_features(turn, CPU)
    assert made.visual is not None and len(made.deepstack) == 2
    assert torch.equal(made.visual[kinds == IMAGE], picture.rows)
    assert torch.equal(made.visual[kinds == VIDEO], video.rows)
    for level, (a, b) in zip(
        made.deepstack, zip(picture.deepstack, video.deepstack, strict=True), strict=True
    ):
        assert torch.equal(level[kinds == IMAGE], a) and torch.equal(level[kinds == VIDEO], b)


@pytest.mark.parametrize("name", ["qwen3_vl", "llava_next", "llama"])
def test_left_padding_is_dropped(name: str) -> None:
    pieces: list[Any] = [3, ("image", 16, 32), 4] if name != "llama" else [12]
    plain = make_turn(name, pieces)
    padded = pad_left([plain, make_turn(name, [60])])
    row = {**plain, **{k: v[:1] for k, v in padded.items() if v.shape[0] == 2}}
    reader = family(name)
    wanted, found = reader.turn(plain, 7, CPU), reader.turn(row, 7, CPU)
    assert row["input_ids"].shape[1] == 60
    for part in ("token_ids", "modality", "positions"):
        assert torch.equal(getattr(found, part), getattr(wanted, part))
    assert found.next_position == wanted.next_position


@pytest.mark.parametrize("ids", [[[5, 6, 7]], [5, 6, 7], torch.tensor([5, 6, 7]).int()])
def test_ids_alone(qwen: Family, llama: Family, ids: Any) -> None:
    for reader, axes in ((qwen, 3), (llama, 1)):
        made = reader.turn({"input_ids": ids}, 4, CPU)
        assert made.token_ids.tolist() == [5, 6, 7] and made.token_ids.dtype == torch.int64
        assert made.positions.tolist() == [[4, 5, 6]] * axes
        assert made.modality.dtype == torch.uint8 and not made.modality.any()
        assert made.visual is None and made.deepstack == () and made.next_position == 7
        made = reader.turn({"input_ids": torch.zeros(1, 0, dtype=torch.int64)}, 4, CPU)
        assert made.token_ids.numel() == 0 and made.next_position == 4


Change = Callable[[dict[str, Any]], None]


def drop(key: str) -> Change:
    return lambda turn: turn.pop(key)


def put(key: str, value: Any) -> Change:
    return lambda turn: turn.update({key: value})


def edit(key: str, change: Callable[[Tensor], Any]) -> Change:
    return lambda turn: turn.update({key: change(turn[key])})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop("input_ids"), "no input_ids"),
        (edit("input_ids", lambda x: x.float()), "integers"),
        (edit("input_ids", lambda x: x.expand(2, -1)), "not a batch of 2"),
        (edit("input_ids", lambda x: x + VOCAB), "outside 0 .. 159"),
        (edit("input_ids", lambda x: -x), "outside 0 .. 159"),
        (put("input_ids", [[1, 2], [3]]), "not a tensor"),
        (edit("attention_mask", lambda x: x[:, 1:]), "attention_mask covers"),
        (drop("pixel_values"), "no image came with it"),
        (edit("pixel_values", lambda x: x[:0]), "no image came with it"),
        (drop("image_grid_thw"), "no image_grid_thw"),
        (edit("pixel_values", lambda x: x[:-4]), "asks for"),
        (edit("image_grid_thw", lambda x: x[:1]), "asks for"),
        (edit("image_grid_thw", lambda x: x.flip(0)), "stand in runs of"),
        (edit("image_grid_thw", lambda x: x[:, :2]), "not [n, 3] counts"),
        (edit("image_grid_thw", lambda x: x + torch.tensor([0, 1, 0])), "that 2 does not divide"),
        (edit("pixel_values", lambda x: x[:, :9]), "patches of 9 numbers and the model reads"),
        (edit("pixel_values", lambda x: x.index_fill(0, torch.tensor([3]), -math.inf)), "not fin"),
        (edit("input_ids", lambda x: x.masked_fill(x == IMAGE_ID, 5)), "without image tokens"),
        (edit("input_ids", lambda x: x[:, :-8]), "features"),
        (put("pixel_values_videos", torch.ones(4, 96)), "without video tokens"),
    ],
)
def test_bad_qwen_inputs(qwen: Family, change: Change, message: str) -> None:
    turn: dict[str, Any] = dict(make_turn("qwen3_vl", [4, ("image", 24, 40), 6, ("image", 8, 16)]))
    if message == "features":
        turn.pop("attention_mask")
    change(turn)
    with pytest.raises(InputError) as error:
        qwen.turn(turn, 0, CPU)
    assert message in one_line(error)


def test_video_frames_must_stand_apart(qwen: Family) -> None:
    """One run of tokens for two frames would put both at one temporal position."""
    turn = make_turn("qwen3_vl", [2, ("video", 4, 16, 16)])
    kept = turn["input_ids"][turn["input_ids"] == VIDEO_ID]
    turn["input_ids"] = torch.cat([torch.tensor([5]), kept])[None]
    turn.pop("attention_mask")
    with pytest.raises(InputError) as error:
        qwen.turn(turn, 0, CPU)
    assert "video tokens stand in runs of [8]" in one_line(error)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop("image_sizes"), "no image_sizes"),
        (edit("pixel_values", lambda x: x[..., :8]), "reads 16x16"),
        (edit("pixel_values", lambda x: x[:, :, :2]), "3 colours"),
        (edit("pixel_values", lambda x: x[0, 0]), "dimensions"),
        (edit("input_ids", lambda x: x[:, 8:]), "features"),
    ],
)
def test_bad_llava_inputs(onevision: Family, change: Change, message: str) -> None:
    turn: dict[str, Any] = dict(make_turn("llava_onevision", [4, ("image", 16, 48), 6]))
    turn.pop("attention_mask")
    change(turn)
    with pytest.raises(InputError) as error:
        onevision.turn(turn, 0, CPU)
    assert message in one_line(error)


def test_pictures_for_a_text_model(llama: Family) -> None:
    with pytest.raises(InputError, match="takes no pixel_values; send text only"):
        llama.turn({"input_ids": [[5]], "pixel_values": torch.ones(1, 3, 16, 16)}, 0, CPU)
    shown = {"pixel_values_videos": torch.ones(1, 2, 3, 16, 16)}
    with pytest.raises(InputError, match="takes no pixel_values_videos"):
        family("llava").turn({"input_ids": [[5]]} | shown, 0, CPU)


def ids_of(turn: dict[str, Tensor]) -> Tensor:
    return turn["input_ids"][0]


def assert_same_turn(found: Any, wanted: Any) -> None:
    for name in ("token_ids", "modality", "positions"):
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name
    assert found.next_position == wanted.next_position
    assert (found.visual is None) == (wanted.visual is None)
    if wanted.visual is not None:
        torch.testing.assert_close(found.visual, wanted.visual)
        for one, two in zip(found.deepstack, wanted.deepstack, strict=True):
            torch.testing.assert_close(one, two)


READERS = ["qwen3_vl", "qwen2_5_vl", "llava", "llava_next", "llava_onevision", "internvl"]
READERS += ["smolvlm", "mistral3"]


@pytest.mark.parametrize("name", READERS)
def test_the_rows_of_a_batch_get_their_own_pictures(name: str) -> None:
    reader = family(name)
    pictures = [
        [3, ("image", 32, 32), 4, ("image", 16, 48), 2],
        [5],
        [2, ("image", 16, 32), 6],
    ]
    turns = [make_turn(name, pieces, seed=i) for i, pieces in enumerate(pictures)]
    offsets = [0, 7, 3]
    made = reader.turns([ids_of(turn) for turn in turns], pad_left(turns), offsets, CPU)
    for found, turn, offset in zip(made, turns, offsets, strict=True):
        assert_same_turn(found, reader.turn(turn, offset, CPU))


def test_a_picture_of_one_token_is_read() -> None:
    """Mistral 3: transformers fails for it alone, and reads it beside another."""
    reader = family("mistral3")
    turn = make_turn("mistral3", [3, ("image", 24, 16), 1, ("image", 8, 8), 2])
    both = {key: turn[key] for key in ("pixel_values", "image_sizes")}
    wanted = reader.hf.model.get_image_features(**both, **reader.selection()).pooler_output
    found = reader.turn(turn, 0, CPU).visual
    assert found is not None and wanted[1].shape[0] == 1
    torch.testing.assert_close(found, torch.cat(wanted), rtol=1e-4, atol=1e-5)
    alone = reader.turn(make_turn("mistral3", [1, ("image", 8, 8)], seed=2), 0, CPU).visual
    assert alone is not None and alone.shape == (1, reader.config.text_config.hidden_size)


def test_what_the_tower_raises_is_no_fault_of_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of memory")

    reader = family("llava_next")
    monkeypatch.setattr(reader.hf.model, "get_image_features", raising)
    with pytest.raises(RuntimeError, match=r"^out of memory"):
        reader.turn(make_turn("llava_next", [1, ("image", 16, 16)]), 0, CPU)


def test_tiles_that_fill_a_batch_up_are_no_part_of_a_picture() -> None:
    """SmolVLM's: all of one is 0, and masked; a black pixel is none, and no part is masked."""
    reader, turn = family("smolvlm"), make_turn("smolvlm", [3, ("image", 32, 32), 2])
    pixels = turn["pixel_values"]
    pixels[0, :, :, 0, 0] = 0.0
    wanted = reader.turn(turn, 0, CPU)
    assert wanted.visual is not None and len(wanted.visual) == int((ids_of(turn) == IMAGE_ID).sum())
    count, side = pixels.shape[1], pixels.shape[-1]
    more = torch.nn.functional.pad(pixels, (0,) * 7 + (2,))
    mask = (torch.arange(count + 2) < count)[None, :, None, None].repeat(1, 1, side, side)
    given = turn | {"pixel_values": more, "pixel_attention_mask": mask}
    assert_same_turn(reader.turn(given, 0, CPU), wanted)
    mask[0, 1, 0, 0] = False
    with pytest.raises(InputError, match="masks a part of a tile"):
        reader.turn(given, 0, CPU)


def test_pixels_of_the_whole_conversation_give_the_new_turn_its_own(qwen: Family) -> None:
    """Two conversations; in the first, the later turn has a video and a picture, too."""
    first, second, third = conversation()
    other = [make_turn("qwen3_vl", [2, ("image", 16, 16), 3, ("video", 2, 16, 16)], seed=5)]
    other.append(make_turn("qwen3_vl", [5, ("video", 2, 16, 32), 1], seed=6))
    everything = pad_left([join_turns(first, second, third), join_turns(*other)])
    new = [ids_of(third), ids_of(other[1])]
    seen = [torch.cat([ids_of(first), ids_of(second)]), ids_of(other[0])]
    made = qwen.turns(new, everything, [9, 4], CPU, seen)
    assert_same_turn(made[0], qwen.turn(third, 9, CPU))
    assert_same_turn(made[1], qwen.turn(other[1], 4, CPU))
    alone = qwen.turns(new, pad_left([third, other[1]]), [9, 4], CPU, seen)
    assert_same_turn(alone[0], made[0])
    text = qwen.turns([ids_of(second)], first, [5], CPU, [ids_of(first)])
    assert_same_turn(text[0], qwen.turn(second, 5, CPU))


def test_videos_of_a_batch_keep_their_seconds() -> None:
    """Qwen2.5-VL: the whole conversation's videos, of which the new turns have one each."""
    name, reader = "qwen2_5_vl", family("qwen2_5_vl")
    turns = [make_turn(name, [3, ("video", 4, 16, 16), 2], seed=i) for i in range(4)]
    for i, turn in enumerate(turns):
        turn["second_per_grid_ts"] = torch.tensor([1.0 + i])
    everything = pad_left([join_turns(*turns[:2]), join_turns(*turns[2:])])
    new, seen = [ids_of(turns[1]), ids_of(turns[3])], [ids_of(turns[0]), ids_of(turns[2])]
    made = reader.turns(new, everything, [9, 4], CPU, seen)
    for found, turn, offset in zip(made, (turns[1], turns[3]), (9, 4), strict=True):
        assert_same_turn(found, reader.turn(turn, offset, CPU))
    turns[0]["second_per_grid_ts"] = torch.ones(2)
    with pytest.raises(InputError, match=r"second_per_grid_ts has shape \[2\] for 1 videos"):
        reader.turn(turns[0], 0, CPU)


def test_seconds_of_a_video_are_rounded_behind_the_product() -> None:
    """Qwen2.5-VL: positions by hand (transformers before 5.23 rounds the seconds alone)."""
    pieces = [1, ("video", 6, 16, 16), ("image", 16, 16), ("video", 6, 16, 16), 1]
    turn = make_turn("qwen2_5_vl", pieces)
    turn["second_per_grid_ts"] = torch.tensor([0.5, 1.9])
    modality = turn["mm_token_type_ids"][0]
    made = family("qwen2_5_vl").positions(ids_of(turn), modality, turn)
    times = made[0, modality == 2] - made[1, modality == 2].view(2, 12)[:, :1].repeat(1, 12).view(
        -1
    )
    # Two of its positions a second: 1 and 3.8 apart; each frame is 2 x 2 merged patches.
    assert times.tolist() == [t for t in (0, 1, 2, 0, 3, 7) for _ in range(4)]


def test_text_begins_behind_the_seconds_of_a_long_video() -> None:
    """Qwen2.5-VL, by hand: the largest position and one (transformers 5.2 and vLLM)."""
    turn = make_turn("qwen2_5_vl", [3, ("video", 24, 16, 16), 4, ("image", 16, 16), 2])
    turn["second_per_grid_ts"] = torch.tensor([1.0])
    modality = turn["mm_token_type_ids"][0]
    made = family("qwen2_5_vl").positions(ids_of(turn), modality, turn)
    video, image = (modality == 2).nonzero()[:, 0], (modality == 1).nonzero()[:, 0]
    start = int(video[0])
    assert made[:, :start].tolist() == [list(range(start))] * 3
    # Patches of two frames, two positions a second, 1 s apart; 2 x 2 tokens each.
    apart = int(turn["video_grid_thw"][0, 0]) - 1
    assert made[0, video].max() == start + 2 * apart and made[1:, video].max() == start + 1
    behind = start + 2 * apart + 1
    between = int(image[0] - video[-1]) - 1
    assert made[:, video[-1] + 1 : image[0]].tolist() == [list(range(behind, behind + between))] * 3
    assert made[:, image].min() == behind + between and made[:, image].max() == behind + between + 1
    assert made[:, image[-1] + 1].tolist() == [behind + between + 2] * 3
    placed = family("qwen2_5_vl").turn(turn, 0, CPU)
    assert placed.next_position == int(made.max()) + 1


def test_pictures_and_frames_that_one_token_stands_for() -> None:
    """GLM's: transformers takes no pictures beside videos, so that each is compared by itself."""
    glm = family("glm4v")
    picture = make_turn("glm4v", [4, ("image", 24, 16), 3], seed=1)
    video = make_turn("glm4v", [2, ("video", 4, 16, 24), 5], seed=2)
    first = glm.turn(picture, 3)
    second = glm.turn(video, first.next_position)
    both = glm.turn(join_turns(picture, video), 3)
    assert set(first.modality.tolist()) == {0, 1} and set(second.modality.tolist()) == {0, 2}
    assert torch.equal(both.modality, torch.cat([first.modality, second.modality]))
    assert torch.equal(both.positions, torch.cat([first.positions, second.positions], 1))
    assert first.visual is not None and second.visual is not None and both.visual is not None
    torch.testing.assert_close(both.visual, torch.cat([first.visual, second.visual]))


def test_pixels_that_cover_one_kind_of_what_was_seen(qwen: Family) -> None:
    pieces: list[Any] = [3, ("image", 16, 16), 2, ("video", 2, 16, 16), 1]
    first, second = make_turn("qwen3_vl", pieces), make_turn("qwen3_vl", pieces, seed=1)
    inputs = second | {
        key: torch.cat([first[key], second[key]]) for key in ("pixel_values", "image_grid_thw")
    }
    with pytest.raises(InputError, match="videos of the whole conversation") as error:
        qwen.turns([ids_of(second)], inputs, [0], CPU, [ids_of(first)])
    one_line(error)


MUTATIONS: list[Callable[[Tensor], Any]] = [
    lambda x: x[None],
    lambda x: x[0],
    lambda x: x[:0],
    lambda x: x[:-1],
    lambda x: x[..., :-1],
    lambda x: torch.cat([x, x]),
    lambda x: x.float() + 0.5,
    lambda x: x.to(torch.complex64),
    lambda x: x.bool(),
    lambda x: -x,
    lambda x: x.double() * math.nan,
    lambda x: x * 10**5,
    lambda x: x.T if x.dim() == 2 else x,
    lambda x: x.reshape(-1),
    lambda x: [[1], [2, 3]],
    lambda x: "text",
    lambda x: {},
]


@pytest.mark.parametrize(
    "name",
    long_but(
        ("qwen3_vl", "llava_onevision", "mistral3"),
        READERS,
        "they read tensors as one of the others does",
    ),
)
def test_odd_tensors_get_one_sentence(name: str) -> None:
    """Every tensor of a caller, changed in every way, is read or refused in our words."""
    reader, pieces = family(name), [3, ("image", 32, 32), 2, ("image", 16, 48), 1]
    if name in ("qwen3_vl", "qwen2_5_vl"):
        pieces.insert(2, ("video", 4, 16, 32))
    wrong = []
    for key in make_turn(name, pieces):
        for index, change in enumerate(MUTATIONS):
            turn: dict[str, Any] = dict(make_turn(name, pieces))
            turn[key] = change(turn[key])
            try:
                reader.turn(turn, 0, CPU)
            except InputError as error:
                assert one_line(pytest.ExceptionInfo.from_exception(error))
            except Exception as error:
                wrong.append(f"{key}, change {index}: {type(error).__name__}: {error}")
    assert not wrong, "\n".join(wrong)
