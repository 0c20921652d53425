"""Render chat templates one turn at a time.

A session holds the tokens of the dialogue so far. What a new turn adds is the text that the
template puts after the latest reply: the end-of-turn marker, the new messages, and the opening of
the next reply. It is found by rendering the dialogue with a marker in place of that reply, so it
does not depend on what the reply was, and the tokens the model sampled stay as they are.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

from mmkv.calls.formats import format_of
from mmkv.calls.parser import thought_marks
from mmkv.engine.errors import STOPS, InputError, first_line
from mmkv.prompt.messages import (
    Fitted,
    Message,
    TemplateSupport,
    Unknown,
    as_parts,
    fit,
    is_open,
    joined,
    plain_tools,
    probe,
    text_of,
    with_more,
)
from mmkv.prompt.special import CUT, Cutter, new_marker

if TYPE_CHECKING:
    from mmkv.prompt import sandbox
    from mmkv.prompt.resuming import Boundaries, TemplateReading

NO_TEMPLATE = "this model's tokenizer has no chat template: the text is continued as it stands"
REWRITES = (
    "the chat template shows earlier messages in another way now; what was said before stays as it "
    "was read"
)


@dataclass(frozen=True)
class Addition:
    """Text that a turn appends.

    Attributes:
        continuing: whether a reply stands before it.
        differs: that what stands before it is not what the template shows now; None: it is.
    """

    text: str
    continuing: bool
    differs: str | None = None


@dataclass(frozen=True)
class RenderedConversation:
    """A rendered conversation.

    Attributes:
        text: all of it, or what follows ``after``.
        begins: per message, how many characters stand before what the template's loop over
            messages makes of it; -1 where no loop came to it, or it was joined to the one before.
        end: the length of the text without the opening of a reply, where ``text`` is known to
            begin with that; else None.
        after: the checkpoint that was gone on from; None: all was rendered.
        checkpoint: from which a longer one may go on; None: none was found, or looked for.
    """

    text: str
    begins: list[int]
    end: int | None
    after: ResumePoint | None = None
    checkpoint: ResumePoint | None = None

    @property
    def length(self) -> int:
        """Count the characters of the whole text, cuts left out."""
        return (0 if self.after is None else self.after.length) + len(self.text.replace(CUT, ""))


@dataclass(frozen=True)
class ResumePoint:
    """A place between messages from which the rendering of a longer conversation can go on.

    Attributes:
        messages: those before it. length: characters of their text, cuts left out.
        template: what rendered it. items: messages as it saw them, by number: the first two and
            the last. boundaries: where it stood.
    """

    messages: list[Message]
    length: int
    template: tuple[Any, ...]
    items: Mapping[int, Message]
    boundaries: Boundaries


def _apart(value: Any) -> Any:
    """Copy lists and dicts, which their owner may change; what they hold stays the same object."""
    if isinstance(value, dict):
        return {name: _apart(part) for name, part in value.items()}
    return [_apart(part) for part in value] if isinstance(value, list) else value


_LATEST = 4  # messages before which a checkpoint is looked for
Layout = Callable[[list[Message], bool], RenderedConversation]
# What every template is rendered with.
_GIVEN = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


class ChatTemplate:
    """The template of one tokenizer; messages are in the transformers chat format.

    ``parts``: whether message contents are passed as lists of parts (vision models) or as plain
    strings (text models). ``source``: the Jinja text, or None for plain continuation.
    ``placeholders``: per kind of part, what stands for it when there is no template. ``raw``: no
    template was wanted. ``tokens``: texts beside the tokenizer's special tokens that the model
    reads as tokens. ``prefix``: the text that the reply begins with; ``thought``: one that stands
    before it.

    Special tokens in messages are text: they are rendered with cuts, which
    :mod:`mmkv.prompt.special` knows how to tokenize. A message with ``"sampled": True`` holds a
    reply as the model wrote it, its calls and thoughts in the text: :attr:`markers` are tokens
    there. Beside that text it may have ``tool_calls``, which are shown if the template refuses it.

    Attributes:
        call_format: how the model writes calls; thoughts: the marks of its thoughts, if any.
        markers: special tokens that a reply may hold, such as ``[TOOL_CALLS]``.
    """

    def __init__(
        self,
        tokenizer: Any,
        source: str | None,
        parts: bool,
        placeholders: dict[str, str] | None = None,
        tokens: Sequence[str] = (),
    ) -> None:
        self._tokenizer, self.source, self._parts = tokenizer, source, parts
        self._placeholders = placeholders or {}
        self._cutter, self._tokens = Cutter(tokenizer, tokens), tokens
        self._cutter_of_results = Cutter(tokenizer, [*tokens, *_marks_in(source, tokenizer)])
        self._values: dict[str, Any] = {}
        self._tools: list[dict[str, Any]] = []
        self._probed: list[TemplateSupport] = []  # shared by copies
        self._odd: list[bool] = []  # whether it does what cannot be followed; shared by copies
        self.call_format, self.thoughts = format_of(source), thought_marks(source)
        thoughts = () if self.thoughts is None else (self.thoughts.open, self.thoughts.close)
        self.markers = frozenset((*self.call_format.special, *thoughts))
        self.raw, self.prefix = False, ""
        self.thought: str | None = None

    def as_raw(self) -> ChatTemplate:
        """Return one that passes texts on as they are, on purpose: for models without a chat."""
        made = ChatTemplate(self._tokenizer, None, self._parts, self._placeholders, self._tokens)
        made.raw, made.markers, made._tools = True, self.markers, self._tools
        return made

    @cached_property
    def reads_tools(self) -> bool:
        """Whether the template lists tools; else they are put into words in a message."""
        return "tools" in self._read

    @cached_property
    def variables(self) -> frozenset[str]:
        """The names of what the template reads beside messages and special tokens."""
        return frozenset(name for name in self._read - _GIVEN if not name.endswith("_token"))

    @cached_property
    def _read(self) -> frozenset[str]:
        if self.source is None:
            return frozenset()
        from mmkv.prompt import sandbox

        try:
            return sandbox.variables(self.source)
        except STOPS:
            raise
        except BaseException:  # rendering will say what is wrong
            return frozenset()

    def with_values(self, values: Mapping[str, Any]) -> ChatTemplate:
        """Return one that is told more, such as ``enable_thinking=False``.

        Raises:
            InputError: the template reads no variable of that name.
        """
        for name in values:
            if name not in self.variables:
                known = ", ".join(sorted(self.variables)) or "no variables"
                raise InputError(
                    f"the model's chat template does not read {name!r}; it has {known}"
                )
        made = copy.copy(self)
        made._values = {**self._values, **values}
        return made

    def with_prefix(self, prefix: str, thought: str | None = None) -> ChatTemplate:
        """Return one whose opening of the reply goes on with the first words of that."""
        made = copy.copy(self)
        made.prefix, made.thought = prefix, thought
        return made

    def prefix_in(self, text: str) -> str:
        """Return the prefix as it stands at the end of ``text``: a template may trim it there."""
        whole = text.replace(CUT, "").endswith(self.prefix.lstrip())
        return self.prefix if whole else self.prefix.rstrip()

    @cached_property
    def reply_blank(self) -> str:
        """Return the white space that an earlier reply has before it, and the opening of a new one
        has not: the model writes it then, as SmolVLM and LLaVA-1.5 do.
        """
        asked, marker = [{"role": "user", "content": "a"}], new_marker()
        if self.source is None:
            return ""
        try:
            opening = self.before_reply(asked)
            shown = self.render([*asked, {"role": "assistant", "content": marker}], opening=False)
        except InputError:  # asked in another way it may not refuse
            return ""
        before, found, _ = shown.partition(marker)
        blank = before.removeprefix(opening) if found and before.startswith(opening) else ""
        return blank if blank.isspace() else ""

    @cached_property
    def turn_end(self) -> str:
        """The special token that stands right behind what the assistant says in a conversation,
        where it ends the turn or begins the next one; empty: another text, or no template.
        """
        if self.source is None:
            return ""
        marker = new_marker()
        asked, said = {"role": "user", "content": "a"}, {"role": "assistant", "content": marker}
        try:
            shown = self.render([asked, said, asked], opening=False)
        except InputError:  # asked in another way it may not refuse
            return ""
        return self._cutter.begins(shown.partition(marker)[2].lstrip())

    def before_reply(self, messages: list[Message]) -> str:
        """Render messages and the opening of a reply, of which nothing has been said."""
        return self.with_prefix("").render(messages, opening=True)

    def with_tools(self, tools: Sequence[dict[str, Any]]) -> ChatTemplate:
        """Return one that shows functions the model may call.

        Args:
            tools: dicts {"type": "function", "function": {"name", "description", "parameters"}}.

        Raises:
            InputError: they are none.
        """
        _ = self.reads_tools  # found once, and not by each copy
        made = copy.copy(self)
        made._tools = self._cutter.cut_all(plain_tools(tools))
        return made

    def addition(self, history: list[Message], turn: list[Message], ends: bool = True) -> Addition:
        """Return the text to append for ``turn`` to ``history``.

        The last message of ``turn`` is the user's, or what a tool returned.
        A marker is rendered in place of the latest reply; what follows it is the new text. Where
        ``history`` ends with an open message of the user, the marker stands at its end.

        Args:
            ends: whether the turn ends, and a reply is opened; False: more may follow it.
        """

        def shown(messages: list[Message]) -> str:
            return self.render(messages, opening=True) if ends else self.render_open(messages)

        if self.source is None:
            plain = self.with_tools([]) if history else self  # the first turn has named them
            return Addition(plain.render(turn, opening=True), bool(history))
        marker = new_marker()
        if is_open(history):
            marked = joined(history[:-1], [with_more(history[-1], marker)])
            before, found, after = shown(joined(marked, turn)).rpartition(marker)
            held = self.render_open(history).replace(CUT, "")
            if not found or before.replace(CUT, "") != held:
                raise InputError(
                    "this model's chat template moves what was observed when more follows it; ask "
                    "a question first, or observe all of it at once"
                )
            return Addition(after, True)
        if not any(message["role"] == "assistant" for message in history):
            return Addition(shown(history + turn), False)
        reply = max(i for i, message in enumerate(history) if message["role"] == "assistant")
        marked = [*history[:reply], {"role": "assistant", "content": marker}]
        whole = shown(marked + history[reply + 1 :] + turn)
        before, found, after = whole.rpartition(marker)
        if not found:
            raise InputError(
                "this model's chat template drops earlier replies, so a turn cannot be appended; "
                "start a new conversation"
            )
        rendered = shown(history + turn).replace(CUT, "")
        # Stable: the template shows the past as it did before, and the reply's own words.
        stable = before == self.before_reply(history[:reply])
        before, end = before.replace(CUT, ""), after.replace(CUT, "")
        if _is_written_out(history[reply]):
            stable &= rendered == before + text_of(history[reply]) + end
        else:  # only the template knows the words of its calls and thoughts
            stable &= rendered.startswith(before) and rendered[len(before) :].endswith(end)
        return Addition(after, True, differs=None if stable else REWRITES)

    def render_open(self, messages: list[Message]) -> str:
        """Render messages up to where more of the last one may follow.

        Raises:
            InputError: the template does not show one text behind the other.
        """
        return self._open(messages, self.layout).text

    def _open(self, messages: list[Message], layout: Layout) -> RenderedConversation:
        """Do as :meth:`render_open`; ``layout``: renders messages."""
        if self.source is None:
            return layout(messages, False)
        marker = new_marker()
        made = layout([*messages[:-1], with_more(messages[-1], marker)], False)
        before, found, after = made.text.partition(marker)
        if not found or marker in after:
            raise InputError(
                "this model's chat template does not show what is added to a message at its end, "
                "so nothing can be observed; ask with the pictures instead"
            )
        return replace(made, text=before.removesuffix(CUT), end=None)

    def render(self, messages: list[Message], opening: bool) -> str:
        """Render the template; ``opening`` adds the beginning of the assistant's reply."""
        return self.layout(messages, opening).text

    def go_on(
        self, messages: list[Message], ends: bool, after: ResumePoint | None
    ) -> RenderedConversation:
        """Render what follows a checkpoint, where what stands before it is what it was; else all.

        Args:
            ends: whether a reply is opened; False: as :meth:`render_open`.
            after: of an earlier rendering; the next one's is in what is returned.

        Raises:
            InputError: the template refuses the messages.
        """

        def shown(layout: Layout) -> RenderedConversation:
            if not ends:
                return self._open(messages, layout)
            return self._with_prefix(messages, layout) if self.prefix else layout(messages, True)

        for start in () if self._odd else (None,) if after is None else (after, None):
            try:
                return shown(partial(self._follow, after=start))
            except (Unknown, InputError):  # the whole may be shown all the same
                pass
        made = shown(self.layout)
        self._odd[:] = [True]
        return made

    def closed(self, messages: list[Message], after: ResumePoint | None) -> str:
        """Render messages without the opening of a reply, or what follows a checkpoint.

        Raises:
            Unknown: not from there; InputError: the template refuses them.
        """
        if after is None:
            return self.render(messages, opening=False)
        return self._follow(messages, False, after).text

    def _follow(
        self, messages: list[Message], opening: bool, after: ResumePoint | None
    ) -> RenderedConversation:
        """Render what follows a checkpoint (all without one), and look for the next.

        Raises:
            Unknown: not from there; InputError: a message cannot be shown.
        """
        from mmkv.prompt import sandbox
        from mmkv.prompt.resuming import TemplateReading

        if self.source is None:
            raise Unknown
        try:
            within = sandbox.opens_within(self.source) and opening
        except STOPS:
            raise
        except BaseException as error:  # it is no template, which the whole rendering says
            raise Unknown from error
        key = self.source, self._values, self._tools, within
        begin, done, items = 0, 0, dict[int, Message]()
        if after is not None:
            begin, done, items = after.boundaries.at, len(after.messages), {**after.items}
            if after.template != key or messages[:done] != after.messages or done >= len(messages):
                raise Unknown
        fitted = self._fit(self._cut(messages[done:]), again=after is not None)
        shaped = [self._shape(one.message) for one in fitted]
        items |= enumerate(shaped, begin)
        places = self._places(messages, fitted, begin, done)
        known = None if after is None else after.boundaries
        tools = self._tools if self.reads_tools else []
        reading = TemplateReading(items, begin + len(shaped), places.keys(), known, tools)
        marks = sandbox.Marks(dict.fromkeys(map(id, shaped), -1))
        try:
            text = self._rendered(shaped, tools, opening, marks, reading)
            found = reading.boundaries()
        except STOPS:
            raise
        except BaseException as error:
            raise Unknown from error
        cut = reading.cut or 0
        end = marks.end if opening else len(text)
        begins = self._begins(fitted, shaped, marks, len(messages), done)
        made = RenderedConversation(
            text[cut:],
            [one - cut if one >= cut else -1 for one in begins],
            None if end is None else end - cut,
            after,
        )
        if found is None:
            return made
        stands = replace(made, text=text[cut : found.written]).length
        first = [] if after is None else after.messages
        before = [*first, *map(_apart, messages[done : places[found.at]])]
        kept = {at: items[at] for at in (0, 1, found.at - 1) if at < found.at}
        return replace(made, checkpoint=ResumePoint(before, stands, key, kept, found))

    def _places(
        self, messages: list[Message], fitted: Sequence[Fitted], begin: int, done: int
    ) -> dict[int, int]:
        """Return before which messages, as the template sees them, a checkpoint may be.

        That is where :func:`fit` changes nothing on one side for what stands on the other.

        Args:
            fitted: those from the message with number ``done`` on; begin: the first one's number.

        Returns:
            per number of such a message that of the message it is made of.
        """
        made = {begin: done} if begin else {}
        asked = next(
            (at for at, one in enumerate(messages) if one["role"] == "user"), len(messages)
        )
        for number, one in list(enumerate(fitted, begin))[-_LATEST:]:
            at = 0 if one.source is None else done + one.source
            two = [each["role"] in ("user", "tool") for each in messages[max(at - 1, 0) : at + 1]]
            if at > asked and not all(two):
                made[number] = at
        return made

    def layout(self, messages: list[Message], opening: bool) -> RenderedConversation:
        """Do as :meth:`render`; say where the messages stand in the text, too."""
        if opening and self.prefix:
            return self._with_prefix(messages, self.with_prefix("").layout)
        fitted = self._fit(self._cut(messages))
        if self.source is None:
            text = "".join(self._plain(one.message) for one in fitted)
            return RenderedConversation(text, [-1] * len(messages), len(text))
        from mmkv.prompt import sandbox

        shaped = [self._shape(one.message) for one in fitted]
        marks = sandbox.Marks(dict.fromkeys(map(id, shaped), -1))
        try:
            text = self._rendered(shaped, self._tools if self.reads_tools else [], opening, marks)
        except (InputError, *STOPS):
            raise
        # A template can fail in any way that a program can.
        except BaseException as error:
            if _refuses(error) and any(map(_has_both, messages)):
                # It may want results behind calls that it knows.
                return self.layout([_with_calls_alone(one) for one in messages], opening)
            raise _failed(error) from error
        end = marks.end if opening else len(text)
        begins = self._begins(fitted, shaped, marks, len(messages), 0)
        return RenderedConversation(text, begins, end)

    @staticmethod
    def _begins(
        fitted: Sequence[Fitted],
        shaped: Sequence[Message],
        marks: sandbox.Marks,
        count: int,
        done: int,
    ) -> list[int]:
        """Return where each of ``count`` messages begins; ``done``: those before ``fitted``."""
        begins = [-1] * count
        for one, message in zip(fitted, shaped, strict=True):
            if one.source is not None:
                begins[done + one.source] = marks.begins[id(message)]
        return begins

    def _rendered(
        self,
        shaped: list[Message],
        tools: list[dict[str, Any]],
        opening: bool,
        marks: sandbox.Marks | None = None,
        reading: TemplateReading | None = None,
    ) -> str:
        from mmkv.prompt import sandbox

        assert self.source is not None
        values = {
            **self._values,
            **self._tokenizer.special_tokens_map,
            "messages": shaped if reading is None else reading.messages,
            "tools": tools or None,
            "documents": None,
            "add_generation_prompt": opening,
        }
        said = ("content", "tool_calls", "reasoning_content")
        told = [message[key] for message in shaped for key in said if message.get(key)]
        given = sandbox.extent([tools, told], 2**62)
        return sandbox.render(self.source, given, values, marks, reading)

    def _fit(self, messages: list[Message], again: bool = False) -> list[Fitted]:
        """Return the messages, changed where the template cannot show tools by itself.

        Args:
            again: whether they follow others, which have the tools in words. Raises Unknown: a
                message of the system among these would have them.
        """
        spoken = any(one["role"] == "tool" or one.get("tool_calls") for one in messages)
        in_words = bool(self._tools) and not self.reads_tools
        if again and in_words and any(one["role"] == "system" for one in messages):
            raise Unknown
        if not spoken and (again or not in_words):
            return [Fitted(message, at) for at, message in enumerate(messages)]
        tools = () if again else self._tools
        return fit(messages, tools, self._shown, apart=self.source is None)

    @property
    def _shown(self) -> TemplateSupport:
        """What the template shows of tools by itself."""
        if not self._probed:

            def render(messages: list[Message], tools: list[Any]) -> str | None:
                try:
                    return self._rendered([self._shape(one) for one in messages], tools, False)
                except (InputError, *STOPS):  # a limit was passed; it would be again
                    raise
                except BaseException:
                    return None

            kinds = ("image", "video") if self._parts else ()
            known = self.source is not None
            found = (
                probe(render, self._cutter.count, self.reads_tools, kinds)
                if known
                else TemplateSupport()
            )
            self._probed.append(found)
        return self._probed[0]

    def _with_prefix(self, messages: list[Message], layout: Layout) -> RenderedConversation:
        """Render messages and a reply up to the end of its prefix; ``layout``: renders messages.

        What stands before the end of the reply is that of transformers' continue_final_message: a
        blank behind the marker shows whether the template trims what it writes.
        """
        marker = new_marker()
        reply: Message = {"role": "assistant", "content": f"{self.prefix}{marker} "}
        if self.thought:
            reply["reasoning_content"] = self.thought
        made = layout([*messages, reply], False)
        text, found, after = made.text.rpartition(marker)
        text, prefix = (
            (text, self.prefix.lstrip())
            if after.startswith(" ")
            else (text.rstrip(), self.prefix.strip())
        )
        if not found or not text.replace(CUT, "").endswith(prefix):
            raise InputError(
                "the model's chat template shows the beginning of the reply in another way than it "
                "was given; begin the reply with other words, or let the model begin it"
            )
        return replace(made, text=text, begins=made.begins[:-1], end=None)

    def _cut(self, messages: list[Message]) -> list[Message]:
        """Return the messages, their contents as parts, with special tokens in texts cut."""
        made = [self._plain_message(message) for message in messages]
        results = [text_of(one) for one in made if one["role"] == "tool"]
        # All at once: a conversation can be long.
        found = self._cutter.finds("".join(map(text_of, made)))
        if not found and not self._cutter_of_results.finds("".join(results)):
            return made
        together: list[tuple[dict[str, Any], Collection[str]]] = []
        for given, message in zip(messages, made, strict=True):
            message["content"] = [dict(part) for part in message["content"]]
            kept = self.markers if given.get("sampled") else ()
            parts = [(part, kept) for part in message["content"]]
            if self.source is None:  # nothing stands between messages then
                together += parts
            else:
                tool = message["role"] == "tool"
                _cut_parts(self._cutter_of_results if tool else self._cutter, parts)
        _cut_parts(self._cutter, together)
        return made

    def _plain_message(self, message: Message) -> Message:
        """Return a message with its content as parts, and all else that it says cut."""
        parts = as_parts(message.get("content"))
        if message.get("sampled"):  # what else it has is in its text
            return {"role": message["role"], "content": parts}
        rest = {key: value for key, value in message.items() if key not in ("content", "sampled")}
        if rest.keys() != {"role"}:
            rest = {key: self._cutter.cut_all(value) for key, value in rest.items()}
        if rest.get("reasoning_content"):
            rest["thinking"] = rest["reasoning_content"]  # as some templates call it
        return {**rest, "content": parts}

    def _shape(self, message: Message) -> Message:
        content = message["content"]
        if content is None or isinstance(content, str):
            return message  # as the template wants it
        parts = as_parts(content)
        if self._parts:
            return {**message, "content": parts}
        for part in parts:
            if part["type"] != "text":
                raise InputError(
                    f"this model reads text only; it cannot take a message with {part['type']}s"
                )
        return {**message, "content": "".join(part["text"] for part in parts)}

    def _plain(self, message: Message) -> str:
        return "".join(
            part["text"] if part["type"] == "text" else self._placeholders.get(part["type"], "")
            for part in as_parts(message["content"])
        )


