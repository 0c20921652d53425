"""Training recipes: the numbers of the papers, and the numbers that no paper gives.

``trimkv``: TRIM-KV (arXiv 2512.03324). Eq. 3 (logits scaled by beta^(t-i)), eq. 4 (forward KL and
next-token loss), eq. 5 (capacity of each head, 1/(T(T-M))); section 5.1 (lambda 1, M = 512, gate
d -> 512 -> H per layer, bias 8); appendix B.1 (learning rate 2e-4, weight decay 0.01, one sequence
a pass, 4 passes a step, sequences of up to 16,384 tokens on 4 GPUs, the rest as Hugging Face's
Trainer has it: linear schedule, no warm-up, gradient norm 1).

``dbtrimkv``: DBTrimKV (arXiv 2605.09649). Section 2.2 (weights times beta^(t-i): the logit gets
(t-i) log beta), eq. 3 (forward KL and next-token loss); section 4 (one readout for all layers and
heads), section 4.1 (capacity over all heads); section 5.1 (lambda 1, M = 64, hidden 512, bias 18);
appendix B.1 (learning rate 2e-4, weight decay 1e-6, cosine schedule, one sequence a pass, 4 passes
a step, sequences of up to 32,768 tokens on 4 GPUs, the rest as the Trainer has it). The paper
writes the capacity loss as a plain sum over t, and TRIM-KV's without its factor, too; ``relative``
is what the authors' released training code divides by.

``wgkv``: write gates, WG-KV (arXiv 2512.17452). Section 3.3 (L2 of the last hidden states, and
lambda times the mean of g + g (1 - g)); appendix C (AdamW, weight decay 0.01, cosine schedule with
a warm-up over 10 % of the steps, peak 0.001, one sequence a step, 7,500 steps of 4k to 32k tokens);
section 5.2 (threshold 0.1); W_local = 256 and lambda 0.04 are the defaults of the authors' released
code, and so are a width of 4 x head_dim for Llama (512; 1.5 x for Qwen3) and gradients that are not
clipped.

Not in the recipes: the number of steps (with the default 1,000 a recipe is not a reproduction:
TRIM-KV names 10,000 for its long-context gates), the data and its ``--max-length``. No paper says
how the gates' weights start; here they start as ``torch.nn.Linear`` does.
"""

from __future__ import annotations

from collections.abc import Mapping

from mmkv.engine.errors import InputError

DEFAULT = "mmkv"
_TRAINER = {"warmup": 0.0, "clip": 1.0}
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
        "gate": "tied",
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
