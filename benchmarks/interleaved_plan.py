"""Make a plan, and run each placement as the plan says to type it, right after its first short run.

    python -m benchmarks.interleaved_plan RUNS.json plan text --ranks 4 --json
    python -m benchmarks.interleaved_plan RUNS.json --recompute plan text --ranks 4 --json

The speed of a machine may change within minutes, and a plan takes some. So runs after the plan may differ from it in
the speed of the machine. With --recompute, each placement also runs with recomputed activations. For most of them, the
plan adds up their time from that of the placement without recomputation, so they run right after it.

RUNS.json gets the largest memory of a process and the time of a step, by the placement.
"""

from __future__ import annotations

import json
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from benchmarks.machine import ROOT, python_path
from unisono.cli.main import main as run_command
from unisono.cli.planning import plan_trials
from unisono.cli.planning.plan_table import line_of
from unisono.cli.speedup.speed_trials import QUIET, UNCHECKED
from unisono.costs.memory_model import RECOMPUTED
from unisono.costs.placement_trials import PlacementTrial
from unisono.costs.placements import Placement
from unisono.costs.recorded_costs import WARM_UP, RecordedCosts
from unisono.environment import inherited

Measured = dict[str, float]
"""The largest memory of a process ("memory", bytes), and the median time of a step of the slowest one ("step", s)."""

TRIED_WITH_BOTH = [each.without_recompute for each in RECOMPUTED]
"""Placements that a plan tries with and without recomputation. Each of the two runs after its own trial."""


def output_of(module: str, words: Sequence[str]) -> str:
    """Run a module of Python, and return its output."""
    done = subprocess.run(
        [sys.executable, "-m", module, *words],
        cwd=ROOT,
        env=inherited({"PYTHONPATH": python_path()}),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{module} {shlex.join(words)}: status {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def measured(line: str, steps: int) -> Measured:
    """Run a command line of a plan for some steps, with the recorder that the plan itself uses."""
    with tempfile.TemporaryDirectory() as folder:
        words = [*shlex.split(line)[1:], f"--trace=costs:{steps}:{folder}/costs", f"--run-dir={folder}/run"]
        output_of("unisono", [*words, *(f"--set={each}" for each in (*QUIET, *UNCHECKED))])
        files = sorted(Path(folder, "costs").glob("rank-*.json"))
        ranks = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    seconds = zip(*([step["seconds"] for step in rank["steps"][WARM_UP:]] for rank in ranks), strict=True)
    return {
        "memory": max(rank["memory"]["peak"] for rank in ranks),
        "step": statistics.median(map(max, seconds)),
    }


class InterleavedPlan(plan_trials.PlanTrials):
    """The trials of a plan. Each placement also runs once, after its first trial."""

    runs: ClassVar[dict[str, Measured]] = {}
    """What was measured, by the placement."""
    recomputes: ClassVar[bool] = False
    """Whether placements of several processes also run with recomputed activations."""

    def _measured(self, placement: Placement, plain: RecordedCosts) -> PlacementTrial | None:
        trial = super()._measured(placement, plain)
        is_listed = self.ranks is None or placement.processes <= self.ranks  # one more process is tried, too
        if trial is not None and is_listed:
            self._run_once(placement)
            if self.recomputes and placement not in TRIED_WITH_BOTH:
                self._run_once(replace(placement, recompute=True))
        return trial

    def _costs(self, name: str, sets: tuple[str, ...]) -> RecordedCosts | None:
        costs = super()._costs(name, sets)
        if costs is not None and costs.seconds is not None:
            self._run_once(Placement(recompute=bool(sets)))
        return costs

    def _run_once(self, placement: Placement) -> None:
        if str(placement) not in self.runs:
            self.runs[str(placement)] = measured(str(line_of(self.run_line, placement)), self.steps)


def main() -> None:
    file, *words = sys.argv[1:]
    InterleavedPlan.recomputes = words[0] == "--recompute"
    words = words[InterleavedPlan.recomputes :]
    plan_trials.PlanTrials = InterleavedPlan  # type: ignore[misc]
    status = run_command(words)
    Path(file).write_text(json.dumps(InterleavedPlan.runs), encoding="utf-8")
    sys.exit(status)


if __name__ == "__main__":
    main()
