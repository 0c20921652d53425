"""What operators look at: /metrics, under the names that vLLM uses with another prefix and some of
our own, and the log of requests."""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from mmkv.engine.errors import STOPS

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

CONTENT_TYPE = CONTENT_TYPE_LATEST
_SHORT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
_LONG = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Metrics:
    """The metrics of one server, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        gauge, counter, histogram = self._gauge, self._counter, self._histogram
        self.running = gauge("num_requests_running", "Requests that are prepared, read or decoded.")
        self.waiting = gauge("num_requests_waiting", "Requests that wait for room.")
        self.first_token = histogram("time_to_first_token_seconds", "From request to token.", _LONG)
        self.inter_token = histogram("inter_token_latency_seconds", "Between two tokens.", _SHORT)
        self.whole_time = histogram(
            "e2e_request_latency_seconds", "Of requests that were answered.", _LONG
        )
        self.queue_time = histogram("request_queue_time_seconds", "Waiting for room.", _LONG)
        self.prefill_time = histogram(
            "request_prefill_time_seconds", "From room to the first token.", _LONG
        )
        self.decode_time = histogram("request_decode_time_seconds", "From first to last.", _LONG)
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts that were read.")
        self.generated_tokens = counter("generation_tokens", "Tokens that were sampled.")
        self.resumed_tokens = counter(
            "resumed_tokens", "Tokens of prompts that a snapshot held already."
        )
        self.finished = counter(
            "request_success",
            "Replies that ended, by how; requests that failed or were cancelled, too.",
            "finished_reason",
        )
        self.rejected = counter(
            "admission_rejections", "Requests that were refused, by why.", "reason"
        )
        self.kv_pages = gauge(
            "kv_pages", "Pages: held, reserved beside those, and free to be committed.", "state"
        )
        self.kv_bytes_committed = gauge("kv_bytes_committed", "Most bytes that may come in use.")
        self.process_limit = gauge(
            "process_memory_limit_bytes", "The most that this process may take; a sum.", "part"
        )
        self.process_resident = gauge("process_resident_bytes", "What it takes now.")
        self.evicted = counter("entries_evicted", "Cache entries dropped.", "modality")
        self.picture_queries = counter(
            "mm_cache_queries", "Pictures, tiles and videos whose features were asked for."
        )
        self.picture_hits = counter("mm_cache_hits", "Those of them that were kept.")
        self.picture_bytes = gauge("mm_cache_bytes", "Features of pictures that are kept.")
        self.weighed = gauge("answers_weighed", "Answers weighed against the calibration.")
        self.escalated = gauge(
            "answers_escalated",
            "Doubtful ones, by what became of them.",
            "outcome",
        )
        self.drift = gauge(
            "calibration_drift", "1: the scores are not the calibration's any more; else 0."
        )
        self.sessions = gauge("sessions", "Sessions, stored responses among them.", "state")
        self.snapshot_bytes = gauge("snapshot_bytes", "Bytes of copies by which chats resume.")
        self.page_leaks = gauge(
            "page_leaks_total", "Pages held beyond what is committed while nothing runs: a defect."
        )

    def text(self) -> bytes:
        """Return all of them in Prometheus' text format."""
        return generate_latest(self.registry)

    def _gauge(self, name: str, help: str, *labels: str) -> Gauge:
        return Gauge(f"mmkv_{name}", help, labels, registry=self.registry)

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(f"mmkv_{name}", help, labels, registry=self.registry)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"mmkv_{name}", help, registry=self.registry, buckets=buckets)


def size_of(data: str | bytes | bytearray) -> int:
    """Return the bytes of a message."""
    return len(data.encode("utf-8", "surrogatepass")) if isinstance(data, str) else len(data)


