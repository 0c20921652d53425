"""Whether the model hub can be asked at all."""

from __future__ import annotations

import socket
import urllib.request
from urllib.parse import urlsplit

import huggingface_hub.constants as hub


def in_reach() -> bool:
    """False offline or without a resolvable hub: its client retries for half a minute."""
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
