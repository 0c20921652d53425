"""Sampling, as a checkpoint asks for it; tokens as text; logits that are no numbers."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedTokenizerFast
from transformers.generation import (
    LogitsProcessorList,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import mmkv
from mmkv import Engine, Session
from mmkv.calls.tools import Tool
from mmkv.detokenizer import Detokenizer, StopStrings, token_bytes
from mmkv.engine.backends.cuda import GraphRunner
from mmkv.engine.backends.cuda.kernels.sample import (
    Draw,
    PenaltyState,
    columns_of,
    penalise,
    sample,
)
from mmkv.engine.errors import BROKEN, InputError, ModelError, NotFiniteError
from mmkv.engine.read_ids import mask_of, with_ids
from mmkv.generation_config import _FOLLOWED, _HARMLESS, Generation, generation_of
from mmkv.reply import TokenLogprob
from mmkv.sampling import Sampler, Sampling, Settled, _likely, distribution, likeliest_of
from mmkv.scheduler import Limits, Scheduler
from mmkv.scheduler.conversation import CachedConversation
from mmkv.scheduler.replies import EngineExecutor, ReplyJob, message
from mmkv.server.reply import spell
from tests.support.bursts import Bursts
from tests.support.chat_models import picture, save_llama, save_qwen3_vl, watch
from tests.support.sessions import state


def test_stop_strings_over_piece_borders() -> None:
    rng = random.Random(1)
    for _ in range(500):
        text = "".join(rng.choice("abc") for _ in range(20))
        stops = ["".join(rng.choice("abc") for _ in range(rng.randint(1, 4))) for _ in range(2)]
        cuts = [0, *sorted(rng.randint(0, 20) for _ in range(4)), 20]
        matcher = StopStrings(stops)
        shown = "".join(matcher.push(text[a:b]) for a, b in pairwise(cuts))
        shown += matcher.flush()
        ends = [text.find(stop) for stop in stops if stop in text]
        assert (matcher.hit in stops) == bool(ends)
        assert text.startswith(shown + (matcher.hit or ""))
        if len(ends) < 2 or len(set(map(len, stops))) == 1:
            assert shown == (text[: min(ends)] if ends else text)
        else:  # two stops may overlap: whichever is complete first ends the text
            assert shown in {text[:end] for end in ends}


@pytest.mark.parametrize("spread", [0.0, 0.5, 3.0, 12.0])  # from equal logits to peaked ones
@pytest.mark.parametrize(("top_k", "min_p"), [(0, 0.0), (7, 0.0), (50, 0.2), (51, 0.9), (1, 1.0)])
def test_the_distribution_is_its_definition(top_k: int, min_p: float, spread: float) -> None:
    """In float64; which of equal logits stay at top-p's edge is open."""
    logits = torch.randn(50, generator=torch.Generator().manual_seed(0)) * spread
    tail = torch.zeros(50)  # most tokens have little each, and nearly half together
    tail[3] = 0.8 * math.log(0.6 * 49 / 0.4)
    for row in (logits, logits.round(), tail):
        for top_p in (1.0, 0.9, 0.5, 0.3, 1e-3):
            wanted = (row.double() / 0.8).softmax(-1).sort(descending=True).values
            if top_k:
                wanted = wanted[wanted >= wanted[min(top_k, 50) - 1]]
            wanted /= wanted.sum()
            if top_p < 1:
                wanted = wanted[wanted.cumsum(0) - wanted < top_p - 1e-9]
            wanted = wanted[wanted >= min_p * wanted.max() * (1 - 1e-6)]
            sampling = Sampling(temperature=0.8, top_k=top_k, top_p=top_p, min_p=min_p)
            made = distribution(row, sampling).double()
            kept = made > 0
            share = (row.double() / 0.8).softmax(-1) * kept
            torch.testing.assert_close(made, share / share.sum(), rtol=1e-5, atol=1e-7)
            assert int(kept.sum()) == len(wanted[wanted > 1e-38])
            assert bool(kept.all()) or row[kept].min() >= row[~kept].max()


