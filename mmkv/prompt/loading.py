"""Load the tokenizer, chat template and picture processing of a checkpoint.

How it prepares pictures and videos is checked before a picture is prepared so.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from mmkv.engine.errors import STOPS, InputError, MmkvError, ModelError, first_line
from mmkv.engine.model.gguf.config import FILES, TOKENIZER, gguf_folder, is_gguf
from mmkv.engine.model.source import at_hand
from mmkv.prompt.processing import (
    END,
    PICTURES,
    ROW,
    HubProcessor,
    IdeficsProcessor,
    InternVLProcessor,
    OneVisionProcessor,
    PixtralProcessor,
    Processor,
    QwenProcessor,
    marks_of,
)
from mmkv.prompt.template import ChatTemplate

_VIDEOS, BOTH = "video_preprocessor_config.json", "processor_config.json"
_TEMPLATE = "chat_template"


def load_processor(
    name: str | Path, min_pixels: int | None = None, max_pixels: int | None = None
) -> Processor:
    """Load what the checkpoint ``name`` needs besides its weights: a folder, a hub id, or a name
    that ``mmkv models`` lists.

    ``min_pixels``, ``max_pixels``: bounds on a picture's pixels, for models that take pictures
    of any size. Raises ModelError when files are missing or damaged, InputError for pixel bounds
    that the model does not take.
    """
    try:
        return _load(at_hand(str(name)), min_pixels, max_pixels)
    except (MmkvError, *STOPS):
        raise
    # Damaged files surface as nearly anything, the tokenizers library's bare Exception among it.
    except BaseException as error:
        raise ModelError(
            f"cannot load the tokenizer and processor of {name}: {first_line(error)}; check that "
            "tokenizer.json, tokenizer_config.json and preprocessor_config.json are complete"
        ) from error


def _load(name: str | Path, min_pixels: int | None, max_pixels: int | None) -> Processor:
    from transformers import AutoTokenizer

    from mmkv.engine.model.families import Qwen3VLFamily, find
    from mmkv.engine.model.families.config import read_config

    if is_gguf(name):
        name = gguf_folder(name)
    if (folder := Path(name)).joinpath(FILES).is_file() and not (folder / TOKENIZER).is_file():
        raise ModelError(f"{folder.name} holds no tokenizer; get a GGUF file that has one")
    config = read_config(name)
    family = find(str(config.model_type))
    tokenizer = AutoTokenizer.from_pretrained(name, config=config)
    if "istral" in str(config.model_type) and _splits_as_llama(tokenizer):
        # Where transformers knows that a file has a wrong expression, it offers the right one.
        tokenizer = AutoTokenizer.from_pretrained(name, config=config, fix_mistral_regex=True)
    if family is not None and issubclass(family, Qwen3VLFamily) and family.like_qwen:
        return _load_qwen(
            name, tokenizer, config.vision_config, min_pixels, max_pixels, family.frames_apart
        )
    if min_pixels is not None or max_pixels is not None:
        raise InputError(
            "this model does not take pictures of any size; drop --min-pixels and --max-pixels"
        )
    if getattr(config, "vision_config", None) is None:
        return Processor(
            tokenizer, ChatTemplate(tokenizer, template_of(name, tokenizer, False), parts=False)
        )

    if config.model_type in ("idefics3", "smolvlm"):
        return _load_idefics(name, tokenizer, config)
    if config.vision_config.model_type == "pixtral":
        return _load_pixtral(name, tokenizer, config)
    return load_hub(name, tokenizer, config)


def _splits_as_llama(tokenizer: Any) -> bool:
    """Whether digits are taken by threes; Mistral's tokenizers take them one by one."""
    if tokenizer.init_kwargs.get("fix_mistral_regex") is False:  # as the checkpoint wants it
        return False
    before = tokenizer.backend_tokenizer.pre_tokenizer
    return before is not None and b"p{N}{1,3}" in before.__getstate__()


def _load_pixtral(name: str | Path, tokenizer: Any, config: Any) -> Processor:
    said, vision = read_json(name, BOTH), config.vision_config
    pictures = _pictures_of(name)
    require_settings(pictures, PICTURES, vision, pixels=False)
    usual = {"image_token": "[IMG]", "image_break_token": ROW, "image_end_token": END}
    token, *marks = (_known_token(tokenizer, said.get(key) or usual[key]) for key in usual)
    template = ChatTemplate(
        tokenizer, template_of(name, tokenizer, True), True, {"image": token}, [token, *marks]
    )
    patch = vision.patch_size * getattr(config, "spatial_merge_size", 1)
    return PixtralProcessor(tokenizer, template, pictures, token, patch, (marks[0], marks[1]))


