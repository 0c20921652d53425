"""Ask about a picture three times: with all of the cache, and with a third of it kept in two ways.

Run: python examples/demo.py
Prints a row each: the answer, whether it is right, and the bytes of keys and values that were held.
"""

from dataclasses import replace

import mmkv
from mmkv.resources import asset

QUESTION, TRUTH = "what is at row 2, column 3?", "frog"
BUDGET = "8"  # entries a head; the full cache holds 36
CACHES = {
    "full cache": "full",
    "mmkv (dbtrimkv)": "dbtrimkv",
    "window (streamingllm)": "streamingllm",
}


def main() -> None:
    """Ask each cache, and print a row as soon as it has answered."""
    print(f"\n{QUESTION}  (of assets/scene.png; the answer is {TRUTH})\n")
    print(f"{'cache':<23}{'answer':<16}{'right':<7}keys and values", flush=True)
    config = mmkv.EngineConfig(
        model=mmkv.bundled_model(),
        policy="full",
        budget=mmkv.Budget.parse(BUDGET),
        prefill_chunk=12,
    )
    loaded = mmkv.Engine.from_config(config)
    model = loaded.family, loaded.spec, loaded.decoder.weights  # that all three share
    for name, policy in CACHES.items():
        engine = mmkv.Engine.from_parts(replace(config, policy=policy), *model)
        engine.processor = loaded.processor
        with engine.session() as session:
            said = "".join(session.send(QUESTION, images=[asset("scene.png")]))
            held = session.memory().kv_bytes / 1024
        right = "yes" if said == TRUTH else "no"
        print(f"{name:<23}{said:<16}{right:<7}{held:>4.0f} KiB", flush=True)
    print(
        f"\nBoth small caches keep {BUDGET} of 36 entries a head: mmkv those that learned gates\n"
        "score highest, the window the newest. Go on with .venv/bin/mmkv chat, serve or explain."
    )


if __name__ == "__main__":
    main()
