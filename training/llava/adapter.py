"""The adapter: a small SigLIP tower and LLaVA's projector, their files, and joining a checkpoint.

An adapter folder holds ``adapter.safetensors`` (bfloat16), ``adapter.json``,
``chat_template.jinja`` and the picture processor's settings. Joined with the language model it was
trained for it is an ordinary LLaVA checkpoint.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers.models.llava.modeling_llava import LlavaMultiModalProjector
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from mmkv.engine.errors import InputError, ModelError
from mmkv.engine.model.fingerprint import fingerprint
from mmkv.engine.model.source import files_of
from mmkv.resources import BUNDLED_ADAPTER, asset
from mmkv.training.llava.pictures import PIXELS, SIDE, Shown
from mmkv.training.measure.record import require_output

FORMAT = "mmkv-llava-adapter-1"
IMAGE_TOKEN, SPARE_TOKEN = "<image>", "<empty_output>"
WEIGHTS, FACTS, TEMPLATE = "adapter.safetensors", "adapter.json", "chat_template.jinja"
EXAMPLE = "example.png"
EXAMPLE_SHOWS = Shown(("frog", "red circle", "pizza", "umbrella"))
# Some versions of transformers leave "vision_model" out; every version reads it, as the hub has it.
_TOWER = re.compile(r"^vision_tower\.(?!vision_model\.)")
# SmolLM2-Instruct's own, with pictures: what has none is rendered as by the language model alone.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{{ '<image>\n' if part['type'] == 'image' else part['text'] }}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def vision_config(width: int = 128, layers: int = 4) -> Any:
    """Return the tower's shape: pictures of 128 x 128 pixels in 4 x 4 patches."""
    return transformers.SiglipVisionConfig(
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        image_size=PIXELS,
        patch_size=PIXELS // SIDE,
        vision_use_head=False,
    )


def llava_config(vision: Any, text: Any, image_token: int = 0) -> Any:
    """Return the configuration of a joined checkpoint."""
    # Copies: a config takes the attention function of those in it away, and a model of such a
    # config attends to what comes later.
    return transformers.LlavaConfig(
        vision_config=copy.deepcopy(vision),
        text_config=copy.deepcopy(text),
        image_token_index=image_token,
        image_seq_length=SIDE**2,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        tie_word_embeddings=text.tie_word_embeddings,
    )


class LlavaAdapter(nn.Module):
    """Tower and projector, by the names that they have in a LLaVA checkpoint.

    Args:
        vision: the tower's config. text: the language model's.
    """

    def __init__(self, vision: Any, text: Any) -> None:
        super().__init__()
        self.vision_tower = transformers.AutoModel.from_config(vision)
        self.multi_modal_projector = LlavaMultiModalProjector(llava_config(vision, text))
        self._scale = SiglipImageProcessorPil(size={"height": PIXELS, "width": PIXELS})
        self._pixels: dict[Shown, Tensor] = {}

    def forward(self, shown: Sequence[Shown]) -> Tensor:
        """Return what the language model reads of pictures: float32 ``[n, SIDE * SIDE, hidden]``.

        These are the features of transformers' ``LlavaModel.get_image_features``.
        """
        return self.multi_modal_projector(self.seen(shown))

    def seen(self, shown: Sequence[Shown]) -> Tensor:
        """Return what the projector reads: float32 ``[n, SIDE * SIDE, width of the tower]``."""
        device = self.multi_modal_projector.linear_1.weight.device
        pixels = torch.stack([self._read(each) for each in shown]).to(device)
        return self.vision_tower(pixels, output_hidden_states=True).hidden_states[-1]

    def _read(self, shown: Shown) -> Tensor:
        """Return the processor's pixels; those of a file are kept, as it would be read again."""
        if shown.mirrored:
            return self._read(replace(shown, mirrored=False)).flip(-1)
        if shown in self._pixels:
            return self._pixels[shown].float()
        made = self._scale(shown.picture(), return_tensors="pt")["pixel_values"][0]
        if shown.file is not None:
            self._pixels[shown] = made.half()
        return made


