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
from torch import Tensor, nn

from mmkv.engine.errors import STOPS
from mmkv.engine.memory import give_back
from mmkv.engine.model.families.base import Family
from mmkv.engine.model.families.tower import MANY_BYTES, hold_tower
from mmkv.engine.model.finite import require_finite
from mmkv.engine.model.panels import Panels
from mmkv.engine.model.product import Matrix, WeightForm
from mmkv.engine.model.stored import StoredTensors, text_place
from mmkv.engine.model.weights import DecoderWeights

_CPU = torch.device("cpu")


def build_vision(
    family: type[Family],
    config: Any,
    weights: DecoderWeights,
    dtype: torch.dtype,
    device: torch.device,
    load: Callable[[Any, torch.dtype, torch.device, dict[str, Any]], Any],
    stored: StoredTensors,
    form: WeightForm | None,
    name: str,
) -> Any:
    """Load the transformers model without decoder layers; it shares all else with ``weights``.

    Of the files, the tensors of the vision tower and the projector alone are read. With a form they
    are held as stored first, and widened one by one at the end, so that no matrix which takes
    another form in between is ever held wide.

    Args:
        config: of the whole model. dtype: of the tensors.
        load: loads the model of a config in a dtype onto a device, from tensors by their names.
        stored: the checkpoint's files, whose text weights are ``weights``.
        form: how the decoder's matrices are held. name: the checkpoint's, for messages.

    Raises:
        ModelError: files that cannot be read, tensors that are missing or hold NaN or infinity.
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
    names = _names_beside_text(family, stored)
    first = dtype if form is None else stored.one_dtype(names) or dtype
    tensors = {name: _Unread(stored, name) for name in names}
    model = load(shorter, first, _CPU, tensors | _placeholders(family, weights, first))
    text_model: Any = family.text_model(model)
    for part in (model.config.get_text_config(), text_model.config):
        vars(part).update(whole)
    embed = _parameter(weights.embed)
    text_model.embed_tokens.weight = embed
    text_model.norm.weight = nn.Parameter(weights.norm, requires_grad=False)
    tied = weights.head.data_ptr() == weights.embed.data_ptr()
    model.get_output_embeddings().weight = embed if tied else _parameter(weights.head)
    require_finite_rest(model, weights, name)
    if form is not None:
        hold_tower(model, family, form)
    if first != dtype:
        _widen(model, weights, dtype)
    if device != _CPU:
        return model.to(device)
    give_back()
    return model


def require_finite_rest(model: Any, text: DecoderWeights, name: str) -> None:
    """Check the weights that are not the decoder's: the vision tower's. Raises ModelError."""
    require_finite(_rest(model, text), name)


def _rest(model: Any, text: DecoderWeights) -> Iterator[tuple[str, Tensor]]:
    known = {tensor.data_ptr() for _, tensor in text.named()}
    for part, tensor in model.named_parameters():
        if not tensor.is_meta and tensor.data_ptr() not in known:
            yield part, tensor


def _names_beside_text(family: type[Family], stored: StoredTensors) -> list[str]:
    """Return the names of all tensors that are not the text model's."""
    place = text_place(stored, family.text_places)
    assert place is not None  # its weights were read from there
    prefix, head = place
    return sorted(n for n in stored.names if not n.startswith(prefix) and n != head)


class _Unread:
    """A tensor of the files that is read when transformers slices it, as those of safetensors."""

    def __init__(self, stored: StoredTensors, name: str) -> None:
        self._stored, self._name = stored, name

    def __getitem__(self, index: Any) -> Tensor:
        return self._stored.read_as_stored(self._name)[index]


def _placeholders(
    family: type[Family], weights: DecoderWeights, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return what stands for embedding, norm and head while a model is loaded: one number each.

    transformers would allocate what is missing, and fill it with random numbers.
    """
    prefix, head = family.text_places[0]  # as transformers' own modules are named
    shapes = {
        f"{prefix}embed_tokens.weight": weights.embed.shape,
        f"{prefix}norm.weight": weights.norm.shape,
        head: weights.head.shape,
    }
    zero = torch.zeros((), dtype=dtype)
    return {name: zero.expand(tuple(shape)) for name, shape in shapes.items()}


@torch.no_grad()
def _widen(model: Any, text: DecoderWeights, dtype: torch.dtype) -> None:
    """Convert what is not the decoder's from other floats, one tensor after the other."""
    freed = 0
    for tensor in (*(tensor for _, tensor in _rest(model, text)), *model.buffers()):
        if tensor.is_floating_point() and tensor.dtype != dtype:
            freed += tensor.nbytes
            tensor.data = tensor.data.to(dtype)
        if freed >= MANY_BYTES:  # which lie between others: the heap keeps them by itself
            give_back()
            freed = 0
    for module in model.modules():
        if isinstance(module, transformers.PreTrainedModel):
            module.config.dtype = dtype


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
