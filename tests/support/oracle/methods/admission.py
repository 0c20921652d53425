"""Methods under write gates; :class:`tests.support.oracle.admission.Admitted` runs them."""

from __future__ import annotations

from dataclasses import dataclass

from tests.support.oracle.methods.retention import Full


@dataclass
class WriteGated(Full):
    """WG-KV (arXiv 2512.17452): a budget binds nothing.

    ``window``: W_local; 0: as the gates were trained, 256 where they do not say.
    """

    window: int = 0
    threshold: float = 0.1
