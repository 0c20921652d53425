"""Logits that are no numbers end a reply with an error; placeholders of media are never chosen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mmkv import Engine, Sampling, Session
from mmkv.engine.backends.cuda import GraphRunner
from mmkv.engine.backends.cuda.kernels.sample import Draw
from mmkv.engine.errors import BROKEN, ModelError, NotFiniteError
from mmkv.sampling import Sampler
from mmkv.scheduler import Limits, Scheduler
from mmkv.scheduler.conversation import CachedConversation
from mmkv.scheduler.replies import EngineExecutor, ReplyJob, message
from tests.support.bursts import Bursts
from tests.support.chat_models import picture, save_qwen3_vl
from tests.support.sessions import state

ODD = [float("nan"), float("inf"), float("-inf")]
GREEDY, DRAWN = Sampling(max_new_tokens=8), Sampling(max_new_tokens=8, temperature=1.5, seed=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen3_vl(tmp_path_factory.mktemp("qwen"))


@pytest.fixture
def engine(folder: Path) -> Engine:
    return Engine.from_pretrained(folder, policy="full", dtype="float32", gates="random")


def poison(
    monkeypatch: pytest.MonkeyPatch, engine: Engine, path: str, after: int, value: float
) -> None:
    """Make the logits of step ``after`` (0: of the prompt) hold ``value``, on one path."""
    calls = 0

    def odd(logits: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls > after:
            logits.view(-1)[7] = value
        return logits

    real = engine.decoder.logits
    monkeypatch.setattr(engine.decoder, "logits", lambda hidden: odd(real(hidden)))
    if path == "native":
        assert engine.decode_path == "native"
        step = engine.backends.cpu.decoder.step
        monkeypatch.setattr(engine.backends.cpu.decoder, "step", lambda *a: odd(step(*a)))
    else:
        engine.backends.cpu.switch_off()
    if path == "graph":  # the static step, which a GPU captures; here it runs as it is
        runner = GraphRunner(engine.model, engine.cache)
        monkeypatch.setattr(type(engine), "many_path", "graph")
        monkeypatch.setattr(engine.backends.cuda, "decode_many", runner.decode)
        weights = engine.decoder.weights
        product = weights.product

        def head(x: torch.Tensor, weight: torch.Tensor, *bias: Any) -> torch.Tensor:
            made = product(x, weight, *bias)
            return odd(made) if weight is weights.head else made

        monkeypatch.setattr(weights, "product", head)
        monkeypatch.setattr(engine.decoder, "logits", lambda hidden: odd(real(hidden)))


def standing(session: Session) -> tuple[Any, ...]:
    """Return the state without the tables' bytes, which only grow."""
    memory, *rest = state(session)
    return (replace(memory, metadata_bytes=0), *rest)


def whole(session: Session) -> tuple[Any, ...]:
    last, unfed, history = session.last, list(session._unfed), [*session.history]
    cache = session.engine.cache.export(session.seq)
    content = {name: tensor.tolist() for name, tensor in cache.items()}
    return (*standing(session), last, unfed, history, content)


