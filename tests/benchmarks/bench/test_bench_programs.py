"""The speed programs from end to end on tiny shapes; times are not judged, only what was timed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch
from torch import Tensor

from benchmarks import weight_forms
from benchmarks.bench import admission as bench_admission
from benchmarks.bench import decode as bench_decode
from benchmarks.bench import kernels as bench_kernels
from benchmarks.bench import policies as bench_policies
from benchmarks.bench import prefill as bench_prefill
from benchmarks.bench.child import BenchError
from benchmarks.bench.decode import checks
from benchmarks.bench.kernels import TINY as TINY_CASES
from benchmarks.bench.peer import DYNAMIC, EAGER, FULL, OWN, PEERS, STATIC, TRIMKV, PeerJob
from benchmarks.bench.shapes import SHAPES
from benchmarks.domains import held_out
from mmkv.engine.policies import CacheView, Needs, make_policy
from mmkv.engine.runtime import Runtime
from mmkv.resources import bundled_model
from tests.support.kernels import DEVICE

if TYPE_CHECKING:
    from tests.support.cli_fixtures import Ran

pytest_plugins = ("tests.support.cli_fixtures",)

TINY = SHAPES["tiny"]
WHERE = ["--shape", "tiny", "--device", DEVICE.type, "--dtype", "float32", "--rounds", "2"]


def results(folder: Path, name: str) -> dict[str, Any]:
    page = json.loads((folder / f"{name}.json").read_text())
    assert page["machine"]["cpu"] and page["versions"]["torch"] and page["command"]
    return page["results"]


def test_kernels(tmp_path: Path) -> None:
    code = bench_kernels.main([*WHERE, "--cases", "tiny", "--output", str(tmp_path)])
    found = results(tmp_path, "gpu-kernels")
    assert code == 0 and found["copy_bandwidth"] > 0
    *cases, whole, eight, four = found["cases"]
    assert [c["kernel"] for c in cases[::2]] == [
        "attention",
        "work list",
        "append",
        "eviction",
        "prefill",
        "window scores",
    ]
    for case in found["cases"]:
        seconds = case["seconds"]["median"]
        assert case["of_copy_bandwidth"] == pytest.approx(
            case["bytes"] / seconds / found["copy_bandwidth"]
        )
    for case in cases:
        assert case["rows"]["mean"] == 12
        assert (case["rows"]["longest"] == 12) == (case["skew"] == 1)
    assert cases[0]["bytes"] == 3 * 12 * TINY.kv_token_bytes(4)
    assert [c["kernel"] for c in (whole, eight, four)] == list(bench_kernels.PRODUCTS)
    # Two layers of four matrices, of float32, of 8.5 bits and of 4.5; and three states of each.
    numbers, through = (
        2 * (64 * 256 + 128 * 64 + 64 * 192 + 96 * 64),
        3 * 4 * 2 * (320 + 192 + 256 + 160),
    )
    for case, bits in ((whole, 32), (eight, 8.5), (four, 4.5)):
        assert case["bytes"] == numbers * bits / 8 + through


def test_a_kernel_that_fails_is_named_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(state: object) -> None:
        raise RuntimeError("no such thing\nsecond line")

    monkeypatch.setitem(bench_kernels.PREPARE, "prefill", broken)
    kernels = ("prefill", "window scores")
    monkeypatch.setattr(bench_kernels, "TINY", [c for c in TINY_CASES if c.kernel in kernels])
    code = bench_kernels.main([*WHERE, "--cases", "tiny", "--output", str(tmp_path)])
    cases = results(tmp_path, "gpu-kernels")["cases"]
    failed = [c for c in cases if "failed" in c]
    assert code == 1 and len(failed) == 2 and len(cases) == 4
    assert failed[0]["failed"] == "RuntimeError: no such thing"
    assert "no such thing" in capsys.readouterr().out


@dataclass(frozen=True)
class Reading:
    """Somebody's scorer that asks a tensor for a number."""

    needs: ClassVar[Needs] = Needs()

    def score(self, view: CacheView) -> Tensor:
        return (view.position == int(view.position.max())).float()


