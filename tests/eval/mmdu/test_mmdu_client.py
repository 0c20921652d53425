"""Asking a judge: reading its scores, waiting out its troubles, what is sent to it."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from PIL import Image

from engine.errors import InputError
from eval.mmdu import client
from eval.mmdu.client import Endpoint, JudgeClient, NoVerdictError
from eval.mmdu.cost import data_uri, estimate, picture_tokens
from eval.mmdu.http import retry_after
from eval.mmdu.rubric import SCORES, UnreadableScoresError, read_scores
from tests.support.fake_judge import FakeJudge, grades


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No long waits, and no proxy between this process and its own server."""
    monkeypatch.setattr(client, "FIRST_WAIT_S", 0.02)
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
def test_nothing_else_counts_as_scores(reply: str, kind: str) -> None:
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


@pytest.mark.parametrize("trouble", ["fault", "stall", "trickle", "drop", "no completion", "limit"])
def test_passing_trouble_is_waited_out(trouble: str) -> None:
    with FakeJudge(lambda _, before: trouble if before < 2 else "ok") as fake:
        endpoint = Endpoint(fake.url, "m", retries=2, timeout=0.5)
        assert read_scores(JudgeClient(endpoint).ask("p", []).text) == grades("p")
        assert fake.asked["p"] == 3
        with pytest.raises(NoVerdictError, match="1 times"):
            JudgeClient(Endpoint(fake.url, "m", retries=0, timeout=0.5)).ask("other", [])


def test_a_rate_limit_holds_every_thread_as_long_as_it_asks() -> None:
    notes: list[str] = []
    with FakeJudge(lambda _, before: "ok" if before else "limit", retry_after="0.4") as fake:
        asking = JudgeClient(Endpoint(fake.url, "m"), notes.append)
        asking.ask("p", [])
        assert fake.times[1] - fake.times[0] >= 0.4 and "trying again" in notes[0]
        started = time.monotonic()
        asking._quiet_until = started + 0.3  # as another thread's limit leaves it
        asking.ask("p", [])
        assert time.monotonic() - started >= 0.3


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


def test_addresses_and_keys_that_cannot_be() -> None:
    assert Endpoint("http://h/v1/", "m").url == "http://h/v1/chat/completions"
    assert Endpoint("http://h/v1/chat/completions", "m").url == "http://h/v1/chat/completions"
    for base, key in (("localhost:8000", None), ("https://", None), ("http://h", "a\nb")):
        with pytest.raises(InputError):
            Endpoint(base, "m", key)
    assert "secret" not in repr(Endpoint("http://h", "m", "secret"))
