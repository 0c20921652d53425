"""Student and teacher against transformers' own layers, and the losses against plain formulas."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from mmkv.engine.model.decoder import Decoder
from mmkv.engine.model.gates import Gates
from mmkv.engine.runtime import Runtime
from mmkv.training.data.labels import predicted
from mmkv.training.measure.teacher_forced import full_attention_states, lay_out
from mmkv.training.model import (
    DistillModel,
    Objective,
    backbone_digest,
    quality_losses,
    weights_at_end,
)
from mmkv.training.settings import TrainingSettings
from mmkv.training.student import TrainableGates, student_states
from tests.support.factories import CHECKPOINTS, checkpoint, make_turn

PICTURE = {"qwen3_vl": [6, ("image", 32, 16), 9], "llava_next": [5, ("image", 32, 16), 8]}
PICTURE |= dict.fromkeys(["qwen2_5_vl", "qwen3_vl_moe", "internvl"], PICTURE["qwen3_vl"])


def load(name: str) -> Runtime:
    return Runtime.from_pretrained(checkpoint(name), policy="full", dtype="float32", device="cpu")


def document(name: str, length: int, seed: int) -> dict[str, Tensor]:
    return make_turn(name, [length], seed)


def lively(engine: Runtime, tying: str = "paper", seed: int = 0) -> TrainableGates:
    """Return gates whose log_beta spreads over several orders of magnitude."""
    made = TrainableGates(engine.spec, d_gate=24, tying=tying, bias=1.0, seed=seed)
    with torch.no_grad():
        made.readout.weight.mul_(60)
    return made


def gated_by_transformers(name: str, inputs: dict[str, Tensor], gates: Gates) -> Tensor:
    """Return logits ``[T, vocab]`` of the transformers model, eager attention with the gates' bias.

    Every attention module gets its own additive mask, worked out from what it is about to read.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint(name), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    group = CHECKPOINTS[name].group

    def add_bias(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        hidden = kwargs["hidden_states"]
        log_beta = gates.log_beta(module.layer_idx, hidden[0]).T
        age = torch.arange(hidden.shape[1])[:, None] - torch.arange(hidden.shape[1])
        bias = (age * log_beta[:, None, :]).masked_fill(age < 0, float("-inf"))
        return args, kwargs | {"attention_mask": bias.repeat_interleave(group, 0)[None]}

    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(add_bias, with_kwargs=True)
    with torch.no_grad():
        return model(input_ids=inputs["input_ids"]).logits[0]


@pytest.mark.slow(reason="compares all families with transformers")
@pytest.mark.parametrize("name", ["qwen3", "qwen2", "llama_biased"])
def test_gates_on_keys_and_values_read_what_transformers_projects(name: str) -> None:
    """Trunk and readout on [k; v] of the transformers modules, against the folded gates on x."""
    engine = load(name)
    made = TrainableGates(
        engine.spec, d_gate=24, bias=1.0, seed=5, layers=engine.decoder.weights.layers
    )
    inputs = document(name, 20, seed=3)
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint(name)).float().eval()
    seen: dict[tuple[int, str], Tensor] = {}
    for index, layer in enumerate(model.model.layers):
        for part in ("k_proj", "v_proj"):
            getattr(layer.self_attn, part).register_forward_hook(
                lambda _m, _a, out, at=(index, part): seen.__setitem__(at, out[0])
            )
    with torch.no_grad():
        model(input_ids=inputs["input_ids"])
    raw, states = made.state_dict(), lay_out(engine, [inputs]).hidden
    with torch.no_grad():
        _, log_beta = student_states(engine, lay_out(engine, [inputs]), made.gates())
        first = engine.decoder.gate_input(0, states)
        torch.testing.assert_close(made.gates().log_beta(0, first), log_beta[:, 0])
        x = torch.cat([seen[0, "k_proj"], seen[0, "v_proj"]], -1)
        for stage in ("linear1", "linear2"):
            weight, bias = (raw[f"layers.0.{stage}.{part}"] for part in ("weight", "bias"))
            x = F.silu(F.linear(x, weight, bias))
        heads = x.unflatten(-1, (engine.spec.num_kv_heads, -1))
        wanted = F.logsigmoid(heads @ raw["readout.weight"] + raw["readout.bias"])
    torch.testing.assert_close(log_beta[:, 0], wanted, rtol=1e-4, atol=1e-5)
    made.gates().log_beta(0, first).sum().backward()
    assert made.layers[0].linear1.weight.grad.abs().sum() > 0