@pytest.mark.parametrize("path", ["torch", "native", "graph"])
@pytest.mark.parametrize(("after", "undo"), [(0, 0), (3, 0), (3, 2)])
def test_a_reply_ends_with_an_error_and_the_session_is_as_before(
    path: str, after: int, undo: int, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value, sampling in ((ODD[0], GREEDY), (ODD[1], DRAWN), (ODD[2], GREEDY)):
        with engine.session() as session, monkeypatch.context() as patch:
            session.undo_depth = undo
            list(session.send("hello", images=[picture()], sampling=GREEDY))
            before = whole(session)
            poison(patch, engine, path, after, value)
            with pytest.raises(NotFiniteError, match=r"not finite .* load it with dtype"):
                list(session.send("and?", sampling=sampling))
            assert whole(session) == before
            engine.cache.check()
            patch.undo()
            assert list(session.send("and?", sampling=GREEDY))
        assert engine.cache.pool.free_pages == engine.cache.pool.num_pages


@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("run", ["graph", "steps"])
def test_a_burst_tells_which_session_is_broken(
    run: str, drawn: bool, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others go on as if they were alone."""
    prompts = [{"input_ids": torch.arange(5 + i)[None] + 3} for i in range(3)]
    draws = [Draw(temperature=1.2, seed=i) for i in range(3)] if drawn else None

    def opened() -> list[Session]:
        made = [engine.session() for _ in prompts]
        for session, prompt in zip(made, prompts, strict=True):
            session.prefill(prompt)
        return made

    engine.cache.pool.grow(400)
    engine.backends.cpu.switch_off()
    decode = Bursts(engine).decode if run == "graph" else engine.decode_many
    alone = decode(opened(), [3, 4, 5], 9, (), draws)
    sessions = opened()
    # Keys that are no numbers, in one session.
    slot = engine.cache.entries(sessions[1].seq).slot
    with torch.inference_mode():
        engine.cache.pool.keys.flatten(0, 1)[slot[:1]] = torch.nan
    with pytest.raises(NotFiniteError) as error:
        decode(sessions, [3, 4, 5], 9, (), draws)
    assert error.value.generated == [alone[0], [BROKEN], alone[2]]
    assert sessions[1].seen == 7 and sessions[0].seen == 14
    engine.cache.check()


def test_a_scheduler_fails_the_broken_request_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = Scheduler(EngineExecutor(engine), Limits())
    kept = [CachedConversation(engine) for _ in range(2)]
    for session in kept:
        scheduler.submit(ReplyJob(engine, message("hi"), GREEDY, session=session, prompt_tokens=40))
    while scheduler.turn():
        pass
    live = kept[0].live
    assert live is not None
    before = (*standing(live), live.history[:])
    jobs = [
        ReplyJob(engine, message("on"), GREEDY, session=session, prompt_tokens=40)
        for session in kept
    ]
    tickets = [scheduler.submit(job) for job in jobs]
    while not all(ticket.state == "decode" for ticket in tickets):
        scheduler.turn()
    slot = engine.cache.entries(live.seq).slot
    last = engine.cache.pool.position.view(-1)[slot].argmax()
    with torch.inference_mode():
        engine.cache.pool.keys.flatten(0, 1)[slot[last]] = torch.nan
    while scheduler.turn():
        pass
    assert isinstance(tickets[0].error, NotFiniteError) and tickets[1].state == "done"
    assert jobs[1].reply is not None and len(jobs[1].reply.token_ids) == 8
    assert (*standing(live), live.history) == before
    scheduler.close()
    assert engine.cache.pool.free_pages == engine.cache.pool.num_pages


@pytest.mark.parametrize("value", ODD)
def test_the_sampler_refuses_what_is_no_number(value: float) -> None:
    for place in (0, 17, 49):
        logits = torch.linspace(-3, 3, 50)
        logits[place] = value
        for sampling in (GREEDY, DRAWN, Sampling(temperature=0.7, top_k=3, top_p=0.5)):
            with pytest.raises(NotFiniteError):
                Sampler(sampling).draw(logits)


@pytest.mark.parametrize("run", ["reply", "drawn", "steps", "graph", "graph drawn"])
def test_no_placeholder_is_chosen(
    run: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a head that prefers them to all else; the second choice is taken."""
    media = sorted(engine.media_token_ids)
    assert len(media) == 2
    engine.backends.cpu.switch_off()
    head = engine.decoder.weights.head
    rest = [i for i in range(head.shape[0]) if i not in media]
    with engine.session() as session:
        session.prefill({"input_ids": torch.tensor([[5, 6, 7]])})
        with session.fork() as probe:
            second = rest[int(probe.decode(9)[rest].argmax())]
        real = engine.decoder.logits
        weights = engine.decoder.weights
        product = weights.product

        def loving(logits: torch.Tensor) -> torch.Tensor:
            logits[..., media] = 1e4
            return logits

        def static(x: torch.Tensor, weight: torch.Tensor, *bias: Any) -> torch.Tensor:
            made = product(x, weight, *bias)
            return loving(made) if weight is head else made

        if run.startswith("graph"):
            monkeypatch.setattr(weights, "product", static)
        else:
            monkeypatch.setattr(engine.decoder, "logits", lambda hidden: loving(real(hidden)))
        draws = [Draw(temperature=1.5, seed=3)] if "drawn" in run else None
        if run in ("reply", "drawn"):
            sampling = DRAWN if run == "drawn" else GREEDY
            for turn in ("one", "two"):  # such a reply blocked every later turn
                list(session.send(turn, sampling=sampling))
                assert session.last is not None and not {*session.last.token_ids} & {*media}
            return
        decode: Callable[..., Any] = engine.decode_many
        if run.startswith("graph"):
            decode = Bursts(engine).decode
        (tokens,) = decode([session], [9], 12, (), draws)
        assert not {*tokens} & {*media} and (draws or tokens[0] == second)


@pytest.mark.parametrize("value", ODD)
def test_a_vision_tower_that_is_no_number_is_refused(
    value: float, folder: Path, tmp_path: Path
) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = sorted(name for name in tensors if ".visual." in name)[3]
    tensors[name].view(-1)[-1] = value
    file.unlink()
    save_file(tensors, file, metadata={"format": "pt"})
    engine = Engine.from_pretrained(tmp_path, policy="full", dtype="float32", gates="random")
    with engine.session() as session:
        assert list(session.send("text alone goes", sampling=GREEDY))
        with pytest.raises(ModelError, match=f"NaN or infinity .in .*{name.rpartition('.')[2]}"):
            list(session.send("hello", images=[picture()], sampling=GREEDY))
