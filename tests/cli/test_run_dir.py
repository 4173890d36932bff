"""The run directory: its choice, checks and lock, and scripts that change the working directory."""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.cli.command import Command, last_json
from tests.cli.refused_requests import RequestProblems
from unisono.cli.request.run_dir import choose_run_dir, lock_run_dir, newest_run, problems_of_run_dir
from unisono.config import CommandLine
from unisono.errors import Problem, SettingsError


def test_a_run_directory_is_not_reused_without_resume(request_problems: RequestProblems, tmp_path: Path) -> None:
    for step in (10, 20):
        (tmp_path / "out" / "checkpoints" / f"step-{step:08}").mkdir(parents=True)
    do = "unisono run train.py --run-dir out --json --resume, or: unisono run train.py --run-dir out-2 --json"
    facts = "It has 2 checkpoints, the newest step-00000020."
    assert request_problems("run", "train.py", "--run-dir=out") == [Problem("out already contains a run.", facts, do)]
    (tmp_path / "out" / "environment.json").write_text(json.dumps({"script": "/home/me/other.py"}))
    facts = "It is a run of other.py, and has 2 checkpoints, the newest step-00000020."
    do = "unisono run train.py --run-dir out-2 --json"
    assert request_problems("run", "train.py", "--run-dir=out") == [Problem("out already contains a run.", facts, do)]


def test_a_folder_that_cannot_be_used_is_refused(request_problems: RequestProblems, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (problem,) = request_problems("run", "train.py", "--run-dir=file")
    do = "unisono run train.py --run-dir file-run --json"
    assert problem == Problem("file is a file.", "--run-dir takes a folder.", do)
    (problem,) = request_problems("run", "train.py", "--run-dir=file/out")
    assert problem.facts == f"{tmp_path / 'file'} is not a folder."
    (problem,) = request_problems("run", "train.py", "--run-dir=/proc/nothing")  # even root cannot make a folder there
    assert problem.error == "Cannot write the run directory /proc/nothing."


def test_other_files_in_the_parent_folder_do_not_matter(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("another program's")
    assert problems_of_run_dir("train", tmp_path / "out", resume=False, line=CommandLine(("unisono",))) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_refused(request_problems: RequestProblems, tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    (problem,) = request_problems("run", "train.py", "--run-dir=closed/out")
    assert problem.facts == f"Permission denied in {tmp_path / 'closed'}."


def test_a_read_only_file_system_is_refused(
    request_problems: RequestProblems, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_RDONLY | os.ST_NOSUID))
    (problem,) = request_problems("run", "train.py", "--run-dir=out")
    assert problem.facts == f"Read-only file system in {tmp_path}."
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_NOSUID))
    (problem,) = request_problems("run", "train.py", "--run-dir=out")
    assert problem.facts == f"Permission denied in {tmp_path}."


FULL = """
    import errno
    from unisono.cli.request import run_dir

    write_text = run_dir.write_text

    def full(path, text):
        if "settings.toml" not in path.name:
            return write_text(path, text)
        path.touch()  # a full disk still takes a name
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    run_dir.write_text = full
    unisono.main(lambda run: print("training"))
    """


@pytest.mark.ci
def test_a_full_disk_is_reported_before_the_loop_and_nothing_remains(command: Command) -> None:
    command.script(FULL)
    ended = command.run("run", "script.py", "--ranks", "2", "--run-dir", "out", "--set", "steps=1")
    again = "unisono run script.py --ranks 2 --set steps=1 --run-dir DIR"
    assert (ended.status, ended.out) == (2, "")
    assert ended.err == (
        f"Cannot write the run directory out.\n  No space left on device.\n  Next: {again}, with a writable folder\n"
    )
    assert not (command.folder / "out").exists()


def test_a_lock_works_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        busy = pytest.raises(SettingsError, match=r"Process \? on \? is writing to it")
        with lock_run_dir(tmp_path, CommandLine()), busy, lock_run_dir(tmp_path, CommandLine()):
            pass


