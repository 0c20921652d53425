"""MMDU runs on data with broken rows, folders that cannot be written, and full disks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mmkv.eval.mmdu.run
from mmkv import Engine
from mmkv.cli.app import run
from mmkv.engine.errors import InputError
from mmkv.eval.fuzz.models import small_engine
from mmkv.eval.mmdu.data import find_pictures, read_benchmark, read_row

SURROGATES = st.characters(categories=["Cs"])


def a_row(name: str = "one") -> dict[str, Any]:
    turns = [("user", "what?"), ("assistant", "red"), ("user", "and?"), ("assistant", "")]
    conversations = [{"from": who, "value": text} for who, text in turns]
    return {"id": name, "image": [], "conversations": conversations, "exact": ["a", "b"]}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return small_engine(tmp_path_factory.mktemp("model"))


@pytest.fixture
def start(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that runs ``mmkv mmdu`` over rows."""
    monkeypatch.setattr(mmkv.eval.mmdu.run, "_engine", lambda *_: engine)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))

    def started(rows: list[dict[str, Any]], output: Path) -> int:
        data = tmp_path / "benchmark.json"
        data.write_text(json.dumps(rows))
        return run(["mmdu", "--data", str(data), "--output", str(output), "--max-new-tokens", "2"])

    return started


PLACES = {
    "id": lambda row, text: row.update(id=text),
    "question": lambda row, text: row["conversations"][2].update(value=text),
    "reference": lambda row, text: row["conversations"][1].update(value=text),
    "picture": lambda row, text: row.update(image=[text]),
    "kind": lambda row, text: row.update(exact=[text, "b"]),
    "field": lambda row, text: row.update({text: 1}),
}


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(PLACES)), st.text(max_size=5), SURROGATES, st.text(max_size=5))
def test_a_row_with_half_a_character_is_refused(
    place: str, before: str, odd: str, after: str
) -> None:
    row = json.loads(json.dumps(a_row()))
    PLACES[place](row, before + odd + after)
    with pytest.raises(InputError, match="half of a character") as error:
        read_row(row)
    str(error.value).encode()


def test_such_a_row_is_skipped_counted_and_named(
    start: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = a_row("odd")
    odd["conversations"][0]["value"] = "a\ud83d"
    assert start([odd, a_row("good")], tmp_path / "answers") == 1
    shown = " ".join(capsys.readouterr().err.split())
    assert "failed: dialogue odd: the row holds '\\ud83d'" in shown
    assert "1 of 2 dialogues failed" in shown and "Traceback" not in shown
    assert (tmp_path / "answers" / "good.json").is_file()


def test_a_row_nested_too_deeply_is_refused() -> None:
    row = a_row()
    for _ in range(5000):
        row["more"] = [row.get("more")]
    with pytest.raises(InputError, match="nested"):
        read_row(row)


@pytest.mark.parametrize("name", ["a" * 5000, "x/" * 3000 + "y", "a\0b"])
def test_names_that_no_file_has_are_not_found(tmp_path: Path, name: str) -> None:
    row = a_row() | {"image": [name]}
    row["conversations"][0]["value"] = "<ImageHere>"
    with pytest.raises(InputError, match="is not under"):
        find_pictures(read_row(row), tmp_path)
    with pytest.raises(InputError):
        read_benchmark(Path(name))


def test_the_output_is_checked_before_any_work(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    worked: list[str] = []
    monkeypatch.setattr(mmkv.eval.mmdu.run, "_engine", lambda *_: worked.append("loaded"))
    file = tmp_path / "file"
    file.write_text("keep me")
    usage = type("usage", (), {"free": 1000})
    for output, says in ((file, "is a file"), (file / "below", "cannot write")):
        assert start([a_row()], output) == 1
        assert says in capsys.readouterr().err
    monkeypatch.setattr("mmkv.training.measure.record.shutil.disk_usage", lambda _: usage)
    assert start([a_row()], tmp_path / "answers") == 1
    assert "0.0 MiB left" in capsys.readouterr().err
    assert not worked and file.read_text() == "keep me"


def fill_disk(monkeypatch: pytest.MonkeyPatch, below: Path, names: tuple[str, ...]) -> None:
    """Make writing files of these names below a folder fail, as a full disk does."""
    opened = Path.open

    def open_or_fail(self: Path, mode: str = "r", *more: Any, **options: Any) -> Any:
        if "w" in mode and self.is_relative_to(below) and self.name.startswith(names):
            raise OSError(28, "No space left on device")
        return opened(self, mode, *more, **options)

    monkeypatch.setattr(Path, "open", open_or_fail)


def test_a_finished_dialogue_outlives_a_full_disk(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "answers"
    with monkeypatch.context() as context:
        fill_disk(context, output, ("two",))
        assert start([a_row("one"), a_row("two"), a_row("three")], output) == 1
    said = capsys.readouterr().err
    assert "No space left" in said and "copy them" in said
    (kept,) = (tmp_path / "temporary").rglob("two.json")
    row = json.loads(kept.read_text())
    assert row["mmkv"]["turns"] and len(row["conversations"]) == 4
    assert (output / "one.json").is_file() and not (output / "three.json").exists()
    # What it advises works: the dialogue is not answered again.
    (output / "two.json").write_bytes(kept.read_bytes())
    assert start([a_row("one"), a_row("two"), a_row("three")], output) == 0
    assert (output / "two.json").read_bytes() == kept.read_bytes()


def test_without_any_room_it_stands_on_stdout(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fill_disk(monkeypatch, tmp_path, ("one",))
    assert start([a_row("one")], tmp_path / "answers") == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out.splitlines()[0])["id"] == "one" and "stdout" in captured.err


def test_a_summary_that_cannot_be_written_is_shown(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fill_disk(monkeypatch, tmp_path / "answers", ("mmkv-summary",))
    assert start([a_row("one")], tmp_path / "answers") == 1
    captured = capsys.readouterr()
    assert "Exact answers" in captured.out and "No space left" in captured.err
