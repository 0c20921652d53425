"""With an unlimited budget the engine equals transformers: same greedy tokens, same logits.

Reference and engine see the same random checkpoint in float32. All logits of all steps are
compared, so a near tie between two tokens cannot hide a difference (and none is needed: the
seeds have no two logits closer than what float32 tells apart).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from mmkv.engine.errors import ContextError
from mmkv.engine.runtime import Runtime
from mmkv.engine.sequence import CachedSequence
from tests.support.factories import (
    CHECKPOINTS,
    FAMILIES,
    Piece,
    checkpoint,
    join_turns,
    make_turn,
    pad_left,
)
from tests.support.hf_models import with_positions_of_the_paper
from tests.support.tiers import long_but, one_in

STEPS = 24
FEW = 8  # where a prompt is read in another way: what follows is that of one turn
TOLERANCE = 1e-4  # of the largest logit, acceptance 2
TEXT_TYPES = ("llama", "mistral", "ministral3", "qwen2", "qwen3", "qwen3_moe", "phi3")
TEXT_TYPES += ("ministral", "qwen3_5_text", "gemma3_text", "glm4")
VISION = [name for name, spec in CHECKPOINTS.items() if spec.model_type not in TEXT_TYPES]
# Those that take videos.
WATCHING = ["qwen3_vl", "qwen3_vl_dim128", "qwen3_vl_moe", "qwen2_5_vl", "qwen3_5", "internvl"]
WATCHING += ["llava_onevision", "llava_next_video", "qwen2_vl", "smolvlm", "glm4v"]
PICTURES: list[Piece] = [5, ("image", 32, 32), 7, ("image", 16, 48), 9]
# Below, and at a divisor of the length of every prompt here.
CHUNKS = (7, 16)


@functools.cache
def reference_model(name: str) -> Any:
    text = CHECKPOINTS[name].model_type in TEXT_TYPES
    kind = transformers.AutoModelForCausalLM if text else transformers.AutoModelForImageTextToText
    model = kind.from_pretrained(checkpoint(name), dtype=torch.float32).eval()
    return with_positions_of_the_paper(model)


@torch.inference_mode()
def reference(name: str, inputs: dict[str, Tensor], steps: int = FEW) -> tuple[Tensor, Tensor]:
    """Return greedy ids ``[B, steps]`` and their logits ``[B, steps, vocab]`` of transformers."""
    made = reference_model(name).generate(
        **inputs,
        max_new_tokens=steps,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return made.sequences[:, inputs["input_ids"].shape[1] :], torch.stack(made.logits, dim=1)


@functools.cache
def engine_of(name: str, chunk: int = 2048) -> Runtime:
    return Runtime.from_pretrained(
        checkpoint(name),
        policy="full",
        prefill_chunk=chunk,
        device="cpu",
        dtype="float32",
        kv="auto",
    )


def continue_greedily(session: CachedSequence, logits: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Return greedy tokens from the logits of the last prompt token, and all logits."""
    tokens, every = [], [logits]
    for _ in range(steps):
        tokens.append(int(every[-1].argmax()))
        every.append(session.decode(tokens[-1]))
    return torch.tensor(tokens), torch.stack(every[:-1])


