"""Families: turns, positions, and errors for wrong inputs and checkpoints."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.errors import InputError, ModelError
from engine.model.families import IMAGE, VIDEO, Family, family_for
from engine.model.families.loading import load, resolve_device, resolve_dtype
from tests.support.factories import (
    CHECKPOINTS,
    checkpoint,
    join_turns,
    make_model,
    make_turn,
    pad_left,
)
from tests.support.model_configs import IMAGE_ID, VIDEO_ID, VOCAB

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


def test_no_tokens(qwen: Family) -> None:
    made = qwen.turn({"input_ids": torch.zeros(1, 0, dtype=torch.int64)}, 4, CPU)
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
        (edit("image_grid_thw", lambda x: x[:, :2]), "asks for"),
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


def test_video_for_llava() -> None:
    with pytest.raises(InputError, match="takes no pixel_values_videos"):
        family("llava").turn(
            {"input_ids": [[5]], "pixel_values_videos": torch.ones(1, 2, 3, 16, 16)}, 0, CPU
        )


@pytest.mark.parametrize("name", ["qwen3_vl", "llava_next", "qwen2", "qwen3_moe", "phi3"])
def test_text_weights_are_not_copied(name: str) -> None:
    reader, spec, weights = load(checkpoint(name), "float32", "cpu")
    assert len(reader.text_model(reader.hf).layers) == 0
    left = {p.untyped_storage().data_ptr(): p.nbytes for p in reader.hf.parameters()}
    ours = {weights.embed.untyped_storage().data_ptr(), weights.norm.untyped_storage().data_ptr()}
    ours.add(weights.head.untyped_storage().data_ptr())
    vision = sum(size for where, size in left.items() if where not in ours)
    whole = sum(p.nbytes for p in make_model(CHECKPOINTS[name]).parameters())
    # The gains of q and k are kept once per head, a few hundred bytes.
    gains = [w.qk_norm.nbytes for w in weights.layers if w.qk_norm is not None]
    assert whole <= vision + weights.nbytes() <= whole + sum(gains)
    assert spec.rope.axes == reader.rope_axes


def test_end_tokens() -> None:
    model = make_model(CHECKPOINTS["llama"])
    assert family_for(model.config)(model).eos_token_ids == ()
    model.config.eos_token_id = 7
    assert family_for(model.config)(model).eos_token_ids == (7,)
    model.generation_config.eos_token_id = [3, 4]
    assert family_for(model.config)(model).eos_token_ids == (3, 4)


@pytest.mark.parametrize("kind", ["gpt2", "mixtral", "gemma3"])
def test_unsupported_types_are_named(kind: str) -> None:
    with pytest.raises(ModelError) as error:
        family_for(transformers.CONFIG_MAPPING[kind]())
    assert repr(kind) in one_line(error) and "qwen3_vl" in one_line(error)


def test_unsupported_text_part_and_quantisation() -> None:
    config = transformers.LlavaConfig(text_config=transformers.Gemma2Config())
    with pytest.raises(ModelError, match="'gemma2' language model"):
        family_for(config)
    config = transformers.LlamaConfig()
    config.quantization_config = {"quant_method": "awq"}
    with pytest.raises(ModelError, match="quantised"):
        family_for(config)


def copy_of(name: str, folder: Path) -> Path:
    return Path(shutil.copytree(checkpoint(name), folder / "model"))


def lose_an_expert(folder: Path) -> None:
    lose_a_tensor(folder, "model.layers.1.mlp.experts.3.up_proj.weight")


def lose_a_tensor(folder: Path, name: str = "model.layers.1.mlp.up_proj.weight") -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors.pop(name)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def shrink_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    key = "model.layers.1.mlp.up_proj.weight"
    tensors[key] = tensors[key][:-1].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5000])


def scribble(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"not a safetensors file at all" * 9)


def as_pickle(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def configured(**values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **values}))

    return change


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lose_a_tensor, "lacks 1 weights (model.layers.1.mlp.up_proj.weight"),
        (shrink_a_tensor, "not a readable checkpoint"),
        (truncate, "corrupt"),
        (scribble, "corrupt"),
        (as_pickle, "not a readable checkpoint"),
        (lambda folder: (folder / "model.safetensors").unlink(), "not a readable checkpoint"),
        (lambda folder: (folder / "config.json").unlink(), "no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "not a readable checkpoint"),
        (configured(model_type="no_such_model"), "no_such_model"),
        (configured(model_type="mixtral"), "'mixtral' is not supported"),
        (configured(hidden_act="gelu"), "'gelu' is not supported"),
        (configured(rope_parameters={"rope_type": "no_such_rope"}), "no_such_rope"),
    ],
)
def test_damaged_checkpoints(tmp_path: Path, damage: Callable[[Path], Any], message: str) -> None:
    folder = copy_of("llama", tmp_path)
    damage(folder)
    with pytest.raises(ModelError) as error:
        load(folder, "auto", "cpu")
    assert message in one_line(error)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lose_an_expert, "lacks weights of experts"),
        (
            configured(num_experts_per_tok=9),
            "num_experts_per_tok is 9, not at most num_experts (8)",
        ),
        (configured(num_local_experts=10**9), "num_experts is 1000000000, not a whole number"),
        (configured(num_local_experts=4000), "describes a text model of more numbers than"),
        (configured(decoder_sparse_step=0), "decoder_sparse_step is 0, not a whole number"),
    ],
)
def test_damaged_experts(tmp_path: Path, damage: Callable[[Path], Any], message: str) -> None:
    folder = copy_of("qwen3_moe", tmp_path)
    damage(folder)
    with pytest.raises(ModelError) as error:
        load(folder, "auto", "cpu")
    assert message in one_line(error)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("/no/such/folder", "no folder"),
        ("./missing", "no folder"),
        ("a/b/c", "no folder"),
        ("", "name is empty"),
        ("nobody/no-such-model", "cannot get 'nobody/no-such-model' from the hub"),
        (__file__, "is a file"),
    ],
)
def test_names_without_a_checkpoint(name: str, message: str) -> None:
    """Offline, as conftest sets it: a hub id that is not cached."""
    with pytest.raises(ModelError) as error:
        load(name, "auto", "cpu")
    assert message in one_line(error)


def test_dtypes_and_devices() -> None:
    config = transformers.LlamaConfig(dtype=torch.bfloat16)
    assert resolve_dtype("auto", config, CPU) == torch.float32
    assert resolve_dtype("auto", config, torch.device("cuda")) == torch.bfloat16
    assert resolve_dtype("auto", transformers.LlamaConfig(), torch.device("cuda")) == torch.float32
    assert resolve_dtype("bfloat16", config, CPU) == torch.bfloat16
    assert resolve_dtype(torch.float16, config, CPU) == torch.float16
    for bad in ("int8", torch.int64):
        with pytest.raises(ModelError, match="not supported; use auto"):
            resolve_dtype(bad, config, CPU)
    assert resolve_device("cpu") == CPU
    for bad in ("cuda:99", "gpu", "meta"):
        with pytest.raises(ModelError) as error:
            resolve_device(bad)
        one_line(error)
    for odd in (torch.zeros(3), torch.tensor([[1, 2]]), None, b"cpu", 0.5):
        with pytest.raises(TypeError, match=r"must be a string or a torch\.device"):
            resolve_device(odd)
        with pytest.raises(TypeError, match=r"must be a string or a torch\.dtype"):
            resolve_dtype(odd, config, CPU)


def test_progress_is_reported() -> None:
    message: list[str] = []
    load(checkpoint("llama"), "auto", "cpu", message.append)
    assert message == ["reading the config", "reading the weights", "preparing the decoder"]


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


@pytest.mark.parametrize(
    "name", ["qwen3_vl", "qwen2_5_vl", "llava", "llava_next", "llava_onevision", "internvl"]
)
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


def test_pixels_that_cover_one_kind_of_what_was_seen(qwen: Family) -> None:
    pieces: list[Any] = [3, ("image", 16, 16), 2, ("video", 2, 16, 16), 1]
    first, second = make_turn("qwen3_vl", pieces), make_turn("qwen3_vl", pieces, seed=1)
    inputs = second | {
        key: torch.cat([first[key], second[key]]) for key in ("pixel_values", "image_grid_thw")
    }
    with pytest.raises(InputError, match="videos of the whole conversation") as error:
        qwen.turns([ids_of(second)], inputs, [0], CPU, [ids_of(first)])
    one_line(error)
