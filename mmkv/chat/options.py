"""The options of ``mmkv chat``, checked before heavy imports."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mmkv.engine.config import EngineConfig
from mmkv.engine.errors import InputError
from mmkv.loading import UsageError, model_name

if TYPE_CHECKING:
    from mmkv.sampling import Sampling


@dataclass
class ChatOptions:
    """The options of the command line, a field each; ``engine`` holds those of the engine.

    ``load``, ``save``: session files to begin with and to write at the end; ``rebudget``: the
    budget was given beside a session file, which has one of its own. ``raw``: texts go to the model
    as they are, without the chat template. ``report``, ``figures``: the page and the folder that
    ``mmkv explain`` writes.
    """

    engine: EngineConfig = field(default_factory=EngineConfig)
    prompt: str | None = None
    interactive: bool = False
    system: str | None = None
    image: list[str] = field(default_factory=list)
    video: list[str] = field(default_factory=list)
    fps: float | None = None
    num_frames: int | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None
    pixel_limit: int | None = None
    max_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    generation_config: bool = True
    seed: int | None = None
    stop: list[str] | None = None
    load: str | None = None
    save: str | None = None
    autosave: bool = True
    rebudget: bool = False
    raw: bool = False
    no_stream: bool = False
    plain: bool = False
    json: bool = False
    cost: bool = False
    stats: bool = False
    quiet: bool = False
    report: str | None = None
    figures: str | None = None

    @property
    def model(self) -> str:
        """Return the model's folder or hub id; the bundled model's folder where none is named."""
        return model_name(self.engine)

    def check(self) -> None:
        """Raise UsageError for options that contradict each other or are out of range."""
        if self.fps is not None and self.num_frames is not None:
            raise UsageError("--fps and --num-frames exclude each other; give one")
        if self.cost and (self.load is not None or self.interactive):
            raise UsageError("--cost is of one answer to one prompt; drop --load, --resume and -i")
        if self.raw and self.system is not None:
            raise UsageError("--raw sends the text alone; put what --system says into the prompt")
        try:
            if self.pixel_limit is not None:
                from mmkv.prompt.media import set_pixel_limit

                set_pixel_limit(self.pixel_limit)
            self.sampling()
        except InputError as error:
            raise UsageError(str(error)) from error

    def sampling(self) -> Sampling:
        """Return the sampling settings; what is not given is None. Raises InputError."""
        from mmkv.sampling import Sampling

        return Sampling(
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repeat_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            seed=self.seed,
            stop=tuple(self.stop or ()),
        )
