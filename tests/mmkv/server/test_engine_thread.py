"""The engine's thread: clients that go away, and what a library raises is one request's failure."""

from __future__ import annotations

import ast
import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakSet

import pytest

from mmkv import Engine
from mmkv.engine.errors import STOPS, ForeignError, InputError
from mmkv.prompt import special
from mmkv.reply import ReplyWriter
from mmkv.scheduler import Ticket
from mmkv.server.engine_thread import (
    Delta,
    EngineCore,
    Events,
    Failed,
)
from mmkv.server.footprint import UNSENT_TOGETHER
from mmkv.server.job import ChatJob, ConversationLookup
from mmkv.server.reply import Spelled
from mmkv.server.settings import RequestBounds
from tests.support.chat_models import picture, save_llama
from tests.support.servers import Server, asked, held_pages, picture_part, serving

FOREVER = 1500  # tokens; the client leaves long before
LONG = "a question that is read in very many chunks of two tokens " * 12


def load(folder: Path) -> Engine:
    return Engine.from_pretrained(folder, policy="streamingllm", budget=24, dtype="float32")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    def slow() -> Engine:
        return Engine.from_pretrained(
            folder,
            gates="random",
            policy="dbtrimkv",
            budget=24,
            dtype="float32",
            kv_limit=2**20,
            prefill_chunk=2,
        )

    # Nothing ends by itself while a test looks.
    with serving(slow, max_running=1, max_queue=2, keep_alive=0.05) as made:
        yield made


class Client:
    """Sends a request over a socket of its own, and can leave at any time."""

    def __init__(self, server: Server, body: dict[str, Any]) -> None:
        parts = urlsplit(server.url)
        self.socket = socket.create_connection((parts.hostname or "", parts.port or 0))
        text = json.dumps(body).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        self.socket.sendall(f"{head}Content-Length: {len(text)}\r\n\r\n".encode() + text)

    def read_until(self, text: bytes) -> None:
        found = b""
        while text not in found:
            piece = self.socket.recv(4096)
            assert piece, found
            found += piece

    def leave(self) -> None:
        self.socket.close()


def open_ones(core: EngineCore) -> list[Ticket[Any]]:
    scheduler = core.scheduler
    return [*scheduler.queues, *scheduler.preparing, *scheduler.decoding]


def states(core: EngineCore) -> list[str]:
    return [one.state for one in open_ones(core)]


def nothing_held(core: EngineCore) -> bool:
    return held_pages(core) == 0 and core.scheduler.running == 0


def returned(server: Server, leave: Callable[[], None], left: int = 0) -> None:
    """Leave, and check that the turn that finds it out ends the request and returns its pages."""
    late: list[str] = []
    ended: list[int] = []

    def watch(core: EngineCore) -> None:
        scheduler = core.scheduler

        def turn() -> bool:
            before = open_ones(core)
            asked = [one for one in before if one.cancel_asked]
            more = type(scheduler).turn(scheduler)
            late.extend(one.state for one in asked if not one.over)
            if any(one.state == "cancelled" for one in before):
                ended.append(held_pages(core))
            return more

        scheduler.turn = turn  # type: ignore[method-assign]

    server.inside(watch)
    leave()
    server.wait_for(lambda core: len(open_ones(core)) == left and bool(ended))
    server.inside(lambda core: delattr(core.scheduler, "turn"))
    assert late == [] and (left or ended[-1] == 0)


@pytest.mark.parametrize("stream", [False, True])
def test_in_a_reply(server: Server, stream: bool) -> None:
    client = Client(server, asked(f"talk {stream}", max_tokens=FOREVER, stream=stream))
    if stream:
        client.read_until(b"delta")
    server.wait_for(lambda core: states(core) == ["decode"])
    returned(server, client.leave)


@pytest.mark.parametrize("stream", [False, True])
def test_in_a_prompt(server: Server, stream: bool) -> None:
    client = Client(server, asked(f"{stream} {LONG}", max_tokens=FOREVER, stream=stream))
    server.wait_for(lambda core: states(core) == ["prefill"] and held_pages(core) > 0)
    returned(server, client.leave)


