"""Calls of the Python API: arguments of other types and beyond their limits, errors of libraries in
one request, and weights that change under a retained model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import torch
from PIL import Image
from torch import nn

import mmkv
from benchmarks.fuzz import mutate
from benchmarks.fuzz.models import SharedModels, save_text_model, small_engine
from benchmarks.fuzz.target import Case, Target, Wrong
from mmkv.api import Engine
from mmkv.detokenizer import Detokenizer
from mmkv.engine.errors import ForeignError, MmkvError
from mmkv.hf import RetainedCache, retain
from mmkv.prompt import sandbox, special
from mmkv.reply import ReplyWriter
from mmkv.sampling import Sampling
from mmkv.scheduler import Limits, Scheduler
from mmkv.scheduler.replies import EngineExecutor, ReplyJob, message

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


class Panic(BaseException):
    """As the PanicException of libraries in Rust: no Exception."""


class NoText(BaseException):
    """An error that cannot be shown either."""

    def __str__(self) -> str:
        raise Panic("in __str__")


_RAISED: dict[str, Callable[[], BaseException]] = {
    "panic": lambda: Panic("a library gave up\nat line 2"),
    "value": lambda: ValueError("wrong"),
    "runtime": lambda: RuntimeError("wrong"),
    "memory": lambda: MemoryError(),
    "recursion": lambda: RecursionError("too deep"),
    "bare": lambda: BaseException(),
    "assertion": lambda: AssertionError(),
}
_PLACES: dict[str, tuple[Any, str]] = {
    "tokenizer": (special, "require_no_long_run"),
    "template": (sandbox, "render"),
    "decoding of text": (Detokenizer, "push"),
    "choice": (ReplyWriter, "choose"),
    "end": (ReplyWriter, "put"),
}


class ForeignErrors(Target):
    """Has something raise at one call of one request; another one beside it is answered as alone.

    A case: ``place``, of :data:`_PLACES`; ``raised``, of :data:`_RAISED`; ``call``, at which of its
    calls; ``ahead``, whether the request that fails was submitted first.
    """

    name = "foreign errors"

    def prepare(self, folder: Path) -> None:
        """Make an engine."""
        super().prepare(folder)
        checkpoint = save_text_model(folder / "model")
        self.engine = Engine.from_pretrained(
            checkpoint, policy="streamingllm", budget=24, page_size=4, prefill_chunk=16
        )
        self.engines = [self.engine]
        self.alone = self._answers(["other"])[0]

    def make(self, rng: Random) -> Case:
        """Return a case."""
        return {
            "place": rng.choice(sorted(_PLACES)),
            "raised": rng.choice(sorted(_RAISED)),
            "call": rng.randrange(6),
            "ahead": rng.random() < 0.5,
        }

    def run(self, case: Case) -> None:
        """Raise Wrong where the other request has another reply, or the error is no Exception."""
        owner, name = _PLACES[case["place"]]
        real, calls = getattr(owner, name), [0]

        def changed(*given: Any, **named: Any) -> Any:
            # Who asks is known by the text in the prompt, and later by its writer.
            mine = "stop me" in repr(given[:3]) or given[:1] == (self._writer,)
            mine = mine or getattr(self._writer, "_detokenizer", None) is given[0]
            if mine and case["place"] in ("tokenizer", "template"):
                raise _RAISED[case["raised"]]()
            if mine and self._writer is not None:
                calls[0] += 1
                if calls[0] > case["call"]:
                    raise _RAISED[case["raised"]]()
            return real(*given, **named)

        self._writer: Any = None
        texts = ["stop me", "other"] if case["ahead"] else ["other", "stop me"]
        with mock.patch.object(owner, name, changed):
            found = dict(zip(texts, self._answers(texts), strict=True))
        if found["other"] != self.alone:
            raise Wrong(f"the other reply is {found['other']!r}, alone {self.alone!r}")
        error = found["stop me"]
        if isinstance(error, BaseException) and not isinstance(error, Exception):
            raise Wrong(f"a {type(error).__name__} is no Exception")
        if isinstance(error, ForeignError) and not str(error).strip():
            raise Wrong("an error without a word")

    def _answers(self, texts: list[str]) -> list[Any]:
        scheduler = Scheduler(EngineExecutor(self.engine), Limits(quantum=16))
        sampling = Sampling(max_new_tokens=5)
        jobs = [ReplyJob(self.engine, message(text), sampling) for text in texts]
        try:
            tickets = [scheduler.submit(job, text) for job, text in zip(jobs, texts, strict=True)]
            while scheduler.turn():
                for job, text in zip(jobs, texts, strict=True):
                    if text == "stop me":
                        self._writer = job.writer
            return [
                ticket.error if job.reply is None or ticket.error else job.reply.text
                for job, ticket in zip(jobs, tickets, strict=True)
            ]
        finally:
            scheduler.close()


class ChangedWeights(Target):
    """Changes a retained model's weights between two calls: they are followed, or refused.

    A case: ``changes``, names in :data:`_CHANGES` with a seed each; ``copied``, whether a deep copy
    is asked, too; ``cached``, whether the conversation goes on.
    """

    name = "changed weights"

    def prepare(self, folder: Path) -> None:
        """Make a model."""
        from transformers import AutoModelForCausalLM

        super().prepare(folder)
        self._source = AutoModelForCausalLM.from_pretrained(
            save_text_model(folder / "model"), dtype=torch.float32
        )

    def make(self, rng: Random) -> Case:
        """Return a case."""
        names = sorted(_CHANGES)
        changes = [[rng.choice(names), rng.randrange(2**31)] for _ in range(rng.randint(1, 3))]
        return {"changes": changes, "copied": rng.random() < 0.3, "cached": rng.random() < 0.3}

    def run(self, case: Case) -> None:
        """Raise Wrong where the model says something else than by itself."""
        model, ids = copy.deepcopy(self._source), torch.arange(3, 12)[None]
        cache = RetainedCache()
        given = {"past_key_values": cache} if case["cached"] else {}
        with retain(model, policy="full") as handle:
            said = _said(model.generate, ids, **given)
            for name, seed in case["changes"]:
                _CHANGES[name](model, torch.Generator().manual_seed(seed))
                if case["copied"]:
                    twin = copy.deepcopy(model)
                    if not torch.equal(_said(twin.generate, ids), _plainly(twin, ids)):
                        raise Wrong(f"after {name} a copy has other weights than it says")
                wanted = _plainly(model, ids)
                try:
                    made = _said(model.generate, ids)
                except MmkvError:
                    continue
                if not torch.equal(made, wanted):
                    raise Wrong(f"after {name} the engine runs other weights")
            if case["cached"] and not torch.equal(
                _plainly(model, ids), _plainly(self._source, ids)
            ):
                try:
                    model.generate(said, max_new_tokens=2, **given)
                except MmkvError:
                    return
                raise Wrong("what was read with other weights was gone on from")
            pool = handle.engine.cache.pool
            cache.close()
            if pool.num_pages - pool.free_pages:
                raise Wrong("pages are held")
        if "generate" in vars(model):
            raise Wrong("the model is not put back")


def _said(generate: Any, ids: torch.Tensor, **given: Any) -> torch.Tensor:
    mask = torch.ones_like(ids)
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    return generate(ids, attention_mask=mask, **options, **given)


def _plainly(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """What the model says by itself."""
    return _said(lambda *a, **k: type(model).generate(model, *a, **k), ids)


def _random(model: Any, source: torch.Generator) -> dict[str, torch.Tensor]:
    return {
        name: torch.randn(part.shape, generator=source).to(part) * 0.3
        for name, part in model.state_dict().items()
    }


def _linear(model: Any, source: torch.Generator) -> nn.Linear:
    found = [one for one in model.modules() if isinstance(one, nn.Linear)]
    return found[int(torch.randint(len(found), (1,), generator=source))]


@torch.no_grad()
def _written(model: Any, source: torch.Generator) -> None:
    part = _linear(model, source).weight
    part += 0.5 * torch.randn(part.shape, generator=source)


def _by_data(model: Any, source: torch.Generator) -> None:
    part = _linear(model, source).weight.data
    part += 0.5 * torch.randn(part.shape, generator=source)


def _new_data(model: Any, source: torch.Generator) -> None:
    part = _linear(model, source).weight
    part.data = torch.randn(part.shape, generator=source)


def _new_parameter(model: Any, source: torch.Generator) -> None:
    module = _linear(model, source)
    module.weight = nn.Parameter(torch.randn(module.weight.shape, generator=source))


def _adapter(model: Any, source: torch.Generator) -> None:
    """As PEFT does: another module around the matrix."""

    class Adapted(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base
            self.more = nn.Parameter(torch.randn(base.weight.shape, generator=source))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + x @ self.more.T

    attention = model.model.layers[0].self_attn
    if isinstance(attention.q_proj, nn.Linear):
        attention.q_proj = Adapted(attention.q_proj)


def _new_head(model: Any, source: torch.Generator) -> None:
    head = nn.Linear(32, 643, bias=False)
    head.weight.data = torch.randn(643, 32, generator=source)
    model.set_output_embeddings(head)


@torch.no_grad()
def _norm(model: Any, source: torch.Generator) -> None:
    model.model.norm.weight.copy_(1 + torch.rand(32, generator=source))


_CHANGES: dict[str, Callable[[Any, torch.Generator], Any]] = {
    "nothing": lambda model, _: None,
    "load_state_dict": lambda model, source: model.load_state_dict(_random(model, source)),
    "load_state_dict(assign=True)": lambda model, source: model.load_state_dict(
        _random(model, source), assign=True
    ),
    "an in-place write": _written,
    "a write through .data": _by_data,
    "other .data": _new_data,
    "another parameter": _new_parameter,
    "an adapter": _adapter,
    "another head": _new_head,
    "the last norm": _norm,
    "to(bfloat16) and back": lambda model, _: model.to(torch.bfloat16).to(torch.float32),
    "half": lambda model, _: model.half().float(),
}
