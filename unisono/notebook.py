"""`unisono.launch(main, Settings(...), ranks=2)`: start a run from a notebook cell, the interpreter or a script.

    this process ── RUN/launch/main.pickle (cloudpickle) ──> RUN/launch/main.py in each rank: unisono.main(...)
         └────────── one updating line <── rank 0's output

It never forks, so modules and threads of this process do not matter. Functions and classes of notebook cells are sent
by value, with their source for tracebacks. RUN/launch/main.py is an ordinary script: `unisono run` resumes it, and
`unisono replay RUN` finds it.
"""

from __future__ import annotations

import dataclasses
import io
import json
import linecache
import os
import pickle
import re
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import cloudpickle  # type: ignore[import-untyped]

from unisono import environment
from unisono.checkpoint import manifest
from unisono.cli.commands.run_command import numbers
from unisono.cli.notebook_line import STEP, NotebookLine
from unisono.cli.request.request_checks import checked
from unisono.cli.request.restarts import Hosts, RankRange, run_with_restarts, say_line
from unisono.cli.request.run_audit import audited
from unisono.cli.request.run_dir import choose_run_dir, lock_run_dir, newest_run, write
from unisono.cli.request.run_options import RunRequest
from unisono.cli.request.target import problems_of_train
from unisono.config import CommandLine, Settings, entries_of, gather, shown
from unisono.config.validate import examine
from unisono.environment import ONE_EACH, DeviceAssignment, World
from unisono.errors import RankFailedError, SettingsError, UnisonoError
from unisono.launcher.worker_process import WorkerFailure
from unisono.security.file_modes import make_folder, write_bytes

SCRIPT = '''\
"""The script of unisono.launch. To resume: unisono run THIS_FILE --run-dir RUN --resume"""

import unisono
from unisono.notebook import received

main, Settings = received(__file__)

if __name__ == "__main__":
    unisono.main(main, Settings)
'''
Places = Callable[[], AbstractContextManager[Hosts | None]]
"""Returns a block in which the hosts of a run are ready; None: this host."""

COLUMNS = 100
"""The width of the progress line in a notebook."""


def launch(
    main: Callable[[Any], None],
    settings: Settings | type[Settings] = Settings,
    *,
    ranks: int | str = 1,
    run_dir: str | os.PathLike[str] | None = None,
    resume: bool = False,
) -> dict[str, Any]:
    """Train `main(run)` in `ranks` processes on this host, and return the content of result.json.

    Args:
        main: the function that a script passes to unisono.main. It may be defined in a notebook cell.
        settings: an instance of a settings class, or the class for its defaults.
        ranks: the number of processes, or "MIN:MAX" (see `unisono run --help`).
        run_dir: the run directory; None for runs/NAME-TIME, or with `resume` for the newest of these.
        resume: continue from the newest complete checkpoint.

    Raises:
        SettingsError: for a wrong request, before any process starts.
        RankFailedError: if the run fails, with the traceback of the rank that failed first.
        KeyboardInterrupt: after Ctrl-C or an interrupt of the kernel. The run saves its state first.
    """
    line = LaunchCall(name=getattr(main, "__name__", "main"), ranks=ranks, run_dir=run_dir, resume=resume)
    return launched_function(main, settings, line)


