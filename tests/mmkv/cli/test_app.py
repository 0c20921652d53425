"""One-shot answers: stdout, stderr, the JSON record, options; bad input in one line each."""

from __future__ import annotations

import functools
import inspect
import io
import json
import os
import re
import runpy
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pytest
from PIL import Image

from mmkv import Engine
from mmkv.chat.display import Display
from mmkv.chat.options import ChatOptions
from mmkv.chat.repl import Repl
from mmkv.cli.app import run
from mmkv.cli.arguments import parameter
from mmkv.engine.backends.cpu import binding
from mmkv.engine.budget import RISK, Budget, parse_bytes
from mmkv.engine.errors import BudgetError, InputError, MmkvError
from mmkv.engine.model.gates import make_random_gates, save_gates
from mmkv.engine.model.source import locate
from mmkv.engine.options import declared
from mmkv.resources import PULLED, asset
from mmkv.training.data.conversations import DataSource
from mmkv.training.settings import TrainingSettings
from tests.conftest import make_spec
from tests.support.chat_models import save_llama, save_qwen3_vl
from tests.support.media import png_bomb
from tests.support.sessions import without_risk
from tests.support.tiers import one_in

if TYPE_CHECKING:
    from tests.support.cli_fixtures import Ran

pytest_plugins = ("tests.support.cli_fixtures",)


FEW = ("--max-new-tokens", "6")
SCENE = asset("scene.png")


def test_only_the_answer_is_on_stdout(mmkv: Callable[..., Ran], model: str, picture: str) -> None:
    ran = mmkv("chat", model, "--image", picture, "-p", "what?", "--budget", "8", *FEW)
    assert ran.code == 0
    notes = ran.err.splitlines()
    assert len(notes) == 4 and "rkv" in notes[0], ran.err
    assert "picture 1 (" in notes[1]
    assert "cut off after 6 tokens; --max-new-tokens" in notes[2]
    kept = re.search(r"kept ([\d,]+) of ([\d,]+) entries .* physical", notes[3])
    assert kept is not None and kept[1] == "36"  # 8 x 2 layers x 2 heads, and a step of every two
    report = mmkv("chat", model, "--image", picture, "-p", "what?", "--budget", "8", "--json", *FEW)
    assert ran.out == json.loads(report.out)["text"] + "\n"


def test_streaming_whole_piped_and_quiet_give_the_same(
    mmkv: Callable[..., Ran], model: str
) -> None:
    asked = mmkv("chat", model, "-p", "hello", *FEW)
    assert asked.code == 0 and asked.out.strip()
    for arguments, stdin in (
        (("-p", "hello", "--no-stream"), ""),
        (("--quiet",), "hello\n"),
        (("-p", "-"), "hello"),
    ):
        assert mmkv("chat", model, *arguments, *FEW, stdin=stdin).out == asked.out
    assert mmkv("chat", model, "-p", "hello", "-q", *FEW).err == ""


def test_the_checkpoints_generation_config_is_followed_and_can_be_left_out(
    mmkv: Callable[..., Ran], model: str, tmp_path: Path
) -> None:
    asked = "chat", model, "-p", "hello", "--stats"
    plain = mmkv(*asked, "--max-new-tokens", "20")
    speed = r"20 tokens at [\d.]+ tokens/s, the first after [\d.]+ s; \d+ tokens read"
    assert re.search(speed, plain.err)
    own = tmp_path / "model"
    shutil.copytree(model, own)
    file = {"repetition_penalty": 1.3, "max_new_tokens": 20, "num_beams": 4, "temperature": 0.5}
    (own / "generation_config.json").write_text(json.dumps(file))
    asked = "chat", str(own), "-p", "hello"
    followed = mmkv(*asked)
    assert followed.out != plain.out and followed.out == mmkv(*asked, "--temperature", "0").out
    assert "says: repetition_penalty 1.3, max_new_tokens 20;" in followed.err
    assert followed.err.count("asks for num_beams, which mmkv does not follow") == 1
    assert mmkv(*asked, "--repeat-penalty", "1").out == plain.out
    left = mmkv(*asked, "--no-generation-config", "--max-new-tokens", "20")
    assert left.out == plain.out and "generation_config" not in left.err
    wrong = mmkv(*asked, "--min-p", "2")
    assert wrong.code == 2 and "min_p is 2.0; it must be 0 (off) to 1" in wrong.err


