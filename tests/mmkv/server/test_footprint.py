"""What the server's process may take and gives back, and what docker/ says of it."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import yaml
from PIL import Image

from mmkv import Engine
from mmkv.cli.app import run
from mmkv.engine.errors import BudgetError
from mmkv.engine.system import resident_bytes
from mmkv.server import footprint
from mmkv.server.media.limits import Allowance, MediaError
from mmkv.server.metrics import Metrics
from mmkv.server.reply import LogprobRows, rendered
from mmkv.server.settings import Footprint, RequestBounds, ServerSettings
from mmkv.training.measure.record import ROOT
from tests.support.chat_models import (
    picture,
    save_internvl,
    save_llama,
    save_llava,
    save_llava_onevision,
    save_mistral3,
    save_qwen2_5_vl,
    save_qwen3_vl,
    save_qwen3_vl_moe,
    save_smolvlm,
)
from tests.support.servers import (
    Server,
    SocketClient,
    asked,
    paused_in_a_reply,
    picture_part,
    serving,
)

MEMORY = 2**22


def started(folder: Path, **settings: Any) -> Any:
    def load() -> Engine:
        return Engine.from_pretrained(
            folder, policy="streamingllm", budget=24, dtype="float32", kv_limit=MEMORY
        )

    return serving(load, **settings)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with started(folder, connections=10) as made:
        yield made


def parts(server: Server) -> dict[str, int]:
    assert server.state.footprint is not None
    return server.state.footprint.parts


def test_the_process_stays_below_what_metrics_say(server: Server) -> None:
    text = server.client.get("/metrics").text
    rows = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[:13] == "mmkv_process_")
    resident = float(rows.pop("mmkv_process_resident_bytes"))
    assert sum(map(float, rows.values())) == sum(parts(server).values())
    assert len(rows) == len(parts(server)) and min(map(float, rows.values())) > 0
    assert resident <= sum(map(float, rows.values()))
    now = resident_bytes()
    assert now is not None and abs(now - resident) < 2**28


def test_each_setting_bounds_its_part(server: Server, folder: Path) -> None:
    """Bounds twice as high are twice the bytes, and those of others stay."""
    body = server.state.settings.body
    more = {"connections": 20, "body": 2 * body, "max_sessions": 2000, "store_bytes": 2**31}
    with started(folder, **more) as other:
        before, after = parts(server), parts(other)
    for name in ("bodies", "stored"):
        assert after[name] == 2 * before[name]
    assert before["stored"] == 2**30 and before["bodies"] >= 8 * body
    assert 2 * before["connections"] < after["connections"] < 4 * before["connections"]
    context = server.state.facts.context
    assert after["texts"] - before["texts"] >= 1000 * context
    pool = server.inside(lambda core: core.engine.cache.pool)
    assert before["cache"] == after["cache"] == pool.limit * pool.page_bytes <= MEMORY
    for name in ("media", "reading", "scored", "unsent", "values"):
        assert before[name] == after[name]


def test_the_line_at_the_start_tells_the_cache_from_the_process() -> None:
    made = Footprint({"weights and libraries": 2**29, "cache": 2**24, "a": 2**20, "b": 2**21})
    line = (
        "memory: the cache takes at most 16 MiB; the process at most 531 MiB (512 MiB weights and "
        "libraries, 16 MiB cache, 3 MiB for requests and conversations); "
    )
    assert made.describe(ServerSettings()) == f"{line}--process-memory lowers that"
    bounds = RequestBounds(shown=1_250_000)
    given = {"process_memory": 2**30, "body": 5 * 2**19, "bounds": bounds, "connections": 40}
    assert made.describe(ServerSettings(**given)) == (
        f"{line}for --process-memory a body has at most 2.5 MiB, the pictures of a request 1.2 "
        "megapixels as the model reads them, and 40 connections may be open"
    )


def test_process_memory_bounds_what_requests_may_hold(server: Server, folder: Path) -> None:
    """The parts add up to nearly as much as it says, and each bound is one that acts."""
    whole, resident = sum(parts(server).values()), parts(server)["weights and libraries"]
    for process in (resident + 2**28, 2 * whole):
        with started(folder, process_memory=process, bounds=RequestBounds(contexts=9)) as made:
            total, settings = sum(parts(made).values()), made.state.settings
            assert total <= process and (total > 0.98 * process or process > whole)
            bounds, limits = settings.bounds, made.state.media.limits
            assert (limits.together, limits.shown) == (bounds.media, bounds.shown)
            assert limits.shown * 4 <= bounds.media and limits.worker_bytes <= process
            assert made.web.guard.limits.most == settings.connections
            assert made.state.bodies._bytes == bounds.bodies * settings.body
            longest = made.inside(lambda core: core.conversations.longest)
            assert longest == bounds.contexts * made.state.facts.context and bounds.contexts <= 9
            assert made.chat("hello").status_code == 200
            if process < whole:
                assert settings.body < 2**25 and bounds.scored < 2**17
                large = made.chat("a" * settings.body)
                assert large.json()["error"]["code"] == "request_too_large"
                # This model reads any picture with at most 64 x 64 pixels.
                part = picture_part(Image.new("RGB", (1500, 1000)))
                assert made.chat({"role": "user", "content": [part]}).status_code == 200
                with pytest.raises(MediaError, match="has no memory for"):
                    Allowance(limits).take_shown(limits.shown + 1)
    with (
        pytest.raises(
            BudgetError, match=r"takes at least [\d,]+ MiB .* --process-memory"
        ) as caught,
        started(folder, process_memory=resident),
    ):
        pass
    assert "lower --memory" in str(caught.value)


def test_a_request_waits_for_memory_that_others_take(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the sum of bounds says, and not while nobody else is there."""
    state, trims = server.state, []
    now = resident_bytes()
    assert now is not None
    limited = replace(state.settings, process_memory=now)
    monkeypatch.setattr(state, "settings", limited)
    monkeypatch.setattr("mmkv.server.state.give_back", lambda: trims.append(1))
    assert state.has_memory()
    name = server.client.post("/v1/sessions", json={}).json()["id"]
    with (
        ThreadPoolExecutor(1) as pool,
        SocketClient(server, name) as socket,
        paused_in_a_reply(server) as reached,
    ):
        first = pool.submit(server.chat, "talk", max_tokens=4)
        assert reached.wait(60)
        refused = server.chat("me, too")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "process_memory")
        assert refused.headers["Retry-After"] and trims
        socket.send(type="ask", messages=asked("and me")["messages"])
        assert socket.receive()["error"]["code"] == "process_memory"
        monkeypatch.setattr(state, "settings", replace(limited, process_memory=2**40))
        assert state.has_memory()
    assert first.result().status_code == 200
    server.client.delete(f"/v1/sessions/{name}")


