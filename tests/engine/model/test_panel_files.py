"""Packed weights on disk: bit-equal, mapped, shared, never of another checkpoint, never half."""

from __future__ import annotations

import errno
import fcntl
import gc
import hashlib
import io
import json
import os
import re
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from mmkv.engine import system
from mmkv.engine.backends import kernels_for
from mmkv.engine.errors import ModelError
from mmkv.engine.model import kept_files, panel_files, stored
from mmkv.engine.model.families import loading
from mmkv.engine.model.gates import load_gates, save_gates
from mmkv.engine.model.kept_files import clear, kept
from mmkv.engine.model.panel_files import PanelStore, with_panels
from mmkv.engine.model.panels import Bf16Matrix, Panels, Rows
from mmkv.engine.model.product import Kernels, WeightForm, multiply
from mmkv.engine.model.rounded import Int4Matrix, Int8Matrix
from mmkv.engine.runtime import Runtime
from mmkv.training.student import TrainableGates
from tests.conftest import make_spec
from tests.support.factories import make_model
from tests.support.native import needs_native
from tests.support.sessions import qwen3_vl, text_ids
from tests.support.tiers import one_in

pytestmark = needs_native
IDS = text_ids(9, seed=3)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep the packed weights of models of any size in a folder of this test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("MMKV_PANELS", "1GiB")
    monkeypatch.setattr(panel_files, "LEAST_BYTES", 0)
    return tmp_path / "cache" / "mmkv" / "panels"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed") / "small"
    make_model(qwen3_vl()).bfloat16().save_pretrained(folder)
    return folder


@pytest.fixture
def model(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "small"))


def load(model: Path, form: str = "auto") -> Runtime:
    return Runtime.from_pretrained(
        model, policy="dbtrimkv", gates="random", budget=6, device="cpu", weights=form
    )


def answers(engine: Runtime) -> Tensor:
    """Return the logits of a prompt and of some steps, and close the session."""
    with engine.session() as session:
        made = [session.prefill({"input_ids": IDS[None]})]
        return torch.stack(made + [session.decode(int(token)) for token in IDS])


def anew(model: Path, form: str = "auto") -> Tensor:
    """Return what :func:`answers` gives without any file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MMKV_PANELS", "0")
        return answers(load(model, form))


@pytest.fixture
def packing(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the matrices that have been packed since."""
    names: list[str] = []
    original = stored.StoredTensors.read_matrix

    def read(self: Any, wanted: Any, *rest: Any) -> Any:
        names.extend(wanted)
        return original(self, wanted, *rest)

    monkeypatch.setattr(stored.StoredTensors, "read_matrix", read)
    return names


@pytest.mark.parametrize("form", ["auto", "bf16", "int8", "int4"])
def test_answers_from_a_file_are_bit_equal(form: str, model: Path, packing: list[str]) -> None:
    expected = anew(model, form)
    packing.clear()
    first = load(model, form)
    assert "are kept in" in str(first.decoder.weights.note)
    packed = list(packing)
    second = load(model, form)
    assert len(packed) > 8 and packing == packed, "the second start packs nothing"
    assert second.decoder.weights.note is None
    for engine in (first, second):
        assert torch.equal(answers(engine), expected)
        assert engine.decode_path == "native"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MMKV_PANELS", "0")
        fresh = load(model, form)
    assert first.identity() == second.identity() == fresh.identity()
    assert second.decoder.weights.errors() == fresh.decoder.weights.errors()


def test_both_names_of_exact_weights_share_a_file(model: Path, packing: list[str]) -> None:
    load(model, "auto")
    packing.clear()
    load(model, "bf16")
    assert packing == [] and [file.form for file in kept()] == ["bf16"]


def test_it_is_a_safetensors_file(model: Path) -> None:
    weights = load(model, "int8").decoder.weights
    (file,) = kept()
    assert (file.model, file.form) == (str(model), "int8")
    assert file.bytes == file.path.stat().st_size and not list(file.path.parent.glob("*.part"))
    with safe_open(file.path, framework="pt") as opened:
        name = "model.language_model.embed_tokens.weight"
        assert isinstance(weights.embed, Int8Matrix)
        assert torch.equal(opened.get_tensor(f"{name}:codes"), weights.embed.codes)
        assert torch.equal(opened.get_tensor(f"{name}:scales"), weights.embed.scales)


