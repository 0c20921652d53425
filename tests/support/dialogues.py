"""One conversation led twice, by an engine and by the oracle, on small random models."""

from __future__ import annotations

import math
import tempfile
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from engine.sequence import CachedSequence
from tests.support.factories import CHECKPOINTS, Piece, make_turn
from tests.support.model_configs import Checkpoint
from tests.support.oracle import Oracle, Retained
from tests.support.sessions import save_checkpoint


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


def prompt(model: str, *pieces: Piece, seed: int = 0) -> dict[str, Tensor]:
    """One turn; models that do not see get its text only."""
    family = MODELS[model].model_type
    named = model if model in CHECKPOINTS else family
    seeing = "vl" in family or "llava" in family
    return make_turn(named, [p for p in pieces if seeing or isinstance(p, int)], seed)


def prefill_both(
    session: CachedSequence, oracle: Oracle, inputs: dict[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """Logits of engine and oracle, whose retained sets agree after every chunk."""
    kept: list[Retained] = []
    ours = session.prefill(inputs, lambda done, total: kept.append(session.retained()))
    assert len(kept) == math.ceil(inputs["input_ids"].shape[1] / oracle.prefill_chunk)
    return ours, oracle.prefill(inputs, kept)
