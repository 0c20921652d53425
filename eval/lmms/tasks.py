"""``python -m eval.lmms.tasks``: write task files for lmms-eval's ``--include_path``.

lmms-eval knows a task by the name of its YAML, finds prompts by the name of the model, and looks
for data on the hub. Two kinds of overrides change that: ``NAME_local`` reads files below a folder,
and ``NAME_mmkv`` gives mmkv the prompts of a task for ``qwen3_vl``. Both include the installed
task, so that scoring and prompts are lmms-eval's own. Benchmarks that lmms-eval lacks are tasks of
our own, which only have a local form; a file may hold several ``sets`` of one benchmark.

The functions that task files name find pictures and videos of local tasks below the folder that
--data names. They take the task's ``lmms_eval_specific_kwargs``, into which ``eval.lmms.tasks`` has
written the task's folder.

MMDU is a task of whole dialogues, answered round by round (benchmarks/notes/mmdu.md). lmms-eval has
no history from round to round. So the messages of every round hold the dialogue so far with the
model's own answers, and the adapter finds that its session already holds them. Reading, placing of
pictures and exact scoring are those of ``mmkv mmdu``.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Sequence
from copy import deepcopy
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from mmkv.engine.errors import InputError, MmkvError
from mmkv.engine.paths import is_file, is_folder
from mmkv.eval.long_text.benchmarks import data_files, expanded, task_file, tasks
from mmkv.eval.mmdu.data import Dialogue, find_pictures, interleave, read_benchmark, read_row
from mmkv.eval.mmdu.scores import is_right
from mmkv.resources import bundled_dialogues

FOLDER = "mmkv_data"  # the key in lmms_eval_specific_kwargs
_VIDEOS = frozenset((".mp4", ".mkv", ".webm", ".avi", ".mov"))


def video_by_video_id(doc: dict[str, Any], kwargs: dict[str, Any]) -> list[str]:
    """Return the video named by ``videoID`` (Video-MME, VideoMathQA). Raises InputError."""
    return [_video(kwargs[FOLDER], str(doc["videoID"]))]


def video_by_id(doc: dict[str, Any], kwargs: dict[str, Any]) -> list[str]:
    """Return the video named by ``id`` (Video-MMMU). Raises InputError."""
    return [_video(kwargs[FOLDER], str(doc["id"]))]


def gqa_picture(doc: dict[str, Any], kwargs: dict[str, Any]) -> list[Any]:
    """Return GQA's picture: the row's own, or that of the picture files by ``imageId``.

    Raises InputError.
    """
    if doc.get("image") is not None:
        return [doc["image"].convert("RGB")]
    from mmkv.eval.lmms.messages import picture

    file, row = _gqa_index(kwargs[FOLDER]).get(str(doc["imageId"]), (None, 0))
    if file is None:
        raise InputError(
            f"no picture {doc['imageId']} below {kwargs[FOLDER]}; put GQA's "
            "testdev_balanced_images parquet files there"
        )
    return [picture(_gqa_column(file)[row].as_py()).convert("RGB")]


def _video(folder: str, name: str) -> str:
    found = _videos(folder).get(name)
    if found is None:
        raise InputError(
            f"no video {name}.mp4 below {folder} ({len(_videos(folder))} videos there); unpack the "
            "data set's video archives into that folder"
        )
    return found


@cache
def _videos(folder: str) -> dict[str, str]:
    files = sorted(Path(folder).rglob("*"))
    return {f.stem: str(f) for f in files if f.suffix.lower() in _VIDEOS and f.is_file()}


@cache
def _gqa_index(folder: str) -> dict[str, tuple[str, int]]:
    """Return file and row of every picture; a name decides nothing, the columns do."""
    from pyarrow import parquet

    found: dict[str, tuple[str, int]] = {}
    for path in sorted(Path(folder).rglob("*.parquet")):
        if {"id", "image"} <= set(parquet.read_schema(path).names):
            ids = parquet.read_table(path, columns=["id"])["id"].to_pylist()
            found |= {str(name): (str(path), row) for row, name in enumerate(ids)}
    return found


@cache
def _gqa_column(file: str) -> Any:
    from pyarrow import parquet

    return parquet.read_table(file, columns=["image"], memory_map=True)["image"]


def messages(
    doc: dict[str, Any],
    lmms_eval_specific_kwargs: dict[str, Any] | None = None,
    round_idx: int | None = None,
    previous_output: Sequence[str] = (),
    previous_round_info: Any = None,
) -> Any:
    """Return the messages of the first round.

    For later rounds return (messages, over, outputs, info). Raises InputError.
    """
    dialogue, answers = _dialogue(doc), list(previous_output)
    folder = Path((lmms_eval_specific_kwargs or {}).get(FOLDER, "."))
    if round_idx is None:
        return _history(dialogue, [], folder)
    over = round_idx >= len(dialogue.questions)
    return None if over else _history(dialogue, answers, folder), over, answers, None


def no_visual(doc: dict[str, Any]) -> list[Any]:
    """Return no visuals: the pictures are in the messages."""
    return []


def first_question(doc: dict[str, Any], kwargs: dict[str, Any] | None = None) -> str:
    """Return the dialogue's input as the samples file shows it."""
    return _dialogue(doc).questions[0]


