"""Thoughts of replies: their entries are forgotten, and a budget ends them.

Right values: token counts by hand (the tokenizer has one token a byte or marker), and a sequence
that is fed the same tokens and told what to forget.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken
from transformers import AutoTokenizer

import mmkv.reply
from mmkv import Engine, Sampling, Session
from mmkv.calls.parser import ThoughtMarks
from mmkv.engine.errors import InputError
from mmkv.reply import Reply
from mmkv.scheduler.conversation import CachedConversation
from mmkv.scheduler.replies import ReplyJob, batch_scheduler, message
from mmkv.thoughts import Thought
from tests.mmkv.prompt.test_held import OPENED, THOUGHTS, with_template
from tests.support.chat_models import CHATML, byte_tokenizer, save_llama, script, watch

SHOWN = CHATML + "{# never leaves </think> out #}"
# With thinking switched off, as Qwen3's.
CLOSED = THOUGHTS.replace(
    "<|im_start|>assistant\n{% endif %}",
    "<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}",
)
MARKS = ThoughtMarks("<think>", "</think>")


def count(text: str) -> int:
    return len(byte_tokenizer()(text)["input_ids"])


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def engines(llama: Path) -> Callable[..., Engine]:
    made: dict[tuple[Any, ...], Engine] = {}

    def engine(policy: str, budget: int | None = None) -> Engine:
        if (policy, budget) not in made:
            made[policy, budget] = Engine.from_pretrained(
                llama, policy=policy, budget=budget, dtype="float32", gates="random"
            )
        return made[policy, budget]

    return engine


def flat(session: Any) -> list[list[int]]:
    return [row.tolist() for layer in session.retained() for row in layer]


# template, first reply, what stands of it when it is forgotten, by hand: text before and in it.
TURNS = {
    "thoughts": (THOUGHTS, "<think>\nwell\n</think>\n\nhi", "", "<think>\nwell\n</think>"),
    "blank first": (THOUGHTS, "\n<think>x</think>y", "\n", "<think>x</think>"),
    "opened": (OPENED, "well\n</think>\n\nhi", "", "well\n</think>"),
    "repeated": (
        OPENED,
        "<think>\nwell</think>\n</think>hi",
        "",
        "<think>\nwell</think>\n</think>",
    ),
    "after all": (CLOSED, "<think>well</think>hi", "", "<think>well</think>"),
    "shown": (SHOWN, "<think>well</think>hi ", "", "<think>well</think>"),
    "closed": (CLOSED, "hi", "", ""),
}
POLICIES = [
    ("full", None),
    ("dbtrimkv", 20),
    ("streamingllm", 20),
    ("h2o", 20),
    ("snapkv:window=4", 20),
]


# Every kind, and every policy with the first of them.
@pytest.mark.parametrize(
    ("kind", "policy", "budget"),
    [(kind, *POLICIES[at % 5]) for at, kind in enumerate(TURNS)]
    + [("thoughts", *each) for each in POLICIES[1:]],
)
def test_a_thought_is_forgotten_and_nothing_read_again(
    engines: Callable[..., Engine],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    policy: str,
    budget: int | None,
) -> None:
    template, reply, before, thought = TURNS[kind]
    engine = engines(policy, budget)
    with_template(engine, template)
    script(monkeypatch, engine, [reply, "z"])
    opening = {OPENED: "<think>\n", CLOSED: "<think>\n\n</think>\n\n"}.get(template, "")
    first = f"<|im_start|>user\na question<|im_end|>\n<|im_start|>assistant\n{opening}"
    second = f"<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n{opening}"
    tokenizer = engine.processor.tokenizer
    with engine.session() as session, engine.session() as plain:
        session.forget_thoughts = True
        fed = watch(monkeypatch)
        list(session.send("a question"))
        assert tokenizer.decode(fed) == first + reply
        answer = reply[len(before + thought) :].lstrip()
        assert session.history[-1] == {"role": "assistant", "content": answer}
        assert session.last is not None and session.last.text == reply
        said = None if kind == "closed" else "x" if kind == "blank first" else "well"
        assert session.last.reasoning == said
        plain.prefill({"input_ids": torch.tensor([tokenizer(first)["input_ids"]])})
        for token in tokenizer(reply)["input_ids"]:
            plain.decode(token)
        start = count(first) - count(opening) + count(before)
        stop = count(first) + count(before + thought)
        if kind == "closed":
            stop -= count("\n\n")
        held = plain.memory()
        plain.forget(start, stop)
        assert flat(session) == flat(plain)
        mine, theirs = session.memory(), plain.memory()
        assert mine.kv_bytes == theirs.kv_bytes <= held.kv_bytes
        assert mine.evicted == theirs.evicted > held.evicted
        assert mine.differs is not None and "thoughts of a reply were forgotten" in mine.differs
        fed.clear()
        list(session.send("b"))
        assert tokenizer.decode(fed) == second + "z"
        plain.prefill({"input_ids": torch.tensor([tokenizer(second)["input_ids"]])})
        plain.decode(tokenizer("z")["input_ids"][0])
        if opening:  # nothing but z was said: its thought is open, or empty
            assert session.last.prompt_tokens == count(second)
        if template != CLOSED:
            assert flat(session) == flat(plain)
        assert session.note is None
        engine.cache.check()


@pytest.fixture
def engine(engines: Callable[..., Engine]) -> Engine:
    made = engines("full")
    with_template(made, THOUGHTS)
    return made


def test_undo_forks_and_files_keep_what_was_forgotten(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script(monkeypatch, engine, ["<think>a</think>x", "<think>b</think>y", *"zzzz"])
    with engine.session() as session:
        session.undo_depth, session.forget_thoughts = 2, True
        list(session.send("one"))
        kept, seen = flat(session), session.seen
        list(session.send("two"))
        differs = session.memory().differs
        assert differs is not None and "thoughts of 2 replies" in differs
        session.save(tmp_path / "s.mmkv")
        with session.fork() as fork, Session.load(engine, tmp_path / "s.mmkv") as loaded:
            assert fork.forget_thoughts and not loaded.forget_thoughts  # as rewrites
            assert fork.memory().differs == loaded.memory().differs == differs
            for one in (fork, loaded):
                one.forget_thoughts = True
            list(session.send("three"))
            for one in (fork, loaded):
                assert list(one.send("three")) == ["z"]
                assert flat(one) == flat(session)
                assert one.memory() == session.memory()
        assert session.undo() and session.undo()
        assert (flat(session), session.seen) == (kept, seen)
        assert "thoughts of a reply" in str(session.memory().differs)
        list(session.send("two"))
        assert session.history[1]["content"] == "x"


def test_a_thought_that_is_not_over_stays(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    script(monkeypatch, engine, ["<think>never said"])
    with engine.session() as session:
        session.forget_thoughts = True
        list(session.send("one", sampling=Sampling(max_new_tokens=12)))
        assert session.memory().evicted == 0 and session.memory().differs is None
        assert session.history[-1]["content"] == "<think>never"
    script(monkeypatch, engine, ["<think>a</think>"])
    with engine.session() as session:
        session.forget_thoughts = True
        # Its last token comes with the next prompt.
        thought = len("<think>a</think>")
        list(session.send("one", sampling=Sampling(max_new_tokens=thought)))
        assert session.memory().evicted == 0
    script(monkeypatch, engine, ["<think>a</think>xyz"])
    with engine.session() as session:  # that of the answer comes, the thought goes as a whole
        session.forget_thoughts = True
        list(session.send("one", sampling=Sampling(max_new_tokens=thought + 2)))
        assert session.last is not None
        begin = session.last.prompt_tokens
        left = [*range(begin), *range(begin + thought, session.seen)]
        assert all(row.tolist() == left for layer in session.retained() for row in layer)


def test_a_reply_that_is_broken_off_forgets_a_thought_that_is_over(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(monkeypatch, engine, ["<think>b</think>y and so on"])
    with engine.session() as session:
        session.forget_thoughts = True
        stream = session.send("two")
        shown = ""
        while "y" not in shown:
            shown += next(stream)
        stream.close()
        assert session.memory().evicted == len("<think>b</think>") * engine.spec.rows


def test_going_back_for_another_reason_keeps_its_place(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The template shows a number that counts the messages: all is read again, without thoughts."""
    with_template(engine, "{{ messages | length }}|" + THOUGHTS)
    script(monkeypatch, engine, ["<think>a</think>x", "<think>b</think>y", "z"])
    with engine.session() as session:
        session.forget_thoughts = True
        fed = watch(monkeypatch)
        list(session.send("one"))
        list(session.send("two"))
        fed.clear()
        list(session.send("three"))
        said = engine.processor.tokenizer.decode(fed)
        assert said.startswith("5|<|im_start|>user\none") and "think" not in said
        assert session.memory().differs is None  # it holds what a fresh rendering has


