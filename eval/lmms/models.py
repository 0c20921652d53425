"""``--model mmkv`` in both forms of lmms-eval.

The chat form gets whole conversations; the simple form (``--force_simple``) gets a text and its
visuals, and is also asked for the likelihood of given replies, under the bounded cache.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lmms_eval.api.instance import GenerationResult, Instance

from mmkv.engine.errors import InputError
from mmkv.eval.lmms.adapter import (
    Adapter,
    Ask,
    Record,
    Scored,
    Script,
    answer,
    ask_in_rounds,
    ask_once,
)
from mmkv.eval.lmms.messages import Frames, Key, conversation, keys, visual_part
from mmkv.eval.lmms.reports import reported_to_parent
from mmkv.eval.lmms.settings import CHAT_IMAGES, SIMPLE_IMAGES
from mmkv.prompt.template import Message, take_media

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


class MmkvSimple(Adapter):
    """Answers tasks given as one text with the pictures and videos in front of it."""

    is_simple = True
    images = SIMPLE_IMAGES
    until = True

    @reported_to_parent()
    def loglikelihood(self, requests: list[Instance]) -> list[Any]:
        """Compute the mean loss of each continuation, and whether it is the greedy one.

        lmms-eval's own models return losses, and its tasks take the smallest, whatever the
        method's name says.
        """
        scorer = Scorer(self.engine, self.settings.frames())
        try:
            return [self._scored(request, scorer) for request in requests]
        finally:
            scorer.close()

    def _scored(self, request: Instance, scorer: Scorer) -> Any:
        context, continuation, *rest = request.args
        visuals: Any = None
        if rest:  # absent where a task wants the choice without its question
            doc_to_visual, doc_id, task, split = rest
            doc = self._document(task, split, doc_id)
            visuals = doc_to_visual(doc)
            continuation = continuation(doc) if callable(continuation) else continuation
        return scorer.score(self._messages(context, visuals), str(continuation))

    def _single(self, request: Instance, sampling: Any, record: Record) -> Script:
        context, _, doc_to_visual, doc_id, task, split = request.args
        visuals = doc_to_visual(self._document(task, split, doc_id))
        yield from ask_once(Ask(self._messages(context, visuals), sampling), record)

    def _rounds(self, request: Instance, sampling: Any, record: Record) -> Script:
        context, _, doc_to_visual, doc_to_text, doc_id, task, split = request.args
        doc = self._document(task, split, doc_id)
        yield from ask_in_rounds(
            [doc_to_visual(doc), context],
            partial(doc_to_text, doc),
            lambda given: Ask(self._messages(given[1], given[0]), sampling),
            record,
        )

    def _messages(self, context: str, visuals: Any) -> list[Message]:
        parts = [visual_part(visual) for visual in (visuals or [])]
        # Tasks for older models mark the place of the pictures, which come first here.
        text = context.replace("<image>", "")
        content = [*parts, {"type": "text", "text": text}]
        return conversation([{"role": "user", "content": content}], self.opening)


class MmkvChat(Adapter):
    """Answers tasks given as messages, with pictures where the task puts them."""

    is_simple = False
    images = CHAT_IMAGES
    until = False

    @reported_to_parent()
    def loglikelihood(self, requests: list[Instance]) -> Any:
        """Refuse: lmms-eval has no such requests in messages."""
        raise InputError(
            "lmms-eval scores choices by likelihood in its simple form alone; add --force_simple"
        )

    def _single(self, request: Instance, sampling: Any, record: Record) -> Script:
        _, doc_to_messages, _, doc_id, task, split = request.args
        given = doc_to_messages(self._document(task, split, doc_id))
        yield from ask_once(Ask(conversation(given, self.opening), sampling), record)

    def _rounds(self, request: Instance, sampling: Any, record: Record) -> Script:
        _, doc_to_messages, _, doc_id, task, split = request.args
        doc = self._document(task, split, doc_id)
        yield from ask_in_rounds(
            [doc_to_messages(doc)],
            partial(doc_to_messages, doc),
            lambda given: Ask(conversation(given[0], self.opening), sampling),
            record,
        )
