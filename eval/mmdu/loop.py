"""Answer a dialogue in one session; each turn adds its own text and pictures only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmkv.engine.errors import ContextError
from mmkv.eval.mmdu.data import Dialogue, interleave

if TYPE_CHECKING:
    from mmkv.api import Engine
    from mmkv.sampling import Sampling


@dataclass(frozen=True)
class TurnRecord:
    """Numbers of one turn, written beside its answer.

    Attributes:
        prompt_tokens: tokens that the turn added before its answer (the last token of the answer
            before is among them). generated: tokens of the answer.
        tokens_seen: tokens of the session so far. The last token of an answer enters with the
            next turn.
        entries_kept, entries_evicted: (layer, head, token) entries, now and in all.
        pages, kv_bytes: physical pages held, whole, and the bytes of their keys and values. (Not
            the metadata: block tables are as wide as the longest dialogue so far needed, and the
            numbers of a dialogue must not depend on those before it.)
    """

    prompt_tokens: int
    generated: int
    finish_reason: str
    tokens_seen: int
    entries_kept: int
    entries_evicted: int
    pages: int
    kv_bytes: int


def answer(
    engine: Engine,
    dialogue: Dialogue,
    pictures: Sequence[Path],
    sampling: Sampling,
    system: str | None = None,
    progress: Callable[[int], None] | None = None,
) -> tuple[list[str], list[dict[str, Any]]]:
    """Ask the questions in order; the history holds the model's own answers.

    Args:
        pictures: files of ``dialogue.images``. progress: called with the turns answered so far.

    Returns:
        The answers, and a :class:`TurnRecord` as a dict for each.

    Raises:
        MmkvError: a picture or question cannot be used, or the dialogue is too long for the
            model. Nothing of the dialogue is dropped to make it fit.
    """
    waiting = iter(pictures)
    answers: list[str] = []
    records: list[dict[str, Any]] = []
    with engine.session() as session:
        for number, question in enumerate(dialogue.questions, 1):
            parts = interleave(question, waiting)
            first = system if number == 1 else None
            answers.append("".join(session.send(parts, system=first, sampling=sampling)))
            reply = session.last
            assert reply is not None and reply.memory is not None
            if reply.finish_reason == "context":
                raise ContextError(
                    f"answer {number} of {len(dialogue.questions)} used up the model's "
                    f"{engine.spec.max_position:,} positions; lower --max-new-tokens or "
                    "--max-pixels, or take a model with a longer context"
                )
            records.append(
                asdict(
                    TurnRecord(
                        prompt_tokens=reply.prompt_tokens,
                        generated=len(reply.token_ids),
                        finish_reason=reply.finish_reason,
                        tokens_seen=reply.memory.tokens_seen,
                        entries_kept=reply.memory.entries,
                        entries_evicted=reply.memory.evicted,
                        pages=reply.memory.pages,
                        kv_bytes=reply.memory.kv_bytes,
                    )
                )
            )
            if progress is not None:
                progress(number)
    return answers, records
