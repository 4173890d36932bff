"""unisono top: show the ranks of a run in the terminal, once a second."""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from unisono.cli.inspect.named_run import open_runs
from unisono.config import size
from unisono.monitor.stream_text import visible

if TYPE_CHECKING:
    from unisono.report.run_files import RunFiles

SECONDS = 1.0
UNKNOWN = "–"
END_OF_INPUT = "\x04"
ENDING_KEYS = ("q", "Q", "\x03", END_OF_INPUT)


def top(run: Path, /) -> int:
    """Show the ranks of a run as rows, once a second: step, speed, waiting, memory, device.

    It reads only files of the run. q or Ctrl-C ends it, and so does the end of the run. A run that a crash ended stays
    on the screen: it may be resumed. Into a file or a pipe it prints the rows once.

    Parameters
    ----------
    run
        The run directory.
    """
    (files,) = open_runs([run], "unisono", "top")
    console = Console()
    if not console.is_terminal:
        console.print(view(files, console.width))
        return 0
    with suppress(KeyboardInterrupt):
        _show(files, console)
    return 0


def _show(files: RunFiles, console: Console) -> None:
    """Show the rows until a key ends it, or the run has a result."""
    with single_keys() as wait, Live(view(files, console.width), console=console, auto_refresh=False) as live:
        live.refresh()
        while files.state not in ("finished", "stopped") and wait(SECONDS) not in ENDING_KEYS:
            files.read()
            live.update(view(files, console.width), refresh=True)


def view(files: RunFiles, width: int) -> Group:
    """Return the first line and the rows. In a narrow terminal the less important columns are left out."""
    from unisono.report.rank_table import (  # here, because it loads numpy
        RECENT_SECONDS,
        ranks_now,
        samples_per_second,
        seconds_since_step,
    )

    ranks, speed = ranks_now(files), samples_per_second(files)
    total = files.settings.get("steps")
    done = max((row.step for row in ranks if row.step is not None), default=-1) + 1
    of = f" of {total.value}" if total is not None and total.value.isdecimal() else ""
    state, age = files.state, seconds_since_step(files)
    head = f"{visible(files.name)}: {state}, step {done}{of}"
    if state == "running" and age is not None and age > RECENT_SECONDS:
        head += f", {age:.0f} s ago"
    elif speed:
        head += f", {speed:,.4g} samples/s"
    columns = {
        "rank": [str(row.rank) for row in ranks],
        "step": [UNKNOWN if row.step is None else str(row.step + 1) for row in ranks],
        "steps/s": [_number(row.steps_per_second) for row in ranks],
        "wait": [UNKNOWN if row.wait is None else f"{row.wait:.0%}" for row in ranks],
        "memory": [UNKNOWN if row.resident is None else size(row.resident) for row in ranks],
        "mostly": [visible(row.phase or UNKNOWN) for row in ranks],
        "cores": [_number(row.cores) for row in ranks],
        "device": [_device(row.device) for row in ranks],
        "host": [visible(row.host or UNKNOWN) for row in ranks],
    }
    if not any(row.device for row in ranks):
        del columns["device"]
    table = Table(box=None, pad_edge=False, header_style="bold")
    room = width
    for name, cells in columns.items():
        room -= max(map(len, (name, *cells))) + 2
        if room >= -2:  # the last column needs no space after it
            table.add_column(name, justify="left" if name in ("mostly", "device", "host") else "right", no_wrap=True)
    shown = [str(column.header) for column in table.columns]
    for row in zip(*(columns[name] for name in shown), strict=True):
        table.add_row(*map(Text, row))  # a string would be markup
    return Group(Text(head, no_wrap=True, overflow="ellipsis"), table)


def _number(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.3g}"


def _device(device: Mapping[str, float]) -> str:
    parts = [f"{device['utilization']:.0%}"] if "utilization" in device else []
    parts += [size(device["memory"])] if "memory" in device else []
    parts += [f"{device['celsius']:.0f} °C"] if "celsius" in device else []
    return " ".join(parts) or UNKNOWN


def no_key(seconds: float) -> str:
    """Wait, where there is no keyboard."""
    time.sleep(seconds)
    return ""


@contextmanager
def single_keys() -> Iterator[Callable[[float], str]]:
    """Read keys without Enter in this block. Yields a function that waits for one: its name, or "" after a time."""
    if not sys.stdin.isatty():
        yield no_key
        return
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def wait(seconds: float) -> str:
        ready, _, _ = select.select([descriptor], [], [], seconds)
        if not ready:
            return ""
        try:
            return os.read(descriptor, 1).decode(errors="replace") or END_OF_INPUT
        except OSError:  # the terminal is gone
            return END_OF_INPUT

    try:
        tty.setcbreak(descriptor)
        yield wait
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
