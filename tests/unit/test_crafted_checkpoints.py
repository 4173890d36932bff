"""Crafted checkpoints, each under a manifest that fits it: refused with one message, or loaded with the same bits."""

from __future__ import annotations

import json
import re
import resource
import shutil
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.crafted import CONTENTS, STATES, Change, Draft, divide
from tests.ranks.loops import SETTINGS, Numbers, linear, loss_of
from unisono.checkpoint.contents import DTYPES
from unisono.checkpoint.load import any_signature, load, newest
from unisono.checkpoint.manifest import name_of
from unisono.cli.request.run_options import RunRequest
from unisono.cli.start.start_request import StartRequest
from unisono.config import CheckpointSettings
from unisono.distributed.init import join_process_group as join
from unisono.environment import World
from unisono.errors import CheckpointError, UnisonoError
from unisono.tensors.digest import fingerprint_of
from unisono.testing import build_run, close_run, finish_run, run_ranks
from unisono.train.run import Run

STEP = Path("checkpoints", name_of(2))
MINE, THEIRS = "a" * 32, "b" * 32
SECONDS = 20.0
"""Longest time that one checkpoint may take on a busy machine."""


def train(run: Run[Any]) -> str:
    """Train to the end, and return the fingerprint of the weights."""
    model = run.place(linear)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9)
    run.track(model=model, optimizer=optimizer, schedule=schedule)
    for step in run.steps(Numbers()):
        for x, i in step:
            step.backward(loss_of(model, x), weight=len(i))
        step.update(optimizer, schedule)
    return run.context.state.fingerprint()


def make(world: World, folder: str) -> str:
    """Write the checkpoints after step 2 of two runs, and return the fingerprint of the first one at its end."""
    ends = list[str]()
    for name, run_id in (("mine", MINE), ("theirs", THEIRS)):
        path = Path(folder, name)
        path.mkdir()
        keep = CheckpointSettings(every=2, keep=9)
        settings = SETTINGS.__class__(steps=3, batch=8, virtual_ranks=4, seed=len(ends), checkpoint=keep)
        with join(world) as group:
            run = build_run(settings, world, group, path)
            ends.append(train(run))
            finish_run(run)
            close_run(run)
        shutil.rmtree(path / "checkpoints" / name_of(3))
        divide(path / STEP)
        draft = Draft(path / STEP)
        draft.state["identity"]["run"] = run_id
        draft.seal()
        (path / "environment.json").write_text(json.dumps({"run": run_id}))
    return ends[0]


class Base(NamedTuple):
    """Two runs, and the fingerprint at the end of the first."""

    folder: Path
    end: str


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    folder = tmp_path_factory.mktemp("runs")
    (end,) = run_ranks(make, 1, str(folder), seconds=200)
    return Base(folder, end)


def craft(base: Path, run_dir: Path, change: Change) -> None:
    """Copy the run `mine`, and change its checkpoint."""
    shutil.copytree(base / "mine", run_dir)
    draft = Draft(run_dir / STEP)
    change(draft, base / "theirs" / STEP)
    draft.seal()


def of_another_run(draft: Draft, other: Path) -> None:
    draft.last.append(lambda folder: shutil.copytree(other, folder, dirs_exist_ok=True))


def state_of_another_run(draft: Draft, other: Path) -> None:
    draft.state = json.loads((other / "state.json").read_bytes())


def under_another_name(draft: Draft, other: Path) -> None:
    draft.last.append(lambda folder: folder.rename(folder.with_name(name_of(3))))


def of_no_run(draft: Draft, other: Path) -> None:
    del draft.state["identity"]["run"]


RUNS: dict[str, Change] = {
    "of another run": of_another_run,
    "with the state of another run": state_of_another_run,
    "under another name": under_another_name,
    "of no run": of_no_run,
    "unchanged": lambda draft, other: None,
}
SAME = {"unchanged"}
ALL = CONTENTS | STATES | RUNS


