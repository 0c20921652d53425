"""Show calls of tools, and their results, in the form that a chat template can show.

Many templates know nothing of tools, or only of some: no list of tools, no calls, no role ``tool``,
no pictures in a result. What one shows by itself is found by rendering short conversations
(:func:`probe`); the rest is put into words in the form that Hermes models learn, which is the most
common one.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, product
from typing import Any, Literal

from mmkv.engine.errors import InputError

Message = dict[str, Any]
Part = dict[str, Any]

_ELSEWHERE = "What it returned is shown in the next message."
_HOW = """\
To call a function, write its name and its arguments as JSON, in one such block for each call:
<tool_call>
{"name": ..., "arguments": {...}}
</tool_call>
What a call returned comes in the next message, between <tool_response> and </tool_response>."""


@dataclass(frozen=True)
class TemplateSupport:
    """What a template shows by itself.

    Attributes:
        tools: whether it reads a list of tools.
        calls: whether it shows calls; broken_calls: those whose arguments are no JSON, too.
        texts: whether calls need their arguments as JSON text.
        empty: the content that a message with nothing but calls needs.
        results: how it takes the content of a tool message; None: it shows none.
        media: the kinds of parts (image, video) that it shows in one.
        system: whether it shows a message of the system.
        repeats: whether one role may speak twice in a row.
        short_ids: whether it takes ids of calls of nine letters and digits alone.
    """

    tools: bool = False
    calls: bool = False
    broken_calls: bool = False
    texts: bool = False
    empty: list[Part] | None = field(default_factory=list)
    results: Literal["parts", "text"] | None = None
    media: frozenset[str] = frozenset()
    system: bool = True
    repeats: bool = True
    short_ids: bool = False


_CALLED, _RETURNED, _SAID = "mmkv9called", "mmkv9returned", "mmkv9said"
_IDS: tuple[str, ...] = ("call_0", "callnine0")
_TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {
            "type": "object",
            "properties": {"at": {"type": "string", "description": "Where."}},
            "required": ["at"],
        },
    },
}


def probe(
    render: Callable[[list[Message], list[Any]], str | None],
    count: Callable[[str], Counter[str]],
    reads_tools: bool,
    kinds: Iterable[str],
) -> TemplateSupport:
    """Return what a template shows.

    Args:
        render: renders messages, whose contents are lists of parts, with tools; a content that is
            a text stays one. None: the template fails.
        count: counts special tokens in rendered text.
        kinds: kinds of media that the model reads.
    """

    def text(words: str) -> list[Part]:
        return [{"type": "text", "text": words}]

    def shows(words: str, messages: list[Message], tools: Sequence[Any] = ()) -> bool:
        return words in (render(messages, list(tools)) or "")

    asked = {"role": "user", "content": text("look")}
    system = shows(_SAID, [{"role": "system", "content": text(_SAID)}, asked])
    repeats = render([asked, asked], []) is not None
    if not reads_tools:
        return TemplateSupport(system=system, repeats=repeats)

    def call(arguments: Any, content: Any, name: str) -> Message:
        function = {"name": "look", "arguments": arguments}
        made = {"id": name, "type": "function", "function": function}
        return {"role": "assistant", "content": content, "tool_calls": [made]}

    def find_calls() -> tuple[Message, list[Part] | None] | None:
        nothing: tuple[list[Part] | None, ...] = ([], None)
        written = ({"at": _CALLED}, json.dumps({"at": _CALLED}))
        for arguments, name, empty in product(written, _IDS, nothing):
            made = call(arguments, empty, name)
            if shows(_CALLED, [asked, made], [_TOOL]):
                return made, empty
        return None

    calls, ids, broken, texts = find_calls(), _IDS, False, False
    if calls is not None:
        made = calls[0]["tool_calls"][0]
        ids, texts = (made["id"],), isinstance(made["function"]["arguments"], str)
        broken = shows(_CALLED, [asked, call(f"{_CALLED}{{", calls[1], made["id"])], [_TOOL])
    called = calls[0] if calls is not None else {"role": "assistant", "content": text("look")}

    def result(content: Any, name: str) -> list[Message]:
        made = {"role": "tool", "name": "look", "tool_call_id": name, "content": content}
        return [asked, called, made]

    def find_results() -> tuple[Literal["parts", "text"], str] | None:
        raw = re.compile(f"""text['"]: ?['"]{_RETURNED}""")
        for name in ids:
            shown = render(result(text(_RETURNED), name), [_TOOL]) or ""
            if _RETURNED in shown and not raw.search(shown):
                return "parts", name
            if shows(_RETURNED, result(_RETURNED, name), [_TOOL]):
                return "text", name
        return None

    results, media = find_results(), set()
    for kind in kinds:
        if results is None or results[0] == "text":
            break
        words, seen = text(_RETURNED), [{"type": kind}]
        wanted = count(render([{**asked, "content": words + seen}], []) or "")
        wanted -= count(render([{**asked, "content": words}], []) or "")
        found = count(render(result(words + seen, results[1]), [_TOOL]) or "")
        found -= count(render(result(words, results[1]), [_TOOL]) or "")
        if wanted and wanted == found:
            media.add(kind)
    return TemplateSupport(
        tools=True,
        calls=calls is not None,
        broken_calls=broken,
        texts=texts,
        empty=[] if calls is None else calls[1],
        results=None if results is None else results[0],
        media=frozenset(media),
        system=system,
        repeats=repeats,
        short_ids=_IDS[1] in (ids[0], results[1] if results else ""),
    )


