"""Checkpoints that are damaged, unsupported, elsewhere or none, and the fingerprint of one."""

from __future__ import annotations

import base64
import functools
import json
import os
import random
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file, save_file
from tokenizers import normalizers

from mmkv import Engine
from mmkv.checkpoints import _checkpoint, _json
from mmkv.engine.errors import MmkvError, ModelError
from mmkv.engine.model.families import family_for
from mmkv.engine.model.families.loading import load, resolve_device, resolve_dtype
from mmkv.engine.model.fingerprint import (
    SAMPLE,
    fingerprint,
    identity,
    language_fingerprint,
)
from mmkv.engine.model.product import plain
from mmkv.engine.model.settings import require_sizes
from mmkv.engine.model.source import (
    INDEX,
    PICKLED,
    PICKLED_INDEX,
    SINGLE,
    _longest,
    locate,
    require_normal_growth,
)
from mmkv.engine.model.spec import Routing
from mmkv.engine.runtime import Runtime
from tests.engine.test_families import CPU, one_line
from tests.support.chat_models import save_llama
from tests.support.factories import CHECKPOINTS, checkpoint, make_model


@pytest.mark.parametrize("name", ["qwen3_vl", "llava_next", "qwen2", "qwen3_moe", "phi3"])
def test_text_weights_are_not_copied(name: str) -> None:
    reader, spec, weights = load(checkpoint(name), "float32", "cpu")
    assert len(reader.text_model(reader.hf).layers) == 0
    left = {p.untyped_storage().data_ptr(): p.nbytes for p in reader.hf.parameters()}
    ours = {weights.embed.untyped_storage().data_ptr(), weights.norm.untyped_storage().data_ptr()}
    ours.add(weights.head.untyped_storage().data_ptr())
    vision = sum(size for where, size in left.items() if where not in ours)
    whole = sum(p.nbytes for p in make_model(CHECKPOINTS[name]).parameters())
    # The gains of q and k are kept once per head, a few hundred bytes.
    gains = [w.qk_norm.nbytes for w in weights.layers if w.qk_norm is not None]
    assert whole <= vision + weights.nbytes() <= whole + sum(gains)
    assert spec.rope.axes == reader.rope_axes


def test_end_tokens() -> None:
    model = make_model(CHECKPOINTS["llama"])
    assert family_for(model.config)(model).eos_token_ids == ()
    model.config.eos_token_id = 7
    assert family_for(model.config)(model).eos_token_ids == (7,)
    model.generation_config.eos_token_id = [3, 4]
    assert family_for(model.config)(model).eos_token_ids == (3, 4)


@pytest.mark.parametrize("kind", ["gpt2", "mixtral", "gemma2"])
def test_unsupported_types_are_named(kind: str) -> None:
    with pytest.raises(ModelError) as error:
        family_for(transformers.CONFIG_MAPPING[kind]())
    assert repr(kind) in one_line(error) and "qwen3_vl" in one_line(error)


def test_unsupported_text_part_and_quantisation() -> None:
    config = transformers.LlavaConfig(text_config=transformers.Gemma2Config())
    with pytest.raises(ModelError, match="'gemma2' language model"):
        family_for(config)
    config = transformers.LlamaConfig()
    config.quantization_config = {"quant_method": "awq"}
    with pytest.raises(ModelError, match="quantised"):
        family_for(config)


def copy_of(name: str, folder: Path) -> Path:
    return Path(shutil.copytree(checkpoint(name), folder / "model"))


def lose_an_expert(folder: Path) -> None:
    lose_a_tensor(folder, "model.layers.1.mlp.experts.3.up_proj.weight")


def lose_a_tensor(folder: Path, name: str = "model.layers.1.mlp.up_proj.weight") -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors.pop(name)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def shrink_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    key = "model.layers.1.mlp.up_proj.weight"
    tensors[key] = tensors[key][:-1].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5000])


def scribble(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"not a safetensors file at all" * 9)


class Code:
    """What a pickle that runs code would hold; ``ran`` says so."""

    ran = False

    def __reduce__(self) -> Any:
        return setattr, (Code, "ran", True)


