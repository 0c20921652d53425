"""Scores by retention gates, recency, a window of queries, and keys; presets of gates and keys.

Retention is the lookahead score of DBTrimKV (arXiv 2605.09649, eq. 9), in log space.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from mmkv.engine.errors import DEFAULT_LOOKAHEAD, PolicyError, check_lookahead
from mmkv.engine.policies.allocation import FlooredAllocation, GlobalAllocation, HeadAllocation
from mmkv.engine.policies.base import CacheView, Group, Needs, Policy, compiled
from mmkv.engine.policies.frozen import scaled
from mmkv.engine.policies.preset import RECENT, Parameter, Preset


def log1mexp(x: Tensor) -> Tensor:
    """Compute ``log(1 - exp(x))`` for ``x < 0``, accurate at both ends (-inf at 0)."""
    near = x > -math.log(2)
    return torch.where(near, torch.log(-torch.expm1(x)), torch.log1p(-torch.exp(x)))


def lookahead_log_score(
    log_beta: Tensor, age: Tensor, lookahead: float, least_age: int = 1
) -> Tensor:
    """Log of the retention an entry will have summed over the next ``lookahead`` steps.

    ``log G = a lb + log1mexp(n lb) - log1mexp(lb)``, that is
    ``log(beta^a + ... + beta^(a+n-1))``, without ever forming ``1 - beta`` from beta.

    Args:
        log_beta: ``[N]`` float32, <= 0.
        age: ``[N]`` whole numbers; equation 9 counts tokens seen minus position, so the newest
            is 1.
        lookahead: n = T - t >= 1; ``math.inf`` allowed.
        least_age: 0 where there may be ages of 0: an entry is whole then, ``beta^0 = 1``, whatever
            its log_beta.

    Returns:
        float32 ``[N]``; +inf for ``log_beta = 0`` under an infinite horizon.
    """
    decayed = age.to(torch.float32) * log_beta
    if least_age == 0:
        decayed = decayed.masked_fill(age == 0, 0.0)  # not 0 * -inf
    # No float32 form of exp, expm1 or log1p is the same on every machine. What does not depend on
    # age is computed in float64 and rounded once, so that CPUs and GPUs order entries alike.
    x = log_beta.double()
    if lookahead == 1:
        return decayed
    if lookahead == 2:
        ahead = torch.log1p(torch.exp(x))
    elif math.isinf(lookahead):
        ahead = -log1mexp(x)
    else:
        ratio = torch.expm1(lookahead * x) / torch.expm1(x)
        ahead = torch.log(torch.where(x == 0, float(lookahead), ratio))
    return decayed + ahead.float()


@compiled("retention")
@dataclass(frozen=True, repr=False)
class Retention:
    """Learned retention summed over ``lookahead`` steps (DBTrimKV, eq. 9; n = 1: TRIM-KV).

    Attributes:
        newest_age: age of the newest entry: 1 in DBTrimKV's equation 9, 0 in TRIM-KV's algorithm
            1; the authors' released code counts more (``engine.policies.scoring``).
    """

    lookahead: float = DEFAULT_LOOKAHEAD
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
    return view.from_rows(found.scatter(-1, order, found))


@dataclass(frozen=True)
class KeyDifference:
    """Distance from the row's mean direction of keys (KeyDiff, arXiv 2504.15364, section 3)."""

    needs: ClassVar[Needs] = Needs(keys=True)

    def score(self, view: CacheView) -> Tensor:
        """Minus the cosine between a key and the mean of its row's normalised keys."""
        keys = F.normalize(view.keys().float(), dim=-1, eps=1e-12)
        mean = view.to_rows(keys, 0.0).sum(1) / view.length.clamp(min=1)[:, None]
        return -(keys * F.normalize(mean, dim=-1, eps=1e-12)[view.row]).sum(-1)


@dataclass(frozen=True)
class KeyNorm:
    """Keys of a small L2 norm stay (arXiv 2406.11430, section 3)."""

    needs: ClassVar[Needs] = Needs(keys=True)

    def score(self, view: CacheView) -> Tensor:
        """Minus the norm."""
        return -view.keys().float().norm(dim=-1)


