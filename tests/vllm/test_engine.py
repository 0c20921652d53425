"""mmkv inside vLLM itself, beside mmkv's own engine: ``make test-vllm``.

vLLM and the engine read the same checkpoint in float32 with chunks of the same length; the engine
is then fed the tokens that vLLM chose.
"""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

import mmkv
from mmkv.engine.cache import Entries
from mmkv.engine.runtime import Runtime
from mmkv.resources import asset, bundled_model
from mmkv.vllm.rows import HeldRequest, WorkerRows
from tests.support.model_configs import TEXT_IDS, Checkpoint
from tests.support.sessions import save_checkpoint
from tests.vllm import reads_pictures

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_HOST_IP="127.0.0.1",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
)
vllm = pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

CHUNK, PAGE, LONGEST = 24, 8, 512
POLICIES = ["dbtrimkv", "trimkv", "streamingllm", "knorm", "keydiff", "lagkv", "snapkv:window=8"]


def start(folder: Path | str, mmkv: dict[str, Any] | None, **options: Any) -> Any:
    """Return vLLM with a model, and mmkv's settings if there are any."""
    given: dict[str, Any] = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": LONGEST,
        "block_size": PAGE,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 512,
        "long_prefill_token_threshold": CHUNK,
        "skip_tokenizer_init": True,
        "max_logprobs": -1,
        "logprobs_mode": "raw_logits",
        "additional_config": {} if mmkv is None else {"mmkv": mmkv},
    }
    return vllm.LLM(model=str(folder), **(given | options))


def stop(llm: Any) -> None:
    """Let go of vLLM, so that the next one has its ranks and its memory."""
    from vllm.distributed import cleanup_dist_env_and_memory

    llm.llm_engine.engine_core.shutdown()
    del llm
    cleanup_dist_env_and_memory()
    gc.collect()


def rows_of_vllm() -> WorkerRows:
    """Return the rows of the one engine that runs."""
    found = [x for x in gc.get_objects() if type(x) is WorkerRows]
    assert len(found) == 1
    return found[0]


def manager_of(llm: Any) -> Any:
    """Return what gives blocks to requests."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    (manager,) = scheduler.kv_cache_manager.coordinator.single_type_managers
    return manager


def answers(llm: Any, prompts: Sequence[list[int]], steps: int) -> list[tuple[list[int], Tensor]]:
    """Return for each prompt the likeliest tokens and the logits ``[steps, vocab]``."""
    # No token twice: in the first layer its keys would have equal norms, but for the last bit.
    settings = vllm.SamplingParams(
        max_tokens=steps,
        temperature=0,
        repetition_penalty=1000,
        ignore_eos=True,
        detokenize=False,
        logprobs=-1,
    )
    made = []
    for reply in llm.generate([{"prompt_token_ids": ids} for ids in prompts], settings):
        one = reply.outputs[0]
        logits = torch.tensor(
            [[step[token].logprob for token in sorted(step)] for step in one.logprobs]
        )
        made.append((list(one.token_ids), logits))
    return made


def kept(rows: WorkerRows, held: HeldRequest) -> list[list[int]]:
    """Return the token indices in each row, sorted."""
    entries: Entries = rows.cache.entries(held.seq)
    position = rows.cache.pool.position.flatten()[entries.slot]
    return [sorted(position[entries.row == row].tolist()) for row in range(rows.spec.rows)]


def kept_by_engine(session: Any) -> list[list[int]]:
    view = session.view()
    return [sorted(view.position[view.row == row].tolist()) for row in range(view.rows)]


def prompts_of(lengths: Sequence[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [(3 + torch.randperm(TEXT_IDS - 3, generator=generator))[:n].tolist() for n in lengths]


def engine_beside(folder: Path | str, settings: dict[str, Any]) -> Runtime:
    return Runtime.from_pretrained(
        folder, dtype="float32", prefill_chunk=CHUNK, page_size=PAGE, **settings
    )


def same_logits(engine: Runtime, prompt: list[int], answer: tuple[list[int], Tensor]) -> Any:
    """Compare logits, by 1e-4 of the largest; return the engine's session."""
    session, (tokens, logits) = engine.session(), answer
    ids = torch.tensor([prompt])
    turn = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    ours = [session.prefill(turn).flatten(), *(session.decode(token) for token in tokens[:-1])]
    expected = torch.stack(ours)
    assert (expected - logits).abs().max() <= 1e-4 * expected.abs().max()
    return session


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    names = "qwen3", "llama", "qwen3_moe"
    folder = tmp_path_factory.mktemp("models")
    return {
        name: save_checkpoint(Checkpoint(name, 4, 2, 32, layers=3), folder / name) for name in names
    }


