"""A model that is trained under compression, and the engine that decodes with its weights.

The engine reads a document as in decoding and records which entries each token could see
(:mod:`mmkv.engine.trace`). The transformers model then runs over the whole document at once under
that mask, so gradients see what decoding sees (G-KV, section 6 and appendix C). A mask is one int32
per layer, KV head and token: the first later token that no longer sees the entry. It stays on the
CPU; a layer brings its own part to the device.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface

from mmkv.engine.backends.cuda.kernels.sample import Draw, columns_of, guard, sample, uniform
from mmkv.engine.config import EngineConfig
from mmkv.engine.errors import InputError, ModelError
from mmkv.engine.model.families import family_for
from mmkv.engine.model.families.base import Turn
from mmkv.engine.model.families.config import read_config
from mmkv.engine.model.families.loading import resolve_device, resolve_dtype
from mmkv.engine.model.quantised import settings_of
from mmkv.engine.model.source import hub_reachable, locate
from mmkv.engine.model.spec import DecoderSpec
from mmkv.engine.model.weights import DecoderWeights, separate
from mmkv.engine.policies import Budget
from mmkv.engine.runtime import Runtime
from mmkv.engine.sequence import CachedSequence
from mmkv.engine.trace import DEATH, Recorder
from mmkv.training.data.labels import IGNORED
from mmkv.training.measure.teacher_forced import spans

_BLOCK = 512  # queries whose mask stands at once
_NAME = "mmkv_visible"
_MOST = 2**31  # entries of a budget


@dataclass(frozen=True)
class Visible:
    """Which entries of a document of T tokens each token sees.

    Attributes:
        until: int32 ``[L, H, T]`` on the CPU, of layers with entries: token t sees entry i if
            ``i <= t < until[..., i]``.
        entry_index: of each layer, its place in ``until``, or None.
    """

    until: Tensor
    entry_index: Sequence[int | None]

    @property
    def nbytes(self) -> int:
        """Bytes that the mask takes."""
        return self.until.nbytes

    def of_layer(self, layer: int, device: torch.device) -> Tensor:
        """Return ``[H, T]`` of a layer on ``device``."""
        entry = self.entry_index[layer]
        assert entry is not None
        return self.until[entry].to(device, non_blocking=True)

    def over(self, tokens: int) -> Visible:
        """Return the same of a document that goes on: what comes later is seen from there on."""
        more = tokens - self.until.shape[2]
        return Visible(F.pad(self.until, (0, more), value=tokens), self.entry_index)


def visible_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    visible: Visible | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend within one document, causally and to what is ``visible``: transformers' interface.

    Args:
        query: ``[1, Hq, T, D]``; key, value: ``[1, H, T, D]``.
        visible: None: every earlier entry.

    Returns:
        ``[1, T, Hq, D]``, and no weights.
    """
    how: dict[str, Any] = {"scale": scaling, "enable_gqa": True}
    if visible is None:
        made = F.scaled_dot_product_attention(query, key, value, is_causal=True, **how)
        return made.transpose(1, 2).contiguous(), None
    layer = module.layer_idx
    assert isinstance(layer, int)
    until = visible.of_layer(layer, query.device).repeat_interleave(
        query.shape[1] // key.shape[1], 0
    )
    tokens, parts = torch.arange(query.shape[2], device=query.device), []
    for at in tokens.split(_BLOCK):
        end = int(at[-1]) + 1
        mask = (tokens[:end] <= at[:, None]) & (at[:, None] < until[:, None, :end])
        parts.append(
            F.scaled_dot_product_attention(
                query[:, :, at[0] : end], key[:, :, :end], value[:, :, :end], mask[None], **how
            )
        )
    return torch.cat(parts, 2).transpose(1, 2).contiguous(), None


AttentionInterface.register(_NAME, visible_attention)


def budget_of(text: str, tokens: int) -> Budget:
    """Return the budget of a document of ``tokens``: entries (``64``), or a share below 1
    (``1/16``).

    Raises:
        InputError: neither, or not above 0.
    """
    try:
        amount = Fraction(text)
    except (ValueError, ZeroDivisionError):
        amount = Fraction(0)
    if not 0 < amount < _MOST:
        raise InputError(
            f"--budget is {text!r}; give entries per layer and KV head such as 64, or a share of "
            "the document such as 1/16"
        )
    return Budget.of(float(amount) if amount >= 1 else max(1.0, float(amount) * tokens))


