"""Run a script under its layouts and judge the result: equal bits, a refusal, a lowered promise, or a finding."""

from __future__ import annotations

import math
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

from tests.scripts.draft import Script
from tests.scripts.generator import draw
from tests.scripts.known import KNOWN
from tests.scripts.placements import Placement, Trial, draw_trial
from tests.scripts.player import Played, play

EXACT = "exact"

BY_SAMPLES = ("gather a layer together",)
"""Messages of refusals that depend on the samples of a step, for instance on a router's choice of experts."""


class Verdict(NamedTuple):
    """A judgment of a script.

    Args:
        kind: "exact" (promised and equal), "lowered" (a lower promise), "refused", "invalid" (the script itself fails),
            "unseen" (an intended violation has other bits), "noticed" (an intended violation was stopped), or
            "finding" (a defect of the library).
        cause: The reason of a refusal or lowered promise in one line, or the details of a finding.
    """

    kind: str
    cause: str
    script: Script
    trial: Trial

    def __str__(self) -> str:
        lines = [f"{self.kind}: seed {self.script.seed}", self.cause, f"traits: {sorted(self.script.traits)}"]
        lines += [f"whole: {self.trial.whole}", f"first: {self.trial.first}, stopped in step {self.trial.stop}"]
        return "\n".join([*lines, f"second: {self.trial.second}"])


def judge(seed: int, folder: Path, left_out: Collection[str] = tuple(KNOWN)) -> Verdict:
    """Generate the script and layouts of a seed, run them in a subfolder of `folder`, and compare."""
    script = draw(seed, left_out)
    trial = draw_trial(script, left_out)
    place = folder / f"seed-{seed}"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    path = place / "script.py"
    path.write_text(script.text, encoding="utf-8")
    kind, cause = _judge(script, trial, path)
    if script.broken and kind == "finding":
        kind = "unseen" if cause.startswith("other bits") else "noticed" if " was refused in " in cause else kind
    return Verdict(kind, cause, script, trial)


def _judge(script: Script, trial: Trial, path: Path) -> tuple[str, str]:
    runs: dict[str, Played] = {}
    try:
        for name in ("whole", "first", "second"):
            placement: Placement = getattr(trial, name)
            words = [f"--set={word}" for word in (*script.words, *placement.sets)]
            words += ["--resume"] if name == "second" else []
            folder = path.parent / ("whole" if name == "whole" else "parts")
            runs[name] = play(path, folder, placement.ranks, words, trial.stop if name == "first" else None)
            if ended := _ended_badly(name, runs, broken=bool(script.broken)):
                return ended
    except (AssertionError, TimeoutError) as error:
        return "finding", f"{name}: {type(error).__name__}: {error}"
    return _compare(runs)


def _ended_badly(name: str, runs: dict[str, Played], *, broken: bool) -> tuple[str, str] | None:
    """Return the verdict on a refusal or crash; None if the run ended normally."""
    run = runs[name]
    if run.how == "ended":
        return None
    end = run.worst
    if run.how == "crashed":
        kind = "invalid" if name == "whole" else "finding"
        return kind, f"{name} crashed in step {end.step}:\n{end.says}"
    words = first_line(end.says)
    if run.steps and not any(known in str(end.says) for known in BY_SAMPLES):
        return "finding", f"{name} was refused in step {end.step}:\n{end.says}"
    if "PromiseBrokenError" in str(end.says) and not broken:
        return "finding", f"{name} was stopped by its own check:\n{end.says}"
    where = "" if name == "whole" else " (not in one process)"
    if not _has_three_parts(str(end.says)):
        return "finding", f"{name} was refused without a next step:\n{end.says}"
    return "refused", f"{words}{where}\n{end.says}"


def _has_three_parts(says: str) -> bool:
    lines = [line for line in says.splitlines() if line.strip()]
    return len(lines) >= 3 and any(line.strip().startswith("Next:") for line in lines)


def first_line(says: Any) -> str:
    return str(says).partition("\n")[0][:150]


def _compare(runs: dict[str, Played]) -> tuple[str, str]:
    whole, first, second = runs["whole"], runs["first"], runs["second"]
    for name, run in runs.items():
        if len({end.weights for end in run.ends}) > 1:
            return "finding", f"other bits: the processes of the run {name} hold different weights"
    lowered = [
        f"{promise}: {end.says['reason']}" + (" (not in one process)" if name != "whole" else "")
        for name, run in runs.items()
        for end in run.ends[:1]
        if (promise := end.says["promise"]) != EXACT
    ]
    if lowered:
        return "lowered", lowered[0]
    found = {**first.steps, **second.steps}
    if found.keys() != whole.steps.keys():
        return "finding", f"other bits: the steps {sorted(found)}, and {sorted(whole.steps)} in one process"
    for number, expected in sorted(whole.steps.items()):
        if not _same(found.get(number), expected):
            return "finding", f"other bits: step {number} has {found.get(number)}, in one process {expected}"
    a, b = whole.ends[0], second.ends[0]
    if a.weights != b.weights:
        return "finding", "other bits: the same losses, and other weights"
    if whole.state != second.state:
        return "finding", "other bits: the same weights, and another state of optimizers or schedules"
    return "exact", "" if math.isfinite(a.says["loss"] or math.inf) else "the loss is not finite"


def _same(a: Any, b: Any) -> bool:
    return repr(a) == repr(b)  # repr compares NaN as equal to itself
