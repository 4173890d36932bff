"""unisono prove: compare a few steps under several placements with the same steps on one process."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from unisono.cli.compare.layout_spec import ALONE, LayoutLine, LayoutSpec, fitting, placement_of
from unisono.cli.compare.repeated_runs import reason_of, refuse_unfit
from unisono.cli.compare.trial_runner import Trial, TrialRunner
from unisono.cli.request.request_checks import ScriptReport, check_settings, checked, inspect_script
from unisono.cli.request.run_options import WHERE, RunRequest
from unisono.cli.request.suggestions import WHOLE
from unisono.config import CommandLine, plural, size, toml
from unisono.errors import Problem, SettingsError
from unisono.launcher.supervisor import RunOutcome

if TYPE_CHECKING:
    from unisono.cli.compare.tensor_diff import Deviation, DumpFile, Limits, TensorAgreement

TOLERANCE = 1e-5
LOW_PRECISION_TOLERANCE = 0.1
"""A tolerance for bfloat16, which has 8 significant bits."""
KINDS = ("parameters", "gradients", "optimizer")
UNEVEN = 1.1
"""Ratio of the largest pipeline stage to the mean, in parameters, above which the report mentions it."""


def prove(
    target: str,
    /,
    *,
    parallel: Annotated[
        tuple[str, ...], Parameter(name="--parallel", metavar="LAYOUT", show_default=False, group=WHERE)
    ] = (),
    steps: Annotated[int, WHOLE, Parameter(metavar="N", group=WHERE)] = 3,
    tolerance: Annotated[float, Parameter(metavar="X", group=WHERE)] = TOLERANCE,
    request: RunRequest = RunRequest(),  # noqa: B008  (frozen)
) -> int:
    """Compare every gradient of a few steps under several parallel layouts with those of one process.

    A table lists the relative errors, and the first tensor that disagrees is named. These runs are deleted.

    Exit status 1: a layout disagrees, or fails.

    Parameters
    ----------
    target
        The name of a recipe, or the path of a script.
    parallel
        Settings of `parallel`, as in shard=2,reshard=step. Repeatable. By default all layouts that fit on 4 processes.
    steps
        Number of steps to compare.
    tolerance
        Largest relative error of a gradient. The limit for a loss is a tenth of this.
    """
    words = [word for each in parallel for word in ("--parallel", each)]
    words += ["--steps", str(steps)] if steps != 3 else []
    words += ["--tolerance", f"{tolerance:g}"] if tolerance != TOLERANCE else []
    line = request.line("unisono", "prove", target, *words)
    refuse_unfit(line, steps, request)
    if not 0 <= tolerance < 1:
        facts = "It is a fraction of a gradient's norm, from 0 (equal numbers) to 1."
        raise SettingsError(
            f"--tolerance {tolerance:g} is out of range.", facts, str(line.flag("--tolerance", f"{TOLERANCE:g}"))
        )
    placements = [placement_of(text, line) for text in parallel] or list(fitting())
    script, threads, *_, report = checked(target, 1, replace(request, sets=(*request.sets, *ALONE.sets)), line)
    misfits = {}
    for placement in placements:
        if wrong := misfit(script, placement, request, line, report, inspect=bool(parallel)):
            misfits[str(placement)] = wrong
    if parallel and misfits:
        raise SettingsError.of([problem for wrong in misfits.values() for problem in wrong])
    with tempfile.TemporaryDirectory(prefix="unisono-prove-") as folder:
        proof = LayoutProof(
            script=script,
            threads=threads,
            steps=steps,
            tolerance=tolerance,
            request=request,
            line=line,
            folder=Path(folder),
            named=bool(parallel),
        )
        return proof.run(placements, misfits)


def misfit(
    script: Path,
    placement: LayoutSpec,
    request: RunRequest,
    line: CommandLine,
    report: ScriptReport | None,
    *,
    inspect: bool,
) -> list[Problem]:
    """Return what is wrong with a placement, as far as settings show it.

    Args:
        script: the script.
        placement: the placement.
        request: the flags of the trials.
        line: the typed command, for messages.
        report: the script's own report, if it was inspected.
        inspect: let the script check its own settings, too; otherwise its trial does.
    """
    request = replace(request, sets=(*request.sets, *placement.sets))
    typed = LayoutLine(line.words, placement)
    _, problems = check_settings(script, placement.processes, request, typed, report=report)
    if inspect and not problems:
        found = inspect_script(script, request, placement.processes, typed)
        problems = list(found.problems) if found is not None else []
    return problems


@dataclass
class LayoutRow:
    """The result of one placement. Errors are relative; None if they were not measured.

    Attributes:
        placement: the placement.
        processes: the number of processes.
        verdict: agrees, differs, fails or refused.
        loss, gradient, norm, weights: the largest relative errors.
        worst: the parameter with the largest gradient error.
        equal: whether everything is equal to the bit.
        bytes: memory by kind, on the process that has most.
        share: `bytes` divided by the expected part of one process's memory.
        stretches: the fraction of the parameters in each pipeline stage.
        seconds: the median time of a step, without the first.
        first: the first value that disagrees.
        error: its relative error.
        reason: why the placement fails or is refused.
    """

    placement: str
    processes: int
    verdict: str = "agrees"
    loss: float | None = None
    gradient: float | None = None
    worst: str = ""
    norm: float | None = None
    weights: float | None = None
    equal: bool | None = None
    bytes: dict[str, int] = field(default_factory=dict)
    share: dict[str, float] = field(default_factory=dict)
    stretches: list[float] = field(default_factory=list)
    seconds: float | None = None
    first: str = ""
    error: float | None = None
    reason: str = ""

    @property
    def uneven(self) -> str:
        """The fractions of the parameters in pipeline stages, if they are uneven; "" if they are not."""
        if not self.stretches or max(self.stretches) * len(self.stretches) <= UNEVEN:
            return ""
        *others, last = (f"{part:.0%}" for part in self.stretches)
        over = " (shared parameters count in each)" if sum(self.stretches) > 1 else ""
        return f"its stages hold {', '.join(others)} and {last} of the parameters{over}"

    def line(self, width: int) -> str:
        """Return the line of the table."""
        bits = {True: "equal", False: "differ", None: ""}[self.equal]
        memory = " + ".join(size(self.bytes[kind]) for kind in KINDS) if self.bytes else ""
        share = f"{max(self.share.values()):.2f}" if self.share else ""
        cells = [f"{self.placement:{width}}", f"{self.processes:5}", f"{self.verdict:8}"]
        cells += [f"{_short(e):>8}" for e in (self.loss, self.gradient, self.norm, self.weights)]
        cells += [f"{bits:6}", f"{memory:>24}", f"{share:>5}"]
        cells += [f"{self.seconds:8.3f}" if self.seconds is not None else f"{'':8}", self.worst]
        return "  ".join(cells).rstrip()


COLUMNS = {
    "procs": ">5",
    "verdict": "8",
    **dict.fromkeys(("loss", "gradient", "norm", "weights"), ">8"),
    "bits": "6",
    "memory: par + grad + opt": ">24",
    "share": ">5",
    "s a step": ">8",
}
"""Format of the columns between the placement and the name of the worst gradient."""


def header(width: int) -> str:
    """Return the header of the table."""
    return "  ".join([f"{'placement':{width}}", *(f"{name:{place}}" for name, place in COLUMNS.items()), "worst"])


def _short(error: float | None) -> str:
    return "" if error is None else "0" if error == 0 else f"{error:.0e}"


@dataclass(kw_only=True)
class LayoutProof(TrialRunner):
    """The trials of one comparison.

    Args:
        tolerance: the largest relative error of a gradient.
        named: whether the user named the placements, so that one that is refused is an error.

    Attributes:
        one: the result of one process, with which the others are compared.
        rows: the results of the placements.
        failed: the first placement that failed, and how its run ended; None: none did.
    """

    tolerance: float
    named: bool = True
    one: LayoutRow = field(default_factory=lambda: LayoutRow("one process", 1, ""))
    rows: list[LayoutRow] = field(default_factory=list)
    failed: tuple[LayoutRow, RunOutcome] | None = None

    def run(self, placements: Sequence[LayoutSpec], misfits: Mapping[str, Sequence[Problem]]) -> int:
        """Run all placements but those in `misfits`, which cannot be run, and return the exit status."""
        from unisono.cli.compare.tensor_diff import DumpFile, Limits, compare  # here, because it loads torch

        limits = Limits.of(self.tolerance)
        outcome = self._steps(ALONE, "truth")
        if outcome.stopped:
            return self._stopped(cause="stopped")
        if outcome.exit_status:
            message = self._baseline_fails(outcome)
            return self._leave(outcome.exit_status, failed={"placement": self.one.placement, "message": message})
        truth = self._truth()
        self.steps = len(truth.main["seconds"])  # the script may have fewer steps
        self._measured(self.one, truth, truth, ALONE)
        width = max(len(self.one.placement), *(len(str(placement)) for placement in placements))
        self._say(header(width))
        self._say(self.one.line(width))
        hint: Deviation | None = None
        for placement in placements:
            row = LayoutRow(str(placement), placement.processes)
            self.rows.append(row)
            if row.placement in misfits:
                row.verdict, row.reason = "refused", misfits[row.placement][0].facts
            else:
                outcome = self._steps(placement, "other")
                if outcome.stopped:
                    return self._stopped(cause="stopped")
                if outcome.exit_status:
                    self._fails(row, outcome)
                else:
                    other = DumpFile(self.recording("other"))
                    agreement = compare(other, truth, limits)
                    self._judge(self._measured(row, other, truth, placement), agreement)
                    hint = hint or agreement.first
            self._say(row.line(width))
        return self._end(truth, limits, hint, placements)

    def _steps(self, placement: LayoutSpec, name: str) -> RunOutcome:
        return self._run(Trial(name, placement.processes, placement.sets, recording="evidence:{steps}:{folder}"))

    def _truth(self) -> DumpFile:
        """Return the tensors of one process. Raises SettingsError if the script made too few steps."""
        from unisono.cli.compare.tensor_diff import DumpFile

        written = DumpFile(self.recording("truth"))
        if not written.ranks:
            facts = "It left its loop before the steps to compare."
            do = f"{self.line.flag('--steps', '1')}; and: for step in run.steps(train_set), in unisono.main's function"
            raise SettingsError(f"{self.script.name} made too few steps.", facts, do)
        return written

    def _measured(self, row: LayoutRow, dump: DumpFile, truth: DumpFile, placement: LayoutSpec) -> LayoutRow:
        for kind in KINDS:
            row.bytes[kind] = dump.bytes(kind)
            if whole := truth.bytes(kind) * placement.share(kind):
                over = (mine["bytes"][kind] / (whole * dump.part(i, truth, kind)) for i, mine in enumerate(dump.ranks))
                row.share[kind] = max(over)
        # the pipeline is the outermost axis of the mesh, so the processes of a stage have consecutive ranks
        stage = len(dump.ranks) // placement.axes.pipeline
        row.stretches = [dump.part(first, truth) for first in range(0, len(dump.ranks), stage)]
        seconds = sorted(dump.main["seconds"][1:] or dump.main["seconds"])  # the first step takes longer
        row.seconds = seconds[len(seconds) // 2]
        return row

    def _judge(self, row: LayoutRow, agreement: TensorAgreement) -> None:
        gradient, first = agreement.worst("gradient"), agreement.first
        row.loss, row.norm, row.weights = (
            found.error if (found := agreement.worst(kind)) is not None else None
            for kind in ("loss", "norm", "weights")
        )
        if gradient is not None:
            row.gradient, row.worst = gradient.error, str(gradient) * bool(gradient.error)
            row.worst = row.worst.removeprefix("the gradient of ")
        row.equal = agreement.equal
        if first is not None:
            row.verdict, row.first, row.error = "differs", str(first), first.error

    def _fails(self, row: LayoutRow, outcome: RunOutcome) -> None:
        """Record that a trial failed. If the user did not name the placement, and the library refused it, that is no
        failure: the model does not support the placement."""
        record = outcome.failure.record if outcome.failure is not None else None
        row.reason = (record.problems[0].facts if record.problems else record.message) if record is not None else ""
        if record is not None and record.problems and not self.named:
            row.verdict = "refused"
            return
        row.verdict = "fails"
        self.failed = self.failed or (row, outcome)

    # -- the report

    def _facts(self, status: int) -> dict[str, Any]:
        return {"agree": status == 0, "steps": self.steps}

    def _end(self, truth: DumpFile, limits: Limits, first: Deviation | None, placements: Sequence[LayoutSpec]) -> int:
        differs = next((row for row in self.rows if row.verdict == "differs"), None)
        refused = [row for row in self.rows if row.verdict == "refused"]
        agree = [row for row in self.rows if row.verdict == "agrees"]
        status = 1 if differs is not None or self.failed is not None else 0
        for row in refused:
            self._say(f"\n{row.placement} is refused: {row.reason}")
        for row in self.rows:
            if row.uneven:
                self._say(f"\n{row.placement} is uneven: {row.uneven}.")
        more: dict[str, Any] = {}
        self._say(f"\n{self._verdict(agree)}\nLimits: {limits}.")
        if differs is not None and first is not None:
            placement = placements[self.rows.index(differs)]
            advice = self._advice(placement, first, truth)
            self._say(
                f"\n{differs.placement} differs. First: {first}, with a relative error of {first.error:.2g}; "
                f"the limit is {first.limit:g}.\n{advice}"
            )
            more = {"first": {"placement": differs.placement, "what": str(first), **first._asdict()}, "advice": advice}
        if self.failed is not None:
            row, outcome = self.failed
            message, text = reason_of(outcome)
            status = outcome.exit_status or 1
            self._say(f"\n{row.placement} fails, but one process does not.\n\n{text}")
            more |= {"failed": {"placement": row.placement, "message": message}}
        rows = [asdict(row) for row in self.rows]
        return self._leave(status, limits=limits._asdict(), one=asdict(self.one), placements=rows, **more)

    def _verdict(self, agree: Sequence[LayoutRow]) -> str:
        exact = sum(bool(row.equal) for row in agree)
        compared = len(self.rows) - sum(row.verdict == "refused" for row in self.rows)
        bits = ", to the bit" if exact == len(agree) > 0 else f", {exact} of them to the bit" if exact else ""
        steps = plural(self.steps, "step")
        if len(agree) == compared:
            return f"{plural(compared, 'placement')} agree{'s' * (compared == 1)} with one process in {steps}{bits}."
        return f"{len(agree)} of {plural(compared, 'placement')} agree with one process in {steps}{bits}."

    def _advice(self, placement: LayoutSpec, first: Deviation, truth: DumpFile) -> str:
        """Return the likely cause, and what to type next."""
        dropout, exchange = truth.main["dropout"], self._settings("truth")["exchange"]
        shortest = self.line.without("--parallel").flag("--parallel", str(placement)).flag("--steps", "1")
        low = self._settings("truth").get("parallel.param_dtype", "fp32")
        if (other := placement.values.get("param_dtype", low)) != low:
            rest = {name: value for name, value in placement.values.items() if name != "param_dtype"}
            same = self.line.without("--parallel").flag("--parallel", str(LayoutSpec(rest or {"shard": "2"})))
            facts = f"param_dtype={other} changes the computation, on one process as well."
            return f"  {facts}\n  Next: {same.setting(f'parallel.param_dtype={other}')}"
        if placement.is_exact and exchange != "tree":
            facts = f"Under exchange={exchange} the order of additions depends on the number of processes."
            return f"  {facts}\n  Next: {self.line.setting('exchange=tree')}"
        if placement.is_exact:
            words = [word for each in self.request.sets for word in ("--set", each)]
            facts = "This placement changes no sum, so the script itself depends on the process."
            return f"  {facts}\n  Next: {CommandLine(('unisono', 'check', self.line.words[2], *words))}"
        if dropout:
            facts = (
                f"The model has dropout ({dropout}). Replicas and shards draw the same numbers as one process; where "
                "activations are divided, each process draws numbers for its own part."
            )
            return f"  {facts}\n  Next: {self.line.setting(*self._without_dropout())}"
        if low != "fp32" and self.tolerance < LOW_PRECISION_TOLERANCE:
            facts = f"Partial sums in {low} round differently, by some thousandths of a gradient."
            wider = self.line.without("--tolerance").flag("--tolerance", f"{LOW_PRECISION_TOLERANCE:g}")
            return f"  {facts}\n  Next: {wider}"
        if first.step > 0:
            facts = f"{plural(first.step, 'step')} before it agree, so rounding errors may have grown."
            return f"  {facts}\n  Next: {shortest}"
        return f"  Next: {shortest}"

    def _without_dropout(self) -> list[str]:
        """Return the settings that seem to be dropout rates, with the value 0."""
        settings = self._settings("truth").items()
        names = [n for n, value in settings if "drop" in n and isinstance(value, float) and value > 0]
        return [f"{name}={toml(0.0)}" for name in names] or ["DROPOUT=0"]
