"""unisono replay: compute one step of a run again, on one process, and look at it."""

from __future__ import annotations

import json as json_
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from unisono.cli.compare.rerun import Rerun, earlier
from unisono.cli.compare.trial_runner import reason_of
from unisono.cli.request.suggestions import WHOLE
from unisono.config import ENVIRONMENT, CommandLine, plural
from unisono.errors import SettingsError
from unisono.launcher import local_launch
from unisono.launcher.supervisor import RunOutcome
from unisono.monitor import timeline

SHOWN = 12
"""Samples of a micro-batch that the table names; --json names all."""


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
    """Compute one step of a run again, on one process: the same bits, whatever the job was.

    It begins with the newest checkpoint before that step, and makes the steps up to it. Loss, gradient norm and samples
    of every micro-batch are told. The run's directory is only read. Exit status 1: it cannot be replayed, or not as it
    was.

    Parameters
    ----------
    run_dir
        The directory of the run.
    step
        Its number, from 0, as messages and timelines have it.
    virtual_rank
        Compute only this one's part of the step.
    debug
        Stop in Python's debugger when the loop gets the step's first micro-batch.
    script
        The run's script, if it is no longer where it was.
    json
        Print all of it as JSON.
    """
    line = CommandLine(("unisono", "replay", str(run_dir), "--step", str(step)))
    line = line.flag("--virtual-rank", str(virtual_rank)) if virtual_rank is not None else line
    line = line.flag("--debug") if debug else line
    again = earlier(run_dir, script, line)
    ranks, steps = int(again.settings["virtual_ranks"]), again.settings.get("steps")
    if step < 0 or (steps is not None and step >= steps):
        true = f"The run has {plural(steps, 'step')}, 0 to {steps - 1}." if steps else "Its first step is 0."
        raise SettingsError(str(line), true, str(line.flag("--step", str(max(min(step, (steps or 1) - 1), 0)))))
    if virtual_rank is not None and not 0 <= virtual_rank < ranks:
        true = f"The run has {plural(ranks, 'virtual rank')}, 0 to {ranks - 1}."
        raise SettingsError(str(line), true, str(line.flag("--virtual-rank", str(ranks - 1))))
    if debug and json:
        raise SettingsError(f"{line} --json", "A debugger is for people, and --json for programs.", str(line))
    with tempfile.TemporaryDirectory(prefix="unisono-replay-") as folder:
        return Replay(again, run_dir, step, virtual_rank, debug, json, Path(folder), line).run()


