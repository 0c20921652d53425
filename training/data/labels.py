"""Find the tokens of the assistant's replies in a rendered chat, for any chat template.

Growing prefixes of the dialogue are rendered and tokenized. The whole shares a prefix with the
dialogue up to the opening of a reply; the tokens after it, as far as they agree with the dialogue
up to the end of the reply, are the assistant's. No template's markers need to be known.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from torch import Tensor

from mmkv.prompt.messages import Message
from mmkv.prompt.special import CUT, reading, tokenize
from mmkv.training.data.conversations import DataError

IGNORED = -100  # a label that losses ignore

Render = Callable[[list[Message], bool], str]


@dataclass(frozen=True)
class AssistantTurn:
    """A reply in token indices.

    Attributes:
        message: index of the message.
        start, stop: the reply and its end-of-turn token.
        close: end of the turn, after what the template writes behind the end-of-turn token.
    """

    message: int
    start: int
    stop: int
    close: int


class TurnFinder:
    """Finds replies in chats tokenized by one tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        self._special = {i for i, token in added.items() if token.special}
        self._special |= set(tokenizer.all_special_ids)
        self._blank: dict[int, bool] = {}

    def tokenize(self, text: str) -> list[int]:
        """Tokenize a text with nothing added around it."""
        return tokenize(self._tokenizer, text)

    def find(
        self, messages: Sequence[Message], render: Render
    ) -> tuple[list[int], list[AssistantTurn]]:
        """Find the ids of the whole chat, and its replies in order.

        Args:
            messages: at least one of them the assistant's.
            render: text of messages; the flag adds the opening of the assistant's reply.

        Raises:
            DataError: a template that shows the beginning of a dialogue differently when more
                follows.
            InputError: a template that refuses these messages.
        """
        messages = list(messages)
        text = render(messages, False)
        whole, spans = self._with_spans(text)
        marks = self._marks(text, whole, spans)
        found = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            opening = render(messages[:index], True)
            if not text.startswith(opening):
                raise _does_not_nest(index, "the opening of the reply is not in the whole chat")
            # The end of the opening may be other tokens when the reply follows: merged with its
            # first word ("ASSISTANT: " and "red" make " red"), which is then the reply's, or
            # split ("\n\n" into two), which still says nothing of the reply.
            same, opened = self._beginning(opening, text, marks)
            start = same + _shared(opened, whole[same : same + len(opened)])
            while spans and start < len(whole) and spans[start][1] <= len(opening):
                start += 1
            if index + 1 == len(messages):
                close = len(whole)
            else:
                shown = render(messages[: index + 1], False)
                same, closed = self._beginning(shown, text, marks)
                close = same + _shared(closed, whole[same : same + len(closed)])
                # A template may write an end of text after the last message of all.
                if not all(map(self._closing, closed[close - same :])):
                    raise _does_not_nest(index, "the reply changes when more messages follow")
            if close <= start:
                raise _does_not_nest(index, "the reply is not in the whole chat")
            found.append(AssistantTurn(index, start, self._stop(whole, start, close), close))
        return whole, found

    def _with_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return ids, and where in the text each begins and ends (none from a tokenizer that does
        not keep track).
        """
        if not self._tokenizer.is_fast or CUT in text:
            return self.tokenize(text), []
        with reading(text):
            made = self._tokenizer(
                text, add_special_tokens=False, verbose=False, return_offsets_mapping=True
            )
        return made["input_ids"], made["offset_mapping"]

    def _marks(
        self, text: str, ids: list[int], spans: list[tuple[int, int]]
    ) -> list[tuple[int, int, int]]:
        """Return the end, the beginning and the index of each special token that is written out.

        The token for what is unknown is special, too, and stands for text that is not its own.
        """
        names = {i: self._tokenizer.convert_ids_to_tokens(i) for i in self._special & set(ids)}
        return [
            (end, begin, at)
            for at, (token, (begin, end)) in enumerate(zip(ids, spans, strict=False))
            if token in names and text[begin:end].strip() == names[token]
        ]

    def _beginning(
        self, text: str, whole: str, marks: list[tuple[int, int, int]]
    ) -> tuple[int, list[int]]:
        """Tokenize what a dialogue begins with; the time for all of them grows with its length.

        Special tokens part a text: the ids before one are those of the whole, whatever follows it.
        So only the text from the last one on that both have is tokenized.

        Returns:
            how many ids it shares with the whole at least, and those after them.
        """
        same = bisect_left(range(len(text)), True, key=lambda at: text[: at + 1] != whole[: at + 1])
        known = bisect_right(marks, same, key=itemgetter(0))
        if known:
            _, begin, index = marks[known - 1]
            return index, self.tokenize(text[begin:])
        return 0, self.tokenize(text)

    def _stop(self, ids: list[int], start: int, close: int) -> int:
        """Find the index after the first special token that ends the turn.

        Return ``close`` if there is none.
        """
        tail = close
        while tail > start and self._closing(ids[tail - 1]):
            tail -= 1
        ends = (at + 1 for at in range(tail, close) if ids[at] in self._special)
        return next(ends, close)

    def _closing(self, token: int) -> bool:
        """Return whether a token can stand after a reply's last word: a special token or white
        space.
        """
        if token in self._special:
            return True
        if token not in self._blank:
            self._blank[token] = not self._tokenizer.decode([token]).strip()
        return self._blank[token]


def _shared(first: Sequence[int], second: Sequence[int]) -> int:
    """Measure the length of the longest common prefix."""
    for at, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return at
    return min(len(first), len(second))


def _does_not_nest(index: int, reason: str) -> DataError:
    return DataError(
        "the model's chat template shows the beginning of a dialogue differently when more "
        f"follows ({reason}; message {index}), so that what the assistant says cannot be told "
        "apart; train on one-turn chats or plain text, or give the tokenizer another template"
    )


def predicted(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Find where the states stand that predict a label ``[N]``, and those labels ``[N]``.

    The label of a document's first token must be -100: nothing before it predicts it.
    """
    where = (labels[1:] != IGNORED).nonzero().flatten()
    return where, labels[where + 1]
