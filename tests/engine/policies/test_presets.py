"""Presets: parameters as text, names, refusals; policies of others, registered or installed."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from mmkv.engine.errors import PolicyError
from mmkv.engine.policies import (
    PRESETS,
    CacheView,
    GlobalAllocation,
    HeadAllocation,
    Needs,
    NewTokens,
    Parameter,
    Policy,
    Preset,
    Scores,
    make_policy,
    names,
    register_policy,
    registry,
)
from mmkv.engine.policies.preset import PolicyText, show
from mmkv.engine.policies.scoring import Recency, Retention, WindowAttention
from mmkv.engine.policies.selection import Shares
from mmkv.engine.runtime import Runtime
from mmkv.resources import bundled_model
from mmkv.training.measure.record import ROOT
from tests.support.packages import install
from tests.support.sessions import PICTURES, advance, assert_same_rows, load, text_ids


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry._REGISTRY, "registered", {})


# The papers' numbers (places: docs/reference/policies.md), as text that changes nothing.
PUBLISHED = {
    "full": "",
    "dbtrimkv": "lookahead=2,recent=0,age=paper",
    "trimkv": "recent=0,age=paper",
    "balanced": "floor=1,free=32,lookahead=2,recent=0,age=paper",
    "streamingllm": "sinks=4",
    "snapkv": "window=16,kernel=5,pool=avg,group=mean",
    "criticalkv": "alpha=0.5,epsilon=1e-4,window=16,kernel=5,pool=avg,group=mean",
    "h2o": "recent=0.5,group=mean",
    "tova": "",
    "pyramidkv": "beta=20,window=16,kernel=5,pool=avg,group=mean",
    "adakv": "floor=0.2,window=16,kernel=5,pool=avg,group=mean",
    "ada-pyramidkv": "beta=20,floor=0.2,window=16,kernel=5,pool=avg,group=mean",
    "morphkv": "window=32,fusion=sum,group=mean",
    "rkv": "window=8,lambda=0.1,kernel=7,threshold=0.5,interval=128",
    "gkv": "window=16,alpha=0.8,form=max,redundancy=true,lambda=0.7,threshold=0.5,group=max,"
    "interval=128",
    "keydiff": "recent=0",
    "knorm": "recent=0",
    "expected-attention": "window=256,ahead=512,sinks=4,epsilon=0.01,floor=0.2,interval=512",
    "triattention": "window=256,ahead=65536,interval=128",
    "cake": "window=32,kernel=5,gamma=200,tau1=1.6,tau2=0.6",
    "raas": "alpha=1e-4,group=max",
    "lagkv": "sinks=4,lag=128",
    "epikv": "a=0.3125,b=0.65625,window=64,eps=1e-6",
    "hs-variance": "a=0.3125,b=0.65625,window=64",
    "band-adaptive": "window=64,eps=1e-6",
    "kv-key": "window=64",
    "kv-val": "window=64",
    "lag-kv": "lag=128",
    "attention-hs": "a=0.3125,window=64,eps=1e-6,group=mean",
    "segments-hs": "segment=128,r=64,e=32,t=8,a=0.3125,b=0.65625,window=64,eps=1e-6",
    "fastv": "layer=2,keep=0.5,tokens=0,attention=all",
    "divprune": "keep=0.098,tokens=0",
    "dart": "layer=2,keep=0.222,tokens=0,visual_pivots=4,text_pivots=4",
    "cdpruner": "keep=0.111,tokens=0",
    "visionzip": "keep=0.111,tokens=0,contextual=0.156",
    "prumerge": "tokens=0,neighbours=32",
    "wgkv": "window=0,threshold=0.1",
    "wgkv+dbtrimkv": "window=0,threshold=0.1,lookahead=2,age=paper",
    "wgkv+snapkv": "window=0,threshold=0.1,observed=0,kernel=5,pool=max,group=max",
}
# And what each keeps whatever the scores: sinks, newest tokens, their share of the budget.
PROTECTED = {
    "streamingllm": (4, 0, None),
    "lagkv": (4, 0, None),
    "expected-attention": (4, 0, None),
    "h2o": (0, 0, 0.5),
    **dict.fromkeys(["morphkv", "cake"], (0, 32, None)),
    "rkv": (0, 8, None),
    **dict.fromkeys(["snapkv", "pyramidkv", "adakv", "ada-pyramidkv", "gkv"], (0, 16, None)),
    "criticalkv": (0, 16, None),
    **dict.fromkeys(["epikv", "hs-variance", "band-adaptive"], (0, 128, 0.25)),
    **dict.fromkeys(["kv-key", "kv-val", "lag-kv"], (0, 128, 0.25)),
    **dict.fromkeys(["attention-hs", "segments-hs"], (0, 128, 0.25)),
}


@pytest.mark.parametrize("preset", PRESETS)
def test_the_defaults_are_the_published_numbers(preset: str) -> None:
    plain = make_policy(preset)
    assert make_policy(f"{preset}:{PUBLISHED[preset]}" if PUBLISHED[preset] else preset) == plain
    given = {pair.partition("=")[0] for pair in PUBLISHED[preset].split(",") if pair}
    assert given == {key for key, one in PRESETS[preset].parameters.items() if not one.path}
    kept = plain.protect_first, plain.protect_recent, plain.recent_share
    assert kept == PROTECTED.get(preset, (0, 0, None))
    assert plain.keeps_prompt is (kept[2] == 0.25 or preset == "raas")
    for pair in filter(None, PUBLISHED[preset].split(",")):
        name, _, value = pair.partition("=")
        parameter = PRESETS[preset].parameters[name]
        other = next((x for x in parameter.choices if x != value), None)
        if other is None:
            other = "false" if value == "true" else "1" if value != "1" else "0"
        changed = make_policy(f"{preset}:{name}={other}")
        assert changed != plain and changed.identity() != plain.identity(), name


def test_the_documents_name_every_parameter_with_its_default() -> None:
    text = (ROOT / "docs" / "reference" / "policies.md").read_text()
    sections = {}
    for part in re.split(r"^##+ ", text, flags=re.MULTILINE)[1:]:
        title, _, body = part.partition("\n")
        sections |= dict.fromkeys(title.split(" and "), body)
    for name, preset in PRESETS.items():
        if name == "full":
            continue
        _, _, parameters = sections[name].partition("Parameters:")
        named = dict(re.findall(r"`(\w+)=([\w.-]+)`", parameters))
        known = {key: one for key, one in preset.parameters.items() if not one.path}
        assert named.keys() == known.keys(), name
        for key, value in named.items():
            assert known[key].parse(value) == known[key].default, f"{name}: {key}"


# By name, the values next to what can be: shares, counts from 1, and counts from 0.
IMPOSSIBLE = {
    **dict.fromkeys("floor lambda threshold keep a b alpha contextual".split(), ("-0.01", "1.01")),
    **dict.fromkeys("window lag segment layer beta kernel interval ahead".split(), ("0", "-1")),
    **dict.fromkeys(["visual_pivots", "tau1", "tau2", "neighbours"], ("0", "-1")),
    "gamma": ("-0.1",),
    **dict.fromkeys("sinks r e t free observed tokens text_pivots".split(), ("-1",)),
    "lookahead": ("0.5", "0"),
    **dict.fromkeys(["eps", "epsilon"], ("-1e-9",)),
}


@pytest.mark.parametrize("preset", PRESETS)
def test_values_beyond_what_can_be_are_refused(preset: str) -> None:
    for name, parameter in PRESETS[preset].parameters.items():
        wrong = IMPOSSIBLE.get(name, ())
        if name == "recent":
            wrong = ("-0.01", "1.01") if preset == "h2o" else ("-1",)
        elif name == "window" and preset.startswith("wgkv"):
            wrong = ("-1",)  # 0: as the gates were trained
        assert wrong or parameter.choices or parameter.path or parameter.default is True, name
        for value in wrong:
            with pytest.raises(PolicyError, match=rf"{name} is '{value}'; give"):
                make_policy(f"{preset}:{name}={value}")


def test_an_identity_tells_every_part_of_a_policy_apart() -> None:
    """Under one name, as a policy of one's own may have it: a session file fits no other one."""
    base = make_policy("snapkv")
    changes: dict[str, Any] = {
        "scoring": make_policy("snapkv:window=8").scoring,
        "allocation": make_policy("dbtrimkv").allocation,
        "protect_first": 3,
        "protect_recent": 5,
        "recent_share": 0.25,
        "keeps_prompt": True,
        "pruner": make_policy("fastv").pruner,
        "admission": make_policy("wgkv").admission,
        "interval": 7,
    }
    assert set(changes) == {field.name for field in fields(base)} - {"name", "source"}
    several = replace(base, recent_share=0.25, admission=changes["admission"])
    made = [base, several, *(replace(base, **{name: value}) for name, value in changes.items())]
    assert len({policy.identity() for policy in made}) == len(made)
    assert replace(base, source="elsewhere").identity() == base.identity()


