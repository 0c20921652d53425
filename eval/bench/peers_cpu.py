"""Run one method of ``python -m eval.bench_peers_cpu`` in its own process.

``python -m eval.bench.peers_cpu JSON`` loads the model that the job names, prints
``{"ready": ...}`` and then obeys orders, one JSON object a line: hold prompts, read a prompt,
decode steps. So the memory of a process is that of one method, and a peer may need another
interpreter: at its top this file imports nothing but Python's own modules, and llama.cpp's
environment needs no torch.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import json
import os
import sys
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Every how many-th logit is compared between methods.
SAMPLE = 64
Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Job:
    """What a process is started with.

    Attributes:
        method: a name of :data:`METHODS`; weights: their form: bf16, int8, f16 or q8_0.
        model: checkpoint folder; gguf: the same weights as a GGUF file, for llama.cpp.
        threads: of what is timed; preparing: threads of what is not.
        longest: most tokens that one sequence will hold; short: that each of several will.
        budget: entries per layer and KV head of methods that evict; policy, gates, kv: of mmkv.
    """

    method: str
    weights: str
    model: str
    gguf: str
    threads: int
    preparing: int
    longest: int
    short: int
    budget: int
    policy: str
    gates: str | None
    kv: str


class Method(ABC):
    """A model with some sequences in its cache."""

    packages: tuple[str, ...] = ()

    def __init__(self, job: Job) -> None:
        self.job = job
        self.held: list[list[int]] = []

    def hold(self, prompts: Prompts) -> None:
        """Have ``prompts`` in the cache; one that continues what is held reads the rest alone."""
        wanted = [list(prompt) for prompt in prompts]
        starts = [wanted[i][: len(seen)] == seen for i, seen in enumerate(self.held[: len(wanted)])]
        if len(self.held) != len(wanted) or not all(starts) or not self.extends:
            self.forget(len(wanted))
            self.held = [[] for _ in wanted]
        rest = [new[len(seen) :] for new, seen in zip(wanted, self.held, strict=True)]
        if any(rest):
            self.append(rest)
        self.held = wanted

    def read(self, prompt: Sequence[int]) -> None:
        """Read one prompt into an empty cache, logits of its last token included."""
        self.append([prompt])
        self.held = [list(prompt)]

    extends = True

    @abstractmethod
    def use(self, threads: int) -> None:
        """Compute with so many threads from now on."""

    @abstractmethod
    def forget(self, count: int) -> None:
        """Hold ``count`` empty sequences."""

    @abstractmethod
    def append(self, prompts: Prompts) -> None:
        """Append a prompt to every sequence."""

    @abstractmethod
    def decode(self, steps: int) -> list[list[int]]:
        """Append the likeliest token to every sequence, ``steps`` times.

        Returns:
            those of each step, and the ones after the last.
        """

    @abstractmethod
    def before(self) -> None:
        """Prepare :meth:`decode`; not timed."""

    @abstractmethod
    def after(self) -> None:
        """Take back what :meth:`decode` appended; not timed."""

    @abstractmethod
    def logits(self) -> list[float]:
        """Return every 64th logit behind the last prompt that was read."""

    def about(self) -> dict[str, Any]:
        """Return versions and settings."""
        return {name: importlib.metadata.version(name) for name in self.packages}


class Mmkv(Method):
    """mmkv; ``full`` keeps every entry."""

    packages = ("torch",)
    policy = "full"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        import torch

        from engine.config import options
        from engine.runtime import Runtime

        given: dict[str, Any] = {"policy": self.policy or job.policy, "kv": job.kv}
        if not self.policy:
            given |= {"budget": job.budget, "gates": job.gates}
        if "weights" in options():
            given["weights"] = job.weights
        elif job.weights != "bf16":
            raise RuntimeError(f"not available: this version of mmkv has no {job.weights} weights")
        self.torch = torch
        torch.set_num_threads(job.threads)
        self.engine = Runtime.from_pretrained(job.model, device="cpu", **given)
        self.sessions: list[Any] = []
        self.forks: list[Any] = []
        self.last = torch.empty(0)

    def use(self, threads: int) -> None:
        self.torch.set_num_threads(threads)

    def forget(self, count: int) -> None:
        for session in self.sessions:
            session.close()
        self.sessions = [self.engine.session() for _ in range(count)]

    def append(self, prompts: Prompts) -> None:
        rows = [
            session.prefill({"input_ids": self.torch.tensor([prompt])})
            for session, prompt in zip(self.sessions, prompts, strict=True)
        ]
        self.last = self.torch.stack(rows)

    def before(self) -> None:
        self.forks = [session.fork() for session in self.sessions]

    def decode(self, steps: int) -> list[list[int]]:
        chosen = [self.last.argmax(-1).tolist()]
        for _ in range(steps):
            chosen.append(self.engine.decode(self.forks, chosen[-1]).argmax(-1).tolist())
        return chosen

    def after(self) -> None:
        for fork in self.forks:
            fork.close()
        self.forks = []

    def logits(self) -> list[float]:
        return list(self.last[0, ::SAMPLE].tolist())

    def about(self) -> dict[str, Any]:
        path, size = self.engine.decode_path, self.engine.cache.pool.form.name
        return super().about() | {"decode_path": path, "kv": size}


class MmkvBudget(Mmkv):
    """mmkv within the budget."""

    policy = ""

    def about(self) -> dict[str, Any]:
        return super().about() | {"policy": self.engine.policy.name}


class Transformers(Method):
    """transformers' model in bfloat16, stepped without ``generate``, which would cost more."""

    packages: tuple[str, ...] = ("torch", "transformers")
    chunk = 512

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        import torch
        import transformers

        transformers.utils.logging.disable_progress_bar()
        self.torch = torch
        torch.set_num_threads(job.threads)
        kind = transformers.AutoModelForCausalLM
        self.model = kind.from_pretrained(job.model, dtype=torch.bfloat16).eval()
        self.empty = transformers.DynamicCache
        self.cache: Any = None
        self.last = torch.empty(0)

    def use(self, threads: int) -> None:
        self.torch.set_num_threads(threads)

    def forget(self, count: int) -> None:
        self.cache, self.seen = self.empty(), 0

    def append(self, prompts: Prompts) -> None:
        for part in self.torch.tensor(prompts).split(self.chunk, dim=1):
            self.forward(part)

    def forward(self, ids: Any) -> None:
        """Run the model over ``ids [B, n]``."""
        positions = self.torch.arange(self.seen, self.seen + ids.shape[1])[None]
        with self.torch.inference_mode():
            self.last = self.model(
                input_ids=ids,
                position_ids=positions.expand(ids.shape[0], -1),
                past_key_values=self.cache,
                use_cache=True,
                logits_to_keep=1,
            ).logits[:, -1]
        self.seen += ids.shape[1]

    def before(self) -> None:
        self.kept = (self.seen, self.last)

    def decode(self, steps: int) -> list[list[int]]:
        chosen = [self.last.argmax(-1)]
        for _ in range(steps):
            self.forward(chosen[-1][:, None])
            chosen.append(self.last.argmax(-1))
        return [row.tolist() for row in chosen]

    def after(self) -> None:
        appended = self.seen - self.kept[0]
        self.seen, self.last = self.kept
        if appended:
            self.cache.crop(-appended)

    def logits(self) -> list[float]:
        return list(self.last[0, ::SAMPLE].float().tolist())


