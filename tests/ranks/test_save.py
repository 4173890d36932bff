"""Asynchronous saves: parts by process, the state at the beginning, errors on all ranks, process deaths."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.loops import SETTINGS, attempt, train
from tests.ranks.test_pipeline import UNEVEN, train_and_stop
from tests.ranks.training import loop, settings
from unisono.checkpoint import manifest
from unisono.checkpoint.load import fingerprint, load, newest
from unisono.checkpoint.manifest import WrittenFile
from unisono.checkpoint.storage import FolderStorage
from unisono.config import CheckpointSettings, ParallelSettings
from unisono.distributed.init import join_process_group as join
from unisono.environment import World
from unisono.testing import build_run, close_run, run_ranks
from unisono.train.run import Run


class SlowFolder(FolderStorage):
    """A slow disk: until `go`, only the first bytes of a file are written."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.begun, self.go = threading.Event(), threading.Event()

    def write(self, steps: int, name: str, chunks: Iterable[bytes | memoryview]) -> WrittenFile:
        return super().write(steps, name, self._slowly(chunks) if name.endswith(".safetensors") else chunks)

    def _slowly(self, chunks: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
        for chunk in chunks:
            yield chunk
            self.begun.set()
            assert self.go.wait(30)


EVERY_TWO = replace(SETTINGS, steps=6, checkpoint=CheckpointSettings(every=2, keep=9))


def on_a_slow_disk(world: World, folder: Path) -> Any:
    """End the save after step 2 only after step 4. Return the model at that time, and the steps done meanwhile."""
    prints: dict[int, str] = {}
    steps_done: list[int] = []

    def body(run: Run[Any]) -> Any:
        slow = SlowFolder(folder / "checkpoints")
        run.context.state._place = slow

        def after(step: Any, optimizer: Any) -> None:
            step.update(optimizer)
            prints[step.number + 1] = run.context.state.fingerprint()
            if step.number in (2, 3):
                assert slow.begun.wait(30)
                steps_done.append(step.number)
                assert not manifest.checkpoints(folder)
            if step.number == 3:
                slow.go.set()  # the save after step 4 waits for this one

        return train(run, after=after)

    config = replace(EVERY_TWO, parallel=ParallelSettings(shard=2))  # both processes have files to write
    return attempt(world, folder, body, config), steps_done, prints


def test_steps_continue_during_a_save_which_has_the_state_of_its_begin(tmp_path: Path) -> None:
    told = run_ranks(on_a_slow_disk, 2, tmp_path)
    assert [steps_done for _, steps_done, _ in told] == [[2, 3], [2, 3]]
    prints = told[0][2]
    saved = {steps: fingerprint(path)["weights_sha256"] for steps, path in manifest.checkpoints(tmp_path)}
    assert saved == {steps: prints[steps] for steps in (2, 4, 6)}
    assert len(set(saved.values())) == 3


def killed_while_saving(world: World, folder: Path) -> None:
    def body(run: Run[Any]) -> Any:
        slow = SlowFolder(folder / "checkpoints")

        def after(step: Any, optimizer: Any) -> None:
            step.update(optimizer)
            if step.number == 2:  # the first checkpoint is saved; the next one is on a slow disk
                run.context.state.settle()
                run.context.state._place = slow
            if step.number == 4:
                assert slow.begun.wait(30)
                os.kill(os.getpid(), signal.SIGKILL)

        return train(run, after=after)

    attempt(world, folder, body, EVERY_TWO)


def test_a_process_death_during_a_save_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="died with exit code -9"):
        run_ranks(killed_while_saving, 1, tmp_path)
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert left == [".step-00000004.unfinished", "step-00000002"]
    assert newest(tmp_path, pytest.fail) == tmp_path / "checkpoints" / "step-00000002"
    whole = run_ranks(partial(attempt, settings=EVERY_TWO), 1, tmp_path / "whole", train)[0]
    resumed = run_ranks(partial(attempt, settings=EVERY_TWO, resume=True), 1, tmp_path, train)[0]
    assert resumed[-1] == whole[-1]
    assert not list((tmp_path / "checkpoints").glob(".*.unfinished"))


def breaks_while_saving(world: World, folder: Path) -> Any:
    def after(step: Any, optimizer: Any) -> None:
        if step.number == 2:
            raise ValueError("a bug in the loop")
        step.update(optimizer)

    return attempt(world, folder, lambda run: train(run, after=after), EVERY_TWO)


