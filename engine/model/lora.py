"""Merge a LoRA adapter (a folder of PEFT) into a checkpoint's weights while they are read.

A matrix becomes ``W + scale B A``, summed in float32 and rounded once to the dtype of ``W``, which
is what peft's ``merge_and_unload`` gives. It is made by itself, some rows at a time.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmkv.engine.errors import ModelError
from mmkv.engine.model.stored import ChangedTensors, PickledTensors, StoredTensors, text_place

_AT_ONCE = 2**20  # numbers that are made together
_KEY = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+?)\."
    r"(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B|base_layer|modules_to_save|)"
    r"(?:\.default)?\.?(?P<kind>weight|bias|)"
)
# What a config may say that changes what an adapter computes, and is not done here; else it is
# none of these values.
_OFF: tuple[Any, ...] = (None, False, {}, [], "none")
_NOT_DONE = {
    "alora_invocation_tokens": "activated LoRA",
    "arrow_config": "Arrow",
    "kasa_config": "KaSA",
    "layer_replication": "repeated layers",
    "lora_bias": "biases of its own (lora_bias)",
    "megatron_config": "Megatron's layers",
    "monteclora_config": "MonteCLoRA",
    "target_parameters": "target_parameters",
    "trainable_token_indices": "trained tokens (trainable_token_indices)",
    "use_bdlora": "block-diagonal LoRA",
    "use_dora": "DoRA",
    "use_qalora": "QA-LoRA",
    "velora_config": "VeLoRA",
}
# Expressions that can take a time that grows with a high power of a name's length.
_SLOW = re.compile(r"\)[*+{]|(?:[*+{].*){4}", re.DOTALL)
# Of init_lora_weights: these take away from the base what the adapter begins with.
_CHANGES_THE_BASE = ("pissa", "olora", "corda", "lora_ga", "loftq")


@dataclass
class _Delta:
    """What is added to a matrix: names of both factors, and what their product is multiplied by."""

    down: str = ""
    up: str = ""
    turned: bool = False
    scale: float = 1.0


class AdaptedTensors(ChangedTensors):
    """Shows a checkpoint's tensors as an adapter changes them.

    Args:
        below: the checkpoint. config, weights: the adapter's files.
        places: where the files may hold the text model, as :attr:`Family.text_places`.

    Raises:
        ModelError: an adapter that is not LoRA, changes what the model does not have, is
            incomplete, or computes more than is merged here.
    """

    def __init__(
        self,
        below: StoredTensors,
        config: Path,
        weights: Path,
        places: Sequence[tuple[str, str]],
    ) -> None:
        super().__init__(below, (weights,))
        self._name = config.parent.name
        said = _settings(config)
        self._require_mergeable(said)
        self.settings += json.dumps(said, sort_keys=True)
        pickled = weights.suffix != ".safetensors"
        self._own = PickledTensors([weights]) if pickled else StoredTensors([weights])
        self._places, self._at = places, text_place(below, places)
        self._deltas: dict[str, _Delta] = {}
        self._replaced: dict[str, str] = {}
        self._bases: dict[str, str] = {}
        for key in sorted(self._own.names):
            self._look_at(key)
        self._keep_the_head(bool(said.get("ensure_weight_tying")))
        for name, delta in self._deltas.items():
            self._check(name, delta, said)
        if not self._deltas and not self._replaced:
            raise self._wrong(f"changes nothing: {weights.name} holds no factors", "get it again")

    def made(self, name: str) -> Tensor:
        """See :class:`ChangedTensors`."""
        base = self._base(name)
        if (delta := self._deltas.get(name)) is None:
            return base
        down, up = (self._own.tensor(part).float() for part in (delta.down, delta.up))
        if not math.isfinite(delta.scale * float(down.sum() + up.sum())):
            raise self._wrong(f"holds NaN or infinity in its factors for {name}", "get it again")
        made = torch.empty(base.shape, dtype=base.dtype)
        rows, columns = base.shape
        each = max(1, _AT_ONCE // columns)
        for first in range(0, rows, each):
            part = slice(first, min(first + each, rows))
            if delta.turned:  # peft rounds what it adds to an embedding first
                more = ((up @ down[:, part]).T * delta.scale).to(base.dtype).float()
            else:
                more = up[part] @ down * delta.scale
            made[part] = base[part].float() + more
        return made

    def _base(self, name: str) -> Tensor:
        """Return what the deltas are added to, in the dtype of the checkpoint's own."""
        if (own := self._replaced.get(name)) is not None:
            dtype = self.below.tensor(name)[:0].dtype if name in self.below.names else None
            return self._own.tensor(own).to(dtype or torch.bfloat16)
        return self.below.tensor(self._bases.get(name, name))

    def _require_mergeable(self, said: Mapping[str, Any]) -> None:
        kind = str(said.get("peft_type", "LORA")).upper()
        if kind != "LORA":
            raise self._wrong(f"is of the type {kind[:40]!a}", "mmkv merges LoRA alone")
        odd = [what for name, what in _NOT_DONE.items() if said.get(name) not in _OFF]
        start = str(said.get("init_lora_weights")).lower()
        if start.startswith(_CHANGES_THE_BASE):
            odd.append(f"init_lora_weights {start[:20]!a}, which changes the base")
        if odd:
            raise self._wrong(
                f"has {odd[0]}, which mmkv does not merge",
                "merge it by peft (merge_and_unload, then save_pretrained), and name that folder",
            )

    def _wrong(self, what: str, remedy: str) -> ModelError:
        return ModelError(f"the adapter {self._name} {what}; {remedy}")

    def _look_at(self, key: str) -> None:
        """Note what a tensor of the adapter does."""
        found = _KEY.fullmatch(key)
        part, kind = (found["part"], found["kind"]) if found else ("", "")
        name = self._named(found["module"], kind or "weight") if found else None
        if not self._own.kind(key).startswith(("F", "BF")):
            raise self._wrong(f"has {key[:120]} in {self._own.kind(key)}", "get it again")
        factor = part.startswith("lora_")
        if name is None or (kind == "bias" and factor) or not (kind or "embedding" in part):
            raise self._wrong(
                f"has {key[:120]}, which this model has no place for",
                "take the base that it was trained for, or another adapter",
            )
        if factor:
            self._take_factor(name, key, part)
        else:
            self._replace(name, key)

    def _replace(self, name: str, key: str) -> None:
        """Note that a tensor of the adapter takes the place of the model's."""
        self._replaced[name] = key
        there = name if name in self.below.names else self._embedding()
        if self._own.shape(key) != self.below.shape(there):
            raise self._wrong(
                f"has {key[:120]} of the shape {list(self._own.shape(key))} for "
                f"{list(self.below.shape(there))} in the model",
                "take the base that it was trained for",
            )
        self._show(name, there)

    def _take_factor(self, name: str, key: str, part: str) -> None:
        """Note one of the two factors of what is added to a matrix."""
        delta = self._deltas.setdefault(name, _Delta(turned="embedding" in part))
        side = "down" if part.endswith("A") else "up"
        if getattr(delta, side):
            raise self._wrong(f"has two of {key[:120]}", "get it again")
        setattr(delta, side, key)
        self._show(name, name if name in self.below.names else self._embedding())

    def _show(self, name: str, like: str) -> None:
        self.changed[name] = self.below.shape(like), self.below.kind(like)

    def _embedding(self) -> str:
        assert self._at is not None
        return f"{self._at[0]}embed_tokens.weight"

    def _named(self, module: str, kind: str) -> str | None:
        """Return the stored name of a module's tensor; transformers may have renamed it since."""
        name, names = f"{module}.{kind}", self.below.names
        return next((each for each in self._candidates(name) if each in names), self._tied(name))

    def _candidates(self, name: str) -> Iterator[str]:
        if self._at is not None:
            prefix, head = self._at
            for other, its_head in self._places:
                if name == its_head:
                    yield head
                if name.startswith(other):
                    yield prefix + name.removeprefix(other)
        yield from (name, name.removeprefix("model."), f"model.{name}")

    def _tied(self, name: str) -> str | None:
        """Return the name of a head that is not stored, for it is the embedding."""
        heads = {head for _, head in self._places}
        return self._at[1] if name in heads and self._at is not None else None

    def _keep_the_head(self, tied: bool) -> None:
        """Leave a head that is the embedding as it was where that alone was trained, as peft does.

        Raises:
            ModelError: factors of one of both, which peft merges into both.
        """
        if self._at is None:
            return
        embedding, head = self._embedding(), self._at[1]
        if head in self.below.names:
            return
        if {embedding, head} & self._deltas.keys():
            raise self._wrong(
                "changes the embedding or the head of a model where both are one matrix",
                "merge it by peft, and look at what you get",
            )
        if embedding in self._replaced and head not in self._replaced and not tied:
            self._bases[head] = embedding
            self._show(head, embedding)

    def _check(self, name: str, delta: _Delta, said: Mapping[str, Any]) -> None:
        """Raise ModelError unless both factors fit the matrix, and set their scale."""
        if not (delta.up and delta.down):
            raise self._wrong(f"has one factor of two for {name}", "get it again")
        rank, own = self._own.shape(delta.down)[0], self._own.shape
        shape = self.changed[name][0]
        (rows, columns) = shape[::-1] if delta.turned and len(shape) == 2 else (*shape, 0, 0)[:2]
        key = _KEY.fullmatch(delta.down)
        module = key["module"] if key else ""
        said_rank = self._of_module(module, said.get("rank_pattern"), said.get("r", 8))
        alpha = self._of_module(module, said.get("alpha_pattern"), said.get("lora_alpha", 8))
        fits = (own(delta.down), own(delta.up)) == ((rank, columns), (rows, rank))
        if not fits or len(shape) != 2 or rank != said_rank:
            raise self._wrong(
                f"has factors {list(own(delta.up))} x {list(own(delta.down))} and r = {said_rank} "
                f"for {name}, which is {list(shape)}",
                "take the base that it was trained for",
            )
        delta.scale = alpha / (rank**0.5 if said.get("use_rslora") else rank)

    def _of_module(self, module: str, patterns: Mapping[str, Any] | None, whole: Any) -> Any:
        """Return what the first pattern that fits says of a module; without one, ``whole``."""
        patterns = patterns or {}
        for pattern in patterns:
            if len(pattern) > 300 or _SLOW.search(pattern):
                raise self._wrong(
                    f"has the pattern {pattern[:60]!a}, which may take forever to compare",
                    "write the names of its modules there",
                )
        found = (v for k, v in patterns.items() if re.match(rf"(.*\.)?({k})$", module))
        return next(found, whole)


def _settings(config: Path) -> dict[str, Any]:
    try:
        said = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{config} cannot be read; get the adapter again") from error
    if not isinstance(said, dict):
        raise ModelError(f"{config} holds no settings; get the adapter again")
    return said
