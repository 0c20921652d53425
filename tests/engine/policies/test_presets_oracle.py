"""Every preset against its reference, under drawn settings: the same entries after every call.

Three conversations share an engine and decode in one batch; each has an oracle of its own. Turns
with pictures come late, budgets change on the way, sessions are saved and loaded or forked.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from mmkv.engine.policies import PRESETS, Policy, make_policy
from mmkv.engine.runtime import Runtime
from mmkv.engine.scorer_state import POSITIONS, QUERIES
from mmkv.engine.sequence import CachedSequence
from tests.support.dialogues import Notes, engine_of, folder_of, oracle_of, prefill_both, prompt
from tests.support.factories import checkpoint
from tests.support.oracle import METHODS, Oracle, Quantiser
from tests.support.oracle.simulation import FORMS
from tests.support.policies import KINDS
from tests.support.sessions import load, text_ids
from tests.support.tiers import long_but, one_in

TOLERANCE = 1e-4
NAMES = [name for name in PRESETS if make_policy(name).evicts]
BATCH = 3

# What is drawn for a parameter of any method, by its name.
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "window": st.integers(1, 6),
    "kernel": st.sampled_from([1, 3, 5]),
    "pool": st.sampled_from(["avg", "max"]),
    "group": st.sampled_from(["mean", "max", "sum"]),
    "fusion": st.sampled_from(["sum", "max"]),
    "sinks": st.integers(0, 4),
    "beta": st.sampled_from([1, 2, 5, 20]),
    "floor": st.sampled_from([0.0, 0.2, 0.5, 1.0]),
    "free": st.sampled_from([0, 2, 5]),
    "lambda": st.sampled_from([0.1, 0.5, 0.7, 1.0]),
    "threshold": st.sampled_from([0.0, 0.2, 0.5]),
    "alpha": st.sampled_from([0.0, 0.5, 0.8, 1.0]),
    "form": st.sampled_from(["max", "mean", "sum"]),
    "redundancy": st.booleans(),
    "lag": st.integers(2, 6),
    "a": st.sampled_from([0.0, 0.3125, 0.5]),
    "b": st.sampled_from([0.0, 0.65625, 0.9]),
    "epsilon": st.sampled_from([0.0, 0.01, 0.1]),
    "ahead": st.sampled_from([1, 7, 512, 65536]),
    "eps": st.sampled_from([1e-6, 0.1]),
    "segment": st.integers(2, 5),
    "r": st.integers(1, 4),
    "e": st.integers(0, 2),
    "t": st.integers(0, 1),
    "lookahead": st.sampled_from([1, 2, 5]),
    "age": st.sampled_from(["paper", "released"]),
    "observed": st.integers(0, 4),
    "interval": st.sampled_from([1, 2, 128]),
    "gamma": st.sampled_from([0.0, 1.0, 200.0]),
    "tau1": st.sampled_from([0.6, 1.0, 1.6]),
    "tau2": st.sampled_from([0.6, 1.0, 1.6]),
}
# Where a name means something of its own.
OWN: dict[tuple[str, str], st.SearchStrategy[Any]] = {
    ("raas", "alpha"): st.sampled_from([0.0001, 0.05, 0.1, 0.3]),
    ("expected-attention", "ahead"): st.sampled_from([1, 7, 512]),
    ("h2o", "recent"): st.sampled_from([0.0, 0.25, 0.5, 0.75]),
    # The range of two values may be a rounding of both, and this score divides by it squared.
    ("lag-kv", "lag"): st.integers(3, 6),
    # The z-score of one value among two is 1 or -1: rounding alone would tell tokens apart.
    **{
        (name, "window"): st.integers(3, 8)
        for name in ("epikv", "band-adaptive", "attention-hs", "segments-hs")
    },
}
RECENT = st.integers(0, 3)


@dataclass(frozen=True)
class Setting:
    """One conversation of several, and what they run under."""

    model: str
    parameters: dict[str, Any]
    budget: float
    later: float
    evict_every: int | None
    chunk: int
    page_size: int
    native: bool
    kept_by: str  # "file", "fork" or "": how sessions go on in the middle
    seed: int
    kv: str = "auto"


def parameters_of(name: str) -> list[str]:
    """The parameters of a method by the names that users write, in the reference's order."""
    method = METHODS[name]()
    named = [field.name.rstrip("_") for field in fields(method) if field.init]
    return [key for key in named if key in PRESETS[name].parameters]


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_has_a_reference_with_its_parameters(name: str) -> None:
    """One without would be compared with nothing (docs/how-to/add-a-policy.md)."""
    assert name in METHODS, f"tests/support/oracle/methods.py has no reference of {name!r}"
    assert set(parameters_of(name)) == set(PRESETS[name].parameters)


