"""What people pass to ``generate``: streamers, processors, criteria, seeds, copies, pipelines."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList, TextIteratorStreamer

import mmkv.hf.loop
from mmkv.engine.backends.cuda.kernels.sample import Draw, columns_of, sample
from mmkv.hf import retain
from tests.support.chat_models import picture, save_llama, save_llava
from tests.support.factories import pad_left
from tests.support.hf_models import TOKENS, greedy, model_of, prompts_of

FULL: dict[str, Any] = {"policy": "full"}


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """Return a text model with a tokenizer, one token a byte."""
    folder = save_llama(tmp_path_factory.mktemp("llama"))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, transformers.AutoTokenizer.from_pretrained(folder)


def batch() -> dict[str, Tensor]:
    return pad_left(prompts_of("qwen3_vl"))


class Ban(transformers.LogitsProcessor):
    """Forbids the latest token, and counts its calls: what it sees is what generate returns."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.seen.append(input_ids)
        return scores.scatter(1, input_ids[:, -1:], -torch.inf)


class EndAtFive(transformers.StoppingCriteria):
    """Ends rows one after the other: the last of four after eight tokens."""

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        assert scores is None or len(scores) > 0
        said = input_ids.shape[1] - self.width
        return torch.arange(4) + 5 <= said

    width = 0


