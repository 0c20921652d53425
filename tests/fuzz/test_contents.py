"""What a conversation is made of: pictures, chat templates, rows of MMDU and of training data."""

from __future__ import annotations

import base64
import io
import json
import shutil
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import mmkv
import mmkv.eval.mmdu.run as mmdu
from mmkv.chat.options import ChatOptions
from mmkv.engine.config import EngineConfig
from mmkv.engine.errors import MmkvError
from mmkv.eval.mmdu.judge import compare
from mmkv.eval.mmdu.run import run_score
from mmkv.prompt.media import load_image
from mmkv.prompt.template import ChatTemplate
from mmkv.resources import asset
from mmkv.training.data import examples as encoding
from mmkv.training.data.conversations import RowFile
from mmkv.training.data.scene_encoding import build_tokenizer
from tests.fuzz.strategies import edited, flipped, json_files, texts
from tests.fuzz.templates import templates
from tests.fuzz.trial import Wrong, examples, trial
from tests.support.chat_models import save_qwen3_vl

_FORMATS = (
    ("PNG", "RGB"),
    ("PNG", "RGBA"),
    ("PNG", "P"),
    ("PNG", "I;16"),
    ("PNG", "1"),
    ("JPEG", "RGB"),
    ("JPEG", "CMYK"),
    ("GIF", "P"),
    ("BMP", "RGB"),
    ("TIFF", "RGB"),
    ("TIFF", "F"),
    ("WEBP", "RGB"),
    ("PPM", "RGB"),
    ("ICO", "RGB"),
    ("TGA", "RGB"),
)
_NOISE = Image.frombytes("L", (24, 17), Random(0).randbytes(24 * 17))


def _exif() -> bytes:
    made = Image.Exif()
    made[0x0112], made[0x010F] = 6, "maker"
    return made.tobytes()


def _file(kind: str, mode: str, **options: Any) -> bytes:
    made = io.BytesIO()
    picture = _NOISE.convert("I") if mode == "I;16" else _NOISE
    picture.convert(mode).save(made, kind, **options)
    return made.getvalue()


_FILES = [_file(*form, **more) for form in _FORMATS for more in ({}, {"exif": _exif()})]


@st.composite
def _pictures(draw: st.DrawFn) -> bytes:
    """Draw a file with changed bytes, or a whole one with EXIF data of any form."""
    if draw(st.integers(0, 3)) == 0:
        with suppress(Exception):  # Pillow does not write each of them
            kind = draw(st.sampled_from(("JPEG", "PNG", "WEBP")))
            return _file(kind, "RGB", exif=draw(flipped(_exif(), 8)))
    whole = draw(st.sampled_from(_FILES))
    # Most of what a decoder believes stands in the first bytes.
    head = draw(st.sampled_from((80, len(whole))))
    return draw(flipped(whole[:head])) + whole[head:]


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's, of such files
@examples(80)
@given(content=_pictures(), how=st.sampled_from(("file", "file", "uri", "object")))
def test_pictures(content: bytes, how: str) -> None:
    given: Any = Path("picture")
    if how == "uri":
        given = "data:image/png;base64," + base64.b64encode(content).decode()
    elif how == "object":
        try:
            given = Image.open(io.BytesIO(content))
        except Exception:  # what a caller sees from Pillow itself
            return
    else:
        given.write_bytes(content)
    with trial():
        made = load_image(given if how == "object" else str(given))
        assert made.mode == "RGB" and made.width and made.height


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tokenizer()


@examples(40)
@given(source=templates(), text=texts, parts=st.booleans())
def test_templates(tokenizer: Any, source: str, text: str, parts: bool) -> None:
    talk = [{"role": "user", "content": text}, {"role": "assistant", "content": "b"}]
    with trial():
        made = ChatTemplate(tokenizer, source, parts)
        made.render(talk[:1], opening=True)
        made.addition(talk, [{"role": "user", "content": "then?"}])


# A file of two dialogues, of which one is changed: answered and scored as a whole.


_TURNS = (("user", "a <ImageHere> and?"), ("assistant", "red"), ("user", "then"), ("assistant", ""))


def _dialogue(name: str) -> dict[str, Any]:
    turns = [{"from": who, "value": what} for who, what in _TURNS]
    return {"id": name, "image": ["p.png"], "conversations": turns, "exact": ["a", "b"]}