def save(adapter: LlavaAdapter, folder: Path, facts: dict[str, Any]) -> None:
    """Write an adapter folder; its tensors are rounded to bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        _TOWER.sub("vision_tower.vision_model.", name): tensor.detach().cpu().to(torch.bfloat16)
        for name, tensor in adapter.state_dict().items()
    }
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    vision = adapter.vision_tower.config.to_diff_dict()
    page = {"format": FORMAT, "vision_config": vision, **facts}
    (folder / FACTS).write_text(json.dumps(page, indent=1) + "\n")
    (folder / TEMPLATE).write_text(CHAT_TEMPLATE)


def load(folder: Path, text: Any) -> LlavaAdapter:
    """Read an adapter for a language model of this config. Raises ModelError."""
    made = LlavaAdapter(transformers.SiglipVisionConfig(**facts_of(folder)["vision_config"]), text)
    own = made.state_dict()
    stored = read_tensors(folder / WEIGHTS).items()
    named = {n if n in own else n.replace(".vision_model", ""): t.float() for n, t in stored}
    shapes = {name: tensor.shape for name, tensor in own.items()}
    if {name: tensor.shape for name, tensor in named.items()} != shapes:
        raise ModelError(f"{folder} holds an adapter of another shape; name another")
    made.load_state_dict(named)
    return made


def facts_of(folder: Path) -> dict[str, Any]:
    """Return what ``adapter.json`` says. Raises ModelError: it is no adapter's."""
    try:
        found = json.loads((folder / FACTS).read_text())
        if found["format"] != FORMAT or not isinstance(found["vision_config"], dict):
            raise ValueError(f"format {found['format']!r}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{folder} holds no LLaVA adapter ({error}); name another") from None
    return found


def join(adapter: Path, language_model: Path, output: Path, note: Callable[[str], None]) -> None:
    """Write a LLaVA checkpoint to ``output``: a language model and an adapter for it.

    Beside it lies a picture that it can read.

    Nothing is downloaded. Weights are copied as they are; the tokenizer's ``<empty_output>``,
    which no chat uses, becomes ``<image>``.

    Args:
        note: gets a line where the adapter was trained for other weights.

    Raises:
        ModelError: one of them is not what it should be, or they do not fit each other.
        InputError: ``output`` cannot be written, or holds a checkpoint.
    """
    facts = facts_of(adapter)
    text, files = language_model_of(language_model)
    tensors = read_tensors(adapter / WEIGHTS)
    width = tensors["multi_modal_projector.linear_2.bias"].shape[0]
    if text.model_type != "llama" or text.hidden_size != width:
        raise ModelError(
            f"the adapter is for a Llama of hidden size {width}, and {language_model} is "
            f"{text.model_type} of {getattr(text, 'hidden_size', '?')}; name the language model "
            f"that it was trained for: {facts.get('base_model', 'SmolLM2-135M-Instruct')}"
        )
    if facts.get("base_fingerprint") != fingerprint(str(language_model)):
        note("the adapter was trained for other weights of this shape; it may not fit them")
    tokenizer = with_image_token(transformers.AutoTokenizer.from_pretrained(language_model))
    vision = transformers.SiglipVisionConfig(**facts["vision_config"])
    config = llava_config(vision, text, tokenizer.convert_tokens_to_ids(IMAGE_TOKEN))
    config.architectures, config.dtype = ["LlavaForConditionalGeneration"], text.dtype
    processor = transformers.LlavaProcessor(
        image_processor=SiglipImageProcessorPil(size={"height": PIXELS, "width": PIXELS}),
        tokenizer=tokenizer,
        patch_size=PIXELS // SIDE,
        vision_feature_select_strategy="full",
        chat_template=(adapter / TEMPLATE).read_text(),
        image_token=IMAGE_TOKEN,
    )
    # As LLaVA checkpoints on the hub name a language model's tensors.
    write_joined(output, language_model, files, lambda name: f"language_model.{name}", tensors)
    config.save_pretrained(output)
    processor.save_pretrained(output)
    EXAMPLE_SHOWS.picture().save(output / EXAMPLE)