def mappings(path: Path) -> list[dict[str, Any]]:
    """Return this process's mappings of a file: where each lies, and its counts in KiB."""
    found: list[dict[str, Any]] = []
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            ours = line.endswith(f" {path}")
            found.append({"from": int(span[1], 16), "to": int(span[2], 16), "ours": ours})
        elif count := re.match(r"(\w+): +(\d+) kB", line):
            found[-1][count[1]] = int(count[2])
    return [each for each in found if each["ours"]]


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="asks Linux for the pages")
@pytest.mark.parametrize("form", ["auto", "int8"])
def test_pages_are_shared_and_nothing_copies_them(form: str, model: Path) -> None:
    engines = [load(model, form)]
    (file,) = kept()
    assert len(mappings(file.path)) == 1, "the start that wrote it has no more than others"
    engines.append(load(model, form))
    results = [answers(engine) for engine in engines]
    assert torch.equal(*results)
    for engine in engines:
        addresses = [at for matrix in engine.decoder.weights.matrices() for at in places(matrix)]
        (mine,) = [
            each for each in mappings(file.path) if each["from"] <= addresses[0] < each["to"]
        ]
        assert all(mine["from"] <= at < mine["to"] for at in addresses)
        assert mine["Anonymous"] == 0, "no page was copied"
        # The system may have taken some pages back, and given them to one of both again.
        assert mine["Shared_Clean"] + mine["Shared_Dirty"] > mine["Rss"] / 2 > 0


def places(matrix: Any) -> list[int]:
    assert isinstance(matrix, Panels)
    return [part.data_ptr() for part in matrix.held()]