@st.composite
def drawn(draw: Callable[[st.SearchStrategy[Any]], Any], name: str, kv: str = "auto") -> Setting:
    """Draw a setting for a method; each parameter has its default one time in eight."""
    parameters = {}
    for key in parameters_of(name):
        if key == "write_gates":
            parameters[key] = "random"
        elif draw(st.integers(0, 7)):
            values = RECENT if key == "recent" else VALUES.get(key)
            values = OWN.get((name, key), values)
            parameters[key] = draw(values)
    budgets = st.integers(6, 44).map(lambda quarters: quarters / 4)
    return Setting(
        draw(st.sampled_from(["vl3", "text3", "vl1", "text4", "text1", "vl4"])),
        parameters,
        draw(budgets),
        draw(budgets),
        draw(st.sampled_from([None, None, 1, 3])),
        draw(st.sampled_from([5, 16, 2048])),
        draw(st.sampled_from([8, 16])),
        draw(st.booleans()),
        draw(st.sampled_from(["file", "fork", ""])),
        draw(st.integers(0, 999)),
        kv,
    )


def text_of(name: str, parameters: dict[str, Any]) -> str:
    """The policy as a command line names it."""
    values = [f"{key}={str(value).lower()}" for key, value in parameters.items()]
    return name + (":" + ",".join(values) if values else "")


class Pair:
    """A session and its oracle."""

    def __init__(
        self, engine: Runtime, name: str, setting: Setting, notes: Notes | None = None
    ) -> None:
        self.notes = notes
        self.engine, self.session = engine, engine.session()
        self.oracle = oracle_of(
            engine,
            folder_of(setting.model),
            text_of(name, setting.parameters),
            setting.budget,
            evict_every=setting.evict_every,
            prefill_chunk=setting.chunk,
        )
        if notes is not None:
            self.oracle.quantiser = Quantiser(setting.kv)

    def prefill(self, inputs: dict[str, torch.Tensor]) -> None:
        self.compare(*prefill_both(self.session, self.oracle, inputs, self.notes))

    def compare(self, ours: torch.Tensor, theirs: torch.Tensor) -> None:
        self.oracle.follow(self.session.retained())
        error = float((ours - theirs).abs().max() / theirs.abs().max())
        assert error <= TOLERANCE, f"logits differ by {error:.2e} at token {self.oracle.seen}"

    def go_on(self, how: str, folder: Path) -> None:
        """Continue from a file or in a fork; the session before is closed."""
        before = self.session
        if how == "file":
            before.save(folder / "session")
            self.session, _ = self.engine.load_session(folder / "session")
        elif how == "fork":
            self.session = before.fork()
        if how:
            before.close()
        self.oracle.follow(self.session.retained())


def decode(engine: Runtime, pairs: list[Pair], count: int, seed: int) -> None:
    """Append random tokens to all sessions, a batch at a time."""
    for tokens in text_ids(count * len(pairs), seed).view(count, -1).tolist():
        sessions: list[CachedSequence] = [pair.session for pair in pairs]
        logits = engine.decode(sessions, tokens)
        if pairs[0].notes is not None:
            pairs[0].notes.show_step([pair.oracle for pair in pairs])
        for pair, token, ours in zip(pairs, tokens, logits, strict=True):
            pair.compare(ours, pair.oracle.decode(token))


