"""Connections that this process has refused: a line in its log, and an entry in the audit log of the run.

    door of a process --text--> REFUSALS --> log of the rank
                                         '-> membership --> rendezvous server --> launcher --> audit.jsonl

Under torchrun, srun and mpirun there is no audit log, so only the line is written.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

_log = logging.getLogger("unisono")


class Refusals:
    """The refusals of this process.

    Attributes:
        record: sends a refusal to the launcher; by default it does nothing.
    """

    def __init__(self) -> None:
        self.record: Callable[[str], None] = lambda text: None

    def __call__(self, text: str) -> None:
        """Report that a connection was refused. `text`: from where, and why."""
        _log.warning("%s", text)
        self.record(text)


REFUSALS = Refusals()
"""Those of this process."""
