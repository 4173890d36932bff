"""Two processes that share one model: what it costs to copy every shard to a buddy after every step.

    python -m benchmarks.buddy            about five minutes
    python -m benchmarks.buddy --quick    a smoke test

Ours without a buddy and with one take turns (turns.py says how), gathered by layer and once a step. A copy is packed at
the beginning of a turn and has arrived at its end, so all that it costs is in the turn that it belongs to.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from benchmarks.turns import Course, Race, Turn, main, ours
from unisono.config import ParallelSettings

BESIDE = {"layer, buddy": "layer", "step, buddy": "step"}


def build(course: Course, loop: str) -> Iterator[Turn]:
    gather: Any = loop.split(",")[0]
    parallel = ParallelSettings(shard=course.group.size, reshard=gather, replicate_shards=loop.endswith("buddy"))
    return ours(course, replace(course.settings, parallel=parallel), course.group, loop)


if __name__ == "__main__":
    main(Race("buddy", BESIDE, build), __doc__)
