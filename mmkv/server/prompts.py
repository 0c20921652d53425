"""Conversations as requests send them: cut at the ends of messages, and hashed message by message.

Texts that cannot fit into the model's context are refused before they are rendered: rendering and
tokenizing run on the engine thread and hold Python's lock, so that everybody's next token waits.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from mmkv.calls.parser import ReplyParser, parse
from mmkv.calls.tools import parsed_arguments
from mmkv.engine.errors import ContextError, InputError
from mmkv.prompt.messages import Unknown, as_parts
from mmkv.prompt.special import new_marker, reading, require_no_long_run

if TYPE_CHECKING:
    from mmkv.calls.parser import ParsedReply, ThoughtMarks
    from mmkv.calls.tools import ToolCall
    from mmkv.engine.contents import Span
    from mmkv.prompt.template import ChatTemplate, RenderedConversation


_FEW = 3  # messages, up to which each is rendered to find its end
_MOST_RENDERED = 512  # the same of a template whose loop does not tell: more would take seconds
_SHORT = 256  # characters of a question that is cheaper to read again than to end a pass after


@dataclass(frozen=True)
class Segment:
    """Text that is appended at once.

    Attributes:
        first, last: the messages that end in it, ``messages[first:last]``; none for the opening
            of the reply, or if the template renders nothing for one.
        held: tokens at its beginning that the session holds already.
    """

    text: str
    first: int
    last: int
    held: int = 0


@dataclass(frozen=True)
class Rendered:
    """A text by its length and SHA-256: enough to know it again."""

    length: int
    digest: bytes

    @classmethod
    def of(cls, text: str) -> Rendered:
        """Return that of ``text``."""
        return cls(len(text), hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest())

    def begins(self, text: str) -> bool:
        """Whether ``text`` begins with it."""
        return len(text) >= self.length and Rendered.of(text[: self.length]) == self


@dataclass(frozen=True)
class Outline:
    """A conversation's text, and what of it is to be read.

    Attributes:
        text: all of it, up to the opening of the reply, or the end of that.
        segments: its end, cut; whoever reads one takes it out.
        whole: whether ``text`` is all of it.
    """

    text: str
    segments: list[Segment]
    whole: bool = True

    def rendered(self) -> Rendered | None:
        """Return the text that has been read, but for the reply; None: it is not all here."""
        if not self.whole:
            return None
        left = sum(len(one.text) for one in self.segments)
        return Rendered.of(self.text[: len(self.text) - left])


def outline(
    template: ChatTemplate,
    messages: Sequence[dict[str, Any]],
    held: int = 0,
    replied: bool = False,
    known: Rendered | None = None,
) -> Outline | None:
    """Return what follows the first ``held`` messages, a segment per message and the opening.

    A segment ends where the text of the messages so far is a beginning of the whole text, so how
    the first messages are cut does not depend on those after them. A short last message without
    pictures goes into one segment with the opening: who asks once more has that read again.

    Args:
        replied: whether the last of those held is a reply that was sampled: the text after it
            (an end marker) is still to come, and comes with the next message.
        known: the text that was read of those held, but for such a reply. While the template shows
            it still, they need not be rendered by themselves.

    Returns:
        None where the template would render the held messages in another way now than before.

    Raises:
        InputError: the template refuses the messages.
    """
    shown, done = list(messages), 0
    marker = new_marker()
    if replied:
        shown[held - 1] = {"role": "assistant", "content": marker}
    layout = template.layout(shown, opening=True)
    text = whole = layout.text
    if replied:
        before, found, after = whole.rpartition(marker)
        same = known is not None and known.length == len(before) and known.begins(before)
        if not found or not (same or before == template.before_reply(shown[: held - 1])):
            return None
        done = len(before) + len(marker)
        said = "".join(part.get("text", "") for part in as_parts(messages[held - 1]["content"]))
        text = before + said + after
    elif held and known is not None and known.begins(whole):
        done = known.length
    elif held:
        before = template.render(shown[:held], opening=False)
        if not whole.startswith(before):
            return None
        done = len(before)
    return Outline(text, _cut(messages, whole, held, done, _ends(template, shown, held, layout)))


def outline_unread(
    template: ChatTemplate,
    messages: list[dict[str, Any]],
    held: int,
    layout: RenderedConversation,
    rest: str,
) -> Outline:
    """Do as :func:`outline` where it is known what has been read of the text.

    Args:
        layout: the messages with the opening of a reply, or what follows a checkpoint.
        rest: the end of its text that has not been read.

    Raises:
        Unknown: ends of messages cannot be told from the checkpoint on.
    """
    done, ends = len(layout.text) - len(rest), _ends(template, messages, held, layout)
    segments = _cut(messages, layout.text, held, done, ends)
    return Outline(layout.text, segments, layout.after is None)


def _cut(
    messages: Sequence[dict[str, Any]],
    whole: str,
    first: int,
    done: int,
    ends: Sequence[tuple[int, int]],
) -> list[Segment]:
    """Cut what follows the first ``done`` characters, and ``first`` messages, at ``ends``."""
    found = []
    for last, end in ends:
        if end > done:
            found.append(Segment(whole[done:end], first, last))
            done, first = end, last
    if done < len(whole):
        rest, last = whole[done:], len(messages)
        if found and first == last and _is_short(messages[found[-1].first :]):
            question = found.pop()
            rest, first = question.text + rest, question.first
        found.append(Segment(rest, first, last))
    return found


def _is_short(messages: Sequence[dict[str, Any]]) -> bool:
    parts = [part for message in messages for part in as_parts(message["content"])]
    if any(part["type"] != "text" for part in parts):
        return False
    return sum(len(part["text"]) for part in parts) <= _SHORT


def _ends(
    template: ChatTemplate, shown: list[dict[str, Any]], held: int, layout: RenderedConversation
) -> list[tuple[int, int]]:
    """Return how many messages end where in the text, of those after the ``held`` ones."""
    if len(shown) - held > _FEW:
        if layout.after is not None:
            raise Unknown
        found = _ends_by_loop(template, shown, layout)
        if found is not None:
            return [(last, end) for last, end in enumerate(found, 1) if last > held and end > 0]
        if len(shown) - held > _MOST_RENDERED:
            raise InputError(
                "this model's chat template has to render a conversation once for each of its "
                f"messages, so at most {_MOST_RENDERED} are read at once; send fewer"
            )
    each = range(held + 1, len(shown) + 1)
    found = [_length(template, shown[:last], layout) for last in each[:-1]]
    found += [_whole_length(template, shown, layout)] if each else []
    return [(last, end) for last, end in zip(each, found, strict=True) if end > 0]


def _ends_by_loop(
    template: ChatTemplate, shown: list[dict[str, Any]], layout: RenderedConversation
) -> list[int] | None:
    """Return where each message ends, by where the template's loop began the next one.

    So a long conversation is not rendered once for each of its messages. Trusted if it is true of
    the last two messages and of the system's, and if the last one changes nothing before it.

    Returns:
        0 for messages of the system that do not end by themselves; None where it is not so.
    """
    whole, begins = layout.text, layout.begins
    try:
        before = template.layout(shown[:-1], opening=False)
    except InputError:
        return None
    ends = [*begins[1:], _whole_length(template, shown, layout)]
    if len(before.text) != ends[-2] or not whole.startswith(before.text):
        return None
    if before.begins[1:] != begins[1:-1] or min(ends) < 0 or sorted(ends) != ends:
        return None
    leading = next((i for i, one in enumerate(shown) if one["role"] != "system"), len(shown))
    if leading and _length(template, shown[:leading], layout) != ends[leading - 1]:
        ends[:leading] = [0] * leading
    return ends


def _whole_length(
    template: ChatTemplate, shown: list[dict[str, Any]], layout: RenderedConversation
) -> int:
    """Return the length of the text without its opening if it begins with that, else 0."""
    return _length(template, shown, layout) if layout.end is None else layout.end


def _length(
    template: ChatTemplate, messages: list[dict[str, Any]], layout: RenderedConversation
) -> int:
    """Return the length of the messages' text if that of ``layout`` begins with it, else 0."""
    try:
        text = template.closed(messages, layout.after)
    except InputError:  # a template may want a user's message after the system's
        return 0
    return len(text) if layout.text.startswith(text) else 0