@pytest.mark.slow(reason="compares all families with transformers")
@pytest.mark.parametrize("name", ["qwen3", "llama_biased", "qwen2", "qwen3_moe_mixed"])
def test_student_is_transformers_with_a_bias(name: str) -> None:
    engine = load(name)
    inputs = document(name, 23, 1)
    gates = lively(engine).gates()
    with torch.no_grad():
        states, log_beta = student_states(engine, lay_out(engine, [inputs]), gates)
    expected = gated_by_transformers(name, inputs, gates)
    torch.testing.assert_close(engine.decoder.logits(states), expected, rtol=1e-4, atol=1e-4)
    assert float(log_beta.min()) < 3 * float(log_beta.max()), "the gates all say the same"


@pytest.mark.slow(reason="compares all families with transformers")
@pytest.mark.parametrize("name", [*PICTURE, "llama"])
def test_teacher_is_the_engine_without_eviction(name: str) -> None:
    engine = load(name)
    inputs = make_turn(name, PICTURE.get(name, [17]), 2)
    states = full_attention_states(engine, lay_out(engine, [inputs]))
    with engine.session() as session:
        expected = session.prefill(inputs)
    torch.testing.assert_close(engine.decoder.logits(states[-1:])[0], expected)


@pytest.mark.slow(reason="compares all families with transformers")
@pytest.mark.parametrize("gating", ["log-bias", "logit-scale"])
def test_gates_with_full_retention_change_nothing(gating: str) -> None:
    engine = load("qwen3_vl")
    documents = lay_out(engine, [make_turn("qwen3_vl", PICTURE["qwen3_vl"], 3)])
    open_gates = TrainableGates(engine.spec, d_gate=16, bias=40.0).gates()
    with torch.no_grad():
        student, _ = student_states(engine, documents, open_gates, gating)
    torch.testing.assert_close(
        student, full_attention_states(engine, documents), rtol=1e-4, atol=1e-4
    )


def test_documents_laid_end_to_end_do_not_see_each_other() -> None:
    engine = load("qwen3_vl")
    rows = [make_turn("qwen3_vl", PICTURE["qwen3_vl"], 4), document("qwen3_vl", 11, 5)]
    gates = lively(engine).gates()
    with torch.no_grad():
        together, _ = student_states(engine, lay_out(engine, rows), gates)
        apart = [student_states(engine, lay_out(engine, [row]), gates)[0] for row in rows]
    torch.testing.assert_close(together, torch.cat(apart), rtol=1e-5, atol=1e-5)


def test_recomputing_layers_changes_no_gradient() -> None:
    engine = load("qwen3_vl")
    documents = lay_out(engine, [make_turn("qwen3_vl", PICTURE["qwen3_vl"], 6)])
    gradients = []
    for checkpointing in (False, True):
        gates = lively(engine)
        torch.manual_seed(0)
        states, log_beta = student_states(
            engine, documents, gates.gates(), "log-bias", checkpointing
        )
        (states.square().mean() + log_beta.mean()).backward()
        gradients.append([p.grad for p in gates.parameters()])
    for a, b in zip(*gradients, strict=True):
        assert a is not None and a.abs().sum() > 0
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("block", [3, 100])
def test_quality_losses_are_the_plain_formulas(block: int, reverse: bool) -> None:
    engine = load("qwen3")
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(14, engine.spec.hidden_size, generator=generator) for _ in "ab")
    labels = torch.randint(0, 100, (14,), generator=generator)
    labels[[0, 4, 9]] = -100
    student.requires_grad_()
    decoder = Decoder(engine.spec, engine.decoder.weights, None)
    found = quality_losses(decoder, student, teacher, labels, reverse, block)
    where = [i - 1 for i in range(14) if labels[i] != -100]
    assert predicted(labels)[0].tolist() == where
    ours, theirs = (
        F.log_softmax(decoder.logits(x[where]).double(), -1) for x in (student, teacher)
    )
    high, low = (ours, theirs) if reverse else (theirs, ours)
    kl = (high.exp() * (high - low)).sum(-1).mean()
    ntp = -ours[range(len(where)), labels[labels != -100]].mean()
    torch.testing.assert_close(found.kl.double(), kl, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.ntp.double(), ntp, rtol=1e-5, atol=1e-6)
    assert float(found.agreement) == float((ours.argmax(-1) == theirs.argmax(-1)).double().mean())
    expected = torch.autograd.grad(kl + ntp, student, retain_graph=True)[0]
    got = torch.autograd.grad(found.kl + found.ntp, student)[0]
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)


