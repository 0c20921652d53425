"""A policy of your own, in 40 lines: KeyDiff (arXiv 2504.15364), which keeps unusual keys.

Run: python examples/custom_policy.py
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

import mmkv
from mmkv.resources import asset


@dataclass(frozen=True)
class KeyDiff:
    """Ranks an entry by how little its key resembles the mean key of its row."""

    needs = mmkv.Needs(keys=True)

    def score(self, view: mmkv.CacheView) -> Tensor:
        """Return float32 [entries]; the lowest are evicted."""
        keys = view.to_rows(F.normalize(view.keys().float(), dim=-1), 0.0)  # [rows, longest, D]
        mean = F.normalize(keys.sum(1), dim=-1)  # of a row: one layer, one KV head
        return -(keys @ mean[..., None])[..., 0][view.live()]


POLICY = mmkv.Policy("mean-key", KeyDiff(), mmkv.HeadAllocation())
mmkv.register_policy("mean-key", POLICY)  # for policy="mean-key"; an entry point for mmkv chat


if __name__ == "__main__":
    for policy in ("mean-key", "streamingllm"):
        engine = mmkv.Engine.from_pretrained(mmkv.bundled_model(), policy=policy, budget=12)
        with engine.session() as session:
            question = "what is at row 2, column 3?"
            answer = "".join(session.send(question, images=[asset("scene.png")]))
            kept = session.memory()
        print(f"{policy}: {answer} ({kept.entries} entries kept, {kept.evicted} evicted)")
