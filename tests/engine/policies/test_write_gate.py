"""Write gates (WG-KV): the formula against torch's own modules, gate files, attention, refusals."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import mpmath
import pytest
import torch
import torch.nn.functional as F
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from mmkv.engine.backends.torch.attention import (
    SortedRows,
    write_gated_attention,
    write_gated_attention_reference,
)
from mmkv.engine.config import EngineConfig
from mmkv.engine.errors import GateError, PolicyError, SessionError
from mmkv.engine.model.decoder import Decoder
from mmkv.engine.model.gates import (
    foreign_note,
    load_gates,
    load_write_gates,
    make_random_gates,
    make_random_write_gates,
    save_gates,
    write_gates,
)
from mmkv.engine.model.rope import rotate
from mmkv.engine.model.spec import DecoderSpec
from mmkv.engine.policies import Policy, make_policy
from mmkv.engine.policies.attention import AttentionMass
from mmkv.engine.policies.base import Admission, admitted
from mmkv.engine.policies.write_gate import visible, with_window
from mmkv.engine.policy_choice import named_gates
from mmkv.engine.runtime import Runtime
from mmkv.resources import bundled_model
from mmkv.training.measure.teacher_forced import FullAttention, lay_out
from tests.conftest import make_spec
from tests.support.factories import checkpoint, make_turn
from tests.support.model_configs import Checkpoint
from tests.support.sessions import load, save_checkpoint, text_ids
from tests.support.tiers import slow_but

CPU = torch.device("cpu")


def keys(spec: DecoderSpec, count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return keys ``[count, H, D]`` before and after some rotation, of no particular length."""
    generator = torch.Generator().manual_seed(seed)
    plain = 3 * torch.randn(count, spec.num_kv_heads, spec.head_dim, generator=generator)
    angle = torch.arange(count)[:, None] * spec.rope.inv_freq
    cos, sin = (torch.cat([f(angle)] * 2, -1) for f in (torch.cos, torch.sin))
    half = torch.cat([-torch.ones(spec.head_dim // 2), torch.ones(spec.head_dim // 2)])
    return plain, rotate(plain, cos, sin * half)


def modules(tensors: dict[str, Tensor], layer: int, head: int) -> nn.ModuleDict:
    """Return one head's gate out of torch's own modules, in float64."""
    weight = tensors[f"layers.{layer}.linear1.weight"][head]
    width, inputs = weight.shape
    parts = nn.ModuleDict(
        {
            "before": nn.RMSNorm(inputs // 2, eps=1e-6),
            "after": nn.RMSNorm(inputs // 2, eps=1e-6),
            "first": nn.Linear(inputs, width),
            "second": nn.Linear(width, 1),
        }
    )
    state = {
        "before.weight": tensors["norm.before"][layer],
        "after.weight": tensors["norm.after"][layer],
        "first.weight": weight,
        "first.bias": tensors[f"layers.{layer}.linear1.bias"][head],
        "second.weight": tensors["readout.weight"][layer, head][None],
        "second.bias": tensors["readout.bias"][layer, head][None],
    }
    parts.load_state_dict(state)
    return parts.double()


def uneven(spec: DecoderSpec, seed: int = 0, width: int = 6) -> dict[str, Tensor]:
    """Return the tensors of random gates with no two values alike, biases too."""
    made = make_random_write_gates(spec, seed, width).tensors
    generator = torch.Generator().manual_seed(seed + 1)
    return {n: t + 0.3 * torch.randn(t.shape, generator=generator) for n, t in made.items()}


@pytest.mark.parametrize(("heads", "size"), [(1, 8), (3, 4)])
def test_the_gate_is_the_papers_formula(heads: int, size: int) -> None:
    spec = make_spec(layers=3, kv_heads=heads, head_dim=size)
    tensors = uneven(spec)
    gates = write_gates(tensors, spec)
    pre, post = keys(spec, 9)
    for layer in range(3):
        got = gates.log_g(layer, pre, post)
        assert got.dtype == torch.float32 and got.shape == (9, heads)
        for head in range(heads):
            part = modules(tensors, layer, head)
            x = torch.cat(
                [part["before"](pre[:, head].double()), part["after"](post[:, head].double())], -1
            )
            g = torch.sigmoid(part["second"](F.gelu(part["first"](x))))[:, 0]
            torch.testing.assert_close(got[:, head].double(), g.log(), rtol=1e-5, atol=1e-6)


def test_log_g_is_precise_for_saturated_gates() -> None:
    spec = make_spec(layers=1, kv_heads=1)
    tensors = uneven(spec)
    tensors["readout.weight"].zero_()
    pre, post = keys(spec, 1)
    for z in (-200.0, -60.0, -1.0, 0.0, 8.0, 30.0):
        tensors["readout.bias"].fill_(z)
        got = write_gates(tensors, spec).log_g(0, pre, post).item()
        with mpmath.workdps(120):
            exact = -mpmath.log1p(mpmath.exp(-mpmath.mpf(z)))
            assert abs(got - exact) <= 3 * 2.0**-24 * abs(exact), z


@pytest.mark.parametrize("stored", [None, torch.float16])
def test_a_file_gives_the_gates_back(stored: torch.dtype | None, tmp_path: Path) -> None:
    spec = make_spec(layers=3, kv_heads=2, head_dim=16)
    made = write_gates(uneven(spec, width=10), spec)
    save_gates(made, tmp_path / "g", spec, stored, base_model="some/model")
    info = json.loads((tmp_path / "g" / "gates.json").read_text())
    assert info["kind"] == "write" and info["base_model"] == "some/model"
    assert (info["head_dim"], info["d_gate"], info["num_layers"]) == (16, 10, 3)
    held = load_file(tmp_path / "g" / "gates.safetensors")
    half = {name for name, tensor in held.items() if tensor.dtype == torch.float16}
    assert half == {name for name in held if stored and ".linear1." in name}
    pre, post = keys(spec, 7)
    for source in (tmp_path / "g", tmp_path / "g" / "gates.safetensors"):
        again = load_write_gates(source, spec)
        assert again.kind == "write" and again.info["base_model"] == "some/model"
        assert (again.fingerprint() == made.fingerprint()) == (stored is None)
        for layer in range(3):
            got, want = (gates.log_g(layer, pre, post) for gates in (again, made))
            if stored is None:
                assert torch.equal(got, want)
            else:
                assert 0 < (got - want).abs().max() < 0.02


def test_the_fingerprint_sees_every_parameter() -> None:
    spec = make_spec()
    first = write_gates(uneven(spec), spec).fingerprint()
    assert first == write_gates(uneven(spec), spec).fingerprint()
    for name in uneven(spec):
        tensors = uneven(spec)
        tensors[name].flatten()[-1] += 1e-3
        assert write_gates(tensors, spec).fingerprint() != first, name


def test_kinds_do_not_stand_in_for_each_other(tmp_path: Path) -> None:
    spec = make_spec()
    save_gates(make_random_gates(spec), tmp_path / "retention", spec)
    save_gates(make_random_write_gates(spec), tmp_path / "write", spec)
    with pytest.raises(GateError, match="holds write gates, and the policy reads retention") as one:
        load_gates(tmp_path / "write", spec)
    with pytest.raises(GateError, match="holds retention gates, and the policy reads write") as two:
        load_write_gates(tmp_path / "retention", spec)
    for error, folder in ((one, "write"), (two, "retention")):
        assert str(tmp_path / folder) in str(error.value) and "\n" not in str(error.value)
    published = {"model.layers.0.self_attn.retention_gate.bias": torch.zeros(2)}
    (tmp_path / "published").mkdir()
    torch.save(published, tmp_path / "published" / "trimkv_weights.pth")
    with pytest.raises(GateError, match="reads write gates"):
        load_write_gates(tmp_path / "published", spec)


@pytest.mark.parametrize(
    ("field", "value"), [("hidden", 32), ("layers", 4), ("kv_heads", 4), ("head_dim", 4)]
)
def test_gates_of_another_model_are_refused(field: str, value: int, tmp_path: Path) -> None:
    save_gates(make_random_write_gates(make_spec()), tmp_path, make_spec())
    ours = {"hidden": 24, "layers": 2, "kv_heads": 2, "head_dim": 8}[field]
    with pytest.raises(GateError) as error:
        load_write_gates(tmp_path, make_spec(**{field: value}))
    message = str(error.value)
    assert str(value) in message and str(ours) in message and "\n" not in message


@pytest.mark.parametrize("name", ["norm.after", "layers.1.linear1.bias", "readout.weight"])
def test_tensors_that_do_not_fit_are_named(name: str) -> None:
    spec = make_spec()
    tensors = uneven(spec)
    lacking = {n: t for n, t in tensors.items() if n != name}
    with pytest.raises(GateError, match="lack the tensor"):
        write_gates(lacking, spec)
    with pytest.raises(GateError, match=r"'layers\.2\.linear1\.bias'"):
        write_gates(tensors | {"layers.2.linear1.bias": torch.zeros(1)}, spec)
    with pytest.raises(GateError, match="the model needs"):
        write_gates(tensors | {name: tensors[name][1:]}, spec)


def test_all_but_the_first_layer_stays_float32_in_a_bfloat16_model() -> None:
    spec = make_spec()
    gates = write_gates(uneven(spec), spec)
    half = gates.to(CPU, torch.bfloat16)
    pre, post = keys(spec, 40)
    for layer in range(2):
        gate = half.layers[layer]
        assert gate.weight.dtype == gate.offset.dtype == torch.bfloat16
        got = half.log_g(layer, pre.bfloat16(), post.bfloat16())
        assert got.dtype == torch.float32
        assert 0 < (got - gates.log_g(layer, pre, post)).abs().max() < 0.15
        assert torch.equal(gate.bias, gates.layers[layer].bias)
        assert torch.equal(gate.before, gates.layers[layer].before)


def test_random_gates_admit_about_half() -> None:
    spec = make_spec(layers=4, kv_heads=4, head_dim=32)
    gates, same = make_random_write_gates(spec, seed=3), make_random_write_gates(spec, seed=3)
    assert gates.fingerprint() == same.fingerprint()
    assert gates.fingerprint() != make_random_write_gates(spec, seed=4).fingerprint()
    pre, post = keys(spec, 300)
    log_g = torch.stack([gates.log_g(layer, pre, post) for layer in range(4)])
    assert 0.3 < admitted(log_g, 0.1).float().mean() < 0.7
    assert load_write_gates("random", spec).fingerprint() != gates.fingerprint()


@pytest.mark.parametrize(
    "name", slow_but({"qwen3"}, ["qwen3", "llama_biased", "qwen2"], "compares with transformers")
)
def test_the_gates_read_the_keys_that_transformers_has(name: str) -> None:
    """Before RoPE: what the key norm (or without one the projection) gives. After: rotated."""
    engine = Runtime.from_pretrained(checkpoint(name), policy="full", dtype="float32", device="cpu")
    inputs = make_turn(name, [14])
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint(name)).float().eval()
    spec, seen = engine.spec, {}
    for index, layer in enumerate(model.model.layers):
        part = getattr(layer.self_attn, "k_norm", layer.self_attn.k_proj)
        part.register_forward_hook(lambda _m, _a, out, at=index: seen.__setitem__(at, out[0]))
    with torch.no_grad():
        cache = model(input_ids=inputs["input_ids"], use_cache=True).past_key_values
    documents = lay_out(engine, [inputs])
    decoder = Decoder(spec, engine.decoder.weights, None)
    hidden, rope = documents.hidden, engine.rope.at(documents.positions)
    found: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad():
        for index in range(spec.num_layers):
            x, step = decoder.gate_input(index, hidden), FullAttention(engine, documents)
            hidden = decoder.layer(
                index, hidden, x, rope, step, on_keys=lambda pre, post: found.append((pre, post))
            )
    assert len(found) == spec.num_layers
    for index, (pre, post) in enumerate(found):
        plain = seen[index].reshape(14, spec.num_kv_heads, spec.head_dim)
        rotated = cache.layers[index].keys[0].transpose(0, 1)
        torch.testing.assert_close(pre, plain, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(post, rotated, rtol=1e-4, atol=1e-5)
        assert (pre - post).abs().max() > 0.1


def seen_by_definition(
    log_g: Tensor, query: list[int], key: list[int], window: int, threshold: float
) -> Tensor:
    """Write the mask of section 4.2 out, pair by pair."""
    heads = log_g.shape[0]
    mask = torch.zeros(heads, len(query), len(key), dtype=torch.bool)
    for h in range(heads):
        for row, i in enumerate(query):
            for column, j in enumerate(key):
                near, wanted = i - j < window, math.exp(log_g[h, column]) >= threshold
                mask[h, row, column] = i >= j and (near or wanted)
    return mask


@pytest.mark.parametrize("window", [1, 4, 50])
@pytest.mark.parametrize("threshold", [0.0, 0.1, 0.7])
def test_what_a_token_sees(window: int, threshold: float) -> None:
    generator = torch.Generator().manual_seed(window)
    log_g = F.logsigmoid(2 * torch.randn(3, 20, generator=generator) - 1)
    everything = list(range(20))
    got = visible(torch.arange(20), torch.arange(20), log_g, window, threshold)
    assert torch.equal(got, seen_by_definition(log_g, everything, everything, window, threshold))
    # A chunk of queries over a cache whose entries have gaps.
    query, key = [13, 14, 15], [0, 3, 4, 9, 12, 13, 14, 15]
    got = visible(torch.tensor(query), torch.tensor(key), log_g[:, key], window, threshold)
    assert torch.equal(got, seen_by_definition(log_g[:, key], query, key, window, threshold))
    assert bool(got[:, 0, key.index(13)].all()), "a token always sees itself"


@pytest.mark.parametrize(
    ("name", "beside", "window"),
    [
        ("tiny-vlm-wgkv-0", "../tiny-vlm/gates", 32),
        ("smollm2-135m-wgkv-0", "smollm2-135m-trimkv-0", 64),
    ],
)
def test_the_stored_gates_fit_and_decide(name: str, beside: str, window: int) -> None:
    """Some keys stay, most do not."""
    assets = bundled_model().parent / "gates"
    spec = make_spec(layers=30, kv_heads=3, hidden=576, head_dim=64)  # of SmolLM2-135M
    if name.startswith("tiny"):
        spec = Runtime.from_pretrained(str(bundled_model())).spec
    gates = load_write_gates(assets / name, spec)
    assert name[0] == "s" or foreign_note(gates, str(bundled_model())) is None
    others = json.loads((assets / beside / "gates.json").read_text())
    assert gates.info["base_sha256"] == others["base_sha256"]
    settings, results = gates.info["settings"], gates.info["results"]
    assert isinstance(settings, dict) and settings["window"] == window
    assert isinstance(results, dict) and 0.05 < results["held_out_admitted"] < 0.5


# Attention under write gates (WG-KV), and what is refused; test_oracle.py has dialogues.


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two layers."""
    spec = Checkpoint("llama", 6, 2, 32, layers=2)
    return save_checkpoint(spec, tmp_path_factory.mktemp("admission") / "text")


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 40),
    st.integers(1, 300),
    st.sampled_from([1, 3, 64, 1000]),
    st.floats(0, 1),
    st.integers(0, 10**6),
)
def test_blocks_against_the_whole_mask(
    past: int, chunk: int, window: int, threshold: float, seed: int
) -> None:
    """Rows of unequal length, from which old entries that were not admitted are gone."""
    source = torch.Generator().manual_seed(seed)
    heads, dim, seen = 2, 8, past + chunk
    log_g = torch.rand(heads, seen, generator=source).log()
    rows = []
    for head in range(heads):
        stays = (torch.arange(seen) > past - window) | (log_g[head].exp() >= threshold)
        rows.append(stays.nonzero().flatten())
    longest = max(row.numel() for row in rows)
    last = torch.iinfo(torch.int64).max
    at = torch.full((heads, longest), last)
    for head, row in enumerate(rows):
        at[head, : len(row)] = row
    key, value = torch.randn(2, heads, longest, dim, generator=source)
    entries = SortedRows(key, value, at, log_g.gather(1, at.clamp(max=seen - 1)))
    query = torch.randn(heads, 3, chunk, dim, generator=source)
    position = torch.arange(past, seen)
    args = query, position, entries, window, threshold, dim**-0.5
    torch.testing.assert_close(
        write_gated_attention(*args), write_gated_attention_reference(*args), rtol=1e-4, atol=1e-5
    )


def test_blocks_read_no_number_each_from_the_device() -> None:
    """On a GPU each read makes the host wait; one for all blocks is enough."""

    class Reads(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.count += func is torch.ops.aten._local_scalar_dense.default
            return func(*args, **(kwargs or {}))

    at = torch.arange(300)
    rows = SortedRows(*torch.randn(2, 2, 300, 8), at.expand(2, -1), torch.rand(2, 300).log())
    with Reads() as reads:
        write_gated_attention(torch.randn(2, 1, 300, 8), at, rows, 20, 0.5, 1.0)
    assert reads.count == 0


def test_what_cannot_be_is_refused(text_model: Path) -> None:
    with pytest.raises(GateError, match="needs write gates; name them with gates=PATH"):
        Runtime.from_pretrained(text_model, policy="wgkv", device="cpu")
    with pytest.raises(GateError, match="holds retention gates"):
        Runtime.from_pretrained(bundled_model(), policy="wgkv", gates=bundled_model() / "gates")
    engine = Runtime.from_pretrained(text_model, policy="wgkv", gates="random", device="cpu")
    assert engine.policy.admission == Admission(256, 0.1)
    trained = "assets/gates/tiny-vlm-wgkv-0"
    engine = Runtime.from_pretrained(bundled_model(), policy="wgkv", gates=trained, device="cpu")
    assert engine.policy.admission == Admission(32, 0.1)
    with pytest.raises(PolicyError, match="give it a scorer without state"):
        load(text_model, policy=Policy("mine", AttentionMass(), None, admission=Admission()))


def test_a_budget_beside_write_gates_has_both_sets_of_gates(tmp_path: Path) -> None:
    """Retention gates as ever, write gates by the policy's parameter; files tell them apart."""

    def engine(policy: str, **options: Any) -> Runtime:
        return Runtime.from_pretrained(
            bundled_model(), policy=policy, budget=40, device="cpu", dtype="float32", **options
        )

    write = "assets/gates/tiny-vlm-wgkv-0"
    two = engine(f"wgkv+dbtrimkv:write_gates={write}")
    assert two.policy.name == "wgkv+dbtrimkv" and two.policy.protect_recent == 32
    assert two.evict_path == "native, write gates in torch"
    one = engine("wgkv+snapkv", gates=write)
    assert one.model.needs.queries == 32 == one.policy.protect_recent
    assert one.evict_path.startswith("native, write gates and scores in torch")
    kept = [with_window(make_policy(f"wgkv+snapkv:observed={n}"), 32) for n in (8, 48)]
    assert [policy.protect_recent for policy in kept] == [32, 48]
    with two.session() as session:
        session.prefill({"input_ids": text_ids(90, 1)[None]})
        assert session.memory().entries == 40 * two.spec.rows
        session.save(tmp_path / "two")
    two.load_session(tmp_path / "two")[0].close()
    with pytest.raises(SessionError, match="gates"):
        engine("wgkv+dbtrimkv:write_gates=random").load_session(tmp_path / "two")
    with pytest.raises(
        GateError, match=r"needs write gates beside .*: --policy 'wgkv\+dbtrimkv:wr"
    ):
        engine("wgkv+dbtrimkv")
    with pytest.raises(GateError, match="needs write gates; name them"):
        engine("wgkv+snapkv")
    with pytest.raises(GateError, match="holds write gates"):
        engine(f"wgkv+dbtrimkv:write_gates={write}", gates=write)
    with pytest.raises(GateError, match="holds retention gates"):
        engine(f"wgkv+dbtrimkv:write_gates={bundled_model() / 'gates'}")


@pytest.mark.parametrize(
    ("policy", "gates", "taken"),
    [
        *((policy, None, "own") for policy in (None, "dbtrimkv", "snapkv", "full")),
        ("wgkv", None, None),  # the model's are of the other kind
        ("wgkv+dbtrimkv", None, "own"),
        ("snapkv", "random", "random"),
    ],
)
def test_a_model_s_own_gates_are_taken_where_they_fit(
    policy: str | None, gates: str | None, taken: str | None
) -> None:
    config = EngineConfig(model=str(bundled_model()), policy=policy, gates=gates)
    own = bundled_model() / "gates"
    assert named_gates(config) == (own if taken == "own" else taken)


def test_two_sets_of_gates_without_retention_gates(text_model: Path) -> None:
    with pytest.raises(GateError, match=r"needs retention gates and .* has none"):
        Runtime.from_pretrained(text_model, policy="wgkv+dbtrimkv:write_gates=random")
    with pytest.raises(GateError, match="needs write gates beside"):
        Runtime.from_pretrained(text_model, policy="wgkv+dbtrimkv", gates="random")
