"""Run one training under compression, from settings and data to an adapter that mmkv merges.

``distill`` brings the compressed model's predictions towards the full cache's (G-KV, appendix C).
``grpo`` rewards replies that are right, drawn on the bounded cache (G-KV, section 6;
:mod:`mmkv.training.grpo`). Hugging Face's Trainer runs the steps, PEFT holds the adapter.
"""

from __future__ import annotations

import random
import re
import shutil
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from huggingface_hub import ModelCard, ModelCardData
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset
from transformers import TrainerCallback, TrainingArguments

from mmkv.engine.config import EngineConfig
from mmkv.engine.errors import InputError
from mmkv.engine.model.source import config_digest, locate
from mmkv.engine.paths import whole_file
from mmkv.training.compressed import CompressedModel, budget_of
from mmkv.training.data.labels import predicted
from mmkv.training.folder import Stopping, open_run
from mmkv.training.measure.record import page_text, provenance
from mmkv.training.measure.tables import pipe_table
from mmkv.training.measure.teacher_forced import spans
from mmkv.training.run import DistillTrainer, History, arguments_of, own_device
from mmkv.training.settings import AdaptSettings

PARTS = dict.fromkeys(("kl", "agreement", "held", "mask_bytes"), "documents")
_BLOCK = 128  # tokens whose probabilities stand at once


def exact(reply: str, answer: str) -> bool:
    """Return whether a reply is the answer, spaces around it left out."""
    return reply.strip() == answer.strip()


def contains(reply: str, answer: str) -> bool:
    """Return whether a reply has the answer in it."""
    return answer.strip() in reply


def number(reply: str, answer: str) -> bool:
    """Return whether the last number of a reply is that of the answer."""
    found = [re.findall(r"-?\d[\d,]*(?:\.\d+)?", text) for text in (reply, answer)]
    if not all(found):
        return False
    first, second = (float(numbers[-1].replace(",", "")) for numbers in found)
    return first == second


REWARDS: Mapping[str, Callable[[str, str], bool]] = {
    "exact": exact,
    "contains": contains,
    "number": number,
}


def load_compressed(settings: AdaptSettings) -> CompressedModel:
    """Return the model to be trained. Raises ModelError, GateError, PolicyError, InputError."""
    config = EngineConfig(
        model=settings.model,
        policy=settings.policy,
        gates=settings.gates,
        prefill_chunk=settings.prefill_chunk,
        evict_every=settings.interval,
    )
    return CompressedModel(
        settings.model,
        config,
        None if settings.full else (settings.rank, settings.alpha, settings.targets),
        settings.seed,
        settings.dtype,
        own_device(settings.device),
        settings.checkpointing,
    )


