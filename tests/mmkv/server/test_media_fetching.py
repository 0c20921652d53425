"""Media that requests name by a URL: which addresses are dialled, and what answers may be."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from mmkv.server.media.fetch import is_public
from mmkv.server.media.limits import MediaError, MediaLimits
from mmkv.server.media.resolver import MediaResolver, Medium, Source
from tests.support.media import PICTURE, refusal, two_colours

pytest_plugins = ("tests.support.media_fixtures",)

OK = b"HTTP/1.1 200 OK\r\n"
REFUSED = """
127.0.0.1 127.8.9.1 0.0.0.0 0.1.2.3 10.0.0.1 172.16.0.1 172.31.255.255 192.168.1.1 169.254.169.254
100.64.0.1 100.100.100.200 192.0.0.192 192.0.2.1 198.18.0.1 198.51.100.1 203.0.113.1 224.0.0.1
239.255.255.250 240.0.0.1 255.255.255.255 192.88.99.1 168.63.129.16
:: ::1 ::7f00:1 ::ffff:127.0.0.1 ::ffff:0:127.0.0.1 ::ffff:169.254.169.254 64:ff9b::7f00:1
64:ff9b::a9fe:a9fe 64:ff9b:1::1 64:ff9b:1::808:808 2002:7f00:1:: 2002:a00:1::1 2002:c058:6301::
2001:0:7f00:1:: 2001:0:808:808::f5ff:fffe 2001:db8::1 3fff::1 fc00::1 fd00:ec2::254 fe80::1
fe80::1%eth0 fec0::1 ff02::1 ff0e::1 100::1 5f00::1 4000::1
localhost 127.1 2130706433 0x7f000001 0177.0.0.1 example.com
""".split()
PUBLIC = """
8.8.8.8 1.1.1.1 93.184.216.34 172.32.0.1 192.88.98.1 2606:4700:4700::1111 2a00:1450:4001::1
::ffff:8.8.8.8 64:ff9b::808:808 2002:808:808::1
""".split()


@pytest.mark.parametrize("address", REFUSED)
def test_an_address_that_is_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", PUBLIC)
def test_a_public_address(address: str) -> None:
    assert is_public(address)


async def unknown(host: str, port: int) -> list[str]:
    raise AssertionError(f"{host} was looked up")


@pytest.mark.parametrize(
    ("url", "status"),
    [
        (url, 400)
        for url in (
            *("gopher://8.8.8.8/", "ftp://8.8.8.8/a", "file:///etc/passwd", "FILE:/etc/passwd"),
            *("/etc/passwd", "etc/passwd", "~/x.png", "", "http", "javascript:1", "//8.8.8.8/a"),
            *("http://u:p@8.8.8.8/", "http://8.8.8.8@127.0.0.1/", "http://@8.8.8.8/"),
            *("http://2130706433/", "http://0x7f000001/", "http://0177.0.0.1/", "http://127.1/"),
            *("http://0x7f.1/", "http://127.0.0.0x1/", "http://1.2.3/", "http://127.0.0.1.0/"),
            *("http://[::1%25eth0]/", "http://[1.2.3.4]/", "http://[/", "http:///a", "http:a"),
            *("http://a b/", "http://a\\@b/", "http://a/\r\nX: y", "http://a%2eb/", "http://a..b/"),
            *(
                "http://" + "a" * 300 + "/",
                "http://a/" + "b" * 9000,
                "http://\uff11\uff12\uff17.0.0.1/",
            ),
        )
    ]
    + [("http://8.8.8.8:22/", 403), ("https://8.8.8.8:80/", 403), ("http://a.example:0/", 403)],
)
def test_a_url_that_is_not_followed(
    url: str, status: int, runner: asyncio.Runner, resolver: Callable[..., MediaResolver]
) -> None:
    assert refusal(runner, resolver(names=unknown), url).status == status


@pytest.mark.parametrize(
    "found", [["127.0.0.1"], ["8.8.8.8", "10.0.0.1"], ["64:ff9b::7f00:1"], ["2606:4700::1", "::1"]]
)
def test_a_host_with_one_address_that_is_not_public(
    found: list[str], runner: asyncio.Runner, resolver: Callable[..., MediaResolver]
) -> None:
    async def names(host: str, port: int) -> list[str]:
        return found

    error = refusal(runner, resolver(names=names), "https://a.example/x.png")
    assert error.status == 403
    assert not any(address in str(error) for address in found)


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "[::1]", "[::ffff:7f00:1]", "localhost", "127.0.0.1."]
)
def test_this_machine_by_the_systems_own_resolver(host: str, runner: asyncio.Runner) -> None:
    async def ask() -> None:
        async with served(OK + b"\r\n" + PICTURE) as port:
            made = MediaResolver(MediaLimits(ports=frozenset({port})))
            try:
                await made.resolve([Source("image", f"http://{host}:{port}/a.png")])
            finally:
                await made.aclose()

    with pytest.raises(MediaError, match="not on the public internet"):
        runner.run(ask())


Answer = bytes | Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def served(answer: Answer) -> AsyncIterator[int]:
    """Answer every connection on a port of 127.0.0.1, which is given."""
    tasks: set[asyncio.Task[None] | None] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.current_task())
        try:
            request = await reader.read(4096)
            if isinstance(answer, bytes):
                writer.write(answer)
            else:
                await answer(request, writer)
            await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in tasks:
            if task is not None:
                task.cancel()


class Names:
    """A resolver that gives its answers one after the other, the last one again and again."""

    def __init__(self, *answers: str) -> None:
        self.answers, self.asked = list(answers), []

    async def __call__(self, host: str, port: int) -> list[str]:
        self.asked.append(host)
        return [self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]]


def fetched(
    runner: asyncio.Runner,
    resolver: Callable[..., MediaResolver],
    answer: Answer,
    names: Names | None = None,
    scheme: str = "http",
    **limits: Any,
) -> Medium:
    """Fetch a picture from a server on this machine, whose address alone is allowed."""

    async def ask() -> Medium:
        async with served(answer) as port:
            made = resolver(
                names=names or Names("127.0.0.1"),
                allowed=lambda address: address == "127.0.0.1",
                ports=frozenset({port}),
                **limits,
            )
            (medium,) = await made.resolve([Source("image", f"{scheme}://a.example:{port}/x.png")])
            return medium

    return runner.run(ask())


def test_the_address_that_was_checked_is_dialled(
    runner: asyncio.Runner, resolver: Callable[..., MediaResolver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that leads elsewhere when it is asked again is asked once."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    requests = []

    async def answer(request: bytes, writer: asyncio.StreamWriter) -> None:
        requests.append(request)
        writer.write(OK + b"\r\n" + PICTURE)

    names = Names("127.0.0.1", "10.0.0.1")
    medium = fetched(runner, resolver, answer, names)
    assert names.asked == ["a.example"]
    assert np.array_equal(np.asarray(medium.content), np.asarray(two_colours()))
    assert b"\r\nHost: a.example:" in requests[0]


def test_tls_is_for_the_name_and_not_for_the_address(
    runner: asyncio.Runner, resolver: Callable[..., MediaResolver]
) -> None:
    hellos = []

    async def answer(hello: bytes, writer: asyncio.StreamWriter) -> None:
        hellos.append(hello)

    with pytest.raises(MediaError, match="cannot fetch"):
        fetched(runner, resolver, answer, scheme="https")
    assert b"a.example" in hellos[0] and b"127.0.0.1" not in hellos[0]


def moved(*places: str) -> Answer:
    """Return a server's answer: redirects to ``places`` in turn, then the picture."""
    left = list(places)

    async def answer(request: bytes, writer: asyncio.StreamWriter) -> None:
        if left:
            port = writer.get_extra_info("sockname")[1]
            place = left.pop(0).replace("PORT", str(port))
            writer.write(f"HTTP/1.1 302 Found\r\nLocation: {place}\r\n\r\n".encode())
        else:
            writer.write(OK + b"\r\n" + PICTURE)

    return answer


