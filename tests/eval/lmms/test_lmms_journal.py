"""Finished replies of an evaluation outlast a full disk and an evaluation that fails."""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mmkv.cli.app import run
from mmkv.eval.lmms.reports import REPLIES_VARIABLE, FinishedReplies, fallback, found

FULL = Path("/dev/full")  # takes nothing, as a full disk
needs_full = pytest.mark.skipif(not FULL.exists(), reason="no /dev/full here")


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def rows(file: Path) -> list[Any]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_replies_are_written_as_they_come(tmp_path: Path) -> None:
    made = FinishedReplies(tmp_path / "replies.jsonl")
    for number in range(3):
        assert made.add({"doc_id": number, "replies": ["é\ud800"[:1]]}) is None
        assert len(rows(tmp_path / "replies.jsonl")) == number + 1
    assert FinishedReplies(None).add({"a": 1}) is None


@needs_full
def test_a_full_disk_moves_all_replies_to_the_temporary_folder(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "replies.jsonl"
    made = FinishedReplies(file)
    assert made.add({"doc_id": 0}) is None
    file.unlink()
    file.symlink_to(FULL)  # now the disk is full
    note = made.add({"doc_id": 1})
    assert note is not None and str(fallback(file)) in note and "No space" in note
    assert made.add({"doc_id": 2}) is None
    assert [row["doc_id"] for row in rows(temporary / "replies.jsonl")] == [0, 1, 2]
    assert found(file) == [temporary / "replies.jsonl"]


@needs_full
def test_no_place_at_all_is_said_once(tmp_path: Path, temporary: Path) -> None:
    file = tmp_path / "replies.jsonl"
    for place in (file, fallback(file)):
        place.symlink_to(FULL)
    made = FinishedReplies(file)
    assert "in memory alone" in str(made.add({"doc_id": 0}))
    assert made.add({"doc_id": 1}) is None


def test_the_adapter_keeps_a_reply_when_its_document_is_done(tmp_path: Path) -> None:
    pytest.importorskip("lmms_eval")
    from mmkv.eval.lmms.adapter import Adapter, LmmsRecord

    record = LmmsRecord()

    def script() -> Any:
        reply = yield "ask"
        record.texts.append(reply)

    journal = FinishedReplies(tmp_path / "replies.jsonl")
    request: Any = SimpleNamespace(task_name="mme", doc_id=7)
    kept = Adapter._kept(SimpleNamespace(_journal=journal), request, record, script())  # type: ignore[arg-type]
    assert next(kept) == "ask" and not (tmp_path / "replies.jsonl").exists()
    with pytest.raises(StopIteration):
        kept.send("red")
    assert rows(tmp_path / "replies.jsonl") == [{"task": "mme", "doc_id": 7, "replies": ["red"]}]


@pytest.mark.parametrize("end", ["code", "ctrl-c", "fallback"])
def test_what_was_finished_is_named_when_an_evaluation_fails(
    tmp_path: Path,
    temporary: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    end: str,
) -> None:
    def child(command: list[str], *, env: dict[str, str], **_: Any) -> Any:
        file = Path(env[REPLIES_VARIABLE])
        (fallback(file) if end == "fallback" else file).write_text('{"doc_id": 0}\n')
        if end == "ctrl-c":
            raise KeyboardInterrupt
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr("mmkv.eval.lmms.command.subprocess.run", child)
    output = tmp_path / "out"
    code = run(["eval", "--tasks", "mme", "--output", str(output)])
    assert code == (130 if end == "ctrl-c" else 1)
    (file,) = (temporary if end == "fallback" else output).glob("replies-*.jsonl")
    said = capsys.readouterr().err
    assert f"the replies that were finished are in {file}" in said
    assert rows(file) == [{"doc_id": 0}]


@pytest.mark.parametrize("written", [0, 1, 2])
def test_the_journal_goes_when_the_samples_hold_it_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int
) -> None:
    output = tmp_path / "out"

    def child(command: list[str], *, env: dict[str, str], **_: Any) -> Any:
        Path(env[REPLIES_VARIABLE]).write_text('{"doc_id": 0}\n{"doc_id": 1}\n')
        counts = {"n-samples": {"mme": {"effective": 2}}, "results": {"mme": {"score": 1.0}}}
        (output / "1_results.json").write_text(json.dumps(counts))
        (output / "1_samples_mme.jsonl").write_text("{}\n" * written)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr("mmkv.eval.lmms.command.subprocess.run", child)
    assert run(["eval", "--tasks", "mme", "--output", str(output)]) == (written < 2)
    assert bool(list(output.glob("replies-*"))) == (written < 2)
