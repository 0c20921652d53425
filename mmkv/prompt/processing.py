"""Convert a rendered prompt with pictures and videos to the tensors of a prefill.

A family's own way is a subclass of :class:`Processor`. transformers' processors of SmolVLM and
Pixtral need torchvision for plain pictures, the former num2words, too. Their image processors do
not; the text around placeholders is written here.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any

from mmkv.engine.errors import InputError, ModelError, first_line
from mmkv.prompt.media import SIZED, load_image
from mmkv.prompt.part_settings import MAX_FRAMES, MediaSettings, taken_apart
from mmkv.prompt.special import CUT, CuttingTokenizer, reading, tokenize
from mmkv.prompt.template import ChatTemplate
from mmkv.prompt.video import DEFAULT_FPS, Clip, FrameMap, FrameRule, load_video

if TYPE_CHECKING:
    import numpy as np
    import torch
    from PIL.Image import Image

    from mmkv.prompt.qwen_vision import VideoRules


# Text put before a continuation and cut off again after tokenizing, so that a tokenizer that
# treats the start of a text specially (SentencePiece adds a space) sees no start there. A letter
# would merge with a word, a line's end with blanks.
_ANCHOR, _ANCHOR_OF_WORDS = "a", "\n"
# A checkpoint's file on pictures.
PICTURES = "preprocessor_config.json"
ROW, END = "[IMG_BREAK]", "[IMG_END]"  # of Pixtral
_MOST_EDGE = 4096  # of a frame of SmolVLM's that is scaled
_THINNEST = 200  # long to short edge of a picture whose short edge is scaled
_PICTURES_IN_PIL = "Qwen2VLImageProcessorPil"
# What inputs have for each token.
PER_TOKEN = frozenset(("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids"))


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
    counts_pictures = False  # whether rule() asks how many there are
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

    @property
    def writes_times(self) -> bool:
        """Whether the frames of a video stand behind their times."""
        return False

    def time_text(self, seconds: float) -> str | None:
        """Return what stands before what is seen ``seconds`` after the beginning of a video; None:
        the model's prompts have no such text of its own.
        """
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
                anchor = _anchor(text) if continuing else ""
                inputs = self._inputs(anchor + text, images, clips, continuing)
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
        except BaseException as error:
            if type(error) is not Exception:  # tokenizers' own errors are of no other class
                raise
            raise ModelError(
                f"the tokenizer gives up ({first_line(error)}); check tokenizer_config.json"
            ) from error
        if not continuing:
            return inputs
        return self._without_anchor(inputs, anchor)

    def encode_raw(self, text: str) -> dict[str, torch.Tensor]:
        """Make model inputs of one row for a text that no template has rendered.

        The tokenizer adds what marks a beginning. Raises InputError: no text, or placeholders.
        """
        self._check(text, (), ())
        with self._lock, reading(text):
            return self._tokenized(text, special=True)

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
                "this model takes no videos here; use a Qwen-VL, SmolVLM2 or InternVL model or "
                "pictures"
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
        if CUT not in text:  # which keeps a special token that a user wrote text: see tokenize()
            return dict(self.tokenizer(text, add_special_tokens=special, return_tensors="pt"))
        import torch

        ids = torch.tensor([tokenize(self.tokenizer, text, special)])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def _expanded(
        self, text: str, parts: Mapping[str, Sequence[tuple[str, Any]]], continuing: bool
    ) -> tuple[dict[str, torch.Tensor], list[Any]]:
        """Tokenize rendered text in which each placeholder becomes a text of its own.

        Args:
            parts: per placeholder, for each time it stands there: its text, and what goes with it.

        Returns:
            the inputs, and what goes with the texts, in their order.
        """
        waiting = {token: iter(media) for token, media in parts.items()}
        found: list[Any] = []

        def fill(match: re.Match[str]) -> str:
            filled, made = next(waiting[match[0]])
            found.append(made)
            return filled

        whole = re.sub("|".join(map(re.escape, parts)), fill, text) if parts else text
        return self._tokenized(whole, not continuing and not self._starts_itself(text)), found

    def _starts_itself(self, text: str) -> bool:
        """Return whether the rendered text already begins with the tokenizer's start marker."""
        start = self.tokenizer.bos_token
        return start is not None and text.startswith(start)

    def _without_anchor(
        self, inputs: dict[str, torch.Tensor], text: str
    ) -> dict[str, torch.Tensor]:
        anchor = self._ids(text)
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


