"""A RetainedCache goes on where ``generate`` ended: late pictures, ragged batches, mistakes."""

from __future__ import annotations

import copy
import gc
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import StoppingCriteriaList

import mmkv
from mmkv import InputError, SessionError
from mmkv.engine.sequence import CachedSequence
from mmkv.hf import RetainedCache, retain
from tests.support.factories import checkpoint, join_turns, make_turn, pad_left
from tests.support.hf_models import greedy, model_of
from tests.support.model_configs import IMAGE_ID

NAME = "qwen3_vl"
SMALL: dict[str, Any] = {"gates": "random", "budget": 7, "prefill_chunk": 16, "page_size": 8}
SAID = 6

Turn = dict[str, Tensor]


def conversation(seed: int = 50) -> list[Turn]:
    """Return three turns, with a picture in the first and in the last."""
    return [
        make_turn(NAME, [3, ("image", 16, 32), 4], seed=seed + 1),
        make_turn(NAME, [8], seed=seed + 2),
        make_turn(NAME, [2, ("image", 32, 16), 5], seed=seed + 3),
    ]


def after(tokens: Sequence[int], turn: Turn) -> Turn:
    """Return a turn with ``tokens`` before it, as a processor would return it."""
    ids = torch.cat([torch.tensor([list(tokens)], dtype=torch.long), turn["input_ids"]], 1)
    pixels = {key: turn[key] for key in ("pixel_values", "image_grid_thw") if key in turn}
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **pixels}


def lead(session: CachedSequence, turns: Sequence[Turn]) -> list[list[int]]:
    """Return the replies of a session that is fed the same tokens: the last of a reply later."""
    replies: list[list[int]] = []
    for turn in turns:
        logits = session.prefill(after(replies[-1][-1:] if replies else [], turn))
        replies.append([int(logits.argmax())])
        for _ in range(SAID - 1):
            replies[-1].append(int(session.decode(replies[-1][-1]).argmax()))
    return replies


@pytest.fixture(scope="module")
def engine() -> mmkv.Engine:
    return mmkv.Engine.from_pretrained(checkpoint(NAME), dtype="float32", device="cpu", **SMALL)


def same_sets(one: Any, two: Any) -> bool:
    return all(
        torch.equal(a, b)
        for left, right in zip(one, two, strict=True)
        for a, b in zip(left, right, strict=True)
    )


@pytest.mark.parametrize("form", ["new ids", "whole", "whole with all pixels", "longer mask"])
def test_three_turns_with_a_late_picture_are_a_session(form: str, engine: mmkv.Engine) -> None:
    model, turns, held = model_of(NAME), conversation(), RetainedCache()
    with engine.session() as session, retain(model, **SMALL):
        replies = lead(session, turns)
        ids: list[int] = []
        for i, (turn, reply) in enumerate(zip(turns, replies, strict=True)):
            inputs = after(ids, turn)
            if form == "new ids":
                inputs = turn
            elif form == "whole with all pixels" and i:
                pixels = join_turns(*turns[: i + 1])
                inputs |= {key: pixels[key] for key in ("pixel_values", "image_grid_thw")}
            elif form == "longer mask":
                inputs = after(ids[-1:], turn) if i else turn
                mask = torch.ones(1, held.get_seq_length() + inputs["input_ids"].shape[1])
                inputs["attention_mask"] = mask
            made = greedy(model, inputs, max_new_tokens=SAID, past_key_values=held)
            assert made[0, inputs["input_ids"].shape[1] :].tolist() == reply
            ids += turn["input_ids"][0].tolist() + reply
            assert held.get_seq_length() == len(ids) - 1
        assert same_sets(held.retained()[0], session.retained())
        assert held.memory()[0] == session.memory() and session.evicted > 0


def test_with_room_for_all_it_is_the_whole_conversation_at_once() -> None:
    model, turns = model_of(NAME), conversation()
    replies: list[list[int]] = []
    ids: list[int] = []
    for i, turn in enumerate(turns):
        pixels = {"pixel_values", "image_grid_thw"}
        whole = {k: v for k, v in join_turns(*turns[: i + 1]).items() if k in pixels}
        whole |= {k: v for k, v in after(ids, turn).items() if k not in pixels}
        whole["mm_token_type_ids"] = (whole["input_ids"] == IMAGE_ID).int()
        made = greedy(model, whole, max_new_tokens=SAID)[0].tolist()
        replies.append(made[-SAID:])
        ids = made
    held = RetainedCache()
    with retain(model, policy="full"):
        for turn, reply in zip(turns, replies, strict=True):
            made = greedy(model, turn, max_new_tokens=SAID, past_key_values=held)
            assert made[0, -SAID:].tolist() == reply


