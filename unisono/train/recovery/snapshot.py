"""What a resume needs of this process, as bytes: packed into flat memory that can travel, and put back from it.

    still    parameters that do not train                                     travel again when one was written to
    moving   parameters that do, buffers, and what optimizers and others      travel after every step
             keep in tensors
    plain    numbers and words beside them (a learning rate)                  the same on all processes of the axis

Of a tensor that lies over several processes it is the part that lies here. What optimizers hold goes by the names that
a checkpoint gives it (tensors/codec.py), and comes back through their own load_state_dict: so a state that is
made at an optimizer's first step is there from then on, and one that a new process has never seen is made anew.
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
"""Marks a tensor that is a part of one that lies over several processes: {PART: it, LIKE: the weight it lies like}."""

LIKE = "~like"


class Snapshot(NamedTuple):
    """What was here after `step` steps. The last tensors of `moving` have these names in `plain`, by thing."""

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
    """What is here now: the tensors themselves, and not a copy.

    stands  of what stands still, which tensors these are and how often they were written to
    """

    still: list[torch.Tensor]
    moving: list[torch.Tensor]
    names: list[str]
    plain: dict[str, Any]
    stands: list[tuple[int, int, int, int]]

    def seen(self) -> tuple[Any, ...]:
        """Return a key that changes when there are other tensors, or a frozen parameter was written to."""
        return self.stands, [TensorSpec.of(t) for t in self.still], [TensorSpec.of(t) for t in self.moving]


def live_state(tracked: Mapping[str, Any]) -> LiveState:
    """Return the live state of these objects, by name: models, optimizers, anything with a state_dict."""
    with torch.no_grad():  # DTensors then give what lies here without making a copy of themselves
        weights = _weights(tracked)
        places = _places(weights)
        tensors = TensorTable()
        plain = {
            name: encode(tree_map_only(torch.Tensor, lambda t: _marked(t, places), thing.state_dict()), name, tensors)
            for name, thing in _others(tracked).items()
        }
        frozen = [t for t in weights if _is_still(t)]
        still, moving = [to_local(t) for t in frozen], [to_local(t) for t in weights if not _is_still(t)]
        # a DTensor may give another object for what lies here each time, so that one's identity says nothing
        stands = [(id(t), version(t), here.data_ptr(), version(here)) for t, here in zip(frozen, still, strict=True)]
        return LiveState(still, moving + list(tensors.values()), list(tensors), plain, stands)


def restore(parcel: Snapshot, tracked: Mapping[str, Any], device: torch.device) -> None:
    """Restore the state of a snapshot; `device`: of the run."""
    with torch.no_grad():
        layout = tracked.get(LAYOUT)
        if layout is not None:  # first: what is still, and what moves, is sorted by what trains
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
    """All but models; and without the generators of random numbers, which several virtual ranks seed anew each step."""
    return {name: thing for name, thing in tracked.items() if name != RANDOM and not isinstance(thing, torch.nn.Module)}


Places = Mapping[tuple[Any, ...], int]
"""How weights lie over processes, and the number of the first one that lies so."""


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
