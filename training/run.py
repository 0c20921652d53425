"""Run one distillation, from settings and data to a folder of gates, a model card and a curve.

Gates are judged on held-out data with real eviction in the engine, or with real admission. Hugging
Face's Trainer runs the steps of :mod:`mmkv.training.model`.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence, Sized
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from huggingface_hub import ModelCard, ModelCardData
from torch import Tensor, nn
from torch.utils.data import Dataset, SequentialSampler
from tqdm import tqdm
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from mmkv.engine.errors import ModelError
from mmkv.engine.model.fingerprint import fingerprint
from mmkv.engine.model.gates import (
    Gates,
    WriteGates,
    as_stored,
    load_gates,
    load_write_gates,
    save_gates,
)
from mmkv.engine.model.source import config_digest
from mmkv.engine.policies import make_policy
from mmkv.engine.policies.base import admitted
from mmkv.engine.runtime import Runtime
from mmkv.training.data.labels import IGNORED
from mmkv.training.folder import HISTORY, Stopping, history, open_run, processes
from mmkv.training.measure.record import provenance
from mmkv.training.measure.tables import pipe_table
from mmkv.training.measure.teacher_forced import (
    DialogueRun,
    ReadAnswer,
    compare_states,
    full_attention_states,
    lay_out,
    read,
)
from mmkv.training.model import UNITS, DistillModel, WriteGateModel, backbone_digest
from mmkv.training.rank import SCALED_BY, RankModel, head_scales
from mmkv.training.settings import TrainingSettings
from mmkv.training.student import (
    TrainableGates,
    TrainableWriteGates,
    binary,
    take_parameters,
    write_gated_states,
)


def only_list(examples: list[Any]) -> dict[str, Any]:
    """Return the documents of a pass, which stay apart, and how many :data:`UNITS` they have.

    An element may be several documents (:class:`mmkv.training.data.examples.PackedExamples`).
    """
    lists = [each if isinstance(each, list) else [each] for each in examples]
    documents = [document for several in lists for document in several]
    labels = [document["labels"].flatten() for document in documents]
    targets = sum(int((each[1:] != IGNORED).sum()) for each in labels)
    units = [targets, sum(map(Tensor.numel, labels)), len(labels)]
    return {"examples": documents, "units": torch.tensor(units, dtype=torch.float64)}


class StepTrainer(Trainer):
    """Takes means over a whole step, however its documents are cut into passes and processes.

    The loss of a pass is a sum of means. Each has to count by the pass's share of what it is a mean
    of, as ``num_items_in_batch`` has it for one loss: a pass comes with ``units [K]`` float64, how
    many it has of each, and ``compute_loss`` gets ``shares [K]`` float32 in their place.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.model_accepts_loss_kwargs = True  # the Trainer does not divide by the passes again

    def get_batch_samples(
        self, epoch_iterator: Any, num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """Read the passes of a step, and count what all processes have of each unit."""
        passes, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        counts = [one.pop("units").to(device) for one in passes]
        step = self.accelerator.reduce(torch.stack(counts).sum(0), "sum").clamp(min=1)
        for one, units in zip(passes, counts, strict=True):
            # Gradients become the mean over the processes.
            one["shares"] = (units / step * self.accelerator.num_processes).float()
        return passes, step[0]

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Return the loss of one pass, a mean over one unit."""
        share = inputs.pop("shares")[0]
        made = model(**inputs)
        return (made["loss"] * share, made) if return_outputs else made["loss"] * share


class DistillTrainer(StepTrainer):
    """Logs the parts of the loss, reads the data in its own order, saves only gates.

    Args:
        parts: of the loss, and what each is a mean of; None: those that ``model`` names.
    """

    def __init__(self, model: Any, parts: Mapping[str, str] | None = None, **kwargs: Any) -> None:
        super().__init__(model=model, data_collator=only_list, **kwargs)
        self._parts: Mapping[str, str] = model.parts if parts is None else parts
        self._sums: dict[str, Any] = {}
        self._first = self._tokens = 0
        self._since = time.perf_counter()

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Return the loss of one pass; its parts are summed up for the next log line."""
        shares = dict(zip(UNITS, inputs["shares"], strict=True))
        parts = self.losses(model, shares, inputs["examples"])
        if not self._sums:
            self._first = self.state.global_step
        for name, unit in self._parts.items():
            # A tensor until the log line: reading it here would make the host wait every pass.
            self._sums[name] = self._sums.get(name, 0.0) + parts[name].detach() * shares[unit]
        self._tokens += sum(example["labels"].numel() for example in inputs["examples"])
        return (parts["loss"], parts) if return_outputs else parts["loss"]

    def losses(
        self, model: nn.Module, shares: Mapping[str, Tensor], examples: list[Any]
    ) -> dict[str, Tensor]:
        """Return ``loss``, this pass's share of the step's, and its parts over the pass."""
        parts: dict[str, Tensor] = model(examples=examples, shares=shares)
        return parts

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the means of the parts since the last line."""
        steps = self.state.global_step - self._first
        if "loss" in logs and self._sums and steps:
            now = time.perf_counter()
            speed = self._tokens / (now - self._since)
            means = [self._sums[name].double() / steps for name in self._parts]
            found = torch.stack([*means, means[0].new_tensor(speed)])
            *sums, speed = self.accelerator.reduce(found, "sum").tolist()
            several = self.accelerator.num_processes
            logs |= {name: round(x / several, 5) for name, x in zip(self._parts, sums, strict=True)}
            logs["tokens_per_second"] = round(speed, 1)
            self._sums, self._tokens, self._since = {}, 0, now
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


_BODY = """---
{front}
---

# {title} for {model}

Trained with `{command}` (mmkv {version}, commit {commit}) on the frozen model: its `config.json`
has SHA-256 `{config}`, its decoder weights in memory, as {dtype}, `{digest}` before and after.

{usage}

## Data

{data}

{options}

## Held out, {held_how}

{held_out}{results}

## Settings

{settings}
"""


def write_card(folder: Path, described: Mapping[str, Any]) -> None:
    """Write ``README.md`` from what ``gates.json`` says."""
    settings = described["settings"]
    kind, usage, held_how = _method(settings, described["base_model"])
    options = dict(described["data_options"])
    held_out = _list(options.pop("eval_data", ()))
    front = ModelCardData(
        library_name="mmkv",
        base_model=_hub_id(described["base_model"]),
        tags=["mmkv", f"{kind}-gates", "kv-cache"],
    )
    text = _BODY.format(
        front=front.to_yaml(),
        title=f"{kind.capitalize()} gates",
        model=described["base_model"],
        command=described["command"],
        version=described["versions"].get("mmkv"),
        commit=described["commit"] or "unknown",
        config=described["base_config_sha256"],
        dtype=described["base_dtype"],
        digest=described["base_sha256"],
        usage=usage,
        held_how=held_how,
        data=_list(described["data"]) or "- not stated",
        options=_table(options),
        held_out=f"{held_out}\n\n" if held_out else "",
        results=_table(described["results"]) or "No held-out data was given.",
        settings=_table(settings),
    )
    ModelCard(text).save(folder / "README.md")


def _method(settings: Mapping[str, Any], model: str) -> tuple[str, str, str]:
    """Return the kind of the gates, how to use them, and how they were measured."""
    if settings["method"] == "wgkv":
        window, threshold = settings["window"], settings["threshold"]
        usage = f"```sh\nmmkv chat {model} --gates THIS_FOLDER --policy wgkv\n```"
        return "write", usage, f"with W_local = {window} and tau = {threshold:g}"
    policy = "trimkv" if settings.get("scope") == "head" else "dbtrimkv"
    budget = settings["budget"]
    held = settings["held_out_budget"] or budget
    command = f"mmkv chat {model} --gates THIS_FOLDER --policy {policy} --budget {budget:g}"
    usage = f"```sh\n{command}\n```"
    return "retention", usage, f"with real eviction at M = {held:g}"


def _hub_id(model: str) -> str | None:
    """Return the model's id on the hub; None for a folder."""
    return model if model.count("/") == 1 and not Path(model).exists() else None


def _list(sources: Sequence[str]) -> str:
    return "\n".join(f"- `{source}`" for source in sources)


def _table(values: Mapping[str, Any]) -> str:
    rows = [
        (name, f"{value:.4g}" if isinstance(value, float) else value)
        for name, value in values.items()
    ]
    return pipe_table(("name", "value"), rows) if rows else ""


_HELD_OUT = ("held_out_kl", "held_out_agreement", "held_out_exact")
_RETENTION = (
    ("losses", ("kl", "ntp", "capacity")),
    ("soft entries per head", ("kept", "kept_least", "kept_most")),
    ("shares", ("agreement", "visual_share")),
    ("held out, with eviction", _HELD_OUT),
)
_RANK = (
    ("losses", ("rank",)),
    ("share of an eighth, by worth, that gates keep", ("overlap",)),
    ("held out, with eviction", _HELD_OUT),
)
_WRITE = (
    ("losses", ("distill", "sparsity")),
    ("share of entries admitted", ("admitted", "admitted_least", "admitted_most")),
    ("mean gate", ("gate",)),
    ("held out, with admission", (*_HELD_OUT, "held_out_admitted")),
)


_PANELS = {"retention": _RETENTION, "rank": _RANK, "wgkv": _WRITE}


def draw_curve(
    history: Sequence[Mapping[str, Any]], path: Path, method: str, budget: float
) -> None:
    """Draw losses, retained or admitted entries and held-out figures over the steps.

    Args:
        history: log lines with ``step``; path: the PNG to write; method: of the run; budget: M,
            drawn as a line beside soft entries.

    Raises:
        ImportError: naming the extra, without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("the curve needs matplotlib: pip install 'mmkv[train]'") from error
    figure = Figure(figsize=(14, 3.4), layout="constrained")
    groups = _PANELS[method]
    panels = figure.subplots(1, len(groups))
    for panel, (title, names) in zip(panels, groups, strict=True):
        for name in names:
            points = [(line["step"], line[name]) for line in history if name in line]
            if points:
                panel.plot(*zip(*points, strict=True), label=name, marker="." * (len(points) < 9))
        panel.set(title=title, xlabel="step")
        if title == "losses":
            panel.set_yscale("symlog", linthresh=1e-3)
        if "kept" in names:
            panel.set_yscale("log")
            panel.axhline(budget, color="0.6", linestyle="--", label=f"M = {budget:g}")
        if panel.has_data():
            panel.legend(fontsize=8)
        panel.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def engine_with(engine: Runtime, gates: Gates | None, policy: str, budget: float) -> Runtime:
    """Return a second engine over the same weights, with other gates and another policy."""
    return Runtime(
        engine.family,
        engine.spec,
        engine.decoder.weights,
        gates,
        make_policy(policy),
        budget,
        prefill_chunk=engine.prefill_chunk,
    )


def summary(runs: Sequence[DialogueRun]) -> dict[str, float]:
    """Return means over answers and answer tokens.

    Returns:
        ``kl``, ``nll`` and ``agreement`` per token, ``exact`` share of answers, ``evicted``
        entries, ``visual_share`` of the entries held at the end.
    """
    held = sum(run.entries for run in runs)
    visual = sum(n for r in runs for name, n in r.by_modality.items() if name != "text")
    return {
        **_means([answer for run in runs for answer in run.answers]),
        "evicted": sum(r.evicted for r in runs),
        "visual_share": visual / max(held, 1),
    }


def _means(answers: Sequence[ReadAnswer]) -> dict[str, float]:
    tokens = sum(answer.tokens for answer in answers)
    return {
        "kl": sum(a.kl for a in answers) / tokens,
        "nll": sum(a.nll for a in answers) / tokens,
        "agreement": sum(a.agree for a in answers) / tokens,
        "exact": sum(a.right for a in answers) / len(answers),
        "answers": len(answers),
    }


class HeldOutData:
    """Held-out dialogues, run for every set of gates.

    What the full cache predicts is computed anew each time: kept, it would be a vocabulary's worth
    of logits for every answer token.

    Args:
        examples: per dialogue what the processor returns, and ``labels``.
    """

    def __init__(self, engine: Runtime, examples: Sequence[Mapping[str, Any]]) -> None:
        self.engine = engine
        self.rows: list[tuple[dict[str, Any], Tensor]] = []
        for example in examples:
            labels = example["labels"].flatten().clone()
            labels[0] = -100  # nothing stands before a document's first token
            self.rows.append(({k: v for k, v in example.items() if k != "labels"}, labels))

    def read(self, gates: Gates | None, policy: str, budget: float) -> list[DialogueRun]:
        """Feed every dialogue under ``policy`` and M = ``budget``."""
        engine = engine_with(self.engine, gates, policy, budget)
        return [read(engine, inputs, labels) for inputs, labels in self.rows]

    @torch.inference_mode()
    def admit(self, gates: WriteGates, window: int, threshold: float) -> dict[str, float]:
        """Read every dialogue as it is decoded when write gates decide what stays.

        An entry that leaves the window of the newest tokens is gone unless ``g >= threshold``. A
        masked pass over the whole dialogue computes the same as decoding it with a cache: an entry
        is out of the window of every token that comes after its removal.

        Returns:
            What :func:`summary` returns, ``evicted`` left out, with ``admitted``, the share of all
            entries with ``g >= threshold``, and ``kept``, the share of all entries held at the
            dialogues' ends (admitted or in the window).
        """
        engine, answers = self.engine, list[ReadAnswer]()
        total, chosen, held, visual = 0, 0, 0, 0
        gates = gates.to(engine.device, engine.dtype)
        for inputs, labels in self.rows:
            documents = lay_out(engine, [inputs])
            full = full_attention_states(engine, documents)
            states, log_g = write_gated_states(
                engine, documents, gates, window, lambda log_g: binary(log_g, threshold)
            )
            answers += compare_states(engine.decoder, states, full, labels.to(engine.device))
            stays = admitted(log_g, threshold)
            chosen += int(stays.sum())
            stays[-window:] = True
            total, held = total + stays.numel(), held + int(stays.sum())
            visual += int(stays[documents.modality > 0].sum())
        return {
            **_means(answers),
            "admitted": chosen / total,
            "kept": held / total,
            "visual_share": visual / max(held, 1),
        }


_DAY = 24 * 3600  # seconds


def load_backbone(settings: TrainingSettings) -> Runtime:
    """Return the frozen model, without gates and without a budget.

    Raises:
        ModelError: not readable, or with layers of limited attention, which the gated attention
            of training does not know.
    """
    engine = Runtime.from_pretrained(
        settings.model,
        policy="full",
        device=own_device(settings.device),
        dtype=settings.dtype,
        weights=settings.weights,
    )
    if any(engine.spec.sliding_window):
        raise ModelError(
            f"{settings.model} has sliding-window layers; gates are trained for full attention "
            "only, choose another checkpoint"
        )
    return engine


def own_device(device: str) -> str:
    """Return of several processes on a machine with GPUs each takes the one of its own number."""
    if processes() > 1 and device in ("auto", "cuda") and torch.cuda.is_available():
        return f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    return device


def distill(
    settings: TrainingSettings,
    engine: Runtime,
    train: Dataset[Any],
    held_out: Sequence[Mapping[str, Any]],
    data: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Train gates and write them with their history, curve and card.

    Args:
        train: example n of the run, whole documents; at least steps x batch x accumulate x
            processes of them.
        held_out: examples for evaluation under real eviction.
        data: what the card names as training data.
        options: how it was read (``max_length``, ``long_chats``) and what was held out
            (``eval_data``, ``eval_samples``), for the card and for resuming.

    Returns:
        What ``gates.json`` says.

    Raises:
        InputError: nothing to resume, other settings than the run's that is resumed, a new run in
            the folder of another, or a folder that cannot be written.
        KeyboardInterrupt: Ctrl-C was pressed; a checkpoint holds the run so far.
    """
    folder = Path(settings.output)
    last = open_run(settings, data, options or {})
    before = backbone_digest(engine)
    make = _write_gates if settings.method == "wgkv" else partial(_retention_gates, train=train)
    model, evaluate = make(settings, engine, HeldOutData(engine, held_out))
    stopping = Stopping()
    measure = HeldOut(evaluate, settings.eval_every, folder, stopping)
    trainer = DistillTrainer(
        model=model,
        args=_arguments(settings, folder),
        train_dataset=train,
        callbacks=[History(folder), _idle(settings), stopping, *([measure] if held_out else [])],
    )
    with stopping:
        trainer.train(resume_from_checkpoint=last)
    after = backbone_digest(engine)
    if after != before:
        raise RuntimeError("the backbone changed during training; this is a bug in mmkv")
    described = {
        **provenance(),
        "base_model": settings.model,
        "base_sha256": before,
        "base_dtype": str(engine.dtype).removeprefix("torch."),
        "base_config_sha256": config_digest(settings.model),
        "base_fingerprint": fingerprint(settings.model),
        "trained": True,
        "settings": settings.described(),
        "data": list(data),
        "data_options": dict(options or {}),
        "results": measure.latest(),
    }
    if trainer.is_world_process_zero():
        made = model.gates.built(model.gates.file_tensors())
        save_gates(made, folder, engine.spec, getattr(torch, settings.store), **described)
        draw_curve(history(folder), folder / "curve.png", settings.method, settings.budget)
        write_card(folder, described)
    return described


def _idle(settings: TrainingSettings) -> Idle:
    if settings.method != "retention":
        return Idle("raise --lr, or give more steps")
    return Idle(
        f"a bias of {settings.bias:g} begins with gates that forget nothing, and a short run does "
        "not come away from there: take --bias 10 --lr 3e-3 --lambda-cap 16 --d-gate 96, or "
        "thousands of steps"
    )


_Evaluate = Callable[[], dict[str, float]]


def _retention_gates(
    settings: TrainingSettings, engine: Runtime, watched: HeldOutData, train: Dataset[Any]
) -> tuple[DistillModel | RankModel, _Evaluate]:
    """Return what trains retention gates, and the figures of a run with real eviction."""
    gates = TrainableGates(
        engine.spec,
        settings.d_gate,
        settings.tying,
        settings.bias,
        settings.seed,
        engine.decoder.weights.layers if settings.gate_input == "kv" else None,
        settings.gate,
    )
    if settings.init is not None:
        gates.start_from(load_gates(settings.init, engine.spec))
    budget = settings.held_out_budget or settings.budget

    def evaluate() -> dict[str, float]:
        # Measure the gates as the file will hold them.
        made = gates.built(as_stored(gates.file_tensors(), getattr(torch, settings.store)))
        return summary(watched.read(made, settings.policy, budget))

    ranks, scale = settings.method == "rank", None
    if ranks or settings.lambda_rank:
        # The same documents in every process, and when a run is resumed.
        first = [train[index] for index in range(min(SCALED_BY, settings.steps))]
        scale = head_scales(engine, first, settings.checkpointing)
    if ranks:
        assert scale is not None
        return RankModel(engine, gates, scale, settings.cuts, settings.rank_window), evaluate
    goal = settings.objective()
    return DistillModel(engine, gates, goal, settings.checkpointing, scale), evaluate


def _write_gates(
    settings: TrainingSettings, engine: Runtime, watched: HeldOutData
) -> tuple[WriteGateModel, _Evaluate]:
    """Return what trains write gates, and the figures of a run with real admission."""
    gates = TrainableWriteGates(engine.spec, settings.d_gate, settings.seed)
    if settings.init is not None:
        take_parameters(gates, load_write_gates(settings.init, engine.spec).tensors)

    def evaluate() -> dict[str, float]:
        # Measure the gates as the file will hold them.
        made = gates.built(as_stored(gates.file_tensors(), getattr(torch, settings.store)))
        return watched.admit(made, settings.window, settings.threshold)

    goal = settings.write_objective()
    return WriteGateModel(engine, gates, goal, settings.checkpointing), evaluate


def _arguments(settings: TrainingSettings, folder: Path) -> TrainingArguments:
    batch, accumulate = settings.batch, settings.accumulate
    return arguments_of(settings, folder, batch, accumulate, TrainingArguments)


_Arguments = TypeVar("_Arguments", bound=TrainingArguments)


def arguments_of(
    settings: Any,
    folder: Path,
    batch: int,
    accumulate: int,
    kind: type[_Arguments],
    **more: Any,
) -> _Arguments:
    """Return the Trainer's arguments of a run.

    Args:
        settings: steps, lr, schedule, warmup, weight_decay, clip, log_every, save_every, seed and
            device, as :class:`TrainingSettings` has them.
        batch, accumulate: rows of a pass, and passes of a step.
        kind: TrainingArguments, or another trainer's class, which may take ``more``.
    """
    made = kind(
        output_dir=str(folder),
        max_steps=settings.steps,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulate,
        learning_rate=settings.lr,
        lr_scheduler_type=settings.schedule,
        warmup_steps=math.ceil(settings.warmup * settings.steps),
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.clip,
        logging_steps=settings.log_every,
        logging_nan_inf_filter=False,
        save_steps=settings.save_every,
        save_total_limit=2,
        seed=settings.seed,
        # A map-style dataset is cheap to skip in, and resumes at the very next example.
        ignore_data_skip=False,
        remove_unused_columns=False,
        # Documents are lists of tensors of any shape, which processes cannot cut or pad for each
        # other.
        accelerator_config={"dispatch_batches": False, "even_batches": False},
        report_to=[],
        # The others wait while the first process reads the held-out data.
        ddp_timeout=_DAY,
        use_cpu=settings.device == "cpu" or not torch.cuda.is_available(),
        **more,
    )
    # One process is one GPU: seeing several, the Trainer would wrap the model in nn.DataParallel,
    # which cuts documents in two. (`n_gpu`, a property, chooses the device first.)
    made._n_gpu = min(made.n_gpu, 1)
    return made
