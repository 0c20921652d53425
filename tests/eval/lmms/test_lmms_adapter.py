"""The lmms-eval adapter without lmms-eval: arguments, generation settings, messages, media."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmkv.engine.errors import InputError
from mmkv.eval.lmms.messages import Frames, conversation, keys, visual_part
from mmkv.eval.lmms.settings import FrameRules, LmmsSettings, sampling_of, stop_strings
from mmkv.generation_config import Generation, generation_of
from mmkv.prompt.media import load_image
from mmkv.prompt.processing import Processor
from mmkv.prompt.template import ChatTemplate
from tests.support.chat_models import byte_tokenizer
from tests.support.lmms import assistant, picture, user

# --- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"pretrained": "m", "budgets": 3}, "does not know the model argument budgets"),
        ({"pretrained": "m", "device_map": "auto"}, "write device=cuda:0"),
        ({}, "add pretrained="),
        ({"pretrained": "m", "max_num_frames": 0}, "max_num_frames=0 is not a whole number"),
        ({"pretrained": "m", "evict_every": 1.5}, "evict_every=1.5 is not a whole number"),
        ({"pretrained": "m", "fps": "many"}, "fps=many is not a number"),
    ],
)
def test_wrong_model_arguments_are_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        LmmsSettings.of(given)
    assert "\n" not in str(caught.value)


def test_model_arguments_have_their_types() -> None:
    made = LmmsSettings.of({"pretrained": "m", "budget": 64, "fps": 2, "seed": 0, "policy": "None"})
    assert (made.engine.budget, made.fps, made.seed, made.engine.policy) == ("64", 2.0, 0, None)


def test_generation_kwargs_follow_the_built_in_adapter() -> None:
    made, ignored = sampling_of(
        {"until": ["\n\n"], "image_aspect_ratio": "pad"}, 7, Generation(), True
    )
    assert (made.max_new_tokens, made.temperature, made.stop) == (128, 0.0, ())
    assert ignored == ["image_aspect_ratio"]
    # Greedy whatever top_p says; some tasks write 0.
    given = {"temperature": 0, "top_p": 0, "do_sample": True}
    made, _ = sampling_of(given, 7, Generation(), True)
    assert (made.temperature, made.top_p, made.top_k) == (0.0, 1.0, 0)
    own = generation_of({"top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}, 2048)
    made, _ = sampling_of({"temperature": 0.7, "top_p": 0.9, "max_new_tokens": 5}, 7, own, True)
    assert (made.top_p, made.top_k, made.max_new_tokens, made.seed) == (0.9, 20, 5, 7)
    assert sampling_of({"until": ["stop"]}, 7, own, False)[0].stop == ()


def test_what_a_task_does_not_say_is_the_checkpoints_as_in_transformers() -> None:
    """Penalties in greedy decoding, too; the draw only where the task samples."""
    file = {"do_sample": True, "temperature": 0.6, "repetition_penalty": 1.05, "max_new_tokens": 9}
    own = generation_of(file, 2048)
    made, ignored = sampling_of({"do_sample": False}, 7, own, True)
    assert (made.temperature, made.repetition_penalty, made.max_new_tokens) == (0.0, 1.05, 128)
    assert sampling_of({}, 7, own, True)[0].temperature == 0
    made, ignored = sampling_of(
        {"do_sample": True, "repetition_penalty": 1, "min_p": 0.1}, 7, own, True
    )
    assert (made.temperature, made.top_k, made.min_p, made.repetition_penalty) == (0.6, 50, 0.1, 1)
    assert ignored == []
    assert sampling_of({"temperature": 1}, 7, Generation(), True)[0].top_k == 50
    greedy = generation_of({"do_sample": False}, 2048)
    assert sampling_of({"do_sample": True}, 7, greedy, True)[0].temperature == 1
    assert sampling_of({}, 7, greedy, True)[0].temperature == 0


@pytest.mark.parametrize("name", ["num_beams", "num_return_sequences"])
def test_several_sequences_are_refused(name: str) -> None:
    assert sampling_of({name: 1}, 0, Generation(), True)[1] == []
    with pytest.raises(InputError, match=f"{name}=4; mmkv decodes one sequence"):
        sampling_of({name: 4}, 0, Generation(), True)


def test_blank_lines_do_not_stop() -> None:
    assert stop_strings(["\n\n", "ASSISTANT:", ""]) == ("ASSISTANT:",)
    assert stop_strings("\n\n") == stop_strings(None) == ()
    with pytest.raises(InputError, match="until is 3"):
        stop_strings(3)


# --- messages and media --------------------------------------------------------------------------


def test_visuals_of_every_kind(tmp_path: Path) -> None:
    shown = picture(1)
    shown.save(tmp_path / "a.png")
    pixels = np.asarray(shown)
    content = (tmp_path / "a.png").read_bytes()
    for visual in (
        shown,
        str(tmp_path / "a.png"),
        tmp_path / "a.png",
        content,
        pixels,
        {"bytes": content, "path": None},
        {"bytes": None, "path": tmp_path / "a.png"},
        f"file://{tmp_path}/a.png",
    ):
        part = visual_part(visual)
        assert part["type"] == "image"
        assert np.array_equal(np.asarray(load_image(part["url"])), pixels)
    assert visual_part("film.MP4") == {"type": "video", "url": "film.MP4"}
    film = {"url": "film.mp4", "type": "video"}
    assert visual_part(film) == film
    section = film | {"start_time": 2.0, "end_time": 4, "fps": 1.0, "max_pixels": 9}
    wanted = film | {"video_start": 2.0, "video_end": 4, "fps": 1.0, "max_pixels": 9}
    assert visual_part(section) == wanted
    asked = {"role": "user", "content": [section, {"type": "image", "url": "a", "min_pixels": 1}]}
    one, two = conversation([asked], "")[0]["content"]
    assert one == wanted and two == {"type": "image", "url": "a", "min_pixels": 1}
    assert keys([{"role": "user", "content": [one]}]) != keys([{"role": "user", "content": [film]}])


@pytest.mark.parametrize(
    ("visual", "message"),
    [
        ({"array": [0.0], "sampling_rate": 16000}, "sound"),
        ({"type": "video"}, "names no source"),
        (b"not a picture", "not one that Pillow reads"),
    ],
)
def test_visuals_that_cannot_be_taken(visual: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        visual_part(visual)


def test_the_system_prompt_comes_first_once() -> None:
    (first, second) = conversation([user("a")], "be brief")
    assert first == {"role": "system", "content": [{"type": "text", "text": "be brief"}]}
    assert second["content"] == [{"type": "text", "text": "a"}]
    own = [{"role": "system", "content": "mine"}, user("a")]
    assert conversation(own, "be brief")[0]["content"][0]["text"] == "mine"
    assert conversation([user("a")], "") == [second]
    with pytest.raises(InputError, match="part of type 'audio'"):
        conversation([{"role": "user", "content": [{"type": "audio", "url": "a.wav"}]}], "")


def test_messages_compare_by_their_content() -> None:
    shown = picture(1)
    same = keys(conversation([user(shown.copy(), "a"), assistant(" b\n")], ""))
    assert same == keys(conversation([user(shown, "a"), assistant("b")], ""))
    assert same != keys(conversation([user(picture(2), "a"), assistant("b")], ""))
    assert same != keys(conversation([user(shown, "a "), assistant("b")], ""))


@pytest.mark.parametrize(
    ("frames", "size", "wanted"),
    [
        (8, (128, 128), (448, 448)),  # enlarged to 200,704 pixels
        (8, (480, 640), (480, 640)),
        (32, (1080, 1920), (640, 1152)),  # at most 786,432
        (768, (720, 1280), (384, 736)),  # all together at most 0.9 x 128,000 tokens
    ],
)
def test_frames_are_scaled_as_by_the_built_in_adapter(
    frames: int, size: tuple[int, int], wanted: tuple[int, int]
) -> None:
    assert FrameRules().size(frames, *size) == wanted


def test_loose_frames_are_a_video() -> None:
    processor = Processor(None, ChatTemplate(byte_tokenizer(), None, parts=False))
    clip = Frames(32).load([picture(1), picture(2)], processor)
    assert clip.frames.shape == (2, 64, 96, 3) and clip.timestamps == [0.0, 0.5]
    with pytest.raises(InputError, match="differ in size"):
        Frames(32).load([picture(1), picture(1).resize((32, 32))], processor)
