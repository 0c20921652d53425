"""The model card beside a gate file, in the format the Hugging Face hub shows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

_BODY = """---
{front}
---

# Retention gates for {model}

Trained with `{command}` (mmkv {version}, commit {commit}) on the frozen model, whose decoder
weights have SHA-256 `{digest}` before and after.

```sh
mmkv chat {model} --gates THIS_FOLDER --policy {policy} --budget {budget:g}
```

## Data

{data}

## Held out, with real eviction at M = {held_budget:g}

{results}

## Settings

{settings}
"""


def write_card(folder: Path, described: Mapping[str, Any]) -> None:
    """Write ``README.md`` from what ``gates.json`` says."""
    settings = described["settings"]
    front = ModelCardData(
        library_name="mmkv", base_model=None, tags=["mmkv", "retention-gates", "kv-cache"]
    )
    text = _BODY.format(
        front=front.to_yaml(),
        model=described["base_model"],
        command=described["command"],
        version=described["versions"].get("mmkv"),
        commit=str(described["commit"])[:12],
        digest=described["base_sha256"],
        policy="dbtrimkv" if settings["scope"] == "global" else "trimkv",
        budget=settings["budget"],
        held_budget=settings["held_out_budget"] or settings["budget"],
        data="\n".join(f"- `{source}`" for source in described["data"]) or "- not stated",
        results=_table(described["results"]) or "No held-out data was given.",
        settings=_table(settings),
    )
    ModelCard(text).save(folder / "README.md")


def _table(values: Mapping[str, Any]) -> str:
    rows = [f"| {name} | {value:.4g} |" if isinstance(value, float) else f"| {name} | {value} |"
            for name, value in values.items()]  # fmt: skip
    return "\n".join(["| name | value |", "|---|---|", *rows]) if rows else ""
