"""Decoding many steps without the host: one CUDA graph per batch size."""

from engine.backends.cuda.graph_runner import GraphRunner

__all__ = ["GraphRunner"]
