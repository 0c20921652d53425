"""The scheduler's side: how many blocks a request takes as it grows, and where that ends.

A block has one page for each row, (layer, KV head). Which row holds which page is the worker's
business (:mod:`mmkv.vllm.rows`), so a block is a right to so many pages: no count of freed ones
travels from the worker. What a pass brings before requests are cut is bounded by the tokens of the
pass, not by each request's: blocks for that are set apart once. So what is admitted always fits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from vllm.logger import init_logger
from vllm.v1.core.single_type_kv_cache_manager import CircularBufferManager, FullAttentionManager
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    replace_as,
)
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from mmkv.vllm.settings import Settings, blocks_of, entry_size

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.mmkv")


@dataclass(frozen=True, kw_only=True)
class BudgetSpec(FullAttentionSpec):
    """The cache of one layer.

    Attributes:
        most: entries of a row of one request, in the mean, between two passes.
        reserve: blocks for what a pass brings.
    """

    most: int = 0
    reserve: int = 0

    @classmethod
    def merge(cls, specs: list[Self]) -> Self:
        """Return the spec of layers, which all have the same. Raises ValueError."""
        if any(spec != specs[0] for spec in specs):
            raise ValueError("mmkv: layers differ in their caches, and one budget is for all")
        return specs[0]

    def blocks(self, tokens: int) -> int:
        """Count the blocks of a request; see :func:`mmkv.vllm.settings.blocks_of`."""
        return blocks_of(tokens, self.most, self.block_size)

    @property
    def prefix_cacheable(self) -> bool:
        """Entries of a prefix depend on what came after it."""
        return False

    @property
    def uses_slot_mapping(self) -> bool:
        """The worker finds its own slots."""
        return False

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Count the bytes of the longest request."""
        return self.blocks(vllm_config.model_config.max_model_len) * self.page_size_bytes

    def max_num_blocks_per_req(self, vllm_config: VllmConfig, max_len: int) -> int:
        """Count the columns of the block table."""
        return self.blocks(max_len)


def bounded(spec: AttentionSpec, settings: Settings) -> BudgetSpec:
    """Return the spec of a layer whose requests are bounded."""
    if not isinstance(spec, FullAttentionSpec):
        raise ValueError(f"mmkv: a layer has a {type(spec).__name__}; mmkv bounds full attention")
    return replace_as(
        spec,
        BudgetSpec,
        state_content_bytes=entry_size(settings.layout),
        most=settings.most,
        reserve=settings.reserve,
    )


class BudgetManager(FullAttentionManager):
    """Gives a request blocks up to its bound; nothing is shared between requests."""

    kv_cache_spec: BudgetSpec

    def __init__(self, kv_cache_spec: BudgetSpec, *args: Any, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, *args, **kwargs)
        size, reserve = kv_cache_spec.block_size, kv_cache_spec.reserve
        there, bound = self.block_pool.get_num_free_blocks(), kv_cache_spec.blocks(1 << 40)
        if there < reserve + bound:
            raise ValueError(
                f"mmkv: {reserve} blocks for the tokens of a pass and {bound} of a request are "
                f"needed, the cache has {there}; lower --max-num-batched-tokens or the budget, or "
                "give the cache more memory"
            )
        self.block_pool.get_new_blocks(reserve)
        if self.enable_caching:
            logger.info("mmkv: prefix caching is off: what stays of a prefix depends on the rest")
        logger.info(
            "mmkv: a request of any length takes at most %d blocks of %d tokens; %d requests fit "
            "beside the %d blocks of a pass (without mmkv %d tokens of all requests together)",
            bound,
            size,
            (there - reserve) // bound,
            reserve,
            there * size,
        )

    def _slots(self, tokens: int) -> int:
        return self.kv_cache_spec.blocks(tokens) * self.block_size

    def get_num_blocks_to_allocate(
        self, request_id: str, num_tokens: int, *args: Any, **kwargs: Any
    ) -> int:
        """See vLLM's."""
        return super().get_num_blocks_to_allocate(
            request_id, self._slots(num_tokens), *args, **kwargs
        )

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[Any]:
        """See vLLM's."""
        slots = self._slots(num_tokens)
        return super().allocate_new_blocks(request_id, slots, num_tokens_main_model)

    cache_blocks = CircularBufferManager.cache_blocks
    find_longest_cache_hit = CircularBufferManager.find_longest_cache_hit


def register_spec() -> None:
    """Let vLLM's scheduler know the manager."""
    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(BudgetSpec, BudgetManager, FullAttentionSpec)