def test_a_resume_without_a_run_is_refused(request_problems: RequestProblems, tmp_path: Path) -> None:
    do = "unisono run train.py --json (from the start), or: unisono run train.py --resume --json --run-dir DIR"
    facts = f"There is no run train-* in {tmp_path / 'runs'}."
    assert request_problems("run", "train.py", "--resume") == [Problem("Nothing to resume.", facts, do)]
    (problem,) = request_problems("run", "train.py", "--resume", "--run-dir=out")
    assert problem == Problem(
        "Nothing to resume.",
        "There is no folder out.",
        "unisono run train.py --run-dir out --json (from the start), or: "
        "unisono run train.py --run-dir DIR --resume --json",
    )


def test_run_directories_are_named_by_time_and_unique(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda _: "20261121-120000")
    made = [choose_run_dir("text", None, resume=False, line=CommandLine()) for _ in range(11)]
    assert [str(path) for path in made[:2]] == ["runs/text-20261121-120000", "runs/text-20261121-120000-2"]
    Path("runs/text-more-20271121-120000").mkdir()  # a run of another script
    Path("runs/text-20251121-120000").mkdir()
    assert newest_run("text") == made[-1] == Path("runs/text-20261121-120000-11")
    assert choose_run_dir("text", None, resume=True, line=CommandLine()) == made[-1]
    assert choose_run_dir("text", Path("a/b"), resume=False, line=CommandLine()) == Path("a/b")
    assert Path("a/b").is_dir()


def test_resume_finds_the_newest_run(command: Command) -> None:
    command.script("print(*sys.argv[1:])")
    first = command.run("run", "script.py", "--set", "batch=64", "--resume")
    assert first.status == 2
    first = command.run("run", "script.py", "--set", "batch=64")
    (run_dir,) = (command.folder / "runs").iterdir()
    words = first.out.split()
    assert (words[0], words[-1]) == ("--set=batch=64", f"--run-dir=runs/{run_dir.name}")
    again = command.run("run", "script.py", "--resume", "--accept-change", "seed", "--json")
    words = again.out.splitlines()[0].split()
    assert words[:3] == ["--resume", "--accept-change=seed", "--json"]
    assert words[-1] == f"--run-dir=runs/{run_dir.name}"
    assert (run_dir / "log" / "rank-0.log").read_text().count("\n") == 2


@pytest.mark.parametrize("name", ["log", "timeline", "checkpoints"])
def test_a_file_in_place_of_a_folder_is_refused(request_problems: RequestProblems, tmp_path: Path, name: str) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text("mine")
    (tmp_path / "out" / "environment.json").mkdir()
    again = "unisono run train.py --run-dir out --json"
    assert request_problems("run", "train.py", "--run-dir=out") == [
        Problem(
            "Cannot use out as run directory.",
            f"out/{name} is a file; the run needs a folder there.",
            f"mv out/{name} out/{name}-before && {again}",
        ),
        Problem(
            "Cannot use out as run directory.",
            "out/environment.json is a folder; the run needs a file there.",
            f"mv out/environment.json out/environment.json-before && {again}",
        ),
    ]


WAITS = """
    def main(run):
        if run.is_main and os.fork() == 0:
            Path(__file__).with_name("worker").write_text(str(os.getpid()))
            say("worker")
            signal.pause()
        say("ready")
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # else torchrun waits 30 seconds
        signal.pause()

    unisono.main(main if "--" in sys.argv else lambda run: None)
    """

COMMANDS = {
    "python": ["script.py"],
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "script.py"],
    "unisono": ["-P", "-m", "unisono.cli.main", "run", "script.py", "--ranks", "2"],
}


