"""A reply as JSON: its text and its numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mmkv.chat.display import total_entries
from mmkv.environment import versions

if TYPE_CHECKING:
    from mmkv.api import Engine, Session


def record(engine: Engine, session: Session, model: str) -> dict[str, Any]:
    """Return what --json prints after a reply of ``session`` (its ``last``)."""
    reply, memory = session.last, session.memory()
    assert reply is not None
    pool = engine.cache.pool
    return {
        "text": reply.text,
        "finish_reason": reply.finish_reason,
        "model": model,
        "device": str(engine.device),
        "dtype": str(engine.dtype).removeprefix("torch."),
        "decode_path": session.reply_path,
        "policy": engine.policy.name,
        "policy_note": engine.policy_note,
        "kv": pool.form.name,
        "kv_note": engine.form_note,
        "budget": {"unit": session.budget.kind, "value": session.budget.value},
        "tokens": {
            "prompt": reply.prompt_tokens,
            "generated": len(reply.token_ids),
            "seen": memory.tokens_seen,
        },
        "entries": {
            "kept": memory.entries,
            "evicted": memory.evicted,
            "evicted_nan": memory.evicted_nan,
            "total": total_entries(engine, memory),
            "by_modality": memory.by_modality,
            "pictures": list(memory.pictures),
        },
        "differs": memory.differs,
        "memory": {
            "pages": memory.pages,
            "kv_bytes": memory.kv_bytes,
            "metadata_bytes": memory.metadata_bytes,
            "physical_bytes": memory.kv_bytes + memory.metadata_bytes,
            "pool_bytes": pool.num_pages * pool.page_bytes,
        },
        "time_to_first_token_s": round(reply.seconds_to_first_token, 4),
        "tokens_per_second": round(reply.tokens_per_second, 2),
        "versions": versions(),
    }
