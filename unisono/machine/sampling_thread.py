"""The thread that samples a host: in one process of the run on each host, and after its death in the next one.

    local rank 0    lock held: a sample every two seconds ... killed
    local rank 1    waits for the lock .......................... has it: continues the samples
    local rank 2    waits for the lock .........................................................

The lock is one of the kernel (flock), so it is free as soon as its process has ended, whatever ended it, and waiting
for it costs nothing.

Measured with two processes: a sample takes 0.2 ms, or 0.7 ms with cold caches. It delays a loop that needs the
interpreter lock all the time by 0.7 ms, which is 0.035 % of two seconds.
"""

from __future__ import annotations

import fcntl
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from unisono.machine.kernel_files import KernelFiles
from unisono.machine.run_processes import register
from unisono.machine.sample_file import read_samples
from unisono.machine.sampler import SampledRun, Sampler

LONGEST_TICK = 30.0
"""Most seconds between two readings of the counters of energy, which begin anew after some minutes at full power."""

HEAD_START = 1.0
"""Seconds after which a process that is not the first one tries to get the lock."""

END_SECONDS = 2.0
"""Longest time that the end of a run waits for the last sample."""

TAIL_BYTES = 1 << 16


class SamplingThread:
    """Sample the host of this process, or wait until the process that does has died.

    Args:
        run: The run.
        note: Is called with a sentence if something cannot be sampled.
    """

    def __init__(self, run: SampledRun, note: Callable[[str], None]) -> None:
        self.run, self._note = run, note
        self.began = time.time()
        self._over = threading.Event()
        self._sampler: Sampler | None = None
        self._thread = threading.Thread(target=self._safely, name="machine", daemon=True)
        self._head_start = 0.0
        self._run_is_over = False

    def start(self, *, first: bool) -> None:
        """Start. `first`: the other processes of this host let this one begin."""
        self._head_start = 0.0 if first else HEAD_START
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # the main thread handles them
        try:
            register(self.run.processes, KernelFiles(self.run.root), self.run.rank, self.run.device)
            self._thread.start()
        except OSError as error:
            self._note(f"This host is not sampled: {error}.")
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def close(self, *, over: bool = True) -> None:
        """Write the last sample, and end. A second call has no effect.

        Args:
            over: The run is over, so no other process continues the samples.
        """
        if not self._over.is_set():
            self._run_is_over = over
        self._over.set()
        if self._sampler is not None:  # a thread that waits for the lock ends when it has it
            self._thread.join(END_SECONDS)

    @property
    def sampler(self) -> Sampler | None:
        """The sampler, if this process samples or has sampled."""
        return self._sampler

    def _safely(self) -> None:
        try:
            if not self._over.wait(self._head_start):
                self._sample_with_lock()
        except Exception as error:  # training continues without samples
            self._note(f"This host is not sampled any more: {type(error).__name__}: {error}.")

    def _sample_with_lock(self) -> None:
        lock = os.open(self.run.processes, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            last = self._last_line()
            if not self._over.is_set() and "end" not in last:
                self._sample(last)
        finally:
            os.close(lock)

    def _sample(self, last: Mapping[str, Any]) -> None:
        """Sample until the end. `last`: the last line of a process that has died."""
        self._sampler = sampler = Sampler(self.run, self._note)
        sampler.energy.continue_from(last)
        sampler.begin()
        due = time.monotonic() + self.run.every
        try:
            while not self._over.wait(min(max(due - time.monotonic(), 0.0), LONGEST_TICK)):
                if time.monotonic() < due:
                    sampler.energy.update()
                else:
                    due = time.monotonic() + sampler.sample()
        finally:
            sampler.end(over=self._run_is_over)

    def _last_line(self) -> dict[str, Any]:
        """Return the last line, besides those of facts, that another process has written during this run, or {}."""
        if not self.run.samples.exists():
            return {}
        last: dict[str, Any] = {}
        for entry in read_samples(self.run.samples, last_bytes=TAIL_BYTES):
            if entry["t"] >= self.began and "start" not in entry:
                last = entry
        return last
