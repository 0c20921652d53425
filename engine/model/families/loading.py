"""From a folder or hub id to a family, the decoder's sizes and its weights."""

from __future__ import annotations

import functools
import importlib.util
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers.utils import logging as transformers_logging

from mmkv.engine.budget import format_bytes
from mmkv.engine.errors import STOPS, MmkvError, ModelError
from mmkv.engine.model.families import FAMILIES, Family, family_for
from mmkv.engine.model.families.base import DeferredModel, end_tokens
from mmkv.engine.model.families.config import read_config, whole_config
from mmkv.engine.model.families.vision import (
    Unread,
    build_vision,
    hold_tower,
    import_beside,
    require_finite_rest,
)
from mmkv.engine.model.gguf.file import SUFFIX
from mmkv.engine.model.gguf.tensors import GgufTensors
from mmkv.engine.model.lora import AdaptedTensors
from mmkv.engine.model.panel_files import PanelStore, with_panels
from mmkv.engine.model.product import Kernels, WeightForm
from mmkv.engine.model.quantised import QuantisedTensors, settings_of
from mmkv.engine.model.settings import fields_of, require_sizes
from mmkv.engine.model.source import (
    PICKLED,
    PICKLED_INDEX,
    checkpoint_file,
    files_of,
    find_adapter,
    hub_reachable,
    locate,
)
from mmkv.engine.model.spec import DecoderSpec, RopeSpec, sparse_layers
from mmkv.engine.model.stored import (
    COMPUTED,
    PickledTensors,
    StoredTensors,
    read_text_weights,
)
from mmkv.engine.model.weights import DecoderWeights, require_finite
from mmkv.engine.system import require_card

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_16_BITS = (torch.bfloat16, torch.float16)


def load(
    path_or_hub_id: str | Path,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    progress: Callable[[str], None] | None = None,
    pictures: bool = False,
    form: str = "auto",
    kernels: Kernels | None = None,
    label: str | None = None,
    adapter: str | Path | None = None,
) -> tuple[Family, DecoderSpec, DecoderWeights]:
    """Read a checkpoint: each shard once, into the dtype used.

    The text weights of mmkv's own families come straight from the files; their vision side is read
    when ``family.hf`` is first asked for. Other families, and checkpoints in an older form, are
    loaded by transformers, and the text weights are then moved out of the model.

    Args:
        path_or_hub_id: a transformers checkpoint folder with safetensors, or a hub id.
        dtype: see :func:`resolve_dtype`. device: see :func:`resolve_device`.
        progress: called with a few words on what is being done.
        pictures: some will come: what reads them is imported beside the weights.
        form: how matrices are held: ``auto``, ``bf16``, ``int8`` or ``int4``.
        kernels: what multiplies by them; None: torch. With a product of their own, matrices that
            bfloat16 holds exactly are held in it under ``auto``.
        label: what messages call the checkpoint; None: as it is named.
        adapter: folder or hub id of a LoRA adapter that is merged into the weights.

    Returns:
        The family (which keeps the vision side), the sizes, and the text weights, of which there
        is no second copy.

    Raises:
        ModelError: nothing there, unreadable or incomplete files, or an unsupported model; or a
            form that is not for it.
    """
    where = resolve_device(device)
    require_card(where)
    source = locate(str(path_or_hub_id))
    name = str(path_or_hub_id) if label is None else label
    # A file with wrong values can make libraries raise nearly anything.
    with _explaining(name, source):
        say = progress or (lambda _: None)
        holding = functools.partial(WeightForm.of, form, kernels or Kernels())
        return _load(name, source, dtype, where, say, pictures, holding, adapter)


