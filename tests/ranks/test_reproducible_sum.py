"""Sums of float64 on a grid: the same bits on any number of processes, for any gradients."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks import loops
from tests.ranks.test_exchange import on_hosts
from tests.ranks.test_same_bits import assert_same, results
from tests.ranks.training import settings, train
from unisono.config import ParallelSettings
from unisono.distributed.init import join_process_group as join
from unisono.distributed.process_group import ProcessGroup
from unisono.environment import World
from unisono.exchange import reproducible_sum
from unisono.exchange.float64_sums import HostSums
from unisono.exchange.reproducible_sum import UNKNOWN, ReproducibleSum, next_exponent
from unisono.plan.assignment import assign_evenly
from unisono.testing import run_ranks
from unisono.train.run import Run


@pytest.mark.ci
@pytest.mark.parametrize("kind", ["mlp", "gpt"])
def test_any_number_of_processes_gives_the_same_bits(tmp_path: Path, kind: str) -> None:
    config = settings(exchange="wide")
    runs = [run for size in (1, 2, 3, 5, 8) for run in results(tmp_path, size, kind, config, length=53)]
    assert_same(runs)
    assert runs[0]["result"]["promise"] == "exact"
    tree = results(tmp_path, 1, kind, settings(), length=53)[0]
    assert tree["losses"] == pytest.approx(runs[0]["losses"], rel=1e-4)
    assert tree["state"] != runs[0]["state"]


@pytest.mark.parametrize("changes", [{"batch": 24, "virtual_ranks": 4, "micro_batch": 2}, {"precision": "fp16"}])
def test_micro_batches_and_scaled_losses(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert_same(
        [run for size in (1, 3) for run in results(tmp_path, size, "mlp", settings(exchange="wide", **changes))]
    )


def test_shards_gathered_once_a_step_have_the_same_bits(tmp_path: Path) -> None:
    config = settings(exchange="wide", steps=4)
    shards = replace(config, parallel=ParallelSettings(shard=2, reshard="step"))
    assert_same([*results(tmp_path, 1, "mlp", config), *results(tmp_path, 4, "mlp", shards)])


def test_a_resume_continues_with_the_same_grids(tmp_path: Path) -> None:
    config = settings(exchange="wide")
    whole = results(tmp_path, 1, "gpt", config)[0]
    halves = str(tmp_path / "halves")
    run_ranks(partial(train, stop_after=3), 2, "gpt", config, halves)
    resumed = run_ranks(partial(train, resume=True), 3, "gpt", config, halves)
    assert {run["state"] for run in resumed} == {whole["state"]}


# -- gradients that cancel

LEAVES, WIDTH = 8, 1500


def cancelling(step: int, virtual_rank: int) -> torch.Tensor:
    """Return leaves that nearly cancel in pairs: the rest shows the order of additions."""
    g = torch.Generator().manual_seed(1000 * step + virtual_rank // 2)
    big = torch.randn(WIDTH, generator=g) * 10.0 ** torch.randint(-9, 10, (WIDTH,), generator=g)
    mine = torch.Generator().manual_seed(1000 * step + 500 + virtual_rank)
    return (big if virtual_rank % 2 else -big) + torch.randn(WIDTH, generator=mine) * 1e-6


def alternating_scale(step: int, virtual_rank: int) -> torch.Tensor:
    """Scale every other step by 10^12, so that no grid is right for the next step."""
    return cancelling(step, virtual_rank) * 10.0 ** (12 * (step % 2))


def run_sums(world: World, gradients: Any, steps: int = 4, hosts: str = "") -> list[list[float]]:
    with join(world) as group:
        p = nn.Parameter(torch.zeros(WIDTH))
        exchange = ReproducibleSum([p], LEAVES, on_hosts(group, hosts) if hosts else group)
        assert isinstance(exchange.sums, HostSums) == bool(hosts)
        spans = assign_evenly(LEAVES, group.size)
        mine = range(*spans[group.rank])
        out = []
        for step in range(steps):
            exchange.begin(spans, dict.fromkeys(mine, 1), lambda: torch.ones(len(mine), dtype=torch.float64))
            for v in mine:
                exchange.enter(v, last=v == mine[-1])
                (p * gradients(step, v)).sum().backward()
                exchange.leave()
            exchange.launch()
            exchange.finish(float(LEAVES))
            exchange.commit()
            assert p.grad is not None
            out.append(p.grad.tolist())
            exchange.zero()
        exchange.close()
        return out


@pytest.mark.parametrize("hosts", ["aabb", "abab"])
@pytest.mark.parametrize("gradients", [cancelling, alternating_scale])
def test_sums_host_by_host_have_the_same_bits(hosts: str, gradients: Any) -> None:
    alone = run_ranks(run_sums, 1, gradients)[0]
    assert run_ranks(run_sums, len(hosts), gradients, 4, hosts) == [alone] * len(hosts)


def plain_float64(step: int, order: Sequence[int]) -> list[float]:
    """Add leaves in float64 without a grid, in a given order."""
    total = torch.zeros(WIDTH, dtype=torch.float64)
    for v in order:
        total += cancelling(step, v).double()
    return (total / LEAVES).float().tolist()


def test_float64_alone_depends_on_the_order() -> None:
    """A counterexample: exact in practice is not exact."""
    there, back = plain_float64(0, range(LEAVES)), plain_float64(0, range(LEAVES)[::-1])
    assert 5 < sum(a != b for a, b in zip(there, back, strict=True)) < WIDTH


@pytest.mark.parametrize("gradients", [cancelling, alternating_scale])
def test_sums_on_a_grid_do_not_depend_on_the_order(gradients: Any) -> None:
    runs = [rank for size in (1, 3, 8) for rank in run_ranks(run_sums, size, gradients)]
    assert all(run == runs[0] for run in runs)


def exact_sums(step: int, gradients: Any) -> list[Fraction]:
    rows = [gradients(step, v).tolist() for v in range(LEAVES)]
    return [sum(map(Fraction, column), Fraction()) for column in zip(*rows, strict=True)]


@pytest.mark.parametrize(
    ("gradients", "step"), [(cancelling, 0), (cancelling, 3), (alternating_scale, 0), (alternating_scale, 1)]
)
def test_the_error_is_at_most_that_of_the_grid(gradients: Any, step: int) -> None:
    """Windows are exact: the first step has no grid, and a large step has one that is too fine."""
    found = run_ranks(run_sums, 1, gradients)[0][step]
    largest = max(float(gradients(s, v).abs().max()) for s in range(step or 1) for v in range(LEAVES))
    grid = 0.0 if step == 0 else math.ldexp(largest, reproducible_sum.ROOM + 3 - 51 + 1)
    for mean, true in zip(found, exact_sums(step, gradients), strict=True):
        value = float(true / LEAVES)
        assert abs(mean - value) <= grid / 2 + abs(value) * 2.0**-23


def sums_of_two(values: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return the run_sums of two leaves on one process, for each step."""
    p = nn.Parameter(torch.zeros(len(values[0])))
    exchange = ReproducibleSum([p], 2, ProcessGroup())
    out = []
    for step in values:
        exchange.begin(((0, 2),), {0: 1, 1: 1}, lambda: torch.ones(2, dtype=torch.float64))
        for v in range(2):
            exchange.enter(v, last=v == 1)
            (p * torch.tensor(step)).sum().backward()
            exchange.leave()
        exchange.launch()
        finite = exchange.finish(2.0)
        assert p.grad is not None
        assert finite == all(map(math.isfinite, p.grad.tolist()))
        out.append(p.grad.tolist())
        exchange.zero()
    exchange.close()
    return out


