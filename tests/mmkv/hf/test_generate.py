"""``generate`` under retain: stock transformers where nothing is evicted, an engine elsewhere."""

from __future__ import annotations

import inspect
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import LogitsProcessorList, StoppingCriteriaList, TextIteratorStreamer

import mmkv
import mmkv.hf.generate
from mmkv import InputError, MmkvError, ModelError
from mmkv.engine.backends.cuda.kernels.sample import Draw, columns_of, sample
from mmkv.engine.budgets import page_bound
from mmkv.hf import RetainedCache, generate, handle, retain
from tests.support.chat_models import picture, save_llama, save_llava
from tests.support.factories import CHECKPOINTS, checkpoint, make_model, pad_left
from tests.support.hf_models import TOKENS, greedy, model_of, prompts_of
from tests.support.tiers import long_but, one_in

NAMES = ["qwen3_vl", "llava", "llava_next", "llava_onevision", "qwen3", "llama", "phi3"]
NAMES += ["qwen2_5_vl", "qwen3_5", "qwen3_vl_moe", "internvl", "smolvlm", "mistral3"]
# Positions on one axis and on three, states, and pictures that take several forms.
FEW = ("qwen3_vl", "llava_onevision", "llama", "qwen3_5", "qwen2_5_vl", "smolvlm")


@one_in(2)
@pytest.mark.parametrize(
    "name", long_but(FEW, NAMES, "the engine's own reply has every family, in test_parity")
)
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


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_5", "llava_next", "phi3"])
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
    with retain(model, policy="streamingllm", budget=8, evict_every=1) as handle:
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
    with retain(model, gates="random", budget=32, prefill_chunk=512, evict_every=1) as handle:
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


# What generate can be asked for and cannot be had under retain: one clear line each.


REFUSED: dict[str, dict[str, Any]] = {
    "beam search": {"num_beams": 2},
    "beam sample": {"num_beams": 2, "do_sample": True},
    "contrastive search": {"penalty_alpha": 0.6, "top_k": 4},
    "assisted generation": {"prompt_lookup_num_tokens": 3},
    "dola generation": {"dola_layers": "low"},
    "assistant_model": {"assistant_model": nn.Identity()},
    "custom_generate": {"custom_generate": "somewhere"},
    "guidance_scale": {"guidance_scale": 1.5},
    "negative_prompt_ids": {"negative_prompt_ids": torch.ones(1, 3)},
    "use_cache=False": {"use_cache": False},
    "cache_implementation='static'": {"cache_implementation": "static"},
    "cache_implementation='paged'": {"cache_implementation": "paged"},
    "output_attentions": {"output_attentions": True},
    "output_hidden_states": {"output_hidden_states": True},
    "inputs_embeds": {"inputs_embeds": torch.zeros(1, 3, 4)},
    "position_ids": {"position_ids": torch.zeros(1, 3)},
    "token_healing": {"token_healing": True},
    "labels": {"labels": torch.zeros(1, 3)},
    "DynamicCache": {"past_key_values": transformers.DynamicCache()},
    "is a DynamicCache": {"cache": transformers.DynamicCache()},
    "pass one": {"cache": RetainedCache(), "past_key_values": RetainedCache()},
    "prefill_chunk_size": {"prefill_chunk_size": 4},
}


def test_each_is_refused_by_name() -> None:
    model, prompt = model_of("llama"), prompts_of("llama")[1]
    with retain(model, policy="full"):
        for name, options in REFUSED.items():
            with pytest.raises(InputError) as error:
                greedy(model, prompt, **options)
            assert name in str(error.value) and "\n" not in str(error.value)
        for config in ({"num_beams": 2}, {"cache_implementation": "static"}):
            settings = transformers.GenerationConfig(max_new_tokens=3, **config)
            with pytest.raises(InputError):
                model.generate(**prompt, generation_config=settings)
        # Mistakes that transformers names itself.
        with pytest.raises(ValueError, match="max_new_tokenz"):
            greedy(model, prompt, max_new_tokenz=3)
        with pytest.raises(ValueError, match="pixel_values"):
            greedy(model, prompt, pixel_values=torch.zeros(1, 3, 4, 4))


