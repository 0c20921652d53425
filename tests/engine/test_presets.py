"""Presets: parameters as text, the names they give a policy, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from mmkv.engine.errors import PolicyError
from mmkv.engine.policies import (
    PRESETS,
    HeadAllocation,
    Parameter,
    Policy,
    Preset,
    make_policy,
    register_policy,
    registry,
)
from mmkv.engine.policies.preset import PolicyText, show
from mmkv.engine.policies.scoring import Recency, Retention, WindowAttention
from mmkv.engine.runtime import Runtime
from mmkv.resources import bundled_model


@pytest.fixture
def registered() -> Iterator[None]:
    """Forget what a test registers."""
    before = dict(registry._REGISTRY.registered)
    yield
    registry._REGISTRY.registered.clear()
    registry._REGISTRY.registered.update(before)


# The papers' numbers (places: docs/reference/policies.md), as text that changes nothing.
PUBLISHED = {
    "full": "",
    "dbtrimkv": "lookahead=2,recent=0,age=paper",
    "trimkv": "recent=0,age=paper",
    "balanced": "floor=1,free=32,lookahead=2,recent=0,age=paper",
    "streamingllm": "sinks=4",
    "snapkv": "window=16,kernel=5,pool=avg,group=mean",
    "h2o": "recent=0.5,group=mean",
    "tova": "",
    "pyramidkv": "beta=20,window=16,kernel=5,pool=avg,group=mean",
    "adakv": "floor=0.2,window=16,kernel=5,pool=avg,group=mean",
    "ada-pyramidkv": "beta=20,floor=0.2,window=16,kernel=5,pool=avg,group=mean",
    "morphkv": "window=32,fusion=sum,group=mean",
    "rkv": "window=8,lambda=0.1,kernel=7,threshold=0.5",
    "gkv": "window=16,alpha=0.8,form=max,redundancy=true,lambda=0.7,threshold=0.5,group=max",
    "keydiff": "recent=0",
    "knorm": "recent=0",
    "lagkv": "sinks=4,lag=128",
    "epikv": "a=0.3125,b=0.65625,window=64,eps=1e-6",
    "hs-variance": "a=0.3125,b=0.65625,window=64",
    "band-adaptive": "window=64,eps=1e-6",
    "kv-key": "window=64",
    "kv-val": "window=64",
    "lag-kv": "lag=128",
    "attention-hs": "a=0.3125,window=64,eps=1e-6,group=mean",
    "segments-hs": "segment=128,r=64,e=32,t=8,a=0.3125,b=0.65625,window=64,eps=1e-6",
    "fastv": "layer=2,keep=0.5,attention=all",
    "divprune": "keep=0.098",
    "wgkv": "window=0,threshold=0.1",
    "wgkv+dbtrimkv": "window=0,threshold=0.1,lookahead=2,age=paper",
    "wgkv+snapkv": "window=0,threshold=0.1,observed=0,kernel=5,pool=max,group=max",
}
# And what each keeps whatever the scores: sinks, newest tokens, their share of the budget.
PROTECTED = {
    "streamingllm": (4, 0, None),
    "lagkv": (4, 0, None),
    "h2o": (0, 0, 0.5),
    "morphkv": (0, 32, None),
    "rkv": (0, 8, None),
    **dict.fromkeys(["snapkv", "pyramidkv", "adakv", "ada-pyramidkv", "gkv"], (0, 16, None)),
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
    assert plain.keeps_prompt is (PROTECTED.get(preset, (0, 0, None))[2] == 0.25)
    for pair in filter(None, PUBLISHED[preset].split(",")):
        name, _, value = pair.partition("=")
        parameter = PRESETS[preset].parameters[name]
        other = next((x for x in parameter.choices if x != value), None)
        if other is None:
            other = "false" if value == "true" else "1" if value != "1" else "0"
        changed = make_policy(f"{preset}:{name}={other}")
        assert changed != plain and changed.identity() != plain.identity(), name


# By name, the values next to what can be: shares, counts from 1, and counts from 0.
IMPOSSIBLE = {
    **dict.fromkeys("floor lambda threshold keep a b alpha".split(), ("-0.01", "1.01")),
    **dict.fromkeys("window lag segment layer beta kernel".split(), ("0", "-1")),
    **dict.fromkeys("sinks r e t free observed".split(), ("-1",)),
    "lookahead": ("0.5", "0"),
    "eps": ("-1e-9",),
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
    }
    assert set(changes) == {field.name for field in fields(base)} - {"name", "source"}
    several = replace(base, recent_share=0.25, admission=changes["admission"])
    made = [base, several, *(replace(base, **{name: value}) for name, value in changes.items())]
    assert len({policy.identity() for policy in made}) == len(made)
    assert replace(base, source="elsewhere").identity() == base.identity()


@pytest.mark.parametrize("preset", PRESETS)
def test_no_parameters_and_all_defaults_are_one_policy(preset: str) -> None:
    parameters = PRESETS[preset].parameters
    pairs = ",".join(
        f"{key}={show(one.default)}" for key, one in parameters.items() if not one.path
    )
    plain = make_policy(preset)
    assert plain.name == preset and plain.source == PRESETS[preset].source
    for text in (f"{preset}:{pairs}", f"{preset}[{pairs}]", f"{preset}:{pairs.replace(',', ';')}"):
        assert make_policy(text) == plain
        assert make_policy(text).identity() == plain.identity()


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


@given(st.permutations(["window=32", "kernel=7", "pool=max"]), st.sampled_from(",;"))
def test_the_order_of_parameters_does_not_matter(pairs: list[str], separator: str) -> None:
    made = make_policy(f"snapkv:{separator.join(pairs)}")
    assert made.name == "snapkv:kernel=7,pool=max,window=32"
    assert made == make_policy(made.name)


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
        ("dbtrimkv:lookahead=1.5", r"not a whole number"),
        ("snapkv:window", r"'window' is not understood; write snapkv:key=value"),
        ("snapkv:window=", r"not understood"),
        ("snapkv:=3", r"not understood"),
        ("snapkv:window=3,window=4", r"sets window twice"),
        ("trimkv+3:recent=4", r"sets recent twice"),
        ("h2o+1", r"only dbtrimkv, trimkv, .* take \+N"),
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


def test_max_pooling_takes_the_best_of_the_neighbours() -> None:
    """Beside an independent pooling in order of position, over rows stored in any order."""
    from tests.engine.test_policies import Given, make_view

    torch.manual_seed(0)
    view = make_view([[30, 12]], seen=30)
    attention = torch.rand(42)
    view = replace(view, source=Given(lambda _: attention))  # type: ignore[arg-type]
    found = WindowAttention(4, 3, "max").score(view)
    for row in (0, 1):
        mine = (view.row == row).nonzero().flatten()
        order = mine[view.position[mine].argsort()]
        prefix = torch.where(view.position[order] >= 26, 0.0, attention[order])
        wide = F.pad(prefix, (1, 1))
        wanted = torch.stack([wide[:-2], wide[1:-1], wide[2:]]).amax(0)
        wanted[view.position[order] >= 26] = math.inf
        assert torch.equal(found[order], wanted)


@pytest.mark.usefixtures("registered")
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


@pytest.mark.usefixtures("registered")
def test_a_registered_policy_without_parameters_says_so() -> None:
    register_policy("plain", make_policy("streamingllm"))
    with pytest.raises(PolicyError, match="takes no parameters; register a Preset"):
        make_policy("plain:sinks=3")
    register_policy("kept", make_policy("trimkv"))
    assert make_policy("kept+5").name == "kept+5" and make_policy("kept+5").protect_recent == 5


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda first: None, "is a NoneType; it must be a Policy"),
        (lambda last: make_policy("full"), "cannot be made: TypeError"),
    ],
)
def test_a_preset_that_makes_no_policy(make: Any, says: str) -> None:
    register_policy("x", Preset(make, parameters={"first": Parameter(2, "")}))
    with pytest.raises(PolicyError, match=says):
        make_policy("x")


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
