"""Turns of the chat that are taken back, tried again, and listed: /undo, /retry, /history."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mmkv.chat.repl import Repl
from mmkv.prompt.template import ChatTemplate
from tests.support.chat_models import script

pytest_plugins = ("tests.support.cli_fixtures",)


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
    repl.handle("/clear")
    assert repl.session.rewrites == "keep"
    repl.handle("/memory")
    assert "as wanted" not in capfd.readouterr().err