@dataclass
class Fitted:
    """A message as a template is given it.

    Attributes:
        message: in the transformers chat format, its content a list of parts.
        source: which of the messages it is made of alone or first; None: it is an addition.
        ours: whether its text is ours in part, so that it may be joined with the next.
    """

    message: Message
    source: int | None
    ours: bool = False


def fit(
    messages: Sequence[Message], tools: Sequence[Any], shown: TemplateSupport, apart: bool = False
) -> list[Fitted]:
    """Return the messages in the form that a template can show.

    Args:
        messages: their contents are lists of parts.
        tools: put into words where the template does not read them.
        apart: whether no template stands between messages, so that blocks need lines of their own.
    """
    made: list[Fitted] = []
    for tool, group in groupby(enumerate(messages), lambda pair: pair[1]["role"] == "tool"):
        run = list(group)
        if tool and shown.results is None:
            parts: list[Part] = []
            for _, message in run:
                between = "\n" if parts or apart else ""
                parts += [_text(f"{between}<tool_response>\n"), *message["content"]]
                parts += [_text("\n</tool_response>")]
            parts += [_text("\n")] if apart else []
            content = joined(parts)
            made.append(Fitted({"role": "user", "content": content}, run[0][0], ours=True))
        elif tool:
            made += _results(run, shown)
        else:
            made += [Fitted(_called(message, shown), at) for at, message in run]
    if tools and not shown.tools:
        _describe(made, tools, shown, apart)
    return made if shown.repeats else _alternating(made)


def _results(run: list[tuple[int, Message]], shown: TemplateSupport) -> list[Fitted]:
    """Return a run of tool messages; a user's message with what they cannot hold follows them."""
    made, moved = [], []
    for at, message in run:
        parts = message["content"]
        elsewhere = [part for part in parts if part["type"] not in {"text", *shown.media}]
        if elsewhere:
            moved += elsewhere
            parts = [part for part in parts if part["type"] in {"text", *shown.media}]
            said = any(part["type"] != "text" or part["text"].strip() for part in parts)
            parts = parts if said else [_text(_ELSEWHERE)]
        changed = {**message, "content": parts}
        if shown.results == "text":
            changed["content"] = "".join(part["text"] for part in parts)
        if shown.short_ids and message.get("tool_call_id"):
            changed["tool_call_id"] = _nine(message["tool_call_id"])
        made.append(Fitted(changed, at))
    if moved:
        made.append(Fitted({"role": "user", "content": moved}, None, ours=True))
    return made


