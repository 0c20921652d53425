"""GGUF files hold the numbers that ``gguf`` makes of them, and run as the checkpoint of these does.

Each is compared with a checkpoint of the same numbers, which other tests compare with transformers.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import shutil
import struct
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFReader, GGUFWriter
from PIL import Image
from tokenizers import Tokenizer
from torch import Tensor

from mmkv.engine.backends import kernels_for
from mmkv.engine.config import EngineConfig
from mmkv.engine.errors import ModelError
from mmkv.engine.model import panel_files
from mmkv.engine.model.families import Family
from mmkv.engine.model.families.loading import load
from mmkv.engine.model.fingerprint import fingerprint, identity, language_fingerprint
from mmkv.engine.model.gguf import tensors
from mmkv.engine.model.gguf.config import FILES, gguf_folder
from mmkv.engine.model.gguf.file import GgufFile
from mmkv.engine.model.gguf.tokenizer import tokenizer_json
from mmkv.engine.model.kept_files import kept
from mmkv.engine.model.panels import Panels
from mmkv.engine.model.rounded import IntegerMatrix
from mmkv.engine.model.source import SINGLE, checkpoint_file, config_digest, files_of
from mmkv.engine.model.weights import DecoderWeights
from mmkv.planner import FORMS, planned
from mmkv.prompt.loading import load_processor
from tests.engine.test_stored_weights import assert_same, named, plain
from tests.support.factories import CHECKPOINTS, checkpoint, make_model, make_turn
from tests.support.gguf_files import Written, finish
from tests.support.model_configs import IMAGE_ID, LINEAR, VOCAB
from tests.support.native import needs_native
from tests.support.tiers import one_in

SHOWN: list[Any] = [3, ("image", 32, 32), 4, ("image", 16, 48), 2]
# Architectures and types, so that each of both is there.
TEXTS = [
    ("llama", Kind.F32),
    ("llama", Kind.Q8_0),
    ("llama_biased", Kind.Q6_K),
    ("mistral3", Kind.Q4_K),
    ("qwen2", Kind.BF16),
    ("qwen2", Kind.Q5_K),
    ("qwen3", Kind.F16),
    ("qwen3_yarn", Kind.Q4_0),
    ("qwen3_moe", Kind.Q8_0),
    ("gemma3", Kind.Q8_0),
    ("phi3", Kind.F32),
    ("phi3_long", Kind.Q5_K),
    ("glm4", Kind.F16),
    ("qwen35", Kind.Q8_0),
    ("qwen35moe", Kind.F32),
]
# What a GGUF file can say of such models.
_LINEAR = LINEAR | {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
OWN = {
    "mistral3": replace(CHECKPOINTS["ministral3"], head_dim=64),
    "gemma3": replace(
        CHECKPOINTS["gemma3_text"],
        text=CHECKPOINTS["gemma3_text"].text | {"query_pre_attn_scalar": 32},
    ),
    "gemma3_seeing": replace(
        CHECKPOINTS["gemma3"],
        text=CHECKPOINTS["gemma3"].text | {"query_pre_attn_scalar": 32},
    ),
    "qwen35": replace(CHECKPOINTS["qwen3_5_text"], text=_LINEAR),
    "qwen35_seeing": replace(CHECKPOINTS["qwen3_5"], text=_LINEAR),
    "qwen35moe_seeing": replace(
        CHECKPOINTS["qwen3_5_moe"], text=CHECKPOINTS["qwen3_5_moe"].text | _LINEAR
    ),
    "qwen35moe": replace(
        CHECKPOINTS["qwen3_5_moe"],
        model_type="qwen3_5_moe_text",
        text=CHECKPOINTS["qwen3_5_moe"].text | _LINEAR,
    ),
}
SEEING = [
    ("gemma3_seeing", Kind.Q8_0),
    ("qwen35_seeing", Kind.F32),
    ("qwen35moe_seeing", Kind.F16),
    ("qwen2_vl", Kind.Q8_0),
    ("qwen3_vl", Kind.F16),
    ("qwen3_vl_moe", Kind.Q8_0),
    ("qwen2_5_vl", Kind.F32),
    ("llava", Kind.Q4_0),
    ("llava_qwen2", Kind.F16),
]


def assert_alike(file: str | Path, truth: Path) -> tuple[Family, Family]:
    family, spec, weights = load(file, torch.float32, "cpu")
    true, wanted, theirs = load(truth, torch.float32, "cpu")
    assert_same(named(weights), named(theirs))
    assert (weights.head.data_ptr() == weights.embed.data_ptr()) == (
        theirs.head.data_ptr() == theirs.embed.data_ptr()
    )
    for ours, other in zip(*([s.rope, s.local_rope] for s in (spec, wanted)), strict=True):
        assert (ours is None) == (other is None)
        if ours is not None and other is not None:
            made, truly = plain(ours), plain(other)
            for part in ("inv_freq", "scale"):  # the file has floats of 32 bits
                assert made.pop(part) == pytest.approx(truly.pop(part), rel=2e-7)
            assert made == truly
    sizes = [
        {k: v for k, v in vars(s).items() if k not in ("rope", "local_rope", "rms_eps")}
        for s in (spec, wanted)
    ]
    assert sizes[0] == sizes[1]
    assert spec.rms_eps == pytest.approx(wanted.rms_eps, rel=1e-6)
    return family, true


@one_in(3)
@pytest.mark.parametrize(("name", "kind"), TEXTS)
def test_text(name: str, kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers are made of their codes a few rows at a time, the last ones of a matrix fewer."""
    monkeypatch.setattr(tensors, "_AT_ONCE", 1500)
    written = Written(source_of(name, tmp_path), tmp_path / "files", kind)
    assert_alike(written.text, written.truth)


