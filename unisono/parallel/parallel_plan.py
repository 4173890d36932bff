"""A placement of one's own: any object with these three names. docs/guide/parallel/tensor.md has one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh


@runtime_checkable
class ParallelPlan(Protocol):
    """How a model lies over the processes of the axis `tensor`: `run.place(build, plan=Mine())`.

    Those processes see the same samples and draw the same random numbers, so what each computes with whole parameters
    is the same already, its gradient too. A parameter of which each is to hold a part becomes a DTensor: exchange,
    norm, optimizer and checkpoint know what that is. (Processes that see different samples, replicas and shards, have
    to add gradients up, which is the exchange's matter.)

    promise  exact: for one size of the axis, the same bits on any number of processes beside it. Anything else is what
             result.json says of the run
    reason   why, for people
    """

    promise: str
    reason: str

    def apply(self, model: nn.Module, mesh: DeviceMesh) -> None:
        """Divide the model, in place. Every process calls this, and has the same content before; `mesh` has one axis.
        With one process on the axis there is nothing to divide, and nobody calls it."""
        ...
