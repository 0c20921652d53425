"""Policies of others: as objects, registered by a program, or from an installed package."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from mmkv.engine.errors import PolicyError
from mmkv.engine.policies import (
    CacheView,
    GlobalAllocation,
    HeadAllocation,
    Needs,
    NewTokens,
    Policy,
    Scores,
    make_policy,
    names,
    register_policy,
    registry,
)
from mmkv.engine.policies.selection import Shares
from mmkv.engine.runtime import Runtime
from tests.support.packages import install
from tests.support.sessions import PICTURES, advance, assert_same_rows, load, text_ids


@dataclass(frozen=True)
class Oldest:
    """Keeps the oldest entries."""

    needs: ClassVar[Needs] = Needs()

    def score(self, view: CacheView) -> Tensor:
        return -view.position.float()


@dataclass(frozen=True)
class KeySize:
    """Keeps the largest keys."""

    needs: ClassVar[Needs] = Needs(keys=True)

    def score(self, view: CacheView) -> Tensor:
        return view.keys().float().norm(dim=-1)


OLDEST = Policy("oldest", Oldest(), HeadAllocation())
KEY_SIZE = Policy("key-size", KeySize(), GlobalAllocation())


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry._REGISTRY, "registered", {})


@pytest.fixture
def imported() -> Iterator[None]:
    """Remove the modules that the test imports."""
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("scratch_"):
            del sys.modules[name]


def test_a_policy_object_runs_as_its_preset_does(folders: dict[str, Path]) -> None:
    engines = [load(folders["vl"], policy=policy) for policy in (make_policy("trimkv"), "trimkv")]
    sessions = [engine.session() for engine in engines]
    for part in (PICTURES, text_ids(8, 1)):
        a, b = (advance(session, part) for session in sessions)
        assert torch.equal(a, b)
    assert_same_rows(*sessions)
    assert engines[0].identity() == engines[1].identity()


def test_a_registered_policy_is_found_by_its_name(folders: dict[str, Path]) -> None:
    register_policy("first-come", OLDEST)
    assert "first-come" in names()
    assert make_policy("first-come") == replace(OLDEST, name="first-come")
    engine = load(folders["vl"], policy="first-come", budget=5)
    with engine.session() as session:
        advance(session, PICTURES)
        advance(session, text_ids(4, 1))
        assert all(row.tolist() == [0, 1, 2, 3, 4] for layer in session.retained() for row in layer)
    with pytest.raises(PolicyError, match=r"unknown policy 'nope'; choose one of .*first-come"):
        make_policy("nope")


def test_a_registered_function_gets_the_lookahead() -> None:
    register_policy("ahead", lambda steps: replace(OLDEST, protect_first=int(steps)))
    assert make_policy("ahead", 7).protect_first == 7


@dataclass(frozen=True)
class Silent:
    needs: ClassVar[Needs] = Needs()


class Loose:
    needs = Needs()

    def score(self, view: CacheView) -> Tensor:
        return view.position.float()


@pytest.mark.parametrize(
    ("name", "policy", "says"),
    [
        ("snapkv", OLDEST, "policy 'snapkv' is one of mmkv's own"),
        ("a b", OLDEST, "cannot name a policy"),
        ("a+4", OLDEST, "cannot name a policy"),
        ("x", 3, "policy 'x' is a int; it must be a Policy"),
        ("x", replace(OLDEST, scoring=Silent()), "lacks needs = Needs"),
        ("x", replace(OLDEST, scoring=Loose()), "not a dataclass"),
        ("x", replace(OLDEST, scoring=Oldest), "give an instance: Oldest"),
    ],
)
def test_what_cannot_be_registered(name: str, policy: Any, says: str) -> None:
    with pytest.raises(PolicyError, match=says):
        register_policy(name, policy)


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda steps: None, "policy 'x' is a NoneType; it must be a Policy"),
        (lambda: OLDEST, "policy 'x' cannot be made: TypeError"),
    ],
)
def test_a_function_that_makes_no_policy(made: Any, says: str) -> None:
    register_policy("x", made)
    with pytest.raises(PolicyError, match=says):
        make_policy("x")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"policy": 3}, "policy is a int; give a name"),
        ({"policy": OLDEST, "lookahead": 5}, "lookahead belongs to the policy's scorer"),
        ({"policy": replace(OLDEST, scoring=Loose())}, "not a dataclass"),
    ],
)
def test_wrong_policies_are_named_before_a_model_is_loaded(
    options: dict[str, Any], says: str
) -> None:
    with pytest.raises(PolicyError, match=says):
        Runtime.from_pretrained("no-such-folder", **options)


SOURCE = """
    from dataclasses import dataclass
    from typing import ClassVar
    from mmkv.engine.policies import CacheView, HeadAllocation, Needs, Policy

    @dataclass(frozen=True)
    class Oldest:
        needs: ClassVar[Needs] = Needs()

        def score(self, view):
            return -view.position.float()

    POLICY = Policy("any", Oldest(), HeadAllocation())
