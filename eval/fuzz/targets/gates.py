"""Gate files: ours, write gates, and the published layout."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save as safe_bytes
from torch import Tensor

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
from mmkv.eval.fuzz import mutate
from mmkv.eval.fuzz.models import small_engine
from mmkv.eval.fuzz.target import Case, Target, Wrong, as_bytes, as_text

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
    for index in range(spec.num_layers):
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