def _load_idefics(name: str | Path, tokenizer: Any, config: Any) -> Processor:
    vision = config.vision_config
    pictures = _pictures_of(name, config.model_type)
    require_settings(pictures, PICTURES, vision, pixels=False)
    tile = _edges(pictures.max_image_size).get("longest_edge")
    if tile != vision.image_size:
        raise _wrong(PICTURES, "max_image_size", tile, f"{vision.image_size}, as config.json says")
    marks = [_known_token(tokenizer, mark) for mark in marks_of(tokenizer)]
    places = [f"<row_{row}_col_{at}>" for row in range(1, 9) for at in range(1, 9)]
    vocabulary = tokenizer.get_vocab()
    tokens = [*marks, *(place for place in places if place in vocabulary)]
    source, videos = template_of(name, tokenizer, True), None
    placeholders = {"image": marks[0]}
    if config.model_type == "smolvlm":
        videos, file = video_settings(name)
        _require_sampling(videos, file)
        source = _with_videos(source)
        placeholders["video"] = getattr(tokenizer, "video_token", None) or "<video>"
        tokens.append(placeholders["video"])
    template = ChatTemplate(tokenizer, source, True, placeholders, tokens)
    cells = (tile // vision.patch_size // config.scale_factor) ** 2
    return IdeficsProcessor(tokenizer, template, pictures, tile, cells, videos)


def _with_videos(source: str | None) -> str | None:
    """Return transformers' template for SmolVLM's videos in the place of the same without them."""
    from transformers.models.smolvlm.processing_smolvlm import DEFAULT_CHAT_TEMPLATE

    videos = "{% elif line['type'] == 'video' %}{{ '<video>' }}"
    same = source is not None and source.strip() == DEFAULT_CHAT_TEMPLATE.replace(videos, "")
    return DEFAULT_CHAT_TEMPLATE if same else source


def _require_sampling(videos: Mapping[str, Any], file: str) -> None:
    """Raise ModelError for settings of SmolVLM's videos that name no frames or no size."""
    require_frames(videos, file, either=False)
    sampling = videos.get("video_sampling")
    if sampling is None:
        return
    if not isinstance(sampling, Mapping):
        raise _wrong(file, "video_sampling", sampling, "an object")
    require_frames(sampling, file, either=False)
    edge = _edges(sampling.get("video_size")).get("longest_edge", 1)
    if not _whole(edge, _MOST_EDGE):
        raise _wrong(file, "video_size", edge, f"an edge from 1 to {_MOST_EDGE:,}")


def _pictures_of(name: str | Path, module: str | None = None) -> Any:
    """Load the image processor of a model that takes pictures. Raises ModelError without one."""
    found = load_image_processor(name, module)
    if found is None:
        raise ModelError(f"{name} has no {PICTURES}; get the complete checkpoint")
    return found


def _known_token(tokenizer: Any, text: str) -> str:
    """Return a text that is one token of the tokenizer. Raises ModelError for another."""
    if text not in tokenizer.get_vocab():
        raise ModelError(
            f"the tokenizer does not know {ascii(text)[:60]}, which stands for pictures; get this "
            "checkpoint's tokenizer.json"
        )
    return text


def _load_qwen(
    name: str | Path,
    tokenizer: Any,
    vision: Any,
    min_pixels: int | None,
    max_pixels: int | None,
    frames_apart: bool,
) -> QwenProcessor:
    from mmkv.prompt.qwen_vision import (
        FRAME_END,
        FRAME_START,
        IMAGE,
        RUN,
        VIDEO,
        VideoRules,
        frame_rule,
    )

    load = partial(_load_qwen_pictures, name, vision) if _has_image_processor(name) else None
    size = None
    if min_pixels is not None or max_pixels is not None:
        if load is None:
            raise InputError(f"{name} has no image processor; drop --min-pixels and --max-pixels")
        own = load().size
        size = {
            "shortest_edge": min_pixels or own["shortest_edge"],
            "longest_edge": max_pixels or own["longest_edge"],
        }
        if not 0 < size["shortest_edge"] <= size["longest_edge"]:
            raise InputError(
                f"min-pixels {size['shortest_edge']} and max-pixels {size['longest_edge']} leave "
                "no size between them; give 0 < min <= max"
            )
    rules = VideoRules() if frames_apart else RUN
    config, file = video_settings(name)
    if file == PICTURES:  # older checkpoints; the bounds are of pictures alone
        bounds = {"size", "min_pixels", "max_pixels"}
        config = {key: value for key, value in config.items() if key not in bounds}
    require_settings(config, file, vision, pixels=True)
    require_frames(config, file, either=True)
    placeholders = {
        "image": f"{FRAME_START}{IMAGE}{FRAME_END}",
        "video": f"{FRAME_START}{VIDEO}{FRAME_END}",
    }
    tokens = (IMAGE, VIDEO, FRAME_START, FRAME_END)
    source = template_of(name, tokenizer, True)
    template = ChatTemplate(tokenizer, source, True, placeholders, tokens)
    rule = frame_rule(config, frames_apart)
    return QwenProcessor(tokenizer, template, load, rules.changed(config), size, rule)


def video_settings(name: str | Path) -> tuple[dict[str, Any], str]:
    """Read what the checkpoint says of videos, and the file that says it, as transformers looks
    for it: of ``processor_config.json`` the part, a file of its own, that of the pictures.

    Raises ModelError.
    """
    nested = read_json(name, BOTH).get("video_processor")
    if nested is not None:
        if not isinstance(nested, dict):
            raise ModelError(f"{BOTH}: video_processor is no object; get the original file")
        return nested, BOTH
    own = read_json(name, _VIDEOS)
    return (own, _VIDEOS) if own else (read_json(name, PICTURES), PICTURES)


def _load_qwen_pictures(name: str | Path, vision: Any) -> Any:
    image_processor = load_image_processor(name)
    require_settings(image_processor, PICTURES, vision, pixels=True)
    return image_processor


def _has_image_processor(name: str | Path) -> bool:
    return bool(_path(name, PICTURES) or read_json(name, BOTH).get("image_processor"))


def load_image_processor(name: str | Path, module: str | None = None) -> Any | None:
    """Load the image processor in its PIL form (the same pixels with and without torchvision).

    ``module``: transformers' module of a family whose form transformers 5.17 finds by that alone.
    """
    # transformers 5.17 hides the name at its top level when torchvision is absent; the class itself
    # does not need torchvision in either version.
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    if not _has_image_processor(name):
        return None  # the model then takes text only
    try:
        if module is None:
            return AutoImageProcessor.from_pretrained(name, backend="pil")
        found = import_module(f"transformers.models.{module}.image_processing_pil_{module}")
        return getattr(found, found.__all__[0]).from_pretrained(name)
    except STOPS:
        raise
    except BaseException as error:
        raise ModelError(
            f"cannot read the picture settings in {PICTURES} of {name} ({first_line(error)}); "
            "get the original file, or remove it to use the model for text only"
        ) from error


def template_of(name: str | Path, tokenizer: Any, sees: bool) -> str | None:
    """Return the chat template that transformers would take, None where there is none.

    A processor's is that of ``processor_config.json``, else of ``chat_template.json``, else
    ``chat_template.jinja``; a tokenizer's is ``chat_template.jinja``, else that of its config. Of
    several, with names, the one named ``default`` counts.

    Args:
        sees: whether transformers has a processor for the model, not a tokenizer alone.

    Raises:
        ModelError: the template is no text, or none of several is the default.
    """
    own, older = tokenizer.chat_template, read_json(name, "chat_template.json").get(_TEMPLATE)
    sources = [read_json(name, BOTH).get(_TEMPLATE), older, own] if sees else [own, older]
    found = next((one for one in sources if one), None)
    if isinstance(found, list):
        found = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
    if isinstance(found, dict):
        if "default" not in found:
            named = ", ".join(sorted(ascii(key)[1:-1] for key in found))[:100]
            raise ModelError(
                f"{name} has several chat templates ({named}) and none is named default; save the "
                "one that you want as chat_template.jinja"
            )
        found = found["default"]
    if found is not None and not isinstance(found, str):
        raise ModelError(f"the chat template of {name} is no text; get the original file")
    return found or None


def read_json(name: str | Path, file: str) -> dict[str, Any]:
    """Read the object in a JSON file of the checkpoint, {} when it has none."""
    path = _path(name, file)
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path else {}
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(
            f"cannot read {file} of {name}: {first_line(error)}; fetch it again"
        ) from error
    if not isinstance(found, dict):
        raise ModelError(f"{file} of {name} holds no object; fetch it again")
    return found


def _path(name: str | Path, file: str) -> Path | None:
    from transformers.utils import cached_file

    try:
        found = cached_file(str(name), file, _raise_exceptions_for_missing_entries=False)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"cannot read {file} of {name}: {first_line(error)}; fetch it again"
        ) from error
    return Path(found) if found else None


