"""Helpers of the session tests: small engines, two prompts with pictures, comparisons."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from mmkv.engine.backends import kernels_for
from mmkv.engine.config import EngineConfig
from mmkv.engine.model.families import loading
from mmkv.engine.model.families.base import Family
from mmkv.engine.model.spec import DecoderSpec
from mmkv.engine.model.weights import DecoderWeights
from mmkv.engine.runtime import Runtime
from mmkv.engine.sequence import CachedSequence
from mmkv.engine.session_file import _digest
from tests.support.factories import Piece, make_model, make_turn
from tests.support.model_configs import TEXT_IDS, Checkpoint


def qwen3_vl(layers: int = 2, seed: int = 0) -> Checkpoint:
    """Return a small Qwen3-VL with two KV heads and two query heads each."""
    return Checkpoint("qwen3_vl", 4, 2, 32, layers=layers, seed=seed)


SMALL_CONTEXT = Checkpoint("llama", 4, 2, 32, text={"max_position_embeddings": 64})


def save_checkpoint(spec: Checkpoint, folder: Path) -> Path:
    """Write a random model as a transformers checkpoint folder."""
    make_model(spec).save_pretrained(folder)
    return folder


def turn(*pieces: Piece, seed: int = 0) -> dict[str, Tensor]:
    """Return a turn for Qwen3-VL; see :func:`tests.support.factories.make_turn`."""
    return make_turn("qwen3_vl", pieces, seed)


def text_ids(count: int, seed: int) -> Tensor:
    """Return ``[count]`` random text tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, TEXT_IDS, (count,), generator=generator)


PICTURES = turn(6, ("image", 16, 24), 4, seed=1)
LATER = turn(3, ("image", 24, 16), 2, seed=2)


def load(folder: Path, fresh: bool = False, **settings: Any) -> Runtime:
    """Return a float32 engine with random gates; chunks of 12 cut every prompt and picture.

    Engines of one checkpoint share its weights and its vision tower: reading them takes longer than
    most tests.

    Args:
        fresh: read them anew, for a test that changes them.
    """
    defaults = {"policy": "dbtrimkv", "budget": 10, "prefill_chunk": 12, "page_size": 8}
    # A budget in bytes chooses the form.
    if not any(isinstance(settings.get(name), str) for name in ("budget", "budget_max")):
        defaults["kv"] = "auto"
    options = {"gates": "random", "device": "cpu", "dtype": "float32", **(defaults | settings)}
    stats = [(path.name, path.stat()) for path in sorted(Path(folder).iterdir())]
    files = tuple((name, stat.st_mtime_ns, stat.st_size) for name, stat in stats)
    form = options.get("weights", "auto")
    parts = (_parts.__wrapped__ if fresh else _parts)(folder, files, form)
    return Runtime.from_parts(EngineConfig(model=folder, **options), *parts)


@functools.lru_cache(maxsize=8)
def _parts(
    folder: Path, files: tuple[Any, ...], form: str
) -> tuple[Family, DecoderSpec, DecoderWeights]:
    """Read a checkpoint as ``Runtime.from_pretrained`` does, again where its files have changed."""
    return loading.load(folder, "float32", "cpu", form=form, kernels=kernels_for(form))


def run(session: CachedSequence, tokens: Tensor) -> Tensor:
    """Decode some tokens; logits ``[T, vocab]``."""
    return torch.stack([session.decode(int(token)) for token in tokens])


def advance(session: CachedSequence, what: Any) -> Tensor:
    """Decode a tensor of tokens, or prefill a prompt."""
    return run(session, what) if isinstance(what, Tensor) else session.prefill(what)


def assert_same_rows(a: CachedSequence, b: CachedSequence) -> None:
    """Both retain the same tokens in every row."""
    for left, right in zip(a.retained(), b.retained(), strict=True):
        for x, y in zip(left, right, strict=True):
            assert torch.equal(x, y)


def state(session: CachedSequence) -> tuple[Any, ...]:
    """Return the state that a failed call must not change."""
    return (session.memory(), session.seen, session.next_position, session.entries)


def rewrite_tensors(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the tensors of a session file, whose checksum then is that of the new ones."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    change(tensors)
    del metadata["digest"]
    save_file(tensors, path, metadata | {"digest": _digest(tensors, metadata)})


def without_risk(path: Path) -> None:
    """Make a session file what an older mmkv would have written."""
    rewrite_tensors(path, lambda tensors: tensors.pop("risk"))
