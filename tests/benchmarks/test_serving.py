"""A small part of the programs of benchmarks/serving, on a server in this process."""

from __future__ import annotations

import asyncio
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serving import load as loads
from benchmarks.serving.servers import stream_chat
from benchmarks.serving.soak import MODEL, slope, soak
from mmkv import Engine
from mmkv.server.engine_thread import EngineCore
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


@pytest.mark.long(reason="a server and its load for five seconds")
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
