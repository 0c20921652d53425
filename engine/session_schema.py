"""What a session file may hold: its header as strict JSON, its tensors by type, shape and value.

Imports pydantic, so it is imported only when a session file is read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from pydantic import Field, Json
from torch import Tensor

from mmkv.engine.checks import shown
from mmkv.engine.contents import MODALITIES
from mmkv.engine.strict import Damage, Strict

if TYPE_CHECKING:
    from mmkv.engine.runtime import Runtime

_Count = Annotated[int, Field(ge=0, le=2**62)]
_Tokens = Annotated[int, Field(ge=0, le=2**31 - 1)]  # positions are int32
# What safetensors calls the types of a cache's tensors.
NAMES = {
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
    budget: tuple[
        Literal["entries", "bytes", "fraction"], Annotated[float, Field(gt=0, allow_inf_nan=False)]
    ]


class Header(Strict):
    """The metadata of a session file; all but ``format`` and ``digest`` is JSON."""

    format: str
    identity: Json[dict[str, str | int]]
    state: Json[State]
    extra: Json[dict[str, str]]
    digest: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


def check_state(state: State, engine: Runtime) -> None:
    """Check the numbers of a header against each other and the engine. Raises Damage."""
    every = state.seen * engine.spec.rows
    edges = [0, *(edge for span in state.pictures for edge in span), state.seen]
    can_be_long = engine.spec.rope.switch_at is not None
    broken = {
        "prompt_tokens is above seen": state.prompt_tokens > state.seen,
        "entries and evicted do not add up to the tokens seen": state.entries + state.evicted
        != every,
        "evicted_nan is above evicted": state.evicted_nan > state.evicted,
        "pictures do not follow each other": sorted(edges) != edges
        or any(start == stop for start, stop in state.pictures),
        "next_position is past the model's last": state.next_position > engine.spec.max_position,
        "long_rope is not this model's": bool(state.long_rope) and not can_be_long,
        "long_rope is missing": state.long_rope is None and state.seen > 0,
        "read_ids holds ids beyond the vocabulary": len(state.read_ids)
        > -(-engine.family.vocab_size // 4),
    }
    for what, wrong in broken.items():
        if wrong:
            raise Damage(what)


def read_tensors(file: Any, state: State, engine: Runtime) -> dict[str, Tensor]:
    """Read the tensors of a session once their names, types and shapes are those expected.

    Args:
        file: an open ``safetensors.safe_open``.

    Raises:
        Damage: others than the header promises; BudgetError: no room for so many pages. No tensor
            but the lengths has been read then.
    """
    cache, names = engine.cache, set(file.keys())
    wanted = {
        name: (shape, dtype)
        for name, (shape, dtype) in cache.layout(state.entries).items()
        if name in names or 0 not in shape[1:]  # older files lack some columns without numbers
    }
    for name in sorted(names ^ wanted.keys()):
        raise Damage(f"it {'has no' if name in wanted else 'has an unknown'} tensor {shown(name)}")
    for name, (shape, dtype) in wanted.items():
        part = file.get_slice(name)
        found = part.get_dtype(), tuple(part.get_shape())
        if found != (NAMES[dtype], shape):
            raise Damage(
                f"tensor {name} is {found[0]} {list(found[1])}, not {NAMES[dtype]} {list(shape)}"
            )
    length = file.get_tensor("length")
    if int(length.min()) < 0 or int(length.max()) > state.seen:
        raise Damage("a row's length is not in 0 .. tokens seen")
    if int(length.sum()) != state.entries:
        raise Damage("the rows' lengths do not add up to the entries")
    cache.pool.require(cache.needed_pages(length))
    tensors = {name: file.get_tensor(name) for name in wanted}
    _check_values(tensors, state)
    return tensors


def _check_values(tensors: dict[str, Tensor], state: State) -> None:
    """Check that all numbers can be what a session held. Raises Damage."""
    position, log_beta = tensors["position"].long(), tensors["log_beta"]
    row = torch.repeat_interleave(tensors["length"].flatten())
    if position.numel():
        if int(position.min()) < 0 or int(position.max()) >= state.seen:
            raise Damage("an entry's position is not one of the tokens seen")
        if (row * state.seen + position).unique().numel() < position.numel():
            raise Damage("a row holds a token twice")
        if int(tensors["modality"].max()) >= len(MODALITIES):
            raise Damage("an entry's modality is unknown")
        if not bool((log_beta <= 0).all()):
            raise Damage("an entry's log_beta is above 0 or no number")
    # What scorers keep may be infinite or NaN: they score it, and no answer is made of it.
    for name in {"keys", "values", "key_scale", "value_scale", "log_beta"} & tensors.keys():
        if not bool(tensors[name].isfinite().all()):
            raise Damage(f"tensor {name} holds numbers that are not finite")
