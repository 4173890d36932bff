"""Asynchronous parameter servers: bits with one worker, samples with several workers, and resumes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks.loops import Loop, Numbers, attempt, linear, loss_of, sgd
from tests.ranks.loops import train as small
from tests.ranks.training import loop, settings
from unisono.checkpoint.load import load, newest
from unisono.config import CheckpointSettings, ServerSettings, Settings
from unisono.environment import World
from unisono.errors import RunStopped
from unisono.param_server import ledger
from unisono.testing import run_ranks, run_result
from unisono.train.run import Run

TREE = settings(clip=0.5, steps=12, checkpoint=CheckpointSettings(every=4, keep=9))
SMALL = Settings(steps=10, batch=8, virtual_ranks=4, seed=2)


def async_settings(config: Settings, staleness: int | None = None) -> Settings:
    return replace(config, exchange="server", server=ServerSettings(staleness=staleness))


def leave_after_last_step(inner: Loop) -> Loop:
    """Return a loop in which a worker leaves after its last step."""

    def until_over(run: Run[Any]) -> Any:
        try:
            return inner(run)
        except RunStopped:
            return "over"

    return until_over


def run_loop(world: World, folder: str, kind: str, config: Settings, stop: int | None, resume: bool) -> Any:
    def run_body(run: Run[Any]) -> Any:
        out = loop(run, kind, 53, {}, stop, False)
        return {"losses": out["losses"], "norms": out["norms"], "result": run_result(run)}

    return attempt(world, Path(folder), leave_after_last_step(run_body), config, resume=resume)


@pytest.mark.parametrize("kind", ["mlp", "gpt"])
@pytest.mark.parametrize("staleness", [None, 1])
def test_one_worker_matches_one_process(kind: str, staleness: int | None, tmp_path: Path) -> None:
    (reference,) = run_ranks(run_loop, 1, str(tmp_path / "a"), kind, TREE, None, False)
    server, worker = run_ranks(run_loop, 2, str(tmp_path / "b"), kind, async_settings(TREE, staleness), None, False)
    assert worker == "over"
    assert (server["losses"], server["norms"]) == (reference["losses"], reference["norms"])
    assert server["result"]["weights_sha256"] == reference["result"]["weights_sha256"]
    assert server["result"]["late_most"] == 0
    assert "depends on the number of sites" in server["result"]["promise"]


def record_samples(world: World, folder: Path, config: Settings) -> Any:
    """Return the samples of each worker and, on the server, the staleness of gradients.

    Workers wait for each other, so that the load of the machine does not matter.
    """
    ledger.LEAST_SECONDS = 60.0
    mine: list[int] = []

    def body(step: Any, model: nn.Module, x: torch.Tensor, i: torch.Tensor) -> None:
        mine.extend(i.tolist())
        step.backward(loss_of(model, x), weight=len(i))

    def run_body(run: Run[Any]) -> Any:
        small(run, body)
        return run_result(run)["late_most"]

    return attempt(world, folder, leave_after_last_step(run_body), config), mine


@pytest.mark.parametrize(("size", "staleness"), [(4, None), (4, 2), (3, 1)])
def test_each_sample_is_computed_once_and_staleness_is_limited(
    size: int, staleness: int | None, tmp_path: Path
) -> None:
    (_, once), *_ = run_ranks(record_samples, 1, tmp_path / "a", replace(SMALL, steps=12))
    outs = run_ranks(record_samples, size, tmp_path / "b", async_settings(replace(SMALL, steps=12), staleness))
    (late, nothing), *workers = outs
    assert nothing == []
    assert staleness is None or late <= staleness  # without a limit it depends on the machine
    assert sorted(i for _, mine in workers for i in mine) == sorted(once)


@pytest.mark.parametrize("after", [("server", 3), ("server", 2), ("tree", 2)])
def test_resume_with_other_workers_or_synchronous_servers(after: tuple[Any, int], tmp_path: Path) -> None:
    folder = str(tmp_path)
    first, *_ = run_ranks(run_loop, 3, folder, "mlp", async_settings(TREE), 5, False)
    saved = newest(tmp_path, print)
    assert saved is not None
    assert load(saved).steps == first["result"]["steps"]
    exchange, size = after
    config = async_settings(TREE) if exchange == "server" else TREE
    second, *_ = run_ranks(run_loop, size, folder, "mlp", config, None, True)
    assert second["result"]["steps"] == 12
    assert second["result"]["resumed_at"] == first["result"]["steps"]


class MLPWithNorm(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def batch_norm_statistics(world: World, folder: Path, config: Settings) -> Any:
    def run_body(run: Run[Any]) -> Any:
        kept: list[MLPWithNorm] = []

        def build() -> nn.Module:
            kept.append(MLPWithNorm())
            return kept[0]

        small(run, build=build, data=Numbers(24))
        norm: Any = kept[0][1]
        return norm.running_mean.tolist(), int(norm.num_batches_tracked)

    return attempt(world, folder, leave_after_last_step(run_body), config)


def test_workers_send_batch_norm_statistics_with_the_gradient(tmp_path: Path) -> None:
    (reference,) = run_ranks(batch_norm_statistics, 1, tmp_path / "a", SMALL)
    assert run_ranks(batch_norm_statistics, 2, tmp_path / "b", async_settings(SMALL))[0] == reference
    (mean, count), *_ = run_ranks(batch_norm_statistics, 3, tmp_path / "c", async_settings(SMALL))
    assert 0 < count < reference[1]
    assert mean != reference[0]


def check_scale(world: World, folder: Path, config: Settings) -> Any:
    def run_body(run: Run[Any]) -> Any:
        small(run)
        return run_result(run)["skipped"], run_result(run)["weights_sha256"]

    return attempt(world, folder, leave_after_last_step(run_body), config)


def test_server_owns_the_fp16_loss_scale(tmp_path: Path) -> None:
    config = replace(SMALL, precision="fp16")
    (reference,) = run_ranks(check_scale, 1, tmp_path / "a", config)
    assert run_ranks(check_scale, 2, tmp_path / "b", async_settings(config)) == [reference, "over"]


def evaluate_on_server(world: World, folder: Path, config: Settings) -> Any:
    def off(output: torch.Tensor, x: torch.Tensor, i: torch.Tensor) -> tuple[torch.Tensor, int]:
        return (output - x.sum(1, keepdim=True)).pow(2).sum(), len(x)

    def run_body(run: Run[Any]) -> Any:
        results = [run.evaluate(model := run.place(linear), Numbers(), off)]
        optimizer = sgd(model)
        run.track(model=model, optimizer=optimizer)
        for step in run.steps(Numbers()):
            step.run(model, off)
            step.update(optimizer)
            if step.every(4):
                assert run.is_main
                results.append(run.evaluate(model, Numbers(), off))
        return [*results, run.evaluate(model, Numbers(), off)]

    return attempt(world, folder, leave_after_last_step(run_body), config)


def test_server_evaluates(tmp_path: Path) -> None:
    (reference,) = run_ranks(evaluate_on_server, 1, tmp_path / "a", SMALL)
    assert run_ranks(evaluate_on_server, 2, tmp_path / "b", async_settings(SMALL)) == [reference, "over"]


def use_passes(world: World, folder: Path, config: Settings) -> Any:
    def run_body(run: Run[Any]) -> Any:
        model = run.place(linear)
        optimizer = sgd(model)
        run.track(model=model, optimizer=optimizer)
        for step in run.steps(Numbers()):
            for x, _ in step.over(optimizer):
                step.backward(loss_of(model, x), weight=len(x))
            step.update(optimizer)

    return attempt(world, folder, leave_after_last_step(run_body), config)


def test_several_passes_are_refused(tmp_path: Path) -> None:
    message, worker = run_ranks(use_passes, 2, tmp_path, async_settings(SMALL))
    assert "one gradient and one update" in message
    assert worker == "over" or "one gradient and one update" in worker


def use_collectives(world: World, folder: Path, config: Settings) -> Any:
    def run_body(run: Run[Any]) -> Any:
        before = run.collectives.all_gather(torch.tensor(run.rank))

        def after(step: Any, optimizer: Any) -> None:
            step.update(optimizer)
            run.collectives.barrier()

        assert [int(rank) for rank in before] == [0, 1]
        small(run, after=after)

    return attempt(world, folder, leave_after_last_step(run_body), config)


def test_collectives_are_allowed_only_before_the_loop(tmp_path: Path) -> None:
    message, worker = run_ranks(use_collectives, 2, tmp_path, async_settings(SMALL))
    assert "no two processes meet once the loop has begun.\n  Next: call it before the loop" in message
    assert worker == "over" or "PeerLostError" in worker or "no two processes meet" in worker


def stopped_by_a_worker(world: World, folder: Path, config: Settings) -> Any:
    def run_body(run: Run[Any]) -> Any:
        def after(step: Any, optimizer: Any) -> None:
            step.update(optimizer)
            if world.rank == 1 and step.number >= 3:
                run.stop()

        small(run, after=after)
        return run_result(run)["steps"]

    return attempt(world, folder, leave_after_last_step(run_body), config)


def test_worker_can_stop_the_run(tmp_path: Path) -> None:
    steps, worker = run_ranks(stopped_by_a_worker, 2, tmp_path, async_settings(replace(SMALL, steps=1000)))
    assert 4 <= steps < 20
    assert worker == "over"


# -- several servers


def with_servers(config: Settings, count: int, staleness: int | None = None) -> Settings:
    return replace(config, exchange="server", server=ServerSettings(count=count, staleness=staleness))


@pytest.mark.parametrize("kind", ["mlp", "gpt"])
def test_several_servers_with_one_worker_match_one_process(kind: str, tmp_path: Path) -> None:
    (reference,) = run_ranks(run_loop, 1, str(tmp_path / "a"), kind, TREE, None, False)
    server, *others = run_ranks(run_loop, 4, str(tmp_path / "b"), kind, with_servers(TREE, 3), None, False)
    assert others == ["over"] * 3
    assert (server["losses"], server["norms"]) == (reference["losses"], reference["norms"])
    assert server["result"]["weights_sha256"] == reference["result"]["weights_sha256"]


def test_checkpoint_merges_the_optimizers_of_several_servers(tmp_path: Path) -> None:
    """Resume with one worker, with other servers and with synchronous ones, and match an uninterrupted run."""
    (reference,) = run_ranks(run_loop, 1, str(tmp_path / "a"), "gpt", TREE, None, False)
    folder = str(tmp_path / "b")
    run_ranks(run_loop, 3, folder, "gpt", with_servers(TREE, 2), 5, False)
    run_ranks(run_loop, 4, folder, "gpt", with_servers(TREE, 3), 9, True)
    (last,) = run_ranks(run_loop, 1, folder, "gpt", TREE, None, True)
    assert last["result"]["weights_sha256"] == reference["result"]["weights_sha256"]


def test_several_servers_and_workers_use_each_sample_once(tmp_path: Path) -> None:
    config = replace(SMALL, steps=12)
    (_, once), *_ = run_ranks(record_samples, 1, tmp_path / "a", config)
    (late, _), (_, nothing), *workers = run_ranks(record_samples, 4, tmp_path / "b", with_servers(config, 2, 1))
    assert nothing == []
    assert late <= 1
    assert sorted(i for _, mine in workers for i in mine) == sorted(once)


def test_first_server_evaluates_the_whole_model(tmp_path: Path) -> None:
    (reference,) = run_ranks(evaluate_on_server, 1, tmp_path / "a", SMALL)
    assert run_ranks(evaluate_on_server, 3, tmp_path / "b", with_servers(SMALL, 2)) == [reference, "over", "over"]


def average_weights(world: World, folder: Path, config: Settings) -> Any:
    def run_body(run: Run[Any]) -> Any:
        model = run.place(linear)
        optimizer = sgd(model)
        run.track(model=model, average=torch.optim.swa_utils.AveragedModel(model), optimizer=optimizer)
        for _ in run.steps(Numbers()):
            raise AssertionError("refused before")

    return attempt(world, folder, leave_after_last_step(run_body), config)


def test_weight_average_over_several_servers_is_refused(tmp_path: Path) -> None:
    for message in run_ranks(average_weights, 3, tmp_path, with_servers(SMALL, 2)):
        assert "an average of them would be one of old ones" in message
