"""The page of a trace: what it holds, and what a browser without a network makes of it."""

from __future__ import annotations

import base64
import json
import random
import re
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmkv import Engine, Sampling
from mmkv.engine.errors import InputError
from mmkv.engine.trace import DEATH, Record
from mmkv.explain import Snapshot, Trace, figures, page
from mmkv.explain.page import read_page, render
from mmkv.explain.snapshot import Rule
from mmkv.resources import asset, bundled_model
from tests.support.browser import axe_findings, browsing
from tests.support.recorded import DIALOGUES, bundled, recorded, talk
from tests.support.tiers import BROWSER

MARKUP = '</script><b>bold</b><!-- $x^2$ & "quoted"'
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def engine() -> Engine:
    return bundled()


@pytest.fixture(scope="module")
def trace(engine: Engine) -> Iterator[Trace]:
    session, made = talk(engine)
    yield made
    session.close()


@pytest.fixture(scope="module")
def asked(engine: Engine) -> tuple[Snapshot, list[list[Any]], dict[str, Any]]:
    """README's example, what the session held in the end, and the inputs of the model."""
    question, scene = "what is at row 2, column 3?", asset("scene.png")
    parts = [{"type": "image", "image": scene}, {"type": "text", "text": question}]
    inputs = engine.inputs([{"role": "user", "content": parts}])
    with engine.session() as session, session.trace() as trace:
        session.undo_depth = 2
        assert "".join(session.send(question, images=[scene])) == "frog"
        assert trace.measure_attention(inputs)
        found = trace.snapshot(), session.retained(), inputs
        list(session.send("what is at row 1, column 2?", sampling=Sampling(max_new_tokens=2)))
        assert not trace.measure_attention(inputs)  # those of another reply
        assert trace.snapshot().reply == "frog" and trace.snapshot().needed() == found[0].needed()
        assert session.undo() and session.undo()
        list(session.send("hello", sampling=Sampling(max_new_tokens=1)))
        assert trace.snapshot().attention is None  # of what was taken back
        return found


@pytest.fixture(scope="module")
def context() -> Iterator[Any]:
    """Return a browser's context without a network, or skip."""
    with browsing(offline=True) as made:
        yield made


@pytest.fixture
def browser(context: Any) -> Iterator[Any]:
    """Return a tab; in the end it has asked for files alone and reported nothing."""
    tab, wrong, asked = context.new_page(), [], []
    tab.on("pageerror", lambda error: wrong.append(str(error)))
    tab.on("console", lambda line: wrong.append(line.text) if line.type == "error" else None)
    tab.on("request", lambda one: asked.append(one.url))
    yield tab
    tab.close()
    assert wrong == []
    assert asked and all(address.startswith(("file:", "data:image/jpeg;")) for address in asked)


def shown(browser: Any, snapshot: Snapshot, folder: Path) -> None:
    """Open the page of ``snapshot``."""
    path = folder / "report.html"
    path.write_text(render(snapshot), "utf-8")
    browser.goto(path.as_uri())
    browser.locator("html[data-ready]").wait_for(state="attached")


def data_of(text: str) -> dict[str, Any]:
    return json.loads(text.partition('id="data">')[2].partition("</script>")[0])


def numbers(blob: dict[str, Any]) -> np.ndarray:
    """Read a page's packed numbers as its script does: planes of bytes, the lowest first."""
    raw = np.frombuffer(zlib.decompress(base64.b64decode(blob["base64"])), np.uint8)
    planes = np.ascontiguousarray(raw.reshape(blob["width"], -1).T)
    return planes.view(f"<{blob['kind']}").ravel()


