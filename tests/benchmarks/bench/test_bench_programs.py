"""The speed programs from end to end on tiny shapes; times are not judged, only what was timed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch
from torch import Tensor

from benchmarks.bench import admission as bench_admission
from benchmarks.bench import decode as bench_decode
from benchmarks.bench import kernels as bench_kernels
from benchmarks.bench import policies as bench_policies
from benchmarks.bench import prefill as bench_prefill
from benchmarks.bench.peer import DYNAMIC, EAGER, FULL, OWN, PEERS, STATIC, TRIMKV, PeerJob
from benchmarks.bench.shapes import SHAPES
from mmkv.engine.policies import CacheView, Needs, make_policy
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


def test_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that fails is named, and the others go on."""

    def broken(state: object) -> None:
        raise RuntimeError("no such thing\nsecond line")

    monkeypatch.setitem(bench_kernels.PREPARE, "prefill", broken)
    assert bench_kernels.main([*WHERE, "--cases", "tiny", "--output", str(tmp_path)]) == 1
    found = results(tmp_path, "gpu-kernels")
    failed = [case for case in found["cases"] if "failed" in case]
    assert [case["kernel"] for case in failed] == ["prefill"] * 2
    assert failed[0]["failed"] == "RuntimeError: no such thing"
    assert "no such thing" in capsys.readouterr().out
    *cases, whole, eight, four = (case for case in found["cases"] if "failed" not in case)
    kernels = ["attention", "work list", "append", "eviction", "window scores"]
    assert [case["kernel"] for case in cases[::2]] == kernels
    for case in (*cases, whole, eight, four):
        rate = case["bytes"] / case["seconds"]["median"] / found["copy_bandwidth"]
        assert case["of_copy_bandwidth"] == pytest.approx(rate)
    for case in cases:
        assert case["rows"]["mean"] == 12
        assert (case["rows"]["longest"] == 12) == (case["skew"] == 1)
    assert cases[0]["bytes"] == 3 * 12 * TINY.kv_token_bytes(4)
    # Two layers of four matrices, of float32, of 8.5 bits and of 4.5; and three states of each.
    numbers = 2 * (64 * 256 + 128 * 64 + 64 * 192 + 96 * 64)
    through = 3 * 4 * 2 * (320 + 192 + 256 + 160)
    for case, bits in ((whole, 32), (eight, 8.5), (four, 4.5)):
        assert case["bytes"] == numbers * bits / 8 + through


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


def test_forms_of_the_cache(tmp_path: Path) -> None:
    options = ["--kv", "all", "--cases", "3:40:12", "--steps", "3", "--output", str(tmp_path)]
    assert bench_decode.main([*WHERE, *options]) == 0
    (case,) = results(tmp_path, f"decode-kv-{DEVICE.type}-tiny")["cases"]
    sizes = {name: each["entry_bytes"] for name, each in case["kv"].items()}
    assert sizes == {"bf16": 137, "int8": 77, "k8v4": 63, "int4": 49}
    for each in case["kv"].values():  # all hold as many
        assert each["entries_per_row"] == 12 and min(each["ms_per_step"]["rounds"]) > 0
    assert case["kv"]["bf16"]["over_bf16"] == 1


@pytest.mark.long(reason="times every method of the benchmark once")
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
    speed = 3e3 / peer["ms_per_step"]["median"]
    assert peer["versions"]["transformers"] and peer["tokens_per_second"] == pytest.approx(speed)
    batches = [largest["methods"][method]["batch"] for method in (FULL, DYNAMIC, OWN)]
    assert 1 <= batches[0] < batches[2] == 3 and batches[1] < 3, "bounded memory holds more"
    named = {"eviction / step", "physical / logical KV", "tokens/s over own full"}
    assert {target["target"].split(",")[0] for target in found["targets"]} == named


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


