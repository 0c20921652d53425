"""A CUDA device that is a CPU: what would fail or wait on a GPU shows where there is none.

:func:`fake_cuda` puts it in torch's place. A tensor on it is an :class:`OnGPU`: it says ``cuda:0``
and holds its data on the CPU. Mixing devices raises as on a GPU; what makes the host wait is
counted, and raises inside a capture. A captured graph is the list of the operations that ran: a
replay runs them again on the same memory, with the numbers of then, and raises where memory that
it reads has been freed since. Triton's launches go to their torch references.

It has no streams, no allocator and no clock, and it says nothing about Triton's own code.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import importlib
import sys
import threading
import types
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

KERNELS = "mmkv.engine.backends.cuda.kernels"
ROOT = Path(__file__).resolve().parents[2]
# Modules of launches, and where their references are.
LAUNCHES = {
    f"{KERNELS}.{path.stem}": f"{KERNELS}.{path.stem.removesuffix('_triton')}"
    for path in (ROOT / "engine" / "backends" / "cuda" / "kernels").glob("*_triton.py")
    if path.with_stem(path.stem.removesuffix("_triton")).exists()
}
# What has no data of its own.
VIEWS = set(
    "view _unsafe_view expand permute transpose t select slice unsqueeze squeeze as_strided detach "
    "alias unbind split split_with_sizes unfold diagonal view_as_real _reshape_alias lift_fresh "
    "chunk narrow".split()
)
EMPTY = set("empty new_empty empty_like empty_strided new_empty_strided".split())
# What waits for the result: its size, or its number, goes to the host.
READS = set(
    "nonzero masked_select _unique2 unique_dim unique_consecutive bincount _local_scalar_dense "
    "equal is_nonzero item".split()
)
# What takes indices from the CPU, too.
INDEXED = set("index index_put index_put_ _index_put_impl_ _unsafe_index _unsafe_index_put".split())
# What takes no number of the CPU's, even without dimensions.
STRICT = set(
    "index_select gather scatter scatter_ mm addmm bmm embedding index_add index_add_ cat stack "
    "scatter_add_ index_copy_ searchsorted masked_scatter".split()
)


class DeviceError(RuntimeError):
    """What a GPU would not do."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """A tensor that a graph reads, without what would keep its memory alive."""

    storage: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        """Return it, where its memory still is."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage)
        if storage is None:
            raise DeviceError("a graph reads memory that has been freed since it was captured")
        empty = torch.empty(0, dtype=self.dtype)
        return empty.set_(storage, self.offset, self.size, self.stride)


class Graph:
    """What ran under :class:`capture`: a list of functions, their arguments and results."""

    def __init__(self) -> None:
        # With the places of what each makes among its results, and whether it reads a Piece.
        self.steps: list[tuple[Callable[..., Any], Any, Any, dict[int, Tensor], bool]] = []
        self.own: dict[int, Tensor] = {}  # memory that the graph itself has made
        self.pieces = 0

    def add(self, function: Callable[..., Any], args: Any, kwargs: Any, made: Any) -> None:
        """Note what has just run on tensors of the card, and what came of it on the CPU."""
        given = {_memory(each) for each in _tensors((args, kwargs))}
        made = enumerate(_tensors(made))
        new = {place: each for place, each in made if _memory(each) not in given}
        for each in new.values():
            self.own[_memory(each)] = each
        before = self.pieces
        args, kwargs = (_mapped(x, OnGPU, self._kept) for x in (args, kwargs))
        self.steps.append((function, args, kwargs, new, self.pieces > before))

    def _kept(self, x: OnGPU) -> Tensor | Piece:
        data = x.data_
        if _memory(data) in self.own or not data.numel():
            return data
        self.pieces += 1
        reference = data.untyped_storage()._weak_ref()
        return Piece(reference, data.dtype, data.shape, data.stride(), data.storage_offset())

    def replay(self) -> None:
        """Run it again."""
        device().replays += 1
        with torch.no_grad(), _quiet():
            for function, args, kwargs, new, outside in self.steps:
                if outside:
                    args, kwargs = (_mapped(x, Piece, Piece.tensor) for x in (args, kwargs))
                made = function(*args, **kwargs)
                if new:
                    again = _tensors(made)
                    for place, before in new.items():
                        before.copy_(again[place])


