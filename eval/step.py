"""``mmkv bench``: compare this machine's decode step with the time to read its bytes.

The floor of a step is the bytes of its weights and retained keys and values over the bandwidth of a
copy in this machine's memory. The data of a small model fit into the processor's cache, so a step
can be faster than the floor. Heavy imports wait until the command runs.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmkv.cli import arguments
from mmkv.engine.config import EngineConfig

if TYPE_CHECKING:
    import torch

    from mmkv.engine.runtime import Runtime
    from mmkv.engine.sequence import CachedSequence


app = typer.Typer(add_completion=False, rich_markup_mode="rich")


@app.command()
@arguments.engine_options()
def bench(
    engine: EngineConfig,
    batch: Annotated[int, typer.Option(min=1, max=4096, help="Sequences decoded together.")] = 1,
    context: Annotated[
        int | None, typer.Option(min=1, help="Prompt tokens of each (default 2048, if they fit).")
    ] = None,
    steps: Annotated[
        int, typer.Option(min=1, max=100_000, help="Decode steps of a timed run.")
    ] = 64,
    rounds: Annotated[int, typer.Option(min=1, max=1000, help="Timed runs.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Time a decode step on this machine, beside the floor of its bytes."""
    from mmkv.engine.runtime import Runtime
    from mmkv.resources import bundled_model

    model = engine.model or bundled_model()
    name = str(engine.model or bundled_model().name)
    runtime = Runtime.from_config(replace(engine, model=model))
    found = measure(runtime, batch, context, steps, rounds)
    print(json.dumps({"model": name, **asdict(found)}) if as_json else found.describe(name))


@dataclass(frozen=True)
class BenchResult:
    """The measurements, in seconds and bytes.

    Attributes:
        step: spread of the seconds per step: median, quartiles, rounds.
        weights: how they are held, as ``--weights`` takes it; rounding: how far rounded ones are
            off, in words.
        kv: the form of the cache.
        kv_bytes: physical bytes of keys and values; logical_bytes: those of the live entries.
    """

    machine: str
    dtype: str
    weights: str
    rounding: str
    policy: str
    kv: str
    path: str
    batch: int
    context: int
    copy_bandwidth: float
    weight_bytes: int
    read_kv_bytes: int
    floor: float
    step: dict[str, Any]
    over_floor: float
    tokens_per_second: float
    kv_bytes: int
    logical_bytes: int

    def describe(self, name: str) -> str:
        """Return a few lines for a terminal."""
        low, high = (1e3 * q for q in self.step["quartiles"])
        weights, kept = _size(self.weight_bytes), _size(self.read_kv_bytes)
        middle = 1e3 * self.step["median"]
        rounding = [f"rounding  {self.rounding}"] if self.rounding else []
        return "\n".join(
            [
                f"model     {name}: {self.dtype}, policy {self.policy}, kv {self.kv}, decoded on "
                f"{self.path}",
                *rounding,
                f"machine   {self.machine}; a copy moves {self.copy_bandwidth / 1e9:,.1f} GB/s",
                f"floor     {1e3 * self.floor:.3f} ms a step: {weights} of weights and {kept} kept",
                f"step      {middle:.3f} ms ({low:.3f} .. {high:.3f}), {self.over_floor:.2f} x the "
                f"floor; batch {self.batch} after {self.context:,} tokens",
                f"speed     {self.tokens_per_second:,.0f} tokens/s",
                f"memory    {_size(self.kv_bytes)} of keys and values in pages, "
                f"{self.kv_bytes / self.logical_bytes:.2f} x what their entries need",
            ]
        )


