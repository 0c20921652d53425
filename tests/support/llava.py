"""Helpers of the tests of ``training.llava``."""

from __future__ import annotations

from pathlib import Path

HIDDEN = 224  # two units of the projector for each word
SYSTEM = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n"
)


def options(language: Path, easy: Path, output: Path) -> list[str]:
    """Return the options of a short training run."""
    steps = ["--words-steps=3", "--words-batch=1", "--eyes-steps=2", "--eyes-batch=2"]
    sizes = ["--width=16", "--layers=1", "--held-out=4", "--dtype=float32"]
    folders = {"language-model": language, "easy-vqa": easy, "output": output}
    return [f"--{name}={folder}" for name, folder in folders.items()] + steps + sizes