def test_json_numbers_are_consistent(mmkv: Callable[..., Ran], model: str, picture: str) -> None:
    media = ("--image", picture, "--image", picture)
    ran = mmkv("chat", model, *media, "-p", "two?", "--budget", "8", "--json", *FEW)
    report = json.loads(ran.out)
    assert set(report) == {
        "text",
        "content",
        "reasoning",
        "tool_calls",
        "finish_reason",
        "model",
        "device",
        "dtype",
        "decode_path",
        "policy",
        "policy_note",
        "kv",
        "kv_note",
        "budget",
        "tokens",
        "entries",
        "differs",
        "risk",
        "over_risk",
        "risk_unknown",
        "escalated",
        "drafted",
        "accepted",
        "notes",
        "memory",
        "time_to_first_token_s",
        "tokens_per_second",
        "versions",
    }
    tokens, entries, memory = report["tokens"], report["entries"], report["memory"]
    # The last token of a reply is never needed: it is appended with the next turn.
    assert tokens["seen"] == tokens["prompt"] + tokens["generated"] - 1
    assert entries["total"] == tokens["seen"] * 4 == entries["kept"] + entries["evicted"]
    # rkv evicts every second step under so small a budget: one more in each of 2 x 2 rows.
    assert entries["kept"] == 36 == sum(entries["by_modality"].values())
    # K and V of 16 entries of 8 float32 numbers a page.
    assert memory["kv_bytes"] == memory["pages"] * 2 * 16 * 8 * 4
    assert memory["physical_bytes"] == memory["kv_bytes"] + memory["metadata_bytes"]
    assert memory["state_bytes"] == 0
    assert report["decode_path"] == "native" or report["decode_path"].startswith("torch: ")
    assert report["policy"] == "rkv" and "gates" in report["policy_note"]
    assert report["time_to_first_token_s"] > 0 and report["tokens_per_second"] > 0
    assert report["versions"]["torch"] and report["finish_reason"] == "length"


def test_policies_budgets_and_seeds(mmkv: Callable[..., Ran], model: str) -> None:
    def report(*arguments: str) -> dict[str, Any]:
        return json.loads(mmkv("chat", model, "-p", "hello there", "--json", *arguments, *FEW).out)

    assert report("--gates", "random", "--budget", "4")["policy"] == "dbtrimkv"
    assert report("--policy", "full", "--budget", "1")["entries"]["evicted"] == 0
    assert report("--budget-fraction", "0.5")["budget"] == {"unit": "fraction", "value": 0.5}
    whole = report("--budget-bytes", "1GiB")
    assert whole["budget"] == {"unit": "bytes", "value": 2**30} and whole["kv"] == "auto"
    assert "holds all" in whole["kv_note"]
    drawn = [
        report("--temperature", "1.5", "--seed", seed)["text"] for seed in ("1", "1", "2", "3")
    ]
    assert drawn[0] == drawn[1] and len(set(drawn)) > 1


def test_a_template_is_told_whether_to_think(
    mmkv: Callable[..., Ran], model: str, tmp_path: Path
) -> None:
    ask = ("-p", "hello there", "--json", *FEW)
    ran = mmkv("chat", model, *ask, "--thinking", "off")
    assert ran.code == 1 and "does not read 'enable_thinking'" in ran.err
    thinks = tmp_path / "thinks"
    shutil.copytree(model, thinks)
    source = thinks / "chat_template.jinja"
    source.write_text(
        source.read_text() + "{% if enable_thinking is false %}(no thought){% endif %}"
    )
    read = {
        given: json.loads(mmkv("chat", str(thinks), *ask, *given).out)["tokens"]["prompt"]
        for given in ((), ("--thinking", "on"), ("--thinking", "off"))
    }
    plain, on, off = read.values()
    assert on == plain and off == plain + len("(no thought)")  # a token is a byte
    wrong = mmkv("chat", model, *ask, "--thinking", "maybe")
    assert wrong.code == 2 and "give on, off or a number" in wrong.err
    for given in (("--thinking", "on"), ("--forget-thoughts",)):
        wrong = mmkv("chat", model, *ask, *given, "--raw")
        assert wrong.code == 2 and f"which {given[0]} needs; drop one" in wrong.err