@pytest.mark.parametrize(
    ("name", "policy"),
    [*product(["qwen3", "llama"], POLICIES), ("qwen3_moe", "dbtrimkv")],
)
def test_requests_keep_what_the_engine_keeps(
    name: str, policy: str, models: dict[str, Path]
) -> None:
    settings: dict[str, Any] = {"policy": policy, "gates": "random", "budget": 20}
    llm = start(models[name], settings)
    try:
        prompts = prompts_of([40, 7, 75, 61, 98])
        made = answers(llm, prompts, 30)
        engine, rows = engine_beside(models[name], settings), rows_of_vllm()
        for prompt, answer, held in zip(prompts, made, rows.requests, strict=True):
            session = same_logits(engine, prompt, answer)
            assert kept(rows, held) == kept_by_engine(session)
            assert session.seen == held.seen
            session.close()
    finally:
        stop(llm)


def test_a_budget_that_drops_nothing_changes_nothing(models: dict[str, Path]) -> None:
    prompts, made = prompts_of([40, 75, 98]), []
    for settings in (None, {"policy": "dbtrimkv", "gates": "random", "budget": 4096}):
        llm = start(models["qwen3"], settings, block_size=32)
        try:
            made.append(answers(llm, prompts, 30))
        finally:
            stop(llm)
    for (plain, logits), (bounded, ours) in zip(*made, strict=True):
        assert plain == bounded
        assert (logits - ours).abs().max() <= 1e-4 * logits.abs().max()


def test_many_long_requests_share_a_pool_for_two(tmp_path: Path) -> None:
    model = Checkpoint("qwen3", 4, 2, 32, layers=3, text={"max_position_embeddings": 4200})
    folder = save_checkpoint(model, tmp_path)
    bound, reserve = 5, 128  # blocks of 16: 64 entries and nearly empty last pages; 2,048 tokens
    llm = start(
        folder,
        {"policy": "streamingllm", "budget": 64},
        max_model_len=4200,
        block_size=16,
        max_num_seqs=32,
        max_num_batched_tokens=2048,
        long_prefill_token_threshold=64,
        num_gpu_blocks_override=2 * 4200 // 16 + 1,
    )
    try:
        manager = manager_of(llm)
        most: dict[str, int] = {}
        at_once = 0
        given = manager.allocate_new_blocks

        def counted(request_id: str, *args: Any) -> Any:
            nonlocal at_once
            made = given(request_id, *args)
            most[request_id] = max(most.get(request_id, 0), len(manager.req_to_blocks[request_id]))
            at_once = max(at_once, sum(map(bool, manager.req_to_blocks.values())))
            return made

        manager.allocate_new_blocks = counted
        generator = torch.Generator().manual_seed(1)
        prompts = [
            torch.randint(3, TEXT_IDS, (4000,), generator=generator).tolist() for _ in range(32)
        ]
        answers(llm, prompts, 8)
        assert len(most) == at_once == 32
        assert max(most.values()) == bound == manager.kv_cache_spec.blocks(4000)
        assert manager.block_pool.get_num_free_blocks() == 2 * 4200 // 16 - reserve
        rows = rows_of_vllm()
        used = rows.cache.pool.num_pages - rows.cache.pool.free_pages - rows.spec.rows
        assert used == sum(rows.cache.held_pages(held.seq) for held in rows.requests)
    finally:
        stop(llm)


def test_requests_come_and_go_without_losing_a_block(models: dict[str, Path]) -> None:
    settings = {"policy": "dbtrimkv", "gates": "random", "budget": 20}
    prompts = prompts_of([5 + 37 * number % 130 for number in range(200)])
    engine = engine_beside(models["qwen3"], settings)
    for blocks in (8, 40):  # too few for the eight that run: some are computed again; and enough
        llm = start(models["qwen3"], settings, num_gpu_blocks_override=64 + blocks + 1)
        try:
            made = answers(llm, prompts, 6)
            assert [len(tokens) for tokens, _ in made] == [6] * 200
            assert manager_of(llm).block_pool.get_num_free_blocks() == blocks
        finally:
            stop(llm)
        # What was computed again has read its reply in chunks, and may answer otherwise.
        if blocks == 40:
            for prompt, answer in zip(prompts, made, strict=True):
                same_logits(engine, prompt, answer).close()


def kept_here(worker: Any) -> list[list[int]]:
    """Return what a worker process keeps of the only request; runs there."""
    rows = rows_of_vllm()
    return kept(rows, rows.requests[0])


