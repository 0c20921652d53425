"""The comparison with other engines on a CPU: its methods, and the program with a fake one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from benchmarks.bench import llama_gguf, peers_cpu
from benchmarks.bench.cpu_methods import METHODS, CachedModel, CpuPeerJob
from benchmarks.bench.llama_gguf import interleaved, renamed, tensors
from benchmarks.bench.peers_cpu import (
    allowed_bytes,
    case_rows,
    checks,
    target_rows,
)
from benchmarks.bench.shape_files import write_checkpoint, write_llava
from mmkv.eval.step import spread
from mmkv.training.measure.record import ROOT
from tests.support.chat_models import save_llama

# A llama.cpp whose likeliest token is the last one plus 1: it shows what it was fed, and refuses a
# token that is not at the end of its sequence.
FAKE = """
import ctypes, types
__version__, WORDS = "0", 264
class Context:
    def __init__(self, settings):
        assert settings.n_ctx >= settings.n_seq_max and settings.n_threads == 1
        self.ends, self.rows = {}, {}
def llama_backend_init(): pass
def llama_model_default_params(): return types.SimpleNamespace(n_gpu_layers=99)
def llama_model_load_from_file(path, settings):
    assert settings.n_gpu_layers == 0
    return open(path.decode()).read()
def llama_model_get_vocab(model): return model
def llama_vocab_n_tokens(vocab): return WORDS
def llama_context_default_params(): return types.SimpleNamespace()
def llama_init_from_model(model, settings): return Context(settings)
def llama_n_batch(context): return 5
def llama_batch_init(count, width, seqs):
    lists = {name: [None] * count for name in ("token", "pos", "logits", "n_seq_id")}
    return types.SimpleNamespace(n_tokens=0, seq_id=[[None] for _ in range(count)], **lists)
def llama_batch_free(batch): pass
def llama_free(context): pass
def llama_set_n_threads(context, steps, prompts): assert steps == prompts
def llama_decode(context, batch):
    context.rows = {}
    for i in range(batch.n_tokens):
        seq = batch.seq_id[i][0]
        assert batch.pos[i] == context.ends.get(seq, 0)
        context.ends[seq] = batch.pos[i] + 1
        if batch.logits[i]:
            row = context.rows[i] = (ctypes.c_float * WORDS)()
            row[0], row[(batch.token[i] + 1) % WORDS] = 0.5, 1.0
    return 0
def llama_get_logits_ith(context, i):
    return ctypes.cast(context.rows[i], ctypes.POINTER(ctypes.c_float))
def llama_get_memory(context): return context
def llama_memory_clear(memory, data): memory.ends = {}
def llama_memory_seq_rm(memory, seq, start, stop): memory.ends[seq] = start
def llama_print_system_info(): return b"fake"
"""
WRITER = """
import enum
class GGMLQuantizationType(enum.Enum):
    F32, F16, Q8_0, Q4_0 = range(4)
class quants:
    @staticmethod
    def quantize(values, kind): return values
class GGUFWriter:
    def __init__(self, path, kind): self.path, self.names = path, []
    def add_tensor(self, name, values, raw_dtype): self.names.append(f"{name} {raw_dtype.name}")
    def write_tensors_to_file(self): open(self.path, "w").write("\\n".join(self.names))
    def __getattr__(self, name): return lambda *values: None