def assert_same(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> None:
    """Tokens equal and logits within TOLERANCE of the largest, step by step."""
    error = (found[1] - wanted[1]).abs().amax(-1) / wanted[1].abs().max()
    step = int((error > TOLERANCE).int().argmax())
    assert float(error.max()) <= TOLERANCE, f"step {step}: relative logit error {error[step]:.2e}"
    assert found[0].tolist() == wanted[0].tolist()


def check_turns(
    name: str,
    turns: Sequence[dict[str, Tensor]],
    chunks: Sequence[int] = (2048,),
    steps: int = FEW,
) -> None:
    """Turns one after another in a session against the whole conversation at once."""
    tokens, logits = reference(name, join_turns(*turns), steps)
    for chunk in chunks:
        with engine_of(name, chunk).session() as session:
            last = torch.empty(0)
            for turn in turns:
                last = session.prefill(turn)
            assert session.seen == sum(turn["input_ids"].shape[1] for turn in turns)
            assert_same(continue_greedily(session, last, steps), (tokens[0], logits[0]))


def prompt(name: str, seed: int = 0) -> dict[str, Tensor]:
    return make_turn(name, PICTURES if name in VISION else [40], seed)


# The first checkpoint of each family of texts (those that see have a test below), and variants
# with a part that no family has.
SEEING = [name for name in FAMILIES if name in VISION]
OWN = [name for name in FAMILIES if name not in SEEING]
OWN += ["qwen3_vl_group8", "llava_mistral", "mistral3_ministral", "qwen3_yarn", "qwen2_sliding"]
OWN += ["llama_biased", "phi3_long", "phi3_sliding", "qwen3_moe_mixed"]


@one_in(3)
@pytest.mark.parametrize("name", long_but(OWN, CHECKPOINTS, "sizes of a family"))
def test_one_turn(name: str) -> None:
    """Several pictures of different sizes where the family sees."""
    check_turns(name, [prompt(name)], steps=STEPS)


@pytest.mark.slow(reason="more of the parity matrix; test_one_turn has each family")
@pytest.mark.parametrize(
    "name",
    ["qwen3_vl", "llava_next_mistral", "mistral", "phi3_long", "qwen2_sliding"],
)
def test_prompt_in_chunks(name: str) -> None:
    """Chunk borders fall inside pictures and inside sliding windows."""
    check_turns(name, [prompt(name)], CHUNKS)


@one_in(3)
@pytest.mark.parametrize("name", SEEING)
def test_picture_in_a_later_turn(name: str) -> None:
    """Pictures of the second and third turn get the positions of the whole conversation."""
    turns = [
        make_turn(name, [4, ("image", 16, 32), 6], seed=1),
        make_turn(name, [11], seed=2),
        make_turn(name, [3, ("image", 32, 16), 2, ("image", 32, 32), 5], seed=3),
    ]
    check_turns(name, turns, steps=STEPS)


@pytest.mark.parametrize("length", [15, 16, 17, 18])
def test_long_rope_factors_begin_with_the_first_token_past_the_short_ones(length: int) -> None:
    """Trained for 16 tokens: a prompt of 16 has the short factors, one of 17 the long ones."""
    turn = make_turn("phi3_long", [length])
    with torch.inference_mode():
        want = reference_model("phi3_long")(**turn).logits[0, -1]
    with engine_of("phi3_long").session() as session:
        got = session.prefill(turn)
    assert (got - want).abs().max() <= TOLERANCE * want.abs().max()


def test_ministral_ends_where_transformers_begins_to_scale_queries() -> None:
    turn = make_turn("ministral3", [192])
    with torch.inference_mode():
        want = reference_model("ministral3")(**turn).logits[0, -1]
    with engine_of("ministral3").session() as session:
        got = session.prefill(turn)
        assert (got - want).abs().max() <= TOLERANCE * want.abs().max()
        with pytest.raises(ContextError, match="192"):
            session.decode(5)


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3", "phi3"])
def test_text_in_turns(name: str) -> None:
    check_turns(name, [make_turn(name, [size], seed=size) for size in (9, 1, 30)])


@one_in(3)
@pytest.mark.parametrize(
    "name",
    long_but(FAMILIES, WATCHING, "a variant of a family"),
)
def test_video(name: str) -> None:
    """A video between pictures; for Qwen3-VL its frames stand behind timestamps."""
    pieces: list[Piece] = [
        4,
        ("video", 6, 16, 24),
        5,
        ("image", 24, 16),
        3,
        ("video", 6, 24, 16),
        6,
    ]
    if name == "glm4v":  # transformers takes no pictures beside videos of it
        pieces = [piece for piece in pieces if isinstance(piece, int) or piece[0] == "video"]
    check_turns(name, [make_turn(name, pieces, seed=4)], [16])


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen2_5_vl"])
def test_video_in_a_later_turn(name: str) -> None:
    turns = [
        make_turn(name, [4, ("image", 24, 40), 6], seed=5),
        make_turn(name, [3, ("video", 4, 32, 16), 7], seed=6),
    ]
    check_turns(name, turns)


@pytest.mark.slow(reason="more of the parity matrix; test_one_turn has each family")
def test_a_lone_picture_is_tiled() -> None:
    """LLaVA-OneVision cuts a single picture into tiles, more than its limit allows."""
    for size in ((32, 32), (16, 48), (40, 20), (31, 9)):
        check_turns("llava_onevision", [make_turn("llava_onevision", [3, ("image", *size), 4])])


@pytest.mark.slow(reason="more of the parity matrix; test_one_turn has each family")
@pytest.mark.parametrize(
    "name",
    long_but(
        ("qwen3_vl", "qwen2_5_vl", "glm4v", "gemma3", "qwen3_5", "llava", "llama"),
        [
            name
            for name in FAMILIES
            if name not in ("llava_onevision", "qwen2", "qwen3", "qwen3_5_text", "qwen3_5_moe")
        ],
        "positions of the other families are like these",
    ),
)
def test_left_padded_batch(name: str) -> None:
    """Sessions of different lengths and rope offsets, decoded in one batch."""
    if name in VISION:
        pieces: list[list[Piece]] = [
            [3, ("image", 32, 32), 4],
            [2, ("image", 16, 16), 21, ("image", 16, 32), 5],
            [6, ("image", 16, 48), 1],
        ]
    else:
        pieces = [[40], [7], [23]]
    batch = pad_left([make_turn(name, row, seed=i) for i, row in enumerate(pieces)])
    tokens, logits = reference(name, batch)
    engine = engine_of(name)
    sessions = [engine.session() for _ in pieces]
    # Each session is given its own padded row: the zeros of the mask are dropped.
    rows = [make_turn(name, row, seed=i) for i, row in enumerate(pieces)]
    for i, row in enumerate(rows):
        row["input_ids"] = batch["input_ids"][i : i + 1]
        row["attention_mask"] = batch["attention_mask"][i : i + 1]
    current = torch.stack([s.prefill(row) for s, row in zip(sessions, rows, strict=True)])
    chosen, every = [], []
    for _ in range(FEW):
        every.append(current)
        chosen.append(current.argmax(-1))
        current = engine.decode(sessions, chosen[-1].tolist())
    for session in sessions:
        session.close()
    assert_same((torch.stack(chosen, 1), torch.stack(every, 1)), (tokens, logits))
