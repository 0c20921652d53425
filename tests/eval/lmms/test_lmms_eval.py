"""Real runs of lmms-eval over local data, compared with the engine and with its own adapter."""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from datasets import Dataset, Image
from PIL import Image as pil

import mmkv
from mmkv.cli.app import run as command
from mmkv.eval.lmms.answers import main as to_answers
from mmkv.eval.lmms.settings import CHAT_IMAGES, SYSTEM_PROMPT, FrameRules
from mmkv.eval.lmms.tasks import merged, shipped_folder, write
from mmkv.eval.mmdu.data import AnswerFolder, read_benchmark
from mmkv.prompt.video import load_video
from mmkv.resources import bundled_dialogues
from mmkv.training.data.dialogues import clip
from mmkv.training.data.scenes import Question, Scene, make_scene, object_names, questions, render
from tests.support.lmms_runs import MODEL, Written, needs_lmms_eval, run, run_python, written

LETTERS = "ABCD"
WORD = "\nAnswer the question using a single word or phrase."  # GQA's and TextVQA's last words


def write_all(folder: Path, count: int, reply: Callable[[pil.Image, str], str]) -> None:
    """Local data of nine shipped tasks, ``count`` documents each (four videos), and our MMDU set.

    The bundled model cannot answer in the form that these prompts want, and scores of nothing but
    0 compare badly. So every second document of GQA and TextVQA wants what ``reply`` says to the
    picture and prompt, and of MMStar, Video-MME and VideoMathQA an answer without a letter.
    """
    _mmstar(folder / "mmstar", count)
    _mme(folder / "mme", count // 2)
    _mmmu_pro(folder / "mmmu_pro", count)
    _gqa(folder / "gqa", count, reply)
    _textvqa(folder / "textvqa", count, reply)
    _mathvision(folder / "mathvision", 4)
    for name in ("videomme", "video_mmmu", "videomathqa"):
        _films(folder / name / "data", name == "video_mmmu")
    _videomme(folder / "videomme")
    _video_mmmu(folder / "video_mmmu")
    _videomathqa(folder / "videomathqa")
    shutil.copytree(bundled_dialogues(), folder / "mmdu")


def asked(name: str, kinds: tuple[str, ...]) -> Iterator[tuple[Scene, Question]]:
    """Yield held-out grids of at least 2 x 2 cells, each with a question of one of the kinds.

    Smaller pictures would be enlarged: lmms-eval's models see at least four visual tokens.
    """
    rng = random.Random(name)
    while True:
        scene = make_scene(rng, "heldout")
        found = [q for q in questions(scene, rng) if q.kind in kinds]
        if scene.kind == "grid" and min(scene.rows, scene.columns) > 1 and found:
            yield scene, found[0]


def _mmstar(folder: Path, count: int) -> None:
    source, rows = asked("mmstar", ("cell",)), []
    for index in range(count):
        scene, question = next(source)
        options, letter = _choices(question.answer, index)
        listed = ", ".join(f"{mark}: {name}" for mark, name in zip(LETTERS, options, strict=True))
        rows.append(
            {
                "index": index,
                "question": f"{question.text}\nOptions: {listed}",
                "image": render(scene),
                "answer": letter if index % 4 < 2 else "",
                "category": ("math", "coarse perception")[index % 2],
                "l2_category": ("geometry", "image emotion")[index % 2],
            }
        )
    _parquet(folder / "mmstar.parquet", rows)


def _mme(folder: Path, pairs: int) -> None:
    source, rows = asked("mme", ("cell",)), []
    for index in range(pairs):
        scene, _ = next(source)
        inside = scene.items[0].name if scene.items else object_names()[0]
        outside = next(n for n in object_names() if n not in {i.name for i in scene.items})
        for name, answer in ((inside, "Yes" if scene.items else "No"), (outside, "No")):
            rows.append(
                {
                    "question_id": f"existence/{index:03}.jpg",
                    "image": render(scene),
                    "question": f"is there a {name}? Please answer yes or no.",
                    "answer": answer,
                    "category": "existence",
                }
            )
    _parquet(folder / "data" / "test-00000-of-00001.parquet", rows)


def _mmmu_pro(folder: Path, count: int) -> None:
    source, rows = asked("mmmu", ("cell",)), []
    for index in range(count):
        scene, question = next(source)
        options, letter = _choices(question.answer, index)
        rows.append(
            {
                "id": f"test_Art_{index}",
                "image": render(scene),
                "options": repr(options),
                "answer": letter,
                "subject": ("Art", "Physics")[index % 2],
            }
        )
    _parquet(folder / "vision" / "test-00000-of-00001.parquet", rows)


def _gqa(folder: Path, count: int, reply: Callable[[pil.Image, str], str]) -> None:
    source, asked_of, shown = asked("gqa", ("locate",)), [], []
    for index in range(count):
        scene, question = next(source)
        answer = reply(render(scene), question.text + WORD) if index % 2 else question.answer
        asked_of.append(
            {"id": f"q{index}", "imageId": f"n{index}", "question": question.text, "answer": answer}
        )
        shown.append({"id": f"n{index}", "image": render(scene)})
    _parquet(folder / "testdev_balanced_instructions" / "testdev-0.parquet", asked_of)
    _parquet(folder / "testdev_balanced_images" / "testdev-0.parquet", shown)


def _textvqa(folder: Path, count: int, reply: Callable[[pil.Image, str], str]) -> None:
    source, rows = asked("textvqa", ("cell",)), []
    for index in range(count):
        scene, question = next(source)
        text = question.text.capitalize()
        answer = reply(render(scene), text + WORD) if index % 2 else "something else"
        rows.append(
            {
                "question_id": index,
                "question": question.text,
                "image": render(scene),
                "ocr_tokens": ["a"],
                "answers": [answer] * 10,
            }
        )
    _parquet(folder / "data" / "validation-00000-of-00001.parquet", rows)


def _mathvision(folder: Path, count: int) -> None:
    source, rows = asked("mathvision", ("count",)), []
    for index in range(count):
        scene, question = next(source)
        rows.append(
            {
                "id": str(index),
                "question": question.text,
                "options": ["3", question.answer] if index % 2 else [],
                "decoded_image": render(scene),
                "answer": "B" if index % 2 else question.answer,
                "subject": "counting",
                "level": 1,
            }
        )
    _parquet(folder / "data" / "testmini-00000-of-00001.parquet", rows)


def _films(folder: Path, by_subject: bool) -> None:
    """Four videos: v0.mp4 ..., or as Video-MMMU names them, with the subject."""
    for index in range(4):
        turn = clip(index, "heldout")[0]
        frames = [render(frame) for frame in turn.pictures[0].frames]  # type: ignore[union-attr]
        name = f"Art/validation_Art_{index}" if by_subject else f"v{index}"
        write_video(folder / f"{name}.mp4", frames)


def _videomme(folder: Path) -> None:
    rows = []
    for index in range(4):
        question = clip(index, "heldout")[0].question
        options, letter = _choices(question.answer, index)
        rows.append(
            {
                "video_id": f"{index:03}",
                "duration": "short",
                "domain": "Knowledge",
                "sub_category": "Geography",
                "videoID": f"v{index}",
                "question_id": f"{index:03}-1",
                "task_type": "Object Recognition",
                "question": question.text,
                "options": [f"{a}. {b}" for a, b in zip(LETTERS, options, strict=True)],
                "answer": letter if index % 2 else "",
            }
        )
    _parquet(folder / "videomme" / "test-00000-of-00001.parquet", rows)


def _video_mmmu(folder: Path) -> None:
    for kind in ("Adaptation", "Comprehension"):
        question = clip(1, "heldout")[0].question
        options, letter = _choices(question.answer, 1)
        row = {
            "id": "validation_Art_1",
            "question": question.text,
            "options": options,
            "answer": letter,
            "question_type": "multiple-choice",
        }
        # One only: the task lets replies go on for 1,024 tokens.
        _parquet(folder / kind / "test-00000-of-00001.parquet", [row])


def _videomathqa(folder: Path) -> None:
    rows = []
    for index in range(4):
        question = clip(index, "heldout")[0].question
        options, letter = _choices(question.answer, index)
        rows.append(
            {
                "question_id": str(index),
                "videoID": f"v{index}",
                "question": question.text,
                "options": [f"({a}) {b}" for a, b in zip(LETTERS, options, strict=True)],
                "answer": letter if index % 2 else "",
                "category": "Counting",
                "length": "short",
            }
        )
    _parquet(folder / "mcq" / "test-00000-of-00001.parquet", rows)


def _choices(answer: str, index: int) -> tuple[list[str], str]:
    """Return four options with the answer among them, and its letter."""
    others = [n for n in object_names() if n != answer][index * 3 : index * 3 + 3]
    place = index % 4
    return [*others[:place], answer, *others[place:]], LETTERS[place]


def _parquet(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    made = Dataset.from_list(rows)
    for name in {"image", "decoded_image"} & set(rows[0]):
        made = made.cast_column(name, Image())
    made.to_parquet(path)


def write_video(path: Path, frames: list[pil.Image], hold: int = 4) -> None:
    """An MP4 file in which every picture stands for ``hold`` frames."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as file:
        stream = file.add_stream("mpeg4", rate=4)
        stream.width, stream.height = frames[0].size
        stream.pix_fmt, stream.bit_rate = "yuv420p", 4_000_000
        for picture in frames:
            for _ in range(hold):
                frame = av.VideoFrame.from_ndarray(np.asarray(picture), format="rgb24")
                file.mux(stream.encode(frame))
        file.mux(stream.encode())


# Real runs of lmms-eval over local data, compared with the engine and with its own adapter.


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
    "video_mmmu_comprehension": (1024, "video_mmmu/Comprehension", "video_mmmu/data/Art/{id}.mp4"),
}
COUNT = 4


@pytest.fixture(scope="module")
def engine() -> mmkv.Engine:
    torch.set_num_threads(1)
    low, high = CHAT_IMAGES
    return mmkv.Engine.from_pretrained(
        MODEL, policy="full", dtype="float32", min_pixels=low, max_pixels=high
    )


@pytest.fixture(scope="module")
def data(engine: mmkv.Engine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.eval.lmms.test_lmms_eval import write_all

    def reply(picture: Any, text: str) -> str:
        parts = [{"type": "image", "image": picture}, {"type": "text", "text": text}]
        return ask(engine, parts, 16).text.strip()

    folder = tmp_path_factory.mktemp("data")
    write_all(folder, COUNT, reply)
    return folder


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def ours(data: Path, home: Path, tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Run everything through ``mmkv eval``: unlimited budget, three documents at a time."""
    output = tmp_path_factory.mktemp("ours")
    tasks = ",".join([*PICTURES, *VIDEOS, "mmdu"])
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
    assert command(["mmdu", "--output", str(answers), *options]) == 0
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
        assert command(["mmdu", "score", "--answers", str(path)]) == 0
        tables.append(capsys.readouterr().out.replace(str(path), ""))
    assert tables[0] == tables[1]
    right, of = re.search(r"\| all \| (\d+) \| (\d+) \|", tables[0]).groups()  # type: ignore[union-attr]
    score = ours.results["mmdu_local"]["exact_match,none"]
    # Chance is below 0.05: an answer is one of some sixty names, or a word of up to four letters.
    assert score == pytest.approx(int(right) / int(of)) and score > 0.6
    assert ours.results["mmdu_local"]["answered,none"] == 1


def test_two_processes_write_what_one_does(
    ours: Written, data: Path, home: Path, tmp_path: Path
) -> None:
    done = run(
        [
            *"accelerate.commands.launch --multi_gpu --num_processes 2 --num_machines 1".split(),
            *"--main_process_port 0 --mixed_precision no --dynamo_backend no".split(),
            *"-m mmkv eval --tasks mmstar,mmdu".split(),
            "--model",
            str(MODEL),
            "--data",
            str(data),
            "--output",
            str(tmp_path),
            *"--policy full --dtype float32".split(),
        ],
        home,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    assert "on rank 1" in done.stdout + done.stderr
    theirs = written(tmp_path)
    for task in ("mmstar_local", "mmdu_local"):
        assert theirs.texts(task) == ours.texts(task)
        # Standard errors are summed in another order.
        assert theirs.results[task] == pytest.approx(ours.results[task])


def test_a_process_leaves_the_group_before_it_exits(home: Path) -> None:
    """Two processes that left inside it aborted about once in fifty runs."""
    program = (
        "import atexit\n"
        "from torch import distributed\n"
        "atexit.register(lambda: print('inside', distributed.is_initialized()))\n"
        "store = distributed.HashStore()\n"
        "distributed.init_process_group('gloo', store=store, rank=0, world_size=1)\n"
        "from mmkv.eval.lmms.adapter import MmkvChat\n"
        f"MmkvChat(pretrained={str(MODEL)!r}, device='cpu')\n"
    )
    done = run_python(["-c", program], home)
    assert done.stdout.splitlines()[-1:] == ["inside False"], done.stdout + done.stderr


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


def test_a_failed_evaluation_fails_the_command(data: Path, home: Path, tmp_path: Path) -> None:
    """lmms-eval itself ends with exit code 0 here."""
    done = run(
        [
            *"mmkv eval --tasks mmstar --model".split(),
            str(MODEL),
            "--data",
            str(data),
            "--output",
            str(tmp_path),
            "--gates",
            str(tmp_path / "missing"),
        ],
        home,
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"mmkv: error: no gates at {tmp_path}/missing"), last
