"""Files that a model is made of or leaves: sessions, gates, checkpoint folders."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, reject
from hypothesis import strategies as st
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save as safe_bytes
from safetensors.torch import save_file
from torch import Tensor

from mmkv.api import Engine
from mmkv.engine import session_file
from mmkv.engine.model.gates import (
    Gates,
    WriteGates,
    load_gates,
    load_write_gates,
    make_random_gates,
    make_random_write_gates,
    save_gates,
)
from mmkv.engine.model.gates.files import layer_name
from mmkv.resources import asset
from mmkv.sampling import Sampling
from tests.fuzz.strategies import edited, flipped, json_files
from tests.fuzz.templates import templates
from tests.fuzz.trial import Wrong, examples, trial
from tests.support.chat_models import save_llama, save_qwen3_vl

_SHORT = Sampling(max_new_tokens=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen3_vl(tmp_path_factory.mktemp("model"))


def _head_flipped(content: bytes, size: int) -> st.SearchStrategy[bytes]:
    """Draw a file with changes in its first bytes, which say what it holds, or anywhere."""
    near = flipped(content[:size]).map(lambda head: head + content[size:])
    return st.one_of(near, near, flipped(content))


def _one_value(tensor: Tensor, number: int) -> Tensor:
    made = tensor.clone()
    if made.numel():
        odd: Any = (0, -1, 1, 7, 2**31 - 1, 2**62, -(2**62))[number % 7]
        if made.dtype.is_floating_point:
            odd = (float("nan"), float("inf"), float("-inf"), 1e38, -1e38, 3e38)[number % 6]
        elif made.dtype != torch.bool and not made.dtype.is_complex:
            limit = torch.iinfo(made.dtype)
            odd = max(limit.min, min(limit.max, odd))
        made.view(-1)[number % made.numel()] = odd
    return made


_DTYPES = (
    *(torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.bool, torch.int8),
    *(torch.uint8, torch.int64, torch.complex64),
)
# What a tensor in a file may become, given a number at random.
_CHANGES: dict[str, Any] = {
    "gone": lambda tensor, _: None,
    "empty": lambda tensor, _: tensor.flatten()[:0],
    "shorter": lambda tensor, _: tensor[:-1] if tensor.dim() else tensor,
    "none": lambda tensor, _: tensor[:0] if tensor.dim() else None,
    "longer": lambda tensor, _: torch.cat([tensor, tensor]) if tensor.dim() else tensor,
    "flat": lambda tensor, _: tensor.flatten(),
    "scalar": lambda tensor, _: tensor.flatten()[:1].sum().to(tensor.dtype),
    "deeper": lambda tensor, _: tensor[None],
    "transposed": lambda tensor, _: tensor.mT if tensor.dim() > 1 else None,
    "dtype": lambda tensor, number: tensor.nan_to_num().to(_DTYPES[number % len(_DTYPES)]),
    "one value": _one_value,
}


def _sparse_rows(tensor: Tensor) -> Tensor | None:
    try:
        return tensor.to_sparse_csr()
    except IndexError:  # torch fails on some shapes
        return None


# What a pickled file may hold, too.
_UNSAFE: dict[str, Any] = {
    "sparse": lambda tensor, _: tensor.to_sparse(),
    "sparse rows": lambda tensor, _: _sparse_rows(tensor),
    "meta": lambda tensor, _: tensor.to("meta"),
    "number": lambda tensor, _: 3,
    "text": lambda tensor, _: "x",
    "list": lambda tensor, _: tensor.tolist(),
    "quantised": lambda tensor, _: torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint8),
}


@st.composite
def _changed(
    draw: st.DrawFn, tensors: dict[str, Any], least: int, unsafe: bool = False
) -> dict[str, Any]:
    """Draw a file's tensors with up to two of them changed, gone or under another name."""
    made, changes = dict(tensors), _CHANGES | _UNSAFE if unsafe else _CHANGES
    names = st.lists(st.sampled_from(sorted(tensors)), min_size=least, max_size=2, unique=True)
    for name in draw(names):
        what = draw(st.sampled_from(sorted((*changes, "renamed", "one value"))))
        changed = made.pop(name)
        if what != "renamed":
            try:
                changed = changes[what](changed, draw(st.integers(0, 999)))
            except (RuntimeError, NotImplementedError):  # torch has no such tensor
                continue
        if changed is not None:
            made[f"{name}.x" if what == "renamed" else name] = changed
    return made


# Session files: cut, with changed bits, or forged with a checksum that is right.


# Kinds of what a file holds: gates; recent queries; states, counts and statistics of a scorer.
_POLICIES = ("dbtrimkv", "snapkv", "segments-hs")
_JSON = ("identity", "state", "extra")


