"""``mmkv eval``: task files, local media, checks, its child, and replies on a full disk."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from PIL import Image

from mmkv.cli.app import run as mmkv_command
from mmkv.engine.errors import InputError
from mmkv.engine.policies import make_policy
from mmkv.eval.lmms import answers, reports, tasks
from mmkv.eval.lmms import command as eval_command
from mmkv.eval.lmms.command import _CHILD_IGNORES_CTRL_C, EvalJob, EvaluationError, problems
from mmkv.eval.lmms.contexts import LEFT_OUT
from mmkv.eval.lmms.reports import (
    CAUSE_VARIABLE,
    REPLIES_VARIABLE,
    FinishedReplies,
    cut_prompts,
    fallback,
    found,
    reported_to_parent,
)
from mmkv.eval.lmms.settings import LmmsSettings
from mmkv.eval.lmms.tasks import FOLDER
from mmkv.resources import bundled_dialogues
from tests.support.lmms_runs import needs_lmms_eval


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a stand-in for lmms-eval's folder of tasks."""
    folder = tmp_path / "shipped"
    (folder / "mmstar").mkdir(parents=True)
    (folder / "mme").mkdir()
    (folder / "mmstar" / "_template").write_text(
        "output_type: generate_until\nlmms_eval_specific_kwargs:\n"
        "  default: {post_prompt: letter}\n  qwen3_vl: {pre_prompt: 'Q: '}\n"
    )
    (folder / "mmstar" / "mmstar.yaml").write_text(
        'task: "mmstar"\ninclude: _template\ndoc_to_text: !function utils.text\n'
    )
    (folder / "mme" / "mme.yaml").write_text(
        "task: mme\nlmms_eval_specific_kwargs:\n  default: {post_prompt: yes or no}\n"
    )
    monkeypatch.setattr(tasks, "shipped_folder", lambda: folder)
    return folder


