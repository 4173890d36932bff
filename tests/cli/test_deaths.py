"""A process dies in a run of the command: the others continue, a replacement joins, and messages report it."""

from __future__ import annotations

import os
import re

import pytest

from tests.cli.command import Command
from tests.cli.test_training import SCRIPT, result, uninterrupted
from unisono.monitor import timeline

JOIN_REQUESTED = "run.context.group.monitor.join_requested"

DYING = SCRIPT.replace(
    "        step.update(",
    """        name = f"died-{step.number}-{world.number if world.number is not None else world.rank}"
        if f"{step.number}:{name[-1]}" in run.settings.deaths and not Path(__file__).with_name(name).exists():
            Path(__file__).with_name(name).touch()
            for lock in Path(__file__).parent.glob("kept/.lock"):
                Path(__file__).with_name("lock-of-the-first").write_text(lock.read_text())
            os.kill(os.getpid(), signal.SIGKILL)
        step.update(""",
).replace(
    "    lr: float = 0.05",
    '    lr: float = 0.05\n    deaths: str = field(default="", metadata={"changes_bits": False})  # step:process',
)


def test_the_others_continue_and_a_replacement_joins(command: Command) -> None:
    wait = f"        while step.number == 4 and not {JOIN_REQUESTED}:\n            time.sleep(0.01)\n"
    command.script(DYING.replace("        step.update(", wait + "        step.update("))
    ended = command.run(
        *("run", "script.py", "--ranks", "3", "--run-dir", "out", "--set", "deaths=2:0", "--set", "checkpoint.dir=kept")
    )
    assert ended.status == 0, ended.err
    assert (command.folder / "kept" / "step-00000024").exists()
    locked = (command.folder / "kept" / ".lock").read_text()
    assert len(locked.splitlines()) == 1
    assert locked != (command.folder / "lock-of-the-first").read_text()  # the new rank 0 has locked the folder again
    found = result(command, "out")
    assert (found["steps"], found["ranks"]) == (24, 3)
    assert [each["process"] for each in found["deaths"]] == [0]
    assert [each["process"] for each in found["joined"]] == [3]
    joined = found["joined"][0]["step"]
    assert joined in (5, 6)
    messages = ended.err.splitlines()
    assert messages[0].startswith("Process 0 died of SIGKILL after ")
    assert messages[0].endswith(" steps; the run continues with 2 processes. Its log is out/log/rank-0.log")
    assert messages[1:] == [f"Process 3 joined after {joined} steps; the run continues with 3 processes."]
    assert found["weights_sha256"][:12] in ended.out  # printed by the new rank 0
    recorded = [
        event for event in timeline.read(command.folder / "out" / "timeline" / "rank-1.jsonl") if "event" in event
    ]
    assert [(e["event"], e.get("ranks")) for e in recorded if e["event"] in ("death", "join")] == [
        ("death", [0]),
        ("join", [3]),
    ]
    assert [e["virtual_ranks"] for e in recorded if e["event"] == "assignment"][:2] == [[2, 5], [0, 4]]
    command.script(SCRIPT)
    assert found["weights_sha256"] == uninterrupted(command)["weights_sha256"]


FAILING = DYING.replace(
    "        step.update(",
    """        while step.number == 4 and not JOINED:
            time.sleep(0.01)
        if step.number == 8 and world.number in (NUMBERS):
            raise ERROR
        step.update(""",
)
"""Process 1 dies in step 2. After its replacement has joined, the processes NUMBERS raise ERROR in step 8."""
SLOW = pytest.mark.slow


