"""The clients that people use, against ``mmkv serve``: a matrix of packages, agents and checks.

Each is skipped where it is not installed. ``MMKV_CLIENTS`` names interpreters whose environments
have packages (with a colon between two), ``MMKV_NODE`` a folder with ``node_modules``:

    pip install openai-agents litellm llm-comply langchain langchain-openai langchain-anthropic
    npm install ai @ai-sdk/openai @ai-sdk/openai-compatible @ai-sdk/anthropic zod openai \\
        @anthropic-ai/sdk opencode-ai @anthropic-ai/claude-code compatcanary

A **talk**: a client asks what is at a place of ``assets/scene.png`` and then, with the whole
conversation, about another place. Both answers have to be right. A **loop**: two of its replies
have to call a tool, by the tool choice, with a picture in the request and in a result; arguments
have to satisfy the tool's schema (:mod:`client_programs`). An **agent** is a package's own loop, in
each of whose steps a result holds a picture. The **checks** are programs that look for what an API
of this form has to do. Some need a model that ends a text by itself, and are run on
``MMKV_TEXT_MODEL``, too: what passes on one passes.

``transformers chat`` sends a picture as one of its examples (``!example NAME``). The bundled model
calls no tools by itself, and terminal agents have no setting that makes it: a relay between them
and the server sets the tool choice, and allows one value for the file's name.
"""

from __future__ import annotations

import base64
import http.server
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
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
    folder: Path | None = None,
    **environment: str,
) -> str:
    """Run a program and return what it prints; with ``folder``, that is its home, too."""
    own = {"HF_HUB_OFFLINE": "1", "NO_COLOR": "1", "COLUMNS": "200"}
    if folder is not None:
        own |= {"HOME": str(folder), "PWD": str(folder)}
    ran = subprocess.run(
        command,
        input=given,
        stdin=subprocess.DEVNULL if given is None else None,
        capture_output=True,
        text=True,
        timeout=180,
        cwd=folder,
        env=os.environ | own | environment,
    )
    assert ran.returncode in codes, (ran.stderr.strip() or ran.stdout.strip())[-600:]
    return ran.stdout


# Terminal agents, behind a relay that forces calls.


class Relay(http.server.ThreadingHTTPServer):
    """Passes requests on to a server; makes the first two that have tools call ``tool``.

    The tool is left with one parameter, of one value, and later requests may not call at all.

    Attributes:
        forced: how many requests were made to call.
        results: of calls that did not fail, in the latest request.
    """

    daemon_threads = True

    def __init__(self, url: str, tool: str, parameter: str, value: str) -> None:
        super().__init__(("127.0.0.1", 0), _Relayed)
        self.to, self.forced, self.results = url, 0, 0
        self._tool, self._schema = (
            tool,
            {
                "type": "object",
                "properties": {parameter: {"type": "string", "enum": [value]}},
                "required": [parameter],
                "additionalProperties": False,
            },
        )

    @property
    def url(self) -> str:
        """Return where it answers."""
        return f"http://127.0.0.1:{self.server_port}"

    def changed(self, path: str, body: Found) -> Found:
        """Return the body that is sent on in place of one."""
        if not body.get("tools"):
            return body
        form = _FORMS[next(end for end in _FORMS if path.partition("?")[0].endswith(end))]
        for tool in body["tools"]:
            function = tool.get("function", tool)
            if function["name"] == self._tool:
                function[form.schema] = self._schema
        self.results = sum(map(form.is_result, _parts(body)))
        force = self.forced < 2
        self.forced += force
        return body | {"tool_choice": form.named(self._tool) if force else form.none}


def _parts(body: Found) -> Iterator[Found]:
    """Yield the messages or items of a conversation, and the parts of those."""
    items = body.get("messages") or body.get("input") or ()
    for item in items if isinstance(items, list) else ():
        yield item
        content = item.get("content")
        yield from content if isinstance(content, list) else ()


@dataclass(frozen=True)
class _Form:
    """How an API names a function's schema, a forced call, none, and a result."""

    schema: str
    named: Callable[[str], Found]
    none: Any
    is_result: Callable[[Found], bool]


_FORMS = {
    "/chat/completions": _Form(
        "parameters",
        lambda name: {"type": "function", "function": {"name": name}},
        "none",
        lambda part: part.get("role") == "tool",
    ),
    "/responses": _Form(
        "parameters",
        lambda name: {"type": "function", "name": name},
        "none",
        lambda part: part.get("type") == "function_call_output",
    ),
    "/messages": _Form(
        "input_schema",
        lambda name: {"type": "tool", "name": name},
        {"type": "none"},
        lambda part: part.get("type") == "tool_result" and not part.get("is_error"),
    ),
}


