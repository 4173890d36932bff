"""Compressed gradients: the same bits on any number of processes, with residuals that move with their nodes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.pairs import every_pair
from tests.ranks.loops import SETTINGS, Numbers, attempt
from tests.ranks.test_same_bits import assert_same, results
from tests.ranks.training import settings, train
from unisono.config import CompressSettings, Settings
from unisono.distributed.init import join_process_group as join
from unisono.environment import World
from unisono.exchange.compression.compressed import CompressedAllReduce, CompressedTree
from unisono.plan.assignment import assign_evenly
from unisono.testing import build_run, close_run, run_ranks
from unisono.train.run import Run

KINDS: list[Any] = ["fp16", "bf16", "int8", "topk", "powersgd"]


OPTIONS: dict[str, dict[str, Any]] = {"topk": {"ratio": 0.05}, "powersgd": {"rank": 1}}


def compressed(kind: Any, **changes: Any) -> Settings:
    options = {name: changes.pop(name) for name in ("start_step", "groups") if name in changes}
    return settings(compress=CompressSettings(kind=kind, **OPTIONS.get(kind, {}) | options), **changes)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("kind", "nodes"),
    [
        pytest.param("fp16", None, marks=pytest.mark.slow),
        *((kind, None) for kind in KINDS[1:]),
        *(("int8", 2), ("topk", 4), ("powersgd", 2)),
    ],
)
def test_any_number_of_processes_gives_the_same_bits(tmp_path: Path, kind: str, nodes: int | None) -> None:
    """Several processes may compute a node; in an epoch's last step some virtual ranks are empty."""
    config = compressed(kind, groups=nodes)
    sizes = (1, 3, 4) if nodes is None else (1, 2, 8)
    runs = [run for size in sizes for run in results(tmp_path, size, "mlp", config, length=53)]
    assert_same(runs)
    assert runs[0]["result"]["promise"] == "exact"
    assert "compressed at fixed nodes" in runs[0]["result"]["reason"]
    assert runs[0]["state"] != results(tmp_path, 1, "mlp", settings(), length=53)[0]["state"]


@pytest.mark.parametrize("kind", ["int8", "powersgd"])
def test_ties_and_unused_parameters_on_five_processes(tmp_path: Path, kind: str) -> None:
    runs = [run for size in (1, 5) for run in results(tmp_path, size, "gpt", compressed(kind))]
    assert_same(runs)
    assert all(run["unused"] is None for run in runs)


@pytest.mark.ci
@pytest.mark.parametrize(("kind", "nodes"), every_pair(KINDS, [None, 2]))
def test_a_resume_on_other_processes_continues_with_the_residuals(tmp_path: Path, kind: str, nodes: int | None) -> None:
    config = compressed(kind, groups=nodes)
    whole = results(tmp_path, 1, "mlp", config)[0]
    halves = str(tmp_path / "halves")
    run_ranks(partial(train, stop_after=3), 2, "mlp", config, halves)
    resumed = run_ranks(partial(train, resume=True), 3, "mlp", config, halves)
    assert {run["state"] for run in resumed} == {whole["state"]}


@pytest.mark.parametrize("begin", [2, 3, 6])
def test_compression_may_start_later(tmp_path: Path, begin: int) -> None:
    """The run stops before, at and after that step, and resumes on other processes."""
    config = compressed("powersgd", start_step=begin)
    whole = results(tmp_path, 1, "mlp", config)[0]
    halves = str(tmp_path / "halves")
    run_ranks(partial(train, stop_after=2), 2, "mlp", config, halves)
    resumed = run_ranks(partial(train, resume=True), 3, "mlp", config, halves)
    assert {run["state"] for run in resumed} == {whole["state"]}
    plain = results(tmp_path, 1, "mlp", settings())[0]
    same_until = [a == b for a, b in zip(whole["losses"], plain["losses"], strict=True)]
    assert all(same_until[: begin + 1])  # the first compressed step affects the loss of the next one
    assert not any(same_until[begin + 1 :])


@pytest.mark.parametrize("kind", ["int8", "topk", "powersgd"])
def test_residuals_move_with_virtual_ranks(tmp_path: Path, kind: str) -> None:
    config = compressed(kind, steps=8)
    deals = {2: ((0, 7), (7, 8), (8, 8)), 5: ((0, 1), (1, 2), (2, 8))}
    assert_same([*results(tmp_path, 1, "mlp", config), *results(tmp_path, 3, "mlp", config, deals=deals)])


def test_scaled_losses_and_micro_batches(tmp_path: Path) -> None:
    config = compressed("int8", precision="fp16", micro_batch=1)
    runs = [run for size in (1, 3) for run in results(tmp_path, size, "mlp", config)]
    assert len({run["state"] for run in runs}) == 1
    assert runs[0]["result"]["skipped"] > 0  # its first scale is too high


