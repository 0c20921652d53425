"""Have the clients that people use talk with ``mmkv serve``, and let them call tools there.

``python -m benchmarks.serving.clients --python VENV/bin/python ... --node FOLDER`` starts the
server with the bundled model and runs what the interpreters and the folder of npm packages have;
what is not there gets a row that says so.

A **talk**: a client asks what is at a place of ``assets/scene.png`` and then, with the whole
conversation, about another place. Both answers have to be right. A **loop**: two of its replies
have to call a tool, by the tool choice, with a picture in the request and in a result; arguments
have to satisfy the tool's schema, and objects the client's types (:mod:`client_programs`). An
**agent** is a package's own loop of --steps steps, in each of which a result holds a picture. The
**checks** are programs that look for what an API of this form has to do. Some need a model that
ends a text by itself, and with --text-model they are run on that, too: what passes on one passes.

    pip install openai anthropic openai-agents litellm llm-comply
    pip install langchain langchain-openai langchain-anthropic
    npm install ai @ai-sdk/openai @ai-sdk/openai-compatible @ai-sdk/anthropic zod openai \\
        @anthropic-ai/sdk opencode-ai @anthropic-ai/claude-code compatcanary

``transformers chat`` sends a picture as one of its examples (``!example NAME``). The bundled model
calls no tools by itself, and terminal agents have no setting that makes it: a relay between them
and the server sets the tool choice, and allows one value for the file's name.
"""

from __future__ import annotations

import argparse
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
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.bench.harness import save, table
from benchmarks.serving import client_programs
from benchmarks.serving.client_programs import ASKED, MISSING, MODEL, SCHEMA
from benchmarks.serving.servers import mmkv_serve
from mmkv.resources import asset
from mmkv.training.measure.record import RESULTS