def test_the_files_of_crafted_checkpoints_are_refused(base: Base, tmp_path: Path) -> None:
    """Each is refused by the check that precedes every load, or has the same content."""
    right = fingerprint_of(load(base.folder / "mine" / STEP).states)
    same = []
    for number, (name, change) in enumerate({**CONTENTS, "unchanged": RUNS["unchanged"]}.items()):
        run_dir = tmp_path / str(number)
        craft(base.folder, run_dir, change)
        began = time.monotonic()
        try:
            path = newest(run_dir, lambda note: None)
            assert path is not None
            found = fingerprint_of(load(path).states)
        except CheckpointError as error:
            found = str(error)
        if found == right:
            same.append(name)
        else:
            assert f"{run_dir}/" in found, (name, found)
            assert found.replace("\n", "").isprintable(), (name, ascii(found))
        assert time.monotonic() - began < SECONDS, name
        shutil.rmtree(run_dir)
    assert len(CONTENTS) - len(same) >= 120, same
    print(f"{len(CONTENTS)} crafted checkpoints; with the same content: {same}")


def resume_all(world: World, folder: str, into: str) -> tuple[dict[str, str], int]:
    """Resume each crafted checkpoint; return what became of it, and the growth of memory in KiB."""
    outcomes: dict[str, str] = {}
    identity = json.loads(Path(folder, "mine", STEP, "state.json").read_bytes())["identity"]
    now = {name: value for name, value in identity.items() if name != "run"}
    with join(world) as group:
        torch.ones(1 << 20).sum()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for number, (name, change) in enumerate(ALL.items()):
            run_dir = Path(into, str(number))
            craft(Path(folder), run_dir, change)
            request = StartRequest(Path("train.py"), RunRequest(run_dir=run_dir, resume=True), world)
            began = time.monotonic()
            try:
                request.begin(run_dir, now, any_signature)
                run = build_run(
                    SETTINGS.__class__(steps=3, batch=8, virtual_ranks=4), world, group, run_dir, resume=True
                )
                try:
                    outcomes[name] = train(run)
                finally:
                    close_run(run)
            except UnisonoError as error:
                outcomes[name] = f"{error.exit_status} {error}"
            except Exception as error:
                outcomes[name] = f"traceback: {type(error).__name__}: {error}"
            if time.monotonic() - began > SECONDS:
                outcomes[name] = f"hung for {time.monotonic() - began:.0f} s"
            shutil.rmtree(run_dir)
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return outcomes, after - before


@pytest.mark.slow
def test_crafted_checkpoints_are_resumed_with_the_same_bits_or_refused(base: Base, tmp_path: Path) -> None:
    ((outcomes, grown),) = run_ranks(resume_all, 1, str(base.folder), str(tmp_path), seconds=230)
    assert outcomes.keys() == ALL.keys()
    wrong = {
        name: outcome
        for name, outcome in outcomes.items()
        if outcome != base.end and not re.match(r"(?s)[12] .*\n  Next: ", outcome)
    }
    assert wrong == {}
    assert outcomes["unchanged"] == base.end
    for name in RUNS.keys() - SAME:
        assert outcomes[name] != base.end, name
    refused = [name for name, outcome in outcomes.items() if outcome != base.end]
    assert len(refused) >= 150
    assert not [name for name in refused if re.search("alloc|MemoryError", outcomes[name])]
    assert grown < 200 << 10, f"{grown} KiB"  # 100,000 levels of JSON take some of it
    print(f"{len(ALL)} crafted checkpoints: {len(refused)} refused, {len(ALL) - len(refused)} the same; {grown} KiB")


def test_a_checkpoint_of_another_run_is_refused_by_name(base: Base, tmp_path: Path) -> None:
    craft(base.folder, tmp_path / "run", of_another_run)
    identity = json.loads((tmp_path / "run" / STEP / "state.json").read_bytes())["identity"]
    now = {name: value for name, value in identity.items() if name != "run"}

    def begin(*accepted: str) -> tuple[str | None, str]:
        request = RunRequest(run_dir=tmp_path / "run", resume=True, accept_change=accepted)
        return StartRequest(Path("train.py"), request, World.current()).begin(tmp_path / "run", now, any_signature)

    with pytest.raises(UnisonoError) as refused:
        begin()
    assert str(refused.value).startswith(f"Cannot resume from {tmp_path / 'run' / STEP}: it belongs to another run.\n")
    assert THEIRS in str(refused.value)
    assert "--resume --accept-change run" in str(refused.value)
    assert begin("run") == (str(tmp_path / "run" / STEP), THEIRS)
    (tmp_path / "run" / "environment.json").unlink()  # a directory that says nothing takes up the run
    assert begin() == (str(tmp_path / "run" / STEP), THEIRS)


def test_every_dtype_of_the_table_is_one_of_torch() -> None:
    for name, (_, size) in DTYPES.items():
        assert isinstance(dtype := getattr(torch, name), torch.dtype)
        assert dtype.itemsize == size