"""


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("qwen3-vl-tiny", tmp_path_factory.mktemp("shape") / "qwen3-vl-tiny")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("peers") / "model")


def method(name: str, model: Path, gates: str | None = "random", budget: int = 4) -> CachedModel:
    sizes = (1, 1, 64, 32, budget)
    job = CpuPeerJob(name, "bf16", str(model), "", *sizes, "dbtrimkv", gates, "auto")
    return METHODS[name](job)


def test_methods_run_the_same_model_and_take_back_what_they_decode(model: Path) -> None:
    prompt = [7, 30, 11, 99, 5, 62, 40, 8]
    found = {}
    for name in ("mmkv full", "transformers"):
        made = method(name, model)
        assert made.obey({"hold": [prompt[:5]]})["logits"]
        found[name] = made.obey({"hold": [prompt]})["logits"]
        first, second = (made.obey({"decode": 3}) for _ in range(2))
        assert first["tokens"] == second["tokens"] and len(first["tokens"]) == 4
        assert first["cpu"] > 0 and first["wall"] > 0
        assert made.obey({"read": prompt})["logits"] == pytest.approx(found[name], abs=0.02)
        two = made.obey({"hold": [prompt[::-1], prompt]})
        assert two["logits"] != pytest.approx(found[name], abs=0.02), "the first of them"
        assert len(made.obey({"decode": 2})["tokens"]) == 3
    assert found["mmkv full"] == pytest.approx(found["transformers"], rel=0.05, abs=0.02)


def test_the_budget_holds_in_every_run(model: Path) -> None:
    made: Any = method("mmkv budget", model)
    made.obey({"hold": [[7, 30, 11, 99, 5, 62, 40, 8]]})
    made.before()
    made.decode(3)
    rows = made.engine.spec.rows
    assert made.forks[0].memory().entries == made.sessions[0].memory().entries == 4 * rows
    made.after()


def test_the_program_of_a_method_imports_no_package_at_its_top() -> None:
    """Some environments lack torch."""
    code = "import sys, benchmarks.bench.cpu_methods; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert "benchmarks.bench.cpu_methods" in run.stdout
    heavy = {"torch", "transformers", "mmkv.api", "mmkv.engine.runtime"}
    assert not heavy & set(run.stdout.split()), run.stderr


def test_tensors_are_read_without_torch(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bf16"
    folder.mkdir()
    from safetensors.torch import save_file

    wanted = {
        name: value.bfloat16() for name, value in load_file(model / "model.safetensors").items()
    }
    save_file(wanted, folder / "model.safetensors")
    found = dict(tensors(folder))
    assert found.keys() == wanted.keys()
    for name, values in found.items():
        assert torch.equal(torch.from_numpy(values), wanted[name].float())
        assert renamed(name).startswith(("blk.", "token_embd.", "output"))
    with pytest.raises(ValueError, match="no tensor"):
        renamed("model.layers.0.mlp.router.weight")


def test_turning_neighbours_gives_the_same_scores() -> None:
    """Rope on halves of a head, and on neighbours after the rows were reordered."""
    draw = np.random.default_rng(0)
    heads, size, position = 3, 8, 5
    weight, x = draw.normal(size=(heads * size, 4)), draw.normal(size=4)
    angles = position / 10 ** np.arange(size // 2)
    turn = np.exp(1j * angles)
    halves = (weight @ x).reshape(heads, 2, size // 2)
    wanted = (halves[:, 0] + 1j * halves[:, 1]) * turn
    pairs = (interleaved(weight, heads) @ x).reshape(heads, size // 2, 2)
    np.testing.assert_allclose((pairs[..., 0] + 1j * pairs[..., 1]) * turn, wanted)


LLAMA = ["llama.cpp Q8_0"]
FEW = ["--contexts", "6", "16", "--prompts", "5", "--batches", "2", "--batch-context", "4"]
FEW += ["--steps", "2", "--batch-steps", "2", "--rounds", "2", "--repeats", "1", "--budget", "8"]
FEW += ["--preparing-threads", "1"]
ROWS = [
    "first start",
    "cold start",
    "later start",
    "load",
    "prompt 5",
    "context 6",
    "context 16",
    "batch 2",
]


@pytest.fixture
def fake_llama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llama_cpp.py").write_text(FAKE)
    (tmp_path / "gguf.py").write_text(WRITER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@pytest.mark.usefixtures("fake_llama")
def test_an_interrupted_run_goes_on_where_it_was(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    done: list[tuple[int, str]] = []
    measure = peers_cpu.Bench.measure

    def counted(bench: Any, child: Any, row: str, round_: int) -> dict[str, Any]:
        if done == [(0, one) for one in ROWS[:4]]:
            done.append((-1, "stopped"))
            raise KeyboardInterrupt
        done.append((round_, row))
        return measure(bench, child, row, round_)

    monkeypatch.setattr(peers_cpu.Bench, "measure", counted)
    run = [str(model), "--methods", *LLAMA, *FEW, "--output", str(tmp_path)]
    with pytest.raises(KeyboardInterrupt):
        peers_cpu.main(run)
    with pytest.raises(SystemExit):
        peers_cpu.main([*run, "--steps", "3"])
    assert "a run with other settings" in capsys.readouterr().err
    assert peers_cpu.main(run) == 0
    assert done == [
        *((0, row) for row in ROWS[:4]),
        (-1, "stopped"),
        *((0, row) for row in ROWS[4:]),
        *((1, row) for row in ROWS),
    ]
    done.clear()
    assert peers_cpu.main([*run, "--rows", "load", "--rounds", "3"]) == 0
    assert done == [(2, "load")], "a later command adds to what is there"
    found = json.loads((tmp_path / "peers-cpu.json").read_text())["results"]
    rounds = {row: len(case["methods"][LLAMA[0]]["at"]) for row, case in found["cases"].items()}
    assert rounds == dict.fromkeys(ROWS, 2) | {"load": 3} and len(found["commands"]) == 3


@pytest.mark.usefixtures("fake_llama")
def test_a_row_that_fails_costs_no_other_row(
    seeing: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The fake has 264 tokens and fails on the ids of a larger vocabulary; nor does it see."""
    (tmp_path / "llama_cpp.py").write_text(FAKE.replace('WORDS = "0", 264', 'WORDS = "0", 643'))
    rows = ["load", "picture 448", "context 6", "batch 2"]
    words = ["--methods", *LLAMA, *FEW, "--rounds", "1", "--output", str(tmp_path)]
    assert peers_cpu.main([str(seeing), *words, "--rows", *reversed(rows)]) == 0
    found = json.loads((tmp_path / "peers-cpu.json").read_text())["results"]
    assert list(found["cases"]) == ["load", "context 6", "batch 2"]
    (lack,) = found["unavailable"]
    assert (lack["row"], lack["reason"]) == ("picture 448", "no pictures in this form")
    assert "picture 448: not available: no pictures" in capsys.readouterr().out


