"""Turn a user's messages, pictures and videos into the tensors that a session appends."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmkv.calls.tools import Tool, ToolCall
from mmkv.engine.errors import InputError, require_list, require_real
from mmkv.notes import read_notes, times_notes
from mmkv.prompt.held import Held, Plan, Read, common_length, read_of
from mmkv.prompt.messages import as_parts, is_blank, is_open, joined, take_media
from mmkv.prompt.part_settings import LOOSE_FPS
from mmkv.prompt.processing import PER_TOKEN
from mmkv.prompt.special import CUT, new_marker
from mmkv.prompt.video import FramesSeen, check_sampling, load_frames
from mmkv.thoughts import PROMPT_END

if TYPE_CHECKING:
    from PIL.Image import Image

    from mmkv.engine.contents import Memory
    from mmkv.prompt.media import Note
    from mmkv.prompt.messages import Message
    from mmkv.prompt.processing import Processor
    from mmkv.prompt.template import ChatTemplate, RenderedConversation
    from mmkv.prompt.video import Clip
    from mmkv.session import Session


_KEPT = "stays as it was read"
_LATEST = 10**8  # seconds: three years
_STATELESS = (
    "by the numbers that {} summed up it cannot be taken back, and its pictures are not at hand to "
    "read all again"
)


@dataclass
class TurnReading:
    """What a turn appends, and how far the session goes back for it.

    Attributes:
        inputs: the processor's tensors, one row.
        read: for the session's record of its text.
        plan: the text from which the session goes back, keeping ``again`` tokens of it; None: it
            stays as it is.
        differs: how what is read will differ from a fresh rendering; None: by nothing new.
        notes: on what is read, for the user.
        prefix: the text that the reply begins with, at the end of what is read.
    """

    inputs: dict[str, Tensor]
    read: Read
    plan: Plan | None = None
    again: int = 0
    differs: str | None = None
    notes: list[str] = field(default_factory=list)
    prefix: str = ""


@dataclass
class Prompt:
    """What a session appends before a reply.

    Attributes:
        inputs: the processor's tensors, one row, with what the cache lacks of the latest reply.
        messages: what the history gets.
        reading: how far the session goes back for it, and what is read; None: it only appends.
        text: of which the inputs were made; empty: not known.
        started: when composing began, on ``time.perf_counter``'s clock.
        basis: what it was composed for, :attr:`mmkv.Session.basis`; None: for any session.
        tools: the functions that the model is told of; None: those of the session.
    """

    inputs: dict[str, Tensor]
    messages: Sequence[Message] = ()
    reading: TurnReading | None = None
    text: str = ""
    started: float = field(default_factory=time.perf_counter)
    basis: tuple[object, int] | None = None
    tools: tuple[Tool, ...] | None = None

    @property
    def tokens(self) -> int:
        """Count the tokens."""
        return self.inputs["input_ids"].shape[-1]

    @property
    def end(self) -> list[int]:
        """Return the latest tokens, which may open a thought."""
        return self.inputs["input_ids"][0, -PROMPT_END:].tolist()

    @property
    def prefix(self) -> str:
        """Return the text that the reply begins with, at the end of what is read."""
        return "" if self.reading is None else self.reading.prefix


def compose(
    session: Session,
    text: str | Sequence[dict[str, Any]],
    images: Sequence[Any] = (),
    videos: Sequence[Any] = (),
    system: str | None = None,
    fps: float | None = None,
    num_frames: int | None = None,
    prefix: str = "",
    tools: tuple[Tool, ...] | None = None,
) -> Prompt:
    """Compose all of a turn that can be wrong, and leave the session as it is.

    The arguments are those of :meth:`mmkv.Session.send`. Raises MmkvError.

    Args:
        tools: None: those of the session.
    """
    started = time.perf_counter()
    if system is not None and session.history:
        raise InputError("a system message opens a conversation; start a new session for it")
    if not isinstance(text, str):
        require_list("text", text, "parts, or a text")
    require_list("images", images, "pictures")
    require_list("videos", videos, "videos")
    if not isinstance(prefix, str):
        raise InputError(f"prefix is {type(prefix).__name__}; give a text")
    if prefix and not prefix.strip():
        raise InputError("prefix is blank; give words that the reply begins with, or leave it out")
    parts = [{"type": "text", "text": text}] if isinstance(text, str) else list(text)
    media = [{"type": "image", "image": image} for image in images]
    media += [{"type": "video", "video": video} for video in videos]
    opening = [] if system is None else [{"role": "system", "content": system}]
    message = {"role": "user", "content": [*media, *parts]}
    if is_blank(take_media([message])[0][-1]):
        raise InputError("the prompt is empty; write a question")
    return _turn(session, [*opening, message], fps, num_frames, prefix, tools, started)


@dataclass(frozen=True)
class Observation:
    """An observation, ready to be appended.

    Attributes:
        turn: None: all of its frames were skipped.
        frames: how many of its frames are read; skipped: how many are not.
        notes: for the user. seen: what is remembered of the session's frames then.
    """

    turn: Prompt | None
    frames: int
    skipped: int
    notes: list[str]
    seen: FramesSeen


@dataclass(frozen=True)
class Observed:
    """What :meth:`mmkv.Session.observe` read.

    Attributes:
        tokens: that were read, with those that end the reply before it.
        frames: that were read; skipped: that were too like the frame kept before them.
        next_position: rope position of the next text token; memory: the session's.
        notes: those of the session, see :attr:`mmkv.Session.notes`.
    """

    tokens: int
    frames: int
    skipped: int
    next_position: int
    memory: Memory
    notes: list[Note] = field(default_factory=list)


def compose_observation(
    session: Session,
    what: Any,
    at: float | None = None,
    fps: float | None = None,
    skip_similar: float | None = None,
    system: str | None = None,
) -> Observation:
    """Compose what is observed, and leave the session as it is.

    The arguments are those of :meth:`mmkv.Session.observe`. Raises MmkvError.
    """
    started, processor = time.perf_counter(), session.engine.processor
    if system is not None and session.history:
        raise InputError("a system message opens a conversation; start a new session for it")
    _check_observed(what, at, fps, skip_similar)
    opening: list[Message] = []
    if system is not None:
        opening = [{"role": "system", "content": system}]

    def turn(content: list[dict[str, Any]]) -> Prompt:
        messages = [*opening, {"role": "user", "content": content}]
        return _turn(session, messages, None, None, "", None, started, ends=False)

    if isinstance(what, str):
        made = turn([{"type": "text", "text": observed_text(processor, what, at)}])
        told = times_notes(processor, "texts", at)
        return Observation(made, 0, 0, told, session.frames_seen)
    frames = load_frames(what)
    if not frames:
        raise InputError("there is nothing to observe; give at least one frame")
    kept, seen = session.frames_seen.chosen(frames, skip_similar)
    skipped = len(frames) - len(kept)
    if not kept:
        return Observation(None, 0, skipped, [], seen)
    pictures = [frames[i] for i in kept]
    if at is not None and processor.watches:
        clip = frames_clip(processor, pictures, kept, at, fps)
        told = times_notes(processor, "frames", at)
        made = turn([{"type": "video", "video": clip}])
    else:
        told = times_notes(processor, "pictures", at)
        made = turn([{"type": "image", "image": picture} for picture in pictures])
    return Observation(made, len(kept), skipped, told, seen)


def _check_observed(
    what: Any, at: float | None, fps: float | None, skip_similar: float | None
) -> None:
    """Raise InputError for an observation that cannot be, as far as its settings say."""
    if at is not None:
        require_real("at", at)
        if not 0 <= at < _LATEST:
            raise InputError(f"at is {at}; give seconds since the beginning, 0 or more")
    check_sampling(fps, None)
    if isinstance(what, str):
        for name, given in (("fps", fps), ("skip_similar", skip_similar)):
            if given is not None:
                raise InputError(f"{name} is for frames; leave it out for a text")
        if not what.strip():
            raise InputError("the text is blank; give words to observe")
        return
    if fps is not None and at is None:
        raise InputError("fps says when frames after the first were seen; give at, too")
    if skip_similar is not None:
        require_real("skip_similar", skip_similar)
        if not 0 <= skip_similar <= 255:
            raise InputError(f"skip_similar is {skip_similar}; give grey levels, 0 to 255")


def frames_clip(
    processor: Processor,
    frames: Sequence[Image],
    numbers: Sequence[int],
    at: float,
    fps: float | None,
) -> Clip:
    """Return observed frames as a video.

    Args:
        numbers: of the frames, among those that were shown from ``at`` seconds on.
        fps: of those; None: 2. Raises InputError: the frames differ in size.
    """
    rate = fps or LOOSE_FPS
    made = processor.load_clip(list(frames), rate)
    return replace(made, times=tuple(at + number / rate for number in numbers))


def observed_text(processor: Processor, text: str, at: float | None) -> str:
    """Return a text that is observed as it is read: behind its time, and with a line's end."""
    time_text = None if at is None else processor.time_text(at)
    return f"{time_text or ''}{text.removesuffix(chr(10))}\n"


