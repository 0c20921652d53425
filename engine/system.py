"""The machine: its memory, the current GPU, and how exactly it multiplies.

Free memory is measured so that what cannot fit is refused and not killed, and freed heap is given
back.
"""

from __future__ import annotations

import ctypes
import functools
import resource
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mmkv.engine.errors import ModelError

_MEMINFO, _STATM = Path("/proc/meminfo"), Path("/proc/self/statm")
_CGROUP = Path("/sys/fs/cgroup")

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of <malloc.h>

# A prompt's chunk of so many tokens leaves tens of MiB on the heap.
MANY_TOKENS = 1024


def give_back() -> None:
    """Return what the heap holds and nobody uses to the system, where C's library is glibc.

    It keeps freed memory for the next allocation. After a model was loaded or a large chunk was
    read there is more of it than decode steps ask for. It takes milliseconds.
    """
    trim = _trim()
    if trim is not None:
        trim(0)


def keep_freed() -> None:
    """Have the heap keep up to 64 MiB that nobody uses, where C's library is glibc.

    By itself it gives memory back whenever a layer of a prompt is done, and the kernel clears the
    pages anew for the next one.
    """
    if _trim() is not None:
        for name, size in ((_M_MMAP_THRESHOLD, 2**25), (_M_TRIM_THRESHOLD, 2**26)):
            ctypes.CDLL(None).mallopt(name, size)


@functools.cache
def _trim() -> Callable[[int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    found: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return found


def resident_bytes() -> int | None:
    """Return the bytes of this process that are in memory, None where nothing tells."""
    try:
        return int(_STATM.read_text().split()[1]) * resource.getpagesize()
    except (OSError, ValueError):
        return None


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes that can still be allocated on ``device``, None where nothing tells.

    Files that are mapped for good are no free memory, though the system would take their pages.

    On a GPU, what torch holds for its next tensors is free, too. On a CPU: what the kernel would
    give without swapping, within the limits of this process and its control group.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + held
    whole = [found for found in (_available(), _in_group()) if found is not None]
    known = [max(0, found - sum(_mapped.values())) for found in whole]
    below = _below_limit()
    return min(known if below is None else [*known, below], default=None)


_mapped: dict[int, int] = {}


def count_mapped(owner: object, size: int) -> None:
    """Count a file that every step reads as memory in use, as long as ``owner`` maps it."""
    _mapped[id(owner)] = size
    weakref.finalize(owner, _mapped.pop, id(owner), None)


def _available() -> int | None:
    try:
        for line in _MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        return None
    return None


def _below_limit() -> int | None:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    try:
        return max(0, limit - int(_STATM.read_text().split()[0]) * resource.getpagesize())
    except (OSError, ValueError):
        return None


def _in_group() -> int | None:
    try:
        most = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
        lines = (line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        stat = {name: int(value) for name, value in lines}
        # Files that were read count as used, and go when their memory is wanted.
        files = stat.get("inactive_file", 0) + stat.get("active_file", 0)
        return max(0, most - max(0, used - files))
    except (OSError, ValueError):  # no control group, or "max"
        return None


LEAST_CAPABILITY = 8, 0  # Ampere: before it there is no bfloat16, and too little shared memory


def require_card(device: torch.device) -> None:
    """Refuse a GPU that mmkv's kernels and torch's flash attention are not for.

    Raises:
        ModelError: it is AMD's, or older than Ampere.
    """
    if device.type != "cuda":
        return
    if torch.version.hip is not None:
        raise ModelError("mmkv does not run on AMD's GPUs; use device='cpu' (--device cpu)")
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        (major, minor), (least, _) = capability, LEAST_CAPABILITY
        raise ModelError(
            f"{torch.cuda.get_device_name(device)} has compute capability {major}.{minor} and mmkv "
            f"needs {least}.0 (Ampere) or more; use device='cpu' (--device cpu)"
        )


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current one; nothing for other devices.

    Triton launches on the current GPU, and torch captures and replays there, wherever the tensors
    are.
    """
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def exact_products(device: torch.device) -> AbstractContextManager[object]:
    """Compute products of float32 in float32, also where the program around has allowed less.

    TF32 (on a GPU) and bfloat16 (on a CPU) keep 8 to 11 bits of a factor. Which products they
    touch depends on the path, so scores would differ between them, and with them what is evicted.
    The setting belongs to the process: for the time of a step it holds for all threads.
    """
    product = _ON_CUDA if device.type == "cuda" else _ON_CPU
    if product.fp32_precision in _WHOLE and not _under_way.steps:
        return _AS_IT_IS
    return _under_way.one_more(product)


# Looked up once: every decode step asks.
_ON_CUDA: Any = torch.backends.cuda.matmul
_ON_CPU: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
_AS_IT_IS = nullcontext()
_WHOLE = ("none", "ieee")


class _UnderWay:
    """The steps that run, of all threads and engines: the last one puts back what was set."""

    def __init__(self) -> None:
        self.steps = 0
        self._lock = threading.Lock()
        self._put_back: list[Callable[[], None]] = []

    @contextmanager
    def one_more(self, product: Any) -> Iterator[None]:
        """Have products exact until the end of this step, and of those that overlap it."""
        with self._lock:
            self.steps += 1
            if product.fp32_precision not in _WHOLE:
                self._put_back.append(_make_exact(product))
        try:
            yield
        finally:
            with self._lock:
                self.steps -= 1
                while not self.steps and self._put_back:
                    self._put_back.pop()()


_under_way = _UnderWay()


def _make_exact(product: Any) -> Callable[[], None]:
    """Make the products of a kind of device exact; what puts back the setting there was."""
    reduced = product.fp32_precision
    try:
        whole = torch.get_float32_matmul_precision()
    except RuntimeError:  # set for this backend alone, which torch does not let one read here
        whole = ""
    if whole not in ("", "highest"):
        torch.set_float32_matmul_precision("highest")
        return partial(torch.set_float32_matmul_precision, whole)
    product.fp32_precision = "ieee"
    return partial(setattr, product, "fp32_precision", reduced)
