"""An exchange on a stream of its own gives the same sum, and waits for all that it uses (simulated streams)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ranks.test_exchange import expected_gradients, on_hosts, parameters, step, with_bucket_bytes
from tests.stream_races import RaceDetector, SimulatedStreams
from unisono.distributed.init import join_process_group as join
from unisono.environment import World
from unisono.exchange.kernels.exchange_stream import ExchangeStream
from unisono.exchange.tree.tree_exchange import TreeExchange
from unisono.plan.assignment import assign_evenly
from unisono.testing import run_ranks

VIRTUAL_RANKS = 6


class OnStream(ExchangeStream):
    """The stream of a CUDA device, simulated on the CPU."""

    def __init__(self, streams: SimulatedStreams, broken: str) -> None:
        super().__init__([torch.device("cpu")], streams)
        self._stream = streams.Stream()
        self.broken = broken
        self.blocks = 0

    def block(self) -> Any:
        self.blocks += 1
        if self.broken == "no wait before":
            return self._streams.stream(self._stream)
        return super().block()

    def join(self) -> None:
        if self.broken != "no wait after":
            super().join()


def run_with_streams(world: World, broken: str) -> Any:
    """Run three steps with simulated streams; return the gradients, and the races that were found."""
    streams = SimulatedStreams()
    stream = OnStream(streams, broken)
    with join(world) as group:
        params = parameters()
        hosts = on_hosts(group, "abcdefgh")  # messages, as with NCCL; no shared memory

        class OnOwnStream(TreeExchange):
            def _build_transport(self, plan: Any) -> Any:
                transport = super()._build_transport(plan)
                transport.stream = stream
                return transport

        exchange = with_bucket_bytes(OnOwnStream(params, VIRTUAL_RANKS, hosts), 100)
        spans, counts = assign_evenly(VIRTUAL_RANKS, group.size), dict.fromkeys(range(VIRTUAL_RANKS), 2)
        with RaceDetector(streams) as detector:
            grads = [step(exchange, params, spans, counts, group.rank) for _ in range(3)]
    assert len(exchange.layout.buckets) > 2  # so that buckets are added up inside backward
    assert stream.blocks >= 3 * len(exchange.layout.buckets)
    assert detector.operations > 100
    return grads, detector.races


@pytest.mark.parametrize("size", [2, 3])
def test_the_exchange_waits_for_what_it_uses(size: int) -> None:
    expected = expected_gradients(VIRTUAL_RANKS, dict.fromkeys(range(VIRTUAL_RANKS), 2))
    for grads, races in run_ranks(run_with_streams, size, ""):
        assert races == []
        assert grads == [expected] * 3


@pytest.mark.parametrize("broken", ["no wait before", "no wait after"])
def test_a_missing_wait_is_found(broken: str) -> None:
    for _, races in run_ranks(run_with_streams, 2, broken):
        assert races
