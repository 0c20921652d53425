"""The fused append of one layer, against the eager engine's own step and against float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import mpmath
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mmkv.engine.backends.cuda.kernels.append import empty_room
from mmkv.engine.backends.cuda.kernels.store import store_layer, store_log_beta
from mmkv.engine.backends.torch.step import DecodeStep
from mmkv.engine.cache import COLUMNS, KVForm, PagePool, RaggedCache
from mmkv.engine.errors import BudgetError
from mmkv.engine.model.decoder import Decoder
from mmkv.engine.model.gates import Gates, make_random_gates
from mmkv.engine.model.gates.module import LayerGate, _together
from mmkv.engine.model.rope import Rope
from mmkv.engine.model.spec import RopeSpec
from mmkv.engine.model.weights import DecoderWeights, LayerWeights
from tests.conftest import make_spec
from tests.support.kernels import (
    DEVICE,
    INTERPRETED,
    ONE_SPILL,
    assert_same,
    compiled,
    eager_cache,
    forms,
    is_triton,
    needs_compiler,
    snapshot,
    to_device,
    unchanged,
)

FORMS = forms("store", "store_layer")
GATES = forms("store", "store_log_beta")
HIDDEN, EPS = 40, 1e-6
# Head dim, KV heads, group, rotated features: every head dim and group, whole and partial rotary.
SHAPES = [
    (32, 3, 1, 32),
    (32, 1, 6, 8),
    (64, 2, 4, 64),
    (64, 2, 3, 48),
    (96, 2, 2, 96),
    (96, 1, 7, 72),
    (128, 2, 4, 128),
    (128, 1, 8, 64),
    (128, 1, 5, 128),
]
NORMED = [(shape, at % 2 == 1) for at, shape in enumerate(SHAPES)]


@dataclass
class Case:
    """A one-layer decoder, three sequences at both sides of a page's end, and their next token."""

    decoder: Decoder
    layer: LayerWeights
    gate: LayerGate
    cache: RaggedCache
    hidden: Tensor
    rope: tuple[Tensor, Tensor]
    seqs: Tensor
    position: Tensor

    @classmethod
    def make(
        cls,
        head_dim: int,
        heads: int,
        group: int,
        rot: int,
        dtype: torch.dtype,
        norm: bool,
        trunks: int = 2,
        seed: int = 0,
    ) -> Case:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int, std: float = 1.0, dtype: torch.dtype = dtype) -> Tensor:
            return (torch.randn(*shape, generator=generator) * std).to(dtype).to(DEVICE)

        spec = make_spec(1, heads, HIDDEN, group, head_dim)
        width, rows = 36, (group + 2) * heads * head_dim
        dummy = normal(1)
        layer = LayerWeights(
            dummy,
            normal(rows, HIDDEN, std=0.3),
            normal(rows),
            normal((group + 1) * heads, head_dim) if norm else None,
            dummy,
            None,
            dummy,
            dummy,
            None,
            dummy,
            None,
        )
        widths = [HIDDEN] + [width] * trunks
        trunk = [
            (normal(out, inp, std=1.5 / inp**0.5), normal(out, std=0.2))
            for inp, out in pairwise(widths)
        ]
        plain = torch.float32
        gate = LayerGate(trunk, normal(heads, width, dtype=plain), normal(heads, dtype=plain) + 5)
        weights = DecoderWeights(dummy, [layer], dummy, dummy)
        decoder = Decoder(spec, weights, Gates("tied", [gate], {}))
        cache = RaggedCache(PagePool(8, head_dim, 60, dtype, DEVICE), 1, heads)
        pool = cache.pool
        for column in pool.columns():
            # Rubbish everywhere, so that a write in a wrong place shows.
            column.copy_(torch.randint(1, 99, column.shape, generator=generator))
        seqs = torch.tensor([cache.open() for _ in range(3)], device=DEVICE)
        for seq, count in zip(seqs, (7, 8, 0), strict=True):
            if count:
                cache.append(seq[None], count)
        angles = 1.0 / 10000 ** (torch.arange(0, rot, 2).float() / rot)
        position = torch.tensor([7, 70_001, 0], device=DEVICE)
        rope = Rope(RopeSpec("default", angles), DEVICE, dtype).text(position)
        hidden = normal(3, HIDDEN)
        return cls(decoder, layer, gate, cache, hidden, rope, seqs, position)

    def qkv(self) -> Tensor:
        return F.linear(self.hidden, self.layer.qkv, self.layer.qkv_bias)

    def readout(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the trunk's last product, weight and bias, of the one layer there is."""
        trunk = Gates("tied", [self.gate], {}).before_readout([self.hidden])
        return trunk, self.gate.readout[None], self.gate.bias[None]

    def eager(self) -> tuple[Tensor, PagePool]:
        """Return queries and pool after the engine's own step."""
        cache, spec = copy.deepcopy(self.cache), self.decoder.spec
        seen = int(self.position.max()) + 1
        step = DecodeStep(cache, spec, self.seqs, self.position, seen)
        query, key, value, _ = self.decoder._project(self.hidden, self.layer, self.rope)
        step.attend(0, query, key, value)
        step.finish(F.logsigmoid(self.gate.logits(self.hidden))[:, None])
        return query, cache.pool

    def ours(self, form: Callable[..., Tensor]) -> tuple[Tensor, PagePool, Tensor]:
        """Return queries, pool and slots after ``form``; log_beta stays."""
        cache = copy.deepcopy(self.cache)
        slots = cache.append(self.seqs, 1)[:, 0, :, 0]
        query = form(
            self.qkv(),
            self.rope,
            self.layer.qk_norm,
            EPS,
            cache.pool,
            slots,
            self.position,
        )
        return query, cache.pool, slots


def units(form: Callable[..., Tensor], dtype: torch.dtype, roundings: int) -> float:
    """Return the allowed error in units in the last place of a head's largest element.

    The interpreter cuts float32 to bfloat16 off, which costs up to a unit a rounding.
    """
    if is_triton(form) and INTERPRETED and dtype == torch.bfloat16:
        return 2.0 * roundings
    return {torch.float32: 8.0}.get(dtype, 1.0 * roundings)


def assert_heads_near(got: Tensor, want: Tensor, allowed: float) -> None:
    largest = want.double().abs().amax(-1, keepdim=True)
    error = (got.double() - want.double()).abs() / (largest * torch.finfo(got.dtype).eps)
    assert error.max() <= allowed, f"{error.max():.2f} units"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("shape", "norm"), NORMED, ids=str)
