"""Training under compression: masks that are what the engine kept, losses by hand, whole runs."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from mmkv.cli.app import run
from mmkv.engine.backends.cuda.kernels.sample import Draw
from mmkv.engine.errors import InputError
from mmkv.engine.runtime import Runtime
from mmkv.resources import bundled_model
from mmkv.training import adapt as command_line
from mmkv.training import compressed
from mmkv.training.adapt_run import (
    REWARDS,
    AdaptSettings,
    adapt,
    load_compressed,
    question_of,
    soft_target_loss,
)
from mmkv.training.compressed import (
    CompressedModel,
    Visible,
    budget_of,
    moved,
    read_as_decoded,
    replies,
    with_replies,
)
from mmkv.training.data.examples import examples
from mmkv.training.folder import history
from mmkv.training.measure.teacher_forced import spans
from tests.support.dialogues import engine_of, folder_of, oracle_of, prefill_both, prompt
from tests.support.factories import checkpoint, join_turns
from tests.support.policies import EVICTING_KINDS, GATED
from tests.support.sessions import text_ids
from tests.support.tiers import long_but

for package in ("peft", "trl"):
    pytest.importorskip(package, reason="adapters need it: pip install 'mmkv[adapt]'")

MODEL = str(bundled_model())
CHUNK, BUDGET = 7, 6.0
EVERY = {"snapkv": 3}  # decode steps between evictions; else the policy's own
QUICK = [("dbtrimkv", "vl3"), ("snapkv", "text3"), ("dbtrimkv+8", "text3")]
MORE = [
    pytest.param(policy, model, marks=pytest.mark.long(reason="the other kinds of policy"))
    for model in ("vl3", "text3")
    for policy in [*EVICTING_KINDS, "dbtrimkv+8"]
    if (policy, model) not in QUICK
]


def compressed_of(folder: Path, policy: str) -> CompressedModel:
    """Return a model with an adapter that does nothing yet, under a policy with random gates."""
    gates = "random" if policy.partition("+")[0] in GATED else None
    settings = AdaptSettings(
        str(folder),
        "",
        policy=policy,
        gates=gates,
        prefill_chunk=CHUNK,
        rank=2,
        alpha=4,
        interval=EVERY.get(policy),
        dtype="float32",
        device="cpu",
    )
    return load_compressed(settings)


def disturb(model: Any) -> None:
    """Have an adapter change the model."""
    torch.manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.1)


@pytest.mark.parametrize(("policy", "model"), [*QUICK, *MORE])
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
        how = {"prefill_chunk": CHUNK, "evict_every": EVERY.get(policy)}
        engine = engine_of(folder, policy, BUDGET, **how)
        oracle = oracle_of(engine, folder, policy, BUDGET, **how)
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
    budget = budget_of(str(BUDGET), tokens)
    with (
        compressed.decoding() as engine,
        compressed.recorded(engine, budget, tokens) as session,
    ):
        found = torch.stack(read_as_decoded(session, compressed.turn(document), labels))
        seen = compressed.visible(session, tokens)
        assert session.evicted
    where = torch.tensor([*((labels >= 0).nonzero().flatten() - 1).tolist(), tokens - 1])
    with torch.no_grad():
        made = compressed.logits(compressed.model, document, where, seen)
        blind = compressed.logits(compressed.model, document, where, None)
    assert float((made - found).abs().max() / found.abs().max()) < 1e-4
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


def short_run(folder: Path, **changes: Any) -> AdaptSettings:
    """Return a run of two steps of one document, on the bundled model."""
    usual: dict[str, Any] = dict(
        model=MODEL,
        output=str(folder),
        budget="1/8",
        documents=1,
        group=3,
        max_reply=8,
        temperature=1.5,
        lr=3e-2,
        warmup=0.0,
        steps=2,
        save_every=1,
        dtype="float32",
        device="cpu",
    )
    return AdaptSettings(**(usual | changes))


def train(chosen: AdaptSettings) -> CompressedModel:
    """Train; dense dialogues are the shortest."""
    compressed = load_compressed(chosen)
    rows = examples(MODEL, ["scenes:dense"], 10_000, chosen.seed)
    adapt(chosen, compressed, rows, command_line.trainer_of(chosen.method))
    return compressed


def test_groups_are_normalised_and_cut_off_replies_teach_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rewards 1, 0, 0, 0 with the last reply cut off, though what it says is right: mean 1/4,
    standard deviation 1/2, so advantages 1.5, -0.5, -0.5 and 0; the gradient is that of their
    weighted log-probabilities.
    """
    from mmkv.training import grpo

    chosen = short_run(tmp_path, method="grpo", group=4, epsilon=0.3)
    compressed = load_compressed(chosen)
    data = examples(MODEL, ["scenes:dense"], 10, 0)
    trainer = grpo.grpo_trainer(compressed, chosen, data, [])
    eos = compressed.teacher.family.eos_token_ids
    question = question_of(data[0], 0, eos)
    ends, most = list(eos)[:1], chosen.max_reply
    ids = [[*question.answer, *ends], [20, *ends], [21, 22, *ends], [23] * most]
    tokens = question.start + most
    until = torch.full((6, 3, tokens), tokens, dtype=torch.int32)
    until[:, 0, 5:20] = question.start  # an early part was gone before the reply
    visible = Visible(until, compressed.spec.entry_index)

    def said(some: Sequence[int]) -> str:
        return " ".join(map(str, some))

    right, draws = (said(question.answer), said(ids[-1])), list[Draw]()
    with monkeypatch.context() as patch:
        patch.setattr(grpo, "replies", lambda *given: (draws.extend(given[-1]), ids)[1])
        patch.setitem(REWARDS, "exact", lambda reply, answer: reply in right and answer == right[0])
        drawn = grpo.draw_replies(compressed, question, range(4), chosen, said)
    assert [one.visible.until.shape[2] - question.start for one in drawn] == [*map(len, ids)]
    assert [(one.seed, one.temperature) for one in draws] == [(seed, 1.5) for seed in range(4)]
    assert [(one.reward, one.complete) for one in drawn] == [(1, 1), (0, 1), (0, 1), (0, 0)]
    made = [replace(one, visible=visible) for one in drawn]
    seeds: list[int] = []

    def draw(_: Any, asked: Any, given: Sequence[int], *__: Any) -> list[Any]:
        assert asked.start == question_of(data[asked_for[-1]], asked_for[-1], eos).start
        seeds.extend(given)
        asked_for.pop()
        return made[: len(given)]

    trainer.draw, asked_for = draw, [1, 2, 0]
    rolled = trainer._roll_out(["0"] * 4, trainer)
    assert rolled["right"] == [1, 0, 0, 0] and trainer._metrics["train"]["cut_off"] == [1 / 4]
    assert rolled["prompt_ids"] == [question.inputs["input_ids"][0, : question.start].tolist()] * 4
    trainer.state.global_step = 1
    trainer._roll_out(["2", "2", "1", "1"], trainer)
    assert len(set(seeds)) == 8 and trainer.args.epsilon == 0.3
    trainer.state.global_step = 0
    trainer.draw = lambda *_: made
    disturb(compressed.model)
    held = [layer.get_base_layer().weight for layer, _ in compressed._lora]
    before = [weight.clone() for weight in held]
    with compressed.decoding():
        assert not any(map(torch.equal, held, before))
    assert all(map(torch.equal, held, before))  # bit for bit, however often they decode
    trainer.model.train()
    batch = trainer._generate_and_score_completions([{"prompt": "0"} for _ in made])
    wanted = torch.tensor([1.5, -0.5, -0.5, 0.0])
    torch.testing.assert_close(batch["advantages"], wanted, atol=1e-3, rtol=0)
    trainer.current_gradient_accumulation_steps = 1
    trainer._compute_loss(trainer.model, batch).backward()
    learned = {n: p for n, p in compressed.model.named_parameters() if p.grad is not None}
    found = {name: parameter.grad.clone() for name, parameter in learned.items()}
    assert found and all("lora" in name for name in found)
    compressed.model.zero_grad()
    total = torch.zeros(())
    for advantage, rollout in zip(batch["advantages"], made[:3], strict=False):
        never = compressed.teacher.never_chosen
        logits = grpo.reply_logits(compressed, compressed.model, rollout, never)
        assert never.numel() and bool((logits[:, never] == -torch.inf).all())
        log_p = (logits / 1.5).log_softmax(-1)[range(len(rollout.ids)), rollout.ids]
        total = total - advantage * log_p.mean() / 4
    total.backward()
    for name, parameter in learned.items():
        assert parameter.grad is not None
        torch.testing.assert_close(found[name], parameter.grad, atol=1e-6, rtol=1e-3)