@dataclass(frozen=True)
class NextChunk:
    """Spread of keys and values against the next chunk's range (LagKV, arXiv 2504.04704).

    Section 3, as kvpress computes it. The first ``sinks`` tokens are in no chunk; with less than
    two whole chunks the newest stay.
    """

    sinks: int = 4
    lag: int = 128
    needs: ClassVar[Needs] = Needs(keys=True, values=True)

    def score(self, view: CacheView) -> Tensor:
        """Rank in the chunk, from 0 to below 1; 1 where no whole chunk comes after."""
        place = view.position.masked_fill(view.position < self.sinks, -1).float()
        order = view.to_rows(place, float("inf")).argsort(dim=-1, stable=True)
        sinks = view.to_rows((place < 0).long(), 0).sum(-1)
        rows, longest = order.shape
        chunks = longest // self.lag
        if chunks < 2:
            return view.position.float()
        # The column of each entry of each chunk: sinks come first, then the chunks.
        column = torch.arange(chunks * self.lag, device=order.device) + sinks[:, None]
        source = order.gather(-1, column.clamp(max=longest - 1))
        ranks = self._ranks(view, source.unflatten(1, (chunks, self.lag)))
        whole = (view.length - sinks) // self.lag
        chunk = torch.arange(chunks, device=order.device).repeat_interleave(self.lag)
        ranked = chunk < whole[:, None] - 1
        score = torch.ones((rows, longest + 1), device=order.device)
        # What is not ranked goes to a column of its own: rows are ranked to different lengths.
        score.scatter_(-1, source.masked_fill(~ranked, longest), ranks.flatten(1))
        score = view.from_rows(score[:, :longest])
        return torch.where(whole[view.row] < 2, view.position.float(), score)

    def _ranks(self, view: CacheView, source: Tensor) -> Tensor:
        """Rank each entry in its chunk, divided by ``lag``.

        Args:
            source: ``[R, chunks, lag]``, columns of :meth:`CacheView.to_rows` of a chunk's entries.
        """
        # In float64: shares of a wide spread round to 0 and 1 in float32, and their sums tie.
        total = torch.zeros(source.shape, dtype=torch.float64, device=source.device)
        for entries in (view.keys(), view.values()):
            x = view.to_rows(entries.float(), 0.0)
            chunk = x.gather(1, source.flatten(1)[..., None].expand(-1, -1, x.shape[-1]))
            chunk = chunk.unflatten(1, source.shape[1:])
            # The next chunk's range, by feature; the last one, which is not ranked, gets another.
            least, most = (m.roll(-1, 1) for m in (chunk.amin(2), chunk.amax(2)))
            spread = scaled(chunk, least[:, :, None], most[:, :, None]).std(-1)
            total += spread.double().softmax(-1)
        return total.argsort(dim=-1, stable=True).argsort(-1).float() / self.lag


Age = Literal["paper", "released"]

# Which age the newest entry has: the paper's, or that of the authors' released code.
_AGE_HELP = "how ages are counted; released is the default with gates of the authors' own layout"
_AGES = ("paper", "released")


def _dbtrimkv(lookahead: float, recent: int, age: Age) -> Policy:
    scoring = retention(lookahead, age)
    return Policy("dbtrimkv", scoring, GlobalAllocation(), protect_recent=recent)


def _balanced(floor: float, free: int, lookahead: float, recent: int, age: Age) -> Policy:
    scoring, allocation = retention(lookahead, age), FlooredAllocation(floor, free)
    return Policy("balanced", scoring, allocation, protect_recent=recent)


def _trimkv(recent: int, age: Age) -> Policy:
    newest = 0 if age == "paper" else _released_age(1)
    return Policy("trimkv", Retention(1, newest), HeadAllocation(), protect_recent=recent)


def retention(lookahead: float, age: Age) -> Retention:
    """Make the score of DBTrimKV, equation 9."""
    check_lookahead(lookahead)
    steps = int(lookahead) if lookahead % 1 == 0 else lookahead
    return Retention(steps, 1 if age == "paper" else _released_age(lookahead))


def _released_age(lookahead: float) -> int:
    """Age of the newest entry in trimkv 0.1.5, the code that both papers' authors published."""
    return 2 if lookahead == 1 else 3


def _keydiff(recent: int) -> Policy:
    return Policy("keydiff", KeyDifference(), HeadAllocation(), protect_recent=recent)


def _knorm(recent: int) -> Policy:
    return Policy("knorm", KeyNorm(), HeadAllocation(), protect_recent=recent)


def _lagkv(sinks: int, lag: int) -> Policy:
    return Policy("lagkv", NextChunk(sinks, lag), HeadAllocation(), protect_first=sinks)


SCORE = {
    "lookahead": Parameter(
        float(DEFAULT_LOOKAHEAD),
        "steps n = T - t over which retention is summed, or inf",
        "equation 9",
        least=1,
    ),
    "age": Parameter("paper", _AGE_HELP, "equation 9: the newest has age 1", choices=_AGES),
}
_RETENTION = {"lookahead": SCORE["lookahead"], "recent": RECENT, "age": SCORE["age"]}

RETENTION_PRESETS: dict[str, Preset] = {
    "dbtrimkv": Preset(
        _dbtrimkv,
        "arXiv 2605.09649",
        "Make Each Token Count: Towards Improving Long-Context Performance with KV Cache Eviction",
        _RETENTION,
    ),
    "trimkv": Preset(
        _trimkv,
        "arXiv 2512.03324",
        "Cache What Lasts: Token Retention for Memory-Bounded KV Cache in LLMs",
        {
            "recent": RECENT,
            "age": Parameter(
                "paper", _AGE_HELP, "algorithm 1: the newest has age 0", choices=_AGES
            ),
        },
    ),
    "balanced": Preset(
        _balanced,
        "this project",
        "DBTrimKV's score and one budget, of which a part is sure to each head",
        {
            "floor": Parameter(
                1.0, "part that is sure of what an equal share has above free", least=0.0, most=1.0
            ),
            "free": Parameter(32, "entries of an equal share that always compete", least=0),
            **_RETENTION,
        },
    ),
}

KEY_PRESETS: dict[str, Preset] = {
    "keydiff": Preset(
        _keydiff,
        "arXiv 2504.15364",
        "KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference",
        {"recent": RECENT},
    ),
    "knorm": Preset(
        _knorm,
        "arXiv 2406.11430",
        "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression",
        {"recent": RECENT},
    ),
    "lagkv": Preset(
        _lagkv,
        "arXiv 2504.04704",
        "LagKV: Lag-Relative Information of the KV Cache Tells Which Tokens Are Important",
        {
            "sinks": Parameter(4, "first tokens, which always stay", "kvpress", least=0),
            "lag": Parameter(128, "tokens of a chunk", "kvpress", least=1),
        },
    ),
}
