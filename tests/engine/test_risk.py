"""The risk meter beside exact sums over all entries ever written."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mmkv.engine import risk
from mmkv.engine.budget import Dial
from mmkv.engine.contents import MODALITIES
from mmkv.engine.errors import SessionError
from mmkv.engine.policies import make_policy
from mmkv.engine.prefill import ChunkPass
from mmkv.engine.risk import Risk, RiskMeter, entries_needed, exact_risk
from mmkv.engine.runtime import Runtime
from mmkv.engine.sequence import CachedSequence
from tests.engine.policies.test_policies import make_view
from tests.support.bursts import Bursts
from tests.support.dialogues import engine_of, folder_of, oracle_of, prefill_both, prompt
from tests.support.native import engine_for
from tests.support.oracle import Oracle
from tests.support.sessions import rewrite_tensors, text_ids, without_risk

ERROR = 0.01  # relative, of entries that weigh more than e^-4


@pytest.mark.parametrize("rate", [2e-9, 1e-5, 0.003, 0.05, 0.7, 40.0])
def test_the_meter_is_near_the_exact_sums(rate: float) -> None:
    """Retention around ``rate``, in chunks and single tokens; the newest entries are held, those of
    the two later kinds of tokens longer. All at one rate: no errors of different bins cancel.
    """
    generator = torch.Generator().manual_seed(1)
    spread = torch.rand(300, 4, generator=generator) + 0.5
    for log_beta in (-rate * spread, torch.full_like(spread, -rate)):
        modality = (torch.arange(300) // 40 % 3).to(torch.uint8)
        modality[200:] = 0
        meter = RiskMeter(torch.device("cpu"))
        for start in (0, 7, 120):
            stop = {0: 7, 7: 120, 120: 200}[start]
            meter.add(log_beta[start:stop, None], modality=modality[start:stop])
        for at in range(200, 300):  # the first of two sequences in a step
            meter.step(torch.stack([log_beta, log_beta[:1].expand(300, -1)], 1), at, 0)
        position = torch.arange(300).repeat_interleave(4)
        held = (position > 290) | ((position % 7 == 0) & (position > 60))
        kinds = modality.repeat_interleave(4)
        exact = exact_risk(log_beta.flatten(), 300 - position, kinds, held)
        found = meter.risk(log_beta.flatten()[held], position[held], kinds[held])
        assert meter.tokens == 300
        assert found.held == pytest.approx(exact.held, rel=1e-9)
        assert found.total == pytest.approx(exact.total, rel=ERROR, abs=1e-4)
        assert rate > 0.1 or found.by_modality == pytest.approx(exact.by_modality, rel=ERROR)


@pytest.mark.parametrize("seed", range(2))
def test_a_meter_counts_what_a_list_counts(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Added, stepped in either place of a batch, removed, remembered and gone back to, copied."""
    monkeypatch.setattr(risk, "_WAITING", 9)
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    rows, meter = 3, RiskMeter(torch.device("cpu"))
    steps = -torch.rand(4000, 2, rows, generator=generator) / 9
    betas, kinds, gone = torch.zeros(0, rows), torch.zeros(0, dtype=torch.uint8), set[int]()
    known: list[int] = []
    for at in range(0, 4000, 20):
        what = draw.choice(["add", "step", "step", "remove", "remember", "go back", "copy"])
        if what == "add":
            kind = torch.randint(3, (5,), generator=generator).to(torch.uint8)
            meter.add(steps[at : at + 5, 0], kind)
            betas, kinds = torch.cat([betas, steps[at : at + 5, 0]]), torch.cat([kinds, kind])
        elif what == "step":
            for step in range(at, at + draw.choice([1, 4, 20])):
                index = draw.randrange(2)
                meter.step(steps, step, index)
                betas = torch.cat([betas, steps[step, index][None]])
                kinds = torch.cat([kinds, kinds.new_zeros(1)])
        elif what == "remove" and len(kinds):
            token = draw.randrange(max(len(kinds) - 9, 0), len(kinds))
            if token not in gone:
                gone.add(token)
                position = torch.full((rows,), token)
                meter.remove(betas[token], position, kinds[token].expand(rows))
        elif what == "remember":
            meter.remember()
            known = [*(one for one in known if one != len(kinds)), len(kinds)][-4:]
        elif what == "go back":
            place = draw.choice([*known, 10_000])
            assert meter.go_back(place) == (place in known)
            if place in known:
                known = [one for one in known if one <= place]
                betas, kinds, gone = betas[:place], kinds[:place], {t for t in gone if t < place}
        elif what == "copy":
            other = meter.copy()
            other.step(steps, at + 19, 0), other.remember()
            other.add(steps[:30, 1]), other.go_back(known[0] if known else 0)
        assert meter.tokens == len(kinds) < meter._at + 9
        position = torch.arange(len(kinds)).repeat_interleave(rows)
        there = ~torch.isin(position, torch.tensor(sorted(gone)).long())
        held = there & (position % 3 == 0)
        beta, kind = betas.flatten(), kinds.repeat_interleave(rows)
        found = meter.risk(beta[held], position[held], kind[held])
        exact = exact_risk(beta[there], len(kinds) - position[there], kind[there], held[there])
        assert found.held == pytest.approx(exact.held, rel=1e-6)
        assert found.forgotten == pytest.approx(exact.forgotten, rel=ERROR, abs=2e-3)


