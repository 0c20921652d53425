"""Gate files: our safetensors + gates.json, and the published ``trimkv_weights.pth``."""

from __future__ import annotations

import json
import os
import pickle
import re
from pathlib import Path
from typing import Literal

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine import hub
from engine.errors import GateError
from engine.model.gates.module import Gates, make_random_gates, tied_gates, tying_of
from engine.model.gates.published import published_gates
from engine.model.gates.write import WriteGates, make_random_write_gates, write_gates
from engine.model.spec import DecoderSpec

FORMAT = "mmkv-gates-1"
# What a gate file may hold in half precision: all but the readout, its bias and gains of norms.
_TRUNK = re.compile(r"layers\.|.*\.retention_gate\.linear1\.")
_SIZES = ("hidden_size", "num_layers", "num_kv_heads")
_TENSORS, _INFO, _PUBLISHED = "gates.safetensors", "gates.json", "trimkv_weights.pth"


def load_gates(source: str | Path, spec: DecoderSpec) -> Gates:
    """Read retention gates for a model of the shape ``spec``.

    Args:
        source: a folder (ours or a published one), a gate file, a hub id, or ``"random"``.

    Raises:
        GateError: not found, unreadable, write gates, or made for a model of another shape (both
            named).
    """
    if str(source) == "random":
        return make_random_gates(spec)
    path, tensors, info = _read(source)
    if info is None:
        return published_gates(tensors, spec)
    if info.get("kind") == "write":
        raise GateError(
            f"{path} holds write gates, and the policy reads retention gates; name a folder with "
            "those"
        )
    _check_shape(info, spec, _SIZES)
    make = published_gates if info.get("layout") == "rg" else tied_gates
    return make(tensors, spec, info)


def load_write_gates(source: str | Path, spec: DecoderSpec) -> WriteGates:
    """Read write gates for a model of the shape ``spec``.

    Args:
        source: a folder, a gate file, a hub id, or ``"random"``.

    Raises:
        GateError: not found, unreadable, retention gates, or made for a model of another shape
            (both named).
    """
    if str(source) == "random":
        return make_random_write_gates(spec)
    path, tensors, info = _read(source)
    if info is None or info.get("kind") != "write":
        raise GateError(
            f"{path} holds retention gates, and the policy reads write gates; train those with "
            "`python -m training.distill --method wgkv`, or choose a policy for retention gates"
        )
    _check_shape(info, spec, (*_SIZES, "head_dim"))
    return write_gates(tensors, spec, info)


def _read(source: str | Path) -> tuple[Path, dict[str, Tensor], dict[str, object] | None]:
    """Return a gate file's path, its tensors and its ``gates.json``; None for a published file."""
    path = _locate(source)
    try:
        if path.name.endswith(".pth"):
            return path, torch.load(path, map_location="cpu", weights_only=True), None
        info = json.loads((path.parent / _INFO).read_text())
        tensors = load_file(path)
    except FileNotFoundError as error:
        raise GateError(f"{path.parent} has no {_INFO}; copy it beside {path.name}") from error
    except (
        SafetensorError,
        ValueError,
        pickle.UnpicklingError,
        RuntimeError,
        EOFError,
        OSError,
    ) as error:
        reason = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
        raise GateError(f"cannot read gates from {path}: {reason}; fetch the file again") from error
    if not isinstance(info, dict) or info.get("format") != FORMAT:
        raise GateError(f"{path} is not in the format {FORMAT}; save it with this mmkv version")
    return path, tensors, info


def trained_age(source: str | Path) -> Literal["paper", "released"]:
    """Return how the code that trained these gates counts the age of an entry.

    The authors of TRIM-KV and DBTrimKV trained and evaluated the gates that they publish with the
    ages of their released code, which are not the papers'.

    Raises:
        GateError: not found.
    """
    published = str(source) != "random" and _locate(source).suffix == ".pth"
    return "released" if published else "paper"