class Saved:
    """An engine and a whole session file of it: its bytes and what they say."""

    def __init__(self, model: Path, policy: str, file: Path) -> None:
        self.engine = Engine.from_pretrained(
            model, policy=policy, gates="random", budget=24, page_size=4
        )
        with self.engine.session() as session:
            "".join(session.send("what is it?", images=[asset("scene.png")], sampling=_SHORT))
            "".join(session.send("and then?", sampling=_SHORT))
            session.save(file, {"note": "x"})
        self.whole = file.read_bytes()
        with safe_open(file, framework="pt") as opened:
            self.tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            self.metadata: dict[str, str] = opened.metadata()
        self.fields = {name: json.loads(self.metadata[name]) for name in _JSON}

    def forged(self, fields: dict[str, Any], tensors: dict[str, Tensor], file: Path) -> None:
        """Write a file that says and holds something else, with a checksum that is right."""
        metadata = {key: text for key, text in self.metadata.items() if key != "digest"}
        metadata |= {name: json.dumps(field) for name, field in fields.items()}
        tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
        try:
            metadata["digest"] = session_file._digest(tensors, metadata)
        except UnicodeEncodeError:
            reject()  # half of a surrogate pair, which no file can hold
        save_file(tensors, file, metadata=metadata)


@pytest.fixture(scope="module")
def saved(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Saved]:
    folder = tmp_path_factory.mktemp("saved")
    return {name: Saved(model, name, folder / f"{name}.mmkv") for name in _POLICIES}


@st.composite
def _fields(draw: st.DrawFn, fields: dict[str, Any]) -> dict[str, Any]:
    """Draw what one field of a session file says instead; the dialogue is JSON within JSON."""
    name = draw(st.sampled_from(("state", "state", "extra", "history", "mmkv.unfed", "mmkv.tools")))
    if name in fields:
        return {name: draw(edited(fields[name]))}
    name = "mmkv.history" if name == "history" else name
    inner = json.loads(fields["extra"].get(name, "[1]"))
    return {"extra": fields["extra"] | {name: json.dumps(draw(edited(inner)))}}


@examples(40)
@given(data=st.data(), policy=st.sampled_from(_POLICIES), forge=st.booleans())
def test_session_files(
    saved: dict[str, Saved], tmp_path: Path, data: st.DataObject, policy: str, forge: bool
) -> None:
    one, file = saved[policy], tmp_path / "tried.mmkv"
    if forge:
        fields = data.draw(_fields(one.fields) | edited(one.fields, 1))
        fields = fields if isinstance(fields, dict) else {}
        one.forged(fields, data.draw(_changed(one.tensors, 0)), file)
    else:
        file.write_bytes(data.draw(_head_flipped(one.whole, 4000)))
    with trial(one.engine) as made:
        session, _ = one.engine.load_session(file)
        with session:
            "".join(session.send("go on", sampling=_SHORT))
    said = str(made.refusal or "")
    # One line, and none of what is said where the program is wrong, not the file.
    own = "still be loaded" in said or "fetch the file" in said
    if "\n" in said or not said.isprintable() or own:
        raise Wrong(f"it says {said!r}")


# Gates: files with changed bytes, and whole files whose tensors are changed.


class OwnGates:
    """Gates of a model in each layout: tensors, what is said about them, and files."""

    def __init__(self, spec: Any, folder: Path) -> None:
        self.spec = spec
        self.tensors: dict[str, dict[str, Tensor]] = {"published": _published(spec)}
        self.files: dict[str, dict[str, bytes]] = {}
        for layout, gates in (
            ("tied", make_random_gates(spec)),
            ("write", make_random_write_gates(spec, width=4)),
        ):
            save_gates(gates, folder / layout, spec)
            self.tensors[layout] = gates.tensors
            self.files[layout] = {one.name: one.read_bytes() for one in (folder / layout).iterdir()}
        pickled = io.BytesIO()
        torch.save(self.tensors["published"], pickled)
        self.files["published"] = {"trimkv_weights.pth": pickled.getvalue()}


def _published(spec: Any) -> dict[str, Tensor]:
    """Return gates of the layout ``rg`` under their published names."""
    heads, generator = spec.num_kv_heads, torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {
        "linear1.weight": (6, spec.hidden_size),
        "linear1.bias": (6,),
        "linear2.weight": (heads, 6),
        "bias": (heads,),
    }
    return {
        layer_name(f"layers.{index}.{name}"): torch.randn(*shape, generator=generator)
        for index in range(spec.entry_layers)
        for name, shape in shapes.items()
    }


@pytest.fixture(scope="module")
def gates(saved: dict[str, Saved], tmp_path_factory: pytest.TempPathFactory) -> OwnGates:
    return OwnGates(saved["dbtrimkv"].engine.spec, tmp_path_factory.mktemp("gates"))


