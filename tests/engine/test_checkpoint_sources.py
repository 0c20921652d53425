"""Folders and files that are no checkpoint: cause and remedy, and nothing is read for ever."""

from __future__ import annotations

import base64
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import normalizers

from mmkv import Engine
from mmkv.checkpoints import _checkpoint, _json
from mmkv.engine.errors import MmkvError, ModelError, SessionError
from mmkv.engine.model.fingerprint import fingerprint
from mmkv.engine.model.source import INDEX, SINGLE, _longest, locate, require_normal_growth
from tests.support.chat_models import save_llama


def adapter(folder: Path) -> None:
    folder.mkdir()
    base = {"base_model_name_or_path": "Qwen/Qwen3-4B"}
    (folder / "adapter_config.json").write_text(json.dumps(base))
    (folder / "adapter_model.safetensors").touch()


def pickled(folder: Path) -> None:
    save_llama(folder)
    (folder / SINGLE).rename(folder / "pytorch_model.bin")


def own_code(folder: Path) -> None:
    folder.mkdir()
    code = {"AutoModelForCausalLM": "modeling_own.Own", "AutoConfig": "configuration_own.Own"}
    (folder / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": code}))


def of_llama_cpp(folder: Path) -> None:
    folder.mkdir()
    (folder / "m.gguf").touch()


def of_its_maker(folder: Path) -> None:
    folder.mkdir()
    (folder / "params.json").write_text("{}")
    (folder / "consolidated.00.pth").touch()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (adapter, "an adapter (PEFT) of 'Qwen/Qwen3-4B', no model; put both together"),
        (pickled, "its weights in pytorch_model.bin alone, a pickle"),
        (own_code, "Python code of its own (auto_map in config.json: modeling_own.Own)"),
        (of_llama_cpp, "no config.json, but weights for llama.cpp"),
        (of_its_maker, "weights as their maker has them"),
    ],
)
def test_a_folder_that_is_no_checkpoint_says_what_it_is(
    make: Callable[[Path], Any], words: str, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    make(folder)
    with pytest.raises(ModelError) as error:
        Engine.from_pretrained(folder)
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("m.gguf", "weights for llama.cpp"),
        ("pytorch_model.bin", "a pickle"),
        ("model.safetensors", "weights without the files"),
        ("model.ONNX", "ONNX Runtime"),
        ("notes.md", "is a file"),
    ],
)
def test_a_file_says_what_it_is(file: str, words: str, tmp_path: Path) -> None:
    (tmp_path / file).touch()
    with pytest.raises(ModelError, match=words):
        locate(str(tmp_path / file))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes of POSIX")
@pytest.mark.parametrize(
    "file", ["config.json", SINGLE, INDEX, "tokenizer.json", "generation_config.json"]
)
@pytest.mark.parametrize("kind", ["pipe", "zero"])
def test_a_pipe_or_device_is_not_read(file: str, kind: str, tmp_path: Path) -> None:
    folder = save_llama(tmp_path / "model")
    (folder / file).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(folder / file)
    else:
        (folder / file).symlink_to("/dev/zero")
    with pytest.raises(ModelError, match="no file but a pipe or device"):
        Engine.from_pretrained(folder)
    config = _json(folder / "config.json")  # what ``mmkv models`` reads
    assert bool(config) == (file != "config.json")
    if config:
        _checkpoint("model", folder, "folder", 0, [])
    fingerprint(str(folder))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes of POSIX")
def test_a_session_file_that_is_a_pipe_is_not_read(tmp_path: Path) -> None:
    engine = Engine.from_pretrained(save_llama(tmp_path / "model"), policy="streamingllm", budget=8)
    os.mkfifo(tmp_path / "saved.mmkv")
    with pytest.raises(SessionError, match="is no file"):
        engine.load_session(tmp_path / "saved.mmkv")


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/passwd", "a/../../b", "..\\b"])
def test_an_index_names_files_of_its_own_checkpoint(name: str, tmp_path: Path) -> None:
    folder = save_llama(tmp_path / "model")
    (folder / SINGLE).rename(tmp_path / "other.safetensors")
    weights = {"model.norm.weight": name}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    with pytest.raises(ModelError, match="outside of the checkpoint"):
        Engine.from_pretrained(folder)


