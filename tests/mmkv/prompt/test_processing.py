"""Templates turn by turn, and model inputs beside those of transformers' own processors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mmkv import Engine, Sampling
from mmkv.engine.errors import InputError, ModelError
from mmkv.prompt import loading
from mmkv.prompt.loading import load_processor
from mmkv.prompt.template import NO_TEMPLATE, REWRITES, ChatTemplate
from mmkv.resources import bundled_model
from tests.support.chat_models import (
    byte_tokenizer,
    picture,
    save_idefics3,
    save_internvl,
    save_llama,
    save_llava,
    save_llava_next_video,
    save_llava_onevision,
    save_mistral3,
    save_qwen2_5_vl,
    save_qwen2_vl,
    save_qwen3_vl,
    save_qwen3_vl_moe,
    save_smolvlm,
    script,
    watch,
)
from tests.support.theirs import processor_of
from tests.support.tiers import one_in


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen3_vl(tmp_path_factory.mktemp("qwen"))


def test_a_template_that_rewrites_or_drops_turns_is_noticed() -> None:
    tokenizer = byte_tokenizer()
    numbered = "{% for m in messages %}[{{ messages | length }}]{{ m.content }}{% endfor %}"
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    addition = ChatTemplate(tokenizer, numbered, parts=False).addition(talk, talk[:1])
    assert (addition.text, addition.differs) == ("[3]a", REWRITES)
    forgetful = "{{ messages[-1].content }}"
    with pytest.raises(InputError, match="drops earlier replies"):
        ChatTemplate(tokenizer, forgetful, parts=False).addition(talk, talk[:1])
    strict = "{{ raise_exception('no system messages here') }}"
    with pytest.raises(InputError, match="no system messages here"):
        ChatTemplate(tokenizer, strict, parts=False).addition([], talk[:1])


THINKS = (
    "{{ bos_token }}{% set depth = 1 %}{% for m in messages %}<{{ m.content }}>{% endfor %}"
    "{% if add_generation_prompt %}it:{% if enable_thinking is defined and not enable_thinking %}"
    "(no thought){% endif %}{{ style }}{% endif %}"
)


def test_a_template_is_told_what_it_reads_beside_the_messages() -> None:
    template = ChatTemplate(byte_tokenizer(), THINKS, parts=False)
    assert template.variables == {"enable_thinking", "style"}
    talk = [{"role": "user", "content": "a"}]
    plain = template.render(talk, opening=True)
    assert plain.endswith("<a>it:")
    told = template.with_values({"enable_thinking": False}).with_values({"style": 7})
    assert told.render(talk, opening=True) == plain + "(no thought)7"
    assert template.with_values({"enable_thinking": True}).render(talk, opening=True) == plain
    assert template.render(talk, opening=True) == plain
    for name in ("messages", "depth", "bos_token", "m", "other"):
        with pytest.raises(InputError, match=f"does not read '{name}'; it has enable_thinking, st"):
            template.with_values({name: "x"})
    for broken in ("{% if %}", "{{ x" + "[0]" * 5000 + " }}"):
        assert ChatTemplate(byte_tokenizer(), broken, parts=False).variables == frozenset()


def test_pixel_bounds(qwen: Path) -> None:
    text, image = "<|image_pad|>", [picture("red", (64, 64))]
    cells = [
        load_processor(qwen, *bounds).encode(text, image)["input_ids"].shape[1]
        for bounds in ((None, None), (None, 32 * 32), (128 * 128, 128 * 128), (64 * 64, None))
    ]
    assert cells == [16, 4, 64, 16]
    with pytest.raises(InputError, match="min <= max"):
        load_processor(qwen, 5000, 100)


@pytest.mark.parametrize("text", ["ignore:", "9 of 9", "\n remember", " it", "?", "<|im_end|>\n"])
def test_a_continuation_is_read_as_within_the_whole_text(text: str) -> None:
    processor = load_processor(bundled_model())
    before = "<|im_start|>user\npicture 1:<|vision_end|>"
    begun, whole = (
        processor.encode(part)["input_ids"][0].tolist() for part in (before, before + text)
    )
    continued = processor.encode(text, continuing=True)["input_ids"][0].tolist()
    assert begun + continued == whole


@pytest.mark.parametrize("text", ["", "a <|image_pad|>", "<|video_pad|>"])
def test_placeholders_written_by_hand_are_refused(qwen: Path, text: str) -> None:
    with pytest.raises(InputError):
        load_processor(qwen).encode(text)


def test_text_models_refuse_pictures_and_continue_without_a_template(tmp_path: Path) -> None:
    engine = Engine.from_pretrained(save_llama(tmp_path, template=None), dtype="float32")
    with engine.session() as session:
        with pytest.raises(InputError, match="text only"):
            session.send("hi", images=[picture()])
        list(session.send("ab", sampling=Sampling(max_new_tokens=3)))
        assert session.note == NO_TEMPLATE and session.last is not None
        assert session.last.prompt_tokens == 2 and session.seen == 4
        list(session.send("cd", sampling=Sampling(max_new_tokens=1)))
        assert session.seen == 7  # the third sampled token, then c and d


def test_llava_talks_about_pictures_in_several_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine.from_pretrained(save_llava(tmp_path), policy="full", dtype="float32")
    script(monkeypatch, engine, ["red", "blue"])
    fed = watch(monkeypatch)
    with engine.session() as session:
        for colour in ("red", "blue"):
            assert "".join(session.send("what?", images=[picture(colour)])) == colour
    cells = "<image>" * 16
    wanted = f"USER: {cells}\nwhat? ASSISTANT: red<|im_end|>USER: {cells}\nwhat? ASSISTANT: blue"
    assert engine.processor.tokenizer.decode(fed) == wanted


def test_a_blank_before_a_reply_is_not_read_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SmolVLM's template opens a reply without a blank, shows it behind one, and the model says
    one: what the session holds is what the template shows.
    """
    engine = Engine.from_pretrained(save_smolvlm(tmp_path), policy="snapkv", budget=9)
    script(monkeypatch, engine, [" red", " blue", "green"])
    fed = watch(monkeypatch)
    with engine.session() as session:
        for colour in ("red", "blue", "green"):
            list(session.send("what?", images=[picture(colour)]))
            assert session.note is None
        assert [one["content"] for one in session.history[1::2]] == ["red", "blue", "green"]
    said = engine.processor.tokenizer.decode(fed)
    assert said.count("Assistant: red<end_of_utterance>\nUser:<") == said.count(" red") == 1


