"""Session files: a bounded dialogue memory in one safetensors file."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from engine.errors import SessionError
from engine.policies import Budget

if TYPE_CHECKING:
    from engine.runtime import Runtime
    from engine.sequence import CachedSequence

FORMAT = "mmkv-session-1"


def save_session(session: CachedSequence, path: Path, extra: dict[str, str]) -> None:
    """Write a session so that it continues bit-identically; the old file stays until the end.

    Args:
        extra: strings to keep beside it (chat history, for example).

    Raises:
        SessionError: when the file cannot be written; an existing file is left untouched.
    """
    engine = session.engine
    with engine.lock:
        tensors = engine.cache.export(session.seq)
    state = session.state() | {"budget": [session.budget.kind, session.budget.value]}
    metadata = {
        "format": FORMAT,
        "identity": json.dumps(engine.identity()),
        "state": json.dumps(state),
        "extra": json.dumps(extra),
    }
    metadata["digest"] = _digest(tensors, metadata)
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
        os.close(handle)
    except OSError as error:
        raise SessionError(f"cannot write {path}: {error.strerror}; choose another path") from error
    try:
        save_file(tensors, temporary, metadata=metadata)
        os.replace(temporary, path)
    except Exception as error:
        raise SessionError(f"cannot write {path}: {error}; the old file is untouched") from error
    finally:
        Path(temporary).unlink(missing_ok=True)


@torch.inference_mode()
def load_session(engine: Runtime, path: Path) -> tuple[CachedSequence, dict[str, str]]:
    """Read a session file onto an engine with the same model, gates and policy.

    Returns:
        the session, and the ``extra`` strings given when it was saved.

    Raises:
        SessionError: unreadable or foreign file; no page is held then.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            names = file.keys()
            tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in names}
        if metadata.get("format") != FORMAT:
            raise SessionError(f"{path} is not an mmkv session ({FORMAT}); name another file")
        if metadata.pop("digest") != _digest(tensors, metadata):
            raise ValueError("its checksum does not match its content")
        identity = json.loads(metadata["identity"])
        state = json.loads(metadata["state"])
        extra: dict[str, str] = json.loads(metadata["extra"])
    except FileNotFoundError as error:
        raise SessionError(f"no session file at {path}; check the path") from error
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise SessionError(
            f"cannot read the session {path}: {error or type(error).__name__}; it is damaged or "
            "not a session file"
        ) from error
    identity.setdefault("kv", "auto")  # what older files hold
    for name, ours in engine.identity().items():
        if identity.get(name) != ours:
            raise SessionError(
                f"{path} was saved with {name} {identity.get(name)}, this engine has {ours}; load "
                "it with the model and settings it was made with"
            )
    for name in engine.cache.memory:
        if f"memory.{name}" not in tensors:
            raise SessionError(
                f"{path} was saved by an older mmkv, without the {name} that policy "
                f"{engine.policy.name!r} needs; begin a new session"
            )
    kind, value = state["budget"]
    with engine.lock:
        session = engine.session(Budget(kind, value))
        session.adopt(engine.cache.import_(tensors), state)
    return session, extra


def _digest(tensors: dict[str, Tensor], metadata: dict[str, str]) -> str:
    """Return SHA-256 of the content: a flipped bit would otherwise change answers silently."""
    digest = hashlib.sha256()
    for name in sorted(metadata):
        digest.update(f"{name}={metadata[name]}".encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
