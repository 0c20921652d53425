"""Bad input on the command line: one clear line, the right exit code, a clean stdout."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from PIL import Image

from mmkv.engine.model.gates import make_random_gates, save_gates
from tests.conftest import make_spec
from tests.support.chat_models import save_llama, save_qwen3_vl
from tests.support.media import png_bomb

if TYPE_CHECKING:
    from tests.support.cli_fixtures import Ran

pytest_plugins = ("tests.support.cli_fixtures",)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--image", "no.png", "-p", "x"), "file not found: no.png"),
        (("--image", "corrupt.png", "-p", "x"), "damaged"),
        (("--image", "empty.png", "-p", "x"), "empty"),
        (("--image", "bomb.png", "-p", "x"), "pixels"),
        (("--video", "corrupt.png", "-p", "x"), "cannot read the video"),
        (("-p", ""), "the prompt is empty"),
        (("-p", " \n"), "the prompt is empty"),
        ((), "the prompt is empty"),  # an empty pipe
        (("-p", "x", "--budget", "0.5"), "at least 1 entry per row"),
        (("-p", "x", "--budget", "0"), "positive"),
        (("-p", "x", "--budget-bytes", "10"), "at least 1 entry per row"),
        (("-p", "x", "--budget-fraction", "1.5"), "fraction"),
        (("-p", "x", "--policy", "nope"), "unknown policy 'nope'; choose one of"),
        (("-p", "x", "--policy", "dbtrimkv"), "mmkv.training.distill"),
        (("-p", "x", "--gates", "gates"), "hidden"),
        (("-p", "x", "--gates", "no-such-gates"), "no-such-gates"),
        (("-p", "x" * 3000), "2,048"),
        (("-p", "x", "--min-pixels", "9999", "--max-pixels", "10"), "min <= max"),
        (("-p", "x", "--prefill-chunk", "0"), "prefill_chunk"),
        (("-p", "x", "--page-size", "0"), "page_size"),
        (("-p", "x", "--lookahead", "0"), "lookahead"),
    ],
)
def test_bad_input_gives_one_line_and_code_1(
    mmkv: Callable[..., Ran],
    model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    good = io.BytesIO()
    Image.effect_noise((64, 64), 50).save(good, "PNG")
    Path("corrupt.png").write_bytes(good.getvalue()[:700])
    Path("empty.png").touch()
    Path("bomb.png").write_bytes(png_bomb())
    if "gates" in arguments:
        _save_gates_of_another_model(Path("gates"))
    ran = mmkv("chat", model, *arguments)
    assert says in ran.error_line() and ran.code == 1


def _save_gates_of_another_model(folder: Path) -> None:
    other = make_spec(hidden=24)
    save_gates(make_random_gates(other), folder, other)


@pytest.mark.parametrize(
    ("name", "says"),
    [("no/such-model", "no/such-model"), ("./nowhere", "nowhere"), (".", "config.json")],
)
def test_models_that_cannot_be_loaded(
    mmkv: Callable[..., Ran], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = mmkv("chat", name, "-p", "x")
    assert says in ran.error_line() and ran.code == 1


def test_a_checkpoint_with_a_broken_tokenizer(mmkv: Callable[..., Ran], tmp_path: Path) -> None:
    save_llama(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    ran = mmkv("chat", str(tmp_path), "-p", "x")
    assert "tokenizer" in ran.error_line() and ran.code == 1


def test_pictures_for_a_text_model(mmkv: Callable[..., Ran], tmp_path: Path, picture: str) -> None:
    ran = mmkv("chat", str(save_llama(tmp_path)), "--image", picture, "-p", "x")
    assert "text only" in ran.error_line() and ran.code == 1


def test_a_model_that_sees_without_its_picture_settings(
    mmkv: Callable[..., Ran], tmp_path: Path, picture: str
) -> None:
    folder = save_qwen3_vl(tmp_path)
    (folder / "preprocessor_config.json").unlink()
    ran = mmkv("chat", str(folder), "--image", picture, "-p", "x")
    assert "has no preprocessor_config.json" in ran.error_line() and ran.code == 1


def test_eyes_without_their_language_model(
    mmkv: Callable[..., Ran], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`mmkv models` lists them; the remedy is one command."""
    monkeypatch.chdir(tmp_path)
    for name in ("smollm2-llava", str(tmp_path / "eyes")):
        ran = mmkv("chat", name, "-p", "x")
        assert "mmkv.training.llava join" in ran.error_line() and ran.code == 1
        (tmp_path / "eyes").mkdir(exist_ok=True)
        (tmp_path / "eyes" / "adapter.json").write_text("{}")


def test_the_bundled_model_is_missing(
    mmkv: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmkv.resources.BUNDLED_MODEL", "gone")
    ran = mmkv("chat", "-p", "x")
    assert "name a model" in ran.error_line() and ran.code == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("chat", "--budget", "x"),
        ("chat", "--budget", "1", "--budget-bytes", "5"),
        ("chat", "--budget-bytes", "many"),
        ("chat", "--fps", "1", "--num-frames", "2"),
        ("chat", "--temperature", "-1"),
        ("chat", "--top-p", "2"),
        ("chat", "--max-new-tokens", "0"),
        ("chat", "--no-such-option"),
        ("no-such-command",),
    ],
)
def test_wrong_usage_gives_one_line_and_code_2(
    mmkv: Callable[..., Ran], arguments: tuple[str, ...]
) -> None:
    ran = mmkv(*arguments)
    assert ran.error_line() and ran.code == 2
