"""Refuse torch's data-parallel wrappers around placed models.

DistributedDataParallel and FullyShardedDataParallel would exchange gradients in every micro-batch, beside the exchange
of the step. DataParallel would divide a micro-batch by the number of visible GPUs, so its sums, and the bits, would
depend on the machine.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

from unisono.errors import LoopError


def is_wrapper(module: torch.nn.Module) -> bool:
    """Return whether a module is a data-parallel wrapper of torch."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not imported here, which takes 0.5 s
    wrappers = (DataParallel, DistributedDataParallel) + ((fsdp.FullyShardedDataParallel,) if fsdp else ())
    return isinstance(module, wrappers)


def refuse_wrapped(model: torch.nn.Module) -> None:
    """Raise LoopError if a model that is being placed is, or contains, a data-parallel wrapper."""
    for name, part in model.named_modules():
        if is_wrapper(part):
            where = f"Its {name}" if name else "It"
            raise LoopError(
                f"Cannot place a model that {type(part).__name__} wraps.",
                f"{where} is a {type(part).__name__}, which distributes the work as run.place does.",
                "place the model itself: run.place(model), or run.place(wrapped.module).",
            )


def refuse_wrapping(
    placed: Sequence[torch.nn.Module], parent: torch.nn.Module, _: str, child: torch.nn.Module | None
) -> None:
    """Raise LoopError if a data-parallel wrapper is built around a placed model.

    Args:
        placed: The placed models.
        parent: A module that registers another one.
        child: That other module, which becomes an attribute of `parent`.
    """
    if child is None or not is_wrapper(parent):
        return
    parts = {id(part) for part in child.modules()}
    for model in placed:
        if id(model) in parts:
            wrapper = type(parent).__name__
            library = isinstance(parent, DistributedDataParallel)
            raise LoopError(
                f"Cannot wrap a placed {type(model).__name__} in {wrapper}.",
                "run.place has given every process the same weights, and the step exchanges gradients. "
                f"{wrapper} would distribute the work once more.",
                f"remove {wrapper} and use the model that run.place returns"
                + (", or exchange gradients with torch's reducer: --set exchange=ddp" if library else "."),
            )