def test_matches_the_eager_step(
    form: Callable[..., Tensor], dtype: torch.dtype, norm: bool, shape: tuple[int, ...]
) -> None:
    matches_the_eager_step(form, Case.make(*shape, dtype, norm))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gains_in_float32_beside_other_states(
    form: Callable[..., Tensor], dtype: torch.dtype
) -> None:
    case = Case.make(*SHAPES[3], dtype, norm=True)
    assert case.layer.qk_norm is not None
    case.layer.qk_norm = case.layer.qk_norm.float() * 1.001  # no number of the dtype
    matches_the_eager_step(form, case)


def matches_the_eager_step(form: Callable[..., Tensor], case: Case) -> None:
    dtype = case.hidden.dtype
    want_query, want = case.eager()
    query, pool, slots = case.ours(form)
    for name in ("values", "position", "modality"):
        assert torch.equal(getattr(pool, name), getattr(want, name)), name
    exact = not is_triton(form)
    here = slots.flatten()
    before = case.cache.pool
    untouched = pool.keys.clone()
    untouched.flatten(0, 1)[here] = before.keys.flatten(0, 1)[here]
    assert torch.equal(untouched, before.keys) and torch.equal(pool.log_beta, before.log_beta)
    pairs = [(query, want_query)]
    pairs.append((pool.keys.flatten(0, 1)[here], want.keys.flatten(0, 1)[here]))
    for got, wanted in pairs:
        assert got.dtype == dtype and got.shape == wanted.shape
        if exact:
            assert torch.equal(got, wanted)
            continue
        assert_heads_near(got, wanted, units(form, dtype, 2))
        if dtype == torch.float16:  # same roundings: only a last bit of rsqrt can move one
            assert (got != wanted).float().mean() < 0.02


