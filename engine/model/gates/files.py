"""Gate files: our safetensors + gates.json, ``trimkv_weights.pth``, and WG-KV's ``*.pt``.

Of the layouts that authors publish, ``rg`` is the gate of TRIM-KV (arXiv 2512.03324, section 5.1),
``rg10`` that of DBTrimKV's released code; training writes both, too.
"""

from __future__ import annotations

import json
import os
import pickle
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from mmkv.engine import paths
from mmkv.engine.errors import STOPS, GateError, first_line
from mmkv.engine.model.fingerprint import fingerprint, identity, language_fingerprint
from mmkv.engine.model.gates.module import (
    Gates,
    LayerGate,
    make_random_gates,
    tied_gates,
    tying_of,
)
from mmkv.engine.model.gates.write import WriteGates, make_random_write_gates, write_gates
from mmkv.engine.model.source import config_digest, hub_reachable
from mmkv.engine.model.spec import DecoderSpec
from mmkv.engine.model.weights import find_not_finite
from mmkv.engine.paths import is_file, is_folder, is_lfs_pointer, open_regular, user_path

FORMAT = "mmkv-gates-1"
# What a gate file may hold in half precision: all but the readout, its bias and gains of norms.
_TRUNK = re.compile(r"layers\.|.*\.retention_gate\.linear1\.")
_SIZES = ("hidden_size", "num_layers", "num_kv_heads")
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_TENSORS, _INFO, _PUBLISHED = "gates.safetensors", "gates.json", "trimkv_weights.pth"
# Of names of published tensors.
GATE_KEY, WRITE_KEY = "self_attn.retention_gate.", "self_attn.g_predictors."
_GATE = re.compile(r"layers\.(\d+)\.self_attn\.retention_gate\.(.+)$")
_WRITE = re.compile(r"layers\.(\d+)\.self_attn\.g_predictors\.(.+)$")
_PICKLES = (".pth", ".pt")  # how the authors of TRIM-KV, DBTrimKV and WG-KV publish gates


def load_gates(source: str | Path, spec: DecoderSpec) -> Gates:
    """Read retention gates for a model of the shape ``spec``.

    Args:
        source: a folder (ours or a published one), a gate file, a hub id, the name of a set at
            hand, or ``"random"``.

    Raises:
        GateError: not found, unreadable, write gates, or made for a model of another shape (both
            named).
    """
    if str(source) == "random":
        return make_random_gates(spec)
    path, tensors, info, seen = _read(source)
    if info is None and not any(WRITE_KEY in name for name in tensors):
        return published_gates(tensors, spec)
    if info is None or info.get("kind") == "write":
        raise GateError(
            f"{path} holds write gates, and the policy reads retention gates; name a folder with "
            "those"
        )
    _check_shape(info, spec, _SIZES)
    make = published_gates if info.get("layout") in ("rg", "rg10") else tied_gates
    return replace(make(tensors, spec, info), file=(path, seen))


def load_write_gates(source: str | Path, spec: DecoderSpec) -> WriteGates:
    """Read write gates for a model of the shape ``spec``.

    Args:
        source: a folder, a gate file, a hub id, the name of a set at hand, or ``"random"``.

    Raises:
        GateError: not found, unreadable, retention gates, or made for a model of another shape
            (both named).
    """
    if str(source) == "random":
        return make_random_write_gates(spec)
    path, tensors, info, _ = _read(source)
    if info is None and any(WRITE_KEY in name for name in tensors):
        return published_write_gates(tensors, spec)
    if info is None or info.get("kind") != "write":
        raise GateError(
            f"{path} holds retention gates, and the policy reads write gates; train those "
            "with `mmkv distill --method wgkv`, or choose a policy for retention gates"
        )
    _check_shape(info, spec, (*_SIZES, "head_dim"))
    return write_gates(tensors, spec, info)


def _info(path: Path) -> Any:
    """Return what ``gates.json`` beside a file of gates says."""
    with open_regular(path.parent / _INFO) as file:
        return json.load(file)


