"""The entry point ``lmms_eval.models`` of mmkv; it imports nothing heavy."""

from __future__ import annotations

from typing import Any


def manifest() -> Any:
    """Return the ModelManifest of ``--model mmkv``; lmms-eval asks for it on every import."""
    from lmms_eval.models.registry_v2 import ModelManifest

    return ModelManifest(
        model_id="mmkv",
        chat_class_path="mmkv.eval.lmms.adapter.MmkvChat",
        simple_class_path="mmkv.eval.lmms.adapter.MmkvSimple",
    )
