"""The papers' tables: page and commands from one file, commands that this program takes, a run."""

from __future__ import annotations

import json
import shlex
import subprocess
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.main import get_command

from mmkv.cli.app import app
from mmkv.cli.app import run as command
from mmkv.engine.errors import InputError
from mmkv.eval.lmms.command import _model_args
from mmkv.eval.lmms.tasks import local_names
from mmkv.eval.long_text.benchmarks import tasks as long_texts
from mmkv.eval.papers import reproduce
from mmkv.eval.papers.reproduce import TableChoice, chosen_rows, commands, find, lines, tables

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "assets" / "tiny-vlm"


def test_the_page_is_made_from_the_table() -> None:
    reproduce.check()
    made = (ROOT / "eval" / "notes" / "reproduce.md").read_text()
    assert made == reproduce.page(), "python -m eval.papers.reproduce > eval/notes/reproduce.md"


@pytest.mark.parametrize("name", [name for name, table in tables().items() if table.rows])
def test_its_commands_are_understood(name: str) -> None:
    """Options, model arguments and tasks of each row; each writes to a folder of its own."""
    table, top, folders = find(name), get_command(app), set()
    for row in table.rows:
        for words in commands(table, row, TableChoice(limit=2, batch_size=4, device="cpu")):
            folders.add(words[words.index("--output") + 1])
            if words[0] == "python":
                assert find_spec(words[2]) is not None
                continue
            inner: Any = top.get_command(None, words[1])  # type: ignore[attr-defined]
            context = inner.make_context(words[1], list(words[2:]))
            if words[1] == "eval":
                given = {key: context.params[key] for key in ("policy", "budget")}
                assert _model_args({"pretrained": "m", **given}, context.params["model_args"])
    assert len(folders) == len(table.rows)
    assert set(table.tasks) <= {*local_names(), *long_texts()}


def test_rows_are_chosen_and_options_joined() -> None:
    table = find("dbtrimkv:table2")
    (row,) = chosen_rows(table, TableChoice(policy="rkv", budget="256"))
    assert row.figures[0] == "53.01"
    (words,) = commands(table, row, TableChoice(data="my data", output="out", limit=3))
    assert shlex.join(words).endswith(
        "--data 'my data' --model Qwen/Qwen3-VL-8B-Thinking --policy rkv --budget 256 --model-args "
        "evict_every=128 --limit 3 --output out/dbtrimkv-table2/rkv-256"
    )
    both = lines(table, TableChoice(policy="trimkv", budget="64"))
    assert both[0].startswith("mmkv distill --model Qwen/Qwen3-VL-8B-Thinking --recipe trimkv")
    assert "--gates runs/trimkv-qwen3-vl-8b-thinking --policy trimkv --budget 64" in both[1]
    (joined,) = lines(find("epikv:table3"), TableChoice(policy="full", gen_kwargs="top_p=1"))
    assert "--gen-kwargs temperature=0,do_sample=False,top_p=1" in joined
    first = lines(find("dbtrimkv:table1"), TableChoice(policy="dbtrimkv", budget="64"))
    assert "--policy dbtrimkv --model-args visual_tokens=64 --output" in first[1]
    with pytest.raises(InputError, match=r"no such row; it has .*trimkv.* budgets 1024"):
        chosen_rows(table, TableChoice(policy="h2o"))
    with pytest.raises(InputError, match="has no command here: no shape of DeepSeek-R1"):
        chosen_rows(find("gkv:table2"), TableChoice())


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "data" / "aime24").mkdir(parents=True)
    row = {"id": 60, "problem": "p", "answer": "204", "url": "u"}
    (tmp_path / "data" / "aime24" / "rows.jsonl").write_text(json.dumps(row))
    return tmp_path / "data"


def test_what_is_missing_is_said_in_one_line(
    data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(subprocess, "run", lambda *_: pytest.fail("it ran"))
    assert command(["eval", "--reproduce", "trimkv:table4", "--model", "./none"]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and err.startswith("mmkv: error: trimkv:table4 cannot run: ")
    assert "no folder './none'" in err and "no folder DATA; give --data FOLDER" in err
    assert "gates ngocbh/TrimKV-Qwen3-4B-Math: not in the cache, and HF_HUB_OFFLINE is set" in err
    arguments = ["eval", "--reproduce", "dbtrimkv:figure5", "--data", str(data)]
    assert command([*arguments, "--model", str(MODEL), "--policy", "rkv"]) == 1
    err = capsys.readouterr().err
    assert "task gsm8k has no data" in err and "aime24" not in err and "gates" not in err
    assert command(["eval", "--reproduce", "trimkv:tabel4"]) == 1
    assert "did you mean trimkv:table4" in capsys.readouterr().err
    assert command(["eval", "--dry-run", "--tasks", "mme"]) == 1
    assert "add --reproduce PAPER:TABLE" in capsys.readouterr().err
    assert command(["eval", "--reproduce", "trimkv:table4", "--tasks", "mme"]) == 1
    assert "a table names its tasks" in capsys.readouterr().err


def test_finished_rows_are_kept_and_figures_stand_beside_the_papers(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []

    def fake(words: list[str]) -> SimpleNamespace:
        started.append(words)
        if "trimkv" in words and len(started) == 2:
            return SimpleNamespace(returncode=1)
        folder = Path(words[words.index("--output") + 1]) / "model"
        folder.mkdir(parents=True)
        scores = {"pass_at_1,samples": 0.5 + len(started) / 100, "pass_at_1_stderr,samples": "N/A"}
        content = {"results": {"aime24_local": scores}}
        (folder / "1_results.json").write_text(json.dumps(content))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", fake)
    table = find("trimkv:table4")
    gates = str(MODEL / "gates")
    choice = TableChoice(str(data), str(tmp_path / "out"), model=str(MODEL), gates=gates)
    with pytest.raises(InputError, match="trimkv-4096 ended with exit code 1"):
        reproduce.run(table, choice)
    made = reproduce.run(table, choice)
    assert len(started) == 3  # the full cache once
    assert started[0][1:5] == ["-P", "-m", "mmkv", "eval"] and "--gates" not in started[0]
    assert started[2][started[2].index("--gates") + 1] == gates
    assert made.splitlines()[2:] == ["| Full KV | 51.0 (65.5) |", "| TRIM-KV, 4096 | 53.0 (74.0) |"]
