"""mmkv, with every entry and within a budget."""

from __future__ import annotations

from typing import Any

from mmkv.eval.bench.cpu_methods.base import SAMPLE, Job, Method, Prompts


class Mmkv(Method):
    """mmkv; ``full`` keeps every entry."""

    packages = ("torch",)
    policy = "full"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        import torch

        from mmkv.engine.config import options
        from mmkv.engine.runtime import Runtime

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