def load_hub(name: str | Path, tokenizer: Any, config: Any) -> HubProcessor:
    from transformers import AutoProcessor

    try:
        processor = AutoProcessor.from_pretrained(name, backend="pil")
    # Without torchvision the video processor of LLaVA-OneVision refuses to load, with it broken
    # transformers raises RuntimeError; the rest of the processor works without it.
    except (ImportError, RuntimeError, ValueError, OSError) as error:
        processor = without_video(name, tokenizer, error)
    vision = config.vision_config
    require_settings(processor.image_processor, PICTURES, vision, pixels=False)
    template = template_of(name, tokenizer, True)
    placeholders = {"image": processor.image_token + "\n"}
    tokens = [processor.image_token]
    kind: Callable[..., HubProcessor] = HubProcessor
    if config.model_type == "llava_onevision":
        kind = OneVisionProcessor
    if config.model_type == "internvl":
        require_tile(processor.image_processor, PICTURES)
        settings, file = video_settings(name)
        require_settings(settings, file, vision, pixels=False)
        require_frames(settings, file, either=False)
        if settings.get("size") is not None:
            require_tile({"size": settings["size"], "resample": 3}, file)
        kind = partial(InternVLProcessor, videos=settings)
        placeholders["video"] = processor.video_token + "\n"
        tokens += [processor.video_token, processor.start_image_token, processor.end_image_token]
    return kind(processor, ChatTemplate(processor.tokenizer, template, True, placeholders, tokens))