def launched_function(
    main: Callable[[Any], None],
    settings: Settings | type[Settings],
    line: LaunchCall,
    *,
    devices: DeviceAssignment = ONE_EACH,
    places: Places = nullcontext,
) -> dict[str, Any]:
    """Train `main(run)`, as `launch` does.

    Args:
        main: the function.
        settings: an instance of a settings class, or the class for its defaults.
        line: the call, with its arguments.
        devices: the device of each rank.
        places: returns a block in which the hosts of the run are ready. Called if nothing is wrong with the request.
    """
    ranks, run_dir, resume = line.ranks, line.run_dir, line.resume
    if (world := World.current()).size > 1 or environment.assigned():
        facts = f"This process is rank {world.rank} of {world.size}."
        raise SettingsError(
            f"{line.call} was called in a process of a run.",
            facts,
            "unisono.main(main, Settings) in a script that a launcher starts",
        )
    if not issubclass(settings if isinstance(settings, type) else type(settings), Settings):
        do = str(replace(line, sets=("steps=100",)))
        facts = f"It is {settings!r}, and not a unisono.Settings."
        raise SettingsError(f"Invalid argument settings of {line.call}.", facts, do)
    sizes, stem = numbers(str(ranks), 0, line)._replace(devices=devices), _stem()
    cls = settings if isinstance(settings, type) else type(settings)
    path = Path(run_dir) if run_dir is not None else None
    request = RunRequest(sets=_sets(settings), run_dir=path, resume=resume, json=True)
    problems = problems_of_train(Path(stem), main)
    earlier = request.earlier(path or newest_run(stem))
    loaded, more = examine(gather(cls, file=None, sets=request.sets, earlier=earlier, line=line), sizes.usual)
    if problems + more or loaded is None:
        raise SettingsError.of(problems + more)
    sent = _by_value(main, cls)
    script = partial(_write, sent)
    return train(script, request, stem, sizes, line, threads=loaded.settings.threads, places=places)


def launched_script(
    target: str,
    settings: Mapping[str, Any],
    line: LaunchCall,
    *,
    devices: DeviceAssignment = ONE_EACH,
    places: Places = nullcontext,
) -> dict[str, Any]:
    """Train a recipe or a script, as `launch` trains a function. `settings` has values by their dotted names."""
    sizes = numbers(str(line.ranks), 0, line)._replace(devices=devices)
    path = Path(line.run_dir) if line.run_dir is not None else None
    sets = tuple(f"{name}={shown(value)}" for name, value in settings.items())
    request = RunRequest(sets=sets, run_dir=path, resume=line.resume, json=True)
    script, threads, *_ = checked(target, sizes.usual, request, line, inspect=False)
    return train(lambda folder: script, request, script.stem, sizes, line, threads=threads, places=places)


def train(
    script_in: Callable[[Path], Path],
    request: RunRequest,
    stem: str,
    sizes: RankRange,
    line: LaunchCall,
    *,
    threads: int,
    places: Places,
) -> dict[str, Any]:
    """Start the processes of a request that is right, and return the content of result.json when they have ended.

    Args:
        script_in: returns the script; its argument is the run directory.
        request: the flags of the run.
        stem: the name for run directories.
        sizes: the number of processes.
        line: the call.
        threads: the number of threads of each process.
        places: returns a block in which the hosts of the run are ready.

    Raises:
        RankFailedError: the run fails.
        KeyboardInterrupt: after Ctrl-C.
    """
    started = time.time()
    with places() as hosts:
        folder = choose_run_dir(stem, request.run_dir, resume=line.resume, line=line)
        with lock_run_dir(folder, line), audited(folder, say_line) as audit, _shown() as (screen, columns):
            show: dict[str, Any] = {"screen": screen, "columns": columns, "say": False, "hosts": hosts, "audit": audit}
            outcome = run_with_restarts(script_in(folder), request, folder, sizes, threads=threads, **show)
    if outcome.stopped:
        print(_how_to_resume(folder, line), file=sys.stderr, flush=True)
        raise KeyboardInterrupt
    if outcome.failure is not None:
        raise _error_of(outcome.failure, line)
    result = folder / "result.json"
    if not result.exists() or (result.stat().st_mtime < started and not line.resume):
        log = folder / "log" / "rank-0.log"
        raise SettingsError("The run ended without a result.", "There is no result.json.", f"read {log}")
    content: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return content


def received(script: str) -> tuple[Any, Any]:
    """Return the function and the settings class that `launch` stored next to this script. Called in each rank."""
    sent = pickle.loads(Path(script).with_name("main.pickle").read_bytes())
    sys.path += [path for path in sent["path"] if path not in sys.path]
    for name, lines in sent["lines"].items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
    found: tuple[Any, Any] = pickle.loads(sent["main"])
    return found


