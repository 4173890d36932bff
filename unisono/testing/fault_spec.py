"""Faults as text, for a command line: `FailAt step=2 phase=backward rank=1`.

Such a fault happens once in a run, however often its process is restarted: before it happens, it leaves a file.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from unisono.security.file_modes import make_folder
from unisono.testing import faults
from unisono.testing.faults import Fault, SlowAt

KINDS: dict[str, type[Fault | SlowAt]] = {
    kind.__name__: kind
    for kind in (
        faults.FailAt,
        faults.HangAt,
        faults.SlowAt,
        faults.BitFlip,
        faults.TornFile,
        faults.FullDisk,
        faults.LostPackets,
    )
}


def fault_of(text: str) -> tuple[Fault | SlowAt, int | None]:
    """Parse a fault, and return it with its rank, None for every process. Raises ValueError."""
    name, *words = shlex.split(text)
    if name not in KINDS:
        raise ValueError(f"there is no fault {name}; there are {', '.join(KINDS)}")
    given = {key: _value(value) for key, _, value in (word.partition("=") for word in words)}
    rank = given.pop("rank", None)
    try:
        return KINDS[name](**given), rank
    except TypeError as error:
        raise ValueError(f"{text}: {error}") from None


@contextmanager
def planted(texts: Sequence[str], rank: int, folder: Path) -> Iterator[None]:
    """Activate the faults for a rank that have not happened in this run before.

    Args:
        texts: the faults as text.
        rank: the rank of this process.
        folder: the folder for the files that they leave; it is created.
    """
    with ExitStack() as waiting:
        for number, text in enumerate(texts):
            fault, target = fault_of(text)
            mark = folder / f"fault-{number}-of-rank-{rank}"
            if target not in (None, rank) or mark.exists():
                continue
            if isinstance(fault, Fault):
                make_folder(folder)
                fault.mark = mark.touch
            waiting.enter_context(fault)
        yield


def _value(text: str) -> Any:
    """Parse 3, 0.5, inf or a word."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