def without_video(name: str | Path, tokenizer: Any, cause: Exception) -> Any:
    """Assemble a transformers processor from its parts, leaving out the video processor."""
    import transformers

    config = read_json(name, BOTH)
    settings = read_json(name, PICTURES) | config
    base = getattr(transformers, str(settings.get("processor_class")), None)
    image_processor = load_image_processor(name)
    if base is None or image_processor is None:
        raise ModelError(
            f"cannot load the picture processor of {name}: {first_line(cause)}; check "
            f"{PICTURES} and {BOTH}"
        ) from cause

    class PicturesOnly(base):  # type: ignore[misc, valid-type]
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            if argument is None:
                return type(None)
            return super().check_argument_for_proper_class(argument_name, argument)

    known = {
        key: value
        for key, value in config.items()
        if key not in ("processor_class", "image_processor", "video_processor")
    }
    return PicturesOnly(
        image_processor=image_processor, tokenizer=tokenizer, video_processor=None, **known
    )


_MOST_PIXELS = 2**27  # to enlarge a picture to
_MOST_EDGE = 2**13
_MOST_FRAMES = 2**16
# What this decoder's vision config calls it.
_PATCHES = {
    "patch_size": "patch_size",
    "temporal_patch_size": "temporal_patch_size",
    "merge_size": "spatial_merge_size",
}


def require_settings(settings: Any, file: str, vision: Any, pixels: bool) -> None:
    """Raise ModelError for settings that are of a wrong type, absurd, or another model's.

    Args:
        settings: a loaded picture processor, or the content of its file.
        file: for messages. vision: the vision part of the model's config.
        pixels: ``size`` bounds a picture's pixels; otherwise its edges.
    """
    for name, theirs in _PATCHES.items() if pixels else ():
        own = getattr(vision, theirs, None)
        words = f"{own}, as the model's config has it" if own else "a whole number"
        _require(settings, file, {name: (partial(_patch, own=own), words)})
    _require(settings, file, _COLOURS)
    most = _MOST_PIXELS if pixels else _MOST_EDGE
    sized = partial(_bounds, most=most, pixels=pixels), f"sizes from 1 to {most:,}"
    _require(settings, file, dict.fromkeys(("size", "crop_size"), sized))


