"""Training under compression: masks that are what the engine kept, losses by hand, whole runs."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from mmkv.engine.config import EngineConfig
from mmkv.engine.errors import InputError
from mmkv.engine.runtime import Runtime
from mmkv.resources import bundled_model
from mmkv.training import adapt as command_line
from mmkv.training.adapt_run import (
    REWARDS,
    AdaptSettings,
    Question,
    adapt,
    load_compressed,
    question_of,
    soft_target_loss,
)
from mmkv.training.compressed import CompressedModel, Visible, budget_of, read_as_decoded
from mmkv.training.data.examples import examples
from mmkv.training.folder import history
from tests.support.dialogues import engine_of, folder_of, oracle_of, prefill_both, prompt
from tests.support.factories import join_turns
from tests.support.policies import EVICTING_KINDS, GATED
from tests.support.sessions import text_ids
from tests.support.tiers import slow_but

pytest.importorskip("peft", reason="adapters are peft's: pip install 'mmkv[adapt]'")

MODEL = str(bundled_model())
CHUNK, BUDGET = 7, 6.0
QUICK = ["dbtrimkv", "snapkv"]
ALL = [*EVICTING_KINDS, "dbtrimkv+8"]


def compressed_of(folder: Path, policy: str) -> CompressedModel:
    """Return a model with an adapter that does nothing yet, under a policy with random gates."""
    gates = "random" if policy.partition("+")[0] in GATED else None
    config = EngineConfig(model=str(folder), policy=policy, gates=gates, prefill_chunk=CHUNK)
    return CompressedModel(str(folder), config, (2, 4, ()), 0, "float32", "cpu")


def disturb(model: Any) -> None:
    """Have an adapter change the model."""
    torch.manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.1)


@pytest.mark.parametrize("model", ["vl3", "text3"])
@pytest.mark.parametrize("policy", slow_but(QUICK, ALL, "the other kinds of policy"))
def test_the_mask_is_what_the_oracle_kept_and_logits_are_the_engines(
    model: str, policy: str
) -> None:
    """After every token and chunk the oracle, which has no recorder, keeps the entries that the
    next token sees; and one masked pass has the logits of all decode steps, with the adapter on.
    """
    folder = folder_of(model)
    compressed = compressed_of(folder, policy)
    first, reply = prompt(model, 9, ("image", 16, 24), 5, seed=1), text_ids(9, seed=2)
    later, last = prompt(model, 8, seed=3), text_ids(5, seed=4)
    turns = [first, prompt(model, 9), later, prompt(model, 5)]
    turns[1]["input_ids"], turns[3]["input_ids"] = reply[None], last[None]
    document = join_turns(*turns)
    parts = [turn["input_ids"][0] for turn in turns]
    labels = torch.cat(
        [ids if i % 2 else torch.full_like(ids, -100) for i, ids in enumerate(parts)]
    )
    tokens = len(labels)
    kept: list[tuple[int, Tensor]] = []
    if policy != "dbtrimkv+8":  # whose random write gates are not the oracle's
        engine = engine_of(folder, policy, BUDGET, prefill_chunk=CHUNK)
        oracle = oracle_of(engine, folder, policy, BUDGET, prefill_chunk=CHUNK)
        with engine.session() as session:
            for index, turn in enumerate(turns):
                steps: list[Callable[[], Any]] = [
                    lambda turn=turn: prefill_both(session, oracle, turn)
                ]
                if index % 2:
                    steps = [
                        lambda token=token: (session.decode(token), oracle.decode(token))
                        for token in turn["input_ids"][0].tolist()
                    ]
                for step in steps:
                    step()
                    oracle.follow(session.retained())
                    kept.append((oracle.seen, oracle.keep.clone()))
        assert oracle.evictions
    seen = compressed.watch(document, labels, budget_of(str(BUDGET), tokens))
    assert seen.nbytes == 4 * compressed.spec.rows * tokens
    for count, keep in kept:
        assert torch.equal(seen.until[..., :count] > count, keep) or count == tokens
    disturb(compressed.model)
    with compressed.decoding() as engine:
        with compressed.recorded(engine, budget_of(str(BUDGET), tokens), tokens) as session:
            found = torch.stack(read_as_decoded(session, compressed.turn(document), labels))
            seen = compressed.visible(session, tokens)
            assert session.evicted
    where = torch.tensor([*((labels >= 0).nonzero().flatten() - 1).tolist(), tokens - 1])
    made = compressed.logits(compressed.model, document, where, seen)
    assert float((made - found).abs().max() / found.abs().max()) < 1e-4
    blind = compressed.logits(compressed.model, document, where, None)
    assert float((blind - found).abs().max() / found.abs().max()) > 1e-2


def test_the_loss_of_two_tokens_by_hand() -> None:
    """tau^2 KL(teacher || student) at tau = 2: probabilities 1/2, 1/2 against 1/5, 4/5; and 0."""
    student = torch.tensor([[0.0, 2 * torch.tensor(4.0).log()], [3.0, 3.0]], requires_grad=True)
    teacher = torch.tensor([[5.0, 5.0], [-1.0, -1.0]])
    kl = 0.5 * torch.tensor(0.5 / 0.2).log() + 0.5 * torch.tensor(0.5 / 0.8).log()
    loss = soft_target_loss(student, teacher, 2.0)
    torch.testing.assert_close(loss, 4 * kl / 2)
    loss.backward()
    # tau^2 / n (p_student - p_teacher) / tau
    wanted = torch.tensor([[0.2 - 0.5, 0.8 - 0.5], [0.0, 0.0]])
    torch.testing.assert_close(student.grad, wanted, atol=1e-6, rtol=0)