def foreign_note(gates: Gates | WriteGates, model: str) -> str | None:
    """Return one line if the gates name a ``config.json`` that is not this checkpoint's, else None.

    Models of one shape (an Instruct and a Thinking one) load each other's gates, and the scores
    would be noise. A note, not an error: a checkpoint saved again has another file, too.

    Args:
        model: the checkpoint's folder or hub id.
    """
    theirs = gates.info.get("base_config_sha256")
    if theirs is None or theirs == hub.config_digest(model):
        return None
    return (
        f"these gates were trained for a checkpoint with another config.json "
        f"({gates.info.get('base_model', 'not named')}); if {model} is another model, their scores "
        "mean nothing for it: train gates for it with `python -m training.distill`"
    )


def as_stored(tensors: dict[str, Tensor], trunk_dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Return the tensors of a gate file with its trunks in ``trunk_dtype``; None: as they are."""
    return {
        name: tensor.to(trunk_dtype) if trunk_dtype and _TRUNK.match(name) else tensor
        for name, tensor in tensors.items()
    }


def save_gates(
    gates: Gates | WriteGates,
    folder: str | Path,
    spec: DecoderSpec,
    trunk_dtype: torch.dtype | None = None,
    **info: object,
) -> None:
    """Write ``gates.safetensors`` and ``gates.json`` (sizes, base model, training settings).

    Args:
        trunk_dtype: what the trunks are stored in, half as large in float16; None: as they are.
            The readout, whose bias decides over the last 1e-8 of beta, stays float32, and so do the
            gains of a write gate.

    Raises:
        GateError: for the published layout ``rg10``, which stays in its own file.
    """
    sizes: dict[str, object]
    if isinstance(gates, WriteGates):
        sizes = {"kind": gates.kind, "head_dim": spec.head_dim, "d_gate": gates.width}
    elif gates.kind == "tied":
        readout = gates.tensors["readout.weight"]
        sizes = {"tying": tying_of(readout), "d_gate": readout.shape[-1] * spec.num_kv_heads}
    elif gates.kind == "rg":
        sizes = {"layout": "rg", "d_gate": gates.layers[0].readout.shape[1]}
    else:
        raise GateError(
            f"gates of kind {gates.kind!r} keep their own file; 'tied', 'rg' and 'write' are saved"
        )
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().contiguous() for name, tensor in gates.tensors.items()}
    save_file(as_stored(tensors, trunk_dtype), folder / _TENSORS)
    described = {
        "format": FORMAT,
        "hidden_size": spec.hidden_size,
        "num_layers": spec.num_layers,
        "num_kv_heads": spec.num_kv_heads,
        **sizes,
        **gates.info,
        **info,
    }
    (folder / _INFO).write_text(json.dumps(described, indent=2) + "\n")


def _locate(source: str | Path) -> Path:
    path = Path(source)
    if path.is_file():
        return path
    if not path.is_dir():
        if os.sep in str(source)[:1] or str(source).count("/") != 1:
            raise GateError(f"no gates at {source}; give a folder, a file, a hub id or 'random'")
        try:
            path = Path(
                snapshot_download(
                    str(source),
                    allow_patterns=["gates.*", _PUBLISHED, "*.json"],
                    local_files_only=not hub.in_reach(),
                )
            )
        except Exception as error:  # the hub client has a dozen error types, all meaning this
            raise GateError(
                f"no gates at {source}: not a folder, and the hub gave {type(error).__name__}; "
                "check the path or the network"
            ) from error
    for name in (_TENSORS, _PUBLISHED):
        if (path / name).is_file():
            return path / name
    raise GateError(f"{path} holds neither {_TENSORS} nor {_PUBLISHED}; name another folder")


def _check_shape(info: dict[str, object], spec: DecoderSpec, names: tuple[str, ...]) -> None:
    theirs = {name: info.get(name) for name in names}
    ours = {name: getattr(spec, name) for name in names}
    if theirs != ours:

        def words(sizes: dict[str, object]) -> str:
            return ", ".join(f"{key} {value}" for key, value in sizes.items())

        raise GateError(
            f"the gates are for a model with {words(theirs)}; this model has {words(ours)}; "
            "use gates trained for it"
        )
