"""Files that a model is made of or leaves: sessions, gates, checkpoint folders.

Session files are cut, get changed bits, or are forged with a checksum that is right. Gate files are
ours, write gates, and the published layout. A checkpoint folder has a config, processors, a
tokenizer, templates, a generation config and weights.
"""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Self

import torch
from PIL import Image
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as safe_bytes
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.fuzz import mutate
from benchmarks.fuzz.models import save_text_model, save_vision_model, small_engine
from benchmarks.fuzz.target import Case, Target, Wrong, as_bytes, as_text
from benchmarks.fuzz.targets.contents import template
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
from mmkv.engine.model.gates.published import layer_name
from mmkv.resources import asset
from mmkv.sampling import Sampling

_JSON = ("identity", "state", "extra")
_SHORT = Sampling(max_new_tokens=2)


# Kinds of what a file holds: gates; recent queries; states, counts and statistics of a scorer.
POLICIES = ("dbtrimkv", "snapkv", "segments-hs")


@dataclass(frozen=True)
class _Saved:
    """A good session file: its bytes and what they say."""

    whole: bytes
    metadata: dict[str, str]
    tensors: dict[str, Tensor]

    @classmethod
    def read(cls, path: Path) -> Self:
        with safe_open(path, framework="pt") as file:
            names = file.keys()
            tensors = {name: file.get_tensor(name) for name in names}
            return cls(path.read_bytes(), file.metadata(), tensors)


class SessionFileInputs(Target):
    """Files of a talk with a picture; what loads is talked to and closed."""

    name = "session files"

    def prepare(self, folder: Path) -> None:
        super().prepare(folder)
        model = folder / "model"
        self.by_policy = {
            name: small_engine(model, policy=name, gates="random") for name in POLICIES
        }
        self.engines = [*self.by_policy.values()]
        self._good = {}
        for policy, engine in self.by_policy.items():
            file = folder / f"{policy}.mmkv"
            with engine.session() as session:
                "".join(session.send("what is it?", images=[asset("scene.png")], sampling=_SHORT))
                "".join(session.send("and then?", sampling=_SHORT))
                session.save(file, {"note": "x"})
            self._good[policy] = _Saved.read(file)

    def make(self, rng: Random) -> Case:
        policy = rng.choice(POLICIES)
        saved = self._good[policy]
        if rng.random() < 0.4:
            # The header first: flips in the tensors only break the checksum.
            head = saved.whole[:4000] if rng.random() < 0.7 else saved.whole
            content = as_text(mutate.flip(rng, head) + saved.whole[len(head) :])
            return {"policy": policy, "content": content}
        fields = {name: json.loads(saved.metadata[name]) for name in _JSON}
        case: Case = {"policy": policy, "fields": {}, "tensors": []}
        if rng.random() < 0.8:
            name = rng.choice(("state", "state", "extra", "identity"))
            edited = mutate.edit(rng, fields[name])
            if name == "extra" and rng.random() < 0.8:
                inner = json.loads(fields[name]["mmkv.history"])
                key = rng.choice(("mmkv.history", "mmkv.unfed", "mmkv.tools"))
                inner = inner if key == "mmkv.history" else [1]
                edited = fields[name] | {key: json.dumps(mutate.edit(rng, inner))}
            case["fields"][name] = edited
        while rng.random() < 0.4:
            change = {
                "name": rng.choice(sorted(saved.tensors)),
                "what": rng.choice(sorted(_TENSOR_CHANGES)),
                "seed": rng.randrange(1000),
            }
            case["tensors"].append(change)
        return case

    def run(self, case: Case) -> None:
        file = self.folder / "tried.mmkv"
        if "content" in case:
            file.write_bytes(as_bytes(case["content"]))
        else:
            self._forge(case, file)
        session, _ = self.by_policy[case["policy"]].load_session(file)
        with session:
            "".join(session.send("go on", sampling=_SHORT))

    def _forge(self, case: Case, file: Path) -> None:
        saved = self._good[case["policy"]]
        metadata = {key: text for key, text in saved.metadata.items() if key != "digest"}
        for name, field in case["fields"].items():
            metadata[name] = json.dumps(field)
        tensors = dict(saved.tensors)
        for change in case["tensors"]:
            if change["name"] not in tensors:
                continue
            made = _TENSOR_CHANGES[change["what"]](tensors[change["name"]], Random(change["seed"]))
            if made is None:
                del tensors[change["name"]]
            else:
                tensors[change["name"]] = made.contiguous()
        metadata["digest"] = session_file._digest(tensors, metadata)
        save_file(tensors, file, metadata=metadata)


