"""Compare the entries that ``age=released`` keeps with those that trimkv 0.1.5's own caches keep.

``python -m benchmarks.trimkv_sets MODEL --gates FOLDER`` reads a prompt (the first tokens of this
project's LICENSE, in one chunk) and decodes steps with the engine. trimkv's cache gets the same
log_beta, pass by pass, and evicts by itself; after each pass the entries of both are counted.
``--bias`` adds to every gate's bias, towards saturated gates; ``--double`` evaluates trimkv's
formula in float64, to tell its rounding from its rule.

trimkv 0.1.5 goes into an environment of its own, beside what mmkv needs (``pip install einops
triton; pip install --no-deps trimkv==0.1.5``), and this program is run there, with this repository
on PYTHONPATH. Only the package's caches are imported, since its models want FlashAttention and
transformers 4.57.1. On a CPU its Triton kernel that appends to a flat cache, which asks for CUDA,
is replaced by torch. Scores and selection are the package's own code.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import sys
import types
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from mmkv.engine.model.gates import load_gates
from mmkv.engine.model.gates.module import Gates, tied_gates
from mmkv.engine.model.spec import DecoderSpec
from mmkv.engine.policies import Budget, make_policy
from mmkv.engine.runtime import Runtime
from mmkv.training.measure.record import ROOT

Entries = set[tuple[int, int, int]]  # layer, head, position
AGES = ("released", "paper")


def trimkv_caches(double: bool = False) -> Any:
    """Import trimkv's caches, without the rest of the package; ``double``: score in float64."""
    found = importlib.util.find_spec("trimkv")
    if found is None or found.submodule_search_locations is None:
        raise SystemExit(
            "trimkv is not installed; install trimkv==0.1.5 into an environment of its own and run "
            "this program there"
        )
    package = types.ModuleType("trimkv")
    package.__path__ = list(found.submodule_search_locations)
    sys.modules["trimkv"] = package
    caches = importlib.import_module("trimkv.cache_utils")
    if not torch.cuda.is_available():
        caches.update_flatten_view_triton = _append  # type: ignore[attr-defined]
    if double:
        single = caches.compute_log_G
        caches.compute_log_G = lambda rate, *rest, **named: single(rate.double(), *rest, **named)  # type: ignore[attr-defined]
    return caches


def _append(flat: Tensor, new: Tensor, lengths: Tensor, starts: Tensor) -> Tensor:
    """Append ``new [1, H, T, D]`` to the heads that lie one after the other in ``flat [N, D]``."""
    heads = flat.split(lengths.tolist())
    return torch.cat([part for pair in zip(heads, new[0], strict=True) for part in pair])


def run_engine(engine: Runtime, ids: Tensor, steps: int) -> tuple[Tensor, list[Entries]]:
    """Return log_beta ``[L, H, T]`` of all tokens, and what is kept after each pass."""
    layers, heads = engine.spec.entry_layers, engine.spec.num_kv_heads
    rates: list[list[Tensor]] = [[] for _ in range(layers)]

    def note(layer: int, hidden: Tensor) -> None:
        rates[layer].append(engine.gates(layer, hidden).reshape(-1, heads))

    engine.decoder.on_gate_input = note
    kept = []
    with engine.session() as session:
        logits = session.prefill({"input_ids": ids[None]})
        kept.append(_entries(session.retained()))
        for _ in range(steps):
            logits = session.decode(int(logits.argmax()))
            kept.append(_entries(session.retained()))
    return torch.stack([torch.cat(parts).T for parts in rates]), kept


def run_trimkv(
    caches: Any, policy: str, budget: int, lookahead: int, rates: Tensor, prompt: int
) -> list[Entries]:
    """Return what trimkv's cache keeps after each pass over tokens of these ``rates``."""
    made = caches.DynamicBudgetTrimKVCache if policy == "dbtrimkv" else caches.TrimKVCache
    cache = made(memory_size=budget, lookahead_steps=lookahead, device="cpu")
    layers, heads, tokens = rates.shape
    kept, start = [], 0
    for stop in range(prompt, tokens + 1):
        for layer in range(layers):
            content = torch.zeros(1, heads, stop - start, 1)
            given = rates[layer, None, :, start:stop].contiguous()
            where = {"cache_position": torch.arange(start, stop), "retention_weights": given}
            cache.update(content, content, layer, where)
        cache.compress()
        start = stop
        rows = []
        for layer, positions in enumerate(cache.kv_positions):
            if policy == "dbtrimkv":
                rows.append(positions.flatten().split(cache.head_lens[layer].tolist()))
            else:
                rows.append(tuple(positions[0]))
        kept.append(_entries(rows))
    return kept


def _entries(rows: Any) -> Entries:
    return {
        (layer, head, int(position))
        for layer, heads in enumerate(rows)
        for head, row in enumerate(heads)
        for position in row
    }


def biased(gates: Gates, by: float, spec: DecoderSpec) -> Gates:
    """Return tied gates with a bias that is larger by ``by``."""
    bias = gates.tensors["readout.bias"] + by
    return tied_gates(gates.tensors | {"readout.bias": bias}, spec, gates.info)


def main(argv: list[str] | None = None) -> None:
    """Print a JSON line for each age: how many passes are equal, and the most that differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="folder of a text model, as benchmarks.smollm2 makes it")
    parser.add_argument("--gates", default="random")
    parser.add_argument("--policy", choices=("dbtrimkv", "trimkv"), default="dbtrimkv")
    parser.add_argument("--lookahead", type=int, default=2)
    parser.add_argument("--budget", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=512, help="length of the prompt")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--bias", type=float, default=0.0)
    parser.add_argument("--double", action="store_true")
    given = parser.parse_args(argv)
    caches = trimkv_caches(given.double)
    base = Runtime.from_pretrained(given.model, policy="full", device="cpu", dtype="float32")
    gates = load_gates(given.gates, base.spec)
    if given.bias:
        gates = biased(gates, given.bias, base.spec)
    text = (ROOT / "LICENSE").read_text()
    ids = AutoTokenizer.from_pretrained(given.model)(text, return_tensors="pt").input_ids
    ids = ids[0, : given.tokens]
    for age in AGES:
        engine = Runtime(
            base.family,
            base.spec,
            base.decoder.weights,
            gates,
            make_policy(f"{given.policy}:age={age}", given.lookahead),
            Budget.of(given.budget),
            prefill_chunk=ids.numel(),
        )
        rates, ours = run_engine(engine, ids, given.steps)
        lookahead = given.lookahead if given.policy == "dbtrimkv" else 1
        theirs = run_trimkv(caches, given.policy, given.budget, lookahead, rates, ids.numel())
        differ = [len(a - b) for a, b in zip(ours, theirs, strict=True)]
        found = {
            "age": age,
            "passes": len(differ),
            "equal_passes": differ.count(0),
            "kept": len(ours[-1]),
            "most_that_differ": max(differ),
            "largest_log_beta": float(rates.max()),
        }
        print(json.dumps(vars(given) | found), flush=True)


if __name__ == "__main__":
    main()