Kind = Literal["text", "image", "video"]


@dataclass(frozen=True)
class Part:
    """A text, or a picture or video by its URL.

    Attributes:
        digest: of a picture's or video's bytes; None until they are known.
        options: settings of a picture or video, see mmkv.prompt.part_settings.
    """

    kind: Kind
    text: str = ""
    url: str = field(default="", repr=False)
    digest: str | None = None
    options: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Begun:
    """What a reply begins with: a text, and a thought that stands before it."""

    text: str = ""
    thought: str | None = None


@dataclass(frozen=True)
class Message:
    """One message; neighbouring texts are one part.

    Attributes:
        calls: of functions, by the assistant; thought: before them and the text.
        call_id: of the call that a tool answers; name: of the function.
        sampled: a reply with calls or thoughts as the model wrote it, where that is known: the
            template is shown that.
        open: of the user: it goes on with the next one, as what was observed does.
    """

    role: str
    parts: tuple[Part, ...]
    calls: tuple[ToolCall, ...] = ()
    thought: str | None = None
    call_id: str | None = None
    name: str | None = None
    sampled: str | None = None
    open: bool = False

    @property
    def media(self) -> list[Part]:
        """Return its pictures and videos."""
        return [part for part in self.parts if part.kind != "text"]

    @property
    def texts(self) -> list[str]:
        """Return its texts."""
        return [part.text for part in self.parts if part.kind == "text"]

    def with_digests(self, digests: Mapping[Part, str]) -> Message:
        """Return it with the digests of some of its media."""
        named = [
            replace(part, digest=digests[part]) if part in digests else part for part in self.parts
        ]
        return replace(self, parts=tuple(named))

    def without_urls(self) -> Message:
        """Return it without URLs, which can be megabytes: its media were read."""
        if not any(part.url for part in self.parts):
            return self  # memories of one conversation share its first messages
        return replace(self, parts=tuple(replace(part, url="") for part in self.parts))

    def without_thought(self, sampled: str | None = None) -> Message:
        """Return it without its thought; ``sampled``: what is left of a reply with calls."""
        if self.thought is None:
            return self
        return replace(self, thought=None, sampled=sampled if self.calls else None)

    def stripped(self) -> Message:
        """Return it without the spaces around its texts."""
        texts = [replace(one, text=one.text.strip()) for one in self.parts]
        return replace(self, parts=tuple(one for one in texts if one.text or one.kind != "text"))

    def for_template(self) -> dict[str, Any]:
        """Return it as chat templates take it, pictures and videos as bare placeholders."""
        texts = {"type": "text"}
        parts = [
            {**texts, "text": part.text} if part.kind == "text" else {"type": part.kind}
            for part in self.parts
        ]
        made: dict[str, Any] = {"role": self.role, "content": parts}
        if self.sampled is not None:
            made = {"role": self.role, "content": [{**texts, "text": self.sampled}]}
            made["sampled"] = True
        elif self.thought:
            made["reasoning_content"] = self.thought
        if self.calls:
            made["tool_calls"] = [one.for_template() for one in self.calls]
        if self.call_id is not None:
            made["tool_call_id"] = self.call_id
        if self.name is not None:
            made["name"] = self.name
        return made

    def shown(self) -> dict[str, Any]:
        """Return it for a client, pictures and videos as bare marks."""
        made = replace(self, sampled=None).for_template()
        calls = {"tool_calls": [one.as_json() for one in self.calls]} if self.calls else {}
        return made | calls

    def shown_with_media(self) -> dict[str, Any]:
        """Return it for a client, with the digests by which its pictures and videos are asked."""
        return self.shown() | {"content": [_marked(part) for part in self.parts]}


