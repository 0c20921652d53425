"""Distillation runs: gates that help under real eviction, resuming, processes, mistakes."""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import asdict, fields, replace
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
from huggingface_hub import ModelCard
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import TrainerState, TrainingArguments

from mmkv.cli.app import run
from mmkv.engine.errors import InputError
from mmkv.engine.model.fingerprint import fingerprint
from mmkv.engine.model.gates import load_gates, make_random_gates
from mmkv.engine.runtime import Runtime
from mmkv.resources import bundled_model
from mmkv.training import distill as command_line
from mmkv.training.data.examples import examples
from mmkv.training.distill import main
from mmkv.training.folder import ASKED, HISTORY, Stopping, begin, history, open_run, resume
from mmkv.training.model import PARTS
from mmkv.training.run import (
    HeldOut,
    HeldOutData,
    History,
    _arguments,
    _idle,
    _means,
    distill,
    load_backbone,
    own_device,
    summary,
    write_card,
)
from mmkv.training.settings import TrainingSettings
from tests.support.chat_models import save_qwen3_vl
from tests.training.data.test_conversations import lines

MODEL = str(bundled_model())


def short_run(folder: Path, **changes: Any) -> TrainingSettings:
    """Return a short run on the CPU in float32."""
    usual = dict(
        model=MODEL,
        output=str(folder),
        budget=24.0,
        d_gate=48,
        bias=8.0,
        lr=4e-3,
        steps=4,
        batch=2,
        device="cpu",
        dtype="float32",
        log_every=1,
        save_every=100,
        eval_every=0,
    )
    return TrainingSettings(**(usual | changes))


def train(chosen: TrainingSettings, draw: bool = False) -> tuple[Runtime, dict[str, Any]]:
    """Distil; dense dialogues are the shortest, and to draw a curve takes as long as two steps."""
    engine, source = load_backbone(chosen), "scenes:dense"
    data = examples(MODEL, [source], 10_000, chosen.seed)
    with nullcontext() if draw else mock.patch("mmkv.training.run.draw_curve"):
        return engine, distill(chosen, engine, data, [], [source])


def held_out(count: int) -> list[dict[str, Tensor]]:
    watched = examples(MODEL, ["scenes:sparse"], count, 0, split="heldout")
    return [watched[index] for index in range(count)]


@pytest.mark.slow(reason="the one test that shows a whole distillation to be worth it: 18 steps")
def test_a_short_distillation_beats_random_gates_and_recency(tmp_path: Path) -> None:
    """KL to the full cache on held-out dialogues, evicting at M = 64 of 370 to 600 tokens."""
    chosen = short_run(tmp_path, steps=18, batch=1, lr=1.2e-2)
    engine, described = train(chosen, draw=True)
    data = HeldOutData(engine, held_out(2))
    trained, untrained = load_gates(tmp_path, engine.spec), make_random_gates(engine.spec, 1)
    kl = {
        "trained": summary(data.read(trained, "dbtrimkv", 64))["kl"],
        "random": summary(data.read(untrained, "dbtrimkv", 64))["kl"],
        "recency": summary(data.read(None, "streamingllm", 64))["kl"],
    }
    assert kl["trained"] < 0.3 * min(kl["random"], kl["recency"]), kl
    config = (Path(MODEL) / "config.json").read_bytes()
    assert described["base_config_sha256"] == hashlib.sha256(config).hexdigest()
    assert described["base_fingerprint"] == fingerprint(described["base_model"])
    assert described["base_sha256"] and (tmp_path / "curve.png").stat().st_size > 5000
    card = (tmp_path / "README.md").read_text()
    assert described["base_sha256"] in card and "scenes:dense" in card