def compose_results(
    session: Session,
    results: Sequence[Any],
    fps: float | None = None,
    num_frames: int | None = None,
    tools: tuple[Tool, ...] | None = None,
) -> Prompt:
    """Do as :func:`compose` with :meth:`mmkv.Session.send_results`'s arguments."""
    started = time.perf_counter()
    messages = _tool_messages(session, results)
    return _turn(session, messages, fps, num_frames, "", tools, started)


def _tool_messages(session: Session, results: Sequence[Any]) -> list[Message]:
    """Return the messages of what calls returned, in the order of the calls. Raises InputError."""
    require_list("results", results, "pairs of a call and what it returned")
    last = session.history[-1] if session.history else {}
    names = {call["id"]: call["function"]["name"] for call in last.get("tool_calls", ())}
    if not names:
        raise InputError("the latest reply calls no function; send a message instead of results")
    found: dict[str, Any] = {}
    for pair in results:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise InputError("a result is a pair: a call, or its id, and what it returned")
        id, content = _id_of(pair[0]), pair[1]
        if not isinstance(id, str) or id not in names:
            raise InputError(
                f"the latest reply has no call {ascii(id)[:80]}; its calls are {', '.join(names)}"
            )
        if id in found:
            raise InputError(f"there are two results of the call {id}; send one")
        if not isinstance(content, (str, list, tuple)):
            raise InputError(
                f"{names[id]} returned a {type(content).__name__}; send a text, such as "
                "json.dumps(...), or a list of parts"
            )
        found[id] = content
    missing = [f"{name} ({id})" for id, name in names.items() if id not in found]
    if missing:
        raise InputError(f"no result of {', '.join(missing)}; send those of all calls together")
    return [
        {"role": "tool", "tool_call_id": id, "name": name, "content": found[id]}
        for id, name in names.items()
    ]