class _Relayed(http.server.BaseHTTPRequestHandler):
    server: Relay

    def _pass_on(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        content = self.rfile.read(length)
        if content and "count_tokens" not in self.path:
            content = json.dumps(self.server.changed(self.path, json.loads(content))).encode()
        left_out = ("host", "content-length", "connection", "accept-encoding")
        headers = {k: v for k, v in self.headers.items() if k.lower() not in left_out}
        url = self.server.to + self.path
        with httpx.stream(
            self.command, url, content=content, headers=headers, timeout=120, trust_env=False
        ) as answer:
            self.send_response(answer.status_code)
            self.send_header("Content-Type", answer.headers.get("Content-Type", "text/plain"))
            self.end_headers()
            for piece in answer.iter_raw():
                self.wfile.write(piece)
                self.wfile.flush()

    do_GET = do_POST = do_HEAD = _pass_on

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@contextmanager
def relay(url: str, tool: str, parameter: str, value: str) -> Iterator[Relay]:
    """Run a relay to ``url`` as long as this context."""
    with Relay(url, tool, parameter, value) as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield made
        made.shutdown()


def test_opencode(url: str, tmp_path: Path) -> None:
    """It speaks chat completions; its tool shows it a picture."""
    command = node("opencode-ai", "opencode")
    folder, file = tmp_path, Path(shutil.copy(asset("scene.png"), tmp_path / "scene.png"))
    with relay(url.removesuffix("/v1"), "read", "filePath", str(file)) as between:
        model = {
            "name": MODEL,
            "attachment": True,
            "tool_call": True,
            "modalities": {"input": ["text", "image"], "output": ["text"]},
            "limit": {"context": 8192, "output": 200},
        }
        provider = {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": f"{between.url}/v1", "apiKey": "none"},
            "models": {MODEL: model},
        }
        named = f"mmkv/{MODEL}"
        agent = {"mode": "primary", "prompt": "look", "tools": {"*": False, "read": True}}
        config = {
            "autoupdate": False,
            "share": "disabled",
            "model": named,
            "small_model": named,
            "provider": {"mmkv": provider},
            "agent": {"tiny": agent},
        }
        (folder / "opencode.json").write_text(json.dumps(config))
        asked = ["run", "--agent", "tiny", "-f", str(file), "--format", "json", "--", ASKED[0]]
        run([command, *asked], folder=folder, OPENCODE_DISABLE_MODELS_FETCH="1")
    assert (between.forced, between.results) == (2, 2)


def test_claude_code(url: str, tmp_path: Path) -> None:
    """It speaks Anthropic's messages; its tool shows it a picture."""
    command = node("@anthropic-ai/claude-code", "claude")
    folder, file = tmp_path, Path(shutil.copy(asset("scene.png"), tmp_path / "scene.png"))
    with relay(url.removesuffix("/v1"), "Read", "file_path", str(file)) as between:
        settings = {
            "ANTHROPIC_BASE_URL": between.url,
            "ANTHROPIC_API_KEY": "none",
            "ANTHROPIC_MODEL": MODEL,
            "ANTHROPIC_SMALL_FAST_MODEL": MODEL,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "200",
        }
        asked = ["-p", ASKED[0], "--system-prompt", "look", "--tools", "Read", "--verbose"]
        form = ["--output-format", "stream-json"]
        said = run([command, *asked, *form], "", folder=folder, **settings)
    events = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert not events[-1].get("is_error"), said[-300:]
    assert (between.forced, between.results) == (2, 2)


def test_codex(url: str, tmp_path: Path) -> None:
    """It speaks responses; its tool shows it a picture."""
    command = node("@openai/codex", "codex")
    folder, file = tmp_path, Path(shutil.copy(asset("scene.png"), tmp_path / "scene.png"))
    with relay(url.removesuffix("/v1"), "view_image", "path", str(file)) as between:
        (folder / "look.md").write_text("look")
        lines = [
            f'model = "{MODEL}"',
            'model_provider = "mmkv"',
            f'model_instructions_file = "{folder / "look.md"}"',
            "model_context_window = 1000000",  # it would sum up the conversation soon
            'web_search = "disabled"',
            "[model_providers.mmkv]",
            'name = "mmkv"',
            f'base_url = "{between.url}/v1"',
            'wire_api = "responses"',
            "[features]",
            "multi_agent = false",
            "goals = false",
        ]
        (folder / "config.toml").write_text("\n".join(lines))
        asked = ["exec", "--skip-git-repo-check", "--json", ASKED[0], "-i", str(file)]
        home = {"CODEX_HOME": str(folder)}
        said = run([command, *asked], folder=folder, **home)
    events = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert events[-1]["type"] == "turn.completed", said[-300:]
    assert (between.forced, between.results) == (2, 2)