def is_open(messages: Sequence[Message]) -> bool:
    """Return whether one of the messages goes on with the next one."""
    return any(one.open for one in messages)


def closed(messages: Sequence[Message], spans: Sequence[Span] = ()) -> tuple[list[Message], Any]:
    """Return messages as a template is shown them: open ones are one with what follows.

    Args:
        spans: of the tokens of each; empty where that is not known.

    Returns:
        the messages; the spans of these.
    """
    made: list[Message] = []
    places: list[Span] = []
    for at, message in enumerate(messages):
        span = spans[at] if at < len(spans) else (0, 0)
        if made and made[-1].open and message.role == "user":
            before, start = made.pop(), places.pop()[0]
            message = replace(message, parts=before.parts + message.parts)
            span = start, span[1]
        made.append(message)
        places.append(span)
    return made, places if spans else ()


def _marked(part: Part) -> dict[str, Any]:
    if part.kind == "text":
        return {"type": "text", "text": part.text}
    return {"type": part.kind, "digest": part.digest}


def reply_message(parsed: ParsedReply, sampled: str) -> Message:
    """Return a reply as the message that a client sends back.

    Args:
        sampled: all of it, as the model wrote it.
    """
    apart = bool(parsed.calls) or parsed.thought is not None
    return Message(
        "assistant",
        (Part("text", parsed.text),) if parsed.text else (),
        tuple(parsed.calls),
        parsed.thought,
        sampled=sampled if apart else None,
    )


