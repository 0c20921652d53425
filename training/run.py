"""One distillation run, from settings and data to a folder of gates."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from engine.errors import InputError, ModelError
from engine.gates import save_gates
from engine.gates.module import tied_gates
from engine.runtime import Engine
from eval.record import provenance
from training.card import write_card
from training.curve import draw_curve
from training.held_out import HeldOutData, summary
from training.model import DistillModel, backbone_digest
from training.settings import Settings
from training.trainable import TrainableGates
from training.trainer import HISTORY, DistillTrainer, HeldOut, History


def load_backbone(settings: Settings) -> Engine:
    """The frozen model, without gates and without a budget.

    Raises:
        ModelError: not readable, or with layers of limited attention, which the gated attention
            of training does not know.
    """
    engine = Engine.from_pretrained(
        settings.model, policy="full", device=settings.device, dtype=settings.dtype
    )
    if any(engine.spec.sliding_window):
        raise ModelError(
            f"{settings.model} has sliding-window layers; gates are trained for full attention "
            "only, choose another checkpoint"
        )
    return engine


def distill(
    settings: Settings,
    engine: Engine,
    train: Dataset[Any],
    held_out: Sequence[Mapping[str, Any]],
    data: Sequence[str] = (),
) -> dict[str, Any]:
    """Train gates and write them with their history, curve and card.

    Args:
        train: example n of the run, whole documents; at least steps x batch x accumulate x
            processes of them.
        held_out: examples for evaluation under real eviction.
        data: what the card names as training data.

    Returns:
        What ``gates.json`` says.

    Raises:
        InputError: nothing to resume.
    """
    folder = Path(settings.output)
    folder.mkdir(parents=True, exist_ok=True)
    last = get_last_checkpoint(str(folder)) if settings.resume else None
    if settings.resume and last is None:
        raise InputError(f"no checkpoint in {folder} to resume from; leave --resume out")
    if not settings.resume:
        (folder / HISTORY).unlink(missing_ok=True)
    before = backbone_digest(engine)
    gates = TrainableGates(
        engine.spec, settings.d_gate, settings.tying, settings.bias, settings.seed,
        engine.decoder.weights.layers if settings.gate_input == "kv" else None,
    )  # fmt: skip
    model = DistillModel(engine, gates, settings.objective(), settings.checkpointing)
    watched = HeldOutData(engine, held_out)
    budget = settings.held_out_budget or settings.budget

    def evaluate() -> dict[str, float]:
        made = tied_gates(gates.file_tensors(), engine.spec)
        return summary(watched.read(made, settings.policy, budget))

    measure = HeldOut(evaluate, settings.eval_every, folder)
    trainer = DistillTrainer(
        model=model,
        args=_arguments(settings, folder),
        train_dataset=train,
        callbacks=[History(folder), *([measure] if held_out else [])],
    )
    trainer.train(resume_from_checkpoint=last)
    after = backbone_digest(engine)
    if after != before:
        raise RuntimeError("the backbone changed during training; this is a bug in mmkv")
    described = {
        **provenance(),
        "base_model": settings.model,
        "base_sha256": before,
        "trained": True,
        "settings": dataclasses.asdict(settings),
        "data": list(data),
        "results": measure.latest,
    }
    if trainer.is_world_process_zero():
        made = tied_gates(gates.file_tensors(), engine.spec)
        save_gates(made, folder, engine.spec, getattr(torch, settings.store), **described)
        history = [json.loads(line) for line in (folder / HISTORY).read_text().splitlines()]
        draw_curve(history, folder / "curve.png", settings.budget)
        write_card(folder, described)
    return described


def _arguments(settings: Settings, folder: Path) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=settings.steps,
        per_device_train_batch_size=settings.batch,
        gradient_accumulation_steps=settings.accumulate,
        learning_rate=settings.lr,
        lr_scheduler_type="cosine",
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
        # Documents are lists of tensors of any shape: no process cuts or pads those of another.
        accelerator_config={"dispatch_batches": False, "even_batches": False},
        report_to=[],
        use_cpu=settings.device == "cpu" or not torch.cuda.is_available(),
    )
