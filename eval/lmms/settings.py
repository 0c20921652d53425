"""The ``--model_args`` of ``--model mmkv``, and the engine that they describe.

Sizes of pictures and frames are those of lmms-eval's Qwen3-VL adapter, measured on 0.7.3, and a
task's ``generation_kwargs`` become mmkv's sampling as there. That adapter has ``min_pixels`` and
``max_pixels``, but its chat form hands them on for videos only: pictures there get the bounds that
qwen-vl-utils has of its own. Its simple form applies them to pictures too. Frames are bounded one
by one, not by the volume of the clip as in the checkpoint.

A task's own limit of new tokens (16 for Video-MME, 128 for MMMU-Pro) is made for models that
answer at once. One that thinks first would be cut inside its thought, so such models have
``thinking_floor`` tokens at least, and what counts as their answer is what follows the thought.

``until``: lmms-eval gives a blank line to every task that names none, which would cut answers at
their first paragraph. The built-in adapter ignores ``until`` in its chat form and drops blank lines
from it in its simple form. This adapter does the same.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Self

from mmkv.engine.config import EngineConfig, options
from mmkv.engine.errors import InputError
from mmkv.engine.options import Option, declared, option
from mmkv.eval.lmms.messages import Frames
from mmkv.prompt.qwen_vision import VideoRules
from mmkv.resources import bundled_model_name

if TYPE_CHECKING:
    from mmkv import Engine
    from mmkv.generation_config import Generation
    from mmkv.prompt.template import ChatTemplate
    from mmkv.sampling import Settled


# The defaults of lmms-eval's own Qwen3-VL adapter, so that scores are comparable.
SYSTEM_PROMPT = "You are a helpful assistant."
# Whose lmms-eval adapter is followed.
_QWEN = ("qwen3_vl", "qwen3_vl_moe")
FRAMES = 32
# Tokens of a reply that Qwen3's authors recommend for models that think.
THINKING_FLOOR = 32768
# Arguments of that adapter that are not taken here, with the remedy.
_ELSEWHERE = {
    "device_map": "write device=cuda:0 or device=cpu",
    "attn_implementation": "the engine has attention of its own; drop it",
    "use_cache": "the engine always has a cache; drop it",
    "model_path": "write pretrained=...",
    "torch_dtype": "write dtype=...",
}


@dataclass(frozen=True)
class LmmsSettings:
    """The model arguments, by the names used in ``--model_args``.

    Attributes:
        engine: those of :class:`mmkv.engine.config.EngineConfig`; ``pretrained`` is its model.
    """

    engine: EngineConfig
    max_prompt_tokens: int | None = option(
        "Bound on a prompt of the long-text tasks, beside the model's own.", least=1
    )
    template: str = option(
        "always: the model's chat template frames also those prompts that a benchmark publishes "
        "without one; task: as the benchmark does it.",
        "task",
        choices=("task", "always"),
    )
    min_pixels: int | None = option(
        "Bound on a picture, and on a video frame; None: lmms-eval's Qwen3-VL adapter's.", least=1
    )
    max_pixels: int | None = option("The upper one.", least=1)
    max_num_frames: int = option("Most frames of a video.", FRAMES, least=1)
    fps: float | None = option("Frames of a video in a second.")
    total_pixels: int | None = option("Bound on all frames of a video together.", least=1)
    system_prompt: str | None = option(
        "Empty for none; None: that adapter's for Qwen3-VL, none for other models."
    )
    seed: int = option("Of sampling, where a task asks for a temperature.", 1234, least=0)
    thinking_floor: int = option(
        "New tokens that a model which thinks may write at least, whatever limit the task sets; "
        "0: the task's limit holds.",
        THINKING_FLOOR,
        least=0,
    )
    batch_size: int = option("Most documents in a decode step.", 1, least=1)
    visual_tokens: int | None = option(
        "V: a document's budget is as many entries per row as its prompt has text tokens, and V "
        "more (DBTrimKV, arXiv 2605.09649, table 1); None: --budget.",
        least=1,
    )

    def __post_init__(self) -> None:
        choices = declared(LmmsSettings)["template"].choices
        if self.template not in choices:
            raise InputError(f"template={self.template} is unknown; write {' or '.join(choices)}")

    @classmethod
    def of(cls, given: dict[str, Any]) -> Self:
        """Read the settings from lmms-eval's arguments. Raises InputError for a name or value."""
        known = _known()
        unknown = sorted(set(given) - set(known))
        if unknown:
            hints = [f"{name}: {_ELSEWHERE[name]}" for name in unknown if name in _ELSEWHERE]
            raise InputError(
                f"mmkv does not know the model argument {', '.join(unknown)}"
                + (f" ({'; '.join(hints)})" if hints else "")
                + f"; it knows {', '.join(name for name in known if name != 'batch_size')}"
            )
        if not given.get("pretrained"):
            raise InputError(
                "no model is named; add pretrained=FOLDER_OR_HUB_ID to --model_args "
                f"({bundled_model_name()} is the bundled one)"
            )
        typed = {name: _typed(name, value, known[name]) for name, value in given.items()}
        if typed.get("visual_tokens") is not None and typed.get("budget") is not None:
            raise InputError(
                "visual_tokens sets the budget of each document, its text tokens and so many more; "
                "leave out budget"
            )
        loading = {name: typed.pop(name) for name in options() if name in typed}
        loading.setdefault("endless", False)  # a task says what becomes of what is too long
        return cls(EngineConfig(model=typed.pop("pretrained"), **loading), **typed)

    @property
    def always_template(self) -> bool:
        """Whether the chat template frames every prompt."""
        return self.template == "always"

    @property
    def pretrained(self) -> str:
        """Return the checkpoint's folder or hub id."""
        return self.engine.checkpoint()

    def load(self, images: tuple[int, int]) -> Engine:
        """Load the engine. ``images``: bounds on a picture's pixels where none are given.

        Raises:
            ModelError, GateError, PolicyError, BudgetError, InputError.
        """
        import mmkv

        qwen = model_type(self.pretrained) in _QWEN
        least, most = self.min_pixels, self.max_pixels
        if qwen:
            least, most = least or images[0], most or images[1]
        config = replace(self.engine, device=self._device())
        engine = mmkv.Engine.from_config(config, min_pixels=least, max_pixels=most)
        if qwen:
            apply_frame_rule(engine.processor, self)
        return engine

    def frames(self) -> Frames:
        """Return how videos are sampled."""
        return Frames(self.max_num_frames, self.fps)

    def opening(self) -> str:
        """Return the system prompt to use, empty for none."""
        if self.system_prompt is not None:
            return self.system_prompt
        return SYSTEM_PROMPT if model_type(self.pretrained) in _QWEN else ""

    def _device(self) -> str:
        """Return the device; ``auto`` gives each process of a run its own GPU."""
        import torch

        device = self.engine.device
        several = int(os.environ.get("WORLD_SIZE", "1")) > 1 and torch.cuda.is_available()
        if device == "auto" and several:
            return f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        return device


