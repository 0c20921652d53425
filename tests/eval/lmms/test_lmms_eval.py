"""Real runs of lmms-eval over local data, compared with the engine and with its own adapter."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import mmkv
from mmkv.cli.app import run as command
from mmkv.eval.lmms.answers import main as to_answers
from mmkv.eval.lmms.settings import CHAT_IMAGES, SYSTEM_PROMPT, FrameRules
from mmkv.eval.lmms.tasks import merged, shipped_folder, write
from mmkv.eval.long_text.benchmarks import tasks as long_tasks
from mmkv.eval.mmdu.data import AnswerFolder, read_benchmark
from mmkv.prompt.video import load_video
from tests.support.lmms_runs import MODEL, Written, needs_lmms_eval, run, written
from tests.support.tiers import one_in

pytestmark = [
    needs_lmms_eval,
    pytest.mark.slow(reason="four runs of lmms-eval, each of which reads its 2,000 task files"),
]

# By task: tokens that it lets a reply have, and where its pictures (rows, videos) lie.
PICTURES = {
    "mmstar": (128, "mmstar/*.parquet"),
    "mme": (16, "mme/data/*.parquet"),
    "mmmu_pro_vision": (256, "mmmu_pro/vision/*.parquet"),
    "gqa": (16, "gqa/testdev_balanced_images/*.parquet"),
    "textvqa_val": (128, "textvqa/data/*.parquet"),
}
VIDEOS = {
    "videomme": (16, "videomme/videomme", "videomme/data/{videoID}.mp4"),
    "videomathqa_mcq": (16, "videomathqa/mcq", "videomathqa/data/{videoID}.mp4"),
    "video_mmmu_adaptation": (1024, "video_mmmu/Adaptation", "video_mmmu/data/Art/{id}.mp4"),
}
COUNT = 4
LONG = ("longbench_qasper", "longmemeval_s", "scbench_kv", "helmet_nq_8k")


@pytest.fixture(scope="module")
def engine() -> mmkv.Engine:
    torch.set_num_threads(1)
    low, high = CHAT_IMAGES
    return mmkv.Engine.from_pretrained(
        MODEL, policy="full", dtype="float32", min_pixels=low, max_pixels=high
    )


@pytest.fixture(scope="module")
def data(engine: mmkv.Engine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.support import long_text_rows
    from tests.support.lmms_data import write_all

    def reply(picture: Any, text: str) -> str:
        parts = [{"type": "image", "image": picture}, {"type": "text", "text": text}]
        return ask(engine, parts, 16).text.strip()

    folder = tmp_path_factory.mktemp("data")
    write_all(folder, COUNT, reply)
    dialogues = folder / "mmdu" / "benchmark.json"
    dialogues.write_text(json.dumps(json.loads(dialogues.read_text())[:4]))
    return long_text_rows.write_all(folder)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def ours(data: Path, home: Path, tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Run everything through ``mmkv eval``: unlimited budget, three documents at a time."""
    output = tmp_path_factory.mktemp("ours")
    tasks = ",".join([*PICTURES, *VIDEOS, *LONG, "mmdu"])
    done = run(
        [
            *"mmkv eval --tasks".split(),
            tasks,
            "--model",
            str(MODEL),
            "--data",
            str(data),
            "--output",
            str(output),
            *"--policy full --dtype float32 --batch-size 3".split(),
        ],
        home,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert done.stderr.strip().splitlines()[-1].startswith("mmkv: results in ")
    return written(output)


def ask(engine: mmkv.Engine, parts: list[Any], limit: int) -> mmkv.Reply:
    messages = [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": parts},
    ]
    (reply,) = engine.generate(messages, mmkv.Sampling(max_new_tokens=limit))
    return reply


def rows(data: Path, pattern: str) -> list[dict[str, Any]]:
    from datasets import load_dataset

    files = [str(path) for path in data.glob(pattern)]
    return list(load_dataset("parquet", data_files=files, split="train"))


@one_in(2)
@pytest.mark.parametrize("task", PICTURES)
def test_replies_are_the_engines_own(
    task: str, ours: Written, data: Path, engine: mmkv.Engine
) -> None:
    limit, where = PICTURES[task]
    shown, samples = [row["image"] for row in rows(data, where)], ours.samples(f"{task}_local")
    assert len(shown) == len(samples) == COUNT
    for picture, sample in zip(shown, samples, strict=True):
        parts = [{"type": "image", "image": picture}, {"type": "text", "text": sample["input"]}]
        reply = ask(engine, parts, limit)
        assert sample["filtered_resps"] == reply.text.strip()
        (counts,) = sample["token_counts"]
        assert counts["input_tokens"] == reply.prompt_tokens
        assert counts["output_tokens"] == len(reply.token_ids)
        assert reply.memory is not None
        assert counts["cache"]["entries"] == reply.memory.entries
        assert counts["cache"]["by_modality"] == reply.memory.by_modality
        assert counts["cache"]["finish_reason"] == reply.finish_reason


@pytest.mark.parametrize("task", VIDEOS)
def test_videos_too(task: str, ours: Written, data: Path, engine: mmkv.Engine) -> None:
    limit, where, film = VIDEOS[task]
    own = engine.processor.rules  # type: ignore[attr-defined]
    engine.processor.rules = FrameRules()  # type: ignore[attr-defined]
    try:
        documents, samples = rows(data, f"{where}/*.parquet"), ours.samples(f"{task}_local")
        for row, sample in zip(documents, samples, strict=True):
            clip = load_video(
                data / film.format(**row), num_frames=32, size_rule=engine.processor.size_rule
            )
            parts = [{"type": "video", "video": clip}, {"type": "text", "text": sample["input"]}]
            reply = ask(engine, parts, limit)
            assert sample["filtered_resps"] == reply.text.strip()
            assert sample["token_counts"][0]["cache"]["by_modality"]["video"] > 0
    finally:
        engine.processor.rules = own  # type: ignore[attr-defined]


SHIPPED = {
    "mmstar": "mmstar/mmstar.yaml",
    "mme": "mme/mme.yaml",
    "mmmu_pro_vision": "mmmu_pro/mmmu_pro_vision.yaml",
    "textvqa_val": "textvqa/textvqa_val.yaml",
}


@pytest.mark.parametrize("task", SHIPPED)
def test_scores_follow_from_the_replies(task: str, ours: Written, data: Path) -> None:
    """The results file, from the engine's replies and the shipped scoring functions."""
    from lmms_eval.utils import load_yaml_config

    source = shipped_folder() / SHIPPED[task]
    config = load_yaml_config(str(source))
    prompts = merged(source)["lmms_eval_specific_kwargs"]
    scored: dict[str, list[Any]] = {}
    for row, sample in zip(
        rows(data, PICTURES[task][1]), ours.samples(f"{task}_local"), strict=True
    ):
        # The prompts are those of lmms-eval's own Qwen3-VL adapter, where the task has any.
        if end := prompts.get("qwen3_vl", prompts["default"])["post_prompt"]:
            assert sample["input"].endswith(end)
        for name, value in config["process_results"](row, [sample["filtered_resps"]]).items():
            scored.setdefault(name, []).append(value)
    for metric in config["metric_list"]:
        values = scored.get(metric["metric"])
        if values and metric["metric"] != "submission":  # which writes a file
            mean = metric["aggregation"]
            wanted = sum(values) / len(values) if mean == "mean" else mean(values)
            given = ours.results[f"{task}_local"][f"{metric['metric']},none"]
            assert given == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("task", "metric", "score"),
    [
        ("gqa", "exact_match", 0.5),
        ("textvqa_val", "exact_match", 0.5),
        ("mmstar", "average", 0.5),
        ("videomme", "videomme_perception_score", 50.0),
        ("videomathqa_mcq", "videomathqa_perception_score", 50.0),
    ],
)
def test_scores_are_those_the_data_were_made_for(
    task: str, metric: str, score: float, ours: Written
) -> None:
    """Every second document wants what the engine answered when the data were written."""
    assert ours.results[f"{task}_local"][f"{metric},none"] == pytest.approx(score)