def test_inputs_that_do_not_fit_the_model() -> None:
    model, prompt = model_of("qwen3_vl"), prompts_of("qwen3_vl")[0]
    ids = prompt["input_ids"]
    with retain(model, policy="full"):
        for match, inputs in {
            "no image came with it": {"input_ids": ids},
            "outside 0": {"input_ids": ids + 4000},
            "attention_mask has shape": prompt | {"attention_mask": torch.ones(1, 3)},
            "prompt is empty": {"input_ids": ids, "attention_mask": torch.zeros_like(ids)},
        }.items():
            with pytest.raises(InputError, match=match):
                greedy(model, inputs)


class Adapter(nn.Linear):
    """Stands for a matrix with an adapter beside it."""


def test_models_that_cannot_be_retained() -> None:
    def refused(kind: type[Exception], match: str, model: Any, **options: Any) -> None:
        with pytest.raises(kind, match=match) as error:
            retain(model, **{"policy": "full", **options})
        assert "\n" not in str(error.value)

    refused(InputError, "merge_and_unload", nn.Linear(2, 2))
    model = make_model(CHECKPOINTS["llama"])
    refused(ModelError, "does not generate; load .* AutoModelForCausalLM", model.model)
    refused(InputError, "takes no device", model, device="cpu")
    refused(InputError, "takes no weights: the model has its own", model, weights="int8")
    refused(InputError, "no option 'bugdet'; did you mean 'budget'", model, bugdet=3)
    with pytest.raises(InputError, match="no option 'max_pixel'; did you mean 'max_pixels'"):
        mmkv.Engine.from_pretrained("nowhere", max_pixel=3)
    with retain(model, policy="full"):
        refused(InputError, "close the other retain", model)
    model.model.layers[1].mlp.up_proj = Adapter(2, 2)
    refused(ModelError, r"layers\.1\.mlp\.up_proj is a Adapter.*merge_and_unload", model)
    model = make_model(CHECKPOINTS["llama"])
    model.model.norm.half()
    refused(ModelError, "float16, torch.float32", model)
    model = make_model(CHECKPOINTS["llama"])
    model.model.norm.to("meta")
    refused(ModelError, "lies on cpu, meta", model)
    refused(ModelError, "lies on meta; load it whole", model.to("meta"))
    model.config.quantization_config = {}
    refused(ModelError, "quantised", model)
    tiny = transformers.BloomConfig(vocab_size=8, hidden_size=8, n_layer=1, n_head=1)
    unknown = transformers.BloomForCausalLM(tiny)
    refused(MmkvError, "'bloom' is not supported: mmkv runs .*qwen3_vl", unknown)


def test_what_is_used_of_transformers_is_there() -> None:
    """Names and forms that have changed between versions, or are private."""
    from transformers.cache_utils import Cache
    from transformers.generation import GenerationMixin

    arguments = inspect.signature(GenerationMixin.generate).parameters
    assert {"custom_generate", "streamer", "assistant_model", "synced_gpus"} <= set(arguments)
    assert "position_ids" in inspect.signature(type(model_of("llama")).forward).parameters
    fields = {"_pad_token_tensor", "_eos_token_tensor"}
    source = inspect.getsource(GenerationMixin._prepare_special_tokens)
    assert all(f"generation_config.{name}" in source for name in fields)
    hand_over = inspect.getsource(GenerationMixin.generate)
    assert "decoding_method = custom_generate" in hand_over
    assert {mode.value for mode in generate._MODES} == {"greedy_search", "sample"}
    config = transformers.GenerationConfig()
    for name in (
        "num_return_sequences return_dict_in_generate output_scores output_logits do_sample "
        "guidance_scale use_cache cache_implementation token_healing output_attentions "
        "output_hidden_states prefill_chunk_size stop_strings"
    ).split():
        assert hasattr(config, name), name
    made = generate.GenerateDecoderOnlyOutput(sequences=None)
    assert {"scores", "logits", generate._CACHE_FIELD} <= {f for f in type(made).__annotations__}
    assert generate.MaxLengthCriteria(max_length=3).max_length == 3
    assert generate.EosTokenCriteria(eos_token_id=[1, 2]).eos_token_id.tolist() == [1, 2]
    assert generate.TemperatureLogitsWarper(0.5).temperature == 0.5
    assert generate.TopKLogitsWarper(3).top_k == 3 and generate.TopPLogitsWarper(0.5).top_p == 0.5
    assert Cache(layers=[]).layers == [] and hasattr(Cache, "is_croppable")
    # For models that run themselves.
    assert {"can_generate", "_can_set_attn_implementation"} <= set(
        dir(transformers.PreTrainedModel)
    )
    assert handle.AttentionInterface.register and handle.AttentionMaskInterface.register
    assert model_of("llama").config._attn_implementation == "sdpa"
    taken = list(inspect.signature(handle.sdpa_attention_forward).parameters)
    assert taken[:5] == ["module", "query", "key", "value", "attention_mask"]


