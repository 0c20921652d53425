"""Options of the comparing programs: refusals, devices and ``--fresh``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mmkv.engine.errors import InputError
from mmkv.engine.runtime import Runtime
from mmkv.eval import dilution, needle, session_stream
from mmkv.eval import sessions as dialogue
from mmkv.eval.domains import held_out
from mmkv.eval.quality import __main__ as quality
from mmkv.eval.quality import run as quality_command
from mmkv.eval.quality.methods import ComparedMethod, Comparison, digest
from mmkv.eval.quality.run import ComparisonRuns, Reader
from mmkv.prompt.loading import load_processor
from mmkv.resources import bundled_model
from mmkv.training.measure.record import Journal

MODEL = str(bundled_model())
SCENES = [MODEL, "--data", "scenes:dense", "--dialogues", "1", "--name", "q", "--fractions", "1/4"]


def compared(*methods: str, budgets: tuple[str, ...] = ("1/4",), device: str = "cpu") -> Comparison:
    return Comparison(
        MODEL, "float32", tuple(map(ComparedMethod.parse, methods)), budgets, device=device
    )


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        (("dbtrimkv:a", "dbtrimkv:b"), r"'dbtrimkv'.*write --method NAME=POLICY:GATES"),
        (("a=snapkv", "streamingllm", "a=trimkv:x"), r"'a'.*write --method NAME=POLICY:GATES"),
        (("full",), r"'full'.*always read.*NAME=POLICY:GATES"),
    ],
)
def test_methods_of_one_name_are_refused(methods: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        compared(*methods)
    compared("a=dbtrimkv:a", "b=dbtrimkv:b", "dbtrimkv@5:a", "dbtrimkv:a")


@pytest.mark.parametrize("budgets", [("1/4", "16", "1/4"), ("1/4", "0.25"), ("64", "64.0")])
def test_a_repeated_budget_is_refused(budgets: tuple[str, ...]) -> None:
    with pytest.raises(InputError, match=rf"budget '{budgets[-1]}' .*leave one out"):
        compared("snapkv", budgets=budgets)


@pytest.mark.parametrize("program", [quality, needle, dialogue])
def test_programs_refuse_in_one_line(program: Any, tmp_path: Path) -> None:
    data = ["--data", "scenes:dense"] if program is quality else []
    options = [MODEL, *data, "--method", "snapkv", "--method", "snapkv", "--output", str(tmp_path)]
    with pytest.raises(SystemExit, match=r"error: two methods are called 'snapkv'") as caught:
        program.main(options)
    assert "\n" not in str(caught.value)


@pytest.mark.slow(reason="runs whole dialogues with the bundled model")
def test_fresh_drops_runs_and_streams_and_writes_its_own_files(tmp_path: Path) -> None:
    """Sessions that a stopped stream of the same name left behind give no file its name."""
    options = [*SCENES, "--output", str(tmp_path), "--method"]
    quality.main([*options, "streamingllm"])
    left = tmp_path / "q.runs.0123456789ab.session"
    left.write_bytes(b"a session")
    (tmp_path / "q.json").unlink()
    quality.main([*options, "snapkv", "--fresh"])
    page = json.loads((tmp_path / "q.json").read_text())["results"]["scenes:dense"]
    assert {row["method"] for row in page["rows"]} == {"full", "snapkv"}
    names = {"q.json", "q.md", "q.png", "q.runs.jsonl"}
    assert {path.name for path in tmp_path.iterdir()} == names
    rows = [json.loads(line) for line in (tmp_path / "q.runs.jsonl").read_text().splitlines()]
    assert len(rows) == 2


@pytest.mark.slow(reason="runs whole dialogues with the bundled model")
def test_the_journal_of_a_cpu_keeps_its_keys(tmp_path: Path, monkeypatch: Any) -> None:
    """As written before ``--device``; every other device is named."""
    quality.main([*SCENES, "--method", "snapkv", "--output", str(tmp_path)])
    rows = [json.loads(line) for line in (tmp_path / "q.runs.jsonl").read_text().splitlines()]
    plain = f"{MODEL} {digest(MODEL)} float32"
    assert {row["where"] for row in rows} == {f"{plain} 8192 scenes:dense Reader"}
    assert [row["cell"] for row in rows] == ["full@None:none at None", "snapkv@None:none at 1/4"]
    assert compared("snapkv").described() == plain
    elsewhere = compared("snapkv", device="cuda")
    assert elsewhere.described() == f"{plain} cuda"
    # Nothing that the CPU has read stands for the GPU.
    monkeypatch.setattr(Reader, "__init__", _refuse)
    journal = Journal(tmp_path / "q.runs.jsonl")
    assert ComparisonRuns(compared("snapkv"), journal).of("scenes:dense", 1)
    with pytest.raises(InputError, match="asked to read"):
        ComparisonRuns(elsewhere, journal).of("scenes:dense", 1)


def _refuse(*_: Any) -> None:
    raise InputError("asked to read")


def test_the_model_is_loaded_on_the_device_asked_for(tmp_path: Path, monkeypatch: Any) -> None:
    asked: list[str] = []

    def loaded(*_: Any, device: str, **__: Any) -> None:
        asked.append(device)
        raise InputError("enough")

    monkeypatch.setattr(Runtime, "from_pretrained", loaded)
    monkeypatch.setattr(quality_command, "resolve_device", lambda _: torch.device("cuda"))
    for main, options in (
        (quality.main, [*SCENES, "--method", "snapkv"]),
        (needle.main, [MODEL, "--lengths", "128", "--limit", "1"]),
        (dilution.main, [MODEL, "--lengths", "128", "--limit", "1"]),
        (dialogue.main, [MODEL, "--domain", "stream", "--budgets", "16"]),
    ):
        with pytest.raises(SystemExit, match="enough"):
            main([*options, "--device", "auto", "--output", str(tmp_path)])
    with pytest.raises(InputError, match="enough"):
        Reader(compared("snapkv"))
    with pytest.raises(InputError, match="enough"):
        session_stream.run(compared("snapkv", budgets=("16",)), 1, 1, Journal(tmp_path / "j"))
    assert asked == ["cuda"] * 4 + ["cpu"] * 2
    with pytest.raises(SystemExit, match=r"--workers 2 .* leave out --workers") as caught:
        quality.main(
            [*SCENES, *"--method snapkv --device cuda --workers 2 --output".split(), str(tmp_path)]
        )
    assert "\n" not in str(caught.value)


@pytest.mark.slow(reason="runs whole dialogues with the bundled model")
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="'cuda' is not there; use") as caught:
        quality.main([*SCENES, "--method", "snapkv", "--device", "cuda", "--output", str(tmp_path)])
    assert "\n" not in str(caught.value)
    quality.main([*SCENES, "--method", "snapkv", "--device", "auto", "--output", str(tmp_path)])
    assert json.loads((tmp_path / "q.json").read_text())["settings"]["device"] == "cpu"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    ("program", "options"),
    [
        (quality.main, SCENES[1:]),
        (needle.main, ["--lengths", "128", "--limit", "1", "--budgets", "16"]),
        (dilution.main, ["--lengths", "128", "--limit", "1", "--budgets", "16"]),
        (dialogue.main, ["--limit", "1", "--budgets", "16"]),
        (dialogue.main, ["--domain", "stream", "--limit", "2", "--budgets", "16"]),
    ],
)
def test_comparisons_run_on_a_gpu(program: Any, options: list[str], tmp_path: Path) -> None:
    methods = ["--method", "snapkv", "--method", f"dbtrimkv:{MODEL}/gates"]
    program(
        [MODEL, *options, *methods, "--device", "cuda", "--name", "g", "--output", str(tmp_path)]
    )
    assert " cuda " in (tmp_path / "g.runs.jsonl").read_text()


def test_no_piece_of_a_text_is_read_twice(tmp_path: Path) -> None:
    """Two texts, one of them cut in pieces: all of them once, and no more."""
    words = "what was at row 1, column 2 of picture 3? a red square. " * 9
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in (words, "a red square.")))
    source, most = f"text:{path}", 40
    data = held_out(MODEL, source, most)
    tokenizer = load_processor(MODEL).tokenizer
    whole = tokenizer(words)["input_ids"]
    pieces = -(-len(whole) // most)
    assert pieces > 2
    read = [tuple(data[index]["input_ids"][0].tolist()) for index in range(pieces + 1)]
    assert len(set(read)) == pieces + 1
    # Nothing of the texts is left out: pieces lie end to end.
    assert sum(map(len, read)) == len(whole) + len(tokenizer("a red square.")["input_ids"])
    with pytest.raises(InputError, match=f"holds {pieces + 1} different"):
        data[pieces + 1]
    assert data[0]["input_ids"][0].tolist() == list(read[0])
