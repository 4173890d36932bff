"""Measure the cost of copying each shard to another process after each step (parallel.replicate_shards).

    python -m benchmarks.buddy            about five minutes
    python -m benchmarks.buddy --quick    a smoke test

Two processes share one model. Steps with and without copies alternate (see turns.py), with parallel.reshard=layer and
step. A copy is packed at the start of a step and received at its end, so its whole cost is in the time of that step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from benchmarks.turns import Comparison, LoopContext, LoopStep, main, ours
from unisono.config import ParallelSettings

BASELINES = {"layer, replicated": "layer", "step, replicated": "step"}


def build(context: LoopContext, loop: str) -> Iterator[LoopStep]:
    gather: Any = loop.split(",")[0]
    parallel = ParallelSettings(shard=context.group.size, reshard=gather, replicate_shards=loop.endswith("replicated"))
    return ours(context, replace(context.settings, parallel=parallel), context.group, loop)


if __name__ == "__main__":
    main(Comparison("buddy", BASELINES, build), __doc__)
