"""The run: the verbs of a training script. The loop itself belongs to the script."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TextIO, TypeVar

import torch

from unisono.checkpoint.load import Checkpoint
from unisono.config import Settings, plural
from unisono.config.mesh_shape import fill, wanted
from unisono.data.loader import Collate, length_of
from unisono.data.rng import RngStates, seed_everything
from unisono.data.streaming.stream import Stream
from unisono.distributed.collectives import Collectives
from unisono.distributed.mesh import build_mesh
from unisono.errors import LoopError, RunStopped, SettingsError
from unisono.exchange.choose import refuse_hook
from unisono.exchange.exchange_state import ExchangeStates
from unisono.exchange.wrappers.custom import Build
from unisono.monitor.step_monitor import StepMonitor
from unisono.parallel.compiler_determinism import fix_compilers
from unisono.parallel.precision import LossScale, apply_precision, autocast
from unisono.plan.assignment import Spans
from unisono.plan.rng_keys import INIT, mix
from unisono.train.balance.rebalance import set_assignment
from unisono.train.build import build_loop
from unisono.train.evaluation.collective_pass import run_collective_pass
from unisono.train.evaluation.evaluate import Measure, evaluate
from unisono.train.evaluation.model_outputs import Forward
from unisono.train.evaluation.predict import predict
from unisono.train.guarantees.promise import plain, promise, result
from unisono.train.guarantees.user_errors import check_shapes
from unisono.train.loop import StepLoop
from unisono.train.modules.buffer_sync import refuse_sync
from unisono.train.modules.models import Models
from unisono.train.pipelining.stage_timing import TimingExample
from unisono.train.recovery.step_recovery import join
from unisono.train.state.run_state import ATTRIBUTES, EXCHANGE, RANDOM, SCALE, RunState
from unisono.train.state.save_state import save, settle
from unisono.train.step import Step
from unisono.train.step_sync import StepSync
from unisono.train.sync_points import sync_points

if TYPE_CHECKING:
    from unisono.distributed.process_group import ProcessGroup
    from unisono.environment import World
    from unisono.parallel.context_parallel.sequence_split import SequenceDims as Sequences
    from unisono.parallel.parallel_plan import ParallelPlan
    from unisono.parallel.tensor_parallel.tensor_parallel import Plan

S = TypeVar("S", bound=Settings)
Module = TypeVar("Module", bound=torch.nn.Module)
T = TypeVar("T")


class Run(Generic[S]):
    """A training run, as its script sees it.

    settings  the script's settings, as they are in this run
    rank      this process, 0 to size - 1
    size      how many processes there are
    device    where this process computes
    dir       the run directory
    """

    def __init__(
        self,
        settings: S,
        *,
        world: World,
        group: ProcessGroup,
        run_dir: Path,
        identity: Mapping[str, Any],
        resumed: Checkpoint | None,
        output: TextIO,
        color: bool = False,
        accepted: Sequence[str] = (),
        engine: type[StepLoop] = StepLoop,
    ) -> None:
        self.settings, self.world, self.dir = settings, world, run_dir
        fix_compilers()
        self._everybody, self.device = group, group.device
        self.steps_done = self._resumed_at = resumed.steps if resumed else 0
        self.results: dict[str, Any] = {}
        self.changes: list[dict[str, Any]] = list(resumed.about["changes"]) if resumed else []
        self.differences: list[str] = []
        """What differs between the machines of this run and changes bits, in words."""
        axes = fill(wanted(settings.parallel), group.size)
        assert axes is not None, "checked before"
        self._mesh, self._group = build_mesh(axes, group), group
        self._identity = dict(identity)
        self._accepted = accepted
        self._table = StepSync(settings.virtual_ranks, group, speaks=self._mesh.is_leader, slices=self._mesh.context)
        self._state = RunState(run_dir, self._mesh, resumed)
        self._generators = RngStates(group.device)
        self._scale = LossScale(settings.precision)
        self._carried = ExchangeStates(f"{settings.exchange} {settings.compress.kind}")
        self._models = Models(self._mesh, settings.virtual_ranks)
        self._state.placed = self._models.modules
        self._sites = sync_points(
            settings, self._mesh, self._models, self._table, self._state, self._carried, self.print
        )
        kept = {ATTRIBUTES: self._models.buffers.attributes, EXCHANGE: self._carried, SCALE: self._scale}
        self._state.track(**kept, **{RANDOM: self._generators})
        self._total_steps = settings.steps
        self._kind = engine
        self._engine: StepLoop | None = None
        rank = group.rank if world.number is None else world.number  # who joins later is alone until then
        self._watcher = StepMonitor(run_dir, rank, output, live=world.terminal, columns=world.columns, color=color)
        self._leave = False
        self._over = False  # the script has returned, and all is saved
        self.on_lead: Callable[[], None] = lambda: None
        """What a process does that becomes the main one, since those before it have died."""
        self._last_step: Step | None = None
        self._done: Step | None = None  # the last one whose update was made
        self._began: float | None = None
        self._ended: float | None = None
        self._samples_here = 0

    @property
    def rank(self) -> int:
        return self._everybody.rank

    @property
    def size(self) -> int:
        return self._everybody.size

    @property
    def is_main(self) -> bool:
        """Is this the process that speaks for all?"""
        return self.rank == 0 and not self.waits

    @property
    def waits(self) -> bool:
        """Was this process started to join others, and has not joined them yet?"""
        return self._everybody.company is not None and self._everybody.company.joins

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run. With `epochs` it is known once the data is: see count_steps(data)."""
        if self._total_steps is None:
            raise SettingsError(
                "run.total_steps was asked for.",
                f"The settings say epochs={self.settings.epochs}, and no data set has been seen yet.",
                "run.count_steps(train_set) tells, and run.total_steps knows it from then on.",
            )
        return self._total_steps

    def count_steps(self, data: Any) -> int:
        """Optimizer steps of the whole run over this data set (of a Stream, every process must ask)."""
        if self._total_steps is None:
            assert self.settings.epochs is not None
            self._settle(data)
            self._total_steps = self.settings.epochs * -(-length_of(data, "The training set") // self.settings.batch)
        return self._total_steps

    def _settle(self, data: Any) -> None:
        """Let a Stream know its length; that may take a while, so it is said."""
        if isinstance(data, Stream):
            if data.counts is None:
                self.print(f"counting the samples of {plural(len(data.shards.names), 'shard')}")
            data.read_lengths(self._group, self.settings.loader.on_error)

    # -- before the loop

    def place(
        self,
        model: Callable[[], Module] | Module,
        *,
        plan: Plan | ParallelPlan | None = None,
        sequence: Sequences | None = None,
        example: Any = None,
    ) -> Module:
        """Put a model where it trains, and give every process the same weights, or its part; returns the model.

        model     a function that builds it (under the run's seed), or a ready module (rank 0's weights are taken)
        plan      for parallel.tensor: {name of a module: a style of torch.distributed.tensor.parallel}, or a Placement
        sequence  for parallel.context: what goes with positions, as in unisono.SequenceDims(positions={"cos": 0})
        example   for parallel.pipeline: a micro-batch, as collated (model(batch[0]), or model(**batch) for a mapping).
                  The stages then take equally long, forward and backward, instead of having as many parameters
        """
        if not isinstance(model, torch.nn.Module):
            seed_everything(
                mix(self.settings.seed, INIT, len(self._models.modules)),
                None if self.device.type == "cpu" else self.device,
            )
            model = model()
        check_shapes(model)
        if self.settings.virtual_ranks > 1:
            refuse_sync(model)
        placed: Module = model  # type: ignore[assignment]
        self._table.require_same_call("run.place")
        timed = None if example is None else TimingExample(example, self.settings.precision)
        self._models.add(
            placed, self.settings.parallel, plan, lambda: self._table.require_same_call("a forward pass"), timed
        )
        self._models.context.add(placed, sequence)
        if self._models.pipeline is not None:
            self._state.stages = self._models.pipeline.names
            self.print(self._models.pipeline.told)
        apply_precision(placed, self.settings.precision, self.device)
        return placed

    def precision(self) -> torch.autocast:
        """A context in which torch computes with the setting `precision`, for what no placed model's forward does."""
        return autocast(self.settings.precision, self.device)

    def track(self, **things: Any) -> None:
        """Name what a resume needs: models, optimizers, schedules, anything with state_dict and load_state_dict; and a
        dict, of what the loop keeps in plain values (numbers, text, lists, tensors).

        Call it before the loop. If the run is resumed, the state of the newest whole checkpoint is loaded here.
        """
        self._state.track(**things)
        self._models.track(self._state.models.values())

    def register_comm_hook(self, state: Any, hook: Callable[[Any, Any], Any]) -> None:
        """With exchange=ddp, before the loop: torch's DistributedDataParallel.register_comm_hook."""
        refuse_hook(self.settings.exchange)
        self._models.comm_hook = state, hook

    @contextmanager
    def first(self) -> Iterator[None]:
        """A block that one process on each host enters before the others, for what is made or fetched once."""
        ahead = self.world.local_rank == 0
        if not ahead:
            self._table.require_same_call("run.first")
        yield
        if ahead:
            self._table.require_same_call("run.first")

    # -- the loop

    def steps(
        self,
        data: Any = None,
        *,
        shuffle: bool = True,
        collate_fn: Collate | None = None,
        exchange: Build | None = None,
    ) -> Iterator[Step]:
        """The steps of the run over a map-style data set or a Stream, from where it stands to its end.

        data        has __len__ and __getitem__ (or __getitems__); samples are collated by torch's default_collate.
                    None: each micro-batch is a range of sample numbers, which go on from step to step: for what the
                    loop makes itself (rollouts, synthetic data)
        shuffle     False: every epoch walks the data in its own order
        collate_fn  a list of samples -> a batch
        exchange    one of the script's own (docs/exchanges.md): (params, virtual_ranks, group) -> unisono.Exchange

        Between two steps checkpoints are written and signals are heard. Raises DataError for an empty data set, and
        LoopError where the contract of the loop is broken (see Step).
        """
        if self._engine is not None:
            raise LoopError(
                "run.steps was called twice.",
                "A run is one sequence of steps, numbered through.",
                "give the number of epochs (--set epochs=3) instead of calling it once an epoch.",
            )
        self._engine = build_loop(self, data, shuffle=shuffle, collate=collate_fn, exchange=exchange)
        self._models.on_change()
        return self._steps(self._engine)

    def _steps(self, engine: StepLoop) -> Iterator[Step]:
        if self.world.joins:
            join(engine.survivors)
        self._state.begin()
        self.changes += [
            {"step": self.steps_done, "field": name, "from": a, "to": b} for name, a, b in self._state.changes
        ]
        seen = engine.order.samples(self.steps_done)
        self._watcher.begin(engine.last, self.steps_done, seen, resumed=self._resumed_at > 0)
        self._sites.begin(engine, self.steps_done)
        self._began = time.perf_counter()
        checked = 0  # how many models and optimizers: a new one may come later
        every = self.settings.checkpoint.every
        for number in range(self.steps_done, engine.last):
            step = self._last_step = engine.new_step(number)
            engine.asked |= {"leave": self._leave, "unsaved": self._state.saver.failed}
            engine.before_step(number)
            try:
                yield step
            except GeneratorExit:  # the loop was left with break
                self._state.seal(half_done=step.is_half_done)
                raise
            step.finish()
            if checked != (checked := len(self._models.modules) + len(engine.steppers)):
                self._state.check_whole(self._models.modules, engine.steppers)
            self.steps_done = number + 1
            self._samples_here += step.samples
            self._done = step
            self._watcher.step(step)
            engine.verification.end(number)
            if engine.divergence is not None:
                engine.divergence.after(number)
            met = self._sites.after(engine, step)
            if met is None:
                continue
            if met.agreed.get("unsaved"):
                settle(self)  # raises what it was
            if met.agreed["leave"]:
                self._save()
                self._sites.rest(step)
                raise RunStopped
            if met.agreed["stop"]:
                break
            if every and self.steps_done // every > met.before // every and self.steps_done < engine.last:
                self._save(beside=True)
            if met.agreed.get("joins") and engine.survivors is not None and self.steps_done < engine.last:
                engine.survivors.admit_joiners()
            if engine.buddy is not None and self.steps_done < engine.last:
                engine.buddy.copy(self.steps_done)
        settle(self)
        if self._state.saved_after != self.steps_done:
            self._save()
        self._sites.rest(self._done)
        self._ended = time.perf_counter()
        engine.end()

    def finish(self) -> None:
        """The script has returned. If it left the loop with break, what its last step did is saved as well."""
        self.together("the script's end", lambda: self._table.require_same_call("the script's end"))
        if self._engine is not None and self._engine.buddy is not None:
            self._engine.buddy.settle()
        if self._engine is not None and self._ended is None and self._last_step is not None:
            if self._last_step.is_done:
                self._done = self._last_step
                self.steps_done = self._last_step.number + 1
                self._sites.after(self._engine, self._last_step)
            settle(self)
            if self._state.saved_after != self.steps_done:
                touched = self._state.touched_since_break(one_stream=self.settings.virtual_ranks == 1)
                now = {"step": self.steps_done, "field": "the state", "from": "the last step's", "to": touched}
                self._save([now] if touched else [])
            self._sites.rest(self._done)
        self._over = True

    @property
    def is_finished_before(self) -> bool:
        """Had this run done all its steps when this process began?"""
        return self._state.resumed is not None and self._engine is not None and self._samples_here == 0

    def stop(self) -> None:
        """End the loop after the step under way, or, asked between two steps, after the next one, on every process; one
        process asking is enough."""
        if self._engine is not None:
            self._engine.asked["stop"] = True

    def leave(self) -> None:
        """A signal came: save and leave after the step under way, if one is, and something is left to save."""
        if self._over:
            return
        self._leave = True
        if self._ended is not None and self.size == 1:
            raise RunStopped
        if self._engine is not None:
            self._engine.asked["leave"] = True

    def deal(self, spans: Spans) -> int:
        """Deal the virtual ranks anew (spans[r] is what process r computes), without changing a bit of the result.
        Every process calls it between the same two steps; returns the first step that nobody has fetched for."""
        assert self._engine is not None
        self._table.require_same_call("run.deal")
        return set_assignment(self._engine, self._group, spans)

    @property
    def collectives(self) -> Collectives:
        """What all processes do together with tensors of the script's own (docs/exchanges.md), outside of rounds."""
        return Collectives(self._group, ask=self._ask_for_collective)

    def _ask_for_collective(self) -> None:
        if self._last_step is not None:
            self._last_step.refuse_within("run.collectives")
        self._table.require_same_call("run.collectives")

    # -- what comes out

    def log(self, values: Mapping[str, Any] | None = None, **named: Any) -> None:
        """Record values of this step: they go into the timeline, the progress line and, the last ones, result.json."""
        told = {name: plain(value) for name, value in {**(values or {}), **named}.items()}
        self._watcher.log(told)
        self.results.update(told)

    def print(self, *values: Any) -> None:
        """Print on the main process only, without disturbing the progress line."""
        self._watcher.note(" ".join(map(str, values)))

    def evaluate(
        self,
        model: torch.nn.Module,
        data: Any,
        measure: Measure,
        *,
        forward: Forward | None = None,
        collate_fn: Collate | None = None,
    ) -> dict[str, float]:
        """The mean of a measure over a data set: every sample once, on any number of processes, with the same bits.

        data     map-style, or any iterable of samples (then every process reads all of it, and computes its part)
        measure  measure(output, *batch) -> (sum, weight), named after the function; or a dict of such pairs
        forward  forward(model, batch) -> output; by default model(batch[0]), or model(**batch) for a mapping

        In eval mode and without gradients. Returns {name: sum / weight}, the same on every process.
        """
        fold = partial(evaluate, measure=measure, context=self._models.context)
        return run_collective_pass(self, "run.evaluate", fold, model, data, forward, collate_fn)

    def predict(
        self,
        model: torch.nn.Module,
        data: Any,
        *,
        forward: Forward | None = None,
        collate_fn: Collate | None = None,
    ) -> Any:
        """The model's output for every sample, in the data's order, on every process and with the same bits.

        Data and forward are as for `evaluate`. The output is a tensor [micro-batch, ...], or tuples, lists and dicts of
        them; returned is the same with [samples, ...], in the CPU's memory. In eval mode and without gradients. Raises
        LoopError for an output without one row for each sample, or with rows of several shapes, and DataError for data
        without samples.
        """
        return run_collective_pass(self, "run.predict", predict, model, data, forward, collate_fn)

    def together(self, what: str, body: Callable[[], T], *, again: bool = True) -> T:
        """What all processes do together between two steps; made again, where they go on without one that dies."""
        survivors = self._engine.survivors if self._engine is not None else None
        return body() if survivors is None else survivors.retry_collective(what, body, again=again)

    def _save(self, more_changes: Sequence[dict[str, Any]] = (), *, beside: bool = False) -> None:
        save(self, more_changes, beside=beside)

    def promise(self) -> tuple[str, str]:
        """What is promised of this run's result, and why."""
        return promise(self)

    def result(self) -> dict[str, Any]:
        """What goes into result.json."""
        return result(self)

    def close(self) -> None:
        """Stop watching, and let go of the model."""
        self._state.saver.close()
        self._watcher.close()
        self._models.close()
        if self._engine is not None:
            self._engine.verification.close()
            self._engine.close()
