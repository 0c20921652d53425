"""Which GPU launches go to, and float32 products that the program around must not shorten."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mmkv.engine import system
from mmkv.engine.backends.cuda import GraphRunner, kernels
from mmkv.engine.backends.cuda.kernels.available import in_triton
from mmkv.engine.errors import ModelError
from mmkv.engine.model.families.loading import load
from mmkv.engine.model.product import INTEGERS
from mmkv.engine.system import exact_products
from tests.support.bursts import Bursts
from tests.support.native import engine_for
from tests.support.sessions import text_ids

ROOT = Path(__file__).resolve().parents[2]
SECOND = torch.device("cuda", 1)


class OnSecond(SimpleNamespace):
    def __len__(self) -> int:
        return 1


ON_SECOND = OnSecond(device=SECOND, is_cuda=True, shape=(1,), requires_grad=False)
# Every kernel that has a Triton form: what launches it, and its arguments; one tensor each says
# where it lies.
LAUNCHES = {
    "append": ("make_room", (None, None, ON_SECOND)),
    "decode_attention": ("decode_attention", (ON_SECOND, *[None] * 8)),
    "delta": ("delta_step", (None, None, ON_SECOND, *[None] * 4)),
    "evict": ("evict", (None, None, None, None, ON_SECOND, None, None)),
    "pointwise": ("gated", (ON_SECOND,)),
    "pointwise, norm": ("rms_norm", (ON_SECOND, None, None, 0.0)),
    "experts": ("experts", (ON_SECOND, *[None] * 3)),
    "prefill_attention": ("prefill_attention", (ON_SECOND, *[None] * 5)),
    "product": ("multiply", (ON_SECOND, INTEGERS[8].of(torch.zeros(1, 1)))),
    "sample": ("sample", (ON_SECOND, None, None)),
    "store": ("store_layer", (ON_SECOND, None, None, 0.0, None, None, None)),
    "window_scores": ("window_scores", (None, None, ON_SECOND, *[None] * 4, 0.0, ON_SECOND)),
    "worklist": ("build_worklist", (None, ON_SECOND, None)),
    "write_gated_attention": ("write_gated_attention", (ON_SECOND, *[None] * 7)),
}


class Current:
    """Stands for torch.cuda.device: knows which device is the current one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.device: Any = torch.device("cuda", 0)
        monkeypatch.setattr(torch.cuda, "device", self.entered)

    @contextlib.contextmanager
    def entered(self, device: Any) -> Iterator[None]:
        before, self.device = self.device, device
        yield
        self.device = before


@pytest.mark.triton
@pytest.mark.parametrize("name", LAUNCHES)
def test_a_kernel_is_launched_on_the_gpu_of_its_tensors(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="the launch functions import it")
    current, seen = Current(monkeypatch), []
    function, arguments = LAUNCHES[name]
    module = f"{kernels.__name__}.{name.split(',')[0]}"
    launcher = importlib.import_module(f"{module}_triton")
    monkeypatch.setattr(launcher, function, lambda *args: seen.append(current.device))
    getattr(importlib.import_module(module), function)(*arguments)
    assert seen == [SECOND] and current.device.index == 0


def test_torch_computes_what_gradients_are_asked_of() -> None:
    learning = SimpleNamespace(is_cuda=True, requires_grad=True, device=SECOND)
    assert in_triton(lambda x: "torch", "x", learns=True)(learning) == "torch"


def test_every_launch_function_is_among_those() -> None:
    """Whoever imports a ``*_triton`` module, but another of them, stands in the list above."""
    importing = set()
    for package in ("engine", "mmkv", "training", "eval", "benchmarks"):
        for path in (ROOT / package).rglob("*.py"):
            if re.search(
                r"^ *(from|import) .*(?<!\bon)_triton\b", path.read_text("utf-8"), re.MULTILINE
            ):
                importing.add(path.relative_to(ROOT).as_posix())
    root = "engine/backends/cuda/kernels/"
    names = {name.split(",")[0] for name in LAUNCHES}
    ours = {f"{root}{name}.py" for name in names}
    within = {name for name in importing if name.startswith(root) and name.endswith("_triton.py")}
    # The launch of the first is in the Triton file, because autograd calls it, too; the second
    # compiles and launches nothing.
    assert importing - within - ours == {"training/capacity.py", "benchmarks/bench/kernel_code.py"}
    assert {m.name for m in pkgutil.iter_modules(kernels.__path__)} >= names


