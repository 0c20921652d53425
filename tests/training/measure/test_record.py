"""Result files: their text, and the commit that they name, which is mmkv's own or none."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from mmkv.training.measure import record

OURS, THEIRS = '[project]\nname = "mmkv"\n', '[project]\nname = "theirs"\n'


def repository(folder: Path, pyproject: str) -> str:
    """Make a repository of one commit; return its id."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pyproject.toml").write_text(pyproject)
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for arguments in (["init", "-q"], ["add", "."], [*who, "commit", "-q", "-m", "x"]):
        subprocess.run(["git", *arguments], cwd=folder, check=True)
    done = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def test_a_checkout_names_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = repository(tmp_path, OURS)
    monkeypatch.setattr(record, "ROOT", tmp_path)
    assert record.commit() == head
    (tmp_path / "new.py").write_text("1")
    assert record.commit() == f"{head}+changes"


@pytest.mark.parametrize(
    ("inside", "own"), [(".venv/lib/site-packages", ""), (".", THEIRS), ("copy", OURS)]
)
def test_inside_another_repository_it_names_none(
    inside: str, own: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository(tmp_path, THEIRS)
    root = (tmp_path / inside).resolve()
    root.mkdir(parents=True, exist_ok=True)
    if own:
        (root / "pyproject.toml").write_text(own)
    monkeypatch.setattr(record, "ROOT", root)
    assert record.commit() is None


@pytest.mark.parametrize(
    "page",
    [
        {},
        {"command": "x", "settings": {}, "results": []},
        {"machine": {"cpu": "a"}, "results": {"rows": [{"a": [1, 2], "b": {"c": None}}, {}]}},
        {"results": [[1.5, "é"], [True, [[]]]], "path": Path("/tmp")},
    ],
)
def test_a_page_holds_what_it_was_given(page: dict[str, Any]) -> None:
    """The text is JSON; Python's own writer is the reference."""
    assert json.loads(record.page_text(page)) == json.loads(json.dumps(page, default=str))


def test_rows_stand_on_lines_of_their_own() -> None:
    rows = [{"method": name, "accuracy": {"value": 0.5}} for name in ("full", "snapkv")]
    text = record.page_text({"results": {"rows": rows}})
    assert [json.loads(line.rstrip(",")) for line in text.splitlines()[3:5]] == rows


def test_tables_stand_beside_the_results(tmp_path: Path) -> None:
    rows = [["policy", "right"], ["full", "0.9"]]
    file = record.write_results(tmp_path / "made" / "x.json", {"n": 1}, [2], {"accuracy": rows})
    page = json.loads(file.read_text())
    assert (page["settings"], page["results"], page["tables"]) == (
        {"n": 1},
        [2],
        {"accuracy": rows},
    )
    assert "tables" not in json.loads(record.write_results(file, {}, [2]).read_text())


def test_a_journal_ignores_a_line_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    assert record.Journal(path).rows("where", "a") == [] and not path.exists()
    journal = record.Journal(path)
    rows = [{"where": "a", "record": (1, 2)}, {"where": "b", "record": 3}]
    assert journal.add(rows)[0]["record"] == [1, 2]  # as JSON has it, read back or not
    path.write_text(path.read_text() + '{"where": "a", "rec')
    second = record.Journal(path)
    second.add([{"where": "a", "record": 4}])
    for held in (second, record.Journal(path)):
        assert [row["record"] for row in held.rows("where", "a")] == [[1, 2], 4]
    assert [row["record"] for row in journal.rows("where", "b")] == [3]