def _called(message: Message, shown: TemplateSupport) -> Message:
    """Return a message with its calls as the template needs them."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    calls = [_with_arguments(call) for call in calls]
    functions = [call["function"] for call in calls]
    broken = any(not isinstance(function["arguments"], dict) for function in functions)
    if not shown.calls or (broken and not shown.broken_calls):
        blocks = [_block(function) for function in functions]
        content = message["content"]
        before = "\n" if any(part.get("text", "x") for part in content) else ""
        plain = {key: value for key, value in message.items() if key != "tool_calls"}
        return {**plain, "content": joined([*content, _text(before + "\n".join(blocks))])}
    if shown.texts:
        calls = [_with_text(call) for call in calls]
    if shown.short_ids:
        calls = [{**call, "id": _nine(str(call.get("id", at)))} for at, call in enumerate(calls)]
    content = message["content"] or shown.empty
    return {**message, "content": content, "tool_calls": calls}


def _with_arguments(call: Message) -> Message:
    """Return a call whose arguments are a dict, where they are one."""
    arguments = call["function"]["arguments"]
    if isinstance(arguments, str):
        try:
            read = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            read = arguments
        arguments = read if isinstance(read, dict) else arguments
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _with_text(call: Message) -> Message:
    """Return a call whose arguments are JSON text."""
    arguments = call["function"]["arguments"]
    if isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _block(function: Mapping[str, Any]) -> str:
    said = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>\n{json.dumps(said, ensure_ascii=False)}\n</tool_call>"


def _describe(
    made: list[Fitted], tools: Sequence[Any], shown: TemplateSupport, apart: bool
) -> None:
    """Put the tools into words, in the system's message or in the first of the user."""
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    words = (
        "You can call functions. Each line between <tools> and </tools> describes one, as JSON:\n"
        f"<tools>\n{lines}\n</tools>\n\n{_HOW}"
    )
    role = "system" if shown.system else "user"
    place = next((one for one in made if one.message["role"] == role), None)
    end = "\n\n" if apart or role == "user" else ""
    if place is None:
        made.insert(0, Fitted({"role": role, "content": [_text(words + end)]}, None, ours=True))
        return
    content = place.message["content"]
    if role == "user":
        content = [_text(words + end), *content]
    else:
        content = [*content, _text(f"\n\n{words}{end}" if content else words + end)]
    place.message = {**place.message, "content": joined(content)}


def _alternating(made: list[Fitted]) -> list[Fitted]:
    """Return them with user's messages that are ours joined to those beside them."""
    kept: list[Fitted] = []
    for one in made:
        last = kept[-1] if kept else None
        both_user = last is not None and one.message["role"] == last.message["role"] == "user"
        if last is None or not both_user or not (one.ours or last.ours):
            kept.append(one)
            continue
        content = joined([*last.message["content"], _text("\n"), *one.message["content"]])
        source = one.source if last.source is None else last.source
        kept[-1] = Fitted({**last.message, "content": content}, source, ours=True)
    return kept


def _text(words: str) -> Part:
    return {"type": "text", "text": words}


def joined(parts: Iterable[Part]) -> list[Part]:
    """Return parts with texts side by side joined, so that no template writes between them."""
    made: list[Part] = []
    for part in parts:
        if part["type"] == "text" and made and made[-1]["type"] == "text":
            made[-1] = _text(made[-1]["text"] + part["text"])
        else:
            made.append(part)
    return made


def _nine(name: str) -> str:
    if re.fullmatch("[a-zA-Z0-9]{9}", name):
        return name
    return hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:9]


def plain_tools(tools: Sequence[Any]) -> list[dict[str, Any]]:
    """Return a copy of a list of functions in OpenAI's form. Raises InputError for others."""
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or tool.get("type", "function") != "function":
            raise InputError(
                'a tool is no function; give {"type": "function", "function": {"name": ..., '
                '"description": ..., "parameters": ...}}'
            )
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise InputError("a function among the tools has no name; give one")
    return _copied(list(tools), "the tools hold what is no JSON")


def plain_calls(calls: Any) -> list[dict[str, Any]]:
    """Return a copy of an assistant message's calls. Raises InputError where they are none."""
    made = []
    for given in calls if isinstance(calls, (list, tuple)) else [None]:
        call: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
        function = call.get("function")
        if not isinstance(function, Mapping) or (call.get("type") or "function") != "function":
            raise InputError(
                'tool_calls are no list of function calls; give [{"type": "function", "function": '
                '{"name": ..., "arguments": ...}}]'
            )
        name, arguments = function.get("name"), function.get("arguments")
        if not isinstance(name, str) or not name:
            raise InputError("a call among tool_calls names no function; give a name")
        if not isinstance(arguments, (str, Mapping)):
            raise InputError(f"the call of {name!r} has no arguments; give a dict, or JSON text")
        if not isinstance(call.get("id"), (str, type(None))):
            raise InputError(f"the id of the call of {name!r} is no text; give one")
        plain = {"type": "function", "function": {"name": name, "arguments": arguments}}
        made.append(plain if call.get("id") is None else {"id": call["id"], **plain})
    return _copied(made, "the arguments of a call hold what is no JSON")


def _copied(value: Any, wrong: str) -> Any:
    try:
        return json.loads(json.dumps(value, default=_plain_mapping))
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"{wrong} ({error}); give texts, numbers, lists and dicts") from error


def _plain_mapping(value: Any) -> dict[Any, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is no JSON")
