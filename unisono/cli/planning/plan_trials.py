"""The trials of `unisono plan`, and the prediction that follows from them.

fake        a step of fake tensors: the memory of a micro-batch, whatever the size of the model
count       the same with real tensors, where the script cannot compute with fake ones
measure     some steps on one process: time, and its peak of memory
together    some steps of each placement on 2, 4, ... processes, and of those on 2 with recomputation
again       (--trials) the same with the placements that are close to the quickest, in turns
virtual     (--virtual-ranks) the same batch with 1, 2, 4, ..., 32 virtual ranks

Counting and measuring run twice if activations can be recomputed: as the script is, and with recomputation. Trials that
time steps are repeated if other programs disturb them (calm_trials.py).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from unisono.cli.compare.layout_spec import ALONE, LayoutSpec
from unisono.cli.compare.repeated_runs import reason_of
from unisono.cli.compare.trial_runner import Trial, TrialRunner
from unisono.cli.planning.calm_trials import CalmTrials
from unisono.cli.planning.device_rows import device_entries, device_lines, small_devices
from unisono.cli.planning.plan_table import PlanTable, line_of
from unisono.cli.speedup.speed_trials import QUIET, UNCHECKED
from unisono.config import CommandLine, size
from unisono.costs.candidates import ranked
from unisono.costs.device_costs import DeviceOffer, offers_of
from unisono.costs.device_table import HERE, Device
from unisono.costs.memory_model import RECOMPUTED, memory_of
from unisono.costs.placement_trials import PlacementTrial, PlacementTrials
from unisono.costs.placements import Placement, counts_up_to, placements
from unisono.costs.recorded_costs import RecordedCosts, costs_of, step_seconds, without_steps
from unisono.costs.time_model import rounds_of_busiest
from unisono.errors import SettingsError
from unisono.launcher.supervisor import RunOutcome
from unisono.machine.control_group import memory_of_host
from unisono.machine.host_load import usable_cores
from unisono.machine.kernel_files import KernelFiles

RECOMPUTE = "parallel.activation_checkpoint"
PROCESS = 350_000_000
"""Bytes of a process with Python and torch, where no process was measured."""

VIRTUAL_RANKS = (1, 2, 4, 8, 16, 32)

MOST_AGAIN = 8
"""The most short runs that each of --trials adds to a plan."""


class StoppedPlanError(Exception):
    """The user stopped a trial."""


@dataclass(kw_only=True)
class PlanTrials(TrialRunner):
    """The trials of one plan.

    Args:
        ranks: The largest number of processes; None: one for each core.
        limit: The bytes that a process may use; None: its part of this machine.
        compares_virtual_ranks: Whether other numbers of virtual ranks are measured.
        offloads: Whether placements with parallel.offload are planned, too.
        trials: How often the placements that are close to the quickest are measured.
        devices: The devices to compare; []: this machine alone.
        run_line: The command that trains, without a placement.

    Attributes:
        notes: Sentences about what could not be measured.
    """

    ranks: int | None
    limit: int | None
    compares_virtual_ranks: bool
    offloads: bool
    trials: int
    devices: Sequence[Device]
    run_line: CommandLine
    notes: list[str] = field(default_factory=list)
    _shards: bool = True
    _calm: CalmTrials = field(default_factory=lambda: CalmTrials(os.cpu_count() or 1))

    def run(self) -> int:
        """Run the trials, print the plan, and return the exit status."""
        try:
            plain = self._costs("plain", ())
            if plain is None:
                return self._leave(1, message=self.notes[-1])
            again = self._recomputing(plain)
            table = self._table(plain, again) if self._is_here else None
        except (StoppedPlanError, KeyboardInterrupt):
            return self._stopped()
        offers = [offer for device in self.devices for offer in self._offers(device, plain, again, table)]
        self.notes += [*small_devices(self.devices, plain, again, offers), *self._calm.notes()]
        return self._report(table, offers)

    @property
    def _is_here(self) -> bool:
        """Whether placements on this machine are planned."""
        return not self.devices or any(device.name == HERE for device in self.devices)

    @property
    def _is_timed(self) -> bool:
        """Whether steps are computed. Devices with a rate need only counts."""
        return self._is_here or any(device.speed for device in self.devices)

    def _table(self, plain: RecordedCosts, again: RecordedCosts | None) -> PlanTable:
        """Plan placements on this machine."""
        most = self._most(plain)
        virtual_ranks = self._by_virtual_ranks(plain) if self.compares_virtual_ranks else {}
        more = [most + 1] if most < len(plain.micro_batches) else []
        recomputed = RECOMPUTED if again is not None and most > 1 else ()
        wanted = [*placements(most, recompute=False, offload=self.offloads), *recomputed, *map(Placement, more)]
        limits = {n: self._limit(n) for n in counts_up_to(most)}
        trials = PlacementTrials(plain, again, len(usable_cores()))
        self._measure(trials, wanted)
        listed = list(placements(most, shards=self._shards, recompute=again is not None, offload=self.offloads))
        self._measure_again(trials, listed, limits)
        self.notes += trials.notes()
        found = [trials.candidate(placement) for placement in listed]
        one_more = trials.candidate(Placement(more[0])) if more else None
        table = PlanTable(plain, found, limits, self.run_line, one_more, virtual_ranks)
        if self.limit is not None:
            table.refuse_small_memory(self.limit, self.line, self.notes)
        return table

    def _offers(
        self, device: Device, plain: RecordedCosts, again: RecordedCosts | None, table: PlanTable | None
    ) -> list[DeviceOffer]:
        """Return the placements that fit on a kind of device, quickest first."""
        if device.name != HERE or table is None:
            return offers_of(device, plain, again)
        here = {n: replace(device, memory=limit) for n, limit in table.limits.items()}
        return [
            DeviceOffer(here[each.placement.processes], each, plain.total_steps, estimated=False)
            for each in table.fitting
        ]

    # -- trials

    def _start(self, script: Path, arguments: Sequence[str], run_dir: Path, **more: Any) -> RunOutcome:
        """Start a trial as `unisono run` starts a run: processes that can survive a death keep more in memory."""
        return super()._start(script, arguments, run_dir, minimum=1, **more)

    def _trial(self, name: str, sets: tuple[str, ...], recording: str, layout: LayoutSpec = ALONE) -> RunOutcome:
        found = (*QUIET, *UNCHECKED, *layout.sets, *sets)
        outcome = self._run(Trial(name, layout.processes, found, {}, recording))
        if outcome.stopped:
            raise StoppedPlanError
        return outcome

    def _timed(
        self, name: str, sets: tuple[str, ...], layout: LayoutSpec = ALONE
    ) -> tuple[RunOutcome, list[dict[str, Any]]]:
        """Run a trial that times steps, again while other programs disturb it. Return the records of its processes."""

        def run() -> tuple[RunOutcome, list[dict[str, Any]]]:
            outcome = self._trial(name, sets, "costs:{steps}:{folder}", layout)
            found = [self._record(name, f"rank-{rank}.json") for rank in range(layout.processes)]
            return outcome, [rank for rank in found if rank]

        return self._calm.calmest(run, lambda found: found[1])

    def _costs(self, name: str, sets: tuple[str, ...]) -> RecordedCosts | None:
        """Return what a step takes with some settings; None: the script fails, as the last note says."""
        self._trial(f"fake {name}", sets, "fake:{folder}")
        parts = self._record(f"fake {name}", "parts.json")
        if parts is None or "failed" in parts:
            why = parts["failed"] if parts is not None else "the script ends before its loop"
            self.notes.append(f"The step cannot be computed with fake tensors ({why}), so real ones were counted.")
            parts = None
        elif (need := _need(parts)) > _available():
            self.notes.append(f"The script needs {size(need)} on one process, so no step was computed on this machine.")
            return without_steps(parts, PROCESS)
        if parts is not None and not self._is_timed:
            return without_steps(parts, PROCESS)
        outcome, ranks = self._timed(name, sets)
        if outcome.exit_status:
            self.notes.append(self._baseline_fails(outcome) if name == "plain" else reason_of(outcome)[0])
            return None
        if not ranks or not ranks[0]["steps"]:
            facts = "It left its loop before the first update."
            do = "for step in run.steps(train_set), in the function that is passed to unisono.main"
            raise SettingsError(f"{self.script.name} made no step.", facts, do)
        if parts is None:
            self._trial(f"count {name}", sets, "parts:{folder}")
            parts = self._record(f"count {name}", "parts.json")
            if parts is None or "first" not in parts:
                self.notes.append("The memory of a micro-batch could not be counted. Memory is not predicted.")
                parts = None
        return costs_of(ranks[0], parts)

    def _recomputing(self, plain: RecordedCosts) -> RecordedCosts | None:
        """Return what a step takes if activations are recomputed; None: this changes nothing, as a note says."""
        if plain.recompute != "none":
            self.notes.append(f"All placements recompute activations: the script has {RECOMPUTE}={plain.recompute}.")
            return None
        found = self._costs("recompute", (f"{RECOMPUTE}=full",))
        if found is None:
            self.notes.append(f"{RECOMPUTE}=full is not possible: {self.notes.pop()}")
            return None
        if found.rounds is None or plain.rounds is None:
            self.notes.append(f"{RECOMPUTE}=full is not compared, because the activations could not be counted.")
            return None
        before, after = plain.rounds.activations, found.rounds.activations
        if after >= before:
            layers = "" if plain.rounds.layers.keys() - {""} else ": no layers of the model were found"
            words = f"a micro-batch keeps {size(after)} of activations with it and {size(before)} without{layers}"
            self.notes.append(f"{RECOMPUTE}=full is left out, because it saves no memory here ({words}).")
            return None
        return found

    def _record(self, name: str, file: str) -> dict[str, Any] | None:
        path = self.recording(name) / file
        found: dict[str, Any] | None = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
        return found

    def _measure(self, trials: PlacementTrials, wanted: Iterable[Placement]) -> None:
        """Measure placements on several processes, once each."""
        if trials.plain.seconds is None:
            return
        for placement in (each for each in wanted if each.processes > 1):
            if self._shards or placement.shards == 1:
                trials.add(placement, self._measured(placement, trials.plain))

    def _measure_again(self, trials: PlacementTrials, listed: Sequence[Placement], limits: Mapping[int, int]) -> None:
        """Measure the placements that are close to the quickest again, in turns."""
        left = MOST_AGAIN * self.trials
        while turn := trials.turn(ranked([trials.candidate(each) for each in listed], limits), self.trials)[:left]:
            for placement in turn:
                trials.add(placement, self._measured(placement, trials.plain))
            left -= len(turn)

    def _measured(self, placement: Placement, plain: RecordedCosts) -> PlacementTrial | None:
        """Return what steps of a placement took; None: it does not fit this machine, or fails."""
        count, layout = placement.processes, LayoutSpec(placement.layout)
        if plain.rounds is not None and (need := count * memory_of(plain, placement).total) > _available():
            self.notes.append(f"{count} processes need {size(need)} ({layout}), so no step of them was computed.")
            return None
        name = str(placement)
        sets = (f"{RECOMPUTE}=full",) if placement.recompute else ()
        outcome, ranks = self._timed(name, sets, layout)
        if outcome.exit_status:
            self.notes.append(f"parallel.{layout} is not possible: {first_line(reason_of(outcome)[0])}")
            self._shards = self._shards and placement.shards == 1
            return None
        if len(ranks) < count or len({len(rank["steps"]) for rank in ranks}) > 1:
            self.notes.append(f"A process of {count} died ({layout}), so their time is not known.")
            return None
        seconds = step_seconds(ranks, rounds_of_busiest(plain.micro_batches, placement))
        return PlacementTrial(seconds, max(rank["memory"]["peak"] for rank in ranks))

    def _by_virtual_ranks(self, plain: RecordedCosts) -> dict[int, float]:
        """Return the seconds of a step of the same batch, by the number of virtual ranks."""
        found = {}
        for count in VIRTUAL_RANKS:
            if count > plain.samples:
                break
            outcome, ranks = self._timed(f"virtual {count}", (f"virtual_ranks={count}",))
            if not outcome.exit_status and ranks and ranks[0]["steps"]:
                seconds = costs_of(ranks[0], None).step_seconds
                assert seconds is not None
                found[count] = seconds
        return found

    # -- limits

    def _most(self, plain: RecordedCosts) -> int:
        return self.ranks if self.ranks is not None else max(1, min(len(usable_cores()), len(plain.micro_batches)))

    def _limit(self, count: int) -> int:
        """Return the bytes that one of `count` processes may use."""
        return self.limit if self.limit is not None else _memory() // count

    # -- the report

    def _facts(self, status: int) -> dict[str, Any]:
        return {"steps": self.steps, "notes": self.notes}

    def _report(self, table: PlanTable | None, offers: list[DeviceOffer]) -> int:
        for text in table.lines() if table is not None else ():
            self._say(text)
        for text in device_lines(offers, self._line_of):
            self._say(text)
        for note in self.notes:
            self._say(note)
        more = table.as_json() if table is not None else {}
        more |= {"devices": device_entries(self.devices, offers, self._line_of)} if self.devices else {}
        timed = [each for each in offers if each.seconds is not None] or offers
        quickest = min(timed, key=lambda each: each.seconds or 0.0, default=None)
        first = table.first if table is not None else None
        if first is None and quickest is None:
            self._say("No placement fits.")
            return self._leave(1, **more)
        if first is not None and table is not None:
            do = table.line_of(first)
        else:
            assert quickest is not None
            do = self._line_of(quickest)
        self._say(f"  Next: {do}")
        return self._leave(0, **more, next=str(do))

    def _line_of(self, offer: DeviceOffer) -> CommandLine:
        """Return the command that trains with a placement."""
        return line_of(self.run_line, offer.candidate.placement)


def first_line(text: str) -> str:
    """Return the first line of a message."""
    return next(iter(text.strip().splitlines()), "")


def _need(parts: Mapping[str, Any]) -> int:
    """Return the bytes of one process that a step of fake tensors found."""
    state = parts["state"]
    kept = sum(state[name] for name in ("parameters", "buffers", "optimizer", "gradients"))
    return int(PROCESS + kept + parts["first"])


def _memory() -> int:
    """Return the memory of this machine, or of the control group that this process is in."""
    return memory_of_host(KernelFiles()) or int(psutil.virtual_memory().total)


def _available() -> int:
    """Return the bytes of memory that trials may use."""
    return min(_memory(), int(psutil.virtual_memory().available))
