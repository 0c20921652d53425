"""Measure what weights in each form cost and gain: errors, perplexity, greedy tokens, time.

``python -m benchmarks.weight_forms DIR --data text:code.heldout.jsonl`` reads held-out pieces with
the exact weights (``auto``), in 8 and 4 bits, and once more with embedding and head in 4 bits, too.
Each piece is read whole, under full attention: perplexity, and KL to the exact weights. After the
beginning of each piece (of a dialogue up to its first answer, else half) the exact weights choose
64 greedy tokens; counted are those that a form would choose in their place, and those before its
first other choice. Pictures are read by the exact tower. Decode steps take turns. ``--shape`` takes
random weights in published sizes instead, for time alone. The figures go to
``benchmarks/results/weights-<name>.json``.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.bench.harness import ratios, take_turns
from benchmarks.bench.shapes import SHAPES, build_engine
from benchmarks.domains import held_out
from mmkv.engine.backends import kernels_for
from mmkv.engine.errors import InputError, MmkvError
from mmkv.engine.model.families.base import Turn
from mmkv.engine.model.product import INTEGERS, Matrix, WeightForm, plain
from mmkv.engine.model.weights import DecoderWeights, LayerWeights
from mmkv.engine.runtime import Runtime
from mmkv.engine.sequence import CachedSequence
from mmkv.eval.step import spread, synchronize
from mmkv.resources import bundled_model_name
from mmkv.training.data.labels import predicted
from mmkv.training.measure.record import RESULTS, write_results
from mmkv.training.measure.tables import pipe_table
from mmkv.training.measure.teacher_forced import FullCache, spans

EXACT, WHOLE = "auto", "int4, embedding and head too"
FORMS = (EXACT, "int8", "int4", WHOLE)
GREEDY = 64  # tokens


def seconds(sessions: Sequence[CachedSequence], tokens: int, clock: str) -> float:
    """Decode ``tokens`` greedily in copies of ``sessions``, all in a batch; seconds per step.

    Args:
        clock: ``wall``, or ``cpu`` for that of this process, which a loaded machine disturbs less.
    """
    now = {"wall": time.perf_counter, "cpu": time.process_time}[clock]
    engine = sessions[0].engine
    with contextlib.ExitStack() as stack:
        copies = [stack.enter_context(session.fork()) for session in sessions]
        first = [1] * len(copies)
        engine.decode_many(copies, first, 2)  # takes the copies' first pages; records a graph
        synchronize(engine.device)
        start = now()
        engine.decode_many(copies, first, tokens)
        synchronize(engine.device)
        return (now() - start) / tokens


def in_form(base: Runtime, form: str) -> Runtime:
    """Build an engine over the weights of ``base``, float32 or bfloat16 ones, in another form."""
    weights, cpu = base.decoder.weights, torch.device("cpu")
    embed = plain(weights.embed)
    head = embed if weights.head is weights.embed else plain(weights.head)
    layers = [_wide(layer) for layer in weights.layers]
    made = DecoderWeights(embed, layers, weights.norm.float(), head)
    name = "int4" if form == WHOLE else form
    holding = WeightForm.of(name, kernels_for(name), torch.float32, cpu, experts=False)
    if holding is not None:
        made.hold(holding)
    if form == WHOLE:
        made.embed = INTEGERS[4].of(embed)
        made.head = made.embed if head is embed else INTEGERS[4].of(head)
    return Runtime(base.family, base.spec, made, None, base.policy)


def _wide(layer: LayerWeights) -> LayerWeights:
    """Return a layer with its matrices as plain tensors, and all else in float32."""
    names = layer.matrix_names()
    parts: dict[str, Any] = {
        name: plain(part) if name in names else part.float()
        for name, part in vars(layer).items()
        if part is not None and name != "state_layer"
    }
    return replace(layer, **parts)


def errors(weights: DecoderWeights, exact: DecoderWeights) -> dict[str, float]:
    """Compute the relative error of the layers' matrices, and that of the embedding."""
    found = [
        _error(getattr(ours, name), getattr(theirs, name))
        for ours, theirs in zip(weights.layers, exact.layers, strict=True)
        for name in ours.matrix_names()
    ]
    embedding = _error(weights.embed, exact.embed)
    return {"median": statistics.median(found), "most": max(found), "embedding": embedding}


def _error(ours: Matrix, theirs: Matrix) -> float:
    a, b = (each.float() if isinstance(each, Tensor) else each.wide() for each in (ours, theirs))
    return float((a - b).norm() / b.norm())


