"""GGUF files hold the numbers that ``gguf`` makes of them, and run as the checkpoint of these does.

Each is compared with a checkpoint of the same numbers, which other tests compare with transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from mmkv.engine.model.families.loading import load
from mmkv.engine.model.gguf.config import gguf_folder
from tests.engine.test_stored_weights import assert_same, named, plain
from tests.support.factories import checkpoint, make_turn
from tests.support.gguf_files import Written

SHOWN: list[Any] = [3, ("image", 32, 32), 4, ("image", 16, 48), 2]
# Architectures and types, so that each of both is there.
TEXTS = [
    ("llama", Kind.F32),
    ("llama", Kind.Q8_0),
    ("llama_biased", Kind.Q6_K),
    ("mistral", Kind.Q4_K),
    ("qwen2", Kind.BF16),
    ("qwen2", Kind.Q5_K),
    ("qwen3", Kind.F16),
    ("qwen3_yarn", Kind.Q4_0),
    ("qwen3_moe", Kind.Q8_0),
]
SEEING = [
    ("qwen3_vl", Kind.F16),
    ("qwen3_vl_moe", Kind.Q8_0),
    ("qwen2_5_vl", Kind.F32),
    ("llava", Kind.Q4_0),
    ("llava_qwen2", Kind.F16),
]


def assert_alike(file: str | Path, truth: Path) -> None:
    _, spec, weights = load(file, torch.float32, "cpu")
    _, wanted, theirs = load(truth, torch.float32, "cpu")
    assert_same(named(weights), named(theirs))
    assert (weights.head.data_ptr() == weights.embed.data_ptr()) == (
        theirs.head.data_ptr() == theirs.embed.data_ptr()
    )
    ours_rope, theirs_rope = plain(spec.rope), plain(wanted.rope)
    assert ours_rope.pop("inv_freq") == pytest.approx(theirs_rope.pop("inv_freq"), rel=2e-7)
    assert ours_rope == theirs_rope
    sizes = [
        {k: v for k, v in vars(s).items() if k not in ("rope", "rms_eps")} for s in (spec, wanted)
    ]
    assert sizes[0] == sizes[1]
    assert spec.rms_eps == pytest.approx(wanted.rms_eps, rel=1e-6)


@pytest.mark.parametrize(("name", "kind"), TEXTS)
def test_text(name: str, kind: Kind, tmp_path: Path) -> None:
    written = Written(checkpoint(name), tmp_path, kind)
    assert_alike(written.text, written.truth)


def seen(model: str | Path, name: str) -> list[Tensor]:
    turn = load(model, torch.float32, "cpu")[0].turn(make_turn(name, SHOWN), 5)
    assert turn.visual is not None
    return [turn.visual, *turn.deepstack, turn.positions, turn.modality]


@pytest.mark.parametrize(("name", "kind"), SEEING)
def test_pictures(name: str, kind: Kind, tmp_path: Path) -> None:
    marks = {150: "<image>"} if name.startswith("llava") else {}
    written = Written(checkpoint(name), tmp_path, kind, **({"marks": marks} if marks else {}))
    folder = gguf_folder(written.text, written.mmproj)
    assert_alike(folder, written.truth)
    assert all(map(torch.equal, seen(folder, name), seen(written.truth, name)))
