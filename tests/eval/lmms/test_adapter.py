"""The lmms-eval adapter: arguments, settings, messages, media; replies in this process."""

from __future__ import annotations

import random
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import mmkv
from mmkv.engine.errors import InputError, MmkvError
from mmkv.eval.lmms import contexts
from mmkv.eval.lmms.contexts import context_part
from mmkv.eval.lmms.messages import Frames, conversation, keys, visual_part
from mmkv.eval.lmms.settings import (
    SYSTEM_PROMPT,
    FrameRules,
    LmmsSettings,
    apply_frame_rule,
    sampling_of,
    stop_strings,
    thinks,
)
from mmkv.eval.lmms.tasks import write
from mmkv.generation_config import Generation, generation_of
from mmkv.prompt.media import load_image
from mmkv.prompt.processing import Processor
from mmkv.prompt.template import ChatTemplate
from mmkv.training.data.dialogues import dense
from mmkv.training.data.scenes import make_scene, render
from tests.mmkv.prompt.test_held import OPENED, THOUGHTS
from tests.support.chat_models import CHATML, byte_tokenizer, save_llama, script
from tests.support.lmms_runs import MODEL, needs_lmms_eval


def picture(seed: int) -> Image.Image:
    return render(make_scene(random.Random(seed), "heldout")).resize((96, 64))


def user(*parts: Any) -> dict[str, Any]:
    content = [
        {"type": "text", "text": p} if isinstance(p, str) else {"type": "image", "url": p}
        for p in parts
    ]
    return {"role": "user", "content": content}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": [{"type": "text", "text": text}]}


# --- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"pretrained": "m", "budgets": 3}, "does not know the model argument budgets"),
        ({"pretrained": "m", "device_map": "auto"}, "write device=cuda:0"),
        ({}, "add pretrained="),
        ({"pretrained": "m", "max_num_frames": 0}, "max_num_frames=0 is not a whole number"),
        ({"pretrained": "m", "evict_every": 1.5}, "evict_every=1.5 is not a whole number"),
        ({"pretrained": "m", "fps": "many"}, "fps=many is not a number"),
        ({"pretrained": "m", "template": "never"}, "template=never is unknown; write task or"),
        ({"pretrained": "m", "visual_tokens": 64, "budget": 9}, "leave out budget"),
    ],
)
def test_wrong_model_arguments_are_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        LmmsSettings.of(given)
    assert "\n" not in str(caught.value)


def test_model_arguments_have_their_types() -> None:
    made = LmmsSettings.of({"pretrained": "m", "budget": 64, "fps": 2, "seed": 0, "policy": "None"})
    assert (made.engine.budget, made.fps, made.seed, made.engine.policy) == ("64", 2.0, 0, None)
    assert not made.engine.endless and LmmsSettings.of({"pretrained": "m", "endless": True})