@dataclass(frozen=True)
class LaunchCall(CommandLine):
    """A call of `launch` or `unisono.ray.run`, and changed versions of it that messages propose."""

    name: str = "main"
    ranks: int | str = 1
    run_dir: Any = None
    resume: bool = False
    sets: tuple[str, ...] = ()
    call: str = "unisono.launch"

    def __str__(self) -> str:
        words = [self.name, f"Settings({', '.join(self.sets)})" if self.sets else "settings", f"ranks={self.ranks!r}"]
        words += [f"run_dir={str(self.run_dir)!r}"] if self.run_dir is not None else []
        words += ["resume=True"] if self.resume else []
        return f"{self.call}({', '.join(words)})"

    def setting(self, *pairs: str, instead_of: str = "") -> LaunchCall:
        return replace(self, sets=(*self.sets, *pairs))

    def flag(self, name: str, value: str = "", instead_of: str = "") -> LaunchCall:
        name = name.removeprefix("--").replace("-", "_")
        if name == "ranks":
            return replace(self, ranks=int(value) if value.isdecimal() else value)
        if name == "run_dir":
            return replace(self, run_dir=value)
        return replace(self, resume=True) if name == "resume" else self

    def without(self, name: str, value: str = "") -> LaunchCall:
        empty: dict[str, Any] = {"--run-dir": {"run_dir": None}, "--resume": {"resume": False}}
        return replace(self, **empty.get(name, {}))

    def in_processes(self, count: int) -> LaunchCall:
        return replace(self, ranks=count)

    def help(self) -> str:
        return ""


def _stem() -> str:
    """Return the name for run directories: that of the script, if there is one."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return Path(file).stem if file else "notebook"


def _sets(settings: Settings | type[Settings]) -> tuple[str, ...]:
    """Return the values of an instance that differ from the defaults of its class, as --set takes them."""
    if isinstance(settings, type):
        return ()
    pairs = zip(entries_of(type(settings)), entries_of(type(settings), settings), strict=True)
    return tuple(f"{mine.name}={shown(mine.default)}" for usual, mine in pairs if usual.default != mine.default)


SINGLE = {id(mark): name for name, mark in vars(dataclasses).items() if type(mark).__module__ == "dataclasses"}
"""Names of objects that dataclasses compares by identity, such as MISSING."""


class Pickler(cloudpickle.Pickler):
    """A pickler that keeps the identity of these objects; cloudpickle would copy them."""

    def reducer_override(self, obj: Any) -> Any:
        if id(obj) in SINGLE:
            return SINGLE[id(obj)]
        return super().reducer_override(obj)


def _by_value(main: Any, cls: type) -> bytes:
    """Pickle `main` and its settings class, with everything of `__main__` that they use."""
    lines = {name: entry[2] for name, entry in linecache.cache.items() if len(entry) == 4 and not Path(name).exists()}
    path = [str(Path(place).absolute()) for place in sys.path if not place.endswith(".zip")]
    try:
        both = io.BytesIO()
        Pickler(both).dump((main, cls))
    except Exception as error:  # __reduce__ may raise anything
        facts = f"{type(error).__name__}: {error}"
        raise SettingsError(
            "Cannot send the function to the processes of the run.",
            facts,
            "open files, locks and the like inside the function instead.",
        ) from error
    return cloudpickle.dumps({"path": path, "lines": lines, "main": both.getvalue()})


def _write(sent: bytes, run_dir: Path) -> Path:
    """Write the script of the run's processes, and the file that it reads."""
    folder = run_dir / "launch"
    make_folder(folder)
    write_bytes(folder / "main.pickle", sent)
    write(folder / "main.py", SCRIPT)
    return folder / "main.py"