def seen(family: Family, name: str) -> list[Tensor]:
    turn = family.turn(make_turn(name, SHOWN), 5)
    assert turn.visual is not None
    return [turn.visual, *turn.deepstack, turn.positions, turn.modality]


def source_of(name: str, folder: Path) -> Path:
    """Return a checkpoint that a GGUF file can be made of."""
    if name not in OWN:
        return checkpoint(name)
    make_model(OWN[name]).save_pretrained(folder / "source")
    return folder / "source"


@one_in(3)
@pytest.mark.parametrize(("name", "kind"), SEEING)
def test_pictures(name: str, kind: Kind, tmp_path: Path) -> None:
    marks = {150: "<image>"} if name.startswith("llava") else {}
    if name.startswith("gemma3"):
        marks = {150: "<image_soft_token>", 152: "<start_of_image>", 153: "<end_of_image>"}
    more = {"marks": marks} if marks else {}
    written = Written(source_of(name, tmp_path), tmp_path / "files", kind, **more)
    families = assert_alike(gguf_folder(written.text, written.mmproj), written.truth)
    shown = {
        "gemma3_seeing": "gemma3",
        "qwen35_seeing": "qwen3_5",
        "qwen35moe_seeing": "qwen3_5_moe",
    }
    ours, theirs = (seen(family, shown.get(name, name)) for family in families)
    assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize(
    ("kind", "form", "bits"),
    [(Kind.Q8_0, "int8", 8), (Kind.Q4_0, "int4", 4), (Kind.Q4_0, "int8", 8)],
)
def test_codes_stay_and_steps_are_rounded(kind: Kind, form: str, bits: int, tmp_path: Path) -> None:
    written = Written(checkpoint("llama_biased"), tmp_path, kind)
    _, _, held = load(written.text, "float32", "cpu", form=form, kernels=kernels_for(form))
    _, _, exact = load(written.text, "float32", "cpu")
    codes = {8: 127, 4: 8}[4 if kind == Kind.Q4_0 else 8]
    for ours, whole in zip(held.layers, exact.layers, strict=True):
        for part in ours.matrix_names():
            matrix, wide = getattr(ours, part), getattr(whole, part)
            assert isinstance(matrix, IntegerMatrix) and matrix.bits == bits
            assert (matrix.wide() - wide).abs().max() <= 2.0**-8 * wide.abs().max()
            # As far off as a step in bfloat16 is; codes rounded anew would be off by up to a half.
            off = (matrix.wide() - wide).abs() / wide.abs().clamp(min=1e-30)
            assert off.max() <= 2.0**-8 and 0 < matrix.error < 2.0**-8
            counts = {len(code.unique()) for code, _ in matrix.blocks()}
            assert max(counts) <= 2 * codes + 1