@pytest.mark.parametrize("name", ["dbtrimkv", "trimkv", "balanced:free=2"])
@pytest.mark.parametrize("decays", [False, True])
def test_as_few_entries_stay_as_the_risk_allows(name: str, decays: bool) -> None:
    """The smallest budget whose victims weigh the target's share at most, and half of it: of
    entries that weigh 1 exactly as much, too.
    """
    view = make_view([[9, 3], [1, 11]], seen=12)
    view = view if decays else replace(view, log_beta=torch.zeros(24))
    weights = (view.log_beta * (view.seen - view.position)).double().exp()
    policy, dial, every = make_policy(name), Dial(0.25, 1, 44, 8), float(weights.sum())
    scores = policy.scores(view, dial.allowed).value
    gone = [float(weights[policy.lowest(scores, view, budget)].sum()) for budget in range(45)]
    for lost in (0.0, every / 9):
        total = lost + every
        known = Risk(lost / total, {}, lost, every)
        wanted = [
            next(budget for budget in range(1, 45) if lost + gone[budget] <= share * total)
            for share in (0.25, 0.125)
        ]
        assert [*entries_needed(known, dial, view, policy)] == wanted
        below = replace(dial, most=wanted[0] - 1)
        assert min(entries_needed(known, below, view, policy)) > below.most, "a dial says so"
    above = entries_needed(Risk(0.5, {}, every, every), dial, view, policy)
    assert above == ((45, 45) if name == "trimkv" else (25, 25))  # all, and one more


def _modality(session: CachedSequence, kind: str) -> Tensor:
    """Tokens of a picture or a video."""
    tokens = torch.zeros(session.seen, dtype=torch.bool)
    for start, stop in session.pictures:
        tokens[start:stop] = kind == "image"
    return tokens


def same(session: CachedSequence, oracle: Oracle) -> None:
    oracle.follow(session.retained())
    risk = session.risk()
    assert risk is not None
    assert risk.total == session.memory().risk == pytest.approx(oracle.risk(), rel=ERROR, abs=1e-4)
    seen = {"image": _modality(session, "image")}
    seen["text"] = ~seen["image"]
    assert set(risk.by_modality) == {"text", "image"}
    for kind, tokens in seen.items():
        assert risk.by_modality[kind] == pytest.approx(oracle.risk(tokens), rel=ERROR, abs=1e-3)


