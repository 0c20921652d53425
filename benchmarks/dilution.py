"""Measure attention dilution: how much attention reaches what is asked about.

``python -m benchmarks.dilution MODEL --domain text|pictures --lengths ... --method ...`` reads the
documents of ``benchmarks.needle``, with the full cache and under every budget. It records the
attention of every decode step that predicts a token of an answer, in four shares: on the needle
that is asked about (*useful*), on the rest of the haystack (*distractors*), on questions and
answers (*dialogue*), and on the first four tokens, where language models put the attention that
they do not need. Two figures of DBTrimKV (arXiv 2605.09649) stand beside them: its lower bound on
the attention that does not reach the needle, and the share that it predicts from the full cache's
logits and the entries that eviction kept. The program writes JSON, a Markdown table and a figure. A
killed run continues when it is started again.

Attention is recorded beside the engine's own computation: the engine computes the step's attention
as always. The probe reads the same keys from the pages and computes the logits in float64.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.documents import Document
from benchmarks.domains import maker
from benchmarks.needle import LENGTHS
from benchmarks.needle import length as length_of
from benchmarks.needle_tasks import Haystack, Needle
from benchmarks.quality.methods import Cell
from benchmarks.quality.report import interval
from benchmarks.quality.run import (
    ComparisonRuns,
    Reader,
    Record,
    add_methods,
    add_options,
    comparison,
    finish,
    running,
)
from mmkv.engine.backends.torch.step import DecodeStep
from mmkv.engine.errors import InputError
from mmkv.engine.model.families.base import Turn
from mmkv.engine.runtime import Runtime
from mmkv.engine.sequence import CachedSequence
from mmkv.eval.measure.stats import mean, paired
from mmkv.training.measure.tables import pipe_table
from mmkv.training.measure.teacher_forced import spans


class _ProbedStep(DecodeStep):
    """A decode step of one sequence that appends its attention logits, layer by layer."""

    seq: int
    attended: list[Tensor]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = super().attend(layer, query, key, value)
        spec, pool = self.spec, self.cache.pool
        entries = self.cache.entries(self.seq)
        mine = entries.row // spec.num_kv_heads == layer
        slot, head = entries.slot[mine], entries.row[mine] % spec.num_kv_heads
        position = pool.position.view(-1)[slot].long()
        keys = pool.keys.flatten(0, 1)[slot].double()
        grouped = query[0].view(spec.num_kv_heads, spec.group, spec.head_dim).double()
        products = torch.einsum("ed,egd->eg", keys, grouped[head]) * spec.head_dim**-0.5
        shape = (spec.num_kv_heads, spec.group, self.seen)
        logits = torch.full(shape, -torch.inf, dtype=products.dtype, device=products.device)
        logits[head, :, position] = products
        self.attended.append(logits)
        return out


@contextmanager
def _probing(session: CachedSequence, attended: list[Tensor]) -> Iterator[None]:
    """Decode steps of this session are probed; the native step, which cannot be, is put aside."""

    def step(*arguments: Any) -> DecodeStep:
        made = _ProbedStep(*arguments)
        made.seq, made.attended = session.seq, attended
        return made

    engine = session.engine
    cpu, reference = engine.backends.cpu, engine.backends.torch
    native, plain = cpu.decoder, reference.make_step
    cpu.decoder, reference.make_step = None, step
    try:
        yield
    finally:
        cpu.decoder, reference.make_step = native, plain


def probed_decode(session: CachedSequence, token: int) -> tuple[Tensor, Tensor]:
    """Append a token as :meth:`CachedSequence.decode` does.

    Returns:
        logits ``[vocab]``, and the attention logits float64 ``[L, H, G, T]``, T the tokens seen:
        q k / sqrt(d) of KV head and query head in its group, -inf where the entry is gone (nothing
        is in the cache); both on the CPU.
    """
    attended: list[Tensor] = []
    with _probing(session, attended):
        logits = session.decode(token)
    return logits.cpu(), torch.stack(attended).cpu()


SINKS = 4  # first tokens of a document, counted apart
SIZES = {"text": (8, 1, 4), "pictures": (4, 2, 2), "video": (1, 2, 1)}  # keys, values, queries


class Prober(Reader):
    """Runs documents as :class:`benchmarks.quality.run.Reader` does and measures attention."""

    @torch.inference_mode()
    def read(
        self, source: str, todo: Mapping[int, Sequence[Cell]]
    ) -> Iterator[tuple[int, list[Record]]]:
        """Run documents through their cells; what :func:`measure` computes for each."""
        if source not in self._data:
            self._data[source] = maker(self.comparison.model, source)
        whole = Cell("full", None, None, None)
        for index, cells in todo.items():
            made = self._data[source](index)
            inputs = {k: v for k, v in made.example.items() if k not in ("labels", "cuts")}
            turn = self.base.family.turn(inputs, 0, self.base.device)
            full, right = probe(self._engine(whole), turn, made, None)
            found = []
            for cell in cells:
                if cell == whole:
                    probes, hits = full, right
                else:
                    budget = cell.budget_for(turn.token_ids.numel()).value
                    probes, hits = probe(self._engine(cell), turn, made, budget)
                found.append({"right": hits, **measure(probes, full, made.notes)})
            yield index, found


def probe(
    engine: Runtime, turn: Turn, made: Document, budget: float | None
) -> tuple[list[list[Tensor]], list[bool]]:
    """Read a document with its true answers.

    Returns:
        per answer the attention logits ``[L, H, G, T]`` of every step that predicts one of its
        tokens, and whether each token was the most likely one.
    """
    labels, cuts = made.example["labels"][0], list(made.example["cuts"])
    found, right, done = [], [], 0
    with engine.session(budget) as session:
        for start, stop in spans(labels.tolist()):
            # The last token before the answer is decoded, because it predicts the answer's first
            # token.
            for part in [*(cut for cut in cuts if done < cut < start - 1), start - 1]:
                session.extend(turn.part(done, part))
                done = part
            steps, hit = [], True
            for token in turn.token_ids[start - 1 : stop - 1].tolist():
                logits, attended = probed_decode(session, token)
                steps.append(attended)
                done += 1
                hit &= int(logits.argmax()) == int(labels[done])
            session.decode(int(turn.token_ids[done]))
            done += 1
            found.append(steps)
            right.append(hit)
    return found, right


def measure(
    probes: list[list[Tensor]], full: list[list[Tensor]], notes: Sequence[Needle]
) -> Record:
    """Average shares of attention over a document's steps: of all heads, and by head ``[L][H G]``.

    Args:
        probes: by answer and step the logits under a budget; full: the same with the full cache.
        notes: by answer the needle that it is about.

    Returns:
        ``useful``, ``distractors``, ``dialogue``, ``first`` (the first ``SINKS`` tokens): shares of
        attention, 1 in all; ``predicted``: useful share by Corollary 3.2 of DBTrimKV (arXiv
        2605.09649); ``bound``: what Proposition 3.1 says is lost at least; ``kept_useful``,
        ``kept_others``: rho_U and rho_D of the corollary, which counts all that is not useful;
        ``kept_distractors``: the same of distractors alone; ``heads``, ``heads_predicted``: useful
        share.
    """
    sums: dict[str, Tensor] = {}
    steps = 0
    for note, ours, theirs in zip(notes, probes, full, strict=True):
        for logits, whole in zip(ours, theirs, strict=True):
            for name, value in _step(logits, whole, note).items():
                sums[name] = sums.get(name, torch.zeros(())) + value
            steps += 1
    means = {name: (value / steps).flatten(1) for name, value in sums.items()}
    record: Record = {name: round(float(value.mean()), 6) for name, value in means.items()}
    record["heads"] = [[round(x, 5) for x in row] for row in means["useful"].tolist()]
    record["heads_predicted"] = [[round(x, 5) for x in row] for row in means["predicted"].tolist()]
    return record


def _step(logits: Tensor, whole: Tensor, note: Needle) -> dict[str, Tensor]:
    """Return the values ``[L, H, G]`` of one step.

    Rows that hold nothing of the needle have useful share 0.
    """
    useful = torch.zeros(logits.shape[-1], dtype=torch.bool)
    useful[slice(*note.where)] = True
    haystack = torch.zeros_like(useful)
    haystack[slice(*note.haystack)] = True
    first = torch.zeros_like(useful)
    first[:SINKS] = True
    first &= ~useful
    distractors = haystack & ~useful & ~first
    share, before = logits.softmax(-1), whole.softmax(-1)
    kept = before * logits.isfinite()  # r in {0, 1} of the corollary
    return {
        "useful": share[..., useful].sum(-1),
        "distractors": share[..., distractors].sum(-1),
        "dialogue": share[..., ~haystack & ~first].sum(-1),
        "first": share[..., first].sum(-1),
        "predicted": kept[..., useful].sum(-1) / kept.sum(-1),
        "bound": dilution_bound(logits, useful),
        "kept_useful": kept[..., useful].sum(-1) / before[..., useful].sum(-1),
        "kept_others": kept[..., ~useful].sum(-1) / before[..., ~useful].sum(-1),
        "kept_distractors": kept[..., distractors].sum(-1) / before[..., distractors].sum(-1),
    }


def dilution_bound(logits: Tensor, useful: Tensor) -> Tensor:
    """Compute the largest lower bound of Proposition 3.1 over all Delta >= 0.

    Args:
        logits: ``[..., T]``, -inf where nothing is cached; useful: bool ``[T]``, the set U.

    Returns:
        ``[...]``: share of attention that cannot reach U; 1 where nothing of U is cached.
    """
    inside, outside = logits[..., useful], logits[..., ~useful]
    held = inside.isfinite().sum(-1)
    best = inside.max(-1).values if inside.shape[-1] else torch.full_like(held, -torch.inf)
    ordered = outside.sort(-1, descending=True).values
    count = torch.arange(1, ordered.shape[-1] + 1, dtype=ordered.dtype)
    # D' of k members needs Delta = best - (k-th largest), and Delta is never below 0.
    gap = (ordered - best[..., None]).clamp(max=0)
    ratio = (gap.exp() * count).nan_to_num(0).max(-1).values / held
    return torch.where(held > 0, ratio / (1 + ratio), 1.0)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dilution", description=__doc__)
    add_options(parser, "dilution")
    add_methods(parser, ("32", "64", "128"))
    parser.add_argument("--domain", choices=list(SIZES), default="pictures")
    parser.add_argument("--lengths", nargs="+", type=length_of, metavar="TOKENS")
    parser.add_argument("--limit", type=int, default=8, help="documents of each length")
    args = parser.parse_args(arguments)
    args.lengths = args.lengths or LENGTHS[args.domain]
    with running(args, "benchmarks.dilution") as (path, journal):
        if args.limit < 1:
            raise InputError(f"--limit {args.limit} reads nothing; give at least 1")
        compared = comparison(args)
        sizes = ":".join(map(str, SIZES[args.domain]))
        read: list[tuple[int, Any]] = []
        with ComparisonRuns(compared, journal, args.workers, Prober) as runs:
            for tokens in sorted(set(args.lengths)):
                kind = Haystack.parse(f"needle:{args.domain}:{tokens}:{sizes}")
                read.append((tokens, runs.of(kind.name, args.limit)))
        page = summarise(
            args.domain, read, [method.name for method in compared.methods], args.budgets
        )
        finish(args, path, page, markdown, draw)


Raw = Mapping[str, Sequence[Sequence[Record]]]
_SHARES = (
    "useful",
    "distractors",
    "dialogue",
    "first",
    "bound",
    "predicted",
    "kept_useful",
    "kept_others",
    "kept_distractors",
)
_COLUMNS = (
    "haystack",
    "cache",
    "answers right",
    "useful",
    "distractors",
    "dialogue",
    "first tokens",
    "lost at least",
    "predicted useful",
    "rho_U",
    "rho_D",
    "rho_D of distractors",
    "useful / (useful + distractors)",
    "useful, looking heads",
)
_LOOKING = 10  # per cent of the heads that count as looking at the needle


def summarise(
    domain: str, read: Sequence[tuple[int, Raw]], methods: Sequence[str], budgets: Sequence[str]
) -> dict[str, Any]:
    """Compute everything the result file holds.

    Args:
        read: per length what :meth:`benchmarks.quality.run.ComparisonRuns.of` returned.

    Returns:
        ``lengths``: per length and cell the means of ``measure`` with intervals
        over documents, ``looking``: useful share in the heads that look at the needle most with the
        full cache in all *other* documents (chosen on the same ones they would regress),
        ``difference``: useful share minus the full cache's, ``difference_looking`` likewise, and
        ``inside``, ``difference_inside`` of useful / (useful + distractors); ``heads``: measured
        and predicted useful share of every head, documents and lengths together.
    """
    looking = _looking(read)
    cells = ["full", *(f"{method} at {budget}" for budget in budgets for method in methods)]
    lengths = {
        str(length): {name: _cell(raw[name], raw["full"], looking[length]) for name in cells}
        for length, raw in read
    }
    heads = {}
    for name in cells:
        measured, predicted = (
            np.mean([_heads(raw[name], key) for _, raw in read], 0)
            for key in ("heads", "heads_predicted")
        )
        heads[name] = {
            "measured": measured.round(5).tolist(),
            "predicted": predicted.round(5).tolist(),
            "correlation": _correlation(measured, predicted),
        }
    return {
        "domain": domain,
        "documents": len(read[0][1]["full"][0]),
        "methods": list(methods),
        "budgets": list(budgets),
        "lengths": lengths,
        "heads": heads,
    }


def _looking(read: Sequence[tuple[int, Raw]]) -> dict[int, list[np.ndarray]]:
    """Return per length and document a mask ``[L, H, G]``: the heads that look most in all the
    others.
    """
    shares = {length: [np.array(r["heads"]) for r in raw["full"][0]] for length, raw in read}
    total = sum(share for part in shares.values() for share in part)
    return {
        length: [rest >= np.percentile(rest, 100 - _LOOKING) for rest in (total - x for x in part)]
        for length, part in shares.items()
    }


def _correlation(one: np.ndarray, two: np.ndarray) -> float | None:
    """Compute the Pearson correlation.

    None where one of them does not vary (nothing useful was kept anywhere).
    """
    if not one.std() or not two.std():
        return None
    return float(np.corrcoef(one.flat, two.flat)[0, 1])


def _heads(runs: Sequence[Sequence[Record]], name: str) -> np.ndarray:
    return np.mean([record[name] for run in runs for record in run], 0)


def _cell(
    runs: Sequence[Sequence[Record]], full: Sequence[Sequence[Record]], looking: list[np.ndarray]
) -> dict[str, Any]:
    def by_document(runs: Sequence[Sequence[Record]], name: str) -> list[float]:
        return [float(np.mean([r[name] for r in rows])) for rows in zip(*runs, strict=True)]

    def focus(runs: Sequence[Sequence[Record]]) -> list[float]:
        return [
            float(np.mean([np.array(r["heads"])[mask].mean() for r in rows]))
            for mask, rows in zip(looking, zip(*runs, strict=True), strict=True)
        ]

    def inside(runs: Sequence[Sequence[Record]]) -> list[float]:
        pairs = zip(by_document(runs, "useful"), by_document(runs, "distractors"), strict=True)
        return [useful / max(useful + others, 1e-9) for useful, others in pairs]

    once = [1.0] * len(runs[0])
    hits = [float(np.mean([sum(r["right"]) for r in rows])) for rows in zip(*runs, strict=True)]
    asked = [len(record["right"]) for record in runs[0]]
    return {
        "accuracy": asdict(mean(hits, asked)),
        **{name: asdict(mean(by_document(runs, name), once)) for name in _SHARES},
        "looking": asdict(mean(focus(runs), once)),
        "inside": asdict(mean(inside(runs), once)),
        "difference_inside": asdict(paired(inside(runs), inside(full), once)),
        "difference": asdict(
            paired(by_document(runs, "useful"), by_document(full, "useful"), once)
        ),
        "difference_looking": asdict(paired(focus(runs), focus(full), once)),
    }


def markdown(page: Mapping[str, Any]) -> str:
    """Tabulate the shares of attention by length and cell, and what theory says beside them."""
    lines = [
        f"### Attention dilution in {page['domain']}: {page['documents']} documents each length\n",
        "Mean share of attention of the steps that predict an answer, over all layers and heads. "
        "*Lost at least*: Proposition 3.1. *Predicted*: Corollary 3.2, from the full cache's "
        "logits and the entries kept. *Looking heads*: the tenth of the heads with the largest "
        "useful share in the full cache over all other documents.\n",
    ]
    table: list[list[str]] = []
    for length, cells in page["lengths"].items():
        for name, cell in cells.items():
            table.append([length, name, f"{cell['accuracy']['value']:.3f}"])
            table[-1].append(interval(cell["useful"]))
            table[-1] += [f"{cell[key]['value']:.3f}" for key in _SHARES[1:]]
            table[-1] += [interval(cell["inside"]), interval(cell["looking"])]
    lines += [
        pipe_table(_COLUMNS, table),
        "",
        "Agreement of measured and predicted useful share over heads (Pearson): "
        + ", ".join(
            f"{name} {held['correlation']:.3f}"
            for name, held in page["heads"].items()
            if name != "full" and held["correlation"] is not None
        )
        + ".",
        "",
        "Paired differences to the full cache (sign-flip tests over documents):\n",
    ]
    table = []
    for length, cells in page["lengths"].items():
        for name, cell in cells.items():
            if name != "full":
                names = ("difference", "difference_inside", "difference_looking")
                table.append([length, name])
                for test in (cell[key] for key in names):
                    table[-1] += [interval(test, sign=True), f"{test['p']:.4f}"]
    columns = ["haystack", "cache"]
    for measured in ("useful", "useful / (useful + distractors)", "useful, looking heads"):
        columns += [measured, "p"]
    lines.append(pipe_table(columns, table))
    return "\n".join(lines) + "\n"


def draw(page: Mapping[str, Any], path: Path) -> None:
    """Draw the useful share by length, and the measured share against the predicted one."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 4.2), layout="constrained")
    panels = figure.subplots(1, 3)
    lengths = list(page["lengths"])
    x = [int(length) for length in lengths]
    for panel, key, title in zip(
        panels, ("useful", "looking"), ("all heads", "looking heads"), strict=False
    ):
        for name in page["lengths"][lengths[0]]:
            cells = [page["lengths"][length][name][key] for length in lengths]
            style = {"color": "black", "linestyle": "--"} if name == "full" else {}
            panel.plot(x, [c["value"] for c in cells], marker="o", label=name, **style)
            panel.fill_between(x, [c["low"] for c in cells], [c["high"] for c in cells], alpha=0.1)
        panel.set(
            title=f"attention on the needle, {title}",
            xlabel="haystack, tokens",
            xscale="log",
            ylim=(0, None),
        )
        panel.set_xticks(x, lengths)
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("share of attention")
    panels[0].legend(fontsize=7)
    top = 0.0
    for name, held in page["heads"].items():
        if name != "full":
            predicted, measured = np.array(held["predicted"]), np.array(held["measured"])
            panels[2].plot(predicted.flat, measured.flat, ".", markersize=4, label=name)
            top = max(top, predicted.max(), measured.max())
    panels[2].plot([0, top], [0, top], color="0.5", linewidth=0.8)
    panels[2].set(
        title="useful share of every head", xlabel="predicted by Corollary 3.2", ylabel="measured"
    )
    panels[2].grid(alpha=0.3)
    panels[2].legend(fontsize=7)
    figure.suptitle(f"Attention dilution in {page['domain']}")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
