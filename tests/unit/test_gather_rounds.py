"""An all-gather in log2(n) rounds: every process ends with all blocks, and received each of them once."""

from __future__ import annotations

import pytest

from unisono.plan.gather_rounds import gather_rounds


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8, 12, 16, 31, 33])
def test_all_processes_get_every_block_once(count: int) -> None:
    every = [gather_rounds(place, count) for place in range(count)]
    have = [{place} for place in range(count)]
    for k in range((count - 1).bit_length()):
        before = [set(blocks) for blocks in have]
        for place, rounds in enumerate(every):
            now = rounds[k]
            assert every[now.source][k].to == place
            assert every[now.source][k].sent == now.received
            received = {number for numbers in now.received.ranges() for number in numbers}
            assert received <= before[now.source]
            assert not received & have[place]
            have[place] |= received
    assert have == [set(range(count))] * count
    assert [len(rounds) for rounds in every] == [(count - 1).bit_length()] * count