def test_both_engines_see_the_same_picture_and_video(seeing: Path) -> None:
    """Of a checkpoint of random weights; another picture gives other logits."""
    found = {name: method(name, seeing, gates=None) for name in ("mmkv full", "transformers")}
    seen: list[list[float]] = []
    for order in ({"see": 1, "frames": 0}, {"see": 2, "frames": 0}, {"see": 3, "frames": 4}):
        ours, theirs = (made.obey({**order, "side": 64})["logits"] for made in found.values())
        assert np.corrcoef(ours, theirs)[0, 1] > 0.99
        seen.append(ours)
    assert seen[0] != seen[1] != seen[2]
    again = found["mmkv full"].obey({"see": 1, "side": 64, "frames": 0, "repeats": 2})
    assert again["logits"] == seen[0] and again["cpu"] > 0


def test_a_gguf_of_a_llava_has_its_text_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_llava(tmp_path / "llava")
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "gguf.py").write_text(WRITER)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "gguf", raising=False)
    text = tmp_path / "text.gguf"
    assert llama_gguf.main([str(folder), f"{text}=f32"]) == 0
    lines = text.read_text().splitlines()
    assert len(lines) == config["text_config"]["num_hidden_layers"] * 9 + 3
    assert "blk.0.attn_q.weight F32" in lines and "output.weight F32" in lines


