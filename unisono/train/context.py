"""The context of a run: the objects that its parts share. `Run` holds it and hands it down; nothing reaches up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO

import torch

from unisono.checkpoint.load import Checkpoint
from unisono.config import Settings
from unisono.config.mesh_shape import fill, wanted
from unisono.data.rng import RngStates
from unisono.distributed.mesh import Mesh, build_mesh
from unisono.distributed.process_group import ProcessGroup
from unisono.environment import World
from unisono.exchange.exchange_state import ExchangeStates
from unisono.monitor.step_monitor import StepMonitor
from unisono.parallel.precision import LossScale
from unisono.train.collective import Collective
from unisono.train.extensions import Extension, Hooks
from unisono.train.modules.models import Models
from unisono.train.state.run_progress import Progress
from unisono.train.state.run_state import ATTRIBUTES, EXCHANGE, RANDOM, SCALE, RunState
from unisono.train.step_sync import StepSync

if TYPE_CHECKING:
    from unisono.train.batches.batch_source import BatchSource
    from unisono.train.gradient_sync import GradientSync
    from unisono.train.guarantees.loop_checks import LoopChecks


@dataclass(frozen=True, slots=True)
class LoopParts:
    """What an extension may watch of a loop: its micro-batches, its gradients, its checks."""

    source: BatchSource
    sync: GradientSync
    checks: LoopChecks


class RunLoop(Protocol):
    """How the processes of a run make its steps: one object for each run, chosen by its exchange (train/loop.py).

    group        all processes of the run; it tells their ranks
    training     the processes whose mesh trains together
    is_uniform   whether all processes have the same role
    saves        whether this process takes part in checkpoints
    """

    group: ProcessGroup
    training: ProcessGroup
    is_uniform: bool
    saves: bool

    def attach(self, context: RunContext) -> None:
        """Add what belongs to this loop to the context, before anything is loaded."""
        ...

    def as_one(self, models: Sequence[torch.nn.Module]) -> AbstractContextManager[None]:
        """Return a block in which these models are equal on all processes."""
        ...

    def refresh(self, *, states: bool = False) -> None:
        """Get what other processes hold of the model, and with `states` of its optimizers."""
        ...

    def finish(self, context: RunContext) -> None:
        """Finish training: the script has returned."""
        ...

    def end_early(self, context: RunContext) -> None:
        """Finish the last step of a loop that was left with break, after its update."""
        ...

    def wake(self) -> None:
        """End a wait for messages, because a signal came."""
        ...

    def promise(self, context: RunContext) -> tuple[str, str] | None:
        """Return what the loop promises, and why; None: that follows from the exchange and the layout."""
        ...

    def result(self) -> Mapping[str, Any]:
        """Return entries of result.json."""
        ...


@dataclass(frozen=True, slots=True)
class Inspection:
    """What a command like `unisono check` watches in a run.

    build    builds the extension that watches
    on_rank  is called with a property's name when the script reads its rank or the number of processes
    """

    build: Callable[[RunContext, LoopParts], Extension]
    on_rank: Callable[[str], None] | None = None


@dataclass(slots=True)
class RunContext:
    """The objects that the parts of a run share.

    settings         of the script, as they are in this run
    group            all processes of the run
    mesh             of the processes that train together
    models           what was placed
    state            what is tracked, and the checkpoint that the run was resumed from
    step_sync        adds up sums and flags, and checks that all ranks are in the same place
    collective       runs collectives between two steps
    scale            fp16's loss scale
    generators       the random number generators
    exchange_states  what exchanges carry from step to step
    monitor          the progress line and the timeline
    identity         what the bits of the run depend on, by name
    accepted         parts of the identity that may change in this resume
    progress         what changes from step to step
    loop             how the processes make steps
    inspection       what a command watches; None: it is an ordinary run
    parts            what steps are made of, once the loop is built
    extensions       its optional features, and their `hooks`
    on_lead          is called when this process becomes the main one, since those before it have died
    """

    settings: Settings
    world: World
    run_dir: Path
    group: ProcessGroup
    mesh: Mesh
    models: Models
    state: RunState
    step_sync: StepSync
    collective: Collective
    scale: LossScale
    generators: RngStates
    exchange_states: ExchangeStates
    monitor: StepMonitor
    identity: dict[str, Any]
    accepted: Sequence[str]
    progress: Progress
    loop: RunLoop
    inspection: Inspection | None = None
    parts: LoopParts | None = None
    extensions: Sequence[Extension] = ()
    hooks: Hooks = field(default_factory=Hooks)
    on_lead: Callable[[], None] = lambda: None

    @property
    def device(self) -> torch.device:
        """The device on which this process computes."""
        return self.group.device

    @property
    def waits(self) -> bool:
        """Whether this process was started to join others, and has not joined them yet."""
        return self.group.monitor is not None and self.group.monitor.joins


def build_context(
    settings: Settings,
    loop: RunLoop,
    *,
    world: World,
    run_dir: Path,
    output: TextIO,
    identity: Mapping[str, Any] | None = None,
    resumed: Checkpoint | None = None,
    changes: Sequence[dict[str, Any]] = (),
    differences: Sequence[str] = (),
    accepted: Sequence[str] = (),
    color: bool = False,
    inspection: Inspection | None = None,
) -> RunContext:
    """Build the context of a run.

    Args:
        settings: of the script.
        loop: how the processes make steps.
        world: this process's place among the processes.
        run_dir: the run directory.
        output: where the progress line goes.
        identity: what the bits of the run depend on.
        resumed: the checkpoint from which it is resumed.
        changes: changes of the mathematics that this resume accepts.
        differences: what differs between machines and changes bits, in words.
        accepted: parts of the identity that may change.
        color: whether the progress line is colored.
        inspection: what a command watches.
    """
    axes = fill(wanted(settings.parallel), loop.training.size)
    assert axes is not None, "checked before"
    mesh = build_mesh(axes, loop.training)
    steps = resumed.steps if resumed else 0
    progress = Progress(steps_done=steps, resumed_at=steps, differences=list(differences))
    progress.changes += [*(resumed.about["changes"] if resumed else ()), *changes]
    step_sync = StepSync(settings.virtual_ranks, loop.group, speaks=mesh.is_leader, slices=mesh.context)
    models, state = Models(mesh, settings.virtual_ranks), RunState(run_dir, mesh, resumed)
    state.placed = models.modules
    scale, generators = LossScale(settings.precision), RngStates(loop.group.device)
    exchange_states = ExchangeStates(f"{settings.exchange} {settings.compress.kind}")
    rank = loop.group.rank if world.number is None else world.number  # a process that joins later is alone until then
    monitor = StepMonitor(run_dir, rank, output, live=world.terminal, columns=world.columns, color=color)
    context = RunContext(
        settings,
        world,
        run_dir,
        loop.group,
        mesh,
        models,
        state,
        step_sync,
        Collective(step_sync),
        scale,
        generators,
        exchange_states,
        monitor,
        dict(identity or {}),
        accepted,
        progress,
        loop,
        inspection,
    )
    loop.attach(context)  # before anything is loaded
    state.track(**{ATTRIBUTES: models.buffers.attributes, EXCHANGE: exchange_states, SCALE: scale, RANDOM: generators})
    return context
