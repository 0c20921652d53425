"""The promise about lost answers: its limit, its file, its alarm, and what sessions do of it."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmkv import Budget, Engine, Sampling, Session
from mmkv.calibration import (
    CalibratedAnswer,
    CalibratedDialogue,
    Drift,
    doubt_of,
    fewest,
    limit_of,
    read_calibration,
    score_of,
)
from mmkv.engine.errors import ForgottenError, InputError
from tests.support.calibrated import calibration, certified
from tests.support.chat_models import picture, save_qwen3_vl

# Scores and losses are few, so that some are equal. An answer is lost at some token, or not at all.
SCORES = st.sampled_from([0.0, 0.25, 0.5, 1.0])


@st.composite
def answers(draw: st.DrawFn) -> CalibratedAnswer:
    score, at, loss = draw(SCORES), draw(SCORES), draw(st.sampled_from([0.0, 0.5, 1.0]))
    rest = [(min(at, score), 1 - loss)] if draw(st.booleans()) else []
    return CalibratedAnswer(score=score, losses=[(score, loss), *rest])


DIALOGUES = st.lists(
    st.lists(answers(), min_size=1, max_size=4).map(lambda some: CalibratedDialogue(answers=some)),
    min_size=4,
    max_size=12,
)
ALPHAS = st.sampled_from([0.2, 0.25, 0.5, 0.8])


def lost(dialogue: CalibratedDialogue, limit: float) -> Fraction:
    every = [part for answer in dialogue.answers for part in answer.losses]
    below = (Fraction(loss) for at, loss in every if at < limit)
    return sum(below, Fraction()) / len(dialogue.answers)


@given(DIALOGUES, ALPHAS)
def test_the_limit_is_the_largest_that_keeps_the_bound(
    dialogues: list[CalibratedDialogue], alpha: float
) -> None:
    tried = [0.0, 0.25, 0.5, 1.0, math.inf]
    bound = Fraction(str(alpha)) * (len(dialogues) + 1)
    kept = [at for at in tried if sum(lost(one, at) for one in dialogues) + 1 <= bound]
    assert limit_of(dialogues, alpha) == max(kept)


@given(DIALOGUES, ALPHAS)
def test_a_dialogue_left_out_loses_at_most_alpha(
    dialogues: list[CalibratedDialogue], alpha: float
) -> None:
    """Exchangeability itself: the mean over which of them is left out, whatever they are."""
    if len(dialogues) - 1 < fewest(alpha):
        return
    others = (dialogues[:at] + dialogues[at + 1 :] for at in range(len(dialogues)))
    limits = [limit_of(each, alpha) for each in others]
    found = sum(map(lost, dialogues, limits), Fraction()) / len(dialogues)
    assert found <= Fraction(str(alpha))


@pytest.mark.parametrize(("alpha", "least"), [(0.05, 19), (0.02, 49), (0.1, 9), (0.5, 1), (0.3, 3)])
def test_an_alpha_needs_so_many_dialogues(alpha: float, least: int) -> None:
    dialogue = CalibratedDialogue(answers=[CalibratedAnswer(score=0.5, losses=[])])
    assert fewest(alpha) == least and limit_of([dialogue] * least, alpha) == math.inf
    with pytest.raises(InputError, match=rf"cannot promise {alpha:g}: that takes {least} at least"):
        limit_of([dialogue] * (least - 1), alpha)


def test_a_drift_is_found_and_none_where_there_is_none() -> None:
    pytest.importorskip("scipy")
    draw = random.Random(3)
    made = calibration([[draw.random()] for _ in range(100)])
    false, steps = 0, []
    for _ in range(40):
        same, other = Drift(made), Drift(made)
        for _ in range(300):
            same.note(None, draw.random())
            other.note(None, draw.random() ** 2)
        false += same.alarm is not None
        steps.append(other.alarm)
    assert false <= 4  # of 0.05 x 40 that are expected at most
    assert None not in steps and max(filter(None, steps)) <= 256


def test_a_conversation_counts_once_for_the_drift() -> None:
    pytest.importorskip("scipy")
    drift, watched = Drift(calibration([[0.5]] * 99)), None
    for _ in range(1000):
        watched = drift.note(watched, 0.9)
    assert drift.conversations == 1 and drift.alarm is None
    drift, picks = Drift(calibration([[0.5]] * 99)), []
    for _ in range(400):
        watched = None
        for score in (0.0, 1.0, 2.0, 3.0):
            watched = drift.note(watched, score)
        picks.append(drift._picks[-1])
    other = Drift(calibration([[0.5]] * 99))  # of a file that was read later
    for _ in range(99):
        assert other.note(watched, 0.5)[1:] == (other.conversations - 1, 1)
    shares = [picks.count(score) / len(picks) for score in (0.0, 1.0, 2.0, 3.0)]
    assert all(abs(share - 0.25) < 0.08 for share in shares), shares


# Sessions.


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen3_vl(tmp_path_factory.mktemp("qwen"))


Load = Callable[..., Engine]


@pytest.fixture(scope="module")
def load(qwen: Path) -> Load:
    def loaded(**options: Any) -> Engine:
        given = {"policy": "dbtrimkv", "gates": "random", "budget": 12} | options
        return Engine.from_pretrained(qwen, dtype="float32", prefill_chunk=16, **given)

    return loaded


RED, BLUE = picture("red", (40, 32)), picture("blue", (32, 48))
TURNS: list[dict[str, Any]] = [
    {"text": "a picture, and more words than one chunk has: which?", "images": [RED]},
    {"text": "and this?", "images": [BLUE]},
    {"text": "which of both was the first one?"},
]
FEW = Sampling(max_new_tokens=8)


def asked(turns: Sequence[dict[str, Any]], replies: Sequence[str]) -> list[dict[str, Any]]:
    """Return a conversation as :meth:`Engine.generate` takes it."""
    found: list[dict[str, Any]] = []
    for at, turn in enumerate(turns):
        media = [{"type": "image", "image": one} for one in turn.get("images", ())]
        found.append({"role": "user", "content": [*media, {"type": "text", "text": turn["text"]}]})
        if at < len(replies):
            found.append({"role": "assistant", "content": replies[at]})
    return found


def talk(session: Session, turns: Sequence[dict[str, Any]] = TURNS) -> list[str]:
    return ["".join(session.send(**turn, sampling=FEW)) for turn in turns]


def test_a_doubtful_answer_is_the_full_caches(load: Load, tmp_path: Path) -> None:
    """The session itself goes on as if it had said the same."""
    engine, full = certified(load(), tmp_path, "reread"), load(policy="full", budget=None)
    plain = load()
    with engine.session() as session, plain.session() as twin:
        replies: list[str] = []
        for at, turn in enumerate(TURNS):
            replies += talk(session, [turn])
            (want,) = full.generate(asked(TURNS[: at + 1], replies[:at]), sampling=FEW)
            assert replies[-1] == want.text and session.last is not None
            # The twin says what it is made to say.
            prompt = compose_like(twin, turn)
            for token in session.last.token_ids[
                : (session.last.finish_reason != "eos" and -1) or None
            ]:
                twin.decode(token)
            end_like(twin, session, prompt)
            assert retained(session) == retained(twin)
            assert session.memory().escalated == "reread" and session.again is None
            assert any("read again" in note for note in session.notes)
        assert session.evicted > 0
        own = talk(plain.session())
        assert own != replies  # what is forgotten matters here
    control = engine.loss_control
    assert control is not None and control.answers == control.outcomes["reread"] == len(TURNS)
    assert engine.cache.pool.free_pages == engine.cache.pool.num_pages


def retained(session: Session) -> list[list[list[int]]]:
    return [[head.tolist() for head in layer] for layer in session.retained()]


def compose_like(twin: Session, turn: dict[str, Any]) -> Any:
    from mmkv.turn import compose

    prompt = compose(twin, **turn)
    twin._append(prompt, None)
    twin.begin_reply(prompt)
    return prompt


def end_like(twin: Session, session: Session, prompt: Any) -> None:
    assert session.last is not None
    twin.unfed = session.unfed
    said, ids = session.last.text, session.last.token_ids
    twin.held.add_reply(said, ids[: len(ids) - len(twin.unfed)], twin.place)
    twin.history[-1]["content"] = session.history[-1]["content"]


def test_an_answer_goes_on_from_where_it_becomes_doubtful(load: Load, tmp_path: Path) -> None:
    """Up to there it is the bounded cache's, and from there the full cache's behind that."""
    plain, full = load(), load(policy="full", budget=None)
    for text in ("one", "two", "three", "four", "five", "six"):
        turn = TURNS[0] | {"text": f"a picture, and {text} more words than one chunk has: which?"}
        prompt, doubts, own = plain.inputs(asked([turn], [])), list[float](), list[int]()
        with plain.session() as session:
            logits = session.prefill(prompt)
            for _ in range(8):
                doubts.append(doubt_of(logits))
                own.append(int(logits.argmax()))
                logits = session.decode(own[-1])
        at = doubts.index(max(doubts))
        if at > 1:
            break
    assert at > 1
    engine = certified(load(), tmp_path, "reread", limit=doubts[at], score="doubt")
    with engine.session() as session:
        talk(session, [turn])
        assert session.last is not None
        ids = session.last.token_ids
        assert session.memory().escalated == "reread"
    with full.session() as session:
        logits = session.prefill(prompt)
        for token in ids[:at]:
            logits = session.decode(token)
        for token in ids[at:]:
            assert int(logits.argmax()) == token
            logits = session.decode(token)
    assert ids[:at] == own[:at] and ids[at:] != own[at:]
    (batch,) = engine.generate(asked([turn], []), sampling=FEW)
    assert batch.token_ids == ids


@pytest.mark.parametrize("on_risk", ["say", "reread"])
def test_an_answer_below_the_limit_stays_as_it_is(load: Load, tmp_path: Path, on_risk: str) -> None:
    engine = certified(load(), tmp_path, on_risk, limit=math.inf)
    with engine.session() as session:
        assert talk(session) == talk(load().session())
        assert session.memory().escalated is None
    assert engine.loss_control is not None and engine.loss_control.escalated == 0


def test_it_is_said_or_refused(load: Load, tmp_path: Path) -> None:
    plain = load()
    said = certified(load(), tmp_path, "say")
    with said.session() as session:
        assert talk(session) == talk(plain.session())
        assert session.memory().escalated == "said"
        assert any("may be wrong" in note for note in session.notes)
    long, risks = {"text": "many more words than one chunk has, " * 9}, list[float]()
    never = certified(load(), tmp_path, "say", limit=math.inf)
    with never.session() as session:
        for each in (TURNS[0], long):
            talk(session, [each])
            assert session.weighing is not None and session.weighing.risk is not None
            risks.append(session.weighing.risk)
    assert risks[0] < risks[1] * 0.9
    refuses = certified(load(), tmp_path, "refuse", limit=risks[1])
    with refuses.session() as session, load().session() as twin:
        assert talk(session, TURNS[:1]) == talk(twin, TURNS[:1])
        before, history = retained(session), list(session.history)
        with pytest.raises(ForgottenError, match=rf"\(risk\) is {risks[1]:.3g}, and"):
            talk(session, [long])
        assert retained(session) == before == retained(twin) and session.history == history
        assert talk(session, [{"text": "so?"}]) == talk(twin, [{"text": "so?"}])


def test_what_is_not_at_hand_is_not_read_again(load: Load, tmp_path: Path) -> None:
    engine = certified(load(), tmp_path, "reread")
    with engine.session() as session:
        first = talk(session, TURNS[:1])
        session.save(tmp_path / "talk.mmkv")
    with engine.load_session(tmp_path / "talk.mmkv")[0] as session:
        talk(session, TURNS[1:2])
        assert session.memory().escalated == "not_reread"
        assert session.weighing is not None and "not at hand" in session.weighing.why
        assert any("could not be read again" in note for note in session.notes)
    assert first


def test_a_batch_reads_again_where_there_is_room(load: Load, tmp_path: Path) -> None:
    full = load(policy="full", budget=None)
    talks = [asked(TURNS, ["yes", "no"]), asked(TURNS[:2], ["no"]), asked(TURNS[:1], [])]
    want = [one.text for one in full.generate(talks, sampling=FEW)]
    engine = certified(load(), tmp_path, "reread")
    assert [one.text for one in engine.generate(talks, sampling=FEW)] == want
    page = engine.cache.pool.page_bytes
    plain = [one.text for one in load().generate(talks, sampling=FEW)]
    assert plain != want
    # As many pages as one conversation takes under its budget, and a few.
    short = certified(load(kv_limit=24 * page), tmp_path, "reread")
    found = short.generate(talks, sampling=FEW)
    assert [one.text for one in found] == plain
    assert {one.memory.escalated for one in found if one.memory} == {"not_reread"}
    for made in (engine, short):
        assert made.cache.pool.free_pages == made.cache.pool.num_pages


def test_an_answer_goes_on_where_its_second_reading_outgrows_the_memory(
    load: Load, tmp_path: Path
) -> None:
    """Up to there it is the full cache's, and from there its own."""
    question = asked([{"text": "more words than one chunk has: which?"}], [])
    many = Sampling(max_new_tokens=30)
    (whole,) = load(policy="full", budget=None).generate(question, sampling=many)
    (plain,) = load().generate(question, sampling=many)
    page = load(page_size=4).cache.pool.page_bytes
    engine = certified(load(page_size=4, kv_limit=110 * page), tmp_path, "reread")
    with engine.session() as session:
        list(session.send(question[0]["content"][0]["text"], sampling=many))
        assert session.last is not None
        found, notes = session.last.token_ids, session.notes
    assert any("could not be read again" in note for note in notes)
    assert found[:3] == whole.token_ids[:3] != plain.token_ids[:3]
    assert found != whole.token_ids and session.last.finish_reason in ("eos", "length")
    control = engine.loss_control
    assert control is not None and control.outcomes["not_reread"] == control.escalated == 1
    assert engine.cache.pool.free_pages == engine.cache.pool.num_pages


