"""Where a process stands, in a small file of its own that others can read, whatever it waits for. No torch.

    process 0   thread "watch" --- rank-0.place ---.
    process 1   thread "watch" --- rank-1.place ---+---> whoever looks: the launcher, or, without ours, rank 0
    process 2   (held, or stopped: it is silent) --'

The thread needs the interpreter, and nothing of the process group: a main thread that waits in a collective has let go
of it. A process whose interpreter is held says nothing, and that is seen too; its stack can be had all the same, since
faulthandler answers a signal without the interpreter.
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

ROOM = str(Path(unisono.__file__).parent)
RECIPES = str(Path(ROOM, "recipes"))
LIBRARIES = tuple(f"{folder}{os.sep}" for folder in {*map(sysconfig.get_path, ("stdlib", "purelib", "platlib"))})
"""Code that is nobody's own: the standard library's, and what is installed."""

SIGNAL = signal.SIGRTMAX - 7 if hasattr(signal, "SIGRTMAX") else None
"""What asks a process for its stacks. Nobody else uses it: Slurm, Ray and torch send the classic ones."""

SILENT_SECONDS = 3.0
"""A process that is well writes its place every second, and on a busy machine it may be late: one is silent when it has
said nothing for this long, and for a tenth of its limit (a minute of ten)."""

COMPUTES = 0.05
"""Of a core: who uses more than this is at work. A process that waits uses nothing; one that looks ten times a second
whether it may go on, one or two in a hundred."""


@dataclass(frozen=True, kw_only=True)
class ProcessStatus:
    """Where a process stands.

    written  seconds since 1970
    idle     seconds since anything has gone on there, by its own count (a suspended machine does not count)
    where    file:line of the script's own code; code: what is written there
    waits    for: others (in a collective), meeting (for everybody to come to the place where they meet), store (for
             that place, which does not answer), workers (its loader's), a person (in a debugger); or nobody
    call     the collective that it is in; or, where `waits` says nothing of others, the last one
    share    of a core that it and its workers use, since it is idle; None: not measured yet
    workers  its loader's, and what they do
    limit    seconds without progress that count as stuck, now
    then     what should happen then: end, kill or wait, as the setting watchdog.action
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
    thread: int = 0  # the main thread's, as its stacks name it
    silent: str = ""  # said by whoever looks: it has not written for a while, and why

    @property
    def patience(self) -> float:
        """Seconds without a word after which it counts as silent."""
        return max(SILENT_SECONDS, self.limit / 10)

    def text(self) -> str:
        """As it is written."""
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, text: str | bytes) -> ProcessStatus:
        """As it was written."""
        content = json.loads(text)
        return cls(**{**content, "workers": tuple(content["workers"])})

    def write(self, path: Path) -> None:
        """Whole, or not at all: somebody may be reading. A folder that is gone is nobody's to read."""
        half = path.with_suffix(".placing")
        with contextlib.suppress(OSError):
            half.write_text(self.text(), encoding="utf-8")
            half.replace(path)


def read(path: Path) -> ProcessStatus | None:
    """The place at this path, None if there is none (yet)."""
    try:
        return ProcessStatus.of(path.read_bytes())
    except (OSError, ValueError, TypeError):
        return None


def is_own(filename: str) -> bool:
    """Is it a file of the user's, or of a recipe: neither the library's nor somebody else's?"""
    if filename.startswith(("<", *LIBRARIES)):
        return False
    return not filename.startswith(ROOM + os.sep) or os.path.dirname(filename) == RECIPES


def stacks_path(path: Path) -> Path:
    """Where the process whose place is at `path` writes its stacks when it is asked."""
    return path.with_suffix(".stacks")


def line_of_silent(pid: int, path: Path, thread: int) -> str:
    """file:line of the main thread (`thread`) of a process that says nothing by itself, or "".

    It must have given a file for its stacks to faulthandler, or been forked from one that has.
    """
    if not _answers(pid):
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


def _answers(pid: int) -> bool:
    """Does this process catch our signal? One that does not would die of it (proc_pid_status(5): SigCgt)."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:") and SIGNAL is not None:
                return bool(int(line.split()[1], 16) >> (SIGNAL - 1) & 1)
    return False


def line_of(stacks: str, thread: int) -> str:
    """The same, of faulthandler's text."""
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
    psutil.STATUS_STOPPED: "is stopped (SIGSTOP, or a debugger)",
    psutil.STATUS_TRACING_STOP: "is stopped by a debugger",
    psutil.STATUS_DISK_SLEEP: "waits in the kernel, for a disk or a device",
    psutil.STATUS_ZOMBIE: "is dead",
    psutil.STATUS_DEAD: "is dead",
}


def state_of(pid: int) -> str:
    """What the system says of a process of this host."""
    try:
        status = psutil.Process(pid).status()
    except psutil.Error:
        return "is gone"
    return STATES.get(status, "says nothing (compiled code keeps its interpreter)")


def seconds_of(pid: int) -> float:
    """Of processor time that a process and all it started have used until now."""
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
    """Seconds since 1970."""
    return time.time()
