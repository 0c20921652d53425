"""What ``--additional-config '{"mmkv": {...}}'`` says, and what cannot be together with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mmkv.engine.budget import Budget, Interval
from mmkv.engine.cache.forms import KVForm
from mmkv.engine.cache.layout import COLUMNS, Layout
from mmkv.engine.config import DEFAULT_BUDGET, EngineConfig
from mmkv.engine.errors import InputError, PolicyError
from mmkv.engine.model.gates import Gates
from mmkv.engine.model.spec import DecoderSpec, RopeSpec
from mmkv.engine.policies import Policy, attention, scoring
from mmkv.engine.policy_choice import choose
from mmkv.engine.scorer_state import has_on_step

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Words of EngineConfig that mean the same here, and vLLM's own options for what the others say.
WORDS = ("policy", "gates", "budget", "lookahead", "evict_every", "kv")
_VLLM_HAS = {
    "model": "the model's name",
    "prefill_chunk": "--long-prefill-token-threshold or --max-num-batched-tokens",
    "page_size": "--block-size",
    "dtype": "--dtype",
    "device": "vLLM's platform",
    "weights": "--quantization",
    "adapter": "--lora-modules",
    "kv_limit": "--gpu-memory-utilization or --kv-cache-memory-bytes",
    "threads": "VLLM_CPU_OMP_THREADS_BIND",
}
# Scorers that read no row but an entry's own, so that ranks may score apart.
_ROW_BY_ROW = (
    attention.AttentionAndRedundancy,
    attention.AttentionMass,
    attention.FusedAttention,
    attention.GlobalAttention,
    scoring.KeyDifference,
    scoring.KeyNorm,
    scoring.NextChunk,
    scoring.Recency,
    scoring.Retention,
    scoring.WindowAttention,
)
_ALIGNED = 16  # bytes that the size of an entry is a multiple of


@dataclasses.dataclass(frozen=True)
class Settings:
    """How requests are bounded, the same in all of vLLM's processes.

    Attributes:
        spec: of the whole model; ranks: of the tensor-parallel group, among which heads are split.
        layout: of an entry; allowed: entries of all rows, of all ranks, after an eviction.
        chunk: the most tokens that a pass reads, of all requests together.
    """

    spec: DecoderSpec
    policy: Policy
    gates: Gates | None
    layout: Layout
    allowed: int
    interval: Interval
    chunk: int
    ranks: int

    @property
    def local(self) -> DecoderSpec:
        """The model as one rank has it."""
        heads, kv_heads = self.spec.num_heads // self.ranks, self.spec.num_kv_heads // self.ranks
        return dataclasses.replace(self.spec, num_heads=heads, num_kv_heads=kv_heads)

    @property
    def most(self) -> int:
        """The most entries that a row of one rank may have in the mean, between two passes.

        Rows of a group compete, whichever rank they are on: at worst one rank keeps all of it.
        """
        spec, local = self.spec, self.local
        shares = self.policy.shares(self.allowed, spec.entry_layers, spec.num_kv_heads)
        groups = shares.group.view(spec.entry_layers, self.ranks, -1)
        here = max(int(shares.share[groups[:, rank].unique()].sum()) for rank in range(self.ranks))
        return -(-here // local.rows) + self.interval.above(self.allowed, spec.rows)

    @property
    def reserve(self) -> int:
        """Blocks for what a pass brings, whichever requests bring it, until they are cut."""
        return -(-self.chunk // self.layout.page_size)


def asked(config: VllmConfig) -> bool:
    """Whether the user has named mmkv's settings."""
    given = config.additional_config
    return isinstance(given, Mapping) and "mmkv" in given


def settings_of(config: VllmConfig) -> Settings:
    """Read mmkv's settings and the model's sizes.

    Raises:
        InputError, PolicyError, GateError, BudgetError, ModelError: for what cannot be.
    """
    if not (_LAST and _LAST[0][0] is config):
        _LAST[:] = [(config, _read(config))]
    return _LAST[0][1]


# Each layer asks again. vLLM's configs have no hash.
_LAST: list[tuple[VllmConfig, Settings]] = []


def _read(config: VllmConfig) -> Settings:
    given = config.additional_config["mmkv"]
    engine = _engine_config(given, config.model_config.model)
    text = config.model_config.hf_text_config
    spec = DecoderSpec.from_config(text, lambda: RopeSpec.from_config(text))
    policy, gates, _ = choose(engine, spec, None, config.model_config.is_multimodal_model)
    _require_policy(policy)
    _require_vllm(config, spec, policy)
    scheduler = config.scheduler_config
    budget = Budget.of(DEFAULT_BUDGET if engine.budget is None else engine.budget)
    if budget.kind == "fraction":
        raise InputError("mmkv: a budget that is a share of the tokens bounds no request; name it")
    interval = policy.every(engine.evict_every)
    form = KVForm.of(engine.kv or "auto", config.model_config.dtype, spec.head_dim)
    size = config.cache_config.block_size
    layout = Layout(
        size, spec.head_dim, config.model_config.dtype, form, policy.scoring.needs.state
    )
    page = entry_size(layout) * size
    return Settings(
        spec=spec,
        policy=policy,
        gates=gates if isinstance(gates, Gates) and policy.scoring.needs.gates else None,
        layout=layout,
        allowed=budget.entries(spec.rows, 0, size, page, interval),
        interval=interval,
        chunk=scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens,
        ranks=config.parallel_config.tensor_parallel_size,
    )


