"""Responses and their events in the shape of OpenAI's Responses API."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mmkv.server import reply_json
from mmkv.server.errors import ApiError
from mmkv.server.reply_json import Rows

if TYPE_CHECKING:
    from mmkv.sampling import Settled
    from mmkv.server.responses_schema import ResponseRequest
    from mmkv.server.spelling import Spelled
    from mmkv.server.work import Usage


class Shape:
    """One response as it grows.

    Args:
        name: its id; stored: whether it can be gone on from.
        instructions: those that stand in the conversation.
        logprobs: whether the tokens' log probabilities are shown.
        sampling: how its tokens are drawn.

    Attributes:
        text: of the reply so far; rows: its tokens, if log probabilities are wanted.
    """

    def __init__(
        self,
        name: str,
        asked: ResponseRequest,
        stored: bool,
        instructions: str | None,
        logprobs: bool,
        sampling: Settled,
    ) -> None:
        self.name, self.item = name, "msg_" + name.removeprefix("resp_")
        self.text = ""
        self.rows = Rows() if logprobs else None
        self._asked, self._stored, self._instructions = asked, stored, instructions
        self._sampling = sampling
        self._created, self._number = int(time.time()), 0
        self._completed: int | None = None

    def add(self, text: str, spelled: list[Spelled]) -> None:
        """Take a piece of the reply."""
        self.text += text
        if self.rows is not None:
            self.rows.add(_with_bytes(reply_json.logprobs(spelled)["content"]))

    def whole(self, reason: str, usage: Usage) -> dict[str, Any]:
        """Return the finished response; ``reason``: why the reply ended."""
        self._completed = self._completed or int(time.time())
        status = self._status(reason)
        made = self._response(status, [self._message(status)], usage)
        if status == "completed":
            return made | {"completed_at": self._completed}
        return made | {"incomplete_details": {"reason": "max_output_tokens"}}

    def opening(self) -> Iterator[dict[str, Any]]:
        """Yield the events before the first piece."""
        for kind in ("created", "in_progress"):
            yield self._event(f"response.{kind}", response=self._response("in_progress", []))
        message = self._message("in_progress") | {"content": []}
        yield self._event("response.output_item.added", output_index=0, item=message)
        yield self._at("response.content_part.added", part=self._part())

    def piece(self, text: str, spelled: list[Spelled]) -> dict[str, Any]:
        """Return the event of a piece."""
        rows = reply_json.logprobs(spelled)["content"] if self.rows is not None else []
        return self._at("response.output_text.delta", delta=text, logprobs=_with_bytes(rows))

    def closing(self, reason: str, usage: Usage) -> Iterator[dict[str, Any]]:
        """Yield the events after the last piece.

        Each is made when it is wanted: log probabilities take much memory, and a client time.
        """
        yield self._at("response.output_text.done", text=self.text, logprobs=self.rows or [])
        yield self._at("response.content_part.done", part=self._part())
        yield self._event(
            "response.output_item.done",
            output_index=0,
            item=self._message(self._status(reason)),
        )
        yield self._event(f"response.{self._status(reason)}", response=self.whole(reason, usage))

    def failed(self, error: ApiError) -> dict[str, Any]:
        """Return the last event of a response that broke off."""
        code = "invalid_prompt" if error.status < 500 else "server_error"  # of OpenAI's list
        told = {"code": code, "message": str(error)}
        output = [self._message("incomplete")]
        return self._event(
            "response.failed", response=self._response("failed", output) | {"error": told}
        )

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        number, self._number = self._number, self._number + 1
        return {"type": kind, "sequence_number": number} | fields

    def _at(self, kind: str, **fields: Any) -> dict[str, Any]:
        where = {"item_id": self.item, "output_index": 0, "content_index": 0}
        return self._event(kind, **where, **fields)

    def _status(self, reason: str) -> str:
        return "completed" if reply_json.FINISH[reason] == "stop" else "incomplete"

    def _message(self, status: str) -> dict[str, Any]:
        head = {"id": self.item, "type": "message", "role": "assistant", "status": status}
        return head | {"content": [self._part()]}

    def _part(self) -> dict[str, Any]:
        return {
            "type": "output_text",
            "text": self.text,
            "annotations": [],
            "logprobs": self.rows or [],
        }

    def _response(
        self, status: str, output: list[dict[str, Any]], usage: Usage | None = None
    ) -> dict[str, Any]:
        asked = self._asked
        return {
            "id": self.name,
            "object": "response",
            "created_at": self._created,
            "completed_at": None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": asked.model,
            "previous_response_id": asked.previous_response_id,
            "instructions": self._instructions,
            "output": output,
            "usage": None if usage is None else self._usage(usage),
            "store": self._stored,
            "metadata": asked.metadata or {},
            "temperature": self._sampling.temperature,
            "top_p": self._sampling.top_p,
            "presence_penalty": self._sampling.presence_penalty,
            "frequency_penalty": self._sampling.frequency_penalty,
            "max_output_tokens": asked.max_output_tokens,
            "top_logprobs": asked.top_logprobs or 0,
            "text": {"format": self._format()},
            "truncation": asked.truncation or "disabled",
            "tools": [],
            "tool_choice": asked.tool_choice or "auto",
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "max_tool_calls": asked.max_tool_calls,
            "reasoning": {"effort": None, "summary": None},
            "background": False,
            "service_tier": "default",
            "user": asked.user,
            "safety_identifier": asked.safety_identifier,
            "prompt_cache_key": asked.prompt_cache_key,
        }

    def _format(self) -> dict[str, Any]:
        text = self._asked.text
        return {"type": "text"} if text is None or text.format is None else text.format

    def _usage(self, usage: Usage) -> dict[str, Any]:
        chat = reply_json.usage_json(usage)
        new = usage.prompt_tokens - usage.resumed
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.resumed,
                "cache_write_tokens": new if self._stored else 0,
            },
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": chat["total_tokens"],
            "mmkv": chat["mmkv"],
        }


def _with_bytes(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for one in [token for row in rows for token in (row, *row["top_logprobs"])]:
        one["bytes"] = one["bytes"] or []  # a token without bytes: chat says null, this API []
    return rows


def page_of(items: list[dict[str, Any]], limit: int, after: str | None) -> dict[str, Any]:
    """Return a page of a list, from the item that follows ``after`` on. Raises ApiError (400)."""
    names = [one["id"] for one in items]
    if after is not None and after not in names:
        raise ApiError(
            400,
            f"after names no item of the list: {after[:60]!r}; take last_id of the page before",
            "invalid_value",
            "after",
        )
    start = 0 if after is None else names.index(after) + 1
    data, more = items[start : start + limit], start + limit < len(items)
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": more}
