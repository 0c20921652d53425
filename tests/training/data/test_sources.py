"""Published training sets: rows as they are published, mixtures by a file, needles, packing."""

from __future__ import annotations

import base64
import csv
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import torch

from mmkv.training.data.conversations import DataError, RowFile, UnusableRow
from mmkv.training.data.examples import Examples, Mixture, _chosen, examples
from mmkv.training.data.sources import PUBLISHED
from tests.support.chat_models import save_qwen3_vl
from tests.training.data.test_conversations import content, image, lines, turns


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3-VL with a tokenizer of bytes."""
    return save_qwen3_vl(tmp_path_factory.mktemp("sources") / "model")


def talk(question: str, reply: str) -> list[dict[str, str]]:
    return [{"from": "human", "value": question}, {"from": "gpt", "value": reply}]


def shard(path: Path, rows: list[dict[str, Any]], group: int = 2) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=group)
    return path


# --- rows of the published form ---


def test_parquet_with_pictures(tmp_path: Path) -> None:
    """LLaVA-NeXT-Data's struct, R1-OneVision's base64 with no placeholder, bytes, and paths."""
    raw = (tmp_path / image(tmp_path / "a.png")).read_bytes()
    asked = {"id": "1", "data_source": "coco", "conversations": talk("<image>\nwhat?", "red")}
    gone = asked | {"image": {"bytes": None, "path": "gone.png"}}
    following = asked | {"image": {"bytes": raw, "path": "x.jpg"}}
    alone = asked | {"image": None, "conversations": talk("hello", "hi")}
    next_data = [following, gone, asked | {"image": {"bytes": None, "path": "a.png"}}, alone]
    rows = RowFile(shard(tmp_path / "next.parquet", next_data), media_root=tmp_path)
    uri = f"data:image;base64,{base64.b64encode(raw).decode()}"
    assert rows.kind == "llava" and len(rows) == 4 and list(rows.groups or ()) == [0, 2]
    assert rows[0].messages[0]["content"][0]["image"] == uri
    assert content(rows[2])[0] == [("image", "a.png"), "what?"]
    assert content(rows[3]) == [["hello"], ["hi"]]
    assert isinstance(rows[1], UnusableRow) and "gone.png" in rows[1].reason and rows[1].row == 2
    thought = {"id": "2", "conversations": talk("What colour?", "<think>x</think> red")}
    for picture in (base64.b64encode(raw).decode(), raw, "a.png"):
        file = shard(tmp_path / "one.parquet", [thought | {"image": picture}])
        made = RowFile(file)[0].messages[0]["content"]
        assert [part["type"] for part in made] == ["image", "text"]
        assert made[0]["image"] in (uri, str(tmp_path / "a.png"))


def test_shards_are_read_group_by_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenR1-Math-220k's form; an epoch reads each row group once, whatever the seed."""
    for number in range(3):
        rows = [
            {
                "problem": f"{number}-{row}",
                "generations": ["long"] * 3,
                "messages": turns(f"{number}-{row}", "<think></think> 4"),
            }
            for row in range(40)
        ]
        shard(tmp_path / f"train-{number}.parquet", rows, group=5)
    read = RowFile(tmp_path / "train-*.parquet")
    assert read.kind == "chat" and len(read) == 120
    assert (Path(read[119].file).name, read[119].row) == ("train-2.parquet", 40)
    groups: list[int] = []
    real = parquet.ParquetFile.read_row_group

    def counted(self: Any, number: int, columns: list[str]) -> Any:
        assert columns == ["problem", "messages"]  # no generations
        groups.append(number)
        return real(self, number, columns=columns)

    monkeypatch.setattr(parquet.ParquetFile, "read_row_group", counted)
    orders = []
    for seed in (1, 2):
        fresh = RowFile(tmp_path / "train-*.parquet")
        groups.clear()
        mixture = Mixture([fresh], [1.0], seed)
        seen = [content(mixture[n])[0][0] for n in range(120)]
        assert len(set(seen)) == 120 and len(groups) <= 24 + 1  # 24, and what told the kind
        orders.append(seen)
    assert orders[0] != orders[1]
    steps = np.diff([int(name.split("-")[1]) for name in seen])
    assert np.abs(steps).mean() > 5  # several groups are mixed: 1 in the file's order


