"""A run that is audited in so many steps, and says what came of it: what `unisono audit` runs
(train/diagnostics/redundant_compute.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from unisono.errors import RunStopped
from unisono.train.loop import StepLoop
from unisono.train.run import Run
from unisono.train.step import Step


class AuditedLoop(StepLoop):
    """An engine that leaves after so many audits. The first step of a run is none: it is looked at otherwise.

    steps  how many
    file   what came of them goes there, as JSON
    """

    steps: int
    file: Path

    def new_step(self, number: int) -> Step:
        if self.audit is not None and len(self.audit.done) >= self.steps:
            raise RunStopped
        return Step(self, number)

    def close(self) -> None:
        if self.audit is not None and self.mesh.world.rank == 0:
            told = {"done": self.audit.done, "found": self.audit.found}
            self.file.write_text(json.dumps(told), encoding="utf-8")
        super().close()


def audited(words: str, rank: int) -> tuple[type[Run[Any]], type[StepLoop]]:
    """A run and an engine for it. `words` are STEPS:FILE."""
    steps, _, file = words.partition(":")
    return Run, type("Engine", (AuditedLoop,), {"steps": int(steps), "file": Path(file)})
