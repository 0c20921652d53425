"""What ``--data`` names, as a dataset of documents for the trainer: files, and drawn scenes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eval.scenes import Split
from mmkv.processing import Processor, load_processor
from training.conversations import DataError, Row
from training.examples import Encoder, Example, Examples
from training.mixture import Mixture
from training.readers import DataSource, Report, RowFile
from training.scene_data import KINDS, scene_example, scene_turns
from training.tiny_model import build_tokenizer

_SCENES = "scenes:"
_DIALOGUES = 2**17  # of each kind of scenes, before they come again


@dataclass(frozen=True)
class SceneDialogue:
    """A drawn dialogue before it is drawn (see :mod:`training.scene_data`)."""

    kind: str
    seed: int
    split: Split


class Scenes(Sequence[SceneDialogue]):
    """The dialogues of one kind as rows of a mixture."""

    def __init__(self, kind: str, split: Split) -> None:
        if kind not in KINDS:
            raise DataError(f"no scenes of kind {kind!r}; choose one of {', '.join(KINDS)}")
        self.kind, self.split = kind, split

    def __len__(self) -> int:
        return _DIALOGUES

    def __getitem__(self, index: int) -> SceneDialogue:  # type: ignore[override]
        return SceneDialogue(self.kind, index, self.split)


class SceneEncoder(Encoder):
    """An :class:`Encoder` that draws scenes too, for a model that reads the scenes' tokens."""

    def __call__(self, row: Row | SceneDialogue) -> list[Example]:  # type: ignore[override]
        """Examples of a row; see :class:`Encoder`."""
        if not isinstance(row, SceneDialogue):
            return super().__call__(row)
        made = scene_example(scene_turns(row.kind, row.seed, row.split), self.processor.tokenizer)
        ids, labels, types = (
            made.pop(name)[0] for name in ("input_ids", "labels", "mm_token_type_ids")
        )
        return [Example(ids, labels, made, types)]


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
    """The first ``length`` examples of a mixture of files and scenes.

    Args:
        model: whose processor and chat template make the tokens.
        data: ``[WEIGHT*][KIND:]PATH`` or ``[WEIGHT*]scenes:KIND``, each.
        split: of scenes.
        report: gets one line per broken, cut or dropped row, up to a few per reason.

    Raises:
        DataError: a source that cannot be read.
    """
    encoder = SceneEncoder(load_processor(model), max_length, long_chats, report)
    sources: list[Sequence[Any]] = []
    weights = []
    for text in data:
        weight, _, rest = text.rpartition("*")
        if rest.startswith(_SCENES):
            _require_scene_tokens(encoder.processor, model)
            sources.append(Scenes(rest.removeprefix(_SCENES), split))
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


def _require_scene_tokens(processor: Processor, model: str) -> None:
    if build_tokenizer().get_vocab() != processor.tokenizer.get_vocab():
        raise DataError(
            f"scenes are written in the bundled model's tokens, which {model} does not use; train "
            "it on files"
        )
