"""Media of requests: files, URLs and their addresses, what decoding may cost, and its failures."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mmkv.prompt.loading import load_processor
from mmkv.prompt.media import load_image
from mmkv.prompt.qwen_vision import VideoRules
from mmkv.prompt.video import Clip, load_video
from mmkv.server.chat import RequestMedia
from mmkv.server.errors import api_error
from mmkv.server.media import resolver as resolver_module
from mmkv.server.media.fetch import Fetcher, SystemResolver, _open_below, is_public
from mmkv.server.media.limits import FORMATS, MediaError, MediaLimits
from mmkv.server.media.resolver import MediaResolver, Medium, Source
from mmkv.server.media.worker import MOST_PIXELS
from mmkv.server.prompts import Message, Part
from tests.support.chat_models import save_qwen3_vl
from tests.support.media import (
    PICTURE,
    data_url,
    encoded,
    png_bomb,
    refusal,
    two_colours,
    write_clip,
)


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as made:
        yield made


@pytest.fixture(scope="module")
def shared(runner: asyncio.Runner) -> Iterator[MediaResolver]:
    """Yield a resolver whose decoding process the tests share."""
    made = MediaResolver()
    yield made
    runner.run(made.aclose())


@pytest.fixture
def resolver(shared: MediaResolver) -> Callable[..., MediaResolver]:
    """Return what makes resolvers with the shared decoding process."""

    def make(folder: Path | None = None, rules: Any = None, **limits: Any) -> MediaResolver:
        names, allowed = limits.pop("names", None), limits.pop("allowed", is_public)
        pictures = limits.pop("picture_rules", None)
        made = MediaResolver(MediaLimits(**limits), folder, rules, names, allowed, pictures)
        made.pool = shared.pool
        return made

    return make


def test_files_of_the_allowed_folder_alone(
    tmp_path: Path, runner: asyncio.Runner, resolver: Callable[..., MediaResolver]
) -> None:
    folder, outside = tmp_path / "allowed", tmp_path / "secret.png"
    (folder / "sub").mkdir(parents=True)
    for path in (folder / "sub" / "a b.png", outside):
        path.write_bytes(PICTURE)
    (folder / "inner.png").symlink_to("sub/a b.png")
    (folder / "out.png").symlink_to(outside)
    (folder / "up").symlink_to(tmp_path)
    (folder / "loop").symlink_to("loop")
    os.mkfifo(folder / "pipe")
    made = resolver(folder)
    for good in ("sub/a%20b.png", "inner.png", "sub/../inner.png"):
        (medium,) = runner.run(made.resolve([Source("image", f"file://{folder}/{good}")]))
        assert medium.content.size == (4, 2)
    bad = "out.png up/secret.png ../secret.png %2e%2e/secret.png sub loop pipe none.png a%00 . x/y"
    answers = {str(refusal(runner, made, f"file://{folder}/{name}")) for name in bad.split()}
    for url in (f"file://elsewhere{outside}", f"file:{outside}", "file:inner.png", "file:///%ff"):
        answers.add(str(refusal(runner, made, url)))
    assert len(answers) == 1  # whether a file exists is not told
    assert refusal(runner, resolver(folder, bytes=9), f"file://{folder}/inner.png").status == 413
    assert refusal(runner, resolver(), f"file://{folder}/inner.png").status == 400


def test_a_folder_that_becomes_a_link_after_the_check(tmp_path: Path) -> None:
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "a.png").write_bytes(PICTURE)
    root = tmp_path / "allowed"
    root.mkdir()
    (root / "sub").symlink_to(tmp_path / "secret")
    (root / "b.png").symlink_to(tmp_path / "secret" / "a.png")
    for path in ("sub/a.png", "b.png"):
        with pytest.raises(OSError):
            os.close(_open_below(root, Path(path)))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "MPO"])
def test_pictures_are_those_that_load_image_makes(
    kind: str, tmp_path: Path, runner: asyncio.Runner, resolver: Callable[..., MediaResolver]
) -> None:
    (tmp_path / "x").write_bytes(encoded(two_colours(), kind))
    url = data_url((tmp_path / "x").read_bytes())
    one, two = runner.run(resolver().resolve([Source("image", url), Source("image", url)]))
    assert np.array_equal(np.asarray(one.content), np.asarray(load_image(tmp_path / "x")))
    assert one.digest == two.digest and one.part == {"type": "image", "image": one.content}


@pytest.mark.parametrize("size", [(1200, 999), (2000, 31), (70, 60)])
def test_large_pictures_come_as_the_model_reads_them(
    size: tuple[int, int],
    tmp_path: Path,
    runner: asyncio.Runner,
    resolver: Callable[..., MediaResolver],
) -> None:
    """Scaled where they are decoded, by the model's own rules: its inputs are the same."""
    processor = load_processor(save_qwen3_vl(tmp_path))
    rules = processor.picture_rules
    assert rules is not None
    noise = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), np.uint8)
    url = data_url(encoded(Image.fromarray(noise)))
    whole, scaled = (
        runner.run(resolver(picture_rules=given).resolve([Source("image", url)]))[0].content
        for given in (None, rules)
    )
    assert whole.size == size
    if size == (1200, 999):
        assert scaled.width * scaled.height <= rules.longest_edge

    def read(picture: Image.Image) -> list[Any]:
        inputs = processor.encode("<|vision_start|><|image_pad|><|vision_end|>", [picture])
        return [inputs["pixel_values"].tolist(), inputs["image_grid_thw"].tolist()]

    assert read(whole) == read(scaled)