def _load(
    name: str,
    source: str,
    dtype: str | torch.dtype,
    where: torch.device,
    say: Callable[[str], None],
    pictures: bool,
    holding_of: Callable[[torch.dtype, torch.device, bool], WeightForm | None],
    adapter: str | Path | None,
) -> tuple[Family, DecoderSpec, DecoderWeights]:
    local = Path(source).is_dir() or not hub_reachable()
    say("reading the config")
    config = read_config(source, local)
    quantised = settings_of(config)
    family_type = family_for(config)
    require_sizes(config)
    precision = resolve_dtype(dtype, config, where)
    experts = any(sparse_layers(config.get_text_config()))
    holding = holding_of(precision, where, experts)
    say("reading the weights")
    load_whole = functools.partial(_model, name, source, local, family_type)
    files = None if adapter is None else find_adapter(str(adapter))
    opened = functools.partial(_opened, source, quantised, config, files, family_type.text_places)
    if family_type in FAMILIES:
        text_config = config.get_text_config()
        spec = DecoderSpec.from_config(
            text_config,
            lambda: RopeSpec.from_config(
                text_config, family_type.mrope_section, family_type.mrope_interleaved
            ),
        )
        with import_beside(family_type, config, pictures):
            weights = _stored_weights(
                name, opened(), family_type, config, spec, precision, where, holding
            )
        if weights is not None:
            say("preparing the decoder")
            ends = _ends_of(source)

            @_explaining(name, source)
            def build(shared: DecoderWeights) -> tuple[Any, str | None]:
                stored = opened()
                if stored is None:
                    raise ModelError(f"the weights of {name} are gone; get the checkpoint again")
                how = precision, where, load_whole, stored, holding, name
                return build_vision(family_type, whole_config(config), shared, *how)

            model = DeferredModel(config, ends, spec.vocab_size, functools.partial(build, weights))
            return family_type(model), spec, weights
    stored = opened()
    # transformers reads plain safetensors by itself.
    others = stored is not None and type(stored) is not StoredTensors
    tensors = {part: Unread(stored, part) for part in stored.names} if stored and others else None
    hf_model = load_whole(whole_config(config), precision, where, tensors)
    say("preparing the decoder")
    text_model = family_type.text_model(hf_model)
    family = family_type(hf_model)
    section, interleaved = family_type.mrope_section, family_type.mrope_interleaved
    kinds, sees = family_type.state_kinds, family_type.has_vision
    spec = DecoderSpec.from_hf(text_model, section, interleaved, kinds, sees)
    if spec.rope.axes != family_type.rope_axes:
        raise ModelError(
            f"{family_type.__name__} has positions of {family_type.rope_axes} axes and {name} "
            f"rotates by {spec.rope.axes}; set rope_axes, and mrope_section for M-RoPE"
        )
    head, state_layer = family_type.output_head(hf_model), family_type.state_layer
    weights = DecoderWeights.take(text_model, head, spec, state_layer)
    if holding is not None:
        weights.hold(holding)
    require_finite(weights.named(), name)
    require_finite_rest(hf_model, weights, name)
    if holding is not None and family_type in FAMILIES:
        hold_tower(hf_model, family_type, holding)
    return family, spec, weights


def resolve_device(device: str | torch.device = "auto") -> torch.device:
    """Return the device; ``auto`` is the GPU where PyTorch sees one, else the CPU.

    Raises:
        ModelError: for a device that is unknown or absent.
        TypeError: for what is no device and no name of one.
    """
    if not isinstance(device, (str, torch.device)):
        raise TypeError(f"device must be a string or a torch.device, not {type(device).__name__}")
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        made = torch.device(device)
    except RuntimeError as error:
        raise ModelError(f"unknown device {device!r}; use 'auto', 'cpu' or 'cuda'") from error
    if made.type == "cuda" and (made.index or 0) >= torch.cuda.device_count():
        raise ModelError(f"device {str(made)!r} is not there; use device='cpu'")
    if made.type not in ("cpu", "cuda"):
        raise ModelError(f"device {str(made)!r} is not supported; use 'auto', 'cpu' or 'cuda'")
    return made


def resolve_dtype(dtype: str | torch.dtype, config: Any, device: torch.device) -> torch.dtype:
    """Return the dtype of weights and KV cache.

    ``auto`` is the checkpoint's own on a GPU. On a CPU it is float32 for float16 and bfloat16
    checkpoints: few CPUs multiply them natively, so prompts take longer, and results then
    depend on the machine. Ask for ``bfloat16`` to halve the memory, or where the CPU has AMX.

    Raises:
        ModelError: for another name.
        TypeError: for what is no dtype and no name of one.
    """
    if not isinstance(dtype, (str, torch.dtype)):
        raise TypeError(f"dtype must be a string or a torch.dtype, not {type(dtype).__name__}")
    if isinstance(dtype, torch.dtype):
        chosen = dtype
    elif dtype != "auto":
        chosen = _DTYPES.get(dtype.removeprefix("torch."), torch.int8)
    elif device.type == "cpu":
        return torch.float32
    else:
        own = _own_dtype(config)
        chosen = own if isinstance(own, torch.dtype) else torch.float32
    if chosen not in _DTYPES.values():
        raise ModelError(f"dtype {str(dtype)!r} is not supported; use auto, {', '.join(_DTYPES)}")
    return chosen


