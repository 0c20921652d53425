"""The attention probe against the engine's own output, the theory against direct sums."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.dilution import Prober, _correlation, dilution_bound, main, measure, probed_decode
from benchmarks.needle_tasks import Needle
from benchmarks.quality.methods import ComparedMethod, Comparison
from benchmarks.quality.run import ComparisonRuns
from mmkv.engine.backends.torch.step import DecodeStep
from mmkv.engine.runtime import Runtime
from mmkv.resources import bundled_model
from mmkv.training.measure.record import Journal

MODEL = str(bundled_model())


def test_the_probe_records_the_attention_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights times the values, gathered by position, are the output of every layer."""
    engine = Runtime.from_pretrained(MODEL, policy="dbtrimkv", budget=20, dtype="float32")
    spec, outputs, values = engine.spec, [], []
    plain = DecodeStep.attend

    def noted(self: DecodeStep, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = plain(self, layer, query, key, value)
        outputs.append(out[0].view(spec.num_kv_heads, spec.group, spec.head_dim))
        entries = self.cache.entries(session.seq)
        pool, held = self.cache.pool, {}
        for row, slot in zip(entries.row.tolist(), entries.slot.tolist(), strict=True):
            where = int(pool.position.view(-1)[slot])
            held[row, where] = pool.values.flatten(0, 1)[slot].clone()
        values.append(held)
        return out

    monkeypatch.setattr(DecodeStep, "attend", noted)
    ids = torch.randint(5, 600, (1, 70), generator=torch.Generator().manual_seed(1))
    with engine.session() as session, engine.session() as other:
        for each in (session, other):
            each.prefill({"input_ids": ids})
        assert session.evicted > 0
        ours, attended = probed_decode(session, 9)
        native = engine.backends.cpu.decoder
        theirs = other.decode(9)
        assert engine.backends.cpu.decoder is native and len(outputs) == spec.num_layers
        assert torch.allclose(ours, theirs, atol=1e-3)
        assert session.retained()[2][1].tolist() == other.retained()[2][1].tolist()
    assert attended.shape == (spec.num_layers, spec.num_kv_heads, spec.group, 71)
    for layer in range(spec.num_layers):
        for head in range(spec.num_kv_heads):
            held = {w: v for (r, w), v in values[layer].items() if r == layer * 3 + head}
            weights = attended[layer, head].softmax(-1)
            there = attended[layer, head, 0].isfinite().nonzero().flatten().tolist()
            assert there == sorted(held)
            mixed = sum(weights[:, w, None] * v.double() for w, v in held.items())
            assert torch.allclose(mixed.float(), outputs[layer][head], atol=1e-5)


def test_the_bound_holds_and_is_the_largest() -> None:
    generator = torch.Generator().manual_seed(4)
    useful = torch.zeros(40, dtype=torch.bool)
    useful[5:8] = True
    logits = 2 * torch.randn(30, 40, generator=generator).double()
    logits[::3, torch.rand(40, generator=generator) < 0.4] = -torch.inf
    logits[7, useful] = -torch.inf
    bounds = dilution_bound(logits, useful)
    for row, bound in zip(logits, bounds.tolist(), strict=True):
        lost = 1 - float(row.softmax(-1)[useful].sum())
        assert bound <= lost + 1e-9
        inside, outside = row[useful], row[~useful]
        held = int(inside.isfinite().sum())
        if not held:
            assert bound == 1
            continue
        # The proposition, word for word, for every Delta that makes a difference.
        best = 0.0
        for gap in [0.0, *(float(inside.max() - z) for z in outside if z.isfinite())]:
            if gap >= 0:
                near = int((outside >= inside.max() - gap - 1e-12).sum())
                ratio = np.exp(-gap) * near / held
                best = max(best, ratio / (1 + ratio))
        assert bound == pytest.approx(best)
    # n distractors that tie with one useful entry leave it 1 / (n + 1).
    assert dilution_bound(torch.zeros(10), torch.arange(10) == 3) == pytest.approx(0.9)


def test_the_prediction_is_exact_if_logits_stay_the_same() -> None:
    """Corollary 3.2 with its ratio written out, on logits that eviction left as they were."""
    generator = torch.Generator().manual_seed(5)
    full = torch.randn(2, 2, 3, 30, generator=generator).double()
    kept = torch.rand(2, 2, 1, 30, generator=generator) < 0.5
    kept[..., 4:6], kept[..., 29] = True, True
    ours = full.masked_fill(~kept, -torch.inf)
    note = Needle(0.1, ((0, 1),), (4, 8), (2, 25))
    record = measure([[ours]], [[full]], [note])
    share, weights = ours.softmax(-1), full.exp()
    assert record["useful"] == pytest.approx(float(share[..., 4:8].sum(-1).mean()), abs=1e-6)
    distractors = share[..., 8:25].sum(-1)  # the haystack's first two are among the first tokens
    assert record["distractors"] == pytest.approx(float(distractors.mean()), abs=1e-6)
    assert record["first"] == pytest.approx(float(share[..., :4].sum(-1).mean()), abs=1e-6)
    parts = [record[name] for name in ("useful", "distractors", "dialogue", "first")]
    assert sum(parts) == pytest.approx(1, abs=1e-5)
    useful = torch.zeros(30, dtype=torch.bool)
    useful[4:8] = True
    rho_u = (weights * kept)[..., useful].sum(-1) / weights[..., useful].sum(-1)
    rho_d = (weights * kept)[..., ~useful].sum(-1) / weights[..., ~useful].sum(-1)
    delta = weights[..., ~useful].sum(-1) / weights.sum(-1)
    ratio = rho_d / rho_u
    predicted = 1 - ratio * delta / ((1 - delta) + ratio * delta)
    assert record["predicted"] == pytest.approx(float(predicted.mean()), abs=1e-6)
    assert record["predicted"] == pytest.approx(record["useful"], abs=1e-6)
    assert record["kept_useful"] == pytest.approx(float(rho_u.mean()), abs=1e-6)
    assert record["kept_others"] == pytest.approx(float(rho_d.mean()), abs=1e-6)
    only = (weights * kept)[..., 8:25].sum(-1) / weights[..., 8:25].sum(-1)
    assert record["kept_distractors"] == pytest.approx(float(only.mean()), abs=1e-6)
    assert np.shape(record["heads"]) == (2, 6)


@pytest.mark.long(reason="as of test_quality.py: the same run twice, once cut short")
def test_a_killed_run_gives_the_same_files(tmp_path: Path, capfd: Any) -> None:
    options = [
        MODEL,
        *"--lengths 128 --budgets 16 48 --method streamingllm --name d --output".split(),
    ]
    main([*options, str(tmp_path / "whole"), "--limit", "3"])
    compared = Comparison(MODEL, "float32", (ComparedMethod.parse("streamingllm"),), ("16", "48"))
    journal = tmp_path / "parts" / "d.runs.jsonl"
    journal.parent.mkdir()
    runs = ComparisonRuns(compared, Journal(journal), reader=Prober)
    runs.of("needle:pictures:128:4:2:2", 2)
    journal.write_text(journal.read_text() + '{"where": "an unfin')
    capfd.readouterr()
    main([*options, str(tmp_path / "parts"), "--limit", "3"])
    assert "6 runs are in" in capfd.readouterr().err
    whole, parts = (
        json.loads((tmp_path / name / "d.json").read_text())["results"]
        for name in ("whole", "parts")
    )
    assert whole == parts and (tmp_path / "whole/d.png").stat().st_size > 5000
    full, tight = (whole["lengths"]["128"][name] for name in ("full", "streamingllm at 16"))
    assert full["kept_useful"]["value"] == full["kept_others"]["value"] == 1
    assert full["predicted"] == full["useful"] and full["difference"]["value"] == 0
    # Sixteen entries, the newest but for four, hold next to nothing of the pictures.
    near = tight["dialogue"]["value"] + tight["first"]["value"]
    assert near > 0.9 > full["dialogue"]["value"] + full["first"]["value"] + 0.3
    assert full["looking"]["value"] > 2 * full["useful"]["value"]
    assert full["bound"]["value"] < 1 - full["useful"]["value"]
    assert whole["heads"]["full"]["correlation"] == pytest.approx(1)
    nothing = _correlation(np.zeros((2, 3)), np.ones((2, 3)))
    assert nothing is None and "nan" not in (tmp_path / "whole/d.md").read_text()
    with pytest.raises(SystemExit, match="reads nothing"):
        main([*options, str(tmp_path), "--limit", "0"])
