"""Workers at their own pace: the bits of one process with one of them, every sample once with several, and resumes."""

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


def paced(config: Settings, staleness: int | None = None) -> Settings:
    return replace(config, exchange="server", server=ServerSettings(staleness=staleness))


def left(told: Loop) -> Loop:
    """A worker leaves with its last step."""

    def until_over(run: Run[Any]) -> Any:
        try:
            return told(run)
        except RunStopped:
            return "over"

    return until_over


def whole_loop(world: World, folder: str, kind: str, config: Settings, stop: int | None, resume: bool) -> Any:
    def tell(run: Run[Any]) -> Any:
        out = loop(run, kind, 53, {}, stop, False)
        return {"losses": out["losses"], "norms": out["norms"], "result": run_result(run)}

    return attempt(world, Path(folder), left(tell), config, resume=resume)


@pytest.mark.parametrize("kind", ["mlp", "gpt"])
@pytest.mark.parametrize("staleness", [None, 1])
def test_one_worker_is_the_loop_of_one_process(kind: str, staleness: int | None, tmp_path: Path) -> None:
    (alone,) = run_ranks(whole_loop, 1, str(tmp_path / "a"), kind, TREE, None, False)
    server, worker = run_ranks(whole_loop, 2, str(tmp_path / "b"), kind, paced(TREE, staleness), None, False)
    assert worker == "over"
    assert (server["losses"], server["norms"]) == (alone["losses"], alone["norms"])
    assert server["result"]["weights_sha256"] == alone["result"]["weights_sha256"]
    assert server["result"]["late_most"] == 0
    assert "sites are part of the mathematics" in server["result"]["promise"]


def seen(world: World, folder: Path, config: Settings) -> Any:
    """Which samples each worker has computed; of the server, how late gradients were. Nobody is overtaken, however busy
    this machine is."""
    ledger.LEAST_SECONDS = 60.0
    mine: list[int] = []

    def body(step: Any, model: nn.Module, x: torch.Tensor, i: torch.Tensor) -> None:
        mine.extend(i.tolist())
        step.backward(loss_of(model, x), weight=len(i))

    def tell(run: Run[Any]) -> Any:
        small(run, body)
        return run_result(run)["late_most"]

    return attempt(world, folder, left(tell), config), mine


@pytest.mark.parametrize(("size", "staleness"), [(4, None), (4, 2), (3, 1)])
def test_every_sample_is_computed_once_and_no_gradient_is_too_late(
    size: int, staleness: int | None, tmp_path: Path
) -> None:
    (_, once), *_ = run_ranks(seen, 1, tmp_path / "a", replace(SMALL, steps=12))
    outs = run_ranks(seen, size, tmp_path / "b", paced(replace(SMALL, steps=12), staleness))
    (late, nothing), *workers = outs
    assert nothing == []
    assert staleness is None or late <= staleness  # without a bound only the machine's own has a say
    assert sorted(i for _, mine in workers for i in mine) == sorted(once)


@pytest.mark.parametrize("after", [("server", 3), ("server", 2), ("tree", 2)])
def test_a_run_goes_on_with_other_workers_or_in_step(after: tuple[Any, int], tmp_path: Path) -> None:
    folder = str(tmp_path)
    first, *_ = run_ranks(whole_loop, 3, folder, "mlp", paced(TREE), 5, False)
    saved = newest(tmp_path, print)
    assert saved is not None
    assert load(saved).steps == first["result"]["steps"]
    exchange, size = after
    config = paced(TREE) if exchange == "server" else TREE
    second, *_ = run_ranks(whole_loop, size, folder, "mlp", config, None, True)
    assert second["result"]["steps"] == 12
    assert second["result"]["resumed_at"] == first["result"]["steps"]


