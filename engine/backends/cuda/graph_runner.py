"""GraphRunner: sequences handed to the static step, replayed as a CUDA graph, and taken back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mmkv.engine.backends.base import Batch, Burst, LoadedModel
from mmkv.engine.backends.cuda.kernels.sample import Draw, columns_of
from mmkv.engine.backends.cuda.static_step import StaticStep
from mmkv.engine.budget import Budget
from mmkv.engine.cache import RaggedCache
from mmkv.engine.errors import BROKEN, BudgetError
from mmkv.engine.system import exact_products, on_device

# Of one step: with what cuts to a budget, and without it where not each step evicts.
Graphs = dict[bool, torch.cuda.CUDAGraph]
MOST_STEPS = 256  # per replay: pages for all of them are set aside beforehand
_LEAST_ROOM = 256  # entries per row that tables and pages have room for at least
_WARM_UP = 2  # steps on idle batch slots, so that libraries allocate before the capture


class GraphRunner:
    """Decodes steps of several sequences with no host work in between.

    One step object, and on CUDA one graph, per batch size (powers of two) and kind of draw. They
    are made anew when the pool or the block tables have grown, which therefore grow together and
    to twice their size: a reply of n tokens makes log2(n) of them.

    Graphs share what memory they need for a step: they run one after the other, and none reads
    what another left.

    Attributes:
        captures: steps made so far; graph_bytes: device memory that the graphs hold.
    """

    def __init__(self, model: LoadedModel, cache: RaggedCache) -> None:
        self.model, self.cache = model, cache
        self.captures, self.graph_bytes = 0, 0
        self._memory: Any = None  # of all graphs, while there are any
        self._steps: dict[tuple[object, ...], tuple[StaticStep, Graphs | None]] = {}

    @torch.inference_mode()
    def decode(
        self,
        batch: Batch,
        burst: Burst,
        steps: int,
        stop: Sequence[int] = (),
        draws: Sequence[Draw] | None = None,
    ) -> None:
        """Do what :meth:`mmkv.engine.backends.base.Backend.decode_many` says, by replays."""
        going, token = list(range(len(batch.seqs))), list(batch.tokens)
        drawn = None if draws is None else list(draws)
        device = self.cache.length.device
        with on_device(device), exact_products(device):
            for start in range(0, steps, MOST_STEPS):
                count = min(MOST_STEPS, steps - start)
                part = self._replay(batch, burst, going, token, count, tuple(stop), drawn)
                for index, tokens in zip(going, part, strict=True):
                    burst.generated[index] += tokens
                    token[index] = tokens[-1]
                    if drawn is not None:
                        drawn[index] = drawn[index].after([one for one in tokens if one >= 0])
                going = [i for i in going if burst.generated[i][-1] not in (*stop, BROKEN)]
                if not going:
                    break

    def _replay(
        self,
        batch: Batch,
        burst: Burst,
        going: Sequence[int],
        token: Sequence[int],
        steps: int,
        stop: tuple[int, ...],
        draws: Sequence[Draw] | None,
    ) -> list[list[int]]:
        """Append up to ``steps`` tokens to the sequences that are ``going``; those they say."""
        cache = self.cache
        most, row = self._make_room(batch, burst, going, steps)
        count = _power_of_two(len(going))
        own = None if draws is None else [draws[index] for index in going]
        penalised = own is not None and any(draw.penalises for draw in own)
        step, graphs = self._step(count, stop, own is not None, most, penalised, row)
        self._fill(step, batch, burst, going, token, own)
        if step.policy_step is not None:
            allowed = [self._allowed(batch, burst, index, steps) for index in going]
            step.policy_step.plan(allowed, [batch.prompt_tokens[index] for index in going])
        due = self._due(batch, burst, going, steps)
        try:
            for cut in due:
                if graphs is None:
                    step.run(cut)
                else:
                    graphs[cut].replay()
        finally:
            # The first read from the device since the replay began.
            cache.pool.free_pages = int(step.top)
            seen, entries = step.seen.tolist(), cache.length.flatten(1).sum(1).tolist()
            nan = step.evicted_nan.tolist()
            for batch_slot, index in enumerate(going):
                before = burst.appended[index]
                burst.appended[index] = seen[batch_slot] - batch.seen[index]
                if step.log_beta is not None:
                    made = step.log_beta[batch_slot, : burst.appended[index] - before]
                    burst.log_beta[index].append(made.clone())
                burst.entries[index] = entries[batch.seqs[index]]
                burst.nan[index] += nan[batch_slot]
        if int(step.room.error):
            raise BudgetError("the page pool was too small for a step; this is a bug in mmkv")
        if int(step.least_dropped.min()) < 0:
            raise BudgetError(
                "a session has more entries than the eviction on the GPU was made for and stands "
                "above its budget; this is a bug in mmkv, decode it step by step"
            )
        rows = step.generated[: len(going), :steps].tolist()
        return [[token for token in row if token != -1] for row in rows]

    def _make_room(
        self, batch: Batch, burst: Burst, going: Sequence[int], steps: int
    ) -> tuple[int, int]:
        """Pages and table columns for all steps, so that nothing has to grow in between.

        Returns:
            the most entries that eviction will meet in one sequence, 1 where nothing is evicted;
            the most of one row in any of the steps.
        """
        cache, pool = self.cache, self.cache.pool
        longest = int(cache.length[[batch.seqs[index] for index in going]].max())
        room = max(_power_of_two(longest + steps), _LEAST_ROOM)
        # No row becomes longer than the context, which a caller has seen to for these steps.
        ahead = max(min(room, self.model.spec.max_position) - longest, steps)
        (pages, _), (wanted, largest) = (
            self._bound(batch, burst, going, count) for count in (steps, ahead)
        )
        columns = -(-(longest + steps) // pool.page_size)
        # Together, and before the first capture: each of them alone would cost another one.
        if not self._steps or pages > pool.free_pages or columns > cache.table.shape[-1]:
            pool.require(pages)
            pool.prepare(wanted)
            pool.reserve(pages)
            cache._widen(-(-(longest + ahead) // pool.page_size))
        row = min(longest + steps, max(largest, longest))
        return largest if self.model.policy.evicts else 1, row

    def _due(self, batch: Batch, burst: Burst, going: Sequence[int], steps: int) -> list[bool]:
        """Say for each step whether a sequence may have to be cut to its budget.

        Rows grow by one entry a step and are cut to their shares, so the host knows it beforehand;
        not what write gates refuse.
        """
        policy, interval = self.model.policy, self.model.interval
        if interval.steps == 1 or not policy.evicts or policy.admission is not None:
            return [True] * steps
        layers, heads = self.cache.length.shape[1:]
        rows, due = layers * heads, [False] * steps
        length = self.cache.length[[batch.seqs[index] for index in going]].flatten(1).cpu()
        for index, held in zip(going, length, strict=True):
            allowed = self._allowed(batch, burst, index, steps)
            for n in range(steps):
                if n < len(allowed):
                    share = policy.shares(allowed[n], layers, heads).share
                    above = interval.above(allowed[n], rows)
                if not n:
                    held = held.view(share.numel(), -1).sum(1)
                each = rows // share.numel()
                held = held + each
                if bool((held > share + above * each).any()):
                    due[n], held = True, torch.minimum(held, share)
        return due

    def _allowed(self, batch: Batch, burst: Burst, index: int, steps: int) -> list[int]:
        """What a sequence may keep after each of the steps, or one number for all of them."""
        rows, share = self.model.spec.rows, batch.share[index]
        if not share:
            return [batch.allowed[index]]
        kept = batch.prompt_tokens[index] * rows if self.model.policy.keeps_prompt else 0
        seen, budget = batch.seen[index] + burst.appended[index], Budget.fraction(share)
        return [budget.entries(rows, seen + n + 1, 0, 0) + kept for n in range(steps)]

    def _bound(
        self, batch: Batch, burst: Burst, going: Sequence[int], steps: int
    ) -> tuple[int, int]:
        """Bound what so many steps take: pages beside those held, entries of one sequence."""
        cache, rows = self.cache, self.model.spec.rows
        size = cache.pool.page_size
        pages, largest = 0, 0
        for index in going:
            entries = burst.entries[index]
            most = entries + steps * rows
            if self.model.policy.evicts:
                allowed = self._allowed(batch, burst, index, steps)[-1]
                slack = self.model.interval.slack(allowed, rows)
                most = min(most, max(allowed + slack, entries) + rows)
            largest = max(largest, most)
            pages += (most + rows * (size - 1)) // size - cache.held_pages(batch.seqs[index])
        return max(pages, 0), largest

    def _step(
        self,
        batch: int,
        stop: tuple[int, ...],
        drawn: bool,
        entries: int,
        penalised: bool = False,
        row: int = 1,
    ) -> tuple[StaticStep, Graphs | None]:
        key = (batch, stop, drawn, penalised)
        known = self._steps.get(key)
        if known is None or not known[0].fits(entries, row):
            # Graphs of the old pool go first: they hold its memory.
            self._steps = {k: v for k, v in self._steps.items() if k != key and v[0].fits()}
            del known
            # Captures are slow: room to grow.
            most, part = _power_of_two(entries), max(_power_of_two(row) // 8, _LEAST_ROOM // 8)
            cells = -(-row // part) * part
            step = StaticStep(
                self.model, self.cache, batch, MOST_STEPS, stop, drawn, most, penalised, cells
            )
            known = self._steps[key] = (step, self._captured(step))
            self.captures += 1
        return known

    def _captured(self, step: StaticStep) -> Graphs | None:
        """Capture the step as graphs; None on a CPU. All slots are idle, so nothing changes."""
        if step.seqs.device.type != "cuda":
            return None
        if not self._steps:  # a memory that no graph uses any more cannot be taken up again
            self._memory, self.graph_bytes = torch.cuda.graph_pool_handle(), 0
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP):
                step.run()
                step.index.zero_()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.empty_cache()  # as a capture does, so that only what it takes is counted
        before = torch.cuda.memory_reserved(step.seqs.device)
        graphs = {}
        for cut in (True, False) if self.model.interval.steps > 1 else (True,):
            graphs[cut] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[cut], pool=self._memory):
                step.run(cut)
        self.graph_bytes += max(torch.cuda.memory_reserved(step.seqs.device) - before, 0)
        return graphs

    def _fill(
        self,
        step: StaticStep,
        batch: Batch,
        burst: Burst,
        going: Sequence[int],
        token: Sequence[int],
        draws: Sequence[Draw] | None,
    ) -> None:
        idle = [0] * (step.batch - len(going))
        columns = {
            "seqs": [batch.seqs[i] for i in going] + [-1] * len(idle),
            "token": [token[i] for i in going] + idle,
            "seen": [batch.seen[i] + burst.appended[i] for i in going] + idle,
            "rope_position": [batch.next_position[i] + burst.appended[i] for i in going] + idle,
            "allowed": [batch.allowed[i] for i in going] + idle,
            "share": [batch.share[i] for i in going] + idle,
        }
        for name, values in columns.items():
            column = getattr(step, name)
            column.copy_(torch.tensor(values, dtype=column.dtype))
        step.top.fill_(self.cache.pool.free_pages)
        step.index.zero_()
        step.evicted_nan.zero_()
        step.generated.fill_(-1)
        step.room.error.zero_()
        step.least_dropped.zero_()
        if draws is not None and step.columns is not None:
            settings, seed = columns_of(draws, step.seqs.device)
            for name, column in vars(settings).items():
                getattr(step.columns, name)[: len(draws)] = column
            step.seed[: len(draws)] = seed
            if step.said is not None:
                step.said.fill(draws)


def _power_of_two(count: int) -> int:
    """Return the smallest power of two from ``count`` on."""
    return 1 << (count - 1).bit_length()
