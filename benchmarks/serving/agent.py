"""Run an agent of 300 steps with a drawn screen each, and ask about screens of 50 steps ago.

``python -m benchmarks.serving.agent`` plays the same loop on several servers: the assistant calls a
tool, and the tool's result is a picture of a screen. All serve one LLaVA of the bundled model's
sizes with random weights, as :mod:`benchmarks.serving.speed` does, with one token per cell of 32
pixels and a context that holds all steps. A call is forced by ``tool_choice``; where a server makes
none, a written one goes into the history. Noted are the tokens that a step read, the time and
processor seconds to the first piece of the call, and the bytes held. ``mmkv serve`` under a budget
is asked at every step. With a full cache some steps are left out, and read with the next one;
``transformers serve`` keeps nothing between requests and is asked at the steps that are shown.
``--llama DIR`` adds llama.cpp's server: the folder has ``llama-server`` and ``python``, an
interpreter with gguf and numpy.

``python -m benchmarks.serving.agent --remember`` asks the bundled model, in dialogues of 66 steps,
about screens of 5, 10, 20 and 50 steps ago under several policies with the same bytes.
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
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx

from benchmarks.bench.harness import BenchError
from benchmarks.bench.output import plain_parser, save, table
from benchmarks.bench.shape_files import write_gates
from benchmarks.experiment import ComparisonRuns, Reader, comparisons, interval
from benchmarks.quality.methods import ComparedMethod, Comparison
from benchmarks.serving.servers import (
    ServerProcess,
    mmkv_serve,
    run_in_folder,
    transformers_serve,
)
from benchmarks.serving.speed import write_llava
from benchmarks.tasks.documents import Document, GeneratedDocuments, scene_document
from mmkv.eval.measure.stats import mean, paired
from mmkv.prompt.loading import load_processor
from mmkv.resources import bundled_model_name
from mmkv.training.data.dialogues import caption, cell_question, grid
from mmkv.training.data.scenes import (
    CELL,
    Item,
    Question,
    Scene,
    SceneTurn,
    object_names,
    place,
    render,
)
from mmkv.training.measure.record import ROOT, Journal
from mmkv.training.measure.teacher_forced import Reading

RESULT, REMEMBERED = "serving-agent", "serving-agent-remember"
CHAT, RESPONSES = "chat", "responses"
BUDGET, FULL = "mmkv serve, budget", "mmkv serve, full cache"
BUDGET_RESPONSES = "mmkv serve, budget, responses"
THEIRS, LLAMA = "transformers serve", "llama-server"
# The bundled model's gates, of two seeds, and policies without.
METHODS = (
    "dbtrimkv:assets/tiny-vlm/gates,assets/gates/tiny-vlm-dbtrimkv-1",
    "snapkv",
    "streamingllm",
)
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


class Clock:
    """The processor seconds of a server's threads: finer than those of ``stat``, which tick."""

    def __init__(self, server: ServerProcess) -> None:
        self._tasks = Path(f"/proc/{server.process.pid}/task")

    def seconds(self) -> float:
        """Return those of the threads that live."""
        total = 0
        for path in self._tasks.glob("*/schedstat"):
            try:
                total += int(path.read_text().split()[0])
            except OSError:  # it has ended
                continue
        return total / 1e9


