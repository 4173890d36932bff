"""Check that the processes that gather layers together gather the same one.

A collective has no name. Two processes that gather different layers of one size receive each other's parameters and
compute with the wrong weights; if the sizes differ, they wait for each other forever. This happens where the layers
that a model calls depend on its input (a mixture of experts, a branch, an early exit). So each process announces what
it is about to do, in 8 bytes:

    process 0   announces 3 | its part of layer 3 ---->        4 = 4: the gather is good
    process 1   announces 4 | its part of layer 4 ---->        3 against 4: an error on both, with the two names

On a CPU the announcement goes ahead of the part. The part travels under the layer's number as its tag, and reaches no
process that waits for another layer, so no process waits for the announcement alone. On an accelerator the processor
would have to wait for the device to read a message. There the announcements of a step are compared at its end, before
the update, and a process that waits forever is left to NCCL's watchdog.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch

from unisono.distributed.process_group import Message, ProcessGroup, Work, wait_for
from unisono.errors import LoopError

END = 0
"""Announces that nothing more is gathered in this step, or evaluation."""

ANNOUNCEMENT_TAG = 1
"""The tag of announcements. The parts of a layer travel under the layer's number, which is larger."""


class Announcement(NamedTuple):
    """An announcement under way: our number, and room [processes] for the numbers of all."""

    number: int
    received: torch.Tensor
    works: Sequence[Work]


class GatherOrder:
    """Compare what the processes that share a model's parameters gather and reduce.

    Args:
        group: These processes.
        at_once: Compare each announcement as it arrives, instead of all at the end of a step. By default on a CPU.
    """

    def __init__(self, group: ProcessGroup, *, at_once: bool | None = None) -> None:
        self.group = group
        self.at_once = group.device.type == "cpu" if at_once is None else at_once
        self._names = {END: "to be done with the micro-batch"}
        self._end: Announcement | None = None
        self._announced: list[int] = []

    def register(self, name: str) -> int:
        """Return the number for an action. All processes register the same actions in the same order.

        Args:
            name: The action, as it reads after "was": "to gather the Block layers.3".
        """
        number = ANNOUNCEMENT_TAG + len(self._names)
        self._names[number] = name
        return number

    def announce(self, number: int) -> Announcement:
        """Tell the other processes what this one is about to do; pass the result to `check`."""
        if not self.at_once:
            self._announced.append(number)
            return Announcement(number, torch.empty(0), [])
        if self._end is not None:
            end, self._end = self._end, None
            self.check(end)
        return self._send(number)

    def check(self, announcement: Announcement) -> None:
        """Raise LoopError if another process is about to do something else."""
        wait_for(announcement.works)
        for rank, number in enumerate(announcement.received.tolist()):
            if number != announcement.number:
                self._refuse(rank, announcement.number, number)

    def reset(self) -> None:
        """Drop what was announced in a group that has been replaced."""
        self._end, self._announced = None, []

    def end_step(self) -> None:
        """End a step, or an evaluation. A process that is still about to gather something raises an error then."""
        if self.at_once:
            self._end = self.announce(END)
            return
        announced, self._announced = self._announced, []
        for at, numbers in enumerate(zip(*_padded(self.group.all_gather_object(announced)), strict=True)):
            for rank, number in enumerate(numbers):
                own = announced[at] if at < len(announced) else END
                if number != own:
                    self._refuse(rank, own, number)

    def _send(self, number: int) -> Announcement:
        own = torch.tensor([number])
        received = own.repeat(self.group.size)
        others = [rank for rank in range(self.group.size) if rank != self.group.rank]
        sends = [Message(own, rank) for rank in others]
        receives = [Message(received[rank : rank + 1], rank) for rank in others]
        return Announcement(number, received, self.group.send_and_receive(sends, receives, tag=ANNOUNCEMENT_TAG))

    def _refuse(self, rank: int, own: int, number: int) -> NoReturn:
        raise LoopError(
            f"{self.group.size} processes gather a layer together, and came to different ones.",
            f"Here a micro-batch was {self._names[own]}; at that moment, on process {rank} of those that share the "
            f"parameters, another one was {self._names[number]}.",
            "--set parallel.reshard=step, with which a model may call other layers for other samples.",
        )


class AllGather:
    """Gather a layer in place of FSDP2: the part of each process goes to all of them.

    It has the protocol AllGather of torch.distributed.fsdp: `output_tensor` is flat, with the part of each process in
    the order of ranks. After a death it is filled with zeros until the step is computed again.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool) -> Any:
        works: list[Work] = []
        if not self.group.attempt(lambda: works.extend(self.gather(output_tensor, input_tensor))):
            output_tensor.zero_()
        if async_op and works:
            return works[0]
        wait_for(works)
        return None

    def gather(self, out: torch.Tensor, part: torch.Tensor) -> list[Work]:
        """Gather all parts into `out`, and return what is still to be waited for."""
        work = self.group.all_gather(out, part)
        if self.group.device.type != "cpu":
            return [work]
        wait_for([work])
        return []


class CheckedAllGather(AllGather):
    """Gather a layer after an announcement.

    Args:
        label: The name of the layer, for the middle of a sentence.
        gather_order: Compares the announcements.
    """

    def __init__(self, label: str, gather_order: GatherOrder) -> None:
        super().__init__(gather_order.group)
        self.gather_order, self.number = gather_order, gather_order.register(f"to gather {label}")

    def gather(self, out: torch.Tensor, part: torch.Tensor) -> list[Work]:
        group, announcement = self.group, self.gather_order.announce(self.number)
        if not self.gather_order.at_once:
            return super().gather(out, part)
        rows = out.view(group.size, -1)
        others = [rank for rank in range(group.size) if rank != group.rank]
        sends, receives = [Message(part, r) for r in others], [Message(rows[r], r) for r in others]
        works = group.send_and_receive(sends, receives, tag=self.number)
        if rows[group.rank].data_ptr() != part.data_ptr():
            rows[group.rank].copy_(part)
        self.gather_order.check(announcement)
        wait_for(works)
        return []


def _padded(rows: Sequence[Sequence[int]]) -> list[list[int]]:
    """Pad rows with END to one length: the processes with shorter rows were done before."""
    longest = max(map(len, rows))
    return [[*row, *[END] * (longest - len(row))] for row in rows]
