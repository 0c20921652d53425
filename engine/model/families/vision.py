"""The vision tower and projector: a transformers model whose decoder has no layers.

Their matrices are held in the forms of the decoder's. On a CPU attention runs in C where it can:
towers ask transformers' ``AttentionInterface`` for it by name.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from mmkv.engine.errors import STOPS
from mmkv.engine.model.families.base import Family
from mmkv.engine.model.panel_files import PanelStore, with_panels
from mmkv.engine.model.panels import Panels
from mmkv.engine.model.product import Matrix, PatchAttention, Product, WeightForm
from mmkv.engine.model.spec import OFFSET_TYPES
from mmkv.engine.model.stored import StoredTensors, text_place
from mmkv.engine.model.weights import DecoderWeights, require_finite
from mmkv.engine.system import give_back

_CPU = torch.device("cpu")
_MANY_BYTES = 2**26  # that are freed before the heap gives them back
# Towers without masks: patches see all of a picture, or of the parts that flash attention gets.
_UNMASKED = {
    "clip_vision_model",
    "idefics3_vision",
    "internvl_vision",
    "pixtral",
    "siglip_vision_model",
    "smolvlm_vision",
}
# Of these, those whose patches of all pictures, or windows, lie in one row.
_IN_PARTS = {
    "glm4v_vision",
    "qwen2_5_vl_vision",
    "qwen2_vl_vision",
    "qwen3_vl_moe_vision",
    "qwen3_vl_vision",
}


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
        if device.type == "cuda" and dtype != torch.float32:
            attend_at_once(model)
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
        if freed >= _MANY_BYTES:  # which lie between others: the heap keeps them by itself
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


class HeldLinear(nn.Module):
    """A linear layer whose matrix is held in a form.

    Attributes:
        matrix: ``[out, in]``. It is no parameter: nothing but ``product`` reads it.
        bias: ``[out]`` in the dtype of states, or None.
    """

    def __init__(
        self,
        matrix: Matrix,
        bias: Tensor | None,
        product: Product,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.matrix, self._product, self._dtype = matrix, product, dtype
        self.bias = None if bias is None else nn.Parameter(bias.to(dtype), requires_grad=False)

    @property
    def weight(self) -> Tensor:
        """Return what transformers asks layers for: the shape, and the dtype of states."""
        return torch.empty(self.matrix.shape, dtype=self._dtype, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        """Compute ``weight x + bias``, ``[..., out]`` of ``x [..., in]`` in the dtype of states."""
        return self._product(x, self.matrix, self.bias)


class HeldPatches(HeldLinear):
    """A convolution whose patches lie side by side: one product for all of them."""

    def __init__(
        self,
        matrix: Matrix,
        bias: Tensor | None,
        product: Product,
        patch: tuple[int, ...],
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(matrix, bias, product, dtype)
        self.patch = patch

    def forward(self, x: Tensor) -> Tensor:
        """Compute ``[n, out, *patches]`` of pixels ``[n, channels, *pixels]``.

        Pixels at the end of an axis that fill no patch are not read, as in the convolution.
        """
        axes = len(self.patch)
        for axis, size in enumerate(self.patch):
            x = x.unfold(2 + axis, size, size)
        patches = x.movedim(1, 1 + axes).flatten(-1 - axes)
        return super().forward(patches).movedim(-1, 1)


def hold_tower(
    model: Any,
    family: type[Family],
    form: WeightForm,
    take: Callable[[Tensor], Matrix | None] = lambda weight: None,
) -> None:
    """Hold the matrices of a model's vision tower and projector in a form, in place.

    Linear layers and patch embeddings become modules that multiply by :attr:`WeightForm.product`;
    the text model and the output head stay. A matrix that the form leaves in float32 stays as it
    is, and so does all that is no matrix.

    Args:
        model: a transformers model of ``family``, in a floating dtype. What stays is not converted.
        take: gives the matrix of a layer's weight; None: it is to be made of the weight.
    """
    freed = 0
    for parent, name in list(layers_to_hold(model, family)):
        layer = getattr(parent, name)
        if (matrix := take(layer.weight)) is None:
            matrix = _matrix_of(layer.weight, form)
        if isinstance(matrix, Tensor) and matrix.dtype == torch.float32:
            continue
        setattr(parent, name, _holding(layer, matrix, form))
        del layer
        freed += matrix.nbytes
        if freed >= _MANY_BYTES:  # of others: the heap keeps what lies between by itself
            give_back()
            freed = 0
    _set_attention(model, form)


def layers_to_hold(model: Any, family: type[Family]) -> Iterator[tuple[nn.Module, str]]:
    """Yield where tower and projector have layers that multiply: parent, name in it."""
    text: Any = family.text_model(model)
    apart = {*text.modules(), model.get_output_embeddings()}
    for parent in model.modules():
        for name, child in parent.named_children():
            # Of these types alone: a subclass may compute something else.
            patches = type(child) in (nn.Conv2d, nn.Conv3d) and _side_by_side(child)
            if not {parent, child} & apart and (patches or type(child) is nn.Linear):
                yield parent, name


def _set_attention(model: Any, form: WeightForm) -> None:
    """Have a tower's layers attend by the form's kernels, if they have one for such a tower."""
    kernel = form.attention
    if kernel is None:
        return
    name = f"mmkv_flash_{form.name}_{'torch' if form.kernels.attention is None else 'c'}"
    _attend_by(model, name, functools.partial(_attend, kernel), _UNMASKED | _IN_PARTS)


def attend_at_once(model: Any) -> None:
    """Have a tower's layers attend in one launch, however many pictures and windows there are.

    For half precision on a GPU; other towers stay as they are.
    """
    _attend_by(model, "mmkv_flash_parts", _attend_at_once, _IN_PARTS)


def _attend_by(model: Any, name: str, attend: Callable[..., Any], kinds: set[str]) -> None:
    """Have a tower of one of the ``kinds`` attend by a function of transformers' interface.

    With "flash" in the name, Qwen's towers call it once, and not once for each window.
    """
    vision: Any = getattr(getattr(model, "config", None), "vision_config", None)
    if getattr(vision, "model_type", None) not in kinds:
        return
    # All models of the process read that registry: another one's kernel stays as it is.
    transformers.AttentionInterface.register(name, attend)
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if type(config) is type(vision):
            config._attn_implementation = name


def _attend_at_once(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Do as :func:`_attend`, by flash attention where a row has several parts; nothing is read.

    Args:
        max_length_q: of the longest part.
    """
    plain = not (dropout or options.get("is_causal")) and attention_mask is None
    if cu_seq_lens_q is None or max_length_q is None or not plain or query.shape[-1] % 8:
        three = (query, key, value)
        asked = (scaling, dropout, cu_seq_lens_q)
        return _attend(None, module, *three, attention_mask, *asked, **options)
    rows, starts = (x[0].transpose(0, 1) for x in (query, key, value)), cu_seq_lens_q.int()
    longest = int(max_length_q)
    kernel = torch.ops.aten._flash_attention_forward
    made, *_ = kernel(*rows, starts, starts, longest, longest, 0.0, False, False, scale=scaling)
    return made[None], None