class AccessLog:
    """Writes a line to stdout when a request is over, in Apache's and NGINX's combined form or as
    JSON.

    The user is the first half of the tenant's name on disk. Queries, bodies and keys are not
    written; nor is what a client sends able to end a line or a field. The client is the address
    that uvicorn gives: of a proxy's header, where the proxy is one of FORWARDED_ALLOW_IPS.

    Args:
        form: ``combined`` or ``json``.
    """

    def __init__(self, app: ASGIApp, form: str) -> None:
        self._app, self._json = app, form == "json"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, with a header that names it as the log does."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        status, sent, began = 0, 0, time.perf_counter()
        given = dict(scope["headers"]).get(b"x-request-id", b"")
        name = given if re.fullmatch(rb"[\w.:-]{1,128}", given) else secrets.token_hex(16).encode()

        async def counted(message: Message) -> None:
            nonlocal status, sent
            kind = message["type"]
            if kind.endswith((".start", ".accept")):
                status = message.get("status", 101)
                headers = [*(message.get("headers") or ()), (b"x-request-id", name)]
                message = {**message, "headers": headers}
            elif kind == "websocket.close":
                status = status or 403  # closed before it was accepted
            elif scope.get("method") != "HEAD":
                pieces = (message.get(part) for part in ("body", "bytes", "text"))
                sent += sum(size_of(piece) for piece in pieces if piece)
            await send(message)

        try:
            await self._app(scope, receive, counted)
        except STOPS:
            raise
        except BaseException:
            status = status or 500
            raise
        finally:
            # 499, NGINX's word: the client has gone before there was an answer.
            took = time.perf_counter() - began
            self.write(scope, status or 499, sent, took, name.decode())

    def refused(self, client: tuple[str, int] | None, status: int, sent: int) -> None:
        """Write a line of a request that was answered before it could be read."""
        scope = {"client": client, "headers": (), "method": "", "raw_path": b"", "http_version": ""}
        self.write(scope, status, sent, 0.0, "")

    def write(self, scope: Scope, status: int, sent: int, took: float, name: str) -> None:
        """Write a line.

        Args:
            sent: bytes of the answer's body; took: seconds; name: the request's.
        """
        headers = dict(scope["headers"])
        caller = scope.get("state", {}).get("caller")
        told: dict[str, Any] = {
            "remote_addr": (scope.get("client") or ("",))[0],
            "tenant": caller.tenant[:32] if caller is not None else "",
            "method": scope.get("method", "GET"),  # a WebSocket has none
            "path": self._read(scope["raw_path"]),
            "protocol": f"HTTP/{scope['http_version']}",
            "status": status,
            "bytes": sent,
            "referer": re.sub(r"[?#].*", "", self._read(headers.get(b"referer", b""))),
            "user_agent": self._read(headers.get(b"user-agent", b"")),
        }
        now = datetime.now(UTC)
        if self._json:
            told = {"time": now.isoformat(timespec="milliseconds"), **told}
            line = json.dumps(told | {"seconds": round(took, 4), "request_id": name})
        else:
            asked = " ".join(told[key] for key in ("method", "path", "protocol"))
            quoted = asked if told["method"] else "", told["referer"], told["user_agent"]
            asked, referer, agent = (_escaped(one, " ") for one in quoted)
            address, tenant = (_escaped(told[key]) for key in ("remote_addr", "tenant"))
            when = f"{now:%d/%b/%Y:%H:%M:%S %z}"
            line = f'{address} - {tenant} [{when}] "{asked}" {status} {sent} "{referer}" "{agent}"'
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
            print(line, flush=True)

    def _read(self, raw: bytes) -> str:
        return raw.decode("utf-8", "backslashreplace" if self._json else "surrogateescape")


def _escaped(text: str, also: str = "") -> str:
    """Return a text as NGINX writes it: in hexadecimal what could end a field or a line.

    Args:
        also: characters that stay; a field in quotation marks may hold spaces.
    """

    def coded(found: re.Match[str]) -> str:
        return "".join(f"\\x{byte:02X}" for byte in found[0].encode("utf-8", "surrogateescape"))

    return re.sub(rf"[^{also}!#-\[\]-~]", coded, text) or "-"