@pytest.mark.slow(reason="trains the gates for several steps")
@pytest.mark.parametrize(
    "changes",
    [
        {"least_budget": 8.0, "lambda_rank": 0.5},  # both draw in every step
        pytest.param({"method": "rank", "cuts": 2}, marks=pytest.mark.long(reason="by ranks")),
        pytest.param({"weights": "bf16"}, marks=pytest.mark.long(reason="again, rounded")),
    ],
)
def test_a_resumed_run_ends_where_an_uninterrupted_one_does(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    usual: dict[str, Any] = {"steps": 4, "save_every": 2, "batch": 1} | changes
    train(short_run(whole, **usual))
    shutil.copytree(whole, cut)
    # As after a kill in the fourth step: its checkpoint is not whole, and is passed over.
    (cut / "checkpoint-4" / "trainer_state.json").unlink()
    (cut / "gates.safetensors").unlink()
    train(short_run(cut, **usual, resume=True))
    first, second = (load_file(folder / "gates.safetensors") for folder in (whole, cut))
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=0, atol=0)
    # What was logged of steps 3 and 4 before the kill is not there twice.
    logged = [line for line in history(cut) if "loss" in line]
    assert [line["step"] for line in logged] == [1, 2, 3, 4]
    for line in logged if "kl" in logged[0] else ():  # parts of this step alone
        parts = (line[name] for name in ("kl", "ntp", "capacity"))
        made = sum(parts) + changes.get("lambda_rank", 0) * line["rank"]
        assert line["loss"] == pytest.approx(made, abs=2e-4)


def test_figures_of_held_out_data_come_every_so_often_and_at_the_end(tmp_path: Path) -> None:
    """And are found again by a run that is resumed after its end; none where Ctrl-C ends it."""
    state, none, stopping = TrainerState(max_steps=5), cast(Any, None), Stopping()
    made = HeldOut(lambda: {"kl": float(state.global_step)}, 2, tmp_path, stopping)
    assert made.latest() == {}
    for step in range(1, 6):
        state.global_step = step
        made.on_step_end(none, state, none)
    stopping.pressed, state.global_step = True, 4
    made.on_step_end(none, state, none)
    assert [line["step"] for line in history(tmp_path)] == [2, 4, 5]
    assert HeldOut(none, 0, tmp_path, stopping).latest() == {"held_out_kl": 5.0}


def test_means_are_of_tokens_but_for_answers_that_are_exact() -> None:
    first = SimpleNamespace(tokens=3, kl=1.5, nll=3.0, agree=2, right=True)
    second = SimpleNamespace(tokens=1, kl=0.5, nll=2.0, agree=0, right=False)
    wanted = {"kl": 0.5, "nll": 1.25, "agreement": 0.5, "exact": 0.5, "answers": 2}
    assert _means([first, second]) == wanted  # type: ignore[list-item]


def test_runs_do_not_mix(tmp_path: Path) -> None:
    def opened(**changes: Any) -> str | None:
        return open_run(short_run(tmp_path, **{"steps": 2, "batch": 1, **changes}), ["d"], {})

    assert opened() is None
    with pytest.raises(InputError, match="is a file; name a folder with --output"):
        open_run(short_run(tmp_path / "run.json"), ["d"], {})
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "checkpoint-2" / "trainer_state.json").write_text("{}")
    with pytest.raises(InputError, match=r"checkpoint-2 of an earlier run; .*--resume"):
        opened()
    for change in ({"bias": 3.0}, {"d_gate": 96}, {"seed": 9}, {"steps": 4}):
        option = next(iter(change)).replace("_", "-")
        with pytest.raises(InputError, match=f"--{option} is .*the run in .* has"):
            opened(**change, resume=True)
    assert opened(log_every=2, store="float16", resume=True) == str(tmp_path / "checkpoint-2")
    (tmp_path / ASKED).unlink()
    with pytest.raises(InputError, match="does not say what its run was asked"):
        opened(resume=True)


def test_each_process_takes_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert own_device("auto") == "auto"
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_RANK", "5")
    assert own_device("auto") == own_device("cuda") == "cuda:5"
    assert own_device("cpu") == "cpu" and own_device("cuda:1") == "cuda:1"


