"""``mmkv serve``: an OpenAI-compatible server."""

from __future__ import annotations

import math
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mmkv.chat.options import UsageError
from mmkv.cli import arguments
from mmkv.engine.budget import parse_bytes
from mmkv.engine.config import EngineConfig
from mmkv.engine.errors import BudgetError, InputError

if TYPE_CHECKING:
    from mmkv.api import Engine

_SERVER = "Server"
_KEY_VARIABLE = "MMKV_API_KEY"
# A chunk of a prompt holds up everyone's next token, so that it is shorter than for one user.
CHUNK_ON_CPU = 256


@arguments.engine_options()
def serve(
    context: typer.Context,
    engine: EngineConfig,
    host: Annotated[
        str, typer.Option(help="Address to listen on.", rich_help_panel=_SERVER)
    ] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(help="Port; 0 takes a free one.", min=0, max=65535, rich_help_panel=_SERVER),
    ] = 8000,
    memory: Annotated[
        str,
        typer.Option(
            help="Most memory of the cache, all sessions together, for example 8GiB.",
            rich_help_panel=_SERVER,
        ),
    ] = "1GiB",
    snapshots: Annotated[
        str | None,
        typer.Option(
            help="Most of it for copies by which chats resume (default: what is free).",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    shared_budget: Annotated[
        float | None,
        typer.Option(
            help="Entries per row of all sessions together, which compete for them (dbtrimkv); "
            "instead of --budget for each.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    shared_floor: Annotated[
        float,
        typer.Option(
            help="Entries per row that each session is sure of.", min=0, rich_help_panel=_SERVER
        ),
    ] = 0.0,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            envvar=_KEY_VARIABLE,
            help="Key that requests have to show. Repeatable.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    key_weight: Annotated[
        list[float] | None,
        typer.Option(
            help="What the sessions of each --api-key weigh in --shared-budget, in the same order "
            "(default: 1).",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            help="Name that requests may call this server, beside localhost. Repeatable. Default: "
            "all, but on a loopback address without keys localhost alone.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            help="Origin of web pages that may ask this server, such as https://chat.example; * is "
            "all. Repeatable. Default: none but its own page.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    open_metrics: Annotated[
        bool,
        typer.Option(
            "--open-metrics",
            help="/metrics needs no key, though others do: it tells how much is asked.",
            rich_help_panel=_SERVER,
        ),
    ] = False,
    max_queue: Annotated[
        int, typer.Option(help="Requests that may wait.", min=1, rich_help_panel=_SERVER)
    ] = 64,
    max_running: Annotated[
        int, typer.Option(help="Requests served at a time.", min=1, rich_help_panel=_SERVER)
    ] = 8,
    max_per_key: Annotated[
        int | None,
        typer.Option(
            help="Requests of one key or address at a time.", min=1, rich_help_panel=_SERVER
        ),
    ] = None,
    max_connections: Annotated[
        int | None,
        typer.Option(
            help="Open connections (default: as many as file descriptors allow, 1024 at most).",
            min=1,
            rich_help_panel=_SERVER,
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            help="Longest reply where a request names none (default: as generation_config.json "
            "says, or 512).",
            min=1,
            rich_help_panel=_SERVER,
        ),
    ] = None,
    max_body: Annotated[
        str, typer.Option(help="Longest request.", rich_help_panel=_SERVER)
    ] = "32MiB",
    allowed_local_media_path: Annotated[
        Path | None,
        typer.Option(help="Folder that file: URLs may name.", rich_help_panel=_SERVER),
    ] = None,
    session_folder: Annotated[
        Path | None,
        typer.Option(
            help="Folder where sessions are saved, and hibernate (default: none are saved; they "
            "hibernate in ~/.local/state/mmkv).",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    keep_sessions: Annotated[
        bool,
        typer.Option(
            "--keep-sessions",
            help="Write each session to --session-folder after its turns: sessions outlast the "
            "server, and servers with one folder share them.",
            rich_help_panel=_SERVER,
        ),
    ] = False,
    max_sessions: Annotated[
        int, typer.Option(help="Sessions that may be open.", min=0, rich_help_panel=_SERVER)
    ] = 1000,
    store: Annotated[
        str,
        typer.Option(
            help="Most memory of stored responses, in files too.", rich_help_panel=_SERVER
        ),
    ] = "1GiB",
    name: Annotated[
        str | None,
        typer.Option(
            "--served-model-name", help="The model's name in requests.", rich_help_panel=_SERVER
        ),
    ] = None,
    replicas: Annotated[
        int | None,
        typer.Option(
            help="Run as many replicas on Ray Serve (extra ray), each with --memory; sessions "
            "stick to theirs by X-Session-Id, and go on at another one when it is lost.",
            min=1,
            rich_help_panel=_SERVER,
        ),
    ] = None,
    page: Annotated[
        bool,
        typer.Option(
            "--page/--no-page", help="A page to chat with, at /.", rich_help_panel=_SERVER
        ),
    ] = True,
    drain: Annotated[
        float,
        typer.Option(
            help="Seconds that replies have to end after SIGTERM.", min=0, rich_help_panel=_SERVER
        ),
    ] = 30.0,
    generation_config: arguments.FollowsCheckpoint = True,
    min_pixels: arguments.MinPixels = None,
    max_pixels: arguments.MaxPixels = None,
    quiet: arguments.Quiet = False,
) -> None:
    """Serve a model over HTTP, as OpenAI's API does."""
    from mmkv.chat.options import ChatOptions
    from mmkv.chat.saved import state_folder
    from mmkv.server.run import require_packages
    from mmkv.server.run import serve as run
    from mmkv.server.settings import Settings

    require_packages()
    keep_sessions = keep_sessions or replicas is not None
    if keep_sessions and session_folder is None:
        raise UsageError(
            "--keep-sessions and --replicas need a --session-folder to keep sessions in"
        )
    if replicas is not None and max_connections is not None:
        raise UsageError(
            "--max-connections does nothing beside --replicas, whose connections are Ray's; leave "
            "it out"
        )
    if shared_budget is not None and arguments.budget_given(context):
        raise UsageError(
            "--shared-budget stands instead of --budget, --budget-bytes and --budget-fraction; "
            "give one of them"
        )
    if shared_budget is None and arguments.on_command_line(context, "shared_floor"):
        raise UsageError("--shared-floor is a part of --shared-budget; give that, too")
    _require_keys(api_key or [])
    weights = _weights(key_weight or [], api_key or [], shared_budget is not None)
    limit, body = _bytes("--memory", memory), _bytes("--max-body", max_body)
    copies = None if snapshots is None else _bytes("--snapshots", snapshots)
    model = ChatOptions(engine).model
    config = replace(engine, model=model, kv_limit=limit)
    chosen = arguments.on_command_line(context, "prefill_chunk")
    settings = Settings(
        name=name or Path(model).name or model,
        api_keys=tuple(api_key or ()),
        key_weights=weights,
        open_metrics=open_metrics,
        cors=_origins(cors_origin or []),
        hosts=_hosts(allowed_host or []),
        max_queue=max_queue,
        max_running=max_running,
        max_per_key=max_per_key,
        connections=max_connections,
        max_tokens=max_tokens,
        body=body,
        snapshot_bytes=copies,
        session_folder=session_folder,
        idle_folder=state_folder() / "hibernated",
        lasting=keep_sessions,
        max_sessions=max_sessions,
        store_bytes=_bytes("--store", store),
        media_folder=allowed_local_media_path,
        page=page,
        drain=drain,
        warm=True,
    )
    from mmkv.chat.display import Display
    from mmkv.chat.run import load_engine

    options = ChatOptions(
        config,
        min_pixels=min_pixels,
        max_pixels=max_pixels,
        generation_config=generation_config,
        quiet=quiet,
    )

    def load() -> Engine:
        engine = load_engine(options, Display(options))
        if engine.device.type == "cpu" and not chosen:
            engine.prefill_chunk = CHUNK_ON_CPU
        if shared_budget is not None:
            engine.share(shared_budget, shared_floor)
        return engine

    given = (load, settings, config.lookahead, host, port, Display(options).note)
    if replicas is None:
        run(*given)
    else:
        from mmkv.server.replicas import serve_replicas

        serve_replicas(*given, replicas, gpus=_gpus(config.device))


def _require_keys(keys: list[str]) -> None:
    """Raise UsageError for an API key that is empty or blank."""
    # A variable of spaces gives no key at all; one that is empty is as if it were not set.
    blank = not keys and bool(os.environ.get(_KEY_VARIABLE))
    if blank or not all(key.strip() for key in keys):
        raise UsageError(
            f"an API key is empty; give one with --api-key or {_KEY_VARIABLE}, or leave it out to "
            "serve everybody"
        )


def _hosts(names: list[str]) -> tuple[str, ...]:
    from mmkv.server.guard import host_names

    try:
        return host_names(names)
    except InputError as error:
        raise UsageError(f"--allowed-host: {error}") from error


def _origins(given: list[str]) -> tuple[str, ...]:
    """Return origins as browsers name them. Raises UsageError."""
    for one in given:
        if one != "*" and not re.fullmatch(r"https?://[^/?#@\s]+", one):
            raise UsageError(
                f"--cors-origin {one!r} is no origin; give scheme, host and port alone, such as "
                "https://chat.example"
            )
    return tuple(given)


def _weights(given: list[float], keys: list[str], shared: bool) -> tuple[float, ...]:
    """Return the weights of keys. Raises UsageError."""
    if given and not shared:
        raise UsageError("--key-weight is a part of --shared-budget; give that, too")
    if given and len(given) != len(keys):
        raise UsageError(
            f"--key-weight is given {len(given)} times and --api-key {len(keys)}; give one for "
            "each key"
        )
    if given and len(set(keys)) != len(keys):
        raise UsageError("an --api-key is given twice; give each key once, with its --key-weight")
    for one in given:
        if not (math.isfinite(one) and one > 0):
            raise UsageError(f"--key-weight {one:g} cannot be; give a positive number")
    return tuple(given)


def _gpus(device: str) -> int:
    """Return the GPUs that a replica takes."""
    from mmkv.engine.model.families.loading import resolve_device

    return int(resolve_device(device).type == "cuda")


def _bytes(option: str, text: str) -> int:
    try:
        return parse_bytes(text)
    except BudgetError as error:
        raise UsageError(f"{option}: {error}") from error
