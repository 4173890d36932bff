"""Trace: record the computations of a run, so that two placements of it can be compared (`unisono check`).

The record has the samples, the loss and the gradient of every micro-batch, and the sum and the update of every step.
All are hashes of the exact bits. It also has facts that may explain a difference: the threads, lines of the script that
read the rank or the number of processes, and collectives of the script.
"""

from __future__ import annotations

import functools
import json
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import unisono
from unisono.data.computed_batches import IndexDataset
from unisono.data.loader import FetchTask, to_device
from unisono.data.rng import preserve_rng
from unisono.errors import RunStopped
from unisono.plan.batch_order import MicroBatchId
from unisono.plan.rng_keys import ROUND, mix
from unisono.security.file_modes import make_folder, open_like_folder
from unisono.tensors.digest import content_digest
from unisono.train.collective import Rounds
from unisono.train.context import Inspection, LoopParts, RunContext
from unisono.train.extensions import Extension
from unisono.train.gradient_pass import GradientPass
from unisono.train.step_state import StepState
from unisono.train.step_sync import LOSS

CPU = torch.device("cpu")
OURS = str(Path(unisono.__file__).parent)
TORCH = str(Path(torch.__file__).parent)

COLLECTIVES = (
    *("all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor", "gather", "scatter"),
    *("reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "send", "recv"),
    *("barrier", "all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list"),
)
RANK_FUNCTIONS = ("get_rank", "get_world_size")


class Trace:
    """The lines of one process, `rank-N.jsonl`. Each line is a list: [kind, step, place, name, hash]."""

    def __init__(self, folder: Path, rank: int, steps: int) -> None:
        make_folder(folder)
        path = folder / f"rank-{rank}.jsonl"
        self.file = open(path, "w", encoding="utf-8", opener=open_like_folder)  # noqa: SIM115  (closed in close)
        self.steps = steps
        self.step = -1
        self.place: list[int] = []  # pass, virtual rank, number within the rounds; after them, the pass alone

    def line(self, kind: str, name: str, value: str) -> None:
        self.file.write(json.dumps([kind, self.step, self.place, name, value]) + "\n")
        self.file.flush()

    def note_caller(self, what: str, depth: int = 2) -> None:
        """Record that the script read or called something, with its line, unless Unisono or torch did so.

        Args:
            what: the name of the property or function.
            depth: frames from here to the caller.
        """
        frame = sys._getframe(depth)
        while frame.f_code.co_filename == __file__ and frame.f_back is not None:
            frame = frame.f_back
        file = frame.f_code.co_filename
        if not file.startswith((TORCH, "<")) and (not file.startswith(OURS) or "/recipes/" in file):
            self.line("asked", what, f"{file}:{frame.f_lineno}")


class Tracing(Extension):
    """Record the computations of a run, and end it after some steps."""

    def __init__(self, trace: Trace, context: RunContext, parts: LoopParts) -> None:
        self.trace, self.models, self.source = trace, context.models, parts.source
        self._found: dict[str, list[str]] = {}  # hashes of the gradients of the current round, by parameter

    def before_step(self, step: StepState) -> None:
        if step.number >= self.trace.steps:
            raise RunStopped
        self.trace.step, self.trace.place = step.number, []
        if step.number == 0:
            self.trace.line("epoch", "steps", str(self.source.order.steps_per_epoch))

    def rounds(self, step: StepState, gradient: GradientPass, rounds: Rounds) -> Rounds:
        trace, number = self.trace, step.passes
        self._found = {}
        hooks = [p.register_hook(self._noting(self._name(p))) for p in gradient.params]
        try:
            for place, batch, last in rounds:
                trace.place = [number, place.virtual_rank, place.number]
                trace.line("samples", "samples", content_digest(batch))
                self._fetch_again(place, batch)
                trace.line("threads", "threads", str(torch.get_num_threads()))
                yield place, batch, last
                for name, found in self._found.items():
                    trace.line("gradient", name, " ".join(found))
                self._found.clear()
        finally:
            for hook in hooks:
                hook.remove()
            trace.place = [number]

    def _name(self, p: torch.Tensor) -> str:
        return self.models.names.get(id(p), "a parameter")

    def _noting(self, name: str) -> Callable[[torch.Tensor], None]:
        def note(grad: torch.Tensor) -> None:
            self._found.setdefault(name, []).append(content_digest(grad))

        return note

    def _fetch_again(self, place: MicroBatchId, batch: Any) -> None:
        """Check that the data set returns the same batch again, under the same key."""
        fetcher = self.source.loader.fetcher
        if type(fetcher.data) is IndexDataset or self.trace.place[0]:
            return
        order = self.source.order
        samples = order.micro_batches(place.step, place.virtual_rank)[place.number]
        threads = torch.get_num_threads()
        with preserve_rng(CPU):
            again = fetcher.fetch(FetchTask(place, mix(order.seed, ROUND), samples))
        torch.set_num_threads(threads)
        self.trace.line(
            "again", "samples", "same" if content_digest(again) == content_digest(to_device(batch, CPU)) else "other"
        )

    def backward(self, step: StepState, loss: torch.Tensor, weight: float | torch.Tensor) -> None:
        self.trace.line("loss", "loss", f"{float(loss)!r}, weight {float(weight)!r}")

    def gradient_ready(self, step: StepState, gradient: GradientPass) -> None:
        self.trace.line("total", "loss", repr(step.totals.sums.get(LOSS)))
        self._write_gradients("sum", gradient)

    def before_update(self, step: StepState, gradients: Sequence[GradientPass]) -> None:
        if step.gradient is not None:
            self._write_gradients("given", step.gradient)

    def updated(self, step: StepState) -> None:
        for model in self.models.modules:
            for name, value in model.state_dict(keep_vars=True).items():
                if isinstance(value, torch.Tensor):
                    self.trace.line("update", f"{name} of {type(model).__name__}", content_digest(value))

    def _write_gradients(self, kind: str, gradient: GradientPass) -> None:
        for p in gradient.params:
            self.trace.line(kind, self._name(p), "none" if p.grad is None else content_digest(p.grad))


def watch_collectives(trace: Trace) -> None:
    """Record from now on which collectives the script calls, and where it reads its rank."""
    for name in (*COLLECTIVES, *RANK_FUNCTIONS):
        setattr(dist, name, _noted(getattr(dist, name), f"torch.distributed.{name}", trace))


def _noted(function: Callable[..., Any], name: str, trace: Trace) -> Callable[..., Any]:
    @functools.wraps(function)
    def noted(*args: Any, **kwargs: Any) -> Any:
        trace.note_caller(name)
        return function(*args, **kwargs)

    return noted


def warn_of_operators(trace: Trace) -> None:
    """Record the operators for which torch has no deterministic kernel (torch.use_deterministic_algorithms)."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010

    def note(message: Warning | str, *_: Any, **__: Any) -> None:
        if "deterministic" in str(message):
            trace.line("operator", str(message).split(" ")[0], str(message).split(". ")[0])

    warnings.showwarning = note
    warnings.simplefilter("always")


def trace_run(request: str, rank: int) -> Inspection:
    """Return an inspection that records the computations of a run.

    Args:
        request: STEPS:FOLDER, or STEPS:operators:FOLDER.
        rank: the rank of this process.
    """
    steps, _, folder = request.partition(":")
    operators = folder.startswith("operators:")
    trace = Trace(Path(folder.removeprefix("operators:")), rank, int(steps))
    watch_collectives(trace)
    if operators:
        warn_of_operators(trace)
    return Inspection(partial(Tracing, trace), partial(trace.note_caller, depth=3))  # a property of Run, and its helper