RIGHT = ["frog", "monkey"]
Found = dict[str, Any]
_JAVASCRIPT = """
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateText, jsonSchema, stepCountIs, streamText, tool } from 'ai';
const [url, picture, schema, ...asked] = JSON.parse(process.argv[2]);
const model = createOpenAICompatible({ name: 'mmkv', baseURL: url })('tiny-vlm');
const data = Buffer.from(picture.split(',')[1], 'base64');
const image = { type: 'image', image: data, mediaType: 'image/png' };
const messages = [], said = [];
for (const text of asked) {
  const content = [{ type: 'text', text }];
  if (!messages.length) content.unshift(image);
  messages.push({ role: 'user', content });
  const settings = { model, messages, temperature: 0, maxOutputTokens: 20 };
  let reply = '';
  if (said.length) for await (const piece of streamText(settings).textStream) reply += piece;
  else reply = (await generateText(settings)).text;
  said.push(reply);
  messages.push({ role: 'assistant', content: reply });
}
const calls = [];
if (schema) for (const streamed of [false, true]) {
  const look = tool({
    description: 'Look at a place of the picture.',
    inputSchema: jsonSchema(schema),
    execute: async (given) => { calls.push(given); return 'a frog'; },
  });
  const settings = {
    model, tools: { look }, toolChoice: 'required', stopWhen: stepCountIs(2), temperature: 0,
    maxOutputTokens: 1000,
    messages: [{ role: 'user', content: [image, { type: 'text', text: asked[0] }] }],
  };
  const made = streamed ? streamText(settings) : await generateText(settings);
  for (const step of await made.steps)
    if (step.finishReason !== 'tool-calls') throw new Error(`it ends by ${step.finishReason}`);
}
console.log(JSON.stringify([said, calls]));
"""
# Packages whose own loops run; the last of so many steps may not call.
_LOOPS = """
const [name, url, picture, schema, asked, steps, streamed] = JSON.parse(process.argv[2]);
const model = 'tiny-vlm', description = 'Look at a place of the picture.', said = 'a frog';
const data = picture.split(',')[1], calls = [], requests = [];
const counting = (where, given) => { requests.push(where); return fetch(where, given); };
const options = { apiKey: 'none', maxRetries: 0, fetch: counting };
const run = (given) => { calls.push(given); return said; };
if (name === 'openai') {
  const { default: OpenAI } = await import('openai');
  const client = new OpenAI({ ...options, baseURL: url });
  const text = { type: 'text', text: asked };
  const image = { type: 'image_url', image_url: { url: picture } };
  const look = { name: 'look', description, parameters: schema, parse: JSON.parse, function: run };
  const runner = client.chat.completions.runTools({
    model, temperature: 0, max_tokens: 1000, tool_choice: 'required', parallel_tool_calls: false,
    messages: [{ role: 'user', content: [image, text] }], stream: streamed,
    tools: [{ type: 'function', function: look }],
  }, { maxChatCompletions: steps });
  await runner.done();
} else if (name === '@anthropic-ai/sdk') {
  const { default: Anthropic } = await import('@anthropic-ai/sdk');
  const client = new Anthropic({ ...options, baseURL: url.replace(/\\/v1$/, '') });
  const image = { type: 'image', source: { type: 'base64', media_type: 'image/png', data } };
  const look = { type: 'custom', name: 'look', description, input_schema: schema, parse: (x) => x,
    run: (given) => [{ type: 'text', text: run(given) }, image] };
  const runner = client.beta.messages.toolRunner({
    model, temperature: 0, max_tokens: 1000, stream: streamed, max_iterations: steps, tools: [look],
    tool_choice: { type: 'any', disable_parallel_tool_use: true },
    messages: [{ role: 'user', content: [image, { type: 'text', text: asked }] }],
  });
  for await (const made of runner) if (streamed) await made.finalMessage();
} else {
  const { generateText, jsonSchema, stepCountIs, streamText, tool } = await import('ai');
  const [, maker, form] = /^@ai-sdk\\/([^.]*)\\.?(.*)$/.exec(name);
  const module = await import(`@ai-sdk/${maker}`);
  const own = { ...options, baseURL: url, name: 'mmkv' };
  const [create] = ['OpenAI', 'Anthropic', 'OpenAICompatible'].map((one) => module[`create${one}`])
    .filter(Boolean);
  const made = create(own);
  // To chats it would send a result's picture as a text of base64: there the user shows it.
  const shows = form === 'chat' || maker.includes('compatible');
  const parts = [{ type: 'text', text: said }, { type: 'media', data, mediaType: 'image/png' }];
  const result = shows ? { type: 'text', value: said } : { type: 'content', value: parts };
  const look = tool({
    description, inputSchema: jsonSchema(schema), execute: run, toModelOutput: () => result,
  });
  const image = { type: 'image', image: Buffer.from(data, 'base64'), mediaType: 'image/png' };
  const messages = [{ role: 'user', content: [image, { type: 'text', text: asked }] }];
  const settings = { model: form ? made[form](model) : made(model), tools: { look }, temperature: 0,
    maxRetries: 0, maxOutputTokens: 1000, messages, stopWhen: stepCountIs(steps),
    onError: ({ error }) => { throw error; },
    providerOptions: { openai: { parallelToolCalls: false }, mmkv: { parallel_tool_calls: false },
      anthropic: { disableParallelToolUse: true } },
    prepareStep: ({ stepNumber: at, messages: now }) => ({
      toolChoice: at < steps - 1 ? 'required' : 'none',
      messages: now.flatMap((one) => shows && one.role === 'tool'
        ? [one, { role: 'user', content: [image] }] : [one]),
    }) };
  const first = streamed ? streamText(settings) : await generateText(settings);
  const all = await first.steps;
  // A conversation goes on with what came of it: one of its messages may be known by its id alone.
  messages.push(...(await first.response).messages, { role: 'user', content: 'and now?' });
  const last = await generateText({ ...settings, messages, stopWhen: stepCountIs(1), tools: {},
    prepareStep: undefined, maxOutputTokens: 20 });
  if (all.length !== steps || !last.steps.length) throw new Error(`${all.length} steps`);
  requests.pop();
}
console.log(JSON.stringify([requests.length, calls]));
"""
NODE_AGENTS = (
    *("@ai-sdk/openai.responses", "@ai-sdk/openai.chat", "@ai-sdk/openai-compatible"),
    *("@ai-sdk/anthropic", "openai", "@anthropic-ai/sdk"),
)


