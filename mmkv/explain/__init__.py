"""What a session remembered and forgot: recorded, shown as a page, drawn as figures."""

from mmkv.explain.snapshot import Snapshot
from mmkv.explain.trace import Trace

__all__ = ["Snapshot", "Trace"]
