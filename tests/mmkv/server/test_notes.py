"""What the user is told of a conversation: every front end says the same of the same one."""

from __future__ import annotations

import base64
import json
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image

from mmkv import Engine, Sampling, bundled_model
from mmkv.engine.contents import Memory
from mmkv.engine.errors import SessionError
from mmkv.notes import MOST_TOLD, conversation_notes, media_notes
from mmkv.prompt.media import load_image
from mmkv.prompt.video import load_video
from mmkv.resources import asset
from tests.support.media import encoded, write_clip
from tests.support.servers import Server, SocketClient, serving

if TYPE_CHECKING:
    from tests.support.cli_fixtures import Ran

pytest_plugins = ("tests.support.cli_fixtures",)
pytest.importorskip("av", reason="videos need PyAV")
QUESTION, CHUNK = "what is at row 2, column 3?", 12


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A photograph, an animation of drawn scenes, and a video whose end is missing."""
    folder = tmp_path_factory.mktemp("files")
    noise = np.random.default_rng(0).integers(0, 256, (375, 500, 3), np.uint8)
    Image.fromarray(noise).save(folder / "photo.png")  # the server scales it
    scene = Image.open(asset("scene.png")).convert("RGB")
    steps = {"save_all": True, "append_images": [scene.rotate(90)]}
    (folder / "steps.gif").write_bytes(encoded(scene, "GIF", **steps))
    whole = write_clip(folder / "whole.mp4", movflags="faststart").read_bytes()
    (folder / "cut.mp4").write_bytes(whole[: len(whole) * 6 // 10])
    return folder


def load() -> Engine:
    return Engine.from_pretrained(bundled_model(), budget=8, prefill_chunk=CHUNK, kv_limit=2**26)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return load()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    saved = tmp_path_factory.mktemp("saved")
    with serving(load, name="small", session_folder=saved) as made:
        yield made


def url_of(path: Path) -> str:
    kind = "video/mp4" if path.suffix == ".mp4" else f"image/{path.suffix[1:]}"
    return f"data:{kind};name={path.name};base64,{base64.b64encode(path.read_bytes()).decode()}"


def shares_apart(notes: list[str]) -> list[str]:
    return [re.sub(r"\d+% kept", "% kept", one) for one in notes]


def test_all_front_ends_say_the_same_of_a_conversation(
    server: Server,
    engine: Engine,
    files: Path,
    mmkv: Callable[..., Ran],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(files)
    pictures, videos = ["steps.gif", "photo.png"], ["cut.mp4"]
    few = Sampling.greedy(max_new_tokens=4)
    with engine.session() as session:
        list(session.send(QUESTION, images=pictures, videos=videos, sampling=few))
        notes = list(session.notes)
        session.save(files / "here.mmkv")
        with engine.load_session(files / "here.mmkv")[0] as loaded:
            assert loaded.notes == notes
        list(session.send("and?", sampling=few))
        later = list(session.notes)
    # By hand: what could not be read, what the model cannot know, and what is forgotten.
    words = ["first of its 2 frames", "breaks off", "drawn scenes alone", "mostly forgotten"]
    assert [words[at] in note for at, note in enumerate(notes)] == [True] * 4
    assert notes[0].startswith("steps.gif ") and notes[1].startswith("cut.mp4 ")
    assert later[:3] == notes[:3] and later != notes

    said: dict[str, list[str]] = {}
    given = [part for one in pictures for part in ("--image", one)] + ["--video", "cut.mp4"]
    more = ("--budget", "8", "--prefill-chunk", str(CHUNK), "--max-new-tokens", "4")
    ran = mmkv("chat", "tiny-vlm", *given, "-p", QUESTION, *more, "--json")
    assert ran.code == 0, ran.err
    said["--json"] = json.loads(ran.out)["notes"]
    lines = [line.removeprefix("mmkv: ") for line in ran.err.splitlines()]
    said["terminal"] = [line for line in lines if any(word in line for word in words)]

    media = [{"type": "image_url", "image_url": {"url": url_of(Path(one))}} for one in pictures]
    media += [{"type": "video_url", "video_url": {"url": url_of(Path(one))}} for one in videos]
    asked = [{"role": "user", "content": [*media, {"type": "text", "text": QUESTION}]}]
    body: dict[str, Any] = {"model": "small", "max_tokens": 4, "temperature": 0}
    body["messages"] = asked
    counted = {"stream": True, "stream_options": {"include_usage": True}}

    def post(path: str, body: dict[str, Any]) -> Any:
        answer = server.client.post(f"/v1/{path}", json=body)
        assert answer.status_code == 200, answer.text
        return answer

    def last(text: str) -> list[str]:
        events = [json.loads(one[6:]) for one in text.splitlines() if one.startswith("data: {")]
        return next(one["usage"]["mmkv"]["notes"] for one in reversed(events) if one.get("usage"))

    afresh = {"mmkv": {"resume": "never"}}
    said["chat"] = post("chat/completions", body | afresh).json()["usage"]["mmkv"]["notes"]
    said["stream"] = last(post("chat/completions", body | counted | afresh).text)
    name = post("sessions", {}).json()["id"]
    turn = post(f"sessions/{name}/chat/completions", body).json()
    said["session"] = turn["usage"]["mmkv"]["notes"]
    reply = turn["choices"][0]["message"]["content"]
    background = post("sessions", {}).json()["id"]
    more_body = body | counted | {"mmkv": {"background": True}}
    said["background"] = last(post(f"sessions/{background}/chat/completions", more_body).text)
    post(f"sessions/{name}/save", {"name": "there"})
    memories = {"memory": name, "fork": post(f"sessions/{name}/fork", {}).json()["id"]}
    memories["file"] = post("sessions", {"file": "there"}).json()["id"]
    for kind, one in memories.items():
        said[kind] = server.client.get(f"/v1/sessions/{one}/memory").json()["notes"]
    with SocketClient(server, post("sessions", {}).json()["id"]) as client:
        client.send(type="ask", **{key: body[key] for key in body if key != "model"})
        while (event := client.receive()).get("object") != "session.turn":
            assert "error" not in event, event
        said["socket"] = event["notes"]
    served = said["chat"]  # whose shares differ by the server's cut at the end of a message
    apart = dict.fromkeys(said, served) | dict.fromkeys(("--json", "terminal"), notes)
    assert said == apart and shares_apart(served) == shares_apart(notes)

    # A later turn has them, too, whether what it goes on from is a session or found by its words.
    more_asked = {"messages": [{"role": "user", "content": "and?"}]}
    turn = post(f"sessions/{name}/chat/completions", body | more_asked).json()
    post("chat/completions", body)
    whole = [*asked, {"role": "assistant", "content": reply}, *more_asked["messages"]]
    resumed = post("chat/completions", body | {"messages": whole}).json()["usage"]["mmkv"]
    assert resumed["resumed"] and turn["usage"]["mmkv"]["notes"] == resumed["notes"]
    assert shares_apart(resumed["notes"]) == shares_apart(later)
    for one in server.client.get("/v1/sessions").json()["data"]:
        server.client.delete(f"/v1/sessions/{one['id']}")


def test_forms_without_videos_have_them_too(server: Server, files: Path) -> None:
    url = url_of(files / "photo.png")
    source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    content = [{"type": "image", "source": source}, {"type": "text", "text": "what?"}]
    items = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": "what?"}]
    asked = {"messages": [{"role": "user", "content": content}], "max_tokens": 2}
    for path, body in (
        ("messages", asked),
        ("responses", {"input": [{"role": "user", "content": items}], "max_output_tokens": 2}),
    ):
        answer = server.client.post(f"/v1/{path}", json=body | {"model": "small"})
        note, faded = answer.json()["usage"]["mmkv"]["notes"]
        assert "drawn scenes alone" in note and "picture 1 (" in faded, path


def test_what_the_bundled_model_knows_is_told_apart(engine: Engine, files: Path) -> None:
    """Pictures, and videos of what it was and was not trained on."""
    import av

    scene = Image.open(asset("scene.png")).convert("RGB")
    with av.open(str(files / "scene.mkv"), "w") as container:
        stream = container.add_stream("mpeg4", rate=8)
        stream.width, stream.height, stream.pix_fmt = *scene.size, "yuv420p"
        for packet in [*stream.encode(av.VideoFrame.from_image(scene)), *stream.encode()]:
            container.mux(packet)
    white = Image.fromarray(np.full((50, 70, 3), 255, np.uint8))  # a document: no whole cells
    cases: list[tuple[list[Image.Image], list[str], int]]
    cases = [([scene], ["scene.mkv"], 0), ([scene, white], [], 1), ([], ["whole.mp4"], 1)]
    for pictures, videos, count in cases:
        clips = [load_video(files / one) for one in videos]
        found = media_notes([load_image(one) for one in pictures], clips, engine.is_bundled_model)
        assert len(found) == count, (videos, found)
    parts = [{"type": "image", "image": white}, {"type": "text", "text": "what?"}]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine.inputs([{"role": "user", "content": parts}])
    assert ["drawn scenes alone" in str(one.message) for one in caught] == [True]


def test_notes_in_a_file_are_checked(engine: Engine) -> None:
    with engine.session() as session:
        for wrong in ("{}", "[1]", json.dumps(["x" * 2001]), json.dumps(["a"] * (MOST_TOLD + 1))):
            with pytest.raises(SessionError, match="is damaged"):
                session.restore_dialogue({"mmkv.notes": wrong})
        for number in range(MOST_TOLD + 1):
            session.tell([f"{number}.gif is animated", "0.gif is animated"])
        assert len(session.notes) == MOST_TOLD and session.notes[-1].startswith(f"{MOST_TOLD}.")


def test_notes_on_what_is_left() -> None:
    """Each kind is said once by who shows them, though numbers change."""
    memory = Memory(9, 1, 1, 1, 1, 1, pictures=(0.2, 0.9, 0.4))
    more = replace(memory, pictures=(0.1, 0.3, 0.4), compactions=17, worn=True, evicted_nan=3)
    over = replace(memory, pictures=(), over_risk=True, risk=0.125)
    told = ("a.gif is animated",)
    first = conversation_notes(told, "2 messages differ", memory)
    second = conversation_notes(told, "13 messages differ", more)
    third = conversation_notes(told, None, over)
    assert first[:2] == ["a.gif is animated", "2 messages differ"]
    assert "pictures 1 (20% kept), 3 (40% kept) are" in first[2]
    assert [one.kind for one in second[:3]] == [one.kind for one in first]
    for word, note in zip(("moved together and", "17 times", "3 dropped"), second[3:], strict=True):
        assert word in note
    assert len({one.kind for one in second}) == 6
    (note,) = conversation_notes((), None, replace(over, risk_unknown=True))
    assert "is not known" in note
    (note,) = third[1:]
    assert "12.5%" in note and "not the chance of a wrong answer" in note