def references(doc: dict[str, Any]) -> list[str]:
    """Return the reference answers, in order."""
    return list(_dialogue(doc).references)


def score(doc: dict[str, Any], results: Sequence[Any]) -> dict[str, Any]:
    """Count the answered questions, and the right answers where exact ones are known."""
    dialogue, answers = _dialogue(doc), results[0]
    pairs = list(zip(answers, dialogue.references, strict=True))
    found = {"answered": _count([bool(answer.strip()) for answer, _ in pairs])}
    if dialogue.exact:
        found["exact_match"] = _count([is_right(*pair) for pair in pairs])
    return found


def share(results: Sequence[dict[str, Any]]) -> float:
    """Compute the share of the questions of all dialogues together."""
    return sum(r["right"] for r in results) / sum(r["of"] for r in results)


def check(files: Sequence[str], folder: Path) -> Path:
    """Find the folder of the pictures: ``folder`` or one directly below, where all of them are
    found.

    Raises InputError for a row or picture that would end the evaluation half-way.
    """
    dialogues: list[Dialogue] = []
    for file in files:
        if not Path(file).read_bytes().lstrip().startswith(b"["):
            raise InputError(f"{file} holds no list; lmms-eval reads dialogues from [row, row]")
        found, problems = read_benchmark(Path(file), unused_images=True)
        if problems:
            first, more = problems[0], len(problems) - 1
            others = f" ({more} more have problems)" if more else ""
            raise InputError(f"{file}: dialogue {first.dialogue}: {first.cause}{others}")
        dialogues += found
    refused: InputError | None = None
    for place in [folder, *sorted(path for path in folder.iterdir() if path.is_dir())]:
        try:
            for dialogue in dialogues:
                find_pictures(dialogue, place)
            return place
        except InputError as error:
            refused = refused or error
    raise InputError(str(refused).split("; ")[0] + f"; put MMDU's pictures into {folder}")


def _dialogue(doc: dict[str, Any]) -> Dialogue:
    """Return the row as it was written: the datasets library fills keys that other rows have with
    None.
    """
    row = {key: value for key, value in doc.items() if value is not None}
    if isinstance(row.get("image"), dict):
        row["image"] = {key: name for key, name in row["image"].items() if name is not None}
    return read_row(row, unused_images=True)


def _history(dialogue: Dialogue, answers: list[str], folder: Path) -> list[Any]:
    pictures = iter(find_pictures(dialogue, folder))
    made: list[Any] = []
    for index, question in enumerate(dialogue.questions[: len(answers) + 1]):
        parts = [
            part if part["type"] == "text" else {"type": "image", "url": str(part["image"])}
            for part in interleave(question, pictures)
        ]
        made.append({"role": "user", "content": parts})
        if index < len(answers):
            own = [{"type": "text", "text": answers[index]}]
            made.append({"role": "assistant", "content": own})
    return made


def _count(right: Sequence[bool]) -> dict[str, Any]:
    return {"right": sum(right), "of": len(right), "score": sum(right) / len(right)}


HERE = resources.files("mmkv.eval.lmms_tasks")
_KWARGS = "lmms_eval_specific_kwargs"
# Packages that a task's file imports and the light installation leaves out.
_NEEDS = {
    "mathvision_testmini": ("latex2sympy2", "--no-deps latex2sympy2 antlr4-python3-runtime==4.7.2"),
    "videomathqa_mcq": ("cv2", "opencv-python-headless"),
    "videomme": ("cv2", "opencv-python-headless"),
}
INSTALL = (
    "lmms-eval is not installed; run pip install 'mmkv[eval-light]' and then "
    "pip install --no-deps lmms-eval==0.7.3 (or the full pip install 'mmkv[eval]')"
)

