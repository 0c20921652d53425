"""Judging MMDU: the client, and a fake judge that answers, refuses, stalls and limits."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import TYPE_CHECKING, Any

import pytest
from PIL import Image

from mmkv.engine.errors import InputError
from mmkv.eval.mmdu import client
from mmkv.eval.mmdu.client import (
    Endpoint,
    JudgeAnswer,
    JudgeClient,
    NoVerdictError,
    post,
    retry_after,
)
from mmkv.eval.mmdu.data import AnswerFolder, Dialogue, read_benchmark
from mmkv.eval.mmdu.judge import data_uri, estimate, picture_tokens
from mmkv.eval.mmdu.rubric import SCORES, judge_prompt, read_scores
from mmkv.resources import bundled_dialogues

if TYPE_CHECKING:
    from tests.support.cli_fixtures import Ran

pytest_plugins = ("tests.support.cli_fixtures",)


class Clock:
    """Time that passes only when somebody waits, and then at once.

    ``waits``: seconds of every wait. ``meanwhile``: called at the start of the next wait.
    """

    def __init__(self) -> None:
        self.time = 0.0
        self.waits: list[float] = []
        self.meanwhile: Callable[[], object] | None = None

    def now(self) -> float:
        return self.time

    def wait(self, seconds: float) -> None:
        started = self.time
        self.waits.append(seconds)
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile()
        self.time = max(self.time, started + seconds)


# (text of the prompt, how often it was asked before) -> what _Handler does: "ok", "stall" ...
Behaviour = Callable[[str, int], str]


def grades(prompt: str) -> dict[str, int]:
    """Return scores from 1 to 10 that depend on nothing but the prompt."""
    digest = hashlib.sha256(prompt.encode()).digest()
    return {name: 1 + digest[index] % 10 for index, name in enumerate(SCORES)}


class FakeJudge:
    """``with FakeJudge(behaviour) as judge:`` serves at ``judge.url``.

    ``asked``: prompts and how often each came. ``bodies``, ``keys``, ``times``: of each request.
    ``now``: the clock of ``times``. What stalls or trickles does so until the judge closes.
    """

    def __init__(
        self,
        behaviour: Behaviour = lambda prompt, before: "ok",
        retry_after: str = "0.05",
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.behaviour, self.retry_after, self.now = behaviour, retry_after, now
        self.asked: Counter[str] = Counter()
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.times: list[float] = []
        self.lock = threading.Lock()
        self.closing = threading.Event()
        judge = self

        class Handler(_Handler):
            fake = judge

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1"

    def __enter__(self) -> FakeJudge:
        # A short poll, for shutdown() waits for the next one.
        serve = {"poll_interval": 0.01}
        threading.Thread(target=self.server.serve_forever, kwargs=serve, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.closing.set()
        self.server.shutdown()
        self.server.server_close()


class _Handler(BaseHTTPRequestHandler):
    fake: FakeJudge

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        raise AssertionError("a POST must never become a GET")

    def do_POST(self) -> None:
        fake = self.fake
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = body["messages"][-1]["content"][0]["text"]
        with fake.lock:
            before = fake.asked[prompt]
            fake.asked[prompt] += 1
            fake.bodies.append(body)
            fake.keys.append(self.headers.get("Authorization"))
            fake.times.append(fake.now())
        action = fake.behaviour(prompt, before) if self.path.endswith("/completions") else "lost"
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # nobody waits any more
            self._act(action, prompt)

    def _act(self, action: str, prompt: str) -> None:
        scores = grades(prompt)
        refusal = {"message": {"content": None, "refusal": "I will not."}, "finish_reason": "stop"}
        filtered = {"message": {"content": None}, "finish_reason": "content_filter"}
        good = f"Creativity: it is {{so}}. All considered:\n{scores}\n"
        texts = {
            "ok": good,
            "garbage": "<<<<< 7 7 7 } {",
            "plain refusal": "I'm sorry, I can't help with that.",
            "too high": str({**scores, "Richness": 11}),
            "fraction": str({**scores, "Overall Score": 7.5}),
            "missing": str({"Creativity": 5}),
            "code": "{'Creativity': __import__('os').getpid()}",
            "yes": "I say: Yes.",
            "no": "no",
        }
        if action in texts:
            message = {"message": {"role": "assistant", "content": texts[action]}}
            self._send(200, _completion({**message, "finish_reason": "stop"}))
        elif action == "filter":
            self._send(200, _completion(filtered if len(prompt) % 2 else refusal))
        elif action == "filter 400":
            self._send(400, _error("blocked by policy", "content_filter"))
        elif action == "stall":
            self.fake.closing.wait()
        elif action == "trickle":
            self.send_response(200)
            self.send_header("Content-Length", "1000000")
            self.end_headers()
            while not self.fake.closing.wait(0.02):
                self.wfile.write(b" ")
        elif action == "drop":
            self.close_connection = True
        elif action == "redirect":
            self._send(302, {}, {"Location": "http://127.0.0.1:9/elsewhere"})
        elif action == "come back later":
            self._send(429, _error("rate limit"), {"Retry-After": "601"})
        elif action == "limit":
            self._send(429, _error("rate limit"), {"Retry-After": self.fake.retry_after})
        elif action == "no completion":
            self._send(200, {"hello": "I am a proxy"})
        else:
            status = {"fault": 501, "denied": 401, "quota": 429, "lost": 404, "rejected": 400}
            code = "insufficient_quota" if action == "quota" else "trouble"
            key = self.headers.get("Authorization", "").removeprefix("Bearer ")
            self._send(status[action], _error(f"{action}, key {key}", code))

    def _send(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)


def _completion(choice: dict[str, Any]) -> dict[str, Any]:
    return {"choices": [choice], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}


def _error(message: str, code: str = "trouble") -> dict[str, Any]:
    return {"error": {"message": message, "code": code}}


# The judge's client: parsing of scores, retries, and requests.


@pytest.fixture(autouse=True)
def direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """No proxy between this process and its own server, and no key of somebody's."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def test_retry_after_is_a_number_or_a_date() -> None:
    assert retry_after("3") == 3.0 and retry_after("-3") == 0.0
    assert retry_after("Wed, 21 Oct 2015 07:28:00 GMT") == 0.0
    assert retry_after(None) is retry_after("soon") is retry_after("nan") is None
    assert retry_after("Wed, 21 Oct 2099 07:28:00 GMT") > 1e9  # type: ignore[operator]