def test_memory_goes_back_when_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the process has grown by over 64 MiB and no request is under way, once."""
    sizes = {"now": 2**30}
    worker = SimpleNamespace(busy=True)
    calls: list[int] = []

    def give_back() -> None:
        calls.append(sizes["now"])
        sizes["now"] = 2**30

    monkeypatch.setattr(footprint, "_EVERY", 0)
    monkeypatch.setattr(footprint, "resident_bytes", lambda: sizes["now"])
    monkeypatch.setattr(footprint, "give_back", give_back)

    async def run() -> None:
        task = asyncio.ensure_future(footprint.return_memory(lambda: worker.busy))

        async def look() -> list[int]:
            for _ in range(20):
                await asyncio.sleep(0.001)
            return calls

        assert await look() == []
        sizes["now"] += 2**26
        worker.busy = False
        assert await look() == []  # not over
        sizes["now"], worker.busy = 2**31, True
        assert await look() == []
        worker.busy = False
        assert await look() == [2**31]
        assert await look() == [2**31]
        task.cancel()

    asyncio.run(run())


def test_log_probabilities_are_written_as_they_would_be_as_objects() -> None:
    """In the middle of text that needs escapes, in UTF-8 and in ASCII."""
    shown = [
        [{"token": 'é"\\', "logprob": -0.25, "bytes": [195, 169], "top_logprobs": []}] * 2,
        [{"token": "\ud800", "logprob": -1e-7, "bytes": None, "top_logprobs": [{"token": "b"}]}],
    ]
    held = [LogprobRows() for _ in shown]
    for rows, one in zip(held, shown, strict=True):
        for row in one:
            rows.add([row])

    def answer(*rows: Any) -> dict[str, Any]:
        return {"text": "ü\n", "choices": [{"logprobs": one} for one in rows]}

    for ascii in (False, True):
        made = rendered(answer(*held, LogprobRows()), ascii)
        assert json.loads(made) == answer(*shown, [])
        assert made.isascii() == ascii
    with pytest.raises(TypeError, match="set is no JSON"):
        rendered({"a": set()})


@pytest.mark.parametrize(
    "save",
    [
        save_qwen3_vl,
        save_qwen2_5_vl,
        save_qwen3_vl_moe,
        save_llava,
        save_llava_onevision,
        save_internvl,
        save_smolvlm,
        save_mistral3,
    ],
)
def test_pictures_that_fill_the_context_are_counted(
    save: Callable[[Path], Path], tmp_path: Path
) -> None:
    """Twice the pixels of as many pictures as there is context for."""
    engine = Engine.from_pretrained(
        save(tmp_path), policy="streamingllm", budget=24, dtype="float32", kv_limit=2**26
    )
    asked = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}]
    processor = engine.processor
    text = processor.template.render(asked, opening=True)
    inputs = processor.encode(text, [picture(size=(80, 48))])
    tokens = int((inputs["input_ids"] == engine.family.placeholder[1]).sum())
    pixels = inputs["pixel_values"].numel() * 4 * engine.spec.max_position // tokens
    assert tokens
    most = RequestBounds.shown
    on_a_gpu, here = (footprint._reading(engine, most, 8, cpu, 8) for cpu in (False, True))
    assert 2 * pixels <= on_a_gpu < here  # there the tower's own memory is not the host's
    assert footprint._reading(engine, 2**12, 8, True, 8) < here


def test_a_model_of_texts_reads_no_pictures(tmp_path: Path) -> None:
    engine = Engine.from_pretrained(
        save_llama(tmp_path), policy="streamingllm", budget=24, dtype="float32", kv_limit=2**26
    )
    found = footprint.footprint(engine, ServerSettings(name="m"), 0)
    assert found.parts["media"] == 0 < found.parts["reading"] < 2**26


def test_what_lies_on_a_gpu_is_none_of_the_process(tmp_path: Path) -> None:
    engine = Engine.from_pretrained(save_qwen3_vl(tmp_path), kv_limit=MEMORY)
    settings = ServerSettings(name="m")
    for kind, there in (("cpu", True), ("cuda", False)):
        with mock.patch.object(engine, "device", torch.device(kind)):
            parts = footprint.footprint(engine, settings, 2**40).parts
        assert bool(parts["cache"]) is bool(parts["features"]) is there
        assert parts["media"] and parts["weights and libraries"] > 2**40


# What docker/ says of the server is true of it.


DOCKER = ROOT / "docker"
EXTRAS = re.compile(r"\.\[([\w,-]+)\]")


def read(name: str) -> Any:
    return yaml.safe_load((DOCKER / name).read_text())


def test_the_dashboard_asks_for_metrics_that_there_are() -> None:
    metrics = Metrics()
    for metric in (metrics.finished, metrics.rejected, metrics.evicted):
        metric.labels("x").inc()
    for metric in (metrics.kv_pages, metrics.sessions, metrics.process_limit, metrics.escalated):
        metric.labels("x").set(1)
    there = set(re.findall(r"^(mmkv_\w+)", metrics.text().decode(), re.MULTILINE))
    panels = json.loads((DOCKER / "dashboard.json").read_text())["panels"]
    asked = [target["expr"] for panel in panels for target in panel["targets"]]
    named = {name for expression in asked for name in re.findall(r"mmkv_\w+", expression)}
    assert named <= there
    # All of ours are shown, a histogram by its buckets.
    ours = {name for name in there if not re.search(r"_(sum|count|created)$", name)}
    assert named == ours
    labels = {name for expression in asked for name in re.findall(r"by \((\w+)\)", expression)}
    assert labels <= {"le", "state", "modality", "finished_reason", "reason", "outcome"}
    source = read("grafana.yaml")["datasources"][0]
    assert {panel["datasource"]["uid"] for panel in panels} == {source["uid"]}


def test_compose_names_files_and_places_that_there_are() -> None:
    compose = read("compose.yaml")
    services = compose["services"]
    build = services["mmkv"]["build"]
    assert (DOCKER / build["context"] / build["dockerfile"]).is_file()
    for service in services.values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert (DOCKER / source).is_file() if "." in source else source in compose["volumes"]
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:")
    (target,) = read("prometheus.yaml")["scrape_configs"][0]["static_configs"][0]["targets"]
    name, port = target.split(":")
    assert name in services and f"EXPOSE {port}" in (DOCKER / "Dockerfile").read_text()
    url = read("grafana.yaml")["datasources"][0]["url"]
    assert re.fullmatch(r"http://prometheus:\d+", url)


@pytest.mark.parametrize("name", ["ENTRYPOINT", "CMD"])
def test_the_image_starts_with_options_that_there_are(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (DOCKER / "Dockerfile").read_text().splitlines()
    (line,) = [one for one in lines if one.startswith(name)]
    words = json.loads(line.removeprefix(name))
    options = {word for word in words if word.startswith("--")}
    monkeypatch.setenv("COLUMNS", "200")
    assert run(["serve", "--help"]) == 0
    shown = set(re.findall(r"--[\w-]+", capsys.readouterr().out))
    assert options and options <= shown


def test_the_image_installs_extras_that_there_are() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    (extras,) = EXTRAS.findall((DOCKER / "Dockerfile").read_text())
    assert all(re.search(rf"^{one} = \[", project, re.MULTILINE) for one in extras.split(","))
    assert Path(ROOT / "docker" / "Dockerfile.dockerignore").is_file()
