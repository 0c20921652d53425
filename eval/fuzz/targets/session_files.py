"""Session files: cut, with changed bits, and forged with a checksum that is right."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Self

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from mmkv.engine import session_file
from mmkv.eval.fuzz import mutate
from mmkv.eval.fuzz.models import small_engine
from mmkv.eval.fuzz.target import Case, Target, as_bytes, as_text
from mmkv.resources import asset
from mmkv.sampling import Sampling

_JSON = ("identity", "state", "extra")
_SHORT = Sampling(max_new_tokens=2)


# Kinds of what a file holds: gates; recent queries; states, counts and statistics of a scorer.
POLICIES = ("dbtrimkv", "snapkv", "segments-hs")


@dataclass(frozen=True)
class _Saved:
    """A good session file: its bytes and what they say."""

    whole: bytes
    metadata: dict[str, str]
    tensors: dict[str, Tensor]

    @classmethod
    def read(cls, path: Path) -> Self:
        with safe_open(path, framework="pt") as file:
            names = file.keys()
            tensors = {name: file.get_tensor(name) for name in names}
            return cls(path.read_bytes(), file.metadata(), tensors)


class SessionFiles(Target):
    """Files of a talk with a picture; what loads is talked to and closed."""

    name = "session files"

    def prepare(self, folder: Path) -> None:
        super().prepare(folder)
        model = folder / "model"
        self.by_policy = {
            name: small_engine(model, policy=name, gates="random") for name in POLICIES
        }
        self.engines = [*self.by_policy.values()]
        self._good = {}
        for policy, engine in self.by_policy.items():
            file = folder / f"{policy}.mmkv"
            with engine.session() as session:
                "".join(session.send("what is it?", images=[asset("scene.png")], sampling=_SHORT))
                "".join(session.send("and then?", sampling=_SHORT))
                session.save(file, {"note": "x"})
            self._good[policy] = _Saved.read(file)

    def make(self, rng: Random) -> Case:
        policy = rng.choice(POLICIES)
        saved = self._good[policy]
        if rng.random() < 0.4:
            # The header first: flips in the tensors only break the checksum.
            head = saved.whole[:4000] if rng.random() < 0.7 else saved.whole
            content = as_text(mutate.flip(rng, head) + saved.whole[len(head) :])
            return {"policy": policy, "content": content}
        fields = {name: json.loads(saved.metadata[name]) for name in _JSON}
        case: Case = {"policy": policy, "fields": {}, "tensors": []}
        if rng.random() < 0.8:
            name = rng.choice(("state", "state", "extra", "identity"))
            edited = mutate.edit(rng, fields[name])
            if name == "extra" and rng.random() < 0.8:
                inner = json.loads(fields[name]["mmkv.history"])
                key = rng.choice(("mmkv.history", "mmkv.unfed"))
                inner = inner if key == "mmkv.history" else [1]
                edited = fields[name] | {key: json.dumps(mutate.edit(rng, inner))}
            case["fields"][name] = edited
        while rng.random() < 0.4:
            change = {
                "name": rng.choice(sorted(saved.tensors)),
                "what": rng.choice(sorted(_TENSOR_CHANGES)),
                "seed": rng.randrange(1000),
            }
            case["tensors"].append(change)
        return case

    def run(self, case: Case) -> None:
        file = self.folder / "tried.mmkv"
        if "content" in case:
            file.write_bytes(as_bytes(case["content"]))
        else:
            self._forge(case, file)
        session, _ = self.by_policy[case["policy"]].load_session(file)
        with session:
            "".join(session.send("go on", sampling=_SHORT))

    def _forge(self, case: Case, file: Path) -> None:
        saved = self._good[case["policy"]]
        metadata = {key: text for key, text in saved.metadata.items() if key != "digest"}
        for name, field in case["fields"].items():
            metadata[name] = json.dumps(field)
        tensors = dict(saved.tensors)
        for change in case["tensors"]:
            if change["name"] not in tensors:
                continue
            made = _TENSOR_CHANGES[change["what"]](tensors[change["name"]], Random(change["seed"]))
            if made is None:
                del tensors[change["name"]]
            else:
                tensors[change["name"]] = made.contiguous()
        metadata["digest"] = session_file._digest(tensors, metadata)
        save_file(tensors, file, metadata=metadata)


def _one_value(tensor: Tensor, rng: Random) -> Tensor:
    made = tensor.clone()
    if made.numel():
        odd: Any = rng.choice((0, -1, 1, 7, 2**31 - 1, 2**62, -(2**62)))
        if made.dtype.is_floating_point:
            odd = rng.choice((float("nan"), float("inf"), 1e38, -1e38))
        elif made.dtype != torch.bool and not made.dtype.is_complex:
            limit = torch.iinfo(made.dtype)
            odd = max(limit.min, min(limit.max, odd))
        made.view(-1)[rng.randrange(made.numel())] = odd
    return made


_TENSOR_CHANGES: dict[str, Any] = {
    "gone": lambda tensor, rng: None,
    "empty": lambda tensor, rng: tensor.flatten()[:0],
    "shorter": lambda tensor, rng: tensor[:-1] if tensor.dim() else tensor,
    "longer": lambda tensor, rng: torch.cat([tensor, tensor]) if tensor.dim() else tensor,
    "flat": lambda tensor, rng: tensor.flatten(),
    "scalar": lambda tensor, rng: tensor.flatten()[:1].sum().to(tensor.dtype),
    "deeper": lambda tensor, rng: tensor[None],
    "float64": lambda tensor, rng: tensor.double(),
    "int8": lambda tensor, rng: tensor.nan_to_num().to(torch.int8),
    "bool": lambda tensor, rng: tensor.bool(),
    "complex": lambda tensor, rng: tensor.to(torch.complex64),
    "one value": _one_value,
    "two values": lambda tensor, rng: _one_value(_one_value(tensor, rng), rng),
}