def model_type(pretrained: str) -> str:
    """Read the architecture that a checkpoint names. Raises ModelError when there is none."""
    from mmkv import api as _  # noqa: F401 (hides a broken torchvision before transformers)
    from mmkv.engine.errors import ModelError

    # isort: split
    from transformers import AutoConfig

    from mmkv.engine.model.families import find_for

    try:
        find_for(pretrained)
        return AutoConfig.from_pretrained(pretrained).model_type
    except (OSError, ValueError) as error:
        raise ModelError(
            f"no model at {pretrained}: {str(error).splitlines()[0]}; check pretrained=..."
        ) from error


def _known() -> dict[str, Option]:
    """Return every argument by name: the engine's, then ours."""
    known = {"pretrained": replace(options()["model"], kind=str)}
    known |= {n: made for n, made in options().items() if n not in ("model", "kv_limit")}
    return known | declared(LmmsSettings)


def _typed(name: str, value: Any, made: Option) -> Any:
    """Convert ``value`` to the field's type: lmms-eval guesses types (256.0, True) from text."""
    wanted = made.type
    if value is None or (made.optional and str(value).lower() == "none"):
        return None
    least = 1 if made.least is None else made.least
    try:
        if wanted is bool:
            return {"true": True, "false": False}[str(value).lower()]
        if wanted is not int:
            return wanted(value)
        if int(value) != float(value) or int(value) < least:
            raise ValueError
        return int(value)
    except (ValueError, OverflowError, KeyError) as error:
        nouns = {int: f"a whole number of at least {least}", bool: "true or false"}
        noun = nouns.get(wanted, "a number")
        raise InputError(f"the model argument {name}={value} is not {noun}; correct it") from error


