"""Physical KV memory: a pool of pages, and ragged rows of pages."""

from engine.cache.pool import PagePool
from engine.cache.ragged import Entries, RaggedCache

__all__ = ["Entries", "PagePool", "RaggedCache"]
