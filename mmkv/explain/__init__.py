"""What a session remembered and forgot: recorded, shown as a page, drawn as figures."""

from mmkv.explain.trace import Snapshot, Trace

__all__ = ["Snapshot", "Trace"]
