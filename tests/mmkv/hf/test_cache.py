"""A RetainedCache goes on where ``generate`` ended; after the context everything is as before."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import StoppingCriteriaList
from transformers.generation import GenerationMixin

import mmkv
from mmkv import InputError, MmkvError, SessionError
from mmkv.engine.sequence import CachedSequence
from mmkv.hf import RetainedCache, retain
from tests.support.changed_weights import CHANGES
from tests.support.factories import (
    CHECKPOINTS,
    ROWS,
    checkpoint,
    join_turns,
    make_model,
    make_turn,
    pad_left,
)
from tests.support.hf_models import greedy, model_of, prompts_of, registered
from tests.support.model_configs import IMAGE_ID
from tests.support.tiers import one_in

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
    model, turns, held = model_of(NAME), conversation(), RetainedCache(only_new=form == "new ids")
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
    held = RetainedCache(only_new=True)
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
        held = RetainedCache(only_new=not whole)
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
    model, turns, held = model_of(NAME), conversation(), RetainedCache(only_new=True)

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
        prompt = RetainedCache(only_new=True)
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

        refused(f"up to token {made.shape[1] - 3} of the 22 in the cache", changed)
        refused("up to token 17 of the 22 in the cache", turns[0])  # the question once more
        refused("holds 1 conversations and the batch has 2 rows", pad_left(turns[:2]))
        mask = torch.ones(1, turns[1]["input_ids"].shape[1] + 3)
        refused("names 3 tokens before", turns[1] | {"attention_mask": mask})
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


def edited(said: Tensor, more: Tensor, prompt: int) -> list[list[int]]:
    """Return the ids ``[T]`` of a second call: what it says differs from the first everywhere."""
    ids, new = said.tolist(), more.tolist()
    rows = [[*ids[:i], 99, *ids[i + 1 :], *new] for i in range(len(ids))]  # a token is another
    rows += [[*ids, *new], ids, ids[:prompt], ids[:3], ids[: prompt + 2]]  # more, the same, fewer
    rows += [[*ids[:5], *ids[7:], *new], [*ids[: prompt + 1], *ids[prompt + 3 :], *new]]
    return [*rows, [*ids[:5], 98, 97, *ids[5:], *new], ids[4:], [*ids[4:], *new], new]


@pytest.mark.filterwarnings("ignore:input_ids differ from the cached conversation")
@pytest.mark.parametrize(
    ("name", "policy"),
    [("llama", "full"), ("llama", "snapkv:window=8"), ("phi3", "full"), ("qwen3_vl", "full")],
)
def test_ids_are_the_whole_conversation_wherever_they_differ(name: str, policy: str) -> None:
    """Against transformers' generate, which reads them afresh; each row is one way to differ."""
    model, more = model_of(name), torch.arange(40, 52)
    prompt = torch.arange(5, 17)
    said = greedy(model, {"input_ids": prompt[None]}, max_new_tokens=SAID)[0]
    rows = [after(ids, {"input_ids": said[None, :0]}) for ids in edited(said, more, len(prompt))]
    later = pad_left(rows)
    wanted = greedy(model, later, max_new_tokens=SAID)
    held = RetainedCache()
    with retain(model, policy=policy, budget=200) as handle:
        first = {"input_ids": prompt.expand(len(rows), -1)}
        made = greedy(model, first, max_new_tokens=SAID, past_key_values=held)
        assert (made == said).all()
        made = greedy(model, later, max_new_tokens=SAID, past_key_values=held)
        width = later["input_ids"].shape[1]
        for i, row in enumerate(rows):
            assert made[i, width:].tolist() == wanted[i, width:].tolist(), i
            assert held.rows[i].ids == row["input_ids"][0].tolist() + made[i, width:-1].tolist()
            begins = row["input_ids"][0, :13].tolist() == said[:13].tolist()
            assert held.rows[i].prompt == 12 or not begins or policy != "full"
        pages = sum(memory.pages for memory in held.memory())
        assert handle.engine.cache.pool.num_pages - handle.engine.cache.pool.free_pages == pages
    with pytest.warns(UserWarning, match="at token 4, in its first prompt"), retain(model):
        for ids in (said[None], torch.cat([said[:4], more])[None]):
            greedy(model, {"input_ids": ids}, past_key_values=held)


@pytest.mark.parametrize(
    ("name", "options"),
    [("llama", {"policy": "streamingllm", "budget": 8}), ("qwen3_5", {"policy": "full"})],
)
def test_where_a_conversation_cannot_go_back_other_ids_are_refused(
    name: str, options: dict[str, Any]
) -> None:
    """After eviction, and where layers keep a state: only what goes on is read."""
    model, more, held = model_of(name), torch.arange(40, 52), RetainedCache()
    prompt = torch.arange(5, 17)[None]
    with retain(model, **options):
        said = greedy(model, {"input_ids": prompt}, max_new_tokens=SAID, past_key_values=held)[0]
        kept, ids = held.retained(), list(held.rows[0].ids)
        going_on = torch.cat([said, more]).tolist()
        for row in edited(said, more, prompt.shape[1]):
            if row[: len(ids)] != ids or len(row) == len(ids):
                with pytest.raises(InputError, match=r"up to token \d+ of the 17 in the cache"):
                    greedy(model, {"input_ids": torch.tensor([row])}, past_key_values=held)
        assert held.rows[0].ids == ids and same_sets(kept[0], held.retained()[0])
        made = greedy(model, {"input_ids": torch.tensor([going_on])}, past_key_values=held)
        assert held.rows[0].ids == made[0, :-1].tolist()


