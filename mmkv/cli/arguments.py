"""Options that several commands share, for typer. Nothing here imports torch."""

from __future__ import annotations

from typing import Annotated

import typer

MEDIA, CACHE = "Pictures and videos", "Model and cache"

Model = Annotated[
    str | None, typer.Argument(help="Model folder or hub id. Default: the small bundled model.")
]
System = Annotated[str | None, typer.Option(help="System message.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No notes or progress.")]
MinPixels = Annotated[
    int | None, typer.Option(help="Enlarge pictures below this.", rich_help_panel=MEDIA)
]
MaxPixels = Annotated[
    int | None, typer.Option(help="Shrink pictures above this.", rich_help_panel=MEDIA)
]
Policy = Annotated[
    str | None,
    typer.Option(
        help="What to keep. Default: dbtrimkv with gates, else streamingllm. dbtrimkv+N also "
        "keeps the newest N tokens.",
        rich_help_panel=CACHE,
    ),
]
Budget = Annotated[
    float | None,
    typer.Option(
        help="Entries to keep per layer and KV head, on average (default 256).",
        rich_help_panel=CACHE,
    ),
]
BudgetBytes = Annotated[
    str | None, typer.Option(help="Budget as memory, for example 64MiB.", rich_help_panel=CACHE)
]
BudgetFraction = Annotated[
    float | None,
    typer.Option(help="Budget as a share of the tokens seen.", rich_help_panel=CACHE),
]
Lookahead = Annotated[
    float, typer.Option(help="Steps that scores look ahead, or inf.", rich_help_panel=CACHE)
]
EvictEvery = Annotated[
    int, typer.Option(help="Decode steps between evictions.", rich_help_panel=CACHE)
]
PrefillChunk = Annotated[
    int, typer.Option(help="Prompt tokens per prefill chunk.", rich_help_panel=CACHE)
]
PageSize = Annotated[int, typer.Option(help="Entries per cache page.", rich_help_panel=CACHE)]
Gates = Annotated[
    str | None,
    typer.Option(
        help="Retention gates: path, hub id, or 'random' for speed runs.", rich_help_panel=CACHE
    ),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...", rich_help_panel=CACHE)]
DType = Annotated[
    str, typer.Option(help="auto, float32, bfloat16 or float16.", rich_help_panel=CACHE)
]
