"""States of things that lie over several processes: made whole to be saved, and taken apart again when they are loaded.

A checkpoint holds whole tensors under the names that the model has in one process, so any placement can load what any
other has saved, and the fingerprint is the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from unisono.world.collectives import lies_apart


def whole_here(value: Any) -> Any:
    """A tensor, whole on every process; anything else as it is. All processes must call this together."""
    return value.full_tensor() if lies_apart(value) else value


def whole(state: Any, *, keep: bool) -> Any:
    """A state with every tensor whole, in the CPU's memory if it was not. All processes must call this together.

    keep  False: this process only helps the others; None stands for what was apart
    """

    def gather(tensor: Any) -> Any:
        if not lies_apart(tensor):
            return tensor
        full = tensor.detach().full_tensor()
        return full.cpu() if keep else None

    return tree_map_only(torch.Tensor, gather, state)


def tied(state: dict[str, Any], model: torch.nn.Module) -> dict[str, Any]:
    """A model's whole state in which what the model ties is one tensor again: parts were gathered name by name."""
    first: dict[int, str] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(p), name) != name and name in state and first[id(p)] in state:
            state[name] = state[first[id(p)]]
    return state


def apart(state: Mapping[str, Any], thing: Any) -> Mapping[str, Any]:
    """The saved state of a model or an optimizer, each tensor lying as it lies in `thing`."""
    if isinstance(thing, torch.nn.Module):
        now = thing.state_dict()
        return {name: _like(value, now.get(name)) for name, value in state.items()}
    if isinstance(thing, torch.optim.Optimizer):
        params = dict(enumerate(p for group in thing.param_groups for p in group["params"]))

        def lay(number: int, of: Mapping[str, Any]) -> dict[str, Any]:
            return {name: _like(value, params.get(number)) for name, value in of.items()}

        return {**state, "state": {number: lay(number, of) for number, of in state["state"].items()}}
    return state


def _like(value: Any, model: Any) -> Any:
    if not lies_apart(model) or not isinstance(value, torch.Tensor) or value.shape != model.shape:
        return value
    from torch.distributed.tensor import distribute_tensor  # half a second

    on_device = value.to(model.to_local().device)
    return distribute_tensor(on_device, model.device_mesh, model.placements, src_data_rank=None)
