"""Training data: readers with their broken rows, and the mixture's order."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmkv.engine.errors import MmkvError
from mmkv.resources import bundled_model
from mmkv.training.data.conversations import ConversationDocument, DataError, DataSource, RowFile
from mmkv.training.data.examples import Mixture, examples
from tests.support.chat_models import picture


def turns(*texts: str) -> list[dict[str, Any]]:
    """Return messages of user and assistant in turns."""
    return [{"role": ("user", "assistant")[i % 2], "content": s} for i, s in enumerate(texts)]


def lines(path: Path, *rows: Any) -> Path:
    """Return a JSONL file; a row that is a string stands as it is."""
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows) + "\n")
    return path


def image(path: Path, colour: str = "red", size: tuple[int, int] = (64, 64)) -> str:
    path.parent.mkdir(exist_ok=True)
    picture(colour, size).save(path)
    return path.name


def content(row: Any) -> list[list[Any]]:
    """Return per message its parts: a text, or (kind, file name)."""
    return [
        [
            p["text"] if p["type"] == "text" else (p["type"], Path(p[p["type"]]).name)
            for p in message["content"]
        ]
        for message in row.messages
    ]


# --- readers ---


def test_source_grammar() -> None:
    parsed = DataSource.parse
    assert parsed("a.jsonl") == DataSource(Path("a.jsonl"), 1.0, None)
    assert parsed("2.5*chat:dir/a b.jsonl") == DataSource(Path("dir/a b.jsonl"), 2.5, "chat")
    assert parsed(".5*x.txt") == DataSource(Path("x.txt"), 0.5, None)
    assert parsed("./2*x:y.txt") == DataSource(Path("2*x:y.txt"), 1.0, None)
    assert parsed("text:a:b.txt").path == Path("a:b.txt")
    for wrong in ("", "2*", "0*a.txt", "alpaca:a.json", "chat:"):
        with pytest.raises(DataError) as raised:
            parsed(wrong)
        assert "\n" not in str(raised.value)


def test_chats_with_their_broken_rows(tmp_path: Path) -> None:
    image(tmp_path / "a.png"), image(tmp_path / "b.png")
    part = {"type": "image"}
    asked = [{"type": "text", "text": "see "}, {**part, "url": "b.png"}]
    talk = turns("q", "a")
    path = lines(
        tmp_path / "chats.jsonl",
        {"messages": talk},
        "{not json",
        {"messages": [{"role": "user", "content": asked}, talk[1]]},
        {"messages": [{"role": "user", "content": [{**part, "path": "gone.png"}]}, talk[1]]},
        "",
        {"messages": [{"role": "robot", "content": "q"}, talk[1]]},
        {"messages": talk[:1]},
        talk,
        {"messages": [{"role": "user", "content": [part, part]}, talk[1]], "images": ["a.png"]},
        {"messages": [{"role": "user", "content": [part]}, talk[1]], "images": ["a.png", "b.png"]},
        {"messages": [{"role": "user", "content": [part]}, talk[1]], "images": [None, "b.png"]},
        {"messages": turns("q", "  ")},
        {"messages": [talk[1], talk[0]]},
        {"messages": [talk[0], {"role": "assistant", "content": [{**part, "path": "a.png"}]}]},
        {"messages": turns("q", None)},  # type: ignore[arg-type]
        {"messages": [7]},
        {"messages": [{"role": "user", "content": [7]}, talk[1]]},
        {"messages": [{"role": "user", "content": [{**part, "image": {"bytes": 1}}]}, talk[1]]},
        {"messages": [{"role": "system", "content": "s"}, *talk]},
        {"prompt": "q"},
        3,
    )
    reported: list[str] = []
    rows = RowFile(path, report=reported.append)
    assert [row.row for row in rows] == [1, 3, 8, 11, 19]
    assert rows.kind == "chat" and rows.broken == 15 and len(rows) == 5
    assert content(rows[1])[0] == ["see ", ("image", "b.png")]
    assert content(rows[3])[0] == [("image", "b.png")]
    assert Path(rows[3].messages[0]["content"][0]["image"]).is_absolute()
    assert rows[-1].messages[0]["role"] == "system" and rows[0:2] == [rows[0], rows[1]]
    assert len(reported) == 9 and reported[0].startswith(f"{path}:2: skipped: not readable")
    assert "gone.png" in reported[1] and "role" in reported[2] and "nothing" in reported[3]
    assert "more image placeholders" in reported[4]
    assert reported[8] == f"{path}: skipped 15 of 20 rows"


def test_one_chat_pretty_printed_and_a_list_of_chats(tmp_path: Path) -> None:
    row = {"messages": turns("q", "a")}
    (tmp_path / "one.json").write_text(json.dumps(row, indent=1))
    (tmp_path / "list.json").write_bytes(b"\xef\xbb\xbf" + json.dumps([row, row]).encode())
    lines(tmp_path / "lines.json", row, row, row)
    assert [len(RowFile(tmp_path / f"{n}.json")) for n in ("one", "list", "lines")] == [1, 2, 3]


def test_llava(tmp_path: Path) -> None:
    for name in "abc":
        image(tmp_path / "pictures" / f"{name}.png")
    (tmp_path / "pictures" / "v.mp4").write_bytes(b"x")

    def row(image: Any, *texts: str, **more: Any) -> dict[str, Any]:
        talk = [{"from": ("human", "gpt")[i % 2], "value": s} for i, s in enumerate(texts)]
        return {"image": image, "conversations": talk, **more}

    path = tmp_path / "pairs.json"
    values = [
        row("a.png", "<image>\nwhat?", "red", "and?", "no"),
        row(["a.png", "b.png"], "<image>\n<image>\nboth?", "yes"),
        row(None, "hello", "hi"),
        row(["a.png", "b.png"], "<image> one", "no"),
        row("a.png", "none", "no"),
        row("c.png", "first?\n<image>", "ok"),
        row(None, "<video>\nwhat moves?", "it", video="v.mp4"),
        # LLaVA-Video-178K's form.
        {"id": "v", "data_source": "0_30_s_academic_v0_1", "video": "v.mp4"}
        | {"conversations": row(None, "<image>\nWhere?", "there")["conversations"]},
        row(None, "<image> and <image>", "no", video="v.mp4"),
        row("a.png", "<image>", "no", video="v.mp4"),
        row(None, "tool", "x") | {"conversations": [{"from": "tool", "value": "x"}]},
        {"conversations": [{"from": "gpt"}]},
    ]
    path.write_text(json.dumps(values))
    reported: list[str] = []
    rows = RowFile(path, media_root=tmp_path / "pictures", report=reported.append)
    assert rows.kind == "llava" and [r.row for r in rows] == [1, 2, 3, 5, 6, 7, 8]
    assert content(rows[0]) == [[("image", "a.png"), "what?"], ["red"], ["and?"], ["no"]]
    assert content(rows[1])[0] == [("image", "a.png"), ("image", "b.png"), "both?"]
    assert content(rows[3])[0] == [("image", "a.png"), "none"]  # no placeholder: it goes first
    assert content(rows[4])[0] == ["first?", ("image", "c.png")]
    assert content(rows[5])[0] == [("video", "v.mp4"), "what moves?"]
    assert content(rows[6])[0] == [("video", "v.mp4"), "Where?"]
    assert "1 image(s) more" in reported[0] and "more image placeholders" in reported[1]
    assert "1 video(s) more" in reported[2] and "'tool'" in reported[3]


@pytest.mark.parametrize("as_dict", [False, True])
def test_mmdu(tmp_path: Path, as_dict: bool) -> None:
    names = [image(tmp_path / f"{n}.png") for n in range(3)]

    def row(images: list[str], *texts: str) -> dict[str, Any]:
        talk = [{"from": ("user", "assistant")[i % 2], "value": s} for i, s in enumerate(texts)]
        listed = {str(i): n for i, n in enumerate(images)} if as_dict else images
        return {"id": "x", "image": listed, "conversations": talk}

    both = "Image1: <ImageHere>. Image2: <ImageHere>.\nCompare."
    path = tmp_path / "mmdu.json"
    path.write_text(
        json.dumps([row(names, both, "A", "and <ImageHere>?", "B"), row(names[:1], both, "A")])
    )
    reported: list[str] = []
    rows = RowFile(path, report=reported.append)
    assert (rows.kind, len(rows), rows.broken) == ("mmdu", 1, 1)
    first, second = ("image", "0.png"), ("image", "1.png")
    assert content(rows[0])[0] == ["Image1: ", first, ". Image2: ", second, ".\nCompare."]
    assert content(rows[0])[2] == ["and ", ("image", "2.png"), "?"]
    assert [m["role"] for m in rows[0].messages] == ["user", "assistant"] * 2


def test_plain_text(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("one\n---\ntwo --- \n\n---  \n---\nthree\n---")
    assert [d.text for d in RowFile(path, separator="---")] == ["one\n", "two --- \n\n", "three\n"]
    assert RowFile(path)[0] == ConversationDocument(path.read_text(), str(path), 1)
    code = tmp_path / "code.py"
    code.write_text("{}")
    assert RowFile(code, "text")[0].text == "{}"
    rows = RowFile(lines(tmp_path / "t.jsonl", {"text": "a"}, {"text": " "}, {"text": 3}))
    assert (rows.kind, len(rows), rows.broken) == ("text", 1, 2)


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "odd.bin").write_bytes(b"\x00\x01")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "half.json").write_text("[{")
    (tmp_path / "blank.txt").write_text(" \n")
    lines(tmp_path / "rows.jsonl", {"prompt": 1})
    lines(tmp_path / "none.jsonl", {"messages": turns("q")})
    (tmp_path / "empty.jsonl").write_text("")
    names = (
        "odd.bin",
        "latin.txt",
        "half.json",
        "blank.txt",
        "rows.jsonl",
        "none.jsonl",
        "empty.jsonl",
        "gone.jsonl",
        "",
    )
    for name in names:
        with pytest.raises(DataError) as raised:
            RowFile(tmp_path / name, report=lambda line: None)
        assert "\n" not in str(raised.value) and str(tmp_path) in str(raised.value)
    with pytest.raises(DataError, match="no kind"):
        RowFile(tmp_path / "rows.jsonl", "alpaca")
    assert issubclass(DataError, MmkvError)


def test_a_file_that_changes_is_noticed(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", {"text": "one"}, {"text": "two"})
    rows = RowFile(path)
    path.write_text("x")
    with pytest.raises(DataError, match="changed"):
        rows[1]


# --- mixture ---


def mixture(seed: int = 3) -> Mixture[tuple[str, int]]:
    sources = [
        [(name, i) for i in range(size)] for name, size in zip("abc", (7, 40, 1), strict=True)
    ]
    return Mixture(sources, [2.0, 1.0, 0.5], seed)


def first(walk: Iterator[Any], count: int) -> list[Any]:
    return list(islice(walk, count))


def test_mixture_epochs_and_weights() -> None:
    items = [item for _, item in first(mixture().walk(), 14000)]
    of_a = [row for name, row in items if name == "a"]
    epochs = [of_a[i : i + 7] for i in range(0, len(of_a) - 6, 7)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > len(epochs) / 2
    shares = [sum(name == n for name, _ in items) / len(items) for n in "abc"]
    assert np.allclose(shares, [4 / 7, 2 / 7, 1 / 7], atol=0.02)
    # Nothing in it may change from release to release: a resumed run would see other data.
    assert items[:6] == [("a", 5), ("a", 6), ("a", 3), ("c", 0), ("c", 0), ("b", 37)]
    assert items[:60] != [item for _, item in first(mixture(4).walk(), 60)]


@given(st.integers(0, 9000), st.integers(1, 7))
@settings(max_examples=30, deadline=None)
def test_mixture_resumes_and_is_sharded(start: int, world: int) -> None:
    alone = first(mixture().walk(start), 60)
    assert [n for n, _ in alone] == list(range(start, start + 60))
    assert alone == [(n, mixture()[n]) for n, _ in alone]
    shards = [first(mixture().walk(start, rank, world), 60) for rank in range(world)]
    assert sorted(chain(*shards))[:60] == alone
    assert all(n % world == rank for rank in range(world) for n, _ in shards[rank])


def test_a_resumed_mixture_reads_nothing_before() -> None:
    read: list[int] = []

    class Watched(list[int]):
        def __getitem__(self, index: Any) -> Any:
            read.append(index)
            return super().__getitem__(index)

    made = Mixture([Watched(range(5000))], [1.0], 0)
    first(made.walk(100_000), 3)
    assert len(read) == 3


def test_mixture_refuses_bad_arguments() -> None:
    for sources, weights, seed in (
        ([], [], 0),
        ([[]], [1], 0),
        ([[1]], [0], 0),
        ([[1]], [1, 2], 0),
        ([[1]], [1], -1),
        ([[1]], [float("nan")], 0),
    ):
        with pytest.raises(DataError):
            Mixture(sources, weights, seed)
    with pytest.raises(IndexError):
        mixture()[-1]
    with pytest.raises(ValueError):
        next(mixture().walk(0, 2, 2))


# A row of training data that no tokenizer reads is skipped, counted and named.


GOOD: dict[str, dict[str, Any]] = {
    "chat": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "what?"}]},
            {"role": "assistant", "content": "red"},
        ]
    },
    "llava": {
        "conversations": [{"from": "human", "value": "what?"}, {"from": "gpt", "value": "red"}]
    },
    "mmdu": {
        "conversations": [{"from": "user", "value": "what?"}, {"from": "assistant", "value": "red"}]
    },
    "pairs": {"prompt": "what?", "completion": "red"},
    "text": {"text": "red and blue"},
}


def texts_of(row: Any) -> list[tuple[Any, Any]]:
    """Return (holder, key) of every text that a model would read."""
    if isinstance(row, list):
        return [found for inner in row for found in texts_of(inner)]
    return [
        found
        for key, inner in row.items()
        for found in ([(row, key)] if isinstance(inner, str) else texts_of(inner))
        if not isinstance(inner, str) or key in ("text", "value", "content", "prompt", "completion")
    ]


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.sampled_from(sorted(GOOD)),
    st.characters(categories=["Cs"]),
    st.text(max_size=4),
    st.sampled_from([".jsonl", ".json"]),
    st.data(),
)
def test_half_a_character_costs_one_row(
    tmp_path: Path, kind: str, odd: str, around: str, suffix: str, data: st.DataObject
) -> None:
    row = json.loads(json.dumps(GOOD[kind]))
    holder, key = data.draw(st.sampled_from(texts_of(row)))
    holder[key] = around + odd + around
    rows = [GOOD[kind], row, GOOD[kind]]
    file = tmp_path / f"rows{suffix}"
    lines = [json.dumps(each) for each in rows]
    file.write_text("\n".join(lines) if suffix == ".jsonl" else f"[{','.join(lines)}]")
    said: list[str] = []
    read = RowFile(file, kind, report=said.append)
    assert len(read) == 2 and read.broken == 1
    assert f"{file}:2: skipped" in said[0] and "half of a character" in said[0]
    assert "skipped 1 of 3 rows" in said[1]
    "".join(said).encode()


def test_a_row_that_calls_tools_is_no_row(tmp_path: Path) -> None:
    made = {"function": {"name": "a", "arguments": {}}}
    asked = {"role": "user", "content": "go"}
    rows = [
        [asked, {"role": "assistant", "content": "now", "tool_calls": [made]}],
        [asked, {"role": "tool", "content": "1"}, {"role": "assistant", "content": "so"}],
    ]
    file = tmp_path / "rows.jsonl"
    lines = [GOOD["chat"], *({"messages": row} for row in rows)]
    file.write_text("\n".join(json.dumps(each) for each in lines))
    assert RowFile(file, "chat").broken == 2


@pytest.mark.parametrize("odd", [["image"], {"image": 1}])
def test_a_part_whose_type_is_no_text_costs_one_row(tmp_path: Path, odd: Any) -> None:
    row = json.loads(json.dumps(GOOD["chat"]))
    row["messages"][0]["content"][0]["type"] = odd
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps(each) for each in (GOOD["chat"], row)))
    said: list[str] = []
    made = examples(str(bundled_model()), [str(file)], 4, 0, report=said.append)
    assert all(made[n]["input_ids"].numel() for n in range(4))
    assert any("skipped" in line for line in said)
