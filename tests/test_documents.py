"""The documents hold: their tables, figures, links, paths and commands are those of the code."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import runpy
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from benchmarks.document_tables import documents, fill, main, sources
from benchmarks.figures import FIGURES, accuracy_values, digest
from benchmarks.serving.load import speed_values
from mmkv import Engine, bundled_model
from mmkv.engine.budget import RISK
from mmkv.engine.cache.choice import best_at
from mmkv.engine.contents import Memory
from mmkv.engine.policies import PRESETS
from mmkv.prompt.loading import load_processor
from mmkv.server.messages import MessagesRequest
from mmkv.server.responses_schema import ResponseRequest
from mmkv.server.schema import ChatRequest, ObserveRequest
from mmkv.training.measure.record import RESULTS, ROOT
from tests.support.servers import serving
from tests.support.tiers import long_but

pytest_plugins = ("tests.support.cli_fixtures",)

DOCUMENTS = [*documents(), ROOT / "CONTRIBUTING.md"]
PACKAGES = tuple("engine mmkv eval training benchmarks tests docs assets tools examples".split())
SOURCES = {".py", ".c", ".h", ".js", ".html", ".yaml", ".toml", ".ipynb"}
# What a command of the documents writes, or a user has.
WRITTEN = re.compile(r"benchmarks/results/(gpu-.*|NAME|histories/)")


@pytest.fixture(params=DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def document(request: pytest.FixtureRequest) -> tuple[Path, str]:
    """Return one document at a time, with its text."""
    return request.param, request.param.read_text()


def test_no_table_is_stale(document: tuple[Path, str]) -> None:
    path, text = document
    assert text == fill(text, RESULTS), f"run `python -m benchmarks.document_tables`: {path}"


def test_every_result_is_cited() -> None:
    """A document shows a table of it, or names it: whole, or an experiment's with a star."""
    text = "".join(path.read_text() for path in DOCUMENTS)
    named = set(re.findall(r"[\w.*-]+\.json", text)) - {"*.json", "serving-*.json"}  # all of them
    cited, shown = [name.replace("*", ".*") for name in named], sources(text)
    for path in RESULTS.glob("*"):
        found = path.stem in shown or any(re.fullmatch(pattern, path.name) for pattern in cited)
        assert found, f"no page cites {path.name}"


def test_figures_are_drawn_from_the_results_of_today() -> None:
    drawn_from = {"accuracy": accuracy_values, "serving": speed_values}
    for name, values in drawn_from.items():
        drawn = (FIGURES / f"{name}.svg").read_text()
        assert digest(values(RESULTS)) in drawn, "run `python -m benchmarks.figures`"


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


def _homes(name: str, sources: dict[str, str]) -> Iterator[str]:
    """Yield the files that define a class, and those of its bases."""
    for text in sources.values():
        if found := re.search(rf"^class {name}\b(?:\((.*?)\))?", text, re.MULTILINE):
            yield text
            for base in re.findall(r"\w+", found[1] or ""):
                yield from _homes(base, sources)


def test_classes_that_are_explained_have_the_names_and_places_given() -> None:
    """Of rows ``| `Class` | `file` |``, and of ``Class.member``, in docs/."""
    sources = {
        path.relative_to(ROOT).as_posix(): path.read_text()
        for folder in ("engine", "mmkv", "training")
        for path in (ROOT / folder).rglob("*.py")
    }
    checked = 0
    for page in (ROOT / "docs").rglob("*.md"):
        text = page.read_text()
        for names, files in re.findall(r"^\| (`[A-Z][^|]*) \| ([^|]*) \|", text, re.MULTILINE):
            places = re.findall(r"`([\w/]+\.py)`", files)
            for name in re.findall(r"`(\w+)`", names) if places else ():
                assert any(f"class {name}" in sources[one] for one in places), (page.name, name)
                checked += 1
        for name, member in re.findall(r"`([A-Z][a-z]\w+)\.([a-z_]\w*)[`(]", text):
            homes = list(_homes(name, sources))
            assert any(re.search(rf"\b{member}\b", home) for home in homes), (name, member)
            checked += 1
    assert checked > 20