def _read(source: str | Path) -> tuple[Path, dict[str, Tensor], dict[str, object] | None, str]:
    """Return a gate file's path, its tensors, its ``gates.json``, and its identity before it was
    read; None, and nothing, for a published file.
    """
    path = _locate(source)
    info, seen = None, ""
    try:
        if path.suffix in _PICKLES:
            tensors = torch.load(path, map_location="cpu", weights_only=True)
        else:
            info, seen = _info(path), identity([path])
            tensors = load_file(path, backend="pread")  # cut short while mapped, it would kill
    except FileNotFoundError as error:
        raise GateError(f"{path.parent} has no {_INFO}; copy it beside {path.name}") from error
    except pickle.UnpicklingError as error:
        raise GateError(_refused_pickle(path, error)) from error
    except MemoryError as error:
        raise GateError(f"{path} does not fit into memory; name another gate file") from error
    except STOPS:
        raise
    # A damaged pickle can raise nearly anything: IndexError, KeyError, UnicodeDecodeError, ...
    except BaseException as error:
        pointer = is_lfs_pointer(path)
        remedy = "run `git lfs pull` there" if pointer else "fetch the file again"
        place = path.parent / _INFO if isinstance(error, json.JSONDecodeError) else path
        raise GateError(f"cannot read gates from {place}: {first_line(error)}; {remedy}") from error
    if path.suffix in _PICKLES:
        own = _published_part(tensors, path)
        require_numbers(own, str(path))
        return (
            path,
            {name: tensor for name, tensor in own.items() if isinstance(tensor, Tensor)},
            None,
            seen,
        )
    if not isinstance(info, dict) or info.get("format") != FORMAT:
        raise GateError(f"{path} is not in the format {FORMAT}; save it with this mmkv version")
    require_numbers(tensors, str(path))
    return path, tensors, info, seen


def require_numbers(tensors: Mapping[str, object], where: str) -> None:
    """Check that gates are dense float tensors of finite numbers.

    Raises:
        GateError: naming the first one that is not.
    """
    remedy = "save the gates again from their training run, or use others"
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            what = f"is a {type(tensor).__name__}"
        elif tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
            what = "does not hold its numbers (it is sparse, quantised or meta)"
        elif tensor.dtype not in _DTYPES:
            what = f"is of {str(tensor.dtype).removeprefix('torch.')}"
        elif find_not_finite([(name, tensor)]):
            what = "holds NaN or infinity"
        else:
            continue
        raise GateError(
            f"gate tensor {name!r} of {where} {what}, not finite floating-point numbers; {remedy}"
        )


def _published_part(tensors: object, path: Path) -> dict[str, object]:
    """Return what a published file holds of gates; it may hold more."""
    if not isinstance(tensors, dict):
        raise GateError(
            f"{path} holds a {type(tensors).__name__}, not tensors by name; name a gate file"
        )
    return {
        str(name): value
        for name, value in tensors.items()
        if GATE_KEY in str(name) or WRITE_KEY in str(name)
    }


def _refused_pickle(path: Path, error: Exception) -> str:
    """Say in mmkv's words why torch refused a pickle: its own advice is to run the code in it."""
    found = re.search(r"GLOBAL (\S+)", str(error))
    if found is None:
        return f"{path} is damaged or no file of tensors; use another copy of the gates"
    return (
        f"{path} was not read: it is a pickle that names {found[1]}, which could run code; use "
        "gates in safetensors"
    )


def trained_age(source: str | Path) -> Literal["paper", "released"]:
    """Return how the code that trained these gates counts the age of an entry.

    The authors of TRIM-KV and DBTrimKV trained and evaluated the gates that they publish with the
    ages of their released code, which are not the papers'.

    Raises:
        GateError: not found.
    """
    published = str(source) != "random" and _locate(source).suffix in _PICKLES
    return "released" if published else "paper"


def gate_folder(source: str | Path) -> str | Path:
    """Return the folder of a set of gates that is named shortly; all else as it is.

    What exists under the name goes before.
    """
    path = user_path(source)
    if is_file(path) or is_folder(path):
        return source
    return paths.gate_sets().get(str(source), source)


def gate_kind(source: str | Path) -> Literal["retention", "write"]:
    """Return which kind of gates lie at ``source``, as their ``gates.json`` says.

    Raises:
        GateError: not found.
    """
    if str(source) == "random":
        return "retention"
    if _locate(source).suffix == ".pt":
        return "write"
    try:
        return "write" if _info(_locate(source)).get("kind") == "write" else "retention"
    except (OSError, ValueError, AttributeError, RecursionError):
        return "retention"  # the loader says what is wrong with it