def _one_value(tensor: Tensor, rng: Random) -> Tensor:
    made = tensor.clone()
    if made.numel():
        odd: Any = rng.choice((0, -1, 1, 7, 2**31 - 1, 2**62, -(2**62)))
        if made.dtype.is_floating_point:
            odd = rng.choice((float("nan"), float("inf"), 1e38, -1e38))
        elif made.dtype != torch.bool and not made.dtype.is_complex:
            limit = torch.iinfo(made.dtype)
            odd = max(limit.min, min(limit.max, odd))
        made.view(-1)[rng.randrange(made.numel())] = odd
    return made


_TENSOR_CHANGES: dict[str, Any] = {
    "gone": lambda tensor, rng: None,
    "empty": lambda tensor, rng: tensor.flatten()[:0],
    "shorter": lambda tensor, rng: tensor[:-1] if tensor.dim() else tensor,
    "longer": lambda tensor, rng: torch.cat([tensor, tensor]) if tensor.dim() else tensor,
    "flat": lambda tensor, rng: tensor.flatten(),
    "scalar": lambda tensor, rng: tensor.flatten()[:1].sum().to(tensor.dtype),
    "deeper": lambda tensor, rng: tensor[None],
    "float64": lambda tensor, rng: tensor.double(),
    "int8": lambda tensor, rng: tensor.nan_to_num().to(torch.int8),
    "bool": lambda tensor, rng: tensor.bool(),
    "complex": lambda tensor, rng: tensor.to(torch.complex64),
    "one value": _one_value,
    "two values": lambda tensor, rng: _one_value(_one_value(tensor, rng), rng),
}


_FILES = ("gates.safetensors", "gates.json")