def test_an_answer_goes_on_beyond_the_context_of_its_second_reading(tmp_path: Path) -> None:
    """As one does under a budget, whose memory has no end."""
    folder = save_qwen3_vl(tmp_path / "short", positions=128)
    given: dict[str, Any] = {"dtype": "float32", "prefill_chunk": 16}
    question, many = asked([{"text": "x" * 95}], []), Sampling(max_new_tokens=25)
    full = Engine.from_pretrained(folder, policy="full", **given)
    (whole,) = full.generate(question, sampling=many)
    assert whole.finish_reason == "context"
    given |= {"policy": "dbtrimkv", "gates": "random", "budget": 12}
    engine = certified(Engine.from_pretrained(folder, **given), tmp_path, "reread")
    (found,) = engine.generate(question, sampling=many)
    with engine.session() as session:
        list(session.send("x" * 95, sampling=many))
        assert session.last is not None and session.last.token_ids == found.token_ids
    assert found.token_ids[: len(whole.token_ids)] == whole.token_ids
    assert found.finish_reason == "length" and found.memory is not None
    assert found.memory.escalated == "not_reread"


def test_the_room_for_a_long_answer_is_at_most_the_contexts(load: Load, tmp_path: Path) -> None:
    limit = 2048 * 4 * load().cache.pool.page_bytes
    engine = certified(load(kv_limit=limit), tmp_path, "reread")
    many = Sampling(max_new_tokens=10**6, stop=tuple("abcdefghijklmnopqrstuvwxyz+;=<>"))
    (found,) = engine.generate(asked(TURNS[:1], []), sampling=many)
    assert found.memory is not None and found.memory.escalated == "reread"


