"""Step sync: one small all-reduce for each step. One row for each virtual rank, one writer for each row, a fixed order.

Loss sums, weights, and values that the loop adds by name are sent as float64. A row is zero on all processes but its
writer, so no order of addition can change it. Flags are sent along as numbers of processes.

Step sync also detects that processes make different calls. Every operation of all processes (a step, an evaluation, a
checkpoint) begins or ends with an all-reduce of this one shape, in which each process reports its call. A verb that
only some ranks call is then an error on all of them, instead of an endless wait.
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
"""The calls that a process may make when it synchronizes with the others."""

MODES = len(FLAGS) + len(VERBS)
KNOWN = MODES + 3
LOSS = "loss"


def _read(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.item() if value.is_cpu else value.detach().clone()


def numbers_of(values: Sequence[Any]) -> list[float]:
    """Return numbers and tensors with one element as numbers. Copy tensors on an accelerator together."""
    away = [n for n, value in enumerate(values) if isinstance(value, torch.Tensor) and not value.is_cpu]
    found = dict.fromkeys(away, 0.0)
    for kind in {(values[n].dtype, values[n].device) for n in away}:
        alike = [n for n in away if (values[n].dtype, values[n].device) == kind]
        copied = torch.stack([values[n].detach().reshape(()) for n in alike]).tolist()
        found.update(zip(alike, map(float, copied), strict=True))
    return [found[n] if n in found else float(value) for n, value in enumerate(values)]


def _one_hot(verb: str) -> list[float]:
    assert verb in VERBS
    return [float(verb == other) for other in VERBS]


def _moments(number: int | None) -> list[float]:
    """Return sum, sum of squares and count of a number of 20 bits, or of none.

    The sums of these over processes show whether all numbers are equal: only then total * total is count * squares.
    """
    return [0.0, 0.0, 0.0] if number is None else [float(number), float(number * number), 1.0]


def _are_equal(moments: Sequence[float]) -> bool:
    total, squares, count = (int(each) for each in moments)
    return total * total == count * squares


@dataclass
class Totals:
    """The values on which the processes have agreed in a step.

    sums     (sum, weight) by name
    flags    for each flag, the number of processes that raised it
    losses   the loss of each virtual rank
    reports  the numbers that each process reported
    """

    sums: dict[str, tuple[float, float]]
    flags: Mapping[str, int]
    losses: list[float]
    reports: list[list[float]]


class StepSync:
    """Add up the rows of one step at a time. Processes agree on the names of columns once, when they first appear.

    pieces  rows of a virtual rank: as many as its micro-batches, if several processes compute them, so that each row
            has one writer
    slices  the processes that share its sequences: each row exists once for each of them
    modes   checks that the models' layers are in the same modes on all processes; None if their layers differ
    names   the names of the columns
    """

    pieces = 1
    modes: ModeCheck | None = None

    def __init__(
        self, virtual_ranks: int, group: ProcessGroup, *, speaks: bool = True, slices: ProcessGroup | None = None
    ) -> None:
        """`speaks`: whether this process's rows count, among those of the processes that compute the same samples."""
        self.virtual_ranks, self.group, self.speaks = virtual_ranks, group, speaks
        self.slices = slices or ProcessGroup()
        self.names: list[str] = [LOSS]
        self._numbers = 0  # length of the report of each process
        self._ask_others: Callable[[str], None] | None = None
        self._entries: list[tuple[MicroBatchId, str, Any, Any]] = []
        self._last: list[tuple[MicroBatchId, str, Any, Any]] = []  # the rows that were added up last

    # -- layout

    def configure(self, *, pieces: int = 1, modes: ModeCheck | None = None) -> None:
        """Set `pieces` and `modes` (see the class), which depend on the loop."""
        self.pieces, self.modes = pieces, modes

    def expect_reports(self, numbers: int) -> None:
        """Set the length of the report that each process sends in a step from now on."""
        self._numbers = numbers

    def switch_group(self, group: ProcessGroup, ask_others: Callable[[str], None] | None = None) -> None:
        """Let the processes of `group` run steps together from now on.

        Args:
            group: the processes.
            ask_others: checks that the processes outside of the group make the same call.
        """
        self.group, self._ask_others = group, ask_others

    # -- the rows of a step

    def add(self, place: MicroBatchId, name: str, total: Any, weight: Any) -> None:
        """Add values to the row of a micro-batch's virtual rank, unless it is a spare one.

        The values are numbers, or tensors of one element. Tensors of an accelerator are read when the step is reduced,
        without a synchronization here. They may change until then (a running sum), so they are copied.
        """
        if not place.spare:
            self._entries.append((place, name, _read(total), _read(weight)))

    def weights(self, span: tuple[int, int]) -> torch.Tensor:
        """Return the weights of the losses of a span's virtual ranks so far, float64 [hi - lo]."""
        row = torch.zeros(span[1] - span[0], dtype=torch.float64, device=self.group.device)
        for place, name, _, weight in self._entries:
            if name == LOSS:
                row[place.virtual_rank - span[0]] += weight
        return row

    def keep_partial(self, step: int, virtual_ranks: Collection[int]) -> None:
        """Keep the values of these virtual ranks, when a step continues after a death. All others are added again."""
        known = self._entries or self._last
        self._entries = [e for e in known if e[0].step == step and e[0].virtual_rank in virtual_ranks]
        self._last = []

    def forget(self) -> None:
        """Forget the rows of a complete pass: they will not be added up again."""
        self._last = []

    def broadcast(self, line: ProcessGroup) -> None:
        """Send the values of each process to all that compute the same samples, in the order of micro-batches."""
        mine = [[place, name, float(total), float(weight)] for place, name, total, weight in self._entries]
        found = [entry for entries in line.all_gather_object(mine) for entry in entries]
        self._entries = [(MicroBatchId(*place), name, total, weight) for place, name, total, weight in found]
        self._entries.sort(key=lambda entry: entry[0])

    def reduce(self, flags: Mapping[str, bool], report: Sequence[float] = ()) -> Totals:
        """Add up the rows of all processes. Every process calls this once a pass.

        Args:
            flags: the flags of this process, by names of FLAGS.
            report: numbers of this process, as many as `expect_reports` set, or none.
        """
        entries, self._entries = self._entries, []
        self._last = entries
        if self.virtual_ranks == 1 and len(entries) == 1 and self.group.size == 1:  # no rows to add up
            _, name, total, weight = entries[0]
            alone = float(total)
            return Totals({name: (alone, float(weight))}, flags, [alone], [])
        rows = self._rows_of(entries) if self.speaks else {}
        news = any(name not in self.names for name in rows)
        more = [float({**flags, "news": news}.get(flag, False)) for flag in FLAGS] + _one_hot(STEP)
        modes = self.modes if self.group.size > 1 else None
        more += _moments(modes.number() if modes is not None and entries else None) + self._own_slots(report)
        columns, counts = self._sum(rows, more)
        self._check_same_verb(STEP, counts)
        if modes is not None and not _are_equal(counts[MODES:KNOWN]):
            modes.refuse(self.group, computed=bool(entries))
        if counts[FLAGS.index("news")]:
            by_rank = self.group.all_gather_object(sorted(rows))
            known = {name for names in by_rank for name in names} | set(self.names)
            self.names = [LOSS, *sorted(known - {LOSS})]
            columns, _ = self._sum(rows, more)
        sums = {name: (chain(total), chain(weight)) for name, (total, weight) in columns.items()}
        return Totals(
            {name: pair for name, pair in sums.items() if name == LOSS or pair[1] != 0},
            {flag: int(count) for flag, count in zip(FLAGS, counts, strict=False)},
            columns[LOSS][0],
            [counts[first : first + self._numbers] for first in range(KNOWN, len(counts), self._numbers or 1)],
        )

    def _rows_of(self, entries: Sequence[tuple[MicroBatchId, str, Any, Any]]) -> dict[str, list[list[float]]]:
        rows: dict[str, list[list[float]]] = {}
        totals, weights = (numbers_of([entry[column] for entry in entries]) for column in (2, 3))
        for (place, name, _, _), total, weight in zip(entries, totals, weights, strict=True):
            row = rows.setdefault(name, [[0.0] * self._length, [0.0] * self._length])
            number = place.virtual_rank * self.pieces + place.number % self.pieces
            number = number * self.slices.size + self.slices.rank
            row[0][number] += total
            row[1][number] += weight
        return rows

    def _own_slots(self, report: Sequence[float] = ()) -> list[float]:
        """Return slots for the reports of all processes, zero but for the slot of this process."""
        row = [0.0] * (self._numbers * self.group.size)
        first = self._numbers * self.group.rank
        row[first : first + len(report)] = report
        return row

    @property
    def _length(self) -> int:
        return self.virtual_ranks * self._rows_a_rank

    @property
    def _rows_a_rank(self) -> int:
        return self.pieces * self.slices.size

    def _by_rank(self, rows: list[float]) -> list[float]:
        """Return one number for each virtual rank: the sum of its rows, from first to last."""
        count = self._rows_a_rank
        return rows if count == 1 else [chain(rows[first : first + count]) for first in range(0, len(rows), count)]

    # -- agreement on calls

    def require_same_call(self, verb: str) -> None:
        """Check that every process makes this call, one of VERBS. Raise LoopError on all processes if not."""
        if self.group.size > 1:
            with wrap_peer_errors(verb):
                _, counts = self._sum({}, [0.0] * len(FLAGS) + _one_hot(verb) + _moments(None) + self._own_slots())
            self._check_same_verb(verb, counts)
        if self._ask_others is not None:
            self._ask_others(verb)

    def _check_same_verb(self, verb: str, counts: list[float]) -> None:
        found = {other: int(n) for other, n in zip(VERBS, counts[len(FLAGS) : MODES], strict=True) if n}
        if found == {verb: self.group.size} or self.group.size == 1:
            return
        others = " and ".join(f"{n} at {other}" for other, n in found.items())
        raise LoopError(
            f"Rank {self.group.rank} came to {verb}, which all {self.group.size} processes do together.",
            f"They are not in the same place: {others}.",
            "call the verbs of the run on every process, and only print or write files under `if run.is_main:`.",
        )

    def _sum(
        self, rows: Mapping[str, list[list[float]]], more: list[float]
    ) -> tuple[dict[str, list[list[float]]], list[float]]:
        v = self._length
        empty = [[0.0] * v, [0.0] * v]
        flat = [x for name in self.names for column in rows.get(name, empty) for x in column] + more
        if self.group.size > 1:
            flat = self.group.sum_(torch.tensor(flat, dtype=torch.float64, device=self.group.device)).tolist()
        cut = [flat[i : i + v] for i in range(0, 2 * v * len(self.names), v)]
        columns = {
            name: [self._by_rank(cut[2 * i]), self._by_rank(cut[2 * i + 1])] for i, name in enumerate(self.names)
        }
        return columns, flat[2 * v * len(self.names) :]