def _own_dtype(config: Any) -> Any:
    return getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)


def _stored_weights(
    name: str,
    stored: StoredTensors | None,
    family_type: type[Family],
    config: Any,
    spec: DecoderSpec,
    dtype: torch.dtype,
    device: torch.device,
    holding: WeightForm | None,
) -> DecoderWeights | None:
    if stored is None:
        return None
    _require_enough(stored, spec, config, name)
    tied = bool(getattr(config, "tie_word_embeddings", False))
    text_config, places = config.get_text_config(), family_type.text_places

    def read(panels: PanelStore) -> DecoderWeights | None:
        made = read_text_weights(
            stored, text_config, spec, places, tied, dtype, device, holding, panels
        )
        if made is not None:
            unknown = ((part, held) for part, held in made.named() if not panels.knows(held))
            require_finite(unknown, name)
        return made

    if holding is None or not holding.packs:
        found, note = read(PanelStore()), None
    else:
        found, note = _with_kept(read, stored, holding, places, name)
    if found is not None:
        found.note = "; ".join(filter(None, (stored.note, note))) or None
    if isinstance(stored, GgufTensors):
        _require_found(found, stored, name, text_config.model_type)
    return found


def _require_enough(stored: StoredTensors, spec: DecoderSpec, config: Any, name: str) -> None:
    """Raise ModelError where the files have less than half of a text model's numbers.

    A name for each matrix may fill the memory already, and so would the random numbers that
    transformers has for what is not there.
    """
    text_config = config.get_text_config()
    if spec.matrix_numbers(text_config) <= 2 * stored.numbers:
        return
    if isinstance(stored, GgufTensors):
        _require_found(None, stored, name, text_config.model_type)
    raise ModelError(
        f"config.json describes a text model of more numbers than the {stored.numbers:,} of "
        f"the weight files in {name}; get the complete checkpoint, or mend vocab_size, "
        "hidden_size, num_hidden_layers, head_dim or another size"
    )


def _with_kept(
    read: Callable[[PanelStore], DecoderWeights | None],
    stored: StoredTensors,
    holding: WeightForm,
    places: Sequence[tuple[str, str]],
    name: str,
) -> tuple[DecoderWeights | None, str | None]:
    """Run ``read`` as :func:`with_panels` does, with the packed weights of the text model."""
    below = tuple(part for place in places for part in place)
    text = [part for part in stored.names if part.startswith(below) and ".experts." not in part]
    # What is stored in bfloat16 needs no rounding: both forms are one.
    exact = holding.name == "auto" and stored.kinds(text) <= {"BF16"}
    form = "bf16" if exact else holding.name
    numbers = stored.numbers_of(text)
    inside = stored.numbers_of(part for part in text if ".layers." in part)
    size = holding.bytes_of(inside, "layers.") + holding.bytes_of(numbers - inside)
    return with_panels(read, stored.files, name, form, numbers, size, settings=stored.settings)


def _opened(
    source: str,
    quantised: dict[str, Any] | None,
    config: Any,
    adapter: tuple[Path, Path] | None,
    places: Sequence[tuple[str, str]],
) -> StoredTensors | None:
    """Return the tensors of a checkpoint's weight files, None where it has none.

    Args:
        quantised: what its config says of quantisation, None where it says nothing.
        config: of the whole model.
        adapter: config and weights of an adapter to merge, or None.
        places: where the files may hold the text model.
    """
    find = functools.partial(checkpoint_file, source)
    stored: StoredTensors | None = None
    if (files := files_of(find)) is not None:
        gguf = files[0].suffix.lower() == SUFFIX
        stored = GgufTensors(files, config) if gguf else StoredTensors(files)
    elif (files := files_of(find, PICKLED, PICKLED_INDEX)) is not None:
        stored = PickledTensors(files)
    if stored is not None and quantised is not None:
        own = _own_dtype(config)
        dtype = own if own in _16_BITS else torch.bfloat16
        stored = QuantisedTensors(stored, quantised, dtype)
    if adapter is None:
        return stored
    if stored is None:
        raise ModelError(
            f"an adapter is merged into weights that are here, and {source} is not; fetch it "
            "first: mmkv pull OWNER/NAME"
        )
    config_file, weights = adapter
    with _explaining(f"the adapter {config_file.parent.name}", str(config_file.parent)):
        return AdaptedTensors(stored, config_file, weights, places)


