"""The settings of a distillation run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.errors import InputError
from training.capacity import LEAST_RATES
from training.model import Objective
from training.recipes import DEFAULT, recipe_options
from training.trainable import GATES

_LOSSES = {
    "kl+ntp": (1.0, 1.0, False),
    "kl": (1.0, 0.0, False),
    "ntp": (0.0, 1.0, False),
    "reverse-kl": (1.0, 0.0, True),
    "reverse-kl+ntp": (1.0, 1.0, True),
}
_CHOICES = {
    "gating": ("log-bias", "logit-scale"),
    "scope": ("global", "head"),
    "gate": GATES,
    "tying": ("paper", "layer", "none"),
    "gate_input": ("x", "kv"),
    "store": ("float32", "float16"),
    "normaliser": ("relative", "tt"),
    "schedule": ("cosine", "linear"),
    "loss": tuple(_LOSSES),
}
_ABOVE_ZERO = (
    "budget",
    "steps",
    "batch",
    "accumulate",
    "d_gate",
    "lr",
    "clip",
    "log_every",
    "save_every",
)
_NOT_BELOW_ZERO = (
    "lambda_cap",
    "weight_decay",
    "capacity_rates",
    "eval_every",
    "held_out_budget",
    "seed",
)


@dataclass(frozen=True)
class Settings:
    """The options of a run; :meth:`of` starts from a recipe.

    The defaults are this project's own, the recipe ``mmkv``: method and numbers of DBTrimKV
    (arXiv 2605.09649; the recipe ``dbtrimkv``) but for M = 256 where it has 64, one pass a step
    for 4, and a warm-up over 3 % of the steps for none.

    Attributes:
        recipe: where the run started from, one of :data:`training.recipes.RECIPES`; what it
            asked may have been overridden since.
        gate: ``tied`` or ``rg``, see :class:`training.trainable.TrainableGates`.
        budget: M, mean entries per (layer, KV head), that the capacity term aims at.
        lambda_cap: weight of the capacity term.
        gate_input: ``x`` or ``kv``, see :class:`training.trainable.TrainableGates`.
        batch, accumulate: documents per process and forward pass; passes per step.
        schedule: of the learning rate, from its peak to 0: ``cosine`` or ``linear``.
        warmup: share of the steps.
        capacity_rates: 0 counts exactly; K groups log_beta into K decay rates.
        store: dtype of the trunks in the gate file; training itself is in float32.
        held_out_budget: M of the held-out runs, ``budget`` when 0.
    """

    model: str
    output: str
    recipe: str = DEFAULT
    gating: str = "log-bias"
    scope: str = "global"
    budget: float = 256.0
    lambda_cap: float = 1.0
    normaliser: str = "relative"
    loss: str = "kl+ntp"
    gate: str = "tied"
    d_gate: int = 512
    tying: str = "paper"
    gate_input: str = "x"
    bias: float = 18.0
    capacity_rates: int = 0
    steps: int = 1000
    batch: int = 1
    accumulate: int = 1
    lr: float = 2e-4
    schedule: str = "cosine"
    warmup: float = 0.03
    weight_decay: float = 1e-6
    clip: float = 1.0
    checkpointing: bool = False
    seed: int = 0
    dtype: str = "auto"
    device: str = "auto"
    log_every: int = 10
    save_every: int = 200
    eval_every: int = 200
    held_out_budget: float = 0.0
    store: str = "float32"
    resume: bool = False

    @classmethod
    def of(cls, name: str, **given: Any) -> Settings:
        """Return the settings of a recipe, with the ``given`` ones in place of its own.

        Raises:
            InputError: for an unknown recipe, and for settings that do not hold.
        """
        return cls(**{**recipe_options(name), **given, "recipe": name})

    def __post_init__(self) -> None:
        recipe_options(self.recipe)
        for name, allowed in _CHOICES.items():
            if (given := getattr(self, name)) not in allowed:
                option = name.replace("_", "-")
                raise InputError(f"--{option} is {given!r}; choose one of {', '.join(allowed)}")
        for name in _ABOVE_ZERO:
            self._require(name, getattr(self, name) > 0, "more than 0")
        for name in _NOT_BELOW_ZERO:
            self._require(name, getattr(self, name) >= 0, "0 or more")
        self._require("warmup", 0 <= self.warmup <= 1, "a share of the steps, 0 to 1")
        few = 0 < self.capacity_rates < LEAST_RATES
        self._require("capacity_rates", not few, f"0 for the exact count, or {LEAST_RATES} or more")
        if self.gate == "rg" and self.tying != "none":
            raise InputError(
                f"--gate rg has one readout per layer and head, --tying is {self.tying}; give "
                "--tying none, or --gate tied"
            )
        if self.capacity_rates and self.scope == "head":
            raise InputError(
                "--capacity-rates approximates the sum over all heads; leave it out with --scope "
                "head, which counts every head alone"
            )

    def _require(self, name: str, holds: bool, wanted: str) -> None:
        if not holds:  # NaN fails, too
            option = name.replace("_", "-")
            raise InputError(f"--{option} is {getattr(self, name)}; give {wanted}")

    def objective(self) -> Objective:
        """Return the loss these settings describe."""
        kl, ntp, reverse = _LOSSES[self.loss]
        return Objective(
            kl,
            ntp,
            reverse,
            self.lambda_cap,
            self.budget,
            self.scope,
            self.normaliser,
            self.gating,
            self.capacity_rates,
        )

    @property
    def policy(self) -> str:
        """Return the preset whose rule these gates are trained for."""
        return "dbtrimkv" if self.scope == "global" else "trimkv"