def normalizer(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": list(parts)}


def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def precompiled(*texts: str) -> dict[str, Any]:
    trie = bytes(8)  # which of them stands for which character does not matter here
    table = len(trie).to_bytes(4, "little") + trie + b"".join(t.encode() + b"\0" for t in texts)
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}


DOUBLE = replace({"String": "a"}, "aa")
SPACES = replace({"String": " "}, "\u2581")
SPREAD = replace({"String": " "}, "\ufdfa")  # four words


@pytest.mark.parametrize(
    ("found", "fine"),
    [
        (None, True),
        (SPACES, True),
        (normalizer({"type": "Prepend", "prepend": "\u2581"}, SPACES, {"type": "NFC"}), True),
        (normalizer(*[DOUBLE] * 6), True),
        (normalizer(*[DOUBLE] * 30), False),
        (normalizer(*[normalizer(*[DOUBLE] * 5)] * 4), False),
        (replace({"Regex": ""}, "x" * 1000), False),
        (replace({"Regex": " {2,}"}, "\u2581"), True),
        # As NFKC has U+FDFA, and as checkpoints with a table of SentencePiece's go on from it.
        (normalizer(precompiled("a", "x" * 18), *[replace({"Regex": " {2,}"}, " ")] * 3), True),
        (precompiled("a", "x" * 18 * 70, "b"), False),
        (normalizer(*[precompiled("x" * 18)] * 3), False),
        (precompiled("\ufdfa" * 70), False),  # 1,260 characters once NFKC has read them
        ({"type": "Precompiled", "precompiled_charsmap": "no base64"}, True),
        ({"type": "Precompiled", "precompiled_charsmap": None}, True),
        (normalizer({"type": "NFC"}, {"type": "ByteLevel"}), True),
        (normalizer(*[{"type": "ByteLevel"}] * 30), False),
        (normalizer(*[SPREAD, {"type": "NFKC"}] * 4), False),
    ],
)
def test_a_normalizer_that_blows_texts_up_is_refused(
    found: dict[str, Any] | None, fine: bool, tmp_path: Path
) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps({"normalizer": found, "model": {}}))
    if fine:
        require_normal_growth("model", file)
    else:
        with pytest.raises(ModelError, match="characters of one"):
            require_normal_growth("model", file)


def test_letters_of_a_normalizer_s_name_may_be_escaped(tmp_path: Path) -> None:
    text = json.dumps({"normalizer": normalizer(*[DOUBLE] * 30), "model": {}})
    file = tmp_path / "tokenizer.json"
    file.write_text(text.replace("Replace", "R\\u0065place"))
    with pytest.raises(ModelError, match="characters of one"):
        require_normal_growth("model", file)


def test_a_table_of_characters_is_read_as_the_library_reads_it() -> None:
    """A real one: ``a`` stands for 2,000 letters, which the library then makes of each."""
    units = [0] * 256
    # A double array: the root's children lie at its offset, xor their byte; then a leaf's value.
    units[0] = 1 << 10
    units[1 ^ ord("a")] = (2 << 10) | (1 << 8) | ord("a")
    units[1 ^ ord("a") ^ 2] = 1 << 31
    trie = struct.pack("<256I", *units)
    table = struct.pack("<I", len(trie)) + trie + b"x" * 2000 + b"\0"
    made = normalizers.Precompiled(table)
    assert made.normalize_str("aba") == "x" * 2000 + "b" + "x" * 2000
    found = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}
    assert _longest(found["precompiled_charsmap"]) == 2000


def test_a_bomb_stops_no_load(tmp_path: Path) -> None:
    """Thirty doublings: the library would need a billion characters for one letter."""
    folder = save_llama(tmp_path / "model")
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text()) | {"normalizer": normalizer(*[DOUBLE] * 30)}
    file.write_text(json.dumps(content))
    with pytest.raises(MmkvError, match="normalizer"):
        Engine.from_pretrained(folder)
