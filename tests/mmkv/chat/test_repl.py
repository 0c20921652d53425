"""The interactive conversation: commands, lines, turns taken back, errors, Ctrl-C, ``--cost``."""

from __future__ import annotations

import io
import json
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError

import pytest
import torch
from PIL import Image

import mmkv.chat.display
import mmkv.session
import mmkv.turn
from mmkv import Engine, Session, bundled_model
from mmkv.chat.display import Display, OutputClosed
from mmkv.chat.inputs import WatchedFolder
from mmkv.chat.options import ChatOptions
from mmkv.chat.repl import Leave, Repl
from mmkv.engine.cache import RaggedCache
from mmkv.engine.config import DEFAULT_POLICY
from mmkv.engine.errors import ContextError, InputError
from mmkv.engine.model.decoder import Decoder
from mmkv.prompt.processing import QwenProcessor
from mmkv.prompt.template import ChatTemplate
from mmkv.reply import ReplyWriter
from mmkv.resources import asset
from tests.support.chat_models import save_qwen3_vl, script

if TYPE_CHECKING:
    from tests.support.cli_fixtures import Ran

pytest_plugins = ("tests.support.cli_fixtures",)


FEW = ("--max-new-tokens", "6")


BOUND = ("--budget", "256")  # without one, a model without gates evicts nothing


def converse(
    mmkv: Callable[..., Ran], model: str, *lines: str, options: tuple[str, ...] = ()
) -> Ran:
    ran = mmkv("chat", model, "-i", *options, *FEW, stdin="\n".join(lines) + "\n")
    assert ran.code == 0 and "Traceback" not in ran.err
    return ran


def records(ran: Ran) -> list[dict[str, Any]]:
    return [json.loads(line) for line in ran.out.splitlines()]


def test_a_conversation_prints_answers_only(mmkv: Callable[..., Ran], model: str) -> None:
    shown = converse(mmkv, model, "hello", "", "and?")
    report = records(converse(mmkv, model, "hello", "", "and?", options=("--json",)))
    assert shown.out == "".join(reply["text"] + "\n" for reply in report)
    assert report[1]["tokens"]["seen"] > report[0]["tokens"]["seen"]


def test_undo_save_load_and_fork_go_back_to_the_same_state(
    mmkv: Callable[..., Ran], model: str, tmp_path: Path
) -> None:
    file = tmp_path / "talk.mmkv"
    ran = converse(
        mmkv,
        model,
        "hello",
        f"/save {file}",
        "and?",  # 1
        "/undo",
        "and?",  # 2
        f"/load {file}",
        "/fork other",
        "and?",  # 3
        "/fork main",
        "and?",  # 4
        "/clear",
        "hello",  # 5
        "/exit",
        "never read",
        options=("--json",),
    )
    report = [(reply["text"], reply["tokens"]) for reply in records(ran)]
    assert len(report) == 6
    assert report[1] == report[2] == report[3] == report[4] and report[5] == report[0]


def test_queued_pictures_and_lines(mmkv: Callable[..., Ran], model: str, picture: str) -> None:
    ran = converse(
        mmkv,
        model,
        f'/image "{picture}"',
        "/image /nowhere.png",
        "what\\",
        "is it?",
        '"""several',
        'lines"""',
        "what\\\nis it?",
        options=("--json", "--policy", "full"),
    )
    first, second, third = records(ran)
    assert first["entries"]["by_modality"]["image"] == 6 * 4  # on 2 layers, 2 heads
    assert second["entries"]["by_modality"]["image"] == 6 * 4  # sent once
    # One token a character; <|im_start|> and the other four markers count one each.
    asked = len("user\nwhat\nis it?\nassistant\n")
    assert first["tokens"]["prompt"] == asked + 3 + 2 + 6
    # Before it: the latest reply's last token, its end marker and a line break.
    assert third["tokens"]["prompt"] == asked + 3 + 3
    assert second["tokens"]["prompt"] - third["tokens"]["prompt"] == len("several\nlines") - len(
        "what\nis it?"
    )
    assert "file not found" in ran.err