def test_a_local_task_includes_the_shipped_one(shipped: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    (data / "mmstar").mkdir(parents=True)
    (data / "mmstar" / "a.parquet").touch()
    assert tasks.write(["mmstar"], tmp_path / "out", data) == ["mmstar_local"]
    made = tasks.read(tmp_path / "out" / "mmstar_local.yaml")
    assert made["include"] == str(shipped / "mmstar" / "mmstar.yaml")
    assert made["dataset_kwargs"] == {"data_files": {"val": [str(data / "mmstar" / "a.parquet")]}}
    # One set of prompts, qwen3_vl's, whatever model reads them.
    assert made["lmms_eval_specific_kwargs"] == {
        "default": {"pre_prompt": "Q: ", FOLDER: str(data / "mmstar")}
    }


def test_files_of_the_hubs_layout_come_first(shipped: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    (data / "mme" / "data").mkdir(parents=True)
    for name in ("mme/other.parquet", "mme/data/test-1.parquet", "mme/data/test-0.parquet"):
        (data / name).touch()
    tasks.write(["mme_local"], tmp_path / "out", data)
    made = tasks.read(tmp_path / "out" / "mme_local.yaml")
    files = made["dataset_kwargs"]["data_files"]["test"]
    assert [Path(file).name for file in files] == ["test-0.parquet", "test-1.parquet"]
    assert made["lmms_eval_specific_kwargs"]["default"]["post_prompt"] == "yes or no"


def test_hub_tasks_get_the_prompts_of_qwen3_vl(shipped: Path, tmp_path: Path) -> None:
    names = tasks.write(["mmstar", "mme", "any_group"], tmp_path / "out")
    assert names == ["mmstar_mmkv", "mme", "any_group"]
    (path,) = (tmp_path / "out").iterdir()
    made = yaml.safe_load(path.read_text())
    assert made["include"] == str(shipped / "mmstar" / "mmstar.yaml")
    prompts = made["lmms_eval_specific_kwargs"]
    assert prompts["mmkv"] == prompts["qwen3_vl"] == {"pre_prompt": "Q: "}


@pytest.mark.parametrize(
    ("names", "data", "message"),
    [
        (["mmstar"], "data", "task mmstar has no data: no mmstar/.*parquet"),
        (["mmstar"], "nowhere", "no folder .*nowhere; --data names the folder"),
        (["mmstar_local"], None, "add --data FOLDER"),
        (["other_local"], "data", "no local form of task other_local; there is one of .*gqa"),
        (["gqa"], "data", "this lmms-eval has no gqa/gqa.yaml; install version 0.7.3"),
        (["math500"], None, "task math500 reads local files; add --data FOLDER"),
        (["longbench_v2"], None, "task longbench_v2 reads local files; add --data FOLDER"),
        (["helmet_nq_32k"], "data", "no helmet/data/kilt/nq-dev-multikilt_1000_k220_dep6.jsonl"),
    ],
)
def test_what_is_missing_is_named(
    shipped: Path, tmp_path: Path, names: list[str], data: str | None, message: str
) -> None:
    (tmp_path / "data").mkdir()
    with pytest.raises(InputError, match=message):
        tasks.write(names, tmp_path / "out", None if data is None else tmp_path / data)


@needs_lmms_eval
def test_every_local_form_fits_the_installed_lmms_eval() -> None:
    assert len(tasks.local_names()) == 30
    for name in tasks.local_names():
        made = tasks.local_form(name)
        (split,) = made["dataset_kwargs"]["data_files"]
        whole = made
        if "include" in made:
            whole = tasks.merged(tasks.shipped_folder() / made["include"])
            assert whole["task"] == name
        assert split == whole.get("test_split", whole.get("validation_split"))


def test_samples_are_for_tasks_that_score_several(
    shipped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gsm8k" / "main").mkdir(parents=True)
    (tmp_path / "gsm8k" / "main" / "test-0.parquet").touch()
    assert tasks.write(["gsm8k"], tmp_path / "out", tmp_path, samples=8) == ["gsm8k_local"]
    made = tasks.read(tmp_path / "out" / "gsm8k_local.yaml")
    assert made["repeats"] == 8 and made["dataset_path"] == "parquet"
    assert made["filter_list"][0]["filter"] == [{"function": "take_first_k", "k": 8}]
    with pytest.raises(InputError, match="task mmstar scores one reply to each question; drop"):
        tasks.write(["mmstar"], tmp_path / "out", tmp_path, samples=8)
    greedy = "eval --tasks gsm8k --samples 8 --gen-kwargs temperature=0"
    assert mmkv_command(greedy.split()) == 1
    assert "greedy replies to a question are all the same" in capsys.readouterr().err


def test_videos_are_found_in_any_layout(tmp_path: Path) -> None:
    (tmp_path / "Science").mkdir()
    (tmp_path / "Science" / "dev_Math_1.mp4").touch()
    (tmp_path / "abc.MKV").touch()
    kwargs = {FOLDER: str(tmp_path)}
    assert tasks.video_by_id({"id": "dev_Math_1"}, kwargs)[0].endswith("Science/dev_Math_1.mp4")
    assert tasks.video_by_video_id({"videoID": "abc"}, kwargs)[0].endswith("abc.MKV")
    with pytest.raises(InputError, match=r"no video x.mp4 below .* \(2 videos there\)"):
        tasks.video_by_id({"id": "x"}, kwargs)


# --- MMDU ----------------------------------------------------------------------------------------


def dialogue(**changes: Any) -> dict[str, Any]:
    chat = [("user", "a <ImageHere> b"), ("assistant", "Cake"), ("user", "c"), ("assistant", "2")]
    turns = [{"from": who, "value": text} for who, text in chat]
    made = {"id": "d", "image": ["1.png"], "conversations": turns, "exact": ["cell", "count"]}
    return {**made, **changes}


def saved(folder: Path, *rows: dict[str, Any], pictures: str = ".") -> Path:
    """Return a folder of data with a benchmark file and one picture."""
    (folder / "mmdu" / pictures).mkdir(parents=True)
    Image.new("RGB", (4, 2)).save(folder / "mmdu" / pictures / "1.png")
    (folder / "mmdu" / "benchmark.json").write_text(json.dumps(list(rows)))
    return folder


def test_rounds_carry_their_history(tmp_path: Path) -> None:
    folder = saved(tmp_path, dialogue()) / "mmdu"
    kwargs = {FOLDER: str(folder)}
    (first,) = tasks.messages(dialogue(), kwargs)
    assert first["content"] == [
        {"type": "text", "text": "a "},
        {"type": "image", "url": str(folder / "1.png")},
        {"type": "text", "text": " b"},
    ]
    again, over, outputs, _ = tasks.messages(dialogue(), kwargs, 1, ["x"])
    assert [m["role"] for m in again] == ["user", "assistant", "user"] and not over
    assert again[0] == first and again[1]["content"][0]["text"] == "x" and outputs == ["x"]
    assert tasks.messages(dialogue(), kwargs, 2, ["x", "y"])[1]
    # The datasets library gives every row the keys of all others.
    filled = dialogue(image={"1.png": "1.png", "2.png": None}, exact=None, note=None)
    assert tasks.messages(filled, kwargs)[0] == first


def test_rounds_are_scored_question_by_question() -> None:
    one = tasks.score(dialogue(), [["Cake", "3"]])["exact_match"]
    two = tasks.score(dialogue(), [[" Cake", "2"]])["exact_match"]
    assert (one["right"], two["right"], tasks.share([one, two])) == (1, 2, 0.75)
    assert tasks.share([{"right": 1, "of": 1}, {"right": 0, "of": 3}]) == 1 / 4  # not 1 / 2
    other = tasks.score(dialogue(exact=None), [["", "2"]])
    assert other == {"answered": {"right": 1, "of": 2, "score": 0.5}}


def test_mmdu_finds_its_pictures_below(shipped: Path, tmp_path: Path) -> None:
    data = saved(tmp_path / "data", dialogue(image=["/home/somebody/1.png"]), pictures="mmdu_pics")
    assert tasks.write(["mmdu"], tmp_path / "out", data) == ["mmdu_local"]
    made = tasks.read(tmp_path / "out" / "mmdu_local.yaml")
    assert made["lmms_eval_specific_kwargs"]["default"][FOLDER] == str(data / "mmdu" / "mmdu_pics")


def test_mmdu_needs_no_data(shipped: Path, tmp_path: Path) -> None:
    """The small set of our own is there for everybody."""
    assert tasks.write(["mmdu"], tmp_path, None) == ["mmdu_local"]
    files = tasks.read(tmp_path / "mmdu_local.yaml")["dataset_kwargs"]["data_files"]["test"]
    assert files == [str(bundled_dialogues().resolve() / "benchmark.json")]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image": []}, r"dialogue d: its questions place 1 pictures"),
        ({"conversations": [{"from": "user", "value": "a"}]}, "the last question has no reference"),
        ({"image": ["2.png"]}, r"the picture 2.png is not under .*put MMDU's pictures into"),
    ],
)
def test_malformed_dialogues_are_refused_before_the_run(
    shipped: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    data = saved(tmp_path, dialogue(id="fine"), dialogue(**changes))
    with pytest.raises(InputError, match=message):
        tasks.write(["mmdu"], tmp_path / "out", data)


def test_a_benchmark_that_lmms_eval_would_misread_is_refused(shipped: Path, tmp_path: Path) -> None:
    data = saved(tmp_path, dialogue())
    (data / "mmdu" / "benchmark.json").write_text(json.dumps({"d": dialogue()}))
    with pytest.raises(InputError, match="holds no list"):
        tasks.write(["mmdu"], tmp_path / "out", data)
    rows = [dialogue(id=one, image=[]) for one in "de"]
    (data / "mmdu" / "benchmark.json").write_text(json.dumps(rows))
    with pytest.raises(InputError, match=r"dialogue d: .* \(1 more have problems\)"):
        tasks.write(["mmdu"], tmp_path / "out", data)


def test_samples_become_answers_for_the_judge(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = saved(tmp_path, dialogue(id="other"), dialogue()) / "mmdu" / "benchmark.json"
    sample = {"doc_id": 1, "input": "a <ImageHere> b", "filtered_resps": ["Cake", "3"]}
    samples = tmp_path / "samples.jsonl"
    samples.write_text(json.dumps(sample) + "\n")
    assert answers.convert(samples, data, tmp_path / "out") == 1
    assert mmkv_command(["mmdu", "score", "--data", str(data), "--answers", str(tmp_path / "out")])
    printed = capsys.readouterr()
    assert "| all | 1 | 2 |" in printed.out and "1 dialogues have no answers" in printed.err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"doc_id": 3}, "was not made from"),
        ({"input": "another question"}, "document 0 differs"),
        ({"filtered_resps": ["one"]}, "document 0 differs"),
        (None, "holds no samples"),
    ],
)
def test_samples_of_other_data_are_refused(
    tmp_path: Path, change: dict[str, Any] | None, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data = saved(tmp_path, dialogue()) / "mmdu" / "benchmark.json"
    sample = {"doc_id": 0, "input": "a <ImageHere> b", "filtered_resps": ["Cake", "3"]}
    samples = tmp_path / "samples.jsonl"
    samples.write_text("" if change is None else json.dumps({**sample, **change}))
    assert answers.main([str(samples), str(tmp_path / "out"), "--data", str(data)]) == 1
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1 and not (tmp_path / "out").exists()


# --- mmkv eval -----------------------------------------------------------------------------------


def results_file(folder: Path, lines: int = 2, **content: Any) -> Path:
    made = {
        "results": {"mme": {"alias": "mme", "acc,none": 0.5, "acc_stderr,none": 0.1}},
        "n-samples": {"mme": {"original": 2, "effective": 2}},
    }
    (folder / "1_samples_mme.jsonl").write_text("{}\n" * lines)
    path = folder / "1_results.json"
    path.write_text(json.dumps({**made, **content}))
    return path


@pytest.mark.parametrize(
    ("names", "content", "wrong"),
    [
        (["mme"], {}, []),
        (["mme"], {"lines": 0}, ["task mme has no samples"]),
        (["mme"], {"lines": 1}, ["task mme has 1 of 2 samples"]),
        (["mme"], {"n-samples": {"mme": {"effective": 0}}}, ["task mme has no samples"]),
        (["mme"], {"n-samples": {}}, ["task mme gave no result"]),
        (["mme"], {"results": {}}, ["task mme has no score"]),
        (["mme"], {"results": {"mme": {"acc,none": float("nan")}}}, ["task mme has no score"]),
        (["mme"], {"results": {"mme": {"acc,none": []}}}, ["task mme has no score"]),
        (["mme"], {"results": {"mme": {"acc_stderr,none": 0.0}}}, ["task mme has no score"]),
        # A group is judged by its tasks.
        ([], {}, []),
        ([], {"n-samples": {}}, ["no task gave a result"]),
    ],
)
def test_incomplete_results_fail_the_command(
    tmp_path: Path, names: list[str], content: dict[str, Any], wrong: list[str]
) -> None:
    assert problems(results_file(tmp_path, **content), names) == wrong


def test_contexts_that_were_cut_are_said(tmp_path: Path) -> None:
    path = results_file(tmp_path)
    assert cut_prompts(path) == []
    cut = [{"tokens": 9000, "kept": 512}, {"tokens": 700, "kept": 512}]
    counts = [{"cache": {"cut": cut}}], [{"cache": {}}], [None]
    rows = [{"token_counts": count, "filtered_resps": "a"} for count in counts]
    rows.append({"filtered_resps": f"{LEFT_OUT} too long]"})
    (tmp_path / "1_samples_mme.jsonl").write_text("\n".join(map(json.dumps, rows)))
    line, other = cut_prompts(path)
    assert other == "task mme: 1 of 4 documents, too long, do not count"
    assert line.startswith("task mme: the context of 1 of 4 documents was cut")
    assert "the longest had 9,000 tokens" in line


@pytest.mark.parametrize(
    ("code", "writes", "fails"), [(0, False, True), (1, True, True), (0, True, False)]
)
def test_the_exit_code_of_lmms_eval_alone_does_not_decide(
    shipped: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    writes: bool,
    fails: bool,
) -> None:
    output = tmp_path / "out"
    output.mkdir()

    def run(command: list[str], env: dict[str, str], **_: Any) -> Any:
        assert env["HF_HOME"] and "mme" in command
        if writes:
            results_file(output)
        return subprocess.CompletedProcess(command, code)

    monkeypatch.setattr(eval_command.subprocess, "run", run)
    job = EvalJob(["mme"], "pretrained=m", [], output, None)
    if fails:
        with pytest.raises(EvaluationError):
            job.run()
    else:
        assert job.run() == 0


def test_an_error_in_the_model_fails_the_command(
    shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a process that is not the first, and although lmms-eval goes on to exit 0."""

    def run(command: list[str], env: dict[str, str], **_: Any) -> Any:
        monkeypatch.setenv(CAUSE_VARIABLE, env[CAUSE_VARIABLE])
        with pytest.raises(InputError), reported_to_parent():
            raise InputError("document 3: file not found")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(eval_command.subprocess, "run", run)
    with pytest.raises(EvaluationError, match="document 3: file not found"):
        EvalJob(["mme"], "pretrained=m", [], tmp_path / "out", None).run()


def test_a_missing_package_is_named_before_the_run(
    shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="videomme needs cv2; run pip install opencv-python-head"):
        tasks.write(["videomme"], tmp_path)


def test_a_folder_of_a_tasks_name_is_refused(
    shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mme").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"would take the folder \./mme for the tasks"):
        EvalJob(["mme"], "pretrained=m", [], tmp_path, None).run()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "mme", "--model", "a,b"], "holds a comma or ="),
        (["--tasks", ","], "no task is named"),
        (
            ["--tasks", "mme", "--model-args", "budgets=3"],
            "does not know the model argument budgets",
        ),
        (["--tasks", "mme", "--model-args", "fps"], "write name=value"),
        (["--tasks", "mme", "--model-args", "batch_size=2"], "write --batch-size"),
        (["--tasks", "mme", "--limit", "0"], "--limit is 0; give a number"),
        (["--tasks", "mme", "--data", "/nowhere"], "no folder /nowhere"),
    ],
)
def test_wrong_options_end_before_anything_starts(
    shipped: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert mmkv_command(["eval", *arguments]) == 1
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


def test_a_policy_keeps_its_parameters_on_the_way_through_lmms_eval() -> None:
    """lmms-eval splits its arguments at commas, and so does --model-args here."""
    parse = pytest.importorskip("lmms_eval.utils").simple_parse_args_string
    wanted = make_policy("snapkv:window=32,kernel=7")
    for policy, more in (
        ("snapkv:window=32,kernel=7", None),
        ("snapkv[window=32,kernel=7]", "fps=2"),
        (None, "policy=snapkv:window=32;kernel=7,fps=2"),
        (None, "policy=snapkv[window=32;kernel=7]"),
    ):
        arguments = parse(eval_command._model_args({"pretrained": "m", "policy": policy}, more))
        assert make_policy(LmmsSettings.of(arguments).engine.policy) == wanted


def test_a_length_of_the_users_own_holds_for_models_that_think(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(eval_command.EvalJob, "run", lambda job: asked.append(job.model_args) or 0)
    for own in (["temperature=0.6, max_new_tokens=64"], ["temperature=0.6"], []):
        options = ["--gen-kwargs", *own] if own else []
        assert mmkv_command(["eval", "--tasks", "mme", *options]) == 0
    assert ["thinking_floor=0" in one for one in asked] == [True, False, False]


def test_without_lmms_eval_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tasks, "find_spec", lambda name: None)
    assert mmkv_command(["eval", "--tasks", "mme"]) == 1
    assert "pip install 'mmkv[eval-light]'" in capsys.readouterr().err


def test_gqa_pictures_are_looked_up(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    import io

    import pyarrow

    content = io.BytesIO()
    Image.new("RGB", (4, 2), "red").save(content, "PNG")
    table = pyarrow.table({"id": ["n1"], "image": [{"bytes": content.getvalue(), "path": None}]})
    parquet.write_table(table, tmp_path / "images.parquet")
    (found,) = tasks.gqa_picture({"imageId": "n1"}, {FOLDER: str(tmp_path)})
    assert found.size == (4, 2)
    with pytest.raises(InputError, match="no picture n2 below"):
        tasks.gqa_picture({"imageId": "n2"}, {FOLDER: str(tmp_path)})


def test_a_name_that_nothing_has_is_refused_with_what_comes_near(shipped: Path) -> None:
    (shipped / "mme" / "group.yaml").write_text("group : perception\ntask:\n  - mme\n")
    (shipped / "mme" / "tagged.yaml").write_text("task: mme_2\ntag: [fast, short]\n")
    folder = shipped.parent / "own"
    folder.mkdir()
    (folder / "mine.yaml").write_text("'task': 'mine'\n")
    named = ["mme", "perception", "fast", "short", "mine", "mm*", "list_tags", str(folder)]
    tasks.require_known(named, [shipped, folder])
    with pytest.raises(InputError, match="no task mmstra; did you mean mmstar"):
        tasks.require_known(["mme", "mmstra"], [shipped, folder])
    with pytest.raises(InputError, match="no task scbench_kw; did you mean scbench_kv"):
        tasks.require_known(["scbench_kw"], [shipped])
    with pytest.raises(InputError, match="no task xyz; see mmkv eval --tasks list"):
        tasks.require_known(["xyz"], [shipped])


@pytest.mark.long(reason="lmms-eval reads its 2,000 files in ten seconds")
@needs_lmms_eval
def test_every_name_that_lmms_eval_knows_is_known() -> None:
    from lmms_eval.tasks import TaskManager

    tasks.require_known(TaskManager("ERROR").all_tasks, [tasks.shipped_folder()])


# Finished replies of an evaluation outlast a full disk and an evaluation that fails.


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


def test_the_longer_place_comes_first_and_a_file_wins_over_what_it_includes(
    tmp_path: Path, temporary: Path
) -> None:
    places = tmp_path / "r.jsonl", temporary / "r.jsonl"
    for sizes in ((1, 2), (2, 1)):
        for place, size in zip(places, sizes, strict=True):
            place.write_text("x" * size)
        assert [path.stat().st_size for path in reports.found(places[0])] == [2, 1]
    (tmp_path / "base.yaml").write_text("a: 1\nb: 2\n")
    (tmp_path / "own.yaml").write_text("include: base.yaml\nb: 3\n")
    assert tasks.merged(tmp_path / "own.yaml") == {"a": 1, "b": 3}


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
    def child(command: list[str], *, env: dict[str, str], **options: Any) -> Any:
        assert options == {"preexec_fn": _CHILD_IGNORES_CTRL_C}
        file = Path(env[REPLIES_VARIABLE])
        (fallback(file) if end == "fallback" else file).write_text('{"doc_id": 0}\n')
        if end == "ctrl-c":
            signal.raise_signal(signal.SIGINT)
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr("mmkv.eval.lmms.command.subprocess.run", child)
    output = tmp_path / "out"
    code = mmkv_command(["eval", "--tasks", "mme", "--output", str(output)])
    assert code == (130 if end == "ctrl-c" else 1)
    (file,) = (temporary if end == "fallback" else output).glob("replies-*.jsonl")
    said = capsys.readouterr().err
    assert f"the replies that were finished are in {file}" in said and "Traceback" not in said
    assert rows(file) == [{"doc_id": 0}]


@pytest.mark.parametrize("written", [1, 2])
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
    assert mmkv_command(["eval", "--tasks", "mme", "--output", str(output)]) == (written < 2)
    assert bool(list(output.glob("replies-*"))) == (written < 2)


# ``mmkv eval`` before and after its child: where it writes, and Ctrl-C.


@pytest.mark.parametrize("bad", ["file", "below a file", "full"])
def test_the_output_is_checked_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], bad: str
) -> None:
    monkeypatch.setattr(eval_command.subprocess, "run", lambda *_, **__: pytest.fail("it ran"))
    file = tmp_path / "file"
    file.write_text("keep me")
    output = {"file": file, "below a file": file / "x", "full": tmp_path / "out"}[bad]
    if bad == "full":
        usage = type("usage", (), {"free": 2**20})
        monkeypatch.setattr("mmkv.training.measure.record.shutil.disk_usage", lambda _: usage)
    assert mmkv_command(["eval", "--tasks", "mme", "--output", str(output)]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "--output" in said
    assert file.read_text() == "keep me"


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_the_child_does_not_see_ctrl_c() -> None:
    """A terminal sends it to both; the child's own traceback must not show."""
    code = "import os, signal; os.kill(os.getpid(), signal.SIGINT); print('went on')"
    ran = subprocess.run(
        [sys.executable, "-c", code],
        preexec_fn=_CHILD_IGNORES_CTRL_C,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0 and ran.stdout == "went on\n" and not ran.stderr


def test_samples_are_counted_by_their_lines(tmp_path: Path) -> None:
    (tmp_path / "samples").write_text('{"a": "b c"}\n{"a": "d"}\n')
    assert [eval_command._lines(tmp_path / name) for name in ("samples", "none")] == [2, 0]