SAVES = [save_llava, save_llava_onevision, save_internvl, save_qwen2_5_vl, save_qwen3_vl_moe]
SAVES += [save_smolvlm, save_idefics3, save_mistral3, save_qwen2_vl, save_llava_next_video]


@one_in(3)
@pytest.mark.parametrize("save", SAVES)
def test_pictures_are_answered_as_with_transformers(
    tmp_path: Path, save: Callable[[Path], Path]
) -> None:
    from transformers import AutoModelForImageTextToText

    engine = Engine.from_pretrained(save(tmp_path), policy="full", dtype="float32")
    model = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32)
    processor = processor_of(tmp_path)
    rng = np.random.default_rng(0)
    for sizes in ([(50, 70)], [(50, 70), (90, 40)]):
        noise = [rng.integers(0, 256, (*size, 3), dtype=np.uint8) for size in sizes]
        parts = [{"type": "image", "image": Image.fromarray(pixels)} for pixels in noise]
        talk = [{"role": "user", "content": [*parts, {"type": "text", "text": "what?"}]}]
        reply = engine.generate(talk, Sampling(max_new_tokens=8))[0]
        text = processor.tokenizer.apply_chat_template(
            talk, tokenize=False, add_generation_prompt=True
        )
        pictures = [[part["image"] for part in parts]]
        inputs = processor(text=[text], images=pictures, return_tensors="pt")
        ours = engine.inputs(talk)
        assert ours.keys() == inputs.keys()
        for key, wanted in inputs.items():
            assert torch.equal(ours[key], wanted), key
        # A reply never holds a placeholder.
        never = {"suppress_tokens": engine.never_chosen.tolist()}
        made = model.generate(**inputs, max_new_tokens=8, do_sample=False, **never)
        theirs = made[0, inputs["input_ids"].shape[1] :].tolist()
        assert reply.token_ids and theirs[: len(reply.token_ids)] == reply.token_ids


@pytest.mark.slow(reason="a process that loads torch and a model")
def test_a_broken_torchvision_is_hidden(qwen: Path, tmp_path: Path) -> None:
    fake = tmp_path / "torchvision"
    fake.mkdir()
    (fake / "__init__.py").write_text("raise RuntimeError('operator nms does not exist')")
    facts = tmp_path / "torchvision-0.28.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.28.0\n")
    code = (
        "import sys; from mmkv import Engine, Sampling; from PIL import Image;"
        "session = Engine.from_pretrained(sys.argv[1]).session();"
        "image, few = Image.new('RGB', (32, 32)), Sampling(max_new_tokens=2);"
        "list(session.send('what?', images=[image], sampling=few))"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, str(qwen)]
    made = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr[-500:]


# Checkpoints with wrong values: each is refused in one line, or works.


