"""Checkpoint folders: config, processors, tokenizer, templates, generation config, weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from random import Random
from typing import Any

import torch
from PIL import Image

from mmkv.api import Engine
from mmkv.eval.fuzz import mutate
from mmkv.eval.fuzz.models import save_text_model, save_vision_model
from mmkv.eval.fuzz.target import Case, Target, as_bytes, as_text
from mmkv.eval.fuzz.targets.templates import template
from mmkv.sampling import Sampling

_SHORT = Sampling(max_new_tokens=2)
_TEMPLATE, _WEIGHTS = "chat_template.jinja", "model.safetensors"


class Checkpoints(Target):
    """Folders of two small models with one file changed, gone or empty; then a talk."""

    name = "checkpoints"

    def prepare(self, folder: Path) -> None:
        super().prepare(folder)
        self._models = {
            "vision": save_vision_model(folder / "vision"),
            "text": save_text_model(folder / "text"),
        }
        self._files = {
            name: {file.name: file.read_bytes() for file in model.iterdir()}
            for name, model in self._models.items()
        }
        self._picture = Image.new("RGB", (40, 24), "red")

    def make(self, rng: Random) -> Case:
        model = rng.choice(("vision", "vision", "text"))
        files = self._files[model]
        # Rarely the tokenizer, whose own file is large and slow to read.
        file = rng.choice([name for name in sorted(files) for _ in range(_share(name))])
        content = files[file]
        what = rng.random()
        made: bytes | None
        if what < 0.03:
            made = None
        elif what < 0.06:
            made = rng.choice((b"", b"{}", b"[]", b"null", b"\xff\xfe", b"{"))
        elif file == _TEMPLATE and what < 0.8:
            made = template(rng).encode("utf-8", "surrogatepass")
        elif file == _WEIGHTS:
            made = _changed_weights(content, rng)
        elif file.endswith(".json") and what < 0.9:
            made = mutate.dump(rng, mutate.edit(rng, json.loads(content)))
        else:
            made = mutate.flip(rng, content)
        return {"model": model, "file": file, "content": None if made is None else as_text(made)}

    def run(self, case: Case) -> None:
        folder = self.folder / "tried"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for name, whole in self._files[case["model"]].items():
            content = whole if name != case["file"] else case["content"]
            if content is not None:
                made = content if isinstance(content, bytes) else as_bytes(content)
                (folder / name).write_bytes(made)
        engine = Engine.from_pretrained(folder, budget=24, page_size=4)
        self.engines = [engine]
        pictures = [self._picture] if engine.processor.sees else []
        with engine.session() as session:
            "".join(session.send("what is it?", images=pictures, sampling=_SHORT))
            "".join(session.send("and then?", sampling=_SHORT))


def _share(name: str) -> int:
    return {"tokenizer.json": 1, _TEMPLATE: 4, "config.json": 6}.get(name, 3)


def _changed_weights(content: bytes, rng: Random) -> bytes:
    """Change the header, its JSON, or numbers of the weights."""
    size = int.from_bytes(content[:8], "little")
    header, body = content[8 : 8 + size], bytearray(content[8 + size :])
    what = rng.randrange(4)
    if what == 0:
        return mutate.flip(rng, content[: 8 + size]) + bytes(body)
    if what == 1:
        edited = json.dumps(mutate.edit(rng, json.loads(header))).encode()
        return len(edited).to_bytes(8, "little") + edited + bytes(body)
    if what == 2:
        return content[: rng.randrange(len(content))]
    odd: Any = rng.choice((float("nan"), float("inf"), -float("inf"), 3e38))
    at = 4 * rng.randrange(len(body) // 4)
    body[at : at + 4] = torch.tensor([odd]).numpy().tobytes()
    return content[: 8 + size] + bytes(body)