@pytest.mark.parametrize("form", ["bf16", "int8", "int4"])
def test_other_types_are_rounded_as_a_checkpoint_of_their_numbers(
    form: str, tmp_path: Path
) -> None:
    written = Written(checkpoint("llama_biased"), tmp_path, Kind.Q6_K)

    def held(model: Path) -> dict[str, Tensor]:
        weights = load(model, "float32", "cpu", form=form, kernels=kernels_for(form))[2]
        found = {}
        for name, matrix in named(weights).items():
            parts = matrix.held() if isinstance(matrix, Panels) else (matrix,)
            found |= {f"{name}:{index}": part for index, part in enumerate(parts)}
        return found

    assert_same(held(written.text), held(written.truth))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return Written(checkpoint("qwen3_vl"), tmp_path_factory.mktemp("written"), Kind.Q8_0)


def refused(model: Path, mmproj: Path | None = None) -> str:
    """Return the one line that a file is refused with, before or while it is loaded."""
    with pytest.raises(ModelError) as error:
        load(gguf_folder(model, mmproj), "float32", "cpu")
    assert "\n" not in str(error.value) and str(error.value).count(str(model)) <= 1
    return str(error.value)


def changed(source: Path, target: Path, change: Callable[[bytes], bytes]) -> Path:
    target.write_bytes(change(source.read_bytes()))
    return target


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda raw: b"PK" + raw[2:], "is no GGUF file"),
        (lambda raw: raw[:10], "damaged (it is cut off)"),
        (lambda raw: raw[:300], "damaged (its header makes no sense)"),
        (lambda raw: raw[:-5000], "it ends before its tensor 'blk.2."),
        (lambda raw: raw[:4] + b"\1" + raw[5:], "GGUF of version 1"),
        (lambda raw: raw[:4] + b"\0\0\0\3" + raw[8:], "big-endian"),
        (lambda raw: raw[:8] + b"\xff" * 8 + raw[16:], "its counts make no sense"),
        (lambda raw: raw.replace(b"qwen3vl", b"qwen9vl"), "kind 'qwen9vl', which mmkv does not"),
        (lambda raw: raw.replace(b"ffn_norm", b"ffn_form"), "'blk.0.ffn_form.weight', which mmkv"),
        (lambda raw: raw.replace(b"block_count", b"block_cmunt"), "qwen3vl.block_count is missing"),
        (lambda raw: raw.replace(b"<|image_pad|>", b"<|imago_pad|>"), "has no <|image_pad|>"),
        (lambda raw: raw.replace(b"gpt-2", b"gpt-9"), "the pre-tokenizer 'gpt-9'"),
    ],
)
def test_a_file_that_is_not_read_says_why_in_a_line(
    change: Callable[[bytes], bytes], words: str, written: Written, tmp_path: Path
) -> None:
    assert words in refused(changed(written.text, tmp_path / "m.gguf", change), written.mmproj)


