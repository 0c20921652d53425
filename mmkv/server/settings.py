"""The settings of a server; each is declared once, with its option of ``mmkv serve``.

Nothing here imports torch: ``mmkv serve --help`` is made of it.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmkv.calls.formats import Hermes
from mmkv.engine.budget import parse_bytes
from mmkv.engine.errors import InputError
from mmkv.engine.options import option

if TYPE_CHECKING:
    from mmkv.calls.parser import ThoughtMarks, ToolFormat
    from mmkv.engine.budget import Budget
    from mmkv.prompt.qwen_vision import VideoRules
    from mmkv.prompt.video import FrameRule
    from mmkv.sampling import Settled
    from mmkv.server.prompts import ContextBounds

KEY_VARIABLE = "MMKV_API_KEY"


def _bytes(text: str | None) -> int | None:
    return None if text is None else parse_bytes(text)


def _some_bytes(text: str) -> int:
    if not (count := parse_bytes(text)):
        raise InputError(f"--max-body {text!r} lets no request in; give for example 32MiB")
    return count


def _folder(given: Path | None) -> Path | None:
    if given is not None and not given.is_dir():
        raise InputError(f"--allowed-local-media-path: no folder {given}; make it, or check it")
    return given


def _all(given: list[Any] | None) -> tuple[Any, ...]:
    return tuple(given or ())


def host_names(given: Iterable[str] | None) -> tuple[str, ...]:
    """Return names as Host headers have them. Raises InputError: one is no name."""
    return tuple(map(_host, given or ()))


def _host(name: str) -> str:
    bare = name.strip().lower().removesuffix(".")
    try:
        address = ipaddress.ip_address(bare.removeprefix("[").removesuffix("]"))
    except ValueError:
        if not re.fullmatch(r"[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?", bare):
            raise InputError(
                f"{name!r} is no name of a host; give one without scheme, port or *"
            ) from None
        return bare
    return f"[{address}]" if address.version == 6 else str(address)


def _log_form(given: str | None) -> str | None:
    if given not in (None, "combined", "json"):
        raise InputError(f"--access-log {given!r} is no form of a log; give combined or json")
    return given


def _origins(given: list[str] | None) -> tuple[str, ...]:
    """Return origins as browsers name them. Raises InputError."""
    for one in given or ():
        if one != "*" and not re.fullmatch(r"https?://[^/?#@\s]+", one):
            raise InputError(
                f"--cors-origin {one!r} is no origin; give scheme, host and port alone, such as "
                "https://chat.example"
            )
    return tuple(given or ())


def _networks(given: list[str] | None) -> tuple[str, ...]:
    """Return networks, an address as one of its own. Raises InputError."""
    try:
        return tuple(str(ipaddress.ip_network(one.strip(), strict=False)) for one in given or ())
    except ValueError as error:
        raise InputError(
            f"--trusted-proxy: {error}; give an address or a network, such as 10.0.0.0/8"
        ) from None


# Values of one body. An empty list takes 64 bytes where its text has 3, and the error of a field
# that is refused a thousand.
VALUES = 2**15
_SMALL = 512  # part of the most bytes: a body that is taken however many there are
FEW = 128  # values of such a body


def always_accepted(most: int) -> int:
    """Return the bytes of a body that is accepted however many others arrive."""
    return most // _SMALL


MOST_CONNECTIONS = 1024  # however many descriptors there are
_FEWEST = 8
RESERVE = 48  # descriptors for session files, locks, decoding processes and fetched pictures


def most_connections() -> int:
    """Return how many connections the descriptors at hand are enough for."""
    try:
        import resource

        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if soft == resource.RLIM_INFINITY:
            return MOST_CONNECTIONS
        there = len(os.listdir("/dev/fd"))
    except (ImportError, OSError):  # Windows counts otherwise
        return MOST_CONNECTIONS
    return max(_FEWEST, min(MOST_CONNECTIONS, soft - there - RESERVE))


@dataclass(frozen=True)
class RequestBounds:
    """What requests may hold in memory; ``--process-memory`` lowers it.

    Attributes:
        bodies: how many bodies of the most bytes may be under way; values: of all bodies, JSON
            values.
        media: bytes of all pictures and videos that the engine has not read yet.
        shown: pixels of a request's pictures and videos, as large as the model reads them.
        scored: log probabilities of an answer that is no stream.
        unsent: bytes of a stream that wait for its client, about; of all streams eight times that.
        answers: bytes of all whole answers that wait for their clients.
        contexts: how many contexts of tokens all conversations may have whose texts are held;
            None: one for each session and request.
    """

    bodies: int = 8
    values: int = 2**18
    media: int = 768 * 2**20
    shown: int = 120 * 10**6
    scored: int = 2**17
    unsent: int = 2**24
    answers: int = 2**27
    contexts: int | None = None


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Addresses, bounds and names of one server.

    A field made by ``option`` is an option, too; the order of the fields is that of
    ``mmkv serve --help``.

    Attributes:
        memory: most bytes of the cache, all sessions together; process_memory: of the process.
        bounds: what requests may hold beside that.
        snapshot_bytes: most bytes of the copies by which chats resume; None: what is free.
        shared_budget: entries per row of all sessions together; None: each has a budget of its own.
        api_keys: keys that requests may show; none: everyone may ask.
        key_weights: of those keys' sessions in a shared budget, in the same order; none: 1 each.
        hosts: names that the Host header may have; none: see :mod:`mmkv.server.guard`.
        cors: origins whose web pages may ask, as browsers name them; ``*``: all.
        open_metrics: whether /metrics needs no key.
        max_queue: requests that wait for room; max_running: those that are served at a time.
        forget_thoughts: see :class:`mmkv.Session`.
        gap: see :class:`mmkv.scheduler.Limits`.
        max_per_key: requests of one key (or one address, without keys) at a time; None: no limit.
        connections: most that are open; None: what the file descriptors are enough for.
        max_tokens: of a reply whose request does not say; None: as the checkpoint says.
        body: most bytes of a request, which has to arrive in body_seconds.
        media_folder: where file: URLs may point; None: nowhere.
        session_folder: where sessions are saved, and idle ones hibernate; None: none are saved.
        keep_sessions: whether sessions outlast the server, in that folder, for all servers that
            share it.
        tenant_bytes, tenant_files: see :class:`mmkv.server.quota.DiskQuota`.
        proxies: networks whose X-Forwarded-For is believed.
        max_sessions: most sessions that are open; store_bytes: most bytes of stored responses.
        name: the model as requests name it; strict: whether fields that are not known are refused.
        replicas: how many run on Ray Serve; None: one server, without Ray.
        page: whether ``/`` is a page to chat with.
        drain: seconds that replies under way have when the server is told to stop.
        access_log: form of the lines of :class:`mmkv.server.run.AccessLog`; None: there are none.
        idle_folder: where idle sessions hibernate without a session folder, if it can be made;
            None: a temporary one.
        max_choices: replies to one request (``n``).
        head_seconds, stall_seconds: see :class:`mmkv.server.connections.ConnectionLimits`.
        keep_alive: seconds after which a stream without news sends a comment.
        warm: whether the server starts a decoding process and reads a picture before it serves, so
            that the first one is as fast as others.
    """

    host: str = option("Address to listen on.", "127.0.0.1")
    port: int = option("Port; 0 takes a free one.", 8000, least=0, most=65535)
    memory: int = option(
        "Most memory of the cache, all sessions together, for example 8GiB.",
        "1GiB",
        kind=str,
        read=_bytes,
    )
    process_memory: int | None = option(
        "Most memory of the process, for example 2GiB: fewer and smaller requests are served "
        "at a time (default: the sum of their bounds, printed at the start).",
        kind=str | None,
        read=_bytes,
    )
    snapshot_bytes: int | None = option(
        "Most of --memory for copies from which chats resume (default: all free pages).",
        kind=str | None,
        name="snapshots",
        read=_bytes,
    )
    shared_budget: float | None = option(
        "Entries per row of all sessions together, which compete for them (dbtrimkv); instead of "
        "--budget for each."
    )
    shared_floor: float = option(
        "Entries per row that each session keeps in any case.", 0.0, least=0
    )
    shared_by_risk: bool = option(
        "Sessions that have forgotten more get room in --shared-budget from those that have "
        "forgotten less.",
        False,
    )
    api_keys: tuple[str, ...] = option(
        "Key that requests must carry. Repeatable.",
        kind=list[str] | None,
        shown=False,
        name="api_key",
        variable=KEY_VARIABLE,
        read=_all,
    )
    key_weights: tuple[float, ...] = option(
        "Weight of each --api-key's sessions in --shared-budget, in the same order (default: 1).",
        kind=list[float] | None,
        name="key_weight",
        read=_all,
    )
    hosts: tuple[str, ...] = option(
        "Host name that requests may use, besides localhost. Repeatable. Default: any; on a "
        "loopback address without keys only localhost.",
        kind=list[str] | None,
        name="allowed_host",
        read=host_names,
    )
    cors: tuple[str, ...] = option(
        "Origin of web pages that may call this server, such as https://chat.example; *: any."
        " Repeatable. Default: only its own page.",
        kind=list[str] | None,
        name="cors_origin",
        read=_origins,
    )
    open_metrics: bool = option(
        "Open /metrics without a key; it shows how much the server is used.", False
    )
    max_queue: int = option("Requests that may wait.", 64, least=1)
    max_running: int = option("Requests served at a time.", 8, least=1)
    gap: float = option(
        "Seconds between two tokens of a reply that a CPU aims at while it reads prompts.",
        0.2,
        least=0,
    )
    max_per_key: int | None = option("Requests of one key or address at a time.", least=1)
    connections: int | None = option(
        "Open connections (default: as many as file descriptors allow, 1024 at most).",
        name="max_connections",
        least=1,
    )
    proxies: tuple[str, ...] = option(
        "Address or network of a proxy whose X-Forwarded-For names the client. Repeatable. "
        "Default: none; the address of the connection counts.",
        kind=list[str] | None,
        name="trusted_proxy",
        read=_networks,
    )
    max_tokens: int | None = option(
        "Longest reply if a request names none (default: that of generation_config.json, or 512).",
        least=1,
    )
    body: int = option("Longest request.", "32MiB", kind=str, name="max_body", read=_some_bytes)
    media_folder: Path | None = option(
        "Folder that file: URLs may name.", name="allowed_local_media_path", read=_folder
    )
    session_folder: Path | None = option(
        "Folder for saved and idle sessions (default: none are saved; idle ones lie in "
        "~/.local/state/mmkv)."
    )
    keep_sessions: bool = option(
        "Write each session to --session-folder after its turns: sessions outlast the server, and "
        "servers with one folder share them.",
        False,
    )
    forget_thoughts: bool = option(
        "Drop the cached entries of a thought when its reply is complete.", False
    )
    max_sessions: int = option("Sessions that may be open.", 1000, least=0)
    tenant_bytes: int | None = option(
        "Most disk space of a key (without keys, an address): saved, kept and idle sessions, "
        "and pictures (default: as much as is left free).",
        kind=str | None,
        name="max_tenant_bytes",
        read=_bytes,
    )
    tenant_files: int = option(
        "Files on disk that a key may have.", 10_000, name="max_tenant_files", least=1
    )
    store_bytes: int = option(
        "Most memory of stored responses, in files too.",
        "1GiB",
        kind=str,
        name="store",
        read=_bytes,
    )
    name: str = option(
        "The model's name in requests.",
        kind=str | None,
        flags=("--served-model-name",),
        read=lambda name: name or "",
    )
    strict: bool = option(
        "Refuse unknown fields of requests, instead of naming them in X-Mmkv-Ignored.",
        False,
    )
    replicas: int | None = option(
        "Run this many replicas on Ray Serve (extra ray), each with --memory; X-Session-Id "
        "keeps a session at its replica, or moves it to another when that is lost.",
        least=1,
    )
    page: bool = option("A page to chat with, at /.", True, flags=("--page/--no-page",))
    drain: float = option("Seconds after SIGTERM in which replies may end.", 30.0, least=0)
    access_log: str | None = option(
        "Write a line of each request to stdout: combined (as Apache and NGINX do) or json.",
        read=_log_form,
    )
    # Those that no option has.
    bounds: RequestBounds = RequestBounds()
    idle_folder: Path | None = None
    max_choices: int = 8
    body_seconds: float = 120.0
    head_seconds: float = 20.0
    stall_seconds: float = 30.0
    keep_alive: float = 15.0
    warm: bool = False

    @property
    def most_taken(self) -> int:
        """Count the requests that wait or run at most, those that fetch pictures among them."""
        return self.max_queue + 3 * self.max_running

    def kept_tokens(self, context: int) -> int:
        """Return how many tokens all conversations may have whose texts are held: a context each.

        One may be longer where others are shorter.
        """
        contexts = self.max_sessions + self.most_taken
        return min(contexts, self.bounds.contexts or contexts) * context


