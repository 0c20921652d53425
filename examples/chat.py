"""A conversation about a picture in bounded memory: stream, copy, save and go on.

Run: python examples/chat.py [MODEL [PICTURE]]    (without arguments: the bundled model)
"""

import sys
import tempfile
from pathlib import Path

import mmkv
from mmkv.resources import asset


def ask(session: mmkv.Session, question: str, images: tuple[str, ...] = ()) -> None:
    """Ask, show the reply while it is written, then what the session holds."""
    print(f"> {question}")
    for piece in session.send(question, images=images):
        print(piece, end="", flush=True)
    memory = session.memory()
    print(
        f"\n  [{memory.tokens_seen} tokens seen, {memory.entries} entries kept, "
        f"{memory.evicted} evicted, {memory.kv_bytes / 1024:.0f} KiB of keys and values]"
    )


def main() -> None:
    """Talk about one picture."""
    model = sys.argv[1] if len(sys.argv) > 1 else mmkv.bundled_model()
    picture = sys.argv[2] if len(sys.argv) > 2 else str(asset("scene.png"))
    # At most 24 entries for each layer and KV head, whatever the conversation's length.
    engine = mmkv.Engine.from_pretrained(model, budget=24)
    print(f"policy {engine.policy.name}, {engine.budget.describe()}, {engine.decode_path}")

    with engine.session() as session, tempfile.TemporaryDirectory() as folder:
        ask(session, "what is at row 2, column 3?", images=(picture,))

        print("\nA copy goes its own way, under half the budget:")
        with session.fork() as copy:
            copy.set_budget(12)
            ask(copy, "how many objects are there?")

        print("\nSaved to a file and loaded again, the conversation goes on:")
        path = Path(folder) / "talk.mmkv"
        session.save(path)
        with mmkv.Session.load(engine, path) as loaded:
            ask(loaded, "what is at row 1, column 1?")
            print(f"  [{path.stat().st_size / 1024:.0f} KiB on disk]")


if __name__ == "__main__":
    main()
