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
class StepSeconds:
    """The time of a step by part, of the slowest process.

    Attributes:
        round: A micro-batch: data, forward and backward pass, and the messages that overlap with them.
        update: The update.
        rest: What the step takes besides: messages that nothing hides, waits, the loop.
    """

    round: float
    update: float
    rest: float

    def step(self, rounds: int) -> float:
        """Return the time of a step with so many micro-batches."""
        return rounds * self.round + self.update + self.rest


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
        seconds: The time of a step by part; None: it was not measured.
        flops: Floating-point operations of a micro-batch.
        threads: The threads of the process.
        recompute: The setting parallel.activation_checkpoint.
        precision: The setting precision.
        epoch_steps: The steps of an epoch.
        total_steps: The steps of the run.
        on_cpu: Whether its tensors are in the memory of the host.
    """

    state: StateBytes
    rounds: RoundBytes | None
    process: int
    peak: int
    shard_imports: int
    micro_batches: tuple[int, ...]
    samples: int
    seconds: StepSeconds | None
    flops: int
    threads: int
    recompute: str = "none"
    precision: str = "fp32"
    epoch_steps: int = 0
    total_steps: int = 0
    on_cpu: bool = True

    @property
    def step_seconds(self) -> float | None:
        """The time of a step on one process; None: it was not measured."""
        if self.seconds is None:
            return None
        return self.seconds.step(sum(self.micro_batches))


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
    on_cpu = timed["device"] == "cpu"
    return RecordedCosts(
        state=state,
        rounds=rounds_of(parts) if parts is not None else None,
        process=max(0, memory["start"] - state.parameters - state.buffers),
        peak=memory["peak"],
        shard_imports=memory["shard_imports"] if on_cpu else 0,
        micro_batches=tuple(timed["micro_batches"]),
        samples=timed["samples"],
        seconds=step_seconds([timed], sum(timed["micro_batches"])),
        flops=parts["flops"] if parts is not None else 0,
        threads=timed["threads"],
        recompute=timed["recompute"],
        precision=timed["precision"],
        epoch_steps=timed["epoch_steps"],
        total_steps=timed["total_steps"],
        on_cpu=on_cpu,
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
        seconds=None,
        flops=parts["flops"],
        threads=parts["threads"],
        recompute=parts["recompute"],
        precision=parts["precision"],
        epoch_steps=parts["epoch_steps"],
        total_steps=parts["total_steps"],
    )


def step_seconds(ranks: Sequence[Mapping[str, Any]], rounds: int) -> StepSeconds:
    """Return the time of a step by part from the records of all processes of a run: medians over steps.

    Args:
        ranks: The records (train/costs/step_costs.py).
        rounds: The most micro-batches that a process computes in a step.
    """
    steps = list(zip(*(rank["steps"] for rank in ranks), strict=True))
    steps = steps[WARM_UP:] or steps[-1:]

    def slowest(*names: str) -> float:
        return median(max(sum(step[name] for name in names) for step in one) for one in steps)

    computing, update = slowest("data", "forward", "backward"), slowest("update")
    return StepSeconds(computing / rounds, update, max(0.0, slowest("seconds") - computing - update))