def _id_of(call: Any) -> Any:
    """Return the id of a call: it, a ToolCall, or a dict in OpenAI's form."""
    if isinstance(call, ToolCall):
        return call.id
    return call.get("id") if isinstance(call, Mapping) else call


def _turn(
    session: Session,
    given: Sequence[Message],
    fps: float | None,
    num_frames: int | None,
    prefix: str,
    tools: tuple[Tool, ...] | None,
    started: float,
    ends: bool = True,
) -> Prompt:
    """Return the turn of messages with their media in them; ``ends``: see compose_messages."""
    messages, pictures, films = take_media(given)
    processor = session.engine.processor
    tools = session.tools if tools is None else tools
    seen: list[Image] = []
    clips: list[Clip] = []

    def load() -> tuple[list[Any], list[Any]]:
        seen[:] = [processor.load_picture(picture) for picture in pictures]
        clips[:] = [processor.load_clip(film, fps, num_frames) for film in films]
        if (seen or clips) and processor.sees:
            _ = session.engine.family.hf  # Ctrl-C ends it here, and not while it is appended
        return seen, clips

    reading = compose_messages(session, messages, load, prefix, tools, ends)
    bundled = session.engine.is_bundled_model
    reading.notes = read_notes(session.template_with(tools), seen, clips, bundled)
    return Prompt(
        reading.inputs, messages, reading, reading.read.text, started, session.basis, tools
    )


