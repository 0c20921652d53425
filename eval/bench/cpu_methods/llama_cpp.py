"""llama.cpp, which needs no torch."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmkv.eval.bench.cpu_methods.base import SAMPLE, Job, Method, Prompts


class LlamaCpp(Method):
    """llama.cpp through llama-cpp-python's C interface, with its default settings."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        import numpy

        self.numpy = numpy
        self.api: Any = importlib.import_module("llama_cpp")
        self.api.llama_backend_init()
        settings = self.api.llama_model_default_params()
        settings.n_gpu_layers = 0
        self.model = self.api.llama_model_load_from_file(job.gguf.encode(), settings)
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {job.gguf}")
        self.vocab = self.api.llama_vocab_n_tokens(self.api.llama_model_get_vocab(self.model))
        self.context: Any = None
        self.batch: Any = None
        self.sizes: list[int] = []
        self.threads = job.threads

    def use(self, threads: int) -> None:
        self.threads = threads
        if self.context:
            self.api.llama_set_n_threads(self.context, threads, threads)

    def forget(self, count: int) -> None:
        if self.context and len(self.sizes) == count:
            self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)
        else:
            self.open(count)
        self.sizes = [0] * count

    def open(self, count: int) -> None:
        """Make a context for ``count`` sequences."""
        if self.context:
            self.api.llama_batch_free(self.batch)
            self.api.llama_free(self.context)
        settings = self.api.llama_context_default_params()
        settings.n_seq_max = count
        settings.n_ctx = count * (self.job.longest if count == 1 else self.job.short)
        settings.n_threads = settings.n_threads_batch = self.threads
        self.context = self.api.llama_init_from_model(self.model, settings)
        if not self.context:
            raise RuntimeError("llama.cpp made no context")
        self.room = int(self.api.llama_n_batch(self.context))
        self.batch = self.api.llama_batch_init(self.room, 0, 1)

    def append(self, prompts: Prompts) -> None:
        entries = [
            (token, self.sizes[seq] + i, seq, i + 1 == len(prompt))
            for seq, prompt in enumerate(prompts)
            for i, token in enumerate(prompt)
        ]
        rows: list[Any] = []
        for start in range(0, len(entries), self.room):
            part = entries[start : start + self.room]
            self.run(part)
            rows += [self.view(i).copy() for i, (_, _, _, last) in enumerate(part) if last]
        for seq, prompt in enumerate(prompts):
            self.sizes[seq] += len(prompt)
        self.last = self.numpy.stack(rows)

    def run(self, entries: Sequence[tuple[int, int, int, bool]]) -> None:
        """Decode one batch of (token, position, sequence, whether its logits are wanted)."""
        batch = self.batch
        batch.n_tokens = len(entries)
        for i, (token, position, seq, wanted) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, seq
        code = self.api.llama_decode(self.context, batch)
        if code:
            raise RuntimeError(f"llama_decode returned {code}")

    def view(self, index: int) -> Any:
        """Return the logits of the ``index``-th entry of the last batch, where they lie."""
        found = self.api.llama_get_logits_ith(self.context, index)
        return self.numpy.ctypeslib.as_array(found, (self.vocab,))

    def before(self) -> None:
        self.kept = (list(self.sizes), self.last)

    def decode(self, steps: int) -> list[list[int]]:
        count = len(self.sizes)
        tokens = [int(t) for t in self.last.argmax(-1)]
        chosen = [tokens]
        for _ in range(steps):
            self.run([(t, self.sizes[seq], seq, True) for seq, t in enumerate(tokens)])
            self.sizes = [size + 1 for size in self.sizes]
            tokens = [int(self.view(i).argmax()) for i in range(count)]
            chosen.append(tokens)
        return chosen

    def after(self) -> None:
        self.sizes, self.last = self.kept
        memory = self.api.llama_get_memory(self.context)
        for seq, size in enumerate(self.sizes):
            self.api.llama_memory_seq_rm(memory, seq, size, -1)

    def logits(self) -> list[float]:
        return [float(value) for value in self.last[0, ::SAMPLE]]

    def about(self) -> dict[str, Any]:
        info = self.api.llama_print_system_info()
        return {
            "llama-cpp-python": self.api.__version__,
            **_ggml(self.api),
            "build": (info or b"").decode().strip(),
        }


def _ggml(api: Any) -> dict[str, str]:
    """Return version and commit of the ggml library that is loaded, where it tells them."""
    found: dict[str, str] = {}
    folder = Path(api.__file__).parent / "lib"
    for name in ("version", "commit"):
        for path in folder.glob("libggml-base.*"):
            function = getattr(ctypes.CDLL(str(path)), f"ggml_{name}", None)
            if function is not None:
                function.restype = ctypes.c_char_p
                found[f"ggml_{name}"] = function().decode()
    return found