"""


def test_a_package_installed_meanwhile_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entry points are kept until a folder of the path changes."""
    monkeypatch.syspath_prepend(tmp_path)
    os.utime(tmp_path, (1, 1))  # a clock may be too coarse for two changes in a row
    assert "late" not in names()
    install(tmp_path, "scratch-late", "[mmkv.policies]\nlate = scratch_oldest:POLICY\n")
    assert "late" in names()


def test_a_package_offers_a_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, imported: None
) -> None:
    entry_points = "[mmkv.policies]\nold-ones = scratch_oldest:POLICY\n"
    install(tmp_path, "scratch-oldest", entry_points, scratch_oldest=SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    assert "old-ones" in names()
    assert "policy old-ones: of the package scratch-oldest" in registry.describe_added()
    assert "scratch_oldest" not in sys.modules  # loaded when it is asked for
    made = make_policy("old-ones")
    assert made.name == "old-ones" and type(made.scoring).__name__ == "Oldest"


def test_a_package_that_does_not_load_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, imported: None
) -> None:
    entry_points = "[mmkv.policies]\nbroken = scratch_broken:POLICY\ngone = scratch_none:POLICY\n"
    source = 'raise RuntimeError("two\\nlines")'
    install(tmp_path, "scratch-broken", entry_points, scratch_broken=source)
    monkeypatch.syspath_prepend(tmp_path)
    for name, cause in (("broken", "RuntimeError: two"), ("gone", "ModuleNotFoundError")):
        with pytest.raises(PolicyError, match="the package scratch-broken does not load") as caught:
            make_policy(name)
        assert cause in str(caught.value) and "\n" not in str(caught.value)
    assert make_policy("dbtrimkv").name == "dbtrimkv"  # the others are unharmed
    with pytest.raises(PolicyError, match=r"choose one of .*broken"):
        make_policy("nope")


def test_a_package_cannot_take_a_presets_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, imported: None
) -> None:
    entry_points = "[mmkv.policies]\nsnapkv = scratch_oldest:POLICY\n"
    install(tmp_path, "scratch-oldest", entry_points, scratch_oldest=SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PolicyError, match="scratch-oldest offers a policy 'snapkv'"):
        make_policy("snapkv")
    assert any("snapkv: refused" in line for line in registry.describe_added())
    assert names().count("snapkv") == 1 and make_policy("trimkv").name == "trimkv"


def test_two_packages_cannot_offer_one_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, imported: None
) -> None:
    for package in ("scratch-one", "scratch-two"):
        module = package.replace("-", "_")
        entry_points = f"[mmkv.policies]\nboth = {module}:POLICY\n"
        install(tmp_path / package, package, entry_points, **{module: SOURCE})
        monkeypatch.syspath_prepend(tmp_path / package)
    with pytest.raises(PolicyError, match="offered by scratch-one and scratch-two"):
        make_policy("both")


