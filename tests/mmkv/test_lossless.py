"""Lossless decoding says what a full cache says, however a reply is asked for.

Right values: an engine that keeps all and drafts nothing. Drafts are wrong as often as right here:
what stays of the wrong ones would show in the replies behind them.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForImageTextToText

import mmkv.hf
from mmkv import Engine, Sampling
from mmkv.chat.display import memory_line, record, statistics
from mmkv.chat.run import cost_line
from mmkv.engine.backends.cuda.kernels.sample import Draw
from mmkv.engine.drafts import Pace
from mmkv.engine.errors import BROKEN, BudgetError, InputError, NotFiniteError
from mmkv.engine.runtime import Runtime
from mmkv.reply import LogitSettings, ReplyWriter
from mmkv.resources import bundled_model
from mmkv.server.engine_thread import EngineCore
from mmkv.server.run import first_lines
from mmkv.server.work import ChatWork
from mmkv.session import Session
from tests.mmkv.test_one_road import CASES
from tests.support.chat_models import picture
from tests.support.servers import MODEL, Server, asked, serving
from tests.support.sessions import text_ids
from tests.support.tiers import one_in
from tests.support.tool_templates import save_seeing_tool_model

QUESTION = "Which of the shapes that you have seen stands where, and what is its colour?"
LETTERS = {65: 99.0, 66: 99.0, 67: 99.0}  # b, c and d
# By name: how it is drawn, and what else is asked for.
ASKED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **{name: case[:2] for name, case in CASES.items() if case[2] is None},
    "stop": ({"temperature": 2.0, "seed": 1, "stop": ("dcb", "cbd")}, {"logit_bias": LETTERS}),
    "words": ({"temperature": 1.0, "seed": 4, "bad_words": ((65,), (66, 67))}, {}),
}


@pytest.fixture(scope="module", autouse=True)
def always() -> Iterator[None]:
    """Draft whether it pays or not: that is measured."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pace, "choose", lambda *_: 4)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_seeing_tool_model(tmp_path_factory.mktemp("hermes"))


def full(folder: Path, **options: Any) -> Engine:
    return Engine.from_pretrained(folder, policy="full", dtype="float32", **options)


def lossless(folder: Path, **options: Any) -> Engine:
    given = {"policy": "streamingllm", "budget": 24} | options
    return Engine.from_pretrained(folder, lossless=True, dtype="float32", **given)


@pytest.fixture(scope="module")
def engines(folder: Path) -> Iterator[tuple[Engine, Engine]]:
    made = full(folder), lossless(folder)
    assert made[1].decode_path == "native"  # torch's last bits may differ
    yield made
    for engine in made:
        engine.cache.check()
        assert not engine.cache.open_count


@pytest.fixture(scope="module")
def servers(folder: Path) -> Iterator[tuple[Server, Server]]:
    with serving(lambda: full(folder)) as plain, serving(lambda: lossless(folder)) as drafting:
        yield plain, drafting


def drawn(**settings: Any) -> Sampling:
    return Sampling(**{"max_new_tokens": 40} | settings)


def talk(session: Session, sampling: Sampling, **more: Any) -> list[Any]:
    """Return what can be seen of two turns."""
    seen: list[Any] = []
    for pictures in ([picture()], []):
        pieces = list(session.send(QUESTION, images=pictures, sampling=sampling, **more))
        reply = session.last
        assert reply is not None and reply.memory is not None
        calls = [(one.name, one.arguments) for one in reply.tool_calls]
        seen += [pieces, reply.token_ids, reply.finish_reason, reply.reasoning, calls]
        seen += [reply.memory.entries, reply.memory.pages, reply.memory.kv_bytes, session.unfed]
    return [*seen, *(one["content"] for one in session.history)]


@pytest.mark.parametrize("name", ASKED)
def test_a_session_says_the_same(engines: tuple[Engine, Engine], name: str) -> None:
    settings, more = ASKED[name]
    said, counts = [], (0, 0)
    for engine in engines:
        with engine.session() as session:
            said.append(talk(session, drawn(**settings), **more))
            memory = session.memory()
            counts = memory.drafted, memory.accepted
            tokens = len(session.last.token_ids) if session.last else 0
    assert said[0] == said[1]
    assert counts[0] > 0 and counts[1] <= min(counts[0], tokens)
    # A grammar's masks, which decide here, are not foreseen.
    assert counts[1] > 0 or more.keys() & {"tools", "response_format"}
    if name == "stop":
        assert session.last is not None and session.last.finish_reason == "stop"


