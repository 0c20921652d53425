"""Answers in types that lmms-eval 0.7.3 writes to its files, cache statistics included."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lmms_eval.api.instance import GenerationResult, TokenCounts

from mmkv.engine.errors import InputError
from mmkv.reply import Reply


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


class Scored(tuple[float, bool]):
    """Loss of a continuation, and whether greedy decoding would have written it."""

    def strip(self) -> str:
        """Raise: only lmms-eval's response cache calls this, and it cannot hold these answers."""
        raise InputError(
            "lmms-eval 0.7.3 reads likelihoods back from --use_cache as text and miscounts them; "
            "run tasks of type multiple_choice without --use_cache"
        )


def answer(text: Any, replies: Sequence[Reply], settings: dict[str, Any]) -> GenerationResult:
    """Return ``text`` (a string, or Rounds) with the counts of the replies it came from."""
    memory = replies[-1].memory if replies else None
    counts = CacheCounts(
        input_tokens=sum(reply.prompt_tokens for reply in replies),
        output_tokens=sum(len(reply.token_ids) for reply in replies),
        cache=None if memory is None else asdict(memory) | settings | _ends(replies),
    )
    return GenerationResult(text=text, token_counts=counts)


def _ends(replies: Sequence[Reply]) -> dict[str, Any]:
    reasons = [reply.finish_reason for reply in replies]
    return {"finish_reason": reasons[0] if len(reasons) == 1 else reasons}