@pytest.mark.parametrize("name", LONG)
def test_long_texts_are_answered_and_scored_and_shared_ones_read_once(
    name: str, ours: Written, data: Path, engine: mmkv.Engine
) -> None:
    task = long_tasks()[name]
    docs, samples = task.documents(data), ours.samples(f"{name}_local")
    found: dict[str, list[float]] = {}
    read = whole = shared = 0
    for doc, sample in zip(docs, samples, strict=True):
        given = sample["filtered_resps"]
        replies = given if isinstance(given, list) else [given]
        for at in range(task.rounds(doc)):
            (message,) = task.messages(doc, at, replies)
            asked = "".join(part["text"] for part in message["content"])
            if not message.get("raw"):
                reply = ask(engine, [{"type": "text", "text": asked}], task.tokens)
                assert replies[at] == reply.text.strip()
                whole += reply.prompt_tokens
        (counts,) = sample["token_counts"]
        read += counts["input_tokens"]
        shared += counts["cache"].get("context_tokens", 0)
        for metric, values in task.score(doc, replies).items():
            found.setdefault(metric, []).extend(values)
    for metric, values in found.items():
        given = ours.results[f"{name}_local"][f"{metric},none"]
        assert given == pytest.approx(sum(values) / len(values))
    if name != "helmet_nq_8k":
        # Two more questions follow the one context of SCBench, one that of LongBench, and three
        # that of LongMemEval, whose rows have the same chats here.
        again = {"longbench_qasper": 1, "longmemeval_s": 3, "scbench_kv": 2}[name]
        assert read == whole - again * shared < whole


