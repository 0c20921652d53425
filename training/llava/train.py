"""Train an adapter: two phases of Hugging Face's Trainer, each with its own checkpoints."""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.utils.data import Dataset, SequentialSampler
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from mmkv.engine.errors import InputError, ModelError
from mmkv.engine.model.fingerprint import fingerprint
from mmkv.training.data.scenes import Split
from mmkv.training.folder import first_process
from mmkv.training.llava.adapter import Adapter, save, vision_config, with_image_token
from mmkv.training.llava.pictures import EasyVQA, Turn, easy_vqa_folder, talk
from mmkv.training.llava.teach import Answers, Eyes, Language, WordTable, install
from mmkv.training.measure.outputs import require_output
from mmkv.training.measure.record import provenance
from mmkv.training.stopping import Stopping

_APART = 10**6  # seeds of talks between two phases
_TURNS = 6  # questions of a talk, at most
_FREE = {"resume", "threads", "save_every", "output", "command", "held_out"}


class Talks(Dataset[list[Turn]]):
    """Talks of a phase, ``batch`` for a step; those of a step are equally long.

    Args:
        turns: questions of each; 0 for one in the first half of the steps, then up to _TURNS.
    """

    def __init__(
        self, first: int, steps: int, batch: int, split: Split, easy: EasyVQA, turns: int = 0
    ) -> None:
        self.first, self.steps, self.batch = first, steps, batch
        self.split, self.easy, self.turns = split, easy, turns

    def __len__(self) -> int:
        return self.steps * self.batch

    def __getitem__(self, index: int) -> list[Turn]:
        if index >= len(self):
            raise IndexError(index)
        step = index // self.batch
        turns = self.turns or (1 if 2 * step < self.steps else 1 + step % _TURNS)
        return talk(self.first + index, self.split, self.easy, turns)


class Phase(Trainer):
    """A Trainer that reads talks in order, and adds the module's figures to each log line."""

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return SequentialSampler(train_dataset or self.train_dataset)

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
    made_by = provenance()
    data = args.easy_vqa or easy_vqa_folder()
    easy = {split: EasyVQA.of(data, split) for split in ("train", "heldout")}
    language = load_language(args.language_model, getattr(torch, args.dtype))
    torch.manual_seed(args.seed)
    table = WordTable(language)
    adapter = Adapter(vision_config(args.width, args.layers), language.model.config)
    eyes, answers = Eyes(adapter, table), Answers(table, language)
    first = args.seed * 10 * _APART
    for module in (eyes, answers):
        module.to(language.embed.device)
    talks = Talks(first, args.words_steps, args.words_batch, "train", easy["train"])
    phase("words", answers, talks, args, args.words_lr)
    talks = Talks(first + _APART, args.eyes_steps, args.eyes_batch, "train", easy["train"], 1)
    phase("eyes", eyes, talks, args, args.eyes_lr)
    install(eyes, table)
    held = Talks(first, args.held_out, 1, "heldout", easy["heldout"], _TURNS)
    rounded = copy.deepcopy(adapter).to(torch.bfloat16).float()
    results = {
        "words": measure(answers, held),
        "adapter": measure(Answers(rounded, language), held),
    }
    if first_process():
        save(
            adapter,
            args.output,
            {
                **made_by,
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
            f"cannot read a language model in {folder}: {error}; `python -m mmkv.eval.smollm2 "
            "FOLDER` fetches SmolLM2-135M-Instruct"
        ) from error
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return Language(model.to(device), with_image_token(tokenizer))


def phase(name: str, module: nn.Module, data: Talks, args: argparse.Namespace, lr: float) -> None:
    """Train one module; a phase that a resumed run has behind it is only loaded."""
    folder = args.output / name
    if data.steps == 0:
        return
    last = get_last_checkpoint(str(folder)) if args.resume and folder.is_dir() else None
    stopping = Stopping()
    trainer = Phase(
        model=module,
        args=TrainingArguments(
            output_dir=str(folder),
            max_steps=data.steps,
            per_device_train_batch_size=data.batch,
            learning_rate=lr,
            lr_scheduler_type="cosine",
            warmup_steps=max(1, min(50, data.steps // 10)),
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
def measure(module: Answers, talks: Talks) -> dict[str, Any]:
    """Count right answers, given the true history, by kind of question."""
    module.figures()
    for index in range(len(talks)):
        module([talks[index]])
    asked, right = module.asked, module.right
    return {kind: {"right": right[kind], "of": asked[kind]} for kind in sorted(asked)}