def test_a_session_goes_back_to_what_stands_before_a_forgotten_thought(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last message changes from turn to turn, so that what stays ends inside the talk."""
    source = THOUGHTS.replace(
        "{% if m.content is not string %}",
        "{% if m.role == 'user' and loop.last %}!{% endif %}{% if m.content is not string %}",
    )
    with_template(engine, source)
    script(monkeypatch, engine, ["<think>a</think>x", "<think>b</think>y", "z"])
    tokenizer = engine.processor.tokenizer
    with engine.session() as session, engine.session() as fresh:
        session.forget_thoughts = True
        list(session.send("one"))
        list(session.send("two"))
        list(session.send("three"))
        talk = [("user", "one"), ("assistant", "x"), ("user", "two"), ("assistant", "y")]
        talk += [("user", "three")]
        ids = tokenizer.apply_chat_template(
            [{"role": role, "content": text} for role, text in talk],
            chat_template=source,
            add_generation_prompt=True,
        )["input_ids"]
        assert session.seen == len(ids) + 1
        fresh.prefill({"input_ids": torch.tensor([ids])})
        fresh.decode(tokenizer("z")["input_ids"][0])
        assert flat(session) == flat(fresh) and session.memory().differs is None


@pytest.mark.parametrize("template", [THOUGHTS, OPENED])
def test_a_session_goes_back_over_a_forgotten_thought(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    """The template shows an earlier answer in other words, from its middle on."""
    shown = "text.split('</think>')[-1].lstrip('\n')"
    source = template.replace(shown, f"({shown} | replace('one', 'two'))")
    assert source != template
    with_template(engine, source)
    begun = "" if template == OPENED else "<think>"
    script(monkeypatch, engine, [f"{begun}a</think>the answer is one", "z"])
    tokenizer = engine.processor.tokenizer
    with engine.session() as session, engine.session() as fresh:
        session.forget_thoughts = True
        list(session.send("a question"))
        list(session.send("b"))
        talk = [("user", "a question"), ("assistant", "the answer is two"), ("user", "b")]
        ids = tokenizer.apply_chat_template(
            [{"role": role, "content": text} for role, text in talk],
            chat_template=source,
            add_generation_prompt=True,
        )["input_ids"]
        assert session.seen == len(ids) + 1 and session.memory().differs is None
        stays = "<|im_start|>user\na question<|im_end|>\n<|im_start|>assistant\n"
        assert session.last is not None
        assert session.last.prompt_tokens == len(ids) - count(stays)
        letter = tokenizer("z")["input_ids"][0]
        fresh.prefill({"input_ids": torch.tensor([ids])})
        fresh.decode(letter)
        assert flat(session) == flat(fresh)
        torch.testing.assert_close(
            session.decode(letter), fresh.decode(letter), atol=1e-5, rtol=1e-5
        )


def test_a_scheduler_forgets_as_well(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    script(monkeypatch, engine, ["<think>a</think>x", "z"])
    kept = CachedConversation(engine)
    session = kept.wake()
    session.forget_thoughts = True
    scheduler = batch_scheduler(engine, 1)

    def asks(text: str) -> Reply:
        job = ReplyJob(engine, message(text), session=kept)
        scheduler.submit(job)
        while scheduler.turn():
            pass
        assert job.reply is not None
        return job.reply

    reply = asks("one")
    assert (reply.reasoning, reply.content) == ("a", "x")
    memory = session.memory()
    assert reply.memory == memory
    assert memory.evicted == len("<think>a</think>") * engine.spec.rows
    again = "<|im_end|>\n<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n"
    assert asks("two").prompt_tokens == count(again)
    scheduler.close()


# A thought of N tokens: when it has as many, its end is written for the model.


class Thinker:
    """Draws what a model would say that never ends its thought, token by token."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, text: str, answer: str) -> None:
        self._next = byte_tokenizer()(text)["input_ids"]
        self._answer = byte_tokenizer()(answer)["input_ids"] + [byte_tokenizer().eos_token_id]
        self.drawn = 0
        monkeypatch.setattr(mmkv.reply.Sampler, "draw", lambda *_: self.draw())

    def draw(self) -> int:
        self.drawn += 1
        return self._next.pop(0)

    def answer(self) -> None:
        self._next = self._answer


@pytest.mark.parametrize("kind", ["begun by the model", "opened by the prompt"])
@pytest.mark.parametrize("budget", [0, 1, 2, 5, 11, 12, 13])
def test_a_thought_has_so_many_tokens_and_ends(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, kind: str, budget: int
) -> None:
    opened = kind == "opened by the prompt"
    with_template(engine, OPENED if opened else THOUGHTS)
    thought = "line one\nand then it goes on and on"
    thinker = Thinker(monkeypatch, ("" if opened else "<think>") + thought, "yes")
    closed = thought[:budget]
    # A line of its own: no second newline where the thought has just begun a line.
    line = closed.endswith("\n") or (opened and not budget)
    end = ("" if line else "\n") + "</think>\n\n"
    with engine.session() as session:
        fed = watch(monkeypatch)
        shown = ""
        for piece in session.send("a", sampling=Sampling(thinking_budget=budget)):
            shown += piece
            if shown.endswith(end):
                assert thinker.drawn == budget + (0 if opened else len("<think>"))
                thinker.answer()
        last = session.last
        assert last is not None and last.finish_reason == "eos"
        assert last.text == ("" if opened else "<think>") + closed + end + "yes"
        assert (last.reasoning, last.content) == (closed.strip() or None, "yes")
        assert engine.processor.tokenizer.decode(fed).endswith(last.text)


@pytest.mark.parametrize(
    ("said", "reasoning", "content"),
    [
        ("<think>no</think>yes", "no", "yes"),
        ("yes <think>", None, "yes <think>"),
        ("<thin", None, "<thin"),
        ("<think>\nno", "no", ""),
        ("<think></think>", None, ""),
    ],
)
def test_a_thought_that_ends_by_itself_is_left_alone(
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    said: str,
    reasoning: str | None,
    content: str,
) -> None:
    script(monkeypatch, engine, [said] * 2)
    for sampling in (Sampling(), Sampling(thinking_budget=8 + 7)):
        with engine.session() as session:
            list(session.send("a", sampling=sampling))
            assert session.last is not None and session.last.text == said
            assert (session.last.reasoning, session.last.content) == (reasoning, content)


@pytest.mark.parametrize("special", [False, True])
def test_marks_that_are_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, special: bool
) -> None:
    """As Qwen3's; special ones are shown in no text."""
    folder = save_llama(tmp_path, THOUGHTS, vocab_size=300)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    added = [AddedToken(mark, special=special) for mark in (MARKS.open, MARKS.close)]
    tokenizer.add_tokens(added, special_tokens=special)
    tokenizer.save_pretrained(folder)
    begins, ends = tokenizer.convert_tokens_to_ids([MARKS.open, MARKS.close])
    engine = Engine.from_pretrained(folder, policy="full", dtype="float32", forget_thoughts=True)
    letter, end = token_of("o"), tokenizer.eos_token_id
    draws = [begins, letter, letter, letter, letter, end]
    monkeypatch.setattr(mmkv.reply.Sampler, "draw", lambda *_: draws.pop(0))
    with engine.session() as session:
        list(session.send("a", sampling=Sampling(thinking_budget=3)))
        last = session.last
        assert last is not None
        line = token_of("\n")
        assert last.token_ids == [begins, *[letter] * 3, line, ends, line, line, letter]
        shown = "ooo\n\n\no" if special else "<think>ooo\n</think>\n\no"
        assert last.text == shown and (last.reasoning, last.content) == ("ooo", "o")
        assert session.memory().evicted == 6 * engine.spec.rows  # both marks, ooo and a line
        before = session.seen
        draws[:] = [letter, end]
        list(session.send("b"))
        again = "<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\no"
        assert session.seen == before + count(again)
    draws[:] = [begins, letter, ends, letter, end]
    look = {"name": "look", "parameters": {"type": "object"}}
    with engine.session() as session:
        shown = list(session.send("a", tools=[{"type": "function", "function": look}]))
        assert "".join(shown) == "<think>\no\n</think>\n\no"
        assert session.last is not None
        assert (session.last.reasoning, session.last.content) == ("o", "o")
        assert session.history[-1]["content"] == "o"


