"""Measure attention dilution: how much attention reaches what is asked about.

``python -m eval.dilution MODEL --domain text|pictures --lengths ... --method ...`` reads the
documents of ``eval.needle``, with the full cache and under every budget. It records the attention
of every decode step that predicts a token of an answer, in four shares: on the needle that is asked
about (*useful*), on the rest of the haystack (*distractors*), on questions and answers
(*dialogue*), and on the first four tokens, where language models put the attention that they do
not need. Two figures of DBTrimKV (arXiv 2605.09649) stand beside them: its lower bound on the
attention that does not reach the needle, and the share that it predicts from the full cache's
logits and the entries that eviction kept. The program writes JSON, a Markdown table and a figure.
A killed run continues when it is started again.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mmkv.engine.errors import InputError
from mmkv.engine.model.families.base import Turn
from mmkv.engine.runtime import Runtime
from mmkv.eval.dilution import report
from mmkv.eval.dilution.probe import probed_decode
from mmkv.eval.documents import Document
from mmkv.eval.domains import maker
from mmkv.eval.needle.__main__ import LENGTHS, length
from mmkv.eval.needle.tasks import Haystack, Needle
from mmkv.eval.quality.command import add_methods, add_options, comparison, finish, running
from mmkv.eval.quality.methods import Cell
from mmkv.eval.quality.run import ComparisonRuns, Reader, Record
from mmkv.training.measure.teacher_forced import spans

SINKS = 4  # first tokens of a document, counted apart
SIZES = {"text": (8, 1, 4), "pictures": (4, 2, 2), "video": (1, 2, 1)}  # keys, values, queries


class Prober(Reader):
    """Runs documents as :class:`mmkv.eval.quality.run.Reader` does and measures attention."""

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
    """Average over the steps of one document, of all heads and by head ``[L][H G]``.

    Args:
        probes: logits under a budget; full: of the same steps with the full cache.

    Returns:
        ``useful``, ``distractors``, ``dialogue``, ``first``: shares of attention, 1 in all;
        ``predicted``: useful share by Corollary 3.2; ``bound``: what Proposition 3.1 says is lost
        at least; ``kept_useful``, ``kept_others``: rho_U and rho_D of the corollary, which counts
        all that is not useful; ``kept_distractors``: the same of distractors alone; ``heads``,
        ``heads_predicted``: useful share.
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
    parser = argparse.ArgumentParser(prog="python -m eval.dilution", description=__doc__)
    add_options(parser, "dilution")
    add_methods(parser, ("32", "64", "128"))
    parser.add_argument("--domain", choices=list(SIZES), default="pictures")
    parser.add_argument("--lengths", nargs="+", type=length, metavar="TOKENS")
    parser.add_argument("--limit", type=int, default=8, help="documents of each length")
    args = parser.parse_args(arguments)
    args.lengths = args.lengths or LENGTHS[args.domain]
    with running(args, "mmkv.eval.dilution") as (path, journal):
        if args.limit < 1:
            raise InputError(f"--limit {args.limit} reads nothing; give at least 1")
        compared = comparison(args)
        sizes = ":".join(map(str, SIZES[args.domain]))
        read: list[tuple[int, Any]] = []
        with ComparisonRuns(compared, journal, args.workers, Prober) as runs:
            for tokens in sorted(set(args.lengths)):
                kind = Haystack.parse(f"needle:{args.domain}:{tokens}:{sizes}")
                read.append((tokens, runs.of(kind.name, args.limit)))
        page = report.summarise(
            args.domain, read, [method.name for method in compared.methods], args.budgets
        )
        finish(args, path, page, report)


if __name__ == "__main__":
    main()
