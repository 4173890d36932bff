"""Record the values that a trial of `unisono tune` logs, and its loss, with the exact bits and without delay.

    FOLDER/rank-N.jsonl
        {"begin": 0, "total": 100, "ranks": 2, "virtual_ranks": 8, "parameters": 1234, "shapes": 567, "t": 1760000000.1}
        {"step": 12, "values": {"accuracy": 0.5}, "t": 1760000000.2}
        {"end": 100, "left": false, "process_seconds": 3.2, "steps": 100, "memory": 123456, "t": 1760000009.9}

The run of a member of a population pauses after a number of steps: it saves and leaves as after a signal.

Each process writes its own file, since any of them may die. A line is in the file once it is written, so a process
that is killed loses nothing that it has logged. After a resume, steps that are computed again are there twice.

`step` is the number of the step under way, from 0. Values after the loop have the number of steps of the run. `loss` is
the mean loss of the step, unless the script logs another value by that name in this step.
"""

from __future__ import annotations

import json
import math
import os
import time
import zlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from unisono.errors import RunStopped
from unisono.security.file_modes import make_folder, open_like_folder
from unisono.train.context import Inspection, LoopParts, RunContext
from unisono.train.diagnostics.timed_steps import peak_memory
from unisono.train.extensions import Extension
from unisono.train.step_state import StepState
from unisono.train.step_sync import LOSS


class ValueFile:
    """The file of one process.

    Args:
        path: the file, to which lines are appended.
    """

    def __init__(self, path: Path) -> None:
        make_folder(path.parent)
        self._file = open_like_folder(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)
        self._logged: set[str] = set()  # names of the step under way
        os.write(self._file, b"\n")  # ends a line that a crash has cut off

    def write(self, **entry: Any) -> None:
        """Append a line."""
        os.write(self._file, (json.dumps({**entry, "t": round(time.time(), 3)}) + "\n").encode())

    def log(self, context: RunContext, values: Mapping[str, Any]) -> None:
        """Append the numbers among logged values."""
        numbers = {name: as_text(value) for name, value in values.items() if isinstance(value, int | float)}
        if numbers:
            self._logged |= numbers.keys()
            self.write(step=context.progress.steps_done, values=numbers)

    def count(self, step: int, loss: float) -> None:
        """Append the loss of a step that is finished."""
        if "loss" not in self._logged:
            self.write(step=step, values={"loss": as_text(loss)})
        self._logged.clear()


def as_text(value: float) -> float | str:
    """Return a number as JSON can hold it: NaN and infinity are text."""
    return value if math.isfinite(value) else str(float(value))


class ValueRecorder(Extension):
    """Write the beginning, the losses and the end of a run.

    Args:
        file: the file of this process.
        context: the context of the run.
        parts: the parts of its loop.
        pause: the number of steps of the run after which it pauses; 0: it does not.
    """

    def __init__(self, file: ValueFile, context: RunContext, parts: LoopParts, *, pause: int = 0) -> None:
        self._file, self._context, self._pause = file, context, pause
        self._seconds, self._began, self._steps = 0.0, 0.0, 0
        progress, models = context.progress, context.models.modules
        file.write(
            begin=progress.steps_done,
            total=progress.last,
            ranks=context.group.size,
            virtual_ranks=context.settings.virtual_ranks,
            parameters=sum(p.numel() for model in models for p in model.parameters()),
            shapes=shapes_of(context),
        )

    def before_step(self, step: StepState) -> None:
        self._began = time.perf_counter()
        if self._pause and step.number + 1 >= self._pause and self._pause < self._context.progress.last:
            self._context.progress.leaving = True
            if step.number >= self._pause:  # it was killed after it had saved
                raise RunStopped

    def after_step(self, step: StepState) -> None:
        self._seconds += time.perf_counter() - self._began
        self._steps += 1
        total, weight = step.sums.get(LOSS, (math.nan, 1.0))
        self._file.count(step.number, float(total / weight) if weight > 0 else math.nan)

    def ended(self, error: Exception | None) -> None:
        if error is not None:
            return
        progress, size = self._context.progress, self._context.group.size
        self._file.write(
            end=progress.steps_done,
            left=progress.leaving or bool(progress.agreed.get("leave")),
            process_seconds=self._seconds * size,
            steps=self._steps,
            memory=peak_memory(self._context.device),
        )


def shapes_of(context: RunContext) -> int:
    """Return a number that tells shapes of parameters apart; 0: processes hold other ones, so it says nothing."""
    if context.mesh.pipeline.size > 1 or context.mesh.tensor.size > 1:
        return 0
    shapes = [(name, [*p.shape]) for model in context.models.modules for name, p in sorted(model.named_parameters())]
    return zlib.crc32(json.dumps(shapes).encode()) + 1


def record_interval(request: str, rank: int) -> Inspection:
    """Return an inspection that records values until the run pauses.

    Args:
        request: the number of steps, a colon, and the folder for the files.
        rank: of this process.
    """
    pause, _, folder = request.partition(":")
    file = ValueFile(Path(folder) / f"rank-{rank}.jsonl")
    return Inspection(partial(ValueRecorder, file, pause=int(pause)), on_log=file.log)


def record_values(request: str, rank: int) -> Inspection:
    """Return an inspection that records values. `request`: the folder for the files; `rank`: of this process."""
    file = ValueFile(Path(request) / f"rank-{rank}.jsonl")
    return Inspection(partial(ValueRecorder, file), on_log=file.log)
