"""An OpenAI-compatible server (docs/how-to/serve.md); needs the extra ``serve``.

``app``, ``chat``, ``schema``, ``reply_json``: what speaks HTTP, which never touches torch.
``worker``: the thread that owns the engine. ``machine``, ``job``, ``prompts``, ``snapshots``,
``writer``: what it runs. ``media``: pictures and videos.
"""
