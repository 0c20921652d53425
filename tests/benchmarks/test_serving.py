"""A small part of the programs of benchmarks/serving, on a server in this process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from benchmarks.serving import agent
from benchmarks.serving import load as loads
from benchmarks.serving.servers import mmkv_serve, stream_chat
from benchmarks.serving.soak import MODEL, kill_while_saving, slope, soak
from mmkv import Engine
from mmkv.prompt import sandbox
from mmkv.server.engine_thread import EngineCore
from mmkv.server.media import resolver
from tests.support.chat_models import save_qwen3_vl
from tests.support.servers import Server, serving


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen3_vl(tmp_path_factory.mktemp("qwen"), positions=8192)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    def load() -> Engine:
        options = {"gates": "random", "policy": "dbtrimkv", "budget": 24, "dtype": "float32"}
        return Engine.from_pretrained(folder, kv_limit=4 * 2**20, prefill_chunk=64, **options)

    with serving(load, name=MODEL, max_queue=4, store_bytes=2**20) as made:
        for name in ("rss", "peak", "decoders_peak", "cpu_seconds"):
            setattr(made, name, lambda: 0)
        yield made


def test_nothing_is_lost_when_clients_misbehave(server: Server) -> None:
    found = asyncio.run(soak(server, 60, 6, 30, 1, False))  # type: ignore[arg-type]
    answers = found["answers"]
    assert sum(answers.values()) >= 60 and answers["left"] > 0
    codes = {kind.split()[-1] for kind in answers} - {"left"}
    assert "200" in codes and not codes & {"500", "501", "502", "504"}
    assert [stop["pages_lost"] for stop in found["stops"]] == [0, 0]
    assert all(stop["pages_held"] > 0 for stop in found["stops"])

    def held_by_something(core: EngineCore) -> bool:
        core.engine.cache.check()
        pool, residents = core.engine.cache.pool, core.scheduler.residents
        kept = sum(one.resting() for one in core.scheduler.sessions if one.resident)
        return pool.num_pages - pool.free_pages == residents.copy_pages + kept

    assert server.inside(held_by_something)


@pytest.mark.parametrize("way", [loads.CHAT, loads.RESPONSES])
def test_a_turn_reads_its_own_tokens(server: Server, way: str) -> None:
    rows = loads.long_dialogue(server, way, 7, 4, 3)  # type: ignore[arg-type]
    assert all(row["read"] == row["own"] > 0 for row in rows[1:])
    assert [row["prompt"] for row in rows] == sorted({row["prompt"] for row in rows})


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = agent.write_model(tmp_path_factory.mktemp("agent"), 8)

    def load() -> Engine:
        options = {"gates": "random", "policy": "dbtrimkv", "budget": 24, "dtype": "float32"}
        options |= {"prefill_chunk": 64, "endless": False}
        return Engine.from_pretrained(folder, kv_limit=8 * 2**20, **options)

    with serving(load, name=MODEL, store_bytes=2**20) as made:
        made.process = SimpleNamespace(pid=os.getpid())  # type: ignore[attr-defined]
        made.rss = lambda: 0  # type: ignore[attr-defined]
        yield made


@pytest.mark.parametrize("way", [agent.CHAT, agent.RESPONSES])
def test_an_agent_reads_nothing_twice(agents: Server, way: str) -> None:
    seed = len(way)
    rows = agent.play(agents, MODEL, seed, range(1, 5), way)  # type: ignore[arg-type]
    assert [(row["step"], row["called"]) for row in rows] == [(n, True) for n in range(1, 5)]
    # What the system says may be held from another conversation.
    assert rows[0]["again"] <= 0 and [row["again"] for row in rows[1:]] == [0] * 3
    read = [row["read"] for row in rows]
    # A screen is 16 tokens; all its results are as long.
    assert 16 < read[1] == read[2] == read[3]
    prompts = [row["prompt"] for row in rows]
    assert sum(read) < prompts[-1] and prompts == sorted(prompts)
    assert all(0 < row["cpu"] <= row["whole_cpu"] and row["kv_bytes"] > 0 for row in rows)
    found = agent.page(rows, [2, 8])
    assert found["tokens_read_again"] == 0 and found["tokens_read"] == sum(read)
    assert found["at"]["2"]["prompt"] == (prompts[1] + prompts[2]) / 2 and found["calls"] == 4
    assert not found["at"]["8"] and found["stopped"] is None


@pytest.mark.parametrize("way", [agent.CHAT, agent.RESPONSES])
def test_a_step_renders_once_and_decodes_its_own_picture(agents: Server, way: str) -> None:
    """Whatever the number of messages before it."""
    counts: list[Counter[str]] = []
    wrapped = {sandbox.render: sandbox, resolver.data_uri_content: resolver}
    ask = agent.stream_reply

    def noted(*given: Any) -> dict[str, Any]:
        found: Counter[str] = Counter()
        with contextlib.ExitStack() as stack:
            for function, module in wrapped.items():
                name = function.__name__

                def call(*own: Any, name: str = name, function: Any = function) -> Any:
                    found[name] += 1
                    return function(*own)

                stack.enter_context(mock.patch.object(module, name, call))
            counts.append(found)
            return ask(*given)

    with mock.patch.object(agent, "stream_reply", noted):
        rows = agent.play(agents, MODEL, 20 + len(way), range(1, 8), way)  # type: ignore[arg-type]
    assert all("stopped" not in row for row in rows)
    # One picture is decoded to know it, and to read it. The second step looks at the template, too.
    assert counts[2:] == [{"render": 1, "data_uri_content": 2}] * 5


def test_steps_that_are_left_out_are_read_with_the_next(agents: Server) -> None:
    rows = agent.play(agents, MODEL, 1, [1, 2, 4], agent.CHAT)  # type: ignore[arg-type]
    assert rows[2]["again"] == 0
    # The call between them is read, with its mark and the opening of a reply, and two screens.
    assert rows[2]["read"] == rows[2]["prompt"] - rows[1]["prompt"] - (
        rows[1]["prompt"] - rows[0]["prompt"] - rows[1]["read"]
    )


def test_an_agent_notes_where_a_server_stops(agents: Server) -> None:
    rows = agent.play(agents, "another", 3, [1, 2])  # type: ignore[arg-type]
    assert [row["step"] for row in rows] == [1] and "404" in rows[0]["stopped"]
    assert agent.page(rows, [1])["stopped"] == rows[0]
    # Its context holds 8 steps.
    rows = agent.play(agents, MODEL, 4, [1, 30])  # type: ignore[arg-type]
    assert "context" in rows[1]["stopped"]


def test_the_figure_leaves_out_steps_that_were_read_with_others(tmp_path: Path) -> None:
    def rows(step: list[int], read: list[int]) -> dict[str, Any]:
        prompt = [50 * n for n in step]
        return {"step": step, "read": read, "prompt": prompt, "cpu": step, "rss": step}

    for end, name, kept in (
        ("", "ours", rows([1, 2, 5, 6], [50, 40, 140, 40])),
        ("-peers", "reads all", rows([1, 10], [50, 500])),
        ("-full", "ours", rows([9], [1])),
        ("-llama", "another", rows([3, 4], [150, 40])),
    ):
        page = json.dumps({"results": {name: {"rows": kept}}})
        (tmp_path / f"serving-agent{end}.json").write_text(page)
    drawn = {name: steps for name, (steps, *_) in agent.agent_values(tmp_path).items()}
    assert drawn == {"ours": [1, 2, 6], "reads all": [1, 10], "another": [3, 4]}


def test_streams_are_counted_side_by_side(
    server: Server, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "cpu_seconds", time.process_time)
    args = Namespace(model=f"somewhere/{MODEL}", turns=2, words=4, tokens=5)
    found = loads.waiting(server, args, 3)  # type: ignore[arg-type]
    assert found["replies"] == 6 and 6 <= found["tokens"] <= 30
    assert found["prompt_tokens"] > 6 * 4 and found["tokens_per_cpu_second"] > 0
    assert 0 < found["first_token_s"]["p50"] <= found["whole_reply_s"]["p99"]
    short = loads.with_context(folder, 96, tmp_path)
    assert short.name == folder.name
    assert Engine.from_pretrained(short, gates="random").spec.max_position == 96


def test_what_cannot_be_taken_on_is_refused(server: Server) -> None:
    """Forty requests at once: some are answered, the others refused, none fails.

    How many depends on how fast they come; tests/mmkv/server/test_engine_thread.py counts refusals.
    """
    arrived = loads.Arrived()
    asyncio.run(arrived.arrive(server, 1e6, 40, 2, 0))  # type: ignore[arg-type]
    found = arrived.summary()
    assert found["refused"] < 40
    assert arrived.own_count == 40 - found["refused"] and arrived.own_first > 0
    assert len(arrived.late) == 40 and found["client_cpu_share"] > 0
    assert found["codes"] == ({"no_room": found["refused"]} if found["refused"] else {})


def test_what_a_client_notes_of_a_stream(server: Server) -> None:
    import httpx

    async def ask(**fields: Any) -> Any:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "a"}], "max_tokens": 5}
        async with httpx.AsyncClient(base_url=server.url, trust_env=False) as client:
            return await stream_chat(client, body | {"seed": 1} | fields)

    found = asyncio.run(ask(stream_options={"include_usage": True}))
    assert found.status == 200 and found.error is None and found.first <= found.whole
    assert found.usage["completion_tokens"] >= len(found.gaps)
    wrong = asyncio.run(ask(model="another"))
    assert (wrong.status, wrong.error["code"], wrong.first) == (404, "model_not_found", None)


def test_the_slope_of_memory() -> None:
    stops = [{"requests": at, "rss": 5000 + 3 * at} for at in (500, 1000, 2000, 3000)]
    stops[0]["rss"] = 0  # while it warms up
    assert slope(stops) == pytest.approx(3)
    assert slope(stops[:2]) is None


@pytest.mark.long(reason="starts the program three times")
def test_files_are_whole_after_a_server_was_killed(tmp_path: Path) -> None:
    options = ["--budget", "24", "--memory", "24MiB", "--session-folder", str(tmp_path / "saved")]
    counts = asyncio.run(
        kill_while_saving(lambda: mmkv_serve(None, tmp_path / "log", *options), 2, 0)
    )
    assert counts["kills"] == 2 and counts["saves_answered"] > 0 and counts["files_read"] > 0
    assert counts["files_unreadable"] == 0
