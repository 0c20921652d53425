"""Physical KV memory: a pool of pages, and ragged rows of pages."""

from mmkv.engine.cache.forms import EncodedKV, KVForm
from mmkv.engine.cache.layout import COLUMNS, Columns
from mmkv.engine.cache.pool import PagePool
from mmkv.engine.cache.ragged import Entries, RaggedCache

__all__ = ["COLUMNS", "Columns", "EncodedKV", "Entries", "KVForm", "PagePool", "RaggedCache"]
