"""Check the messages of a conversation, and show calls of tools and their results in them.

:func:`take_media` checks what a user gives and takes the pictures and videos out of it.

Many templates know nothing of tools, or only of some: no list of tools, no calls, no role ``tool``,
no pictures in a result. What one shows by itself is found by rendering short conversations
(:func:`probe`); the rest is put into words in the form that Hermes models learn, which is the most
common one (:func:`fit`).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, product
from typing import Any, Literal

from mmkv.calls.tools import parsed_arguments
from mmkv.engine.errors import InputError
from mmkv.prompt.part_settings import MediaSettings, Sourced

Message = dict[str, Any]
Part = dict[str, Any]

_ROLES = ("system", "user", "assistant", "tool")
# Keys under which common formats put the picture or video of a part.
_SOURCE_KEYS = ("image", "video", "url", "path", "image_url", "video_url")
_ELSEWHERE = "What it returned is shown in the next message."
_HOW = """\
To call a function, write its name and its arguments as JSON, in one such block for each call:
<tool_call>
{"name": ..., "arguments": {...}}
</tool_call>
What a call returned comes in the next message, between <tool_response> and </tool_response>."""


class Unknown(Exception):
    """Whether the text goes on from an earlier one is not known: see mmkv.prompt.resuming."""


def take_media(messages: Sequence[Message]) -> tuple[list[Message], list[Any], list[Any]]:
    """Split ``messages`` into messages with bare placeholders, pictures, and videos, in order.

    A part is {"type": "text", "text": ...}, or of type image / video (or image_url / video_url)
    with its source under "image", "video", "url", "path" or "image_url", and settings of it
    (:class:`~mmkv.prompt.part_settings.MediaSettings`): its source is then a
    :class:`~mmkv.prompt.part_settings.Sourced`. An assistant's message may have ``tool_calls``,
    ``reasoning_content`` and ``sampled``, a tool's ``tool_call_id`` and ``name``. Raises InputError
    for anything else.
    """
    plain: list[Message] = []
    images: list[Any] = []
    videos: list[Any] = []
    if isinstance(messages, (str, bytes, dict)) or not isinstance(messages, Sequence):
        raise TypeError(f"a conversation is a list of messages, not a {type(messages).__name__}")
    if not messages:
        raise InputError("the conversation is empty; give at least one user message")
    for message in messages:
        role = message.get("role") if isinstance(message, dict) else None
        if not isinstance(message, dict) or not isinstance(role, str) or role not in _ROLES:
            raise InputError(f"a message needs a role out of {', '.join(_ROLES)}, and a content")
        content: Any = message.get("content")
        if content is not None and not isinstance(content, (str, list, tuple)):
            raise InputError(
                f"a message's content is {type(content).__name__}; give a text or a list of parts"
            )
        media = {"image": images, "video": videos}
        parts = as_parts(list(content) if isinstance(content, tuple) else content)
        parts = [_bare(part, media) for part in parts]
        plain.append({"role": role, "content": parts, **_said_apart(message, role)})
    return plain, images, videos


def _bare(part: Any, media: Mapping[str, list[Any]]) -> dict[str, Any]:
    """Return a part without its source, which goes to ``media`` of its kind. Raises InputError."""
    if not isinstance(part, dict):
        raise InputError(f"a message part is {type(part).__name__}; give a dict with a type")
    kind = str(part.get("type", "")).removesuffix("_url")
    if kind in media:
        media[kind].append(_source(part, kind))
        return {"type": kind}
    if kind != "text" or not isinstance(part.get("text"), str):
        raise InputError(
            f"a message part of type {part.get('type')!r} is not understood; "
            "use text, image or video"
        )
    return {"type": "text", "text": part["text"]}


def _said_apart(message: Message, role: str) -> Message:
    """Return what a message says beside its content; fields that are None are left out."""
    calls = message.get("tool_calls")
    if calls and role != "assistant":
        raise InputError(f"a message of role {role} has tool_calls; only the assistant's may")
    if role == "tool" and message.get("content") is None:
        raise InputError("a message of role tool has no content; give what the tool returned")
    texts = {"assistant": ("reasoning_content",), "tool": ("tool_call_id", "name")}.get(role, ())
    made = {key: message[key] for key in texts if message.get(key) is not None}
    for key, value in made.items():
        if not isinstance(value, str):
            raise InputError(f"{key} is {type(value).__name__}; give a text")
    if calls is not None and role == "assistant":
        made |= {"tool_calls": plain_calls(calls)} if calls != [] else {}
    if role == "assistant" and message.get("sampled"):
        made["sampled"] = True
    return made


def is_blank(message: Message) -> bool:
    """Return whether a message says nothing in words."""
    return not text_of(message).strip()


def _source(part: dict[str, Any], kind: str) -> Any:
    """Return the source of a part, with its settings where it has any."""
    settings = {key: value for key, value in part.items() if value is not None}
    del settings["type"]
    found = None
    for key in _SOURCE_KEYS:
        value = settings.pop(key, None)
        if isinstance(value, dict):  # {"image_url": {"url": ...}}
            settings |= {name: each for name, each in value.items() if each is not None}
            value = settings.pop("url", None)
        found = value if found is None else found
    if found is None:
        raise InputError(
            f"a message part of type {part['type']!r} names no source; add 'url' or 'path'"
        )
    if kind == "image":
        settings.pop("detail", None)  # OpenAI's; pictures are read at the model's size
    return Sourced(found, MediaSettings.of(kind, settings)) if settings else found


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


def as_parts(content: str | list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Return a message's content as a list of parts."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content or ())


def text_of(message: Message) -> str:
    """Return what a message says in words."""
    return "".join(part.get("text", "") for part in as_parts(message.get("content")))


def is_open(history: Sequence[Message]) -> bool:
    """Return whether a conversation ends with a user's message to which more may come."""
    return bool(history) and history[-1]["role"] == "user"


