"""unisono audit: detect hardware that computes wrong results.

In each step one virtual rank is computed on several processes (train/diagnostics/redundant_compute.py), and the results
are compared to the bit. A script is audited from its beginning, and a run from its newest checkpoint. Checkpoints go to
a temporary folder, so that the run keeps its own.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from unisono.cli.compare.repeated_runs import Verification, reason_of, refuse_unfit
from unisono.cli.compare.rerun import Rerun, earlier, is_run
from unisono.cli.request.request_checks import checked
from unisono.cli.request.run_options import WHERE, RunRequest
from unisono.cli.request.suggestions import WHOLE
from unisono.config import CommandLine, plural
from unisono.errors import SettingsError
from unisono.launcher.supervisor import RunOutcome

SETS = ("audit_every=1", "checkpoint.every=0")


def audit(
    target: str,
    /,
    *,
    ranks: Annotated[int, WHOLE, Parameter(name=["--ranks", "-n"], metavar="N", group=WHERE)] = 3,
    steps: Annotated[int, WHOLE, Parameter(metavar="N", group=WHERE)] = 8,
    script: Annotated[Path | None, Parameter(metavar="FILE", show_default=False)] = None,
    request: RunRequest = RunRequest(),  # noqa: B008  (frozen)
) -> int:
    """Detect hardware that computes wrong results, by computing one virtual rank of each step on three processes.

    A process with another result is named. A run is audited with its own settings, from its newest checkpoint.

    Exit status 1: results differ, or the run fails.

    Parameters
    ----------
    target
        The name of a recipe, the path of a script, or a run directory.
    ranks
        Number of processes. With three processes, two equal results identify the wrong one.
    steps
        Number of steps to audit.
    script
        The script of the run directory, if it was moved.
    """
    words = ["--ranks", str(ranks)] * (ranks != 3) + ["--steps", str(steps)] * (steps != 8)
    words += ["--script", str(script)] if script is not None else []
    line = request.line("unisono", "audit", target, *words)
    refuse_unfit(line, steps, request)
    with tempfile.TemporaryDirectory(prefix="unisono-audit-") as folder:
        again = _rerun_of(target, ranks, script, request, line)
        return HardwareAudit(
            again=again, ranks=ranks, steps=steps, as_json=request.json, folder=Path(folder), line=line
        ).run()


def _rerun_of(target: str, ranks: int, script: Path | None, request: RunRequest, line: CommandLine) -> Rerun:
    """Return how to run the target: a run again, or a script from its beginning."""
    if is_run(Path(target)):
        if request.sets or request.settings_file is not None:
            error = "--set and --settings cannot be combined with a run directory."
            do = str(line.without("--set").without("--settings"))
            raise SettingsError(error, "A run is audited with the settings that it had.", do)
        return earlier(Path(target), script, line)
    if script is not None:
        facts = f"{target} is not a run directory, whose script could have moved."
        raise SettingsError("--script has no effect without a run directory.", facts, str(line.without("--script")))
    found, threads, *_ = checked(target, ranks, replace(request, sets=(*request.sets, *SETS)), line)
    return Rerun(
        script=found.absolute(),
        own=request.own,
        folder=Path.cwd(),
        sets=request.sets,
        settings_file=request.settings_file and request.settings_file.absolute(),
        settings={"threads": threads},
    )


@dataclass(kw_only=True)
class HardwareAudit(Verification):
    """One audit.

    Attributes:
        again: how to run the script again.
        ranks: the number of processes.
        steps: the number of steps to audit.
        record: the comparisons and their result, as train/diagnostics/audited_run.py wrote them.
    """

    again: Rerun
    ranks: int
    steps: int
    record: dict[str, Any] = field(default_factory=dict)

    def run(self) -> int:
        """Run the audited steps, and return the exit status."""
        after, checkpoint = self.again.checkpoint()
        file = self.folder / "audits.json"
        outcome = self.again.run(
            self.folder / "run",
            ranks=self.ranks,
            checkpoint=checkpoint,
            sets=(*SETS, f"steps={after + self.steps + 1}", "epochs=none"),
            trace=f"audit:{self.steps}:{file}",
        )
        if file.is_file():
            self.record = json.loads(file.read_text(encoding="utf-8"))
        return self._report(outcome)

    def _report(self, outcome: RunOutcome) -> int:
        done, found = self.record.get("done", []), self.record.get("found", {})
        if outcome.stopped:
            return self._leave(1, stopped=True)
        if found:
            assert outcome.failure is not None
            message, _ = reason_of(outcome)
            self._say(message)
            return self._leave(1, **found, message=message)
        if outcome.failure is not None:
            message, text = reason_of(outcome)
            self._say(f"The audited run fails.\n\n{text}")
            return self._leave(outcome.exit_status, message=message)
        ranks = sorted({rank for *_, ranks in done for rank in ranks})
        where = plural(len(ranks), "process", "processes")
        self._say(f"{plural(len(done), 'virtual rank')} computed again on {where}: all results are equal to the bit.")
        return self._leave(0)

    def _facts(self, status: int) -> dict[str, Any]:
        done = [{"step": s, "virtual_rank": v, "ranks": ranks} for s, v, ranks in self.record.get("done", [])]
        return {"sound": status == 0, "audits": done}
