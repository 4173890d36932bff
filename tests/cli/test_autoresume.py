"""What a manager's second start goes on from, without anybody to type --resume."""

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


def leave(folder: Path, request: RunRequest) -> None:
    """What a run that has begun leaves of its job."""
    (folder / "checkpoints" / "step-00000004").mkdir(parents=True)
    (folder / "environment.json").write_text(json.dumps(job_mark(request)))


def second(request: RunRequest) -> RunRequest:
    """What the second start of it does, of a manager that counts."""
    return resumed_request(request, "train", LINE, restarts=1)


LINE = CommandLine(("python", "train.py"))


def test_a_restart_resumes_its_run_directory(runs: Path) -> None:
    asked = RunRequest(run_dir=Path("mine"))
    assert second(asked) == asked
    Path("mine").mkdir()
    assert second(asked) == RunRequest(run_dir=Path("mine"), resume=True)
    assert resumed_request(asked, "train", LINE) == asked  # the first start: it is refused, as it was


def test_autoresume_works_under_any_manager(runs: Path) -> None:
    asked = RunRequest(run_dir=Path("mine"), autoresume=True)
    assert resumed_request(asked, "train", LINE) == RunRequest(run_dir=Path("mine"))
    changed = replace(asked, accept_change=("lr",))  # the first start has nothing to differ from
    assert resumed_request(changed, "train", LINE) == RunRequest(run_dir=Path("mine"))
    Path("mine").mkdir()
    assert resumed_request(changed, "train", LINE).accept_change == ("lr",)
    assert resumed_request(asked, "train", LINE) == RunRequest(run_dir=Path("mine"), resume=True)
    with pytest.raises(SettingsError, match="would not find it") as caught:
        resumed_request(RunRequest(autoresume=True), "train", LINE)
    assert caught.value.problems[0].do == "python train.py --run-dir runs/train"


def test_without_a_run_directory_the_run_of_the_same_job_is_resumed(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, fast = RunRequest(sets=("lr=1",)), RunRequest(sets=("lr=2",))
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    leave(runs / "train-20260101-000000", slow)
    leave(runs / "train-20260101-000001", fast)
    monkeypatch.setenv("SLURM_JOB_ID", "18")
    leave(runs / "train-20260101-000002", slow)  # somebody else's, and newer
    assert second(fast) == fast
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    assert second(slow).run_dir == Path("runs/train-20260101-000000")
    assert second(fast).run_dir == Path("runs/train-20260101-000001")
    assert second(RunRequest()) == RunRequest()
