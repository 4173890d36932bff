"""The table: the small things of a step, one row a virtual rank, one writer a row, folded in order by everybody.

Loss sums, weights, and whatever the loop adds by name travel as float64 in one small all-reduce of rows that are zero
everywhere but at their writer, which no order of addition can change. Flags ride along as counts of processes.

It is also where a process is noticed that is elsewhere. Whatever all processes must do together (a step, an evaluation,
a checkpoint) begins or ends with a table of this one shape, in which everybody says what they are doing: a verb that
only some call is then an error everywhere, instead of a wait that never ends.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from unisono.distributed.process_group import ProcessGroup, wrap_peer_errors
from unisono.errors import LoopError
from unisono.plan.batch_order import MicroBatchId
from unisono.plan.reduction_tree import chain
from unisono.train.guarantees.rank_consistency import ModeCheck

FLAGS = (
    *("stop", "leave", "unused", "norms", "buffers", "attributes", "touched", "learns", "unsaved", "news", "joins"),
    "verified",
)
STEP = "a step"
VERBS = (
    STEP,
    "run.place",
    "run.first",
    "run.steps",
    "run.evaluate",
    "run.predict",
    "run.deal",
    "run.collectives",
    "a checkpoint",
    "a forward pass",
    "the script's end",
)
"""What a process may be doing when it meets the others."""

MODES = len(FLAGS) + len(VERBS)
KNOWN = MODES + 3
LOSS = "loss"


def _read(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.item() if value.is_cpu else value.detach().clone()


def _doing(verb: str) -> list[float]:
    assert verb in VERBS
    return [float(verb == other) for other in VERBS]


def _as_one_of_some(number: int | None) -> list[float]:
    """A number of 20 bits, or none. Of these the sums over all processes tell whether all numbers were the same: only
    then total * total is count * squares."""
    return [0.0, 0.0, 0.0] if number is None else [float(number), float(number * number), 1.0]


def _all_the_same(sums: Sequence[float]) -> bool:
    total, squares, count = (int(each) for each in sums)
    return total * total == count * squares


@dataclass
class Totals:
    """What the table adds up to: (sum, weight) by name, flags as numbers of processes, the rows of the loss, and what
    each process said of itself."""

    sums: dict[str, tuple[float, float]]
    flags: Mapping[str, int]
    losses: list[float]
    said: list[list[float]]


class StepSync:
    """The rows of one step at a time. The names of the columns are agreed on when they first appear, and remembered.

    pieces  how many rows a virtual rank has: as many as it has micro-batches, if several processes compute them, so
            that each row has one writer
    slices  the processes that share its sequences: each of these rows is one for each of them
    words   how many numbers each process says of itself in a step (how long it took, say)
    modes   of the models' layers, which must be the same on all processes that compute something in a step; None: they
            have not the same layers
    """

    pieces = 1
    words = 0
    modes: ModeCheck | None = None
    also: Callable[[str], None] | None = None
    """Who else is to be asked whether they are about to do the same: the other sites, if there are any."""

    def __init__(
        self, virtual_ranks: int, group: ProcessGroup, *, speaks: bool = True, slices: ProcessGroup | None = None
    ) -> None:
        """`speaks`: of the processes that see the same samples, is this the one whose rows count?"""
        self.virtual_ranks, self.group, self.speaks = virtual_ranks, group, speaks
        self.slices = slices or ProcessGroup()
        self.names: list[str] = [LOSS]
        self._entries: list[tuple[MicroBatchId, str, Any, Any]] = []
        self._last: list[tuple[MicroBatchId, str, Any, Any]] = []  # those that were summed up last

    def keep_partial(self, step: int, virtual_ranks: Collection[int]) -> None:
        """A step goes on after a death: what these virtual ranks added still counts, all else comes again."""
        known = self._entries or self._last
        self._entries = [e for e in known if e[0].step == step and e[0].virtual_rank in virtual_ranks]
        self._last = []

    def forget(self) -> None:
        """The step's pass is whole: nothing of it will be summed up again."""
        self._last = []

    def add(self, place: MicroBatchId, name: str, total: Any, weight: Any) -> None:
        """Add to the row of a micro-batch's virtual rank, unless it is a spare one: numbers, or tensors of one element.
        Those of an accelerator are read when the step meets (no sync); they may be changed until then (a running sum),
        so they are copied."""
        if not place.spare:
            self._entries.append((place, name, _read(total), _read(weight)))

    def weights(self, span: tuple[int, int]) -> torch.Tensor:
        """What the virtual ranks of a span weigh so far, float64 [hi - lo]: their losses' weights, in order."""
        row = torch.zeros(span[1] - span[0], dtype=torch.float64, device=self.group.device)
        for place, name, _, weight in self._entries:
            if name == LOSS:
                row[place.virtual_rank - span[0]] += weight
        return row

    def broadcast(self, line: ProcessGroup) -> None:
        """What one of those that see the same samples has added is what all of them have, in the order of places."""
        mine = [[place, name, float(total), float(weight)] for place, name, total, weight in self._entries]
        told = [entry for entries in line.all_gather_object(mine) for entry in entries]
        self._entries = [(MicroBatchId(*place), name, total, weight) for place, name, total, weight in told]
        self._entries.sort(key=lambda entry: entry[0])

    def reduce(self, flags: Mapping[str, bool], said: Sequence[float] = ()) -> Totals:
        """Add up everybody's rows. Every process must call it once a step. `said`: of this process, `words` numbers."""
        entries, self._entries = self._entries, []
        self._last = entries
        if self.virtual_ranks == 1 and len(entries) == 1 and self.group.size == 1:  # nothing to fold, nobody to ask
            _, name, total, weight = entries[0]
            alone = float(total)
            return Totals({name: (alone, float(weight))}, flags, [alone], [])
        rows: dict[str, list[list[float]]] = {}
        for place, name, total, weight in entries if self.speaks else ():
            row = rows.setdefault(name, [[0.0] * self._length, [0.0] * self._length])
            number = place.virtual_rank * self.pieces + place.number % self.pieces
            number = number * self.slices.size + self.slices.rank
            row[0][number] += float(total)
            row[1][number] += float(weight)
        news = any(name not in self.names for name in rows)
        told = [float({**flags, "news": news}.get(flag, False)) for flag in FLAGS] + _doing(STEP)
        modes = self.modes if self.group.size > 1 else None
        told += _as_one_of_some(modes.number() if modes is not None and entries else None) + self._of_us(said)
        columns, counts = self._sum(rows, told)
        self._check_together(STEP, counts)
        if modes is not None and not _all_the_same(counts[MODES:KNOWN]):
            modes.refuse(self.group, computed=bool(entries))
        if counts[FLAGS.index("news")]:
            everybody = self.group.all_gather_object(sorted(rows))
            known = {name for names in everybody for name in names} | set(self.names)
            self.names = [LOSS, *sorted(known - {LOSS})]
            columns, _ = self._sum(rows, told)
        sums = {name: (chain(total), chain(weight)) for name, (total, weight) in columns.items()}
        return Totals(
            {name: pair for name, pair in sums.items() if name == LOSS or pair[1] != 0},
            {flag: int(count) for flag, count in zip(FLAGS, counts, strict=False)},
            columns[LOSS][0],
            [counts[first : first + self.words] for first in range(KNOWN, len(counts), self.words or 1)],
        )

    def _of_us(self, said: Sequence[float] = ()) -> list[float]:
        """What every process says of itself, zeros but for ours."""
        row = [0.0] * (self.words * self.group.size)
        first = self.words * self.group.rank
        row[first : first + len(said)] = said
        return row

    @property
    def _length(self) -> int:
        return self.virtual_ranks * self._rows

    @property
    def _rows(self) -> int:
        return self.pieces * self.slices.size

    def _ranks(self, rows: list[float]) -> list[float]:
        """One number for each virtual rank: its rows from first to last."""
        if self._rows == 1:
            return rows
        return [chain(rows[first : first + self._rows]) for first in range(0, len(rows), self._rows)]

    def require_same_call(self, verb: str) -> None:
        """See that every process is about to do this, one of VERBS; raises LoopError on all of them if not."""
        if self.group.size > 1:
            with wrap_peer_errors(verb):
                _, counts = self._sum({}, [0.0] * len(FLAGS) + _doing(verb) + _as_one_of_some(None) + self._of_us())
            self._check_together(verb, counts)
        if self.also is not None:
            self.also(verb)

    def _check_together(self, verb: str, counts: list[float]) -> None:
        doing = {other: int(n) for other, n in zip(VERBS, counts[len(FLAGS) : MODES], strict=True) if n}
        if doing == {verb: self.group.size} or self.group.size == 1:
            return
        others = " and ".join(f"{n} at {other}" for other, n in doing.items())
        raise LoopError(
            f"Rank {self.group.rank} came to {verb}, which all {self.group.size} processes do together.",
            f"They are not in the same place: {others}.",
            "call the verbs of the run on every process, and only print or write files under `if run.is_main:`.",
        )

    def _sum(
        self, rows: Mapping[str, list[list[float]]], told: list[float]
    ) -> tuple[dict[str, list[list[float]]], list[float]]:
        v = self._length
        empty = [[0.0] * v, [0.0] * v]
        flat = [x for name in self.names for column in rows.get(name, empty) for x in column] + told
        if self.group.size > 1:
            flat = self.group.sum_(torch.tensor(flat, dtype=torch.float64, device=self.group.device)).tolist()
        cut = [flat[i : i + v] for i in range(0, 2 * v * len(self.names), v)]
        columns = {name: [self._ranks(cut[2 * i]), self._ranks(cut[2 * i + 1])] for i, name in enumerate(self.names)}
        return columns, flat[2 * v * len(self.names) :]
