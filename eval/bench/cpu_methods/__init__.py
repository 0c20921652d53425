"""The methods that ``python -m eval.bench_peers_cpu`` compares.

At their top these modules import nothing but Python's own: a peer may need another interpreter, and
the runtime of another checkout may be measured.
"""

from __future__ import annotations

from mmkv.eval.bench.cpu_methods.base import Method
from mmkv.eval.bench.cpu_methods.hugging_face import Kvpress, Transformers
from mmkv.eval.bench.cpu_methods.llama_cpp import LlamaCpp
from mmkv.eval.bench.cpu_methods.mmkv_runtime import Mmkv, MmkvBudget

METHODS: dict[str, type[Method]] = {
    "mmkv full": Mmkv,
    "mmkv budget": MmkvBudget,
    "transformers": Transformers,
    "kvpress": Kvpress,
    "llama.cpp": LlamaCpp,
}
