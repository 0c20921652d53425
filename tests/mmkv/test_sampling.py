"""Sampling tokens and turning them into streams of text."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mmkv.engine.errors import InputError, NotFiniteError
from mmkv.reply import Detokenizer, StopStrings
from mmkv.sampling import Sampler, Sampling, distribution, likeliest_of
from tests.support.chat_models import byte_tokenizer


def test_pieces_are_whole_characters_and_join_to_the_text() -> None:
    tokenizer = byte_tokenizer()
    rng = random.Random(0)
    for _ in range(200):
        text = "".join(rng.choice("aé漢🙂 \n<|im_end|>") for _ in range(rng.randint(0, 12)))
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        stream = Detokenizer(tokenizer)
        pieces = [stream.push(token) for token in ids]
        assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True)
        assert not any("\ufffd" in piece for piece in pieces)
        assert stream.flush() == ""


def test_half_a_character_at_the_end_is_dropped_and_invalid_bytes_do_not_block() -> None:
    tokenizer = byte_tokenizer()
    smile = tokenizer("🙂")["input_ids"]
    assert len(smile) == 4
    stream = Detokenizer(tokenizer)
    assert [stream.push(token) for token in smile[:3]] == ["", "", ""] and stream.flush() == ""
    stream = Detokenizer(tokenizer)
    shown = "".join(stream.push(smile[1]) for _ in range(40)) + stream.push(
        tokenizer("a")["input_ids"][0]
    )
    assert shown.endswith("a") and len(shown) == 41


def test_stop_strings_over_piece_borders() -> None:
    rng = random.Random(1)
    for _ in range(500):
        text = "".join(rng.choice("abc") for _ in range(20))
        stops = ["".join(rng.choice("abc") for _ in range(rng.randint(1, 4))) for _ in range(2)]
        cuts = [0, *sorted(rng.randint(0, 20) for _ in range(4)), 20]
        matcher = StopStrings(stops)
        shown = "".join(matcher.push(text[a:b]) for a, b in pairwise(cuts))
        shown += matcher.flush()
        ends = [text.find(stop) for stop in stops if stop in text]
        assert matcher.hit == bool(ends)
        if len(ends) < 2 or len(set(map(len, stops))) == 1:
            assert shown == (text[: min(ends)] if ends else text)
        else:  # two stops may overlap: whichever is complete first ends the text
            assert shown in {text[:end] for end in ends}


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (5, 1.0), (0, 0.7), (8, 0.5), (1, 1.0)])
def test_the_distribution_is_that_of_transformers(top_k: int, top_p: float) -> None:
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0)) * 3
    wanted = TemperatureLogitsWarper(0.8)(None, logits)
    wanted = TopKLogitsWarper(top_k)(None, wanted) if top_k else wanted
    wanted = TopPLogitsWarper(top_p)(None, wanted) if top_p < 1 else wanted
    sampling = Sampling(temperature=0.8, top_k=top_k, top_p=top_p)
    for row, expected in zip(logits, wanted.softmax(-1), strict=True):
        assert torch.allclose(distribution(row, sampling), expected, atol=1e-6)


def test_draws_follow_the_distribution_and_the_seed() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1e9])
    sampling = Sampling(temperature=1.0, seed=7)
    draws = [Sampler(sampling).draw(logits) for _ in range(3)]
    assert len(set(draws)) == 1
    sampler = Sampler(sampling)
    counts = torch.bincount(torch.tensor([sampler.draw(logits) for _ in range(4000)]), minlength=4)
    assert torch.allclose(counts / 4000, logits.softmax(-1), atol=0.03)
    torch.manual_seed(0)
    before = torch.rand(1)
    torch.manual_seed(0)
    Sampler(Sampling(temperature=1.0, seed=3)).draw(logits)
    assert torch.rand(1) == before  # the process-wide random state is not used
    assert Sampler(Sampling()).draw(logits) == 2


class _Parts(TorchDispatchMode):
    """Counts the most tensors that one operation returns."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.most = max(self.most, len(made) if isinstance(made, (tuple, list)) else 1)
        return made


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_tensor_is_taken_apart_to_draw_a_token(temperature: float) -> None:
    """A tensor that Python iterates becomes one tensor for each token of the vocabulary."""
    sampler = Sampler(Sampling(temperature=temperature, top_k=5, top_p=0.9, seed=1), never=[2])
    with _Parts() as parts:
        sampler.draw(torch.randn(1000, generator=torch.Generator().manual_seed(0)))
    assert 1 <= parts.most <= 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_new_tokens": 0},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"seed": -1},
        {"stop": ("",)},
    ],
)
def test_settings_out_of_range(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        Sampling(**wrong)


def test_rows_that_are_read_at_once_draw_as_alone() -> None:
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    logits[1, 6] = 99.0  # what is never drawn
    logits[2, 3] = torch.nan
    logits[3, 5] = torch.inf
    sampler = Sampler(Sampling(), never=[6])
    for row, read in zip(logits, likeliest_of(logits), strict=True):
        if row.isfinite().all():
            assert sampler.draw(row, row, read) == sampler.draw(row) != 6
            assert sampler.draw(row, -row, read) == int(row.argmin())
        else:
            for given in (read, None):
                with pytest.raises(NotFiniteError):
                    sampler.draw(row, row, given)
