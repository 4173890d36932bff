"""Save the state of a run. A checkpoint is written to a draft, and then published at once: a crash leaves the last one.

Every process writes what only it has: its parts of sharded tensors; the main process also writes whole tensors. No
process gathers a whole model. Two processes that share the parameters of a model:

    main thread 0   encode | agree | copy | next step ...                         | settle: agree, continue
    writer 0                              | file 0, report 0 | wait for report 1 | manifest, publish
    main thread 1   encode | agree | copy | next step ...                         | settle
    writer 1                              | file 1, report 1

To agree is one small message: can every process save, and what is this attempt called? The copy goes into memory that
is allocated at the first save (StagingBuffer). Training waits only for the copy (Mohan et al., CheckFreq, FAST 2021). A
report is a small file: the tensors of this process's file that are parts, and the file's size and sha256. An error in a
writer is raised by all processes: after the next step, at the next save, or at the end, which waits for the last save.

In an elastic run (distributed/membership/membership.py) models are whole on every process, so one process writes:

    process 0   copy | writes .... x killed             leaves a draft, which is no checkpoint
    process 1   copy |  has a job ............. settle  "rank 0 does not publish": lost, until the next save
    process 2                 joins ........... settle  has no job, and gets the same result

If another process dies, the save continues while the others finish the step without it.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from math import prod
from typing import Any

from unisono.checkpoint.contents import FORMAT, MOST_JSON, STATE, SUFFIX, check_state
from unisono.checkpoint.manifest import WrittenFile, name_of
from unisono.checkpoint.safetensors_writer import StagingBuffer, chunks_in_place, file_layout
from unisono.checkpoint.storage import Storage, clear_old
from unisono.config import size
from unisono.distributed.process_group import ProcessGroup
from unisono.errors import CheckpointError, Problem
from unisono.json_forms import parse, parse_value
from unisono.tensors.codec import TensorTable, encode, specs_of

POLL_SECONDS = (0.01, 0.5)
"""Shortest and longest pause between two looks of the main process for reports."""

VISIBLE_SECONDS = 90.0
"""Time within which the main process must see a file that another process has written. (NFS caches for up to 60 s.)"""

CLOSE_SECONDS = 10.0
"""Time that the last save of a failed run has to finish, if other processes must take part."""


EncodedState = tuple[TensorTable, dict[str, Any]]
"""The tensors of a state, and the content of state.json but for what saving adds."""


class SaveCanceled(Exception):
    """The save was canceled: another process's part of it failed, or the run is over."""