def as_pickle(folder: Path, **others: Any) -> None:
    torch.save(load_file(folder / SINGLE) | others, folder / PICKLED)
    (folder / SINGLE).unlink()


def as_older_pickle(folder: Path) -> None:
    tensors = load_file(folder / SINGLE)
    torch.save(tensors, folder / PICKLED, _use_new_zipfile_serialization=False)
    (folder / SINGLE).unlink()


def as_torn_pickle(folder: Path) -> None:
    as_pickle(folder)
    file = folder / PICKLED
    file.write_bytes(file.read_bytes()[:-5000])


def as_compressed_pickle(folder: Path) -> None:
    """A small file may then fill all of the memory."""
    as_pickle(folder)
    with zipfile.ZipFile(folder / PICKLED) as stored:
        parts = {one.filename: stored.read(one) for one in stored.infolist()}
    with zipfile.ZipFile(folder / PICKLED, "w", zipfile.ZIP_DEFLATED) as made:
        for name, raw in parts.items():  # a single part is enough
            made.writestr(name, raw, None if name.endswith("/0") else zipfile.ZIP_STORED)


NORM = "model.norm.weight"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


def lose_a_shard(folder: Path) -> None:
    (folder / SINGLE).unlink()
    names = {"weight_map": {NORM: "model-00001-of-00002.safetensors"}, "metadata": {}}
    (folder / INDEX).write_text(json.dumps(names))


def configured(**values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **values}))

    return change


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lose_a_tensor, "lacks 1 weights (model.layers.1.mlp.up_proj.weight"),
        (shrink_a_tensor, "is [383, 192] in the files and [384, 192] by config.json"),
        (truncate, "corrupt"),
        (scribble, "corrupt"),
        (functools.partial(as_pickle, odd=Code()), "holds more than tensors, which could run code"),
        (functools.partial(as_pickle, epoch=3), "holds no plain tensors by their names"),
        (as_compressed_pickle, "pytorch_model.bin is compressed, which torch.save never does"),
        *(
            (functools.partial(as_pickle, **{NORM: odd}), "holds no plain tensors")
            for odd in (
                torch.ones(1).expand(64),  # more numbers than are there
                torch.ones(64, dtype=torch.complex64),
                torch.ones(64, device="meta"),
            )
        ),
        (as_older_pickle, "pytorch_model.bin is damaged, or of a torch before 1.6"),
        (as_torn_pickle, "pytorch_model.bin is damaged, or of a torch before 1.6"),
        (lambda folder: (folder / SINGLE).unlink(), "it has no weights; get its safetensors"),
        (
            lambda folder: (folder / SINGLE).write_text(POINTER),
            "Git LFS and not the file; run `git",
        ),
        (lambda folder: (folder / "config.json").write_text(POINTER), "run `git lfs pull` there"),
        (lose_a_shard, "a file is missing that its index of weights names; get all"),
        (
            lambda folder: (folder / "config.json").write_text("{}"),
            "no model_type; get the original",
        ),
        (lambda folder: (folder / "config.json").unlink(), "no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json is no JSON; get it"),
        (configured(model_type="no_such_model"), "no_such_model"),
        (configured(model_type="mixtral"), "'mixtral' is not supported"),
        (configured(hidden_act="gelu"), "'gelu' is not supported"),
        (configured(rope_parameters={"rope_type": "no_such_rope"}), "no_such_rope"),
    ],
)
def test_damaged_checkpoints(tmp_path: Path, damage: Callable[[Path], Any], message: str) -> None:
    folder = copy_of("llama", tmp_path)
    damage(folder)
    with pytest.raises(ModelError) as error:
        load(folder, "auto", "cpu")
    assert message in one_line(error) and not Code.ran