@dataclasses.dataclass
class Device:
    """The card, and what has happened on it.

    Attributes:
        reads: how often the host waited for a result, by what and where; uploads: how often it
            sent something; launches: kernels outside of replays, by name; replays: of all graphs;
            captured: graphs.
    """

    capability: tuple[int, int] = (9, 0)
    memory: int = 80 * 2**30
    reads: Counter[str] = dataclasses.field(default_factory=Counter)
    uploads: Counter[str] = dataclasses.field(default_factory=Counter)
    launches: Counter[str] = dataclasses.field(default_factory=Counter)
    replays: int = 0
    captured: int = 0
    graph: Graph | None = None
    thread: int = 0
    mode: str = "global"

    @property
    def capturing(self) -> bool:
        """Whether this thread captures a graph."""
        return self.graph is not None and self.thread == threading.get_ident()

    def read(self, what: str, upload: bool = False) -> None:
        """Have the host wait, or send something."""
        (self.uploads if upload else self.reads)[f"{what} at {_site()}"] += 1
        if self.graph is not None and (self.capturing or self.mode == "global"):
            raise DeviceError(
                f"operation not permitted when stream is capturing: {what}, {_site()}"
            )


_device: list[Device] = []


def device() -> Device:
    """Return the card of the test that runs."""
    return _device[-1]


def _site() -> str:
    """Return the lines of the repository, outside this file, that led here."""
    found, frame = [], sys._getframe(1)
    while frame is not None and len(found) < 3:
        name = frame.f_code.co_filename
        if name.startswith(str(ROOT)) and name != __file__ and ".venv" not in name:
            found.append(f"{Path(name).relative_to(ROOT)}:{frame.f_lineno}")
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(found)


class OnGPU(torch.Tensor):
    """A tensor on the fake device; ``data_`` is the CPU's."""

    data_: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, data: Tensor) -> OnGPU:
        """Wrap a tensor of the CPU, whose memory it shares."""
        with torch.inference_mode(False):  # views of what is made under it fail in wrappers
            made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
                cls,
                data.size(),
                strides=data.stride(),
                storage_offset=data.storage_offset(),
                dtype=data.dtype,
                layout=data.layout,
                device=torch.device("cpu"),
                requires_grad=False,
            )
        made.data_ = data
        return made  # type: ignore[no-any-return]

    device = property(lambda self: torch.device("cuda", 0))  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]

    def __repr__(self, **_: Any) -> str:
        return f"OnGPU({self.data_!r})"

    def get_device(self) -> int:
        """Return the index of the card."""
        return 0

    @classmethod
    def __torch_dispatch__(cls, func: Any, types_: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, args, kwargs or {})


def _wrap(x: Any) -> Any:
    return OnGPU(x) if isinstance(x, Tensor) and not isinstance(x, OnGPU) else x


def _unwrap(x: Any) -> Any:
    return x.data_ if isinstance(x, OnGPU) else x


def _memory(x: Tensor) -> int:
    return _unwrap(x).untyped_storage()._cdata  # type: ignore[no-any-return]


def _tensors(x: Any) -> list[Tensor]:
    """Return the tensors of a nest of containers, and of mmkv's own objects."""
    if isinstance(x, Tensor):
        return [x]
    if isinstance(x, (tuple, list)):
        return [each for one in x for each in _tensors(one)]
    if isinstance(x, dict):
        return [each for one in x.values() for each in _tensors(one)]
    return [each for one in _fields(x).values() for each in _tensors(one)]


