"""A chat request, checked against what this server is and does, as the work that it asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mmkv.calls.tools import tool_use
from mmkv.engine.errors import MmkvError
from mmkv.grammar import reply_rules, require_tools
from mmkv.reply import LogitSettings
from mmkv.sampling import Sampling, Settled
from mmkv.server.conversations import ConversationInfo
from mmkv.server.errors import ApiError, invalid_value, unsupported
from mmkv.server.media.resolver import Source
from mmkv.server.prompts import Begun, Message, Part, digest_of, thought_apart
from mmkv.server.schema import (
    ChatRequest,
    MmkvOptions,
    ReplyRequest,
    conversation,
    parse_budget,
    refuse_unsupported,
    reply_prefix,
    take_generation_config,
)
from mmkv.server.work import ChatWork
from mmkv.thoughts import marks_if_first

if TYPE_CHECKING:
    from starlette.requests import HTTPConnection

    from mmkv.calls.tools import ToolUse
    from mmkv.engine.budget import Budget
    from mmkv.server.conversations import ConversationState
    from mmkv.server.settings import Facts, ServerSettings
    from mmkv.server.state import Caller, ServerState

MOST_STOPS = 16


@dataclass
class CheckedChat:
    """A chat request that can be answered, as far as that is known without the engine.

    Attributes:
        most_tokens: of its conversation.
    """

    request: ChatRequest
    work: ChatWork
    most_tokens: int

    def require_few_scored(self, most: int) -> None:
        """Refuse more log probabilities than an answer may hold. Raises ApiError."""
        top = self.work.logit_settings.top_logprobs
        if top is None:
            return
        scored = self.work.choices * self.work.sampling.max_new_tokens * (1 + top)
        if scored > most:
            raise ApiError(
                400,
                f"the answer may have {scored:,} log probabilities (n * max_tokens * (1 + "
                f"top_logprobs)), the limit is {most:,}; lower one of them, or ask for a "
                "stream of a chat",
                "too_many_logprobs",
                "top_logprobs",
            )


def checked(
    state: ServerState,
    request: ChatRequest,
    caller: Caller,
    start: ConversationState | None = None,
    keep: bool = False,
    budget: Budget | None = None,
    raw: bool = False,
) -> CheckedChat:
    """Return what a request asks for.

    Args:
        caller: whose memory it may resume.
        start: the conversation that it continues; the request's messages come after its own.
        keep: whether the conversation after the reply is kept.
        budget: of the reply's session; None: the request's, or else the server's.
        raw: whether the texts are read without a chat template, and from the beginning.

    Raises:
        ApiError: it cannot be answered here.
    """
    facts, settings, own = state.facts, state.settings, request.mmkv or MmkvOptions()
    refuse_unsupported(request)
    take_generation_config(request, facts.sampling)
    _require_served(request.model, own, settings, facts)
    choices = request.n or 1
    before = ConversationInfo(()) if start is None else start.info
    messages, begun = _messages(state, request, before.messages, raw)
    budget = _budget(own, choices, facts, start, budget)
    messages = [*before.messages, *messages]
    bound = budget or facts.budget
    most_tokens = facts.most_tokens(bound)
    lengths = [sum(map(len, one.texts)) for one in messages]
    facts.context_bounds.require_possible([*lengths, len(begun.text)], most_tokens)
    if choices > settings.max_choices:
        raise invalid_value("n", f"n is at most {settings.max_choices} here")
    use = _tool_use(request, facts, before.tools)
    tools, values = [] if use is None else use.for_template(), _template_values(request, facts)
    if start is None:
        memory = [facts.base_key, bound.describe(), caller.tenant, request.cache_salt]
        base_key = digest_of([*memory, *filter(None, (values, tools))])
    elif tools == list(before.tools):
        base_key = before.base_key
    else:
        base_key = digest_of([before.base_key, tools])
    work = ChatWork(
        messages,
        base_key,
        _sampling(request, settings, facts),
        _logit_settings(request, facts, use),
        choices,
        budget,
        "never" if raw else own.resume or "auto",
        asked=own.resume is not None,
        weight=state.weights.get(caller.tenant, 1.0),
        start=start,
        frames=before.frames,
        keep=keep,
        rewrites=own.rewrites or "reread",
        template_values=values,
        tools=tools,
        thoughts=None if raw else facts.thoughts,
        raw=raw,
        begun=begun,
    )
    _require_whole(work, facts, use)
    made = CheckedChat(request, work, most_tokens)
    if not request.stream:
        made.require_few_scored(settings.bounds.scored)
    return made


def _messages(
    state: ServerState, request: ChatRequest, earlier: Sequence[Message], raw: bool
) -> tuple[list[Message], Begun]:
    """Return the messages behind the ``earlier`` ones, and what the reply begins with."""
    facts = state.facts
    messages = conversation(request.messages, facts.sees, facts.watches, earlier)
    messages, begun = reply_prefix(request, messages)
    if (marks := facts.thoughts) is not None and not raw:
        messages = [thought_apart(message, marks) for message in messages]
    if sources := [source(part) for message in messages for part in message.media]:
        state.media.check(sources)
    return messages, begun


def source(part: Part) -> Source:
    """Return a part as :mod:`mmkv.server.media` takes it."""
    assert part.kind != "text"
    return Source(part.kind, part.url, dict(part.options))


def _budget(
    options: MmkvOptions,
    choices: int,
    facts: Facts,
    start: ConversationState | None,
    budget: Budget | None,
) -> Budget | None:
    """Return the budget of the reply's session; None: the server's."""
    own = parse_budget(options.budget, "mmkv.budget")
    refuse_budget(facts, own is not None, "mmkv.budget")
    refuse_if_shared(facts, choices > 1, "n")
    budget = own or budget
    if start is None:
        return budget
    if budget not in (None, start.budget) or options.resume == "never":
        raise invalid_value(
            "mmkv",
            f"the memory that is gone on from has a budget of {start.budget.describe()} "
            "and is resumed; leave out mmkv.budget, mmkv.resume and X-Mmkv-Resume",
        )
    return start.budget


def _template_values(request: ChatRequest, facts: Facts) -> dict[str, Any]:
    """Return what the template is told, of what it reads."""
    given = request.template_values()
    if request.thought_limit == 0:  # where a template can leave the thought out
        given.setdefault("enable_thinking", False)
    return {name: given[name] for name in sorted(facts.template_variables & given.keys())}


def _require_whole(work: ChatWork, facts: Facts, use: ToolUse | None) -> None:
    """Refuse what is about a whole reply where one has begun. Raises ApiError."""
    limit, begun = work.sampling.thinking_budget, work.begun.text
    if limit is not None and marks_if_first(facts.thoughts, begun) is None:
        what = "counts a thought from its beginning, and the assistant's last message has begun"
        raise invalid_value(
            "thinking_budget", f"thinking_budget {what} the reply behind it; leave one of them out"
        )
    must = use is not None and use.choice == "required"
    if begun and (work.logit_settings.rules.answer is not None or must):
        name = "tool_choice" if must else "response_format"
        raise unsupported(
            name,
            f"{name} is the form of a whole reply, and the assistant's last message has begun "
            "this one; leave one of them out",
        )


def refuse_if_shared(facts: Facts, given: bool, field: str) -> None:
    """Refuse a setting per request where all sessions share one budget. Raises ApiError."""
    if facts.shared and given:
        raise ApiError(
            400, "all sessions of this server share one budget; leave this out", "shared", field
        )


def refuse_budget(facts: Facts, given: bool, field: str) -> None:
    """Refuse a budget where all sessions share one, or where none is used. Raises ApiError."""
    refuse_if_shared(facts, given, field)
    if facts.unbound and given:
        what = f"{facts.unbound}, so that {field} would bind nothing"
        raise unsupported(field, f"{what}; leave it out, or ask another server")


def _require_served(
    model: str, options: MmkvOptions, settings: ServerSettings, facts: Facts
) -> None:
    """Refuse another model, or what a server cannot change by request. Raises ApiError."""
    if model != settings.name:
        raise ApiError(
            404,
            f"the model {model[:100]!r} is not served here; ask for {settings.name!r}",
            "model_not_found",
            "model",
        )
    if options.background:
        raise unsupported(
            "mmkv.background", "mmkv.background is for streamed turns of a session; leave it out"
        )
    for name in ("policy", "lookahead"):
        wanted, there = getattr(options, name), getattr(facts, name)
        if wanted is not None and wanted != there:
            raise unsupported(
                f"mmkv.{name}", f"this server runs with {name} {there}; start another for {wanted}"
            )


def _sampling(request: ChatRequest, settings: ServerSettings, facts: Facts) -> Settled:
    most = request.max_completion_tokens or request.max_tokens or settings.max_tokens
    if most is None:
        most = min(facts.sampling.max_new_tokens, facts.context)
    stop = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
    if len(stop) > MOST_STOPS:
        raise invalid_value("stop", f"there are at most {MOST_STOPS} stop texts")
    if most > facts.context:
        raise ApiError(
            400,
            f"max_tokens is {most:,}, the model's context has {facts.context:,} positions",
            "context_length_exceeded",
            "max_tokens",
        )
    try:
        return Sampling(
            max_new_tokens=most,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=None if request.top_k is None else max(request.top_k, 0),
            min_p=request.min_p,
            repetition_penalty=request.repetition_penalty,
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
            seed=None if request.seed is None else request.seed % 2**63,
            stop=stop,
            thinking_budget=request.thought_limit if facts.thoughts else None,
        ).settled(facts.sampling)
    except MmkvError as error:
        raise invalid_value(None, str(error)) from error


def _tool_use(
    request: ChatRequest, facts: Facts, before: Sequence[dict[str, Any]]
) -> ToolUse | None:
    """Return what may be called.

    Args:
        before: the functions of the conversation that is gone on from, which hold where the request
            names none.
    """
    try:
        tools = before if request.tools is None else request.tools
        use = tool_use(tools, request.tool_choice, request.parallel_tool_calls)
        return None if use is None else require_tools(facts.call_format, use)
    except MmkvError as error:
        raise invalid_value("tools", str(error)) from error


def _logit_settings(request: ChatRequest, facts: Facts, use: ToolUse | None) -> LogitSettings:
    if request.top_logprobs and not request.logprobs:
        raise invalid_value("top_logprobs", "top_logprobs needs logprobs")
    top = (request.top_logprobs or 0) if request.logprobs else None
    try:
        rules = reply_rules(request.response_format, facts.call_format, use)
    except MmkvError as error:
        raise invalid_value("response_format", str(error)) from error
    stop_tokens = frozenset(request.stop_token_ids or ())
    if any(token >= facts.vocabulary for token in stop_tokens):
        raise invalid_value(
            "stop_token_ids",
            f"stop_token_ids names {max(stop_tokens)}; token ids are below {facts.vocabulary}",
        )
    bias = _bias(request.logit_bias, facts.vocabulary) if request.logit_bias else {}
    return LogitSettings(top, bias, rules, stop_tokens)


def _bias(given: dict[str, float], vocabulary: int) -> dict[int, float]:
    """Return what is added to logits by token id. Raises ApiError."""
    bias = {}
    for text, value in given.items():
        # Python refuses to read numbers of very many digits.
        number = int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else None
        if number is None or number >= vocabulary:
            raise invalid_value(
                "logit_bias",
                f"logit_bias names {text[:20]!r}; token ids are below {vocabulary}",
            )
        bias[number] = value
    return bias


def take_resume(request: HTTPConnection, body: ReplyRequest) -> None:
    """Take ``mmkv.resume`` from the header X-Mmkv-Resume if it is not set. Raises ApiError."""
    given = request.headers.get("x-mmkv-resume")
    if given is None:
        return
    if given not in ("auto", "never", "required"):
        raise invalid_value("X-Mmkv-Resume", "X-Mmkv-Resume is auto, never or required")
    body.mmkv = body.mmkv or MmkvOptions()
    body.mmkv.resume = body.mmkv.resume or given  # type: ignore[assignment]
