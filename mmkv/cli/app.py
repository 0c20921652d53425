"""The ``mmkv`` command: ``chat``, ``models``, ``pull``, ``cache``, ``explain``, ``serve``,
``policies`` and ``env``, and registered ones: ``distill`` of training, ``bench``, ``eval`` and
``mmdu`` of eval.

Exit codes: 0 done, 1 failed (one line on stderr says why and what to do), 2 wrong usage,
130 stopped with Ctrl-C. Nothing here imports torch: help and usage errors come at once.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from mmkv import __version__
from mmkv.chat.options import CONVERSATIONS, ChatOptions
from mmkv.cli import arguments
from mmkv.cli.arguments import ChatCommand, Quiet
from mmkv.engine.budget import format_bytes
from mmkv.engine.config import EngineConfig
from mmkv.engine.errors import STOPS, MmkvError, one_line
from mmkv.loading import Terminal, UsageError, load_engine, model_name, require_room
from mmkv.resources import PULLED, state_folder
from mmkv.server.settings import KEY_VARIABLE, ServerSettings

if TYPE_CHECKING:
    from mmkv.api import Engine


@arguments.engine_options()
@arguments.chat_options(
    "prompt",
    "image",
    "video",
    "fps",
    "num_frames",
    "min_pixels",
    "max_pixels",
    "pixel_limit",
    "system",
    "max_new_tokens",
    "temperature",
    "generation_config",
    "quiet",
)
def explain(
    engine: EngineConfig,
    options: ChatOptions,
    output: Annotated[
        str, typer.Option("--output", "-o", help="The page: one HTML file.")
    ] = "report.html",
    figures: Annotated[
        str | None, typer.Option(help="Also draw each view as a PNG file in this folder.")
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(
            metavar="PAGE",
            help="Show an earlier page beside it: another policy, budget or model.",
        ),
    ] = None,
) -> None:
    """Answer once and show on a page what was kept, when, and why (docs/how-to/explain.md)."""
    options = replace(options, engine=engine, report=output, figures=figures, compare=compare)
    options.check()
    from mmkv.chat.run import run_chat

    raise typer.Exit(run_chat(options))


def models(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List checkpoints and gates at hand: bundled, below this folder, and in the hub's cache."""
    from mmkv import checkpoints

    listing = checkpoints.listed()
    if as_json:
        import json

        print(json.dumps(listing.as_json(), indent=2))
        return
    from rich.console import Console

    Console().print(checkpoints.table(listing))


def pull(
    name: Annotated[str, typer.Argument(metavar="NAME", help=f"A hub id, or {', '.join(PULLED)}.")],
    quiet: Quiet = False,
) -> None:
    """Fetch a checkpoint or gates: safetensors, settings, tokenizer."""
    from mmkv.planner import planned
    from mmkv.pull import pull as fetch

    if quiet:
        from huggingface_hub.utils import disable_progress_bars

        disable_progress_bars()
        os.environ["PIP_QUIET"] = "1"

    say = Terminal(quiet).note
    folder = fetch(name, say)
    if made := planned(str(folder)):
        sizes = (f"{format_bytes(plan.weights)} ({form})" for form, plan in made.items())
        say(f"weights in memory: {', '.join(sizes)}; --weights chooses")
        ask = PULLED[name].ask.format(folder=folder) if name in PULLED else ""
        say(f"talk with it: mmkv chat {name} {ask}".rstrip())
    print(folder)


