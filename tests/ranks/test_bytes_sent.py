"""Bytes that a process sends for gradients, as reported in result.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ranks.test_same_bits import results
from tests.ranks.training import settings
from unisono.config import CompressSettings, ParallelSettings

# 12 x 32 + 32 + 32 x 5 + 5 elements; in buckets each parameter starts at a multiple of 16, and there are two chunks
ELEMENTS, PADDED = 581, 608


@pytest.mark.parametrize(
    ("changes", "sent"),
    [
        ({}, 4 * PADDED),  # half of a partial sum there, half of the sum back
        ({"exchange": "allreduce"}, 4 * PADDED),
        ({"exchange": "ddp"}, 4 * ELEMENTS),
        ({"compress": CompressSettings(kind="bf16", groups=2)}, 2 * 1024),  # in blocks of 256
        ({"parallel": ParallelSettings(shard=2, reshard="step")}, 4 * PADDED),
    ],
)
def test_bytes_of_two_processes(tmp_path: Path, changes: dict[str, Any], sent: int) -> None:
    config = settings(steps=2, batch=16, **changes)
    for run in results(tmp_path, 2, "mlp", config):
        assert run["result"]["bytes_per_step"] == sent
        assert run["result"].get("bytes_uncompressed") in (None, 4 * 1024)


def test_wide_sums_send_twice_as_much_once_their_grid_is_known(tmp_path: Path) -> None:
    (first, _) = results(tmp_path, 2, "mlp", settings(steps=1, exchange="wide"))
    (four, _) = results(tmp_path, 2, "mlp", settings(steps=4, exchange="wide"))
    assert first["result"]["bytes_per_step"] > 2 * 8 * PADDED
    assert 4 * four["result"]["bytes_per_step"] - first["result"]["bytes_per_step"] == 3 * 8 * PADDED


def test_one_process_sends_nothing(tmp_path: Path) -> None:
    for changes in ({}, {"virtual_ranks": 1}, {"exchange": "ddp"}, {"compress": CompressSettings(kind="int8")}):
        (run,) = results(tmp_path, 1, "mlp", settings(steps=1, **changes))
        assert run["result"]["bytes_per_step"] == 0
