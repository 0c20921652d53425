"""The roads to the engine on a GPU: replies together, the server, transformers, training.

As test_engine.py, on a fake card where there is none.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import mmkv.training
from mmkv import Engine, Sampling
from mmkv.calibration import doubt_of
from mmkv.engine.backends.torch.backend import TorchBackend
from mmkv.engine.config import EngineConfig
from mmkv.engine.runtime import Runtime
from mmkv.grammar import ReplyRules
from mmkv.hf import retain
from mmkv.reply import LogitSettings, ReplyWriter, step
from mmkv.resources import bundled_model
from mmkv.training import capacity, gated_attention
from mmkv.training.folder import history
from tests.support.calibrated import certified
from tests.support.factories import checkpoint, make_model, make_turn
from tests.support.fake_cuda import Device
from tests.support.servers import serving
from tests.support.sessions import SMALL_CONTEXT, save_checkpoint, text_ids
from tests.support.tiers import long_but
from tests.training.test_distill import short_run, train


def engine_on(device: str, **options: Any) -> Engine:
    usual = {"dtype": "float32", "budget": 32, "kv": "auto"}
    return Engine.from_pretrained(bundled_model(), device=device, **(usual | options))


GREEDY = Sampling(max_new_tokens=18, temperature=0)
DRAWN = Sampling(max_new_tokens=18, temperature=0.8, top_k=12, seed=7)
PENALISED = Sampling(max_new_tokens=18, temperature=0.8, repetition_penalty=1.2, seed=8)
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
# What looks at each token, or at the logits.
LOOKING = {
    "a stop string": (replace(GREEDY, stop=("zebra",)), LogitSettings()),
    "a token that ends it": (GREEDY, LogitSettings(stop_tokens=frozenset({3}))),
    "bad words": (replace(GREEDY, bad_words=((5, 6),)), LogitSettings()),
    "log probabilities": (GREEDY, LogitSettings(top_logprobs=2)),
    "a bias": (GREEDY, LogitSettings(bias={3: -1.0})),
    "a grammar": (GREEDY, LogitSettings(rules=ReplyRules(answer=SCHEMA))),
}


def written(
    engine: Engine, asked: Sequence[Sampling | tuple[Sampling, LogitSettings]]
) -> list[list[int]]:
    """Write replies to one question, decoded together."""
    going, writers = [], []
    for each in asked:
        sampling, settings = each if isinstance(each, tuple) else (each, LogitSettings())
        inputs = engine.inputs([{"role": "user", "content": "How many shapes are there?"}])
        session = Runtime.session(engine)
        logits = session.prefill(inputs)
        ids = inputs["input_ids"][0].tolist()
        writers.append(ReplyWriter(engine, sampling.settled(), settings, prompt=ids))
        writers[-1].start(session.read_ids)
        token = writers[-1].draw_from(logits)
        if token is not None:
            going.append((session, writers[-1], token))
    while going:
        following = step(engine, going)
        parts = zip(going, following, strict=True)
        going = [(*one[:2], token) for one, token in parts if token is not None]
    assert [writer.failure for writer in writers] == [None] * len(writers)
    return [writer.token_ids for writer in writers]


@pytest.mark.parametrize(
    "looking", long_but(("a stop string", "bad words", "a grammar"), LOOKING, "the other kinds")
)
def test_a_batch_stays_on_the_graph_when_one_of_its_replies_looks(
    looking: str, card: Device | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the others say what they would say in bursts, without it."""
    steps: list[int] = []
    monkeypatch.setattr(TorchBackend, "decode", lambda *_: steps.append(1))
    engine = engine_on("cuda")
    others = [GREEDY, DRAWN, PENALISED]
    alone = written(engine, others)
    before = 0 if card is None else card.replays
    *together, looked = written(engine, [*others, LOOKING[looking]])
    assert together == alone and not steps
    assert (looked == alone[0]) == (looking != "a grammar")
    if card is not None:
        longest = max(map(len, [*together, looked]))
        assert card.replays - before <= longest  # one a token, for all


def test_a_step_reads_the_device_twice(card: Device | None) -> None:
    """What rows hold, before it; what has become of them, behind it; however many they are."""
    if card is None:
        pytest.skip("a real card counts no reads")
    engine = engine_on("cuda")
    sessions = [Runtime.session(engine) for _ in range(4)]
    for session in sessions:
        session.prefill({"input_ids": text_ids(9, 1)[None]})
    engine.decode(sessions, [5] * 4)
    card.reads.clear()
    engine.decode(sessions, [6] * 4)
    assert card.reads.total() == 2, card.reads
    card.reads.clear()
    engine.decode_many(sessions, [7] * 4, 16)
    assert card.reads.total() == 2, card.reads


def test_steps_without_the_graph_say_the_same(card: Device | None) -> None:
    """Policies of one's own, shared budgets and recordings go by torch, with Triton's kernels."""
    engines = engine_on("cuda"), engine_on("cuda")
    engines[1].backends.cuda.off = True
    assert engines[1].decode_path == "torch: switched off"
    said = [written(engine, [GREEDY, LOOKING["bad words"]]) for engine in engines]
    assert said[0] == said[1]  # what is drawn is drawn otherwise