def test_a_failed_loop_lets_the_last_save_finish(tmp_path: Path) -> None:
    told = run_ranks(breaks_while_saving, 2, tmp_path)
    assert any("a bug in the loop" in words for words in told)
    assert newest(tmp_path, pytest.fail) == tmp_path / "checkpoints" / "step-00000002"


# -- files of each process


def tensor_counts(path: Path) -> dict[str, tuple[int, int]]:
    """Return the numbers of whole tensors and of parts, by file."""
    words = {file.stem: json.loads(file.read_text()) for file in sorted(path.glob("rank-*.json"))}
    return {name: (len(word["whole"]), len(word["parts"])) for name, word in words.items()}


def short(world: World, folder: Path, config: Any, resume: bool = False) -> str:
    with join(world) as group:
        run = build_run(config, world, group, folder, resume=resume)
        loop(run, "mlp", 101, {}, None, False)
        close_run(run)
        return run.context.state.fingerprint()


def test_each_process_writes_its_shards_and_one_reads_all(tmp_path: Path) -> None:
    """With two replicas of two shards each, the processes of the first replica write, and the others write nothing."""
    config = settings(steps=4, checkpoint=CheckpointSettings(every=3), parallel=ParallelSettings(shard=2))
    prints = run_ranks(short, 4, tmp_path, config)
    path = tmp_path / "checkpoints" / "step-00000004"
    told = tensor_counts(path)
    assert sorted(told) == ["rank-00000", "rank-00001"]
    assert told["rank-00001"][0] == 0  # parts only
    assert told["rank-00000"][1] == told["rank-00001"][1] >= 12  # four parameters, and two moments of each
    assert {fingerprint(path)["weights_sha256"]} == set(prints)
    longer = replace(config, steps=6)
    three = replace(longer, parallel=ParallelSettings(shard=3))
    shutil.copytree(tmp_path / "checkpoints", tmp_path / "again" / "checkpoints")
    alone = run_ranks(short, 1, tmp_path / "again", replace(longer, parallel=ParallelSettings()), True)
    assert set(run_ranks(short, 3, tmp_path, three, True)) == set(alone)


def test_each_pipeline_stage_writes_its_parameters(tmp_path: Path) -> None:
    piped = replace(UNEVEN, parallel=ParallelSettings(pipeline=2))
    run_ranks(train_and_stop, 2, tmp_path, piped, 2)
    told = tensor_counts(tmp_path / "checkpoints" / "step-00000003")
    assert sorted(told) == ["rank-00000", "rank-00001"]
    assert all(whole > 5 and not parts for whole, parts in told.values())


# -- errors


def second_cannot_write(world: World, folder: Path) -> Any:
    """Put a folder at the path of the second process's file."""

    def body(run: Run[Any]) -> Any:
        def after(step: Any, optimizer: Any) -> None:
            step.update(optimizer)
            if step.number == 2:
                run.context.state.settle()
                if world.rank == 0:
                    (folder / "checkpoints/.step-00000004.unfinished/rank-00001.safetensors").mkdir(parents=True)

        return train(run, after=after)

    return attempt(world, folder, body, replace(EVERY_TWO, parallel=ParallelSettings(shard=2)))


def test_all_ranks_name_the_file_that_one_cannot_write(tmp_path: Path) -> None:
    first, second = run_ranks(second_cannot_write, 2, tmp_path)
    assert first == second
    assert "Cannot write the checkpoint after step 4" in first
    assert "rank-00001.safetensors" in first
    assert "The checkpoint after step 2 is complete." in first
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]


def loses_permission(world: World, folder: Path) -> Any:
    """Train as another user than root, in a folder that becomes read-only after step 3."""
    os.seteuid(65534)

    def body(run: Run[Any]) -> Any:
        def after(step: Any, optimizer: Any) -> None:
            step.update(optimizer)
            if step.number == 2:
                run.context.state.settle()
                (folder / "checkpoints").chmod(0o500)

        return train(run, after=after)

    return attempt(world, folder, body, EVERY_TWO)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_lost_permission_is_reported_and_changes_nothing() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.chown(folder, 65534, 65534)
        (told,) = run_ranks(loses_permission, 1, folder)
        assert "PermissionError" in told
        assert ".step-00000004.unfinished" in told
        assert "The checkpoint after step 2 is complete." in told
        assert load(folder / "checkpoints" / "step-00000002").steps == 2
