"""The methods that :mod:`benchmarks.bench.peers_cpu` compares, each in a process of its own.

``python -m benchmarks.bench.cpu_methods JSON`` loads the model that the job names and obeys orders:
hold prompts, read a prompt, decode steps. So the memory of a process is that of one method, and a
peer may need another interpreter: at its top this module imports none of the packages.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import json
import os
import statistics
import sys
import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.bench.child import Method, decoding_press, serve, timed

os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Every how many-th logit is compared between methods.
SAMPLE = 64
Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class CpuPeerJob:
    """What a process is started with.

    Attributes:
        method: a name of :data:`METHODS`; weights: their form, as the method calls it.
        model: checkpoint folder; files: the same weights as a GGUF file, for llama.cpp, or as a
            folder of OpenVINO's.
        threads: of what is timed; preparing: threads of what is not.
        longest: most tokens that one sequence will hold; short: that each of several will.
        budget: entries per layer and KV head of methods that evict; policy, gates, kv: of mmkv.
    """

    method: str
    weights: str
    model: str
    files: str
    threads: int
    preparing: int
    longest: int
    short: int
    budget: int
    policy: str
    gates: str | None
    kv: str


# CPU seconds after which a run counts though it is the first of its kind.
LONG = 2.0
# What is asked of a picture; the tags are those of the family of Qwen-VL.
QUESTION = "what is this?"
# Frames of a video per second.
FPS = 2.0


def pictures(seed: int, side: int, frames: int) -> Any:
    """Draw a picture, or ``frames`` of a video: uint8 ``[n, side, side, 3]``."""
    numpy: Any = importlib.import_module("numpy")
    shape = (max(1, frames), side, side, 3)
    return numpy.random.default_rng(seed).integers(0, 256, shape, dtype=numpy.uint8)


class CachedModel(Method):
    """A model with some sequences in its cache."""

    def __init__(self, job: CpuPeerJob) -> None:
        self.job = job
        self.held: list[list[int]] = []
        self.loading: dict[str, dict[str, float]] = {}

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
    # Imported before the weights are loaded, so that loading is timed without them.
    imported: tuple[str, ...] = ()

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

    def see(self, frames: Any, moving: bool) -> None:
        """Read a picture, or a video's frames, and a few words into an empty cache.

        Args:
            frames: uint8 ``[1 or n, height, width, 3]``; moving: they are a video.
        """
        raise NotImplementedError

    def obey(self, order: dict[str, Any]) -> dict[str, Any]:
        """Do what an order asks for.

        ``{"hold": prompts}`` and then ``{"decode": steps}``; ``{"read": prompt}``; ``{"see": seed,
        "side": pixels, "frames": n}``, 0 frames for a picture; ``{"loaded": "all"}``, how long
        loading took, or ``"text"``, what a prompt without pictures waits for. With ``"repeats"``,
        the same so often, of which the median is given; once if it takes longer than :data:`LONG`,
        else once more beforehand. With ``"cold"`` the CPU time is that of the process since its
        start.
        """
        if "loaded" in order:
            return dict(self.loading.get(order["loaded"]) or self.loading["all"])
        if "hold" in order:
            self.use(self.job.preparing)
            self.hold(order["hold"])
            self.use(self.job.threads)
            return {"logits": self.logits()}
        if order.get("frames") is not None and type(self).see is CachedModel.see:
            return {"unavailable": "no pictures in this form"}
        if "cold" in order:
            found = self.once(order)
            return found | {"cpu": time.process_time()}
        found = self.once(order)
        if "repeats" not in order or found["cpu"] > LONG:
            return found
        runs = [self.once(order, again) for again in range(1, order["repeats"] + 1)]
        middle = {clock: statistics.median(run[clock] for run in runs) for clock in ("cpu", "wall")}
        return found | middle

    def once(self, order: dict[str, Any], again: int = 0) -> dict[str, Any]:
        """Do once what is timed; ``again``: how often it has been done, for another picture."""
        if "read" in order:
            self.forget(1)
            took, _ = timed(lambda: self.read(order["read"]))
            return {**took, "logits": self.logits()}
        if "see" in order:
            frames = pictures(order["see"] + again, order["side"], order["frames"])
            self.forget(1)
            self.held = []
            took, _ = timed(lambda: self.see(frames, order["frames"] > 0))
            self.held = [[-1]]  # what no prompt continues
            return {**took, "logits": self.logits()}
        self.before()
        took, chosen = timed(lambda: self.decode(order["decode"]))
        self.after()
        return {**took, "tokens": [row[0] for row in chosen], **self.drafts}

    drafts: dict[str, int] = {}  # of the last decode(), where some were made


class TorchModel(CachedModel):
    """A model that runs in torch, in this process, and reads what mmkv's processor makes."""

    def __init__(self, job: CpuPeerJob) -> None:
        super().__init__(job)
        import torch

        self.torch = torch
        torch.set_num_threads(job.threads)
        self.last = torch.empty(0)  # logits [B, V]
        self._processor: Any = None

    def use(self, threads: int) -> None:
        self.torch.set_num_threads(threads)

    def inputs(self, frames: Any, moving: bool) -> dict[str, Any]:
        """Return what the processor makes of frames and the question."""
        from PIL import Image

        from mmkv.prompt.loading import load_processor
        from mmkv.prompt.video import Clip

        self._processor = self._processor or load_processor(self.job.model)
        if moving:
            clip = Clip(frames, tuple(range(len(frames))), FPS)
            text = f"<|vision_start|><|video_pad|><|vision_end|>{QUESTION}"
            return dict(self._processor.encode(text, [], [clip]))
        text = f"<|vision_start|><|image_pad|><|vision_end|>{QUESTION}"
        return dict(self._processor.encode(text, [Image.fromarray(one) for one in frames], []))

    def logits(self) -> list[float]:
        return list(self.last[0, ::SAMPLE].float().tolist())


