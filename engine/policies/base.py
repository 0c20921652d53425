"""What a policy is made of: scoring and allocation."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, TypeVar, get_args, runtime_checkable

import torch
from torch import Tensor

from mmkv.engine.budget import Interval
from mmkv.engine.errors import PolicyError
from mmkv.engine.policies.selection import MOST_ENTRIES, Shares, lowest

# A policy's interval adds at most one in so many to the budget: 128 steps from 512 entries a row
# on, the least budget that G-KV evaluates it with (section 7.2).
_PART = 4
Group = Literal["mean", "max", "sum"]
GROUPS = get_args(Group)
JoinedQueries = Literal["mean", "max", "variance", "entropy"]
# A depth as a share of the layers, or a band of them.
Tap = float | tuple[float, float]


@dataclass(frozen=True)
class Needs:
    """What a scorer reads beside positions and modality; the engine keeps nothing else for it.

    Attributes:
        gates: ``"retention"``: retention gates, whose ``log_beta`` is stored with each entry.
        queries: recent queries to keep per layer, for :meth:`CacheView.attention`.
        positions: whether their rope positions are kept, too, for :meth:`CacheView.future_queries`.
        keys, values: whether :meth:`CacheView.keys` and :meth:`CacheView.values` are read.
        state: float32 numbers kept with each entry, 0 at first: :meth:`CacheView.state`. What
            ``on_append`` returns is written there, and what a score hands back (:class:`Scores`).
        mass: how a KV group's query heads are joined (``mean``, ``max`` or ``sum``) where state 0
            shall add up the attention that every query pays to the entry, its own included.
        taps: depths in [0, 1], as shares of the layers, after which ``on_append`` reads the
            residual stream; two numbers stand for all layers from the one's to the other's.
        outputs: whether ``on_append`` reads the layers' output matrices.
        shares: whether :attr:`CacheView.share` is read.
    """

    gates: Literal["", "retention"] = ""
    queries: int = 0
    positions: bool = False
    keys: bool = False
    values: bool = False
    state: int = 0
    mass: Literal["", "mean", "max", "sum"] = ""
    taps: tuple[Tap, ...] = ()
    outputs: bool = False
    shares: bool = False

    def __post_init__(self) -> None:
        if (
            self.gates not in ("", "retention")
            or self.queries < 0
            or self.state < 0
            or (self.positions and not self.queries)
            or self.mass not in ("", *GROUPS)
            or (self.mass and not self.state)
            or not all(0 <= low <= high <= 1 for low, high in map(band, self.taps))
        ):
            raise PolicyError(
                f"{self} cannot be: gates is '' or 'retention', queries and state are numbers from "
                f"0, mass is '' or one of {', '.join(GROUPS)} and takes state 0, taps lie in "
                "[0, 1], positions are those of queries"
            )


def band(tap: Tap) -> tuple[float, float]:
    """Return the first and the last depth of ``tap``."""
    return tap if isinstance(tap, tuple) else (tap, tap)


def tapped_layers(tap: Tap, layers: int) -> range:
    """Return the indices of the layers that ``tap`` stands for, in a model of ``layers``."""
    first, last = (min(int(share * layers), layers - 1) for share in band(tap))
    return range(first, last + 1)


@dataclass(frozen=True)
class WindowReduction:
    """How the attention of recent queries becomes one number an entry.

    Attributes:
        group: how the query heads of a KV group are joined: mean, max or sum.
        of: what is joined: the heads' shares of attention, or their logits before the softmax.
        queries: how the window's queries are joined: their mean or maximum; or, head by head and
            before heads are, the variance of their shares, or the sum of ``-a log a``.
    """

    group: Group = "mean"
    of: Literal["shares", "logits"] = "shares"
    queries: JoinedQueries = "mean"


class EntrySource(Protocol):
    """The source of what a view does not hold; N entries in the view's order."""

    def keys(self) -> Tensor:
        """``[N, D]`` after RoPE."""
        ...

    def values(self) -> Tensor:
        """``[N, D]``."""
        ...

    def state(self) -> Tensor:
        """``[N, K]`` float32."""
        ...

    def attention(self, view: CacheView, reduction: WindowReduction) -> Tensor:
        """``[N]`` float32, see :meth:`CacheView.attention`."""
        ...

    def entropy(self, view: CacheView) -> Tensor:
        """Float32 without dimensions, see :meth:`CacheView.entropy`."""
        ...

    def future_queries(self, view: CacheView, ahead: int, doubling: bool) -> tuple[Tensor, Tensor]:
        """``[L, Hq, w, D]`` and ``[w]``, see :meth:`CacheView.future_queries`."""
        ...

    def bands(self, vectors: Tensor) -> Tensor:
        """``[..., F]``, see :meth:`CacheView.bands`."""
        ...