# What a file calls its task, groups and tags, and the parts of a group: "task: NAME", "- NAME".
_NAMES = re.compile(
    r"^(?:[\"']?(?:task|group|tag)[\"']?[ \t]*:[ \t[]*|[ \t]*-[ \t]+(?:task:[ \t]*)?)"
    r"([^#\n]+)",
    re.MULTILINE,
)


class Function(str):
    """The name behind ``!function``, kept as it is."""


class _Loader(yaml.SafeLoader):
    pass


class _Dumper(yaml.SafeDumper):
    pass


def _function(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> Function:
    return Function(loader.construct_scalar(node))


_Loader.add_constructor("!function", _function)
_Dumper.add_representer(
    Function, lambda dumper, name: dumper.represent_scalar("!function", str(name))
)


@cache
def _local_forms() -> dict[str, dict[str, Any]]:
    made: dict[str, dict[str, Any]] = {}
    for file in HERE.iterdir():
        if not file.name.endswith(".yaml"):
            continue
        content = read(file)
        sets = content.pop("sets", {Path(file.name).stem: {}})
        made |= {name: {"task": f"{name}_local", **content, **own} for name, own in sets.items()}
    return made


def local_names() -> list[str]:
    """List the tasks that can read local files."""
    return sorted(_local_forms())


def local_form(name: str) -> dict[str, Any]:
    """Return the settings of a task that reads local files; its files are patterns still."""
    return deepcopy(_local_forms()[name])


def shipped_folder() -> Path:
    """Find the task folder of the installed lmms-eval. Raises InputError without one."""
    spec = find_spec("lmms_eval")
    if spec is None or not spec.submodule_search_locations:
        raise InputError(INSTALL)
    return Path(spec.submodule_search_locations[0]) / "tasks"


def write(
    names: Sequence[str], output: Path, data: Path | None = None, samples: int | None = None
) -> list[str]:
    """Write the overrides that ``names`` need to ``output``; the names to give lmms-eval.

    With ``data``, tasks that have a local form read files below that folder. Names that need no
    override come back as they are. Without ``data``, mmdu reads the small set of our own.
    ``samples``: replies to each question, for tasks that score several. Raises InputError: a task
    without its data or a package that it imports, one that scores one reply alone, no lmms-eval.
    """
    shipped = shipped_folder()
    output.mkdir(parents=True, exist_ok=True)
    found = []
    for given in names:
        name = given.removesuffix("_local")
        _require(name)
        repeats = name in local_names() and "repeats" in local_form(name)
        if samples is not None and not repeats:
            raise InputError(f"task {given} scores one reply to each question; drop --samples")
        made = _override(given, output, data, samples, shipped)
        if made is not None:
            text = yaml.dump(made, Dumper=_Dumper, sort_keys=False)
            (output / f"{made['task']}.yaml").write_text(text)
        found.append(given if made is None else made["task"])
    return found


def _override(
    given: str, output: Path, data: Path | None, samples: int | None, shipped: Path
) -> dict[str, Any] | None:
    """Return the settings of one task that :func:`write` writes; None: it runs as it is."""
    known, name = local_names(), given.removesuffix("_local")
    if name in tasks():
        if data is None:
            raise InputError(f"task {name} reads local files; add --data FOLDER")
        return task_file(name, data.resolve(), output, Function)
    if name == "mmdu" or (name in known and (data is not None or name != given)):
        if name == "mmdu" and data is None:
            data = bundled_dialogues().parent
        if data is None:
            raise InputError(f"task {given} reads local files; add --data FOLDER")
        return _with_samples(_local(name, data.resolve(), shipped), samples)
    if data is not None and name != given:
        raise InputError(f"no local form of task {given}; there is one of {', '.join(known)}")
    made = _prompts(given, shipped)
    if made is None and name in known and find(name, shipped) is None:
        raise InputError(f"task {given} reads local files; add --data FOLDER")
    return made


def _local(name: str, data: Path, shipped: Path) -> dict[str, Any]:
    made = local_form(name)
    kwargs = made.get(_KWARGS, {})
    if "include" in made:
        source = shipped / made["include"]
        if not source.is_file():
            raise InputError(f"this lmms-eval has no {made['include']}; install version 0.7.3")
        made["include"] = str(source)
        kwargs = merged(source).get(_KWARGS) or {}
    (split, patterns), *_ = made["dataset_kwargs"]["data_files"].items()
    files = data_files(data, patterns, name)
    folder = data / Path(files[0]).relative_to(data).parts[0]
    if name == "mmdu":
        folder = check(files, folder)
    made["dataset_path"] = "parquet" if files[0].endswith(".parquet") else "json"
    made["dataset_kwargs"] = {"data_files": {split: files}}
    # Under "default", so that every model gets them: a local task has one set of prompts.
    chosen = kwargs.get("qwen3_vl", kwargs.get("default", {}))
    made[_KWARGS] = {"default": {**chosen, FOLDER: str(folder)}}
    return made


def _with_samples(made: dict[str, Any], samples: int | None) -> dict[str, Any]:
    """Return a task that asks each question so often, and hands all replies to its scoring."""
    if samples is not None:
        keep_all = {"function": "take_first_k", "k": samples}
        made |= {"repeats": samples, "filter_list": [{"name": "samples", "filter": [keep_all]}]}
    return made


def _require(name: str) -> None:
    module, package = _NEEDS.get(name, (None, None))
    if module is not None and find_spec(module) is None:
        raise InputError(f"lmms-eval's task {name} needs {module}; run pip install {package}")


def _prompts(name: str, shipped: Path) -> dict[str, Any] | None:
    """Return the task settings that use qwen3_vl's prompts, or None when the task has none of its
    own.
    """
    source = find(name, shipped)
    kwargs = (merged(source).get(_KWARGS) or {}) if source else {}
    if "qwen3_vl" not in kwargs or "mmkv" in kwargs:
        return None
    made = {**kwargs, "mmkv": kwargs["qwen3_vl"]}
    return {"include": str(source), "task": f"{name}_mmkv", _KWARGS: made}


def find(name: str, shipped: Path) -> Path | None:
    """Find the file below ``shipped`` that defines the task, or None."""
    line = re.compile(rf"^task:\s*[\"']?{re.escape(name)}[\"']?\s*(#.*)?$", re.MULTILINE)
    # Search folders that the task's name begins with first: the whole tree has 2,000 files.
    paths = sorted(shipped.rglob("*.yaml"), key=lambda path: not name.startswith(path.parent.name))
    return next((path for path in paths if line.search(path.read_text("utf-8"))), None)


def require_known(names: Sequence[str], folders: Sequence[Path]) -> None:
    """Refuse a task that no file below ``folders`` names, before lmms-eval shows a traceback.

    Groups and tags count as tasks do. Patterns, lists and paths are left to lmms-eval.

    Raises:
        InputError: names what comes near.
    """
    known = set(tasks())
    for path in (file for folder in folders for file in folder.rglob("*yaml")):
        for line in _NAMES.findall(path.read_text("utf-8")):
            known.update(re.findall(r"[\w.:+/-]+", line))
    for name in names:
        if name in known or "*" in name or name.startswith("list"):
            continue
        if is_folder(Path(name)) or is_file(Path(name)):
            continue
        near = difflib.get_close_matches(name, known, n=3)
        meant = f"did you mean {' or '.join(near)}" if near else "see mmkv eval --tasks list"
        raise InputError(f"lmms-eval has no task {name}; {meant}")


def read(path: Path | Traversable) -> dict[str, Any]:
    """Read one YAML file, functions left as names."""
    return yaml.load(path.read_text("utf-8"), Loader=_Loader)


def merged(path: Path) -> dict[str, Any]:
    """Read a task file with everything it includes, as lmms-eval merges them."""
    own = read(path)
    included = own.pop("include", [])
    made: dict[str, Any] = {}
    for name in reversed([included] if isinstance(included, str) else included):
        where = Path(name) if Path(name).is_file() else path.parent / name
        made |= merged(where)
    return made | own


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the task files and say how to use them."""
    parser = argparse.ArgumentParser(prog="python -m eval.lmms.tasks", description=__doc__)
    parser.add_argument("output", type=Path, help="folder for the task files")
    parser.add_argument("tasks", nargs="+", help="names as in lmms-eval, or NAME_local")
    parser.add_argument("--data", type=Path, help="folder of local data")
    parser.add_argument("--samples", type=int, help="replies to each question, for pass@1")
    args = parser.parse_args(arguments)
    try:
        names = write(expanded(args.tasks), args.output, args.data, args.samples)
    except MmkvError as error:
        print(f"mmkv.eval.lmms.tasks: error: {error}", file=sys.stderr)
        return 1
    print(f"lmms-eval --model mmkv --include_path {args.output} --tasks {','.join(names)} ...")
    return 0


if __name__ == "__main__":
    sys.exit(main())
