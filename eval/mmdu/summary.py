"""Summarise a run from its finished files alone, so that a resumed run reports the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mmkv.engine.budget import format_bytes
from mmkv.eval.mmdu.data import Dialogue
from mmkv.eval.mmdu.exact import as_rows, shares
from mmkv.training.measure.tables import Table


def summarize(
    dialogues: Sequence[Dialogue], rows: Mapping[str, dict[str, Any]], failed: int
) -> dict[str, Any]:
    """Compute the numbers of a run; ``rows``: the finished files by dialogue id.

    Per-dialogue means are taken at the dialogue's end, where a cache that is never cut would be
    largest.
    """
    done = [dialogue for dialogue in dialogues if dialogue.id in rows]
    # A file of another program has answers and no numbers.
    turns = [rows[d.id].get("mmkv", {}).get("turns", []) for d in done]
    last = [records[-1] for records in turns if records]
    every = [record for records in turns for record in records]
    answers = {d.id: [turn["value"] for turn in rows[d.id]["conversations"][1::2]] for d in done}
    return {
        "dialogues": len(done),
        "failed": failed,
        "questions": sum(len(dialogue.questions) for dialogue in done),
        "cut_at_max_new_tokens": sum(record["finish_reason"] == "length" for record in every),
        "answer_tokens_mean": _mean([record["generated"] for record in every]),
        "tokens_seen_mean": _mean([record["tokens_seen"] for record in last]),
        "tokens_seen_max": max((record["tokens_seen"] for record in last), default=0),
        "entries_kept_mean": _mean([record["entries_kept"] for record in last]),
        "entries_evicted_mean": _mean([record["entries_evicted"] for record in last]),
        "kv_bytes_mean": _mean([record["kv_bytes"] for record in last]),
        "kv_bytes_max": max((record["kv_bytes"] for record in every), default=0),
        "exact": as_rows(shares(done, answers)),
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def memory_table(summary: dict[str, Any], title: str) -> Table:
    """Tabulate tokens, entries and bytes of a run."""
    table = Table(title, ("per dialogue, at its end", "mean", "largest"))
    kept, evicted = summary["entries_kept_mean"], summary["entries_evicted_mean"]
    largest = f"{summary['tokens_seen_max']:,}"
    table.add("tokens seen", f"{summary['tokens_seen_mean']:,.1f}", largest)
    table.add("entries kept", f"{kept:,.1f}", "-")
    table.add("entries evicted", f"{evicted:,.1f}", "-")
    physical = format_bytes(summary["kv_bytes_mean"]), format_bytes(summary["kv_bytes_max"])
    table.add("keys and values, whole pages", *physical)
    return table


def exact_table(rows: Sequence[dict[str, Any]], title: str) -> Table:
    """Tabulate right answers per kind of question."""
    table = Table(title, ("kind", "right", "of", "share", "95 % interval"))
    for row in rows:
        low, high = row["ci"]
        table.add(
            row["kind"], row["right"], row["of"], f"{row['share']:.3f}", f"{low:.3f} .. {high:.3f}"
        )
    return table
