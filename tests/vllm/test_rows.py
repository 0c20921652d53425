"""The worker's side without vLLM: the engine's decoder runs passes, a scheduler gives blocks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from mmkv.engine.backends.torch import step as torch_step
from mmkv.engine.cache.forms import KVForm
from mmkv.engine.cache.layout import Layout
from mmkv.engine.errors import PolicyError
from mmkv.engine.runtime import Runtime
from mmkv.vllm.ranks import Ranks
from mmkv.vllm.rows import Arrival, HeldRequest, Pass, WorkerRows
from mmkv.vllm.settings import Settings, blocks_of, entry_size
from tests.support.model_configs import Checkpoint
from tests.support.sessions import save_checkpoint
from tests.support.tiers import long_but

CHUNK, PAGE = 24, 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = Checkpoint("qwen3", 4, 2, 32, layers=3)
    return save_checkpoint(model, tmp_path_factory.mktemp("qwen3"))


def engine_of(folder: Path, policy: str = "dbtrimkv", budget: int = 20, **more: Any) -> Runtime:
    return Runtime.from_pretrained(
        folder,
        **{
            "policy": policy,
            "gates": "random",
            "budget": budget,
            "dtype": "float32",
            "prefill_chunk": CHUNK,
            "page_size": PAGE,
            **more,
        },
    )


def settings_of(engine: Runtime, ranks: int = 1) -> Settings:
    """Return what the plugin would read for an engine's settings."""
    pool, policy = engine.cache.pool, engine.policy
    layout = Layout(PAGE, engine.spec.head_dim, engine.dtype, pool.form, pool.state_size)
    allowed = engine.budgets.allowed(engine.budget, 0)
    gates = engine.decoder.gates
    return Settings(engine.spec, policy, gates, layout, allowed, engine.interval, 8 * CHUNK, ranks)


@dataclass(eq=False)
class Request:
    """A request of the scheduler below."""

    prompt: list[int]
    more: list[int]
    seen: int = 0
    blocks: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    held: HeldRequest | None = None

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.more


class Worker:
    """Runs passes as vLLM would: blocks by number, no word of who has ended."""

    def __init__(self, engine: Runtime, blocks: int, ranks: int = 1) -> None:
        self.engine, self.settings = engine, settings_of(engine, ranks)
        blocks += self.settings.reserve
        size = blocks * self.settings.local.rows * PAGE * entry_size(self.settings.layout)
        self.raw = torch.zeros(size, dtype=torch.int8)
        self.rows = WorkerRows(self.raw, blocks, self.settings, Ranks())
        self.free = list(range(blocks - 1, self.settings.reserve, -1))

    def admit(self, request: Request, new: int) -> None:
        wanted = blocks_of(request.seen + new, self.settings.most, PAGE)
        while len(request.blocks) < wanted:
            request.blocks.append(self.free.pop())

    def end(self, request: Request) -> None:
        self.free += request.blocks
        request.blocks = []

    def run(self, requests: Sequence[Request]) -> None:
        """Run one pass: a chunk of each prompt, a token of each reply."""
        counts = []
        for one in requests:
            left = len(one.prompt) - one.seen
            counts.append(min(left, CHUNK) if left > 0 else 1)
            self.admit(one, counts[-1])
        arrivals = [
            Arrival(one.seen, new, one.blocks, one.seen < len(one.prompt))
            for one, new in zip(requests, counts, strict=True)
        ]
        step = Step(self.rows.begin(arrivals))
        decoder = self.engine.decoder
        decoder.on_gate_input = step.note
        ids = [
            torch.tensor(one.tokens[one.seen : one.seen + n])
            for one, n in zip(requests, counts, strict=True)
        ]
        where = [
            torch.arange(one.seen, one.seen + n) for one, n in zip(requests, counts, strict=True)
        ]
        rope = self.engine.rope.text(torch.cat(where), False)
        hidden, _ = decoder.forward(decoder.embed(torch.cat(ids)), rope, step)
        logits = decoder.logits(hidden)
        for one, new, end in zip(requests, counts, torch.tensor(counts).cumsum(0) - 1, strict=True):
            one.seen += new
            if one.seen >= len(one.prompt):
                one.logits.append(logits[end])
        for one, held in zip(requests, step.now.held, strict=True):
            one.held = held
            pages = self.rows.cache.held_pages(held.seq)
            assert pages <= len(one.blocks) * self.settings.local.rows


class Step:
    """A pass as the engine's decoder calls it."""

    def __init__(self, now: Pass) -> None:
        self.now = now
        self.hidden: Tensor | None = None

    def note(self, layer: int, hidden: Tensor) -> None:
        self.hidden = hidden

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.now.attend(layer, query, key, value, self.hidden)


