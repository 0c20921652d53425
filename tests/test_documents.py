"""The documents hold: their tables, figures, links, paths and commands are those of the code."""

from __future__ import annotations

import importlib.util
import json
import re
import runpy
import shlex
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from mmkv.engine.cache.choice import best_at
from mmkv.eval.document_tables import documents, fill, main
from mmkv.eval.figures import FIGURES, accuracy_values, digest
from mmkv.eval.serving.tables import speed_values
from mmkv.resources import asset
from mmkv.training.measure.record import RESULTS, ROOT

DOCUMENTS = [*documents(), ROOT / "CONTRIBUTING.md"]
PACKAGES = ("engine", "mmkv", "eval", "training", "tests", "docs", "assets", "tools", "examples")
# What a command of the documents writes, or a user has.
WRITTEN = re.compile(r"eval/results/(gpu-.*|NAME|histories/)")


@pytest.fixture(params=DOCUMENTS, ids=lambda path: path.name)
def document(request: pytest.FixtureRequest) -> tuple[Path, str]:
    """Return one document at a time, with its text."""
    return request.param, request.param.read_text()


def test_no_table_is_stale(document: tuple[Path, str]) -> None:
    path, text = document
    assert text == fill(text, RESULTS), f"run `python -m mmkv.eval.document_tables`: {path}"


def test_every_result_is_cited() -> None:
    """A file counts as cited when a document or a table of one names it, with a star or without."""
    text = "".join(path.read_text() for path in DOCUMENTS)
    tables = (ROOT / "eval" / "document_tables.py").read_text()
    cited = {found.replace("*", ".*") for found in re.findall(r"[\w.*-]+\.json", text)}
    for path in RESULTS.glob("*"):
        named = any(re.fullmatch(pattern, path.name) for pattern in cited)
        assert named or f'"{path.stem}"' in tables, f"no page cites {path.name}"


def test_figures_are_drawn_from_the_results_of_today() -> None:
    for name, values in (("accuracy", accuracy_values), ("serving", speed_values)):
        drawn = (FIGURES / f"{name}.svg").read_text()
        assert digest(values(RESULTS)) in drawn, "run `python -m mmkv.eval.figures`"


def test_no_form_answered_better_than_the_one_that_bytes_pick() -> None:
    """By more than three points, where the paired test tells them apart (p < 0.01)."""
    cells = 0
    for path in RESULTS.glob("quality-bytes-*.json"):
        for page in json.loads(path.read_text())["results"].values():
            if page.get("whole_texts"):
                continue  # read for their perplexity
            for test in page["tests"]:
                share, gap = Fraction(test["budget"]), test["accuracy"]
                length = page["context_tokens"]["mean"] if share < 1 else 1
                picked, forms = best_at(float(share * int(length))), test["of"].split(" - ")
                if picked not in forms or "full" in forms or gap["p"] >= 0.01:
                    continue
                behind = gap["value"] * (-1 if forms[0] == picked else 1)
                assert behind <= 0.03, (path.name, test["budget"], picked, test["of"])
                cells += 1
    assert cells