class GateFiles(Target):
    """Files with changed bytes, and whole files whose tensors are changed."""

    name = "gates"

    def prepare(self, folder: Path) -> None:
        super().prepare(folder)
        self._spec = small_engine(folder / "model").spec
        self._ours: dict[str, dict[str, Any]] = {}
        for name, gates in (
            ("tied", make_random_gates(self._spec)),
            ("write", make_random_write_gates(self._spec, width=4)),
        ):
            save_gates(gates, folder / name, self._spec)
            self._ours[name] = {
                "tensors": gates.tensors,
                "info": json.loads((folder / name / "gates.json").read_text()),
                "files": {file: (folder / name / file).read_bytes() for file in _FILES},
            }
        self._published = _published(self._spec)
        made = io.BytesIO()
        torch.save(self._published, made)
        self._pickle = made.getvalue()

    def make(self, rng: Random) -> Case:
        layout = rng.choice(("tied", "write", "published"))
        if rng.random() < 0.4:
            if layout == "published":
                return {"layout": layout, "content": as_text(mutate.flip(rng, self._pickle))}
            file = rng.choice(_FILES)
            content = self._ours[layout]["files"][file]
            head = content[: 2000 if rng.random() < 0.7 else len(content)]
            made = mutate.flip(rng, head) + content[len(head) :]
            return {"layout": layout, "file": file, "content": as_text(made)}
        tensors = self._published if layout == "published" else self._ours[layout]["tensors"]
        case: Case = {"layout": layout, "tensors": [], "info": None}
        for _ in range(rng.randrange(1, 3)):
            case["tensors"].append([rng.choice(sorted(tensors)), rng.choice(sorted(_CHANGES))])
        if layout != "published" and rng.random() < 0.3:
            case["info"] = mutate.edit(rng, self._ours[layout]["info"])
        return case

    def run(self, case: Case) -> None:
        folder = self.folder / "tried"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        if not self._write(case, folder):
            return
        load = load_write_gates if case["layout"] == "write" else load_gates
        gates: Gates | WriteGates = load(folder, self._spec)
        for name, tensor in gates.tensors.items():
            if not tensor.dtype.is_floating_point or not torch.isfinite(tensor.float()).all():
                raise Wrong(f"gate tensor {name!r} was taken: {tensor.dtype}, not all finite")
        hidden = torch.zeros(2, self._spec.hidden_size)
        if isinstance(gates, Gates):
            gates.to(hidden.device, hidden.dtype).log_beta(0, hidden)

    def _write(self, case: Case, folder: Path) -> bool:
        """Write the files; False when torch or safetensors cannot hold such a tensor."""
        layout = case["layout"]
        if "content" in case:
            content = as_bytes(case["content"])
            if layout == "published":
                (folder / "trimkv_weights.pth").write_bytes(content)
                return True
            for file, whole in self._ours[layout]["files"].items():
                (folder / file).write_bytes(content if file == case["file"] else whole)
            return True
        published = layout == "published"
        tensors = dict(self._published if published else self._ours[layout]["tensors"])
        try:
            for name, change in case["tensors"]:
                if name in tensors:
                    made = _CHANGES[change](tensors.pop(name))
                    if made is not None:
                        tensors[f"{name}.x" if change == "renamed" else name] = made
            if published:
                torch.save(tensors, folder / "trimkv_weights.pth")
                return True
            content = safe_bytes({name: t.contiguous() for name, t in tensors.items()})
        except (
            AttributeError,
            IndexError,  # a tensor that an earlier change has emptied
            KeyError,
            NotImplementedError,
            RuntimeError,
            SafetensorError,
            TypeError,
            ValueError,
        ):
            return False
        (folder / "gates.safetensors").write_bytes(content)
        info = self._ours[layout]["info"] if case["info"] is None else case["info"]
        (folder / "gates.json").write_text(json.dumps(info))
        return True


def _published(spec: Any) -> dict[str, Tensor]:
    """Return gates of the layout ``rg`` under their published names."""
    generator = torch.Generator().manual_seed(0)
    made = {}
    for index in range(spec.entry_layers):
        for name, shape in (
            ("linear1.weight", (6, spec.hidden_size)),
            ("linear1.bias", (6,)),
            ("linear2.weight", (spec.num_kv_heads, 6)),
            ("bias", (spec.num_kv_heads,)),
        ):
            made[layer_name(f"layers.{index}.{name}")] = torch.randn(*shape, generator=generator)
    return made


def _with(value: float) -> Any:
    def change(tensor: Tensor) -> Tensor:
        made = tensor.clone()
        made.view(-1)[0] = value
        return made

    return change


_CHANGES: dict[str, Any] = {
    "gone": lambda tensor: None,
    "renamed": lambda tensor: tensor,
    "nan": _with(float("nan")),
    "inf": _with(float("inf")),
    "minus inf": _with(float("-inf")),
    "huge": _with(3e38),
    "scalar": lambda tensor: tensor.flatten()[0].clone(),
    "flat": lambda tensor: tensor.flatten(),
    "deeper": lambda tensor: tensor[None],
    "transposed": lambda tensor: tensor.mT if tensor.dim() > 1 else None,
    "empty": lambda tensor: tensor.flatten()[:0],
    "no heads": lambda tensor: tensor[:0] if tensor.dim() else None,
    "sparse": lambda tensor: tensor.to_sparse(),
    "sparse rows": lambda tensor: tensor.to_sparse_csr(),
    "meta": lambda tensor: tensor.to("meta"),
    "number": lambda tensor: 3,
    "text": lambda tensor: "x",
    "list": lambda tensor: tensor.tolist(),
    "quantised": lambda tensor: torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint8),
    **{
        str(dtype).removeprefix("torch."): lambda tensor, dtype=dtype: tensor.to(dtype)
        for dtype in (
            torch.float16,
            torch.bfloat16,
            torch.float64,
            torch.float8_e4m3fn,
            torch.bool,
            torch.int8,
            torch.uint8,
            torch.int64,
            torch.complex64,
        )
    },
}


