"""mmkv's cache inside vLLM, as a plugin: ``docs/how-to/vllm.md``.

vLLM runs the model, the queue, the ranks and the server; this package brings a cache spec whose
requests take a bounded number of blocks, and an attention backend that keeps the entries with the
best scores in them. Nothing of vLLM is changed: it is found by the entry point
``vllm.general_plugins`` and does nothing without ``--additional-config '{"mmkv": {...}}'``.
"""

from __future__ import annotations


def register() -> None:
    """Tell vLLM of the backend and the cache spec; vLLM calls this in each of its processes."""
    from mmkv.vllm.backend import register_backends
    from mmkv.vllm.spec import register_spec

    register_spec()
    register_backends()
