"""Write the model card of a gate file, in the Hugging Face hub's format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from mmkv.measure.tables import pipe_table

_BODY = """---
{front}
---

# Retention gates for {model}

Trained with `{command}` (mmkv {version}, commit {commit}) on the frozen model: its `config.json`
has SHA-256 `{config}`, its decoder weights in memory, as {dtype}, `{digest}` before and after.

```sh
mmkv chat {model} --gates THIS_FOLDER --policy {policy} --budget {budget:g}
```

## Data

{data}

{options}

## Held out, with real eviction at M = {held_budget:g}

{held_out}{results}

## Settings

{settings}
"""


def write_card(folder: Path, described: Mapping[str, Any]) -> None:
    """Write ``README.md`` from what ``gates.json`` says."""
    settings = described["settings"]
    options = dict(described["data_options"])
    held_out = _list(options.pop("eval_data", ()))
    front = ModelCardData(
        library_name="mmkv",
        base_model=_hub_id(described["base_model"]),
        tags=["mmkv", "retention-gates", "kv-cache"],
    )
    text = _BODY.format(
        front=front.to_yaml(),
        model=described["base_model"],
        command=described["command"],
        version=described["versions"].get("mmkv"),
        commit=described["commit"] or "unknown",
        config=described["base_config_sha256"],
        dtype=described["base_dtype"],
        digest=described["base_sha256"],
        policy="dbtrimkv" if settings["scope"] == "global" else "trimkv",
        budget=settings["budget"],
        held_budget=settings["held_out_budget"] or settings["budget"],
        data=_list(described["data"]) or "- not stated",
        options=_table(options),
        held_out=f"{held_out}\n\n" if held_out else "",
        results=_table(described["results"]) or "No held-out data was given.",
        settings=_table(settings),
    )
    ModelCard(text).save(folder / "README.md")


def _hub_id(model: str) -> str | None:
    """Return the model's id on the hub; None for a folder."""
    return model if model.count("/") == 1 and not Path(model).exists() else None


def _list(sources: Sequence[str]) -> str:
    return "\n".join(f"- `{source}`" for source in sources)


def _table(values: Mapping[str, Any]) -> str:
    rows = [
        (name, f"{value:.4g}" if isinstance(value, float) else value)
        for name, value in values.items()
    ]
    return pipe_table(("name", "value"), rows) if rows else ""
