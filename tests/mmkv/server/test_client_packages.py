"""The clients that people use, against ``mmkv serve``: a matrix of packages, agents and checks.

Each is skipped where it is not installed. ``MMKV_CLIENTS`` names interpreters whose environments
have packages (with a colon between two), ``MMKV_NODE`` a folder with ``node_modules``:

    pip install openai-agents litellm llm-comply langchain langchain-openai langchain-anthropic
    npm install ai @ai-sdk/openai @ai-sdk/openai-compatible @ai-sdk/anthropic zod openai \\
        @anthropic-ai/sdk compatcanary

A **talk**: a client asks what is at a place of ``assets/scene.png`` and then, with the whole
conversation, about another place. Both answers have to be right. A **loop**: two of its replies
have to call a tool, by the tool choice, with a picture in the request and in a result; arguments
have to satisfy the tool's schema (:mod:`client_programs`). An **agent** is a package's own loop, in
each of whose steps a result holds a picture. The **checks** are programs that look for what an API
of this form has to do. Some need a model that ends a text by itself, and are run on
``MMKV_TEXT_MODEL``, too: what passes on one passes.

``transformers chat`` sends a picture as one of its examples (``!example NAME``). What terminal
agents send is recorded in test_clients.py, which runs everywhere.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mmkv import Engine
from mmkv.resources import asset, bundled_model
from tests.mmkv.server import client_programs
from tests.mmkv.server.client_programs import ASKED, MISSING, MODEL, SCHEMA
from tests.support.servers import serving

PYTHONS = [one for one in os.environ.get("MMKV_CLIENTS", "").split(os.pathsep) if one]
NODE = Path(os.environ.get("MMKV_NODE", "/nowhere"))
pytestmark = pytest.mark.skipif(
    not PYTHONS and not NODE.is_dir(), reason="MMKV_CLIENTS, MMKV_NODE: where clients are"
)
HERE = Path(__file__).parent
RIGHT = ["frog", "monkey"]
STEPS = 5  # of an agent
Found = dict[str, Any]
NODE_AGENTS = (
    *("@ai-sdk/openai.responses", "@ai-sdk/openai.chat", "@ai-sdk/openai-compatible"),
    *("@ai-sdk/anthropic", "openai", "@anthropic-ai/sdk"),
)


@pytest.fixture(scope="module")
def picture() -> str:
    content = base64.b64encode(asset("scene.png").read_bytes()).decode()
    return f"data:image/png;base64,{content}"


def _served(model: Path | str, budget: int) -> Iterator[str]:
    def load() -> Engine:
        return Engine.from_pretrained(model, budget=budget, kv_limit=budget * 2**20)

    with serving(load, name=MODEL) as server:
        yield f"{server.url}/v1"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    yield from _served(bundled_model(), 64)


@pytest.fixture(scope="module")
def text_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A second model, whose replies are greedy where nothing is asked for."""
    if "MMKV_TEXT_MODEL" not in os.environ:
        pytest.skip("MMKV_TEXT_MODEL: a model that ends a text by itself")
    folder = tmp_path_factory.mktemp("text")
    for file in Path(os.environ["MMKV_TEXT_MODEL"]).resolve().iterdir():
        (folder / file.name).symlink_to(file)
    own = folder / "generation_config.json"
    given = json.loads(own.read_text()) if own.exists() else {}
    own.unlink(missing_ok=True)
    own.write_text(json.dumps(given | {"do_sample": False}))
    yield from _served(folder, 512)


@pytest.mark.parametrize("name", client_programs.TALKS)
def test_talk(name: str, url: str, picture: str) -> None:
    assert python_client("talk", name, url, picture) == RIGHT


@pytest.mark.parametrize("name", client_programs.LOOPS)
def test_loop(name: str, url: str, picture: str) -> None:
    assert len(python_client("loop", name, url, picture)["calls"]) >= 2


@pytest.mark.parametrize("name", client_programs.AGENTS)
def test_agent(name: str, url: str, picture: str) -> None:
    done(python_client("agent", name, url, picture, STEPS))


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("name", NODE_AGENTS)
def test_agent_of_npm(name: str, streamed: bool, url: str, picture: str) -> None:
    node(name.partition(".")[0])
    given = [name, url, picture, SCHEMA, ASKED[0], STEPS, streamed]
    steps, calls = node_program("node_loops.mjs", given)
    done({"steps": steps, "calls": calls})


def done(found: Found) -> None:
    """Hold an agent to its steps; one of them may be the answer."""
    assert found["steps"] == STEPS and len(found["calls"]) in (STEPS - 1, STEPS)


@pytest.mark.parametrize("tools", [False, True])
def test_ai_sdk(tools: bool, url: str, picture: str) -> None:
    node("ai")
    node("@ai-sdk/openai-compatible")
    given = [url, picture, SCHEMA if tools else None, *ASKED]
    said, calls = node_program("ai_sdk.mjs", given)
    assert said == RIGHT and len(calls) >= 2 * tools