def kept(rows: WorkerRows, held: HeldRequest | None) -> list[list[int]]:
    assert held is not None
    entries = rows.cache.entries(held.seq)
    position = rows.cache.pool.position.flatten()[entries.slot]
    return [sorted(position[entries.row == row].tolist()) for row in range(rows.spec.rows)]


def requests_of(lengths: Sequence[int], steps: int) -> list[Request]:
    generator = torch.Generator().manual_seed(5)
    made = []
    for length in lengths:
        ids = (3 + torch.randperm(145, generator=generator)).tolist()
        made.append(Request(ids[:length], ids[length : length + steps]))
    return made


def beside_the_engine(worker: Worker, request: Request) -> None:
    """Compare kept entries exactly, and logits."""
    with worker.engine.session() as session:
        ids = torch.tensor([request.prompt])
        turn = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        ours = [session.prefill(turn).flatten()]
        ours += [session.decode(token) for token in request.more[: len(request.logits) - 1]]
        assert kept(worker.rows, request.held) == [
            one.tolist() for layer in session.retained() for one in layer
        ]
        # The engine runs in C here: a last bit may round a key to the next code.
        rounded = worker.settings.layout.form.name != "auto"
        most = (1e-2 if rounded else 1e-5) * torch.stack(ours).abs().max()
        assert (torch.stack(ours) - torch.stack(request.logits)).abs().max() <= most


# One budget, times of eviction, a lookahead, a budget a row; scores of places, of keys, of queries,
# summed up; codes.
SETTINGS: list[dict[str, Any]] = [
    {},
    {"evict_every": 4},
    {"policy": "dbtrimkv+6"},
    {"policy": "trimkv"},
    {"policy": "streamingllm"},
    {"policy": "keydiff"},
    {"policy": "snapkv:window=8"},
    {"policy": "h2o"},
    {"kv": "int4"},
]
LIKE_THESE: list[dict[str, Any]] = [{"policy": name} for name in ("knorm", "lagkv", "pyramidkv")]
LIKE_THESE += [{"kv": form} for form in ("int8", "bf16")]


@pytest.mark.parametrize(
    "settings",
    SETTINGS + long_but((), LIKE_THESE, "scored, stored or shared out as one of the others"),
    ids=str,
)
@torch.inference_mode()
def test_requests_keep_what_the_engine_keeps(settings: dict[str, Any], folder: Path) -> None:
    worker = Worker(engine_of(folder, **settings), 60)
    waiting = requests_of([40, 7, 75, 61, 98, 24, 49], 12)
    running: list[Request] = []
    while waiting or running:  # one more begins with every pass
        running += [waiting.pop(0)] if waiting else []
        worker.run(running)
        for one in [one for one in running if one.seen == len(one.tokens)]:
            beside_the_engine(worker, one)
            worker.end(one)
            running.remove(one)


@torch.inference_mode()
def test_requests_that_come_and_go_leave_no_page_behind(folder: Path) -> None:
    worker = Worker(engine_of(folder), 30)
    total = worker.rows.cache.pool.free_pages
    for round_ in range(60):
        batch = requests_of([30 + round_ % 40, 50], 2)
        for _ in range(3):
            worker.run(batch)
        for one in batch:
            worker.end(one)
        used = total - worker.rows.cache.pool.free_pages
        live = sum(worker.rows.cache.held_pages(held.seq) for held in worker.rows.requests)
        assert used == live <= 29 * worker.settings.spec.rows
    assert worker.rows.cache.open_count == len(worker.rows.requests) <= 30


@torch.inference_mode()
def test_a_request_that_lost_its_blocks_begins_again(folder: Path) -> None:
    worker = Worker(engine_of(folder), 40)
    first, other = requests_of([75, 40], 6)
    for _ in range(4):
        worker.run([first])
    worker.end(first)  # preempted: vLLM computes it again
    worker.run([other])
    first.seen, first.logits = 0, []
    while first.seen < len(first.tokens):
        worker.run([first])
    beside_the_engine(worker, first)


