"""Keep a copy of every shard on another process, updated after every step (parallel.replicate_shards)."""

from __future__ import annotations

from unisono.train.context import RunContext
from unisono.train.extensions import Extension
from unisono.train.gradient_pass import GradientPass
from unisono.train.recovery.crash_handoff import dump_replicas, load_dump
from unisono.train.recovery.shard_replica import ShardReplica
from unisono.train.step_state import StepState


class Replication(Extension):
    """Copy shards between two steps, and dump the copies if another process dies."""

    def __init__(self, context: RunContext, replica: ShardReplica) -> None:
        self.context, self.replica = context, replica

    def before_sync(self, step: StepState, gradient: GradientPass) -> None:
        self.replica.settle()

    def between_steps(self, steps_done: int) -> None:
        self.replica.copy(steps_done)

    def settle(self) -> None:
        self.replica.settle()

    def ended(self, error: Exception | None) -> None:
        if error is not None:
            dump_replicas(self.context, self.replica, error)


def build_replication(context: RunContext) -> list[Extension]:
    """Build the copies of shards, and continue from the dumps of a broken run. All processes call this."""
    if not context.settings.parallel.replicate_shards:
        return []
    replica = ShardReplica(context.state.tracked, context.mesh, context.models.reshard)
    load_dump(context, replica)
    return [Replication(context, replica)]
