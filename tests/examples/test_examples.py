"""Each example runs and prints what its first lines state."""

from __future__ import annotations

import ast
import json
import re
import runpy
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mmkv
from mmkv.engine.model import families
from mmkv.engine.policies import registry
from mmkv.engine.runtime import Runtime
from tests.support.oracle import Oracle
from tests.support.sessions import LATER, PICTURES, load, text_ids

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(autouse=True)
def registries(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an example registers is gone after it."""
    monkeypatch.setattr(registry._REGISTRY, "registered", {})
    monkeypatch.setattr(families._REGISTRY, "registered", {})


def run(name: str, *arguments: str) -> dict[str, Any]:
    """Run an example as a program. Returns its names."""
    before, sys.argv = sys.argv, [name, *arguments]
    try:
        return runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    finally:
        sys.argv = before


def test_every_example_is_run_here() -> None:
    text = Path(__file__).read_text()
    assert all(f'run("{path.name}"' in text for path in EXAMPLES.glob("*.py"))
    for path in EXAMPLES.glob("*.py"):
        assert f"Run: python examples/{path.name}" in path.read_text().partition('"""\n\n')[0]


def test_chat(capsys: pytest.CaptureFixture[str]) -> None:
    run("chat.py")
    printed = capsys.readouterr().out
    assert (
        "policy dbtrimkv, 24 entries per row" in printed
        and "> what is at row 2, column 3?\nfrog" in printed
    )
    # Tokens seen after the first turn, in the copy, and in the session loaded from the file.
    seen = [int(count) for count in re.findall(r"(\d+) tokens seen", printed)]
    kept = [int(count) for count in re.findall(r"(\d+) entries kept", printed)]
    assert seen[1] > seen[0] < seen[2] and kept[0] == kept[2] == 2 * kept[1]


def test_a_custom_policy(capsys: pytest.CaptureFixture[str]) -> None:
    run("custom_policy.py")
    ours, theirs = capsys.readouterr().out.splitlines()
    assert ours.startswith("mean-key: frog (") and theirs.startswith("streamingllm: ")
    assert len((EXAMPLES / "custom_policy.py").read_text().splitlines()) <= 40


def test_a_custom_family(capsys: pytest.CaptureFixture[str]) -> None:
    run("custom_family.py")
    whole, cut = capsys.readouterr().out.splitlines()
    assert whole == "budget 64: 156 entries kept, 16 of 16 tokens as in transformers"
    assert cut.startswith("budget 8: 32 entries kept")


def test_transformers_generate(capsys: pytest.CaptureFixture[str]) -> None:
    run("transformers_generate.py")
    alone, retained, bytes_held, second, after = capsys.readouterr().out.splitlines()
    assert alone.startswith("transformers alone: frog (")
    assert retained == "policy dbtrimkv, 8 entries per row: frog"
    whole, held, later = (
        int(re.findall(r"(\d+) KiB", line)[0]) for line in (alone, bytes_held, second)
    )
    assert 2 * held < whole and 2 * later < whole and "more tokens" in second
    assert after.startswith("afterwards: 0 bytes")


@pytest.mark.slow(reason="a process that loads torch and a model")
def test_serving(capsys: pytest.CaptureFixture[str]) -> None:
    """The command itself: it answers, goes on with the second question, and ends at SIGTERM."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run("serve.py", str(port))
    lines = capsys.readouterr().out.splitlines()
    first, second = (json.loads(lines[at]) for at in (1, 3))
    assert lines[0] == "frog" and lines[4] == "the server ended with exit code 0"
    assert first["mmkv"]["resumed"] == 0 < first["mmkv"]["by_modality"]["image"]
    read = second["prompt_tokens"] - second["mmkv"]["resumed"]
    assert 0 < read < 30 < second["mmkv"]["resumed"]


def test_the_notebook(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From top to bottom, as a notebook runs it: a cell's last expression is shown."""
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((EXAMPLES / "tour.ipynb").read_text("utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    names: dict[str, Any] = {}
    shown = []
    for cell in cells:
        assert cell["outputs"] == [] and cell["execution_count"] is None
        tree = ast.parse("".join(cell["source"]))
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "tour.ipynb", "exec"), names)
        if isinstance(last, ast.Expr):
            shown.append(eval(compile(ast.Expression(last.value), "tour.ipynb", "eval"), names))
    printed = capsys.readouterr().out
    assert "> what is at row 2, column 3?\nfrog\n" in printed and "\npineapple\n" in printed
    held = [int(count) for count in re.findall(r"^  (\d+) of \d+ entries", printed, re.MULTILINE)]
    assert held == [144, 144, 72] and "[patch]" in printed
    assert printed.endswith("within 8 entries per row, policy dbtrimkv:\nfrog\n")
    frame = next(one for one in shown if hasattr(one, "retained"))._repr_html_()
    assert frame.startswith("<iframe ") and "&lt;!doctype html&gt;" in frame
    names["session"].close()


def test_training_gates(capsys: pytest.CaptureFixture[str]) -> None:
    run("train_gates.py", "3")
    printed = capsys.readouterr().out
    assert (
        "loss" in printed and "of 3 steps" in printed and "dbtrimkv with the new gates: " in printed
    )


@pytest.mark.parametrize("native", ["1", "0"])
def test_the_custom_policy_keeps_what_a_dense_computation_keeps(
    native: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of several chunks, decoding and a later turn, in C and in torch."""
    from transformers import AutoModelForImageTextToText

    monkeypatch.setenv("MMKV_NATIVE", native)
    policy = runpy.run_path(str(EXAMPLES / "custom_policy.py"))["POLICY"]
    assert isinstance(policy, mmkv.Policy)
    engine: Runtime = load(folders["vl"], policy=policy, budget=9)
    model = AutoModelForImageTextToText.from_pretrained(folders["vl"], dtype=torch.float32).eval()
    oracle = Oracle(model, None, "keydiff", budget=9, prefill_chunk=12)
    with engine.session() as session:
        for part in (PICTURES, text_ids(6, 1), LATER, text_ids(5, 2)):
            if isinstance(part, Tensor):
                for token in part.tolist():
                    got, wanted = session.decode(token), oracle.decode(token)
                    oracle.follow(session.retained())
            else:
                got, wanted = session.prefill(part), oracle.prefill(part)
                oracle.follow(session.retained())
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-3)
    assert oracle.evictions >= 15 and oracle.swaps == 0
