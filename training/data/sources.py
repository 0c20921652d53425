"""Where training data comes from: the papers' sets by name, and mixtures by a file.

Nothing is fetched: a set is looked for in a folder that is given, or in the hub's cache.
"""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mmkv.engine.paths import user_path
from mmkv.training.data.conversations import DataError


@dataclass(frozen=True)
class PublishedSet:
    """A data set that a paper trained on.

    Attributes:
        hub: id on the Hugging Face hub.
        files: what is read of it; patterns, every one of which must be there.
        kind: of its rows, one of :data:`mmkv.training.data.conversations.KINDS`.
        size: rows or bytes of these files, where its card states them.
        papers: who trained on it.
        media: what else its rows need.
        prefix: put before each text.
        shortest: tokens of a document; shorter ones are left out.
    """

    hub: str
    files: tuple[str, ...]
    kind: str
    size: str
    papers: str
    media: str = ""
    prefix: str = ""
    shortest: int = 0

    def needs(self, name: str) -> str:
        """Return one line about what has to be there."""
        # In the hub's patterns a star crosses folders.
        included = [pattern.replace("**/", "*") for pattern in self.files]
        patterns = " ".join(f"--include '{pattern}'" for pattern in included)
        media = f", and {self.media}" if self.media else ""
        return (
            f"{name} is {self.hub} on the hub ({self.papers}), files {', '.join(self.files)}, "
            f"{self.size}: hf download {self.hub} --repo-type dataset {patterns}{media}"
        )


_DBTRIMKV, _TRIMKV, _WGKV = "DBTrimKV", "TRIM-KV", "WG-KV"
_LONG = f"{_TRIMKV}, long texts"
PUBLISHED = {
    "m4-instruct": PublishedSet(
        "lmms-lab/M4-Instruct-Data",
        ("m4_instruct_annotations.json",),
        "llava",
        "about 0.6 million rows",
        _DBTRIMKV,
        "unzip its *.zip beside the file",
    ),
    "llava-video": PublishedSet(
        "lmms-lab/LLaVA-Video-178K",
        ("*_academic_v0_1/*_processed.json",),
        "llava",
        "its academic videos",
        _DBTRIMKV,
        "unpack the *.tar.gz of the same folders beside the files",
    ),
    "r1-onevision": PublishedSet(
        "Fancy-MLLM/R1-Onevision",
        ("**/*.parquet",),
        "llava",
        "about 155,000 rows with their pictures",
        _DBTRIMKV,
    ),
    "openr1-math": PublishedSet(
        "open-r1/OpenR1-Math-220k",
        ("data/train-*.parquet",),
        "chat",
        "about 94,000 rows (the default split), 564 million tokens in all splits",
        f"{_DBTRIMKV}, {_TRIMKV}",
    ),
    "llava-next": PublishedSet(
        "lmms-lab/LLaVA-NeXT-Data",
        ("data/train-*.parquet",),
        "llava",
        "779,289 rows with their pictures, 92 GB",
        f"{_DBTRIMKV}, table 1",
    ),
    "synthlong": PublishedSet(
        "cerebras/Synth-Long-SFT32K",
        ("**/train_*.parquet",),
        "chat",
        "rows of up to 32,768 tokens",
        _LONG,
    ),
    "booksum": PublishedSet(
        "ubaada/booksum-complete-cleaned",
        ("books/train.jsonl",),
        "pairs",
        "151 books; 5,653 chapters are in chapters/train.jsonl",
        _LONG,
    ),
    "buddhi": PublishedSet(
        "aiplanet/buddhi-dataset",
        ("**/*gpt4*/*train*",),
        "pairs",
        "rows of up to 128k tokens",
        _LONG,
    ),
    "longalpaca": PublishedSet(
        "Yukang/LongAlpaca-12k",
        ("LongAlpaca-12k.json",),
        "pairs",
        "12,000 rows",
        f"{_TRIMKV}'s released code",
    ),
    "fineweb-edu": PublishedSet(
        "HuggingFaceFW/fineweb-edu",
        ("sample/10BT/*.parquet",),
        "text",
        "10 billion tokens, of which the paper used 63 million",
        _WGKV,
        # Its appendix C: the prompt, and texts of 4K to 32K tokens.
        prefix="Please analyze and summarize the following text: \n\n",
        shortest=4096,
    ),
    "deepscaler": PublishedSet(
        "agentica-org/DeepScaleR-Preview-Dataset",
        ("*.json",),
        "pairs",
        "about 40,000 problems",
        "G-KV",
    ),
    "nemotron-math": PublishedSet(
        "nvidia/Nemotron-Math-v2",
        ("data/*.jsonl",),
        "chat",
        "of which the paper used 7,500 rows",
        f"{_WGKV}, reasoning models",
    ),
}
# Mixtures that a paper states, as ``--data mixture:NAME[:FOLDER]``: sets and shares of their rows.
MIXTURES: dict[str, dict[str, float]] = {
    # DBTrimKV, arXiv 2605.09649, appendix B.1.
    "dbtrimkv": {
        "m4-instruct": 0.4,
        "llava-video": 0.3,
        "r1-onevision": 0.3,
        "openr1-math": 0.2,
    },
    # TRIM-KV, arXiv 2512.03324, section 5.2: all of each, shuffled.
    "trimkv-long": {"synthlong": 1.0, "booksum": 1.0, "buddhi": 1.0},
}
_READABLE = (".json", ".jsonl", ".csv", ".parquet")


