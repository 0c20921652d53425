"""docs/how-it-works/token.md names the files that really run, on every road."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mmkv import Engine
from mmkv.resources import bundled_model
from tests.support.native import needs_native
from tests.support.servers import Server, serving
from tests.support.tiers import one_in
from tools.roads import Road, http_road, roads

pytestmark = [needs_native, pytest.mark.slow(reason="all that runs is traced")]

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "how-it-works" / "token.md"
NAMED = {
    name: set(re.findall(r"`(\w[\w/]*/\w+\.py)`", text))
    for name, text in re.findall(r"<!-- road: (.*?) -->(.*?)<!-- end -->", PAGE.read_text(), re.S)
}


@pytest.fixture(scope="module")
def traced() -> dict[str, Road]:
    """Run every road once."""

    @contextmanager
    def serve() -> Iterator[Server]:
        with serving(lambda: Engine.from_pretrained(bundled_model(), kv_limit=2**24)) as server:
            yield server

    return roads() | {"http": http_road(serve)}


@one_in(2)
@pytest.mark.parametrize("name", NAMED)
def test_the_files_of_a_road_run_on_it(name: str, traced: dict[str, Road]) -> None:
    assert NAMED[name]
    idle = sorted(NAMED[name] - traced[name].keys())
    assert not idle, f"{PAGE.name} names files that do not run: {idle}"


def test_every_road_is_told(traced: dict[str, Road]) -> None:
    assert NAMED.keys() == traced.keys()


@pytest.mark.parametrize("name", ["step in C", "step in torch"])
def test_no_room_of_a_step_is_left_out(name: str, traced: dict[str, Road]) -> None:
    """Each folder of the engine that does much in a step has a file that is named."""
    text = PAGE.read_text()
    for folder in {str(Path(file).parent) for file in traced[name]}:
        count = sum(len(f) for file, f in traced[name].items() if str(Path(file).parent) == folder)
        assert count < 5 or f"`{folder}/" in text, folder
