"""Runtime against oracle: retained sets and logits after every call, for every preset."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from mmkv.engine.model.gates import make_random_gates, save_gates
from mmkv.engine.policies import PRESETS, Budget, make_policy
from mmkv.engine.runtime import Runtime
from mmkv.engine.sequence import CachedSequence
from tests.support.dialogues import engine_of, folder_of, oracle_of, prefill_both, prompt
from tests.support.oracle import Oracle
from tests.support.policies import GATED, KINDS, MERGERS, OTHERS
from tests.support.sessions import text_ids
from tests.support.tiers import long_but, one_in, slow_but

TOLERANCE = 1e-4
RISK = 0.01  # relative: what the bins of a meter may be wrong by
# A step of a dialogue: ("turn", texts, pictures), ("decode", tokens) or ("budget", M).
Step = tuple[object, ...]

LATE: list[Step] = [  # pictures arrive in later turns, of different sizes
    ("turn", 9, ("image", 16, 24), 5),
    ("decode", 4),
    ("turn", 4, ("image", 32, 16), 3, ("image", 16, 48), 6),
    ("decode", 9),
    ("turn", 3),
    ("decode", 2),
]
VIDEO: list[Step] = [  # a video, then a picture and a video in one turn
    ("turn", 5, ("video", 6, 16, 16), 4),
    ("decode", 4),
    ("turn", 4, ("image", 24, 16), 3, ("video", 4, 8, 16), 6),
    ("decode", 6),
]
LONG: list[Step] = [("turn", 70), ("decode", 10)]
SHIFT: list[Step] = [  # the budget moves both ways, between turns and while decoding
    ("turn", 20, ("image", 16, 16), 6),
    ("decode", 5),
    ("budget", 6),
    ("decode", 5),
    ("budget", 17.4),
    ("decode", 12),
    ("turn", 2, ("image", 24, 16), 2),
    ("budget", 9),
    ("turn", 12),
    ("decode", 9),
]


@dataclass(frozen=True)
class Case:
    """One dialogue under one setting."""

    model: str
    policy: str
    lookahead: float
    evict_every: int
    chunk: int
    script: str
    budget: float = 12
    page_size: int = 16

    @property
    def name(self) -> str:
        """For pytest -k."""
        return (
            f"{self.model}-{self.policy}-n{self.lookahead:g}-s{self.evict_every}-c{self.chunk}"
            f"-{self.script}-M{self.budget:g}-P{self.page_size}"
        )


SCRIPTS = {"late": LATE, "video": VIDEO, "long": LONG, "shift": SHIFT}

# Learned retention with every lookahead, both evict_every, chunks below and above the prompt, all
# scripts and all group sizes. The matrix below has every preset, and test_presets_oracle draws its
# parameters.
CASES = [
    Case("vl4", "dbtrimkv", 1, 8, 7, "shift"),
    Case("vl3", "dbtrimkv", 2, 1, 16, "shift", page_size=8),
    Case("text3", "dbtrimkv", 5, 1, 7, "long", budget=3.5),
    Case("vl1", "dbtrimkv", 5, 1, 2048, "shift"),
    Case("vl3", "dbtrimkv", math.inf, 8, 2048, "late", budget=20),
    Case("text1", "dbtrimkv", math.inf, 1, 7, "long"),
    Case("vl3", "dbtrimkv", 2, 1, 9, "video"),
    Case("text4", "trimkv", 2, 8, 2048, "long", page_size=8),
    Case("vl3", "trimkv:age=released", 2, 1, 7, "late"),
    Case("vl1", "dbtrimkv:age=released", 1, 8, 16, "shift"),
    Case("text4", "balanced:free=0,floor=0.5", math.inf, 8, 2048, "long", budget=9.5),
    Case("vl1", "balanced:free=2", 5, 1, 16, "shift", budget=7),
    # Below its window of 16 even protected entries go, and a query can outlive all it could see.
    Case("text3", "snapkv", 2, 1, 7, "long", budget=6),
]


# Late pictures and videos in the other families that take them.
CASES += [
    Case("qwen2_5_vl", "dbtrimkv", 2, 1, 16, "late"),
    Case("qwen2_5_vl_dim128", "dbtrimkv", 2, 8, 9, "video"),
    Case("qwen3_vl_moe", "trimkv", 2, 1, 9, "video"),
    Case("internvl", "dbtrimkv", 2, 1, 7, "late"),
    Case("qwen3_5", "dbtrimkv", 2, 1, 7, "late"),
    Case("qwen3_5_text", "dbtrimkv", 2, 8, 16, "long"),
    Case("qwen2_vl", "dbtrimkv", 2, 1, 9, "video"),
    Case("smolvlm", "dbtrimkv", 2, 1, 9, "video"),
    Case("mistral3", "dbtrimkv", 2, 1, 7, "late"),
    Case("photos", "dbtrimkv", 2, 1, 7, "late"),
    Case("gemma3", "dbtrimkv", 2, 1, 7, "late"),
    Case("glm4v", "dbtrimkv", 2, 1, 7, "late"),
    Case("gemma3_wide", "h2o", 2, 8, 5, "late"),
]

# Where queries were asked: in layers with frequencies of their own. With so few positions to come,
# and whole pictures in the window, an error of one position shows.
CASES += [
    Case("gemma3", "expected-attention:window=24,sinks=2,ahead=2,epsilon=0", 2, 1, 7, "late", 9.4),
    Case("gemma3", "triattention:window=24,ahead=2", 2, 1, 7, "late", 9.4),
]
# Pairs of features side by side, some not turned; a bias and a gate before the output matrix.
CASES += [
    Case("glm4v", "expected-attention:window=24,sinks=2,ahead=2,epsilon=0", 2, 1, 7, "late", 9.4),
    Case("glm4v", "triattention:window=24", 2, 1, 7, "late", 9.4),
    Case("qwen3_5", "triattention:window=24", 2, 1, 7, "late", 9.4),
    Case("qwen3_5", "criticalkv:window=2", 2, 1, 7, "late", 9.4),
    Case("llama_biased", "criticalkv:window=2", 2, 1, 7, "long", 9.4),
]

# One dialogue for each other family and for sliding windows; test_parity has all their variants.
FAMILIES = [
    "llava_qwen2",
    "llava_next",
    "llava_next_video",
    "llava_onevision",
    "idefics3",
    "qwen2_sliding",
    "mistral",
    "qwen3",
    "qwen3_moe_mixed",
    "gemma3_text",
    "phi3_sliding",
    "llama_biased",
]
TEXT = FAMILIES[FAMILIES.index("qwen2_sliding") :]
CASES += [Case(name, "dbtrimkv", 2, 1, 16, "long" if name in TEXT else "late") for name in FAMILIES]
# Their entries are as those of another family here: make test-drawn has them.
ALIKE = ("llava_qwen2", "llava_next", "llava_next_video", "idefics3", "mistral", "qwen3")
ALIKE += ("phi3_sliding", "gemma3_text", "qwen2_5_vl", "qwen2_vl", "smolvlm", "mistral3")
ALIKE += ("internvl", "qwen3_5_text")


def load(folder: Path, case: Case, gates: Path | str = "random") -> Runtime:
    """The engine for one case."""
    return engine_of(
        folder,
        case.policy,
        case.budget,
        case.lookahead,
        gates,
        evict_every=case.evict_every,
        prefill_chunk=case.chunk,
        page_size=case.page_size,
    )


def oracle_for(folder: Path, engine: Runtime, case: Case) -> Oracle:
    """The oracle for one case; gates are the engine's public function."""
    return oracle_of(
        engine,
        folder,
        case.policy,
        case.budget,
        lookahead=case.lookahead,
        evict_every=case.evict_every,
        prefill_chunk=case.chunk,
    )