def cache(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="Only those of this checkpoint."),
    ] = None,
    delete: Annotated[
        bool, typer.Option("--clear", help="Delete them; running processes keep the ones they use.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List packed weights on disk, which make later starts fast (docs/reference/weights.md)."""
    from mmkv.engine.model import kept_files

    files = kept_files.clear(name) if delete else kept_files.kept(name)
    size = format_bytes(sum(file.bytes for file in files))
    if as_json:
        import json

        print(json.dumps([file.as_json() for file in files], indent=2))
    else:
        import time

        for file in files:
            used = time.strftime("%Y-%m-%d %H:%M", time.localtime(file.used))
            kind = f"{file.form:5} {file.part:6}"
            print(f"{format_bytes(file.bytes):>10}  {kind}  last used {used}  {file.model}")
        did = "deleted" if delete else "held"
        print(f"{size} {did} in {kept_files.folder()} ({len(files)} files)")


# A chunk of a prompt holds up everyone's next token, so that it is shorter than for one user.
CHUNK_ON_CPU = 256


@arguments.engine_options()
@arguments.server_options
@arguments.chat_options(
    "generation_config",
    "min_pixels",
    "max_pixels",
    "calibration",
    "on_risk",
    "reread_budget",
    "quiet",
)
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
    options.check()
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
        # A calibration holds for the chunks that it was made with.
        if engine.device.type == "cpu" and not chosen and options.calibration is None:
            engine.prefill_chunk = CHUNK_ON_CPU
        if settings.forget_thoughts:
            engine.require_thoughts("--forget-thoughts")
            engine.forget_thoughts = True
        if settings.shared_budget is not None:
            shared = settings.shared_floor, settings.shared_by_risk
            engine.share(settings.shared_budget, *shared)
        options.certify(engine, terminal.note)
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


# What training and eval register in mmkv's own pyproject.toml, in the group mmkv.commands.
_REGISTERED = ("distill", "calibrate", "bench", "eval", "mmdu")


class _Commands(TyperGroup):
    """The commands here and the registered ones, which are imported only when they are needed."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command by its name, None where nobody offers it."""
        if cmd_name not in self.commands:
            self._add_registered()
        return super().get_command(ctx, cmd_name)

    def list_commands(self, ctx: Any) -> list[str]:
        """List the commands in the order in which one comes to need them."""
        self._add_registered()
        order = "chat models pull cache explain serve policies env".split() + list(_REGISTERED)
        names = super().list_commands(ctx)
        return sorted(names, key=lambda name: order.index(name) if name in order else len(order))

    def _add_registered(self) -> None:
        for name in _REGISTERED:
            if name not in self.commands:
                self.commands[name] = _registered(name)


def _registered(name: str) -> Any:
    """Return a registered command; one that does not load says so in the help, and when it runs."""
    from importlib.metadata import distributions

    # Those of mmkv alone: looking through all packages would make the help slower. What an older
    # build has left in a checkout counts as an installation, too.
    points = [
        point
        for installed in distributions(name="mmkv")
        for point in installed.entry_points.select(group="mmkv.commands", name=name)
    ]
    if not points:
        reason = "this installation is older than its source, or mmkv is not installed"
        return _broken(name, f"{reason}; run pip install --no-deps -e . in the checkout")
    point = points[0]
    try:
        command = typer.main.get_command(point.load())
    except STOPS:
        raise
    except BaseException as error:
        first = (str(error).strip().splitlines() or [""])[0]
        return _broken(name, f"{point.value} does not load ({type(error).__name__}: {first})")
    command.name = name
    return command


def _broken(name: str, reason: str) -> TyperCommand:
    from rich.markup import escape

    def fail() -> None:
        raise MmkvError(f"{name}: {reason}")

    takes_all = {"allow_extra_args": True, "ignore_unknown_options": True}
    return TyperCommand(
        name,
        callback=fail,
        help=escape(one_line(reason)),
        add_help_option=False,
        context_settings=takes_all,
    )


app = typer.Typer(
    name="mmkv",
    cls=_Commands,
    help="Vision-language decoding with a bounded KV cache.",
    pretty_exceptions_show_locals=False,
    rich_markup_mode="rich",
)

app.command()(explain)
app.command()(models)
app.command()(pull)
app.command()(cache)
app.command()(serve)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; always ends with SystemExit."""
    sys.exit(run(arguments))


def run(words: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code; without arguments it shows the help."""
    given = list(sys.argv[1:] if words is None else words)
    _replace_closed_streams()
    try:
        code = app(args=given or ["--help"], prog_name="mmkv", standalone_mode=False)
    except (UsageError, arguments.CLICK_USAGE_ERROR) as error:
        text = error.format_message() if hasattr(error, "format_message") else str(error)
        ours = f"mmkv {given[0]}" if given and not given[0].startswith("-") else "mmkv"
        place = getattr(getattr(error, "ctx", None), "command_path", ours)
        joint = " See" if text.endswith("?") else "; see"
        return _fail(f"{text.strip().rstrip('.')}{joint} {place} --help", 2)
    except MmkvError as error:
        return _fail(str(error), 1)
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except BrokenPipeError:
        # The reader of our output has gone (mmkv ... | head). Python would complain once more
        # when it flushes stdout at exit, so stdout is replaced.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except SystemExit as error:  # typer and rich end so when the reader of our output has gone
        return error.code if isinstance(error.code, int) else 1
    return code if isinstance(code, int) else 0


def _replace_closed_streams() -> None:
    """Give nothing to read, and write to nowhere, where the program was started without a stream.

    Python has None there, which no library expects.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


def _fail(message: str, code: int) -> int:
    print(f"mmkv: error: {one_line(message)}", file=sys.stderr)
    return code


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"mmkv {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Vision-language decoding with a bounded KV cache."""


@app.command()
def env() -> None:
    """Show versions, devices, and which optional packages are usable."""
    from mmkv.environment import describe

    print(describe())
    print(arguments.described(chat))


@app.command()
def policies(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the policies: papers, needs, parameters, and where each runs."""
    import json as text

    from mmkv import policies as listing

    rows = listing.listed()
    if as_json:
        print(text.dumps(listing.as_json(rows), indent=2))
        return
    from rich.console import Console

    Console().print(listing.table(rows))


@app.command(cls=ChatCommand)
@arguments.engine_options()
@arguments.chat_options()
def chat(
    context: typer.Context,
    engine: EngineConfig,
    options: ChatOptions,
    load: Annotated[
        str | None,
        typer.Option(
            help="Continue a saved conversation.",
            callback=arguments.take_saved_options,
            is_eager=True,
            rich_help_panel=CONVERSATIONS,
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue the latest conversation.",
            callback=arguments.take_latest_options,
            is_eager=True,
            rich_help_panel=CONVERSATIONS,
        ),
    ] = False,
) -> None:
    """Talk with a model about pictures; one answer with -p or piped input."""
    if resume:
        load = arguments.latest_chat(context)
    elif load is not None:
        arguments.require_named(context, load)
    options = replace(options, engine=engine, load=load, rebudget=arguments.budget_given(context))
    options.check()
    from mmkv.chat.run import run_chat

    raise typer.Exit(run_chat(options))