def test_tokens_of_a_picture() -> None:
    """The two examples of OpenAI's documentation: 765 tokens and 1,105."""
    assert (picture_tokens(1024, 1024), picture_tokens(2048, 4096)) == (765, 1105)
    assert picture_tokens(32, 32) == 255


@pytest.mark.parametrize(
    ("message", "reason", "text", "refusal"),
    [
        ({"content": "7", "refusal": "no"}, "stop", "7", ""),
        ({"content": "7"}, "content_filter", "7", ""),
        ({"content": ["x", {"text": "7"}, {"text": "8"}]}, "stop", "78", ""),
        ({"content": None}, "content_filter", "", "content filter"),
        ({"refusal": "no"}, "stop", "", "no"),
        ({"content": ""}, "stop", "", ""),
    ],
)
def test_a_text_counts_before_a_refusal(
    message: dict[str, Any], reason: str, text: str, refusal: str
) -> None:
    body = {"choices": [{"message": message, "finish_reason": reason}], "usage": []}
    assert client._read_reply(body) == client.JudgeReply(text, refusal, reason, {})


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (JudgeAnswer(400, {"error": {"message": "no\n such  model"}}), "HTTP 400: no such model"),
        (JudgeAnswer(401, {"error": "no key"}), "HTTP 401: no key"),
        (JudgeAnswer(404, {"message": "gone"}), "HTTP 404: gone"),
        (JudgeAnswer(422, {"detail": "odd"}), "HTTP 422: {'detail': 'odd'}"),
        (JudgeAnswer(500, "x" * 400), f"HTTP 500: {'x' * 300}"),
        (JudgeAnswer(502, ""), "HTTP 502: no further word"),
        (JudgeAnswer(0, problem="refused"), "refused"),
    ],
)
def test_a_servers_own_words(answer: JudgeAnswer, message: str) -> None:
    assert answer.message() == message


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
    for seconds in (30.0, 2.0):  # what another thread is told a little later takes none of it back
        asking._back_off(JudgeAnswer(429, retry_after=seconds), 0)
        clock.time -= clock.waits[-1]
    assert asking._quiet_until == pytest.approx(clock.time + 30)


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


# Judging MMDU with a fake judge that answers, refuses, stalls, limits and misreports.