@torch.inference_mode()
def read_as_decoded(session: CachedSequence, turn: Turn, labels: Tensor) -> list[Tensor]:
    """Feed a document as in decoding: prompts in chunks, replies one token at a time.

    Args:
        labels: int64 ``[T]``, -100 outside of replies.

    Returns:
        float32 logits ``[vocab]`` before each token of the replies and, last, after the document.
    """
    done, logits, found = 0, None, []
    for start, stop in [*spans(labels.tolist()), (len(labels), len(labels))]:
        if start > done:
            logits = session.extend(turn.part(done, start))
        for token in turn.token_ids[start:stop].tolist():
            assert logits is not None
            found.append(logits)
            logits = session.decode(token)
        done = stop
    assert logits is not None
    return [*found, logits]


@torch.inference_mode()
def replies(
    engine: Runtime,
    sessions: Sequence[CachedSequence],
    logits: Tensor,
    most: int,
    stop: Sequence[int],
    draws: Sequence[Draw],
) -> list[list[int]]:
    """Draw a reply in each session, of at most ``most`` tokens, the end token included.

    Args:
        logits: ``[B, vocab]`` of the first tokens.

    Returns:
        ids per session. The last of each is not appended to its session.
    """
    logits, _ = guard(logits, engine.never_chosen)
    columns, seed = columns_of(draws, engine.device)
    seen = torch.tensor([session.seen for session in sessions], device=engine.device)
    first = sample(logits, columns, uniform(seed, seen)).tolist()
    made = [[token] for token in first]
    going = [i for i, token in enumerate(first) if token not in stop and most > 1]
    if going:
        some = [sessions[i] for i in going]
        ids, own = [first[i] for i in going], [draws[i] for i in going]
        more = engine.decode_many(some, ids, most - 1, stop, own)
        for i, rest in zip(going, more, strict=True):
            made[i] += rest
    return made


