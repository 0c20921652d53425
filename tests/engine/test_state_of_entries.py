"""State that scorers give new entries, beside the attention that passes add up."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from mmkv.engine.policies import CacheView, HeadAllocation, Needs, NewTokens, Policy
from tests.support.sessions import PICTURES, advance, load, text_ids


@dataclass(frozen=True)
class Both:
    """Adds up attention, and notes the position and whether a token was in a prompt."""

    needs: ClassVar[Needs] = Needs(state=3, mass="mean")

    def on_append(self, new: NewTokens) -> Tensor:
        prompt = torch.full_like(new.position, int(new.prompt))
        return torch.stack([new.position, prompt], -1)[:, :, None, None].float()

    def score(self, view: CacheView) -> Tensor:
        return view.state()[:, 0]


@pytest.mark.parametrize("native", [True, False])
def test_mass_and_state_at_creation_do_not_meet(native: bool, folders: dict[str, Path]) -> None:
    """In prompts, steps and batches: no entry is dropped, so each query gives every row 1."""
    engine = load(folders["vl"], policy=Policy("both", Both(), HeadAllocation()), budget=200)
    if not native:
        engine.backends.cpu.switch_off()
    one, two = engine.session(), engine.session()
    advance(one, PICTURES)
    advance(one, text_ids(5, 1))
    prompt = one.seen - 5
    advance(two, text_ids(3, 2))
    engine.decode([one, two], [7, 8])
    for session in (one, two):
        view = session.view()
        mass, position, said = view.state().unbind(-1)
        total = torch.zeros(view.rows).index_add(0, view.row, mass)
        torch.testing.assert_close(total, torch.full_like(total, session.seen), rtol=1e-5, atol=0)
        assert (mass[view.position == session.seen - 1] > 0).all()
        assert torch.equal(position, view.position.float())
        start = prompt if session is one else 0
        assert torch.equal(said.bool(), view.position < start)


@dataclass(frozen=True)
class Taps:
    """Notes the size of the residual stream at depths that are not in order."""

    needs: ClassVar[Needs] = Needs(state=5, taps=(0.9, (0.0, 0.9), 0.0, 1.0))

    def on_append(self, new: NewTokens) -> Tensor:
        return new.taps.norm(dim=-1).permute(1, 2, 0)[:, :, None, None]

    def score(self, view: CacheView) -> Tensor:
        return view.state()[:, 0]


def test_taps_come_in_the_order_they_were_asked_for(folders: dict[str, Path]) -> None:
    engine = load(folders["vl"], policy=Policy("taps", Taps(), HeadAllocation()), budget=200)
    session = engine.session()
    advance(session, PICTURES)
    advance(session, text_ids(2, 1))
    assert engine.decoder.taps == (1, 0, 1, 0, 1)
    upper, *more = session.view().state().unbind(-1)
    assert torch.equal(more[1], upper) and torch.equal(more[3], upper)
    assert torch.equal(more[0], more[2]) and not torch.equal(more[0], upper)