@pytest.mark.parametrize("name", ["qwen3_vl", "llava", "llava_next", "smolvlm"])
def test_other_pictures_at_the_same_ids_are_refused(name: str) -> None:
    """Whichever of those read is another one; the same ones, all or none of them, are fine."""
    model, held, size = model_of(name), RetainedCache(), (16, 32)
    one, two, later = (make_turn(name, [3, ("image", *size), 2], seed=i) for i in (1, 2, 3))
    text = make_turn(name, [9], seed=4)

    def whole(*pictures: Turn, turns: Sequence[Turn], ids: Sequence[int] = ()) -> Turn:
        """Return the ids of ``turns`` behind ``ids`` with the pixels of ``pictures``."""
        shown = join_turns(*pictures)
        inputs = {key: value for key, value in shown.items() if key not in ROWS}
        return inputs | {"input_ids": after(ids, join_turns(*turns))["input_ids"]}

    with retain(model, policy="full"):
        said = greedy(model, one, max_new_tokens=SAID, past_key_values=held)[0].tolist()
        for inputs in (
            whole(two, turns=[text], ids=said),
            whole(two, later, turns=[later], ids=said),
            whole(later, one, turns=[later], ids=said),
            whole(two, turns=[one]),
        ):
            with pytest.raises(InputError, match="of earlier pictures or videos are not those"):
                greedy(model, inputs, max_new_tokens=SAID, past_key_values=held)
        for pictures in ([one, later], [later]):
            inputs = whole(*pictures, turns=[later], ids=said)
            inputs["past_key_values"] = copy.deepcopy(held)
            greedy(model, inputs, max_new_tokens=SAID)
            ids = inputs["past_key_values"].rows[0].ids
            for shown in ([], [one, later], [later], [one]):
                again = whole(*shown, turns=[text], ids=ids) if shown else after(ids, text)
                greedy(model, again, past_key_values=copy.deepcopy(inputs["past_key_values"]))
            with pytest.raises(InputError, match="of earlier pictures or videos are not those"):
                swapped = whole(later, one, turns=[text], ids=ids)
                greedy(model, swapped, past_key_values=inputs["past_key_values"])


# After the context everything is as before, however it ended; nothing global changes.


def attributes(model: Any) -> dict[str, set[str]]:
    return {name: set(vars(module)) for name, module in model.named_modules()}


def own_memory(model: Any) -> bool:
    """Whether no parameter is a view of a larger tensor."""
    return all(p.untyped_storage().nbytes() == p.nbytes for p in model.parameters())


def stop(kind: type[BaseException]) -> Any:
    def criterion(ids: Tensor, scores: Any, **_: Any) -> Tensor:
        raise kind

    return transformers.StoppingCriteriaList([criterion])


@pytest.mark.parametrize(
    ("name", "end"),
    [("qwen3_vl", ValueError), ("phi3", KeyboardInterrupt), ("phi3", None)],
)
def test_the_model_is_put_back(name: str, end: type[BaseException] | None, tmp_path: Path) -> None:
    model, inputs = make_model(CHECKPOINTS[name]), pad_left(prompts_of(name))
    before = copy.deepcopy(model.state_dict())
    plain = greedy(model, inputs)
    wanted = attributes(model)
    method, tables = GenerationMixin.generate, registered()
    identity = {key: id(value) for key, value in model.named_parameters()}

    def check() -> None:
        state = model.state_dict()
        assert state.keys() == before.keys()
        assert all(torch.equal(state[key], before[key]) for key in before)
        assert {key: id(value) for key, value in model.named_parameters()} == identity

    def work() -> None:
        with retain(model, gates="random", budget=6) as handle:
            check()
            model.save_pretrained(tmp_path)
            saved = type(model).from_pretrained(tmp_path).state_dict()
            assert all(torch.equal(saved[key], before[key]) for key in before)
            pool = handle.engine.cache.pool
            if end is not None:
                try:
                    greedy(model, inputs, stopping_criteria=stop(end))
                finally:
                    assert pool.free_pages == pool.num_pages > 0
            assert not torch.equal(greedy(model, inputs), plain)

    if end is None:
        work()
    else:
        with pytest.raises(end):
            work()
    check()
    assert attributes(model) == wanted and own_memory(model)
    assert torch.equal(greedy(model, inputs), plain)
    assert GenerationMixin.generate is method and registered() == tables