def test_several_gpus_do_not_split_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Trainer wraps a model in nn.DataParallel when its arguments count several GPUs."""
    monkeypatch.setattr(TrainingArguments, "_setup_devices", torch.device("cpu"))
    monkeypatch.setattr(TrainingArguments, "_n_gpu", 4, raising=False)
    made = _arguments(short_run(tmp_path, steps=10, warmup=0.25), tmp_path)
    assert made.n_gpu == 1 and made.warmup_steps == 3


@pytest.mark.long(reason="two processes train for twenty seconds")
@pytest.mark.slow(reason="three processes, a launcher with them, load torch and transformers")
def test_two_processes_give_the_loss_curve_of_one(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The one in this process."""
    common = [
        "--model",
        MODEL,
        *"--data scenes:dense --steps 3 --log-every 1 --budget 24 --d-gate 48 --bias 8".split(),
        *"--lr 4e-3 --device cpu --dtype float32 --threads 1".split(),
    ]
    distill = [sys.executable, "-m", "mmkv", "distill"]
    torchrun = [
        sys.executable,
        *"-m torch.distributed.run --nproc-per-node 2 --standalone --no-python".split(),
        *distill,
    ]
    curves = []
    for name, command in (("alone", None), ("torchrun", torchrun)):
        folder = tmp_path / name
        options = [*common, "--output", str(folder)]
        if command is None:
            code, said = main([*options, "--accumulate", "2"]), capfd.readouterr().err
        else:
            done = subprocess.run([*command, *options], capture_output=True, text=True)
            code, said = done.returncode, done.stderr
        assert code == 0, said[-2000:]
        lines = [json.loads(line) for line in (folder / HISTORY).read_text().splitlines()]
        shown = ("loss", *PARTS)
        curves.append(
            (
                [[line[part] for part in shown] for line in lines if "loss" in line],
                load_file(folder / "gates.safetensors"),
            )
        )
        assert said.count("saved gates in") == 1
        report = json.loads((folder / "run.json").read_text())
        assert report["processes"] == (1 if name == "alone" else 2)
    (one, gates), (two, others) = curves
    assert len(one) == len(two) == 3
    for left, right in zip(one, two, strict=True):
        assert left == pytest.approx(right, rel=1e-3, abs=2e-5)
    for name in gates:
        torch.testing.assert_close(gates[name], others[name], rtol=1e-3, atol=1e-5)


def test_gates_of_a_hybrid_model_hang_at_the_layers_with_entries(tmp_path: Path) -> None:
    model = save_qwen3_vl(tmp_path / "model", kind="qwen3_5")
    words = "what is two and two and three, and what follows from it"
    talk = [{"role": "user", "content": words}, {"role": "assistant", "content": words[::-1]}]
    (tmp_path / "talk.jsonl").write_text(json.dumps({"messages": talk}))
    chosen = short_run(
        tmp_path / "gates", model=str(model), d_gate=8, budget=2.0, lr=0.1, steps=3, gate_input="kv"
    )
    engine, source = load_backbone(chosen), f"chat:{tmp_path / 'talk.jsonl'}"
    distill(chosen, engine, examples(str(model), [source], 2, 0), [], [source])
    gates = load_gates(tmp_path / "gates", engine.spec)
    assert len(gates.layers) == engine.spec.entry_layers == 1 < engine.spec.num_layers
    losses = [line["loss"] for line in history(tmp_path / "gates") if "loss" in line]
    assert losses[-1] < losses[0]
    loaded = Runtime.from_pretrained(model, gates=tmp_path / "gates", budget=9, device="cpu")
    assert loaded.policy.name == "dbtrimkv"
    with loaded.session() as session:
        session.prefill({"input_ids": torch.arange(3, 40)})
        assert session.entries == 9 * loaded.spec.rows


def recipe_numbers(name: str) -> dict[str, Any]:
    return asdict(TrainingSettings.of(name, model="m", output="o"))