class CompressedModel:
    """The model that is trained, its teacher, and the engine that decodes with its weights.

    Args:
        name: checkpoint folder or hub id.
        config: policy and gates of the engine, and how prompts are read. Budgets come with
            documents.
        lora: rank, scale (alpha) and names of the matrices; None: all text weights are trained,
            and the teacher is a second copy of the model.
        checkpointing: recompute layers in the backward pass.

    Attributes:
        model: what a trainer takes: a PeftModel, or the transformers model.

    Raises:
        ModelError: not readable, or of a kind that the mask does not describe.
        PolicyError: likewise; GateError: as the engine.
    """

    def __init__(
        self,
        name: str,
        config: EngineConfig,
        lora: tuple[int, int, Sequence[str]] | None,
        seed: int = 0,
        dtype: str = "auto",
        device: str = "auto",
        checkpointing: bool = False,
    ) -> None:
        self.name, self._config = name, config
        self._hf, self._kind = _load(name, dtype, resolve_device(device))
        text: Any = self._kind.text_model(self._hf)
        self.spec = DecoderSpec.from_hf(
            text,
            self._kind.mrope_section,
            self._kind.mrope_interleaved,
            self._kind.state_kinds,
            self._kind.has_vision,
        )
        if any(self.spec.sliding_window):
            raise ModelError(
                f"{name} has sliding-window layers; training under compression knows full "
                "attention only, choose another checkpoint"
            )
        self._views: list[Tensor] = []
        self._weights = self._shared()
        self._engine = self._runtime()
        _require_described(self._engine)
        text.set_attn_implementation(_NAME)
        self._lora: list[tuple[Any, Tensor]] = []
        if lora is None:
            self._teacher = copy.deepcopy(self._hf)
            teacher_weights, _ = self._share(self._teacher)
            self.model: Any = self._hf
            text.requires_grad_(True)
            self._hf.get_output_embeddings().requires_grad_(True)
        else:
            self._teacher, teacher_weights = None, self._weights
            self.model = self._with_lora(lora, seed)
        full = EngineConfig(model=name, policy="full", prefill_chunk=config.prefill_chunk)
        kind = self._kind(self._teacher or self._hf)
        self.teacher = Runtime.from_parts(full, kind, self.spec, teacher_weights)
        if checkpointing:
            self._hf.gradient_checkpointing_enable({"use_reentrant": False})
            self._hf.enable_input_require_grads()

    @property
    def device(self) -> torch.device:
        """Where the model runs."""
        return self._engine.device

    @contextmanager
    def decoding(self) -> Iterator[Runtime]:
        """Give the engine with the weights as they are trained now, for as long as it lasts.

        Nothing else may use the model meanwhile, the teacher neither: they share weights.
        """
        if self._teacher is not None:
            self._weights = self._shared()
        with torch.no_grad():
            for layer, base in self._lora:
                (adapter,) = layer.active_adapters
                layer.get_base_layer().weight.copy_(base + layer.get_delta_weight(adapter))
        try:
            # A new one: backends lay weights out when they first decode.
            yield self._runtime()
        finally:
            with torch.no_grad():  # taking the product away again would leave what it rounded
                for layer, base in self._lora:
                    layer.get_base_layer().weight.copy_(base)

    def turn(self, inputs: Mapping[str, Any]) -> Turn:
        """Return a whole document as the engine reads it."""
        given = {name: value for name, value in inputs.items() if name != "labels"}
        return self._engine.family.turn(given, 0, self.device)

    def recorded(self, engine: Runtime, budget: Budget, tokens: int) -> CachedSequence:
        """Open a session that records all of a document of ``tokens``."""
        session = engine.session(budget)
        # Every entry dies once at most; a block more, for the last is never full.
        session.record(max(Recorder.LIMIT, (tokens * self.spec.rows + 2**16) * DEATH.itemsize))
        return session

    def visible(self, session: CachedSequence, tokens: int) -> Visible:
        """Return what the tokens of a recorded session saw; ``tokens`` may be one more than it has:
        the last of a reply is not appended.
        """
        assert session.recorder is not None
        record = session.recorder.read(session)
        if record.seen[0] != 0:
            raise RuntimeError("the record does not begin with the document; a bug in mmkv")
        until = torch.from_numpy(record.visible_until())
        return Visible(until, self.spec.entry_index).over(tokens)

    def watch(self, inputs: Mapping[str, Any], labels: Tensor, budget: Budget) -> Visible:
        """Read a document under compression; return what its tokens saw."""
        with self.decoding() as engine:
            turn = self.turn(inputs)
            with self.recorded(engine, budget, len(labels)) as session:
                read_as_decoded(session, turn, labels)
                return self.visible(session, len(labels))

    def logits(
        self,
        model: Any,
        inputs: Mapping[str, Any],
        where: Tensor,
        visible: Visible | None,
    ) -> Tensor:
        """Return float32 logits ``[n, vocab]`` at the tokens ``where [n]`` of a document.

        Args:
            model: :attr:`model`, or a trainer's wrapper of it.
            visible: None: full attention.
        """
        given = {
            name: value.to(self.device) if isinstance(value, Tensor) else value
            for name, value in inputs.items()
            if name not in ("labels", "attention_mask")  # one document, nothing is padded
        }
        keep = where.to(self.device)
        if visible is not None:
            visible = visible.over(inputs["input_ids"].shape[1])
        made = model(**given, use_cache=False, logits_to_keep=keep, visible=visible)
        return made.logits[0].float()

    @torch.no_grad()
    def teacher_logits(self, inputs: Mapping[str, Any], where: Tensor) -> Tensor:
        """Return :meth:`logits` of the model as it was, under full attention."""
        if self._teacher is not None:
            return self.logits(self._teacher, inputs, where, None)
        with self.model.disable_adapter():
            return self.logits(self.model, inputs, where, None)

    def answered(
        self, inputs: Mapping[str, Any], most: int, temperature: float, seed: int
    ) -> dict[str, Any]:
        """Return a document whose replies are drawn from the teacher, under full attention.

        A reply ends with an end token, or, where the document's own has none, after as many tokens
        as that.

        Args:
            inputs: what the processor returns, and ``labels [1, T]``; most: tokens of a reply.
        """
        ids, labels = (inputs[name].flatten() for name in ("input_ids", "labels"))
        turn, engine, ends = self.turn(inputs), self.teacher, self.teacher.family.eos_token_ids
        own: list[tuple[int, int, list[int]]] = []
        draw = Draw(temperature=temperature, seed=seed)
        with engine.session() as session:
            logits, done = None, 0
            for start, stop in spans(labels.tolist()):
                if start > done:
                    logits = session.extend(moved(turn.part(done, start), session))
                assert logits is not None
                ended = int(ids[stop - 1]) in ends
                count = most if ended else min(most, stop - start)
                stops = ends if ended else ()
                (made,) = replies(engine, [session], logits[None], count, stops, [draw])
                logits, done = session.decode(made[-1]), stop
                own.append((start, stop, made))
        return with_replies(inputs, own)

    def up_to(
        self, inputs: Mapping[str, Any], start: int, stop: int, ids: list[int]
    ) -> dict[str, Any]:
        """Return a document whose reply ``start`` to ``stop`` is ``ids``, without what follows.

        Where pictures follow, all stays: their pixels come in one piece, and no earlier token sees
        them.
        """
        made = with_replies(inputs, [(start, stop, ids)])
        after = made["input_ids"][0, start + len(ids) :]
        visual = torch.tensor(list(self.teacher.family.placeholder.values()))
        if not torch.isin(after, visual).any():
            for name in ("input_ids", "mm_token_type_ids"):
                if name in made:
                    made[name] = made[name][:, : start + len(ids)]
        return made

    def _shared(self) -> DecoderWeights:
        separate(self._views)
        weights, self._views = self._share(self._hf)
        return weights

    def _share(self, model: Any) -> tuple[DecoderWeights, list[Tensor]]:
        head = self._kind.output_head(model)
        text: Any = self._kind.text_model(model)
        return DecoderWeights.share(text, head.data, self.spec, self._kind.state_layer)

    def _runtime(self) -> Runtime:
        family = self._kind(self._hf)
        return Runtime.from_parts(self._config, family, self.spec, self._weights)

    def _with_lora(self, lora: tuple[int, int, Sequence[str]], seed: int) -> Any:
        from peft import LoraConfig, get_peft_model
        from peft.tuners.lora import LoraLayer

        rank, alpha, targets = lora
        layers: Any = self._kind.text_model(self._hf).layers
        own = {id(each) for each in layers.modules() if isinstance(each, nn.Linear)}
        linear = [name for name, each in self._hf.named_modules() if id(each) in own]
        chosen = [n for n in linear if not targets or n.rpartition(".")[2] in targets]
        known = sorted({name.rpartition(".")[2] for name in linear})
        if unknown := set(targets) - set(known):
            raise InputError(
                f"--target {sorted(unknown)[0]!r}: this model's matrices are {', '.join(known)}"
            )
        torch.manual_seed(seed)
        config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=chosen, task_type="CAUSAL_LM")
        made = get_peft_model(self._hf, config)
        adapted: list[Any] = [each for each in made.modules() if isinstance(each, LoraLayer)]
        self._lora = [(each, each.get_base_layer().weight.detach().clone()) for each in adapted]
        return made


