"""Faults in words, for a command line: `FailAt step=2 phase=backward rank=1`.

A fault that was planned so strikes once in a run, however often its process is started again: it leaves a mark in a
folder before it strikes.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

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
    """The fault that these words name, and the rank that it is for (None: every process). Raises ValueError."""
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
    """A block in which these faults wait for their place, those for `rank` that have not struck in this run before.

    folder  where they leave their marks; it is made
    """
    with ExitStack() as waiting:
        for number, text in enumerate(texts):
            fault, meant = fault_of(text)
            mark = folder / f"fault-{number}-of-rank-{rank}"
            if meant not in (None, rank) or mark.exists():
                continue
            if isinstance(fault, Fault):
                folder.mkdir(parents=True, exist_ok=True)
                fault.mark = mark.touch
            waiting.enter_context(fault)
        yield


def _value(text: str) -> Any:
    """3, 0.5, inf or a word."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
