"""SmolVLM, Idefics3 and Pixtral: pictures and frames become text with placeholders here.

transformers' processors of SmolVLM and Pixtral need torchvision for plain pictures, the former
num2words, too. Their image processors do not; the text around placeholders is written here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from mmkv.prompt.part_settings import MAX_FRAMES
from mmkv.prompt.processing import Processor
from mmkv.prompt.template import ChatTemplate
from mmkv.prompt.video import Clip, FrameMap, FrameRule

if TYPE_CHECKING:
    import numpy as np
    import torch
    from PIL.Image import Image

ROW, END = "[IMG_BREAK]", "[IMG_END]"
_MOST_EDGE = 4096  # of a frame that is scaled


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
        """Whether the frames of a video stand behind their times."""
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
