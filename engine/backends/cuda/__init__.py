"""The GPU: Triton kernels, and decoding many steps without the host in one CUDA graph."""

from mmkv.engine.backends.cuda.backend import CudaBackend
from mmkv.engine.backends.cuda.static_step import GraphRunner

__all__ = ["CudaBackend", "GraphRunner"]
