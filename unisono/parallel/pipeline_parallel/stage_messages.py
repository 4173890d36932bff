"""Messages between the stages of a pipeline: the activations that a stage expects, and those in transit."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol

import torch

from unisono.distributed.process_group import Message, ProcessGroup, Work, wait_for
from unisono.parallel.pipeline_parallel.transport import ActivationSpec, flat, spec_of

HEADER = 1024
"""Number of 64-bit numbers in the message that describes the tensors that follow."""

DTYPES = tuple(
    getattr(torch, name)
    for name in (
        *("float32", "float64", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8", "bool"),
        *("complex64", "complex128"),
    )
)

Tensors = Sequence[torch.Tensor]


class ForwardTask(Protocol):
    """One micro-batch (train/pipelining/pipeline_run.py), whose shapes are not known yet."""

    @property
    def kind(self) -> Hashable:
        """Micro-batches of one kind have activations of one shape."""
        ...

    def forward(self, stage: int, received: Tensors) -> Tensors:
        """Compute one stage's part of the forward pass from the tensors of the stage before; at last, the loss."""
        ...


class StageMessages:
    """Send and receive the activations of one pipeline.

    Args:
        group: The processes of the pipeline.
        owners: The rank within the group that has each stage.

    Attributes:
        specs: The tensors that a stage receives for each kind of micro-batch.
        sends_itself: Whether a stage starts its messages itself, with gloo. With NCCL torch starts the messages of both
            directions together.
        sent: Messages that are being sent.
    """

    def __init__(self, group: ProcessGroup, owners: Sequence[int]) -> None:
        self.group, self.device, self.owners = group, group.device, owners
        self.specs: dict[tuple[Hashable, int], list[ActivationSpec]] = {}
        self.sends_itself = self.device.type == "cpu"
        self.sent: list[Work] = []

    def learn_shapes(self, tasks: Sequence[ForwardTask], *, backward: bool) -> None:
        """Find the activations of new kinds of micro-batches, by a forward pass of one of each."""
        new = {task.kind: task for task in tasks if (task.kind, 1) not in self.specs}
        for kind, task in new.items():
            tensors: Tensors = []
            for stage in range(1, len(self.owners)):
                source, here = self.owners[stage - 1], self.owners[stage] == self.group.rank
                if source == self.group.rank:
                    with torch.set_grad_enabled(backward):
                        tensors = task.forward(stage - 1, [tensor.detach() for tensor in tensors])
                    if not here:
                        self._send(tensors, self.owners[stage])
                elif here:
                    tensors = self._receive(source)
                specs = [spec_of(tensor) for tensor in tensors] if here or source == self.group.rank else []
                self.specs[kind, stage] = specs
        self.wait_for_sends()

    def check(self, kind: Hashable, stage: int, tensors: Tensors) -> None:
        """Raise ValueError for activations that the next stage does not expect."""
        found = [spec_of(tensor) for tensor in tensors]
        if found != self.specs[kind, stage]:
            raise ValueError(f"stage {stage} expects {self.specs[kind, stage]}, and gets {found}")

    def _send(self, tensors: Tensors, rank: int) -> None:
        numbers = [len(tensors)]
        for dtype, shape, stride in map(spec_of, tensors):
            numbers += [DTYPES.index(dtype), len(shape), *shape, *stride]
        assert len(numbers) <= HEADER, f"{len(tensors)} tensors are too many"
        header = torch.tensor(numbers + [0] * (HEADER - len(numbers)), device=self.device)
        self.sent += self.group.send_and_receive([Message(row, rank) for row in (header, *map(flat, tensors))], [])

    def _receive(self, rank: int) -> list[torch.Tensor]:
        header = torch.empty(HEADER, dtype=torch.int64, device=self.device)
        self._receive_into(header, rank)
        numbers = iter(header.tolist())
        tensors = []
        for _ in range(next(numbers)):
            dtype, dims = DTYPES[next(numbers)], next(numbers)
            sizes = [next(numbers) for _ in range(2 * dims)]
            tensors.append(ActivationSpec(dtype, tuple(sizes[:dims]), tuple(sizes[dims:])).empty(self.device))
            self._receive_into(flat(tensors[-1]), rank)
        return tensors

    def _receive_into(self, tensor: torch.Tensor, rank: int) -> None:
        wait_for(self.group.send_and_receive([], [Message(tensor, rank)]))

    def wait_for_sends(self) -> None:
        works, self.sent = self.sent, []
        wait_for(works)