def test_recipes_are_the_papers_numbers() -> None:
    """TRIM-KV, section 5.1 and appendix B.1; DBTrimKV, section 5.1 and appendix B.1."""
    trimkv, dbtrimkv = recipe_numbers("trimkv"), recipe_numbers("dbtrimkv")
    both = {"lambda_cap": 1.0, "d_gate": 512, "lr": 2e-4, "batch": 1, "accumulate": 4}
    both |= {"epochs": 3.0, "clip": 1.0, "warmup": 0.0, "loss": "kl+ntp"}
    apart = {
        "budget": (512.0, 64.0),
        "bias": (8.0, 18.0),
        "weight_decay": (0.01, 1e-6),
        "schedule": ("linear", "cosine"),
        "gating": ("logit-scale", "log-bias"),
        "scope": ("head", "global"),
        "gate": ("rg", "rg10"),
        "tying": ("none", "paper"),
        "normaliser": ("tt", "relative"),
        "recipe": ("trimkv", "dbtrimkv"),
    }
    for name, value in both.items():
        assert trimkv[name] == dbtrimkv[name] == value, name
    for name, values in apart.items():
        assert (trimkv[name], dbtrimkv[name]) == values, name
    # And nothing else differs from the defaults, which say that they are this project's.
    ours = recipe_numbers("mmkv")
    for found in (trimkv, dbtrimkv):
        assert {name for name in ours if found[name] != ours[name]} <= both.keys() | apart.keys()
    # What this project has for numbers that no paper gives, as docs/how-to/train-gates.md says.
    own = {"recipe": "mmkv", "budget": 256.0, "accumulate": 1, "warmup": 0.03, "steps": 1000}
    own |= {"epochs": 0.0, "gate": "tied", "clip": 1.0, "seed": 0, "capacity_rates": 0}
    own |= {"held_out_budget": 0.0, "bias": 18.0}
    assert {name: ours[name] for name in own} == own


def test_epochs_are_steps_as_the_trainer_counts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """DBTrimKV's table 1: 3 x 779,289 rows, 16 a step. Two processes share the steps of a run."""
    made = TrainingSettings.of("dbtrimkv", model="m", output="o")
    assert made.for_rows(779_289, processes=4).steps == 146_118
    assert replace(made, epochs=1.5).for_rows(9 * 16 - 1, processes=4).steps == 14
    seen: list[tuple[int, int]] = []

    def stop(chosen: TrainingSettings, engine: object, train: Any, *_: object) -> None:
        seen.append((chosen.steps, len(train)))
        raise InputError("far enough")

    monkeypatch.setattr("mmkv.training.run.distill", stop)
    monkeypatch.setattr("mmkv.training.run.load_backbone", lambda _: None)
    rows = lines(tmp_path / "rows.jsonl", *[{"text": "a b c"}] * 9)
    given = ["--model", MODEL, "--data", f"text:{rows}", "--output", "o", "--recipe", "trimkv"]
    assert main([*given, "--epochs", "2"]) == main([*given, "--steps", "5"]) == 1
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(given) == 1
    assert seen == [(2 * 3, 24), (5, 20), (3 * 2, 48)]
    assert "3 epochs of 9 rows, 8 a step: 6 steps" in capsys.readouterr().err
    for more, words in (
        (["--steps", "3", "--epochs", "1"], "--steps and --epochs both say how long"),
        (["--pack"], "give --steps, or leave --pack out"),
        (["--epochs", "-1"], "--epochs is -1.0; give 0 or more"),
    ):
        assert main([*given, *more]) == 1 and words in capsys.readouterr().err


