"""The leaderboard: which policies run, its rows, going on after a stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import compare
from benchmarks.compare import chosen, gates_of
from benchmarks.quality.methods import Cell
from mmkv.engine.errors import InputError
from mmkv.engine.policies import PRESETS, make_policy
from mmkv.resources import bundled_model
from tests.support.policies import MERGERS

MODEL = str(bundled_model())


def test_gates_are_the_models_own_for_dbtrimkv_and_named_for_others() -> None:
    own = str(Path(MODEL) / "gates")
    assert gates_of([], MODEL) == {"dbtrimkv": (own,)}
    found = gates_of(["trimkv=a,b", "dbtrimkv=c"], MODEL)
    assert found == {"dbtrimkv": ("c",), "trimkv": ("a", "b")}
    for wrong in ("trimkv", "=a", "trimkv="):
        with pytest.raises(InputError, match="write POLICY=FOLDER"):
            gates_of([wrong], MODEL)


def test_all_policies_but_those_without_gates(capsys: Any) -> None:
    methods = {method.name: method for method in chosen("all", gates_of([], MODEL))}
    gated = {name for name in PRESETS if make_policy(name).gates}
    assert "wgkv+dbtrimkv" in gated
    # Those of packages that are installed here come with them.
    left = {"full", *MERGERS, *(gated - {"dbtrimkv"})}
    assert set(methods) & set(PRESETS) == set(PRESETS) - left
    assert next(iter(methods)) == "dbtrimkv" and methods["dbtrimkv"].gates
    assert not methods["snapkv"].gates
    err = capsys.readouterr().err
    assert "left out, policy 'trimkv' needs gates: give --gates trimkv=FOLDER" in err
    assert "left out, policy 'visionzip' merges what CLIP's tower gives; name it" in err
    with pytest.raises(InputError, match="give --gates trimkv=FOLDER"):
        list(chosen("trimkv+4", {}))


def test_policies_with_parameters_are_split_outside_of_brackets() -> None:
    gates = {"dbtrimkv": ("g",), "dbtrimkv+4": ("h",)}
    text = "snapkv[window=32,kernel=7],dbtrimkv+4,dbtrimkv[lookahead=4],full,streamingllm"
    found = {method.name: method.gates for method in chosen(text, gates)}
    assert found == {
        "snapkv:kernel=7,window=32": (),
        "dbtrimkv+4": ("h",),
        "dbtrimkv:lookahead=4": ("g",),
        "streamingllm": (),
    }


def test_gates_of_policies_with_two_sets(capsys: Any) -> None:
    gates = {"dbtrimkv": ("d",), "wgkv": ("w", "v")}
    text = "wgkv,wgkv+snapkv,wgkv+dbtrimkv[lookahead=4]"
    found = {method.name: (method.policy, method.gates) for method in chosen(text, gates)}
    assert found == {
        "wgkv": ("wgkv", ("w", "v")),
        "wgkv+snapkv": ("wgkv+snapkv", ("w", "v")),
        "wgkv+dbtrimkv:lookahead=4": ("wgkv+dbtrimkv[lookahead=4,write_gates=w]", ("d",)),
    }
    with pytest.raises(InputError, match="give --gates wgkv=FOLDER"):
        list(chosen("wgkv+dbtrimkv", {"dbtrimkv": ("d",)}))


def run(right: list[bool], size: int) -> dict[str, Any]:
    count = len(right)
    return {
        "right": right,
        "tokens": [1] * count,
        "kl": [0.5] * count,
        "nll": [0.5] * count,
        "agree": [1] * count,
        "seen": 50,
        "entries": 40,
        "evicted": 1,
        "visual": 0,
        "per_row": [[20, 20]],
        "bytes": size,
    }


def test_rows_of_the_leaderboard(tmp_path: Path) -> None:
    """Means over dialogues and seeds, differences from the first method, sorted by accuracy."""
    raw = {
        "full": [[run([True, True], 9000), run([True, True], 7000)]],
        "a at 1/4": [[run([True, False], 3000), run([False, False], 1000)]],
        "b at 1/4": [  # two seeds
            [run([True, True], 2000), run([True, False], 2000)],
            [run([True, True], 2000), run([True, True], 2000)],
        ],
    }
    cells = {name: [Cell(name, None, None, None)] for name in raw}
    speed = {"tokens_per_second": 123.4, "eviction_share": 0.25}
    page = compare.summarise(raw, cells, lambda cell: {**speed, "path": cell.policy})
    full, a, b = page["rows"]
    assert (full["bytes"], a["bytes"], b["bytes"]) == (8000, 2000, 2000)
    assert [row["accuracy"]["value"] for row in page["rows"]] == [1, 0.25, 0.875]
    assert a["from_first"]["value"] == 0 and b["from_first"]["of"] == "a"
    assert b["from_first"]["value"] == 0.625 and b["from_full"]["value"] == -0.125
    assert a["speed"]["path"] == "a at 1/4" and page["questions"] == 4
    made = compare.tables({"s": page})
    heading, *rows = made["leaderboard"]
    assert heading[1:3] == ["accuracy at 1/4", "kB at 1/4"] and heading[-1] == "in eviction"
    assert [row[0] for row in rows] == ["`full`", "`b`", "`a`"]
    assert rows[1][1].startswith("0.875 [") and rows[1][2:] == ["2", "0.500", "123", "25%"]
    assert [row[:3] for row in made["differences"][1:]] == [
        ["`a`", "1/4", "a"],
        ["`b`", "1/4", "a"],
    ]
    assert made["differences"][2][3].startswith("+0.625 [")
    assert list(compare.tables({"s": page, "t": page})) == [
        *("leaderboard-1", "differences-1", "leaderboard-2", "differences-2")
    ]
    compare.draw({"s": page}, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000