def compose_messages(
    session: Session,
    messages: Sequence[Message],
    load: Callable[[], tuple[Sequence[Any], Sequence[Any]]],
    prefix: str = "",
    tools: tuple[Tool, ...] | None = None,
    ends: bool = True,
) -> TurnReading:
    """Return what makes a session hold its conversation and ``messages``, as rendered afresh.

    Mostly that is what follows its latest reply. Where the template shows earlier messages in
    another way now, it is the text from there on, if the session can go back: ``rewrites`` is
    ``reread``, pictures in that text are at hand, and the policy keeps nothing that cannot be taken
    back. Otherwise ``differs`` says how what is held differs.

    Args:
        messages: with bare placeholders for media; load: gives their pictures and videos.
        prefix: the text that the reply begins with.
        tools: that the model is told of; None: those of the session.
        ends: whether a reply follows; False: the last message stays open, and its end is not read.

    Raises:
        InputError: the messages or media cannot be, or the tools cannot change.
    """
    tools = session.tools if tools is None else tools
    others = bool(session.history) and shown_tools(tools) != shown_tools(session.tools)
    template = session.template_with(tools).with_prefix(prefix)
    made = _composed(session, template, messages, load, others, ends)
    made.prefix = template.prefix_in(made.read.text)
    return made


def _composed(
    session: Session,
    template: ChatTemplate,
    messages: Sequence[Message],
    load: Callable[[], tuple[Sequence[Any], Sequence[Any]]],
    others: bool,
    ends: bool,
) -> TurnReading:
    """Do as :func:`compose_messages`; ``others``: whether the tools have changed."""
    processor, held = session.engine.processor, session.held
    talk = joined(session.history, messages)
    total = _pictures_in(talk) if processor.counts_pictures else 0
    rule = processor.rule(total)

    def appended(why: str) -> TurnReading:
        if others:
            raise _cannot_change(why)
        return _appended(session, template, messages, load, total, rule, ends)

    # Tokens may have come in that nobody noted as text: going back would lose them.
    if template.source is None or held.pieces is None or held.seen != session.seen:
        return appended("what it has read is not known as a template's text")
    text, why, done = None, None, None
    if not ends and rule is None and is_open(session.history):
        text = text_behind(held, template, session.history[-1], messages[0])
    if text is None:
        done, text = rendered(held, template, talk, ends, rule)
    if text is not None:
        plan = held.appending(text)
    else:
        assert done is not None
        plan = held.plan(done.text, rule)
        if not plan.appends:
            plan, why = agreed(session, plan, done.text, rule)
    if why is not None or plan.media is None:
        made = appended(why or "its pictures are not at hand any more")
        made.differs = why
        return made

    def loose() -> int:
        if processor.rule(total + 1) != rule:
            return sys.maxsize
        # What stays open was rendered with more behind it.
        return _loose(template, talk, done) if ends and done is not None else 0

    made = _planned(session, plan, load(), total, rule, loose)
    made.read = replace(made.read, **checkpoint_of(done))
    return made


def rendered(
    held: Held, template: ChatTemplate, talk: list[Message], ends: bool, rule: Any
) -> tuple[RenderedConversation, str | None]:
    """Return a conversation as it is rendered, and what of it has not been read.

    The latter where only what follows a checkpoint was rendered, and is what was read and more;
    None: all was rendered.

    Args:
        ends: whether a reply follows; rule: by which its pictures are read.
    """
    done = template.go_on(talk, ends, held.checkpoint if rule is None else None)
    if done.after is None:
        return done, None
    unread = held.unread_of(done.text)
    return (template.go_on(talk, ends, None), None) if unread is None else (done, unread)


