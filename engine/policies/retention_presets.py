"""Presets that score entries by retention gates."""

from __future__ import annotations

from typing import Literal

from mmkv.engine.config import EngineConfig, check_lookahead
from mmkv.engine.policies.allocation import FlooredAllocation, GlobalAllocation, HeadAllocation
from mmkv.engine.policies.base import Policy
from mmkv.engine.policies.preset import Parameter, Preset
from mmkv.engine.policies.preset_parameters import RECENT
from mmkv.engine.policies.scoring import Retention

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


SCORE = {
    "lookahead": Parameter(
        float(EngineConfig.lookahead),
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
