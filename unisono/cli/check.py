"""unisono check: is a script placement-proof? Runs a few steps of it here and there, and lays them side by side."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from unisono.cli.request import WHERE, Request
from unisono.cli.run import checked
from unisono.cli.verdict import AGAIN, KINDS, WORKER, Cause, Key, Traced, cause_of, first_difference, read
from unisono.errors import SettingsError
from unisono.launch import local
from unisono.launch.supervise import Outcome
from unisono.settings import Line, plural
from unisono.settings import read as read_settings

FIXED_HASHES = {"PYTHONHASHSEED": "0"}


@dataclass(frozen=True)
class Placement:
    """A way to run the script."""

    name: str
    ranks: int
    sets: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    operators: bool = False


ONE = Placement("1 process", 1)
OTHERS = (Placement(AGAIN, 1), Placement("2 processes", 2), Placement("3 processes", 3))


def check(
    target: str,
    /,
    *,
    steps: Annotated[int, Parameter(metavar="N", group=WHERE)] = 3,
    request: Request = Request(),  # noqa: B008  (frozen)
) -> int:
    """Is a script placement-proof? Run a few steps of it on 1, 2 and 3 processes, and compare them bit by bit.

    If they differ: the first thing that does, in which step and where, and why it probably does. Nothing is kept of
    these runs. Exit status 1: they differ, or one of them fails.

    Parameters
    ----------
    target
        A recipe's name, or the path to a script.
    steps
        How many steps are compared.
    """
    line = request.line("unisono", "check", target, *(["--steps", str(steps)] if steps != 3 else []))
    alone(line, steps, request)
    script, threads = checked(target, 1, request, line)
    with tempfile.TemporaryDirectory(prefix="unisono-check-") as folder:
        return Check(script, threads, steps, request, line, Path(folder)).run()


def alone(line: Line, steps: int, request: Request) -> None:
    """Runs that are compared have at least a step, and nothing to do with any other run. Raises SettingsError."""
    if steps < 1:
        raise SettingsError(f"--steps {steps}", "At least one step is compared.", str(line.flag("--steps", "3")))
    if request.resume or request.run_dir is not None:
        true = "It begins every run at step 0, in a folder of its own."
        raise SettingsError(str(line), true, str(line.without("--resume").without("--run-dir")))


def reason_of(outcome: Outcome) -> tuple[str, str]:
    """Why a run failed: its message, and all that is to be said of it, the traceback too."""
    record = outcome.failure.record if outcome.failure is not None else None
    said = (record.traceback or record.message) if record is not None else str(outcome.failure)
    return record.message if record is not None else said, said.rstrip()


@dataclass
class Check:
    """The runs of one check. `start` runs a script; see launch/local.py."""

    script: Path
    threads: int
    steps: int
    request: Request
    line: Line
    folder: Path
    start: Callable[..., Outcome] = local.run
    traces: dict[str, Traced] = field(default_factory=dict)
    told: list[dict[str, Any]] = field(default_factory=list)

    def run(self) -> int:
        outcome = self._trace(ONE)
        if outcome.stopped:
            return self._stopped()
        if outcome.exit_status or not self.traces[ONE.name].values:
            return self._no_ground(outcome)
        settings, _ = read_settings(self._folder(ONE) / "settings.toml")
        virtual_ranks, workers = int(settings["virtual_ranks"]), int(settings["loader.workers"])
        worker = Placement(WORKER, 1, sets=(f"loader.workers={int(workers == 0)}",))
        placements = [p for p in (*OTHERS, worker) if p.ranks <= virtual_ranks]
        self._say(ONE.name, f"{plural(len(self.traces[ONE.name].values), 'value')} of {plural(self.steps, 'step')}")
        for placement in placements:
            outcome = self._trace(placement)
            if outcome.stopped:
                return self._stopped()
            if outcome.exit_status:
                self._say(placement.name, "fails")
                return self._fails(placement, outcome)
            first = first_difference(self.traces[ONE.name], self.traces[placement.name])
            self._say(placement.name, "the same" if first is None else f"differs: {first}")
            if first is not None:
                return self._convict(first, placement.name)
        return self._proof(virtual_ranks)

    # -- runs

    def _folder(self, placement: Placement) -> Path:
        return self.folder / placement.name.replace(" ", "-").replace(",", "")

    def _trace(self, placement: Placement) -> Outcome:
        run_dir = self._folder(placement)
        run_dir.mkdir(parents=True)
        what = f"{self.steps}:{'operators:' * placement.operators}{run_dir / 'trace'}"
        request = replace(self.request, sets=(*self.request.sets, *placement.sets), trace=what, json=False)
        outcome = self.start(
            self.script,
            request.arguments(run_dir),
            ranks=placement.ranks,
            logs=run_dir / "log",
            threads=self.threads,
            screen=None,
            say=False,
            variables=placement.variables,
        )
        self.traces[placement.name] = read(run_dir / "trace")
        return outcome

    def _cause(self, first: Key, name: str) -> Cause:
        """The likely cause; where two runs alike differ, more runs tell more of it."""
        one, other, hashes = self.traces[ONE.name], self.traces[name], False
        if name == AGAIN and KINDS[first.kind] == "samples":
            fixed = [Placement(f"fixed {i}", 1, variables=FIXED_HASHES) for i in (1, 2)]
            if not any(self._trace(placement).exit_status for placement in fixed):
                hashes = first_difference(*(self.traces[placement.name] for placement in fixed)) is None
        elif name == AGAIN:
            warned = Placement("warned", 1, operators=True)
            self._trace(warned)
            other = replace(other, operators=self.traces[warned.name].operators)
        return cause_of(first, name, one, other, hashes=hashes)

    # -- what is said

    def _say(self, name: str, said: str) -> None:
        self.told.append({"run": name, "said": said})
        if not self.request.json:
            print(f"{name:34} {said}", flush=True)

    def _end(self, status: int, **more: Any) -> int:
        if self.request.json:
            print(json.dumps({"placement_proof": status == 0, "runs": self.told, **more}))
        return status

    def _stopped(self) -> int:
        print(f"Stopped, with nothing proved.\n  Next: {self.line}", file=sys.stderr)
        return self._end(1, cause="stopped")

    def _proof(self, virtual_ranks: int) -> int:
        if not self.request.json:
            most = "1 process" if virtual_ranks == 1 else f"1 to {virtual_ranks} processes"
            proved = f"Placement-proof in {plural(self.steps, 'step')}: the same bits wherever it ran."
            print(f"\n{proved} Run it on {most}.")
        return self._end(0)

    def _convict(self, first: Key, name: str) -> int:
        cause = self._cause(first, name)
        if not self.request.json:
            print(
                f"\nNot placement-proof. What differs first, with {name}: {first}.\n  {cause.said}\n  Next: {cause.do}"
            )
        place = {"step": first.step, "pass": first.walk, "virtual_rank": first.virtual_rank, "number": first.number}
        where = {"what": str(first), "name": first.name, **place}
        return self._end(1, first=where, with_run=name, cause=cause.name, said=cause.said, do=cause.do)

    def _fails(self, placement: Placement, outcome: Outcome) -> int:
        message, said = reason_of(outcome)
        if not self.request.json:
            print(f"\nNot placement-proof: it fails with {placement.name}, and not with 1 process.\n\n{said}")
        return self._end(1, with_run=placement.name, cause="failure", said=message, do="mend what the message names.")

    def _no_ground(self, outcome: Outcome) -> int:
        """There is nothing to compare with."""
        if outcome.failure is not None:
            message, said = reason_of(outcome)
            if not self.request.json:
                print(f"It fails with 1 process already.\n\n{said}")
            return self._end(outcome.exit_status, cause="failure", said=message, do="mend what the message names.")
        do = "for step in run.steps(train_set), inside of what is given to unisono.main"
        raise SettingsError(str(self.line), "It ran, and made no step that could be compared.", do)
