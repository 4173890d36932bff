"""The progress of a run: everything about it that changes from step to step and is no state of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from unisono.plan.batch_order import BatchOrder
from unisono.train.step_state import StepState


@dataclass(slots=True)
class Progress:
    """The progress of one process, and what it says of the run.

    steps_done      steps of the run that are done
    resumed_at      steps that were done when this process began
    changes         changes of bits since step 0: {"step", "field", "from", "to"}
    differences     what differs between the machines and changes bits, in words
    results         the values that the script logged last, by name
    same_after      steps after which all processes were last known to hold the same weights
    broken_promise  why the promise was lowered, and from which step on; "": it holds as far as is known
    exchange        promise and reason of the script's own exchange; None: the settings name the exchange
    order           the order of samples; None: `run.steps` was not called yet
    last            number of steps of the whole run
    step            the step under way, or the last one
    done            the last step whose update was made
    steppers        optimizers and schedules that were stepped, in the order of their first step
    requests        flags of this process that ride along with the next step: "stop", "leave", "unsaved"
    agreed          for each flag, the number of processes that raised it in the last step
    leaving         whether a signal asked this process to save and leave
    is_over         whether the script has returned and everything is saved
    samples_here    samples of the steps that were done since this process began
    bytes_sent      bytes of gradients that left this process; `bytes_uncompressed`: without compression
    began           time at which the loop began, and `ended`, seconds of time.perf_counter
    """

    steps_done: int = 0
    resumed_at: int = 0
    changes: list[dict[str, Any]] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    results: dict[str, Any] = field(default_factory=dict)
    same_after: int = 0
    broken_promise: str = ""
    exchange: tuple[str, str] | None = None
    order: BatchOrder | None = None
    last: int = 0
    step: StepState | None = None
    done: StepState | None = None
    steppers: list[Any] = field(default_factory=list)
    requests: dict[str, bool] = field(default_factory=lambda: {"stop": False, "leave": False})
    agreed: Mapping[str, int] = field(default_factory=lambda: {"stop": 0, "leave": 0})
    leaving: bool = False
    is_over: bool = False
    samples_here: int = 0
    bytes_sent: float = 0.0
    bytes_uncompressed: float = 0.0
    began: float | None = None
    ended: float | None = None

    @property
    def next_step(self) -> int:
        """The first step of which this process has computed nothing."""
        if self.step is None or self.step.stage == "new":
            return self.steps_done
        return self.step.number + 1

    def learning_rate(self) -> float | None:
        """Return the learning rate of the first parameter group; None if it is on an accelerator or unknown."""
        for stepper in self.steppers:
            for group in getattr(stepper, "param_groups", ()):
                rate = group.get("lr")
                if isinstance(rate, torch.Tensor):
                    return float(rate) if rate.device.type == "cpu" else None
                return None if rate is None else float(rate)
        return None

    def refuse_within_round(self, verb: str) -> None:
        """Raise LoopError if a micro-batch is under way. All processes call `verb` together."""
        if self.step is not None:
            self.step.refuse_within_round(verb)
