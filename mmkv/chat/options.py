"""The options of ``mmkv chat``, checked before heavy imports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mmkv.engine.budget import parse_bytes
from mmkv.engine.config import EngineConfig
from mmkv.engine.errors import InputError
from mmkv.engine.options import option
from mmkv.loading import UsageError, model_name

if TYPE_CHECKING:
    from mmkv.api import Engine
    from mmkv.calls.tools import Tool
    from mmkv.sampling import Sampling

# Headings of the help.
MEDIA, SAMPLING, CONVERSATIONS, OUTPUT = (
    "Pictures and videos",
    "Sampling",
    "Conversations",
    "Output",
)


def _all(given: list[str] | None) -> list[str]:
    return given or []


def _bytes(given: str | None) -> int | None:
    return None if given is None else parse_bytes(given)


def _thinking(given: str | None) -> str | None:
    number = given is not None and given.isascii() and given.isdecimal() and len(given) < 10
    if given not in ("on", "off", None) and not number:
        raise InputError(f"--thinking {given!r} cannot be; give on, off or a number of tokens")
    return given


_COST = "--cost measures one answer to one prompt; drop --load, --resume and -i"
# Options that contradict each other, with what is said of it.
_EXCLUSIVE = (
    ("fps", "num_frames", "--fps and --num-frames exclude each other; give one"),
    ("cost", "load", _COST),
    ("cost", "interactive", _COST),
    ("raw", "thinking", "--raw uses no chat template, which --thinking needs; drop one"),
    (
        "raw",
        "forget_thoughts",
        "--raw uses no chat template, which --forget-thoughts needs; drop one",
    ),
    ("raw", "tools", "--tools cannot be with --raw, which uses no chat template; drop one"),
    ("cost", "tools", "--tools cannot be with --cost; drop one"),
    (
        "raw",
        "system",
        "--raw sends the text alone; put the --system message into the prompt",
    ),
)


@dataclass
class ChatOptions:
    """What a chat was started with; ``engine`` holds the options of the engine.

    A field made by ``option`` is one of ``mmkv chat``, and of other commands that name it.

    ``functions``: what the file of ``tools`` lists, once it is read.
    ``load``, ``save``: session files to begin with and to write at the end; ``rebudget``: the
    budget was given beside a session file, which has one of its own. ``raw``: texts go to the model
    as they are, without the chat template. ``report``, ``figures``: the page and the folder that
    ``mmkv explain`` writes; ``compare``: the page that it puts beside that.
    """

    engine: EngineConfig = field(default_factory=EngineConfig)
    prompt: str | None = option(
        "Ask this and exit; - reads it from stdin.", flags=("--prompt", "-p")
    )
    memory: int | None = option(
        "Memory for the whole process on a CPU, for example 8GiB: checks before loading "
        "whether the model fits; the cache gets the rest.",
        kind=str | None,
        read=_bytes,
    )
    interactive: bool = option(
        "Converse, also after -p or with piped input.", False, flags=("--interactive", "-i")
    )
    system: str | None = option("System message.")
    image: list[str] = option(
        "Picture: path, URL or data: URI. Repeatable.",
        kind=list[str] | None,
        panel=MEDIA,
        read=_all,
    )
    video: list[str] = option(
        "Video: path or URL. Repeatable.", kind=list[str] | None, panel=MEDIA, read=_all
    )
    fps: float | None = option("Frames per second to take (default 2).", panel=MEDIA)
    num_frames: int | None = option("Number of frames to take, instead of --fps.", panel=MEDIA)
    min_pixels: int | None = option("Enlarge pictures below this.", panel=MEDIA)
    max_pixels: int | None = option("Shrink pictures above this.", panel=MEDIA)
    pixel_limit: int | None = option(
        "Refuse picture files of more pixels (default 120 million).", panel=MEDIA
    )
    max_new_tokens: int | None = option("Longest reply, in tokens (default 512).", panel=SAMPLING)
    temperature: float | None = option(
        "Sampling temperature; 0 takes the likeliest token (default: that of the model's "
        "generation_config.json, or 0; the options below follow it, too).",
        panel=SAMPLING,
    )
    top_p: float | None = option(
        "Sample from the likeliest tokens of this total probability; 1: all.", panel=SAMPLING
    )
    top_k: int | None = option("Sample from this many likeliest tokens; 0: all.", panel=SAMPLING)
    min_p: float | None = option(
        "Drop tokens below this share of the likeliest token's probability; 0: none.",
        panel=SAMPLING,
    )
    repeat_penalty: float | None = option(
        "Make tokens less likely that are already in the conversation, for example 1.1; 1: off.",
        panel=SAMPLING,
    )
    presence_penalty: float | None = option(
        "Lower the logit of each token already in the reply by this; 0: off.", panel=SAMPLING
    )
    frequency_penalty: float | None = option(
        "Lower the logit of a token by this for each time it is in the reply; 0: off.",
        panel=SAMPLING,
    )
    generation_config: bool = option(
        "Ignore the model's generation_config.json when replies are drawn.", True, panel=SAMPLING
    )
    seed: int | None = option("Seed of sampling.", panel=SAMPLING)
    stop: list[str] | None = option("End the reply before this text. Repeatable.", panel=SAMPLING)
    tools: str | None = option(
        "Let the model call the functions in this JSON file (OpenAI's list of tools); the "
        "chat asks you for their results.",
        panel=CONVERSATIONS,
    )
    functions: tuple[Tool, ...] | None = None
    load: str | None = None
    save: str | None = option("Save the conversation to this file at the end.", panel=CONVERSATIONS)
    autosave: bool = option("Keep nothing for --resume.", True, panel=CONVERSATIONS)
    rebudget: bool = False
    raw: bool = option("Send the text as it is, without a chat template.", False)
    thinking: str | None = option(
        "Whether the model thinks first, on or off, if its chat template has a choice; or a "
        "number: the most tokens of a thought.",
        read=_thinking,
    )
    forget_thoughts: bool = option(
        "Drop the cached entries of a thought when its reply is complete.", False
    )
    calibration: str | None = option(
        "Weigh each answer against this file of mmkv calibrate: at most so many are lost to "
        "forgetting.",
    )
    on_risk: str | None = option(
        "What becomes of an answer that is doubtful: say (the default), reread the conversation "
        "for it, or refuse it.",
    )
    reread_budget: str | None = option(
        "Budget of conversations that are read again: 1024, 50% or 64MiB (default: all entries).",
    )
    no_stream: bool = option("Print replies whole.", False, panel=OUTPUT)
    plain: bool = option(
        "Show replies as plain text, without rendering Markdown.", False, panel=OUTPUT
    )
    json: bool = option("Print replies as JSON.", False, panel=OUTPUT)
    cost: bool = option(
        "After one answer, measure the cost of eviction (reads it again with a full cache).",
        False,
        panel=OUTPUT,
    )
    stats: bool = option(
        "After each reply, show its tokens, its speed and the tokens read.", False, panel=OUTPUT
    )
    quiet: bool = option("No notes or progress.", False, flags=("--quiet", "-q"))
    report: str | None = None
    figures: str | None = None
    compare: str | None = None

    @property
    def model(self) -> str:
        """Return the model's folder or hub id; the bundled model's folder where none is named."""
        return model_name(self.engine)

    def check(self) -> None:
        """Raise UsageError for options that contradict each other or are out of range."""
        # A number may be 0, which is given, too.
        given = [
            name for name, value in vars(self).items() if not (value is None or value is False)
        ]
        for one, other, wrong in _EXCLUSIVE:
            if one in given and other in given:
                raise UsageError(wrong)
        for name in ("on_risk", "reread_budget"):
            if getattr(self, name) is not None and self.calibration is None:
                flag = f"--{name.replace('_', '-')}"
                raise UsageError(f"{flag} is a part of --calibration FILE; give that, too")
        if self.on_risk not in (None, "say", "reread", "refuse"):
            raise UsageError(f"--on-risk {self.on_risk!r} cannot be; give say, reread or refuse")
        if self.reread_budget is not None and self.on_risk != "reread":
            raise UsageError("--reread-budget is a part of --on-risk reread; give that, too")
        try:
            if self.pixel_limit is not None:
                from mmkv.prompt.media import set_pixel_limit

                set_pixel_limit(self.pixel_limit)
            self.sampling()
        except InputError as error:
            raise UsageError(str(error)) from error

    def certify(self, engine: Engine, note: Callable[[str], None]) -> None:
        """Weigh the engine's answers against the calibration, if one is named. Raises MmkvError."""
        if self.calibration is not None:
            given = self.calibration, self.on_risk or "say", self.reread_budget
            control = engine.certify(*given)
            alarm = control.drift.missing
            note(f"calibrated: {control.calibration.promise}" + (f"; {alarm}" if alarm else ""))

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
            thinking_budget=self.most_thought,
        )

    @property
    def most_thought(self) -> int | None:
        """Return how many tokens a thought may have; None: any number."""
        return None if self.thinking in ("on", "off", None) else int(self.thinking)
