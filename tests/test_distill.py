"""Distillation runs: gates that help under real eviction, resuming, processes, mistakes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from engine.gates import load_gates, make_random_gates
from engine.runtime import Engine
from mmkv.assets import bundled_model
from training.distill import main
from training.held_out import HeldOutData, summary
from training.run import distill, load_backbone
from training.settings import Settings
from training.sources import examples
from training.trainer import HISTORY

MODEL = str(bundled_model())


def settings(folder: Path, **changes: Any) -> Settings:
    """A short run on the CPU in float32."""
    usual = dict(
        model=MODEL, output=str(folder), budget=24.0, d_gate=48, bias=8.0, lr=4e-3, steps=4,
        batch=2, device="cpu", dtype="float32", log_every=1, save_every=100, eval_every=0,
    )  # fmt: skip
    return Settings(**(usual | changes))


def train(chosen: Settings, held: int = 0) -> tuple[Engine, dict[str, Any]]:
    engine = load_backbone(chosen)
    data = examples(MODEL, ["scenes:sparse"], 10_000, chosen.seed)
    return engine, distill(chosen, engine, data, held_out(held), ["scenes:sparse"])


def held_out(count: int) -> list[dict[str, Tensor]]:
    watched = examples(MODEL, ["scenes:sparse"], count, 0, split="heldout")
    return [watched[index] for index in range(count)]


# About 60 s on one core: it is the one test that shows a whole distillation to be worth it.
@pytest.mark.slow
def test_a_minute_of_distillation_beats_random_gates_and_recency(tmp_path: Path) -> None:
    """KL to the full cache on held-out dialogues, evicting at M = 64 of 370 to 600 tokens.

    Seen when written: 0.17 trained, 2.4 and 3.3 random, 2.2 recency.
    """
    chosen = settings(tmp_path, steps=45, batch=3)
    engine, described = train(chosen)
    data = HeldOutData(engine, held_out(8))
    trained = load_gates(tmp_path, engine.spec)
    kl = {"trained": summary(data.read(trained, "dbtrimkv", 64))["kl"]}
    for seed in (0, 1):
        untrained = make_random_gates(engine.spec, seed)
        kl[f"random {seed}"] = summary(data.read(untrained, "dbtrimkv", 64))["kl"]
    kl["recency"] = summary(data.read(None, "streamingllm", 64))["kl"]
    others = [value for name, value in kl.items() if name != "trained"]
    assert kl["trained"] < 0.3 * min(others), kl
    assert described["base_sha256"] and (tmp_path / "curve.png").stat().st_size > 5000
    card = (tmp_path / "README.md").read_text()
    assert described["base_sha256"] in card and "scenes:sparse" in card


def test_the_capacity_term_meets_its_budget(tmp_path: Path) -> None:
    """With only that term, soft entries per head fall to M and stay near it."""
    train(settings(tmp_path, steps=30, loss="kl", lambda_cap=1000.0, lr=2e-2, warmup=0.0))
    history = [json.loads(line) for line in (tmp_path / HISTORY).read_text().splitlines()]
    kept = [line["kept"] for line in history if "kept" in line]
    assert kept[0] > 48 and 8 < kept[-1] < 30, kept


def test_a_resumed_run_ends_where_an_uninterrupted_one_does(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train(settings(whole, steps=6, save_every=3))
    train(settings(cut, steps=6, save_every=3))
    # As after a kill past the third step: later checkpoints and the result are not there.
    for made in cut.glob("checkpoint-6/*"):
        made.unlink()
    (cut / "checkpoint-6").rmdir()
    (cut / "gates.safetensors").unlink()
    train(settings(cut, steps=6, save_every=3, resume=True))
    first, second = (load_file(folder / "gates.safetensors") for folder in (whole, cut))
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=0, atol=0)


# About 40 s: three interpreters load torch and transformers.
@pytest.mark.slow
def test_two_processes_give_the_loss_curve_of_one(tmp_path: Path) -> None:
    common = [
        "--model", MODEL, "--data", "scenes:dense", "--steps", "4", "--log-every", "1",
        "--budget", "24", "--d-gate", "48", "--bias", "8", "--lr", "4e-3", "--device", "cpu",
        "--dtype", "float32", "--threads", "1",
    ]  # fmt: skip
    alone = [sys.executable, "-m", "training.distill", "--accumulate", "2"]
    pair = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
        "--master-port", "29617", "-m", "training.distill",
    ]  # fmt: skip
    curves = []
    for name, command in (("alone", alone), ("pair", pair)):
        folder = tmp_path / name
        done = subprocess.run(
            [*command, *common, "--output", str(folder)],
            env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        lines = [json.loads(line) for line in (folder / HISTORY).read_text().splitlines()]
        curves.append(
            ([x["loss"] for x in lines if "loss" in x], load_file(folder / "gates.safetensors"))
        )
    (one, gates), (two, others) = curves
    assert len(one) == len(two) == 4
    assert one == pytest.approx(two, rel=1e-4)
    for name in gates:
        torch.testing.assert_close(gates[name], others[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--model", MODEL, "--data", "scenes:round"], 1, "dense, sparse, crowd, clip"),
        (["--model", "/nowhere", "--data", "scenes:dense"], 1, "/nowhere"),
        (["--model", MODEL, "--data", "scenes:dense", "--tying", "loose"], 1, "--tying"),
        (["--model", MODEL, "--data", "scenes:dense", "--budget", "-3"], 1, "--budget"),
        (["--model", MODEL, "--data", "scenes:dense", "--resume"], 1, "no checkpoint"),
        (["--model", MODEL, "--data", "0*scenes:dense"], 1, "weight"),
        (["--model", MODEL, "--data", "/nowhere/chats.jsonl"], 1, "/nowhere/chats.jsonl"),
        (["--model", MODEL], 2, "--data"),
    ],
)
def test_mistakes_get_one_line(
    arguments: list[str], code: int, words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--output", str(tmp_path), "--device", "cpu"]) == code
    lines = [x for x in capfd.readouterr().err.splitlines() if x.startswith("training.distill:")]
    assert len(lines) == 1 and words in lines[0]
