"""The figure of kept entries shows the differences that its table lists."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from mmkv.eval.quality.kept import draw


def method(name: str, held: list[list[float]], budget: str = "1/8") -> dict[str, Any]:
    return {"method": name, "budget": budget, "visual_share": 0.4, "entries_by_row": held}


def test_colours_reach_the_largest_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares of 8 and 4 differ on one scale for all panels; a level method is in its middle."""
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: drawn.append(figure))
    full = method("full", [[5, 5]], "1")
    skewed = [method("eight", [[0] * 7 + [40]]), method("four", [[0, 0, 0, 20]])]
    many = [method(f"level {index}", [[2, 2]]) for index in range(9)]
    pages = {"one": {"rows": [full, *skewed]}, "two": {"rows": [full, *many]}}
    draw(pages, tmp_path / "k.png", "1/8", [])
    images = {axes.get_title(): axes.images[0] for axes in drawn[-1].axes if axes.get_title()}
    assert set(images) == {"eight", "four", *(f"level {index}" for index in range(9))}
    tones = {title: np.ma.getdata(image.norm(image.get_array())) for title, image in images.items()}
    assert {(image.norm.vmin, image.norm.vmax) for image in images.values()} == {(1 / 8, 8)}
    assert tones["eight"].max() == pytest.approx(1) and tones["eight"].min() == 0  # none held
    assert tones["four"].max() == pytest.approx(0.5 + np.log(4) / np.log(8) / 2)
    assert (tones["level 3"] == pytest.approx(0.5)) and len(tones) == 11
