"""Convert a rendered prompt with pictures and videos to the tensors of a prefill."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmkv.engine.errors import STOPS, InputError, MmkvError, ModelError, first_line
from mmkv.prompt.media import SIZED, load_image
from mmkv.prompt.part_settings import MediaSettings, taken_apart
from mmkv.prompt.picture_settings import require_frames, require_settings
from mmkv.prompt.special import CUT, reading, tokenize
from mmkv.prompt.template import ChatTemplate
from mmkv.prompt.video import Clip, FrameRule, load_video

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

    from mmkv.prompt.qwen_vision import VideoRules

# Text put before a continuation and cut off again after tokenizing, so that a tokenizer that
# treats the start of a text specially (SentencePiece adds a space) sees no start there.
_ANCHOR = "a"
PICTURES, _VIDEOS = "preprocessor_config.json", "video_preprocessor_config.json"
BOTH = "processor_config.json"
_TEMPLATE = "chat_template"
# What inputs have for each token.
PER_TOKEN = frozenset(("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids"))
_PICTURES_IN_PIL = "Qwen2VLImageProcessorPil"


class Processor:
    """Tokenizer, chat template and picture processing of one checkpoint.

    ``sees`` / ``watches``: whether it takes pictures / videos. Each family's way of making pixel
    inputs is a subclass; this class alone serves text-only models.
    """

    sees = False
    watches = False
    frame_rule = FrameRule()  # which frames of a video it is shown
    blind = "this model reads text only; drop the pictures or name another model"
    image_token = video_token = ""
    image_frame = ("", "")  # what is put before and behind the tokens of a picture

    def __init__(self, tokenizer: Any, template: ChatTemplate) -> None:
        self.tokenizer, self.template = tokenizer, template
        self._lock = threading.RLock()  # libraries keep settings of a call in the tokenizer
        self._pictures = 0  # of the whole prompt, while a part of it is encoded

    @property
    def picture_rules(self) -> VideoRules | None:
        """Return the sizes that pictures are scaled to; None where they are not known."""
        return None

    @property
    def size_rule(self) -> Any:
        """Return the rule by which mmkv.prompt.video.load_video scales frames."""
        return None

    def rule(self, pictures: int) -> bool | None:
        """Return by which rule a picture is read in a prompt that has so many; None: by the same.

        Pictures that were read by another rule have to be read again.
        """
        return None

    def load_picture(self, source: Any) -> Image:
        """Load a picture: what :func:`mmkv.prompt.media.load_image` takes, or that with settings
        of its message. Raises InputError, for settings that this model does not take, too.
        """
        found, settings = taken_apart(source)
        picture = load_image(found)
        return self._scaled(picture, settings) if settings.scales else picture

    def load_clip(
        self, source: Any, fps: float | None = None, num_frames: int | None = None
    ) -> Clip:
        """Load a video: what :func:`mmkv.prompt.video.load_video` takes, or that with settings of
        its message, which go before ``fps`` and ``num_frames``. Raises InputError, as
        :meth:`load_picture`.
        """
        found, settings = taken_apart(source)
        rule = self._size_rule_of(settings)
        return load_video(found, fps, num_frames, rule, self.frame_rule, settings)

    def _scaled(self, picture: Image, settings: MediaSettings) -> Image:
        settings.refuse_scaling()
        return picture

    def _size_rule_of(self, settings: MediaSettings) -> Any:
        settings.refuse_scaling()
        return self.size_rule

    def encode(
        self,
        text: str,
        images: Sequence[Image] = (),
        clips: Sequence[Clip] = (),
        continuing: bool = False,
        pictures: int | None = None,
    ) -> dict[str, torch.Tensor]:
        """Make model inputs of one row for ``text``, in which each picture and video has a
        placeholder.

        ``continuing``: the text follows tokens that a session holds, so nothing that marks a
        beginning is added. ``pictures``: how many the whole prompt has, of which ``text`` may be a
        part; None: those given. Raises InputError: no text, placeholders that do not match the
        media, media the model cannot take, a picture the image processor refuses.
        """
        self._check(text, images, clips)
        try:
            with self._lock, reading(text):
                self._pictures = len(images) if pictures is None else pictures
                inputs = self._inputs(
                    _ANCHOR + text if continuing else text, images, clips, continuing
                )
        except ValueError as error:  # e.g. a picture 1 pixel high and 1000 wide
            raise InputError(
                f"the picture cannot be processed: {first_line(error)}; crop it"
            ) from error
        except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
            raise ModelError(
                "a value in the checkpoint's tokenizer or picture settings is wrong "
                f"({type(error).__name__}: {first_line(error)}); check tokenizer_config.json and "
                "preprocessor_config.json"
            ) from error
        if not continuing:
            return inputs
        return self._without_anchor(inputs, text)

    def video_texts(self, clips: Sequence[Clip], inputs: dict[str, torch.Tensor]) -> list[str]:
        """Return the text that :meth:`encode` put in place of each video."""
        return []

    def _check(self, text: str, images: Sequence[Image], clips: Sequence[Clip]) -> None:
        if not text:
            raise InputError("the prompt is empty; write a question")
        if images and not self.sees:
            raise InputError(self.blind)
        if clips and not self.watches:
            raise InputError(
                "this model takes no videos here; use a Qwen-VL or InternVL model or pictures"
            )
        for token, media, kind in (
            (self.image_token, images, "picture"),
            (self.video_token, clips, "video"),
        ):
            found = text.count(token) if token else 0
            if found != len(media):
                raise InputError(
                    f"the prompt has {found} {kind} placeholders ({token}) for {len(media)} "
                    f"{kind}s; do not write the placeholder yourself"
                )

    def _inputs(
        self, text: str, images: Sequence[Image], clips: Sequence[Clip], continuing: bool
    ) -> dict[str, torch.Tensor]:
        # Templates write the mark of a beginning themselves.
        return self._tokenized(text, special=self.template.raw and not continuing)

    def _tokenized(self, text: str, special: bool) -> dict[str, torch.Tensor]:
        """Tokenize rendered text; ``special``: whether the tokenizer adds what begins a text."""
        if CUT not in text:
            return dict(self.tokenizer(text, add_special_tokens=special, return_tensors="pt"))
        import torch

        ids = torch.tensor([tokenize(self.tokenizer, text, special)])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def _starts_itself(self, text: str) -> bool:
        """Return whether the rendered text already begins with the tokenizer's start marker."""
        start = self.tokenizer.bos_token
        return start is not None and text.startswith(start)

    def _without_anchor(
        self, inputs: dict[str, torch.Tensor], text: str
    ) -> dict[str, torch.Tensor]:
        anchor = self._ids(_ANCHOR)
        ids = inputs["input_ids"][0].tolist()
        if ids[: len(anchor)] != anchor:
            # The anchor merged with the text; at worst the text then starts like a fresh one.
            raise InputError("the tokenizer cannot continue a text; start a new conversation")
        return {
            key: value[:, len(anchor) :] if key in PER_TOKEN else value
            for key, value in inputs.items()
        }

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]


