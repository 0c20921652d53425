"""What a checkpoint's generation_config.json asks for, and penalties: transformers is right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
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
from mmkv import Engine, Sampling
from mmkv.engine.backends.cuda.kernels.sample import (
    Draw,
    PenaltyState,
    columns_of,
    penalise,
    sample,
)
from mmkv.engine.errors import InputError, ModelError
from mmkv.engine.read_ids import mask_of, with_ids
from mmkv.generation_config import _FOLLOWED, _HARMLESS, Generation, generation_of
from mmkv.sampling import Sampler, Settled, _likely
from tests.support.chat_models import save_llama, watch

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
    for words in ("hello", "what is the colour of the third shape?"):
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
    prompt, reply = rng.integers(0, 200, 30), rng.integers(0, 200, 20).tolist()
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
