"""Make dialogues over several sessions: facts are stated, later replaced, and asked.

*text*: numbered sessions of small talk state magic numbers. Some replace a number of an earlier
session, and some belong to people that no question names. *scenes*: every session shows pictures
under ``ignore:`` and a numbered one, which may replace an earlier picture of the same number. The
newest value is right. No number and no cell is asked twice, because a question with its answer
states the fact again. Memory is cut to the budget before each question.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from benchmarks.documents import Document, TextBuilder, scene_document
from mmkv.engine.errors import InputError
from mmkv.prompt.processing import Processor
from mmkv.training.data.dialogues import IGNORE, caption, cell_question, grid
from mmkv.training.data.examples import require_scene_tokens
from mmkv.training.data.scenes import EMPTY, Item, Scene, SceneTurn
from mmkv.training.data.text_tasks import NAMES, opening, small_talk
from mmkv.training.measure.teacher_forced import spans

Kind = Literal["new", "kept", "updated"]
KINDS: tuple[Kind, ...] = ("new", "kept", "updated")
# Defaults of a domain: sessions, things to remember, distractors
# in each session (sentences of small talk, or ignored pictures).
SIZES = {"text": (6, 6, 5), "scenes": (6, 4, 3)}
_UPDATES = 0.4  # share of the statements that replace an earlier one, once there is one


@dataclass(frozen=True)
class Asked:
    """One answer: what was asked, and how old its fact is.

    Attributes:
        kind: ``new``: stated in this session for the first time; ``kept``: in an earlier one, and
            never replaced; ``updated``: it has replaced an earlier value.
        answer: its token ids. stale: those of the value it replaced, or empty.
    """

    kind: Kind
    answer: tuple[int, ...]
    stale: tuple[int, ...]

    def generated_stale(self, wrong: list[list[int]]) -> bool:
        """Return whether what was generated first turned from the truth to the replaced value.

        Args:
            wrong: (index, generated id) of the answer's wrong tokens, in order.
        """
        if not wrong or not self.stale:
            return False
        index, generated = wrong[0]
        return self.stale[:index] == self.answer[:index] and self.stale[index : index + 1] == (
            generated,
        )


@dataclass(frozen=True)
class SessionTask:
    """A kind of dialogue."""

    domain: str
    sessions: int
    things: int
    distractors: int

    @property
    def name(self) -> str:
        """Return the name for ``benchmarks.domains``."""
        return f"sessions:{self.domain}:{self.sessions}:{self.things}:{self.distractors}"

    @classmethod
    def parse(cls, name: str) -> SessionTask:
        """Parse the kind of dialogue from ``name``.

        Raises:
            InputError: not such a name, or sizes out of range.
        """
        try:
            _, domain, *numbers = name.split(":")
            made = cls(domain, *map(int, numbers))
        except (ValueError, TypeError):
            raise InputError(
                f"no sessions {name!r}; write sessions:DOMAIN:SESSIONS:THINGS:DISTRACTORS"
            ) from None
        if made.domain not in SIZES:
            raise InputError(f"no sessions in {domain!r}; choose one of {', '.join(SIZES)}")
        if made.sessions < 1 or made.things < 1 or made.distractors < 0:
            raise InputError(f"{name}: at least one session and one thing to remember")
        if made.things > len(NAMES) // 2:
            raise InputError(f"{made.things} things; at most {len(NAMES) // 2} have names")
        return made


@dataclass
class _Fact:
    """The current value of a fact, the one before it, when it was stated, and what was asked."""

    value: Any
    before: Any
    session: int
    asked: set[Any] = field(default_factory=set)

    def unasked(self) -> list[Item]:
        """List the things of a picture that may still be asked about."""
        return [item for item in self.value.items if item not in self.asked]

    def kind(self, session: int) -> Kind:
        if self.before is not None:
            return "updated"
        return "new" if self.session == session else "kept"


def maker(name: str, model: str, processor: Processor) -> Callable[[int], Document]:
    """Return what makes dialogue n of :attr:`SessionTask.name` (``benchmarks.domains``)."""
    kind = SessionTask.parse(name)
    if kind.domain == "text":
        return lambda index: _text(kind, index, processor.tokenizer)
    require_scene_tokens(processor, model)
    return lambda index: _scenes(kind, index, processor.tokenizer)


def _text(kind: SessionTask, index: int, tokenizer: Any) -> Document:
    rng = random.Random(f"{kind.name}-{index}")
    text = TextBuilder(tokenizer)
    names = rng.sample(NAMES, kind.things + len(NAMES) // 2)
    people, strangers = names[: kind.things], names[kind.things :]
    known: dict[str, _Fact] = {}
    notes: list[Asked] = []

    def ask(name: str, session: int) -> None:
        fact = known[name]
        fact.asked.add(fact.value)
        text.add_cut()
        text.add(f"\n{opening(name)}")
        where = text.add_answer(f" {fact.value}")
        stale = () if fact.before is None else tuple(text.tokens(f" {fact.before}"))
        answer = tuple(text.ids[where.start : where.stop])
        text.add(".\n")
        notes.append(Asked(fact.kind(session), answer, stale))

    for session in range(1, kind.sessions + 1):
        lines = [small_talk(rng) for _ in range(kind.distractors)]
        for name in _stated(rng, people, list(known), 2):
            old = known.get(name)
            before = old.value if old else None
            value = _number(rng, before)
            known[name] = _Fact(value, before, session)
            lines.insert(rng.randint(0, len(lines)), f"{opening(name)} {value}.\n")
        stranger = f"{opening(rng.choice(strangers))} {_number(rng, None)}.\n"
        lines.insert(rng.randint(0, len(lines)), stranger)
        text.add(f"\nSession {session}.\n" + "".join(lines))
        waiting = [name for name in known if not known[name].asked]
        ask(rng.choice(waiting), session)
    for name in rng.sample(list(known), len(known)):
        if not known[name].asked:
            ask(name, kind.sessions)
    return Document(text.example(), notes)


def _stated(rng: random.Random, names: list[str], known: list[str], count: int) -> list[str]:
    """Draw the people a session speaks about, new ones and known ones."""
    chosen: list[str] = []
    for _ in range(count):
        old = [name for name in known if name not in chosen]
        new = [name for name in names if name not in known and name not in chosen]
        pool = old if old and (not new or rng.random() < _UPDATES) else new
        if pool:
            chosen.append(rng.choice(pool))
    return chosen


def _number(rng: random.Random, other: str | None) -> str:
    """Draw four digits whose first differs from that of the other number."""
    while True:
        made = str(rng.randint(1000, 9999))
        if other is None or made[0] != other[0]:
            return made


def _scenes(kind: SessionTask, index: int, tokenizer: Any) -> Document:
    rng = random.Random(f"{kind.name}-{index}")
    known: dict[int, _Fact] = {}
    turns: list[SceneTurn] = []
    about: list[tuple[_Fact, str, int]] = []

    def ask(number: int, session: int, shown: list[tuple[str, Scene]]) -> None:
        fact = known[number]
        item = rng.choice(fact.unasked())
        fact.asked.add(item)
        stale = "" if fact.before is None else fact.before.at(*item.cell)
        if stale == EMPTY:  # also the answer of a model that remembers nothing
            stale = ""
        question = cell_question(number, item.cell, item.name, fact.kind(session))
        turns.append(SceneTurn(tuple(s for _, s in shown), question, tuple(c for c, _ in shown)))
        about.append((fact, stale, session))

    for session in range(1, kind.sessions + 1):
        shown = [(IGNORE, grid(rng, "heldout")) for _ in range(kind.distractors)]
        update = known and (len(known) == kind.things or rng.random() < _UPDATES)
        number = rng.choice(list(known)) if update else len(known) + 1
        old = known.get(number)
        before = old.value if old else None
        known[number] = _Fact(_other_grid(rng, before), before, session)
        shown.insert(rng.randint(0, len(shown)), (caption(number), known[number].value))
        ask(rng.choice([n for n in known if known[n].unasked()]), session, shown)
    for number in rng.sample(list(known), len(known)):
        if known[number].unasked():
            ask(number, kind.sessions, [])
    example = scene_document(turns, tokenizer)
    ids, notes = example["input_ids"][0].tolist(), []
    for (fact, stale, session), (start, stop) in zip(
        about, spans(example["labels"][0].tolist()), strict=True
    ):
        old_ids = tuple(tokenizer.encode(stale, add_special_tokens=False)) if stale else ()
        answer = tuple(ids[start:stop])
        notes.append(Asked(fact.kind(session), answer, old_ids))
    return Document(example, notes)


def _other_grid(rng: random.Random, other: Scene | None) -> Scene:
    """Draw a held-out grid, of the size of ``other`` and with other things in it if given."""
    while True:
        made = grid(rng, "heldout")
        if other is None:
            return made
        places = {(item.x, item.y, item.name.split()[0]) for item in other.items}
        same_size = (made.rows, made.columns) == (other.rows, other.columns)
        if same_size and not any(
            (item.x, item.y, item.name.split()[0]) in places for item in made.items
        ):
            return made