def test_a_thought_is_bounded_and_forgotten(
    mmkv: Callable[..., Ran], model: str, tmp_path: Path
) -> None:
    """The template opens a thought that the model, which says anything, does not end."""
    ask = ("-p", "hello there", "--json", "--max-new-tokens", "30")
    for given in (("--thinking", "4"), ("--forget-thoughts",)):
        ran = mmkv("chat", model, *ask, *given)
        assert ran.code == 1 and "this model's chat template knows none" in ran.err
    thinks = tmp_path / "thinks"
    shutil.copytree(model, thinks)
    source = thinks / "chat_template.jinja"
    source.write_text(
        source.read_text() + "{% if add_generation_prompt %}<think>{% endif %}{# </think> #}"
    )
    plain = json.loads(mmkv("chat", str(thinks), *ask).out)
    bounded = json.loads(mmkv("chat", str(thinks), *ask, "--thinking", "4").out)
    assert "</think>" not in plain["text"] and "\n</think>\n\n" in bounded["text"]
    kept = json.loads(mmkv("chat", str(thinks), *ask, "--thinking", "4", "--forget-thoughts").out)
    assert kept["text"] == bounded["text"] and kept["entries"]["kept"] < bounded["entries"]["kept"]


def test_a_budget_in_bytes_picks_the_form_unless_the_user_does(
    mmkv: Callable[..., Ran], model: str, tmp_path: Path
) -> None:
    few = ("--budget-bytes", "4KiB", "--page-size", "4", "--no-autosave", *FEW)
    path = str(tmp_path / "talk.mmkv")
    picked = mmkv("chat", model, "-p", "hello there", "--save", path, *few)
    assert "mmkv: kv k8v4: a budget of 4.0 KiB holds" in picked.err
    assert "budget 4,096 bytes, kv k8v4" in picked.err
    named = mmkv("chat", model, "-p", "hello there", "--kv", "int8", "--json", *few)
    assert json.loads(named.out)["kv"] == "int8" and "holds" not in named.err
    # A saved session keeps its form, whatever its new budget; a budget in entries stays exact.
    again = mmkv("chat", "--load", path, "-p", "and", "--budget-bytes", "1GiB", "--json", *FEW)
    assert (json.loads(again.out)["kv"], json.loads(again.out)["kv_note"]) == ("k8v4", None)
    exact = mmkv("chat", model, "-p", "hello", "--budget", "4", "--json", *FEW)
    assert (json.loads(exact.out)["kv"], json.loads(exact.out)["kv_note"]) == ("auto", None)


def test_the_memory_line_says_when_nothing_was_evicted(
    mmkv: Callable[..., Ran], model: str
) -> None:
    asked = ("chat", model, "-p", "hi", *FEW)
    assert "nothing had to be evicted" in mmkv(*asked, "--budget", "256").err
    assert "full never evicts" in mmkv(*asked).err, "no gates and no budget"
    assert "full never evicts" in mmkv("chat", model, "-p", "hi", "--policy", "full", *FEW).err


def test_a_budget_follows_the_risk_and_says_when_it_cannot(
    mmkv: Callable[..., Ran], model: str, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    few = ("--budget", "2", "--gates", "random", "--risk", "0.0001", *FEW)
    asked = ("chat", model, "-p", "tell me of a long day", *few)
    ran = mmkv(*asked, "--budget-max", "3")
    assert ran.err.count("and the budget cannot grow: answers may be made up") == 1
    assert re.search(r"budget 2 entries per row to 3 .* at risk 0.0001$", ran.err, re.M)
    assert re.search(rf"the risk is [\d.]+%, .*\(risk is {RISK}\)", ran.err)
    told = json.loads(mmkv(*asked, "--budget-max", "3", "--json").out)
    assert told["over_risk"] and 0.0001 < told["risk"] < 1
    grown = mmkv(*asked, "--budget-max", "64MiB", "--json")
    assert json.loads(grown.out)["risk"] <= 0.0001 and "cannot grow" not in grown.err
    engine = Engine.from_pretrained(
        model, policy="dbtrimkv", gates="random", budget=2, risk=0.1, budget_max=3
    )
    repl = Repl(engine, ChatOptions(), Display(ChatOptions()), [], [])
    capfd.readouterr()
    repl.command("/budget 4")
    repl.command("/budget 5")
    assert capfd.readouterr().err.count("it does not follow --risk any more") == 1
    older = str(tmp_path / "older.mmkv")
    mmkv(*asked, "--budget-max", "3", "--save", older)
    without_risk(Path(older))
    ran = mmkv(*asked, "--budget-max", "4", "--load", older)
    assert ran.err.count("its budget does not follow --risk") == 1
    for wrong, why in (
        (asked, "budget_max, which is missing"),
        ((*asked, "--budget-max", "1"), "below the budget of 2"),
        ((*asked, "--budget-max", "3", "--policy", "streamingllm"), "does not predict"),
    ):
        ran = mmkv(*wrong)
        assert ran.code and why in ran.err and not ran.out


def test_a_video_is_answered_about(mmkv: Callable[..., Ran], model: str, tmp_path: Path) -> None:
    av = pytest.importorskip("av")
    path = str(tmp_path / "clip.mp4")
    with av.open(path, "w") as container:
        stream = container.add_stream("mpeg4", rate=4)
        stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv420p"
        for _ in range(8):
            frame = av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8), format="rgb24")
            for packet in stream.encode(frame):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    common = ("chat", model, "--video", path, "-p", "what?", "--policy", "full", "--json", *FEW)
    kept = [
        json.loads(mmkv(*common, "--num-frames", count).out)["entries"]["by_modality"]["video"]
        for count in ("4", "8")
    ]
    assert kept[0] > 0 and kept[1] == 2 * kept[0]