@torch.inference_mode()
def compare(
    engines: dict[str, Runtime], model: str, source: str, pieces: int, longest: int
) -> dict[str, Any]:
    """Read held-out pieces with every engine.

    Args:
        model: where the tokenizer is; source: as ``benchmarks.quality`` takes it; longest: most
        tokens.

    Returns:
        form -> perplexity, KL in nats per token to the exact weights, share of the ``GREEDY``
        tokens that are the same, mean number of them before the first other one.
    """
    base, data = engines[EXACT], held_out(model, source, longest)
    nll, kl, same, before = ({form: 0.0 for form in engines} for _ in range(4))
    tokens = 0
    for index in range(pieces):
        example = data[index]
        inputs = {k: v for k, v in example.items() if k not in ("labels", "cuts")}
        labels = example["labels"].flatten().clone()
        labels[0] = -100
        turn = base.family.turn(inputs, 0, base.device)
        _, target = predicted(labels)
        tokens += target.numel()
        exact = _logs(base, turn, labels)
        first = spans(labels.tolist())[0][0]
        prompt = turn.part(0, first if first > 1 else labels.numel() // 2)
        chosen, _ = _greedy(base, prompt)
        for form, engine in engines.items():
            ours = exact if form == EXACT else _logs(engine, turn, labels)
            nll[form] += float(F.nll_loss(ours, target, reduction="sum"))
            kl[form] += float((exact.exp() * (exact - ours)).sum())
            mine = chosen if form == EXACT else _greedy(engine, prompt, chosen)[1]
            wrong = [one != other for one, other in zip(mine, chosen, strict=True)]
            same[form] += 1 - sum(wrong) / GREEDY
            before[form] += wrong.index(True) if any(wrong) else GREEDY
    return {
        form: {
            "perplexity": math.exp(nll[form] / tokens),
            "kl_per_token": kl[form] / tokens,
            "greedy_same": same[form] / pieces,
            "greedy_before": before[form] / pieces,
        }
        for form in engines
    } | {"pieces": pieces, "tokens": tokens}


def _logs(engine: Runtime, turn: Turn, labels: Tensor) -> Tensor:
    return torch.stack([F.log_softmax(x, -1) for x in FullCache.of(engine, turn, labels).logits()])


def _greedy(
    engine: Runtime, prompt: Turn, given: Sequence[int] | None = None
) -> tuple[list[int], list[int]]:
    """Decode ``GREEDY`` tokens after a prompt: its own choices, or after ``given`` ones.

    Returns:
        What was fed, and what would have been chosen in each place.
    """
    fed, chosen = list[int](), list[int]()
    with engine.session() as session:
        logits = session.extend(prompt)
        for index in range(GREEDY):
            chosen.append(int(logits.argmax()))
            fed.append(chosen[-1] if given is None else given[index])
            logits = session.decode(fed[-1])
    return fed, chosen


def speed(engines: dict[str, Runtime], context: int, rounds: int) -> dict[str, dict[str, Any]]:
    """Time decode steps of one sequence on one thread, in turns.

    Returns:
        form -> CPU milliseconds per token, and how many times int8's they are.
    """
    first = next(iter(engines.values()))
    below = min([first.spec.vocab_size, *first.family.placeholder.values()])
    ids = torch.randint(3, below, (1, context), generator=torch.Generator().manual_seed(0))
    sessions = {form: engine.session() for form, engine in engines.items()}
    for session in sessions.values():
        session.prefill({"input_ids": ids})
    runs = {form: partial(seconds, [one], 32, "cpu") for form, one in sessions.items()}
    times = take_turns(runs, rounds)
    for session in sessions.values():
        session.close()
    return {
        form: {
            "ms_per_token": spread([1e3 * each for each in times[form]]),
            "over_int8": ratios(times[form], times["int8"]),
            "decode_path": engine.reply_path,
        }
        for form, engine in engines.items()
    }


def markdown(found: dict[str, Any]) -> str:
    """Make the table: a line per form."""
    sources = list(found["sources"])
    head = ["form", "bytes", "layers off, median", "most", "embedding off"]
    head += [f"{name}: {what}" for name in sources for what in ("perplexity", "KL", "same of 64")]
    lines = []
    for form, row in found["forms"].items():
        off = [f"{100 * value:.2f} %" for value in row.get("errors", {}).values()] or ["", "", ""]
        cells = [form, f"{row['bytes']:,}", *off]
        for name in sources:
            read = found["sources"][name][form]
            cells += [f"{read['perplexity']:.3f}", f"{read['kl_per_token']:.4f}"]
            cells.append(f"{GREEDY * read['greedy_same']:.1f}")
        lines.append([*cells, f"{row['ms_per_token']['median']:.2f}"])
    return pipe_table([*head, "CPU ms per token"], lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all forms, print a table and write the result file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.weight_forms", description=__doc__)
    parser.add_argument("model", nargs="?", default=bundled_model_name())
    parser.add_argument("--shape", choices=SHAPES, help="random weights in these sizes instead")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument(
        "--data", action="append", default=[], help="as of benchmarks.quality; repeat"
    )
    parser.add_argument("--pieces", type=int, default=12, help="of each source")
    parser.add_argument("--max-length", type=int, default=512, help="tokens of a piece")
    parser.add_argument("--context", type=int, default=64, help="tokens before timed steps")
    parser.add_argument("--rounds", type=int, default=9, help="timed runs of each form")
    parser.add_argument("--name", default=None, help="of the result file (default: the folder's)")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the result file")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    try:
        if min(args.pieces, args.max_length, args.context, args.rounds) < 1:
            raise InputError("--pieces, --max-length, --context and --rounds take 1 or more")
        if not {EXACT, "int8"} <= {*args.forms}:
            raise InputError("--forms has to name auto and int8, which others are compared to")
        if args.shape is not None:
            base = build_engine(SHAPES[args.shape], "full", device="cpu")
        else:
            base = Runtime.from_pretrained(args.model, policy="full", device="cpu")
        engines = {form: in_form(base, form) for form in args.forms}
        del base
        exact = engines[EXACT].decoder.weights
        forms = {
            form: {"bytes": engine.decoder.weights.nbytes()}
            | ({} if args.shape else {"errors": errors(engine.decoder.weights, exact)})
            for form, engine in engines.items()
        }
        sources = {
            source: compare(engines, args.model, source, args.pieces, args.max_length)
            for source in args.data
        }
        for form, timed in speed(engines, args.context, args.rounds).items():
            forms[form] |= timed
    except MmkvError as error:
        parser.error(str(error))
    numbers = exact.numbers()
    found = {"numbers": numbers, "forms": forms, "sources": sources}
    settings = {name: value for name, value in vars(args).items() if name != "output"}
    name = args.name or args.shape or Path(args.model).resolve().name
    path = write_results(args.output / f"weights-{name}.json", settings, found)
    print(markdown(found))
    print(f"in {path}")


if __name__ == "__main__":
    main()
