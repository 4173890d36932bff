"""Between an accelerator and the processor's memory, where processes with and without one form a group.

NCCL knows no processors; gloo knows them, and every process has it. So what travels is copied there and back:

    process 0   [ gradient ]  cuda:0  --copy-->  [ ] cpu  ==gloo==>  ...  [ sum ] cpu  --copy, on wait-->  cuda:0
    process 1   [ gradient ]  cpu     =========  the same tensor  ==>  ...  [ sum ] cpu

A copy from a device waits until what is copied has been computed there; a copy to it is there when it returns. Where
all processes have the same kind of device nothing is copied, and nothing of this is in the way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from unisono.distributed.process_group import Work


def staging_buffer(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Where what is to lie in `tensor` may arrive: itself, if that is on this device."""
    return tensor if tensor.device == device else torch.empty(tensor.shape, dtype=tensor.dtype, device=device)


def staged(work: Work, here: torch.Tensor, there: torch.Tensor) -> Work:
    """This work, whose `wait` also brings what has come `here` to where it belongs."""
    return work if here is there else StagedWork(work, here, there)


class StagedWork:
    """A collective under way whose result arrives on one device and belongs on another."""

    def __init__(self, work: Work, here: torch.Tensor, there: torch.Tensor) -> None:
        self.work, self.here, self.there = work, here, there

    def wait(self) -> None:
        self.work.wait()
        if self.here is not self.there:  # only once: from then on it may be somebody else's
            self.there.data.copy_(self.here)  # with a version of its own: nobody takes this for the loop's doing
            self.here = self.there