def test_the_bundled_model_names_what_it_sees(mmkv: Callable[..., Ran]) -> None:
    """Under a budget that evicts, with the gates that lie beside it."""
    ran = mmkv("chat", "--image", str(SCENE), "-p", "what is at row 2, column 3?", "--budget", "24")
    assert ran.code == 0 and ran.out.strip() == "frog"
    assert "kept 432 of " in ran.err and "policy dbtrimkv" in ran.err
    assert ran.err.count("the bundled model answers") == 1  # nobody had named it
    assert "means nothing" not in ran.err


def test_the_bundled_model_has_the_name_that_is_listed(mmkv: Callable[..., Ran]) -> None:
    ran = mmkv("chat", "tiny-vlm", "-p", "hello", *FEW)
    assert ran.code == 0 and "the bundled model answers" not in ran.err
    assert ran.out == mmkv("chat", "-p", "hello", *FEW).out


@pytest.mark.parametrize(
    ("arguments", "end"),
    [
        *(
            (("chat", *given.split()), "; see mmkv chat --help")
            for given in (
                "--fsp 1",
                "--max-new-tokens 0",
                "--budget x",
                "--budget 1 --budget-bytes 5",
                "--budget-bytes many",
                "--fps 1 --num-frames 2",
                "--temperature -1",
                "--top-p 2",
            )
        ),
        (("no-such-command",), "see mmkv --help"),
        (("serve", "--memory", "64MX"), "; see mmkv serve --help"),
        (("serve", "--access-log"), "; see mmkv serve --help"),
        (("chta",), "Did you mean 'chat'? See mmkv --help"),
        (("distill",), "'--model'; see --help"),
    ],
)
def test_usage_errors_name_the_help_that_explains_them(
    mmkv: Callable[..., Ran], arguments: tuple[str, ...], end: str
) -> None:
    ran = mmkv(*arguments)
    (line,) = [one for one in ran.err.splitlines() if "error: " in one]
    assert ran.code == 2 and ran.out == "" and line.endswith(end)


def test_amounts() -> None:
    assert parse_bytes("64MiB") == 64 * 2**20 and parse_bytes("1.5 kB") == 1500
    assert Budget.parse("25%").value == 0.25 and Budget.parse("2kib").value == 2048
    assert Budget.parse("128").kind == "entries"
    with pytest.raises(BudgetError):
        parse_bytes("5 parsecs")


def test_version_and_environment(mmkv: Callable[..., Ran]) -> None:
    from mmkv import __version__

    assert mmkv("--version").out == f"mmkv {__version__}\n"
    report = mmkv("env")
    assert report.code == 0 and "video reader decord: " in report.out and "torch: " in report.out
    picture = re.search(r"^picture for it: (.*)$", report.out, re.M)
    assert picture is not None and Path(picture[1]).is_file()


