"""``benchmarks.quality`` on few dialogues."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from matplotlib.figure import Figure

from benchmarks import needle
from benchmarks.experiment import draw as draw_curves
from benchmarks.quality.__main__ import main
from mmkv.resources import bundled_model
from mmkv.training.data.examples import examples
from mmkv.training.measure.record import RESULTS

MODEL = str(bundled_model())
SCENES = "--data scenes:dense --dialogues 1 --fractions 1/4".split()


@pytest.mark.slow(reason="runs whole dialogues with the bundled model")
def test_a_small_run_writes_table_plot_and_json(tmp_path: Path) -> None:
    main(
        [
            MODEL,
            *"--data scenes:dense --method streamingllm --method dbtrimkv:random".split(),
            *"--fractions 1/3 1/8 --dialogues 3 --output".split(),
            str(tmp_path),
            "--name",
            "q",
        ]
    )
    page = json.loads((tmp_path / "q.json").read_text())["results"]["scenes:dense"]
    assert page["dialogues"] == 3
    rows = {(row["method"], row["budget"]): row for row in page["rows"]}
    assert rows["full", "1"]["evicted"] == 0 and rows["full", "1"]["kl_per_token"]["value"] < 1e-6
    for method in ("streamingllm", "dbtrimkv"):
        assert rows[method, "1/8"]["kept_of_context"] == pytest.approx(1 / 8, rel=0.02)
        assert rows[method, "1/8"]["evicted"] > rows[method, "1/3"]["evicted"] > 0
        held = np.array(rows[method, "1/8"]["entries_by_row"])
        assert held.shape == (6, 3)
        assert held.sum() == pytest.approx(18 * page["context_tokens"]["mean"] / 8, rel=0.02)
    # Recency keeps the same number everywhere, but for the one entry more of the first rows; one
    # budget over all rows does not.
    assert np.ptp(rows["streamingllm", "1/8"]["entries_by_row"]) <= 1
    assert np.ptp(rows["dbtrimkv", "1/8"]["entries_by_row"]) > 2
    assert "| scenes:dense | 1/8 |" in (tmp_path / "q.md").read_text()
    assert (tmp_path / "q.png").stat().st_size > 5000


@pytest.mark.slow(reason="runs whole dialogues with the bundled model")
def test_whole_texts_are_reported_by_perplexity(tmp_path: Path) -> None:
    """That of the full cache as transformers has it."""
    text = "what was at row 1, column 2 of picture 3? a red square. " * 4
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}) + "\n")
    source = f"text:{tmp_path / 'a.jsonl'}"
    options = ["--method", "streamingllm", "--fractions", "16", "--dialogues", "1", "--name", "t"]
    main([MODEL, "--data", source, *options, "--output", str(tmp_path)])
    page = json.loads((tmp_path / "t.json").read_text())["results"][source]
    ids = examples(MODEL, [source], 1, 0)[0]["input_ids"]
    model = transformers.AutoModelForImageTextToText.from_pretrained(MODEL, dtype=torch.float32)
    with torch.inference_mode():
        wanted = float(model(input_ids=ids, labels=ids).loss)
    full, evicting = page["rows"]
    assert page["answer_tokens"] == ids.shape[1] - 1 and evicting["evicted"] > 0
    assert full["nll_per_token"]["value"] == pytest.approx(wanted, rel=1e-4)
    assert full["nll_per_token"]["value"] != pytest.approx(evicting["nll_per_token"]["value"])
    tables = json.loads((tmp_path / "t.json").read_text())["tables"]
    assert list(tables) == ["data", "perplexity", "perplexity-differences"]
    shown = float(tables["perplexity"][1][2].partition(" ")[0])
    assert shown == pytest.approx(np.exp(wanted), rel=1e-3)
    assert (tmp_path / "t.png").stat().st_size > 5000


def test_plots_label_their_budgets(tmp_path: Path, monkeypatch: Any) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: drawn.append(figure))
    pages = json.loads((RESULTS / "quality-rules-dense.json").read_text())["results"]
    for budget, label in (
        ("1/5", "budget, share of the context"),
        ("64", "budget, entries per layer and KV head"),
        ("1/8", "budget"),
    ):
        for row in pages["scenes:dense"]["rows"][1:]:
            row["budget"] = "64" if label == "budget" and row["method"] == "trimkv" else budget
        draw_curves(pages, tmp_path / "q.png")
        assert {axes.get_xlabel() for axes in drawn[-1].axes} == {label}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    ("program", "options"),
    [
        (main, SCENES),
        (needle.main, ["--lengths", "128", "--limit", "1", "--budgets", "16"]),
    ],
)
def test_comparisons_run_on_a_gpu(program: Any, options: list[str], tmp_path: Path) -> None:
    methods = ["--method", "snapkv", "--method", f"dbtrimkv:{MODEL}/gates"]
    program(
        [MODEL, *options, *methods, "--device", "cuda", "--name", "g", "--output", str(tmp_path)]
    )
    assert " cuda " in (tmp_path / "g.runs.jsonl").read_text()
