"""Notes: processes that gather layers together tell each other which one.

A collective has no name. Two processes that gather different layers of one size get each other's, and compute with the
wrong weights; of different sizes, they wait for each other for ever. Which layer a model calls may depend on its input
(a mixture of experts, a branch, an early exit), and then they do meet so. Hence a note in front of each, of 8 bytes:

    process 0   note 3 | its part of layer 3 ---->        4 = 4: on it goes
    process 1   note 4 | its part of layer 4 ---->        3 against 4: an error on both, with the names of the two

On a CPU the note goes ahead of the part, which travels under the layer's number and reaches nobody who waits for
another one, so nobody waits for the note alone. On an accelerator nobody looks at a message before the step is over
(the processor would have to wait for the device); there the notes of a step are compared at its end, which is before
anything is updated, and who waits for ever is left to NCCL's own watch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch

from unisono.distributed.process_group import Message, ProcessGroup, Work, wait_for
from unisono.errors import LoopError

if TYPE_CHECKING:
    from unisono.parallel.fsdp.fsdp import ShardedLayer

END = 0
"""The note that nothing more comes in this step, or evaluation."""

NOTE = 1
"""Under which tag notes travel; that of a layer's part is the number of what is done with it, which is larger."""


class GatherRecord(NamedTuple):
    """One under way: ours, and room [processes] for everybody's."""

    ours: int
    theirs: torch.Tensor
    works: Sequence[Work]


class GatherOrder:
    """Of the processes that share a model's parameters.

    at_once  is every note looked at when it comes, or all of a step's at its end?
    """

    def __init__(self, group: ProcessGroup, *, at_once: bool | None = None) -> None:
        self.group = group
        self.at_once = group.device.type == "cpu" if at_once is None else at_once
        self._names = {END: "to be done with the micro-batch"}
        self._end: GatherRecord | None = None
        self._written: list[int] = []

    def number(self, name: str) -> int:
        """That of what is to be done together; `name` says it after "was". Everybody must ask in the same order."""
        number = NOTE + len(self._names)
        self._names[number] = name
        return number

    def write(self, number: int) -> GatherRecord:
        """Tell the others what this process is about to do; `read` tells whether they are."""
        if not self.at_once:
            self._written.append(number)
            return GatherRecord(number, torch.empty(0), [])
        if self._end is not None:
            end, self._end = self._end, None
            self.read(end)
        return self._send(number)

    def read(self, note: GatherRecord) -> None:
        """Raises LoopError if somebody is about to do something else."""
        wait_for(note.works)
        for rank, number in enumerate(note.theirs.tolist()):
            if number != note.ours:
                self._refuse(rank, note.ours, number)

    def forget(self) -> None:
        """What was written is lost: another group has taken the place of ours."""
        self._end, self._written = None, []

    def end(self) -> None:
        """A step, or an evaluation, is over. Who knows of more to come will hear of it, and say so."""
        if self.at_once:
            self._end = self.write(END)
            return
        written, self._written = self._written, []
        for at, numbers in enumerate(zip(*_even(self.group.all_gather_object(written)), strict=True)):
            for rank, number in enumerate(numbers):
                ours = written[at] if at < len(written) else END
                if number != ours:
                    self._refuse(rank, ours, number)

    def _send(self, number: int) -> GatherRecord:
        ours = torch.tensor([number])
        theirs = ours.repeat(self.group.size)
        others = [rank for rank in range(self.group.size) if rank != self.group.rank]
        sends = [Message(ours, rank) for rank in others]
        receives = [Message(theirs[rank : rank + 1], rank) for rank in others]
        return GatherRecord(number, theirs, self.group.send_and_receive(sends, receives, tag=NOTE))

    def _refuse(self, rank: int, ours: int, number: int) -> NoReturn:
        raise LoopError(
            f"With parallel.reshard=layer, {self.group.size} processes gather a layer together, and add up its "
            "gradient "
            "together.",
            f"Here a micro-batch was {self._names[ours]}; at that moment, on process {rank} of those that share the "
            f"parameters, another one was {self._names[number]}.",
            "--set parallel.reshard=step, with which a model may call other layers for other samples.",
        )


class AllGather:
    """Stands where FSDP2 would gather a layer: everybody's part goes to everybody.

    It keeps the protocol AllGather of torch.distributed.fsdp: `output_tensor` is flat, a part of each process, in the
    order of ranks. Where somebody has died, zeros are gathered until the step is made again.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool) -> Any:
        left: list[Work] = []
        if not self.group.attempt(lambda: left.extend(self.gather(output_tensor, input_tensor))):
            output_tensor.zero_()
        if async_op and left:
            return left[0]
        wait_for(left)
        return None

    def gather(self, out: torch.Tensor, part: torch.Tensor) -> list[Work]:
        """All parts arrive in `out`. Returns what is still to be waited for."""
        work = self.group.all_gather(out, part)
        if self.group.device.type != "cpu":
            return [work]
        wait_for([work])
        return []


class CheckedAllGather(AllGather):
    """The same behind a note, for who gathers layers one by one."""

    def __init__(self, layer: ShardedLayer, notes: GatherOrder) -> None:
        super().__init__(notes.group)
        self.notes, self.number = notes, notes.number(f"to gather {layer.within}")

    def gather(self, out: torch.Tensor, part: torch.Tensor) -> list[Work]:
        ours, note = self.group, self.notes.write(self.number)
        if not self.notes.at_once:
            return super().gather(out, part)
        rows = out.view(ours.size, -1)
        others = [rank for rank in range(ours.size) if rank != ours.rank]
        sends, receives = [Message(part, r) for r in others], [Message(rows[r], r) for r in others]
        works = ours.send_and_receive(sends, receives, tag=self.number)
        if rows[ours.rank].data_ptr() != part.data_ptr():
            rows[ours.rank].copy_(part)
        self.notes.read(note)
        wait_for(works)
        return []


def _even(rows: Sequence[Sequence[int]]) -> list[list[int]]:
    """All of one length: who has written less was done before."""
    longest = max(map(len, rows))
    return [[*row, *[END] * (longest - len(row))] for row in rows]
