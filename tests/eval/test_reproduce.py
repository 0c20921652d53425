"""The papers' tables: page and commands from one file, commands that this program takes, a run."""

from __future__ import annotations

import json
import re
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
from mmkv.engine.policies import make_policy
from mmkv.eval.lmms.command import _model_args
from mmkv.eval.lmms.tasks import local_names
from mmkv.eval.long_text.benchmarks import tasks as long_texts
from mmkv.eval.papers import reproduce
from mmkv.eval.papers.reproduce import (
    TableChoice,
    TableColumn,
    chosen_rows,
    commands,
    find,
    lines,
    tables,
)
from mmkv.training import adapt, distill
from mmkv.training.settings import TrainingSettings
from tests.support.tiers import one_in

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "assets" / "tiny-vlm"


def test_every_table_is_whole(capsys: pytest.CaptureFixture[str]) -> None:
    """Figures, policies and gates of a row fit its table; all tables are listed."""
    for table in tables().values():
        assert table.rows and table.checked and table.note, table.name
        assert all(text[0].startswith("#") for text in table.train.values()), table.name
        for row in table.rows:
            assert len(row.figures) in (0, len(table.columns)), (table.name, row.folder)
            assert not table.figures or not table.evaluates, (table.name, "figures are in its rows")
            if table.model != "random weights":
                gates = bool(make_policy(row.policy).gates)
                assert gates == (row.name in table.gates), (table.name, row.folder)
    assert command(["eval", "--reproduce", "list"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == list(tables())


@one_in(3)
@pytest.mark.parametrize("name", list(tables()))
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
    assert both[1].startswith("mmkv distill --model Qwen/Qwen3-VL-8B-Thinking --recipe trimkv")
    assert "--gates runs/trimkv-qwen3-vl-8b-thinking --policy trimkv --budget 64" in both[3]
    assert all(both[at].startswith("# ") for at in (0, 2))
    _, joined = lines(find("epikv:table3"), TableChoice(policy="full", gen_kwargs="top_p=1"))
    assert "--gen-kwargs temperature=0,do_sample=False,top_p=1" in joined
    assert "--limit 100 " in joined
    _, fewer = lines(find("epikv:table3"), TableChoice(policy="full", limit=2))
    assert fewer.count("--limit") == 1 and "--limit 2 " in fewer
    first = lines(find("dbtrimkv:table1"), TableChoice(policy="dbtrimkv", budget="64"))
    assert "--policy dbtrimkv --model-args visual_tokens=64 --output" in first[3]
    parts = find("dbtrimkv:figure5")
    for chosen, counts in ((None, ["64", "8"]), (3, ["3", "3"])):
        made = commands(parts, parts.rows[0], TableChoice(samples=chosen))
        assert [words[words.index("--samples") + 1] for words in made] == counts
    with pytest.raises(InputError, match=r"no such row; it has .*trimkv.* budgets 1024"):
        chosen_rows(table, TableChoice(policy="h2o"))
    (needles,) = commands(find("dbtrimkv:figure1"), find("dbtrimkv:figure1").rows[0], TableChoice())
    assert needles[needles.index("--method") + 1] == "dbtrimkv:runs/dbtrimkv-niah"


# What the papers say about training, by the folder that a command makes; by hand, not from
# tables.yaml. "Trainer": Hugging Face's default, which both retention papers refer to.
_BOTH = {"lambda_cap": 1.0, "d_gate": 512, "loss": "kl+ntp"}  # TRIM-KV 5.1; DBTrimKV 5.1 and eq. 3
_BOTH |= {"lr": 2e-4, "clip": 1.0, "warmup": 0.0}  # appendices B.1, and the Trainer
_DBTRIMKV = {
    **_BOTH,
    **{"bias": 18.0, "scope": "global", "gating": "log-bias"},  # 5.1, 4.1, 2.2
    **{"schedule": "cosine", "weight_decay": 1e-6},  # B.1
    "gate": "rg10",  # as the authors' gate files; the command's comment says how 4.1 differs
}
# B.1 is for all that DBTrimKV trained; the gates of its TrimKV are TRIM-KV's (5.1, eq. 3).
_EXTENDED = {**_DBTRIMKV, "bias": 8.0, "scope": "head", "gating": "logit-scale", "gate": "rg"}
_3_EPOCHS = {"epochs": 3.0, "step": 16, "max_length": 32768}  # Trainer; B.1: 4 GPUs x 1 x 4
_64 = {**_3_EPOCHS, "budget": 64.0}  # 5.1
_WGKV = {  # appendix C; 5.2 (threshold); window and width: the released code
    **{"steps": 7500, "step": 1, "lr": 1e-3, "warmup": 0.1, "schedule": "cosine"},
    **{"weight_decay": 0.01, "max_length": 32768, "threshold": 0.1, "window": 256, "d_gate": 512},
    **{"clip": 0.0, "lambda_sparse": 0.04},  # released code
}
_GKV = {  # 7.2 (interval), 7.4; alpha, window and lambda of the policy: 7.2, 7.3, appendix D
    **{"policy": "gkv", "budget": "2048", "interval": 128, "temperature": 0.6, "full": True},
    **{"lr": 1e-6, "max_reply": 4096, "data": ["deepscaler"]},
}
TRAINED: dict[str, dict[str, Any]] = {
    "runs/dbtrimkv-llava-1.5-7b": {**_DBTRIMKV, **_64, "data": ["llava-next"]},
    "runs/trimkv-llava-1.5-7b": {**_EXTENDED, **_64, "data": ["llava-next"]},
    "runs/trimkv-qwen3-vl-8b-thinking": {**_EXTENDED, **_64, "data": ["mixture:dbtrimkv"]},
    "runs/trimkv-qwen3-vl-4b-instruct": {**_EXTENDED, **_64, "data": ["mmdu:MMDU-45k.json"]},
    "runs/dbtrimkv-phi-3-mini-128k": {  # TRIM-KV B.2 and B.3
        **{**_DBTRIMKV, "steps": 10000, "step": 1, "epochs": 0.0, "budget": 2048.0},
        **{"max_length": 131072, "data": ["longalpaca"]},
    },
    # 5,117 rows (B.3), 16 a step, once; 5.1's M.
    **{
        f"runs/{name}-niah": {**recipe, **_64, "epochs": 0.0, "steps": 320, "data": ["niah"]}
        for name, recipe in (("dbtrimkv", _DBTRIMKV), ("trimkv", _EXTENDED))
    },
    # Figure 16: lambda 0.32. Twice the rows for models that think.
    "runs/wgkv-qwen3-4b-thinking": {
        **{**_WGKV, "steps": 15000, "lambda_sparse": 0.32, "d_gate": 192},
        "data": ["fineweb-edu", "nemotron-math"],
    },
    "runs/wgkv-llama-3.1-8b": {**_WGKV, "data": ["fineweb-edu"]},
    "runs/gkv-distill": {**_GKV, "method": "distill", "steps": 250, "documents": 128},
    "runs/gkv-rl": {**_GKV, "method": "grpo", "steps": 400, "documents": 16, "group": 8},
}


def asked(line: str) -> dict[str, Any]:
    """Return the settings that a command for training comes to."""
    words = shlex.split(line)
    program, rest = (distill, words[2:]) if words[1] == "distill" else (adapt, words[3:])
    context = get_command(program.app).make_context("train", rest)
    found = dict(context.params)
    if program is distill:
        names = TrainingSettings.__dataclass_fields__
        found |= vars(distill.chosen({name: found[name] for name in names}, {"context": context}))
        found["step"] = found["batch"] * found["accumulate"]
    return found


def test_commands_train_with_the_papers_numbers() -> None:
    trained = {name: text for table in tables().values() for name, text in table.train.items()}
    assert trained.keys() == TRAINED.keys()
    for name, (comment, line) in trained.items():
        found = asked(line)
        assert {key: found[key] for key in TRAINED[name]} == TRAINED[name], name
        assert found["output"] == name and comment.startswith("# ")
    # LLaVA-NeXT-Data has 779,289 rows; the comment shows what three epochs of it are.
    assert 3 * -(-779_289 // 16) == 146_118
    assert "3 x ceil(779,289 rows / 16) = 146,118" in trained["runs/dbtrimkv-llava-1.5-7b"][0]


# Of evaluation: words that a row's commands have, and the place in the paper.
EVALUATED = [
    # DBTrimKV: 5.1 (visual tokens beside all text), 5.2 (samples as TRIM-KV), C.2.1, C.3.
    ("dbtrimkv:table1", "dbtrimkv", "32", ["--model-args visual_tokens=32 "]),
    ("dbtrimkv:figure1", "trimkv", None, ["keys 8 --values 4 --queries 4 --limit 200 "]),  # B.3
    ("dbtrimkv:figure2", "full", None, ["--limit 98 --most 16384 --top 128 "]),  # 3.2
    ("dbtrimkv:figure5", "trimkv", "256", ["aime24 .*--samples 64 ", "gsm8k,.*--samples 8 "]),
    ("dbtrimkv:table7", "dbtrimkv", "1024", ["--budget 1024 .*prefill_chunk=3072 "]),
    ("dbtrimkv:table8", "dbtrimkv:lookahead=5", "64", ["lookahead=5 --budget 64 "]),
    # TRIM-KV: 5.1 (64 samples of AIME24, 8 of the others), 5.3, B.3 (chunk and budget).
    ("trimkv:figure3", "full", None, ["aime24 .*--samples 64 ", "gsm8k,.*--samples 8 "]),
    ("trimkv:table4", "trimkv", "4096", ["--budget 4096 --samples 64 "]),
    ("trimkv:table8", "trimkv", "6000", ["--budget 6000 .*prefill_chunk=3072,template=always "]),
    ("trimkv:table9", "trimkv", "6000", ["--budget 6000 .*prefill_chunk=3072 "]),
    # WG-KV: K (10 % of 4,096 entries go at once; the policy's window and pooling are its presets').
    ("wgkv:figure16", "wgkv+snapkv", "3686", ["--budget 3686 .*evict_every=410 "]),
    # G-KV: 7.1 (temperature, top_p, 32 samples, 16k and 32k tokens), 7.2 (interval), 7.4 (4,096).
    (
        *("gkv:table1", "gkv", "512"),
        ["--samples 32 .*temperature=0.6,top_p=0.95,max_new_tokens=4096 .*evict_every=128 "],
    ),
    (
        *("gkv:figure5", "snapkv", "512"),
        [
            "amc23 .*--samples 32 .*=0.6,top_p=0.95,max_new_tokens=16384 .*evict_every=128 ",
            "aime24 .*--samples 32 .*=0.6,top_p=0.95,max_new_tokens=32768 .*evict_every=128 ",
        ],
    ),
    # EpiKV: 4.1 (100 problems, greedy), D (the newest min(128, K / 4)).
    (
        "epikv:table3",
        "h2o",
        "1024",
        ["recent=0.125 .*--limit 100 .*temperature=0,do_sample=False "],
    ),
    ("epikv:table4", "h2o", "8192", ["recent=0.015625 .*temperature=0,do_sample=False "]),
]


@pytest.mark.parametrize(("name", "policy", "budget", "wanted"), EVALUATED, ids=lambda x: str(x))
def test_commands_evaluate_with_the_papers_numbers(
    name: str, policy: str, budget: str | None, wanted: list[str]
) -> None:
    made = lines(find(name), TableChoice(policy=policy, budget=budget))
    note, *shown = made[-1 - len(wanted) :]
    assert note.startswith("# ")
    assert all(re.search(word, line) for word, line in zip(wanted, shown, strict=True)), shown


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
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    started: list[list[str]] = []

    def fake(words: list[str]) -> SimpleNamespace:
        started.append(words)
        folder = Path(words[words.index("--output") + 1]) / "model"
        folder.mkdir(parents=True, exist_ok=True)
        if "trimkv" in words and len(started) == 2:
            return SimpleNamespace(returncode=1)
        scores = {"pass_at_1,samples": 0.5 + len(started) / 100, "pass_at_1_stderr,samples": "N/A"}
        content = {"results": {"aime24_local": scores}}
        older = {"aime24_local": {"pass_at_1,samples": 0.9}, "other_local": {}}
        (folder / "0_results.json").write_text(json.dumps({"results": older}))
        (folder.parent / "1_results.json").write_text(json.dumps(content))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", fake)
    table = find("trimkv:table4")
    gates = str(MODEL / "gates")
    choice = TableChoice(str(data), str(tmp_path / "out"), model=str(MODEL), gates=gates)
    with pytest.raises(InputError, match="trimkv-4096 ended with exit code 1"):
        reproduce.run(table, choice)
    made = reproduce.run(table, choice)
    assert capsys.readouterr().err.startswith(
        "# Table 4, a guess of 15 hours on one H100: temperature and length of replies"
    )
    assert len(started) == 3  # the full cache once
    assert started[0][1:5] == ["-P", "-m", "mmkv", "eval"] and "--gates" not in started[0]
    assert started[2][started[2].index("--gates") + 1] == gates
    assert made.splitlines()[2:] == ["| Full KV | 51.0 (65.5) |", "| TRIM-KV, 4096 | 53.0 (74.0) |"]
    assert reproduce._results(Path(started[2][started[2].index("--output") + 1])).keys() == {
        "aime24_local",
        "other_local",
    }
    scored = {"alias": "x", "acc_stderr,none": 0.1, "acc,none": 0.5, "size": 7}
    for named in ("t_local", "t_mmkv", "t"):  # whatever comes first and has a filter's name
        column = TableColumn("T", "t", None, 100.0)
        assert reproduce._figure({"t": {"acc,none": 0.1}, named: scored}, column) == 50
    assert [reproduce._digits(one) for one in ("-", "53", "5.0", "53.01")] == [1, 1, 1, 2]
    many = find("dbtrimkv:table2")
    (row,) = chosen_rows(many, wide := TableChoice(policy="rkv", budget="256"))
    assert tuple(re.findall(r"- \((.*?)\)", reproduce.compared(many, wide))) == row.figures
    speed = reproduce.compared(find("trimkv:table5"), choice).splitlines()
    assert speed[0] == f"results are below {tmp_path / 'out' / 'trimkv-table5'}"
    assert speed[1].startswith("the paper's figures: Tokens a second, FullKV") and len(speed) == 2
