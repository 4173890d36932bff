"""The setting `backend`: a back end that the script registers with torch, wrong ones, and names that torch has not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.command import Command
from tests.cli.test_training import SCRIPT, result, uninterrupted

BACKEND = """
import torch
import torch.distributed as dist

class Counted(dist.ProcessGroup):
    '''A back end in Python, which sends by gloo and counts its operations.'''

    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self.inner, self.count = dist.ProcessGroupGloo(store, rank, size, timeout), 0

    def getBackendName(self):
        return "counted"

    def _call(self, name, *arguments):
        self.count += 1
        if self.count == 40:
            Path(__file__).with_name(f"counted-{dist.get_rank()}").touch()
        return getattr(self.inner, name)(*arguments)

    def allreduce(self, tensors, *more):
        if WRONG and tensors[0].dtype is torch.float64:
            tensors[0].copy_(tensors[0].float())  # as a back end that compresses
        return self._call("allreduce", tensors, *more)

    def broadcast(self, *arguments):
        return self._call("broadcast", *arguments)

    def send(self, *arguments):
        return self._call("send", *arguments)

    def recv(self, *arguments):
        return self._call("recv", *arguments)

    def alltoall_base(self, *arguments):
        return self._call("alltoall_base", *arguments)

    def _allgather_base(self, *arguments):
        return self._call("_allgather_base", *arguments)

    all_to_all_single, all_gather_single = alltoall_base, _allgather_base  # the names since torch 2.13

dist.Backend.register_backend("counted", Counted, devices=["cpu"])
"""

COUNTED = ("--set", "backend=counted")


def with_backend(*, wrong: bool = False) -> str:
    return f"WRONG = {wrong}\n{BACKEND}\n{SCRIPT}"


def used(folder: Path) -> list[str]:
    """Return the marks of processes that sent by the back end of the script."""
    return sorted(path.name for path in folder.glob("counted-*"))


@pytest.mark.ci
def test_a_backend_of_the_script_gives_the_bits_of_one_process(command: Command) -> None:
    command.script(with_backend())
    whole = uninterrupted(command)
    assert used(command.folder) == []
    command.train("out", *COUNTED, ranks=3)
    found = result(command, "out")
    assert (found["weights_sha256"], found["promise"]) == (whole["weights_sha256"], "exact")
    assert used(command.folder) == [f"counted-{rank}" for rank in range(3)]


def test_a_backend_that_rounds_is_refused_before_the_first_step(command: Command) -> None:
    command.script(with_backend(wrong=True))
    ended = command.run("run", "script.py", "--ranks", "2", "--run-dir", "out", *COUNTED)
    assert ended.status == 1
    assert "The back end counted cannot be used." in ended.err
    assert "all_reduce (sum) gives wrong bits on rank" in ended.err
    assert not (command.folder / "out" / "result.json").exists()
    command.wait_until_gone()


@pytest.mark.ci
@pytest.mark.parametrize(
    ("name", "first", "facts"),
    [
        ("ucc", "backend = ucc is not in this torch.", "and the script has registered counted."),
        pytest.param("mpi", "backend = mpi is not in this torch.", "This torch (", marks=pytest.mark.slow),
        ("contued", "backend = contued is unknown.", 'register_backend("contued", create, devices=["cpu"])'),
        pytest.param("fake", "backend = fake is unknown.", "This torch (", marks=pytest.mark.slow),
    ],
)
def test_a_backend_that_torch_has_not_is_one_message(command: Command, name: str, first: str, facts: str) -> None:
    command.script(with_backend())
    ended = command.run("run", "script.py", "--ranks", "2", "--run-dir", "out", "--set", f"backend={name}")
    assert (ended.status, ended.err.count(first)) == (2, 1), ended.err
    assert facts in ended.err
    assert "Next: " in ended.err
    assert not (command.folder / "out" / "result.json").exists()
    command.wait_until_gone()


DEATH = """        mark = Path(__file__).with_name("died")
        if step.number == 9 and world.number == 1 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "restarts"), [("gloo", 0), ("counted", 1)])
def test_the_result_is_the_same_after_a_death(command: Command, name: str, restarts: int) -> None:
    """Under gloo the others continue. Under a back end of the script all processes restart from a checkpoint."""
    before = "        if step.number in (0, 5):"
    assert before in SCRIPT
    command.script(with_backend().replace(before, DEATH + before))
    command.train("whole")
    words = ("--ranks", "3", "--run-dir", "out", "--set", f"backend={name}")
    ended = command.run("run", "script.py", *words, times=2)
    assert ended.status == 0, ended.err
    found = result(command, "out")
    assert found["weights_sha256"] == result(command, "whole")["weights_sha256"]
    assert (command.folder / "died").exists()
    assert len(found.get("deaths", [])) == 1 - restarts, found
