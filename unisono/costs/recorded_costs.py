"""What a few steps on one process took: the input of all predictions. train/costs records it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

WARM_UP = 2
"""First steps that are not timed: memory is allocated in them, and modules are loaded."""


@dataclass(frozen=True)
class StateBytes:
    """The memory between two steps of one process that holds the whole model, in bytes.

    Attributes:
        parameters: All parameters.
        buffers: All buffers.
        gradients: One copy of the gradient of all trained parameters.
        optimizer: The state of the optimizers.
        groups: For each group of parameters that FSDP gathers together its bytes, and those of what is trained. The
            group of each model, with the parameters that are in none of its layers, comes after its layers.
    """

    parameters: int
    buffers: int
    gradients: int
    optimizer: int
    groups: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class RoundBytes:
    """The memory of one micro-batch, in bytes, beside the state.

    Attributes:
        activations: What the forward pass keeps for the backward pass.
        first: The peak of a micro-batch that finds no gradient: its own is included.
        following: The peak of a micro-batch that adds to a gradient: the gradient is not included.
        update: The temporary peak of the update.
        layers: The activations by layer; "": outside of all layers.
    """

    activations: int
    first: int
    following: int
    update: int
    layers: Mapping[str, int]


@dataclass(frozen=True)
class RecordedCosts:
    """What steps on one process took.

    Attributes:
        state: The memory between two steps.
        rounds: The memory of a micro-batch; None: it could not be counted.
        process: The memory of the process without parameters and buffers: Python, torch, data.
        peak: The peak memory of the process; 0: no step was computed.
        shard_imports: The memory of the modules that only a process with a part of the model loads.
        micro_batches: The number of micro-batches of each virtual rank.
        samples: The samples of a step.
        round_seconds: The time of a micro-batch; None: it was not measured.
        update_seconds: The time of an update.
        other_seconds: The rest of a step.
        flops: Floating-point operations of a micro-batch.
        threads: The threads of the process.
    """

    state: StateBytes
    rounds: RoundBytes | None
    process: int
    peak: int
    shard_imports: int
    micro_batches: tuple[int, ...]
    samples: int
    round_seconds: float | None
    update_seconds: float
    other_seconds: float
    flops: int
    threads: int

    @property
    def step_seconds(self) -> float | None:
        """The time of a step on one process; None: it was not measured."""
        if self.round_seconds is None:
            return None
        return sum(self.micro_batches) * self.round_seconds + self.update_seconds + self.other_seconds


def state_of(content: Mapping[str, Any]) -> StateBytes:
    """Return the state of a record."""
    groups = tuple((size, trained) for size, trained in content["groups"])
    return StateBytes(**{**content, "groups": groups})


def rounds_of(content: Mapping[str, Any]) -> RoundBytes:
    """Return the memory of a micro-batch of a record (train/costs/memory_parts.py)."""
    return RoundBytes(
        activations=content["activations"],
        first=content["first"],
        following=content["next"],
        update=content["update"],
        layers=content.get("layers", {}),
    )


def costs_of(timed: Mapping[str, Any], parts: Mapping[str, Any] | None) -> RecordedCosts:
    """Return the costs that two records hold.

    Args:
        timed: The record of steps (train/costs/step_costs.py).
        parts: The record of a micro-batch's memory; None: there is none.
    """
    state, memory = state_of(timed["state"]), timed["memory"]
    steps = timed["steps"][WARM_UP:] or timed["steps"][-1:]
    on_cpu = timed["device"] == "cpu"
    return RecordedCosts(
        state=state,
        rounds=rounds_of(parts) if parts is not None else None,
        process=max(0, memory["start"] - state.parameters - state.buffers),
        peak=memory["peak"],
        shard_imports=memory["shard_imports"] if on_cpu else 0,
        micro_batches=tuple(timed["micro_batches"]),
        samples=timed["samples"],
        round_seconds=_median(steps, ("data", "forward", "backward"), each="rounds"),
        update_seconds=_median(steps, ("update",)),
        other_seconds=_median(steps, ("exchange", "other")),
        flops=parts["flops"] if parts is not None else 0,
        threads=timed["threads"],
    )


def without_steps(parts: Mapping[str, Any], process: int) -> RecordedCosts:
    """Return the costs of a model that was only counted, because it does not fit this machine.

    Args:
        parts: The record of a micro-batch's memory on fake tensors, with the order of micro-batches.
        process: The memory of a process with Python and torch.
    """
    return RecordedCosts(
        state=state_of(parts["state"]),
        rounds=rounds_of(parts),
        process=process,
        peak=0,
        shard_imports=0,
        micro_batches=tuple(parts["micro_batches"]),
        samples=parts["samples"],
        round_seconds=None,
        update_seconds=0.0,
        other_seconds=0.0,
        flops=parts["flops"],
        threads=parts["threads"],
    )


def _median(steps: Sequence[Mapping[str, float]], names: Sequence[str], each: str = "") -> float:
    """Return the median over steps of the time of some phases, divided by a count of the step."""
    return median(sum(step[name] for name in names) / (step[each] if each else 1) for step in steps)
