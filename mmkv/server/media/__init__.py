"""Turn the pictures and videos that a request names into pixels, safely.

The door is :class:`mmkv.server.media.resolver.MediaResolver`::

    resolver = MediaResolver(folder=allowed_or_none)
    media = await resolver.resolve([Source("image", url), Source("video", url, {"fps": 2})])
    parts = [medium.part for medium in media]      # for Session.send
    await resolver.aclose()

A request's text never reaches :func:`mmkv.prompt.media.load_image`, which opens paths. What goes
wrong is a :class:`mmkv.server.media.limits.MediaError` with an HTTP status. This package imports
nothing by itself, so that a decoding process starts quickly.
"""
