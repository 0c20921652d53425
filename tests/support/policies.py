"""The presets by what they do, from the registry: one that is added there is in every matrix."""

from __future__ import annotations

from mmkv.engine.backends.cuda.kernels.evict import unsupported_reason
from mmkv.engine.policies import PRESETS, Policy, make_policy
from mmkv.engine.scorer_state import has_on_append, has_on_step

_ALL = {name: make_policy(name) for name in PRESETS}
# Pruners need pictures and layers enough, and write gates are other gates: test_oracle.py has them.
_MADE = {
    name: policy
    for name, policy in _ALL.items()
    if policy.pruner is None and policy.admission is None
}


def _kind(policy: Policy) -> tuple[object, ...]:
    """What tells two policies apart to a pass: what it leaves behind, and whether it evicts."""
    return (
        policy.allocation is None,
        policy.scoring.needs.gates,
        policy.scoring.needs.queries > 0,
        bool(policy.scoring.needs.mass),
        bool(policy.scoring.needs.taps),
        has_on_append(policy.scoring),
        has_on_step(policy.scoring),
    )


ALL = tuple(_MADE)
EVICTING = tuple(name for name, policy in _MADE.items() if policy.allocation is not None)
# Those with retention gates.
GATED = tuple(name for name, policy in _MADE.items() if policy.scoring.needs.gates)
# Those that the steps in C and on a GPU evict for.
STATIC = tuple(
    name
    for name, policy in _MADE.items()
    if policy.allocation is None or not unsupported_reason(policy)
)
# The first preset of each kind.
KINDS = tuple(
    name
    for at, name in enumerate(ALL)
    if _kind(_MADE[name]) not in {_kind(_MADE[other]) for other in ALL[:at]}
)
# Those that few towers can be read with: test_merging.py has them.
MERGERS = tuple(name for name, policy in _ALL.items() if policy.merger is not None)
# And those that stand apart.
OTHERS = tuple(name for name in _ALL if name not in (*_MADE, *MERGERS))
EVICTING_KINDS = tuple(name for name in KINDS if name in EVICTING)
EVICTING_STATIC = tuple(name for name in STATIC if name in EVICTING)
