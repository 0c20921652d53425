"""Load a model and serve it until the process is told to stop."""

from __future__ import annotations

import contextlib
import gc
import logging
import signal
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from mmkv.engine.config import EngineConfig
from mmkv.engine.errors import ModelError, plain
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
    from mmkv.server.footprint import footprint
    from mmkv.server.media.resolver import MediaResolver
    from mmkv.server.metrics import Metrics
    from mmkv.server.state import ServerState

    metrics = Metrics()
    thread = EngineThread(lambda: EngineCore(load(), settings, metrics, lookahead))
    thread.start()
    try:
        facts = thread.facts()
        media = MediaResolver(
            folder=settings.media_folder,
            rules=facts.rules,
            picture_rules=facts.picture_rules,
            frame_rule=facts.frame_rule,
        )
        core = thread.core
        assert core is not None
        bound = thread.post(lambda: footprint(core, settings)).result()
        for part, count in bound.parts.items():
            metrics.process_limit.labels(part.replace(" ", "_")).set(count)
        yield ServerState(settings, facts, thread, metrics, media, bound)
    finally:
        thread.stop()


def serve(
    load: Callable[[], Engine],
    settings: ServerSettings,
    lookahead: float,
    say: Callable[[str], None],
) -> None:
    """Serve until SIGINT or SIGTERM; replies under way are then brought to their end."""
    require_packages()
    from mmkv.server.app import make_app
    from mmkv.server.connections import WebServer
    from mmkv.server.guard import allowed_hosts

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
            log_level="warning",
        )
        facts = state.facts
        say(
            f"serving {settings.name} (policy {facts.policy}, budget {facts.bound}) "
            f"at http://{host}:{port}/v1"
        )
        if state.footprint is not None:
            say(state.footprint.describe())
        # uvicorn passes the signal on when it is done; the program then ends by itself.
        signal.signal(signal.SIGTERM, lambda *_: None)
        web.run()
