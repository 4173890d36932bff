"""Readers of a run: modes of the run directory, and a second account that tries to read it."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from tests.cli.command import Command
from unisono.security.file_modes import make_closed, make_folder, open_like_folder, share_with, umask, write_text

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can create a second account and act as it")

SCRIPT = """
import torch

def main(run):
    model = run.place(lambda: torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps([(torch.ones(4), torch.ones(1))] * 16):
        for inputs, targets in step:
            step.backward(((model(inputs) - targets) ** 2).sum(), weight=len(inputs))
        step.update(optimizer)
        run.log(loss=step.loss)
        if step.number == 2:
            (run.dir / "of-the-script.txt").write_text("mine")
            HOLD

if __name__ == "__main__":
    unisono.main(main)
"""


def modes(folder: Path) -> dict[str, int]:
    """Return the mode of a folder and of everything in it, by path; "." is the folder."""
    paths = [folder, *folder.rglob("*")]
    return {str(path.relative_to(folder)): stat.S_IMODE(path.stat().st_mode) for path in paths}


def wrong_modes(folder: Path, folders: int, files: int) -> dict[str, str]:
    return {
        name: oct(mode)
        for name, mode in modes(folder).items()
        if mode != (folders if (folder / name).is_dir() else files)
    }


SETS = ("--set=steps=4", "--set=checkpoint.every=2", "--set=track=csv,tensorboard", "--set=machine.every=0.05")


@pytest.mark.parametrize(("share", "folders", "files"), [("owner", 0o700, 0o600), ("group", 0o750, 0o640)])
def test_a_run_directory_has_the_modes_of_its_setting(command: Command, share: str, folders: int, files: int) -> None:
    command.script(SCRIPT.replace("HOLD", "pass"))
    command.train("out", *SETS, f"--set=secure.share={share}", "--set=checkpoint.dir=saved", ranks=2)
    assert len(modes(command.folder / "out")) > 12
    assert not wrong_modes(command.folder / "out", folders, files)
    assert (command.folder / "saved" / "step-00000004").is_dir()
    assert not wrong_modes(command.folder / "saved", folders, files)


def test_all_means_what_the_umask_says(command: Command) -> None:
    command.script(SCRIPT.replace("HOLD", "pass"))
    command.train("out", "--set=steps=3", "--set=secure.share=all")
    assert not wrong_modes(command.folder / "out", 0o777 & ~umask(), 0o666 & ~umask())
    command.train("out", "--set=steps=4", "--resume")
    assert not wrong_modes(command.folder / "out", 0o777 & ~umask(), 0o666 & ~umask()), "the setting is kept"
    command.train("out", "--set=steps=5", "--resume", "--set=secure.share=owner")
    assert set(wrong_modes(command.folder / "out", 0o700, 0o600)) == {".", "of-the-script.txt"}, "as in a project"
    (command.folder / "out").chmod(0o700)
    command.train("out", "--set=steps=6", "--resume")
    assert not wrong_modes(command.folder / "out", 0o700, 0o600), "the run directory existed, and is closed now"


def test_a_folder_with_files_of_others_keeps_its_mode(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "thesis.tex").write_text("")
    (tmp_path / "thesis.tex").chmod(0o644)
    (tmp_path / "log").mkdir(mode=0o755)
    why = share_with("owner", tmp_path, lambda name: name == "log")
    assert why == "it has other files, such as thesis.tex"
    assert modes(tmp_path) == {".": 0o755, "thesis.tex": 0o644, "log": 0o700}


def test_what_is_created_in_a_closed_folder_is_closed_and_links_are_not_followed(tmp_path: Path) -> None:
    run, other = tmp_path / "a" / "run", tmp_path / "other.txt"
    make_closed(run)
    make_folder(run / "log" / "deep")
    write_text(run / "log" / "deep" / "text", "")
    os.close(open_like_folder(run / "log" / "file", os.O_CREAT | os.O_WRONLY))
    assert not wrong_modes(run, 0o700, 0o600)
    other.write_text("")
    other.chmod(0o644)
    (run / "link").symlink_to(other)
    share_with("owner", run, lambda name: True)
    assert stat.S_IMODE(other.stat().st_mode) == 0o644
    make_folder(tmp_path / "open" / "inner")
    assert stat.S_IMODE((tmp_path / "open").stat().st_mode) & 0o700 == 0o700


def test_in_an_open_folder_the_umask_decides(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    write_text(tmp_path / "text", "")
    assert stat.S_IMODE((tmp_path / "text").stat().st_mode) == 0o666 & ~umask()


# -- a second account

ATTEMPT = """
import os, pwd, socket, sys
name, groups, *paths = sys.argv[1:]
account = pwd.getpwnam(name)
os.setgroups([int(group) for group in groups.split()])
os.setgid(account.pw_gid)
os.setuid(account.pw_uid)
for path in paths:
    try:
        if path.endswith(".socket"):
            socket.socket(socket.AF_UNIX).connect(path.removesuffix(".socket"))
        elif os.path.isdir(path):
            os.listdir(path)
        else:
            open(path, "rb").read(1)
        print(path)
    except OSError:
        pass
"""
"""A program that becomes another account, and prints what that can open. (The account cannot start Python if that is
in the home folder of root.)"""


@pytest.fixture
def place() -> Iterator[Path]:
    """Return a folder that every user can enter, as a folder for runs on a shared file system."""
    folder = Path(tempfile.mkdtemp(prefix="u-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def stranger() -> Iterator[str]:
    """Return the name of a new account."""
    name = f"u{uuid.uuid4().hex[:8]}"
    subprocess.run(["useradd", "--no-create-home", "--shell", "/bin/sh", name], check=True, capture_output=True)
    yield name
    subprocess.run(["userdel", name], check=True, capture_output=True)


def opened_by(name: str, paths: Sequence[str], *, groups: Sequence[int] = ()) -> set[str]:
    """Return which of these files, folders and sockets an account can open."""
    words = [sys.executable, "-I", "-c", ATTEMPT, name, " ".join(map(str, groups)), *paths]
    ended = subprocess.run(words, cwd="/", check=True, capture_output=True, text=True)
    return set(ended.stdout.splitlines())


def exposed(folder: Path, temporary: Path, launcher: int) -> dict[str, list[str]]:
    """Return what a run has: files, sockets, and the shared memory of its processes."""
    processes = psutil.Process(launcher).children(recursive=True)
    memory = []
    for process in processes:
        for each in Path(f"/proc/{process.pid}/fd").iterdir():
            if each.is_symlink() and os.readlink(each).startswith("/memfd:unisono"):
                memory.append(str(each))
    return {
        "files": [str(path) for path in (folder, *folder.rglob("*"))],
        "sockets": [f"{path}.socket" for path in temporary.rglob("*") if path.is_socket()],
        "memory": memory,
    }


@needs_root
@pytest.mark.slow
@pytest.mark.parametrize("share", ["owner", "group", "all"])
def test_a_second_account_can_read_only_what_is_shared(
    command: Command, place: Path, stranger: str, share: str
) -> None:
    command.temporary.chmod(0o755)
    command.script(SCRIPT.replace("HOLD", "say('ready'); time.sleep(600)"))
    words = ("--run-dir", str(place / "out"), "--set", f"secure.share={share}", *SETS)
    running = command.start("run", "script.py", "--ranks", "2", *words)
    command.wait_for("ready 0", "ready 1")
    while list(place.glob("out/checkpoints/.*.unfinished")):  # a thread still writes, and renames its files
        time.sleep(0.1)
    found = exposed(place / "out", command.temporary, running.pid)
    assert len(found["files"]) > 8
    assert found["sockets"]
    assert found["memory"]
    everything = [path for paths in found.values() for path in paths]
    member = opened_by(stranger, everything, groups=[os.getgid()])
    other = opened_by(stranger, everything)
    files = set(found["files"])
    assert other == (files if share == "all" else set())
    assert member == (set() if share == "owner" else files)
    assert opened_by("root", everything) == set(everything), "the attempts themselves work"
    running.kill()
    command.wait_until_gone()
