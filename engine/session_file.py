"""Session files: a bounded dialogue memory in one safetensors file.

The whole file is checked before a page is taken: its header as strict JSON, its tensors by type,
shape and value. Imports pydantic, so it is imported only when a session file is read or written.
"""

from __future__ import annotations

import errno
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from pydantic import Field, Json
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mmkv.engine.compaction import RowShifts, Segments, runs_of
from mmkv.engine.contents import MODALITIES
from mmkv.engine.errors import STOPS, BudgetError, SessionError, require_type, shown
from mmkv.engine.paths import open_regular, whole_file
from mmkv.engine.policies import Budget
from mmkv.engine.risk import BINS, RiskMeter
from mmkv.engine.strict import InvalidFile, Strict

if TYPE_CHECKING:
    from mmkv.engine.runtime import Runtime
    from mmkv.engine.sequence import CachedSequence


FORMAT = "mmkv-session-1"
# What :class:`mmkv.engine.risk.RiskMeter` has added up; older files have none, and no risk then.
_RISK = "risk"
# Of a session that has passed its context, :class:`mmkv.engine.compaction.RowShifts`.
_SHIFTS = {
    "shifts.start": torch.int64,
    "shifts.token": torch.int32,
    "shifts.shift": torch.int32,
    "shifts.moves": torch.uint8,
}


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
        if session.meter is not None and session.meter.tokens == session.seen:
            tensors[_RISK] = session.meter.export()
    state = session.state() | {"budget": session.budget.as_list()}
    shifts = state.pop("shifts")
    if shifts is not None:
        tensors |= dict(zip(_SHIFTS, map(torch.from_numpy, shifts.parts), strict=True))
        state["newest_shift"] = shifts.newest
    del state["meter"]
    state["read_ids"] = f"{session.read_ids:x}"
    metadata = {
        "format": FORMAT,
        "identity": json.dumps(engine.identity()),
        "state": json.dumps(state),
        "extra": json.dumps(extra),
    }
    metadata["digest"] = _digest(tensors, metadata)
    try:
        with whole_file(path, private=True) as draft:
            save_file(tensors, draft, metadata=metadata)
    except STOPS:
        raise
    except BaseException as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise SessionError(
            f"cannot write {path}: {why}; choose another path, an older file is untouched"
        ) from error


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

    The whole file is checked before a page is taken (:mod:`mmkv.engine.session_file`).

    Returns:
        the session, and the ``extra`` strings given when it was saved.

    Raises:
        SessionError: unreadable or foreign file. BudgetError: no room for it. Nothing is held then.
    """
    from mmkv.engine.strict import InvalidFile, parse

    with _explaining(path):
        open_regular(path).close()  # safe_open says that a file is not there, whatever is wrong
        # A file that is mapped and then cut short would end the process.
        with safe_open(path, framework="pt", backend="pread") as file:
            metadata: dict[str, str] = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise SessionError(f"{path} is not an mmkv session ({FORMAT}); name another file")
            header: Header = parse(Header, metadata)
            _check_identity(engine, header.identity, path)
            _check_memory(engine, set(file.keys()), path)
            check_state(header.state, engine)
            budget = _budget(engine, *header.state.budget)
            tensors = read_tensors(file, header.state, engine)
            shifts = _shifts(tensors, header.state, engine)
        del metadata["digest"]
        if header.digest != _digest(tensors, metadata):
            raise InvalidFile("its checksum does not match its content")
    with engine.lock:
        session = engine.session(budget)
        try:
            state = header.state.model_dump() | {"read_ids": int(header.state.read_ids or "0", 16)}
            if state["runs"] is None and state["next_position"] == state["seen"]:
                state["runs"] = [(0, 0, 0)] if state["seen"] else []  # all text, in older files
            state |= {"meter": None, "shifts": shifts}
            if _RISK in tensors:
                read = tensors[_RISK], state["seen"], engine.device
                state["meter"] = RiskMeter.load(*read)
            session.adopt(engine.cache.import_(tensors), state)
            if session.meter is None:
                session.recount_meter()
            engine.budgets.cut([], engine.interval)  # of a shared one, others take part
        except BaseException:
            session.close()
            raise
    return session, header.extra


@contextmanager
def _explaining(path: Path) -> Iterator[None]:
    """Raise a SessionError of one line for whatever reading the file raises."""
    try:
        yield
    except FileNotFoundError as error:
        raise SessionError(f"no session file at {path}; check the path") from error
    except (SafetensorError, OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            raise SessionError(
                f"cannot open {path}: {error.strerror}; close some and try again, it is untouched"
            ) from error
        told = error.strerror if isinstance(error, OSError) else None
        reason = told or shown(error, 300) or type(error).__name__
        raise SessionError(
            f"cannot read the session {path}: {reason}; it is damaged or not a session file: use a "
            "copy, or begin a new session"
        ) from error
    except (MemoryError, RuntimeError) as error:  # torch's, where it cannot map the file
        raise SessionError(
            f"the session {path} does not fit into memory ({shown(error, 200)}); use a machine "
            "with more, or begin a new session"
        ) from error


def _check_identity(engine: Runtime, identity: dict[str, str | int], path: Path) -> None:
    """Raise SessionError unless the file was made with the same model and settings."""
    # Older files hold what the model computes, with its own weights.
    identity = {"weights": "auto", "kv": "auto", **identity}
    engines = engine.identity()
    for name, ours in engines.items():
        theirs = identity.get(name)
        same_numbers = name == "kv" and engine.dtype == torch.bfloat16
        if {theirs, ours} == {"auto", "bf16"} and same_numbers:
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


def _budget(engine: Runtime, *saved: Any) -> Budget:
    """Return the session's budget. Raises ValueError: it cannot be."""
    try:
        return engine.budgets.saved(Budget.of_list(*saved))
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