def test_pages_that_the_code_names_exist() -> None:
    """Error messages, docstrings and settings send their reader to pages that are there."""
    files = [ROOT / "Makefile", ROOT / "pyproject.toml", ROOT / "mkdocs.yml"]
    for folder in sorted({*PACKAGES, "docker"} - {"docs"}):
        files += [path for path in (ROOT / folder).rglob("*") if path.suffix in SOURCES]
    named = {}
    for path in filter(Path.is_file, files):
        for page in re.findall(
            r"(?<![\w/])(?:docs|benchmarks/notes)/[\w/-]+\.\w+", path.read_text()
        ):
            named[page] = path.relative_to(ROOT)
    assert len(named) > 10
    gone = {page: path for page, path in named.items() if not (ROOT / page).exists()}
    assert not gone, f"pages that are named and not there: {gone}"


def test_documents_say_of_a_risk_what_is_printed() -> None:
    for page in ("docs/reference/http-api.md", "mmkv/explain/page.html"):
        assert RISK in (ROOT / page).read_text()
    assert RISK in " ".join((Memory.__doc__ or "").split()).replace(", in 0..1", "")


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
    names = {*top.list_commands(None)}  # those of training and eval, too
    assert {"chat", "distill", "eval", "mmdu", "serve"} <= names
    for path in DOCUMENTS:
        for words in _lines(path.read_text()):
            if words[0] != "mmkv" or len(words) < 2 or words[1] not in names:
                continue
            if words[1] == "distill":  # see above
                continue
            command, rest = top.get_command(None, words[1]), words[2:]
            while rest and rest[0] in getattr(command, "commands", ()):
                command, rest = command.commands[rest[0]], rest[1:]
            known = {name for option in command.params for name in option.opts}
            if "--" in rest:
                rest = rest[: rest.index("--")]
            missing = _options(rest) - known - {"--help"}
            assert not missing, f"{path.name}: {' '.join(words[:2])} has no {missing}"


@pytest.mark.parametrize("command", ["chat", "explain", "serve"])
def test_every_option_is_documented(command: str) -> None:
    from mmkv.cli.app import app

    top: Any = get_command(app)
    text = "".join(page.read_text() for page in (ROOT / "docs").rglob("*.md"))
    for option in top.get_command(None, command).params:
        names = [name for name in option.opts if name.startswith("-")]
        assert not names or any(name in text for name in names), f"{command} {names}"


def test_what_troubleshooting_quotes_is_said() -> None:
    """The first column of its table, by the code, whose texts are joined for that."""
    text = "".join(
        re.sub(r'"\s*f?"', "", path.read_text())
        for folder in ("engine", "mmkv")
        for path in (ROOT / folder).rglob("*.py")
    )
    text += (ROOT / "Makefile").read_text()
    page = (ROOT / "docs" / "how-to" / "troubleshooting.md").read_text()
    quoted = re.findall(r"`([^`]+)`", "".join(re.findall(r"^\| (.*?) \|", page, re.MULTILINE)))
    quoted = [one for one in quoted if not one.startswith(("make", "mmkv"))]
    assert len(quoted) > 12
    for one in quoted:
        assert re.search(re.escape(one).replace(r"\.\.\.", ".*?"), text), one


@pytest.mark.parametrize("model", [ChatRequest, ResponseRequest, MessagesRequest, ObserveRequest])
def test_every_field_of_a_request_is_documented(model: Any) -> None:
    text = (ROOT / "docs" / "reference" / "http-api.md").read_text()
    missing = [name for name in model.model_fields if not re.search(rf"`{name}[`:.]", text)]
    assert not missing


def test_the_readme_counts_the_policies() -> None:
    text = (ROOT / "README.md").read_text()
    assert f" {len(PRESETS.keys() - {'full'})} policies in one engine" in text.replace("\n", " ")


