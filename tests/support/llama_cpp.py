"""Answer for llama.cpp, in an interpreter that has ``xllamacpp``: a line of JSON in, one out.

In: a file and token ids. Out: the logarithms of the next token's probabilities, by id.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from typing import Any


def answer(model: str, tokens: list[int], vocabulary: int) -> list[float]:
    """Return what llama.cpp makes of a file."""
    llama: Any = import_module("xllamacpp")
    params = llama.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel = model, len(tokens) + 8, 1
    params.warmup = params.fit_params = params.ui = False
    params.n_gpu_layers, params.cpuparams.n_threads = 0, 1
    params.cache_type_k = params.cache_type_v = llama.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = llama.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    asked = {"prompt": tokens, "max_tokens": 1, "logprobs": vocabulary, "temperature": 0.0}
    made = llama.Server(params).handle_completions(asked)
    found = made["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    by_id = {one["id"]: one["logprob"] for one in found}
    return [by_id.get(number, float("-inf")) for number in range(vocabulary)]


def main() -> None:
    """Answer until nothing more comes. The library writes to the standard output, too."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            made: dict[str, Any] = {"logs": answer(**json.loads(line))}
        except Exception as error:
            made = {"refused": str(error)[:300]}
        print(json.dumps(made), file=out, flush=True)


if __name__ == "__main__":
    main()
