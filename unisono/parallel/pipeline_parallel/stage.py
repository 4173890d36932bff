"""A pipeline: each process holds one stretch of a model's layers, or several; micro-batches pass through, one on the
heels of the other.

                 time -->                                          1F1B, two stages, four micro-batches
    stage 0      F0 F1 .. B0 F2 B1 F3 B2 .. B3                     F0: the forward pass of micro-batch 0
    stage 1      .. F0 B0 F1 B1 F2 B2 F3 B3                        B0: its backward pass

Who does what when is torch's: the schedules of torch.distributed.pipelining, by name
(https://docs.pytorch.org/docs/stable/distributed.pipelining.html). What a stage does when its turn comes is here. It is
not torch's PipelineStage as it is, since that has all micro-batches of one shape, and one shape for all steps; its
methods, which the schedules call, are kept, and what is in them is ours:

- Shapes may be another for every micro-batch. What crosses for a batch of a certain shape is found out the first time
  that there is one, by a forward pass that is then forgotten (`Line.learn`).
- A schedule that wants more micro-batches than there are gets idle ones: nothing is computed for them, nothing sent.
- torch's generator travels with the activations. So a stage's dropout draws what it would have drawn in one process.
- Gradients of a stage are handed over micro-batch by micro-batch, in order: LoopedBFS, which goes backward from the
  last to the first, is given them in reverse.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from itertools import count
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from unisono.distributed.process_group import Message, ProcessGroup, Work, wait_for
from unisono.parallel.pipeline_parallel.transport import (
    ActivationSpec,
    ReceivedActivation,
    accumulating,
    comes_from,
    flat,
    laid_out,
    like,
)

REVERSED = ("LoopedBFS",)
"""Schedules whose backward passes go from the last micro-batch to the first."""

HEADER = 1024
"""Numbers of 64 bits that say which tensors follow."""

DTYPES = tuple(
    getattr(torch, name)
    for name in (
        *("float32", "float64", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8", "bool"),
        *("complex64", "complex128"),
    )
)

Tensors = Sequence[torch.Tensor]


class StageTask(Protocol):
    """What is to be done with one micro-batch (train/pipelining/pipeline_run.py).

    kind     micro-batches of one kind have activations of one shape
    forward  one stage's part of the forward pass, from what the stage before it has sent; of the last stage: the loss
    """

    @property
    def kind(self) -> Hashable: ...

    def forward(self, stage: int, received: Tensors) -> Tensors: ...

    def gathering(self, stage: int) -> AbstractContextManager[None]:
        """Around a backward pass in which the parameters of a stage get the gradient of this micro-batch."""


class ModelStage(PipelineStage):
    """One stretch of the layers. torch's schedules call its methods; a number of a micro-batch is a `chunk` to them."""

    def __init__(self, line: PipelineSchedule, index: int, params: Sequence[nn.Parameter]) -> None:
        holder = nn.Module()
        holder.params = nn.ParameterList(params)
        super().__init__(holder, index, line.stages, line.device, group=line.group.handle)
        self.line = line
        self.begin([])

    def begin(self, jobs: Sequence[StageTask]) -> None:
        """So many micro-batches are next, in the order of the schedule's chunks."""
        self.jobs = jobs
        self.works: dict[tuple[str, int], list[Work]] = {}  # messages that are on their way to us
        self.received: dict[int, list[torch.Tensor]] = {}
        self.made: dict[int, tuple[Tensors, Tensors]] = {}  # outputs and inputs of a forward pass
        self.sent: dict[int, Tensors] = {}  # outputs that are to be sent, with the generator's state
        self.grads: dict[int, list[torch.Tensor]] = {}  # of the outputs
        self.back: dict[int, list[torch.Tensor | None]] = {}  # of the inputs
        self.split: dict[int, Any] = {}  # what is left to do for the weights
        self.outputs: list[Any] = []

    def _idle(self, chunk: int) -> bool:
        return chunk >= len(self.jobs)

    def _wants_gradients(self) -> bool:
        return bool(self.has_backward) and torch.is_grad_enabled()

    # -- messages

    def _send(self, tensors: Tensors, stage: int) -> list[dist.P2POp]:
        messages = [Message(flat(tensor), self.line.owners[stage]) for tensor in tensors]
        if not self.line.posts:
            return [self.line.group.op(dist.isend, message) for message in messages if message.tensor.numel()]
        self.line.sent += self.line.group.send_and_receive(messages, [])
        return []

    def _receive(self, into: Tensors, stage: int, what: str, chunk: int) -> list[dist.P2POp]:
        messages = [Message(flat(tensor), self.line.owners[stage]) for tensor in into]
        if not self.line.posts:
            return [self.line.group.op(dist.irecv, message) for message in messages if message.tensor.numel()]
        self.works[what, chunk] = self.line.group.send_and_receive([], messages)
        return []

    def _wait(self, what: str, chunk: int) -> None:
        wait_for(self.works.pop((what, chunk), []))

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_first or self._idle(fwd_chunk_id):
            return []
        kinds = self.line.known[self.jobs[fwd_chunk_id].kind, self.stage_index]
        room = self.received[fwd_chunk_id] = [kind.empty(self.device) for kind in kinds]
        return self._receive(room, self.stage_index - 1, "forward", fwd_chunk_id)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_last or self._idle(fwd_chunk_id):
            return []
        outputs = self.sent.pop(fwd_chunk_id)
        self.line.check(self.jobs[fwd_chunk_id].kind, self.stage_index + 1, outputs)
        return self._send(outputs, self.stage_index + 1)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_last or self._idle(bwd_chunk_id) or not self.has_backward:
            return []
        kinds = self.line.known[self.jobs[bwd_chunk_id].kind, self.stage_index + 1]
        room = [kind.empty(self.device) for kind in kinds if kind.floats]
        room.append(torch.empty(len(room), dtype=torch.uint8, device=self.device))
        self.grads[bwd_chunk_id] = room
        return self._receive(room, self.stage_index + 1, "backward", bwd_chunk_id)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_first or self._idle(bwd_chunk_id) or not self.has_backward:
            return []
        return self._send(self.get_local_bwd_output(bwd_chunk_id), self.stage_index - 1)

    # what goes from a stage to another one of the same process takes no message

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        if not self._idle(mb_index):
            self.received[mb_index] = [tensor.detach() for tensor in prev_stage_outputs]

    def get_local_bwd_output(self, mb_index: int) -> list[torch.Tensor]:
        """The gradients of what this stage has received, for everything of floating point, and which of them there are:
        where none comes back, nobody has used it, and its parameters are to have none either."""
        if self._idle(mb_index) or not self.has_backward:
            return []
        kinds = self.line.known[self.jobs[mb_index].kind, self.stage_index]
        back = self.back.pop(mb_index)
        pairs = zip(back, [kind for kind in kinds if kind.floats], strict=True)
        grads = [kind.empty(self.device).zero_() if grad is None else laid_out(grad, kind) for grad, kind in pairs]
        came = torch.tensor([grad is not None for grad in back], dtype=torch.uint8, device=self.device)
        return [*grads, came]

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        self.grads[mb_index] = list(next_stage_bwd_outputs)

    # -- computing

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        if self._idle(fwd_chunk_id):
            return torch.zeros((), device=self.device)
        self._wait("forward", fwd_chunk_id)
        job, received = self.jobs[fwd_chunk_id], self.received.pop(fwd_chunk_id, [])
        anchors = received
        if self._wants_gradients():
            anchors = [t.new_empty(1).expand(t.shape).requires_grad_() if like(t).floats else t for t in received]
            received = [
                ReceivedActivation.apply(a, t) if like(t).floats else t for a, t in zip(anchors, received, strict=True)
            ]
        outputs = job.forward(self.stage_index, received)
        if self._wants_gradients():
            # a view cannot be let go of, which zero-bubble schedules do
            outputs = [o.clone() if o._is_view() and o.requires_grad else o for o in outputs]
            self.made[fwd_chunk_id] = outputs, anchors
        elif self.is_last:
            self.outputs.append(outputs)
        if self.is_last:
            return outputs[0]
        self.sent[fwd_chunk_id] = outputs
        return outputs

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        if self._idle(bwd_chunk_id) or not self.has_backward:
            return
        self._wait("backward", bwd_chunk_id)
        outputs, inputs = self.made.pop(bwd_chunk_id)
        floats = [o for o in outputs if like(o).floats]
        if self.is_last:
            pairs: list[tuple[torch.Tensor, torch.Tensor | None]] = [(o, None) for o in floats if o.requires_grad]
        else:
            *grads, came = self.grads.pop(bwd_chunk_id)
            found = zip(floats, grads, came.tolist(), strict=True)
            pairs = [(o, g) for o, g, yes in found if yes and o.requires_grad]
        received = [x for x in inputs if like(x).floats]
        if full_backward:
            with self.jobs[bwd_chunk_id].gathering(self.stage_index):
                self._backward(pairs)
            self.back[bwd_chunk_id] = [x.grad for x in received]
        elif self.is_first:  # without a gradient of inputs, all is left for later
            self.split[bwd_chunk_id] = pairs, None
        else:
            through = [pair for pair in pairs if comes_from(pair[0], received)]
            apart = [(o, g) for o, g in pairs if all(o is not other for other, _ in through)]
            known: dict[str, Any] = {"stage_output": [o for o, _ in through], "input_values": received}
            known["output_grads"] = None if self.is_last else [g for _, g in through]
            back, weights = self.backward_maybe_with_nosync("input", known)
            self.back[bwd_chunk_id] = list(back)
            self.split[bwd_chunk_id] = apart, weights

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        if self._idle(bwd_chunk_id) or not self.has_backward:
            return
        pairs, weights = self.split.pop(bwd_chunk_id)
        with self.jobs[bwd_chunk_id].gathering(self.stage_index):
            if weights is None:
                self._backward(pairs)
                return
            with accumulating(params := list(self.submod.parameters())):
                if pairs:  # torch finds weights between outputs and inputs, and not where there is no input
                    trained = [p for p in params if p.requires_grad]
                    outputs, grads = [o for o, _ in pairs], [g for _, g in pairs]
                    kept: dict[str, Any] = {"retain_graph": bool(weights), "allow_unused": True}
                    found: list[Any] = list(torch.autograd.grad(outputs, trained, grads, **kept))
                    for p, grad in zip(trained, found, strict=True):
                        p.grad = None if grad is None else grad.clone()
                self.backward_maybe_with_nosync("weight", {"stage_output": [], "param_groups": weights})

    def _backward(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
        if pairs:
            torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])


