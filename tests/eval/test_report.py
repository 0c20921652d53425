"""The page of all results: it is what the program writes now, and says where figures come from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eval.document_tables import filled, together
from eval.report import PAGE, documents, main, page
from mmkv.measure.record import RESULTS


def test_the_committed_page_is_not_stale() -> None:
    assert PAGE.read_text() == page(RESULTS.resolve(), PAGE), "run `python -m eval.report`"


def test_the_tables_of_no_document_are_stale() -> None:
    for path, text in documents(RESULTS).items():
        assert path.read_text() == text, f"run `python -m eval.report`: {path}"


def test_tables_are_put_between_their_marks(tmp_path: Path) -> None:
    held = {"policy": "full", "prompt_tokens": 1024, "kv_bytes": 2**21, "peak_growth_bytes": 2**30}
    cases = [
        held | {"policy": policy, "prompt_tokens": tokens, "physical_over_logical": 1.0625}
        for policy in ("full", "dbtrimkv")
        for tokens in (1024, 8192, 32768, 131072)
    ]
    (tmp_path / "memory-cpu.json").write_text(json.dumps({"results": cases}))
    text = "A\n<!-- table: memory -->\n| old |\n<!-- end -->\nB | 1 |\n"
    made = filled(text, tmp_path)
    assert made.startswith("A\n<!-- table: memory -->\n| prompt tokens |")
    assert made.endswith("|\n<!-- end -->\nB | 1 |\n") and "old" not in made
    assert "| 32,768 | 2.00 MiB | 1.062 | 1,024 MiB | 2.00 MiB | 1,024 MiB |\n" in made
    assert filled(made, tmp_path) == made
    with pytest.raises(KeyError, match="nothing"):
        filled("<!-- table: nothing -->\n<!-- end -->", tmp_path)


def test_sides_of_two_results_stand_in_one_table_if_they_agree(tmp_path: Path) -> None:
    def write(name: str, **accuracy: float) -> None:
        rows = [
            {"side": side, "budget": "1/8", "accuracy": {"value": value}}
            for side, value in accuracy.items()
        ]
        held = {"results": {"scenes:dense": {"rows": rows}}}
        (tmp_path / f"{name}-dense.json").write_text(json.dumps(held))

    write("one", dbtrimkv=0.9, kl=0.8)
    write("two", dbtrimkv=0.9, ntp=0.7)
    rows = together(tmp_path, ("one", "two"), "dense")["rows"]
    assert [(r["side"], r["accuracy"]["value"]) for r in rows] == [
        ("dbtrimkv", 0.9), ("kl", 0.8), ("ntp", 0.7)
    ]  # fmt: skip
    write("two", dbtrimkv=0.95, ntp=0.7)
    with pytest.raises(ValueError, match="dbtrimkv at 1/8 of dense differs"):
        together(tmp_path, ("one", "two"), "dense")


def test_every_committed_result_and_figure_is_on_the_page() -> None:
    text = PAGE.read_text()
    for path in RESULTS.glob("*.json"):
        held = json.loads(path.read_text())
        section = text.split(f"\n## {path.stem}\n")[1].split("\n## ")[0]
        assert held["command"] in section and (held["commit"] or "unknown")[:10] in section
        assert all(version in section for version in held["versions"].values())
    for path in RESULTS.glob("*.png"):
        assert f"(../eval/results/{path.name})" in text


@pytest.fixture
def results(tmp_path: Path) -> Path:
    folder = tmp_path / "results"
    folder.mkdir()
    held = {
        "date": "2026-01-02T03:04:05Z", "command": "python -m eval.some --x 1",
        "commit": "0123456789abcdef+changes", "versions": {"torch": "9.9"},
        "machine": {"cpu": "A chip", "cores": 3, "memory_gib": 5.5},
        "results": {"share": 0.123456, "wide": [1, 2, 3, 4, 5],
                    "rows": [{"a": 1, "b": "x|y"}, {"a": 20000, "c": None}],
                    "deep": {"inner": {"ok": True}}},
    }  # fmt: skip
    (folder / "some.json").write_text(json.dumps(held))
    (folder / "some-more.json").write_text(json.dumps({**held, "results": []}))
    (folder / "some-more.md").write_text(
        "### One\n\n| a |\n|---|\n| 7 |\n\nPaired differences (of 1):\n\n| p |\n|---|\n| 0.5 |\n"
        "\n### Two\n\n| b |\n|---|\n| 8 |\n"
    )
    for name in ("some.png", "some-more-kept.png", "other.png"):
        (folder / name).write_bytes(b"")
    return folder


def test_a_page_from_files(results: Path, tmp_path: Path) -> None:
    output = tmp_path / "docs" / "page.md"
    main(["--results", str(results), "--output", str(output)])
    text = output.read_text()
    one, two = text.split("## some-more\n")[1].split("## some\n")
    assert "python -m eval.some --x 1" in one and "0123456789+changes" in one
    assert "A chip, 3 cores, 5.5 GiB" in one and "torch 9.9" in one
    # Tables of its own page, without the tests; figures go to the longest name they begin with.
    assert "| 7 |" in one and "| 8 |" in one and "0.5" not in one and "**Two**" in one
    assert "(../results/some-more-kept.png)" in one and "(../results/some.png)" in two
    assert "other.png" not in text
    assert "| share | 0.1235 |" in two and "| 20,000 | - | - |" in two and "| ok | yes |" in two
    assert "| 1 | x\\|y | - |" in two and "*deep, inner*" in two
    main(["--results", str(results), "--output", str(output), "--check"])
    (results / "some.png").unlink()
    with pytest.raises(SystemExit, match="is stale; run python"):
        main(["--results", str(results), "--output", str(output), "--check"])
    assert output.read_text() == text


def test_a_commit_that_nobody_knows_is_called_unknown(results: Path, tmp_path: Path) -> None:
    held = json.loads((results / "some.json").read_text())
    (results / "some.json").write_text(json.dumps({**held, "commit": None}))
    output = tmp_path / "page.md"
    main(["--results", str(results), "--output", str(output)])
    text = output.read_text()
    assert "| [some](#some) | 2026-01-02 | unknown |" in text and "commit unknown;" in text
    assert "0123456789+changes" in text and "None" not in text


def test_broken_files_are_one_line(results: Path, tmp_path: Path) -> None:
    (results / "bad.json").write_text("{")
    with pytest.raises(SystemExit, match=r"cannot read .*bad\.json"):
        main(["--results", str(results), "--output", str(tmp_path / "x.md")])
    (results / "bad.json").write_text("[]")
    with pytest.raises(SystemExit, match="no result file"):
        main(["--results", str(results), "--output", str(tmp_path / "x.md")])
    assert not (tmp_path / "x.md").exists()