def run_settings(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> TrainingSettings:
    """Return what the command line makes of its arguments, without a run."""
    seen: list[TrainingSettings] = []

    def stop(chosen: TrainingSettings) -> Runtime:
        seen.append(chosen)
        raise InputError("far enough")

    monkeypatch.setattr("mmkv.training.run.load_backbone", stop)
    data = ["--model", MODEL, "--data", "scenes:dense", "--output", "unused"]
    assert main([*data, *arguments]) == 1
    return seen[0]


def test_options_override_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    one = run_settings(monkeypatch, "--recipe", "trimkv", "--lr", "1e-3")
    expected = recipe_numbers("trimkv") | {"lr": 1e-3, "model": MODEL, "output": "unused"}
    assert asdict(one) == expected
    # An option that is given at the default's value counts as given.
    two = run_settings(monkeypatch, "--recipe", "trimkv", "--bias", "18", "--tying", "none")
    assert two.bias == 18.0 and two.gating == "logit-scale"
    # The command line's own defaults are those of Settings: --help does not lie.
    three = asdict(run_settings(monkeypatch))
    assert three == recipe_numbers("mmkv") | {"model": MODEL, "output": "unused"}
    defaults = {name: p.default for name, p in signature(command_line.distill).parameters.items()}
    for name, value in three.items():
        assert name in ("model", "output") or defaults[name] == value, name


def test_the_card_says_what_decides_the_gates(tmp_path: Path) -> None:
    chosen = short_run(tmp_path, model="owner/name", held_out_budget=12.0)
    described = {
        "base_model": "owner/name",
        "base_sha256": "f00",
        "base_config_sha256": "ba5e",
        "base_dtype": "bfloat16",
        "command": "python -m mmkv.training.distill",
        "commit": None,
        "versions": {"mmkv": "9.9"},
        "settings": asdict(chosen),
        "data": ["2*scenes:dense"],
        "data_options": {"max_length": 777, "eval_data": ["held.jsonl"], "eval_samples": 5},
        "results": {"held_out_kl": 0.25},
    }
    write_card(tmp_path, described)
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.base_model == "owner/name" and card.data.library_name == "mmkv"
    for words in (
        "commit unknown",
        "`f00`",
        "`ba5e`",
        "- `2*scenes:dense`",
        "| max_length | 777 |",
        "- `held.jsonl`",
        "| eval_samples | 5 |",
        "at M = 12",
        "| held_out_kl | 0.25 |",
        "mmkv chat owner/name --gates THIS_FOLDER --policy dbtrimkv --budget 24",
    ):
        assert words in card.text, words
    write_card(tmp_path, described | {"base_model": str(tmp_path)})
    assert ModelCard.load(tmp_path / "README.md").data.base_model is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--data scenes:round", "dense, sparse, clip, stream"),
        ("--model /nowhere", "/nowhere"),
        ("--tying loose", "--tying"),
        ("--budget -3", "--budget"),
        ("--recipe paper", "choose one of mmkv, dbtrimkv, trimkv"),
        ("--gate rg", "--tying none"),
        ("--schedule step", "cosine, linear"),
        ("--resume", "no checkpoint"),
        ("--capacity-rates 2", "4 or more"),
        ("--log-every 0", "--log-every"),
        ("--threads -1", "--threads"),
        ("--threads 10000000", "or fewer"),
        ("--warmup 7", "--warmup"),
        ("--lambda-cap nan", "--lambda-cap"),
        ("--scope head --capacity-rates 8", "--scope head"),
        ("--data 0*scenes:dense", "weight"),
        ("--data /nowhere/chats.jsonl", "/nowhere/chats.jsonl"),
    ],
)
def test_mistakes_get_one_line(
    arguments: str, words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    given = ["--model", MODEL, "--output", str(tmp_path), "--device", "cpu"]
    data = [] if "--data" in arguments else ["--data", "scenes:dense"]
    for code, more, said in ((2, [], "--data"), (1, [*data, *arguments.split()], words)):
        capfd.readouterr()
        assert main([*given, *more]) == code
        lines = capfd.readouterr().err.splitlines()
        (line,) = [one for one in lines if one.startswith("mmkv.training.distill:")]
        assert said in line


# A run that teaches its gates nothing says so, once.


@pytest.mark.parametrize(
    ("norms", "said"),
    [([1e-6] * 5, 1), ([1e-6, 1e-6], 1), ([1e-6, 0.2, 1e-6], 0), ([], 0)],
    ids=["idle", "idle and short", "moves", "nothing logged"],
)
def test_gradients_next_to_nothing_are_said_once(
    norms: list[float], said: int, capsys: pytest.CaptureFixture[str]
) -> None:
    given: Any = None
    state = TrainerState(is_world_process_zero=True)
    callback = _idle(TrainingSettings(model="m", output="o"))
    for norm in norms:
        callback.on_log(given, state, given, {"grad_norm": norm})
    callback.on_train_end(given, state, given)
    err = capsys.readouterr().err
    assert err.count("learn next to nothing") == said
    assert ("--bias 10 --lr 3e-3 --lambda-cap 16 --d-gate 96" in err) == bool(said)


# Runs that cannot end well are refused before they start, and stopped ones can go on.


NUMBERS = sorted(f.name for f in fields(TrainingSettings) if isinstance(f.default, float))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(NUMBERS), st.sampled_from(["nan", "inf", "-inf"]))
def test_numbers_that_are_not_finite_are_refused(name: str, value: str) -> None:
    with pytest.raises(InputError, match=f"--{name.replace('_', '-')} is {value}; give"):
        TrainingSettings(MODEL, "out", **{name: float(value)})