def _anchor(text: str) -> str:
    """Return what is put before a continuation, cut off again, and merges with none of it."""
    return _ANCHOR_OF_WORDS if text[:1].isalnum() else _ANCHOR


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

    @property
    def writes_times(self) -> bool:
        return self.rules.frames_apart

    def time_text(self, seconds: float) -> str | None:
        """Return the text that a frame stands behind; None where frames have none."""
        from mmkv.prompt.qwen_vision import time_text

        return time_text(seconds) if self.rules.frames_apart else None

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
        fills, pixels = prepare(images, clips, pictures, self.rules, self.image_size)
        parts = {token: [(fill, None) for fill in texts] for token, texts in fills.items()}
        inputs, _ = self._expanded(text, parts, continuing)
        ids = inputs["input_ids"]
        image, video = self.tokenizer.convert_tokens_to_ids([self.image_token, self.video_token])
        inputs["mm_token_type_ids"] = (ids == image).long() + 2 * (ids == video).long()
        return inputs | pixels


_OF_A_FRAME = (
    "size",
    "resample",
    "image_mean",
    "image_std",
    "do_rescale",
    "rescale_factor",
    "do_normalize",
)


class HubProcessor(Processor):
    """Any family whose transformers processor can be used as it is (the LLaVA models)."""

    sees = True

    def __init__(self, processor: Any, template: ChatTemplate) -> None:
        super().__init__(processor.tokenizer, template)
        self.processor = processor
        self.image_token = processor.image_token

    def _inputs(
        self, text: str, images: Sequence[Image], clips: Sequence[Clip], continuing: bool
    ) -> dict[str, torch.Tensor]:
        special = not continuing and not self._starts_itself(text)
        self._require_shapes(images)
        if CUT in text:  # one caller at a time: see encode
            self.processor.tokenizer = CuttingTokenizer(self.tokenizer)
        try:
            return dict(
                self.processor(
                    text=[text],
                    # Nested: all of one prompt (LLaVA-OneVision cuts a lone picture into tiles).
                    images=[list(images)] if images else None,
                    add_special_tokens=special,
                    return_tensors="pt",
                )
            )
        finally:
            self.processor.tokenizer = self.tokenizer

    def _require_shapes(self, images: Sequence[Image]) -> None:
        """Refuse pictures so thin that scaling their shorter edge up would take gigabytes.

        Raises:
            InputError: for a picture of more than 200:1, as Qwen's processors do.
        """
        rules = self.processor.image_processor
        size = getattr(rules, "size", None) or {}
        edges = dict(size) if isinstance(size, Mapping) else vars(size)
        if not edges.get("shortest_edge") or edges.get("longest_edge"):
            return
        if getattr(rules, "image_grid_pinpoints", None):  # its tiles are of one size
            return
        for image in images:
            if max(image.size) > _THINNEST * min(image.size):
                raise InputError(
                    f"a picture of {image.width}x{image.height} pixels is thinner than "
                    f"{_THINNEST}:1, which this model's processor cannot scale; crop it"
                )


class OneVisionProcessor(HubProcessor):
    """LLaVA-OneVision, which cuts the picture of a prompt into tiles if it is the only one."""

    counts_pictures = True

    def rule(self, pictures: int) -> bool:
        return pictures == 1

    def _inputs(
        self, text: str, images: Sequence[Image], clips: Sequence[Clip], continuing: bool
    ) -> dict[str, torch.Tensor]:
        if len(images) != 1 or self.rule(self._pictures):
            return super()._inputs(text, images, clips, continuing)
        # A part with one picture of a prompt with several: read beside a copy, which goes again.
        made = super()._inputs(text + self.image_token, [*images] * 2, clips, continuing)
        picture = self.tokenizer.convert_tokens_to_ids(self.image_token)
        count = int((made["input_ids"] == picture).sum()) // 2
        for key in ("input_ids", "attention_mask"):
            made[key] = made[key][:, :-count]
        return made | {key: made[key][:1] for key in ("pixel_values", "image_sizes")}


