"""unisono doctor --rehearse SCRIPT: failures are played against one's own script on one's own machine, one after the
other, and it is reported what was survived, and how long each took.

A run is survived if it ends with the weights that it has when nothing goes wrong, to the last bit: by itself, or with
--resume where it ended. Nothing is pretended: processes are killed, packets are lost (testing/faults.py).
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from textwrap import shorten
from typing import Any

from unisono.cli.compare.trial_runner import reason_of, refuse_unfit
from unisono.cli.request.request_checks import checked
from unisono.cli.request.run_dir import APART
from unisono.cli.request.run_options import RunRequest
from unisono.config import CommandLine
from unisono.errors import SettingsError
from unisono.launcher import local_launch
from unisono.launcher.supervisor import RunOutcome
from unisono.monitor.timeline import read as read_timeline

STEPS = 8
EVERY = 2
COURSE = (f"steps={STEPS}", "epochs=none", f"checkpoint.every={EVERY}", "checkpoint.keep=3", APART)
STRIKE = 5
"""The step in which it goes wrong, counted from 0: one after that behind which a checkpoint is, so one is repeated."""

LIMIT_SECONDS = 3.0
"""For what hangs, at least; five times the longest step of the undisturbed run, if that is more."""


WIDTH = 100
"""Characters of why a run ended: the sentence with the name in it."""

NOTHING_MOVED = re.compile(r"^Nothing has moved for \d+ s\. (?=.)")


@dataclass(frozen=True)
class FaultScenario:
    """Something that goes wrong. `faults`: in words (testing/fault_spec.py), with {last} for the last rank, {step} and
    {folder}; `sets`: settings, with {limit}."""

    name: str
    faults: tuple[str, ...]
    sets: tuple[str, ...] = ()


SCENES = (
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
        "the newest checkpoint is torn, all are killed",
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
    """How a scene ended.

    survived  with the weights of the undisturbed run; None: nothing went wrong, since the run has no such moment
    how       in words
    seconds   from the moment it went wrong to the end of that step, wherever it was made in the end; None: it never was
    """

    scene: str
    survived: bool | None
    how: str
    seconds: float | None

    def __str__(self) -> str:
        word = {True: "survived", False: "LOST", None: "not met"}[self.survived]
        took = f"; that step was done after {self.seconds:.1f} s" if self.seconds is not None else ""
        return f"{word:9} {self.scene:46} {self.how}{took}"


def rehearse(target: str, ranks: int, request: RunRequest) -> int:
    """Play all scenes; exit status 1 if one of them was not survived."""
    line = request.line("unisono", "doctor", "--rehearse", target, *(["--ranks", str(ranks)] if ranks != 2 else []))
    refuse_unfit(line, STEPS, request)
    if ranks < 2:
        raise SettingsError(str(line), "Of a single process nobody is left.", str(line.flag("--ranks", "2")))
    request = replace(request, sets=(*request.sets, *COURSE))
    script, threads, *_ = checked(target, ranks, request, line)
    with tempfile.TemporaryDirectory(prefix="unisono-rehearse-") as folder:
        return Rehearsal(script, threads, ranks, request, line, Path(folder)).play()


@dataclass
class Rehearsal:
    """One script, and what is played against it. `start` runs a script; see launcher/local_launch.py."""

    script: Path
    threads: int
    ranks: int
    request: RunRequest
    line: CommandLine
    folder: Path
    start: Callable[..., RunOutcome] = local_launch.run
    scenes: Sequence[FaultScenario] = SCENES
    played: list[ScenarioResult] = field(default_factory=list)

    def play(self) -> int:
        self._say(f"{len(self.scenes)} failures, each in a run of {STEPS} steps or two. First one undisturbed.")
        began = time.monotonic()
        whole = self._run(FaultScenario("undisturbed", ()), LIMIT_SECONDS)
        whole_seconds = time.monotonic() - began
        if whole.stopped:
            return self._stopped()
        if whole.exit_status:
            message, text = reason_of(whole)
            self._say(f"It fails undisturbed already.\n\n{text}")
            return self._leave(whole.exit_status, error=message)
        result = self._result("undisturbed")
        if result is None:
            do = "for step in run.steps(train_set), inside of what is given to unisono.main"
            raise SettingsError(str(self.line), "It ran, and made no step.", do)
        limit = max(LIMIT_SECONDS, 5 * self._longest_step())
        shown = f"undisturbed: {result['seconds']:.1f} s for {result['steps']} steps, on {self.ranks} processes; "
        self._say(f"{shown}weights {result['weights_sha256'][:16]}")
        self._say(f"With its start it took {whole_seconds:.0f} s, so all takes {self._about(whole_seconds, limit)}.\n")
        for scene in self.scenes:
            played = self._play(scene, str(result["weights_sha256"]), limit)
            if played is None:
                return self._stopped()
            self.played.append(played)
            self._say(str(played))
        lost = [played.scene for played in self.played if played.survived is False]
        met = [played.scene for played in self.played if played.survived is not None]
        self._say(f"\n{len(met) - len(lost)} of {len(met)} survived.")
        return self._leave(1 if lost else 0, undisturbed_seconds=result["seconds"])

    def _about(self, run_seconds: float, limit: float) -> str:
        """How long all scenes take, in words: each is a run, or a run and its resume, and what hangs is waited for."""
        hangs = sum(limit for scene in self.scenes if scene.sets)
        least, most = (times * len(self.scenes) * run_seconds + hangs for times in (1, 2))
        if most < 90:
            return f"{least:.0f} to {most:.0f} s"
        return f"{max(1, least / 60):.0f} to {most / 60:.0f} minutes"

    # -- a scene

    def _play(self, scene: FaultScenario, whole: str, limit: float) -> ScenarioResult | None:
        """None: somebody has stopped us."""
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
            how = f"ended ({why}), went on with --resume"
        result, seconds = self._result(scene.name), self._seconds(scene)
        if result is None:
            return ScenarioResult(scene.name, False, f"{how}, and left no result", seconds)
        if result.get("deaths") and how == "by itself":
            how = "the others finished its step"
        if not self._struck(scene):
            return ScenarioResult(scene.name, None, "the run has no such moment, so nothing went wrong", None)
        same = result["weights_sha256"] == whole
        return ScenarioResult(scene.name, same, how if same else f"{how}; other weights than undisturbed", seconds)

    def _run(self, scene: FaultScenario, limit: float, *, resume: bool = False) -> RunOutcome:
        run_dir = self._run_dir(scene.name)
        if not resume:
            shutil.rmtree(run_dir, ignore_errors=True)
            run_dir.mkdir(parents=True)
        known = {"step": STRIKE, "torn": EVERY * (STRIKE // EVERY) - 1, "last": self.ranks - 1, "folder": str(run_dir)}
        request = replace(
            self.request,
            sets=(*self.request.sets, *(text.format(limit=limit) for text in scene.sets)),
            faults=tuple(text.format(**known) for text in scene.faults),
            resume=resume,
            json=False,
        )
        return self.start(
            self.script,
            request.arguments(run_dir),
            ranks=self.ranks,
            logs=run_dir / "log",
            threads=self.threads,
            screen=None,
            say=False,
            minimum=1,  # as under `unisono run`: where others can go on, they do
        )

    def _run_dir(self, name: str) -> Path:
        return self.folder / name.replace(" ", "-").replace(",", "")

    def _struck(self, scene: FaultScenario) -> bool:
        """Has it gone wrong? Who is slow is slow all the time, and leaves no mark."""
        marks = list((self._run_dir(scene.name) / "faults").glob("fault-*"))
        return bool(marks) or all(fault.startswith("SlowAt") for fault in scene.faults)

    def _result(self, name: str) -> dict[str, Any] | None:
        path = self._run_dir(name) / "result.json"
        if not path.exists():
            return None
        result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return result

    def _lines(self, name: str) -> Iterator[dict[str, Any]]:
        for path in sorted((self._run_dir(name) / "timeline").glob("rank-*.jsonl")):
            yield from read_timeline(path)

    def _longest_step(self) -> float:
        """Seconds; the first step has its own limit."""
        told = [sum(line["seconds"].values()) for line in self._lines("undisturbed") if line.get("step", 0) > 0]
        return max(told, default=0.0)

    def _seconds(self, scene: FaultScenario) -> float | None:
        """From the moment it went wrong last to the end of the step in which it did, or of one behind that."""
        marks = list((self._run_dir(scene.name) / "faults").glob("fault-*"))
        if not marks:
            return None
        struck = max(mark.stat().st_mtime for mark in marks)
        lines = self._lines(scene.name)
        after = [line["t"] for line in lines if line.get("step", -1) >= STRIKE and line["t"] > struck]
        return min(after) - struck if after else None

    # -- what is said

    def _say(self, text: str) -> None:
        if not self.request.json:
            print(text, flush=True)

    def _stopped(self) -> int:
        print(f"Stopped, with nothing proved.\n  Next: {self.line}", file=sys.stderr)
        return self._leave(1, error="stopped")

    def _leave(self, status: int, **more: Any) -> int:
        if self.request.json:
            print(json.dumps({"survived": status == 0, "scenes": [asdict(p) for p in self.played], **more}))
        return status


def _why(outcome: RunOutcome) -> str:
    """Why a run ended, in some words of it."""
    record = outcome.failure.record if outcome.failure is not None else None
    said = record.problems[0].true if record is not None and record.problems else reason_of(outcome)[0]
    first = said.strip().partition("\n")[0].partition(": usually")[0].rstrip(".")
    return shorten(NOTHING_MOVED.sub("", first), WIDTH, placeholder=" ...")