@pytest.mark.parametrize(
    ("text", "name", "changes"),
    [
        ("streamingllm:sinks=7", "streamingllm:sinks=7", {"protect_first": 7}),
        (
            "snapkv:window=32,kernel=7",
            "snapkv:kernel=7,window=32",
            {"scoring": WindowAttention(32, 7), "protect_recent": 32},
        ),
        (
            " snapkv [ pool = max ; window = 8 ] ",
            "snapkv:pool=max,window=8",
            {"scoring": WindowAttention(8, 5, "max"), "protect_recent": 8},
        ),
        ("dbtrimkv:lookahead=inf", "dbtrimkv:lookahead=inf", {"scoring": Retention(math.inf)}),
        ("dbtrimkv:lookahead=5.0", "dbtrimkv:lookahead=5", {"scoring": Retention(5)}),
        ("trimkv:recent=9", "trimkv+9", {"protect_recent": 9}),
        ("trimkv+9", "trimkv+9", {"protect_recent": 9}),
        ("keydiff+9", "keydiff+9", {"protect_recent": 9}),
        ("h2o:recent=0.25", "h2o:recent=0.25", {"recent_share": 0.25}),
        (
            "dbtrimkv+9:lookahead=4",
            "dbtrimkv+9:lookahead=4",
            {"scoring": Retention(4), "protect_recent": 9},
        ),
    ],
)
def test_parameters_change_what_they_name(text: str, name: str, changes: dict[str, Any]) -> None:
    base = make_policy(PolicyText.parse(text).name)
    assert make_policy(text) == replace(base, name=name, **changes)
    assert make_policy(name) == make_policy(text)  # a name is text that makes the policy again
    assert make_policy(text).identity() != base.identity()


