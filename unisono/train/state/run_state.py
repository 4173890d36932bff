"""The state of a run: what is tracked, how it is saved between two steps, and how a resume finds it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from unisono import phases
from unisono.checkpoint import load as loading
from unisono.checkpoint.save import CheckpointSaver, packed
from unisono.checkpoint.saved_weights import SavedWeights
from unisono.checkpoint.sharded_state import apart, gather_state, load_module, local_part, simple, tied
from unisono.checkpoint.signature import Sign, unsigned
from unisono.checkpoint.storage import Storage, storage_of
from unisono.data import alignment
from unisono.distributed.mesh import Mesh
from unisono.distributed.process_group import is_dtensor
from unisono.errors import CheckpointError, LoopError, UnisonoError
from unisono.tensors.codec import TensorTable
from unisono.train.modules.buffer_sync import version
from unisono.train.pipelining.stage_state import LocalPart
from unisono.train.state.parameter_layout import ParameterLayout
from unisono.train.state.resume import check_kinds, check_optimizer, keep_dtypes
from unisono.train.state.tracked_options import TrackedOptions

if TYPE_CHECKING:
    from unisono.config import CheckpointSettings

RANDOM = "random_numbers"
"""The entry of a checkpoint with the generators of random numbers. The run tracks it by itself, like those below."""

SCALE = "loss_scale"
"""The entry with the loss scale of fp16."""

NOISE = "gradient_noise"
"""The entry with the averages of the gradient noise scale."""

EXCHANGE = "exchange_state"
"""The entry with the state that exchanges keep from step to step."""

LAYOUT = "layout"
"""The entry with the order of the parameters, which of them train, and the groups of optimizers."""

ATTRIBUTES = "module_attributes"
"""The entry with Python attributes of modules, and with buffers that their state_dict leaves out."""


class DividedState(Protocol):
    """State of which each process holds a part: stages of a pipeline, or parameter servers.

    speaks  whether this process sends its part when the state is gathered
    """

    @property
    def speaks(self) -> bool: ...

    def whole(self, thing: Any, state: Any, shelf: LocalPart | None = None) -> Any: ...

    def part(self, thing: Any, state: Mapping[str, Any]) -> Mapping[str, Any]: ...


class RunState:
    """The objects that the script tracks, and the checkpoint from which this run resumes, if any."""

    def __init__(self, run_dir: Path, mesh: Mesh, resumed: loading.Checkpoint | None, sign: Sign = unsigned) -> None:
        self.run_dir, self.mesh, self.group, self.resumed = run_dir, mesh, mesh.world, resumed
        self.saver = CheckpointSaver(mesh.world)
        self._sign = sign
        self._place: Storage | None = None
        self.tracked: dict[str, Any] = {}
        self.stages: DividedState | None = None
        """Gathers and divides state, if pipeline stages or servers hold a part of the parameters each."""
        self.options = TrackedOptions()
        self.own: Mapping[str, Mapping[str, Any]] = {}
        """State of this process's site alone, by name (local_sgd/sites.py). It overrides the state of all sites."""
        self._sealed: tuple[bool, list[tuple[torch.Tensor, int]]] | None = None
        self.saved_after: int | None = resumed.steps if resumed else None
        self.placed: Sequence[torch.nn.Module] = ()
        self.layout = ParameterLayout(self._named, self._optimizers, lambda: self.stages is None)
        self.track(**{LAYOUT: self.layout})

    @property
    def models(self) -> dict[str, torch.nn.Module]:
        return {name: thing for name, thing in self.tracked.items() if isinstance(thing, torch.nn.Module)}

    def model_named(self, name: str) -> torch.nn.Module:
        """Return a tracked model; with the name "" the only one. Raise LoopError if there is none, or several."""
        models = self.models
        if not name and len(models) == 1:
            return next(iter(models.values()))
        if name not in models:
            known = ", ".join(models) or "none"
            error = f"The run tracks no model {name!r}." if name else f"The run tracks {len(models)} models."
            raise LoopError(error, f"Its models are {known}.", f"--model {next(iter(models), 'NAME')}")
        return models[name]

    def _named(self) -> dict[str, torch.nn.Parameter]:
        return {f"{i}/{name}": p for i, model in enumerate(self.placed) for name, p in model.named_parameters()}

    def _optimizers(self) -> dict[str, Any]:
        return {name: thing for name, thing in self.tracked.items() if hasattr(thing, "param_groups")}

    def track(self, **things: Any) -> None:
        """See Run.track."""
        for name, thing in things.items():
            if name in self.tracked:
                raise CheckpointError(
                    f"Cannot track two objects by the name {name!r}.",
                    "Each name is one entry of a checkpoint.",
                    "rename one of them.",
                )
            if isinstance(thing, dict):
                thing = KeptState(thing)
            if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
                raise CheckpointError(
                    f"Cannot track {name!r}, a {type(thing).__name__}.",
                    "It has no state_dict() and load_state_dict().",
                    f"run.track({name}=kept), with kept = {{...}}, a dict that the loop changes; or give it both.",
                )
            self.tracked[name] = thing
            self.options.note(name, thing)
            if self.resumed is not None:
                self._restore(name, thing, self.resumed)

    def take(self, checkpoint: loading.Checkpoint) -> None:
        """Load everything that is tracked from a checkpoint, between two steps."""
        for name, thing in self.tracked.items():
            self._restore(name, thing, checkpoint)

    def _restore(self, name: str, thing: Any, checkpoint: loading.Checkpoint) -> None:
        if name not in checkpoint.states:
            there = checkpoint.states.keys() - {RANDOM, SCALE, NOISE, EXCHANGE, ATTRIBUTES, LAYOUT}
            raise CheckpointError(
                f"Cannot resume {name!r}: it is not in {checkpoint.path}.",
                f"The checkpoint holds {', '.join(sorted(there)) or 'nothing'}.",
                "track the same names as the run that saved it, or start a new run in another --run-dir.",
            )
        state = checkpoint.states[name]
        with refuse_unfit(name, thing, checkpoint.path):
            if name in self.own:
                state = {**state, **self.own[name]}
            if isinstance(thing, torch.optim.lr_scheduler.LRScheduler):
                state = self.options.schedules.adapt(name, thing, state)
                check_kinds(state, thing.state_dict())
            if self.stages is not None:
                state = self.stages.part(thing, state)
            if hasattr(thing, "param_groups"):
                self.layout.fit(name, thing)
            if isinstance(thing, torch.optim.Optimizer):
                check_optimizer(thing, state)
            if isinstance(thing, torch.nn.Module):
                load_module(thing, state)
            else:
                thing.load_state_dict(state := apart(state, thing))
            if isinstance(thing, torch.optim.Optimizer):
                keep_dtypes(thing, state)
                alignment.align_(v for of in thing.state.values() for v in of.values() if isinstance(v, torch.Tensor))

    def begin(self) -> list[tuple[str, Any, Any]]:
        """Restore the parameter layout, and the learning rates of schedules made longer, after everything is loaded.

        Options of optimizers and schedules follow the settings, if a change of these was accepted.

        Returns:
            (name, saved value, current value) of everything that differs from the checkpoint and changes bits.
        """
        with refuse_unfit(LAYOUT, self.layout, self.resumed.path if self.resumed is not None else self.run_dir):
            schedules = self.options.schedules
            changes = [*schedules.changes, *self.layout.apply()]
            if self.resumed is not None:
                self.options.apply(self.tracked, self.resumed.about.get("options", {}))
            schedules.set_rates(self.tracked.values())
            return changes

    def check_whole(self, placed: Sequence[torch.nn.Module], steppers: Sequence[Any]) -> None:
        """Raise CheckpointError if a placed model, an optimizer or a schedule that was stepped is not tracked."""
        covered = {id(t) for model in self.models.values() for t in (*model.parameters(), *model.buffers())}
        sources = [thing for thing in self.tracked.values() if isinstance(thing, SavedWeights)]
        forgotten = [
            m
            for m in placed
            if any(id(t) not in covered for t in (*m.parameters(), *m.buffers()))
            and not any(source.holds(m) for source in sources)
        ]
        forgotten += [
            s for s in steppers if hasattr(s, "state_dict") and not any(s is t for t in self.tracked.values())
        ]
        missing = set(self.resumed.states) - set(self.tracked) if self.resumed else set()
        if missing:
            raise CheckpointError(
                f"Cannot resume all of {self.resumed.path if self.resumed else ''}.",
                f"It holds {', '.join(sorted(missing))} as well, which this run does not track.",
                "track the same names as the run that saved it.",
            )
        if forgotten:
            names = [type(thing).__name__ for thing in forgotten]
            words = ", ".join(f"{_word(thing)}=..." for thing in forgotten)
            raise CheckpointError(
                "The state of the run is not tracked completely.",
                f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} part of it but not tracked: "
                "a resume would silently begin with a new one.",
                f"run.track({words}) before the loop.",
            )

    def seal(self, *, half_done: bool) -> None:
        """Record the state when the loop is left with break; `half_done`: in the middle of a step.

        The last checkpoint is written when the script returns, and must not hold what the script changes until then.
        """
        self._sealed = (half_done, self._weights())
        self.tracked[RANDOM].hold()

    def touched_since_break(self, *, one_stream: bool) -> str:
        """Describe why the state differs from that after the last step; "": it does not."""
        if self._sealed is None:
            return "an unknown one: the loop was left without being closed"
        half_done, weights = self._sealed
        if half_done and one_stream:  # its random numbers are drawn
            return "that of a step which was left half done"
        if [(id(t), seen) for t, seen in weights] != [(id(t), seen) for t, seen in self._weights()]:
            return "one with weights that the script changed after its loop"
        return ""

    def _weights(self) -> list[tuple[torch.Tensor, int]]:
        return [(t, version(t)) for model in self.models.values() for t in [*model.parameters(), *model.buffers()]]

    # -- saving

    def save(self, steps: int, about: dict[str, Any], how: CheckpointSettings, *, in_background: bool = False) -> None:
        """Save the state after `steps` steps. All processes call this; all raise if it cannot be saved.

        Args:
            steps: number of steps that are done.
            about: further entries of the checkpoint.
            how: the settings.
            in_background: return when everything is copied, and write later, if the settings allow that.
        """
        with phases.phase("checkpoint"):
            self.settle()  # before anything is copied: there is one memory, and one writer
            self.layout.check_alike(self.group)
            main = self.group.rank == 0
            tensors = TensorTable(keeps_whole=main, part_of=partial(local_part, mesh=self.mesh))
            states = self._parts(tensors)
            state = packed(states, {**about, "models": sorted(self.models)}, tensors)
            keep, wait = (how.keep, how.keep_every), not (in_background and how.async_save)
            if self._place is None:  # the first checkpoint: the one that the run resumed from is no longer read
                self._place = storage_of(self.run_dir, self._sign)
                loading.release(self.resumed.path) if self.resumed is not None else None
            self.saver.begin(self._place, steps, state, keep, wait=wait)
            self.saved_after = steps

    def settle(self) -> None:
        """Wait until the checkpoint in the background is written. All processes call this; all raise if it fails."""
        with phases.phase("checkpoint"):
            if not self.saver.settle():
                self.saved_after = None

    def _parts(self, tensors: TensorTable) -> dict[str, Any]:
        """Return the states of everything that is tracked, by name. Sharded tensors stay sharded."""
        stages = self.stages
        found = {name: thing.state_dict() for name, thing in self.tracked.items()}
        if stages is not None:  # the first process of those that share a stage gathers it
            states = {name: gather_state(state, keep=stages.speaks) for name, state in found.items()}
        else:
            states = {name: simple(state, self.mesh) for name, state in found.items()}
        for name in states.keys() & self.models.keys():
            states[name] = tied(states[name], self.models[name])
        if stages is not None:
            shelves = {name: LocalPart(tensors, name, stages.speaks) for name in states}
            return {n: stages.whole(self.tracked[n], state, shelves[n]) for n, state in states.items()}
        return states

    def _whole(self, things: Mapping[str, Any]) -> dict[str, Any]:
        """Return the states of these objects by name, whole on the main process. All processes call this."""
        states = {
            name: gather_state(thing.state_dict(), keep=self.group.rank == 0 or self.stages is not None)
            for name, thing in things.items()
        }
        for name in states.keys() & self.models.keys():
            states[name] = tied(states[name], self.models[name])
        if self.stages is not None:
            return {name: self.stages.whole(things[name], state) for name, state in states.items()}
        return states

    def fingerprint(self) -> str:
        """Return the SHA-256 of the weights and buffers of tracked models. All processes call this together."""
        divided = self.stages is not None or any(
            is_dtensor(p) for model in self.models.values() for p in model.parameters()
        )
        if self.stages is None and divided:  # gathers one tensor at a time, to save memory
            found = loading.fingerprint_of(
                {name: tied(model.state_dict(), model) for name, model in self.models.items()},
                lambda tensor: gather_state(tensor, keep=self.group.rank == 0),
            )
        else:
            found = loading.fingerprint_of(self._whole(self.models))
        return str(self.group.broadcast_object(found)) if divided else found


class KeptState:
    """A dict of plain values that the loop changes, such as the best loss so far."""

    def __init__(self, values: dict[Any, Any]) -> None:
        self.values = values

    def state_dict(self) -> dict[Any, Any]:
        return dict(self.values)

    def load_state_dict(self, state: Mapping[Any, Any]) -> None:
        self.values.clear()
        self.values.update(state)


@contextmanager
def refuse_unfit(name: str, thing: Any, path: Path) -> Iterator[None]:
    """Raise CheckpointError for any error of a block that loads a state: the state is data, and may be anything.

    Args:
        name: The name of the state.
        thing: The object that loads it.
        path: The checkpoint.
    """
    try:
        yield
    except UnisonoError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"Cannot load the state of {name!r} ({type(thing).__name__}) from {path}.",
            f"Its state does not fit: {str(error) or type(error).__name__}",
            "resume with the script that began the run, or start a new run in another --run-dir.",
        ) from error


def _word(thing: Any) -> str:
    if isinstance(thing, torch.nn.Module):
        return "model"
    return "optimizer" if hasattr(thing, "zero_grad") else "schedule"