_Count = Annotated[int, Field(ge=0, le=2**62)]
_Tokens = Annotated[int, Field(ge=0, le=2**31 - 1)]  # positions are int32
_Unit = Literal["entries", "bytes", "fraction"]
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
SavedBudget = (  # as Budget.as_list has it
    tuple[_Unit, _Positive]
    | tuple[_Unit, _Positive, _Positive, Literal["entries", "bytes"], _Positive]
)
_NUMBERS = ("keys", "values", "key_scale", "value_scale", "log_beta")
# What safetensors calls the types of a cache's tensors.
NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
}


class State(Strict):
    """:meth:`mmkv.engine.sequence.CachedSequence.state`, and the budget."""

    seen: _Tokens
    next_position: _Tokens
    entries: _Count
    evicted: _Count
    evicted_nan: _Count
    long_rope: bool | None
    prompt_tokens: _Tokens = 0  # older files have none
    # In hexadecimal digits; older files have none, and penalties count what comes after them.
    read_ids: Annotated[str, Field(pattern="^[0-9a-f]*$")] = ""
    pictures: tuple[tuple[_Tokens, _Tokens], ...] = ()  # older files have none
    runs: tuple[tuple[_Tokens, _Tokens, _Tokens], ...] | None = None  # older files have none
    newest_shift: _Tokens | None = None  # None: nothing has moved, or an older mmkv saved it
    compactions: _Count = 0
    capped: _Count = 0
    dial: tuple[_Count, _Count, _Tokens, bool] | None = None  # of a budget with a risk
    budget: SavedBudget


class Header(Strict):
    """The metadata of a session file; all but ``format`` and ``digest`` is JSON."""

    format: str
    identity: Json[dict[str, str | int]]
    state: Json[State]
    extra: Json[dict[str, str]]
    digest: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


