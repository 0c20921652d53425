"""The media of a request: hashed to find its memory again, decoded only when they are read."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

from mmkv.engine.errors import InputError
from mmkv.prompt.media import data_uri_content
from mmkv.server.conversation import Message, Part
from mmkv.server.media.errors import BAD_FORM, MediaError
from mmkv.server.media.limits import Allowance
from mmkv.server.media.resolver import MediaResolver, Medium, Source


class RequestMedia:
    """Finds the media of one request.

    The digest of a data: URL is that of its content, so that a picture that need not be read again
    is not decoded. Others are fetched and decoded to know them, once. What all of them take counts
    against one allowance.
    """

    def __init__(self, resolver: MediaResolver) -> None:
        self._resolver = resolver
        self._allowance = Allowance(resolver.limits, resolver.room)
        self._contents: dict[Part, Any] = {}

    async def named(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages with the digests of their media. Raises MediaError.

        Media of messages that a kept memory holds have theirs already. Waits until other requests'
        media leave room.
        """
        await self._resolver.room.enter()
        parts = [part for one in messages for part in one.media if part.digest is None]
        async with self._resolver.texts:
            digests = await asyncio.to_thread(_digests, [one for one in parts if _inside(one)])
        far = [one for one in parts if not _inside(one)]
        for part, medium in zip(far, await self._resolve(far), strict=True):
            digests[part] = medium.digest
            self._contents[part] = medium.content

        def named(part: Part) -> Part:
            return dataclasses.replace(part, digest=digests[part]) if part in digests else part

        return [
            Message(one.role, tuple(map(named, one.parts))) if one.media else one
            for one in messages
        ]

    async def _resolve(self, parts: Sequence[Part]) -> list[Medium]:
        if not parts:
            return []
        return await self._resolver.resolve([source(part) for part in parts], self._allowance)

    async def contents(self, messages: Sequence[Message]) -> list[Any]:
        """Return the pictures and videos of some messages, decoded. Raises MediaError."""
        parts = [dataclasses.replace(p, digest=None) for one in messages for p in one.media]
        wanted = [part for part in dict.fromkeys(parts) if part not in self._contents]
        for part, medium in zip(wanted, await self._resolve(wanted), strict=True):
            self._contents[part] = medium.content
        return [self._contents[part] for part in parts]

    def let_go(self) -> None:
        """Leave the room to others: the engine has read them, or nobody will."""
        self._contents.clear()
        self._allowance.let_go()


def source(part: Part) -> Source:
    """Return a part as :mod:`mmkv.server.media` takes it."""
    assert part.kind != "text"
    return Source(part.kind, part.url, dict(part.options))


def _inside(part: Part) -> bool:
    return part.url[:5].lower() == "data:"


def _digests(parts: Sequence[Part]) -> dict[Part, str]:
    try:
        return {part: hashlib.sha256(data_uri_content(part.url)).hexdigest() for part in parts}
    except InputError as error:
        raise MediaError(BAD_FORM, str(error)) from error
