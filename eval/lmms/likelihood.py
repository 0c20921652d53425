"""Compute the loss of a given reply under the bounded cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from lmms_eval.api.instance import GenerationResult

from mmkv.engine.errors import InputError
from mmkv.eval.lmms.counts import Scored, answer
from mmkv.eval.lmms.messages import Frames, Key, keys
from mmkv.prompt.template import take_media

if TYPE_CHECKING:
    from mmkv import Engine, Session
    from mmkv.prompt.template import Message


class Scorer:
    """Scores continuations; those of one question share its prefill, each on a copy of the cache.

    The prompt is read under the budget first, as for a reply; then the continuation is fed token
    by token, with eviction as in decoding.
    """

    def __init__(self, engine: Engine, frames: Frames) -> None:
        self.engine, self.frames = engine, frames
        self._session: Session | None = None
        self._logits: torch.Tensor | None = None
        self._key: list[Key] | None = None

    def score(self, messages: list[Message], continuation: str) -> GenerationResult:
        """Compute (mean loss, greedy) of ``continuation`` as the reply to ``messages``. Raises
        InputError.

        Wrapped in a GenerationResult, because lmms-eval 0.7.3 turns a bare pair into text before
        its tasks see it.
        """
        tokens = self._tokens(continuation)
        self._prefill(messages)
        assert self._session is not None and self._logits is not None
        losses, greedy, logits = [], True, self._logits
        with self._session.fork() as session:
            for place, token in enumerate(tokens):
                if place:
                    logits = session.decode(tokens[place - 1])
                losses.append(-float(logits.float().log_softmax(-1)[token]))
                greedy &= int(logits.argmax()) == token
        return answer(Scored((sum(losses) / len(losses), greedy)), [], {})

    def close(self) -> None:
        """Return the pages of the question held."""
        if self._session is not None:
            self._session.close()
        self._session = self._key = None

    def _tokens(self, continuation: str) -> list[int]:
        # The reply starts a line in every template: a blank in front of it, which
        # lmms-eval puts between question and choice, would make other tokens of its first word.
        text = continuation.strip()
        tokenizer: Any = self.engine.processor.tokenizer
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        if not tokens:
            raise InputError("the task wants the likelihood of an empty text; correct its choices")
        return tokens

    def _prefill(self, messages: list[Message]) -> None:
        key = keys(messages)
        if key == self._key:
            return
        self.close()
        plain, images, videos = take_media(messages)
        processor = self.engine.processor
        inputs = processor.encode(
            processor.template.render(plain, opening=True),
            [processor.load_picture(image) for image in images],
            [self.frames.load(video, processor) for video in videos],
        )
        self._session = self.engine.session()
        self._logits = self._session.prefill(inputs)
        self._key = key