# --loss: weights of KL and of next tokens, and which KL.
LOSSES = {
    "kl+ntp": (1, 1, "teacher first"),
    "kl": (1, 0, "teacher first"),
    "ntp": (0, 1, "teacher first"),
    "reverse-kl": (1, 0, "student first"),
    "reverse-kl+ntp": (1, 1, "student first"),
}


def test_losses_train_what_their_names_say() -> None:
    """Every ``--loss`` over two packed documents, against transformers and sums in float64.

    All labels are given, those of first tokens too, which nothing before them predicts: in a pack
    the last token of the document before would.
    """
    engine = load("qwen3")
    rows = [document("qwen3", length, seed) for length, seed in ((9, 1), (13, 2))]
    made = lively(engine)
    batch = [{**row, "labels": row["input_ids"].clone()} for row in rows]
    batch[0]["labels"][0, 4:6] = -100
    model = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint("qwen3"), dtype=torch.float32
    ).eval()
    sums, count = {"teacher first": 0.0, "student first": 0.0, "ntp": 0.0}, 0
    with torch.no_grad():
        for row, example in zip(rows, batch, strict=True):
            ours = gated_by_transformers("qwen3", row, made.gates()).double().log_softmax(-1)
            theirs = model(input_ids=row["input_ids"]).logits[0].double().log_softmax(-1)
            labels = example["labels"][0].tolist()
            for step in range(1, len(labels)):
                if labels[step] == -100:
                    continue
                p, q = theirs[step - 1], ours[step - 1]
                sums["teacher first"] += float((p.exp() * (p - q)).sum())
                sums["student first"] += float((q.exp() * (q - p)).sum())
                sums["ntp"] -= float(q[labels[step]])
                count += 1
    assert count == 8 - 2 + 12
    assert abs(sums["teacher first"] - sums["student first"]) > 0.01 * count
    for name, (kl, ntp, which) in LOSSES.items():
        common = {"model": "m", "output": "o", "loss": name, "budget": 1e6, "lambda_cap": 5.0}
        found = DistillModel(engine, made, TrainingSettings(**common).objective())(batch)
        assert float(found["capacity"]) == 0.0  # nothing is over that budget
        for part, wanted in (("kl", sums[which]), ("ntp", sums["ntp"])):
            assert float(found[part]) == pytest.approx(wanted / count, rel=1e-4), (name, part)
        wanted = (kl * sums[which] + ntp * sums["ntp"]) / count
        assert float(found["loss"]) == pytest.approx(wanted, rel=1e-4), name
        over = TrainingSettings(**{**common, "budget": 1.0}).objective()
        found = DistillModel(engine, made, over)(batch)
        assert float(found["capacity"]) > 0.01
        wanted += 5.0 * float(found["capacity"])
        assert float(found["loss"]) == pytest.approx(wanted, rel=1e-4), name


@pytest.mark.parametrize("scope", ["global", "head"])
def test_the_capacity_term_of_a_batch_is_the_mean_over_its_documents(scope: str) -> None:
    """TRIM-KV's normaliser, documents of 31, 4 (shorter than M) and 13 tokens in one pass."""
    engine = load("qwen3")
    rows = [document("qwen3", length, seed) for length, seed in ((31, 1), (4, 2), (13, 3))]
    examples = [{**row, "labels": row["input_ids"].clone()} for row in rows]
    goal = Objective(kl=0.0, ntp=0.0, budget=5.0, scope=scope, normaliser="tt")
    model = DistillModel(engine, lively(engine, "none"), goal)

    def loss_and_gradients(batches: list[list[Any]]) -> list[Tensor]:
        model.zero_grad()
        loss = sum(model(batch)["loss"] for batch in batches) / len(batches)
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters())]

    together = loss_and_gradients([examples])
    apart = loss_and_gradients([[example] for example in examples])
    assert together[0] > 0.01 and all(grad.abs().sum() > 0 for grad in together[1:])
    torch.testing.assert_close(together, apart, rtol=1e-4, atol=1e-7)