def _attend(
    kernel: PatchAttention | None,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    cu_seq_lens_q: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers' interface asks for it; what ``kernel`` does not do is torch's.

    Args:
        query: ``[n, H, T, D]``; key and value likewise.
        cu_seq_lens_q: where each part of the tokens begins, and T; without it all see all.

    Returns:
        ``[n, T, H, D]``, and no weights.
    """
    tokens = query.shape[2]
    starts = [0, tokens] if cu_seq_lens_q is None else cu_seq_lens_q.tolist()
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    causal = options.get("is_causal")
    masked = attention_mask is not None or (module.is_causal if causal is None else causal)
    three = (query, key, value)
    if kernel is not None and _plain(three) and not (masked or dropout):
        return kernel(query, key, value, scale, starts), None
    torchs = transformers.AttentionInterface()["sdpa"]
    made = [
        torchs(
            module,
            *(x[:, :, first:after] for x in three),
            attention_mask,
            dropout=dropout,
            scaling=scale,
            **options,
        )[0]
        for first, after in pairwise(starts)
    ]
    return torch.cat(made, 1), None


def _plain(three: tuple[Tensor, Tensor, Tensor]) -> bool:
    """Whether these are what kernels read: float32 on the CPU, of one shape, without gradients."""
    here = all(x.dtype == torch.float32 and x.device.type == "cpu" for x in three)
    asked = torch.is_grad_enabled() and any(x.requires_grad for x in three)
    return here and len({x.shape for x in three}) == 1 and not asked


def move(model: nn.Module, device: torch.device) -> None:
    """Move a model to a device, with what :func:`hold_tower` holds; what is on meta stays there."""
    for module in model.modules():
        if isinstance(module, HeldLinear):
            module.matrix = module.matrix.to(device)
    model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))


def held_matrices(model: nn.Module) -> Iterator[tuple[str, Matrix]]:
    """Yield the matrices that :func:`hold_tower` holds, by the names of the weights they were."""
    for name, module in model.named_modules():
        if isinstance(module, HeldLinear):
            yield f"{name}.weight", module.matrix


def _matrix_of(weight: Tensor, form: WeightForm) -> Matrix:
    plain = weight.detach().flatten(1)
    # No form is made of float16.
    return form.hold(plain.float() if plain.dtype == torch.float16 else plain)


def _holding(layer: nn.Module, matrix: Matrix, form: WeightForm) -> HeldLinear:
    """Return what takes a layer's place."""
    bias = layer.bias
    assert bias is None or isinstance(bias, Tensor)
    if isinstance(layer, (nn.Conv2d, nn.Conv3d)):
        return HeldPatches(matrix, bias, form.product, layer.kernel_size, form.dtype)
    return HeldLinear(matrix, bias, form.product, form.dtype)


def _side_by_side(layer: Any) -> bool:
    """Whether a convolution reads every pixel once."""
    padded = layer.padding not in ("valid", (0,) * len(layer.kernel_size))
    dilated = any(step != 1 for step in layer.dilation)
    whole = layer.stride == layer.kernel_size and not padded and not dilated
    return whole and layer.groups == 1
