"""The public interface: an engine that takes messages, and chat sessions."""

from __future__ import annotations

import mmkv.prompt.torchvision_guard  # noqa: F401 (before anything that imports transformers)

# isort: split
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from mmkv.calls.parser import ThoughtMarks, thought_marks
from mmkv.calls.tools import Tool, tool_use
from mmkv.engine.budget import Budget
from mmkv.engine.config import EngineConfig, require_options
from mmkv.engine.errors import InputError, require_list
from mmkv.engine.interrupts import OpenToCtrlC, whole
from mmkv.engine.runtime import Runtime
from mmkv.generation_config import Generation, read_generation
from mmkv.grammar import reply_rules, require_tools
from mmkv.notes import media_notes
from mmkv.prompt.loading import load_processor
from mmkv.prompt.messages import is_blank, take_media
from mmkv.prompt.processing import Processor
from mmkv.reply import LogitSettings, Reply, checked_bias
from mmkv.resources import is_bundled
from mmkv.sampling import Sampling, Settled, checked
from mmkv.scheduler.replies import ReplyJob, answer_all
from mmkv.session import Session
from mmkv.shipped import with_shipped_gates
from mmkv.thoughts import marks_if_first
from mmkv.turn import Prompt, shown_tools

if TYPE_CHECKING:
    from mmkv.calibration import LossControl
    from mmkv.engine.model.families.base import Family
    from mmkv.engine.model.gates import Gates, WriteGates
    from mmkv.engine.model.spec import DecoderSpec
    from mmkv.engine.model.weights import DecoderWeights
    from mmkv.grammar import Grammars
    from mmkv.prompt.messages import Message

__all__ = ["Engine", "Session"]


