"""The status of a process, in a small file that others can read, whatever the process waits for. No torch.

    process 0   thread "watch" --- rank-0.status --.
    process 1   thread "watch" --- rank-1.status --+---> our launcher; under another launcher, rank 0
    process 2   (lock held, or stopped: silent) ---'

The thread needs nothing of the process group. It needs the interpreter lock, which a main thread that waits in a
collective has released. A process whose lock is held is silent, and its readers detect that. Its stack can be read
nevertheless, because faulthandler handles a signal without the interpreter.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sysconfig
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]

import unisono

PACKAGE = str(Path(unisono.__file__).parent)
RECIPES = str(Path(PACKAGE, "recipes"))
LIBRARIES = tuple(f"{folder}{os.sep}" for folder in {*map(sysconfig.get_path, ("stdlib", "purelib", "platlib"))})
"""The folders of the standard library and of installed packages."""

SIGNAL = signal.SIGRTMAX - 7 if hasattr(signal, "SIGRTMAX") else None
"""The signal that makes a process write its stacks. Slurm, Ray and torch use only the classic signals."""

SILENT_SECONDS = 3.0
"""A process writes its status every second, or later on a busy machine. It is silent when it has written none for this
long, and for a tenth of its time limit (a minute of ten)."""

COMPUTES = 0.05
"""Share of a core: a process that uses more is computing. A waiting one uses none, or one or two percent if it polls
ten times a second."""


@dataclass(frozen=True, kw_only=True)
class ProcessStatus:
    """The status of a process.

    Attributes:
        rank: the rank of the process.
        size: the number of processes.
        pid: its process id.
        host: its host.
        written: the time of writing, in seconds since 1970.
        idle: seconds without progress, by its own clock (time in which the machine is suspended does not count).
        phase: see phases.py.
        step: the step in progress.
        virtual_rank: the virtual rank whose micro-batch it computes.
        where: file:line of the script's own code.
        code: the source text of that line.
        waits: the object of its wait: others (in a collective), meeting (for processes to arrive at the rendezvous),
            store (for the rendezvous, which does not answer), workers (of its loader), person (in a debugger), or "".
        call: the collective in progress; the last one if it waits for no other process.
        share: the share of a core that it and its workers have used since it is idle; None: not measured yet.
        workers: the activity of the workers of its loader.
        limit: seconds without progress that currently count as a hang.
        then: the action in a hang: end, kill or wait, as the setting watchdog.action.
        thread: the main thread, as faulthandler identifies it.
        silent: set by the reader if the process has not written for a while: the reason, as a predicate.
    """

    rank: int
    size: int
    pid: int
    host: str
    written: float
    idle: float
    phase: str = "other"
    step: int | None = None
    virtual_rank: int | None = None
    where: str = ""
    code: str = ""
    waits: str = ""
    call: str = ""
    share: float | None = None
    workers: tuple[str, ...] = ()
    limit: float = 0.0
    then: str = "end"
    thread: int = 0
    silent: str = ""

    @property
    def silence_limit(self) -> float:
        """Seconds without a new status after which the process counts as silent."""
        return max(SILENT_SECONDS, self.limit / 10)

    def text(self) -> str:
        """Return the status as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, text: str | bytes) -> ProcessStatus:
        """Parse a status from JSON."""
        content = json.loads(text)
        return cls(**{**content, "workers": tuple(content["workers"])})

    def write(self, path: Path) -> None:
        """Write the status atomically, since another process may be reading. Ignores a folder that is gone."""
        partial = path.with_suffix(".partial-status")
        with contextlib.suppress(OSError):
            partial.write_text(self.text(), encoding="utf-8")
            partial.replace(path)


def read(path: Path) -> ProcessStatus | None:
    """Return the status at this path, or None if there is none (yet)."""
    try:
        return ProcessStatus.of(path.read_bytes())
    except (OSError, ValueError, TypeError):
        return None


def is_own(filename: str) -> bool:
    """Return whether this is a file of the user or of a recipe, not of Unisono or an installed package."""
    if filename.startswith(("<", *LIBRARIES)):
        return False
    return not filename.startswith(PACKAGE + os.sep) or os.path.dirname(filename) == RECIPES


def stacks_path(path: Path) -> Path:
    """Return the file in which the process whose status is at `path` writes its stacks."""
    return path.with_suffix(".stacks")


def line_of_silent(pid: int, path: Path, thread: int) -> str:
    """Return file:line of the main thread of a silent process, or "".

    The process, or the one it was forked from, must have registered the file for its stacks with faulthandler.

    Args:
        pid: the process.
        path: the path of its stacks.
        thread: its main thread, as faulthandler identifies it.
    """
    if not _handles_signal(pid):
        return ""
    try:
        os.truncate(path, 0)
        os.kill(pid, SIGNAL or 0)
        until = time.monotonic() + ANSWER_SECONDS
        while time.monotonic() < until:
            time.sleep(0.02)
            if line := line_of(path.read_text(encoding="utf-8", errors="replace"), thread):
                return line
    except OSError:
        pass
    return ""


ANSWER_SECONDS = 0.5
"""Time limit for the stacks to appear, in seconds."""


def _handles_signal(pid: int) -> bool:
    """Return whether this process handles our signal, and does not die of it (proc_pid_status(5): SigCgt)."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:") and SIGNAL is not None:
                return bool(int(line.split()[1], 16) >> (SIGNAL - 1) & 1)
    return False


def line_of(stacks: str, thread: int) -> str:
    """Return file:line of a thread in the output of faulthandler, or ""."""
    name = f"0x{thread:016x}"
    for part in re.split(r"\n(?=Thread |Current thread )", stacks):
        if name not in part.partition("\n")[0]:
            continue
        lines = re.findall(r'File "([^"]*)", line (\d+) in (\S+)', part)
        own = [line for line in lines if is_own(line[0])] or lines
        if own:
            filename, number, function = own[0]
            return f"{os.path.basename(filename)}:{number} in {function}"
    return ""


STATES = {
    psutil.STATUS_STOPPED: "is stopped (SIGSTOP or a debugger)",
    psutil.STATUS_TRACING_STOP: "is stopped by a debugger",
    psutil.STATUS_DISK_SLEEP: "waits in the kernel, for a disk or a device",
    psutil.STATUS_ZOMBIE: "is dead",
    psutil.STATUS_DEAD: "is dead",
}


def state_of(pid: int) -> str:
    """Return the state of a process on this host, as a predicate."""
    try:
        status = psutil.Process(pid).status()
    except psutil.Error:
        return "is gone"
    return STATES.get(status, "does not respond (compiled code holds the interpreter lock)")


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process and all processes that it started."""
    total = 0.0
    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
    except psutil.Error:
        return total
    for member in family:
        with contextlib.suppress(psutil.Error):
            times = member.cpu_times()
            total += times.user + times.system
    return total


def now() -> float:
    """Return the seconds since 1970."""
    return time.time()
