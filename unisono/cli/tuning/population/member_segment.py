"""A member of a population in one generation: a run that continues a copy of a checkpoint, and pauses.

    STUDY/members/02/step-00000040/      the run of member 2 from step 40 on, a run directory
        checkpoints/step-00000040            the copy of its parent's checkpoint
        segment.json                         its result, once it has ended

The parent is the member itself in the generation before, or the member that it copies. Files of a checkpoint are never
changed, so the copy has the same files (hard links), or the same bytes where the file system has no links.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.checkpoint.contents import read_state
from unisono.checkpoint.manifest import MANIFEST, WrittenFile, checkpoints, name_of, sync
from unisono.cli.request.run_dir import write
from unisono.cli.tuning.population.exploit_explore import Turn
from unisono.cli.tuning.trial_process import STOPPED, VALUES, TrialProcess
from unisono.cli.tuning.trial_values import TrialValues
from unisono.errors import NotFiniteError, StudyError
from unisono.json_forms import parse
from unisono.report.result_file import read_result
from unisono.security.file_modes import make_folder

SEGMENT = "segment.json"

EXACT = "exact"


@dataclass(frozen=True, kw_only=True)
class SegmentResult:
    """The result of a member in one generation.

    Attributes:
        value: The objective at its end; None: it failed.
        reason: Why it failed; "": it did not.
        begin: The number of steps at its beginning, and `end`, at its end.
        total: The number of steps of the whole run.
        promise: The promise of its run, apart from the changes that the study has made.
        weights_sha256: The fingerprint of its weights.
        began_with: The sha256 of the manifest of the checkpoint that it continued; "": it began at step 0.
        ended_with: The same of the checkpoint at its end; "": it failed.
    """

    value: float | None
    reason: str = ""
    begin: int
    end: int
    total: int
    promise: str = ""
    weights_sha256: str = ""
    began_with: str = ""
    ended_with: str = ""


class MemberSegment:
    """The run of a member in one generation.

    Args:
        turn: What the member does.
        process: Its run.
        begin: The number of steps that are done at its beginning.
        most: The largest number of processes on which it can run.

    Attributes:
        values: What it has logged.
    """

    def __init__(self, turn: Turn, process: TrialProcess, begin: int, most: int) -> None:
        self.turn, self.process, self.begin, self.most = turn, process, begin, most
        self.values = TrialValues(process.run_dir / VALUES)
        self._began_with = ""

    def result(self) -> SegmentResult | None:
        """Return its result; None: it has not ended. Raises StudyError if its folder has another member's."""
        path = self.process.run_dir / SEGMENT
        if not path.is_file():
            self.process.recorded_failure()  # raises the error
            return None
        found = parse(path.read_bytes()) or {}
        if found.pop("sets", None) != list(self.process.request.sets):
            facts = f"The study continues with {' '.join(self.process.request.sets)}."
            do = "restore the folder of the study, or start a new study with another --run-dir"
            raise StudyError(f"{self.process.run_dir} has another member.", facts, do)
        return SegmentResult(**found)

    def prepare(self, parent: Path | None) -> None:
        """Copy the checkpoint of the parent.

        Args:
            parent: The run directory of the parent in the generation before; None: there is none before.
        """
        self.process.release()
        if parent is not None:
            self._began_with = copy_checkpoint(parent, self.process.run_dir)

    @property
    def is_refused(self) -> bool:
        """Whether its run has ended with an error before it made a step from the checkpoint of its parent."""
        self.values.read()
        failed = self.process.status not in (0, *STOPPED)
        if not (failed and self._began_with) or self.values.by_step:
            return False
        return self.process.error().get("type") != NotFiniteError.__name__  # diverging is no refusal

    def ended(self, name: str) -> SegmentResult:
        """Return the result of a run whose process has ended, and write it down.

        Args:
            name: The objective.

        Raises:
            KeyboardInterrupt: A signal from outside has stopped the run.
        """
        values, process = self.values, self.process
        values.read()
        end, reason = int(values.end.get("end", 0)), ""
        if process.status in STOPPED or (process.status == 0 and values.end.get("left") and end < process.pause):
            raise KeyboardInterrupt
        steps = [step for step, found in values.by_step.items() if name in found]
        value = values.last(name)
        if process.status != 0:
            reason = process.reason()
        elif not values.end:
            reason = "The script made no step."
        elif value is None:
            logged = f"it logs {', '.join(values.names)}" if values.names else "it logs nothing"
            reason = f"It logs no {name} from step {self.begin} to step {end}; {logged}."
        elif not math.isfinite(value):
            reason = f"{name} is {value} at step {max(steps, default=end)}: the member diverges."
        made = {} if reason else read_result(process.run_dir) or {}
        result = SegmentResult(
            value=None if reason else value,
            reason=reason,
            begin=self.begin,
            end=max(self.begin, values.steps) if reason else end,
            total=values.total,
            promise="" if reason else self._promise(str(made.get("promise", ""))),
            weights_sha256=str(made.get("weights_sha256") or ""),
            began_with=self._began_with,
            ended_with="" if reason else newest(process.run_dir)[1],
        )
        write(process.run_dir / SEGMENT, json.dumps({"sets": [*process.request.sets], **vars(result)}, indent=1) + "\n")
        return result

    def _promise(self, promise: str) -> str:
        """Return the promise of the run. Changes that the study has made follow from its seed, and do not lower it."""
        changes = read_state(newest(self.process.run_dir)[0])["changes"]
        only_ours = all(change["field"] in self.turn.values for change in changes)
        return EXACT if only_ours and promise.startswith(f"{EXACT} until step ") else promise


def newest(run_dir: Path) -> tuple[Path, str]:
    """Return the newest checkpoint of a run, and the sha256 of its manifest, which names the sha256 of all files.

    Raises:
        StudyError: There is none.
    """
    found = checkpoints(run_dir)
    if not found:
        do = "restore it from a copy, or start a new study with another --run-dir"
        raise StudyError(f"{run_dir} has no checkpoint.", "The next generation continues it.", do)
    path = found[0][1]
    return path, WrittenFile.of((path / MANIFEST).read_bytes()).sha256


def copy_checkpoint(source: Path, run_dir: Path) -> str:
    """Copy the newest checkpoint of a run into another run directory, and return the sha256 of its manifest.

    The copy appears as a whole. If the directory has a checkpoint already, nothing happens.

    Args:
        source: The run directory of the parent.
        run_dir: The run directory that gets the copy.
    """
    path, sha256 = newest(source)
    folder = run_dir / "checkpoints"
    if not checkpoints(run_dir):
        make_folder(folder)
        draft = folder / f".{path.name}.unfinished"
        shutil.rmtree(draft, ignore_errors=True)
        make_folder(draft)
        for file in path.iterdir():
            _link(file, draft / file.name)
        draft.rename(folder / path.name)
    return sha256


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)
        sync(target)


def remove_checkpoints(run_dir: Path) -> None:
    """Remove the checkpoints of a run that no member continues any more."""
    shutil.rmtree(run_dir / "checkpoints", ignore_errors=True)


def folder_of(study: Path, member: int, begin: int) -> Path:
    """Return the run directory of a member from a step on."""
    return study / "members" / f"{member:02d}" / name_of(begin)


def as_json(turn: Turn, result: SegmentResult) -> Mapping[str, Any]:
    """Return what a member did in a generation, for JSON."""
    state = {"state": "failed" if result.reason else "complete"}
    about = {"member": turn.member, "parent": turn.parent, "settings": dict(turn.values)}
    return {**about, **state, **vars(result)}
