"""Download a medium from public addresses alone."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

import httpx

from mmkv.server.media.addresses import is_public
from mmkv.server.media.errors import BAD_FORM, REFUSED, TOO_LARGE, UNREADABLE, MediaError
from mmkv.server.media.limits import Allowance, MediaLimits
from mmkv.server.media.urls import host_of, parse_url, show

# Host and port in, numeric addresses out. Raises OSError.
Resolver = Callable[[str, int], Awaitable[list[str]]]
_REDIRECTS = (301, 302, 303, 307, 308)
_MOST_ADDRESSES = 4
_CONNECT_S = 5.0
_PIECE = 64 * 2**10


class SystemResolver:
    """Looks hosts up as the system does, in threads of its own."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(8, thread_name_prefix="mmkv-resolve")

    async def __call__(self, host: str, port: int) -> list[str]:
        """Return the addresses of ``host``. Raises OSError."""
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(
            self._threads, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        )
        return [str(address[0]) for *_, address in found]

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


class Fetcher:
    """Downloads what http(s) URLs name.

    Args:
        resolve: looks a host up; called once for each hop.
        allowed: whether an address may be dialled.
    """

    def __init__(
        self,
        limits: MediaLimits,
        resolve: Resolver,
        allowed: Callable[[str], bool] = is_public,
    ) -> None:
        self.limits, self.resolve, self.allowed = limits, resolve, allowed
        self._tls: ssl.SSLContext | None = None

    async def fetch(self, text: str, allowance: Allowance) -> bytes:
        """Download ``text``, at most what ``allowance`` has left. The caller sets a deadline.

        Each hop is parsed and looked up anew. The address that was checked is the one that is
        dialled, so a name that changes its address in between gains nothing.

        Raises:
            MediaError: see :mod:`mmkv.server.media.errors`.
        """
        url = parse_url(text, self.limits.ports)
        for _ in range(self.limits.redirects + 1):
            answer = await self._hop(url, allowance)
            if isinstance(answer, bytes):
                return answer
            url = parse_url(answer, self.limits.ports)
        raise MediaError(
            BAD_FORM,
            f"{show(text)} redirects more than {self.limits.redirects} times; give its last URL",
        )

    async def _hop(self, url: httpx.URL, allowance: Allowance) -> bytes | str:
        """Return the content at ``url``, or the URL to which it redirects."""
        shown = show(str(url))
        addresses = await self._addresses(url, shown)
        async with self._client() as client:
            for address in addresses:
                try:
                    return await self._ask(client, url, address, shown, allowance)
                except (httpx.ConnectError, httpx.ConnectTimeout):
                    continue
                # InvalidURL: the client looks at redirects, though it does not follow them.
                except (httpx.HTTPError, httpx.InvalidURL, ssl.SSLError) as error:
                    raise _unreachable(shown, type(error).__name__) from error
        raise _unreachable(shown, "no connection")

    async def _ask(
        self, client: httpx.AsyncClient, url: httpx.URL, address: str, shown: str, allow: Allowance
    ) -> bytes | str:
        host = host_of(url)
        request = client.build_request(
            "GET",
            url.copy_with(host=address, fragment=None),
            headers={"Host": url.netloc.decode("ascii"), "Accept-Encoding": "identity"},
            extensions={"sni_hostname": host},
        )
        answer = await client.send(request, stream=True)
        try:
            if answer.status_code in _REDIRECTS and "location" in answer.headers:
                return _joined(url, answer.headers["location"], shown)
            if answer.status_code != 200:
                raise _unreachable(shown, f"status {answer.status_code}")
            if answer.headers.get("content-encoding", "identity").lower() != "identity":
                raise MediaError(
                    UNREADABLE,
                    f"{shown} is sent compressed although it was asked for as it is"
                    "; give another URL",
                )
            announced = answer.headers.get("content-length", "")
            if announced.isdecimal() and int(announced[:20]) > allow.bytes:
                raise MediaError(
                    TOO_LARGE,
                    f"{shown} has {int(announced[:20]):,} bytes, more than is allowed; shrink it",
                )
            content = bytearray()
            async for piece in answer.aiter_raw(_PIECE):
                allow.take_bytes(len(piece))
                allow.hold(len(piece))
                content += piece
            return bytes(content)
        finally:
            await answer.aclose()

    async def _addresses(self, url: httpx.URL, shown: str) -> list[str]:
        """Look the host up. Raises MediaError unless every address is public."""
        port = url.port or (443 if url.scheme == "https" else 80)
        try:
            found = list(dict.fromkeys(await self.resolve(host_of(url), port)))
        except (OSError, UnicodeError) as error:
            raise _unreachable(shown, "the host is not known") from error
        # Which address it is stays unsaid: the answer would map the network behind the server.
        if not all(self.allowed(address) for address in found):
            raise MediaError(
                REFUSED,
                f"the host of {shown} is not on the public internet; send the content as a data: "
                "URL",
            )
        return found[:_MOST_ADDRESSES]

    def _client(self) -> httpx.AsyncClient:
        """Return a client for one hop.

        Kept connections would be found by address, whatever name they were opened for.
        """
        if self._tls is None:
            self._tls = httpx.create_ssl_context(trust_env=False)
        return httpx.AsyncClient(
            verify=self._tls,
            trust_env=False,
            follow_redirects=False,
            headers={"User-Agent": "mmkv", "Accept": "image/*, video/*"},
            timeout=httpx.Timeout(self.limits.video_s, connect=_CONNECT_S),
        )


def _joined(url: httpx.URL, location: str, shown: str) -> str:
    try:
        return str(url.join(location))
    except (httpx.InvalidURL, ValueError) as error:
        raise _unreachable(shown, "it redirects to no URL") from error


def _unreachable(shown: str, reason: str) -> MediaError:
    return MediaError(BAD_FORM, f"cannot fetch {shown} ({reason}); check the URL")