def curl(url: str, picture: str) -> list[str]:
    """Run curl."""

    def ask(messages: list[Any]) -> str:
        command = ["curl", "-sS", "-m", "60", "-d", "@-", "-H", "Content-Type: application/json"]
        body = json.dumps(client_programs.SHORT | {"messages": messages})
        said = _run([*command, f"{url}/chat/completions"], body)
        made: str = json.loads(said)["choices"][0]["message"]["content"]
        return made

    if shutil.which("curl") is None:
        raise FileNotFoundError("curl")
    return client_programs.turns(picture, ask)


def transformers_chat(url: str, picture: str) -> list[str]:
    """Run ``transformers chat``, which sends what is typed as text, and its examples as they are.

    So the picture is in an example, whose text is a list of parts.
    """
    start = "import sys; from transformers.cli.transformers import main; sys.exit(main())"
    flags = ["max_new_tokens=20", "do_sample=False"]
    command = [sys.executable, "-c", start, "chat", MODEL, url.removesuffix("/v1"), *flags]
    parts = [
        {"type": "image_url", "image_url": {"url": picture}},
        {"type": "text", "text": ASKED[0]},
    ]
    with tempfile.TemporaryDirectory(prefix="mmkv-examples-") as folder:
        examples = Path(folder) / "examples.yaml"
        examples.write_text(json.dumps({"scene": {"text": parts}}))  # JSON is YAML
        command += ["--examples-path", str(examples)]
        # Offline its package speaks to no server at all.
        said = _run(
            command, f"!example scene\n{ASKED[1]}\n!exit\n", environment={"HF_HUB_OFFLINE": "0"}
        )
    replies = said.split(f"<{MODEL}>:")[1:]
    if len(replies) != 2:
        raise ValueError(said[-300:])
    return [reply.partition("<")[0].strip() for reply in replies]


class Packages:
    """What is installed: Python packages in ``pythons``' environments, npm ones below ``node``."""

    def __init__(self, pythons: list[str], node: Path | None) -> None:
        self._pythons, self._node = pythons, node

    def python(self, kind: str, name: str, *given: Any) -> Found:
        """Run a Python client where it is installed. Raises FileNotFoundError."""
        program = str(Path(client_programs.__file__).resolve())
        why = FileNotFoundError(name)
        for python in self._pythons:
            try:
                # -I: the folder of the program is not where modules are looked for.
                said = _run([python, "-I", program, kind, name], json.dumps(given))
            except FileNotFoundError as error:
                why = error
                continue
            made: Found = json.loads(said.splitlines()[-1])
            return made
        raise why

    def script(self, name: str) -> str:
        """Return the path of a Python package's command. Raises FileNotFoundError."""
        for python in self._pythons:
            found = Path(python).with_name(name)
            if found.exists():
                return str(found)
        raise FileNotFoundError(name)

    def node(self, package: str, command: str = "") -> tuple[str, str]:
        """Return an npm package's version and the path of a command. Raises FileNotFoundError."""
        folder = (self._node or Path("/nowhere")) / "node_modules"
        about = folder / package / "package.json"
        if not about.is_file():
            raise FileNotFoundError(package)
        return json.loads(about.read_text())["version"], str(folder / ".bin" / command)

    def ai_sdk(self, url: str, picture: str, tools: bool) -> Found:
        """Run the AI SDK, with whole replies and streamed ones."""
        number, _ = self.node("ai")
        self.node("@ai-sdk/openai-compatible")
        given = json.dumps([url, picture, SCHEMA if tools else None, *ASKED])
        said, calls = self._script(_JAVASCRIPT, given)
        return {"version": number, "result": {"calls": calls} if tools else said}

    def loop(self, name: str, url: str, picture: str, steps: int, streamed: bool) -> Found:
        """Run the loop of an npm package. Raises FileNotFoundError."""
        number, _ = self.node(name.partition(".")[0])
        given = json.dumps([name, url, picture, SCHEMA, ASKED[0], steps, streamed])
        requests, calls = self._script(_LOOPS, given)
        return {"version": number, "result": {"calls": calls, "steps": requests}}

    def _script(self, text: str, given: str) -> tuple[Any, list[Any]]:
        """Run a program of node; return what it says first, and its calls of ``look``."""
        with tempfile.NamedTemporaryFile("w", suffix=".mjs", dir=self._node) as script:
            script.write(text)
            script.flush()
            said, made = json.loads(_run(["node", script.name, given]))
        calls = client_programs.Calls()
        for one in made:
            calls.add("look", one)
        return said, calls.made


