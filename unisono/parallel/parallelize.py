"""The recipe: all that is done to a model when it is placed, in the order in which the steps fit together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from unisono.config.mesh_shape import layout
from unisono.errors import LoopError
from unisono.parallel.activation_checkpoint import apply_activation_checkpoint
from unisono.parallel.one_process.data_parallel_threads import apply_data_parallel
from unisono.parallel.one_process.device_map import apply_device_map
from unisono.parallel.one_process.devices import devices_of
from unisono.parallel.parallel_plan import ParallelPlan
from unisono.parallel.param_dtype import apply_param_dtype
from unisono.torch_compat.modules import has_gradient_hook

if TYPE_CHECKING:
    from unisono.config import ParallelSettings
    from unisono.config.mesh_shape import MeshShape
    from unisono.distributed.mesh import Mesh
    from unisono.parallel.fsdp.fsdp import ShardedLayer
    from unisono.parallel.tensor_parallel.tensor_parallel import Plan
    from unisono.tensors.mapped_memory import MappedMemory


def build_model(
    builder: Callable[[], nn.Module],
    seed: Callable[[], None],
    memory: MappedMemory,
    mesh: Mesh,
    parallel: ParallelSettings,
) -> nn.Module:
    """Build a model. One that will be divided is built in files, so that no process needs memory for all of it.

    Args:
        builder: Builds the model.
        seed: Seeds the generators, before the model is built.
        memory: The files.
        mesh: The processes of the run.
        parallel: The settings.
    """
    seed()
    if parallel.model_parallel_devices == 1 and not _is_divided(mesh):
        return builder()
    try:
        with memory.allocating():
            model = builder()
    except RuntimeError as error:
        if "not resizable" not in str(error):
            raise
        seed()  # the constructor resizes a tensor, which is impossible in a file: build in ordinary memory
        return builder()
    memory.move_in(model.parameters())
    return model


def parallelize(
    model: nn.Module,
    mesh: Mesh,
    parallel: ParallelSettings,
    plan: Plan | ParallelPlan | None,
    memory: MappedMemory,
    filled: Collection[int] = (),
) -> list[ShardedLayer]:
    """Parallelize a model over the devices of the run, in place, with the same content on every process.

    Each step relies on those before it: first which device holds what, then how a layer computes with what is there, at
    last what is gathered around it.

    Args:
        model: The model.
        mesh: The processes of the run.
        parallel: The settings.
        plan: How the model is divided along the axis `tensor`: torch's styles by module name, or a plan of the script.
        memory: The files in which the model was built. Their pages are dropped as soon as they are not needed.
        filled: The ids of parameters and buffers that each process fills afterward. They are not sent.

    Returns:
        The layers whose parameters are gathered together, if the model is sharded.
    """
    _check_plan(model, plan)
    _refuse_gradient_hooks(model, mesh)
    casts, layer_classes = parallel.param_dtype != "fp32", parallel.layer_classes

    if not _is_divided(mesh):  # otherwise only parts are moved
        _move_to_devices(model, mesh, parallel)
    sent = [tensor for tensor in (*model.parameters(), *model.buffers()) if id(tensor) not in filled]
    mesh.world.broadcast_(memory.releasing(sent))
    if mesh.tensor.size > 1:
        with memory.allocating():
            _divide_matrices(model, mesh, parallel, plan)
        if mesh.shard.size == mesh.pipeline.size == 1:
            model.to(mesh.world.device)
    if casts and not parallel.compile:  # inside of checkpoints: a layer that is recomputed is cast again
        apply_param_dtype(model, parallel)
    if parallel.activation_checkpoint != "none":
        apply_activation_checkpoint(model, parallel.activation_checkpoint, layer_classes)
    if parallel.compile:
        _compile_layers(model, layer_classes)
    if casts and parallel.compile:  # outside of compiled code, which would skip roundings
        apply_param_dtype(model, parallel)
    if mesh.shard.size > 1:
        return _shard_parameters(model, mesh, parallel, memory)
    return []


def _is_divided(mesh: Mesh) -> bool:
    """Return whether each process holds only a part of the model."""
    return max(mesh.tensor.size, mesh.shard.size, mesh.pipeline.size) > 1


def _move_to_devices(model: nn.Module, mesh: Mesh, parallel: ParallelSettings) -> None:
    """Move a model to the device of this process, or to several of them."""
    device = mesh.world.device
    if parallel.model_parallel_devices > 1:
        apply_device_map(model, devices_of(parallel, device), device, parallel.layer_classes)
    elif parallel.data_parallel_devices > 1:
        apply_data_parallel(model, devices_of(parallel, device))
    else:
        model.to(device)


# These import parts of torch that take half a second and more to load.


def _divide_matrices(
    model: nn.Module, mesh: Mesh, parallel: ParallelSettings, plan: Plan | ParallelPlan | None
) -> None:
    """Divide a model's matrices along the axis `tensor`."""
    from unisono.parallel.tensor_parallel.tensor_parallel import apply_tensor

    axis = mesh.torch_mesh("tensor")
    if isinstance(plan, ParallelPlan):
        plan.apply(model, axis)
    else:
        apply_tensor(model, axis, plan, sequence=parallel.sequence_parallel, loss=parallel.loss_parallel)


def _compile_layers(model: nn.Module, layer_classes: list[str]) -> None:
    from unisono.parallel.compile import apply_compile

    apply_compile(model, layer_classes)


def _shard_parameters(
    model: nn.Module, mesh: Mesh, parallel: ParallelSettings, memory: MappedMemory
) -> list[ShardedLayer]:
    """Shard a model's parameters along the axis `shard`."""
    from unisono.parallel.fsdp.fsdp import apply_shard

    return apply_shard(model, mesh.torch_mesh("shard"), parallel, mesh.world.device, memory)


def _check_plan(model: nn.Module, plan: Any) -> None:
    """Raise LoopError for a plan that is neither a mapping of names to styles nor a ParallelPlan."""
    if plan is None or isinstance(plan, (Mapping, ParallelPlan)):
        return
    missing = [name for name in ("promise", "reason", "apply") if not hasattr(plan, name)]
    raise LoopError(
        f"run.place got a plan for a {type(model).__name__} that it cannot use: a {type(plan).__name__}.",
        f"It is no mapping of module names to styles, and as a ParallelPlan it lacks {' and '.join(missing)}.",
        "give it all of promise = 'exact', reason = 'why' and def apply(self, model, mesh).",
    )


def _refuse_gradient_hooks(model: nn.Module, mesh: Mesh) -> None:
    """Raise LoopError for a gradient hook on a parameter that will be divided: the parts are other objects."""
    if mesh.tensor.size == mesh.shard.size == 1:
        return
    for name, p in model.named_parameters():
        if has_gradient_hook(p):
            raise LoopError(
                f"Cannot divide a {type(model).__name__} over several processes: {name} has a gradient hook.",
                "The hook (register_hook) would not be called for parts of the parameter.",
                "change p.grad after the rounds, where it is the mean over the batch; or --set parallel.shard=1 and "
                "parallel.tensor=1.",
            )


def promise_of_parallel(
    exchange: tuple[str, str], parallel: ParallelSettings, axes: MeshShape, plans: Sequence[Plan | ParallelPlan | None]
) -> tuple[str, str]:
    """Return what a run promises, and why: the promise of its exchange, as far as the parallel layout keeps it.

    Args:
        exchange: The promise and the reason of the exchange.
        parallel: The settings.
        axes: The sizes of the mesh.
        plans: The plan of each model.
    """
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
