"""Run a population: generation after generation, members side by side, with copies of checkpoints in between.

    generation 0   member 0 ---.   member 1 -----   member 2 -----        steps 0 to 40
                               |   (worst)
    generation 1   member 0 ---'-> member 1 -----   member 2 -----        steps 40 to 80
                                   with perturbed settings

A generation is complete once all members have ended it. What comes next is a function of its results, so a study that
was killed continues from the results that are written down.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from unisono.cli.request.request_checks import ScriptReport, check_settings
from unisono.cli.request.run_options import RunRequest
from unisono.cli.tuning.population.exploit_explore import Turn, first_turns, next_turns
from unisono.cli.tuning.population.lineage import Generation, copy_lines, text_of
from unisono.cli.tuning.population.member_segment import (
    MemberSegment,
    SegmentResult,
    folder_of,
    remove_checkpoints,
)
from unisono.cli.tuning.population.population_record import PopulationRecord
from unisono.cli.tuning.round_plan import share, taken
from unisono.cli.tuning.search_space import Dimension
from unisono.cli.tuning.study_record import FILE
from unisono.cli.tuning.trial_process import POLL_SECONDS, TrialProcess
from unisono.config import CommandLine, shown
from unisono.errors import SettingsError, StudyError


@dataclass(kw_only=True)
class PopulationRun:
    """One execution of a study with a population.

    Attributes:
        folder: The folder of the study.
        record: Everything on which the members depend.
        dimensions: The search space.
        script: The script.
        request: The flags of all members.
        report: The script's own report.
        processes: The number of processes of the study, and `at_once`, the largest number of members side by side.
        say: Prints a line.
        line: The typed command, for messages.
    """

    folder: Path
    record: PopulationRecord
    dimensions: Sequence[Dimension]
    script: Path
    request: RunRequest
    report: ScriptReport | None
    processes: int
    at_once: int
    say: Callable[[str], None]
    line: CommandLine

    def run(self) -> list[Generation]:
        """Run all generations that have not ended, and return all."""
        record, generations = self.record, list[Generation]()
        turns = first_turns(self.dimensions, record.population, record.seed)
        while True:
            generations.append(self._generation(generations, turns))
            self._require_effect(generations)
            for generation in generations[-2:-1]:
                for turn in generation.turns:
                    remove_checkpoints(folder_of(self.folder, turn.member, generation.begin))
            if len(generations) * record.interval >= max(each.total for each in generations[0].results):
                return generations
            values = [each.value for each in generations[-1].results]
            turns = next_turns(turns, values, record.direction, self.dimensions, record.rules, len(generations))

    def _generation(self, before: Sequence[Generation], turns: Sequence[Turn]) -> Generation:
        """Run the next generation."""
        begin = len(before) * self.record.interval
        segments = [self._segment(turn, begin) for turn in turns]
        results = {segment.turn.member: found for segment in segments if (found := segment.result()) is not None}
        waiting = [segment for segment in segments if segment.turn.member not in results]
        if before and len(waiting) == len(segments):
            for text in copy_lines(before[-1], turns):
                self.say(text)
        self._run(waiting, results, before)
        generation = Generation(begin, turns, [results[turn.member] for turn in turns])
        if all(each.value is None for each in generation.results):
            facts = f"All members failed between step {begin} and step {begin + self.record.interval}, the last one: "
            do = self._alone(turns[-1])
            raise StudyError("No member is left.", facts + generation.results[-1].reason, str(do))
        return generation

    def _segment(self, turn: Turn, begin: int) -> MemberSegment:
        sets = (*self.request.sets, *(f"{name}={shown(value)}" for name, value in turn.values.items()))
        request = replace(self.request, sets=sets)
        most = next((n for n in range(self.processes, 0, -1) if self._fits(request, n)), 1)
        request = replace(request, accept_change=tuple(turn.values) if begin else ())
        run_dir = folder_of(self.folder, turn.member, begin)
        return MemberSegment(
            turn, TrialProcess(self.script, request, run_dir, begin + self.record.interval), begin, most
        )

    def _fits(self, request: RunRequest, ranks: int) -> bool:
        """Return whether the settings of a member allow this number of processes."""
        return not check_settings(self.script, ranks, request, self.line, report=self.report)[1]

    def _run(
        self, waiting: list[MemberSegment], results: dict[int, SegmentResult], before: Sequence[Generation]
    ) -> None:
        """Run members side by side, and add their results."""
        running: list[MemberSegment] = []
        seen: list[MemberSegment] = [*waiting] if not before else []
        try:
            while waiting or running:
                self._require_folder()
                self._start(waiting, running, before)
                for segment in list(running):
                    ended = not segment.process.is_running
                    segment.values.read()
                    if ended:
                        running.remove(segment)
                        self._require_acceptance(segment)
                        results[segment.turn.member] = found = segment.ended(self.record.name)
                        self.say(self._line_of(segment.turn, found))
                self._require_alike(seen)
                time.sleep(POLL_SECONDS)
        except BaseException:
            for segment in running:
                segment.process.stop()
            for segment in running:
                segment.process.wait()
            raise

    def _start(self, waiting: list[MemberSegment], running: list[MemberSegment], before: Sequence[Generation]) -> None:
        """Start waiting members where there is room."""
        while waiting and len(running) < self.at_once:
            used = [slot for segment in running for slot in segment.process.slots]
            free = self.processes - len(used)
            if not free:
                return
            segment = waiting.pop(0)
            parent = folder_of(self.folder, segment.turn.parent, before[-1].begin) if before else None
            segment.prepare(parent)
            count = share(self.processes, self.at_once, len(waiting) + len(running) + 1)
            segment.process.start(taken(self.processes, used, min(free, count, segment.most)))
            running.append(segment)

    def _line_of(self, turn: Turn, result: SegmentResult) -> str:
        what = f"failed: {result.reason}" if result.value is None else f"{self.record.name} {result.value:.6g}"
        return f"step {result.end}: member {turn.member}: {what} ({text_of(turn.values)})"

    def _alone(self, turn: Turn) -> CommandLine:
        """Return the command that trains with the settings of a member."""
        sets = [word for each in (*self.record.sets, *text_of(turn.values).split()) for word in ("--set", each)]
        return CommandLine(("unisono", "run", self.line.words[2], *sets))

    # -- what is wrong

    def _new(self) -> CommandLine:
        """Return the command for a new study."""
        return self.line.without("--resume").flag("--run-dir", f"{self.folder}-2")

    def _require_folder(self) -> None:
        """Raise StudyError if the folder of the study was removed."""
        if not (self.folder / FILE).is_file():
            facts = f"{self.folder / FILE} was removed while the study was running."
            raise StudyError("The folder of the study is gone.", facts, f"{self._new()} (from the start)")

    def _require_alike(self, segments: Sequence[MemberSegment]) -> None:
        """Raise SettingsError if members of the first generation cannot copy each other.

        Args:
            segments: Members of the first generation; []: they have been checked.
        """
        begun = [segment for segment in segments if segment.values.total]
        for segment in begun:
            if segment.values.total <= self.record.interval:
                facts = f"The run has {segment.values.total} steps, so no member would copy another one."
                do = str(self._new().flag("--interval", str(max(1, segment.values.total // 10))))
                raise SettingsError(f"--interval {self.record.interval} is too long.", facts, do)
            for what, name in (("shapes", "other parameters"), ("total", "another number of steps")):
                one, other = begun[0].values.begin.get(what), segment.values.begin.get(what)
                if one and other and one != other:
                    names = [n for n, v in segment.turn.values.items() if v != begun[0].turn.values[n]]
                    turns = (begun[0].turn, segment.turn)
                    facts = " and ".join(f"member {turn.member} has {text_of(turn.values)}" for turn in turns)
                    facts = f"A member cannot continue the state of one with {name}: {facts}."
                    do = f"{self._new()}, without --search for the setting that changes them"
                    raise SettingsError(f"Members have {name}, by {' or '.join(names)}.", facts, do)

    def _require_acceptance(self, segment: MemberSegment) -> None:
        """Raise StudyError if the script cannot continue a checkpoint with the settings of a member."""
        if segment.is_refused:
            turn = segment.turn
            facts = f"It continues with {text_of(turn.values)}: {segment.process.reason()}"
            do = f"{self.line.without('--resume').flag('--resume')}, once it can; or a new study: {self._new()}"
            raise StudyError(f"Member {turn.member} cannot continue the state of member {turn.parent}.", facts, do)

    def _require_effect(self, generations: Sequence[Generation]) -> None:
        """Raise StudyError if members with one checkpoint and other settings have always ended with equal weights."""
        found = [pair for generation in generations for pair in equals_of(generation)]
        if not found or not all(pair.are_equal for pair in found):
            return
        _, one, other, begin, end = found[0]
        names = [name for name, value in other.values.items() if value != one.values[name]]
        facts = (
            f"Members {one.member} and {other.member} continued one state at step {begin}, with {text_of(one.values)} "
        )
        facts += f"and with {text_of(other.values)}, and have the same weights at step {end}."
        verb = "has" if len(names) == 1 else "have"
        do = f"read {', '.join(names)} in the loop, then: {self._new()}"
        raise StudyError(f"{' and '.join(names)} {verb} no effect while a run trains.", facts, do)


class EqualPair(NamedTuple):
    """Two members that continued one checkpoint with other settings, from step `begin` to step `end`."""

    are_equal: bool
    one: Turn
    other: Turn
    begin: int
    end: int


def equals_of(generation: Generation) -> list[EqualPair]:
    """Return the pairs of members that continued one checkpoint with other settings, and whether weights are equal."""
    first: dict[str, tuple[Turn, SegmentResult]] = {}
    found = []
    for turn, result in zip(generation.turns, generation.results, strict=True):
        if not result.began_with or result.value is None or result.end == generation.begin:
            continue
        one, its = first.setdefault(result.began_with, (turn, result))
        if one.values != turn.values:
            are_equal = its.weights_sha256 == result.weights_sha256
            found.append(EqualPair(are_equal, one, turn, generation.begin, result.end))
    return found