# The first case of each is in make test-fast; test_presets_oracle has all policies there.
QUICK = list({case.policy.partition(":")[0]: case for case in reversed(CASES)}.values())


@one_in(3)
@pytest.mark.parametrize(
    "case",
    slow_but(QUICK, [case for case in CASES if case.model not in ALIKE], "the rest of the matrix")
    + long_but(
        [case for case in CASES if case.model == "llama_biased" and case.policy != "dbtrimkv"],
        [case for case in CASES if case.model in ALIKE],
        "entries as others have",
    ),
    ids=lambda case: case.name,
)
def test_engine_follows_the_oracle(
    case: Case, record_property: Callable[[str, object], None]
) -> None:
    folder = folder_of(case.model)
    engine = load(folder, case)
    oracle, session = oracle_for(folder, engine, case), engine.session()
    worst, calls = 0.0, 0

    def compare(ours: torch.Tensor, theirs: torch.Tensor) -> None:
        nonlocal worst, calls
        assert ours.dtype == torch.float32 and ours.shape == theirs.shape
        error = float((ours - theirs).abs().max() / theirs.abs().max())
        assert error <= TOLERANCE, f"logits differ by {error:.2e} relative at token {oracle.seen}"
        oracle.follow(session.retained())
        worst, calls = max(worst, error), calls + 1
        assert session.memory().tokens_seen == oracle.seen
        assert session.memory().entries == int(oracle.keep.sum())
        risk = session.memory().risk
        assert (risk is not None) == (case.policy.split(":")[0] in GATED)
        assert risk is None or risk == pytest.approx(oracle.risk(), rel=RISK, abs=1e-5)

    for number, (kind, *rest) in enumerate(SCRIPTS[case.script]):
        if kind == "turn":
            inputs = prompt(case.model, *rest, seed=number)
            compare(*prefill_both(session, oracle, inputs))
        elif kind == "decode":
            for token in text_ids(rest[0], seed=1000 + number).tolist():
                compare(session.decode(token), oracle.decode(token))
        else:
            session.set_budget(rest[0])
            oracle.set_budget(rest[0])
            oracle.follow(session.retained())
    assert oracle.evictions > 0, "the case never evicted"
    assert any(row.numel() < oracle.seen for layer in session.retained() for row in layer)
    found = {"evictions": oracle.evictions, "swaps": oracle.swaps, "worst": worst}
    record_property("oracle", {"case": case.name, "calls": calls, **found})
    session.close()


