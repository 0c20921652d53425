"""``--model mmkv`` in both forms of lmms-eval.

The chat form gets whole conversations; the simple form (``--force_simple``) gets a text and its
visuals, and is also asked for the likelihood of given replies, under the bounded cache. Several
documents run in one batch; when one is done, the next one starts in its slot. A document has a
session, which is reused when a new round continues the last one. Answers are of types that
lmms-eval 0.7.3 writes to its files, cache statistics included.

A document is a *script*: a generator that yields requests and is sent the replies, one for a single
question, several for a dialogue.
"""

from __future__ import annotations

import atexit
import sys
import time
from abc import abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lmms_eval.api.instance import GenerationResult, Instance, TokenCounts
from lmms_eval.api.model import lmms
from lmms_eval.models.model_utils.gen_metrics import log_metrics
from loguru import logger
from tqdm import tqdm

import mmkv.prompt.torchvision_guard  # noqa: F401 (before anything that imports transformers)
from mmkv.engine.errors import InputError, MmkvError
from mmkv.eval.lmms.contexts import (
    Context,
    LeftOutError,
    SharedContexts,
    context_of,
    fitted,
)
from mmkv.eval.lmms.messages import Frames, Key, conversation, keys, visual_part
from mmkv.eval.lmms.reports import CUTS, FinishedReplies, reported_to_parent
from mmkv.eval.lmms.settings import (
    CHAT_IMAGES,
    MAX_NEW_TOKENS,
    SIMPLE_IMAGES,
    LmmsSettings,
    sampling_of,
    thinks,
)
from mmkv.prompt.messages import Message, take_media
from mmkv.reply import Reply
from mmkv.scheduler.conversation import CachedConversation
from mmkv.scheduler.replies import ReplyJob, batch_scheduler
from mmkv.turn import Prompt, compose_messages

if TYPE_CHECKING:
    from mmkv import Engine, Session
    from mmkv.sampling import Settled
    from mmkv.scheduler import Scheduler, Ticket


@dataclass
class CacheCounts(TokenCounts):
    """Token counts of one request, and what the KV cache held when it ended.

    The samples file stores whatever ``to_dict`` gives, so ``cache`` gets there without a field of
    lmms-eval's own.
    """

    cache: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the counters for the samples file."""
        return {**super().to_dict(), **({"cache": self.cache} if self.cache else {})}


class Rounds(list[str]):
    """The replies of a multi-round document.

    lmms-eval's response cache (--use_cache) calls ``strip`` on every text to see that it is not
    empty, and would fail on a plain list.
    """

    def strip(self) -> str:
        """Return the replies as one text."""
        return "".join(self).strip()


class LmmsScored(tuple[float, bool]):
    """Loss of a continuation, and whether greedy decoding would have written it."""

    def strip(self) -> str:
        """Raise: only lmms-eval's response cache calls this, and it cannot hold these answers."""
        raise InputError(
            "lmms-eval 0.7.3 reads likelihoods back from --use_cache as text and miscounts them; "
            "run tasks of type multiple_choice without --use_cache"
        )


def answer(
    text: Any, replies: Sequence[Reply], settings: dict[str, Any], context_tokens: int = 0
) -> GenerationResult:
    """Return ``text`` (a string, or Rounds) with the counts of the replies it came from.

    ``context_tokens``: read for a shared context, which later requests do not read again.
    """
    memory = replies[-1].memory if replies else None
    counts = CacheCounts(
        input_tokens=context_tokens + sum(reply.prompt_tokens for reply in replies),
        output_tokens=sum(len(reply.token_ids) for reply in replies),
        cache=None if memory is None else asdict(memory) | settings | _ends(replies),
    )
    return GenerationResult(text=text, token_counts=counts)


def _ends(replies: Sequence[Reply]) -> dict[str, Any]:
    reasons = [reply.finish_reason for reply in replies]
    return {"finish_reason": reasons[0] if len(reasons) == 1 else reasons}


def answer_text(reply: Reply) -> str:
    """Return what counts as the answer: what follows the thought, where there is one."""
    return reply.text if reply.reasoning is None else reply.content


def _cut_in_thought(reply: Reply) -> bool:
    cut = reply.finish_reason in ("length", "context")
    return cut and reply.reasoning is not None and not reply.content


