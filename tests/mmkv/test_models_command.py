"""``mmkv models`` and ``mmkv pull``, from folders and from a hub on this machine."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import huggingface_hub.constants
import pytest
import torch

from mmkv.checkpoints import FAMILIES
from mmkv.engine.model import families
from mmkv.engine.model.fingerprint import fingerprint
from mmkv.engine.model.gates import make_random_gates, save_gates
from mmkv.engine.runtime import Runtime
from tests.engine.test_gates import published
from tests.support import fake_hub

if TYPE_CHECKING:
    from tests.support.cli_fixtures import Ran

pytest_plugins = ("tests.support.cli_fixtures",)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand in an empty folder beside an empty hub cache."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


@pytest.fixture
def hub(
    model: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[fake_hub.Repositories, list[str]]]:
    """Yield a hub's repositories, to be filled, and the files that were fetched from it."""
    repositories: fake_hub.Repositories = {}
    constants = huggingface_hub.constants
    with fake_hub.serve(repositories) as (address, fetched):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", address)
        template = address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield repositories, fetched


def listed(mmkv: Callable[..., Ran]) -> dict[str, Any]:
    ran = mmkv("models", "--json")
    assert ran.code == 0 and ran.err == ""
    found: dict[str, Any] = json.loads(ran.out)
    return found


def files_of(folder: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.is_file()}


# --- models ---


def test_the_families_are_those_of_the_engine(mmkv: Callable[..., Ran]) -> None:
    own = [name for family in families.FAMILIES for name in family.model_types]
    assert sorted(FAMILIES) == sorted(own)
    rows = [row["model_type"] for row in listed(mmkv)["families"]]
    assert [name for name in rows if name in FAMILIES] == list(FAMILIES)


