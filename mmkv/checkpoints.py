"""What ``mmkv models`` lists: checkpoints and gates that are at hand, and the families that run.

Read from ``config.json`` and ``gates.json``; no torch and no transformers are imported.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmkv.engine.budget import format_bytes
from mmkv.engine.errors import MmkvError, plain
from mmkv.engine.model.fingerprint import fingerprint, language_fingerprint
from mmkv.engine.model.gguf.config import TEXTS, config_of
from mmkv.engine.model.gguf.file import SUFFIX, parts_of, read_gguf
from mmkv.engine.model.source import (
    PICKLED,
    PICKLED_INDEX,
    checkpoint_file,
    files_of,
    require_known_quantisation,
)
from mmkv.engine.registry import offered
from mmkv.planner import WeightCount, planned, plans
from mmkv.resources import (
    BUNDLED_MODEL,
    PULLED,
    bundled_gates,
    bundled_model,
    pulled_folder,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

_RANDOM = "random weights"
_PICTURES, _VIDEOS = f"pictures; {_RANDOM}", f"pictures, videos; {_RANDOM}"
# Model type -> its name, and what tests ran it with, against transformers, token for token.
FAMILIES: dict[str, tuple[str, str]] = {
    "qwen3_vl": ("Qwen3-VL (dense)", f"{_VIDEOS}; the bundled model"),
    "qwen3_vl_moe": ("Qwen3-VL with experts, such as 30B-A3B", _VIDEOS),
    "qwen2_5_vl": ("Qwen2.5-VL", _VIDEOS),
    "qwen3_5": ("Qwen3.5, hybrid (dense)", _VIDEOS),
    "qwen3_5_moe": ("Qwen3.5 with experts, such as 35B-A3B, hybrid", _VIDEOS),
    "qwen2_vl": ("Qwen2-VL", _VIDEOS),
    "smolvlm": ("SmolVLM2", _VIDEOS),
    "idefics3": ("SmolVLM, Idefics3", _PICTURES),
    "llava": ("LLaVA-1.5", f"{_PICTURES}; SmolLM2-135M with trained eyes"),
    "mmkv_photos": ("SmolLM2-135M that names photographs", f"{_PICTURES}; SmolLM2-135M"),
    "llava_next": ("LLaVA-NeXT", _PICTURES),
    "llava_next_video": ("LLaVA-NeXT-Video", _PICTURES),
    "llava_onevision": ("LLaVA-OneVision", _PICTURES),
    "mistral3": ("Mistral Small 3.1 and 3.2, Ministral 3", _PICTURES),
    "internvl": ("InternVL3 (-hf)", _VIDEOS),
    "glm4v": ("GLM-4.1V", _VIDEOS),
    "glm46v": ("GLM-4.6V-Flash", _VIDEOS),
    "gemma3": ("Gemma 3 4B to 27B", _PICTURES),
    "llama": ("Llama (text)", f"{_RANDOM}; SmolLM2-135M"),
    "mistral": ("Mistral (text)", _RANDOM),
    "ministral": ("Ministral, or Mistral with layer_types (text)", _RANDOM),
    "ministral3": ("Ministral 3 (text), its first 16,384 tokens", _RANDOM),
    "qwen2": ("Qwen2, Qwen2.5 (text)", _RANDOM),
    "qwen3": ("Qwen3 (text)", _RANDOM),
    "qwen3_moe": ("Qwen3 with experts, such as 30B-A3B (text)", _RANDOM),
    "qwen3_5_text": ("Qwen3.5, hybrid (text)", _RANDOM),
    "qwen3_5_moe_text": ("Qwen3.5 with experts, hybrid (text)", _RANDOM),
    "gemma3_text": ("Gemma 3 1B (text)", _RANDOM),
    "glm4": ("GLM-4-0414 (text)", _RANDOM),
    "phi3": ("Phi-3 (text)", _RANDOM),
}


@dataclass(frozen=True)
class Published:
    """Gates that their authors published on the hub; ``--gates NAME`` fetches them.

    Attributes:
        base: the checkpoint that they were trained for. policy: the method.
        budget: M of the training. context: tokens of the training, at most.
    """

    name: str
    base: str
    policy: str
    budget: int
    context: int


def _published(policy: str, *rows: tuple[str, str, int, int]) -> list[Published]:
    return [Published(f"ngocbh/{name}", base, policy, m, c * 1024) for name, base, m, c in rows]


# The list of the papers' own release, github.com/ngocbh/trimkv, as it stood in November 2026.
PUBLISHED: list[Published] = [
    *_published(
        "dbtrimkv",
        ("DBTrimKV-Qwen3-VL-4B-Instruct", "Qwen/Qwen3-VL-4B-Instruct", 32, 32),
        ("DBTrimKV-Qwen3-VL-8B-Thinking", "Qwen/Qwen3-VL-8B-Thinking", 32, 32),
        ("DBTrimKV-Qwen3-4B-Instruct-2507", "Qwen/Qwen3-4B-Instruct-2507", 512, 128),
        ("DBTrimKV-Qwen3-4B-Math", "Qwen/Qwen3-4B", 128, 32),
    ),
    *_published(
        "trimkv",
        ("TrimKV-Qwen3-4B-Instruct-2507", "Qwen/Qwen3-4B-Instruct-2507", 4096, 128),
        ("TrimKV-Qwen3-1.7B-Math", "Qwen/Qwen3-1.7B", 512, 16),
        ("TrimKV-Qwen3-4B-Math", "Qwen/Qwen3-4B", 512, 16),
        ("TrimKV-Qwen3-8B-Math", "Qwen/Qwen3-8B", 512, 16),
        ("TrimKV-Qwen3-14B-Math", "Qwen/Qwen3-14B", 512, 16),
        (
            "TrimKV-Phi-3-mini-128k-instruct",
            "microsoft/Phi-3-mini-128k-instruct",
            2048,
            128,
        ),
    ),
]
_GATE_FILES = ("gates.safetensors", "trimkv_weights.pth")
_DEEPEST = 2  # folders below the present one
_MOST_FOLDERS = 2000


@dataclass(frozen=True)
class ListedGates:
    """A set of gates.

    Attributes:
        name: what ``--gates`` takes. kind: ``retention`` or ``write``.
        base: the checkpoint that they name as theirs; empty where they name none.
        fingerprint: of its weights, likewise.
    """

    name: str
    path: str
    where: str
    kind: str = "retention"
    base: str = ""
    fingerprint: str = ""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint.

    Attributes:
        name: what ``mmkv chat`` takes.
        where: ``bundled``, ``folder``, ``hub cache``, ``pulled``; ``pull``: it can be.
        family: the model type of its config.
        size: bytes on disk, or that are fetched. gates: names of those for it.
        memory: bytes of its weights on a CPU, by what ``--weights`` names.
        problem: why it cannot run, empty where nothing speaks against it.
    """

    name: str
    path: str
    where: str
    family: str
    size: int
    gates: list[str] = field(default_factory=list)
    problem: str = ""
    memory: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Listing:
    """All that is at hand."""

    models: list[Checkpoint]
    gates: list[ListedGates]

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON can hold it, with the families and the published gates."""
        families = [
            {"model_type": kind, "name": name, "tested_with": tested}
            for kind, (name, tested) in families_with_added().items()
        ]
        published = [asdict(one) for one in PUBLISHED]
        return {**asdict(self), "families": families, "published_gates": published}


def listed() -> Listing:
    """Return what is bundled, and the checkpoints below the present folder and in the hub cache."""
    found: list[tuple[str, Path, str, int]] = []
    sets = [_gates(name, folder, "bundled") for name, folder in bundled_gates().items()]
    with suppress(MmkvError):
        found.append((BUNDLED_MODEL, bundled_model(), "bundled", _size(bundled_model())))
    known = {folder.resolve() for _, folder, _, _ in found}
    known |= {Path(one.path).resolve() for one in sets}
    others = list(_others())
    for name, folder, where, size in others:
        if folder.resolve() in known:
            continue
        if "model_type" in _json(folder / "config.json"):
            found.append((name, folder, where, _size(folder) if size < 0 else size))
        elif any((folder / file).is_file() for file in _GATE_FILES):
            sets.append(_gates(name, folder, where))
    models = [_checkpoint(*one, sets) for one in found]
    models += [one for _, folder, where, _ in others for one in _ggufs(folder, where)]
    named = {one.name for one in models}
    models += [_not_pulled(name) for name in PULLED if name not in named]
    return Listing(models, sets)


def families_with_added() -> dict[str, tuple[str, str]]:
    """Return FAMILIES and those that other packages add, which are not loaded for it."""
    added = {one.name: (one.name, f"added by {one.value}") for one in offered("mmkv.families")}
    return FAMILIES | {name: facts for name, facts in added.items() if name not in FAMILIES}


def table(listing: Listing) -> RenderableType:
    """Return a listing for a terminal: lines are broken between words, of 80 columns at least."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    def columns(title: str, *names: str) -> Table:
        made = Table(
            title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0)
        )
        for number, name in enumerate(names):
            made.add_column(name, no_wrap=number == 0, header_style="bold")
        return made

    models: list[RenderableType] = [Text("models", style="italic")]
    for one in listing.models:
        first, *rest = map(plain, _described(one))
        models.append(Text(first, style="bold"))
        models += [Padding(Text(line), (0, 0, 0, 4)) for line in rest]
    gates = columns("\ngates", "gates", "where", "kind", "trained for")
    for set_ in listing.gates:
        facts_of = (set_.name, set_.where, set_.kind, set_.base or "-")
        gates.add_row(*(Text(plain(fact), overflow="fold") for fact in facts_of))
    families = columns(
        "\nfamilies that run (tests compare each with transformers)",
        "model type",
        "family",
        "tested with",
    )
    for kind, (name, tested) in families_with_added().items():
        families.add_row(kind, name, tested)
    published = columns(
        "\npublished gates (--gates NAME fetches them; their form is tested;\n"
        "M: the budget that they were trained with)",
        "gates",
        "trained for",
        "M",
    )
    for known in PUBLISHED:
        published.add_row(known.name, known.base, str(known.budget))
    return Group(*models, *([gates] if listing.gates else []), families, published)


