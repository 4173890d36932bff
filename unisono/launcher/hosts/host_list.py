"""The hosts of a run, as the user lists them: `a:4,b:4`, or a file with a host on each line."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from unisono.errors import SettingsError

THIS_HOST = ("localhost", "127.0.0.1", "::1")

FORMS = "a:4,b:4 (4 processes on each), a,b (as many on each), or a file with a host on each line (b slots=4)"


class ListedHost(NamedTuple):
    """A host of the list.

    Attributes:
        name: the name, or alias, for ssh; it may have a user (me@a).
        slots: the number of processes that it runs at most; 0: not given.
        is_here: whether this is the host of the launcher.
    """

    name: str
    slots: int = 0
    is_here: bool = False


def parse_hosts(text: str) -> list[ListedHost]:
    """Return the hosts of `--hosts TEXT`, in order.

    Raises:
        SettingsError: an entry has no name, a wrong number of slots, or appears twice.
    """
    file = Path(text)
    entries = _lines_of(file) if file.is_file() else [entry for entry in text.split(",") if entry.strip()]
    if not entries:
        raise _error(text, f"{'The file' if file.is_file() else 'The list'} has no host.")
    hosts = [_parse(entry.strip(), text) for entry in entries]
    names = [host.name for host in hosts]
    for name in names:
        if names.count(name) > 1:
            raise _error(text, f"The host {name} is listed {names.count(name)} times.")
    return hosts


def assign_slots(hosts: Sequence[ListedHost], ranks: int) -> list[ListedHost]:
    """Return the hosts with a number of slots each, so that together they have room for `ranks` processes.

    Hosts without a number share evenly what the others leave.

    Raises:
        SettingsError: there is not enough room.
    """
    open_ = [host for host in hosts if not host.slots]
    left = ranks - sum(host.slots for host in hosts)
    if left > 0 and not open_:
        room = ranks - left
        raise SettingsError(
            f"--ranks {ranks} is more than the hosts have room for.",
            f"{', '.join(f'{host.name}:{host.slots}' for host in hosts)} have {room} slots.",
            f"--ranks {room}, or more slots in --hosts",
        )
    share = iter(
        [max(1, (number + 1) * left // len(open_) - number * left // len(open_)) for number in range(len(open_))]
    )
    return [host if host.slots else host._replace(slots=next(share)) for host in hosts]


def _parse(entry: str, text: str) -> ListedHost:
    bracketed = re.fullmatch(r"\[([^\]]+)\](?::(\d+))?", entry)  # [fd00::1]:4
    if bracketed:
        name, slots = bracketed[1], bracketed[2]
    elif entry.count(":") > 1:  # an IPv6 address
        name, slots = entry, None
    else:
        name, colon, slots = entry.partition(":")
        slots = slots if colon else None
    if not re.fullmatch(r"[\w.@:%-]+", name) or name.startswith("-"):
        raise _error(text, f"{name or entry} is no name of a host.")
    if slots is not None and not (slots.isdecimal() and int(slots) > 0):
        raise _error(text, f"{name} has {slots or 'no'} slots; it needs a whole number of at least 1.")
    return ListedHost(name, int(slots or 0), name in (*THIS_HOST, socket.gethostname()))


def _lines_of(file: Path) -> list[str]:
    """Return the entries of a host file, with `slots=4` (Open MPI, DeepSpeed) or `:4` (MPICH) after a name."""
    found = []
    for line in file.read_text(encoding="utf-8").splitlines():
        name, *more = line.partition("#")[0].split(maxsplit=1) or [""]
        slots = re.search(r"(?:^|\s)slots\s*=\s*(\w+)", "".join(more))
        found += [f"{name}:{slots[1]}" if slots else name] if name else []
    return found


def _error(text: str, facts: str) -> SettingsError:
    return SettingsError(f"Invalid value for --hosts: {text}", facts, FORMS)
