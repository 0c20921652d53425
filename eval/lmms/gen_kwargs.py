"""Convert a task's ``generation_kwargs`` to mmkv's sampling, as lmms-eval's Qwen3-VL adapter does.

``until``: lmms-eval gives a blank line to every task that names none, which would cut answers at
their first paragraph. The built-in adapter ignores ``until`` in its chat form and drops blank lines
from it in its simple form. This adapter does the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.errors import InputError

if TYPE_CHECKING:
    from mmkv import Sampling

MAX_NEW_TOKENS = 128  # if the task names no length
_TOP_K = 50  # generate's default if neither task nor checkpoint names one
# Names without effect here; the first two repeat what temperature states.
_IGNORED = {"do_sample", "use_cache", "until", "max_new_tokens", "temperature", "top_p", "top_k"}
# Values that ask for one sequence, which is the only choice here.
_ONE = ("num_beams", "num_return_sequences", "best_of", "n", "num_beam_groups")


def sampling_of(
    given: dict[str, Any], seed: int, defaults: dict[str, Any], until: bool
) -> tuple[Sampling, list[str]]:
    """Return the sampling, and the names in ``given`` that change nothing here.

    ``defaults``: the checkpoint's own ``top_p`` and ``top_k``, which hold where the task samples
    and does not say; ``until``: whether stop strings count. Raises InputError for beams and for
    values out of range.
    """
    from mmkv import Sampling

    for name in _ONE:
        if (given.get(name) or 1) != 1:
            raise InputError(
                f"the task asks for {name}={given[name]}; mmkv decodes one sequence per request: "
                f"run with --gen_kwargs {name}=1 to accept greedy or sampled decoding instead"
            )
    ignored = sorted(set(given) - _IGNORED - set(_ONE))
    temperature = float(given.get("temperature") or 0.0)
    chosen = {**defaults, **{k: given[k] for k in ("top_p", "top_k") if given.get(k) is not None}}
    limit = given.get("max_new_tokens")
    made = Sampling(
        max_new_tokens=MAX_NEW_TOKENS if limit is None else int(limit),
        temperature=temperature,
        # Greedy decoding ignores both; some tasks give it top_p=0, which sampling would refuse.
        top_p=float(chosen.get("top_p") or 1.0) if temperature else 1.0,
        top_k=int(chosen.get("top_k") or 0) if temperature else 0,
        seed=seed,
        stop=stop_strings(given.get("until")) if until else (),
    )
    return made, ignored


def stop_strings(until: Any) -> tuple[str, ...]:
    """Pick the stop strings that count: all but blank lines.

    Raises InputError for other types.
    """
    if until is None:
        return ()
    strings = [until] if isinstance(until, str) else until
    if not isinstance(strings, (list, tuple)) or not all(isinstance(s, str) for s in strings):
        raise InputError(f"the task's until is {until!r}; it must be a string or a list of them")
    return tuple(s for s in strings if s and s != "\n\n")


def checkpoint_defaults(pretrained: str) -> dict[str, Any]:
    """Return ``top_p`` and ``top_k`` that transformers' generate would sample with for a
    checkpoint.
    """
    from transformers import GenerationConfig

    found: dict[str, Any] = {"top_k": _TOP_K}
    try:
        config = GenerationConfig.from_pretrained(pretrained)
    except (OSError, ValueError):
        return found
    own = {"top_p": config.top_p, "top_k": config.top_k}
    return found | {name: value for name, value in own.items() if value is not None}
