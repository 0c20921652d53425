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
:func:`needle_chat`: DBTrimKV's training set of needles, 4k to 200k tokens of any tokenizer.
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


NEEDLE_ROWS = {"train": 5117, "heldout": 200}  # arXiv 2605.09649, appendix B.3
NEEDLE_TOKENS = (4_000, 200_000)
_MOST_KEYS, _MOST_VALUES, _MOST_QUERIES = 16, 8, 8
_HELD_OUT_NEEDLES = (8, 4, 4)  # keys, values to a key, queries (B.3)
_AROUND = 64  # tokens that a chat template may add


def needle_chat(
    seed: int, split: Split, tokens: tuple[int, int], count: Callable[[list[str]], list[int]]
) -> tuple[str, str]:
    """Make question and reply of a needle test with several keys, values and queries at once.

    The training set of DBTrimKV's needle experiment (arXiv 2605.09649, appendix B.3) holds 5,117
    such texts of 4k to 200k tokens with random numbers of keys, values and queries, its test set
    200 with 8, 4 and 4. How the numbers are drawn is not stated: here uniformly, the length
    log-uniformly. The paper hides its needles in essays, here they stand among invented sentences.

    Args:
        seed: of the text, which is a function of the arguments alone.
        tokens: shortest and longest text; one is at most a few percent shorter than its length.
        count: tokens of each of some texts, without markers for beginning and end.

    Raises:
        ValueError: the needles alone are longer than the text may be.
    """
    rng = random.Random(f"niah-{split}-{seed}")
    low, high = tokens
    length = int(low * (high / low) ** rng.random())
    keys, values, queries = _HELD_OUT_NEEDLES
    if split == "train":
        keys, values = rng.randint(1, _MOST_KEYS), rng.randint(1, _MOST_VALUES)
        queries = rng.randint(1, min(keys, _MOST_QUERIES))
    names = rng.sample([f"{thing}-{place}" for thing in _OBJECTS for place in _PLACES], keys)
    known = {name: [str(rng.randint(10**6, 10**7 - 1)) for _ in range(values)] for name in names}
    needles = [
        f"One of the special magic numbers for {name} is: {value}.\n"
        for name in names
        for value in known[name]
    ]
    asked = rng.sample(names, queries)
    opening = "Read the text and remember the special magic numbers in it.\n\n"
    question = f"\nWhat are all special magic numbers for {', '.join(asked)} in the text?"
    reply = "\n".join(f"{name}: {', '.join(known[name])}" for name in asked)
    left = length - _AROUND - sum(count([opening, question, reply, *needles]))
    if left < 0:
        raise ValueError(f"{keys * values} needles do not fit in {length} tokens")
    lines = _filling(left, rng, count)
    places = sorted(rng.randint(0, len(lines)) for _ in needles)
    rng.shuffle(needles)
    for needle, place in zip(reversed(needles), reversed(places), strict=True):
        lines.insert(place, needle)
    return opening + "".join(lines) + question, reply


def _filling(tokens: int, rng: random.Random, count: Callable[[list[str]], list[int]]) -> list[str]:
    """Return as many invented sentences as fit into so many tokens."""
    lines: list[str] = []
    while tokens > 0:
        some = [small_talk(rng) for _ in range(256)]
        for line, size in zip(some, count(some), strict=True):
            tokens -= size
            if tokens < 0:
                break
            lines.append(line)
    return lines


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
