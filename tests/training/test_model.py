"""Student and teacher against transformers' own layers, and the losses against plain formulas.

Both for retention gates and for write gates (WG-KV, arXiv 2512.17452).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from huggingface_hub import ModelCard
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from mmkv.engine.errors import InputError
from mmkv.engine.model.decoder import Decoder
from mmkv.engine.model.gates import Gates, load_write_gates
from mmkv.engine.runtime import Runtime
from mmkv.resources import bundled_model
from mmkv.training.data.examples import examples
from mmkv.training.data.labels import predicted
from mmkv.training.distill import main
from mmkv.training.folder import history
from mmkv.training.measure.teacher_forced import full_attention_states, lay_out
from mmkv.training.model import (
    DistillModel,
    Objective,
    WriteGateModel,
    WriteObjective,
    backbone_digest,
    quality_losses,
    weights_at_end,
)
from mmkv.training.run import HeldOutData
from mmkv.training.settings import TrainingSettings
from mmkv.training.student import (
    TrainableGates,
    TrainableWriteGates,
    binary,
    student_states,
    write_gated_states,
)
from tests.support.factories import CHECKPOINTS, checkpoint, make_turn
from tests.support.tiers import slow_but

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
    rows = [make_turn(name, PICTURE.get(name, [17]), seed) for seed in (2, 3)]
    documents = lay_out(engine, rows)
    states = full_attention_states(engine, documents).split(documents.lengths)
    for row, own in zip(rows, states, strict=True):
        with engine.session() as session:
            expected = session.prefill(row)
        torch.testing.assert_close(engine.decoder.logits(own[-1:])[0], expected)


def test_a_linear_gate_is_one_in_the_layout_of_its_file() -> None:
    spec = load("qwen3").spec
    made = TrainableGates(spec, gate="linear", bias=1.0, seed=2)
    x = 3 * torch.randn(7, spec.hidden_size, generator=torch.Generator().manual_seed(0))
    for index, layer in enumerate(made.layers):
        wanted = F.logsigmoid(x @ layer.weight.T + layer.bias)
        torch.testing.assert_close(made.gates().log_beta(index, x), wanted)


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
@pytest.mark.parametrize(
    ("block", "weights"), [(3, (1.0, 1.0)), (100, (1.0, 1.0)), (5, (0.7, 0.0)), (3, (0.0, 2.0))]
)
def test_quality_losses_are_the_plain_formulas(
    block: int, weights: tuple[float, float], reverse: bool
) -> None:
    engine = load("qwen3")
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(14, engine.spec.hidden_size, generator=generator) for _ in "ab")
    labels = torch.randint(0, 100, (14,), generator=generator)
    labels[[0, 4, 9]] = -100
    student.requires_grad_()
    decoder = Decoder(engine.spec, engine.decoder.weights, None)
    found = quality_losses(decoder, student, teacher, labels, reverse, block, weights)
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
    loss = weights[0] * kl + weights[1] * ntp
    torch.testing.assert_close(found.loss.double(), loss, rtol=1e-5, atol=1e-6)
    expected = torch.autograd.grad(3 * loss, student)[0]
    got = torch.autograd.grad(3 * found.loss, student)[0]
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        again = quality_losses(decoder, student, teacher, labels, reverse, block, weights)
    assert again.loss == found.loss and not again.loss.requires_grad


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


@pytest.mark.parametrize(("scope", "least"), [("global", 0.0), ("head", 0.0), ("global", 1.5)])
def test_capacity_follows_the_formula(scope: str, least: float) -> None:
    """With ``least``, by an M that each document draws, and at the temperature of that M."""
    engine = load("qwen3")
    rows = [document("qwen3", 9, 1), document("qwen3", 13, 2)]
    gates = lively(engine)
    model = DistillModel(engine, gates, Objective(budget=2.0, scope=scope, least_budget=least))
    labels = [{**row, "labels": row["input_ids"]} for row in rows]
    torch.manual_seed(6)
    allowed = [2.0, 2.0]
    if least:
        chances = torch.rand(2).tolist()
        allowed = [least ** (1 - u) * (n / 2) ** u for u, n in zip(chances, (9, 13), strict=True)]
        assert least < min(allowed) and abs(allowed[0] - allowed[1]) > 0.3
    torch.manual_seed(6)
    with torch.no_grad():
        found = model(labels)
        terms, kept, ends = [], [], []
        for row, budget in zip(rows, allowed, strict=True):
            hot = torch.full((row["input_ids"].numel(),), (budget / 2) ** 2)
            log_beta = student_states(
                engine, lay_out(engine, [row]), gates.gates(), temperature=hot
            )[1].double()
            length, count = log_beta.shape[0], log_beta[0].numel()
            for t in range(length):
                age = (t - torch.arange(t + 1)).double()[:, None, None]
                s = (age * log_beta[: t + 1]).exp().sum(0)
                kept.append(s.mean())
                if scope == "global":
                    most = max((t + 1) * count - budget * count, 1)
                    terms.append((s.sum() - budget * count).clamp(min=0) / most)
                else:
                    terms.append(((s - budget).clamp(min=0) / max(t + 1 - budget, 1)).mean())
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


# Training of write gates (WG-KV, arXiv 2512.17452) against transformers and plain loops.


WINDOW = 5
FLOOR = 1e-3
WRITE_PICTURE = [6, ("image", 32, 16), 9]
NAMES = slow_but({"qwen3"}, ["qwen3", "llama_biased", "qwen2"], "compares with transformers")


def write_lively(engine: Runtime, seed: int = 0) -> TrainableWriteGates:
    """Return gates that spread over 0 to 1, some below the floor, no gain or bias like another."""
    made = TrainableWriteGates(engine.spec, d_gate=12, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        made.readout.weight.mul_(25)
        made.readout.bias.sub_(2)
        for gain in (made.norm.before, made.norm.after):
            gain.add_(0.3 * torch.randn(gain.shape, generator=generator))
    return made


class ByTransformers:
    """The definition: transformers' model in float64, its attention masked by log m_ij.

    Args:
        tensors: what a gate file holds, in float64; gradients flow to them.
        weigh: g ``[H, T]`` to the m of entries past the window.
    """

    def __init__(
        self, name: str, tensors: dict[str, Tensor], weigh: Callable[[Tensor], Tensor]
    ) -> None:
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            checkpoint(name), dtype=torch.float64, attn_implementation="eager"
        ).eval()
        self.group, self.tensors, self.weigh = CHECKPOINTS[name].group, tensors, weigh
        self.gates: list[Tensor] = []
        self.plain = False
        for layer in self.model.model.layers:
            layer.self_attn.register_forward_pre_hook(self.mask, with_kwargs=True)

    def gate(self, layer: int, pre: Tensor, post: Tensor) -> Tensor:
        """Compute g ``[H, T]`` of keys ``[H, T, D]``, head by head."""
        parts, found = self.tensors, []
        for h in range(pre.shape[0]):
            x = torch.cat(
                [
                    k / (k.square().mean(-1, keepdim=True) + 1e-6).sqrt() * parts[gain][layer]
                    for k, gain in ((pre[h], "norm.before"), (post[h], "norm.after"))
                ],
                -1,
            )
            first = f"layers.{layer}.linear1"
            hidden = x @ parts[f"{first}.weight"][h].T + parts[f"{first}.bias"][h]
            hidden = hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2)))
            z = hidden @ parts["readout.weight"][layer, h] + parts["readout.bias"][layer, h]
            found.append(1 / (1 + torch.exp(-z)))
        return torch.stack(found)

    def mask(self, module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        hidden = kwargs["hidden_states"]
        steps = hidden.shape[1]
        age = torch.arange(steps)[:, None] - torch.arange(steps)
        mask = torch.zeros(steps, steps, dtype=torch.float64).masked_fill(age < 0, -math.inf)
        if not self.plain:
            key = module.k_proj(hidden).view(1, steps, -1, module.head_dim)
            key = getattr(module, "k_norm", lambda x: x)(key).transpose(1, 2)
            _, turned = apply_rotary_pos_emb(key, key, *kwargs["position_embeddings"])
            g = self.gate(module.layer_idx, key[0], turned[0])
            self.gates.append(g)
            m = torch.where(age < WINDOW, 1.0, self.weigh(g)[:, None])
            mask = (mask + m.log()).repeat_interleave(self.group, 0)
        return args, kwargs | {
            "attention_mask": mask[None] if mask.dim() == 3 else mask[None, None]
        }

    def read(self, ids: Tensor, plain: bool = False) -> tuple[Tensor, Tensor]:
        """Return the last hidden states ``[T, d]`` and g ``[L, H, T]`` of one document."""
        self.gates, self.plain = [], plain
        states = self.model.model(input_ids=ids).last_hidden_state[0]
        return states, torch.stack(self.gates) if self.gates else states


@pytest.mark.parametrize("name", NAMES)
def test_loss_and_gradients_are_the_papers(name: str) -> None:
    """Section 3.3 over two documents of one batch, and what the released code adds to it."""
    engine = load(name)
    rows = [make_turn(name, [length], seed) for length, seed in ((23, 1), (14, 2))]
    made, penalty = write_lively(engine), 0.7
    model = WriteGateModel(engine, made, WriteObjective(penalty, WINDOW))
    parts = model([{**row, "labels": row["input_ids"]} for row in rows])
    parts["loss"].backward()

    tensors = {n: p.detach().double().requires_grad_() for n, p in made.named_parameters()}
    reference = ByTransformers(name, tensors, lambda g: g.clamp(min=FLOOR))
    squares, sparse, tokens, below = [], [], 0, 0
    for row in rows:
        ids = row["input_ids"]
        with torch.no_grad():
            teacher, _ = reference.read(ids, plain=True)
        student, g = reference.read(ids)
        squares.append((student - teacher).square().sum(0))
        length = ids.shape[1]
        for s in range(length):
            weight = 1 - min(1, WINDOW / (length - s))
            sparse.append(weight * (g[..., s] + g[..., s] * (1 - g[..., s])).mean())
        tokens, below = tokens + length, below + int((g < FLOOR).sum())
    assert below > 0, "no gate reaches the floor"
    distill = torch.stack(squares).sum() / tokens / engine.spec.hidden_size
    sparsity = torch.stack(sparse).sum() / tokens
    loss = distill + penalty * sparsity
    for got, want in ((parts["distill"], distill), (parts["sparsity"], sparsity)):
        assert want > 1e-3
        torch.testing.assert_close(got.double(), want.detach(), rtol=2e-4, atol=1e-6)
    torch.testing.assert_close(parts["loss"].detach().double(), loss.detach(), rtol=1e-4, atol=1e-6)
    wanted = torch.autograd.grad(loss, list(tensors.values()))
    for (label, parameter), want in zip(made.named_parameters(), wanted, strict=True):
        assert parameter.grad is not None and want.abs().max() > 0, label
        error = (parameter.grad.double() - want).abs().max() / want.abs().max()
        assert error < 2e-3, (label, error)


@pytest.mark.parametrize("name", NAMES)
def test_the_binary_pass_is_attention_to_what_stays(name: str) -> None:
    """The mask of section 4.2, threshold 0.1, in transformers' layers."""
    engine, made = load(name), write_lively(load(name), 3)
    row = make_turn(name, [26], 5)
    documents = lay_out(engine, [row])
    with torch.no_grad():
        states, log_g = write_gated_states(
            engine, documents, made.gates(), WINDOW, lambda log_g: binary(log_g, 0.1)
        )
        tensors = {n: t.double() for n, t in made.file_tensors().items()}
        reference = ByTransformers(name, tensors, lambda g: (g >= 0.1).double())
        want, g = reference.read(row["input_ids"])
        want = reference.model.lm_head(want)
    assert 0.2 < float((g >= 0.1).double().mean()) < 0.8
    torch.testing.assert_close(log_g.permute(1, 2, 0).exp().double(), g, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(engine.decoder.logits(states).double(), want, rtol=1e-3, atol=1e-3)


def test_what_held_out_runs_count() -> None:
    """Agreement with full attention at the answers, and the entries that stay, by plain loops."""
    engine, made = load("qwen3_vl"), write_lively(load("qwen3_vl"), 2)
    rows, found = [], []
    for seed in (1, 2):
        row = make_turn("qwen3_vl", WRITE_PICTURE, seed)
        labels = row["input_ids"][0].clone()
        labels[1:9], labels[12] = -100, -100  # two answers; nothing predicts the first token
        rows.append({**row, "labels": labels})
    with torch.no_grad():
        for row in rows:
            inputs = {n: x for n, x in row.items() if n != "labels"}
            documents = lay_out(engine, [inputs])
            full = full_attention_states(engine, documents)
            states, log_g = write_gated_states(
                engine, documents, made.gates(), WINDOW, lambda log_g: binary(log_g, 0.1)
            )
            ours, theirs = (engine.decoder.logits(x).log_softmax(-1) for x in (states, full))
            found.append((row["labels"], ours, theirs, log_g.exp(), documents.modality))
    got = HeldOutData(engine, rows).admit(made.gates(), WINDOW, 0.1)
    agree, kl, nll, admitted, kept, visual, total = [], [], [], 0, 0, 0, 0
    for labels, ours, theirs, g, modality in found:
        for t in range(1, len(labels)):
            if labels[t] != -100:
                a, b = ours[t - 1], theirs[t - 1]
                agree.append(float(a.argmax() == b.argmax()))
                kl.append(float(F.kl_div(a, b, reduction="sum", log_target=True)))
                nll.append(-float(a[labels[t]]))
        for t in range(len(g)):
            stays = (g[t] >= 0.1) | torch.tensor(len(g) - t <= WINDOW)
            admitted, kept = admitted + int((g[t] >= 0.1).sum()), kept + int(stays.sum())
            visual += int(stays.sum()) * bool(modality[t] > 0)
            total += g[t].numel()
    assert 0 < admitted < kept < total and visual > 0
    assert got["answers"] == 4 and got["exact"] == 0.0
    assert all(row["labels"][0] != -100 for row in rows), "the caller's stay"
    assert got["agreement"] == pytest.approx(sum(agree) / len(agree))
    assert got["kl"] == pytest.approx(sum(kl) / len(kl), rel=1e-3) and got["kl"] > 1e-3
    assert got["nll"] == pytest.approx(sum(nll) / len(nll), rel=1e-4)
    assert got["admitted"] == admitted / total and got["kept"] == kept / total
    assert got["visual_share"] == visual / kept


def test_write_recomputing_layers_changes_no_gradient() -> None:
    engine = load("qwen3_vl")
    row = make_turn("qwen3_vl", WRITE_PICTURE, 6)
    gradients = []
    for checkpointing in (False, True):
        made = write_lively(engine)
        model = WriteGateModel(engine, made, WriteObjective(0.1, WINDOW), checkpointing)
        model([{**row, "labels": row["input_ids"]}])["loss"].backward()
        gradients.append([p.grad for p in made.parameters()])
    for a, b in zip(*gradients, strict=True):
        assert a is not None and a.abs().sum() > 0
        torch.testing.assert_close(a, b)


def test_gates_start_in_the_middle() -> None:
    """Near 0.5, gains 1, every other parameter spread within 1 / sqrt(inputs)."""
    engine = load("qwen3")
    made = TrainableWriteGates(engine.spec, d_gate=24, seed=3)
    row = make_turn("qwen3", [30], 1)
    with torch.no_grad():
        _, log_g = write_gated_states(engine, lay_out(engine, [row]), made.gates(), 4)
    g = log_g.exp()
    assert g.min() > 0.3 and g.max() < 0.7 and g.std() > 1e-3
    size = engine.spec.head_dim
    for name, value in made.named_parameters():
        if name.startswith("norm."):
            assert torch.equal(value, torch.ones_like(value))
        else:
            limit = (24 if name.startswith("readout") else 2 * size) ** -0.5
            assert 0.7 * limit < value.abs().max() <= limit, name
    again = TrainableWriteGates(engine.spec, d_gate=24, seed=3).gates()
    assert again.fingerprint() == made.gates().fingerprint()
    assert TrainableWriteGates(engine.spec, 24, 4).gates().fingerprint() != again.fingerprint()


def test_options_of_another_method_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["--model", str(bundled_model()), "--data", "scenes:dense", "--output", str(tmp_path)]
    for arguments, words in (
        (["--method", "wgkv", "--scope", "head"], "--scope is an option of --method retention"),
        (["--window", "32"], "--window is an option of --method wgkv"),
        (["--method", "rank", "--loss", "kl"], "--loss is an option of --method retention, and"),
        (["--method", "gates"], "choose one of retention, rank, wgkv"),
        (["--method", "wgkv", "--threshold", "1.5"], "--threshold is 1.5; give 0 to 1"),
        (["--method", "wgkv", "--window", "0"], "--window is 0; give more than 0"),
    ):
        assert main([*common, *arguments]) == 1
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1 and words in lines[0], lines
    with pytest.raises(InputError, match="--budget is an option of --method retention and rank"):
        TrainingSettings.of("wgkv", model="m", output="o", budget=32.0)


@pytest.mark.slow(reason="a whole run of the command line: three steps and a held-out run")
def test_the_command_trains_write_gates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, model = tmp_path / "gates", str(bundled_model())
    arguments = [
        *("--method", "wgkv", "--model", model, "--data", "scenes:dense", "--output", str(folder)),
        *"--eval-data scenes:dense --eval-samples 1 --window 32 --d-gate 16 --steps 3".split(),
        *"--batch 2 --log-every 1 --save-every 2 --device cpu --dtype float32".split(),
        *"--eval-every 0 --store float16 --threads 1".split(),
    ]
    assert main(arguments) == 0, capsys.readouterr().err
    engine = Runtime.from_pretrained(model, policy="full", dtype="float32", device="cpu")
    gates = load_write_gates(folder, engine.spec)
    info = json.loads((folder / "gates.json").read_text())
    assert info["kind"] == "write" and info["settings"]["recipe"] == "wgkv" and gates.width == 16
    assert "budget" not in info["settings"] and info["settings"]["window"] == 32
    assert gates.layers[0].before.sub(1).abs().max() > 0, "nothing was trained"
    lines = [line for line in history(folder) if "loss" in line]
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert line["loss"] == pytest.approx(line["distill"] + 0.04 * line["sparsity"], abs=2e-4)
    # What the held-out run measured are the gates as the file holds them.
    held = examples(model, ["scenes:dense"], 1, 0, split="heldout")
    again = HeldOutData(engine, [held[0]]).admit(gates, 32, 0.1)
    results = {name.removeprefix("held_out_"): x for name, x in info["results"].items()}
    assert results == pytest.approx(again)
    assert (folder / "curve.png").stat().st_size > 5000
    card = ModelCard.load(folder / "README.md")
    assert "write-gates" in card.data.tags and "# Write gates for" in card.text
    assert "with W_local = 32 and tau = 0.1" in card.text and "--policy wgkv" in card.text
    assert "| lambda_sparse | 0.04 |" in card.text and "lambda_cap" not in card.text
    # It resumes, as any run of the program does.
    assert main([*arguments, "--resume"]) == 0
    assert load_write_gates(folder, engine.spec).fingerprint() == gates.fingerprint()
