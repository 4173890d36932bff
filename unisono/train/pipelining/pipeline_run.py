"""The pipeline of a run: a model that is divided into stages, and its steps, evaluations and forward passes.

Every process builds the whole model, and keeps the parameters of its own stages under their names. The model's forward
is then called for every stage, and computes the part of that stage. Unless it is the last stage, it raises
`PipelineStageDone` to leave the user's code that follows (a loss, `.logits`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten, treespec_dumps

from unisono import phases
from unisono.data.eval_loader import EvalBatch, EvalLoader
from unisono.data.rng import State, get_state, set_state
from unisono.distributed.mesh import Mesh
from unisono.distributed.value_transfer import broadcast_tensors
from unisono.errors import LoopError
from unisono.exchange.wrappers.per_stage import PerStageExchange
from unisono.parallel.layers import ForwardWrapper
from unisono.parallel.pipeline_parallel.fx_partition import CannotTrace, FxPartition
from unisono.parallel.pipeline_parallel.metadata import PLAIN
from unisono.parallel.pipeline_parallel.partition import LocalStages, Partition, StageInput
from unisono.parallel.pipeline_parallel.schedule import PipelineSchedule
from unisono.parallel.pipeline_parallel.shadow_partition import ShadowPartition
from unisono.parallel.pipeline_parallel.stage_messages import Tensors
from unisono.plan.batch_order import MicroBatchId
from unisono.tensors.codec import TensorTable, decode, encode
from unisono.torch_compat.tree_specs import load_treespec
from unisono.train.evaluation.model_call import Forward, call
from unisono.train.modules.buffer_sync import versions
from unisono.train.pipelining.sharded_activations import from_parts, parts_of
from unisono.train.pipelining.stage_state import StageParameters
from unisono.train.pipelining.stage_timing import TimingExample, apply_times, describe_stages

if TYPE_CHECKING:
    from unisono.config import ParallelSettings
    from unisono.distributed.process_group import ProcessGroup
    from unisono.exchange.base import Exchange
    from unisono.tensors.mapped_memory import MappedMemory

FinishBatch = Callable[[MicroBatchId, Any, Any], torch.Tensor]
"""Returns the loss of a micro-batch, from its place, its batch and the model's output."""


class PipelineStageDone(BaseException):
    """This stage has done its part of a forward pass. It is no Exception, so the user's code does not catch it."""

    def __init__(self, sends: Tensors) -> None:
        super().__init__()
        self.sends = sends


class PipelinedForward(ForwardWrapper):
    """Replaces the forward of a model that is divided into stages."""

    def __init__(self, pipeline: Pipeline, model: nn.Module) -> None:
        super().__init__(model)
        self.pipeline = pipeline

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        turn = self.pipeline.turn
        if turn is None:
            return self.pipeline.alone(self.module, args, kwargs)
        if turn.done:
            raise LoopError(
                "The model was called twice for one micro-batch.",
                "In a pipeline one call passes from the first stage to the last, and then the loss is computed.",
                "compute both in one forward, and return both results.",
            )
        turn.done = True
        call = StageInput(self.forward, args, kwargs, turn.begin)
        output, sends = self.pipeline.cut.compute(self.module, turn.stage, call, turn.received)
        if turn.stage + 1 < self.pipeline.line.stages:
            raise PipelineStageDone(sends)
        return output


@dataclass
class StageTurn:
    """One stage's part of a forward pass. `begin` sets torch's generators to their state after the stage before."""

    stage: int
    received: Tensors
    begin: Callable[[], None]
    done: bool = False


class RngStart(NamedTuple):
    """The state of generators before a micro-batch: torch's, which is passed from stage to stage, and the others."""

    dice: torch.Tensor
    others: State


@dataclass
class MicroBatchRun:
    """One micro-batch on its way through the stages (a StageTask, parallel/pipeline_parallel/stage.py).

    start   the state of the generators when its forward pass begins; the same on all processes of the pipeline
    finish  returns the result of the last stage, from the micro-batch and the output
    gather  returns a block for the backward pass of a stage
    """

    pipeline: Pipeline
    model: nn.Module
    batch: Any
    call: Callable[[nn.Module, Any], Any]
    start: RngStart
    finish: Callable[[Any, Any], Any]
    gather: Callable[[int], Any] | None = None

    @property
    def kind(self) -> Any:
        leaves = tree_leaves(self.batch)
        return (self.model.training, type(self.batch), *map(_kind, leaves))

    def forward(self, stage: int, received: Tensors) -> Tensors:
        phases.enter("forward" if self.gather is not None else "evaluate")
        pipeline, device = self.pipeline, self.pipeline.line.group.device
        *tensors, dice = received or [self.start.dice]
        set_state(self.start.others)
        set_rng_state(self.start.dice, device)
        across = pipeline.across
        tensors = from_parts(tensors, across) if across else tensors
        turn = pipeline.turn = StageTurn(stage, tensors, partial(set_rng_state, dice, device))
        batch = tree_map(_itself, self.batch)  # a copy: forward may remove items of a dict, which the next stage needs
        held = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
        before = versions(held)
        try:
            output = self.call(self.model, batch)
        except PipelineStageDone as reached:
            sends = parts_of(reached.sends, across) if across else reached.sends
            return [*sends, get_rng_state(device).to(device)]
        finally:
            pipeline.turn = None
            if versions(held) != before:
                raise LoopError(
                    "A forward pass changed its micro-batch in place.",
                    "In a pipeline every stage gets the same micro-batch, and each would change it again.",
                    "create a new tensor (x = x - 1, not x -= 1), or --set parallel.pipeline=1.",
                )
        if not turn.done:
            raise LoopError(
                "A forward pass did not call the model.",
                "In a pipeline each stage computes its part when the model that run.place has returned is called.",
                "call it: forward=lambda model, batch: model(batch[0]).",
            )
        return [self.finish(batch, output)]

    @contextmanager
    def gathering(self, stage: int) -> Iterator[None]:
        assert self.gather is not None
        phases.enter("backward")
        with self.gather(stage):
            yield
        phases.enter("exchange")