def checkpoint_of(done: RenderedConversation | None) -> dict[str, Any]:
    """Return what :class:`Read` says of the checkpoint; ``done``: None, what was read stands."""
    if done is None or done.checkpoint is None:
        return {"stands": done is None}
    return {"goes_on": done.checkpoint, "behind": done.length - done.checkpoint.length}


def _pictures_in(talk: Sequence[Message]) -> int:
    """Count the pictures of a conversation, without videos."""
    return sum(part["type"] == "image" for one in talk for part in as_parts(one["content"]))


def _planned(
    session: Session,
    plan: Plan,
    new: tuple[Sequence[Any], Sequence[Any]],
    total: int,
    rule: Any,
    loose: Callable[[], int],
) -> TurnReading:
    """Return what a session reads by a plan.

    Args:
        new: pictures and videos behind those of the plan; total: pictures of the conversation;
            rule: by which they are read.
        loose: counts the characters at the text's end that another turn is likely to change.
    """
    processor, held = session.engine.processor, session.held
    pictures, clips = ([*old, *more] for old, more in zip(plan.media or ((), ()), new, strict=True))
    inputs = processor.encode(plan.text, pictures, clips, plan.start.seen > 0, total)
    ids = inputs["input_ids"][0].tolist()
    unfed = session.unfed if plan.appends else ()
    read = read_of(processor, plan.text, ids, pictures, clips, rule=rule, unfed=unfed)
    if pictures or clips or held.has_media:
        # Where a session goes back to its beginning, all pictures are read again.
        read = replace(read, loose=loose() if session.can_cut_back else sys.maxsize)
    if plan.appends:
        return TurnReading(session.with_unfed(inputs), read)
    again = kept_tokens(session, plan, ids)
    return TurnReading(without_first(inputs, again), read, plan, again)


# Parts of an open message up to which all of it is rendered for one more; and how many are for one
# behind those, so that a day of frames takes no longer for each than the first hour.
_ALL, _LATEST_PARTS = 32, 4


def text_behind(held: Held, template: ChatTemplate, opened: Message, more: Message) -> str | None:
    """Return the text of what is observed behind a long open message, whose end alone is rendered.

    None where all has to be: the message is short, or its end as rendered by itself is not what was
    read. Whether it is all the same, the next question finds out.

    Args:
        held: what was read; opened: the message; more: what comes behind it.
    """
    parts = as_parts(opened["content"])
    if len(parts) < _ALL or template.source is None:
        return None
    begin, end = ({"type": "text", "text": new_marker()} for _ in range(2))
    latest = [begin, *parts[-_LATEST_PARTS:], end, *as_parts(more["content"])]
    rendered = template.render_open([{"role": "user", "content": latest}])
    _, found, rest = rendered.partition(begin["text"])
    shown, behind, text = rest.partition(end["text"])
    if not (found and behind and text):
        return None
    texts = [piece.text or "" for piece in (held.pieces or ())[-4 * _LATEST_PARTS :]]
    return text.removeprefix(CUT) if "".join(texts).endswith(shown.replace(CUT, "")) else None


def agreed(session: Session, plan: Plan, whole: str, rule: Any) -> tuple[Plan, str | None]:
    """Return from where a session reads on that has to go back, or why it cannot.

    Args:
        plan: what :meth:`Held.plan` says of ``whole`` and ``rule``.
    """
    piece = (session.held.pieces or ())[plan.kept]
    what = "an earlier picture" if piece.ids is None and piece.rule != rule else None
    cause = (
        "the model reads its pictures in another way now that there are several"
        if what
        else "the chat template shows earlier messages in another way now"
    )
    what = what or "what was said before"
    if session.rewrites == "keep":
        return plan, f"{cause}; {what} {_KEPT}, as wanted (rewrites: keep)"
    if not session.can_cut_back:
        plan = session.held.plan(whole, rule, 0)
        if plan.media is None:
            who = f"policy {session.engine.policy.name} has"
            who = "linear layers have" if session.engine.cache.states else who
            return plan, f"{cause}; {what} {_KEPT}: {_STATELESS.format(who)}"
    if plan.media is None:
        return plan, (
            f"{cause}; {what} {_KEPT}, since its pictures are not at hand any more: begin a new "
            "conversation with all messages to have it read so"
        )
    return plan, None