@pytest.mark.parametrize("stream", [False, True])
def test_in_the_queue(server: Server, stream: bool) -> None:
    first = Client(server, asked("first", max_tokens=FOREVER))
    server.wait_for(lambda core: states(core) == ["decode"])
    second = Client(server, asked("second", max_tokens=FOREVER, stream=stream))
    server.wait_for(lambda core: sorted(states(core)) == ["decode", "waiting"])
    returned(server, second.leave, left=1)
    returned(server, first.leave)


@pytest.mark.parametrize("stream", [False, True])
def test_while_its_picture_comes(
    server: Server, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, stopped = threading.Event(), threading.Event()

    async def never(*_: Any) -> Any:
        started.set()
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            stopped.set()
            raise

    monkeypatch.setattr(server.state.media, "resolve", never)
    message = {"role": "user", "content": [picture_part(picture("red", (24, 24)))]}
    client = Client(server, asked(message, stream=stream))
    server.wait_for(lambda core: states(core) == ["preparing"])
    assert started.wait(10)
    returned(server, client.leave)
    assert stopped.wait(10), "the picture is still being fetched"


def test_a_slow_address_holds_up_nobody(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """One request is served at a time; two that wait for their pictures take no place."""

    async def never(*_: Any) -> Any:
        await asyncio.sleep(3600)

    monkeypatch.setattr(server.state.media, "resolve", never)
    part = {"type": "image_url", "image_url": {"url": "HTTP://example.org/a.png"}}
    message = {"role": "user", "content": [part]}
    slow = [Client(server, asked(message)) for _ in range(2)]
    server.wait_for(lambda core: states(core) == ["preparing"] * 2)
    assert server.chat("hello").status_code == 200
    for client in slow:
        client.leave()
    server.wait_for(nothing_held)


def test_a_full_queue_is_said_before_pictures_are_decoded(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: Any) -> Any:
        raise AssertionError("decoded although there is no room")

    clients = [Client(server, asked(f"fill {at}", max_tokens=FOREVER)) for at in range(3)]
    server.wait_for(lambda core: sorted(states(core)) == ["decode", "waiting", "waiting"])
    monkeypatch.setattr(server.state.media, "resolve", refuse)
    message = {"role": "user", "content": [picture_part(picture("red", (24, 24)))]}
    for stream in (False, True):
        answer = server.chat(message, stream=stream)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (503, "no_room")
        assert (error["committed"], error["limit"], error["unit"]) == (2, 2, "requests")
        assert int(answer.headers["retry-after"]) > 0
    for client in clients:
        client.leave()
    server.wait_for(nothing_held)


def test_a_stream_that_waits_is_kept_alive(server: Server) -> None:
    first = Client(server, asked("first", max_tokens=FOREVER))
    server.wait_for(lambda core: states(core) == ["decode"])
    second = Client(server, asked("second", stream=True))
    second.read_until(b": keep-alive")
    first.leave()
    second.read_until(b"[DONE]")
    second.leave()


def test_replies_come_to_their_end_when_the_server_is_told_to_stop(folder: Path) -> None:
    with serving(lambda: load(folder)) as server:
        client = Client(server, asked("talk", max_tokens=200, stream=True))
        client.read_until(b"delta")
        server.web.should_exit = True
        client.read_until(b"[DONE]")
        client.leave()


def test_an_error_of_the_thread_ends_all_requests(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: Any) -> None:
        raise ZeroDivisionError("a defect")

    with serving(lambda: load(folder)) as server:
        core = server.state.engine_thread.core
        monkeypatch.setattr(core.scheduler, "turn", fails)
        for _ in range(2):
            answer = server.chat("hello")
            assert answer.status_code == 503 and "defect" not in answer.text
            assert answer.json()["error"]["code"] == "engine_stopped"
        assert server.client.get("/health").status_code == 503
        monkeypatch.undo()
        core.scheduler.close()


@pytest.mark.parametrize(
    ("where", "what", "keep"),
    [
        (ChatJob, "usage", False),
        (ConversationLookup, "_keep_reply", False),
        (ConversationLookup, "_keep_whole", True),
    ],
)
def test_an_error_at_the_end_of_one_request_is_its_own(
    server: Server, where: type, what: str, keep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's thread goes on, and nothing of the request is held."""

    def fails(*_: Any) -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(where, what, fails)
    if keep:
        body = {"model": "small", "input": "hello", "max_output_tokens": 3}
        answer = server.client.post("/v1/responses", json=body)
    else:
        answer = server.chat(f"hello {what}")
    assert answer.status_code == 500 and "defect" not in answer.text
    monkeypatch.undo()
    server.wait_for(nothing_held)
    assert server.chat("hello").status_code == 200
    assert server.client.get("/health").status_code == 200


def test_a_prompt_whose_replies_cannot_begin_fails_alone(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = ChatJob._begin_replies

    def fails(job: ChatJob, logits: Any) -> None:
        begin(job, logits)
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(ChatJob, "_begin_replies", fails)
    assert server.chat("hello", n=2).status_code == 500
    monkeypatch.undo()
    server.wait_for(nothing_held)
    assert server.chat("hello").status_code == 200


def test_a_reply_that_cannot_be_written_fails_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = ReplyWriter.put

    def fails(writer: ReplyWriter, token: int) -> int | None:
        if writer.limit == 7 and len(writer.token_ids) == 1:
            raise ZeroDivisionError("a defect")
        return put(writer, token)

    monkeypatch.setattr(ReplyWriter, "put", fails)
    with serving(lambda: load(folder)) as server:
        other = Client(server, asked("first", max_tokens=FOREVER))
        server.wait_for(lambda core: states(core) == ["decode"])
        answer = server.chat("hello", n=2, max_tokens=7)
        assert answer.status_code == 500 and "defect" not in answer.text
        assert server.inside(states) == ["decode"]
        other.leave()
        server.wait_for(nothing_held)


def test_an_error_of_a_file_is_no_client_that_left(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*_: Any) -> None:
        raise PermissionError("a file of the server's")

    monkeypatch.setattr(server.state.engine_thread, "submit", fails)
    for stream in (False, True):
        answer = server.chat("hello", stream=stream)
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal")


def test_one_key_has_so_many_requests_under_way(folder: Path) -> None:
    with serving(lambda: load(folder), max_per_key=1) as server:
        first = Client(server, asked("first", max_tokens=FOREVER))
        server.wait_for(lambda core: states(core) == ["decode"])
        answer = server.chat("second")
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        assert answer.json()["error"]["code"] == "rate_limit_exceeded"
        first.leave()
        server.wait_for(nothing_held)
        assert server.chat("third").status_code == 200


def delta(index: int, text: str, count: int = 0, reason: str | None = None) -> Delta:
    top = tuple(Spelled("a", 0.0, [97]) for _ in range(20))
    return Delta(index, text, [Spelled("a", 0.0, [97], top) for _ in range(count)], reason)


async def taken(events: Events) -> list[Any]:
    found = []
    while events._waiting:
        found.append(await events.get())
    return found


def test_a_client_that_is_behind_gets_several_tokens_at_a_time() -> None:
    async def run() -> None:
        events = Events()
        for at in range(1000):
            events.put(delta(at % 2, f"{at} ", count=1))
        for index in range(2):
            events.put(delta(index, "", reason="length"))
        assert events.unsent > 0
        found = await taken(events)
        assert len(found) <= 64 and events.unsent == 0
        for index in range(2):
            own = [one for one in found if one.index == index]
            assert "".join(one.text for one in own).split() == [
                str(at) for at in range(index, 1000, 2)
            ]
            assert sum(len(one.spelled) for one in own) == 500
            assert [one.finish_reason for one in own if one.finish_reason] == ["length"]
        # One that keeps up gets each as it comes.
        for at in range(100):
            events.put(delta(0, f"{at}"))
            assert [one.text for one in await taken(events)] == [f"{at}"]

    asyncio.run(run())


def test_what_is_not_sent_has_a_bound() -> None:
    async def run() -> None:
        events = Events()
        while not events.over:
            events.put(delta(0, "a", count=100))
            assert events.unsent <= RequestBounds.unsent + 100 * 21 * 600
        (failed,) = await taken(events)
        assert isinstance(failed, Failed) and "not read" in str(failed.error)
        events.put(delta(0, "more"))
        assert not events._waiting

    asyncio.run(run())


def test_what_is_not_sent_has_a_bound_together() -> None:
    async def run() -> None:
        together: WeakSet[Events] = WeakSet()
        streams = [Events(together) for _ in range(2 * UNSENT_TOGETHER)]
        streams[3].put(delta(0, "b", count=100))  # more than any other, from the beginning
        while not any(one.over for one in streams):
            for one in streams:
                one.put(delta(0, "a", count=100))
                bound = UNSENT_TOGETHER * RequestBounds.unsent + 100 * 21 * 600
                assert sum(each.unsent for each in streams) <= bound
        assert [one.over for one in streams] == [one is streams[3] for one in streams]
        (failed,) = await taken(streams[3])
        assert isinstance(failed, Failed) and "not read" in str(failed.error)
        assert not any(isinstance(one, Failed) for one in await taken(streams[0]))

    asyncio.run(run())


def test_a_reader_that_is_too_slow_is_dropped(server: Server) -> None:
    """Its reply ends although it has not left, and others' go on."""
    fields = {"logprobs": True, "top_logprobs": 20, "max_tokens": FOREVER, "stream": True}
    with pytest.MonkeyPatch.context() as patched:
        few = replace(server.inside(lambda core: core.settings), bounds=RequestBounds(unsent=1))
        server.inside(lambda core: patched.setattr(core, "settings", few))
        client = Client(server, asked("talk", **fields))
        client.read_until(b"client_too_slow")
        server.wait_for(nothing_held)
    client.leave()


# What a library raises is the failure of one request, also what is no Exception.


QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
NESTED = r"(a+)+$"
SPACE = "\u0120"  # a space, in a byte-level vocabulary


class Panic(BaseException):
    """As pyo3_runtime.PanicException: no Exception."""


def checkpoint(folder: Path, expression: str) -> Path:
    """Save a model whose tokenizer splits by ``expression`` and has runs of 2 to 128 spaces."""
    save_llama(folder, max_position_embeddings=262_144, vocab_size=512)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    split = {
        "type": "Split",
        "pattern": {"Regex": expression},
        "behavior": "Isolated",
        "invert": False,
    }
    bytewise = tokenizer["pre_tokenizer"] | {"use_regex": False}
    tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, bytewise]}
    model, free = tokenizer["model"], 300
    for power in range(7):
        run = SPACE * 2**power
        model["vocab"][run * 2] = free + power
        model["merges"].append([run, run])
    path.write_text(json.dumps(tokenizer))
    return folder


@contextmanager
def serve(folder: Path) -> Iterator[Server]:
    def load() -> Engine:
        return Engine.from_pretrained(folder, policy="streamingllm", budget=64, dtype="float32")

    with serving(load) as made:
        yield made


@contextmanager
def somebody_reads(server: Server) -> Iterator[None]:
    """Have a second client's stream go on during the block; it gets what it gets alone."""
    fields: dict[str, Any] = {"max_tokens": 300}
    alone = server.chat("b", **fields).json()["choices"][0]["message"]["content"]
    assert len(alone) > 50
    begun, pieces = threading.Event(), list[str]()

    def read() -> None:
        body = asked("b", stream=True, **fields)
        with server.client.stream("POST", "/v1/chat/completions", json=body) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    begun.set()
                    for choice in json.loads(line[6:])["choices"]:
                        pieces.append(choice["delta"].get("content") or "")

    reader = threading.Thread(target=read)
    reader.start()
    try:
        assert begun.wait(60)
        yield
    finally:
        reader.join()
    assert "".join(pieces) == alone


@pytest.mark.parametrize(
    ("expression", "text", "words"),
    [
        (QWEN, " " * 2_000_000 + "a", "2,000,000 blanks in a row at character 1,"),
        (NESTED, "a" * 31 + "b", "gives up on this text"),
    ],
    ids=["spaces", "nested"],
)
def test_a_tokenizer_that_panics_stops_nobody(
    tmp_path: Path, expression: str, text: str, words: str
) -> None:
    with serve(checkpoint(tmp_path, expression)) as server:
        with somebody_reads(server):
            for stream in (False, True):
                answer = server.chat(text, stream=stream)
                error = answer.json()["error"]
                assert answer.status_code == 400 and words in error["message"], error
        assert server.client.get("/health").status_code == 200


RUNS = {" ": 0, "\n": 499_999, "x": 700_000, "7": 0, "!": 499_999, "_": 700_000}


def test_without_the_check_a_long_run_is_a_refusal_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library's own limit is met then; that is why such runs are refused and not cut."""
    monkeypatch.setattr(special, "LONGEST_RUN", 2**40)
    engine = Engine.from_pretrained(checkpoint(tmp_path, QWEN), policy="streamingllm", budget=64)
    with engine.session() as session, pytest.raises(InputError, match="retry-limit"):
        session.send(" " * 10_000_000 + "a")
    # Parts have other ids than the whole: a run of 3 spaces is 2 + 1.
    ids = engine.processor._ids
    assert ids(" " * 3 + "a") != ids(" " * 1) + ids(" " * 2 + "a")


@pytest.mark.parametrize(
    ("one", "before", "length"),
    [
        *((one, before, 1_000_000) for one, before in RUNS.items()),
        *((one, RUNS[one], 999_999) for one in " x"),
    ],
)
def test_runs_are_measured_wherever_they_stand(length: int, one: str, before: int) -> None:
    other = "7" if one == "x" else "x"
    text = ("a1 !" * before)[:before] + other + one * length + other
    if length < special.LONGEST_RUN:
        special.require_no_long_run(text)
    else:
        with pytest.raises(InputError, match=f"1,000,000 .* at character {before + 2:,},"):
            special.require_no_long_run(text)


def test_a_panic_anywhere_ends_one_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the prompt, in choosing a token, in the step, in what is told: others go on."""
    from mmkv.prompt.template import ChatTemplate
    from mmkv.server import engine_thread as workers

    def broken(owner: type, name: str, when: Any) -> Any:
        real = getattr(owner, name)

        def changed(*given: Any, **named: Any) -> Any:
            if when(*given):
                raise Panic("of a library")
            return real(*given, **named)

        return owner, name, changed

    def asked_for(_: Any, messages: Any, *__: Any) -> bool:
        return "stop me" in str(messages)

    def drawn(writer: Any, *_: Any) -> bool:
        return bool(writer._logit_settings.bias)

    places = [
        [broken(ChatTemplate, "render", asked_for), broken(ChatTemplate, "layout", asked_for)],
        [broken(ReplyWriter, "choose", drawn)],
        [broken(ReplyWriter, "put", lambda self, *_: drawn(self) and len(self.token_ids) > 1)],
        [broken(workers.Request, "news", lambda self: self.ticket.job.work.logit_settings.bias)],
    ]
    with serve(save_llama(tmp_path)) as server:
        for place in places:
            with somebody_reads(server), monkeypatch.context() as patch:
                for each in place:
                    patch.setattr(*each)
                answer = server.chat("stop me", logit_bias={"65": 1})
                assert answer.status_code in (400, 500), answer.text
            assert server.client.get("/health").status_code == 200
            assert server.chat("again").status_code == 200


def test_chat_says_it_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from mmkv.cli.app import run

    folder = checkpoint(tmp_path, NESTED)
    options = ["--policy", "streamingllm", "--budget", "64"]
    assert run(["chat", str(folder), *options, "-p", "a" * 31 + "b"]) == 1
    shown = capsys.readouterr().err.strip()
    assert shown.startswith("mmkv: error: ") and "\n" not in shown and "gives up" in shown


def test_what_is_no_exception_becomes_one() -> None:
    from mmkv.engine.errors import as_exception

    made = as_exception(Panic("x\ny"))
    assert isinstance(made, ForeignError) and str(made) == "Panic: x"
    assert as_exception(made) is made and isinstance(made.__cause__, Panic)
    assert {KeyboardInterrupt, SystemExit, GeneratorExit} == {*STOPS}


# Clean-up of files that another thread may still write: a cancellation must not run it.
CHECKOUT = Path(__file__).resolve().parents[3]
CANCELLED = {"mmkv/server/sessions.py"}


def test_no_handler_lets_a_panic_through() -> None:
    """``except Exception`` does not take what libraries in Rust raise."""
    found = []
    for root in (CHECKOUT / "engine", CHECKOUT / "mmkv"):
        for path in root.rglob("*.py"):
            name = f"{root.name}/{path.relative_to(root)}"
            text = path.read_text()
            for node in ast.walk(ast.parse(text)) if "except Exception" in text else ():
                kind = node.type if isinstance(node, ast.ExceptHandler) else None
                if isinstance(kind, ast.Name) and kind.id == "Exception" and name not in CANCELLED:
                    found.append(f"{name}:{node.lineno}")
    assert not found, "catch STOPS first, then BaseException"
