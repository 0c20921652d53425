"""Which tokens stand for which part of a picture, and what a record keeps of pictures and texts."""

from __future__ import annotations

import numpy as np
import pytest

from mmkv import Engine, Sampling
from mmkv.explain import frames
from mmkv.explain.frames import layout
from mmkv.explain.trace import texts_of
from mmkv.resources import asset
from tests.support.recorded import bundled, clip, talk


@pytest.fixture(scope="module")
def engine_of_pictures() -> Engine:
    return bundled()


def test_pictures_of_a_record_are_bounded_and_cannot_spoil_a_turn(
    engine_of_pictures: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, short = engine_of_pictures.session(), Sampling(max_new_tokens=2)
    recorder, picture = session.record(), asset("scene.png")
    bare = recorder.nbytes

    def fail(*_: object) -> bytes:
        raise OSError("no JPEG")

    with monkeypatch.context() as patched:
        patched.setattr(frames, "encoded", fail)
        with pytest.raises(OSError, match="no JPEG"):
            list(session.send("what?", images=[picture], sampling=short))
    assert session.seen == 0 and session.history == []
    monkeypatch.setattr(frames, "MOST_BYTES", 1)
    for _ in range(2):
        list(session.send("what?", images=[picture], videos=[clip()], sampling=short))
    assert [frame.caption for _, frame, _ in recorder.media] == ["picture 1"]
    assert recorder.nbytes - bare > len(recorder.media[0][1].jpeg) > 0
    session.close()


def test_frames_name_the_tokens_of_their_patches(engine_of_pictures: Engine) -> None:
    session, trace = talk(engine_of_pictures)
    snapshot = trace.snapshot()
    cells = [
        frame.start + y * frame.stride + x
        for frame in snapshot.frames
        for y in range(frame.high)
        for x in range(frame.wide)
    ]
    assert cells == np.flatnonzero(snapshot.record.modality).tolist()
    captions = [frame.caption for frame in snapshot.frames]
    assert captions == ["picture 1", *(f"video 1 at {s:.1f} s" for s in (0, 0.5, 1, 1.5))]
    assert "".join(snapshot.texts).count('</script><b>bold</b><!-- $x^2$ & "quoted"') == 1
    session.close()


def test_shapes_of_pictures_without_a_grid() -> None:
    assert layout(576, 300, 200, 24) == [(0, 24, 24, 24)]
    # LLaVA-NeXT: a thumbnail of 24 x 24, then 24 rows of 36 and a row end each.
    assert layout(576 + 24 * 37, 600, 400, 24) == [(0, 24, 24, 24), (576, 24, 36, 37)]
    assert layout(577, 300, 200, 0) == layout(579, 300, 200, 25) == []
    # A thumbnail of 24 x 24, and 35 rows of 34 and a row end: a square number by chance.
    assert layout(576 + 35 * 35, 340, 350, 24) == [(0, 24, 24, 24), (576, 35, 34, 35)]
    # InternVL3: tiles of 16 x 16, one after the other.
    assert layout(256, 448, 448, 16, True) == [(0, 16, 16, 16)]
    assert layout(1024, 1344, 448, 16, True) == layout(1024, 1344, 448, 0, True) == []


def test_texts_join_to_the_whole_text(engine_of_pictures: Engine) -> None:
    tokenizer = engine_of_pictures.processor.tokenizer
    text = "what is at row 2, column 3? </script> naïve"
    ids = tokenizer(text)["input_ids"]
    assert "".join(texts_of(tokenizer, ids)).startswith("what is at row 2, column 3? </script> na")
    assert texts_of(None, [3, -1]) == ["3 ", "-1 "]
