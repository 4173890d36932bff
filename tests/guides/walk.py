"""Walk through a page: write its files, type its commands in their order, and look at what they print."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path

from tests.guides.not_run import why_not
from tests.guides.page_commands import Command, commands, files
from tests.guides.page_needs import BEFORE, LATER, PACKAGES, RECIPES, STATUS, UNQUOTED, files_for, typed
from tests.guides.quotes import Quotes
from tests.guides.shell import PATIENCE_SECONDS, Shell, write_programs

PROGRAMS = ".programs"
"""The folder, beside the files of a page, that comes first on the path."""


@dataclass
class Typed:
    """What a command did."""

    command: Command
    status: int
    output: str
    seconds: float


@dataclass
class Walk:
    """The commands of a page that were typed, those that need a package, and what is wrong."""

    page: str
    typed: list[Typed] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def runnable(page: str) -> list[Command]:
    """Return the commands of a page that a walk types."""
    return [command for command in commands(page) if why_not(command) is None]


def walk(page: str, folder: Path, prefixes: Mapping[str, list[str]] | None = None) -> Walk:
    """Type the commands of a page.

    Args:
        page: the path of the page, from the root of the project.
        folder: where they are typed; it gets the files of the page, and those that the page presupposes.
        prefixes: words that start a program on a host, by its name; "" is where commands without a host are typed.
    """
    for name, text in {**files_for(page), **files(page)}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    programs = folder / PROGRAMS
    write_programs(programs, RECIPES)
    found, quotes = Walk(page), Quotes()
    with ExitStack() as stack:
        shells: dict[str, Shell] = {}
        for host, prefix in (prefixes or {"": []}).items():
            shells[host] = Shell(folder, programs, prefix)
            stack.callback(shells[host].close)
        for text in BEFORE.get(page, ()):
            status, output = shells[""].run(text)
            assert status == 0, f"{text}: {output}"
        here = [command for command in runnable(page) if not _lacks(command, found)]
        for (_, meets), group in groupby(here, key=lambda c: (c.block, "--node " in c.text)):
            for together in [list(group)] if meets else [[command] for command in group]:
                _type(together, shells, folder, found, quotes)
    return found


def _lacks(command: Command, found: Walk) -> bool:
    package = PACKAGES.get((command.page, command.text))
    if package is None or find_spec(package) is not None:
        return False
    found.left_out.append(f"{command.text} needs {package}")
    return True


def _type(together: list[Command], shells: Mapping[str, Shell], folder: Path, found: Walk, quotes: Quotes) -> None:
    for command in together:
        if not _wait_for(command, folder):
            found.problems.append(f"{command.place}: {LATER[command.page, command.text]} does not appear")
            return
        shells[command.host].start(typed(command))
    for command in together:
        began = time.monotonic()
        status, output = shells[command.host].finish()
        found.typed.append(Typed(command, status, output, time.monotonic() - began))
        wanted = STATUS.get((command.page, command.text), (0,))
        if status not in wanted:
            found.problems.append(f"{command.place}: {command.text}\n  status {status} in place of {wanted}:\n{output}")
        elif (command.page, command.text) not in UNQUOTED and (line := quotes.missing(command.quoted, output)):
            found.problems.append(f"{command.place}: {command.text}\n  does not print: {line}\n  it prints:\n{output}")


def _wait_for(command: Command, folder: Path) -> bool:
    """Wait until the file is there at which the page's reader would type this command; return whether it is."""
    name = LATER.get((command.page, command.text))
    until = time.monotonic() + PATIENCE_SECONDS
    while name is not None and not any(folder.glob(name)):
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True
