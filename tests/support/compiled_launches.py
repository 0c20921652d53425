"""Compiles or counts launches: one JSON request a line on stdin, one reply a line on stdout.

A process of its own, for under TRITON_INTERPRET=1 there is nothing to compile. The compiler and
ptxas are in Triton's wheel and need no GPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import pkgutil
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from benchmarks.bench.kernel_code import Case
from benchmarks.bench.recorded_launches import Variant, compiled, recording
from mmkv.engine.backends.cuda import kernels
from mmkv.engine.backends.cuda.kernels import available
from mmkv.engine.backends.cuda.kernels.sample import Draw
from mmkv.engine.runtime import Runtime
from mmkv.server.engine_thread import compile_kernels
from tests.support.bursts import Bursts
from tests.support.native import engine_for, rounded_engine
from tests.support.sessions import text_ids


def codes(launch: str, arch: int, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Compile each variant that a launch of ``kernel_code`` takes."""
    variants = Case(launch, settings).variants()
    return [dataclasses.asdict(compiled(variant, arch)) for variant in variants]


@contextlib.contextmanager
def on_a_card() -> Iterator[Counter[Variant]]:
    """Launch on a CPU what a GPU would launch, recorded; the references compute the results."""
    with recording() as seen, pytest.MonkeyPatch.context() as patched:
        for found in pkgutil.iter_modules(kernels.__path__, f"{kernels.__name__}."):
            idea = importlib.import_module(found.name)
            ours = {name: one for name, one in vars(idea).items() if name.endswith("_reference")}
            for name, reference in ours.items():
                launches = importlib.import_module(f"{found.name}_triton")
                form = name.removesuffix("_reference")
                patched.setattr(launches, form, _both(getattr(launches, form), reference))
        real = available.on_triton
        for module in list(sys.modules.values()):
            if getattr(module, "on_triton", None) is real:
                patched.setattr(module, "on_triton", lambda tensor: True)
        yield seen


def _both(form: Callable[..., Any], reference: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **named: Any) -> Any:
        form(*args, **named)
        return reference(*args, **named)

    return run


def warm_and_later(
    model: str, policy: str, settings: dict[str, Any], weights: str = ""
) -> tuple[list[str], list[str]]:
    """Return the kernels' variants that a server's warm-up takes, and those that later ones add.

    Later: other lengths, batches, draws, budgets, and growths of pool and tables.
    """
    engine = (
        rounded_engine(model, weights, 128) if weights else engine_for(model, policy, **settings)
    )
    engine.backends.cpu.switch_off()
    with on_a_card() as seen:
        bursts = Bursts(engine)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(engine, "decode_many", bursts.decode)
            compile_kernels(engine)
        warm = list(seen)
        _later(engine, bursts, policy != "full")
        later = [variant for variant in seen if variant not in warm]
    return [variant.name for variant in warm], [variant.name for variant in later]


def _later(engine: Runtime, bursts: Bursts, evicts: bool) -> None:
    sessions = []
    for index, count in enumerate((1, 16, 33, 75, 150)):
        budget = (7 * index + 9) if evicts and engine.shared is None else None
        session = engine.session(budget)
        session.prefill({"input_ids": text_ids(count, count)[None]})
        sessions.append(session)
        bursts.decode(sessions, [5] * len(sessions), 3 + index)
    drawn = Draw(temperature=0.7, seed=3), Draw(temperature=1.0, repetition=1.2, seed=4)
    for draw in drawn:
        for batch in (1, 2, 3):
            bursts.decode(sessions[:batch], [5] * batch, 7, draws=[draw] * batch)
    before, wide = engine.cache.pool.num_pages, engine.cache.table.shape[-1]
    if evicts:
        sessions[0].set_budget(500)
    sessions[0].prefill({"input_ids": text_ids(400, 9)[None]})
    bursts.decode(sessions[:2], [5, 6], 40)
    grown = engine.cache.pool.num_pages, engine.cache.table.shape[-1]
    assert grown[0] > before and grown[1] > wide, "neither pool nor tables have grown"


if __name__ == "__main__":
    kinds = {"codes": codes, "warm_and_later": warm_and_later}
    torch.set_num_threads(1)
    for line in sys.stdin:
        try:
            request = json.loads(line)
            reply: dict[str, Any] = {"made": kinds[request.pop("kind")](**request)}
        except Exception:
            reply = {"error": traceback.format_exc()}
        print(json.dumps(reply), flush=True)
