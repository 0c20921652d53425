"""The settings of a distillation run, and recipes: numbers of the papers and those that no paper
gives.

What both retention papers leave to Hugging Face's Trainer is its default: 3 epochs, no warm-up,
gradient norm 1. Their 4 passes a step are those of each of 4 GPUs: one process gets the same steps
with ``--accumulate 16``.

``trimkv``: TRIM-KV (arXiv 2512.03324). Eq. 3 (logits scaled by beta^(t-i)), eq. 4 (forward KL and
next-token loss), eq. 5 (capacity of each head, 1/(T(T-M))); section 5.1 (lambda 1, M = 512, gate
d -> 512 -> H per layer, bias 8); appendix B.1 (learning rate 2e-4, weight decay 0.01, one sequence
a pass, 4 passes a step, sequences of up to 16,384 tokens on 4 GPUs, the Trainer's linear schedule).
Its gates for long contexts had 10,000 steps of one sequence (B.2).

``dbtrimkv``: DBTrimKV (arXiv 2605.09649). Section 2.2 (weights times beta^(t-i): the logit gets
(t-i) log beta), eq. 3 (forward KL and next-token loss); section 4 (one readout for all layers and
heads), section 4.1 (capacity over all heads); section 5.1 (lambda 1, M = 64, hidden 512, bias 18);
appendix B.1 (learning rate 2e-4, weight decay 1e-6, cosine schedule, one sequence a pass, 4 passes
a step, sequences of up to 32,768 tokens on 4 GPUs). The paper writes the capacity loss as a plain
sum over t, and TRIM-KV's without its factor, too; ``relative`` is what the authors' released
training code divides by. Section 4.1 shares one readout among all layers and heads, and does not
say how the one MLP of a layer (5.1) serves its heads. The gates that the authors published do:
``rg10``, in which every head reads the whole MLP by a row of its own, shared by all layers. The
recipe trains these; ``tied`` (recipe ``mmkv``) is the formula to the letter, a block of the MLP
for each head.

``wgkv``: write gates, WG-KV (arXiv 2512.17452). Section 3.3 (L2 of the last hidden states, and
lambda times the mean of g + g (1 - g)); appendix C (AdamW, weight decay 0.01, cosine schedule with
a warm-up over 10 % of the steps, peak 0.001, one sequence a step, 7,500 steps of 4k to 32k tokens);
section 5.2 (threshold 0.1); W_local = 256 and lambda 0.04 are the defaults of the authors' released
code, and so are a width of 4 x head_dim for Llama (512; 1.5 x for Qwen3) and gradients that are not
clipped.

Means are over a whole step, as the Trainer takes them since transformers 4.46: the predicted tokens
of all passes count alike.

Not in the recipes: the data and its ``--max-length``; the papers' tables have both
(``eval/papers/tables.yaml``). No paper says how the gates' weights start; here they start as
``torch.nn.Linear`` does, those of ``rg10`` as in the released code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from mmkv.engine.errors import InputError
from mmkv.training.capacity import LEAST_RATES
from mmkv.training.model import Objective, WriteObjective
from mmkv.training.student import GATES

DEFAULT = "mmkv"
_TRAINER = {"epochs": 3.0, "warmup": 0.0, "clip": 1.0}
RECIPES: Mapping[str, Mapping[str, object]] = {
    # Ours: what the fields of Settings say.
    DEFAULT: {},
    "dbtrimkv": {
        "gating": "log-bias",
        "scope": "global",
        "budget": 64.0,
        "lambda_cap": 1.0,
        "normaliser": "relative",
        "loss": "kl+ntp",
        "gate": "rg10",
        "d_gate": 512,
        "tying": "paper",
        "gate_input": "x",
        "bias": 18.0,
        "batch": 1,
        "accumulate": 4,
        "lr": 2e-4,
        "schedule": "cosine",
        "weight_decay": 1e-6,
        **_TRAINER,
    },
    "trimkv": {
        "gating": "logit-scale",
        "scope": "head",
        "budget": 512.0,
        "lambda_cap": 1.0,
        "normaliser": "tt",
        "loss": "kl+ntp",
        "gate": "rg",
        "d_gate": 512,
        "tying": "none",
        "gate_input": "x",
        "bias": 8.0,
        "batch": 1,
        "accumulate": 4,
        "lr": 2e-4,
        "schedule": "linear",
        "weight_decay": 0.01,
        **_TRAINER,
    },
    "wgkv": {
        "method": "wgkv",
        "window": 256,
        "lambda_sparse": 0.04,
        "threshold": 0.1,
        "d_gate": 512,
        "steps": 7500,
        "batch": 1,
        "accumulate": 1,
        "lr": 1e-3,
        "schedule": "cosine",
        "warmup": 0.1,
        "weight_decay": 0.01,
        "clip": 0.0,
    },
}


def recipe_options(name: str) -> Mapping[str, object]:
    """Return the options that a recipe sets.

    Raises:
        InputError: for an unknown name; the known ones are listed.
    """
    if name not in RECIPES:
        raise InputError(f"--recipe is {name!r}; choose one of {', '.join(RECIPES)}")
    return RECIPES[name]


_LOSSES = {
    "kl+ntp": (1.0, 1.0, False),
    "kl": (1.0, 0.0, False),
    "ntp": (0.0, 1.0, False),
    "reverse-kl": (1.0, 0.0, True),
    "reverse-kl+ntp": (1.0, 1.0, True),
}
_CHOICES = {
    "method": ("retention", "wgkv"),
    "gating": ("log-bias", "logit-scale"),
    "scope": ("global", "head"),
    "gate": GATES,
    "tying": ("paper", "layer", "none"),
    "gate_input": ("x", "kv"),
    "store": ("float32", "float16"),
    "weights": ("auto", "bf16"),
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
    "window",
    "log_every",
    "save_every",
)
_NOT_BELOW_ZERO = (
    "lambda_cap",
    "least_budget",
    "lambda_rank",
    "rank_window",
    "lambda_sparse",
    "threshold",
    "epochs",
    "clip",
    "weight_decay",
    "capacity_rates",
    "eval_every",
    "held_out_budget",
    "seed",
)
# Options of one method only.
_OF_METHOD = {
    "retention": frozenset(
        "gating gate tying gate_input bias loss scope budget lambda_cap normaliser capacity_rates "
        "held_out_budget least_budget lambda_rank rank_window".split()
    ),
    "wgkv": frozenset("window lambda_sparse threshold".split()),
}


@dataclass(frozen=True)
class TrainingSettings:
    """The options of a run; :meth:`of` starts from a recipe.

    The defaults are this project's own, the recipe ``mmkv``: method and numbers of DBTrimKV
    (arXiv 2605.09649; the recipe ``dbtrimkv``) but for M = 256 where it has 64, the gates ``tied``
    for ``rg10``, one pass a step for 4, a warm-up over 3 % of the steps for none, and 1,000 steps
    for 3 epochs.

    Attributes:
        recipe: where the run started from, one of :data:`mmkv.training.settings.RECIPES`; what it
            asked may have been overridden since.
        method: ``retention`` trains retention gates, ``wgkv`` write gates (WG-KV, arXiv
            2512.17452), which read only what says so here, ``d_gate``, and what is said of the
            run: steps, data, optimiser, files.
        gate: ``tied`` or ``rg``, see :class:`mmkv.training.student.TrainableGates`.
        budget: M, mean entries per (layer, KV head), that the capacity term aims at.
        least_budget: 0, or the least M that documents draw, see
            :class:`mmkv.training.model.Objective`; ``budget`` is then where the temperature is 1.
        lambda_rank, rank_window: of the rank term, see :class:`mmkv.training.model.Objective`.
        lambda_cap: weight of the capacity term.
        gate_input: ``x`` or ``kv``, see :class:`mmkv.training.student.TrainableGates`.
        window: write gates: W_local, tokens that every entry stays for, its own included.
        lambda_sparse: write gates: weight of the sparsity term.
        threshold: write gates: tau, the gate from which an entry is admitted, in log lines and
            held-out runs; training does not depend on it.
        epochs: above 0: how often every row of the data is read, which decides the steps
            (:meth:`for_rows`); giving ``steps`` sets it to 0.
        batch, accumulate: documents per process and forward pass; passes per step.
        schedule: of the learning rate, from its peak to 0: ``cosine`` or ``linear``.
        warmup: share of the steps.
        clip: largest gradient norm; 0 for none.
        capacity_rates: 0 counts exactly; K groups log_beta into K decay rates.
        weights: ``bf16`` rounds states, gradients and the gates' trunks to bfloat16 for products on
            a CPU; ``auto`` does not.
        store: dtype of the trunks in the gate file; training itself is in float32.
        held_out_budget: M of the held-out runs, ``budget`` when 0.
    """

    model: str
    output: str
    recipe: str = DEFAULT
    method: str = "retention"
    gating: str = "log-bias"
    scope: str = "global"
    budget: float = 256.0
    least_budget: float = 0.0
    lambda_rank: float = 0.0
    rank_window: int = 0
    lambda_cap: float = 1.0
    normaliser: str = "relative"
    loss: str = "kl+ntp"
    gate: str = "tied"
    d_gate: int = 512
    tying: str = "paper"
    gate_input: str = "x"
    bias: float = 18.0
    capacity_rates: int = 0
    window: int = 256
    lambda_sparse: float = 0.04
    threshold: float = 0.1
    steps: int = 1000
    epochs: float = 0.0
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
    weights: str = "auto"
    device: str = "auto"
    log_every: int = 10
    save_every: int = 200
    eval_every: int = 200
    held_out_budget: float = 0.0
    store: str = "float32"
    resume: bool = False

    @classmethod
    def of(cls, name: str, **given: Any) -> TrainingSettings:
        """Return the settings of a recipe, with the ``given`` ones in place of its own.

        Raises:
            InputError: for an unknown recipe, for settings that do not hold, and for given ones
                that the method does not have.
        """
        asked = {**recipe_options(name), **given, "recipe": name}
        if "steps" in given:
            if given.get("epochs"):
                raise InputError("--steps and --epochs both say how long to train; give one")
            asked["epochs"] = 0.0
        made = cls(**asked)
        for method, options in _OF_METHOD.items():
            if method != made.method and (odd := sorted(options & given.keys())):
                option = odd[0].replace("_", "-")
                raise InputError(
                    f"--{option} is an option of --method {method}, and this run's method is "
                    f"{made.method}; leave it out"
                )
        return made

    def __post_init__(self) -> None:
        recipe_options(self.recipe)
        for name, allowed in _CHOICES.items():
            if (given := getattr(self, name)) not in allowed:
                option = name.replace("_", "-")
                raise InputError(f"--{option} is {given!r}; choose one of {', '.join(allowed)}")
        for name, value in vars(self).items():
            if isinstance(value, float):
                self._require(name, math.isfinite(value), "a finite number")
        for name in _ABOVE_ZERO:
            self._require(name, getattr(self, name) > 0, "more than 0")
        for name in _NOT_BELOW_ZERO:
            self._require(name, getattr(self, name) >= 0, "0 or more")
        self._require("warmup", 0 <= self.warmup <= 1, "a share of the steps, 0 to 1")
        self._require("threshold", self.threshold <= 1, "0 to 1: gates lie between")
        few = 0 < self.capacity_rates < LEAST_RATES
        self._require("capacity_rates", not few, f"0 for the exact count, or {LEAST_RATES} or more")
        if self.gate in ("rg", "linear") and self.tying != "none":
            raise InputError(
                f"--gate {self.gate} has one readout per layer and head, --tying is {self.tying}; "
                "give --tying none, or --gate tied"
            )
        if self.gate == "rg10" and self.tying != "paper":
            raise InputError(
                f"--gate rg10 has one readout of each head for all layers, --tying is "
                f"{self.tying}; leave it out, or give --gate tied"
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

    def for_rows(self, rows: int, processes: int) -> TrainingSettings:
        """Return the settings with the steps that ``epochs`` of so many rows take.

        A step has batch x accumulate rows of each process; the last of an epoch may have fewer,
        as the Trainer counts them.
        """
        if not self.epochs:
            return self
        each = math.ceil(rows / (self.batch * self.accumulate * processes))
        return replace(self, steps=math.ceil(self.epochs * each))

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
            self.least_budget,
            self.lambda_rank,
            self.rank_window,
        )

    def described(self) -> dict[str, Any]:
        """Return the settings without those of other methods."""
        others = [names for method, names in _OF_METHOD.items() if method != self.method]
        left_out = frozenset().union(*others)
        return {name: v for name, v in asdict(self).items() if name not in left_out}

    def write_objective(self) -> WriteObjective:
        """Return the loss these settings describe for write gates."""
        return WriteObjective(self.lambda_sparse, self.window, self.threshold)

    @property
    def policy(self) -> str:
        """Return the preset whose rule these retention gates are trained for."""
        return "dbtrimkv" if self.scope == "global" else "trimkv"