def test_a_view_gathers_keys_in_the_order_of_its_entries(folders: dict[str, Path]) -> None:
    engine = load(folders["vl"], policy=KEY_SIZE, budget=7)
    with engine.session() as session:
        advance(session, PICTURES)
        view = session.view()
        keys, cache = view.keys(), engine.cache
        assert keys.shape == (int(view.length.sum()), engine.spec.head_dim)
        for index, (row, position) in enumerate(
            zip(view.row.tolist(), view.position.tolist(), strict=True)
        ):
            layer, head = divmod(row, engine.spec.num_kv_heads)
            table, size = cache.table[session.seq, layer, head], cache.pool.page_size
            found = [
                cache.pool.keys[table[i // size], i % size]
                for i in range(int(cache.length[session.seq, layer, head]))
                if int(cache.pool.position[table[i // size], i % size]) == position
            ]
            assert len(found) == 1 and torch.equal(found[0], keys[index])


@dataclass(frozen=True)
class Undeclared:
    """Reads what it does not ask for."""

    what: str
    needs: ClassVar[Needs] = Needs()

    def score(self, view: CacheView) -> Tensor:
        return view.keys()[:, 0] if self.what == "keys" else view.attention()


@dataclass(frozen=True)
class OnePerRow:
    needs: ClassVar[Needs] = Needs()

    def score(self, view: CacheView) -> Tensor:
        return view.length.float()


@dataclass(frozen=True)
class Returns:
    """Returns what somebody may return by mistake, from one of a scorer's methods."""

    method: str
    what: str
    needs: ClassVar[Needs] = Needs(state=2)

    def score(self, view: CacheView) -> Any:
        scores = torch.zeros(len(view.position))
        state = {"one state": Scores(scores, torch.zeros(3))}
        wrong = {
            "none": None,
            "list": scores.tolist(),
            "no tensor": Scores(scores.tolist()),  # type: ignore[arg-type]
        }
        return (wrong | state)[self.what] if self.method == "score" else scores

    def on_append(self, new: NewTokens) -> Any:
        fine = torch.zeros(*new.position.shape, 1, 1, 2)
        wrong = {"none": None, "list": [0.0], "one number": torch.zeros(3)}
        if self.method == "on_append memory":
            new.memory["kept"] = torch.zeros(7)
        return wrong[self.what] if self.method == "on_append" else fine

    def on_step(self, view: CacheView, memory: dict[str, Tensor]) -> Any:
        wrong = {"list": [0.0], "short": torch.zeros(1, 2)}
        return wrong[self.what] if self.method == "on_step" else None

    def memory(self, *_: int) -> Any:
        wrong = {"none": None, "number": {"kept": 3}}
        return wrong[self.what] if self.method == "memory" else {"kept": (2,)}


@dataclass(frozen=True)
class Shared:
    """An allocation that returns what somebody may return by mistake."""

    what: str

    def shares(self, budget: int, layers: int, kv_heads: int) -> Any:
        rows = layers * kv_heads
        group, share = torch.zeros(rows, dtype=torch.int64), torch.tensor([budget])
        return {
            "none": None,
            "tuple": (group, share),
            "short": Shares(group[1:], share),
            "list": Shares(group, [budget]),  # type: ignore[arg-type]
            "fractions": Shares(group, share / 2),
            "no share": Shares(group + 1, share),
            "floor": Shares(group, share, group[1:]),
        }[self.what]


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("none", "Shared.shares returned None; return Shares"),
        ("tuple", "returned a tuple; return Shares"),
        ("short", r"as group returned shape \[3\], not \[4\]"),
        ("list", "as share returned a list; return a tensor"),
        ("fractions", "returned fractions"),
        ("no share", "groups without a share"),
        ("floor", r"as floor returned shape \[3\], not \[4\]"),
    ],
)
def test_a_wrong_allocation_is_one_line(what: str, says: str, folders: dict[str, Path]) -> None:
    policy = Policy("shared", Oldest(), Shared(what))
    engine = load(folders["vl"], policy=policy, budget=7)
    with engine.session() as session, pytest.raises(PolicyError, match=says) as caught:
        session.prefill(PICTURES)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("method", "what", "says"),
    [
        ("score", "none", "Returns of policy 'key-size' returned None; return one number an entry"),
        ("score", "list", "returned a list; return one number"),
        ("score", "no tensor", "returned a list; return one number"),
        ("score", "one state", r"Scores.state returned shape \[3\], not \[\d+, 2\]"),
        ("on_append", "none", "Returns.on_append returned None; return the state of new entries"),
        ("on_append", "list", "Returns.on_append returned a list"),
        ("on_append", "one number", r"Returns.on_append returned shape \[3\]; return"),
        ("on_append memory", "", r"memory\['kept'\] returned shape \[7\], not \[1, 2\]"),
        ("on_step", "list", "Returns.on_step returned a list; return a new state"),
        ("on_step", "short", r"Returns.on_step returned shape \[1, 2\], not \[\d+, 2\]"),
        ("memory", "none", "Returns.memory returned None; return a dict"),
        ("memory", "number", "Returns.memory returned 3 as a shape"),
    ],
)
def test_what_a_scorer_must_not_return_is_one_line(
    method: str, what: str, says: str, folders: dict[str, Path]
) -> None:
    policy = replace(KEY_SIZE, scoring=Returns(method, what))
    with pytest.raises(PolicyError, match=says) as caught:
        engine = load(folders["vl"], policy=policy, budget=7)
        with engine.session() as session:
            session.prefill(PICTURES)
            session.decode(5)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("scorer", "says"),
    [
        (Undeclared("keys"), r"give it needs = Needs\(keys=True\)"),
        (Undeclared("attention"), r"give it needs = Needs\(queries=16\)"),
        (OnePerRow(), r"OnePerRow of policy 'key-size' returned shape \[4\] for \d+ entries"),
    ],
)
def test_a_wrong_scorer_is_one_line(scorer: Any, says: str, folders: dict[str, Path]) -> None:
    engine = load(folders["vl"], policy=replace(KEY_SIZE, scoring=scorer), budget=7)
    with engine.session() as session, pytest.raises(PolicyError, match=says) as caught:
        session.prefill(PICTURES)
    assert "\n" not in str(caught.value)


def test_needs_that_cannot_be() -> None:
    for wrong in ({"gates": "retain"}, {"queries": -1}):
        with pytest.raises(PolicyError, match="cannot be"):
            Needs(**wrong)


@dataclass(frozen=True)
class Whole:
    """Keeps what has the largest whole number for a score."""

    needs: ClassVar[Needs] = Needs()

    def score(self, view: CacheView) -> Tensor:
        return view.position


def test_scores_of_any_number_type_and_protection(folders: dict[str, Path]) -> None:
    """Whole numbers are scores, too, also where some tokens are protected."""
    policy = Policy("whole", Whole(), HeadAllocation(), protect_first=1)
    engine = load(folders["vl"], policy=policy, budget=4)
    with engine.session() as session:
        advance(session, PICTURES)
        last = session.seen - 1
        kept = [0, last - 2, last - 1, last]
        assert all(row.tolist() == kept for layer in session.retained() for row in layer)


def test_an_unknown_scorer_runs_in_a_batch_as_alone(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over several turns; a step in C with eviction in torch as one that is torch throughout."""
    engine = load(folders["vl"], policy=KEY_SIZE, budget=9)
    monkeypatch.setenv("MMKV_NATIVE", "0")
    plain = load(folders["vl"], policy=KEY_SIZE, budget=9)
    assert "torch: switched off" in plain.decode_path
    assert "torch: switched off" in plain.evict_path
    texts = [text_ids(6, 3), text_ids(6, 4)]
    together, alone = (
        [engine.session(), engine.session(12)],
        [plain.session(), plain.session(12)],
    )
    for turn in (PICTURES, text_ids(9, 5)):
        for session in (*together, *alone):
            advance(session, turn)
        for tokens in zip(*texts, strict=True):
            batch = engine.decode(together, [int(token) for token in tokens])
            one = torch.stack(
                [s.decode(int(token)) for s, token in zip(alone, tokens, strict=True)]
            )
            torch.testing.assert_close(batch, one, rtol=1e-4, atol=1e-4)
            for a, b in zip(together, alone, strict=True):
                assert_same_rows(a, b)
    assert together[0].memory().entries == 9 * engine.spec.rows


def test_paths_say_why_a_scorer_runs_in_torch(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = {}
    for policy in (KEY_SIZE, "dbtrimkv", "full", "snapkv"):
        engine = load(folders["vl"], policy=policy)
        if engine.backends.cpu.decoder is None:
            pytest.skip(f"no C library: {engine.decode_path}")
        paths[engine.policy.name] = engine.decode_path, engine.evict_path
    assert paths["key-size"] == ("native", "native, scores in torch: policy 'key-size'")
    assert paths["dbtrimkv"] == ("native", "native") and paths["full"] == ("native", "never")
    assert paths["snapkv"] == ("native", "native, scores in torch: policy 'snapkv'")
    # A burst as a GPU would run it.
    engine = load(folders["vl"], policy=KEY_SIZE)
    for each in (engine, engine.model):
        monkeypatch.setattr(each, "device", torch.device("cuda"))
    monkeypatch.setattr("mmkv.engine.backends.cuda.backend.triton_installed", lambda: True)
    assert engine.many_path == "step by step: policy 'key-size'"
    assert engine.evict_path == "torch: policy 'key-size'"