def test_a_file_of_another_kind_says_what_it_is(
    written: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = changed(written.text, tmp_path / "m-00001-of-00003.gguf", bytes)
    assert "has 1 parts by what it says and 3 by its name" in refused(part)
    assert "a vision tower (mmproj); name the language model's" in refused(written.mmproj)
    other = Written(checkpoint("qwen2"), tmp_path / "other", Kind.F32)
    assert "is no vision tower (mmproj), but qwen2" in refused(written.text, other.text)
    assert "does not read beside a qwen2" in refused(other.text, written.mmproj)
    wide = Written(checkpoint("qwen3_vl_dim128"), tmp_path / "wide", Kind.F32)
    assert "of 192 numbers" in refused(wide.text, written.mmproj)
    assert "no file" in refused(tmp_path / "missing.gguf")
    with pytest.raises(ModelError, match="mmproj is the vision tower of a GGUF file"):
        EngineConfig(model="folder", mmproj=written.mmproj)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    os.utime(written.text)
    assert "pip install 'mmkv[gguf]'" in refused(written.text)
    load(gguf_folder(other.text), "float32", "cpu")  # plain numbers need no package


def test_a_split_file_is_read_part_by_part(tmp_path: Path) -> None:
    """By the package's own writer; each part's tensors are where its reader finds them."""
    made = Written(checkpoint("llama"), tmp_path / "m", Kind.Q8_0, split=5)
    parts = sorted((tmp_path / "m").glob("model-*.gguf"))
    names = [f"model-{n:05}-of-{len(parts):05}.gguf" for n in range(1, len(parts) + 1)]
    assert [part.name for part in parts] == names and len(parts) > 3
    found = GgufFile(parts[0]).tensors
    for part in parts:
        for tensor in GGUFReader(part).tensors:
            ours = found.pop(tensor.name)
            assert (ours.path, ours.begin, ours.nbytes) == (
                part,
                tensor.data_offset,
                tensor.n_bytes,
            )
    assert not found
    linked = tmp_path / "hub"
    linked.mkdir()
    for part in parts:  # as the hub's cache has them
        (linked / part.name).symlink_to(shutil.move(part, tmp_path / f"{part.name}.blob"))
    first, *_, last = (linked / part.name for part in parts)
    folder = gguf_folder(first)
    ours, theirs = (named(load(one, "float32", "cpu")[2]) for one in (folder, made.truth))
    assert_same(ours, theirs)
    before = fingerprint(folder)
    assert refused(last).startswith(f"{last} is not the first part of a split GGUF file; name")
    blob = last.resolve()
    raw = bytearray(blob.read_bytes())
    raw[GGUFReader(blob).tensors[0].data_offset] ^= 1
    blob.write_bytes(raw)
    assert fingerprint(gguf_folder(first)) != before  # a part that changed is read again
    # llama.cpp joins parts with the first one's metadata, but for their count, which becomes 0.
    three = b"split.count" + struct.pack("<IH", 2, len(parts))
    joined = first.read_bytes().replace(three, three[:-2] + b"\0\0")
    assert joined != first.read_bytes()
    changed(first, linked / "joined.gguf", lambda raw: joined)
    assert GgufFile(linked / "joined.gguf").metadata["split.count"] == 0
    # Another model's part of the same name, number and count: all say how many tensors there are.
    counted = b"split.tensors.count" + struct.pack("<I", 5)
    at = blob.read_bytes().index(counted) + len(counted)
    blob.write_bytes(raw[:at] + bytes([raw[at] + 1]) + raw[at + 1 :])
    assert f"{last} is a part of another split file than {first}" in refused(first)
    last.unlink()
    assert refused(first).startswith(
        f"{last} is missing, part {len(parts)} of {len(parts)} of this"
    )
    last.symlink_to((linked / parts[1].name).resolve())
    assert "it is not the part that its name says" in refused(first)
    first.unlink()
    assert refused(last).startswith(f"{first} is missing, part 1 of {len(parts)} of this")


def test_damage_anywhere_in_the_header_is_refused_in_a_line(
    written: Written, tmp_path: Path
) -> None:
    raw, random = written.text.read_bytes(), Random(3)
    header = min(tensor.begin for tensor in GgufFile(written.text).tensors.values())
    for number in range(60):
        bytes_ = bytearray(raw)
        for _ in range(random.choice((1, 3))):
            bytes_[random.randrange(4, header)] = random.randrange(256)
        file = tmp_path / f"{number}.gguf"
        file.write_bytes(bytes_)
        try:
            gguf_folder(file, written.mmproj)
        except ModelError as error:
            assert "\n" not in str(error)
        file.unlink()


@pytest.mark.parametrize("count", [3_000_000, 2**31 - 1])
def test_layers_that_no_file_has_are_refused_at_once(
    count: int, written: Written, tmp_path: Path
) -> None:
    """Before transformers makes a list of them."""
    for name, key, tower in (
        ("text", b"qwen3vl.block_count", written.mmproj),
        ("tower", b"clip.vision.block_count", None),
    ):
        own = written.mmproj if tower is None else written.text
        there = key + struct.pack("<I", 4)
        at = own.read_bytes().index(there) + len(there)
        file = changed(
            own,
            tmp_path / f"{name}.gguf",
            lambda raw, at=at: raw[:at] + struct.pack("<I", count) + raw[at + 4 :],
        )
        pair = (file, tower) if tower is not None else (written.text, file)
        tracemalloc.start()
        begin = time.process_time()
        with pytest.raises(ModelError, match=rf"block_count is {count} for \d+ tensors"):
            gguf_folder(*pair)
        assert time.process_time() - begin < 1 and tracemalloc.get_traced_memory()[1] < 2**23
        tracemalloc.stop()


def test_an_array_longer_than_a_vocabulary_is_not_read(tmp_path: Path) -> None:
    """A file with holes seems to be as large as it likes."""
    head = struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + struct.pack("<Q", 1) + b"a"
    for kind in (0, 8):
        file = tmp_path / f"{kind}.gguf"
        with file.open("wb") as opened:
            opened.write(head + struct.pack("<IIQ", 9, kind, 2**25))
            opened.truncate(2**30)
        assert "its header makes no sense" in refused(file)
    file.write_bytes(head + struct.pack("<IIQIQI", 9, 9, 1, 4, 1, 7))  # one in another
    assert "its header makes no sense" in refused(file)


def test_a_folder_names_no_files_elsewhere(tmp_path: Path) -> None:
    """Only those that this process made for GGUF files do."""
    folder = Path(shutil.copytree(checkpoint("qwen2"), tmp_path / "folder"))
    (folder / FILES).write_text(json.dumps([str(tmp_path / "pipe")]))
    os.mkfifo(tmp_path / "pipe")
    assert files_of(functools.partial(checkpoint_file, str(folder))) == [folder / SINGLE]


def test_gates_of_a_file_know_it_beside_its_tower(written: Written) -> None:
    """They are trained for the file, whose config, tokenizer and weights are found by its name."""
    alone, both = gguf_folder(written.text), gguf_folder(written.text, written.mmproj)
    assert config_digest(str(written.text)) == config_digest(alone) != config_digest(both)
    assert language_fingerprint(both) == fingerprint(str(written.text)) != fingerprint(both)
    assert load_processor(written.text).tokenizer.convert_tokens_to_ids("t7") == 7


@pytest.mark.parametrize("form", FORMS)
def test_a_plan_counts_layers_and_the_rest_as_of_a_folder(form: str, tmp_path: Path) -> None:
    made = Written(checkpoint("qwen3_vl"), tmp_path, Kind.F32)
    ours = planned(gguf_folder(made.text, made.mmproj))
    theirs = planned(str(made.truth))
    assert ours is not None and theirs is not None
    assert ours[form].weights == pytest.approx(theirs[form].weights, rel=0.02)


def test_a_file_has_a_fingerprint_of_its_own(tmp_path: Path) -> None:
    """Of other numbers or another type; a copy has the same."""
    one, other, coarse = (
        Written(checkpoint(name), tmp_path / f"{name}{kind}", kind).text
        for name, kind in (("qwen2", Kind.F32), ("qwen3", Kind.F32), ("qwen2", Kind.Q8_0))
    )
    copy = changed(one, tmp_path / "copy.gguf", bytes)
    prints = [fingerprint(gguf_folder(file)) for file in (one, other, coarse, copy)]
    assert fingerprint(str(one)) == prints[0]
    assert None not in prints and len(set(prints)) == 3 and prints[0] == prints[3]
    before = identity([copy])
    changed(other, copy, bytes)
    assert identity([copy]) != before and gguf_folder(copy) != gguf_folder(one)


def test_scores_order_the_merges_of_sentencepiece(tmp_path: Path) -> None:
    """A pair merges that makes the piece with the greatest score, the leftmost of these first."""
    random, letters = Random(5), "abcd\u2581"
    pieces = dict.fromkeys(letters)
    while len(pieces) < 120:
        pieces["".join(random.choices(list(pieces), k=2))] = None
    named = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    scores = [0.0] * 259 + [-float(number) for number in range(len(pieces))]
    kinds = [2, 3, 3] + [6] * 256 + [1] * len(pieces)
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(named)
    writer.add_token_scores(scores)
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    finish(writer)
    page = tokenizer_json(GgufFile(tmp_path / "m.gguf"))
    assert page is not None
    ours, ids = Tokenizer.from_str(page), {name: number for number, name in enumerate(named)}

    def merged(text: str) -> list[int]:
        parts = list("\u2581" + text.replace(" ", "\u2581"))
        while True:
            made = [
                (scores[ids[a + b]], -i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ids
            ]
            if not made:
                break
            at = -max(made)[1]
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        return [
            number
            for part in parts
            for number in ([ids[part]] if part in ids else [3 + byte for byte in part.encode()])
        ]

    for _ in range(300):
        text = "".join(random.choices("abcd \u00e9", k=random.randint(1, 14)))
        assert ours.encode(text, add_special_tokens=False).ids == merged(text), text
        assert ours.decode(ours.encode(text).ids) == text
    assert ours.encode("a").ids[0] == 1  # add_bos_token is true where nothing is said


def test_a_llava_without_a_token_for_pictures_gets_one(tmp_path: Path) -> None:
    """As in the files of LLaVA-1.5's makers, which name no template, either."""
    written = Written(checkpoint("llava"), tmp_path, Kind.Q8_0, marks={})
    folder = gguf_folder(written.text, written.mmproj)
    family, spec, weights = load(folder, "float32", "cpu")
    assert family.placeholder == {1: VOCAB} and spec.vocab_size == VOCAB + 1
    true, _, theirs = load(written.truth, "float32", "cpu")
    for ours, whole in ((weights.embed, theirs.embed), (weights.head, theirs.head)):
        assert torch.equal(ours[:-1], whole) and not ours[-1].any()
    turn = make_turn("llava", SHOWN)
    turn["input_ids"] = turn["input_ids"].masked_fill(turn["input_ids"] == IMAGE_ID, VOCAB)
    assert torch.equal(family.turn(turn, 5).visual, seen(true, "llava")[0])
    processor = load_processor(folder)
    asked = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "t7?"}]}]
    text = processor.template.render(asked, opening=True)
    assert text == "USER: <image>\nt7? ASSISTANT:"
    ids = processor.encode(text, [Image.new("RGB", (16, 16))], [])["input_ids"][0].tolist()
    assert ids.count(VOCAB) == 16


