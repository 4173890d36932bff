"""unisono audit: do the processes of this machine compute the same? A few steps, each with a part computed twice."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from unisono.cli.compare.rerun import Rerun, earlier, is_run
from unisono.cli.compare.trial_runner import reason_of, refuse_unfit
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
    """Look for hardware that computes wrongly: in each step one virtual rank is computed by three processes.

    All must make the same of it, to the bit; who does not is named. Of a run it takes the settings and the newest
    checkpoint, and its directory is only read. Exit status 1: something came out differently, or it fails.

    Parameters
    ----------
    target
        A recipe's name, the path to a script, or the directory of a run.
    ranks
        How many processes. With three, two outvote the third.
    steps
        How many steps are audited.
    script
        Of a run's directory: its script, if it is no longer where it was.
    """
    words = ["--ranks", str(ranks)] * (ranks != 3) + ["--steps", str(steps)] * (steps != 8)
    words += ["--script", str(script)] if script is not None else []
    line = request.line("unisono", "audit", target, *words)
    refuse_unfit(line, steps, request)
    if is_run(Path(target)):
        if request.sets or request.settings_file is not None:
            true = "A run is audited with the settings that it had."
            raise SettingsError(str(line), true, str(line.without("--set").without("--settings")))
        again = earlier(Path(target), script, line)
    elif script is not None:
        true = f"{target} is no run's directory, whose script could have moved."
        raise SettingsError(f"--script {script}", true, str(line.without("--script")))
    else:
        asked = replace(request, sets=(*request.sets, *SETS))
        found, threads, *_ = checked(target, ranks, asked, line)
        again = Rerun(
            script=found.absolute(),
            own=request.own,
            folder=Path.cwd(),
            sets=request.sets,
            settings_file=request.settings_file and request.settings_file.absolute(),
            settings={"threads": threads},
        )
    with tempfile.TemporaryDirectory(prefix="unisono-audit-") as folder:
        return HardwareAudit(again, ranks, steps, request.json, Path(folder), line).run()


@dataclass
class HardwareAudit:
    """One audit."""

    again: Rerun
    ranks: int
    steps: int
    json: bool
    folder: Path
    line: CommandLine
    told: dict[str, Any] = field(default_factory=dict)
    """What was compared, and what came of it (train/diagnostics/audited_run.py)."""

    def run(self) -> int:
        after, checkpoint = self.again.checkpoint()
        file = self.folder / "told.json"
        more = [f"steps={after + self.steps + 1}", "epochs=none"]
        outcome = self.again.run(
            self.folder / "run",
            ranks=self.ranks,
            checkpoint=checkpoint,
            sets=(*SETS, *more),
            trace=f"audit:{self.steps}:{file}",
        )
        if file.is_file():
            self.told = json.loads(file.read_text(encoding="utf-8"))
        return self._tell(outcome)

    def _tell(self, outcome: RunOutcome) -> int:
        done, found = self.told.get("done", []), self.told.get("found", {})
        if outcome.stopped:
            return self._leave(1, stopped=True)
        if found:
            assert outcome.failure is not None
            message, _ = reason_of(outcome)
            self._say(message)
            return self._leave(1, **found, said=message)
        if outcome.failure is not None:
            message, text = reason_of(outcome)
            self._say(f"It fails.\n\n{text}")
            return self._leave(outcome.exit_status, said=message)
        ranks = sorted({rank for *_, who in done for rank in who})
        where = plural(len(ranks), "process", "processes")
        self._say(f"{plural(len(done), 'virtual rank')} computed again, on {where}: the same to the bit.")
        return self._leave(0)

    def _say(self, text: str) -> None:
        if not self.json:
            print(text, flush=True)

    def _leave(self, status: int, **more: Any) -> int:
        if self.json:
            done = [{"step": s, "virtual_rank": v, "ranks": ranks} for s, v, ranks in self.told.get("done", [])]
            print(json.dumps({"sound": status == 0, "audits": done, **more}))
        return status