class LmmsDialogue:
    """A session and the messages it holds.

    lmms-eval's rounds carry no state: a task with a history sends all of it in every round. When
    the new messages begin with those the session holds, only the rest is prefilled; otherwise the
    session is replaced.
    """

    def __init__(
        self,
        engine: Engine,
        frames: Frames,
        shared: SharedContexts,
        visual_tokens: int | None = None,
    ) -> None:
        self.engine, self.frames, self._shared = engine, frames, shared
        self.visual_tokens = visual_tokens
        self._session = CachedConversation(engine)
        self._held: list[Key] = []

    def turn(self, ask: Ask, scheduler: Scheduler) -> ReplyJob:
        """Return the request for the reply to ``ask.messages``; notes how they were read."""
        messages, context = ask.messages, ask.context
        if context is not None:
            messages, ask.cut = fitted(self.engine, messages, context, ask.longest)
        wanted = keys(messages)
        known = len(self._held)
        if not known or wanted[:known] != self._held or known == len(wanted):
            self.close(scheduler)
            self._session, known = self._begun(ask, messages), 0
        self._held = wanted
        if ask.raw:
            text = "".join(part["text"] for part in messages[-1]["content"]) + ask.begin
            inputs = self.engine.processor.encode_raw(text)
            return ReplyJob(self.engine, Prompt(inputs), ask.sampling, session=self._session)
        return ReplyJob(
            self.engine,
            lambda session: self._prompt(session, messages[known:]),
            ask.sampling,
            session=self._session,
        )

    def _begun(self, ask: Ask, messages: Sequence[Message]) -> CachedConversation:
        """Return the session of a new conversation, in which a shared context is read already."""
        if ask.context is not None and ask.context.shared and not ask.raw:
            found = self._shared.copy(messages, ask.context)
            if found is not None:
                session, ask.context_tokens = found
                return CachedConversation(self.engine, session=session)
        return CachedConversation(self.engine)

    def replied(self, reply: Reply) -> None:
        """Note the reply, which the next round's messages may hold as they got it."""
        content = [{"type": "text", "text": answer_text(reply)}]
        self._held += keys([{"role": "assistant", "content": content}])

    def close(self, scheduler: Scheduler) -> None:
        """Return the session's pages."""
        scheduler.close_session(self._session)
        self._held = []

    def _prompt(self, session: Session, messages: Sequence[Message]) -> Prompt:
        """Read the pictures of the new messages. Raises InputError."""
        plain, images, videos = take_media(messages)

        def load() -> tuple[list[Any], list[Any]]:
            processor = self.engine.processor
            pictures = [processor.load_picture(image) for image in images]
            return pictures, [self.frames.load(video, processor) for video in videos]

        reading = compose_messages(session, plain, load)
        if self.visual_tokens is not None:
            before = 0 if session.seen == 0 else session.budget.value - self.visual_tokens
            budget = text_tokens(self.engine, reading.inputs) + self.visual_tokens + before
            session.set_budget(budget)
        return Prompt(reading.inputs, plain, reading)


@dataclass
class Ask:
    """A request: the whole conversation so far, which the model continues.

    Attributes:
        context: its long text, where the task names one; longest: tokens of a prompt behind which
            a reply of the task's length fits the model. raw: the last message's text alone is
            read, with no template, and behind it ``begin``, which the reply begins with.
        context_tokens: set while it is read: tokens of a shared context that were read for it.
        cut: set then: tokens of the long text before and after it was cut; None: it was not.
        left_out: set then: the text in place of a reply, where the task leaves long prompts out.
    """

    messages: Sequence[Message]
    sampling: Settled
    context: Context | None = None
    longest: int = sys.maxsize
    raw: bool = False
    begin: str = ""
    context_tokens: int = 0
    cut: tuple[int, int] | None = None
    left_out: str = ""


def text_tokens(engine: Engine, inputs: Mapping[str, Any]) -> int:
    """Count the tokens of a prompt that stand for no picture and no video.

    They and V more are a row's budget beside methods that prune a prompt to V visual tokens
    (DBTrimKV, arXiv 2605.09649, section 5.1).
    """
    media = torch.tensor([*engine.family.placeholder.values()])
    return int((~torch.isin(inputs["input_ids"], media)).sum())


Script = Generator[Ask, "Reply | None", None]  # None: the request was left out


