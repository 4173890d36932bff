"""The trials of `unisono plan`, and the prediction that follows from them.

fake        a step of fake tensors: the memory of a micro-batch, whatever the size of the model
count       the same with real tensors, where the script cannot compute with fake ones
measure     some steps on one process: time, and its peak of memory
links       collectives between 2, 4, ... processes, at the size of the model
virtual     (--virtual-ranks) the same batch with 1, 2, 4, ..., 32 virtual ranks

Counting and measuring run twice if activations can be recomputed: as the script is, and with recomputation.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from unisono.cli.benchmark import pair_rounds
from unisono.cli.compare.layout_spec import ALONE
from unisono.cli.compare.repeated_runs import reason_of
from unisono.cli.compare.trial_runner import Trial, TrialRunner
from unisono.cli.planning.plan_table import PlanTable
from unisono.cli.speedup.speed_trials import QUIET, UNCHECKED
from unisono.config import CommandLine, size
from unisono.costs.candidates import Candidate, Placement, candidate, counts_up_to, placements
from unisono.costs.recorded_costs import RecordedCosts, costs_of, without_steps
from unisono.costs.time_model import Machine, MeasuredLinks
from unisono.errors import SettingsError
from unisono.launcher.supervisor import RunOutcome
from unisono.machine.control_group import ControlGroup
from unisono.machine.kernel_files import KernelFiles

RECOMPUTE = "parallel.activation_checkpoint"
COLLECTIVES = ("tree", "all_gather", "reduce_scatter")
PROCESS = 350_000_000
"""Bytes of a process with Python and torch, where no process was measured."""

VIRTUAL_RANKS = (1, 2, 4, 8, 16, 32)


class StoppedPlanError(Exception):
    """The user stopped a trial."""


@dataclass(kw_only=True)
class PlanTrials(TrialRunner):
    """The trials of one plan.

    Args:
        ranks: The largest number of processes; None: one for each core.
        limit: The bytes that a process may use; None: its part of this machine.
        compares_virtual_ranks: Whether other numbers of virtual ranks are measured.
        run_line: The command that trains, without a placement.
    """

    ranks: int | None
    limit: int | None
    compares_virtual_ranks: bool
    run_line: CommandLine
    notes: list[str] = field(default_factory=list)

    def run(self) -> int:
        """Run the trials, print the plan, and return the exit status."""
        try:
            plain = self._costs("plain", ())
            if plain is None:
                return self._leave(1, message=self.notes[-1])
            again = self._recomputing(plain)
            most = self._most(plain)
            counts = counts_up_to(most)
            virtual_ranks = self._by_virtual_ranks(plain) if self.compares_virtual_ranks else {}
            more = [most + 1] if most < len(plain.micro_batches) else []
            links = {n: self._links(n, plain) for n in [*counts, *more] if n > 1 and plain.round_seconds is not None}
        except (StoppedPlanError, KeyboardInterrupt):
            return self._stopped()
        machine = Machine(_cores(), links)
        by_setting = {False: plain, True: again}
        found = [
            candidate(placement, costs, machine)
            for placement in placements(most, recompute=again is not None)
            if (costs := by_setting[placement.recompute]) is not None
        ]
        one_more = candidate(Placement(most + 1), plain, machine) if more else None
        limits = {n: self._limit(n) for n in counts}
        self._refuse_small_memory(plain, found, limits)
        return self._report(plain, found, limits, one_more, virtual_ranks)

    # -- trials

    def _trial(self, name: str, sets: tuple[str, ...], recording: str) -> RunOutcome:
        outcome = self._run(Trial(name, 1, (*QUIET, *UNCHECKED, *ALONE.sets, *sets), {}, recording))
        if outcome.stopped:
            raise StoppedPlanError
        return outcome

    def _costs(self, name: str, sets: tuple[str, ...]) -> RecordedCosts | None:
        """Return what a step takes with some settings; None: the script fails, as the last note says."""
        self._trial(f"fake {name}", sets, "fake:{folder}")
        parts = self._record(f"fake {name}", "parts.json")
        if parts is None or "failed" in parts:
            why = parts["failed"] if parts is not None else "the script ends before its loop"
            self._note(f"The step cannot be computed with fake tensors ({why}), so real ones were counted.")
            parts = None
        elif (need := _need(parts)) > psutil.virtual_memory().available:
            self._note(f"The script needs {size(need)} on one process, so no step was computed on this machine.")
            return without_steps(parts, PROCESS)
        outcome = self._trial(name, sets, "costs:{steps}:{folder}")
        if outcome.exit_status:
            self._note(self._baseline_fails(outcome) if name == "plain" else reason_of(outcome)[0])
            return None
        timed = self._record(name, "rank-0.json")
        if timed is None or not timed["steps"]:
            facts = "It left its loop before the first update."
            do = "for step in run.steps(train_set), in the function that is passed to unisono.main"
            raise SettingsError(f"{self.script.name} made no step.", facts, do)
        if parts is None:
            self._trial(f"count {name}", sets, "parts:{folder}")
            parts = self._record(f"count {name}", "parts.json")
            if parts is None or "first" not in parts:
                self._note("The memory of a micro-batch could not be counted. Memory is not predicted.")
                parts = None
        return costs_of(timed, parts)

    def _recomputing(self, plain: RecordedCosts) -> RecordedCosts | None:
        """Return what a step takes if activations are recomputed; None: this changes nothing, or is set already."""
        if plain.peak and self._settings("plain").get(RECOMPUTE, "none") != "none":
            return None
        found = self._costs("recompute", (f"{RECOMPUTE}=full",))
        if found is None:
            self._note(f"{RECOMPUTE}=full is not possible: {self.notes.pop()}")
        if found is None or found.rounds is None or plain.rounds is None:
            return None
        return found if found.rounds.activations < plain.rounds.activations else None

    def _record(self, name: str, file: str) -> dict[str, Any] | None:
        path = self.recording(name) / file
        found: dict[str, Any] | None = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
        return found

    def _links(self, count: int, costs: RecordedCosts) -> MeasuredLinks:
        """Measure collectives between some processes, at the size of the model."""
        file = self.folder / f"links-{count}.jsonl"
        sizes = sorted({max(costs.state.gradients, 4), max(costs.state.parameters, 4)})
        wanted = json.dumps({"names": COLLECTIVES, "sizes": sizes})
        script = Path(pair_rounds.__file__).with_name("measure.py")
        outcome = self._start(script, [str(file), wanted], self.folder / f"links-{count}", ranks=count, threads=1)
        if outcome.stopped:
            raise StoppedPlanError
        lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
        found = {
            (row["collective"], row["bytes"]): float(row["seconds"]) for row in map(json.loads, lines) if "bytes" in row
        }
        return MeasuredLinks(
            exchange=found.get(("tree", sizes[0]), 0.0),
            gather=found.get(("all_gather", sizes[-1]), 0.0),
            scatter=found.get(("reduce_scatter", sizes[0]), 0.0),
        )

    def _by_virtual_ranks(self, plain: RecordedCosts) -> dict[int, float]:
        """Return the seconds of a step of the same batch, by the number of virtual ranks."""
        found = {}
        for count in VIRTUAL_RANKS:
            if count > plain.samples:
                break
            outcome = self._trial(f"virtual {count}", (f"virtual_ranks={count}",), "costs:{steps}:{folder}")
            timed = self._record(f"virtual {count}", "rank-0.json")
            if not outcome.exit_status and timed is not None and timed["steps"]:
                seconds = costs_of(timed, None).step_seconds
                assert seconds is not None
                found[count] = seconds
        return found

    # -- limits

    def _most(self, plain: RecordedCosts) -> int:
        return self.ranks if self.ranks is not None else max(1, min(_cores(), len(plain.micro_batches)))

    def _limit(self, count: int) -> int:
        """Return the bytes that one of `count` processes may use."""
        return self.limit if self.limit is not None else _memory() // count

    def _refuse_small_memory(self, plain: RecordedCosts, found: list[Candidate], limits: Mapping[int, int]) -> None:
        """Raise SettingsError if --memory is less than any placement needs."""
        if self.limit is None or any(each.fits(limits[each.placement.processes]) for each in found):
            return
        known = [each for each in found if each.memory is not None]
        least = min(known, key=lambda each: each.memory.total if each.memory is not None else 0)
        assert least.memory is not None
        facts = (
            f"The least that a process needs is {size(least.memory.total)} ({least.placement}). Parameters take "
            f"{size(plain.state.parameters)}, and the process itself {size(least.memory.process)}."
        )
        do = self.line.flag("--memory", size(least.memory.total * 1.1).replace(" ", ""))
        raise SettingsError(f"No placement fits in --memory {size(self.limit)}.", facts, str(do))

    # -- the report

    def _note(self, text: str) -> None:
        self.notes.append(text)

    def _facts(self, status: int) -> dict[str, Any]:
        return {"steps": self.steps, "notes": self.notes}

    def _report(
        self,
        plain: RecordedCosts,
        found: list[Candidate],
        limits: Mapping[int, int],
        one_more: Candidate | None,
        virtual_ranks: Mapping[int, float],
    ) -> int:
        table = PlanTable(plain, found, limits, self.run_line, one_more, virtual_ranks)
        for text in table.lines():
            self._say(text)
        for note in self.notes:
            self._say(note)
        first = table.first
        if first is None:
            self._say("No placement fits.")
            return self._leave(1, **table.as_json())
        self._say(f"  Next: {table.line_of(first)}")
        return self._leave(0, **table.as_json(), next=str(table.line_of(first)))


def _need(parts: Mapping[str, Any]) -> int:
    """Return the bytes of one process that a step of fake tensors found."""
    state = parts["state"]
    kept = sum(state[name] for name in ("parameters", "buffers", "optimizer", "gradients"))
    return int(kept + parts["first"])


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _memory() -> int:
    """Return the memory of this machine, or of the control group that this process is in."""
    limit = ControlGroup(KernelFiles()).memory
    total = int(psutil.virtual_memory().total)
    return min(total, limit) if limit is not None else total