@pytest.mark.parametrize("kv", ["auto", "int8"])
@torch.inference_mode()
def test_kernels_read_entries_with_gaps_unless_they_are_codes(
    kv: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker(engine_of(folder, kv=kv), 30)
    assert not worker.rows.cache.pool.keys.is_contiguous()
    monkeypatch.setattr(torch_step, "on_triton", lambda tensor: True)
    kernels = []  # their references, on a CPU
    for name in ("prefill_attention", "decode_attention"):
        kernels.append(Mock(wraps=getattr(torch_step, name)))
        monkeypatch.setattr(torch_step, name, kernels[-1])
    requests = requests_of([75, 40], 6)
    while any(one.seen < len(one.tokens) for one in requests):
        worker.run([one for one in requests if one.seen < len(one.tokens)])
    assert [kernel.called for kernel in kernels] == [kv == "auto"] * 2
    for one in requests:
        beside_the_engine(worker, one)


def test_gates_that_are_shown_nothing_are_no_reason_to_keep_all(folder: Path) -> None:
    rows = Worker(engine_of(folder), 20).rows
    with pytest.raises(PolicyError, match="choose a policy without gates"):
        rows.log_beta(0, None)


def test_memory_holds_the_entries_side_by_side(folder: Path) -> None:
    worker = Worker(engine_of(folder, kv="int4"), 5)
    worker.raw.fill_(0)
    pool = worker.rows.cache.pool
    for number, column in enumerate(pool.columns(), 1):
        column.fill_(number)
    for number, column in enumerate(pool.columns(), 1):  # none overlaps another
        assert bool((column == number).all())
    layout = worker.settings.layout
    assert len(worker.raw) == (
        5 + worker.settings.reserve
    ) * worker.settings.spec.rows * PAGE * entry_size(layout)
    assert entry_size(layout) - layout.entry_bytes() < 24


@pytest.mark.parametrize("policy", ["dbtrimkv", "trimkv", "snapkv:window=8", "adakv"])
@torch.inference_mode()
def test_two_ranks_keep_what_one_keeps(policy: str, folder: Path) -> None:
    worker = Worker(engine_of(folder, policy), 60)
    (request,) = requests_of([75], 10)
    seen: list[tuple[int, list[tuple[Tensor, ...]]]] = []  # tokens, and what each layer was given
    original = Pass.attend

    def noted(now: Pass, layer: int, *given: Tensor) -> Tensor:
        if layer == 0:
            seen.append((given[0].shape[0], []))
        seen[-1][1].append(given)
        return original(now, layer, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pass, "attend", noted)
        while request.seen < len(request.tokens):
            worker.run([request])
    both, failed = Gather(2), []
    ranks = [Ranks(rank, 2, both.of(rank)) for rank in range(2)]
    settings = settings_of(worker.engine, 2)
    raw = [torch.zeros_like(worker.raw) for _ in ranks]
    made = [
        WorkerRows(memory, 2 * 60, settings, rank) for memory, rank in zip(raw, ranks, strict=True)
    ]

    def run(rows: WorkerRows) -> None:
        try:
            with torch.inference_mode():
                at = 0
                for tokens, layers in seen:
                    blocks = range(1, 1 + blocks_of(at + tokens, settings.most, PAGE))
                    now = rows.begin([Arrival(at, tokens, list(blocks), at < len(request.prompt))])
                    for layer, (query, key, value, hidden) in enumerate(layers):
                        own = [x.chunk(2, 1)[rows.ranks.rank] for x in (query, key, value)]
                        now.attend(layer, *own, hidden)
                    at += tokens
        except BaseException as error:
            failed.append(error)
            both.barrier.abort()

    threads = [threading.Thread(target=run, args=(rows,)) for rows in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed
    heads = worker.engine.spec.num_kv_heads
    parts = [kept(rows, rows.requests[0]) for rows in made]
    joined = [
        row
        for layer in range(worker.engine.spec.entry_layers)
        for part in parts
        for row in part[layer * (heads // 2) : (layer + 1) * (heads // 2)]
    ]
    assert joined == kept(worker.rows, request.held)
    for rows in made:
        pages = rows.cache.held_pages(rows.requests[0].seq)
        assert pages <= len(rows.requests[0].blocks) * settings.local.rows


class Gather:
    """Gathers tensors of threads, each of which stands for a rank."""

    def __init__(self, size: int) -> None:
        self.barrier, self.parts = threading.Barrier(size), [torch.empty(0)] * size

    def of(self, rank: int) -> Callable[[Tensor], Tensor]:
        def gather(values: Tensor) -> Tensor:
            self.parts[rank] = values
            self.barrier.wait(60)
            made = torch.cat(self.parts)
            self.barrier.wait(60)
            return made

        return gather


def test_a_block_more_for_every_page_of_tokens_until_the_bound() -> None:
    assert [blocks_of(tokens, 40, 8) for tokens in (1, 8, 9, 40, 41, 48, 10**9)] == [
        1,
        1,
        2,
        5,
        6,
        6,
        6,
    ]


def test_a_rank_has_room_for_what_a_group_may_keep_on_it(folder: Path) -> None:
    one = settings_of(engine_of(folder, "dbtrimkv"))
    assert one.most == 20
    assert replace(one, ranks=2).most == 40  # all of the budget on one of two ranks
    assert replace(settings_of(engine_of(folder, "trimkv")), ranks=2).most == 20
    assert replace(one, interval=replace(one.interval, steps=4)).most == 23


def test_forms_need_no_more_than_their_codes() -> None:
    layout = Layout(16, 128, torch.bfloat16, KVForm.of("auto", torch.bfloat16, 128))
    assert entry_size(layout) == 528  # 2 x 256 of key and value, 9 of what mmkv keeps, rounded up
