"""Read a medium that a request names: a strict URL of public addresses, or a file of one folder."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import re
import socket
import ssl
import stat
import urllib.parse
from collections.abc import Awaitable, Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from mmkv.server.media.limits import (
    BAD_FORM,
    REFUSED,
    TOO_LARGE,
    UNREADABLE,
    Allowance,
    MediaError,
    MediaLimits,
)

# What ipaddress calls global but is not to be reached for a stranger.
_REFUSED = [
    ipaddress.ip_network(text)
    for text in (
        # For protocols and clouds; Pythons know different parts of both.
        "192.0.0.0/24",
        "2001::/23",
        "192.88.99.0/24",  # relays from IPv6 to IPv4 (RFC 7526)
        "192.52.193.0/24",  # and of multicast (RFC 7450)
        # Sinks of names that should not be asked for, which many networks run themselves (RFC 7534)
        "192.31.196.0/24",
        "192.175.48.0/24",
        "2620:4f:8000::/48",
        # Clouds' own services, seen from their machines.
        "161.26.0.0/16",
        "166.8.0.0/14",
        "168.63.129.16/32",
        "3fff::/20",  # documentation (RFC 9637), unknown to older Pythons
    )
]
_UNICAST = ipaddress.IPv6Network("2000::/3")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_ISATAP = 0x5EFE  # before the address, but for two bits (RFC 5214)


def is_public(address: str) -> bool:
    """Return whether ``address`` (numeric, IPv4 or IPv6) is one that anybody may ask for.

    IPv4 addresses inside of IPv6 ones (mapped, 6to4, Teredo, NAT64, ISATAP) count as what they lead
    to. ``ipaddress.is_global`` alone lets loopback pass in four of these forms, and multicast.
    Where a network has a prefix of its own for NAT64, no address tells.
    """
    try:
        return _is_public(ipaddress.ip_address(address))
    except ValueError:
        return False


def _is_public(ip: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.scope_id is not None:
            return False
        last = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if (int(ip) >> 32) & 0xFCFFFFFF == _ISATAP and not _is_public(last):
            return False
        inner = _inside(ip)
        if inner is not None:
            return all(_is_public(one) for one in inner)
        if ip not in _UNICAST:  # among others 64:ff9b:1::/48, and IPv4 in the last bits of ::/96
            return False
    if ip.is_multicast or ip.is_reserved or not ip.is_global:
        return False
    return not any(ip in network for network in _REFUSED if network.version == ip.version)


def _inside(ip: ipaddress.IPv6Address) -> list[ipaddress.IPv4Address] | None:
    """Return the IPv4 addresses that an IPv6 address leads to, None where it is one of its own."""
    if ip.ipv4_mapped is not None:
        return [ip.ipv4_mapped]
    if ip.sixtofour is not None:
        return [ip.sixtofour]
    if ip.teredo is not None:
        return list(ip.teredo)
    if ip in _NAT64:
        return [ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)]
    return None


LONGEST = 8192
_DEFAULT_PORTS = {"http": 80, "https": 443}
# Control characters and spaces, and the backslash that some parsers take for a slash.
_UNCLEAN = re.compile(r"[\x00-\x20\x7f-\xa0\\]")
# What pictures and videos begin with in base64, or very long: no URL has neither colon nor dot.
_BARE = re.compile(
    r"(iVBORw0KGgo|/9j/|R0lGOD|UklGR|Qk[0-9A-Za-z]|AAAA|GkXfo)[A-Za-z0-9+/_=\s-]{16}"
    r"|[A-Za-z0-9+/_=\s-]{512}"
)
_NAME = re.compile(r"(?!.{254})(?:[a-z0-9_-]{1,63}\.)*[a-z0-9_-]{1,63}\Z")
_NUMERIC = re.compile(r"(?:0x[0-9a-f]*|[0-9]+)\Z", re.IGNORECASE)


def parse_url(text: str, ports: Collection[int] = ()) -> httpx.URL:
    """Return an http(s) URL whose host is a name, or an address in its usual form.

    ``ports``: those allowed beside 80 for http and 443 for https.

    Raises:
        MediaError: 400 for another scheme, a user name, a malformed URL, an IPv4 address written
            as one number, in octal or hex; 403 for another port.
    """
    if _BARE.match(text):
        raise MediaError(
            BAD_FORM,
            "the URL is base64 alone; put data:image/png;base64, (or its own type) before it",
        )
    if ";base64," in text[:100].lower():
        raise MediaError(BAD_FORM, "the URL lacks its scheme; put data: before it")
    if len(text) > LONGEST:
        raise MediaError(BAD_FORM, f"a URL has over {LONGEST:,} characters; use a shorter one")
    shown = show(text)
    if _UNCLEAN.search(text):
        raise MediaError(
            BAD_FORM, f"the URL {shown} holds spaces, backslashes or control characters; encode it"
        )
    try:
        url = httpx.URL(text)
    except (httpx.InvalidURL, ValueError) as error:
        raise MediaError(BAD_FORM, f"{shown} is not a valid URL; check it") from error
    if url.scheme not in _DEFAULT_PORTS:
        raise MediaError(BAD_FORM, f"the URL {shown} is not http, https or data; use one of these")
    if "@" in re.split("[/?#]", text.partition("//")[2], maxsplit=1)[0]:
        raise MediaError(
            BAD_FORM, "a URL with a user name or password is not followed; leave them out"
        )
    _check_host(url, shown)
    if url.port not in (None, _DEFAULT_PORTS[url.scheme], *ports):
        raise MediaError(
            REFUSED, f"port {url.port} of {shown} is not allowed; use the scheme's default port"
        )
    return url


def host_of(url: httpx.URL) -> str:
    """Return the host as it is looked up: ASCII, without brackets and final dot."""
    return url.raw_host.decode("ascii").strip("[]").rstrip(".").lower()


def show(text: str) -> str:
    """Return a URL for messages: without its query, printable, short."""
    return ascii(text.split("?", 1)[0][:120])[1:-1]


def _check_host(url: httpx.URL, shown: str) -> None:
    host = host_of(url)
    if ":" not in host and not _NAME.match(host):
        raise MediaError(BAD_FORM, f"the URL {shown} names no valid host; check it")
    # Resolvers take 2130706433, 0x7f.1 and 0177.0.0.1 for 127.0.0.1: only a.b.c.d is a number.
    if ":" in host or _NUMERIC.match(host.rpartition(".")[2]):
        try:
            usual = ipaddress.ip_address(host)
        except ValueError:
            usual = None
        if usual is None or "%" in host:  # a scope is an interface of this machine
            raise MediaError(
                BAD_FORM, f"the host of {shown} is no usual address; write it as a.b.c.d"
            )


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
            MediaError: see :mod:`mmkv.server.media.limits`.
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


def read_local(url: str, folder: Path | None, allowance: Allowance) -> bytes:
    """Read the file that a ``file:`` URL names, if it lies in ``folder`` or below.

    Links are followed while they stay in the folder. Whether a file exists outside of it is not
    told: the answer is the same.

    Raises:
        MediaError: 400 without a folder, 403 for what is no regular file in it, 413 above what
            ``allowance`` has left.
    """
    if folder is None:
        raise MediaError(
            BAD_FORM,
            "file: URLs are not allowed here; send a data: URL, or start the server with "
            "--allowed-local-media-path",
        )
    refused = MediaError(
        REFUSED, "the file: URL names no file in the folder that is allowed; check the path"
    )
    try:
        parts = urllib.parse.urlsplit(url)
        path = Path(urllib.parse.unquote(parts.path, errors="strict"))
        if parts.netloc not in ("", "localhost") or not path.is_absolute():
            raise refused
        root = folder.resolve(strict=True)
        inner = path.resolve(strict=True).relative_to(root)
        descriptor = _open_below(root, inner)
    except (OSError, ValueError, RuntimeError):  # a NUL byte, a loop of links, ...
        raise refused from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise refused
    with os.fdopen(descriptor, "rb") as file:
        content = file.read(allowance.bytes + 1)
    allowance.take_bytes(len(content))
    return content


def _open_below(root: Path, inner: Path) -> int:
    """Open a resolved path folder by folder: what has become a link since then is refused."""
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        *above, name = inner.parts or (".",)
        for part in above:
            inside = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
            os.close(folder)
            folder = inside
        # O_NONBLOCK: a pipe without a writer would wait for one.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        return os.open(name, flags, dir_fd=folder)
    finally:
        os.close(folder)
