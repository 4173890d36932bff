"""Pipeline parallelism: each process holds one stage of a model's layers, or several; micro-batches follow each other.

                 time -->                                          1F1B, two stages, four micro-batches
    stage 0      F0 F1 .. B0 F2 B1 F3 B2 .. B3                     F0: the forward pass of micro-batch 0
    stage 1      .. F0 B0 F1 B1 F2 B2 F3 B3                        B0: its backward pass

The order of passes is torch's: the schedules of torch.distributed.pipelining, by name
(https://docs.pytorch.org/docs/stable/distributed.pipelining.html). This module computes the passes of a stage. torch's
own PipelineStage requires one shape for all micro-batches of all steps. ModelStage has the methods that the schedules
call, and differs in them:

- Each micro-batch may have another shape. The activations for a new shape are found by a forward pass whose results are
  dropped (`PipelineSchedule.learn_shapes`).
- A schedule that requires more micro-batches than there are gets idle ones, which compute and send nothing.
- The state of torch's generator is sent with the activations. So dropout draws what it draws on one process.
- The exchange gets a stage's gradients micro-batch by micro-batch, in order. LoopedBFS runs backward from the last to
  the first, so it gets the micro-batches in reverse.
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
    depends_on,
    flat,
    spec_of,
    with_strides,
)
from unisono.torch_compat.modules import is_view

REVERSED = ("LoopedBFS",)
"""Schedules whose backward passes go from the last micro-batch to the first."""

HEADER = 1024
"""Numbers of 64 bits in the message that describes the tensors that follow."""

DTYPES = tuple(
    getattr(torch, name)
    for name in (
        *("float32", "float64", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8", "bool"),
        *("complex64", "complex128"),
    )
)

Tensors = Sequence[torch.Tensor]


class StageTask(Protocol):
    """One micro-batch (train/pipelining/pipeline_run.py)."""

    @property
    def kind(self) -> Hashable:
        """Micro-batches of one kind have activations of one shape."""
        ...

    def forward(self, stage: int, received: Tensors) -> Tensors:
        """Compute one stage's part of the forward pass from what the stage before has sent; at last, the loss."""
        ...

    def gathering(self, stage: int) -> AbstractContextManager[None]:
        """Return a context for a backward pass in which a stage's parameters get the gradient of this micro-batch."""
        ...