def synthetic(layers: int, heads: int, tokens: int, gated: bool = True) -> Snapshot:
    """A trace of random log betas in which a third is kept, and others go after a random time."""
    source, rows = np.random.default_rng(0), layers * heads
    row, position = (x.ravel() for x in np.indices((rows, tokens)))
    age = source.exponential(tokens / 16, row.size).astype(np.int64)
    died = np.minimum(position + 1 + age, tokens)
    kept = source.random(row.size) < 1 / 3
    log_beta = -np.exp(source.normal(-5, 3, row.size)).astype(np.float32)
    deaths = np.zeros((~kept).sum(), DEATH)
    order = np.argsort((died * row.size + np.arange(row.size))[~kept])
    for name, values in (("row", row), ("position", position), ("log_beta", log_beta)):
        deaths[name] = values[~kept][order]
    deaths["score"] = source.normal(size=len(deaths))
    record = Record(
        layers,
        heads,
        np.arange(tokens + 1),
        np.full(tokens + 1, rows * tokens // 3),
        np.full(tokens + 1, 2, np.uint8),
        source.integers(0, 1000, tokens),
        np.zeros(tokens, np.uint8),
        deaths,
        died[~kept][order],
        row[kept],
        position[kept],
        log_beta[kept],
    )
    rule = Rule("retention" if gated else "other", 2, 0, 0, 0, np.zeros(rows, np.int64))
    texts = [f" word{at % 997}" for at in range(tokens)]
    return Snapshot(record, rule, texts, [], "dbtrimkv", "256 entries per head", "a model")


@pytest.mark.parametrize(
    ("layers", "said"), [(2, "known where an entry went."), (8, "not shown, for want of room.")]
)
def test_a_page_says_whether_it_has_scores_that_it_cannot_make(layers: int, said: str) -> None:
    data = data_of(render(synthetic(layers, 8, 1024, gated=False)))
    assert ("lastScores" in data["blobs"]) == said.startswith("known")
    assert any(note.endswith(f"recorded: they are {said}") for note in data["notes"])


def test_a_page_asks_for_nothing_and_lets_no_text_out(trace: Trace) -> None:
    text = render(trace.snapshot())
    assert len(text) < 400_000
    policy = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]+)"', text)[0]
    assert policy.startswith("default-src 'none'; img-src data:; script-src 'sha256-")
    assert "unsafe" not in policy
    addresses = set(re.findall(r"""https?://[^"']*|src=["']|href=|@import|url\(|fetch\(""", text))
    assert addresses == {"http://www.w3.org/2000/svg"}  # the name of a namespace
    assert "innerHTML" not in text
    assert text.count("</script>") == 3 and "<b>" not in text
    data = data_of(text)
    assert MARKUP in "".join(data["texts"])
    assert data["notes"] == [] and len(data["frames"]) == 5 and len(data["jpegs"]) == 5


def test_the_same_dialogue_gives_the_same_bytes(
    engine: Engine, trace: Trace, tmp_path: Path
) -> None:
    first = trace.report(tmp_path / "a.html").read_bytes()
    session, again = talk(engine)
    assert again.report(tmp_path / "b.html").read_bytes() == first
    drawn = figures._png(figures._why, trace.snapshot())
    names = [path.name for path in again.figures(tmp_path / "figures")]
    assert (tmp_path / "figures" / "why.png").read_bytes() == drawn
    session.close()
    assert sorted(names) == [
        f"{n}.png" for n in "curves kept pictures rows text tokens why".split()
    ]
    assert all((tmp_path / "figures" / name).read_bytes().startswith(PNG) for name in names)


