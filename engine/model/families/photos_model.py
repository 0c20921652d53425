"""A classifier of photographs in front of a Llama, as a model of transformers.

The tower is EfficientNet-Lite: the convolutions of Tan and Le (arXiv 1905.11946) with ReLU6 and
without squeeze and excitation; batch norms are already multiplied into them. It says which of its
classes a picture shows. The projector is a table: the line of words that a class is told by.
Importing this file makes transformers' auto classes know the model.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.llava.modeling_llava import (
    LlavaForConditionalGeneration,
    LlavaModel,
    LlavaPreTrainedModel,
)

_AT_ONCE = 8  # pictures in one pass: the first stages take some 15 MB for each of 224 x 224
_MOST = 2**13  # of any size in the config
_MOST_BLOCKS = 64  # of a stage
# Repeats, kernel, stride, expansion and width of each stage of EfficientNet-Lite0.
LITE0 = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)


class EfficientNetLiteConfig(transformers.PreTrainedConfig):
    """The tower's sizes; ``id2label`` names its classes.

    Attributes:
        stages: repeats, kernel, stride, expansion and width of each.
        stem: width of the first convolution. hidden_size: of what is classified.
        patch_size: pixels of a side that become one place of the last stage.
    """

    model_type = "efficientnet_lite"

    stages: Any = LITE0
    stem: int = 32
    hidden_size: int = 1280
    image_size: int = 224
    patch_size: int = 32

    def __post_init__(self, **kwargs: Any) -> None:
        """Check the sizes, of which the model's layers are made. Raises ValueError."""
        super().__post_init__(**kwargs)
        sizes = [self.stem, self.hidden_size, *(size for stage in self.stages for size in stage)]
        whole = all(type(size) is int and 1 <= size <= _MOST for size in sizes)
        if not whole or any(len(stage) != 5 or stage[0] > _MOST_BLOCKS for stage in self.stages):
            raise ValueError("stages are no sizes of an EfficientNet-Lite")


class PhotosConfig(transformers.LlavaConfig):
    """A tower, a language model, and how the one's classes are told to the other.

    Attributes:
        table_size: words that the lines are made of.
        image_seq_length: words of a line.
        sure: probability from which a class is told as sure.
    """

    model_type = "mmkv_photos"

    table_size: int = 1
    sure: float = 0.3


class SameConv2d(nn.Conv2d):
    """A convolution whose padding is TensorFlow's "same": an odd pixel goes to the end."""

    def forward(self, pixels: Tensor) -> Tensor:
        """Compute ``[n, out, ceil(h / stride), ceil(w / stride)]`` of ``[n, in, h, w]``."""
        pads: list[int] = []
        shapes = zip(pixels.shape[2:], self.kernel_size, self.stride, strict=True)
        for size, kernel, stride in reversed(list(shapes)):
            lacking = max((-(-size // stride) - 1) * stride + kernel - size, 0)
            pads += [lacking // 2, lacking - lacking // 2]
        return super().forward(nn.functional.pad(pixels, pads))


class InvertedBlock(nn.Module):
    """Widen, look around in each channel, narrow; what keeps its shape is added to the input."""

    def __init__(self, kernel: int, stride: int, expand: int, inner: int, outer: int) -> None:
        super().__init__()
        wide = expand * inner
        self.expand = nn.Conv2d(inner, wide, 1) if expand > 1 else None
        self.depthwise = SameConv2d(wide, wide, kernel, stride, groups=wide)
        self.project = nn.Conv2d(wide, outer, 1)
        self._adds = stride == 1 and inner == outer

    def forward(self, x: Tensor) -> Tensor:
        """Compute ``[n, outer, h', w']`` of ``[n, inner, h, w]``."""
        wide = x if self.expand is None else nn.functional.relu6(self.expand(x))
        made = self.project(nn.functional.relu6(self.depthwise(wide)))
        return made + x if self._adds else made


class EfficientNetLite(transformers.PreTrainedModel):
    """The classifier."""

    config_class = EfficientNetLiteConfig
    main_input_name = "pixel_values"
    _supports_sdpa = True  # it attends to nothing; the whole model is asked for

    def __init__(self, config: EfficientNetLiteConfig) -> None:
        super().__init__(config)
        self.stem = SameConv2d(3, config.stem, 3, 2)
        blocks, width = [], config.stem
        for repeats, kernel, stride, expand, outer in config.stages:
            for number in range(repeats):
                each = 1 if number else stride
                blocks.append(InvertedBlock(kernel, each, expand, width, outer))
                width = outer
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Conv2d(width, config.hidden_size, 1)
        self.classify = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Compute logits ``[n, classes]`` of pixels ``[n, 3, image_size, image_size]``."""
        return torch.cat([self._logits(part) for part in pixel_values.split(_AT_ONCE)])

    def _logits(self, pixels: Tensor) -> Tensor:
        x = self.blocks(nn.functional.relu6(self.stem(pixels)))
        seen: Tensor = self.classify(nn.functional.relu6(self.head(x)).mean((2, 3)))
        return seen


class ClassLines(nn.Module):
    """The projector: the words by which the likeliest class is told."""

    lines: Tensor

    def __init__(self, config: PhotosConfig) -> None:
        super().__init__()
        shape = (2, config.vision_config.num_labels, config.image_seq_length)
        self.register_buffer("lines", torch.zeros(shape, dtype=torch.int64))
        self.words = nn.Embedding(config.table_size, config.text_config.hidden_size)
        self._sure = config.sure

    def forward(self, logits: Tensor) -> Tensor:
        """Return the features ``[n, words of a line, hidden]`` for logits ``[n, classes]``.

        ``lines[0]`` tells a class that is sure, ``lines[1]`` one that is a guess.
        """
        probability, best = logits.float().softmax(-1).max(-1)
        unsure = (probability < self._sure).long()
        found: Tensor = self.words(self.lines[unsure, best])
        return found


class PhotosModel(LlavaModel):
    """A LLaVA of these parts, without the head of the language model."""

    config_class = PhotosConfig

    def __init__(self, config: PhotosConfig) -> None:
        LlavaPreTrainedModel.__init__(self, config)
        self.vision_tower = EfficientNetLite(config.vision_config)
        self.multi_modal_projector = ClassLines(config)
        self.language_model = transformers.AutoModel.from_config(config.text_config)
        self.post_init()

    def get_image_features(self, pixel_values: Tensor, **settings: Any) -> Any:
        """Return the features of pictures in ``pooler_output``: ``[words of a line, hidden]`` each.

        LLaVA's settings, which choose layers of its tower, mean nothing here.
        """
        made = self.multi_modal_projector(self.vision_tower(pixel_values))
        return BaseModelOutputWithPooling(pooler_output=tuple(made))


class PhotosForConditionalGeneration(LlavaForConditionalGeneration):
    """The whole model."""

    config_class = PhotosConfig

    def __init__(self, config: PhotosConfig) -> None:
        LlavaPreTrainedModel.__init__(self, config)
        self.model = PhotosModel(config)
        text = config.text_config
        self.lm_head = nn.Linear(text.hidden_size, text.vocab_size, bias=False)
        self.post_init()


transformers.AutoConfig.register(EfficientNetLiteConfig.model_type, EfficientNetLiteConfig)
transformers.AutoConfig.register(PhotosConfig.model_type, PhotosConfig)
transformers.AutoModel.register(EfficientNetLiteConfig, EfficientNetLite)
transformers.AutoModelForImageTextToText.register(PhotosConfig, PhotosForConditionalGeneration)