def test_curl(url: str, picture: str) -> None:
    if shutil.which("curl") is None:
        pytest.skip("not installed: curl")

    def ask(messages: list[Any]) -> str:
        command = ["curl", "-sS", "-m", "60", "-d", "@-", "-H", "Content-Type: application/json"]
        body = json.dumps(client_programs.SHORT | {"messages": messages})
        made = json.loads(run([*command, f"{url}/chat/completions"], body))
        return str(made["choices"][0]["message"]["content"])

    assert client_programs.turns(picture, ask) == RIGHT


def test_transformers_chat(url: str, picture: str, tmp_path: Path) -> None:
    """It sends what is typed as text, and its examples as they are: in one is the picture."""
    start = "import sys; from transformers.cli.transformers import main; sys.exit(main())"
    flags = ["max_new_tokens=20", "do_sample=False"]
    shown = {"type": "image_url", "image_url": {"url": picture}}
    examples = tmp_path / "examples.yaml"
    text = [shown, {"type": "text", "text": ASKED[0]}]
    examples.write_text(json.dumps({"scene": {"text": text}}))  # JSON is YAML
    command = [sys.executable, "-c", start, "chat", MODEL, url.removesuffix("/v1"), *flags]
    command += ["--examples-path", str(examples)]
    # Offline its package speaks to no server at all.
    said = run(command, f"!example scene\n{ASKED[1]}\n!exit\n", HF_HUB_OFFLINE="0")
    replies = said.split(f"<{MODEL}>:")[1:]
    assert [reply.partition("<")[0].strip() for reply in replies] == RIGHT


@pytest.mark.parametrize("form", ["openai-chat", "open-responses", "anthropic"])
def test_llm_comply(form: str, url: str, text_url: str) -> None:
    found = [Path(python).with_name("llm-comply") for python in PYTHONS]
    command = next((str(path) for path in found if path.exists()), None)
    if command is None:
        pytest.skip("not installed: llm-comply")
    runs = []
    for one in (url, text_url):
        asked = ["-u", one, "-k", "none", "-m", MODEL, "--json", "--format", form]
        runs.append(json.loads(run([command, *asked], codes=(0, 1)))["results"])
    assert not failed(runs)


def test_compatcanary(url: str, text_url: str) -> None:
    command, runs = node("compatcanary", "compatcanary"), []
    for one in (url, text_url):
        asked = ["scan", "--base-url", one, "--model", MODEL, "--api-key", "none"]
        said = run([command, *asked, "--format", "json", "--timeout", "120"], codes=(0, 1))
        runs.append(json.loads(said)["results"])
    assert not failed(runs)


def failed(runs: list[list[Found]]) -> dict[str, Found]:
    """Return the tests of a checking program that failed on every model."""
    good, bad = ("pass", "passed"), ("fail", "failed")
    every = list(itertools.chain.from_iterable(runs))
    passed = {one["id"] for one in every if one["status"] in good}
    return {o["id"]: o for o in every if o["status"] in bad and o["id"] not in passed}


# What is installed.


def python_client(kind: str, name: str, *given: Any) -> Any:
    """Run a Python client where it is installed."""
    program, why = str(HERE / "client_programs.py"), f"not installed: {name}"
    for python in PYTHONS:
        # -I: the folder of the program is not where modules are looked for.
        said = run([python, "-I", program, kind, name], json.dumps(given), (0, MISSING))
        if said.strip():
            return json.loads(said.splitlines()[-1])["result"]
    pytest.skip(why)


def node(package: str, command: str = "") -> str:
    """Return the path of an npm package's command."""
    folder = NODE / "node_modules"
    if not (folder / package / "package.json").is_file():
        pytest.skip(f"not installed: {package}")
    return str(folder / ".bin" / command)


def node_program(name: str, given: list[Any]) -> tuple[Any, list[Any]]:
    """Run a program of node; return what it says first, and its calls of ``look``."""
    with tempfile.NamedTemporaryFile("w", suffix=".mjs", dir=NODE) as script:
        script.write((HERE / name).read_text())
        script.flush()
        said, made = json.loads(run(["node", script.name, json.dumps(given)]))
    calls = client_programs.Calls()
    for one in made:
        calls.add("look", one)
    return said, calls.made


def run(
    command: list[str],
    given: str | None = None,
    codes: tuple[int, ...] = (0,),
    **environment: str,
) -> str:
    """Run a program and return what it prints."""
    own = {"HF_HUB_OFFLINE": "1", "NO_COLOR": "1", "COLUMNS": "200"}
    ran = subprocess.run(
        command,
        input=given,
        stdin=subprocess.DEVNULL if given is None else None,
        capture_output=True,
        text=True,
        timeout=180,
        env=os.environ | own | environment,
    )
    assert ran.returncode in codes, (ran.stderr.strip() or ran.stdout.strip())[-600:]
    return ran.stdout
