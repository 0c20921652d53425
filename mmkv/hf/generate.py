"""A retained model's ``generate``: transformers prepares, the engine decodes.

What ``generate`` can be asked for and this cache cannot give is refused by its name.
"""

from __future__ import annotations

import copy
import inspect
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.cache_utils import Cache
from transformers.generation import (
    GenerateDecoderOnlyOutput,
    GenerationMode,
    LogitsProcessorList,
    StoppingCriteriaList,
    StopStringCriteria,
)

from mmkv.engine.contents import Memory
from mmkv.engine.errors import InputError, SessionError
from mmkv.engine.interrupts import CtrlC, whole
from mmkv.engine.model.families.vision_cache import looks
from mmkv.engine.prefill import extend_together
from mmkv.engine.runtime import Runtime
from mmkv.hf.loop import (
    BatchRow,
    Generated,
    Loop,
    LoopSettings,
    masked_before,
    tokens_to_read,
    without_padding,
)

# Arguments of generate that mean another way of decoding, or inputs that the engine makes itself.
_ARGUMENTS = (
    "assistant_model",
    "assistant_tokenizer",
    "custom_generate",
    "negative_prompt_ids",
    "negative_prompt_attention_mask",
    "synced_gpus",
    "inputs_embeds",
    "position_ids",
    "cache_position",
    "encoder_outputs",
    "mm_encoder_outputs",
)
# The argument and the field of outputs that hold the cache: transformers 5.24 renamed them.
CACHE_NAMES = ("cache", "past_key_values")
# What transformers hands on to a decoding function of its own accord.
_HANDED_ON = {
    *CACHE_NAMES,
    "attention_mask",
    "position_ids",
    "use_cache",
    "logits_to_keep",
    "mm_encoder_outputs",
}
# Names of the cache that grows; transformers drops "hybrid" itself.
_CACHES = (None, "dynamic", "hybrid")
_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)


def effective_config(given: Mapping[str, Any], default: GenerationConfig) -> GenerationConfig:
    """Return the settings of a call as transformers will put them together.

    Args:
        given: the arguments of ``generate``; default: the model's own settings.
    """
    config = copy.copy(given.get("generation_config") or GenerationConfig())
    for name, value in vars(default).items():
        if getattr(config, name, None) is None:
            setattr(config, name, value)
    for name, value in given.items():
        if hasattr(config, name):
            setattr(config, name, value)
    return config


def check_call(given: Mapping[str, Any], config: GenerationConfig) -> None:
    """Check a call before transformers sees it.

    Args:
        given: the arguments of ``generate``; config: what :func:`effective_config` made of them.

    Raises:
        InputError: naming the first that cannot be met.
    """
    for name in _ARGUMENTS:
        if (value := given.get(name)) is not None and value is not False:
            raise _refused(name)
    mode = config.get_generation_mode()
    if mode not in _MODES:
        raise _refused(str(mode.value).replace("_", " "))
    if config.guidance_scale not in (None, 1):
        raise _refused("guidance_scale")
    if config.use_cache is False:
        raise _refused("use_cache=False")
    if config.cache_implementation not in _CACHES:
        raise _refused(f"cache_implementation={config.cache_implementation!r}")
    for name in ("token_healing", "output_attentions", "output_hidden_states"):
        if getattr(config, name):
            raise _refused(name)
    if config.prefill_chunk_size is not None:
        raise InputError(
            "prefill_chunk_size is set per model here; pass prefill_chunk to mmkv.hf.retain"
        )


def check_rest(rest: Mapping[str, Any]) -> None:
    """Check what transformers would hand on to the model. Raises InputError."""
    for name, value in rest.items():
        if name not in _HANDED_ON and value is not None:
            raise _refused(name)


def _refused(what: str) -> InputError:
    return InputError(
        f"mmkv.hf.retain does not run {what}; leave it out, or call generate after the context"
    )


