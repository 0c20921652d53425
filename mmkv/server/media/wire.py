"""What goes between the server and a process that decodes: JSON, then raw bytes."""

from __future__ import annotations

import json
import struct
from typing import Any

HEADER = struct.Struct(">IQ")  # lengths of the JSON text and of the bytes after it


def pack(header: dict[str, Any], size: int) -> bytes:
    """Return what is sent before ``size`` raw bytes."""
    text = json.dumps(header).encode()
    return HEADER.pack(len(text), size) + text
