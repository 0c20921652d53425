"""The bundled model's tokenizer: every word of the drawn scenes is one token."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mmkv.training.data.scenes import COLOURS, SHAPES, object_names

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
_WORDS = (
    "system user assistant what is at in row column of the where which cell how many objects are "
    "there do you see a read word number this colour shape name every list all picture has was "
    "first second both yes no nothing and it an I tell me about image see things can one two "
    "three four five six seven eight nine ten please describe count answer question with not has "
    "What Where Which How Is Do Read Name List seconds on to or same different object letters "
    "ignore remember keep skip video frame start end changed change written were below above left "
    "right beside before after third fourth fifth sixth seventh eighth last next"
).split()

# Renders what the training data is written in; content parts as in the Qwen3-VL template, but for
# the start and end that it puts around a video, whose frames have their own.
CHAT_TEMPLATE = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string -%}
{{ message.content }}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}
<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type == 'video' -%}
<|video_pad|>
{%- else -%}
{{ part.text }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build a byte-level tokenizer: every word of the scenes is one token, anything else its
    bytes.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = sorted(
        {*_WORDS, *COLOURS, *SHAPES, *(part for name in object_names() for part in name.split())}
    )
    vocabulary = [*alphabet, *words, *(f"Ġ{word}" for word in words), *(f"Ġ{d}" for d in range(10))]
    ids = {token: index for index, token in enumerate(dict.fromkeys(vocabulary))}
    # Without merges a word is either in the vocabulary as a whole or falls apart into bytes.
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=8192,
    )