@pytest.mark.slow
@pytest.mark.parametrize("starter", ["python", "unisono", "torchrun"])
def test_a_run_directory_is_locked_until_its_run_ends_or_is_killed(command: Command, starter: str) -> None:
    command.script(WAITS)
    arguments = ["--run-dir", "out", "--set", "steps=1"]
    running = command.start_python(*COMMANDS[starter], *arguments, "--", "waits")
    command.wait_for("ready 0", "worker 0")
    owner, host = (command.folder / "out" / ".lock").read_text().split()
    assert starter == "torchrun" or int(owner) == running.pid
    refuser = "python" if starter == "unisono" else "unisono"
    refused = command.end(command.start_python(*COMMANDS[refuser], *arguments, "--resume"))
    typed = "python script.py" if starter == "unisono" else "unisono run script.py --ranks 2"
    assert refused.status == 2
    assert refused.err == (
        f"out is in use.\n  Process {owner} on {host} is writing to it.\n"
        f"  Next: {typed} --set steps=1 --run-dir out --resume "
        f"(after that process has ended; to make it save and end: kill {owner})\n"
    )
    beside = command.run("run", "script.py", *arguments)
    assert "unisono run script.py --set steps=1 --run-dir out-2, or" in beside.err
    os.kill(int(owner), signal.SIGKILL)
    os.waitid(os.P_PID, running.pid, os.WEXITED | os.WNOWAIT)
    again = command.end(command.start_python("script.py", *arguments, "--resume"))
    assert again.status == 0, again.err
    if starter != "unisono":  # the forked child is still alive; the launcher of Unisono kills it
        os.kill(int((command.folder / "worker").read_text()), signal.SIGKILL)
    command.end(running)


MOVES = """
    import torch
    os.chdir("/")

    def main(run):
        os.chdir(command_temporary := os.environ["TMPDIR"])
        assert run.dir.is_absolute()
        model = run.place(lambda: torch.nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(model=model, optimizer=optimizer)
        for step in run.steps(torch.utils.data.TensorDataset(torch.ones(20, 4))):
            for (x,) in step:
                step.backward(model(x).sum(), len(x))
            step.update(optimizer)
        assert os.getcwd() == command_temporary

    unisono.main(main)
    """


@pytest.mark.slow
@pytest.mark.parametrize("starter", ["python", "unisono", "torchrun"])
def test_a_script_may_change_its_working_directory(command: Command, starter: str) -> None:
    command.script(MOVES)
    (command.folder / "some.toml").write_text("batch = 5\nloader.workers = 1\n")
    start = [*COMMANDS[starter], "--run-dir", "out", "--settings", "some.toml"]
    ended = command.end(command.start_python(*start, "--set", "steps=3"))
    assert ended.status == 0, ended.err
    assert "run directory: out\n" in ended.out
    assert "run          out\n" in ended.out
    out = command.folder / "out"
    ranks = 1 if starter == "python" else 2
    assert sorted(path.name for path in (out / "timeline").glob("rank-*")) == ["rank-0.jsonl", "rank-1.jsonl"][:ranks]
    assert "batch = 5 " in (out / "settings.toml").read_text()
    assert "# some.toml" in (out / "settings.toml").read_text()
    ended = command.end(command.start_python(*start, "--set", "steps=5", "--resume"))
    assert ended.status == 0, ended.err
    assert json.loads((out / "result.json").read_text())["steps"] == 5
    assert sorted(path.name for path in command.folder.iterdir()) == ["alive", "out", "script.py", "some.toml"]


def test_a_script_without_unisono_main_is_reported(command: Command) -> None:
    command.script("print('trained alone')")
    ended = command.run("run", "script.py", "--ranks", "2", "--run-dir", "out")
    assert ended.status == 2
    assert ended.err == (
        "script.py ended without calling unisono.main.\n"
        "  2 processes ran it independently of each other. Processes of a run join in unisono.main.\n"
        "  Next: unisono copy text my_script.py (an example that calls it), or, as one process: python script.py\n"
    )
    assert ended.out == "trained alone\n"
    assert command.run("run", "script.py", "--run-dir", "out").status == 0
    ended = command.run("run", "script.py", "--ranks", "2", "--run-dir", "out", "--json")
    assert last_json(ended.out)["error"]["exit_status"] == 2
