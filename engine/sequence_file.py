"""Session files: a bounded dialogue memory in one safetensors file."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mmkv.engine.checks import require_type, shown
from mmkv.engine.errors import STOPS, BudgetError, SessionError
from mmkv.engine.paths import is_file
from mmkv.engine.policies import Budget

if TYPE_CHECKING:
    from mmkv.engine.runtime import Runtime
    from mmkv.engine.sequence import CachedSequence

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
    state["read_ids"] = f"{session.read_ids:x}"
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
    except STOPS:
        raise
    except BaseException as error:
        raise SessionError(f"cannot write {path}: {error}; the old file is untouched") from error
    finally:
        Path(temporary).unlink(missing_ok=True)


def checked_extra(extra: dict[str, str] | None) -> dict[str, str]:
    """Return what is to be kept beside a session. Raises TypeError: it is no dict of texts."""
    require_type("extra", {} if extra is None else extra, dict, "a dict of texts")
    for name, text in (extra or {}).items():
        require_type("a key of extra", name, str, "a text")
        require_type(f"extra[{name!r}]", text, str, "a text")
    return extra or {}


@torch.inference_mode()
def load_session(engine: Runtime, path: Path) -> tuple[CachedSequence, dict[str, str]]:
    """Read a session file onto an engine with the same model, gates and policy.

    The whole file is checked before a page is taken (:mod:`mmkv.engine.session_schema`).

    Returns:
        the session, and the ``extra`` strings given when it was saved.

    Raises:
        SessionError: unreadable or foreign file. BudgetError: no room for it. Nothing is held then.
    """
    from mmkv.engine.session_schema import Header, check_state, read_tensors
    from mmkv.engine.strict import Damage, parse

    if path.exists() and not is_file(path):  # reading a pipe may never end
        raise SessionError(f"{path} is no file; name a session file")
    try:
        with path.open("rb"):  # safe_open says that a file is not there, whatever is wrong
            pass
        with safe_open(path, framework="pt") as file:
            metadata: dict[str, str] = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise SessionError(f"{path} is not an mmkv session ({FORMAT}); name another file")
            header: Header = parse(Header, metadata)
            _check_identity(engine, header.identity, path)
            _check_memory(engine, set(file.keys()), path)
            check_state(header.state, engine)
            budget = _budget(engine, *header.state.budget)
            tensors = read_tensors(file, header.state, engine)
        del metadata["digest"]
        if header.digest != _digest(tensors, metadata):
            raise Damage("its checksum does not match its content")
    except FileNotFoundError as error:
        raise SessionError(f"no session file at {path}; check the path") from error
    except (SafetensorError, OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            raise SessionError(
                f"cannot open {path}: {error.strerror}; close some and try again, it is untouched"
            ) from error
        reason = shown(error, 300) or type(error).__name__
        raise SessionError(
            f"cannot read the session {path}: {reason}; it is damaged or not a session file: use a "
            "copy, or begin a new session"
        ) from error
    except (MemoryError, RuntimeError) as error:  # torch's, where it cannot map the file
        raise SessionError(
            f"the session {path} does not fit into memory ({shown(error, 200)}); use a machine "
            "with more, or begin a new session"
        ) from error
    with engine.lock:
        session = engine.session(budget)
        try:
            state = header.state.model_dump() | {"read_ids": int(header.state.read_ids or "0", 16)}
            session.adopt(engine.cache.import_(tensors), state)
            engine.budgets.cut([], engine.slack)  # of a shared one, others take part
        except BaseException:
            session.close()
            raise
    return session, header.extra


def _check_identity(engine: Runtime, identity: dict[str, str | int], path: Path) -> None:
    """Raise SessionError unless the file was made with the same model and settings."""
    # Older files hold what the model computes, with its own weights.
    identity = {"weights": "auto", "kv": "auto", **identity}
    engines = engine.identity()
    same_numbers = {
        "weights": identity.get("model") == engines["model"],  # so bfloat16 holds them exactly
        "kv": engine.dtype == torch.bfloat16,
    }
    for name, ours in engines.items():
        theirs = identity.get(name)
        if {theirs, ours} == {"auto", "bf16"} and same_numbers.get(name):
            continue
        if theirs != ours:
            remedy = "load it with the model and settings it was made with"
            if name in ("kv", "weights"):
                remedy = f"load it with {name}={shown(theirs)} (--{name} {shown(theirs)})"
            raise SessionError(
                f"{path} was saved with {name} {shown(theirs, 300)}, this engine has {ours}; "
                f"{remedy}"
            )


def _check_memory(engine: Runtime, names: set[str], path: Path) -> None:
    """Raise SessionError where the file lacks what the policy keeps of a sequence."""
    for name in engine.cache.memory:
        if f"memory.{name}" not in names:
            raise SessionError(
                f"{path} was saved by an older mmkv, without the {name} that policy "
                f"{engine.policy.name!r} needs; begin a new session"
            )


def _budget(engine: Runtime, kind: Any, value: float) -> Budget:
    """Return the session's budget. Raises ValueError: it cannot be."""
    try:
        return engine.budgets.saved(Budget(kind, value))
    except BudgetError as error:
        raise ValueError(str(error)) from error


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
