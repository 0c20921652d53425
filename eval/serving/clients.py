"""Have the clients that people use talk with ``mmkv serve``: a picture, and a second turn.

``python -m eval.serving.clients --python VENV/bin/python --node FOLDER`` starts the server with the
bundled model and runs each client that the interpreters and the folder of npm packages have; those
that are missing are named. A client asks what is at a place of ``assets/scene.png`` and then, with
the whole conversation, about another place. Both answers have to be right.

    pip install openai langchain-openai litellm
    npm install ai @ai-sdk/openai-compatible

``transformers chat`` sends a picture as one of its examples (``!example NAME``). This file is also
what runs in the clients' own environments, so that it imports nothing else of mmkv there.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

MODEL = "tiny-vlm"
ASKED = ("what is at row 2, column 3?", "what is at row 1, column 1?")
RIGHT = ["frog", "monkey"]
_MISSING = 42  # exit code of a client that is not installed
_JAVASCRIPT = """
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateText, streamText } from 'ai';
const [url, picture, ...asked] = JSON.parse(process.argv[2]);
const model = createOpenAICompatible({ name: 'mmkv', baseURL: url })('tiny-vlm');
const messages = [], said = [];
for (const text of asked) {
  const content = [{ type: 'text', text }];
  const data = Buffer.from(picture.split(',')[1], 'base64');
  if (!messages.length) content.unshift({ type: 'image', image: data, mediaType: 'image/png' });
  messages.push({ role: 'user', content });
  const settings = { model, messages, temperature: 0, maxOutputTokens: 20 };
  let reply = '';
  if (said.length) for await (const piece of streamText(settings).textStream) reply += piece;
  else reply = (await generateText(settings)).text;
  said.push(reply);
  messages.push({ role: 'assistant', content: reply });
}
console.log(JSON.stringify(said));
"""


def _turns(picture: str, ask: Callable[[list[Any]], str]) -> list[str]:
    """Have a conversation of two turns, the first about a picture."""
    messages: list[Any] = []
    said = []
    for text in ASKED:
        parts: list[Any] = [{"type": "text", "text": text}]
        if not messages:
            parts.insert(0, {"type": "image_url", "image_url": {"url": picture}})
        messages.append({"role": "user", "content": parts})
        said.append(ask(messages))
        messages.append({"role": "assistant", "content": said[-1]})
    return said


_SETTINGS: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 20}


def openai_sync(url: str, picture: str) -> list[str]:
    """The openai package."""
    from openai import OpenAI

    client = OpenAI(base_url=url, api_key="none").with_options(timeout=60)
    create = client.chat.completions.create
    return _turns(picture, lambda m: create(messages=m, **_SETTINGS).choices[0].message.content)


def openai_async(url: str, picture: str) -> list[str]:
    """The openai package's asynchronous client."""
    from openai import AsyncOpenAI

    async def ask(messages: list[Any]) -> str:
        async with AsyncOpenAI(base_url=url, api_key="none") as client:
            made = await client.chat.completions.create(messages=messages, **_SETTINGS)
            return made.choices[0].message.content or ""

    return _turns(picture, lambda messages: asyncio.run(ask(messages)))


def openai_stream(url: str, picture: str) -> list[str]:
    """Streams of the openai package, with usage."""
    from openai import OpenAI

    create: Any = OpenAI(base_url=url, api_key="none").chat.completions.create
    more = {"stream": True, "stream_options": {"include_usage": True}}

    def ask(messages: list[Any]) -> str:
        text, usage = "", None
        for event in create(messages=messages, **_SETTINGS, **more):
            usage = event.usage or usage
            text += (event.choices[0].delta.content or "") if event.choices else ""
        assert usage is not None and usage.completion_tokens > 0
        return text

    return _turns(picture, ask)


def openai_responses(url: str, picture: str) -> list[str]:
    """Responses of the openai package, the second of which goes on from the first."""
    from openai import OpenAI

    create: Any = OpenAI(base_url=url, api_key="none").responses.create
    settings: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_output_tokens": 20}
    seen = [
        {"type": "input_image", "image_url": picture, "detail": "auto"},
        {"type": "input_text", "text": ASKED[0]},
    ]
    first = create(input=[{"role": "user", "content": seen}], **settings)
    second = create(input=ASKED[1], previous_response_id=first.id, **settings)
    return [first.output_text, second.output_text]


def langchain(url: str, picture: str) -> list[str]:
    """langchain-openai."""
    model = import_module("langchain_openai").ChatOpenAI(
        base_url=url, api_key="none", model=MODEL, temperature=0, max_completion_tokens=20
    )
    return _turns(picture, lambda messages: str(model.invoke(messages).content))


def litellm(url: str, picture: str) -> list[str]:
    """litellm."""
    package = import_module("litellm")
    settings = _SETTINGS | {"model": f"openai/{MODEL}", "api_base": url, "api_key": "none"}

    def ask(messages: list[Any]) -> str:
        made: Any = package.completion(messages=messages, **settings)
        return str(made.choices[0].message.content)

    return _turns(picture, ask)