def test_a_lookahead_in_the_text_outranks_the_option() -> None:
    assert make_policy("dbtrimkv", 5) == make_policy("dbtrimkv:lookahead=5", 5)
    assert make_policy("dbtrimkv", 5).name == "dbtrimkv"
    assert make_policy("dbtrimkv:lookahead=3", 5).scoring == Retention(3)
    assert make_policy("dbtrimkv:lookahead=2", 5).scoring == Retention(2)
    assert make_policy("dbtrimkv:lookahead=2", 5).name == "dbtrimkv:lookahead=2"
    # 2 and 2.0 are one setting: a chat's session file can be loaded by a program.
    assert make_policy("dbtrimkv", 2.0).identity() == make_policy("dbtrimkv", 2).identity()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("snapkv:windw=3", r"no parameter 'windw'; it takes window=16, kernel=5, pool=avg, "),
        ("full:sinks=3", r"no parameter 'sinks'; it takes none"),
        ("snapkv:window=0", r"window is '0'; give a whole number of at least 1"),
        ("snapkv:window=2.5", r"window is '2.5'; give a whole number"),
        ("snapkv:kernel=4", r"odd kernel"),
        ("snapkv:pool=median", r"pool is 'median'; give avg or max"),
        ("streamingllm:sinks=-1", r"sinks is '-1'; give a whole number of at least 0"),
        ("dbtrimkv:lookahead=two", r"lookahead is 'two'; give a number of at least 1"),
        ("dbtrimkv:lookahead=nan", r"lookahead is 'nan'"),
        ("dbtrimkv:lookahead=1.5", r"give a whole number"),
        ("snapkv:window", r"'window' is not understood; write snapkv:key=value"),
        ("snapkv:window=", r"not understood"),
        ("snapkv:=3", r"not understood"),
        ("snapkv:window=3,window=4", r"sets window twice"),
        ("trimkv+3:recent=4", r"sets recent twice"),
        *(
            (text, r"only dbtrimkv, trimkv, .* take \+N")
            for text in ("h2o+1", "dbtrimkv+", "dbtrimkv+-1", "trimkv+2.5", "snapkv+4", "full+4")
        ),
        ("snapkv[window=3", r"unknown policy"),
        ("nonsense:window=3", r"unknown policy 'nonsense'; choose one of"),
    ],
)
def test_what_cannot_be_is_one_line(text: str, says: str) -> None:
    with pytest.raises(PolicyError, match=says) as error:
        make_policy(text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("parameter", "good", "bad"),
    [
        (Parameter(True, ""), {"true": True, "NO": False, "0": False, "on": True}, ["2", "maybe"]),
        (Parameter(3, "", least=1, most=4), {"1": 1, "4": 4}, ["0", "5", "1.0", "x", "inf"]),
        (Parameter(0.5, "", least=0, most=1), {"0": 0.0, "1e-3": 1e-3}, ["1.1", "-1", "nan", "x"]),
        (Parameter("a", "", choices=("a", "b")), {"b": "b"}, ["c", "A"]),
    ],
)
def test_a_value_has_the_type_of_its_default(
    parameter: Parameter, good: dict[str, object], bad: list[str]
) -> None:
    for text, value in good.items():
        parsed = parameter.parse(text)
        assert parsed == value and type(parsed) is type(parameter.default)
        assert parameter.parse(show(parsed)) == value
    for text in bad:
        with pytest.raises(PolicyError, match="give "):
            parameter.parse(text)


