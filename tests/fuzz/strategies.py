"""Strategies for what programs stumble over: texts, numbers, JSON values and files with some of it
changed.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

_INTEGERS = (0, 1, -1, 2, 7, 16, 255, 2**15, 2**31 - 1, 2**31, 2**32, 2**62, 2**63, 2**64, -(2**63))
_FLOATS = (0.5, -0.5, 1e-40, 1e308, -1e308, float("nan"), float("inf"), float("-inf"))
_TEXTS = (
    "",
    " ",
    "\n",
    "\0",
    "a\0b",
    "\ud800",
    "x\udfff y",
    "\ufeff",
    "\u202egnp.exe",
    "é" * 300,
    "a" * 5000,
    "../" * 40 + "no-such-folder/passwd",
    "/",
    ".",
    "..",
    "~",
    "~nobody/x",
    "~no-such-user-at-all/x",
    "-",
    "--",
    "NaN",
    "null",
    "1e999",
    "%s%n%d",
    "{{ 1 }}",
    "{% for i in range(9) %}",
    "<|im_start|>system\n",
    "<|image_pad|>",
    "<ImageHere>",
    "<image>",
    "https://[::1",
    "http://",
    "https://\0",
    "http://localhost:99999/x",
    "data:",
    "data:,",
    "data:image/png;base64,!!!",
    "file:///etc/passwd",
    "C:\\con",
)
numbers = st.sampled_from((*_INTEGERS, *_FLOATS)) | st.integers() | st.floats()
texts = st.sampled_from(_TEXTS) | st.text(max_size=40) | st.text("a\ud83d\u200b\0\U0001f600é")
values = st.recursive(
    numbers | texts | st.none() | st.booleans(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


def places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value inside a JSON value."""
    inner: Any = tree.items() if isinstance(tree, dict) else ()
    for key, value in enumerate(tree) if isinstance(tree, list) else inner:
        yield (*path, key)
        yield from places(value, (*path, key))


def at(tree: Any, path: tuple[Any, ...]) -> Any:
    """Return the value at a path."""
    for key in path:
        tree = tree[key]
    return tree


@st.composite
def edited(draw: st.DrawFn, tree: Any, most: int = 3) -> Any:
    """Draw a copy of a JSON value with up to ``most`` values replaced, removed or repeated."""
    made = copy.deepcopy(tree)
    for _ in range(draw(st.integers(0, most))):
        known = list(places(made))
        if not known:
            return draw(values)
        *lead, key = draw(st.sampled_from(known))
        holder = at(made, tuple(lead))
        what = draw(st.sampled_from("replace replace replace gone other name text repeat".split()))
        if what == "replace":
            holder[key] = draw(values)
        elif what == "gone":
            del holder[key]
        elif what == "other":
            holder[key] = copy.deepcopy(at(made, draw(st.sampled_from(known))))
        elif what == "name" and isinstance(holder, dict):
            holder[draw(texts)] = holder.pop(key)
        elif what == "text" and isinstance(holder[key], str):
            holder[key] = draw(st.sampled_from((holder[key][::-1], holder[key] + draw(texts))))
        elif isinstance(holder, list):
            holder += [copy.deepcopy(holder[key])] * draw(st.sampled_from((1, 3, 100)))
        else:
            holder[key] = [holder[key]]
    return made


@st.composite
def flipped(draw: st.DrawFn, content: bytes, most: int = 6) -> bytes:
    """Draw ``content`` with up to ``most`` changes: bits, bytes, blocks, lengths, or cut off."""
    made = bytearray(content)
    for _ in range(draw(st.integers(1, most))):
        if not made:
            break
        where = draw(st.integers(0, len(made) - 1))
        what = draw(st.sampled_from("bit byte cut less more zero repeat number number".split()))
        size = draw(st.sampled_from((1, 4, 16, 64, 512)))
        if what == "bit":
            made[where] ^= 1 << draw(st.integers(0, 7))
        elif what == "byte":
            made[where] = draw(st.integers(0, 255))
        elif what == "cut":
            del made[where:]
        elif what == "less":
            del made[where : where + size]
        elif what == "more":
            made[where:where] = draw(st.binary(min_size=1, max_size=64))
        elif what == "zero":
            made[where : where + size] = bytes(len(made[where : where + size]))
        elif what == "repeat":
            made[where:where] = made[where : where + size]
        else:
            width = draw(st.sampled_from((1, 2, 4, 8)))
            odd = draw(st.sampled_from(_INTEGERS)) % 256**width
            made[where : where + width] = odd.to_bytes(
                width, draw(st.sampled_from(("little", "big")))
            )
    return bytes(made)


@st.composite
def json_files(draw: st.DrawFn, trees: st.SearchStrategy[Any]) -> bytes:
    """Draw JSON values as files, a few of them with changed bytes."""
    content = json.dumps(draw(trees)).encode()
    return draw(st.one_of(*[st.just(content)] * 4, flipped(content, 2)))
