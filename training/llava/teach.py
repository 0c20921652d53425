"""What is trained, in three phases, through or beside the frozen language model.

1. ``words``: a table of vectors stands for the tower. A patch is a word, a row or a column. The
   table starts as the language model's own embeddings and learns what makes the frozen model
   answer.
2. ``eyes``: tower and projector learn to give the table's vectors for pictures. No language model
   runs, so that a picture costs next to nothing.
3. ``answers``: tower and projector learn from the answers, as in LLaVA.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from mmkv.data.labels import IGNORED
from mmkv.measure.teacher_forced import spans
from training.llava.adapter import CHAT_TEMPLATE, IMAGE_TOKEN, Adapter
from training.llava.pictures import SIDE, Shown, Turn, all_names

_SHARPNESS = 10.0


def opening(tokenizer: Any) -> str:
    """Return what every chat begins with: the template's own system message."""
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": ""}], chat_template=CHAT_TEMPLATE, tokenize=False
    )
    return str(rendered[: rendered.rindex("<|im_start|>")])


def encode(turns: Sequence[Turn], tokenizer: Any) -> tuple[list[int], list[int], list[Shown]]:
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


class WordTable(nn.Module):
    """A vector for each patch: a word, a row or a column of the cell that it lies in.

    Of each 2 x 2 patches the upper two say row and column, the lower two the first and the last
    word of what stands there. All start as the language model's embeddings of these words and
    numbers: one vector for several words at once, or for a word and its place, it reads less well.
    """

    def __init__(self, language: Language) -> None:
        super().__init__()
        words = sorted({word for name in all_names() for word in name.split()})
        self._index = {word: index for index, word in enumerate(words)}
        numbers = [str(number + 1) for number in range(SIDE)]

        def start(texts: list[str]) -> nn.Parameter:
            ids = [language.ids(f" {text}") for text in texts]
            return nn.Parameter(torch.stack([language.embed[i].float().mean(0) for i in ids]))

        self.words, self.rows, self.columns = start(words), start(numbers), start(numbers)

    def forward(self, shown: Sequence[Shown]) -> Tensor:
        """Return float32 ``[n, SIDE * SIDE, hidden]``."""
        # Which line of the three tables, one under the other, stands for each patch.
        rows, columns = len(self.words), len(self.words) + len(self.rows)
        lines = []
        for each in shown:
            for patch, (name, row, column) in enumerate(each.patches()):
                words, right = name.split(), patch % 2
                if patch // SIDE % 2:
                    lines.append(self._index[words[-right]])
                else:
                    lines.append(columns + column - 1 if right else rows + row - 1)
        table = torch.cat([self.words, self.rows, self.columns])
        return table[torch.tensor(lines, device=table.device)].view(len(shown), SIDE**2, -1)


class Answers(nn.Module):
    """Cross-entropy of the answers, given what ``sight`` makes of the pictures (phases 1 and 3)."""

    def __init__(self, sight: WordTable | Adapter, language: Language) -> None:
        super().__init__()
        self.sight, self._language = sight, (language,)  # a tuple: it is not a part to be trained
        self.asked: Counter[str] = Counter()
        self.right: Counter[str] = Counter()

    def forward(self, examples: Sequence[Sequence[Turn]]) -> dict[str, Tensor]:
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

    def _count(self, examples: Sequence[Sequence[Turn]], labels: Tensor, hits: list[bool]) -> None:
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
    """Learns the table's vectors from pictures (phase 2).

    The loss is the squared error in units of the vectors' variance, and the cross-entropy of
    choosing the right one by distance from those in the batch, without which little is learned for
    hundreds of steps.
    """

    def __init__(self, adapter: Adapter, table: WordTable) -> None:
        super().__init__()
        self.adapter = adapter
        self._table = (table.requires_grad_(False),)
        self._spread = float(table.words.var())
        self._hits: list[float] = []

    def forward(self, examples: Sequence[Sequence[Turn]]) -> dict[str, Tensor]:
        """Return the ``loss``; notes how many patches are nearest to what they show."""
        shown = [turn.shown for turns in examples for turn in turns if turn.shown]
        made, wanted = self.adapter(shown).flatten(0, 1), self._table[0](shown).flatten(0, 1)
        kinds, index = wanted.unique(dim=0, return_inverse=True)
        unit = self._spread * kinds.shape[1]  # half the squared distance of two words, about
        closeness = (made @ kinds.T - kinds.square().sum(-1) / 2) / unit
        self._hits.append(float((closeness.argmax(-1) == index).float().mean()))
        error = F.mse_loss(made, wanted) / self._spread
        return {"loss": error + F.cross_entropy(_SHARPNESS * closeness, index)}

    def figures(self) -> dict[str, float]:
        """Return the share of patches nearest to their own vector of those of the batch."""
        share = math.fsum(self._hits) / max(len(self._hits), 1)
        self._hits.clear()
        return {"patches": round(share, 3)}