def test_what_cannot_run_says_why(model: Path, tmp_path: Path, capsys: Any) -> None:
    where = ["--output", str(tmp_path)]
    for words, wanted in (
        ([str(tmp_path)], "holds no config.json"),
        ([str(model), "--python", "vllm=/x"], "is not NAME=PATH"),
        ([str(model), "--methods", "mmkv before"], "--before DIR"),
        ([str(model), "--rounds", "0"], "at least 1"),
        (
            [str(model), "--rows", "picture 448"],
            "this model has first start, cold start, later start, load, prompt 64",
        ),
        ([str(model), "--shape", "smollm2"], "either a MODEL or a --shape"),
        ([str(model), "--peers", str(tmp_path)], "peer_environments"),
    ):
        with pytest.raises(SystemExit):
            peers_cpu.main([*words, *where])
        assert wanted in capsys.readouterr().err
    python = tmp_path / "python"
    for interpreter, reason in ((python, "cannot start"), (sys.executable, "llama_cpp")):
        few = ["--methods", "llama.cpp f16", "--python", f"llama.cpp={interpreter}"]
        assert peers_cpu.main([str(model), *few, *where]) == 1
        assert reason in capsys.readouterr().out


def measured(**times: list[float]) -> dict[str, Any]:
    return {name: {"cpu_ms": spread(values)} for name, values in times.items()}


def test_targets_and_tables() -> None:
    ours, theirs, vino = "mmkv bf16", "llama.cpp f16", "OpenVINO fp16"
    about = {"weights": "bf16", "evicts": False, "memory": {"context": 64, "pss": 2**20}}
    within = about | {"evicts": True, "memory": {"context": 4096, "peak_rss": 2**30}}
    long = measured(**{f"{ours}, budget": [30], theirs: [100], vino: [60], f"{vino}, budget": [50]})
    late = measured(**{ours: [9, 26], theirs: [10, 20]})
    late[ours]["at"], late[theirs]["at"] = [0, 1], [1, 2]
    found: dict[str, Any] = {
        "clock": "cpu",
        "budget": 256,
        "sizes": {"parameters": 10**8, "numbers_per_token": 10**4},
        "methods": {theirs: about, "mmkv before": about, ours: about, f"{ours}, budget": within},
        "cases": {
            "load": {"methods": measured(**{ours: [9000, 1000], theirs: [800, 500], vino: [1, 1]})},
            "prompt 64": {
                "methods": measured(**{ours: [21, 42], theirs: [20, 40], vino: [30, 50]})
            },
            "context 64": {"methods": late},
            "context 8192": {"methods": long},
            "batch 32": {"methods": measured(**{ours: [100, 100], "mmkv before": [250, 350]})},
        },
    }
    assert allowed_bytes(found, ours) == 260_000_000 + 2 * 64 * 10**4 + 350 * 2**20
    assert allowed_bytes(found, f"{ours}, budget") == 260_000_000 + 2 * 256 * 10**4 + 350 * 2**20
    found["targets"] = checks(found)
    values = {
        row["target"]: (round(row["value"]["median"], 3), row["met"]) for row in found["targets"]
    }
    assert values == {
        "load, mmkv bf16 / llama.cpp f16": (2.0, False),  # of second starts alone
        "a prompt of 64 tokens, mmkv bf16 / llama.cpp f16": (1.05, False),
        "a token at 64, mmkv bf16 / llama.cpp f16": (2.6, False),  # of the round that both have
        "a token at 8192, mmkv bf16, budget / OpenVINO fp16": (0.5, False),
        "a token at 8192, mmkv bf16, budget / OpenVINO fp16, budget": (0.6, True),
        "a step of 32 sequences, mmkv bf16 / mmkv before": (0.343, True),
        "peak size of the process / allowed, mmkv bf16, budget": (1.699, False),
    }
    columns, *rows = case_rows(found)
    assert columns[1:3] == ["load, s", "prompt of 64, ms"]
    assert columns[4:6] == ["at 8,192, ms/token", "batch 32, tokens/s"]
    assert rows[2][1:3] == ["5.00 (3.00 .. 7.00)", "31.5 (26.2 .. 36.8)"]
    assert rows[2][5].startswith("320 ")
    assert rows[1][1] == "-" and rows[3][0] == "mmkv bf16, M = 256" and rows[3][-3] == "1,024 MiB"
    assert list(target_rows(found))[-1][-1] == "no"
