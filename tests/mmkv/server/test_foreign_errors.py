"""What a library raises is the failure of one request, also what is no Exception."""

from __future__ import annotations

import ast
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mmkv import Engine
from mmkv.engine.errors import STOPS, ForeignError, InputError
from mmkv.prompt import special
from tests.support.chat_models import save_llama
from tests.support.servers import Server, asked, serving

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
        (QWEN, " " * 10_000_000 + "a", "10,000,000 blanks in a row at character 1,"),
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


@pytest.mark.parametrize("length", [999_999, 1_000_000])
@pytest.mark.parametrize("one", [" ", "\n", "x", "7", "!", "_"])
@pytest.mark.parametrize("before", [0, 499_999, 700_000])
def test_runs_are_measured_wherever_they_stand(length: int, one: str, before: int) -> None:
    other = "7" if one == "x" else "x"
    text = ("a1 !" * before)[:before] + other + one * length + other
    if length < special.LONGEST_RUN:
        special.require_no_long_run(text)
    else:
        with pytest.raises(InputError, match=f"1,000,000 .* at character {before + 2:,},"):
            special.require_no_long_run(text)


@pytest.mark.parametrize("place", ["render", "draw", "decode", "news"])
def test_a_panic_anywhere_ends_one_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """In the prompt, in choosing a token, in the step, in what is told: others go on."""
    from mmkv.prompt.template import ChatTemplate
    from mmkv.server import engine_thread as workers
    from mmkv.server.writer import ScoredWriter

    def once(owner: type, name: str, when: Any) -> None:
        real = getattr(owner, name)

        def changed(*given: Any, **named: Any) -> Any:
            if when(*given):
                raise Panic("of a library")
            return real(*given, **named)

        monkeypatch.setattr(owner, name, changed)

    with serve(save_llama(tmp_path)) as server:
        with somebody_reads(server):
            marked = {"logit_bias": {"65": 1}}
            if place == "render":
                once(ChatTemplate, "render", lambda self, messages, *_: "stop me" in str(messages))
                once(ChatTemplate, "layout", lambda self, messages, *_: "stop me" in str(messages))
            elif place == "draw":
                once(ScoredWriter, "choose", lambda self, *_: bool(self._logit_settings.bias))
            elif place == "decode":
                once(
                    ScoredWriter,
                    "put",
                    lambda self, *_: bool(self._logit_settings.bias) and len(self.token_ids) > 1,
                )
            else:
                once(
                    workers.Request,
                    "news",
                    lambda self: bool(self.ticket.job.work.logit_settings.bias),
                )
            answer = server.chat("stop me", **marked)
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
            for node in ast.walk(ast.parse(path.read_text())):
                kind = node.type if isinstance(node, ast.ExceptHandler) else None
                if isinstance(kind, ast.Name) and kind.id == "Exception" and name not in CANCELLED:
                    found.append(f"{name}:{node.lineno}")
    assert not found, "catch STOPS first, then BaseException"