def blocks_of(tokens: int, most: int, size: int) -> int:
    """Count the blocks of a request that has ``tokens``, those of its next pass included.

    No row holds more entries than there are tokens, nor rows in the mean more than ``most`` between
    two passes; in that bound the last page of every row holds a single entry.

    Args:
        size: entries of a page.
    """
    return min(-(-tokens // size), -(-(most + size - 1) // size))


def entry_size(layout: Layout) -> int:
    """Count the bytes of an entry where its columns lie side by side."""
    end = 0
    for column in COLUMNS.values():
        size = layout.dtype_of(column).itemsize
        end = -(-end // size) * size + layout.page_bytes(column) // layout.page_size
    return -(-end // _ALIGNED) * _ALIGNED


def _engine_config(given: object, model: str) -> EngineConfig:
    if not isinstance(given, Mapping):
        raise InputError(f"mmkv: settings are {given!r}; give an object such as {{'budget': 256}}")
    for word in given:
        if word in WORDS:
            continue
        remedy = f"{_VLLM_HAS[word]} says that" if word in _VLLM_HAS else f"give {', '.join(WORDS)}"
        raise InputError(f"mmkv: {word!r} is no setting inside vLLM; {remedy}")
    options: dict[str, Any] = dict(given)
    return EngineConfig(model=model, **options)


def _require_policy(policy: Policy) -> None:
    """Refuse a policy that needs what vLLM does not show. Raises PolicyError."""
    needs = policy.scoring.needs
    for why, found in (
        ("evicts nothing; vLLM without mmkv does that", not policy.evicts),
        ("drops tokens inside the model, which is vLLM's", policy.pruner is not None),
        ("has write gates", policy.admission is not None),
        ("keeps every prompt, so that it bounds no request", policy.keeps_prompt),
        ("reads states between layers", bool(needs.taps)),
        ("reads the layers' output matrices", needs.outputs),
        ("reads rope positions of queries", needs.positions),
        ("changes its state after each step", has_on_step(policy.scoring)),
    ):
        if found:
            raise PolicyError(
                f"mmkv: policy {policy.name!r} {why} and does not run inside vLLM; choose "
                "dbtrimkv, trimkv, snapkv, keydiff, knorm, lagkv or streamingllm"
            )


def _require_vllm(config: VllmConfig, spec: DecoderSpec, policy: Policy) -> None:
    """Refuse what of vLLM's own cannot be beside an eviction. Raises InputError."""
    parallel, cache = config.parallel_config, config.cache_config
    ranks = parallel.tensor_parallel_size
    for what, found, remedy in (
        ("speculative decoding", config.speculative_config is not None, "--speculative-config"),
        ("a KV connector", config.kv_transfer_config is not None, "--kv-transfer-config"),
        ("pipeline parallelism", parallel.pipeline_parallel_size > 1, "--pipeline-parallel-size"),
        (
            "context parallelism",
            parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1,
            "the context-parallel sizes",
        ),
        (f"kv_cache_dtype {cache.cache_dtype!r}", cache.cache_dtype != "auto", "--kv-cache-dtype"),
    ):
        if found:
            raise InputError(f"mmkv: {what} does not go with eviction yet; leave out {remedy}")
    if any(spec.sliding_window) or spec.has_entries:
        raise InputError(
            "mmkv: this model has layers with a window or without a cache, and inside vLLM all "
            "have to attend to everything; run it with mmkv serve"
        )
    if spec.num_kv_heads % ranks:
        raise InputError(
            f"mmkv: {spec.num_kv_heads} KV heads cannot be split among {ranks} ranks; choose a "
            "tensor-parallel size that divides them"
        )
    if ranks > 1 and type(policy.scoring) not in _ROW_BY_ROW:
        raise PolicyError(
            f"mmkv: policy {policy.name!r} scores an entry by other heads, too, which another rank "
            "has; leave out --tensor-parallel-size, or choose another policy"
        )
    if policy.scoring.needs.gates and not config.model_config.enforce_eager:
        raise InputError(
            f"mmkv: gates of policy {policy.name!r} read what torch.compile hides; give "
            "--enforce-eager"
        )