class Pipeline:
    """The pipeline of a model, on this process.

    turn     the stage for which the model's forward is called now; None: the script calls it outside of a step
    summary  a line that describes the stages
    """

    def __init__(
        self,
        mesh: Mesh,
        parallel: ParallelSettings,
        model: nn.Module,
        before: Pipeline | None,
        example: TimingExample | None,
        memory: MappedMemory,
    ) -> None:
        """Divide a model, which has the same values on all processes, and move this process's stages to its device.

        Args:
            mesh: the processes.
            parallel: the settings.
            model: the model.
            before: the pipeline of another model.
            example: a micro-batch to time the layers with.
            memory: the files in which the model was built.
        """
        if before is not None:
            raise LoopError(
                f"Cannot place a {type(model).__name__} in a pipeline, after a {before.cut.name}.",
                "A pipeline is one model that is divided into stages.",
                "combine them to one model, or --set parallel.pipeline=1",
            )
        _refuse_norms(model)
        self.world: ProcessGroup = mesh.world
        self.speaks = mesh.tensor.rank == 0
        """Whether the outputs of this process are used, among the processes that share its matrices."""
        self.turn: StageTurn | None = None
        self.across = mesh.torch_mesh("tensor") if mesh.tensor.size > 1 and parallel.sequence_parallel else None
        """The mesh along which sequences are divided between stages, if they are."""
        self.line = line = PipelineSchedule(mesh.pipeline, parallel.schedule, parallel.stages_per_rank)
        with memory.allocating():  # it may call the model
            self.cut: Partition = cut_of(model)
        begins = self.cut.stage_starts(line.stages, parallel.split_points)  # raises an error before anything is timed
        if example is not None:
            apply_times(self.cut, model, example, mesh)
            begins = self.cut.stage_starts(line.stages, parallel.split_points)
        begins = mesh.world.broadcast_object(begins)
        self.summary = describe_stages(self.cut, begins, named=bool(parallel.split_points))
        self.names = StageParameters(model, mesh, self.cut.stages_of_params(model, begins), line.owners)
        own = line.own_stages
        kept = {id(p) for stage in own for p in self.names.of(stage)}
        self.cut.apply(model, LocalStages(begins, own, kept, mesh.world.device))
        self.cut.drop_params(kept)
        model.to(mesh.world.device)
        model.forward = PipelinedForward(self, model)
        line.set_params(self.names.of)

    def __deepcopy__(self, memo: dict[int, Any]) -> Pipeline:
        return self  # an average of the weights goes through the same stages

    @property
    def has_last(self) -> bool:
        """Whether this process has the last stage."""
        return self.line.owners[-1] == self.line.group.rank

    def parts_of(self, params: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
        """Return, for each stage of this process, which of these parameters it uses."""
        wanted = set(map(id, params))
        return [[p for p in self.names.of(stage) if id(p) in wanted] for stage in self.line.own_stages]

    def grown(self, count: int) -> LoopError:
        return LoopError(
            "A model in a pipeline got new parameters.",
            f"The model has {count} new parameters, and it is divided into stages already.",
            "let it grow before run.place, or --set parallel.pipeline=1",
        )

    def changing(self, step: int) -> LoopError:
        return LoopError(
            f"The forward pass of step {step} changed buffers.",
            "In a pipeline many micro-batches are computed at once, and none may depend on the state after another.",
            "change them between two steps, or --set parallel.pipeline=1",
        )

    # -- a step

    def train(
        self,
        exchange: Exchange,
        batches: Sequence[tuple[MicroBatchId, Any, RngStart]],
        model: nn.Module,
        forward: Forward | None,
        finish: FinishBatch,
    ) -> None:
        """Run the micro-batches of a step forward and backward through the stages.

        Afterward every stage of this process has given its gradients to the exchange.

        Args:
            exchange: of the step's gradient.
            batches: the micro-batches of this process, in order, with the state of the generators after each fetch.
            model: the model.
            forward: forward(model, batch) -> output.
            finish: returns the loss of a micro-batch, with which its backward pass begins.
        """
        assert isinstance(exchange, PerStageExchange)
        stages = dict(zip(self.line.own_stages, exchange.parts, strict=True))
        last: dict[int, MicroBatchId] = {}

        @contextmanager
        def gather(place: MicroBatchId, stage: int) -> Iterator[None]:
            assert stage not in last or last[stage] < place, "micro-batches go backward in order"
            last[stage] = place
            stages[stage].enter(place.virtual_rank, last=False)  # messages that are sent late do not delay a neighbor
            yield
            stages[stage].leave()

        runs = [
            MicroBatchRun(self, model, batch, forward or call, start, partial(finish, place), partial(gather, place))
            for place, batch, start in batches
        ]
        self.line.run(runs, backward=True)

    # -- without gradients

    def outputs(
        self, model: nn.Module, batches: Sequence[Any], starts: Sequence[RngStart], forward: Forward
    ) -> list[Any]:
        """Return the outputs for these batches on the process that has the last stage; elsewhere an empty list."""
        rounds = [
            MicroBatchRun(self, model, batch, forward, start, _as_it_is)
            for batch, start in zip(batches, starts, strict=True)
        ]
        return [output for (output,) in self.line.run(rounds, backward=False)]

    def walk(self, model: nn.Module, walk: EvalLoader, forward: Forward) -> Iterator[tuple[EvalBatch, Any]]:
        """Yield (micro-batch, output) of all micro-batches on the process with the last stage; elsewhere nothing."""
        micro_batches = iter(walk)
        while window := [(found, self.start()) for found in islice(micro_batches, 2 * self.line.stages)]:
            batches, starts = [found.batch for found, _ in window], [start for _, start in window]
            outputs = self.outputs(model, batches, starts, forward)
            yield from zip([found for found, _ in window], outputs, strict=False)

    def alone(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a forward pass outside of a step, without gradients. All processes call this, and get the output."""

        def ended(m: nn.Module, b: Any) -> Any:
            return m(*b[0], **b[1]), get_rng_state(self.line.group.device)

        with torch.no_grad():
            found = self.outputs(model, [(args, kwargs)], [self.start()], ended)
            output, dice = self._everywhere(found[0] if found else None)
        set_rng_state(dice, self.line.group.device)
        return output

    def start(self) -> RngStart:
        """Return the current state of the generators."""
        return RngStart(get_rng_state(self.line.group.device), get_state())

    def _everywhere(self, output: Any) -> Any:
        """Broadcast the output from the process with the last stage to all processes of the pipeline."""
        leaves, spec = tree_flatten(output)
        strange = [type(leaf).__name__ for leaf in leaves if not isinstance(leaf, (torch.Tensor, *PLAIN))]
        owner, group, tensors = self.line.owners[-1], self.line.group, TensorTable()
        mine = (
            {"strange": strange} if strange else {"spec": treespec_dumps(spec), "leaves": encode(leaves, "", tensors)}
        )
        found = group.all_gather_object(mine if self.has_last else None)[owner]
        if "strange" in found:
            raise LoopError(
                "Cannot send the output of a model to all processes of its pipeline, outside of a step.",
                f"It returned a {found['strange'][0]}, and only tensors and plain values can be sent.",
                "let it return these (Hugging Face: use_cache=False).",
            )
        arrived = broadcast_tensors(group, found["leaves"], tensors, owner)
        return tree_unflatten(decode(found["leaves"], arrived), load_treespec(found["spec"]))


def cut_of(model: nn.Module) -> Partition:
    """Return the partition of a model: traced by torch.fx if possible, otherwise run with shadow tensors."""
    try:
        return FxPartition(model)
    except CannotTrace as error:
        return ShadowPartition(model, str(error))


def _as_it_is(batch: Any, output: Any) -> Any:
    return output


def _itself(leaf: Any) -> Any:
    return leaf


def _kind(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.dtype
    if isinstance(leaf, range):
        return len(leaf)
    return leaf if leaf is None or isinstance(leaf, bool | int | float) else type(leaf)


def get_rng_state(device: torch.device) -> torch.Tensor:
    """Return the state of torch's generators, of the CPU and of the device, as bytes."""
    here = torch.default_generator.get_state()
    return here if device.type == "cpu" else torch.cat([here, torch.get_device_module(device).get_rng_state()])


def set_rng_state(dice: torch.Tensor, device: torch.device) -> None:
    """Restore the state of torch's generators."""
    size = len(torch.default_generator.get_state())
    dice = dice.cpu()
    torch.default_generator.set_state(dice[:size])
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(dice[size:])


def _refuse_norms(model: nn.Module) -> None:
    for name, part in model.named_modules():
        if isinstance(part, _BatchNorm):
            raise LoopError(
                f"Cannot divide a {type(model).__name__} with batch norm into pipeline stages.",
                f"Its {name or 'self'} is a {type(part).__name__}: running statistics pass from one micro-batch to the "
                "next, and a pipeline computes many at once.",
                "use GroupNorm or LayerNorm, or replicas of the whole model: --set parallel.pipeline=1",
            )
