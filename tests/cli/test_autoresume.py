"""The run that a second start by a cluster manager resumes without --resume."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from unisono.cli.request.run_options import RunRequest
from unisono.cli.start.autoresume import job_mark, resumed_request
from unisono.config import CommandLine
from unisono.errors import SettingsError


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "runs"


def write_run(folder: Path, request: RunRequest) -> None:
    """Write the files by which a run that has begun identifies its job."""
    (folder / "checkpoints" / "step-00000004").mkdir(parents=True)
    (folder / "environment.json").write_text(json.dumps(job_mark(request)))


def second_start(request: RunRequest) -> RunRequest:
    """Return the request of the second start, from a manager that counts restarts."""
    return resumed_request(request, Path("train.py"), LINE, restarts=1)


LINE = CommandLine(("python", "train.py"))


def test_a_restart_resumes_its_run_directory(runs: Path) -> None:
    request = RunRequest(run_dir=Path("mine"))
    assert second_start(request) == request
    Path("mine").mkdir()
    assert second_start(request) == RunRequest(run_dir=Path("mine"), resume=True)
    assert (
        resumed_request(request, Path("train.py"), LINE) == request
    )  # the first start does not resume: the request is refused as without autoresume


def test_autoresume_works_under_any_manager(runs: Path) -> None:
    request = RunRequest(run_dir=Path("mine"), autoresume=True)
    assert resumed_request(request, Path("train.py"), LINE) == RunRequest(run_dir=Path("mine"))
    changed = replace(request, accept_change=("lr",))  # the first start ignores it: there is no earlier run
    assert resumed_request(changed, Path("train.py"), LINE) == RunRequest(run_dir=Path("mine"))
    Path("mine").mkdir()
    assert resumed_request(changed, Path("train.py"), LINE).accept_change == ("lr",)
    assert resumed_request(request, Path("train.py"), LINE) == RunRequest(run_dir=Path("mine"), resume=True)
    with pytest.raises(SettingsError, match="would not find it") as caught:
        resumed_request(RunRequest(autoresume=True), Path("train.py"), LINE)
    assert caught.value.problems[0].remedy == "python train.py --run-dir runs/train"


def test_without_a_run_directory_the_run_of_the_same_job_is_resumed(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, fast = RunRequest(sets=("lr=1",)), RunRequest(sets=("lr=2",))
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    write_run(runs / "train-20260101-000000", slow)
    write_run(runs / "train-20260101-000001", fast)
    monkeypatch.setenv("SLURM_JOB_ID", "18")
    write_run(runs / "train-20260101-000002", slow)  # a newer run of another job
    assert second_start(fast) == fast
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    assert second_start(slow).run_dir == Path("runs/train-20260101-000000")
    assert second_start(fast).run_dir == Path("runs/train-20260101-000001")
    assert second_start(RunRequest()) == RunRequest()


def write_start(folder: Path, script: Path, *arguments: str) -> None:
    """Write the file in which a run records its script and the script's arguments."""
    folder.mkdir(parents=True, exist_ok=True)
    about = {"script": str(script.resolve()), "arguments": list(arguments)}
    (folder / "environment.json").write_text(json.dumps(about))


def test_a_resume_keeps_the_arguments_of_the_script(runs: Path) -> None:
    script, other = Path("train.py"), Path("other.py")
    script.touch()
    write_start(Path("mine"), script, "--epochs", "100")
    request = RunRequest(run_dir=Path("mine"), resume=True)
    assert resumed_request(request, Path("train.py"), LINE).own == ("--epochs", "100")
    assert resumed_request(replace(request, own=("--lr=1",)), Path("train.py"), LINE).own == ("--lr=1",)
    assert second_start(RunRequest(run_dir=Path("mine"))).own == ("--epochs", "100")
    assert resumed_request(replace(request, resume=False), Path("train.py"), LINE).own == ()
    assert resumed_request(request, Path("other.py"), LINE).own == ()  # another script, which takes other arguments
    script.rename(other)
    assert resumed_request(request, Path("other.py"), LINE).own == ("--epochs", "100")
    other.unlink()
    other.symlink_to("train.py")
    script.touch()
    assert resumed_request(request, Path("other.py"), LINE).own == ("--epochs", "100")  # the same script, by a link
    assert resumed_request(replace(request, no_arguments=True), Path("train.py"), LINE).own == ()
    write_start(runs / "train-20261129-120000", script, "--newest")
    assert resumed_request(RunRequest(resume=True), Path("train.py"), LINE).own == ("--newest",)


def test_arguments_of_a_start_without_a_step_are_not_kept(runs: Path) -> None:
    """A script that refuses its arguments, or prints its help, leaves those of the newest checkpoint."""
    checkpoint = Path("mine", "checkpoints", "step-00000004")
    checkpoint.mkdir(parents=True)
    write_start(Path("mine"), Path("train.py"), "--help")
    request = RunRequest(run_dir=Path("mine"), resume=True)
    (checkpoint / "state.json").write_text(json.dumps({"identity": {"script arguments": ["--epochs", "100"]}}))
    assert resumed_request(request, Path("train.py"), LINE).own == ("--epochs", "100")
    (checkpoint / "state.json").write_text("{")
    assert resumed_request(request, Path("train.py"), LINE).own == ("--help",)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param("", id="empty"),
        pytest.param("[]", id="a list"),
        pytest.param('{"script": 3, "arguments": 4}', id="wrong types"),
        pytest.param('{"arguments": [1]}', id="a number"),
        pytest.param("\x00", id="a zero byte"),
    ],
)
def test_a_damaged_record_has_no_arguments(runs: Path, content: str) -> None:
    Path("mine").mkdir()
    Path("mine", "environment.json").write_text(content)
    assert resumed_request(RunRequest(run_dir=Path("mine"), resume=True), Path("train.py"), LINE).own == ()


def test_secret_arguments_are_given_again(runs: Path) -> None:
    write_start(Path("mine"), Path("train.py"), "--token", "***")
    with pytest.raises(SettingsError, match="are not stored") as caught:
        resumed_request(RunRequest(run_dir=Path("mine"), resume=True), Path("train.py"), LINE)
    assert caught.value.problems[0].remedy == "python train.py -- --token '***' (with the secret)"
