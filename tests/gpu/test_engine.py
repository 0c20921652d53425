"""The engine on a GPU beside itself on a CPU: tokens, logits and what it keeps.

Without a GPU these run on a fake one, which refuses what a real one would (``make test-gpu`` is for
the real one).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mmkv.engine.backends.cuda.kernels.sample import Draw
from mmkv.engine.config import EngineConfig
from mmkv.engine.runtime import Runtime
from mmkv.engine.sequence import CachedSequence
from tests.support.factories import Piece, checkpoint, make_turn
from tests.support.fake_cuda import Device
from tests.support.policies import ALL, KINDS
from tests.support.tiers import long_but, one_in

DRAWS = {
    "greedy": None,
    "drawn": Draw(temperature=0.9, top_k=20, top_p=0.9, min_p=0.01, seed=3),
    "penalised": Draw(temperature=0.7, repetition=1.3, presence=0.2, frequency=0.1, seed=5),
}
# Pictures, windows, experts, linear layers, pictures seen whole, biases, partial and scaled rope.
FAMILIES = [
    "qwen3_vl",
    "qwen3_5_moe",
    "gemma3",
    "qwen2_5_vl",
    "llava_next",
    "internvl",
    "smolvlm",
    "mistral",
    "qwen3_moe",
    "glm4v",
    "qwen2_sliding",
    "llama_biased",
]


@dataclass
class Log:
    """What a run has come to, step by step."""

    steps: list[tuple[str, Any]] = field(default_factory=list)

    def add(self, name: str, made: Any) -> Any:
        """Note a result, on the CPU."""
        self.steps.append((name, made.cpu() if isinstance(made, Tensor) else made))
        return made

    def kept(self, name: str, session: CachedSequence) -> None:
        """Note which tokens every row of a session holds."""
        rows = [row.tolist() for layer in session.retained() for row in layer]
        self.steps.append((name, [session.seen, session.entries, rows]))


def life(folder: Path, device: str, row: dict[str, Any]) -> Log:
    """Take sessions through all that can become of one."""
    log = Log()
    options = {"dtype": row["dtype"], "policy": row["policy"], "kv": row["kv"]}
    options |= {"weights": row["weights"], "gates": "random", "budget": 10, "page_size": 8}
    path = checkpoint(row["family"])
    config = EngineConfig(model=path, device=device, prefill_chunk=12, **options)
    engine = Runtime.from_config(config)
    draw = DRAWS[row["draw"]]

    def turn(*pieces: Piece, seed: int) -> dict[str, Tensor]:
        seen = [each for each in pieces if isinstance(each, int) or engine.family.has_vision]
        made = make_turn(row["family"], seen, seed)
        # As transformers' users write it: everything to the device.
        return {name: each.to(device) for name, each in made.items()}

    def burst(name: str, sessions: list[CachedSequence], steps: int, **stop: Any) -> list[Any]:
        tokens = [5 + index for index in range(len(sessions))]
        draws = None if draw is None else [draw] * len(sessions)
        made = engine.decode_many(sessions, tokens, steps, draws=draws, **stop)
        log.add(name, made)
        return made

    one, two = engine.session(), engine.session()
    log.add("in chunks", one.prefill(turn(9, ("image", 16, 24), 7, seed=1)))
    log.add("a second session", two.prefill(turn(30, seed=2)))
    log.add("a step", engine.decode([one, two], [5, 6]))
    first = burst("a burst", [one, two], 7)
    log.kept("after a burst", one)
    log.add("a late picture", one.prefill(turn(3, ("image", 24, 16), 2, seed=4)))
    three = one.fork()
    burst("a fork", [three, two, one], 5, stop=[first[0][1]])
    two.save(folder / device)
    two.close()
    four, _ = engine.load_session(folder / device)
    log.add("on from a file", four.prefill(turn(26, seed=5)))
    if engine.policy.evicts:
        four.set_budget(7)
    log.kept("a smaller budget", four)
    three.record()
    burst("recorded", [three], 3)
    place = one.seen, one.next_position, one.prompt_tokens
    log.add("to be undone", one.decode(9))
    if one.can_cut_back:
        one.cut_back(*place)
    log.add("undone", one.decode(8))
    many = [engine.session() for _ in range(5)]
    for index, each in enumerate(many):
        each.prefill(turn(24 - 4 * index, seed=index))
    burst("the pool grows", many, 9)
    log.kept("after all", many[-1])
    return log


def assert_alike(ours: Log, theirs: Log, exact: bool, bound: float) -> None:
    """Exactly: tokens and what is kept; always: logits before anything was evicted by rounding.

    A real card sums in another order, so nothing is exact there.
    """
    assert [name for name, _ in ours.steps] == [name for name, _ in theirs.steps]
    for (name, mine), (_, wanted) in zip(ours.steps, theirs.steps, strict=True):
        if isinstance(mine, Tensor):
            if exact or name in ("in chunks", "a second session"):
                largest = float(wanted.abs().max())
                torch.testing.assert_close(mine, wanted, rtol=0, atol=bound * largest, msg=name)
            assert mine.shape == wanted.shape and bool(mine.isfinite().all()), name
        elif exact:
            assert mine == wanted, name
        elif name in ("after a burst", "after all"):  # no stop token came before
            assert mine[:2] == wanted[:2], name
        elif name in ("a burst", "recorded", "the pool grows"):
            assert [len(tokens) for tokens in mine] == [len(tokens) for tokens in wanted], name


def row(**own: Any) -> dict[str, Any]:
    usual = {"dtype": "float32", "policy": "dbtrimkv", "kv": "auto", "draw": "greedy"}
    return usual | {"family": "qwen3_vl", "weights": "auto"} | own


# Every policy, each with the next family and draw; then what last bits may round otherwise, such as
# the norms of keys, which are alike wherever the same token stands.
QUICK = [*(name for name in KINDS if name != "knorm"), "wgkv"]
ROWS = [
    row(policy=policy, family=FAMILIES[at % len(FAMILIES)], draw=list(DRAWS)[at % 3])
    for at, policy in enumerate([*QUICK, *(name for name in ALL if name not in (*QUICK, "knorm"))])
] + [row(policy="fastv")]
ROUNDED = [row(dtype=d, policy=p) for d in ("bfloat16", "float16") for p in ("dbtrimkv", "h2o")]
ROUNDED += [row(policy="knorm")] + [row(weights=form) for form in ("int8", "int4")]
ROUNDED += [
    row(kv=form, family=family)
    for form, family in (("bf16", "gemma3"), ("int8", "mistral"), ("k8v4", "qwen3_5_moe"))
] + [row(kv="int4", policy="keydiff")]
# Every kind of policy with every family; dtypes, forms and draws in turn.
KV = ["auto", "int8", "k8v4", "bf16", "int4"]
ALL_PAIRS = [
    row(
        policy=policy,
        family=family,
        kv=KV[(i + j) % 5],
        draw=list(DRAWS)[(i + 2 * j) % 3],
        dtype=["float32", "bfloat16", "float16"][(i + j // 2) % 3],
    )
    for i, policy in enumerate(KINDS)
    for j, family in enumerate(FAMILIES)
]


def name_of(made: dict[str, Any]) -> str:
    return "-".join(made.values())


@one_in(3)
@pytest.mark.parametrize(
    "made", long_but(ROWS[: len(QUICK)] + ROWS[-1:], ROWS, "every kind is enough"), ids=name_of
)
def test_a_gpu_says_and_keeps_what_a_cpu_does(
    made: dict[str, Any], card: Device | None, tmp_path: Path
) -> None:
    ours, theirs = (life(tmp_path, device, made) for device in ("cuda", "cpu"))
    assert_alike(ours, theirs, card is not None, 1e-3)
    if card is not None:
        assert card.replays > 20


@one_in(2)
@pytest.mark.parametrize(
    "made", long_but([ROUNDED[at] for at in (0, 3, 5, 9)], ROUNDED, "one of a kind"), ids=name_of
)
def test_numbers_in_fewer_bits_are_as_close_as_they_can_be(
    made: dict[str, Any], card: Device | None, tmp_path: Path
) -> None:
    ours, theirs = (life(tmp_path, device, made) for device in ("cuda", "cpu"))
    assert_alike(ours, theirs, False, 0.1)


@pytest.mark.long("every kind of policy with every family")
@pytest.mark.parametrize("made", ALL_PAIRS, ids=name_of)
def test_any_settings_run_together(
    made: dict[str, Any], card: Device | None, tmp_path: Path
) -> None:
    exact = card is not None and (made["dtype"], made["kv"]) == ("float32", "auto")
    ours, theirs = (life(tmp_path, device, made) for device in ("cuda", "cpu"))
    assert_alike(ours, theirs, exact, 1e-3 if exact else 0.2)
