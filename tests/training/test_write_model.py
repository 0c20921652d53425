"""Training of write gates (WG-KV, arXiv 2512.17452) against transformers and plain loops."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict
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
from mmkv.engine.model.gates import load_write_gates
from mmkv.engine.runtime import Runtime
from mmkv.resources import bundled_model
from mmkv.training.data.examples import examples
from mmkv.training.distill import main
from mmkv.training.folder import history
from mmkv.training.measure.teacher_forced import full_attention_states, lay_out
from mmkv.training.model import WriteGateModel, WriteObjective, backbone_digest, sparsity_loss
from mmkv.training.run import HeldOutData
from mmkv.training.settings import TrainingSettings
from mmkv.training.student import TrainableWriteGates, binary, write_gated_states
from tests.support.factories import CHECKPOINTS, checkpoint, make_turn
from tests.support.tiers import slow_but

WINDOW = 5
FLOOR = 1e-3
PICTURE = [6, ("image", 32, 16), 9]
NAMES = slow_but({"qwen3"}, ["qwen3", "llama_biased", "qwen2"], "compares with transformers")


def load(name: str) -> Runtime:
    return Runtime.from_pretrained(checkpoint(name), policy="full", dtype="float32", device="cpu")


def lively(engine: Runtime, seed: int = 0) -> TrainableWriteGates:
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
    made, penalty = lively(engine), 0.7
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
    engine, made = load(name), lively(load(name), 3)
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
    engine, made = load("qwen3_vl"), lively(load("qwen3_vl"), 2)
    rows, found = [], []
    for seed in (1, 2):
        row = make_turn("qwen3_vl", PICTURE, seed)
        labels = row["input_ids"][0].clone()
        labels[:9], labels[12] = -100, -100  # two answers
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
    assert got["agreement"] == pytest.approx(sum(agree) / len(agree))
    assert got["kl"] == pytest.approx(sum(kl) / len(kl), rel=1e-3) and got["kl"] > 1e-3
    assert got["nll"] == pytest.approx(sum(nll) / len(nll), rel=1e-4)
    assert got["admitted"] == admitted / total and got["kept"] == kept / total
    assert got["visual_share"] == visual / kept


def test_documents_laid_end_to_end_do_not_see_each_other() -> None:
    engine = load("qwen3_vl")
    rows = [make_turn("qwen3_vl", PICTURE, 4), make_turn("qwen3_vl", [11], 5)]
    gates = lively(engine).gates()
    with torch.no_grad():
        together, _ = write_gated_states(engine, lay_out(engine, rows), gates, WINDOW)
        apart = [write_gated_states(engine, lay_out(engine, [r]), gates, WINDOW)[0] for r in rows]
    torch.testing.assert_close(together, torch.cat(apart), rtol=1e-5, atol=1e-5)


def test_a_window_over_the_whole_document_changes_nothing() -> None:
    engine = load("qwen3_vl")
    documents = lay_out(engine, [make_turn("qwen3_vl", PICTURE, 3)])
    length, gates = documents.lengths[0], lively(engine).gates()
    full = full_attention_states(engine, documents)
    with torch.no_grad():
        whole, log_g = write_gated_states(engine, documents, gates, length)
        one_less, _ = write_gated_states(engine, documents, gates, length - 1)
    torch.testing.assert_close(whole, full, rtol=1e-4, atol=1e-4)
    assert (one_less[-1] - full[-1]).abs().max() > 1e-4
    torch.testing.assert_close(one_less[:-1], full[:-1], rtol=1e-4, atol=1e-4)
    assert float(sparsity_loss(log_g, [length], length)) == 0.0


def test_recomputing_layers_changes_no_gradient() -> None:
    engine = load("qwen3_vl")
    row = make_turn("qwen3_vl", PICTURE, 6)
    gradients = []
    for checkpointing in (False, True):
        made = lively(engine)
        model = WriteGateModel(engine, made, WriteObjective(0.1, WINDOW), checkpointing)
        model([{**row, "labels": row["input_ids"]}])["loss"].backward()
        gradients.append([p.grad for p in made.parameters()])
    for a, b in zip(*gradients, strict=True):
        assert a is not None and a.abs().sum() > 0
        torch.testing.assert_close(a, b)


def test_only_gates_are_trained() -> None:
    engine = load("qwen3_vl")
    before = backbone_digest(engine)
    row = make_turn("qwen3_vl", PICTURE, 6)
    model = WriteGateModel(engine, lively(engine), WriteObjective(1.0, WINDOW))
    assert {name.split(".")[0] for name, _ in model.named_parameters()} == {"gates"}
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    first = model([{**row, "labels": row["input_ids"]}])
    first["loss"].backward()
    optimizer.step()
    second = model([{**row, "labels": row["input_ids"]}])
    assert float(second["sparsity"]) < float(first["sparsity"])
    assert backbone_digest(engine) == before


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


def test_the_recipe_is_the_papers_numbers() -> None:
    """Appendix C and sections 3.3 and 5.2; window, lambda and width from the released code."""
    found = asdict(TrainingSettings.of("wgkv", model="m", output="o"))
    wanted = {
        "recipe": "wgkv",
        "method": "wgkv",
        "window": 256,
        "lambda_sparse": 0.04,
        "threshold": 0.1,
        "d_gate": 512,
        "lr": 1e-3,
        "schedule": "cosine",
        "warmup": 0.1,
        "weight_decay": 0.01,
        "clip": 0.0,
        "batch": 1,
        "accumulate": 1,
    }
    assert {name: found[name] for name in wanted} == wanted
    ours = asdict(TrainingSettings.of("mmkv", model="m", output="o"))
    assert {name for name in ours if found[name] != ours[name]} <= wanted.keys()


def test_options_of_another_method_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["--model", str(bundled_model()), "--data", "scenes:dense", "--output", str(tmp_path)]
    for arguments, words in (
        (["--method", "wgkv", "--scope", "head"], "--scope is an option of --method retention"),
        (["--window", "32"], "--window is an option of --method wgkv"),
        (["--method", "gates"], "choose one of retention, wgkv"),
        (["--method", "wgkv", "--threshold", "1.5"], "--threshold is 1.5; give 0 to 1"),
        (["--method", "wgkv", "--window", "0"], "--window is 0; give more than 0"),
    ):
        assert main([*common, *arguments]) == 1
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1 and words in lines[0], lines
    with pytest.raises(InputError, match="--budget is an option of --method retention"):
        TrainingSettings.of("wgkv", model="m", output="o", budget=32.0)


@pytest.mark.slow(reason="a whole run of the command line: three steps and a held-out run")
def test_the_command_trains_write_gates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, model = tmp_path / "gates", str(bundled_model())
    arguments = [
        *("--method", "wgkv", "--model", model, "--data", "scenes:dense", "--output", str(folder)),
        *"--eval-data scenes:dense --eval-samples 2 --window 32 --d-gate 16 --steps 3".split(),
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
    held = examples(model, ["scenes:dense"], 2, 0, split="heldout")
    again = HeldOutData(engine, [held[0], held[1]]).admit(gates, 32, 0.1)
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
