"""``python -m training.llava``: train a vision adapter for SmolLM2-135M.

``train --language-model FOLDER --output FOLDER`` trains tower and projector beside the frozen
language model; ``join --language-model FOLDER --output FOLDER`` writes a LLaVA checkpoint of the
language model and an adapter, by default assets/smollm2-llava of a checkout. Neither downloads
anything: ``mmkv pull smollm2-135m`` fetches the language model, ``mmkv pull smollm2-llava`` joins
it, too. Training needs the ``train`` extra and easy-VQA's pictures. It has two phases of Hugging
Face's Trainer, each with its own checkpoints.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.utils.data import Dataset, SequentialSampler
from transformers import TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from mmkv.engine.errors import InputError, MmkvError, ModelError, one_line
from mmkv.engine.model.fingerprint import fingerprint
from mmkv.training.data.scenes import Split
from mmkv.training.folder import Stopping, first_process
from mmkv.training.llava.adapter import LlavaAdapter, save, vision_config, with_image_token
from mmkv.training.llava.pictures import EasyVQA, PictureTurn, easy_vqa_folder, talk
from mmkv.training.llava.teach import Answers, Eyes, Language, WordTable, install
from mmkv.training.measure.record import provenance, require_output
from mmkv.training.run import StepTrainer

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m mmkv.training.llava", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    join = commands.add_parser("join", help="write a LLaVA checkpoint")
    train = commands.add_parser("train", help="train an adapter")
    for command in (join, train):
        command.add_argument("--language-model", type=Path, required=True, help="folder")
        command.add_argument("--output", type=Path, required=True, help="folder to write")
    join.add_argument(
        "--adapter",
        type=Path,
        help="folder that train wrote; else assets/smollm2-llava of a checkout",
    )
    train.add_argument("--easy-vqa", type=Path, help="its folder data; else the package's")
    train.add_argument("--words-steps", type=int, default=500, help="through the language model")
    train.add_argument("--words-batch", type=int, default=8, help="talks a step")
    train.add_argument("--words-lr", type=float, default=6e-3)
    train.add_argument("--eyes-steps", type=int, default=5000, help="pictures alone")
    train.add_argument("--eyes-batch", type=int, default=64, help="pictures a step")
    train.add_argument("--eyes-lr", type=float, default=1e-3)
    train.add_argument("--width", type=int, default=192, help="of the tower")
    train.add_argument("--layers", type=int, default=4, help="of the tower")
    train.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    train.add_argument("--held-out", type=int, default=100, help="talks to measure on at the end")
    train.add_argument("--seed", type=int, default=0)
    train.add_argument("--threads", type=int, default=0, help="torch threads, 0 for its default")
    train.add_argument("--save-every", type=int, default=100, help="steps between checkpoints")
    train.add_argument("--resume", action="store_true", help="continue from the last checkpoint")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    """Run the program and return the exit code."""
    args = arguments(given)
    try:
        if args.command == "join":
            from mmkv.training.llava.adapter import EXAMPLE, bundled_adapter, join

            adapter = args.adapter or bundled_adapter()
            try:
                join(adapter, args.language_model, args.output, _note)
            except (ValueError, KeyError, TypeError) as error:  # transformers', of odd files
                raise ModelError(
                    f"{args.language_model} or {adapter} is not what join reads ({error}); "
                    "name a Llama's checkpoint and what train wrote"
                ) from error
            asked = f'--image {args.output / EXAMPLE} -p "what is in the third cell?"'
            print(f"wrote {args.output}; ask it: mmkv chat {args.output} {asked}")
            return 0
        if not importlib.util.find_spec("accelerate"):
            raise InputError("training needs the train extra: pip install 'mmkv[train]'")

        results: dict[str, Any] = train(args)
        print(json.dumps(results))
    except (MmkvError, OSError) as error:
        print(f"mmkv.training.llava: error: {one_line(str(error))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("mmkv.training.llava: interrupted; go on with --resume", file=sys.stderr)
        return 130
    return 0


def _note(line: str) -> None:
    print(f"mmkv.training.llava: {line}", file=sys.stderr)


_APART = 10**6  # seeds of talks between two phases
_TURNS = 6  # questions of a talk, at most
_FREE = {"resume", "threads", "save_every", "output", "command", "held_out"}


class Talks(Dataset[list[PictureTurn]]):
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

    def __getitem__(self, index: int) -> list[PictureTurn]:
        if index >= len(self):
            raise IndexError(index)
        step = index // self.batch
        turns = self.turns or (1 if 2 * step < self.steps else 1 + step % _TURNS)
        return talk(self.first + index, self.split, self.easy, turns)


class Phase(StepTrainer):
    """A Trainer that reads talks in order, and adds the module's figures to each log line."""

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return SequentialSampler(train_dataset or self.train_dataset)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the figures since the last line."""
        if "loss" in logs:
            logs |= self.model.figures()
        super().log(logs, start_time)


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
    adapter = LlavaAdapter(vision_config(args.width, args.layers), language.model.config)
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
            f"cannot read a language model in {folder}: {error}; `mmkv pull smollm2-135m` fetches "
            "one"
        ) from error
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return Language(model.to(device), with_image_token(tokenizer))


def phase(
    name: str, module: Answers | Eyes, data: Talks, args: argparse.Namespace, lr: float
) -> None:
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
        data_collator=lambda examples: {
            "examples": examples,
            "units": torch.tensor([module.count(examples)], dtype=torch.float64),
        },
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


if __name__ == "__main__":
    sys.exit(main())
