"""Settings and fixtures shared by all tests.

What is heavy is imported where it is used: the process that only hands tests to workers needs none.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

# Before transformers is imported: no test may reach for the network.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Processes that tests start compute on one thread, as the tests do.
os.environ["OMP_NUM_THREADS"] = "1"
# Packed weights are kept by the tests of that alone.
os.environ["MMKV_PANELS"] = "0"

import pytest

from tests.support.tiers import thin

if TYPE_CHECKING:
    import torch

    from mmkv.engine.model.spec import DecoderSpec
    from mmkv.engine.runtime import Runtime

# Tests make few cycles, and each load of a model collects them: the collector's own rounds, as
# often as Python has them, are a twentieth of the tests' time.
gc.set_threshold(20_000, 10, 20)

# A shell starts background jobs with Ctrl-C ignored, which children inherit; tests press it.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return one worker more than there are cores: many tests wait for a process or a server.

    Not those of the kernels: each worker's imports, and its compiler, take as long as a file.
    """
    return (os.cpu_count() or 1) + (not _of_triton(config))


@pytest.fixture(scope="session", autouse=True)
def quiet_on_one_thread() -> None:
    """Compute on one thread, and show no warning or progress bar of transformers."""
    import torch
    from transformers.utils import logging

    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()


@pytest.fixture(autouse=True)
def one_thread_again() -> Iterator[None]:
    """Undo what a program under test does to torch's threads."""
    import torch

    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def homes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Keep the user's defaults out of the tests, and the tests' chats out of the user's."""
    names = ("XDG_STATE_HOME", "XDG_CONFIG_HOME")
    os.environ.update(made := {name: str(tmp_path_factory.mktemp(name.lower())) for name in names})
    return made


@pytest.fixture(autouse=True)
def own_home(homes: dict[str, str]) -> None:
    """Undo what a test before this one did to the environment: targets of the fuzz program do."""
    os.environ.update(homes)


@pytest.fixture
def generator() -> torch.Generator:
    """Return a seeded source of randomness, fresh for each test."""
    import torch

    return torch.Generator().manual_seed(1234)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the checkpoints of the session tests, by what they are."""
    from tests.support.sessions import SMALL_CONTEXT, qwen3_vl, save_checkpoint

    root = tmp_path_factory.mktemp("sessions")
    made = {
        "vl": qwen3_vl(),
        "text": SMALL_CONTEXT,
        "other weights": qwen3_vl(seed=1),
        "other config": qwen3_vl(layers=3),
    }
    return {name: save_checkpoint(spec, root / name) for name, spec in made.items()}


@pytest.fixture
def engine(folders: dict[str, Path]) -> Iterator[Runtime]:
    """Yield a Qwen3-VL engine; every test must leave its pool consistent."""
    from tests.support.sessions import load

    made = load(folders["vl"])
    yield made
    made.cache.check()


def make_spec(
    layers: int = 2, kv_heads: int = 2, hidden: int = 24, group: int = 2, head_dim: int = 8
) -> DecoderSpec:
    """Return the sizes of a small decoder, for tests that need no weights."""
    import torch

    from mmkv.engine.model.spec import DecoderSpec, RopeSpec

    inv_freq = 1.0 / 10000 ** (torch.arange(0, head_dim, 2).float() / head_dim)
    return DecoderSpec(
        vocab_size=100,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=group * kv_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_eps=1e-6,
        max_position=4096,
        sliding_window=(None,) * layers,
        rope=RopeSpec("default", inv_freq),
    )


def _of_triton(config: pytest.Config) -> bool:
    return str(config.getoption("markexpr")).split(" and ")[0] == "triton"


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to skip all that was asked for."""
    if _of_triton(config) and os.environ.get("TRITON_INTERPRET") != "1":
        import torch

        if not torch.cuda.is_available():
            raise pytest.UsageError(
                "the Triton kernels need a GPU, or their interpreter: make test-triton"
            )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With ``-m triton`` import no file that names neither the mark nor the kernels."""
    if not _of_triton(config) or collection_path.suffix != ".py":
        return None
    text = collection_path.read_text("utf-8")
    return None if "triton" in text or "kernels" in text else True


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that hold slow tests, so that workers end at about the same time."""
    thin(items)
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
    for item in items:
        for mark in item.iter_markers("slow"):
            if not mark.kwargs.get("reason"):
                raise pytest.UsageError(f"{item.nodeid}: a slow test gives a reason")


def pytest_collection_finish() -> None:
    """Keep the collector off what is imported by now: each load of a model collects garbage.

    A quarter of a second a load, which is most of what a load of a small model takes.
    """
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show what the comparisons with the oracle found, passing or not, in all workers."""
    reports = [
        report
        for outcome in ("passed", "failed")
        for report in terminalreporter.getreports(outcome)
        if isinstance(report, pytest.TestReport) and report.when == "call"
    ]
    found = [
        value for report in reports for name, value in report.user_properties if name == "oracle"
    ]
    if found:
        calls, evictions, swaps = (
            sum(row[name] for row in found) for name in ("calls", "evictions", "swaps")
        )
        worst = max(row["worst"] for row in found)
        terminalreporter.write_line(
            f"oracle: {len(found)} dialogues, {calls} calls and {evictions} evictions "
            f"compared, {swaps} swaps of near-ties, worst relative logit error {worst:.1e}"
        )
        for row in found:
            if row["swaps"]:
                terminalreporter.write_line(f"oracle: {row['swaps']} swaps in {row['case']}")