@pytest.mark.parametrize(
    ("place", "status"),
    [
        ("http://127.0.0.2:PORT/", 403),
        ("http://[::1]:PORT/", 403),
        ("http://127.0.0.1:1/", 403),
        ("http://2130706433:PORT/", 400),
        ("http://u:p@a.example:PORT/", 400),
        ("file:///etc/passwd", 400),
        ("gopher://127.0.0.1:PORT/", 400),
        ("data:image/png;base64,AAAA", 400),
    ],
)
def test_a_redirect_is_checked_as_the_first_url(
    place: str, status: int, runner: asyncio.Runner, resolver: Callable[..., MediaResolver]
) -> None:
    class Literal(Names):
        async def __call__(self, host: str, port: int) -> list[str]:
            return ["127.0.0.1" if host == "a.example" else host]

    with pytest.raises(MediaError) as caught:
        fetched(runner, resolver, moved(place), Literal())
    assert caught.value.status == status


def test_redirects_are_looked_up_anew_and_counted(
    runner: asyncio.Runner, resolver: Callable[..., MediaResolver]
) -> None:
    names = Names("127.0.0.1")
    fetched(runner, resolver, moved("/y", "http://b.example:PORT/z", "//c.example:PORT/"), names)
    assert names.asked == ["a.example", "a.example", "b.example", "c.example"]
    with pytest.raises(MediaError, match="redirects more than 3 times"):
        fetched(runner, resolver, moved(*["/y"] * 4))
    with pytest.raises(MediaError, match="not on the public internet"):
        fetched(runner, resolver, moved("/y"), Names("127.0.0.1", "127.0.0.2"))


@pytest.mark.parametrize("begin", [b"HTTP/1.1 200 OK\r\nX: ", OK + b"\r\n"])
def test_a_server_that_drips_is_left(
    begin: bytes, runner: asyncio.Runner, resolver: Callable[..., MediaResolver]
) -> None:
    async def drip(request: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(begin)
        while True:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.01)

    with pytest.raises(MediaError, match=r"within 0.2 s") as caught:
        fetched(runner, resolver, drip, picture_s=0.2)
    assert caught.value.status == 408


@pytest.mark.parametrize(
    ("answer", "status", "says"),
    [
        (OK + b"Content-Length: 1001\r\n\r\n", 413, "1,001 bytes"),
        (OK + b"\r\n" + bytes(1001), 413, "larger than"),
        (OK + b"Content-Encoding: gzip\r\n\r\n" + bytes(9), 422, "compressed"),
        (OK + b"Content-Length: 90\r\n\r\n" + bytes(9), 400, "RemoteProtocolError"),
        (b"HTTP/1.1 404 Not Found\r\n\r\n", 400, "status 404"),
        (b"HTTP/1.1 302 Found\r\nLocation: http://[\r\n\r\n", 400, "no valid host"),
        (b"HTTP/1.1 302 Found\r\nLocation: http://a:b:c/\r\n\r\n", 400, "cannot fetch"),
        (OK + b"\r\n", 400, "is empty"),
        (b"SSH-2.0\r\n", 400, "RemoteProtocolError"),
    ],
)
def test_bad_answers(
    answer: bytes,
    status: int,
    says: str,
    runner: asyncio.Runner,
    resolver: Callable[..., MediaResolver],
) -> None:
    with pytest.raises(MediaError, match=says) as caught:
        fetched(runner, resolver, answer, bytes=1000)
    assert caught.value.status == status