class Kvpress(Transformers):
    """kvpress with its cheapest press: a prompt is cut to the budget, and again every 16 steps."""

    packages = ("torch", "transformers", "kvpress")
    extends = False
    chunk = 2**31 - 1  # a press wants a prompt whole

    def __init__(self, job: Job) -> None:
        self.presses = importlib.import_module("kvpress")
        super().__init__(job)

    def append(self, prompts: Prompts) -> None:
        share = 1 - self.job.budget / max(self.job.budget, len(prompts[0]))
        with self.presses.KnormPress(compression_ratio=share)(self.model):
            super().append(prompts)

    def before(self) -> None:
        import copy

        super().before()
        self.whole, self.cache = self.cache, copy.deepcopy(self.cache)

    def decode(self, steps: int) -> list[list[int]]:
        press = self.presses.DecodingPress(
            base_press=self.presses.KnormPress(),
            compression_interval=16,
            target_size=self.job.budget,
        )
        with press(self.model):
            return super().decode(steps)

    def after(self) -> None:
        (self.seen, self.last), self.cache = self.kept, self.whole


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


METHODS: dict[str, type[Method]] = {
    "mmkv full": Mmkv,
    "mmkv budget": MmkvBudget,
    "transformers": Transformers,
    "kvpress": Kvpress,
    "llama.cpp": LlamaCpp,
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


def memory() -> dict[str, int | None]:
    """Return bytes of this process: resident now and at most, and its share of what it shares."""
    found: dict[str, int | None] = {"rss": None, "peak_rss": None, "pss": None}
    for path, names in (
        ("/proc/self/status", {"VmRSS": "rss", "VmHWM": "peak_rss"}),
        ("/proc/self/smaps_rollup", {"Pss": "pss"}),
    ):
        try:
            lines = Path(path).read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            name, _, rest = line.partition(":")
            if name in names:
                found[names[name]] = int(rest.split()[0]) * 1024
    return found


def timed(call: Callable[[], Any]) -> tuple[dict[str, float], Any]:
    """Run ``call``: its seconds on the clock and of all threads of this process, and its result."""
    wall, cpu = time.perf_counter(), time.process_time()
    made = call()
    return {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall}, made


def obey(method: Method, order: dict[str, Any]) -> dict[str, Any]:
    """Do what one line asks for.

    ``{"hold": prompts}`` and then ``{"decode": steps}``, or ``{"read": prompt}``.
    """
    if "hold" in order:
        method.use(method.job.preparing)
        method.hold(order["hold"])
        method.use(method.job.threads)
        return {"logits": method.logits()}
    if "read" in order:
        method.forget(1)
        took, _ = timed(lambda: method.read(order["read"]))
        return {**took, "logits": method.logits()}
    method.before()
    took, chosen = timed(lambda: method.decode(order["decode"]))
    method.after()
    return {**took, "tokens": [row[0] for row in chosen]}


def serve(job: Job, say: Callable[[dict[str, Any]], None]) -> None:
    """Load the model, then obey every line of stdin; every answer says the memory."""
    method = METHODS[job.method](job)
    say({"ready": True, "versions": method.about(), "memory": memory()})
    for line in sys.stdin:
        answer = obey(method, json.loads(line))
        say({**answer, "memory": memory()})


def answering(work: Callable[[Callable[[dict[str, Any]], None]], None]) -> int:
    """Run ``work`` with what writes its answers to stdout, a JSON object a line.

    An error is an answer, too, in one line. Returns the exit code.
    """
    # Libraries print: only our own lines may reach the real stdout.
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)

        def say(answer: dict[str, Any]) -> None:
            answers.write(json.dumps(answer) + "\n")
            answers.flush()

        try:
            work(say)
        except BaseException as error:
            traceback.print_exc()
            first = (str(error).strip().splitlines() or [""])[0]
            say({"failed": f"{type(error).__name__}: {first}"[:240]})
            return 1
    return 0


def main(arguments: list[str]) -> int:
    """Run one job."""
    return answering(lambda say: serve(Job(**json.loads(arguments[0])), say))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
