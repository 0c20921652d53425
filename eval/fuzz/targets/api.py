"""Arguments of the Python API: of other types, and beyond their limits."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import torch
from PIL import Image

import mmkv
from mmkv.eval.fuzz import mutate
from mmkv.eval.fuzz.models import SharedModels, small_engine
from mmkv.eval.fuzz.target import Case, Target

_TURN = {"role": "user", "content": "what?"}
# Objects that JSON has no word for, by the names that cases use.
_OBJECTS: dict[str, Any] = {
    "none": lambda: None,
    "true": lambda: True,
    "object": object,
    "class": lambda: int,
    "bytes": lambda: b"x",
    "tuple": lambda: (1, 2),
    "set": lambda: {1},
    "complex": lambda: 1j,
    "function": lambda: print,
    "path": lambda: Path("nowhere"),
    "tensor": lambda: torch.zeros(3),
    "int tensor": lambda: torch.tensor([[1, 2, 3]]),
    "empty tensor": lambda: torch.zeros(0),
    "nan tensor": lambda: torch.tensor(float("nan")),
    "picture": lambda: Image.new("RGB", (20, 20)),
    "thin picture": lambda: Image.new("RGB", (3000, 1)),
    "no picture": lambda: Image.new("RGB", (0, 5)),
    "message": lambda: dict(_TURN),
    "conversation": lambda: [dict(_TURN)],
    "sampling": lambda: mmkv.Sampling(max_new_tokens=2),
    "budget": lambda: mmkv.Budget("entries", 20),
    "odd budget": lambda: mmkv.Budget("fraction", 1e-300),
}
_OPTIONS: dict[str, Any] = {
    "policy": "streamingllm",
    "budget": 24,
    "lookahead": 2,
    "evict_every": 1,
    "prefill_chunk": 64,
    "page_size": 4,
    "gates": None,
    "device": "cpu",
    "dtype": "float32",
    "kv_limit": None,
}
# Per call its arguments: what they are when nothing is odd.
_CALLS: dict[str, dict[str, Any]] = {
    "Sampling": {
        "max_new_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "seed": 1,
        "stop": ["x"],
    },
    "Budget": {"kind": "entries", "value": 20},
    "Budget.of": {"budget": 20},
    "EngineConfig": {"model": "", **_OPTIONS},
    "Engine": {**_OPTIONS, "min_pixels": None, "max_pixels": None},
    "generate": {
        "conversations": [_TURN],
        "sampling": {"?": "sampling"},
        "budget": 24,
    },
    "session": {"budget": 24},
    "send": {
        "text": "what?",
        "images": [],
        "videos": [],
        "system": None,
        "sampling": {"?": "sampling"},
        "fps": None,
        "num_frames": None,
    },
    "set_budget": {"budget": 20},
    "save": {"path": "saved.mmkv", "extra": {"a": "b"}},
    "load_session": {"path": "saved.mmkv"},
    "decode": {"token_ids": [3]},
    "prefill": {"input_ids": {"?": "int tensor"}},
}


class PythonApi(Target):
    """Calls with one or two arguments replaced."""

    name = "Python API"

    def prepare(self, folder: Path) -> None:
        super().prepare(folder)
        self._model = folder / "model"
        self.engine = small_engine(self._model)
        self.engines = [self.engine]
        self._shared = SharedModels()

    def make(self, rng: Random) -> Case:
        call = rng.choice(sorted(_CALLS))
        arguments = dict(_CALLS[call])
        for name in rng.sample(sorted(arguments), min(len(arguments), rng.choice((1, 1, 2)))):
            what = rng.random()
            if what < 0.4:
                arguments[name] = {"?": rng.choice(sorted(_OBJECTS))}
            elif what < 0.6 and isinstance(arguments[name], (list, dict)):
                arguments[name] = mutate.edit(rng, arguments[name])
            else:
                arguments[name] = mutate.value(rng)
        return {"call": call, "arguments": arguments}

    def run(self, case: Case) -> None:
        arguments = {name: _built(value) for name, value in case["arguments"].items()}
        call = case["call"]
        if call == "Sampling":
            mmkv.Sampling(**arguments)
        elif call == "Budget":
            mmkv.Budget.of(mmkv.Budget(**arguments))
        elif call == "Budget.of":
            mmkv.Budget.of(**arguments)
        elif call == "EngineConfig":
            mmkv.EngineConfig(**arguments)
        elif call == "Engine":
            self._engine(arguments)
        elif call == "generate":
            self.engine.generate(**arguments)
        else:
            self._in_session(call, arguments)

    def _engine(self, arguments: dict[str, Any]) -> None:
        with self._shared:
            made = mmkv.Engine.from_pretrained(self._model, **arguments)
            made.generate([_TURN], mmkv.Sampling(max_new_tokens=2))
        assert made.cache.pool.num_pages == made.cache.pool.free_pages

    def _in_session(self, call: str, arguments: dict[str, Any]) -> None:
        if call == "session":
            self.engine.session(**arguments).close()
            return
        if call == "load_session":
            self.engine.load_session(**arguments)[0].close()
            return
        with self.engine.session() as session:
            if call == "send":
                "".join(session.send(**arguments))
                return
            "".join(session.send("what?", sampling=mmkv.Sampling(max_new_tokens=2)))
            if call == "decode":
                self.engine.decode([session], **arguments)
            elif call == "prefill":
                session.prefill(arguments)
            else:
                getattr(session, call)(**arguments)


def _built(value: Any) -> Any:
    """Return a case's value with its named objects in place."""
    if isinstance(value, dict):
        name = value.get("?")
        if isinstance(name, str) and name in _OBJECTS:
            return _OBJECTS[name]()
        return {key: _built(inner) for key, inner in value.items()}
    return [_built(inner) for inner in value] if isinstance(value, list) else value