def _described(one: Checkpoint) -> Iterator[str]:
    """Yield the lines of a model in the table."""
    away = one.where == "pull"
    size = f"{format_bytes(one.size)} {'to fetch' if away else 'on disk'}"
    yield f"{one.name}  ({'not here' if away else one.where}, {one.family}, {size})"
    if one.problem:
        yield one.problem
    if one.memory:
        sizes = (f"{format_bytes(count)} ({form})" for form, count in one.memory.items())
        yield f"weights in memory: {', '.join(sizes)}"
    if one.gates:
        yield f"gates for it: {', '.join(one.gates)}"


def _others() -> Iterator[tuple[str, Path, str, int]]:
    """Yield where models and gates may lie that are not bundled: name, folder, kind of place,
    bytes or -1.
    """
    for name in PULLED:
        yield name, pulled_folder(name), "pulled", -1
    for folder in _folders(Path(), _DEEPEST):
        yield str(folder), folder, "folder", -1
    yield from _cached()


def _folders(top: Path, depth: int) -> Iterator[Path]:
    """Yield ``top`` and the folders below it, those that are visible; links are not followed."""
    waiting, seen = [(top, depth)], 0
    while waiting and seen < _MOST_FOLDERS:
        folder, left = waiting.pop(0)
        seen += 1
        yield folder
        if left and not (folder / "config.json").is_file():
            with suppress(OSError), os.scandir(folder) as entries:
                below = [e.name for e in entries if e.is_dir(follow_symlinks=False)]
                waiting += [(folder / n, left - 1) for n in sorted(below) if n[0] not in "._"]