def test_targets() -> None:
    memory = {"physical_over_logical": 1.2}
    own = {"ms_per_step": {"median": 2.0}, "step_over_floor": 1.1, "floor_ms": 1.0}
    own |= {"memory": memory, "tokens_per_second": 1600.0}
    full = {"ms_per_step": {"median": 8.0}, "floor_ms": 5.0, "tokens_per_second": 100.0}
    case = {"batch": 16, "context": 16384, "budget": 256, "kind": "targets"}
    case |= {"methods": {OWN: own, FULL: full}, "parts": {"eviction_of_step": 0.02}}
    case["beside"] = {DYNAMIC: {"ours_over_peers_tokens_per_second": {"median": 7.5}}}
    targets = bench_decode.checks("x", case)
    assert {t["target"].split(",")[0]: (round(t["value"], 3), t["met"]) for t in targets} == {
        "step / floor": (1.1, True),
        "eviction / step": (0.02, True),
        "physical / logical KV": (1.2, False),
        "speed-up over own full / what the bytes allow": (0.8, False),
        "tokens/s over transformers": (7.5, False),
    }
    four = bench_decode.checks("qwen3-4b", case | {"batch": 4, "context": 32768, "budget": 1024})
    assert [t["target"].split(",")[0] for t in four if t["value"] == 1600] == ["tokens/s"]
    assert not list(bench_decode.checks("x", case | {"methods": {OWN: {"failed": "why"}}}))


@pytest.mark.slow(reason="times every method of the benchmark once")
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


def test_admission(tmp_path: Path) -> None:
    arguments = ["--length", "96", "--window", "16", "--chunk", "32", "--rates", "1", "0.2"]
    assert bench_admission.main([*arguments, "--rounds", "1", "--output", str(tmp_path)]) == 0
    methods = results(tmp_path, "admission-cpu")["methods"]
    assert list(methods) == [bench_admission.FULL, "1 admitted", "0.2 admitted"]
    assert methods["1 admitted"]["held"] == 1 > methods["0.2 admitted"]["held"] > 16 / 96


@pytest.mark.parametrize(
    ("main", "arguments", "message"),
    [
        (bench_decode.main, ["--cases", "1:2"], "B:CONTEXT:M"),
        (bench_decode.main, ["--python", "x=y"], "NAME=PATH"),
        (bench_kernels.main, ["--device", "cuda:77"], "is not there"),
        (bench_prefill.main, ["--device", "tpu"], "unknown device"),
        *(
            pytest.param(
                main,
                [],
                "no GPU here",
                marks=pytest.mark.skipif(DEVICE.type == "cuda", reason="there is a GPU"),
            )
            for main in (bench_kernels.main, bench_decode.main, bench_prefill.main)
        ),
    ],
)
def test_mistakes_give_one_line(
    main: Callable[[list[str]], int],
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2
    assert message in capsys.readouterr().err.strip().splitlines()[-1]


def test_mmkv_bench(mmkv: Callable[..., Ran], model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmkv.eval.step.copy_bandwidth", lambda device: 2e9)
    monkeypatch.setattr("mmkv.eval.step.wall", lambda call, device: (call(), 8.0)[1])
    options = ["--batch", "2", "--context", "60", "--budget", "8", "--steps", "4", "--rounds", "2"]
    where = ["--gates", "random", "--device", "cpu"]
    ran = mmkv("bench", model, *options, *where, "--json")
    report = json.loads(ran.out)
    assert ran.code == 0 and report["policy"] == "dbtrimkv" and report["batch"] == 2
    assert report["kv"] == "auto" and report["step"]["rounds"] == [8 / 4] * 2
    rows, entry = 4, 2 * 8 * 4  # 2 layers x 2 KV heads of 8 float32
    assert report["logical_bytes"] == 2 * 8 * rows * entry
    assert report["read_kv_bytes"] == 2 * 9 * rows * entry
    assert report["floor"] == (report["weight_bytes"] + report["read_kv_bytes"]) / 2e9
    assert report["over_floor"] == pytest.approx(2 / report["floor"])
    assert report["tokens_per_second"] == 2 / 2  # of the batch, by seconds
    shown = mmkv("bench", model, *options, *where).out
    assert f"{1e3 * report['floor']:.3f} ms a step" in shown and "tokens/s" in shown
    assert "--context of at most" in mmkv("bench", model, "--context", "999999999").error_line()
