"""Fixtures of the tests of ``training.llava``: pictures, a language model, a LLaVA of both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from mmkv.training.llava.__main__ import main
from tests.support.chat_models import save_llama
from tests.support.llava import HIDDEN, options

ASKED = [
    ["what color is the shape?", "teal", 0],
    ["is no red shape present?", "yes", 0],
    ["is there not a circle?", "no", 0],
    ["what shape is in the image?", "triangle", 1],
    ["is there a blue shape?", "no", 1],
    ["does the image not contain a gray shape?", "no", 1],
    ["what is the brown shape?", "circle", 2],
    ["is there a circle?", "no", 3],
]


@pytest.fixture(scope="session")
def easy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write easy-VQA's folder ``data`` with four pictures in each half."""
    folder = tmp_path_factory.mktemp("easy")
    for part in ("train", "test"):
        (folder / part / "images").mkdir(parents=True)
        (folder / part / "questions.json").write_text(json.dumps(ASKED))
        for number, colour in enumerate(("teal", "gray", "brown", "red")):
            Image.new("RGB", (64, 64), colour).save(folder / part / "images" / f"{number}.png")
    return folder


@pytest.fixture(scope="session")
def language(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("language"), hidden_size=HIDDEN)


@pytest.fixture(scope="session")
def trained(
    language: Path, easy: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    """Train a few steps; return the adapter, and the language model's bytes before."""
    before = {path.name: path.read_bytes() for path in language.iterdir()}
    output = tmp_path_factory.mktemp("run") / "adapter"
    assert main(["train", *options(language, easy, output)]) == 0
    return output, before


@pytest.fixture(scope="session")
def joined(
    trained: tuple[Path, dict[str, Any]], language: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("joined") / "llava"
    given = ["--language-model", str(language), "--output", str(folder)]
    assert main(["join", *given, "--adapter", str(trained[0])]) == 0
    return folder
