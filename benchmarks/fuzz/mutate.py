"""Change bytes, texts and JSON values at random; make a failing case smaller."""

from __future__ import annotations

import copy
import json
import string
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

_NUMBERS = (0, 1, -1, 2, 7, 16, 255, 2**15, 2**31 - 1, 2**31, 2**32, 2**62, 2**63, 2**64, -(2**63))
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


def text(rng: Random) -> str:
    """Return a text that programs stumble over, or a random one."""
    if rng.random() < 0.7:
        return rng.choice(_TEXTS)
    letters = string.printable + "äß漢字\U0001f600\u0000\ud83d\u200b"
    return "".join(rng.choice(letters) for _ in range(rng.choice((1, 3, 20, 200))))


def number(rng: Random) -> int | float:
    """Return a number at or beyond the limits of common types."""
    return rng.choice((*_NUMBERS, *_FLOATS))


def value(rng: Random, depth: int = 2) -> Any:
    """Return any JSON value."""
    kind = rng.randrange(9 if depth else 7)
    if kind < 3:
        return number(rng)
    if kind < 5:
        return text(rng)
    if kind == 5:
        return None
    if kind == 6:
        return rng.random() < 0.5
    if kind == 7:
        return [value(rng, depth - 1) for _ in range(rng.randrange(4))]
    return {text(rng): value(rng, depth - 1) for _ in range(rng.randrange(4))}


def flip(rng: Random, content: bytes, most: int = 6) -> bytes:
    """Return ``content`` with up to ``most`` changes: bits, bytes, blocks, lengths, or cut off."""
    made = bytearray(content)
    for _ in range(rng.randint(1, most)):
        if not made:
            return bytes(made)
        at = rng.randrange(len(made))
        what = rng.randrange(9)
        if what == 0:
            made[at] ^= 1 << rng.randrange(8)
        elif what == 1:
            made[at] = rng.randrange(256)
        elif what == 2:
            del made[at:]
        elif what == 3:
            del made[at : at + rng.choice((1, 4, 64))]
        elif what == 4:
            made[at:at] = rng.randbytes(rng.choice((1, 4, 64)))
        elif what == 5:
            size = rng.choice((1, 16, 256))
            made[at : at + size] = bytes(len(made[at : at + size]))
        elif what == 6:
            size = rng.choice((4, 32, 512))
            made[at:at] = made[at : at + size]
        else:
            width = rng.choice((1, 2, 4, 8))
            odd = rng.choice(_NUMBERS) % 256**width
            made[at : at + width] = odd.to_bytes(width, rng.choice(("little", "big")))
    return bytes(made)


def places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value inside a JSON value."""
    pairs: Any = ()
    if isinstance(tree, dict):
        pairs = tree.items()
    elif isinstance(tree, list):
        pairs = enumerate(tree)
    for key, inner in pairs:
        yield (*path, key)
        yield from places(inner, (*path, key))


def _at(tree: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def edit(rng: Random, tree: Any, most: int = 3) -> Any:
    """Return a copy of a JSON value with up to ``most`` values replaced, removed or repeated."""
    made = copy.deepcopy(tree)
    for _ in range(rng.randint(1, most)):
        known = list(places(made))
        if not known:
            return value(rng)
        *lead, key = rng.choice(known)
        holder = _at(made, tuple(lead))
        what = rng.randrange(8)
        if what < 4:
            holder[key] = value(rng)
        elif what == 4:
            del holder[key]
        elif what == 5:
            holder[key] = copy.deepcopy(_at(made, rng.choice(known)))
        elif what == 6 and isinstance(holder, dict):
            holder[text(rng)] = holder.pop(key)
        elif isinstance(holder[key], str):
            holder[key] = rng.choice((holder[key] + text(rng), holder[key][::-1], text(rng)))
        elif isinstance(holder, list):
            holder += [copy.deepcopy(holder[key])] * rng.choice((1, 3, 100))
        else:
            holder[key] = [holder[key]]
    return made


def dump(rng: Random, tree: Any) -> bytes:
    """Write a JSON value as a file, now and then with changed bytes."""
    content = json.dumps(tree).encode()
    return flip(rng, content, 2) if rng.random() < 0.2 else content


def shrink(case: dict[str, Any], fails: Callable[[dict[str, Any]], bool], tries: int) -> Any:
    """Return a smaller case that ``fails`` in the same way, after at most ``tries`` runs."""
    best, left = case, tries
    size = 2
    while left > 0 and size <= 64:
        smaller = False
        for path in sorted(places(best), key=len):
            try:
                found = _at(best, path)
            except (KeyError, IndexError, TypeError):
                continue
            for candidate in _shorter(found, size):
                if left <= 0:
                    return best
                left -= 1
                tried = copy.deepcopy(best)
                _at(tried, path[:-1])[path[-1]] = candidate
                if fails(tried):
                    best, smaller = tried, True
                    break
        if not smaller:
            size *= 4
    return best


def _shorter(found: Any, pieces: int) -> Iterator[Any]:
    """Yield texts and lists without one of their ``pieces`` equal pieces, dicts without a key."""
    if isinstance(found, dict):
        for key in found:
            yield {other: inner for other, inner in found.items() if other != key}
    elif isinstance(found, (str, list)) and found:
        step = max(1, len(found) // pieces)
        for start in range(0, len(found), step):
            rest: Any = found[start + step :]
            yield found[:start] + rest
