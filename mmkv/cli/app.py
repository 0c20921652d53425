"""The ``mmkv`` command: ``chat``, ``models``, ``pull``, ``cache``, ``explain``, ``serve``,
``policies`` and ``env``, and registered ones: ``distill`` of training, ``bench``, ``eval`` and
``mmdu`` of eval.

Exit codes: 0 done, 1 failed (one line on stderr says why and what to do), 2 wrong usage,
130 stopped with Ctrl-C. Nothing here imports torch: help and usage errors come at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from mmkv import __version__
from mmkv.chat.options import CONVERSATIONS, ChatOptions
from mmkv.cli import arguments
from mmkv.cli.arguments import Quiet
from mmkv.cli.config import ChatCommand, described
from mmkv.cli.serve import serve
from mmkv.engine.config import EngineConfig
from mmkv.engine.errors import STOPS, MmkvError, one_line
from mmkv.loading import UsageError
from mmkv.resources import PULLED


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
    from mmkv.engine.budget import format_bytes
    from mmkv.planner import planned
    from mmkv.pull import pull as fetch

    if quiet:
        from huggingface_hub.utils import disable_progress_bars

        disable_progress_bars()
        os.environ["PIP_QUIET"] = "1"

    def say(line: str) -> None:
        if not quiet:
            print(f"mmkv: {line}", file=sys.stderr)

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
    from mmkv.engine.budget import format_bytes
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


# What training and eval register in mmkv's own pyproject.toml, in the group mmkv.commands.
_REGISTERED = ("distill", "bench", "eval", "mmdu")


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

# typer carries its own copy of click in some versions and uses the package in others; the class
# that both derive usage mistakes from is the base of typer's own public one.
_CLICK_USAGE_ERROR: Any = typer.BadParameter.__mro__[1]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; always ends with SystemExit."""
    sys.exit(run(arguments))


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code; without arguments it shows the help."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    _replace_closed_streams()
    try:
        code = app(args=given or ["--help"], prog_name="mmkv", standalone_mode=False)
    except (UsageError, _CLICK_USAGE_ERROR) as error:
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
    print(described(chat))


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
