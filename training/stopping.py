"""Ctrl-C while gates are trained: the step is finished and kept as a checkpoint."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any, Self

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from mmkv.training.folder import processes


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
