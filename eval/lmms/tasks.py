"""``python -m eval.lmms.tasks``: write task files for lmms-eval's ``--include_path``.

lmms-eval knows a task by the name of its YAML, finds prompts by the name of the model, and looks
for data on the hub. Two kinds of overrides change that: ``NAME_local`` reads files below a folder,
and ``NAME_mmkv`` gives mmkv the prompts of a task for ``qwen3_vl``. Both include the installed
task, so that scoring and prompts are lmms-eval's own.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Sequence
from importlib import resources
from importlib.resources.abc import Traversable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from mmkv.engine.errors import InputError, MmkvError
from mmkv.engine.paths import is_file, is_folder
from mmkv.eval.lmms.media import FOLDER
from mmkv.eval.lmms.mmdu import check
from mmkv.resources import bundled_dialogues

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


def local_names() -> list[str]:
    """List the tasks that can read local files."""
    return sorted(Path(file.name).stem for file in HERE.iterdir() if file.name.endswith(".yaml"))


def shipped_folder() -> Path:
    """Find the task folder of the installed lmms-eval. Raises InputError without one."""
    spec = find_spec("lmms_eval")
    if spec is None or not spec.submodule_search_locations:
        raise InputError(INSTALL)
    return Path(spec.submodule_search_locations[0]) / "tasks"


def write(names: Sequence[str], output: Path, data: Path | None = None) -> list[str]:
    """Write the overrides that ``names`` need to ``output``; the names to give lmms-eval.

    With ``data``, tasks that have a local form read files below that folder. Names that need no
    override come back as they are. Without ``data``, mmdu reads the small set of our own. Raises
    InputError: a task without its data or a package that it imports, no lmms-eval.
    """
    shipped = shipped_folder()
    output.mkdir(parents=True, exist_ok=True)
    known, found = local_names(), []
    made: dict[str, Any] | None
    for given in names:
        name = given.removesuffix("_local")
        _require(name)
        if name in known and (data is not None or given.endswith("_local") or name == "mmdu"):
            if data is None and name != "mmdu":
                raise InputError(f"task {given} reads local files; add --data FOLDER")
            made = _local(name, (data or bundled_dialogues().parent).resolve(), shipped)
        elif data is not None and given.endswith("_local"):
            raise InputError(f"no local form of task {given}; there is one of {', '.join(known)}")
        else:
            made = _prompts(given, shipped)
        if made is not None:
            text = yaml.dump(made, Dumper=_Dumper, sort_keys=False)
            (output / f"{made['task']}.yaml").write_text(text)
        found.append(given if made is None else made["task"])
    return found


def _local(name: str, data: Path, shipped: Path) -> dict[str, Any]:
    made = read(HERE / f"{name}.yaml")
    kwargs = made.get(_KWARGS, {})
    if "include" in made:
        source = shipped / made["include"]
        if not source.is_file():
            raise InputError(f"this lmms-eval has no {made['include']}; install version 0.7.3")
        made["include"] = str(source)
        kwargs = merged(source).get(_KWARGS) or {}
    (split, patterns), *_ = made["dataset_kwargs"]["data_files"].items()
    folder, files = _files(name, data, patterns)
    if name == "mmdu":
        folder = check(files, folder)
    made["dataset_kwargs"] = {"data_files": {split: files}}
    # Under "default", so that every model gets them: a local task has one set of prompts.
    chosen = kwargs.get("qwen3_vl", kwargs.get("default", {}))
    made[_KWARGS] = {"default": {**chosen, FOLDER: str(folder)}}
    return made


def _require(name: str) -> None:
    module, package = _NEEDS.get(name, (None, None))
    if module is not None and find_spec(module) is None:
        raise InputError(f"lmms-eval's task {name} needs {module}; run pip install {package}")


def _files(name: str, data: Path, patterns: Sequence[str]) -> tuple[Path, list[str]]:
    """Return the task's folder, and its files by the first pattern that finds any."""
    if not is_folder(data):
        raise InputError(f"no folder {data}; --data names the folder that holds {patterns[0]}")
    for pattern in patterns:
        if files := sorted(map(str, data.glob(pattern))):
            return data / pattern.split("/", 1)[0], files
    raise InputError(f"task {name} has no data: no {' and no '.join(patterns)} below {data}")


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
    known: set[str] = set()
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
    args = parser.parse_args(arguments)
    try:
        names = write(args.tasks, args.output, args.data)
    except MmkvError as error:
        print(f"mmkv.eval.lmms.tasks: error: {error}", file=sys.stderr)
        return 1
    print(f"lmms-eval --model mmkv --include_path {args.output} --tasks {','.join(names)} ...")
    return 0


if __name__ == "__main__":
    sys.exit(main())
