"""States that contain DTensors: which process stores which part, and how loaded tensors are sharded.

A checkpoint describes whole tensors, under the names that the model has in one process, whichever processes stored
their parts. So every placement can load what any other has saved, and all give the same fingerprint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map_only

from unisono.checkpoint.safetensors_reader import LazyTensor
from unisono.distributed.process_group import from_local_like, is_dtensor, to_local
from unisono.tensors.codec import ShardPart
from unisono.torch_compat.modules import loads_plainly

if TYPE_CHECKING:
    from unisono.distributed.mesh import Mesh

LARGE = 2**20
"""Bytes from which the parameters of a model are loaded one at a time."""

PIECE = 2**24
"""Bytes of a tensor that are read at once when a model is filled."""


def box_of(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return shape and first index of the local part of a DTensor within the whole.

    None: the local part is no box, because processes hold summands, or rows that are not consecutive.
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # half a second

    if any(placement.is_partial() for placement in tensor.placements):
        return None
    shape, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return shape, start


def simple(state: Any, mesh: Mesh) -> Any:
    """Return the state with every DTensor that cannot be stored as boxes gathered. All processes call this together."""

    def gathered(tensor: Any) -> Any:
        return tensor.detach().full_tensor() if is_dtensor(tensor) and not _in_boxes(tensor, mesh) else tensor

    return tree_map_only(torch.Tensor, gathered, state)


def _in_boxes(tensor: Any, mesh: Mesh) -> bool:
    names = tensor.device_mesh.mesh_dim_names or ("",)
    return set(names) <= set(mesh.axes._fields) and not any(placement.is_partial() for placement in tensor.placements)


def local_part(tensor: Any, mesh: Mesh) -> ShardPart | None:
    """Return the part of a DTensor that this process holds; None for a tensor that is not sharded.

    Of the processes that hold the same part, the first one stores it.
    """
    if not is_dtensor(tensor):
        return None
    box, axes, here = box_of(tensor), tensor.device_mesh.mesh_dim_names, tensor.device_mesh.get_coordinate()
    assert box is not None
    copies = [number for number, placement in zip(here, tensor.placements, strict=True) if placement.is_replicate()]
    copies += [getattr(mesh, axis).rank for axis in mesh.axes._fields if axis not in axes]
    return ShardPart(to_local(tensor.detach()), None if any(copies) else box[1])


def gather_tensor(value: Any) -> Any:
    """Return a DTensor as a whole tensor, and any other value as it is. All processes call this together."""
    return value.full_tensor() if is_dtensor(value) else value


def gather_state(state: Any, *, keep: bool) -> Any:
    """Return the state with every DTensor whole, in memory of the CPU. All processes call this together.

    Args:
        state: The state.
        keep: False: this process only takes part in the gathering. DTensors become None.
    """

    def gather(tensor: Any) -> Any:
        if not is_dtensor(tensor):
            return tensor
        full = tensor.detach().full_tensor()
        return full.cpu() if keep else None

    return tree_map_only(torch.Tensor, gather, state)


def tied(state: dict[str, Any], model: torch.nn.Module) -> dict[str, Any]:
    """Return the gathered state of a model with tied weights as one tensor again."""
    first: dict[int, str] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(p), name) != name and name in state and first[id(p)] in state:
            state[name] = state[first[id(p)]]
    return state


def load_module(model: torch.nn.Module, state: Mapping[str, Any]) -> None:
    """Load the saved state of a model, each tensor sharded as it is in the model.

    Large parameters are read one at a time, after all others: in the model's load_state_dict they get the values that
    they have. A model that takes part in loading (with a load_state_dict of its own, or a hook) gets the whole state.

    Raises:
        RuntimeError: Names or shapes differ.
    """
    own = model.state_dict()
    late = (
        {name for name, now in own.items() if _is_loaded_late(state.get(name), now)}
        if all(map(loads_plainly, model.modules()))
        else set()
    )
    model.load_state_dict(
        {name: own[name] if name in late else read(shard_like(value, own.get(name))) for name, value in state.items()}
    )
    with torch.no_grad():
        for name in late:
            own[name].copy_(shard_like(state[name], own[name]))


def fill_module(model: torch.nn.Module, values: Mapping[str, Any]) -> Iterator[int]:
    """Copy values into a placed model: each process reads only its part, PIECE by PIECE. Yield the bytes of each piece.

    Args:
        model: The model, whole or divided.
        values: Tensors and LazyTensors by the names of its state_dict. Names that this process has no part of are
            left out; so are parts of the model without a value.
    """
    done = set()
    for name, now in model.state_dict().items():
        here = to_local(now) if isinstance(now, torch.Tensor) else None
        if name not in values or here is None or (here.data_ptr(), here.shape) in done:  # of tied weights the first
            continue
        done.add((here.data_ptr(), here.shape))
        box = box_of(now) if is_dtensor(now) else (tuple(now.shape), (0,) * now.dim())
        value = values[name]
        with torch.no_grad():
            if box is None or not isinstance(value, LazyTensor) or not now.dim():
                now.copy_(shard_like(value, now))
                yield here.nbytes
                continue
            (rows, *shape), (first, *start) = box
            step = max(1, PIECE * max(rows, 1) // max(here.nbytes, 1))
            for begin in range(0, rows, step):
                size = min(step, rows - begin)
                here[begin : begin + size].copy_(value.box([first + begin, *start], [size, *shape]))
                yield size * here.nbytes // rows


def _is_loaded_late(value: Any, now: Any) -> bool:
    fits = isinstance(value, LazyTensor) and isinstance(now, torch.Tensor) and value.shape == now.shape
    return fits and now.nbytes >= LARGE


def apart(state: Mapping[str, Any], thing: Any) -> Mapping[str, Any]:
    """Return the saved state of an optimizer with each tensor sharded as in `thing`; that of others is read."""
    if isinstance(thing, torch.optim.Optimizer):
        params = dict(enumerate(p for group in thing.param_groups for p in group["params"]))

        def shard(number: int, values: Mapping[str, Any]) -> dict[str, Any]:
            return {name: shard_like(value, params.get(number)) for name, value in values.items()}

        return read({**state, "state": {number: shard(number, values) for number, values in state["state"].items()}})
    return read(state)


def read(state: Any) -> Any:
    """Return the state with every LazyTensor read as a whole."""
    return tree_map_only(LazyTensor, lambda tensor: tensor.whole(), state)


def shard_like(value: Any, model: Any) -> Any:
    """Return a tensor sharded as `model` is; as it is if it has another shape, and whole if `model` is whole."""
    stored = isinstance(value, (torch.Tensor, LazyTensor)) and not is_dtensor(value)
    if not (is_dtensor(model) and stored and value.shape == model.shape):
        return value.whole() if isinstance(value, LazyTensor) else value
    box = box_of(model)
    if isinstance(value, LazyTensor) and box is not None:  # read only the local part
        shape, start = box
        return from_local_like(value.box(start, shape).to(model.to_local().device), model)
    from torch.distributed.tensor import distribute_tensor  # half a second

    whole = value.whole() if isinstance(value, LazyTensor) else value
    on_device = whole.to(model.to_local().device)
    return distribute_tensor(on_device, model.device_mesh, model.placements, src_data_rank=None)
