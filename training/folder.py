"""A run's output folder and checkpoints, which ``--resume`` continues, also after a Ctrl-C.

It holds the settings and the progress; at a Ctrl-C the step is finished and kept as a checkpoint.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from mmkv.engine.errors import InputError
from mmkv.training.measure.record import require_output, whole_rows

ASKED, HISTORY = "run.json", "history.jsonl"
_STATE = "trainer_state.json"  # what the Trainer writes last of a checkpoint
# Options that a resumed run may change, because training does not depend on them. (A recipe fills
# in settings, and those are compared.)
_FREE = frozenset(
    "output recipe resume device threads checkpointing log_every save_every eval_every "
    "held_out_budget store threshold eval_data eval_samples".split()
)


def open_run(settings: Any, data: Sequence[str], options: Mapping[str, Any]) -> str | None:
    """Make the folder of a run, or take up the run that it holds.

    Args:
        settings: a dataclass with ``output`` and ``resume``.
        data: what it trains on; options: how that is read.

    Returns:
        The checkpoint to go on from; None: it starts anew.

    Raises:
        InputError: as :func:`begin` and :func:`resume`, or the folder cannot be written.
    """
    folder = Path(settings.output)
    asked = {**asdict(settings), "data": data, "processes": processes(), **options}
    asked = json.loads(json.dumps(asked))  # tuples are lists, as in the file
    if first_process():
        require_output(folder)
    if settings.resume:
        return str(resume(folder, asked))
    begin(folder, asked)
    return None


def begin(folder: Path, asked: Mapping[str, Any]) -> None:
    """Make the folder of a run that starts anew, and write down what was asked.

    A checkpoint that a kill cut off holds nothing of use; this run writes over it.

    Raises:
        InputError: it holds checkpoints of another run, which would mix with those to come.
    """
    if found := _whole(folder):
        raise InputError(
            f"{folder} holds {found[-1].name} of an earlier run; continue it with --resume, or "
            "give another --output"
        )
    if not first_process():
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / HISTORY).unlink(missing_ok=True)
    (folder / ASKED).write_text(json.dumps(asked, indent=1) + "\n")


def resume(folder: Path, asked: Mapping[str, Any]) -> Path:
    """Return the checkpoint to resume from. Later steps are removed from the history.

    Raises:
        InputError: no checkpoint that was written whole, or other settings than the run's own.
    """
    whole = _whole(folder)
    if not whole:
        raise InputError(f"no checkpoint in {folder} was written to its end; leave --resume out")
    try:
        before = json.loads((folder / ASKED).read_text())
    except (OSError, ValueError):
        raise InputError(
            f"{folder} does not say what its run was asked ({ASKED}); give another --output and "
            "start anew"
        ) from None
    before.setdefault("weights", "auto")  # a run of before there was a choice
    before.setdefault("pack", False)
    for name in ("least_budget", "lambda_rank", "rank_window", "epochs"):
        before.setdefault(name, 0)
    before.setdefault("init", None)
    before.setdefault("cuts", asked.get("cuts"))  # of a method that there was not
    for name in sorted(asked.keys() - _FREE):
        if asked[name] != before.get(name):
            raise InputError(
                f"--{name.replace('_', '-')} is {asked[name]!r}, the run in {folder} has "
                f"{before.get(name)!r}; give the same, or start anew in another --output"
            )
    if first_process():
        step = _step(whole[-1])
        lines = [line for line in history(folder) if line["step"] <= step]
        (folder / HISTORY).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return whole[-1]


def history(folder: Path) -> list[dict[str, Any]]:
    """Return the log lines of a run, in order; one that was cut off by a kill is left out."""
    path = folder / HISTORY
    return list(whole_rows(path.read_text())) if path.is_file() else []


def first_process() -> bool:
    """Return whether this process is the one that writes."""
    return os.environ.get("RANK", "0") == "0"


def processes() -> int:
    """Return how many processes train together."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def _whole(folder: Path) -> list[Path]:
    """Return checkpoints that were written to their end, by their step."""
    found = (made for made in folder.glob("checkpoint-*") if (made / _STATE).is_file())
    return sorted((made for made in found if made.name[11:].isdecimal()), key=_step)


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("checkpoint-"))


class Stopping(TrainerCallback):
    """Ends training after the step in which Ctrl-C was pressed, with a checkpoint.

    A context manager: outside of it, and for a second press, Ctrl-C interrupts at once. Leaving it
    raises KeyboardInterrupt if it was pressed. Several processes would stop at different steps and
    wait for each other, so there the first press interrupts, too.

    Attributes:
        pressed: whether Ctrl-C was.
    """

    def __init__(self) -> None:
        self.pressed = False
        self._previous: Any = None

    def __enter__(self) -> Self:
        alone = processes() == 1 and threading.current_thread() is threading.main_thread()
        # None, SIG_IGN: nobody waits for Ctrl-C here.
        if alone and callable(previous := signal.getsignal(signal.SIGINT)):
            self._previous = previous
            signal.signal(signal.SIGINT, self._press)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._restore()
        if kind is None and self.pressed:
            raise KeyboardInterrupt

    def _press(self, number: int, frame: FrameType | None) -> None:
        self.pressed = True
        self._restore()
        print(
            "stopping after this step, with a checkpoint; Ctrl-C again stops at once",
            file=sys.stderr,
            flush=True,
        )

    def _restore(self) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
            self._previous = None

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Ask for a checkpoint and the end."""
        if self.pressed:
            control.should_save = control.should_training_stop = True