def bundled_adapter() -> Path:
    """Return the folder of the adapter that a checkout has. Raises InputError."""
    try:
        return asset(BUNDLED_ADAPTER)
    except ModelError as error:  # a wheel leaves it out, to stay small
        raise InputError(
            "this installation holds no adapter: a checkout of mmkv has "
            f"assets/{BUNDLED_ADAPTER}, which `python -m mmkv.training.llava join --adapter` takes"
        ) from error


def pull(folder: Path, language_model: Path, say: Callable[[str], None]) -> None:
    """Join the bundled adapter with SmolLM2-135M, for ``mmkv pull``. Raises MmkvError."""
    join(bundled_adapter(), language_model, folder, say)


def language_model_of(folder: Path) -> tuple[Any, list[Path]]:
    """Return config and weight files of the language model in ``folder``. Raises ModelError."""
    files = files_of(lambda name: _present(folder / name))
    if files is None or not (folder / "config.json").is_file():
        raise ModelError(
            f"{folder} is no checkpoint with safetensors; fetch the language model with `mmkv pull "
            "smollm2-135m`, or from the hub, and name its folder"
        )
    config = transformers.AutoConfig.from_pretrained(folder)
    config._name_or_path = ""  # a folder of this machine
    return config, files


def write_joined(
    output: Path,
    language_model: Path,
    files: Sequence[Path],
    place: Callable[[str], str],
    tensors: dict[str, Tensor],
) -> None:
    """Write the weights of a joined checkpoint, and the language model's generation settings.

    Args:
        files: the language model's weights. place: names its tensors as the checkpoint has them.
        tensors: what makes it see.

    Raises:
        InputError: ``output`` cannot be written, or holds a checkpoint. ModelError: damaged files.
    """
    if (output / "config.json").exists():
        raise InputError(f"{output} holds a checkpoint; name another folder")
    require_output(output)
    shards = [
        {place(name): tensor for name, tensor in read_tensors(file).items()} for file in files
    ]
    where: dict[str, str] = {}
    total = 0
    for number, part in enumerate([*shards, tensors], 1):
        file = f"model-{number:05}-of-{len(shards) + 1:05}.safetensors"
        save_file(part, output / file, {"format": "pt"})
        where |= dict.fromkeys(part, file)
        total += sum(tensor.nbytes for tensor in part.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (output / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    if (generation := language_model / "generation_config.json").is_file():
        shutil.copy(generation, output)


def with_image_token(tokenizer: Any) -> Any:
    """Return the tokenizer with ``<image>`` in place of ``<empty_output>``, at the same id.

    Raises:
        ModelError: it has neither of them.
    """
    made = json.loads(tokenizer.backend_tokenizer.to_str())
    added = {token["content"]: token for token in made["added_tokens"]}
    if IMAGE_TOKEN not in added:
        if SPARE_TOKEN not in added:
            raise ModelError(
                f"the tokenizer has neither {IMAGE_TOKEN} nor {SPARE_TOKEN}, which no chat uses; "
                "take SmolLM2's"
            )
        added[SPARE_TOKEN]["content"] = IMAGE_TOKEN
        words = made["model"]["vocab"]
        if SPARE_TOKEN in words:
            words[IMAGE_TOKEN] = words.pop(SPARE_TOKEN)
    kept = {
        name: str(token)
        for name, token in tokenizer.special_tokens_map.items()
        if isinstance(token, str)
    }
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(made)),
        chat_template=CHAT_TEMPLATE,
        **kept,
    )


def _present(file: Path) -> Path | None:
    return file if file.is_file() else None


def read_tensors(file: Path) -> dict[str, Tensor]:
    """Read a file of safetensors. Raises ModelError."""
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{file} cannot be read ({error}); get it again") from error
