"""Run the state machine over pages for as many operations as asked: ``make test-pages``.

``make test`` runs a few thousand operations; this is for a change to the cache and before a
release. A run is told by its seed: the same seed draws the same operations.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import time
from itertools import count

import torch
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import invariant, run_state_machine_as_test

from tests.engine.cache.test_ragged import STEPS, CacheMachine

EXAMPLES = 500  # per batch: what hypothesis remembers of a batch is dropped with it


def run(operations: int, first_seed: int) -> int:
    """Run batches of examples until ``operations`` have been checked; returns how many were."""
    done = 0

    class Counted(CacheMachine):
        @invariant()
        def counted(self) -> None:
            nonlocal done
            done += 1

        def teardown(self) -> None:
            nonlocal done
            done -= 1  # the first check stands before any operation
            super().teardown()

    for number in count():
        run_state_machine_as_test(
            seed(first_seed + number)(Counted),
            settings=settings(
                max_examples=EXAMPLES,
                stateful_step_count=STEPS,
                deadline=None,
                database=None,
                phases=(Phase.generate, Phase.shrink),
                suppress_health_check=list(HealthCheck),
            ),
        )
        print(f"{done:,} operations after seed {first_seed + number}", flush=True)
        if done >= operations:
            break
    return done


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.engine.page_operations")
    parser.add_argument("--operations", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=None, help="default: a fresh one, printed")
    options = parser.parse_args(arguments)
    chosen = secrets.randbits(32) if options.seed is None else options.seed
    print(f"seed {chosen}, {options.operations:,} operations", flush=True)
    torch.set_num_threads(1)
    started = time.monotonic()
    done = run(options.operations, chosen)
    minutes = (time.monotonic() - started) / 60
    print(f"seed {chosen}: {done:,} operations in {minutes:.1f} minutes, all invariants held")
    return 0


if __name__ == "__main__":
    sys.exit(main())
