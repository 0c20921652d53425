"""Datasets for ``--data``: files, scenes and text tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mmkv.prompt.processing import Processor, load_processor
from mmkv.training.data.conversations import DataError, Row
from mmkv.training.data.examples import Encoder, Example, Examples
from mmkv.training.data.labels import IGNORED
from mmkv.training.data.mixture import Mixture
from mmkv.training.data.readers import DataSource, Report, RowFile
from mmkv.training.data.scene_data import KINDS, scene_example, scene_turns
from mmkv.training.data.scenes import Split
from mmkv.training.data.text_tasks import KINDS as TASKS
from mmkv.training.data.text_tasks import text_task
from mmkv.training.data.tokenizer import build_tokenizer

_SYNTHETIC: dict[str, tuple[str, ...]] = {"scenes": tuple(KINDS), "tasks": tuple(TASKS)}
_ROWS = 2**17  # of each kind, before they come again


@dataclass(frozen=True)
class SyntheticRow:
    """The index of one synthetic dialogue.

    Attributes:
        domain: ``scenes`` (:mod:`mmkv.training.data.scene_data`) or ``tasks``
            (:mod:`mmkv.training.data.text_tasks`).
    """

    domain: str
    kind: str
    seed: int
    split: Split

    @property
    def file(self) -> str:
        """Return the row's place in its file, for messages."""
        return f"{self.domain}:{self.kind}"

    @property
    def row(self) -> int:
        """Return the row's number in its file."""
        return self.seed


class SyntheticRows(Sequence[SyntheticRow]):
    """The synthetic dialogues of one kind as rows of a mixture."""

    def __init__(self, domain: str, kind: str, split: Split) -> None:
        if kind not in _SYNTHETIC[domain]:
            raise DataError(
                f"no {domain} of kind {kind!r}; choose one of {', '.join(_SYNTHETIC[domain])}"
            )
        self.domain, self.kind, self.split = domain, kind, split

    def __len__(self) -> int:
        return _ROWS

    def __getitem__(self, index: int) -> SyntheticRow:  # type: ignore[override]
        return SyntheticRow(self.domain, self.kind, index, self.split)


class SyntheticEncoder(Encoder):
    """An :class:`Encoder` that also encodes synthetic dialogues."""

    def __call__(self, row: Row | SyntheticRow) -> list[Example]:
        """Return the examples of a row.

        Synthetic documents are never cut: long ones are left out.
        """
        if not isinstance(row, SyntheticRow):
            return super().__call__(row)
        self.tally["rows"] += 1
        made = self._scene(row) if row.domain == "scenes" else self._task(row)
        return [made] if len(made) <= self.max_length else self._too_long(row, len(made))

    def _scene(self, row: SyntheticRow) -> Example:
        made = scene_example(scene_turns(row.kind, row.seed, row.split), self.processor.tokenizer)
        ids, labels, types = (
            made.pop(name)[0] for name in ("input_ids", "labels", "mm_token_type_ids")
        )
        return Example(ids, labels, made, types)

    def _task(self, row: SyntheticRow) -> Example:
        ids: list[int] = []
        labels: list[int] = []
        for piece in text_task(row.kind, row.seed, row.split):
            tokens = self.processor.tokenizer(piece.text, add_special_tokens=False)["input_ids"]
            ids += tokens
            labels += tokens if piece.answer else [IGNORED] * len(tokens)
        return Example(torch.tensor(ids), torch.tensor(labels))


def examples(
    model: str,
    data: Sequence[str],
    length: int,
    seed: int,
    *,
    max_length: int = 4096,
    long_chats: str = "cut",
    media_root: str | None = None,
    split: Split = "train",
    report: Report | None = None,
) -> Examples:
    """Return the first ``length`` examples of a mixture of files and scenes.

    Args:
        model: whose processor and chat template make the tokens.
        data: ``[WEIGHT*][KIND:]PATH``, ``[WEIGHT*]scenes:KIND`` or ``[WEIGHT*]tasks:KIND``, each.
        split: of scenes and tasks.
        report: gets one line per broken, cut or dropped row, up to a few per reason.

    Raises:
        DataError: a source that cannot be read.
    """
    encoder = SyntheticEncoder(load_processor(model), max_length, long_chats, report)
    sources: list[Sequence[Any]] = []
    weights = []
    for text in data:
        weight, _, rest = text.rpartition("*")
        domain, _, kind = rest.partition(":")
        if domain in _SYNTHETIC:
            if domain == "scenes":
                require_scene_tokens(encoder.processor, model)
            sources.append(SyntheticRows(domain, kind, split))
            weights.append(_weight(weight, text))
        else:
            source = DataSource.parse(text)
            sources.append(RowFile(source.path, source.kind, media_root, report=report))
            weights.append(source.weight)
    return Examples(Mixture(sources, weights, seed), encoder, length)


def _weight(text: str, source: str) -> float:
    try:
        weight = float(text or 1)
    except ValueError:
        weight = 0.0
    if weight <= 0:
        raise DataError(f"--data {source!r}: {text!r} is no weight above 0")
    return weight


def require_scene_tokens(processor: Processor, model: str) -> None:
    """Raise DataError unless the processor has the tokens that scenes are written in."""
    if build_tokenizer().get_vocab() != processor.tokenizer.get_vocab():
        raise DataError(
            f"scenes are written in the bundled model's tokens, which {model} does not use; give "
            "it files or text"
        )
