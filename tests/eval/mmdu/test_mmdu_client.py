"""The judge's client: parsing of scores, retries, and requests."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from mmkv.engine.errors import InputError
from mmkv.eval.mmdu.client import (
    Endpoint,
    JudgeAnswer,
    JudgeClient,
    NoVerdictError,
    post,
    retry_after,
)
from mmkv.eval.mmdu.judge import data_uri, estimate, picture_tokens
from mmkv.eval.mmdu.rubric import SCORES, UnreadableScoresError, read_scores
from tests.support.clock import Clock
from tests.support.fake_judge import FakeJudge, grades


@pytest.fixture(autouse=True)
def direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """No proxy between this process and its own server."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")


GOOD = dict.fromkeys(SCORES, 4)


@pytest.mark.parametrize(
    "reply",
    [
        f"Well. {GOOD}",
        f"{{'Creativity': 1}} no, wait: {GOOD} Done.",
        f"```json\n{json.dumps(GOOD, indent=2)}\n```",
        str({name.lower().replace(" ", "_"): 4 for name in SCORES}),
    ],
)
def test_scores_are_read_from_the_last_dictionary(reply: str) -> None:
    assert read_scores(reply) == GOOD


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        ("", "no scores"),
        ("I'm sorry, I can't help with that.", "no scores"),
        ("7 7 } {", "no scores"),
        (f"{GOOD} {{}}", "bad scores"),
        (str({**GOOD, "Richness": 11}), "bad scores"),
        (str({**GOOD, "Richness": 0}), "bad scores"),
        (str({**GOOD, "Richness": 7.5}), "bad scores"),
        (str({**GOOD, "Richness": True}), "bad scores"),
        (str({**GOOD, "Richness": "9"}), "bad scores"),
        ("{'Creativity': 5}", "bad scores"),
        ("{1, 2}", "bad scores"),
        ("{[]: 1}", "bad scores"),
        ("{'Creativity': __import__('os').abort()}", "bad scores"),
        ("{" + "(" * 5000 + "}", "bad scores"),
        ("{" + "-" * 1900 + "1: 1}", "bad scores"),
    ],
)
def test_other_replies_do_not_count_as_scores(reply: str, kind: str) -> None:
    with pytest.raises(UnreadableScoresError) as caught:
        read_scores(reply)
    assert caught.value.kind == kind


def test_retry_after_is_a_number_or_a_date() -> None:
    assert retry_after("3") == 3.0 and retry_after("-3") == 0.0
    assert retry_after("Wed, 21 Oct 2015 07:28:00 GMT") == 0.0
    assert retry_after(None) is retry_after("soon") is retry_after("nan") is None
    assert retry_after("Wed, 21 Oct 2099 07:28:00 GMT") > 1e9  # type: ignore[operator]


def test_tokens_of_a_picture() -> None:
    """The two examples of OpenAI's documentation: 765 tokens and 1,105."""
    assert (picture_tokens(1024, 1024), picture_tokens(2048, 4096)) == (765, 1105)
    assert picture_tokens(32, 32) == 255


def client_of(fake: FakeJudge, clock: Clock, **settings: Any) -> JudgeClient:
    return JudgeClient(Endpoint(fake.url, "m", **settings), now=clock.now, wait=clock.wait)


# A client waits this long for a reply that never ends. A reply that a busy machine holds up as
# long is asked for again, which the tests allow: nothing depends on how long anything takes.
IMPATIENT = 0.5


@pytest.mark.parametrize("problem", ["fault", "stall", "trickle", "drop", "no completion", "limit"])
def test_temporary_errors_are_retried(problem: str) -> None:
    endless, clock = problem in ("stall", "trickle"), Clock()
    with FakeJudge(lambda _, before: problem if before < 2 else "ok") as fake:
        asking = (
            client_of(fake, clock, retries=100, timeout=IMPATIENT)
            if endless
            else client_of(fake, clock, retries=2)
        )
        assert read_scores(asking.ask("p", []).text) == grades("p")
        assert fake.asked["p"] == 3 or (endless and fake.asked["p"] > 3)
        assert len(clock.waits) == 2 or (endless and len(clock.waits) > 2)
        patience = {"timeout": IMPATIENT} if endless else {}
        with pytest.raises(NoVerdictError, match="1 times"):
            client_of(fake, clock, retries=0, **patience).ask("other", [])