class Transformers(TorchModel):
    """transformers' model, stepped without ``generate``, which would cost more."""

    packages: tuple[str, ...] = ("torch", "transformers")
    imported: tuple[str, ...] = ("torch", "transformers")
    chunk = 512

    def __init__(self, job: CpuPeerJob) -> None:
        super().__init__(job)
        import transformers

        transformers.utils.logging.disable_progress_bar()
        sees = has_vision(job.model)
        name = "AutoModelForImageTextToText" if sees else "AutoModelForCausalLM"
        dtype = {"bf16": self.torch.bfloat16, "float32": self.torch.float32}[job.weights]
        self.model = getattr(transformers, name).from_pretrained(job.model, dtype=dtype).eval()
        self.empty = transformers.DynamicCache
        self.cache: Any = None

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

    def see(self, frames: Any, moving: bool) -> None:
        inputs = self.inputs(frames, moving)
        with self.torch.inference_mode():
            self.last = self.model(
                **inputs, past_key_values=self.cache, use_cache=True, logits_to_keep=1
            ).logits[:, -1]
        self.seen += inputs["input_ids"].shape[1]

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


class Kvpress(Transformers):
    """kvpress with its cheapest press: a prompt is cut to the budget, and again every 16 steps."""

    packages = ("torch", "transformers", "kvpress")
    imported = ("kvpress", "torch", "transformers")
    extends = False
    chunk = 2**31 - 1  # a press wants a prompt whole

    def __init__(self, job: CpuPeerJob) -> None:
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
        with decoding_press(self.job.budget)(self.model):
            return super().decode(steps)

    def after(self) -> None:
        (self.seen, self.last), self.cache = self.kept, self.whole


class LlamaCpp(CachedModel):
    """llama.cpp through llama-cpp-python's C interface, with its default settings."""

    imported = ("numpy", "llama_cpp")

    def __init__(self, job: CpuPeerJob) -> None:
        super().__init__(job)
        import numpy

        self.numpy = numpy
        self.api: Any = importlib.import_module("llama_cpp")
        self.api.llama_backend_init()
        settings = self.api.llama_model_default_params()
        settings.n_gpu_layers = 0
        self.model = self.api.llama_model_load_from_file(job.files.encode(), settings)
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {job.files}")
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