def test_pickled_tensors_are_read_like_safetensors(tmp_path: Path) -> None:
    """In one file and in several; what is packed of them is known again, and only of them."""
    one, many = copy_of("llama_biased", tmp_path), tmp_path / "many"
    tensors = load_file(one / SINGLE)
    many.mkdir()
    shutil.copy(one / "config.json", many)
    weight_map = {}
    for part in (0, 1):
        shard = dict(list(tensors.items())[part::2])
        torch.save(shard, many / f"pytorch_model-{part}.bin")
        weight_map |= dict.fromkeys(shard, f"pytorch_model-{part}.bin")
    (many / PICKLED_INDEX).write_text(json.dumps({"weight_map": weight_map}))
    expected = load(one, "float32", "cpu")[2]
    as_pickle(one)
    for folder in (one, many):
        found = dict(load(folder, "float32", "cpu")[2].named())
        for name, part in expected.named():
            assert torch.equal(part, found[name])
    before = identity([one / PICKLED])
    assert before == identity([one / PICKLED])
    changed = tensors["model.norm.weight"] + 1
    torch.save(tensors | {"model.norm.weight": changed}, one / PICKLED)
    assert identity([one / PICKLED]) != before


def test_no_experts_are_a_dense_model() -> None:
    config = transformers.AutoConfig.from_pretrained(checkpoint("qwen3_moe"), num_experts=0)
    require_sizes(config)
    assert Routing.of(config) is None


@pytest.mark.parametrize(
    ("name", "part", "values", "wrong"),
    [
        ("llama", "text_config", {"rms_norm_eps": 0.0}, None),
        ("llama", "text_config", {"rms_norm_eps": 1.01}, "rms_norm_eps"),
        ("llama", "text_config", {"rms_norm_eps": -1e-9}, "rms_norm_eps"),
        ("qwen3_vl", "vision_config", {"hidden_size": 48, "num_heads": 4}, None),
        ("qwen3_vl", "vision_config", {"hidden_size": 40, "num_heads": 4}, "num_heads"),
        ("llava", "vision_config", {"hidden_size": 40, "num_attention_heads": 4}, None),
        ("llava", "vision_config", {"hidden_size": 42, "num_attention_heads": 4}, "num_attention"),
        ("qwen3_5", "text_config", {"linear_num_value_heads": 5}, "linear_num_value_heads"),
        ("llama", "text_config", {"num_key_value_heads": 5}, "num_key_value_heads"),
    ],
)
def test_sizes_at_their_bounds(
    name: str, part: str, values: dict[str, Any], wrong: str | None
) -> None:
    """Half of a head turns by rows and half by columns in towers that merge patches."""
    config = transformers.AutoConfig.from_pretrained(checkpoint(name))
    for key, value in values.items():
        setattr(config.get_text_config() if part[0] == "t" else config.vision_config, key, value)
    if wrong is None:
        require_sizes(config)
    else:
        with pytest.raises(ModelError, match=wrong):
            require_sizes(config)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lose_an_expert, "lacks weights of experts"),
        (
            configured(num_experts_per_tok=9),
            "num_experts_per_tok is 9, not at most num_experts (8)",
        ),
        (
            configured(num_local_experts=10**9),
            "num_experts or num_local_experts is 1000000000, not a whole",
        ),
        (configured(num_local_experts=4000), "describes a text model of more numbers than"),
        (configured(decoder_sparse_step=0), "decoder_sparse_step is 0, not a whole number"),
    ],
)
def test_damaged_experts(tmp_path: Path, damage: Callable[[Path], Any], message: str) -> None:
    folder = copy_of("qwen3_moe", tmp_path)
    damage(folder)
    with pytest.raises(ModelError) as error:
        load(folder, "auto", "cpu")
    assert message in one_line(error)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("/no/such/folder", "no folder"),
        ("./missing", "no folder"),
        ("a/b/c", "no folder"),
        ("", "name is empty"),
        ("nobody/no-such-model", "cannot get 'nobody/no-such-model' from the hub"),
        (__file__, "is a file"),
    ],
)
def test_names_without_a_checkpoint(name: str, message: str) -> None:
    """Offline, as conftest sets it: a hub id that is not cached."""
    with pytest.raises(ModelError) as error:
        load(name, "auto", "cpu")
    assert message in one_line(error)


