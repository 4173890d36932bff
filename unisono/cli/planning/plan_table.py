"""The report of `unisono plan`: candidates, the memory of the first one by part, what more would bring."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from unisono.config import CommandLine, plural, size
from unisono.costs.candidates import Candidate, ranked
from unisono.costs.memory_model import MemoryParts
from unisono.costs.placements import NOT_PREDICTED, Placement
from unisono.costs.recorded_costs import RecordedCosts
from unisono.errors import SettingsError

SHOWN_LAYERS = 3


@dataclass(frozen=True)
class PlanTable:
    """A plan as text and as JSON.

    Args:
        costs: What one process needed.
        candidates: The placements.
        limits: The bytes that a process may use, by the number of processes.
        run_line: The command that trains, without a placement.
        one_more: The placement with one process more; None: there are not more virtual ranks.
        virtual_ranks: Measured seconds of a step by the number of virtual ranks.
    """

    costs: RecordedCosts
    candidates: Sequence[Candidate]
    limits: Mapping[int, int]
    run_line: CommandLine
    one_more: Candidate | None
    virtual_ranks: Mapping[int, float]

    @property
    def fitting(self) -> list[Candidate]:
        """The candidates that fit, quickest first."""
        return ranked(self.candidates, self.limits)

    @property
    def first(self) -> Candidate | None:
        """The first choice; None: nothing fits."""
        return next(iter(self.fitting), None)

    def refuse_small_memory(self, limit: int, line: CommandLine, notes: Sequence[str]) -> None:
        """Raise SettingsError if no placement fits.

        Args:
            limit: The bytes of --memory.
            line: The command of the plan.
            notes: What could not be measured.
        """
        if self.fitting:
            return
        known = [each for each in self.candidates if each.memory is not None]
        least = min(known, key=lambda each: each.memory.total if each.memory is not None else 0)
        assert least.memory is not None
        facts = (
            f"The least that a process needs is {size(least.memory.total)} ({least.placement}). Parameters take "
            f"{size(self.costs.state.parameters)}, and the process itself {size(least.memory.process)}."
        )
        do = line.flag("--memory", size(least.memory.total * 1.1).replace(" ", ""))
        raise SettingsError(f"No placement fits in --memory {size(limit)}.", " ".join([facts, *notes]), str(do))

    def line_of(self, each: Candidate) -> CommandLine:
        """Return the command that trains with a placement."""
        return line_of(self.run_line, each.placement)

    def lines(self) -> Iterator[str]:
        """Yield the lines of the report."""
        width = max(len(str(each.placement)) for each in self.candidates)
        yield f"{'placement':{width}}  {'processes':>9}  {'memory':>8}  {'of':>8}  {'step':>9}  {'samples/s':>9}"
        for each in self.fitting:
            yield self._row(each, width)
            yield f"    {self.line_of(each)}"
        too_large = [each for each in self.candidates if not each.fits(self.limits[each.placement.processes])]
        for each in too_large:
            yield f"{self._row(each, width)}  does not fit"
        yield f"Not predicted: parallel.{', parallel.'.join(NOT_PREDICTED)} (unisono prove runs them)."
        first = self.first
        if first is not None and first.memory is not None:
            yield ""
            yield f"Memory of a process with {first.placement}: {_parts(first.memory)}."
            yield from self._layers()
        yield from self._more(first)
        yield from self._by_virtual_ranks()

    def _row(self, each: Candidate, width: int) -> str:
        total = size(each.memory.total) if each.memory is not None else "?"
        limit = size(self.limits[each.placement.processes])
        step = f"{each.seconds:.3g} s" if each.seconds is not None else "?"
        rate = f"{each.samples / each.seconds:.4g}" if each.seconds else "?"
        count = each.placement.processes
        return f"{each.placement!s:{width}}  {count:>9}  {total:>8}  {limit:>8}  {step:>9}  {rate:>9}"

    def _layers(self) -> Iterator[str]:
        layers = self.costs.rounds.layers if self.costs.rounds is not None else {}
        largest = sorted(layers.items(), key=lambda item: -item[1])[:SHOWN_LAYERS]
        if largest:
            words = [f"{name or 'outside of layers'} {size(count)}" for name, count in largest]
            yield f"Most activations of a micro-batch: {', '.join(words)}."

    def _more(self, first: Candidate | None) -> Iterator[str]:
        """Yield what one more process would bring."""
        more = self.one_more
        if first is None or first.seconds is None or more is None or more.seconds is None:
            return
        ratio = first.seconds / more.seconds
        words = f"{ratio:.2f} times as fast as the first choice" if ratio > 1 else "no faster step"
        yield f"One process more ({plural(more.placement.processes, 'replica')}): {more.seconds:.3g} s, {words}."

    def _by_virtual_ranks(self) -> Iterator[str]:
        if self.virtual_ranks:
            words = [f"{count}: {seconds:.3g} s" for count, seconds in self.virtual_ranks.items()]
            yield f"The same batch on one process, by virtual ranks: {', '.join(words)}."

    def as_json(self) -> dict[str, Any]:
        """Return the plan for --json."""
        return {
            "candidates": [self._entry(each, fits=True) for each in self.fitting]
            + [
                self._entry(each, fits=False)
                for each in self.candidates
                if not each.fits(self.limits[each.placement.processes])
            ],
            "not_predicted": list(NOT_PREDICTED),
            "activations_by_layer": dict(self.costs.rounds.layers) if self.costs.rounds is not None else {},
            "flops_of_a_micro_batch": self.costs.flops,
            "epoch_steps": self.costs.epoch_steps,
            "total_steps": self.costs.total_steps,
            "one_more_process": self._entry(self.one_more, fits=True) if self.one_more is not None else None,
            "virtual_ranks": {str(count): seconds for count, seconds in self.virtual_ranks.items()},
        }

    def _entry(self, each: Candidate, *, fits: bool) -> dict[str, Any]:
        return {
            "placement": str(each.placement),
            "processes": each.placement.processes,
            "fits": fits,
            "memory": each.memory.total if each.memory is not None else None,
            "memory_by_part": asdict(each.memory) if each.memory is not None else None,
            "step_seconds": each.seconds,
            "trials": each.trials,
            "samples_per_second": each.samples / each.seconds if each.seconds else None,
            "line": str(self.line_of(each)),
        }


def line_of(run_line: CommandLine, placement: Placement) -> CommandLine:
    """Return the command that trains with a placement. `run_line`: the command without one."""
    line = run_line.setting(*placement.sets) if placement.sets else run_line
    return line.in_processes(placement.processes) if placement.processes > 1 else line


def _parts(memory: MemoryParts) -> str:
    return ", ".join(f"{name} {size(count)}" for name, count in asdict(memory).items() if count > 0)