def test_custom_processors_and_criteria() -> None:
    model, inputs = model_of("qwen3_vl"), batch()
    EndAtFive.width = inputs["input_ids"].shape[1]

    def run(**more: Any) -> tuple[Any, Ban]:
        ban = Ban()
        made = greedy(
            model,
            inputs,
            logits_processor=LogitsProcessorList([ban]),
            stopping_criteria=StoppingCriteriaList([EndAtFive()]),
            return_dict_in_generate=True,
            output_scores=True,
            repetition_penalty=1.3,
            **more,
        )
        return made, ban

    for more in ({}, {"eos_token_id": [3], "pad_token_id": 2}):
        wanted, theirs = run(**more)
        with retain(model, **FULL):
            found, ours = run(**more)
        assert torch.equal(found.sequences, wanted.sequences)
        assert found.sequences.shape[1] == EndAtFive.width + 8
        assert len(found.scores) == len(wanted.scores) == 8
        assert [ids.tolist() for ids in ours.seen] == [ids.tolist() for ids in theirs.seen]
        # With an end token, rows that have ended take no more steps here.
        alive = 4 if not more else 1
        for one, two in zip(found.scores, wanted.scores, strict=True):
            torch.testing.assert_close(one[-alive:], two[-alive:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "settings", [{"temperature": 0.7, "top_k": 20, "top_p": 0.9}, {"min_p": 0.1}]
)
def test_a_seed_draws_the_same_tokens_as_in_transformers(settings: dict[str, Any]) -> None:
    model, inputs = model_of("qwen3_vl"), batch()

    def draw(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return greedy(model, inputs, do_sample=True, num_return_sequences=3, **settings)

    wanted = [draw(0), draw(1)]
    with retain(model, **FULL):
        assert [torch.equal(draw(seed), wanted[seed]) for seed in (0, 1)] == [True, True]
    assert not torch.equal(*wanted)


def test_copies_share_one_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompts = model_of("llava"), prompts_of("llava")
    with retain(model, gates="random", budget=6) as handle:
        read: list[int] = []
        turns = handle.engine.family.turns
        monkeypatch.setattr(
            handle.engine.family,
            "turns",
            lambda rows, *more: read.append(len(rows)) or turns(rows, *more),
        )
        made = greedy(
            model,
            pad_left(prompts),
            do_sample=True,
            top_k=1,
            num_return_sequences=3,
            return_dict_in_generate=True,
        )
        alone = greedy(model, pad_left(prompts))
        assert torch.equal(made.sequences, alone.repeat_interleave(3, 0)) and read == [4, 4]
        kept = made.past_key_values.retained()
        assert len(kept) == 12
        for row in (1, 2):
            for one, two in zip(kept[0], kept[row], strict=True):
                assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def stream(model: Any, inputs: Any, tokenizer: Any, **options: Any) -> tuple[list[str], list[Any]]:
    """Return the pieces of text that a streamer gives, and what the thread raised."""
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=30)
    errors: list[Any] = []

    def work() -> None:
        try:
            greedy(model, inputs, streamer=streamer, **options)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    pieces = list(streamer)
    thread.join()
    return pieces, errors


def test_streaming(chat: tuple[Any, Any]) -> None:
    model, tokenizer = chat
    inputs = tokenizer("the quick brown fox", return_tensors="pt")
    wanted = stream(model, inputs, tokenizer)
    with retain(model, **FULL):
        assert stream(model, inputs, tokenizer) == wanted

        # A stream whose call fails ends, and so does one that is refused.
        class Broken(transformers.LogitsProcessor):
            def __call__(self, *_: Any) -> Tensor:
                raise ValueError("broken")

        errors = stream(model, inputs, tokenizer, logits_processor=LogitsProcessorList([Broken()]))[
            1
        ]
        assert [str(error) for error in errors] == ["broken"]
        errors = stream(model, inputs, tokenizer, num_beams=2)[1]
        assert "beam search" in str(errors[0])
    assert len("".join(wanted[0])) > 0 and wanted[1] == []


def test_stop_strings(chat: tuple[Any, Any]) -> None:
    model, tokenizer = chat
    inputs = tokenizer("once upon a time", return_tensors="pt")
    letters = tokenizer("abcdefghijklmnopqrstuvwxyz")["input_ids"]
    only = {"suppress_tokens": [i for i in range(len(tokenizer)) if i not in letters]}
    plain = greedy(model, inputs, **only)
    word = tokenizer.decode(plain[0, -6:-4])
    options = {"stop_strings": [word], "tokenizer": tokenizer, **only}
    wanted = greedy(model, inputs, **options)
    with retain(model, **FULL):
        assert torch.equal(greedy(model, inputs, **options), wanted)
    assert wanted.shape[1] < plain.shape[1]


def test_the_pipeline(tmp_path: Path) -> None:
    folder = save_llava(tmp_path)
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    processor = transformers.AutoProcessor.from_pretrained(folder)
    processor.tokenizer.padding_side = "left"
    ask = transformers.pipeline("image-text-to-text", model=model, processor=processor)
    content = [{"type": "image", "image": picture()}, {"type": "text", "text": "what is this?"}]
    one = [{"role": "user", "content": content}]
    two = [{"role": "user", "content": [content[0], content[1], content[0]]}]
    options = {"generate_kwargs": {"do_sample": False, "max_new_tokens": 8}}
    wanted = ask(text=one, **options), ask(text=[one, two], batch_size=2, **options)
    with retain(model, **FULL) as handle:
        assert (ask(text=one, **options), ask(text=[one, two], batch_size=2, **options)) == wanted
        assert handle.memory().rows[0].by_modality["image"] == 16 * handle.engine.spec.rows


def test_steps_in_bursts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU with a graph: tokens come several at a time, and are the same."""
    model, inputs = model_of("qwen3_vl"), batch()
    plain = greedy(model, inputs, max_new_tokens=37)
    width = inputs["input_ids"].shape[1]
    ends = {
        "eos_token_id": [int(plain[1, width + 3]), int(plain[0, width + 20])],
        "pad_token_id": 1,
    }
    wanted = greedy(model, inputs, max_new_tokens=37, **ends)
    counted: list[int] = []
    with retain(model, **FULL) as handle:
        engine = handle.engine
        many = engine.decode_many
        monkeypatch.setattr(
            engine, "decode_many", lambda *call: counted.append(call[2]) or many(*call)
        )
        monkeypatch.setattr(mmkv.hf.loop, "in_bursts", lambda engine: True)
        assert torch.equal(greedy(model, inputs, max_new_tokens=37), plain)
        assert counted == [16, 16, 4]
        made = greedy(model, inputs, max_new_tokens=37, return_dict_in_generate=True, **ends)
        assert torch.equal(made.sequences, wanted)
        held = [row.ids for row in made.past_key_values.rows]
        for row, ids in enumerate(made.sequences.tolist()):
            own = ids[width - int(inputs["attention_mask"][row].sum()) :]
            ended = [
                i for i, token in enumerate(ids) if i >= width and token in ends["eos_token_id"]
            ]
            said = own if not ended else own[: len(own) - len(ids) + ended[0] + 1]
            assert held[row] == said[:-1] and made.past_key_values.rows[row].pending == said[-1]
        torch.manual_seed(3)
        first = greedy(model, inputs, do_sample=True, temperature=0.8, top_k=9, top_p=0.8)
        torch.manual_seed(3)
        again = greedy(model, inputs, do_sample=True, temperature=0.8, top_k=9, top_p=0.8)
        assert torch.equal(first, again) and not torch.equal(first, plain[:, : first.shape[1]])
        # A criterion or a processor of one's own looks at every token.
        counted.clear()
        greedy(model, inputs, repetition_penalty=1.2)
        greedy(model, inputs, max_time=60.0)
        assert counted == []


@pytest.mark.parametrize(
    "settings",
    [
        {"top_k": 5},
        {"top_k": 0, "top_p": 0.6},
        {"temperature": 0.7, "top_k": 9, "top_p": 0.8},
        {"top_k": 0, "min_p": 0.2},
        {"temperature": 1.3, "top_k": 12, "top_p": 0.9, "min_p": 0.1},
    ],
    ids=str,
)
def test_bursts_draw_from_the_distribution_of_transformers(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the graph's sampler is given, against the processors that transformers made."""
    model, inputs = model_of("qwen3_vl"), batch()
    draws: list[Draw] = []
    chains: list[LogitsProcessorList] = []
    prepared = mmkv.hf.loop._Burst.of.__func__

    def seen(cls: Any, engine: Any, how: Any, rows: int) -> Any:
        chains.append(how.processors)
        return prepared(cls, engine, how, rows)

    with retain(model, **FULL) as handle:
        many = handle.engine.decode_many
        monkeypatch.setattr(mmkv.hf.loop, "in_bursts", lambda engine: True)
        monkeypatch.setattr(mmkv.hf.loop._Burst, "of", classmethod(seen))
        monkeypatch.setattr(
            handle.engine, "decode_many", lambda *call: draws.extend(call[4]) or many(*call)
        )
        greedy(model, inputs, do_sample=True, **settings)
    assert draws and len(chains) == 1
    row = 3 * torch.randn(1, 60, generator=torch.Generator().manual_seed(1))
    wanted = chains[0](inputs["input_ids"], row.clone()).softmax(-1)[0]
    count = 2000
    columns, _ = columns_of([draws[0]] * count, row.device)
    noise = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    shares = torch.bincount(sample(row.expand(count, -1), columns, noise), minlength=60) / count
    assert ((shares - wanted).abs() <= 2 / count).all() and not shares[wanted == 0].any()


def test_processors_in_another_order_look_at_every_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph's sampler has one order: the user's own top-p before top-k goes step by step."""
    model, inputs = model_of("qwen3_vl"), batch()
    own = [transformers.TopPLogitsWarper(0.5), transformers.TopKLogitsWarper(3)]

    def run() -> Tensor:
        torch.manual_seed(5)
        chain = LogitsProcessorList(own)
        return greedy(model, inputs, do_sample=True, top_k=0, logits_processor=chain)

    wanted = run()
    with retain(model, **FULL) as handle:
        monkeypatch.setattr(mmkv.hf.loop, "in_bursts", lambda engine: True)
        monkeypatch.setattr(handle.engine, "decode_many", None)  # not callable
        assert torch.equal(run(), wanted)


def test_a_reply_ends_at_the_last_position() -> None:
    """512 positions: the row that is there ends, as if it had met an end token."""
    model = model_of("llama")
    ids = torch.randint(3, 140, (2, 506), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :20] = 0
    with retain(model, policy="streamingllm", budget=16), pytest.warns(UserWarning, match="row 0"):
        made = greedy(
            model, {"input_ids": ids, "attention_mask": mask}, eos_token_id=1, pad_token_id=0
        )
    said = made[:, 506:]
    assert said.shape == (2, TOKENS) and (said[0, 7:] == 0).all() and (said[1] != 0).all()


@pytest.mark.parametrize("bursts", [False, True])
def test_the_host_waits_once_a_step(bursts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside what the engine's steps read; in bursts once a burst."""
    model, inputs = model_of("qwen3_vl"), batch()
    plain = greedy(model, inputs, max_new_tokens=33, eos_token_id=[1], pad_token_id=1)
    reads: list[str] = []
    loop = mmkv.hf.loop.Loop
    looking = [False]

    def watched(call: Any, name: str) -> Any:
        def counting(*given: Any, **named: Any) -> Any:
            if looking[0]:
                reads.append(name)
            return call(*given, **named)

        return counting

    def during(call: Any, look: bool) -> Any:
        def calling(*given: Any, **named: Any) -> Any:
            before, looking[0] = looking[0], look
            try:
                return call(*given, **named)
            finally:
                looking[0] = before

        return calling

    for name in ("tolist", "item", "cpu", "__bool__", "__int__", "__index__"):
        monkeypatch.setattr(torch.Tensor, name, watched(getattr(torch.Tensor, name), name))
    monkeypatch.setattr(loop, "run", during(loop.run, True))
    monkeypatch.setattr(mmkv.hf.loop, "in_bursts", lambda engine: bursts)
    with retain(model, **FULL) as handle:
        for name in ("decode", "decode_many"):
            monkeypatch.setattr(handle.engine, name, during(getattr(handle.engine, name), False))
        made = greedy(model, inputs, max_new_tokens=33, eos_token_id=[1], pad_token_id=1)
    assert torch.equal(made, plain)
    assert reads == ["tolist"] * (3 if bursts else 33)
