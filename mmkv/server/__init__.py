"""An OpenAI-compatible server (docs/how-to/serve.md); needs the extra ``serve``.

``app`` and the routes (``chat``, ``responses``, ``sessions``) speak HTTP and never touch torch.
``engine_thread`` owns the engine; it runs a ``job`` for each request. ``conversations`` are kept in
memory, ``store`` writes them to disk. ``media``: pictures and videos.
"""
