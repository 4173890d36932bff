"""The protocol of a plan that a script writes. docs/guide/parallel/tensor.md shows one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh


@runtime_checkable
class ParallelPlan(Protocol):
    """Divide a model over the processes of the axis `tensor`: `run.place(build, plan=Mine())`.

    These processes see the same samples and draw the same random numbers. So what each computes with whole parameters
    is the same already, its gradient too. A parameter that is to be divided becomes a DTensor; the exchange, the norm,
    the optimizer and the checkpoint support DTensors. (Processes that see different samples, replicas and shards, add
    up gradients in the exchange.)

    Attributes:
        promise: exact: for one size of the axis, the bits are the same on any number of processes along the other axes.
            Anything else is what result.json says of the run.
        reason: Why, for people.
    """

    promise: str
    reason: str

    def apply(self, model: nn.Module, mesh: DeviceMesh) -> None:
        """Divide the model, in place.

        Every process calls this, with the same content before. It is not called for one process on the axis.

        Args:
            model: The model.
            mesh: The processes of the axis `tensor`, as a mesh with one axis.
        """
        ...
