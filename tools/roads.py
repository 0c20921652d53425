"""Which files run when mmkv reads a prompt, decodes a token, evicts, or answers over HTTP.

``python -m tools.roads`` runs each road with the bundled model on this CPU, and prints its files in
the order in which they ran first, with the number of functions that ran.
docs/how-it-works/token.md names them, and tests/test_roads.py compares the two.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
Road = dict[str, set[str]]  # functions by file, a path from the top of the repository
QUESTION, SCENE = "what is at row 2, column 3?", "scene.png"


@contextmanager
def traced() -> Iterator[Road]:
    """Note the functions of this repository that run, in all threads that begin meanwhile, too."""
    road: Road = {}
    names: dict[str, str | None] = {}

    def named(file: str) -> str | None:
        path = Path(file).resolve()
        inside = path.is_relative_to(ROOT) and ".venv" not in path.parts
        name = path.relative_to(ROOT).as_posix() if inside else ""
        return name if name.startswith(("engine/", "mmkv/")) else None

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        file = frame.f_code.co_filename
        if file not in names:
            names[file] = named(file)
        if (name := names[file]) is not None and not frame.f_code.co_name.startswith("<"):
            road.setdefault(name, set()).add(frame.f_code.co_qualname)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield road
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def roads() -> dict[str, Road]:
    """Run every road that needs no server."""
    import mmkv
    from mmkv.resources import asset

    engine = mmkv.Engine.from_pretrained(mmkv.bundled_model(), budget=8, prefill_chunk=12)
    engine.processor.sees  # noqa: B018 (loads it)
    found = {}
    with engine.session() as session:
        with traced() as found["turn"]:
            "".join(session.send(QUESTION, images=[asset(SCENE)]))
        with traced() as found["budget"]:
            session.set_budget(4)
    with engine.session() as session:
        session.prefill({"input_ids": _ids(engine, 40)})
        with traced() as found["prefill"]:
            session.prefill({"input_ids": _ids(engine, 24)})
        with traced() as found["step in C"]:
            engine.decode([session], [5])
        engine.backends.cpu.switch_off()
        with traced() as found["step in torch"]:
            engine.decode([session], [5])
    return found


def _ids(engine: Any, count: int) -> Any:
    import torch

    return torch.arange(count)[None] % 200 + 1


def http_road(serve: Callable[[], Any]) -> Road:
    """Return what a text reply of four tokens runs, from socket to socket.

    Args:
        serve: a context manager that gives a server with ``chat(text, **fields)``; its threads
            begin inside.
    """
    with traced() as road, serve() as server:
        server.chat(QUESTION, max_tokens=4)  # what is imported and made once
        road.clear()
        server.chat(QUESTION, max_tokens=4)
        answered = {name: set(functions) for name, functions in road.items()}
    return answered


def main() -> None:
    """Print every road."""
    argparse.ArgumentParser(prog="python -m tools.roads", description=__doc__).parse_args()
    for name, road in roads().items():
        print(f"{name}: {sum(map(len, road.values()))} functions in {len(road)} files")
        for file, functions in road.items():
            print(f"  {file} ({len(functions)})")


if __name__ == "__main__":
    main()