@BROWSER
def test_more_than_fits_is_left_out_and_said(
    browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that hold least go first; curves stay those of all rows, steps that are shown exact."""
    monkeypatch.setattr(page, "MOST_BYTES", 110_000)
    monkeypatch.setattr(page, "_MOST_STEPS", 500)
    monkeypatch.setattr(page, "_MOST_TOKENS", 900)
    monkeypatch.setattr(page, "_MOST_CELLS", 20_000)
    snapshot = synthetic(8, 4, 1000, gated=False)
    text = render(snapshot)
    data = data_of(text)
    assert len(text) <= 110_000 and len(data["rows"]) < 32
    notes = " ".join(data["notes"])
    assert (
        "of 32 heads (layer, KV head) are shown" in notes
        and "500 of 1,001 steps are shown" in notes
    )
    assert "The first 100 tokens are not shown" in notes
    shown(browser, snapshot, tmp_path)
    step = 300
    at = int(np.searchsorted(snapshot.record.seen, data["seen"][step]))
    whole = [row.tolist() for layer in snapshot.record.retained(at) for row in layer]
    wanted = [[token for token in whole[row] if token >= 100] for row in data["rows"]]
    assert browser.evaluate(f"mmkv.keptAt({step})") == wanted
    held = browser.evaluate(f"(mmkv.go({step}), document.getElementById('held').textContent)")
    assert held.startswith(f"{sum(map(len, whole)):,} entries")
    # What competes with an entry: how many rows do, of which some are not on the page.
    rows = len(data["rows"])
    why = browser.evaluate("mmkv.why(0, [...mmkv.gone].findIndex((end) => end && end < 400)).text")
    assert (
        "32 heads compete there" in why and f"entries of the {rows} heads shown afterwards" in why
    )


def test_a_page_never_takes_more_than_it_may(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    """With texts that fill it, the oldest tokens go, and pictures at last."""
    whole = render(trace.snapshot())
    fixed = len(page._page({}))
    snapshot = replace(synthetic(2, 1, 1000), texts=["\u6f22" * 8] * 1000)
    long = render(snapshot)
    monkeypatch.setattr(page, "MOST_BYTES", fixed + 20_000)
    text = render(snapshot)
    assert len(long) > 60_000 and len(text) <= fixed + 20_000
    data = data_of(text)
    assert 0 < data["first"] == 1000 - len(data["texts"]) < 1000
    assert f"The first {data['first']} tokens are not shown." in data["notes"]
    monkeypatch.setattr(page, "MOST_BYTES", fixed + 6_000)
    text = render(trace.snapshot())
    assert len(whole) > len(page._page({})) + 6_000 >= len(text)
    assert data_of(text)["frames"] == []
    assert "Pictures and video frames are not shown." in data_of(text)["notes"]
    # Beside another run, both together; or it is said that they do not fit.
    other = data_of(whole) | {"other": None}
    monkeypatch.setattr(page, "MOST_BYTES", len(whole) + 8_000)
    both = render(snapshot, other)
    assert len(both) <= page.MOST_BYTES and data_of(both)["other"]["reply"] == other["reply"]
    assert data_of(both)["first"] > 0
    monkeypatch.setattr(page, "MOST_BYTES", fixed + 6_000)
    with pytest.raises(InputError, match="leaves no room"):
        render(snapshot, other)


def test_the_headline_says_what_the_session_holds_and_the_model_looks_at(
    asked: tuple[Snapshot, list[list[Any]], dict[str, Any]],
) -> None:
    """Against what the session retained, and the attention that transformers computes."""
    from transformers import AutoModelForImageTextToText

    snapshot, retained, inputs = asked
    model = AutoModelForImageTextToText.from_pretrained(
        bundled_model(), dtype="float32", attn_implementation="eager"
    )
    paid = model(**inputs, output_attentions=True).attentions
    theirs = np.stack([layer[0, :, -1].detach().numpy() for layer in paid])  # of the last token
    theirs = theirs.reshape(snapshot.rows, -1, theirs.shape[-1]).mean(1)  # over its query heads
    assert snapshot.attention is not None
    np.testing.assert_allclose(snapshot.attention, theirs, atol=2e-5)

    frame = snapshot.frames[0]
    frog = frame.start + 1 * frame.stride + 2
    holding = np.array([frog in row.tolist() for layer in retained for row in layer])
    entries = sum(len(row) for layer in retained for row in layer)
    freed = round(100 * (1 - entries / (snapshot.tokens * snapshot.rows)))
    assert 0 < holding.sum() < snapshot.rows and snapshot.needed() == frog
    assert snapshot.headline() == (
        f"The answer “frog” looked most at row 2, column 3 of picture 1: {holding.sum()} of "
        f"{snapshot.rows} heads still hold it. {freed} % of the memory was freed."
    )
    share = round(100 * theirs[holding, frog].sum() / theirs[:, frog].sum())
    assert snapshot.detail().endswith(f"the heads that still hold it pay {share} % of that.")
    # A word may be several tokens; the marks of a template are none.
    tokens = ["In", "<s>", "user", "\n", " Ger", "man", "y", " big", "?", "<s>"]
    record = replace(synthetic(1, 1, 10).record, modality=np.zeros(10, np.uint8))
    paid = np.array([[30, 29, 28, 27, 4, 5, 6, 7, 25, 24]], np.float32)
    said = Snapshot(record, snapshot.rule, tokens, [], "", "", "", attention=paid)
    assert said.needed() == 7 and said.name(7) == "the word “big”"
    assert said.name(5) == "the “man” of “Germany”"
    assert replace(said, attention=paid[:, :2]).needed() is None
    # Without what was looked at, and where nothing went, it says what is known.
    count = snapshot.fates[0][frame.start : frame.start + 16]
    assert replace(snapshot, attention=None).headline() == (
        f"At the end {(count > 0).sum()} of 16 patches are still held by some head. {freed} % of "
        "the memory was freed."
    )
    with bundled(budget=64).session() as session, session.trace() as trace:
        list(session.send("hello"))
        assert trace.snapshot().headline().endswith("held by some head. Nothing was forgotten.")


def test_colours_and_lists_say_the_same_of_every_token(
    browser: Any, trace: Trace, tmp_path: Path
) -> None:
    """At every step: how many heads hold it, as the record has it; no list contradicts a word."""
    snapshot = trace.snapshot()
    shown(browser, snapshot, tmp_path)
    found = browser.evaluate("""Array.from({ length: mmkv.steps }, (_, step) => {
        mmkv.go(step);
        const listed = (id) => [...document.querySelectorAll(`#${id} [data-token]`)]
            .map((one) => [+one.dataset.token, +one.dataset.level]);
        const words = [...document.querySelectorAll("#conversation span")]
            .map((one) => [+one.dataset.from, +one.dataset.to, +one.dataset.level]);
        const fates = mmkv.run.texts.map((_, p) => mmkv.fate(step, -1, p));
        return { stayed: listed("stayed"), went: listed("went"), words, fates };
    })""")
    for step, page_has in enumerate(found):
        kept = [row for layer in snapshot.record.retained(step) for row in layer]
        holding = np.bincount(np.concatenate(kept), minlength=snapshot.tokens)
        read = snapshot.record.seen[step]
        levels = np.select(
            [holding == 0, 2 * holding < len(kept), holding < len(kept)], [0, 1, 2], 3
        )
        assert [one["held"] for one in page_has["fates"][:read]] == holding[:read].tolist()
        assert [one["level"] for one in page_has["fates"]] == [
            levels[p] if p < read else -1 for p in range(snapshot.tokens)
        ]
        colour = {p: level for p, to, level in page_has["words"] if to == p + 1}
        for name in ("stayed", "went"):
            for token, level in page_has[name]:
                assert level == levels[token] == colour.get(token, level)
                assert (level > 0) == (name == "stayed")
        wanted = sorted(holding[holding > 0].tolist(), reverse=True)[:10]
        assert [holding[token] for token, _ in page_has["stayed"]] == wanted


def test_why_opens_with_the_most_telling_loss(
    browser: Any, asked: tuple[Snapshot, Any, Any], trace: Trace, tmp_path: Path
) -> None:
    """What the answer looked at most, in the head that did so; or else the strongest that went."""
    snapshot, said = asked[0], "document.getElementById('why').textContent"
    shown(browser, snapshot, tmp_path)
    token = snapshot.needed()
    assert token is not None and snapshot.attention is not None
    lost = snapshot.record.deaths["row"][snapshot.record.deaths["position"] == token]
    layer, head = divmod(int(max(lost, key=lambda row: snapshot.attention[row, token])), 3)
    assert browser.evaluate(said).startswith(
        f"The answer looked most at this. Layer {layer}, KV head {head} lost the patch at row 2, "
        "column 3 of picture 1 at step "
    )
    assert browser.locator("#score path").count() == 2
    shown(browser, trace.snapshot(), tmp_path)
    deaths = trace.snapshot().record.deaths
    row = deaths["row"][deaths["log_beta"].argmax()]
    assert f"Layer {row // 3}, KV head {row % 3} lost" in browser.evaluate(said)


@BROWSER
def test_the_timeline_goes_where_it_is_clicked_and_plays_to_the_end(
    browser: Any, asked: tuple[Snapshot, Any, Any], tmp_path: Path
) -> None:
    shown(browser, asked[0], tmp_path)
    drawn = browser.locator("#timeline svg")
    box, when = drawn.bounding_box(), "document.getElementById('when').textContent"
    drawn.click(position={"x": box["width"] - 20, "y": 100})
    assert browser.evaluate(when).startswith("4 of 4")
    drawn.click(position={"x": 70, "y": 100})
    assert browser.evaluate(when) == "0 of 4: 0 tokens read, start"
    browser.evaluate("scrollTo(0, 2000)")
    browser.locator("#controls.docked").wait_for()
    browser.locator("#play").click()
    browser.locator("#when", has_text="4 of 4").wait_for()
    assert browser.locator("#play").text_content() == "Play"
    assert browser.evaluate("document.getElementById('held').textContent").startswith("144 ")


def test_the_picture_and_the_timeline_can_be_saved(
    browser: Any, asked: tuple[Snapshot, Any, Any], tmp_path: Path
) -> None:
    from xml.etree import ElementTree

    from PIL import Image

    shown(browser, asked[0], tmp_path)
    for name in ("picture", "timeline"):
        for kind in ("svg", "png"):
            with browser.expect_download() as given:
                browser.locator(f'[data-save="{name}.{kind}"]').click()
            assert given.value.suggested_filename == f"{name}.{kind}"
            path = tmp_path / f"{name}.{kind}"
            given.value.save_as(path)
        root = ElementTree.parse(tmp_path / f"{name}.svg").getroot()
        texts = ["".join(one.itertext()) for one in root.iter("{http://www.w3.org/2000/svg}text")]
        assert texts[-1].startswith("dbtrimkv, 8 entries per head; step 4 of 4, 144 entries held")
        wanted = {"picture": {"4/18", "9/18"}, "timeline": {"entries held", "step", "image"}}
        assert wanted[name] <= set(texts)
        with Image.open(tmp_path / f"{name}.png") as image:
            assert image.size == (2 * int(root.get("width", "")), 2 * int(root.get("height", "")))
            assert len(image.convert("RGB").getcolors(2**20)) > 10  # something is drawn


def test_two_runs_lie_side_by_side(
    browser: Any, asked: tuple[Snapshot, Any, Any], tmp_path: Path
) -> None:
    """Each with its own policy, budget and kept set; a page is the record of its run."""
    scene, question = asset("scene.png"), "what is at row 2, column 3?"
    engine = bundled(policy="snapkv", budget=5)
    with engine.session() as session, session.trace() as trace:
        list(session.send(question, images=[scene]))
        theirs = [row.tolist() for layer in session.retained() for row in layer]
        trace.report(tmp_path / "other.html")
    other = read_page(tmp_path / "other.html")
    text = render(asked[0], other)
    (tmp_path / "report.html").write_text(text, "utf-8")
    browser.goto((tmp_path / "report.html").as_uri())
    browser.locator("html[data-ready]").wait_for(state="attached")
    assert browser.evaluate("mmkv.other.keptAt(mmkv.other.steps - 1)") == theirs
    ours = [row.tolist() for layer in asked[1] for row in layer]
    assert browser.evaluate("mmkv.keptAt(mmkv.steps - 1)") == ours
    assert browser.locator("#otherFigure svg, #stage .picture svg").count() == 2
    assert browser.locator("#theirs").text_content().startswith("snapkv, 5 entries per head: “")
    first = browser.locator("#differing tbody tr").first.locator("td").all_text_contents()
    token = int(re.findall(r"token (\d+)", first[0])[0])
    both = [sum(token in row for row in kept) for kept in (ours, theirs)]
    assert first[1:] == [f"{count} of 18" for count in both]
    gaps = [abs(sum(p in row for row in ours) - sum(p in row for row in theirs)) for p in range(35)]
    assert abs(both[0] - both[1]) == max(gaps)
    other_format, endless = text.replace('"format":2', '"format":1'), 'id="data">' + "[" * 100_000
    for wrong in ("<title>What the cache kept</title>", other_format, endless):
        (tmp_path / "wrong.html").write_text(wrong)
        with pytest.raises(InputError, match="no page of this version's mmkv explain"):
            read_page(tmp_path / "wrong.html")


@pytest.mark.parametrize("scheme", [pytest.param("light", marks=BROWSER), "dark"])
def test_everybody_can_use_the_page(
    scheme: str, browser: Any, trace: Trace, asked: tuple[Snapshot, Any, Any], tmp_path: Path
) -> None:
    """No serious finding of axe-core on a phone or a wide screen; words explain themselves."""
    (tmp_path / "other.html").write_text(render(asked[0]), "utf-8")
    text = render(trace.snapshot(), read_page(tmp_path / "other.html"))
    (tmp_path / "report.html").write_text(text, "utf-8")
    browser.emulate_media(color_scheme=scheme)
    browser.goto((tmp_path / "report.html").as_uri())
    browser.locator("html[data-ready]").wait_for(state="attached")
    browser.locator("summary").click()
    for width in (390, 1440):
        assert axe_findings(browser, width=width, scheme=scheme) == []
        assert browser.evaluate("document.documentElement.scrollWidth") == width
    colour = "getComputedStyle(document.body).backgroundColor"
    seen = browser.evaluate(colour)
    assert seen == {"light": "rgb(255, 255, 255)", "dark": "rgb(24, 24, 23)"}[scheme]
    tip = browser.locator("#tip")
    for show in ("hover", "focus"):
        term = browser.locator('[data-term="cut"]')
        getattr(term, show)()
        assert "who" in tip.text_content() and tip.is_visible()
        browser.keyboard.press("Escape")
        assert tip.is_hidden()
    while browser.evaluate(colour) == seen:  # the switch goes round: system, light, dark
        browser.locator("[data-theme-switch]").click()
    fill = "document.querySelector('#timeline rect').getAttribute('fill')"
    assert browser.evaluate(fill) != seen and browser.evaluate(colour) != seen


def test_a_page_holds_when_every_entry_went_and_its_log_beta(trace: Trace) -> None:
    """Read as the page's script reads them, without a browser."""
    data, snapshot = data_of(render(trace.snapshot())), trace.snapshot()
    shape = len(data["rows"]), len(data["texts"])
    life = numbers(data["blobs"]["lives"]).reshape(shape).astype(int)
    seen = np.asarray(data["seen"])
    born = np.searchsorted(seen, np.arange(shape[1]), side="right")
    gone = seen[np.clip(born + life - 1, 0, len(seen) - 1)]
    gone = np.where(life == 0, 0, np.where(life == 65535, shape[1] + 1, gone))
    moments = [(step, n) for step, n in enumerate(snapshot.record.seen.tolist()) if n]
    for step, after in moments[:: max(1, len(moments) // 5)]:
        kept = [row.tolist() for layer in trace.retained(step) for row in layer]
        there = (np.arange(shape[1]) < after) & (gone > after)
        assert [np.flatnonzero(row).tolist() for row in there] == [kept[r] for r in data["rows"]]
    assert data["range"] is None  # so little is written as it stands
    beta = numbers(data["blobs"]["beta"]).reshape(shape)
    row, token, wanted = (snapshot.record.deaths[k] for k in ("row", "position", "log_beta"))
    place = {row: at for at, row in enumerate(data["rows"])}
    found = [beta[place[r], t] for r, t in zip(row.tolist(), token.tolist(), strict=True)]
    assert len(found) > 100
    np.testing.assert_allclose(found, wanted, rtol=0.01)


@pytest.mark.parametrize("number", range(len(DIALOGUES)))
def test_a_browser_keeps_what_the_oracle_keeps(number: int, browser: Any, tmp_path: Path) -> None:
    """At 20 random steps, with no request but for the page itself and nothing on the console."""
    found = recorded(number)
    shown(browser, found.snapshot, tmp_path)
    steps = range(1, len(found.kept) + 1)
    chosen = random.Random(number).sample(steps, min(20, len(steps)))
    got = browser.evaluate(f"{chosen}.map((step) => mmkv.keptAt(step))")
    wanted = [[r.tolist() for layer in found.kept[s - 1] for r in layer] for s in chosen]
    assert got == wanted
    dead = found.snapshot.record.deaths[-1]
    above = browser.evaluate(f"mmkv.why({dead['row']}, {dead['position']}).above")
    ours = found.snapshot.just_above(int(found.snapshot.record.died_at[-1]), int(dead["row"]))
    assert [(one["row"], one["p"]) for one in above] == [(row, token) for row, token, _ in ours]
    scores = [one["score"] for one in above]
    np.testing.assert_allclose(scores, [score for *_, score in ours], rtol=1e-4)
    assert ours or found.snapshot.rule.kernel == "other"


def test_a_patch_changes_exactly_when_it_goes(browser: Any, trace: Trace, tmp_path: Path) -> None:
    """Every patch of a picture and of a video's frame, in one row, at every step."""
    snapshot = trace.snapshot()
    shown(browser, snapshot, tmp_path)
    _, position, _, _, died = snapshot.entries
    row, steps, changes = 4, len(snapshot.record.seen), 0
    for number, frame in ((0, snapshot.frames[0]), (2, snapshot.frames[2])):
        seen = browser.evaluate(f"""(() => {{
            const rows = document.getElementById("row");
            rows.value = {row};
            rows.dispatchEvent(new Event("change"));
            mmkv.pictures.show({number});
            return Array.from({{ length: mmkv.steps }}, (_, step) => {{
                mmkv.go(step);
                const patches = mmkv.pictures.patches;
                return patches.map(({{ rect }}) => rect.getAttribute("fill-opacity"));
            }});
        }})()""")
        for cell in range(frame.high * frame.wide):
            token = frame.start + cell
            mine = (snapshot.entries[0] == row) & (position == token)
            born, gone = int(snapshot.entries[3][mine][0]), int(died[mine][0])
            alpha = [pixels[cell] for pixels in seen]
            found = {step for step in range(1, steps) if alpha[step] != alpha[step - 1]}
            assert found == {step for step in (born, gone) if step < steps}, (cell, alpha)
            changes += gone < steps
    assert changes > 10


def test_the_slider_answers_to_keys_and_texts_stay_texts(
    browser: Any, trace: Trace, tmp_path: Path
) -> None:
    shown(browser, trace.snapshot(), tmp_path)
    last = browser.evaluate("mmkv.steps") - 1
    at = "+document.getElementById('when').textContent.split(' ')[0]"
    places = []
    for focused in ("body", "#time"):  # the arrows work wherever nothing has the focus
        if focused != "body":
            browser.locator(focused).focus()
        for key in ("ArrowLeft", "ArrowLeft", "Home", "ArrowRight"):
            browser.keyboard.press(key)
            places.append(browser.evaluate(at))
        browser.keyboard.press("End")
    assert places == [last - 1, last - 2, 0, 1] * 2
    browser.keyboard.press("End")
    assert browser.evaluate(at) == last
    assert MARKUP in browser.evaluate("document.getElementById('conversation').textContent")
    assert browser.evaluate("document.querySelectorAll('b').length") == 0
    budget = browser.evaluate("document.getElementById('budgets').textContent")
    assert "144 to 90 entries" in budget


def test_clicks_and_keys_ask_why(browser: Any, trace: Trace, tmp_path: Path) -> None:
    shown(browser, trace.snapshot(), tmp_path)
    why = browser.locator("#why")
    browser.locator("#conversation span").first.click()
    assert "lost token 0 " in why.text_content() and "Its score was" in why.text_content()
    assert "not known" not in why.text_content()
    assert browser.locator("#above tbody tr").count() == 5
    picture = browser.locator("#stage svg").first
    box = picture.bounding_box()
    picture.click(position={"x": box["width"] - 2, "y": 2})
    for key, place in (
        ("", "row 1, column 4"),
        ("ArrowDown", "row 2, column 4"),
        ("ArrowLeft", "row 2, column 3"),
    ):
        if key:
            picture.press(key)
        assert f"the patch at {place} of picture 1" in why.text_content()
    browser.locator("#conversation").press("ArrowRight")  # from the picture to the text behind it
    said = why.text_content()
    browser.locator("#map").press("ArrowDown")
    assert (
        "token" in said and why.text_content().partition(" lost")[0] != said.partition(" lost")[0]
    )


@BROWSER
def test_a_page_of_any_policy_opens(browser: Any, tmp_path: Path) -> None:
    """Also where scores do not follow from the record, and where nothing is evicted."""
    for policy in ("full", "h2o", "wgkv:window=4"):
        options = {"gates": "random"} if policy.startswith("wgkv") else {}
        engine = bundled(policy=policy, **options)
        session, trace = talk(engine)
        shown(browser, trace.snapshot(), tmp_path)
        wanted = [row.tolist() for layer in session.retained() for row in layer]
        assert browser.evaluate("mmkv.keptAt(mmkv.steps - 1)") == wanted
        browser.evaluate("document.querySelectorAll('#conversation span')[4].click()")
        if policy == "h2o":
            assert figures._png(figures._why, trace.snapshot()).startswith(PNG)
        session.close()
