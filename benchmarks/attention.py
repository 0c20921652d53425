"""Measure how long tokens are attended to, and how few of them a query reads, on the full cache.

``python -m benchmarks.attention MODEL --data mmdu:FILE --limit 98 --most 16384`` reads documents
once, without eviction. Two papers show such figures.

*Survival* (DBTrimKV, arXiv 2605.09649, section 3.2, figures 2 and 9): a query selects the K tokens
that it gives most weight; a token is alive at horizon L if a query at least L positions after it
selects it. The share of alive ones counts tokens that have queries so late, for text and for
pictures, by layer and head.

*Sparsity* (G-KV, arXiv 2512.00504, appendix B, figure 9): of the newest 512 tokens, the share whose
weight is below p times the largest, for the last 16 queries, by layer.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.experiment import Table, add_options, finish, held_out, running
from mmkv.engine.errors import InputError
from mmkv.engine.model.decoder import Decoder
from mmkv.engine.runtime import Runtime
from mmkv.training.measure.teacher_forced import Documents, FullAttention, lay_out

HORIZONS = (64, 256, 1024, 4096, 16384)
SHARES = (0.01, 0.05, 0.1)  # p
_BLOCK, _NEWEST, _LAST = 96, 512, 16
_ROWS = (  # table, row, what of a document
    ("survival", "text", "text"),
    ("survival", "pictures", "pictures"),
    ("sparsity", "all layers", "sparse"),
)


def weights(query: Tensor, key: Tensor, rows: Tensor, scale: float) -> Tensor:
    """Return attention weights ``[Hq, n, T]`` of the queries ``rows [n]``.

    Args:
        query: ``[Hq, T, D]``; key: ``[H, T, D]``.
    """
    key = key.repeat_interleave(query.shape[0] // key.shape[0], 0).float()
    logits = query[:, rows].float() @ key.mT * scale
    later = torch.arange(key.shape[1], device=key.device) > rows[:, None]
    return torch.softmax(logits.masked_fill_(later, -torch.inf), -1)


def last_selected(query: Tensor, key: Tensor, top: int, scale: float) -> Tensor:
    """Return the last query that selects each token, int64 ``[Hq, T]``.

    A query selects the ``top`` tokens up to its own that it gives most weight, or all of them if
    they are fewer. A token that no query selects has its own index.

    Args:
        query: ``[Hq, T, D]``; key: ``[H, T, D]``.
    """
    tokens = torch.arange(query.shape[1], device=query.device)
    last = tokens.repeat(query.shape[0], 1)
    for rows in tokens.split(_BLOCK):
        given = weights(query, key, rows, scale)
        chosen = given.topk(min(top, given.shape[-1]), -1)
        at = torch.where(chosen.values > 0, rows[:, None], -1)
        last.scatter_reduce_(1, chosen.indices.flatten(1), at.flatten(1), "amax")
    return last


def alive(last: Tensor, of: Tensor, horizons: tuple[int, ...] = HORIZONS) -> Tensor:
    """Return the share of tokens alive at each horizon, ``[Hq, len(horizons)]``; NaN without any.

    Args:
        last: as :func:`last_selected` returns it; of: bool ``[T]``, tokens that count.
    """
    tokens = torch.arange(last.shape[1], device=last.device)
    made = []
    for horizon in horizons:
        count = of & (tokens + horizon < last.shape[1])
        made.append((last - tokens >= horizon)[:, count].double().mean(1))
    return torch.stack(made, 1)


def sparsity(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """Return the share of the newest tokens with less than p of the largest weight, one per p.

    Args:
        query: ``[Hq, T, D]``; key: ``[H, T, D]``.
    """
    rows = torch.arange(query.shape[1], device=query.device)[-_LAST:]
    given = weights(query, key, rows, scale)
    newest, most = given[..., -_NEWEST:], given.amax(-1, keepdim=True)
    seen = torch.arange(given.shape[-1], device=rows.device)[-_NEWEST:] <= rows[:, None]
    return torch.stack(
        [((newest < p * most) & seen).sum() / (seen.sum() * len(given)) for p in SHARES]
    )


class _Watched(FullAttention):
    def __init__(self, engine: Runtime, documents: Documents, top: int) -> None:
        super().__init__(engine, documents)
        self.top = top
        self.text, self.pictures, self.sparse = list[Tensor](), list[Tensor](), list[Tensor]()

    def attend_document(self, index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        last = last_selected(query[0], key[0], self.top, self.scale)
        text = self.documents.modality == 0
        self.text.append(alive(last, text).cpu())
        self.pictures.append(alive(last, ~text).cpu())
        self.sparse.append(sparsity(query[0], key[0], self.scale).cpu())
        return super().attend_document(index, query, key, value)


@torch.inference_mode()
def read(engine: Runtime, inputs: Any, top: int) -> dict[str, Tensor]:
    """Return what one document shows: ``text`` and ``pictures`` ``[L, Hq, horizons]``, ``sparse``
    ``[L, p]``, of layers with entries.
    """
    documents = lay_out(engine, [inputs])
    watched = _Watched(engine, documents, top)
    decoder = Decoder(engine.spec, engine.decoder.weights, None)
    rope = engine.rope.at(documents.positions)
    decoder.forward(documents.hidden, rope, watched, documents.deepstack)
    return {name: torch.stack(getattr(watched, name)) for name in ("text", "pictures", "sparse")}


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention", description=__doc__)
    add_options(parser, "attention", journal=False)
    parser.add_argument("--data", default="scenes:dense", help="as --data of mmkv distill")
    parser.add_argument("--limit", type=int, default=8, help="documents")
    parser.add_argument("--most", type=int, default=16384, help="tokens of a document")
    parser.add_argument("--top", type=int, default=128, help="K, tokens that a query selects")
    args = parser.parse_args()
    with running(args, "benchmarks.attention") as (path, _):
        if args.limit < 1:
            raise InputError(f"--limit {args.limit} reads nothing; give at least 1")
        engine = Runtime.from_pretrained(
            args.model, policy="full", dtype=args.dtype, device=args.device
        )
        rows = held_out(args.model, args.data, args.most)
        found = [read(engine, rows[index], args.top) for index in range(args.limit)]
        kept = {name: torch.stack([one[name] for one in found]).nanmean(0) for name in found[0]}
        shown = {name: _cells(value) for name, value in kept.items()}
        finish(args, path, shown, tables(kept), lambda _, to: draw(kept, to))


def _cells(values: Tensor) -> Any:
    """Return nested lists, with None where there is nothing to count."""
    if values.dim():
        return [_cells(value) for value in values]
    return None if values.isnan() else round(float(values), 6)


def tables(found: Mapping[str, Tensor]) -> dict[str, Table]:
    """Return the means over layers and heads, as tables."""
    made: dict[str, Table] = {
        "survival": [["tokens", *(f"L = {n}" for n in HORIZONS)]],
        "sparsity": [["below p of the largest weight", *(f"p = {p}" for p in SHARES)]],
    }
    for table, row, name in _ROWS:
        means = found[name].flatten(0, -2).nanmean(0).tolist()
        made[table].append([row, *("-" if math.isnan(x) else f"{x:.3f}" for x in means)])
    return made


def draw(found: Mapping[str, Tensor], path: Path) -> None:
    """Draw survival by layer and head at each horizon, and sparsity by layer."""
    from matplotlib.figure import Figure

    figure = Figure((14, 4), layout="constrained")
    axes = figure.subplots(1, len(HORIZONS) + 1)
    both = torch.stack([found["text"], found["pictures"]]).nanmean(0)
    for at, horizon in enumerate(HORIZONS):
        axes[at].imshow(both[..., at], vmin=0, vmax=1, aspect="auto")
        axes[at].set(title=f"alive at L = {horizon}", xlabel="head", ylabel="layer")
    axes[-1].plot(found["sparse"], label=[f"p = {p}" for p in SHARES])
    axes[-1].set(title="sparsity", xlabel="layer", ylim=(0, 1))
    axes[-1].legend()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