def thinks(template: ChatTemplate) -> bool:
    """Whether replies under this chat template begin with a thought, or may.

    The template names marks of thoughts, and its opening of a reply does not close one at once, as
    Qwen3's does where thinking is switched off.
    """
    if template.thoughts is None:
        return False
    opening = template.before_reply([{"role": "user", "content": "a"}])
    return template.thoughts.close not in opening


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


def apply_frame_rule(processor: Any, settings: LmmsSettings) -> None:
    """Give the Qwen3-VL ``processor`` the frame bounds that ``settings`` ask for."""
    own = {field.name: getattr(processor.rules, field.name) for field in fields(VideoRules)}
    processor.rules = FrameRules(
        **own,
        smallest=settings.min_pixels or _FRAME[0],
        largest=min(settings.max_pixels or _FRAME[1], _FRAME[1]),
        together=settings.total_pixels or _CLIP,
    )


MAX_NEW_TOKENS = 128  # if the task names no length
_TOP_K = 50  # generate's default if neither task nor checkpoint names one
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_DRAWS = {"top_p": float, "top_k": int, "min_p": float}
_KNOWN = {"do_sample", "use_cache", "until", "max_new_tokens", "temperature", *_PENALTIES, *_DRAWS}
# Values that ask for one sequence, which is the only choice here.
_ONE = ("num_beams", "num_return_sequences", "best_of", "n", "num_beam_groups")


def sampling_of(
    given: dict[str, Any], seed: int, defaults: Generation, until: bool
) -> tuple[Settled, list[str]]:
    """Return the sampling, and the names in ``given`` that change nothing here.

    Greedy where the task names no temperature and no ``do_sample``, as in lmms-eval's own adapters.
    What else it does not say is the checkpoint's: penalties always, as in transformers' greedy
    decoding, and ``top_p``, ``top_k``, ``min_p`` where the task samples.

    ``defaults``: of the checkpoint; ``until``: whether stop strings count. Raises InputError for
    beams and for values out of range.
    """

    for name in _ONE:
        if (given.get(name) or 1) != 1:
            raise InputError(
                f"the task asks for {name}={given[name]}; mmkv decodes one sequence per request: "
                f"run with --gen_kwargs {name}=1 to accept greedy or sampled decoding instead"
            )
    ignored = sorted(set(given) - _KNOWN - set(_ONE))
    temperature = given.get("temperature")
    if temperature is None:
        # A checkpoint may be greedy by itself, though a task samples.
        temperature = (defaults.served.temperature or 1.0) if given.get("do_sample") else 0.0
    limit = given.get("max_new_tokens")
    said = {name: value for name, value in given.items() if value is not None}
    own: dict[str, Any] = {name: float(said[name]) for name in _PENALTIES if name in said}
    # Greedy decoding ignores the others; some tasks give it top_p=0, which sampling would refuse.
    if temperature:
        own |= {} if "top_k" in defaults.named else {"top_k": _TOP_K}
        own |= {name: kind(said[name]) for name, kind in _DRAWS.items() if name in said}
        own["top_p"] = own.get("top_p") or defaults.served.top_p
    made = replace(
        defaults.served,
        max_new_tokens=MAX_NEW_TOKENS if limit is None else int(limit),
        temperature=float(temperature),
        seed=seed,
        stop=(*defaults.served.stop, *(stop_strings(given.get("until")) if until else ())),
        **own,
    )
    return made, ignored


def stop_strings(until: Any) -> tuple[str, ...]:
    """Pick the stop strings that count: all but blank lines.

    Raises InputError for other types.
    """
    if until is None:
        return ()
    strings = [until] if isinstance(until, str) else until
    if not isinstance(strings, (list, tuple)) or not all(isinstance(s, str) for s in strings):
        raise InputError(f"the task's until is {until!r}; it must be a string or a list of them")
    return tuple(s for s in strings if s and s != "\n\n")