@pytest.mark.parametrize("whole", [True, False])
def test_a_batch_goes_on_row_by_row(whole: bool, engine: mmkv.Engine) -> None:
    """Two conversations of different lengths, of which one reply ends early."""
    model = model_of(NAME)
    first = [conversation()[0], make_turn(NAME, [9], seed=8)]
    second = [conversation()[2], make_turn(NAME, [1, ("image", 16, 16), 30], seed=9)]
    with retain(model, **SMALL):
        plain = greedy(model, pad_left(first), max_new_tokens=SAID)
        one, two = plain[:, -SAID:].tolist()
        cut = next(i for i in range(1, SAID - 1) if one[i] not in one[:i] + two)
        end = one[cut]
        held = RetainedCache()
        ends = {"eos_token_id": end, "pad_token_id": 0}
        made = greedy(model, pad_left(first), max_new_tokens=SAID, past_key_values=held, **ends)
        replies = [one[: cut + 1], two]
        assert made[0, -SAID:].tolist() == replies[0] + [0] * (SAID - cut - 1)
        so_far = [
            turn["input_ids"][0].tolist() + reply
            for turn, reply in zip(first, replies, strict=True)
        ]
        assert [row.ids for row in held.rows] == [ids[:-1] for ids in so_far]
        given = [
            after(ids if whole else [], turn) for ids, turn in zip(so_far, second, strict=True)
        ]
        found = greedy(model, pad_left(given), max_new_tokens=SAID, past_key_values=held)
    for i, (start, turn, reply) in enumerate(zip(first, second, replies, strict=True)):
        with engine.session() as session:
            session.prefill(start)
            for token in reply[:-1]:
                session.decode(token)
            logits = session.prefill(after(reply[-1:], turn))
            for token in found[i, -SAID:].tolist():
                assert token == int(logits.argmax())
                logits = session.decode(token)


@pytest.mark.parametrize("kept", ["full", "streamingllm"])  # with room for all
def test_a_mask_over_padding_before_and_in_the_new_ids(kept: str) -> None:
    """Conversations of other lengths in both turns, as transformers goes on with each alone.

    Long turns follow short ones: columns of the mask from its wrong end would mask real tokens
    in one row and show padding in the other.
    """
    model, made = model_of("llama"), RetainedCache()
    firsts, seconds = ([make_turn("llama", [n], seed=n) for n in pair] for pair in ((9, 4), (3, 8)))
    replies, wanted = [], []
    for first, second in zip(firsts, seconds, strict=True):
        said = greedy(model, first, max_new_tokens=SAID)
        replies.append(said[0, -SAID:])
        whole = after(said[0].tolist(), second)
        wanted.append(greedy(model, whole, max_new_tokens=SAID)[0, -SAID:].tolist())
    asked, more = pad_left(firsts), pad_left(seconds)
    parts = [asked["attention_mask"], torch.ones(2, SAID), more["attention_mask"]]
    mask = torch.cat([part.long() for part in parts], 1)
    assert mask[:, : more["input_ids"].shape[1]].tolist() != more["attention_mask"].tolist()
    more["attention_mask"] = mask
    with retain(model, policy=kept, budget=64):
        said = greedy(model, asked, max_new_tokens=SAID, past_key_values=made)
        assert [row.tolist() for row in said[:, -SAID:]] == [row.tolist() for row in replies]
        found = greedy(model, more, max_new_tokens=SAID, past_key_values=made)
        assert found[:, -SAID:].tolist() == wanted
        held = [turn["input_ids"].shape[1] for turn in firsts]
        assert [len(row.ids) for row in made.rows] == [
            first + SAID + turn["input_ids"].shape[1] + SAID - 1
            for first, turn in zip(held, seconds, strict=True)
        ]


def test_a_call_that_fails_leaves_the_cache_as_it_was() -> None:
    model, turns, held = model_of(NAME), conversation(), RetainedCache()

    def fail(ids: Tensor, scores: Any, **_: Any) -> Tensor:
        if ids.shape[1] > turns[2]["input_ids"].shape[1] + 3:
            raise KeyboardInterrupt
        return torch.zeros(1, dtype=torch.bool)

    with retain(model, **SMALL) as handle:
        greedy(model, turns[0], max_new_tokens=SAID, past_key_values=held)
        before, ids, memory = held.retained(), list(held.rows[0].ids), handle.memory()
        wanted = greedy(model, turns[2], past_key_values=copy.deepcopy(held))
        with handle.engine.lock:  # the copy is gone, and its pages come back
            used = handle.engine.cache.pool.num_pages - handle.engine.cache.pool.free_pages
        criteria = StoppingCriteriaList([fail])
        with pytest.raises(KeyboardInterrupt):
            greedy(model, turns[2], past_key_values=held, stopping_criteria=criteria)
        with pytest.raises(InputError, match="no image came with it"):
            greedy(model, {"input_ids": turns[2]["input_ids"]}, past_key_values=held)
        pool = handle.engine.cache.pool
        assert pool.num_pages - pool.free_pages == used
        assert same_sets(before[0], held.retained()[0]) and held.rows[0].ids == ids
        assert handle.memory().kv_bytes == memory.kv_bytes
        assert torch.equal(greedy(model, turns[2], past_key_values=held), wanted)


