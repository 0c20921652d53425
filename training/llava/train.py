"""Train an adapter: three phases of Hugging Face's Trainer, each with its own checkpoints."""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from engine.errors import InputError, ModelError
from engine.model.fingerprint import fingerprint
from mmkv.data.scenes import Split
from mmkv.measure.outputs import require_output
from mmkv.measure.record import provenance
from training.folder import first_process
from training.llava.adapter import Adapter, load, save, vision_config, with_image_token
from training.llava.pictures import EasyVQA, Turn, easy_vqa_folder, talk
from training.llava.teach import Answers, Eyes, Language, WordTable
from training.stopping import Stopping

_APART = 10**6  # seeds of talks between two phases
_PICTURES = 4  # talks of the phase without a language model, for one of the others
_FREE = {"resume", "threads", "save_every", "output", "command", "held_out"}


class Talks(Dataset[list[Turn]]):
    """Talk n of a phase."""

    def __init__(self, first: int, count: int, split: Split, easy: EasyVQA) -> None:
        self.first, self.count, self.split, self.easy = first, count, split, easy

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> list[Turn]:
        if index >= self.count:
            raise IndexError(index)
        return talk(self.first + index, self.split, self.easy)


class Phase(Trainer):
    """A Trainer that adds the module's figures to each log line."""

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the figures since the last line."""
        if "loss" in logs:
            logs |= self.model.figures()
        super().log(logs, start_time)


def _together(examples: list[list[Turn]]) -> dict[str, list[list[Turn]]]:
    return {"examples": examples}


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Train and write an adapter to ``args.output``; return what was measured.

    Raises:
        InputError: no data, or a folder that cannot be written or is another run's.
        ModelError: no language model that this can be trained for.
    """
    if args.threads:
        torch.set_num_threads(args.threads)
    require_output(args.output)
    settings = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(args).items()
        if name not in _FREE
    }
    _begin(args.output, settings, args.resume)
    data = args.easy_vqa or easy_vqa_folder()
    easy = {split: EasyVQA.of(data, split) for split in ("train", "heldout")}
    language = load_language(args.language_model, getattr(torch, args.dtype))
    torch.manual_seed(args.seed)
    table = WordTable(language)
    if args.init:
        adapter = load(args.init, language.model.config)
    else:
        adapter = Adapter(vision_config(args.width, args.layers), language.model.config)
    device = language.embed.device
    first = args.seed * 10 * _APART

    def run(name: str, module: Any, steps: int, batch: int, lr: float, start: int) -> None:
        data = Talks(first + start * _APART, steps * batch, "train", easy["train"])
        module.to(device)
        phase(name, module, data, args, steps, batch, lr)

    run("words", Answers(table, language), args.words_steps, args.batch, args.words_lr, 0)
    many = args.batch * _PICTURES
    run("eyes", Eyes(adapter, table), args.eyes_steps, many, args.eyes_lr, 1)
    run("answers", Answers(adapter, language), args.answers_steps, args.batch, args.answers_lr, 2)
    rounded = copy.deepcopy(adapter).to(torch.bfloat16).float()
    held = Talks(first, args.held_out, "heldout", easy["heldout"])
    results = {
        "words": measure(Answers(table, language), held, args.batch),
        "adapter": measure(Answers(rounded, language), held, args.batch),
    }
    if first_process():
        save(
            adapter,
            args.output,
            {
                **provenance(),
                "base_model": "SmolLM2-135M-Instruct",
                "base_fingerprint": fingerprint(str(args.language_model)),
                "settings": settings,
                "results": results,
            },
        )
    return results


def _begin(folder: Path, settings: dict[str, Any], resume: bool) -> None:
    """Write down what a run was asked, or check that a resumed one is asked the same."""
    file = folder / "run.json"
    if not resume:
        if any(folder.glob("*/checkpoint-*")):
            raise InputError(
                f"{folder} holds checkpoints of a run; continue it with --resume, or give another "
                "--output"
            )
        file.write_text(json.dumps(settings, indent=1) + "\n")
        return
    try:
        before = json.loads(file.read_text()) if file.is_file() else {}
    except ValueError as error:
        raise InputError(f"{file} is damaged ({error}); give another --output") from error
    changed = sorted(k for k in settings if settings[k] != before.get(k))
    if changed:
        raise InputError(
            f"the run in {folder} was asked something else ({', '.join(changed)}); give the same "
            "options, or another --output"
        )


def load_language(folder: Path, dtype: torch.dtype) -> Language:
    """Load the frozen language model. Raises ModelError."""
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"cannot read a language model in {folder}: {error}; `python -m eval.smollm2 FOLDER` "
            "fetches SmolLM2-135M-Instruct"
        ) from error
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return Language(model.to(device), with_image_token(tokenizer))


def phase(
    name: str,
    module: nn.Module,
    data: Talks,
    args: argparse.Namespace,
    steps: int,
    batch: int,
    lr: float,
) -> None:
    """Train one module for ``steps``; a phase that a resumed run has behind it is only loaded."""
    folder = args.output / name
    if steps == 0:
        return
    last = get_last_checkpoint(str(folder)) if args.resume and folder.is_dir() else None
    stopping = Stopping()
    trainer = Phase(
        model=module,
        args=TrainingArguments(
            output_dir=str(folder),
            max_steps=steps,
            per_device_train_batch_size=batch,
            learning_rate=lr,
            lr_scheduler_type="cosine",
            warmup_steps=max(1, min(20, steps // 10)),
            weight_decay=0.0,
            adam_beta2=0.98,  # the runs are short
            max_grad_norm=1.0,
            logging_steps=10,
            save_steps=args.save_every,
            save_total_limit=1,
            seed=args.seed,
            remove_unused_columns=False,
            accelerator_config={"dispatch_batches": False, "even_batches": False},
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
        ),
        train_dataset=data,
        data_collator=_together,
        callbacks=[stopping],
    )
    with stopping:
        trainer.train(resume_from_checkpoint=last)
    trainer.save_state()
    (folder / "log.json").write_text(json.dumps(trainer.state.log_history, indent=0) + "\n")


@torch.no_grad()
def measure(module: Answers, talks: Talks, batch: int) -> dict[str, Any]:
    """Count right answers, given the true history, by kind of question."""
    examples = [talks[index] for index in range(len(talks))]
    for start in range(0, len(examples), batch):
        module(examples[start : start + batch])
    asked, right = module.asked, module.right
    rows = {kind: {"right": right[kind], "of": asked[kind]} for kind in sorted(asked)}
    return rows
