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

from mmkv.eval import bench_peers_cpu
from mmkv.eval.bench.harness import memory
from mmkv.eval.bench.llama_gguf import interleaved, renamed, tensors
from mmkv.eval.bench.peers_cpu import METHODS, CachedModel, CpuPeerJob
from mmkv.eval.bench_peers_cpu import allowed_bytes, case_rows, checks, target_rows
from mmkv.eval.measure.timing import spread
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
    F32, F16, Q8_0 = range(3)
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
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("peers") / "model")


def method(name: str, model: Path) -> CachedModel:
    job = CpuPeerJob(name, "bf16", str(model), "", 1, 1, 64, 32, 4, "dbtrimkv", "random", "auto")
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
    code = "import sys, mmkv.eval.bench.peers_cpu; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert "mmkv.eval.bench.peers_cpu" in run.stdout
    heavy = {"torch", "transformers", "mmkv.api", "mmkv.engine.runtime"}
    assert not heavy & set(run.stdout.split()), run.stderr


def test_the_memory_of_this_process_is_read() -> None:
    held = memory()
    assert held["rss"] and held["peak_rss"] and held["pss"]
    assert 2**20 < held["pss"] <= held["rss"] <= held["peak_rss"]


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
        renamed("model.layers.0.self_attn.q_norm.weight")


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


def test_the_program_with_a_fake_llama_cpp(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "llama_cpp.py").write_text(FAKE)
    (tmp_path / "gguf.py").write_text(WRITER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    sizes = ["--contexts", "6", "16", "--prompt", "5", "--batches", "2", "--batch-context", "4"]
    sizes += ["--steps", "2", "--batch-steps", "2", "--rounds", "2", "--budget", "8"]
    names = ["llama.cpp Q8_0", "mmkv bf16", "kvpress bf16, budget"]
    where = ["--output", str(tmp_path), "--preparing-threads", "1"]
    code = bench_peers_cpu.main([str(model), "--methods", *names, *sizes, *where])
    page = json.loads((tmp_path / "peers-cpu.json").read_text())
    found, said = page["results"], capsys.readouterr().out
    assert code == 0 and page["machine"]["cpu"] and page["command"]
    assert list(found["methods"]) == names[:2], found["not_run"]
    assert "kvpress bf16, budget was not run: ModuleNotFoundError" in said
    cases = ["prompt 5", "context 6", "context 16", "batch 2"]
    assert list(found["cases"]) == cases
    for case in cases:
        for name in names[:2]:
            assert len(found["cases"][case]["methods"][name]["cpu_ms"]["rounds"]) == 2
    fake = found["cases"]["context 16"]["methods"]["llama.cpp Q8_0"]["tokens"]
    assert fake == [fake[0], fake[0] + 1, fake[0] + 2]
    assert found["methods"]["llama.cpp Q8_0"]["versions"]["build"] == "fake"
    assert found["methods"]["mmkv bf16"]["memory"]["context"] == 16
    assert found["methods"]["mmkv bf16"]["logits_apart"]["relative"] > 0.5, "they are two models"
    assert [row["target"].split(",")[0] for row in found["targets"]] == [
        "peak size of the process / allowed"
    ]


def test_logits_are_compared_with_those_of_the_first_method_that_has_some() -> None:
    bench = object.__new__(bench_peers_cpu.Bench)
    bench.methods = {"dead": {}, "one": {}, "two": {}}
    bench.logits = {"dead": [], "one": [3.0, 4.0], "two": [3.0, 4.5]}
    bench.compare_logits()
    assert bench.methods["dead"] == {}
    assert bench.methods["one"]["logits_apart"] == {"from": "one", "relative": 0.0}
    assert bench.methods["two"]["logits_apart"] == {"from": "one", "relative": 0.1}
    for nothing in ({}, {"dead": []}):
        bench.logits = nothing
        bench.compare_logits()


def test_what_cannot_run_says_why(model: Path, tmp_path: Path, capsys: Any) -> None:
    where = ["--output", str(tmp_path)]
    for words, wanted in (
        ([str(tmp_path)], "holds no config.json"),
        ([str(model), "--python", "vllm=/x"], "is not NAME=PATH"),
        ([str(model), "--methods", "mmkv before"], "--before DIR"),
        ([str(model), "--rounds", "0"], "at least 1"),
    ):
        with pytest.raises(SystemExit):
            bench_peers_cpu.main([*words, *where])
        assert wanted in capsys.readouterr().err
    python = tmp_path / "python"
    for interpreter, reason in ((python, "cannot start"), (sys.executable, "llama_cpp")):
        few = ["--methods", "llama.cpp f16", "--python", f"llama.cpp={interpreter}"]
        assert bench_peers_cpu.main([str(model), *few, *where]) == 1
        assert reason in capsys.readouterr().out


def measured(**times: list[float]) -> dict[str, Any]:
    return {name: {"cpu_ms": spread(values)} for name, values in times.items()}


def test_targets_and_tables() -> None:
    ours, theirs = "mmkv bf16", "llama.cpp f16"
    about = {"weights": "bf16", "evicts": False, "memory": {"context": 64, "pss": 2**20}}
    within = about | {"evicts": True, "memory": {"context": 4096, "peak_rss": 2**30}}
    found: dict[str, Any] = {
        "clock": "cpu",
        "budget": 256,
        "sizes": {"parameters": 10**8, "numbers_per_token": 10**4},
        "methods": {theirs: about, "mmkv before": about, ours: about, f"{ours}, budget": within},
        "cases": {
            "prompt 64": {"methods": measured(**{ours: [21, 42], theirs: [20, 40]})},
            "context 64": {"methods": measured(**{ours: [11, 12], theirs: [10, 20]})},
            "batch 32": {"methods": measured(**{ours: [100, 100], "mmkv before": [250, 350]})},
        },
    }
    assert allowed_bytes(found, ours) == 260_000_000 + 2 * 64 * 10**4 + 350 * 2**20
    assert allowed_bytes(found, f"{ours}, budget") == 260_000_000 + 2 * 256 * 10**4 + 350 * 2**20
    found["targets"] = checks(found)
    values = [(round(row["value"]["median"], 3), row["met"]) for row in found["targets"]]
    assert values == [(0.85, True), (1.05, True), (3.0, True), (1.699, False)]
    columns, *rows = case_rows(found)
    assert columns[1:4] == ["prompt of 64, ms", "at 64, ms/token", "batch 32, tokens/s"]
    assert rows[2][:2] == [ours, "31.5 (26.2 .. 36.8)"] and rows[2][3].startswith("320 ")
    assert rows[1][1] == "-" and rows[3][0] == "mmkv bf16, M = 256" and rows[3][-3] == "1,024 MiB"
    assert list(target_rows(found))[-1][-1] == "no"