def ask(client: httpx.Client, clock: Clock, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Stream a reply; return its numbers: seconds to its first piece, processor seconds, usage.

    Raises:
        BenchError: the server refused, with what it said.
    """
    found: dict[str, Any] = {"first": None, "cpu": None, "usage": None, "id": None, "call": None}
    content = json.dumps({**body, "stream": True}).encode()
    made, said, cut = {"id": "", "arguments": ""}, False, False
    started, before = time.perf_counter(), clock.seconds()
    kind = {"Content-Type": "application/json"}
    with client.stream("POST", path, content=content, headers=kind) as answer:
        if answer.status_code != 200:
            refusal = answer.read()[:300].decode("utf-8", "replace")
            raise BenchError(f"{answer.status_code}: {refusal}")
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            if event.get("error"):
                raise BenchError(str(event["error"])[:300])
            whole = event.get("response") or {}
            said |= isinstance(event.get("delta"), str)
            for choice in event.get("choices") or ():
                delta = choice.get("delta") or {}
                said |= bool(delta.get("content") or delta.get("tool_calls"))
                cut |= choice.get("finish_reason") == "length"
                for piece in delta.get("tool_calls") or ():
                    made["id"] = piece.get("id") or made["id"]
                    made["arguments"] += (piece.get("function") or {}).get("arguments") or ""
            for item in whole.get("output") or ():
                if item["type"] == "function_call":
                    made = {"id": item["call_id"], "arguments": item["arguments"]}
            if said and found["first"] is None:
                found["first"] = time.perf_counter() - started
                found["cpu"] = clock.seconds() - before
            found["usage"] = event.get("usage") or whole.get("usage") or found["usage"]
            found["id"] = whole.get("id") or found["id"]
    found["whole"], found["whole_cpu"] = time.perf_counter() - started, clock.seconds() - before
    found["body"] = len(content)
    if found["first"] is None:
        raise BenchError("the reply had no text")
    if made["id"] and not cut:
        found["call"] = made
    return found


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
    clock, rows, messages = Clock(server), [], opening(seed)
    body: dict[str, Any] = {"model": model, "temperature": 0, "parallel_tool_calls": False}
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
                try:
                    row = ask(client, clock, path, body | own)
                    if way == RESPONSES and row["call"] is None:
                        raise BenchError("the response made no call")
                except (BenchError, httpx.HTTPError) as error:
                    rows.append({"step": step, "stopped": str(error) or type(error).__name__})
                    break
                usage, before, made = row.pop("usage"), row.pop("id"), row.pop("call")
                prompt, new, cached = _counts(usage)
                row |= {"prompt": prompt, "read": prompt - cached, "again": held - cached}
                row["kv_bytes"] = usage.get("mmkv", {}).get("kv_bytes")
                row["called"] = made is not None
                rows.append({"step": step, **row, "rss": server.rss()})
                held, call = (prompt, call) if made is None else (prompt + new, made)
                if way == RESPONSES:
                    messages = []
            if way == CHAT:
                messages.append(called(call))
            messages.append(result(seed, step + 1, call))
    return rows


def _counts(usage: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return the tokens of a prompt and of its reply, and those of the prompt that were held."""
    prompt, new = ("prompt", "completion") if "prompt_tokens" in usage else ("input", "output")
    details = usage.get(f"{prompt}_tokens_details") or {}
    return usage[f"{prompt}_tokens"], usage[f"{new}_tokens"], details.get("cached_tokens") or 0


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
        save(args, RESULT, found)
        show({name: found[name]})
    return found


def show(found: Mapping[str, Any]) -> None:
    """Print what each server took at the steps."""
    columns = ["server, step", "first token, s", "CPU s", "read", "KV, MiB", "RSS, MiB"]
    rows = [
        [
            f"{name}, {step}",
            f"{at['first']:.3f}",
            f"{at['cpu']:.3f}",
            f"{at['read']:,.0f}",
            "" if at["kv_bytes"] is None else f"{at['kv_bytes'] / 2**20:.1f}",
            f"{at['rss'] / 2**20:,.0f}",
        ]
        for name, one in found.items()
        for step, at in one["at"].items()
        if at
    ]
    table("An agent of pictures", columns, rows)
    for name, one in found.items():
        print(f"{name}: {one['tokens_read_again']} tokens read again; {one['stopped'] or ''}")


STEPS, MARKED, DISTANCES = 66, (1, 16), (5, 10, 20, 50)
_QUESTIONS = 2  # about a marked screen, at each distance


def screens(index: int) -> tuple[list[SceneTurn], list[int]]:
    """Make a dialogue of 66 steps with a drawn screen each, and questions about two of them.

    Every step asks what its own screen shows in a cell. Two screens have a number, and 5, 10, 20
    and 50 steps later two more of their cells are asked about; no cell is asked about twice.

    Returns:
        the turns, and per turn how many steps ago the screen was that it asks about.
    """
    rng = random.Random(f"agent-{index}")
    turns: list[SceneTurn] = []
    ages: list[int] = []
    marked: dict[int, tuple[int, list[Item]]] = {}
    for step in range(1, STEPS + 1):
        least = 1 + _QUESTIONS * len(DISTANCES) if step in MARKED else 1
        scene = grid(rng, "heldout", least=least)
        item, *others = rng.sample(scene.items, len(scene.items))
        question = Question("cell", f"what is at {place(*item.cell)}?", item.name)
        words_before: tuple[str, ...] = ()
        if step in MARKED:
            marked[step] = (len(marked) + 1, others)
            words_before = (caption(len(marked)),)
        turns.append(SceneTurn((scene,), question, words_before))
        ages.append(0)
        for shown, (number, left) in marked.items():
            if step - shown in DISTANCES:
                for item in [left.pop() for _ in range(_QUESTIONS)]:
                    turns.append(SceneTurn((), cell_question(number, item.cell, item.name)))
                    ages.append(step - shown)
    return turns, ages


class ScreenReader(Reader):
    """Reads the dialogues of :func:`screens`, under whatever name."""

    def _reading(self, source: str, index: int) -> Reading:
        if source not in self._data:
            tokenizer = load_processor(self.comparison.model).tokenizer

            def make(index: int) -> Document:
                turns, ages = screens(index)
                return Document(scene_document(turns, tokenizer), ages)

            self._data[source] = GeneratedDocuments(make)
        return super()._reading(source, index)


def remember(args: argparse.Namespace) -> dict[str, Any]:
    """Ask about earlier screens under every policy; return shares by distance and paired tests."""
    methods = tuple(ComparedMethod.parse(text) for text in args.method or METHODS)
    compared = Comparison(
        bundled_model_name(), "float32", methods, tuple(args.budgets), in_bytes=True
    )
    journal = Journal(args.output / f"{args.name or REMEMBERED}.runs.jsonl")
    with ComparisonRuns(compared, journal, reader=ScreenReader, together=args.together) as runs:
        raw = runs.of("agent-screens", args.dialogues)
    ages = [screens(index)[1] for index in range(args.dialogues)]
    return by_distance(raw, ages, [method.name for method in methods], args.budgets)


def by_distance(
    raw: Mapping[str, Sequence[Sequence[Mapping[str, Any]]]],
    ages: Sequence[Sequence[int]],
    methods: Sequence[str],
    budgets: Sequence[str],
) -> dict[str, Any]:
    """Return the shares of right answers and paired differences by the age of the screen.

    Args:
        raw: of :meth:`benchmarks.experiment.ComparisonRuns.of`; ages: of the screen that each
            answer of each dialogue is about.
    """
    found: dict[str, Any] = {
        "dialogues": len(ages),
        "tokens": [min(r["seen"] for r in raw["full"][0]), max(r["seen"] for r in raw["full"][0])],
        "bytes": {
            name: statistics.fmean(row["bytes"] for run in runs for row in run)
            for name, runs in raw.items()
        },
        "ages": {},
    }
    for age in sorted(set(ages[0])):
        counts = [sum(one == age for one in each) for each in ages]

        def sums(name: str, age: int = age) -> list[float]:
            return [
                statistics.fmean(
                    sum(
                        right
                        for right, one in zip(run[index]["right"], each, strict=True)
                        if one == age
                    )
                    for run in raw[name]
                )
                for index, each in enumerate(ages)
            ]

        found["ages"][str(age)] = {
            "questions": sum(counts),
            "right": {name: asdict(mean(sums(name), counts)) for name in raw},
            "tests": {
                f"{of} at {budget}": asdict(paired(sums(one), sums(two), counts))
                for budget in budgets
                for of, one, two in comparisons({name: name for name in raw}, methods, budget)
            },
        }
    return found


def show_remembered(found: Mapping[str, Any]) -> None:
    """Print the shares of right answers."""
    ages = found["ages"]
    columns = ["method", "KiB", *(f"{age} steps ago" for age in ages)]
    rows = [
        [
            name,
            f"{found['bytes'][name] / 1024:,.0f}",
            *(interval(one["right"][name]) for one in ages.values()),
        ]
        for name in next(iter(ages.values()))["right"]
    ]
    table(f"Answers about earlier screens, {found['dialogues']} dialogues", columns, rows)


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
    parser.add_argument("--remember", action="store_true", help="ask about earlier screens instead")
    parser.add_argument(
        "--method", action="append", help="of --remember, as benchmarks.quality has it"
    )
    parser.add_argument("--budgets", nargs="+", default=["64", "128"], help="of --remember")
    parser.add_argument("--dialogues", type=int, default=56, help="of --remember")
    parser.add_argument("--together", type=int, default=1, help="dialogues in a pass")
    args = parser.parse_args(arguments)
    if args.remember:
        found = remember(args)
        show_remembered(found)
        print(f"written to {save(args, REMEMBERED, found)}")
        return 0
    folder, found = run_in_folder(measure, args)
    if found is None:
        return 1
    shutil.rmtree(folder)
    print(f"written to {save(args, RESULT, found)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
