"""Gates trained on the order of future attention: worth against transformers, the loss, runs."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file

from mmkv.engine import paths
from mmkv.engine.model.gates import load_gates, make_random_gates
from mmkv.engine.runtime import Runtime
from mmkv.resources import bundled_model
from mmkv.training.data.examples import examples
from mmkv.training.distill import main
from mmkv.training.folder import history
from mmkv.training.measure.teacher_forced import full_attention_states, lay_out
from mmkv.training.rank import (
    RankModel,
    drawn_cuts,
    future_worth,
    head_scales,
    overlap,
    rank_loss,
    watched_states,
)
from mmkv.training.run import HeldOutData, summary
from mmkv.training.student import TrainableGates
from tests.support.factories import CHECKPOINTS, checkpoint, make_turn

PICTURE = [6, ("image", 32, 16), 9, ("image", 32, 32), 7]


def load(name: str) -> Runtime:
    return Runtime.from_pretrained(checkpoint(name), policy="full", dtype="float32", device="cpu")


@pytest.mark.parametrize("window", [0, 5])
def test_worth_is_how_far_outputs_move_without_the_entry(window: int) -> None:
    """Documents with cuts of their own; transformers' weights in float64, without each entry."""
    engine = load("qwen3")
    rows, cuts = [make_turn("qwen3", [11], 1), make_turn("qwen3", [17], 2)], [[4], [2, 9, 14]]
    documents = lay_out(engine, rows)
    scale = torch.rand(engine.spec.rows) + 1
    states, worth = watched_states(engine, documents, cuts, window, scale)
    torch.testing.assert_close(states, full_attention_states(engine, documents))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint("qwen3"), dtype=torch.float64, attn_implementation="eager"
    ).eval()
    group = CHECKPOINTS["qwen3"].group
    for row, own, found in zip(rows, cuts, worth, strict=True):
        with torch.no_grad():
            made = model(input_ids=row["input_ids"], output_attentions=True, use_cache=True)
        weights = torch.cat([layer[0] for layer in made.attentions])  # [L Hq, T, T]
        values = torch.cat([layer.values[0] for layer in made.past_key_values.layers])
        values = values.repeat_interleave(group, 0)
        moved = torch.zeros_like(weights)
        for entry in range(weights.shape[-1]):
            left = weights.clone()
            left[..., entry] = 0
            left /= left.sum(-1, keepdim=True)
            moved[..., entry] = (left @ values - weights @ values).norm(dim=-1)
        moved = moved.unflatten(0, (-1, group)).amax(1)
        for cut, at in zip(own, found, strict=True):
            end = cut + 1 + window if window else row["input_ids"].numel()
            wanted = moved[:, cut + 1 : end, : cut + 1].amax(1) * scale[:, None]
            torch.testing.assert_close(at.double(), wanted, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_vl"])
def test_scales_are_the_gradients_of_drawn_predictions(name: str) -> None:
    """Transformers' gradients in float64, of the same draws; pictures' queries do not count."""
    engine = load(name)
    shapes = ([11], [17]) if name == "qwen3" else (PICTURE, [13])
    rows = [make_turn(name, shape, seed) for seed, shape in enumerate(shapes)]
    found = head_scales(engine, rows)
    torch.testing.assert_close(head_scales(engine, rows, checkpointing=True), found)
    kind = "CausalLM" if name == "qwen3" else "ImageTextToText"
    model = getattr(transformers, f"AutoModelFor{kind}").from_pretrained(
        checkpoint(name), dtype=torch.float64, attn_implementation="eager"
    )
    given: list[torch.Tensor] = []
    for layer in model.get_decoder().layers:
        layer.self_attn.o_proj.register_forward_pre_hook(
            lambda _, args: (args[0].retain_grad(), given.append(args[0]))[0]
        )
    generator, total = torch.Generator().manual_seed(0), torch.zeros(0)
    for row in rows:
        given.clear()
        logits = model(**row).logits[0]
        text = lay_out(engine, [row]).modality == 0
        chances = logits[text].float().softmax(-1).detach()
        drawn = torch.multinomial(chances, 1, generator=generator)
        logits[text].log_softmax(-1).gather(1, drawn).sum().backward()
        grads = torch.stack([x.grad[0, text] for x in given if x.grad is not None])
        squares = grads.unflatten(2, (engine.spec.num_kv_heads, -1)).square().sum((1, 3))
        total = total + squares if total.numel() else squares
    torch.testing.assert_close(found.double(), total.sqrt().flatten(), rtol=1e-4, atol=0)
    assert float(found.max() / found.min()) > 1.05  # rows differ
    assert torch.equal(head_scales(engine, []), torch.ones_like(found))


def test_worth_comes_from_the_queries_that_count_in_any_blocks() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(n, 40, 8, generator=generator) for n in (4, 2, 2))
    asking = torch.zeros(40, dtype=torch.bool)
    asking[[12, 13, 20, 33, 39]] = True
    usual = query, key, value, asking, [11, 25]
    wanted = future_worth(*usual, 0.4)
    for one, other in zip(future_worth(*usual, 0.4, block=2), wanted, strict=True):
        torch.testing.assert_close(one, other)
    assert [at.shape for at in wanted] == [(2, 12), (2, 26)] and float(wanted[0].min()) > 0
    # Another query than these changes nothing; one of them does.
    for token, same in ((14, True), (20, False)):
        query[:, token] += 3
        assert torch.equal(future_worth(*usual, 0.4)[0], wanted[0]) == same
    assert not future_worth(query, key, value, asking[:0].new_zeros(40), [11], 0.4)[0].any()


