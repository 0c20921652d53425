"""MMDU's data and answering loop: formats, one session a dialogue, resuming, damage, bad input."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image

import mmkv
import mmkv.eval.mmdu.run
from benchmarks.mmdu_make import pack, write
from mmkv import Engine, Sampling
from mmkv.cli.app import run
from mmkv.engine.errors import InputError
from mmkv.eval.mmdu.data import AnswerFolder, find_pictures, interleave, read_benchmark, read_row
from mmkv.eval.mmdu.run import answer
from mmkv.eval.mmdu.scores import is_right
from mmkv.resources import bundled_dialogues, bundled_model
from tests.support.chat_models import save_qwen3_vl

if TYPE_CHECKING:
    from tests.support.cli_fixtures import Ran

pytest_plugins = ("tests.support.cli_fixtures",)


FOLDER = bundled_dialogues()
BENCHMARK = FOLDER / "benchmark.json"
BUDGET = ("--budget", "48", "--quiet")
FIRST = 5  # the last of them is large


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the answers of an uninterrupted run over the first dialogues of the bundled set."""
    folder = tmp_path_factory.mktemp("mmdu") / "answers"
    assert run(["mmdu", "--output", str(folder), "--limit", f"{FIRST}", *BUDGET]) == 0
    return folder


@pytest.fixture(scope="module")
def full() -> Engine:
    return Engine.from_pretrained(bundled_model(), policy="full", dtype="float32")


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.json")}


def a_row(**changes: Any) -> dict[str, Any]:
    turns = [
        ("user", "a<ImageHere>b<ImageHere>c"),
        ("assistant", "x"),
        ("user", "d"),
        ("assistant", ""),
    ]
    made = {
        "id": 7,
        "image": ["one.png", "two.png"],
        "conversations": [{"from": who, "value": text} for who, text in turns],
    }
    return {**made, **changes}


@pytest.mark.parametrize(
    "image",
    [
        ["one.png", "two.png"],
        {"image1": "one.png", "image2": "two.png"},
        {"10": "two.png", "2": "one.png"},
        {"first": "one.png", "other": "two.png"},
    ],
)
def test_pictures_are_listed_in_several_ways(image: Any) -> None:
    dialogue = read_row(a_row(image=image))
    assert dialogue.images == ("one.png", "two.png") and dialogue.id == "7"
    assert dialogue.questions == ("a<ImageHere>b<ImageHere>c", "d")
    assert dialogue.references == ("x", "") and dialogue.exact == ()


def test_a_file_is_a_list_or_an_object_of_rows(tmp_path: Path) -> None:
    unnamed = a_row()
    del unnamed["id"]
    for rows in ([a_row(), a_row(id="b")], {"7": unnamed, "x": a_row(id="b")}):
        (tmp_path / "data.json").write_text(json.dumps(rows))
        dialogues, problems = read_benchmark(tmp_path / "data.json")
        assert [dialogue.id for dialogue in dialogues] == ["7", "b"] and not problems
    assert len(read_benchmark(tmp_path / "data.json", limit=1)[0]) == 1
    rows = [a_row(image=["1", "2", "3"]), a_row(id="b", image=["1"])]
    (tmp_path / "data.json").write_text(json.dumps(rows))
    (whole,), (problem,) = read_benchmark(tmp_path / "data.json", unused_images=True)
    assert whole.images == ("1", "2", "3") and problem.dialogue == "b"


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ([], "not an object"),
        (a_row(id=None), "no id"),
        (a_row(id="../x"), "cannot name a file"),
        (a_row(id="mmkv-run"), "cannot name a file"),
        (a_row(image=["one.png"]), "place 2 pictures (<ImageHere>) and it lists 1"),
        (a_row(image=["1", "2", "3"]), "--allow-unused-images"),
        (a_row(image=[1, 2]), "image is not a list"),
        (a_row(conversations=None), "no conversations"),
        (a_row(conversations=[{"from": "assistant", "value": "x"}]), 'not from "user"'),
        (a_row(conversations=[{"from": "user", "value": "x"}]), "no reference"),
        (a_row(conversations=[{"from": "user"}]), "no value"),
        (a_row(exact=["cell"]), "1 kinds for 2 questions"),
    ],
)
def test_malformed_rows_are_named_and_the_others_kept(tmp_path: Path, row: Any, says: str) -> None:
    (tmp_path / "data.json").write_text(json.dumps([row, a_row(id="good")]))
    dialogues, problems = read_benchmark(tmp_path / "data.json")
    assert [dialogue.id for dialogue in dialogues] == ["good"]
    assert len(problems) == 1 and says in problems[0].cause and "\n" not in problems[0].cause


