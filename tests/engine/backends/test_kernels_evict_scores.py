"""Scores of the eviction kernels, bit by bit, and the policies that they know."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from mmkv.engine.backends.cuda.kernels.evict import empty_eviction, unsupported_reason
from mmkv.engine.policies import make_policy
from mmkv.engine.policies.scoring import lookahead_log_score
from tests.engine.backends.test_kernels_evict import FORMS, METHODS
from tests.support.kernels import (
    DEVICE,
    assert_same,
    eager_cache,
    eager_counts,
    is_triton,
    on_device,
    to_device,
)


def test_which_policies_are_supported() -> None:
    assert not any(unsupported_reason(make_policy(*method)) for method in METHODS)
    assert unsupported_reason(make_policy("full")) == "policy 'full'"  # never evicts
    assert unsupported_reason(make_policy("snapkv")) == "policy 'snapkv'"  # reads attention


def rounded_scores(rate: np.ndarray, age: np.ndarray, ahead: float) -> np.ndarray:
    """The definition of ``lookahead_log_score`` in long double: three roundings to float32."""
    x = rate.astype(np.longdouble)
    decayed = age.astype(np.float32) * rate
    if ahead == 1:
        return decayed
    if math.isinf(ahead):
        near, far = np.log(-np.expm1(x)), np.log1p(-np.exp(x))
        return decayed - np.where(x > -math.log(2), near, far).astype(np.float32)
    ratio = np.expm1(ahead * x) / np.expm1(x)
    return decayed + np.log(np.where(x == 0, ahead, ratio)).astype(np.float32)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("ahead", [1, 2, 5, 64, math.inf])
@np.errstate(all="ignore")
def test_scores_are_the_formula_correctly_rounded(form: Any, ahead: float) -> None:
    """So they, and the order of entries, do not depend on the machine."""
    count, now = 1024, 70_000
    cache = eager_cache(torch.tensor([[[count]]]), 16, pages=64, width=64, seed=4)
    powers = torch.rand(count, generator=torch.Generator().manual_seed(6)) * 10.7 - 9
    special = torch.tensor([0.0, -0.0, -1e-9, -1.5e-8, -0.6931472, -0.6931471, -0.03125, -50.0])
    cache.pool.log_beta.copy_(torch.cat([-(10**powers)[:-8], special]).view(-1, 16))
    slot = cache.entries(0).slot
    rate, position = (getattr(cache.pool, n).view(-1)[slot] for n in ("log_beta", "position"))
    want = rounded_scores(rate.numpy(), (now - position).numpy(), ahead)
    if is_triton(form):
        rows, columns = to_device(cache)
        work = empty_eviction(1, rows)
        form(
            work,
            make_policy("dbtrimkv", ahead),
            rows,
            columns,
            on_device([0]),
            on_device([now]),
            on_device([count - 1]),
            0,
        )
        key = work.keys[0, :count].cpu().numpy().view(np.uint32)
        got = np.where(key >> 31, key ^ np.uint32(1 << 31), ~key).view(np.float32)
        assert work.ties[0, :count].tolist() == position.tolist()
    else:
        got = lookahead_log_score(rate.to(DEVICE), (now - position).to(DEVICE), ahead).cpu().numpy()
    assert np.array_equal(got, want), np.flatnonzero(got != want)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("ahead", [1, 2, 5, math.inf])
def test_an_entry_of_age_0_has_the_score_of_torch(form: Any, ahead: float) -> None:
    """Six rows of two entries; log_beta of the newest is -inf, 0, no number, and others."""
    lengths, now = torch.tensor([[[2, 2], [2, 2], [2, 2]]]), 2
    cache = eager_cache(lengths, 8, pages=12, width=2, seed=4)
    pool, entries = cache.pool, cache.entries(0)
    newest = torch.tensor([-math.inf, 0.0, math.nan, -0.5, -50.0, -1e-9])
    older = torch.tensor([-0.1, -math.inf, -0.5, 0.0, -1e-9, -2.0])
    pool.log_beta.view(-1)[entries.slot] = torch.stack([newest, older], 1).flatten()
    pool.position.view(-1)[entries.slot] = torch.tensor([1, 0] * 6).int()
    policy = make_policy("dbtrimkv", ahead)
    policy = replace(policy, scoring=replace(policy.scoring, newest_age=0))
    rows, columns = to_device(cache)
    work, nans = empty_eviction(1, rows), 0
    for budget in range(11, 0, -1):  # one at a time: the order of all
        gone, nan = eager_counts(cache, policy, 0, now, budget)
        form(work, policy, rows, columns, on_device([0]), on_device([now]), on_device([budget]), 0)
        nans += nan
        assert (work.dropped.tolist(), work.nan.tolist()) == ([gone], [nans])
        assert_same(cache, rows, columns)
