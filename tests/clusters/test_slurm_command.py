"""`unisono slurm` writes a batch script that bash and sbatch can read, and refuses wrong requests in one message."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command import dry_run
from unisono.cli.main import main
from unisono.clusters.slurm.time_limit import seconds_of
from unisono.launcher import local_launch

SCRIPT = """
from dataclasses import dataclass

import unisono


@dataclass(frozen=True, kw_only=True)
class Settings(unisono.Settings):
    lr: float = 0.1
    steps: int | None = 24


def main(run):
    raise AssertionError("nothing trains here")


if __name__ == "__main__":
    unisono.main(main, Settings)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working directory, with a script and no Slurm."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(local_launch, "dry_run", dry_run)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "bin").mkdir()
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def run_lines(text: str, folder: Path, status: int = 0, **variables: str) -> list[list[str]]:
    """Run a batch script with programs in place of srun and scontrol, and return the words that they received.

    srun saves a checkpoint and ends with this status.
    """
    (folder / "srun").write_text(f'#!/bin/bash\n{RECORD}\nmkdir -p "$RUN_DIR/checkpoints/step-4"\nexit {status}\n')
    (folder / "scontrol").write_text(f"#!/bin/bash\n{RECORD}\n")
    for name in ("srun", "scontrol"):
        (folder / name).chmod(0o755)
    (folder / "job.sh").write_text(text)
    given = {"PATH": f"{folder}:/usr/bin:/bin", **variables}
    done = subprocess.run(["bash", "job.sh"], cwd=folder, env=given, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (status, "")
    log = folder / "log"
    words = [line.split("\t")[:-1] for line in log.read_text().splitlines()]
    log.unlink()
    return words


RECORD = 'printf "%s\\t" "${0##*/}" "$@" >> log; echo >> log'


def test_the_file_is_a_batch_script(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "slurm train.py --nodes 2 --ranks-per-node 4 --time 12:00:00 --partition gpu --account me --cpus-per-task 3"
    more = ["--sbatch", "mem=64G", "--sbatch", "exclusive", "--set", "lr=0.5", "--", "--own", "a b"]
    assert main([*words.split(), *more]) == 0
    assert capsys.readouterr().out == "Written: train.sbatch. Next: sbatch train.sbatch\n"
    text = (folder / "train.sbatch").read_text()
    options = [line.removeprefix("#SBATCH ").partition(" #")[0].strip() for line in text.splitlines() if "#SB" in line]
    assert options == [
        *("--job-name=train", "--nodes=2", "--ntasks-per-node=4", "--cpus-per-task=3", "--partition=gpu"),
        *("--account=me", "--time=12:00:00", "--signal=TERM@120", "--requeue", "--output=%x-%j.out"),
        *("--open-mode=append", f"--chdir={folder}", "--mem=64G", "--exclusive"),
    ]
    (srun,) = run_lines(text, folder, SLURM_JOB_ID="17", RUN_DIR="elsewhere")
    start = ["srun", "--kill-on-bad-exit=1", "--cpus-per-task=3", sys.executable, "train.py"]
    run = ["--run-dir", "runs/train-17", "--autoresume", "--set", "lr=0.5", "--", "--own", "a b"]
    assert srun == [*start, *run]


@pytest.mark.parametrize(
    ("status", "saves", "stopped", "again"),
    [
        (0, True, False, False),  # finished
        (0, True, True, True),  # stopped before the time limit
        (1, True, False, True),  # a rank failed
        (1, False, False, False),  # it failed, and would fail again
        (2, False, True, False),  # a wrong request, after an earlier stop
    ],
)
def test_a_job_is_queued_again_after_progress(
    folder: Path, status: int, saves: bool, stopped: bool, again: bool
) -> None:
    assert main(["slurm", "train.py", "--run-dir", "runs/my run"]) == 0
    (folder / "runs" / "my run").mkdir(parents=True)
    (folder / "runs" / "my run" / "result.json").write_text(json.dumps({"steps": 4, "stopped": stopped}, indent=1))
    where = "runs/my run" if saves else "elsewhere"
    text = (folder / "train.sbatch").read_text()
    programs = run_lines(text, folder, status, SLURM_JOB_ID="17", RUN_DIR=where)
    assert [words[0] for words in programs] == ["srun", *["scontrol"] * again]
    assert not again or programs[1] == ["scontrol", "requeue", "17"]


def test_jobs_of_an_array_have_settings_and_run_directories_of_their_own(folder: Path) -> None:
    words = ["slurm", "train.py", "--array", "3-5%2", "--set", "lr=0.%a", "--", 'a "quoted" $HOME %a']
    assert main(words) == 0
    text = (folder / "train.sbatch").read_text()
    given = {"SLURM_ARRAY_JOB_ID": "20", "SLURM_ARRAY_TASK_ID": "4", "SLURM_JOB_ID": "22", "RUN_DIR": "runs/train-20_4"}
    srun, scontrol = run_lines(text, folder, 1, **given)
    flags = srun[srun.index("train.py") + 1 :]
    run = ["--run-dir", "runs/train-20_4", "--autoresume", "--set", "lr=0.4", "--", 'a "quoted" $HOME 4']
    assert (flags, scontrol) == (run, ["scontrol", "requeue", "20_4"])
    assert main([*words[:4], "--overwrite", "--run-dir", "runs/mine"]) == 0
    assert 'run_dir="runs/mine-${SLURM_ARRAY_TASK_ID}"\n' in (folder / "train.sbatch").read_text()


def test_a_resume_names_the_newest_run(folder: Path) -> None:
    (folder / "runs" / "train-20260101-000000" / "checkpoints" / "step-00000004").mkdir(parents=True)
    assert main(["slurm", "train.py", "--resume"]) == 0
    assert "run_dir=runs/train-20260101-000000\n" in (folder / "train.sbatch").read_text()


def test_a_recipe_is_started_by_the_command(folder: Path) -> None:
    assert main(["slurm", "text", "--gpus-per-node", "a100:4", "--no-requeue", "--write", "job.sh"]) == 0
    text = (folder / "job.sh").read_text()
    assert "#SBATCH --ntasks-per-node=4" in text
    assert f"{shlex.quote(sys.executable)} -m unisono run text" in text
    assert "scontrol" not in text
    (srun,) = run_lines(text, folder, SLURM_JOB_ID="17", RUN_DIR="runs/text-17")
    assert srun[-2:] == ["runs/text-17", "--autoresume"]


def test_an_edited_file_is_not_replaced(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["slurm", "train.py", "--nodes", "2"]
    assert main(words) == 0
    assert main(words) == 0
    file = folder / "train.sbatch"
    written = file.read_text()
    file.write_text(f"{written}# mine\n")
    assert main(words) == 2
    assert capsys.readouterr().err.endswith(
        "train.sbatch exists.\n  It differs from what would be written, perhaps because it was edited.\n"
        "  Next: unisono slurm train.py --nodes 2 --overwrite, or: "
        "unisono slurm train.py --nodes 2 --write my_train.sbatch\n"
    )
    assert file.read_text() == f"{written}# mine\n"
    assert main([*words, "--overwrite"]) == 0
    assert file.read_text() == written


@pytest.mark.parametrize(
    ("words", "error", "remedy"),
    [
        ("--nodes 0", "--nodes 0 is out of range.", "--nodes 1"),
        ("--ranks-per-node 0", "--ranks-per-node 0 is out of range.", "--ranks-per-node 1"),
        ("--nodes 5 --ranks-per-node 2", "10 processes are more than virtual_ranks.", "--ranks-per-node 8, or (other"),
        ("--nodes two", "Invalid value for --nodes: two", "--nodes 2"),
        ("--time soon", "Invalid value for --time: soon", "--time 12:00:00"),
        ("--time 2", "--signal 120 is not shorter than --time 2.", "--signal 30"),
        ("--array 1-", "Invalid value for --array: 1-", "--array 0-7"),
        ("--gpus-per-node many", "Invalid value for --gpus-per-node: many", "--gpus-per-node 4"),
        ("--sbatch time=3", "--sbatch cannot set time.", "unisono slurm train.py (without it)"),
        ("--sbatch=-m=3", "Invalid value for --sbatch: -m=3", "unisono slurm train.py"),
        ("--resume", "Nothing to resume.", "unisono slurm train.py (from the start)"),
        ("--resume --array 0-3", "--resume of an array needs --run-dir.", "--run-dir runs/NAME-%a"),
        ("--set batch=-1", "batch = -1 is out of range.", "--set batch=32"),
        ("--ranks 4", "There is no flag --ranks.", "unisono slurm train.py (without it)"),
        ("--submit", "Slurm is not installed here.", "sbatch train.sbatch (on a login node of the cluster)"),
    ],
)
def test_wrong_requests_are_one_message(
    folder: Path, capsys: pytest.CaptureFixture[str], words: str, error: str, remedy: str
) -> None:
    assert main(["slurm", "train.py", *words.split()]) == 2
    first, *_, last = capsys.readouterr().err.splitlines()
    assert first.startswith(error)
    assert remedy in last
    assert (folder / "train.sbatch").exists() == (words == "--submit")


def test_a_script_without_the_library_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "plain.py").write_text("print('training')\n")
    assert main(["slurm", "plain.py"]) == 2
    assert capsys.readouterr().err.startswith("plain.py does not call unisono.main.")


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [
        *(("90", 5400), ("1:30", 90), ("12:00:00", 43_200), ("1-0", 86_400), ("1-2:30", 95_400), ("1-2:30:05", 95_405)),
        *(("0", float("inf")), ("unlimited", float("inf")), ("1:2:3:4", None), ("-5", None), ("2h", None), ("", None)),
    ],
)
def test_time_limits_are_read_as_sbatch_reads_them(limit: str, seconds: float | None) -> None:
    assert seconds_of(limit) == seconds