class _Member:
    """A script that runs."""

    def __init__(self, name: str, script: Script, dialogue: LmmsDialogue) -> None:
        self.name, self.script, self.dialogue = name, script, dialogue
        self.ticket: Ticket[ReplyJob] | None = None

    def proceed(self, scheduler: Scheduler) -> bool:
        """Hand over a finished reply and ask the next question; False when all is done."""
        try:
            if self.ticket is None:
                ask = next(self.script)
            elif self.ticket.over:
                ask = self.script.send(self._reply(self.ticket))
            else:
                return True
            self.ticket = scheduler.submit(self._job(ask, scheduler))
        except StopIteration:
            self.dialogue.close(scheduler)
            return False
        except MmkvError as error:
            raise type(error)(f"{self.name}: {error}") from error
        return True

    def _job(self, ask: Ask, scheduler: Scheduler) -> ReplyJob:
        """Return the job of a request, or of the next one where that is left out."""
        while True:
            try:
                return self.dialogue.turn(ask, scheduler)
            except LeftOutError as error:
                ask.left_out = str(error)
                ask = self.script.send(None)

    def _reply(self, ticket: Ticket[ReplyJob]) -> Reply:
        if ticket.error is not None:
            raise ticket.error
        reply = ticket.job.reply
        assert reply is not None
        self.dialogue.replied(reply)
        return reply


def run(
    engine: Engine,
    scripts: Iterable[tuple[str, Script]],
    batch_size: int,
    frames: Frames,
    done: Callable[[], object],
    visual_tokens: int | None = None,
) -> None:
    """Run named scripts to their ends, up to ``batch_size`` in every decode step.

    ``done`` is called for each that ends. Raises the MmkvError of the first document that cannot
    be answered, with its name in front; no session stays open.
    """
    waiting = deque(scripts)
    running: list[_Member] = []
    scheduler, shared = batch_scheduler(engine, batch_size), SharedContexts(engine, batch_size)
    try:
        while waiting or running:
            while waiting and len(running) < batch_size:
                name, script = waiting.popleft()
                dialogue = LmmsDialogue(engine, frames, shared, visual_tokens)
                running.append(_Member(name, script, dialogue))
            for member in list(running):
                if not member.proceed(scheduler):
                    running.remove(member)
                    done()
            scheduler.turn()
    finally:
        scheduler.close()
        shared.close()


# isort: split


@dataclass
class LmmsRecord:
    """The replies to one document, their texts as the task stores them, and how it was read.

    ``context_tokens`` and ``cuts``: see :class:`Ask`, of all its requests.
    """

    replies: list[Reply] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    context_tokens: int = 0
    cuts: list[tuple[int, int]] = field(default_factory=list)

    def facts(self) -> dict[str, Any]:
        """Return how its long texts were read, for the samples file; mostly nothing."""
        cuts = [{"tokens": before, "kept": after} for before, after in self.cuts]
        read = {"context_tokens": self.context_tokens} if self.context_tokens else {}
        return read | ({CUTS: cuts} if cuts else {})