def test_dtypes_and_devices() -> None:
    config = transformers.LlamaConfig(dtype=torch.bfloat16)
    assert resolve_dtype("auto", config, CPU) == torch.float32
    assert resolve_dtype("auto", config, torch.device("cuda")) == torch.bfloat16
    assert resolve_dtype("auto", transformers.LlamaConfig(), torch.device("cuda")) == torch.float32
    assert resolve_dtype("bfloat16", config, CPU) == torch.bfloat16
    assert resolve_dtype(torch.float16, config, CPU) == torch.float16
    for bad in ("int8", torch.int64):
        with pytest.raises(ModelError, match="not supported; use auto"):
            resolve_dtype(bad, config, CPU)
    assert resolve_device("cpu") == CPU
    for bad in ("cuda:99", "gpu", "meta"):
        with pytest.raises(ModelError) as error:
            resolve_device(bad)
        one_line(error)
    for odd in (torch.zeros(3), torch.tensor([[1, 2]]), None, b"cpu", 0.5):
        with pytest.raises(TypeError, match=r"must be a string or a torch\.device"):
            resolve_device(odd)
        with pytest.raises(TypeError, match=r"must be a string or a torch\.dtype"):
            resolve_dtype(odd, config, CPU)


def test_progress_is_reported() -> None:
    message: list[str] = []
    Runtime.from_pretrained(checkpoint("llama"), policy="full", progress=message.append)
    assert message[:3] == ["reading the config", "reading the weights", "preparing the decoder"]


# Folders and files that are no checkpoint: cause and remedy, and nothing is read for ever.


def adapter(folder: Path) -> None:
    folder.mkdir()
    base = {"base_model_name_or_path": "Qwen/Qwen3-4B"}
    (folder / "adapter_config.json").write_text(json.dumps(base))
    (folder / "adapter_model.safetensors").touch()


def pickled(folder: Path) -> None:
    save_llama(folder)
    (folder / SINGLE).rename(folder / "model.ckpt")


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
        (adapter, "an adapter (PEFT) of Qwen/Qwen3-4B, no model; name both: mmkv chat Qwen"),
        (pickled, "its weights in model.ckpt alone, a pickle"),
        (own_code, "Python code of its own (auto_map in config.json: modeling_own.Own)"),
        (of_llama_cpp, "no config.json, but GGUF files; name one of these"),
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
        ("m.gguf", "is no GGUF file"),
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
    ("file", "kind"),
    [
        *((f, "pipe") for f in ("config.json", INDEX, "tokenizer.json", "generation_config.json")),
        *((f, "zero") for f in ("config.json", SINGLE)),
    ],
)
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


# The fingerprint of a checkpoint: the same however it is cut into files, else its own.


Tensors = dict[str, np.ndarray]


def fingerprint_load(name: str) -> Runtime:
    return Runtime.from_pretrained(checkpoint(name), policy="full", dtype="float32", device="cpu")


@pytest.fixture
def tensors() -> Tensors:
    numbers = np.random.default_rng(0)
    shapes = {"embed": (50, 16), "norm": (16,), "layers.0.q": (16, 16), "layers.0.bias": (3,)}
    return {
        name: numbers.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()
    }


def of(folder: Path, *shards: Tensors) -> str | None:
    """Write a checkpoint of these files into an empty folder; return its fingerprint."""
    folder.mkdir()
    if len(shards) == 1:
        save_arrays(shards[0], folder / "model.safetensors", {"format": "pt"})
    else:
        names = [f"model-{number}.safetensors" for number in range(len(shards))]
        for name, shard in zip(names, shards, strict=True):
            save_arrays(shard, folder / name)
        home = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        index = folder / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": home}))
    return fingerprint(str(folder))


def test_files_and_order_do_not_matter(tmp_path: Path, tensors: Tensors) -> None:
    whole = of(tmp_path / "whole", tensors)
    assert whole is not None and len(whole) == 64
    names = list(tensors)
    shards = [{name: tensors[name] for name in part} for part in (names[:1], names[1:])]
    assert of(tmp_path / "shards", *shards) == whole


