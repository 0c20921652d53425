"""The contract of a backend: a batch of plain values in, logits and counts out.

The core (steps, budgets, prefill) turns its sequences into a :class:`Batch` and applies the
:class:`Counts` to them; a backend knows neither sequences nor the runtime, only the model and the
cache that it was made with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import Tensor

from mmkv.engine.budget import EVERY_STEP, Interval
from mmkv.engine.scorer_state import (
    POSITIONS,
    WindowAttention,
    store_positions,
    view_of,
    window_attention,
)

if TYPE_CHECKING:
    from mmkv.engine.backends.cuda.kernels.sample import Draw
    from mmkv.engine.backends.torch.write_step import WriteGatePass
    from mmkv.engine.cache import Entries, RaggedCache
    from mmkv.engine.model.decoder import Decoder
    from mmkv.engine.model.gates import WriteGates
    from mmkv.engine.model.rope import Rope
    from mmkv.engine.model.spec import DecoderSpec
    from mmkv.engine.policies.base import CacheView, Needs, Policy

# Why only torch runs a decoder that is ``hosted``.
HOSTED = "the forward pass is transformers'"
# Attends from the last T tokens of a chunk: (cache, seq, layer, query) -> [T, Hq D].
ChunkFunction = Callable[["RaggedCache", int, int, Tensor], Tensor]


@dataclass
class LoadedModel:
    """What a backend runs: the decoder, and what the policy asks of each pass.

    Attributes:
        needs: what steps have to leave behind for the scorer.
        write_gates: of a policy with an admission, else None.
        interval: when sequences are cut while they decode.
        never_chosen: int64 ids of tokens that no reply may hold.
        shared: whether all sessions share one budget, which is cut to outside of steps.
        has_on_append, has_on_step: whether the scorer gives new entries their state, and changes
            that of all entries after a step.
    """

    device: torch.device
    spec: DecoderSpec
    decoder: Decoder
    rope: Rope
    policy: Policy
    needs: Needs
    write_gates: WriteGates | None
    interval: Interval
    never_chosen: Tensor
    has_on_append: bool = False
    has_on_step: bool = False
    shared: bool = False

    def write_step(self, rope: tuple[Tensor, Tensor]) -> WriteGatePass | None:
        """Return the write gates of a pass whose tokens have these rope angles; None without."""
        if self.write_gates is None or self.policy.admission is None:
            return None
        # Its kernel belongs to a backend, which imports this module.
        from mmkv.engine.backends.torch.write_step import WriteGatePass

        return WriteGatePass(self.write_gates, self.policy.admission, rope, self.spec.rope.scale)

    def angles(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Compute cos and signed sin ``[B, rot]`` of the next token of each sequence."""
        device, long = self.device, list(batch.long_rope)
        where = torch.tensor(list(batch.next_position), device=device)
        if len(set(long)) == 1:
            return self.rope.text(where, long[0])
        chosen = torch.tensor(long, device=device)[:, None]
        short_cos, short_sin = self.rope.text(where, False)
        long_cos, long_sin = self.rope.text(where, True)
        return (
            torch.where(chosen, long_cos, short_cos),
            torch.where(chosen, long_sin, short_sin),
        )