class Adapter(lmms):
    """An lmms-eval model that decodes with a bounded cache.

    Subclasses say how a request becomes messages: :meth:`_single` and :meth:`_rounds`.
    """

    # Bounds on a picture's pixels where the user gives none, and whether ``until`` ends replies.
    images: tuple[int, int]
    until: bool

    @reported_to_parent()
    def __init__(
        self,
        batch_size: int | str | None = 1,
        max_batch_size: int | None = None,
        **given: Any,
    ) -> None:
        super().__init__()
        atexit.register(_leave_process_group)
        if batch_size == "auto":
            raise InputError("mmkv has no automatic batch size; give --batch_size a number")
        self.settings = LmmsSettings.of({**given, "batch_size": batch_size or 1})
        self.engine = self.settings.load(self.images)
        self._device = self.engine.device
        self.opening = self.settings.opening()
        thinking = thinks(self.engine.processor.template)
        self._floor = self.settings.thinking_floor if thinking else 0
        self._reported: set[str] = set()
        self._journal = FinishedReplies.of_parent()
        asked = self.engine.generation
        for note in (self.engine.policy_note, self.engine.form_note, asked.unfollowed):
            if note:
                logger.warning(note)

    @property
    def device(self) -> Any:
        """Return where lmms-eval puts the tensors it exchanges between processes."""
        return self._device

    @property
    def batch_size(self) -> int:
        """Return the largest number of documents in a decode step."""
        return self.settings.batch_size

    def clean(self) -> None:
        """Release model and cache, so that lmms-eval can load a judge."""
        del self.engine
        super().clean()

    def generate_until(self, requests: list[Instance]) -> list[GenerationResult]:
        """Return one reply per request, each with its token counts and cache statistics."""
        return self._answer(requests, self._single, lambda record: record.texts[0])

    def generate_until_multi_round(self, requests: list[Instance]) -> list[GenerationResult]:
        """Answer all rounds of each document.

        A round that continues the last one adds its own tokens only.
        """
        return self._answer(requests, self._rounds, lambda record: Rounds(record.texts))

    @abstractmethod
    def _single(self, request: Instance, sampling: Any, record: LmmsRecord) -> Script:
        """Ask what one document asks once; the reply goes into ``record``."""

    @abstractmethod
    def _rounds(self, request: Instance, sampling: Any, record: LmmsRecord) -> Script:
        """Ask all rounds of one document."""

    @reported_to_parent()
    def _answer(
        self,
        requests: list[Instance],
        script: Callable[[Instance, Any, LmmsRecord], Script],
        text: Callable[[LmmsRecord], Any],
    ) -> list[GenerationResult]:
        records = [LmmsRecord() for _ in requests]
        scripts = (
            (self._name(request), self._kept(request, record, script(request, sampling, record)))
            for request, sampling, record in zip(
                requests, map(self._sampling, requests, _repeats(requests)), records, strict=True
            )
        )
        started = time.perf_counter()
        frames, more = self.settings.frames(), self.settings.visual_tokens
        with tqdm(total=len(requests), disable=self.rank != 0, desc="mmkv") as bar:
            run(self.engine, scripts, self.batch_size, frames, bar.update, more)
        replies = [reply for record in records for reply in record.replies]
        differ = [one.memory.differs for one in replies if one.memory and one.memory.differs]
        if differ:
            logger.warning(f"{len(differ)} of {len(replies)} replies: {differ[0]}")
        if cut := sum(map(_cut_in_thought, replies)):
            logger.warning(
                f"{cut} of {len(replies)} replies were cut inside their thought and have no "
                "answer; raise the model argument thinking_floor"
            )
        made = [
            answer(
                text(record), record.replies, self._facts() | record.facts(), record.context_tokens
            )
            for record in records
        ]
        _log_throughput(made, time.perf_counter() - started, self.rank)
        return made

    def _kept(self, request: Instance, record: LmmsRecord, script: Script) -> Script:
        """Return the script; its texts are written down when it ends."""
        yield from script
        row = {"task": request.task_name, "doc_id": request.doc_id, "replies": record.texts}
        if note := self._journal.add(row):
            logger.warning(note)

    def _sampling(self, request: Instance, repeat: int) -> Any:
        """Return the sampling of a request; repeats of a question differ, runs do not.

        Nor does it matter how many processes share the documents.
        """
        given = gen_kwargs_of(request)
        seed = self.settings.seed + request.doc_id * (request.repeats or 1) + repeat
        made, ignored = sampling_of(given, seed, self.engine.generation, self.until)
        for name in set(ignored) - self._reported:
            self._reported.add(name)
            logger.warning(f"{request.task_name}: generation_kwargs {name} has no effect in mmkv")
        if made.max_new_tokens >= self._floor:
            return made
        note = (
            f"{request.task_name}: this model thinks before it answers, so replies may have "
            f"{self._floor} new tokens, not {made.max_new_tokens}; thinking_floor=0 keeps the "
            "task's limit"
        )
        if note not in self._reported:
            self._reported.add(note)
            logger.warning(note)
        return replace(made, max_new_tokens=self._floor)

    def _facts(self) -> dict[str, Any]:
        policy, more = self.engine.policy, self.settings.visual_tokens
        budget = self.engine.budget.describe() if policy.evicts else "unlimited"
        if more is not None:
            budget = f"its text tokens and {more} entries per row"
        return {"policy": policy.name, "budget": budget}

    def _document(self, task: str, split: str, doc_id: int) -> Any:
        return self.task_dict[task][split][doc_id]

    @staticmethod
    def _name(request: Instance) -> str:
        return f"task {request.task_name}, document {request.doc_id}"


def gen_kwargs_of(request: Instance) -> dict[str, Any]:
    """Return the request's generation_kwargs: the only dictionary among its arguments."""
    return next((value for value in request.args if isinstance(value, dict)), {})


def ask_once(ask: Ask, record: LmmsRecord) -> Script:
    """Return the script of a single question."""
    reply = yield ask
    if reply is not None:
        record.replies.append(reply)
    record.texts.append(ask.left_out if reply is None else answer_text(reply))
    record.context_tokens += ask.context_tokens
    record.cuts += [ask.cut] if ask.cut else []


