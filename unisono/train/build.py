"""Build the training loop of `run.steps`: check its arguments, and construct the parts of a step."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from unisono.config import Settings
from unisono.data.computed_batches import as_data_set
from unisono.data.loader import Collate, Loader, Schedule, length_of, same_length
from unisono.data.prepared import layout_of, mixing_of, prepare, shape_of
from unisono.distributed.existing_group import refuse_second_group
from unisono.distributed.mesh import Mesh
from unisono.exchange.wrappers.custom import Build, CustomExchange, own_exchange
from unisono.launcher import failure_record
from unisono.plan.assignment import Slot
from unisono.plan.batch_order import BatchOrder
from unisono.train.balance.rebalance import Rebalancer, build_stealing, wants_balance
from unisono.train.batches.batch_source import BatchSource
from unisono.train.batches.sample_lengths import check_lengths, describe_length
from unisono.train.batches.sequence_slices import SequenceSlices
from unisono.train.collective import NoRecovery
from unisono.train.context import LoopParts, RunContext
from unisono.train.diagnostics.divergence import build_divergence
from unisono.train.diagnostics.redundant_compute import build_audit
from unisono.train.extensions import Extension, bind
from unisono.train.guarantees.deterministic_kernels import describe_kernels
from unisono.train.guarantees.loop_checks import LoopChecks
from unisono.train.guarantees.rank_consistency import ModeCheck, check_same_parameters
from unisono.train.loop import SyncLoop
from unisono.train.profiling.step_profiler import build_profiler
from unisono.train.recording.event_recorder import EventRecorder
from unisono.train.recording.machine_sampling import build_machine_sampling
from unisono.train.recording.metrics_export import build_metrics
from unisono.train.recording.noise_scale import build_noise_scale
from unisono.train.recovery.crash_handoff import hands_off
from unisono.train.recovery.replication import build_replication
from unisono.train.recovery.step_recovery import StepRecovery, build_recovery
from unisono.train.replan.replanner import build_replanner
from unisono.train.state.resume import check_exchange, check_kernels, check_length, check_ties
from unisono.train.step import Step, StepParts
from unisono.train.tracking.tracker_process import build_tracking
from unisono.train.verification.verification import build_verification


def total_steps(context: RunContext, data: Any) -> int:
    """Return the number of steps of the whole run over a data set. Collective for a Stream."""
    settings = context.settings
    if settings.steps is not None:
        return settings.steps
    assert settings.epochs is not None
    read_lengths(context, data)
    return settings.epochs * -(-length_of(data, "The training set") // settings.batch)


def read_lengths(context: RunContext, data: Any) -> None:
    """Count the samples of data whose length is not known yet, such as a Stream. Collective."""
    prepare(data, context.group, context.settings.loader.on_error, context.monitor.note)


def build_loop(
    context: RunContext,
    loop: SyncLoop,
    data: Any,
    last: Callable[[Any], int],
    *,
    shuffle: bool,
    collate: Collate | None,
    lengths: Sequence[int] | None,
    exchange: Build | None,
) -> Iterator[Step]:
    """Build the loop of a run over a data set, from the run's current step to its end. All processes call this.

    Args:
        context: the context of the run.
        loop: the loop type, which the exchange chooses.
        data: a map-style data set, a Stream, a Mixture, a function from sample numbers to a micro-batch, or None.
        last: returns the number of steps of the whole run over a data set.
        shuffle: whether every epoch has another order.
        collate: a list of samples -> a batch.
        lengths: of each sample, for batches of similar length.
        exchange: builds the script's own exchange.
    """
    refuse_second_group(context.world.size)
    settings, progress, models = context.settings, context.progress, context.models
    given, data = data, as_data_set(data, settings)
    custom = own_exchange(exchange, settings, context.mesh.axes)
    context.step_sync.require_same_call("run.steps")
    named = [(models.names[id(p)], p) for p in models.params]
    group = context.group
    if context.mesh.pipeline.size == 1 or group.mixed:
        check_same_parameters(group, named, "run.steps", context.device)
    models.buffers.attributes.say = context.monitor.note
    read_lengths(context, data)
    length = length_of(data, "The training set")
    same_length(group, length, "The training set")
    sizes = check_lengths(group, data, lengths, shuffle=shuffle)
    progress.last = last(data)
    _check_identity(context, shape_of(data, describe_length(length, sizes)), custom)
    context.monitor.typed = run_dir = shell_path(context.run_dir, context.world.folder)
    replication = build_replication(context)
    progress.order = _order(settings, data, sizes, shuffle=shuffle and data is given)
    progress.exchange = (custom.promise, custom.reason) if custom is not None else None
    parts = _build_parts(context, loop, data, collate, custom, run_dir)
    extensions = [*replication, *context.extensions, *_build_extensions(context, parts)]
    hooks = bind(extensions)
    build_slot = partial(_slot, loop, settings, context.mesh)
    recovery = build_recovery(context, parts, hooks.regrouped, build_slot)
    if isinstance(recovery, StepRecovery):
        hooks = hooks._replace(result=(*hooks.result, recovery.result))
        context.collective.survive_deaths(recovery)
    steps = StepParts(
        models,
        parts.source,
        parts.sync,
        parts.checks,
        context.step_sync,
        context.scale,
        recovery or NoRecovery(),
        hooks,
    )
    steps = loop.parts(context, parts, _with_graphs(context, steps))
    context.parts, context.extensions = parts, extensions
    context.hooks = steps.hooks._replace(close=(*steps.hooks.close, steps.source.close, steps.sync.close))
    failure_record.begin_loop(replaceable=recovery is not None, hands_off=hands_off(context))
    models.on_change()
    return loop.steps(context, steps)


def _with_graphs(context: RunContext, steps: StepParts) -> StepParts:
    """Let `step.run` replay micro-batches as CUDA graphs, if the settings say so."""
    if not context.settings.parallel.cuda_graphs:
        return steps
    from unisono.train.cuda_graphs.graphed_loss import GraphedLoss

    losses = GraphedLoss(context.models, context.device, context.monitor.note)
    hooks = steps.hooks._replace(result=(*steps.hooks.result, losses.result))
    return steps._replace(losses=losses, hooks=hooks)


def _check_identity(context: RunContext, length: int | str, custom: CustomExchange | None) -> None:
    """Record the facts on which the bits of the run depend, and compare them with those of the resumed run."""
    identity, state, progress, settings = context.identity, context.state, context.progress, context.settings
    identity["length"] = length
    identity["ties"] = context.models.ties or "none"
    identity["own exchange"] = context.exchange_states.own = custom.name if custom is not None else "none"
    by_rank = context.group.all_gather_object(
        describe_kernels(context.device, settings.speed.attention, compiles=compiles_code(settings))
    )
    identity["kernels"] = kernels = "; ".join(sorted(set(by_rank)))
    if len(set(by_rank)) > 1 and not context.group.mixed:
        rank = next(rank for rank, other in enumerate(by_rank) if other != by_rank[0])
        progress.differences.append(f"kernels differ: {by_rank[0]} on rank 0, {by_rank[rank]} on rank {rank}")
    progress.changes += check_length(state.resumed, identity["length"], context.accepted)
    progress.changes += check_kernels(state.resumed, kernels, context.accepted)
    progress.changes += check_ties(state.resumed, identity["ties"])
    progress.changes += check_exchange(state.resumed, identity["own exchange"], context.accepted)


def compiles_code(settings: Settings) -> bool:
    """Return whether settings compile a layer, a model or an optimizer with torch.compile."""
    speed = settings.speed
    return settings.parallel.compile or speed.compile_model or speed.optimizer == "compiled"


def shell_path(path: Path, folder: str) -> str:
    """Return a path as a user types it in a folder."""
    within = path.is_relative_to(folder)
    return shlex.quote(str(path.relative_to(folder) if within else path))


def _order(settings: Settings, data: Any, lengths: tuple[int, ...], *, shuffle: bool) -> BatchOrder:
    layout = layout_of(data)
    return BatchOrder(
        length=layout.length,
        batch=settings.batch,
        virtual_ranks=settings.virtual_ranks,
        micro_batch=settings.micro_batch,
        seed=settings.seed,
        shuffle=shuffle,
        shards=layout.shards,
        window=layout.window,
        lengths=lengths,
        mixing=mixing_of(data),
    )


def _slot(loop: SyncLoop, settings: Settings, mesh: Mesh) -> tuple[Slot, Schedule]:
    """Return the span of this process, and the spans of all. Processes that share layers compute one span in turns."""
    slot, line = Slot(mesh.data.rank), mesh.data
    if mesh.shard.size > 1 and settings.parallel.reshard == "layer":
        slot, line = Slot(mesh.replicate.rank, mesh.shard.rank, mesh.shard.size), mesh.replicate
    return slot, Schedule(loop.spans(line.size))


def _build_parts(
    context: RunContext,
    loop: SyncLoop,
    data: Any,
    collate: Collate | None,
    custom: CustomExchange | None,
    run_dir: str,
) -> LoopParts:
    settings, mesh, models, progress = context.settings, context.mesh, context.models, context.progress
    order, last = progress.order, progress.last
    assert order is not None
    slot, schedule = _slot(loop, settings, mesh)
    pieces = 1
    if slot.turns > 1 and settings.micro_batch is not None:
        pieces = max(len(order.micro_bounds(0, v)) for v in range(settings.virtual_ranks))
    context.step_sync.configure(pieces=pieces, modes=ModeCheck(models.modules) if mesh.pipeline.size == 1 else None)
    models.buffers.attributes.divided = pieces > 1 or mesh.context.size > 1

    def open_loader(schedule: Schedule, slot: Slot, first: int) -> Loader:
        return Loader(
            data,
            order,
            schedule,
            slot=slot,
            first=first,
            last=last,
            device=mesh.world.device,
            collate=collate,
            workers=settings.loader.workers,
            prefetch=settings.loader.prefetch,
            keyed=settings.virtual_ranks > 1,
        )

    source = BatchSource(
        order,
        slot,
        schedule,
        progress.steps_done,
        open_loader=open_loader,
        build_stealing=partial(build_stealing, settings, mesh, custom.promise if custom is not None else ""),
        generators=context.generators,
        buffers=models.buffers,
        device=mesh.world.device,
    )
    checks = LoopChecks(
        settings,
        models,
        context.scale,
        order,
        last,
        turns=slot.turns,
        steppers=progress.steppers,
        run_dir=run_dir,
    )
    sync = loop.build_sync(
        settings,
        mesh,
        models,
        context.step_sync,
        context.scale,
        context.exchange_states,
        checks,
        progress,
        context.collective,
        seed_update=source.seed_update,
        custom=custom,
    )
    return LoopParts(source, sync, checks)


def _build_extensions(context: RunContext, parts: LoopParts) -> list[Extension]:
    """Build the optional features of a run, in the order in which their hooks are called."""
    settings, mesh = context.settings, context.mesh
    found: list[Extension] = []
    if mesh.context.size > 1:
        found.append(SequenceSlices(context.models, parts.source.order))
    found += build_verification(context, parts)
    divergence = build_divergence(context, parts)
    found += build_audit(context, parts, divergence[0] if divergence else None)
    found += divergence
    if wants_balance(settings) and (mesh.world.size > 1 or mesh.world.monitor is not None):
        promise = context.progress.exchange[0] if context.progress.exchange is not None else ""
        first, note = context.progress.steps_done, context.monitor.note
        found.append(Rebalancer(settings, mesh, parts.source, context.step_sync, note, first, promise))
    found += build_noise_scale(context, parts)
    found += build_replanner(context, parts)
    found.append(EventRecorder(context, parts))
    found += build_machine_sampling(context)
    found += build_tracking(context)
    found += build_metrics(context)
    if context.inspection is not None:
        found.append(context.inspection.build(context, parts))
    found += build_profiler(context)  # the last one, so that it records nothing of the others but their rounds
    return found
