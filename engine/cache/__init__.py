"""Physical KV memory: a pool of pages, and ragged rows of pages."""

from engine.cache.forms import Form, Stored
from engine.cache.layout import COLUMNS, Columns
from engine.cache.pool import PagePool
from engine.cache.ragged import Entries, RaggedCache

__all__ = ["COLUMNS", "Columns", "Entries", "Form", "PagePool", "RaggedCache", "Stored"]
