"""The fake card refuses what a real one refuses, and replays what a real one would."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mmkv.engine.backends.cuda.kernels.pointwise import gated
from tests.support.fake_cuda import DeviceError, Graph, fake_cuda


def on_card(*values: float) -> Tensor:
    return torch.tensor(values).to("cuda")


WRONG: dict[str, Callable[[Tensor], object]] = {
    "a product with a tensor of the CPU's": lambda x: x @ torch.ones(3),
    "rows of it": lambda x: x.index_select(0, torch.tensor([0])),
    "values put into it": lambda x: x.__setitem__(torch.tensor([0, 1]), torch.ones(2)),
    "a kernel over a tensor of the CPU's": lambda x: gated(x, torch.ones(1)),  # type: ignore[arg-type]
    "numpy": lambda x: x.numpy(),
}


@pytest.mark.parametrize("what", WRONG)
def test_devices_do_not_mix(what: str) -> None:
    with fake_cuda(), pytest.raises((DeviceError, TypeError)):
        WRONG[what](on_card(1.0, 2.0, 3.0))


READS: dict[str, Callable[[Tensor], object]] = {
    "a number": lambda x: x.sum().item(),
    "a truth": lambda x: bool((x > 0).all()),
    "a list": lambda x: x.tolist(),
    "a copy": lambda x: x.cpu(),
    "places": lambda x: (x > 1).nonzero(),
    "a mask": lambda x: x[x > 1],
    "repeats": lambda x: torch.repeat_interleave((x > 1).long()),
    "numbers of the host": lambda x: x.copy_(torch.zeros(3)),
    "a new tensor": lambda x: torch.tensor([1, 2], device=x.device),
}


@pytest.mark.parametrize("what", READS)
def test_what_waits_is_counted_and_no_part_of_a_graph(what: str) -> None:
    with fake_cuda() as card:
        x = on_card(1.0, 2.0, 3.0)
        before = card.reads.total() + card.uploads.total()
        READS[what](x)
        assert card.reads.total() + card.uploads.total() == before + 1
        with (
            pytest.raises(DeviceError, match="not permitted when stream is capturing"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            READS[what](x)


def test_a_replay_computes_anew_with_the_numbers_of_the_capture() -> None:
    with fake_cuda() as card:
        x, factor = on_card(1.0, 2.0), 3.0
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            made = x * factor + torch.arange(2, device="cuda")
            x += 1
        x.copy_(torch.tensor([10.0, 20.0]))
        factor = 5.0
        graph.replay()
        assert made.tolist() == [30.0, 61.0] and x.tolist() == [11.0, 21.0]
        assert (card.replays, card.captured) == (1, 1) and isinstance(graph, Graph)


def test_memory_that_is_gone_is_no_longer_read() -> None:
    with fake_cuda():
        x, other = on_card(1.0), on_card(2.0)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            made = x + other
        graph.replay()
        assert made.tolist() == [3.0]
        del other
        with pytest.raises(DeviceError, match="freed"):
            graph.replay()


def test_everything_is_as_it_was_afterwards() -> None:
    before = torch.cuda.is_available(), torch.cuda.CUDAGraph, torch.cuda.synchronize
    with fake_cuda():
        assert torch.cuda.is_available() and on_card(1.0).device == torch.device("cuda", 0)
    assert (torch.cuda.is_available(), torch.cuda.CUDAGraph, torch.cuda.synchronize) == before
    assert torch.ones(2).device.type == "cpu"
