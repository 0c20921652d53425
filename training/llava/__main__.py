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
import math
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.utils.data import Dataset, SequentialSampler
from transformers import TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from mmkv.engine.errors import InputError, MmkvError, ModelError, one_line
from mmkv.engine.model.fingerprint import fingerprint
from mmkv.training.data.labels import IGNORED
from mmkv.training.data.scenes import Split
from mmkv.training.folder import Stopping, first_process
from mmkv.training.llava.adapter import (
    CHAT_TEMPLATE,
    IMAGE_TOKEN,
    LlavaAdapter,
    save,
    vision_config,
    with_image_token,
)
from mmkv.training.llava.pictures import (
    PLACES,
    SIDE,
    EasyVQA,
    PictureTurn,
    Shown,
    all_names,
    easy_vqa_folder,
    talk,
)
from mmkv.training.measure.record import provenance, require_output
from mmkv.training.measure.teacher_forced import spans
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


def opening(tokenizer: Any) -> str:
    """Return what every chat begins with: the template's own system message."""
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": ""}], chat_template=CHAT_TEMPLATE, tokenize=False
    )
    return str(rendered[: rendered.rindex("<|im_start|>")])


def encode(
    turns: Sequence[PictureTurn], tokenizer: Any
) -> tuple[list[int], list[int], list[Shown]]:
    """Return ids and labels of a talk behind its opening, and its pictures.

    They are those of the chat template and LLaVA's processor.
    """

    def tokens(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    ids: list[int] = []
    labels: list[int] = []
    shown: list[Shown] = []
    for turn in turns:
        picture = IMAGE_TOKEN * SIDE**2 + "\n" if turn.shown else ""
        shown += [turn.shown] if turn.shown else []
        question = f"<|im_start|>user\n{picture}{turn.question.text}<|im_end|>\n"
        asked = tokens(f"{question}<|im_start|>assistant\n")
        said, end = tokens(turn.question.answer + "<|im_end|>"), tokens("\n")
        ids += asked + said + end
        labels += [IGNORED] * len(asked) + said + [IGNORED] * len(end)
    return ids, labels, shown


class Language:
    """The frozen language model; the opening's keys and values are computed once.

    Args:
        tokenizer: with an image token.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model, self.tokenizer = model.requires_grad_(False).eval(), tokenizer
        self.embed: Tensor = model.get_input_embeddings().weight
        self.image = tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)
        ids = torch.tensor([self.ids(opening(tokenizer))], device=self.embed.device)
        with torch.no_grad():
            held = model.model(ids, use_cache=True).past_key_values
        self._held = [(layer.keys, layer.values) for layer in held.layers]

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def logits(self, ids: Tensor, visual: Tensor, wanted: Tensor) -> Tensor:
        """Return logits ``[n, vocab]`` of the token behind each wanted place.

        Args:
            ids: int64 ``[b, t]``; visual: ``[v, hidden]`` for their image tokens, in order.
            wanted: bool ``[b, t]``.
        """
        cache = transformers.DynamicCache()
        for layer, (keys, values) in enumerate(self._held):
            many = (len(ids), -1, -1, -1)
            cache.update(keys.expand(*many), values.expand(*many), layer)
        embedded = self.embed[ids]
        spots = (ids == self.image)[..., None].expand_as(embedded)
        embedded = embedded.masked_scatter(spots, visual.to(embedded.dtype))
        states = self.model.model(
            inputs_embeds=embedded, past_key_values=cache, use_cache=True
        ).last_hidden_state
        return self.model.lm_head(states[wanted]).float()


# Around the name of one thing and before the things of a grid: what it starts as, tokens.
PHRASES = {
    "before": ("The picture shows one thing. It is a", 9),
    "after": (". Short answer.", 5),
    "grid": ("Give short answers:", 4),
}
_NO_WORD = ","


def caption(shown: Shown) -> list[str]:
    """Return which entry of the table each of a picture's SIDE * SIDE tokens is."""
    if len(shown.names) == 1:
        return [*_phrase("before"), *_two(shown.names[0]), *_phrase("after")]
    things = ((place, *_two(name)) for place, name in zip(PLACES, shown.names, strict=True))
    return [*_phrase("grid"), *(entry for thing in things for entry in thing)]


def _phrase(name: str) -> list[str]:
    return [f"{name} {index}" for index in range(PHRASES[name][1])]


def _two(name: str) -> tuple[str, str]:
    first, *rest = name.split()
    return first, rest[-1] if rest else _NO_WORD


def entries() -> dict[str, str]:
    """Return the table's entries in their order, and the text that each starts as."""
    words = sorted({word for name in all_names() for word in _two(name)})
    made = {word: word if word == _NO_WORD else f" {word}" for word in (*words, *PLACES)}
    return made | {entry: text for name, (text, _) in PHRASES.items() for entry in _phrase(name)}


class WordTable(nn.Module):
    """A vector for each entry of :func:`caption`; they start as the language model's embeddings."""

    def __init__(self, language: Language) -> None:
        super().__init__()
        texts = entries()
        self.index = {name: line for line, name in enumerate(texts)}
        starts = {name: language.ids(text) for name, text in texts.items()}
        for name in PHRASES:
            for n, entry in enumerate(_phrase(name)):
                starts[entry] = [starts[entry][min(n, len(starts[entry]) - 1)]]
        rows = [language.embed[ids].float().mean(0) for ids in starts.values()]
        self.vectors = nn.Parameter(torch.stack(rows))

    def lines(self, shown: Sequence[Shown]) -> Tensor:
        """Return which line of the table each token is: int64 ``[n, SIDE * SIDE]``."""
        found = [[self.index[entry] for entry in caption(each)] for each in shown]
        return torch.tensor(found, device=self.vectors.device)

    def forward(self, shown: Sequence[Shown]) -> Tensor:
        """Return float32 ``[n, SIDE * SIDE, hidden]``."""
        return self.vectors[self.lines(shown)]


class Answers(nn.Module):
    """Cross-entropy of the answers, given what ``sight`` makes of the pictures (phase 1)."""

    def __init__(self, sight: WordTable | LlavaAdapter, language: Language) -> None:
        super().__init__()
        self.sight, self._language = sight, (language,)  # a tuple: it is not a part to be trained
        self.asked: Counter[str] = Counter()
        self.right: Counter[str] = Counter()

    def count(self, examples: Sequence[Sequence[PictureTurn]]) -> int:
        """Count the answers' tokens, over which the loss is a mean."""
        found = (encode(turns, self._language[0].tokenizer)[1] for turns in examples)
        return sum(label != IGNORED for labels in found for label in labels)

    def forward(self, examples: Sequence[Sequence[PictureTurn]]) -> dict[str, Tensor]:
        """Return the ``loss`` over the answers' tokens; counts which answers are right."""
        language = self._language[0]
        encoded = [encode(turns, language.tokenizer) for turns in examples]
        longest = max(len(ids) for ids, _, _ in encoded)
        device = language.embed.device
        pad = language.tokenizer.pad_token_id or 0
        ids = torch.tensor([i + [pad] * (longest - len(i)) for i, _, _ in encoded], device=device)
        labels = torch.tensor(
            [label + [IGNORED] * (longest - len(label)) for _, label, _ in encoded], device=device
        )
        visual = self.sight([one for _, _, shown in encoded for one in shown]).flatten(0, 1)
        wanted = F.pad(labels[:, 1:] != IGNORED, (0, 1))
        logits = language.logits(ids, visual, wanted)
        targets = labels[:, 1:][wanted[:, :-1]]
        self._count(examples, labels, (logits.argmax(-1) == targets).tolist())
        return {"loss": F.cross_entropy(logits, targets)}

    def _count(
        self, examples: Sequence[Sequence[PictureTurn]], labels: Tensor, hits: list[bool]
    ) -> None:
        at = 0
        for turns, row in zip(examples, labels.tolist(), strict=True):
            for turn, (start, stop) in zip(turns, spans(row), strict=True):
                self.asked[turn.question.kind] += 1
                self.right[turn.question.kind] += all(hits[at : at + stop - start])
                at += stop - start

    def figures(self) -> dict[str, float]:
        """Return the share of right answers by kind since the last call."""
        made = {kind: round(self.right[kind] / n, 3) for kind, n in sorted(self.asked.items())}
        self.asked.clear()
        self.right.clear()
        return made


class Eyes(nn.Module):
    """Learns which entry of the table each token of a picture is (phase 2).

    The loss is the cross-entropy over the entries, and that of each entry alone: what
    :func:`install` makes of it has no softmax, so that a logit must be positive for the right
    entry only.

    Raises:
        ModelError: the language model, and so the projector, is too narrow for the entries.
    """

    def __init__(self, adapter: LlavaAdapter, table: WordTable) -> None:
        super().__init__()
        count, units = table.vectors.shape
        if 2 * count > units:
            raise ModelError(
                f"{count} words need a hidden size of {2 * count}, and the language model has "
                f"{units}; take SmolLM2-135M-Instruct"
            )
        self.adapter = adapter
        self._table = (table,)  # a tuple: it is not a part to be trained
        width = adapter.vision_tower.config.hidden_size
        self.classify = nn.Linear(width, len(table.vectors))
        nn.init.constant_(self.classify.bias, -4.0)  # an entry is rare
        self._hits: list[float] = []

    def count(self, examples: Sequence[Sequence[PictureTurn]]) -> int:
        """Count the pictures, over which the loss is a mean."""
        return sum(turn.shown is not None for turns in examples for turn in turns)

    def forward(self, examples: Sequence[Sequence[PictureTurn]]) -> dict[str, Tensor]:
        """Return the ``loss``; notes the share of pictures whose tokens are all right."""
        shown = [turn.shown for turns in examples for turn in turns if turn.shown]
        right = self._table[0].lines(shown)
        with torch.autocast(right.device.type, torch.bfloat16):
            logits = self.classify(self.adapter.seen(shown)).float()
        self._hits.append(float((logits.argmax(-1) == right).all(-1).float().mean()))
        chosen = F.one_hot(right, logits.shape[-1]).float()
        alone = F.binary_cross_entropy_with_logits(logits, chosen, reduction="none").sum(-1)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), right.flatten()) + alone.mean()}

    def figures(self) -> dict[str, float]:
        """Return the share of pictures that were read without a mistake since the last call."""
        share = math.fsum(self._hits) / max(len(self._hits), 1)
        self._hits.clear()
        return {"pictures": round(share, 3)}


@torch.no_grad()
def install(eyes: Eyes, table: WordTable) -> None:
    """Make the projector give an entry's vector where the classifier is sure of it.

    Two units of linear_1 belong to an entry. Of a logit ``l`` they make
    ``gelu(l + 1/2) - gelu(l - 1/2)``: 1 where it is well above zero, 0 where it is well below.
    """
    first, second = (getattr(eyes.adapter.multi_modal_projector, f"linear_{n}") for n in (1, 2))
    for linear in (first, second):
        linear.weight.zero_()
        linear.bias.zero_()
    count = len(table.vectors)
    for half, sign in enumerate((1.0, -1.0)):
        units = slice(half * count, (half + 1) * count)
        first.weight[units] = eyes.classify.weight
        first.bias[units] = eyes.classify.bias + sign / 2
        second.weight[:, units] = sign * table.vectors.T


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

    1. ``words``: what the frozen language model should read of a picture. A table of vectors,
       learned through it: words, places, and the phrases around them.
    2. ``eyes``: the tower learns to say of pictures which entry of the table each token is; no
       language model runs, and nothing depends on phase 1. :func:`install` then makes LLaVA's
       projector of the classifier and the table. A projector that is trained to come near the
       vectors leaves an error that the frozen model cannot read through.

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
