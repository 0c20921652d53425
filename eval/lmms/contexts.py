"""Long contexts of lmms-eval's tasks: read once for several requests, cut where a benchmark says.

A task says so beside a text of its messages, with :func:`context_part`; other models of lmms-eval
see a plain text. What a request begins with up to the end of a *shared* context is read first, by
itself, and evicted from; the request goes on in a copy. A second request that begins so reads
nothing of it again. Policies that score with the latest queries have not seen the question then, as
in SCBench. A text that is too long loses its middle or its end only where the task asks for that;
how much it lost stands in the samples. All else that is too long is refused by the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from mmkv.engine.errors import InputError
from mmkv.prompt.held import read_of
from mmkv.prompt.messages import Message
from mmkv.prompt.special import tokenize
from mmkv.prompt.template import new_marker

if TYPE_CHECKING:
    from mmkv import Engine, Session

Cut = Literal["middle", "end", "leave"]
_CONTEXT = "context"  # the key beside a text
_TRIES = 4  # what is left of a text may come to a few more tokens than was counted


def context_part(
    text: str,
    *,
    shared: bool = False,
    cut: Cut | None = None,
    room: int | None = None,
    most: int | None = None,
    omitted: str = "",
) -> dict[str, Any]:
    """Return a message part with a long text.

    Args:
        shared: other requests begin with the same messages up to the end of this text.
        cut: what it loses where the prompt is too long; ``leave``: the document is left out then;
            None: the prompt is refused.
        room: tokens that all else may need; None: what the rest of this prompt takes.
        most: bound on its tokens, those of ``omitted`` included, which stands for what was cut off.
    """
    asked = {"shared": shared, "cut": cut, "room": room, "most": most, "omitted": omitted}
    return {"type": "text", "text": text, _CONTEXT: asked}


LEFT_OUT = "[left out:"  # what the reply to such a document begins with


class LeftOutError(Exception):
    """A prompt is too long and its task leaves such documents out; the text stands for a reply."""


@dataclass(frozen=True)
class Context:
    """The long text of a request: where it stands, and the arguments of :func:`context_part`."""

    message: int
    part: int
    shared: bool
    cut: Cut | None
    room: int | None
    most: int | None
    omitted: str


def context_of(given: Sequence[Any], added: int) -> Context | None:
    """Find the last long text in a task's messages; ``added``: messages that come before them."""
    found = None
    for at, message in enumerate(given):
        content = message.get("content") if isinstance(message, Mapping) else None
        for place, part in enumerate(content if isinstance(content, list) else ()):
            if isinstance(part, Mapping) and part.get(_CONTEXT):
                found = Context(at + added, place, **part[_CONTEXT])
    return found


def fitted(
    engine: Engine, messages: Sequence[Message], context: Context, limit: int
) -> tuple[list[Message], tuple[int, int] | None]:
    """Cut the long text so that the prompt has at most ``limit`` tokens, if the task wants that.

    Returns:
        the messages, and the text's tokens before and after where it was cut.

    Raises:
        InputError: nothing would be left of it. LeftOutError: the document is to be left out.
    """
    tokenizer = engine.processor.tokenizer
    text = _text(messages, context)
    size = sum(len(p["text"].encode()) for m in messages for p in m["content"] if "text" in p)
    if context.most is None and size <= limit // 2:  # a template adds some words, not as many
        return list(messages), None
    if context.cut == "leave":
        if (whole := _count(engine, messages)) > limit:
            raise LeftOutError(f"{LEFT_OUT} the prompt has {whole:,} tokens, {limit:,} are read]")
        return list(messages), None
    ids = tokenize(tokenizer, text)
    keep = len(ids)
    if context.most is not None and keep > context.most:
        keep = context.most - len(tokenize(tokenizer, context.omitted))
    if context.cut is not None:
        others = context.room
        if others is None:
            others = _count(engine, messages) - len(ids)
        keep = min(keep, limit - others)
    if keep >= len(ids):
        return list(messages), None
    made = _shortened(engine, messages, context, ids, keep, limit)
    return made, (len(ids), len(tokenize(tokenizer, _text(made, context))))