def test_two_rows_may_not_share_an_id(tmp_path: Path) -> None:
    (tmp_path / "data.json").write_text(json.dumps([a_row(id="A"), a_row(id="a")]))
    dialogues, problems = read_benchmark(tmp_path / "data.json")
    assert len(dialogues) == 1 and "same id" in problems[0].cause


def test_pictures_are_found_by_the_end_of_their_path_and_only_inside(tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    (inside / "pics").mkdir(parents=True)
    for path in ("inside/pics/one.png", "inside/one.png", "inside/two.png", "secret.png"):
        (tmp_path / path).touch()
    row = a_row(image=["/home/someone/pics/one.png", "somewhere\\two.png"])
    found = find_pictures(read_row(row), inside)
    assert found == [inside / "pics" / "one.png", inside / "two.png"]
    for name in ("../secret.png", str(tmp_path / "secret.png"), "gone.png", ".."):
        with pytest.raises(InputError, match="check --images"):
            find_pictures(read_row(a_row(image=[name, "two.png"])), inside)


def test_pictures_stand_where_the_question_has_them() -> None:
    waiting = iter([Path("1"), Path("2"), Path("3")])
    parts = interleave("<ImageHere>a <ImageHere> b", waiting)
    shown = [part.get("text", part.get("image")) for part in parts]
    assert shown == [Path("1"), "a ", Path("2"), " b"]
    assert interleave("no picture", waiting) == [{"type": "text", "text": "no picture"}]
    assert next(waiting) == Path("3")


@pytest.mark.long(reason="makes the bundled set again")
def test_the_bundled_set_is_small_reproducible_and_in_the_official_form(tmp_path: Path) -> None:
    write(tmp_path)
    assert (tmp_path / "benchmark.json").read_bytes() == BENCHMARK.read_bytes()
    for path in FOLDER.glob("pictures/*.png"):
        made = np.asarray(Image.open(tmp_path / "pictures" / path.name).convert("RGB"), int)
        kept = np.asarray(Image.open(path).convert("RGB"), int)
        # Not byte for byte: zlib and the font rasterizer differ between versions of Pillow.
        assert made.shape == kept.shape and np.abs(made - kept).mean() < 2
    assert sum(p.stat().st_size for p in FOLDER.rglob("*") if p.is_file()) < 400_000
    pack(tmp_path / "packed")
    pack(tmp_path / "again")
    once, twice = ((tmp_path / name / "pictures.zip").read_bytes() for name in ("packed", "again"))
    assert once == twice
    with zipfile.ZipFile(tmp_path / "packed" / "pictures.zip") as archive:
        assert sorted(archive.namelist()) == sorted(p.name for p in FOLDER.glob("pictures/*"))
    # As the benchmark's own scripts walk through it.
    for item in json.loads(BENCHMARK.read_text()):
        turns, pictures = item["conversations"], list(item["image"])
        assert [turn["from"] for turn in turns] == ["user", "assistant"] * (len(turns) // 2)
        placed = sum(turn["value"].count("<ImageHere>") for turn in turns[::2])
        assert placed == len(pictures) and all((FOLDER / name).is_file() for name in pictures)


def test_answers_are_those_of_the_whole_history_asked_anew(full: Engine) -> None:
    """The session holds what the model would be given from scratch at every turn."""
    dialogues, _ = read_benchmark(BENCHMARK)
    for dialogue in (dialogues[0], dialogues[-1]):
        pictures = find_pictures(dialogue, FOLDER)
        answers, turns = answer(full, dialogue, pictures, Sampling(max_new_tokens=32))
        messages: list[dict[str, Any]] = []
        waiting = iter(pictures)
        for question, reply in zip(dialogue.questions, answers, strict=True):
            messages.append({"role": "user", "content": interleave(question, waiting)})
            anew = full.generate([messages], Sampling(max_new_tokens=32))[0]
            assert anew.text == reply
            messages.append({"role": "assistant", "content": reply})
        whole = full.inputs([*messages[:-1]])["input_ids"].shape[-1]
        assert turns[-1]["finish_reason"] == "eos"
        # Every token once: the dialogue as the template renders it, and the last answer.
        assert turns[-1]["tokens_seen"] == whole + turns[-1]["generated"]
        assert (
            sum(turn["prompt_tokens"] + turn["generated"] for turn in turns)
            == (turns[-1]["tokens_seen"])
        )
        assert turns[-1]["entries_evicted"] == 0
        assert sum(map(is_right, answers, dialogue.references)) >= 0.8 * len(answers)


def test_a_run_writes_official_files_with_numbers_beside(
    reference: Path, mmkv: Callable[..., Ran]
) -> None:
    rows = json.loads(BENCHMARK.read_text())[:FIRST]
    names = {f"{row['id']}.json" for row in rows} | {"mmkv-run.json", "mmkv-summary.json"}
    assert set(content(reference)) == names
    spec_rows = 6 * 3  # layers x KV heads of the bundled model
    for row in rows:
        made = json.loads((reference / f"{row['id']}.json").read_text())
        turns = made.pop("mmkv")["turns"]
        for before, after in zip(row["conversations"], made["conversations"], strict=True):
            assert before["from"] == after["from"] and set(after) == {"from", "value"}
            assert before["from"] == "assistant" or before["value"] == after["value"]
        assert {**made, "conversations": 0} == {**row, "conversations": 0}
        for turn in turns:
            assert turn["entries_kept"] <= 48 * spec_rows
            assert turn["entries_kept"] + turn["entries_evicted"] == turn["tokens_seen"] * spec_rows
            # K and V of 16 entries of 32 float32 numbers a page.
            assert turn["kv_bytes"] == turn["pages"] * 2 * 16 * 32 * 4
    summary = json.loads((reference / "mmkv-summary.json").read_text())
    assert summary["dialogues"] == len(rows) and summary["failed"] == 0
    exact = {share["kind"]: share for share in summary["exact"]}
    assert exact["all"]["of"] == 44 and exact["all"]["right"] >= 33
    ran = mmkv("mmdu", "score", "--answers", str(reference), "--limit", f"{FIRST}")
    assert ran.code == 0 and f"| all | {exact['all']['right']} | 44 |" in ran.out


def test_runs_with_other_settings_do_not_mix(reference: Path, mmkv: Callable[..., Ran]) -> None:
    before = content(reference)
    few = ("--limit", f"{FIRST}", "--budget", "32", "--system", "Be brief.", "--quiet")
    ran = mmkv("mmdu", "--output", str(reference), *few)
    assert "(budget " in ran.error_line() and "; name another --output" in ran.err and ran.code == 1
    assert ", system None, now 'Be brief.')" in ran.err
    assert content(reference) == before


def test_failing_dialogues_are_named_and_the_others_kept(
    tmp_path: Path, mmkv: Callable[..., Ran]
) -> None:
    rows = json.loads(BENCHMARK.read_text())[:6]
    missing, damaged, mismatch, long, good, malformed = rows
    missing["image"][1] = "pictures/gone.png"
    (tmp_path / "bad.png").write_bytes(b"no picture")
    (tmp_path / "pictures").symlink_to(FOLDER / "pictures")
    damaged["image"][2] = "bad.png"
    mismatch["image"].pop()
    long["conversations"][6]["value"] += "?" * 9000
    malformed["conversations"][3] = {"from": "user", "value": "again"}
    (tmp_path / "data.json").write_text(json.dumps(rows))
    output = tmp_path / "answers"
    data = ("--data", str(tmp_path / "data.json"))
    ran = mmkv("mmdu", *data, "--output", str(output), *BUDGET, "--no-endless")
    assert ran.code == 1 and "Traceback" not in ran.err
    lines = ran.err.splitlines()
    for row, says in (
        (missing, "gone.png is not under"),
        (damaged, "bad.png is a text, not a picture"),
        (mismatch, "place 4 pictures"),
        (long, "the model was trained for 8,192"),
        (malformed, "turns must alternate"),
    ):
        about = [line for line in lines if f"failed: dialogue {row['id']}: " in line]
        assert len(about) == 1 and says in about[0], ran.err
    assert lines[-1].startswith("mmkv: error: 5 of 6 dialogues failed") and len(lines) == 6
    assert {path.stem for path in output.glob("dense-*.json")} == {good["id"]}
    answers = AnswerFolder(output).answers(read_row(good))
    assert answers is not None and len(answers) == len(good["exact"])
    ran = mmkv("mmdu", "score", *data, "--answers", str(output))
    assert ran.code == 1 and ": 5 dialogues have no answers" in ran.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--data", "none.json"), "file not found: none.json"),
        (("--data", "broken.json"), "is not JSON"),
        (("--data", "number.json"), "no list of dialogues"),
        (("--data", "empty.json"), "holds no dialogues"),
        (("--data", str(BENCHMARK), "--images", "nowhere"), "no folder of pictures at nowhere"),
        (("--output", "broken.json"), "is a file"),
        (("--output", "strangers"), "mmkv-run.json"),
        (("--budget", "0.5"), "at least 1 entry per row"),
        (("score",), "no answers"),
    ],
)
def test_errors_that_stop_a_run_at_once(
    mmkv: Callable[..., Ran],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in (("broken", "{"), ("number", "3"), ("empty", "[]")):
        Path(f"{name}.json").write_text(text)
    Path("strangers").mkdir()
    Path("strangers/1.json").write_text("[]")
    ran = mmkv("mmdu", *arguments)
    assert says in ran.error_line() and ran.code == 1


def test_options_before_a_subcommand_are_refused(mmkv: Callable[..., Ran]) -> None:
    ran = mmkv("mmdu", "--limit", "2", "score", "--answers", "x")
    assert "--limit stands before 'score'" in ran.error_line() and ran.code == 2


def test_torch_is_not_needed_to_judge() -> None:
    code = "import sys, mmkv.cli.app, mmkv.eval.mmdu.judge as _"
    code += "; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# MMDU runs on data with broken rows, folders that cannot be written, and full disks.


def damage_a_row(name: str = "one") -> dict[str, Any]:
    turns = [("user", "what?"), ("assistant", "red"), ("user", "and?"), ("assistant", "")]
    conversations = [{"from": who, "value": text} for who, text in turns]
    return {"id": name, "image": [], "conversations": conversations, "exact": ["a", "b"]}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = save_qwen3_vl(tmp_path_factory.mktemp("model"))
    return Engine.from_pretrained(folder, budget=24, page_size=4)


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


@pytest.mark.parametrize("odd", ["\ud800", "a\udfff", "é \udbff\udbff b", "\udc00\ud800"])
@pytest.mark.parametrize("place", PLACES)
def test_a_row_with_half_a_character_is_refused(place: str, odd: str) -> None:
    row = json.loads(json.dumps(damage_a_row()))
    PLACES[place](row, odd)
    with pytest.raises(InputError, match="half of a character") as error:
        read_row(row)
    str(error.value).encode()


def test_such_a_row_is_skipped_counted_and_named(
    start: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = damage_a_row("odd")
    odd["conversations"][0]["value"] = "a\ud83d"
    assert start([odd, damage_a_row("good")], tmp_path / "answers") == 1
    shown = " ".join(capsys.readouterr().err.split())
    assert "failed: dialogue odd: the row holds '\\ud83d'" in shown
    assert "1 of 2 dialogues failed" in shown and "Traceback" not in shown
    assert (tmp_path / "answers" / "good.json").is_file()


def test_a_row_nested_too_deeply_is_refused() -> None:
    row = damage_a_row()
    for _ in range(5000):
        row["more"] = [row.get("more")]
    with pytest.raises(InputError, match="nested"):
        read_row(row)


@pytest.mark.parametrize("name", ["a" * 5000, "x/" * 3000 + "y", "a\0b"])
def test_names_that_no_file_has_are_not_found(tmp_path: Path, name: str) -> None:
    row = damage_a_row() | {"image": [name]}
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
        assert start([damage_a_row()], output) == 1
        assert says in capsys.readouterr().err
    monkeypatch.setattr("mmkv.training.measure.record.shutil.disk_usage", lambda _: usage)
    assert start([damage_a_row()], tmp_path / "answers") == 1
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
        assert start([damage_a_row("one"), damage_a_row("two"), damage_a_row("three")], output) == 1
    said = capsys.readouterr().err
    assert "No space left" in said and "copy them" in said
    (kept,) = (tmp_path / "temporary").rglob("two.json")
    row = json.loads(kept.read_text())
    assert row["mmkv"]["turns"] and len(row["conversations"]) == 4
    assert (output / "one.json").is_file() and not (output / "three.json").exists()
    # What it advises works: the dialogue is not answered again.
    (output / "two.json").write_bytes(kept.read_bytes())
    assert start([damage_a_row("one"), damage_a_row("two"), damage_a_row("three")], output) == 0
    assert (output / "two.json").read_bytes() == kept.read_bytes()


def test_without_any_room_it_stands_on_stdout(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fill_disk(monkeypatch, tmp_path, ("one",))
    assert start([damage_a_row("one")], tmp_path / "answers") == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out.splitlines()[0])["id"] == "one" and "stdout" in captured.err


def test_a_summary_that_cannot_be_written_is_shown(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fill_disk(monkeypatch, tmp_path / "answers", ("mmkv-summary",))
    assert start([damage_a_row("one")], tmp_path / "answers") == 1
    captured = capsys.readouterr()
    assert "Exact answers" in captured.out and "No space left" in captured.err
