"""Sessions that go on beyond the trained context, beside an oracle that re-rotates dense keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from mmkv.engine.budgets import page_bound
from mmkv.engine.cache.forms import FORMS
from mmkv.engine.cache.pool import PagePool
from mmkv.engine.compaction import (
    RowShifts,
    Run,
    Segments,
    position_of,
    turned,
    with_text,
    with_tokens,
)
from mmkv.engine.errors import ContextError, SessionError
from mmkv.engine.policies import Budget
from mmkv.engine.runtime import Runtime
from mmkv.engine.sequence import CachedSequence
from mmkv.engine.trace import KINDS
from tests.support.dialogues import engine_of, folder_of, prefill_both, prompt, reference_model
from tests.support.factories import checkpoint
from tests.support.oracle import Oracle
from tests.support.oracle.simulation import Group, rows_of
from tests.support.sessions import load, text_ids

LIMIT, BUDGET, CHUNK = 64, 5, 16


class Endless(Oracle):
    """Keeps keys and queries from before RoPE, and turns all of them anew when positions move.

    Every row (layer, KV head) has positions of its own for all tokens.
    """

    def __init__(self, limit: int, queries: int, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.limit, self.queries = limit, queries
        self.next = self.back = self.moves = self.capped = 0
        self.sees: list[bool] = []
        self.raw: list[tuple[list[Tensor], list[Tensor]]] = [([], []) for _ in self.key]
        self.where = torch.zeros(0)  # [L, H, A, T], of every token
        self.apply, self.rotate = self.rotate, self._noted
        self.calls = 0

    def _noted(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Any:
        for kept, part in zip(self.raw[self.calls % self.layers], (query, key), strict=True):
            kept.append(part[0])
        self.calls += 1
        return self.apply(query, key, cos, sin)

    def _positions(self, inputs: Mapping[str, Tensor]) -> Tensor:
        ids, config = inputs["input_ids"][0].tolist(), self.hf.config
        media = [getattr(config, f"{kind}_token_id", None) for kind in ("image", "video")]
        self.sees += [token in media for token in ids]
        return super()._positions(inputs)

    def _forward(self, hidden: Tensor, positions: Tensor, levels: Any, prompt: bool) -> Tensor:
        positions = positions - self.back
        if not self.seen:
            self.where = positions[:, :0].expand(self.layers, self.heads, -1, -1)
        end = max(self.next, int(positions.max()) + 1)
        if end > self.limit:
            moved = self._compact(self.next, self.limit - (end - self.next))
            self.back, positions, end = self.back + moved, positions - moved, end - moved
            self.moves += 1
            self.rope_position = self.rope_position - moved  # of queries that are kept
        self.next = end
        mine = positions.expand(self.layers, self.heads, -1, -1)
        self.where = torch.cat([self.where, mine], -1)
        return super()._forward(hidden, positions, levels, prompt)

    def _parts(self, row: tuple[int, int], begin: int) -> list[tuple[list[int], int, int]]:
        """Tokens, first position and size of each segment of a row that is held."""
        first = self.seen - self.queries if self.queries else self.seen
        first = max(first, 0)
        while self.queries and first and self.sees[first] and self.sees[first - 1]:
            first -= 1
        parts: list[list[int]] = []  # dead tokens of a picture among them
        for t in range(first):
            if self.sees[t] and t and self.sees[t - 1]:
                parts[-1].append(t)
            else:
                parts.append([t])
        keep, where = self.keep[row].tolist(), self.where[row]
        parts = [part for part in parts if any(keep[t] for t in part)]
        low, high = where.amin(0).tolist(), where.amax(0).tolist()
        spans = [(min(low[t] for t in p), max(high[t] for t in p) + 1) for p in parts]
        made = [(p, start, stop - start) for p, (start, stop) in zip(parts, spans, strict=True)]
        if self.queries:
            newest = list(range(first, self.seen))
            start = low[first]
            made.append((newest, start, begin - start))
        return made

    def _cap(self, row: tuple[int, int], begin: int, most: int) -> None:
        """Have a row lose its lowest entries until it fits."""
        score = self.method.score(self).masked_fill(self._protected(), torch.inf)
        for one, t in self._order(Group([row], 0), score):
            if sum(size for *_, size in self._parts(row, begin)) <= most:
                return
            if not self.queries or t < self._parts(row, begin)[-1][0][0]:
                self.keep[*one, t] = False
                self.capped += 1

    def _compact(self, begin: int, room: int) -> int:
        """Move every row's tokens, one segment after the other; by how many the next."""
        rows = rows_of(self.layers, self.heads)
        most = min(self.limit * 3 // 4, room)

        def longest() -> int:
            needs = [sum(size for *_, size in self._parts(row, begin)) for row in rows]
            return max(needs)

        if longest() > most and self.where.shape[2] == 1:
            self.sees = [False] * self.seen + self.sees[self.seen :]
        self.keep = self.keep.clone()
        for row in rows:
            self._cap(row, begin, most)
        last = most
        where = self.where.clone()
        for row in rows:
            parts = self._parts(row, begin)
            ends = [*(start for _, start, _ in parts), begin][1:]
            gaps = [end - start - size for (_, start, size), end in zip(parts, ends, strict=True)]
            limit = max(gaps, default=0)
            while sum(size for *_, size in parts) + sum(min(gap, limit) for gap in gaps) > last:
                limit -= 1
            at = last
            for (part, start, size), gap in reversed(list(zip(parts, gaps, strict=True))):
                at -= size + min(gap, limit)
                where[*row, :, part] -= start - min(at, start)
        self.where = where
        self._turn_all()
        return begin - last

    @torch.no_grad()
    def _turn_all(self) -> None:
        kinds = getattr(self.text.rotary_emb, "layer_types", ())  # with angles of their own
        for layer, raw in enumerate(self.raw):
            kind = [self.text.config.layer_types[layer]] if kinds else []
            query, key = (torch.cat(part, 1) for part in raw)
            where = self.where[layer].transpose(0, 1)  # of each KV head: as rows of a batch
            shaped = where if where.shape[0] == 3 else where[0]
            angles = self.text.rotary_emb(self.key[0][None], shaped, *kind)
            by_head = query.view(self.heads, self.group, *query.shape[1:])
            turned_ones = self.apply(by_head, key[:, None], *angles)
            self.query[layer], self.key[layer] = (each.flatten(0, 1) for each in turned_ones)

    def mean_rotation(self, layer: int, positions: range) -> Tensor:
        """As of any conversation: the queries that it turns are not those of tokens."""
        self.rotate = self.apply
        made = super().mean_rotation(layer, positions)
        self.rotate = self._noted
        return made

    def close(self) -> None:
        """Nothing of the model was changed."""


def short_of(
    model: str, policy: str, limit: int = LIMIT, budget: int = BUDGET, **options: Any
) -> Runtime:
    """An engine whose model was trained for few positions."""
    engine = engine_of(
        folder_of(model), policy, budget, prefill_chunk=CHUNK, page_size=8, **options
    )
    engine.spec = engine.model.spec = replace(engine.spec, max_position=limit)
    return engine


def close(ours: Tensor, theirs: Tensor) -> None:
    error = float((ours - theirs).abs().max() / theirs.abs().max())
    assert error <= 1e-4, f"logits differ by {error:.2e}"


TWICE = pytest.mark.long(reason="twice the context or rows; one of each kind is here")
EXPECTED = "expected-attention:window=3,sinks=1"


@pytest.mark.parametrize(
    ("model", "policy", "limit", "budget"),
    [
        ("vl3", "dbtrimkv", 64, BUDGET),
        ("qwen2_5_vl", EXPECTED, 64, BUDGET),
        pytest.param("llava3", "keydiff", 128, BUDGET, marks=TWICE),
        pytest.param("glm4v", "dbtrimkv", 128, BUDGET, marks=TWICE),
        ("gemma3_text", "snapkv:window=3", 64, BUDGET),
        ("llava3", "dbtrimkv", 64, BUDGET),  # pictures have to shrink
        ("vl3", "dbtrimkv", 64, 36),  # rows are longer than three quarters of the context
        pytest.param("qwen2_5_vl", EXPECTED, 64, 50, marks=TWICE),
    ],
)
def test_what_is_kept_and_said_is_an_oracles(
    model: str, policy: str, limit: int, budget: int, tmp_path: Path
) -> None:
    engine = short_of(model, policy, limit, budget=budget)
    gate = engine.gates if engine.policy.scoring.needs.gates else None
    name, _, rest = policy.partition(":")
    pairs = (pair.split("=") for pair in filter(None, rest.split(",")))
    given = {key: int(value) for key, value in pairs}
    oracle = Endless(
        limit,
        engine.policy.scoring.needs.queries,
        reference_model(folder_of(model)),
        gate,
        name,
        budget,
        prefill_chunk=CHUNK,
        **given,
    )
    session = engine.session()
    recorder = session.record()
    for turn in range(4):
        pieces = 6, ("image", 16, 24), 5, ("image", 24, 16), 3
        close(*prefill_both(session, oracle, prompt(model, *pieces, seed=turn)))
        for token in text_ids(14, turn).tolist():
            close(session.decode(token), oracle.decode(token))
            oracle.follow(session.retained())
            assert session.next_position <= limit
        engine.cache.check()
    close(*prefill_both(session, oracle, prompt(model, 2 * limit, seed=9)))  # longer than all
    assert session.memory().compactions == oracle.moves >= 4
    assert session.memory().capped == oracle.capped and (oracle.capped > 0) == (budget > BUDGET)
    record = recorder.read(session)
    assert len(record.deaths) == session.evicted
    there = record.died_at[record.kind[record.died_at] == KINDS.index("context")]
    assert there.size == oracle.capped
    session.save(tmp_path / "session")
    loaded, _ = engine.load_session(tmp_path / "session")
    fork, tokens = session.fork(), text_ids(limit // 2, 7).tolist()
    for token in tokens:
        ours = session.decode(token)
        assert torch.equal(ours, loaded.decode(token)) and torch.equal(ours, fork.decode(token))
    assert loaded.compactions == fork.compactions == session.compactions > oracle.moves


def test_without_a_budget_or_the_setting_a_session_ends() -> None:
    for engine in (
        engine_of(folder_of("text3"), "full", BUDGET, prefill_chunk=CHUNK),
        short_of("text3", "streamingllm", endless=False),
    ):
        engine.spec = engine.model.spec = replace(engine.spec, max_position=LIMIT)
        session = engine.session()
        session.prefill({"input_ids": text_ids(LIMIT, 1)[None]})
        with pytest.raises(ContextError, match="64"):
            session.decode(3)
        assert session.seen == session.next_position == LIMIT and not session.has_room


def test_a_share_of_the_tokens_and_an_older_file_say_why_they_end() -> None:
    """A share grows with the session: pages of one without end would pass any bound."""
    engine = short_of("text3", "streamingllm")
    share, older = engine.session(Budget.fraction(0.1)), engine.session()
    bound = page_bound(engine, share.budget, LIMIT).steady
    for session in (share, older):
        session.prefill({"input_ids": text_ids(LIMIT, 1)[None]})
    older.runs = None
    for session, why in ((share, "in entries or bytes"), (older, "an older mmkv saved it")):
        with pytest.raises(ContextError, match=why):
            session.decode(3)
        assert session.seen == LIMIT and not session.compactions
    with pytest.raises(ContextError, match="in entries or bytes"):
        engine.session(Budget.fraction(0.1)).prefill({"input_ids": text_ids(LIMIT + 1, 1)[None]})
    assert engine.cache.held_pages(share.seq) <= bound
    share.set_budget(BUDGET)
    share.decode(3)
    assert share.compactions == 1


def test_what_cannot_fit_is_said_with_numbers() -> None:
    """A prompt that is kept whole, and a chunk that leaves less than half of the context."""
    keeps = short_of("text3", "raas").session()
    keeps.prefill({"input_ids": text_ids(LIMIT, 1)[None]})
    with pytest.raises(ContextError, match=r"needs 64 even.*evicts from prompts"):
        keeps.decode(3)
    with pytest.raises(ContextError, match="80 more tokens after 64"):  # before any is read
        keeps.prefill({"input_ids": text_ids(80, 3)[None]})
    assert keeps.seen == LIMIT
    engine = short_of("text3", "dbtrimkv", budget=40)
    session = engine.session()
    session.prefill({"input_ids": text_ids(LIMIT, 1)[None]})
    engine.prefill_chunk = LIMIT * 5 // 8
    with pytest.raises(ContextError, match=r"needs \d\d even.*prefill_chunk"):
        session.prefill({"input_ids": text_ids(LIMIT * 5 // 8, 2)[None]})
    assert session.seen == LIMIT and not session.capped
    engine.prefill_chunk = CHUNK
    session.prefill({"input_ids": text_ids(LIMIT * 5 // 8, 2)[None]})
    assert session.capped > session.engine.spec.rows
    session.cut_back(1, 1, 1)
    assert session.capped <= session.evicted <= session.engine.spec.rows


def test_a_file_of_an_older_mmkv_goes_on_from_one_map(tmp_path: Path) -> None:
    """It holds the positions that all rows had, and no shifts."""
    engine = short_of("text3", "streamingllm")  # rows keep the same tokens
    session = engine.session()
    session.prefill({"input_ids": text_ids(LIMIT + 9, 1)[None]})
    fork, shifts = session.fork(), session.shifts
    assert shifts is not None and fork.runs is not None
    tokens = fork.retained()[0][0].numpy()
    moved = shifts.shift[shifts.find(np.zeros_like(tokens), tokens)]
    fork.runs = tuple(map(Run, tokens.tolist(), (tokens - moved).tolist()))
    fork.shifts = None
    fork.save(tmp_path / "older")
    loaded, _ = engine.load_session(tmp_path / "older")
    for token in text_ids(LIMIT, 3).tolist():
        assert torch.equal(session.decode(token), loaded.decode(token))
    assert loaded.compactions == session.compactions > 3


@pytest.mark.parametrize(
    ("name", "change", "why"),
    [
        ("shifts.start", lambda x: x.roll(1), "do not follow each other"),
        ("shifts.token", lambda x: x.flip(0), "begin with its first token"),
        ("shifts.shift", lambda x: x - 10_000, "to no position of the model"),
        ("shifts.moves", None, "no tensor shifts.moves"),
    ],
)
def test_shifts_in_a_file_are_checked(name: str, change: Any, why: str, tmp_path: Path) -> None:
    engine = short_of("text3", "dbtrimkv")
    session = engine.session()
    session.prefill({"input_ids": text_ids(2 * LIMIT, 1)[None]})
    session.save(tmp_path / "session")
    tensors = load_file(tmp_path / "session")
    with safe_open(tmp_path / "session", framework="pt") as file:
        metadata = file.metadata()
    if change is None:
        del tensors[name]
    else:
        tensors[name] = change(tensors[name]).contiguous()
    save_file(tensors, tmp_path / "session", metadata)
    with pytest.raises(SessionError, match=why):
        engine.load_session(tmp_path / "session")


def test_prompts_longer_than_the_context_compete_for_a_shared_budget() -> None:
    engine = short_of("text3", "dbtrimkv")
    engine.share(BUDGET)
    sessions = [engine.session() for _ in range(2)]
    for turn, session in enumerate(sessions):
        session.prefill({"input_ids": text_ids(3 * LIMIT, turn)[None]})
        assert session.seen == 3 * LIMIT and session.next_position <= LIMIT
    for _ in range(LIMIT):
        assert engine.decode(sessions, [3, 4]).isfinite().all()
    engine.cache.check()
    assert all(session.compactions > 2 for session in sessions)


def test_many_steps_go_on_as_single_ones_do() -> None:
    """More than the context holds, at once."""
    engine = short_of("text3", "streamingllm")
    session = engine.session()
    session.prefill({"input_ids": text_ids(LIMIT - 9, 1)[None]})
    fork, token = session.fork(), 3
    (made,) = engine.decode_many([session], [token], 2 * LIMIT)
    for wanted in made:
        token = int(fork.decode(token).argmax())
        assert token == wanted
    assert fork.compactions > 2 and session.state() == fork.state()
    full = engine_of(folder_of("text3"), "full", BUDGET, prefill_chunk=CHUNK)
    full.spec = full.model.spec = replace(full.spec, max_position=LIMIT)
    one = full.session()
    one.prefill({"input_ids": text_ids(LIMIT - 9, 1)[None]})
    with pytest.raises(ContextError):
        full.decode_many([one], [3], 10)
    assert one.seen == LIMIT - 9


def test_a_turn_is_not_rewound_across_moved_positions() -> None:
    session = short_of("text3", "streamingllm").session()
    session.prefill({"input_ids": text_ids(LIMIT - 2, 1)[None]})
    before = session.state()
    for token in (3, 4, 5):
        session.decode(token)
    assert session.compactions == 1
    assert not session.rewind(before | {"evicted": session.evicted})
    kept = session.next_position
    session.cut_back(session.seen - 2, LIMIT - 1, LIMIT - 2)
    assert session.next_position == kept - 2


@pytest.mark.parametrize(
    ("policy", "calls"),
    [
        (EXPECTED, (105, -101, 34, -70, 3)),  # tokens that are read; below 0: those left of all
        (EXPECTED, (103, -55, 34)),  # was refused: a row seemed to need more than it did
        ("snapkv:window=3", (98, -4, 9)),  # none of the first four is held
    ],
)
def test_a_session_goes_on_behind_what_a_cut_leaves(policy: str, calls: tuple[int, ...]) -> None:
    """The first of the tokens that are the newest then may have gone before.

    A key of the first layer says where it stands: it depends on its token and position alone.
    """
    engine, whole = short_of("text3", policy), engine_of(folder_of("text3"), "full", BUDGET)
    session, ids = engine.session(), torch.zeros(0, dtype=torch.int64)
    for turn, count in enumerate(calls):
        if count < 0:
            ids = ids[:-count]
            session.cut_back(-count, -count, -count)
            engine.prefill_chunk = 40
        else:
            ids = torch.cat([ids, text_ids(count, turn // 2)])
            session.prefill({"input_ids": ids[session.seen :][None]})
    assert session.compactions >= 2 or policy != EXPECTED
    unmoved = whole.session()
    unmoved.prefill({"input_ids": ids[None]})
    assert session.shifts is not None and 0 < session.next_position <= LIMIT
    for row in range(engine.cache.rows):
        (token, key), (_, there) = (held_keys(one, row) for one in (session, unmoved))
        back = session.shifts.shift[session.shifts.find(np.full_like(token, row), token)]
        stands = (token - back).tolist()
        assert stands == sorted({*stands}) and 0 <= stands[0] <= stands[-1] < session.next_position
        wanted = turned(there[token], torch.from_numpy(back), engine.spec.frequencies(False)[0])
        assert row >= engine.cache.kv_heads or torch.allclose(key, wanted, atol=1e-5)


def held_keys(session: CachedSequence, row: int) -> tuple[np.ndarray, Tensor]:
    """Tokens of a row and their keys, in order."""
    cache = session.engine.cache
    entries = cache.entries(session.seq)
    slot = entries.slot[entries.row == row]
    token, order = cache.pool.position.view(-1)[slot].long().sort()
    return token.numpy(), cache.pool.keys_at(slot[order])


def test_a_chunk_that_fails_leaves_moved_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = short_of("text3", "streamingllm")
    session = engine.session()
    session.prefill({"input_ids": text_ids(LIMIT, 1)[None]})
    fork = session.fork()
    prefill = session.begin_prefill({"input_ids": text_ids(5, 2)[None]})

    def fail(*_: Any) -> None:
        raise RuntimeError("no")

    with monkeypatch.context() as patch:
        patch.setattr(engine.decoder, "forward", fail)
        with pytest.raises(RuntimeError, match="no"):
            prefill.advance()
    prefill.roll_back()
    assert session.compactions == 1 and session.seen == LIMIT
    for token in (3, 4, 5):
        assert torch.equal(session.decode(token), fork.decode(token))
    engine.cache.check()


@pytest.mark.parametrize("form", FORMS)
def test_keys_in_every_form_are_turned_once(form: str) -> None:
    """A key that is turned is rounded once more, as its form rounds."""
    pool = PagePool(8, 32, 2, form=FORMS[form])
    slots, key = torch.arange(16), torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
    pool.store(slots, key, key)
    held, frequencies = pool.keys_at(slots), 10_000 ** -(torch.arange(16) / 16)
    back = torch.arange(16) * 1000
    wanted = turned(held, back, frequencies)
    pool.put_keys(slots, wanted)
    error = (pool.keys_at(slots) - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    most = {"auto": 0, "bf16": 3e-3, "int8": 1e-2, "k8v4": 1e-2, "int4": 0.12}[form]
    assert float(error.max()) <= most


def test_a_turned_key_is_the_key_of_the_new_position() -> None:
    """At a million, angles in float32 would be off by 0.04."""
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(1)).double()
    frequencies = 500_000 ** -(torch.arange(4) / 4)
    at, back = torch.tensor([1_000_000, 70_000, 9, 5, 10**6]), torch.tensor([999_990, 1, 9, 0, 5])

    def key(positions: Tensor) -> np.ndarray:
        angle = positions.numpy()[:, None] * frequencies.double().numpy()
        both = x[:, :4].numpy() + 1j * x[:, 4:].numpy()
        both = both * np.exp(1j * angle)
        return np.concatenate([both.real, both.imag], 1)

    made = turned(torch.from_numpy(key(at)).float(), back, frequencies).numpy()
    assert np.abs(made - key(at - back)).max() <= 1e-5


ROWS = 3


@st.composite
def histories(draw: Any) -> tuple[list[list[int]], tuple[Run, ...], int, int]:
    """Tokens of each row, runs, tokens seen, next position: texts and pictures, some evicted."""
    runs: tuple[Run, ...] = ()
    seen = position = 0
    for sees in draw(st.lists(st.booleans(), min_size=1, max_size=6)):
        count = draw(st.integers(1, 12))
        if sees:
            rows = draw(st.integers(1, 4))
            each = torch.arange(count)
            grid = torch.stack([torch.zeros_like(each), each // rows, each % rows])
            at = position + grid
            runs = with_tokens(runs, seen, torch.ones(count), at)
            position = int(at.max()) + 1
        else:
            runs = with_text(runs, seen, position)
            position += count
        seen += count
    live = [sorted(draw(st.sets(st.integers(0, seen - 1)))) for _ in range(ROWS)]
    return live, runs, seen, position


def test_a_picture_takes_the_room_of_its_widest_part_when_chunks_cut_it() -> None:
    at = 7 + torch.tensor([[0] * 5, [0, 0, 0, 0, 1], [0, 1, 2, 3, 0]])  # t, h, w
    first = with_tokens((), 3, torch.ones(4), at[:, :4])
    assert with_tokens(first, 7, torch.ones(1), at[:, 4:]) == (Run(3, 7, 4),)


def place(runs: tuple[Run, ...], token: int) -> tuple[int, int]:
    """The positions that a token's segment takes."""
    run = [run for run in runs if run.token <= token][-1]
    start = run.position if run.extent else run.position + token - run.token
    return start, start + (run.extent or 1)


def held_by(
    live: list[list[int]], *stands: Any, window: int, settles: int | None = None
) -> Segments:
    pairs = [(row, token) for row, tokens in enumerate(live) for token in tokens]
    row, token = np.array(pairs, np.int64).reshape(-1, 2).T
    runs, shifts, seen, position = stands
    return Segments(row, token, runs, shifts, ROWS, seen, position, window, settles)


def segments(
    tokens: list[int], where: Any, seen: int, position: int, window: int
) -> list[tuple[int, int]]:
    """Where a row's segments begin and end; the last one has the newest tokens."""
    newest = max(seen - window, 0) if window else seen
    begun = where(newest) if window else (position, position)
    spans = {span for span in map(where, tokens) if span[0] < begun[0]}
    return sorted(spans) + ([(begun[0], position)] if window else [])


@settings(max_examples=60, deadline=None)
@given(histories(), st.data())
def test_order_and_pictures_stay_and_no_distance_grows(
    history: tuple[list[list[int]], tuple[Run, ...], int, int], data: st.DataObject
) -> None:
    """In each row by itself, for as little as there can be; and again, from where it stands.

    What has settled stays where it is as long as the rest fits behind it.
    """
    live, runs, seen, position = history
    shifts: RowShifts | None = None
    window, settles = data.draw(st.integers(0, 5)), data.draw(st.none() | st.integers(1, 2))
    moves: list[dict[int, int]] = [{} for _ in live]

    def stands(row: int, runs: tuple[Run, ...], shifts: RowShifts | None) -> Any:
        def where(token: int) -> tuple[int, int]:
            start, stop = place(runs, token)
            head = np.array([max(run.token for run in runs if run.token <= token)])
            picture = next(run for run in runs if run.token == head[0])
            at = head if picture.extent else np.array([token])
            back = 0 if shifts is None else int(shifts.shift[shifts.find(np.array([row]), at)[0]])
            return start - back, stop - back

        return where

    for _ in range(4):
        held = held_by(live, runs, shifts, seen, position, window=window, settles=settles)
        before = [
            segments(live[row], stands(row, runs, shifts), seen, position, window)
            for row in range(ROWS)
        ]
        needs = [sum(stop - start for start, stop in spans) for spans in before]
        assert held.longest == max(needs)
        last = data.draw(st.integers(held.longest, max(position, held.longest)))
        made = held.drawn_together(last)
        assert made.newest == position - last and made.shifts.newest >= made.newest
        moved = iter(made.back.tolist())
        for row in range(ROWS):
            then, now = stands(row, made.runs, made.shifts), stands(row, runs, shifts)
            after = segments(live[row], then, seen, last, window)
            tail = after[-1][0] if window else last
            older = [t for t in live[row] if then(t)[0] < tail]
            block = [t for t in older if moves[row].get(t, 0) >= (settles or 99)]
            block = [t for t in older if block and t <= block[-1]]
            end = now(block[-1])[1] if block else 0
            behind = sum(b - a for a, b in before[row] if a >= end)
            settled = block and end + behind <= last
            for token in live[row]:
                back = next(moved)
                assert now(token)[0] - back == then(token)[0]
                assert not (settled and token in block and back)
                moves[row][token] = moves[row].get(token, 0) + (back != 0)
            assert [b - a for a, b in before[row]] == [b - a for a, b in after]
            assert not after or after[0][0] >= 0
            old = [b[0] - a[1] for a, b in pairwise([*before[row], (position, position)])]
            new = [b[0] - a[1] for a, b in pairwise([*after, (last, last)])]
            assert all(0 <= y <= x for x, y in zip(old, new, strict=True))
            longest = max((y for x, y in zip(old, new, strict=True) if y < x), default=None)
            if (
                longest is not None and not settled
            ):  # one position more would not fit, nor is another gap longer
                assert needs[row] + sum(min(x, longest + 1) for x in old) > last
                rest = zip(old[1:], new[1:], strict=True)
                assert all(y <= longest + 1 or y == x for x, y in rest)
        runs, shifts, position = made.runs, made.shifts, last
        more = data.draw(st.integers(0, 12))
        runs = with_text(runs, seen, position + shifts.newest)
        gone = data.draw(st.sets(st.integers(0, seen - 1)))
        live = [[t for t in row if t not in gone] + list(range(seen, seen + more)) for row in live]
        seen, position = seen + more, position + more


def test_the_newest_tokens_have_moved_as_often_as_each_of_them_has() -> None:
    """They move as one, but those that came after a compaction have not settled by it."""
    runs, stands, live = with_text((), 0, 0), partial(held_by, window=5, settles=1), [[], [], [2]]
    made = stands(live, runs, None, 7, 7).drawn_together(6)  # tokens 2 to 6 move
    live[2] += range(7, 11)
    made = stands(live, made.runs, made.shifts, 11, 10).drawn_together(10)  # none does
    live[2] += range(11, 13)
    made = stands(live, made.runs, made.shifts, 13, 12).drawn_together(8)
    assert made.back.tolist() == [0] + [4] * 6  # token 7 is no longer among the newest five
    assert set(made.shifts.moves[made.shifts.find(np.full(13, 2), np.arange(13))]) == {1}


def test_tokens_that_are_the_newest_again_keep_the_shift_of_each() -> None:
    """A session that is cut back has newest tokens that have not moved alike."""
    runs, live = with_text((), 0, 0), [[], [], [0, 3, 6]]
    made = held_by(live, runs, None, 12, 12, window=4).drawn_together(7)  # to 0, 1 and 2
    shifts = made.shifts.cut(7, 4)
    made = held_by(live, made.runs, shifts, 7, 3, window=4).drawn_together(3)  # 3 to 6 as one
    part = made.shifts.find(np.full(3, 2), np.array(live[2]))
    assert not made.back.any() and made.shifts.shift[part].tolist() == [0, 2, 4]


def test_the_newest_may_begin_where_no_run_is_left() -> None:
    """A session that was cut back: tokens 0 to 4, all evicted, had a run that is no more."""
    runs, live = (Run(5, 5, 3),), [[5], [6], []]
    parts = np.arange(3), np.zeros(3, np.int64), np.full(3, 2), np.ones(3, np.int64)
    made = held_by(live, runs, RowShifts.of(3, 8, 2, *parts), 8, 6, window=4).drawn_together(6)
    assert made.runs == runs
    # A picture that takes more positions than it has tokens is gone, and the next one is to go.
    assert position_of((Run(0, 0), Run(5, 21, 16)), 5) == 21


@settings(max_examples=60, deadline=None)
@given(histories(), st.data())
def test_rows_that_are_too_long_lose_their_lowest_entries(
    history: tuple[list[list[int]], tuple[Run, ...], int, int], data: st.DataObject
) -> None:
    live, runs, seen, position = history
    window = data.draw(st.integers(0, 5))
    held = held_by(live, runs, None, seen, position, window=window)
    most = data.draw(st.integers(held.rigid, max(held.longest, held.rigid)))
    keys = [data.draw(st.integers(0, 9)) for tokens in live for _ in tokens]
    gone = set(held.above(most, np.array(keys, np.int64)).tolist())
    at = 0
    for tokens in live:
        index = dict(zip(tokens, range(at, at + len(tokens)), strict=True))
        at += len(tokens)

        def spans(left: list[int]) -> list[tuple[int, int]]:
            return segments(left, partial(place, runs), seen, position, window)

        left = list(tokens)
        tail = spans([])[0][0] if window else position
        order = [t for t in tokens if place(runs, t)[0] < tail]
        for token in sorted(order, key=lambda token: (keys[index[token]], token)):
            if sum(stop - start for start, stop in spans(left)) <= most:
                break
            left.remove(token)
        assert {index[token] for token in tokens} - gone == {index[token] for token in left}


@pytest.mark.parametrize(("name", "once", "far"), [("bf16", 0.003, 0.02), ("int8", 0.02, 0.1)])
def test_a_key_that_moves_is_rounded_each_time(name: str, once: float, far: float) -> None:
    """Its error grows with the root of their number, and in 4 bits passes the key itself."""
    few, many = key_errors(name)
    assert few < once and many < far and FORMS[name].most_moves is None
    few, many = key_errors("int4", first=16)
    assert few < 0.45 and many > 0.6 and FORMS["int4"].most_moves == 16
    once, few = key_errors("int4", last=4)
    assert few < 2.1 * once and FORMS["int4"].settles == 4


def key_errors(name: str, first: int = 1, last: int = 64) -> list[float]:
    """Errors by the keys' norm after so many moves by 1 to 4,096 positions."""
    form, source = FORMS[name], torch.Generator().manual_seed(0)
    inv_freq = 10_000.0 ** -(torch.arange(0, 64, 2) / 64)
    keys = torch.randn(200, 64, generator=source)
    keys[:, 3] *= 6  # some features of real ones are larger
    held, moved, errors = keys, torch.zeros(200, dtype=torch.int64), list[float]()
    for count in range(last + 1):
        stored = form.key.encode(form.rotate(held))
        held = form.rotate(form.key.decode(*stored, torch.float32))
        if count in (first, last):
            errors.append(float((held - turned(keys, moved, inv_freq)).norm() / keys.norm()))
        by = torch.randint(1, 4097, (200,), generator=source)
        held, moved = turned(held, by, inv_freq), moved + by
    return errors


def test_a_session_says_that_its_keys_are_worn() -> None:
    for kv, worn in (("int4", True), ("k8v4", False)):
        engine = load(checkpoint("qwen3_vl"), policy="streamingllm", budget=BUDGET, kv=kv)
        with engine.session() as session:
            session.prefill({"input_ids": text_ids(9, 1)[None]})
            for moves in (16, 17):
                zeros = np.zeros(engine.cache.rows, np.int64)
                parts = np.arange(zeros.size), zeros, zeros, zeros + moves
                session.shifts = RowShifts.of(zeros.size, 9, 0, *parts)
                assert session.memory().worn is (worn and moves == 17)