def foreign_note(gates: Gates | WriteGates, model: str) -> str | None:
    """Return one line if the gates say that they were trained for another checkpoint, else None.

    They name a fingerprint of its weights; older files name its ``config.json`` alone. Models of
    one shape (an Instruct and a Thinking one) load each other's gates, and the scores would be
    noise. A note, not an error: a checkpoint in another dtype has another fingerprint, too.

    Args:
        model: the checkpoint's folder or hub id.

    Raises:
        OSError: there are no files to compare with.
    """
    theirs = gates.info.get("base_fingerprint")
    ours = None if theirs is None else fingerprint(model)
    if ours is not None:
        same = theirs == ours or theirs == language_fingerprint(model)
        part = "other weights"
    else:
        theirs, part = gates.info.get("base_config_sha256"), "another config.json"
        same = theirs is None or theirs == config_digest(model)
    if same:
        return None
    return (
        f"these gates were trained for a checkpoint with {part} "
        f"({gates.info.get('base_model', 'not named')}); if {model} is another model, their scores "
        "mean nothing for it: train gates for it with `mmkv distill`"
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
        GateError: for gates that are not all finite numbers, and when the files cannot be written.
    """
    sizes: dict[str, object]
    if isinstance(gates, WriteGates):
        sizes = {"kind": gates.kind, "head_dim": spec.head_dim, "d_gate": gates.width}
    elif gates.kind == "tied":
        readout = gates.tensors["readout.weight"]
        sizes = {"tying": tying_of(readout), "d_gate": readout.shape[-1] * spec.num_kv_heads}
    else:
        sizes = {"layout": gates.kind, "d_gate": gates.layers[0].readout.shape[1]}
    # Copies: the readout of rg10 may be one tensor for all layers, which safetensors refuses.
    tensors = {name: tensor.detach().clone() for name, tensor in gates.tensors.items()}
    stored = as_stored(tensors, trunk_dtype)
    require_numbers(stored, "the gates to be saved")
    described = {
        "format": FORMAT,
        "hidden_size": spec.hidden_size,
        "num_layers": spec.entry_layers,
        "num_kv_heads": spec.num_kv_heads,
        **sizes,
        **gates.info,
        **info,
    }
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(stored, folder / _TENSORS)
        (folder / _INFO).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise GateError(
            f"cannot write gates to {folder}: {reason}; free space or name another folder"
        ) from error


def _locate(source: str | Path) -> Path:
    path = user_path(gate_folder(source))
    if is_file(path):
        return path
    if not is_folder(path):
        if str(source)[:1] in f"{os.sep}.~" or str(source).count("/") != 1:
            raise GateError(
                f"no gates at {source}; give a folder, a file, a hub id, 'random', or a name that "
                "`mmkv models` lists"
            )
        try:
            path = Path(
                snapshot_download(
                    str(source),
                    allow_patterns=["gates.*", _PUBLISHED, "*.json"],
                    local_files_only=not hub_reachable(),
                )
            )
        except STOPS:
            raise
        except BaseException as error:  # the hub client has a dozen error types, all meaning this
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
    # Gates hang at layers with entries: these are the layers that a gate file counts.
    sizes = {**vars(spec), "num_layers": spec.entry_layers}
    ours = {name: sizes[name] for name in names}
    if theirs != ours:

        def words(sizes: dict[str, object]) -> str:
            return ", ".join(f"{key} {value}" for key, value in sizes.items())

        raise GateError(
            f"the gates are for a model with {words(theirs)}; this model has {words(ours)}; "
            "use gates trained for it"
        )


def layer_name(name: str) -> str:
    """Return the published name of ``layers.{l}.PART``."""
    _, layer, part = name.split(".", 2)
    return f"model.layers.{layer}.self_attn.retention_gate.{part}"


def published_gates(
    tensors: dict[str, Tensor], spec: DecoderSpec, info: dict[str, object] | None = None
) -> Gates:
    """Build gates from published tensors; the layout follows from the presence of ``linear3``.

    ``rg``: linear1 [512, d] + bias, SiLU, linear2 [H, 512], + bias [H].
    ``rg10``: linear1, SiLU, linear2, SiLU, linear3 [H, 512], + bias [H]; linear3 and the bias
    are one and the same in every layer, which is verified. Gradients flow to ``tensors``.

    Raises:
        GateError: other layouts, other shapes (both named), or a tie that does not hold.
    """
    parts: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items() if isinstance(tensors, dict) else ():
        match = _GATE.search(str(key))
        if match and isinstance(tensor, Tensor):
            parts.setdefault(int(match[1]), {})[match[2]] = tensor.float()
    if not parts:
        raise GateError("the file holds no 'self_attn.retention_gate' tensors; name a gate file")
    if sorted(parts) != list(range(spec.entry_layers)):
        raise GateError(
            f"the gates cover {len(parts)} layers, the model has {spec.entry_layers}; use gates "
            "trained for this model"
        )
    kind = "rg10" if "linear3.weight" in parts[0] else "rg"
    last = "linear3" if kind == "rg10" else "linear2"
    layers = [_layer(index, parts[index], last, spec) for index in range(spec.entry_layers)]
    if kind == "rg10":
        tied = all(
            torch.equal(layer.readout, layers[0].readout)
            and torch.equal(layer.bias, layers[0].bias)
            for layer in layers
        )
        if not tied:
            raise GateError(
                "the rg10 gates differ in linear3 or bias between layers, so the tie that makes "
                "scores comparable does not hold; use the original file"
            )
    return Gates(kind, layers, tensors, {"layout": kind, **(info or {})})


def _layer(index: int, part: dict[str, Tensor], last: str, spec: DecoderSpec) -> LayerGate:
    """Build the gate of one layer from its tensors; ``last`` is the readout. Raises GateError."""
    try:
        readout, bias = part[f"{last}.weight"], _bias(part, last)
        trunk = [(part["linear1.weight"], part["linear1.bias"])]
        if last == "linear3":
            width = part["linear2.weight"].shape[:1]
            second = part.get("linear2.bias", torch.zeros(width))
            trunk.append((part["linear2.weight"], second))
    except KeyError as error:
        raise GateError(
            f"layer {index} of the gates lacks {error.args[0]!r}; layouts rg and rg10 are read"
        ) from error
    matrices = [weight for weight, _ in trunk] + [readout]
    if odd := [weight for weight in matrices if weight.dim() != 2 or not weight.numel()]:
        raise GateError(
            f"layer {index} of the gates has a weight of the shape {list(odd[0].shape)}, which "
            "is no matrix; the file is damaged, use another"
        )
    hidden, heads = trunk[0][0].shape[1], readout.shape[0]
    if (hidden, heads) != (spec.hidden_size, spec.num_kv_heads):
        raise GateError(
            f"the gates are for hidden size {hidden} and {heads} KV heads; this model has "
            f"{spec.hidden_size} and {spec.num_kv_heads}; use gates trained for it"
        )
    for (weight, offset), inner in zip(
        [*trunk, (readout, bias)], [hidden, *(w.shape[0] for w, _ in trunk)], strict=True
    ):
        if weight.shape != (offset.numel(), inner) or offset.dim() != 1:
            raise GateError(
                f"layer {index} of the gates has a weight {list(weight.shape)} between "
                f"{inner} inputs and {offset.numel()} outputs; the file is damaged"
            )
    return LayerGate(trunk, readout, bias)


def _bias(part: dict[str, Tensor], last: str) -> Tensor:
    return part["bias"] if "bias" in part else part[f"{last}.bias"]


def published_write_gates(tensors: dict[str, Tensor], spec: DecoderSpec) -> WriteGates:
    """Build write gates from a checkpoint of WG-KV (arXiv 2512.17452), a ``.pt`` file.

    Its gates are two convolutions of width 1 with a group for each KV head: ``conv1 [H w, 2 D, 1]``
    reads the keys before and after RoPE, each after its norm (``pre_key_norm``, ``post_key_norm``),
    and ``conv2 [H, w, 1]`` its hidden layer.

    Raises:
        GateError: gates that read something else, or of another shape.
    """
    parts: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        if match := _WRITE.search(key):
            parts.setdefault(int(match[1]), {})[match[2]] = tensor.float()
    if sorted(parts) != list(range(spec.entry_layers)):
        raise GateError(
            f"the write gates cover {len(parts)} layers, the model has {spec.entry_layers}; use "
            "gates trained for this model"
        )
    heads, size = spec.num_kv_heads, spec.head_dim
    width = parts[0]["conv2.weight"].shape[1:2].numel() if "conv2.weight" in parts[0] else 0
    wanted = {
        "pre_key_norm.weight": (size,),
        "post_key_norm.weight": (size,),
        "conv1.weight": (heads * width, 2 * size, 1),
        "conv1.bias": (heads * width,),
        "conv2.weight": (heads, width, 1),
        "conv2.bias": (heads,),
    }
    for index, part in sorted(parts.items()):
        found = {name: tuple(tensor.shape) for name, tensor in part.items()}
        if found != wanted:
            odd = next(n for n in [*wanted, *found] if found.get(n) != wanted.get(n))
            raise GateError(
                f"layer {index} of the write gates has {odd!r} of the shape {found.get(odd)}, this "
                f"model needs {wanted.get(odd)}; use gates trained for it that read its keys "
                "before and after rope"
            )
    layers = [parts[index] for index in range(spec.entry_layers)]
    made = {
        "norm.before": torch.stack([part["pre_key_norm.weight"] for part in layers]),
        "norm.after": torch.stack([part["post_key_norm.weight"] for part in layers]),
        "readout.weight": torch.stack([part["conv2.weight"][..., 0] for part in layers]),
        "readout.bias": torch.stack([part["conv2.bias"] for part in layers]),
    }
    for index, part in enumerate(layers):
        name = f"layers.{index}.linear1"
        made[f"{name}.weight"] = part["conv1.weight"].view(heads, width, 2 * size)
        made[f"{name}.bias"] = part["conv1.bias"].view(heads, width)
    return write_gates(made, spec, {"layout": "WG-KV"})