@dataclass(slots=True)
class Batch:
    """B sequences of one cache in columns: what a backend may know of each, on the host.

    Sessions stay out, so that a backend can be tested with a batch made by hand. ``interval``,
    ``recorded`` and ``attention`` are of the whole batch; who asks for a burst, an eviction or a
    recording sets ``share``, ``attention`` and ``deaths`` after it is made.

    Attributes:
        seqs: their slots in the cache. Of a step one may stand several times in a row: its tokens
            follow each other, and nothing is evicted.
        seen: tokens whose entries have been appended, kept or not: the token index of the next.
        next_position: rope position of the next text token; long_rope: whether by the long factors.
        entries: that stand now, all rows together.
        allowed: entries that may stay, of a step once its token is appended.
        prompt_tokens: tokens that came in prompts.
        tokens: the ids that a step appends; empty for an eviction.
        interval: what is let be above ``allowed``.
        share: for budgets that are a part of the tokens seen this part, else 0; bursts alone read
            it: their budgets grow while they run.
        deaths: addresses, one a sequence, where C writes its victims as
            :data:`mmkv.engine.trace.DEATH`, at most :attr:`Backend.writes_deaths`; 0: nobody asks.
            Empty: nobody asks for any.
        recorded: indices of sequences whose scores and victims :attr:`Counts.scored` shall have.
        attention: computes what scorers ask for of the newest queries.
        bare: whether no scorer will ask for anything of the tokens, so that it may be left out.
    """

    seqs: Sequence[int]
    seen: Sequence[int]
    next_position: Sequence[int]
    long_rope: Sequence[bool]
    entries: Sequence[int]
    allowed: Sequence[int]
    prompt_tokens: Sequence[int]
    tokens: Sequence[int] = ()
    interval: Interval = EVERY_STEP
    share: Sequence[float] = ()
    deaths: Sequence[int] = ()
    recorded: Sequence[int] = ()
    attention: WindowAttention = window_attention
    bare: bool = False

    @property
    def runs(self) -> list[range]:
        """The indices that one sequence has, sequence after sequence."""
        starts = [at for at, seq in enumerate(self.seqs) if not at or seq != self.seqs[at - 1]]
        return [range(*ends) for ends in pairwise([*starts, len(self.seqs)])]

    def only(self, index: int) -> Batch:
        """Return the batch of one of the sequences, to be evicted from."""
        one = slice(index, index + 1)
        return Batch(
            self.seqs[one],
            self.seen[one],
            self.next_position[one],
            self.long_rope[one],
            self.entries[one],
            self.allowed[one],
            self.prompt_tokens[one],
            interval=self.interval,
            deaths=self.deaths[one],
            attention=self.attention,
        )

    def view(
        self, index: int, entries: Entries, cache: RaggedCache, model: LoadedModel
    ) -> CacheView:
        """Show policies the entries of the sequence with this index."""
        return view_of(
            cache,
            self.seqs[index],
            entries,
            self.seen[index],
            self.prompt_tokens[index],
            model.needs,
            self.attention,
            model.rope,
            bool(self.long_rope[index]),
        )

    def store_positions(self, cache: RaggedCache) -> None:
        """Keep the rope positions of the step's queries, if the scorer asks for them."""
        if POSITIONS in cache.memory:
            device = cache.length.device
            columns = self.seqs, self.seen, self.next_position
            seqs, position, where = (torch.tensor(list(x), device=device) for x in columns)
            store_positions(cache, seqs, position[:, None], where[None, :, None])


class Scored(NamedTuple):
    """The entries of a sequence before an eviction, their scores, and who went.

    Attributes:
        scores: float32 ``[N]``; victims: ``[K]`` indices into them; None: the backend has written
            the victims at the address in :attr:`Batch.deaths`.
    """

    view: CacheView
    scores: Tensor
    victims: Tensor | None


@dataclass(slots=True)
class Counts:
    """What has become of a batch; a backend fills it in as soon as it stands.

    So an interrupt that comes when the work is done loses nothing.

    Attributes:
        appended: tokens that each sequence has now beside those seen.
        dropped: entries that each lost; nan: those of them with a score that is NaN. Empty: none.
        uncut: indices of sequences that have not been cut to what is allowed.
        tried: whether the backend has tried to cut those, so that only others are asked.
        revised: whether the scorer has changed the state of all entries after the step.
        scored: of recorded sequences (:attr:`Batch.recorded`), where scores were made in torch.
        log_beta: float32 ``[S, B, layers, heads]`` of the entries appended in some steps, this one
            the last of them, or None without gates; step: which of the S it is. Set before
            ``appended``.
    """

    appended: int = 0
    dropped: Sequence[int] = ()
    nan: Sequence[int] = ()
    uncut: Sequence[int] = ()
    tried: bool = False
    revised: bool = False
    scored: dict[int, Scored] | None = None
    log_beta: Tensor | None = None
    step: int = 0

    def note(self, index: int, scored: Scored) -> None:
        """Add to :attr:`scored`."""
        self.scored = {**(self.scored or {}), index: scored}