def find_published(name: str, folder: str = "") -> list[Path]:
    """Return the files of a published set.

    Args:
        name: of :data:`PUBLISHED`.
        folder: a folder laid out as on the hub, or one file of the set; empty: the hub's cache.

    Raises:
        DataError: it is not there, with what it needs.
    """
    known = PUBLISHED[name]
    if folder:
        root = user_path(folder)
        if root.is_file():
            return [root]
        where = str(root)
    else:
        where = "the hub's cache"
        try:
            root = Path(snapshot_download(known.hub, repo_type="dataset", local_files_only=True))
        except LocalEntryNotFoundError:
            raise DataError(_missing(name, where)) from None
    found = []
    for pattern in known.files:
        some = sorted(path for path in root.glob(pattern) if path.suffix.lower() in _READABLE)
        if not some:
            raise DataError(_missing(name, where))
        found += some
    return found


def _missing(name: str, where: str) -> str:
    return (
        f"--data {name} is not in {where}, and nothing is fetched. {PUBLISHED[name].needs(name)}, "
        f"or give --data {name}:FOLDER"
    )


class MixtureSource(BaseModel):
    """One source of a mixture file.

    Attributes:
        data: as an argument of ``--data``, without its weight; relative paths start from the
            folder of the mixture file.
        weight: how often it is drawn beside the others; ``rows``: as often as it has rows.
        share: of its rows that are used, drawn by the seed.
        shortest, longest: tokens of a document; others are left out (``longest`` also cuts, as
            ``--max-length`` does).
        tokens: use rows, in an order drawn by the seed, only until they have as many; they are
            encoded once to count them.
    """

    model_config = ConfigDict(extra="forbid")

    data: str = Field(min_length=1)
    weight: Literal["rows"] | float = Field(default=1.0)
    share: float = Field(default=1.0, gt=0, le=1)
    shortest: int = Field(default=0, ge=0)
    longest: int | None = Field(default=None, ge=16)
    tokens: int | None = Field(default=None, ge=1)


class MixtureFile(BaseModel):
    """A mixture of sources: TOML with ``[[source]]`` tables, or the same as JSON."""

    model_config = ConfigDict(extra="forbid")

    source: list[MixtureSource] = Field(min_length=1)


def read_mixture(text: str) -> tuple[list[MixtureSource], Path | None]:
    """Return the sources of a mixture, and the folder that their paths start from.

    Args:
        text: a file, or a name of :data:`MIXTURES` with a folder of folders, each named as its set.

    Raises:
        DataError: it is not there, or not one.
    """
    name, _, folder = text.partition(":")
    if name in MIXTURES:
        places = {each: f"{each}:{folder}/{each}" if folder else each for each in MIXTURES[name]}
        return [
            MixtureSource(data=places[each], weight="rows", share=share)
            for each, share in MIXTURES[name].items()
        ], None
    path = Path(text)
    try:
        text = path.read_text(encoding="utf-8")
        values: Any = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
        return MixtureFile.model_validate(values).source, path.parent
    except OSError as error:
        raise DataError(f"cannot read the mixture {path}: {error.strerror or error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise DataError(f"mixture {path}: {place}: {first['msg']}") from error
    except ValueError as error:  # neither TOML nor JSON
        raise DataError(f"cannot read the mixture {path}: {error}") from error
