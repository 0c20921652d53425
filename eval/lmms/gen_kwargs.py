"""Convert a task's ``generation_kwargs`` to mmkv's sampling, as lmms-eval's Qwen3-VL adapter does.

``until``: lmms-eval gives a blank line to every task that names none, which would cut answers at
their first paragraph. The built-in adapter ignores ``until`` in its chat form and drops blank lines
from it in its simple form. This adapter does the same.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mmkv.engine.errors import InputError

if TYPE_CHECKING:
    from mmkv.generation_config import Generation
    from mmkv.sampling import Settled

MAX_NEW_TOKENS = 128  # if the task names no length
_TOP_K = 50  # generate's default if neither task nor checkpoint names one
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_DRAWS = {"top_p": float, "top_k": int, "min_p": float}
_KNOWN = {"do_sample", "use_cache", "until", "max_new_tokens", "temperature", *_PENALTIES, *_DRAWS}
# Values that ask for one sequence, which is the only choice here.
_ONE = ("num_beams", "num_return_sequences", "best_of", "n", "num_beam_groups")


def sampling_of(
    given: dict[str, Any], seed: int, defaults: Generation, until: bool
) -> tuple[Settled, list[str]]:
    """Return the sampling, and the names in ``given`` that change nothing here.

    Greedy where the task names no temperature and no ``do_sample``, as in lmms-eval's own adapters.
    What else it does not say is the checkpoint's: penalties always, as in transformers' greedy
    decoding, and ``top_p``, ``top_k``, ``min_p`` where the task samples.

    ``defaults``: of the checkpoint; ``until``: whether stop strings count. Raises InputError for
    beams and for values out of range.
    """

    for name in _ONE:
        if (given.get(name) or 1) != 1:
            raise InputError(
                f"the task asks for {name}={given[name]}; mmkv decodes one sequence per request: "
                f"run with --gen_kwargs {name}=1 to accept greedy or sampled decoding instead"
            )
    ignored = sorted(set(given) - _KNOWN - set(_ONE))
    temperature = given.get("temperature")
    if temperature is None:
        # A checkpoint may be greedy by itself, though a task samples.
        temperature = (defaults.served.temperature or 1.0) if given.get("do_sample") else 0.0
    limit = given.get("max_new_tokens")
    said = {name: value for name, value in given.items() if value is not None}
    own: dict[str, Any] = {name: float(said[name]) for name in _PENALTIES if name in said}
    # Greedy decoding ignores the others; some tasks give it top_p=0, which sampling would refuse.
    if temperature:
        own |= {} if "top_k" in defaults.named else {"top_k": _TOP_K}
        own |= {name: kind(said[name]) for name, kind in _DRAWS.items() if name in said}
        own["top_p"] = own.get("top_p") or defaults.served.top_p
    made = replace(
        defaults.served,
        max_new_tokens=MAX_NEW_TOKENS if limit is None else int(limit),
        temperature=float(temperature),
        seed=seed,
        stop=(*defaults.served.stop, *(stop_strings(given.get("until")) if until else ())),
        **own,
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