def run_of(folder: Path, *more: str) -> list[str]:
    """Return the arguments of a run of three short steps."""
    sizes = "--d-gate 24 --steps 3 --budget 24 --log-every 1 --save-every 100 --device cpu".split()
    data = ["--data", "scenes:dense", "--output", str(folder)]
    return ["--model", MODEL, *data, *sizes, "--max-length", "512", *more]


def press_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Press Ctrl-C while the line of this step is logged."""
    log = History.on_log

    def pressing(self: History, args: Any, state: Any, control: Any, **more: Any) -> None:
        log(self, args, state, control, **more)
        if state.global_step == step:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(History, "on_log", pressing)


def test_ctrl_c_keeps_a_checkpoint_and_ends_with_130(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``mmkv distill && mmkv chat`` must not go on to chat."""
    with monkeypatch.context() as context:
        press_at(context, 1)
        assert run(["distill", *run_of(tmp_path)]) == 130
    shown = capsys.readouterr().err
    assert "--resume" in shown and "Traceback" not in shown
    (kept,) = tmp_path.glob("checkpoint-*")
    assert (kept / "trainer_state.json").is_file() and int(kept.name[11:]) <= 2
    assert not (tmp_path / "gates.safetensors").exists()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert run(["distill", *run_of(tmp_path), "--resume"]) == 0
    assert [line["step"] for line in history(tmp_path) if "loss" in line] == [1, 2, 3]
    assert (tmp_path / "gates.safetensors").is_file()


def test_a_second_ctrl_c_interrupts_at_once() -> None:
    with pytest.raises(KeyboardInterrupt), Stopping() as stopping:
        signal.raise_signal(signal.SIGINT)
        assert stopping.pressed
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("the second press was held back")
    with pytest.raises(KeyboardInterrupt), Stopping():
        signal.raise_signal(signal.SIGINT)
    with Stopping():
        pass


def test_ctrl_c_before_the_first_step_ends_with_130(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "mmkv.training.run.load_backbone", lambda _: signal.raise_signal(signal.SIGINT)
    )
    assert main(run_of(tmp_path)) == 130 and run(["distill", *run_of(tmp_path)]) == 130
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("left", [[], ["config.json"], ["model.safetensors", "optimizer.pt"]])
def test_a_kill_inside_the_first_checkpoint_is_no_dead_end(tmp_path: Path, left: list[str]) -> None:
    """What --resume advises works: a run without it begins anew over what is left."""
    asked = {"model": "m"}
    begin(tmp_path, asked)
    cut = tmp_path / "checkpoint-100"
    cut.mkdir()
    for name in left:
        (cut / name).write_bytes(b"cut")
    with pytest.raises(InputError, match="leave --resume out"):
        resume(tmp_path, asked)
    begin(tmp_path, asked)
    (cut / "trainer_state.json").write_text("{}")
    assert resume(tmp_path, asked) == cut
    with pytest.raises(InputError, match="continue it with --resume"):
        begin(tmp_path, asked)
    # Steps are numbers: 1000 comes behind 200, and what was logged after it goes.
    for step in (1000, 200):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text("{}")
    lines = [{"step": step} for step in (200, 999, 1000, 1001)]
    (tmp_path / HISTORY).write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert resume(tmp_path, asked).name == "checkpoint-1000" and history(tmp_path) == lines[:3]
    for made in tmp_path.glob("checkpoint-*"):
        shutil.rmtree(made)
    begin(tmp_path, asked)
    assert history(tmp_path) == []


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        SafetensorError("Error while serializing: I/O error: No space left on device"),
        RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0"),
        RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed"),
    ],
)
def test_a_full_disk_gets_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
) -> None:
    def full(*_: object) -> None:
        raise error

    monkeypatch.setattr("mmkv.training.run.load_backbone", full)
    assert main(run_of(tmp_path)) == 1
    shown = capsys.readouterr().err
    assert "free space" in shown and "--resume" in shown and shown.count("\n") == 1


def test_other_errors_are_not_taken_for_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("mmkv.training.run.load_backbone", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        main(run_of(tmp_path))
