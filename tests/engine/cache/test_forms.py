"""Keys and values in fewer bits: the rounding, and what engines and session files make of it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from mmkv.engine.budget import Budget
from mmkv.engine.cache import KVForm
from mmkv.engine.cache.choice import best_at, choose_form
from mmkv.engine.cache.forms import FORMS, Codec, _matrix, hadamard
from mmkv.engine.cache.layout import Layout
from mmkv.engine.errors import PolicyError, SessionError
from mmkv.engine.runtime import Runtime
from mmkv.engine.session_file import _digest
from tests.support.sessions import LATER, PICTURES, assert_same_rows, load, run, text_ids, turn

ROUNDED = ("int8", "k8v4", "int4")
FINITE = st.floats(-65504, 65504, width=32)


VECTORS = st.lists(FINITE, min_size=2, max_size=48).map(lambda x: x[len(x) % 2 :])  # even


@settings(max_examples=80, deadline=None)
@given(
    vector=VECTORS,
    power=st.integers(-8, 0),
    bits=st.sampled_from([8, 4]),
)
def test_no_feature_is_off_by_more_than_half_a_step(
    vector: list[float], power: int, bits: int
) -> None:
    codec, x = Codec(bits), torch.tensor(vector) * 10.0**power
    codes, scales = codec.encode(x)
    error = (codec.decode(codes, scales, torch.float32) - x).abs()
    # Half a step, and what float32 itself rounds and loses near 0.
    assert bool((error <= 0.5 * scales[0].float() + 4e-7 * x.abs().max() + 1e-37).all())
    assert codes.nbytes == len(vector) * bits // 8


@settings(max_examples=80, deadline=None)
@given(vector=VECTORS, power=st.integers(-3, 0), bits=st.sampled_from([8, 4]))
def test_what_was_rounded_is_rounded_to_the_same_codes(
    vector: list[float], power: int, bits: int
) -> None:
    """Where float16 holds the scale to 11 bits, and codes of 4 bits reach from 0 to 15."""
    codec = Codec(bits)
    codes, scales = codec.encode(torch.tensor(vector) * 10.0**power)
    assume(float(scales[0]) >= 2**-14)
    if bits == 4:
        steps = torch.cat([codes & 15, codes >> 4])
        # Beyond that the zero point is so large that float32 rounds what is added to it.
        assume(int(steps.min()) == 0 and int(steps.max()) == 15)
        assume(abs(float(scales[1])) <= 256 * float(scales[0]))
    again = codec.encode(codec.decode(codes, scales, torch.float32))
    assert torch.equal(again[0], codes) and torch.equal(again[1], scales)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("size", [1e-44, 3e-45])
def test_a_scale_of_zero_has_codes_of_zero(size: float, bits: int) -> None:
    codes, scales = Codec(bits).encode(torch.tensor([size, 0.0]))
    assert not codes.any() and not scales.any()


def test_the_matrix_of_a_rotation_is_made_on_the_cpu() -> None:
    with torch.device("meta"):
        matrix = _matrix.__wrapped__(8, torch.device("cpu"))
    assert torch.equal(matrix, hadamard(torch.eye(8)))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("value", [0.0, 3.0, -3.0, 1e-9, -1e-9])
def test_vectors_of_one_number(value: float, bits: int) -> None:
    """There is no range to make a step of."""
    x = torch.full((4,), value)
    found = Codec(bits).decode(*Codec(bits).encode(x), torch.float32)
    assert (found - x).abs().max() <= max(6e-8, 1e-3 * abs(value))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf, -1e8, 1e8])
def test_what_is_not_finite_or_out_of_range_stays_no_number(wrong: float, bits: int) -> None:
    x = torch.tensor([[1.0, wrong, 2.0, 3.0], [1.0, 2.0, 3.0, 4.0]])
    found = Codec(bits).decode(*Codec(bits).encode(x), torch.float32)
    assert not found[0].isfinite().any() and found[1].isfinite().all()


@pytest.mark.parametrize("size", [1, 2, 32, 64, 128, 80, 96, 5])
def test_the_rotation_is_orthonormal_and_its_own_inverse(size: int) -> None:
    matrix = hadamard(torch.eye(size)).double()
    assert torch.allclose(matrix @ matrix, torch.eye(size).double(), atol=1e-6)
    assert torch.equal(matrix, matrix.T)
    block = size & -size
    assert int((matrix != 0).sum()) == size * block


def test_codes_in_pairs_need_an_even_head_dim() -> None:
    for name in ("k8v4", "int4"):
        with pytest.raises(PolicyError, match=f"kv '{name}' .* head_dim is 5; choose int8"):
            KVForm.of(name, torch.float32, 5)
    assert KVForm.of("int8", torch.float32, 5).name == "int8"


def test_bf16_is_the_plain_form_of_a_bfloat16_model() -> None:
    assert KVForm.of("bf16", torch.bfloat16, 32).plain
    assert not KVForm.of("bf16", torch.float32, 32).plain


# Bytes of one entry with D = 32: codes and scales of both, log_beta, position, modality.
BYTES = {"auto": 265, "bf16": 137, "int8": 77, "k8v4": 63, "int4": 49}


@pytest.mark.parametrize("kv", FORMS)
def test_memory_and_budgets_count_the_bytes_of_the_form(kv: str, folders: dict[str, Path]) -> None:
    engine = load(folders["vl"], kv=kv, budget="12KiB", page_size=8, evict_every=1)
    pool = engine.cache.pool
    assert pool.page_bytes == 8 * BYTES[kv]
    session = engine.session()
    session.prefill(PICTURES)
    run(session, text_ids(45, 1))
    memory = session.memory()
    assert memory.kv_bytes == memory.pages * pool.kv_page_bytes
    held = engine.cache._pages(session.seq)
    assert sum(column[held].nbytes for column in pool.columns()) == memory.pages * pool.page_bytes
    rows = engine.spec.rows
    assert 12 * 1024 - rows * pool.page_bytes < memory.pages * pool.page_bytes <= 12 * 1024
    assert session.entries == (12 * 1024 // pool.page_bytes) * 8 - rows * 7


def chosen(kv: str | None, budget: Budget, head_dim: int = 64, longest: int = 8192) -> str:
    layout = Layout(16, head_dim, torch.float32)
    form, note = choose_form(kv, budget, 90, longest, layout)
    assert (note is None) == (kv is not None or budget.kind != "bytes")
    assert note is None or note.startswith(f"kv {form.name}: a budget of ")
    return form.name


def test_only_a_budget_in_bytes_chooses_a_form() -> None:
    """90 rows as in SmolLM2, whose entries take 265 bytes in bfloat16 and 111 in k8v4."""
    for budget in (Budget.of(1), Budget.of(256), Budget.fraction(0.01)):
        assert chosen(None, budget) == "auto"
        assert chosen("int4", budget) == "int4"
    # So many entries stay in k8v4, for the last of a row's pages of 16 may hold one alone.
    stay = {pages * 16 - 15: Budget.bytes(90 * pages * 16 * 111) for pages in (1, 2, 3, 5, 6, 300)}
    assert {n: chosen(None, budget) for n, budget in stay.items()} == {
        1: "int4",
        17: "int4",  # the bytes of 7 in bfloat16
        33: "k8v4",  # of 14
        65: "k8v4",  # of 27
        81: "int8",  # of 34
        4785: "int8",
    }
    for kv in FORMS:
        assert chosen(kv, stay[33]) == kv, "what the user names counts"
    assert chosen(None, stay[33], head_dim=5) == "int8"
    assert [best_at(n) for n in (12.9, 13, 31.9, 32)] == ["int4", "k8v4", "k8v4", "int8"]


def test_bytes_that_hold_the_whole_context_lose_no_bits() -> None:
    """So many that nothing is evicted, with the last page of each of 90 rows nearly empty."""

    def whole(positions: int) -> int:
        return math.ceil(90 * (positions + 15) / 16) * 16

    assert chosen(None, Budget.bytes(whole(8192) * 521)) == "auto"
    assert chosen(None, Budget.bytes(whole(8192) * 521 - 1)) == "bf16"
    assert chosen(None, Budget.bytes(whole(8192) * 265)) == "bf16"
    assert chosen(None, Budget.bytes(whole(8192) * 265 - 1)) == "int8"
    assert chosen(None, Budget.bytes(whole(40) * 521 - 1), longest=40) == "bf16"
    assert chosen(None, Budget.bytes(whole(40) * 521), longest=40) == "auto"


def test_an_engine_says_why_it_has_its_form(folders: dict[str, Path], tmp_path: Path) -> None:
    picked = load(folders["vl"], budget="12KiB", page_size=8, evict_every=1)
    name = picked.cache.pool.form.name
    assert name != "auto" and picked.form_note is not None
    held = picked.budget.entries(picked.spec.rows, 0, 8, picked.cache.pool.page_bytes)
    assert f"holds {held / picked.spec.rows:,.0f} entries per row" in picked.form_note
    plain = load(folders["vl"], budget=10, evict_every=1)
    assert plain.form_note is None and plain.cache.pool.form.name == "auto"
    session = picked.session()
    session.prefill(PICTURES)
    session.save(tmp_path / "session")
    with pytest.raises(SessionError, match=f"load it with kv={name}"):
        plain.load_session(tmp_path / "session")
    other = load(folders["vl"], kv=name, budget=10, evict_every=1)
    read, _ = other.load_session(tmp_path / "session")
    assert_same_rows(session, read)
    # Policies that never evict have nothing to gain.
    assert load(folders["vl"], budget="12KiB", policy="full").cache.pool.form.name == "auto"
    # A session's own budget does not change the engine's form.
    assert plain.session(Budget.bytes(30_000)).engine.cache.pool.form.name == "auto"


@pytest.mark.parametrize(
    ("kv", "policy", "every"),
    [
        *((kv, "dbtrimkv", 8) for kv in FORMS),
        ("int8", "dbtrimkv", 1),
        ("k8v4", "snapkv", 8),
    ],
)
def test_pages_never_pass_a_budget_in_bytes(
    kv: str, policy: str, every: int, folders: dict[str, Path]
) -> None:
    """After every call, in torch and in C, with pages of 4 entries that come and go often."""
    limit = 9_000 + 4 * (every - 1) * BYTES[kv]  # 4 rows
    options = {"kv": kv, "policy": policy, "evict_every": every, "page_size": 4}
    for native in (True, False):
        engine = load(folders["vl"], budget=f"{limit}B", **options)
        if not native:
            engine.backends.cpu.switch_off()
        session, pool = engine.session(), engine.cache.pool
        peak = 0
        calls = [PICTURES, *text_ids(10, 1).tolist(), LATER, *text_ids(10, 2).tolist()]
        for call in calls:
            session.decode(call) if isinstance(call, int) else session.prefill(call)
            held = engine.cache._pages(session.seq)
            taken = sum(column[held].nbytes for column in pool.columns())
            assert taken == session.memory().pages * pool.page_bytes <= limit
            peak = max(peak, taken)
        assert session.memory().evicted
        assert limit - peak < 2 * engine.spec.rows * pool.page_bytes, "much is left unused"
        session.close()


@pytest.mark.parametrize("kv", [name for name in FORMS if name != "auto"])
def test_a_prompt_reads_what_decoding_reads(kv: str, folders: dict[str, Path]) -> None:
    """In whichever pass an entry comes, all queries read it as it is stored."""
    engine = load(folders["text"], kv=kv, policy="full", prefill_chunk=7)
    tokens = text_ids(20, 3)
    at_once, stepwise = engine.session(), engine.session()
    logits = at_once.prefill({"input_ids": tokens[None]})
    one = stepwise.prefill({"input_ids": tokens[None, :1]})
    for token in tokens[1:].tolist():
        one = stepwise.decode(token)
    # A key between two steps may go to either side.
    assert (logits - one).abs().max() < 0.02 * logits.abs().max()


@pytest.mark.parametrize("kv", ROUNDED)
def test_write_gates_work_in_fewer_bits(kv: str, folders: dict[str, Path]) -> None:
    """Their prefill reads the chunk's own entries from the cache; so does decoding."""
    engine = load(folders["text"], kv=kv, policy="wgkv:window=4,threshold=0.0", budget=1000)
    plain = load(folders["text"], kv=kv, policy="full")
    inputs = {"input_ids": text_ids(20, 3)[None]}
    ours, theirs = engine.session().prefill(inputs), plain.session().prefill(inputs)
    assert (ours - theirs).abs().max() < 0.02 * theirs.abs().max()


