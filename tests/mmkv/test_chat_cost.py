"""What eviction cost an answer (``--cost``), beside a computation of its own."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from mmkv import Engine, bundled_model
from mmkv.resources import asset

if TYPE_CHECKING:
    from tests.support.cli_fixtures import Ran

pytest_plugins = ("tests.support.cli_fixtures",)

QUESTION = "how many monkeys?"


def test_the_cost_is_that_of_the_two_caches(mmkv: Callable[..., Ran]) -> None:
    picture = str(asset("scene.png"))
    options = ("--image", picture, "-p", QUESTION, "--prefill-chunk", "12")
    ran = mmkv("chat", *options, "--budget", "16", "--cost")
    found = re.search(r"ranks (\d+) of (\d+) tokens of the reply first, KL ([\d.]+) nats", ran.err)
    assert found, ran.err
    turn = [{"type": "image", "image": picture}, {"type": "text", "text": QUESTION}]
    logits = []
    for policy in ("full", "dbtrimkv"):
        engine = Engine.from_pretrained(
            bundled_model(), policy=policy, budget=16, prefill_chunk=12, device="cpu"
        )
        with engine.session() as talk:
            text = ran.out.removesuffix("\n")
            ids = engine.processor.tokenizer(text, add_special_tokens=False)["input_ids"]
            rows = [talk.prefill(engine.inputs([{"role": "user", "content": turn}]))]
            rows += [talk.decode(token) for token in ids]
            logits.append(torch.stack(rows).double())
            ends = engine.eos_token_ids
    full, kept = (row.softmax(-1) for row in logits)
    divergence = (full * (full / kept).log()).sum(-1).mean()
    best = full.argmax(-1).tolist()
    same = sum(a == b for a, b in zip(best, ids, strict=False)) + (best[-1] in ends)
    assert (int(found[1]), int(found[2])) == (same, len(ids) + 1)
    assert abs(float(found[3]) - float(divergence)) < 1e-3 and float(divergence) > 0.1


def test_nothing_evicted_costs_nothing_and_the_rest_is_refused(mmkv: Callable[..., Ran]) -> None:
    picture = str(asset("scene.png"))
    ran = mmkv("chat", "--image", picture, "-p", "what is at row 2, column 3?", "--cost")
    assert "ranks 2 of 2 tokens of the reply first, KL 0.0000" in ran.err
    assert mmkv("chat", "-i", "--cost").code == 2


def test_the_demo_evicts_and_says_what_it_cost(mmkv: Callable[..., Ran]) -> None:
    import shlex
    from pathlib import Path

    root = Path(__file__).resolve().parents[2]
    lines = (root / "Makefile").read_text().splitlines()
    (line,) = [line for line in lines if "mmkv chat --image assets/scene.png" in line]
    assert line.split("mmkv ", 1)[1] in (root / "README.md").read_text()
    words = shlex.split(line.split("mmkv ", 1)[1])
    words[words.index("assets/scene.png")] = str(asset("scene.png"))
    ran = mmkv(*words)
    assert ran.out == "frog\n" and "(22 %)" in ran.err and "what eviction cost" in ran.err
