"""The settings of runs that train, each declared once, and the recipes of distillation: numbers of
the papers and those that no paper gives. Nothing here imports torch: commands are made of it.

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
import sys
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from mmkv.engine.config import DEFAULT_BUDGET, DEFAULT_POLICY, EngineConfig
from mmkv.engine.errors import InputError
from mmkv.engine.options import declared, option

if TYPE_CHECKING:
    from mmkv.training.model import Objective, WriteObjective

# Options under a heading of the help.
_data, _gates, _cache, _weights, _loss, _run = (
    partial(option, panel=heading)
    for heading in ("Data", "Gates", "Cache", "Weights", "Loss", "Run")
)
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
    # Ours, for --method rank.
    "rank": {
        "method": "rank",
        "bias": 6.0,
        "steps": 400,
        "lr": 3e-3,
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
LEAST_RATES = 4  # of mmkv.training.capacity.retained_total_grouped: its interpolation is cubic
# Options that not every method has.
_RETENTION = "gate tying gate_input bias budget held_out_budget rank_window".split()
_OF_METHOD = {
    "retention": frozenset(
        "gating loss scope lambda_cap normaliser capacity_rates least_budget lambda_rank".split()
        + _RETENTION
    ),
    "rank": frozenset(["cuts", *_RETENTION]),
    "wgkv": frozenset("window lambda_sparse threshold".split()),
}


@dataclass(frozen=True)
class DataSettings:
    """Where a run's documents come from."""

    data: list[str] = _data(  # noqa: RUF009 - makes a field
        "[WEIGHT*][KIND:]PATH, kinds chat, llava, mmdu, pairs, text (found by content when left "
        "out); or [WEIGHT*]NAME[:FOLDER], a paper's set: m4-instruct, llava-video, r1-onevision, "
        "openr1-math, llava-next, synthlong, booksum, buddhi, longalpaca, fineweb-edu, "
        "nemotron-math, deepscaler; or niah[:LOW-HIGH], needles in texts of so many tokens; or "
        "mixture:FILE (also FILE.toml), mixture:dbtrimkv[:FOLDER] and "
        "mixture:trimkv-long[:FOLDER], the papers'; or [WEIGHT*]scenes:KIND for the bundled "
        "model (dense, sparse, clip, stream, 40-pictures, 96-distractors, 256-distractors); or "
        "[WEIGHT*]tasks:KIND (recall, needles, memory, far-needles, far-memory, records, "
        "assigned, haystack). Repeatable.",
        MISSING,
    )
    eval_data: list[str] | None = _data(  # noqa: RUF009
        "Held-out data, as --data. Without it nothing is measured."
    )
    eval_samples: int = _data("Held-out conversations to use.", 32, least=0)
    max_length: int = _data("Longest document, in tokens.", 4096)
    long_chats: str = _data("Chats longer than that: drop them, or cut them after a reply.", "cut")
    pack: bool = _data(
        "Fill each pass up to --max-length with documents, which do not see each other.",
        False,
        flags=("--pack/--no-pack",),
    )
    media_root: str | None = _data("Folder that relative paths of pictures start from.")

    def __post_init__(self) -> None:
        check(self)

    @property
    def how(self) -> dict[str, Any]:
        """How documents are read, as :func:`mmkv.training.data.examples.examples` takes it."""
        names = ("max_length", "long_chats", "media_root")
        return {name: getattr(self, name) for name in names}