@pytest.mark.slow
@pytest.mark.parametrize(
    ("numbers", "error", "status", "last"),
    [
        pytest.param("0, 1, 2", "ValueError('no ninth step')", 1, "ValueError: no ninth step", id="all"),
        pytest.param(
            "2,",
            "unisono.errors.LoopError('Ask.', 'True.', 'Do.')",
            1,
            "  Next: Do.",
            id="replacement",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "0, 1, 2", "SystemExit(3)", 3, "the script exited with status 3", id="by exit", marks=pytest.mark.slow
        ),
        pytest.param(
            "2,",
            "SystemExit(os._exit(3))",
            3,
            "Its log is empty: out/log/rank-2.log",
            id="no message",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_survived_death_is_not_the_cause_of_a_later_failure(
    command: Command, numbers: str, error: str, status: int, last: str
) -> None:
    text = FAILING.replace("NUMBERS", numbers).replace("JOINED", JOIN_REQUESTED).replace("ERROR", error)
    command.script(text)
    ended = command.run("run", "script.py", "--ranks", "2", "--run-dir", "out", "--set", "deaths=2:1")
    assert ended.status == status, ended.err
    messages = ended.err.splitlines()
    assert messages[0].startswith("Process 1 died of SIGKILL after ")
    assert messages[1].startswith("Process 2 joined after ")
    failed = r"(failed; its log is out/log/rank-[02]\.log|exited with status 3 and no error message \(os\._exit\?\)\.)"
    assert re.fullmatch(rf"(Rank 0 of 2|Process 2, a replacement,) {failed}", messages[2]), messages
    assert messages[2].startswith("Process 2") or numbers != "2,"
    assert messages[-1] == last
    assert "Restarting" not in ended.err


@pytest.mark.slow
def test_a_death_of_the_replacement_is_not_the_cause_of_a_later_failure(command: Command) -> None:
    die = """if world.number > 1:
    Path(__file__).with_name("came").touch()
    os.kill(os.getpid(), signal.SIGKILL)
"""
    came = 'Path(__file__).with_name("came").exists()'
    error = "ValueError('there is no ninth step')"
    text = FAILING.replace("NUMBERS", "0, 1").replace("JOINED", came).replace("ERROR", error)
    command.script(text.replace("from dataclasses", f"{die}from dataclasses", 1))
    ended = command.run("run", "script.py", "--ranks", "2", "--run-dir", "out", "--set", "deaths=2:1")
    assert ended.status == 1, ended.err
    assert "Rank 0 of 2 failed; its log is out/log/rank-0.log" in ended.err.splitlines()
    assert ended.last == "ValueError: there is no ninth step"
    assert "Rank 1" not in ended.err
    assert "Restarting" not in ended.err


@pytest.mark.slow
def test_a_death_that_makes_the_others_fail_is_the_cause(command: Command) -> None:
    """The other processes form a new group, but cannot repeat an evaluation whose data is an iterator."""
    measure = """
def measure(output, x, y):
    if world.number == 1 and not Path(__file__).with_name("died").exists():
        Path(__file__).with_name("died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return output.sum(), len(output)

def main("""
    evaluate = """        step.update(optimizer, schedule)
        if step.number == 6:
            run.evaluate(model, iter([(x[:4], x[:4])] * 6), measure)
"""
    text = SCRIPT.replace("\ndef main(", measure).replace("        step.update(optimizer, schedule)\n", evaluate)
    command.script(text)
    ended = command.run("run", "script.py", "--ranks", "3", "--run-dir", "out", times=2)
    assert ended.status == 0, ended.err
    assert "Rank 1 of 3 died of signal 9 (SIGKILL)" in ended.err
    assert "Restarting from the checkpoint after step 4 (1 of 3)." in ended.err
    assert result(command, "out")["resumed_at"] == 4


@pytest.mark.slow
def test_a_replica_of_shards_ends_and_is_replaced_as_a_whole(command: Command) -> None:
    wait = f"        while step.number == 4 and not {JOIN_REQUESTED}:\n            time.sleep(0.01)\n"
    command.script(DYING.replace("        step.update(", wait + "        step.update("))
    words = ("--ranks", "4", "--run-dir", "out", "--set", "parallel.shard=2", "--set", "deaths=2:1")
    ended = command.run("run", "script.py", *words, times=3)
    assert ended.status == 0, ended.err
    found = result(command, "out")
    assert (found["steps"], found["ranks"], found["survival"]) == (24, 4, "survivors")
    assert sorted(each["process"] for each in found["deaths"]) == [0, 1]
    assert sorted(each["process"] for each in found["joined"]) == [4, 5]
    messages = ended.err.splitlines()
    assert messages[0].startswith("Process 1 died of SIGKILL after ")
    assert "steps; the run continues with 2 processes." in messages[0]
    assert messages[1].startswith("Process 0 was killed too: it shared a model with the dead process.")
    command.script(SCRIPT)
    assert found["weights_sha256"] == uninterrupted(command)["weights_sha256"]


@pytest.mark.slow
def test_too_few_survivors_restart_from_the_checkpoint(command: Command) -> None:
    command.script(DYING)
    whole = uninterrupted(command)
    ended = command.run("run", "script.py", "--ranks", "2:2", "--run-dir", "out", "--set", "deaths=6:1")
    assert ended.status == 0, ended.err
    found = result(command, "out")
    assert found["weights_sha256"] == whole["weights_sha256"]
    assert found["resumed_at"] == 4
    assert "Rank 1 of 2 died of signal 9 (SIGKILL)" in ended.err
    assert "Restarting from the checkpoint after step 4 (1 of 3)." in ended.err


HANGING = DYING.replace(
    "unisono.main(",
    """from unisono.distributed.membership import membership, regroup_timeout
regroup_timeout.FORM_SECONDS, leave_group = 1.0, membership.leave_group

def hang(**arguments):
    if world.number in (NUMBERS) and list(Path(__file__).parent.glob("died-*")) and "--resume" not in sys.argv:
        time.sleep(1e6)
    leave_group(**arguments)

membership.leave_group = hang
unisono.main(""",
)
"""Processes with these numbers hang while they leave their group."""


@pytest.mark.slow
def test_a_hanging_process_is_killed_and_the_others_continue(command: Command) -> None:
    command.script(HANGING.replace("NUMBERS", "1,"))
    ended = command.run("run", "script.py", "--ranks", "3", "--run-dir", "out", "--set", "deaths=2:0")
    assert ended.status == 0, ended.err
    messages = ended.err.splitlines()
    assert messages[0] == "Process 1 hangs while leaving its group and is killed. Its log is out/log/rank-1.log"
    assert {line.split(" after ")[0] for line in messages[1:3]} == {
        "Process 0 died of SIGKILL",
        "Process 1 died of SIGKILL",
    }
    command.script(SCRIPT)
    found = result(command, "out")
    assert found["weights_sha256"] == uninterrupted(command)["weights_sha256"]
    assert sorted(each["process"] for each in found["deaths"]) == [0, 1]
    assert "resumed_at" not in found


@pytest.mark.slow
def test_the_run_restarts_if_all_processes_hang(command: Command) -> None:
    command.script(HANGING.replace("NUMBERS", "1, 2"))
    ended = command.run("run", "script.py", "--ranks", "3", "--run-dir", "out", "--set", "deaths=6:0", times=2)
    assert ended.status == 0, ended.err
    assert "Process 1 hangs while leaving its group and is killed." in ended.err
    assert "Process 2 hangs while leaving its group and is killed." in ended.err
    assert "Restarting from the checkpoint after step 4 (1 of 3)." in ended.err
    found = result(command, "out")
    assert found["resumed_at"] == 4
    command.script(SCRIPT)
    assert found["weights_sha256"] == uninterrupted(command)["weights_sha256"]


@pytest.mark.slow
def test_shards_are_restored_from_their_replicas_without_a_checkpoint(command: Command) -> None:
    command.script(DYING.replace("(every=4)", "(every=100)"))
    whole = uninterrupted(command)
    ended = command.run(
        *("run", "script.py", "--ranks", "2", "--run-dir", "out", "--set", "deaths=6:1"),
        *("--set", "parallel.shard=2", "--set", "parallel.replicate_shards=true"),
        times=2,
    )
    assert ended.status == 0, ended.err
    found = result(command, "out")
    assert found["weights_sha256"] == whole["weights_sha256"]
    assert found["resumed_at"] in (5, 6)
    assert found["survival"] == "buddy"
    assert ended.err.count("Restarting from the emergency dump") == 1


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_restarts_stop_without_progress(command: Command) -> None:
    command.script(DYING.replace(".touch()", ".exists()"))
    ended = command.run("run", "script.py", "--ranks", "2:2", "--run-dir", "out", "--set", "deaths=6:1", times=4)
    assert ended.status == 1
    assert ended.err.count("Rank 1 of 2 died of signal 9 (SIGKILL)") == 4
    assert "Stopped restarting: the run died 4 times without a new checkpoint." in ended.err
    assert "if a process dies" not in ended.out  # no process of --ranks 2:2 may be missing


@pytest.mark.parametrize("ranks", ["0:2", "3:2", "two", "1:two"])
def test_a_wrong_number_of_processes_is_refused(command: Command, ranks: str) -> None:
    command.script(SCRIPT)
    ended = command.run("run", "script.py", "--ranks", ranks)
    assert ended.status == 2
    assert "--ranks" in ended.err.splitlines()[-1]


@pytest.mark.slow
def test_a_restart_by_a_manager_resumes_without_the_flag(command: Command) -> None:
    command.script(SCRIPT)
    whole = uninterrupted(command)
    assert command.run("run", "script.py", "--run-dir", "out", "--set", "steps=8").status == 0
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        os.environ[name] = value
    try:
        ended = command.end(command.start_python("script.py", "--run-dir", "out", "--set", "steps=24"))
    finally:
        for name in ("TORCHELASTIC_RESTART_COUNT", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]
    assert ended.status == 0, ended.err
    found = result(command, "out")
    assert (found["resumed_at"], found["weights_sha256"]) == (8, whole["weights_sha256"])