def token_of(letter: str) -> int:
    (token,) = byte_tokenizer()(letter)["input_ids"]
    return token


def test_a_prefix_opens_a_thought_or_stands_where_none_can_begin(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(monkeypatch, engine, ["a\n</think>\n\nx", "z", "<think>b</think>y"])
    rows = engine.spec.rows
    with engine.session() as session:
        session.forget_thoughts = True
        list(session.send("one", prefix="<think>\n", sampling=Sampling(thinking_budget=20)))
        assert session.last is not None
        assert (session.last.reasoning, session.last.content) == ("a", "x")
        assert session.history[-1]["content"] == "x"
        assert session.memory().evicted == len("<think>\na\n</think>") * rows
        list(session.send("two"))
        assert session.last.prompt_tokens == count("<|im_end|>\n<|im_start|>user\ntwo") + count(
            "<|im_end|>\n<|im_start|>assistant\n"
        )
    with engine.session() as session:
        session.forget_thoughts = True
        list(session.send("one", prefix="Well, "))
        assert session.history[-1]["content"] == "Well, <think>b</think>y"
        assert session.memory().evicted == 0 and session.memory().differs is None
        with pytest.raises(InputError, match="thinking_budget counts a thought from its beginning"):
            session.send("two", prefix="Well, ", sampling=Sampling(thinking_budget=3))


def test_a_batch_ends_each_thought_by_itself(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_template(engine, OPENED)
    letter = byte_tokenizer()("o")["input_ids"][0]
    monkeypatch.setattr(mmkv.reply.Sampler, "draw", lambda *_: letter)
    sampling = Sampling(max_new_tokens=20, thinking_budget=3)
    talks = [[{"role": "user", "content": text}] for text in ("a", "something longer")]
    for reply in engine.generate(talks, sampling):
        assert reply.text == "ooo\n</think>\n\n" + "o" * (20 - 14)
        assert reply.reasoning == "ooo"


def test_bursts_of_a_gpu_come_to_the_same(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the graph's step runs in torch, with the same bookkeeping."""
    made = []
    for burst in (False, True):
        engine = Engine.from_pretrained(
            llama, policy="dbtrimkv", gates="random", budget=20, dtype="float32", kv="int8"
        )
        with_template(engine, OPENED)
        if burst:
            monkeypatch.setattr(type(engine), "many_path", "graph")
        else:
            engine.backends.cpu.switch_off()
        with engine.session() as session:
            session.forget_thoughts = True
            for budget in (7, 0, 30):
                sampling = Sampling.greedy(max_new_tokens=48, thinking_budget=budget)
                list(session.send("a question", sampling=sampling))
                assert session.last is not None
                end = count("</think>\n\n" if not budget else "\n</think>\n\n")
                thought = engine.processor.tokenizer.decode(session.last.token_ids[: budget + end])
                assert thought.endswith("</think>\n\n")
                memory = session.memory()
                told = (memory.entries, memory.kv_bytes, memory.evicted, memory.differs)
                made.append((session.last.token_ids, flat(session), *told))
        assert (engine.backends.cuda.runner is not None) == burst
        engine.cache.check()
    assert made[:3] == made[3:]


@pytest.mark.parametrize("budget", [-1, 1.5, "many", True])
def test_a_budget_is_a_number_of_tokens(budget: Any) -> None:
    with pytest.raises((InputError, TypeError), match="thinking_budget"):
        Sampling(thinking_budget=budget)


class Words:
    """Tokens of several letters, of which one ends a mark and begins what follows."""

    def __init__(self, *tokens: str) -> None:
        self.tokens = tokens

    def of(self, token: int) -> bytes:
        return self.tokens[token].encode()


@pytest.mark.parametrize(
    ("before", "reply", "state", "span", "tokens"),
    [
        ([], ["<think>", "a", "b", "</think>"], "closed", (0, 4), None),
        ([], ["\n", " \n<", "think", ">\n", "a", "</", "think", ">\n\n"], "closed", (1, 8), None),
        (["x", "<think>", "\n"], ["a", "</think>"], "closed", (-2, 2), None),
        (["x", "\n<th", "ink>\n"], ["a", "b"], "open", (-2, 0), 2),
        (["<think>\n", "\n", "</think>\n", "\n"], ["a"], "closed", (-4, -1), None),
        (["<think>", "</think>"], ["a"], "closed", (-2, 0), None),
        (["<think>", "</think>", "."], ["<", "thin", "g"], "none", (0, 0), None),
        (["<think>"], ["<think>", "a", "</think>", "\n</th", "ink>b"], "closed", (-1, 5), None),
        (["<think>", "</think>"], ["</think>a", "</think>"], "closed", (-2, 1), None),
        ([], ["<think></think>", "\n<think>", "a", "</think>", "b"], "closed", (0, 4), None),
        (["x"], ["\n", "<think"], "begin", (1, 0), None),
        (["x"], ["<think>a", "b", "c"], "open", (0, 0), 2),
    ],
)
def test_where_a_thought_stands(
    before: list[str],
    reply: list[str],
    state: str,
    span: tuple[int, int],
    tokens: int | None,
) -> None:
    words = Words(*before, *reply)
    thought = Thought(words, MARKS, range(len(before)))  # type: ignore[arg-type]
    for token in range(len(before), len(before) + len(reply)):
        thought.push(token)
    assert (thought.state, (thought.start, thought.stop)) == (state, span)
    assert tokens is None or thought.tokens == tokens
