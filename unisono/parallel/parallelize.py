"""The recipe: everything that is done to a model when it is placed, in the one order in which it fits together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from unisono.config.mesh_shape import layout
from unisono.errors import LoopError
from unisono.parallel.parallel_plan import ParallelPlan

if TYPE_CHECKING:
    from unisono.config import ParallelSettings
    from unisono.config.mesh_shape import MeshShape
    from unisono.distributed.mesh import Mesh
    from unisono.parallel.fsdp.fsdp import ShardedLayer
    from unisono.parallel.tensor_parallel.tensor_parallel import Plan


def parallelize(
    model: nn.Module, mesh: Mesh, parallel: ParallelSettings, plan: Plan | ParallelPlan | None = None
) -> list[ShardedLayer]:
    """Lay a model over the devices of the run, with the same content on every process. Returns what is gathered at
    once, if it is sharded.

    plan  how it is divided over the axis tensor: torch's styles by name, or somebody's own way

    Each line may rely on what those before it have done: first who holds what, then how a layer computes with what it
    holds, and last what is gathered around it. (Each loads what it needs of torch when it is asked for.)
    """
    device = mesh.world.device
    _check(model, plan)
    if mesh.tensor.size > 1 or mesh.shard.size > 1:
        _refuse_hooks(model)
    if parallel.model_parallel_devices > 1:
        from unisono.parallel.one_process.device_map import apply_device_map
        from unisono.parallel.one_process.devices import devices_of

        apply_device_map(model, devices_of(parallel, device), device, parallel.layer_classes)
    elif parallel.data_parallel_devices > 1:
        from unisono.parallel.one_process.data_parallel_threads import apply_data_parallel
        from unisono.parallel.one_process.devices import devices_of

        apply_data_parallel(model, devices_of(parallel, device))
    else:
        model.to(device)
    mesh.world.broadcast_([*model.parameters(), *model.buffers()])
    if mesh.tensor.size > 1:
        from unisono.parallel.tensor_parallel.tensor_parallel import apply_tensor

        across = mesh.torch_mesh("tensor")
        if isinstance(plan, ParallelPlan):
            plan.apply(model, across)
        else:
            apply_tensor(model, across, plan, sequence=parallel.sequence_parallel, loss=parallel.loss_parallel)
    if parallel.param_dtype != "fp32" and not parallel.compile:  # what is computed again is cast again
        from unisono.parallel.param_dtype import apply_param_dtype

        apply_param_dtype(model, parallel)
    if parallel.activation_checkpoint != "none":
        from unisono.parallel.activation_checkpoint import apply_activation_checkpoint

        apply_activation_checkpoint(model, parallel.activation_checkpoint, parallel.layer_classes)
    if parallel.compile:
        from unisono.parallel.compile import apply_compile

        apply_compile(model, parallel.layer_classes)
    if parallel.param_dtype != "fp32" and parallel.compile:  # around compiled code, which would leave roundings out
        from unisono.parallel.param_dtype import apply_param_dtype

        apply_param_dtype(model, parallel)
    if mesh.shard.size > 1:
        from unisono.parallel.fsdp.fsdp import apply_shard

        return apply_shard(model, mesh.torch_mesh("shard"), parallel, device)
    return []


def _check(model: nn.Module, plan: Any) -> None:
    if plan is None or isinstance(plan, (Mapping, ParallelPlan)):
        return
    lacks = [name for name in ("promise", "reason", "apply") if not hasattr(plan, name)]
    raise LoopError(
        f"run.place was given a {type(model).__name__} and, as its plan, a {type(plan).__name__}.",
        f"That is no mapping of names to styles, and as a placement it lacks {' and '.join(lacks)}.",
        "give it all of promise = 'exact', reason = 'why' and def apply(self, model, mesh).",
    )


def _refuse_hooks(model: nn.Module) -> None:
    """A parameter that is divided is another object, without the hooks of the whole one."""
    for name, p in model.named_parameters():
        if p._backward_hooks:
            raise LoopError(
                f"run.place was to divide a {type(model).__name__} among several processes.",
                f"{name} has a gradient hook (register_hook), which would not be called for parts of it.",
                "change p.grad after the rounds, which is the mean over the batch then; or --set parallel.shard=1 and "
                "parallel.tensor=1.",
            )


def promise_of_parallel(
    exchange: tuple[str, str], parallel: ParallelSettings, axes: MeshShape, plans: Sequence[Plan | ParallelPlan | None]
) -> tuple[str, str]:
    """What is promised of the bits, and why: what the exchange promises, as far as the placement keeps it."""
    promise, reason = exchange
    if parallel.data_parallel_devices > 1:
        return "tolerance", f"torch.nn.DataParallel cuts each micro-batch into {parallel.data_parallel_devices} pieces"
    if axes.tensor > 1:
        own = [plan for plan in plans if isinstance(plan, ParallelPlan)]
        for plan in own:
            if plan.promise != "exact":
                return plan.promise, plan.reason
        reason = "; ".join(dict.fromkeys([reason, *(plan.reason for plan in own)]))
    divided = layout(parallel, axes)
    return promise, reason if divided == "whole" else f"{reason}; other layouts than {divided} agree to rounding"
