"""Explain an error of torch that memory is exhausted: what holds how much of it, and which settings need less."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import psutil  # type: ignore[import-untyped]
import torch
from torch.utils._pytree import tree_leaves

from unisono import phases
from unisono.config.wording import size
from unisono.distributed.process_group import to_local
from unisono.errors import OutOfMemoryError
from unisono.train.replan.free_memory import free_on_host

if TYPE_CHECKING:
    from unisono.config import Settings
    from unisono.train.context import RunContext

CPU_SIGNS = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")
"""What torch's allocator for the CPU says. An accelerator raises torch.OutOfMemoryError."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether torch could not allocate memory, on any device."""
    return isinstance(error, torch.OutOfMemoryError) or any(sign in str(error) for sign in CPU_SIGNS)


@contextmanager
def explain_out_of_memory(context: RunContext, plan_line: Callable[[float], object]) -> Iterator[None]:
    """Raise OutOfMemoryError in place of torch's own error, which does not know what the memory is used for.

    Args:
        context: The context of the run.
        plan_line: Returns the command that finds placements within some bytes of memory of a process.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        step = phases.position.step
        when = f"in step {step}" if step is not None else "before the first step"
        plan = f"see which placements fit:\n  {plan_line(usable_memory(context))}"
        raise OutOfMemoryError(
            f"Out of memory on {context.device} {when}.",
            f"{describe_memory(context)} torch said: {str(error).splitlines()[0]}",
            " Or: ".join([*remedies(context.settings, accelerator=context.device.type != "cpu"), plan]),
        ).with_traceback(error.__traceback__) from None


def usable_memory(context: RunContext) -> int:
    """Return the bytes of its device that this process may use: what it has, and its part of what is free."""
    device, processes = context.device, max(1, context.world.local_size)
    if device.type != "cpu":
        module: Any = torch.get_device_module(device)
        return int(module.mem_get_info(device)[0] + module.memory_reserved(device))
    process = psutil.Process().memory_info()
    free = free_on_host() // processes
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        free = min(free, limit - process.vms)
    return int(process.rss + max(0, free))


def describe_memory(context: RunContext) -> str:
    """Return what this process holds on its device, as sentences."""
    held = memory_by_part(context)
    text = f"This process holds {', '.join(f'{size(n)} of {name}' for name, n in held.items() if n) or 'no state yet'}."
    if context.device.type == "cpu":
        return text
    module: Any = torch.get_device_module(context.device)
    allocated, reserved = module.memory_allocated(context.device), module.memory_reserved(context.device)
    free, total = module.mem_get_info(context.device)
    rest = max(0, allocated - sum(held.values()))
    return (
        f"{text} {size(rest)} are activations, exchange and others, and {size(reserved - allocated)} are reserved by "
        f"torch, and not in use. Of {size(total)} on the device, {size(free)} are free, and other processes have "
        f"{size(max(0, total - free - reserved))}."
    )


def memory_by_part(context: RunContext) -> dict[str, int]:
    """Return the bytes on this process's device by what they are: parameters, gradients, buffers, optimizer state."""
    params, models = context.models.params, context.models.modules
    optimizers = [thing for thing in context.state.tracked.values() if isinstance(thing, torch.optim.Optimizer)]
    return {
        "parameters": _bytes(params, context.device),
        "gradients": _bytes([p.grad for p in params if p.grad is not None], context.device),
        "buffers": _bytes([b for model in models for b in model.buffers()], context.device),
        "optimizer state": _bytes(tree_leaves([dict(o.state) for o in optimizers]), context.device),
    }


def _bytes(values: Iterable[Any], device: torch.device) -> int:
    """Return the bytes of the local parts of these tensors that are on a device, shared memory counted once."""
    parts = [to_local(value.detach()) for value in values if isinstance(value, torch.Tensor)]
    sizes: Mapping[int, int] = {
        part.untyped_storage().data_ptr(): part.untyped_storage().nbytes()
        for part in parts
        if part.device.type == device.type and part.layout is torch.strided
    }
    return sum(sizes.values())


def remedies(settings: Settings, *, accelerator: bool) -> list[str]:
    """Return the settings that need less memory and are not in use, those that keep the bits first."""
    parallel, found = settings.parallel, []
    if parallel.activation_checkpoint == "none":
        found.append("--set parallel.activation_checkpoint=full recomputes activations, with the same bits.")
    if parallel.shard == 1:
        found.append("--set parallel.shard=N divides parameters, gradients and optimizer state over N processes.")
    elif accelerator and not parallel.offload:
        found.append("--set parallel.offload=true keeps parameters and optimizer state in the memory of the host.")
    share = -(-settings.batch // settings.virtual_ranks)
    now = settings.micro_batch or share
    if now > 1:
        found.append(f"--set micro_batch={-(-now // 2)} computes fewer samples at a time, with other bits.")
    return found or ["use a smaller model, or a device with more memory."]
