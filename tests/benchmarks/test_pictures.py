"""The numbers behind the papers' pictures, against plain sums over the same definitions."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks import bands, pictures
from benchmarks.pictures import PICTURES, read_trace
from mmkv.engine.errors import InputError
from mmkv.engine.runtime import Runtime
from mmkv.explain.trace import Trace
from mmkv.resources import bundled_model
from mmkv.training.data.examples import examples
from mmkv.training.measure.teacher_forced import (
    Documents,
    FullAttention,
    full_attention_states,
    lay_out,
)

MODEL = str(bundled_model())


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture(scope="module")
def dialogue() -> dict[str, Any]:
    example = examples(MODEL, ["scenes:dense"], 1, 0, split="heldout")[0]
    return {name: value for name, value in example.items() if name not in ("labels", "cuts")}


@pytest.fixture(scope="module")
def full() -> Iterator[Runtime]:
    yield Runtime.from_pretrained(MODEL, policy="full", device="cpu", dtype="float32")


def test_retention_matrices_and_sparsity(rng: np.random.Generator) -> None:
    log_beta = np.log(rng.uniform(0.2, 1, (3, 9)))
    log_beta[0] = 0
    for row, found in zip(log_beta, pictures.sparsity(log_beta), strict=True):
        matrix = pictures.retention_matrix(row)
        for t in range(9):
            for i in range(9):
                assert matrix[t, i] == pytest.approx(np.exp(row[i]) ** (t - i) if t >= i else 0)
        assert found == pytest.approx(1 - matrix.sum() / 45)
    assert pictures.sparsity(log_beta)[0] == 0  # forgets nothing


def test_a_page_tells_what_was_held_when(dialogue: dict[str, Any], tmp_path: Path) -> None:
    engine = Runtime.from_pretrained(MODEL, budget=24, prefill_chunk=16, device="cpu")
    with engine.session() as session:
        trace = Trace(session)
        session.prefill(dialogue)
        page = read_trace(trace.report(tmp_path / "page.html"))
        seen, tokens = session.seen, page.tokens
        assert seen == tokens == page.modality.size and page.heads == engine.spec.num_kv_heads
        moments = [(index, n) for index, n in enumerate(trace.snapshot().record.seen.tolist()) if n]
        for step, after in moments[:: max(1, len(moments) // 5)]:
            kept = [row for layer in trace.retained(step) for row in layer]
            for place, row in enumerate(page.rows):
                held = pictures.decision_matrix(page.gone[place])[after - 1]
                assert np.flatnonzero(held).tolist() == kept[row].tolist()
        last = [row.tolist() for layer in session.retained() for row in layer]
        view = session.view()
        assert page.log_beta is not None and view.log_beta is not None
        for row, at, value in zip(
            view.row.tolist(), view.position.tolist(), view.log_beta.tolist(), strict=True
        ):
            assert page.log_beta[page.rows.index(row), at] == pytest.approx(value, rel=0.05)
    assert [np.flatnonzero(row).tolist() for row in page.held()] == [last[r] for r in page.rows]
    values, mean = pictures.density(np.array([[0, 0, 0, 1], [0, 1, 0, 1]], bool), 4)
    assert values.tolist() == pytest.approx([0, 4 / 3, 0, 8 / 3])
    assert mean == pytest.approx((0.375 + 2 * 0.875) / 3)
    (tmp_path / "other.html").write_text("<p>")
    with pytest.raises(InputError, match="no page"):
        read_trace(tmp_path / "other.html")


def test_a_pass_notes_what_full_attention_computes(
    full: Runtime, dialogue: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    mixed: list[tuple[Tensor, Tensor]] = []
    plain = FullAttention.attend

    def noted(self: FullAttention, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = plain(self, layer, query, key, value)
        mixed.append((value.float(), out.float()))
        return out

    monkeypatch.setattr(FullAttention, "attend", noted)
    seen = pictures.look(full, dialogue)
    for weights, (value, out) in zip(seen.attention, mixed, strict=True):
        wide = value.repeat_interleave(weights.shape[0] // value.shape[1], 1)
        ours = torch.einsum("hts,shd->thd", torch.from_numpy(weights), wide).flatten(1)
        torch.testing.assert_close(ours, out, rtol=1e-3, atol=1e-3)
    states = full_attention_states(full, lay_out(full, [dialogue]))
    assert np.allclose(seen.states[-1], states.float().numpy(), atol=1e-3)
    assert seen.queries.shape[1] == seen.modality.size == dialogue["input_ids"].numel()


def test_survival_counts_who_is_looked_at_later(rng: np.random.Generator) -> None:
    weights = np.tril(rng.uniform(0.01, 1, (2, 12, 12)))
    weights /= weights.sum(-1, keepdims=True)
    among = np.arange(12) % 3 > 0
    for top, mass in ((3, 0.0), (None, 0.7)):
        last = pictures.last_selected(weights, top, mass)
        for horizon in (1, 4, 8):
            alive = []
            for head in range(2):
                chosen = []
                for p in range(12):
                    order = sorted(range(p + 1), key=lambda i: -weights[head, p, i])
                    size = top or 1 + next(
                        n for n in range(12) if weights[head, p, order[: n + 1]].sum() >= mass
                    )
                    chosen.append(order[:size])
                for i in range(12 - horizon):
                    if among[i]:
                        alive.append(any(i in chosen[p] for p in range(i + horizon, 12)))
            found = pictures.survival(last, [horizon], among)[0]
            assert found == pytest.approx(np.mean(alive))
    assert np.isnan(pictures.survival(last, [12], among)[0])


def test_overlap_with_the_last_window(rng: np.random.Generator) -> None:
    weights = np.tril(rng.uniform(size=(2, 14, 14)))
    scores = pictures.window_scores(weights, 3, 2)
    assert scores.shape == (3, 2, 8)
    found = pictures.overlap(scores, 0.375)
    for head in range(2):
        sets = [
            set(np.argsort(-weights[head, 8 + 2 * w : 10 + 2 * w, :8].sum(0))[:3]) for w in range(3)
        ]
        expected = [len(sets[2] & other) / 3 for other in (sets[0], sets[1], sets[0] | sets[1])]
        assert found[:, head].tolist() == pytest.approx(expected)
    with pytest.raises(InputError, match="do not fit in 14 tokens"):
        pictures.window_scores(weights, 7, 2)


def test_the_fit_finds_the_process_that_made_the_data(rng: np.random.Generator) -> None:
    a, b = np.array([[0.8, 0.1], [-0.3, 0.5]]), np.array([1.0, -2.0])
    series = []
    for _ in range(8):
        states = [rng.normal(size=2)]
        for _ in range(400):
            states.append(a @ states[-1] + b + 0.1 * rng.normal(size=2))
        series.append(np.array(states))
    fit = pictures.fit_var(series[:6], series[6:])
    assert np.allclose(fit.a, a, atol=0.05) and np.allclose(fit.b, b, atol=0.2)
    assert fit.radius == pytest.approx(np.abs(np.linalg.eigvals(a)).max(), abs=0.05)
    assert 0.5 < fit.explained < 1
    flat = [one @ np.array([[30.0, 0, 0], [0, 0, 1.0]]) for one in series]
    (first, *_) = pictures.principal(flat, 1)
    assert abs(np.corrcoef(first[:, 0], series[0][:, 0])[0, 1]) > 0.99


def test_changes_ranks_and_runs(rng: np.random.Generator) -> None:
    states = rng.normal(size=(2, 7, 4))
    found = bands.stream_change(states, 3)
    for layer in range(2):
        change = [0.0] + [
            float(np.linalg.norm(states[layer, t] - states[layer, t - 1])) for t in range(1, 7)
        ]
        for t in range(7):
            assert found[layer, t] == pytest.approx(np.mean(change[max(0, t - 2) : t + 1]))
    # Ranks 1 2.5 2.5 4 and 2 1 3 4, by hand.
    assert bands.spearman(np.array([1, 5, 5, 9]), np.array([3, 2, 7, 8])) == pytest.approx(
        3 / (4.5 * 5) ** 0.5
    )
    assert np.isnan(bands.spearman(np.ones(3), np.arange(3)))
    assert bands.best_run(np.array([0.1, 0.2, -1, 0.25, 0, 0.04])) == (0, 1)
    assert bands.best_run(np.array([-1.0])) is None
    paper = np.full(32, -0.05)  # bands A and B of the paper, and the layers that it chose
    paper[7:14], paper[18:26] = 0.2, -0.3
    made = bands.Bands(paper, np.zeros(1, np.int8), 0.2, 5)
    assert made.bands() == ((7, 13), (18, 25)) and "epikv:a=0.3125,b=0.65625" in made.says()
    assert "no two bands" in bands.Bands(abs(paper), made.labels, 0.2, 5).says()


def test_occlusion_finds_the_token_that_the_answer_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that needs token 5: the windows that hide it flip the answer, and no others."""
    visual = (torch.tensor([4, 5, 9]), torch.ones(3, 2))
    whole = Documents(
        torch.zeros(16, 2), torch.zeros(1, 16), (visual,), torch.zeros(16), torch.zeros(16), [16]
    )
    shown: list[Documents] = []

    def states(_: Any, documents: Documents) -> Tensor:
        shown.append(documents)
        needed = documents.hidden[5, 0] == 0
        return torch.where(needed, 3.0, 7.0).expand(16, 1)

    monkeypatch.setattr(bands, "lay_out", lambda *_: whole)
    monkeypatch.setattr(bands, "full_attention_states", states)
    decoder = SimpleNamespace(
        embed=lambda ids: torch.full((1, 2), 9.0),
        logits=lambda x: torch.nn.functional.one_hot(x[:, 0].long(), 10).float(),
    )
    engine: Any = SimpleNamespace(decoder=decoder, device="cpu")
    labels = torch.full((1, 16), -100)
    labels[0, 14:16] = 3
    found = bands.occlusion_labels(engine, {"labels": labels}, 0, window=4, stride=2)
    assert found is not None
    assert found.tolist() == [0, 0, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, -1, -1]
    hidden = next(one for one in shown if one.hidden[4, 0] == 9 and one.hidden[3, 0] == 0)
    assert hidden.deepstack[0][0].tolist() == [9] and not whole.hidden.any()
    thought = torch.full((1, 16), -100)
    thought[0, 2:16] = 3
    thought[0, 10] = 8  # the end of the thought: the answer is 11 to 15
    inside = bands.occlusion_labels(engine, {"labels": thought}, 0, 8, window=4, stride=4)
    assert inside is not None and inside.tolist() == [-1, -1, 1, 1, 1, 1, 0, 0, 0, 0] + [-1] * 6
    labels[0, 15] = 4
    assert bands.occlusion_labels(engine, {"labels": labels}, 0) is None  # wrong as it is