def ask_in_rounds(
    opening: Any,
    following: Callable[..., Any],
    to_ask: Callable[[Any], Ask],
    record: LmmsRecord,
) -> Script:
    """Return the script of a multi-round task, by the protocol of lmms-eval 0.7.3.

    ``opening``: the first round's input, a list; ``following(round_idx=, previous_output=,
    previous_round_info=)`` gives the next one's, and behind it whether there is none, the texts to
    keep, and a note for the next call; anything of another length ends the document.
    """
    given, note, index = opening, None, 0
    while True:
        yield from ask_once(to_ask(given), record)
        index += 1
        found = following(
            round_idx=index, previous_output=list(record.texts), previous_round_info=note
        )
        if not isinstance(found, tuple) or len(found) != len(opening) + 3:
            return
        *given, over, texts, note = found
        if isinstance(texts, (list, tuple)) and all(isinstance(text, str) for text in texts):
            record.texts = list(texts)
        if over:
            return


def _repeats(requests: Sequence[Instance]) -> Iterator[int]:
    """Yield for each request how often the same one came before it."""
    made: Counter[tuple[Any, Any]] = Counter()
    for request in requests:
        yield made[request.task_name, request.doc_id]
        made[request.task_name, request.doc_id] += 1


def _leave_process_group() -> None:
    """End torch.distributed's process group, which lmms-eval begins and never ends.

    A process that exits inside a gloo group sometimes aborts in the destructor of a thread.
    """
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def _log_throughput(made: list[GenerationResult], seconds: float, rank: int) -> None:
    counts = [result.token_counts for result in made if result.token_counts]
    tokens = sum(count.output_tokens or 0 for count in counts)
    held = [count.cache["kv_bytes"] for count in counts if count.cache]
    extra = {"rank": rank, "kv_bytes": sum(held) / len(held) if held else 0.0}
    log_metrics(seconds, tokens, tokens / seconds if seconds else 0.0, extra)


class LikelihoodScorer:
    """Scores continuations; those of one question share its prefill, each on a copy of the cache.

    The prompt is read under the budget first, as for a reply; then the continuation is fed token
    by token, with eviction as in decoding.
    """

    def __init__(self, engine: Engine, frames: Frames, visual_tokens: int | None = None) -> None:
        self.engine, self.frames, self.visual_tokens = engine, frames, visual_tokens
        self._session: Session | None = None
        self._logits: torch.Tensor | None = None
        self._key: list[Key] | None = None

    def score(self, messages: list[Message], continuation: str) -> GenerationResult:
        """Compute (mean loss, greedy) of ``continuation`` as the reply to ``messages``. Raises
        InputError.

        Wrapped in a GenerationResult, because lmms-eval 0.7.3 turns a bare pair into text before
        its tasks see it.
        """
        tokens = self._tokens(continuation)
        self._prefill(messages)
        assert self._session is not None and self._logits is not None
        losses, greedy, logits = [], True, self._logits
        with self._session.fork() as session:
            for place, token in enumerate(tokens):
                if place:
                    logits = session.decode(tokens[place - 1])
                losses.append(-float(logits.float().log_softmax(-1)[token]))
                greedy &= int(logits.argmax()) == token
        return answer(LmmsScored((sum(losses) / len(losses), greedy)), [], {})

    def close(self) -> None:
        """Return the pages of the question held."""
        if self._session is not None:
            self._session.close()
        self._session = self._key = None

    def _tokens(self, continuation: str) -> list[int]:
        # The reply starts a line in every template: a blank in front of it, which
        # lmms-eval puts between question and choice, would make other tokens of its first word.
        text = continuation.strip()
        tokenizer: Any = self.engine.processor.tokenizer
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        if not tokens:
            raise InputError("the task wants the likelihood of an empty text; correct its choices")
        return tokens

    def _prefill(self, messages: list[Message]) -> None:
        key = keys(messages)
        if key == self._key:
            return
        self.close()
        plain, images, videos = take_media(messages)
        processor = self.engine.processor
        inputs = processor.encode(
            processor.template.render(plain, opening=True),
            [processor.load_picture(image) for image in images],
            [self.frames.load(video, processor) for video in videos],
        )
        most = self.visual_tokens
        budget = None if most is None else text_tokens(self.engine, inputs) + most
        self._session = self.engine.session(budget)
        self._logits = self._session.prefill(inputs)
        self._key = key