@pytest.mark.parametrize("kind", ["int8", "powersgd"])
def test_with_allreduce_each_process_is_a_node(tmp_path: Path, kind: str) -> None:
    config = replace(compressed(kind), exchange="allreduce")
    (alone,) = results(tmp_path, 1, "mlp", settings())
    for run in results(tmp_path, 3, "mlp", config):
        assert run["losses"] == pytest.approx(alone["losses"], rel=0.2)
        assert run["result"]["promise"] == "tolerance"
    halves = str(tmp_path / "halves")
    run_ranks(partial(train, stop_after=3), 3, "mlp", config, halves)
    for run in run_ranks(partial(train, resume=True), 2, "mlp", config, halves):
        assert run["losses"] == pytest.approx(alone["losses"][-len(run["losses"]) :], rel=0.2)


# -- one exchange by itself


def gradients(step: int, virtual_rank: int, shape: tuple[int, ...]) -> torch.Tensor:
    g = torch.Generator().manual_seed(100 * step + virtual_rank)
    return torch.randn(shape, generator=g)


SHAPES = [(64, 96), (700,), (3, 5), ()]


def error_and_bytes(
    world: World, kind: Any, steps: int, base: str = "tree", nodes: int | None = None
) -> dict[str, Any]:
    """Return the relative error of the sum over steps, and the bytes that the last step sent."""
    with join(world) as group:
        params = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
        options = CompressSettings(kind=kind, groups=nodes, rank=4, ratio=0.1)
        exchange = {"tree": CompressedTree, "allreduce": CompressedAllReduce}[base](params, 8, group, settings=options)
        spans = assign_evenly(8, group.size)
        mine = range(*spans[group.rank])
        sums = [torch.zeros(shape) for shape in SHAPES]
        for step in range(steps):
            exchange.begin(spans, dict.fromkeys(mine, 1), lambda: torch.ones(len(mine), dtype=torch.float64))
            for v in mine:
                exchange.enter(v, last=v == mine[-1])
                sum((p * gradients(step, v, tuple(p.shape))).sum() for p in params).backward()  # type: ignore[union-attr]
                exchange.leave()
            exchange.launch()
            assert exchange.finish(8.0 + step % 2)
            exchange.commit()
            for total, p in zip(sums, params, strict=True):
                assert p.grad is not None
                total += p.grad * (8.0 + step % 2)
            exchange.zero()
        true = [sum(gradients(s, v, tuple(t.shape)) for s in range(steps) for v in range(8)) for t in sums]
        norm = sum(float(torch.as_tensor(t).square().sum()) for t in true) ** 0.5
        error = sum(float((a - b).square().sum()) for a, b in zip(sums, true, strict=True)) ** 0.5
        exchange.close()
        return {"error": error / norm, "sent": exchange.sent}


@pytest.mark.parametrize(("kind", "least", "most"), [("fp16", 1e-5, 5e-4), ("bf16", 1e-4, 4e-3), ("int8", 1e-4, 2e-2)])
def test_quantized_sums_are_near_the_sum(kind: str, least: float, most: float) -> None:
    for found in run_ranks(error_and_bytes, 2, kind, 1):
        assert least < found["error"] < most


@pytest.mark.parametrize("kind", ["int8", "topk", "powersgd"])
def test_residuals_arrive_in_later_steps(kind: str) -> None:
    """The relative error of the sum over steps falls, because only one step's residual is missing."""
    few, many = (run_ranks(error_and_bytes, 1, kind, steps)[0]["error"] for steps in (4, 60))
    assert many < few / 2


# 64 x 96 + 700 + 15 + 1 elements, each parameter at a multiple of 16, in blocks of 256: 27 of them, 28 on two processes
ENCODED_BYTES = {"fp16": 28 * 516, "bf16": 28 * 512, "int8": 28 * 260, "topk": 8 * (615 + 70 + 2 + 1)}
POWERSGD_BYTES = 4 * (4 * 64 + 700 + 15 + 1) + 4 * (4 * 96)


@pytest.mark.parametrize("nodes", [8, 2])
def test_sent_bytes_are_those_of_the_encoded_nodes(nodes: int) -> None:
    """Each of two processes sends half of each of its nodes, and half of the sum; topk sends all of its nodes."""
    for kind in KINDS:
        expected = {"topk": nodes / 2 * ENCODED_BYTES["topk"], "powersgd": POWERSGD_BYTES}.get(
            kind, (nodes / 2 + 1) / 2 * ENCODED_BYTES.get(kind, 0)
        )
        for found in run_ranks(error_and_bytes, 2, kind, 2, "tree", nodes):
            assert found["sent"] == expected
        (alone,) = run_ranks(error_and_bytes, 1, kind, 1, "tree", nodes)
        assert alone["sent"] == 0


