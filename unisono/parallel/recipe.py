"""The recipe: everything that is done to a model when it is placed, in the one order in which it fits together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from unisono.parallel.shard import Layer
    from unisono.parallel.tensor import Plan
    from unisono.settings import ParallelSettings
    from unisono.world.mesh import Mesh


def parallelize(model: nn.Module, mesh: Mesh, parallel: ParallelSettings, plan: Plan | None = None) -> list[Layer]:
    """Lay a model over the devices of the run, with the same content on every process. Returns what is gathered at
    once, if it is sharded.

    Each line may rely on what those before it have done: first who holds what, then how a layer computes with what it
    holds, and last what is gathered around it. (Each loads what it needs of torch when it is asked for.)
    """
    device = mesh.world.device
    if parallel.split > 1:
        from unisono.parallel.devices import devices_of
        from unisono.parallel.split import apply_split

        apply_split(model, devices_of(parallel, device), device, parallel.layers)
    elif parallel.threads > 1:
        from unisono.parallel.devices import devices_of
        from unisono.parallel.threads import apply_threads

        apply_threads(model, devices_of(parallel, device))
    else:
        model.to(device)
    mesh.world.share_([*model.parameters(), *model.buffers()])
    if mesh.tensor.size > 1:
        from unisono.parallel.tensor import apply_tensor

        across = mesh.torch_mesh("tensor")
        apply_tensor(model, across, plan, sequence=parallel.sequence, loss=parallel.loss)
    if parallel.recompute != "none":
        from unisono.parallel.recompute import apply_recompute

        apply_recompute(model, parallel.recompute, parallel.layers)
    if parallel.compile:
        from unisono.parallel.compiled import apply_compile

        apply_compile(model, parallel.layers)
    if mesh.shard.size > 1:
        from unisono.parallel.shard import apply_shard

        return apply_shard(model, mesh.torch_mesh("shard"), parallel, device)
    return []


def promise_of_placement(parallel: ParallelSettings) -> tuple[str, str] | None:
    """What is promised of the bits, and why, where a way of placing a model cannot keep them."""
    if parallel.threads > 1:
        return "tolerance", f"torch.nn.DataParallel cuts each micro-batch into {parallel.threads} pieces"
    return None