@pytest.mark.parametrize("native", [True, False])
def test_what_changes_a_session_changes_its_risk(native: bool, tmp_path: Path) -> None:
    """Prompts, tokens, forks, files, forgetting, budgets, and turns that are taken back."""
    folder = folder_of("vl3")
    engine = engine_of(folder, "balanced:free=4", 12, prefill_chunk=7)
    if not native:
        engine.backends.cpu.switch_off()
    options = {"prefill_chunk": 7, "evict_every": None}
    oracle, session = oracle_of(engine, folder, "balanced:free=4", 12, **options), engine.session()
    prefill_both(session, oracle, prompt("vl3", 9, ("image", 16, 24), 5))
    for token in text_ids(40, 3).tolist():  # more than wait to be added up
        session.decode(token), oracle.decode(token)
    same(session, oracle)
    before, place = session.risk(), (session.seen, session.next_position, session.prompt_tokens)

    fork = session.fork()
    fork.begin_prefill({"input_ids": text_ids(30, 6)[None]}).advance()  # a chunk of it
    half = fork.begin_prefill({"input_ids": text_ids(30, 6)[None]})
    half.advance()
    half.roll_back()
    fork.decode(5)
    assert fork.risk() != before and session.risk() == before

    session.save(tmp_path / "saved")
    loaded, _ = engine.load_session(tmp_path / "saved")
    assert loaded.state() == session.state() and loaded.risk() == before
    without_risk(tmp_path / "saved")
    older, _ = engine.load_session(tmp_path / "saved")
    for token in text_ids(9, 7).tolist():
        older.decode(token)
    assert older.risk() is None and older.memory().risk is None
    older.cut_back(9, 9, 9)  # as many tokens as it has counted, and not these
    assert older.risk() is None

    session.prefill({"input_ids": text_ids(20, 8)[None]})
    session.cut_back(*place)  # to the beginning of that prompt
    assert session.meter is not None and session.meter.tokens == place[0]
    risk = session.risk()
    assert risk is not None and before is not None and risk.total > before.total
    session.cut_back(place[0] - 5, place[1] - 5, place[2])  # evicted before, and not remembered
    assert session.risk() is None

    for each in (loaded.set_budget, oracle.set_budget):
        each(6)
    same(loaded, oracle)
    loaded.forget(2, 12), oracle.forget(2, 12)
    for token in text_ids(3, 4).tolist():
        loaded.decode(token), oracle.decode(token)
    same(loaded, oracle)
    session.cut_back(0, 0, 0)
    assert session.risk().total == 0.0
    _damaged_risk(tmp_path / "damaged", loaded)
    with pytest.raises(SessionError, match="no finite number"):
        engine.load_session(tmp_path / "damaged")


def test_what_is_forgotten_on_purpose_counts_as_never_read() -> None:
    """Also once the session is cut back to a prompt before that."""
    made = []
    for purged in (False, True):
        session = engine_for("odd", budget=7).session()
        session.prefill({"input_ids": text_ids(30, 1)[None]})
        place = session.seen, session.next_position, session.prompt_tokens
        view = session.view()
        session.prefill({"input_ids": text_ids(2, 8)[None]})
        there = session.view().position
        if purged:
            session.forget(0, 30)
        session.cut_back(*place)
        made.append(session.risk())
    left, none = made
    assert left is not None and none is not None and none.held == 0 and left.held > 0
    there = there[there < 30]
    stayed = (view.position[:, None] == there).any(1)  # all that any row still had
    weight = torch.exp(view.log_beta * (30 - view.position))[stayed].sum()
    assert none.forgotten >= left.forgotten + left.held - float(weight) - 1e-6
    assert none.forgotten == pytest.approx(left.forgotten, rel=ERROR)