def test_calibrated_answers_are_the_cpus(card: Device | None, tmp_path: Path) -> None:
    """Two together, and at least one of them from a second reading."""
    asked = [[{"role": "user", "content": f"what is at row {row}, column 1?"}] for row in (1, 2)]
    doubts = []
    with engine_on("cpu", budget=8).session() as session:
        logits = session.prefill(session.engine.inputs(asked[0]))
        for _ in range(6):
            doubts.append(doubt_of(logits))
            logits = session.decode(int(logits.argmax()))
    limit, said = max(doubts), []
    for device in ("cpu", "cuda"):
        engine = engine_on(device, budget=8)
        certified(engine, tmp_path, "reread", limit=limit - 1e-4, score="doubt")
        said.append([one.token_ids for one in engine.generate(asked, GREEDY)])
        assert engine.loss_control is not None and engine.loss_control.outcomes["reread"]
    assert said[0] == said[1]


def test_a_server_answers_from_a_gpu(card: Device | None) -> None:
    def answers(device: str) -> list[str]:
        with serving(lambda: engine_on(device)) as server:
            first = server.chat("What color is the sky?", max_tokens=12)
            then = server.chat("Count.", max_tokens=12, stop=["zebra"], logprobs=True)
            return [each.json()["choices"][0]["message"]["content"] for each in (first, then)]

    assert answers("cuda") == answers("cpu")


@pytest.mark.parametrize("family", ["llama", "qwen3_vl"])
def test_generate_runs_on_a_bounded_cache(family: str, card: Device | None) -> None:
    def tokens(device: str) -> list[list[int]]:
        model = make_model_of(family).to(device)
        pieces = [9, ("image", 16, 24), 6] if family == "qwen3_vl" else [21]
        inputs = {name: each.to(device) for name, each in make_turn(family, pieces, 1).items()}
        with retain(model, gates="random", budget=12, page_size=8) as handle:
            made = handle.model.generate(**inputs, max_new_tokens=14, do_sample=False)
        return [row.tolist() for row in made.cpu()]

    assert tokens("cuda") == tokens("cpu")


def make_model_of(family: str) -> Any:
    from tests.support.factories import CHECKPOINTS

    return make_model(CHECKPOINTS[family])


def test_sessions_share_a_budget(card: Device | None) -> None:
    def shared(device: str) -> list[Any]:
        config = EngineConfig(
            model=checkpoint("qwen3"),
            gates="random",
            device=device,
            kv="auto",
            dtype="float32",
            policy="dbtrimkv",
            budget=8,
            page_size=8,
        )
        engine = Runtime.from_config(config)
        engine.share(20)
        sessions = [engine.session() for _ in range(3)]
        for index, session in enumerate(sessions):
            session.prefill({"input_ids": text_ids(20 + index, index)[None]})
        said = engine.decode_many(sessions, [4, 5, 6], 8)
        return [said, [session.entries for session in sessions]]

    assert shared("cuda") == shared("cpu")


@pytest.mark.parametrize("budget", [8, 50])  # rows of up to 48 positions fit
def test_a_session_goes_on_behind_the_context(
    budget: int, card: Device | None, tmp_path: Path
) -> None:
    folder = save_checkpoint(SMALL_CONTEXT, tmp_path)

    def said(device: str) -> list[Any]:
        config = EngineConfig(
            model=folder,
            gates="random",
            device=device,
            dtype="float32",
            policy="dbtrimkv",
            budget=budget,
            page_size=8,
            kv="auto",
        )
        session = Runtime.from_config(config).session()
        session.prefill({"input_ids": text_ids(40, 1)[None]})
        made = []
        for _ in range(6):
            made += session.engine.decode_many([session], [4], 9)
        session.prefill({"input_ids": text_ids(30, 2)[None]})
        last = session.engine.decode_many([session], [5], 5)
        return [made, session.seen, session.capped, last]

    ours = said("cuda")
    assert ours == said("cpu") and ours[1] > 64 and (ours[2] > 0) == (budget > 8)


def test_two_engines_in_two_threads(card: Device | None) -> None:
    """Each captures while the other one works."""
    wanted = written(engine_on("cpu"), [GREEDY, GREEDY])
    found: list[Any] = [None, None]

    def run(at: int) -> None:
        found[at] = written(engine_on("cuda"), [GREEDY, GREEDY])

    threads = [threading.Thread(target=run, args=(at,)) for at in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [wanted, wanted]


def test_gates_are_trained_on_a_gpu(
    card: Device | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if card is not None:  # nothing compiles for it
        monkeypatch.setattr(gated_attention, "_flex", gated_attention._Blocked.apply)
        counts = SimpleNamespace(retained_counts=capacity._Retained.apply)
        monkeypatch.setattr(mmkv.training, "capacity_triton", counts, raising=False)
    losses = []
    for device in ("cuda", "cpu"):
        folder = tmp_path / device
        train(short_run(folder, steps=2, batch=1, device=device))
        losses.append([entry["loss"] for entry in history(folder) if "loss" in entry])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4) and len(losses[0]) == 2
