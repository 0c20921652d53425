"""Media of requests: files, what decoding may cost, and decoders that fail."""

from __future__ import annotations

import asyncio
import os
import signal
import tracemalloc
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mmkv.engine.errors import InputError
from mmkv.prompt.loading import load_processor
from mmkv.prompt.media import load_image
from mmkv.prompt.qwen_vision import VideoRules
from mmkv.prompt.video import Clip, load_video
from mmkv.server.chat import RequestMedia
from mmkv.server.errors import api_error
from mmkv.server.media import pool
from mmkv.server.media.fetch import _open_below
from mmkv.server.media.limits import MediaError, MediaLimits
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

pytest_plugins = ("tests.support.media_fixtures",)


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


@pytest.mark.parametrize("size", [(1200, 999), (2000, 31), (70, 60), (5, 1100)])
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

    def read(picture: Image.Image) -> str | list[Any]:
        try:
            inputs = processor.encode("<|vision_start|><|image_pad|><|vision_end|>", [picture])
        except InputError as error:  # too thin
            return str(error)
        return [inputs["pixel_values"].tolist(), inputs["image_grid_thw"].tolist()]

    assert read(whole) == read(scaled)


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
        made, exchange = resolver(), pool._exchange

        async def killed(process: Any, *given: Any) -> Any:
            process.kill()
            return await exchange(process, *given)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(pool, "_exchange", killed)
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
