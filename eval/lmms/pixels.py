"""Picture and frame sizes of lmms-eval's Qwen3-VL adapter, measured on 0.7.3.

That adapter has ``min_pixels`` and ``max_pixels``, but its chat form hands them on for videos only:
pictures there get the bounds that qwen-vl-utils has of its own. Its simple form applies them to
pictures too. Frames are bounded one by one, not by the volume of the clip as in the checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from mmkv.prompt.qwen_vision import VideoRules

if TYPE_CHECKING:
    from mmkv.eval.lmms.settings import Settings

_TOKEN = 32 * 32  # pixels of one visual token
# Bounds on a picture: of the chat form, and of the simple form.
CHAT_IMAGES = (4 * _TOKEN, 16384 * _TOKEN)
SIMPLE_IMAGES = (256 * 28 * 28, 1605632)
# Bounds on a frame, and on all frames of a clip together.
_FRAME = (256 * 28 * 28, 768 * _TOKEN)
_CLIP = int(0.9 * 128000 * _TOKEN)


@dataclass(frozen=True)
class FrameRules(VideoRules):
    """Frames scaled each within bounds of its own, as lmms-eval does it.

    Attributes:
        smallest, largest: pixels of one frame; together: of every pair of frames, summed over
            the clip.
    """

    smallest: int = _FRAME[0]
    largest: int = _FRAME[1]
    together: int = _CLIP

    def size(self, frames: int, height: int, width: int) -> tuple[int, int]:
        """Compute height and width to scale to: multiples of a merged patch, within the bounds."""
        most = min(self.largest, 2 * self.together / frames)
        # The lower bound has precedence.
        most = max(most, int(1.05 * self.smallest))
        # The rule of one temporal patch bounds the volume of its two frames.
        pair = replace(self, shortest_edge=2 * self.smallest, longest_edge=int(2 * most))
        return VideoRules.size(pair, 2, height, width)


def apply_frame_rule(processor: Any, settings: Settings) -> None:
    """Give the Qwen3-VL ``processor`` the frame bounds that ``settings`` ask for."""
    own = {field.name: getattr(processor.rules, field.name) for field in fields(VideoRules)}
    processor.rules = FrameRules(
        **own,
        smallest=settings.min_pixels or _FRAME[0],
        largest=min(settings.max_pixels or _FRAME[1], _FRAME[1]),
        together=settings.total_pixels or _CLIP,
    )
