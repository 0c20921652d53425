"""The engine's semantics and every policy, written the slow, obvious way.

``docs/reference/policies.md`` has the definitions. Nothing is shared with ``engine/``: see
:mod:`tests.support.oracle.simulation`. Scores are float64, and eviction is one full sort.
"""

from tests.support.oracle.eviction import Admitted, Eviction, Oracle, Pruned, Retained
from tests.support.oracle.methods import METHODS, log_score
from tests.support.oracle.simulation import Quantiser

__all__ = [
    "METHODS",
    "Admitted",
    "Eviction",
    "Oracle",
    "Pruned",
    "Quantiser",
    "Retained",
    "log_score",
]
