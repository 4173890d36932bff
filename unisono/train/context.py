"""The context of a run: the objects that its parts share. `Run` passes it down; no part refers to `Run`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO

import torch

from unisono.checkpoint.load import Checkpoint
from unisono.checkpoint.signature import Sign, signing, unsigned
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
from unisono.train.evaluation.model_call import Evaluation
from unisono.train.extensions import Extension, Hooks
from unisono.train.modules.models import Models
from unisono.train.state.noise_average import NoiseScale
from unisono.train.state.run_progress import Progress
from unisono.train.state.run_state import ATTRIBUTES, EXCHANGE, NOISE, RANDOM, SCALE, RunState
from unisono.train.step_sync import StepSync

if TYPE_CHECKING:
    from unisono.train.batches.batch_source import BatchSource
    from unisono.train.gradient_sync import GradientSync
    from unisono.train.guarantees.loop_checks import LoopChecks


@dataclass(frozen=True, slots=True)
class LoopParts:
    """The parts of a loop that an extension may observe: its micro-batches, its gradients, its checks."""

    source: BatchSource
    sync: GradientSync
    checks: LoopChecks


class RunLoop(Protocol):
    """The type of loop that runs the steps: one object for each run, chosen by its exchange (train/loop.py).

    group        all processes of the run, with their ranks
    training     the processes whose mesh trains together
    is_uniform   whether all processes have the same role
    saves        whether this process takes part in checkpoints
    """

    group: ProcessGroup
    training: ProcessGroup
    is_uniform: bool
    saves: bool

    def attach(self, context: RunContext) -> None:
        """Add the objects of this loop to the context, before anything is loaded."""
        ...

    def as_one(self, models: Sequence[torch.nn.Module]) -> AbstractContextManager[None]:
        """Return a block in which these models are equal on all processes."""
        ...

    def refresh(self, *, states: bool = False) -> None:
        """Get the part of the model that other processes hold, and with `states` also of its optimizers."""
        ...

    def finish(self, context: RunContext) -> None:
        """Finish training after the script has returned."""
        ...

    def end_early(self, context: RunContext) -> None:
        """Finish the last step of a loop that was left with break, after its update."""
        ...

    def wake(self) -> None:
        """End a wait for messages, because a signal arrived."""
        ...

    def promise(self, context: RunContext) -> tuple[str, str] | None:
        """Return the promise of the loop and its reason; None if both follow from the exchange and the layout."""
        ...

    def result(self) -> Mapping[str, Any]:
        """Return entries of result.json."""
        ...


@dataclass(frozen=True, slots=True)
class Inspection:
    """The observer that a command like `unisono check` adds to a run.

    build        builds the extension that observes the run
    on_rank      is called with a property's name when the script reads its rank or the number of processes
    on_evaluate  is called with the arguments of `run.evaluate`, before the evaluation
    on_log       is called with the values of `run.log`
    """

    build: Callable[[RunContext, LoopParts], Extension]
    on_rank: Callable[[str], None] | None = None
    on_evaluate: Callable[[RunContext, Evaluation], None] | None = None
    on_log: Callable[[RunContext, Mapping[str, Any]], None] | None = None


@dataclass(slots=True)
class RunContext:
    """The objects that the parts of a run share.

    settings         the script's settings for this run
    world            this process's place in the run
    run_dir          the run directory
    group            all processes of the run
    mesh             the mesh of the processes that train together
    models           the placed models
    state            the tracked objects, and the checkpoint from which the run was resumed
    step_sync        adds up sums and flags, and checks that all ranks make the same call
    collective       runs collectives between two steps
    scale            the loss scale of fp16
    noise            the gradient noise scale
    generators       the random number generators
    exchange_states  the state that exchanges keep between steps
    monitor          the progress line and the timeline
    identity         the facts on which the bits of the run depend, by name
    accepted         parts of the identity that may change in this resume
    progress         the state that changes from step to step
    loop             the type of loop that runs the steps
    inspection       the observer of a command; None in an ordinary run
    parts            the parts of a step, once the loop is built
    extensions       the optional features, and their `hooks`
    on_lead          is called when this process becomes the main one, because the earlier ones have died
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
    noise: NoiseScale
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
        """Whether this process was started to join a run, and has not joined it yet."""
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
        settings: the script's settings.
        loop: the type of loop that runs the steps.
        world: the place of this process among the processes.
        run_dir: the run directory.
        output: the output for the progress line.
        identity: the facts on which the bits of the run depend.
        resumed: the checkpoint from which the run is resumed.
        changes: changes of bits that this resume accepts.
        differences: differences between machines that change bits, as text.
        accepted: parts of the identity that may change.
        color: whether the progress line is colored.
        inspection: the observer of a command.
    """
    axes = fill(wanted(settings.parallel), loop.training.size)
    assert axes is not None, "checked before"
    mesh = build_mesh(axes, loop.training)
    steps = resumed.steps if resumed else 0
    progress = Progress(steps_done=steps, resumed_at=steps, differences=list(differences))
    progress.changes += [*(resumed.about["changes"] if resumed else ()), *changes]
    step_sync = StepSync(settings.virtual_ranks, loop.group, speaks=mesh.is_leader, slices=mesh.context)
    models, state = Models(mesh, settings.virtual_ranks), RunState(run_dir, mesh, resumed, _signer(settings, world))
    state.placed = models.modules
    state.options.follows = any(change["field"] != "layout" for change in changes)
    scale, noise, generators = LossScale(settings.precision), NoiseScale(), RngStates(loop.group.device)
    exchange_states = ExchangeStates(f"{settings.exchange} {settings.compress.kind}")
    rank = loop.group.rank if world.number is None else world.number  # a process that joins later is alone at first
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
        noise,
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
    state.track(**{NOISE: noise})
    return context


def _signer(settings: Settings, world: World) -> Sign:
    """Return the function that signs checkpoints, as the settings say."""
    return unsigned if settings.secure.sign is None else signing(Path(world.folder, settings.secure.sign))
