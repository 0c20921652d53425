"""Load the vision tower and projector: a transformers model whose decoder has no layers."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import nn

from mmkv.engine.errors import STOPS
from mmkv.engine.model.families.base import Family
from mmkv.engine.model.families.tower import hold_tower
from mmkv.engine.model.panels import Panels
from mmkv.engine.model.product import Matrix, WeightForm
from mmkv.engine.model.weights import DecoderWeights


def build_vision(
    family: type[Family],
    config: Any,
    weights: DecoderWeights,
    dtype: torch.dtype,
    device: torch.device,
    load: Callable[[Any, torch.dtype, torch.device], Any],
    form: WeightForm | None = None,
) -> Any:
    """Load the transformers model without decoder layers; it shares all else with ``weights``.

    Args:
        load: loads a checkpoint by this config; what the config does not have is not read.
        form: how its matrices are held; None: as they are loaded.

    Raises:
        ModelError: files that cannot be read, or tensors that are missing.
    """
    if family.has_vision:
        _imports.start(family, config)
        _imports.wait()
    shorter = copy.deepcopy(config)
    text_config = config.get_text_config()
    whole = {
        name: getattr(text_config, name)
        for name in ("num_hidden_layers", "layer_types")
        if getattr(text_config, name, None) is not None
    }
    vars(shorter.get_text_config()).update(
        {name: 0 if name == "num_hidden_layers" else [] for name in whole}
    )
    model = load(shorter, dtype, device)
    text_model: Any = family.text_model(model)
    for part in (model.config.get_text_config(), text_model.config):
        vars(part).update(whole)
    embed = _parameter(weights.embed)
    text_model.embed_tokens.weight = embed
    text_model.norm.weight = nn.Parameter(weights.norm, requires_grad=False)
    tied = weights.head.data_ptr() == weights.embed.data_ptr()
    model.get_output_embeddings().weight = embed if tied else _parameter(weights.head)
    if form is not None:
        hold_tower(model, family, form)
    return model


def _parameter(matrix: Matrix) -> nn.Parameter:
    """Return a matrix as a parameter. Of one in panels, which no module reads, its shape alone."""
    if isinstance(matrix, Panels):
        matrix = torch.empty(matrix.shape, device="meta")
    return nn.Parameter(matrix, requires_grad=False)


class _Imports:
    """Imports transformers' modules of one model after the other, in a thread.

    The main thread can leave it to Ctrl-C while it waits: a module whose import is broken off may
    not be importable again.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def start(self, family: type[Family], config: Any) -> None:
        """Start to import what reads the pictures of this model."""
        self.wait()
        self._thread = threading.Thread(
            target=_import_vision, args=(family, config), name="import vision", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait until nothing is being imported."""
        if (thread := self._thread) is not None:
            thread.join()


_imports = _Imports()


def _import_vision(family: type[Family], config: Any) -> None:
    """Import transformers' modules of this model; what fails is reported when it is used."""
    with contextlib.suppress(Exception):
        for auto, part in (
            (family.auto_class, config),
            ("AutoModel", config.vision_config),
            ("AutoModel", config.get_text_config()),
        ):
            getattr(transformers, auto)._model_mapping[type(part)]


@contextmanager
def import_beside(family: type[Family], config: Any, wanted: bool) -> Iterator[None]:
    """Import transformers' modules of this model in a thread, while the block does other work.

    The block must import nothing itself: modules that import each other from two threads would
    find one another half made. Ctrl-C in the block does not wait for the thread.
    """
    if wanted and family.has_vision:
        _imports.start(family, config)
    try:
        yield
    except STOPS:
        raise
    except BaseException:
        _imports.wait()
        raise
    _imports.wait()