class QwenProcessor(Processor):
    """Qwen-VL models without transformers' combined processor (see mmkv.prompt.qwen_vision)."""

    watches = True

    def __init__(
        self,
        tokenizer: Any,
        template: ChatTemplate,
        load_image_processor: Callable[[], Any] | None,
        rules: VideoRules,
        image_size: dict[str, int] | None,
        frame_rule: FrameRule | None = None,
    ) -> None:
        """Take what the checkpoint has; the image processor is loaded for the first picture.

        ``load_image_processor``: None where the checkpoint has none.
        """
        from mmkv.prompt.qwen_vision import IMAGE, VIDEO

        super().__init__(tokenizer, template)
        self._load_image_processor = load_image_processor
        self.rules, self.image_size = rules, image_size
        self.frame_rule = frame_rule or FrameRule()
        self.sees = load_image_processor is not None
        self.blind = (
            f"the checkpoint has no {PICTURES}, so pictures cannot be prepared for it; get that "
            "file, or drop the pictures"
        )
        self.image_token, self.video_token = IMAGE, VIDEO

    @cached_property
    def image_processor(self) -> Any:
        """Load transformers' image processor, whose import takes longer than a short answer.

        Raises ModelError for settings that cannot be used.
        """
        assert self._load_image_processor is not None
        return self._load_image_processor()

    @property
    def size_rule(self) -> Any:
        """Return the rule that scales frames to the model's size while they are read."""
        return self.rules.scaler

    def _scaled(self, picture: Image, settings: MediaSettings) -> Image:
        from PIL import Image as pil

        rows, columns = settings.picture_size(picture.height, picture.width, self.rules.factor)
        made = picture.resize((columns, rows), pil.Resampling.BICUBIC)
        made.info[SIZED] = True
        return made

    def _size_rule_of(self, settings: MediaSettings) -> Any:
        return self.rules.scaler_of(settings)

    @property
    def picture_rules(self) -> VideoRules | None:
        """Return the sizes that pictures are scaled to; None where they are not known."""
        from mmkv.prompt.qwen_vision import VideoRules

        if not self.sees:
            return None
        made = self.image_processor
        size = dict(self.image_size or made.size)
        least, most = (size.get(name) for name in ("shortest_edge", "longest_edge"))
        scales = type(made).__name__ == _PICTURES_IN_PIL and made.do_resize and made.resample == 3
        if not (scales and least and most):
            return None
        return VideoRules(made.patch_size, 1, made.merge_size, least, most, frames_apart=False)

    def video_texts(self, clips: Sequence[Clip], inputs: dict[str, torch.Tensor]) -> list[str]:
        """See :meth:`Processor.video_texts`."""
        grids = inputs["video_grid_thw"].tolist() if clips else []
        return [
            self.rules.expand(clip, (grid[0], grid[1], grid[2]))
            for clip, grid in zip(clips, grids, strict=True)
        ]

    def _inputs(
        self, text: str, images: Sequence[Image], clips: Sequence[Clip], continuing: bool
    ) -> dict[str, torch.Tensor]:
        from mmkv.prompt.qwen_vision import prepare

        pictures = self.image_processor if images else None
        expanded, pixels = prepare(text, images, clips, pictures, self.rules, self.image_size)
        special = not continuing and not self._starts_itself(text)
        inputs = self._tokenized(expanded, special)
        ids = inputs["input_ids"]
        image, video = self.tokenizer.convert_tokens_to_ids([self.image_token, self.video_token])
        inputs["mm_token_type_ids"] = (ids == image).long() + 2 * (ids == video).long()
        return inputs | pixels


def load_processor(
    name: str | Path, min_pixels: int | None = None, max_pixels: int | None = None
) -> Processor:
    """Load what the checkpoint at ``name`` (directory or hub id) needs besides its weights.

    ``min_pixels``, ``max_pixels``: bounds on a picture's pixels, for models that take pictures
    of any size. Raises ModelError when files are missing or damaged, InputError for pixel bounds
    that the model does not take.
    """
    try:
        return _load(name, min_pixels, max_pixels)
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

    config = read_config(name)
    family = find(str(config.model_type))
    tokenizer = AutoTokenizer.from_pretrained(name, config=config)
    if family is not None and issubclass(family, Qwen3VLFamily):
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
    from mmkv.prompt.hub_processor import load_hub

    return load_hub(name, tokenizer, config)


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


def load_image_processor(name: str | Path) -> Any | None:
    """Load the image processor in its PIL form (the same pixels with and without torchvision)."""
    # transformers 5.17 hides the name at its top level when torchvision is absent; the class itself
    # does not need torchvision in either version.
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    if not _has_image_processor(name):
        return None  # the model then takes text only
    try:
        return AutoImageProcessor.from_pretrained(name, backend="pil")
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