def check(settings: Any) -> None:
    """Check a dataclass against the choices and bounds of its options.

    Raises:
        InputError: for the first value outside them; NaN is outside all.
    """
    for name, known in declared(type(settings)).items():
        value, bounds = getattr(settings, known.field), []
        if value is None:
            continue
        if known.choices and value not in known.choices:
            chosen = ", ".join(known.choices)
            raise InputError(f"{_flag(name)} is {value!r}; choose one of {chosen}")
        if known.least is not None:
            bounds.append((value >= known.least, f"{known.least:g} or more"))
        if known.above is not None:
            bounds.append((value > known.above, f"more than {known.above:g}"))
        if known.most is not None:
            bounds.append((value <= known.most, f"{known.most:g} or less"))
        for holds, wanted in bounds:
            if not holds:
                raise InputError(f"{_flag(name)} is {value}; give {known.asked or wanted}")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


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
        method: ``retention`` distils retention gates, ``rank`` trains them on the order of future
            attention alone (:mod:`mmkv.training.rank`), ``wgkv`` write gates (WG-KV, arXiv
            2512.17452); each has the options of :data:`_OF_METHOD`, ``d_gate``, and what is said of
            the run: steps, data, optimiser, files.
        init: gates that a run starts from, of the same layout and size; None: drawn ones.
        gate, tying, gate_input: see :class:`mmkv.training.student.TrainableGates`.
        budget: M, mean entries per (layer, KV head), that the capacity term aims at.
        least_budget: 0, or the least M that documents draw, see
            :class:`mmkv.training.model.Objective`; ``budget`` is then where the temperature is 1.
        lambda_rank, rank_window: of the rank term, see :class:`mmkv.training.model.Objective`.
        cuts: see :class:`mmkv.training.rank.RankModel`.
        window: write gates: W_local, tokens that every entry stays for, its own included.
        threshold: write gates: tau, in log lines and held-out runs; training does not depend on it.
        epochs: above 0: how often every row of the data is read, which decides the steps
            (:meth:`for_rows`); giving ``steps`` sets it to 0.
        weights: ``bf16`` rounds states, gradients and the gates' trunks to bfloat16 for products on
            a CPU; ``auto`` does not.
        store: dtype of the trunks in the gate file; training itself is in float32.
    """

    model: str = _run("Checkpoint folder or hub id; stays frozen.", MISSING)
    output: str = _run("Folder for gates, checkpoints, curve and card.", MISSING)
    recipe: str = _run(
        "mmkv (the defaults shown here), the papers' numbers: dbtrimkv, trimkv, wgkv (the "
        "default with --method wgkv), or rank (with --method rank); options that you give override "
        "it.",
        DEFAULT,
    )
    method: str = _run(
        "retention gates; rank: these in minutes, from attention alone, with recipe rank; or wgkv: "
        "write gates, with recipe wgkv (WG-KV).",
        "retention",
        choices=tuple(_OF_METHOD),
    )
    init: str | None = _run("Gates to start from, as --gates of mmkv chat; same layout and size.")
    gating: str = _gates(
        "log-bias (DBTrimKV) or logit-scale (TRIM-KV).",
        "log-bias",
        choices=("log-bias", "logit-scale"),
    )
    loss: str = _loss(
        "kl+ntp, kl, ntp, reverse-kl or reverse-kl+ntp.", "kl+ntp", choices=tuple(_LOSSES)
    )
    scope: str = _loss(
        "Capacity over all heads (global) or each (head).", "global", choices=("global", "head")
    )
    budget: float = _loss("M, mean entries per layer and KV head.", 256.0, above=0)
    least_budget: float = _loss(
        "Above 0: each document draws its M log-uniformly from this to half of its tokens.",
        0.0,
        least=0,
    )
    lambda_rank: float = _loss(
        "Weight of the term that ranks entries by their future attention.", 0.0, least=0
    )
    rank_window: int = _loss(
        "Tokens ahead whose queries count for rank and --lambda-rank; 0: all.", 0, least=0
    )
    cuts: int = _loss("rank: tokens of each document at which entries are ranked.", 6, above=0)
    lambda_cap: float = _loss("Weight of the capacity term.", 1.0, least=0)
    normaliser: str = _loss("relative or tt (TRIM-KV).", "relative", choices=("relative", "tt"))
    gate: str = _gates(
        "tied (two layers, a block of them per head), rg (TRIM-KV: one hidden layer), rg10 (as "
        "DBTrimKV's authors published) or linear.",
        "tied",
        choices=("tied", "rg", "rg10", "linear"),
    )
    d_gate: int = _gates("Width of the gates' hidden layers.", 512, above=0)
    tying: str = _gates(
        "One readout for all (paper), per layer, or per head (none).",
        "paper",
        choices=("paper", "layer", "none"),
    )
    gate_input: str = _gates(
        "Input of the gates: the layer's normed input (x) or keys and values (kv).",
        "x",
        choices=("x", "kv"),
    )
    bias: float = _gates("Start value of the readout's bias.", 18.0)
    capacity_rates: int = _loss("0: exact count; K: approximate it with K decay rates.", 0, least=0)
    window: int = _gates("wgkv: tokens for which every entry stays (W_local).", 256, above=0)
    lambda_sparse: float = _loss("wgkv: weight of the sparsity term.", 0.04, least=0)
    threshold: float = _gates(
        "wgkv: gate value from which measurements count an entry as admitted.",
        0.1,
        least=0,
        most=1,
        asked="0 to 1: gates lie between",
    )
    steps: int = _run("Optimiser steps.", 1000, above=0)
    epochs: float = _run(
        "Above 0: as many steps as read each row of --data this often.", 0.0, least=0
    )
    batch: int = _run("Documents per process and forward pass.", 1, above=0)
    accumulate: int = _run("Forward passes per step.", 1, above=0)
    lr: float = _run("Peak learning rate.", 2e-4, above=0)
    schedule: str = _run(
        "Schedule of the learning rate to 0: cosine or linear.",
        "cosine",
        choices=("cosine", "linear"),
    )
    warmup: float = _run(
        "Share of steps for warm-up.", 0.03, least=0, most=1, asked="a share of the steps, 0 to 1"
    )
    weight_decay: float = _run("AdamW's.", 1e-6, least=0)
    clip: float = _run("Largest gradient norm; 0: any.", 1.0, least=0)
    checkpointing: bool = _run(
        "Recompute layers instead of keeping activations.",
        False,
        flags=("--checkpointing/--no-checkpointing",),
    )
    dtype: str = _run("auto, float32 or bfloat16.", "auto")
    weights: str = _run(
        "On a CPU: auto, or bf16: products of bfloat16, faster.", "auto", choices=("auto", "bf16")
    )
    device: str = _run("auto, cpu or cuda.", "auto")
    seed: int = _run("Seed of gates and data order.", 0, least=0)
    log_every: int = _run("Steps between log lines.", 10, above=0)
    save_every: int = _run("Steps between checkpoints.", 200, above=0)
    eval_every: int = _run("Steps between held-out runs; 0: at the end.", 200, least=0)
    held_out_budget: float = _run("M of the held-out runs; 0: --budget.", 0.0, least=0)
    threads: int = _run("Torch threads; 0: its default.", 0, least=0)
    store: str = _run(
        "Trunks in the gate file: float32, or float16 at half the size.",
        "float32",
        choices=("float32", "float16"),
    )
    resume: bool = _run(
        "Continue from the last checkpoint in --output.", False, flags=("--resume/--no-resume",)
    )

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
            asked["epochs"] = 0.0  # a recipe may count in epochs
        made = cls(**asked)
        for name in sorted(given.keys() & frozenset().union(*_OF_METHOD.values())):
            methods = [method for method, options in _OF_METHOD.items() if name in options]
            if made.method not in methods:
                raise InputError(
                    f"{_flag(name)} is an option of --method {' and '.join(methods)}, and this "
                    f"run's method is {made.method}; leave it out"
                )
        return made

    def __post_init__(self) -> None:
        recipe_options(self.recipe)
        for name, value in vars(self).items():
            if isinstance(value, float) and not math.isfinite(value):
                raise InputError(f"{_flag(name)} is {value}; give a finite number")
        check(self)
        if 0 < self.capacity_rates < LEAST_RATES:
            raise InputError(
                f"--capacity-rates is {self.capacity_rates}; give 0 for the exact count, or "
                f"{LEAST_RATES} or more"
            )
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
        from mmkv.training.model import Objective

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
        """Return the settings that decide the gates: without those of other methods."""
        others = frozenset().union(*_OF_METHOD.values()) - _OF_METHOD[self.method]
        left_out = others | {"threads"}
        return {name: v for name, v in asdict(self).items() if name not in left_out}

    def write_objective(self) -> WriteObjective:
        """Return the loss these settings describe for write gates."""
        from mmkv.training.model import WriteObjective

        return WriteObjective(self.lambda_sparse, self.window, self.threshold)

    @property
    def policy(self) -> str:
        """Return the preset whose rule these retention gates are trained for."""
        return "dbtrimkv" if self.scope == "global" else "trimkv"


# Options of one method of adapt only.
_OF_ADAPT = {"distill": ("replies",), "grpo": ("group", "reward", "epsilon")}
_FINITE: dict[str, Any] = {
    "above": 0,
    "most": sys.float_info.max,
    "asked": "a finite number above 0",
}


@dataclass(frozen=True)
class AdaptSettings:
    """The options of a run of ``python -m mmkv.training.adapt``.

    G-KV (section 7.4) trains all weights at a learning rate of 1e-6, 128 documents or 16 prompts of
    8 replies a step, replies of up to 4,096 tokens at temperature 0.6, 250 or 400 steps. The
    defaults here are for an adapter.

    Attributes:
        temperature: of drawn replies, and of the loss of distill (its eq. 7).
        max_reply: most tokens of a drawn reply. A longer one of grpo has the advantage 0.
        reward: grpo: when a reply is right, one of :data:`mmkv.training.adapt_run.REWARDS`.
        epsilon: grpo: the clip of its eq. 6.
    """

    model: str = _run("Checkpoint folder or hub id.", MISSING)
    output: str = _run("Folder for the adapter, checkpoints and card.", MISSING)
    method: str = _run(
        "distill (predictions of the full cache), or grpo (rewards for right replies).",
        "distill",
        choices=("distill", "grpo"),
    )
    policy: str = _cache("Eviction policy, as mmkv chat --policy.", DEFAULT_POLICY)
    gates: str | None = _cache("Gates of the policy; default: those of the checkpoint.")
    budget: str = _cache(
        "Entries per layer and KV head (64), or a share of each document (1/16).",
        str(DEFAULT_BUDGET),
    )
    prefill_chunk: int = _cache(
        "Tokens of a prompt between cuts.", EngineConfig.prefill_chunk, least=1
    )
    interval: int | None = _cache("Decode steps between cuts; default: the policy's own.", least=1)
    full: bool = _weights(
        "Train all text weights, without an adapter.", False, flags=("--full/--no-full",)
    )
    rank: int = _weights("Rank of the LoRA adapter.", 16, least=1)
    alpha: int = _weights("Scale of the adapter, divided by the rank.", 32, least=1)
    targets: tuple[str, ...] = _weights(
        "Matrix that gets an adapter, such as q_proj; default: all.",
        kind=list[str] | None,
        name="target",
        read=lambda given: tuple(given or ()),
    )
    replies: str = _loss(
        "distill: replies drawn from the teacher, or those of the data.",
        "teacher",
        choices=("teacher", "data"),
    )
    temperature: float = _loss(
        "Temperature of drawn replies, and of distill's loss.", 0.6, **_FINITE
    )
    max_reply: int = _loss("Most tokens of a drawn reply.", 256, least=1)
    documents: int = _run("Documents (grpo: prompts) of a step.", 4, least=1)
    group: int = _loss(
        "grpo: replies to each prompt.",
        8,
        least=2,
        asked="2 or more: a reply is judged by the others",
    )
    reward: str = _loss(
        "grpo: a reply is right if it is exact, contains the answer, or its number.",
        "exact",
        choices=("exact", "contains", "number"),
    )
    epsilon: float = _loss("grpo: clip of the ratio.", 0.2)
    steps: int = _run("Optimiser steps.", 100, least=1)
    lr: float = _run("Peak learning rate; G-KV has 1e-6 with --full.", 1e-4, **_FINITE)
    schedule: str = _run(
        "Schedule of the learning rate: cosine or linear.", "cosine", choices=("cosine", "linear")
    )
    warmup: float = _run(
        "Share of steps for warm-up.", 0.03, least=0, most=1, asked="a share of the steps, 0 to 1"
    )
    weight_decay: float = _run("AdamW's.", 0.0, least=0)
    clip: float = _run("Largest gradient norm; 0: any.", 1.0, least=0)
    checkpointing: bool = _run(
        "Recompute layers instead of keeping activations.",
        False,
        flags=("--checkpointing/--no-checkpointing",),
    )
    dtype: str = _run("auto, float32 or bfloat16.", "auto")
    device: str = _run("auto, cpu or cuda.", "auto")
    seed: int = _run("Seed of the adapter, data order and draws.", 0, least=0)
    log_every: int = _run("Steps between log lines.", 1, least=1)
    save_every: int = _run("Steps between checkpoints.", 50, least=1)
    threads: int = _run("Torch threads; 0: its default.", 0)
    resume: bool = _run(
        "Continue from the last checkpoint in --output.", False, flags=("--resume/--no-resume",)
    )

    def __post_init__(self) -> None:
        from mmkv.training.compressed import budget_of
        from mmkv.training.folder import processes

        check(self)
        if not 0 < self.epsilon < 1:
            raise InputError(f"--epsilon is {self.epsilon}; give a number between 0 and 1")
        budget_of(self.budget, 1)
        if self._rows % processes():
            raise InputError(
                f"a step has {self._rows} passes, which {processes()} processes cannot share; give "
                "a multiple"
            )

    @property
    def _rows(self) -> int:
        """Passes of a step in all processes."""
        return self.documents * (self.group if self.method == "grpo" else 1)

    @property
    def passes(self) -> int:
        """Passes of a step in each process."""
        from mmkv.training.folder import processes

        return self._rows // processes()

    @property
    def unread(self) -> set[str]:
        """The settings that this run does not read."""
        out = {n for method, names in _OF_ADAPT.items() if method != self.method for n in names}
        out |= {"rank", "alpha", "targets"} if self.full else set()
        return out | (
            {"max_reply"} if (self.method, self.replies) == ("distill", "data") else set()
        )

    def described(self) -> dict[str, Any]:
        """Return the settings that decide the model: without those that this run does not read."""
        left_out = self.unread | {"threads"}
        return {n: v for n, v in asdict(self).items() if n not in left_out}