def test_a_copied_cache_goes_on_by_itself() -> None:
    """A prompt is read once and continued twice, as with a DynamicCache that is copied."""
    model, turns = model_of(NAME), conversation()
    with retain(model, **SMALL) as handle:
        prompt = RetainedCache()
        greedy(model, turns[0], max_new_tokens=1, past_key_values=prompt)
        kept = prompt.retained()
        made = [
            greedy(model, turns[2], past_key_values=copy.deepcopy(prompt)).tolist()
            for _ in range(2)
        ]
        assert made[0] == made[1] and same_sets(kept[0], prompt.retained()[0])
        pool = handle.engine.cache.pool
        assert pool.num_pages - pool.free_pages == sum(row.pages for row in prompt.memory())
        del prompt
        gc.collect()  # copies may lie in rings of references
        with handle.engine.lock:  # whoever takes it next gives the pages of dropped caches back
            assert pool.free_pages == pool.num_pages


def test_a_copy_that_was_never_passed_is_counted_and_closed_with_the_others() -> None:
    model, turns, held = model_of(NAME), conversation(), RetainedCache()
    with retain(model, **SMALL) as handle:
        greedy(model, turns[0], max_new_tokens=1, past_key_values=held)
        alone, copied = handle.memory().kv_bytes, copy.deepcopy(held)
        assert handle.memory().kv_bytes == 2 * alone > 0 and copied.rows
        pool = handle.engine.cache.pool
    assert pool.free_pages == pool.num_pages


def test_what_cannot_be_a_continuation_is_refused() -> None:
    model, turns, held = model_of(NAME), conversation(), RetainedCache()
    with retain(model, **SMALL) as handle:
        made = greedy(model, turns[0], max_new_tokens=SAID, past_key_values=held)
        changed = after(made[0].tolist(), turns[1])
        changed["input_ids"][0, made.shape[1] - 3] += 1

        def refused(match: str, inputs: Turn, cache: Any = held) -> None:
            with pytest.raises(InputError, match=match) as error:
                greedy(model, inputs | {"past_key_values": cache})
            assert "\n" not in str(error.value) and len(str(error.value)) < 250

        refused(f"up to token {made.shape[1] - 3}, and the cache holds", changed)
        refused("holds 1 conversations and the batch has 2 rows", pad_left(turns[:2]))
        mask = torch.ones(1, turns[1]["input_ids"].shape[1] + 3)
        refused("names 3 tokens before", turns[1] | {"attention_mask": mask})
        # The question once more is a new turn, not the conversation with its end cut off.
        greedy(model, turns[0], max_new_tokens=2, past_key_values=held)
        with pytest.raises(SessionError, match="in use by another generate"), held.in_use():
            greedy(model, turns[1], past_key_values=held)
        with pytest.raises(InputError, match="cannot be cropped"):
            held.crop(-1)
        with pytest.raises(InputError, match="DynamicCache"):
            model(**turns[1], past_key_values=held)
        other = model_of("llama")
        with retain(other, policy="full"), pytest.raises(InputError, match="another retained"):
            greedy(other, {"input_ids": turns[1]["input_ids"]}, past_key_values=held)
    assert held.get_seq_length() == 0 and handle.memory().kv_bytes == 0
    with pytest.raises(SessionError, match="no longer retained"):
        _ = handle.engine
    with retain(model, **SMALL):
        greedy(model, turns[0], past_key_values=held)
        assert held.get_seq_length() > 0


@pytest.mark.parametrize("policy", ["full", "snapkv:window=8"])
def test_a_conversation_that_drops_tokens_of_a_reply_goes_back(policy: str) -> None:
    """Against a call that reads the changed conversation afresh; a second row stays as it is."""
    model, held = model_of("llama"), RetainedCache()
    options = {"policy": policy, "budget": 200}
    prompt = torch.arange(5, 25).view(2, 10)
    with retain(model, **options):
        made = greedy(model, {"input_ids": prompt}, max_new_tokens=SAID, past_key_values=held)
        asked = torch.arange(30, 50)
        # The first row's reply without its first two tokens; the other's whole, and as long.
        rows = [torch.cat([made[0, :10], made[0, 12:], asked]), torch.cat([made[1], asked[:18]])]
        inputs = {"input_ids": torch.stack(rows)}
        wanted = greedy(model, inputs, max_new_tokens=SAID)
        again = greedy(model, inputs, max_new_tokens=SAID, past_key_values=held)
        assert torch.equal(again, wanted)
        assert held.rows[0].ids == again[0, :-1].tolist()
