"""Resume: a run that is saved and resumed on other processes ends like one that was not interrupted."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, OneCycleLR, SequentialLR

from tests.ranks.loops import SETTINGS, Loop, Numbers, attempt, linear, train, whole
from tests.ranks.training import loop as training
from tests.ranks.training import settings
from unisono.checkpoint.load import fingerprint
from unisono.config import CheckpointSettings, LoaderSettings
from unisono.environment import World
from unisono.testing import finish_run, run_promise, run_ranks, run_result
from unisono.train.run import Run
from unisono.train.step import Step

# -- on another number of processes

EVERY = settings(checkpoint=CheckpointSettings(every=3, keep=9))  # of 8 steps; an epoch of 53 samples has 4
KINDS = {
    "mlp": ("mlp", EVERY),
    "gpt": ("gpt", EVERY),
    "mlp, two workers": ("mlp", replace(EVERY, loader=LoaderSettings(workers=2))),
    "gpt, accumulation": ("gpt", replace(EVERY, micro_batch=1, batch=12, virtual_ranks=5)),
}


def train_all(world: World, folders: dict[str, str], resume: bool) -> dict[str, Any]:
    """Return the results of each kind of training, in its folder."""

    def loop(kind: str) -> Loop:
        return lambda run: training(run, kind, 53, {}, None, False) | {"weights": run_result(run)["weights_sha256"]}

    return {
        name: attempt(world, Path(folder), loop(KINDS[name][0]), KINDS[name][1], resume=resume)
        for name, folder in folders.items()
    }


class Whole(NamedTuple):
    """Runs that were not interrupted: their results, and the paths of their checkpoints."""

    told: dict[str, Any]
    folders: dict[str, Path]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    folders = {name: tmp_path_factory.mktemp("whole") for name in KINDS}
    first, second = run_ranks(train_all, 2, {name: str(folder) for name, folder in folders.items()}, False)
    for name, told in first.items():
        assert not isinstance(told, str), told
        assert told["losses"] == second[name]["losses"]
    return Whole(first, folders)


@pytest.mark.parametrize(("size", "after"), [(1, 3), (3, 6), (4, 3)])
def test_a_resume_on_another_number_of_processes_has_the_same_bits(
    uninterrupted: Whole, tmp_path: Path, size: int, after: int
) -> None:
    """A run is saved on 2 processes in mid-epoch; later losses, and the whole final state, are the same."""
    folders = {}
    for name, folder in uninterrupted.folders.items():
        saved = Path("checkpoints", f"step-{after:08d}")
        folders[name] = tmp_path / name
        shutil.copytree(folder / saved, tmp_path / name / saved)
    every_process = run_ranks(train_all, size, {name: str(folder) for name, folder in folders.items()}, True)
    for name in KINDS:
        expected = uninterrupted.told[name]
        for told in every_process:
            assert not isinstance(told[name], str), told[name]
            assert told[name]["losses"] == expected["losses"][after:]
            assert told[name]["norms"] == expected["norms"][after:]
            assert told[name]["weights"] == expected["weights"]
        final = fingerprint(folders[name] / "checkpoints" / "step-00000008", state=True)
        whole_run = fingerprint(uninterrupted.folders[name] / "checkpoints" / "step-00000008", state=True)
        assert final["weights_sha256"] == whole_run["weights_sha256"] == expected["weights"]
        assert final["state_sha256"] == whole_run["state_sha256"]


def finish_twice(world: World, folder: str) -> Any:
    once = attempt(world, Path(folder), train)
    times = {path: path.stat().st_mtime_ns for path in Path(folder, "checkpoints").rglob("*")}
    again = attempt(world, Path(folder), train, resume=True)
    assert {path: path.stat().st_mtime_ns for path in times} == times
    return once, again


def test_a_finished_run_does_no_more_steps(tmp_path: Path) -> None:
    for once, again in run_ranks(finish_twice, 2, str(tmp_path)):
        assert len(once) == 4
        assert again == once[-1:]  # no losses, and the same fingerprint


# -- objects that must be tracked, and must fit


def tracks(*names: str, late: bool = False, build: Callable[[], nn.Module] = linear) -> Loop:
    """Return a loop that tracks the objects with these names.

    It has a model, two optimizers and a schedule. The second optimizer steps only in step 1, if `late`.
    """

    def loop(run: Run[Any]) -> Any:
        model = run.place(build)
        weight, *rest = model.parameters()
        optimizer, second = torch.optim.SGD([weight], lr=0.1), torch.optim.Adam(rest, lr=0.1)
        schedule = CosineAnnealingLR(optimizer, 9)
        things = {"model": model, "optimizer": optimizer, "second": second, "schedule": schedule}
        run.track(**{name: things[name] for name in names})
        for step in run.steps(Numbers()):
            for x, i in step:
                whole(step, model, x, i)
            step.update(optimizer, schedule, *([second] if not late or step.number == 1 else []))
        return run.context.progress.steps_done

    return loop


def tracks_twice(run: Run[Any]) -> None:
    model = run.place(linear)
    run.track(model=model)
    run.track(model=model)


def writes_code(step: Step, optimizer: Any) -> None:
    step.update(optimizer)
    optimizer.state_dict = lambda: {"x": object()}


ALL = ("model", "optimizer", "second", "schedule")
FORGOTTEN: dict[str, tuple[Loop, list[str]]] = {
    "nothing": (tracks(*ALL), []),
    "the schedule": (tracks("model", "optimizer", "second"), ["CosineAnnealingLR is", "run.track(schedule=...)"]),
    "an optimizer": (tracks("model", "second", "schedule"), ["SGD is", "run.track(optimizer=...)"]),
    "the model": (tracks("optimizer", "second", "schedule"), ["Linear is", "run.track(model=...)"]),
    "two": (tracks("model", "second"), ["SGD and CosineAnnealingLR are", "optimizer=..., schedule=..."]),
    "all": (tracks(), ["Linear and SGD and Adam and CosineAnnealingLR are", "not tracked"]),
    "what steps later": (tracks("model", "optimizer", "schedule", late=True), ["Adam is", "run.track(optimizer=...)"]),
    "that it was tracked": (tracks_twice, ["two objects by the name 'model'", "rename one"]),
    "what can be saved": (lambda run: run.track(best=3.5), ["'best', a float", "state_dict() and load_state_dict()"]),
    "what can be written": (
        lambda run: train(run, after=writes_code),
        ["Cannot save optimizer.x", "of type object", "state_dict()"],
    ),
}


def leave_untracked(world: World, folder: str) -> dict[str, Any]:
    return {name: attempt(world, Path(folder, name), loop) for name, (loop, _) in FORGOTTEN.items()}


@pytest.fixture(scope="module")
def untracked(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(leave_untracked, 2, str(tmp_path_factory.mktemp("untracked")))


@pytest.mark.parametrize("what", FORGOTTEN)
def test_every_rank_names_what_is_not_tracked(untracked: list[dict[str, Any]], what: str) -> None:
    one, other = (told[what] for told in untracked)
    assert one == other
    words = FORGOTTEN[what][1]
    if not words:
        assert one == 3
        return
    assert isinstance(one, str), one
    assert one.startswith("unisono.errors.CheckpointError: ")
    for word in words:
        assert word in one


def saved_and_resumed(second: Loop, first: Loop = train) -> Callable[[World, Path], Any]:
    """Return the result of the second loop, which resumes from the checkpoint of the first after two steps."""

    def attempts(world: World, folder: Path) -> Any:
        before = attempt(world, folder, first, replace(SETTINGS, steps=2))
        assert not isinstance(before, str), before
        return attempt(world, folder, second, resume=True)

    return attempts


def wide() -> nn.Module:
    return nn.Linear(3, 4)


def half(model: nn.Module) -> Any:
    return torch.optim.SGD([next(model.parameters())], lr=0.1)


def other_name(run: Run[Any]) -> Any:
    run.track(net=run.place(linear))


MISFITS: dict[str, tuple[Callable[[World, Path], Any], list[str]]] = {
    "it fits": (saved_and_resumed(tracks(*ALL), tracks(*ALL)), []),
    "a model": (
        saved_and_resumed(tracks("model", build=wide)),
        ["Error: Cannot load the state of 'model' (Linear)", "does not fit"],
    ),
    "an optimizer": (
        saved_and_resumed(lambda run: train(run, make=half)),
        [
            "CheckpointError: Cannot load the state of 'optimizer' (SGD)",
            "does not fit",
            "resume with the script that began",
        ],
    ),
    "a name": (saved_and_resumed(other_name), ["Error: Cannot resume 'net'", "The checkpoint holds model, optimizer."]),
    "the data": (
        saved_and_resumed(lambda run: train(run, data=Numbers(21))),
        ["SettingsError: Cannot resume with 21 samples", "begun with 20", "--accept-change"],
    ),
}


def resume_mismatches(world: World, folder: str) -> dict[str, Any]:
    return {name: attempts(world, Path(folder, name)) for name, (attempts, _) in MISFITS.items()}


@pytest.fixture(scope="module")
def mismatches(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(resume_mismatches, 2, str(tmp_path_factory.mktemp("mismatches")))


@pytest.mark.parametrize("what", MISFITS)
def test_every_rank_refuses_a_state_that_does_not_fit(mismatches: list[dict[str, Any]], what: str) -> None:
    one, other = (told[what] for told in mismatches)
    assert one == other
    words = MISFITS[what][1]
    if not words:
        assert one == 3
        return
    assert isinstance(one, str), one
    for word in words:
        assert word in one


def in_bfloat16(run: Run[Any]) -> str:
    """Train with NAdam, which keeps a product in float32 for parameters of any dtype."""
    model = run.place(lambda: linear().bfloat16())
    optimizer = torch.optim.NAdam(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(Numbers()):
        for x, i in step:
            whole(step, model, x.bfloat16(), i)
        step.update(optimizer)
    states = [value for state in optimizer.state.values() for value in state.values()]
    return run.context.state.fingerprint() + str([value.dtype for value in states])


def keep_dtypes(world: World, folder: str) -> list[str]:
    undisturbed = attempt(world, Path(folder, "whole"), in_bfloat16, replace(SETTINGS, steps=6))
    attempt(world, Path(folder, "halves"), in_bfloat16)
    return [undisturbed, attempt(world, Path(folder, "halves"), in_bfloat16, replace(SETTINGS, steps=6), resume=True)]


def test_optimizer_state_keeps_its_dtype(tmp_path: Path) -> None:
    ((undisturbed, resumed),) = run_ranks(keep_dtypes, 1, str(tmp_path))
    assert "torch.float32" in undisturbed
    assert "torch.bfloat16" in undisturbed
    assert resumed == undisturbed


# -- a loop that was left with break

AFTER_BREAK: dict[str, tuple[int, bool, bool, str]] = {
    # (virtual ranks, whether in the middle of a step, whether the weights change, the promise of a continued run)
    "nothing": (4, False, False, "exact"),
    "nothing, one stream": (1, False, False, "exact"),
    "in a step": (4, True, False, "exact"),
    "in a step, one stream": (1, True, False, "exact until step 2"),
    "weights": (4, False, True, "exact until step 2"),
}


def breaks(run: Run[Any], in_step: bool, change: bool, leave: bool) -> tuple[str, str]:
    model = run.place(lambda: nn.Sequential(linear(), nn.Dropout(0.3)))
    optimizer = torch.optim.AdamW(model.parameters())
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(
        torch.utils.data.TensorDataset(torch.stack([Numbers()[i][0] for i in range(20)]), torch.arange(20))
    ):
        if leave and step.number == 2 and not in_step:
            break
        for x, i in step:
            whole(step, model, x, i)
        if leave and step.number == 2:
            break
        step.update(optimizer)
    torch.rand(3)
    with torch.no_grad():
        for p in model.parameters() if leave and change else ():
            p.mul_(2)
    finish_run(run)
    return run.context.state.fingerprint(), run_promise(run)[0]


def break_and_continue(world: World, folder: str) -> dict[str, Any]:
    told = {}
    for what, (virtual_ranks, in_step, change, _) in AFTER_BREAK.items():
        config = replace(SETTINGS, virtual_ranks=virtual_ranks, steps=5)
        loop = lambda run, leave, a=in_step, b=change: breaks(run, a, b, leave)  # noqa: E731
        undisturbed = attempt(world, Path(folder, what, "whole"), lambda run: loop(run, False), config)  # noqa: B023
        attempt(world, Path(folder, what), lambda run: loop(run, True), config)  # noqa: B023
        told[what] = undisturbed, attempt(world, Path(folder, what), lambda run: loop(run, False), config, resume=True)  # noqa: B023
    return told


def test_a_loop_left_with_break_resumes_exactly_or_lowers_the_promise(tmp_path: Path) -> None:
    (told,) = run_ranks(break_and_continue, 1, str(tmp_path))
    for what, (_, _, _, promise) in AFTER_BREAK.items():
        (weights, _), (resumed, says) = told[what]
        assert says == promise, what
        assert (resumed == weights) == (promise == "exact"), what


# -- a save that fails


def fails_to_save(world: World, folder: str) -> Any:
    """Put a file at the path of the next checkpoint after step 2."""

    def after(step: Any, optimizer: Any) -> None:
        step.update(optimizer)
        if step.number == 3 and world.rank == 0:
            for thread in threading.enumerate():  # the checkpoint of step 2 is saved concurrently
                if thread.name.startswith("checkpoint"):
                    thread.join()
            Path(folder, "checkpoints", ".step-00000004.unfinished").write_text("in the way")

    config = replace(SETTINGS, steps=6, checkpoint=CheckpointSettings(every=2))
    return attempt(world, Path(folder), lambda run: train(run, after=after), config)


def test_a_failed_save_is_reported_by_every_rank_and_changes_nothing(tmp_path: Path) -> None:
    first, *others = run_ranks(fails_to_save, 3, str(tmp_path))
    assert first.startswith("unisono.errors.CheckpointError: Cannot write the checkpoint after step 4")
    assert "The checkpoint after step 2 is complete." in first
    assert "B are free there" in first
    assert "--resume" in first
    assert others == [first, first]
    assert fingerprint(tmp_path)["step"] == 2


# -- a longer run


def scheduled(run: Run[Any], how: str) -> Any:
    """Return the learning rates of the steps."""
    model = run.place(linear)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule: Any = CosineAnnealingLR(optimizer, run.total_steps)
    if how == "one cycle":
        schedule = OneCycleLR(optimizer, 0.1, total_steps=run.total_steps)
    if how == "warm-up first":
        warm, cool = LinearLR(optimizer, 0.5, total_iters=2), CosineAnnealingLR(optimizer, run.total_steps - 2)
        schedule = SequentialLR(optimizer, [warm, cool], [2])
    run.track(schedule=schedule, model=model, optimizer=optimizer)  # the schedule first: the optimizer has a rate
    rates = []
    for step in run.steps(Numbers()):
        for x, i in step:
            whole(step, model, x, i)
        rates.append(schedule.get_last_lr()[0])
        step.update(optimizer, schedule)
    return rates, run_result(run)["promise"], run_result(run)["reason"]


def lengthen(world: World, folder: str) -> Any:
    told = {}
    for how in ("cosine", "one cycle", "warm-up first"):
        config = replace(SETTINGS, steps=3)
        loop: Loop = lambda run, how=how: scheduled(run, how)  # type: ignore[misc]  # noqa: E731
        whole_run = attempt(world, Path(folder, how, "whole"), loop, replace(config, steps=6))
        short = attempt(world, Path(folder, how, "short"), loop, config)
        longer = attempt(world, Path(folder, how, "short"), loop, replace(config, steps=6), resume=True)
        told[how] = whole_run, short, longer
    return told


def test_a_schedule_continues_in_a_longer_run(tmp_path: Path) -> None:
    told = run_ranks(lengthen, 2, str(tmp_path))[0]
    for how, field in (
        ("cosine", "T_max from 3"),
        ("one cycle", "total_steps from 3"),
        ("warm-up first", "1.T_max from 1"),
    ):
        (rates, promise, _), short, (longer, later_promise, reason) = told[how]
        assert promise == short[1] == "exact"
        assert longer[1:] == pytest.approx(rates[4:])
        assert later_promise == "exact until step 3"
        assert f"schedule.{field} to {6 if how != 'warm-up first' else 4}" in reason
    for how in ("cosine", "warm-up first"):
        assert told[how][2][0] == pytest.approx(told[how][0][0][3:])


# -- the promise of a resumed run


def promises(world: World, folder: str) -> list[str]:
    """Do two steps with allreduce and two with the tree, the second time with a longer schedule."""
    short, told = replace(SETTINGS, steps=2), []
    for name, loop in (("plain", train), ("longer", lambda run: scheduled(run, "cosine"))):
        rounded = replace(short, exchange="allreduce")
        for config, resume in ((rounded, False), (replace(SETTINGS, steps=4), True)):

            def promised(run: Run[Any], loop: Loop = loop) -> str:
                loop(run)
                return ": ".join(run_promise(run))

            told.append(attempt(world, Path(folder, name), promised, config, resume=resume))
    return told


def test_a_resume_keeps_a_lowered_promise(tmp_path: Path) -> None:
    (first, plain, _, longer), other = run_ranks(promises, 2, str(tmp_path))
    assert other == [first, plain, first, longer]
    assert first.startswith("tolerance: ")
    assert plain == first
    assert longer == f"{first}; from step 2 on other computations: schedule.T_max from 2 to 4"
