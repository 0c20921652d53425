"""An engine that reads keys from the pages, as on a GPU, against the one that gathers them.

On a CPU the kernels' torch references stand in for them.
"""

from __future__ import annotations

import pytest
import torch

from mmkv.engine.backends.cuda import backend as cuda
from mmkv.engine.backends.torch import step
from mmkv.engine.policies import make_policy
from tests.support.native import engine_for
from tests.support.policies import KINDS
from tests.support.sessions import assert_same_rows, text_ids
from tests.support.tiers import slow_but


@pytest.mark.parametrize("policy", KINDS)
@pytest.mark.parametrize(
    "model", slow_but(["odd"], ["qwen3_vl", "llama_biased", "odd", "mistral"], "the other models")
)
def test_chunks_and_window_scores_read_pages(
    model: str, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gathers, reads = (engine_for(model, policy).session() for _ in range(2))
    reads.engine.backends.cpu.switch_off()  # C would compute window attention
    called = []
    for module, name in ((step, "prefill_attention"), (cuda, "window_scores")):
        whole = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, _f=whole, _n=name: called.append(_n) or _f(*a))
    for turn in range(2):  # the second meets what the first left, in its first chunk too
        prompt = {"input_ids": text_ids(61, turn)[None]}
        expected = gathers.prefill(prompt)
        with monkeypatch.context() as patch:
            patch.setattr(step, "on_triton", lambda tensor: True)
            patch.setattr(cuda, "on_triton", lambda tensor: True)
            got = reads.prefill(prompt)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
        assert_same_rows(reads, gathers)
        for token in (3, 4, 5):
            torch.testing.assert_close(
                reads.decode(token), gathers.decode(token), rtol=1e-4, atol=1e-4
            )
    scorer = make_policy(policy).scoring  # the kernel joins heads by their mean or sum
    # segments-hs reads the entropy of the newest query alone, which is computed in torch.
    window = scorer.needs.queries > 0 and policy != "segments-hs"
    by_kernel = window and getattr(scorer, "group", "mean") != "max"
    assert ("window_scores" in called) == by_kernel
    # Chunks of mistral that meet earlier ones are past its window, which has a path of its own.
    assert ("prefill_attention" in called) == (model != "mistral")
