"""``generate`` under retain: stock transformers where nothing is evicted, an engine elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import mmkv
from mmkv.engine.budgets import page_bound
from mmkv.hf import RetainedCache, retain
from tests.support.factories import checkpoint, pad_left
from tests.support.hf_models import TOKENS, greedy, model_of, prompts_of

NAMES = ["qwen3_vl", "llava", "llava_next", "llava_onevision", "qwen3", "llama", "phi3"]
NAMES += ["qwen2_5_vl", "qwen3_vl_moe", "internvl"]


@pytest.mark.parametrize("name", NAMES)
def test_with_room_for_all_the_tokens_are_those_of_transformers(name: str) -> None:
    model, prompts = model_of(name), prompts_of(name)
    batch = pad_left(prompts)
    alone = [greedy(model, prompt) for prompt in prompts[:1]]
    plain = greedy(model, batch)
    # A token that one row says early: it ends there and is padded, the others go on.
    width = batch["input_ids"].shape[1]
    ends = {"eos_token_id": [int(plain[1, width + 3])], "pad_token_id": 1}
    kept = {"return_dict_in_generate": True, "output_logits": True, "output_scores": True}
    ended = greedy(model, batch, **ends, **kept)
    with retain(model, gates="random", budget=512):
        assert torch.equal(greedy(model, prompts[0]), alone[0])
        assert torch.equal(greedy(model, batch), plain)
        found = greedy(model, batch, **ends, **kept)
    assert torch.equal(found.sequences, ended.sequences)
    assert (found.sequences[1, width + 4 :] == 1).all()
    for step, (ours, theirs) in enumerate(zip(found.logits, ended.logits, strict=True)):
        alive = [
            i
            for i in range(4)
            if ends["eos_token_id"][0] not in ended.sequences[i, width : width + step]
        ]
        torch.testing.assert_close(ours[alive], theirs[alive], rtol=1e-4, atol=1e-4)
        assert torch.equal(ours, found.scores[step])
    assert len(found.scores) == len(ended.scores)


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen2_5_vl", "llava_next", "qwen3_moe", "phi3"])
def test_under_a_budget_each_row_is_a_session_of_an_engine(name: str) -> None:
    options: dict[str, Any] = {"gates": "random", "budget": 5, "prefill_chunk": 16, "page_size": 8}
    engine = mmkv.Engine.from_pretrained(checkpoint(name), dtype="float32", device="cpu", **options)
    prompts = prompts_of(name)
    wanted, kept = [], []
    for prompt in prompts:
        with engine.session() as session:
            token = int(session.prefill(prompt).argmax())
            said = [token]
            for _ in range(TOKENS - 1):
                said.append(int(session.decode(said[-1]).argmax()))
            wanted.append(said)
            kept.append(session.retained())
            assert session.evicted > 4 * session.engine.spec.rows
    model = model_of(name)
    with retain(model, **options) as handle:
        made = greedy(model, pad_left(prompts), return_dict_in_generate=True)
        assert made.sequences[:, -TOKENS:].tolist() == wanted
        for ours, theirs in zip(made.past_key_values.retained(), kept, strict=True):
            for one, two in zip(ours, theirs, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
        memory = handle.memory()
        assert memory.rows == made.past_key_values.memory()
        rows_of_cache = engine.spec.rows
        assert all(row.entries <= 5 * rows_of_cache for row in memory.rows)
        # Pages are held where entries are: at most one per (layer, head) is begun and not full.
        assert all(row.pages <= row.entries // 8 + rows_of_cache for row in memory.rows)
        assert memory.kv_bytes == sum(row.kv_bytes for row in memory.rows) < memory.pool_bytes
        del made
        assert handle.memory().kv_bytes == 0


def test_a_cache_of_its_own_is_not_kept() -> None:
    model, prompt = model_of("llama"), prompts_of("llama")[0]
    with retain(model, policy="streamingllm", budget=8) as handle:
        greedy(model, prompt)
        pool = handle.engine.cache.pool
        assert pool.free_pages == pool.num_pages and handle.memory().rows[0].entries == 16
        held = RetainedCache()
        greedy(model, prompt, past_key_values=held)
        assert handle.memory().kv_bytes > 0
        held.reset()
        assert pool.free_pages == pool.num_pages
        handle.trim()
        assert handle.memory().pool_bytes == 0
    assert handle.memory().pool_bytes == 0


def test_a_long_prompt_stays_within_its_bound() -> None:
    """8,192 and 8,000 tokens: the pool is looked at in every layer of every chunk and step."""
    shape = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 160, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    positions = {"max_position_embeddings": 8400, "bos_token_id": None, "eos_token_id": None}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, **heads, **positions))
    ids = torch.randint(3, 150, (2, 8192), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :192] = 0
    taken: list[int] = []
    with retain(model, gates="random", budget=32, prefill_chunk=512) as handle:
        engine = handle.engine
        pool = engine.cache.pool

        def look(*_: Any, **__: Any) -> Tensor:
            taken.append(pool.num_pages)
            return torch.zeros(2, dtype=torch.bool)

        engine.decoder.on_gate_input = look
        criteria = transformers.StoppingCriteriaList([look])
        inputs = {"input_ids": ids, "attention_mask": mask}
        greedy(model, inputs, stopping_criteria=criteria)
        bound = page_bound(engine, engine.budget, 8192, TOKENS)
        whole = 8192 * engine.spec.rows // pool.page_size
        assert len(taken) >= 2 * 16 * 2 + TOKENS
        assert max(taken) <= 2 * bound.steady + bound.chunk < whole // 4
        assert [row.tokens_seen for row in handle.memory().rows] == [8203, 8011]
        assert all(row.entries == 32 * engine.spec.rows for row in handle.memory().rows)
