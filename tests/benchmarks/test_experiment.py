"""The harness of the comparing programs: methods, runs and their journal, statistics, options."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import experiment, needle
from benchmarks.experiment import ComparisonRuns, Reader, held_out, summarise, tables
from benchmarks.quality import __main__ as quality
from benchmarks.quality.__main__ import main
from benchmarks.quality.methods import ComparedMethod, Comparison
from mmkv.engine.errors import InputError
from mmkv.engine.runtime import Runtime
from mmkv.prompt.loading import load_processor
from mmkv.resources import bundled_model
from mmkv.training.measure import teacher_forced
from mmkv.training.measure.record import Journal

MODEL = str(bundled_model())


@pytest.mark.slow(reason="runs whole dialogues with the bundled model")
def test_the_full_cache_runs_once_for_all_methods(monkeypatch: Any) -> None:
    methods = tuple(map(ComparedMethod.parse, ("streamingllm", "snapkv", "dbtrimkv:random")))
    reader, passes = Reader(Comparison(MODEL, "float32", methods, ("1/4", "1/8"))), []
    plain = teacher_forced.full_attention_states
    monkeypatch.setattr(
        teacher_forced, "full_attention_states", lambda *a: passes.append(a) or plain(*a)
    )
    cells = [cell for cells in reader.comparison.cells().values() for cell in cells]
    ((index, found),) = reader.read("scenes:dense", {0: cells})
    assert index == 0 and len(found) == 7 and len(passes) == 1


@pytest.mark.long(reason="runs whole dialogues with the bundled model, twice")
def test_dialogues_read_together_give_the_same_records(tmp_path: Path) -> None:
    options = [MODEL, *"--data scenes:dense --method snapkv --fractions 1/8".split()]
    found = []
    for name, more in (("alone", []), ("together", ["--together", "2"])):
        main([*options, "--dialogues", "3", "--output", str(tmp_path), "--name", name, *more])
        rows = map(json.loads, (tmp_path / f"{name}.runs.jsonl").read_text().splitlines())
        found.append({(r["cell"], r["index"]): r["record"] for r in rows})
    assert found[0] == found[1] and len(found[0]) == 6


def test_a_method_option_is_parsed() -> None:
    assert ComparedMethod.parse("dbtrimkv@5:a,b") == ComparedMethod(
        "dbtrimkv@5", "dbtrimkv", 5.0, ("a", "b")
    )
    assert ComparedMethod.parse("far=dbtrimkv@inf:a").lookahead == float("inf")
    assert ComparedMethod.parse("snapkv") == ComparedMethod("snapkv", "snapkv", None, ())
    assert ComparedMethod.parse("x=snapkv@2/int8:a") == ComparedMethod(
        "x", "snapkv", 2.0, ("a",), "int8"
    )
    with pytest.raises(InputError, match="'int3' is none of auto, bf16, int8, k8v4, int4"):
        ComparedMethod.parse("snapkv/int3")
    with pytest.raises(InputError, match="not a number"):
        ComparedMethod.parse("dbtrimkv@two:a")


def test_a_method_holds_its_parameters_in_brackets() -> None:
    """So that the colon before gates and the = behind a name keep their meaning."""
    pool = "snapkv[window=32,kernel=7]"
    assert ComparedMethod.parse(pool) == ComparedMethod(pool, pool, None, ())
    assert ComparedMethod.parse(f"wide={pool}") == ComparedMethod("wide", pool, None, ())
    found = ComparedMethod.parse("kept=dbtrimkv+4[age=paper;recent=3]@5:a,b")
    assert found == ComparedMethod("kept", "dbtrimkv+4[age=paper;recent=3]", 5.0, ("a", "b"))
    assert ComparedMethod.parse("dbtrimkv[lookahead=4]@5:a").name == "dbtrimkv[lookahead=4]@5"
    for wrong in ("snapkv[window=32", "snapkv[a=1][b=2]", "[a=1]snapkv", "dbtrimkv@5[a=1]:g"):
        with pytest.raises(InputError, match="brackets hold the policy's parameters"):
            ComparedMethod.parse(wrong)


@pytest.mark.slow(reason="runs whole dialogues with the bundled model")
def test_gates_of_another_checkpoint_are_named_before_any_run(tmp_path: Path, capsys: Any) -> None:
    gates = tmp_path / "gates"
    shutil.copytree(bundled_model() / "gates", gates)
    Reader(
        Comparison(MODEL, "float32", (ComparedMethod.parse(f"dbtrimkv:{gates}"),), ("1/3", "1/8"))
    )
    assert "these gates" not in capsys.readouterr().err
    info = json.loads((gates / "gates.json").read_text())
    (gates / "gates.json").write_text(json.dumps(info | {"base_fingerprint": "0" * 64}))
    compared = Comparison(
        MODEL, "float32", (ComparedMethod.parse(f"dbtrimkv:{gates}"),), ("1/3", "1/8")
    )
    base = Reader(compared).base
    for (cell,) in compared.cells().values():
        cell.engine(base, MODEL)
    printed = capsys.readouterr().err
    assert printed.count("with other weights") == 1 and str(gates) in printed


@pytest.mark.long(reason="the same run twice, once cut short")
def test_a_killed_run_continues_with_the_same_result(tmp_path: Path, capfd: Any) -> None:
    """Two workers, stopped after two of four dialogues in the middle of a line."""
    options = [
        MODEL,
        *"--data scenes:dense --method streamingllm --fractions 1/4 --name q --output".split(),
    ]
    main([*options, str(tmp_path / "whole"), "--dialogues", "4"])
    compared = Comparison(MODEL, "float32", (ComparedMethod.parse("streamingllm"),), ("1/4",))
    journal = tmp_path / "parts" / "q.runs.jsonl"
    journal.parent.mkdir()
    ComparisonRuns(compared, Journal(journal)).of("scenes:dense", 2)
    journal.write_text(journal.read_text() + '{"key": "an unfinished li')
    capfd.readouterr()
    main([*options, str(tmp_path / "parts"), "--dialogues", "4", "--workers", "2"])
    assert "4 runs are in" in capfd.readouterr().err
    whole, parts = (
        json.loads((tmp_path / name / "q.json").read_text())["results"]
        for name in ("whole", "parts")
    )
    assert whole == parts


def test_at_equal_bytes_fewer_bits_keep_more_entries() -> None:
    """At head_dim 32 an entry takes 137 bytes in bfloat16, 77 and 49 in codes."""
    kinds = ("bf16", "int8", "int4")
    methods = tuple(ComparedMethod.parse(f"streamingllm/{kv}") for kv in kinds)
    compared = Comparison(MODEL, "float32", methods, ("1/8",), in_bytes=True)
    cells = [compared.cells()[f"streamingllm/{kv} at 1/8"][0] for kv in kinds]
    assert len({cell.key() for cell in cells}) == 3
    assert cells[1].key() == "streamingllm@None:none kv int8 at 1/8 in bytes"
    reader = Reader(compared)
    rows = reader.base.spec.rows
    ((_, records),) = reader.read("scenes:dense", {0: cells})
    tokens = records[0]["seen"] + 1  # the last one is predicted, not appended
    for found, nbytes in zip(records, (137, 77, 49), strict=True):
        assert found["entries"] == int(tokens * 137 / nbytes / 8 * rows)


# Options of the comparing programs: refusals, devices and ``--fresh``.


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


@pytest.mark.parametrize("program", [quality, needle])
def test_programs_refuse_in_one_line(program: Any, tmp_path: Path) -> None:
    data = ["--data", "scenes:dense"] if program is quality else []
    options = [MODEL, *data, "--method", "snapkv", "--method", "snapkv", "--output", str(tmp_path)]
    with pytest.raises(SystemExit, match=r"error: two methods are called 'snapkv'") as caught:
        program.main(options)
    assert "\n" not in str(caught.value)


def test_the_model_is_loaded_on_the_device_asked_for(tmp_path: Path, monkeypatch: Any) -> None:
    asked: list[str] = []

    def loaded(*_: Any, device: str, **__: Any) -> None:
        asked.append(device)
        raise InputError("enough")

    monkeypatch.setattr(Runtime, "from_pretrained", loaded)
    monkeypatch.setattr(experiment, "resolve_device", lambda _: torch.device("cuda"))
    for program, options in (
        (quality.main, [*SCENES, "--method", "snapkv"]),
        (needle.main, [MODEL, "--lengths", "128", "--limit", "1"]),
    ):
        with pytest.raises(SystemExit, match="enough"):
            program([*options, "--device", "auto", "--output", str(tmp_path)])
    with pytest.raises(InputError, match="enough"):
        Reader(compared("snapkv"))
    assert asked == ["cuda"] * 2 + ["cpu"]
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


# Rows, tests and tables, against values counted by hand.


def answered(right: list[bool], kl: float, entries: int, seen: int = 40) -> dict[str, Any]:
    """Return the record of a dialogue whose answers have two tokens each."""
    count = len(right)
    return {
        **{"right": right, "tokens": [2] * count, "kl": [kl] * count, "nll": [0.5] * count},
        **{"agree": [1] * count, "seen": seen, "entries": entries, "evicted": 3, "visual": 5},
        "per_row": [[entries // 2, entries - entries // 2]],
    }


def test_rows_and_tests_are_those_of_the_records() -> None:
    """Two dialogues of 3 questions and 1; two gate seeds of ``a``, one of ``b``."""
    raw = {
        "full": [[answered([True] * 3, 0, 80), answered([True], 0, 80)]],
        "a at 1/4": [
            [answered([True, False, False], 0.5, 20), answered([True], 0.25, 20)],
            [answered([True, True, False], 1.0, 24), answered([False], 0.75, 16)],
        ],
        "b at 1/4": [[answered([False] * 3, 2.0, 20), answered([True], 1.0, 20)]],
    }
    page = summarise(raw, ["a", "b"], ["1/4"])
    _, a, b = page["rows"]
    assert (page["dialogues"], page["questions"], page["answer_tokens"]) == (2, 4, 8)
    assert page["context_tokens"] == {"mean": 40, "least": 40, "most": 40}
    assert [row["accuracy"]["value"] for row in page["rows"]] == [1, (1.5 + 0.5) / 4, 1 / 4]
    assert a["accuracy_by_seed"] == [2 / 4, 2 / 4] and (a["seeds"], b["seeds"]) == (2, 1)
    assert a["of_full"] == 1 / 2 and "whole_texts" not in page
    # Per answer token, seeds averaged: 3 answers of 0.75 and one of 0.5, two tokens each.
    assert a["kl_per_token"]["value"] == pytest.approx((3 * 0.75 + 0.5) / 8)
    assert a["agreement"]["value"] == 4 / 8 and a["nll_per_token"]["value"] == 2 / 8
    assert a["entries_by_row"] == [[10, 10]] and a["evicted"] == 12
    assert a["kept_of_context"] == pytest.approx(20 / 2 / 40)
    assert a["visual_share"] == pytest.approx(20 / 80)
    tests = {test["of"]: test for test in page["tests"]}
    assert list(tests) == ["a - b", "a - full", "b - full"]
    gap = tests["a - b"]["accuracy"]
    assert gap["value"] == pytest.approx((1.5 - 0 + 0.5 - 1) / 4)
    # The gaps 1.5 and -0.5 sum to 1; with other signs to -1, 2 or -2: none is nearer to 0.
    assert gap["p"] == 1.0
    # Resampled: both times the first dialogue, or both times the second.
    assert (gap["low"], gap["high"]) == (-0.5, 0.5)
    assert tests["b - full"]["kl_per_token"]["value"] == pytest.approx(7 / 8)


def test_tables_show_the_rows(tmp_path: Path, capsys: Any) -> None:
    record = answered([True, False], 0.5, 20)
    raw = {"full": [[record] * 2], "a at 1/4": [[record] * 2], "a at 8": [[record] * 2]}
    page = summarise(raw, ["a"], ["1/4", "8"])
    made = tables({"x": page, "y": page})
    cell = "0.500 [0.500, 0.500]"
    assert made["data"][1:] == [[name, "2", "4", "40 to 40"] for name in ("x", "y")]
    assert made["accuracy"][:2] == [
        ["data", "budget", "full", "a"],
        ["x", "1/4", cell, f"{cell}; 0.250"],
    ]
    nothing = ["+0.000 [+0.000, +0.000]", "1.0000"]
    assert made["differences"][-1] == ["y", "8", "a - full", *nothing, *nothing]
    args = argparse.Namespace(model="m", output=tmp_path, fresh=True)
    path = tmp_path / "found.json"
    drawn: list[Any] = []
    experiment.finish(args, path, {"x": page}, made, lambda *given: drawn.append(given))
    written = json.loads(path.read_text())
    assert written["settings"] == {"model": "m"} and written["tables"] == made
    assert drawn == [({"x": page}, tmp_path / "found.png")]
    text = path.with_suffix(".md").read_text()
    assert (
        f"### accuracy\n\n| data | budget | full | a |\n|---|---|---|---|\n| x | 1/4 | {cell}"
        in text
    )
    assert capsys.readouterr().out == text + "\n"