@dataclass
class Replay:
    """One replay; `shown` is the run's directory as it was typed."""

    again: Rerun
    shown: Path
    step: int
    virtual_rank: int | None
    debug: bool
    json: bool
    folder: Path
    line: CommandLine
    lines: list[dict[str, Any]] = field(default_factory=list)
    """What the replayed step has told (train/diagnostics/replay_step.py)."""

    def run(self) -> int:
        after, checkpoint = self.again.checkpoint(self.step)
        self._say(
            f"step {self.step} of {self.shown}, on one process, "
            + (f"from {checkpoint.name}" if checkpoint is not None else "from the beginning")
            + (f", with {plural(self.step - after, 'step')} on the way" if self.step > after else "")
        )
        told, scratch = self.folder / "told.jsonl", self.folder / "run"
        alone = "" if self.virtual_rank is None else self.virtual_rank
        trace = f"replay:{self.step}:{alone}:{'debug' * self.debug}:{told}"
        if self.debug:
            request = self.again.request(scratch, checkpoint, (), trace)
            return local_launch.alone(
                self.again.script,
                request.arguments(scratch),
                folder=self.again.folder,
                threads=int(self.again.settings["threads"]),
            )
        outcome = self.again.run(scratch, ranks=1, checkpoint=checkpoint, trace=trace)
        if told.is_file():
            self.lines = [json_.loads(line) for line in told.read_text(encoding="utf-8").splitlines()]
        if outcome.stopped:
            return 1
        return self._tell(outcome, after, self._unlike(scratch))

    def _unlike(self, scratch: Path) -> list[str]:
        """What this machine has otherwise than the run's, of all that bits depend on."""
        before, now = self.again.environment(), self.again.environment(scratch)
        return [f"{name}: {now[name]} here, {before[name]} there" for name in ENVIRONMENT if _other(name, before, now)]

    def _tell(self, outcome: RunOutcome, after: int, unlike: Sequence[str]) -> int:
        rows = [line for line in self.lines if line["kind"] == "micro-batch"]
        failed = reason_of(outcome) if outcome.failure is not None else None
        if not rows:
            text = failed[1] if failed else self._too_late()
            self._say(f"It cannot be replayed.\n\n{text}")
            return self._leave(1, after, rows, unlike, error=failed[0] if failed else text)
        for text in _table(rows):
            self._say(text)
        whole = next((line for line in self.lines if line["kind"] == "pass"), None)
        norm = next((line["norm"] for line in self.lines if line["kind"] == "norm"), None)
        recorded = self._recorded()
        same = None if whole is None or recorded is None else whole["loss"] == recorded
        if whole is not None:
            said = f"loss {whole['loss']:.9g}" + (f", gradient norm {norm:.9g}" if norm is not None else "")
            said += "" if same is None else "; the run had the same" if same else f"; the run had {recorded:.9g}"
            self._say(f"\n{said}")
        for each in unlike:
            self._say(f"other bits are to be expected: {each}")
        if failed is not None:
            self._say(f"\nThe step ends in an error, as it should if the run's did:\n\n{failed[0]}")
        self._say(f"\nTo look at it from inside: {self.line.flag('--debug')}")
        status = int(same is False and not unlike)
        more = {"loss": whole and whole["loss"], "norm": norm, "recorded_loss": recorded, "same": same}
        return self._leave(status, after, rows, unlike, error=failed[0] if failed else None, **more)

    def _too_late(self) -> str:
        """The run's loop is over before that step."""
        result = self.folder / "run" / "result.json"
        steps = int(json_.loads(result.read_text(encoding="utf-8"))["steps"]) if result.is_file() else 0
        if not steps:
            return f"The run ends before step {self.step}."
        return f"Its last step is {steps - 1}.\n  Next: {self.line.flag('--step', str(steps - 1))}"

    def _recorded(self) -> float | None:
        """The loss of this step as the run wrote it down; None: it shared a line with others, or was never over."""
        found = None
        path = self.again.run_dir
        assert path is not None
        file = path / "timeline" / "rank-0.jsonl"
        for entry in timeline.read(file) if file.is_file() else ():
            if entry.get("step") == self.step and "loss" in entry:
                found = float(entry["loss"])
        return found

    def _say(self, text: str) -> None:
        if not self.json:
            print(text, flush=True)

    def _leave(
        self, status: int, after: int, rows: Sequence[dict[str, Any]], unlike: Sequence[str], **more: Any
    ) -> int:
        if self.json:
            step = next((line for line in self.lines if line["kind"] == "step"), {})
            told = {
                "run": str(self.shown),
                "step": self.step,
                "epoch": step.get("epoch"),
                "samples": step.get("samples"),
                "from_step": after,
                "micro_batches": [{key: value for key, value in row.items() if key != "kind"} for row in rows],
                "unlike": list(unlike),
                **more,
            }
            print(json_.dumps(json_.loads(json_.dumps(told), parse_constant=str)))  # JSON has no word for NaN
        return status


def _other(name: str, before: dict[str, Any], now: dict[str, Any]) -> bool:
    return name in before and name in now and before[name] != now[name]


def _table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The micro-batches, a line each; `pass` only where there are several."""
    passes = len({row["walk"] for row in rows}) > 1
    lines = [f"{'pass  ' * passes}virtual rank  micro-batch          loss          norm    weight  samples"]
    for row in rows:
        names = ", ".join(map(str, row["samples"][:SHOWN]))
        names += f", ... {len(row['samples'])} in all" if len(row["samples"]) > SHOWN else ""
        bad = f"  not finite: the gradient of {row['bad'][0]}" if row["bad"] else ""
        more = f" and {len(row['bad']) - 1} others" if len(row["bad"]) > 1 else ""
        number = f"{row['walk']:4}  "
        lines.append(
            f"{number * passes}{row['virtual_rank']:12}  {row['number']:11}  "
            f"{row['loss']:12.6g}  {row['norm']:12.6g}  {row['weight']:8g}  {names}{bad}{more}"
        )
    return lines