def _shortened(
    engine: Engine,
    messages: Sequence[Message],
    context: Context,
    ids: Sequence[int],
    keep: int,
    limit: int,
) -> list[Message]:
    """Cut the long text to ``keep`` of its tokens ``ids``, or fewer until all of it fits."""
    tokenizer = engine.processor.tokenizer
    made = list(messages)
    for _ in range(_TRIES):
        if keep < 1:
            raise InputError(
                f"all but the context takes the whole prompt of {limit:,} tokens; use a model "
                "with a longer context, or a larger max_prompt_tokens"
            )
        made = _with_text(messages, context, _cut(tokenizer, ids, keep, context))
        if context.room is not None:
            over = len(tokenize(tokenizer, _text(made, context))) - keep
        else:
            over = _count(engine, made) - limit
        if context.cut is None or over <= 0:
            break
        keep -= over
    return made


def _cut(tokenizer: Any, ids: Sequence[int], keep: int, context: Context) -> str:
    def words(some: Sequence[int]) -> str:
        return tokenizer.decode(some, skip_special_tokens=True)

    if context.cut == "middle":
        return words(ids[: keep // 2]) + words(ids[len(ids) - (keep - keep // 2) :])
    return words(ids[:keep]) + context.omitted


def _text(messages: Sequence[Message], context: Context) -> str:
    return messages[context.message]["content"][context.part]["text"]


def _with_text(messages: Sequence[Message], context: Context, text: str) -> list[Message]:
    made = list(messages)
    parts = list(made[context.message]["content"])
    parts[context.part] = {**parts[context.part], "text": text}
    made[context.message] = {**made[context.message], "content": parts}
    return made


def _count(engine: Engine, messages: Sequence[Message]) -> int:
    processor = engine.processor
    text = processor.template.render(list(messages), opening=True)
    return processor.encode(text)["input_ids"].shape[-1]


class SharedContexts:
    """Sessions that have read what requests begin with; the ``most`` that were used last are held.

    A session grows where the next context begins with what it holds.
    """

    def __init__(self, engine: Engine, most: int) -> None:
        self.engine, self.most = engine, most
        self._sessions: list[Session] = []  # the latest last

    def copy(self, messages: Sequence[Message], context: Context) -> tuple[Session, int] | None:
        """Return a session that holds the messages up to the end of the context, and the tokens
        that were read for it now.

        None where the template shows that beginning in another way once more follows, or where
        there is no template: all is read as one prompt then. Raises MmkvError.
        """
        processor, mark = self.engine.processor, new_marker()
        if processor.template.source is None:
            return None
        text = _text(messages, context)
        marked = _with_text(messages, context, text + mark)
        begin = processor.template.render(marked, opening=True).partition(mark)[0]
        if not processor.template.render(list(messages), opening=True).startswith(begin):
            return None
        rule = processor.rule(0)
        plans = [(one.held.plan(begin, rule), one) for one in self._sessions]
        fitting = [(plan, one) for plan, one in plans if plan.appends]
        if fitting:
            plan, session = max(fitting, key=lambda pair: pair[0].start.seen)
            self._sessions.remove(session)
        else:
            session = self.engine.session()
            plan = session.held.plan(begin, rule)
        self._sessions.append(session)
        while len(self._sessions) > self.most:
            self._sessions.pop(0).close()
        tokens = 0
        if plan.text:
            inputs = processor.encode(plan.text, continuing=plan.start.seen > 0)
            ids = inputs["input_ids"][0].tolist()
            session.prefill(inputs)
            session.note_read(read_of(processor, plan.text, ids, rule=rule))
            tokens = len(ids)
        return session.fork(), tokens

    def close(self) -> None:
        """Return their pages; copies keep theirs."""
        while self._sessions:
            self._sessions.pop().close()
