"""What a checkpoint's ``generation_config.json`` asks for, as the defaults of its replies."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any

from mmkv.engine.errors import InputError, ModelError, first_line, shown
from mmkv.engine.model.source import checkpoint_file, locate
from mmkv.sampling import Settled

FILE, _OLDER = "generation_config.json", "config.json"
_GET_IT = "get it again, or leave it out (--no-generation-config)"
# What transformers takes where a file asks for sampling and does not say (its GenerationConfig).
_SAMPLED = {"temperature": 1.0, "top_k": 50}
_NUMBERS = (
    *("temperature", "top_p", "min_p", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty"),  # vLLM's names: transformers has none
)
_FOLLOWED = {*_NUMBERS, "top_k", "max_new_tokens", "do_sample", "eos_token_id", "stop_strings"}
_FOLLOWED |= {"bad_words_ids", "suppress_tokens"}
# Fields that decide no token here: how transformers computes and what it returns, speculation
# (which keeps the distribution), and what beams alone read (num_beams is told).
_HARMLESS = set(
    """
    _from_model_config transformers_version bos_token_id pad_token_id decoder_start_token_id
    use_cache cache_implementation cache_config max_cache_len low_memory prefill_chunk_size
    compile_config disable_compile continuous_batching_config return_dict_in_generate
    output_attentions output_hidden_states output_scores output_logits
    is_assistant num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold
    assistant_early_exit assistant_lookbehind assistant_ensemble_weight target_lookbehind
    prompt_lookup_num_tokens max_matching_ngram_size speculation_type use_mtp
    early_stopping length_penalty num_beam_groups diversity_penalty remove_invalid_values
    """.split()
)
# Values of other fields that ask for nothing, beside None, false, 0 and what is empty.
_ONE = {"num_beams", "num_return_sequences", "typical_p", "encoder_repetition_penalty"}
_ONE |= {"guidance_scale"}


@dataclass(frozen=True)
class Generation:
    """The defaults of a checkpoint's replies.

    Attributes:
        sampling: where the caller says nothing, as transformers' ``generate``: greedy unless the
            file has ``do_sample``.
        served: for a server's clients, who get samples unless they ask for temperature 0 (OpenAI's
            default is temperature 1) or the file says ``do_sample: false``.
        named: the fields that it has.
        ignored: fields that ask for what mmkv does not do.
        file: what says so.
    """

    sampling: Settled = field(default_factory=Settled)
    served: Settled = field(default_factory=lambda: Settled(temperature=1.0))
    named: frozenset[str] = frozenset()
    ignored: tuple[str, ...] = ()
    file: str = FILE

    @property
    def notes(self) -> list[str]:
        """Say what is followed and what cannot be, a line each; nothing where nothing is asked."""
        made = []
        if asked := described(self.sampling):
            made.append(
                f"replies are drawn as the model's {self.file} says: {asked}; temperature 0 takes "
                "the likeliest token, --no-generation-config leaves the file out"
            )
        return [*made, self.unfollowed] if self.unfollowed else made

    @property
    def unfollowed(self) -> str | None:
        """Name what cannot be followed, or None."""
        if not self.ignored:
            return None
        return f"{self.file} asks for {', '.join(self.ignored)}, which mmkv does not follow"


def described(sampling: Settled) -> str:
    """Name the settings that differ from greedy decoding without penalties."""
    plain, found = Settled(), []
    of_draws = () if sampling.temperature else ("top_p", "top_k", "min_p")
    for name in (*_NUMBERS, "top_k", "max_new_tokens", "stop"):
        value = getattr(sampling, name)
        if value != getattr(plain, name) and name not in of_draws:
            found.append(f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}")
    if sampling.bad_words:
        found.append(f"{len(sampling.bad_words)} bad words")
    return ", ".join(found)


def read_generation(name: str, positions: int) -> Generation:
    """Read the file of a checkpoint, or what an older one has in its config.json, as transformers
    does; without either, nothing is asked.

    Args:
        name: the checkpoint's folder or hub id.
        positions: the most that the model has.

    Raises:
        ModelError: it cannot be read, or a value in it cannot be.
    """
    source = locate(name)
    path = checkpoint_file(source, FILE) or checkpoint_file(source, _OLDER)
    try:
        found = {} if path is None else json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read ({first_line(error)}); {_GET_IT}") from error
    if not isinstance(found, dict):
        raise ModelError(f"{path} is no JSON object; {_GET_IT}")
    if path is None or path.name == FILE:
        return generation_of(found, positions)
    from transformers import GenerationConfig

    known = vars(GenerationConfig())
    # What the whole says comes before what its text model does.
    parts = [part for part in (found.get("text_config"), found) if isinstance(part, dict)]
    said = {
        key: value
        for part in parts
        for key, value in part.items()
        if key in known and value is not None
    }
    try:
        made = generation_of(said, positions)
    except ModelError as error:
        raise ModelError(str(error).replace(FILE, _OLDER)) from error
    return replace(made, file=_OLDER)


def generation_of(found: dict[str, Any], positions: int) -> Generation:
    """Return what the fields of such a file ask for. Raises ModelError."""
    found = {name: value for name, value in found.items() if value is not None}
    given: dict[str, Any] = {name: _number(found, name) for name in _NUMBERS if name in found}
    for name in ("top_k", "max_new_tokens"):
        if name in found:
            given[name] = _whole(found, name)
    sampled = found.get("do_sample")
    if sampled is not None and not isinstance(sampled, bool):
        raise _wrong("do_sample", sampled, "true or false")
    if sampled:
        given = _SAMPLED | given
    if given.get("top_k", 0) < 0:  # off, as vLLM writes it
        given["top_k"] = 0
    if given.get("top_p") == 0:  # the likeliest token alone
        given["top_p"] = 1e-9
    given["bad_words"] = _words(found)
    given["stop"] = _stops(found)
    temperature = given.pop("temperature", 1.0)
    try:
        served = Settled(temperature=temperature, **given)
    except (InputError, TypeError) as error:
        raise ModelError(f"{error}: in the checkpoint's {FILE}; {_REMEDY}") from error
    likeliest = replace(served, temperature=0.0)
    return Generation(
        sampling=served if sampled else likeliest,
        served=likeliest if sampled is False else served,
        named=frozenset(found),
        ignored=_ignored(found, positions),
    )


_REMEDY = "mend it, or load the model with generation_config=False (--no-generation-config)"


def _wrong(name: str, value: Any, wanted: str) -> ModelError:
    return ModelError(f"{name} in {FILE} is {shown(value)}, not {wanted}; {_REMEDY}")


def _number(found: dict[str, Any], name: str) -> float:
    value = found[name]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong(name, value, "a number")
    return float(value)


def _whole(found: dict[str, Any], name: str) -> int:
    value = _number(found, name)
    if not value.is_integer():
        raise _wrong(name, found[name], "a whole number")
    return int(value)


def _words(found: dict[str, Any]) -> tuple[tuple[int, ...], ...]:
    """Return ``bad_words_ids`` without single end tokens (as transformers), and what is suppressed.

    A token that is suppressed is a bad word of its own.
    """
    words, alone = found.get("bad_words_ids", []), found.get("suppress_tokens", [])
    for name, rows in (("bad_words_ids", words), ("suppress_tokens", [alone])):
        if not isinstance(rows, list) or not all(_ids(row) for row in rows):
            raise _wrong(name, found[name], "token ids")
    ends = found.get("eos_token_id")
    ends = ends if isinstance(ends, list) else [ends]
    kept = [tuple(word) for word in words if word and word not in [[end] for end in ends]]
    return (*kept, *((token,) for token in alone))


def _ids(row: Any) -> bool:
    return isinstance(row, list) and all(type(each) is int and 0 <= each < 2**31 for each in row)


def _stops(found: dict[str, Any]) -> tuple[str, ...]:
    stops = found.get("stop_strings", [])
    stops = [stops] if isinstance(stops, str) else stops
    if not isinstance(stops, list) or not all(isinstance(one, str) and one for one in stops):
        raise _wrong("stop_strings", stops, "texts")
    return tuple(stops)


def _ignored(found: dict[str, Any], positions: int) -> tuple[str, ...]:
    """Return the fields that ask for something else."""
    names = []
    for name, value in found.items():
        known = name in _FOLLOWED or name in _HARMLESS
        nothing = not value or (name in _ONE and value == 1)
        # transformers counts the prompt, too: a bound that the model's positions are anyway.
        enough = name == "max_length" and isinstance(value, int) and value >= positions
        if not (known or nothing or enough):
            names.append(shown(name, 60))
    return tuple(sorted(names))
