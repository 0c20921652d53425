"""Rows of MMDU's benchmark file, and rows of training data."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from random import Random
from typing import Any

import mmkv.eval.mmdu.run as mmdu
from mmkv.chat.options import ChatOptions
from mmkv.engine.config import EngineConfig
from mmkv.engine.errors import MmkvError
from mmkv.eval.fuzz import mutate
from mmkv.eval.fuzz.models import SharedModels, save_vision_model, small_engine
from mmkv.eval.fuzz.target import Case, Target, Wrong, as_bytes, as_text
from mmkv.eval.mmdu.compare import compare
from mmkv.eval.mmdu.score import run_score
from mmkv.resources import asset
from mmkv.training.data import sources
from mmkv.training.data.readers import RowFile

_TURNS = (("user", "a <ImageHere> and?"), ("assistant", "red"), ("user", "then"), ("assistant", ""))


class Benchmark(Target):
    """A file of two dialogues, one of them changed, answered and scored as a whole."""

    name = "MMDU rows"

    def prepare(self, folder: Path) -> None:
        super().prepare(folder)
        (folder / "pictures").mkdir()
        shutil.copy(asset("scene.png"), folder / "pictures" / "p.png")
        self._model = save_vision_model(folder / "model")
        self.engine = small_engine(self._model)
        self.engines = [self.engine]

    def make(self, rng: Random) -> Case:
        rows: Any = [_dialogue("one"), _dialogue("two")]
        if rng.random() < 0.3:
            rows = {row.pop("id"): row for row in rows}
        if rng.random() < 0.9:
            key = rng.choice(sorted(rows)) if isinstance(rows, dict) else 0
            rows[key] = mutate.edit(rng, rows[key])
        else:
            rows = mutate.edit(rng, rows)
        return {"content": as_text(mutate.dump(rng, rows)), "answers": rng.random() < 0.2}

    def run(self, case: Case) -> None:
        data, output = self.folder / "benchmark.json", self.folder / "answers"
        shutil.rmtree(output, ignore_errors=True)
        data.write_bytes(as_bytes(case["content"]))
        given = mmdu.DataOptions(data, self.folder / "pictures")
        config = EngineConfig(model=self._model, budget=24)
        options = ChatOptions(config, max_new_tokens=2, quiet=True)
        load, mmdu._engine = mmdu._engine, lambda *_: self.engine
        try:
            mmdu.run(given, options, output)
        finally:
            mmdu._engine = load
        if case["answers"]:
            # What was written is read again, with a byte of it changed.
            for number, file in enumerate(sorted(output.glob("*.json"))):
                file.write_bytes(mutate.flip(Random(number), file.read_bytes(), 1))
            for read in (lambda: run_score(given, output), lambda: compare([output]).show()):
                try:
                    read()
                except MmkvError:
                    continue


def _dialogue(name: str) -> dict[str, Any]:
    turns = [{"from": who, "value": what} for who, what in _TURNS]
    return {"id": name, "image": ["p.png"], "conversations": turns, "exact": ["a", "b"]}


class TrainingRows(Target):
    """Rows of four kinds beside one that is whole; every usable row is encoded."""

    name = "training rows"

    def prepare(self, folder: Path) -> None:
        super().prepare(folder)
        shutil.copy(asset("scene.png"), folder / "p.png")
        self._model = str(save_vision_model(folder / "model"))
        self._shared = SharedModels()
        self._processor = sources.load_processor(self._model)

    def make(self, rng: Random) -> Case:
        kind = rng.choice(sorted(_ROWS))
        lines = [json.dumps(_ROWS[kind]).encode()]
        for _ in range(rng.randrange(1, 4)):
            lines.append(mutate.dump(rng, mutate.edit(rng, _ROWS[kind])))
        rng.shuffle(lines)
        suffix = rng.choice((".jsonl", ".jsonl", ".json", ".txt"))
        whole = b"\n".join(lines)
        if suffix == ".json":
            whole = b"[" + b",".join(lines) + b"]"
        if suffix == ".txt" or rng.random() < 0.1:
            whole = mutate.flip(rng, whole)
        named = rng.choice((kind, kind, None, *sorted(_ROWS)))
        return {"suffix": suffix, "kind": named, "content": as_text(whole)}

    def run(self, case: Case) -> None:
        file = self.folder / f"rows{case['suffix']}"
        file.write_bytes(as_bytes(case["content"]))
        said: list[str] = []
        rows = RowFile(file, case["kind"], report=said.append)
        encoder = sources.SyntheticEncoder(self._processor, 512, "cut", said.append)
        for row in rows:
            encoder(row)
        for line in said:
            if line.strip() == "":
                raise Wrong("a row was skipped without a reason")
            line.encode()  # what is reported can be written to a file or terminal


_ROWS: dict[str, Any] = {
    "chat": {
        "messages": [
            {"role": "system", "content": "short"},
            {"role": "user", "content": [{"type": "image", "image": "p.png"}, _TURNS[2][1]][:1]},
            {"role": "assistant", "content": "red"},
            {"role": "user", "content": [{"type": "text", "text": "then"}]},
            {"role": "assistant", "content": "blue"},
        ],
    },
    "llava": {
        "image": "p.png",
        "conversations": [
            {"from": "human", "value": "<image>\nwhat?"},
            {"from": "gpt", "value": "red"},
        ],
    },
    "mmdu": {
        "image": ["p.png"],
        "conversations": [
            {"from": "user", "value": "see <ImageHere>."},
            {"from": "assistant", "value": "red"},
        ],
    },
    "text": {"text": "a text of some words that is long enough"},
}
