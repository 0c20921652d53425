"""Write the model card of a gate file, in the Hugging Face hub's format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from mmkv.training.measure.tables import pipe_table

_BODY = """---
{front}
---

# {title} for {model}

Trained with `{command}` (mmkv {version}, commit {commit}) on the frozen model: its `config.json`
has SHA-256 `{config}`, its decoder weights in memory, as {dtype}, `{digest}` before and after.

{usage}

## Data

{data}

{options}

## Held out, {held_how}

{held_out}{results}

## Settings

{settings}
"""


def write_card(folder: Path, described: Mapping[str, Any]) -> None:
    """Write ``README.md`` from what ``gates.json`` says."""
    settings = described["settings"]
    kind, usage, held_how = _method(settings, described["base_model"])
    options = dict(described["data_options"])
    held_out = _list(options.pop("eval_data", ()))
    front = ModelCardData(
        library_name="mmkv",
        base_model=_hub_id(described["base_model"]),
        tags=["mmkv", f"{kind}-gates", "kv-cache"],
    )
    text = _BODY.format(
        front=front.to_yaml(),
        title=f"{kind.capitalize()} gates",
        model=described["base_model"],
        command=described["command"],
        version=described["versions"].get("mmkv"),
        commit=described["commit"] or "unknown",
        config=described["base_config_sha256"],
        dtype=described["base_dtype"],
        digest=described["base_sha256"],
        usage=usage,
        held_how=held_how,
        data=_list(described["data"]) or "- not stated",
        options=_table(options),
        held_out=f"{held_out}\n\n" if held_out else "",
        results=_table(described["results"]) or "No held-out data was given.",
        settings=_table(settings),
    )
    ModelCard(text).save(folder / "README.md")


def _method(settings: Mapping[str, Any], model: str) -> tuple[str, str, str]:
    """Return the kind of the gates, how to use them, and how they were measured."""
    if settings["method"] == "wgkv":
        window, threshold = settings["window"], settings["threshold"]
        usage = f"```sh\nmmkv chat {model} --gates THIS_FOLDER --policy wgkv\n```"
        return "write", usage, f"with W_local = {window} and tau = {threshold:g}"
    policy = "dbtrimkv" if settings["scope"] == "global" else "trimkv"
    budget = settings["budget"]
    held = settings["held_out_budget"] or budget
    command = f"mmkv chat {model} --gates THIS_FOLDER --policy {policy} --budget {budget:g}"
    usage = f"```sh\n{command}\n```"
    return "retention", usage, f"with real eviction at M = {held:g}"


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