@pytest.mark.parametrize("value", [1.0, 3e-45, 1e-38, -0.3, 3e38, 2.0**-126])
def test_a_gradient_that_is_not_finite_does_not_change_the_next_step(value: float) -> None:
    """The smallest and the largest float32, around a step with infinity."""
    row = [value, 0.0, -value]
    true = torch.tensor(row).tolist()
    assert sums_of_two([row, [math.inf, value, math.nan], row])[::2] == [true, true]


def test_ties_are_rounded_in_one_direction() -> None:
    """Halves of a grid are rounded in one direction, whatever was added before."""
    grid = 2.0 ** (1 + reproducible_sum.ROOM - 50)
    steps = [[1.0, 1.0, 1.0], [grid / 2, 3 * grid / 2, 1.0]]
    first, second, _ = sums_of_two(steps)[1]
    assert (first, second) == (grid, 2 * grid)


def test_numbers_of_more_than_24_bits_are_refused() -> None:
    with pytest.raises(
        reproducible_sum.LoopError, match=r"(?s)does not support float64 parameters.*more.*exchange=tree"
    ):
        ReproducibleSum([nn.Parameter(torch.zeros(3, dtype=torch.float64))], 2, ProcessGroup())


def test_sums_of_integers_do_not_depend_on_the_order() -> None:
    """V multiples of a grid, each below 2^51 / V of it, in every order of some of them."""
    whole = [(-1) ** n * (2**51 // 4 - n * n * 7919) for n in range(4)]
    assert {math.fsum(order) for order in itertools.permutations(map(float, whole))} == {float(sum(whole))}
    assert {sum(order) for order in itertools.permutations(map(float, whole))} == {float(sum(whole))}


def with_outlier(step: int, virtual_rank: int) -> torch.Tensor:
    """Return gradients of which one step's are very large."""
    mine = torch.Generator().manual_seed(1000 * step + virtual_rank)
    return torch.randn(WIDTH, generator=mine) * (1e25 if step == 2 else 1.0)


def test_an_outlier_does_not_change_the_next_steps() -> None:
    (found,) = run_ranks(run_sums, 1, with_outlier)
    for step, total in enumerate(found):
        expected = torch.stack([with_outlier(step, v) for v in range(LEAVES)]).double().sum(0) / LEAVES
        torch.testing.assert_close(torch.tensor(total).double(), expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("before", "seen", "after"),
    [
        (UNKNOWN, 5, 5),
        (5, 5, 5),
        (5, 4, 4),
        (5, 2, 4),
        (5, 9, 9),
        (5, 90, 13),
        (90, 5, 13),
        (13, 5, 12),
        (0, -149, -141),
    ],
)
def test_the_grid_follows_the_gradients(before: int, seen: int, after: int) -> None:
    assert next_exponent(before, seen) == after


def train_with_empty_parameter(run: Run[Any]) -> Any:
    """Train a model with a parameter without elements."""
    return loops.train(run, build=WithEmptyParameter, data=loops.Numbers(24))


class WithEmptyParameter(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 2)
        self.spare = nn.Parameter(torch.zeros(0, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.spare.sum()


def test_a_parameter_without_elements(tmp_path: Path) -> None:
    config = settings(exchange="wide", steps=4)
    found = [
        one
        for n in (1, 2)
        for one in run_ranks(loops.attempt, n, tmp_path / str(n), train_with_empty_parameter, config)
    ]
    assert isinstance(found[0], list), found[0]
    assert found == [found[0]] * 3
