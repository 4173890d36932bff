"""unisono replay: compute one step of a run again, on one process, and show its losses and samples."""

from __future__ import annotations

import json as json_
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from unisono.cli.compare.repeated_runs import Verification, reason_of
from unisono.cli.compare.rerun import Rerun, earlier
from unisono.cli.request.suggestions import WHOLE
from unisono.config import ENVIRONMENT, CommandLine, plural
from unisono.errors import SettingsError
from unisono.launcher import local_launch
from unisono.launcher.supervisor import RunOutcome
from unisono.monitor import timeline

SHOWN = 12
"""Samples of a micro-batch that the table lists; --json lists all."""


def replay(
    run_dir: Path,
    /,
    *,
    step: Annotated[int, WHOLE, Parameter(metavar="N")],
    virtual_rank: Annotated[int | None, WHOLE, Parameter(metavar="K", show_default=False)] = None,
    debug: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
    script: Annotated[Path | None, Parameter(metavar="FILE", show_default=False)] = None,
    json: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
) -> int:
    """Compute one step of a run again on one process, with the same bits, for any number of processes of the run.

    Training starts from the newest checkpoint before that step. Each micro-batch is listed with its samples and loss.

    Exit status 1: the step cannot be replayed, or its loss differs.

    Parameters
    ----------
    run_dir
        The run directory.
    step
        Number of the step, counted from 0. (The progress line counts from 1.)
    virtual_rank
        Compute only the part of this virtual rank.
    debug
        Stop in Python's debugger at the step's first micro-batch.
    script
        The script of the run, if it was moved.
    json
        Print everything as JSON.
    """
    line = CommandLine(("unisono", "replay", str(run_dir), "--step", str(step)))
    line = line.flag("--virtual-rank", str(virtual_rank)) if virtual_rank is not None else line
    line = line.flag("--debug") if debug else line
    again = earlier(run_dir, script, line)
    ranks, steps = int(again.settings["virtual_ranks"]), again.settings.get("steps")
    if step < 0 or (steps is not None and step >= steps):
        facts = f"The run has {plural(steps, 'step')}, 0 to {steps - 1}." if steps else "The first step is 0."
        raise SettingsError(
            f"There is no step {step}.", facts, str(line.flag("--step", str(max(min(step, (steps or 1) - 1), 0))))
        )
    if virtual_rank is not None and not 0 <= virtual_rank < ranks:
        facts = f"The run has {plural(ranks, 'virtual rank')}, 0 to {ranks - 1}."
        raise SettingsError(
            f"There is no virtual rank {virtual_rank}.", facts, str(line.flag("--virtual-rank", str(ranks - 1)))
        )
    if debug and json:
        error = "--debug cannot be combined with --json."
        raise SettingsError(error, "A debugger needs a terminal; --json is for programs.", str(line))
    with tempfile.TemporaryDirectory(prefix="unisono-replay-") as folder:
        return Replay(
            again=again,
            shown=run_dir,
            step=step,
            virtual_rank=virtual_rank,
            debug=debug,
            as_json=json,
            folder=Path(folder),
            line=line,
        ).run()