class MmkvSimple(Adapter):
    """Answers tasks given as one text with the pictures and videos in front of it."""

    is_simple = True
    images = SIMPLE_IMAGES
    until = True

    @reported_to_parent()
    def loglikelihood(self, requests: list[Instance]) -> list[Any]:
        """Compute the mean loss of each continuation, and whether it is the greedy one.

        lmms-eval's own models return losses, and its tasks take the smallest, whatever the
        method's name says.
        """
        scorer = LikelihoodScorer(self.engine, self.settings.frames(), self.settings.visual_tokens)
        try:
            return [self._scored(request, scorer) for request in requests]
        finally:
            scorer.close()

    def _scored(self, request: Instance, scorer: LikelihoodScorer) -> Any:
        context, continuation, *rest = request.args
        visuals: Any = None
        if rest:  # absent where a task wants the choice without its question
            doc_to_visual, doc_id, task, split = rest
            doc = self._document(task, split, doc_id)
            visuals = doc_to_visual(doc)
            continuation = continuation(doc) if callable(continuation) else continuation
        return scorer.score(self._messages(context, visuals), str(continuation))

    def _single(self, request: Instance, sampling: Any, record: LmmsRecord) -> Script:
        context, _, doc_to_visual, doc_id, task, split = request.args
        visuals = doc_to_visual(self._document(task, split, doc_id))
        yield from ask_once(Ask(self._messages(context, visuals), sampling), record)

    def _rounds(self, request: Instance, sampling: Any, record: LmmsRecord) -> Script:
        context, _, doc_to_visual, doc_to_text, doc_id, task, split = request.args
        doc = self._document(task, split, doc_id)

        def ask(given: Sequence[Any]) -> Ask:
            visuals, text = given
            return Ask(self._messages(text, visuals), sampling)

        first = [doc_to_visual(doc), context]
        yield from ask_in_rounds(first, partial(doc_to_text, doc), ask, record)

    def _messages(self, context: str, visuals: Any) -> list[Message]:
        parts = [visual_part(visual) for visual in (visuals or [])]
        # Tasks for older models mark the place of the pictures, which come first here.
        text = context.replace("<image>", "")
        content = [*parts, {"type": "text", "text": text}]
        return conversation([{"role": "user", "content": content}], self.opening)


class MmkvChat(Adapter):
    """Answers tasks given as messages, with pictures where the task puts them."""

    is_simple = False
    images = CHAT_IMAGES
    until = False

    @reported_to_parent()
    def loglikelihood(self, requests: list[Instance]) -> Any:
        """Refuse: lmms-eval has no such requests in messages."""
        raise InputError(
            "lmms-eval scores choices by likelihood in its simple form alone; add --force_simple"
        )

    def _single(self, request: Instance, sampling: Any, record: LmmsRecord) -> Script:
        _, doc_to_messages, _, doc_id, task, split = request.args
        given = doc_to_messages(self._document(task, split, doc_id))
        yield from ask_once(self._ask(request, given, sampling), record)

    def _rounds(self, request: Instance, sampling: Any, record: LmmsRecord) -> Script:
        _, doc_to_messages, _, doc_id, task, split = request.args
        doc = self._document(task, split, doc_id)
        yield from ask_in_rounds(
            [doc_to_messages(doc)],
            partial(doc_to_messages, doc),
            lambda given: self._ask(request, given[0], sampling),
            record,
        )

    def _ask(self, request: Instance, given: Any, sampling: Settled) -> Ask:
        """Return the request of a task's messages.

        Beside its text the last message may say ``max_new_tokens`` (a bound below the task's),
        ``stop`` (strings that end the reply), ``raw`` (no template) and ``begin`` (what a raw
        prompt ends with).
        """
        messages = conversation(given, self.opening)
        last = given[-1] if isinstance(given[-1], dict) else {}
        raw = bool(last.get("raw")) and not self.settings.always_template
        asked = int(gen_kwargs_of(request).get("max_new_tokens") or MAX_NEW_TOKENS)
        asked = min(asked, last.get("max_new_tokens") or asked)
        # No thought begins where no template is; a thought takes what room the prompt leaves.
        most = asked if raw else max(asked, self._floor)
        stop = (*sampling.stop, *last.get("stop", ()))
        sampling = replace(sampling, max_new_tokens=most, stop=stop)
        longest = min(
            self.settings.max_prompt_tokens or sys.maxsize, self.engine.spec.max_position - asked
        )
        context = context_of(given, len(messages) - len(given))
        return Ask(messages, sampling, context, longest, raw, str(last.get("begin", "")))