def test_draws_follow_the_distribution_and_the_seed() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1e9])
    sampling = Sampling(temperature=1.0, seed=7)
    draws = [Sampler(sampling).draw(logits) for _ in range(3)]
    assert len(set(draws)) == 1
    sampler = Sampler(sampling)
    counts = torch.bincount(torch.tensor([sampler.draw(logits) for _ in range(4000)]), minlength=4)
    assert torch.allclose(counts / 4000, logits.softmax(-1), atol=0.03)
    torch.manual_seed(0)
    before = torch.rand(1)
    torch.manual_seed(0)
    Sampler(Sampling(temperature=1.0, seed=3)).draw(logits)
    assert torch.rand(1) == before  # the process-wide random state is not used
    assert Sampler(Sampling()).draw(logits) == 2


class _Parts(TorchDispatchMode):
    """Counts the most tensors that one operation returns."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.most = max(self.most, len(made) if isinstance(made, (tuple, list)) else 1)
        return made


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_tensor_is_taken_apart_to_draw_a_token(temperature: float) -> None:
    """A tensor that Python iterates becomes one tensor for each token of the vocabulary."""
    sampler = Sampler(Sampling(temperature=temperature, top_k=5, top_p=0.9, seed=1), never=[2])
    with _Parts() as parts:
        sampler.draw(torch.randn(1000, generator=torch.Generator().manual_seed(0)))
    assert 1 <= parts.most <= 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_new_tokens": 0},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"seed": -1},
        {"stop": ("",)},
    ],
)
def test_settings_out_of_range(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        Sampling(**wrong)


def test_rows_that_are_read_at_once_draw_as_alone() -> None:
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    logits[1, 6] = 99.0  # what is never drawn
    logits[2, 3] = torch.nan
    logits[3, 5] = torch.inf
    sampler = Sampler(Sampling(), never=[6])
    for row, read in zip(logits, likeliest_of(logits), strict=True):
        if row.isfinite().all():
            assert sampler.draw(row, row, read) == sampler.draw(row) != 6
            assert sampler.draw(row, -row, read) == int(row.argmin())
        else:
            for given in (read, None):
                with pytest.raises(NotFiniteError):
                    sampler.draw(row, row, given)


# What a checkpoint's generation_config.json asks for, and penalties: transformers is right.


DEVICE = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a text model that soon repeats itself where nothing keeps it from that."""
    return save_llama(tmp_path_factory.mktemp("llama"))


def engine_of(folder: Path, config: dict[str, Any], **options: Any) -> Engine:
    (folder / "generation_config.json").write_text(json.dumps(config))
    options = {"policy": "full", "device": "cpu"} | options
    return Engine.from_pretrained(folder, **options)


def transformers_says(folder: Path, ids: torch.Tensor, **more: Any) -> list[int]:
    """Return what ``generate`` makes of the file that lies in the folder."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    mask = torch.ones_like(ids)
    made = model.generate(ids, attention_mask=mask, max_new_tokens=24, pad_token_id=0, **more)
    return made[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"repetition_penalty": 1.3},
        {"do_sample": False, "temperature": 0.6, "top_p": 0.9},
        {"do_sample": True, "top_k": 1, "repetition_penalty": 1.1},
        {"do_sample": True, "min_p": 1.0, "temperature": 0.7},
        {"bad_words_ids": [[3], [120, 121]], "suppress_tokens": [7]},
        {"repetition_penalty": 1.2, "eos_token_id": [65, 70, 200]},
    ],
    ids=str,
)
def test_replies_without_settings_are_those_of_transformers(
    folder: Path, config: dict[str, Any]
) -> None:
    engine = engine_of(folder, config)
    ends = config.get("eos_token_id", engine.family.eos_token_ids)
    words = "what is the colour of the third shape?"
    talk = [{"role": "user", "content": words}]
    ids = engine.inputs(talk)["input_ids"]
    more = {} if "eos_token_id" in config else {"eos_token_id": list(ends)}
    wanted = transformers_says(folder, ids, **more)
    wanted = wanted[: next((i for i, one in enumerate(wanted) if one in ends), len(wanted))]
    (reply,) = engine.generate(talk, Sampling(max_new_tokens=24))
    assert reply.token_ids == wanted
    session = engine.session()
    list(session.send(words, sampling=Sampling(max_new_tokens=24)))
    assert session.last is not None and session.last.token_ids == wanted


def test_penalties_count_the_whole_conversation(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over two turns, after a fork, from a file: all as transformers sees the ids."""
    engine = engine_of(folder, {"repetition_penalty": 1.4})
    session, few, fed = engine.session(), Sampling(max_new_tokens=12), watch(monkeypatch)
    list(session.send("hello", sampling=few))
    path = folder.parent / "talk.mmkv"
    session.save(path)
    with session.fork() as fork:
        list(fork.send("and now?", sampling=Sampling(max_new_tokens=1)))
    wanted = transformers_says(folder, torch.tensor([fed]))[:12]
    for one in (session.fork(), engine.load_session(path)[0], session):
        list(one.send("and now?", sampling=few))
        assert one.last is not None and one.last.token_ids == wanted


