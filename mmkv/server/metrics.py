"""What /metrics shows, under the names that vLLM uses with another prefix, and some of our own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

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
