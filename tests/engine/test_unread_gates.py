"""Gates that a policy does not read are not computed; whoever asks for them still gets them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from mmkv.engine.backends.cuda.static_step import StaticStep
from mmkv.engine.model.gates import Gates, LayerGate
from mmkv.eval.measure.timing import gate_bytes
from tests.support.sessions import PICTURES, load, run, text_ids


@pytest.mark.parametrize("policy", ["full", "streamingllm", "snapkv", "dbtrimkv", "trimkv"])
def test_gates_are_computed_for_policies_that_read_them_only(
    policy: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On torch, in C and in the static step; ``log_beta`` of the entries is 0 without them."""
    reads = policy in ("dbtrimkv", "trimkv")
    engine = load(folders["vl"], policy=policy)
    asked = []
    logits = LayerGate.logits

    def counted(gate: LayerGate, hidden: Tensor) -> Tensor:
        asked.append(hidden.shape)
        return logits(gate, hidden)

    monkeypatch.setattr(LayerGate, "logits", counted)
    cpu = engine.backends.cpu
    session = engine.session(30 if engine.policy.evicts else None)
    session.prefill(PICTURES)
    run(session, text_ids(3, 1))
    native, cpu.decoder = cpu.decoder, None
    run(session, text_ids(3, 2))
    assert bool(asked) == reads
    assert bool(session.view().log_beta.any()) == reads
    assert native is None or (native._model.trunk > 0) == reads
    step = StaticStep(engine.model, engine.cache, 1, 4, (), False, 1)
    assert (step._readout(0, torch.zeros(1, engine.spec.hidden_size)) is not None) == reads
    assert (gate_bytes(engine) > 0) == reads


def test_gates_that_are_not_read_can_be_asked_for(folders: dict[str, Path]) -> None:
    """The same numbers as those of an engine that reads them."""
    ours, other = (load(folders["vl"], policy=policy) for policy in ("full", "dbtrimkv"))
    hidden = torch.randn(5, ours.spec.hidden_size)
    log_beta = ours.gates(1, hidden)
    assert log_beta.shape == (5, ours.spec.num_kv_heads) and bool((log_beta < 0).all())
    assert torch.equal(log_beta, other.gates(1, hidden))
    assert isinstance(ours._gates, Gates) and ours.decoder.gates is None


@pytest.mark.parametrize("weights", ["auto", "bf16", "int8"])
def test_trunks_are_rounded_beside_rounded_weights(weights: str, folders: dict[str, Path]) -> None:
    """To bfloat16, read by float32 states; files of sessions know the gates as they are stored."""
    engine = load(folders["vl"], policy="dbtrimkv", weights=weights, fresh=True)
    placed, stored = engine.decoder.gates, engine._gates
    assert placed is not None and stored is not None
    assert placed.fingerprint() == stored.fingerprint()
    (ours, _), (theirs, bias) = placed.layers[1].trunk[0], stored.layers[1].trunk[0]
    assert isinstance(theirs, Tensor)
    hidden = torch.randn(5, engine.spec.hidden_size)
    x, wanted = hidden.double(), stored.layers[1]
    for matrix, bias in wanted.trunk:
        assert isinstance(matrix, Tensor)
        held = matrix if weights == "auto" else matrix.bfloat16()
        x = torch.nn.functional.silu(x @ held.double().T + bias)
    z = x @ wanted.readout.double().T + wanted.bias
    torch.testing.assert_close(placed.logits(1, hidden).double(), z, rtol=1e-5, atol=1e-4)
    if weights == "auto":
        assert ours is theirs  # a change in place is seen
    else:
        assert (
            ours.dtype == torch.bfloat16
            if isinstance(ours, Tensor)
            else ours.nbytes < theirs.nbytes
        )
        again = placed.to(engine.device, engine.dtype)
        assert torch.equal(again.layers[1].trunk[0][0], theirs)
