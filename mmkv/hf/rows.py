"""The rows of a batch, each a session of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mmkv.engine.errors import InputError
from mmkv.engine.sequence import CachedSequence


@dataclass
class Row:
    """One conversation.

    Attributes:
        session: what holds its keys and values.
        ids: every token that the session has seen.
        prompt: how many of them the first prompt had.
        pending: the latest token that was generated; the session has not seen it.
    """

    session: CachedSequence
    ids: list[int] = field(default_factory=list)
    prompt: int = 0
    pending: int | None = None

    def fork(self) -> Row:
        """Return an independent copy."""
        return Row(self.session.fork(), list(self.ids), self.prompt, self.pending)

    def can_go_back(self, count: int) -> bool:
        """Whether it can stand behind its first ``count`` tokens again as if it had read no more.

        Not once something has been evicted, nor behind a picture that it would have to read again.
        """
        session, engine = self.session, self.session.engine
        media = set(engine.family.placeholder.values())
        exact = session.can_cut_back and not session.evicted and not engine.policy.keeps_prompt
        return exact and media.isdisjoint(self.ids[count:])

    def go_back(self, count: int) -> None:
        """Let go what follows its first ``count`` tokens; see :meth:`can_go_back`."""
        if count == len(self.ids):
            return
        session = self.session
        position = session.next_position - (session.seen - count)
        session.cut_back(count, position, min(session.prompt_tokens, count))
        self.ids, self.pending, self.prompt = self.ids[:count], None, min(self.prompt, count)

    def fed(self, token: int) -> None:
        """Note that the session has seen ``token``."""
        self.ids.append(token)
        self.pending = None


def without_padding(input_ids: Tensor, mask: Tensor | None) -> list[Tensor]:
    """Return the tokens int64 ``[T]`` of each row, on the CPU, without those that are masked.

    Args:
        input_ids: ``[B, W]``.
        mask: ``[B, W]`` or, where tokens came before, ``[B, more than W]``.

    Raises:
        InputError: for a mask of another shape.
    """
    ids = input_ids.cpu().long()
    if mask is None:
        return list(ids)
    if mask.dim() != 2 or mask.shape[0] != ids.shape[0] or mask.shape[1] < ids.shape[1]:
        raise InputError(
            f"attention_mask has shape {list(mask.shape)} and input_ids {list(ids.shape)}; pass "
            "the mask that the processor returns"
        )
    own = mask[:, mask.shape[1] - ids.shape[1] :].cpu().bool()
    return [row[kept] for row, kept in zip(ids, own, strict=True)]


def masked_before(input_ids: Tensor, mask: Tensor | None) -> list[int] | None:
    """Count the tokens that the mask names before ``input_ids``, per row; None: it names none."""
    if mask is None or mask.shape[1] == input_ids.shape[1]:
        return None
    return mask[:, : mask.shape[1] - input_ids.shape[1]].bool().sum(1).tolist()


def new_tokens(
    rows: Sequence[Row], given: Sequence[Tensor], before: Sequence[int] | None
) -> list[tuple[int, Tensor]]:
    """Return how many of its tokens each conversation keeps, and what it has to read then.

    Where the tokens of a whole conversation leave those that are held, as templates do that drop
    the thoughts of earlier replies, it goes back if nothing is lost by that.

    Args:
        rows: the conversations so far.
        given: per row the tokens of the whole conversation, or those after the latest reply.
        before: per row how many tokens stand before ``given``, where the mask says so.

    Raises:
        InputError: the tokens neither continue nor repeat the conversation.
    """
    if len(rows) != len(given):
        raise InputError(
            f"the cache holds {len(rows)} conversations and the batch has {len(given)} rows; "
            "pass as many rows as the generate call that filled it returned"
        )
    if before is not None:
        joined = [_after(*parts) for parts in zip(rows, given, before, strict=True)]
        return [(len(row.ids), ids) for row, ids in zip(rows, joined, strict=True)]
    common = [_common(row.ids, ids) for row, ids in zip(rows, given, strict=True)]
    whole = [
        count == len(row.ids) < ids.numel()
        for count, row, ids in zip(common, rows, given, strict=True)
    ]
    # Ids that repeat the first prompt and go on are those of the whole conversation.
    leaves = [
        row.prompt <= count < ids.numel()
        for count, row, ids in zip(common, rows, given, strict=True)
    ]
    if any(leaves) or any(whole):
        made = []
        for count, row, ids, complete, left in zip(common, rows, given, whole, leaves, strict=True):
            session = row.session
            needs = session.engine.policy.scoring.needs if session.engine.policy.evicts else None
            # A policy that scores with the latest queries reads as many again.
            window = 0 if needs is None else needs.queries
            kept = count if complete else max(min(count, ids.numel() - max(window, 1)), 0)
            if not (complete or (left and row.can_go_back(kept))):
                raise InputError(
                    f"input_ids repeat the conversation up to token {count}, and the cache holds "
                    f"{len(row.ids)} tokens that go on differently; pass the tokens that generate "
                    "returned, followed by the new ones, or a new RetainedCache()"
                )
            made.append((kept, ids[kept:]))
        return made
    joined = [_joined(row, ids) for row, ids in zip(rows, given, strict=True)]
    return [(len(row.ids), ids) for row, ids in zip(rows, joined, strict=True)]


def _after(row: Row, ids: Tensor, before: int) -> Tensor:
    """Return the new tokens of a row whose mask names ``before`` tokens ahead of ``ids``."""
    if before == len(row.ids):
        return ids
    joined = _joined(row, ids)
    if before == len(row.ids) + joined.numel() - ids.numel():
        return joined
    raise InputError(
        f"attention_mask names {before} tokens before input_ids, and the cache holds "
        f"{len(row.ids)}; leave the mask out, or make it cover exactly these"
    )


def _joined(row: Row, ids: Tensor) -> Tensor:
    """Put the latest reply's last token before the new ones: the session has not seen it."""
    return ids if row.pending is None else torch.cat([torch.tensor([row.pending]), ids])


def _common(held: Sequence[int], ids: Tensor) -> int:
    """Count the tokens that both begin with."""
    most = min(len(held), ids.numel())
    differs = (torch.tensor(held[:most], dtype=torch.long) != ids[:most]).nonzero()
    return int(differs[0]) if differs.numel() else most