@pytest.fixture
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if mmkv had been installed without a C compiler."""
    for name in ("_best", "_load"):  # without what they found before
        monkeypatch.setattr(binding, name, functools.cache(getattr(binding, name).__wrapped__))
    monkeypatch.setattr(binding, "find_spec", lambda name: None)
    monkeypatch.delenv("MMKV_NATIVE", raising=False)


def test_what_runs_without_c_says_so_once(
    mmkv: Callable[..., Ran],
    model: str,
    nothing_compiled: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran = mmkv("chat", model, "-q", *FEW, stdin="hello\nand?\n")
    assert ran.code == 0 and ran.out.strip() and ran.err == ""
    ran = mmkv("chat", model, *FEW, stdin="hello\nand?\n")
    assert ran.code == 0 and ran.out.strip()
    assert ran.err.count("replies run in torch, several times slower than in C") == 1
    assert "which is not compiled; install a C compiler and then mmkv again" in ran.err
    assert "\ndecode step on the CPU: torch (not compiled; install a C" in mmkv("env").out
    monkeypatch.setenv("MMKV_NATIVE", "0")  # somebody who asked for it knows
    assert "in torch" not in mmkv("chat", model, "-p", "hello", *FEW).err


def test_bare_mmkv_shows_help(mmkv: Callable[..., Ran]) -> None:
    ran = mmkv()
    assert ran.code == 0 and "Usage: mmkv" in ran.out and "chat" in ran.out and ran.err == ""
    wrong = mmkv("--nonsense")
    assert wrong.code == 2 and "Usage" not in wrong.out


@pytest.mark.parametrize("program", ["mmkv", "training.distill"])
def test_idle_threads_sleep_unless_the_environment_says_otherwise(
    program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mmkv.cli import entry

    def run() -> None:
        if program == "mmkv":
            entry.entry()
            return
        with pytest.raises(SystemExit, match="0"):
            runpy.run_module(program, run_name="__main__")

    monkeypatch.setattr(entry, "leave", lambda code: None)
    monkeypatch.setattr("mmkv.cli.app.run", lambda: 0)
    monkeypatch.setattr(sys, "argv", ["mmkv", "--help"])
    for given, wanted in (
        ({}, "2000"),
        ({"GOMP_SPINCOUNT": "7"}, "7"),
        ({"OMP_WAIT_POLICY": "active"}, None),
    ):
        with monkeypatch.context() as own:
            for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
                own.setenv(name, "")  # put back afterwards
                own.delenv(name)
            for name, value in given.items():
                own.setenv(name, value)
            run()
            assert os.environ.get("GOMP_SPINCOUNT") == wanted


# Bad input on the command line: one clear line, the right exit code, a clean stdout.


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--image", "no.png", "-p", "x"), "file not found: no.png"),
        (("--image", "corrupt.png", "-p", "x"), "damaged"),
        (("--image", "empty.png", "-p", "x"), "empty"),
        (("--image", "bomb.png", "-p", "x"), "pixels"),
        (("--video", "corrupt.png", "-p", "x"), "a picture, not a video"),
        (("-p", " \n"), "the prompt is empty"),
        ((), "the prompt is empty"),  # an empty pipe
        (("-p", "x", "--budget", "0.5"), "at least 1 entry per row"),
        (("-p", "x", "--budget", "0"), "positive"),
        (("-p", "x", "--budget-bytes", "10"), "at least 1 entry per row"),
        (("-p", "x", "--budget-fraction", "1.5"), "fraction"),
        (("-p", "x", "--policy", "nope"), "unknown policy 'nope'; choose one of"),
        (("-p", "x", "--policy", "dbtrimkv"), "mmkv distill"),
        (("-p", "x", "--gates", "gates"), "hidden"),
        (("-p", "x", "--gates", "no-such-gates"), "no-such-gates"),
        (("-p", "x" * 3000), "2,048"),
        (("-p", "x", "--min-pixels", "9999", "--max-pixels", "10"), "min <= max"),
        (("-p", "x", "--prefill-chunk", "0"), "prefill_chunk"),
        (("-p", "x", "--page-size", "0"), "page_size"),
        (("-p", "x", "--lookahead", "0"), "lookahead"),
    ],
)
def test_bad_input_gives_one_line_and_code_1(
    mmkv: Callable[..., Ran],
    model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    good = io.BytesIO()
    Image.effect_noise((64, 64), 50).save(good, "PNG")
    Path("corrupt.png").write_bytes(good.getvalue()[:700])
    Path("empty.png").touch()
    Path("bomb.png").write_bytes(png_bomb())
    if "gates" in arguments:
        _save_gates_of_another_model(Path("gates"))
    ran = mmkv("chat", model, *arguments)
    assert says in ran.error_line() and ran.code == 1


def _save_gates_of_another_model(folder: Path) -> None:
    other = make_spec(hidden=24)
    save_gates(make_random_gates(other), folder, other)


@pytest.mark.parametrize(
    ("name", "says"),
    [("no/such-model", "no/such-model"), ("./nowhere", "nowhere"), (".", "config.json")],
)
def test_models_that_cannot_be_loaded(
    mmkv: Callable[..., Ran], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = mmkv("chat", name, "-p", "x")
    assert says in ran.error_line() and ran.code == 1


def test_a_checkpoint_with_a_broken_tokenizer(mmkv: Callable[..., Ran], tmp_path: Path) -> None:
    save_llama(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    ran = mmkv("chat", str(tmp_path), "-p", "x")
    assert "tokenizer" in ran.error_line() and ran.code == 1


def test_pictures_for_a_text_model(mmkv: Callable[..., Ran], tmp_path: Path, picture: str) -> None:
    ran = mmkv("chat", str(save_llama(tmp_path)), "--image", picture, "-p", "x")
    assert "text only" in ran.error_line() and ran.code == 1


def test_a_model_that_sees_without_its_picture_settings(
    mmkv: Callable[..., Ran], tmp_path: Path, picture: str
) -> None:
    folder = save_qwen3_vl(tmp_path)
    (folder / "preprocessor_config.json").unlink()
    ran = mmkv("chat", str(folder), "--image", picture, "-p", "x")
    assert "has no preprocessor_config.json" in ran.error_line() and ran.code == 1


def test_eyes_without_their_language_model(
    mmkv: Callable[..., Ran], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`mmkv models` lists them; the remedy is one command."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in PULLED:
        ran = mmkv("chat", name, "-p", "x")
        assert ran.error_line().endswith(f"{name} is not here yet; fetch it: mmkv pull {name}")
    (tmp_path / "eyes").mkdir()
    (tmp_path / "eyes" / "adapter.json").write_text("{}")
    ran = mmkv("chat", "eyes", "-p", "x")
    assert "`mmkv pull smollm2-llava` does" in ran.error_line() and ran.code == 1


def test_the_bundled_model_is_missing(
    mmkv: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmkv.resources.BUNDLED_MODEL", "gone")
    ran = mmkv("chat", "-p", "x")
    assert "name a model" in ran.error_line() and ran.code == 1


# Names that are none, streams that are closed, models without a chat: one line each.


NAMES = ["~nobody/x", "a" * 5000, "/" + "a" * 300, "x\0y", "https://[::1", "\ud800", "../" * 2000]
COMMANDS = [
    ("chat", "NAME", "-p", "x"),
    ("chat", "-p", "x", "--gates", "NAME"),
    ("chat", "-p", "x", "--image", "NAME"),
    ("chat", "-p", "x", "--video", "NAME"),
    ("chat", "-p", "x", "--load", "NAME"),
    ("chat", "-p", "x", "--save", "NAME"),
    ("mmdu", "--data", "NAME"),
    ("bench", "NAME"),
    ("eval", "--tasks", "mme", "--model", "NAME", "--output", "NAME"),
    ("eval", "--tasks", "NAME,mme_local", "--data", "NAME", "--output", "out"),
    ("distill", "--model", "NAME", "--data", "text:x", "--output", "out"),
    ("distill", "--model", "MODEL", "--data", "text:NAME", "--output", "out"),
]
# Two of the names a command; of "../../..", which is a folder, where one is none.
NAMED = [
    (command, NAMES[(at + step) % (6 if command[0] in ("eval", "distill") else 7)])
    for at, command in enumerate(COMMANDS)
    for step in (0, 3)
]
# Not each: lmms-eval's own folder is searched for it, which takes a second.
NAMED.append((("eval", "--tasks", "NAME", "--output", "out"), "a" * 5000))


@one_in(3)
@pytest.mark.parametrize(("arguments", "name"), NAMED)
def test_names_that_are_no_path_are_refused_in_one_line(
    mmkv: Callable[..., Ran],
    model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    name: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = SimpleNamespace(run=lambda *_, **__: SimpleNamespace(returncode=1))
    monkeypatch.setattr("mmkv.eval.lmms.command.subprocess", ended)
    ran = mmkv(*(each.replace("NAME", name).replace("MODEL", model) for each in arguments))
    lines = [line for line in ran.err.splitlines() if "error: " in line]
    assert ran.code in (1, 2) and len(lines) == 1 and len(lines[0]) < 700
    assert "Traceback" not in ran.err and ran.out == ""


def test_a_model_name_that_is_too_long_is_cut_in_the_message() -> None:
    for name in ("a" * 5000, "./" + "a" * 5000):
        with pytest.raises(MmkvError) as error:
            locate(name)
        assert len(str(error.value)) < 400
    with pytest.raises(MmkvError, match=r"address; name the hub's id alone: Qwen/Qwen3-VL-2B$"):
        locate("https://huggingface.co/Qwen/Qwen3-VL-2B/tree/main")


def test_a_data_file_of_nobody_is_named() -> None:
    with pytest.raises(MmkvError, match="no such user"):
        DataSource.parse("text:~nobody-at-all/x.txt")


@pytest.mark.parametrize(
    ("streams", "arguments"),
    [
        (("stdin",), ()),
        (("stdin",), ("-i",)),
        (("stdout",), ("-p", "x")),
        (("stdout",), ()),
        (("stdin", "stdout", "stderr"), ("-p", "x", "--json")),
        (("stdin", "stdout", "stderr"), ("-i",)),
    ],
)
def test_closed_streams_are_empty_or_lead_nowhere(
    model: str, monkeypatch: pytest.MonkeyPatch, streams: tuple[str, ...], arguments: Any
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hello\n")))
    for stream in streams:
        monkeypatch.setattr(sys, stream, None)
    code = run(["chat", model, "--max-new-tokens", "2", "--no-autosave", *arguments])
    assert code == (1 if arguments == () and "stdin" in streams else 0)


class Gone(io.RawIOBase):
    """A pipe whose reader has gone."""

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        raise BrokenPipeError(32, "Broken pipe")


@pytest.mark.parametrize("arguments", [("--help",), ("policies",), ("env",), ("chat", "--help")])
def test_a_reader_that_has_gone_ends_the_command(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    gone = io.TextIOWrapper(Gone(), encoding="utf-8", write_through=True)
    monkeypatch.setattr(gone, "fileno", lambda: 1, raising=False)
    monkeypatch.setattr("os.dup2", lambda *_: None)
    monkeypatch.setattr(sys, "stdout", gone)
    assert run(list(arguments)) == 1
    assert "Traceback" not in capfd.readouterr().err


def test_how_a_command_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[tuple[Any, int]] = [(None, 0), (3, 3), (SystemExit(5), 5), (SystemExit("x"), 1)]
    for end, code in [*ends, (KeyboardInterrupt(), 130), (InputError("no"), 1)]:
        monkeypatch.setattr("mmkv.cli.app.app", mock.Mock(side_effect=[end]))
        assert run(["env"]) == code


@pytest.mark.parametrize("option", ["--batch", "--rounds", "--steps"])
def test_a_bench_without_end_is_refused(mmkv: Callable[..., Ran], model: str, option: str) -> None:
    ran = mmkv("bench", model, option, "9" * 20)
    assert ran.code == 2 and option in ran.error_line()


def test_a_base_model_is_offered_raw(mmkv: Callable[..., Ran], tmp_path: Path) -> None:
    base = str(save_llama(tmp_path, template=None))
    refused = mmkv("chat", base, "-p", "once upon a")
    assert refused.code == 1 and "no chat template" in refused.error_line()
    assert "--raw" in refused.err
    ran = mmkv("chat", base, "-p", "once upon a", "--raw", "--max-new-tokens", "2", "--json")
    assert ran.code == 0 and '"prompt": 11' in ran.out and "template" not in ran.err
    both = mmkv("chat", base, "-p", "x", "--raw", "--system", "be short")
    assert both.code == 2 and "--raw" in both.error_line()


def test_raw_leaves_a_template_out(mmkv: Callable[..., Ran], model: str) -> None:
    ran = mmkv("chat", model, "-p", "abc", "--raw", "--max-new-tokens", "1", "--json")
    assert ran.code == 0 and '"prompt": 3' in ran.out


def test_what_has_no_default_has_to_be_given() -> None:
    known = declared(TrainingSettings)
    found = {name: parameter(name, known[name]).default for name in ("model", "lr", "gate")}
    plain = TrainingSettings(model="m", output="o")
    assert found == {"model": inspect.Parameter.empty, "lr": plain.lr, "gate": plain.gate}
