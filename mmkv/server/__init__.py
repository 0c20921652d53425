"""An OpenAI-compatible server (docs/how-to/serve.md); needs the extra ``serve``.

``app`` and the routes (``chat``, ``responses``, ``session_routes``) speak HTTP and never touch
torch. ``engine_thread`` owns the engine; ``job``, ``prompts``, ``kept`` and ``writer`` are what it
runs. ``media``: pictures and videos.
"""
