"""Balance the stages of a pipeline by the time that layers take, which one process measures with an example batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from unisono.data.loader import to_device
from unisono.distributed.mesh import Mesh
from unisono.distributed.process_group import wrap_peer_errors
from unisono.errors import LoopError, Problem
from unisono.parallel.precision import autocast
from unisono.train.evaluation.model_call import call, restored_rng

if TYPE_CHECKING:
    from unisono.parallel.pipeline_parallel.partition import Partition


class TimingExample(NamedTuple):
    """A micro-batch as the data set's collate makes it, and the precision that the run computes with."""

    batch: Any
    precision: str


def apply_times(cut: Partition, model: nn.Module, example: TimingExample, mesh: Mesh) -> None:
    """Set the cost of each link of a partition to the time of its forward and backward pass on the main process.

    The whole model is still on every process. The others wait, except those that share the matrices of the main
    process's layers, which compute them together. All processes use the times of the main process, so all get the same
    partition. Weights, buffers, gradients and random numbers do not change.

    Raises:
        LoopError: the model cannot be called with the example; on every process.
    """
    seconds: list[float] = []
    problem: Problem | None = None
    if mesh.pipeline.rank == mesh.data.rank == 0:
        try:
            seconds = _times(cut, model, example, mesh)
        except LoopError as error:
            problem = error.problems[0]
        except Exception as error:
            problem = _not_callable(cut.name, error)
    with wrap_peer_errors("Measuring how long a pipeline's layers take"):
        said = mesh.world.broadcast_object({"seconds": seconds, "problem": problem})
    if said["problem"] is not None:
        raise LoopError(*said["problem"])
    cut.set_times(said["seconds"])


def _times(cut: Partition, model: nn.Module, example: TimingExample, mesh: Mesh) -> list[float]:
    from unisono.parallel.pipeline_parallel.fx_partition import FxPartition  # torch.fx, which only pipelines need
    from unisono.parallel.pipeline_parallel.layer_timing import clock_of, seconds_of_links, seconds_of_modules

    device = mesh.world.device
    args, kwargs = call(_arguments, to_device(example.batch, device))
    around, clock = autocast(example.precision, device), clock_of(device, shared=mesh.tensor.size > 1)
    with restored_rng([model], device):
        if isinstance(cut, FxPartition):
            return seconds_of_links(model, cut, cut.bind(args, kwargs), clock, around)
        return seconds_of_modules(model, cut.links, args, kwargs, clock, around)


def _arguments(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, kwargs


def _not_callable(name: str, error: Exception) -> Problem:
    why = (str(error) or "it has no message").splitlines()[0]
    return Problem(
        f"Cannot time the layers of {name} with the example of run.place.",
        f"The model cannot go forward and backward with it: {type(error).__name__}: {why}",
        "give a micro-batch as the data set's collate makes it: a tuple, of which the first part goes into the model, "
        "or a mapping by name. Without an example, stages are balanced by their parameters.",
    )


def describe_stages(cut: Partition, begins: Sequence[int], *, named: bool) -> str:
    """Return a line with the layers and the share of each stage.

    For example `pipeline: 2 stages, tokens to blocks.1 (48%), blocks.2 to head (52%), by parameters`.

    Args:
        cut: the partition.
        begins: the first link of each stage.
        named: whether the user has chosen the split points.
    """
    stages = []
    ends = [*begins[1:], len(cut.links)]
    for first, end, share in zip(begins, ends, cut.cost_shares(begins), strict=True):
        names = dict.fromkeys((cut.links[first].name, cut.links[end - 1].name))
        stages.append(f"{' to '.join(names)} ({share:.0%})")
    by = "time" if cut.timed else "parameters"
    how = f"as named (shares by {by})" if named else f"by {by}"
    return f"pipeline: {len(begins)} stages, {', '.join(stages)}, {how}"
