"""Observe a stream once, beside sending its last pictures again with every question.

``python -m benchmarks.streaming`` draws streams of 18 minutes as a camera sees them, a frame a
second: a new scene every five seconds, so that four of five frames are skipped as near-duplicates.
Every two minutes a scene is numbered; the others come under ``ignore:``. Questions ask for a cell
of the picture that was numbered just now, a minute ago, ten minutes ago, and first of all. They go
to copies, so no stream holds an answer. Each way of reading gets the same scenes and questions in
turn:

- ``observe``: :meth:`mmkv.Session.observe` under a budget, each frame read once;
- ``again N``: one request with the last N scenes each time, in a full cache; N is given so that one
  holds as many bytes as ``observe``, and it is spared near-duplicates, too;
- ``again N, prefix``: the same with the prefix of the last request reused. The beginning of what is
  sent moves by N/2 scenes at a time, else no prefix would stay the same.

Times are CPU seconds of the process, on one thread.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from tqdm import tqdm

from benchmarks.quality.report import interval
from mmkv import Engine, Session
from mmkv.eval.measure.stats import mean, paired
from mmkv.resources import bundled_model
from mmkv.training.data.dialogues import IGNORE, caption, cell_question, grid
from mmkv.training.data.scenes import Scene, render
from mmkv.training.measure.record import RESULTS, write_results
from mmkv.training.measure.tables import pipe_table
from mmkv.turn import compose

MINUTES, HOLD, NOTED, LARGEST = 18, 5, 120, 3
SIMILAR = 2.0  # grey levels up to which a frame counts as the one before
# Kind of question: seconds since the picture (None: the first), and cells asked at a time.
KINDS: dict[str, tuple[int | None, int]] = {
    "now": (0, 2),
    "a minute ago": (60, 2),
    "ten minutes ago": (600, 4),
    "the beginning": (None, 3),
}
_MOST_TOKENS = 12  # of an answer
Row = dict[str, Any]


@dataclass(frozen=True)
class SeenScene:
    """A scene of the stream.

    Attributes:
        at: the second from which it is seen.
        number: by which questions call it; None: it is to be ignored.
    """

    at: int
    scene: Scene
    number: int | None

    @property
    def caption(self) -> str:
        """Return the words before it."""
        return IGNORE if self.number is None else caption(self.number)


@dataclass(frozen=True)
class StreamQuestion:
    """A question about picture ``number``, which was seen ``age`` seconds ago."""

    kind: str
    text: str
    answer: str
    number: int
    age: int


def stream(seed: str, minutes: int = MINUTES) -> list[SeenScene]:
    """Draw the scenes of a stream; at most nine are numbered, as the model knows numbers."""
    rng = random.Random(f"watch-{seed}")
    every = max(NOTED, -(-minutes * 60 // 9 // HOLD) * HOLD)
    made = []
    for at in range(0, minutes * 60, HOLD):
        noted = at % every == 0
        scene = grid(rng, "heldout", LARGEST, least=4 if noted else 1)
        made.append(SeenScene(at, scene, 1 + at // every if noted else None))
    return made


def questions(shown: Sequence[SeenScene], seed: str) -> Iterator[StreamQuestion]:
    """Ask about pictures of a stream whose latest scene is the last one of ``shown``."""
    now = shown[-1].at
    rng = random.Random(f"questions-{seed}-{now}")
    noted = {one.at: one for one in shown if one.number is not None}
    for kind, (age, count) in KINDS.items():
        at = now - age if age is not None else 0 if now in noted and now >= 2 * NOTED else -1
        if at in noted:
            yield from about(noted[at], kind, now - at, rng, count)


def about(
    shown: SeenScene, kind: str, age: int, rng: random.Random, count: int
) -> Iterator[StreamQuestion]:
    """Ask for things in ``count`` cells of a numbered picture."""
    assert shown.number is not None
    for item in rng.sample(shown.scene.items, count):
        asked = cell_question(shown.number, item.cell, item.name)
        yield StreamQuestion(kind, asked.text, asked.answer, shown.number, age)


@dataclass(frozen=True)
class Answer:
    """What the model says.

    Attributes:
        sure: the probability of the answer, all its tokens together.
        tokens: that were read for it; seconds: of the CPU, until its first token.
        nbytes: of keys and values, with the question.
    """

    text: str
    sure: float
    tokens: int
    seconds: float
    nbytes: int


@torch.inference_mode()
def answer(session: Session, text: str, parts: Sequence[Row] = ()) -> Answer:
    """Ask a session, greedily, as :meth:`mmkv.Session.send` does; the session is of no use then."""
    started = time.process_time()
    turn = compose(session, [*parts, {"type": "text", "text": text}])
    logits = session.prefill(turn.inputs)
    seconds = time.process_time() - started
    nbytes, sure, ids = session.memory().kv_bytes, 1.0, list[int]()
    while len(ids) < _MOST_TOKENS:
        chances = logits.softmax(-1)
        token = int(chances.argmax())
        sure *= float(chances[token])
        if token in session.engine.eos_token_ids:
            break
        ids.append(token)
        logits = session.decode(token)
    said = session.engine.processor.tokenizer.decode(ids).strip()
    return Answer(said, sure, turn.tokens, seconds, nbytes)


class Way(Protocol):
    """A way of reading a stream; ``tokens`` and ``seconds``: what was read between questions."""

    tokens: int
    seconds: float

    def show(self, shown: SeenScene) -> None:
        """See the next scene."""

    def ask(self, text: str) -> Answer:
        """Answer a question about what was seen."""

    def close(self) -> None:
        """Let go what is held."""


class ObservedOnce:
    """Observe each scene once; a copy of the session is asked."""

    def __init__(self, engine: Engine) -> None:
        self.session = engine.session()
        self.tokens, self.seconds = 0, 0.0
        self._places: dict[int, int] = {}

    def show(self, shown: SeenScene) -> None:
        """See a scene in every second that it lasts."""
        started = time.process_time()
        if shown.number is not None:
            self._places[shown.number] = len(self.session.pictures)
        self.tokens += self.session.observe(shown.caption).tokens
        for _ in range(HOLD):
            self.tokens += self.session.observe(render(shown.scene), skip_similar=SIMILAR).tokens
        self.seconds += time.process_time() - started

    def ask(self, text: str) -> Answer:
        """Answer a question."""
        with self.session.fork() as copy:
            return answer(copy, text)

    def held(self, number: int) -> float:
        """Return the share of a picture's entries that the memory still holds."""
        return self.session.memory().pictures[self._places[number]]

    def close(self) -> None:
        """Close the session."""
        self.session.close()