class Engine(Runtime):
    """An engine together with its checkpoint's tokenizer, chat template and processor.

    Threads may share it. Their calls take turns between decode steps and between the chunks of
    prompts; each reply is what it would be alone.

    Attributes:
        pixels: least and most of a picture, for models that take any size; None: the checkpoint's.
        generation: the settings of the checkpoint's generation_config.json.
        forget_thoughts: whether new sessions drop the entries of thoughts that are over.
        loss_control: what :meth:`certify` has begun, or None.
    """

    _source: str | Path | None = None
    pixels: tuple[int | None, int | None] = (None, None)
    _processor: Processor | None = None
    generation: Generation = Generation()
    forget_thoughts: bool = False
    loss_control: LossControl | None = None

    @classmethod
    def from_pretrained(
        cls,
        path_or_hub_id: str | Path,
        *,
        progress: Callable[[str], None] | None = None,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        generation_config: bool = True,
        forget_thoughts: bool = False,
        **options: Any,
    ) -> Self:
        """Load a checkpoint; the options are those of :class:`mmkv.engine.config.EngineConfig`.

        ``min_pixels``, ``max_pixels`` bound a picture's size for models that take any size.
        ``generation_config``: whether the checkpoint's file of that name says how replies are
        drawn where a call does not. ``forget_thoughts``: see :class:`mmkv.Session`. The tokenizer
        and processor are loaded when they are first needed.
        """
        require_options(options, "from_pretrained", ("progress", "min_pixels", "max_pixels"))
        config = EngineConfig(model=path_or_hub_id, **options)
        engine = cls.from_config(
            config,
            progress,
            min_pixels=min_pixels,
            max_pixels=max_pixels,
            generation_config=generation_config,
        )
        engine.forget_thoughts = forget_thoughts
        return engine

    @classmethod
    def from_config(
        cls,
        config: EngineConfig,
        progress: Callable[[str], None] | None = None,
        *,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        generation_config: bool = True,
        pictures: bool = False,
    ) -> Self:
        """Load what ``config`` names; see :meth:`from_pretrained`.

        Where no gates are named and the checkpoint holds none, a policy that reads gates takes
        those that ship for it (``policy_note`` says which).
        """
        config, note = with_shipped_gates(config)  # of a checkpoint that is here already
        engine = super().from_config(config, progress, pictures=pictures)
        engine.policy_note = engine.policy_note or note
        engine._source, engine.pixels = config.checkpoint(), (min_pixels, max_pixels)
        if generation_config:
            engine.generation = read_generation(engine._source, engine.spec.max_position)
        return engine

    @classmethod
    def from_parts(
        cls,
        config: EngineConfig,
        family: Family,
        spec: DecoderSpec,
        weights: DecoderWeights,
        gates: Gates | WriteGates | None = None,
    ) -> Self:
        """Run a model that is in memory already, with shipped gates as :meth:`from_config`."""
        note = None
        if gates is None:
            config, note = with_shipped_gates(config)
        engine = super().from_parts(config, family, spec, weights, gates)
        engine.policy_note = engine.policy_note or note
        return engine

    def certify(
        self,
        calibration: str | Path,
        on_risk: str = "say",
        reread_budget: Budget | float | str | None = None,
    ) -> LossControl:
        """Weigh all replies of sessions opened from now on against a file of ``mmkv calibrate``.

        The promise is that of :mod:`mmkv.calibration`: for sessions under the engine's own budget,
        and dialogues like the calibration's.

        Args:
            on_risk: what is done with a doubtful reply: ``say`` (a note), ``reread`` (the reply is
                drawn from the conversation read again, the session itself goes on as it is), or
                ``refuse`` (:class:`mmkv.ForgottenError`; the session is as it was).
            reread_budget: of conversations that are read again; None: all entries stay.

        Raises:
            InputError: it cannot be read, or holds for other settings; BudgetError: the budget.
        """
        from mmkv.calibration import LossControl

        self.loss_control = LossControl(self, calibration, on_risk, reread_budget)
        return self.loss_control

    @property
    def processor(self) -> Processor:
        """Return tokenizer, template and picture processing.

        Raises ModelError when files are missing.
        """
        if self._processor is None:
            with self.lock:
                if self._processor is None:
                    with OpenToCtrlC():
                        self._processor = self._load_processor()
        return self._processor

    @processor.setter
    def processor(self, processor: Processor) -> None:
        self._processor = processor

    def _load_processor(self) -> Processor:
        if self._source is None:
            raise InputError("this engine was built without a checkpoint; set engine.processor")
        return load_processor(self._source, *self.pixels)

    @property
    def default_sampling(self) -> Settled:
        """Return the settings of replies for calls that give none; see :class:`Sampling`."""
        return self.generation.sampling

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Return the ids that end a reply: the checkpoint's, the tokenizer's, and those that the
        chat template writes after it, since some checkpoints name only the end of documents.
        """
        tokenizer = self.processor.tokenizer
        ends = {*self.family.eos_token_ids, tokenizer.eos_token_id}
        if behind := self.processor.template.turn_end:
            ends.add(tokenizer.convert_tokens_to_ids(behind))
        return frozenset(ends - {None} - self.media_token_ids)

    @property
    def thought_marks(self) -> ThoughtMarks | None:
        """Return the marks around a thought of this model; None if it has no thoughts."""
        return thought_marks(self.processor.template.source)

    def require_thoughts(self, what: str) -> None:
        """Raise InputError if the model has no thoughts, which ``what`` is about."""
        if self.thought_marks is None:
            raise InputError(
                f"{what} is about thoughts, and this model's chat template knows none (no </think> "
                "in it); leave it out"
            )

    @cached_property
    def grammars(self) -> Grammars:
        """The grammars that bind replies to schemas, made on first use."""
        from mmkv.grammar import Grammars

        return Grammars(self.processor.tokenizer, self.spec.vocab_size, self.eos_token_ids)

    def logit_settings(
        self,
        tools: Sequence[Any] = (),
        tool_choice: Any = "auto",
        parallel_tool_calls: bool = True,
        response_format: dict[str, Any] | None = None,
        logit_bias: Mapping[int, float] | None = None,
        prefix: Any = "",
    ) -> LogitSettings:
        """Return what a reply has to follow; the arguments are those of :meth:`Session.send`.

        Raises InputError: they cannot be, or cannot be followed.
        """
        require_list("tools", tools, "functions")
        use = tool_use(tools, tool_choice, parallel_tool_calls)
        bias = checked_bias(logit_bias, self.spec.vocab_size)
        if use is None and response_format is None:
            return LogitSettings(bias=bias)
        try:
            import llguidance  # noqa: F401
        except ImportError as error:
            what = "response_format needs" if use is None else "functions need"
            raise InputError(
                f"{what} llguidance, which is not installed; pip install 'mmkv[serve]'"
            ) from error
        form = self.processor.template.call_format
        rules = reply_rules(response_format, form, use and require_tools(form, use))
        if prefix and rules.answer is not None:
            raise InputError(
                "response_format is the form of a whole reply, and prefix has begun this one; "
                "leave one of them out"
            )
        return LogitSettings(bias=bias, rules=rules)

    def settled(self, sampling: Sampling | None, prefix: Any = "") -> Settled:
        """Return how a reply that begins with ``prefix`` is drawn.

        Raises InputError, TypeError: it cannot be drawn so.
        """
        made = checked(sampling, self.default_sampling)
        if made.thinking_budget is not None:
            self.require_thoughts("thinking_budget")
            if isinstance(prefix, str) and marks_if_first(self.thought_marks, prefix) is None:
                raise InputError(
                    "thinking_budget counts a thought from its beginning, which cannot stand "
                    "behind this prefix; drop one of them"
                )
        return made

    def session(self, budget: Budget | float | None = None) -> Session:
        """Open an empty session that talks.

        Raises:
            BudgetError: below one entry per row, or for a policy that evicts nothing.
        """
        return self._open(self.budgets.checked(budget))

    @cached_property
    def is_bundled_model(self) -> bool:
        """Return whether this is the bundled model, which was trained on drawn scenes."""
        return is_bundled(self._source)

    @property
    def media_token_ids(self) -> frozenset[int]:
        """Return the ids that stand for pictures and videos; no reply holds one."""
        return frozenset(self.family.placeholder.values())

    @whole
    def load_session(self, path: str | Path) -> tuple[Session, dict[str, str]]:
        """Open a saved session with its conversation. Raises SessionError."""
        session, extra = super().load_session(path)
        assert isinstance(session, Session)
        try:
            session.restore_dialogue(extra)
        except BaseException:
            session.close()
            raise
        return session, extra

    def generate(
        self,
        conversations: Sequence[Sequence[Message]] | Sequence[Message],
        sampling: Sampling | None = None,
        budget: Budget | float | None = None,
        tools: Sequence[Any] | None = None,
        tool_choice: Any = "auto",
        parallel_tool_calls: bool = True,
        response_format: dict[str, Any] | None = None,
        logit_bias: Mapping[int, float] | None = None,
    ) -> list[Reply]:
        """Answer a batch of conversations, each in a session (and budget) of its own.

        A conversation is a list of messages in the transformers chat format, ending with the
        user's or with what functions returned; pictures and videos are named inside the messages.
        ``tools`` and what follows are as for :meth:`mmkv.Session.send`, for all conversations.
        Decoding is batched; each reply is what the conversation alone would get. Conversations for
        which ``kv_limit`` leaves no room wait for those before them. Raises MmkvError; no session
        stays open.
        """
        require_list("conversations", conversations, "conversations or messages")
        drawn = self.settled(sampling)
        settings = self.logit_settings(
            () if tools is None else tools,
            tool_choice,
            parallel_tool_calls,
            response_format,
            logit_bias,
        )
        for note in settings.rules.notes:
            warnings.warn(note, stacklevel=2)
        batch: list[Any] = list(conversations)
        if batch and isinstance(batch[0], dict):
            batch = [batch]
        prompts = [self._prompt(conversation, settings.tools) for conversation in batch]
        jobs = [ReplyJob(self, each, drawn, budget, settings=settings) for each in prompts]
        return answer_all(self, jobs)

    def inputs(self, conversation: Sequence[Message]) -> dict[str, torch.Tensor]:
        """Return model inputs of a whole conversation, ready for the assistant's next message."""
        return self._prompt(conversation).inputs

    def _prompt(self, conversation: Sequence[Message], tools: Sequence[Tool] = ()) -> Prompt:
        messages, images, videos = take_media(conversation)
        last = messages[-1]
        if last["role"] != "tool" and (last["role"] != "user" or is_blank(last)):
            raise InputError("the conversation must end with a user message that says something")
        processor = self.processor
        pictures = [processor.load_picture(image) for image in images]
        clips = [processor.load_clip(video) for video in videos]
        for note in media_notes(pictures, clips, self.is_bundled_model):
            warnings.warn(note, stacklevel=3)
        template = processor.template
        template = template.with_tools(shown_tools(tools)) if tools else template
        text = template.render(messages, opening=True)
        return Prompt(processor.encode(text, pictures, clips), text=text)

    def _open(self, budget: Budget) -> Session:
        return Session(self, budget)
