"""Code that the chat form and the simple form of ``--model mmkv`` share."""

from __future__ import annotations

import atexit
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import mmkv.prompt.torchvision_guard  # noqa: F401 (before anything that imports transformers)

# isort: split
from lmms_eval.api.instance import GenerationResult, Instance
from lmms_eval.api.model import lmms
from lmms_eval.models.model_utils.gen_metrics import log_metrics
from loguru import logger
from tqdm import tqdm

from mmkv.engine.errors import InputError
from mmkv.eval.lmms.cause import reported_to_parent
from mmkv.eval.lmms.counts import Rounds, answer
from mmkv.eval.lmms.gen_kwargs import sampling_of
from mmkv.eval.lmms.journal import Journal
from mmkv.eval.lmms.scheduler import Ask, Script, run
from mmkv.eval.lmms.settings import Settings
from mmkv.reply import Reply


@dataclass
class Record:
    """The replies to one document, and their texts as the task stores them."""

    replies: list[Reply] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)


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
        self.settings = Settings.of({**given, "batch_size": batch_size or 1})
        self.engine = self.settings.load(self.images)
        self._device = self.engine.device
        self.opening = self.settings.opening()
        self._reported: set[str] = set()
        self._journal = Journal.of_parent()
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
    def _single(self, request: Instance, sampling: Any, record: Record) -> Script:
        """Ask what one document asks once; the reply goes into ``record``."""

    @abstractmethod
    def _rounds(self, request: Instance, sampling: Any, record: Record) -> Script:
        """Ask all rounds of one document."""

    @reported_to_parent()
    def _answer(
        self,
        requests: list[Instance],
        script: Callable[[Instance, Any, Record], Script],
        text: Callable[[Record], Any],
    ) -> list[GenerationResult]:
        records = [Record() for _ in requests]
        scripts = (
            (self._name(request), self._kept(request, record, script(request, sampling, record)))
            for request, sampling, record in zip(
                requests, map(self._sampling, requests, _repeats(requests)), records, strict=True
            )
        )
        started = time.perf_counter()
        with tqdm(total=len(requests), disable=self.rank != 0, desc="mmkv") as bar:
            run(self.engine, scripts, self.batch_size, self.settings.frames(), bar.update)
        replies = [reply for record in records for reply in record.replies]
        differ = [one.memory.differs for one in replies if one.memory and one.memory.differs]
        if differ:
            logger.warning(f"{len(differ)} of {len(replies)} replies: {differ[0]}")
        made = [answer(text(record), record.replies, self._facts()) for record in records]
        _log_throughput(made, time.perf_counter() - started, self.rank)
        return made

    def _kept(self, request: Instance, record: Record, script: Script) -> Script:
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
        return made

    def _facts(self) -> dict[str, Any]:
        policy = self.engine.policy
        return {
            "policy": policy.name,
            "budget": self.engine.budget.describe() if policy.evicts else "unlimited",
        }

    def _document(self, task: str, split: str, doc_id: int) -> Any:
        return self.task_dict[task][split][doc_id]

    @staticmethod
    def _name(request: Instance) -> str:
        return f"task {request.task_name}, document {request.doc_id}"


def gen_kwargs_of(request: Instance) -> dict[str, Any]:
    """Return the request's generation_kwargs: the only dictionary among its arguments."""
    return next((value for value in request.args if isinstance(value, dict)), {})


def ask_once(ask: Ask, record: Record) -> Script:
    """Return the script of a single question."""
    reply = yield ask
    record.replies.append(reply)
    record.texts.append(reply.text)


def ask_in_rounds(
    opening: Any,
    following: Callable[..., Any],
    to_ask: Callable[[Any], Ask],
    record: Record,
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
