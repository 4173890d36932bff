"""Record steps of this process with torch's profiler and our own spans, and build the trace of the rank."""

from __future__ import annotations

import json
import os
import threading
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.profiler import ProfilerActivity, profile, supported_activities

from unisono.environment import set_for_libraries
from unisono.profiles.profile_folder import ProfileFolder, part, write_trace
from unisono.profiles.rank_trace import RecordedRank, build_rank_trace
from unisono.torch_compat.profilers import all_threads, dump_allocations, is_profiling, record_allocations
from unisono.train.profiling.span_log import SpanLog

if TYPE_CHECKING:
    from unisono.config.schema import ProfileSettings

QUIET = ("KINETO_LOG_LEVEL", "99")
"""Variable with which the profiler's library prints no line when it starts and stops."""


class StepRecording:
    """Records steps once: `prepare` a step before the first one, begin and end each step, and `write` the trace.

    torch's own schedule is not used, because a trace that it exports may be that of an empty cycle.

    Args:
        settings: What is recorded.
        device: The device on which this process computes.
        rank: The rank of this process, as its files name it.
        host: The name of its host.

    Attributes:
        spans: Our own spans.
    """

    def __init__(self, settings: ProfileSettings, device: torch.device, rank: int, host: str) -> None:
        self.spans = SpanLog()
        self._settings, self._device = settings, device
        self._rank, self._host = rank, host
        self._state: Literal["new", "ready", "on", "over"] = "new"
        self._has_history = settings.memory and device.type == "cuda"
        self._steps: list[int] = []
        self._began = self._ended = 0

    @property
    def is_on(self) -> bool:
        """Whether a step is being recorded, or the next one will be."""
        return self._state == "on"

    def prepare(self) -> None:
        """Prepare for the next step. An accelerator's library takes a while to start."""
        if self._state != "new":
            return
        if is_profiling():
            raise RuntimeError("the script itself is using a profiler of torch, which can record once at a time")
        set_for_libraries(*QUIET)
        settings = self._settings
        self._profiler = profile(
            activities=_activities(self._device),
            record_shapes=settings.shapes,
            profile_memory=settings.memory,
            with_stack=settings.stacks,
            experimental_config=None if settings.memory else all_threads(),  # which lacks allocations (torch 2.13)
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch 2.10 says that a second recording would replace this
            self._profiler.prepare_trace()
        self._state = "ready"

    def begin_step(self) -> None:
        """Begin a step, and the recording with the first one. The training thread calls this."""
        if self._state == "over":
            return
        self.prepare()
        if self._state == "ready":
            self._profiler.start_trace()
            if self._has_history:
                record_allocations()
            self._began = time.time_ns()
            self.spans.start()
            self._state = "on"
        self.spans.begin_step()

    def end_step(self, step: int) -> None:
        """End the step with this number."""
        self.spans.end_step(step)
        self._steps.append(step)
        self._ended = time.time_ns()

    def write(self, folder: ProfileFolder) -> tuple[int, int] | None:
        """End the recording, and write it. Return the first and the last step; None: nothing was recorded."""
        before, self._state = self._state, "over"
        if before in ("new", "over"):
            return None
        if before == "ready":
            self._profiler.start_trace()  # torch does not end what has not begun
        self.spans.stop()
        self._profiler.stop_trace()
        if self._has_history and before == "on":
            snapshot = folder.memory(self._rank)
            dump_allocations(part(snapshot))
            part(snapshot).replace(snapshot)
        if not self._steps:
            return None
        steps = self._steps[0], self._steps[-1]
        facts = RecordedRank(
            *(self._rank, self._host, os.getpid(), str(self._device)),
            *(steps, self._began, self._ended, torch.__version__),
        )
        exported = self._export(folder.path / f"torch-{self._rank}.json.part")
        write_trace(folder.rank(self._rank), build_rank_trace(exported, facts, self.spans.spans, _threads()))
        return steps

    def abandon(self) -> None:
        """End the recording after an error. Nothing more is recorded."""
        self._state = "over"
        self.spans.stop()

    def _export(self, path: Path) -> Mapping[str, Any]:
        """Return the trace of torch's profiler, which can only be exported to a file."""
        path.touch()  # torch reports no error
        try:
            self._profiler.export_chrome_trace(str(path))
            found: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        finally:
            path.unlink(missing_ok=True)
        return found


def _activities(device: torch.device) -> list[ProfilerActivity]:
    """Return what torch's profiler records: operators, and kernels if it knows this kind of device."""
    supported = {activity.name: activity for activity in supported_activities()}
    return [supported[name] for name in dict.fromkeys(("CPU", device.type.upper())) if name in supported]


def _threads() -> dict[int, str]:
    """Return the names of Python's threads, by the numbers that the system gives them."""
    main = threading.main_thread()
    return {each.native_id or 0: "training" if each is main else each.name for each in threading.enumerate()}