def test_the_rank_term_puts_entries_in_the_order_of_their_worth() -> None:
    """Its mean over draws against all pairs and every K; descent ends in the teacher's order."""
    generator = torch.Generator().manual_seed(1)
    log_beta = -torch.rand(2, 4, generator=generator).exp()
    worth = torch.rand(2, 4, generator=generator)
    order = worth.flatten().argsort(descending=True).tolist()
    age = torch.tensor([4.0, 3.0, 2.0, 1.0])
    score, value = (x.flatten().tolist() for x in (-(age * -log_beta).log(), worth))
    total = 0.0
    steps = 4000  # of the integral over K = 4 ** u entries kept
    for step in range(steps):
        kept = 4 ** ((step + 0.5) / steps)
        for place in range(math.ceil(kept)):
            high = order[place]
            chance = min(1.0, kept - place) / kept
            lows = order[int(kept) :]
            for low in lows:
                weight = max(0.0, 1 - value[low] / value[high])
                costs = weight * math.log1p(math.exp(score[low] - score[high]))
                total += chance / len(lows) * costs / steps
    torch.manual_seed(0)
    found = rank_loss(log_beta, worth, pairs=200_000)
    assert float(found) == pytest.approx(total, rel=0.02)

    z = torch.zeros(2, 4, requires_grad=True)
    optimizer = torch.optim.Adam([z], 0.1)
    for _ in range(150):
        optimizer.zero_grad()
        rank_loss(F.logsigmoid(z), worth, pairs=256).backward()
        optimizer.step()
    learned = (age * F.logsigmoid(z.detach())).flatten().argsort(descending=True)
    assert learned[:4].tolist() == order[:4]


def test_entries_that_nothing_asks_for_cost_nothing() -> None:
    log_beta = -torch.rand(2, 5).exp()
    assert float(rank_loss(log_beta, torch.zeros(2, 5))) == 0


def test_the_overlap_counts_what_a_budget_would_keep() -> None:
    # By age 3, 2, 1 times -log_beta, the lowest first: (0, 2), (1, 0), (1, 2), (0, 1), ...
    log_beta = -torch.tensor([[5.0, 2.0, 0.1], [0.2, 4.0, 1.0]])
    worth = torch.tensor([[1.0, 0.9, 0.8], [0.7, 0.2, 0.1]])
    assert overlap(log_beta, worth, 1 / 6) == 0  # (0, 2) for (0, 0)
    assert overlap(log_beta, worth, 4 / 6) == 0.75  # (1, 2) for (0, 0)
    assert overlap(log_beta, worth, 1.0) == 1


