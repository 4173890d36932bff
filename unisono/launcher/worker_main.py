"""The first thing in every process that our launcher starts.

    python -u -P -m unisono.launcher.worker_main '{"world": {...}, "record": "/.../rank-0.json", ...}' SCRIPT
    ARGUMENTS...

It says who this process is, runs the script as `__main__` just as plain python would, and records why it failed.
Standard input is a pipe whose other end the launcher holds. When the pipe ends and the launcher is no longer the parent
of this process, the launcher has died, and this process kills itself and all that it started.
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
from unisono.launcher import failure_record


def main() -> None:
    """Run the script that the command line names."""
    told, script, *arguments = sys.argv[1:]
    order = json.loads(told)
    path = Path(order["record"])
    faulthandler.enable()
    signal.alarm(order["seconds"])  # 0: none
    _exit_with_launcher(order["launcher"], path.parent)
    failure_record.write_to(path)
    environment.assign(environment.World(**order["world"]))

    sys.argv = [script, *arguments]
    folder = str(Path(script).resolve().parent)  # plain python puts the script's folder first
    if sys.flags.safe_path:
        sys.path.insert(0, folder)
    else:
        sys.path[0] = folder

    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if failure_record.FailureRecord.of(end).exit_status:
            # The launcher says what is to be said, so that it is said once and last.
            sys.exit(failure_record.write(end).exit_status)
    except BaseException as error:
        sys.exit(failure_record.write(error).exit_status)
    failure_record.record_clean_end()


PARENT_LOOK_SECONDS = 0.1
"""Between two looks at the parent's number, once the pipe to it cannot be read any more."""


def _exit_with_launcher(launcher: int, folder: Path) -> None:
    """Start a thread that kills this process and its children when the launcher, process `launcher`, has died. The
    script itself gets an empty standard input."""
    pipe = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)

    def watch() -> None:
        _wait_until_dead(launcher, pipe)
        shutil.rmtree(folder, ignore_errors=True)  # the launcher's private folder, which it cannot remove any more
        os.killpg(0, signal.SIGKILL)

    # The thread inherits a mask that blocks every signal: they are the script's, and may interrupt nothing here.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    threading.Thread(target=watch, name="launcher", daemon=True).start()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _wait_until_dead(launcher: int, pipe: int) -> None:
    """Return when process `launcher`, the parent of this one, has died.

    The pipe wakes us at once, but its end proves nothing: a script that closes descriptors it did not open (a daemon
    does), and is stopped and continued, makes this read fail, or read another file that has got the same number. The
    number of the parent does not lie.
    """
    with contextlib.suppress(OSError):
        os.read(pipe, 1)  # the launcher never writes to it
    while os.getppid() == launcher:  # of a launcher that has just died, for a moment as well
        time.sleep(PARENT_LOOK_SECONDS)


if __name__ == "__main__":
    main()
