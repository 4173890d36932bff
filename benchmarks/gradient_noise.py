"""Measure the cost of the gradient noise scale (docs/guide/batch-size.md) on two processes.

    python -m benchmarks.gradient_noise            about ten minutes
    python -m benchmarks.gradient_noise --quick    a smoke test

Two loops alternate step by step (turns.py): one that measures the noise scale in every step, and one that never does.
With noise_scale_every=N, the cost of a run is what the ratio exceeds 1 by, divided by N.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.turns import Comparison, LoopContext, LoopStep, main, ours


def build_loop(context: LoopContext, loop: str) -> Iterator[LoopStep]:
    """Build one of the loops."""
    settings = replace(context.settings, noise_scale_every=1) if loop == "measured" else context.settings
    return ours(context, settings, context.group, loop)


COMPARISON = Comparison("gradient_noise", {"measured": "never"}, build_loop)

if __name__ == "__main__":
    main(COMPARISON, __doc__)
