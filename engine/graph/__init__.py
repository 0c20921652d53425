"""Decoding many steps without the host: one CUDA graph per batch size."""

from engine.graph.runner import GraphRunner

__all__ = ["GraphRunner"]
