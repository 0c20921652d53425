"""Teacher-forced answers against real decoding, one dialogue at a time and side by side."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from mmkv.engine.model.decoder import Decoder
from mmkv.engine.policies import Budget
from mmkv.engine.runtime import Runtime
from mmkv.resources import bundled_model
from mmkv.training.data.examples import examples
from mmkv.training.data.labels import predicted
from mmkv.training.measure import teacher_forced
from mmkv.training.measure.teacher_forced import (
    FullCache,
    Reading,
    read,
    read_at,
    read_together,
    spans,
)

MODEL = str(bundled_model())


@pytest.fixture(scope="module")
def dialogues() -> list[dict[str, torch.Tensor]]:
    data = examples(MODEL, ["scenes:dense"], 4, 3, split="heldout")
    return [data[index] for index in range(4)]


def test_spans_are_runs_of_labels() -> None:
    assert spans([-100, 3, 4, -100, -100, 5]) == [(1, 3), (5, 6)]
    assert spans([-100]) == [] and spans([7]) == [(0, 1)]


@pytest.mark.slow(reason="runs whole dialogues with the bundled model")
def test_a_right_answer_is_what_greedy_decoding_generates(
    dialogues: list[dict[str, torch.Tensor]],
) -> None:
    """Every answer of a dialogue, decoded freely from the same teacher-forced history.

    The history before the first answer is several chunks, and more than the budget.
    """
    chunk = {"prefill_chunk": 8, "dtype": "float32"}
    engine = Runtime.from_pretrained(MODEL, policy="streamingllm", budget=20, **chunk)
    outcomes = set()
    for example in dialogues:
        inputs = {name: value for name, value in example.items() if name != "labels"}
        labels = example["labels"][0]
        found = read(engine, inputs, labels)
        turn = engine.family.turn(inputs, 0)
        session, done = engine.session(), 0
        assert spans(labels.tolist())[0][0] > 20
        for answer, (start, stop) in zip(found.answers, spans(labels.tolist()), strict=True):
            logits = session.extend(turn.part(done, start))
            with session.fork() as free:
                generated, step = [], logits
                for _ in range(stop - start):
                    generated.append(int(step.argmax()))
                    step = free.decode(generated[-1])
            assert answer.right == (generated == labels[start:stop].tolist())
            outcomes.add(answer.right)
            nll = 0.0
            for token in labels[start:stop].tolist():
                nll -= float(logits.log_softmax(-1)[token])
                logits = session.decode(token)
            assert answer.nll == pytest.approx(nll, rel=1e-4, abs=1e-5)
            done = stop
        assert found.evicted == session.evicted > 0
        assert found.entries == session.memory().entries == sum(map(sum, found.per_row))
    assert outcomes == {True, False}


@pytest.mark.slow(reason="runs whole dialogues with the bundled model")
def test_without_eviction_runs_equal_the_full_cache(
    dialogues: list[dict[str, torch.Tensor]],
) -> None:
    engine = Runtime.from_pretrained(MODEL, policy="full", dtype="float32")
    for example in dialogues[:2]:
        inputs = {name: value for name, value in example.items() if name != "labels"}
        labels = example["labels"][0]
        full = FullCache.of(engine, engine.family.turn(inputs, 0), labels)
        found = read(engine, inputs, labels, full=full)
        tokens = sum(answer.tokens for answer in found.answers)
        assert sum(answer.kl for answer in found.answers) / tokens < 1e-6
        assert sum(answer.agree for answer in found.answers) == tokens
        where, target = predicted(labels)
        logits = torch.stack(list(full.logits()))
        nll = -logits.log_softmax(-1)[range(len(where)), target].sum()
        assert sum(answer.nll for answer in found.answers) == pytest.approx(float(nll), rel=1e-4)
        assert found.evicted == 0 and found.tokens_seen == spans(labels.tolist())[-1][1]


@pytest.mark.slow(reason="runs whole dialogues with the bundled model")
def test_logits_of_the_full_cache_are_computed_in_blocks(
    dialogues: list[dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers longer than a block are read as whole ones are, and no more is held at once."""
    engine = Runtime.from_pretrained(MODEL, policy="streamingllm", budget=40, dtype="float32")
    example = dialogues[1]
    inputs = {name: value for name, value in example.items() if name != "labels"}
    labels, rows = example["labels"][0], []
    longest = max(stop - start for start, stop in spans(labels.tolist()))
    plain = Decoder.logits

    def noted(self: Decoder, states: torch.Tensor) -> torch.Tensor:
        rows.append(len(states))
        return plain(self, states)

    monkeypatch.setattr(Decoder, "logits", noted)
    whole = read(engine, inputs, labels)
    assert max(rows) == len(predicted(labels)[0]) > longest > 2
    rows.clear()
    monkeypatch.setattr(teacher_forced, "BLOCK", 2)
    parts = read(engine, inputs, labels)
    assert max(rows) == 2
    for one, two in zip(whole.answers, parts.answers, strict=True):
        for name in ("kl", "nll"):
            assert getattr(two, name) == pytest.approx(getattr(one, name), rel=1e-4, abs=1e-5)
        exact = dataclasses.replace(two, kl=one.kl, nll=one.nll)
        assert exact == one
    assert any(index > 1 for answer in parts.answers for index, _ in answer.wrong)
    assert dataclasses.replace(parts, answers=[]) == dataclasses.replace(whole, answers=[])


@pytest.mark.slow(reason="runs whole dialogues with the bundled model")
def test_dialogues_side_by_side_equal_each_alone(dialogues: list[dict[str, torch.Tensor]]) -> None:
    """Three of unlike lengths in one batch, two budgets each."""
    engine = Runtime.from_pretrained(MODEL, policy="streamingllm", dtype="float32")
    budgets, readings = [Budget.of(20), Budget.of(70)], []
    for example in dialogues[:3]:
        inputs = {name: value for name, value in example.items() if name != "labels"}
        labels, turn = example["labels"][0], engine.family.turn(inputs, 0)
        full = FullCache.of(engine, turn, labels)
        readings.append(Reading(turn, labels, budgets, full))
    assert len({reading.labels.numel() for reading in readings}) == 3
    for reading, runs in zip(readings, read_together(engine, readings), strict=True):
        alone = [read_at(engine, reading.turn, reading.labels, [b], reading.full) for b in budgets]
        for run, (one,) in zip(runs, alone, strict=True):
            assert dataclasses.replace(run, answers=[]) == dataclasses.replace(one, answers=[])
            assert [a.wrong for a in run.answers] == [a.wrong for a in one.answers]
            kl = [answer.kl for answer in one.answers]
            assert [answer.kl for answer in run.answers] == pytest.approx(kl, rel=1e-3, abs=1e-5)
        assert runs[0].evicted > runs[1].evicted > 0
