"""What docker/ says of the server is true of it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from mmkv.cli.app import run
from mmkv.server.metrics import Metrics
from mmkv.training.measure.record import ROOT

DOCKER = ROOT / "docker"
EXTRAS = re.compile(r"\.\[([\w,-]+)\]")


def read(name: str) -> Any:
    return yaml.safe_load((DOCKER / name).read_text())


def test_the_dashboard_asks_for_metrics_that_there_are() -> None:
    metrics = Metrics()
    for metric in (metrics.finished, metrics.rejected, metrics.evicted):
        metric.labels("x").inc()
    for metric in (metrics.kv_pages, metrics.sessions, metrics.process_limit):
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
    assert labels <= {"le", "state", "modality", "finished_reason", "reason"}
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
