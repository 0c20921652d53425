"""``mmkv serve``: an OpenAI-compatible server."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from mmkv.chat.options import ChatOptions
from mmkv.cli import arguments
from mmkv.engine.budget import format_bytes
from mmkv.engine.config import EngineConfig
from mmkv.loading import Terminal, UsageError, load_engine, model_name, require_room
from mmkv.resources import state_folder
from mmkv.server.settings import KEY_VARIABLE, ServerSettings

if TYPE_CHECKING:
    from mmkv.api import Engine

# A chunk of a prompt holds up everyone's next token, so that it is shorter than for one user.
CHUNK_ON_CPU = 256


@arguments.engine_options()
@arguments.server_options
@arguments.chat_options("generation_config", "min_pixels", "max_pixels", "quiet")
def serve(
    context: typer.Context,
    engine: EngineConfig,
    settings: ServerSettings,
    options: ChatOptions,
) -> None:
    """Serve a model over HTTP, as OpenAI's API does."""
    from mmkv.server.run import require_packages
    from mmkv.server.run import serve as run

    require_packages()
    _require_agreement(context, settings)
    if settings.process_memory is not None:
        settings = _with_cache_inside(context, settings, settings.process_memory)
    model, terminal = model_name(engine), Terminal(options.quiet)
    config = replace(engine, model=model, kv_limit=settings.memory)
    settings = replace(
        settings,
        name=settings.name or Path(model).name or model,
        keep_sessions=settings.keep_sessions or settings.replicas is not None,
        idle_folder=state_folder() / "hibernated",
        warm=True,
    )
    chosen = arguments.on_command_line(context, "prefill_chunk")

    def load() -> Engine:
        require_room(config, settings.memory)
        engine = load_engine(
            config,
            Terminal(options.quiet),
            min_pixels=options.min_pixels,
            max_pixels=options.max_pixels,
            generation_config=options.generation_config,
        )
        if engine.device.type == "cpu" and not chosen:
            engine.prefill_chunk = CHUNK_ON_CPU
        if settings.forget_thoughts:
            engine.require_thoughts("--forget-thoughts")
            engine.forget_thoughts = True
        if settings.shared_budget is not None:
            shared = settings.shared_floor, settings.shared_by_risk
            engine.share(settings.shared_budget, *shared)
        return engine

    if settings.replicas is None:
        run(load, settings, config.lookahead, terminal.note)
    else:
        from mmkv.server.replicas import serve_replicas

        serve_replicas(load, settings, config.lookahead, terminal.note, gpus=_gpus(config.device))


def _require_agreement(context: typer.Context, settings: ServerSettings) -> None:
    """Raise UsageError for options that contradict each other."""
    keeps = settings.keep_sessions or settings.replicas is not None
    if keeps and settings.session_folder is None:
        raise UsageError(
            "--keep-sessions and --replicas need a --session-folder to keep sessions in"
        )
    for name in ("max_connections", "access_log"):
        if settings.replicas is not None and arguments.on_command_line(context, name):
            raise UsageError(
                f"--{name.replace('_', '-')} does nothing beside --replicas, whose connections and "
                "logs are Ray's; leave it out"
            )
    for name in ("shared_floor", "shared_by_risk"):
        if settings.shared_budget is None and arguments.on_command_line(context, name):
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag} is a part of --shared-budget; give that, too")
    _require_keys(settings.api_keys)
    _require_weights(settings)


def _with_cache_inside(
    context: typer.Context, settings: ServerSettings, process: int
) -> ServerSettings:
    """Return settings whose cache is a part of the process; an eighth, where nobody says."""
    source = context.get_parameter_source("memory")
    if source is not None and source.name == "DEFAULT":
        # Not less than any model needs: that the process is too small is said when it is loaded.
        return replace(settings, memory=min(settings.memory, max(process // 8, 2**24)))
    if settings.memory >= process:
        raise UsageError(
            f"--memory of {format_bytes(settings.memory)} does not fit into --process-memory of "
            f"{format_bytes(process)}, which holds weights, libraries and requests, too; lower it"
        )
    return settings


def _require_keys(keys: tuple[str, ...]) -> None:
    """Raise UsageError for an API key that is empty or blank."""
    # A variable of spaces gives no key at all; one that is empty is as if it were not set.
    blank = not keys and bool(os.environ.get(KEY_VARIABLE))
    if blank or not all(key.strip() for key in keys):
        raise UsageError(
            f"an API key is empty; give one with --api-key or {KEY_VARIABLE}, or leave it out to "
            "serve everybody"
        )


def _require_weights(settings: ServerSettings) -> None:
    """Raise UsageError where the weights are none of the keys'."""
    given, keys = settings.key_weights, settings.api_keys
    if given and settings.shared_budget is None:
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


def _gpus(device: str) -> int:
    """Return the GPUs that a replica takes."""
    from mmkv.engine.model.families.loading import resolve_device

    return int(resolve_device(device).type == "cuda")