@pytest.mark.parametrize("method", long_but(["grpo"], ["distill", "grpo"], "four runs"))
def test_a_resumed_run_ends_in_the_same_bytes_and_mmkv_runs_what_it_saved(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The bundled model answers these alike; what is rewarded has to differ.
    monkeypatch.setitem(REWARDS, "exact", lambda reply, _: sum(map(ord, reply)) % 2 == 0)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    how: dict[str, Any] = {"method": method, "temperature": 2.5}
    compressed = train(short_run(whole, **how))
    shutil.copytree(whole, cut)
    # As after a kill past the first step.
    shutil.rmtree(cut / "checkpoint-2")
    (cut / "adapter_model.safetensors").unlink()
    train(short_run(cut, **how, resume=True))
    first, second = ((folder / "adapter_model.safetensors").read_bytes() for folder in (whole, cut))
    assert first == second
    lines = [line for line in history(cut) if "loss" in line]
    assert [line["step"] for line in lines] == [1, 2]
    assert method == "grpo" or all(line["held"] > 1 for line in lines)
    ups = [
        x for name, x in load_file(whole / "adapter_model.safetensors").items() if "lora_B" in name
    ]
    assert any(bool(x.any()) for x in ups), "nothing was learned"
    if method == "grpo":
        return
    ids = torch.arange(20, 40)[None]
    merged = Runtime.from_pretrained(MODEL, adapter=whole, policy="full", device="cpu")
    found = []
    for engine in (compressed.teacher, merged):
        with engine.session() as session:
            found.append(session.prefill({"input_ids": ids}))
    with compressed.decoding() as engine, engine.session() as session:
        trained = session.prefill({"input_ids": ids})
    before, read = found
    # What is merged is rounded to the checkpoint's bfloat16.
    assert float((read - trained).abs().max()) < 0.05 * float((before - trained).abs().max())
    card = (whole / "README.md").read_text()
    assert f"mmkv chat {MODEL} --adapter THIS_FOLDER --policy dbtrimkv" in card


def test_a_model_that_was_trained_whole_is_a_folder_of_its_own(tmp_path: Path) -> None:
    """Nothing of the teacher moves, what is saved is what was trained, and a chat runs on it."""
    chosen = short_run(tmp_path, full=True, steps=1, replies="data", lr=1e-4)
    compressed = train(chosen)
    ids = {"input_ids": torch.arange(20, 40)[None]}
    saved, base = (
        Runtime.from_pretrained(name, policy="full", device="cpu") for name in (tmp_path, MODEL)
    )
    found = []
    with compressed.decoding() as engine:
        for each in (engine, saved, compressed.teacher, base):
            with each.session() as session:
                found.append(session.prefill(ids))
    torch.testing.assert_close(found[0], found[1], atol=1e-4, rtol=0)
    torch.testing.assert_close(found[2], found[3], atol=1e-4, rtol=0)
    taught = compressed.teacher_logits(ids, torch.tensor([19])).float()
    torch.testing.assert_close(taught.view(-1), found[3], atol=1e-4, rtol=0)
    assert float((found[1] - found[3]).abs().max()) > 1e-3
    assert run(["chat", str(tmp_path), "-p", "hello", "--max-new-tokens", "2", "-q"]) == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--budget", "none"], "--budget is 'none'; give entries"),
        (["--budget", "1e400"], "--budget is '1e400'; give entries"),
        (["--policy", "full"], "'full' keeps everything; choose one that evicts"),
        (["--policy", "fastv"], "drops tokens inside the layers"),
        (["--method", "sft"], "--method is 'sft'; choose one of distill, grpo"),
        (["--group", "1"], "--group is 1; give 2 or more"),
        (["--target", "q"], "--target 'q': this model's matrices are down_proj, gate_proj"),
        (["--method", "grpo", "--epsilon", "1"], "--epsilon is 1.0; give a number between 0 and 1"),
        (["--lr", "nan"], "--lr is nan; give a finite number above 0"),
        (["--reward", "number"], "--reward is not read by this run (--method distill"),
        (
            ["--full", "--target", "q_proj"],
            "--target is not read by this run (--method distill, --f",
        ),
    ],
)
def test_mistakes_get_one_line(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--model", MODEL, "--data", "scenes:dense", "--output", str(tmp_path / "out")]
    assert command_line.main([*asked, *arguments]) == 1
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "trl" else find(name)
    )
    command_line.require_packages("distill")
    with pytest.raises(InputError, match=r"grpo needs trl: pip install 'mmkv\[adapt\]'"):
        command_line.require_packages("grpo")