@st.composite
def _gate_files(draw: st.DrawFn, own: OwnGates, layout: str) -> dict[str, bytes]:
    files = dict(own.files[layout])
    if draw(st.booleans()):
        name = draw(st.sampled_from(sorted(files)))
        return files | {name: draw(_head_flipped(files[name], 2000))}
    tensors = draw(_changed(own.tensors[layout], 1, unsafe=layout == "published"))
    if layout == "published":
        pickled = io.BytesIO()
        torch.save(tensors, pickled)
        return {"trimkv_weights.pth": pickled.getvalue()}
    files["gates.safetensors"] = safe_bytes({name: t.contiguous() for name, t in tensors.items()})
    if draw(st.integers(0, 3)) == 0:
        files["gates.json"] = json.dumps(draw(edited(json.loads(files["gates.json"])))).encode()
    return files


@examples(60)
@given(data=st.data(), layout=st.sampled_from(("tied", "write", "published")))
def test_gates(gates: OwnGates, tmp_path: Path, data: st.DataObject, layout: str) -> None:
    folder = _written(tmp_path / "tried", data.draw(_gate_files(gates, layout)))
    with trial():
        load = load_write_gates if layout == "write" else load_gates
        made: Gates | WriteGates = load(folder, gates.spec)
        for name, tensor in made.tensors.items():
            if not tensor.dtype.is_floating_point or not torch.isfinite(tensor.float()).all():
                raise Wrong(f"gate tensor {name!r} was taken: {tensor.dtype}, not all finite")
        hidden = torch.zeros(2, gates.spec.hidden_size)
        if isinstance(made, Gates):
            made.to(hidden.device, hidden.dtype).log_beta(0, hidden)


def _written(folder: Path, files: dict[str, bytes]) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


# Folders of two small models with one file changed, gone or empty; then a talk.


_TEMPLATE, _WEIGHTS = "chat_template.jinja", "model.safetensors"
_SHARES = {"tokenizer.json": 1, _TEMPLATE: 4, "config.json": 6}


@pytest.fixture(scope="module")
def checkpoints(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, bytes]]:
    folders = {"vision": model, "text": save_llama(tmp_path_factory.mktemp("text"))}
    return {
        name: {file.name: file.read_bytes() for file in folder.iterdir()}
        for name, folder in folders.items()
    }


@st.composite
def _folders(draw: st.DrawFn, files: dict[str, bytes]) -> dict[str, bytes]:
    # Rarely the tokenizer, which is large and slow to read.
    names = [name for name in sorted(files) for _ in range(_SHARES.get(name, 3))]
    name = draw(st.sampled_from(names))
    content = files[name]
    what = draw(st.integers(0, 19))
    if what == 0:
        return {other: content for other, content in files.items() if other != name}
    if what == 1:
        made = draw(st.sampled_from((b"", b"{}", b"[]", b"null", b"\xff\xfe", b"{")))
    elif name == _TEMPLATE and what < 16:
        made = draw(templates()).encode("utf-8", "surrogatepass")
    elif name == _WEIGHTS:
        made = draw(_weights(content))
    elif name.endswith(".json") and what < 18:
        made = draw(json_files(edited(json.loads(content))))
    else:
        made = draw(flipped(content))
    return files | {name: made}


@st.composite
def _weights(draw: st.DrawFn, content: bytes) -> bytes:
    """Change the header, its JSON, or numbers of the weights."""
    size = 8 + int.from_bytes(content[:8], "little")
    body = bytearray(content[size:])
    what = draw(st.sampled_from(("bytes", "header", "cut", "number")))
    if what == "bytes":
        return draw(flipped(content[:size])) + body
    if what == "header":
        made = json.dumps(draw(edited(json.loads(content[8:size])))).encode()
        return len(made).to_bytes(8, "little") + made + body
    if what == "cut":
        return content[: draw(st.integers(0, len(content)))]
    at = 4 * draw(st.integers(0, len(body) // 4 - 1))
    odd = draw(st.sampled_from((float("nan"), float("inf"), -float("inf"), 3e38)))
    body[at : at + 4] = torch.tensor([odd]).numpy().tobytes()
    return content[:size] + body


@examples(12)
@given(data=st.data(), kind=st.sampled_from(("vision", "vision", "text")))
def test_checkpoints(
    checkpoints: dict[str, dict[str, bytes]], tmp_path: Path, data: st.DataObject, kind: str
) -> None:
    folder = _written(tmp_path / "tried", data.draw(_folders(checkpoints[kind])))
    with trial() as made:
        engine = Engine.from_pretrained(folder, budget=24, page_size=4)
        made.engines.append(engine)
        pictures = [Image.new("RGB", (40, 24), "red")] if engine.processor.sees else []
        with engine.session() as session:
            "".join(session.send("what is it?", images=pictures, sampling=_SHORT))
            "".join(session.send("and then?", sampling=_SHORT))