def test_bf16_is_the_form_auto_of_a_bfloat16_model(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    engines = {
        kv: Runtime.from_pretrained(folders["text"], device="cpu", dtype="bfloat16", kv=kv)
        for kv in ("auto", "bf16", "int8")
    }
    for kv, other in (("auto", "bf16"), ("bf16", "auto")):
        session = engines[kv].session()
        session.prefill({"input_ids": text_ids(20, 1)[None]})
        session.save(tmp_path / kv)
        read, _ = engines[other].load_session(tmp_path / kv)
        assert_same_rows(session, read)
        assert torch.equal(session.decode(5), read.decode(5))
        with pytest.raises(SessionError, match=f"load it with kv={kv}"):
            engines["int8"].load_session(tmp_path / kv)


def without_forms(path: Path) -> None:
    """Make a session file what it was before there were forms."""
    with safe_open(path, framework="pt") as file:
        metadata, names = file.metadata(), file.keys()
        tensors = {name: file.get_tensor(name) for name in names if "scale" not in name}
    identity = json.loads(metadata["identity"])
    del identity["kv"], metadata["digest"]
    metadata["identity"] = json.dumps(identity)
    metadata["digest"] = _digest(tensors, metadata)
    save_file(tensors, path, metadata=metadata)


def test_files_from_before_there_were_forms_load(folders: dict[str, Path], tmp_path: Path) -> None:
    engine = load(folders["vl"])
    session = engine.session()
    session.prefill(PICTURES)
    session.save(tmp_path / "session")
    without_forms(tmp_path / "session")
    read, _ = engine.load_session(tmp_path / "session")
    assert_same_rows(session, read)
    assert torch.equal(session.prefill(LATER), read.prefill(LATER))
    with pytest.raises(SessionError, match="saved with kv auto, this engine has int4"):
        load(folders["vl"], kv="int4").load_session(tmp_path / "session")


def test_policies_read_the_model_s_keys_as_far_as_they_are_kept(
    folders: dict[str, Path],
) -> None:
    """Rotated back, so that they stand beside those that were stored whole."""

    def keys(kv: str) -> torch.Tensor:
        engine = load(folders["text"], kv=kv, policy="keydiff", budget=1000)
        session = engine.session()
        session.prefill(turn(20))
        first = session.view().row < engine.spec.num_kv_heads
        return session.view().keys()[first]  # later layers read states that were rounded before

    exact = keys("auto")
    for name, most in (("int8", 0.02), ("k8v4", 0.02), ("int4", 0.2)):
        error = (keys(name) - exact).norm(dim=-1) / exact.norm(dim=-1)
        assert 0 < float(error.mean()) < most, name
