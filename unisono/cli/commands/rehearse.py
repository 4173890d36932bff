"""unisono doctor --rehearse SCRIPT: inject failures into runs of a script, one after the other, and report recovery.

A run survives a failure if it ends with the weights of an undisturbed run, to the last bit: by itself, or after a
resume. Failures are real: processes are killed, packets are dropped (testing/faults.py).
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from textwrap import shorten
from typing import Any

from unisono.cli.compare.repeated_runs import Verification, reason_of, refuse_unfit
from unisono.cli.request.request_checks import checked
from unisono.cli.request.run_dir import CHECKPOINTS_IN_RUN_DIR
from unisono.cli.request.run_options import RunRequest
from unisono.errors import SettingsError
from unisono.launcher.supervisor import RunOutcome
from unisono.monitor.timeline import read as read_timeline

STEPS = 8
EVERY = 2
RUN_SETS = (f"steps={STEPS}", "epochs=none", f"checkpoint.every={EVERY}", "checkpoint.keep=3", CHECKPOINTS_IN_RUN_DIR)
FAULT_STEP = 5
"""The step of the failure, counted from 0. The newest checkpoint is one step older, so that one step is repeated."""

TIMEOUT_SECONDS = 3.0
"""The smallest timeout for hangs; it is five times the longest step of the undisturbed run if that is longer."""

WIDTH = 100
"""Characters of the reason why a run ended."""

NO_PROGRESS = re.compile(r"^No process has made progress for \d+ s\. (?=.)")


@dataclass(frozen=True)
class FaultScenario:
    """One failure.

    Args:
        name: shown in the report.
        faults: as in testing/fault_spec.py, with {last} for the last rank, {step}, {torn} and {folder}.
        sets: additional settings, with {limit} for the timeout.
    """

    name: str
    faults: tuple[str, ...]
    sets: tuple[str, ...] = ()


SCENARIOS = (
    FaultScenario("a process is killed in its backward pass", ("FailAt step={step} phase=backward rank={last}",)),
    FaultScenario("the first process is killed in the exchange", ("FailAt step={step} phase=exchange rank=0",)),
    FaultScenario("a process is killed in a checkpoint", ("FailAt step={step} phase=checkpoint rank=0",)),
    FaultScenario("all processes are killed at once", ("FailAt step={step} phase=forward",)),
    FaultScenario("an exception in one process", ("FailAt step={step} phase=forward kind=error rank={last}",)),
    FaultScenario(
        "a process hangs",
        ("HangAt step={step} phase=forward rank={last}",),
        ("watchdog.timeout={limit}",),
    ),
    FaultScenario(
        "a process is stopped",
        ("HangAt step={step} phase=backward kind=stop rank={last}",),
        ("watchdog.timeout={limit}",),
    ),
    FaultScenario(
        "the newest checkpoint is damaged, all are killed",
        (
            "TornFile step={torn} phase=checkpoint folder={folder!r} when=ends rank=0",
            "FailAt step={step} phase=forward",
        ),
    ),
    FaultScenario(
        "the disk is full at a checkpoint", ("FullDisk step={step} phase=checkpoint steps=3",)
    ),  # to the next one
    FaultScenario("one packet in fifty is lost", ("LostPackets step={step} phase=data share=0.02 rank={last}",)),
    FaultScenario("a process is three times slower", ("SlowAt times=3 rank={last}",)),
    FaultScenario("a bit of the weights flips in one process", ("BitFlip step={step} of=weights rank={last}",)),
)


@dataclass(frozen=True)
class ScenarioResult:
    """The result of one scenario.

    Args:
        scene: its name.
        survived: whether the run ended with the weights of the undisturbed run; None if the failure never happened.
        how: how the run ended.
        seconds: from the failure to the end of the step in which it happened; None if that step was never completed.
    """

    scene: str
    survived: bool | None
    how: str
    seconds: float | None

    def __str__(self) -> str:
        word = {True: "survived", False: "LOST", None: "skipped"}[self.survived]
        took = f"; the step was complete after {self.seconds:.1f} s" if self.seconds is not None else ""
        return f"{word:9} {self.scene:46} {self.how}{took}"


def rehearse(target: str, ranks: int, request: RunRequest) -> int:
    """Run all scenarios, and return the exit status: 1 if a run did not survive one of them."""
    line = request.line("unisono", "doctor", "--rehearse", target, *(["--ranks", str(ranks)] if ranks != 2 else []))
    refuse_unfit(line, STEPS, request)
    if ranks < 2:
        error = f"--ranks {ranks} is out of range."
        raise SettingsError(error, "A rehearsal needs at least 2 processes.", str(line.flag("--ranks", "2")))
    request = replace(request, sets=(*request.sets, *RUN_SETS))
    script, threads, *_ = checked(target, ranks, request, line)
    with tempfile.TemporaryDirectory(prefix="unisono-rehearse-") as folder:
        return Rehearsal(
            script=script,
            threads=threads,
            ranks=ranks,
            request=request,
            as_json=request.json,
            line=line,
            folder=Path(folder),
        ).play()


@dataclass(kw_only=True)
class Rehearsal(Verification):
    """One rehearsal.

    Attributes:
        script: the script.
        threads: the number of threads of each process.
        ranks: the number of processes.
        request: the flags of each run.
        scenes: the scenarios.
        played: their results so far.
    """

    script: Path
    threads: int
    ranks: int
    request: RunRequest
    scenes: Sequence[FaultScenario] = SCENARIOS
    played: list[ScenarioResult] = field(default_factory=list)

    def play(self) -> int:
        """Run all scenarios, and return the exit status."""
        self._say(f"{len(self.scenes)} failures, each in one or two runs of {STEPS} steps. First an undisturbed run.")
        began = time.monotonic()
        whole = self._run(FaultScenario("undisturbed", ()), TIMEOUT_SECONDS)
        whole_seconds = time.monotonic() - began
        if whole.stopped:
            return self._stopped(error="stopped")
        if whole.exit_status:
            message, text = reason_of(whole)
            self._say(f"The undisturbed run fails.\n\n{text}")
            return self._leave(whole.exit_status, error=message)
        result = self._result("undisturbed")
        if result is None:
            do = "for step in run.steps(train_set), in the function that is passed to unisono.main"
            raise SettingsError(f"{self.script.name} made no step.", "There is nothing to disturb.", do)
        limit = max(TIMEOUT_SECONDS, 5 * self._longest_step())
        shown = f"undisturbed: {result['seconds']:.1f} s for {result['steps']} steps, on {self.ranks} processes; "
        self._say(f"{shown}weights {result['weights_sha256'][:16]}")
        self._say(
            f"It took {whole_seconds:.0f} s with its start, so all runs take {self._estimate(whole_seconds, limit)}.\n"
        )
        for scene in self.scenes:
            played = self._play(scene, str(result["weights_sha256"]), limit)
            if played is None:
                return self._stopped(error="stopped")
            self.played.append(played)
            self._say(str(played))
        lost = [played.scene for played in self.played if played.survived is False]
        met = [played.scene for played in self.played if played.survived is not None]
        self._say(f"\n{len(met) - len(lost)} of {len(met)} survived.")
        return self._leave(1 if lost else 0, undisturbed_seconds=result["seconds"])

    def _estimate(self, run_seconds: float, limit: float) -> str:
        """Return how long all scenarios take: each is one run or two, and hangs last until their timeout."""
        hangs = sum(limit for scene in self.scenes if scene.sets)
        least, most = (times * len(self.scenes) * run_seconds + hangs for times in (1, 2))
        if most < 90:
            return f"{least:.0f} to {most:.0f} s"
        return f"{max(1, least / 60):.0f} to {most / 60:.0f} minutes"

    # -- one scenario

    def _play(self, scene: FaultScenario, whole: str, limit: float) -> ScenarioResult | None:
        """Run one scenario; None if the user stopped it."""
        outcome = self._run(scene, limit)
        how = "by itself"
        if outcome.stopped:
            return None
        if outcome.exit_status:
            why = _why(outcome)
            outcome = self._run(scene, limit, resume=True)
            if outcome.stopped:
                return None
            if outcome.exit_status:
                then = _why(outcome)
                return ScenarioResult(scene.name, False, f"ended ({why}); --resume failed: {then}", None)
            how = f"ended ({why}), continued with --resume"
        result, seconds = self._result(scene.name), self._seconds(scene)
        if result is None:
            return ScenarioResult(scene.name, False, f"{how}, without a result", seconds)
        if result.get("deaths") and how == "by itself":
            how = "the other processes finished the step"
        if not self._struck(scene):
            return ScenarioResult(scene.name, None, "the run never reaches this failure", None)
        same = result["weights_sha256"] == whole
        return ScenarioResult(
            scene.name, same, how if same else f"{how}; the weights differ from the undisturbed run", seconds
        )

    def _run(self, scene: FaultScenario, limit: float, *, resume: bool = False) -> RunOutcome:
        run_dir = self._run_dir(scene.name)
        if not resume:
            shutil.rmtree(run_dir, ignore_errors=True)
            run_dir.mkdir(parents=True)
        known = {
            "step": FAULT_STEP,
            "torn": EVERY * (FAULT_STEP // EVERY) - 1,
            "last": self.ranks - 1,
            "folder": str(run_dir),
        }
        request = replace(
            self.request,
            sets=(*self.request.sets, *(text.format(limit=limit) for text in scene.sets)),
            faults=tuple(text.format(**known) for text in scene.faults),
            resume=resume,
            json=False,
        )
        # minimum=1 as under `unisono run`: the other processes continue if they can
        arguments = request.arguments(run_dir)
        return self._start(self.script, arguments, run_dir, ranks=self.ranks, threads=self.threads, minimum=1)

    def _struck(self, scene: FaultScenario) -> bool:
        """Return whether the failure happened. A slow process is slow all the time, and leaves no mark."""
        marks = list((self._run_dir(scene.name) / "faults").glob("fault-*"))
        return bool(marks) or all(fault.startswith("SlowAt") for fault in scene.faults)

    def _result(self, name: str) -> dict[str, Any] | None:
        path = self._run_dir(name) / "result.json"
        if not path.exists():
            return None
        result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return result

    def _lines(self, name: str) -> Iterator[dict[str, Any]]:
        """Yield the lines of all timelines that are steps."""
        for path in sorted((self._run_dir(name) / "timeline").glob("rank-*.jsonl")):
            yield from (line for line in read_timeline(path) if "seconds" in line)

    def _longest_step(self) -> float:
        """Return the seconds of the longest step. The first step, which has a timeout of its own, does not count."""
        seconds = [sum(line["seconds"].values()) for line in self._lines("undisturbed") if line.get("step", 0) > 0]
        return max(seconds, default=0.0)

    def _seconds(self, scene: FaultScenario) -> float | None:
        """Return the seconds from the last failure to the end of its step, or of a later one."""
        marks = list((self._run_dir(scene.name) / "faults").glob("fault-*"))
        if not marks:
            return None
        struck = max(mark.stat().st_mtime for mark in marks)
        lines = self._lines(scene.name)
        after = [line["t"] for line in lines if line.get("step", -1) >= FAULT_STEP and line["t"] > struck]
        return min(after) - struck if after else None

    def _facts(self, status: int) -> dict[str, Any]:
        return {"survived": status == 0, "scenes": [asdict(result) for result in self.played]}


def _why(outcome: RunOutcome) -> str:
    """Return the reason why a run ended, shortened to one line."""
    record = outcome.failure.record if outcome.failure is not None else None
    reason = record.problems[0].facts if record is not None and record.problems else reason_of(outcome)[0]
    first = reason.strip().partition("\n")[0].partition(": usually")[0].rstrip(".")
    return shorten(NO_PROGRESS.sub("", first), WIDTH, placeholder=" ...")