def _require(settings: Any, file: str, rules: _Rules) -> None:
    """Raise ModelError for a setting that is there and not as a rule wants it."""
    for name, (right, wanted) in rules.items():
        value = _setting(settings, name)
        if value is not None and not right(value):
            raise _wrong(file, name, value, wanted)


def _setting(settings: Any, name: str) -> Any:
    return settings.get(name) if isinstance(settings, Mapping) else getattr(settings, name, None)


def require_frames(settings: Mapping[str, Any], file: str, either: bool) -> None:
    """Raise ModelError for settings of videos that name no frames.

    ``either``: ``fps`` and ``num_frames`` exclude each other, as transformers has it for Qwen-VL.
    """
    _require(settings, file, _FRAMES)
    least, most = settings.get("min_frames"), settings.get("max_frames")
    if least is not None and most is not None and least > most:
        raise _wrong(file, "min_frames", least, f"at most max_frames ({most})")
    if either and settings.get("fps") is not None and settings.get("num_frames") is not None:
        raise ModelError(f"{file}: fps and num_frames exclude each other; set one of them to null")


def require_tile(settings: Any, file: str) -> None:
    """Raise ModelError where a picture processor's tile or filter for it is not known.

    Args: as of :func:`require_settings`.
    """
    size, resample = _setting(settings, "size"), _setting(settings, "resample")
    if not {"height", "width"} <= _edges(size).keys():
        raise _wrong(file, "size", size, "height and width of a tile")
    if resample not in range(6):
        raise _wrong(file, "resample", resample, "a filter from 0 to 5")


def _edges(value: Any) -> dict[str, Any]:
    """Return the sizes by name; transformers has a class of its own for them in some versions."""
    if isinstance(value, int):
        return {"edge": value}
    names = ("height", "width", "shortest_edge", "longest_edge", "max_height", "max_width")
    found = {name: _setting(value, name) for name in names}
    return {name: each for name, each in found.items() if each is not None}


def _whole(value: Any, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most


def _real(value: Any) -> bool:
    return (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and math.isfinite(value)
        and abs(value) < 1e6
    )


def _patch(value: Any, own: int | None) -> bool:
    return _whole(value, _MOST_EDGE) and own in (None, value)


def _bounds(value: Any, most: int, pixels: bool) -> bool:
    """Whether sizes are whole numbers up to ``most``; one that bounds ``pixels`` may be larger."""
    edges = _edges(value)
    upper = edges.pop("longest_edge", None) if pixels else None
    if not (edges or upper) or not all(_whole(each, most) for each in edges.values()):
        return False
    return upper is None or (_whole(upper, 2**62) and upper >= edges.get("shortest_edge", 1))


def _colours(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == 3 and all(map(_real, value))


_Rules = Mapping[str, tuple[Callable[[Any], bool], str]]
_COLOURS: _Rules = {
    "image_mean": (_colours, "three numbers"),
    "image_std": (lambda value: _colours(value) and 0 not in value, "three numbers"),
    "rescale_factor": (lambda value: _real(value) and value != 0, "a number"),
}
_COUNT = partial(_whole, most=_MOST_FRAMES), f"a number of frames from 1 to {_MOST_FRAMES:,}"
_SWITCH = (lambda value: isinstance(value, bool)), "true or false"
_FRAMES: _Rules = {
    **dict.fromkeys(("num_frames", "min_frames", "max_frames"), _COUNT),
    "max_video_tokens": (partial(_whole, most=2**31), f"a number of frames from 1 to {2**31:,}"),
    "fps": (lambda value: _real(value) and 0 < value <= 1000, "frames a second above 0"),
    "initial_shift": (
        lambda value: isinstance(value, bool) or (_real(value) and value >= 0),
        "true, false or a number of frames",
    ),
    **dict.fromkeys(("do_resize", "do_rescale", "do_normalize", "cap_pixels_per_frame"), _SWITCH),
    "resample": (lambda value: value in range(6), "a filter from 0 to 5"),
}


def _wrong(file: str, name: str, value: Any, wanted: str) -> ModelError:
    return ModelError(f"{file}: {name} is {ascii(value)[:60]}, not {wanted}; get the original file")
