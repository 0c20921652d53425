"""The columns of the cache are named once; C and Triton, which name them again, agree.

To add a column, five files are touched (ten on commit 22d3ce1, each with a list of its own):
``engine/cache/layout.py`` names it, ``native.h`` has its member in ``struct cache``, ``pages.c``
moves it, ``evict_triton.py`` moves it in ``fill_kernel``, and ``store_kernel`` of
``store_triton.py`` takes it. That carries it through growth, eviction, fork and session files.
Whoever fills or reads it comes on top: for a value of every token ``torch/step.py``,
``append_entry`` of ``pages.c`` and ``store.py``; for a value that policies see ``CacheView``,
``CachedSequence.view`` and ``evict_reference``. ``test_memory_equals_a_count_of_pages`` counts the
bytes of columns that it names.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch

from mmkv.engine import backends
from mmkv.engine.backends.cpu.binding import Cache
from mmkv.engine.cache import COLUMNS, KVForm, PagePool, RaggedCache
from mmkv.engine.cache.forms import FORMS

BACKENDS = Path(backends.__path__[0])
C_TYPES = {
    None: "void",
    torch.float16: "uint16_t",
    torch.float32: "float",
    torch.int32: "int32_t",
    torch.uint8: "uint8_t",
}


def code(name: str) -> str:
    """Return a C source without its comments."""
    return re.sub(r"/\*.*?\*/", "", (BACKENDS / "cpu" / name).read_text(), flags=re.DOTALL)


def body(source: str, head: str) -> str:
    """Return the text between the braces after ``head``."""
    found = re.search(re.escape(head) + r"[^{;]*\{(.*?)\n\}", source, re.DOTALL)
    assert found, head
    return found[1]


def members() -> dict[str, str]:
    """Return the type of each member of ``struct cache`` by name, in order.

    Pointers end with a star.
    """
    found = {}
    for kind, names in re.findall(r"(\w+) ([^;]+);", body(code("native.h"), "struct cache")):
        for name in names.split(","):
            found[name.strip(" *")] = kind + "*" * ("*" in name)
    return found


def kernel(file: str, name: str) -> ast.FunctionDef:
    """Return the definition of a Triton kernel; Triton itself need not be installed."""
    tree = ast.parse((BACKENDS / "cuda" / "kernels" / file).read_text())
    [found] = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name]
    return found


def test_the_c_structure_has_the_columns_first_and_binding_mirrors_it() -> None:
    found = members()
    assert list(found)[: len(COLUMNS)] == list(COLUMNS)
    for name, column in COLUMNS.items():
        assert found[name] == C_TYPES[column.dtype] + "*"
    assert list(found) == [field[0] for field in Cache._fields_]


def test_c_moves_every_column() -> None:
    lines = body(code("pages.c"), "static void move(")
    for name, column in COLUMNS.items():
        copied = (
            rf"cache->{name}\[to\] = cache->{name}\[from\];"
            if column.holds == "one"
            else rf"copy\(cache->{name}, to, from, "
        )
        assert len(re.findall(copied, lines)) == 1, name
    assert lines.count("copy(") + lines.count("[to] =") == len(COLUMNS)


@pytest.mark.parametrize(
    ("file", "name"), [("evict_triton.py", "fill_kernel"), ("store_triton.py", "store_kernel")]
)
def test_kernels_take_the_columns_in_their_order(file: str, name: str) -> None:
    """The launch passes ``*pool.columns()`` where the kernel names them."""
    parameters = [argument.arg for argument in kernel(file, name).args.args]
    first = parameters.index(f"pool_{next(iter(COLUMNS))}")
    assert parameters[first : first + len(COLUMNS)] == [f"pool_{name}" for name in COLUMNS]
    assert sum(parameter.startswith("pool_") for parameter in parameters) == len(COLUMNS)
    tree = ast.parse((BACKENDS / "cuda" / "kernels" / file).read_text())
    launches = [
        node.args
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Subscript)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == name
    ]
    assert len(launches) == 1
    assert ast.unparse(launches[0][first]) == "*pool.columns()"


def test_the_drop_kernel_moves_every_column() -> None:
    source = ast.unparse(kernel("evict_triton.py", "fill_kernel"))
    for name in COLUMNS:
        assert len(re.findall(rf"tl\.load\(pool_{name} \+ at", source)) == 1, name
        assert len(re.findall(rf"tl\.store\(pool_{name} \+ to", source)) == 1, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FORMS)
def test_bytes_and_shapes_are_those_of_the_tensors(name: str, dtype: torch.dtype) -> None:
    form = KVForm.of(name, dtype, 6)
    pool = PagePool(8, 6, 5, dtype, state_size=3, form=form)
    assert pool.page_bytes == sum(column[0].nbytes for column in pool.columns())
    kept = (pool.keys, pool.values, pool.key_scale, pool.value_scale)
    assert pool.kv_page_bytes == sum(column[0].nbytes for column in kept)
    for column, tensor in zip(COLUMNS.values(), pool.columns(), strict=True):
        assert column.dtype in (None, tensor.dtype) and tensor.is_contiguous()
        assert tensor.shape[:2] == (5, 8)
    if form.plain:
        assert pool.keys.dtype == pool.values.dtype == dtype
        assert pool.keys.shape[-1] == pool.values.shape[-1] == 6
        assert pool.key_scale.numel() == pool.value_scale.numel() == 0
    pool.grow(9)
    assert {tensor.shape[0] for tensor in pool.columns()} == {9}


def test_what_is_exported_has_every_column() -> None:
    cache = RaggedCache(PagePool(4, 2, 8), 1, 2)
    seq = cache.open()
    cache.append(torch.tensor([seq]), 3)
    assert list(cache.export(seq)) == ["length", *COLUMNS]
