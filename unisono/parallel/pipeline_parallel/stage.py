"""Pipeline parallelism: each process holds one or several stages of a model's layers; micro-batches follow each other.

This module computes the passes of a stage, in the order of a schedule of torch (schedule.py). torch's own PipelineStage
requires one shape for all micro-batches of all steps. ModelStage has the methods that the schedules call, and differs
in them:

- Each micro-batch may have another shape. The activations for a new shape are found by a forward pass whose results are
  dropped (`StageMessages.learn_shapes`).
- The state of torch's generator is sent with the activations. So dropout draws the same numbers as on one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from unisono.distributed.process_group import Message, Work, wait_for
from unisono.parallel.pipeline_parallel.stage_messages import ForwardTask, StageMessages, Tensors
from unisono.parallel.pipeline_parallel.transport import (
    ReceivedActivation,
    accumulating,
    depends_on,
    flat,
    spec_of,
    with_strides,
)
from unisono.torch_compat.modules import is_view


class StageTask(ForwardTask, Protocol):
    """One micro-batch (train/pipelining/pipeline_run.py)."""

    def gathering(self, stage: int) -> AbstractContextManager[None]:
        """Return a context for a backward pass in which a stage's parameters get the gradient of this micro-batch."""
        ...


class ModelStage(PipelineStage):
    """One stage of a model. torch's schedules call its methods; they call the number of a micro-batch `chunk`."""

    def __init__(self, messages: StageMessages, index: int, params: Sequence[nn.Parameter]) -> None:
        holder = nn.Module()
        holder.params = nn.ParameterList(params)
        super().__init__(holder, index, len(messages.owners), messages.device, group=messages.group.handle)
        self.messages = messages
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
        messages = [Message(flat(tensor), self.messages.owners[stage]) for tensor in tensors]
        if not self.messages.sends_itself:
            return [self.messages.group.op(dist.isend, message) for message in messages if message.tensor.numel()]
        self.messages.sent += self.messages.group.send_and_receive(messages, [])
        return []

    def _receive(self, into: Tensors, stage: int, what: str, chunk: int) -> list[dist.P2POp]:
        messages = [Message(flat(tensor), self.messages.owners[stage]) for tensor in into]
        if not self.messages.sends_itself:
            return [self.messages.group.op(dist.irecv, message) for message in messages if message.tensor.numel()]
        self.works[what, chunk] = self.messages.group.send_and_receive([], messages)
        return []

    def _wait(self, what: str, chunk: int) -> None:
        wait_for(self.works.pop((what, chunk), []))

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_first or self._idle(fwd_chunk_id):
            return []
        specs = self.messages.specs[self.tasks[fwd_chunk_id].kind, self.stage_index]
        buffers = self.received[fwd_chunk_id] = [spec.empty(self.device) for spec in specs]
        return self._receive(buffers, self.stage_index - 1, "forward", fwd_chunk_id)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_last or self._idle(fwd_chunk_id):
            return []
        outputs = self.sent.pop(fwd_chunk_id)
        self.messages.check(self.tasks[fwd_chunk_id].kind, self.stage_index + 1, outputs)
        return self._send(outputs, self.stage_index + 1)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_last or self._idle(bwd_chunk_id) or not self.has_backward:
            return []
        specs = self.messages.specs[self.tasks[bwd_chunk_id].kind, self.stage_index + 1]
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

        An unused tensor has no gradient, and neither have the parameters that it was computed with.
        """
        if self._idle(mb_index) or not self.has_backward:
            return []
        specs = self.messages.specs[self.tasks[mb_index].kind, self.stage_index]
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
        elif self.is_first:  # it has no gradient of inputs: the whole backward pass is computed with the weights
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


def _has_gradient(tensor: torch.Tensor) -> bool:
    """Return whether a gradient is sent back for a tensor."""
    return spec_of(tensor).is_differentiable