def _changed(folder: Path, file: str, *path: str, to: Any) -> None:
    whole = json.loads((folder / file).read_text())
    holder = whole
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = to
    (folder / file).write_text(json.dumps(whole))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("vocab_size",), 2**40),
        (("hidden_size",), -32),
        (("num_hidden_layers",), 10**7),
        (("num_hidden_layers",), 4000),
        (("num_key_value_heads",), 3),
        (("head_dim",), 2**31),
        (("rms_norm_eps",), float("nan")),
        (("max_position_embeddings",), 0),
        (("rope_parameters",), {"rope_type": "default", "rope_theta": -1.0}),
        (("rope_parameters",), {"rope_type": "default", "mrope_section": 3.5}),
        (("rope_parameters",), {"rope_type": "default", "mrope_section": [1, 1]}),
        (("rope_parameters",), {"rope_type": "default", "mrope_section": [9, 9, 9]}),
    ],
)
def test_sizes_beyond_any_model_are_refused_before_use(
    tmp_path: Path, path: tuple[str, ...], value: Any
) -> None:
    model = save_llama(tmp_path / "model")
    _changed(model, "config.json", *path, to=value)
    with pytest.raises(ModelError, match=r"config\.json|checkpoint") as error:
        Engine.from_pretrained(model)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("ids", ["x", 1.5, [1, None], {"a": 1}, True])
def test_end_tokens_are_ids(tmp_path: Path, ids: Any) -> None:
    model = save_qwen3_vl(tmp_path / "model")
    _changed(model, "generation_config.json", "eos_token_id", to=ids)
    with pytest.raises(ModelError, match=r"eos_token_id .* check generation_config\.json"):
        Engine.from_pretrained(model)


def _show_picture(model: Path) -> None:
    """Read a picture, for which the picture settings are first needed."""
    processor = load_processor(model)
    message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "hi"}]}
    processor.encode(processor.template.render([message], opening=True), [picture()])


@pytest.mark.parametrize("content", ["", "{}", "[]", "null", "{"])
def test_empty_picture_settings_are_no_text_model(tmp_path: Path, content: str) -> None:
    model = save_qwen3_vl(tmp_path / "model")
    (model / "preprocessor_config.json").write_text(content)
    assert load_processor(model).sees
    with pytest.raises(ModelError, match=r"preprocessor_config\.json"):
        _show_picture(model)
    (model / "preprocessor_config.json").unlink()
    assert not load_processor(model).sees


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("max_image_size",), {"longest_edge": 16}),  # the tower's tiles have 32 pixels
        (("video_sampling",), 5),
        (("video_sampling", "fps"), -1),
        (("video_sampling", "max_frames"), "many"),
        (("video_sampling", "video_size"), {"longest_edge": 0}),
    ],
)
def test_settings_of_smolvlm_are_checked(tmp_path: Path, path: tuple[str, ...], value: Any) -> None:
    model = save_smolvlm(tmp_path / "model")
    _changed(model, "preprocessor_config.json", *path, to=value)
    with pytest.raises(ModelError, match=rf"preprocessor_config\.json: {path[-1]} is "):
        load_processor(model)


def test_what_stands_for_pictures_is_one_token() -> None:
    tokenizer = byte_tokenizer()
    assert loading._known_token(tokenizer, "<|im_end|>") == "<|im_end|>"
    with pytest.raises(ModelError, match="does not know '<none>'"):
        loading._known_token(tokenizer, "<none>")


def test_a_part_of_a_prompt_reads_pictures_as_the_whole_does(tmp_path: Path) -> None:
    """LLaVA-OneVision cuts one alone into tiles, and none of several."""
    processor = load_processor(save_llava_onevision(tmp_path))
    image = Image.new("RGB", (64, 32))
    sizes = [
        processor.encode("<image>", [image], pictures=count)["input_ids"].shape[1]
        for count in (None, 1, 2)
    ]
    assert sizes[0] == sizes[1] > sizes[2]


PICTURES, VIDEOS = "preprocessor_config.json", "video_preprocessor_config.json"


@pytest.mark.parametrize(
    ("file", "name", "value"),
    [
        (PICTURES, "patch_size", 14),
        (VIDEOS, "merge_size", 2**31),
        (PICTURES, "temporal_patch_size", "2"),
        (VIDEOS, "image_mean", [0.5, 0.5]),
        (PICTURES, "image_std", [0.5, 0.0, 0.5]),
        (VIDEOS, "rescale_factor", 1e308),
        (PICTURES, "size", {"shortest_edge": 2**40, "longest_edge": 2**41}),
        (VIDEOS, "size", {"shortest_edge": 2**40, "longest_edge": 2**41}),
        (PICTURES, "size", {"shortest_edge": 1024, "longest_edge": 512}),
    ],
)
def test_picture_settings_of_wrong_values_are_refused(
    tmp_path: Path, file: str, name: str, value: Any
) -> None:
    model = save_qwen3_vl(tmp_path / "model")
    _changed(model, file, name, to=value)
    if name == "size":
        whole = json.loads((model / file).read_text())
        (model / file).write_text(
            json.dumps({k: v for k, v in whole.items() if not k.endswith("_pixels")})
        )
    with pytest.raises(ModelError, match=rf"{name} is .*; get the original file"):
        _show_picture(model)