class PipelineSchedule:
    """The processes of one pipeline, and the stages that this one has.

    stages  how many there are in all
    owners  the rank within the line that has each stage
    known   what comes into a stage for a kind of micro-batch
    posts   do we send and wait ourselves? With gloo; NCCL needs those that cross to be posted together, as torch does
    """

    def __init__(self, group: ProcessGroup, schedule: str, loops: int) -> None:
        self.group, self.device = group, group.device
        self.kind: Any = get_schedule_class(schedule)
        self.name = schedule
        self.straight = not hasattr(self.kind, "_prepare_schedule_with_comms")
        self.stages = group.size * (1 if self.straight else loops)
        self.owners = owners_of(self.stages, group.size, in_v=schedule in ("ZBVZeroBubble", "DualPipeV"))
        self.known: dict[tuple[Hashable, int], list[ActivationSpec]] = {}
        self.mine: list[ModelStage] = []
        self.posts = self.device.type == "cpu"
        self.sent: list[Work] = []
        self._schedules: dict[tuple[int, bool], Any] = {}

    @property
    def ours(self) -> list[int]:
        """The numbers of the stages that this process has."""
        return [stage for stage, owner in enumerate(self.owners) if owner == self.group.rank]

    def settle(self, params: Callable[[int], Sequence[nn.Parameter]]) -> None:
        """The stages of this process have these parameters."""
        self.mine = [ModelStage(self, stage, params(stage)) for stage in self.ours]

    def run(self, jobs: Sequence[StageTask], *, backward: bool) -> list[Any]:
        """All processes of the line call it with the same micro-batches. Without a backward pass it returns what the
        last stage made of each, on the process that has it."""
        if not jobs:
            return []
        self.learn(jobs, backward=backward)
        ordered = list(jobs)[::-1] if self.name in REVERSED and backward else list(jobs)
        for stage in self.mine:
            stage.begin(ordered)
        schedule, chunks = self._schedule(len(jobs), backward)
        target = torch.zeros(chunks) if backward else None  # nobody looks at it: the last stage makes the loss
        try:
            schedule.step(target=target, return_outputs=False)
            self._all_sent()
            return [output for stage in self.mine for output in stage.outputs]
        finally:
            for stage in self.mine:
                stage.begin([])

    def _schedule(self, jobs: int, backward: bool) -> tuple[Any, int]:
        """The schedule for as many micro-batches, or for the next larger number that it can do."""
        if (jobs, backward) not in self._schedules:
            stages = self.mine[0] if self.straight else self.mine
            for chunks in count(jobs):
                try:
                    made = self.kind(stages, chunks, loss_fn=_as_it_is if backward else None, scale_grads=False)
                except ValueError:  # 1F1B wants as many as there are stages; interleaved ones, whole rounds
                    continue
                for name in ("_stage_forward", "_stage_backward", "_stages_forward", "_stages_backward"):
                    setattr(made, f"{name}_initialized", backward or name.endswith("forward"))  # no shapes to agree on
                self._schedules[jobs, backward] = made, chunks
                break
        return self._schedules[jobs, backward]

    # -- shapes

    def learn(self, jobs: Sequence[StageTask], *, backward: bool) -> None:
        """See what crosses for kinds of micro-batches that are new: one of each goes through, and is forgotten."""
        news = {job.kind: job for job in jobs if (job.kind, 1) not in self.known}
        for kind, job in news.items():
            tensors: Tensors = []
            for stage in range(1, self.stages):
                source, here = self.owners[stage - 1], self.owners[stage] == self.group.rank
                if source == self.group.rank:
                    with torch.set_grad_enabled(backward):
                        tensors = job.forward(stage - 1, [tensor.detach() for tensor in tensors])
                    if not here:
                        self._send(tensors, self.owners[stage])
                elif here:
                    tensors = self._receive(source)
                kinds = [like(tensor) for tensor in tensors] if here or source == self.group.rank else []
                self.known[kind, stage] = kinds
        self._all_sent()

    def check(self, kind: Hashable, stage: int, tensors: Tensors) -> None:
        """Refuse what the next stage does not expect."""
        now = [like(tensor) for tensor in tensors]
        if now != self.known[kind, stage]:
            raise ValueError(f"stage {stage} expects {self.known[kind, stage]}, and gets {now}")

    def _send(self, tensors: Tensors, rank: int) -> None:
        numbers = [len(tensors)]
        for dtype, shape, stride in map(like, tensors):
            numbers += [DTYPES.index(dtype), len(shape), *shape, *stride]
        assert len(numbers) <= HEADER, f"{len(tensors)} tensors cross"
        header = torch.tensor(numbers + [0] * (HEADER - len(numbers)), device=self.device)
        self.sent += self.group.send_and_receive([Message(row, rank) for row in (header, *map(flat, tensors))], [])

    def _receive(self, rank: int) -> list[torch.Tensor]:
        header = torch.empty(HEADER, dtype=torch.int64, device=self.device)
        self._get(header, rank)
        numbers = iter(header.tolist())
        tensors = []
        for _ in range(next(numbers)):
            dtype, dims = DTYPES[next(numbers)], next(numbers)
            sizes = [next(numbers) for _ in range(2 * dims)]
            tensors.append(ActivationSpec(dtype, tuple(sizes[:dims]), tuple(sizes[dims:])).empty(self.device))
            self._get(flat(tensors[-1]), rank)
        return tensors

    def _get(self, tensor: torch.Tensor, rank: int) -> None:
        wait_for(self.group.send_and_receive([], [Message(tensor, rank)]))

    def _all_sent(self) -> None:
        works, self.sent = self.sent, []
        wait_for(works)


def owners_of(stages: int, size: int, *, in_v: bool) -> list[int]:
    """Who has which stage: 0 1 0 1, or in a V 0 1 1 0."""
    loops = [list(range(size))[:: -1 if in_v and loop % 2 else 1] for loop in range(stages // size)]
    return [rank for loop in loops for rank in loop]


def _as_it_is(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output