def _require_found(found: DecoderWeights | None, stored: GgufTensors, name: str, kind: str) -> None:
    """Check what was read of a GGUF file; add a line where it takes much more than the file.

    Raises:
        ModelError: nothing was.
    """
    if found is None:
        raise ModelError(
            f"the tensors of {name} are not those of a {kind} of the sizes that its metadata say; "
            "get the original file"
        )
    if found.embed.device.type == "cpu" and stored.widened(found.form):
        said = (
            f"quantised numbers are held as {str(found.dtype).removeprefix('torch.')} "
            f"({format_bytes(found.nbytes())}); --weights int8 or int4 takes less"
        )
        found.note = "; ".join(filter(None, (found.note, said)))


def _ends_of(source: str) -> tuple[int, ...]:
    """Return the ids that end a reply, as the checkpoint's files say. Raises ModelError.

    What a config's class takes where its file says nothing is the end of another vocabulary.
    """
    said = _json(source, "config.json")
    return end_tokens(_json(source, "generation_config.json"), said, said.get("text_config"))


def _json(source: str, name: str) -> dict[str, Any]:
    """Return the object in a checkpoint's file; without a readable one, nothing."""
    path = checkpoint_file(source, name)
    try:
        found = {} if path is None else json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _model(
    name: str,
    source: str,
    local: bool,
    family_type: type[Family],
    config: Any,
    dtype: torch.dtype,
    device: torch.device,
    tensors: dict[str, Any] | None = None,
) -> Any:
    """Load a model by transformers; with ``tensors``, from these and not from its files."""
    loader = getattr(transformers, family_type.auto_class)
    if tensors is not None:
        loader = loader._model_mapping[type(config)]
    # With accelerate at hand the shards go straight to the GPU, else by way of the CPU.
    direct = device.type != "cpu" and importlib.util.find_spec("accelerate") is not None
    # A download of gigabytes keeps its progress bar.
    with _quiet(bars=not local):
        model, report = loader.from_pretrained(
            source if tensors is None else None,
            config=config,
            dtype=dtype,
            attn_implementation="sdpa",
            output_loading_info=True,
            # A pickle can run code when it is read.
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=local,
            ignore_mismatched_sizes=True,  # they are reported, and refused below
            state_dict=tensors,
            device_map={"": device} if direct else None,
        )
    # transformers fills what is missing with random numbers and only warns.
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelError(
            f"{name} lacks {len(missing)} weights ({missing[0]} ...), which config.json asks for; "
            f"get the complete checkpoint, or mend num_hidden_layers, {fields_of(missing[0])}"
        )
    for part, stored, wanted in sorted(report["mismatched_keys"]):
        raise ModelError(
            f"{part} of {name} is {list(stored)} in the files and {list(wanted)} by config.json; "
            f"get the complete checkpoint, or mend {fields_of(part)}"
        )
    # What the decoder would leave out changes what it says; other parts have classes of their own.
    foreign = _foreign(family_type, model, report["unexpected_keys"])
    if foreign:
        raise ModelError(
            f"{name} has {len(foreign)} text weights that this decoder does not have "
            f"({foreign[0]} ...); use a checkpoint of one of mmkv's families, or the config.json "
            f"that belongs to these weights (num_hidden_layers, {fields_of(foreign[0])})"
        )
    return model.requires_grad_(False).eval().to(device)


