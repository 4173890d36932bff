"""Observe the steps of a run: the clock, the timeline and the progress line of one process."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TextIO

from unisono.monitor import console
from unisono.monitor.loss_spikes import LossSpikes
from unisono.monitor.phase_clock import PhaseClock
from unisono.monitor.progress import Progress, ProgressAwareStdout
from unisono.monitor.stream_text import write_text
from unisono.monitor.timeline import NOTHING, Timeline
from unisono.phases import CommWait, GcPause, time_gc

LINE_SECONDS = 0.02
"""Steps that are faster share a line of the timeline: number and loss of the last one, the seconds of all."""

NOTED_SPIKES = 3
"""Spikes of the loss that are printed. A loss near zero may have many."""


class StepResult(Protocol):
    """A finished step."""

    number: int
    samples: int
    grad_norm: float | None

    @property
    def loss(self) -> float: ...

    @property
    def weight(self) -> float: ...


@dataclass(slots=True)
class Unwritten:
    """The steps since the last line of the timeline: their sums, and what the loop logged.

    before  CommWait.seconds, the thread's running time and GcPause.seconds at the last line
    due     the time from which on the next line is written
    """

    before: tuple[float, float, float] = (0.0, 0.0, 0.0)
    due: float = 0.0
    steps: int = 0
    samples: int = 0
    weight: float = 0.0
    logged: dict[str, Any] = field(default_factory=dict)


class StepMonitor:
    """Receives every step, and the values that the loop logs."""

    def __init__(self, run_dir: Path, rank: int, output: TextIO, *, live: bool, columns: int, color: bool) -> None:
        """Create a monitor that has not begun.

        Args:
            run_dir: The timeline is written into it.
            rank: Rank 0 shows the progress line.
            output: The stream of the progress line.
            live: The stream is a terminal.
            columns: Width of the terminal; 0: ask the stream.
            color: Use colors.
        """
        self.clock = PhaseClock()
        self.typed = str(run_dir)
        """The run directory, as a user types it."""
        self.timeline_path = run_dir / "timeline" / f"rank-{rank}.jsonl"
        self._spikes = LossSpikes()
        self._rank, self._output = rank, output
        self._live, self._columns, self._color = live, columns, color
        self._progress: Progress | None = None
        self._timeline: Timeline | None = None
        self._last: StepResult | None = None
        self._new = Unwritten()
        self._learning_rate: Callable[[], float | None] = lambda: None

    def begin(
        self,
        total_steps: int,
        first_step: int,
        samples_seen: int,
        *,
        resumed: bool,
        learning_rate: Callable[[], float | None] = lambda: None,
    ) -> None:
        """Begin at `first_step`.

        Args:
            total_steps: The number of steps of the whole run.
            first_step: The next step.
            samples_seen: The number of samples of the steps before it.
            resumed: The run was resumed.
            learning_rate: Returns the present learning rate.
        """
        self._learning_rate = learning_rate
        time_gc()
        self._new.before = _partial_seconds()
        self._timeline = Timeline(self.timeline_path, note=self.note)
        if resumed:
            self._timeline.resumed(first_step)
        if self._rank == 0:
            self._progress = Progress(
                self._output,
                self._live,
                total_steps,
                first_step,
                samples_seen,
                color=self._color,
                columns=self._columns,
            )
            console.route_logging(self._progress)
            if self._live:  # prints of the script appear above the live line
                sys.stdout = ProgressAwareStdout(self._output, self._progress)
        self._whole = total_steps, samples_seen, first_step
        self.clock.start()

    def lead(self, steps_done: int) -> None:
        """Show the progress on this process from now on, because the former rank 0 is gone."""
        if self._progress is None and self._timeline is not None:
            total, samples, first = self._whole
            self._rank = 0
            self._progress = Progress(self._output, False, total, max(first, steps_done), samples, color=False)
            console.route_logging(self._progress)

    def step(self, step: StepResult) -> None:
        """Receive a finished step. Quick steps share a line, so that observing them costs little."""
        self._last = step
        new = self._new
        new.steps += 1
        new.samples += step.samples
        new.weight += step.weight
        if self._progress is not None and (typical := self._spikes.observe(step.loss)) is not None:
            if self._spikes.found <= NOTED_SPIKES:
                fact = f"The loss of step {step.number} is {step.loss:.4g}, and was about {typical:.4g} before it."
                self.note(f"{fact} Look at it: unisono replay {self.typed} --step {step.number}")
            if self._spikes.found == NOTED_SPIKES:
                self.note("Later spikes of the loss are only in the report.")
            self.event({"event": "spike", "step": step.number, "loss": step.loss, "typical": typical})
        if self._new.steps and (self._new.logged or time.perf_counter() > self._new.due):
            self._write(step)

    def log(self, values: dict[str, Any]) -> None:
        """Add logged values to the step under way."""
        self._new.logged.update(values)

    def event(self, values: dict[str, Any]) -> None:
        """Write a rare event as a line of its own into the timeline, after all steps until now."""
        if self._timeline is not None:
            if self._new.steps and self._last is not None:
                self._write(self._last)
            self._timeline.event(values)

    def note(self, text: str) -> None:
        """Print text on rank 0, above the progress line."""
        if self._progress is not None:
            self._progress.note(text)
        elif self._rank == 0:
            write_text(self._output, text + "\n")

    def close(self) -> None:
        """Write the last progress line, and close the timeline."""
        self.clock.stop()
        if self._new.steps and self._last is not None:
            self._write(self._last)
        if self._progress is not None:
            if isinstance(sys.stdout, ProgressAwareStdout):
                sys.stdout = self._output
            self._progress.close()
            console.route_logging(None)
            self._progress = None
        if self._timeline is not None:
            self._timeline.close()

    def _write(self, step: StepResult) -> None:
        assert self._timeline is not None
        new, self._new = self._new, Unwritten(_partial_seconds())
        wait, cpu, gc = (now - before for now, before in zip(self._new.before, new.before, strict=True))
        loss, logged = step.loss, new.logged or None
        self._timeline.step(
            step.number,
            self.clock.lap(),
            loss,
            logged,
            steps=new.steps,
            wait=wait,
            cpu=cpu,
            gc=gc,
            more=self._of_run(step, new) if self._rank == 0 else NOTHING,
        )
        if self._progress is not None:
            self._progress.update(step.number + 1, loss, new.samples, self.clock, logged)
        self._new.due = time.perf_counter() + LINE_SECONDS

    def _of_run(self, step: StepResult, new: Unwritten) -> dict[str, float]:
        """Return the fields of a line that are the same on all processes, and only in the main one's timeline."""
        values: dict[str, float] = {"samples": new.samples}
        if new.weight != new.samples:
            values["weight"] = new.weight
        if (rate := self._learning_rate()) is not None:
            values["lr"] = rate
        if step.grad_norm is not None:
            values["grad_norm"] = step.grad_norm
        return values


def _partial_seconds() -> tuple[float, float, float]:
    """Return the seconds until now of waiting for messages, of this thread's running, and of garbage collection."""
    return CommWait.seconds, time.thread_time(), GcPause.seconds
