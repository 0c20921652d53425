"""Checkpoints with wrong values: each is refused in one line, or works."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from mmkv.api import Engine
from mmkv.engine.errors import ModelError
from mmkv.eval.fuzz.models import save_text_model, save_vision_model
from mmkv.eval.fuzz.target import failure_of
from mmkv.eval.fuzz.targets.model_files import Checkpoints
from mmkv.prompt import sandbox
from mmkv.prompt.loading import load_processor
from tests.support.chat_models import picture

Save = Callable[[Path], Path]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    target = Checkpoints()
    target.prepare(tmp_path_factory.mktemp("checkpoints"))
    return target


@pytest.mark.parametrize("seed", range(60))
def test_changed_checkpoints_are_refused_in_one_line(
    checkpoints: Checkpoints, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "SECONDS", 0.1)
    case = checkpoints.make(Random(f"settings/{seed}"))
    try:
        checkpoints.run(case)
    except Exception as error:
        assert failure_of(error) is None, (case["file"], error)
    assert checkpoints.leaked() is None


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
    model = save_text_model(tmp_path / "model")
    _changed(model, "config.json", *path, to=value)
    with pytest.raises(ModelError, match=r"config\.json|checkpoint") as error:
        Engine.from_pretrained(model)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("ids", ["x", 1.5, [1, None], {"a": 1}, True])
def test_end_tokens_are_ids(tmp_path: Path, ids: Any) -> None:
    model = save_vision_model(tmp_path / "model")
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
    model = save_vision_model(tmp_path / "model")
    (model / "preprocessor_config.json").write_text(content)
    assert load_processor(model).sees
    with pytest.raises(ModelError, match=r"preprocessor_config\.json"):
        _show_picture(model)
    (model / "preprocessor_config.json").unlink()
    assert not load_processor(model).sees


@pytest.mark.parametrize("file", ["preprocessor_config.json", "video_preprocessor_config.json"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("patch_size", 14),
        ("merge_size", 2**31),
        ("temporal_patch_size", "2"),
        ("image_mean", [0.5, 0.5]),
        ("image_std", [0.5, 0.0, 0.5]),
        ("rescale_factor", 1e308),
        ("size", {"shortest_edge": 2**40, "longest_edge": 2**41}),
        ("size", {"shortest_edge": 1024, "longest_edge": 512}),
    ],
)
def test_picture_settings_of_wrong_values_are_refused(
    tmp_path: Path, file: str, name: str, value: Any
) -> None:
    model = save_vision_model(tmp_path / "model")
    _changed(model, file, name, to=value)
    if name == "size":
        whole = json.loads((model / file).read_text())
        (model / file).write_text(
            json.dumps({k: v for k, v in whole.items() if not k.endswith("_pixels")})
        )
    with pytest.raises(ModelError, match=rf"{name} is .*; get the original file"):
        _show_picture(model)