class SentAgain:
    """Send the last ``count`` scenes with every question, in a full cache."""

    def __init__(self, engine: Engine, count: int, prefix: bool = False) -> None:
        self.engine, self.count = engine, count
        self.session = engine.session() if prefix else None
        self.tokens, self.seconds = 0, 0.0
        self._last: list[SeenScene] = []

    def show(self, shown: SeenScene) -> None:
        """Remember a scene; a reused prefix grows by it, or begins anew."""
        self._last = [*self._last, shown][-self.count :]
        if self.session is None:
            return
        started = time.process_time()
        fresh = [shown]
        if len(self.session.pictures) == self.count:
            self.session.close()
            self.session, fresh = self.engine.session(), self._last[-(self.count // 2) :]
        for one in fresh:
            self.tokens += self.session.observe(one.caption).tokens
            self.tokens += self.session.observe(render(one.scene)).tokens
        self.seconds += time.process_time() - started

    def ask(self, text: str) -> Answer:
        """Answer a question."""
        if self.session is not None:
            with self.session.fork() as copy:
                return answer(copy, text)
        with self.engine.session() as session:
            parts: list[Row] = []
            started = time.process_time()
            for one in self._last:
                parts.append({"type": "text", "text": f"{one.caption}\n"})
                parts.append({"type": "image", "image": render(one.scene)})
            drawn = time.process_time() - started
            made = answer(session, text, parts)
            return replace(made, seconds=made.seconds + drawn)

    def close(self) -> None:
        """Close what is open."""
        if self.session is not None:
            self.session.close()


def ways(engines: Mapping[str, Engine], counts: Sequence[int]) -> dict[str, Way]:
    """Begin a stream in every way."""
    made: dict[str, Way] = {"observe": ObservedOnce(engines["observe"])}
    for number, count in enumerate(counts):
        made[f"again {count}"] = SentAgain(engines["full"], count)
        if not number:
            made[f"again {count}, prefix"] = SentAgain(engines["full"], count, prefix=True)
    return made


def read(engines: Mapping[str, Engine], counts: Sequence[int], seed: str, minutes: int) -> Row:
    """Read one stream in every way.

    Returns:
        ``asked``: per question and way what came out; ``reading``: per way ``[tokens, seconds]``.
    """
    going = ways(engines, counts)
    shown = stream(seed, minutes)
    asked: list[Row] = []
    for index, scene in enumerate(shown):
        for way in going.values():
            way.show(scene)
        for question in questions(shown[: index + 1], seed):
            row: Row = {"kind": question.kind}
            for name, way in going.items():
                said = way.ask(question.text)
                row[name] = {**asdict(said), "right": said.text == question.answer}
            watching = going["observe"]
            assert isinstance(watching, ObservedOnce)
            row["observe"]["held"] = watching.held(question.number)
            asked.append(row)
    reading = {name: [way.tokens, way.seconds] for name, way in going.items()}
    for way in going.values():
        way.close()
    return {"seed": seed, "asked": asked, "reading": reading}


def separation(scores: Sequence[float], right: Sequence[bool]) -> float:
    """Return how often a right answer has a higher score than a wrong one (the area under ROC)."""
    good = np.array([s for s, r in zip(scores, right, strict=True) if r])
    bad = np.array([s for s, r in zip(scores, right, strict=True) if not r])
    if not (len(good) and len(bad)):
        return float("nan")
    gap = good[:, None] - bad
    return float(((gap > 0) + 0.5 * (gap == 0)).mean())


def summarise(streams: Sequence[Row], minutes: int) -> Row:
    """Compute accuracy by kind, cost, paired differences, and what tells that an answer is wrong.

    Args:
        streams: what :func:`read` returned.
    """
    names = list(streams[0]["reading"])

    def sums(name: str, kind: str) -> list[float]:
        return [
            float(sum(row[name]["right"] for row in one["asked"] if row["kind"] == kind))
            for one in streams
        ]

    every = [row for one in streams for row in one["asked"]]
    found: Row = {"questions": {}, "ways": {name: {"right": {}} for name in names}, "tests": []}
    for kind in KINDS:
        counts = [float(sum(row["kind"] == kind for row in one["asked"])) for one in streams]
        if not all(counts):
            continue
        found["questions"][kind] = int(sum(counts))
        first = sums(names[0], kind)
        for name in names:
            found["ways"][name]["right"][kind] = asdict(mean(sums(name, kind), counts))
            if name != names[0]:
                gap = asdict(paired(first, sums(name, kind), counts))
                found["tests"].append({"of": f"{names[0]} - {name}", "kind": kind, **gap})
    for name in names:
        said = [row[name] for row in every]
        tokens, seconds = np.sum([one["reading"][name] for one in streams], 0)
        length = len(streams) * minutes * 60
        found["ways"][name] |= {
            "first_token_ms": 1e3 * float(np.median([one["seconds"] for one in said])),
            "tokens_per_question": float(np.mean([one["tokens"] for one in said])),
            "mean_bytes": float(np.mean([one["nbytes"] for one in said])),
            "most_bytes": max(one["nbytes"] for one in said),
            "tokens_between_per_second": float(tokens) / length,
            "cpu_ms_between_per_second": 1e3 * float(seconds) / length,
        }
    said = [row["observe"] for row in every]
    right = [one["right"] for one in said]
    found["told_wrong_from_right"] = {
        "by_probability": separation([one["sure"] for one in said], right),
        "by_share_held": separation([one["held"] for one in said], right),
        "unsure": {
            str(least): {
                "of_wrong": float(np.mean([o["sure"] < least for o in said if not o["right"]])),
                "of_right": float(np.mean([o["sure"] < least for o in said if o["right"]])),
            }
            for least in (0.5, 0.8, 0.9, 0.95)
        }
        if not all(right) and any(right)
        else {},
    }
    return found


def markdown(found: Row) -> str:
    """Tabulate it."""
    kinds = list(found["questions"])
    costs = ("ms to first token", "tokens read", "KV bytes", "CPU ms a second, between")
    rows = [
        (
            name,
            *(interval(way["right"][kind]) for kind in kinds),
            f"{way['first_token_ms']:.1f}",
            f"{way['tokens_per_question']:.0f}",
            f"{way['mean_bytes']:,.0f}",
            f"{way['cpu_ms_between_per_second']:.1f}",
        )
        for name, way in found["ways"].items()
    ]
    tests = [
        (test["of"], test["kind"], interval(test, sign=True), f"{test['p']:.4f}")
        for test in found["tests"]
    ]
    asked = ", ".join(f"{count} {kind}" for kind, count in found["questions"].items())
    first, second = (
        pipe_table(("way", *kinds, *costs), rows),
        pipe_table(("difference", "about", "share right", "p"), tests),
    )
    return f"Questions: {asked}.\n\n{first}\n\n{second}\n"


def engines_for(budget: float) -> dict[str, Engine]:
    """Load the bundled model twice: under the default policy, and with a full cache."""
    options: Row = {"device": "cpu", "dtype": "float32"}
    model = bundled_model()
    return {
        "observe": Engine.from_pretrained(model, budget=budget, **options),
        "full": Engine.from_pretrained(model, policy="full", **options),
    }


@functools.cache
def engines_of_process(budget: float) -> dict[str, Engine]:
    """Load the engines once in each process."""
    torch.set_num_threads(1)
    return engines_for(budget)


def read_alone(budget: float, counts: Sequence[int], minutes: int, seed: str) -> Row:
    """Do as :func:`read` in a process of its own."""
    return read(engines_of_process(budget), counts, seed, minutes)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.streaming", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--streams", type=int, default=10, help="of each seed")
    parser.add_argument("--seeds", nargs="+", default=["0", "1"])
    parser.add_argument("--minutes", type=int, default=MINUTES)
    parser.add_argument("--budget", type=float, default=64)
    parser.add_argument(
        "--again", type=int, nargs="+", default=[4, 24], help="scenes that are sent again"
    )
    parser.add_argument("--workers", type=int, default=1, help="processes, of one thread each")
    parser.add_argument("--output", type=Path, default=RESULTS / "streaming-tiny-vlm.json")
    args = parser.parse_args(arguments)
    names = [f"{seed}-{index}" for index in range(args.streams) for seed in args.seeds]
    one = functools.partial(read_alone, args.budget, tuple(args.again), args.minutes)
    with ProcessPoolExecutor(args.workers, multiprocessing.get_context("spawn")) as pool:
        streams = list(tqdm(pool.map(one, names), total=len(names)))
    found = summarise(streams, args.minutes)
    found["by_seed"] = {
        seed: summarise([s for s in streams if s["seed"].startswith(f"{seed}-")], args.minutes)[
            "ways"
        ]
        for seed in args.seeds
    }
    print(markdown(found))
    asked = {name: str(value) for name, value in vars(args).items() if name != "output"}
    write_results(args.output, asked, found)


if __name__ == "__main__":
    main()