class SaveJob:
    """One save, as far as this process takes part in it. Methods run in a writer thread, but for `cancel`."""

    def __init__(
        self,
        storage: Storage,
        steps: int,
        tensors: TensorTable,
        plain: Mapping[str, Any] | None,
        keep: tuple[int, int],
        *,
        rank: int,
        ranks: list[int],
        attempt: str,
    ) -> None:
        """Create a job that has not begun.

        Args:
            storage: Where the checkpoint is written.
            steps: Steps done.
            tensors: Tensors that this process stores.
            plain: Content of state.json on the main process, which publishes the checkpoint; None elsewhere.
            keep: Number of checkpoints to keep, and the multiple of steps after which all are kept (or 0).
            rank: This process.
            ranks: Processes that store tensors.
            attempt: Identifies this save. Reports of an earlier save of the same step have another identifier.
        """
        self.storage, self.steps, self.plain, self.keep = storage, steps, plain, keep
        self.rank, self.ranks, self.attempt = rank, ranks, attempt
        self.parts = {name: [list(start), list(tensors[name].shape)] for name, start in tensors.starts.items()}
        self.whole = [name for name in tensors if name not in self.parts]
        self.bytes = sum(t.nbytes for t in tensors.values())
        self.problem: Problem | None = None
        self.written = threading.Event()  # this process has written its files, or failed
        self.over = threading.Event()  # this process has nothing more to do for it
        self.canceled = threading.Event()
        self.all_written: float | None = None  # time at which all processes had written

    @property
    def publishes(self) -> bool:
        """Return whether this is the main process, which publishes the checkpoint."""
        return self.plain is not None

    def write(self, chunks: Iterable[memoryview]) -> None:
        """Write the file of this process, and a report about it."""
        try:
            if self.publishes:
                self.storage.claim()
            if self.rank in self.ranks:
                file = self.storage.write(self.steps, f"{_stem(self.rank)}{SUFFIX}", self._until_canceled(chunks))
                report = {"attempt": self.attempt, "file": file._asdict(), "whole": self.whole, "parts": self.parts}
                self.storage.write(self.steps, f"{_stem(self.rank)}.json", [json.dumps(report).encode()])
        except Exception as error:
            self._fail(error)
        finally:
            self.written.set()

    def publish(self) -> None:
        """Wait for the reports of the others, and publish the checkpoint; only the main process does anything."""
        try:
            if self.plain is not None and self.problem is None:
                files, reports = self._wait_for_reports()
                self._check_covered(reports)
                files[STATE] = self.storage.write(self.steps, STATE, [self._checked()])
                self.storage.publish(self.steps, files)
                clear_old(self.storage, self.steps, *self.keep)
        except Exception as error:
            self._fail(error)
        finally:
            self.over.set()

    def run(self, chunks: Iterable[memoryview]) -> None:
        """Write and publish."""
        self.write(chunks)
        self.publish()

    def cancel(self) -> None:
        """Cancel the save, and wait until this process writes nothing more for it."""
        self.canceled.set()
        self.over.wait()

    def _wait_for_reports(self) -> tuple[dict[str, WrittenFile], list[dict[str, Any]]]:
        """Return all files that were written, and the reports about them."""
        files: dict[str, WrittenFile] = {}
        reports = []
        for rank in self.ranks:
            content, report = self._report(f"{_stem(rank)}.json")
            files[f"{_stem(rank)}{SUFFIX}"] = WrittenFile(**report["file"])
            files[f"{_stem(rank)}.json"] = WrittenFile.of(content)
            reports.append(report)
        return files, reports

    def _report(self, name: str) -> tuple[bytes, dict[str, Any]]:
        pause, longest = POLL_SECONDS
        while True:
            content = self.storage.read(self.steps, name)
            report = parse(content or b"")  # None: absent, or partly written
            if content is not None and report is not None and report.get("attempt") == self.attempt:
                return content, report
            if self.canceled.wait(pause):
                raise SaveCanceled
            if self.all_written is not None and time.monotonic() > self.all_written + VISIBLE_SECONDS:
                raise CheckpointError(
                    f"Cannot save {name_of(self.steps)} in {self.storage}: a file is not visible.",
                    f"{name} was written {VISIBLE_SECONDS:.0f} s ago, and the main process does not see it there.",
                    "store checkpoints where all hosts see them: --set checkpoint.dir=FOLDER (a shared one), or a URL.",
                )
            pause = min(pause * 1.5, longest)

    def _checked(self) -> bytes:
        """Return the content of state.json, which a load will accept."""
        assert self.plain is not None
        text = json.dumps(self.plain).encode()
        try:
            check_state(parse_value(text))
            if len(text) > MOST_JSON:
                raise ValueError(f"its numbers and text take {len(text):,} bytes, and at most {MOST_JSON:,} are read")
        except ValueError as error:
            raise CheckpointError(
                f"Cannot save {name_of(self.steps)}: it could not be loaded.",
                f"{STATE}: {error}.",
                "let state_dict() return long lists as tensors, and nested ones flat.",
            ) from error
        return text

    def _check_covered(self, reports: Iterable[Mapping[str, Any]]) -> None:
        """Check that all elements of all tensors in state.json are stored."""
        assert self.plain is not None
        sizes = {name: prod(spec.shape) for name, spec in specs_of(self.plain["states"]).items()}
        found = dict.fromkeys(sizes, 0)
        for report in reports:
            for name in report["whole"]:
                found[name] = found.get(name, 0) + sizes.get(name, 0)
            for name, (_, shape) in report["parts"].items():
                found[name] = found.get(name, 0) + prod(shape)
        for name, count in found.items():
            if count != sizes.get(name):
                raise CheckpointError(
                    f"Cannot save {name}: {len(self.ranks)} processes hold too few or too many elements.",
                    f"They hold {count} elements, and it has {sizes.get(name, 0)}.",
                    "report it, with the axes (parallel.*) and how this parameter is sharded.",
                )

    def _until_canceled(self, chunks: Iterable[memoryview]) -> Iterator[memoryview]:
        for chunk in chunks:
            if self.canceled.is_set():
                raise SaveCanceled
            yield chunk

    def _fail(self, error: Exception) -> None:
        if self.problem is None:
            self.problem = save_problem(error, self.storage, self.steps, self.bytes)