def soft_target_loss(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Return the mean over tokens of ``temperature^2 KL(teacher || student)`` (G-KV, eq. 7).

    Args:
        student, teacher: logits ``[n, vocab]``, which are divided by ``temperature``.
    """

    def part(ours: Tensor, theirs: Tensor) -> Tensor:
        ours, theirs = (F.log_softmax(x / temperature, -1) for x in (ours, theirs))
        return F.kl_div(ours, theirs, reduction="sum", log_target=True)

    total = student.new_zeros(())
    for ours, theirs in zip(student.split(_BLOCK), teacher.split(_BLOCK), strict=True):
        total = total + checkpoint(part, ours, theirs, use_reentrant=False)
    return temperature**2 * total / len(student)


class AdaptTrainer(DistillTrainer):
    """Distils the full cache's predictions into the compressed model."""

    def __init__(self, compressed: CompressedModel, settings: AdaptSettings, **kwargs: Any) -> None:
        super().__init__(model=compressed.model, parts=PARTS, **kwargs)
        self._compressed, self._settings = compressed, settings

    def losses(
        self, model: nn.Module, shares: Mapping[str, Tensor], examples: list[Any]
    ) -> dict[str, Tensor]:
        """Return the loss of one document and its parts, as :data:`PARTS` names them.

        Every document weighs the same: how long a reply is that is drawn is known too late.

        ``agreement``: share of tokens whose likeliest continuation is the teacher's; ``held``:
        entries at the document's end, per layer and KV head.
        """
        (example,) = examples
        settings, compressed = self._settings, self._compressed
        if settings.replies == "teacher":
            # A function of the document and the step: a resumed run draws the same.
            seed = zlib.crc32(example["input_ids"].numpy().tobytes()) + (settings.seed << 40)
            seed += self.state.global_step << 32
            how = settings.max_reply, settings.temperature, seed
            example = compressed.answered(example, *how)
        labels = example["labels"].flatten().clone()
        labels[0] = -100
        budget = budget_of(settings.budget, len(labels))
        visible = compressed.watch(example, labels, budget)
        where, _ = predicted(labels)
        teacher = compressed.teacher_logits(example, where)
        student = compressed.logits(model, example, where, visible)
        loss = soft_target_loss(student, teacher, settings.temperature)
        held = (visible.until >= len(labels)).sum() / visible.until[..., 0].numel()
        agree = (student.argmax(-1) == teacher.argmax(-1)).float().mean()
        parts = {
            "kl": loss.detach(),
            "agreement": agree,
            "held": held.to(loss),
            "mask_bytes": torch.tensor(float(visible.nbytes)).to(loss),
        }
        return {"loss": loss * shares["documents"], **parts}


def distill_trainer(
    compressed: CompressedModel,
    settings: AdaptSettings,
    train: Dataset[Any],
    callbacks: list[TrainerCallback],
) -> AdaptTrainer:
    """Return the trainer of a run that distils; ``train``: documents."""
    args = arguments_of(settings, Path(settings.output), 1, settings.passes, TrainingArguments)
    return AdaptTrainer(compressed, settings, args=args, train_dataset=train, callbacks=callbacks)


@dataclass(frozen=True)
class CheckablePrompt:
    """A prompt whose reply can be checked.

    Attributes:
        inputs: what the processor returns for the document, without its labels.
        start, stop: where its own reply is, the end left out.
        labels: int64 ``[start]``, -100 outside of earlier replies.
        ends: ids that end a reply.
    """

    inputs: dict[str, Any]
    start: int
    stop: int
    labels: Tensor
    ends: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Tokens of the document, of which the budget may be a share."""
        return int(self.inputs["input_ids"].shape[1])

    @property
    def answer(self) -> list[int]:
        """Ids of the right reply, its end left out."""
        found: list[int] = self.inputs["input_ids"][0, self.start : self.stop].tolist()
        return found


def question_of(example: Mapping[str, Any], seed: int, eos: Sequence[int]) -> CheckablePrompt:
    """Take one reply of a document, drawn by ``seed``, as what is asked.

    A reply ends with an end token of the model, or else with the token that follows it in the
    document.

    Raises:
        InputError: no reply is known to end: the document has none, or ends with it.
    """
    ids, labels = (example[name].flatten() for name in ("input_ids", "labels"))
    found: list[tuple[int, int, tuple[int, ...]]] = []
    for start, stop in spans(labels.tolist()):
        if start and stop - start > 1 and int(ids[stop - 1]) in eos:
            found.append((start, stop - 1, tuple(eos)))
        elif start and stop < len(ids):
            found.append((start, stop, (*eos, int(ids[stop]))))
    if not found:
        raise InputError(
            "a document of --data has no reply with an end, which grpo needs; give it chats, or "
            "texts with questions"
        )
    start, stop, ends = random.Random(seed).choice(found)
    inputs = {name: value for name, value in example.items() if name != "labels"}
    before = labels[:start].clone()
    before[0] = -100
    return CheckablePrompt(inputs, start, stop, before, ends)


def adapt(
    settings: AdaptSettings,
    compressed: CompressedModel,
    train: Dataset[Any],
    make_trainer: Callable[..., Any],
    data: tuple[str, ...] = (),
    options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Train and write the adapter, or the whole model, with its history and card.

    Args:
        train: example n of the run; at least steps x documents of them.
        make_trainer: makes the trainer of the settings' method, as :func:`distill_trainer` does.
        data: what the card names as training data; options: how it was read.

    Returns:
        What ``adapt.json`` says.

    Raises:
        InputError: nothing to resume, other settings than the run's that is resumed, a new run in
            the folder of another, or a folder that cannot be written.
        KeyboardInterrupt: Ctrl-C was pressed; a checkpoint holds the run so far.
    """
    folder = Path(settings.output)
    last = open_run(settings, data, options or {})
    stopping = Stopping()
    trainer = make_trainer(compressed, settings, train, [History(folder), stopping])
    with stopping:
        trainer.train(resume_from_checkpoint=last)
    described = {
        **provenance(),
        "base_model": settings.model,
        "base_config_sha256": config_digest(settings.model),
        "settings": settings.described(),
        "data": list(data),
        "data_options": dict(options or {}),
    }
    if trainer.is_world_process_zero():
        _save(compressed, settings, folder)
        with whole_file(folder / "adapt.json") as draft:
            draft.write_text(page_text(described))
        _write_card(folder, settings, described)
    return described


def _save(compressed: CompressedModel, settings: AdaptSettings, folder: Path) -> None:
    """Write the adapter as PEFT does, or a whole model that mmkv and transformers load."""
    compressed.model.save_pretrained(folder)
    if not settings.full:
        return
    source = Path(locate(settings.model))
    for path in sorted(source.iterdir()) if source.is_dir() else []:
        # Tokenizer, template and what reads pictures.
        if path.suffix in (".json", ".jinja", ".txt", ".model") and not (
            (folder / path.name).exists() or path.name.endswith(".index.json")
        ):
            shutil.copy(path, folder / path.name)


_BODY = """---
{front}
---

# {model}, trained under compression

{what} with the policy `{policy}` at a budget of {budget}: `{command}` (mmkv {version}, commit
{commit}).

```sh
mmkv chat {usage} --policy {policy} --budget {entries}
```

## Data

{data}

## Settings

{settings}
"""


def _write_card(folder: Path, settings: AdaptSettings, described: Mapping[str, Any]) -> None:
    """Write ``README.md``."""
    front = ModelCardData(
        library_name="transformers" if settings.full else "peft",
        base_model=settings.model if not Path(settings.model).exists() else None,
        tags=["mmkv", "kv-cache"],
    )
    share = budget_of(settings.budget, 1) != budget_of(settings.budget, 2**20)
    gates = f" --gates {settings.gates}" if settings.gates else ""
    usage = "THIS_FOLDER" if settings.full else f"{settings.model} --adapter THIS_FOLDER"
    text = _BODY.format(
        front=front.to_yaml(),
        model=Path(settings.model).name,
        what="All text weights" if settings.full else "A LoRA adapter, trained",
        policy=settings.policy,
        budget=f"{settings.budget} of each document" if share else f"{settings.budget} entries",
        command=described["command"],
        version=described["versions"].get("mmkv"),
        commit=described["commit"] or "unknown",
        usage=usage + gates,
        entries="M" if share else settings.budget,
        data="\n".join(f"- `{source}`" for source in described["data"]) or "- not stated",
        settings=pipe_table(("name", "value"), list(described["settings"].items())),
    )
    ModelCard(text).save(folder / "README.md")