class Normed(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def statistics(world: World, folder: Path, config: Settings) -> Any:
    def tell(run: Run[Any]) -> Any:
        kept: list[Normed] = []

        def build() -> nn.Module:
            kept.append(Normed())
            return kept[0]

        small(run, build=build, data=Numbers(24))
        norm: Any = kept[0][1]
        return norm.running_mean.tolist(), int(norm.num_batches_tracked)

    return attempt(world, folder, left(tell), config)


def test_batch_norms_statistics_come_with_the_gradient(tmp_path: Path) -> None:
    (alone,) = run_ranks(statistics, 1, tmp_path / "a", SMALL)
    assert run_ranks(statistics, 2, tmp_path / "b", paced(SMALL))[0] == alone
    (mean, count), *_ = run_ranks(statistics, 3, tmp_path / "c", paced(SMALL))
    assert 0 < count < alone[1]
    assert mean != alone[0]


def half(world: World, folder: Path, config: Settings) -> Any:
    def tell(run: Run[Any]) -> Any:
        small(run)
        return run_result(run)["skipped"], run_result(run)["weights_sha256"]

    return attempt(world, folder, left(tell), config)


def test_the_scale_of_fp16_is_the_servers(tmp_path: Path) -> None:
    config = replace(SMALL, precision="fp16")
    (alone,) = run_ranks(half, 1, tmp_path / "a", config)
    assert run_ranks(half, 2, tmp_path / "b", paced(config)) == [alone, "over"]


def evaluated(world: World, folder: Path, config: Settings) -> Any:
    def off(output: torch.Tensor, x: torch.Tensor, i: torch.Tensor) -> tuple[torch.Tensor, int]:
        return (output - x.sum(1, keepdim=True)).pow(2).sum(), len(x)

    def tell(run: Run[Any]) -> Any:
        told = [run.evaluate(model := run.place(linear), Numbers(), off)]
        optimizer = sgd(model)
        run.track(model=model, optimizer=optimizer)
        for step in run.steps(Numbers()):
            step.run(model, off)
            step.update(optimizer)
            if step.every(4):
                assert run.is_main
                told.append(run.evaluate(model, Numbers(), off))
        return [*told, run.evaluate(model, Numbers(), off)]

    return attempt(world, folder, left(tell), config)


def test_the_server_evaluates(tmp_path: Path) -> None:
    (alone,) = run_ranks(evaluated, 1, tmp_path / "a", SMALL)
    assert run_ranks(evaluated, 2, tmp_path / "b", paced(SMALL)) == [alone, "over"]


def passes(world: World, folder: Path, config: Settings) -> Any:
    def tell(run: Run[Any]) -> Any:
        model = run.place(linear)
        optimizer = sgd(model)
        run.track(model=model, optimizer=optimizer)
        for step in run.steps(Numbers()):
            for x, _ in step.over(optimizer):
                step.backward(loss_of(model, x), weight=len(x))
            step.update(optimizer)

    return attempt(world, folder, left(tell), config)


def test_several_passes_are_refused(tmp_path: Path) -> None:
    said, worker = run_ranks(passes, 2, tmp_path, paced(SMALL))
    assert "one gradient and one update" in said
    assert worker == "over" or "one gradient and one update" in worker


def asks_all(world: World, folder: Path, config: Settings) -> Any:
    def tell(run: Run[Any]) -> Any:
        before = run.collectives.all_gather(torch.tensor(run.rank))

        def after(step: Any, optimizer: Any) -> None:
            step.update(optimizer)
            run.collectives.barrier()

        assert [int(rank) for rank in before] == [0, 1]
        small(run, after=after)

    return attempt(world, folder, left(tell), config)


def test_all_processes_meet_before_the_loop_and_not_in_it(tmp_path: Path) -> None:
    said, worker = run_ranks(asks_all, 2, tmp_path, paced(SMALL))
    assert "no two processes meet once the loop has begun.\n  Next: call it before the loop" in said
    assert worker == "over" or "PeerLostError" in worker or "no two processes meet" in worker


def stopped_by_a_worker(world: World, folder: Path, config: Settings) -> Any:
    def tell(run: Run[Any]) -> Any:
        def after(step: Any, optimizer: Any) -> None:
            step.update(optimizer)
            if world.rank == 1 and step.number >= 3:
                run.stop()

        small(run, after=after)
        return run_result(run)["steps"]

    return attempt(world, folder, left(tell), config)


def test_a_worker_may_stop_the_run(tmp_path: Path) -> None:
    steps, worker = run_ranks(stopped_by_a_worker, 2, tmp_path, paced(replace(SMALL, steps=1000)))
    assert 4 <= steps < 20
    assert worker == "over"


# -- several servers


def several(config: Settings, count: int, staleness: int | None = None) -> Settings:
    return replace(config, exchange="server", server=ServerSettings(count=count, staleness=staleness))


@pytest.mark.parametrize("kind", ["mlp", "gpt"])
def test_several_servers_with_one_worker_are_the_loop_of_one_process(kind: str, tmp_path: Path) -> None:
    (alone,) = run_ranks(whole_loop, 1, str(tmp_path / "a"), kind, TREE, None, False)
    server, *others = run_ranks(whole_loop, 4, str(tmp_path / "b"), kind, several(TREE, 3), None, False)
    assert others == ["over"] * 3
    assert (server["losses"], server["norms"]) == (alone["losses"], alone["norms"])
    assert server["result"]["weights_sha256"] == alone["result"]["weights_sha256"]


def test_the_optimizers_of_several_servers_are_one_in_a_checkpoint(tmp_path: Path) -> None:
    """With one worker it goes on as the run that was never interrupted, with other servers and in step."""
    (alone,) = run_ranks(whole_loop, 1, str(tmp_path / "a"), "gpt", TREE, None, False)
    folder = str(tmp_path / "b")
    run_ranks(whole_loop, 3, folder, "gpt", several(TREE, 2), 5, False)
    run_ranks(whole_loop, 4, folder, "gpt", several(TREE, 3), 9, True)
    (last,) = run_ranks(whole_loop, 1, folder, "gpt", TREE, None, True)
    assert last["result"]["weights_sha256"] == alone["result"]["weights_sha256"]


def test_several_servers_and_workers_use_every_sample_once(tmp_path: Path) -> None:
    config = replace(SMALL, steps=12)
    (_, once), *_ = run_ranks(seen, 1, tmp_path / "a", config)
    (late, _), (_, nothing), *workers = run_ranks(seen, 4, tmp_path / "b", several(config, 2, 1))
    assert nothing == []
    assert late <= 1
    assert sorted(i for _, mine in workers for i in mine) == sorted(once)


def test_the_first_of_several_servers_evaluates_the_whole_model(tmp_path: Path) -> None:
    (alone,) = run_ranks(evaluated, 1, tmp_path / "a", SMALL)
    assert run_ranks(evaluated, 3, tmp_path / "b", several(SMALL, 2)) == [alone, "over", "over"]


def averaged(world: World, folder: Path, config: Settings) -> Any:
    def tell(run: Run[Any]) -> Any:
        model = run.place(linear)
        optimizer = sgd(model)
        run.track(model=model, average=torch.optim.swa_utils.AveragedModel(model), optimizer=optimizer)
        for _ in run.steps(Numbers()):
            raise AssertionError("refused before")

    return attempt(world, folder, left(tell), config)


def test_an_average_needs_all_parameters_after_every_update(tmp_path: Path) -> None:
    for said in run_ranks(averaged, 3, tmp_path, several(SMALL, 2)):
        assert "an average of them would be one of old ones" in said