@dataclass(frozen=True)
class CacheView:
    """What scorers and allocations may look at: all entries of one sequence, row-major.

    In a CUDA graph every row has the same number of cells and N counts those without an entry,
    whose scores mean nothing; ``seen`` and ``prompt_tokens`` are tensors there, without dimensions.
    Or all sequences of a batch are one view, their layers one after the other, and ``seen`` is
    ``[N]``. mmkv's scorers read no value of a tensor on the host, and so score all alike.

    Attributes:
        seen: tokens of the sequence so far, text and visual alike.
        row: ``[N]`` int64, ``layer * kv_heads + head``; ascending.
        length: ``[layers * kv_heads]`` int64, entries per row.
        position: ``[N]`` int64 token index; log_beta: ``[N]`` float32; modality: ``[N]`` uint8.
        source: reads keys, values, state and window attention when asked for.
        prompt_tokens: tokens that came in prompts, for policies that keep them all.
        sequences: of which the layers are.
        share: ``[layers * kv_heads]`` int64, for a scorer with ``needs.shares``: what each row may
            keep, an even part of its group's share.
    """

    seen: int
    layers: int
    kv_heads: int
    row: Tensor
    length: Tensor
    position: Tensor
    log_beta: Tensor
    modality: Tensor
    source: EntrySource | None = None
    prompt_tokens: int = 0
    sequences: int = 1
    share: Tensor | None = None

    def keys(self) -> Tensor:
        """Gather the keys after RoPE, ``[N, D]`` in the cache's dtype; a copy at each call.

        Raises:
            PolicyError: the scorer does not declare ``needs.keys``.
        """
        return self._source().keys()

    def values(self) -> Tensor:
        """Gather the values, ``[N, D]`` in the cache's dtype; a copy at each call.

        Raises:
            PolicyError: the scorer does not declare ``needs.values``.
        """
        return self._source().values()

    def state(self) -> Tensor:
        """Gather the scorer's own numbers, float32 ``[N, K]``; a copy at each call."""
        return self._source().state()

    def attention(
        self,
        group: Group = "mean",
        of: Literal["shares", "logits"] = "shares",
        queries: JoinedQueries = "mean",
    ) -> Tensor:
        """Compute the attention that the last ``needs.queries`` queries pay to each entry.

        Softmax of each query over its row's entries (causal: an entry after the query counts
        nothing), then ``group`` joins the query heads of the KV group, then the mean over the
        window's queries is taken.

        Args:
            group: mean, max or sum over the group's heads.
            of: ``logits`` joins the heads before the softmax.
            queries: ``max`` takes the greatest over the window's queries; ``variance`` (divided by
                their number less one; 0 of one query) and ``entropy`` (the sum of ``-a log a``)
                are taken of each head's shares, before heads are joined.

        Returns:
            float32 ``[N]``.

        Raises:
            PolicyError: the scorer does not declare ``needs.queries``.
        """
        return self._source().attention(self, WindowReduction(group, of, queries))

    def entropy(self) -> Tensor:
        """Compute how evenly the newest query attends, in [0, 1]: float32 without dimensions.

        For each query head, the entropy of its attention over the row's m entries, divided by
        log m (0 where m < 2); the mean over all heads of all layers.

        Raises:
            PolicyError: the scorer does not declare ``needs.queries``.
        """
        return self._source().entropy(self)

    def future_queries(self, ahead: int, doubling: bool = False) -> tuple[Tensor, Tensor]:
        """Turn the last ``needs.queries`` queries as if tokens to come asked them.

        Each is taken back to what it was before RoPE and turned by the mean of the rotations at the
        next ``ahead`` positions, which follow the largest of the window's.

        Args:
            doubling: of these positions, the 1st, 2nd, 4th and so on alone.

        Returns:
            float32 ``[L, Hq, w, D]``, to be compared with :meth:`keys`; int64 ``[w]``, the token
            index of each, -1 where there is none yet.

        Raises:
            PolicyError: the scorer does not declare ``needs.queries`` and ``needs.positions``.
        """
        return self._source().future_queries(self, ahead, doubling)

    def bands(self, vectors: Tensor) -> Tensor:
        """Return the norms of what RoPE turns together in queries or keys, the same before it.

        Args:
            vectors: ``[..., D]``.

        Returns:
            ``[..., F]``: of each pair of features with one angle, then of each that is not turned.

        Raises:
            PolicyError: the scorer does not declare ``needs.positions``.
        """
        return self._source().bands(vectors)

    @property
    def rows(self) -> int:
        """Number of rows of the sequence."""
        return self.layers * self.kv_heads

    def to_rows(self, values: Tensor, fill: float) -> Tensor:
        """Spread ``values [N, ...]`` to ``[rows, longest row, ...]``, the rest being ``fill``."""
        padded = values.new_full((self.rows, int(self.length.max()), *values.shape[1:]), fill)
        padded[self.live()] = values
        return padded

    def from_rows(self, padded: Tensor) -> Tensor:
        """Return the cells ``[N, ...]`` of ``padded [rows, longest row, ...]`` with an entry."""
        return padded[self.live()]

    def live(self) -> Tensor:
        """Bool ``[rows, longest row]``: which cells of :meth:`to_rows` hold an entry."""
        column = torch.arange(int(self.length.max()), device=self.length.device)
        return column < self.length[:, None]

    def _source(self) -> EntrySource:
        if self.source is None:
            raise PolicyError("this view has positions, gates and modality only")
        return self.source