def test_generation_kwargs_follow_the_built_in_adapter() -> None:
    made, ignored = sampling_of(
        {"until": ["\n\n"], "image_aspect_ratio": "pad"}, 7, Generation(), True
    )
    assert (made.max_new_tokens, made.temperature, made.stop) == (128, 0.0, ())
    assert ignored == ["image_aspect_ratio"]
    # Greedy whatever top_p says; some tasks write 0.
    given = {"temperature": 0, "top_p": 0, "do_sample": True}
    made, _ = sampling_of(given, 7, Generation(), True)
    assert (made.temperature, made.top_p, made.top_k) == (0.0, 1.0, 0)
    own = generation_of({"top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}, 2048)
    made, _ = sampling_of({"temperature": 0.7, "top_p": 0.9, "max_new_tokens": 5}, 7, own, True)
    assert (made.top_p, made.top_k, made.max_new_tokens, made.seed) == (0.9, 20, 5, 7)
    assert sampling_of({"until": ["stop"]}, 7, own, False)[0].stop == ()
    assert sampling_of({"temperature": 0.7, "top_p": 0}, 7, own, False)[0].top_p == 0.8


def test_what_a_task_does_not_say_is_the_checkpoints_as_in_transformers() -> None:
    """Penalties in greedy decoding, too; the draw only where the task samples."""
    file = {"do_sample": True, "temperature": 0.6, "repetition_penalty": 1.05, "max_new_tokens": 9}
    own = generation_of(file, 2048)
    made, ignored = sampling_of({"do_sample": False}, 7, own, True)
    assert (made.temperature, made.repetition_penalty, made.max_new_tokens) == (0.0, 1.05, 128)
    assert sampling_of({}, 7, own, True)[0].temperature == 0
    made, ignored = sampling_of(
        {"do_sample": True, "repetition_penalty": 1, "min_p": 0.1}, 7, own, True
    )
    assert (made.temperature, made.top_k, made.min_p, made.repetition_penalty) == (0.6, 50, 0.1, 1)
    assert ignored == []
    assert sampling_of({"temperature": 1}, 7, Generation(), True)[0].top_k == 50
    greedy = generation_of({"do_sample": False}, 2048)
    assert sampling_of({"do_sample": True}, 7, greedy, True)[0].temperature == 1
    assert sampling_of({}, 7, greedy, True)[0].temperature == 0


@pytest.mark.parametrize("name", ["num_beams", "num_return_sequences"])
def test_several_sequences_are_refused(name: str) -> None:
    assert sampling_of({name: 1}, 0, Generation(), True)[1] == []
    with pytest.raises(InputError, match=f"{name}=2; mmkv decodes one sequence"):
        sampling_of({name: 2}, 0, Generation(), True)


def test_blank_lines_do_not_stop() -> None:
    assert stop_strings(["\n\n", "ASSISTANT:", ""]) == ("ASSISTANT:",)
    assert stop_strings("\n\n") == stop_strings(None) == ()
    with pytest.raises(InputError, match="until is 3"):
        stop_strings(3)


# --- messages and media --------------------------------------------------------------------------


def test_visuals_of_every_kind(tmp_path: Path) -> None:
    shown = picture(1)
    shown.save(tmp_path / "a.png")
    pixels = np.asarray(shown)
    content = (tmp_path / "a.png").read_bytes()
    for visual in (
        shown,
        str(tmp_path / "a.png"),
        tmp_path / "a.png",
        content,
        pixels,
        {"bytes": content, "path": None},
        {"bytes": None, "path": tmp_path / "a.png"},
        f"file://{tmp_path}/a.png",
    ):
        asked = {"role": "user", "content": [{"type": "image", "url": visual}]}
        for part in (visual_part(visual), *conversation([asked], "")[0]["content"]):
            assert part["type"] == "image"
            assert np.array_equal(np.asarray(load_image(part["url"])), pixels)
    assert visual_part("film.MP4") == {"type": "video", "url": "film.MP4"}
    film = {"url": "film.mp4", "type": "video"}
    assert visual_part(film) == film
    section = film | {"start_time": 2.0, "end_time": 4, "fps": 1.0, "max_pixels": 9}
    wanted = film | {"video_start": 2.0, "video_end": 4, "fps": 1.0, "max_pixels": 9}
    assert visual_part(section) == wanted
    asked = {"role": "user", "content": [section, {"type": "image", "url": "a", "min_pixels": 1}]}
    one, two = conversation([asked], "")[0]["content"]
    assert one == wanted and two == {"type": "image", "url": "a", "min_pixels": 1}
    assert keys([{"role": "user", "content": [one]}]) != keys([{"role": "user", "content": [film]}])


@pytest.mark.parametrize(
    ("visual", "message"),
    [
        ({"array": [0.0], "sampling_rate": 16000}, "sound"),
        ({"type": "video"}, "names no source"),
        (b"not a picture", "not one that Pillow reads"),
    ],
)
def test_visuals_that_cannot_be_taken(visual: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        visual_part(visual)


def test_the_system_prompt_comes_first_once() -> None:
    (first, second) = conversation([user("a")], "be brief")
    assert first == {"role": "system", "content": [{"type": "text", "text": "be brief"}]}
    assert second["content"] == [{"type": "text", "text": "a"}]
    own = [{"role": "system", "content": "mine"}, user("a")]
    assert conversation(own, "be brief")[0]["content"][0]["text"] == "mine"
    assert conversation([user("a")], "") == [second]
    with pytest.raises(InputError, match="part of type 'audio'"):
        conversation([{"role": "user", "content": [{"type": "audio", "url": "a.wav"}]}], "")


def test_messages_compare_by_their_content() -> None:
    shown = picture(1)
    same = keys(conversation([user(shown.copy(), "a"), assistant(" b\n")], ""))
    assert same == keys(conversation([user(shown, "a"), assistant("b")], ""))
    assert same != keys(conversation([user(picture(2), "a"), assistant("b")], ""))
    assert same != keys(conversation([user(shown, "a "), assistant("b")], ""))
    flat, high = (Image.new("RGB", size) for size in ((2, 1), (1, 2)))  # of the same bytes
    assert keys(conversation([user(flat, "a")], "")) != keys(conversation([user(high, "a")], ""))


@pytest.mark.parametrize(
    ("frames", "size", "wanted"),
    [
        (8, (128, 128), (448, 448)),  # enlarged to 200,704 pixels
        (8, (480, 640), (480, 640)),
        (32, (1080, 1920), (640, 1152)),  # at most 786,432
        (768, (720, 1280), (384, 736)),  # all together at most 0.9 x 128,000 tokens
    ],
)
def test_frames_are_scaled_as_by_the_built_in_adapter(
    frames: int, size: tuple[int, int], wanted: tuple[int, int]
) -> None:
    assert FrameRules().size(frames, *size) == wanted


def test_a_frame_has_a_bound_whatever_a_picture_may_take() -> None:
    for asked, largest in ((10**9, FrameRules.largest), (300_000, 300_000), (None, 768 * 1024)):
        processor = SimpleNamespace(rules=FrameRules())
        apply_frame_rule(processor, LmmsSettings.of({"pretrained": "m", "max_pixels": asked}))
        assert processor.rules.largest == largest


# What is left of a text of 30 letters, a token each, behind a question of 5.
LONG = "abcdefghijklmnopqrstuvwxyz0123"


@pytest.mark.parametrize(
    ("asked", "limit", "left"),
    [
        ({"cut": "middle"}, 20, LONG[:7] + LONG[-8:]),
        ({"cut": "end"}, 20, LONG[:15]),
        ({"cut": "end", "room": 12}, 20, LONG[:8]),
        ({"cut": "end", "most": 10, "omitted": ".."}, 20, f"{LONG[:8]}.."),
        ({"cut": "end", "most": 10, "omitted": ".."}, 11, f"{LONG[:4]}.."),
        ({"most": 10, "omitted": ".."}, 9, f"{LONG[:8]}.."),
        ({"cut": "end"}, 35, LONG),
        ({"cut": "leave"}, 35, LONG),
        ({"cut": "leave"}, 34, None),
    ],
)
def test_what_is_left_of_a_long_text(
    asked: dict[str, Any], limit: int, left: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def render(messages: Any, opening: bool) -> str:
        return "".join(part["text"] for part in messages[0]["content"])

    processor = SimpleNamespace(
        tokenizer=SimpleNamespace(decode=lambda ids, **_: "".join(map(chr, ids))),
        template=SimpleNamespace(render=render),
        encode=lambda text: {"input_ids": torch.zeros(1, len(text))},
    )
    monkeypatch.setattr(contexts, "tokenize", lambda _, text: [*map(ord, text)])
    asked_for = {"type": "text", "text": "Why? "}
    given = [{"role": "user", "content": [asked_for, context_part(LONG, **asked)]}]
    found = contexts.context_of(given, 0)
    engine: Any = SimpleNamespace(processor=processor)
    if left is None:
        with pytest.raises(contexts.LeftOutError, match="35 tokens, 34 are read"):
            contexts.fitted(engine, given, found, limit)
        return
    made, cut = contexts.fitted(engine, given, found, limit)
    assert render(made, True) == f"Why? {left}"
    assert cut == (None if left == LONG else (30, len(left)))


def test_loose_frames_are_a_video() -> None:
    processor = Processor(None, ChatTemplate(byte_tokenizer(), None, parts=False))
    clip = Frames(32).load([picture(1), picture(2)], processor)
    assert clip.frames.shape == (2, 64, 96, 3) and clip.timestamps == [0.0, 0.5]
    with pytest.raises(InputError, match="differ in size"):
        Frames(32).load([picture(1), picture(1).resize((32, 32))], processor)


# The lmms-eval adapter in this process: batches, rounds, stop strings, likelihoods.


TASK, SPLIT = "made_up", "test"


@pytest.fixture(scope="module")
def chat() -> Any:
    """Return the chat form of the bundled model under a small budget."""
    pytest.importorskip("lmms_eval")
    from mmkv.eval.lmms.adapter import MmkvChat

    return MmkvChat(pretrained=str(MODEL), budget=24, dtype="float32", batch_size="3")


@pytest.fixture(scope="module")
def simple() -> Any:
    pytest.importorskip("lmms_eval")
    from mmkv.eval.lmms.adapter import MmkvSimple

    return MmkvSimple(
        pretrained=str(MODEL), policy="full", dtype="float32", system_prompt="", min_pixels=1024
    )


def instance(kind: str, *arguments: Any, number: int = 0) -> Any:
    from lmms_eval.api.instance import Instance

    about = {"task": TASK, "doc_id": number, "repeats": 1}
    return Instance(request_type=kind, arguments=arguments, idx=0, metadata=about)


def requests_of(model: Any, docs: list[Any], give: Any, **gen_kwargs: Any) -> list[Any]:
    """Return chat requests, one per document."""
    model.task_dict = {TASK: {SPLIT: docs}}
    return [
        instance("generate_until", "", give, gen_kwargs, n, TASK, SPLIT, number=n)
        for n in range(len(docs))
    ]


def give(doc: Any) -> Any:
    return doc


@needs_lmms_eval
def test_a_batch_answers_as_one_by_one(chat: Any) -> None:
    film = {"type": "video", "url": [picture(4), picture(5)]}
    docs = [
        [user(picture(1), "what is at row 1, column 1?")],
        [user("picture 1:", picture(2), "picture 2:", picture(3), "name every cell.")],
        [user("what is at row 2, column 2?")],
        [{"role": "user", "content": [film, {"type": "text", "text": "how many objects?"}]}],
    ]
    asked = requests_of(chat, docs, give, max_new_tokens=12)
    together = chat.generate_until(asked)
    alone = [chat.generate_until([request])[0] for request in asked]
    assert [r.text for r in together] == [r.text for r in alone]
    direct = [
        chat.engine.generate(conversation(doc, SYSTEM_PROMPT), mmkv.Sampling(max_new_tokens=12))[0]
        for doc in docs
    ]
    assert [r.text for r in together] == [r.text for r in direct]
    for result, reply in zip(together, direct, strict=True):
        counts = result.token_counts.to_dict()
        assert counts["input_tokens"] == reply.prompt_tokens
        assert counts["cache"]["entries"] == reply.memory.entries <= 24 * chat.engine.spec.rows
        assert counts["cache"]["policy"] == "dbtrimkv"
        assert counts["cache"]["budget"] == "24 entries per row"
    assert chat.engine.cache.pool.free_pages == chat.engine.cache.pool.num_pages


@needs_lmms_eval
def test_a_budget_of_all_text_tokens_and_some_visual_ones(
    chat: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Table 1 of DBTrimKV: beside methods that prune each prompt to V visual tokens."""
    docs = [
        [user(picture(1), "what is at row 1, column 1?")],
        [user("picture 1:", picture(2), "picture 2:", picture(3), "name every cell.")],
    ]
    monkeypatch.setattr(chat, "settings", replace(chat.settings, visual_tokens=5))
    got = chat.generate_until(requests_of(chat, docs, give, max_new_tokens=12))
    pictures, rows = 0, chat.engine.spec.rows
    for doc, result in zip(docs, got, strict=True):
        messages = conversation(doc, SYSTEM_PROMPT)
        inputs = chat.engine.inputs(messages)
        visual = int(inputs["image_grid_thw"].prod(1).sum()) // 4
        budget, pictures = inputs["input_ids"].numel() - visual + 5, pictures + visual
        sampling = mmkv.Sampling(max_new_tokens=12)
        (reply,) = chat.engine.generate(messages, sampling, budget)
        counts = result.token_counts.to_dict()
        assert result.text == reply.text and counts["cache"]["evicted"] > 0
        assert counts["cache"]["entries"] == budget * rows
        assert counts["cache"]["budget"] == "its text tokens and 5 entries per row"

    def rounds(doc: Any, round_idx: int = 0, previous_output: Any = (), **_: Any) -> Any:
        made = [*docs[0], assistant(previous_output[0]), *docs[1]] if round_idx else docs[0]
        return (made, round_idx == 2, list(previous_output), None) if round_idx else made

    (result,) = chat.generate_until_multi_round(requests_of(chat, [{}], rounds, max_new_tokens=4))
    counts = result.token_counts.to_dict()  # the text of all rounds counts
    assert counts["cache"]["entries"] == (counts["input_tokens"] - pictures + 5) * rows
    assert len(counts["cache"]["finish_reason"]) == 2


@needs_lmms_eval
def test_rounds_add_their_own_tokens_only(chat: Any) -> None:
    """Under a budget, where reading the history again would not give the same cache."""
    dialogues = [dense(seed, "heldout", 2, 4, search=False) for seed in range(2)]
    docs = [
        [[render(p) if not isinstance(p, str) else p for p in t.parts()] for t in d]
        for d in dialogues
    ]

    def messages(doc: Any, round_idx: int = 0, previous_output: Any = (), **_: Any) -> Any:
        made: list[Any] = []
        for index, parts in enumerate(doc[: round_idx + 1]):
            made.append(user(*parts))
            if index < round_idx:
                made.append(assistant(previous_output[index]))
        over = round_idx >= len(doc)
        return (made, over, list(previous_output), None) if round_idx else made

    results = chat.generate_until_multi_round(requests_of(chat, docs, messages, max_new_tokens=16))
    for doc, result in zip(docs, results, strict=True):
        texts, tokens = [], 0
        with chat.engine.session() as session:
            for number, parts in enumerate(doc):
                sent = conversation([user(*parts)], "")[0]["content"]
                system = None if number else SYSTEM_PROMPT
                sampling = mmkv.Sampling(max_new_tokens=16)
                texts.append("".join(session.send(sent, system=system, sampling=sampling)))
                tokens += session.last.prompt_tokens
            evicted = session.evicted
        assert result.text == texts
        counts = result.token_counts.to_dict()
        assert counts["input_tokens"] == tokens
        assert counts["cache"]["evicted"] == evicted > 0
    assert chat.engine.cache.pool.free_pages == chat.engine.cache.pool.num_pages


@needs_lmms_eval
def test_mmdu_is_answered_as_by_its_own_loop(chat: Any) -> None:
    """Under a budget: texts, tokens and what was evicted."""
    from mmkv.eval.lmms.tasks import FOLDER, messages
    from mmkv.eval.mmdu.data import find_pictures, read_benchmark
    from mmkv.eval.mmdu.run import answer
    from mmkv.resources import bundled_dialogues

    data = bundled_dialogues()
    dialogues = read_benchmark(data / "benchmark.json", 4)[0]
    give = partial(messages, lmms_eval_specific_kwargs={FOLDER: str(data)})
    asked = requests_of(chat, [d.row for d in dialogues], give, max_new_tokens=24)
    for dialogue, result in zip(dialogues, chat.generate_until_multi_round(asked), strict=True):
        texts, turns = answer(
            chat.engine,
            dialogue,
            find_pictures(dialogue, data),
            mmkv.Sampling(max_new_tokens=24),
            SYSTEM_PROMPT,
        )
        assert result.text == texts
        counts = result.token_counts.to_dict()
        assert counts["input_tokens"] == sum(turn["prompt_tokens"] for turn in turns)
        assert counts["cache"]["evicted"] == turns[-1]["entries_evicted"] > 0


@needs_lmms_eval
def test_samples_do_not_depend_on_the_batch(chat: Any) -> None:
    """Repeats differ; a document's are the same whatever stands before it in this process."""
    docs = [[user(picture(n), "name every cell.")] for n in range(2)]
    gen_kwargs = {"max_new_tokens": 12, "temperature": 3.0}
    first, second = requests_of(chat, docs, give, **gen_kwargs)
    for request in (first, second):
        request.repeats = 2
    together = [r.text for r in chat.generate_until([first, first, second, second])]
    assert len(set(together)) == 4
    twin = copy(second)  # of another task, whose repeats are its own
    twin.task_name = "other"
    assert [r.text for r in chat.generate_until([twin, second, second])][1:] == together[2:]


@needs_lmms_eval
def test_rounds_without_history_start_anew(chat: Any) -> None:
    """The protocol of the shipped tasks; a task may also rewrite what is kept."""

    def messages(doc: Any, round_idx: int = 0, previous_output: Any = (), **_: Any) -> Any:
        asked = [user(picture(round_idx), "name every cell.")]
        kept = [f"{text}!" for text in previous_output]
        return (asked, round_idx == 2, kept, None) if round_idx else asked

    (result,) = chat.generate_until_multi_round(requests_of(chat, [{}], messages, max_new_tokens=6))
    alone = [
        chat.engine.generate(
            conversation([user(picture(n), "name every cell.")], SYSTEM_PROMPT),
            mmkv.Sampling(max_new_tokens=6),
        )[0].text
        for n in range(2)
    ]
    assert result.text == [f"{alone[0]}!!", f"{alone[1]}!"]


@needs_lmms_eval
def test_an_error_names_its_document_and_frees_the_others(chat: Any) -> None:
    missing = {"role": "user", "content": [{"type": "image", "url": "missing.png"}]}
    docs = [[user(picture(1), "name every cell.")], [missing]]
    with pytest.raises(MmkvError, match=rf"task {TASK}, document 1: file not found: missing.png"):
        chat.generate_until(requests_of(chat, docs, give))
    assert chat.engine.cache.pool.free_pages == chat.engine.cache.pool.num_pages


@needs_lmms_eval
def test_the_simple_form_stops_where_the_task_says(simple: Any) -> None:
    simple.task_dict = {TASK: {SPLIT: [{"image": picture(1)}]}}

    def ask(**gen_kwargs: Any) -> str:
        request = instance(
            "generate_until",
            "<image>name every cell.",
            gen_kwargs,
            lambda doc: [doc["image"]],
            0,
            TASK,
            SPLIT,
        )
        return simple.generate_until([request])[0].text

    whole = ask(max_new_tokens=24, until=["\n\n"])
    assert "," in whole
    assert ask(max_new_tokens=24, until=[",", "\n\n"]) == whole.split(",")[0]


@needs_lmms_eval
def test_a_model_that_thinks_is_not_cut_inside_its_thought(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a task's limit of 16 tokens, which the thought alone uses up; one byte is a token."""
    from loguru import logger

    from mmkv.eval.lmms.adapter import MmkvChat

    def ask(bound: int | None = None, **given: int) -> tuple[str, str]:
        doc = [user("which?") | ({"max_new_tokens": bound} if bound else {})]
        model = MmkvChat(pretrained=str(folder), policy="full", dtype="float32", **given)
        script(monkeypatch, model.engine, ["I look at each cell\n</think>\n\nB"])
        said: list[str] = []
        sink = logger.add(said.append, level="WARNING")
        (result,) = model.generate_until(requests_of(model, [doc], give, max_new_tokens=16))
        logger.remove(sink)
        return result.text, "".join(map(str, said))

    folder = save_llama(tmp_path, OPENED)
    text, said = ask()
    assert text == "B"
    assert "replies may have 32768 new tokens, not 16; thinking_floor=0 keeps" in said
    assert said.count("thinking_floor") == 1
    assert ask(bound=8)[0] == "B"  # a bound of the messages is a limit as well
    text, said = ask(bound=99, thinking_floor=0)  # above the task's
    assert text == ""  # not the thought, in which an answer could be found by chance
    assert "1 of 1 replies were cut inside their thought and have no answer; raise" in said


def test_which_templates_think() -> None:
    opening = "<|im_start|>assistant\n<think>\n"
    closed = OPENED.replace(opening, opening + "\n</think>\n\n")
    made = [ChatTemplate(byte_tokenizer(), t, parts=False) for t in (OPENED, THOUGHTS, closed)]
    assert [thinks(one) for one in made] == [True, True, False]
    assert not thinks(ChatTemplate(byte_tokenizer(), CHATML, parts=False))


@needs_lmms_eval
def test_likelihoods_are_those_of_transformers(simple: Any) -> None:
    from lmms_eval.api.instance import unwrap_generation_output
    from transformers import Qwen3VLForConditionalGeneration

    model = Qwen3VLForConditionalGeneration.from_pretrained(MODEL, dtype=torch.float32).eval()
    tokenizer = simple.engine.processor.tokenizer
    question = "how many objects are there?"
    simple.task_dict = {TASK: {SPLIT: [{}]}}
    own = simple.engine.generate([{"role": "user", "content": question}])[0].text
    asked = [(one, []) for one in (" nothing", " red circle, cake", f" {own}")]
    for choice, shown in [*asked, (" three", [picture(1)])]:
        given = (question, choice, lambda doc, shown=shown: shown or None, 0, TASK, SPLIT)
        (result,) = simple.loglikelihood([instance("loglikelihood", *given)])
        inputs = simple.engine.inputs([user(*shown, question)])
        # 0.7.3 makes text of a bare pair; this one reaches the task as it is.
        (loss, greedy), _ = unwrap_generation_output(result)
        tokens = tokenizer(choice.strip(), return_tensors="pt", add_special_tokens=False)
        length = inputs["input_ids"].shape[1]
        for name, column in inputs.items():
            if column.shape[:2] == (1, length):  # of text, of which the choice is more
                more = {"input_ids": tokens["input_ids"]}.get(name, tokens["attention_mask"])
                more = more * 0 if "type_ids" in name else more
                inputs[name] = torch.cat([column, more], 1)
        with torch.inference_mode():
            logits = model(**inputs).logits[0, length - 1 : -1]
        wanted = torch.nn.functional.cross_entropy(logits, tokens["input_ids"][0])
        assert loss == pytest.approx(float(wanted), abs=1e-4)
        assert greedy == (choice.strip() == own)


@needs_lmms_eval
def test_choices_are_scored_by_a_task(simple: Any, tmp_path: Path) -> None:
    """A multiple_choice task of lmms-eval from its file to its score."""
    import json

    from lmms_eval.evaluator import simple_evaluate
    from lmms_eval.tasks import TaskManager

    asked = ["how many objects are there?", "what is at row 1, column 1?", "read the word."]
    rows = [{"question": text, "choices": ["nothing", "cake", "3"], "gold": 0} for text in asked]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    (tmp_path / "choose.yaml").write_text(
        "task: choose\ndataset_path: json\ntest_split: test\noutput_type: multiple_choice\n"
        "dataset_kwargs: {data_files: {test: rows.json}}\n"
        "doc_to_visual: !function helpers.nothing\ndoc_to_text: question\n"
        "doc_to_choice: choices\ndoc_to_target: gold\nmetric_list: [{metric: acc}]\n"
    )
    (tmp_path / "helpers.py").write_text("def nothing(doc):\n    return []\n")
    manager = TaskManager("ERROR", include_path=str(tmp_path), include_defaults=False)
    engine = simple.engine
    try:
        found = simple_evaluate(simple, tasks=["choose"], task_manager=manager, batch_size=1)
    finally:
        simple.engine = engine  # lmms-eval has asked the model to release it
    assert found is not None
    for sample in found["samples"]["choose"]:
        losses = [loss for loss, _ in sample["filtered_resps"]]
        assert sample["acc"] == float(min(losses) == losses[0])
    assert found["results"]["choose"]["acc,none"] == pytest.approx(
        sum(s["acc"] for s in found["samples"]["choose"]) / len(rows)
    )


@needs_lmms_eval
def test_samples_of_a_question_are_scored_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of AIME 2024 to pass@1; of three replies to each of two questions, two and one right."""
    import json

    from lmms_eval.evaluator import simple_evaluate
    from lmms_eval.tasks import TaskManager

    from mmkv.eval.lmms.adapter import MmkvChat

    model = MmkvChat(pretrained=str(save_llama(tmp_path / "llama")), policy="full")
    (tmp_path / "aime24").mkdir()
    rows = [{"id": n, "problem": f"p{n}", "answer": f"20{n}", "year": "2024"} for n in (4, 5)]
    (tmp_path / "aime24" / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert write(["aime24"], tmp_path / "tasks", tmp_path, samples=3) == ["aime24_local"]
    manager = TaskManager("ERROR", include_path=str(tmp_path / "tasks"), include_defaults=False)
    said = [r"\boxed{204}", r"\boxed{0204.0}", "no", r"\boxed{204}", r"\boxed{205}", "205"]
    script(monkeypatch, model.engine, said)
    found = simple_evaluate(model, tasks=["aime24_local"], task_manager=manager, batch_size=1)
    assert found is not None
    first, second = found["samples"]["aime24_local"]
    assert first["filtered_resps"] == [said[:3]] and second["filtered_resps"] == [said[3:]]
    assert first["arguments"][0].startswith("p4\nPlease reason step by step")
    result = found["results"]["aime24_local"]
    assert result["pass_at_1,samples"] == 0.5 and result["answered,samples"] == pytest.approx(4 / 6)
    assert result["pass_at_1_low,samples"] == pytest.approx(1 / 3)
    assert result["pass_at_1_high,samples"] == pytest.approx(2 / 3)


@needs_lmms_eval
def test_texts_that_lmms_evals_response_cache_looks_into() -> None:
    from mmkv.eval.lmms.adapter import LmmsScored, Rounds

    assert Rounds(["", " a "]).strip() == "a" and not Rounds([""]).strip()
    with pytest.raises(InputError, match="without --use_cache"):
        LmmsScored((1.0, True)).strip()


@needs_lmms_eval
def test_the_entry_point_imports_nothing_heavy_and_fits() -> None:
    import subprocess
    import sys

    from lmms_eval.models import get_model, get_model_manifest

    from mmkv.eval.lmms.manifest import manifest

    code = "import sys, mmkv.eval.lmms.manifest; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    assert get_model_manifest("mmkv") == manifest()
    assert not get_model("mmkv").is_simple
    assert get_model("mmkv", force_simple=True).is_simple


# Long contexts: read once, cut where the task asks for it, prompts without a template.

CONTEXT = "row 1: a red circle, a blue square. " * 12


def about(context: dict[str, Any], text: str, **asks: Any) -> list[dict[str, Any]]:
    parts = [{"type": "text", "text": "read this. "}, context, {"type": "text", "text": text}]
    return [{"role": "user", "content": parts, **asks}]


def token_count(model: Any, text: str) -> int:
    return len(model.engine.processor.tokenizer(text, add_special_tokens=False)["input_ids"])


@needs_lmms_eval
def test_a_shared_context_is_read_once(simple: Any) -> None:
    """With an unlimited budget, replies are those of prompts that are read whole."""
    from mmkv.eval.lmms.adapter import MmkvChat

    model = object.__new__(MmkvChat)  # the simple form's engine, in the chat form
    model.__dict__.update(simple.__dict__)
    texts = [" what is at row 1?", " name every cell.", " what is at row 2?"]
    shared = [about(context_part(CONTEXT, shared=True), text) for text in texts]
    plain = [about({"type": "text", "text": CONTEXT}, text) for text in texts]
    whole = model.generate_until(requests_of(model, plain, give, max_new_tokens=8))
    model.settings = replace(model.settings, batch_size=2)
    apart = model.generate_until(requests_of(model, shared, give, max_new_tokens=8))
    assert [one.text for one in apart] == [one.text for one in whole]
    tokens = [[one.token_counts.to_dict() for one in made] for made in (whole, apart)]
    read = [one["input_tokens"] for one in tokens[1]]
    common = tokens[1][0]["cache"]["context_tokens"]
    assert common >= token_count(model, "read this. " + CONTEXT)
    assert "context_tokens" not in tokens[1][1]["cache"]
    assert sum(read) == sum(one["input_tokens"] for one in tokens[0]) - 2 * common
    assert tokens[1][2]["cache"]["tokens_seen"] == tokens[0][2]["cache"]["tokens_seen"]

    def rounds(doc: Any, round_idx: int = 0, previous_output: Any = (), **_: Any) -> Any:
        """Return the second question behind a given answer, not the model's own."""
        first = about(context_part(CONTEXT, shared=True), texts[0])
        made = [*first, assistant("a cake"), user(texts[1])] if round_idx else first
        return (made, round_idx == 2, list(previous_output), None) if round_idx else made

    (result,) = model.generate_until_multi_round(requests_of(model, [{}], rounds, max_new_tokens=8))
    given = [*about({"type": "text", "text": CONTEXT}, texts[0]), assistant("a cake")]
    (alone,) = model.generate_until(
        requests_of(model, [[*given, user(texts[1])]], give, max_new_tokens=8)
    )
    assert result.text == [whole[0].text, alone.text]
    counts = result.token_counts.to_dict()
    seen = [tokens[0][0]["input_tokens"], alone.token_counts.to_dict()["input_tokens"]]
    assert counts["input_tokens"] == sum(seen) - common
    assert model.engine.cache.pool.free_pages == model.engine.cache.pool.num_pages


@needs_lmms_eval
def test_shared_contexts_grow_and_the_oldest_goes(chat: Any) -> None:
    shared = contexts.SharedContexts(chat.engine, 2)

    def read(text: str) -> int:
        given = about(context_part(text, shared=True), " what is at row 1?")
        session, tokens = shared.copy(conversation(given, ""), contexts.context_of(given, 0))
        session.close()
        return tokens

    short, more, other = "row 1: a red circle.", " row 2: a blue square.", "row 1: a cake."
    whole, rest = read(short), token_count(chat, more)
    last = whole + token_count(chat, other) - token_count(chat, short)
    asked = [short + more, short, short + more, short + more, other, short + more, short]
    assert [read(text) for text in asked] == [rest, whole, 0, 0, last, 0, whole]
    shared.close()
    assert chat.engine.cache.pool.free_pages == chat.engine.cache.pool.num_pages


@needs_lmms_eval
def test_a_copy_of_a_shared_context_is_as_good_as_the_context_read_again(chat: Any) -> None:
    """Under a budget, where the context is evicted from before the question comes."""
    context = context_part(CONTEXT, shared=True)
    docs = [about(context, text) for text in (" what is at row 1?", " name every cell.")]
    requests = requests_of(chat, docs, give, max_new_tokens=8)
    together = chat.generate_until(requests)
    alone = [chat.generate_until([request])[0] for request in requests]
    assert [one.text for one in together] == [one.text for one in alone]
    facts = [[one.token_counts.to_dict() for one in made] for made in (together, alone)]
    shared = facts[0][0]["cache"]["context_tokens"]
    assert facts[1][1]["input_tokens"] == facts[0][1]["input_tokens"] + shared
    ours, theirs = (made[1]["cache"] for made in facts)
    assert ours["evicted"] == theirs["evicted"] > 0
    assert ours["entries"] == theirs["entries"] <= 24 * chat.engine.spec.rows


@needs_lmms_eval
def test_a_context_that_is_too_long_is_cut_or_refused(chat: Any) -> None:
    settings = chat.settings
    chat.settings = replace(settings, max_prompt_tokens=80)
    text = " what is at row 1?"
    parts = [
        context_part(CONTEXT, cut="middle"),
        context_part(CONTEXT, cut="end", room=40),
        context_part(CONTEXT, cut="end", most=20, omitted=" ... cut"),
        context_part("row 1: cake.", cut="middle"),
    ]
    try:
        docs = [about(part, text, max_new_tokens=2) for part in parts]
        made = chat.generate_until(requests_of(chat, docs, give, max_new_tokens=9))
        counts = [one.token_counts.to_dict() for one in made]
        assert all(one["output_tokens"] <= 2 for one in counts)
        whole = token_count(chat, CONTEXT)
        cuts = [one["cache"].get("cut") for one in counts]
        assert [cut and cut[0]["tokens"] for cut in cuts] == [whole, whole, whole, None]
        assert 76 <= counts[0]["input_tokens"] <= 80
        assert cuts[1][0]["kept"] <= 40 and cuts[2][0]["kept"] <= 20
        left = [about(context_part(CONTEXT, cut="leave"), text), docs[3]]
        left_out, kept = chat.generate_until(requests_of(chat, left, give, max_new_tokens=9))
        assert left_out.text.startswith("[left out: the prompt has ") and kept.text == made[3].text
        (long,) = docs[:1]
        long[0]["content"][0]["text"] = "read this. " * 60
        with pytest.raises(InputError, match=r"document 0: all but the context takes the whole"):
            chat.generate_until(requests_of(chat, [long], give))
    finally:
        chat.settings = settings
    endless = [about(context_part(CONTEXT * 200), text)]
    with pytest.raises(MmkvError, match=r"document 0: .* the model was trained for 8,192"):
        chat.generate_until(requests_of(chat, endless, give))
    assert chat.engine.cache.pool.free_pages == chat.engine.cache.pool.num_pages


@needs_lmms_eval
def test_a_raw_prompt_has_no_template(chat: Any) -> None:
    asks = {"raw": True, "begin": " answer:", "stop": [" "]}
    doc = about(context_part("row 1: cake."), " what is at row 1?", **asks)
    requests = requests_of(chat, [doc], give, max_new_tokens=6)
    (made,) = chat.generate_until(requests)
    text = "read this. row 1: cake. what is at row 1? answer:"
    assert made.token_counts.to_dict()["input_tokens"] == token_count(chat, text)
    assert " " not in made.text
    whole = chat._ask(requests[0], doc, mmkv.Sampling.greedy(stop=("!",)))
    assert whole.sampling.stop == ("!", " ")
    settings = chat.settings
    chat.settings = replace(settings, template="always")
    try:
        (framed,) = chat.generate_until(requests)
    finally:
        chat.settings = settings
    wanted = conversation(doc, SYSTEM_PROMPT)
    whole = chat.engine.processor.template.render(wanted, opening=True)
    assert framed.token_counts.to_dict()["input_tokens"] == token_count(chat, whole)