# What processors return of pictures, videos and their places.
MEDIA = (
    "pixel_values",
    "pixel_values_videos",
    "image_grid_thw",
    "video_grid_thw",
    "second_per_grid_ts",
    "image_sizes",
    "image_sizes_videos",
    "batch_num_images",
    "mm_token_type_ids",
    "token_type_ids",  # of Gemma 3: which tokens are pictures'
)

_CACHE_FIELD = next(
    field.name for field in fields(GenerateDecoderOnlyOutput) if field.name in CACHE_NAMES
)


class Call:
    """One call of ``generate`` on a retained model.

    Attributes:
        cache: what holds the conversations afterwards; None: they are closed.
        memory: of each conversation, at the end of the call.

    Args:
        stock: the model's own ``generate``.
        arguments: positional and named, as the caller gave them.
    """

    def __init__(
        self,
        engine: Runtime,
        stock: Callable[..., Any],
        arguments: tuple[tuple[Any, ...], Mapping[str, Any]],
    ) -> None:
        bound = inspect.signature(stock).bind(*arguments[0], **arguments[1]).arguments
        self._engine, self._stock = engine, stock
        self._given: dict[str, Any] = {**bound, **bound.get("kwargs", {})}
        self._given.pop("kwargs", None)
        self._streamer = self._given.get("streamer")
        self._opened: list[BatchRow] = []  # what an error closes
        self._looks: Looks = {}
        self._again: set[int] = set()  # modalities of which pictures that were read came once more
        self.cache: RetainedCache | None = None
        self.memory: tuple[Memory, ...] = ()

    def run(self) -> Any:
        """Return what ``generate`` returns.

        Raises:
            MmkvError, and what transformers raises. The streamer is ended, and a cache that was
            passed is as it was.
        """
        try:
            with ExitStack() as stack:
                config = effective_config(self._given, self._model().generation_config)
                check_call(self._given, config)
                self.cache = _retained_cache(self._take_cache(), self._engine)
                if self.cache is not None:
                    stack.enter_context(self.cache.in_use())
                media = {}
                if self._engine.family.has_vision:
                    media = {key: self._given.pop(key, None) for key in MEDIA}
                self._media = {key: value for key, value in media.items() if value is not None}
                self._mask = self._given.get("attention_mask")
                self._take_stop_strings(config.stop_strings)
                # Positions are the engine's; transformers makes none where some are given.
                return self._stock(
                    **self._given,
                    position_ids=torch.zeros((1, 1), dtype=torch.long),
                    custom_generate=self._decode,
                )
        except BaseException:
            close_rows(self._opened)
            if self._streamer is not None:
                self._streamer.end()
            raise

    def _model(self) -> Any:
        return self._stock.__self__  # type: ignore[attr-defined]

    def _take_cache(self) -> object:
        """Take the cache out of the arguments, by either name. Raises InputError for two."""
        named = {name: self._given.pop(name, None) for name in CACHE_NAMES}
        given = [value for value in named.values() if value is not None]
        if len(given) > 1:
            raise InputError(f"{' and '.join(CACHE_NAMES)} name the same argument; pass one")
        return given[0] if given else None

    def _take_stop_strings(self, stop: str | list[str] | None) -> None:
        """Look for stop strings here: to a decoding function transformers gives no tokenizer."""
        tokenizer = self._given.get("tokenizer")
        if stop and tokenizer is not None:
            own = StopStringCriteria(tokenizer, stop)
            criteria = [*(self._given.get("stopping_criteria") or []), own]
            self._given["stopping_criteria"] = StoppingCriteriaList(criteria)
            self._given["stop_strings"] = None

    def _decode(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **rest: Any,
    ) -> Any:
        """Decode what transformers has prepared; called by it."""
        config: Any = generation_config
        check_rest(rest)
        copies = config.num_return_sequences
        mask = self._mask if self._mask is not None else rest.get("attention_mask")
        if self._mask is None and mask is not None:
            mask = mask[::copies]
        keep, pad = config.return_dict_in_generate, config._pad_token_tensor
        if self.cache is None and keep:
            self.cache = RetainedCache()
        rows, logits = self._prefill(input_ids[::copies], mask, copies)
        how = LoopSettings(
            logits_processor,
            stopping_criteria,
            bool(config.do_sample),
            None if pad is None else int(pad),
            bool(keep and config.output_scores),
            bool(keep and config.output_logits),
            self._streamer,
        )
        made = Loop(self._engine, rows, logits, input_ids, how).run()
        if self._streamer is not None:
            self._streamer.end()
        return self._result(rows, made, keep)

    def _prefill(
        self, input_ids: Tensor, mask: Tensor | None, copies: int
    ) -> tuple[list[BatchRow], Tensor]:
        """Read the prompts; the rows and float32 logits ``[B copies, vocab]``."""
        engine, cache, held = self._engine, self.cache, []
        given = without_padding(input_ids, mask)
        begun = [(0, ids) for ids in given]
        if cache is not None:
            held, self._looks = cache.rows, looks(engine.family, self._media)
            if held:
                before = masked_before(input_ids, mask)
                begun = tokens_to_read(held, given, before, cache.only_new)
        new = [ids for _, ids in begun]
        for i, (kept, _) in enumerate(begun):
            # What is held stays as it is until the call has ended well.
            self._opened.append(held[i].fork() if held else BatchRow(engine.session()))
            self._opened[-1].go_back(kept)
        prompted = list(self._opened)
        with engine.lock:
            turns = engine.family.turns(
                new,
                self._media,
                [row.session.next_position for row in prompted],
                engine.device,
                [torch.tensor(row.ids, dtype=torch.long) for row in prompted if held],
                seen_again=self._seen_again,
            )
        logits = extend_together([row.session for row in prompted], turns)
        rows = []
        for row, ids in zip(prompted, new, strict=True):
            row.ids += ids.tolist()
            row.prompt, row.pending = row.prompt or len(row.ids), None
            rows.append(row)
            for _ in range(copies - 1):
                rows.append(row.fork())
                self._opened.append(rows[-1])
        return rows, logits.repeat_interleave(copies, 0)

    def _seen_again(self, kind: int) -> None:
        assert self.cache is not None
        self.cache.check_looks(kind, self._looks)
        self._again.add(kind)

    def _result(self, rows: list[BatchRow], made: Generated, as_output: bool) -> Any:
        self.memory = tuple(row.session.memory() for row in rows)
        if self.cache is None:
            close_rows(self._opened)
        else:
            self.cache.replace(rows, self._looks, self._again)
            self._opened = []
        if not as_output:
            return made.ids
        return GenerateDecoderOnlyOutput(
            sequences=made.ids,
            scores=made.scores,
            logits=made.logits,
            **{_CACHE_FIELD: self.cache},
        )