def test_a_session_with_a_budget_of_its_own_is_not_weighed(load: Load, tmp_path: Path) -> None:
    engine = certified(load(), tmp_path, "refuse")
    with engine.session(Budget.of(20)) as session:
        talk(session)
    assert engine.loss_control is not None and engine.loss_control.answers == 0


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("budget", {"budget": 13}),
        ("evict_every", {"evict_every": 3}),
        ("kv", {"kv": "int8"}),
        ("policy", {"policy": "keydiff", "gates": None}),
    ],
)
def test_a_calibration_holds_for_one_setting(
    load: Load, tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    certified(load(), tmp_path, "say")
    with pytest.raises(InputError, match=rf"made.json holds for {name}|holds for gates"):
        load(**options).certify(tmp_path / "made.json")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"alpha": 0}, "alpha"),
        ({"alpha": 0.1}, "3 dialogues cannot promise 0.1: that takes 9 at least"),
        ({"dialogues": [{"answers": []}]}, "dialogues.0.answers"),
        (
            {"dialogues": [{"answers": [{"score": -1, "losses": []}]}]},
            "dialogues.0.answers.0.score",
        ),
        ({"dialogues": [{"answers": [{"score": 0, "losses": [[1, 1]]}]}]}, "above the largest"),
        ({"dialogues": [{"answers": [{"score": 0, "losses": [[0, 1], [0, 1]]}]}]}, "than itself"),
        ({"limit": 0.3}, "limit"),
        ({"format": "mmkv-calibration-2"}, "format"),
    ],
)
def test_a_file_is_checked(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    good = json.loads(calibration([[0.5]] * 3).model_dump_json())
    path = tmp_path / "made.json"
    path.write_text(json.dumps(good))
    assert read_calibration(path).alpha == 0.5
    path.write_text(json.dumps(good | change))
    with pytest.raises(InputError, match=f"is no calibration .*{said}"):
        read_calibration(path)
    with pytest.raises(InputError, match=r"cannot read the calibration .*No such file"):
        read_calibration(tmp_path / "none.json")


def test_scores(load: Load) -> None:
    with load().session() as session:
        logits = session.prefill(session.engine.inputs(asked(TURNS[:1], [])))
        risk, doubt = session.risk(), doubt_of(logits)
    assert risk is not None and risk.total > 0
    best = torch.distributions.Categorical(logits=logits).probs.max()
    assert doubt == pytest.approx(1 - float(best)) and 0 < doubt < 1
    found = [score_of(name, risk.total, doubt) for name in ("risk", "doubt", "both")]
    assert found == [risk.total, doubt, risk.total * doubt]
    found = [score_of(name, None, doubt) for name in ("risk", "doubt", "both")]
    assert found == [math.inf, doubt, math.inf]
