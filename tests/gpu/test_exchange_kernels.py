"""On a GPU, kernels of exchanges have the bits of torch's operations, and an exchange has a stream of its own."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.conftest import Gpu
from tests.ranks.test_exchange import expected_gradients, parameters, step
from tests.stream_races import SimulatedStreams
from unisono.distributed.process_group import ProcessGroup
from unisono.exchange.kernels.device_kernels import REFERENCE, choose_kernels, unequal_kernels
from unisono.exchange.kernels.exchange_stream import ExchangeStream
from unisono.exchange.tree.tree_exchange import TreeExchange


def test_triton_kernels_are_in_use(gpu: Gpu) -> None:
    if gpu.dry:
        assert unequal_kernels(REFERENCE, gpu.device) == []
        return
    kernels, reason = choose_kernels(gpu.device)
    assert reason == ""
    assert unequal_kernels(kernels, gpu.device) == []


@pytest.mark.parametrize(("virtual_ranks", "pieces"), [(8, 1), (8, 3), (5, 2)])
def test_gradients_are_stored_and_added_by_bucket(gpu: Gpu, virtual_ranks: int, pieces: int) -> None:
    """The leaves are computed on the CPU, so the sum must be the CPU's, to the bit."""
    counts = dict.fromkeys(range(virtual_ranks), pieces)
    params = [torch.nn.Parameter(p.detach().to(gpu.device)) for p in parameters()]
    exchange = TreeExchange(params, virtual_ranks, ProcessGroup(0, 1, gpu.device))
    assert all(exchange.layout.batched) != gpu.dry
    for sparsely in (False, True):
        found = step(exchange, params, [(0, virtual_ranks)], counts, 0, sparsely)
        assert found == expected_gradients(virtual_ranks, counts, sparsely)


def test_a_block_waits_for_the_loop_and_the_loop_for_it(gpu: Gpu) -> None:
    """Long kernels on both streams: without the waits, the sums would be read before they are written."""
    if gpu.dry:
        stream = ExchangeStream([gpu.device], SimulatedStreams())
        stream._stream = SimulatedStreams.Stream()
    else:
        stream = ExchangeStream([gpu.device])
    expected = torch.full((), 20.0)
    for _ in range(20):
        expected.mul_(1.5).sub_(0.5)
    size = 1 << (12 if gpu.dry else 26)
    for _ in range(20):
        x = torch.zeros(size, device=gpu.device)
        for _ in range(20):
            x.add_(1.0)
        with stream.block():
            for _ in range(20):
                x.mul_(1.5).sub_(0.5)
        stream.join()
        assert x.clone().eq(expected.item()).all()