def test_published_gates_are_named_for_their_models(
    mmkv: Callable[..., Ran],
    model: str,
    hub: tuple[fake_hub.Repositories, list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name, base = "ngocbh/DBTrimKV-Qwen3-VL-4B-Instruct", "Qwen/Qwen3-VL-4B-Instruct"
    repositories, _ = hub
    repositories[base] = files_of(model)
    spec = Runtime.from_pretrained(model, policy="full").spec
    torch.save(published(spec, "rg10"), "trimkv_weights.pth")
    repositories[name] = {
        "config.json": b"{}",
        "trimkv_weights.pth": Path("trimkv_weights.pth").read_bytes(),
    }
    assert mmkv("pull", base, "--quiet").code == mmkv("pull", name, "--quiet").code == 0
    found = listed(mmkv)
    assert [row["gates"] for row in found["models"] if row["name"] == base] == [[name]]
    assert {"name": name, "base": base, "policy": "dbtrimkv", "budget": 32, "context": 32768} in (
        found["published_gates"]
    )
    assert [row["base"] for row in found["gates"] if row["name"] == name] == [base]
    shown = mmkv("models")
    assert name in shown.out and "TrimKV-Phi-3-mini-128k-instruct" in shown.out
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    said = mmkv("chat", base, "--gates", name, "-p", "hello", "--max-new-tokens", "2", "--json")
    assert said.code == 0 and json.loads(said.out)["policy"].startswith("dbtrimkv")


def test_folders_are_found_with_family_size_and_gates(mmkv: Callable[..., Ran], model: str) -> None:
    shutil.copytree(model, "models/one")
    shutil.copytree(model, "two")
    spec = Runtime.from_pretrained(model, policy="full").spec
    gates = make_random_gates(spec)
    save_gates(gates, "two/gates", spec, None, base_model="two")
    save_gates(gates, "sets/mine", spec, None, base_fingerprint=fingerprint(model))
    for name, config in (("other", '{"model_type": "bert"}'), ("app", "{}"), ("bad", "{")):
        Path(name).mkdir()
        Path(name, "config.json").write_text(config)
    Path("light").mkdir()
    shutil.copy(Path(model) / "config.json", "light")
    config = json.loads(Path("light/config.json").read_text())
    for index in ("{", "[]", '{"weight_map": 1}'):
        Path(f"torn{len(index)}").mkdir()
        Path(f"torn{len(index)}", "config.json").write_text(json.dumps(config))
        Path(f"torn{len(index)}", "model.safetensors.index.json").write_text(index)
    shutil.copytree(model, "small")
    quantised = config | {"quantization_config": {"quant_method": "gptq"}}
    Path("small/config.json").write_text(json.dumps(quantised))
    found = listed(mmkv)
    rows = {row["name"]: row for row in found["models"]}
    torn = {"torn1", "torn2", "torn17"}
    own = {"tiny-vlm", "smollm2-llava"}
    assert set(rows) == {"models/one", "two", "other", "light", "small"} | own | torn
    assert "mmkv.training.llava join" in rows["smollm2-llava"]["problem"]
    assert {rows[name]["problem"] for name in torn} == {"its index of weight files cannot be read"}
    assert "quantised" in rows["small"]["problem"]
    assert rows["tiny-vlm"]["where"] == "bundled" and "gates/" in rows["tiny-vlm"]["gates"]
    one, two = rows["models/one"], rows["two"]
    size = sum(path.stat().st_size for path in Path(model).iterdir())
    assert (one["family"], one["where"], one["size"]) == ("qwen3_vl", "folder", size)
    assert one["gates"] == ["sets/mine"] and two["gates"] == ["gates/", "sets/mine"]
    assert one["problem"] == "" and two["size"] > size
    assert "does not run" in rows["other"]["problem"]
    assert "no safetensors" in rows["light"]["problem"]
    assert {row["name"]: row["kind"] for row in found["gates"]}["sets/mine"] == "retention"
    shown = mmkv("models")
    assert shown.code == 0 and "models/one" in shown.out and "sets/mine" in shown.out


# --- pull ---


def test_what_was_pulled_is_listed_and_answers_without_the_network(
    mmkv: Callable[..., Ran],
    model: str,
    hub: tuple[fake_hub.Repositories, list[str]],
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    repositories, fetched = hub
    extra = ("README.md", "pytorch_model.bin", "consolidated.safetensors", "onnx/config.json")
    repositories["someone/small"] = files_of(model) | dict.fromkeys(extra, b"x")
    ran = mmkv("pull", "someone/small")
    assert ran.code == 0 and f"someone/small: {len(files_of(model))} files" in ran.err
    folder = Path(ran.out.strip())
    assert folder.is_relative_to(cache) and files_of(str(folder)) == files_of(model)
    assert sorted(fetched) == sorted(files_of(model))
    quiet = mmkv("pull", "someone/small", "--quiet")
    assert (quiet.out, quiet.err) == (ran.out, "") and len(fetched) == len(files_of(model))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    (row,) = [row for row in listed(mmkv)["models"] if row["where"] == "hub cache"]
    assert (row["name"], row["family"], row["problem"]) == ("someone/small", "qwen3_vl", "")
    assert row["size"] == sum(len(content) for content in files_of(model).values())
    answer = mmkv("chat", "someone/small", "-p", "hello", "--max-new-tokens", "2")
    assert (
        answer.code == 0
        and answer.out == mmkv("chat", model, "-p", "hello", "--max-new-tokens", "2").out
    )


def test_gates_are_pulled_and_found_by_the_model(
    mmkv: Callable[..., Ran], model: str, hub: tuple[fake_hub.Repositories, list[str]]
) -> None:
    repositories, _ = hub
    spec = Runtime.from_pretrained(model, policy="full").spec
    save_gates(make_random_gates(spec), "made", spec, None, base_fingerprint=fingerprint(model))
    repositories["someone/gates"] = files_of("made")
    shutil.rmtree("made")
    assert mmkv("pull", "someone/gates").code == 0
    shutil.copytree(model, "small")
    found = listed(mmkv)
    assert ("someone/gates", "hub cache") in {(g["name"], g["where"]) for g in found["gates"]}
    assert [m["gates"] for m in found["models"] if m["name"] == "small"] == [["someone/gates"]]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("someone/gated", "is gated: accept its terms at http"),
        ("someone/missing", "the hub has no 'someone/missing', or it is private"),
        ("someone/private", "the hub has no 'someone/private', or it is private"),
        ("someone/pickled", "has no safetensors weights"),
        ("someone/broken", "was not fetched: "),
        ("../someone", "is not a hub id"),
    ],
)
def test_refusals_are_one_line(
    mmkv: Callable[..., Ran],
    hub: tuple[fake_hub.Repositories, list[str]],
    name: str,
    says: str,
) -> None:
    repositories, fetched = hub
    repositories.update({"someone/gated": 403, "someone/private": 401, "someone/broken": 418})
    repositories["someone/pickled"] = {"config.json": b"{}", "pytorch_model.bin": b"x"}
    ran = mmkv("pull", name)
    assert ran.code == 1 and says in ran.error_line() and fetched == []


def test_a_full_disk_is_named_before_anything_is_fetched(
    mmkv: Callable[..., Ran],
    model: str,
    hub: tuple[fake_hub.Repositories, list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    repositories, fetched = hub
    repositories["someone/small"] = files_of(model)
    monkeypatch.setattr("mmkv.pull._free_bytes", lambda folder: 1000)
    ran = mmkv("pull", "someone/small", "--quiet")
    assert ran.code == 1 and "set HF_HOME" in ran.error_line() and fetched == []


def test_offline_nothing_is_asked(mmkv: Callable[..., Ran]) -> None:
    ran = mmkv("pull", "someone/small")
    assert ran.code == 1 and "HF_HUB_OFFLINE is set" in ran.error_line()


def test_the_cache_command_lists_and_clears(
    model: str, tmp_path: Path, mmkv: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("MMKV_PANELS", "1GiB")
    monkeypatch.setattr("mmkv.engine.model.panel_files.LEAST_BYTES", 0)
    folder = tmp_path / "cache" / "mmkv" / "panels"
    assert mmkv("cache").out == f"0 B held in {folder} (0 files)\n"
    for form in ("int8", "bf16"):
        ran = mmkv("chat", model, "--raw", "--max-new-tokens", "1", "-p", "a", "--weights", form)
        assert ran.code == 0 and f"packed weights are kept in {folder}" in ran.err.replace("\n", "")
    rows = json.loads(mmkv("cache", "--json").out)
    assert [(row["model"], row["form"]) for row in rows] == [(model, "bf16"), (model, "int8")]
    first = mmkv("cache", Path(model).name).out.splitlines()[0]
    assert re.fullmatch(rf" *[\d.]+ MiB  bf16   last used [-\d]+ [\d:]+  {model}", first)
    assert mmkv("cache", "other", "--clear").error_line().endswith("lists what is")
    assert len(list(folder.iterdir())) == 2
    assert mmkv("cache", "--clear", model).out.endswith(f"deleted in {folder} (2 files)\n")
    assert list(folder.iterdir()) == []
