"""Dump: write what a run computes as whole tensors, so that other placements can be measured (`unisono prove`).

    FOLDER/rank-N/weights-before/   parameters before the first step
    FOLDER/rank-N/buffers-before/   the rest of the models' state before the first step
    FOLDER/rank-N/step-0/           gradients after the rounds of step 0, not clipped (a second pass: step-0-pass-1)
    FOLDER/rank-N/weights-after/    and buffers-after: the same after the last step
    FOLDER/rank-N.json              the names of these in order, losses, norms, bytes and seconds

A file holds one tensor, so neither the writer nor a reader needs memory for more than one.

Of the processes that hold the same part of a model, one writes it: the main process, and one process for each stage of
a pipeline.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from unisono.checkpoint.sharded_state import gather_state
from unisono.distributed.mesh import Mesh
from unisono.distributed.process_group import ProcessGroup, to_local
from unisono.errors import RunStopped
from unisono.security.file_modes import make_folder, write_text
from unisono.train.context import Inspection, LoopParts, RunContext
from unisono.train.extensions import Extension
from unisono.train.gradient_pass import GradientPass
from unisono.train.step_state import StepState
from unisono.train.step_sync import LOSS


class Dump:
    """The files of one process.

    content  the content of rank-N.json
    models   the tracked models, by name
    """

    def __init__(self, folder: Path, rank: int, steps: int) -> None:
        self.folder, self.rank, self.steps = folder, rank, steps
        self.models: Mapping[str, torch.nn.Module] = {}
        self.content: dict[str, Any] = {
            "written": {},  # {part: [[name, whether the tensor exists], ...]}; file i belongs to name i
            "losses": [],  # [part, loss]
            "norms": [],  # [part, norm], before clipping
            "seconds": [],  # of every step, without the time for writing files
            "bytes": {"parameters": 0, "gradients": 0, "optimizer": 0},  # peak memory of each kind on this process
            "elements": {},  # of the parameters of this process's layers, as whole tensors; and of the trained ones
            "dropout": "",  # a module with dropout
        }
        self._aside = 0.0
        self._began = 0.0

    @contextmanager
    def aside(self, group: ProcessGroup) -> Iterator[None]:
        """Return a block that does not count as training: all processes wait for the writer, and no clock counts it."""
        began = time.perf_counter()
        yield
        group.barrier()
        self._aside += time.perf_counter() - began

    def begin(self) -> None:
        self._began, self._aside = time.perf_counter(), 0.0

    def end(self) -> None:
        self.content["seconds"].append(time.perf_counter() - self._began - self._aside)

    def write(self, part: str, tensors: Iterable[tuple[str, torch.Tensor | None]], mesh: Mesh) -> None:
        """Write a file for each whole tensor. All processes call this with the same names, or those of their stage."""
        mine = {axis: getattr(mesh, axis).rank for axis in ("replicate", "shard", "tensor", "context")}
        writes = not any(mine.values())
        folder = self.folder / f"rank-{self.rank}" / part
        names = self.content["written"].setdefault(part, []) if writes else []
        if writes:
            make_folder(folder)
        for name, tensor in tensors:
            full = gather_state(tensor, keep=writes)
            if writes:
                if full is not None:
                    save_file({name: _plain(full)}, folder / f"{len(names)}.safetensors")
                names.append([name, full is not None])

    def count(self, params: Sequence[torch.nn.Parameter]) -> None:
        """Count the elements of these parameters, over all processes that hold parts of them."""
        trained = sum(p.numel() for p in params if p.requires_grad)
        self.content["elements"] = {"parameters": sum(p.numel() for p in params), "trained": trained}

    def weigh(self, kind: str, tensors: Iterable[torch.Tensor | None]) -> None:
        """Record the memory of this kind that this process holds now, including the rest of the storage of views."""
        held = [to_local(tensor.detach()) for tensor in tensors if tensor is not None]
        dense = [t if t.layout is torch.strided else t.coalesce().values() for t in held]
        memory = {storage.data_ptr(): storage.nbytes() for storage in (t.untyped_storage() for t in dense)}
        self.content["bytes"][kind] = max(self.content["bytes"][kind], sum(memory.values()))

    def state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) for the state of the tracked models, each once. Several models prefix their names."""
        seen: set[int] = set()
        for model, module in self.models.items():
            for name, value in module.state_dict(keep_vars=True).items():
                if isinstance(value, torch.Tensor) and id(value) not in seen:
                    seen.add(id(value))
                    yield f"{model}.{name}" if len(self.models) > 1 else name, value

    def write_state(self, when: str, mesh: Mesh) -> None:
        """Write the state of the tracked models, before the first step or after the last one."""
        state = list(self.state())
        self.write(f"weights-{when}", [each for each in state if isinstance(each[1], torch.nn.Parameter)], mesh)
        self.write(f"buffers-{when}", [each for each in state if not isinstance(each[1], torch.nn.Parameter)], mesh)

    def close(self) -> None:
        path = self.folder / f"rank-{self.rank}.json"
        make_folder(path.parent)
        write_text(path, json.dumps(self.content))


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in the form that safetensors needs: on the CPU, contiguous, of real numbers."""
    dense = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    real = torch.view_as_real(dense) if dense.is_complex() else dense
    return real.cpu().contiguous()


class Dumping(Extension):
    """Write the gradient of every pass, and the models before the first and after the last step."""

    def __init__(self, dump: Dump, context: RunContext, parts: LoopParts) -> None:
        self.dump, self.models, self.sync, self.checks = dump, context.models, parts.sync, parts.checks
        dump.models = context.state.models

    def before_step(self, step: StepState) -> None:
        dump, models = self.dump, self.models
        if step.number == 0:
            dump.write_state("before", self.sync.mesh)
            dump.content["dropout"] = _dropout(models.modules)
            dump.count(models.params)
            self.sync.group.barrier()
        dump.begin()

    def before_sync(self, step: StepState, gradient: GradientPass) -> None:
        others = self._others(gradient)
        self.dump.weigh("parameters", [*gradient.leaves, *others])
        self.dump.weigh("gradients", [p.grad for p in [*gradient.leaves, *others]])

    def gradient_ready(self, step: StepState, gradient: GradientPass) -> None:
        dump = self.dump
        with dump.aside(self.sync.group):
            dump.weigh("gradients", [p.grad for p in [*gradient.params, *self._others(gradient)]])
            names = {id(p): name for name, p in dump.state()}
            part = _part(step.number, step.passes)
            usual = self.models.names
            gradients = [(names.get(id(p), usual.get(id(p), "a parameter")), p.grad) for p in gradient.params]
            dump.write(part, gradients, self.sync.mesh)
            total, weight = step.totals.sums[LOSS]
            dump.content["losses"].append([part, total / weight])

    def _others(self, gradient: GradientPass) -> list[torch.nn.Parameter]:
        """Return the parameters for which this pass has no gradient."""
        ours = set(map(id, gradient.params))
        return [p for p in self.models.params if id(p) not in ours]

    def before_update(self, step: StepState, gradients: Sequence[GradientPass]) -> None:
        assert step.gradient is not None
        with self.dump.aside(self.sync.group):
            if step.grad_norm is None:
                step.grad_norm = self.sync.clip(step.gradient.params, None)
            self.dump.content["norms"].append([_part(step.number, step.passes - 1), step.grad_norm])

    def step_ended(self, step: StepState) -> None:
        dump, checks = self.dump, self.checks
        dump.end()
        states = [state for stepper in checks.steppers for state in getattr(stepper, "state", {}).values()]
        tensors = [value for state in states if isinstance(state, dict) for value in state.values()]
        dump.weigh("optimizer", [t for t in tensors if isinstance(t, torch.Tensor) and t.dim()])
        if step.number + 1 == min(dump.steps, checks.last):
            dump.write_state("after", self.sync.mesh)
            dump.close()
            self.sync.group.barrier()
            raise RunStopped  # the code after the loop does not belong to the dump


def _part(step: int, number: int) -> str:
    return f"step-{step}" + (f"-pass-{number}" if number else "")


def _dropout(models: Iterable[torch.nn.Module]) -> str:
    """Return the name of the first module with dropout, or "" if none is known."""
    for model in models:
        for name, part in model.named_modules():
            dropped = getattr(part, "p" if isinstance(part, torch.nn.modules.dropout._DropoutNd) else "dropout", 0.0)
            if part.training and isinstance(dropped, float) and dropped > 0:
                return f"{name or type(part).__name__}, {dropped:g}"
    return ""


def dump_run(request: str, rank: int) -> Inspection:
    """Return an inspection that writes what a run computes.

    Args:
        request: STEPS:FOLDER.
        rank: the rank of this process.
    """
    steps, _, folder = request.partition(":")
    return Inspection(partial(Dumping, Dump(Path(folder), rank, int(steps))))
