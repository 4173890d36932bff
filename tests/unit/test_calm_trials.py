"""Trials that other programs disturb: which are repeated, and the CPU times by which they are recognized."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from unisono.cli.planning.calm_trials import MOST_REPEATS, CalmTrials, used_by_others
from unisono.train.costs.cpu_time import CpuTime

BURN = "import time\nwhile time.process_time() < 0.5: pass"
"""Use half a second of CPU time."""
PATIENCE_SECONDS = 60.0


def record(machine: float, own: float, seconds: float = 2.0) -> dict[str, Any]:
    return {"cpu": {"seconds": seconds, "machine": machine, "own": own}}


def test_other_programs_disturb_if_no_core_is_idle() -> None:
    assert used_by_others([record(4.0, 1.6), record(3.9, 1.6)], cores=2) == pytest.approx(0.4)
    assert used_by_others([record(4.0, 2.0), record(4.0, 1.9)], cores=2) == 0, "its own processes use both cores"
    assert used_by_others([record(3.0, 1.0)], cores=2) == 0, "a core was idle half of the time"
    assert used_by_others([record(4.0, 2.0)], cores=2) == 1.0
    assert used_by_others([], cores=2) == used_by_others([{"steps": []}], cores=2) == 0


def trials(calm: CalmTrials, *disturbed: float) -> float:
    """Return which of these trials is kept, by the cores that other programs used in it."""
    waiting = list(disturbed)
    return calm.calmest(lambda: waiting.pop(0), lambda cores: [record(4.0, 4.0 - 2 * cores)])


def test_a_disturbed_trial_is_repeated_until_it_is_calm() -> None:
    calm = CalmTrials(cores=2)
    assert trials(calm, 0.0) == 0
    assert calm.repeats == MOST_REPEATS
    assert trials(calm, 1.0, 0.5, 0.0) == 0
    assert calm.repeats == MOST_REPEATS - 2
    assert calm.notes() == []


def test_the_least_disturbed_trial_is_kept_and_its_note_names_the_cores() -> None:
    calm = CalmTrials(cores=2, repeats=2)
    assert trials(calm, 1.0, 0.5, 0.8) == 0.5
    assert trials(calm, 0.3) == 0.3, "no repeat is left"
    assert calm.notes() == ["Other programs used 0.5 of 2 cores while steps were timed: times may be wrong."]


def test_cpu_time_is_divided_into_own_and_other(tmp_path: Path) -> None:
    clock = CpuTime()
    subprocess.run([sys.executable, "-c", BURN], check=True)
    found = clock.read()
    assert found["own"] > 0.4, "a descendant that has ended"
    assert found["machine"] > found["own"] - 0.1

    clock, ended = CpuTime(), tmp_path / "ended"
    orphan = f"({sys.executable} -c '{BURN}'; touch {ended}) > /dev/null 2>&1 &"  # its parent is not this process
    subprocess.run(["sh", "-c", orphan], check=True)
    until = time.monotonic() + PATIENCE_SECONDS
    while not ended.exists() and time.monotonic() < until:
        time.sleep(0.05)
    found = clock.read()
    assert found["machine"] - found["own"] > 0.4
    assert found["own"] < 0.4