def joined(history: Sequence[Message], messages: Sequence[Message]) -> list[Message]:
    """Return both, the first of ``messages`` as the rest of an open one of the user."""
    if not (is_open(history) and messages and messages[0]["role"] == "user"):
        return [*history, *messages]
    content = [*as_parts(history[-1]["content"]), *as_parts(messages[0]["content"])]
    return [*history[:-1], {**history[-1], "content": content}, *messages[1:]]


def with_more(message: Message, text: str) -> Message:
    """Return a message with one more text behind what it says."""
    more = {"type": "text", "text": text}
    return {**message, "content": [*as_parts(message["content"]), more]}


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
_RAW = re.compile(f"""text['"]: ?['"]{_RETURNED}""")
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

    def shown(tools: list[Any], *messages: Message) -> str:
        return render(list(messages), tools) or ""

    def marks(kind: str, tools: list[Any], *messages: Message) -> Counter[str]:
        """Count the special tokens that a picture or video adds to the last message."""
        *others, last = messages
        seen = {**last, "content": [*last["content"], {"type": kind}]}
        return count(shown(tools, *others, seen)) - count(shown(tools, *messages))

    asked, tools = _says("user", "look"), [_TOOL]
    system = _SAID in shown([], _says("system", _SAID), asked)
    repeats = render([asked, asked], []) is not None
    if not reads_tools:
        return TemplateSupport(system=system, repeats=repeats)
    called = next((one for one in _calls() if _CALLED in shown(tools, asked, one)), None)
    call, ids, broken = None, _IDS, False
    if called is not None:
        call = called["tool_calls"][0]
        ids, cut = (call["id"],), _call(f"{_CALLED}{{", called["content"], call["id"])
        broken = _CALLED in shown(tools, asked, cut)
    before = called or _says("assistant", "look")
    found = (one for one in _results(ids) if _shows_result(one, shown(tools, asked, before, one)))
    returned: Message = next(found, {})
    parts = isinstance(returned.get("content"), list)
    media = set()
    for kind in kinds if parts else ():
        wanted = marks(kind, [], _says("user", _RETURNED))
        if wanted and wanted == marks(kind, tools, asked, before, returned):
            media.add(kind)
    return TemplateSupport(
        tools=True,
        calls=called is not None,
        broken_calls=broken,
        texts=call is not None and isinstance(call["function"]["arguments"], str),
        empty=[] if called is None else called["content"],
        results=("parts" if parts else "text") if returned else None,
        media=frozenset(media),
        system=system,
        repeats=repeats,
        short_ids=_IDS[1] in (ids[0], returned.get("tool_call_id")),
    )


