"""A process that dies before its first step: all processes restart, and the run has the same bits."""

from __future__ import annotations

import pytest

from tests.cli.command import Command
from tests.cli.test_training import SCRIPT, result, uninterrupted

DYING = SCRIPT.replace(
    "from dataclasses",
    """DEATHS = {}  # place: the ranks that are killed when they first reach it

def die(place):
    mark = Path(__file__).with_name(f"died-{place}-{world.rank}")
    if world.rank in DEATHS.get(place, ()) and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)

die("script")
from dataclasses""",
    1,
)
PLACES = {
    "main": "    x = torch.randn(",
    "place": "    optimizer = torch",
    "track": "    for step in run.steps(",
    "step": "        for inputs, targets in step:",
    "update": "        step.update(",
}
"""The line of the script that follows each place of a death."""
for name, line in PLACES.items():
    indent = line[: len(line) - len(line.lstrip())]
    DYING = DYING.replace(line, f'{indent}die("{name}")\n{line}')


def run_with_deaths(command: Command, deaths: dict[str, tuple[int, ...]], ranks: int, *words: str) -> str:
    """Run the script with deaths at these places, compare its bits, and return standard error."""
    command.script(DYING.replace("DEATHS = {}", f"DEATHS = {deaths}"))
    ended = command.run("run", "script.py", "--ranks", str(ranks), "--run-dir", "out", *words, times=4)
    assert ended.status == 0, ended.err
    command.script(SCRIPT)
    assert result(command, "out")["weights_sha256"] == uninterrupted(command)["weights_sha256"]
    return ended.err


@pytest.mark.slow
def test_a_death_after_the_processes_have_met(command: Command) -> None:
    messages = run_with_deaths(command, {"place": (1,)}, 2)
    assert "Rank 1 of 2 died of signal 9 (SIGKILL)" in messages
    assert "Restarting from the beginning, because nothing was saved yet (1 of 3)." in messages


def test_a_lost_connection_is_not_the_cause_even_if_the_launcher_is_late(command: Command) -> None:
    command.script("""
        import json, subprocess

        record = Path(json.loads(sys.orig_argv[sys.orig_argv.index("unisono.launcher.worker_main") + 1])["record"])
        here = Path(__file__).parent
        if (here / "late").exists():
            sys.exit()
        if world.rank == 0:
            (here / "ready").touch()
            while not (here / "late").exists():
                time.sleep(0.001)
            raise RuntimeError("Connection closed by peer [127.0.0.1]:4711")
        while not (here / "ready").exists():
            time.sleep(0.001)
        launcher = os.getppid()
        os.kill(launcher, signal.SIGSTOP)
        (here / "late").touch()
        while not record.with_name("rank-0.json").exists():
            time.sleep(0.001)
        subprocess.Popen(["sh", "-c", f"sleep 0.6; kill -CONT {launcher}"], start_new_session=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """)
    ended = command.run("run", "script.py", "--ranks", "2", "--run-dir", "out")
    assert "Rank 1 of 2 died of signal 9 (SIGKILL)" in ended.err
    assert "Restarting from the beginning" in ended.err


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [(), ("parallel.shard=2",), ("parallel.shard=2", "parallel.replicate_shards=true")],
    ids=["whole", "shards", "shard replicas"],
)
def test_two_deaths_at_once_and_one_after_the_restart(command: Command, words: tuple[str, ...]) -> None:
    messages = run_with_deaths(
        command,
        {"script": (0, 1), "step": (1,)},
        2,
        *(word for each in words for word in ("--set", each)),
    )
    assert "(1 of 3)" in messages


@pytest.mark.parametrize(
    ("signal_number", "reason"),
    [
        (9, "(SIGKILL): usually the machine ran out of memory"),
        (11, "(SIGSEGV): a crash in compiled code"),
    ],
)
def test_a_process_that_always_dies_is_explained_and_restarted_three_times(
    command: Command, signal_number: int, reason: str
) -> None:
    command.script(f"""
        print("loading 900 GB")
        if world.rank == 1:
            os.kill(os.getpid(), {signal_number})
        signal.pause()
        """)
    ended = command.run("run", "script.py", "--ranks", "2", "--run-dir", "out")
    assert ended.status == 1
    assert ended.err.count(f"Rank 1 of 2 died of signal {signal_number} {reason}") == 4
    restarts = [line for line in ended.err.splitlines() if line.startswith("Restarting")]
    again = "Restarting from the beginning, because nothing was saved yet"
    assert restarts == [f"{again} ({number} of 3)." for number in (1, 2, 3)]
    assert ended.err.splitlines()[-1] == "Stopped restarting: the run died 4 times without a new checkpoint."
    assert ("    loading 900 GB" in ended.err.splitlines()) == (
        signal_number == 9
    )  # after other signals, Python writes its stack instead
    command.wait_until_gone()


def test_a_script_may_close_the_pipe_to_its_launcher(command: Command) -> None:
    """Daemons close all descriptors. After a stop signal, the interrupted read of that descriptor restarts."""
    command.script("""
        import json, subprocess

        place = sys.orig_argv.index("unisono.launcher.worker_main") + 1
        folder = Path(json.loads(sys.orig_argv[place])["record"]).parent
        os.closerange(3, 100)
        others = [os.open(os.devnull, os.O_RDONLY) for _ in range(20)]
        look = f"grep -L '^State:.T' /proc/{os.getpid()}/task/*/status"
        stop = f"kill -STOP {os.getpid()}; while [ -n \\"$({look})\\" ]; do :; done; kill -CONT {os.getpid()}"
        subprocess.run(["sh", "-c", stop])
        time.sleep(0.3)  # time for the folder to be deleted by mistake
        print("the folder is there:", folder.exists())
        """)
    ended = command.run("run", "script.py", "--run-dir", "out")
    assert ended.status == 0, ended.err
    assert ended.out == "the folder is there: True\n"