def test_commands_answer_on_stderr(mmkv: Callable[..., Ran], model: str) -> None:
    ran = converse(
        mmkv,
        model,
        "/help",
        "/set temperature 0.5",
        "/set top_p 7",
        "/set seed abc",
        "/set nonsense 1",
        "/system Be kind.",
        "/budget 8",
        "/budget 0",
        "/budget much",
        "/undo",
        "/load /nowhere.mmkv",
        "/save",
        "/save /nowhere/at/all",
        "/nonsense",
        "/quit",
        options=BOUND,
    )
    assert ran.out == ""
    for says in (
        "/fork",
        "temperature 0.5",
        "top_p is 7",
        "'abc' does not fit seed",
        "no setting 'nonsense'",
        "Be kind.",
        "budget 8 entries per row",
        "'much' is not a budget",
        "no turn to take back",
        "nowhere.mmkv",
        "/save needs a file name",
        "there is no folder /nowhere/at",
        "unknown command /nonsense",
    ):
        assert says in ran.err, says


def test_statistics_count_the_entries(mmkv: Callable[..., Ran], model: str, picture: str) -> None:
    ran = converse(
        mmkv, model, f"/image {picture}", "what?", "/stats", options=("--policy", "full")
    )
    seen = int(re.search(r"tokens seen\s+(\d+)", ran.err)[1])  # type: ignore[index]
    assert re.search(
        rf"entries kept\s+{seen * 4} of {seen * 4} \({seen * 4 - 24} text, 24 image", ran.err
    )
    assert re.search(rf"layer 1 .*{seen * 2} \({seen}\.0 per head\)", ran.err)


def test_a_picture_that_is_mostly_gone_is_said_once_in_each_conversation(
    mmkv: Callable[..., Ran], model: str, picture: str
) -> None:
    seen = (f"/image {picture}", "what is this?")
    options = ("--policy", "streamingllm", "--budget", "8")
    ran = converse(mmkv, model, *seen, "and?", "/clear", *seen, "and?", options=options)
    assert ran.err.count("mostly forgotten") == 2


