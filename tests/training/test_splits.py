"""The gradient of a step does not depend on how its documents are cut into passes and processes.

``python -m tests.training.test_splits FOLDER LANGUAGE EASY``, in each of two processes, writes the
gradients of their half of the documents.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainingArguments

from mmkv.engine.runtime import Runtime
from mmkv.resources import bundled_model
from mmkv.training import pretrain_tiny
from mmkv.training.data.examples import examples
from mmkv.training.data.scene_encoding import build_tokenizer, collate, encode
from mmkv.training.folder import first_process, processes
from mmkv.training.llava.__main__ import Answers, Eyes, Phase, WordTable, load_language
from mmkv.training.llava.adapter import LlavaAdapter, vision_config
from mmkv.training.llava.pictures import EasyVQA, talk
from mmkv.training.model import DistillModel, WriteGateModel
from mmkv.training.run import DistillTrainer, StepTrainer, arguments_of
from mmkv.training.settings import TrainingSettings
from mmkv.training.student import TrainableGates, TrainableWriteGates
from tests.support.factories import checkpoint, make_turn

pytest_plugins = ("tests.support.llava_fixtures",)

DOCUMENTS, MODEL = 4, str(bundled_model())
CLIPPED = 1e9  # no gradient is as large
Made = tuple[Trainer, Any]  # and the module whose gradients count


def gates(batch: int, accumulate: int, folder: Path, **changes: Any) -> Made:
    """Documents of 2, 28, 4 (and a first label) and 13 targets, one shorter than the budget."""
    settings = TrainingSettings(
        model="m", output=str(folder), steps=1, batch=batch, accumulate=accumulate, clip=CLIPPED,
        device="cpu", bias=1.0, d_gate=24, budget=6.0, window=4, **changes,
    )  # fmt: skip
    engine = Runtime.from_pretrained(
        checkpoint("qwen3"), policy="full", dtype="float32", device="cpu"
    )
    rows = []
    for seed, (tokens, targets) in enumerate(((31, 2), (30, 28), (5, 5), (20, 13))):
        row = make_turn("qwen3", [tokens], seed)
        labels = row["input_ids"].clone()
        labels[:, : tokens - targets] = -100
        rows.append({**row, "labels": labels})
    model: Any
    if settings.method == "wgkv":
        made = TrainableWriteGates(engine.spec, settings.d_gate, 0)
        model = WriteGateModel(engine, made, settings.write_objective())
    else:
        kept = TrainableGates(engine.spec, settings.d_gate, settings.tying, settings.bias, 0)
        model = DistillModel(engine, kept, settings.objective())
    args = arguments_of(settings, folder, batch, accumulate, TrainingArguments)
    return DistillTrainer(model=model, args=args, train_dataset=rows), model


def relative(batch: int, accumulate: int, folder: Path, *_: Path) -> Made:
    return gates(batch, accumulate, folder)


def per_head(batch: int, accumulate: int, folder: Path, *_: Path) -> Made:
    return gates(batch, accumulate, folder, scope="head", normaliser="tt", gating="logit-scale")


def write_gates(batch: int, accumulate: int, folder: Path, *_: Path) -> Made:
    return gates(batch, accumulate, folder, method="wgkv", lambda_sparse=1.0)


def llava(kind: str, batch: int, accumulate: int, folder: Path, given: tuple[Path, ...]) -> Made:
    language, easy = load_language(given[0], torch.float32), EasyVQA.of(given[1], "train")
    torch.manual_seed(0)
    table = WordTable(language)
    module: Any = Answers(table, language)
    if kind == "eyes":
        module = Eyes(LlavaAdapter(vision_config(16, 1), language.model.config), table)
    talks = [talk(seed, "train", easy, 1 + seed) for seed in range(DOCUMENTS)]
    args = TrainingArguments(**plain(batch, accumulate, folder))

    def together(rows: list[Any]) -> dict[str, Any]:
        units = torch.tensor([module.count(rows)], dtype=torch.float64)
        return {"examples": rows, "units": units}

    return Phase(module, args, together, talks), module


def answers(batch: int, accumulate: int, folder: Path, *given: Path) -> Made:
    return llava("answers", batch, accumulate, folder, given)


def eyes(batch: int, accumulate: int, folder: Path, *given: Path) -> Made:
    return llava("eyes", batch, accumulate, folder, given)


def plain(batch: int, accumulate: int, folder: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder), "max_steps": 1, "use_cpu": True, "report_to": [],
        "per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulate,
        "max_grad_norm": CLIPPED, "remove_unused_columns": False, "save_strategy": "no",
        "accelerator_config": {"dispatch_batches": False, "even_batches": False},
    }  # fmt: skip


def bundled(batch: int, accumulate: int, folder: Path, *_: Path) -> Made:
    """Whole batches of one and of two dialogues, as pretrain_tiny makes them."""
    tokenizer = build_tokenizer()
    model = pretrain_tiny.build_model(tokenizer, 0)
    talks = [
        encode(pretrain_tiny.lesson(seed, 1, 1 + seed), tokenizer) for seed in range(DOCUMENTS)
    ]
    rows = [collate(talks[at : at + batch], tokenizer) for at in range(0, DOCUMENTS, batch)]
    args = TrainingArguments(**plain(1, accumulate, folder))
    return StepTrainer(model, args, pretrain_tiny.only, rows), model


def adapter(folder: Path, **changes: Any) -> Made:
    """One document a pass, always; the processes share the passes."""
    from mmkv.training.adapt_run import AdaptSettings, AdaptTrainer, load_compressed

    settings = AdaptSettings(
        MODEL, str(folder), budget="1/4", documents=DOCUMENTS, max_reply=6, steps=1,
        clip=CLIPPED, dtype="float32", device="cpu", **changes,
    )  # fmt: skip
    compressed = load_compressed(settings)
    rows = examples(MODEL, ["scenes:dense"], DOCUMENTS, 0)
    args = arguments_of(settings, folder, 1, settings.passes, TrainingArguments)
    return AdaptTrainer(compressed, settings, args=args, train_dataset=rows), compressed.model


def adapted(batch: int, accumulate: int, folder: Path, *_: Path) -> Made:
    return adapter(folder)


def grpo(batch: int, accumulate: int, folder: Path, *_: Path) -> Made:
    """Replies of 2 and of 6 tokens, of which one is right."""
    from mmkv.training import grpo as own
    from mmkv.training.adapt_run import AdaptSettings, load_compressed

    settings = AdaptSettings(
        MODEL, str(folder), method="grpo", budget="1/4", documents=2, group=2, max_reply=6,
        steps=1, clip=CLIPPED, dtype="float32", device="cpu",
    )  # fmt: skip
    compressed = load_compressed(settings)
    trainer = own.grpo_trainer(compressed, settings, examples(MODEL, ["scenes:dense"], 4, 0), [])

    def draw(model: Any, question: Any, seeds: Any, *_: Any) -> list[Any]:
        from mmkv.training.compressed import Visible

        end, tokens = question.ends[0], question.start + settings.max_reply
        until = torch.full((6, 3, tokens), tokens, dtype=torch.int32)
        visible = Visible(until, model.spec.entry_index)
        replies = [[20, end], [21, 22, 23, 24, 25, end]]
        return [
            own.Rollout(question, row, visible, True, float(at == 0))
            for at, row in enumerate(replies)
        ]

    trainer.draw = draw
    return trainer, compressed.model


# By name: what makes a step of so many documents a pass; and whether a pass has one always.
LOSSES: dict[str, Callable[..., Made]] = {
    one.__name__: one for one in (relative, per_head, write_gates, answers, eyes, bundled)
}
ALONE: dict[str, Callable[..., Made]] = {one.__name__: one for one in (adapted, grpo)}


def gradient(made: Made) -> list[Tensor]:
    """Return the gradients of a run's only step, parameter by parameter."""
    trainer, module = made
    found: list[Tensor] = []

    class Catch(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            found.extend(p.grad.clone() for p in module.parameters() if p.grad is not None)

    trainer.add_callback(Catch)
    trainer.train()
    return found


def require_same(found: list[Tensor], wanted: list[Tensor], within: float) -> None:
    assert found and len(found) == len(wanted)
    size = torch.stack([each.norm() for each in wanted]).norm()
    apart = torch.stack([(a - b).norm() for a, b in zip(found, wanted, strict=True)]).norm()
    assert size > 0 and float(apart / size) < within


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "bundled"])
def test_passes(name: str, tmp_path: Path, language: Path, easy: Path) -> None:
    def of(batch: int, accumulate: int) -> list[Tensor]:
        return gradient(LOSSES[name](batch, accumulate, tmp_path, language, easy))

    apart, together = of(1, DOCUMENTS), of(DOCUMENTS, 1)
    require_same(apart, together, 1e-2 if name == "eyes" else 1e-5)


@pytest.mark.long(reason="two processes train for a minute")
def test_processes(tmp_path: Path, language: Path, easy: Path) -> None:
    command = (
        "-m torch.distributed.run --nproc-per-node 2 --standalone -m tests.training.test_splits"
    )
    given = [str(one) for one in (tmp_path, language, easy)]
    done = subprocess.run(
        [sys.executable, *command.split(), *given], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = torch.load(tmp_path / "gradients.pt", weights_only=True)
    for name, make in (LOSSES | ALONE).items():
        wanted = gradient(make(DOCUMENTS, 1, tmp_path / name, language, easy))
        for cut in found[name]:
            require_same(cut, wanted, 1e-2 if name == "eyes" else 1e-4)


def main(folder: Path, *given: Path) -> None:
    """Write the gradients of every loss, with both ways to cut this process's half."""
    assert processes() == 2
    made = {
        name: [gradient(make(*cut, folder / name, *given)) for cut in ((1, 2), (2, 1))]
        for name, make in LOSSES.items()
    }
    made |= {name: [gradient(make(1, 2, folder / name, *given))] for name, make in ALONE.items()}
    if first_process():
        torch.save(made, folder / "gradients.pt")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