def moved(turn: Turn, session: CachedSequence) -> Turn:
    """Return a part of a document with the positions that follow a session's."""
    shift = session.next_position - int(turn.positions.min())
    return Turn(
        turn.token_ids,
        turn.modality,
        turn.positions + shift,
        turn.visual,
        turn.deepstack,
        turn.next_position + shift,
    )


def with_replies(
    inputs: Mapping[str, Any], made: Sequence[tuple[int, int, list[int]]]
) -> dict[str, Any]:
    """Return a document with other replies: ``made`` has (start, stop, ids) of each replaced one.

    ``labels`` are those of the new replies alone.
    """
    parts: dict[str, list[Tensor]] = {"input_ids": [], "labels": [], "mm_token_type_ids": []}
    old = {name: inputs[name].flatten() for name in parts if name in inputs}
    done = 0
    for start, stop, ids in [*made, (old["input_ids"].numel(),) * 2 + ([],)]:
        reply = torch.tensor(ids, dtype=torch.int64)
        parts["input_ids"] += [old["input_ids"][done:start], reply]
        parts["labels"] += [torch.full((start - done,), IGNORED), reply]
        if "mm_token_type_ids" in old:
            parts["mm_token_type_ids"] += [
                old["mm_token_type_ids"][done:start],
                torch.zeros_like(reply),
            ]
        done = stop
    joined = {name: torch.cat(rows)[None] for name, rows in parts.items() if rows}
    return {**inputs, **joined}


def _load(name: str, dtype: str, device: torch.device) -> tuple[Any, Any]:
    """Return a transformers model and its family. Raises ModelError."""
    source = locate(name)
    config = read_config(source, not hub_reachable())
    if settings_of(config) is not None:
        raise ModelError(f"{name} holds quantised weights, which cannot be trained; take its base")
    kind = family_for(config)
    try:
        model = getattr(transformers, kind.auto_class).from_pretrained(
            source,
            dtype=resolve_dtype(dtype, config, device),
            attn_implementation="sdpa",
            use_safetensors=True,
            trust_remote_code=False,
        )
    except (OSError, ValueError) as error:
        raise ModelError(f"{name} cannot be read: {error}") from error
    return model.requires_grad_(False).to(device), kind


def _require_described(engine: Runtime) -> None:
    """Raise InputError for a policy whose cache no mask of entries describes."""
    policy = engine.policy
    if policy.pruner is not None:
        raise InputError(
            f"policy {policy.name!r} drops tokens inside the layers, which a mask of entries does "
            "not describe; choose one that evicts"
        )
    if not policy.evicts and policy.admission is None:
        raise InputError(f"policy {policy.name!r} keeps everything; choose one that evicts")
