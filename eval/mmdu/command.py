"""The command line of ``mmkv mmdu``. Nothing here imports torch."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from mmkv.chat.options import ChatOptions
from mmkv.cli import arguments
from mmkv.engine.config import EngineConfig
from mmkv.loading import UsageError

app = typer.Typer(add_completion=False, rich_markup_mode="rich", no_args_is_help=False)

DEFAULT_OUTPUT = Path("mmdu-answers")
_DATA, _JUDGE = "Data", "Judge"

Data = Annotated[
    Path | None,
    typer.Option(help="MMDU's benchmark.json. Default: our small set.", rich_help_panel=_DATA),
]
Images = Annotated[
    Path | None,
    typer.Option(help="Folder of the pictures. Default: that of --data.", rich_help_panel=_DATA),
]
Limit = Annotated[
    int | None, typer.Option(help="Take the first N dialogues only.", rich_help_panel=_DATA, min=1)
]
Unused = Annotated[
    bool,
    typer.Option(
        "--allow-unused-images",
        help="Accept rows that list more pictures than they use.",
        rich_help_panel=_DATA,
    ),
]
Answers = Annotated[Path, typer.Option(help="Folder of answers.")]


@app.callback(invoke_without_command=True)
@arguments.engine_options(model="option")
@arguments.chat_options("system", "min_pixels", "max_pixels", "pixel_limit", "quiet")
def answer(
    context: typer.Context,
    engine: EngineConfig,
    options: ChatOptions,
    data: Data = None,
    images: Images = None,
    limit: Limit = None,
    allow_unused_images: Unused = False,
    output: Annotated[
        Path, typer.Option(help="Folder of answers; finished dialogues in it are kept.")
    ] = DEFAULT_OUTPUT,
    max_new_tokens: Annotated[
        int, typer.Option(help="Longest answer, in tokens.", rich_help_panel=arguments.CACHE)
    ] = 2048,
) -> None:
    """Answer MMDU's dialogues under a budget; judge, score and table rate the answers."""
    if context.invoked_subcommand is not None:
        _require_nothing_before(context)
        return
    options = replace(options, engine=engine, max_new_tokens=max_new_tokens, no_stream=True)
    options.check()
    from mmkv.eval.mmdu.run import DataOptions, run

    raise typer.Exit(run(DataOptions(data, images, limit, allow_unused_images), options, output))


def _require_nothing_before(context: typer.Context) -> None:
    """Refuse options of ``mmkv mmdu`` before a subcommand, which has its own."""
    for name in context.params:
        source = context.get_parameter_source(name)
        # By name: typer brings its own click in some versions and uses the package in others.
        if source is not None and source.name == "COMMANDLINE":
            raise UsageError(
                f"--{name.replace('_', '-')} stands before {context.invoked_subcommand!r}; "
                "write it after"
            )


@app.command()
def judge(
    answers: Answers,
    base_url: Annotated[
        str, typer.Option(help="For example https://api.openai.com/v1.", rich_help_panel=_JUDGE)
    ],
    judge_model: Annotated[
        str, typer.Option(help="Name of the judge's model.", rich_help_panel=_JUDGE)
    ],
    data: Data = None,
    images: Images = None,
    limit: Limit = None,
    allow_unused_images: Unused = False,
    output: Annotated[Path | None, typer.Option(help="Default: ANSWERS/judge-MODEL.")] = None,
    api_key_env: Annotated[
        str, typer.Option(help="Environment variable with the key.", rich_help_panel=_JUDGE)
    ] = "OPENAI_API_KEY",
    rubric: Annotated[
        Path | None,
        typer.Option(help="A text to use in place of our rubric.", rich_help_panel=_JUDGE),
    ] = None,
    extra_body: Annotated[
        str | None,
        typer.Option(
            help="JSON put into every request; null takes a field out.", rich_help_panel=_JUDGE
        ),
    ] = None,
    workers: Annotated[
        int, typer.Option(help="Calls at a time.", rich_help_panel=_JUDGE, min=1, max=64)
    ] = 4,
    timeout: Annotated[
        float, typer.Option(help="Seconds for one call.", rich_help_panel=_JUDGE)
    ] = 180.0,
    retries: Annotated[
        int,
        typer.Option(
            help="More attempts after a rate limit, fault or timeout.",
            rich_help_panel=_JUDGE,
            min=0,
        ),
    ] = 6,
    asks: Annotated[
        int,
        typer.Option(
            help="How often to ask for scores that can be read.", rich_help_panel=_JUDGE, min=1
        ),
    ] = 3,
    retry_failed: Annotated[
        bool,
        typer.Option("--retry-failed", help="Ask failed questions again.", rich_help_panel=_JUDGE),
    ] = False,
    input_price: Annotated[
        float | None,
        typer.Option(help="Dollars per million tokens in.", rich_help_panel=_JUDGE),
    ] = None,
    output_price: Annotated[
        float | None,
        typer.Option(help="Dollars per million tokens out.", rich_help_panel=_JUDGE),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before sending.")] = False,
    quiet: arguments.Quiet = False,
) -> None:
    """Score the answers with an OpenAI-compatible model; a stopped run resumes."""
    if not timeout > 0:
        raise UsageError(f"--timeout is {timeout:g}; give seconds above 0")
    if (input_price is None) != (output_price is None):
        raise UsageError("--input-price and --output-price belong together; give both")
    from mmkv.eval.mmdu.client import Endpoint
    from mmkv.eval.mmdu.judge import JudgeOptions, run_judge
    from mmkv.eval.mmdu.run import DataOptions

    key = os.environ.get(api_key_env, "").strip() or None
    endpoint = Endpoint(base_url, judge_model, key, _json_object(extra_body), retries, timeout)
    prices = None if input_price is None or output_price is None else (input_price, output_price)
    options = JudgeOptions(
        DataOptions(data, images, limit, allow_unused_images),
        answers,
        output,
        endpoint,
        rubric,
        workers,
        asks,
        retry_failed,
        yes,
        quiet,
        prices,
    )
    raise typer.Exit(run_judge(options))


def _json_object(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        found = json.loads(text)
    except ValueError as error:
        raise UsageError(f"--extra-body is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise UsageError('--extra-body is not a JSON object such as {"temperature": 0}')
    return found


@app.command()
def score(answers: Answers = DEFAULT_OUTPUT, data: Data = None, limit: Limit = None) -> None:
    """Count exact answers, for sets that have them (ours); no judge is needed."""
    from mmkv.eval.mmdu.run import DataOptions, run_score

    raise typer.Exit(run_score(DataOptions(data, None, limit, True), answers))


@app.command()
def table(
    folders: Annotated[
        list[Path], typer.Argument(help="Folders of judged answers; the first is the baseline.")
    ],
    without_failures: Annotated[
        bool, typer.Option("--without-failures", help="Leave failures out of the means.")
    ] = False,
) -> None:
    """Compare judged runs, each with the first."""
    from mmkv.eval.mmdu.judge import compare

    compare(folders, without_failures).show()
