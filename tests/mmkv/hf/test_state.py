"""After the context everything is as before, however it ended; nothing global changes."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.generation import GenerationMixin

from mmkv import MmkvError
from mmkv.hf import retain
from tests.support.factories import CHECKPOINTS, make_model, pad_left
from tests.support.hf_models import greedy, model_of, prompts_of, registered


def attributes(model: Any) -> dict[str, set[str]]:
    return {name: set(vars(module)) for name, module in model.named_modules()}


def own_memory(model: Any) -> bool:
    """Whether no parameter is a view of a larger tensor."""
    return all(p.untyped_storage().nbytes() == p.nbytes for p in model.parameters())


def stop(kind: type[BaseException]) -> Any:
    def criterion(ids: Tensor, scores: Any, **_: Any) -> Tensor:
        raise kind

    return transformers.StoppingCriteriaList([criterion])


@pytest.mark.parametrize("end", [None, ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("name", ["qwen3_vl", "phi3"])
def test_the_model_is_put_back(name: str, end: type[BaseException] | None, tmp_path: Path) -> None:
    model, inputs = make_model(CHECKPOINTS[name]), pad_left(prompts_of(name))
    before = copy.deepcopy(model.state_dict())
    plain = greedy(model, inputs)
    wanted = attributes(model)
    method, tables = GenerationMixin.generate, registered()
    identity = {key: id(value) for key, value in model.named_parameters()}

    def check() -> None:
        state = model.state_dict()
        assert state.keys() == before.keys()
        assert all(torch.equal(state[key], before[key]) for key in before)
        assert {key: id(value) for key, value in model.named_parameters()} == identity

    def work() -> None:
        with retain(model, gates="random", budget=6) as handle:
            check()
            model.save_pretrained(tmp_path)
            saved = type(model).from_pretrained(tmp_path).state_dict()
            assert all(torch.equal(saved[key], before[key]) for key in before)
            pool = handle.engine.cache.pool
            if end is not None:
                try:
                    greedy(model, inputs, stopping_criteria=stop(end))
                finally:
                    assert pool.free_pages == pool.num_pages > 0
            assert not torch.equal(greedy(model, inputs), plain)

    if end is None:
        work()
    else:
        with pytest.raises(end):
            work()
    check()
    assert attributes(model) == wanted and own_memory(model)
    assert torch.equal(greedy(model, inputs), plain)
    assert GenerationMixin.generate is method and registered() == tables


def test_a_model_that_cannot_be_retained_is_as_it_was() -> None:
    model = make_model(CHECKPOINTS["llama"])
    wanted = attributes(model)
    for options in ({"policy": "dbtrimkv"}, {"policy": "nothing"}, {"budget": 0.01}):
        with pytest.raises(MmkvError):
            retain(model, **options)
        assert attributes(model) == wanted and own_memory(model)


def test_two_models_in_two_threads() -> None:
    names, said = ["llama", "qwen3"], {}
    models = {name: make_model(CHECKPOINTS[name]) for name in names}
    options: dict[str, Any] = {"policy": "streamingllm", "budget": 8}
    wanted = {}
    for name in names:
        with retain(models[name], **options):
            wanted[name] = greedy(models[name], prompts_of(name)[0], max_new_tokens=24)

    def work(name: str) -> None:
        with retain(models[name], **options):
            meet.wait()
            said[name] = [
                greedy(models[name], prompts_of(name)[0], max_new_tokens=24) for _ in range(3)
            ]

    meet = threading.Barrier(2)
    threads = [threading.Thread(target=work, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name in names:
        assert all(torch.equal(made, wanted[name]) for made in said[name])


def test_threads_share_a_retained_model() -> None:
    model, prompts = model_of("llama"), prompts_of("llama")
    said: dict[int, Tensor] = {}
    with retain(model, policy="streamingllm", budget=8):
        wanted = [greedy(model, prompt) for prompt in prompts]

        def work(i: int) -> None:
            said[i] = greedy(model, prompts[i])

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(torch.equal(said[i], wanted[i]) for i in range(4))


def test_a_model_that_was_merged_by_hand() -> None:
    """As PEFT merges a LoRA: the matrices change in place, also while the model is retained."""
    model = make_model(CHECKPOINTS["qwen3_vl"])
    inputs = prompts_of("qwen3_vl")[0]
    before = greedy(model, inputs)
    generator = torch.Generator().manual_seed(0)
    with retain(model, policy="full") as handle:
        assert torch.equal(greedy(model, inputs), before)
        handle.engine.backends.cpu.switch_off()  # C may hold copies of projections
        with torch.no_grad():
            for layer in model.model.language_model.layers:
                for part in (layer.self_attn.q_proj, layer.self_attn.v_proj, layer.mlp.up_proj):
                    down = torch.randn(4, part.in_features, generator=generator)
                    up = torch.randn(part.out_features, 4, generator=generator)
                    part.weight.data += 0.02 * up @ down
        during = greedy(model, inputs)
    merged = greedy(model, inputs)
    assert torch.equal(during, merged) and not torch.equal(merged, before)
    with retain(model, policy="full"):
        assert torch.equal(greedy(model, inputs), merged)