_SHORT_TEXT = Sampling(max_new_tokens=2)
_TEMPLATE, _WEIGHTS = "chat_template.jinja", "model.safetensors"


class Checkpoints(Target):
    """Folders of two small models with one file changed, gone or empty; then a talk."""

    name = "checkpoints"

    def prepare(self, folder: Path) -> None:
        super().prepare(folder)
        self._models = {
            "vision": save_vision_model(folder / "vision"),
            "text": save_text_model(folder / "text"),
        }
        self._files = {
            name: {file.name: file.read_bytes() for file in model.iterdir()}
            for name, model in self._models.items()
        }
        self._picture = Image.new("RGB", (40, 24), "red")

    def make(self, rng: Random) -> Case:
        model = rng.choice(("vision", "vision", "text"))
        files = self._files[model]
        # Rarely the tokenizer, whose own file is large and slow to read.
        file = rng.choice([name for name in sorted(files) for _ in range(_share(name))])
        content = files[file]
        what = rng.random()
        made: bytes | None
        if what < 0.03:
            made = None
        elif what < 0.06:
            made = rng.choice((b"", b"{}", b"[]", b"null", b"\xff\xfe", b"{"))
        elif file == _TEMPLATE and what < 0.8:
            made = template(rng).encode("utf-8", "surrogatepass")
        elif file == _WEIGHTS:
            made = _changed_weights(content, rng)
        elif file.endswith(".json") and what < 0.9:
            made = mutate.dump(rng, mutate.edit(rng, json.loads(content)))
        else:
            made = mutate.flip(rng, content)
        return {"model": model, "file": file, "content": None if made is None else as_text(made)}

    def run(self, case: Case) -> None:
        folder = self.folder / "tried"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for name, whole in self._files[case["model"]].items():
            content = whole if name != case["file"] else case["content"]
            if content is not None:
                made = content if isinstance(content, bytes) else as_bytes(content)
                (folder / name).write_bytes(made)
        engine = Engine.from_pretrained(folder, budget=24, page_size=4)
        self.engines = [engine]
        pictures = [self._picture] if engine.processor.sees else []
        with engine.session() as session:
            "".join(session.send("what is it?", images=pictures, sampling=_SHORT_TEXT))
            "".join(session.send("and then?", sampling=_SHORT_TEXT))


def _share(name: str) -> int:
    return {"tokenizer.json": 1, _TEMPLATE: 4, "config.json": 6}.get(name, 3)


def _changed_weights(content: bytes, rng: Random) -> bytes:
    """Change the header, its JSON, or numbers of the weights."""
    size = int.from_bytes(content[:8], "little")
    header, body = content[8 : 8 + size], bytearray(content[8 + size :])
    what = rng.randrange(4)
    if what == 0:
        return mutate.flip(rng, content[: 8 + size]) + bytes(body)
    if what == 1:
        edited = json.dumps(mutate.edit(rng, json.loads(header))).encode()
        return len(edited).to_bytes(8, "little") + edited + bytes(body)
    if what == 2:
        return content[: rng.randrange(len(content))]
    odd: Any = rng.choice((float("nan"), float("inf"), -float("inf"), 3e38))
    at = 4 * rng.randrange(len(body) // 4)
    body[at : at + 4] = torch.tensor([odd]).numpy().tobytes()
    return content[: 8 + size] + bytes(body)