def test_a_model_that_cannot_be_retained_is_as_it_was() -> None:
    model = make_model(CHECKPOINTS["llama"])
    wanted = attributes(model)
    for options in ({"policy": "dbtrimkv"}, {"policy": "nothing"}, {"budget": 0.01}):
        with pytest.raises(MmkvError):
            retain(model, **options)
        assert attributes(model) == wanted and own_memory(model)


def test_two_models_in_two_threads() -> None:
    names, said = ["llama", "qwen3"], {}
    models = {name: make_model(CHECKPOINTS[name]) for name in names}
    options: dict[str, Any] = {"policy": "streamingllm", "budget": 8}
    wanted = {}
    for name in names:
        with retain(models[name], **options):
            wanted[name] = greedy(models[name], prompts_of(name)[0], max_new_tokens=24)

    def work(name: str) -> None:
        with retain(models[name], **options):
            meet.wait()
            said[name] = [
                greedy(models[name], prompts_of(name)[0], max_new_tokens=24) for _ in range(3)
            ]

    meet = threading.Barrier(2)
    threads = [threading.Thread(target=work, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name in names:
        assert all(torch.equal(made, wanted[name]) for made in said[name])


def test_threads_share_a_retained_model() -> None:
    model, prompts = model_of("llama"), prompts_of("llama")
    said: dict[int, Tensor] = {}
    with retain(model, policy="streamingllm", budget=8):
        wanted = [greedy(model, prompt) for prompt in prompts]

        def work(i: int) -> None:
            said[i] = greedy(model, prompts[i])

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(torch.equal(said[i], wanted[i]) for i in range(4))


@torch.no_grad()
def every(model: Any, change: Any) -> None:
    for part in model.parameters():
        change(part)


def plainly(model: Any, inputs: Any, count: int = 12) -> Tensor:
    """What transformers says, whatever has been put in place of ``generate``."""
    return type(model).generate(model, **inputs, max_new_tokens=count, do_sample=False)


FOLLOWED = CHANGES | {"bfloat16": lambda model, _: model.to(torch.bfloat16)}
del FOLLOWED["nothing"], FOLLOWED["an adapter"]  # which is refused, below


@one_in(3)
@pytest.mark.parametrize(
    ("name", "change"),
    [(("llama", "qwen3")[at % 2], change) for at, change in enumerate(sorted(FOLLOWED))],
)
def test_weights_that_change_meanwhile_are_followed(name: str, change: str) -> None:
    """Equal to the model itself, before and after, and no memory of the old weights goes on."""
    model, inputs = make_model(CHECKPOINTS[name]), prompts_of(name)[0]
    held = RetainedCache()
    with retain(model, policy="full"):
        said = model.generate(**inputs, max_new_tokens=6, do_sample=False, past_key_values=held)
        assert torch.equal(said, plainly(model, inputs, 6))
        FOLLOWED[change](model, 1)
        wanted = plainly(model, inputs, 6)
        for _ in range(2):
            made = model.generate(**inputs, max_new_tokens=6, do_sample=False)
            assert torch.equal(made, wanted)
        if not torch.equal(wanted, said):
            with pytest.raises(InputError, match="before weights were changed"):
                model.generate(said, max_new_tokens=2, past_key_values=held)
    assert torch.equal(plainly(model, inputs, 6), wanted)
    assert "generate" not in vars(model)


def test_parts_that_cannot_be_retained_are_refused_meanwhile() -> None:
    """As PEFT puts an adapter around a matrix: refused until it is merged."""
    model, inputs = make_model(CHECKPOINTS["llama"]), prompts_of("llama")[0]
    attention = model.model.layers[0].self_attn
    with retain(model, policy="full"):
        before, plain = attention.q_proj, greedy(model, inputs)
        CHANGES["an adapter"](model, 1)
        for _ in range(2):
            with pytest.raises(MmkvError, match="merge adapters"):
                greedy(model, inputs)
        attention.q_proj = before
        assert torch.equal(greedy(model, inputs), plain)


def test_a_deep_copy_is_a_model_of_its_own() -> None:
    model, inputs = make_model(CHECKPOINTS["llama"]), prompts_of("llama")[0]
    with retain(model, policy="streamingllm", budget=4):
        twin, apart = copy.deepcopy(model), copy.deepcopy([model])[0]
        for each in (twin, apart):
            every(each, lambda p: p.mul_(1.5))
            assert torch.equal(greedy(each, inputs), plainly(each, inputs))
        again = copy.deepcopy(twin)
        every(again, lambda p: p.mul_(0.5))
        assert torch.equal(greedy(again, inputs), plainly(again, inputs))
        with retain(twin, policy="full"):
            assert torch.equal(greedy(twin, inputs), plainly(twin, inputs))
        assert "generate" not in vars(twin)
        with pytest.raises(InputError, match=r"generate\.handle\.close"):
            retain(model, policy="full")
        model.generate.handle.close()
        assert "generate" not in vars(model)