class ModelStage(PipelineStage):
    """One stage of a model. torch's schedules call its methods; they call the number of a micro-batch `chunk`."""

    def __init__(self, pipeline: PipelineSchedule, index: int, params: Sequence[nn.Parameter]) -> None:
        holder = nn.Module()
        holder.params = nn.ParameterList(params)
        super().__init__(holder, index, pipeline.stages, pipeline.device, group=pipeline.group.handle)
        self.pipeline = pipeline
        self.begin([])

    def begin(self, tasks: Sequence[StageTask]) -> None:
        """Set the next micro-batches, in the order of the schedule's chunks."""
        self.tasks = tasks
        self.works: dict[tuple[str, int], list[Work]] = {}  # messages that are being received
        self.received: dict[int, list[torch.Tensor]] = {}
        self.forwards: dict[int, tuple[Tensors, Tensors]] = {}  # outputs and inputs
        self.sent: dict[int, Tensors] = {}  # outputs to send, with the generator's state
        self.output_grads: dict[int, list[torch.Tensor]] = {}
        self.input_grads: dict[int, list[torch.Tensor | None]] = {}
        self.weight_tasks: dict[int, Any] = {}  # backward passes that remain for the weights
        self.outputs: list[Any] = []

    def _idle(self, chunk: int) -> bool:
        return chunk >= len(self.tasks)

    def _wants_gradients(self) -> bool:
        return bool(self.has_backward) and torch.is_grad_enabled()

    # -- messages

    def _send(self, tensors: Tensors, stage: int) -> list[dist.P2POp]:
        messages = [Message(flat(tensor), self.pipeline.owners[stage]) for tensor in tensors]
        if not self.pipeline.sends_itself:
            return [self.pipeline.group.op(dist.isend, message) for message in messages if message.tensor.numel()]
        self.pipeline.sent += self.pipeline.group.send_and_receive(messages, [])
        return []

    def _receive(self, into: Tensors, stage: int, what: str, chunk: int) -> list[dist.P2POp]:
        messages = [Message(flat(tensor), self.pipeline.owners[stage]) for tensor in into]
        if not self.pipeline.sends_itself:
            return [self.pipeline.group.op(dist.irecv, message) for message in messages if message.tensor.numel()]
        self.works[what, chunk] = self.pipeline.group.send_and_receive([], messages)
        return []

    def _wait(self, what: str, chunk: int) -> None:
        wait_for(self.works.pop((what, chunk), []))

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_first or self._idle(fwd_chunk_id):
            return []
        specs = self.pipeline.specs[self.tasks[fwd_chunk_id].kind, self.stage_index]
        buffers = self.received[fwd_chunk_id] = [spec.empty(self.device) for spec in specs]
        return self._receive(buffers, self.stage_index - 1, "forward", fwd_chunk_id)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_last or self._idle(fwd_chunk_id):
            return []
        outputs = self.sent.pop(fwd_chunk_id)
        self.pipeline.check(self.tasks[fwd_chunk_id].kind, self.stage_index + 1, outputs)
        return self._send(outputs, self.stage_index + 1)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_last or self._idle(bwd_chunk_id) or not self.has_backward:
            return []
        specs = self.pipeline.specs[self.tasks[bwd_chunk_id].kind, self.stage_index + 1]
        buffers = [spec.empty(self.device) for spec in specs if spec.is_differentiable]
        buffers.append(torch.empty(len(buffers), dtype=torch.uint8, device=self.device))
        self.output_grads[bwd_chunk_id] = buffers
        return self._receive(buffers, self.stage_index + 1, "backward", bwd_chunk_id)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_first or self._idle(bwd_chunk_id) or not self.has_backward:
            return []
        return self._send(self.get_local_bwd_output(bwd_chunk_id), self.stage_index - 1)

    # two stages of one process exchange no messages

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        if not self._idle(mb_index):
            self.received[mb_index] = [tensor.detach() for tensor in prev_stage_outputs]

    def get_local_bwd_output(self, mb_index: int) -> list[torch.Tensor]:
        """Return the gradients of the floating-point tensors that this stage has received, and a flag for each.

        A tensor that was not used has no gradient, and neither do the parameters that it was computed with.
        """
        if self._idle(mb_index) or not self.has_backward:
            return []
        specs = self.pipeline.specs[self.tasks[mb_index].kind, self.stage_index]
        found = self.input_grads.pop(mb_index)
        pairs = zip(found, [spec for spec in specs if spec.is_differentiable], strict=True)
        grads = [spec.empty(self.device).zero_() if grad is None else with_strides(grad, spec) for grad, spec in pairs]
        flags = torch.tensor([grad is not None for grad in found], dtype=torch.uint8, device=self.device)
        return [*grads, flags]

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        self.output_grads[mb_index] = list(next_stage_bwd_outputs)

    # -- compute

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
        task, received = self.tasks[fwd_chunk_id], self.received.pop(fwd_chunk_id, [])
        anchors = received
        if self._wants_gradients():
            anchors = [t.new_empty(1).expand(t.shape).requires_grad_() if _has_gradient(t) else t for t in received]
            pairs = zip(anchors, received, strict=True)
            received = [ReceivedActivation.apply(a, t) if _has_gradient(t) else t for a, t in pairs]
        outputs = task.forward(self.stage_index, received)
        if self._wants_gradients():
            # zero-bubble schedules detach outputs in place, which views do not support
            outputs = [o.clone() if is_view(o) and o.requires_grad else o for o in outputs]
            self.forwards[fwd_chunk_id] = outputs, anchors
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
        outputs, inputs = self.forwards.pop(bwd_chunk_id)
        floats = [o for o in outputs if _has_gradient(o)]
        if self.is_last:
            pairs: list[tuple[torch.Tensor, torch.Tensor | None]] = [(o, None) for o in floats if o.requires_grad]
        else:
            *grads, flags = self.output_grads.pop(bwd_chunk_id)
            found = zip(floats, grads, flags.tolist(), strict=True)
            pairs = [(o, g) for o, g, is_used in found if is_used and o.requires_grad]
        received = [x for x in inputs if _has_gradient(x)]
        if full_backward:
            with self.tasks[bwd_chunk_id].gathering(self.stage_index):
                self._backward(pairs)
            self.input_grads[bwd_chunk_id] = [x.grad for x in received]
        elif self.is_first:  # it has no gradient of inputs: all of backward is done with the weights
            self.weight_tasks[bwd_chunk_id] = pairs, None
        else:
            dependent = [pair for pair in pairs if depends_on(pair[0], received)]
            independent = [(o, g) for o, g in pairs if all(o is not other for other, _ in dependent)]
            arguments: dict[str, Any] = {"stage_output": [o for o, _ in dependent], "input_values": received}
            arguments["output_grads"] = None if self.is_last else [g for _, g in dependent]
            input_grads, weights = self.backward_maybe_with_nosync("input", arguments)
            self.input_grads[bwd_chunk_id] = list(input_grads)
            self.weight_tasks[bwd_chunk_id] = independent, weights

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        if self._idle(bwd_chunk_id) or not self.has_backward:
            return
        pairs, weights = self.weight_tasks.pop(bwd_chunk_id)
        with self.tasks[bwd_chunk_id].gathering(self.stage_index):
            if weights is None:
                self._backward(pairs)
                return
            with accumulating(params := list(self.submod.parameters())):
                if pairs:  # torch finds weights between outputs and inputs only; these outputs depend on no input
                    trained = [p for p in params if p.requires_grad]
                    outputs, grads = [o for o, _ in pairs], [g for _, g in pairs]
                    options: dict[str, Any] = {"retain_graph": bool(weights), "allow_unused": True}
                    found: list[Any] = list(torch.autograd.grad(outputs, trained, grads, **options))
                    for p, grad in zip(trained, found, strict=True):
                        p.grad = None if grad is None else grad.clone()
                self.backward_maybe_with_nosync("weight", {"stage_output": [], "param_groups": weights})

    def _backward(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
        if pairs:
            torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])


