"""Every option of an engine, once: its type, default, bounds and one line of help.

The Python interface, ``mmkv chat``, ``mmkv mmdu``, ``mmkv bench`` and lmms-eval's adapter all build
an :class:`EngineConfig`. Nothing here imports torch: a command line can answer ``--help`` with it.
"""

from __future__ import annotations

import difflib
import functools
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmkv.engine.budget import RISK, Budget, parse_bytes
from mmkv.engine.errors import (
    DEFAULT_LOOKAHEAD,
    InputError,
    ModelError,
    PolicyError,
    check_lookahead,
    require_type,
    require_whole,
)
from mmkv.engine.model.gguf.config import gguf_folder, is_gguf
from mmkv.engine.model.gguf.file import SUFFIX
from mmkv.engine.model.source import at_hand
from mmkv.engine.options import Option, declared, option

if TYPE_CHECKING:
    import torch

    from mmkv.engine.policies import Policy


# Positions are int32. No sensible page has more than a few hundred entries, and each row of the
# cache holds a page at least.
_MOST_POSITIONS, _MOST_PAGE = 2**31 - 1, 1024
DEFAULT_POLICY = "dbtrimkv"  # where there are retention gates and nobody named one
DEFAULT_BUDGET = 256  # entries per layer and KV head, where a policy evicts and nobody named one
# How matrices lie on a CPU; engine/model/product.py says what each means.
WEIGHT_FORMS = ("auto", "bf16", "int8", "int4")
# How keys and values lie in the cache; engine/cache/forms.py says what each means.
KV_FORMS = ("auto", "bf16", "int8", "k8v4", "int4")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What an engine is loaded with.

    Attributes:
        model: a transformers checkpoint folder, the id of one on the hub, or a GGUF file.
        mmproj: the file of a GGUF model's vision tower and projector.
        adapter: a LoRA adapter of PEFT, a folder or the id of one that was pulled from the hub:
            merged into the weights while they are read.
        policy: the name of a policy with parameters (``mmkv policies`` lists them), or a
            :class:`Policy`. None takes ``dbtrimkv`` when there are gates (``wgkv`` for write
            gates). Without gates it takes ``full``, and where a budget is given, ``rkv`` for a
            model that reads pictures and ``streamingllm`` for one that reads text.
        budget: M, the mean entries kept per (layer, KV head); a :class:`Budget`; or text such as
            ``"25%"`` and ``"64MiB"``. Sessions may have budgets of their own. None: 256 entries,
            and no bound where neither gates nor a policy are there.
        risk, budget_max: the budget grows up to ``budget_max`` (as ``budget``, but no share) while
            a sequence would forget more than this share of the attention weight that its gates
            predict, and shrinks again, down to ``budget`` (None: an eighth of ``budget_max``),
            where it forgets less than half of that (:class:`mmkv.engine.budget.Dial`).
        lookahead: steps n = T - t over which dbtrimkv sums retention (DBTrimKV, arXiv 2605.09649,
            equation 9): a whole number of at least 1, or inf. Other presets do not read it.
        evict_every: decode steps between evictions, exactly. None: the policy's own interval
            (:attr:`Policy.interval`), 1 for most.
        prefill_chunk: prompt tokens per prefill chunk; at least those of a picture for models that
            see one at once (Gemma 3).
        page_size: entries per page of the cache; 8 to 64 are sensible.
        gates: a gate folder, file or hub id; ``"random"`` for tests and speed runs. None takes the
            checkpoint's own ``gates/`` folder if it has one.
        device: ``auto`` (a GPU where there is one), ``cpu``, ``cuda``, ``cuda:1`` ...
        dtype: of weights and cache: ``auto``, ``float32``, ``bfloat16`` or ``float16``.
        weights: how the matrices of decoder and vision tower are held: ``auto`` (in the dtype, on a
            CPU in bfloat16 where that changes no number), ``bf16`` (rounded to bfloat16), ``int8``
            or ``int4`` (rounded in blocks of 32); all but ``auto`` round the states that they are
            multiplied by, too. Under ``int4`` towers are held in 8 bits.
        kv: how keys and values lie in the cache: ``auto`` (in the dtype), ``bf16``, or rounded
            entry by entry: ``int8``; ``k8v4``, keys in 8 bits and values in 4; ``int4``. None:
            ``auto``, or under a budget in bytes the form that answered best at that size
            (:mod:`mmkv.engine.cache.choice`).
        kv_limit: most bytes that the page pool may take, together with the features of pictures;
            None: no limit but the memory.
        vision_cache: bytes, or text such as ``"256MiB"``, that features of pictures and videos may
            take, so that the same ones are encoded once; at most an eighth of ``kv_limit``; 0:
            none. In 256 MiB are 8 pictures of 1024 x 1024 pixels for a Qwen3-VL of 2B.
        endless: whether a session that evicts goes on beyond the context that the model was trained
            for, its rope positions drawn together (:mod:`mmkv.engine.compaction`); otherwise, or
            under a budget that is a share of the tokens, it ends there.
        lossless: whether sessions keep every entry, and what the policy would keep under the budget
            drafts their tokens, which all of the cache then checks (:mod:`mmkv.engine.drafts`).
        threads: of the whole process on a CPU (``torch.set_num_threads``); None: as torch has it,
            one for each core unless OMP_NUM_THREADS says otherwise.

    Raises:
        ModelError, PolicyError, BudgetError: for a value that cannot be.
        TypeError: for a value of another type.
    """

    model: str | Path | None = option(
        "Model folder, hub id or GGUF file. Default: the bundled model.", kind=str | None
    )
    mmproj: str | Path | None = option(
        "File of a GGUF model's vision tower (mmproj).", kind=str | None
    )
    adapter: str | Path | None = option(
        "LoRA adapter (PEFT folder, or hub id) to merge into the weights.", kind=str | None
    )
    policy: str | Policy | None = option(
        "What to keep, NAME or NAME:key=value,...; mmkv policies lists all. Default: "
        f"{DEFAULT_POLICY} with gates; without: rkv (pictures) or streamingllm (text) under a "
        "budget, else full.",
        kind=str | None,
    )
    budget: Budget | float | str | None = option(
        "Entries per row (256), a share (25%) or bytes (64MiB).", kind=str | None
    )
    risk: float | None = option(
        f"Grow the budget while the risk would be above this (0.02): {RISK}."
    )
    budget_max: Budget | float | str | None = option(
        "Largest budget that --risk may use: 64MiB, or entries per row.", kind=str | None
    )
    lookahead: float = option("Steps that scores look ahead, or inf.", DEFAULT_LOOKAHEAD)
    evict_every: int | None = option(
        "Decode steps between evictions. Default: the policy's.", least=1, most=sys.maxsize
    )
    prefill_chunk: int = option(
        "Prompt tokens per prefill chunk.", 2048, least=1, most=_MOST_POSITIONS
    )
    page_size: int = option("Entries per cache page.", 16, least=1, most=_MOST_PAGE)
    gates: str | Path | None = option(
        "Gates: path, hub id, short name; fit: made now, kept; random: for speed runs.",
        kind=str | None,
    )
    device: str = option("auto, cpu, cuda, cuda:1, ...", "auto")
    dtype: str | torch.dtype = option("auto, float32, bfloat16 or float16.", "auto", kind=str)
    weights: str = option(
        "Weights: auto (exact), bf16, int8, int4 (rounded, faster).", "auto", choices=WEIGHT_FORMS
    )
    kv: str | None = option(
        "Cached keys and values: auto (dtype), bf16, int8, k8v4 or int4. Default: auto; for a"
        " budget in bytes the best form at that size.",
        choices=KV_FORMS,
    )
    kv_limit: int | None = option("Most bytes that the cache may take.", least=0, most=2**62)
    vision_cache: int | str = option(
        "Memory for features of pictures, so that each is encoded only once; 0: none.",
        "256MiB",
        kind=str,
    )
    endless: bool = option(
        "Go on beyond the trained context: close the gaps that evicted tokens left.",
        True,
        flags=("--endless/--no-endless",),
    )
    lossless: bool = option(
        "Keep all entries: those under the budget draft tokens, all of them check each.",
        False,
        flags=("--lossless/--no-lossless",),
    )
    threads: int | None = option(
        "Threads on a CPU (default: its cores); use 1 if others share it.", least=1, most=1024
    )

    def __post_init__(self) -> None:
        made = Budget.dialled(self.budget, self.risk, self.budget_max)
        if self.risk is not None:
            object.__setattr__(self, "budget", made)
        check_lookahead(self.lookahead)
        for name in ("model", "mmproj", "adapter", "gates"):
            if (given := getattr(self, name)) is not None:
                require_type(name, given, (str, Path), "text or a pathlib.Path")
        if self.mmproj is not None and not str(self.model).lower().endswith(SUFFIX):
            raise ModelError(
                "mmproj is the vision tower of a GGUF file; name the language model's file as the "
                "model, too"
            )
        for name in ("device", "dtype"):
            given = getattr(self, name)
            if type(given).__module__ != "torch":  # torch.device, torch.dtype
                require_type(name, given, str, f"text or a torch.{name}")
        for name, setting in options().items():
            value = getattr(self, name)
            if value is None and setting.default is None:
                continue
            _require_bounds(name, value, setting)
        for name in ("endless", "lossless"):
            require_type(name, getattr(self, name), bool, "True or False")
        if not isinstance(self.vision_cache, str):
            require_whole("vision_cache", self.vision_cache)
        if self.vision_cache_bytes < 0:
            raise PolicyError(f"vision_cache is {self.vision_cache}; give 0 or more bytes")

    @property
    def vision_cache_bytes(self) -> int:
        """Return the most bytes of the features of pictures. Raises BudgetError."""
        given = self.vision_cache
        return parse_bytes(given) if isinstance(given, str) else given

    def checkpoint(self) -> str:
        """Return the model's name as text; of a GGUF file, that of a folder that stands for it.

        Raises:
            ModelError: none is named, or the GGUF file cannot be read.
        """
        if self.model is None:
            raise ModelError("no model is named; give a checkpoint folder or a hub id")
        if is_gguf(self.model):
            return gguf_folder(self.model, self.mmproj)
        return at_hand(str(self.model))


def _require_bounds(name: str, value: Any, setting: Option) -> None:
    if setting.choices:
        require_type(name, value, str, "text")
        if value not in setting.choices:
            error = ModelError if name == "weights" else PolicyError
            named = f"{', '.join(setting.choices[:-1])} or {setting.choices[-1]}"
            raise error(f"{name} is {value!r}; give {named}")
    if setting.least is not None and setting.most is not None:
        require_whole(name, value)
        if not setting.least <= value <= setting.most:
            least = f"at least {setting.least}"
            bound = least if value < setting.least else f"at most {setting.most:,}"
            raise PolicyError(f"{name} is {value}; give a whole number of {bound}")


@functools.cache
def options() -> dict[str, Option]:
    """Return the options of :class:`EngineConfig` by name, in their order."""
    return declared(EngineConfig)


def require_options(given: Iterable[str], caller: str, also: Iterable[str] = ()) -> None:
    """Check that ``caller`` knows every option named in ``given``.

    Args:
        also: options that only ``caller`` takes.

    Raises:
        InputError: for the first unknown name; the message suggests the nearest known one.
    """
    known = [*options(), *also]
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            remedy = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(known)}"
            raise InputError(f"{caller} has no option {name!r}; {remedy}")
