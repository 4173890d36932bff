"""The first thing in every process that our launcher starts.

    python -u -P -m unisono.launch.child '{"world": {...}, "record": "/.../rank-0.json", ...}' SCRIPT ARGUMENTS...

It says who this process is, runs the script as `__main__` just as plain python would, and records why it failed.
Standard input is a pipe whose other end the launcher holds: when it ends, the launcher is dead, however it died, and
this process takes itself and all it started out of the world.
"""

from __future__ import annotations

import faulthandler
import json
import os
import runpy
import shutil
import signal
import sys
import threading
from pathlib import Path

from unisono import env
from unisono.launch import record


def main() -> None:
    """Run the script that the command line names."""
    told, script, *arguments = sys.argv[1:]
    order = json.loads(told)
    path = Path(order["record"])
    faulthandler.enable()
    signal.alarm(order["seconds"])  # 0: none
    _leave_with_launcher(path.parent)
    record.write_to(path)
    env.assign(env.World(**order["world"]))

    sys.argv = [script, *arguments]
    folder = str(Path(script).resolve().parent)  # plain python puts the script's folder first
    if sys.flags.safe_path:
        sys.path.insert(0, folder)
    else:
        sys.path[0] = folder

    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if record.Record.of(end).exit_status:
            # The launcher says what is to be said, so that it is said once and last.
            sys.exit(record.write(end).exit_status)
    except BaseException as error:
        sys.exit(record.write(error).exit_status)
    record.leave()


def _leave_with_launcher(folder: Path) -> None:
    """Watch standard input from a thread; the script itself gets an empty one."""
    launcher = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)

    def watch() -> None:
        while os.read(launcher, 1):
            pass
        shutil.rmtree(folder, ignore_errors=True)  # the launcher's private folder; it cannot clear it any more
        os.killpg(0, signal.SIGKILL)

    # The thread inherits a mask that blocks every signal: they are the script's, and may interrupt nothing here.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    threading.Thread(target=watch, name="launcher", daemon=True).start()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


if __name__ == "__main__":
    main()