@pytest.mark.long(reason="draws all pictures with matplotlib, and hides windows of a dialogue")
@pytest.mark.parametrize("name", PICTURES)
def test_every_picture_is_drawn(name: str, tmp_path: Path) -> None:
    file = tmp_path / f"{name}.png"
    short = ["--dialogues", "2", "--policies", "dbtrimkv", "streamingllm", "--output", str(file)]
    said = io.StringIO()
    with redirect_stdout(said):
        assert pictures.main([name, *short]) == 0
    assert said.getvalue().strip() and file.stat().st_size > 2000


@pytest.mark.long(reason="a pass of the model over a dialogue")
def test_a_head_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for layer, head in ((99, 0), (2, 99)):
        asked = ["--dialogues", "1", "--layer", str(layer), "--head", str(head)]
        assert pictures.main(["dynamics", *asked]) == 1
        assert f"no layer {layer}, head {head}; the model has 6 l" in capsys.readouterr().err


def test_mistakes_get_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gone = str(tmp_path / "gone.html")
    for arguments, words in (
        (["overlap", "--trace", gone], "leave --trace out"),
        (["sparsity", "--trace", gone], "gone.html"),
        (["density", "--budget", "half"], "not a budget"),
        (["survival", "--top", "0"], "--top is 0; give 1 or more"),
        (["density", "--output", "x.foo"], "x.foo ends with none of .png"),
    ):
        assert pictures.main(["--output", str(tmp_path / "x.png"), *arguments]) == 1
        said = capsys.readouterr().err
        assert words in said and said.count("\n") == 1
    assert bands.main(["--window", "0"]) == 1