def test_mmdu_is_answered_and_scored_as_by_its_own_command(
    ours: Written, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    low, high = CHAT_IMAGES
    answers = tmp_path / "answers"
    options = [
        *"--policy full --dtype float32 --system".split(),
        SYSTEM_PROMPT,
        "--quiet",
        "--min-pixels",
        str(low),
        "--max-pixels",
        str(high),
    ]
    given = ["--data", str(data / "mmdu" / "benchmark.json")]
    assert command(["mmdu", *given, "--output", str(answers), *options]) == 0
    dialogues, _ = read_benchmark(data / "mmdu" / "benchmark.json")
    samples, folder = ours.samples("mmdu_local"), AnswerFolder(answers)
    for dialogue, sample in zip(dialogues, samples, strict=True):
        assert sample["filtered_resps"] == folder.answers(dialogue)
        turns = folder.load(dialogue)["mmkv"]["turns"]  # type: ignore[index]
        (counts,) = sample["token_counts"]
        assert counts["input_tokens"] == sum(turn["prompt_tokens"] for turn in turns)
        assert counts["output_tokens"] == sum(turn["generated"] for turn in turns)
        assert counts["cache"]["tokens_seen"] == turns[-1]["tokens_seen"]
    converted = tmp_path / "converted"
    stamp = ours.results_file.name.removesuffix("results.json")
    samples_file = ours.results_file.with_name(f"{stamp}samples_mmdu_local.jsonl")
    assert to_answers([str(samples_file), str(converted)]) == 0
    capsys.readouterr()
    tables = []
    for path in (answers, converted):
        assert command(["mmdu", "score", *given, "--answers", str(path)]) == 0
        tables.append(capsys.readouterr().out.replace(str(path), ""))
    assert tables[0] == tables[1]
    right, of = re.search(r"\| all \| (\d+) \| (\d+) \|", tables[0]).groups()  # type: ignore[union-attr]
    score = ours.results["mmdu_local"]["exact_match,none"]
    # Chance is below 0.05: an answer is one of some sixty names, or a word of up to four letters.
    assert score == pytest.approx(int(right) / int(of)) and score > 0.6
    assert ours.results["mmdu_local"]["answered,none"] == 1


@pytest.mark.long(
    reason="loads transformers' model, too; test_replies_are_the_engines_own has ours"
)
def test_replies_are_those_of_lmms_evals_own_adapter(
    ours: Written, data: Path, home: Path, tmp_path: Path
) -> None:
    names = write(list(PICTURES), tmp_path / "tasks", data)
    done = run(
        [
            *"tests.support.lmms_builtin --model qwen3_vl --device cpu --model_args".split(),
            f"pretrained={MODEL},device_map=cpu",
            "--tasks",
            ",".join(names),
            "--include_path",
            str(tmp_path / "tasks"),
            "--output_path",
            str(tmp_path / "out"),
            "--log_samples",
        ],
        home,
    )
    assert list((tmp_path / "out").rglob("*_results.json")), done.stdout[-3000:]
    theirs = written(tmp_path / "out")
    for name in names:
        assert [s["input"] for s in theirs.samples(name)] == [
            s["input"] for s in ours.samples(name)
        ]
        assert theirs.texts(name) == ours.texts(name)
        assert theirs.results[name] == ours.results[name]
