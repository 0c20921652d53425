"""Train the adapter in two phases: vectors of visual words, then the SigLIP tower.

1. ``words``: what the frozen language model should read of a picture. A table of vectors, learned
   through it: words, places, and the phrases around them. They start as its own embeddings.
2. ``eyes``: the tower learns to say of pictures which entry of the table each token is. No
   language model runs. :func:`install` then makes LLaVA's projector of the classifier and the
   table.

The second does not depend on the first. A projector that is trained to come near the vectors
leaves an error that the frozen model cannot read through.
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

from mmkv.engine.errors import ModelError
from mmkv.training.data.labels import IGNORED
from mmkv.training.llava.adapter import CHAT_TEMPLATE, IMAGE_TOKEN, LlavaAdapter
from mmkv.training.llava.pictures import PLACES, SIDE, PictureTurn, Shown, all_names
from mmkv.training.measure.teacher_forced import spans


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
