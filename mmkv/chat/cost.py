"""What eviction cost an answer: the same reply, read again with the full cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmkv.api import Engine
from mmkv.chat.display import in_form
from mmkv.engine.budget import format_bytes
from mmkv.engine.policies import make_policy

if TYPE_CHECKING:
    from mmkv.session import Session


def cost_line(engine: Engine, session: Session, conversation: list[dict[str, Any]]) -> str:
    """Compare the latest reply of ``session`` with what the full cache makes of it.

    Both caches are fed the prompt and the tokens of the reply, its end token too. The difference
    is the mean over them of KL(full || kept), in nats.

    Args:
        conversation: the messages that ``session`` was sent, with their media.
    """
    assert session.last is not None
    tokens, inputs = session.last.token_ids, engine.inputs(conversation)
    whole = Engine(
        engine.family,
        engine.spec,
        engine.decoder.weights,
        None,
        make_policy("full"),
        prefill_chunk=engine.prefill_chunk,
        kv=engine.cache.pool.form.name,
    )
    ended = session.last.finish_reason == "eos"
    full, full_bytes = _replay(whole, inputs, tokens, ended)
    kept, kept_bytes = _replay(engine, inputs, tokens, ended)
    best = full.argmax(-1).tolist()
    same = sum(one == other for one, other in zip(best, tokens, strict=False))
    same += ended and best[-1] in engine.eos_token_ids
    divergence = torch.nn.functional.kl_div(
        kept.log_softmax(-1), full.log_softmax(-1), reduction="batchmean", log_target=True
    )
    rounding = engine.decoder.weights.rounding()
    line = (
        f"what eviction cost: the full cache ranks {same} of {len(full)} tokens of the reply "
        f"first, KL {float(divergence):.4f} nats a token; {format_bytes(kept_bytes)} of keys and "
        f"values instead of {format_bytes(full_bytes)}{in_form(engine)}"
    )
    return f"{line}; {rounding}, in both" if rounding else line


def _replay(
    engine: Engine, inputs: dict[str, Tensor], tokens: Sequence[int], ended: bool
) -> tuple[Tensor, int]:
    """Return the logits before each token of a reply, on the CPU, and the bytes held at the end."""
    with engine.session() as session:
        rows = [session.prefill(inputs)]
        rows += [session.decode(token) for token in (tokens if ended else tokens[:-1])]
        return torch.stack(rows).cpu(), session.memory().kv_bytes
