"""The private functions of torch.distributed that Unisono uses. No other module uses such names.

The tests have run with these names in torch 2.10, 2.11 and 2.13. After an update of torch, check this file first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh


def default_store() -> dist.Store:
    """Return the store with which torch's default group was made. torch has no public way to get it."""
    store: dist.Store = distributed_c10d._get_default_store()  # noqa: SLF001
    return store


def set_timeout(timeout: timedelta, group: dist.ProcessGroup | None = None) -> None:
    """Set how long the collectives of a group wait. Connecting needs another timeout than collectives."""
    distributed_c10d._set_pg_timeout(timeout, group)  # noqa: SLF001


def group_count() -> int:
    """Return the counter by which torch names the next group."""
    count: int = distributed_c10d._world.group_count  # noqa: SLF001
    return count


def set_group_count(count: int) -> None:
    """Set the counter by which torch names the next group. Processes find each other under that name."""
    distributed_c10d._world.group_count = count  # noqa: SLF001


def abort_default_group() -> None:
    """End all collectives of the default group, as NCCL can."""
    distributed_c10d._abort_process_group()  # noqa: SLF001


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the name of the back end that a group uses for a kind of device; "" if it has none."""
    try:
        name: str = group._get_backend(device).name()  # noqa: SLF001
    except RuntimeError:
        return ""
    return name


def replace_groups(meshes: Iterable[DeviceMesh], groups: Mapping[str, dist.ProcessGroup]) -> None:
    """Let torch's meshes, of which the first is the root or a part of it, use other groups.

    A mesh refers to groups by name. Modules that hold the mesh (FSDP2's, DTensors) then use the new groups.

    Args:
        meshes: the meshes to change.
        groups: the group of each axis, by the name of the axis.
    """
    meshes = list(meshes)
    registry = {group.group_name: group for group in groups.values()}
    meshes[0]._get_root_mesh()._pg_registry = registry  # type: ignore[assignment]  # noqa: SLF001
    for mesh in meshes:
        mesh._dim_group_names = [groups[name].group_name for name in mesh.mesh_dim_names or ()]  # noqa: SLF001