class InternVLProcessor(HubProcessor):
    """As it is for pictures. The frames of a video are pictures in one tile each, behind their
    numbers; transformers' part for videos needs torchvision.
    """

    watches = True

    def __init__(
        self, processor: Any, template: ChatTemplate, videos: Mapping[str, Any] | None = None
    ) -> None:
        """Take the processor; ``videos``: the checkpoint's settings of videos."""
        super().__init__(processor, template)
        own = videos or {}
        images = processor.image_processor
        # Of a frame: its tile and colours, where the checkpoint has others for it.
        self._frames_of = {
            key: own[key] if own.get(key) is not None else getattr(images, key)
            for key in _OF_A_FRAME
        }
        rate = own.get("fps") or (None if own.get("num_frames") else DEFAULT_FPS)
        shift = own.get("initial_shift")
        self.frame_rule = FrameRule(
            "centred",
            None if own.get("num_frames") else rate,
            own.get("num_frames"),
            1,
            shift=True if shift is None else shift,
        )
        self.video_token = processor.video_token
        self.image_frame = (processor.start_image_token, processor.end_image_token)

    @property
    def size_rule(self) -> Any:
        """Return the rule that scales frames to a tile while they are read."""
        return self._scaler

    def _scaler(self, frames: int, height: int, width: int) -> FrameMap:
        from PIL import Image as pil

        size, resample = self._frames_of["size"], pil.Resampling(self._frames_of["resample"])
        tile = (size["width"], size["height"])

        def scale(frame: np.ndarray) -> np.ndarray:
            import numpy as np

            return np.asarray(pil.fromarray(frame).resize(tile, resample))

        return scale

    def video_texts(self, clips: Sequence[Clip], inputs: dict[str, torch.Tensor]) -> list[str]:
        return [self._frames(len(clip.frames)) for clip in clips]

    def _frames(self, count: int) -> str:
        tile = self._picture(1)
        return "\n".join(f"Frame{number}: {tile}" for number in range(1, count + 1))

    def _picture(self, tiles: int) -> str:
        start, end = self.image_frame
        return f"{start}{self.image_token * self.processor.image_seq_length * tiles}{end}"

    def _inputs(
        self, text: str, images: Sequence[Image], clips: Sequence[Clip], continuing: bool
    ) -> dict[str, torch.Tensor]:
        if not clips:
            return super()._inputs(text, images, clips, continuing)
        import torch
        from PIL import Image as pil

        read = self.processor.image_processor
        parts: dict[str, list[tuple[str, torch.Tensor]]] = {self.image_token: []}
        for image in images:
            made = read([image], crop_to_patches=True, return_tensors="pt")["pixel_values"]
            parts[self.image_token].append((self._picture(len(made)), made))
        parts[self.video_token] = [
            (
                self._frames(len(clip.frames)),
                read(
                    [pil.fromarray(frame) for frame in clip.frames],
                    crop_to_patches=False,
                    return_tensors="pt",
                    **self._frames_of,
                )["pixel_values"],
            )
            for clip in clips
        ]
        inputs, pixels = self._expanded(text, parts, continuing)
        return inputs | {"pixel_values": torch.cat(pixels)}


