"""Replies in JSON: ``response_format`` as a mask over the next tokens (llguidance)."""

from __future__ import annotations

import functools
import json
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from mmkv.engine.errors import InputError

if TYPE_CHECKING:
    import torch
    from llguidance import LLMatcher, LLTokenizer

_TYPES = {
    "name": (str, "a text"),
    "description": (str, "a text"),
    "strict": (bool, "true or false"),
}
LONGEST_SCHEMA = 64 * 2**10  # characters of JSON


def grammar_of(response_format: Any) -> str | None:
    """Return the grammar of a request's ``response_format``, None for plain text.

    Raises:
        InputError: it is none of OpenAI's, or llguidance cannot follow the schema.
    """
    if response_format is None:
        return None
    kind = response_format.get("type") if isinstance(response_format, dict) else None
    if kind not in ("text", "json_object", "json_schema"):
        raise InputError("response_format has to be of type text, json_object or json_schema")
    named = response_format.get("json_schema") if kind == "json_schema" else None
    own = {"json_schema"} if kind == "json_schema" else set()
    _require_known(response_format, {"type", *own}, "")
    if kind == "text":
        return None
    schema: Any = {"type": "object"}
    if kind == "json_schema":
        schema = _schema_of(named)
    if not isinstance(schema, dict):
        raise InputError("response_format.json_schema.schema has to be an object")
    if len(json.dumps(schema)) > LONGEST_SCHEMA:
        raise InputError(f"the schema is longer than {LONGEST_SCHEMA:,} characters; shorten it")
    return _grammar(schema)


def _schema_of(named: Any) -> Any:
    if not isinstance(named, dict):
        return None
    _require_known(named, {"schema", *_TYPES}, ".json_schema")
    for name, (kind, wanted) in _TYPES.items():
        if not isinstance(named.get(name), (kind, type(None))):
            raise InputError(f"response_format.json_schema.{name} has to be {wanted}")
    return named.get("schema")


def _require_known(given: dict[str, Any], known: Collection[str], where: str) -> None:
    for name in given:
        if name not in known and given[name] is not None:
            shown = ascii(name[:60])[1:-1]
            raise InputError(f"response_format{where}.{shown} is not a known field; leave it out")


def _grammar(schema: dict[str, Any]) -> str:
    from llguidance import LLMatcher

    try:
        # Small models would go on with blank space; there is none between JSON's marks.
        grammar = LLMatcher.grammar_from_json_schema(
            schema, overrides={"whitespace_flexible": False}
        )
        wrong = LLMatcher.validate_grammar(grammar)
    except ValueError as error:
        wrong = str(error)
    if wrong:
        raise _cannot_follow(wrong)
    return grammar


def _cannot_follow(reason: str) -> InputError:
    first = next(iter(reason.strip().splitlines()), "llguidance gave up")[:300]
    return InputError(f"the schema cannot be followed: {first}; simplify it")


class Grammars:
    """Makes the state of a grammar for each reply, on one tokenizer.

    Args:
        vocabulary: tokens that the model's logits stand for; eos: those that end a reply.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, eos: Collection[int]) -> None:
        self._tokenizer, self._vocabulary, self._eos = tokenizer, vocabulary, sorted(eos)

    @functools.cached_property
    def _known(self) -> LLTokenizer:
        from llguidance.hf import from_tokenizer

        most = max(self._vocabulary, len(self._tokenizer))
        return from_tokenizer(self._tokenizer, most, self._eos)

    def begin(self, grammar: str) -> GrammarState:
        """Return the state before a reply's first token. Raises InputError."""
        from llguidance import LLMatcher

        matcher = LLMatcher(self._known, grammar)
        if matcher.is_error():
            raise _cannot_follow(matcher.get_error())
        return GrammarState(matcher)


class GrammarState:
    """Where one reply stands in its grammar."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def allowed(self, logits: torch.Tensor) -> torch.Tensor:
        """Return ``logits`` [vocab] with -inf for tokens that may not come next."""
        import torch

        # A byte per token: 0 for one that may not come.
        flags = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8)
        flags = flags[: logits.numel()].to(logits.device)
        return logits.float().masked_fill(flags == 0, -torch.inf)

    def take(self, token: int) -> None:
        """Go on by a token that was allowed."""
        self._matcher.consume_token(token)

    @property
    def failure(self) -> InputError | None:
        """Why no token can come next: llguidance has given up, and allows only the end then."""
        return _cannot_follow(self._matcher.get_error()) if self._matcher.is_error() else None
