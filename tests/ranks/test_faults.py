"""Injected faults: each has its effect, in its place, once."""

from __future__ import annotations

import errno
import signal
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import training
from unisono import phases
from unisono.environment import World
from unisono.testing import (
    BitFlip,
    FailAt,
    FullDisk,
    HangAt,
    LostPackets,
    PlantedFailure,
    TornFile,
    flip_,
    flip_bit,
    run_ranks,
)
from unisono.testing.fault_spec import fault_of, planted
from unisono.testing.faults import Fault

ONE = training.settings(steps=3, virtual_ranks=2, batch=8)


def train_with_fault(world: World, fault: Fault | None, folder: str, rank: int = 0) -> dict[str, Any]:
    with fault if fault is not None and world.rank == rank else nullcontext():
        return training.train(world, "mlp", ONE, folder)


@pytest.mark.parametrize(("kind", "code"), [("kill", -signal.SIGKILL), ("crash", -signal.SIGSEGV), ("exit", 0)])
def test_process_exits(tmp_path: Path, kind: Any, code: int) -> None:
    with pytest.raises(AssertionError, match=f"died with exit code {code}"):
        run_ranks(train_with_fault, 1, FailAt(1, "backward", kind=kind), str(tmp_path))


def die_in_phase(world: World, folder: str) -> None:
    with FailAt(0, "exchange", later=0.1), phases.phase("other"):
        phases.position.step = 0
        phases.enter("exchange")
        time.sleep(30)


def test_process_dies_in_a_phase(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="died with exit code -9"):
        run_ranks(die_in_phase, 1, str(tmp_path))


@pytest.fixture
def record_steps() -> Any:
    phases.enter("other")
    phases.position.step = 2
    yield
    phases.enter("other")
    phases.position.step = phases.position.virtual_rank = None


@pytest.mark.usefixtures("record_steps")
def test_fault_occurs_once_in_its_place() -> None:
    with FailAt(2, "update", kind="error") as fault:
        phases.enter("forward")
        with pytest.raises(PlantedFailure, match="in step 2"):
            phases.enter("update")
        phases.enter("other")
        phases.enter("update")
        assert fault._struck_in == 2
    with FailAt(phase="backward", when="ends", kind="error", virtual_rank=1):
        for phases.position.virtual_rank in (0, 2):
            phases.enter("backward")
            phases.enter("other")
        phases.position.virtual_rank = 1
        phases.enter("backward")
        with pytest.raises(PlantedFailure):
            phases.enter("other")
    with pytest.raises(ValueError, match="there are other, data"):
        FailAt(1, "nothing")


@pytest.mark.usefixtures("record_steps")
@pytest.mark.parametrize("kind", ["sleep", "spin", "hold"])
def test_stall_ends(kind: Any) -> None:
    began = time.monotonic()
    with HangAt(2, "data", kind=kind, seconds=0.2):
        phases.enter("data")
    assert time.monotonic() - began >= 0.2


@pytest.mark.parametrize("of", ["output", "weights", "gradient"])
def test_bit_flip_changes_the_result(tmp_path: Path, of: Any) -> None:
    (whole,) = run_ranks(train_with_fault, 1, None, str(tmp_path / "whole"))
    (flipped,) = run_ranks(train_with_fault, 1, BitFlip(1, of=of, element=9), str(tmp_path / "flipped"))
    assert whole["losses"][0] == flipped["losses"][0]
    assert whole["state"] != flipped["state"]


def test_bit_flip_changes_one_element() -> None:
    for dtype, whole in ((torch.float32, torch.int32), (torch.float64, torch.int64), (torch.bfloat16, torch.int16)):
        tensor = torch.ones(3, 4, dtype=dtype).t()
        version = tensor._version
        before = tensor.clone()
        flip_(tensor, element=5, bit=3)
        changed = (before.contiguous().view(whole) ^ tensor.contiguous().view(whole)).flatten()
        assert changed.tolist() == [0] * 5 + [8] + [0] * 6
        assert tensor._version == version


@pytest.mark.usefixtures("record_steps")
def test_truncated_files(tmp_path: Path) -> None:
    with TornFile(2, "checkpoint", folder=tmp_path, pattern="*.bin", keep=0.25):
        phases.enter("checkpoint")
        (tmp_path / "a.bin").write_bytes(bytes(100))
        phases.enter("other")
        phases.enter("data")
    assert (tmp_path / "a.bin").read_bytes() == bytes(25)
    flip_bit(tmp_path / "a.bin", place=1.0, bit=7)
    assert (tmp_path / "a.bin").read_bytes() == bytes(24) + b"\x80"


def write_files(world: World, folder: str) -> list[int]:
    """Return the sizes of files written before, during and after the fault, and the error."""
    file, sizes, message = Path(folder, "file"), [], 0
    phases.position.step = 0
    with FullDisk(1, "checkpoint", bytes=10):
        for phases.position.step in range(3):
            phases.enter("checkpoint")
            try:
                file.write_bytes(bytes(50))
            except OSError as error:
                message = error.errno or 0
            phases.enter("other")
            sizes.append(file.stat().st_size)
    file.write_bytes(bytes(50))
    return [*sizes, file.stat().st_size, message]


def test_full_disk(tmp_path: Path) -> None:
    assert run_ranks(write_files, 1, str(tmp_path)) == [[50, 10, 10, 50, errno.EFBIG]]


@pytest.mark.slow
def test_lost_packets_are_retransmitted(tmp_path: Path) -> None:
    """TCP retransmits, so the bits are equal; if all packets are lost, the run stalls."""
    whole = run_ranks(train_with_fault, 2, None, str(tmp_path / "whole"))
    lossy = run_ranks(train_with_fault, 2, LostPackets(1, "data", share=0.2), str(tmp_path / "lossy"))
    assert [rank["state"] for rank in lossy] == [rank["state"] for rank in whole]
    with pytest.raises(TimeoutError):
        run_ranks(train_with_fault, 2, LostPackets(1, "data"), str(tmp_path / "silent"), seconds=3)


def test_parse_fault() -> None:
    assert fault_of("FailAt step=2 phase=backward rank=1 later=0.5") == (FailAt(2, "backward", later=0.5), 1)
    assert fault_of("LostPackets share=0.5 steps=inf") == (LostPackets(share=0.5), None)
    with pytest.raises(ValueError, match="there are FailAt, HangAt"):
        fault_of("Fail step=2")
    with pytest.raises(ValueError, match="unexpected keyword argument 'stepp'"):
        fault_of("FailAt stepp=2")


@pytest.mark.usefixtures("record_steps")
def test_planned_fault_occurs_once_in_a_run(tmp_path: Path) -> None:
    texts = ["FailAt step=2 phase=update kind=error rank=0", "FailAt step=2 phase=update kind=error rank=1"]
    with planted(texts, 0, tmp_path), pytest.raises(PlantedFailure):
        phases.enter("update")
    phases.enter("other")
    with planted(texts, 0, tmp_path):
        phases.enter("update")
    phases.enter("other")
    with planted(texts, 1, tmp_path), pytest.raises(PlantedFailure):
        phases.enter("update")