def test_a_fraction_budget_follows_the_oracle(
    record_property: Callable[[str, object], None],
) -> None:
    """M_global = floor(f * seen * rows), never below one entry per row, as the text grows."""
    case = Case("text3", "dbtrimkv", 2, 1, 16, "long")
    folder = folder_of("text3")
    engine = load(folder, case)
    oracle, session = oracle_for(folder, engine, case), engine.session(Budget.fraction(0.3))
    oracle.fraction = 0.3
    prefill_both(session, oracle, prompt("text3", 45))
    for token in text_ids(25, 5).tolist():
        session.decode(token), oracle.decode(token)
        oracle.follow(session.retained())
    assert int(oracle.keep.sum()) == math.floor(0.3 * 70 * engine.spec.rows)
    found = {"evictions": oracle.evictions, "swaps": oracle.swaps, "worst": 0.0}
    record_property("oracle", {"case": "fraction", "calls": 26, **found})


# Every lookahead of the policies that read it; the others make the same policy of any.
READINGS = [
    (name, n)
    for name in GATED
    for n in (1, 2, math.inf)
    if n == 1 or make_policy(name, n) != make_policy(name, 1)
]


@pytest.mark.slow(reason="the lookaheads, at every step")
@pytest.mark.parametrize(
    ("policy", "lookahead", "bias"),
    [(*one, (0.5, 200.0)[at % 2]) for at, one in enumerate(READINGS)],
)
def test_exact_ties_follow_the_oracle(
    lookahead: float,
    bias: float,
    policy: str,
    tmp_path: Path,
) -> None:
    """Gates that ignore their input: every score is shared by all rows (bias 0.5), or all scores
    are equal (bias 200, log_beta = 0 exactly). Position, then layer, then head must decide.
    """
    case = Case("text3", policy, lookahead, 1, 16, "long", budget=7.4)
    folder = folder_of("text3")
    spec = load(folder, case).spec
    gates = make_random_gates(spec)
    gates.tensors["readout.weight"].zero_()
    gates.tensors["readout.bias"].fill_(bias)
    save_gates(gates, tmp_path, spec)
    engine = load(folder, case, tmp_path)
    oracle, session = oracle_for(folder, engine, case), engine.session()
    prefill_both(session, oracle, prompt("text3", 45))
    for token in text_ids(12, 5).tolist():
        session.decode(token), oracle.decode(token)
        oracle.follow(session.retained())
    assert oracle.swaps == 0, "a tie is not a swap"


