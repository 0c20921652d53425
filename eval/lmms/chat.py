"""``--model mmkv``: the form that gets whole conversations from lmms-eval."""

from __future__ import annotations

from functools import partial
from typing import Any

from lmms_eval.api.instance import Instance

from mmkv.engine.errors import InputError
from mmkv.eval.lmms.adapter import Adapter, Record, ask_in_rounds, ask_once
from mmkv.eval.lmms.cause import reported_to_parent
from mmkv.eval.lmms.messages import conversation
from mmkv.eval.lmms.pixels import CHAT_IMAGES
from mmkv.eval.lmms.scheduler import Ask, Script


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
