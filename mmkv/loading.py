"""Load the engine of a command, with notes and a moving bar on stderr."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from mmkv import planner
from mmkv.engine.budget import Budget, format_bytes
from mmkv.engine.config import EngineConfig
from mmkv.engine.errors import BudgetError, ModelError, plain
from mmkv.engine.model.source import locate
from mmkv.engine.paths import is_folder, user_path
from mmkv.resources import BUNDLED_NOTE, bundled_model

if TYPE_CHECKING:
    from rich.console import Console

    from mmkv.api import Engine


class UsageError(Exception):
    """The command line itself is wrong (exit code 2)."""


class Terminal:
    """Writes to stderr; ``animated``: whether it is a terminal that shows bars.

    Args:
        quiet: whether remarks and bars are left out.
    """

    def __init__(self, quiet: bool = False) -> None:
        from rich.console import Console

        self.quiet = quiet
        self.console: Console = Console(stderr=True, highlight=False)
        self.animated = self.console.is_terminal and not quiet

    def note(self, text: str) -> None:
        """Print a remark; silenced by --quiet."""
        if not self.quiet:
            self.say(f"mmkv: {text}")

    def say(self, text: str) -> None:
        """Print a line that was asked for, such as a command's answer, as plain text."""
        from rich.text import Text

        self.console.print(Text(plain(text)), soft_wrap=not self.console.is_terminal)

    @contextmanager
    def loading(self, name: str) -> Iterator[Callable[[str], None]]:
        """Show a moving bar while a model loads; give a function that shows the present task."""
        if not self.animated:
            yield lambda _: None
            return
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=24))
        with Progress(*columns, console=self.console, transient=True) as bar:
            task = bar.add_task(f"loading {name}", total=None)
            yield lambda what: bar.update(task, description=f"loading {name}: {what}")


def model_name(config: EngineConfig) -> str:
    """Return the model's folder or hub id; the bundled model's folder where none is named."""
    return str(bundled_model() if config.model is None else config.model)


def _source(config: EngineConfig) -> str:
    """Return the folder or hub id of a model; of a GGUF file, a folder that stands for it."""
    return replace(config, model=model_name(config)).checkpoint()


def load_engine(
    config: EngineConfig,
    terminal: Terminal,
    *,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
    generation_config: bool = True,
    pictures: bool = False,
    memory: int | None = None,
) -> Engine:
    """Load the model that ``config`` names, or the bundled one. Raises MmkvError.

    Args:
        terminal: shows the progress, and gets notes on choices that were made.
        pictures: whether the first message has some.
        memory: bytes that the process may take on a CPU; see :func:`within`.

    The other arguments are those of :meth:`mmkv.Engine.from_config`.
    """
    name = model_name(config)
    locate(_source(config))  # before torch is imported
    if memory is not None:
        config = within(config, memory, terminal)
    with terminal.loading(name) as progress:
        from mmkv.api import Engine
        from mmkv.engine.backends import cpu

        _hush_libraries(keep_downloads=terminal.animated and not is_folder(user_path(name)))
        engine = Engine.from_config(
            replace(config, model=name),
            progress,
            min_pixels=min_pixels,
            max_pixels=max_pixels,
            generation_config=generation_config,
            pictures=pictures,
        )
        progress("tokenizer and processor")
        _ = engine.processor
    if not gc.isenabled():
        gc.freeze()  # what is imported by now stays
        gc.enable()
    if config.model is None:
        terminal.note(BUNDLED_NOTE)
    if engine.device.type == "cpu" and "MMKV_NATIVE" not in os.environ and (why := cpu.reason()):
        terminal.note(f"replies run in torch, several times slower than in C, which is {why}")
    packed = engine.decoder.weights.note
    for note in (engine.policy_note, engine.form_note, packed, *engine.generation.notes):
        if note:
            terminal.note(note)
    return engine


def within(config: EngineConfig, memory: int, terminal: Terminal) -> EngineConfig:
    """Return the config of an engine whose process takes at most ``memory`` on a CPU.

    The cache gets what weights, libraries and a step's work leave: as its budget in bytes, where
    the model's context could take more and no budget is named.

    Raises:
        UsageError: on a GPU. ModelError: it does not fit, or nothing tells what it takes.
        BudgetError: the budget that is named takes more than is left.
    """
    from mmkv.engine.model.families.loading import resolve_device

    name = model_name(config)
    if resolve_device(config.device).type != "cpu":
        raise UsageError("--memory counts what a CPU's process takes; on a GPU, --budget-bytes")
    sizes = config.prefill_chunk, config.vision_cache_bytes
    made = planner.planned(_source(config), *sizes) or planner.planned_from_hub(name, *sizes)
    if made is None:
        raise ModelError(
            f"nothing tells what {name} takes: it has no safetensors or GGUF here that can be "
            "read, and the hub is out of reach; `mmkv pull` it first, or leave --memory out"
        )
    line = planner.advice(made, config.weights, memory)
    plan = made[config.weights]
    if not plan.fits(memory):
        raise ModelError(f"{name}: {line}")
    terminal.note(line)
    left, budget = plan.left(memory), config.budget
    if budget is None:
        exact = left // (2 * plan.entry)  # a CPU's own entries are in float32
        if config.policy == "full" or exact >= plan.longest:
            return replace(config, kv_limit=left)
        return replace(config, budget=Budget.bytes(left))
    named = Budget.of(budget)
    if named.kind == "bytes" and named.value > left:
        raise BudgetError(
            f"--memory leaves {format_bytes(left)} for the cache, and the budget is "
            f"{named.describe()}; lower one or leave it out"
        )
    return replace(config, kv_limit=left)


def require_room(config: EngineConfig, cache: int) -> None:
    """Check that a model and a cache of so many bytes fit into what is free on a CPU.

    What nothing is known of is let through. Raises ModelError.
    """
    from mmkv.engine.model.families.loading import resolve_device
    from mmkv.engine.system import free_bytes

    device = resolve_device(config.device)
    made = planner.planned(_source(config)) if device.type == "cpu" else None
    free = free_bytes(device)
    if made is None or free is None:
        return
    taken = planner.plan_of(made, config.weights).weights
    if taken + cache <= free:
        return
    fitting = [(one.weights, form) for form, one in made.items() if one.weights + cache <= free]
    remedy = f"; or --weights {max(fitting)[1]}" if fitting else ""
    raise ModelError(
        f"{model_name(config)} takes {format_bytes(taken)} for its weights and --memory "
        f"{format_bytes(cache)} for the cache, of which {format_bytes(free)} are free; lower "
        f"--memory{remedy}"
    )


def _hush_libraries(keep_downloads: bool) -> None:
    """Keep transformers' warnings and bars off the screen; our own display says what matters."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    warnings.filterwarnings("ignore")
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if not keep_downloads:
        from huggingface_hub.utils import disable_progress_bars

        disable_progress_bars()
