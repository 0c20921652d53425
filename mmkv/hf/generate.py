"""A retained model's ``generate``: transformers prepares, the engine decodes.

What ``generate`` can be asked for and this cache cannot give is refused by its name. The decoding
loop runs transformers' processors and criteria on the engine's logits; each row of a batch is a
session of its own.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import (
    EosTokenCriteria,
    GenerateDecoderOnlyOutput,
    GenerationMode,
    LogitsProcessorList,
    MaxLengthCriteria,
    MinPLogitsWarper,
    StoppingCriteriaList,
    StopStringCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from mmkv.engine.backends.cuda.kernels.sample import Draw
from mmkv.engine.contents import Memory
from mmkv.engine.errors import InputError
from mmkv.engine.interrupts import OpenToCtrlC
from mmkv.engine.prefill import extend_together
from mmkv.engine.runtime import Runtime
from mmkv.engine.steps import BURST
from mmkv.hf.cache import (
    BatchRow,
    Looks,
    RetainedCache,
    close_rows,
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
        """Look for stop strings here: transformers gives a decoding function no tokenizer."""
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
            held, self._looks = cache.rows, engine.family.looks(self._media)
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


@dataclass(frozen=True)
class LoopSettings:
    """What decides the tokens of one call.

    Attributes:
        pad: the id that follows a reply that has ended, or None.
        keep_scores, keep_logits: whether those of every step are returned.
        streamer: takes the tokens of each step, or None.
    """

    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    do_sample: bool
    pad: int | None
    keep_scores: bool
    keep_logits: bool
    streamer: Any


@dataclass
class Generated:
    """The ids ``[B, W + new]`` and, where asked for, float32 ``[B, vocab]`` of every step."""

    ids: Tensor
    scores: tuple[Tensor, ...] | None
    logits: tuple[Tensor, ...] | None


class Loop:
    """Generates the replies of B rows, one step of all at a time, as transformers does.

    A row that has ended takes no more steps; its logits in later steps are its last ones.

    Args:
        logits: float32 ``[B, vocab]`` of the prompts' last tokens.
        input_ids: ``[B, W]``, as the caller passed them.
    """

    def __init__(
        self,
        engine: Runtime,
        rows: Sequence[BatchRow],
        logits: Tensor,
        input_ids: Tensor,
        how: LoopSettings,
    ) -> None:
        self.engine, self.rows, self.how, self.logits = engine, rows, how, logits
        self.made = Generated(
            input_ids, () if how.keep_scores else None, () if how.keep_logits else None
        )
        self._unfinished = torch.ones(len(rows), dtype=torch.long, device=input_ids.device)
        self._alive = [1] * len(rows)  # what the host has read of it
        self.ends_at_eos = any(hasattr(criterion, "eos_token_id") for criterion in how.criteria)
        self._full: set[int] = set()
        self._burst = _Burst.of(engine, how, len(rows))

    def run(self) -> Generated:
        """Generate until every row has ended.

        Ctrl-C is let through while others' processors, criteria and streamers run.
        """
        self._read(self._chosen())
        while any(self._alive):
            going = self._going()
            if not going:
                break
            if self._burst is None:
                self._step(going)
                self._read(self._chosen())
            else:
                columns = self._burst.columns(self, going)
                with OpenToCtrlC():
                    for column in columns:
                        self._take(column)
                self._alive = self._unfinished.tolist()
        return self.made

    def _going(self) -> list[int]:
        """Return the rows that take the next step. Those without a position left have ended."""
        going = self._running()
        for i in going:
            if not self.rows[i].session.has_room:
                warnings.warn(
                    f"row {i} ended at the model's last position; start a new conversation",
                    stacklevel=2,
                )
                self._full.add(i)
                self._unfinished[i] = self._alive[i] = 0
        return [i for i in going if i not in self._full]

    def _running(self) -> list[int]:
        """Return the rows that had not ended when the host last looked."""
        return [
            i
            for i, alive in enumerate(self._alive)
            if i not in self._full and (alive or not self.ends_at_eos)
        ]

    def _step(self, going: Sequence[int]) -> None:
        """Let the sessions read their rows' latest tokens."""
        rows = [self.rows[i] for i in going]
        tokens = [_pending(row) for row in rows]
        fresh = self.engine.decode([row.session for row in rows], tokens)
        for row, token in zip(rows, tokens, strict=True):
            row.fed(token)
        if len(going) < len(self.rows):
            at = torch.tensor(going, device=self.logits.device)
            fresh = self.logits.index_copy(0, at, fresh)
        self.logits = fresh

    def _chosen(self) -> Tensor:
        with OpenToCtrlC():
            return self._take(self._choose())

    def _choose(self) -> Tensor:
        """Return the next token of every row, int64 ``[B]``."""
        ids, made = self.made.ids, self.made
        logits = self.logits.to(ids.device, copy=True)
        scores = self.how.processors(ids, logits)
        if made.scores is not None:
            made.scores += (scores,)
        if made.logits is not None:
            made.logits += (logits,)
        if not self.how.do_sample:
            return scores.argmax(-1)
        return torch.multinomial(scores.softmax(-1), num_samples=1).squeeze(1)

    def _take(self, chosen: Tensor) -> Tensor:
        """Append a token to every row, padding to those that have ended; the tokens ``[B]``."""
        made, how = self.made, self.how
        if self.ends_at_eos and how.pad is not None:
            chosen = torch.where(self._unfinished.bool(), chosen, how.pad)
        made.ids = torch.cat([made.ids, chosen[:, None]], dim=-1)
        self._unfinished = self._unfinished & ~how.criteria(made.ids, made.scores)
        if how.streamer is not None:
            how.streamer.put(chosen.cpu())
        return chosen

    def _read(self, chosen: Tensor) -> None:
        """Read the tokens and which rows go on: the one time a step that the host waits."""
        tokens, alive = torch.stack([chosen, self._unfinished]).tolist()
        for i in self._running():
            self.rows[i].pending = tokens[i]
        self._alive = alive


