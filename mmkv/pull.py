"""Fetch a checkpoint or gates into the hub's cache, for ``mmkv pull``. Imports no torch."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

from mmkv.engine import hub
from mmkv.engine.budget import format_bytes
from mmkv.engine.errors import STOPS, InputError, ModelError
from mmkv.engine.model.gguf.file import SUFFIX
from mmkv.resources import refuse_adapter

_WEIGHTS = ".safetensors"
# Published gates; read as tensors alone, never as a pickle that may run code.
_GATES = "trimkv_weights.pth"
_KINDS = (_WEIGHTS, ".json", ".jinja", ".model", "merges.txt", "vocab.txt", _GATES)

_PICKLED = re.compile(r"(?:pytorch|adapter)_model[\w.-]*\.bin")

_AGAIN = "check the network and try again (what has come stays)"


def wanted(files: list[str]) -> list[str]:
    """Return which files of a repository mmkv reads: weights, settings, tokenizer and template.

    Those of other programs are left out: subfolders but ``gates/``, and second copies. Pickled
    weights, of which tensors alone are read, are taken where there are no others.
    """
    others = any(name.endswith((_WEIGHTS, _GATES)) and "/" not in name for name in files)
    return [
        name
        for name in files
        if (name.endswith(_KINDS) or (not others and _PICKLED.fullmatch(name)))
        and ("/" not in name or re.fullmatch(r"gates/[^/]+", name))
        and not name.startswith("consolidated")
    ]


def pull(name: str, say: Callable[[str], None]) -> Path:
    """Fetch what mmkv reads of a hub repository; what is in the cache already is kept.

    Args:
        say: shows a line before the fetching begins.

    Returns:
        The folder in the cache.

    Raises:
        InputError: not a hub id, or HF_HUB_OFFLINE is set.
        ModelError: not there, gated, holds nothing for mmkv, no network, or no space; or a name
            of ours that other commands make.
    """
    refuse_adapter(name)  # a name of ours, which the hub does not have
    from huggingface_hub import HfApi, constants, errors, snapshot_download
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except errors.HFValidationError as error:
        raise InputError(f"{name[:80]!r} is not a hub id; write owner/name") from error
    if constants.is_offline_mode():
        raise InputError(
            "HF_HUB_OFFLINE is set, so nothing is fetched; unset it, or see `mmkv models` for what "
            "is here"
        )
    if not hub.hub_reachable():
        raise ModelError(
            f"{name} was not fetched: {constants.ENDPOINT} cannot be reached; {_AGAIN}"
        )
    try:
        info = HfApi().model_info(name, files_metadata=True)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
        files = wanted(list(sizes))
        if not any(file.endswith((_WEIGHTS, _GATES, ".bin")) for file in files):
            if any(file.endswith(SUFFIX) for file in sizes):
                raise ModelError(
                    f"{name} holds GGUF files; fetch one with `hf download {name} FILE`, and name "
                    "the file where a model is asked for"
                )
            raise ModelError(
                f"{name} has no weights in safetensors or pytorch_model.bin, and no gates; name a "
                "repository that has some"
            )
        total = sum(sizes[file] for file in files)
        say(f"{name}: {len(files)} files, {format_bytes(total)}")
        _require_space(Path(constants.HF_HUB_CACHE), total, name)
        return Path(snapshot_download(name, allow_patterns=files))
    except errors.GatedRepoError as error:
        raise ModelError(
            f"{name} is gated: accept its terms at {constants.ENDPOINT}/{name}, then log in with "
            "`hf auth login`"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(
            f"the hub has no {name!r}, or it is private; check the name, or log in with "
            "`hf auth login`"
        ) from error
    except (ModelError, *STOPS):
        raise
    except BaseException as error:  # of the disk, or of the client's network library
        raise ModelError(_failed(name, error)) from error


def _require_space(cache: Path, total: int, name: str) -> None:
    free = _free_bytes(cache)
    if total > free:
        raise ModelError(
            f"{name} takes {format_bytes(total)} and there are {format_bytes(free)} for {cache}; "
            "make room, or set HF_HOME to a folder on another disk"
        )


def _free_bytes(folder: Path) -> int:
    place = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    return shutil.disk_usage(place).free


def _failed(name: str, error: BaseException) -> str:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
    return f"{name} was not fetched: {reason}; {_AGAIN}"