def test_waits_grow_with_jitter_up_to_the_longest() -> None:
    """Between half and all of 1, 2, 4 ... seconds, and of 60 from the seventh on."""
    clock = Clock()
    with FakeJudge(lambda _, before: "fault" if before < 9 else "ok") as fake:
        client_of(fake, clock, retries=9).ask("p", [])
    longest = [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert len(clock.waits) == len(longest)
    for wait, most in zip(clock.waits, longest, strict=True):
        assert most / 2 <= wait <= most
    assert len({wait / most for wait, most in zip(clock.waits, longest, strict=True)}) > 1


def test_a_slow_reply_is_abandoned_at_its_timeout() -> None:
    """By the clock, though every read succeeds: each takes 25 s of the 60."""
    ticks = itertools.count(0.0, 25.0)
    with FakeJudge(lambda *_: "trickle") as fake:
        url = Endpoint(fake.url, "m").url
        answer = post(url, prompt_of("p"), {}, 60.0, now=lambda: next(ticks))
    assert answer == JudgeAnswer(0, problem="no answer within 60 s")
    assert next(ticks) == 100.0  # begun at 0, read at 25, 50 and, too late, 75


def prompt_of(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": text}]}]}


def test_a_rate_limit_delays_every_thread() -> None:
    notes: list[str] = []
    clock = Clock()
    first = iter(["limit"])
    with FakeJudge(lambda *_: next(first, "ok"), retry_after="400", now=clock.now) as fake:
        endpoint = Endpoint(fake.url, "m")
        asking = JudgeClient(endpoint, notes.append, now=clock.now, wait=clock.wait)
        # While the first request waits, another thread asks: it has to wait as well.
        clock.meanwhile = lambda: asking.ask("another", [])
        asking.ask("p", [])
        assert fake.asked == {"p": 2, "another": 1}
        began, another, again = fake.times
        assert began == 0 and another == 400
        # With jitter of up to a second, so that those who waited do not come back together.
        assert 400 < again <= 401 and "HTTP 429" in notes[0] and "trying again in 40" in notes[0]
        assert len(clock.waits) == 2 and len(notes) == 1


def test_stopping_ends_all_waiting() -> None:
    """A thread that a limit of 10 minutes holds ends at once, without another request."""
    with FakeJudge(lambda *_: "limit", retry_after="600") as fake:
        asking = JudgeClient(Endpoint(fake.url, "m"), lambda _: asking.stop())
        with pytest.raises(NoVerdictError, match="stopped"):
            asking.ask("p", [])
        assert fake.asked["p"] == 1


def test_pictures_are_sent_as_they_are_where_the_web_knows_them(tmp_path: Path) -> None:
    picture = Image.new("RGB", (600, 40), "red")
    for name, start in (("a.png", "png"), ("b.jpg", "jpeg"), ("c.webp", "webp"), ("d.bmp", "png")):
        picture.save(tmp_path / name)
        assert data_uri(tmp_path / name).startswith(f"data:image/{start};base64,")
    (tmp_path / "no.png").write_bytes(b"no")
    for use in (data_uri, lambda path: estimate([("", [path])])):
        with pytest.raises(InputError, match="not a readable picture"):
            use(tmp_path / "no.png")
    cost = estimate([("x" * 400, [tmp_path / "a.png"])] * 3)
    assert (cost.calls, cost.input_tokens) == (3, 3 * (100 + 85 + 2 * 170))
    assert cost.bytes == 3 * len(data_uri(tmp_path / "a.png").partition(",")[2])
    assert "about $" in cost.line((1.0, 2.0)) and "$" not in cost.line()


def test_invalid_addresses_and_keys() -> None:
    assert Endpoint("http://h/v1/", "m").url == "http://h/v1/chat/completions"
    assert Endpoint("http://h/v1/chat/completions", "m").url == "http://h/v1/chat/completions"
    for base, key in (("localhost:8000", None), ("https://", None), ("http://h", "a\nb")):
        with pytest.raises(InputError):
            Endpoint(base, "m", key)
    assert "secret" not in repr(Endpoint("http://h", "m", "secret"))