def _says(role: str, words: str) -> Message:
    return {"role": role, "content": [_text(words)]}


def _call(arguments: Any, content: Any, name: str) -> Message:
    made = {"id": name, "type": "function", "function": {"name": "look", "arguments": arguments}}
    return {"role": "assistant", "content": content, "tool_calls": [made]}


def _calls() -> Iterator[Message]:
    """Yield a call in each form that a template may want, the usual one first."""
    written = ({"at": _CALLED}, json.dumps({"at": _CALLED}))
    nothing: tuple[list[Part] | None, ...] = ([], None)
    for arguments, name, empty in product(written, _IDS, nothing):
        yield _call(arguments, empty, name)


def _results(ids: Iterable[str]) -> Iterator[Message]:
    """Yield what a call returned in each form that a template may want."""
    for name, content in product(ids, ([_text(_RETURNED)], _RETURNED)):
        yield {"role": "tool", "name": "look", "tool_call_id": name, "content": content}


def _shows_result(result: Message, shown: str) -> bool:
    """Whether a template shows a result, and not Python's text of a list of parts."""
    raw = isinstance(result["content"], list) and _RAW.search(shown)
    return _RETURNED in shown and not raw


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
            content = _joined_texts(parts)
            made.append(Fitted({"role": "user", "content": content}, run[0][0], ours=True))
        elif tool:
            made += _fitted_results(run, shown)
        else:
            made += [Fitted(_called(message, shown), at) for at, message in run]
    if tools and not shown.tools:
        _describe(made, tools, shown, apart)
    return made if shown.repeats else _alternating(made)


def _fitted_results(run: list[tuple[int, Message]], shown: TemplateSupport) -> list[Fitted]:
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
    readable = all(isinstance(call["function"]["arguments"], dict) for call in calls)
    if not shown.calls or not (readable or shown.broken_calls):
        return _in_words(message, calls)
    if shown.texts:
        calls = [_with_text(call) for call in calls]
    if shown.short_ids:
        calls = [{**call, "id": _nine(str(call.get("id", at)))} for at, call in enumerate(calls)]
    content = message["content"] or shown.empty
    return {**message, "content": content, "tool_calls": calls}


def _in_words(message: Message, calls: Sequence[Message]) -> Message:
    """Return a message with its calls as blocks of text, behind what it says."""
    content = message["content"]
    before = "\n" if any(part.get("text", "x") for part in content) else ""
    blocks = "\n".join(_block(call["function"]) for call in calls)
    plain = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**plain, "content": _joined_texts([*content, _text(before + blocks)])}


def _with_arguments(call: Message) -> Message:
    """Return a call whose arguments are a dict, where they are one."""
    arguments = call["function"]["arguments"]
    if isinstance(arguments, str):
        arguments = parsed_arguments(arguments)
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
    place.message = {**place.message, "content": _joined_texts(content)}


def _alternating(made: list[Fitted]) -> list[Fitted]:
    """Return them with user's messages that are ours joined to those beside them."""
    kept: list[Fitted] = []
    for one in made:
        last = kept[-1] if kept else None
        both_user = last is not None and one.message["role"] == last.message["role"] == "user"
        if last is None or not both_user or not (one.ours or last.ours):
            kept.append(one)
            continue
        content = _joined_texts([*last.message["content"], _text("\n"), *one.message["content"]])
        source = one.source if last.source is None else last.source
        kept[-1] = Fitted({**last.message, "content": content}, source, ours=True)
    return kept


def _text(words: str) -> Part:
    return {"type": "text", "text": words}


def _joined_texts(parts: Iterable[Part]) -> list[Part]:
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