def test_links_resolve(document: tuple[Path, str]) -> None:
    path, text = document
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        linked = (path.parent / name).resolve() if name else path
        assert linked.exists(), f"{path.name} links to {target}"
        if anchor:
            titles = re.findall(r"^#+ (.+)$", linked.read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", t.lower()).replace(" ", "-") for t in titles}
            assert anchor in anchors, f"{path.name} links to {target}"


def test_named_paths_exist(document: tuple[Path, str]) -> None:
    path, text = document
    for found in re.findall(rf"(?<![\w/:.-])(?:{'|'.join(PACKAGES)})/[\w./*-]*", text):
        name = found.rstrip(".")
        if not WRITTEN.fullmatch(name):
            assert any(ROOT.glob(name.rstrip("/"))), f"{path.name} names {name}"


def _lines(text: str) -> Iterator[list[str]]:
    """Yield the words of every command in ``text`` that runs a module or mmkv."""
    text = text.replace("\\\n", " ")
    for line in text.splitlines():
        for found in re.findall(r"(?:python -m|\bmmkv) [^`|#]*", line):
            try:
                yield shlex.split(found)
            except ValueError:  # a sentence, not a command
                continue


def _options(words: list[str]) -> set[str]:
    return {word.partition("=")[0] for word in words if re.fullmatch(r"--[a-z][\w-]*(=.*)?", word)}


def test_modules_that_are_run_have_the_options_named(capsys: Any, monkeypatch: Any) -> None:
    asked: dict[str, set[str]] = {}
    for path in DOCUMENTS:
        for words in _lines(path.read_text()):
            if words[:2] == ["mmkv", "distill"]:  # hands its options on
                words = ["python", "-m", "mmkv.training.distill", *words[2:]]
            if words[0] == "python" and words[2].split(".")[0] in PACKAGES:
                asked.setdefault(words[2].rstrip(".,;:)"), set()).update(_options(words[3:]))
    assert len(asked) > 10
    wrong = {}
    for module, options in asked.items():
        found = importlib.util.find_spec(module)
        assert found is not None, module
        monkeypatch.setattr("sys.argv", [module, "--help"])
        with pytest.raises(SystemExit) as ended:
            runpy.run_module(module, run_name="__main__", alter_sys=False)
        text = capsys.readouterr().out
        assert ended.value.code in (0, None), module
        if missing := {option for option in options if option not in text}:
            wrong[module] = missing
    assert not wrong, f"no such options: {wrong}"


def test_commands_of_mmkv_have_the_options_named() -> None:
    from mmkv.cli.app import app

    top: Any = get_command(app)
    for path in DOCUMENTS:
        for words in _lines(path.read_text()):
            if words[0] != "mmkv" or len(words) < 2 or words[1] not in top.commands:
                continue
            if words[1] == "distill":  # see above
                continue
            command, rest = top, words[1:]
            while rest and rest[0] in getattr(command, "commands", ()):
                command, rest = command.commands[rest[0]], rest[1:]
            known = {name for option in command.params for name in option.opts}
            if "--" in rest:
                rest = rest[: rest.index("--")]
            missing = _options(rest) - known - {"--help"}
            assert not missing, f"{path.name}: {' '.join(words[:2])} has no {missing}"


def test_the_python_of_the_readme_runs_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # no checkout
    text = (ROOT / "README.md").read_text()
    chat, policy = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(chat, {})
    assert capsys.readouterr().out.startswith("frog")
    names: dict[str, Any] = {"__name__": __name__}
    exec(policy, names)
    session = names["engine"].session()
    assert "".join(session.send("what is at row 2, column 3?", images=[asset("scene.png")]))
    assert session.memory().evicted > 0


def test_targets_of_make_exist(document: tuple[Path, str]) -> None:
    path, text = document
    made = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for found in re.findall(r"`make ([\w -]+)`|^ *make ([\w -]+?)(?: +#.*)?$", text, re.MULTILINE):
        for target in (found[0] or found[1]).split():
            assert target in made, f"{path.name}: make {target}"


def test_tables_are_put_between_their_marks(tmp_path: Path) -> None:
    held = {"policy": "full", "prompt_tokens": 1024, "kv_bytes": 2**21, "peak_growth_bytes": 2**30}
    cases = [
        held | {"policy": policy, "prompt_tokens": tokens, "physical_over_logical": 1.0625}
        for policy in ("full", "dbtrimkv")
        for tokens in (1024, 8192, 32768, 131072)
    ]
    (tmp_path / "memory-cpu.json").write_text(json.dumps({"results": cases}))
    text = "A\n<!-- table: memory -->\n| old |\n<!-- end -->\nB | 1 |\n"
    made = fill(text, tmp_path)
    assert made.startswith("A\n<!-- table: memory -->\n| prompt tokens |")
    assert made.endswith("|\n<!-- end -->\nB | 1 |\n") and "old" not in made
    assert "| 32,768 | 2.00 MiB | 1.062 | 1,024 MiB | 2.00 MiB | 1,024 MiB |\n" in made
    assert fill(made, tmp_path) == made
    with pytest.raises(KeyError, match="nothing"):
        fill("<!-- table: nothing -->\n<!-- end -->", tmp_path)


def test_a_stale_or_broken_table_ends_the_check(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "docs").mkdir()
    readme = tmp_path / "README.md"
    readme.write_text("<!-- table: memory -->\n<!-- end -->\n")
    monkeypatch.setattr("mmkv.eval.document_tables.documents", lambda: [readme])
    main(["--results", str(RESULTS)])
    main(["--results", str(RESULTS), "--check"])
    filled = readme.read_text()
    readme.write_text(filled.replace("MiB", "KiB"))
    with pytest.raises(SystemExit, match="stale; run python"):
        main(["--results", str(RESULTS), "--check"])
    (tmp_path / "memory-cpu.json").write_text("{")
    with pytest.raises(SystemExit, match="cannot be made"):
        main(["--results", str(tmp_path)])
    main(["--results", str(RESULTS)])
    assert readme.read_text() == filled