@dataclass(frozen=True)
class Scores:
    """A score per entry, and numbers that the scorer keeps with the entries.

    Attributes:
        value: float32 ``[N]``.
        state: float32 ``[N, K]``: replaces the state of every entry, before any is dropped.
    """

    value: Tensor
    state: Tensor | None = None


@dataclass(frozen=True)
class NewTokens:
    """What one pass appends: T tokens of each of B sequences; read by a scorer's ``on_append``.

    Attributes:
        position: ``[B, T]`` int64 token indices.
        prompt: whether the tokens belong to a prompt, or have been generated.
        taps: float32 ``[n, B, T, d]``, the residual stream after the layers of ``needs.taps``.
        memory: by name float32 ``[B, ...]``: what ``memory`` of the scorer asked for, as the last
            pass left it and zero at first. ``on_append`` puts what is to be kept in its place.
        keys, values: float32 ``[B, L, H, T, D]``, gathered when called.
        outputs: called with a layer, returns the matrix that takes its query heads to the residual
            stream, float32 ``[Hq, D, d]``, for a scorer with ``needs.outputs``.
    """

    position: Tensor
    prompt: bool
    taps: Tensor
    memory: dict[str, Tensor]
    keys: Callable[[], Tensor]
    values: Callable[[], Tensor]
    outputs: Callable[[int], Tensor]


class Scorer(Protocol):
    """A score per entry at the present step; the lowest are evicted.

    A scorer may have three methods more. ``on_append(new: NewTokens) -> Tensor`` is called after
    each pass and returns the state of the new entries, float32 ``[B, T, L or 1, H or 1, K]``
    (without state 0 where that adds up attention: K - 1);
    ``on_step(view: CacheView, memory: dict[str, Tensor]) -> Tensor | None`` is called for each
    sequence after each decode step, before eviction, and returns a new state ``[N, K]`` of all
    entries, or None; it replaces in ``memory`` what is to be kept;
    ``memory(layers, kv_heads, head_dim, hidden_size)`` returns the shapes, by name, of what it
    keeps of each sequence. :func:`compiled` says that C and Triton can score by themselves.
    """

    @property
    def needs(self) -> Needs:
        """What it reads; often a class variable."""
        ...

    def score(self, view: CacheView) -> Tensor | Scores:
        """Float32 ``[N]``, or that with a new state."""
        ...