def test_only_gates_are_trained() -> None:
    engine = load("qwen3_vl")
    before = backbone_digest(engine)
    examples = []
    for seed in (1, 2):
        row = make_turn("qwen3_vl", PICTURE["qwen3_vl"], seed)
        examples.append({**row, "labels": row["input_ids"].clone()})
    model = DistillModel(engine, lively(engine), Objective(budget=3.0))
    assert {name.split(".")[0] for name, _ in model.named_parameters()} == {"gates"}
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    first = model(examples)
    first["loss"].backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    assert all(
        not t.requires_grad for t in (engine.decoder.weights.embed, engine.decoder.weights.head)
    )
    optimizer.step()
    assert float(model(examples)["capacity"]) != float(first["capacity"])
    assert backbone_digest(engine) == before
    engine.decoder.weights.layers[0].qkv[0, 0] += 1
    assert backbone_digest(engine) != before, "the digest sees a single weight"
    engine.decoder.weights.layers[0].qkv[0, 0] -= 1
    with torch.no_grad():
        next(engine.family.hf.parameters()).flatten()[0] += 1
    assert backbone_digest(engine) != before, "on the vision side, too"


@pytest.mark.parametrize("scope", ["global", "head"])
def test_capacity_follows_the_formula(scope: str) -> None:
    engine = load("qwen3")
    rows = [document("qwen3", 9, 1), document("qwen3", 13, 2)]
    gates = lively(engine)
    model = DistillModel(engine, gates, Objective(budget=2.0, scope=scope))
    labels = [{**row, "labels": row["input_ids"]} for row in rows]
    with torch.no_grad():
        found = model(labels)
        terms, kept, ends = [], [], []
        for row in rows:
            log_beta = student_states(engine, lay_out(engine, [row]), gates.gates())[1].double()
            length, count = log_beta.shape[0], log_beta[0].numel()
            for t in range(length):
                age = (t - torch.arange(t + 1)).double()[:, None, None]
                s = (age * log_beta[: t + 1]).exp().sum(0)
                kept.append(s.mean())
                if scope == "global":
                    most = max((t + 1) * count - 2.0 * count, 1)
                    terms.append((s.sum() - 2.0 * count).clamp(min=0) / most)
                else:
                    terms.append(((s - 2.0).clamp(min=0) / max(t + 1 - 2.0, 1)).mean())
            ends.append(s)
    torch.testing.assert_close(
        found["capacity"].double(), torch.stack(terms).mean(), rtol=1e-4, atol=1e-6
    )
    torch.testing.assert_close(
        found["kept"].double(), torch.stack(kept).mean(), rtol=1e-4, atol=1e-6
    )
    heads = torch.stack(ends).mean(0)
    extremes = torch.stack([found["kept_least"], found["kept_most"]]).double()
    torch.testing.assert_close(
        extremes, torch.stack([heads.min(), heads.max()]), rtol=1e-4, atol=1e-6
    )
    assert extremes[0] < extremes[1]


def test_weights_at_the_end_of_each_document() -> None:
    log_beta = torch.tensor([[0.0, -9e9, -1.0, -9e9, 0.0, 0.0], [-0.5, 0.0, 0.0, -9e9, 0.0, -9e9]])
    start = torch.tensor([0, 0, 0, 3, 3, 3])
    # Ends: tokens 2 and 5, which weigh 1 whatever their beta.
    expected = torch.tensor([[1, 0, 1, 0, 1, 1], [math.exp(-1), 1, 1, 0, 1, 1]])
    torch.testing.assert_close(weights_at_end(log_beta, start), expected)
