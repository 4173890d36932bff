"""The state for a process that joins is sent in portions of limited size."""

from __future__ import annotations

import pytest
import torch

from unisono.train.recovery import state_transfer


@pytest.mark.parametrize("limit", [1, 7, 64, 1 << 20])
def test_portions_contain_all_bytes(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(state_transfer, "PORTION_BYTES", limit)
    state = [torch.arange(10), torch.empty(0, 3), torch.tensor(2.5), torch.ones(5, 3).t(), torch.tensor([True])]
    portions = list(state_transfer._portions(state))
    assert all(sum(map(len, portion)) <= limit for portion in portions)
    sent = b"".join(bytes(piece.tolist()) for portion in portions for piece in portion)
    assert sent == b"".join(tensor.contiguous().numpy().tobytes() for tensor in state)


def test_portions_share_the_memory_of_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_transfer, "PORTION_BYTES", 5)
    room = [torch.zeros(3), torch.zeros((), dtype=torch.int64)]
    for portion in state_transfer._portions(room):
        for piece in portion:
            piece.fill_(1)
    assert room[1].item() == 0x0101010101010101
    assert room[0].view(torch.uint8).tolist() == [1] * 12