@pytest.mark.parametrize("policy", ["dbtrimkv", "trimkv"])
@pytest.mark.parametrize("path", ["native", "torch"])
def test_entries_without_a_score_go_first(
    path: str, policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One head's gate is not a number: the budget holds, and what went is counted.

    Such gates are refused, but a finite gate may give it for a state that overflowed.
    """
    monkeypatch.setattr("mmkv.engine.model.gates.files.find_not_finite", lambda tensors: None)
    case = Case("text3", policy, 2, 1, 16, "long", budget=7.4)
    folder = folder_of("text3")
    spec = load(folder, case).spec
    gates = make_random_gates(spec)
    gates.tensors["layers.1.linear2.bias"][0] = math.nan
    save_gates(gates, tmp_path, spec)
    engine = load(folder, case, tmp_path)
    if path == "torch":
        engine.backends.cpu.switch_off()
    oracle, session = oracle_for(folder, engine, case), engine.session()
    prefill_both(session, oracle, prompt("text3", 45))
    for token in text_ids(12, 5).tolist():
        session.decode(token), oracle.decode(token)
        oracle.follow(session.retained())
        assert session.entries == math.floor(7.4 * spec.rows)
        assert session.memory().evicted_nan == oracle.evicted_nan > 0
    held = len(session.retained()[1][0])
    assert held == (0 if policy == "dbtrimkv" else 7)


# Every preset of the registry, on three families, with prompts read whole and in chunks.
#
# Two turns with pictures, in a batch with another session, over a session file and a fork; the
# retained sets and logits are those of the preset's reference after every chunk and step.


MATRIX_FAMILIES = {"qwen3_vl": "vl3", "llava": "llava3", "text": "text3"}
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


def text_of(name: str) -> str:
    """The preset with windows for a small dialogue."""
    known = PRESETS[name].parameters
    return f"{name}[{','.join(f'{key}={SMALL[key]}' for key in SMALL if key in known)}]"


# Every preset with pictures; make test-drawn has one of each kind without, or in another family.
TESTED = [name for name in PRESETS if name not in MERGERS]
CHUNKED = [(name, "qwen3_vl", "chunked") for name in TESTED]
ELSEWHERE = [(n, ("llava", "text")[at % 2], "chunked") for at, n in enumerate(KINDS + OTHERS)]
WHOLE = [(name, family, "whole") for name in TESTED for family in MATRIX_FAMILIES]
_MORE = pytest.mark.drawn(reason="policies of the kinds that others are of")
# Linear layers take part in no policy, but pruners drop tokens that they would have to see.
PRUNERS = {name for name in PRESETS if make_policy(text_of(name)).pruner is not None}
HYBRID = [
    pytest.param(
        *(name, "qwen3_5", "chunked"),
        marks=() if name in ("dbtrimkv", "band-adaptive", "lag-kv", "wgkv") else _MORE,
    )
    for name in PRESETS
    if name not in PRUNERS
]
MATRIX_QUICK = [(name, "qwen3_vl", "chunked") for name in KINDS + OTHERS]


@one_in(2)
@pytest.mark.parametrize(
    ("name", "family", "chunk"),
    slow_but(MATRIX_QUICK, CHUNKED, "the rest of the matrix")
    + long_but(ELSEWHERE[:2], ELSEWHERE, "each policy is compared in another family")
    + long_but((), WHOLE, "what is kept in chunks, but for where they end")
    + HYBRID,
)
def test_preset_keeps_what_its_reference_keeps(
    name: str,
    family: str,
    chunk: str,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    text, model = text_of(name), MATRIX_FAMILIES.get(family, family)
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
        for token in text_ids(4, number).tolist():
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
