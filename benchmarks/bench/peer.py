"""Run one peer of the decode benchmark in its own process: ``python -m benchmarks.bench.peer
JSON``.

Peers run in their own process because they need other versions of transformers than mmkv
(``--python`` of the benchmark names their environment), and because a failing peer must not end the
benchmark. The process builds the model of ``shapes``, fills a cache and decodes as often as it is
asked (:mod:`benchmarks.bench.child`). Only decode steps are timed, from the first new token to
the last.

It needs torch, transformers (4.57 to 5) and the peer's own package.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from torch import Tensor

from benchmarks.bench.child import Method, decoding_press, serve
from benchmarks.bench.shapes import SHAPES, Shape, build_model, config_arguments, randomise

# Names of the methods of the decode benchmark, in its results and on its command line.
OWN, FULL, EAGER = "mmkv graph, evicting", "mmkv graph, full cache", "mmkv eager, evicting"

# The peers: transformers with a dynamic cache, a static cache, and continuous batching.
DYNAMIC = "transformers"
STATIC = "transformers static+compile"
BATCHING = "transformers continuous batching"
KVPRESS, TRIMKV = "kvpress", "trimkv"
BOUNDED = (KVPRESS, TRIMKV)  # evict as we do: their memory does not grow with the context


@dataclass(frozen=True)
class PeerJob:
    """The task of a peer; ``context`` tokens are in the cache before it decodes.

    Attributes:
        budget: entries per layer and KV head, for peers that evict; tokens: most per run.
    """

    peer: str
    shape: str
    batch: int
    context: int
    budget: int
    tokens: int
    device: str
    dtype: str

    @property
    def sizes(self) -> Shape:
        """Return the model's sizes."""
        return SHAPES[self.shape]

    @property
    def where(self) -> tuple[torch.device, torch.dtype]:
        """Return the device and dtype."""
        return torch.device(self.device), getattr(torch, self.dtype)


class Generate(Method):
    """``model.generate`` on a cache that already holds the context, as random numbers."""

    packages = ("torch", "transformers", "kvpress", "trimkv", "flash-attn")

    def __init__(self, job: PeerJob) -> None:
        self.job = job
        self.device, self.dtype = job.where
        self.held = job.context - 1  # generate reads the last token of the prompt itself
        self.model = self.build()
        self.cache = self.fill()

    def build(self) -> Any:
        """Return the model."""
        return build_model(self.job.sizes, self.device, self.dtype)

    def empty(self) -> Any:
        """Return a cache for the job."""
        return transformers.DynamicCache(config=self.model.config)

    def fill(self) -> Any:
        """Make a cache of ``held`` random entries in every layer."""
        cache, shape = self.empty(), self.job.sizes
        size = (self.job.batch, shape.kv_heads, self.held, shape.head_dim)
        at = {"cache_position": torch.arange(self.held, device=self.device)}
        for layer in range(shape.layers):
            key, value = (
                torch.empty(size, dtype=self.dtype, device=self.device).normal_() for _ in range(2)
            )
            cache.update(key, value, layer, at)
        return cache

    def restore(self) -> None:
        """Cut the cache back to the context."""
        extra = self.cache.get_seq_length() - self.held
        if extra > 0:
            self.cache.crop(-extra)

    def prompt(self) -> Tensor:
        """Draw token ids; those before the last one only give the context's length."""
        ids = torch.ones(self.job.batch, self.held + 1, dtype=torch.int64)
        return ids.to(self.device)

    def obey(self, order: dict[str, Any]) -> dict[str, Any]:
        """Decode as many tokens as ``{"decode": tokens}`` says."""
        seconds = self.run(order["decode"])
        peak = torch.cuda.max_memory_allocated() if self.device.type == "cuda" else None
        return {"wall": seconds, "peak_bytes": peak}

    def about(self) -> dict[str, Any]:
        """Return the versions installed here, which may differ from those that mmkv runs on."""
        return {**super().about(), "torch": torch.__version__}

    def now(self) -> float:
        """Return the time once the device has done its work; generate waits for it anyway."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    @torch.inference_mode()
    def run(self, tokens: int) -> float:
        """Time ``tokens`` decode steps."""
        prompt, times = self.prompt(), list[float]()

        def note(ids: Tensor, scores: Any, **_: Any) -> Tensor:
            """Note the time of a new token: a stopping criterion that never stops."""
            times.append(self.now())
            return torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)

        self.model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            past_key_values=self.cache,
            max_new_tokens=tokens + 1,
            min_new_tokens=tokens + 1,
            use_cache=True,
            do_sample=False,
            stopping_criteria=transformers.StoppingCriteriaList([note]),
        )
        self.restore()
        if len(times) != tokens + 1:
            raise RuntimeError(f"{len(times) - 1} steps were timed, {tokens} asked for")
        return times[-1] - times[0]


class Static(Generate):
    """The same with a static cache, which makes transformers compile the step on a GPU."""

    def empty(self) -> Any:
        """Return a cache of the final length."""
        length = self.job.context + self.job.tokens + 8
        return transformers.StaticCache(config=self.model.config, max_cache_len=length)

    def restore(self) -> None:
        """Clear what was decoded: older versions count what is not zero, newer ones keep count."""
        for layer in self.cache.layers:
            layer.keys[:, :, self.held :].zero_()
            layer.values[:, :, self.held :].zero_()
            if hasattr(layer, "cumulative_length"):
                layer.cumulative_length.fill_(self.held)


class PeerKvpress(Generate):
    """NVIDIA's kvpress: a decoding press (KnormPress, its cheapest) over generate.

    Its cache starts at the budget, and is cut back to it every 16 steps.
    """

    def __init__(self, job: PeerJob) -> None:
        self.presses = importlib.import_module("kvpress")
        super().__init__(job)

    def fill(self) -> Any:
        """Fill the cache with no more than the budget."""
        self.held = min(self.job.context - 1, self.job.budget)
        return super().fill()

    def restore(self) -> None:
        """Fill the cache again, because the press left other lengths."""
        self.cache = None
        self.cache = self.fill()

    def run(self, tokens: int) -> float:
        """Generate inside the press."""
        with decoding_press(self.job.budget)(self.model):
            return super().run(tokens)


class Trimkv(Generate):
    """The TRIM-KV authors' package (0.1.5): its model, its cache, and a real prefill each run."""

    def __init__(self, job: PeerJob) -> None:
        self.models = importlib.import_module("trimkv.models.qwen3")
        self.caches = importlib.import_module("trimkv.cache_utils")
        super().__init__(job)

    def build(self) -> Any:
        """Build their Qwen3 with untrained gates."""
        if self.job.sizes.kind != "qwen3":
            raise RuntimeError("trimkv has other shapes as well; only Qwen3 is set up here")
        config = self.models.TrimKVQwen3Config(
            memory_size=self.job.budget, global_capacity=False, **config_arguments(self.job.sizes)
        )
        with torch.device("meta"):
            model = self.models.TrimKVQwen3ForCausalLM(config)
        made = randomise(model, config, self.device, self.dtype)
        made.config._attn_implementation = "flash_attention_2"
        return made

    def fill(self) -> Any:
        """Return an empty cache, which generate fills by reading the prompt."""
        return self.caches.TrimKVCache(
            memory_size=self.job.budget, buffer_size=32, device=str(self.device)
        )

    def restore(self) -> None:
        """Make a new cache for the next run."""
        self.cache = None
        self.cache = self.fill()


