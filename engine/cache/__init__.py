"""Physical KV memory: a pool of pages, ragged rows of pages, and the forms that keys take in
them.
"""

from mmkv.engine.cache.forms import EncodedKV, KVForm
from mmkv.engine.cache.layout import COLUMNS, Columns
from mmkv.engine.cache.pool import PagePool
from mmkv.engine.cache.ragged import Entries, RaggedCache

__all__ = ["COLUMNS", "Columns", "EncodedKV", "Entries", "KVForm", "PagePool", "RaggedCache"]