def test_an_error_keeps_the_conversation(
    mmkv: Callable[..., Ran], model: str, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.mmkv"
    broken.write_bytes(b"\x08\0\0\0\0\0\0\0nonsense")
    # In one chunk, so that the long message is refused and not read piece by piece.
    options = ("--json", "--prefill-chunk", "2048", *BOUND)
    ran = converse(
        mmkv,
        model,
        "hello",
        "x" * 3000,
        f"/load {broken}",
        "/budget 0.1",
        "/image -",
        "and?",
        options=options,
    )
    plain = converse(mmkv, model, "hello", "and?", options=options)
    assert [r["text"] for r in records(ran)] == [r["text"] for r in records(plain)]
    assert ran.err.count("mmkv: error: ") == 3


def test_a_smaller_budget_in_mid_conversation_evicts(mmkv: Callable[..., Ran], model: str) -> None:
    ran = converse(mmkv, model, "hello", "/budget 8", "and?", options=("--json", *BOUND))
    first, second = records(ran)
    # 8 in each of 2 x 2 rows, and one more: rkv evicts every second step under so small a budget.
    assert first["entries"]["evicted"] == 0 and second["entries"]["kept"] == 36
    ran = converse(mmkv, model, "/budget 8")
    assert "policy 'full' evicts nothing" in ran.err and "load the model with a budget" in ran.err


# --- Ctrl-C ---

# Tokens that no machine generates before the signal comes, and seconds that none needs to stop.
ENDLESS, HANGS = 200_000, 600


@pytest.fixture(scope="module")
def patient_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a model whose context has room for ENDLESS tokens."""
    return str(save_qwen3_vl(tmp_path_factory.mktemp("patient"), positions=2 * ENDLESS))


def start(*arguments: str) -> subprocess.Popen[str]:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "mmkv", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def interrupt_after_output(process: subprocess.Popen[str]) -> str:
    """Send SIGINT once the reply has begun; return what was read until then."""
    assert process.stdout is not None
    begun = process.stdout.read(1)
    assert begun, "no reply came"
    process.send_signal(signal.SIGINT)
    return begun


@pytest.mark.slow(reason="a process that loads torch and a model")
def test_ctrl_c_stops_the_reply_and_the_conversation_goes_on(patient_model: str) -> None:
    long = ("--max-new-tokens", str(ENDLESS))
    process = start("chat", patient_model, "-i", *long, "--policy", "streamingllm")
    assert process.stdin is not None
    process.stdin.write("hello\n")
    process.stdin.flush()
    interrupt_after_output(process)
    _, err = process.communicate("/set max_new_tokens 2\nagain\n/stats\n", timeout=HANGS)
    assert process.returncode == 0 and "Traceback" not in err
    assert "(stopped)" in err and "tokens seen" in err
    assert int(re.search(r"tokens seen\s+([\d,]+)", err)[1].replace(",", "")) < ENDLESS  # type: ignore[index]


@pytest.mark.slow(reason="a process that loads torch and a model")
def test_ctrl_c_ends_a_single_answer_with_code_130(patient_model: str) -> None:
    process = start("chat", patient_model, "-p", "hello", "--max-new-tokens", str(ENDLESS))
    interrupt_after_output(process)
    _, err = process.communicate(timeout=HANGS)
    assert process.returncode == 130 and "Traceback" not in err


# Turns of the chat that are taken back, tried again, and listed: /undo, /retry, /history.


def test_undo_gives_the_picture_back(
    repl: Repl, picture: str, capfd: pytest.CaptureFixture[str]
) -> None:
    repl.handle("hello")
    repl.handle(f"/image {picture}")
    repl.handle("what is it?")
    tokens = repl.session.seen
    assert repl.images == []
    repl.handle("/undo")
    assert [image.size for image in repl.images] == [(48, 32)]
    assert "queued for the next message: picture 48 x 32" in capfd.readouterr().err
    repl.handle("what is it?")
    assert repl.session.seen == tokens and repl.images == []
    repl.handle("/undo")
    repl.handle("/undo")
    repl.handle("/undo")
    assert len(repl.images) == 1 and "no turn to take back" in capfd.readouterr().err


def test_retry_answers_the_same_message_again(
    repl: Repl, picture: str, capfd: pytest.CaptureFixture[str]
) -> None:
    repl.handle("/retry")
    assert "no turn to try again" in capfd.readouterr().err
    repl.handle("hello")
    repl.handle(f"/image {picture}")
    repl.handle("what is it?")
    first, state = repl.session.last, repl.session.state()
    repl.handle(f"/image {picture}")
    repl.handle("/retry")  # greedy: the same again, and what is queued stays
    assert repl.session.last.token_ids == first.token_ids  # type: ignore[union-attr]
    assert repl.session.state() == state and len(repl.images) == 1
    repl.handle("/set temperature 5")
    repl.handle("/retry")
    assert repl.session.last.token_ids != first.token_ids  # type: ignore[union-attr]
    assert len(repl.session.history) == 4 and repl.session.history[2]["content"][-1]["text"]
    for _ in range(2):
        repl.handle("/undo")
    assert repl.session.history == []


def test_a_retry_that_fails_brings_the_old_reply_back(
    repl: Repl, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    repl.handle("hello")
    repl.handle("and?")
    before = (repl.session.state(), list(repl.session.history), repl.session.last)

    def fail(*_: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as broken:
        broken.setattr("mmkv.session.step", fail)
        repl.handle("/retry")
    assert "out of memory" in capfd.readouterr().err
    assert (repl.session.state(), repl.session.history, repl.session.last) == before
    repl.handle("/retry")
    assert len(repl.session.history) == 4
    repl.handle("/undo")
    repl.handle("/undo")
    assert repl.session.history == []


def test_history_is_shown(repl: Repl, picture: str, capfd: pytest.CaptureFixture[str]) -> None:
    repl.handle("/history")
    repl.handle(f"/image {picture}")
    repl.handle("what is it?")
    reply = repl.session.history[-1]["content"]
    capfd.readouterr()
    repl.handle("/history")
    shown = capfd.readouterr()
    assert shown.out == "" and shown.err == f">>> [picture] what is it?\n{reply}\n"


def test_what_a_template_shows_otherwise_is_read_again_or_kept_and_told(
    repl: Repl, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    engine = repl.engine
    shown = "{{ (p.text.split('</think>')[-1] if m.role == 'assistant' else p.text) }}"
    source = str(engine.processor.template.source).replace("{{ p.text }}", shown)
    template = ChatTemplate(engine.processor.tokenizer, source, parts=True)
    monkeypatch.setattr(engine.processor, "template", template)
    repl.sampling = replace(repl.sampling, max_new_tokens=40)
    script(monkeypatch, engine, ["<think>t</think>y"] * 3)
    repl.handle("/set rewrites never")
    repl.handle("/set rewrites keep")
    told = capfd.readouterr().err
    assert "rewrites is reread or keep, not 'never'" in told and "rewrites keep" in told
    for text in ("one", "two", "three"):
        repl.handle(text)
    assert capfd.readouterr().err.count("stays as it was read, as wanted") == 1
    repl.handle("/memory")
    told = capfd.readouterr().err
    assert "kept " in told and "as wanted (rewrites: keep)" in told
    for command in ("/budget 48", "/clear"):
        repl.handle(command)
    assert repl.session.rewrites == "keep" and repl.session.budget.value == 48
    repl.handle("/memory")
    assert "as wanted" not in capfd.readouterr().err


# The chat goes on after any exception of a turn, with the state of before.


# Where a turn of the chat may fail, in the order of the turn.
PLACES = (
    (mmkv.turn, "take_media"),
    (ChatTemplate, "go_on"),
    (QwenProcessor, "load_picture"),
    (QwenProcessor, "encode"),
    (RaggedCache, "fork"),
    (Decoder, "embed_turn"),
    (Decoder, "forward"),
    (Decoder, "logits"),
    (ReplyWriter, "draw_from"),
    (ReplyWriter, "take"),
    (mmkv.session, "step"),
    (mmkv.session.Session, "memory"),
    (ReplyWriter, "held_text"),
    (ReplyWriter, "reply"),
    (mmkv.chat.display, "_write"),
)
RUNS = 75


class Unspeakable(Exception):
    """Cannot be shown."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


def exceptions() -> list[type[Exception]]:
    """Return every class of exceptions that is loaded, those of torch and the packages, too."""
    found: list[type[Exception]] = []
    waiting: list[type[Exception]] = [Exception]
    while waiting:
        kind = waiting.pop()
        found.append(kind)
        waiting += [one for one in kind.__subclasses__() if one not in found]
    # Those that end a chat on purpose; and one whose broken instances complain when they go.
    return sorted(set(found) - {Leave, OutputClosed, HTTPError}, key=repr)


def make(kind: type[Exception], rng: random.Random) -> Exception:
    for arguments in (("it\nbroke",), (), (2, "it broke"), ("utf-8", b"\xff", 0, 1, "it broke")):
        try:
            made = kind(*arguments)
        except Exception:
            continue
        return made
    return Unspeakable()


@pytest.fixture
def survives_repl(model: str) -> Iterator[Repl]:
    """Yield a conversation of one turn on a small model."""
    options = ChatOptions(quiet=True, max_new_tokens=5)
    engine = Engine.from_pretrained(model, policy="streamingllm", budget=16)
    made = Repl(engine, options, Display(options), [], [])
    made.handle("hello")
    yield made
    made.session.close()
    engine.cache.check()


def state(repl: Repl) -> tuple[Any, ...]:
    session = repl.session
    rows = [row.tolist() for layer in session.retained() for row in layer]
    return (list(session.history), session.state(), session.unfed, rows, len(repl.images))


def test_any_exception_anywhere_in_a_turn_is_one_line_and_changes_nothing(
    survives_repl: Repl, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(21)
    kinds = exceptions()
    assert len(kinds) > 200 and torch.OutOfMemoryError in kinds
    survives_repl.images = [Image.new("RGB", (32, 32), "red")]
    before = state(survives_repl)
    hit = set()
    for run in range(RUNS):
        home, name = PLACES[run % len(PLACES)]
        error = make(rng.choice(kinds), rng)
        # Each place fails at its first call once; some have no second one in a turn.
        after = rng.randrange(3) if run >= len(PLACES) else 0
        raised = fail(home, name, error, after)
        capsys.readouterr()
        try:
            survives_repl.handle("what is it?")
        finally:
            raised.undo()
        shown = capsys.readouterr().err
        if raised.count:
            hit.add(name)
        # A template may refuse to show the past anew: the turn goes on without the comparison.
        refused = isinstance(error, InputError) and after > 0 and not shown
        refused |= name == "step" and isinstance(error, ContextError)  # the reply ends there
        if raised.count and not refused:
            assert shown.startswith("mmkv: error: ") and shown.count("\n") == 1, (name, shown)
        else:
            survives_repl.command("/undo")
            survives_repl.images = [Image.new("RGB", (32, 32), "red")]
        assert state(survives_repl) == before, (name, error)
    assert hit == {name for _, name in PLACES}
    capsys.readouterr()
    survives_repl.handle("what is it?")
    shown = capsys.readouterr()
    assert shown.err == "" and len(survives_repl.session.history) == 4


class fail:
    """Makes the call number ``after`` of a function raise, and the later ones, until ``undo``."""

    def __init__(self, home: Any, name: str, error: Exception, after: int) -> None:
        self.count, self._left, self._error = 0, after, error
        self._home, self._name, self._kept = home, name, getattr(home, name)
        kept = self._kept

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._left:
                self._left -= 1
                return kept(*args, **kwargs)
            self.count += 1
            raise self._error

        setattr(home, name, call)

    def undo(self) -> None:
        setattr(self._home, self._name, self._kept)


def test_out_of_memory_says_what_to_do(
    survives_repl: Repl, capsys: pytest.CaptureFixture[str]
) -> None:
    for error in (
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 8 bytes"),
    ):
        raised = fail(Decoder, "forward", error, 0)
        survives_repl.handle("more")
        raised.undo()
        shown = capsys.readouterr().err
        assert "out of memory" in shown and "/budget" in shown and "unexpected" not in shown


def test_lines_that_are_not_utf8_are_refused_whole(
    model: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from mmkv.cli.app import run

    rng = random.Random(3)
    broken = [bytes(rng.randrange(128, 256) for _ in range(4)) + b"\xff text" for _ in range(8)]
    lines = [b"hello", *broken, b'"""one\n\xfftwo\nthree"""', b"and?", b"/image \xfe.png"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\n".join(lines) + b"\n")))
    assert run(["chat", model, "-i", "--quiet", "--max-new-tokens", "3"]) == 0
    out, err = capfd.readouterr()
    errors = [line for line in err.splitlines() if line]
    assert len(errors) == len(broken) + 2
    assert all(line.startswith("mmkv: error: the message is not UTF-8 (0x") for line in errors)
    assert "0xff at character 5)" in errors[-2]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hello\nand?\n")))
    assert run(["chat", model, "-i", "--quiet", "--max-new-tokens", "3"]) == 0
    assert capfd.readouterr().out == out


# What eviction cost an answer (``--cost``), beside a computation of its own.


QUESTION = "how many monkeys?"


def test_the_cost_is_that_of_the_two_caches(mmkv: Callable[..., Ran]) -> None:
    picture = str(asset("scene.png"))
    options = ("--image", picture, "-p", QUESTION, "--prefill-chunk", "12")
    ran = mmkv("chat", *options, "--budget", "16", "--cost")
    found = re.search(r"ranks (\d+) of (\d+) tokens of the reply first, KL ([\d.]+) nats", ran.err)
    assert found, ran.err
    turn = [{"type": "image", "image": picture}, {"type": "text", "text": QUESTION}]
    logits = []
    for policy in ("full", DEFAULT_POLICY):
        engine = Engine.from_pretrained(
            bundled_model(), policy=policy, budget=16, prefill_chunk=12, device="cpu"
        )
        with engine.session() as talk:
            text = ran.out.removesuffix("\n")
            ids = engine.processor.tokenizer(text, add_special_tokens=False)["input_ids"]
            rows = [talk.prefill(engine.inputs([{"role": "user", "content": turn}]))]
            rows += [talk.decode(token) for token in ids]
            logits.append(torch.stack(rows).double())
            ends = engine.eos_token_ids
    full, kept = (row.softmax(-1) for row in logits)
    divergence = (full * (full / kept).log()).sum(-1).mean()
    best = full.argmax(-1).tolist()
    same = sum(a == b for a, b in zip(best, ids, strict=False)) + (best[-1] in ends)
    assert (int(found[1]), int(found[2])) == (same, len(ids) + 1)
    assert abs(float(found[3]) - float(divergence)) < 1e-3 and float(divergence) > 0.1


def test_nothing_evicted_costs_nothing_and_the_rest_is_refused(mmkv: Callable[..., Ran]) -> None:
    picture = str(asset("scene.png"))
    ran = mmkv("chat", "--image", picture, "-p", "what is at row 2, column 3?", "--cost")
    assert "ranks 2 of 2 tokens of the reply first, KL 0.0000" in ran.err
    assert mmkv("chat", "-i", "--cost").code == 2


def test_pictures_that_come_into_a_watched_folder_are_read(
    repl: Repl, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Once each; one that is half written once it is whole, a broken one is named once."""
    folder = tmp_path / "camera"
    folder.mkdir()
    red = Image.new("RGB", (32, 32), "red")
    red.save(folder / "before.png")
    red.save(tmp_path / "whole.png")
    whole = (tmp_path / "whole.png").read_bytes()
    script(monkeypatch, repl.engine, ["yes", "no"])

    def pictures() -> list[int]:
        user = [one for one in repl.session.history if one["role"] == "user"]
        return [sum(part["type"] != "text" for part in one["content"]) for one in user]

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    class Typing:
        def __init__(self) -> None:
            self.steps = iter(self.typed())

        def read(self) -> str:
            text = next(self.steps, None)
            if text is None:
                raise EOFError
            return text

        def typed(self) -> Iterator[str]:
            yield "/watch-folder"
            assert repl.folder is None
            yield f"/watch-folder {folder}"
            yield "/watch-folder"
            (folder / "half.png").write_bytes(whole[:40])
            (folder / "note.txt").write_text("no picture")
            red.save(folder / "one.jpg")
            yield "what?"
            assert pictures() == [1]
            (folder / "half.png").write_bytes(whole)
            (folder / "broken.png").write_bytes(b"no picture")
            os.utime(folder / "broken.png", (0, 0))
            yield "/memory"
            yield "/undo"  # the turn, and what came after it
            assert pictures() == [1] and len(repl.session.history) == 1
            yield "and?"
            yield "/watch-folder off"
            red.save(folder / "late.png")
            yield "/memory"
            assert pictures() == [1]
            yield f"/watch-folder {folder}"
            red.save(folder / "unread.png")
            with monkeypatch.context() as patch:
                patch.setattr(Session, "observe", interrupt)
                before = repl.session.seen
                yield "is this sent?"
                assert repl.session.seen == before
                yield "/watch-folder off"
            assert repl.folder is None
            folder.rename(tmp_path / "gone")
            yield f"/watch-folder {folder}"

    monkeypatch.setattr("mmkv.chat.repl.open_reader", lambda _: Typing())
    assert repl.run() == 0
    said = capfd.readouterr().err
    assert "the 1 in it are left out" in said and said.count("broken.png") == 1
    assert said.count("needs a folder") == said.count(f"come into {folder} are read\n") == 1
    assert said.count("(stopped; nothing was sent)") == 1
    assert said.count("read one.jpg") == said.count("read half.png") == 1
    assert "late.png" not in said and "camera cannot be read (No such file" in said
    stopped = WatchedFolder(tmp_path / "gone")
    red.save(tmp_path / "gone" / "new.png")
    next(look := stopped.look())
    look.close()  # as Ctrl-C does
    assert [[name for name, *_ in stopped.look()] for _ in range(2)] == [["new.png"], []]