def test_what_is_mapped_is_no_free_memory(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, found in (("_available", 10**12), ("_in_group", 10**9), ("_below_limit", None)):
        monkeypatch.setattr(system, name, lambda found=found: found)
    load(model)
    (file,) = kept()
    gc.collect()
    before = system.free_bytes(torch.device("cpu"))
    assert before == 10**9 - sum(system._mapped.values())
    engine = load(model)
    assert system.free_bytes(torch.device("cpu")) == before - file.bytes
    monkeypatch.setattr(system, "_in_group", lambda: 5)
    assert system.free_bytes(torch.device("cpu")) == 0
    del engine
    gc.collect()
    monkeypatch.setattr(system, "_in_group", lambda: 10**9)
    assert system.free_bytes(torch.device("cpu")) == before


def change(model: Path, name: str = "layers.0.mlp.down_proj.weight") -> None:
    """Double a matrix in place, behind its first KiB, and put the time of the last write back."""
    (path,) = model.glob("*.safetensors")
    state, content = path.stat(), bytearray(path.read_bytes())
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    (full,) = [key for key in header if key.endswith(f"language_model.{name}")]
    begin, end = (8 + size + at for at in header[full]["data_offsets"])
    numbers = torch.frombuffer(
        content, dtype=torch.bfloat16, count=(end - begin) // 2, offset=begin
    )
    numbers[512:] *= 2
    path.write_bytes(content)
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (state.st_size, state.st_mtime_ns)


@pytest.mark.parametrize("form", ["auto", "int8"])
def test_a_changed_checkpoint_is_packed_anew(form: str, model: Path) -> None:
    """Same path, size, time of the last write, header, and first KiB of every tensor."""
    old = answers(load(model, form))
    change(model)
    changed = answers(load(model, form))
    assert torch.equal(changed, anew(model, form)) and not torch.equal(changed, old)
    assert len(kept()) == 1, "it takes the place of the old file"


def test_a_checkpoint_that_changes_meanwhile_is_not_kept(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = stored.read_text_weights

    def read(*arguments: Any) -> Any:
        found = original(*arguments)
        (path,) = model.glob("*.safetensors")
        os.utime(path)
        return found

    monkeypatch.setattr(loading, "read_text_weights", read)
    load(model)
    assert kept() == [] and not list(panel_files.folder().iterdir())


def damages() -> dict[str, Callable[[bytes], bytes]]:
    def in_header(content: bytes, old: bytes, new: bytes) -> bytes:
        assert content.count(old) >= 1 and len(old) == len(new)
        return content.replace(old, new)

    return {
        "empty": lambda content: b"",
        "no header": lambda content: b"\xff" * 64,
        "text": lambda content: b"{}" * 2**10,
        "a list": lambda content: (2).to_bytes(8, "little") + b"[]",
        "cut": lambda content: content[:-1],
        "longer": lambda content: content + b"\0",
        "only a header": lambda content: content[: 2**20],
        "a hole at the end": lambda content: content[:-512] + bytes(512),
        "another class": lambda content: in_header(content, b"Int8Matrix", b"Int9Matrix"),
        "another dtype": lambda content: in_header(content, b'"dtype": "I8"', b'"dtype": "X8"'),
        "other shapes": other_shapes,
        "an older layout": lambda content: in_header(content, b'"layout\\": 1', b'"layout\\": 0'),
        "an older format": lambda content: in_header(content, b"mmkv panels 1", b"mmkv panels 0"),
    }


def other_shapes(content: bytes) -> bytes:
    """Return a file that says its matrices were narrower, or wider, than what it holds."""
    begin = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:begin])
    matrices = json.loads(header["__metadata__"]["matrices"])
    for number, saved in enumerate(matrices.values()):
        rows, width = saved["shape"]
        saved["shape"] = [rows, 2 * width if number % 2 else width // 2]
    header["__metadata__"]["matrices"] = json.dumps(matrices)
    return content[:8] + json.dumps(header).encode().ljust(begin - 8) + content[begin:]


@one_in(3)
@pytest.mark.parametrize("damage", damages())
def test_a_damaged_or_foreign_file_is_made_anew(
    damage: str, model: Path, packing: list[str]
) -> None:
    expected = answers(load(model, "int8"))
    (file,) = kept()
    good = file.path.read_bytes()
    file.path.write_bytes(damages()[damage](good))
    packing.clear()
    assert torch.equal(answers(load(model, "int8")), expected)
    assert packing and file.path.read_bytes() == good


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_file_of_another_user_is_made_anew(model: Path, packing: list[str]) -> None:
    expected = answers(load(model))
    (file,) = kept()
    os.chown(file.path, 12345, -1)
    packing.clear()
    assert torch.equal(answers(load(model)), expected)
    assert packing and file.path.stat().st_uid == 0
    packing.clear()
    for path in (file.path, *model.iterdir()):  # both are of whom the checkpoint is
        os.chown(path, 12345, -1)
    load(model)  # whose times have changed
    os.chown(file.path, 12345, -1)
    packing.clear()
    load(model)
    assert not packing


def test_nothing_is_written_where_a_link_leads(model: Path, cache: Path, tmp_path: Path) -> None:
    load(model)
    (file,) = kept()
    file.path.unlink()
    (tmp_path / "other").write_text("mine")
    file.path.with_name(f"{file.path.name}.part").symlink_to(tmp_path / "other")
    engine = load(model)
    assert torch.equal(answers(engine), anew(model))
    assert "not kept" in str(engine.decoder.weights.note)
    assert (tmp_path / "other").read_text() == "mine"


def test_a_pipe_in_a_file_s_place_is_replaced(model: Path, cache: Path) -> None:
    """Nobody waits for who would write to it; what is kept is for reading alone."""
    load(model)
    (file,) = kept()
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o400
    for path in (file.path, cache / "left.safetensors.part"):
        path.unlink(missing_ok=True)
        os.mkfifo(path)
    assert kept() == []
    engine = load(model)
    assert torch.equal(answers(engine), anew(model)) and len(kept()) == 1


def test_the_draft_of_the_next_one_stays(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.mkdir(parents=True)
    draft = cache / "one.safetensors.part"
    draft.write_text("the one before")
    lock = fcntl.flock

    def late(file: Any, how: int) -> None:
        draft.rename(cache / "one.safetensors")  # that one is whole
        draft.write_text("the next one")
        lock(file, how)

    monkeypatch.setattr(kept_files.fcntl, "flock", late)
    kept_files._drop_left_drafts(cache)
    assert draft.read_text() == "the next one"
    monkeypatch.setattr(kept_files.fcntl, "flock", lock)
    kept_files.clear()
    assert not draft.exists()


def test_a_file_of_another_checkpoint_is_not_taken(model: Path, original: Path) -> None:
    """Even under the right name."""
    expected = answers(load(model))
    (ours,) = kept()
    change(model)
    load(model)
    other = ours.path.read_bytes()
    (path,) = model.glob("*.safetensors")
    shutil.copy(original / path.name, path)
    ours.path.write_bytes(other)
    assert torch.equal(answers(load(model)), expected)


def test_weights_that_are_not_finite_leave_no_file(model: Path) -> None:
    (path,) = model.glob("*.safetensors")
    tensors = load_file(path)
    next(t for name, t in tensors.items() if name.endswith("0.mlp.down_proj.weight"))[0, 0] = (
        torch.nan
    )
    save_file(tensors, path, {"format": "pt"})
    for _ in range(2):
        with pytest.raises(ModelError, match=r"NaN or infinity \(in layers\.0\.down\)"):
            load(model)
    assert not list(panel_files.folder().iterdir())


def test_what_a_file_holds_is_not_checked_again(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[str] = []

    def require(tensors: Any, name: str) -> None:
        checked.extend(part for part, _ in tensors)

    monkeypatch.setattr(loading, "require_finite", require)
    load(model)
    assert "layers.0.qkv" in checked and "embed_tokens" in checked
    checked.clear()
    load(model)
    assert "layers.0.input_norm" in checked and "layers.0.qkv" not in checked
    assert "embed_tokens" not in checked and "lm_head" not in checked


@pytest.mark.parametrize("stored_twice", [False, True])
def test_a_tied_head_is_the_embedding_and_not_compared_again(
    stored_twice: bool, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path,) = model.glob("*.safetensors")
    tensors = load_file(path)
    (embed,) = [t for name, t in tensors.items() if name.endswith("embed_tokens.weight")]
    del tensors["lm_head.weight"]
    again = {"lm_head.weight": embed.clone()} if stored_twice else {}
    save_file(tensors | again, path, {"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    expected = answers(load(model))
    monkeypatch.delattr(stored, "equal")
    engine = load(model)
    assert engine.decoder.weights.head is engine.decoder.weights.embed
    assert torch.equal(answers(engine), expected)


def full_disk(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    class Full(io.FileIO):
        def write(self, content: Any) -> int:
            if self.tell() > 2**20 + after:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(content)

    monkeypatch.setattr(panel_files, "FileIO", Full)


def test_ctrl_c_between_two_writes_leaves_nothing(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stopped(io.FileIO):
        def write(self, content: Any) -> int:
            if self.tell() > 2**20 + 20_000:
                raise KeyboardInterrupt
            return super().write(content)

    expected = anew(model, "int8")
    with monkeypatch.context() as patch:
        patch.setattr(panel_files, "FileIO", Stopped)
        with pytest.raises(KeyboardInterrupt):
            load(model, "int8")
    assert list(cache.iterdir()) == []
    assert torch.equal(anew(model, "int8"), expected)  # nothing is filled from a file any more
    assert torch.equal(answers(load(model, "int8")), expected)
    assert len(kept()) == 1


@pytest.mark.parametrize("after", [0, 20_000])
def test_a_full_disk_is_a_note(
    after: int, model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = anew(model)
    full_disk(monkeypatch, after)
    engine = load(model)
    assert torch.equal(answers(engine), expected)
    said = str(engine.decoder.weights.note)
    assert "not kept" in said and "No space left" in said and "MMKV_PANELS=0" in said
    assert list(cache.iterdir()) == []


def test_where_a_disk_is_full_nothing_is_held_twice(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.collect()
    before, read, mapped = sum(system._mapped.values()), loading.read_text_weights, []

    def noted(*given: Any) -> Any:
        mapped.append(sum(system._mapped.values()))
        made = read(*given)
        mapped.append(sum(system._mapped.values()))
        return made

    monkeypatch.setattr(loading, "read_text_weights", noted)
    full_disk(monkeypatch, 300_000)
    load(model)
    assert mapped == [before, before, before]  # it was begun, and read anew


def test_a_folder_that_cannot_be_made_is_a_note(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    engine = load(model)
    assert torch.equal(answers(engine), anew(model))
    assert "Not a directory" in str(engine.decoder.weights.note)


def test_more_than_all_may_take_is_a_note_and_deletes_nothing(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(model, "int8")
    monkeypatch.setenv("MMKV_PANELS", "16KiB")
    engine = load(model, "auto")
    assert re.search("they take .* and may take 16.0 KiB", str(engine.decoder.weights.note))
    assert [file.form for file in kept()] == ["int8"]


def test_a_limit_just_above_a_file_holds_it(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load(model, "int4")
    (file,) = kept()
    clear()
    monkeypatch.setenv("MMKV_PANELS", str(file.bytes + 2**12))
    load(model, "int4")
    assert [again.bytes for again in kept()] == [file.bytes]


def test_what_was_used_longest_ago_goes_first(
    model: Path, original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Path(shutil.copytree(original, tmp_path / "other"))
    old = load(model, "int8")
    load(other, "int8")
    for file, age in zip(kept(), (100, 200), strict=True):
        os.utime(file.path, (1, os.stat(file.path).st_mtime - age))
    load(model, "int8")  # is used again
    size = sum(file.bytes for file in kept())
    monkeypatch.setenv("MMKV_PANELS", str(size + 2**20))
    left = panel_files.folder() / "killed.safetensors.part"
    left.write_bytes(b"half")
    load(model, "auto")
    assert [(Path(file.model).name, file.form) for file in kept()] == [
        ("small", "bf16"),
        ("small", "int8"),
    ]
    assert not left.exists(), "nobody writes it any more"
    clear()
    assert kept() == []
    assert torch.equal(answers(old), anew(model, "int8")), "what is mapped stays"


def test_small_models_and_those_who_want_none_leave_no_file(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MMKV_PANELS", "0")
    assert load(model).decoder.weights.note is None
    monkeypatch.setenv("MMKV_PANELS", "")
    numbers = sum(part.numel() for part in load_file(next(model.glob("*.safetensors"))).values())
    monkeypatch.setattr(panel_files, "LEAST_BYTES", 2 * numbers + 1)
    assert load(model).decoder.weights.note is None
    assert not cache.exists()
    monkeypatch.setattr(panel_files, "LEAST_BYTES", numbers)  # as text alone, in two bytes each
    assert load(model).decoder.weights.note is not None and cache.exists()
    monkeypatch.setenv("MMKV_PANELS", "much")
    with pytest.raises(ModelError, match="MMKV_PANELS: 'much' is not an amount of memory"):
        load(model)


def pack(value: int, calls: list[int]) -> Callable[[PanelStore], Panels]:
    """Return a reader of one matrix that counts how often it is packed."""

    def make() -> Bf16Matrix:
        calls.append(value)
        return Bf16Matrix.of(torch.full((70, 33), value, dtype=torch.bfloat16))

    return lambda store: store.matrix("one", make)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    save_file({"a": torch.ones(3)}, tmp_path / "a.safetensors")
    return [tmp_path / "a.safetensors"]


@pytest.mark.parametrize("name", ["auto", "int8", "int4"])
@pytest.mark.parametrize("native", [True, False])
def test_panels_are_written_some_at_a_time(
    name: str, native: bool, files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the same file content as in one piece, where parts end amid a panel, and writes early."""

    class Short(io.FileIO):
        def write(self, content: Any) -> int:
            sizes.append(len(content))
            return super().write(content[:5_000])

    sizes: list[int] = []
    monkeypatch.setattr(panel_files, "FileIO", Short)
    monkeypatch.setattr(panel_files, "_IN_CACHE", 0)
    kernels = kernels_for(name) if native else Kernels(multiply, packed=Bf16Matrix.of)
    form = WeightForm(name, kernels)
    parts = [torch.randn(rows, 70).bfloat16() for rows in (700, 520, 7, 1)]
    whole = torch.cat(parts)
    kind: Any = {"auto": Bf16Matrix, "int8": Int8Matrix, "int4": Int4Matrix}[name]
    wanted = kind.of(whole)

    def read(store: PanelStore) -> Panels:
        return store.matrix("one", lambda: form.hold(Rows(parts), "layers.0"))

    made, note = with_panels(read, files, "m", name, whole.numel(), 2 * whole.numel())
    assert made is not None and "are kept in" in str(note) and len(sizes) > 3
    assert made.shape == wanted.shape == (1228, 70)
    for mine, theirs in zip(made.held(), wanted.held(), strict=True):
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
    if name != "auto":
        assert made.error == pytest.approx(wanted.error, rel=1e-6) and made.error > 0  # type: ignore[attr-defined]


def test_of_two_at_once_one_packs_and_the_other_waits(files: list[Path]) -> None:
    calls: list[int] = []
    inside, go = threading.Event(), threading.Event()
    reader = pack(3, calls)

    def slow(store: PanelStore) -> Panels:
        inside.set()
        assert go.wait(60)
        return reader(store)

    found: list[Any] = []
    first = threading.Thread(
        target=lambda: found.append(with_panels(slow, files, "m", "bf16", 1, 2))
    )
    second = threading.Thread(
        target=lambda: found.append(with_panels(reader, files, "m", "bf16", 1, 2))
    )
    first.start()
    assert inside.wait(60)
    second.start()
    go.set()
    for thread in (first, second):
        thread.join(60)
    assert calls == [3] and len(found) == 2
    assert all(torch.equal(made.wide(), torch.full((70, 33), 3.0)) for made, _ in found)


def test_nobody_waits_for_ever(
    files: list[Path], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    with_panels(pack(3, calls), files, "m", "bf16", 1, 2)
    (file,) = kept()
    file.path.unlink()
    monkeypatch.setattr(kept_files, "_PATIENCE", 0.0)
    with open(f"{file.path}.part", "wb") as stuck:
        fcntl.flock(stuck, fcntl.LOCK_EX)
        found, note = with_panels(pack(3, calls), files, "m", "bf16", 1, 2)
    assert found is not None and "for too long" in str(note) and calls == [3, 3]
    with_panels(pack(3, calls), files, "m", "bf16", 1, 2)
    assert len(kept()) == 1, "a draft that nobody holds is in nobody's way"


@pytest.fixture
def weight() -> Iterator[Tensor]:
    yield torch.arange(40 * 70).reshape(40, 70).remainder(251).sub(125).div(64)


@pytest.mark.parametrize(
    ("kind", "digest"),
    [
        (Bf16Matrix, "1335e93ee6d5db8a"),
        (Int8Matrix, "4930f75ae72780f0"),
        (Int4Matrix, "eeb666a165845add"),
    ],
)
def test_a_layout_that_changes_has_a_number_of_its_own(
    kind: Any, digest: str, weight: Tensor
) -> None:
    """Files on users' disks hold this one: raise ``layout`` of the class, then mend this test."""
    made = kind.of(weight.bfloat16())
    content = b"".join(part.view(torch.uint8).numpy().tobytes() for part in made.held())
    assert (made.layout, hashlib.sha256(content).hexdigest()[:16]) == (1, digest)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_trunks_of_gates_are_kept_and_mapped(
    cache: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    """As they were read, also where their file is written anew before they are packed."""
    spec, device = make_spec(layers=3, kv_heads=2), torch.device("cpu")
    hidden = torch.randn(50, spec.hidden_size, generator=torch.Generator().manual_seed(1))
    read = []
    for seed in (4, 5):
        made = TrainableGates(spec, d_gate=32, bias=18.0, seed=seed).gates()
        save_gates(made, tmp_path / "gates", spec, dtype)
        read += [load_gates(tmp_path / "gates", spec) for _ in range(2)]
    for gates in (read[0], read[2], read[3], read[1]):
        held = gates.in_bf16(kernels_for("int8", device), device, torch.float32)
        assert held.fingerprint() == gates.fingerprint()
        (file,) = cache.iterdir()
        spans = mappings(file)
        for layer, gate in enumerate(held.layers):
            x = hidden
            for weight, bias in gates.layers[layer].trunk:
                x = torch.nn.functional.silu(x @ weight.bfloat16().float().T + bias.float())
            wanted = x @ gate.readout.T + gate.bias
            torch.testing.assert_close(held.logits(layer, hidden), wanted, rtol=0, atol=1e-5)
            for weight, _ in gate.trunk:
                for at in places(weight):
                    (mine,) = [span for span in spans if span["from"] <= at < span["to"]]
                    assert mine["Anonymous"] == 0, "no page was copied"


def test_gates_take_no_model_s_place(
    cache: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each start would pack the one anew and delete the other."""
    spec, device = make_spec(layers=3, kv_heads=2), torch.device("cpu")
    save_gates(TrainableGates(spec, d_gate=32).gates(), tmp_path / "gates", spec)
    load(model, "int8")
    (file,) = cache.iterdir()
    monkeypatch.setenv("MMKV_PANELS", str(file.stat().st_size + 1000))
    gates = load_gates(tmp_path / "gates", spec)
    gates.in_bf16(kernels_for("int8", device), device, torch.float32)
    assert list(cache.iterdir()) == [file]
