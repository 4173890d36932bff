"""The schedules of a pipeline: the order in which its stages compute the passes of micro-batches.

                 time -->                                          1F1B, two stages, four micro-batches
    stage 0      F0 F1 .. B0 F2 B1 F3 B2 .. B3                     F0: the forward pass of micro-batch 0
    stage 1      .. F0 B0 F1 B1 F2 B2 F3 B3                        B0: its backward pass

The order of passes is torch's: the schedules of torch.distributed.pipelining, by name
(https://docs.pytorch.org/docs/stable/distributed.pipelining.html). A schedule that requires more micro-batches than
there are gets idle ones, which compute and send nothing. The exchange gets a stage's gradients micro-batch by
micro-batch, in order. LoopedBFS runs backward from the last to the first, so it gets the micro-batches in reverse.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining.schedules import get_schedule_class

from unisono.distributed.process_group import ProcessGroup
from unisono.parallel.pipeline_parallel.stage import ModelStage, StageTask
from unisono.parallel.pipeline_parallel.stage_messages import StageMessages

REVERSED = ("LoopedBFS",)
"""Schedules whose backward passes go from the last micro-batch to the first."""


class PipelineSchedule:
    """Run micro-batches through the stages of one pipeline.

    Args:
        group: The processes of the pipeline.
        schedule: The name of torch's schedule.
        loops: The number of stages of each process, for schedules that have several.

    Attributes:
        stages: The number of stages.
        owners: The rank within the group that has each stage.
        messages: The activations that a stage expects, and those in transit.
    """

    def __init__(self, group: ProcessGroup, schedule: str, loops: int) -> None:
        self.group = group
        self.kind: Any = get_schedule_class(schedule)
        self.name = schedule
        self.is_single_stage = not hasattr(self.kind, "_prepare_schedule_with_comms")
        self.stages = group.size * (1 if self.is_single_stage else loops)
        self.owners = owners_of(self.stages, group.size, in_v=schedule in ("ZBVZeroBubble", "DualPipeV"))
        self.messages = StageMessages(group, self.owners)
        self.own: list[ModelStage] = []
        self._schedules: dict[tuple[int, bool], Any] = {}

    @property
    def own_stages(self) -> list[int]:
        """The numbers of the stages of this process."""
        return [stage for stage, owner in enumerate(self.owners) if owner == self.group.rank]

    def set_params(self, params: Callable[[int], Sequence[nn.Parameter]]) -> None:
        """Build the stages of this process, with the parameters that `params` returns for each."""
        self.own = [ModelStage(self.messages, stage, params(stage)) for stage in self.own_stages]

    def run(self, tasks: Sequence[StageTask], *, backward: bool) -> list[Any]:
        """Run micro-batches. All processes of the pipeline call this with the same ones.

        Returns:
            Without backward, the output of the last stage for each micro-batch, on the process that has it.
        """
        if not tasks:
            return []
        self.messages.learn_shapes(tasks, backward=backward)
        ordered = list(tasks)[::-1] if self.name in REVERSED and backward else list(tasks)
        for stage in self.own:
            stage.begin(ordered)
        schedule, chunks = self._schedule(len(tasks), backward)
        target = torch.zeros(chunks) if backward else None  # not used: the last stage computes the loss
        try:
            schedule.step(target=target, return_outputs=False)
            self.messages.wait_for_sends()
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


def owners_of(stages: int, size: int, *, in_v: bool) -> list[int]:
    """Return the rank that has each stage: 0 1 0 1, or in a V 0 1 1 0."""
    loops = [list(range(size))[:: -1 if in_v and loop % 2 else 1] for loop in range(stages // size)]
    return [rank for loop in loops for rank in loop]


def _identity(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output