def _cut_parts(cutter: Cutter, parts: Sequence[tuple[dict[str, Any], Collection[str]]]) -> None:
    """Cut special tokens in parts, but those that each keeps; one can begin in one text and end in
    the next.
    """
    for is_text, group in groupby(parts, lambda pair: pair[0]["type"] == "text"):
        side_by_side = list(group) if is_text else []
        texts = [part["text"] for part, _ in side_by_side]
        cut = cutter.cut(texts, [kept for _, kept in side_by_side])
        for (part, _), text in zip(side_by_side, cut, strict=True):
            part["text"] = text


def _refuses(error: BaseException) -> bool:
    """Whether a template ran, and wants no such messages."""
    from jinja2 import TemplateError, TemplateSyntaxError

    return isinstance(error, TemplateError) and not isinstance(error, TemplateSyntaxError)


def _failed(error: BaseException) -> InputError:
    """Say why a template renders nothing."""
    from jinja2 import TemplateSyntaxError

    if _refuses(error):
        return InputError(
            f"the model's chat template refuses these messages ({first_line(error)}); "
            "drop the system message or reorder the turns"
        )
    if isinstance(error, TemplateSyntaxError):
        return InputError(
            f"the model's chat template is damaged ({first_line(error)}); get another copy of "
            "chat_template.jinja or tokenizer_config.json"
        )
    return InputError(
        f"the model's chat template is broken ({type(error).__name__}: {first_line(error)}); use "
        "another model, or --raw"
    )


def _marks_in(source: str | None, tokenizer: Any) -> list[str]:
    """Return the tokens that a template writes and that are not special, as </tool_response>.

    A tool could end its result with one, and speak as the user.
    """
    added = map(str, getattr(tokenizer, "added_tokens_decoder", {}).values())
    marks = [one for one in added if one.strip() and not (one[0].isalnum() or one[-1].isalnum())]
    return [one for one in marks if one in (source or "")]


def _is_written_out(message: Message) -> bool:
    """Return whether all that a message says is in its content."""
    said_apart = message.get("tool_calls") or message.get("reasoning_content")
    return bool(message.get("sampled")) or not said_apart


def _has_both(message: Message) -> bool:
    return bool(message.get("sampled") and message.get("tool_calls"))


def _with_calls_alone(message: Message) -> Message:
    """Return a sampled reply without its text, where its calls are known."""
    return {**message, "content": [], "sampled": False} if _has_both(message) else message