def _cached() -> Iterator[tuple[str, Path, str, int]]:
    """Yield models and gates of the hub's cache: id, folder of the latest files, bytes."""
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except (CacheNotFound, OSError, ValueError):
        return
    for repo in sorted(repos, key=lambda repo: repo.repo_id):
        latest = repo.refs.get("main")
        if repo.repo_type == "model" and latest is not None:
            yield repo.repo_id, latest.snapshot_path, "hub cache", repo.size_on_disk


def _checkpoint(
    name: str, folder: Path, where: str, size: int, sets: list[ListedGates]
) -> Checkpoint:
    config = _json(folder / "config.json")
    family, own = str(config["model_type"]), folder / "gates"
    gates = ["gates/"] if (own / _GATE_FILES[0]).is_file() else []
    others = [one for one in sets if one.fingerprint and Path(one.path) != own]
    ours = {of(str(folder)) for of in (fingerprint, language_fingerprint) if others}
    gates += [one.name for one in others if one.fingerprint in ours]
    gates += [known.name for known in PUBLISHED if known.base == name]
    problem = _problem(folder, config)
    made = {} if problem else planned(str(folder)) or {}
    memory = {form: plan.weights for form, plan in made.items()}
    return Checkpoint(name, str(folder), where, family, size, gates, problem, memory)