class PixtralProcessor(Processor):
    """A picture keeps its shape: rows of placeholders, each with a mark behind it."""

    sees = True

    def __init__(
        self,
        tokenizer: Any,
        template: ChatTemplate,
        image_processor: Any,
        token: str,
        patch: int,
        marks: tuple[str, str] = (ROW, END),
    ) -> None:
        """Take what the checkpoint has.

        Args:
            patch: the edge of a token's square in pixels. marks: behind a row, and a picture.
        """
        super().__init__(tokenizer, template)
        self.image_processor, self.image_token = image_processor, token
        self.patch, self.marks = patch, marks

    def _inputs(
        self, text: str, images: Sequence[Image], clips: Sequence[Clip], continuing: bool
    ) -> dict[str, torch.Tensor]:
        if not images:
            return self._expanded(text, {}, continuing)[0]
        made = self.image_processor(list(images), patch_size=self.patch, return_tensors="pt")
        texts = [(self._picture(*size), None) for size in made["image_sizes"].tolist()]
        return self._expanded(text, {self.image_token: texts}, continuing)[0] | dict(made)

    def _picture(self, height: int, width: int) -> str:
        row, end = self.marks
        cells = self.image_token * (width // self.patch)
        return row.join([cells] * (height // self.patch)) + end


class IdeficsProcessor(Processor):
    """A picture is tiles, each behind its place, and a thumbnail; a small one is the latter alone.

    The frames of a video are thumbnails behind their times, behind a sentence on all of them. Each
    observation has one of its own, as each of several videos in a message has in transformers: how
    many frames a stream will have, which the sentence says, nobody knows.
    """

    sees = True

    def __init__(
        self,
        tokenizer: Any,
        template: ChatTemplate,
        image_processor: Any,
        tile: int,
        cells: int,
        videos: Mapping[str, Any] | None = None,
    ) -> None:
        """Take what the checkpoint has.

        Args:
            tile: edge of a tile in pixels. cells: placeholders of a tile.
            videos: the checkpoint's settings of videos; None: it takes none.
        """
        super().__init__(tokenizer, template)
        self.image_processor, self.tile = image_processor, tile
        self.image_token, self._mark, self._whole = marks_of(tokenizer)
        self._cells = self.image_token * cells
        self.watches = videos is not None
        if videos is not None:
            self.video_token = getattr(tokenizer, "video_token", None) or "<video>"
            sampling = videos.get("video_sampling") or {}
            self.frame_rule = FrameRule(
                "trimmed",
                sampling.get("fps") or videos.get("fps") or 1,
                max_frames=sampling.get("max_frames") or videos.get("num_frames") or 64,
            )
            # As transformers has it; of pictures' size where the file has no other.
            size = videos.get("size") or sampling.get("video_size") or {}
            self._frame_edge = min(size.get("longest_edge") or 4 * tile, _MOST_EDGE)

    @property
    def size_rule(self) -> Any:
        """Return the rule that scales frames to a tile while they are read."""
        return self._scaler if self.watches else None

    @property
    def writes_times(self) -> bool:
        return self.watches

    def _scaler(self, frames: int, height: int, width: int) -> FrameMap:
        from PIL import Image as pil

        resample = pil.Resampling(self.image_processor.resample)
        # To the longest edge first, the other one even; a larger picture on the way is no other.
        shrink = min(1.0, self._frame_edge / max(height, width))
        even = [max(1, int(edge * shrink) + int(edge * shrink) % 2) for edge in (width, height)]

        def scale(frame: np.ndarray) -> np.ndarray:
            import numpy as np

            picture = pil.fromarray(frame)
            if shrink < 1:
                picture = picture.resize((even[0], even[1]), resample)
            return np.asarray(picture.resize((self.tile, self.tile), resample))

        return scale

    def video_texts(self, clips: Sequence[Clip], inputs: dict[str, torch.Tensor]) -> list[str]:
        return [self._video(clip) for clip in clips]

    def _inputs(
        self, text: str, images: Sequence[Image], clips: Sequence[Clip], continuing: bool
    ) -> dict[str, torch.Tensor]:
        import torch
        from PIL import Image as pil

        parts: dict[str, list[tuple[str, Any]]] = {self.image_token: []}
        for image in images:
            made = self.image_processor([[image]], return_row_col_info=True, return_tensors="pt")
            rows, columns = made.pop("rows")[0][0], made.pop("cols")[0][0]
            parts[self.image_token].append((self._picture(rows, columns), made))
        if clips:
            parts[self.video_token] = [
                (
                    self._video(clip),
                    self.image_processor(
                        [[pil.fromarray(frame) for frame in clip.frames]],
                        do_image_splitting=False,
                        size={"longest_edge": self.tile},  # which they have
                        return_tensors="pt",
                    ),
                )
                for clip in clips
            ]
        inputs, pixels = self._expanded(text, parts, continuing)
        for key in pixels[0] if pixels else ():
            inputs[key] = torch.cat([made[key] for made in pixels], 1)
        return inputs

    def _picture(self, rows: int, columns: int) -> str:
        lines = [
            "".join(f"{self._mark}<row_{row}_col_{at}>{self._cells}" for at in _from_one(columns))
            for row in _from_one(rows)
        ]
        tiles = "".join(f"{line}\n" for line in lines) + ("\n" if lines else "")
        return f"{tiles}{self._mark}{self._whole}{self._cells}{self._mark}"

    def _video(self, clip: Clip) -> str:
        frames, seconds = len(clip.frames), (clip.total or clip.indices[-1] + 1) / clip.fps
        seconds = max(seconds, clip.timestamps[-1])  # of a stream that began long before
        begin = (
            f"You are provided the following series of {_in_words(frames)} frames from a "
            f"{timedelta(seconds=int(seconds))} [H:MM:SS] video.\n"
        )
        shown = [
            f"\nFrame from {int(time // 60):02d}:{int(time % 60):02d}:{self._picture(0, 0)}"
            for time in clip.timestamps
        ]
        return f"{begin}{''.join(shown)}\n\n"


def marks_of(tokenizer: Any) -> tuple[str, str, str]:
    """Return SmolVLM's and Idefics3's placeholder, the mark around tiles, and the thumbnail's."""
    names = {
        "image_token": "<image>",
        "fake_image_token": "<fake_token_around_image>",
        "global_image_token": "<global-img>",
    }
    image, mark, whole = (getattr(tokenizer, name, None) or usual for name, usual in names.items())
    return image, mark, whole


def _from_one(count: int) -> range:
    return range(1, count + 1)


_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen"
).split()
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()


def _in_words(number: int) -> str:
    """Return a number up to :data:`MAX_FRAMES` in words, as num2words writes it."""
    assert 0 <= number <= max(MAX_FRAMES, 999)
    if number < 20:
        return _ONES[number]
    if number < 100:
        tens, ones = divmod(number, 10)
        return _TENS[tens - 2] + (f"-{_ONES[ones]}" if ones else "")
    hundreds, rest = divmod(number, 100)
    return f"{_ONES[hundreds]} hundred" + (f" and {_in_words(rest)}" if rest else "")
