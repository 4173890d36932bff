"""One bash, in which the commands of a page are typed in their order."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from queue import Empty, Queue

from tests.house.sources import ROOT
from unisono.environment import inherited, variables

PATIENCE_SECONDS = 400.0
"""Enough for a busy machine. Only a hang takes that long."""
END = "\x01end "

SMALL = """\
#!/bin/sh
# unisono, with small sizes for recipes. What the page sets comes later, and wins.
case "$1 $2" in
{cases}
esac
exec {python} -P -m unisono.cli.main "$@"
"""
TORCHRUN = '#!/bin/sh\nexec {python} -m torch.distributed.run "$@"\n'
PYTHON = '#!/bin/sh\nexec {python} "$@"\n'


def write_programs(folder: Path, sizes: Mapping[str, str]) -> None:
    """Write the programs that pages type: unisono, torchrun and python.

    Args:
        folder: for them; it is made, and comes first on the path.
        sizes: flags by command ("run text"), which are inserted after it.
    """
    cases = [f'"{start}") shift 2; set -- {start} {flags} "$@";;' for start, flags in sizes.items()]
    folder.mkdir(parents=True, exist_ok=True)
    texts = {"unisono": SMALL, "torchrun": TORCHRUN, "python": PYTHON}
    for name, text in texts.items():
        program = folder / name
        program.write_text(text.format(python=shlex.quote(sys.executable), cases="\n".join(cases)))
        program.chmod(0o755)


class Shell:
    """A bash in a folder. Standard output and standard error of its commands are one stream.

    Args:
        folder: where commands are typed.
        programs: the folder that comes first on the path.
        prefix: words before bash, which start it on another host.
    """

    def __init__(self, folder: Path, programs: Path, prefix: Sequence[str] = ()) -> None:
        path = os.pathsep.join([str(programs), *variables(["PATH"]).values()])
        python_path = os.pathsep.join([str(ROOT), *variables(["PYTHONPATH"]).values()])
        environment = inherited({"PATH": path, "PYTHONPATH": python_path})
        self._bash = subprocess.Popen(
            [*prefix, "bash", "--noprofile", "--norc"],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            bufsize=1,
            start_new_session=True,
        )
        self._lines: Queue[str] = Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._bash.stdout is not None
        for line in self._bash.stdout:
            self._lines.put(line)

    def start(self, command: str) -> None:
        """Type a command."""
        assert self._bash.stdin is not None
        self._bash.stdin.write(f"{{ {command}\n}} </dev/null; printf '{END}%s\\n' $?\n")

    def finish(self, seconds: float = PATIENCE_SECONDS) -> tuple[int, str]:
        """Wait for the end of the command; return its exit status and the output since the last command."""
        output = ""
        while True:
            try:
                line = self._lines.get(timeout=seconds)
            except Empty:
                raise AssertionError(f"nothing more was printed for {seconds:g} s after:\n{output}") from None
            before, mark, status = line.partition(END)
            output += before
            if mark:
                return int(status), re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output)

    def run(self, command: str) -> tuple[int, str]:
        """Type a command, and wait for its end."""
        self.start(command)
        return self.finish()

    def close(self) -> None:
        """End the shell and all processes of its session."""
        assert self._bash.stdin is not None
        assert self._bash.stdout is not None
        if self._bash.poll() is None:
            os.killpg(self._bash.pid, signal.SIGKILL)
        self._bash.wait()
        self._bash.stdin.close()
        self._reader.join(10)
        self._bash.stdout.close()