def _not_pulled(name: str) -> Checkpoint:
    """Describe a model of PULLED that is not here."""
    one = PULLED[name]
    told = f"{one.what}; fetch it: mmkv pull {name}"
    return Checkpoint(name, "", "pull", one.family, one.megabytes * 10**6, [], told)


def _ggufs(folder: Path, where: str) -> list[Checkpoint]:
    """Describe the GGUF files of a folder, a split one once."""
    files = sorted(folder.glob(f"*{SUFFIX}"), reverse=True)
    there = {parts_of(file)[0]: file for file in files}  # the first part that is there
    return [_gguf(there[first], first, where) for first in sorted(there)]


def _gguf(path: Path, first: Path, where: str) -> Checkpoint:
    """Describe a GGUF file; of a split one, by the name of its ``first`` part, there or not."""
    name, family, problem = str(first), "gguf", ""
    memory: dict[str, int] = {}
    try:
        file = read_gguf(path)
        family = TEXTS.get(file.architecture, file.architecture)
        config = config_of(file, None)
        made = plans(config, WeightCount.of(file.shapes(), config["tie_word_embeddings"]))
        memory = {form: plan.weights for form, plan in made.items()}
    except MmkvError as error:
        problem = str(error).removeprefix(name).lstrip(": ")
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        problem = "its metadata make no sense"
    size = sum(part.stat().st_size for part in parts_of(path) if part.is_file())
    return Checkpoint(name, name, where, family, size, [], problem, memory)


def _problem(folder: Path, config: dict[str, Any]) -> str:
    """Return why a checkpoint cannot run, empty where nothing speaks against it."""
    if str(config["model_type"]) not in families_with_added():
        return "this family does not run"
    try:
        if (quantised := config.get("quantization_config")) is not None:
            require_known_quantisation(quantised)
        find = functools.partial(checkpoint_file, str(folder))
        found = files_of(find) or files_of(find, PICKLED, PICKLED_INDEX)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return "its index of weight files cannot be read"
    except MmkvError as error:
        return str(error)
    return "" if found else "it has no safetensors weights"


def _gates(name: str, folder: Path, where: str) -> ListedGates:
    info = _json(folder / "gates.json")
    kind = "write" if info.get("kind") == "write" else "retention"
    base, weights = (str(info.get(key) or "") for key in ("base_model", "base_fingerprint"))
    known = {one.name: one.base for one in PUBLISHED}
    return ListedGates(name, str(folder), where, kind, base or known.get(name, ""), weights)


def _json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _size(folder: Path) -> int:
    """Return the bytes of the files below ``folder``."""
    total = 0
    for place, _, files in os.walk(folder):
        for file in files:
            with suppress(OSError):
                total += (Path(place) / file).lstat().st_size
    return total
