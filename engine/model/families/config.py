"""Read the config of a checkpoint by transformers, without the modelling code where that works.

Annotations are types here, and no strings: fields of a config are checked by them.
"""

from pathlib import Path
from typing import Any

import transformers
from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from mmkv.engine.errors import STOPS, ModelError
from mmkv.engine.model.families import find
from mmkv.engine.model.settings import require_counts

# What transformers' classes complete from sizes of a text model, which other parts do not have.
_OF_TEXT = ("per_layer_config", "rope_parameters", "rope_scaling")


@strict
class LlamaConfig(PreTrainedConfig):
    """transformers' class of this name, whose module imports all of the modelling code.

    Fields and defaults are that class's; what they mean is read by the base class of both.
    """

    model_type = "llama"
    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    pretraining_tp: int | None = 1
    tie_word_embeddings: bool = False
    rope_parameters: dict | None = None
    attention_bias: bool = False
    attention_dropout: int | float | None = 0.0
    mlp_bias: bool = False
    head_dim: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        super().__post_init__(**kwargs)

    def validate_architecture(self) -> None:
        """Raise ValueError as transformers' class does; ``strict`` calls this."""
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is no multiple of num_attention_heads "
                f"{self.num_attention_heads}"
            )


def read_config(source: str | Path, local_files_only: bool = False) -> Any:
    """Return the config of a folder or hub id; of a Llama, one of :class:`LlamaConfig` here.

    Raises:
        ModelError: the package that offers the model's family does not load, a count is beyond
            any model, or a setting of the text model stands at another part. OSError, ValueError:
            there is no readable config, or transformers does not know its type.
    """
    raw, _ = PreTrainedConfig.get_config_dict(source, local_files_only=local_files_only)
    require_counts(raw)
    find(str(raw.get("model_type")))  # may add its config to transformers' auto classes
    if raw.get("model_type") == LlamaConfig.model_type:
        return LlamaConfig.from_dict(raw, name_or_path=str(source))
    try:
        return transformers.AutoConfig.from_pretrained(
            source, trust_remote_code=False, local_files_only=local_files_only
        )
    except STOPS:
        raise
    except BaseException as error:
        vision = raw.get("vision_config")
        if not isinstance(vision, dict):
            raise
        wrong = [key for key in _OF_TEXT if raw.get(key)]
        wrong += [f"vision_config.{key}" for key in _OF_TEXT if vision.get(key)]
        if not wrong:
            raise
        raise ModelError(
            f"config.json has {', '.join(wrong)} where transformers cannot read it; move it to "
            "text_config, or get the original file"
        ) from error


def whole_config(config: Any) -> Any:
    """Return what :func:`read_config` gave as an object of the model's own class, which
    transformers' models need.
    """
    if type(config) is not LlamaConfig:
        return config
    return transformers.LlamaConfig(**config.to_dict(), name_or_path=config.name_or_path)
