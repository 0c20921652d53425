"""DistillTrainer: Hugging Face's Trainer over the models of gates.

:class:`mmkv.training.model.DistillModel` and :class:`mmkv.training.model.WriteGateModel`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sized
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, SequentialSampler
from tqdm import tqdm
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from mmkv.training.folder import HISTORY, Stopping, history


def only_list(examples: list[Any]) -> dict[str, list[Any]]:
    """Return the collator: documents stay apart, the model lays them end to end."""
    return {"examples": examples}


class DistillTrainer(Trainer):
    """Logs the parts of the loss, reads the data in its own order, saves only gates.

    Args:
        model: names the parts of its loss in ``parts``.
    """

    def __init__(self, model: Any, **kwargs: Any) -> None:
        super().__init__(model=model, data_collator=only_list, **kwargs)
        self._parts: tuple[str, ...] = model.parts
        self._sums: dict[str, Any] = {}
        self._batches, self._tokens = 0, 0
        self._since = time.perf_counter()

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Return the loss of one batch; its parts are summed up for the next log line."""
        parts = model(**inputs)
        for name in self._parts:
            # A tensor until the log line: reading it here would make the host wait every batch.
            self._sums[name] = self._sums.get(name, 0.0) + parts[name].detach()
        self._batches += 1
        self._tokens += sum(example["labels"].numel() for example in inputs["examples"])
        return (parts["loss"], parts) if return_outputs else parts["loss"]

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the means of the parts since the last line."""
        if "loss" in logs and self._batches:
            now = time.perf_counter()
            speed = self._tokens / (now - self._since)
            means = [self._sums[name].double() / self._batches for name in self._parts]
            found = torch.stack([*means, means[0].new_tensor(speed)])
            *sums, speed = self.accelerator.reduce(found, "sum").tolist()
            several = self.accelerator.num_processes
            logs |= {name: round(x / several, 5) for name, x in zip(self._parts, sums, strict=True)}
            logs["tokens_per_second"] = round(speed, 1)
            self._sums, self._batches, self._tokens, self._since = {}, 0, 0, now
        super().log(logs, start_time)

    def _get_train_sampler(self, train_dataset: Dataset[Any] | None = None) -> Any:
        # The mixture's order is a function of its seed; shuffling again would lose that.
        data = self.train_dataset if train_dataset is None else train_dataset
        assert isinstance(data, Sized)
        return SequentialSampler(data)


class History(TrainerCallback):
    """Appends every log line to ``history.jsonl`` in the output folder."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / HISTORY

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Write one line on the first process."""
        if state.is_world_process_zero and logs:
            with self.path.open("a") as file:
                file.write(json.dumps({"step": state.global_step, **logs}) + "\n")


class Idle(TrainerCallback):
    """Says, once, that a run teaches its gates nothing: their gradients are next to 0."""

    LEAST, LINES = 1e-4, 3  # gates that learn have norms of 1 to 50, a bias of 18 up to 1e-5

    def __init__(self, remedy: str) -> None:
        self.remedy, self.lines, self.moved, self.said = remedy, 0, False, False

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Have the last step logged of a run that is too short for a line."""
        if not self.lines and state.global_step >= state.max_steps:
            control.should_log = True

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Look at the gradient's norm of a log line."""
        norm = (logs or {}).get("grad_norm")
        if norm is not None:
            self.lines += 1
            self.moved |= float(norm) >= self.LEAST
        if self.lines >= self.LINES:
            self._say(state)

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Look once more: a short run has few lines."""
        if self.lines:
            self._say(state)

    def _say(self, state: TrainerState) -> None:
        if self.moved or self.said or not state.is_world_process_zero:
            return
        self.said = True
        tqdm.write(  # on a line of its own, above the Trainer's bar
            f"mmkv: these gates learn next to nothing: up to step {state.global_step} no gradient "
            f"had a norm of {self.LEAST:g} or more; {self.remedy}",
            file=sys.stderr,
        )


class HeldOut(TrainerCallback):
    """Evaluates the gates under real eviction every N steps and at the end.

    Args:
        evaluate: returns the figures of a run over the held-out data.
        every: steps between runs; 0 for only the last.
        stopping: a run that it ends is not evaluated.
    """

    def __init__(
        self,
        evaluate: Callable[[], dict[str, float]],
        every: int,
        folder: Path,
        stopping: Stopping,
    ) -> None:
        self.evaluate, self.every, self.folder = evaluate, every, folder
        self.stopping = stopping

    def latest(self) -> dict[str, float]:
        """Return the figures of the last run; empty when there was none."""
        lines = [line for line in history(self.folder) if "held_out_kl" in line]
        return {k: v for k, v in lines[-1].items() if k != "step"} if lines else {}

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Evaluate on the first process, the others wait at the next gradient exchange."""
        last = state.global_step >= state.max_steps
        due = last or (self.every and state.global_step % self.every == 0)
        if not due or not state.is_world_process_zero or (self.stopping.pressed and not last):
            return
        with torch.no_grad():
            found = {f"held_out_{k}": v for k, v in self.evaluate().items()}
        line = {"step": state.global_step, **found}
        state.log_history.append(line)
        with (self.folder / HISTORY).open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line))
