"""What a chat request asks for, and what it came to.

The work that goes to the engine thread, the replies that come back, and how many tokens were read
and entries evicted on the way, by modality.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from mmkv.calls.parser import ReplyParser, ThoughtMarks, parse
from mmkv.engine.contents import MODALITIES
from mmkv.notes import conversation_notes
from mmkv.prompt.video import FramesSeen
from mmkv.reply import LogitSettings
from mmkv.sampling import Settled
from mmkv.server.prompts import Begun, Message, reply_message

if TYPE_CHECKING:
    from mmkv.api import Engine
    from mmkv.engine.budget import Budget
    from mmkv.engine.contents import Memory
    from mmkv.prompt.held import Rewrites
    from mmkv.server.conversations import ConversationState, Told
    from mmkv.session import Session


Resume = Literal["auto", "never", "required"]


@dataclass(frozen=True)
class Observing:
    """How a message is observed; the fields are those of :meth:`mmkv.Session.observe`.

    ``frames``: whether its pictures are frames of videos.
    """

    at: float | None = None
    fps: float | None = None
    skip_similar: float | None = None
    frames: bool = False


@dataclass
class ChatWork:
    """What a chat request asks for.

    Attributes:
        base_key: a hash of what the memory depends on beside the messages; see
            :func:`mmkv.server.prompts.chain`.
        budget: of each reply's session; None: the engine's.
        asked: whether the request itself sets ``resume``.
        weight: of its sessions in a shared budget.
        start: the conversation that the request continues; ``messages`` begin with its own.
        rewrites: see :class:`mmkv.Session`.
        template_values, tools: what the chat template is told beside the messages.
        raw: whether there is no template, and the messages' texts are read as they stand.
        begun: what the reply begins with; it is read, and not part of the answer.
        thoughts: the marks of thoughts, where the model has some.
        observes: how its last message, which is open, is observed; no reply follows then. None:
            it asks for a reply.
        frames: what is remembered of observed frames, with those of the request.
        keep: whether the conversation after the reply is kept, in ``result`` when that is done.
        snapshots: whether the memory of its earlier turns may be found by messages, too.
    """

    messages: list[Message]
    base_key: str
    sampling: Settled
    logit_settings: LogitSettings = field(default_factory=LogitSettings)
    choices: int = 1
    budget: Budget | None = None
    resume: Resume = "auto"
    asked: bool = False
    weight: float = 1.0
    start: ConversationState | None = None
    keep: bool = False
    snapshots: bool = False
    rewrites: Rewrites = "reread"
    template_values: dict[str, Any] = field(default_factory=dict)
    tools: list[dict[str, Any]] = field(default_factory=list)
    raw: bool = False
    begun: Begun = field(default_factory=Begun)
    thoughts: ThoughtMarks | None = None
    observes: Observing | None = None
    frames: FramesSeen = field(default_factory=FramesSeen)
    result: ConversationState | None = None

    def reply_message(
        self, parser: ReplyParser, text: str, cut: bool, stopped_by: str | None = None
    ) -> Message:
        """Return a reply as the message that a client sends back.

        Args:
            text: all of it, with what it begins with, which ``parser`` takes apart.
            cut, stopped_by: see :meth:`mmkv.calls.parser.ReplyParser.finish`.
        """
        made = reply_message(parse(parser, text, cut, stopped_by), text)
        thought = self.begun.thought
        return made if thought is None else replace(made, thought=thought, sampled=None)


@dataclass
class Choice:
    """One finished reply.

    Attributes:
        message: what a client sends back of it.
        tokens: all of it; thought_tokens: those of its thought.
        told: see :attr:`mmkv.Session.told`.
    """

    message: Message
    tokens: int
    finish_reason: str
    memory: Memory
    told: Told
    thought_tokens: int = 0


@dataclass
class Usage:
    """The usage of a request; numbers of memory are sums over its replies.

    Attributes:
        prompt_tokens: of the whole conversation; resumed: how many of them were not read again.
        kept, evicted: entries (layer, KV head, token); by_modality: those kept.
        kv_bytes: of keys and values at the end; bound_bytes: the most between two chunks.
        pictures: of the conversation, frames of videos included; faded_pictures: how many of them
            have lost most of their entries, in the reply with most of those.
        shared_pool: whether all sessions compete for one budget: what is kept depends on others.
        differs: how what was read differs from the conversation rendered afresh; None: it does not.
        notes: all on the conversation as it stands, see :mod:`mmkv.notes`.
        thought_tokens: of the replies' tokens, those of their thoughts.
        risk: of the reply with the most, see :attr:`mmkv.engine.contents.Memory.risk`; over_risk:
            whether it is above what was asked for, and the budget cannot grow; risk_unknown:
            whether the budget should follow the risk of a reply that has none.
        compactions: how often positions were drawn together, so that it went on beyond the context.
        escalated: see :attr:`mmkv.engine.contents.Memory.escalated`.
        drafted, accepted: tokens of the replies that lossless decoding drafted, and the right ones.
    """

    prompt_tokens: int
    completion_tokens: int
    resumed: int
    kept: int
    evicted: int
    by_modality: dict[str, int]
    kv_bytes: int
    bound_bytes: int
    shared_pool: bool = False
    differs: str | None = None
    pictures: int = 0
    faded_pictures: int = 0
    notes: list[str] = field(default_factory=list)
    thought_tokens: int = 0
    risk: float | None = None
    over_risk: bool = False
    compactions: int = 0
    risk_unknown: bool = False
    escalated: str | None = None
    drafted: int = 0
    accepted: int = 0


@dataclass
class Standing:
    """What a conversation holds at a moment.

    Attributes:
        seen: tokens seen, by modality; most: entries that its budget lets it hold, None where
            nothing binds it; tokens: of the reply so far.
        kept: see :func:`mmkv.server.conversations.kept_shares`; told: :attr:`mmkv.Session.told`.
    """

    memory: Memory
    seen: Sequence[int]
    kept: list[dict[str, Any]] | None
    most: int | None
    told: Told
    tokens: int = 0

    def shown(self) -> dict[str, Any]:
        """Return it as clients see it."""
        return asdict(self.memory) | {
            "seen_by_modality": dict(zip(MODALITIES, self.seen, strict=True)),
            "most_entries": self.most,
            "kept_by_message": self.kept,
            "notes": conversation_notes(*self.told, self.memory),
        }


class RequestCounts:
    """Counts the tokens and entries of one request.

    Attributes:
        seen: tokens of the messages that its session holds, by modality.
        prompt_tokens: of the whole conversation.
        resumed: those of them that were not read again; prefilled: those that were.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.seen = (0,) * len(MODALITIES)
        self.prompt_tokens, self.resumed, self.prefilled = 0, 0, 0
        self._gone_before = dict.fromkeys(MODALITIES, 0)

    def resume(self, session: Session, seen: Sequence[int]) -> None:
        """Begin with a session that continues a conversation of ``seen`` tokens by modality."""
        self.seen, self.resumed = tuple(seen), session.seen
        self._gone_before = self._gone(self.seen, session.memory().by_modality)

    def add(self, modality: torch.Tensor) -> None:
        """Count tokens that have been read, by their modalities."""
        more = modality.long().bincount(minlength=len(self.seen)).tolist()
        self.seen = tuple(one + other for one, other in zip(self.seen, more, strict=True))

    def seen_by(self, session: Session) -> tuple[int, ...]:
        """Count the tokens that a session has seen, by modality; sampled ones are text."""
        return (self.seen[0] + session.seen - self.prompt_tokens, *self.seen[1:])

    def evicted_here(self, replies: Sequence[tuple[Session, Choice]]) -> dict[str, int]:
        """Count the entries that this request evicted, by modality."""
        before = self._gone_before
        return {
            name: count - len(replies) * before[name]
            for name, count in self._evicted(replies).items()
        }

    def usage(self, replies: Sequence[tuple[Session, Choice]], bound: int) -> Usage:
        """Return the request's usage.

        Args:
            replies: all, with their sessions.
            bound: the most pages that these may hold between two chunks.
        """
        choices = [choice for _, choice in replies]
        memories = [one.memory for one in choices]
        notes = [note for one in choices for note in conversation_notes(*one.told, one.memory)]
        kept = {name: sum(one.by_modality[name] for one in memories) for name in MODALITIES}
        return Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=sum(one.tokens for one in choices),
            resumed=self.resumed,
            kept=sum(one.entries for one in memories),
            evicted=sum(self._evicted(replies).values()),
            by_modality=kept,
            kv_bytes=sum(one.kv_bytes for one in memories),
            bound_bytes=bound * self.engine.cache.pool.kv_page_bytes,
            shared_pool=self.engine.shared is not None,
            differs=next((one.differs for one in memories if one.differs), None),
            pictures=max((len(one.pictures) for one in memories), default=0),
            faded_pictures=max((len(one.faded) for one in memories), default=0),
            notes=list(dict.fromkeys(notes)),
            thought_tokens=sum(one.thought_tokens for one in choices),
            risk=max((one.risk for one in memories if one.risk is not None), default=None),
            over_risk=any(one.over_risk for one in memories),
            compactions=max((one.compactions for one in memories), default=0),
            risk_unknown=any(one.risk_unknown for one in memories),
            escalated=next((one.escalated for one in memories if one.escalated), None),
            drafted=sum(one.drafted for one in memories),
            accepted=sum(one.accepted for one in memories),
        )

    def _evicted(self, replies: Iterable[tuple[Session, Choice]]) -> dict[str, int]:
        gone = dict.fromkeys(MODALITIES, 0)
        for session, choice in replies:
            own = self._gone(self.seen_by(session), choice.memory.by_modality)
            gone = {name: gone[name] + own[name] for name in MODALITIES}
        return gone

    def _gone(self, seen: Sequence[int], kept: Mapping[str, int]) -> dict[str, int]:
        """Count the entries evicted of the ``seen`` tokens, by modality."""
        rows = self.engine.spec.rows
        return {
            name: count * rows - kept[name] for name, count in zip(MODALITIES, seen, strict=True)
        }