PYTHON: dict[str, Callable[[str, str], list[str]]] = {
    "openai": openai_sync,
    "openai, async": openai_async,
    "openai, stream": openai_stream,
    "openai, responses": openai_responses,
    "langchain-openai": langchain,
    "litellm": litellm,
}


def curl(url: str, picture: str) -> list[str]:
    """Run curl."""

    def ask(messages: list[Any]) -> str:
        command = ["curl", "-sS", "-m", "60", "-d", "@-", "-H", "Content-Type: application/json"]
        body = json.dumps(_SETTINGS | {"messages": messages})
        said = _run([*command, f"{url}/chat/completions"], body)
        made: str = json.loads(said)["choices"][0]["message"]["content"]
        return made

    if shutil.which("curl") is None:
        raise FileNotFoundError("curl")
    return _turns(picture, ask)


def ai_sdk(node: Path | None, url: str, picture: str) -> list[str]:
    """Run the AI SDK, with a whole reply and a streamed one."""
    if node is None or not (node / "node_modules" / "ai").is_dir():
        raise FileNotFoundError("npm install ai @ai-sdk/openai-compatible")
    with tempfile.NamedTemporaryFile("w", suffix=".mjs", dir=node) as script:
        script.write(_JAVASCRIPT)
        script.flush()
        said = _run(["node", script.name, json.dumps([url, picture, *ASKED])])
    made: list[str] = json.loads(said)
    return made


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
        said = _run(command, f"!example scene\n{ASKED[1]}\n!exit\n", offline="0")
    replies = said.split(f"<{MODEL}>:")[1:]
    if len(replies) != 2:
        raise ValueError(said[-300:])
    return [reply.partition("<")[0].strip() for reply in replies]


def _run(command: list[str], given: str | None = None, offline: str = "1") -> str:
    ran = subprocess.run(
        command,
        input=given,
        capture_output=True,
        text=True,
        timeout=180,
        env=os.environ | {"HF_HUB_OFFLINE": offline, "NO_COLOR": "1", "COLUMNS": "200"},
    )
    if ran.returncode == _MISSING:
        raise FileNotFoundError(ran.stderr.strip().splitlines()[-1])
    if ran.returncode:
        lines = (ran.stderr.strip() or ran.stdout.strip()).splitlines() or ["nothing"]
        raise ValueError(f"exit code {ran.returncode}: {lines[-1][:200]}")
    return ran.stdout


def talk(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Start the server and run all clients; what each was told, or why it was not."""
    from mmkv.eval.serving.servers import mmkv_serve
    from mmkv.resources import asset

    content = base64.b64encode(asset("scene.png").read_bytes()).decode()
    picture = f"data:image/png;base64,{content}"
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="mmkv-clients-") as folder:
        settings = ["--budget", "64", "--memory", "64MiB"]
        with mmkv_serve(None, Path(folder) / "mmkv.log", *settings) as server:
            url = f"{server.url}/v1"

            def python(name: str) -> list[str]:
                given = json.dumps([url, picture])
                file = str(Path(__file__).resolve())
                made: list[str] = json.loads(_run([*options.python, file, "--one", name], given))
                return made

            clients: dict[str, Callable[[], list[str]]] = {
                name: lambda name=name: python(name)  # type: ignore[misc]
                for name in PYTHON
            }
            clients["AI SDK"] = lambda: ai_sdk(options.node, url, picture)
            clients["curl"] = lambda: curl(url, picture)
            clients["transformers chat"] = lambda: transformers_chat(url, picture)
            for name, client in clients.items():
                try:
                    found[name] = {"said": client()}
                except FileNotFoundError as error:
                    found[name] = {"missing": str(error)}
                except Exception as error:
                    found[name] = {"failed": f"{type(error).__name__}: {error}"[:300]}
    return found


def _one(name: str) -> int:
    """Run one client here, in its own environment; its replies go to stdout."""
    url, picture = json.loads(sys.stdin.read())
    try:
        said = PYTHON[name](url, picture)
    except ImportError as error:
        print(error, file=sys.stderr)
        return _MISSING
    print(json.dumps(said))
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run all clients, print the table and write the result file; exit code 1 if one fails."""
    parser = argparse.ArgumentParser(
        prog="python -m eval.serving.clients",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    here = [sys.executable]
    parser.add_argument("--python", nargs=1, default=here, help="interpreter that has the packages")
    parser.add_argument("--node", type=Path, default=None, help="folder with node_modules")
    parser.add_argument("--one", choices=sorted(PYTHON), default=None, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, default=None, help="folder of the result file")
    parser.add_argument("--name", default=None, help="name of the result file, without .json")
    options = parser.parse_args(arguments)
    if options.one is not None:
        return _one(options.one)
    from mmkv.eval.bench.output import save, table
    from mmkv.training.measure.record import RESULTS

    found = talk(options)
    rows, bad = [], False
    for name, one in found.items():
        said = one.get("said")
        good = said == RIGHT
        bad |= not good and "missing" not in one
        words = " | ".join(said) if said else str(one)
        rows.append([name, "yes" if good else "no", words])
    table("Clients, a picture and two turns", ["client", "talks", "it was told"], rows)
    options.output = options.output or RESULTS
    print(f"written to {save(options, 'serving-clients', found)}")
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
