"""`unisono run` with real processes that succeed, fail, die or are stopped: its output, logs and remains."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.cli.command import Command, last_json
from unisono.launcher.supervisor import SECOND_SIGNAL_SECONDS

FAILURE_SECONDS = 15.0
"""Time limit from a failure to the end of the launcher, in seconds; half a second is usual on an idle machine."""


def test_every_rank_runs_the_script_as_python_does(command: Command) -> None:
    (command.folder / "random.py").write_text("raise ImportError('the folder one is in must not hide modules')")
    folder = command.folder / "scripts"
    folder.mkdir()
    (folder / "neighbour.py").write_text("here = True")
    (command.folder / "scripts" / "train.py").write_text(
        "import os, random, sys, neighbour, unisono\n"
        "world = unisono.World.current()\n"
        "assert __name__ == '__main__' and sys.modules['__main__'].__file__ == 'scripts/train.py'\n"
        "assert sys.argv[0] == 'scripts/train.py' and sys.argv[-2:] == ['--', '--own'], sys.argv\n"
        "assert sys.stdin.read() == ''\n"
        "assert os.environ['OMP_NUM_THREADS'] == '3'\n"
        "print(world.rank, world.size, world.local_rank, world.local_size, world.launcher, world.terminal)\n"
        "print('to stderr', file=sys.stderr)\n"
    )
    ended = command.run(
        "run", "scripts/train.py", "--ranks", "2", "--run-dir", "out", "--set", "threads=3", "--", "--own"
    )
    assert ended.status == 2, ended.err
    assert "train.py ended without calling unisono.main." in ended.err
    assert ended.out == "0 2 0 2 unisono False\nto stderr\n"
    assert command.log(0) == ended.out
    assert command.log(1) == "1 2 1 2 unisono False\nto stderr\n"


@pytest.mark.ci
def test_a_script_sees_its_own_arguments_only(command: Command) -> None:
    """The flags of Unisono do not reach an argument parser of the script, under any launcher."""
    command.script("unisono.main(lambda run: print(sys.argv[1:]))\nprint(sys.argv[-1])")
    for start in (["run", "script.py", "--ranks", "2"], None):
        more = ["--set", "steps=1", "--", "--mine", "3"]
        ended = command.run(*start, *more) if start else command.end(command.start_python("script.py", *more))
        assert ended.status == 0, ended.err
        assert "['--mine', '3']" in ended.out
        assert ended.out.splitlines()[-1] == "3"


def test_live_lines_reach_the_screen_and_not_the_log(command: Command) -> None:
    command.script(r"""
        out = sys.stdout.buffer
        for piece in ["first\r\n", "\x1b[2K\rstep 1\r", "step 2\r", "\x1b[2K\rnote\n", "step 3\r", "\xff\n", "end"]:
            out.write(piece.encode("latin-1"))
            out.flush()
        """)
    ended = command.start("run", "script.py", "--run-dir", "out")
    assert ended.stdout is not None
    screen = ended.stdout.buffer.read()  # type: ignore[attr-defined]
    command.end(ended)
    assert screen == b"first\r\n\x1b[2K\rstep 1\rstep 2\r\x1b[2K\rnote\nstep 3\r\xff\nend"
    log = (command.folder / "out" / "log" / "rank-0.log").read_bytes()
    assert log == b"first\r\nnote\n\xff\nend\n"


def test_the_traceback_of_the_failing_rank_ends_the_output(command: Command) -> None:
    command.script("""
        print("training")
        say("ready")
        def train():
            raise ValueError("boom")
        if world.rank == 1:
            print(f"failed at {time.time()}")
            train()
        print("step 1", end="\\r")
        signal.pause()
        """)
    ended = command.run("run", "script.py", "--ranks", "3", "--run-dir", "out")
    assert ended.status == 1
    assert ended.last == "ValueError: boom"
    assert "Rank 1 of 3 failed; its log is out/log/rank-1.log" in ended.err
    assert "launch" not in ended.err, "frames of the launcher are in the traceback"
    assert ended.err.count("Traceback") == 1
    failed = float(command.log(1).split("failed at ")[1].split()[0])
    assert ended.at - failed < FAILURE_SECONDS
    assert command.log(1).endswith("ValueError: boom\n")
    assert "Traceback" not in command.log(0)
    command.wait_until_gone()


TWO_FAILURES = """
    from unisono.errors import PeerLostError
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the later process must still fail after SIGTERM
    folder = Path(world.store.partition("://")[2]).parent

    def wait_for(name):
        while not (folder / name).exists():
            time.sleep(0.001)

    if world.rank == 0:
        (folder / "ready").touch()
        wait_for("rank-1.json")
        raise LATER
    wait_for("ready")
    raise EARLIER
    """


def test_the_earliest_failure_is_reported_and_every_log_has_its_traceback(command: Command) -> None:
    failures = TWO_FAILURES.replace("EARLIER", "ValueError('the cause')")
    command.script(failures.replace("LATER", "RuntimeError('a consequence')"))
    ended = command.run("run", "script.py", "--ranks", "2", "--run-dir", "out")
    assert ended.last == "ValueError: the cause"
    assert "consequence" not in ended.err
    assert command.log(0).endswith("RuntimeError: a consequence\n")


def test_a_lost_peer_is_not_reported_as_the_first_failure(command: Command) -> None:
    failures = TWO_FAILURES.replace(
        "EARLIER", "PeerLostError('Exchange step 3.', 'Rank 0 is gone.', 'Look at its log.')"
    )
    command.script(failures.replace("LATER", "ValueError('the cause')"))
    ended = command.run("run", "script.py", "--ranks", "2", "--run-dir", "out")
    assert ended.last == "ValueError: the cause"


def test_a_process_that_exits_without_a_message_is_named(command: Command) -> None:
    command.script("os._exit(7 if world.rank == 1 else 0)")
    ended = command.run("run", "script.py", "--ranks", "2", "--run-dir", "out")
    assert ended.status == 7
    assert "Rank 1 of 2 exited with status 7 and no error message" in ended.err
    assert ended.last == "Its log is empty: out/log/rank-1.log"


@pytest.mark.ci
@pytest.mark.parametrize("leave", ["sys.exit(0)", pytest.param("os._exit(0)", marks=pytest.mark.slow)])
def test_an_exit_with_status_0_while_peers_need_the_process_is_named(command: Command, leave: str) -> None:
    command.script(f"""
        def main(run):
            if run.rank == 2:
                {leave}
            model = run.place(torch.nn.Linear(2, 2))

        import sys, torch
        unisono.main(main)
        """)
    ended = command.run("run", "script.py", "--ranks", "3", "--run-dir", "out", "--set", "steps=1")
    assert ended.status == 1
    assert "Rank 2 of 3 exited with status 0 (sys.exit? os._exit?) while other processes still needed it." in ended.err


def test_a_wrong_request_is_reported_once_without_a_traceback(command: Command) -> None:
    command.script("""
        raise unisono.SettingsError("9 processes", "8 virtual ranks: 1 to 8 processes.", "unisono run text --ranks 8")
        """)
    ended = command.run("run", "script.py", "--ranks", "3", "--run-dir", "out")
    assert ended.status == 2
    assert ended.err == "9 processes\n  8 virtual ranks: 1 to 8 processes.\n  Next: unisono run text --ranks 8\n"


def test_other_errors_of_the_library_show_a_traceback_and_end_with_the_message(command: Command) -> None:
    command.script('raise unisono.DataError("Take a sample.", "The set has length 0.", "Check the path.")')
    ended = command.run("run", "script.py", "--run-dir", "out")
    assert ended.status == 1
    assert "Traceback" in ended.err
    assert ended.last == "  Next: Check the path."


@pytest.mark.parametrize(
    ("leave", "status"),
    [
        ("sys.exit()", 0),
        ("sys.exit(0)", 0),
        ("sys.exit(2)", 2),
        ("sys.exit('no more')", 1),
        ("raise KeyboardInterrupt", 1),
    ],
)
def test_the_exit_status_of_a_script_is_kept(command: Command, leave: str, status: int) -> None:
    command.script(leave)
    ended = command.run("run", "script.py", "--run-dir", "out")
    assert ended.status == status
    assert (ended.err == "") == (status == 0)
    assert "no more" not in leave or ended.last == "no more"


def test_a_failing_process_that_hangs_at_exit_is_killed(command: Command) -> None:
    command.script("""
        import threading
        threading.Thread(target=time.sleep, args=(1000,)).start()  # the interpreter joins it at exit
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print(f"failed at {time.time()}")
        raise ValueError("boom")
        """)
    ended = command.run("run", "script.py", "--run-dir", "out")
    assert ended.last == "ValueError: boom"
    assert ended.at - float(command.log(0).split()[2]) < FAILURE_SECONDS
    command.wait_until_gone()


def test_children_of_a_process_end_with_it(command: Command) -> None:
    command.script("""
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            say("worker")
            while True:
                signal.pause()
        say("ready")
        """)
    ended = command.run("run", "script.py", "--ranks", "2", "--run-dir", "out")
    assert "script.py ended without calling unisono.main." in ended.err
    command.wait_until_gone()


HANDLES_SIGTERM = """
    received = []
    signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    say("ready")
    signal.sigwait([signal.SIGTERM])
    print(f"saved by rank {world.rank}")
    """


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_forwarded_once_and_every_process_saves_and_ends(command: Command, number: signal.Signals) -> None:
    command.script(HANDLES_SIGTERM + "assert not signal.sigpending()")
    running = command.start("run", "script.py", "--ranks", "2", "--run-dir", "out")
    command.wait_for("ready 0", "ready 1")
    running.send_signal(number)
    ended = command.end(running)
    assert ended.status == 0
    assert ended.err == "Stopping: the current step is finished and saved. A second Ctrl-C kills all processes.\n"
    assert command.log(1) == "saved by rank 1\n"


def test_a_process_without_a_signal_handler_yet_counts_as_stopped(command: Command) -> None:
    command.script('say("ready")\nsignal.pause()')
    running = command.start("run", "script.py", "--ranks", "2", "--run-dir", "out")
    command.wait_for("ready 0", "ready 1")
    running.send_signal(signal.SIGINT)
    ended = command.end(running)
    assert ended.status == 0
    message = "Stopped before the first step: nothing to save.\n  Next: unisono run script.py --ranks 2 --run-dir out\n"
    assert ended.err.endswith(message)


def test_peers_of_a_process_that_was_stopped_early_are_killed_soon(command: Command) -> None:
    command.script("""
        if world.rank == 1:
            signal.signal(signal.SIGTERM, lambda number, frame: say("waiting"))
        say("ready")
        while True:
            signal.pause()
        """)
    launch = (
        "from pathlib import Path; from unisono.launcher import local_launch, supervisor;"
        "supervisor.EARLY_STOP_SECONDS = 0.1;"
        "outcome = local_launch.run(Path('script.py'), [], ranks=2, logs=Path('log'));"
        "assert outcome == (0, None, True, True, False), outcome"
    )
    running = command.start_python("-c", launch)
    command.wait_for("ready 0", "ready 1")
    running.send_signal(signal.SIGTERM)
    command.wait_for("waiting 1")
    assert command.end(running).status == 0
    command.wait_until_gone()


@pytest.mark.parametrize("first", ["ends after the signal", "ended before the signal"])
def test_processes_that_ignore_a_stop_are_killed_after_the_first_has_ended(command: Command, first: str) -> None:
    command.script(f"""
        if world.rank == 0:
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
            say("ready")
            if "{first}" == "ends after the signal":
                signal.sigwait([signal.SIGTERM])
            while not Path("ignores it").exists():
                time.sleep(0.001)
            sys.exit()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        Path("ignores it").touch()
        say("ready")
        while True:
            signal.pause()
        """)
    launch = (
        "from pathlib import Path; from unisono.launcher import local_launch, supervisor;"
        "supervisor.LATE_STOP_SECONDS = 0.1;"
        "outcome = local_launch.run(Path('script.py'), [], ranks=2, logs=Path('log'));"
        "assert outcome == (1, None, True, False, False), outcome"
    )
    running = command.start_python("-c", launch)
    command.wait_for("ready 0", "ready 1")
    running.send_signal(signal.SIGTERM)
    ended = command.end(running)
    assert ended.status == 0, ended.err
    assert ended.last == "Killed rank 1: it was still running 0.1 seconds after the first process had ended."
    command.wait_until_gone()


def test_a_failure_while_saving_is_a_failure(command: Command) -> None:
    command.script(HANDLES_SIGTERM + 'raise OSError("disk full")')
    running = command.start("run", "script.py", "--ranks", "2", "--run-dir", "out")
    command.wait_for("ready 0", "ready 1")
    running.send_signal(signal.SIGINT)
    ended = command.end(running)
    assert ended.status == 1
    assert ended.last == "OSError: disk full"


def test_one_ctrl_c_that_arrives_twice_counts_once(command: Command) -> None:
    """The terminal and make both send it."""
    command.script(HANDLES_SIGTERM)
    running = command.start("run", "script.py", "--ranks", "2", "--run-dir", "out")
    command.wait_for("ready 0", "ready 1")
    running.send_signal(signal.SIGINT)
    running.send_signal(signal.SIGINT)
    assert command.end(running).status == 0
    assert command.log(1) == "saved by rank 1\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_kills_at_once(command: Command, number: signal.Signals) -> None:
    command.script("""
        signal.signal(signal.SIGTERM, lambda number, frame: say("saving"))
        say("ready")
        while True:
            signal.pause()
        """)
    running = command.start("run", "script.py", "--ranks", "2", "--run-dir", "out")
    command.wait_for("ready 0", "ready 1")
    running.send_signal(signal.SIGINT)
    command.wait_for("saving 0", "saving 1")
    time.sleep(SECOND_SIGNAL_SECONDS + 0.05)  # an earlier signal counts as the same Ctrl-C
    running.send_signal(number)
    ended = command.end(running)
    assert ended.status == 1
    message = "Killed before anything was saved.\n  Next: unisono run script.py --ranks 2 --run-dir out\n"
    assert ended.err.endswith(message)
    command.wait_until_gone()


def test_a_killed_launcher_leaves_no_process_and_no_temporary_folder(command: Command) -> None:
    command.script("""
        if os.fork() == 0:
            say("worker")
            while True:
                signal.pause()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        Path(__file__).with_name("folder").write_text(str(Path(world.store.partition("://")[2]).parent))
        say("ready")
        while True:
            signal.pause()
        """)
    running = command.start("run", "script.py", "--ranks", "2", "--run-dir", "out")
    command.wait_for("ready 0", "ready 1", "worker 0", "worker 1")
    running.send_signal(signal.SIGKILL)
    command.end(running)
    folder = Path((command.folder / "folder").read_text())
    assert folder.parent == command.temporary
    command.wait_until_gone()
    assert not folder.exists()


def test_a_closed_standard_output_does_not_end_the_run(command: Command) -> None:
    command.script("""
        say("ready")
        for _ in range(100_000):
            print("a line without a reader")
        """)
    running = command.start("run", "script.py", "--run-dir", "out")
    assert running.stdout is not None
    running.stdout.close()
    running.stdout = None
    assert command.end(running).status == 0
    assert command.log(0).count("\n") == 100_000


RESULT = """
    (Path(next(a for a in sys.argv if a.startswith("--run-dir=")).partition("=")[2]) / "result.json").write_text(
        '{"loss": 1.5}'
    )
    print("step 3 of 3", end="")
    """


def test_json_ends_with_the_result(command: Command) -> None:
    command.script(RESULT)
    ended = command.run("run", "script.py", "--run-dir", "out", "--json")
    assert ended.status == 0
    assert last_json(ended.out).keys() == {"loss", "audit"}
    assert ended.out.split("\n")[1].startswith('{"loss": 1.5, "audit": {"lines": ')


def test_json_ends_with_the_error(command: Command) -> None:
    command.script(RESULT + '\n    raise ValueError("boom")')
    ended = command.run("run", "script.py", "--run-dir", "out", "--json")
    assert ended.status == 1
    error = last_json(ended.out)["error"]
    assert (error["type"], error["message"], error["rank"], error["exit_status"]) == ("ValueError", "boom", 0, 1)
    assert error["traceback"].endswith("ValueError: boom\n")


def test_json_reports_a_stop(command: Command) -> None:
    command.script(HANDLES_SIGTERM)
    running = command.start("run", "script.py", "--run-dir", "out", "--json")
    command.wait_for("ready 0")
    running.send_signal(signal.SIGINT)
    ended = command.end(running)
    assert last_json(ended.out) == {"stopped": True, "exit_status": 0, "run_dir": "out"}
