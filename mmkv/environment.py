"""What ``mmkv env`` prints: versions, devices, optional packages."""

from __future__ import annotations

import platform
from importlib import metadata
from importlib.util import find_spec

from mmkv import __version__
from mmkv.engine.errors import ModelError
from mmkv.resources import BUNDLED_MODEL, asset

_CORE = ("torch", "transformers", "tokenizers", "safetensors", "huggingface_hub", "pillow", "numpy")
_EXTRAS = {"triton": "cuda", "qwen_vl_utils": "qwen", "lmms_eval": "eval", "accelerate": "train"}


def versions() -> dict[str, str | None]:
    """Return the versions of mmkv, Python and the packages that decide what a model computes."""
    return {
        "mmkv": __version__,
        "python": platform.python_version(),
        "torch": _version("torch"),
        "transformers": _version("transformers"),
    }


def describe() -> str:
    """Write a report of one fact per line."""
    lines = [f"mmkv: {__version__}", f"python: {platform.python_version()} ({platform.platform()})"]
    lines += [f"{name}: {_version(name) or 'missing'}" for name in _CORE]
    lines += _devices()
    lines.append(f"decode step on the CPU: {_native()}")
    lines.append(f"weights in 8 or 4 bits on the CPU: {_int8()}")
    lines += _video_readers()
    lines += [
        f"{name}: {'present' if find_spec(name) else f'absent (extra: {extra})'}"
        for name, extra in _EXTRAS.items()
    ]
    lines += [f"bundled model: {_asset(BUNDLED_MODEL)}", f"picture for it: {_asset('scene.png')}"]
    lines += _added()
    return "\n".join(lines)


def _added() -> list[str]:
    from mmkv.engine import policies
    from mmkv.engine.model import families

    own = f"policies: {', '.join(policies.PRESETS)} (mmkv policies says more)"
    return [own, *policies.describe_added(), *families.describe_added()]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _devices() -> list[str]:
    import torch

    found = [f"device: cpu ({torch.get_num_threads()} threads)"]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory = properties.total_memory / 2**30
        found.append(f"device: cuda:{index} ({properties.name}, {memory:.0f} GiB)")
    return found


def _native() -> str:
    from mmkv.engine.backends import cpu as native

    why = native.reason()
    return f"torch ({why})" if why else f"native (level {native.level()})"


def _int8() -> str:
    from mmkv.engine.backends import cpu as native

    form = native.int8_form()
    return f"{form} (--weights int8, int4)" if form else "torch (slow)"


def _video_readers() -> list[str]:
    from mmkv.prompt.video import READERS, REMEDY, import_reader

    states = {}
    for package in READERS:
        if find_spec(package) is None:
            states[package] = "absent"
        else:
            states[package] = "usable" if import_reader(package) is not None else "broken"
    lines = [f"video reader {package}: {state}" for package, state in states.items()]
    if "usable" not in states.values():
        lines.append(f"videos: no reader works; {REMEDY}")
    return lines


def _asset(name: str) -> str:
    try:
        return str(asset(name))
    except ModelError:
        return "not found"
