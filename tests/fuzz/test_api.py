"""Calls of the Python API: arguments of other types and beyond their limits, errors of libraries in
one request, and weights that change under a retained model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import mmkv
from mmkv.engine.errors import ForeignError, MmkvError
from mmkv.hf import RetainedCache, retain
from mmkv.prompt import sandbox, special
from mmkv.prompt.messages import take_media
from mmkv.reply import Detokenizer, ReplyWriter
from mmkv.sampling import Sampling
from mmkv.scheduler import Limits, Scheduler
from mmkv.scheduler.replies import EngineExecutor, ReplyJob, message
from tests.fuzz.strategies import edited, texts, values
from tests.fuzz.trial import Wrong, check_pages, examples, trial
from tests.support.changed_weights import CHANGES
from tests.support.chat_models import save_llama, save_qwen3_vl

_TURN = {"role": "user", "content": "what?"}
_SHORT = Sampling(max_new_tokens=2)
# Objects that JSON has no word for, made anew for each input.
_OBJECTS: tuple[Callable[[], Any], ...] = (
    object,
    lambda: int,
    lambda: b"x",
    lambda: (1, 2),
    lambda: {1},
    lambda: 1j,
    lambda: print,
    lambda: Path("nowhere"),
    lambda: torch.zeros(3),
    lambda: torch.tensor([[1, 2, 3]]),
    lambda: torch.tensor(2),
    lambda: np.float32(0.5),
    lambda: np.int64(3),
    lambda: torch.zeros(0),
    lambda: torch.tensor(float("nan")),
    lambda: Image.new("RGB", (20, 20)),
    lambda: Image.new("RGB", (3000, 1)),
    lambda: Image.new("RGB", (0, 5)),
    lambda: dict(_TURN),
    lambda: [dict(_TURN)],
    lambda: _SHORT,
    lambda: mmkv.Budget("entries", 20),
    lambda: mmkv.Budget("fraction", 1e-300),
)
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
# Per call its arguments when nothing is odd.
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
    "messages": {"messages": [_TURN, {"role": "user", "content": [{"type": "text", "text": "a"}]}]},
    "Engine": {**_OPTIONS, "min_pixels": None, "max_pixels": None},
    "generate": {"conversations": [_TURN], "sampling": _SHORT, "budget": 24},
    "session": {"budget": 24},
    "send": {
        "text": "what?",
        "images": [],
        "videos": [],
        "system": None,
        "sampling": _SHORT,
        "fps": None,
        "num_frames": None,
    },
    "send a video": {"videos": ["nowhere.mp4"], "fps": None, "num_frames": None},
    "set_budget": {"budget": 20},
    "save": {"path": "saved.mmkv", "extra": {"a": "b"}},
    "load_session": {"path": "saved.mmkv"},
    "decode": {"token_ids": [3]},
    "prefill": {"input_ids": torch.tensor([[1, 2, 3]])},
}


# Those that need no model.
_LIGHT = ("Sampling", "Budget", "Budget.of", "EngineConfig", "messages")


@st.composite
def _calls(draw: st.DrawFn, light: bool) -> tuple[str, dict[str, Any]]:
    """Draw a call, one or two of its arguments replaced."""
    call = draw(st.sampled_from(sorted(one for one in _CALLS if (one in _LIGHT) == light)))
    arguments = dict(_CALLS[call])
    names = st.lists(st.sampled_from(sorted(arguments)), min_size=1, max_size=2, unique=True)
    for name in draw(names):
        odd = st.sampled_from(_OBJECTS).map(lambda make: make()) | values
        if isinstance(arguments[name], (list, dict)):
            odd |= edited(arguments[name])
        elif isinstance(arguments[name], str):
            odd |= texts
        arguments[name] = draw(odd)
    return call, arguments


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen3_vl(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(model: Path) -> mmkv.Engine:
    return mmkv.Engine.from_pretrained(model, budget=24, page_size=4)


@examples(80)
@given(call=_calls(light=True))
def test_odd_settings_and_messages(call: tuple[str, dict[str, Any]]) -> None:
    name, arguments = call
    with trial():
        if name == "Budget":
            mmkv.Budget.of(mmkv.Budget(**arguments))
        elif name == "Budget.of":
            mmkv.Budget.of(**arguments)
        elif name == "messages":
            take_media(**arguments)
        else:
            getattr(mmkv, name)(**arguments)


@pytest.mark.usefixtures("loaded_once")
@examples(50)
@given(call=_calls(light=False))
def test_odd_arguments_of_any_call(
    model: Path, engine: mmkv.Engine, call: tuple[str, dict[str, Any]]
) -> None:
    name, arguments = call
    with trial(engine):
        if name == "Engine":
            made = mmkv.Engine.from_pretrained(model, **arguments)
            made.generate([_TURN], _SHORT)
            check_pages(made)
        elif name == "generate":
            engine.generate(**arguments)
        elif name == "session":
            engine.session(**arguments).close()
        elif name == "load_session":
            engine.load_session(**arguments)[0].close()
        else:
            _in_session(engine, name, arguments)


def _in_session(engine: mmkv.Engine, name: str, arguments: dict[str, Any]) -> None:
    with engine.session() as session:
        if name in ("send", "send a video"):
            "".join(session.send(**{"text": "what?"} | arguments))
            return
        "".join(session.send("what?", sampling=_SHORT))
        if name == "decode":
            engine.decode([session], **arguments)
        elif name == "prefill":
            session.prefill(arguments)
        else:
            getattr(session, name)(**arguments)


# Something raises at one call of one request; another one beside it is answered as alone.


class Panic(BaseException):
    """As the PanicException of libraries in Rust: no Exception."""


_RAISED: tuple[BaseException, ...] = (
    Panic("a library gave up\nat line 2"),
    ValueError("wrong"),
    RuntimeError("wrong"),
    MemoryError(),
    RecursionError("too deep"),
    BaseException(),
    AssertionError(),
)
_PLACES: dict[str, tuple[Any, str]] = {
    "tokenizer": (special, "require_no_long_run"),
    "template": (sandbox, "render"),
    "decoding of text": (Detokenizer, "push"),
    "choice": (ReplyWriter, "choose"),
    "end": (ReplyWriter, "put"),
}


@pytest.fixture(scope="module")
def text_engine(tmp_path_factory: pytest.TempPathFactory) -> mmkv.Engine:
    model = save_llama(tmp_path_factory.mktemp("text"))
    options: dict[str, Any] = {"policy": "streamingllm", "budget": 24, "page_size": 4}
    return mmkv.Engine.from_pretrained(model, **options, prefill_chunk=16)


@examples(12)
@given(
    place=st.sampled_from(sorted(_PLACES)),
    raised=st.sampled_from(_RAISED),
    at=st.integers(0, 5),
    ahead=st.booleans(),
)
def test_an_error_of_a_library_in_one_request(
    text_engine: mmkv.Engine, place: str, raised: BaseException, at: int, ahead: bool
) -> None:
    (owner, name), jobs, calls = _PLACES[place], dict[str, ReplyJob](), [0]
    real = getattr(owner, name)

    def changed(*given: Any, **named: Any) -> Any:
        # Who asks is known by the text in the prompt, and later by its writer.
        writer = jobs["stop me"].writer if "stop me" in jobs else None
        if place in ("tokenizer", "template"):
            if "stop me" in repr(given[:3]):
                raise raised
        elif writer is not None and given[0] in (writer, getattr(writer, "_detokenizer", None)):
            calls[0] += 1
            if calls[0] > at:
                raise raised
        return real(*given, **named)

    with trial(text_engine):
        alone = _answers(text_engine, ["other"], {})["other"]
        with mock.patch.object(owner, name, changed):
            texts = ["stop me", "other"] if ahead else ["other", "stop me"]
            found = _answers(text_engine, texts, jobs)
        if found["other"] != alone:
            raise Wrong(f"the other reply is {found['other']!r}, alone {alone!r}")
        error = found["stop me"]
        if isinstance(error, BaseException) and not isinstance(error, Exception):
            raise Wrong(f"a {type(error).__name__} is no Exception")
        if isinstance(error, ForeignError) and not str(error).strip():
            raise Wrong("an error without a word")


def _answers(engine: mmkv.Engine, texts: list[str], jobs: dict[str, ReplyJob]) -> dict[str, Any]:
    """Return per text the reply or the error; the jobs that run are put into ``jobs``."""
    scheduler = Scheduler(EngineExecutor(engine), Limits(quantum=16))
    sampling = Sampling(max_new_tokens=5)
    jobs |= {text: ReplyJob(engine, message(text), sampling) for text in texts}
    try:
        tickets = {text: scheduler.submit(jobs[text], text) for text in texts}
        while scheduler.turn():
            pass
        return {
            text: ticket.error
            if (reply := jobs[text].reply) is None
            else ticket.error or reply.text
            for text, ticket in tickets.items()
        }
    finally:
        scheduler.close()


# A retained model's weights are changed between two calls: that is followed, or refused.


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoModelForCausalLM

    folder = save_llama(tmp_path_factory.mktemp("retained"))
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@examples(5)
@given(
    changes=st.lists(
        st.tuples(st.sampled_from(sorted(CHANGES)), st.integers(0, 2**31 - 1)),
        min_size=1,
        max_size=3,
    ),
    copied=st.booleans(),
    cached=st.booleans(),
)
def test_weights_that_change_under_a_retained_model(
    source: Any, changes: list[tuple[str, int]], copied: bool, cached: bool
) -> None:
    with trial():
        model, ids, cache = copy.deepcopy(source), torch.arange(3, 12)[None], RetainedCache()
        given: dict[str, Any] = {"past_key_values": cache} if cached else {}
        with retain(model, policy="full") as handle:
            said = _said(model.generate, ids, **given)
            for name, seed in changes:
                CHANGES[name](model, seed)
                if copied:
                    twin = copy.deepcopy(model)
                    if not torch.equal(_said(twin.generate, ids), _plainly(twin, ids)):
                        raise Wrong(f"after {name} a copy has other weights than it says")
                try:
                    if not torch.equal(_said(model.generate, ids), _plainly(model, ids)):
                        raise Wrong(f"after {name} the engine runs other weights")
                except MmkvError:
                    continue
            if cached and not torch.equal(_plainly(model, ids), _plainly(source, ids)):
                with pytest.raises(MmkvError):  # read with other weights
                    model.generate(said, max_new_tokens=2, **given)
            cache.close()
            check_pages(handle.engine)
        if "generate" in vars(model):
            raise Wrong("the model is not put back")


def _said(generate: Any, ids: torch.Tensor, **given: Any) -> torch.Tensor:
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    return generate(ids, attention_mask=torch.ones_like(ids), **options, **given)


def _plainly(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """What the model says by itself."""
    return _said(lambda *a, **k: type(model).generate(model, *a, **k), ids)