def kept_tokens(session: Session, plan: Plan, ids: Sequence[int]) -> int:
    """Count the tokens behind a plan's start that stay: those of the new text ``ids``, too.

    Enough are read again for a policy that scores with the latest queries.
    """
    window = session.engine.policy.scoring.needs.queries if session.engine.policy.evicts else 0
    if not session.can_cut_back:
        return 0
    return max(0, min(common_length(plan.ids, tuple(ids)), len(ids) - max(window, 1)))


def text_before_media(processor: Processor, plan: Plan) -> list[int]:
    """Return the tokens of a plan's text up to its first picture or video, which may not be here
    yet.
    """
    tokens = [token for token in (processor.image_token, processor.video_token) if token]
    ends = [plan.text.find(token) for token in tokens if token in plan.text]
    text = plan.text[: min(ends, default=len(plan.text))]
    if not text:
        return []
    return processor.encode(text, continuing=plan.start.seen > 0)["input_ids"][0].tolist()


def with_tokens(
    inputs: dict[str, Tensor], ids: Sequence[int], behind: bool = True
) -> dict[str, Tensor]:
    """Return inputs of one row with tokens of text behind theirs, or before them."""
    if not ids:
        return inputs
    more = torch.tensor([list(ids)])
    fills = {
        "input_ids": more,
        "attention_mask": torch.ones_like(more),
        "mm_token_type_ids": torch.zeros_like(more),
        "token_type_ids": torch.zeros_like(more),
    }
    made = dict(inputs)
    for key in fills.keys() & inputs.keys():
        parts = [inputs[key], fills[key].to(inputs[key].dtype)]
        made[key] = torch.cat(parts if behind else parts[::-1], dim=1)
    return made


def without_first(inputs: dict[str, Tensor], tokens: int) -> dict[str, Tensor]:
    """Return inputs of one row without their first tokens, which are text."""
    return {key: value[:, tokens:] if key in PER_TOKEN else value for key, value in inputs.items()}


def _appended(
    session: Session,
    template: ChatTemplate,
    messages: Sequence[Message],
    load: Callable[[], tuple[Sequence[Any], Sequence[Any]]],
    total: int,
    rule: Any,
    ends: bool,
) -> TurnReading:
    """Return what follows the latest reply or observation, whatever stands before it."""
    processor, held = session.engine.processor, session.held
    addition = template.addition(session.history, list(messages), ends)
    lacks = not (held.ends_with_reply or is_open(session.history)) or held.unread != ((), ())
    if addition.continuing and held.pieces is not None and lacks:
        raise InputError(
            "the latest reply was let go for a turn that was not completed, and cannot be read "
            "again; start a new conversation"
        )
    pictures, clips = load()
    inputs = processor.encode(addition.text, pictures, clips, addition.continuing, total)
    ids, unfed = inputs["input_ids"][0].tolist(), session.unfed
    read = read_of(processor, addition.text, ids, pictures, clips, rule=rule, unfed=unfed)
    inputs = session.with_unfed(inputs)
    return TurnReading(inputs, read, differs=addition.differs)


def shown_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Return functions as chat templates take them."""
    return [one.for_template() for one in tools]


def _cannot_change(why: str) -> InputError:
    return InputError(
        f"the tools of this conversation cannot change: {why}; begin a new one with the others"
    )


def _loose(template: ChatTemplate, talk: list[Message], done: RenderedConversation) -> int:
    """Return how many characters at the end of a rendered text another turn is likely to change.

    Args:
        talk: the conversation; done: its text.
    """
    mark = {"content": new_marker()}
    later = [*talk, {"role": "assistant", **mark}, {"role": "user", **mark}]
    try:
        text = template.go_on(later, True, done.after)
        if text.after is not done.after:
            return sys.maxsize
    except InputError:
        return 0
    now = done.text.replace(CUT, "")
    return len(now) - common_length(now, text.text.replace(CUT, ""))