class OpenVino(CachedModel):
    """openvino-genai's continuous batching, which the pipelines of a single user run on a CPU, too.

    Its state cannot be taken back: each run of steps continues the last one, so that a context
    grows by the steps of a visit. Prompts of a vision-language model are text here, a word so
    often repeated: the pipeline takes no token ids of one.
    """

    packages = ("openvino", "openvino-genai", "openvino-tokenizers")
    imported: tuple[str, ...] = ("openvino", "openvino_genai")
    extends = False

    def __init__(self, job: CpuPeerJob) -> None:
        super().__init__(job)
        self.numpy: Any = importlib.import_module("numpy")
        self.openvino: Any = importlib.import_module("openvino")
        self.genai: Any = importlib.import_module("openvino_genai")
        self.sees = has_vision(job.model)
        properties = {"INFERENCE_NUM_THREADS": job.threads}
        pipeline = self.genai.ContinuousBatchingPipeline
        self.pipeline = pipeline(job.files, self.scheduling(), "CPU", properties)
        self.asking = self.genai.GenerationConfig()
        self.asking.max_new_tokens = 2**30
        self.asking.ignore_eos = True
        self.asking.apply_chat_template = False
        self.handles: list[Any] = []
        self.asked = 0
        self.last: list[list[int]] = []
        self.words: dict[int, str] = {}

    def scheduling(self) -> Any:
        """Return how requests share steps and cache."""
        made = self.genai.SchedulerConfig()
        made.max_num_seqs = 256
        made.max_num_batched_tokens = 4096
        made.enable_prefix_caching = False
        return made

    def use(self, threads: int) -> None:
        """Threads are fixed when the model is loaded."""

    def forget(self, count: int) -> None:
        for handle in self.handles:
            handle.stop()
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
        self.handles = []

    def ask(self, *content: Any, **about: Any) -> None:
        """Add a request: token ids, or text with pictures and videos."""
        self.asked += 1
        self.handles.append(self.pipeline.add_request(self.asked, *content, self.asking, **about))

    def append(self, prompts: Prompts) -> None:
        for prompt in prompts:
            if self.sees:
                self.ask(self.text_of(len(prompt)), [], [])
            else:
                self.ask(self.openvino.Tensor(self.numpy.array([prompt], dtype=self.numpy.int64)))
        self.first()

    def first(self) -> None:
        """Step until every request has its first token."""
        self.last = [[] for _ in self.handles]
        while not all(self.last):
            self.pipeline.step()
            for index, handle in enumerate(self.handles):
                if handle.can_read():
                    self.last[index] = self.chosen(handle)

    def chosen(self, handle: Any) -> list[int]:
        """Return the token ids that a request has just got."""
        (found,) = handle.read().values()
        return [int(token) for token in found.generated_ids]

    def text_of(self, count: int) -> str:
        """Return text of ``count`` tokens."""
        if count not in self.words:
            encode = self.pipeline.get_tokenizer().encode
            for word in ("a", " a", "1", " 1", "a ", "\n"):
                text = word * count
                if encode(text, add_special_tokens=False).input_ids.shape[1] == count:
                    self.words[count] = text
                    break
            else:
                raise RuntimeError("no word of this tokenizer stays one token when repeated")
        return self.words[count]

    def see(self, frames: Any, moving: bool) -> None:
        tensor = self.openvino.Tensor(frames)
        if moving:  # every frame, two a second; by itself the pipeline samples some of them
            about = self.genai.VideoMetadata()
            about.fps, about.frames_indices = FPS, list(range(len(frames)))
            self.ask(QUESTION, [], [tensor], videos_metadata=[about])
        else:
            self.ask(QUESTION, [tensor], [])
        self.first()

    def before(self) -> None:
        """Nothing: see the class."""

    def decode(self, steps: int) -> list[list[int]]:
        rows = [[row[-1] for row in self.last]]
        for _ in range(steps):
            self.pipeline.step()
            self.last = [self.chosen(handle) for handle in self.handles]
            rows.append([row[-1] for row in self.last])
        return rows

    def after(self) -> None:
        """Nothing: see the class."""

    def logits(self) -> list[float]:
        return []


