"""Read and check the variables of an engine. An error names the variable, and what to type."""

from __future__ import annotations

from dataclasses import dataclass

from unisono.environment.addresses import PORTS
from unisono.environment.process_variables import variables
from unisono.environment.restart_count import restart_count
from unisono.environment.terminal import draws_live_lines
from unisono.environment.world import World
from unisono.errors import WorldError


@dataclass(frozen=True)
class RankVariables:
    """Variables of an engine, with the first line and the remedy of errors about them.

    Attributes:
        headline: the first line of an error.
        remedy: what to type instead.
    """

    headline: str
    remedy: str

    def error(self, facts: str, remedy: str | None = None) -> WorldError:
        """Return an exception with these facts, to raise."""
        return WorldError(self.headline, facts, remedy or self.remedy)

    def has(self, name: str) -> bool:
        """Return whether a variable is set."""
        return name in variables((name,))

    def text(self, name: str) -> str:
        """Return a variable; "" if it is not set."""
        return variables((name,)).get(name, "")

    def require(self, *names: str) -> None:
        """Raise WorldError if some of these variables are not set."""
        if missing := [name for name in names if not self.has(name)]:
            raise self.error(not_set(missing))

    def number(self, name: str) -> int:
        """Return a variable as a number from 0. Raises WorldError if it is none."""
        text = self.text(name)
        if not text.isdecimal():
            raise self.error(f"{name} is {text!r}, which is not a non-negative integer.")
        return int(text)

    def port(self) -> int:
        """Return MASTER_PORT, which may be written by hand. Raises WorldError if it is not a port."""
        by_hand = RankVariables(self.headline, f"export MASTER_PORT={PORTS[0]} (any port from 1 to 65535 that is free)")
        port = by_hand.number("MASTER_PORT")
        if not 0 < port < 1 << 16:
            raise by_hand.error(f"MASTER_PORT is {port}; ports are numbers from 1 to 65535.")
        return port

    def world(self, launcher: str, rank: int, size: int, local_rank: int, local_size: int, store: str) -> World:
        """Return the World with these numbers.

        Raises:
            WorldError: ranks contradict sizes. Other processes would wait in vain.
        """
        if rank >= size or local_rank >= local_size or local_size > size:
            place = f"local rank {local_rank} of {local_size} on this host"
            raise self.error(f"Rank {rank} of {size} is impossible with {place}.")
        return World(
            rank=rank,
            size=size,
            local_rank=local_rank,
            local_size=local_size,
            store=store,
            launcher=launcher,
            restarts=restart_count(),
            terminal=rank == 0 and draws_live_lines(),
        )


def not_set(names: list[str]) -> str:
    """Return a sentence which says that these variables are missing."""
    return f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} not set."