@dataclass(frozen=True)
class Facts:
    """What the HTTP routes know of the engine.

    Attributes:
        base_key: a hash of what the memory of a conversation depends on: weights, gates, policy,
            cuts, template.
        context: positions that the model was trained for; vocabulary: number of tokens;
            context_bounds: of texts.
        longest: tokens that a conversation may have which goes on beyond the context, and those of
            all conversations together; None: all end at the context.
        sampling: of replies whose request does not say.
        shared: whether all sessions compete for the budget; unbound: why it binds none
            of them, or None.
        sees, watches: whether the model takes pictures, videos; picture_rules, rules: how it scales
            them; frame_rule: which frames of a video it is shown.
        template_variables: what its chat template reads beside the conversation.
        note: on the model, for users; None: there is nothing to say.
        call_format: how the model writes calls; thoughts: the marks of its thoughts, if it has any.
    """

    base_key: str
    policy: str
    budget: Budget
    lookahead: float
    context: int
    vocabulary: int
    context_bounds: ContextBounds
    sees: bool
    watches: bool
    sampling: Settled
    longest: int | None = None
    shared: bool = False
    unbound: str | None = None
    rules: VideoRules | None = None
    frame_rule: FrameRule | None = None
    template_variables: frozenset[str] = frozenset()
    call_format: ToolFormat = field(default_factory=Hermes)
    thoughts: ThoughtMarks | None = None
    picture_rules: VideoRules | None = None
    note: str | None = None

    def most_tokens(self, budget: Budget) -> int:
        """Return how many tokens a conversation may have, evicted ones too.

        Under a share of the tokens it ends at the context, as :attr:`CachedSequence.may_compact`
        says.
        """
        goes_on = self.longest is not None and budget.kind != "fraction"
        return max(self.context, self.longest or 0) if goes_on else self.context

    @property
    def bound(self) -> str:
        """The budget as it is shown."""
        return "none" if self.unbound else self.budget.describe()


@dataclass(frozen=True)
class Footprint:
    """The most bytes that the process may take, by part; of the host, not of a GPU."""

    parts: dict[str, int]

    @property
    def total(self) -> int:
        """Return the sum."""
        return sum(self.parts.values())

    def __str__(self) -> str:
        parts = dict(self.parts)
        cache, weights = parts.pop("cache"), parts.pop("weights and libraries")
        return (
            f"{mib(self.total)} ({mib(weights)} weights and libraries, {mib(cache)} cache, "
            f"{mib(sum(parts.values()))} for requests and conversations)"
        )

    def describe(self, settings: ServerSettings) -> str:
        """Return a line for the log of a server that starts with these settings."""
        cache = mib(self.parts["cache"])
        line = f"memory: the cache takes at most {cache}; the process at most {self}"
        if settings.process_memory is None:
            return f"{line}; --process-memory lowers that"
        return (
            f"{line}; for --process-memory a body has at most {settings.body / 2**20:.1f} MiB, the "
            f"pictures of a request {settings.bounds.shown / 10**6:.1f} megapixels as the model "
            f"reads them, and {settings.connections} connections may be open"
        )


def mib(count: int) -> str:
    return f"{count / 2**20:,.0f} MiB"