def test_a_budget_is_entries_or_a_share_below_one() -> None:
    """One entry is no share: the whole document would be kept, and nothing be trained."""
    texts = ["64", "1", "1.5", "1/16", "0.5", "1/1000"]
    assert [budget_of(text, 160).value for text in texts] == [64, 1, 1.5, 10, 80, 1]


def test_a_reply_ends_at_its_end_or_at_its_length() -> None:
    engine = Runtime.from_pretrained(MODEL, policy="full", dtype="float32", device="cpu")
    greedy = [Draw(temperature=0.0, seed=1)]
    with engine.session() as session:
        logits = session.prefill({"input_ids": torch.arange(20, 40)[None]})
        wanted, step = [], logits
        with session.fork() as free:
            for _ in range(4):
                wanted.append(int(step.argmax()))
                step = free.decode(wanted[-1])
        for most, ends, count in ((4, (), 4), (1, (), 1), (4, wanted[:1], 1)):
            with session.fork() as one:
                (found,) = replies(engine, [one], logits[None], most, ends, greedy)
            assert found == wanted[:count]
        assert engine.never_chosen.numel() and torch.isfinite(logits).all()


def test_replies_of_the_teacher_follow_each_other_and_later_pictures_stay(tmp_path: Path) -> None:
    compressed = load_compressed(short_run(tmp_path))
    ids, labels = torch.arange(20, 40)[None], torch.full((1, 20), -100)
    for start, stop in ((5, 8), (9, 15)):  # without an end: as many tokens as there are
        labels[0, start:stop] = ids[0, start:stop]
    found = compressed.answered({"input_ids": ids, "labels": labels}, 8, 0.0, 1)
    wanted, step = [], torch.zeros(())
    with compressed.teacher.session() as session:
        for token, label in zip(ids[0].tolist(), labels[0].tolist(), strict=True):
            wanted.append(token if label < 0 else int(step.argmax()))
            step = session.prefill({"input_ids": torch.tensor([wanted[-1:]])})
    assert found["input_ids"].tolist() == [wanted] and wanted != ids[0].tolist()
    part = compressed.turn({"input_ids": ids}).part(8, 12)  # behind a reply that is shorter
    made = moved(part, SimpleNamespace(next_position=6))
    assert (made.positions[0].tolist(), made.next_position) == ([6, 7, 8, 9], 10)
    example = examples(MODEL, ["scenes:dense"], 1, 0)[0]
    own = spans(example["labels"][0].tolist())
    tokens = example["input_ids"].shape[1]
    for (start, stop), whole in ((own[0], True), (own[-1], False)):
        made = compressed.up_to(example, start, stop, [21, 22])["input_ids"][0]
        assert len(made) == (tokens - (stop - start) + 2 if whole else start + 2)
        assert made[start : start + 2].tolist() == [21, 22]


