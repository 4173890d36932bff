"""torchrun restarts a run whose processes were killed: it ends with the bits of an uninterrupted run."""

from __future__ import annotations

import pytest

from tests.cli.command import Command, Ended
from tests.cli.test_training import SCRIPT, result, uninterrupted

DYING = SCRIPT.replace(
    "from dataclasses",
    """DEATHS = {}  # (restarts so far, step): the ranks that are killed; step -1 is before unisono.main

def die(step):
    if world.rank in DEATHS.get((world.restarts, step), ()):
        os.kill(os.getpid(), signal.SIGKILL)

die(-1)
from dataclasses""",
    1,
).replace("        step.update(", "        die(step.number)\n        step.update(")


def torchrun(command: Command, deaths: dict[tuple[int, int], tuple[int, ...]], ranks: int, restarts: int) -> Ended:
    """Run the script under torchrun; `deaths` maps (restarts so far, step) to the ranks that are killed then."""
    command.script(DYING.replace("DEATHS = {}", f"DEATHS = {deaths}"))
    words = ["--standalone", f"--nproc-per-node={ranks}", f"--max-restarts={restarts}"]
    return command.end(
        command.start_python("-m", "torch.distributed.run", *words, "script.py", "--run-dir", "out"), times=restarts
    )


def test_a_killed_rank_is_restarted(command: Command) -> None:
    ended = torchrun(command, {(0, 6): (1,)}, 2, 1)
    assert ended.status == 0, ended.err
    assert result(command, "out")["resumed_at"] == 4
    assert result(command, "out")["weights_sha256"] == uninterrupted(command)["weights_sha256"]


@pytest.mark.slow
def test_several_deaths_and_a_death_during_a_restart_are_survived(command: Command) -> None:
    deaths = {(0, 6): (1, 2), (1, -1): (0,), (2, 4): (2,)}
    ended = torchrun(command, deaths, 3, 3)
    assert ended.status == 0, ended.err
    assert result(command, "out")["resumed_at"] == 4
    assert result(command, "out")["weights_sha256"] == uninterrupted(command)["weights_sha256"]


@pytest.mark.slow
def test_a_rank_that_always_dies_ends_the_run(command: Command) -> None:
    ended = torchrun(command, {(0, -1): (0,), (1, -1): (1,)}, 2, 1)
    assert ended.status != 0
    assert "Signal 9 (SIGKILL)" in ended.err