def measure(
    engine: Runtime, batch: int, context: int | None, steps: int, rounds: int
) -> BenchResult:
    """Prefill random text, decode greedily from copies of the sessions.

    Args:
        context: prompt tokens; None: 2048, or as many as leave room for the steps.

    Raises:
        MmkvError: the context or the memory does not hold that much.
    """
    import torch

    from mmkv.engine.errors import ContextError

    longest = engine.spec.max_position - steps
    context = context or max(1, min(2048, longest))
    if context > longest:
        raise ContextError(
            f"{context:,} prompt tokens and {steps} steps pass position "
            f"{engine.spec.max_position:,}, which the model was trained for; give a --context of "
            f"at most {longest:,}"
        )
    bandwidth = copy_bandwidth(engine.device)
    below = min([engine.spec.vocab_size, *engine.family.placeholder.values()])
    size = (batch, context)
    prompts = torch.randint(
        min(3, below - 1), below, size, generator=torch.Generator().manual_seed(0)
    )
    sessions = [engine.session() for _ in range(batch)]
    try:
        first = [
            int(session.prefill({"input_ids": prompt[None]}).argmax())
            for session, prompt in zip(sessions, prompts, strict=True)
        ]

        def run() -> float:
            forks = [session.fork() for session in sessions]
            try:
                return wall(lambda: engine.decode_many(forks, first, steps), engine.device) / steps
            finally:
                for fork in forks:
                    fork.close()

        run()  # compiles, captures, and lets the pool grow
        step = spread([run() for _ in range(rounds)])
        read = step_bytes(engine, sessions)
        held = [session.memory() for session in sessions]
    finally:
        for session in sessions:
            session.close()
    floor = read.floor(bandwidth)
    return BenchResult(
        machine=_machine(engine.device),
        dtype=str(engine.dtype).removeprefix("torch."),
        weights=engine.decoder.weights.form,
        rounding=engine.decoder.weights.rounding(),
        policy=engine.policy.name,
        kv=engine.cache.pool.form.name,
        path=engine.decode_path,
        batch=batch,
        context=context,
        copy_bandwidth=bandwidth,
        weight_bytes=read.weights,
        read_kv_bytes=read.kv,
        floor=floor,
        step=step,
        over_floor=step["median"] / floor,
        tokens_per_second=batch / step["median"],
        kv_bytes=sum(memory.kv_bytes for memory in held),
        logical_bytes=sum(memory.entries for memory in held) * entry_bytes(engine),
    )


def spread(values: list[float]) -> dict[str, Any]:
    """Compute median, quartiles and all rounds of a measurement."""
    if len(values) == 1:
        return {"median": values[0], "quartiles": [values[0], values[0]], "rounds": values}
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": middle, "quartiles": [low, high], "rounds": values}


def synchronize(device: torch.device) -> None:
    """Wait until ``device`` has done all it was given."""
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def wall(call: Callable[[], Any], device: torch.device) -> float:
    """Time one call in seconds, from an idle device to an idle device."""
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - start


def copy_bandwidth(device: torch.device, nbytes: int | None = None, rounds: int = 9) -> float:
    """Measure the bytes per second of a copy within the device's memory, bytes read plus bytes
    written.

    Args:
        nbytes: of the source; None: 2 GiB on a GPU, 256 MiB on a CPU.
    """
    import torch

    cuda = device.type == "cuda"
    count = (nbytes or (2**31 if cuda else 2**28)) // 4
    source = torch.empty(count, device=device).normal_()
    target = torch.zeros_like(source)
    copies = 8 if cuda else 1  # a GPU is given the next one while it copies

    def copy() -> None:
        for _ in range(copies):
            target.copy_(source)

    wall(copy, device)
    times = [wall(copy, device) / copies for _ in range(rounds)]
    return 2 * 4 * count / statistics.median(times)


@dataclass(frozen=True)
class StepBytes:
    """Bytes that one decode step reads.

    Attributes:
        weights: of the decoder and the output head, once for the whole batch.
        kv: keys and values of all entries, the new ones included.
    """

    weights: int
    kv: int

    def floor(self, bandwidth: float) -> float:
        """Compute the seconds to read them at ``bandwidth`` bytes per second."""
        return (self.weights + self.kv) / bandwidth


def step_bytes(engine: Runtime, sessions: Sequence[CachedSequence]) -> StepBytes:
    """Count the bytes that the next step of these sessions reads; those of gates are left out."""
    entries = sum(session.entries + engine.spec.rows for session in sessions)
    return StepBytes(weight_bytes(engine, len(sessions)), entries * entry_bytes(engine))


def weight_bytes(engine: Runtime, sequences: int = 1) -> int:
    """Count the bytes of the weights that a step of so many sequences reads, at most.

    A step reads single rows of an embedding that is not also the head, and of a mixture's experts
    those that its tokens choose: no two the same, where there are enough.
    """
    weights = engine.decoder.weights
    untied = weights.head.data_ptr() != weights.embed.data_ptr()
    native = engine.backends.cpu.decoder
    spared = 0 if native is None else native.bytes_spared
    if untied:
        spared += weights.embed.nbytes
    return weights.nbytes() - spared - _idle(engine, sequences)


def _idle(engine: Runtime, sequences: int) -> int:
    """Count the bytes of the experts that a step cannot read."""
    routing = engine.spec.routing
    if routing is None:
        return 0
    idle = max(0, routing.experts - sequences * routing.chosen)
    layers = [each for each in engine.decoder.weights.layers if each.router is not None]
    experts = sum(each.gate_up.nbytes + each.down.nbytes for each in layers)
    return experts // routing.experts * idle


def entry_bytes(engine: Runtime) -> int:
    """Count the bytes of the key and value of one entry."""
    pool = engine.cache.pool
    return pool.kv_page_bytes // pool.page_size


def _machine(device: Any) -> str:
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"


def _size(count: int) -> str:
    for unit, least in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= least:
            return f"{count / least:.2f} {unit}"
    return f"{count} B"