def test_what_was_evicted_still_counts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(folder, {}, policy="streamingllm", budget=6, prefill_chunk=8)
    fed, session = watch(monkeypatch), engine.session()
    session.undo_depth = 1
    list(session.send("a long question about shapes", sampling=Sampling(max_new_tokens=9)))
    assert session.evicted > 0
    size, before = engine.family.vocab_size, session.read_ids
    assert set(mask_of(session.read_ids, size).nonzero()[0]) == set(fed)
    list(session.send("more?", sampling=Sampling(max_new_tokens=3)))
    assert set(mask_of(session.read_ids, size).nonzero()[0]) == set(fed) != set()
    assert session.undo() and session.read_ids == before


def test_the_ids_of_a_burst_count(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a graph decodes: the same tokens, and the same ids behind them."""
    settings = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3}
    made = []
    for burst in (False, True):
        engine = engine_of(folder, settings)
        if burst:
            monkeypatch.setattr(type(engine), "many_path", "graph")
        session = engine.session()
        for words in ("hello", "go on"):
            list(session.send(words, sampling=Sampling(max_new_tokens=40)))
            assert session.last is not None
            made.append((session.last.token_ids, session.read_ids))
        assert (engine.backends.cuda.runner is not None) == burst
    assert made[:2] == made[2:] and len(made[0][0]) == 40


@pytest.mark.parametrize("seed", range(4))
def test_penalties_and_filters_are_transformers_processors(seed: int) -> None:
    """On the host and in the graph's sampler, in transformers' order."""
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(0, 4, (1, 200)).astype(np.float32))
    if seed == 3:
        logits = logits.round()  # ties
    prompt = rng.integers(0, 200, 30)
    reply = logits[0].topk(9).indices[rng.integers(0, 9, 20)].tolist()  # likely ones, repeatedly
    settings: dict[str, Any] = {"temperature": 0.8, "top_k": 60, "top_p": 0.9, "min_p": 0.05}
    ids = torch.tensor([[*prompt.tolist(), *reply]])
    scores = RepetitionPenaltyLogitsProcessor(1.3)(ids, logits.clone())
    # OpenAI's two, over the reply alone (platform.openai.com, "presence and frequency penalties").
    for token in reply:
        scores[0, token] -= 0.3
    for token in set(reply):
        scores[0, token] -= 0.7
    chain = [TemperatureLogitsWarper(0.8), TopKLogitsWarper(60), TopPLogitsWarper(0.9)]
    wanted = LogitsProcessorList([*chain, MinPLogitsWarper(0.05)])(ids, scores).softmax(-1)[0]
    penalties = {"repetition": 1.3, "presence": 0.7, "frequency": 0.3}

    sampler = Sampler(
        Settled(
            repetition_penalty=1.3, presence_penalty=0.7, frequency_penalty=0.3, **settings, seed=1
        )
    )
    sampler.begin(with_ids(0, prompt))
    for token in reply:
        sampler.note_token(token)
    made = np.zeros(200)
    kept, weight = _likely(sampler._allowed(logits[0].numpy()), sampler.sampling)
    made[kept] = weight / weight.sum()
    np.testing.assert_allclose(made, wanted.numpy(), atol=2e-6)

    draw = Draw(**settings, **penalties, read=with_ids(0, prompt)).after(reply)
    count = 4000
    columns, _ = columns_of([draw] * count, DEVICE)
    said = PenaltyState.empty(count, 200, DEVICE)
    said.fill([draw])
    said.read[:], said.count[:] = said.read[0].clone(), said.count[0].clone()
    rows = penalise(logits.expand(count, -1), columns, said)
    torch.testing.assert_close(rows[0], scores[0], rtol=1e-6, atol=1e-6)
    noise = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    shares = torch.bincount(sample(rows, columns, noise), minlength=200) / count
    assert ((shares - wanted).abs() <= 2 / count).all() and not shares[wanted == 0].any()
    # The next token counts, too; that of an idle slot does not.
    said.add(torch.tensor([5] * count), torch.arange(count) > 0)
    assert said.count[1, 5] == said.count[0, 5] + 1 and bool(said.read[1, 5])


def test_bad_words_are_transformers() -> None:
    words = [[4], [1, 2], [7, 8, 9]]
    processor = NoBadWordsLogitsProcessor(words, eos_token_id=torch.tensor([0]))
    sampler = Sampler(Settled(bad_words=tuple(map(tuple, words))))
    said = [5]  # transformers 5.17 lets a word end where nothing is said before it
    for token in [7, 8, 1, 7, 8, 3]:
        sampler.note_token(token)
        said.append(token)
        wanted = processor(torch.tensor([said]), torch.zeros(1, 12))[0]
        assert sampler._allowed(np.zeros(12, np.float32)).tolist() == wanted.tolist()


def test_every_field_of_transformers_is_followed_harmless_or_named() -> None:
    fields = set(transformers.GenerationConfig().to_dict())
    odd = fields - _FOLLOWED - _HARMLESS
    for name in odd:
        made = generation_of({name: 3}, 100)
        assert made.ignored == (name,) and name in str(made.unfollowed)
    neutral = transformers.GenerationConfig()._get_default_generation_params()
    neutral.pop("max_length")
    assert generation_of(neutral, 100).ignored == ()
    assert generation_of({"max_length": 100}, 100).ignored == ()
    assert generation_of({"max_length": 20}, 100).ignored == ("max_length",)


def test_a_server_samples_unless_the_file_says_no() -> None:
    for file, here, served in (
        ({}, 0.0, 1.0),
        ({"temperature": 0.6}, 0.0, 0.6),
        ({"do_sample": True}, 1.0, 1.0),
        ({"do_sample": True, "temperature": 1e-6}, 1e-6, 1e-6),
        ({"do_sample": False, "temperature": 0.6}, 0.0, 0.0),
    ):
        made = generation_of(file, 100)
        assert (made.sampling.temperature, made.served.temperature) == (here, served)
    assert generation_of({"do_sample": True}, 100).sampling.top_k == 50  # transformers' default
    assert generation_of({}, 100) == Generation() and not Generation().notes


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": "hot"},
        {"repetition_penalty": 0},
        {"top_p": 1.5},
        {"top_k": 2.5},
        {"do_sample": "yes"},
        {"bad_words_ids": [3]},
        {"suppress_tokens": 3},
        {"max_new_tokens": 0},
        {"stop_strings": [""]},
    ],
    ids=str,
)
def test_values_that_cannot_be_are_one_line(wrong: dict[str, Any], folder: Path) -> None:
    with pytest.raises(ModelError, match=r"generation_config\.json") as caught:
        engine_of(folder, wrong)
    assert "\n" not in str(caught.value) and "--no-generation-config" in str(caught.value)
    (folder / "generation_config.json").write_text(json.dumps(wrong)[:-1])  # cut off
    with pytest.raises(ModelError, match=r"cannot be read .*; get it again, or leave it out"):
        Engine.from_pretrained(folder, policy="full", device="cpu")
    made = engine_of(folder, wrong, generation_config=False)
    assert made.default_sampling == Sampling.greedy()


def test_a_caller_decides_over_the_file() -> None:
    file = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "stop_strings": ["END"]}
    own = generation_of(file | {"repetition_penalty": 1.2}, 100).sampling
    assert Sampling(temperature=0).settled(own).temperature == 0
    assert Sampling(temperature=0).settled(own).repetition_penalty == 1.2
    assert Sampling(stop="x").settled(own).stop == ("END", "x")
    assert Sampling.greedy(max_new_tokens=3).settled(own) == Settled(max_new_tokens=3)
    assert Sampling().settled() == Sampling.greedy()
    for name in ("min_p", "repetition_penalty", "presence_penalty"):
        with pytest.raises(InputError, match=name):
            Sampling(**{name: -3.0})
    with pytest.raises(TypeError, match="temperature"):
        mmkv.Sampling.greedy(temperature=None)


# Tokens as bytes, and bytes as text: characters over several tokens, in both kinds of vocabulary.
#
# The right values are UTF-8's own, and what the tokenizers library decodes all ids to.


SMILE = "🙂".encode()


def byte_level() -> Any:
    """Return a vocabulary of all bytes, of AC F0 as one token, and of a word."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    marks = bytes_to_unicode()
    names = [marks[byte] for byte in range(256)]
    names += [marks[0xAC] + marks[0xF0], marks[0x20] + "world", marks[0x82] + marks[0xF0]]
    inner = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>")
    made.add_tokens([AddedToken("<tool call>", special=False)])
    return made


def byte_fallback(decoder: Any) -> Any:
    """Return a vocabulary as SentencePiece makes it: words with marks, bytes for what is left."""
    words = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["\u2581world", "\u2581", "hello", "s"]
    inner = Tokenizer(
        models.BPE({w: i for i, w in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True)
    )
    inner.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", unk_token="<unk>")


LLAMA = [
    decoders.Replace("\u2581", " "),
    decoders.ByteFallback(),
    decoders.Fuse(),
    decoders.Strip(" ", 1, 0),
]


def fallback_ids(tokenizer: Any, *pieces: str | bytes) -> list[int]:
    names = []
    for piece in pieces:
        names += [piece] if isinstance(piece, str) else [f"<0x{byte:02X}>" for byte in piece]
    return tokenizer.convert_tokens_to_ids(names)


def shown(tokenizer: Any, ids: list[int]) -> list[str]:
    stream = Detokenizer(tokenizer)
    return [*(stream.push(token) for token in ids), stream.flush()]


def test_a_token_that_ends_one_character_and_begins_the_next_is_counted_in_bytes() -> None:
    ids = [0xE2, 0x82, 256, 0x9F, 0x99, 0x82]
    assert shown(byte_level(), ids) == ["", "", "€", "", "", "🙂", ""]
    # After bytes that are no character, too: E2 82 breaks off, F0 begins.
    ids = [0xE2, 258, 0x9F, 0x99, 0x82, ord("a")]
    assert shown(byte_level(), ids) == ["", "\ufffd", "", "", "🙂", "a", ""]
    assert shown(byte_level(), [ord("a"), 0xE2, 0x82]) == ["a", "", "", ""]  # half of one goes


def test_any_bytes_are_the_text_that_the_tokenizer_decodes() -> None:
    tokenizer, rng = byte_level(), random.Random(0)
    special, added = tokenizer.convert_tokens_to_ids(["<|end|>", "<tool call>"])
    pieces = [[*"é€🙂漢a ".encode()], [256], [257], [258], [special], [added], [0xFF], [0xF0, 0x9F]]
    for _ in range(300):
        ids = [rng.choice(rng.choice(pieces)) for _ in range(rng.randint(1, 30))]
        made = shown(tokenizer, [*ids, ord("z")])
        assert "".join(made) == tokenizer.decode([*ids, ord("z")], skip_special_tokens=True)
        # What is shown stays: no more than one open character is held back.
        so_far = "".join(shown(tokenizer, ids))
        assert tokenizer.decode(ids, skip_special_tokens=True) in (so_far, so_far + "\ufffd")


@pytest.mark.parametrize("steps", [LLAMA, [decoders.Metaspace(), decoders.ByteFallback()]])
def test_bytes_beside_words(steps: list[Any]) -> None:
    tokenizer = byte_fallback(decoders.Sequence(steps))
    ids = fallback_ids(tokenizer, "\u2581world", SMILE, "\u2581world", "€🙂".encode(), "s")
    pieces = ["world", "", "", "", "🙂", " world", "", "", "€", "", "", "", "🙂", "s", ""]
    assert shown(tokenizer, ids) == pieces and "".join(pieces) == tokenizer.decode(ids)
    # One invalid byte spoils no characters beside it.
    ids = fallback_ids(tokenizer, "hello", "€".encode(), b"\xff", SMILE[:2], "s")
    assert "".join(shown(tokenizer, ids)) == "hello€\ufffd\ufffds"


def test_a_stop_string_inside_a_token_of_two_characters() -> None:
    stream, stops = Detokenizer(byte_level()), StopStrings(["€"])
    pieces = [stops.push(stream.push(token)) for token in [ord("a"), 0xE2, 0x82, 256]]
    assert pieces == ["a", "", "", ""] and stops.hit


def test_log_probabilities_show_the_bytes_of_each_token() -> None:
    tokenizer = byte_level()
    end, added = tokenizer.convert_tokens_to_ids(["<|end|>", "<tool call>"])
    rows = [TokenLogprob(token, -1.0) for token in [*SMILE, 257, 256, end, added]]
    made = spell(tokenizer, rows)
    wanted = [*([byte] for byte in SMILE), [*b" world"], [0xAC, 0xF0], [*b"<|end|>"]]
    assert [one.bytes for one in made] == [*wanted, [*b"<tool call>"]]
    assert made[4].text == " world" and made[0].text == "\ufffd"
    for steps in (LLAMA, [decoders.Metaspace()]):
        pieces = byte_fallback(decoders.Sequence(steps))
        known = token_bytes(pieces)
        assert known.of(fallback_ids(pieces, "\u2581world")[0]) == b" world"
        assert known.of(fallback_ids(pieces, "hello")[0]) == b"hello"
    pieces = byte_fallback(decoders.Sequence(LLAMA))
    assert [token_bytes(pieces).of(one) for one in fallback_ids(pieces, SMILE)] == [
        bytes([byte]) for byte in SMILE
    ]


# Logits that are no numbers end a reply with an error; placeholders of media are never chosen.


ODD = [float("nan"), float("inf"), float("-inf")]
GREEDY, DRAWN = Sampling(max_new_tokens=8), Sampling(max_new_tokens=8, temperature=1.5, seed=4)


@pytest.fixture(scope="module")
def broken_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen3_vl(tmp_path_factory.mktemp("qwen"))


@pytest.fixture
def engine(broken_folder: Path) -> Engine:
    return Engine.from_pretrained(broken_folder, policy="full", dtype="float32", gates="random")


def poison(
    monkeypatch: pytest.MonkeyPatch, engine: Engine, path: str, after: int, value: float
) -> None:
    """Make the logits of step ``after`` (0: of the prompt) hold ``value``, on one path."""
    calls = 0

    def odd(logits: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls > after:
            logits.view(-1)[7] = value
        return logits

    real = engine.decoder.logits
    monkeypatch.setattr(engine.decoder, "logits", lambda hidden: odd(real(hidden)))
    if path == "native":
        assert engine.decode_path == "native"
        step = engine.backends.cpu.decoder.step
        monkeypatch.setattr(engine.backends.cpu.decoder, "step", lambda *a: odd(step(*a)))
    else:
        engine.backends.cpu.switch_off()
    if path == "graph":  # the static step, which a GPU captures; here it runs as it is
        runner = GraphRunner(engine.model, engine.cache)
        monkeypatch.setattr(type(engine), "many_path", "graph")
        monkeypatch.setattr(engine.backends.cuda, "decode_many", runner.decode)
        weights = engine.decoder.weights
        product = weights.product

        def head(x: torch.Tensor, weight: torch.Tensor, *bias: Any) -> torch.Tensor:
            made = product(x, weight, *bias)
            return odd(made) if weight is weights.head else made

        monkeypatch.setattr(weights, "product", head)
        monkeypatch.setattr(engine.decoder, "logits", lambda hidden: odd(real(hidden)))


def standing(session: Session) -> tuple[Any, ...]:
    """Return the state without the tables' bytes, which only grow."""
    memory, *rest = state(session)
    return (replace(memory, metadata_bytes=0), *rest)


def whole(session: Session) -> tuple[Any, ...]:
    last, unfed, history = session.last, session.unfed, [*session.history, session.tools]
    cache = session.engine.cache.export(session.seq)
    content = {name: tensor.tolist() for name, tensor in cache.items()}
    return (*standing(session), last, unfed, history, content)


@pytest.mark.parametrize(
    ("path", "after", "undo"),
    [("torch", 3, 0), ("native", 0, 0), ("native", 3, 2), ("graph", 3, 0), ("graph", 0, 0)],
)
def test_a_reply_ends_with_an_error_and_the_session_is_as_before(
    path: str, after: int, undo: int, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value, sampling in ((ODD[0], GREEDY), (ODD[1], DRAWN), (ODD[2], GREEDY)):
        with engine.session() as session, monkeypatch.context() as patch:
            session.undo_depth = undo
            list(session.send("hello", images=[picture()], sampling=GREEDY))
            before, start = whole(session), session.turn_start()
            if not undo:  # as a turn with a function does, before it fails
                session.tools = (Tool("f"),)
                assert session.take_back(start) and whole(session) == before
            poison(patch, engine, path, after, value)
            with pytest.raises(NotFiniteError, match=r"not finite .* load it with dtype"):
                list(session.send("and?", sampling=sampling))
            assert whole(session) == before
            engine.cache.check()
            patch.undo()
            assert list(session.send("and?", sampling=GREEDY))
        assert engine.cache.pool.free_pages == engine.cache.pool.num_pages


@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("run", ["graph", "steps"])
def test_a_burst_tells_which_session_is_broken(
    run: str, drawn: bool, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others go on as if they were alone."""
    prompts = [{"input_ids": torch.arange(5 + i)[None] + 3} for i in range(3)]
    draws = [Draw(temperature=1.2, seed=i) for i in range(3)] if drawn else None

    def opened() -> list[Session]:
        made = [engine.session() for _ in prompts]
        for session, prompt in zip(made, prompts, strict=True):
            session.prefill(prompt)
        return made

    engine.cache.pool.grow(400)
    engine.backends.cpu.switch_off()
    decode = Bursts(engine).decode if run == "graph" else engine.decode_many
    alone = decode(opened(), [3, 4, 5], 9, (), draws)
    sessions = opened()
    # Keys that are no numbers, in one session.
    slot = engine.cache.entries(sessions[1].seq).slot
    with torch.inference_mode():
        engine.cache.pool.keys.flatten(0, 1)[slot[:1]] = torch.nan
    with pytest.raises(NotFiniteError) as error:
        decode(sessions, [3, 4, 5], 9, (), draws)
    assert error.value.generated == [alone[0], [BROKEN], alone[2]]
    assert sessions[1].seen == 7 and sessions[0].seen == 14
    engine.cache.check()


def test_a_scheduler_fails_the_broken_request_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = Scheduler(EngineExecutor(engine), Limits())
    kept = [CachedConversation(engine) for _ in range(2)]
    for session in kept:
        scheduler.submit(ReplyJob(engine, message("hi"), GREEDY, session=session, prompt_tokens=40))
    while scheduler.turn():
        pass
    live = kept[0].live
    assert live is not None
    before = (*standing(live), live.history[:])
    jobs = [
        ReplyJob(engine, message("on"), GREEDY, session=session, prompt_tokens=40)
        for session in kept
    ]
    tickets = [scheduler.submit(job) for job in jobs]
    while not all(ticket.state == "decode" for ticket in tickets):
        scheduler.turn()
    slot = engine.cache.entries(live.seq).slot
    last = engine.cache.pool.position.view(-1)[slot].argmax()
    with torch.inference_mode():
        engine.cache.pool.keys.flatten(0, 1)[slot[last]] = torch.nan
    while scheduler.turn():
        pass
    assert isinstance(tickets[0].error, NotFiniteError) and tickets[1].state == "done"
    assert jobs[1].reply is not None and len(jobs[1].reply.token_ids) == 8
    assert (*standing(live), live.history) == before
    scheduler.close()
    assert engine.cache.pool.free_pages == engine.cache.pool.num_pages


@pytest.mark.parametrize("value", ODD)
def test_the_sampler_refuses_what_is_no_number(value: float) -> None:
    for place in (0, 17, 49):
        logits = torch.linspace(-3, 3, 50)
        logits[place] = value
        for sampling in (GREEDY, DRAWN, Sampling(temperature=0.7, top_k=3, top_p=0.5)):
            with pytest.raises(NotFiniteError):
                Sampler(sampling).draw(logits)


@pytest.mark.parametrize("run", ["reply", "drawn", "steps", "graph", "graph drawn"])
def test_no_placeholder_is_chosen(
    run: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a head that prefers them to all else; the second choice is taken."""
    media = sorted(engine.media_token_ids)
    assert len(media) == 2
    with monkeypatch.context() as patch:  # nor does one end a reply
        patch.setattr(engine.family, "eos_token_ids", {7, media[0]})
        assert 7 in engine.eos_token_ids and engine.eos_token_ids.isdisjoint(media)
    engine.backends.cpu.switch_off()
    head = engine.decoder.weights.head
    rest = [i for i in range(head.shape[0]) if i not in media]
    with engine.session() as session:
        session.prefill({"input_ids": torch.tensor([[5, 6, 7]])})
        with session.fork() as probe:
            second = rest[int(probe.decode(9)[rest].argmax())]
        real = engine.decoder.logits
        weights = engine.decoder.weights
        product = weights.product

        def loving(logits: torch.Tensor) -> torch.Tensor:
            logits[..., media] = 1e4
            return logits

        def static(x: torch.Tensor, weight: torch.Tensor, *bias: Any) -> torch.Tensor:
            made = product(x, weight, *bias)
            return loving(made) if weight is head else made

        if run.startswith("graph"):
            monkeypatch.setattr(weights, "product", static)
        else:
            monkeypatch.setattr(engine.decoder, "logits", lambda hidden: loving(real(hidden)))
        draws = [Draw(temperature=1.5, seed=3)] if "drawn" in run else None
        if run in ("reply", "drawn"):
            sampling = DRAWN if run == "drawn" else GREEDY
            for turn in ("one", "two"):  # such a reply blocked every later turn
                list(session.send(turn, sampling=sampling))
                assert session.last is not None and not {*session.last.token_ids} & {*media}
            return
        decode: Callable[..., Any] = engine.decode_many
        if run.startswith("graph"):
            decode = Bursts(engine).decode
        (tokens,) = decode([session], [9], 12, (), draws)
        assert not {*tokens} & {*media} and (draws or tokens[0] == second)


@pytest.mark.parametrize("value", ODD)
def test_a_vision_tower_that_is_no_number_is_refused(
    value: float, broken_folder: Path, tmp_path: Path
) -> None:
    for file in broken_folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = sorted(name for name in tensors if ".visual." in name)[3]
    tensors[name].view(-1)[-1] = value
    file.unlink()
    save_file(tensors, file, metadata={"format": "pt"})
    engine = Engine.from_pretrained(tmp_path, policy="full", dtype="float32", gates="random")
    with engine.session() as session:
        assert list(session.send("text alone goes", sampling=GREEDY))
        with pytest.raises(ModelError, match=f"NaN or infinity .in .*{name.rpartition('.')[2]}"):
            list(session.send("hello", images=[picture()], sampling=GREEDY))


def test_a_draw_has_each_setting_in_its_place() -> None:
    names = ("temperature", "top_k", "top_p", "min_p", "seed")
    given = {name: at / 8 if name[-1] == "p" or at == 1 else at for at, name in enumerate(names, 1)}
    penalties = {"repetition": 1.5, "presence": 0.25, "frequency": 0.75}
    asked = {f"{name}_penalty": value for name, value in penalties.items()}
    draw = Sampler(Sampling(**given, **asked).settled())._first_draw
    assert {name: getattr(draw, name) for name in (*names, *penalties)} == given | penalties