def test_cuts_lie_between_the_first_part_and_the_last_token() -> None:
    torch.manual_seed(0)
    drawn = {cut for _ in range(200) for cut in drawn_cuts(16, 6, 1 / 8)}
    assert drawn == set(range(2, 15))
    assert drawn_cuts(1, 6, 1 / 8) == [0]


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_5", "llama"])
def test_gates_alone_learn_of_pictures_states_and_texts(name: str) -> None:
    """Their input is what the engine's gates read; every parameter moves, no weight does."""
    engine = load(name)
    gates = TrainableGates(engine.spec, d_gate=24, bias=1.0)
    shape = PICTURE if engine.family.has_vision else [40]
    torch.manual_seed(0)
    found = RankModel(engine, gates, torch.rand(engine.spec.rows) + 1, cuts=3)(
        [make_turn(name, shape, seed) for seed in (1, 2)]
    )
    found["loss"].backward()
    assert float(found["rank"]) > 0 and torch.equal(found["loss"].detach(), found["rank"])
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in gates.parameters())
    assert all(p.grad is None for p in engine.family.hf.parameters())
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():  # a mean over cuts and documents
        patch.setattr("mmkv.training.rank.rank_loss", lambda *_: torch.tensor(0.25))
        one = RankModel(engine, gates, torch.ones(engine.spec.rows), cuts=3)
        assert one([make_turn(name, shape, 1)])["loss"] == 0.25

    said, turn = [], make_turn(name, shape, 1)
    watched_states(
        engine,
        lay_out(engine, [turn]),
        [[5]],
        0,
        read=lambda entry, x: said.append(gates.gates().log_beta(entry, x)),
    )
    own = Runtime.from_pretrained(
        checkpoint(name), policy="dbtrimkv", gates="random", budget=1e6, dtype="float32"
    )
    own.decoder.gates = gates.gates()
    with torch.inference_mode(), own.session() as session:
        session.extend(own.family.turn(turn, 0, own.device))
        live = own.cache.entries(session.seq)
        theirs = own.cache.pool.log_beta.flatten()[live.slot]
    theirs = theirs.view(-1, turn["input_ids"].numel())
    ours = torch.stack(said, 1).flatten(1).T
    torch.testing.assert_close(ours, theirs)


@pytest.mark.slow(reason="two runs of the command line: 16 steps, and one that starts from them")
def test_the_command_makes_gates_that_help_and_another_run_starts_from_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model goes by a name, as one that was pulled does."""
    monkeypatch.setattr(paths, "named_model", {"drawn": bundled_model()}.get)
    model, folder, next_folder = "drawn", tmp_path / "rank", tmp_path / "next"
    common = f"--model {model} --data scenes:dense --max-length 512 --d-gate 48 --device cpu"
    common += " --dtype float32 --threads 1"
    ranked = f"--method rank --steps 16 --cuts 4 --lr 6e-3 --log-every 8 --output {folder}"
    assert main([*common.split(), *ranked.split()]) == 0, capsys.readouterr().err
    engine = Runtime.from_pretrained(model, policy="full", dtype="float32", device="cpu")
    held = examples(model, ["scenes:dense"], 3, 0, split="heldout")
    data = HeldOutData(engine, [held[index] for index in range(3)])
    kl = {
        name: summary(data.read(gates, policy, 32))["kl"]
        for name, gates, policy in (
            ("ranked", load_gates(folder, engine.spec), "dbtrimkv"),
            ("random", make_random_gates(engine.spec, 1), "dbtrimkv"),
            ("recency", None, "streamingllm"),
        )
    }
    assert kl["ranked"] < 0.3 * min(kl["random"], kl["recency"]), kl
    asked = json.loads((folder / "gates.json").read_text())["settings"]
    assert asked["method"] == asked["recipe"] == "rank" and "lambda_cap" not in asked
    lines = [line for line in history(folder) if "loss" in line]
    assert lines[-1]["overlap"] > lines[0]["overlap"] and lines[-1]["rank"] < lines[0]["rank"]
    assert "dbtrimkv --budget" in (folder / "README.md").read_text()

    start = f"--init {folder} --steps 1 --lr 1e-9 --eval-every 0 --budget 64 --output {next_folder}"
    assert main([*common.split(), *start.split()]) == 0, capsys.readouterr().err
    first, second = (load_file(x / "gates.safetensors") for x in (folder, next_folder))
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor, rtol=0, atol=1e-7)
    for wrong, words in (
        ("--d-gate 24", "give the --d-gate and --tying that they were trained with"),
        ("--gate rg --tying none", "the gates of --init are tied, and this run trains rg; give"),
    ):
        given = f"{common} --init {folder} --output {tmp_path / 'no'} {wrong}".split()
        capsys.readouterr()
        assert main(given) == 1
        assert words in capsys.readouterr().err


@pytest.mark.parametrize("gate", ["tied", "rg", "rg10"])
def test_a_run_starts_from_gates_of_each_layout(gate: str) -> None:
    spec = load("qwen3").spec
    tying = "none" if gate == "rg" else "paper"
    one, other = (TrainableGates(spec, 24, tying, seed=seed, gate=gate) for seed in (1, 2))
    x = torch.randn(5, spec.hidden_size)
    wanted = one.built(one.file_tensors()).logits(1, x)
    assert not torch.allclose(other.gates().logits(1, x), wanted)
    other.start_from(one.built(one.file_tensors()))
    torch.testing.assert_close(other.gates().logits(1, x), wanted, rtol=0, atol=0)