FOLDER = bundled_dialogues()
DIALOGUES, _ = read_benchmark(FOLDER / "benchmark.json", limit=5)
QUESTIONS = sum(len(dialogue.questions) for dialogue in DIALOGUES)
FIVE = ("--limit", "5")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No long waits by the clock of this machine."""
    monkeypatch.setattr(client, "FIRST_WAIT_S", 0.02)


@pytest.fixture
def answers(tmp_path: Path, quick: None) -> Path:
    """Return the answers that some model could have given."""
    folder = tmp_path / "answers"
    for dialogue in DIALOGUES:
        AnswerFolder(folder).save(dialogue, answers_of(dialogue), [])
    return folder


def answers_of(dialogue: Dialogue) -> list[str]:
    # No two alike, for the fake judge knows a question by its text alone.
    return [f"{answer} ({dialogue.id}, {n})" for n, answer in enumerate(dialogue.references)]


def prompts() -> list[tuple[str, int, str]]:
    return [
        (d.id, turn, judge_prompt(question, reference, answer))
        for d in DIALOGUES
        for turn, (question, reference, answer) in enumerate(
            zip(d.questions, d.references, answers_of(d), strict=True)
        )
    ]


def judge_arguments(answers: Path, url: str, *more: str) -> list[str]:
    usual = "mmdu judge --judge-model fake/judge-1 --answers".split()
    return [*usual, str(answers), "--base-url", url, *FIVE, *more]


def scores(answers: Path) -> dict[str, Any]:
    return json.loads((answers / "judge-fake-judge-1" / "scores.json").read_text())


@pytest.fixture
def judge(mmkv: Callable[..., Ran], answers: Path) -> Callable[..., Ran]:
    return lambda url, *more: mmkv(*judge_arguments(answers, url, "--yes", "--quiet", *more))


@pytest.mark.parametrize(
    ("problem", "says"),
    [
        ("denied", "check the key"),
        ("lost", "--base-url"),
        ("redirect", "refuses: HTTP 302"),
        ("quota", "account is empty"),
        ("come back later", "in 601 s"),
    ],
)
def test_permanent_errors_end_the_run(
    judge: Callable[..., Ran], problem: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "sk-secret\n")
    with FakeJudge(lambda *_: problem) as fake:
        ran = judge(fake.url, "--api-key-env", "MY_KEY", "--workers", "1")
        assert says in ran.error_line() and ran.code == 1
        assert fake.keys == ["Bearer sk-secret"] and "sk-secret" not in ran.err + ran.out


def test_requests_hold_the_prompt_and_all_pictures_of_the_dialogue(
    judge: Callable[..., Ran], answers: Path
) -> None:
    extra = '{"temperature": 0, "max_tokens": null, "max_completion_tokens": 99}'
    with FakeJudge() as fake:
        assert judge(fake.url, "--extra-body", extra).code == 0
    assert sorted(fake.asked) == sorted(text for _, _, text in prompts())
    assert set(fake.asked.values()) == {1} and fake.keys == [None] * QUESTIONS
    by_prompt = {text: next(d for d in DIALOGUES if d.id == name) for name, _, text in prompts()}
    for body in fake.bodies:
        assert body["model"] == "fake/judge-1" and body["max_completion_tokens"] == 99
        assert body["temperature"] == 0 and "max_tokens" not in body
        text, *images = body["messages"][-1]["content"]
        sent = [image["image_url"]["url"].partition(",") for image in images]
        assert {start for start, _, _ in sent} == {"data:image/png;base64"}
        names = by_prompt[text["text"]].images
        assert [base64.b64decode(s) for *_, s in sent] == [(FOLDER / n).read_bytes() for n in names]


def test_both_aggregations_and_the_failures_between_them(
    judge: Callable[..., Ran], answers: Path
) -> None:
    """A judge that fails one in two questions for good, in every way that is a verdict."""
    ways = "garbage,plain refusal,filter,filter 400,too high,fraction,missing,code".split(",")
    place = {text: index for index, (_, _, text) in enumerate(prompts())}
    with FakeJudge(lambda p, _: ways[place[p] // 2 % 8] if place[p] % 2 else "ok") as fake:
        ran = judge(fake.url, "--asks", "2")
    assert ran.code == 0, ran.err
    result = scores(answers)
    kinds = dict(zip(ways, ["no scores"] * 2 + ["refused"] * 2 + ["bad scores"] * 4, strict=True))
    assert result["failures"] == dict(
        sorted(Counter(kinds[ways[i // 2 % 8]] for i in place.values() if i % 2).items())
    )
    good = [grades(text) for text, index in place.items() if index % 2 == 0]
    assert result["judged"] == len(good) == QUESTIONS - 22
    for name in SCORES:
        total = 10 * sum(grade[name] for grade in good)
        assert result["without_failures"][name] == pytest.approx(total / len(good))
        assert result["failures_as_0"][name] == pytest.approx(total / QUESTIONS)
    lines = ran.out.splitlines()
    assert lines[2].startswith("| aggregation | C | R | VP | LC | AA | IRU | Avg | Overall |")
    assert lines[4].endswith(f"| {QUESTIONS} | 22 |") and "failures: 10 bad scores, " in ran.err
    # The benchmark's own statistics, over the files in its own form.
    cells = [
        cell
        for path in sorted((answers / "judge-fake-judge-1" / "dialogues").glob("*.json"))
        for cell in json.loads(path.read_text())
    ]
    official = {name: sum(cell[name] for cell in cells) / len(cells) for name in SCORES}
    assert official == pytest.approx({n: result["without_failures"][n] / 10 for n in SCORES})
    lines = (answers / "judge-fake-judge-1" / "journal.jsonl").read_text().splitlines()[1:]
    for row in map(json.loads, lines):
        assert row["usage"].get("prompt_tokens") in (7 * row["asked"], None)
    # An unreadable reply is asked for again, a filtered one is not.
    counts = [fake.asked[text] for text in place]
    assert counts[0::2] == [1] * (QUESTIONS - 22)
    assert counts[1:17:2] == [2, 2, 1, 1, 2, 2, 2, 2]
    with FakeJudge() as fake:
        assert judge(fake.url, "--asks", "2").code == 0 and not fake.bodies
        assert judge(fake.url, "--asks", "2", "--retry-failed").code == 0
    assert len(fake.bodies) == 22 and scores(answers)["failures"] == {}


@pytest.fixture
def uninterrupted(judge: Callable[..., Ran], answers: Path) -> Iterator[tuple[str, bytes]]:
    """Yield what a run without problem prints and writes; its verdicts are then taken away."""
    with FakeJudge() as fake:
        out = judge(fake.url).out
    folder = answers / "judge-fake-judge-1"
    written = (folder / "scores.json").read_bytes()
    folder.rename(answers.parent / "kept")
    yield out, written
    assert json.loads(written)["judged"] == QUESTIONS


def test_a_judge_that_goes_down_leaves_its_verdicts(
    judge: Callable[..., Ran], answers: Path, uninterrupted: tuple[str, bytes]
) -> None:
    served = iter(["ok"] * 15)
    with FakeJudge(lambda *_: next(served, "fault")) as fake:
        ran = judge(fake.url, "--retries", "1", "--workers", "2")
    assert ran.code == 1 and ran.err.splitlines()[-1].startswith("mmkv: error: the judge gave no")
    assert scores(answers)["failures"] == {"not judged": QUESTIONS - 15}
    ran = judge(fake.url, "--retries", "1")  # nothing listens there any more
    assert "the judge is down" in ran.error_line() and ran.code == 1
    assert scores(answers)["judged"] == 15
    with (answers / "judge-fake-judge-1" / "journal.jsonl").open("a") as file:
        file.write('{"dialogue": "dense-4-0", "turn": 3, "pro')  # as a kill cuts it short
    with FakeJudge() as fake:
        ran = judge(fake.url)
    assert len(fake.bodies) == QUESTIONS - 15 and "already" not in ran.err
    written = (answers / "judge-fake-judge-1" / "scores.json").read_bytes()
    assert (ran.out, written) == uninterrupted


def test_questions_the_judge_refuses_count_as_failures(
    judge: Callable[..., Ran], answers: Path
) -> None:
    """They are named, the others are judged, and the next run asks them again."""
    poison = {prompts()[at][2] for at in (9, 20, 31)}  # 9: the second of the second dialogue
    with FakeJudge(lambda p, _: "rejected" if p in poison else "ok") as fake:
        ran = judge(fake.url)
        assert ran.code == 1 and scores(answers)["judged"] == QUESTIONS - 3
        assert f"failed: dialogue {DIALOGUES[1].id}, question 2: " in ran.err
        assert ran.err.count("HTTP 400") == 3
        assert "| failures as 0 |" in ran.out and "have no verdict" in ran.err.splitlines()[-1]
        fake.behaviour = lambda *_: "ok"
        assert judge(fake.url).code == 0 and {fake.asked[one] for one in poison} == {2}
        # Another answer is another question.
        AnswerFolder(answers).save(DIALOGUES[0], ["new"] * len(DIALOGUES[0].questions), [])
        fake.bodies.clear()
        assert judge(fake.url).code == 0 and len(fake.bodies) == len(DIALOGUES[0].questions)


def test_dialogues_without_answers_or_pictures_count_as_failures(
    judge: Callable[..., Ran], answers: Path, tmp_path: Path
) -> None:
    first, second, third = (dialogue.id for dialogue in DIALOGUES[:3])
    (answers / f"{first}.json").unlink()
    (answers / f"{second}.json").write_text("{")
    pictures = tmp_path / "elsewhere" / "pictures"
    pictures.mkdir(parents=True)
    for path in (FOLDER / "pictures").glob("*.png"):
        if not path.name.startswith(third):
            (pictures / path.name).symlink_to(path)
    with FakeJudge() as fake:
        ran = judge(fake.url, "--images", str(tmp_path / "elsewhere"))
    assert ran.code == 1 and "3 dialogues could not be judged" in ran.err.splitlines()[-1]
    for name, says in ((first, "no answers yet"), (second, "cannot be read"), (third, "--images")):
        assert sum(f"dialogue {name}: " in line and says in line for line in ran.err.splitlines())
    assert scores(answers)["failures"] == {"no answer": 16, "not judged": 8}


def test_nothing_is_sent_before_confirmation(
    mmkv: Callable[..., Ran], answers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeJudge() as fake:
        prices = ("--input-price", "2.5", "--output-price", "10")
        ran = mmkv(*judge_arguments(answers, fake.url, *prices))
        assert ran.code == 1 and "add --yes" in ran.err.splitlines()[-1]
        assert f"judging takes {QUESTIONS} calls, about " in ran.err and "about $" in ran.err
        somebody = SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: True))
        monkeypatch.setattr("mmkv.eval.mmdu.judge.sys", somebody)
        monkeypatch.setattr("typer.confirm", lambda *_, **__: False)
        assert mmkv(*judge_arguments(answers, fake.url)).code == 1 and not fake.bodies
        monkeypatch.setattr("typer.confirm", lambda *_, **__: True)
        assert mmkv(*judge_arguments(answers, fake.url)).code == 0


@pytest.mark.parametrize(
    ("more", "code", "says"),
    [
        (("--answers", "nowhere"), 1, "no folder of answers at nowhere"),
        (("--base-url", "ftp://x"), 1, "no http(s) address"),
        (("--images", "nowhere"), 1, "no folder of pictures"),
        (("--rubric", "nowhere"), 1, "cannot read the rubric"),
        (("--extra-body", "{"), 2, "not JSON"),
        (("--extra-body", "[]"), 2, "not a JSON object"),
        (("--input-price", "1"), 2, "give both"),
        (("--timeout", "0"), 2, "above 0"),
        (("--workers", "0"), 2, "workers"),
    ],
)
def test_bad_arguments(
    judge: Callable[..., Ran], more: tuple[str, ...], code: int, says: str
) -> None:
    ran = judge("http://127.0.0.1:9/v1", *more)
    assert says in ran.error_line() and ran.code == code


def test_another_judge_needs_another_folder(judge: Callable[..., Ran], answers: Path) -> None:
    with FakeJudge() as fake:
        assert judge(fake.url).code == 0
        ran = judge(fake.url, "--asks", "1")
        assert "another --output" in ran.error_line()
        own = answers.parent / "own.txt"
        own.write_text("my words")
        fake.bodies.clear()
        assert judge(fake.url, "--rubric", str(own)).code == 0
        assert (
            all(b["messages"][-1]["content"][0]["text"].startswith("my words") for b in fake.bodies)
            and len(fake.bodies) == QUESTIONS
        )


def test_runs_side_by_side(
    mmkv: Callable[..., Ran], judge: Callable[..., Ran], answers: Path
) -> None:
    with FakeJudge() as fake:
        assert judge(fake.url).code == 0
        better = answers.parent / "better"
        for dialogue in DIALOGUES:
            AnswerFolder(better).save(dialogue, list(dialogue.references), [])
        AnswerFolder(better)
        (better / "mmkv-run.json").write_text(
            '{"settings": {"policy": "snapkv", "budget": {"unit": "entries", "value": 64}}}'
        )
        assert judge(fake.url, "--answers", str(better)).code == 0
    ran = mmkv("mmdu", "table", str(answers), str(better))
    first, second = (line.split(" | ") for line in ran.out.splitlines()[4:6])
    assert ran.code == 0 and first[-2] == "100.0 %" and first[1] == "-"
    assert second[1:3] == ["snapkv", "64 entries"] and 0 < float(second[-1].strip(" |")) <= 1
    assert "no scores.json" in mmkv("mmdu", "table", str(answers.parent)).error_line()
