"""What every model family gives the engine: a turn as embeddings and rope positions."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn

from mmkv.engine.errors import InputError, ModelError, PolicyError
from mmkv.engine.model.families.features import (
    IMAGE,
    VIDEO,
    Features,
    VisionCache,
    as_tensor,
    covers_seen,
    hash_of,
    in_token_order,
    shared_out,
)

if TYPE_CHECKING:
    from mmkv.engine.model.state_layer import StateLayer
    from mmkv.engine.policies.base import Merger


_NOUNS = {IMAGE: "image", VIDEO: "video"}


@dataclass(frozen=True)
class Turn:
    """One turn, ready for the decoder. T tokens, of which V stand for visual features.

    What says what the tokens are lies on the CPU, where most of it is read; features do not.

    Attributes:
        token_ids: int64 ``[T]``; a visual token keeps its placeholder id.
        modality: uint8 ``[T]``: 0 text, 1 image, 2 video.
        positions: int64 ``[A, T]`` rope positions, already offset (A = 3 for M-RoPE, else 1).
        visual: ``[V, hidden]`` features that replace the embeddings of the visual tokens, in
            token order; None without visual tokens.
        deepstack: ``deepstack[i]`` is ``[V, hidden]``, added to the states of the visual tokens
            after decoder layer i.
        next_position: rope position of the text token that follows the turn.
        whole_pictures: the tokens of a picture see all of it, also those behind them.
        kept: bool ``[V]``, which visual tokens a policy's merger keeps; None: it has none.
    """

    token_ids: Tensor
    modality: Tensor
    positions: Tensor
    visual: Tensor | None
    deepstack: tuple[Tensor, ...]
    next_position: int
    whole_pictures: bool = False
    kept: Tensor | None = None

    def whole_ends(self) -> list[int]:
        """Return for each token, and for the end of the turn, where the last chunk may end that
        ends there or before: a picture that is seen whole is in one chunk.
        """
        ends = list(range(self.token_ids.numel() + 1))
        if self.whole_pictures:
            visual = (self.modality > 0).tolist()
            for at in range(1, len(visual)):
                if visual[at] and visual[at - 1]:
                    ends[at] = ends[at - 1]
        return ends

    def part(self, start: int, stop: int) -> Turn:
        """Return tokens ``start`` to ``stop`` as a turn of their own, positions unchanged.

        Raises:
            InputError: this would cut a picture in two that is seen whole.
        """
        ends = self.whole_ends() if self.whole_pictures and self.visual is not None else None
        if ends is not None and (ends[start], ends[stop]) != (start, stop):
            raise InputError(
                "this model sees a picture at once, which cannot be cut in two; cut the prompt "
                "elsewhere"
            )
        span = slice(start, stop)
        visual, deepstack, kept = self.visual, self.deepstack, self.kept
        if visual is not None:
            first = int((self.modality[:start] > 0).sum())
            rows = slice(first, first + int((self.modality[span] > 0).sum()))
            visual, deepstack = visual[rows], tuple(level[rows] for level in deepstack)
            kept = None if kept is None else kept[rows]
        positions = self.positions[:, span]
        return Turn(
            self.token_ids[span],
            self.modality[span],
            positions,
            visual,
            deepstack,
            int(self.positions[:, :stop].max()) + 1,
            self.whole_pictures,
            kept,
        )


class Family:
    """How one model family reads its checkpoint and turns processor output into a :class:`Turn`.

    A subclass names its ``model_types`` and, if it sees, overrides :meth:`image_features` and
    :meth:`video_features` (and :meth:`positions` where they are not one per token). Nothing a
    conversation changes is kept here: sessions share the family.

    Attributes:
        text_types: types of language model that its checkpoints may hold, besides its own and
            those of mmkv's text-only families.
        auto_class: name of the transformers class that loads the checkpoint.
        text_places: where a checkpoint's files may hold the text model: (prefix of its tensors,
            name of the head).
        pixel_keys: processor outputs that carry pictures and videos.
        eos_token_ids: tokens that end a reply, from the generation config or the config.
        mrope_section: of M-RoPE, frequencies per axis (t, h, w) where the config names none.
        mrope_interleaved: see :func:`mmkv.engine.model.spec.mrope_axes`.
        whole_pictures: the tokens of a picture see all of it, also those behind them.
        state_kinds: what ``layer_types`` of its configs calls layers that keep a state in place of
            entries, which :meth:`state_layer` makes.
        merger: what chooses among patches before the projector; None: all go on.
    """

    model_types: ClassVar[tuple[str, ...]] = ()
    text_types: ClassVar[tuple[str, ...]] = ()
    auto_class: ClassVar[str] = "AutoModelForImageTextToText"
    text_places: ClassVar[tuple[tuple[str, str], ...]] = (
        ("model.language_model.", "lm_head.weight"),
    )
    has_vision: ClassVar[bool] = True
    pixel_keys: ClassVar[dict[int, str]] = {IMAGE: "pixel_values"}
    rope_axes: ClassVar[int] = 1
    mrope_section: ClassVar[tuple[int, ...] | None] = None
    mrope_interleaved: ClassVar[bool] = True
    whole_pictures: ClassVar[bool] = False
    state_kinds: ClassVar[tuple[str, ...]] = ()
    merger: Merger | None = None

    def __init__(self, hf_model: Any) -> None:
        self._hf = hf_model
        self.config = hf_model.config
        if isinstance(hf_model, DeferredModel):
            self.vocab_size, self.eos_token_ids = hf_model.vocab_size, hf_model.eos_token_ids
        else:
            embedding: Any = self.text_model(hf_model).embed_tokens
            self.vocab_size = int(embedding.weight.shape[0])
            generation = getattr(hf_model, "generation_config", None)
            self.eos_token_ids = end_tokens(generation, self.config, self.config.get_text_config())
        tokens = {IMAGE: "image_token_id", VIDEO: "video_token_id"}
        self.placeholder = {
            modality: int(getattr(self.config, tokens[modality]))
            for modality in (self.pixel_keys if self.has_vision else ())
        }

    @property
    def hf(self) -> Any:
        """Return the transformers model without its decoder layers: the vision side.

        It is read from the checkpoint when it is first asked for. Raises ModelError.
        """
        return self._hf.get() if isinstance(self._hf, DeferredModel) else self._hf

    @property
    def least_chunk(self) -> int:
        """Return how many tokens a chunk of a prompt must have room for: of a picture that must be
        in one.
        """
        return 1

    @property
    def vision_loaded(self) -> bool:
        """Return whether nothing has to be read from the checkpoint before the next picture."""
        return not (self.has_vision and isinstance(self._hf, DeferredModel) and not self._hf.built)

    @property
    def vision_note(self) -> str | None:
        """Return a line on packed weights of the vision side; None: there is nothing to say."""
        return self._hf.note if isinstance(self._hf, DeferredModel) else None

    @property
    def merges(self) -> bool:
        """Return whether it can ask a merger: of one projection a patch, behind CLIP's layers."""
        return False

    def merging(self, merger: Merger | None) -> Self:
        """Return this family as one that asks ``merger``; None: that asks nothing.

        Both read with the same tower. Raises PolicyError: this one cannot.
        """
        if merger is self.merger:
            return self
        if merger is not None and not self.merges:
            raise PolicyError(
                "the policy merges patches between a tower of CLIP's form and its projector, and "
                f"this model ({self.config.model_type}) has none that mmkv knows; choose another "
                "policy, such as divprune or cdpruner"
            )
        made = copy.copy(self)
        made.merger = merger
        return made

    @classmethod
    def prepare(cls) -> None:
        """Add what transformers does not have by itself to its auto classes; here nothing."""

    @staticmethod
    def text_model(hf_model: Any) -> nn.Module:
        """Return the module with embed_tokens, layers, norm and rotary_emb."""
        return hf_model.model.language_model

    @staticmethod
    def output_head(hf_model: Any) -> Tensor:
        """Return the output projection ``[vocab, hidden]`` (the embedding itself when tied)."""
        return hf_model.get_output_embeddings().weight

    @staticmethod
    def state_layer(layer: Any) -> StateLayer:
        """Return what mixes tokens in a transformers layer of one of :attr:`state_kinds`."""
        raise NotImplementedError

    @torch.inference_mode()
    def turn(
        self,
        inputs: Mapping[str, Any],
        offset: int,
        device: torch.device | str = "cpu",
        cache: VisionCache | None = None,
        salt: str = "",
    ) -> Turn:
        """Build the turn that follows ``offset`` rope positions.

        Args:
            inputs: what the processor returns for this turn alone, on any device: ``input_ids``
                of one row, optionally ``attention_mask`` (its zeros are dropped) and pixels.
            offset: rope position of the first token.
            device: where the features of pictures are put.
            cache: has the features of pictures that were read before under the same ``salt``.

        Raises:
            InputError: malformed inputs, or placeholders and features that do not match.
        """
        rows = [self._token_ids(inputs)]
        return self.turns(rows, inputs, [offset], device, cache=cache, salt=salt)[0]

    @torch.inference_mode()
    def turns(
        self,
        rows: Sequence[Tensor],
        inputs: Mapping[str, Any],
        offsets: Sequence[int],
        device: torch.device | str = "cpu",
        seen: Sequence[Tensor] = (),
        cache: VisionCache | None = None,
        salt: str = "",
        seen_again: Callable[[int], None] | None = None,
    ) -> list[Turn]:
        """Build a turn for each of several sequences; all their pictures are encoded together.

        Args:
            rows: int64 ``[T]``, the tokens of each turn, without padding.
            inputs: the pixels of all turns, in the order of their tokens.
            offsets: rope position of the first token of each turn.
            device: where the features of pictures are put.
            seen: the tokens before each turn. The pixels may cover their pictures, too: all of a
                sequence's, its older ones first. Only those of the turns are used.
            cache, salt: as of :meth:`turn`.
            seen_again: called with each modality whose pixels cover pictures of ``seen``.

        Raises:
            InputError: malformed inputs, or placeholders and features that do not match.
        """
        # The host counts tokens and patches.
        pixels = self.pixel_keys.values()
        inputs = {
            name: value.cpu() if isinstance(value, Tensor) and name not in pixels else value
            for name, value in inputs.items()
        }
        rows = [self._checked_ids(row) for row in rows]
        new = [self._modality(row) for row in rows]
        held = [self._modality(row.cpu()) for row in seen]
        older = torch.cat(held) if held else None

        def read(kind: int, encode: Callable[..., Features]) -> Features:
            if cache is None or not cache.limit:
                return encode(inputs, device)
            return cache.features(
                kind,
                self.pictures(kind, self._of_kind(kind, inputs)),
                salt,
                lambda new: self.encode(kind, new, device),
                "" if self.merger is None else repr(self.merger),
            )

        features = self._features(inputs, torch.cat(new), older, read, seen_again)
        whole = covers_seen(features, new, held)
        spans = [part for pair in zip(held, new, strict=True) for part in pair] if whole else new
        step = slice(1, None, 2) if whole else slice(None)
        own, visible = self.split(inputs, spans)[step], shared_out(features, spans)[step]
        made = []
        for row, modality, given, shown, offset in zip(
            rows, new, own, visible, offsets, strict=True
        ):
            made_of = in_token_order(shown, modality)
            positions = self.positions(row, modality, given)
            following = int(positions.max()) + 1 if row.numel() else 0
            made.append(
                Turn(
                    token_ids=row,
                    modality=modality,
                    positions=positions + offset,
                    visual=None if made_of is None else made_of.rows,
                    deepstack=() if made_of is None else made_of.deepstack,
                    next_position=offset + following,
                    whole_pictures=self.whole_pictures,
                    kept=None if made_of is None else made_of.kept,
                )
            )
        return made

    def split(self, inputs: Mapping[str, Any], spans: Sequence[Tensor]) -> list[Mapping[str, Any]]:
        """Return per span of tokens what :meth:`positions` reads of the inputs of all of them.

        Args:
            spans: uint8 ``[T]`` each, the modality of the tokens.
        """
        return [inputs] * len(spans)

    def positions(self, token_ids: Tensor, modality: Tensor, inputs: Mapping[str, Any]) -> Tensor:
        """Return the rope positions int64 ``[A, T]`` of this turn alone, counted from 0.

        One per token, of pictures too; families with M-RoPE have others.
        """
        return torch.arange(token_ids.numel())[None]

    def pictures(self, kind: int, inputs: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Return the inputs of each picture or video of a turn, whose features are kept apart.

        What is computed of one must not depend on the others. Here all of a turn are one.
        """
        return [inputs]

    def looks(self, inputs: Mapping[str, Any]) -> dict[int, list[bytes | None]]:
        """Hash each picture and video, or each of its tiles and frames, per modality.

        Raises:
            InputError: pixels that are no tensor.
        """
        made: dict[int, list[bytes | None]] = {}
        for kind, key in self.pixel_keys.items():
            if inputs.get(key) is None:
                continue
            parts: list[Mapping[str, Any]] = []
            for picture in self.pictures(kind, self._of_kind(kind, inputs)):
                pixels = as_tensor(picture[key], key)
                if pixels.dim() < 4:
                    parts.append(picture)
                else:  # tiles of zeros fill up a batch, with other pictures more or fewer of them
                    parts += [{key: tile} for tile in pixels.flatten(0, -4) if bool(tile.any())]
            made[kind] = [hash_of(kind, part) for part in parts]
        return made

    def _of_kind(self, kind: int, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the inputs without the pixels of the other kinds."""
        others = {key for other, key in self.pixel_keys.items() if other != kind}
        return {key: value for key, value in inputs.items() if key not in others}

    def encode(
        self, kind: int, pictures: Sequence[Mapping[str, Any]], device: torch.device | str
    ) -> list[Features]:
        """Return the features of each of some that :meth:`pictures` returned."""
        reader = self._reader(kind)
        return [reader(picture, device) for picture in pictures]

    def encode_together(
        self,
        kind: int,
        pictures: Sequence[Mapping[str, Any]],
        rows: Sequence[int],
        device: torch.device | str,
    ) -> list[Features]:
        """Do as :meth:`encode` in one call, of inputs that are tensors with a row for each.

        Args:
            rows: how many features each has, or in what proportion.
        """
        reader = self._reader(kind)
        made = reader(
            {key: torch.cat([one[key] for one in pictures]) for key in pictures[0]}, device
        )
        each = len(made.rows) // sum(rows)
        return made.split([count * each for count in rows])

    def image_features(self, inputs: Mapping[str, Any], device: torch.device | str) -> Features:
        """Return the features of all pictures of a turn, in order."""
        raise NotImplementedError

    def video_features(self, inputs: Mapping[str, Any], device: torch.device | str) -> Features:
        """Return the features of all videos of a turn, in order."""
        raise NotImplementedError

    def _token_ids(self, inputs: Mapping[str, Any]) -> Tensor:
        if inputs.get("input_ids") is None:
            raise InputError("the inputs have no input_ids; pass what the processor returns")
        token_ids = as_tensor(inputs["input_ids"], "input_ids")
        if token_ids.is_floating_point() or token_ids.dim() not in (1, 2):
            raise InputError(
                f"input_ids must be integers of shape [1, tokens], not {token_ids.dtype} "
                f"{list(token_ids.shape)}"
            )
        mask = inputs.get("attention_mask")
        if token_ids.dim() == 2:
            if token_ids.shape[0] != 1:
                raise InputError(
                    f"a turn is one row, not a batch of {token_ids.shape[0]}; open one session "
                    "for each row"
                )
            token_ids = token_ids[0]
        if mask is not None:
            mask = as_tensor(mask, "attention_mask").reshape(-1)
            if mask.numel() != token_ids.numel():
                raise InputError(
                    f"attention_mask covers {mask.numel()} tokens and input_ids has "
                    f"{token_ids.numel()}; pass the mask of this turn alone"
                )
            token_ids = token_ids[mask.bool()]
        return token_ids

    def _checked_ids(self, token_ids: Tensor) -> Tensor:
        """Return the ids as int64 on the CPU. Raises InputError for one out of range."""
        token_ids = token_ids.cpu().long()
        if token_ids.numel() and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < (
            self.vocab_size
        ):
            raise InputError(
                f"input_ids hold an id outside 0 .. {self.vocab_size - 1}; use the tokenizer "
                "of this checkpoint"
            )
        return token_ids

    def _modality(self, token_ids: Tensor) -> Tensor:
        """Return uint8 ``[T]``: 0 text, 1 image, 2 video."""
        modality = torch.zeros(token_ids.shape, dtype=torch.uint8)
        for kind, token in self.placeholder.items():
            modality[token_ids == token] = kind
        return modality

    def _features(
        self,
        inputs: Mapping[str, Any],
        modality: Tensor,
        held: Tensor | None,
        read: Callable[[int, Callable[..., Features]], Features],
        seen_again: Callable[[int], None] | None,
    ) -> dict[int, Features]:
        """Return the features per modality: as many as its placeholders, or ``held``'s as well."""
        for key in ("pixel_values", "pixel_values_videos"):
            if inputs.get(key) is not None and key not in self.placeholder_keys():
                raise InputError(
                    f"a {self.config.model_type} model takes no {key}; send text"
                    + (" or pictures" if self.has_vision else " only")
                )
        made: dict[int, Features] = {}
        for kind in self.placeholder:
            wanted, noun = int((modality == kind).sum()), _NOUNS[kind]
            older = 0 if held is None else int((held == kind).sum())
            if not self._holds_pixels(inputs, kind):
                if wanted:
                    raise InputError(
                        f"the prompt has {wanted} {noun} tokens but no {noun} came with it; pass "
                        f"{self.pixel_keys[kind]} as the processor returns it"
                    )
                continue
            if not wanted and not older:
                raise InputError(
                    f"{self.pixel_keys[kind]} came without {noun} tokens in the prompt; name the "
                    f"{noun} in the message and let the processor expand it"
                )
            # Where all of them have been seen, they are not encoded again.
            features = read(kind, self._reader(kind)) if wanted else Features(torch.empty(older, 0))
            count = features.rows.shape[0]
            if count not in (wanted, wanted + older):
                raise InputError(
                    f"the prompt has {wanted} {noun} tokens and its {noun}s give "
                    f"{count} features; pass the processor's output unchanged"
                )
            if seen_again is not None and count > wanted:
                seen_again(kind)
            made[kind] = features
        return made

    def _holds_pixels(self, inputs: Mapping[str, Any], kind: int) -> bool:
        """Whether pixels came; processors of some versions say so by an empty tensor."""
        pixels, key = inputs.get(self.pixel_keys[kind]), self.pixel_keys[kind]
        return pixels is not None and as_tensor(pixels, key).numel() > 0

    def _reader(self, kind: int) -> Callable[..., Features]:
        return self.image_features if kind == IMAGE else self.video_features

    def placeholder_keys(self) -> tuple[str, ...]:
        """Return the pixel inputs this family reads."""
        return tuple(self.pixel_keys.values()) if self.has_vision else ()


def required(inputs: Mapping[str, Any], key: str) -> Tensor:
    """Return ``inputs[key]`` as a tensor.

    Raises:
        InputError: when the processor output lacks it.
    """
    if inputs.get(key) is None:
        raise InputError(f"the inputs have no {key}; pass everything the processor returns")
    return as_tensor(inputs[key], key)


def floats(inputs: Mapping[str, Any], key: str) -> Tensor:
    """Return pixels as a tensor of real numbers; whole ones are converted.

    Raises:
        InputError: when the processor output lacks them, or they are no finite numbers.
    """
    pixels = required(inputs, key)
    if pixels.is_complex():
        raise InputError(f"{key} holds complex numbers; pass the processor's output unchanged")
    pixels = pixels if pixels.is_floating_point() else pixels.float()
    if not bool(pixels.isfinite().all()):
        raise InputError(f"{key} holds a number that is not finite; prepare the picture again")
    return pixels


def picture_sizes(inputs: Mapping[str, Any], pictures: int) -> Tensor:
    """Return ``image_sizes`` int64 ``[pictures, 2]`` on the CPU.

    Raises:
        InputError: for another shape, or a size below 1.
    """
    sizes = required(inputs, "image_sizes").cpu()
    if sizes.shape != (pictures, 2) or not _counts(sizes, 1):
        raise InputError(
            f"image_sizes has shape {list(sizes.shape)}, not height and width of each of "
            f"{pictures} pictures; pass the processor's output unchanged"
        )
    return sizes


def picture_counts(inputs: Mapping[str, Any], pictures: int) -> Tensor | None:
    """Return ``batch_num_images`` int64 ``[prompts]``, of ``pictures`` or more; None without it.

    A prompt may have more pictures than came with this turn.

    Raises:
        InputError: for another shape, or a smaller sum.
    """
    if inputs.get("batch_num_images") is None:
        return None
    counts = required(inputs, "batch_num_images").cpu()
    if counts.dim() != 1 or not _counts(counts, 0) or int(counts.sum()) < pictures:
        raise InputError(
            f"batch_num_images are not the pictures of each prompt, {pictures} or more; pass the "
            "processor's output unchanged"
        )
    return counts


def _counts(values: Tensor, least: int) -> bool:
    whole = not (values.is_floating_point() or values.is_complex() or values.dtype == torch.bool)
    return whole and bool((values >= least).all())


def end_tokens(*configs: Any) -> tuple[int, ...]:
    """Return the ids that end a reply: ``eos_token_id`` of the first that has one.

    Args:
        configs: objects or dicts; that of generation first, which knows turn ends that the others
            do not.
    """
    for config in configs:
        fields = config if isinstance(config, dict) else {}
        ids = fields.get("eos_token_id", getattr(config, "eos_token_id", None))
        if ids is None:
            continue
        found = tuple(ids) if isinstance(ids, (list, tuple)) else (ids,)
        if not all(isinstance(each, int) and not isinstance(each, bool) for each in found):
            raise ModelError(
                f"eos_token_id is {ascii(ids)[:60]}, not token ids; check generation_config.json "
                "and config.json"
            )
        return found
    return ()


class DeferredModel:
    """A transformers model that is built when it is first asked for.

    Attributes:
        config: of the whole model.
        eos_token_ids: tokens that end a reply.
        vocab_size: rows of the embedding.
        note: a line on packed weights that were written or could not be when it was built.
    """

    def __init__(
        self,
        config: Any,
        eos_token_ids: tuple[int, ...],
        vocab_size: int,
        build: Callable[[], tuple[Any, str | None]],
    ) -> None:
        self.config, self.eos_token_ids, self.vocab_size = config, eos_token_ids, vocab_size
        self._build, self._built = build, None
        self.note: str | None = None
        self._lock = threading.Lock()

    @property
    def built(self) -> bool:
        """Return whether it has been built."""
        return self._built is not None

    def get(self) -> Any:
        """Return the model. Raises ModelError; a later call then tries again."""
        with self._lock:
            if self._built is None:
                # Its weights are ordinary ones, also when the first picture comes while decoding.
                with torch.inference_mode(False):
                    self._built, self.note = self._build()
            return self._built
