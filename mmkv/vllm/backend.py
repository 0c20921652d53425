"""vLLM's attention backend: hands each pass to the rows, layer by layer.

On a CPU it stands in the place of ``CPU_ATTN``, since vLLM takes no other there, and is that one
where nobody has asked for mmkv. On a GPU it is ``--attention-backend CUSTOM``.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_module_registration_hook
from vllm.config import get_current_vllm_config, get_current_vllm_config_or_none
from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheLayout

from mmkv.engine.errors import InputError
from mmkv.vllm.ranks import Ranks
from mmkv.vllm.rows import Arrival, Pass, WorkerRows
from mmkv.vllm.settings import Settings, asked, settings_of
from mmkv.vllm.spec import BudgetSpec, bounded

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_LAYOUT = KVCacheLayout.BLHNC  # a block's pages lie together, those of all layers


class BoundedBackend(AttentionBackend):
    """Attends to the entries that were kept.

    Attributes:
        settings: of the model that was loaded last: vLLM asks for specs right after that.
    """

    settings: ClassVar[Settings]
    supported_dtypes = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes = ["auto"]

    @staticmethod
    def get_name() -> str:
        """Return the name under which vLLM knows it."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[AttentionImpl]:
        """Return what attends in a layer."""
        return BoundedAttention

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        """Return what begins a pass."""
        return PassBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Return that pages may have any size."""
        return [MultipleOf(1)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Return the one layout in which a block is so many pages."""
        return (_LAYOUT,)

    @classmethod
    def supports_kv_connector(cls) -> bool:
        """Return that entries stay where they are."""
        return False

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Bound the requests of a layer."""
        return bounded(spec, BoundedBackend.settings)


class CPUBackend(CPUAttentionBackend):
    """vLLM's own backend on a CPU, or :class:`BoundedBackend` where mmkv's settings are there.

    Attributes:
        chosen: which of them the model has that was loaded last.
    """

    chosen: type[AttentionBackend] = CPUAttentionBackend


def _either(name: str) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        config = get_current_vllm_config_or_none()
        if config is not None:
            CPUBackend.chosen = BoundedBackend if asked(config) else CPUAttentionBackend
        return getattr(CPUBackend.chosen, name)(*args, **kwargs)

    return staticmethod(call)


for _name in (
    "get_impl_cls",
    "get_builder_cls",
    "get_supported_kernel_block_sizes",
    "supported_kv_cache_layouts",
    "customize_spec",
    "get_supported_head_sizes",
):
    setattr(CPUBackend, _name, _either(_name))


@dataclass
class PassMetadata(AttentionMetadata):
    """What the layers of a pass share."""

    now: Pass | None
    layers: dict[str, int]


class PassBuilder(AttentionMetadataBuilder[PassMetadata]):
    """Begins a pass: tells the rows which requests bring how many tokens."""

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        names = sorted(layer_names, key=extract_layer_index)
        self._layers = {name: index for index, name in enumerate(names)}

    @functools.cached_property
    def rows(self) -> WorkerRows:
        """The rows in the memory that vLLM has by now given to the layers."""
        settings = settings_of(self.vllm_config)
        layers = self.vllm_config.compilation_config.static_forward_context
        first = layers[next(iter(self._layers))].kv_cache
        raw, blocks = memory_of(first, settings)
        ranks = Ranks()
        if settings.ranks > 1:
            group = get_tp_group()
            ranks = Ranks(
                group.rank_in_group,
                settings.ranks,
                functools.partial(_gather, group.device_group, settings.ranks),
            )
        return WorkerRows(raw, blocks, settings, ranks)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> PassMetadata:
        """Begin the pass that ``common_attn_metadata`` describes."""
        spec, common = self.kv_cache_spec, common_attn_metadata
        assert isinstance(spec, BudgetSpec)
        starts = common.query_start_loc_cpu.tolist()
        totals = common.seq_lens.tolist()
        table = common.block_table_tensor.tolist()
        reading = common.is_prefilling
        prompts = [total > 1 for total in totals] if reading is None else reading.tolist()
        arrivals = []
        for index, total in enumerate(totals):
            new = starts[index + 1] - starts[index]
            blocks = table[index][: spec.blocks(total)]
            if not new or not blocks[0]:  # padding, or a run without requests
                continue
            arrivals.append(Arrival(total - new, new, blocks, prompts[index]))
        return PassMetadata(self.rows.begin(arrivals) if arrivals else None, self._layers)


def _gather(group: Any, size: int, values: Tensor) -> Tensor:
    """Join ``[N]`` of all ranks. vLLM's own gather takes no whole numbers on a CPU."""
    made = values.new_empty(size * values.numel())
    torch.distributed.all_gather_into_tensor(made, values, group=group)
    return made


