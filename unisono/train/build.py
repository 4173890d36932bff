"""A loop is opened: what `run.steps` finds out before the first step, and the engine that it makes of it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.data.loader import Collate, IndexDataset, Loader, Schedule, length_of, same_length
from unisono.data.streaming.stream import Stream, shard_layout
from unisono.distributed.existing_group import refuse_second_group
from unisono.errors import SettingsError
from unisono.exchange.choose import promise_of
from unisono.exchange.wrappers.custom import Build, own_exchange
from unisono.launcher import failure_record
from unisono.plan.assignment import Slot
from unisono.plan.batch_order import BatchOrder
from unisono.train.balance.rebalance import WORDS, build_dealing
from unisono.train.diagnostics.divergence import build_divergence
from unisono.train.diagnostics.redundant_compute import build_audit
from unisono.train.guarantees.rank_consistency import ModeCheck, check_same_parameters
from unisono.train.loop import StepLoop
from unisono.train.recovery.crash_handoff import hands_off, load_dump
from unisono.train.recovery.shard_replica import ShardReplica
from unisono.train.recovery.step_recovery import build_survivors
from unisono.train.verification.verification import build_verification

if TYPE_CHECKING:
    from unisono.train.run import Run


def build_loop(run: Run[Any], data: Any, *, shuffle: bool, collate: Collate | None, exchange: Build | None) -> StepLoop:
    """The engine of a run over this data, from where the run stands to its end. Every process must call this."""
    refuse_second_group(run.world.size)
    settings, state, identity = run.settings, run._state, run._identity
    if data is None:
        data, shuffle = IndexDataset(settings.batch), False
        if settings.steps is None:
            raise SettingsError(
                "run.steps was called without data.",
                f"The settings say epochs={settings.epochs}, and there is nothing to walk through.",
                "--set steps=100 --set epochs=none",
            )
    own = own_exchange(exchange, settings, run._mesh.axes)
    run._table.require_same_call("run.steps")
    named = [(run._models.names[id(p)], p) for p in run._models.params]
    if run._mesh.pipeline.size == 1 or run._group.mixed:
        check_same_parameters(run._group, named, "run.steps was asked for a step", run.device)
    run._models.buffers.attributes.say = run._watcher.note
    run._settle(data)
    length = length_of(data, "The training set")
    same_length(run._group, length, "The training set")
    last = run.count_steps(data)
    identity["length"] = data.shape if isinstance(data, Stream) else length
    identity["ties"] = run._models.ties or "none"
    identity["own exchange"] = run._carried.own = own.name if own is not None else "none"
    run.changes += state.check_length(identity["length"], run._accepted)
    run.changes += state.check_ties(identity["ties"])
    run.changes += state.check_exchange(identity["own exchange"], run._accepted)
    buddy = ShardReplica(state.tracked, run._mesh, run._models.reshard) if settings.parallel.replicate_shards else None
    if buddy is not None:
        load_dump(run, buddy)
    engine = _build_engine(run, data, last, shuffle=shuffle, collate=collate)
    engine.own = own
    promise, _ = promise_of(settings, run.size) if own is None else (own.promise, own.reason)
    engine.dealing = build_dealing(settings, run._mesh, engine.schedule, run.steps_done, promise, run._watcher.note)
    run._table.words = WORDS if engine.dealing is not None else 0
    run._table.modes = ModeCheck(run._models.modules) if run._mesh.pipeline.size == 1 else None
    engine.audit = build_audit(engine, run)
    engine.divergence = build_divergence(engine, run)
    engine.verification = build_verification(engine, run, promise)
    engine.run_dir = run._watcher.typed = shell_path(run.dir, run.world.folder)
    run._engine = engine
    engine.survivors = build_survivors(run)
    engine.buddy = buddy
    failure_record.begin_loop(replaceable=engine.survivors is not None, bequeaths=hands_off(run))
    return engine


def shell_path(path: Path, folder: str) -> str:
    """A path as one types it in this folder."""
    within = path.is_relative_to(folder)
    return shlex.quote(str(path.relative_to(folder) if within else path))


def _build_engine(run: Run[Any], data: Any, last: int, *, shuffle: bool, collate: Collate | None) -> StepLoop:
    """The engine for all steps up to `last` - 1, with its order, its placement and its loader."""
    settings, mesh, kind = run.settings, run._mesh, run._kind
    shards, window = shard_layout(data)
    order = BatchOrder(
        length=len(data),
        batch=settings.batch,
        virtual_ranks=settings.virtual_ranks,
        micro_batch=settings.micro_batch,
        seed=settings.seed,
        shuffle=shuffle,
        shards=shards,
        window=window,
    )
    seat, schedule = kind.seated(settings, mesh)
    if seat.turns > 1 and settings.micro_batch is not None:
        run._table.pieces = max(len(order.micro_bounds(0, v)) for v in range(settings.virtual_ranks))
    run._models.buffers.attributes.divided = run._table.pieces > 1 or mesh.context.size > 1

    def open_loader(schedule: Schedule, seat: Slot, first: int) -> Loader:
        return Loader(
            data,
            order,
            schedule,
            seat=seat,
            first=first,
            last=last,
            device=mesh.world.device,
            collate=collate,
            workers=settings.loader.workers,
            prefetch=settings.loader.prefetch,
            keyed=settings.virtual_ranks > 1,
        )

    of_run = (run._models, last, run._table, run._generators, run._scale, run._carried)
    engine = kind(settings, mesh, seat, order, open_loader(schedule, seat, run.steps_done), schedule, *of_run)
    engine.open_loader = open_loader
    return engine
