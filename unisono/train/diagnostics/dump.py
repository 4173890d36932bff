"""What a run computes, written out as whole tensors, so that other placements of it can be measured (`unisono prove`).

    FOLDER/rank-N/weights-before/   parameters before the first step
    FOLDER/rank-N/buffers-before/   what else the models' state holds then
    FOLDER/rank-N/step-0/           gradients after the rounds of step 0, not clipped (step-0-pass-1: of a second pass)
    FOLDER/rank-N/weights-after/    and buffers-after: the same after the last step
    FOLDER/rank-N.json              the names of these in order, losses, norms, bytes and seconds

A file holds one tensor, so nobody needs room for more, neither who writes nor who reads.

Of the processes that hold the same part of a model one writes: the main process, and in a pipeline one for each stretch
of the layers. An ordinary run has nothing of this in its path: run, engine and step are replaced by these here.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from unisono.checkpoint.sharded_state import gather_state
from unisono.distributed.mesh import Mesh
from unisono.distributed.process_group import ProcessGroup, to_local
from unisono.errors import RunStopped
from unisono.train.gradient_pass import GradientPass
from unisono.train.loop import StepLoop
from unisono.train.run import Run
from unisono.train.step import FROM_SETTINGS, Step
from unisono.train.step_sync import LOSS


class Dump:
    """What one process has to tell, and its files.

    told    what goes into rank-N.json
    models  those that the run tracks, by name
    """

    def __init__(self, folder: Path, rank: int, steps: int) -> None:
        self.folder, self.rank, self.steps = folder, rank, steps
        self.models: Mapping[str, torch.nn.Module] = {}
        self.told: dict[str, Any] = {
            "written": {},  # {part: [[name, is there one?], ...]}; file i is that of name i
            "losses": [],  # [part, loss]
            "norms": [],  # [part, norm], before clipping
            "seconds": [],  # of every step, without what is written here
            "bytes": {"parameters": 0, "gradients": 0, "optimizer": 0},  # the most that lay here at once, of each
            "elements": {},  # of the parameters of this process's layers, were they whole; and of those that train
            "dropout": "",  # a module that drops something
        }
        self._aside = 0.0
        self._began = 0.0

    @contextmanager
    def aside(self, group: ProcessGroup) -> Iterator[None]:
        """A block that is no part of training: everybody waits for whoever writes, and no clock counts it."""
        began = time.perf_counter()
        yield
        group.barrier()
        self._aside += time.perf_counter() - began

    def begin(self) -> None:
        self._began, self._aside = time.perf_counter(), 0.0

    def end(self) -> None:
        self.told["seconds"].append(time.perf_counter() - self._began - self._aside)

    def write(self, part: str, tensors: Iterable[tuple[str, torch.Tensor | None]], mesh: Mesh) -> None:
        """A file for each of these, whole. Every process must call it with the same names, or those of its stretch."""
        mine = {axis: getattr(mesh, axis).rank for axis in ("replicate", "shard", "tensor", "context")}
        writes = not any(mine.values())
        folder = self.folder / f"rank-{self.rank}" / part
        names = self.told["written"].setdefault(part, []) if writes else []
        if writes:
            folder.mkdir(parents=True, exist_ok=True)
        for name, tensor in tensors:
            full = gather_state(tensor, keep=writes)
            if writes:
                if full is not None:
                    save_file({name: _plain(full)}, folder / f"{len(names)}.safetensors")
                names.append([name, full is not None])

    def count(self, params: Sequence[torch.nn.Parameter]) -> None:
        """How many elements these have on all processes together that hold parts of them."""
        trained = sum(p.numel() for p in params if p.requires_grad)
        self.told["elements"] = {"parameters": sum(p.numel() for p in params), "trained": trained}

    def weigh(self, kind: str, tensors: Iterable[torch.Tensor | None]) -> None:
        """So much memory of this kind is held here now: also what lies around a part that these tensors show."""
        held = [to_local(tensor.detach()) for tensor in tensors if tensor is not None]
        dense = [t if t.layout is torch.strided else t.coalesce().values() for t in held]
        memory = {storage.data_ptr(): storage.nbytes() for storage in (t.untyped_storage() for t in dense)}
        self.told["bytes"][kind] = max(self.told["bytes"][kind], sum(memory.values()))

    def state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) of all that the tracked models hold, each once; of several models with the model's before."""
        seen: set[int] = set()
        for model, module in self.models.items():
            for name, value in module.state_dict(keep_vars=True).items():
                if isinstance(value, torch.Tensor) and id(value) not in seen:
                    seen.add(id(value))
                    yield f"{model}.{name}" if len(self.models) > 1 else name, value

    def write_state(self, when: str, mesh: Mesh) -> None:
        """All that the tracked models hold, before the first step or after the last one."""
        state = list(self.state())
        self.write(f"weights-{when}", [each for each in state if isinstance(each[1], torch.nn.Parameter)], mesh)
        self.write(f"buffers-{when}", [each for each in state if not isinstance(each[1], torch.nn.Parameter)], mesh)

    def close(self) -> None:
        path = self.folder / f"rank-{self.rank}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.told), encoding="utf-8")


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """As safetensors takes it: on the CPU, row after row, real numbers."""
    dense = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    real = torch.view_as_real(dense) if dense.is_complex() else dense
    return real.cpu().contiguous()


