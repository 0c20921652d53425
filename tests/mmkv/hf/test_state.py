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
from mmkv.engine.errors import InputError
from mmkv.hf import RetainedCache, retain
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
    with retain(model, policy="full"):
        assert torch.equal(greedy(model, inputs), before)
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


CHANGES: dict[str, Any] = {
    "load_state_dict": lambda model: model.load_state_dict(drawn(model, 1)),
    "assign": lambda model: model.load_state_dict(drawn(model, 1), assign=True),
    "in place": lambda model: written(model),
    "data": lambda model: every(model, lambda p: p.data.mul_(1.5)),
    "new data": lambda model: every(model, lambda p: setattr(p, "data", p.data * 1.5)),
    "bfloat16": lambda model: model.to(torch.bfloat16),
    "half and back": lambda model: model.half().float(),
    "another head": lambda model: model.set_output_embeddings(another_head(model)),
    "an optimizer's step": lambda model: trained(model),
}


def drawn(model: Any, seed: int) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(seed)
    return {
        name: 0.3 * torch.randn(part.shape, generator=source).to(part)
        for name, part in model.state_dict().items()
    }


@torch.no_grad()
def written(model: Any) -> None:
    model.model.layers[0].self_attn.k_proj.weight[:, 3] += 2.0


@torch.no_grad()
def every(model: Any, change: Any) -> None:
    for part in model.parameters():
        change(part)


def another_head(model: Any) -> Any:
    head = model.get_output_embeddings()
    made = torch.nn.Linear(head.in_features, head.out_features, bias=False)
    made.weight.data = head.weight.data.flip(0).clone()
    return made


def trained(model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=10.0)
    ids = torch.arange(4, 20)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    model.zero_grad()


def plainly(model: Any, inputs: Any) -> Tensor:
    """What transformers says, whatever has been put in place of ``generate``."""
    return type(model).generate(model, **inputs, max_new_tokens=12, do_sample=False)


@pytest.mark.parametrize("change", sorted(CHANGES))
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_weights_that_change_meanwhile_are_followed(name: str, change: str) -> None:
    """Equal to the model itself, before and after, and no memory of the old weights goes on."""
    model, inputs = make_model(CHECKPOINTS[name]), prompts_of(name)[0]
    held = RetainedCache()
    with retain(model, policy="full"):
        said = model.generate(**inputs, max_new_tokens=12, do_sample=False, past_key_values=held)
        assert torch.equal(said, plainly(model, inputs))
        CHANGES[change](model)
        wanted = plainly(model, inputs)
        for _ in range(2):
            made = model.generate(**inputs, max_new_tokens=12, do_sample=False)
            assert torch.equal(made, wanted)
        if change != "half and back":
            with pytest.raises(InputError, match="before weights were changed"):
                model.generate(said, max_new_tokens=2, past_key_values=held)
    assert torch.equal(plainly(model, inputs), wanted)
    assert "generate" not in vars(model)


def test_parts_that_cannot_be_retained_are_refused_meanwhile() -> None:
    """As PEFT puts an adapter around a matrix: refused until it is merged."""

    class Adapted(torch.nn.Module):
        def __init__(self, base: Any) -> None:
            super().__init__()
            self.base = base

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) * 2

    model, inputs = make_model(CHECKPOINTS["llama"]), prompts_of("llama")[0]
    attention = model.model.layers[0].self_attn
    with retain(model, policy="full"):
        before, plain = attention.q_proj, greedy(model, inputs)
        attention.q_proj = Adapted(before)
        for _ in range(2):
            with pytest.raises(MmkvError, match="merge adapters"):
                greedy(model, inputs)
        attention.q_proj = before
        assert torch.equal(greedy(model, inputs), plain)


def test_a_deep_copy_is_a_model_of_its_own() -> None:
    model, inputs = make_model(CHECKPOINTS["llama"]), prompts_of("llama")[0]
    with retain(model, policy="streamingllm", budget=4):
        twin, apart = copy.deepcopy(model), copy.deepcopy([model])[0]
        for each in (twin, apart):
            every(each, lambda p: p.mul_(1.5))
            assert torch.equal(greedy(each, inputs), plainly(each, inputs))
        again = copy.deepcopy(twin)
        every(again, lambda p: p.mul_(0.5))
        assert torch.equal(greedy(again, inputs), plainly(again, inputs))
        with retain(twin, policy="full"):
            assert torch.equal(greedy(twin, inputs), plainly(twin, inputs))
        assert "generate" not in vars(twin)
        with pytest.raises(InputError, match=r"generate\.handle\.close"):
            retain(model, policy="full")
        model.generate.handle.close()
        assert "generate" not in vars(model)
