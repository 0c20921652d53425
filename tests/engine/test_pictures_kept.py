"""What a session knows of its pictures: how much of each is still held."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mmkv import Engine, SessionError, bundled_model
from mmkv.engine.contents import with_pictures
from mmkv.resources import asset
from tests.support.factories import checkpoint, make_turn

NAME = "qwen3_vl"
TOUCHING = "llava_onevision"  # the others have text around each
STAY = 16


def test_pictures_are_runs_of_visual_tokens_over_chunks() -> None:
    kinds = torch.tensor([0, 1, 1, 1, 0, 2, 2, 0, 2, 1], dtype=torch.uint8)
    whole = ((1, 4), (5, 7), (8, 9), (9, 10))
    assert with_pictures((), kinds, 0) == whole
    for cut in range(1, 10):  # 9 stands between a video and a picture that touch
        first = with_pictures((), kinds[:cut], 0)
        assert with_pictures(first, kinds[cut:], cut, int(kinds[cut - 1])) == whole
        assert cut == 9 or with_pictures(first, kinds[cut:], cut) == whole
    assert with_pictures(((3, 5),), kinds[:2], 7) == ((3, 5), (8, 9))


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 100])
def test_a_picture_that_a_video_follows_is_another_in_chunks_of_any_size(chunk: int) -> None:
    engine = Engine.from_pretrained(
        checkpoint(TOUCHING), dtype="float32", device="cpu", policy="full", prefill_chunk=chunk
    )
    turn = make_turn(TOUCHING, [3, ("image", 32, 32), ("video", 1, 32, 32), 4], seed=3)
    with engine.session() as session:
        session.prefill(turn)
        kinds = turn["input_ids"][0].unique_consecutive(return_counts=True)[1].tolist()
        image, video = kinds[3:5]
        assert session.pictures == ((3, 3 + image), (3 + image, 3 + image + video))


def test_the_share_of_each_picture_is_counted_from_what_is_retained(tmp_path: Path) -> None:
    """Right values by hand: the retained tokens inside of each picture's run."""
    engine = Engine.from_pretrained(
        checkpoint(NAME), dtype="float32", device="cpu", policy="streamingllm", prefill_chunk=7
    )
    turn = make_turn(NAME, [3, ("image", 32, 32), 4, ("image", 16, 32), 5], seed=3)
    with engine.session() as session:
        session.prefill(turn)
        assert session.memory().pictures == (1.0, 1.0) and session.memory().faded == ()
        session.set_budget(STAY)
        memory = session.memory()
        visual = engine.family.turn(turn, 0, engine.device).modality > 0
        edges = torch.diff(visual.int(), prepend=torch.zeros(1, dtype=torch.int32))
        starts, stops = ((edges == sign).nonzero().flatten().tolist() for sign in (1, -1))
        rows = [row for layer in session.retained() for row in layer]
        wanted = tuple(
            sum(int(((row >= a) & (row < b)).sum()) for row in rows) / ((b - a) * len(rows))
            for a, b in zip(starts, stops, strict=True)
        )
        assert memory.pictures == wanted and memory.faded == (0,) and wanted[0] < 0.5 <= wanted[1]
        with session.fork() as copy:
            assert copy.memory().pictures == wanted
        session.save(tmp_path / "s")
        opened, _ = engine.load_session(tmp_path / "s")
        assert opened.memory().pictures == wanted
        opened.pictures = ((4, 2),)
        opened.save(tmp_path / "t")
        with pytest.raises(SessionError, match="pictures do not follow"):
            engine.load_session(tmp_path / "t")
        opened.close()


def test_a_turn_that_is_taken_back_takes_its_pictures_along() -> None:
    engine = Engine.from_pretrained(bundled_model(), budget=64)
    with engine.session() as session:
        session.undo_depth = 1
        for _ in session.send("what is at row 1, column 1?", images=[asset("scene.png")]):
            pass
        assert len(session.memory().pictures) == 1
        assert session.undo() and session.memory().pictures == ()