def test_training_launches_on_the_gpu_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = pytest.importorskip("mmkv.training.capacity_triton", reason="needs Triton")
    current, seen = Current(monkeypatch), []
    kernel = {(1, 1): lambda *args, **options: seen.append(current.device)}
    tensor = SimpleNamespace(shape=(1, 5), device=SECOND)
    ours._launch(kernel, tensor, None, None)
    assert seen == [SECOND] and current.device.index == 0


@pytest.mark.parametrize(
    ("hip", "capability", "said"),
    [("6.4", (9, 4), "AMD"), (None, (7, 5), "Old card has compute capability 7.5 .* 8.0")],
)
def test_cards_that_the_kernels_are_not_for_are_refused(
    hip: str | None, capability: tuple[int, int], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Old card")
    with pytest.raises(ModelError, match=said) as refused:
        system.require_card(SECOND)
    assert "\n" not in str(refused.value)
    assert "--device cpu" in str(refused.value)
    system.require_card(torch.device("cpu"))
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    system.require_card(SECOND)


def test_a_model_is_not_read_for_such_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(ModelError, match="AMD"):
        load("no such folder", device="cuda")


class FakeCuda:
    """Stands for what torch.cuda captures and replays with: notes on which GPU it is asked."""

    def __init__(self, current: Current, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[tuple[Any, ...]] = []  # what was done, and on which GPU
        self.current, self.pools, self.reserved = current, 0, 0
        stream = SimpleNamespace(wait_stream=lambda other: None)
        for name, value in {
            "Stream": lambda: stream,
            "current_stream": lambda: stream,
            "stream": lambda s: self.recorded("warm up"),
            "CUDAGraph": lambda: SimpleNamespace(replay=lambda: None),
            "graph": lambda graph, pool, **_: self.recorded("capture", pool),
            "graph_pool_handle": self.handle,
            "empty_cache": lambda: None,
            "memory_reserved": lambda device: self.reserved,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)

    def handle(self) -> int:
        self.pools += 1
        return self.pools

    @contextlib.contextmanager
    def recorded(self, *what: Any) -> Iterator[None]:
        self.log.append((*what, self.current.device))
        self.reserved += 1000
        yield

    def captured(self, runner: GraphRunner, step: Any) -> Any:
        """Capture as on a GPU; replays run the step's references on the CPU."""
        seqs = SimpleNamespace(device=SECOND)
        idle = SimpleNamespace(seqs=seqs, run=lambda cut=True: None, index=torch.zeros(1))
        graphs = GraphRunner._captured(runner, idle)

        def replay() -> None:
            self.log.append(("replay", self.current.device))
            step.run()

        return dict.fromkeys(graphs or (), SimpleNamespace(replay=replay)) or None


def test_graphs_are_captured_and_replayed_on_their_gpu_and_share_their_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    current = Current(monkeypatch)
    cuda = FakeCuda(current, monkeypatch)
    module = "mmkv.engine.backends.cuda.static_step"
    monkeypatch.setattr(f"{module}.on_device", lambda device: torch.cuda.device(SECOND))
    engine = engine_for("odd", "full", evict_every=1)
    runner = Bursts(engine)
    monkeypatch.setattr(runner.runner, "_captured", lambda step: cuda.captured(runner.runner, step))
    sessions = [engine.session() for _ in range(3)]
    for session in sessions:
        session.prefill({"input_ids": text_ids(5, 1)[None]})
    engine.cache.pool.reserve(10_000)
    runner.decode(sessions[:1], [3], 2)
    runner.decode(sessions, [3, 3, 3], 2)
    assert {what[-1] for what in cuda.log} == {SECOND} and current.device.index == 0
    assert [what[0] for what in cuda.log].count("replay") == 4
    assert [what[1] for what in cuda.log if what[0] == "capture"] == [1, 1]
    assert runner.graph_bytes == 2000  # of each capture's own, not of its warm-up
    # When no graph is left their memory is gone, and torch wants a new one.
    engine.cache.pool.grow(2 * engine.cache.pool.num_pages)
    runner.decode(sessions, [3, 3, 3], 2)
    assert [what[1] for what in cuda.log if what[0] == "capture"] == [1, 1, 2]
    assert runner.graph_bytes == 1000


PRODUCTS = {"cuda": torch.backends.cuda.matmul, "cpu": torch.backends.mkldnn.matmul}


@pytest.fixture
def own_settings() -> Iterator[None]:
    """Put the process's settings back."""
    yield
    torch.set_float32_matmul_precision("highest")
    for product in PRODUCTS.values():
        product.fp32_precision = "none"


def allow_by_the_old_call() -> None:
    torch.set_float32_matmul_precision("medium")


def allow_by_the_new_one() -> None:
    PRODUCTS["cuda"].fp32_precision, PRODUCTS["cpu"].fp32_precision = "tf32", "bf16"


@pytest.mark.usefixtures("own_settings")
@pytest.mark.parametrize("allow", [allow_by_the_old_call, allow_by_the_new_one])
@pytest.mark.parametrize("kinds", itertools.product(PRODUCTS, PRODUCTS))
def test_the_first_of_two_steps_to_end_leaves_the_other_exact(
    kinds: tuple[str, str], allow: Any
) -> None:
    """Two engines in two threads; the process's setting returns with the last one."""
    allow()
    before = [product.fp32_precision for product in PRODUCTS.values()]
    for first_ends_first in (True, False):
        steps = [exact_products(torch.device(kind)) for kind in kinds]
        for step in steps:
            step.__enter__()
        ends, goes_on = (0, 1) if first_ends_first else (1, 0)
        steps[ends].__exit__(None, None, None)
        assert PRODUCTS[kinds[goes_on]].fp32_precision == "ieee"
        steps[goes_on].__exit__(None, None, None)
        assert [product.fp32_precision for product in PRODUCTS.values()] == before
    with pytest.raises(KeyError), exact_products(torch.device(kinds[0])):
        raise KeyError
    assert [product.fp32_precision for product in PRODUCTS.values()] == before


@pytest.mark.usefixtures("own_settings")
def test_every_step_computes_whole_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts, steps, bursts and evictions, with what a host program may have switched on."""
    engine = engine_for("odd", evict_every=2)
    engine.backends.cpu.switch_off()
    seen: dict[str, set[str]] = {}

    def watch(target: Any, name: str) -> None:
        whole = getattr(target, name)

        def watched(*args: Any, **options: Any) -> Any:
            seen.setdefault(name, set()).add(PRODUCTS["cpu"].fp32_precision)
            return whole(*args, **options)

        monkeypatch.setattr(target, name, watched)

    for target, name in [
        (engine.decoder, "embed"),
        (engine.decoder, "forward"),
        (type(engine.policy.scoring), "score"),
    ]:
        watch(target, name)
    allow_by_the_old_call()
    session = engine.session()
    session.prefill({"input_ids": text_ids(40, 1)[None]})
    for _ in range(4):
        session.decode(3)
    Bursts(engine).decode([session], [3], 4)
    session.set_budget(4)
    assert seen == {name: {"ieee"} for name in ("embed", "forward", "score")}
    assert PRODUCTS["cpu"].fp32_precision == "bf16"


@pytest.mark.skipif(system._trim() is None, reason="no glibc")
def test_the_heap_keeps_64_mib(monkeypatch: pytest.MonkeyPatch) -> None:
    """By mallopt's own numbers; glibc refuses 64 MiB for what is mapped apart."""
    said: dict[int, int] = {}
    heap = SimpleNamespace(mallopt=said.__setitem__)
    monkeypatch.setattr(system.ctypes, "CDLL", lambda _: heap)
    system.keep_freed()
    assert said == {-1: 64 << 20, -3: 32 << 20}
