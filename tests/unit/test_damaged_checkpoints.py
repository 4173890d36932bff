"""Two hundred damaged checkpoints: each is refused or skipped with its file named, and none is loaded with errors."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from unisono.checkpoint import manifest
from unisono.checkpoint.contents import FORMAT
from unisono.checkpoint.load import load, newest
from unisono.checkpoint.safetensors_writer import chunks_in_place, file_layout
from unisono.checkpoint.save import SaveJob, packed
from unisono.checkpoint.storage import FolderStorage
from unisono.errors import CheckpointError
from unisono.tensors.codec import TensorTable
from unisono.tensors.digest import fingerprint_of

CASES = 200


def state(step: int) -> dict[str, Any]:
    g = torch.Generator().manual_seed(step)
    weight = torch.randn(6, 4, generator=g)
    return {
        "model": {"weight": weight, "bias": torch.randn(3, generator=g)},
        "optimizer": {"lr": 0.1 * step, "n": step},
    }


def write_by_two_processes(run_dir: Path, step: int) -> Path:
    """Write a checkpoint as two processes do that hold three rows of `weight` each."""
    whole, there, plain = state(step), FolderStorage(run_dir / "checkpoints"), {}
    jobs = []
    for rank in (0, 1):
        tensors = TensorTable()
        made = packed(whole, {"models": ["model"], "identity": {}, "changes": []}, tensors)
        assert not isinstance(made, CheckpointError)
        if rank == 0:
            plain = {"format": FORMAT, "steps": step, **made[1]}
        else:
            del tensors["model.bias"]
        tensors["model.weight"] = whole["model"]["weight"][3 * rank : 3 * rank + 3].clone()
        tensors.starts["model.weight"] = (3 * rank, 0)
        job = SaveJob(there, step, tensors, None if rank else plain, (9, 0), rank=rank, ranks=[0, 1], attempt="one")
        job.write(chunks_in_place(file_layout(tensors), tensors))
        jobs.append(job)
    jobs[0].publish()
    assert [job.problem for job in jobs] == [None, None]
    return run_dir / "checkpoints" / manifest.name_of(step)


def flip(path: Path, other: Path, rng: random.Random) -> None:
    """Flip one bit of a file."""
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def cut(path: Path, other: Path, rng: random.Random) -> None:
    """Cut off the end of a file."""
    content = path.read_bytes()
    path.write_bytes(content[: rng.randrange(len(content))])


def lose(path: Path, other: Path, rng: random.Random) -> None:
    path.unlink()


def swap(path: Path, other: Path, rng: random.Random) -> None:
    """Replace a file by that of another checkpoint."""
    shutil.copy(other / path.name, path)


def mix(path: Path, other: Path, rng: random.Random) -> None:
    """Swap two files of a checkpoint."""
    second = rng.choice([file for file in sorted(path.parent.iterdir()) if file != path])
    content = path.read_bytes()
    path.write_bytes(second.read_bytes())
    second.write_bytes(content)


def zero(path: Path, other: Path, rng: random.Random) -> None:
    """Zero a part of a file, as if it had not reached the disk."""
    content = bytearray(path.read_bytes())
    first = rng.randrange(len(content))
    content[first : first + 64] = bytes(len(content[first : first + 64]))
    path.write_bytes(content)


def grow(path: Path, other: Path, rng: random.Random) -> None:
    path.write_bytes(path.read_bytes() + b" " * rng.randrange(1, 9))


DAMAGES: list[Callable[[Path, Path, random.Random], None]] = [flip, flip, flip, cut, zero, grow, lose, swap, mix]


def test_two_hundred_damaged_checkpoints(tmp_path: Path) -> None:
    right = {10: fingerprint_of(state(10)), 20: fingerprint_of(state(20))}
    older, newer = (write_by_two_processes(tmp_path / "made", step) for step in (10, 20))
    assert {path: fingerprint_of(load(path).states) for path in (older, newer)} == {older: right[10], newer: right[20]}
    passed = unharmed = 0
    for case in range(CASES):
        rng = random.Random(case)
        run = tmp_path / str(case)
        shutil.copytree(tmp_path / "made", run)
        folder = run / "checkpoints" / newer.name
        path = rng.choice(sorted(folder.iterdir()))
        before = {file.name: file.read_bytes() for file in folder.iterdir()}
        DAMAGES[case % len(DAMAGES)](path, older, rng)
        notes: list[str] = []
        found = newest(run, notes.append)
        assert found is not None
        if found == folder:  # the change has no effect: a space behind the manifest's JSON, for example
            assert fingerprint_of(load(found).states) == right[20], (case, path.name)
            changed = {name for name, content in before.items() if (folder / name).read_bytes() != content}
            assert changed <= {manifest.MANIFEST}, (case, changed)
            unharmed += 1
            continue
        assert (found, load(found).steps) == (run / "checkpoints" / older.name, 10)
        assert fingerprint_of(load(found).states) == right[10]
        (note,) = notes
        assert f"{folder}/" in note, note
        assert any(name in note for name in before), note
        passed += 1
        shutil.rmtree(found)
        with pytest.raises(CheckpointError, match="no checkpoint is intact"):
            newest(run, notes.append)
        shutil.rmtree(run)
    assert passed >= CASES * 0.9, (passed, unharmed)


def test_a_checkpoint_under_the_name_of_another_is_refused(tmp_path: Path) -> None:
    path = write_by_two_processes(tmp_path, 10)
    path.rename(path.with_name(manifest.name_of(20)))
    notes: list[str] = []
    with pytest.raises(CheckpointError, match=r"step-00000020/state\.json belongs to the checkpoint after step 10"):
        newest(tmp_path, notes.append)
