"""The model hub: whether it is in reach, and SHA-256 of a checkpoint's config."""

from __future__ import annotations

import hashlib
import socket
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

import huggingface_hub.constants as hub

from mmkv.engine.model.gguf.config import gguf_folder, is_gguf


def hub_reachable() -> bool:
    """Return whether the hub resolves; its client would retry for half a minute offline."""
    if hub.is_offline_mode():
        return False
    host = urlsplit(hub.ENDPOINT).hostname
    if host is None or urllib.request.getproxies():
        return True
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return False
    return True


def config_digest(model: str) -> str:
    """Return SHA-256 of the ``config.json`` of a model, as ``sha256sum`` gives it.

    Args:
        model: a folder, hub id or GGUF file.

    Raises:
        OSError: there is none, or it is out of reach.
    """
    from transformers.utils import cached_file

    if is_gguf(model):
        model = gguf_folder(model)
    local = Path(model).is_dir() or not hub_reachable()
    found = cached_file(model, "config.json", local_files_only=local)
    return hashlib.sha256(Path(found).read_bytes()).hexdigest()