def test_the_documents_are_short() -> None:
    """What a reader has to get through, in words; and to load, in bytes."""
    assert len((ROOT / "README.md").read_text().split()) <= 700
    for folder in (ROOT / "docs", ROOT / "benchmarks" / "notes"):
        assert sum(len(page.read_text().split()) for page in folder.rglob("*.md")) <= 20_000
    assert len((ROOT / "CHANGELOG.md").read_text().splitlines()) <= 60
    pictures = [*(ROOT / "docs" / "figures").iterdir()]
    assert pictures and all(path.stat().st_size < 200_000 for path in pictures)


# Their code is run where they are followed step by step: tests/examples.
FOLLOWED = ("add-a-policy.md", "add-a-family.md", "add-a-server-option.md")


def _blocks(language: str) -> dict[str, list[str]]:
    """Return the code of README and docs/ in a language, by page."""
    found = {}
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        code = re.findall(rf"```{language}\n(.*?)```", path.read_text(), re.DOTALL)
        if code and path.name not in FOLLOWED:
            found[path.relative_to(ROOT).as_posix()] = code
    return found


@contextlib.contextmanager
def _given(page: str) -> Iterator[dict[str, Any]]:
    """Yield names that the sentences around a page's code speak of."""
    bundled = partial(Engine.from_pretrained, bundled_model(), policy="full")
    if page.endswith("/chat.md"):
        yield {"session": bundled().session()}
    elif page.endswith("/serve.md"):
        with serving(bundled, name="tiny-vlm") as server:
            yield {"http://127.0.0.1:8000": server.url}
    elif page.endswith("/transformers.md"):
        question = [{"role": "user", "content": [{"type": "text", "text": "what is red?"}]}]
        processor = load_processor(bundled_model())
        first = second = processor.encode(processor.template.render(question, opening=True), [])
        yield {"first": first | {"max_new_tokens": 2}, "second": second | {"max_new_tokens": 2}}
    else:
        yield {}