def memory_of(cache: Tensor, settings: Settings) -> tuple[Tensor, int]:
    """Return vLLM's whole memory int8, and its blocks, of the first layer's ``[B, H, N, C]``.

    Raises:
        RuntimeError: its layers do not lie as mmkv needs them.
    """
    blocks, _, size, wide = cache.shape
    rows = settings.local.rows
    if cache.stride() != (rows * size * wide, size * wide, wide, 1):
        raise RuntimeError(
            f"mmkv: vLLM laid its cache out as {cache.stride()}; set VLLM_KV_CACHE_LAYOUT="
            f"{_LAYOUT.name}"
        )
    whole = torch.as_strided(cache, (blocks * rows * size * wide,), (1,))
    return whole.view(torch.int8), blocks


class BoundedAttention(AttentionImpl):
    """The attention of one layer.

    Attributes:
        hidden: what the layer's attention has read in this pass, for gates.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        **more: Any,
    ) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.hidden: Tensor | None = None
        settings = settings_of(get_current_vllm_config())
        BoundedBackend.settings = settings
        self.reads_hidden = settings.gates is not None
        odd = alibi_slopes, sliding_window, logits_soft_cap, kv_sharing_target_layer_name
        if any(odd) or more.get("sinks") is not None or attn_type != AttentionType.DECODER:
            raise ValueError(
                "mmkv: a layer has windows, slopes, sinks, soft caps or another's cache; this "
                "model does not run with mmkv inside vLLM"
            )

    def do_kv_cache_update(self, *args: Any) -> None:
        """Do nothing: :meth:`forward` stores keys and values (vLLM asks where CPU_ATTN would)."""

    def forward(
        self,
        layer: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: PassMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attend; see vLLM's."""
        if attn_metadata is None or attn_metadata.now is None:
            return output.zero_()  # a run to measure memory
        hidden, self.hidden = self.hidden, None
        index = attn_metadata.layers[str(layer.layer_name)]
        count = attn_metadata.now.tokens
        made = attn_metadata.now.attend(
            index,
            query[:count],
            key[:count],
            value[:count],
            None if hidden is None else hidden[:count],
        )
        output[:count] = made.view_as(output[:count])
        return output


def _note_attention(parent: torch.nn.Module, name: str, child: torch.nn.Module | None) -> None:
    """Have the module that holds a layer's attention tell it what it reads.

    Raises:
        InputError: vLLM has chosen another backend, which would ignore mmkv's settings.
    """
    attention = getattr(child, "impl", None)
    if isinstance(attention, BoundedAttention):
        if attention.reads_hidden:
            parent.register_forward_pre_hook(functools.partial(_keep, attention), with_kwargs=True)
    elif isinstance(child, Attention) and child.attn_type == AttentionType.DECODER:
        config = get_current_vllm_config_or_none()
        if config is not None and asked(config):
            raise InputError(
                f"mmkv: vLLM has chosen {child.attn_backend.get_name()}, which ignores mmkv's "
                "settings; give --attention-backend CUSTOM"
            )


def _keep(
    attention: BoundedAttention, module: torch.nn.Module, args: Any, kwargs: dict[str, Any]
) -> None:
    given = kwargs.get("hidden_states")
    if given is None:
        given = next(x for x in args if isinstance(x, Tensor) and x.is_floating_point())
    attention.hidden = given


def register_backends() -> None:
    """Let vLLM find the backends."""
    register_backend(AttentionBackendEnum.CUSTOM, f"{__name__}.BoundedBackend")
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.CPUBackend")
    register_module_module_registration_hook(_note_attention)