def test_parquet_without_pyarrow_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(DataError, match=r"pip install 'mmkv\[train\]'"):
        RowFile(tmp_path / "x.parquet")


FORMS: dict[str, tuple[dict[str, Any], str, str]] = {
    "alpaca": (
        {"instruction": "Add.", "input": "2 and 3", "output": "5"},
        "Add.\n\n2 and 3",
        "5",
    ),
    "longalpaca": (
        {"instruction": "A book. Who?", "output": "He.", "file": "b"},
        "A book. Who?",
        "He.",
    ),
    "buddhi": (
        {"question": "Who?", "answer": "He.", "extended_context": "A tale.", "context": "A"},
        "A tale.\n\nWho?",
        "He.",
    ),
    "prompt": ({"prompt": "Say", "completion": "so"}, "Say", "so"),
    "prompt of messages": (
        {"prompt": turns("Say"), "completion": [{"role": "assistant", "content": "so"}]},
        "Say",
        "so",
    ),
    "synthlong": ({"conversations": turns("Passages. Who?", "He.")}, "Passages. Who?", "He."),
    "deepscaler": (
        {"problem": "2 + 2?", "answer": "4", "solution": "It is 4."},
        "2 + 2?",
        "It is 4.",
    ),
    "booksum": (
        {"bid": 1, "title": "T", "text": "Once.", "summary": [{"text": " "}, {"text": "It was."}]},
        "Summarise this text.\n\nOnce.",
        "It was.",
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_questions_with_replies(tmp_path: Path, name: str) -> None:
    row, question, reply = FORMS[name]
    reported: list[str] = []
    read = RowFile(lines(tmp_path / "rows.jsonl", row, {"id": 3}), report=reported.append)
    assert content(read[0]) == [[question], [reply]]
    assert (len(read), read.broken) == (1, 1) and "rows.jsonl:2: skipped" in reported[0]


def test_booksum_as_csv(tmp_path: Path) -> None:
    """The columns of kmfoda/booksum: ``summary`` is there too, as another form of summary_text."""
    with (tmp_path / "train.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["bid", "chapter", "summary", "summary_text"])
        writer.writerow(["1", "Line one,\nline two." * 9000, "{'x': 1}", "Short."])
        writer.writerow(["2", "", "{}", "Nothing."])
    read = RowFile(tmp_path / "train.csv", report=lambda line: None)
    assert (read.kind, len(read), read.broken) == ("pairs", 1, 1)
    assert content(read[0])[0][0].startswith("Summarise this text.\n\nLine one,\nline two.")
    assert content(read[0])[1] == ["Short."]


# --- by name, by a file, by a generator ---


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_set_that_is_not_there_says_what_it_needs(model: Path, tmp_path: Path, name: str) -> None:
    for source in (name, f"2*{name}:{tmp_path}"):
        with pytest.raises(DataError) as raised:
            examples(str(model), [source], 1, 0)
        said = str(raised.value)
        assert "\n" not in said and "nothing is fetched" in said
        assert f"hf download {PUBLISHED[name].hub} --repo-type dataset" in said


def test_a_set_is_found_as_the_hub_lays_it_out(model: Path, tmp_path: Path) -> None:
    video = tmp_path / "0_30_s_academic_v0_1" / "0_30_s_academic_v0_1_cap_processed.json"
    video.parent.mkdir()
    (video.parent / "v.mp4").write_bytes(b"x")
    row = {"video": "v.mp4", "conversations": talk("<image>\nWhere?", "there")}
    video.write_text(json.dumps([row]))
    (tmp_path / "0_30_s_youtube_v0_1").mkdir()
    (tmp_path / "0_30_s_youtube_v0_1" / "x_processed.json").write_text("[]")
    made = examples(str(model), [f"llava-video:{tmp_path}"], 1, 0)
    assert content(made.mixture[0])[0] == [("video", "v.mp4"), "Where?"]
    # WG-KV, appendix C: texts of 4K tokens and more, after a prompt.
    book = lines(tmp_path / "web.jsonl", *[{"text": "no " * 9}] * 40, {"text": "abc " * 3000})
    prefixed = examples(str(model), [f"fineweb-edu:{book}"], 1, 0, max_length=2**15)
    assert 4096 <= len(prefixed[0]["input_ids"][0]) < 2**15
    text = prefixed.encoder.processor.tokenizer.decode(prefixed[0]["input_ids"][0])
    assert text.startswith("Please analyze and summarize the following text: \n\nabc abc")


def test_the_papers_mixtures_by_name(model: Path, tmp_path: Path) -> None:
    """Rows of every set in a folder of its name, drawn in DBTrimKV's shares (appendix B.1)."""
    row = {"conversations": talk("2 + 2?", "<think>x</think> 4")}
    for name, file in (("m4-instruct", "m4_instruct_annotations.json"), ("llava-video", "v.json")):
        path = tmp_path / name / file
        if name == "llava-video":
            path = tmp_path / name / "0_30_s_academic_v0_1" / "0_30_s_oe_qa_processed.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps([row] * 40))
    shard(tmp_path / "r1-onevision" / "data" / "a.parquet", [row | {"image": ""}] * 40, group=7)
    problems = [{"problem": "2 + 2?", "messages": turns("2 + 2?", "4")}] * 40
    shard(tmp_path / "openr1-math" / "data" / "train-0.parquet", problems, group=7)
    made = examples(str(model), [f"mixture:dbtrimkv:{tmp_path}"], 9, 0)
    assert [len(source) for source in made.mixture.sources] == [16, 12, 12, 8]
    assert all(made[n]["labels"].max() > 0 for n in range(9))
    with pytest.raises(DataError, match="synthlong is not in the hub's cache"):
        examples(str(model), ["mixture:trimkv-long"], 1, 0)


def test_a_mixture_by_a_file(model: Path, tmp_path: Path) -> None:
    lines(tmp_path / "a.jsonl", *[{"prompt": f"a{n}?", "completion": "yes"} for n in range(40)])
    lines(tmp_path / "b.jsonl", *[{"text": "b" * (24 + n)} for n in range(17)])
    file = tmp_path / "mix.toml"
    file.write_text(
        '[[source]]\ndata = "pairs:a.jsonl"\nweight = "rows"\nshare = 0.25\n'
        '[[source]]\ndata = "b.jsonl"\nweight = 20\nshortest = 30\nlongest = 40\ntokens = 200\n'
    )
    made = examples(str(model), [str(file)], 400, 0, report=lambda line: None)
    first, second = made.mixture.sources
    used = [len(one) for row in second for one in made.encoder(row)]
    assert len(first) == 10 and 200 <= sum(used) < 240 and len(used) < len(second)
    drawn = [made[n]["input_ids"].shape[1] for n in range(100)]
    texts = [made.encoder.processor.tokenizer.decode(made[n]["input_ids"][0]) for n in range(100)]
    of_b = [size for size, text in zip(drawn, texts, strict=True) if text.startswith("b")]
    assert 40 < len(of_b) < 80 and min(of_b) >= 30  # weights 20 and 10, some of b too short
    again = examples(str(model), [f"mixture:{file}"], 400, 0, report=lambda line: None)
    assert torch.equal(again[99]["input_ids"], made[99]["input_ids"])
    (tmp_path / "mix.json").write_text(json.dumps({"source": [{"data": "a.jsonl"}]}))
    assert (
        len(examples(str(model), [f"mixture:{tmp_path}/mix.json"], 1, 0).mixture.sources[0]) == 40
    )
    for wrong, words in (
        ("source = [", "cannot read the mixture"),
        ("[[source]]\nweight = 1", "source.0.data"),
        ('[[source]]\ndata = "a.jsonl"\nwieght = 1', "source.0.wieght"),
        ('[[source]]\ndata = "2*a.jsonl"\nweight = 3', "one weight"),
        ('[[source]]\ndata = "a.jsonl"\nweight = -1', "weights above 0"),
    ):
        file.write_text(wrong)
        with pytest.raises(DataError, match=words) as raised:
            examples(str(model), [str(file)], 1, 0)
        assert "\n" not in str(raised.value)


def test_needles_of_any_length_and_tokenizer(model: Path) -> None:
    """Reply and text are read apart again; DBTrimKV's appendix B.3 states sizes and counts."""

    def made(split: Any) -> Examples:
        return examples(str(model), ["niah:4000-12000"], 9, 0, max_length=9000, split=split)

    sizes, counts = [], set()
    for split, rows in (("train", 5117), ("heldout", 200)):
        some = made(split)
        assert len(some.mixture.sources[0]) == rows
        for index in range(3):
            ids, labels = (some[index][name][0] for name in ("input_ids", "labels"))
            text, _, said = some.encoder.processor.tokenizer.decode(ids).rpartition("assistant\n")
            known: dict[str, list[str]] = {}
            for name, number in re.findall(r"numbers for (\S+) is: (\d{7})\.", text):
                known.setdefault(name, []).append(number)
            replies = dict(line.split(": ") for line in said.split("<|im_end|>")[0].split("\n"))
            for name, numbers in replies.items():
                assert sorted(numbers.split(", ")) == sorted(known[name])
            target = some.encoder.processor.tokenizer.decode(labels[labels != -100])
            assert target.startswith(next(iter(replies)))
            counts.add((split, len(known), len(next(iter(known.values()))), len(replies)))
            sizes.append(ids.numel())
    assert [each for each in counts if each[0] == "heldout"] == [("heldout", 8, 4, 4)]
    assert len(counts) > 3 and min(sizes) > 3800 and 6000 < max(sizes) <= 9000
    assert torch.equal(made("heldout")[2]["input_ids"][0], ids)
    with pytest.raises(DataError, match="--max-length is 512"):
        examples(str(model), ["niah"], 1, 0, max_length=512)
    with pytest.raises(DataError, match="no range"):
        examples(str(model), ["niah:9-4"], 1, 0)


def test_documents_fill_a_pass(model: Path, tmp_path: Path) -> None:
    lines(tmp_path / "a.jsonl", *[{"prompt": "a" * n, "completion": "yes"} for n in range(1, 99)])
    made = examples(str(model), [str(tmp_path / "a.jsonl")], 4, 0, max_length=600, pack=True)
    packs = [made.packed(n) for n in range(4)]
    sizes = [sum(document["labels"].shape[1] for document in pack) for pack in packs]
    assert 300 < min(sizes) <= max(sizes) <= 600 and min(map(len, packs)) > 2
    assert torch.equal(made.packed(3)[-1]["input_ids"], packs[3][-1]["input_ids"])
    assert torch.equal(packs[2][0]["input_ids"], made[2]["input_ids"])
    one = [str(lines(tmp_path / "b.jsonl", {"prompt": "a", "completion": "yes"}))]
    most = 2 * examples(str(model), one, 1, 0)[0]["labels"].shape[1]
    assert len(examples(str(model), one, 1, 0, max_length=most, pack=True).packed(0)) == 2


def test_a_share_of_a_source_is_rounded() -> None:
    for share, counts in ((0.5, [1, 1, 2, 2, 2]), (0.3, [1, 1, 1, 1, 2])):
        asked: Any = SimpleNamespace(share=share, tokens=None)
        none: Any = None
        found = [_chosen(range(n), asked, none, none, 0, 0) for n in range(1, 6)]
        assert [len(one) for one in found if one is not None] == counts
        assert all((np.diff(one) > 0).all() for one in found if one is not None)