class Pruner(Protocol):
    """Which visual tokens of a chunk are dropped, and after which layer.

    Attributes:
        layer: how many layers see all tokens; 0 prunes the embeddings.
        reads: what :meth:`keep` reads of the last of these layers: the attention that all of the
            chunk's tokens pay, or its last one; the chunk's keys; or nothing.
    """

    @property
    def layer(self) -> int:
        """See above."""
        ...

    @property
    def reads(self) -> Literal["", "all", "last", "keys"]:
        """See above."""
        ...

    def keep(self, chunk: ChunkStates) -> Tensor:
        """Choose among the V visual tokens of a chunk: bool ``[V]``."""
        ...


@runtime_checkable
class Merger(Pruner, Protocol):
    """A pruner that chooses patches behind the vision tower, and merges what goes into what stays.

    A model family asks it before the projector, picture by picture; its ``keep`` then returns
    ``chunk.merged``.
    """

    def merge(self, states: Tensor, received: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Choose among the P patches of a picture, or of a tile.

        Args:
            states: ``[P, d]``, what the tower gives the projector.
            received: float32 ``[P]``, the attention that the class token pays each in the layer
                these states come from, mean over heads; without one, all patches' mean.
            keys: ``[P, H, D]`` of that layer.

        Returns:
            ``[P, d]``, with merged states for those that stay; bool ``[P]``, which stay.
        """
        ...


@dataclass(frozen=True)
class ChunkStates:
    """What a pruner may read of a chunk of C tokens.

    Attributes:
        hidden: ``[C, d]`` the tokens' states after the pruner's layers.
        visual: ``[V]`` int64, which of them are visual, ascending.
        received: float32 ``[V]`` attention paid to each, mean over heads; None unless asked for.
        keys: ``[C, H D]`` after RoPE, all heads side by side; None unless asked for.
        merged: bool ``[V]``, which a :class:`Merger` has kept; None for other pruners.
    """

    hidden: Tensor
    visual: Tensor
    received: Tensor | None = None
    keys: Tensor | None = None
    merged: Tensor | None = None


@dataclass(frozen=True)
class Admission:
    """What a policy admits to memory by write gates; log g of an entry is state 0.

    Attributes:
        window: W_local, the newest tokens, of which every entry is kept and seen; 0 for the number
            that the gates were trained with (``gates.json``), 256 where they do not say.
        threshold: tau: an entry that leaves the window stays if g >= tau.
        gates: where the write gates lie, beside the retention gates of the same policy; empty where
            they are the only ones.
        observed: whether the policy's scorer has a window of queries that is to be as wide.
    """

    window: int = 0
    threshold: float = 0.1
    gates: str = field(default="", repr=False, compare=False)
    observed: bool = field(default=False, repr=False)

    def refused(self, position: Tensor, log_g: Tensor, seen: int) -> Tensor:
        """Bool ``[N]``: which entries the next token, of index ``seen``, may not see."""
        return (position <= seen - self.window) & ~admitted(log_g, self.threshold)


def admitted(log_g: Tensor, threshold: float) -> Tensor:
    """Return which entries stay when they leave the local window: ``g >= threshold``.

    Args:
        log_g: float32, any shape; threshold: tau, 0 admits all.
    """
    return log_g >= (math.log(threshold) if threshold > 0 else -math.inf)


S = TypeVar("S", bound=Scorer)
_COMPILED: dict[type, Literal["retention", "recency", "state"]] = {}


def compiled(kernel: Literal["retention", "recency", "state"]) -> Callable[[type[S]], type[S]]:
    """Mark a scorer's class whose score C and Triton compute, too.

    Of this very class: a subclass may score in another way.

    Args:
        kernel: ``state``: the score is state 0. ``retention`` and ``recency``: the formulas of
            :class:`mmkv.engine.policies.scoring.Retention` and ``Recency``, of mmkv's classes only.

    Raises:
        PolicyError: for another kernel, or for one of mmkv's formulas on somebody else's class.
    """

    def register(scorer: type[S]) -> type[S]:
        if kernel != "state" and not scorer.__module__.startswith("mmkv.engine."):
            raise PolicyError(
                f"the scorer {scorer.__name__} is compiled as {kernel!r}; of other classes than "
                'mmkv\'s C computes "state" alone'
            )
        _COMPILED[scorer] = kernel
        return scorer

    return register


def kernel_of(scorer: Scorer) -> str:
    """Return what C and Triton compute the score from; ``torch``: they don't."""
    return _COMPILED.get(type(scorer), "torch")


class Allocation(Protocol):
    """Which entries compete with which for the budget."""

    def shares(self, budget: int, layers: int, kv_heads: int) -> Shares:
        """Groups of rows and what each may keep.

        As soon as one group stands above its share (and the slack between evictions), all are cut
        down to theirs.
        """
        ...


T = TypeVar("T")


def returned(value: object, kind: type[T], call: str, wanted: str) -> T:
    """Return what a policy's own code gave. Raises PolicyError: it is of another kind."""
    if isinstance(value, kind):
        return value
    given = "None" if value is None else f"a {type(value).__name__}"
    raise PolicyError(f"{call} returned {given}; return {wanted}")


def shaped(value: object, shape: tuple[int, ...], call: str, wanted: str) -> Tensor:
    """Return a tensor that a policy's own code gave. Raises PolicyError: it has another shape."""
    made = returned(value, Tensor, call, wanted)
    if tuple(made.shape) != shape:
        raise PolicyError(
            f"{call} returned shape {list(made.shape)}, not {list(shape)}; return {wanted}"
        )
    return made


def _check_shares(made: object, rows: int, call: str) -> None:
    """Check what an allocation of somebody's own returned. Raises PolicyError."""
    shares = returned(made, Shares, call, "Shares(group, share)")
    group = shaped(shares.group, (rows,), f"{call} as group", "the group of each row")
    share = returned(shares.share, Tensor, f"{call} as share", "a tensor, a number a group")
    if shares.floor is not None:
        shaped(shares.floor, (rows,), f"{call} as floor", "a number a row, or None")
    if group.is_floating_point() or share.is_floating_point():
        raise PolicyError(f"{call} returned fractions; return whole numbers (int64)")
    if share.dim() != 1 or not 0 <= int(group.min()) <= int(group.max()) < share.numel():
        raise PolicyError(f"{call} returned groups without a share; return one share a group")


@dataclass(frozen=True)
class Policy:
    """One published method: a scorer and an allocation, by name.

    Attributes:
        allocation: None for methods that never evict.
        protect_first, protect_recent: tokens at either end that outrank every score.
        recent_share: the newest tokens protected are at most this share of the budget per row
            (all of the share where ``protect_recent`` is 0). None: no such bound.
        keeps_prompt: whether tokens of prompts come on top of the budget; the scorer has to give
            them a score of infinity.
        source: the paper the combination comes from.
        pruner: drops visual tokens of prompts before any entry of them exists.
        interval: decode steps between two evictions, fewer where they would add more than a
            quarter to the budget (:meth:`every`). An engine's ``evict_every`` goes before it.
        admission: which entries stay once they have left the window of the newest tokens, by write
            gates and whatever the budget. An allocation then cuts what is left to the budget.
    """

    name: str
    scoring: Scorer
    allocation: Allocation | None
    protect_first: int = 0
    protect_recent: int = 0
    source: str = ""
    recent_share: float | None = None
    keeps_prompt: bool = False
    pruner: Pruner | None = None
    admission: Admission | None = None
    interval: int = 1

    def every(self, given: int | None) -> Interval:
        """Return when sequences are cut, where an engine's ``evict_every`` is ``given``."""
        return Interval(self.interval, _PART) if given is None else Interval(given)

    @property
    def evicts(self) -> bool:
        """Whether a budget binds this policy."""
        return self.allocation is not None

    @property
    def merger(self) -> Merger | None:
        """The pruner, where it merges patches before the projector."""
        return self.pruner if isinstance(self.pruner, Merger) else None

    @property
    def gates(self) -> Literal["", "retention", "write"]:
        """Which gates it has to be loaded with.

        Beside retention gates, an admission names its write gates itself.
        """
        retention = self.scoring.needs.gates if self.evicts else ""
        return "write" if self.admission is not None and not retention else retention

    def identity(self) -> str:
        """Name every part and setting that decides what is evicted; ``source`` does not."""
        more = "" if self.recent_share is None else f", at most {self.recent_share} of the budget"
        more += ", prompts kept" if self.keeps_prompt else ""
        # Session files hold this text: 1 goes without saying, whatever the default is.
        more += "" if self.interval == 1 else f", every {self.interval} steps"
        more += "" if self.pruner is None else f", {self.pruner!r}"
        more += "" if self.admission is None else f", {self.admission!r}"
        return (
            f"{self.name}: {self.scoring!r}, {self.allocation!r}, "
            f"first {self.protect_first} and recent {self.protect_recent} protected{more}"
        )

    def recent(self, per_row: int) -> int:
        """How many of the newest tokens are protected, for a budget of ``per_row`` entries."""
        if self.recent_share is None:
            return self.protect_recent
        share = int(self.recent_share * per_row)
        return min(self.protect_recent, share) if self.protect_recent else share

    def victims(self, view: CacheView, budget: int) -> Tensor:
        """Indices ``[K]`` of the entries to drop, lowest protected score first.

        NaN is the lowest score; ties fall on the smaller position, then layer, then head.

        Raises:
            PolicyError: the scorer does not return one number an entry.
        """
        return self.lowest(self.scores(view, budget).value, view, budget)

    def scores(self, view: CacheView, budget: int) -> Scores:
        """The scorer's float32 ``[N]``, infinite where protected, and the state it hands back."""
        if self.scoring.needs.shares:
            share = self.shares(budget, view.layers, view.kv_heads).of_rows()
            view = replace(view, share=share.to(view.row.device))
        made: object = self.scoring.score(view)
        wanted = "one number an entry, a tensor [N] in the view's order"
        call = f"the scorer {type(self.scoring).__name__} of policy {self.name!r}"
        value, state = (made.value, made.state) if isinstance(made, Scores) else (made, None)
        value = returned(value, Tensor, call, wanted)
        if state is not None:
            shape = (view.position.numel(), self.scoring.needs.state)
            state = shaped(state, shape, f"{call} in Scores.state", "a tensor [N, K]")
        if value.shape != view.position.shape:
            raise PolicyError(
                f"the scorer {type(self.scoring).__name__} of policy {self.name!r} returned shape "
                f"{list(value.shape)} for {view.position.numel()} entries; return one number an "
                "entry, in the view's order"
            )
        recent = self.recent(budget // view.rows - view.prompt_tokens * self.keeps_prompt)
        return Scores(self.protected(value.float(), view, recent), state)

    def protected(self, value: Tensor, view: CacheView, recent: int | Tensor) -> Tensor:
        """Return scores ``[N]`` with infinity for the first tokens and the ``recent`` newest."""
        if self.protect_first:
            value = value.masked_fill(view.position < self.protect_first, torch.inf)
        if isinstance(recent, int) and not recent:
            return value
        return value.masked_fill(view.position >= view.seen - recent, torch.inf)

    def lowest(self, scores: Tensor, view: CacheView, budget: int) -> Tensor:
        """:meth:`victims`, from ``scores [N]`` already computed."""
        return lowest(scores, view, self.shares(budget, view.layers, view.kv_heads))

    def shares(self, budget: int, layers: int, kv_heads: int) -> Shares:
        """Groups of rows and what each may keep.

        Raises:
            PolicyError: the allocation gives its groups more than the budget.
        """
        assert self.allocation is not None
        budget = min(budget, MOST_ENTRIES)
        shares = self.allocation.shares(budget, layers, kv_heads)
        if not type(self.allocation).__module__.startswith("mmkv.engine."):
            _check_shares(shares, layers * kv_heads, f"{type(self.allocation).__name__}.shares")
        given = int(shares.share.sum())
        if given > budget:
            raise PolicyError(
                f"policy {self.name!r}: its allocation shares out {given:,} entries of a budget of "
                f"{budget:,}; shares must add up to the budget"
            )
        if shares.floor is not None:
            guarded = torch.zeros_like(shares.share).index_add_(0, shares.group, shares.floor)
            if bool((guarded > shares.share).any()):
                raise PolicyError(
                    f"policy {self.name!r}: the floors of a group's rows add up to more than the "
                    "group's share; lower them"
                )
        return shares
