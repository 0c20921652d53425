"""Load a model and serve it until the process is told to stop."""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from mmkv.engine.budget import format_bytes
from mmkv.engine.config import EngineConfig
from mmkv.engine.errors import InputError, ModelError, plain
from mmkv.server.settings import ServerSettings

if TYPE_CHECKING:
    from mmkv.api import Engine
    from mmkv.server.state import ServerState

PACKAGES = (
    "fastapi",
    "filelock",
    "httptools",
    "uvicorn",
    "prometheus_client",
    "httpx",
    "llguidance",
)


class PlainFormatter(logging.Formatter):
    """Writes what requests, files and libraries say without codes that steer a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's lines."""
        return plain(super().format(record))


def require_packages() -> None:
    """Raise ModelError when a package of the extra is missing."""
    from importlib.util import find_spec

    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise ModelError(
            f"mmkv serve needs {', '.join(missing)}; install them: pip install 'mmkv[serve]'"
        )


def require_address(host: str, port: int) -> None:
    """Raise InputError where no server can listen, before a model is loaded for it."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise InputError(f"--host {host!r} is not known here; give an address") from error
    remedies = {
        errno.EADDRINUSE: "give another --port",
        errno.EACCES: "give a --port above 1023",
        errno.EADDRNOTAVAIL: "give a --host that is this machine's (0.0.0.0 for all)",
    }
    for number, (kind, *_, address) in enumerate(found, 1):
        try:
            with socket.socket(kind) as tried:
                tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                tried.bind(address)
                return
        except OSError as error:
            if number == len(found):
                remedy = remedies.get(error.errno or 0, "give another --host or --port")
                why = f"cannot listen at {host}:{port} ({error.strerror})"
                raise InputError(f"{why}; {remedy}") from error


@contextlib.contextmanager
def opened(
    load: Callable[[], Engine], settings: ServerSettings, lookahead: float = EngineConfig.lookahead
) -> Iterator[ServerState]:
    """Yield the state of a server with a running engine thread, which ends with it.

    Args:
        load: makes the engine, in the engine thread.
        lookahead: what its policy is made with.

    Raises:
        MmkvError: it cannot be loaded, or has no room for a request.
    """
    import mmkv.server.app  # noqa: F401 (what it imports counts to what is resident)
    from mmkv.server.engine_thread import EngineCore, EngineThread
    from mmkv.server.footprint import media_limits
    from mmkv.server.media.resolver import MediaResolver
    from mmkv.server.metrics import Metrics
    from mmkv.server.state import ServerState

    metrics = Metrics()
    thread = EngineThread(lambda: EngineCore(load(), settings, metrics, lookahead))
    thread.start()
    try:
        facts = thread.facts()
        core = thread.core
        settings = core.settings
        media = MediaResolver(
            media_limits(settings),
            folder=settings.media_folder,
            rules=facts.rules,
            picture_rules=facts.picture_rules,
            frame_rule=facts.frame_rule,
        )
        for part, count in core.footprint.parts.items():
            metrics.process_limit.labels(part.replace(" ", "_")).set(count)
        yield ServerState(settings, facts, thread, metrics, media, core.footprint)
    finally:
        thread.stop()


def first_lines(state: ServerState, port: int) -> list[str]:
    """Return what a server says when it is ready: where and what it is, what fits, how it ends."""
    settings, facts, engine = state.settings, state.facts, state.engine_thread.core.engine
    where = f"http://{settings.host}:{port}"
    pool, pages = engine.cache.pool, engine.budgets.lasting_pages(engine.budget)
    page = f"a page to chat with at {where}/, " if settings.page else ""
    lines = [f"{settings.name} is ready: {page}OpenAI's and Anthropic's APIs at {where}/v1"]
    if engine.drafts is not None:
        bound = facts.budget.describe()
        lines.append(f"lossless: policy {facts.policy}, budget {bound}, drafts; all entries stay")
    elif pages is None or facts.shared or pool.limit is None:
        lines.append(f"policy {facts.policy}, budget {facts.bound}")
    else:
        entries = engine.budgets.allowed(engine.budget.ceiling, facts.context)
        each, whole = (format_bytes(count * pool.page_bytes) for count in (pages, pool.limit))
        lines.append(
            f"policy {facts.policy} keeps {entries:,} entries of each conversation ({facts.bound}, "
            f"at most {each}): room for {pool.limit // pages:,} conversations in {whole} of cache"
        )
    lines += [facts.note] if facts.note else []
    lines += [] if state.footprint is None else [state.footprint.describe(settings)]
    return [*lines, f"Ctrl-C stops it; replies under way get {settings.drain:g} s"]


def serve(
    load: Callable[[], Engine],
    settings: ServerSettings,
    lookahead: float,
    say: Callable[[str], None],
) -> None:
    """Serve until SIGINT or SIGTERM; replies under way are then brought to their end."""
    require_packages()
    require_address(settings.host, settings.port)
    from mmkv.server.app import make_app
    from mmkv.server.connections import WebServer
    from mmkv.server.guard import allowed_hosts

    def say_all(lines: list[str]) -> None:
        for line in lines:
            say(line)

    log = logging.StreamHandler()
    log.setFormatter(PlainFormatter())
    logging.getLogger("mmkv").addHandler(log)
    host, port = settings.host, settings.port
    with opened(load, settings, lookahead) as state:
        gc.freeze()  # what is imported stays: looking through it again would stop all replies
        web = WebServer(
            state,
            make_app(state, allowed_hosts(host, bool(settings.api_keys), settings.hosts)),
            host,
            port,
            lambda port: say_all(first_lines(state, port)),
            log_level="warning",
        )

        # uvicorn passes the signal on when it is done; the program then ends by itself.
        signal.signal(signal.SIGTERM, lambda *_: None)
        web.run()
