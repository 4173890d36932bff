"""Where processes that our launcher has not started show each other where they stand: keys in the store they met in.

Each on a connection of its own (`clone`): the one of the main thread may be waiting for an answer.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from datetime import timedelta
from typing import Any

from unisono.env import World
from unisono.launch.places import Place, state_of

ANSWER = timedelta(seconds=2)
"""How long the store may take."""


class Board:
    """One process's view of all. `meet` shows where we stand and returns where everybody does."""

    def __init__(self, store: Any, world: World) -> None:
        self.store, self.world = store, world
        self._seen: dict[int, tuple[Place, float]] = {}  # the last word of each, and when we heard it

    def meet(self, mine: Place) -> list[Place]:
        """Everybody's place; who has not spoken for a while is silent. Nobody answers: only ours."""
        try:
            self.store.set(_key(mine.rank), mine.text())
            if mine.idle < mine.limit / 2:
                return [mine]  # nobody asks; what others do is not looked at
            for rank in range(self.world.size):
                if rank != mine.rank and self.store.check([_key(rank)]):
                    self._hear(Place.of(bytes(self.store.get(_key(rank)))))
        except (RuntimeError, ValueError, TypeError):
            return [replace(mine, waits="meeting")] if mine.waits == "others" else [mine]
        return sorted([mine, *self._others()], key=lambda place: place.rank)

    def _hear(self, place: Place) -> None:
        before = self._seen.get(place.rank)
        if before is None or before[0].written != place.written:
            self._seen[place.rank] = place, time.monotonic()

    def _others(self) -> list[Place]:
        found = []
        for place, heard in self._seen.values():
            silence = time.monotonic() - heard
            if silence > place.patience:
                here = place.host == self.world.host
                why = state_of(place.pid) if here else f"says nothing (host {place.host})"
                place = replace(place, idle=place.idle + silence, silent=why, waits="")
            found.append(place)
        return found


def _key(rank: int) -> str:
    return f"unisono-place-{rank}"


def board(world: World) -> Board | None:
    """The board of a group that has been joined; None: there is none (yet)."""
    torch = sys.modules.get("torch")
    if world.size == 1 or torch is None or not torch.distributed.is_initialized():
        return None
    store = torch.distributed.distributed_c10d._get_default_store().clone()
    store.set_timeout(ANSWER)
    return Board(store, world)