# What people pass to ``generate``: streamers, processors, criteria, seeds, copies, pipelines.


FULL: dict[str, Any] = {"policy": "full"}


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """Return a text model with a tokenizer, one token a byte."""
    folder = save_llama(tmp_path_factory.mktemp("llama"))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, transformers.AutoTokenizer.from_pretrained(folder)


def batch() -> dict[str, Tensor]:
    return pad_left(prompts_of("qwen3_vl"))


class Ban(transformers.LogitsProcessor):
    """Forbids the latest token, and counts its calls: what it sees is what generate returns."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.seen.append(input_ids)
        return scores.scatter(1, input_ids[:, -1:], -torch.inf)


class EndAtFive(transformers.StoppingCriteria):
    """Ends rows one after the other: the last of four after eight tokens."""

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        assert scores is None or len(scores) > 0
        said = input_ids.shape[1] - self.width
        return torch.arange(4) + 5 <= said

    width = 0


def test_custom_processors_and_criteria() -> None:
    model, inputs = model_of("qwen3_vl"), batch()
    EndAtFive.width = inputs["input_ids"].shape[1]

    def run(**more: Any) -> tuple[Any, Ban]:
        ban = Ban()
        made = greedy(
            model,
            inputs,
            logits_processor=LogitsProcessorList([ban]),
            stopping_criteria=StoppingCriteriaList([EndAtFive()]),
            return_dict_in_generate=True,
            output_scores=True,
            repetition_penalty=1.3,
            **more,
        )
        return made, ban

    for more in ({}, {"eos_token_id": [3], "pad_token_id": 2}):
        wanted, theirs = run(**more)
        with retain(model, **FULL):
            found, ours = run(**more)
        assert torch.equal(found.sequences, wanted.sequences)
        assert found.sequences.shape[1] == EndAtFive.width + 8
        assert len(found.scores) == len(wanted.scores) == 8
        assert [ids.tolist() for ids in ours.seen] == [ids.tolist() for ids in theirs.seen]
        # With an end token, rows that have ended take no more steps here.
        alive = 4 if not more else 1
        for one, two in zip(found.scores, wanted.scores, strict=True):
            torch.testing.assert_close(one[-alive:], two[-alive:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "settings", [{"temperature": 0.7, "top_k": 20, "top_p": 0.9}, {"min_p": 0.1}]
)
def test_a_seed_draws_the_same_tokens_as_in_transformers(settings: dict[str, Any]) -> None:
    model, inputs = model_of("qwen3_vl"), batch()

    def draw(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return greedy(model, inputs, do_sample=True, num_return_sequences=3, **settings)

    wanted = [draw(0), draw(1)]
    with retain(model, **FULL):
        assert [torch.equal(draw(seed), wanted[seed]) for seed in (0, 1)] == [True, True]
    assert not torch.equal(*wanted)


def test_copies_share_one_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompts = model_of("llava"), prompts_of("llava")
    with retain(model, gates="random", budget=6) as handle:
        read: list[int] = []
        turns = handle.engine.family.turns
        monkeypatch.setattr(
            handle.engine.family,
            "turns",
            lambda rows, *more, **named: read.append(len(rows)) or turns(rows, *more, **named),
        )
        made = greedy(
            model,
            pad_left(prompts),
            do_sample=True,
            top_k=1,
            num_return_sequences=3,
            return_dict_in_generate=True,
        )
        alone = greedy(model, pad_left(prompts))
        assert torch.equal(made.sequences, alone.repeat_interleave(3, 0)) and read == [4, 4]
        kept = made.past_key_values.retained()
        assert len(kept) == 12
        for row in (1, 2):
            for one, two in zip(kept[0], kept[row], strict=True):
                assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def stream(model: Any, inputs: Any, tokenizer: Any, **options: Any) -> tuple[list[str], list[Any]]:
    """Return the pieces of text that a streamer gives, and what the thread raised."""
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=30)
    errors: list[Any] = []

    def work() -> None:
        try:
            greedy(model, inputs, streamer=streamer, **options)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    pieces = list(streamer)
    thread.join()
    return pieces, errors


def test_streaming(chat: tuple[Any, Any]) -> None:
    model, tokenizer = chat
    inputs = tokenizer("the quick brown fox", return_tensors="pt")
    wanted = stream(model, inputs, tokenizer)
    with retain(model, **FULL):
        assert stream(model, inputs, tokenizer) == wanted

        # A stream whose call fails ends, and so does one that is refused.
        class Broken(transformers.LogitsProcessor):
            def __call__(self, *_: Any) -> Tensor:
                raise ValueError("broken")

        errors = stream(model, inputs, tokenizer, logits_processor=LogitsProcessorList([Broken()]))[
            1
        ]
        assert [str(error) for error in errors] == ["broken"]
        errors = stream(model, inputs, tokenizer, num_beams=2)[1]
        assert "beam search" in str(errors[0])
    assert len("".join(wanted[0])) > 0 and wanted[1] == []


def test_stop_strings(chat: tuple[Any, Any]) -> None:
    model, tokenizer = chat
    inputs = tokenizer("once upon a time", return_tensors="pt")
    letters = tokenizer("abcdefghijklmnopqrstuvwxyz")["input_ids"]
    only = {"suppress_tokens": [i for i in range(len(tokenizer)) if i not in letters]}
    plain = greedy(model, inputs, **only)
    word = tokenizer.decode(plain[0, -6:-4])
    options = {"stop_strings": [word], "tokenizer": tokenizer, **only}
    wanted = greedy(model, inputs, **options)
    with retain(model, **FULL):
        assert torch.equal(greedy(model, inputs, **options), wanted)
    assert wanted.shape[1] < plain.shape[1]


def test_the_pipeline(tmp_path: Path) -> None:
    folder = save_llava(tmp_path)
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    processor = transformers.AutoProcessor.from_pretrained(folder)
    processor.tokenizer.padding_side = "left"
    ask = transformers.pipeline("image-text-to-text", model=model, processor=processor)
    content = [{"type": "image", "image": picture()}, {"type": "text", "text": "what is this?"}]
    one = [{"role": "user", "content": content}]
    two = [{"role": "user", "content": [content[0], content[1], content[0]]}]
    options = {"generate_kwargs": {"do_sample": False, "max_new_tokens": 8}}
    wanted = ask(text=one, **options), ask(text=[one, two], batch_size=2, **options)
    with retain(model, **FULL) as handle:
        assert (ask(text=one, **options), ask(text=[one, two], batch_size=2, **options)) == wanted
        assert handle.memory().rows[0].by_modality["image"] == 16 * handle.engine.spec.rows


def test_steps_in_bursts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU with a graph: tokens come several at a time, and are the same."""
    model, inputs = model_of("qwen3_vl"), batch()
    plain = greedy(model, inputs, max_new_tokens=37)
    width = inputs["input_ids"].shape[1]
    ends = {
        "eos_token_id": [int(plain[1, width + 3]), int(plain[0, width + 20])],
        "pad_token_id": 1,
    }
    wanted = greedy(model, inputs, max_new_tokens=37, **ends)
    counted: list[int] = []
    with retain(model, **FULL) as handle:
        engine = handle.engine
        many = engine.decode_many
        monkeypatch.setattr(
            engine, "decode_many", lambda *call: counted.append(call[2]) or many(*call)
        )
        monkeypatch.setattr(mmkv.hf.generate, "in_bursts", lambda engine: True)
        assert torch.equal(greedy(model, inputs, max_new_tokens=37), plain)
        assert counted == [16, 16, 4]
        made = greedy(model, inputs, max_new_tokens=37, return_dict_in_generate=True, **ends)
        assert torch.equal(made.sequences, wanted)
        held = [row.ids for row in made.past_key_values.rows]
        for row, ids in enumerate(made.sequences.tolist()):
            own = ids[width - int(inputs["attention_mask"][row].sum()) :]
            ended = [
                i for i, token in enumerate(ids) if i >= width and token in ends["eos_token_id"]
            ]
            said = own if not ended else own[: len(own) - len(ids) + ended[0] + 1]
            assert held[row] == said[:-1] and made.past_key_values.rows[row].pending == said[-1]
        torch.manual_seed(3)
        first = greedy(model, inputs, do_sample=True, temperature=0.8, top_k=9, top_p=0.8)
        torch.manual_seed(3)
        again = greedy(model, inputs, do_sample=True, temperature=0.8, top_k=9, top_p=0.8)
        assert torch.equal(first, again) and not torch.equal(first, plain[:, : first.shape[1]])
        # A criterion or a processor of one's own looks at every token.
        counted.clear()
        greedy(model, inputs, repetition_penalty=1.2)
        greedy(model, inputs, max_time=60.0)
        assert counted == []


