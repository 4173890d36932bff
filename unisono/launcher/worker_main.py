"""The main module of every process that our launcher starts.

    python -u -P -m unisono.launcher.worker_main '{"world": {...}, "record": "/.../rank-0.json", ...}' SCRIPT
    ARGUMENTS...

It assigns this process its place in the run, runs the script as `__main__` as plain Python does, and records a
failure. Standard input is a pipe whose other end the launcher holds. When the pipe ends and the launcher is no longer
the parent of this process, the launcher has died, and this process kills itself and all processes that it started.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import runpy
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

from unisono import environment
from unisono.launcher import failure_record, rank_logging


def main() -> None:
    """Run the script that the command line names."""
    order_text, script, *arguments = sys.argv[1:]
    order = json.loads(order_text)
    path = Path(order["record"])
    faulthandler.enable()
    signal.alarm(order["seconds"])  # 0: no alarm
    _exit_with_launcher(order["launcher"], path.parent)
    failure_record.write_to(path)
    world = environment.World(**order["world"])
    environment.assign(world)
    rank_logging.start(world.rank if world.number is None else world.number, Path(order["log"]), launched=True)

    sys.argv = [script, *arguments]
    folder = str(Path(script).resolve().parent)  # plain Python puts the script's folder first
    if sys.flags.safe_path:
        sys.path.insert(0, folder)
    else:
        sys.path[0] = folder

    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if failure_record.FailureRecord.of(end).exit_status:
            # The launcher prints the failure, once and as the last lines.
            sys.exit(failure_record.write(end).exit_status)
    except BaseException as error:
        sys.exit(failure_record.write(error).exit_status)
    failure_record.record_clean_end()


PARENT_POLL_SECONDS = 0.1
"""Seconds between two checks of the parent's process id, once the pipe has ended."""


def _exit_with_launcher(launcher: int, folder: Path) -> None:
    """Start a thread that kills this process and its children when the launcher has died.

    The script gets an empty standard input.

    Args:
        launcher: the launcher's process id.
        folder: the launcher's private folder, which is then removed.
    """
    pipe = os.dup(0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)

    def watch() -> None:
        _wait_until_dead(launcher, pipe)
        shutil.rmtree(folder, ignore_errors=True)
        os.killpg(0, signal.SIGKILL)

    # The thread inherits a mask that blocks every signal: signals are for the script and must not interrupt this one.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    threading.Thread(target=watch, name="launcher", daemon=True).start()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _wait_until_dead(launcher: int, pipe: int) -> None:
    """Return when process `launcher`, the parent of this one, has died.

    The end of the pipe wakes this thread at once, but proves nothing: a script that closes descriptors it did not open
    (a daemon does), and is stopped and continued, makes the read fail, or read another file with the same descriptor.
    The process id of the parent is reliable.
    """
    with contextlib.suppress(OSError):
        os.read(pipe, 1)  # the launcher never writes to it
    while os.getppid() == launcher:  # also for a moment after the launcher has died
        time.sleep(PARENT_POLL_SECONDS)


if __name__ == "__main__":
    main()