def check_state(state: State, engine: Runtime) -> None:
    """Check the numbers of a header against each other and the engine. Raises InvalidFile."""
    every = state.seen * engine.spec.rows
    edges = [0, *(edge for span in state.pictures for edge in span), state.seen]
    can_be_long = engine.spec.rope.switch_at is not None
    broken = {
        "prompt_tokens is above seen": state.prompt_tokens > state.seen,
        "entries and evicted do not add up to the tokens seen": state.entries + state.evicted
        != every,
        "evicted_nan is above evicted": state.evicted_nan > state.evicted,
        "capped is above evicted": state.capped > state.evicted,
        "pictures do not follow each other": sorted(edges) != edges
        or any(start == stop for start, stop in state.pictures),
        "runs do not follow each other": not _in_order(state),
        "next_position is past the model's last": state.next_position > engine.spec.max_position,
        "long_rope is not this model's": bool(state.long_rope) and not can_be_long,
        "long_rope is missing": state.long_rope is None and state.seen > 0,
        "read_ids holds ids beyond the vocabulary": len(state.read_ids)
        > -(-engine.family.vocab_size // 4),
    }
    for what, wrong in broken.items():
        if wrong:
            raise InvalidFile(what)


def _in_order(state: State) -> bool:
    """Whether runs begin with the first token that is held, and neither turns back."""
    runs = state.runs or ()
    tokens, positions = ([run[i] for run in runs] for i in (0, 1))
    ordered = all(a < b for a, b in pairwise(tokens)) and positions == sorted(positions)
    last = state.next_position + (state.newest_shift or 0)
    ends = all(run[1] + run[2] <= last for run in runs)
    return ordered and ends and all(token <= state.seen for token in tokens)


def read_tensors(file: Any, state: State, engine: Runtime) -> dict[str, Tensor]:
    """Read the tensors of a session once their names, types and shapes are those expected.

    Args:
        file: an open ``safetensors.safe_open``.

    Raises:
        InvalidFile: others than the header promises; BudgetError: no room for so many pages. No
            tensor but the lengths has been read then.
    """
    cache, names = engine.cache, set(file.keys())
    wanted = {
        name: (shape, dtype)
        for name, (shape, dtype) in cache.layout(state.entries).items()
        if name in names or 0 not in shape[1:]  # older files lack some columns without numbers
    }
    if _RISK in names and engine.policy.scoring.needs.gates == "retention":
        wanted[_RISK] = ((len(MODALITIES), BINS), torch.float64)
    if state.newest_shift is not None:
        if missing := sorted(_SHIFTS.keys() - names):
            raise InvalidFile(f"it has no tensor {missing[0]}")
        parts = file.get_slice("shifts.token").get_shape()[:1]
        sizes = (cache.rows + 1,), *[tuple(parts)] * 3
        wanted |= dict(zip(_SHIFTS, zip(sizes, _SHIFTS.values(), strict=True), strict=True))
    for name in sorted(names ^ wanted.keys()):
        raise InvalidFile(
            f"it {'has no' if name in wanted else 'has an unknown'} tensor {shown(name)}"
        )
    for name, (shape, dtype) in wanted.items():
        part = file.get_slice(name)
        found = part.get_dtype(), tuple(part.get_shape())
        if found != (NAMES[dtype], shape):
            raise InvalidFile(
                f"tensor {name} is {found[0]} {list(found[1])}, not {NAMES[dtype]} {list(shape)}"
            )
    length = file.get_tensor("length")
    if int(length.min()) < 0 or int(length.max()) > state.seen:
        raise InvalidFile("a row's length is not in 0 .. tokens seen")
    if int(length.sum()) != state.entries:
        raise InvalidFile("the rows' lengths do not add up to the entries")
    cache.pool.require(cache.needed_pages(length))
    tensors = {name: file.get_tensor(name) for name in wanted}
    _check_values(tensors, state)
    return tensors


def _check_values(tensors: dict[str, Tensor], state: State) -> None:
    """Check that all numbers can be what a session held. Raises InvalidFile."""
    position, log_beta = tensors["position"].long(), tensors["log_beta"]
    row = torch.repeat_interleave(tensors["length"].flatten())
    if position.numel():
        if int(position.min()) < 0 or int(position.max()) >= state.seen:
            raise InvalidFile("an entry's position is not one of the tokens seen")
        if (row * state.seen + position).unique().numel() < position.numel():
            raise InvalidFile("a row holds a token twice")
        if int(tensors["modality"].max()) >= len(MODALITIES):
            raise InvalidFile("an entry's modality is unknown")
        if not bool((log_beta <= 0).all()):
            raise InvalidFile("an entry's log_beta is above 0 or no number")
    if _RISK in tensors and not bool(((tensors[_RISK] >= 0) & tensors[_RISK].isfinite()).all()):
        raise InvalidFile("its risk is below 0 or no finite number")
    # What scorers keep may be infinite or NaN: they score it, and no answer is made of it.
    states = {name for name in tensors if name.startswith("state.")}
    for name in sorted(states) + [name for name in _NUMBERS if name in tensors]:
        if not bool(tensors[name].isfinite().all()):
            raise InvalidFile(f"tensor {name} holds numbers that are not finite")


def _shifts(tensors: dict[str, Tensor], state: State, engine: Runtime) -> RowShifts | None:
    """Return what rows have moved, from a file's tensors. Raises InvalidFile: they cannot have."""
    if state.newest_shift is None:
        return None
    start, token, shift, moves = (tensors[name] for name in _SHIFTS)
    count, rows = (start[1:] - start[:-1]), engine.cache.rows
    if int(start[0]) or int(count.min()) < 1 or int(start[-1]) != token.numel():
        raise InvalidFile("the parts of its rows do not follow each other")
    row = torch.arange(rows).repeat_interleave(count)
    ordered = bool(((row << 32) + token.long()).diff().gt(0).all())
    if not ordered or bool(token[start[:-1]].any()) or int(token.max()) > state.seen:
        raise InvalidFile("the parts of a row do not begin with its first token, in order")
    parts = start.numpy(), token.numpy(), shift.numpy(), moves.numpy()
    made = RowShifts(*parts, state.newest_shift)
    row = torch.repeat_interleave(tensors["length"].flatten())
    live = row.numpy(), tensors["position"].long().numpy()
    runs, stands = runs_of(state.runs or ()), (rows, state.seen, state.next_position)
    if runs and not Segments(*live, runs, made, *stands).fits:
        raise InvalidFile("an entry has moved to no position of the model")
    return made
