"""``--model mmkv --force_simple``: the form that gets a text and its visuals from lmms-eval."""

from __future__ import annotations

from functools import partial
from typing import Any

from lmms_eval.api.instance import Instance

from mmkv.eval.lmms.adapter import Adapter, Record, ask_in_rounds, ask_once
from mmkv.eval.lmms.cause import reported_to_parent
from mmkv.eval.lmms.likelihood import Scorer
from mmkv.eval.lmms.messages import conversation, visual_part
from mmkv.eval.lmms.pixels import SIMPLE_IMAGES
from mmkv.eval.lmms.scheduler import Ask, Script
from mmkv.prompt.template import Message


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
