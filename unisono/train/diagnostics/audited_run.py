"""End a run after some audits, and write their results to a file, for `unisono audit` (redundant_compute.py)."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

from unisono.errors import RunStopped
from unisono.train.context import Inspection, LoopParts, RunContext
from unisono.train.diagnostics.redundant_compute import RedundantCompute
from unisono.train.extensions import Extension
from unisono.train.step_state import StepState


class LimitedAudit(Extension):
    """End the run after `steps` audits, and write their results to `file`, as JSON.

    The first step of a run is not audited: it is checked in other ways.
    """

    def __init__(self, steps: int, file: Path, context: RunContext, parts: LoopParts) -> None:
        self.steps, self.file, self.context, self.rank = steps, file, context, parts.sync.group.rank

    def _audits(self) -> list[RedundantCompute]:
        return [each for each in self.context.extensions if isinstance(each, RedundantCompute)]

    def before_step(self, step: StepState) -> None:
        if any(len(audit.done) >= self.steps for audit in self._audits()):
            raise RunStopped

    def close(self) -> None:
        for audit in self._audits() if self.rank == 0 else ():
            self.file.write_text(json.dumps({"done": audit.done, "found": audit.found}), encoding="utf-8")


def audit_run(request: str, rank: int) -> Inspection:
    """Return an inspection that ends a run after some audits.

    Args:
        request: STEPS:FILE.
        rank: the rank of this process.
    """
    steps, _, file = request.partition(":")
    return Inspection(partial(LimitedAudit, int(steps), Path(file)))
