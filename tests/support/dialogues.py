"""Dialogues on the engine and the oracle side by side, and what the engine stores of them."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from mmkv.engine.errors import DEFAULT_LOOKAHEAD
from mmkv.engine.model.gates import Gates, WriteGates, load_gates, load_write_gates
from mmkv.engine.policies import PRESETS, make_policy
from mmkv.engine.policies.preset import PolicyText
from mmkv.engine.runtime import Runtime
from mmkv.engine.sequence import CachedSequence
from tests.support.factories import CHECKPOINTS, GLM, QWEN_VL, Piece, make_turn
from tests.support.model_configs import Checkpoint
from tests.support.oracle import Admitted, Oracle, Pruned, Retained
from tests.support.sessions import save_checkpoint


class Notes:
    """Keys and values as an engine's pool stores them, layer after layer, since they were shown."""

    def __init__(self, engine: Runtime) -> None:
        self.made: list[tuple[Tensor, Tensor]] = []
        store = engine.cache.pool.store

        def noted(slots: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            self.made.append(store(slots, key, value))
            return self.made[-1]

        setattr(engine.cache.pool, "store", noted)  # noqa: B010 - a method of this pool alone

    def show_prefill(self, oracle: Oracle) -> None:
        """Hand a prefill's entries ``[H, C, D]`` over, of all its chunks."""
        assert oracle.quantiser is not None
        oracle.quantiser.theirs, self.made = self.made, []

    def show_step(self, oracles: Sequence[Oracle]) -> None:
        """Hand the entries of a decode step over, ``[B H, D]`` of a batch."""
        for index, oracle in enumerate(oracles):
            assert oracle.quantiser is not None
            oracle.quantiser.theirs = [
                (key.chunk(len(oracles))[index][:, None], value.chunk(len(oracles))[index][:, None])
                for key, value in self.made
            ]
        self.made = []


# One conversation led twice, by an engine and by the oracle, on small random models.


def _vl(group: int, kv_heads: int, head_dim: int) -> Checkpoint:
    return Checkpoint("qwen3_vl", group * kv_heads, kv_heads, head_dim, layers=2)


def _text(group: int, kv_heads: int, head_dim: int) -> Checkpoint:
    return Checkpoint("llama", group * kv_heads, kv_heads, head_dim, layers=3)


# Named by query heads per KV head; the others are those of test_parity.
MODELS = CHECKPOINTS | {
    "vl1": _vl(1, 3, 32),
    "vl3": _vl(3, 2, 32),
    "vl4": _vl(4, 1, 64),
    "text1": _text(1, 3, 32),
    "text3": _text(3, 2, 32),
    "text4": _text(4, 1, 64),
    "llava3": Checkpoint("llava", 6, 2, 32, layers=2, text_type="llama"),
}
_homes: list[tempfile.TemporaryDirectory[str]] = []


@cache
def folder_of(model: str) -> Path:
    """A checkpoint folder, made once; engine and oracle each load their own copy."""
    home = tempfile.TemporaryDirectory(prefix="mmkv-oracle-")
    _homes.append(home)
    return save_checkpoint(MODELS[model], Path(home.name))


@cache
def reference_model(folder: Path) -> PreTrainedModel:
    """The oracle's own copy of the model, loaded by transformers."""
    seeing = "vision_config" in (folder / "config.json").read_text()
    kind = AutoModelForImageTextToText if seeing else AutoModelForCausalLM
    return kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@cache
def loaded(folder: Path) -> Runtime:
    """An engine whose weights others take over: to load them takes longer than a short dialogue."""
    return Runtime.from_pretrained(folder, policy="full", device="cpu", dtype="float32", kv="auto")


def engine_of(
    folder: Path,
    text: str,
    budget: float,
    lookahead: float = DEFAULT_LOOKAHEAD,
    gates: Path | str = "random",
    **options: Any,
) -> Runtime:
    """A float32 engine under a policy, as a command line names it, with the gates that it reads."""
    base, policy = loaded(folder), make_policy(text, lookahead)
    options = {"kv": "auto"} | options
    held: Gates | WriteGates | None = None
    if policy.gates:
        load = load_write_gates if policy.gates == "write" else load_gates
        held = load(gates, base.spec)
    return Runtime(base.family, base.spec, base.decoder.weights, held, policy, budget, **options)


def oracle_of(engine: Runtime, folder: Path, text: str, budget: float, **settings: Any) -> Oracle:
    """The reference of a preset with its parameters, as a command line names it.

    Gates are the engine's public functions.
    """
    asked = PolicyText.parse(text)
    known = PRESETS[asked.name].parameters
    settings |= {key: known[key].parse(value) for key, value in asked.given.items()}
    hf, policy = reference_model(folder), engine.policy
    if policy.pruner is not None:
        return Pruned(hf, asked.name, **settings)
    gate = engine.gates if policy.scoring.needs.gates and policy.evicts else None
    if engine.write_gates is not None:
        return Admitted(hf, gate, engine.write_gates.log_g, asked.name, budget, **settings)
    return Oracle(hf, gate, asked.name, budget, **settings)


def prompt(model: str, *pieces: Piece, seed: int = 0) -> dict[str, Tensor]:
    """One turn; models that do not see get its text only."""
    family = MODELS[model].model_type
    named = model if model in CHECKPOINTS else family
    seeing = any(part in family for part in ("vl", "llava", "idefics3", "mistral3", "photos"))
    seeing = seeing or family in ("gemma3", *GLM)
    seeing = seeing or family in QWEN_VL
    return make_turn(named, [p for p in pieces if seeing or isinstance(p, int)], seed)


def prefill_both(
    session: CachedSequence, oracle: Oracle, inputs: dict[str, Tensor], notes: Notes | None = None
) -> tuple[Tensor, Tensor]:
    """Logits of engine and oracle, whose retained sets agree after every chunk.

    ``notes``: of an engine that rounds its entries.
    """
    kept: list[Retained] = []
    ours = session.prefill(inputs, lambda done, total: kept.append(session.retained()))
    if notes is not None:
        notes.show_prefill(oracle)
    assert len(kept) == len(oracle.chunks(inputs["input_ids"][0]))
    return ours, oracle.prefill(inputs, kept)