def _foreign(family_type: type[Family], model: Any, unexpected: Iterable[str]) -> list[str]:
    """Return those of a checkpoint's unexpected tensors that belong to the text model."""
    text: Any = family_type.text_model(model)
    if not len(text.layers):  # what sees is read alone
        return []
    prefix = next(f"{part}." for part, module in model.named_modules() if module is text)
    below = (prefix, *(place for place, _ in family_type.text_places))
    return sorted(key for key in unexpected if key.startswith(below) and not key.endswith(COMPUTED))


@contextmanager
def _explaining(name: str, source: str) -> Iterator[None]:
    """Raise a :class:`ModelError` of one line for whatever reading a checkpoint raises."""
    try:
        yield
    except (MmkvError, *STOPS):
        raise
    except BaseException as error:
        raise _explained(name, source, error) from error


# Parts of transformers' errors -> their cause and its remedy.
_UNREADABLE = {
    "no file named": ("it has no weights", "get its safetensors"),
    "No such file": ("a file is missing that its index of weights names", "get all of its files"),
    "is not a valid JSON file": ("config.json is no JSON", "get it again"),
    "Should have a `model_type`": ("config.json names no model_type", "get the original file"),
    "ignore_mismatched_sizes": (
        "its weights have other shapes than config.json says",
        "get both from one checkpoint",
    ),
}


def _explained(name: str, source: str, error: BaseException) -> Exception:
    """Convert an error of reading a checkpoint to a :class:`ModelError` of one line."""
    first = _first_sentence(str(error)) or type(error).__name__
    if isinstance(error, (ArithmeticError, AttributeError, LookupError, TypeError)):
        first = f"a value in one of its files is wrong ({type(error).__name__}: {first})"
    # torch raises a RuntimeError of its own on the CPU.
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "allocate memory" in str(error):
        return ModelError(f"not enough memory for {name}; use a smaller model or dtype='bfloat16'")
    if isinstance(error, SafetensorError):
        return ModelError(
            f"the weights of {name} are corrupt ({first}); copy or download them again"
        )
    if "conversion of the weights" in first:  # of experts that are stored one by one
        return ModelError(
            f"{name} lacks weights of experts, or they have other shapes than config.json says; "
            "get the complete checkpoint"
        )
    unknown = re.search(r"model type `([^`]+)`", str(error))
    own_code = _own_code(source)
    if own_code and (unknown or "trust_remote_code" in str(error) or "custom code" in str(error)):
        return ModelError(
            f"{name} runs by Python code of its own (auto_map in config.json: {own_code}), which "
            "mmkv never runs; take the same model in transformers' form (often NAME-hf), or "
            "install a package that adds it (docs/how-to/add-a-family.md)"
        )
    if unknown:
        return ModelError(
            f"{name} has model type {unknown[1]!r}, which transformers {transformers.__version__} "
            "does not know; update transformers, use another model, or install the package that "
            "adds this one (docs/how-to/add-a-family.md)"
        )
    if Path(source).is_dir():
        found = (told for part, told in _UNREADABLE.items() if part in first)
        cause, remedy = next(found, (first.rstrip("."), "get all of its files again"))
        return ModelError(f"{name} is not a readable checkpoint: {cause}; {remedy}")
    return ModelError(
        f"cannot get {name!r} from the hub and no such folder is here; check the name and the "
        "network, or give the path of a downloaded checkpoint"
    )


def _own_code(source: str) -> str:
    """Return the module that config.json has a checkpoint's classes from; empty without one."""
    try:
        named = next(iter(_json(source, "config.json")["auto_map"].values()))
        return ascii(named if isinstance(named, str) else named[0])[1:80].rstrip("'")
    except (LookupError, TypeError, AttributeError, StopIteration):
        return ""


def _first_sentence(text: str, longest: int = 160) -> str:
    """Return the start of a library's message that fits one line."""
    first, second, *_ = [*map(str.strip, text.strip().splitlines()), "", ""]
    line = f"{first} {second}" if first.endswith(":") else first
    return line if len(line) <= longest else line[:longest].rsplit(" ", 1)[0] + " ..."


@contextmanager
def _quiet(bars: bool) -> Iterator[None]:
    """Silence transformers' reports and, unless ``bars``, its progress bars."""
    shown = transformers_logging.is_progress_bar_enabled()
    level = transformers_logging.get_verbosity()
    if not bars:
        transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if shown:
            transformers_logging.enable_progress_bar()