@contextmanager
def _shown() -> Iterator[tuple[int, int]]:
    """Yield a file descriptor for rank 0's output, and the width of the progress line; 0 for that of the terminal.

    The output goes to sys.stdout, which may be a terminal or a notebook cell.
    """
    try:
        plain = sys.__stdout__ is not None and sys.stdout is sys.__stdout__ and sys.stdout.fileno() == 1
    except (AttributeError, OSError, ValueError):
        plain = False
    if plain:
        sys.stdout.flush()
        yield 1, 0
        return
    reader, writer = os.pipe()
    forward = ForwardToNotebook(sys.stdout) if environment.in_a_kernel() else ForwardToStream(sys.stdout)
    thread = threading.Thread(target=_read, args=(reader, forward), name="unisono.launch", daemon=True)
    thread.start()
    try:
        yield writer, COLUMNS
    finally:
        os.close(writer)
        thread.join()


CODES = re.compile("\x1b\\[[0-9;]*[A-Za-z]")


class ForwardToStream:
    """Copy output to a stream. A line that ends in a carriage return is overwritten by the next one."""

    def __init__(self, screen: TextIO) -> None:
        self._screen = screen
        self._width = 0

    def line(self, text: str) -> None:
        """Print a whole line."""
        self._screen.write("\r" * bool(self._width) + text.ljust(self._width) + "\n")
        self._screen.flush()
        self._width = 0

    def live(self, text: str) -> None:
        """Print a line that the next one overwrites; "": print nothing."""
        if text:
            self._screen.write("\r" + text.ljust(self._width))
            self._screen.flush()
            self._width = max(self._width, len(text))

    def close(self) -> None:
        """End an unfinished line."""
        if self._width:
            self._screen.write("\n")


class ForwardToNotebook:
    """Copy output to a cell: the progress line as HTML that is updated in place, other lines as text."""

    def __init__(self, screen: TextIO) -> None:
        self._screen = screen
        self._progress = NotebookLine()
        self._cleared = False  # the progress line was cleared for the next line

    def line(self, text: str) -> None:
        """Print a whole line, or keep it as the last state of the progress line."""
        if self._cleared and STEP.match(text):
            self._progress.show(text)
        else:
            self._screen.write(text + "\n")
            self._screen.flush()
        self._cleared = False

    def live(self, text: str) -> None:
        """Show the progress line; "": it is cleared."""
        self._cleared = not text
        if text:
            self._progress.show(text)

    def close(self) -> None:
        """Do nothing: the progress line stays."""


def _read(reader: int, forward: ForwardToStream | ForwardToNotebook) -> None:
    """Divide output into whole lines and live ones, which end in a carriage return."""
    with open(reader, encoding="utf-8", errors="replace", newline="") as stream:
        piece = ""
        while char := stream.read(1):
            if char not in "\r\n":
                piece += char
                continue
            text, piece = CODES.sub("", piece), ""
            (forward.line if char == "\n" else forward.live)(text)
    forward.close()


def _how_to_resume(run_dir: Path, line: LaunchCall) -> str:
    again = replace(line, run_dir=run_dir, resume=True)
    saved = manifest.checkpoints(run_dir)
    if not saved and manifest.storage_history(run_dir)[0] is None:
        return f"Stopped before the first step: nothing to save.\n  Next: {line}"
    return f"Stopped; {saved[0][1].name if saved else 'its state'} is saved.\n  Next: {again}"


def _error_of(failure: WorkerFailure, line: CommandLine) -> UnisonoError:
    """Return the failure of a run as an exception."""
    record = failure.record
    if record is not None and record.exit_status == 2 and record.problems:
        return SettingsError.of(record.problems)
    kind = record.kind if record is not None else ""
    error = f"Rank {failure.rank} of {failure.size} failed" + (f" with {kind}." if kind else ".")
    text = (record.traceback or record.message).rstrip("\n") if record is not None else str(failure)
    return RankFailedError(
        error, text.replace("\n", "\n  "), f"its log is {shlex.quote(str(failure.log))}", failure.rank, kind
    )