@needs_native
def test_packed_weights_are_kept_for_the_file_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("MMKV_PANELS", "1GiB")
    monkeypatch.setattr(panel_files, "LEAST_BYTES", 0)
    one, other = (
        Written(checkpoint(name), tmp_path / name, Kind.Q4_0).text for name in ("qwen2", "qwen3")
    )
    file = changed(one, tmp_path / "model.gguf", bytes)

    def held() -> tuple[DecoderWeights, list[Tensor]]:
        weights = load(file, "float32", "cpu", form="int4", kernels=kernels_for("int4"))[2]
        return weights, [part for one in weights.matrices() for part in one.held()]

    (first, made), (again, mapped) = held(), held()
    assert first.note is not None and again.note is None and [k.form for k in kept()] == ["int4"]
    assert all(map(torch.equal, made, mapped))
    changed(other, file, bytes)
    replaced, others = held()
    assert replaced.note is not None and len(kept()) == 1
    assert [part.shape for part in others] != [part.shape for part in made]


def test_wide_numbers_of_few_bits_are_noted(tmp_path: Path) -> None:
    few, many = (
        Written(checkpoint("qwen2"), tmp_path / str(kind), kind).text
        for kind in (Kind.Q8_0, Kind.F16)
    )
    note = load(few, "float32", "cpu")[2].note
    assert note is not None and "are held as float32" in note and "--weights int8" in note
    assert load(many, "float32", "cpu")[2].note is None
    whole = load(few, "float32", "cpu", form="int8", kernels=kernels_for("int8"))[2]
    assert whole.note is None
