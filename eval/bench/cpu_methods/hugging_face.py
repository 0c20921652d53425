"""transformers in bfloat16, and kvpress on it."""

from __future__ import annotations

import importlib
from typing import Any

from mmkv.eval.bench.cpu_methods.base import SAMPLE, Job, Method, Prompts


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