# Programs that check an API.


def llm_comply(packages: Packages, urls: list[str], form: str) -> Found:
    """Run llm-comply's tests of one API, on each server."""
    command = packages.script("llm-comply")
    number = _run([command, "--version"]).split()[-1]
    results = []
    for url in urls:
        asked = ["-u", url, "-k", "none", "-m", MODEL, "--json", "--format", form]
        results.append(json.loads(_run([command, *asked], codes=(0, 1)))["results"])
    return {"version": number, "result": counted(results, "errors")}


def compatcanary(packages: Packages, urls: list[str]) -> Found:
    """Run compatcanary's probes, on each server."""
    number, command = packages.node("compatcanary", "compatcanary")
    results = []
    for url in urls:
        asked = ["scan", "--base-url", url, "--model", MODEL, "--api-key", "none"]
        said = _run([command, *asked, "--format", "json", "--timeout", "120"], codes=(0, 1))
        results.append(json.loads(said)["results"])
    return {"version": number, "result": counted(results, "summary")}


_STATES = {"pass": "passed", "fail": "failed", "warn": "warning"}


def counted(runs: list[list[Found]], why: str) -> Found:
    """Count tests by the best state that they had in a run; tell why those did not pass.

    Args:
        why: the field of a test that says it.
    """
    best: dict[str, tuple[str, Found]] = {}
    for one in itertools.chain.from_iterable(runs):
        state = _STATES.get(str(one["status"]), str(one["status"]))
        if one["id"] not in best or state == "passed":
            best[one["id"]] = (state, one)
    made: Found = {"passed": 0, "not passed": {}}
    for name, (state, one) in best.items():
        made[state] = made.get(state, 0) + 1
        if state != "passed":
            reason = one.get("skip_reason") or one.get(why) or one.get("warnings") or ""
            made["not passed"][name] = [state, str(reason)[:300]]
    return made


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


def opencode(packages: Packages, url: str, folder: Path) -> Found:
    """Run opencode, which speaks chat completions; its tool shows it a picture."""
    number, command = packages.node("opencode-ai", "opencode")
    file = _scene(folder)
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
        said = _run(
            [command, *asked], folder=folder, environment={"OPENCODE_DISABLE_MODELS_FETCH": "1"}
        )
    events = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    texts = [one["part"]["text"] for one in events if one["type"] == "text"]
    return _agent_result(number, between, texts)


def claude_code(packages: Packages, url: str, folder: Path) -> Found:
    """Run Claude Code, which speaks Anthropic's messages; its tool shows it a picture."""
    number, command = packages.node("@anthropic-ai/claude-code", "claude")
    file = _scene(folder)
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
        said = _run([command, *asked, *form], "", folder=folder, environment=settings)
    events = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    blocks = [
        block
        for one in events
        if one["type"] in ("assistant", "user") and isinstance(one["message"]["content"], list)
        for block in one["message"]["content"]
    ]
    if events[-1].get("is_error"):
        raise ValueError(said[-300:])
    texts = [block["text"] for block in blocks if block["type"] == "text"]
    return _agent_result(number, between, texts)


