"""Replicas of the server on Ray Serve; requests of a session go to the same replica."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from mmkv.engine.errors import STOPS, ModelError
from mmkv.server.run import opened, require_packages

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from mmkv.api import Engine
    from mmkv.server.settings import ServerSettings

REPLICA = b"x-mmkv-replica"  # of an answer: host and process that it came from
_ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"


def deployment(
    load: Callable[[], Engine], settings: ServerSettings, lookahead: float, gpus: float = 0
) -> Any:
    """Return what ``ray.serve.run`` takes: the application, in as many processes.

    Requests with one ``X-Session-Id`` go to one replica, as long as it lives. A session that has to
    go on at another one is read from the session folder, so ``settings`` should keep sessions.

    Args:
        load: makes a replica's engine; it is pickled. gpus: of each replica.

    Raises:
        ModelError: Ray Serve is not installed.
    """
    if find_spec("ray") is None or find_spec("ray.serve") is None:
        raise ModelError("replicas need Ray Serve; install it: pip install 'mmkv[ray]'")
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    def build() -> ASGIApp:
        from mmkv.server.app import make_app
        from mmkv.server.guard import allowed_hosts

        opening = opened(load, settings, lookahead)
        hosts = allowed_hosts("localhost", keyed=True, named=settings.hosts)
        app = make_app(opening.__enter__(), hosts)
        app.state.opening = opening  # the engine thread ends with it
        app.add_middleware(_Named)
        return app

    router = RequestRouterConfig(
        request_router_class=_ROUTER, request_router_kwargs={"num_fallback_replicas": 0}
    )
    return serve.deployment(
        serve.ingress(build)(_Replica),
        name="mmkv",
        num_replicas=settings.replicas,
        request_router_config=router,
        # The scheduler's own queue refuses what is too much.
        max_ongoing_requests=settings.max_queue + settings.max_running + 64,
        graceful_shutdown_timeout_s=settings.drain,
        ray_actor_options={"num_cpus": 1, "num_gpus": gpus},
    ).bind()


def serve_replicas(
    load: Callable[[], Engine],
    settings: ServerSettings,
    lookahead: float,
    say: Callable[[str], None],
    gpus: float = 0,
) -> None:
    """Run replicas until SIGINT or SIGTERM, on the cluster that RAY_ADDRESS names or on one here.

    Raises:
        ModelError: Ray Serve is not installed, or the replicas do not start.
    """
    require_packages()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # it would report to its makers
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "180")  # 30 s, on a busy machine too few
    # Ray's proxies are uvicorn's, which believe whoever connects from this machine.
    os.environ["FORWARDED_ALLOW_IPS"] = ",".join(settings.proxies) or "none"
    app = deployment(load, settings, lookahead, gpus)
    import ray
    from ray import serve

    try:
        try:
            ray.init(include_dashboard=False, log_to_driver=False, logging_level="warning")
            serve.start(http_options={"host": settings.host, "port": settings.port})
            serve.run(app, name="mmkv", route_prefix="/")
        except STOPS:
            raise
        except BaseException as error:  # of many kinds, and not all of them Ray's own
            said = str(error).strip().partition("\n")[0][:300]
            raise ModelError(
                f"the replicas did not start ({said or type(error).__name__}); Ray's logs lie in "
                "/tmp/ray/session_latest/logs, and without --replicas the server says more"
            ) from error
        ended = threading.Event()
        for name in (signal.SIGINT, signal.SIGTERM):  # after Ray has set its own
            signal.signal(name, lambda *_: ended.set())
        where = f"http://{settings.host}:{settings.port}"
        many = f"{settings.replicas} replicas"
        say(f"{settings.name} is ready on {many} at {where}/v1; Ctrl-C stops it")
        ended.wait()
    finally:
        with suppress(Exception):  # whatever Ray makes of its own end
            if ray.is_initialized():  # else this would start it
                serve.shutdown()
        ray.shutdown()


class _Replica:
    """The health check that Ray calls beside the application."""

    app: Any  # Ray's, made by ``build``

    def check_health(self) -> None:
        """Raise where the engine has stopped, so that Ray replaces the replica."""
        thread = self.app.state.server.engine_thread
        if thread.failed or not thread.is_alive():
            raise RuntimeError("the engine has stopped")


class _Named:
    """Adds a header that names the replica."""

    def __init__(self, app: ASGIApp) -> None:
        self._app, self._name = app, f"{socket.gethostname()}:{os.getpid()}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (REPLICA, self._name)]}
            await send(message)

        await self._app(scope, receive, named if scope["type"] == "http" else send)