def converse(name: str, setting: Setting, batch: int) -> list[Oracle]:
    """Lead the conversations; the oracles as they are at the end."""
    engine = engine_of(
        folder_of(setting.model),
        text_of(name, setting.parameters),
        setting.budget,
        evict_every=setting.evict_every,
        prefill_chunk=setting.chunk,
        page_size=setting.page_size,
        kv=setting.kv,
    )
    notes = Notes(engine) if setting.kv != "auto" else None
    if notes is not None or not setting.native:
        engine.backends.cpu.switch_off()
    pairs = [Pair(engine, name, setting, notes) for _ in range(batch)]
    seed = setting.seed
    for number, pair in enumerate(pairs):
        pair.prefill(
            prompt(setting.model, 5 + 4 * number, ("image", 16, 16), 3, seed=seed + number)
        )
    decode(engine, pairs, 4, seed)
    with tempfile.TemporaryDirectory(prefix="mmkv-presets-") as home:
        for pair in pairs:
            pair.go_on(setting.kept_by, Path(home))
    decode(engine, pairs, 3, seed + 1)
    for pair in pairs:
        pair.session.set_budget(setting.later)
        pair.oracle.set_budget(setting.later)
        pair.oracle.follow(pair.session.retained())
    pairs[0].prefill(prompt(setting.model, 4, ("image", 24, 16), 3, seed=seed + 9))
    decode(engine, pairs, 4, seed + 2)
    for pair in pairs:
        pair.session.close()
        pair.oracle.close()
    return [pair.oracle for pair in pairs]


def compare_drawn(
    name: str, examples: int, batch: int, found: list[Oracle], kv: str = "auto"
) -> None:
    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(drawn(name, kv))
    def run(setting: Setting) -> None:
        found.extend(converse(name, setting, batch))

    run()


def report(record_property: Callable[[str, object], None], name: str, found: list[Oracle]) -> None:
    evictions = sum(oracle.evictions for oracle in found)
    assert evictions > 4 * len(found) / Policy.interval, "the cases hardly ever evicted"
    swaps = sum(oracle.swaps for oracle in found)
    calls = sum(oracle.seen for oracle in found)
    row = {"case": f"{name}, drawn", "calls": calls, "evictions": evictions, "swaps": swaps}
    record_property("oracle", row | {"worst": 0.0})


# Every second kind, and the one that keeps where queries were asked.
QUICK = [*KINDS[::2], "expected-attention"]


@one_in(2)
@pytest.mark.parametrize("name", long_but(QUICK, NAMES, "test_oracle.py has all presets"))
def test_presets_follow_their_references(
    name: str, record_property: Callable[[str, object], None]
) -> None:
    found: list[Oracle] = []
    compare_drawn(name, 2, 2, found)
    report(record_property, name, found)


@pytest.mark.drawn(reason="50 settings for each preset take half an hour")
@pytest.mark.parametrize("name", NAMES)
def test_presets_follow_their_references_under_50_settings(
    name: str, record_property: Callable[[str, object], None]
) -> None:
    found: list[Oracle] = []
    compare_drawn(name, 50, BATCH, found)
    report(record_property, name, found)


# What a policy reads of entries: nothing, queries, attention added up, keys, values, both, all.
READ = [
    ("dbtrimkv", "int8"),
    ("snapkv", "k8v4"),
    ("h2o", "int4"),
    ("keydiff", "int8"),
    ("kv-val", "k8v4"),
    ("lagkv", "int4"),
    ("expected-attention", "int4"),
]
# And the same policy in every form.
READ += [("dbtrimkv", kv) for kv in FORMS if kv != "int8"]


def follow_in_fewer_bits(
    name: str, kv: str, examples: int, record_property: Callable[[str, object], None]
) -> None:
    """The oracle rounds keys and values by itself, and checks what the engine holds."""
    found: list[Oracle] = []
    compare_drawn(name, examples, 2, found, kv)
    assert all(oracle.quantiser is not None and oracle.quantiser.rounded for oracle in found)
    report(record_property, f"{name} {kv}", found)