@pytest.mark.parametrize("policy", ["dbtrimkv", "snapkv:window=8"])
def test_two_ranks_keep_what_one_keeps(
    policy: str, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # for kept_here alone
    settings = {"policy": policy, "gates": "random", "budget": 20}
    (prompt,) = prompts_of([75])
    llm = start(models["qwen3"], settings, tensor_parallel_size=2, max_num_batched_tokens=CHUNK)
    try:
        (answer,) = answers(llm, [prompt], 20)
        parts = llm.collective_rpc(kept_here)
    finally:
        stop(llm)
    session = same_logits(engine_beside(models["qwen3"], settings), prompt, answer)
    by_layer = zip(*(zip(part, strict=True) for part in parts), strict=True)  # a head on each rank
    assert [row for layer in by_layer for (row,) in layer] == kept_by_engine(session)


@reads_pictures
def test_pictures_are_read_under_a_budget() -> None:
    """The bundled model, whose own gates are found; M-RoPE and deepstack are vLLM's."""
    folder, budget, chunk = bundled_model(), 12, 16
    llm = start(
        folder,
        {"budget": budget},
        skip_tokenizer_init=False,
        max_num_seqs=4,
        max_num_batched_tokens=chunk,
        long_prefill_token_threshold=0,
    )
    session = mmkv.Engine.from_pretrained(
        folder, budget=budget, dtype="float32", prefill_chunk=chunk, page_size=PAGE
    ).session()
    scene, question = asset("scene.png"), "what is at row 2, column 3?"
    try:
        with Image.open(scene) as file:
            picture = file.convert("RGB")
        content = [
            {"type": "image_pil", "image_pil": picture},
            {"type": "text", "text": question},
        ]
        settings = vllm.SamplingParams(max_tokens=12, temperature=0)
        (reply,) = llm.chat([{"role": "user", "content": content}], settings)
        greedy = mmkv.Sampling(temperature=0, max_new_tokens=12)
        ours = "".join(session.send(question, images=[picture], sampling=greedy))
        assert reply.outputs[0].text == ours
        rows = rows_of_vllm()
        held = rows.requests[-1]
        assert held.seen == session.seen > budget
        assert kept(rows, held) == kept_by_engine(session)
    finally:
        stop(llm)


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        ({"policy": "dbtrimkv"}, {}, "needs retention gates"),
        (
            {"policy": "dbtrimkv", "gates": "random"},
            {"enforce_eager": False},
            "give --enforce-eager",
        ),
    ],
    ids=str,
)
def test_a_setting_that_cannot_be_ends_at_start_in_one_line(
    settings: dict[str, Any], options: dict[str, Any], message: str, models: dict[str, Path]
) -> None:
    with pytest.raises(Exception, match=re.escape(message)) as error:
        start(models["qwen3"], settings, **options)
    assert "\n" not in str(error.value)


def test_a_backend_that_ignores_the_settings_is_refused(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    from mmkv.vllm.backend import BoundedBackend

    monkeypatch.setattr(BoundedBackend, "get_impl_cls", CPUAttentionBackend.get_impl_cls)
    with pytest.raises(Exception, match=r"vLLM has chosen CPU_ATTN, .* --attention-backend CUSTOM"):
        start(models["qwen3"], {"policy": "knorm"})


def test_the_seams_are_where_they_were() -> None:
    """Name what of vLLM has moved, before anything else fails."""
    from vllm.v1.attention.backend import AttentionBackend, CommonAttentionMetadata
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheLayout
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    assert callable(AttentionBackend.customize_spec)  # temporary by its docstring: vllm#42449
    assert {"CUSTOM", "CPU_ATTN"} <= set(AttentionBackendEnum.__members__)
    assert "BLHNC" in KVCacheLayout.__members__
    assert callable(KVCacheSpecRegistry.register)
    for name in ("get_num_blocks_to_allocate", "allocate_new_blocks", "cache_blocks"):
        assert callable(getattr(FullAttentionManager, name))
    fields = set(FullAttentionSpec.__dataclass_fields__)
    assert {"state_content_bytes", "head_size", "block_size"} <= fields
    for name in ("uses_slot_mapping", "prefix_cacheable", "max_num_blocks_per_req"):
        assert hasattr(FullAttentionSpec, name)
    read = {"query_start_loc_cpu", "seq_lens", "block_table_tensor", "is_prefilling"}
    assert read <= set(CommonAttentionMetadata.__dataclass_fields__)
