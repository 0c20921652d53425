"""Run an agent of 300 steps, each with a drawn screen, on several servers.

``python -m benchmarks.serving.agent`` plays the same loop on each: the assistant calls a tool, and
the tool's result is a picture of a screen. All serve one LLaVA of the bundled model's sizes with
random weights, as the load ``speed`` of :mod:`benchmarks.serving.load` does, with one token per
cell of 32 pixels and a context that holds all steps. A call is forced by ``tool_choice``; where a
server makes none, a written one goes into the history. Noted are the tokens that a step read, the
time and processor seconds to the first piece of the call, and the bytes held. ``mmkv serve`` under
a budget is asked at every step. With a full cache some steps are left out, and read with the next
one; ``transformers serve`` keeps nothing between requests and is asked at the steps that are shown.
``--llama DIR`` adds llama.cpp's server: the folder has ``llama-server`` and ``python``, an
interpreter with gguf and numpy.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from benchmarks.bench.child import BenchError
from benchmarks.bench.harness import plain_parser, save, table
from benchmarks.bench.shape_files import write_gates, write_llava
from benchmarks.serving.servers import (
    ServerProcess,
    mmkv_serve,
    run_in_folder,
    stream_reply,
    thread_seconds,
    transformers_serve,
)
from mmkv.training.data.scenes import CELL, Item, Scene, object_names, render
from mmkv.training.measure.record import ROOT

RESULT = "serving-agent"
CHAT, RESPONSES = "chat", "responses"
BUDGET, FULL = "mmkv serve, budget", "mmkv serve, full cache"
BUDGET_RESPONSES = "mmkv serve, budget, responses"
THEIRS, LLAMA = "transformers serve", "llama-server"
_SIDE = 4  # cells of a screen, each way
TOOL = {
    "name": "click",
    "description": "click a cell of the screen",
    "parameters": {
        "type": "object",
        "properties": {"cell": {"enum": list(range(10, 10 + _SIDE**2))}},
        "required": ["cell"],
    },
}
# Calls and results in the Hermes form.
TEMPLATE = """{%- for message in messages -%}
<|im_start|>{{ 'user' if message.role == 'tool' else message.role }}
{% if message.role == 'tool' -%}
{{ '<tool_response>\\n' }}
{%- endif -%}
{%- if message.content is string -%}
{{ message.content }}
{%- else -%}
{%- for part in message.content or [] -%}
{{ '<|image_pad|>' if part.type == 'image' else part.text }}
{%- endfor -%}
{%- endif -%}
{%- if loop.first and tools -%}
{{ '\\n<tools>' }}
{%- for tool in tools -%}
{{ '\\n' }}{{ tool | tojson }}
{%- endfor -%}
{{ '\\n</tools>' }}
{%- endif -%}
{%- for call in message.tool_calls or [] -%}
{{ '<tool_call>\\n{"name": "' }}{{ call.function.name }}{{ '", "arguments": ' }}
{%- if call.function.arguments is string -%}
{{ call.function.arguments }}
{%- else -%}
{{ call.function.arguments | tojson }}
{%- endif -%}
{{ '}\\n</tool_call>' }}
{%- endfor -%}
{%- if message.role == 'tool' -%}
{{ '\\n</tool_response>' }}
{%- endif -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""


def screen(seed: int, step: int) -> str:
    """Return the screen of a step as a data: URL: 4 by 4 drawn things of 32 pixels."""
    rng = random.Random(f"screen-{seed}-{step}")
    cells = [(row, column) for row in range(_SIDE) for column in range(_SIDE)]
    items = tuple(
        Item(rng.choice(object_names()), column * CELL, row * CELL) for row, column in cells
    )
    file = io.BytesIO()
    render(Scene("grid", _SIDE, _SIDE, items)).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def opening(seed: int) -> list[dict[str, Any]]:
    """Return the messages of the first step."""
    task = {"type": "text", "text": f"task {seed:04}: click the objects you see."}
    return [
        {"role": "system", "content": "you see a screen and click in it."},
        {"role": "user", "content": [task, _picture(seed, 1)]},
    ]


def called(call: Mapping[str, str]) -> dict[str, Any]:
    """Return the assistant's message that is a call of the tool."""
    function = {"name": TOOL["name"], "arguments": call["arguments"]}
    one = {"id": call["id"], "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [one]}


def result(seed: int, step: int, call: Mapping[str, str]) -> dict[str, Any]:
    """Return what a call led to: the screen of the next step."""
    text = {"type": "text", "text": f"screen {step:03}: "}
    return {"role": "tool", "tool_call_id": call["id"], "content": [text, _picture(seed, step)]}


def _picture(seed: int, step: int) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": screen(seed, step)}}


def _written(seed: int, step: int) -> dict[str, str]:
    """Return the call of a step for which no server was asked, or of one that made none."""
    cell = random.Random(f"call-{seed}-{step}").choice(range(10, 10 + _SIDE**2))
    return {"id": f"call_{step:03}", "arguments": json.dumps({"cell": cell})}


def write_model(folder: Path, steps: int) -> Path:
    """Write the LLaVA that all servers serve; its context holds the steps."""
    sizes = {"max_position_embeddings": 1024 + 160 * steps}
    made = write_llava(folder, side=_SIDE * CELL, patch=CELL, sizes=sizes)
    (made / "chat_template.jinja").write_text(TEMPLATE)
    return made


def play(
    server: ServerProcess,
    model: str,
    seed: int,
    steps: Sequence[int],
    way: str = CHAT,
    tokens: int = 64,
) -> list[dict[str, Any]]:
    """Play an agent; return a row per step that was asked for.

    A call that a server makes stays in the history; where it made none, a written one does. A
    refusal is the last row, with what the server said under ``stopped``.

    Args:
        steps: those for which a reply is asked, ascending.
        way: ``chat`` sends the whole history each time, ``responses`` the result alone.
    """
    rows: list[dict[str, Any]] = []
    messages, clock = opening(seed), partial(thread_seconds, server.process.pid)
    body: dict[str, Any] = {"model": model, "temperature": 0, "parallel_tool_calls": False}
    body["stream"] = True
    if way == CHAT:
        path, body["max_tokens"] = "/v1/chat/completions", tokens
        body["tools"] = [{"type": "function", "function": TOOL}]
        if not Path(model).is_absolute():  # transformers refuses it
            body["stream_options"] = {"include_usage": True}
            body["tool_choice"] = "required"
    else:
        path, body["max_output_tokens"] = "/v1/responses", tokens
        body["tools"] = [{"type": "function", **TOOL}]
        body["tool_choice"] = "required"
    held, before, asked = 0, None, set(steps)
    # A connection of its own for each: a server may close an idle one just when it is used again.
    limits = httpx.Limits(max_keepalive_connections=0)
    options: dict[str, Any] = {"timeout": 3600, "trust_env": False, "limits": limits}
    with httpx.Client(base_url=server.url, **options) as client:
        for step in range(1, max(asked) + 1):
            call = _written(seed, step)
            if step in asked:
                own: dict[str, Any] = {"messages": messages}
                if way == RESPONSES:
                    own = {"input": [_item(one) for one in messages]}
                    own |= {"previous_response_id": before} if before else {}
                content = json.dumps(body | own).encode()
                try:
                    reply = stream_reply(client, path, content, clock)
                    if reply.first is None or (way == RESPONSES and reply.call is None):
                        raise BenchError("the reply had no text or made no call")
                except (BenchError, httpx.HTTPError) as error:
                    rows.append({"step": step, "stopped": str(error) or type(error).__name__})
                    break
                before, prompt, new, cached = reply.id, *reply.counts()
                made = None if reply.finish_reason == "length" else reply.call
                row = {"step": step, "first": reply.first, "cpu": reply.cpu}
                row |= {"whole": reply.whole, "whole_cpu": reply.whole_cpu, "body": len(content)}
                row |= {"prompt": prompt, "read": prompt - cached, "again": held - cached}
                row["kv_bytes"] = (reply.usage or {}).get("mmkv", {}).get("kv_bytes")
                rows.append({**row, "called": made is not None, "rss": server.rss()})
                held, call = (prompt, call) if made is None else (prompt + new, made)
                if way == RESPONSES:
                    messages = []
            if way == CHAT:
                messages.append(called(call))
            messages.append(result(seed, step + 1, call))
    return rows


def _item(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message of a chat as an item of a response's input."""
    content = message["content"]
    given: list[Any] = [{"type": "text", "text": content}] if isinstance(content, str) else content
    parts = [
        {"type": "input_text", "text": part["text"]}
        if part["type"] == "text"
        else {"type": "input_image", "image_url": part["image_url"]["url"]}
        for part in given
    ]
    if message["role"] == "tool":
        name = message["tool_call_id"]
        return {"type": "function_call_output", "call_id": name, "output": parts}
    return {"role": message["role"], "content": parts}


def numbers_at(rows: Sequence[Mapping[str, Any]], step: int, around: int = 5) -> dict[str, Any]:
    """Return what a step took: medians over the answered steps within ``around`` of it."""
    near = [r for r in rows if abs(r["step"] - step) <= around and "stopped" not in r]
    if not any(row["step"] == step for row in near):
        return {}
    names = ("first", "cpu", "whole_cpu", "prompt", "read", "rss", "body", "kv_bytes")
    values = {name: [row[name] for row in near if row[name] is not None] for name in names}
    return {name: statistics.median(each) if each else None for name, each in values.items()}


def page(rows: Sequence[Mapping[str, Any]], steps: Sequence[int]) -> dict[str, Any]:
    """Return what the result file has of one server."""
    done = [row for row in rows if "stopped" not in row]
    return {
        "at": {str(step): numbers_at(rows, step) for step in steps},
        "tokens_read": sum(row["read"] for row in done),
        "tokens_read_again": sum(max(0, row["again"]) for row in done),
        "calls": sum(row["called"] for row in done),
        "stopped": next((row for row in rows if "stopped" in row), None),
        "rows": {
            name: [round(row[name], 4) for row in done]
            for name in ("step", "first", "cpu", "whole_cpu", "prompt", "read", "rss", "body")
        },
    }


def llama_server(folder: Path, model: Path, log: Path, positions: int) -> ServerProcess:
    """Start llama.cpp's server on the model, which is first written as GGUF.

    Args:
        folder: with ``llama-server`` and ``python``.
    """
    text, tower = model.with_suffix(".gguf"), model.with_suffix(".mmproj.gguf")
    code = "benchmarks.bench.llama_gguf"
    files = [f"{text}=f32+tokenizer", f"{tower}=mmproj"]
    done = subprocess.run(
        [str(folder / "python"), "-m", code, str(model), *files],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise BenchError(f"{model} cannot be written as GGUF: {done.stderr[-300:]}")
    start = "import os, sys; os.execv(sys.argv[1], sys.argv[1:])"
    command = ["-c", start, str(folder / "llama-server"), "-m", str(text), "--mmproj", str(tower)]
    options = ["-c", str(positions), "-np", "1", "-t", "1", "-tb", "1", "--port", "{port}"]
    return ServerProcess([*command, *options], log)


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Play the agent on one server after the other; each result is saved at once."""
    last = max(args.steps)
    model = write_model(folder / "agent", last)
    gates = write_gates(model, folder / "gates", width=64)
    positions = json.loads((model / "config.json").read_text())["text_config"][
        "max_position_embeddings"
    ]
    ours = ["--memory", args.memory, "--store", "64MiB"]
    under_budget = [*ours, "--budget", str(args.budget), "--gates", str(gates)]
    every = range(1, last + 1)
    some = [n for n in every if n % 20 == 0 or any(abs(n - one) <= 5 for one in args.steps)]

    def logged(name: str) -> Path:
        return folder / f"{name}.log"

    servers: dict[str, tuple[Callable[[], ServerProcess], Sequence[int]]] = {
        BUDGET: (lambda: mmkv_serve(str(model), logged("budget"), *under_budget), every),
        BUDGET_RESPONSES: (
            lambda: mmkv_serve(str(model), logged("responses"), *under_budget),
            every,
        ),
        FULL: (lambda: mmkv_serve(str(model), logged("full"), *ours, "--policy", "full"), some),
        THEIRS: (
            lambda: transformers_serve(str(model), logged("transformers")),
            sorted({1, *args.steps}),
        ),
    }
    if args.llama is not None:
        servers[LLAMA] = (
            lambda: llama_server(args.llama, model, logged("llama"), positions),
            some,
        )
    found: dict[str, Any] = {}
    for name in args.servers or servers:
        start, steps = servers[name]
        way = RESPONSES if name == BUDGET_RESPONSES else CHAT
        asked = str(model) if name == THEIRS else model.name
        with start() as server:
            found[name] = page(play(server, asked, 1, steps, way, args.tokens), args.steps)
        save(args, RESULT, found, {RESULT: rows_of(found)})
        print(f"{name}: {found[name]['tokens_read_again']} tokens read again")
    return found


def rows_of(found: Mapping[str, Any]) -> list[list[str]]:
    """Return what steps of an agent took on each server, the heading first."""
    rows = [["server", "step", "tokens so far", "read", "first token: CPU s", "... s"]]
    rows[0] += ["cache, MiB", "process, MiB"]
    for name, one in found.items():
        for step, at in one["at"].items():
            if at:
                cache = "" if at["kv_bytes"] is None else f"{at['kv_bytes'] / 2**20:,.1f}"
                counts = (f"{at[key]:,.0f}" for key in ("prompt", "read"))
                times = (f"{at[key]:,.2f}" for key in ("cpu", "first"))
                server = f"`{name}`" if "," not in name else name
                rows.append([server, step, *counts, *times, cache, f"{at['rss'] / 2**20:,.0f}"])
    return rows


def _agents(results: Path) -> dict[str, Any]:
    """Return what was found of each server, the latest run of each: ours, then others."""
    found: dict[str, Any] = {}
    for end in ("-full", "", "-peers", "-llama"):
        page = json.loads((results / f"{RESULT}{end}.json").read_text())
        found |= page["results"]
    return found


def agent_values(results: Path) -> dict[str, Any]:
    """Return what the figure of the agent draws: steps, CPU seconds and MiB by server.

    A step that was read with others before it, for which no reply was asked, is left out.
    """
    drawn = {}
    for name, one in _agents(results).items():
        rows = one["rows"]
        before = dict(zip(rows["step"], [0, *rows["step"]], strict=False))
        whole = dict(zip(rows["step"], zip(rows["read"], rows["prompt"], strict=True), strict=True))
        own = [n == before[n] + 1 or whole[n][0] == whole[n][1] for n in rows["step"]]
        drawn[name] = [
            [value for value, kept in zip(rows[key], own, strict=True) if kept]
            for key in ("step", "cpu", "rss")
        ]
    return drawn


def draw_agent(values: Mapping[str, Any]) -> Any:
    """Return a figure: CPU seconds to the first token and memory by step of an agent."""
    from matplotlib.figure import Figure

    colours = ("#0b6e4f", "#7fb69e", "#3d7ea6", "#d1495b", "#8d99ae")
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    times, sizes = figure.subplots(1, 2)
    for (name, (steps, seconds, size)), colour in zip(values.items(), colours, strict=False):
        mark = "o-" if len(steps) < 40 else "-"
        times.plot(steps, seconds, mark, color=colour, label=name, markersize=3, linewidth=1)
        sizes.plot(
            steps, [one / 2**20 for one in size], mark, color=colour, markersize=3, linewidth=1
        )
    times.set(title="CPU seconds to the first token", yscale="log")
    sizes.set(title="memory of the process, MiB", yscale="log")
    for panel in (times, sizes):
        panel.set_xlabel("step, a picture each", fontsize=8)
        panel.title.set_fontsize(9)
        panel.grid(alpha=0.25)
    figure.legend(
        *times.get_legend_handles_labels(), loc="outside upper center", ncols=5, fontsize=7
    )
    return figure


def main(arguments: list[str] | None = None) -> int:
    """Measure, print the tables and write the result file; return the exit code."""
    parser = plain_parser("serving.agent", __doc__)
    parser.add_argument("--steps", nargs="+", type=int, default=[10, 100, 300], help="to show")
    parser.add_argument("--tokens", type=int, default=64, help="of a call, at most")
    parser.add_argument("--budget", type=int, default=256, help="entries per row, of mmkv's cache")
    parser.add_argument("--memory", default="2GiB", help="of mmkv's cache")
    names = [BUDGET_RESPONSES, BUDGET, FULL, THEIRS, LLAMA]
    parser.add_argument("--servers", nargs="+", choices=names, help="default: all")
    parser.add_argument("--llama", type=Path, metavar="DIR", help="llama-server and a python")
    args = parser.parse_args(arguments)
    folder, found = run_in_folder(measure, args)
    if found is None:
        return 1
    shutil.rmtree(folder)
    columns, *rows = rows_of(found)
    table("An agent of pictures", columns, rows)
    for name, one in found.items():
        if one["stopped"]:
            print(f"{name}: {one['stopped']}")
    print(f"written to {save(args, RESULT, found, {RESULT: rows_of(found)})}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