@pytest.mark.parametrize(
    ("name", "kv"), long_but([("dbtrimkv", "int8"), ("h2o", "int4")], READ, "the other presets")
)
def test_presets_follow_their_references_in_fewer_bits(
    name: str, kv: str, record_property: Callable[[str, object], None]
) -> None:
    follow_in_fewer_bits(name, kv, 2, record_property)


@pytest.mark.drawn(reason="every preset in every form takes minutes")
@pytest.mark.parametrize("kv", FORMS)
# The reference of write gates reads keys as they were before they were stored.
@pytest.mark.parametrize("name", [name for name in NAMES if "wgkv" not in name])
def test_every_preset_follows_its_reference_in_every_form(
    name: str, kv: str, record_property: Callable[[str, object], None]
) -> None:
    follow_in_fewer_bits(name, kv, 5, record_property)


@pytest.mark.parametrize("sinks", [2, 3])
def test_queries_of_sinks_count_where_there_are_no_others(sinks: int) -> None:
    text = f"expected-attention:window=8,sinks={sinks}"
    for tokens in range(sinks + 1, 8):
        engine = engine_of(folder_of("text3"), text, 4)
        session, oracle = engine.session(), oracle_of(engine, folder_of("text3"), text, 4)
        prefill_both(session, oracle, prompt("text3", tokens, seed=tokens))
        for token in text_ids(3, tokens).tolist():
            session.decode(token), oracle.decode(token)
            oracle.follow(session.retained())


def test_queries_that_were_cut_off_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those before them in their slots are lost; the others' next positions follow what is left.

    Keys are compared with them in blocks of any size.
    """
    engine = engine_of(folder_of("text3"), "expected-attention:window=8,sinks=1", 40)
    ids = text_ids(20, 1)
    cut, whole = engine.session(), engine.session()
    cut.prefill({"input_ids": ids[None]})
    for token in (5, 6):
        cut.decode(token)
    cut.cut_back(20, 20, 20)
    whole.prefill({"input_ids": ids[None]})
    queries, at = cut.view().future_queries(3)
    expected, _ = whole.view().future_queries(3)
    assert at.tolist() == [16, 17, 18, 19, -1, -1, 14, 15]
    engine.cache.memory[POSITIONS][cut.seq] -= 5  # as if positions had been drawn together
    assert torch.equal(cut.view().future_queries(3)[1], at)
    engine.cache.memory[POSITIONS][cut.seq] += 5
    held = at >= 0
    torch.testing.assert_close(queries[:, :, held], expected[:, :, held], rtol=1e-4, atol=1e-4)
    score = engine.policy.scoring.score(cut.view())
    monkeypatch.setattr("mmkv.engine.policies.attention._BLOCK_ELEMENTS", 1)
    torch.testing.assert_close(engine.policy.scoring.score(cut.view()), score)


@pytest.mark.parametrize("tokens", [10, 30])
def test_queries_of_the_next_token_are_turned_by_the_session_s_factors(tokens: int) -> None:
    """Phi-3's short ones up to 16 tokens, its long ones in a session that began beyond."""
    engine = load(checkpoint("phi3_long"), policy="expected-attention:window=8", budget=40)
    session, rope = engine.session(), engine.spec.rope
    session.prefill({"input_ids": text_ids(tokens, 1)[None]})
    queries, at = session.view().future_queries(1)
    assert session.long_rope == (tokens > 16) and rope.long_inv_freq is not None
    angle = (tokens - at)[:, None] * (rope.long_inv_freq if tokens > 16 else rope.inv_freq)
    first, second, rest = engine.cache.memory[QUERIES][session.seq].split(
        [angle.shape[1], angle.shape[1], engine.spec.head_dim - 2 * angle.shape[1]], -1
    )
    turned = first * angle.cos() - second * angle.sin(), first * angle.sin() + second * angle.cos()
    torch.testing.assert_close(queries, torch.cat([*turned, rest], -1), rtol=1e-4, atol=1e-4)