class OpenVinoBudget(OpenVino):
    """The same with its eviction: of the budget an eighth for first tokens, half for last ones."""

    def scheduling(self) -> Any:
        made = super().scheduling()
        block = 32
        first = max(block, self.job.budget // 8 // block * block)
        recent = max(block, self.job.budget // 2 // block * block)
        most = max(first + recent + block, self.job.budget // block * block)
        mode = self.genai.AggregationMode.NORM_SUM
        made.use_cache_eviction = True
        made.cache_eviction_config = self.genai.CacheEvictionConfig(first, recent, most, mode)
        return made


class Mmkv(TorchModel):
    """mmkv; ``full`` keeps every entry."""

    packages = ("torch",)
    imported = ("torch", "mmkv.engine.runtime")
    policy, more = "full", dict[str, Any]()

    def __init__(self, job: CpuPeerJob) -> None:
        super().__init__(job)
        from mmkv.engine.config import options
        from mmkv.engine.runtime import Runtime

        given: dict[str, Any] = {"policy": self.policy or job.policy, "kv": job.kv}
        if not self.policy:
            given |= {"budget": job.budget, "gates": job.gates, **self.more}
        if "weights" in options():
            given["weights"] = job.weights
        elif job.weights != "bf16":
            raise RuntimeError(f"not available: this version of mmkv has no {job.weights} weights")
        self.loading["text"], self.engine = timed(
            lambda: Runtime.from_pretrained(job.model, device="cpu", **given)
        )
        if has_vision(job.model):
            _ = self.engine.family.hf  # read with the first picture else; others' loads have it
        self.sessions: list[Any] = []
        self.forks: list[Any] = []

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

    def see(self, frames: Any, moving: bool) -> None:
        self.last = self.sessions[0].prefill(self.inputs(frames, moving))[None]

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

    def about(self) -> dict[str, Any]:
        path, size = self.engine.decode_path, self.engine.cache.pool.form.name
        return super().about() | {"decode_path": path, "kv": size}


class MmkvBudget(Mmkv):
    """mmkv within the budget."""

    policy = ""

    def about(self) -> dict[str, Any]:
        return super().about() | {"policy": self.engine.policy.name}


class MmkvLossless(MmkvBudget):
    """mmkv with the full cache, for which the entries within the budget draft."""

    more = {"lossless": True}

    def after(self) -> None:
        ahead = [fork.ahead for fork in self.forks]
        self.drafts = {
            "drafted": sum(one.drafted for one in ahead),
            "accepted": sum(one.accepted for one in ahead),
        }
        super().after()


def has_vision(model: str) -> bool:
    """Return whether a checkpoint's config has a vision tower."""
    return "vision_config" in json.loads((Path(model) / "config.json").read_text())


METHODS: dict[str, type[CachedModel]] = {
    "mmkv full": Mmkv,
    "mmkv budget": MmkvBudget,
    "mmkv lossless": MmkvLossless,
    "transformers": Transformers,
    "kvpress": Kvpress,
    "llama.cpp": LlamaCpp,
    "openvino": OpenVino,
    "openvino budget": OpenVinoBudget,
}


def main(arguments: list[str]) -> int:
    """Run one job."""
    job = CpuPeerJob(**json.loads(arguments[0]))

    def load() -> CachedModel:
        kind = METHODS[job.method]
        for name in kind.imported:
            importlib.import_module(name)
        took, made = timed(lambda: kind(job))
        made.loading["all"] = took
        return made

    return serve(load)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
