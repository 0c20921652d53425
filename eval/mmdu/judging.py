"""``mmkv mmdu judge``: one call per question, journaled, several at a time."""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mmkv.engine.errors import InputError, MmkvError
from mmkv.eval.mmdu.client import JudgeClient, NoVerdictError
from mmkv.eval.mmdu.cost import data_uri
from mmkv.eval.mmdu.rubric import UnreadableScoresError, read_scores
from mmkv.eval.mmdu.verdicts import Key, Verdict

# The run stops after this many questions in succession without a verdict, because the next one
# would fail, too. A single question may fail for reasons of its own.
GIVE_UP_AFTER = 3


@dataclass(frozen=True)
class Task:
    """One question to be judged. ``text``: the whole prompt; ``pictures``: the dialogue's."""

    dialogue: str
    turn: int
    text: str
    pictures: tuple[Path, ...]

    @property
    def key(self) -> Key:
        """Return the question that the reply answers."""
        return self.dialogue, self.turn

    @property
    def prompt(self) -> str:
        """Return a hash of the request."""
        return hashlib.sha256(self.text.encode("utf-8", errors="surrogatepass")).hexdigest()[:16]


def judge(client: JudgeClient, task: Task, asks: int) -> Verdict:
    """Ask for the verdict on one answer; an unreadable reply is asked for again, ``asks`` times in
    all.

    Raises:
        NoVerdictError, MmkvError: there is no reply.
    """
    try:
        images = [data_uri(picture) for picture in task.pictures]
    except InputError as error:
        raise NoVerdictError(str(error)) from error
    failure = detail = text = ""
    usage: dict[str, int] = {}
    for asked in range(1, asks + 1):
        reply = client.ask(task.text, images)
        for name, count in reply.usage.items():
            if isinstance(count, int):
                usage[name] = usage.get(name, 0) + count
        text = reply.text
        if reply.refusal:
            # A filter would decide the same again.
            failure, detail = "refused", reply.refusal[:300]
            break
        try:
            scores = read_scores(reply.text)
        except UnreadableScoresError as error:
            failure, detail = error.kind, str(error)
            if reply.finish_reason == "length":
                detail += " (it was cut off at the token limit)"
            continue
        return Verdict(task.dialogue, task.turn, task.prompt, scores, "", "", text, asked, usage)
    return Verdict(task.dialogue, task.turn, task.prompt, None, failure, detail, text, asked, usage)


def judge_all(
    client: JudgeClient,
    tasks: Sequence[Task],
    asks: int,
    workers: int,
    on_open: Callable[[Task, str], None],
) -> Iterator[Verdict]:
    """Yield verdicts as they come, in any order.

    Args:
        workers: calls at a time. on_open: called for a question that got no verdict, with the
            reason.

    Raises:
        MmkvError: the judge cannot be used; earlier verdicts have been given.
    """
    todo: queue.SimpleQueue[Task] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[Task, Verdict | BaseException]] = queue.SimpleQueue()
    for task in tasks:
        todo.put(task)

    def work() -> None:
        while True:
            try:
                task = todo.get_nowait()
            except queue.Empty:
                return
            try:
                done.put((task, judge(client, task, asks)))
            except NoVerdictError as error:
                done.put((task, error))
            except BaseException as error:  # raised again in the main thread
                client.stop()  # at once, or other threads would still send
                done.put((task, error))
                return

    # Daemon threads: Ctrl-C must not wait minutes for an unneeded reply.
    for _ in range(min(workers, len(tasks))):
        threading.Thread(target=work, daemon=True).start()
    failed_in_a_row = 0
    try:
        for _ in tasks:
            task, outcome = done.get()
            if isinstance(outcome, Verdict):
                failed_in_a_row = 0
                yield outcome
            elif isinstance(outcome, NoVerdictError):
                failed_in_a_row += 1
                on_open(task, str(outcome))
                if failed_in_a_row >= GIVE_UP_AFTER:
                    raise MmkvError(
                        f"the judge gave no verdict on {failed_in_a_row} questions in succession "
                        f"({outcome}); check it and run the same command again"
                    )
            else:
                raise outcome
    finally:
        client.stop()
        while not todo.empty():
            try:
                todo.get_nowait()
            except queue.Empty:
                break
