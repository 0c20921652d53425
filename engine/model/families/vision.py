"""Load the vision tower and projector: a transformers model whose decoder has no layers."""

from __future__ import annotations

import contextlib
import copy
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from mmkv.engine.errors import STOPS
from mmkv.engine.model.families.base import Family
from mmkv.engine.model.families.tower import MANY_BYTES, hold_tower, layers_to_hold, move
from mmkv.engine.model.panel_files import PanelStore, with_panels
from mmkv.engine.model.panels import Panels
from mmkv.engine.model.product import Matrix, WeightForm
from mmkv.engine.model.spec import OFFSET_TYPES
from mmkv.engine.model.stored import StoredTensors, text_place
from mmkv.engine.model.weights import DecoderWeights, require_finite
from mmkv.engine.system import give_back

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
) -> tuple[Any, str | None]:
    """Load the transformers model without decoder layers; it shares all else with ``weights``.

    Of the files, the tensors of the vision tower and the projector alone are read. With a form its
    matrices go from the files, or from those of packed weights, straight into it. What is no matrix
    is held as stored first, and widened one by one at the end.

    Args:
        config: of the whole model. dtype: of the tensors.
        load: loads the model of a config in a dtype onto a device, from tensors by their names.
        stored: the checkpoint's files, whose text weights are ``weights``.
        form: how the decoder's matrices are held. name: the checkpoint's, for messages.

    Returns:
        The model, and a line on packed weights that were written or could not be; None: neither.

    Raises:
        ModelError: files that cannot be read, tensors that are missing or hold NaN or infinity.
    """
    if family.has_vision:
        _imports.start(family, config)
        _imports.wait()
    shorter, layers = _without_layers(config)
    names = _names_beside_text(family, stored)
    first = dtype if form is None else stored.one_dtype(names) or dtype
    tensors: dict[str, Any] = {name: Unread(stored, name) for name in names}
    tensors |= _placeholders(family, weights, first)
    packing = None if form is None else _Packing(stored, names, first, form)
    model = load(shorter, first, _CPU, tensors | (packing.stand_ins if packing else {}))
    if packing and not packing.all_are_in(model):
        # This version of transformers makes others of them: it gets their numbers.
        packing, model = None, load(shorter, first, _CPU, tensors)
    for part in (model.config.get_text_config(), family.text_model(model).config):
        vars(part).update(layers)
    _share_text(model, family, weights, dtype, stored)
    note = None if packing is None else packing.pack(model, family, name)
    require_finite_rest(model, weights, name)
    if form is not None and packing is None:
        hold_tower(model, family, form)
    if first != dtype:
        _widen(model, weights, dtype)
    if device != _CPU:
        move(model, device)
        return model, note
    give_back()
    return model, note


def _without_layers(config: Any) -> tuple[Any, dict[str, Any]]:
    """Return a copy of a config whose text model has no layers, and what says how many it had."""
    shorter = copy.deepcopy(config)
    text = shorter.get_text_config()
    said = {name: getattr(text, name, None) for name in ("num_hidden_layers", "layer_types")}
    layers = {name: value for name, value in said.items() if value is not None}
    vars(text).update({name: 0 if name == "num_hidden_layers" else [] for name in layers})
    return shorter, layers


def _share_text(
    model: Any,
    family: type[Family],
    weights: DecoderWeights,
    dtype: torch.dtype,
    stored: StoredTensors,
) -> None:
    """Give a model the decoder's embedding, norm and head."""
    text: Any = family.text_model(model)
    text.embed_tokens.weight = embed = _parameter(weights.embed, dtype)
    norm, place = weights.norm, text_place(stored, family.text_places)
    if text.config.model_type in OFFSET_TYPES and place is not None:
        # As the module has it: the decoder's gain is 1 + weight.
        norm = stored.read([f"{place[0]}norm.weight"], dtype, _CPU)
    text.norm.weight = nn.Parameter(norm, requires_grad=False)
    tied = weights.head.data_ptr() == weights.embed.data_ptr()
    model.get_output_embeddings().weight = embed if tied else _parameter(weights.head, dtype)


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


class Unread:
    """A tensor of the files that is read when transformers slices it, as those of safetensors."""

    def __init__(self, stored: StoredTensors, name: str) -> None:
        self._stored, self._name = stored, name

    def __getitem__(self, index: Any) -> Tensor:
        return self._stored.read_as_stored(self._name)[index]