@st.composite
def _dialogues(draw: st.DrawFn) -> Any:
    rows = draw(st.tuples(edited(_dialogue("one")), st.just(_dialogue("two"))).map(list))
    if draw(st.integers(0, 3)) == 0 and isinstance(rows[0], dict):
        return {str(number): row for number, row in enumerate(rows)}
    return rows if draw(st.integers(0, 9)) else draw(edited(rows))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_qwen3_vl(tmp_path_factory.mktemp("model"))
    shutil.copy(asset("scene.png"), folder / "p.png")
    return folder


@pytest.fixture(scope="module")
def engine(model: Path) -> mmkv.Engine:
    return mmkv.Engine.from_pretrained(model, budget=24, page_size=4)


@examples(8)
@given(content=json_files(_dialogues()), changes=st.none() | st.randoms(use_true_random=False))
def test_mmdu_rows(
    model: Path, engine: mmkv.Engine, content: bytes, changes: Random | None
) -> None:
    data, output = model.parent / "benchmark.json", model.parent / "answers"
    shutil.rmtree(output, ignore_errors=True)
    data.write_bytes(content)
    given = mmdu.DataOptions(data, model)
    options = ChatOptions(EngineConfig(model=model, budget=24), max_new_tokens=2, quiet=True)
    with mock.patch.object(mmdu, "_engine", lambda *_: engine):
        with trial(engine):
            mmdu.run(given, options, output)
        if changes is None or not output.is_dir():
            return
        # What was written is read again, with a byte of it changed.
        for file in sorted(output.glob("*.json")):
            made = bytearray(file.read_bytes())
            made[changes.randrange(len(made))] = changes.randrange(256)
            file.write_bytes(made)
        with trial(engine), suppress(MmkvError):
            run_score(given, output)
        with trial(engine):
            compare([output]).show()


# Rows of five kinds beside one that is whole; every row of use is encoded.


_ROWS: dict[str, Any] = {
    "chat": {
        "messages": [
            {"role": "system", "content": "short"},
            {"role": "user", "content": [{"type": "image", "image": "p.png"}]},
            {"role": "assistant", "content": "red"},
            {"role": "user", "content": [{"type": "text", "text": "then"}]},
            {"role": "assistant", "content": "blue"},
        ],
    },
    "llava": {
        "image": "p.png",
        "conversations": [
            {"from": "human", "value": "<image>\nwhat?"},
            {"from": "gpt", "value": "red"},
        ],
    },
    "mmdu": {
        "image": ["p.png"],
        "conversations": [
            {"from": "user", "value": "see <ImageHere>."},
            {"from": "assistant", "value": "red"},
        ],
    },
    "pairs": {"instruction": "what?", "input": "red and blue", "output": "red"},
    "text": {"text": "a text of some words that is long enough"},
}


@st.composite
def _row_files(draw: st.DrawFn) -> tuple[str, str | None, bytes]:
    """Draw a file's suffix, the kind of row that is named, and its bytes."""
    kind = draw(st.sampled_from(sorted(_ROWS)))
    odd = st.lists(json_files(edited(_ROWS[kind])), min_size=1, max_size=3)
    lines = draw(
        odd.flatmap(lambda made: st.permutations([json.dumps(_ROWS[kind]).encode(), *made]))
    )
    suffix = draw(st.sampled_from((".jsonl", ".jsonl", ".json", ".txt")))
    whole = b"[" + b",".join(lines) + b"]" if suffix == ".json" else b"\n".join(lines)
    if suffix == ".txt" or draw(st.integers(0, 9)) == 0:
        whole = draw(flipped(whole))
    return suffix, draw(st.just(kind) | st.none() | st.sampled_from(sorted(_ROWS))), whole


@pytest.fixture(scope="module")
def processor(model: Path) -> Any:
    return encoding.load_processor(str(model))


@examples(30)
@given(file=_row_files())
def test_training_rows(model: Path, processor: Any, file: tuple[str, str | None, bytes]) -> None:
    suffix, kind, content = file
    path, said = model / f"rows{suffix}", list[str]()
    path.write_bytes(content)
    with trial():
        rows = RowFile(path, kind, report=said.append)
        encoder = encoding.SyntheticEncoder(processor, 512, "cut", said.append)
        for row in rows:
            encoder(row)
    for line in said:
        if not line.strip():
            raise Wrong("a row was skipped without a reason")
        line.encode()  # what is reported can be written to a file or terminal