class PipelineSchedule:
    """Run micro-batches through the stages of one pipeline.

    Args:
        group: The processes of the pipeline.
        schedule: The name of torch's schedule.
        loops: The number of stages of each process, for schedules that have several.

    Attributes:
        stages: The number of stages.
        owners: The rank within the group that has each stage.
        specs: The tensors that a stage receives for each kind of micro-batch.
        sends_itself: Whether a stage starts its messages itself, with gloo. With NCCL torch starts the messages of both
            directions together.
    """

    def __init__(self, group: ProcessGroup, schedule: str, loops: int) -> None:
        self.group, self.device = group, group.device
        self.kind: Any = get_schedule_class(schedule)
        self.name = schedule
        self.is_single_stage = not hasattr(self.kind, "_prepare_schedule_with_comms")
        self.stages = group.size * (1 if self.is_single_stage else loops)
        self.owners = owners_of(self.stages, group.size, in_v=schedule in ("ZBVZeroBubble", "DualPipeV"))
        self.specs: dict[tuple[Hashable, int], list[ActivationSpec]] = {}
        self.own: list[ModelStage] = []
        self.sends_itself = self.device.type == "cpu"
        self.sent: list[Work] = []
        self._schedules: dict[tuple[int, bool], Any] = {}

    @property
    def own_stages(self) -> list[int]:
        """The numbers of the stages of this process."""
        return [stage for stage, owner in enumerate(self.owners) if owner == self.group.rank]

    def set_params(self, params: Callable[[int], Sequence[nn.Parameter]]) -> None:
        """Build the stages of this process, with the parameters that `params` returns for each."""
        self.own = [ModelStage(self, stage, params(stage)) for stage in self.own_stages]

    def run(self, tasks: Sequence[StageTask], *, backward: bool) -> list[Any]:
        """Run micro-batches. All processes of the pipeline call this with the same ones.

        Returns:
            Without backward, the output of the last stage for each micro-batch, on the process that has it.
        """
        if not tasks:
            return []
        self.learn_shapes(tasks, backward=backward)
        ordered = list(tasks)[::-1] if self.name in REVERSED and backward else list(tasks)
        for stage in self.own:
            stage.begin(ordered)
        schedule, chunks = self._schedule(len(tasks), backward)
        target = torch.zeros(chunks) if backward else None  # not used: the last stage computes the loss
        try:
            schedule.step(target=target, return_outputs=False)
            self._wait_for_sends()
            return [output for stage in self.own for output in stage.outputs]
        finally:
            for stage in self.own:
                stage.begin([])

    def _schedule(self, tasks: int, backward: bool) -> tuple[Any, int]:
        """Return the schedule for this number of micro-batches, or for the next larger one that it supports."""
        if (tasks, backward) not in self._schedules:
            stages = self.own[0] if self.is_single_stage else self.own
            for chunks in count(tasks):
                try:
                    schedule = self.kind(stages, chunks, loss_fn=_identity if backward else None, scale_grads=False)
                except ValueError:  # 1F1B requires as many as there are stages; interleaved ones, whole rounds
                    continue
                for name in ("_stage_forward", "_stage_backward", "_stages_forward", "_stages_backward"):
                    # shapes are known already
                    setattr(schedule, f"{name}_initialized", backward or name.endswith("forward"))
                self._schedules[tasks, backward] = schedule, chunks
                break
        return self._schedules[tasks, backward]

    # -- shapes

    def learn_shapes(self, tasks: Sequence[StageTask], *, backward: bool) -> None:
        """Find the activations of new kinds of micro-batches, by a forward pass of one of each."""
        new = {task.kind: task for task in tasks if (task.kind, 1) not in self.specs}
        for kind, task in new.items():
            tensors: Tensors = []
            for stage in range(1, self.stages):
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
        self._wait_for_sends()

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

    def _wait_for_sends(self) -> None:
        works, self.sent = self.sent, []
        wait_for(works)


def owners_of(stages: int, size: int, *, in_v: bool) -> list[int]:
    """Return the rank that has each stage: 0 1 0 1, or in a V 0 1 1 0."""
    loops = [list(range(size))[:: -1 if in_v and loop % 2 else 1] for loop in range(stages // size)]
    return [rank for loop in loops for rank in loop]


def _has_gradient(tensor: torch.Tensor) -> bool:
    """Return whether a gradient is sent back for a tensor."""
    return spec_of(tensor).is_differentiable


def _identity(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output
