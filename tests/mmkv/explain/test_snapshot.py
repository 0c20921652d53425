"""What a snapshot says, against loops over a record that is written down entry by entry."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from mmkv.engine.trace import DEATH, EVICTED, KINDS, REFUSED, Record
from mmkv.explain import figures, page
from mmkv.explain.snapshot import Frame, Region, Rule, Snapshot, _percent, encoded
from tests.mmkv.explain.test_page import numbers

SEEN = [2, 5, 8, 9, 11, 12]  # after each step; the first two tokens are from before the recording
STEPS = ["start", "prompt", "prompt", "reply", "prompt", "reply"]
# (row, token) -> step, score, cause; 0, 0 was gone before.
WENT: dict[tuple[int, int], tuple[int, float, int]] = {
    (1, 0): (1, -9.0, EVICTED),
    (0, 2): (2, 0.5, EVICTED),
    (1, 3): (2, 0.75, EVICTED),
    (0, 5): (2, 5.0, REFUSED),
    (1, 5): (4, -0.25, EVICTED),
    (0, 8): (4, -0.5, EVICTED),
    (0, 9): (5, np.inf, EVICTED),
    (1, 9): (5, -1.0, EVICTED),
}
ROWS, TOKENS, LAST = 2, 12, len(SEEN)
BETA = {(r, t): -0.02 * (1 + (3 * t + 5 * r) % 7) for r in range(ROWS) for t in range(TOKENS)}
BETA |= {(0, 7): 0.0, (1, 4): 0.0}
DIED = {at: WENT[at][0] if at in WENT else LAST for at in BETA if at != (0, 0)}
FRAME = Frame(1, 0, "picture 1", 2, 2, 2, 3, b"")  # tokens 2, 3 and 5, 6; 4 ends a line


def born(token: int) -> int:
    return next(step for step, seen in enumerate(SEEN) if token < seen)


def holds(step: int) -> list[tuple[int, int]]:
    return sorted(at for at in DIED if born(at[1]) <= step < DIED[at])


def made(**rule: Any) -> Snapshot:
    dead = sorted(WENT, key=lambda at: (WENT[at][0], at))
    deaths = np.zeros(len(dead), DEATH)
    for place, at in enumerate(dead):
        deaths[place] = (*at, BETA[at], *WENT[at][1:])
    live = sorted(at for at, died in DIED.items() if died == LAST)
    modality = np.array([0, 0, 1, 1, 0, 1, 1, 0, 0, 0, 0, 0], np.uint8)
    record = Record(
        1,
        ROWS,
        np.array(SEEN),
        np.full(LAST, 12),
        np.array([KINDS.index(kind) for kind in STEPS], np.uint8),
        np.arange(TOKENS),
        modality,
        deaths,
        np.array([WENT[at][0] for at in dead]),
        np.array([row for row, _ in live]),
        np.array([token for _, token in live]),
        np.array([BETA[at] for at in live], np.float32),
    )
    usual: dict[str, Any] = {"kernel": "retention", "lookahead": 2, "age_shift": 0, "first": 0}
    usual |= {"recent": 0, "group": np.zeros(ROWS, np.int64), "predicts": True}
    texts = [f"t{at} " for at in range(TOKENS)]
    return Snapshot(record, Rule(**(usual | rule)), texts, [FRAME], "p", "b", "m")


def test_what_is_held_after_each_step() -> None:
    snapshot, every = made(group=np.arange(ROWS)), np.arange(LAST)
    counts, per_row, cuts = snapshot.counts(), snapshot.per_row(every), snapshot.cuts()
    assert np.array_equal(snapshot.per_row(every[1::2]), per_row[:, 1::2])
    for step in range(LAST):
        held = holds(step)
        where = figures.held(snapshot, step)
        assert list(zip(*map(np.ndarray.tolist, np.nonzero(where)), strict=True)) == held
        kinds = [int(snapshot.record.modality[token]) for _, token in held]
        assert counts[:, step].tolist() == [kinds.count(kind) for kind in range(3)]
        assert per_row[:, step].tolist() == [[r for r, _ in held].count(row) for row in range(2)]
        for row in range(ROWS):  # the highest finite score that an eviction took
            gone = [
                score
                for (r, _), (at, score, why) in WENT.items()
                if (r, at, why) == (row, step, EVICTED) and math.isfinite(score)
            ]
            assert cuts[row, step] == max(gone) if gone else math.isnan(cuts[row, step])
    count, last = snapshot.fates
    for token in range(TOKENS):
        ends = [died for (_, t), died in DIED.items() if t == token]
        assert (count[token], last[token]) == (ends.count(LAST), max(ends))


@pytest.mark.parametrize(("shift", "lookahead"), [(0, 2.0), (-1, 2.0), (0, math.inf)])
def test_scores_are_those_of_the_formula(shift: int, lookahead: float) -> None:
    """In float64, with both ends protected; what stood just above is the lowest of them."""
    recent = 0 if shift else 2
    rule = {"lookahead": lookahead, "age_shift": shift, "first": 3, "bonus": -0.5}
    rule["recent"] = recent
    snapshot, step = made(**rule), 4

    def score(row: int, token: int) -> float:
        beta, age = BETA[row, token], SEEN[step] - token + shift
        if token < 3 or token >= SEEN[step] - recent:
            return math.inf
        if beta == 0:
            return -0.5 + math.log(lookahead)
        # The sum of beta ** (age + k) over the next ``lookahead`` steps.
        rest = 1.0 if lookahead == math.inf else 1 - math.exp(lookahead * beta)
        return -0.5 + age * beta + math.log(rest / (1 - math.exp(beta)))

    wanted = sorted((score(*at), at[1], at[0]) for at in holds(step))
    found = snapshot.just_above(step, 0, 99)
    # Ties by position, then by row: both log betas of 0 among them.
    assert [(row, token) for row, token, _ in found] == [(row, token) for _, token, row in wanted]
    assert [one for *_, one in found] == pytest.approx([one for one, *_ in wanted], rel=1e-5)
    if shift:  # the newest has age 0, and is whole whatever its log beta is
        assert snapshot.scores(step, np.array([10]), np.array([-np.inf], np.float32)) == [-0.5]
    alone = replace(snapshot, rule=replace(snapshot.rule, group=np.arange(ROWS)))
    assert {row for row, *_ in alone.just_above(step, 1)} == {1}


def test_what_is_forgotten_by_region() -> None:
    """The turn of a token begins with the first chunk behind a reply; a picture is its own."""
    names = {7: "turn 1", 8: "turn 1", 9: "turn 2", 10: "turn 2", 11: "turn 2"}
    sums: dict[str, list[float]] = {}
    for (row, token), died in DIED.items():
        if token >= SEEN[0]:
            name = names.get(token, "picture 1")
            weight = math.exp(BETA[row, token] * (TOKENS - token))
            sums.setdefault(name, [0.0, 0.0])[died < LAST] += weight
    regions = made().regions()
    assert [one.name for one in regions] == ["turn 1", "turn 2", "picture 1"]
    for one in regions:
        held, gone = sums[one.name]
        assert (one.held, one.forgotten) == pytest.approx((held, gone), rel=1e-6)
        assert one.risk == pytest.approx(gone / (held + gone), rel=1e-6)
    assert made(predicts=False).regions() == []


def test_the_most_forgotten_are_said_and_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [Region("a", 99, 1), Region("b", 995, 5), Region("c", 1, 1), Region("d", 90, 10)]
    monkeypatch.setattr(Snapshot, "regions", lambda _: found)
    said = made().forgetting()
    assert said == "forgotten, as the gates predict: 50 % of c, 10 % of d, 1 % of a"
    assert made().forgetting(1).endswith(": 50 % of c") and Region("e", 0, 0).risk == 0
    monkeypatch.setattr(page, "_MOST_REGIONS", 2)
    assert [one.name for one in page._regions(made())] == ["c", "d"]


@pytest.mark.parametrize(
    ("token", "left", "share"),
    [
        (9, "no head holds it now", " where nothing is forgotten."),
        (6, "all 2 heads hold it", "the heads that still hold it pay 100 % of that."),
        (5, "no head holds it now", " where nothing is forgotten."),
        (3, "1 of 2 heads still hold it", "the heads that still hold it pay 80 % of that."),
    ],
)
def test_the_headline_counts_heads(token: int, left: str, share: str) -> None:
    snapshot = made()
    paid = np.full((ROWS, TOKENS), 0.01, np.float32)
    if token == 9:  # no patches: words count, but for the first, marks and roles
        snapshot.record.modality[:] = 0
        snapshot.texts[4:6] = ["<|im_start|>", "user"]
        paid[:, [0, 4, 5]] = 0.9
    paid[:, token] = 0.8, 0.2
    snapshot = replace(snapshot, attention=paid, reply="r")
    assert snapshot.needed() == token and f": {left}. " in snapshot.headline()
    assert " gets 50 % of the reply's attention" in snapshot.detail()
    assert snapshot.detail().endswith(share)


def test_a_page_of_the_latest_tokens_in_the_fullest_row(monkeypatch: pytest.MonkeyPatch) -> None:
    paid = np.full((ROWS, 10), 0.0, np.float32)
    paid[:, 6], paid[0, 2] = (0.2, 0.4), 0.1
    snapshot = replace(made(group=np.array([0, 0])), attention=paid)
    detail = page._Detail(6, 99, 0, 6)
    data = page._data(snapshot, detail, {})
    fullest = int(np.argmax(snapshot.per_row(np.arange(LAST)).sum(1)))
    assert (data["rows"], data["first"], data["needed"]) == ([fullest], 6, 0)
    assert data["rule"]["sizes"] == [2] and data["paid"] == pytest.approx([paid[fullest, 6]])
    shown = [*paid.mean(0)[6:].tolist(), 0, 0]  # of what came later nothing is known
    assert numbers(data["blobs"]["attention"]).tolist() == pytest.approx(shown)
    assert page._data(snapshot, replace(detail, tokens=5), {})["needed"] == -1
    sample = (4, np.array([0, 1, 1]), np.array([7, 4, 8]), np.array([1, 2, 3], np.float32))
    sampled = replace(snapshot, record=replace(snapshot.record, samples=(sample,)))
    ((step, values),) = page._samples(sampled, np.array([1]), 6, 6, np.array([0, 4, 5]))
    assert step == 1 and values[0, 2] == 3 and np.isnan(values).sum() == 5
    many = replace(snapshot, record=replace(snapshot.record, samples=(sample,) * 7))
    for cells, count in ((4, 2), (6, 3), (40, 7), (1, 0)):  # of 6 tokens of a row each
        monkeypatch.setattr(page, "_FEW_CELLS", cells)
        assert len(page._samples(many, np.array([1]), 6, 6, np.array([4]))) == count


def test_numbers_of_a_page_are_rounded_by_at_most_half_a_level() -> None:
    beta = np.append(0, -np.geomspace(1e-8, 7, 40)).astype(np.float32)
    code, (low, high, levels) = page._coded(beta, 15)
    assert code[0] == 255 and (code[1], code[-1]) == (0, 14)
    back = low + code[1:] / (levels - 1) * (high - low)
    assert np.abs(back - np.log(-beta[1:])).max() <= (high - low) / 28 + 1e-6
    cuts = np.array([[1, np.nan, 5, 2, np.nan, np.nan], [np.nan, 3, 2, 9, 1, 4]], np.float32)
    # Steps 0, 3 and 5 are shown: each stands for those since the one before.
    shown = page._by_frame(cuts, np.array([0, 3, 5]))
    np.testing.assert_array_equal(shown, [[1, 5, np.nan], [np.nan, 9, 4]])


def test_figures_show_what_stayed_what_went_and_why() -> None:
    snapshot, figure = made(), Figure()
    figures._tokens(figure, snapshot)
    left, right = figure.axes
    count, last = snapshot.fates
    gone = [t for t in range(TOKENS) if not count[t]]
    assert [bar.get_width() for bar in left.patches] == sorted(count[count > 0], reverse=True)
    assert [bar.get_width() for bar in right.patches] == sorted(last[gone], reverse=True)
    moments = [1, 2, 4, 5]
    assert figures._moments(snapshot) == moments
    said = [f"picture 1 ({y}, {x})" for y in (1, 2) for x in (1, 2)]
    assert [figures._word(snapshot, at) for at in range(2, 7)] == [*said[:2], "t4 ", *said[2:]]
    snapshot.texts[0], snapshot.texts[1] = "$é" + "x" * 40, ""
    words = ["\\$\\xe9" + "x" * 18, "text"]
    assert [figures._word(snapshot, at) for at in range(2)] == words

    def drawn(view: Any, at: int = 0) -> tuple[Any, np.ndarray]:
        view(made := Figure(), snapshot)
        axes = made.axes[at]
        return axes, np.array(axes.images[-1].get_array()) if axes.images else np.zeros(0)

    _, kept = drawn(figures._kept)
    for (row, token), died in DIED.items():
        assert kept[row, token] == died - born(token)
    assert np.isnan(kept).sum() == 1  # what was gone before
    every = [[r for r, _ in holds(step)] for step in range(LAST)]
    counts = [[one.count(row) for one in every] for row in range(ROWS)]
    assert drawn(figures._rows)[1].tolist() == counts
    axes, _ = drawn(figures._curves)
    *kinds, budget = (line.get_ydata().tolist() for line in axes.lines)
    assert kinds == [line.tolist() for line in snapshot.counts() if line.any()]
    assert budget == [12] * LAST
    axes, shares = drawn(figures._text)
    assert [one.get_text() for one in axes.get_yticklabels()] == [f"step {at}" for at in moments]
    wanted = [
        [sum((r, t) in holds(at) for r in range(ROWS)) / ROWS for t in range(TOKENS)]
        for at in moments
    ]
    assert shares.tolist() == wanted
    file = encoded(Image.new("RGB", (6, 4)), 8)
    snapshot = replace(snapshot, frames=[replace(FRAME, jpeg=file)])
    for at, step in enumerate(moments):
        axes, over = drawn(figures._pictures, at)
        assert axes.get_title() == f"picture 1, step {step}"
        for place, token in enumerate((2, 3, 5, 6)):
            dark = [0, 0, 0, 0.85 * (1 - wanted[at][token] ** 0.5)]
            pixel = over[divmod(place, 2)].tolist()
            assert pixel == pytest.approx([1, 1, 1, 0.9] if token >= SEEN[step] else dark)
    figures._why(why := Figure(), snapshot)
    longest = max(WENT, key=lambda at: WENT[at][0] - born(at[1]))
    assert f"KV head {longest[0]} lost" in why.axes[0].get_title()
    assert why.axes[0].get_title().endswith(f"at step {WENT[longest][0]}")


def test_shares_and_pictures() -> None:
    shares = [(0, 5), (5, 5), (1, 1000), (999, 1000), (1, 2)]
    said = ["0 %", "100 %", "less than 1 %", "more than 99 %", "50 %"]
    assert [_percent(*pair) for pair in shares] == said
    jpeg = encoded(Image.new("RGBA", (40, 20), (9, 9, 9, 0)), 16)
    with Image.open(io.BytesIO(jpeg)) as small:  # what is transparent is white
        assert small.size == (16, 8) and small.getpixel((3, 3)) == (255, 255, 255)