@dataclass(kw_only=True)
class Replay(Verification):
    """One replay.

    Attributes:
        again: how to run the script again.
        shown: the run directory as it was typed.
        step: the step.
        virtual_rank: the virtual rank to compute; None for all.
        debug: whether to stop in the debugger.
        after: the step of the checkpoint.
        lines: the recording of the step (train/diagnostics/replay_step.py).
        differences: properties of this machine that differ from those of the run.
    """

    again: Rerun
    shown: Path
    step: int
    virtual_rank: int | None
    debug: bool
    after: int = 0
    lines: list[dict[str, Any]] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)

    def run(self) -> int:
        """Replay the step, and return the exit status."""
        self.after, checkpoint = self.again.checkpoint(self.step)
        self._say(
            f"step {self.step} of {self.shown}, on one process, "
            + (f"from {checkpoint.name}" if checkpoint is not None else "from the beginning")
            + (f", after {plural(self.step - self.after, 'other step')}" if self.step > self.after else "")
        )
        recording, scratch = self.folder / "step.jsonl", self.folder / "run"
        alone = "" if self.virtual_rank is None else self.virtual_rank
        trace = f"replay:{self.step}:{alone}:{'debug' * self.debug}:{recording}"
        if self.debug:
            request = self.again.request(scratch, checkpoint, (), trace)
            return local_launch.alone(
                self.again.script,
                request.arguments(scratch),
                folder=self.again.folder,
                threads=int(self.again.settings["threads"]),
            )
        outcome = self.again.run(scratch, ranks=1, checkpoint=checkpoint, trace=trace)
        if recording.is_file():
            self.lines = [json_.loads(line) for line in recording.read_text(encoding="utf-8").splitlines()]
        if outcome.stopped:
            return 1
        before, now = self.again.environment(), self.again.environment(scratch)
        self.differences = [
            f"{name}: {now[name]} here, {before[name]} in the run"
            for name in ENVIRONMENT
            if name in before and name in now and before[name] != now[name]
        ]
        return self._report(outcome)

    def _report(self, outcome: RunOutcome) -> int:
        rows = [line for line in self.lines if line["kind"] == "micro-batch"]
        failed = reason_of(outcome) if outcome.failure is not None else None
        if not rows:
            text = failed[1] if failed else self._after_last_step()
            self._say(f"Step {self.step} cannot be replayed.\n\n{text}")
            return self._leave(1, error=failed[0] if failed else text)
        for text in _table(rows):
            self._say(text)
        whole = next((line for line in self.lines if line["kind"] == "pass"), None)
        norm = next((line["norm"] for line in self.lines if line["kind"] == "norm"), None)
        recorded = self._recorded()
        same = None if whole is None or recorded is None else whole["loss"] == recorded
        if whole is not None:
            text = f"loss {whole['loss']:.9g}" + (f", gradient norm {norm:.9g}" if norm is not None else "")
            text += "" if same is None else "; equal to the run's loss" if same else f"; the run's loss: {recorded:.9g}"
            self._say(f"\n{text}")
        for each in self.differences:
            self._say(f"Other bits are expected. {each}")
        if failed is not None:
            self._say(f"\nThe step raises an error, as in the run if it failed there:\n\n{failed[0]}")
        self._say(f"\nTo debug the step: {self.line.flag('--debug')}")
        status = int(same is False and not self.differences)
        more = {"loss": whole and whole["loss"], "norm": norm, "recorded_loss": recorded, "same": same}
        return self._leave(status, error=failed[0] if failed else None, **more)

    def _after_last_step(self) -> str:
        """Return the message for a run that ends before the step."""
        result = self.folder / "run" / "result.json"
        steps = int(json_.loads(result.read_text(encoding="utf-8"))["steps"]) if result.is_file() else 0
        if not steps:
            return f"The run ends before step {self.step}."
        return f"The last step of the run is {steps - 1}.\n  Next: {self.line.flag('--step', str(steps - 1))}"

    def _recorded(self) -> float | None:
        """Return the loss of this step in the run's timeline; None if the timeline does not have it."""
        found = None
        path = self.again.run_dir
        assert path is not None
        file = path / "timeline" / "rank-0.jsonl"
        for entry in timeline.read(file) if file.is_file() else ():
            if entry.get("step") == self.step and "loss" in entry and "seconds" in entry:
                found = float(entry["loss"])
        return found

    def _facts(self, status: int) -> dict[str, Any]:
        step = next((line for line in self.lines if line["kind"] == "step"), {})
        rows = [line for line in self.lines if line["kind"] == "micro-batch"]
        return {
            "run": str(self.shown),
            "step": self.step,
            "epoch": step.get("epoch"),
            "samples": step.get("samples"),
            "from_step": self.after,
            "micro_batches": [{key: value for key, value in row.items() if key != "kind"} for row in rows],
            "unlike": self.differences,
        }


def _table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each micro-batch. The column `pass` is there only if there are several."""
    passes = len({row["walk"] for row in rows}) > 1
    lines = [f"{'pass  ' * passes}virtual rank  micro-batch          loss          norm    weight  samples"]
    for row in rows:
        names = ", ".join(map(str, row["samples"][:SHOWN]))
        names += f", ... {len(row['samples'])} in total" if len(row["samples"]) > SHOWN else ""
        bad = f"  not finite: the gradient of {row['bad'][0]}" if row["bad"] else ""
        more = f" and {len(row['bad']) - 1} others" if len(row["bad"]) > 1 else ""
        number = f"{row['walk']:4}  "
        lines.append(
            f"{number * passes}{row['virtual_rank']:12}  {row['number']:11}  "
            f"{row['loss']:12.6g}  {row['norm']:12.6g}  {row['weight']:8g}  {names}{bad}{more}"
        )
    return lines
