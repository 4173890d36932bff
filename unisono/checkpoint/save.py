"""Save the state of a run: everything into a draft beside the others, which then becomes one at once. A crash leaves
the last one.

Every process writes what only it has: its parts of what lies over several, and the main process whatever lies whole.
Nobody gathers a whole model. Two processes that share a model's parameters:

    main thread 0   pack | agree | copy | next step ...                        | settle: agree, go on
    writer 0                            | sheet 0, its word | wait for 1's word | seal, publish
    main thread 1   pack | agree | copy | next step ...                        | settle
    writer 1                            | sheet 1, its word

Agreeing is one small message: can everybody save, and what is this attempt called? The copy goes into memory that was
made at the first save (sheet.Stage); it is all that training waits for (Mohan et al., CheckFreq, FAST 2021). A word is
a small file: which of the tensors in a sheet are parts, its size and sha256. What goes wrong in a writer is raised by
everybody: after the next step, at the next save, or at the end, which waits for the last one.

Where the others go on without a process that dies (distributed/membership/membership.py), models lie whole, and so one
process writes:

    process 0   copy | writes .... x killed             a draft, which nobody takes for a checkpoint
    process 1   copy |  knows of it ........... settle  "rank 0 does not write it": lost, until the next save
    process 2                 joins ........... settle  knows of none, and hears the same

If another one dies, the save goes on beside the step that is finished without it.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

from unisono.checkpoint.manifest import STATE, WrittenFile, name_of
from unisono.checkpoint.safetensors_writer import SUFFIX, StagingBuffer, chunks_in_place, file_layout
from unisono.checkpoint.storage import Storage, clear_old, place_of
from unisono.config import size
from unisono.distributed.process_group import ProcessGroup
from unisono.errors import CheckpointError, Problem
from unisono.tensors.codec import TensorTable, encode, specs_of

FORMAT = 3
"""Of the files of a checkpoint, said in state.json. (1 was torch's index of one file; 2 had no layout.)"""

LOOK_SECONDS = (0.01, 0.5)
"""How soon the main process's writer looks again for others' words: at first, and in the end."""

SHARED_SECONDS = 90.0
"""How long after somebody has written it the main process may take to see it. (NFS looks again after up to 60.)"""

PATIENCE_SECONDS = 10.0
"""How long a run that breaks lets the last save become a checkpoint, if others have to help."""


Packed = tuple[TensorTable, dict[str, Any]]
"""A state taken apart, and what goes into state.json beside what saving itself knows."""


class SaveAbandoned(Exception):
    """A save is not wanted any more: somebody else's part of it failed, or the run is over."""


class SaveJob:
    """One save, as far as this process has to do with it.

    attempt  what everybody calls it: words of an earlier one, of the same step, do not count
    ranks    those that write a sheet; `rank` is this process
    plain    on the main process, all that is no tensor
    keep     how many stay, and multiples of which step
    """

    def __init__(
        self,
        there: Storage,
        steps: int,
        tensors: TensorTable,
        plain: Mapping[str, Any] | None,
        keep: tuple[int, int],
        *,
        rank: int,
        ranks: list[int],
        attempt: str,
    ) -> None:
        self.there, self.steps, self.plain, self.keep = there, steps, plain, keep
        self.rank, self.ranks, self.attempt = rank, ranks, attempt
        self.parts = {name: [list(start), list(tensors[name].shape)] for name, start in tensors.starts.items()}
        self.whole = [name for name in tensors if name not in self.parts]
        self.bytes = sum(t.nbytes for t in tensors.values())
        self.problem: Problem | None = None
        self.written = threading.Event()  # what this process has to write is, or it failed
        self.over = threading.Event()  # it is a checkpoint, as far as this process has to do with it, or it failed
        self.unwanted = threading.Event()
        self.all_written: float | None = None  # when that was known

    @property
    def publishes(self) -> bool:
        """Is this the main process, which makes it a checkpoint?"""
        return self.plain is not None

    def write(self, chunks: Iterable[memoryview]) -> None:
        """This process's sheet, and its word that it is there."""
        try:
            if self.publishes:
                self.there.claim()
            if self.rank in self.ranks:
                sheet = self.there.write(self.steps, f"{_stem(self.rank)}{SUFFIX}", self._while_wanted(chunks))
                word = {"attempt": self.attempt, "sheet": sheet._asdict(), "whole": self.whole, "parts": self.parts}
                self.there.write(self.steps, f"{_stem(self.rank)}.json", [json.dumps(word).encode()])
        except Exception as error:
            self._failed(error)
        finally:
            self.written.set()

    def publish(self) -> None:
        """On the main process: wait for the others' words, and make it a checkpoint."""
        try:
            if self.plain is not None and self.problem is None:
                files, words = self._heard()
                self._check_covered(words)
                files[STATE] = self.there.write(self.steps, STATE, [json.dumps(self.plain).encode()])
                self.there.publish(self.steps, files)
                clear_old(self.there, self.steps, *self.keep)
        except Exception as error:
            self._failed(error)
        finally:
            self.over.set()

    def both(self, chunks: Iterable[memoryview]) -> None:
        """What a writer does."""
        self.write(chunks)
        self.publish()

    def abandon(self) -> None:
        """Let go of it; returns when nothing of it is being written here any more."""
        self.unwanted.set()
        self.over.wait()

    def _heard(self) -> tuple[dict[str, WrittenFile], list[dict[str, Any]]]:
        """The files that all have written, and the words about them."""
        files: dict[str, WrittenFile] = {}
        words = []
        for rank in self.ranks:
            content, word = self._word(f"{_stem(rank)}.json")
            files[f"{_stem(rank)}{SUFFIX}"] = WrittenFile(**word["sheet"])
            files[f"{_stem(rank)}.json"] = WrittenFile.of(content)
            words.append(word)
        return files, words

    def _word(self, name: str) -> tuple[bytes, dict[str, Any]]:
        pause, longest = LOOK_SECONDS
        while True:
            content = self.there.read(self.steps, name)
            with suppress(ValueError):  # half of it
                word = json.loads(content or b"{}")
                if content is not None and word.get("attempt") == self.attempt:
                    return content, word
            if self.unwanted.wait(pause):
                raise SaveAbandoned
            if self.all_written is not None and time.monotonic() > self.all_written + SHARED_SECONDS:
                raise CheckpointError(
                    f"{name_of(self.steps)} was to be put together in {self.there}.",
                    f"{name} was written, and {SHARED_SECONDS:.0f} s later the main process does not see it there.",
                    "keep checkpoints where all hosts see them: --set checkpoint.dir=FOLDER (a shared one), or a URL.",
                )
            pause = min(pause * 1.5, longest)

    def _check_covered(self, words: Iterable[Mapping[str, Any]]) -> None:
        """All that state.json speaks of is there, and of what lies over several processes all of it."""
        assert self.plain is not None
        wholes = {name: prod(spec.shape) for name, spec in specs_of(self.plain["states"]).items()}
        found = dict.fromkeys(wholes, 0)
        for word in words:
            for name in word["whole"]:
                found[name] = found.get(name, 0) + wholes.get(name, 0)
            for name, (_, shape) in word["parts"].items():
                found[name] = found.get(name, 0) + prod(shape)
        for name, count in found.items():
            if count != wholes.get(name):
                raise CheckpointError(
                    f"{name} was to be saved by {len(self.ranks)} processes.",
                    f"What they have of it are {count} numbers, and it has {wholes.get(name, 0)}.",
                    "report it, with the axes (parallel.*) and how this parameter is divided.",
                )

    def _while_wanted(self, chunks: Iterable[memoryview]) -> Iterator[memoryview]:
        for chunk in chunks:
            if self.unwanted.is_set():
                raise SaveAbandoned
            yield chunk

    def _failed(self, error: Exception) -> None:
        if self.problem is None:
            self.problem = save_problem(error, self.there, self.steps, self.bytes)


class CheckpointSaver:
    """Saves of one run, one after the other, with one memory and at most one writer. All processes of `group` call the
    same verbs of it together; who they are may change in between, and whoever has just come knows of no save."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.stage = StagingBuffer()
        self.job: SaveJob | None = None

    @property
    def failed(self) -> bool:
        """Is there something that `settle` would raise?"""
        return self.job is not None and self.job.problem is not None

    def begin(
        self,
        there: Storage,
        steps: int,
        state: Packed | CheckpointError,
        keep: tuple[int, int],
        *,
        wait: bool,
    ) -> None:
        """Save what this process has now: its tensors, and (what counts is the main process's) all that is none. Either
        beside whatever comes next, or, with `wait`, before it. What was begun before is settled. Raises CheckpointError
        on all of them if one cannot."""
        assert self.job is None, "there is one memory, and one writer"
        main = self.group.rank == 0
        problem = list(state.problems[0]) if isinstance(state, CheckpointError) else None
        has = not isinstance(state, CheckpointError) and bool(state[0])
        said = self.group.all_gather_object([problem, has, uuid.uuid4().hex if main else ""])
        for problem, _, _ in said:
            if problem:
                raise CheckpointError(*problem)
        assert not isinstance(state, CheckpointError)
        tensors, plain = state
        ranks = [rank for rank, (_, has, _) in enumerate(said) if has]
        whole = {"format": FORMAT, "steps": steps, **plain} if main else None
        job = self.job = SaveJob(
            there, steps, tensors, whole, keep, rank=self.group.rank, ranks=ranks, attempt=said[0][2]
        )
        sheet = file_layout(tensors)
        chunks = chunks_in_place(sheet, tensors) if wait else self.stage.take(sheet, tensors)
        threading.Thread(target=job.both, args=[chunks], name=f"checkpoint {steps}", daemon=True).start()
        if wait:
            self.settle()

    def settle(self) -> bool:
        """What was begun is over: it is a checkpoint, or all of them raise CheckpointError. False: it is lost with the
        process that was to make it one. It may be called again, should somebody die in it."""
        job = self.job
        if job is None and self.group.company is None:  # then it is so everywhere
            return True
        if job is not None:
            job.written.wait()
        said = self.group.all_gather_object([job is not None, job is not None and job.publishes, job and job.problem])
        # ranks go by age: whoever was the main process when it began is that still, or dead
        lost = any(knows for knows, _, _ in said) and not said[0][1]
        problem = next((problem for _, _, problem in said if problem), None)
        if said[0][1] and not problem:
            if job is not None:
                job.all_written = time.monotonic()
                job.over.wait()
            problem = self.group.broadcast_object(job and job.problem)
        elif job is not None:
            job.abandon()
        self.job = None
        if problem:
            if job is not None and job.publishes:
                with suppress(Exception):  # of a place that is in trouble: what is left there is no checkpoint
                    job.there.discard(job.steps)
            raise CheckpointError(*problem)
        return not lost

    def close(self) -> None:
        """The run is over. If it broke, what was begun may still become a checkpoint, if that does not take long."""
        if self.job is not None:
            self.job.written.wait()
            self.job.over.wait(PATIENCE_SECONDS)
            self.job.unwanted.set()
            self.job = None


def packed(states: Mapping[str, Any], about: Mapping[str, Any], tensors: TensorTable) -> Packed | CheckpointError:
    """These states, ready to be saved; or why they cannot be, for all processes to hear."""
    try:
        return tensors, {**about, "states": {name: encode(state, name, tensors) for name, state in states.items()}}
    except CheckpointError as error:
        return error


def save(run_dir: Path, steps: int, states: Mapping[str, Any], about: Mapping[str, Any], keep: int) -> Path:
    """Write the checkpoint of a run of one process after `steps` steps, and keep the `keep` newest.

    states  state dicts by name (model, optimizer, ...)
    about   what else belongs to it, as JSON: the run's identity, its counters

    Raises CheckpointError if it cannot be written; the checkpoints that were there are then untouched.
    """
    CheckpointSaver(ProcessGroup()).begin(
        place_of(run_dir), steps, packed(states, about, TensorTable()), (keep, 0), wait=True
    )
    return run_dir / "checkpoints" / name_of(steps)


def _stem(rank: int) -> str:
    return f"rank-{rank:05d}"


def save_problem(error: Exception, there: Storage, steps: int, needed: int) -> Problem:
    """Why a checkpoint of so many bytes could not be written, and what is left."""
    if isinstance(error, CheckpointError):
        return error.problems[0]
    try:
        whole = there.checkpoints()
    except Exception:  # an error of the place itself
        whole = []
    last = f"The checkpoint after step {whole[0]} is whole." if whole else "There is no earlier one."
    free = there.free()
    room = "" if free is None else f"; {size(free)} are free there"
    return Problem(
        f"A checkpoint after step {steps} was to be written to {there}.",
        f"{type(error).__name__}: {error}. It takes {size(needed)}{room}. {last}",
        "make room or mend the permissions, then start the same command with --resume.",
    )