def test_replies_are_put_in_and_labels_are_theirs_alone() -> None:
    ids, labels = torch.arange(10)[None], torch.tensor([[-100, 1, 2, -100, 4, 5, -100, 7, -100, 9]])
    types = torch.arange(10)[None] % 3
    inputs = {"input_ids": ids, "labels": labels, "mm_token_type_ids": types, "more": 1}
    made = with_replies(inputs, [(1, 3, [21]), (4, 6, [24, 25, 26])])
    assert made["input_ids"].tolist() == [[0, 21, 3, 24, 25, 26, 6, 7, 8, 9]]
    assert made["labels"].tolist() == [[-100, 21, -100, 24, 25, 26, -100, -100, -100, -100]]
    assert made["mm_token_type_ids"].tolist() == [[0, 0, 0, 0, 0, 0, 0, 1, 2, 0]]
    assert made["more"] == 1


def test_rewards_by_hand() -> None:
    cases = [("exact", " 12", "12 ", True), ("exact", "12.", "12", False)]
    cases += [("contains", "it is 12.", "12", True), ("contains", "1 2", "12", False)]
    cases += [("number", "so 3 + 4 = 1,007.0", "1007", True), ("number", "none", "7", False)]
    for name, reply, answer, right in cases:
        assert REWARDS[name](reply, answer) is right, (name, reply)


def test_a_question_ends_where_its_document_says() -> None:
    """Without an end token of the model, the token behind the answer ends a reply."""
    ids = torch.tensor([[1, 2, 3, 4, 5, 6, 9]])
    labels = torch.tensor([[-100, -100, 3, 4, -100, -100, -100]])
    found = question_of({"input_ids": ids, "labels": labels}, 0, (9,))
    assert (found.start, found.stop, found.ends, found.answer) == (2, 4, (9, 5), [3, 4])
    labels[0, 0] = 1  # as of a text: no token predicts the first one
    assert question_of({"input_ids": ids, "labels": labels}, 0, (9,)).labels.tolist() == [-100] * 2
    assert labels[0, 0] == 1
    labels = torch.tensor([[-100, -100, -100, -100, -100, 6, 9]])
    found = question_of({"input_ids": ids, "labels": labels}, 0, (9,))
    assert (found.ends, found.answer) == ((9,), [6])
    for none in ([-100] * 7, [-100] * 6 + [9]):  # an end alone is no reply
        with pytest.raises(InputError, match="no reply with an end"):
            question_of({"input_ids": ids, "labels": torch.tensor([none])}, 0, (9,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_is_trained_in_the_numbers_asked_for(dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    model, _ = compressed._load(str(checkpoint("qwen3")), name, torch.device("cpu"))
    assert {one.dtype for one in model.parameters()} == {dtype}
    assert not any(one.requires_grad for one in model.parameters())
