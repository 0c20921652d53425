"""Measure times in turns: medians with spread, copy bandwidth, calls as CUDA graphs, and the floor
of a decode step, which is the bytes that it must read over the measured bandwidth.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from mmkv.engine.runtime import Runtime
from mmkv.engine.sequence import CachedSequence

T = TypeVar("T")


def spread(values: list[float]) -> dict[str, Any]:
    """Compute median, quartiles and all rounds of a measurement."""
    if len(values) == 1:
        return {"median": values[0], "quartiles": [values[0], values[0]], "rounds": values}
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": middle, "quartiles": [low, high], "rounds": values}


def ratios(over: Sequence[float], under: Sequence[float]) -> dict[str, Any]:
    """Compute the spread of what one method has over another, round by round."""
    return spread([a / b for a, b in zip(over, under, strict=True)])


def synchronize(device: torch.device) -> None:
    """Wait until ``device`` has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def wall(call: Callable[[], Any], device: torch.device) -> float:
    """Time one call in seconds, from an idle device to an idle device."""
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - start


def take_turns(methods: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Run every method once a round, in an order that turns round each time.

    Drift of the machine then falls on all methods alike. The methods return what they measured.
    """
    measured: dict[str, list[T]] = {name: [] for name in methods}
    for round_ in range(rounds):
        for name in list(methods) if round_ % 2 == 0 else reversed(list(methods)):
            measured[name].append(methods[name]())
    return measured


def copy_bandwidth(device: torch.device, nbytes: int | None = None, rounds: int = 9) -> float:
    """Measure the bytes per second of a copy within the device's memory, bytes read plus bytes
    written.

    Args:
        nbytes: of the source; None: 2 GiB on a GPU, 256 MiB on a CPU.
    """
    count = (nbytes or (2**31 if device.type == "cuda" else 2**28)) // 4
    source = torch.empty(count, device=device).normal_()
    target = torch.zeros_like(source)
    times = time_calls(lambda: target.copy_(source), device, rounds, least=0.01)
    return 2 * 4 * count / statistics.median(times)


def matmul_rate(device: torch.device, dtype: torch.dtype, size: int = 8192) -> float:
    """Measure floating-point operations per second of a square product of random matrices."""
    left, right = (torch.empty(size, size, device=device).normal_().to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    times = time_calls(lambda: torch.matmul(left, right, out=out), device, 5, least=0.02)
    return 2 * size**3 / statistics.median(times)


def time_calls(
    call: Callable[[], Any], device: torch.device, rounds: int = 7, least: float = 0.02
) -> list[float]:
    """Time calls: seconds per call, one figure a round.

    On a GPU the call is captured as a CUDA graph and its replays are timed with events: gaps
    between launches, which a graph of the whole step does not have either, stay out. The call
    must not read anything back, and must leave its inputs such that it can be repeated.

    Args:
        least: seconds of one round; it decides how often the call is repeated in it.
    """
    if device.type == "cuda":
        return _time_graph(call, device, rounds, least)
    once = wall(call, device)
    again = min(wall(call, device), once)
    repeats = max(1, round(least / max(again, 1e-9)))

    def repeated() -> None:
        for _ in range(repeats):
            call()

    return [wall(repeated, device) / repeats for _ in range(rounds)]


def _time_graph(
    call: Callable[[], Any], device: torch.device, rounds: int, least: float
) -> list[float]:
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):  # libraries allocate and kernels compile before the capture
        for _ in range(3):
            call()
    torch.cuda.current_stream(device).wait_stream(side)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()

    def replay(times: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(times):
            graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / times

    replay(2)
    repeats = max(2, min(2000, round(least / max(replay(3), 1e-9))))
    replay(repeats)  # brings the clocks up
    return [replay(repeats) for _ in range(rounds)]


@dataclass(frozen=True)
class StepBytes:
    """Bytes that one decode step reads.

    Attributes:
        weights: of the decoder and the output head, once for the whole batch.
        kv: keys and values of all entries, the new ones included.
        gates: weights of the retention gates, which are not part of the floor.
    """

    weights: int
    kv: int
    gates: int

    def floor(self, bandwidth: float) -> float:
        """Compute the seconds for weights and entries at ``bandwidth`` bytes per second."""
        return (self.weights + self.kv) / bandwidth


def weight_bytes(engine: Runtime, sequences: int = 1) -> int:
    """Count the bytes of the weights that a step of so many sequences reads, at most.

    A step reads single rows of an embedding that is not also the head, and of a mixture's experts
    those that its tokens choose: no two the same, where there are enough.
    """
    weights = engine.decoder.weights
    untied = weights.head.data_ptr() != weights.embed.data_ptr()
    native = engine.backends.cpu.decoder
    spared = 0 if native is None else native.bytes_spared
    return (
        weights.nbytes()
        - (weights.embed.nbytes if untied else 0)
        - spared
        - _idle(engine, sequences)
    )


def _idle(engine: Runtime, sequences: int) -> int:
    """Count the bytes of the experts that a step cannot read."""
    routing = engine.spec.routing
    if routing is None:
        return 0
    idle = max(0, routing.experts - sequences * routing.chosen)
    layers = [each for each in engine.decoder.weights.layers if each.router is not None]
    experts = sum(each.gate_up.nbytes + each.down.nbytes for each in layers)
    return experts // routing.experts * idle


def gate_bytes(engine: Runtime) -> int:
    """Count the bytes of the gates a step reads, 0 without gates."""
    if engine.decoder.gates is None:
        return 0
    tensors = [
        tensor
        for gate in engine.decoder.gates.layers
        for tensor in (*(t for pair in gate.trunk for t in pair), gate.readout, gate.bias)
    ]
    return sum(tensor.nbytes for tensor in tensors)


def entry_bytes(engine: Runtime) -> int:
    """Count the bytes of the key and value of one entry."""
    pool = engine.cache.pool
    return pool.kv_page_bytes // pool.page_size


def step_bytes(engine: Runtime, sessions: Sequence[CachedSequence]) -> StepBytes:
    """Count the bytes that the next step of these sessions reads."""
    entries = sum(session.entries + engine.spec.rows for session in sessions)
    return StepBytes(
        weight_bytes(engine, len(sessions)), entries * entry_bytes(engine), gate_bytes(engine)
    )