def _fields(x: Any) -> dict[str, Any]:
    """Return what an object of the engine holds of tensors, and of objects with tensors."""
    if not type(x).__module__.startswith("mmkv.") or isinstance(x, type):
        return {}
    return {
        name: value
        for name, value in getattr(x, "__dict__", {}).items()
        if isinstance(value, (Tensor, Piece))
        or (dataclasses.is_dataclass(value) and not isinstance(value, type) and _fields(value))
    }


def _mapped(x: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Return a nest with all of a kind changed; objects that hold them are copied."""
    if isinstance(x, kind):
        return change(x)
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return type(x)(*(_mapped(each, kind, change) for each in x))
    if isinstance(x, (tuple, list)):
        return type(x)(_mapped(each, kind, change) for each in x)
    if isinstance(x, dict):
        return {name: _mapped(each, kind, change) for name, each in x.items()}
    found = _fields(x)
    if not found:
        return x
    made = copy.copy(x)
    for name, value in found.items():
        object.__setattr__(made, name, _mapped(value, kind, change))
    return made


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Run on the CPU's tensors, where nothing is looked at."""
    with torch._C.DisableTorchFunctionSubclass(), torch._C._DisableTorchDispatch():
        yield


def _inside(x: Any) -> list[Any]:
    """Return what tuples, lists and dicts hold. Torch's own functions take far longer for it."""
    if isinstance(x, (tuple, list)):
        return [each for one in x for each in _inside(one)]
    if isinstance(x, dict):
        return [each for one in x.values() for each in _inside(one)]
    return [x]


def _changed(x: Any, change: Callable[[Any], Any]) -> Any:
    """Change what tuples, lists and dicts hold."""
    if isinstance(x, (tuple, list)):
        return (tuple if isinstance(x, tuple) else list)(_changed(each, change) for each in x)
    if isinstance(x, dict):
        return {name: _changed(each, change) for name, each in x.items()}
    return change(x)


@functools.cache
def _composite(func: Any) -> bool:
    """Return whether an operation is made of others, which inference mode hands on whole."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key))


def _dispatch(func: Any, args: Any, kwargs: Any) -> Any:
    name = func._schema.name.split("::")[1]
    if _composite(func) and name not in ("item", "is_nonzero"):
        made = func.decompose(*args, **kwargs)
        if made is not NotImplemented:
            return made
    flat = _inside((args, kwargs))
    ours = [x for x in flat if isinstance(x, OnGPU)]
    theirs = [x for x in flat if isinstance(x, Tensor) and not isinstance(x, OnGPU)]
    _check(name, args, kwargs, ours, theirs)
    if kwargs.get("device") is not None:  # in C++ a wrapper is on the CPU; moves are :meth:`_moved`
        kwargs = kwargs | {"device": torch.device("cpu")}
    if kwargs.get("pin_memory"):
        kwargs = kwargs | {"pin_memory": False}
    run = _FUSED.get(name, func)
    made = run(*_changed(args, _unwrap), **_changed(kwargs, _unwrap))
    card = device()
    base = name.rstrip("_")
    if base not in VIEWS and name not in EMPTY | READS:
        card.launches[name] += 1
    if card.capturing and card.graph is not None and base not in VIEWS:
        card.graph.add(run, args, kwargs, made)
    if name in ("_local_scalar_dense", "item", "is_nonzero") or not (ours or "device" in kwargs):
        return made
    back = {id(x.data_): x for x in ours}

    def wrapped(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return back.get(id(x)) if id(x) in back else OnGPU(x)

    return _changed(made, wrapped)


def _check(name: str, args: Any, kwargs: Any, ours: list[Any], theirs: list[Any]) -> None:
    """Raise what a GPU would raise, and count what it would make the host wait for."""
    if name == "copy_":
        if isinstance(args[0], OnGPU) != isinstance(args[1], OnGPU):
            device().read("copy_", upload=isinstance(args[0], OnGPU))
        return
    if name == "_to_copy":  # of C++, for which a wrapper is on the CPU
        return
    sized = [x for x in theirs if x.dim()]
    if ours and sized and name in INDEXED and isinstance(args[0], OnGPU):
        values = args[2] if len(args) > 2 else None
        if not any(values is x for x in sized):
            device().read(f"{name} with an index of the CPU's", upload=True)
            sized = []
    if ours and (sized or (theirs and name in STRICT)):
        shapes = [tuple(x.shape) for x in sized or theirs]
        raise DeviceError(
            "Expected all tensors to be on the same device: "
            f"{name} takes {shapes} from the CPU, {_site()}"
        )
    masks = args[1] if name in INDEXED and len(args) > 1 else ()
    if any(isinstance(x, OnGPU) and x.dtype in (torch.bool, torch.uint8) for x in masks or ()):
        device().read(f"{name} by a mask")
    sizes = name == "repeat_interleave" and kwargs.get("output_size") is None
    if ours and (name in READS or sizes):
        device().read(name)


def _check_flash(q: Tensor) -> None:
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise DeviceError("flash attention takes half precision only")
    if q.shape[-1] % 8 or q.shape[-1] > 256:
        raise DeviceError(f"flash attention takes no head_dim of {q.shape[-1]}")


def _flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout: float = 0.0,
    causal: bool = False,
    debug: bool = False,
    *,
    scale: float,
) -> Any:
    _check_flash(q)
    out, lse = _attention(q, k, v, None, causal, scale)
    return out, lse, None, None, q.shape[2], k.shape[2], None, None, None


def _flash_parts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    starts_k: Tensor,
    longest: int,
    longest_k: int,
    dropout: float,
    causal: bool,
    debug: bool,
    *,
    scale: float,
) -> Any:
    """Attend inside parts ``[T, H, D]`` from one of ``starts`` to the next."""
    _check_flash(q)
    lengths = starts.diff().tolist()
    if max(lengths) > longest or starts.dtype != torch.int32:
        raise DeviceError(f"flash attention was told of parts of {longest}, not of {lengths}")
    parts = zip(*(x.transpose(0, 1).split(lengths, 1) for x in (q, k, v)), strict=True)
    made = [_attention(*(x[None] for x in part), None, causal, scale)[0][0] for part in parts]
    return torch.cat(made, 1).transpose(0, 1).contiguous(), *[None] * 4


def _efficient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    lse: bool,
    dropout: float = 0.0,
    causal: bool = False,
    *,
    scale: float,
) -> Any:
    if q.shape[-1] % (4 if q.dtype == torch.float32 else 8):
        raise DeviceError(f"efficient attention takes no head_dim of {q.shape[-1]}")
    out, sums = _attention(q, k, v, bias, causal, scale)
    rest = -sums.shape[-1] % 32
    return out, torch.nn.functional.pad(sums, (0, rest), value=float("inf")), None, None


def _attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    scores = (q.float() @ k.float().mT) * scale
    if bias is not None:
        scores = scores + bias
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
    out = scores.softmax(-1).to(q.dtype) @ v
    return out.transpose(1, 2).contiguous().transpose(1, 2), scores.logsumexp(-1)


_FUSED = {
    "_flash_attention_forward": _flash_parts,
    "_scaled_dot_product_flash_attention": _flash,
    "_scaled_dot_product_efficient_attention": _efficient,
}


def _on_cuda(given: Any) -> bool:
    try:
        return given is not None and torch.device(given).type == "cuda"
    except (RuntimeError, TypeError):
        return False


class _Functions(TorchFunctionMode):
    """What torch does before it dispatches: making tensors, moving them, reading numbers."""

    def __torch_function__(self, func: Any, types_: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__":  # sizes and dtypes, half of all calls
            return func(*args)
        kwargs = dict(kwargs) if kwargs else {}
        first = args[0] if args else None
        ours = isinstance(first, OnGPU)
        if not ours and "device" not in kwargs and name not in _OF_ANY:  # most of the others
            return func(*args, **kwargs)
        if name in ("to", "cpu", "cuda") and isinstance(first, Tensor):
            moved = self._moved(name, first, list(args[1:]), kwargs)
            if moved is not None:
                return moved
        if name == "is_pinned":
            return False
        if name == "pin_memory":
            return first
        if ours and name in _READERS:
            device().read(name)
            return getattr(first.data_, name)(*_changed(args[1:], _unwrap))
        if ours and name in ("numpy", "__array__"):
            raise TypeError(f"can't convert cuda:0 device type tensor to numpy, {_site()}")
        if ours and name in ("untyped_storage", "data_ptr"):
            return getattr(first.data_, name)()
        if ours and name == "new_tensor":
            device().read(name, upload=True)
            return OnGPU(first.data_.new_tensor(*args[1:], **kwargs))
        if name in ("tensor", "as_tensor") and ours:
            return first.to(kwargs["dtype"]) if kwargs.get("dtype") else first
        if not _on_cuda(kwargs.get("device")):
            return func(*args, **kwargs)
        kwargs["device"] = "cpu"
        given = _inside((args, kwargs))
        if any(isinstance(x, OnGPU) for x in given):
            del kwargs["device"]
            return _changed(func(*args, **kwargs), _wrap)
        card = device()
        if name in ("tensor", "as_tensor"):
            card.read(name, upload=True)
        made = func(*args, **kwargs)
        if name not in EMPTY:
            card.launches[name] += 1
        if card.capturing and card.graph is not None and isinstance(made, Tensor):
            card.graph.add(func, args, kwargs, made)
        return _changed(made, _wrap)

    def _moved(self, name: str, x: Tensor, rest: list[Any], kwargs: Any) -> Tensor | None:
        """Return the tensor on another device, or None where torch's own way is right."""
        target, dtype = kwargs.get("device"), kwargs.get("dtype")
        for each in rest:
            if isinstance(each, Tensor):
                target, dtype = each.device, each.dtype
            elif isinstance(each, torch.dtype):
                dtype = each
            elif isinstance(each, (str, torch.device)):
                target = each
            elif isinstance(each, int) and not isinstance(each, bool):
                target = torch.device("cuda", each)
        target = {"cpu": "cpu", "cuda": "cuda"}.get(name, target)
        if target is None:
            return None
        ours = isinstance(x, OnGPU)
        if _on_cuda(target) == ours:
            if not ours:
                return None
            return x if dtype in (None, x.dtype) else torch.ops.aten._to_copy(x, dtype=dtype)
        device().read("to", upload=not ours)
        inner = x.data_ if isinstance(x, OnGPU) else x.detach()
        made = inner.clone() if dtype is None else inner.to(dtype, copy=True)
        if ours:
            return made
        return OnGPU(made).requires_grad_(x.requires_grad)


_OF_ANY = {"to", "cpu", "cuda", "is_pinned", "pin_memory"}  # looked at wherever a tensor is
_READERS = {
    "tolist",
    "__int__",
    "__bool__",
    "__float__",
    "__index__",
    "__complex__",
    "item",
    "__contains__",
}


class _Capture:
    """As ``torch.cuda.graph``."""

    def __init__(
        self, graph: Graph, pool: Any = None, stream: Any = None, capture_error_mode: str = "global"
    ) -> None:
        self.graph, self.mode = graph, capture_error_mode

    def __enter__(self) -> None:
        card = device()
        card.graph, card.thread, card.mode = self.graph, threading.get_ident(), self.mode
        card.captured += 1

    def __exit__(self, *_: Any) -> None:
        device().graph = None


class _Generator(torch.Generator):
    """One of the CPU's, wherever it is asked for."""

    def __new__(cls, device: Any = None) -> _Generator:
        return super().__new__(cls)


class _Stream:
    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: Any) -> None:
        pass