@pytest.mark.parametrize(
    "settings",
    [
        {"top_k": 5},
        {"top_k": 0, "top_p": 0.6},
        {"temperature": 0.7, "top_k": 9, "top_p": 0.8},
        {"top_k": 0, "min_p": 0.2},
        {"temperature": 1.3, "top_k": 12, "top_p": 0.9, "min_p": 0.1},
    ],
    ids=str,
)
def test_bursts_draw_from_the_distribution_of_transformers(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the graph's sampler is given, against the processors that transformers made."""
    model, inputs = model_of("qwen3_vl"), batch()
    draws: list[Draw] = []
    chains: list[LogitsProcessorList] = []
    prepared = mmkv.hf.generate._Burst.of.__func__

    def seen(cls: Any, engine: Any, how: Any, rows: int) -> Any:
        chains.append(how.processors)
        return prepared(cls, engine, how, rows)

    with retain(model, **FULL) as handle:
        many = handle.engine.decode_many
        monkeypatch.setattr(mmkv.hf.generate, "in_bursts", lambda engine: True)
        monkeypatch.setattr(mmkv.hf.generate._Burst, "of", classmethod(seen))
        monkeypatch.setattr(
            handle.engine, "decode_many", lambda *call: draws.extend(call[4]) or many(*call)
        )
        greedy(model, inputs, do_sample=True, **settings)
    assert draws and len(chains) == 1
    row = 3 * torch.randn(1, 60, generator=torch.Generator().manual_seed(1))
    wanted = chains[0](inputs["input_ids"], row.clone()).softmax(-1)[0]
    count = 2000
    columns, _ = columns_of([draws[0]] * count, row.device)
    noise = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    shares = torch.bincount(sample(row.expand(count, -1), columns, noise), minlength=60) / count
    assert ((shares - wanted).abs() <= 2 / count).all() and not shares[wanted == 0].any()


def test_processors_in_another_order_look_at_every_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph's sampler has one order: the user's own top-p before top-k goes step by step."""
    model, inputs = model_of("qwen3_vl"), batch()
    own = [transformers.TopPLogitsWarper(0.5), transformers.TopKLogitsWarper(3)]

    def run() -> Tensor:
        torch.manual_seed(5)
        chain = LogitsProcessorList(own)
        return greedy(model, inputs, do_sample=True, top_k=0, logits_processor=chain)

    wanted = run()
    with retain(model, **FULL) as handle:
        monkeypatch.setattr(mmkv.hf.generate, "in_bursts", lambda engine: True)
        monkeypatch.setattr(handle.engine, "decode_many", None)  # not callable
        assert torch.equal(run(), wanted)


def test_a_reply_ends_at_the_last_position() -> None:
    """512 positions: the row that is there ends, as if it had met an end token."""
    model = model_of("llama")
    ids = torch.randint(3, 140, (2, 506), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :20] = 0
    bounded = {"policy": "streamingllm", "budget": 16, "evict_every": 1}
    with (
        retain(model, **bounded, endless=False),
        pytest.warns(UserWarning, match="row 0"),
    ):
        made = greedy(
            model, {"input_ids": ids, "attention_mask": mask}, eos_token_id=1, pad_token_id=0
        )
    said = made[:, 506:]
    assert said.shape == (2, TOKENS) and (said[0, 7:] == 0).all() and (said[1] != 0).all()


def test_a_conversation_goes_on_past_the_last_position() -> None:
    """With transformers' generate, as a session of the engine does; 512 positions."""
    model, draw = model_of("llama"), torch.Generator().manual_seed(0)
    turns = [torch.randint(3, 140, (2, 450), generator=draw) for _ in range(3)]
    with retain(model, policy="streamingllm", budget=16) as handle:
        cache, said = RetainedCache(), turns[0][:, :0]
        sessions = [handle.engine.session() for _ in range(2)]
        for turn in turns:
            ids = torch.cat([said, turn], 1)
            said = greedy(model, {"input_ids": ids}, past_key_values=cache)
            for i, session in enumerate(sessions):
                new = ids[i : i + 1, session.seen :]
                token = int(session.prefill({"input_ids": new}).argmax())
                for wanted in said[i, ids.shape[1] : -1].tolist():
                    assert token == wanted
                    token = int(session.decode(token).argmax())
                assert token == int(said[i, -1])
        assert [row.session.compactions for row in cache.rows] == [
            session.compactions for session in sessions
        ]
        assert sessions[0].compactions > 3 and sessions[0].seen > 2 * 512


@pytest.mark.parametrize("bursts", [False, True])
def test_the_host_waits_once_a_step(bursts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside what the engine's steps read; in bursts once a burst."""
    model, inputs = model_of("qwen3_vl"), batch()
    plain = greedy(model, inputs, max_new_tokens=33, eos_token_id=[1], pad_token_id=1)
    reads: list[str] = []
    loop = mmkv.hf.generate.Loop
    looking = [False]

    def watched(call: Any, name: str) -> Any:
        def counting(*given: Any, **named: Any) -> Any:
            if looking[0]:
                reads.append(name)
            return call(*given, **named)

        return counting

    def during(call: Any, look: bool) -> Any:
        def calling(*given: Any, **named: Any) -> Any:
            before, looking[0] = looking[0], look
            try:
                return call(*given, **named)
            finally:
                looking[0] = before

        return calling

    for name in ("tolist", "item", "cpu", "__bool__", "__int__", "__index__"):
        monkeypatch.setattr(torch.Tensor, name, watched(getattr(torch.Tensor, name), name))
    monkeypatch.setattr(loop, "run", during(loop.run, True))
    monkeypatch.setattr(mmkv.hf.generate, "in_bursts", lambda engine: bursts)
    with retain(model, **FULL) as handle:
        for name in ("decode", "decode_many"):
            monkeypatch.setattr(handle.engine, name, during(getattr(handle.engine, name), False))
        made = greedy(model, inputs, max_new_tokens=33, eos_token_id=[1], pad_token_id=1)
    assert torch.equal(made, plain)
    assert reads == ["tolist"] * (3 if bursts else 33)
