"""Run transformers' ``generate`` on a KV cache that never outgrows its budget."""

from mmkv.hf.cache import RetainedCache
from mmkv.hf.handle import Retained, RetainedMemory, retain

__all__ = ["Retained", "RetainedCache", "RetainedMemory", "retain"]