def _retained_cache(given: object, engine: Runtime) -> RetainedCache | None:
    if given is None or isinstance(given, RetainedCache):
        if given is not None and given.rows and given.rows[0].session.engine is not engine:
            raise InputError(
                "the cache was filled by another retained model, or before weights were "
                "changed; pass a new mmkv.hf.RetainedCache()"
            )
        return given
    raise InputError(
        f"the cache is a {type(given).__name__}, which keeps every entry; pass a "
        "mmkv.hf.RetainedCache(), or leave it out"
    )


# Hashes of pictures per modality (mmkv.engine.model.families.vision_cache.looks).
Looks = dict[int, list[bytes | None]]


class RetainedCache(Cache):
    """The conversations of a batch, for a later ``generate`` to go on with.

    Pass it as ``past_key_values``, with the ids of the whole conversation and all its pictures or
    the new ones. A new one is empty and belongs to the first model that fills it. ``copy.deepcopy``
    gives an independent copy. Its memory is returned when it is closed, collected, or when the
    model is no longer retained.

    Args:
        only_new: ids are always those that come after the latest reply. Otherwise they are so if
            the attention mask covers earlier tokens, too, as for transformers' own caches.
    """

    def __init__(self, *, only_new: bool = False) -> None:
        super().__init__(layers=[])
        self.only_new = only_new
        self.rows: list[BatchRow] = []
        self._looks: list[Looks] = []  # of the pictures of each call, or all of one conversation's
        self._use = threading.Lock()
        self.owner: weakref.WeakSet[RetainedCache] | None = None  # closes it, with the others

    def __repr__(self) -> str:
        return f"RetainedCache({len(self.rows)} conversations, {self.get_seq_length()} tokens)"

    @whole
    def __deepcopy__(self, memo: dict[int, Any]) -> RetainedCache:
        made = RetainedCache(only_new=self.only_new)
        with self.in_use():
            made._looks = [dict(looks) for looks in self._looks]
            for row in self.rows:  # one by one: what was forked before an error is closed
                made.rows.append(row.fork())
        if self.owner is not None:
            made.owner = self.owner
            self.owner.add(made)
        return made

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the tokens that the longest conversation has seen, evicted ones included."""
        return max((len(row.ids) for row in self.rows), default=0)

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return -1: there is no limit."""
        return -1

    @property
    def is_croppable(self) -> bool:
        """Return False: evicted tokens cannot come back."""
        return False

    def memory(self) -> tuple[Memory, ...]:
        """Return the tokens that each conversation has seen, and the memory that it holds."""
        return tuple(row.session.memory() for row in self.rows)

    def retained(self) -> list[list[list[Tensor]]]:
        """Return the token indices kept, ``[row][layer][kv_head]``, each ascending int64."""
        return [row.session.retained() for row in self.rows]

    @whole
    def reset(self) -> None:
        """Forget all conversations and return their memory."""
        with self.in_use():
            self.close()

    def close(self) -> None:
        """Return the memory; the cache is empty afterwards."""
        close_rows(self.rows)
        self._looks = []

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Claim the cache for one call. Raises SessionError while another call has it."""
        with CtrlC():
            if not self._use.acquire(blocking=False):
                raise SessionError(
                    "the cache is in use by another generate call; wait for it, or give each its "
                    "own (copy.deepcopy)"
                )
            try:
                yield
            finally:
                self._use.release()

    @whole
    def replace(self, rows: Sequence[BatchRow], looks: Looks, again: Collection[int]) -> None:
        """Take over other rows and close those held so far.

        Args:
            looks: of the pictures that came with the ids.
            again: the modalities of which all came, not only the new ones.
        """
        before = list(self.rows)
        self.rows[:] = rows
        if self._looks and len(rows) == 1:
            old = self._looks.pop()
            for kind, now in looks.items():
                seen = old.get(kind, [])
                old[kind] = max(seen, now, key=len) if kind in again else [*seen, *now]
            looks = old
        self._looks.append(looks)
        close_rows(before)

    def check_looks(self, kind: int, looks: Looks) -> None:
        """Check pixels that cover pictures read before. Raises InputError where they are others."""
        now = looks[kind]
        for old in self._looks:
            seen = old.get(kind, [])
            # Of several rows it is not known whose pictures are which.
            same = now[: len(seen)] == seen if len(self.rows) == 1 else _in_order(seen, now)
            if not (same or _in_order(now, seen)):
                raise InputError(
                    "the pixels of earlier pictures or videos are not those that the cache has "
                    "read; pass a new RetainedCache(), or the pixels of the new ones alone"
                )

    def update(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse a forward pass of the model itself."""
        raise InputError(
            "a RetainedCache is read by generate of a model under mmkv.hf.retain alone; for the "
            "model's own forward pass use a DynamicCache"
        )

    def crop(self, *_: Any) -> NoReturn:
        """Refuse: evicted tokens cannot come back."""
        raise InputError("a RetainedCache cannot be cropped; copy.deepcopy it before it goes on")

    def reorder_cache(self, *_: Any) -> NoReturn:
        """Refuse beam search."""
        raise InputError("a RetainedCache does not run beam search; set num_beams=1")


def _in_order(part: Sequence[Any], of: Sequence[Any]) -> bool:
    """Return whether all of ``part`` are found in ``of``, in this order."""
    rest = iter(of)
    return all(one in rest for one in part)


@whole
def close_rows(rows: list[BatchRow]) -> None:
    """Return the pages of all rows and empty the list."""
    while rows:
        rows.pop().session.close()