def test_a_refusal_names_the_file_and_the_cause(
    tmp_path: Path, runner: asyncio.Runner, resolver: Callable[..., MediaResolver]
) -> None:
    """As the page's data: URLs name files; nothing of a name steers a terminal."""
    rules = load_processor(save_qwen3_vl(tmp_path)).picture_rules
    whole = encoded(Image.effect_noise((64, 64), 50))
    heic = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic"
    for content, cause in (
        (encoded(Image.new("RGB", (5, 1100))), "5 x 1100 pixels are too thin; crop them"),
        (whole[: len(whole) // 2], "is damaged (image file is truncated"),
        (b"words", "is a text, not a picture"),
        (heic, "is a HEIC picture; it is dam" if "HEIF" in FORMATS else "pip install pillow-heif"),
        (b"", "is empty"),
    ):
        url = data_url(content).replace(";base64", ";name=in%20Caf%C3%A9%1b%5B31m.png;base64")
        error = refusal(runner, resolver(picture_rules=rules), url)
        assert str(error).startswith("in Café\\x1b[31m.png") and cause in str(error)


@pytest.mark.long(reason="a picture of many megapixels")
def test_very_large_pictures_are_scaled_where_the_rules_are_not_known(
    runner: asyncio.Runner, resolver: Callable[..., MediaResolver]
) -> None:
    """What they were counts against the request's allowance."""
    url = data_url(encoded(Image.new("RGB", (6000, 3000), "red")))
    (medium,) = runner.run(resolver().resolve([Source("image", url)]))
    width, height = medium.content.size
    assert abs(width * height - MOST_PIXELS) < 10_000 and abs(width / height - 2) < 1e-3
    made = resolver(pixels=20 * 10**6)
    assert refusal(runner, made, url, url).status == 413


def test_a_picture_does_not_wait_for_a_video(
    runner: asyncio.Runner, resolver: Callable[..., MediaResolver]
) -> None:
    made = resolver()

    async def beside_a_video() -> list[Medium]:
        async with made.pool._free["video"]:
            return await made.resolve([Source("image", data_url(PICTURE))])

    assert runner.run(beside_a_video())[0].content.size == (4, 2)


def test_what_is_no_picture(runner: asyncio.Runner, resolver: Callable[..., MediaResolver]) -> None:
    made = resolver()
    for content in (
        b"abc",
        PICTURE[:40],
        encoded(two_colours(), "TIFF"),
        encoded(two_colours(), "PDF"),
    ):
        assert refusal(runner, made, data_url(content)).status == 422
    for url in ("data:image/png;base64,@", "data:image/png;base64", "data:,"):
        assert refusal(runner, made, url).status == 400
    assert refusal(runner, made, "data:\nimage/png;base64,AAAA").status == 422


def status_of(pid: int, field: str) -> int:
    """Return a number of kilobytes that the kernel tells of a process."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.split(f"{field}:")[1].split()[0])


def test_a_bomb_costs_little(
    runner: asyncio.Runner, resolver: Callable[..., MediaResolver], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MMKV_API_KEY", "secret")
    content = png_bomb(40_000, 5_000_000)
    assert 4_900_000 < len(content) < 5_100_000
    made = resolver()
    runner.run(made.pool.aclose())
    runner.run(made.warm())
    (pid,) = made.pool.processes
    runner.run(made.resolve([Source("image", data_url(PICTURE))]))
    assert made.pool.processes == [pid], "the process that was started ahead is not used"
    before, url = status_of(pid, "VmHWM"), data_url(content)
    tracemalloc.start()
    error = refusal(runner, made, url)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert error.status == 413 and "40000 x 40000" in str(error)
    assert peak < 50_000_000 and status_of(pid, "VmHWM") - before < 50_000
    assert "torch" not in Path(f"/proc/{pid}/maps").read_text()
    assert b"secret" not in Path(f"/proc/{pid}/environ").read_bytes()


def test_sums_over_a_request(
    runner: asyncio.Runner, resolver: Callable[..., MediaResolver]
) -> None:
    url = data_url(PICTURE)
    for limits in ({"bytes": 2 * len(PICTURE)}, {"pixels": 16}, {"frames": 2}):
        made = resolver(**limits)
        assert len(runner.run(made.resolve([Source("image", url)] * 2))) == 2
        assert refusal(runner, made, url, url, url).status == 413


def test_sums_over_what_a_request_fetches_to_know_and_to_read(
    runner: asyncio.Runner, resolver: Callable[..., MediaResolver], tmp_path: Path
) -> None:
    """A file is read to know the conversation again, a data: URL when its turn is read."""
    (tmp_path / "a.png").write_bytes(PICTURE)
    parts = (Part("image", url=f"file://{tmp_path}/a.png"), Part("image", url=data_url(PICTURE)))

    async def read(pixels: int) -> int:
        media = RequestMedia(resolver(tmp_path, pixels=pixels))
        return len(await media.contents(await media.named([Message("user", parts)])))

    assert runner.run(read(16)) == 2
    with pytest.raises(MediaError, match="over the limit"):
        runner.run(read(15))


def test_a_picture_that_comes_again_is_known_by_its_url(
    runner: asyncio.Runner, resolver: Callable[..., MediaResolver], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, decoded = resolver(), []
    content = resolver_module.data_uri_content
    monkeypatch.setattr(
        resolver_module, "data_uri_content", lambda url: [decoded.append(url), content(url)][1]
    )
    other = encoded(Image.new("RGB", (4, 4)))
    quoted = data_url(PICTURE).replace("=", "%3D").replace("/9", "%2F9") + "%0A"
    urls = [data_url(PICTURE), data_url(other), quoted]
    monkeypatch.setattr(resolver_module, "_MOST_DIGESTS", 2)

    async def named(*urls: str, digest: str | None = None) -> list[Message]:
        messages = [Message("user", (Part("image", url=u, digest=digest),)) for u in urls]
        return [*messages, *await RequestMedia(made).named(messages)]

    one, two = (hashlib.sha256(content).hexdigest() for content in (PICTURE, other))
    for _ in range(2):
        assert [m.media[0].digest for m in runner.run(named(*urls[:2]))[2:]] == [one, two]
    assert decoded == urls[:2]
    assert [m.media[0].digest for m in runner.run(named(*urls))[3:]] == [one, two, one]
    for _ in range(2):
        with pytest.raises(MediaError, match="base64"):
            runner.run(named("data:image/png;base64,@"))
    before, after = runner.run(named(urls[0], digest="held"))
    assert before is after, "a message of a conversation that is held is made anew"


def test_the_media_of_all_requests_have_a_bound(
    runner: asyncio.Runner, resolver: Callable[..., MediaResolver]
) -> None:
    """Each takes 4 bytes a pixel of 64 x 64, from when it is decoded until it is let go."""
    content = encoded(Image.new("RGB", (64, 64)))
    message = Message("user", (Part("image", url=data_url(content)),))
    size = 64 * 64 * 4

    async def read(made: MediaResolver) -> RequestMedia:
        media = RequestMedia(made)
        await media.contents(await media.named([message]))
        return media

    async def run() -> None:
        made = resolver(together=2 * size + len(content), room_s=0.05)
        first = await read(made)
        assert made.room.held == size
        second = await read(made)
        assert made.room.held == 2 * size
        with pytest.raises(MediaError, match="other requests") as caught:
            await read(made)  # half of the room did not get free in time
        assert api_error(caught.value).headers == {"Retry-After": "1"}
        assert api_error(caught.value).status == 503
        first.let_go()
        first.let_go()
        assert made.room.held == size
        second.let_go()
        # One that waits goes on as soon as there is room.
        made = resolver(together=2 * size + len(content), room_s=60)
        held = [await read(made), await read(made)]
        waiting = asyncio.ensure_future(read(made))
        await asyncio.sleep(0)
        assert not waiting.done()
        held[0].let_go()
        (await waiting).let_go()
        assert made.room.held == size
        # One that has begun is refused at once, and its decoder is not left with the rest.
        made = resolver(together=2 * size - 1)
        other = encoded(Image.new("RGB", (64, 64), "red"))
        both = Message("user", (*message.parts, Part("image", url=data_url(other))))
        media = RequestMedia(made)
        with pytest.raises(MediaError, match="other requests"):
            await media.contents(await media.named([both]))
        media.let_go()
        assert made.room.held == 0
        (await read(made)).let_go()
        assert made.room.held == 0

    runner.run(run())


def test_a_picture_beyond_the_process_memory(runner: asyncio.Runner) -> None:
    async def ask() -> tuple[MediaError, Medium]:
        made = MediaResolver(MediaLimits(worker_bytes=256 * 2**20))
        try:
            large = data_url(encoded(Image.new("1", (10_000, 10_000))))
            with pytest.raises(MediaError, match="memory") as caught:
                await made.resolve([Source("image", large)])
            return caught.value, (await made.resolve([Source("image", data_url(PICTURE))]))[0]
        finally:
            await made.aclose()

    error, medium = runner.run(ask())
    assert error.status in (413, 422) and medium.content.size == (4, 2)


def stopped(
    runner: asyncio.Runner,
    made: MediaResolver,
    then: Callable[[int, asyncio.Task[Any]], None],
) -> Coroutine[Any, Any, None]:
    """Return a request whose decoder hangs; ``then`` is called while it does."""

    async def ask() -> None:
        picture = Source("image", data_url(PICTURE))
        await made.resolve([picture])
        (pid,) = made.pool.processes
        os.kill(pid, signal.SIGSTOP)
        task = asyncio.create_task(made.resolve([picture]))
        await asyncio.sleep(0.1)
        then(pid, task)
        try:
            await task
        finally:
            assert pid not in made.pool.processes and not Path(f"/proc/{pid}").exists()
            assert (await made.resolve([picture]))[0].content.size == (4, 2)

    return ask()


def test_a_decoder_that_crashes_is_replaced(
    runner: asyncio.Runner, resolver: Callable[..., MediaResolver]
) -> None:
    """One that has worked before gives the picture a second chance, a new one does not."""
    runner.run(stopped(runner, resolver(), lambda pid, _: os.kill(pid, signal.SIGKILL)))

    async def dies_each_time() -> None:
        made, exchange = resolver(), resolver_module._exchange

        async def killed(process: Any, *given: Any) -> Any:
            process.kill()
            return await exchange(process, *given)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(resolver_module, "_exchange", killed)
            await made.resolve([Source("image", data_url(PICTURE))])

    with pytest.raises(MediaError, match="broke the decoder") as caught:
        runner.run(dies_each_time())
    assert caught.value.status == 422


def test_a_decoder_that_hangs_is_replaced(
    runner: asyncio.Runner, resolver: Callable[..., MediaResolver]
) -> None:
    with pytest.raises(MediaError, match="not decoded within") as caught:
        runner.run(stopped(runner, resolver(picture_s=0.5), lambda *_: None))
    assert caught.value.status == 408


def test_a_cancelled_request_ends_its_decoder(
    runner: asyncio.Runner, resolver: Callable[..., MediaResolver]
) -> None:
    with pytest.raises(asyncio.CancelledError):
        runner.run(stopped(runner, resolver(), lambda _, task: task.cancel()))


def test_a_decoder_that_died_meanwhile_is_not_used(
    runner: asyncio.Runner, resolver: Callable[..., MediaResolver]
) -> None:
    """Nor is a picture to blame for it, where that was not noticed yet."""

    async def ask(pause: float) -> Medium:
        made = resolver()
        picture = Source("image", data_url(PICTURE))
        await made.resolve([picture])
        os.kill(*made.pool.processes, signal.SIGKILL)
        if pause:
            await asyncio.sleep(pause)
        return (await made.resolve([picture]))[0]

    for pause in (0.1, 0):
        assert runner.run(ask(pause)).content.size == (4, 2)


@pytest.fixture(scope="module")
def clip_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("av")
    return write_clip(tmp_path_factory.mktemp("clips") / "steps.mp4")


@pytest.mark.parametrize(
    "rules",
    [
        None,
        VideoRules(shortest_edge=4096, longest_edge=16384),
        # The same bounds are those of a frame: another size.
        VideoRules(shortest_edge=4096, longest_edge=16384, frames_apart=False),
    ],
)
def test_videos_are_those_that_load_video_makes(
    rules: VideoRules | None,
    clip_file: Path,
    runner: asyncio.Runner,
    resolver: Callable[..., MediaResolver],
) -> None:
    url = data_url(clip_file.read_bytes(), "video/mp4")
    sources = [Source("video", url, {"num_frames": 5}), Source("video", url, {"fps": 4})]
    one, two = runner.run(resolver(rules=rules).resolve(sources))
    rule = None if rules is None else rules.scaler
    for medium, options in ((one, {"num_frames": 5}), (two, {"fps": 4})):
        wanted = load_video(clip_file, size_rule=rule, **options)
        assert isinstance(medium.content, Clip) and medium.content.indices == wanted.indices
        assert np.array_equal(medium.content.frames, wanted.frames)
        assert medium.content.fps == wanted.fps
    assert one.digest != two.digest


def test_errors_name_no_options_of_a_command_line(
    runner: asyncio.Runner, resolver: Callable[..., MediaResolver]
) -> None:
    film = b"\0\0\0\x18ftypisom\0\0\2\0isomiso2" + bytes(100)
    error = str(refusal(runner, resolver(), data_url(film)))
    assert "is a video, not a picture" in error and "part of type video_url" in error
    large = data_url(encoded(Image.new("RGB", (200, 100))))
    for said in (error, str(refusal(runner, resolver(pixels=100), large))):
        assert "--" not in said


def test_what_is_no_video_and_what_is_too_much(
    clip_file: Path, tmp_path: Path, runner: asyncio.Runner, resolver: Callable[..., MediaResolver]
) -> None:
    clip = clip_file.read_bytes()
    playlist = f"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nfile://{clip_file}\n#EXT-X-ENDLIST\n"
    listing = f"ffconcat version 1.0\nfile {clip_file}\n"
    for content in (b"abc", clip[:100], PICTURE, playlist.encode(), listing.encode()):
        assert refusal(runner, resolver(), data_url(content), kind="video").status == 422
    for limits in ({"frames": 5}, {"pixels": 64 * 48 * 5}, {"pixels": 100}):
        assert refusal(runner, resolver(**limits), data_url(clip), kind="video").status == 413
    with pytest.raises(MediaError, match="exclude each other") as caught:
        resolver().check([Source("video", data_url(clip), {"fps": 2.0, "num_frames": 3})])
    assert caught.value.status == 400


# Media that requests name by a URL: which addresses are dialled, and what answers may be.


OK = b"HTTP/1.1 200 OK\r\n"
REFUSED = """
127.0.0.1 127.8.9.1 0.0.0.0 0.1.2.3 10.0.0.1 172.16.0.1 172.31.255.255 192.168.1.1 169.254.169.254
100.64.0.1 100.100.100.200 192.0.0.192 192.0.2.1 198.18.0.1 198.51.100.1 203.0.113.1 224.0.0.1
239.255.255.250 240.0.0.1 255.255.255.255 192.88.99.1 168.63.129.16
:: ::1 ::7f00:1 ::ffff:127.0.0.1 ::ffff:0:127.0.0.1 ::ffff:169.254.169.254 64:ff9b::7f00:1
64:ff9b::a9fe:a9fe 64:ff9b:1::1 64:ff9b:1::808:808 2002:7f00:1:: 2002:a00:1::1 2002:c058:6301::
2001:0:7f00:1:: 2001:0:808:808::f5ff:fffe 2001:db8::1 3fff::1 fc00::1 fd00:ec2::254 fe80::1
fe80::1%eth0 fec0::1 ff02::1 ff0e::1 100::1 5f00::1 4000::1
2606:4700::5efe:7f00:1 2606:4700::200:5efe:a9fe:a9fe 2606:4700::100:5efe:a00:1
2606:4700::300:5efe:a00:1 fe80::5efe:808:808 2002:808:808::5efe:a00:1 2001:1::1 2001:2::1 2001:3::1
2001:4:112::1 2001:20::1 ::8.8.8.8 ::ffff:0:8.8.8.8 192.31.196.1 192.175.48.1 2620:4f:8000::1
192.52.193.1 161.26.0.10 166.8.0.1 localhost 127.1 2130706433 0x7f000001 0177.0.0.1 example.com
""".split()
PUBLIC = """
8.8.8.8 1.1.1.1 93.184.216.34 172.32.0.1 192.88.98.1 2606:4700:4700::1111 2a00:1450:4001::1
::ffff:8.8.8.8 64:ff9b::808:808 2002:808:808::1 2606:4700::5efe:808:808 2606:4700::5eff:7f00:1
192.31.197.1
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


def test_a_hop_has_bounds_and_takes_nothing_from_the_environment() -> None:
    limits = MediaLimits(video_s=77)
    made = Fetcher(limits, SystemResolver())._client()
    assert (made.timeout.connect, made.timeout.read, made.timeout.write) == (5, 77, 77)
    assert not made.follow_redirects and not made.trust_env and "image" in made.headers["Accept"]