def with_infinite_step(world: World, kind: Any) -> list[Any]:
    """Run a step whose gradient is infinite between two finite ones."""
    with join(world) as group:
        p = nn.Parameter(torch.zeros(16, 16))
        exchange = CompressedTree([p], 2, group, settings=CompressSettings(kind=kind, rank=1, ratio=0.5))
        spans = assign_evenly(2, group.size)
        out = []
        mine = range(*spans[group.rank])
        for factor in (1.0, torch.inf, 1.0):
            exchange.begin(spans, dict.fromkeys(mine, 1), lambda: torch.ones(len(mine), dtype=torch.float64))
            for v in mine:
                exchange.enter(v, last=v == mine[-1])
                (p * gradients(0, v, (16, 16)) * (factor if v == 1 else 1.0)).sum().backward()
                exchange.leave()
            exchange.launch()
            finite = exchange.finish(2.0)
            assert p.grad is not None
            out.append((finite, bool(torch.isfinite(p.grad).all())))
            exchange.zero()
        exchange.close()
        return out


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_is_not_finite_does_not_change_the_next_one(kind: str) -> None:
    for rank in run_ranks(with_infinite_step, 2, kind):
        assert rank == [(True, True), (False, False), (True, True)]


class WithDtype(nn.Linear):
    """A layer with a parameter of another dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(3, 2, dtype=torch.float32 if dtype == torch.int64 else dtype)
        self.counts = nn.Parameter(torch.arange(4, dtype=dtype), requires_grad=dtype.is_floating_point)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.to(self.weight.dtype)) + self.counts.sum()


def train_dtype(dtype: torch.dtype, frozen: bool, run: Run[Any]) -> Any:
    """Run steps for all parameters, or for those of an optimizer."""
    model = run.place(lambda: WithDtype(dtype))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad or not frozen], lr=0.05)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(Numbers()):
        step.run(model, lambda out, *_: (out.sum(), len(out)), over=[optimizer] if frozen else ())
        step.update(optimizer)
    return run.context.state.fingerprint()


def errors_of_dtypes(world: World, folder: Path) -> list[Any]:
    config = replace(SETTINGS, compress=CompressSettings(kind="int8"))
    cases = [(torch.float64, False), (torch.int64, False), (torch.int64, True)]
    return [attempt(world, folder / str(n), partial(train_dtype, *case), config) for n, case in enumerate(cases)]


def test_other_dtypes_are_refused(tmp_path: Path) -> None:
    """Integers are refused too, unless the pass's optimizer does not hold them."""
    found = [errors_of_dtypes(World(), tmp_path / "alone"), *run_ranks(errors_of_dtypes, 2, tmp_path)]
    for wide, whole, named in found:
        assert "kind=int8 does not support float64 parameters.\n  3 of 3" in wide
        assert "kind=int8 does not support int64 parameters.\n  1 of 3" in whole
        assert named == found[0][2]
        assert "int64" not in named


def train_with_freezing(
    world: World, folder: str, config: Settings, resume: bool, stop: int | None
) -> tuple[str, list[float]]:
    """Train the first layer in every second step; return the fingerprint and the gradients' norms."""
    with join(world) as group:
        run = build_run(config, world, group, Path(folder), resume=resume)
        model = run.place(lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(model=model, optimizer=optimizer)
        x = torch.randn(48, 4, generator=torch.Generator().manual_seed(1))
        norms = []
        for step in run.steps(torch.utils.data.TensorDataset(x)):
            model[0].requires_grad_(step.number % 2 == 0)
            step.run(model, lambda out, x: (out.square().sum(), len(x)))
            norms.append(step.grad_norm)
            step.update(optimizer)
            if step.number == stop:
                run.stop()
        close_run(run)
        return run.context.state.fingerprint(), norms


@pytest.mark.parametrize("kind", ["topk", "powersgd"])
def test_residuals_are_dropped_when_other_parameters_train(tmp_path: Path, kind: Any) -> None:
    """A resume, or two, do not keep them either (found by tests/scripts, seed 1454)."""
    config = Settings(steps=7, batch=8, virtual_ranks=4, compress=CompressSettings(kind=kind, **OPTIONS[kind]))
    ((whole, norms),) = run_ranks(train_with_freezing, 1, str(tmp_path / "whole"), config, False, None)
    found: list[float] = []
    for ranks, stop in ((2, 1), (1, 3), (2, None)):
        part = run_ranks(train_with_freezing, ranks, str(tmp_path / "parts"), config, bool(found), stop)
        found += part[0][1]
    assert found == norms
    assert {fingerprint for fingerprint, _ in part} == {whole}
