"""Every preset of the registry, on three families, with prompts read whole and in chunks.

Two turns with pictures, in a batch with another session, over a session file and a fork; the
retained sets and logits are those of the preset's reference after every chunk and step.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mmkv.engine.policies import PRESETS, make_policy
from mmkv.engine.runtime import Runtime
from mmkv.engine.sequence import CachedSequence
from tests.support.dialogues import engine_of, folder_of, oracle_of, prefill_both, prompt
from tests.support.oracle import Oracle
from tests.support.policies import KINDS, OTHERS
from tests.support.sessions import text_ids
from tests.support.tiers import slow_but

TOLERANCE = 1e-4
FAMILIES = {"qwen3_vl": "vl3", "llava": "llava3", "text": "text3"}
CHUNKS = {"whole": 512, "chunked": 7}
# Small dialogues need small windows; parameters that a preset does not have are left out.
SMALL = {
    "window": 5,
    "free": 3,
    "lag": 3,
    "sinks": 2,
    "segment": 4,
    "r": 2,
    "e": 1,
    "t": 0,
    "layer": 1,
}
SMALL |= {"observed": 3, "write_gates": "random"}

CELLS = [(name, family, chunk) for name in PRESETS for family in FAMILIES for chunk in CHUNKS]
QUICK = [(name, "qwen3_vl", "chunked") for name in KINDS + OTHERS]


def text_of(name: str) -> str:
    """The preset with windows for a small dialogue."""
    known = PRESETS[name].parameters
    return f"{name}[{','.join(f'{key}={SMALL[key]}' for key in SMALL if key in known)}]"


@pytest.mark.parametrize(
    ("name", "family", "chunk"), slow_but(QUICK, CELLS, "the rest of the matrix")
)
def test_preset_keeps_what_its_reference_keeps(
    name: str,
    family: str,
    chunk: str,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    text, model = text_of(name), FAMILIES[family]
    folder, size = folder_of(model), CHUNKS[chunk]
    budget = 3.5 if make_policy(text).keeps_prompt else 9.4
    engine = engine_of(folder, text, budget, prefill_chunk=size, page_size=8)
    oracle = oracle_of(engine, folder, text, budget, prefill_chunk=size)
    session, company = engine.session(), engine.session()
    company.prefill(prompt(model, 11, seed=7))
    worst, calls = 0.0, 0

    def compare(ours: torch.Tensor, theirs: torch.Tensor) -> None:
        nonlocal worst, calls
        error = float((ours - theirs).abs().max() / theirs.abs().max())
        assert error <= TOLERANCE, f"logits differ by {error:.2e} at token {oracle.seen}"
        oracle.follow(session.retained())
        assert session.memory().entries == int(oracle.keep.sum())
        worst, calls = max(worst, error), calls + 1

    turns = [(5, ("image", 24, 32), 4), (2, ("image", 16, 24), 3)]
    for number, turn in enumerate(turns):
        compare(*prefill_both(session, oracle, prompt(model, *turn, seed=number)))
        for token in text_ids(6, number).tolist():
            both = engine.decode([company, session], [token, token])
            compare(both[1], oracle.decode(token))
        if number == 0:
            session = saved_and_forked(engine, session, tmp_path)
            oracle.follow(session.retained())
            engine.backends.cpu.switch_off()  # the second turn decodes and evicts in torch
    assert_evicted(name, family, session, oracle)
    engine.cache.check()
    oracle.close()
    found = {"evictions": oracle.evictions, "swaps": oracle.swaps, "worst": worst}
    case = f"{name}, {family}, {chunk}"
    record_property("oracle", {"case": case, "calls": calls, **found})


def saved_and_forked(engine: Runtime, session: CachedSequence, folder: Path) -> CachedSequence:
    """A fork of the session as a file brings it back; both before it are closed."""
    session.save(folder / "session")
    session.close()
    loaded, _ = engine.load_session(folder / "session")
    fork = loaded.fork()
    loaded.close()
    return fork


def assert_evicted(name: str, family: str, session: CachedSequence, oracle: Oracle) -> None:
    """A cell in which nothing goes would prove little."""
    policy, memory = session.engine.policy, session.memory()
    rows = session.engine.spec.rows
    assert memory.evicted == session.seen * rows - memory.entries
    if name == "full" or (policy.pruner is not None and family == "text"):
        assert memory.evicted == 0
        return
    assert memory.evicted > 0
    assert oracle.evictions > 0 or not policy.evicts