def test_the_step_of_each_policy_in_turns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of 40 tokens and M = 12, of which wgkv+dbtrimkv keeps 12 as well."""
    own = replace(make_policy("snapkv"), name="mine", scoring=Reading())
    make = bench_policies.make_policy
    monkeypatch.setattr(
        bench_policies, "make_policy", lambda name: own if name == "mine" else make(name)
    )
    options = ["--cases", "1:40:12", "--steps", "4", "--output", str(tmp_path)]
    options += ["--policies", "dbtrimkv", "rkv", "raas", "mine", "wgkv+dbtrimkv", "fastv"]
    assert bench_decode.main([*WHERE, *options]) == 1
    (case,) = results(tmp_path, f"decode-policies-{DEVICE.type}-tiny")["cases"]
    assert case["policies"].pop("fastv")["failed"].startswith("PolicyError: the policy prunes")
    held = {name: each["entries_per_row"] for name, each in case["policies"].items()}
    twelve = dict.fromkeys(("dbtrimkv", "rkv", "mine", "wgkv+dbtrimkv"), 12)
    assert held == {"full": 40, "raas": 52} | twelve
    assert case["policies"]["rkv"]["interval"] == 3
    graphs = {name: each["graph"] for name, each in case["policies"].items()}
    assert graphs.pop("mine").endswith("policy 'mine' has code of its own")
    if DEVICE.type == "cpu":
        assert set(graphs.values()) == {"yes"}
    reads = {name: each["host_reads_per_step"] for name, each in case["policies"].items()}
    assert reads.pop("mine") > 0 and not any(reads.values())
    for each in case["policies"].values():
        assert len(each["ms_per_step"]["rounds"]) == 2 and each["over_full"] > 0
    assert "host reads" in " ".join(capsys.readouterr().out.split())


@pytest.mark.long(reason="times every program of the benchmark once")
def test_decode(tmp_path: Path) -> None:
    options = ["--steps", "6", "--peers", DYNAMIC, TRIMKV, "--peer-tokens", "3"]
    options += ["--copy-bytes", "1000000", "--largest-memory", "0.05", "--most-batch", "3"]
    options += ["--python", "trimkv=/no/such/python", "--output", str(tmp_path), "--skew", "3"]
    assert bench_decode.main([*WHERE, "--cases", "3:40:12", "largest", *options]) == 0
    found = results(tmp_path, "gpu-decode-tiny")
    case, largest = found["cases"]
    assert case["methods"][TRIMKV]["failed"].startswith("cannot start /no/such/python")
    assert set(case["methods"]) == {OWN, FULL, EAGER, DYNAMIC, TRIMKV}
    own, full = case["methods"][OWN], case["methods"][FULL]
    assert own["memory"]["entries"] == 3 * 12 * TINY.rows
    assert full["memory"]["entries"] == 3 * 40 * TINY.rows
    assert own["bytes"]["kv"] == 3 * 13 * TINY.kv_token_bytes(4)
    assert full["bytes"]["kv"] == 3 * (41 + 3) * TINY.kv_token_bytes(4)
    assert len(own["ms_per_step"]["rounds"]) == 2 and own["tokens_per_second"] > 0
    floor = (own["bytes"]["weights"] + own["bytes"]["kv"]) / found["copy_bandwidth"]
    assert own["floor_ms"] == pytest.approx(1e3 * floor)
    assert case["parts"]["ms"]["step"] > 0
    peer = case["methods"][DYNAMIC]
    assert peer["versions"]["transformers"] and peer["tokens_per_second"] == pytest.approx(
        3e3 / peer["ms_per_step"]["median"]
    )
    batches = [largest["methods"][method]["batch"] for method in (FULL, DYNAMIC, OWN)]
    assert 1 <= batches[0] < batches[2] == 3 and batches[1] < 3, "bounded memory holds more"
    assert {target["target"].split(",")[0] for target in found["targets"]} == {
        "eviction / step",
        "physical / logical KV",
        "tokens/s over own full",
    }


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    options = ["--steps", "4", "--peers", "--no-eager", "--no-parts", "--output", str(tmp_path)]
    options += ["--copy-bytes", "1000000", "--memory", "0.0055", "--weights", "int8"]
    bench_decode.main([*WHERE, "--cases", "2:3000:8", "1:30:8", *options])
    first, second = results(tmp_path, "gpu-decode-tiny-int8")["cases"]
    assert "are left" in first["methods"][FULL]["failed"]
    assert "ms_per_step" in second["methods"][FULL]


@pytest.mark.parametrize("peer", [DYNAMIC, STATIC])
def test_peers_decode_and_restore_their_caches(peer: str) -> None:
    made = PEERS[peer](PeerJob(peer, "tiny", 2, 20, 8, 6, "cpu", "float32"))
    keys = made.cache.layers[1].keys[:, :, :19].clone()
    for tokens in (2, 6):
        assert made.run(tokens) > 0
        assert int(made.cache.get_seq_length()) == 19
        assert torch.equal(made.cache.layers[1].keys[:, :, :19], keys)


@pytest.mark.slow(reason="a process that loads torch")
def test_a_peer_without_its_package_says_so(tmp_path: Path) -> None:
    job = PeerJob("kvpress", "tiny", 1, 20, 8, 4, "cpu", "float32")
    log = tmp_path / "log"
    with pytest.raises(BenchError, match="No module named 'kvpress'"):
        bench_decode.start_peer(job, sys.executable, 120, log)
    assert "Traceback" in log.read_text(), "the log keeps what the line leaves out"


def test_a_peer_that_hangs_is_given_up(tmp_path: Path) -> None:
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\nexec sleep 60\n")
    script.chmod(0o755)
    job = PeerJob("transformers", "tiny", 1, 20, 8, 4, "cpu", "float32")
    with pytest.raises(BenchError, match=r"no answer within 0\.2 s"):
        bench_decode.start_peer(job, str(script), 0.2, tmp_path / "log")


def test_targets() -> None:
    memory = {"physical_over_logical": 1.2}
    own = {"ms_per_step": {"median": 2.0}, "step_over_floor": 1.1, "floor_ms": 1.0}
    own |= {"memory": memory, "tokens_per_second": 1600.0}
    full = {"ms_per_step": {"median": 8.0}, "floor_ms": 5.0, "tokens_per_second": 100.0}
    case = {"batch": 16, "context": 16384, "budget": 256, "kind": "targets"}
    case |= {"methods": {OWN: own, FULL: full}, "parts": {"eviction_of_step": 0.02}}
    case["beside"] = {DYNAMIC: {"ours_over_peers_tokens_per_second": {"median": 7.5}}}
    found = {b["target"].split(",")[0]: (round(b["value"], 3), b["met"]) for b in checks("x", case)}
    assert found == {
        "step / floor": (1.1, True),
        "eviction / step": (0.02, True),
        "physical / logical KV": (1.2, False),
        "speed-up over own full / what the bytes allow": (0.8, False),
        "tokens/s over transformers": (7.5, False),
    }
    four = case | {"batch": 4, "context": 32768, "budget": 1024}
    assert {"tokens/s"} == {
        b["target"].split(",")[0] for b in checks("qwen3-4b", four) if b["value"] == 1600
    }
    assert list(checks("x", case | {"methods": {OWN: {"failed": "why"}}})) == []


@pytest.mark.slow(reason="times every program of the benchmark once")
def test_prefill(tmp_path: Path) -> None:
    options = ["--lengths", "90", "30", "--budget", "9", "--chunk", "16", "--peer-longest", "30"]
    assert bench_prefill.main([*WHERE, *options, "--output", str(tmp_path)]) == 0
    short, long = results(tmp_path, "gpu-prefill-tiny")["lengths"]
    assert (short["length"], long["length"]) == (30, 90)
    assert long["methods"][bench_prefill.PEER] == {"failed": "not asked for above 30 tokens"}
    held = [case["methods"][bench_prefill.EVICTING]["kv_bytes"] for case in (short, long)]
    page = 16 * 2 * TINY.head_dim * 4
    # 9 entries a row on average: rows of one or two pages, whatever the length.
    assert all(TINY.rows * page <= kv <= 2 * TINY.rows * page for kv in held)
    assert long["methods"][bench_prefill.FULL]["kv_bytes"] == TINY.rows * 6 * page
    assert short["methods"][bench_prefill.PEER]["kv_bytes"] == 30 * TINY.kv_token_bytes(4)


def test_mistakes_give_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for main, arguments, message in [
        (bench_decode.main, ["--cases", "1:2"], "B:CONTEXT:M"),
        (bench_decode.main, ["--python", "x=y"], "NAME=PATH"),
        (bench_kernels.main, ["--device", "cuda:77"], "is not there"),
        (bench_prefill.main, ["--device", "tpu"], "unknown device"),
    ]:
        with pytest.raises(SystemExit) as left:
            main(arguments)
        assert left.value.code == 2
        last = capsys.readouterr().err.strip().splitlines()[-1]
        assert message in last


@pytest.mark.skipif(DEVICE.type == "cuda", reason="says what happens without a GPU")
def test_without_a_gpu_long_programs_refuse(capsys: pytest.CaptureFixture[str]) -> None:
    for main in (bench_kernels.main, bench_decode.main, bench_prefill.main):
        with pytest.raises(SystemExit):
            main([])
        assert "no GPU here" in capsys.readouterr().err


def test_mmkv_bench(mmkv: Callable[..., Ran], model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmkv.eval.step.copy_bandwidth", lambda device: 2e9)
    options = ["--batch", "2", "--context", "60", "--budget", "8", "--steps", "4", "--rounds", "2"]
    where = ["--gates", "random", "--device", "cpu"]
    ran = mmkv("bench", model, *options, *where, "--json")
    report = json.loads(ran.out)
    assert ran.code == 0 and report["policy"] == "dbtrimkv" and report["batch"] == 2
    assert report["kv"] == "auto"
    rows, entry = 4, 2 * 8 * 4  # 2 layers x 2 KV heads of 8 float32
    assert report["logical_bytes"] == 2 * 8 * rows * entry
    assert report["read_kv_bytes"] == 2 * 9 * rows * entry
    assert report["floor"] == (report["weight_bytes"] + report["read_kv_bytes"]) / 2e9
    assert report["over_floor"] == pytest.approx(report["step"]["median"] / report["floor"])
    assert report["tokens_per_second"] == pytest.approx(2 / report["step"]["median"])
    shown = mmkv("bench", model, *options, *where).out
    assert f"{1e3 * report['floor']:.3f} ms a step" in shown and "tokens/s" in shown
    assert "--context of at most" in mmkv("bench", model, "--context", "999999999").error_line()


def test_admission(tmp_path: Path) -> None:
    arguments = ["--length", "96", "--window", "16", "--chunk", "32", "--rates", "1", "0.2"]
    assert bench_admission.main([*arguments, "--rounds", "1", "--output", str(tmp_path)]) == 0
    methods = results(tmp_path, "admission-cpu")["methods"]
    assert list(methods) == [bench_admission.FULL, "1 admitted", "0.2 admitted"]
    assert methods["1 admitted"]["held"] == 1 > methods["0.2 admitted"]["held"] > 16 / 96


def test_forms_of_the_cache(tmp_path: Path) -> None:
    options = ["--kv", "all", "--cases", "3:40:12", "--steps", "3", "--output", str(tmp_path)]
    assert bench_decode.main([*WHERE, *options]) == 0
    (case,) = results(tmp_path, f"decode-kv-{DEVICE.type}-tiny")["cases"]
    sizes = {name: each["entry_bytes"] for name, each in case["kv"].items()}
    assert sizes == {"bf16": 137, "int8": 77, "k8v4": 63, "int4": 49}
    for each in case["kv"].values():  # all hold as many
        assert each["entries_per_row"] == 12 and min(each["ms_per_step"]["rounds"]) > 0
    assert case["kv"]["bf16"]["over_bf16"] == 1


def test_forms_of_weights(tmp_path: Path) -> None:
    """Perplexity, KL and greedy tokens are those of sessions that read the same piece."""
    few = ["--data", "scenes:dense", "--pieces", "1", "--max-length", "512", "--rounds", "1"]
    weight_forms.main([*few, "--name", "x", "--output", str(tmp_path)])
    found = results(tmp_path, "weights-x")
    forms, read = found["forms"], found["sources"]["scenes:dense"]
    assert list(forms) == list(weight_forms.FORMS) and read["pieces"] == 1
    assert read["auto"] | {"perplexity": 0} == {
        "perplexity": 0,
        "kl_per_token": 0,
        "greedy_same": 1,
        "greedy_before": 64,
    }
    example = held_out(str(bundled_model()), "scenes:dense", 512)[0]
    labels = example.pop("labels")[0].tolist()
    inputs = {name: value for name, value in example.items() if name != "cuts"}
    first = next(at for at, label in enumerate(labels) if label != -100)
    logs: dict[str, list[torch.Tensor]] = {"auto": [], "int4": []}
    chosen: dict[str, list[int]] = {"auto": [], "int4": []}
    for form in logs:
        engine = Runtime.from_pretrained(bundled_model(), device="cpu", policy="full", weights=form)
        assert forms[form]["bytes"] == engine.decoder.weights.nbytes()
        turn = engine.family.turn(inputs, 0, engine.device)
        with engine.session() as session, session.fork() as other:
            logits = session.extend(turn.part(0, first))
            for at, label in enumerate(labels[first:], first):
                if label != -100:
                    logs[form].append(logits.log_softmax(-1))
                logits = session.extend(turn.part(at, at + 1))
            logits = other.extend(turn.part(0, first))
            for step in range(64):
                chosen[form].append(int(logits.argmax()))
                logits = other.decode(chosen["auto"][step])
    target = [label for label in labels if label != -100]
    ours, exact = torch.stack(logs["int4"]), torch.stack(logs["auto"])
    nll = torch.nn.functional.nll_loss(ours, torch.tensor(target))
    assert read["int4"]["perplexity"] == pytest.approx(float(nll.exp()), rel=1e-3)
    kl = float((exact.exp() * (exact - ours)).sum(-1).mean())
    assert read["int4"]["kl_per_token"] == pytest.approx(kl, rel=0.1, abs=1e-4)
    same = [a == b for a, b in zip(*chosen.values(), strict=True)]
    assert read["int4"]["greedy_same"] == pytest.approx(sum(same) / 64, abs=1 / 64)
    assert forms["int4"]["errors"]["median"] == pytest.approx(
        sorted(e for n, e in engine.decoder.weights.errors().items() if "layers" in n)[12], rel=1e-3
    )