def codex(packages: Packages, url: str, folder: Path) -> Found:
    """Run Codex, which speaks responses; its tool shows it a picture."""
    number, command = packages.node("@openai/codex", "codex")
    file = _scene(folder)
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
        said = _run([command, *asked], folder=folder, environment=home)
    events = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    if events[-1]["type"] != "turn.completed":
        raise ValueError(said[-300:])
    items = [one["item"] for one in events if one["type"] == "item.completed"]
    texts = [one["text"] for one in items if one["type"] == "agent_message"]
    return _agent_result(number, between, texts)


def _scene(folder: Path) -> Path:
    folder.mkdir()
    return Path(shutil.copy(asset("scene.png"), folder / "scene.png"))


def _agent_result(number: str, between: Relay, texts: list[str]) -> Found:
    if between.forced != 2 or between.results != 2:
        raise ValueError(f"{between.forced} calls were forced, {between.results} have a result")
    return {"version": number, "result": {"calls": between.forced, "said": "".join(texts[-1:])}}


def _run(
    command: list[str],
    given: str | None = None,
    codes: tuple[int, ...] = (0,),
    folder: Path | None = None,
    environment: dict[str, str] | None = None,
) -> str:
    """Run a program and return what it prints; with ``folder``, that is its home, too.

    Raises:
        FileNotFoundError: its package is not installed; ValueError: it ended with another code.
    """
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
        env=os.environ | own | (environment or {}),
    )
    if ran.returncode == MISSING:
        raise FileNotFoundError(ran.stderr.strip().splitlines()[-1])
    if ran.returncode not in codes:
        lines = (ran.stderr.strip() or ran.stdout.strip()).splitlines() or ["nothing"]
        lines = [line for line in lines if "Error" in line][-1:] or lines[-1:]
        raise ValueError(f"exit code {ran.returncode}: {lines[0][:300]}")
    return ran.stdout


def run_all(options: argparse.Namespace) -> dict[str, dict[str, Found]]:
    """Start the server and run everything; what came of it, per kind and client."""
    content = base64.b64encode(asset("scene.png").read_bytes()).decode()
    picture = f"data:image/png;base64,{content}"
    packages = Packages(options.python, options.node)
    with tempfile.TemporaryDirectory(prefix="mmkv-clients-") as name:
        folder = Path(name)
        settings = ["--budget", "64", "--memory", "64MiB"]
        with ExitStack() as servers:
            start = servers.enter_context
            urls = [start(mmkv_serve(None, folder / "mmkv.log", *settings)).url]
            if options.text_model is not None and "check" in options.kinds:
                greedy = str(_greedy(options.text_model, folder / "text"))
                settings = ["--budget", "512", "--memory", "256MiB", "--served-model-name", MODEL]
                urls.append(start(mmkv_serve(greedy, folder / "text.log", *settings)).url)
            urls = [f"{url}/v1" for url in urls]
            wanted = _programs(packages, urls, picture, folder, options.steps)
            return {
                kind: {name: _outcome(run) for name, run in programs.items()}
                for kind, programs in wanted.items()
                if kind in options.kinds
            }


def _greedy(model: Path, folder: Path) -> Path:
    """Return a folder with a model's files whose replies are greedy where nothing is asked for."""
    folder.mkdir()
    for file in model.resolve().iterdir():
        (folder / file.name).symlink_to(file)
    own = folder / "generation_config.json"
    given = json.loads(own.read_text()) if own.exists() else {}
    own.unlink(missing_ok=True)
    own.write_text(json.dumps(given | {"do_sample": False}))
    return folder


