"""Record which entries a session kept and evicted; show them as a page or as figures."""

from mmkv.explain.snapshot import Snapshot
from mmkv.explain.trace import Trace

__all__ = ["Snapshot", "Trace"]
