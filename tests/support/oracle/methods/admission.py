"""Methods under write gates; :class:`tests.support.oracle.admission.Admitted` runs them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tests.support.oracle.methods.attention import SnapKV
from tests.support.oracle.methods.base import Method
from tests.support.oracle.methods.retention import Full, GlobalRetention
from tests.support.oracle.simulation import Simulation

PAPER_WINDOW = 256  # appendix E; the window where neither a parameter nor the gates say one


@dataclass
class WriteGated(Full):
    """WG-KV (arXiv 2512.17452): a budget binds nothing."""

    window: int = 0
    threshold: float = 0.1


@dataclass
class WriteGatedRetention(GlobalRetention):
    """DBTrimKV among what is admitted."""

    window: int = 0
    threshold: float = 0.1
    write_gates: str = ""


@dataclass
class WriteGatedSnapKV(Method):
    """SnapKV among what is admitted, as in appendix K.1. Choice: the lowest go, not 10 %."""

    window: int = 0
    threshold: float = 0.1
    observed: int = 0
    kernel: int = 5
    pool: str = "max"
    group: str = "max"

    def __post_init__(self) -> None:
        observed = self.observed or self.window or PAPER_WINDOW
        self.attention = SnapKV(observed, self.kernel, self.pool, self.group)

    def score(self, sim: Simulation) -> Tensor:
        return self.attention.score(sim)

    def protected(self, sim: Simulation, total: int) -> Tensor:
        return self.attention.protected(sim, total)