@one_in(2)
@pytest.mark.parametrize("name", ASKED)
def test_a_batch_says_the_same(engines: tuple[Engine, Engine], name: str) -> None:
    settings, more = ASKED[name]
    talks = [[{"role": "user", "content": QUESTION * count}] for count in (1, 2, 4)]
    whole, drafted = (
        [(one.token_ids, one.text) for one in made]
        for made in (engine.generate(talks, drawn(**settings), **more) for engine in engines)
    )
    assert whole == drafted


def test_turns_that_end_early_leave_nothing(
    engines: tuple[Engine, Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that is read, streams that are closed, turns that are undone, or that fail: what was
    drafted behind them is gone.
    """
    seen: list[list[Any]] = []
    choose = ReplyWriter.choose

    def failing(self: ReplyWriter, *given: Any) -> int:
        return BROKEN if len(self.token_ids) == 11 else choose(self, *given)

    for engine in engines:
        seen.append(told := [])
        for first in (True, False):  # also where nothing was said before
            session = engine.session()
            if not first:
                told.append(talk(session, drawn()))
            with monkeypatch.context() as patch:
                patch.setattr(ReplyWriter, "choose", failing)
                with pytest.raises(NotFiniteError):
                    list(session.send("fails", sampling=drawn()))
                if engine.drafts is not None:
                    assert session.ahead is not None and not session.ahead.tokens
            told.append(talk(session, drawn(temperature=1.0, seed=1)))
            for count, _ in enumerate(stream := session.send("more", sampling=drawn())):
                told.append(session.memory())  # in the middle of a reply
                told.append(session.entries_per_layer())
                if count == 9:
                    stream.close()
            session.undo_depth = 1
            told.append("".join(session.send("and more", sampling=drawn())))
            assert session.undo()
            told.append("".join(session.send("else", sampling=drawn(temperature=1.0, seed=2))))
            with session.fork() as other:
                told.append(talk(other, drawn()))
            session.save(tmp_path / "session")
            told.append([[row.tolist() for row in layer] for layer in session.retained()])
            session.close()
            session = engine.load_session(tmp_path / "session")[0]
            told.append(talk(session, drawn()))
            session.close()
    assert seen[0] == seen[1]


def test_thoughts_end_and_are_forgotten(engines: tuple[Engine, Engine]) -> None:
    """Their forced end is foreseen; behind what is forgotten nothing is drafted any more."""
    seen = []
    for engine in engines:
        with engine.session() as session:
            session.forget_thoughts = True
            told: list[Any] = []
            for budget, most in ((9, 25), (0, 99)):
                asked = drawn(thinking_budget=budget, temperature=1.0, seed=3)
                stream = session.send("a", prefix="<think>\n", sampling=asked, logit_bias=LETTERS)
                with closing(stream):  # in the middle of what is drafted
                    told.append(list(islice(stream, most)))
                assert session.last is not None and session.last.memory is not None
                told += [session.last.token_ids, session.last.memory.evicted]
                told.append([[row.tolist() for row in layer] for layer in session.retained()])
            seen.append(told)
            if engine.drafts is not None:
                assert session.memory().drafted == 0
    assert seen[0] == seen[1] and seen[0][2] > 0


def test_a_budget_is_that_of_the_drafts(engines: tuple[Engine, Engine]) -> None:
    engine = engines[1]
    with engine.session() as session:
        for change in (lambda: session.set_budget(99), lambda: engine.session(99)):
            with pytest.raises(BudgetError, match=r"keep all entries.* for drafts, or without"):
                change()
        list(session.send(QUESTION, sampling=drawn()))
        last = session.last
        assert last is not None and last.memory is not None
        line, table = memory_line(session), io.StringIO()
        right, made = last.memory.accepted, last.memory.drafted
        assert f"drafts: {right} of {made} tokens right; all entries stay" in line
        Console(file=table, width=200).print(statistics(session))
        assert f"{right} of {made} tokens right" in table.getvalue()
        shown = record(session, "small")
        assert (shown["drafted"], shown["accepted"]) == (made, right) and right > 0
        cost = cost_line(session, [{"role": "user", "content": QUESTION}])
        assert f"{right} of {len(last.token_ids)} tokens came from drafts" in cost
    with pytest.raises(InputError, match="lossless sessions forget nothing"):
        engine.certify("any.json")


def test_transformers_generate_says_the_same(folder: Path) -> None:
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    ids = torch.randint(0, 200, (2, 50), generator=torch.Generator().manual_seed(0))
    asked: dict[str, Any] = {"max_new_tokens": 30, "pad_token_id": 0}
    said = []
    for options in ({"policy": "full"}, {"policy": "streamingllm", "budget": 24}):
        lossless = options["policy"] != "full"
        with mmkv.hf.retain(model, lossless=lossless, **options) as handle:
            torch.manual_seed(0)
            hot = {"do_sample": True, "temperature": 0.5, "num_return_sequences": 2}
            said_hot = model.generate(ids, **hot, **asked)
            cache = mmkv.hf.RetainedCache()
            first = model.generate(ids, do_sample=False, past_key_values=cache, **asked)
            more = torch.cat([first, ids], 1)
            second = model.generate(more, do_sample=False, past_key_values=cache, **asked)
            assert (sum(row.accepted for row in handle.memory().rows) > 0) == lossless
            cache.close()
        said.append([one.tolist() for one in (said_hot, first, second)])
    assert said[0] == said[1]


def test_a_record_may_begin_in_a_reply(engines: tuple[Engine, Engine]) -> None:
    seen = []
    for engine in engines:
        with engine.session() as session:
            stream = session.send(QUESTION, sampling=drawn())
            list(islice(stream, 7))
            session.record()
            said = list(stream)
            assert session.recorder is not None
            record = session.recorder.read(session)
            told = [record.retained(step) for step in range(len(record.seen))]
            rows = [row.tolist() for layers in told for layer in layers for row in layer]
            seen.append((said, record.seen.tolist(), record.token_ids.tolist(), rows))
    assert seen[0] == seen[1] and len(seen[0][1]) > 20


def test_what_a_seed_draws_is_foreseen(
    engines: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of it is right than of the likeliest tokens, and the reply draws what it did."""
    engine, counts = engines[1], []
    for blind in (False, True):
        if blind:
            monkeypatch.setattr(ReplyWriter, "foresee", lambda _: engine.drafts._likeliest)
        with engine.session() as session:
            said = talk(session, drawn(temperature=1.0, seed=5))
            counts.append((said, session.memory().accepted / session.memory().drafted))
    assert counts[0][0] == counts[1][0]
    assert counts[0][1] > 0.5 > 0.1 > counts[1][1]


def test_bursts_foresee_what_they_draw() -> None:
    """By the same random numbers; penalties count what was drafted."""
    draws = [Draw(seed=4), Draw(temperature=0.7, presence=0.3, seed=9)]
    made = []
    for own in ({"policy": "full"}, {"lossless": True, "budget": 40}):
        engine = Engine.from_pretrained(bundled_model(), dtype="float32", **own)
        sessions = [Runtime.session(engine) for _ in draws]
        for seed, session in enumerate(sessions):
            session.prefill({"input_ids": text_ids(60 + seed, seed)[None]})
        made.append(engine.decode_many(sessions, [5, 6], 60, draws=draws))
    assert made[0] == made[1]
    assert all(one.ahead is not None and one.ahead.accepted > 10 for one in sessions)


def test_guesses_leave_the_reply_alone(engines: tuple[Engine, Engine]) -> None:
    """They are what it then draws from the same logits, up to its limit or its end."""
    engine = engines[1]
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(12, engine.spec.vocab_size, generator=generator) * 3
    eos = min(engine.eos_token_ids)
    settings = LogitSettings(bias={7: 2.0})
    asked = {"temperature": 1.0, "seed": 2, "repetition_penalty": 1.5, "presence_penalty": 1.0}
    for limit, end in ((9, None), (50, 8)):
        if end is not None:
            rows[end, eos] = 99.0
        writers = [
            ReplyWriter(engine, Sampling.greedy(**asked, max_new_tokens=limit), settings)
            for _ in range(3)
        ]
        said = [[writer.draw_from(row) for row in rows[:3]] for writer in writers]
        assert said[0] == said[1] == said[2]
        guess = writers[0].foresee()
        foreseen = [guess(row) for row in rows[3:]]
        again = writers[0].foresee()
        assert [again(row) for row in rows[3:]] == foreseen  # nothing has moved on
        drawn_then = [writers[1].draw_from(row) for row in rows[3:9]]
        assert [writers[0].draw_from(row) for row in rows[3:9]] == drawn_then
        # The token at the limit is never fed, nor is one that ends the reply.
        assert foreseen[:6] == drawn_then and foreseen[5] is None and None not in foreseen[:5]
    assert writers[2].foresee()(rows[0] * torch.nan) is None


def over_http(server: Server, stream: bool, **fields: Any) -> tuple[Any, dict[str, Any]]:
    """Return what a reply is, but for its name and time, and its usage."""
    answer = server.chat(QUESTION, stream=stream, **fields)
    assert answer.status_code == 200, answer.text
    if not stream:
        body = answer.json()
        for choice in body["choices"]:
            for call in choice["message"].get("tool_calls") or ():
                call.pop("id")
        return body["choices"], body["usage"]
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    chunks = [json.loads(line) for line in lines if line != "[DONE]"]
    said: dict[int, list[Any]] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        delta, rows = choice["delta"], (choice.get("logprobs") or {}).get("content") or ()
        for call in delta.get("tool_calls") or ():
            call.pop("id", None)
        said.setdefault(choice["index"], []).append((delta, rows, choice["finish_reason"]))
    return said, next(chunk["usage"] for chunk in chunks if chunk.get("usage"))


@one_in(2)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ASKED)
def test_a_server_says_the_same(servers: tuple[Server, Server], name: str, stream: bool) -> None:
    settings, more = ASKED[name]
    names = {"max_new_tokens": "max_tokens"}
    fields = {names.get(key, key): value for key, value in settings.items()}
    fields.pop("bad_words", None)
    fields = {"max_tokens": 40} | fields | more
    fields |= {"n": 2, "logprobs": True, "top_logprobs": 3, "mmkv": {"resume": "never"}}
    if stream:
        fields |= {"stream_options": {"include_usage": True}}
    whole, drafted = (over_http(server, stream, **fields) for server in servers)
    assert whole[0] == drafted[0]
    used, own = (usage["mmkv"] for usage in (whole[1], drafted[1]))
    assert used["drafted"] == used["accepted"] == 0
    assert own["drafted"] > 0 and own["accepted"] <= own["drafted"]
    assert own["kept"] == used["kept"] and own["kv_bytes"] <= own["bound_bytes"]


def conversations(server: Server) -> list[Any]:
    """Return what three conversations side by side come to, one of them cut off in a reply."""

    def watch(core: EngineCore) -> None:
        turn = core.scheduler.turn

        def watched() -> None:
            turn()
            for ticket in core.scheduler.decoding:  # as /memory does
                ticket.job.standing()

        core.scheduler.turn = watched  # type: ignore[method-assign]

    server.inside(watch)
    client, told = server.client, list[Any]()
    names = [client.post("/v1/sessions", json={}).json()["id"] for _ in range(3)]
    for question in (QUESTION, "And where is it now?", "So?"):
        for at, name in enumerate(names):
            path = f"/v1/sessions/{name}"
            body = asked(question, max_tokens=30, temperature=1.0, seed=at)
            if at == 1:
                body["stream"] = True
                with client.stream("POST", f"{path}/chat/completions", json=body):
                    pass
                del body["stream"]
                server.wait_for(lambda core: core.scheduler.running == 0)
            answer = client.post(f"{path}/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            memory = client.get(f"{path}/memory").json()
            told += [answer.json()["choices"], memory["entries"], memory["kv_bytes"]]
    states = [one["state"] for one in client.get("/v1/sessions").json()["data"]]
    for name in names:
        assert client.delete(f"/v1/sessions/{name}").json()["deleted"]
    return [told, "file" in states]


def test_conversations_that_lack_room_go_on(
    folder: Path, servers: tuple[Server, Server], tmp_path: Path
) -> None:
    """Where there is room for about one, kept ones make way."""
    plain = conversations(servers[0])
    work = ChatWork([], "", Sampling.greedy())
    need = servers[1].inside(lambda core: core.job(work, lambda: None).reservation().total)
    page = servers[1].inside(lambda core: core.engine.cache.pool.page_bytes)
    options = {"kv_limit": (need + 2) * page, "vision_cache": 0}
    with serving(lambda: lossless(folder, **options), idle_folder=tmp_path) as small:
        told = conversations(small)
    assert told == [plain[0], True]


def test_what_a_server_refuses(servers: tuple[Server, Server]) -> None:
    server = servers[1]
    answer = server.chat("hello", mmkv={"budget": 8})
    assert answer.status_code == 400
    told = answer.json()["error"]["message"]
    assert told.startswith("lossless sessions keep all entries, so that mmkv.budget would bind")
    assert server.client.get(f"/v1/models/{MODEL}").json()["mmkv"]["budget"] == "none"
    lines = first_lines(server.state, 1)
    assert "lossless: policy streamingllm, budget 24 entries per row, drafts; all entries stay" in (
        lines
    )
