"""``mmkv explain``: one answer, and a page of what was kept for it, when, and why."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from mmkv.chat.options import ChatOptions
from mmkv.cli import arguments
from mmkv.engine.config import EngineConfig


@arguments.engine_options()
def explain(
    engine: EngineConfig,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="The question; - reads it from stdin.")
    ] = None,
    output: Annotated[
        str, typer.Option("--output", "-o", help="The page: one HTML file.")
    ] = "report.html",
    figures: Annotated[
        str | None, typer.Option(help="Also draw each view as a PNG file in this folder.")
    ] = None,
    image: Annotated[
        list[str] | None,
        typer.Option(
            help="Picture: path, URL or data: URI. Repeatable.", rich_help_panel=arguments.MEDIA
        ),
    ] = None,
    video: Annotated[
        list[str] | None,
        typer.Option(help="Video: path or URL. Repeatable.", rich_help_panel=arguments.MEDIA),
    ] = None,
    fps: Annotated[
        float | None,
        typer.Option(
            help="Frames per second to take (default 2).", rich_help_panel=arguments.MEDIA
        ),
    ] = None,
    num_frames: Annotated[
        int | None,
        typer.Option(
            help="Number of frames to take, instead of --fps.", rich_help_panel=arguments.MEDIA
        ),
    ] = None,
    min_pixels: arguments.MinPixels = None,
    max_pixels: arguments.MaxPixels = None,
    pixel_limit: arguments.PixelLimit = None,
    system: arguments.System = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="Longest reply, in tokens (default 512).")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Sampling temperature; 0 takes the likeliest token.")
    ] = None,
    generation_config: arguments.FollowsCheckpoint = True,
    quiet: arguments.Quiet = False,
) -> None:
    """Answer once and write a page of what was kept, when, and why (docs/how-to/explain.md)."""
    given: dict[str, Any] = {**locals(), "image": image or [], "video": video or []}
    options = ChatOptions(report=given.pop("output"), **given)
    options.check()
    from mmkv.chat.run import run_chat

    raise typer.Exit(run_chat(options))
