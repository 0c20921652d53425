"""Export a checkpoint for OpenVINO: ``python -m benchmarks.bench.openvino_files MODEL DIR=FORM
...``.

``python -m benchmarks.bench.peers_cpu`` runs it in OpenVINO's environment. FORM is fp16, int8 or
int4. optimum-intel writes fp16, nncf makes the others of that, as ``optimum-cli export openvino``
does; here every matrix of the decoder gets 4 bits (symmetric, groups of 32), as in llama.cpp's
Q4_0, and those of a vision tower get 8. Nothing is fetched: the checkpoint is a folder.
"""

from __future__ import annotations

import gc
import importlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

FORMS = ("fp16", "int8", "int4")
# The part that 4 bits are for; its name in a text model and in one with a tower.
DECODERS = ("openvino_model", "openvino_language_model")
_COPIED = ("preprocessor_config.json", "video_preprocessor_config.json")


def export(model: Path, target: Path) -> None:
    """Write ``model`` in fp16 with its tokenizer."""
    torch: Any = importlib.import_module("torch")
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        # Built for another torch, it lacks its compiled operators; none of them is needed.
        for name in ("nms", "qnms"):
            schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            torch.library.define(f"torchvision::{name}", schema)
    optimum: Any = importlib.import_module("optimum.exporters.openvino")
    intel: Any = importlib.import_module("optimum.intel")
    sees = "vision_config" in json.loads((model / "config.json").read_text())
    optimum.main_export(
        str(model),
        output=str(target),
        task="image-text-to-text" if sees else "text-generation-with-past",
        ov_config=intel.OVConfig(dtype="fp16"),
        library_name="transformers",
        convert_tokenizer=True,  # text with pictures is read by it
        local_files_only=True,
    )
    for name in _COPIED:
        if (model / name).is_file():
            shutil.copyfile(model / name, target / name)


def compress(source: Path, target: Path, form: str) -> None:
    """Write a folder that :func:`export` made with its matrices in int8 or int4."""
    openvino: Any = importlib.import_module("openvino")
    nncf: Any = importlib.import_module("nncf")
    target.mkdir(parents=True)
    for path in sorted(source.iterdir()):
        if path.suffix == ".xml" and not path.stem.endswith("tokenizer"):
            part = openvino.Core().read_model(path)
            modes, how = nncf.CompressWeightsMode, {}
            mode = modes.INT8_ASYM
            if form == "int4" and path.stem in DECODERS:
                mode, how = modes.INT4_SYM, {"group_size": 32, "ratio": 1.0, "all_layers": True}
            part = nncf.compress_weights(part, mode=mode, **how)
            openvino.save_model(part, target / path.name, compress_to_fp16=False)
            del part
            gc.collect()
        elif path.suffix != ".bin" or path.stem.endswith("tokenizer"):
            shutil.copyfile(path, target / path.name)


def main(arguments: list[str]) -> int:
    """Write the folders, each of which appears when it is whole; an error is a line on stderr."""
    model, *wanted = arguments
    try:
        for pair in wanted:
            name, _, form = pair.rpartition("=")
            if form not in FORMS:
                raise ValueError(f"form {form!r} is none of {', '.join(FORMS)}")
            target = Path(name)
            draft = target.with_name(f"{target.name}.part")
            shutil.rmtree(draft, ignore_errors=True)
            if form == "fp16":
                export(Path(model), draft)
            else:
                compress(target.with_name("fp16"), draft, form)
            draft.rename(target)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        print(f"{type(error).__name__}: {error}".splitlines()[0], file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