def test_every_tensor_matters(tmp_path: Path, tensors: Tensors) -> None:
    """Its name, dtype, shape and each number of its first KiB."""
    rng, found = random.Random(1), [of(tmp_path / "whole", tensors)]
    for number, (name, tensor) in enumerate(tensors.items()):
        changed = tensor.copy()
        changed.flat[rng.randrange(min(tensor.size, SAMPLE // 4))] += 1
        others = {key: value for key, value in tensors.items() if key != name}
        for kind, part in {
            "value": {name: changed},
            "name": {f"{name}.weight": tensor},
            "dtype": {name: tensor.view(np.int32)},
            "shape": {name: tensor[None]},
            "absent": {},
        }.items():
            found.append(of(tmp_path / f"{kind}{number}", others | part))
    assert None not in found and len(set(found)) == len(found) == 21


def test_what_cannot_be_read_has_none(tmp_path: Path, tensors: Tensors) -> None:
    of(tmp_path / "good", tensors)
    good = (tmp_path / "good" / "model.safetensors").read_bytes()
    size = int.from_bytes(good[:8], "little")
    (tmp_path / "empty").mkdir()
    assert fingerprint(str(tmp_path / "empty")) is None
    assert fingerprint(str(tmp_path / "missing")) is None
    assert fingerprint("owner/never-downloaded") is None
    rng = random.Random(2)
    for number in range(200):
        header = bytearray(good[: 8 + size])
        for _ in range(rng.randrange(1, 4)):
            header[rng.randrange(len(header))] = rng.randrange(256)
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(header + good[8 + size :][: rng.randrange(900)])
        made = fingerprint(str(folder))  # of a damaged file: none or another, and no exception
        assert made is None or made != fingerprint(str(tmp_path / "good"))


@pytest.mark.parametrize(
    ("model", "head"),
    [
        ("language_model.model.", "language_model.lm_head.weight"),  # LLaVA on the hub
        ("model.language_model.", "lm_head.weight"),
    ],
)
def test_a_language_model_is_told_inside_a_vision_model(
    tmp_path: Path, tensors: Tensors, model: str, head: str
) -> None:
    eyes = {"vision_tower.norm": tensors["norm"], "model.visual.norm": tensors["norm"]}
    inside = {model + name: tensor for name, tensor in tensors.items()} | {head: tensors["embed"]}
    alone = {f"model.{name}": tensor for name, tensor in tensors.items()}
    alone["lm_head.weight"] = tensors["embed"]
    expected = of(tmp_path / "alone", alone)
    joined = of(tmp_path / "joined", eyes, inside)
    assert joined != expected and language_fingerprint(str(tmp_path / "alone")) is None
    assert language_fingerprint(str(tmp_path / "joined")) == expected
    inside[head] = inside[head] + 1
    of(tmp_path / "other", eyes | inside)
    assert language_fingerprint(str(tmp_path / "other")) not in (None, expected)
    assert language_fingerprint(str(tmp_path / "none")) is None


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_every_matrix_of_a_loaded_decoder_matters(name: str) -> None:
    """A session file of other weights is refused, whichever matrix of whichever layer they are."""
    weights = fingerprint_load(name).decoder.weights
    parts = {"embed": weights.embed, "norm": weights.norm, "head": weights.head}
    for index, layer in enumerate(weights.layers):
        for part in ("qkv", "out", "gate_up", "down", "router"):
            if (matrix := getattr(layer, part)) is not None:
                parts[f"{index} {part}"] = matrix
    assert len(parts) == 3 + len(weights.layers) * (4 + ("moe" in name))
    found = {weights.fingerprint()}
    for matrix in map(plain, parts.values()):
        before = matrix.clone()
        with torch.inference_mode():
            matrix.add_(1)
            found.add(weights.fingerprint())
            matrix.copy_(before)
    assert weights.fingerprint() in found
    # A tied head is the embedding.
    assert len(found) == 1 + len({plain(matrix).data_ptr() for matrix in parts.values()})