@pytest.mark.parametrize(
    "page",
    long_but(
        _blocks("python").keys() - {"docs/how-to/explain.md"},
        _blocks("python"),
        "test_page.py makes such pages",
    ),
)
def test_the_python_of_a_page_runs(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From top to bottom, in one namespace, far from the checkout, with the bundled model."""
    monkeypatch.chdir(tmp_path)
    with _given(page) as names:
        for code in _blocks("python")[page]:
            for name in names:
                code = code.replace(name, names[name]) if "://" in name else code
            exec(code, names)
    if "what is at row 2, column 3?" in "".join(_blocks("python")[page]):
        assert "frog" in capsys.readouterr().out or page.endswith("/explain.md")


# What a command of the documents needs and a test has not: other models, a network, hours.
ELSEWHERE = re.compile(
    r"^(make|pip|docker|curl)\b|MODEL\b|\bQwen/|distill\b|serve\b|gates gates|mmkv pull"
)


@pytest.mark.parametrize(
    "command",
    dict.fromkeys(
        command
        for code in _blocks("sh").values()
        for command in "".join(code).replace("\\\n", " ").splitlines()
        if "mmkv " in command and not ELSEWHERE.search(command)
    ),
)
def test_a_command_of_a_page_runs(command: str, mmkv: Any, monkeypatch: Any) -> None:
    """In a checkout, where assets/scene.png is."""
    monkeypatch.chdir(ROOT)
    before, _, words = command.rpartition("mmkv ")
    given = re.findall(r'echo "(.*)"', before) or ["what is red?"]
    ran = mmkv(*shlex.split(words, comments=True), stdin=given[0])
    assert ran.code == 0 and ran.out, ran.err
    if "row 2, column 3" in words:
        assert ran.out == "frog\n"


@pytest.mark.long(reason="a server, and a training of few steps, each a process of its own")
@pytest.mark.parametrize("page", ["docs/how-to/serve.md", "docs/how-to/train-gates.md"])
def test_the_commands_of_a_page_that_take_long_run(page: str, tmp_path: Path) -> None:
    """A page's first block; then what asks the server that it starts."""
    first, *others = _blocks("sh")[page]
    commands = first.replace("\\\n", " ").splitlines()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    run = partial(subprocess.run, shell=True, check=True, env=environment, capture_output=True)
    if page.endswith("serve.md"):
        (started,) = (one for one in commands if one.startswith("mmkv serve --"))
        serve = [*shlex.split(started, comments=True), "--port", port]
        with subprocess.Popen(serve, env=environment, stderr=subprocess.PIPE, text=True) as server:
            assert server.stderr is not None
            assert any("http://" in line for line in server.stderr)
            asked = next(one for one in others if one.startswith("curl"))
            said = json.loads(run(asked.replace("8000", port), cwd=ROOT).stdout)
            assert said["choices"][0]["message"]["content"] == "frog"
            server.terminate()
        assert server.returncode == 0
        return
    (tmp_path / "assets").symlink_to(ROOT / "assets")
    for command in commands[1:]:
        given = ' -p "what is red?"' if "mmkv chat" in command else ""
        assert run(command.replace("steps 200", "steps 4") + given, cwd=tmp_path).returncode == 0


def test_targets_of_make_exist(document: tuple[Path, str]) -> None:
    path, text = document
    made = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for found in re.findall(r"`make ([\w -]+)`|^ *make ([\w -]+?)(?: +#.*)?$", text, re.MULTILINE):
        for target in (found[0] or found[1]).split():
            assert target in made, f"{path.name}: make {target}"


def _carry(folder: Path, file: str, **tables: list[list[str]]) -> None:
    (folder / f"{file}.json").write_text(json.dumps({"tables": tables, "results": []}))


def test_tables_are_put_between_their_marks(tmp_path: Path) -> None:
    """One file's; those of two below each other; those of two beside each other."""
    _carry(tmp_path, "a", shares=[["of", "share"], ["x", "0.5"]], sizes=[["of", "KiB"], ["x", "1"]])
    _carry(tmp_path, "b", shares=[["of", "share"], ["y", "0.25"]], sizes=[["of", "s"], ["x", "2"]])
    text = "A\n<!-- table: shares:a -->\n| old |\n<!-- end -->\nB | 1 |\n"
    made = fill(text, tmp_path)
    alone = "| of | share |\n|---|---|\n| x | 0.5 |\n"
    assert made == f"A\n<!-- table: shares:a -->\n{alone}<!-- end -->\nB | 1 |\n"
    assert fill(made, tmp_path) == made and sources(made) == {"a"}
    both = "<!-- table: {}:a,b -->\n<!-- end -->"
    assert f"{alone}| y | 0.25 |\n<!-- end" in fill(both.format("shares"), tmp_path)
    beside = "| of | KiB | s |\n|---|---|---|\n| x | 1 | 2 |\n<!-- end"
    assert beside in fill(both.format("sizes"), tmp_path)
    assert sources(text + both.format("sizes")) == {"a", "b"}


def test_a_table_that_no_file_carries_is_refused(tmp_path: Path) -> None:
    _carry(tmp_path, "a", sizes=[["of", "KiB"], ["x", "1"]])
    _carry(tmp_path, "b", sizes=[["by", "KiB"], ["y", "1"]])
    for mark, message in (
        ("shares:a", r"a.json has no table 'shares'; it has sizes"),
        ("sizes:a,b", "no table has both"),
        ("sizes", "a mark is not"),
    ):
        with pytest.raises(ValueError, match=message):
            fill(f"<!-- table: {mark} -->\n<!-- end -->", tmp_path)
    with pytest.raises(ValueError, match="a mark is not"):
        fill("<!-- table: sizes:a -->\n", tmp_path)


def test_a_stale_or_broken_table_ends_the_check(tmp_path: Path, monkeypatch: Any) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- table: memory:memory-cpu -->\n<!-- end -->\n")
    monkeypatch.setattr("benchmarks.document_tables.documents", lambda: [page])
    main(["--results", str(RESULTS)])
    main(["--results", str(RESULTS), "--check"])
    filled = page.read_text()
    page.write_text(filled.replace("MiB", "KiB"))
    with pytest.raises(SystemExit, match="stale; run python"):
        main(["--results", str(RESULTS), "--check"])
    (tmp_path / "memory-cpu.json").write_text("{")
    with pytest.raises(SystemExit, match="cannot be made"):
        main(["--results", str(tmp_path)])
    main(["--results", str(RESULTS)])
    assert page.read_text() == filled
