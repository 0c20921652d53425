"""A judge on this machine that speaks the OpenAI protocol and can be made to misbehave."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, ClassVar

from mmkv.eval.mmdu.rubric import SCORES

# (text of the prompt, how often it was asked before) -> one of FakeJudge.ACTIONS
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

    ACTIONS: ClassVar = (
        "ok",
        "garbage",
        "plain refusal",
        "filter",
        "filter 400",
        "stall",
        "limit",
        "fault",
        "too high",
        "fraction",
        "missing",
        "code",
        "no completion",
        "denied",
        "rejected",
        "redirect",
        "quota",
        "come back tomorrow",
        "drop",
        "trickle",
    )

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
        elif action == "come back tomorrow":
            self._send(429, _error("rate limit"), {"Retry-After": "86400"})
        elif action == "limit":
            self._send(429, _error("rate limit"), {"Retry-After": self.fake.retry_after})
        elif action == "no completion":
            self._send(200, {"hello": "I am a proxy"})
        else:
            status = {"fault": 500, "denied": 401, "quota": 429, "lost": 404, "rejected": 400}
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
