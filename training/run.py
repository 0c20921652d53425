"""Run one distillation, from settings and data to a folder of gates."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import TrainingArguments

from mmkv.engine import hub
from mmkv.engine.errors import ModelError
from mmkv.engine.model.fingerprint import fingerprint
from mmkv.engine.model.gates import as_stored, save_gates
from mmkv.engine.runtime import Runtime
from mmkv.training.card import write_card
from mmkv.training.curve import draw_curve
from mmkv.training.folder import begin, first_process, history, processes, resume
from mmkv.training.held_out import HeldOutData, summary
from mmkv.training.measure.outputs import require_output
from mmkv.training.measure.record import provenance
from mmkv.training.model import DistillModel, backbone_digest
from mmkv.training.settings import Settings
from mmkv.training.stopping import Stopping
from mmkv.training.trainable import TrainableGates, TrainableWriteGates
from mmkv.training.trainer import DistillTrainer, HeldOut, History, Idle
from mmkv.training.write_model import WriteGateModel

_DAY = 24 * 3600  # seconds


def load_backbone(settings: Settings) -> Runtime:
    """Return the frozen model, without gates and without a budget.

    Raises:
        ModelError: not readable, or with layers of limited attention, which the gated attention
            of training does not know.
    """
    engine = Runtime.from_pretrained(
        settings.model, policy="full", device=own_device(settings.device), dtype=settings.dtype
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
    settings: Settings,
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
    asked = {
        **dataclasses.asdict(settings),
        "data": list(data),
        "processes": processes(),
        **(options or {}),
    }
    last = None
    if first_process():
        require_output(folder)
    if settings.resume:
        last = str(resume(folder, asked))
    else:
        begin(folder, asked)
    before = backbone_digest(engine)
    make = _write_gates if settings.method == "wgkv" else _retention_gates
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
        "base_config_sha256": hub.config_digest(settings.model),
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
        budget = settings.budget if settings.method == "retention" else None
        draw_curve(history(folder), folder / "curve.png", budget)
        write_card(folder, described)
    return described


def _idle(settings: Settings) -> Idle:
    if settings.method == "wgkv":
        return Idle("raise --lr, or give more steps")
    return Idle(
        f"a bias of {settings.bias:g} begins with gates that forget nothing, and a short run does "
        "not come away from there: take --bias 10 --lr 3e-3 --lambda-cap 16, or thousands of steps"
    )


_Evaluate = Callable[[], dict[str, float]]


def _retention_gates(
    settings: Settings, engine: Runtime, watched: HeldOutData
) -> tuple[DistillModel, _Evaluate]:
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
    budget = settings.held_out_budget or settings.budget

    def evaluate() -> dict[str, float]:
        # Measure the gates as the file will hold them.
        made = gates.built(as_stored(gates.file_tensors(), getattr(torch, settings.store)))
        return summary(watched.read(made, settings.policy, budget))

    return DistillModel(engine, gates, settings.objective(), settings.checkpointing), evaluate


def _write_gates(
    settings: Settings, engine: Runtime, watched: HeldOutData
) -> tuple[WriteGateModel, _Evaluate]:
    """Return what trains write gates, and the figures of a run with real admission."""
    gates = TrainableWriteGates(engine.spec, settings.d_gate, settings.seed)

    def evaluate() -> dict[str, float]:
        # Measure the gates as the file will hold them.
        made = gates.built(as_stored(gates.file_tensors(), getattr(torch, settings.store)))
        return watched.admit(made, settings.window, settings.threshold)

    goal = settings.write_objective()
    return WriteGateModel(engine, gates, goal, settings.checkpointing), evaluate


def _arguments(settings: Settings, folder: Path) -> TrainingArguments:
    made = TrainingArguments(
        output_dir=str(folder),
        max_steps=settings.steps,
        per_device_train_batch_size=settings.batch,
        gradient_accumulation_steps=settings.accumulate,
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
    )
    # One process is one GPU: seeing several, the Trainer would wrap the model in nn.DataParallel,
    # which cuts documents in two. (`n_gpu`, a property, chooses the device first.)
    made._n_gpu = min(made.n_gpu, 1)
    return made
