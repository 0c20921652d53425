"""Scorers: one small dataclass per published score."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch.nn.functional as F
from torch import Tensor

from mmkv.engine.config import EngineConfig
from mmkv.engine.errors import PolicyError
from mmkv.engine.policies.base import CacheView, Group, Needs, compiled
from mmkv.engine.policies.score import lookahead_log_score


@compiled("retention")
@dataclass(frozen=True, repr=False)
class Retention:
    """Learned retention summed over ``lookahead`` steps (DBTrimKV, eq. 9; n = 1: TRIM-KV).

    Attributes:
        newest_age: age of the newest entry: 1 in DBTrimKV's equation 9, 0 in TRIM-KV's algorithm
            1; the authors' released code counts more (``engine.policies.retention_presets``).
    """

    lookahead: float = EngineConfig.lookahead
    newest_age: int = 1
    needs: ClassVar[Needs] = Needs(gates="retention")

    def __post_init__(self) -> None:
        if self.newest_age < 0 or self.newest_age % 1:
            raise PolicyError(
                f"the newest entry's age is {self.newest_age}; give a whole number of at least 0"
            )

    def __repr__(self) -> str:
        # Session files hold it: equation 9's age goes without saying.
        age = "" if self.newest_age == 1 else f", newest_age={self.newest_age}"
        return f"Retention(lookahead={self.lookahead}{age})"

    @property
    def age_shift(self) -> int:
        """What is added to ``seen - position`` to get an entry's age."""
        return self.newest_age - 1

    def score(self, view: CacheView) -> Tensor:
        """``log G`` of each entry at age ``seen - position + age_shift``."""
        age = view.seen - view.position + self.age_shift
        return lookahead_log_score(view.log_beta, age, self.lookahead, self.newest_age)


@compiled("recency")
@dataclass(frozen=True)
class Recency:
    """The newer the better (StreamingLLM, arXiv 2309.17453, together with protected sinks)."""

    needs: ClassVar[Needs] = Needs()

    def score(self, view: CacheView) -> Tensor:
        """The position itself."""
        return view.position.float()


@dataclass(frozen=True)
class WindowAttention:
    """Attention paid by the last ``window`` queries, smoothed over neighbouring positions.

    SnapKV (arXiv 2404.14469), applied at every eviction, also while decoding. As there, pooling
    covers the prefix: the tokens of the window itself always stay, and take no part in it.
    """

    window: int = 16
    kernel: int = 5
    pool: Literal["avg", "max"] = "avg"
    group: Group = "mean"

    def __post_init__(self) -> None:
        check_pooling(self.window, self.kernel)

    @property
    def needs(self) -> Needs:
        """The last ``window`` queries."""
        return Needs(queries=self.window)

    def score(self, view: CacheView) -> Tensor:
        """Window attention of the prefix, pooled over each row in order of position."""
        observing = view.position >= view.seen - self.window
        prefix = view.attention(self.group).masked_fill(observing, 0.0)
        return pooled(prefix, view, self.kernel, self.pool).masked_fill(observing, float("inf"))


def check_pooling(window: int, kernel: int) -> None:
    """Check what :func:`pooled` relies on. Raises PolicyError."""
    if window < 1 or kernel < 1 or kernel % 2 == 0:
        raise PolicyError(
            f"a window of {window} queries pooled over {kernel} positions cannot be; give a window "
            "of at least 1 and an odd kernel"
        )


def pooled(values: Tensor, view: CacheView, kernel: int, pool: Literal["avg", "max"]) -> Tensor:
    """Pool ``values [N]`` over neighbouring entries of each row, in order of position.

    Args:
        values: not below 0.
        kernel: entries that are pooled together, odd; beyond a row's ends they count as 0.
    """
    order = view.to_rows(view.position.float(), float("inf")).argsort(-1)
    smooth = F.avg_pool1d if pool == "avg" else F.max_pool1d
    found = smooth(
        view.to_rows(values, 0.0).gather(-1, order)[:, None],
        kernel,
        stride=1,
        padding=kernel // 2,
    )[:, 0]
    return found.scatter(-1, order, found)[view.live()]