class _StandIn:
    """A matrix that nobody reads: one number in all places, which tells where it went."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.tensor, self.given = torch.zeros((), dtype=dtype).expand(shape), False

    def __getitem__(self, index: Any) -> Tensor:
        self.given = True
        return self.tensor[index]


class _Packing:
    """Puts matrices into a model in a form: from the file of packed ones, or from the checkpoint's.

    Attributes:
        stand_ins: what the model is loaded with in their place, by the names of stored tensors.
    """

    def __init__(
        self, stored: StoredTensors, names: list[str], dtype: torch.dtype, form: WeightForm
    ) -> None:
        self._stored, self._dtype, self._form = stored, dtype, form
        shapes = {name: stored.shape(name) for name in names}
        self.stand_ins = {
            name: _StandIn(shape, dtype)
            for name, shape in shapes.items()
            if len(shape) > 1 and 0 not in shape and stored.is_float(name)
        }
        self._by_address = {
            stand_in.tensor.data_ptr(): name for name, stand_in in self.stand_ins.items()
        }

    def all_are_in(self, model: nn.Module) -> bool:
        """Whether each that was asked for is a tensor of the model as it was given."""
        found = {
            name: tensor.shape
            for tensor in _tensors(model)
            if (name := self._name_of(tensor)) is not None
        }
        asked = {name: each.tensor.shape for name, each in self.stand_ins.items() if each.given}
        return asked == found

    def pack(self, model: Any, family: type[Family], checkpoint: str) -> str | None:
        """Give the layers their matrices, and what is no layer's its numbers.

        Returns:
            A line on packed weights that were written or could not be; None: neither.

        Raises:
            ModelError: a matrix holds NaN or infinity.
        """
        form, stored, labels = self._form, self._stored, {}
        places = {module: place for place, module in model.named_modules()}
        for parent, own in layers_to_hold(model, family):
            layer = getattr(parent, own)
            if (name := self._name_of(layer.weight)) is not None:
                labels[name] = f"{places[layer]}.weight"

        def read(store: PanelStore) -> dict[str, Matrix]:
            made = {name: self._matrix(store, name) for name in labels}
            unknown = ((labels[name], held) for name, held in made.items() if not store.knows(held))
            require_finite(unknown, checkpoint)
            return made

        if form.packs and labels:
            # The same panels: what is stored in bfloat16 needs no rounding, and of four bits
            # there are none in a tower.
            exact = form.name == "auto" and stored.kinds(labels) <= {"BF16"}
            named = "bf16" if exact else "int8" if form.bits() == 8 else form.name
            numbers = stored.numbers_of(labels)
            size = form.bytes_of(numbers)
            made, note = with_panels(
                read, stored.files, checkpoint, named, numbers, size, "vision", stored.settings
            )
            assert made is not None
        else:
            made, note = read(PanelStore()), None

        # A weight of its own has no name.
        hold_tower(model, family, form, lambda weight: made.get(self._name_of(weight) or ""))
        for tensor in _tensors(model):
            if (name := self._name_of(tensor)) is not None:
                left = made.get(name)
                whole = left if isinstance(left, Tensor) else stored.read_as_stored(name)
                tensor.data = whole.to(self._dtype).view(tensor.shape)
        return note

    def _matrix(self, store: PanelStore, name: str) -> Matrix:
        def make() -> Matrix:
            return self._stored.read_matrix([name], torch.float32, _CPU, self._form, "")

        made, shape = store.matrix(name, make), self._stored.shape(name)
        return made if tuple(made.shape) == (shape[0], math.prod(shape[1:])) else make()

    def _name_of(self, tensor: Tensor) -> str | None:
        return self._by_address.get(tensor.data_ptr())


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


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
    made = {name: zero.expand(tuple(shape)) for name, shape in shapes.items()}
    # Of other numbers than the embedding: transformers would compare the two to their ends.
    return made | {head: (zero + 1).expand(tuple(weights.head.shape))}


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


def _parameter(matrix: Matrix, dtype: torch.dtype) -> nn.Parameter:
    """Return a matrix as a parameter. Of one in panels, which no module reads, its shape alone."""
    if isinstance(matrix, Panels):
        matrix = torch.empty(matrix.shape, dtype=dtype, device="meta")
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
