"""GraphRunner: sessions handed to the static step, replayed as a CUDA graph, and taken back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from mmkv.engine.backends.cuda.kernels.sample import Draw, columns_of
from mmkv.engine.backends.cuda.static_step import StaticStep
from mmkv.engine.device import exact_products, on_device
from mmkv.engine.errors import BROKEN, BudgetError, NotFiniteError

if TYPE_CHECKING:
    from mmkv.engine.runtime import Runtime
    from mmkv.engine.sequence import CachedSequence

MOST_STEPS = 256  # per replay: pages for all of them are set aside beforehand
_LEAST_ROOM = 256  # entries per row that tables and pages have room for at least
_WARM_UP = 2  # steps on idle batch slots, so that libraries allocate before the capture


class GraphRunner:
    """Decodes steps of an engine's sessions with no host work in between.

    One step object, and on CUDA one graph, per batch size (powers of two) and kind of draw. They
    are made anew when the pool or the block tables have grown, which therefore grow together and
    to twice their size: a reply of n tokens makes log2(n) of them.

    Graphs share what memory they need for a step: they run one after the other, and none reads
    what another left.

    Attributes:
        captures: steps made so far; graph_bytes: device memory that the graphs hold.
    """

    def __init__(self, engine: Runtime) -> None:
        self.engine = engine
        self.captures, self.graph_bytes = 0, 0
        self._memory: Any = None  # of all graphs, while there are any
        self._steps: dict[tuple[object, ...], tuple[StaticStep, torch.cuda.CUDAGraph | None]] = {}

    @torch.inference_mode()
    def decode(
        self,
        sessions: Sequence[CachedSequence],
        token_ids: Sequence[int],
        steps: int,
        stop: Sequence[int] = (),
        draws: Sequence[Draw] | None = None,
    ) -> list[list[int]]:
        """Append a token to each session, then each token it says, ``steps`` times in all.

        Args:
            stop: tokens that end a session's part; they are generated, not appended.
            draws: per session how its tokens are drawn, None for the likeliest.

        Returns:
            per session the generated tokens: ``steps`` of them, or up to a stop token.

        Raises:
            BudgetError: the pool would pass its limit; the steps before that are kept.
            NotFiniteError: logits were not finite; holds what was generated.
        """
        with on_device(self.engine.device), exact_products(self.engine.device):
            return self._decode(sessions, token_ids, steps, tuple(stop), draws)

    def _decode(
        self,
        sessions: Sequence[CachedSequence],
        token_ids: Sequence[int],
        steps: int,
        stop: tuple[int, ...],
        draws: Sequence[Draw] | None,
    ) -> list[list[int]]:
        generated: list[list[int]] = [[] for _ in sessions]
        going = list(range(len(sessions)))
        token = list(token_ids)
        drawn = None if draws is None else list(draws)
        for start in range(0, steps, MOST_STEPS):
            part = self._replay(
                [sessions[i] for i in going],
                [token[i] for i in going],
                min(MOST_STEPS, steps - start),
                stop,
                None if drawn is None else [drawn[i] for i in going],
            )
            for index, tokens in zip(going, part, strict=True):
                generated[index] += tokens
                token[index] = tokens[-1]
                if drawn is not None:
                    drawn[index] = drawn[index].after([one for one in tokens if one >= 0])
            going = [index for index in going if generated[index][-1] not in (*stop, BROKEN)]
            if not going:
                break
        if any(row[-1:] == [BROKEN] for row in generated):
            raise NotFiniteError(generated)
        return generated

    def _replay(
        self,
        sessions: Sequence[CachedSequence],
        token_ids: Sequence[int],
        steps: int,
        stop: tuple[int, ...],
        draws: Sequence[Draw] | None,
    ) -> list[list[int]]:
        cache = self.engine.cache
        most = self._make_room(sessions, steps)
        batch = _power_of_two(len(sessions))
        penalised = draws is not None and any(draw.penalises for draw in draws)
        step, graph = self._step(batch, stop, draws is not None, most, penalised)
        self._fill(step, sessions, token_ids, draws)
        try:
            for _ in range(steps):
                if graph is None:
                    step.run()
                else:
                    graph.replay()
        finally:
            # The first read from the device since the replay began.
            cache.pool._free = int(step.top)
            seen, entries = step.seen.tolist(), cache.length.flatten(1).sum(1).tolist()
            nan = step.evicted_nan.tolist()
            for batch_slot, session in enumerate(sessions):
                tokens = seen[batch_slot] - session.seen
                session.count_burst(tokens, entries[session.seq], nan[batch_slot])
        if int(step.room.error):
            raise BudgetError("the page pool was too small for a step; this is a bug in mmkv")
        if int(step.least_dropped.min()) < 0:
            raise BudgetError(
                "a session has more entries than the eviction on the GPU was made for and stands "
                "above its budget; this is a bug in mmkv, decode it step by step"
            )
        rows = step.generated[: len(sessions), :steps].tolist()
        made = [[token for token in row if token != -1] for row in rows]
        for session, token, row in zip(sessions, token_ids, made, strict=True):
            session.note_ids([token, *row[:-1]])  # what came last has not been appended
        return made

    def _make_room(self, sessions: Sequence[CachedSequence], steps: int) -> int:
        """Pages and table columns for all steps, so that nothing has to grow in between.

        Returns:
            the most entries that eviction will meet in one session, 1 where nothing is evicted.
        """
        cache, pool = self.engine.cache, self.engine.cache.pool
        longest = int(cache.length[[session.seq for session in sessions]].max())
        room = max(_power_of_two(longest + steps), _LEAST_ROOM)
        # No row becomes longer than the context, which a caller has seen to for these steps.
        ahead = max(min(room, self.engine.spec.max_position) - longest, steps)
        (pages, _), (wanted, largest) = (self._bound(sessions, n) for n in (steps, ahead))
        columns = -(-(longest + steps) // pool.page_size)
        # Together, and before the first capture: each of them alone would cost another one.
        if not self._steps or pages > pool.free_pages or columns > cache.table.shape[-1]:
            pool.require(pages)
            pool.prepare(wanted)
            pool.reserve(pages)
            cache._widen(-(-(longest + ahead) // pool.page_size))
        return largest if self.engine.policy.evicts else 1

    def _bound(self, sessions: Sequence[CachedSequence], steps: int) -> tuple[int, int]:
        """Bound what so many steps take: pages beside those held, entries of one session."""
        engine, cache = self.engine, self.engine.cache
        size, rows = cache.pool.page_size, engine.spec.rows
        pages, largest = 0, 0
        for session in sessions:
            most = session.entries + steps * rows
            if engine.policy.evicts:
                budget = engine.budgets.allowed(session.budget, session.seen + steps)
                kept = max(budget + engine.slack, session.entries) + rows
                most = min(most, kept)
            largest = max(largest, most)
            pages += (most + rows * (size - 1)) // size - cache.held_pages(session.seq)
        return max(pages, 0), largest

    def _step(
        self,
        batch: int,
        stop: tuple[int, ...],
        drawn: bool,
        entries: int,
        penalised: bool = False,
    ) -> tuple[StaticStep, torch.cuda.CUDAGraph | None]:
        key = (batch, stop, drawn, penalised)
        known = self._steps.get(key)
        if known is None or not known[0].fits(entries):
            # Graphs of the old pool go first: they hold its memory.
            self._steps = {k: v for k, v in self._steps.items() if k != key and v[0].fits()}
            del known
            most = _power_of_two(entries)  # captures are slow: room to grow
            step = StaticStep(self.engine, batch, MOST_STEPS, stop, drawn, most, penalised)
            known = self._steps[key] = (step, self._captured(step))
            self.captures += 1
        return known

    def _captured(self, step: StaticStep) -> torch.cuda.CUDAGraph | None:
        """Capture the step as a graph; None on a CPU. All slots are idle, so nothing changes."""
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
        graph = torch.cuda.CUDAGraph()
        torch.cuda.empty_cache()  # as a capture does, so that only what it takes is counted
        before = torch.cuda.memory_reserved(step.seqs.device)
        with torch.cuda.graph(graph, pool=self._memory):
            step.run()
        self.graph_bytes += max(torch.cuda.memory_reserved(step.seqs.device) - before, 0)
        return graph

    def _fill(
        self,
        step: StaticStep,
        sessions: Sequence[CachedSequence],
        token_ids: Sequence[int],
        draws: Sequence[Draw] | None,
    ) -> None:
        idle = [0] * (step.batch - len(sessions))
        columns = {
            "seqs": [session.seq for session in sessions] + [-1] * len(idle),
            "token": [*token_ids, *idle],
            "seen": [session.seen for session in sessions] + idle,
            "rope_position": [session.next_position for session in sessions] + idle,
        }
        for name, values in columns.items():
            getattr(step, name).copy_(torch.tensor(values))
        for batch_slot, session in enumerate(sessions):
            step.set_budget(batch_slot, session.budget)
        step.top.fill_(self.engine.cache.pool.free_pages)
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