class CheckpointSaver:
    """Saves of one run, one after another, with one staging buffer and at most one writer thread.

    All processes of `group` call the same methods together. Members of the group may change between two calls; a
    process that has joined has no job.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self._buffer = StagingBuffer()
        self._job: SaveJob | None = None

    @property
    def failed(self) -> bool:
        """Return whether `settle` would raise an error of this process."""
        return self._job is not None and self._job.problem is not None

    def begin(
        self,
        storage: Storage,
        steps: int,
        state: EncodedState | CheckpointError,
        keep: tuple[int, int],
        *,
        wait: bool,
    ) -> None:
        """Begin to save the state as it is now. An earlier save must be settled.

        Args:
            storage: Where the checkpoint is written.
            steps: Steps done.
            state: The encoded state, whose JSON counts on the main process; or the error of encoding it.
            keep: See SaveJob.
            wait: Write before this returns, without a copy in memory; otherwise while training continues.

        Raises:
            CheckpointError: A process cannot save. All processes raise it.
        """
        assert self._job is None, "there is one staging buffer and one writer"
        main = self.group.rank == 0
        problem = list(state.problems[0]) if isinstance(state, CheckpointError) else None
        has_tensors = not isinstance(state, CheckpointError) and bool(state[0])
        replies = self.group.all_gather_object([problem, has_tensors, uuid.uuid4().hex if main else ""])
        for problem, _, _ in replies:
            if problem:
                raise CheckpointError(*problem)
        assert not isinstance(state, CheckpointError)
        tensors, plain = state
        ranks = [rank for rank, (_, has_tensors, _) in enumerate(replies) if has_tensors]
        content = {"format": FORMAT, "steps": steps, **plain} if main else None
        job = self._job = SaveJob(
            storage, steps, tensors, content, keep, rank=self.group.rank, ranks=ranks, attempt=replies[0][2]
        )
        layout = file_layout(tensors)
        chunks = chunks_in_place(layout, tensors) if wait else self._buffer.stage(layout, tensors)
        threading.Thread(target=job.run, args=[chunks], name=f"checkpoint {steps}", daemon=True).start()
        if wait:
            self.settle()

    def settle(self) -> bool:
        """Wait until the last save is over. It may be called again if a process dies in it.

        Returns:
            False if the process that publishes the checkpoint has died, so that there is none.

        Raises:
            CheckpointError: The save failed. All processes raise it.
        """
        job = self._job
        if job is None and self.group.monitor is None:  # then no process has a job
            return True
        if job is not None:
            job.written.wait()
        replies = self.group.all_gather_object(
            [job is not None, job is not None and job.publishes, job and job.problem]
        )
        # Ranks are in the order of age: the main process of the beginning has rank 0, or is dead.
        lost = any(has_job for has_job, _, _ in replies) and not replies[0][1]
        problem = next((problem for _, _, problem in replies if problem), None)
        if replies[0][1] and not problem:
            if job is not None:
                job.all_written = time.monotonic()
                job.over.wait()
            problem = self.group.broadcast_object(job and job.problem)
        elif job is not None:
            job.cancel()
        self._job = None
        if problem:
            if job is not None and job.publishes:
                with suppress(Exception):  # the storage may be unreachable; a draft in it is no checkpoint
                    job.storage.discard(job.steps)
            raise CheckpointError(*problem)
        return not lost

    def close(self) -> None:
        """End the last save. It may still publish a checkpoint, if that takes less than CLOSE_SECONDS."""
        if self._job is not None:
            self._job.written.wait()
            self._job.over.wait(CLOSE_SECONDS)
            self._job.canceled.set()
            self._job = None


def packed(states: Mapping[str, Any], about: Mapping[str, Any], tensors: TensorTable) -> EncodedState | CheckpointError:
    """Return the encoded states, or the error of encoding them, which `begin` raises on all processes.

    Args:
        states: State dicts by name (model, optimizer, ...).
        about: What else state.json holds: the run's identity, its counters.
        tensors: The table that receives the tensors.
    """
    try:
        return tensors, {**about, "states": {name: encode(state, name, tensors) for name, state in states.items()}}
    except CheckpointError as error:
        return error


def save_problem(error: Exception, storage: Storage, steps: int, needed: int) -> Problem:
    """Return the message for a checkpoint that could not be written.

    Args:
        error: The cause.
        storage: Where the checkpoint was written.
        steps: Steps done.
        needed: Bytes of the tensors.
    """
    if isinstance(error, CheckpointError):
        return error.problems[0]
    try:
        complete = storage.checkpoints()
    except Exception:  # an error of the storage itself
        complete = []
    last = f"The checkpoint after step {complete[0]} is complete." if complete else "There is no earlier one."
    free = storage.free()
    room = "" if free is None else f"; {size(free)} are free there"
    return Problem(
        f"Cannot write the checkpoint after step {steps} to {storage}.",
        f"{type(error).__name__}: {error}. It takes {size(needed)}{room}. {last}",
        "free space or correct the permissions, then start the same command with --resume.",
    )


def _stem(rank: int) -> str:
    return f"rank-{rank:05d}"
