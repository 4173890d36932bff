"""Observe the steps of a run: the clock, the timeline and the progress line of one process."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any, Protocol, TextIO

from unisono.monitor import console
from unisono.monitor.loss_spikes import LossSpikes
from unisono.monitor.phase_clock import PhaseClock
from unisono.monitor.progress import Progress, ProgressAwareStdout
from unisono.monitor.timeline import Timeline

LINE_SECONDS = 0.02
"""Steps that are faster share a line of the timeline: number and loss of the last one, the seconds of all."""


class StepResult(Protocol):
    """A finished step."""

    number: int
    samples: int

    @property
    def loss(self) -> float: ...


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
        self._logged: dict[str, Any] = {}
        self._last: StepResult | None = None
        self._samples = 0  # of the steps since the last line
        self._line_at = 0.0

    def begin(self, total_steps: int, first_step: int, samples_seen: int, *, resumed: bool) -> None:
        """Begin at `first_step`. `samples_seen` counts the samples of the steps before it."""
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
        self._samples += step.samples
        if self._progress is not None and (typical := self._spikes.observe(step.loss)) is not None:
            fact = f"The loss of step {step.number} is {step.loss:.4g}, and was about {typical:.4g} before it."
            self.note(f"{fact} Look at it: unisono replay {self.typed} --step {step.number}")
        if self._logged or time.perf_counter() > self._line_at:
            self._write(step)

    def log(self, values: dict[str, Any]) -> None:
        """Add logged values to the step under way."""
        self._logged.update(values)

    def event(self, values: dict[str, Any]) -> None:
        """Write a rare event as a line of its own into the timeline, after all steps until now."""
        if self._timeline is not None:
            if self._samples and self._last is not None:
                self._write(self._last)
            self._timeline.event(values)

    def note(self, text: str) -> None:
        """Print text on rank 0, above the progress line."""
        if self._progress is not None:
            self._progress.note(text)
        elif self._rank == 0:
            print(text, file=self._output, flush=True)

    def close(self) -> None:
        """Write the last progress line, and close the timeline."""
        self.clock.stop()
        if self._samples and self._last is not None:
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
        loss, logged = step.loss, self._logged or None
        self._timeline.step(step.number, self.clock.lap(), loss, logged)
        if self._progress is not None:
            self._progress.update(step.number + 1, loss, self._samples, self.clock, logged)
        self._samples, self._logged = 0, {}
        self._line_at = time.perf_counter() + LINE_SECONDS