@dataclass(frozen=True)
class Sampled:
    """A reply with calls or a thought as the model wrote it.

    Attributes:
        at: which message it is; text: all of it; thought: in it, None where it has none.
    """

    at: int
    text: str
    thought: str | None


def with_sampled(messages: Sequence[Message], sampled: Sequence[Sampled]) -> list[Message]:
    """Return messages of which some are replies that are known as the model wrote them.

    One that was sent with another thought stays as it was sent. Those behind them are left out.
    """
    made = list(messages)
    for one in sampled:
        if one.at < len(made) and made[one.at].sampled is None:
            sent = (made[one.at].thought or "").strip()
            if sent in ("", (one.thought or "").strip()):
                made[one.at] = replace(made[one.at], sampled=one.text)
    return made


def thought_apart(message: Message, marks: ThoughtMarks) -> Message:
    """Return a reply without the thought that some clients send back as part of its text."""
    text = "".join(message.texts)
    if message.role != "assistant" or message.calls or message.media or marks.close not in text:
        return message
    parsed = parse(ReplyParser(marks=marks), text)
    return message if parsed.thought is None else reply_message(parsed, text)


def chain(base_key: str, messages: Sequence[Message], rule: object = None) -> list[str]:
    """Return a key per message: a hash of it, all before it, and ``base_key``.

    Args:
        base_key: a hash of what else the memory depends on.
        messages: with the digests of their media.
        rule: by which pictures are read in a conversation with so many; None: by the same always.
    """
    key, keys = base_key, []
    for message in messages:
        key = link(key, message, rule)
        keys.append(key)
    return keys


def pictures_in(messages: Sequence[Message]) -> int:
    """Count the pictures, without videos."""
    return sum(part.kind == "image" for one in messages for part in one.parts)


def link(before: str, message: Message, rule: object = None) -> str:
    """Return the key of ``message`` after the one with key ``before``."""
    parts: list[list[Any]] = [
        ["text", part.text] if part.kind == "text" else [part.kind, part.digest, part.options]
        for part in message.parts
    ]
    if rule is not None:
        parts = [[*part, rule] if part[0] == "image" else part for part in parts]
    assert not any(kind != "text" and value is None for kind, value, *_ in parts)
    # Ids of calls are left out, and thoughts, which some clients do not send back.
    calls = [[one.name, parsed_arguments(one.arguments)] for one in message.calls]
    more = [*([calls] if calls else []), *(["open"] if message.open else [])]
    return digest_of([before, message.role, parts, *more])


