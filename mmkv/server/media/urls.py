"""Read the http(s) URLs of a request, strictly."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection

import httpx

from mmkv.server.media.errors import BAD_FORM, REFUSED, MediaError

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