def test_a_chunk_that_is_being_read_does_not_count_yet() -> None:
    """Its entries are in some layers, with the log betas of what lay there before."""
    engine = engine_for("odd", budget=7)
    session, other = engine.session(), engine.session()
    session.prefill({"input_ids": text_ids(30, 1)[None]})
    other.prefill({"input_ids": text_ids(90, 2)[None]})
    other.close()
    before = session.risk()
    prompt = ChunkPass([session.begin_prefill({"input_ids": text_ids(20, 4)[None]})], by_layer=True)
    assert not prompt.run(0)
    assert session.risk() == before
    while not prompt.run(0):
        pass
    assert session.risk() != before
    kept = session.state()
    session.restore(kept)
    session.decode(3)
    assert session.meter is not None and session.meter.tokens == kept["meter"].tokens + 1


def test_an_older_file_of_a_session_that_forgot_nothing_has_a_risk(tmp_path: Path) -> None:
    engine = engine_for("odd", budget=7)
    session = engine.session()
    session.prefill({"input_ids": text_ids(6, 1)[None]})
    session.save(tmp_path / "saved")
    without_risk(tmp_path / "saved")
    older, _ = engine.load_session(tmp_path / "saved")
    for token in text_ids(20, 2).tolist():
        older.decode(token), session.decode(token)
    risk, expected = older.risk(), session.risk()
    assert risk is not None and expected is not None and session.evicted
    assert risk.total == pytest.approx(expected.total, rel=1e-9)


def _damaged_risk(path: Path, session: CachedSequence) -> None:
    session.save(path)
    rewrite_tensors(path, lambda tensors: tensors["risk"].fill_(torch.inf))


def test_a_burst_counts_what_single_steps_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step of the CUDA graph, of two sequences, with a stop token; in several parts."""
    monkeypatch.setattr("mmkv.engine.backends.cuda.static_step.MOST_STEPS", 16)
    ours, reference = (engine_for("odd", budget=7) for _ in range(2))
    reference.backends.cpu.switch_off()
    sessions, others = (_opened(engine) for engine in (ours, reference))
    tokens, runner = [3, 4], Bursts(ours)
    first = runner.decode(sessions, tokens, 60)
    stop = first[1][20]
    again = runner.decode(sessions, [row[-1] for row in first], 7, stop=[stop])
    for session, other, *said in zip(sessions, others, tokens, first, again, strict=True):
        for each in [said[0], *said[1], *said[2]][:-1]:
            other.decode(each)
        assert session.seen == other.seen and session.evicted
        risk, theirs = session.risk(), other.risk()
        assert risk is not None and theirs is not None
        assert risk.total == pytest.approx(theirs.total, rel=1e-4)


def _opened(engine: Runtime) -> list[CachedSequence]:
    made = [engine.session() for _ in range(2)]
    for index, session in enumerate(made):
        session.prefill({"input_ids": text_ids(5 + 11 * index, index)[None]})
    return made


def test_a_broken_model_spoils_no_sums() -> None:
    """Its log betas are no numbers; they weigh nothing, and later ones count."""
    log_beta = torch.full((2, 3), -0.1)
    log_beta[0, 1] = torch.nan
    meter = RiskMeter(torch.device("cpu"))
    meter.add(log_beta)
    found = meter.risk(
        *(torch.zeros(0, dtype=kind) for kind in (torch.float, torch.int, torch.uint8))
    )
    exact = 2 * math.exp(-0.2) + 3 * math.exp(-0.1)
    assert found.total == 1 and found.forgotten == pytest.approx(exact, rel=ERROR)
    assert found.by_modality == {"text": 1.0}


@pytest.mark.parametrize("policy", ["full", "snapkv"])
def test_there_is_no_risk_without_gates(policy: str) -> None:
    session = engine_for("odd", policy).session()
    session.prefill({"input_ids": text_ids(30, 1)[None]})
    session.decode(3)
    assert session.risk() is None and session.memory().risk is None
    assert set(MODALITIES) == set(session.memory().by_modality)
