"""What Triton's compiler makes of the kernels: registers, spills, shared memory, per architecture.

``python -m benchmarks.bench.kernel_code`` compiles every kernel in the sizes of an 8B model (and
the largest that a policy may ask for) for every architecture that PyTorch's wheels support, and
adds the figures of the installed Triton to ``benchmarks/results/kernel-code.json``, beside those of
other versions. It needs no GPU: the compiler and ptxas are in Triton's wheel. Other versions: ``pip
install --target DIR --no-deps triton==3.7.1``, then ``PYTHONPATH=DIR python -m ...``.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.bench.harness import table
from mmkv.training.measure.record import RESULTS

# Bytes of shared memory that a program may take: CUDA C++ Programming Guide, technical
# specifications per compute capability, less the 1 KiB that the system keeps.
SHARED_LIMITS = {
    80: 166_912,
    86: 101_376,
    89: 101_376,
    90: 232_448,
    100: 232_448,
    120: 101_376,
}


@dataclass(frozen=True)
class CompiledCase:
    """A kernel in one size.

    Attributes:
        types: Triton types of the arguments that are not constants, in any order.
        constants: values of the constexpr arguments.
        aligned: pointers and strides are divisible by 16.
        fuses: products and sums may be rounded once.
    """

    name: str
    module: str
    kernel: str
    types: dict[str, str]
    constants: dict[str, Any]
    num_warps: int
    num_stages: int = 3
    aligned: bool = field(default=True)
    fuses: bool = True


@dataclass(frozen=True)
class Code:
    """What ptxas says of a kernel: registers a thread, bytes spilled and of shared memory."""

    registers: int
    spills: int
    shared: int
    ptx: str


def compile_kernel(case: CompiledCase, arch: int, folder: Path) -> Code:
    """Compile for an architecture, as the launcher would; files of it go to ``folder``."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(case.module), case.kernel)
    signature = {name: case.types.get(name, "constexpr") for name in kernel.arg_names}
    attributes = {
        (index,): [["tt.divisibility", 16]]
        for index, kind in enumerate(signature.values())
        if case.aligned and (kind.startswith("*") or kind == "i32")
    }
    constants = {name: case.constants[name] for name, k in signature.items() if k == "constexpr"}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    options = {
        "num_warps": case.num_warps,
        "num_stages": case.num_stages,
        "enable_fp_fusion": case.fuses,
    }
    built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    target = folder / "kernel.ptx"
    target.write_text(built.asm["ptx"])
    name = f"sm_{arch}a" if arch >= 90 else f"sm_{arch}"
    command = [get_ptxas(arch).path, "-v", f"-arch={name}", target, "-o", f"{target}.cubin"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return Code(
        max(int(n) for n in re.findall(r"Used (\d+) registers", printed)),
        sum(int(n) for n in re.findall(r"(\d+) bytes spill", printed)),
        built.metadata.shared,
        built.asm["ptx"],
    )


_KINDS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
_CODES, _SCALES = {8: "*i8", 4: "*u8"}, {8: "*fp16", 4: "*fp16"}


def _stored(dtype: torch.dtype, bits: tuple[int, int]) -> dict[str, str]:
    """Return the types of keys, values and their scales with codes of so many bits, 0: none."""
    names = (("keys", "key_scale"), ("values", "value_scale"))
    kind, types = _KINDS[dtype], dict[str, str]()
    for (codes, scale), width in zip(names, bits, strict=True):
        types |= {codes: _CODES.get(width, kind), scale: _SCALES.get(width, kind)}
    return types


def decode(
    group: int,
    tile: int = 32,
    head_dim: int = 128,
    bits: tuple[int, int] = (0, 0),
    dtype: torch.dtype = torch.bfloat16,
    window: int = 0,
    gap: int = 0,
) -> CompiledCase:
    """One query for each of ``group`` heads a KV head, which sees ``window`` tokens, or all.

    ``gap``: numbers between one key and the next.
    """
    from mmkv.engine.backends.cuda.kernels import decode_attention_triton as ours

    types = dict.fromkeys(("query", "out"), _KINDS[dtype]) | _stored(dtype, bits)
    types |= dict.fromkeys(("partial", "peaks", "totals", "lse"), "*fp32")
    types |= dict.fromkeys(("rows", "runs", "arrived", "position"), "*i32")
    types |= dict.fromkeys(("table", "now"), "*i64")
    types |= dict.fromkeys(("query_batch", "query_head", "width"), "i32") | {"scale": "fp32"}
    padded = max(16, 1 << (group - 1).bit_length())
    constants: dict[str, Any] = {"HEADS": 8, "G": group, "GROUP": 1 << (group - 1).bit_length()}
    constants |= {"PADDED": padded, "D": head_dim, "BLOCK_D": head_dim, "P": 16, "TILE": tile}
    constants |= {"KEY_BITS": bits[0], "VALUE_BITS": bits[1], "WRITE_LSE": True}
    constants |= {"WINDOW": window, "STRIDE": head_dim + gap}
    seen = f", {window} tokens" if window else ""
    name = f"decode, {group} heads of {head_dim}{_form(bits)}{seen}, {_short(dtype)}"
    return CompiledCase(
        name, ours.__name__, "decode_kernel", types, constants, ours.WARPS, ours.STAGES
    )


def prefill(
    queries: int,
    bits: tuple[int, int] = (0, 0),
    dtype: torch.dtype = torch.bfloat16,
    gap: int = 0,
) -> CompiledCase:
    """A chunk's ``queries`` of a KV head (tokens x heads), head_dim 128; see :func:`decode`."""
    from mmkv.engine.backends.cuda.kernels import prefill_attention_triton as ours

    block, tile, warps = ours.blocks(dtype, 128, queries)
    types = dict.fromkeys(("query", "out"), _KINDS[dtype]) | {"lse": "*fp32"}
    types |= _stored(dtype, bits)
    types |= {"length": "*i64", "table": "*i64", "count": "i32", "scale": "fp32"}
    strides = ("query_head", "query_token", "out_head", "out_token", "length_head", "table_head")
    types |= dict.fromkeys(strides, "i32")
    constants = {"G": 4, "D": 128, "BLOCK_D": 128, "P": 16, "BLOCK": block, "TILE": tile}
    constants |= {"KEY_BITS": bits[0], "VALUE_BITS": bits[1], "STRIDE": 128 + gap}
    name = f"prefill, {queries} queries{_form(bits)}, {_short(dtype)}"
    stages = ours.stages(dtype)
    return CompiledCase(name, ours.__name__, "prefill_kernel", types, constants, warps, stages)


def write_gated(group: int, head_dim: int, dtype: torch.dtype) -> CompiledCase:
    """A chunk of a prompt under write gates, ``group`` heads a KV head."""
    from mmkv.engine.backends.cuda.kernels import write_gated_attention_triton as ours

    types = dict.fromkeys(("query", "keys", "values", "out"), _KINDS[dtype])
    types |= {"slots": "*i64", "position": "*i64", "places": "*i32", "scale": "fp32"}
    types |= dict.fromkeys(("far", "begin", "end", "computed"), "*i32")
    strides = [f"{of}_{what}" for of in ("query", "out") for what in ("head", "group", "token")]
    types |= dict.fromkeys(("count", "entries", "window", *strides), "i32")
    constants = ours.sizes(group, head_dim, dtype)
    warps = constants.pop("num_warps")
    name = f"write-gated prefill, {group} heads of {head_dim}, {_short(dtype)}"
    stages = ours.stages(dtype)
    return CompiledCase(name, ours.__name__, "write_gated_kernel", types, constants, warps, stages)


def store(group: int) -> CompiledCase:
    """A new entry of heads of 128 with q/k norm."""
    from mmkv.engine.backends.cuda.kernels import store_triton as ours

    half = ("qkv", "cos", "sin", "gain", "pool_keys", "pool_values", "query")
    types = dict.fromkeys(half, "*bf16")
    types |= dict.fromkeys(("slots", "position"), "*i64")
    types |= dict.fromkeys(("pool_log_beta", "pool_state"), "*fp32")
    types |= dict.fromkeys(("pool_key_scale", "pool_value_scale"), "*fp16")
    types |= {"pool_position": "*i32", "pool_modality": "*u8", "eps": "fp32"}
    types |= dict.fromkeys(("qkv_row", "slots_row"), "i32")
    constants: dict[str, Any] = ours.sizes(group, 128)
    warps = constants.pop("num_warps")
    constants |= {
        "HEADS": 32 // group,
        "GROUP": group,
        "DIM": 128,
        "ROT": 128,
        "NORM": True,
        "APART": False,
    }
    constants |= {"STATE": 0, "BESIDE": False}
    return CompiledCase(
        f"store, {group} heads", ours.__name__, "store_kernel", types, constants, warps
    )


def product(bits: int, tokens: int, dtype: torch.dtype = torch.bfloat16) -> CompiledCase:
    """States by a matrix [4096, 4096] in 8 or 4 bits, or by bfloat16 rows with 16."""
    from mmkv.engine.backends.cuda.kernels import product_triton as ours

    types = {"out": _KINDS[dtype], "bias": _KINDS[dtype], "tokens": "i32"}
    constants: dict[str, Any] = ours.sizes(tokens) | {"ROWS": 4096, "BIASED": True}
    warps, whole = constants.pop("num_warps"), bits < 16
    if whole:
        types |= {"codes": "*i8", "steps": "*fp32", "scales": "*bf16"}
        types |= {"weight": {8: "*i8", 4: "*u8"}[bits]}
        constants |= {"BLOCKS": 128, "BITS": bits}
    else:
        types, constants = types | {"x": "*bf16", "weight": "*bf16"}, constants | {"WIDTH": 4096}
    kernel = "integer_kernel" if whole else "bf16_kernel"
    name = f"product in {bits} bits, {tokens} tokens, {_short(dtype)}"
    return CompiledCase(name, ours.__name__, kernel, types, constants, warps, fuses=not whole)


def window(kernel: str, queries: int, dtype: torch.dtype, head_dim: int = 128) -> CompiledCase:
    """Scores by the last 64 queries of each head (or 16), G heads a KV head: ``queries`` rows."""
    from mmkv.engine.backends.cuda.kernels import window_scores_triton as ours

    types = {"query": _KINDS[dtype], "keys": _KINDS[dtype], "position": "*i32"}
    types |= dict.fromkeys(("query_position", "length", "table", "seqs"), "*i64")
    types |= {"partial": "*fp32", "out": "*fp32", "scale": "fp32"}
    constants: dict[str, Any] = ours.sizes(queries, head_dim, dtype)
    warps = constants.pop("num_warps")
    constants |= {"ROWS": 288, "QUERIES": queries, "WINDOW": 16 if queries <= 128 else 64}
    constants |= {"DIM": head_dim, "PAGE": 16, "PAGES": 64, "SPLITS": 4}
    name = f"window {kernel}, {queries} queries, {_short(dtype)}"
    return CompiledCase(name, ours.__name__, f"{kernel}_kernel", types, constants, warps)


def _form(bits: tuple[int, int]) -> str:
    return "" if bits == (0, 0) else f", codes of {bits[0]} and {bits[1]} bits"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def cases() -> list[CompiledCase]:
    """Return what the table holds: the kernels that need most, in the sizes of 8B models."""
    whole = torch.float32
    return [
        *(decode(group) for group in (1, 4, 20)),
        *(decode(4, bits=bits) for bits in ((8, 8), (4, 4))),
        decode(4, 16, dtype=whole),
        *(prefill(queries) for queries in (64, 2048)),
        *(prefill(queries, (4, 4)) for queries in (64, 2048)),
        prefill(2048, dtype=whole),
        *(store(group) for group in (4, 8)),
        *(product(bits, tokens) for bits in (8, 4) for tokens in (1, 64, 2048)),
        product(16, 2048, whole),
        *(
            window(kernel, queries, dtype)
            for kernel in ("lse", "probability")
            for queries, dtype in ((64, torch.bfloat16), (448, torch.bfloat16), (448, whole))
        ),
    ]


def measured(architectures: Iterable[int]) -> list[dict[str, Any]]:
    """Compile all cases; a row for each case and architecture."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for case in cases():
            for arch in architectures:
                code = compile_kernel(case, arch, Path(folder))
                numbers = {name: getattr(code, name) for name in ("registers", "spills", "shared")}
                fits = code.shared <= SHARED_LIMITS[arch]
                rows.append({"kernel": case.name, "arch": arch, **numbers, "fits": fits})
                print(f"{case.name}, sm_{arch}: {numbers}{'' if fits else ' TOO MUCH'}", flush=True)
    return rows


def main() -> None:
    """Run the command of the module docstring."""
    import triton

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", type=int, nargs="+", default=list(SHARED_LIMITS))
    parser.add_argument("--out", type=Path, default=RESULTS / "kernel-code.json")
    args = parser.parse_args()
    known = json.loads(args.out.read_text()) if args.out.exists() else {}
    known |= {
        "command": "python -m benchmarks.bench.kernel_code",
        "shared_limits": {f"sm_{arch}": limit for arch, limit in SHARED_LIMITS.items()},
    }
    known.setdefault("triton", {})[triton.__version__] = measured(args.arch)
    args.out.write_text(json.dumps(known, indent=1) + "\n")
    table("kernels", *worst(known))


def worst(found: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return columns and rows: for each Triton and card the most that a kernel takes."""
    columns = ["Triton", "card", "kernels", "fit", "spill", "registers", "spilled B", "shared B"]
    rows = []
    for version, measurements in sorted(found["triton"].items()):
        for arch in sorted({row["arch"] for row in measurements}):
            mine = [row for row in measurements if row["arch"] == arch]
            counts = [
                len(mine),
                *(sum(map(bool, (r[n] for r in mine))) for n in ("fits", "spills")),
            ]
            most = [max(row[name] for row in mine) for name in ("registers", "spills", "shared")]
            rows.append([version, f"sm_{arch}", *(f"{n:,}" for n in (*counts, *most))])
    return columns, rows


if __name__ == "__main__":
    main()