def _programs(
    packages: Packages, urls: list[str], picture: str, folder: Path, steps: int
) -> dict[str, dict[str, Callable[[], Found]]]:
    url = urls[0]

    def python(kind: str, name: str, *more: Any) -> Callable[[], Found]:
        return lambda: packages.python(kind, name, url, picture, *more)

    def loop(name: str, streamed: bool) -> Callable[[], Found]:
        return lambda: packages.loop(name, url, picture, steps, streamed)

    return {
        "talk": {
            **{name: python("talk", name) for name in client_programs.TALKS},
            "AI SDK": lambda: packages.ai_sdk(url, picture, False),
            "curl": lambda: {"version": "", "result": curl(url, picture)},
            "transformers chat": lambda: {"version": "", "result": transformers_chat(url, picture)},
        },
        "loop": {
            **{name: python("loop", name) for name in client_programs.LOOPS},
            "AI SDK": lambda: packages.ai_sdk(url, picture, True),
            "opencode": lambda: opencode(packages, url, folder / "opencode"),
            "Codex": lambda: codex(packages, url, folder / "codex"),
            "Claude Code": lambda: claude_code(packages, url, folder / "claude"),
        },
        "agent": {
            **{name: python("agent", name, steps) for name in client_programs.AGENTS},
            **{
                f"{name} of npm{', stream' * streamed}": loop(name, streamed)
                for name in NODE_AGENTS
                for streamed in (False, True)
            },
        },
        "check": {
            "llm-comply, chat": lambda: llm_comply(packages, urls, "openai-chat"),
            "llm-comply, responses": lambda: llm_comply(packages, urls, "open-responses"),
            "llm-comply, messages": lambda: llm_comply(packages, urls, "anthropic"),
            "compatcanary": lambda: compatcanary(packages, urls),
        },
    }


def _outcome(run: Callable[[], Found]) -> Found:
    try:
        return run()
    except FileNotFoundError as error:
        return {"missing": f"not installed: {error}"}
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"[:400]}


def _good(kind: str, one: Found, steps: int) -> bool:
    result = one.get("result")
    if kind == "talk" or result is None:
        return result == RIGHT
    if kind == "check":
        return not result.get("failed")
    calls = result["calls"]
    if kind == "agent":  # one step may be the answer
        return result["steps"] == steps and len(calls) in (steps - 1, steps)
    return (calls if isinstance(calls, int) else len(calls)) >= 2


def main(arguments: list[str] | None = None) -> int:
    """Run all clients, print the tables, write the result file; exit code 1 if one fails."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving.clients",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    here, kinds = [sys.executable], ["talk", "loop", "agent", "check"]
    parser.add_argument("--python", nargs="+", default=here, help="interpreters with packages")
    parser.add_argument("--node", type=Path, default=None, help="folder with node_modules")
    parser.add_argument("--text-model", type=Path, default=None, help="a second model for checks")
    parser.add_argument("--kinds", nargs="+", choices=kinds, default=kinds, help="what is run")
    parser.add_argument("--steps", type=int, default=20, help="of an agent")
    parser.add_argument("--output", type=Path, default=None, help="folder of the result file")
    parser.add_argument("--name", default=None, help="name of the result file, without .json")
    options = parser.parse_args(arguments)
    found, bad = run_all(options), False
    for kind, clients in found.items():
        rows = []
        for name, one in clients.items():
            good = _good(kind, one, options.steps)
            bad |= not good and "missing" not in one
            said = one.get("result") or one.get("missing") or one.get("failed")
            if kind == "agent" and good:
                said = f"{one['result']['steps']} steps, {len(one['result']['calls'])} calls"
            words = said if isinstance(said, str) else json.dumps(said)
            rows.append([name, one.get("version", ""), "yes" if good else "no", words])
        table(f"Clients: {kind}", ["client", "version", "good", "what came of it"], rows)
    options.output = options.output or RESULTS
    print(f"written to {save(options, 'serving-clients', found)}")
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