@dataclass(slots=True)
class Burst:
    """What has become of a batch in a burst of steps; filled in as far as the burst came.

    Attributes:
        generated: per sequence the tokens chosen so far.
        appended: tokens that each sequence has now beside those seen.
        entries: that stand of each; nan: evicted of each with a score that is NaN.
        log_beta: per sequence float32 ``[T, rows]`` of the appended entries, in parts;
            empty without gates.
    """

    generated: list[list[int]]
    appended: list[int]
    entries: list[int]
    nan: list[int]
    log_beta: list[list[Tensor]]

    @classmethod
    def of(cls, batch: Batch) -> Burst:
        """Return that of a batch before its first step."""
        count = len(batch.seqs)
        entries, log_beta = list(batch.entries), [list[Tensor]() for _ in range(count)]
        return cls([[] for _ in range(count)], [0] * count, entries, [0] * count, log_beta)


class Backend:
    """Runs steps and evictions over one cache, bursts of steps, or both.

    :mod:`mmkv.engine.steps` asks for a step or a burst, :mod:`mmkv.engine.budgets` for an eviction
    outside of one. All of them read and change the same cache and keep the same entries, so they
    may take turns on one sequence. :data:`mmkv.engine.backends.BACKENDS` says who is asked first.

    Attributes:
        name: its folder; path: what ``decode_path`` says of what it runs.
        devices: where it runs.
        steps, bursts: what it does at all.
    """

    name: ClassVar[str]
    path: ClassVar[str]
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    steps: ClassVar[bool] = False
    bursts: ClassVar[bool] = False

    def __init__(self, model: LoadedModel, cache: RaggedCache) -> None:
        self.model, self.cache = model, cache

    def unsupported_reason(self, batch: Batch | None = None) -> str:
        """Say in a few words why it cannot decode a step of this batch; empty when it can.

        Without a batch: why of none, as far as model, policy and machine tell.
        """
        raise NotImplementedError

    def no_eviction_reason(self) -> str:
        """Say why it evicts for no sequence; empty when it does."""
        raise NotImplementedError

    @property
    def scores_in_torch(self) -> bool:
        """Whether it evicts by scores that the policy's own code computes."""
        return True

    @property
    def writes_deaths(self) -> int:
        """The most victims of a sequence that it writes down by itself.

        0: it hands them back in :attr:`Counts.scored`.
        """
        return 0

    def decode(self, batch: Batch, counts: Counts) -> Tensor:
        """Append one token to each sequence and compute float32 logits ``[B, vocab]``.

        Raises:
            BudgetError: the pool would pass its limit. Whatever is raised, entries beyond
                ``counts.appended`` tokens are the caller's to drop.
        """
        raise NotImplementedError

    def evict(self, batch: Batch, counts: Counts) -> None:
        """Cut the sequences to what is allowed.

        ``counts.uncut`` names those that are left, unchanged: another backend has to cut them.
        """
        raise NotImplementedError

    def burst_reason(self) -> str:
        """Say in a few words why it cannot decode bursts; empty when it can."""
        raise NotImplementedError

    def decode_many(
        self,
        batch: Batch,
        burst: Burst,
        steps: int,
        stop: Sequence[int] = (),
        draws: Sequence[Draw] | None = None,
    ) -> None:
        """Generate ``steps`` tokens for each sequence, the first after its token of the batch.

        Evictions are part of it.

        Args:
            stop: ids that end a sequence's reply; returned, but not appended to its cache.
            draws: per sequence how its tokens are drawn; None: the likeliest.

        Raises:
            BudgetError: the pool would pass its limit; the steps before that stand.
        """
        raise NotImplementedError

    @property
    def chunk_attention(self) -> ChunkFunction | None:
        """Its attention of a prompt's chunk; None where it has none for this cache."""
        return None

    @property
    def window_attention(self) -> WindowAttention | None:
        """Its form of :func:`mmkv.engine.scorer_state.window_attention`, or None."""
        return None

    def reset(self) -> None:
        """Let go of what keeps tensors of the cache alive that have been replaced."""
