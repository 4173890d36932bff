"""What a run does, written down, so that two placements of it can be laid side by side (`unisono check`).

Of every micro-batch: its samples, its loss, its gradient; of every step: the sum, and what the update made of it. All
as digests of the exact bits. And what may explain a difference: the threads, who asked which process this is,
collectives of the script's own. An ordinary run has nothing of this in its path: the engine and the run are replaced by
these here.
"""

from __future__ import annotations

import functools
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import unisono
from unisono.data.loader import FetchTask, IndexDataset, to_device
from unisono.data.rng import preserve_rng
from unisono.errors import RunStopped
from unisono.plan.batch_order import MicroBatchId
from unisono.plan.rng_keys import ROUND, mix
from unisono.tensors.digest import content_digest
from unisono.train.gradient_pass import GradientPass
from unisono.train.loop import StepLoop
from unisono.train.run import Run
from unisono.train.step import FROM_SETTINGS, Step

CPU = torch.device("cpu")
OURS = str(Path(unisono.__file__).parent)
TORCH = str(Path(torch.__file__).parent)

COLLECTIVES = (
    *("all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor", "gather", "scatter"),
    *("reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "send", "recv"),
    *("barrier", "all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list"),
)
ASKING = ("get_rank", "get_world_size")


class Trace:
    """The lines of one process, `rank-N.jsonl`: a list for each, [kind, step, place, name, digest]."""

    def __init__(self, folder: Path, rank: int, steps: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.file = (folder / f"rank-{rank}.jsonl").open("w", encoding="utf-8")
        self.steps = steps
        self.step = -1
        self.place: list[int] = []  # pass, virtual rank, number; in the rounds. After them, the pass alone

    def line(self, kind: str, name: str, value: str) -> None:
        self.file.write(json.dumps([kind, self.step, self.place, name, value]) + "\n")
        self.file.flush()

    def asked(self, what: str) -> None:
        """Note that the script asked for something, with the line of it that did; not if we or torch did."""
        frame = sys._getframe(2)
        while frame.f_code.co_filename == __file__ and frame.f_back is not None:
            frame = frame.f_back
        file = frame.f_code.co_filename
        if not file.startswith((TORCH, "<")) and (not file.startswith(OURS) or "/recipes/" in file):
            self.line("asked", what, f"{file}:{frame.f_lineno}")


class TracedRun(Run[Any]):
    """A run that notes who asks which process it is."""

    trace: Trace | None = None

    def __getattribute__(self, name: str) -> Any:
        if name in ("rank", "size", "is_main"):
            trace = object.__getattribute__(self, "trace")
            if trace is not None:
                trace.asked(f"run.{name}")
        return super().__getattribute__(name)


class TracedStep(Step):
    """A step that notes losses, and what an update is given and makes."""

    _engine: TracedLoop

    def backward(self, loss: torch.Tensor, weight: float | torch.Tensor, *, mean: bool = False) -> None:
        if self._ready and loss.numel() == 1:
            self._engine.trace.line("loss", "loss", f"{float(loss)!r}, weight {float(weight)!r}")
        super().backward(loss, weight, mean=mean)
        self._engine.tell_gradients()

    def update(self, *steppers: Any, clip: float | None = FROM_SETTINGS) -> None:
        engine = self._engine
        if self._state == "whole" and self._gradient is not None:
            engine.tell_whole("given", self._gradient)
        super().update(*steppers, clip=clip)
        for model in engine.models.modules:
            for name, value in model.state_dict(keep_vars=True).items():
                if isinstance(value, torch.Tensor):
                    engine.trace.line("update", f"{name} of {type(model).__name__}", content_digest(value))


class TracedLoop(StepLoop):
    """An engine that writes down what it does, and leaves after so many steps."""

    trace: Trace

    def new_step(self, number: int) -> Step:
        if number >= self.trace.steps:
            raise RunStopped
        self.trace.step, self.trace.place = number, []
        if number == 0:
            self.trace.line("epoch", "steps", str(self.order.steps_per_epoch))
        return TracedStep(self, number)

    def micro_batches(
        self, step: int, number: int, gradient: GradientPass, kept: list[tuple[MicroBatchId, Any]] | None
    ) -> Iterator[tuple[MicroBatchId, Any, bool]]:
        trace = self.trace
        self._found: dict[str, list[str]] = {}
        hooks = [p.register_hook(self._noting(self.models.names.get(id(p), "a parameter"))) for p in gradient.params]
        try:
            for place, batch, last in super().micro_batches(step, number, gradient, kept):
                trace.place = [number, place.virtual_rank, place.number]
                trace.line("samples", "samples", content_digest(batch))
                self._fetch_again(place, batch)
                trace.line("threads", "threads", str(torch.get_num_threads()))
                yield place, batch, last
        finally:
            for hook in hooks:
                hook.remove()
            trace.place = [number]

    def _noting(self, name: str) -> Callable[[torch.Tensor], None]:
        def note(grad: torch.Tensor) -> None:
            self._found.setdefault(name, []).append(content_digest(grad))

        return note

    def tell_gradients(self) -> None:
        """What the backward pass of this round has given each parameter."""
        for name, found in self._found.items():
            self.trace.line("gradient", name, " ".join(found))
        self._found.clear()

    def _fetch_again(self, place: MicroBatchId, batch: Any) -> None:
        """Does the data set give the same once more, under the same key?"""
        fetcher = self._loader.fetcher
        if isinstance(fetcher.data, IndexDataset) or self.trace.place[0]:
            return
        samples = self.order.micro_batches(place.step, place.virtual_rank)[place.number]
        threads = torch.get_num_threads()
        with preserve_rng(CPU):
            again = fetcher.fetch(FetchTask(place, mix(self.order.seed, ROUND), samples))
        torch.set_num_threads(threads)
        self.trace.line(
            "again", "samples", "same" if content_digest(again) == content_digest(to_device(batch, CPU)) else "other"
        )

    def synchronize(self, step: Step, number: int, gradient: GradientPass) -> dict[str, tuple[float, float]]:
        sums = super().synchronize(step, number, gradient)
        self.trace.line("total", "loss", repr(sums.get("loss")))
        self.tell_whole("sum", gradient)
        return sums

    def tell_whole(self, kind: str, gradient: GradientPass) -> None:
        for p in gradient.params:
            name = self.models.names.get(id(p), "a parameter")
            self.trace.line(kind, name, "none" if p.grad is None else content_digest(p.grad))


def watch(trace: Trace) -> None:
    """Note from now on which collectives the script calls itself, and where it asks who it is."""
    for name in (*COLLECTIVES, *ASKING):
        setattr(dist, name, _noted(getattr(dist, name), f"torch.distributed.{name}", trace))


def _noted(function: Callable[..., Any], name: str, trace: Trace) -> Callable[..., Any]:
    @functools.wraps(function)
    def noted(*args: Any, **kwargs: Any) -> Any:
        trace.asked(name)
        return function(*args, **kwargs)

    return noted


def warn_of_operators(trace: Trace) -> None:
    """Note which operators torch knows no deterministic kernel of (torch.use_deterministic_algorithms)."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010

    def note(message: Warning | str, *_: Any, **__: Any) -> None:
        if "deterministic" in str(message):
            trace.line("operator", str(message).split(" ")[0], str(message).split(". ")[0])

    warnings.showwarning = note
    warnings.simplefilter("always")


def traced(asked: str, rank: int) -> tuple[type[Run[Any]], type[StepLoop]]:
    """A run and an engine that write down what they do. `asked` is STEPS:FOLDER, or STEPS:operators:FOLDER."""
    steps, _, folder = asked.partition(":")
    operators = folder.startswith("operators:")
    trace = Trace(Path(folder.removeprefix("operators:")), rank, int(steps))
    watch(trace)
    if operators:
        warn_of_operators(trace)
    return (
        type("Run", (TracedRun,), {"trace": trace}),
        type("Engine", (TracedLoop,), {"trace": trace}),
    )
