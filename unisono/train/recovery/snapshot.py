"""Snapshots of the state of a process: packed into flat memory that can be sent, and restored from it.

    still    frozen parameters                                                sent again after a write to one of them
    moving   trained parameters, buffers, and the tensors of optimizers       sent after every step
             and other objects
    plain    numbers and strings of these objects (a learning rate)           the same on all processes of the axis

Of a tensor that is sharded over several processes, a snapshot holds the local part. Tensors of optimizers have the
names that a checkpoint gives them (tensors/codec.py), and are restored through the optimizer's own load_state_dict. So
state that an optimizer creates at its first step is part of later snapshots, and a new process, whose optimizer has no
such state yet, creates it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map_only

from unisono.distributed.process_group import from_local_like, is_dtensor, to_local
from unisono.errors import LoopError
from unisono.tensors.codec import TensorTable, decode, encode
from unisono.tensors.flat import FlatTensors
from unisono.tensors.spec import TensorSpec
from unisono.train.modules.buffer_sync import version
from unisono.train.state.resume import keep_dtypes
from unisono.train.state.run_state import LAYOUT, RANDOM

PART = "~part"
"""Marks the local part of a sharded tensor: {PART: the local part, LIKE: the number of a weight sharded alike}."""

LIKE = "~like"


class Snapshot(NamedTuple):
    """The state after `step` steps. `names`: the names of the last tensors of `moving`. `plain` is by object."""

    step: int
    still: FlatTensors
    moving: FlatTensors
    names: Sequence[str] = ()
    plain: Mapping[str, Any] = {}

    @classmethod
    def of(cls, step: int, still: Any, moving: Any, names: Sequence[str], plain: Mapping[str, Any]) -> Snapshot:
        """Return a snapshot whose tensors were decoded as pairs (specs, data)."""
        still, moving = (FlatTensors([TensorSpec(*spec) for spec in specs], data) for specs, data in (still, moving))
        return cls(step, still, moving, names, plain)


class LiveState(NamedTuple):
    """The live state: the tensors themselves, not a copy.

    stands  for each frozen parameter, its identity and the number of writes to it
    """

    still: list[torch.Tensor]
    moving: list[torch.Tensor]
    names: list[str]
    plain: dict[str, Any]
    stands: list[tuple[int, int, int, int]]

    def seen(self) -> tuple[Any, ...]:
        """Return a key that changes if tensors were replaced, or if a frozen parameter was written to."""
        return self.stands, [TensorSpec.of(t) for t in self.still], [TensorSpec.of(t) for t in self.moving]


def live_state(tracked: Mapping[str, Any]) -> LiveState:
    """Return the live state of these objects, by name: models, optimizers, anything with a state_dict."""
    with torch.no_grad():  # without gradients, DTensors return their local part without a copy
        weights = _weights(tracked)
        places = _places(weights)
        tensors = TensorTable()
        plain = {
            name: encode(tree_map_only(torch.Tensor, lambda t: _marked(t, places), thing.state_dict()), name, tensors)
            for name, thing in _others(tracked).items()
        }
        frozen = [t for t in weights if _is_still(t)]
        still, moving = [to_local(t) for t in frozen], [to_local(t) for t in weights if not _is_still(t)]
        # a DTensor may return a new object for its local part each time, so the identity of that object means nothing
        stands = [(id(t), version(t), here.data_ptr(), version(here)) for t, here in zip(frozen, still, strict=True)]
        return LiveState(still, moving + list(tensors.values()), list(tensors), plain, stands)


def restore(parcel: Snapshot, tracked: Mapping[str, Any], device: torch.device) -> None:
    """Restore the state of a snapshot.

    Args:
        parcel: the snapshot.
        tracked: the objects to restore, by name.
        device: the device of the run.
    """
    with torch.no_grad():
        layout = tracked.get(LAYOUT)
        if layout is not None:  # first: requires_grad sorts parameters into `still` and `moving`
            layout.load_state_dict(decode(parcel.plain[LAYOUT], {}))
            layout.apply()
        weights = _weights(tracked)
        here = [t for t in weights if _is_still(t)] + [t for t in weights if not _is_still(t)]
        bytes_ = [*zip(parcel.still.specs, parcel.still.views(), strict=True)]
        bytes_ += zip(parcel.moving.specs, parcel.moving.views(), strict=True)
        for tensor, (_, view) in zip(here, bytes_, strict=False):
            to_local(tensor).copy_(view)
        home: Callable[[str], Any] = lambda kind: "cpu" if kind == "cpu" else device  # noqa: E731
        copies = [view.to(home(each.device), copy=True) for each, view in bytes_[len(here) :]]
        tensors = dict(zip(parcel.names, copies, strict=True))
        for name, thing in _others(tracked).items():
            state = _laid(decode(parcel.plain[name], tensors), weights)
            if layout is not None and hasattr(thing, "param_groups"):
                layout.fit(name, thing)
            thing.load_state_dict(state)
            if isinstance(thing, torch.optim.Optimizer):
                keep_dtypes(thing, state)


def _weights(tracked: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return every parameter and every buffer, once."""
    models = [thing for thing in tracked.values() if isinstance(thing, torch.nn.Module)]
    return list({id(t): t for model in models for t in (*model.parameters(), *model.buffers())}.values())


def _is_still(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad


def _others(tracked: Mapping[str, Any]) -> dict[str, Any]:
    """Return all objects but models and random generators.

    Several virtual ranks seed the generators again at each step.
    """
    return {name: thing for name, thing in tracked.items() if name != RANDOM and not isinstance(thing, torch.nn.Module)}


Places = Mapping[tuple[Any, ...], int]
"""The placements of weights, each with the number of the first weight that has it."""


def _place(tensor: Any) -> tuple[Any, ...]:
    return tensor.shape, tensor.placements, tensor.device_mesh


def _places(weights: Sequence[torch.Tensor]) -> Places:
    found: dict[tuple[Any, ...], int] = {}
    for number, weight in enumerate(weights):
        if is_dtensor(weight):
            found.setdefault(_place(weight), number)
    return found


def _marked(tensor: torch.Tensor, places: Places) -> Any:
    """Return a tensor of a state; for a DTensor, its local part and the number of a weight that is sharded alike."""
    if not is_dtensor(tensor):
        return tensor
    if (place := _place(tensor)) not in places:
        raise LoopError(
            "parallel.replicate_shards cannot copy an optimizer's state.",
            f"It has a tensor of shape {tuple(tensor.shape)} that is sharded as no parameter is, so another process "
            "could not restore its placement.",
            "--set parallel.replicate_shards=false",
        )
    return {PART: to_local(tensor), LIKE: places[place]}


def _laid(state: Any, weights: Sequence[torch.Tensor]) -> Any:
    """Return a state in which local parts are DTensors again."""
    if isinstance(state, dict):
        if PART in state:
            return from_local_like(state[PART], weights[state[LIKE]])
        return {key: _laid(value, weights) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(_laid(value, weights) for value in state)
    return state