class Paged(Generate):
    """transformers' continuous batching; it reads the prompts for real.

    Timed is the span in which all sequences decode, from the last one's first token to the first
    one's last.
    """

    def fill(self) -> Any:
        """Return the prompts, all different: equal ones would share their pages."""
        generator = torch.Generator().manual_seed(0)
        size = (self.job.batch, self.job.context)
        return torch.randint(1, self.job.sizes.vocab, size, generator=generator).tolist()

    def room(self, tokens: int) -> Any:
        """Return the blocks for this job: left alone it sizes its buffers after all free memory."""
        blocks = self.job.batch * ((self.job.context + tokens) // 256 + 2)
        config = transformers.generation.ContinuousBatchingConfig
        return config(num_blocks=blocks, max_batch_tokens=max(2048, self.job.batch))

    def run(self, tokens: int) -> float:
        """Return the seconds per ``tokens`` steps, from the time stamps of the tokens.

        Not in inference mode: its worker is another thread, which would not be in it.
        """
        settings = transformers.GenerationConfig(
            max_new_tokens=2 * tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        made = self.model.generate_batch(
            self.cache,
            generation_config=settings,
            record_timestamps=True,
            progress_bar=False,
            continuous_batching_config=self.room(2 * tokens),
        )
        stamps = [list(result.timestamps or []) for result in made.values()]
        if len(stamps) != self.job.batch or not all(len(s) > tokens for s in stamps):
            errors = [result.error for result in made.values() if result.error]
            raise RuntimeError(f"not all requests gave time stamps; {errors[:1] or 'no error'}")
        start, end = max(s[0] for s in stamps), min(s[-1] for s in stamps)
        inside = sum(start <= t <= end for s in stamps for t in s) / len(stamps) - 1
        if inside < tokens / 2:
            raise RuntimeError("the sequences did not decode at the same time long enough")
        return (end - start) / inside * tokens


PEERS: dict[str, Callable[[PeerJob], Generate]] = {
    DYNAMIC: Generate,
    STATIC: Static,
    BATCHING: Paged,
    KVPRESS: PeerKvpress,
    TRIMKV: Trimkv,
}


def made(job: PeerJob) -> Generate:
    """Prepare a peer, and show that it runs."""
    peer = PEERS[job.peer](job)
    peer.run(min(4, job.tokens))  # compiles
    return peer


def main(arguments: list[str]) -> int:
    """Run one job; an error is reported on stdout as well, in one line."""
    return serve(lambda: made(PeerJob(**json.loads(arguments[0]))))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