_json = json.JSONEncoder(sort_keys=True).encode  # json.dumps makes an encoder each time


def digest_of(value: Any) -> str:
    """Return SHA-256 of a value that JSON can write."""
    return hashlib.sha256(_json(value).encode()).hexdigest()


# Characters a token up to which a text is not counted: prompts that fit have about as many.
_USUAL = 4
# Tokens of one message that are read at least, where sessions go on beyond the context.
_MESSAGE = 2**17
_PIECE = 2**16  # characters that are tokenized at once: a few MB
# Tokens that cutting a text at one place may add: those of the word that is cut.
_CUT = 64
_PROBES = ("\ue000", " ", "\n")  # a character that no vocabulary has, and some that may be dropped
_PROBED = 2**12


class ContextBounds:
    """Bounds on the texts of a request by what the model can read.

    A conversation that goes on beyond the model's context has a bound of the server's instead, and
    each of its messages one of its own: it is tokenized at once.

    Args:
        tokenizer: the model's; it is used beside the engine thread, without changing it.

    Attributes:
        longest: characters of the longest token, added ones too; None where a token may stand for
            any number of characters.
    """

    def __init__(self, tokenizer: Any, context: int) -> None:
        self.context, self.message = context, max(context, _MESSAGE)
        self._inner: Any = getattr(tokenizer, "backend_tokenizer", None)
        most = max(map(len, tokenizer.get_vocab()), default=0)
        counts = [
            len(tokenizer(one * _PROBED, add_special_tokens=False, verbose=False)["input_ids"])
            for one in _PROBES
        ]
        self.longest = most if min(counts) * most >= _PROBED else None

    def require_possible(self, messages: Sequence[int], most: int | None = None) -> None:
        """Raise ContextError if texts have so many characters that they must have too many tokens.

        Args:
            messages: characters of each message; most: tokens of the conversation; None: as many as
                the context has positions.
        """
        most = self.context if most is None else most
        bounds = [(sum(messages), most)]
        if most > self.context:
            bounds.append((max(messages, default=0), self.message))
        for characters, tokens in bounds:
            if self.longest is not None and characters > tokens * self.longest:
                what = self._what(tokens, most)
                raise ContextError(f"{characters:,} characters are more than {what}")

    async def count(self, messages: Sequence[Sequence[str]], most: int | None = None) -> None:
        """Count the tokens of long texts, in a thread. Raises ContextError, InputError.

        What a template adds is not counted: the engine thread counts again.

        Args:
            messages: the texts of each; most: as in :meth:`require_possible`.
        """
        most = self.context if most is None else most
        for texts in messages:
            for text in texts:
                require_no_long_run(text)
        counted = [([text for texts in messages for text in texts], most, _USUAL * most)]
        if most > self.context:
            counted += [(list(texts), self.message, self.message) for texts in messages]
        for texts, tokens, usual in counted:
            if self._inner is not None and sum(map(len, texts)) > usual:
                await asyncio.to_thread(self._count, texts, tokens, most)

    def _count(self, texts: Sequence[str], tokens: int, most: int) -> None:
        # Only this call of tokenizers lets other threads run meanwhile.
        left = tokens
        for text in texts:
            for start in range(0, len(text), _PIECE):
                left += _CUT * (start > 0)
                piece = text[start : start + _PIECE].encode("utf-8", "replace").decode()
                with reading(piece):
                    (found,) = self._inner.encode_batch_fast([piece], add_special_tokens=False)
                left -= len(found)
                if left < 0:
                    raise ContextError(f"there are more tokens than {self._what(tokens, most)}")

    def _what(self, tokens: int, most: int) -> str:
        """Say what so many tokens are the bound of, and what to do."""
        if tokens == most == self.context:
            return f"the model's context of {tokens:,} positions holds; shorten the conversation"
        if tokens == most:
            return f"the {tokens:,} tokens that this server keeps of a conversation; shorten it"
        return f"the {tokens:,} tokens that one message may have; send it in several messages"
