"""All-reduce around a ring, as a collective compared with gloo's, and as an exchange."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks.training import settings, train
from unisono.config import ParallelSettings
from unisono.distributed.init import join_process_group as join
from unisono.distributed.process_group import wrap_peer_errors
from unisono.distributed.ring_allreduce import ring_all_reduce_, transfer_thread
from unisono.environment import World
from unisono.errors import PeerLostError
from unisono.exchange.ring import RingAllReduce
from unisono.testing import run_ranks

LENGTHS = (0, 1, 2, 3, 5, 64, 1000, 4099)
"""Some are shorter than the ring, and few divide evenly."""


def numbers(rank: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    g = torch.Generator().manual_seed(rank)
    return (torch.randn(length, generator=g) * 100).to(dtype)


def beside_gloo(world: World, dtype: torch.dtype, piece_bytes: int) -> list[tuple[float, list[float]]]:
    """Return for each length the relative difference from gloo's sum, and the sum."""
    told = []
    with join(world) as group:
        for length in LENGTHS:
            mine = numbers(group.rank, length, dtype)
            theirs = mine.clone()
            group.sum_(theirs)
            assert ring_all_reduce_(group, mine, piece_bytes) is mine
            apart = (mine - theirs).abs().max() / theirs.abs().max() if length else torch.zeros(1)
            told.append((float(apart), mine.tolist()))
    return told


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_the_sum_equals_gloos_to_rounding_and_is_the_same_on_all(size: int) -> None:
    for piece_bytes in (64, 2**20):  # many pieces in flight, and one
        first, *others = run_ranks(beside_gloo, size, torch.float32, piece_bytes)
        assert all(apart < 1e-6 for apart, _ in first), first
        assert all(other == first for other in others)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bfloat16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    limit = {torch.float64: 1e-14, torch.int64: 0.0, torch.bfloat16: 0.02}[dtype]
    for told in run_ranks(beside_gloo, 3, dtype, 100):
        assert all(apart <= limit for apart, _ in told)


def carried(world: World) -> list[float]:
    """Run several all-reduces in the thread while this process uses other collectives."""
    with join(world) as group:
        thread = transfer_thread(group)
        rows = [torch.full((1000 * (i + 1),), float(group.rank + i)) for i in range(5)]
        works = [thread.begin(row) for row in rows]
        told = [group.sum_(torch.ones(1)).item()]
        for work, row in zip(works, rows, strict=True):
            work.wait()
            told += row.unique().tolist()
        thread.close()
    return told


def test_a_thread_runs_them_in_order() -> None:
    assert run_ranks(carried, 3) == [[3.0, 3.0, 6.0, 9.0, 12.0, 15.0]] * 3


def alone(world: World) -> str:
    """End one process while the tensor of the other one is in progress."""
    context = join(world)
    group = context.__enter__()  # left without the others, as a dying process leaves
    if group.rank == 1:
        return ""
    work = transfer_thread(group).begin(torch.ones(10))
    try:
        with wrap_peer_errors("The test"):
            work.wait()
    except PeerLostError as error:
        return str(error)
    return "nothing"


def test_a_lost_peer_raises_in_wait() -> None:
    told, _ = run_ranks(alone, 2)
    assert "a process of the run is gone or silent" in told


# -- as an exchange


def results(folder: Path, size: int, kind: str, **changes: Any) -> list[dict[str, Any]]:
    return run_ranks(train, size, kind, settings(**changes), str(folder / f"{kind}-{size}-{len(changes)}"))


@pytest.mark.parametrize("kind", ["mlp", "gpt"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_run_agrees_with_the_tree_to_rounding_and_promises_that(tmp_path: Path, kind: str, size: int) -> None:
    tree = results(tmp_path, 1, kind)[0]
    for run in results(tmp_path, size, kind, exchange="ring"):
        assert run["losses"] == pytest.approx(tree["losses"], rel=1e-4)
        assert run["result"]["promise"] == "tolerance"
        assert "exchange=ring" in run["result"]["reason"]


def states(folder: Path, size: int, **changes: Any) -> set[str]:
    return {run["state"] for run in results(folder, size, "mlp", **changes)}


def test_all_processes_have_the_same_bits(tmp_path: Path) -> None:
    assert len(states(tmp_path, 3, exchange="ring")) == 1


def test_it_works_with_shards(tmp_path: Path) -> None:
    (tree,) = results(tmp_path, 1, "mlp")
    parallel = ParallelSettings(shard=2, reshard="step")
    for run in results(tmp_path, 4, "mlp", exchange="ring", parallel=parallel):
        assert run["losses"] == pytest.approx(tree["losses"], rel=1e-3)


def two_at_once(world: World) -> list[list[float]]:
    """Run two exchanges whose buckets are in progress at the same time, like those of pipeline stages."""
    with join(world) as group:
        exchanges = [RingAllReduce([torch.nn.Parameter(torch.zeros(50_000 + i))], 8, group) for i in range(2)]
        told = []
        for number in range(5):
            for i, exchange in enumerate(exchanges):
                exchange.begin((), {}, lambda: torch.zeros(0))
                exchange.enter(0, last=True)
                (exchange.params[0] * (group.rank + 10 * i + number)).sum().backward()
                exchange.leave()
            for exchange in exchanges:
                exchange.launch()
            for exchange in exchanges:
                assert exchange.finish(3.0)
                grad = exchange.params[0].grad
                assert grad is not None
                told.append(grad.unique().tolist())
                exchange.zero()
        for exchange in exchanges:
            exchange.close()
    return told


def test_two_exchanges_of_one_group_do_not_mix(tmp_path: Path) -> None:
    expected = [[1.0 + 10 * i + number] for number in range(5) for i in range(2)]
    assert run_ranks(two_at_once, 3) == [expected] * 3
