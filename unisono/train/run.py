"""The run: the verbs of a training script. The loop itself belongs to the script."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from unisono.config import Settings
from unisono.data.loader import Collate
from unisono.data.rng import seed_everything
from unisono.distributed.collectives import Collectives
from unisono.errors import LoopError, SettingsError
from unisono.exchange.choose import refuse_hook
from unisono.exchange.wrappers.custom import Build
from unisono.parallel.compiler_determinism import fix_compilers
from unisono.parallel.parallelize import build_model
from unisono.parallel.precision import apply_precision, autocast
from unisono.parallel.speed.model_kernels import ModelKernels
from unisono.plan.rng_keys import INIT, mix
from unisono.tensors.mapped_memory import MappedMemory
from unisono.train.build import build_loop, total_steps
from unisono.train.context import RunContext
from unisono.train.evaluation.collective_pass import collective_pass
from unisono.train.evaluation.evaluate import Measure, evaluate
from unisono.train.evaluation.model_call import Evaluation, Forward
from unisono.train.evaluation.predict import predict
from unisono.train.guarantees.deterministic_kernels import AttentionChoice, fix_kernels
from unisono.train.guarantees.user_errors import check_shapes
from unisono.train.loop import SyncLoop
from unisono.train.modules.buffer_sync import refuse_sync
from unisono.train.pipelining.stage_timing import TimingExample
from unisono.train.recording.media_recorder import MediaRecorder
from unisono.train.recording.media_verbs import MediaVerbs
from unisono.train.state.run_result import as_entry, plain
from unisono.train.step import Step

if TYPE_CHECKING:
    from unisono.checkpoint.saved_weights import WeightSource
    from unisono.parallel.context_parallel.sequence_split import SequenceDims
    from unisono.parallel.parallel_plan import ParallelPlan
    from unisono.parallel.tensor_parallel.tensor_parallel import Plan

S = TypeVar("S", bound=Settings)
Module = TypeVar("Module", bound=torch.nn.Module)


class Run(MediaVerbs, Generic[S]):
    """A training run, as its script sees it.

    settings  the script's settings for this run
    device    the device on which this process computes
    dir       the run directory
    context   the objects that Unisono's own modules share; not for scripts
    """

    def __init__(self, context: RunContext, loop: SyncLoop) -> None:
        fix_compilers()
        fix_kernels(context.device, context.settings.promise)
        self.context, self._loop = context, loop
        self.settings: S = context.settings  # type: ignore[assignment]
        self.device: torch.device = context.device
        self.dir: Path = context.run_dir
        self._total_steps = context.settings.steps
        self._has_steps = False
        self._media = MediaRecorder(context)
        self._kernels = ModelKernels(self.settings.speed, context.device)
        context.extensions = [self._media, AttentionChoice(self.settings.speed.attention)]

    @property
    def rank(self) -> int:
        """The rank of this process, 0 to size - 1."""
        self._note_reader("run.rank")
        return self.context.group.rank

    @property
    def size(self) -> int:
        """The number of processes."""
        self._note_reader("run.size")
        return self.context.group.size

    @property
    def is_main(self) -> bool:
        """Whether this is the main process, which prints and writes files."""
        self._note_reader("run.is_main")
        return self.context.group.rank == 0 and not self.context.waits

    def _note_reader(self, name: str) -> None:
        inspection = self.context.inspection
        if inspection is not None and inspection.on_rank is not None:
            inspection.on_rank(name)

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run. With `epochs` it depends on the data: see count_steps(data)."""
        if self._total_steps is None:
            raise SettingsError(
                "run.total_steps is not known yet.",
                f"The settings say epochs={self.settings.epochs}, and no data set has been seen yet.",
                "call run.count_steps(train_set) first: it returns the number, and sets run.total_steps.",
            )
        return self._total_steps

    def count_steps(self, data: Any) -> int:
        """Return the optimizer steps of the whole run over a data set (of a Stream: on all processes)."""
        if self._total_steps is None:
            self._total_steps = total_steps(self.context, data)
        return self._total_steps

    # -- before the loop

    def place(
        self,
        model: Callable[[], Module] | Module,
        *,
        plan: Plan | ParallelPlan | None = None,
        sequence: SequenceDims | None = None,
        example: Any = None,
        weights: WeightSource | None = None,
    ) -> Module:
        """Move a model to its device, and give every process the same weights, or its part. Return the model.

        Args:
            model: a function that builds it (under the run's seed), or a ready module (all get rank 0's weights).
            plan: for parallel.tensor: {name of a module: a style of torch.distributed.tensor.parallel}, or a
                ParallelPlan.
            sequence: for parallel.context: tensors by position, as in unisono.SequenceDims(positions={"cos": 0}).
            example: for parallel.pipeline: a micro-batch, as collated (model(batch[0]), or model(**batch) for a
                mapping). The stages are then balanced by time, forward and backward, instead of by parameters.
            weights: weights to load in place of those that the function builds, such as unisono.SavedWeights(path).
                Each process reads only its part of them.
        """
        context = self.context
        models, step_sync, settings = context.models, context.step_sync, self.settings
        memory = MappedMemory()
        if not isinstance(model, torch.nn.Module):
            accelerator = None if self.device.type == "cpu" else self.device
            seed = partial(seed_everything, mix(settings.seed, INIT, len(models.modules)), accelerator)
            model = build_model(model, seed, memory, context.mesh, settings.parallel)
        check_shapes(model)
        if settings.virtual_ranks > 1:
            refuse_sync(model)
        values = None if weights is None else weights.values_for(model)
        placed: Module = self._kernels.before_layout(model)  # type: ignore[assignment]
        step_sync.require_same_call("run.place")
        timed = None if example is None else TimingExample(example, settings.precision)
        together = partial(step_sync.require_same_call, "a forward pass")
        models.add(placed, settings.parallel, plan, memory, together, timed, values)
        models.context.add(placed, sequence)
        if models.pipeline is not None:
            context.state.stages = models.pipeline.names
            self.print(models.pipeline.summary)
        self._kernels.after_layout(placed)
        apply_precision(placed, settings.precision, self.device)
        self._loop.place(placed)
        return placed

    def precision(self) -> torch.autocast:
        """Return a context in which torch computes with the setting `precision`, for code outside of placed models."""
        return autocast(self.settings.precision, self.device)

    def track(self, **things: Any) -> None:
        """Name the objects that a resume needs.

        These are models, optimizers, schedules, and other objects with state_dict and load_state_dict; and a dict of
        the plain values that the loop keeps (numbers, text, lists, tensors).

        Call it before the loop. If the run is resumed, this loads the state of the newest complete checkpoint.
        """
        self._loop.track(things.values())
        state = self.context.state
        state.track(**things)
        self.context.models.track(state.models.values())

    def register_comm_hook(self, state: Any, hook: Callable[[Any, Any], Any]) -> None:
        """Call torch's DistributedDataParallel.register_comm_hook. Only with exchange=ddp, and before the loop."""
        refuse_hook(self.settings.exchange)
        self.context.models.comm_hook = state, hook

    @contextmanager
    def first(self) -> Iterator[None]:
        """Return a block that one process on each host enters before the others, to create or fetch something once."""
        step_sync, ahead = self.context.step_sync, self.context.world.local_rank == 0
        if not ahead:
            step_sync.require_same_call("run.first")
        yield
        if ahead:
            step_sync.require_same_call("run.first")

    # -- the loop

    def steps(
        self,
        data: Any = None,
        *,
        shuffle: bool = True,
        collate_fn: Collate | None = None,
        lengths: Sequence[int] | None = None,
        exchange: Build | None = None,
    ) -> Iterator[Step]:
        """Yield the steps of the run over a data set, from the run's current step to its end.

        Between two steps, checkpoints are written and signals are handled.

        Args:
            data: a map-style data set, with __len__ and __getitem__ (or __getitems__), a Stream, or a Mixture. None:
                each micro-batch is a range of sample numbers, which continue from step to step. A function makes a
                micro-batch from such a range when the step needs it: rollouts, synthetic data (docs/guide/data.md).
            shuffle: False: every epoch reads the data in the order of the data set.
            collate_fn: a list of samples -> a batch; by default torch's default_collate.
            lengths: of each sample. The samples of a batch are then of similar length, so that padding is short.
            exchange: your own (docs/guide/exchanges/custom.md): (params, virtual_ranks, group) -> unisono.Exchange.

        Raises:
            DataError: the data set is empty.
            LoopError: the contract of the loop is broken (see Step).
        """
        if self._has_steps:
            raise LoopError(
                "run.steps was called twice.",
                "A run is one sequence of steps, numbered through.",
                "give the number of epochs (--set epochs=3) instead of calling it once an epoch.",
            )
        self._kernels.check_used()
        steps = build_loop(
            self.context,
            self._loop,
            data,
            self.count_steps,
            shuffle=shuffle,
            collate=collate_fn,
            lengths=lengths,
            exchange=exchange,
        )
        self._has_steps = True
        return steps

    def stop(self) -> None:
        """End the loop on every process after the current step, or, between two steps, after the next one.

        It is enough if one process calls it.
        """
        if self._has_steps:
            self.context.progress.requests["stop"] = True

    @property
    def collectives(self) -> Collectives:
        """Collectives with tensors of the script's own (docs/guide/exchanges/custom.md), outside of rounds."""

        def check() -> None:
            self._permit_message()
            self.context.step_sync.require_same_call("run.collectives")

        return Collectives(self.context.group, check=check, permit=self._permit_message)

    def _permit_message(self) -> None:
        self._loop.check_collective()
        self.context.progress.refuse_within_round("run.collectives")

    # -- results

    def log(self, values: Mapping[str, Any] | None = None, **named: Any) -> None:
        """Record values of this step in the timeline and the progress line. The last values go into result.json.

        Of a text, the first 999 characters are recorded. For longer ones there is `run.log_text`.
        """
        logged = {str(name): plain(value) for name, value in {**(values or {}), **named}.items()}
        inspection = self.context.inspection
        if inspection is not None and inspection.on_log is not None:
            inspection.on_log(self.context, logged)
        self.context.monitor.log({name: as_entry(value) for name, value in logged.items()})
        self.context.progress.results.update(logged)

    def print(self, *values: Any) -> None:
        """Print on the main process only, without disturbing the progress line."""
        self.context.monitor.note(" ".join(map(str, values)))

    def evaluate(
        self,
        model: torch.nn.Module,
        data: Any,
        measure: Measure,
        *,
        forward: Forward | None = None,
        collate_fn: Collate | None = None,
    ) -> dict[str, float]:
        """Return the mean of a measure over a data set, with the same bits on any number of processes.

        Every sample counts once. The model runs in eval mode and without gradients.

        Args:
            model: the model.
            data: map-style, or any iterable of samples (then every process reads all samples, and computes its part).
            measure: measure(output, *batch) -> (sum, weight), named after the function; or a dict of such pairs.
            forward: forward(model, batch) -> output; by default model(batch[0]), or model(**batch) for a mapping.
            collate_fn: a list of samples -> a batch.

        Returns:
            {name: sum / weight}, the same on every process.
        """
        context, verb = self.context, "run.evaluate"
        context.progress.refuse_within_round(verb)
        if context.inspection is not None and context.inspection.on_evaluate is not None:
            context.inspection.on_evaluate(context, Evaluation(model, data, measure, forward, collate_fn))
        for attempt in context.collective.attempts(verb, again=not isinstance(data, Iterator)):
            with attempt, collective_pass(context, verb, model, data, forward, collate_fn) as outputs:
                result = evaluate(outputs, measure, context.models.context)
        return result

    def predict(
        self,
        model: torch.nn.Module,
        data: Any,
        *,
        forward: Forward | None = None,
        collate_fn: Collate | None = None,
    ) -> Any:
        """Return the model's output for every sample, in the data's order, on every process and with the same bits.

        The model runs in eval mode and without gradients. Data and forward are as for `evaluate`.

        Returns:
            The output of the model for all samples, in the CPU's memory. A model that returns a tensor
            [micro-batch, ...], or tuples, lists and dicts of them, gives the same structure with [samples, ...].

        Raises:
            LoopError: an output does not have one row for each sample, or rows have several shapes.
            DataError: the data has no samples.
        """
        context, verb = self.context, "run.predict"
        context.progress.refuse_within_round(verb)
        for attempt in context.collective.attempts(verb, again=not isinstance(data, Iterator)):
            with attempt, collective_pass(context, verb, model, data, forward, collate_fn) as outputs:
                result = predict(outputs)
        return result
