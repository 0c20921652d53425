"""``mmkv models`` and ``mmkv pull``: what is at hand, and how to get more."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from mmkv.cli.arguments import Quiet


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
    name: Annotated[str, typer.Argument(metavar="HUB_ID", help="A checkpoint or gates.")],
    quiet: Quiet = False,
) -> None:
    """Fetch a checkpoint or gates into the hub's cache: safetensors, settings, tokenizer."""
    from mmkv.pull import pull as fetch

    if quiet:
        from huggingface_hub.utils import disable_progress_bars

        disable_progress_bars()
    print(fetch(name, lambda line: None if quiet else print(f"mmkv: {line}", file=sys.stderr)))