def _launches(reference: types.ModuleType) -> types.ModuleType:
    """Return a module whose launch functions are the references, and see their arguments."""
    made = types.ModuleType(f"{reference.__name__}_triton")

    def launch(name: str, *args: Any, **kwargs: Any) -> Any:
        card = device()
        card.launches[name] += 1
        given = [x for x in _tensors((args, kwargs)) if x.dim()]
        mixed = [tuple(x.shape) for x in given if not isinstance(x, OnGPU)]
        if mixed:
            raise DeviceError(
                f"Pointer argument cannot be accessed from Triton (cpu tensor?): {name} takes "
                f"{mixed} from the CPU, {_site()}"
            )
        back = {id(x.data_): x for x in given if isinstance(x, OnGPU)}
        inner, named = (_mapped(x, OnGPU, _unwrap) for x in (args, kwargs))
        run = getattr(reference, f"{name}_reference")
        with _quiet():
            result = run(*inner, **named)
            if card.capturing and card.graph is not None:
                card.graph.add(run, args, kwargs, result)
        return _mapped(result, Tensor, lambda x: back.get(id(x)) if id(x) in back else OnGPU(x))

    for name in vars(reference):
        if name.endswith("_reference"):
            short = name.removesuffix("_reference")
            setattr(made, short, functools.partial(launch, short))
    return made


