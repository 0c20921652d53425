"""Write code and prose of the Python installation as JSONL, for training and tests.

``python -m training.data.texts DIR`` writes ``code.train.jsonl``, ``code.heldout.jsonl`` (modules
of the standard library) and ``prose.train.jsonl``, ``prose.heldout.jsonl`` (the language reference
that ``help()`` shows) for ``training.distill`` and ``benchmarks.quality``. A tenth of the files is
held out, chosen by a hash of their names.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

_SHORTEST = 2000  # characters; less gives eviction nothing to do


def code() -> Iterator[tuple[str, str]]:
    """Name and text of the standard library's modules."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.glob("*.py")) + sorted(root.glob("[a-z]*/*.py")):
        if path.parent.name not in ("test", "idlelib", "pydoc_data", "site-packages"):
            yield str(path.relative_to(root)), path.read_text(encoding="utf-8", errors="replace")


def prose() -> Iterator[tuple[str, str]]:
    """Name and text of the language reference's topics."""
    yield from sorted(topics.items())


def held_out(name: str) -> bool:
    """Return whether a text is kept from training."""
    return hashlib.sha256(name.encode()).digest()[0] < 26


def write(folder: Path) -> dict[str, int]:
    """Write the files; how many texts went into each."""
    folder.mkdir(parents=True, exist_ok=True)
    counts = {}
    for kind, source in (("code", code), ("prose", prose)):
        texts = [(name, text) for name, text in source() if len(text) >= _SHORTEST]
        for split in ("train", "heldout"):
            rows = [text for name, text in texts if held_out(name) == (split == "heldout")]
            path = folder / f"{kind}.{split}.jsonl"
            path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
            counts[path.name] = len(rows)
    return counts


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(prog="python -m training.data.texts", description=__doc__)
    parser.add_argument("folder", type=Path)
    for name, count in write(parser.parse_args().folder).items():
        print(f"{name}: {count} texts")


if __name__ == "__main__":
    main()