def test_a_registered_preset_has_parameters() -> None:
    def make(first: int, note: str) -> Policy:
        return Policy("any", Recency(), HeadAllocation(), protect_first=first, source="mine")

    words = Parameter("x", "", choices=("x", "y"))
    register_policy("oldest", Preset(make, parameters={"first": Parameter(2, ""), "note": words}))
    assert make_policy("oldest").name == "oldest" and make_policy("oldest").source == "mine"
    made = make_policy("oldest[note=y;first=5]")
    assert (made.name, made.protect_first) == ("oldest:first=5,note=y", 5)
    with pytest.raises(PolicyError, match="it takes first=2, note=x"):
        make_policy("oldest:last=1")
    with pytest.raises(PolicyError, match=r"only dbtrimkv, trimkv, .* take \+N"):
        make_policy("oldest+3")


def test_a_registered_policy_without_parameters_says_so() -> None:
    register_policy("plain", make_policy("streamingllm"))
    with pytest.raises(PolicyError, match="takes no parameters; register a Preset"):
        make_policy("plain:sinks=3")
    register_policy("kept", make_policy("trimkv"))
    assert make_policy("kept+5").name == "kept+5" and make_policy("kept+5").protect_recent == 5


def test_an_engine_takes_parameters_in_its_policy(tmp_path: Path) -> None:
    def load(policy: str) -> Runtime:
        return Runtime.from_pretrained(bundled_model(), policy=policy, budget=8, dtype="float32")

    engine = load("streamingllm[sinks=2]")
    with engine.session() as session:
        session.prefill({"input_ids": torch.arange(3, 43)[None]})
        wanted = [0, 1, *range(34, 40)]
        assert all(sorted(row.tolist()) == wanted for layer in session.retained() for row in layer)
        session.save(tmp_path / "kept.mmkv")
    load("streamingllm:sinks=2").load_session(tmp_path / "kept.mmkv")[0].close()
    with pytest.raises(Exception, match=r"streamingllm:sinks=2"):
        load("streamingllm").load_session(tmp_path / "kept.mmkv")


# Policies of others: as objects, registered by a program, or from an installed package.


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
FIRST = {"first": Parameter(2, "")}


@pytest.fixture
def imported() -> Iterator[None]:
    """Remove the modules that the test imports."""
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("scratch_"):
            del sys.modules[name]


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
        ("x", replace(OLDEST, interval=0), "interval=0; give a whole number"),
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
        (Preset(lambda first: None, parameters=FIRST), "is a NoneType; it must be a Policy"),
        (Preset(lambda last: OLDEST, parameters=FIRST), "cannot be made: TypeError"),
    ],
)
def test_what_makes_no_policy(made: Any, says: str) -> None:
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
class UndeclaredOutputs(Oldest):
    """Reads output matrices, and does not ask for them."""

    needs: ClassVar[Needs] = Needs(state=1)

    def on_append(self, new: NewTokens) -> Tensor:
        return new.outputs(0)


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
        (UndeclaredOutputs(), r"give it needs = Needs\(state=1, outputs=True\)"),
        (OnePerRow(), r"OnePerRow of policy 'key-size' returned shape \[4\] for \d+ entries"),
    ],
)
def test_a_wrong_scorer_is_one_line(scorer: Any, says: str, folders: dict[str, Path]) -> None:
    engine = load(folders["vl"], policy=replace(KEY_SIZE, scoring=scorer), budget=7)
    with engine.session() as session, pytest.raises(PolicyError, match=says) as caught:
        session.prefill(PICTURES)
    assert "\n" not in str(caught.value)


class StepBefore(Oldest):
    """Remembers how many steps there were, and how many before the last one."""

    def memory(self, *_: int) -> dict[str, tuple[int, ...]]:
        return {"now": (1,), "before": (1,)}

    def on_step(self, view: CacheView, memory: dict[str, Tensor]) -> None:
        memory["before"], memory["now"] = memory["now"], memory["now"] + 1


def test_what_a_scorer_remembers_moves_from_name_to_name(folders: dict[str, Path]) -> None:
    engine = load(folders["vl"], policy=replace(OLDEST, scoring=StepBefore()), budget=7)
    with engine.session() as session:
        session.prefill(PICTURES)
        start = float(engine.cache.memory["now"][session.seq])
        for _ in range(3):
            session.decode(5)
        kept = {name: float(x[session.seq]) for name, x in engine.cache.memory.items()}
    assert kept == {"now": start + 3, "before": start + 2}


def test_needs_that_cannot_be() -> None:
    for wrong in ({"gates": "retain"}, {"queries": -1}, {"positions": True}):
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
    engine = load(folders["vl"], policy=KEY_SIZE, budget=9, evict_every=1)
    monkeypatch.setenv("MMKV_NATIVE", "0")
    plain = load(folders["vl"], policy=KEY_SIZE, budget=9, evict_every=1)
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
    assert engine.many_path == "step by step: policy 'key-size' has code of its own"
    assert engine.evict_path == "torch: policy 'key-size' has code of its own"