@contextlib.contextmanager
def fake_cuda(capability: tuple[int, int] = (9, 0)) -> Iterator[Device]:
    """Have torch say that it has a GPU; see the module's docstring."""
    card = Device(capability)
    properties = types.SimpleNamespace(
        multi_processor_count=132,
        total_memory=card.memory,
        name="Fake H100",
        major=capability[0],
        minor=capability[1],
        gcnArchName="",
        L2_cache_size=50 * 2**20,
    )
    constants: dict[str, Any] = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_properties": properties,
        "get_device_capability": capability,
        "get_device_name": properties.name,
        "mem_get_info": (card.memory - 2**30, card.memory),
        "memory_reserved": 0,
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        "max_memory_reserved": 0,
        "reset_peak_memory_stats": None,
        "empty_cache": None,
        "graph_pool_handle": (0, 1),
        "set_device": None,
        "is_bf16_supported": True,
        "manual_seed": None,
        "manual_seed_all": None,
        "is_initialized": True,
        "_lazy_init": None,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in constants.items():
            patch.setattr(torch.cuda, name, lambda *_, _value=value, **__: _value)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: card.capturing)
        patch.setattr(torch.cuda, "synchronize", lambda *_: card.read("synchronize"))
        patch.setattr(torch.cuda.random, "get_rng_state", torch.get_rng_state)
        patch.setattr(torch, "Generator", _Generator)
        patch.setattr(torch.cuda, "Stream", _Stream)
        for name in ("current_stream", "default_stream", "stream"):
            patch.setattr(torch.cuda, name, lambda *_, **__: _Stream())
        patch.setattr(torch.cuda, "device", lambda *_: contextlib.nullcontext())
        patch.setattr(torch.cuda, "CUDAGraph", Graph)
        patch.setattr(torch.cuda, "graph", _Capture)
        for name, reference in LAUNCHES.items():
            made, (package, _, short) = (
                _launches(importlib.import_module(reference)),
                name.rpartition("."),
            )
            patch.setitem(sys.modules, name, made)
            patch.setattr(importlib.import_module(package), short, made, raising=False)
        available = importlib.import_module(f"{KERNELS}.available")
        patch.setattr(available, "triton_installed", lambda: True)
        patch.setattr(
            "mmkv.engine.backends.cuda.backend.triton_installed", available.triton_installed
        )
        run_backward = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

        def backward(*args: Any, **kwargs: Any) -> Any:
            with _Functions():  # torch has switched them off
                return run_backward(*args, **kwargs)

        patch.setattr(torch.autograd, "_engine_run_backward", backward)
        begin = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

        def under_functions(thread: threading.Thread) -> None:
            with _Functions():
                begin(thread)

        patch.setattr(threading.Thread, "_bootstrap_inner", under_functions)
        torch._C._ensureCUDADeviceGuardSet()
        overwrite = torch.__future__.get_overwrite_module_params_on_conversion()
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        _device.append(card)
        try:
            with _Functions():
                yield card
        finally:
            _device.pop()
            torch.__future__.set_overwrite_module_params_on_conversion(overwrite)