@pytest.mark.parametrize("form", GATES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_gates_say_what_they_say_in_the_eager_step(
    form: Callable[..., None], dtype: torch.dtype
) -> None:
    case = Case.make(*SHAPES[3], dtype, norm=True)
    _, want = case.eager()
    log_beta, slots = case.cache.pool.log_beta.clone(), case.cache.append(case.seqs, 1)[..., 0]
    before, here = log_beta.clone(), slots.flatten()
    form(*case.readout(), log_beta, slots)
    got, wanted = log_beta.view(-1)[here], want.log_beta.view(-1)[here]
    before.view(-1)[here] = got
    assert torch.equal(log_beta, before)
    if not is_triton(form):
        assert torch.equal(got, wanted)
    # bfloat16 activations cut off by the interpreter move z by up to 2**-8 of its terms.
    coarse = is_triton(form) and INTERPRETED and dtype == torch.bfloat16
    torch.testing.assert_close(got, wanted, rtol=0.2 if coarse else 2e-3, atol=1e-6)


@pytest.mark.parametrize("form", GATES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gates_of_several_layers_in_float64(form: Callable[..., None], dtype: torch.dtype) -> None:
    """Idle batch slots do nothing: not even their NaN leaves a trace."""
    draw = torch.Generator().manual_seed(0)
    trunk = torch.randn(3, 4, 36, generator=draw).to(dtype).to(DEVICE)
    weight = torch.randn(3, 2, 36, generator=draw).to(DEVICE)
    bias = torch.randn(3, 2, generator=draw).to(DEVICE) + 5
    slots = torch.randperm(40, generator=draw)[:24].view(4, 3, 2).to(DEVICE)
    slots[1], trunk[:, 1] = -1, torch.nan
    log_beta = torch.full((5, 8), 9.0, device=DEVICE)
    form(trunk, weight, bias, log_beta, slots)
    active = F.silu(trunk.double()).to(dtype).double()
    z = torch.einsum("lbw,lhw->blh", active, weight.double()) + bias.double()
    wanted = torch.full((40,), 9.0, device=DEVICE, dtype=torch.float64)
    for at in (0, 2, 3):
        wanted[slots[at]] = F.logsigmoid(z[at])
    error = log_beta.view(-1).double() / wanted - 1
    assert error.abs().max() < (2e-5 if dtype == torch.float32 else 2e-3)


def test_gates_of_all_layers_are_one_product_on_a_gpu() -> None:
    """The trunks lie together there; what each layer says by itself stays the same."""
    spec = make_spec(3, 2, HIDDEN, 2, 16)
    alone = make_random_gates(spec, d_gate=24).to(torch.device("cpu"), torch.float32)
    together = make_random_gates(spec, d_gate=24).to(torch.device("cpu"), torch.float32)
    together.stages = _together(together.layers)
    hidden = list(torch.randn(3, 5, HIDDEN))
    torch.testing.assert_close(
        together.before_readout(hidden), alone.before_readout(hidden), rtol=1e-5, atol=1e-5
    )
    for layer, x in enumerate(hidden):
        assert torch.equal(together.logits(layer, x), alone.logits(layer, x))
    assert together.fingerprint() == alone.fingerprint()
    wider = make_random_gates(make_spec(1, 2, HIDDEN, 2, 16), d_gate=32)
    assert not _together([*alone.layers, *wider.layers])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("shape", "norm"), [(s, not norm) for s, norm in NORMED], ids=str)
def test_formulas_in_float64(
    form: Callable[..., Tensor], dtype: torch.dtype, norm: bool, shape: tuple[int, ...]
) -> None:
    """Norm and rotation by complex numbers: written out from the definitions."""
    head_dim, heads, _, rot = shape
    case = Case.make(*shape, dtype, norm, seed=1)
    query, pool, slots = case.ours(form)
    fused = case.qkv().double().view(3, -1, head_dim)
    turned = fused[:, :-heads].clone()
    if norm:
        scale = (turned.square().mean(-1, keepdim=True) + EPS).rsqrt()
        turned *= scale * case.layer.qk_norm.double()
    half = rot // 2
    cos, sin = (x.double()[:, None, half:] for x in case.rope)  # the unsigned half
    pair = torch.complex(turned[..., :half], turned[..., half:rot]) * torch.complex(cos, sin)
    turned[..., :half], turned[..., half:rot] = pair.real, pair.imag
    assert_heads_near(query, turned[:, :-heads], units(form, dtype, 3))
    assert_heads_near(pool.keys.flatten(0, 1)[slots], turned[:, -heads:], units(form, dtype, 3))
    assert torch.equal(pool.values.flatten(0, 1)[slots].double(), fused[:, -heads:])
    assert torch.equal(pool.position.view(-1)[slots], case.position.int()[:, None].expand(3, heads))
    assert not pool.modality.view(-1)[slots].any()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_idle_batch_slots_do_nothing(form: Callable[..., Tensor], dtype: torch.dtype) -> None:
    """Not even NaN inputs of a padding batch slot leave a trace, in the pool or in a neighbour."""
    case = Case.make(64, 2, 4, 64, dtype, True)
    want_query, want, _ = case.ours(form)
    cache = copy.deepcopy(case.cache)
    slots = cache.append(case.seqs, 1)[:, 0, :, 0]
    nothing = torch.full_like(slots[:1], -1)
    batch_slots = [0, None, 1, 2, None]

    def pad(x: Tensor, idle: float) -> Tensor:
        filler = torch.full_like(x[:1], idle)
        return torch.cat(
            [
                filler if batch_slot is None else x[batch_slot : batch_slot + 1]
                for batch_slot in batch_slots
            ]
        )

    nan = float("nan")
    query = form(
        pad(case.qkv(), nan),
        tuple(pad(x, nan) for x in case.rope),
        case.layer.qk_norm,
        EPS,
        cache.pool,
        torch.cat([slots[:1], nothing, slots[1:], nothing]),
        pad(case.position, 5),
    )
    assert torch.equal(query[[0, 2, 3]], want_query)
    for name in COLUMNS:
        assert torch.equal(getattr(cache.pool, name), getattr(want, name)), name


@pytest.mark.parametrize("form", FORMS)
def test_every_batch_slot_idle(form: Callable[..., Tensor]) -> None:
    case = Case.make(32, 2, 2, 32, torch.float32, True)
    cache = copy.deepcopy(case.cache)
    slots = torch.full((3, 2), -1, device=DEVICE)
    form(
        case.qkv(),
        case.rope,
        case.layer.qk_norm,
        EPS,
        cache.pool,
        slots,
        case.position,
    )
    for name in COLUMNS:
        assert torch.equal(getattr(cache.pool, name), getattr(case.cache.pool, name)), name


@pytest.mark.parametrize("form", FORMS)
def test_slices_of_one_wide_product(form: Callable[..., Tensor]) -> None:
    """Another product can lie beside qkv, and slots beside those of other layers."""
    case = Case.make(64, 2, 4, 64, torch.float16, True)
    want_query, want, _ = case.ours(form)
    wide = torch.cat([case.hidden[:, :5], case.qkv(), case.hidden], 1)
    end = 5 + case.qkv().shape[1]
    cache = copy.deepcopy(case.cache)
    slots = cache.append(case.seqs, 1)[:, 0, :, 0]
    slots = torch.stack([slots + 1, slots, slots + 2], 1)[:, 1]
    query = form(
        wide[:, 5:end],
        case.rope,
        case.layer.qk_norm,
        EPS,
        cache.pool,
        slots,
        case.position,
    )
    assert torch.equal(query, want_query)
    for name in ("keys", "values"):
        assert torch.equal(getattr(cache.pool, name), getattr(want, name)), name


@pytest.mark.parametrize("form", GATES)
@pytest.mark.parametrize("width", [1, 1025])
def test_log_beta_of_saturated_gates(form: Callable[..., None], width: int) -> None:
    """logsigmoid(z) to float32 for z from -200 to 60: at 18 it is -1.52e-8, not 0."""
    biases = [-200.0, -60.0, -18.3, -1.0, -1e-3, 0.0, 0.7, 1.0, 8.1, 17.9, 18.0, 30.0, 40.0, 60.0]
    heads = len(biases)
    bias = torch.tensor(biases, device=DEVICE)[None]
    # A trunk whose terms cancel: 2 silu(1) w - 2 silu(1) w, or nothing at all.
    trunk = torch.zeros(1, 3, width, device=DEVICE)
    trunk[..., 0] = trunk[..., -1] = 1.0 if width > 1 else 0.0
    weight = torch.zeros(1, heads, width, device=DEVICE)
    weight[..., 0], weight[..., -1] = 2.0, -2.0
    slots = torch.arange(3 * heads, device=DEVICE).view(3, 1, heads)
    log_beta = torch.zeros(8, 8, device=DEVICE)
    form(trunk, weight, bias, log_beta, slots)
    for head, z in enumerate(bias[0].tolist()):
        with mpmath.workdps(60):
            exact = -mpmath.log1p(mpmath.exp(-mpmath.mpf(z)))
            for got in log_beta.view(-1)[slots[:, 0, head]].tolist():
                assert abs(got - exact) <= 6 * 2.0**-24 * abs(exact), z


def test_dispatch_on_a_cpu_is_the_reference() -> None:
    if DEVICE.type != "cpu":
        pytest.skip("on a GPU the tests above compare both forms")
    case = Case.make(32, 2, 2, 16, torch.float32, True)
    query, pool, slots = case.ours(store_layer)
    want_query, want = case.eager()
    store_log_beta(*case.readout(), pool.log_beta, slots[:, None])
    assert torch.equal(query, want_query) and torch.equal(pool.log_beta, want.log_beta)


@needs_compiler
@pytest.mark.parametrize("group", [1, 4, 8])
def test_store_fits_a_hopper_sm(group: int) -> None:
    """bf16, head_dim 128, q/k norm, a gate of 512: <= 80 registers, <= 1 KB shared, no spills."""
    (report,) = compiled("store", group=group)
    assert report.spills == 0 and report.registers <= 80 and report.shared <= 1024
    # 16 bytes per thread and access, in and out; and bfloat16 is rounded in between.
    assert "ld.global.v4.b32" in report.ptx and "st.global.v4.b32" in report.ptx
    assert "cvt.rn.bf16" in report.ptx


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kv", ["bf16", "int8", "k8v4", "int4"])
@pytest.mark.parametrize("dim", [32, 96])
def test_fewer_bits_are_those_of_torch(form: Callable[..., Tensor], kv: str, dim: int) -> None:
    """What is stored rounds the key and value that the plain form stores; idle slots do not."""
    if kv == "bf16" and is_triton(form) and DEVICE.type == "cpu":
        pytest.skip("the interpreter cuts bfloat16 off")
    case = Case.make(dim, 2, 2, dim, torch.float32, True)
    pool = PagePool(8, dim, 60, device=DEVICE, form=KVForm.of(kv, torch.float32, dim))
    slots = torch.tensor([[3, 70], [-1, -1], [11, 200]], device=DEVICE)
    qkv, rope, position = case.qkv()[:3], tuple(x[:3] for x in case.rope), case.position[:3]
    assert len(qkv) == 3
    gain = case.layer.qk_norm
    query = form(qkv, rope, gain, EPS, pool, slots, position)
    plain = PagePool(8, dim, 60, device=DEVICE)
    want = store_layer(qkv, rope, gain, EPS, plain, slots, position)
    turned = pool.form.rotate(want[[0, 2]])
    torch.testing.assert_close(query[[0, 2]], turned, rtol=0, atol=1e-5)
    live = slots[slots >= 0]
    for name in ("key", "value"):
        codec = getattr(pool.form, name)
        exact = pool.form.rotate(getattr(plain, f"{name}s").flatten(0, 1)[live])
        codes, scales = codec.encode(exact)
        found = getattr(pool, f"{name}s").flatten(0, 1)
        # Keys of both differ in their last bits; one between two steps may go to either side.
        ours = codec.decode(
            found[live], getattr(pool, f"{name}_scale").flatten(0, 1)[live], torch.float32
        )
        step = (codec.decode(codes, scales, torch.float32) - exact).abs().max() * 2.2 + 1e-6
        assert (ours - exact).abs().max() <= step
        same = (found[live] == codes).float().mean()
        assert same > 0.98, f"{name}: {same:.3f} of the codes are the same"
        left = torch.ones(60 * 8, dtype=torch.bool, device=DEVICE)
        left[live] = False
        assert not found[left].any(), "an idle batch slot has stored something"


# Appending an entry on the device: the same pages as the eager cache, in its order.


APPEND_FORMS = forms("append", "make_room")
LENGTHS = torch.tensor([[[0, 7, 8], [15, 16, 1]], [[8, 8, 8], [8, 8, 8]], [[9, 3, 0], [0, 6, 24]]])


def batch_slots(seqs: list[int]) -> Tensor:
    return torch.tensor(seqs, device=DEVICE)


def eager_slots(cache: RaggedCache, seqs: list[int]) -> Tensor:
    """Return what the eager cache hands out, with -1 in idle batch slots."""
    slots = torch.full((len(seqs), cache.layers, cache.kv_heads), -1)
    live = [seq for seq in seqs if seq >= 0]
    if live:
        slots[torch.tensor(seqs) >= 0] = cache.append(torch.tensor(live), 1)[..., 0]
    return slots


@pytest.mark.parametrize("form", APPEND_FORMS)
@pytest.mark.parametrize("page", [1, 8, 16])
def test_slots_and_pages_are_those_of_the_eager_cache(form: Any, page: int) -> None:
    """Rounds of appends to changing batches, in any order, with idle batch slots between."""
    lengths = LENGTHS // 8 if page == 1 else LENGTHS * page // 8
    cache = eager_cache(lengths, page, pages=300, width=4 if page > 1 else 20)
    rows, columns = to_device(cache)
    room = empty_room(4, rows)
    batches = [[2, -1, 0, 1], [-1, -1, 1, -1], [0, 1, 2, -1], [-1] * 4]
    for number in range(3 if is_triton(form) else 12):
        seqs = batches[number % len(batches)]
        slots = form(room, rows, batch_slots(seqs))
        assert slots is room.slots
        assert torch.equal(slots.cpu(), eager_slots(cache, seqs))
        assert_same(cache, rows, columns)
    assert int(room.error) == 0


@pytest.mark.parametrize("form", APPEND_FORMS)
def test_an_idle_batch_changes_nothing(form: Any) -> None:
    rows, _ = to_device(eager_cache(LENGTHS, 8, pages=40, width=4))
    room, before = empty_room(2, rows), snapshot(rows)
    room.slots.zero_()
    assert form(room, rows, batch_slots([-1, -1])).eq(-1).all()
    assert unchanged(before, rows) and int(room.error) == 0


@pytest.mark.parametrize("form", APPEND_FORMS)
def test_the_last_free_page_is_used(form: Any) -> None:
    """Batch slots 1 and 0 take 6 and 3 pages; the table's last column is used too."""
    held = int(((LENGTHS + 7) // 8).sum())
    cache = eager_cache(LENGTHS, 8, pages=held + 9, width=3)
    rows, columns = to_device(cache)
    room = empty_room(2, rows)
    assert torch.equal(form(room, rows, batch_slots([1, 0])).cpu(), eager_slots(cache, [1, 0]))
    assert int(rows.top) == 0 and int(room.error) == 0
    assert_same(cache, rows, columns)


@pytest.mark.parametrize("form", APPEND_FORMS)
@pytest.mark.parametrize("why", ["a page short", "a column short"])
def test_a_refused_append_changes_nothing_until_the_host_has_read_it(form: Any, why: str) -> None:
    held, seqs = int(((LENGTHS + 7) // 8).sum()), [1, -1, 0]
    cache = eager_cache(LENGTHS, 8, pages=held + 8, width=4)
    if why == "a column short":
        cache = eager_cache(LENGTHS, 8, pages=100, width=3)
        seqs = [1, -1, 2]  # a row of sequence 2 fills its 3 columns
    else:
        with pytest.raises(BudgetError):
            eager_slots(cache, seqs)
    rows, columns = to_device(cache)
    room, before = empty_room(3, rows), snapshot(rows)
    assert form(room, rows, batch_slots(seqs)).eq(-1).all()
    assert int(room.error) == 1 and unchanged(before, rows)
    # Sequence 1 alone would fit, but the step before it has not been made up for.
    assert form(room, rows, batch_slots([1, -1, -1])).eq(-1).all()
    assert int(room.error) == 1 and unchanged(before, rows)
    room.error.zero_()
    assert torch.equal(
        form(room, rows, batch_slots([1, -1, -1])).cpu(), eager_slots(cache, [1, -1, -1])
    )
    assert int(room.error) == 0
    assert_same(cache, rows, columns)


@pytest.mark.parametrize("form", APPEND_FORMS)
def test_more_rows_than_a_warp_and_an_odd_number_of_batch_slots(form: Any) -> None:
    source = torch.Generator().manual_seed(3)
    lengths = torch.randint(0, 33, (5, 31, 10), generator=source) // 4 * 4
    cache = eager_cache(lengths, 8, pages=9000, width=6)
    rows, columns = to_device(cache)
    seqs = [4, 0, -1, 2, 1]
    assert torch.equal(
        form(empty_room(5, rows), rows, batch_slots(seqs)).cpu(), eager_slots(cache, seqs)
    )
    assert_same(cache, rows, columns)


@pytest.mark.parametrize("form", APPEND_FORMS)
def test_more_batch_slots_than_are_looked_at_together(form: Any) -> None:
    """70 of them, of which the kernel counts 64 at once: the last ones take pages behind those."""
    lengths = torch.arange(70)[:, None, None] % 3 * 4
    cache = eager_cache(lengths, 8, pages=300, width=4)
    rows, columns = to_device(cache)
    seqs = [*range(69, -1, -1)]
    assert torch.equal(
        form(empty_room(70, rows), rows, batch_slots(seqs)).cpu(), eager_slots(cache, seqs)
    )
    assert_same(cache, rows, columns)


@needs_compiler
def test_kernels_fit_a_hopper_sm() -> None:
    """36 layers of 8 heads, 64 batch slots."""
    count, take = compiled("append", batch=64)
    assert count.registers <= 40 and count.shared <= 64 and not count.spills
    assert take.registers <= 64 and take.shared <= 4096 and take.spills <= ONE_SPILL