class DumpedRun(Run[Any]):
    """A run that says what it tracks."""

    evidence: Dump

    def track(self, **things: Any) -> None:
        super().track(**things)
        self.evidence.models = self._state.models


class DumpedStep(Step):
    """A step that tells its gradient's norm; the last one that is compared tells what it left behind, and leaves."""

    _engine: DumpedLoop

    def update(self, *steppers: Any, clip: float | None = FROM_SETTINGS) -> None:
        evidence = self._engine.evidence
        if self._state == "whole":
            with evidence.aside(self._engine.group):
                evidence.told["norms"].append([_part(self.number, self._passes - 1), self.grad_norm])
        super().update(*steppers, clip=clip)

    def finish(self) -> None:
        super().finish()
        engine = self._engine
        evidence = engine.evidence
        evidence.end()
        states = [state for stepper in engine.steppers for state in getattr(stepper, "state", {}).values()]
        tensors = [value for state in states if isinstance(state, dict) for value in state.values()]
        evidence.weigh("optimizer", [t for t in tensors if isinstance(t, torch.Tensor) and t.dim()])
        if self.number + 1 == min(evidence.steps, engine.last):
            evidence.write_state("after", engine.mesh)
            evidence.close()
            engine.group.barrier()
            raise RunStopped  # what the script does behind its loop is no part of this


class DumpedLoop(StepLoop):
    """An engine that writes down the gradient of every pass."""

    evidence: Dump

    def new_step(self, number: int) -> Step:
        evidence = self.evidence
        if number == 0:
            evidence.write_state("before", self.mesh)
            evidence.told["dropout"] = _dropout(self.models.modules)
            evidence.count(self.models.params)
            self.group.barrier()
        evidence.begin()
        return DumpedStep(self, number)

    def synchronize(self, step: Step, number: int, gradient: GradientPass) -> dict[str, tuple[float, float]]:
        evidence = self.evidence
        ours = set(map(id, gradient.params))
        others = [p for p in self.models.params if id(p) not in ours]
        evidence.weigh("parameters", [*gradient.leaves, *others])
        evidence.weigh("gradients", [p.grad for p in [*gradient.leaves, *others]])
        sums = super().synchronize(step, number, gradient)
        with evidence.aside(self.group):
            evidence.weigh("gradients", [p.grad for p in [*gradient.params, *others]])
            names = {id(p): name for name, p in evidence.state()}
            part = _part(step.number, number)
            evidence.write(part, [(names.get(id(p), self._name(p)), p.grad) for p in gradient.params], self.mesh)
            total, weight = sums[LOSS]
            evidence.told["losses"].append([part, total / weight])
        return sums

    def _name(self, p: torch.nn.Parameter) -> str:
        return self.models.names.get(id(p), "a parameter")


def _part(step: int, number: int) -> str:
    return f"step-{step}" + (f"-pass-{number}" if number else "")


def _dropout(models: Iterable[torch.nn.Module]) -> str:
    """The first module that drops something in training; "" where none is seen to."""
    for model in models:
        for name, part in model.named_modules():
            dropped = getattr(part, "p" if isinstance(part, torch.nn.modules.dropout._DropoutNd) else "dropout", 0.0)
            if part.training and isinstance(dropped, float) and dropped > 0:
                return f"{name or type(part).__name__}, {dropped:g}"
    return ""


def dump_run(asked: str, rank: int) -> tuple[type[Run[Any]], type[StepLoop]]:
    """A run and an engine that write down what they compute. `asked` is STEPS:FOLDER."""
    steps, _, folder = asked.partition(":")
    evidence = Dump(Path(folder), rank, int(steps))
    return (
        type("Run", (DumpedRun,), {"evidence": evidence}),
        type("Engine", (DumpedLoop,), {"evidence": evidence}),
    )