# What the sampler of bursts does, in its order, and the settings of that.
_WARPERS: dict[type, str] = {
    TemperatureLogitsWarper: "temperature",
    TopKLogitsWarper: "top_k",
    TopPLogitsWarper: "top_p",
    MinPLogitsWarper: "min_p",
}


class _Burst:
    """Several steps by one call, where a CUDA graph runs them and nothing has to look between."""

    def __init__(self, how: LoopSettings, draws: list[Draw] | None) -> None:
        self._draws = draws
        lengths = [c.max_length for c in how.criteria if isinstance(c, MaxLengthCriteria)]
        self._most = min(lengths, default=None)
        ends = [c.eos_token_id for c in how.criteria if isinstance(c, EosTokenCriteria)]
        self._stop = [int(token) for ids in ends for token in ids.tolist()]

    @classmethod
    def of(cls, engine: Runtime, how: LoopSettings, rows: int) -> _Burst | None:
        """Return None where each token has to be looked at, or nothing is gained."""
        given: dict[type, Any] = {type(one): one for one in how.processors}
        # The sampler has one order: a user's own warpers may come in another, or twice.
        plain = [type(one) for one in how.processors] == [one for one in _WARPERS if one in given]
        plain &= all(type(one) in (MaxLengthCriteria, EosTokenCriteria) for one in how.criteria)
        plain &= all(getattr(one, "min_tokens_to_keep", 1) == 1 for one in how.processors)
        if not plain or how.keep_scores or how.keep_logits or not in_bursts(engine):
            return None
        if not how.do_sample:
            return None if how.processors else cls(how, None)
        drawn = {_WARPERS[kind]: getattr(one, _WARPERS[kind]) for kind, one in given.items()}
        # From torch's own generator, so that torch.manual_seed decides.
        seeds = torch.randint(2**62, (rows,)).tolist()
        return cls(how, [Draw(**drawn, seed=seed) for seed in seeds])

    def columns(self, loop: Loop, going: Sequence[int]) -> list[Tensor]:
        """Return the next tokens ``[B]`` of some steps; the sessions have read all but the last."""
        engine, rows = loop.engine, [loop.rows[i] for i in going]
        ids = loop.made.ids
        left = BURST if self._most is None else self._most - ids.shape[1]
        room = min(engine.spec.max_position - row.session.next_position for row in rows)
        generated = engine.decode_many(
            [row.session for row in rows],
            [_pending(row) for row in rows],
            max(1, min(BURST, left, room)),
            self._stop,
            None if self._draws is None else [self._draws[i] for i in going],
        )
        for row, tokens in zip(rows, generated, strict=True):
            for token in [_pending(row), *tokens[:-1]]:
                row.fed(token)
            row.pending = tokens[-1]
        block = torch.zeros((max(map(len, generated)), ids.shape[0]), dtype=torch.long)
        for i, tokens in zip(going, generated, strict=True):
            block[: len(tokens), i] = torch.tensor(tokens)
        return list(block.to(ids.device))


def in_bursts(engine: Runtime) -> bool:
    """Return whether several steps cost less by one call."""
    return engine.many_path == "graph"


def _pending(row: BatchRow) -> int:
    assert row.pending is not None
    return row.pending
