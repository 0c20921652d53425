"""Generate text tasks with exact answers: recall, needles in filler, memory over sessions.

For language models of any vocabulary: a task is plain text of which some pieces are answers. A
question repeats the beginning of the sentence that holds its answer, because small models cannot
be expected to follow instructions; what is measured is memory. Later questions need entries that
no earlier question pointed at, so memory must be judged before the question is known.

``recall``: facts one after the other, any may be asked (*dense*: hardly compressible).
``needles``: a few facts between many filler sentences, several keys, values and queries, after
DBTrimKV, arXiv 2605.09649, appendix B.3 (what matters is known when it is read).
``haystack``: the same with four facts, and 16 to 20 sentences to each (*sparse*: nearly all of
it never matters); not among the kinds that this repository's gates were trained on.
``memory``: numbered sessions of small talk in which facts are stated and later replaced; the
latest value is asked.
``far-needles`` and ``far-memory``: the like over 2k to 8k tokens, with one to four values to a
needle's key. Of the gates here only ``smollm2-135m-longer-*`` were trained on them.
``records`` and ``assigned``: recall in other words: lines of JSON with hexadecimal keys and values,
and names in a program that are given numbers. No gates of this repository were trained on them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from mmkv.training.data.scenes import Split

NAMES = tuple(
    "Anna Ben Clara David Emma Frank Grace Henry Irene Jack Karen Leo Maria Nick Olivia Paul Rosa "
    "Sam Tina Victor Wendy Alice Bob Carl Diana Eric Fiona George Helen Ivan Julia Kevin Laura "
    "Mike Nora Oscar Peter Rachel Simon Thomas".split()
)
_SUBJECTS = tuple(
    "farmer teacher baker sailor doctor painter driver singer neighbour visitor gardener student "
    "writer cook postman carpenter".split()
)
_VERBS = ("saw", "bought", "carried", "painted", "repaired", "found", "sold", "cleaned")
_OBJECTS = tuple(
    "chair basket bicycle lamp boat window ladder table blanket fence kettle piano wagon mirror "
    "clock bucket".split()
)
_PLACES = tuple(
    "garden market river station village bridge harbour school kitchen forest library mountain "
    "square bakery church field".split()
)
_TIMES = (
    "In the morning",
    "After lunch",
    "Last winter",
    "On Sunday",
    "Before the rain",
    "In spring",
    "At noon",
    "Every evening",
)


@dataclass(frozen=True)
class TaskPiece:
    """A piece of text; ``answer``: whether it answers a question."""

    text: str
    answer: bool = False


def recall(rng: random.Random, facts: int, questions: int) -> list[TaskPiece]:
    """State ``facts`` numbers, one per name, then ``questions`` of them."""
    known = _numbers(rng, facts)
    return _facts_and_questions(rng, questions, known, lambda name: f"{opening(name)} ", ".\n")


def records(rng: random.Random, facts: int, questions: int) -> list[TaskPiece]:
    """State ``facts`` lines of JSON, hexadecimal keys and values, then ``questions`` of them."""
    known: dict[str, str] = {}
    while len(known) < facts:
        known[f"{rng.randrange(16**4):04x}"] = f"{rng.randrange(16**4):04x}"
    return _facts_and_questions(rng, questions, known, lambda key: f'"{key}": "', '",\n')


def assigned(rng: random.Random, facts: int, questions: int) -> list[TaskPiece]:
    """State ``facts`` names of a program and their numbers, then ``questions`` of them."""
    names = [f"{place}_{thing}" for place in _PLACES for thing in _OBJECTS]
    known = {name: _number(rng) for name in rng.sample(names, facts)}
    return _facts_and_questions(rng, questions, known, lambda name: f"{name} = ", "\n")


def needles(
    rng: random.Random, filler: int, keys: int, queries: int, values: int = 1
) -> list[TaskPiece]:
    """Hide ``keys`` facts at random depths among ``filler`` sentences, then ``queries`` of them.

    Args:
        values: numbers to each key, all of which are asked at once.
    """
    known = _numbers(rng, keys, values)
    lines = [small_talk(rng) for _ in range(filler)]
    for name, value in known.items():
        lines.insert(rng.randint(0, len(lines)), _stated(name, value))
    pieces = [TaskPiece("".join(lines))]
    for name in rng.sample(sorted(known), queries):
        pieces += _asked(name, known[name])
    return pieces


def memory(rng: random.Random, sessions: int, people: int, talk: int) -> list[TaskPiece]:
    """Make ``sessions`` with ``talk`` sentences and two facts each, and a question after each.

    The names come from ``people``, so facts are replaced; what is asked is the latest.
    """
    names = rng.sample(NAMES, people)
    known: dict[str, str] = {}
    pieces = []
    for session in range(1, sessions + 1):
        lines = [small_talk(rng) for _ in range(talk)]
        for name in rng.sample(names, 2):
            known[name] = _number(rng)
            lines.insert(rng.randint(0, len(lines)), _stated(name, known[name]))
        pieces.append(TaskPiece(f"\nSession {session}.\n" + "".join(lines)))
        name = rng.choice(sorted(known))
        pieces += _asked(name, known[name])
    for name in sorted(known):
        pieces += _asked(name, known[name])
    return pieces


KINDS: dict[str, Callable[[random.Random], list[TaskPiece]]] = {
    "recall": lambda rng: recall(rng, rng.randint(16, 28), 16),
    "needles": lambda rng: needles(rng, rng.randint(24, 64), 10, 10),
    "memory": lambda rng: memory(rng, rng.randint(4, 8), 6, rng.randint(3, 6)),
    "records": lambda rng: records(rng, rng.randint(16, 28), 16),
    "assigned": lambda rng: assigned(rng, rng.randint(16, 28), 16),
    "haystack": lambda rng: needles(rng, rng.randint(64, 80), 4, 4),
    "far-needles": lambda rng: needles(
        rng, rng.randint(140, 520), rng.randint(10, 24), 10, rng.randint(1, 4)
    ),
    "far-memory": lambda rng: memory(rng, rng.randint(16, 52), 12, rng.randint(6, 8)),
}


def text_task(kind: str, seed: int, split: Split) -> list[TaskPiece]:
    """Make the task ``seed`` of a kind, a function of the arguments alone.

    Raises:
        ValueError: for an unknown kind, naming those there are.
    """
    if kind not in KINDS:
        raise ValueError(f"no text task of kind {kind!r}; choose one of {', '.join(KINDS)}")
    return KINDS[kind](random.Random(f"{kind}-{split}-{seed}"))


def opening(name: str, values: int = 1) -> str:
    """Return the beginning of the sentence with the numbers of ``name``, and of its questions."""
    if values == 1:
        return f"The special magic number for {name} is:"
    return f"The special magic numbers for {name} are:"


def _facts_and_questions(
    rng: random.Random,
    questions: int,
    known: dict[str, str],
    begin: Callable[[str], str],
    end: str,
) -> list[TaskPiece]:
    """Return all facts, each ``begin(name) + value + end``, then ``questions`` of them once more.

    A space before the value is part of the answer: tokenizers join the two.
    """
    pieces = [TaskPiece("".join(f"{begin(name)}{value}{end}" for name, value in known.items()))]
    for name in rng.sample(sorted(known), questions):
        asked = begin(name)
        stem = asked.rstrip(" ")
        answer = asked[len(stem) :] + known[name]
        pieces += [TaskPiece(f"\n{stem}"), TaskPiece(answer, True), TaskPiece(end)]
    return pieces


def _stated(name: str, value: str) -> str:
    return f"{_opening_of(name, value)} {value}.\n"


def _asked(name: str, value: str) -> list[TaskPiece]:
    return [
        TaskPiece(f"\n{_opening_of(name, value)}"),
        TaskPiece(f" {value}", True),
        TaskPiece(".\n"),
    ]


def _opening_of(name: str, value: str) -> str:
    return opening(name, 1 + value.count(","))


def _numbers(rng: random.Random, count: int, values: int = 1) -> dict[str, str]:
    return {
        name: ", ".join(_number(rng) for _ in range(values)) for name in rng.sample(NAMES, count)
    }


def _number(rng: random.Random) -> str:
    return str(rng.randint(1000, 9999))


def small_talk(rng: random.Random) -> str:
    """Draw a sentence that nothing is ever asked about."""
    subject, verb = rng.choice(_SUBJECTS), rng.choice(_VERBS)
    thing, place = rng.choice(_OBJECTS), rng.choice(_PLACES)
    return f"{rng.choice(_TIMES)} the {subject} {verb} a {thing} near the {place}.\n"
