"""``python -m mmkv.training.llava``: give SmolLM2-135M eyes.

``train --language-model FOLDER --output FOLDER`` trains tower and projector beside the frozen
language model; ``join --language-model FOLDER --output FOLDER`` writes a LLaVA checkpoint of the
language model and an adapter, by default assets/smollm2-llava of a checkout. Neither downloads
anything: ``python -m eval.smollm2`` fetches the language model. Training needs the ``train`` extra
and easy-VQA's pictures.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from mmkv.engine.errors import InputError, MmkvError, ModelError, one_line
from mmkv.resources import BUNDLED_ADAPTER, asset


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m mmkv.training.llava", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    join = commands.add_parser("join", help="write a LLaVA checkpoint")
    train = commands.add_parser("train", help="train an adapter")
    for command in (join, train):
        command.add_argument("--language-model", type=Path, required=True, help="folder")
        command.add_argument("--output", type=Path, required=True, help="folder to write")
    join.add_argument(
        "--adapter",
        type=Path,
        help="folder that train wrote; else assets/smollm2-llava of a checkout",
    )
    train.add_argument("--easy-vqa", type=Path, help="its folder data; else the package's")
    train.add_argument("--words-steps", type=int, default=500, help="through the language model")
    train.add_argument("--words-batch", type=int, default=8, help="talks a step")
    train.add_argument("--words-lr", type=float, default=6e-3)
    train.add_argument("--eyes-steps", type=int, default=5000, help="pictures alone")
    train.add_argument("--eyes-batch", type=int, default=64, help="pictures a step")
    train.add_argument("--eyes-lr", type=float, default=1e-3)
    train.add_argument("--width", type=int, default=192, help="of the tower")
    train.add_argument("--layers", type=int, default=4, help="of the tower")
    train.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    train.add_argument("--held-out", type=int, default=100, help="talks to measure on at the end")
    train.add_argument("--seed", type=int, default=0)
    train.add_argument("--threads", type=int, default=0, help="torch threads, 0 for its default")
    train.add_argument("--save-every", type=int, default=100, help="steps between checkpoints")
    train.add_argument("--resume", action="store_true", help="continue from the last checkpoint")
    return parser.parse_args(given)


def _bundled_adapter() -> Path:
    try:
        return asset(BUNDLED_ADAPTER)
    except ModelError as error:  # a wheel leaves it out, to stay small
        raise InputError(
            f"this installation holds no adapter; name one with --adapter: a checkout of mmkv has "
            f"assets/{BUNDLED_ADAPTER}"
        ) from error


def main(given: Sequence[str] | None = None) -> int:
    """Run the program and return the exit code."""
    args = arguments(given)
    try:
        if args.command == "join":
            from mmkv.training.llava.adapter import EXAMPLE, join

            adapter = args.adapter or _bundled_adapter()
            try:
                join(adapter, args.language_model, args.output, _note)
            except (ValueError, KeyError, TypeError) as error:  # transformers', of odd files
                raise ModelError(
                    f"{args.language_model} or {adapter} is not what join reads ({error}); "
                    "name a Llama's checkpoint and what train wrote"
                ) from error
            asked = f'--image {args.output / EXAMPLE} -p "what is in the third cell?"'
            print(f"wrote {args.output}; ask it: mmkv chat {args.output} {asked}")
            return 0
        if not importlib.util.find_spec("accelerate"):
            raise InputError("training needs the train extra: pip install 'mmkv[train]'")
        from mmkv.training.llava.train import train

        results: dict[str, Any] = train(args)
        print(json.dumps(results))
    except (MmkvError, OSError) as error:
        print(f"mmkv.training.llava: error: {one_line(str(error))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("mmkv.training.llava: interrupted; go on with --resume", file=sys.stderr)
        return 130
    return 0


def _note(line: str) -> None:
    print(f"mmkv.training.llava: {line}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
