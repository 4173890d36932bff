"""Compare two traces: find the first difference and its likely cause. This module needs no torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

KINDS = ("samples", "threads", "loss", "gradient", "total", "sum", "given", "update")
"""Kinds of recorded values within a pass, each after those that it depends on."""

DESCRIPTIONS = {
    "samples": "the samples",
    "threads": "the number of threads",
    "loss": "the loss",
    "gradient": "the gradient of {name}",
    "total": "the sum of all losses and weights",
    "sum": "the sum of the gradients of {name}",
    "given": "the gradient of {name} that the update got",
    "update": "{name} after the update",
}


class Key(NamedTuple):
    """The place of a recorded value. Keys sort in the order of execution.

    Args:
        step: the step.
        walk: the pass.
        kind: an index into `KINDS`.
        virtual_rank: the virtual rank; -1 for a value of the whole step.
        number: the micro-batch.
        order: the position among the values of the same kind and micro-batch.
        name: the parameter or buffer.
    """

    step: int
    walk: int
    kind: int
    virtual_rank: int
    number: int
    order: int
    name: str

    def __str__(self) -> str:
        what = DESCRIPTIONS[KINDS[self.kind]].format(name=self.name)
        of_pass = f", pass {self.walk}" if self.walk else ""
        at = f", virtual rank {self.virtual_rank}, micro-batch {self.number}" if self.virtual_rank >= 0 else ""
        return f"{what} in step {self.step}{of_pass}{at}"


class RankQuery(NamedTuple):
    """A read of the rank or the number of processes by the script, or a collective of its own.

    Args:
        what: the attribute or function, as in run.rank.
        where: file and line.
        in_rounds: whether it happened while a micro-batch was computed.
    """

    what: str
    where: str
    in_rounds: bool


@dataclass(frozen=True)
class TraceFile:
    """The recordings of all processes of one run.

    Attributes:
        values: hashes and numbers by place; more than one if processes disagree.
        queries: reads of the rank, and collectives of the script.
        refetched: micro-batches that were different when they were fetched a second time.
        operators: operators without a deterministic implementation.
        epoch: the number of steps of an epoch.
    """

    values: Mapping[Key, frozenset[str]]
    queries: frozenset[RankQuery]
    refetched: Mapping[Key, str]
    operators: frozenset[str]
    epoch: int = 0


def read(folder: Path) -> TraceFile:
    """Read the traces rank-N.jsonl of a folder."""
    values: dict[Key, set[str]] = {}
    queries, operators = set(), set()
    refetched, epoch = {}, 0
    for path in sorted(folder.glob("rank-*.jsonl")):
        names: dict[tuple[object, ...], int] = {}
        for text in path.read_text(encoding="utf-8").splitlines():
            kind, step, place, name, value = json.loads(text)
            walk, virtual_rank, number = [*place, -1, -1, -1][:3]
            if kind == "asked":
                queries.add(RankQuery(name, value, len(place) == 3))
            elif kind == "operator":
                operators.add(value)
            elif kind == "epoch":
                epoch = int(value)
            elif kind == "again":
                if value != "same":
                    refetched[Key(step, walk, 0, virtual_rank, number, 0, name)] = value
            else:
                here = (kind, step, *place)
                order = names[here] = names.get(here, -1) + 1
                key = Key(step, walk, KINDS.index(kind), virtual_rank, number, order, name)
                values.setdefault(key, set()).add(value)
    found = {key: frozenset(value) for key, value in values.items()}
    return TraceFile(found, frozenset(queries), refetched, frozenset(operators), epoch)


def first_difference(one: TraceFile, other: TraceFile) -> Key | None:
    """Return the first place at which the traces, or processes within one of them, differ; None if there is none."""
    for key in sorted({*one.values, *other.values}):
        a, b = one.values.get(key), other.values.get(key)
        if a != b or (a is not None and len(a) > 1):
            return key
    return None


class DifferenceCause(NamedTuple):
    """A likely cause of a difference: a short name, the facts, and what to do."""

    name: str
    facts: str
    remedy: str


def cause_of(first: Key, name: str, one: TraceFile, other: TraceFile, *, hashes: bool = False) -> DifferenceCause:
    """Return the likely cause of the first difference between a run on one process and another run.

    Args:
        first: the first difference.
        name: the name of the other run.
        one: the run on one process.
        other: the other run.
        hashes: whether nothing differs if PYTHONHASHSEED is fixed.
    """
    kind, traces, repeated = KINDS[first.kind], (one, other), name == REPEATED
    if kind == "samples":
        return _cause_in_data(traces, name, hashes=hashes)
    collective = _where(traces, lambda q: q.what.startswith("torch.distributed.") and q.what not in RANK_READS)
    # before the very first micro-batch nothing has happened that could have left state behind
    anywhere = first[:5] == (0, 0, KINDS.index("loss"), 0, 0) or kind in ("given", "update")
    reads = _where(traces, lambda q: q.what in RANK_READS and (q.in_rounds or (anywhere and q.what != "run.is_main")))
    operators = sorted({name for trace in traces for name in trace.operators})
    if kind == "threads":
        counts = sorted({count for trace in traces for count in trace.values.get(first, ())})
        facts = f"torch uses {' and '.join(counts)} threads, and bits depend on the number."
        do = "remove torch.set_num_threads from the script, or use --set threads=N, which applies to all processes."
        return DifferenceCause("threads", facts, do)
    if operators and repeated:
        facts = f"An operator has no deterministic implementation: {'; '.join(operators)}."
        return DifferenceCause("operator", facts, "use another operator; two runs of one process differ already.")
    if repeated:
        facts = "Unseeded randomness in the loop: two runs of one process differ, although their samples are equal."
        do = "draw from torch, numpy or random without a generator of your own, and avoid os.urandom and sets' order."
        return DifferenceCause("unkeyed-loop", facts, do)
    if collective:
        facts = f"The script calls a collective itself: {collective}. Its result depends on the number of processes."
        do = "use step.add(name, sum, weight), which sums exactly; the step sums gradients itself."
        return DifferenceCause("collective", facts, do)
    if reads:
        facts = f"The script computes with the rank or the number of processes: {reads}."
        do = "make results independent of rank and size; the step divides by the total weight."
        return DifferenceCause("asks-rank", facts, do)
    if kind == "sum":
        facts = "The gradients of all virtual ranks agree, but their sum does not: the order of additions differs."
        return DifferenceCause("exchange", facts, "--set exchange=tree")
    if kind == "gradient":
        facts = "The losses agree, but the backward pass does not: a hook or an autograd function keeps state."
        return DifferenceCause("backward", facts, "make backward depend on its inputs only.")
    if kind in ("given", "update"):
        facts = (
            "The summed gradients agree, but the update does not: an optimizer, a schedule or a change of p.grad "
            "depends on the process, or on state that earlier micro-batches changed."
        )
        return DifferenceCause("own-update", facts, "make it depend on p.grad, step.number and the settings only.")
    facts = (
        "State outside the model: micro-batches change something (a counter, a running mean, a list, a generator of "
        "the script), and each process sees only its own micro-batches."
    )
    do = "keep it in step.add and step.mean, or in a buffer of the model, or change it between steps and track it."
    return DifferenceCause("state", facts, do)


REPEATED = "1 process, again"
OTHER_LOADER = "1 process, other loader workers"
RANK_READS = ("run.rank", "run.size", "run.is_main", "torch.distributed.get_rank", "torch.distributed.get_world_size")


def _cause_in_data(traces: Sequence[TraceFile], name: str, *, hashes: bool) -> DifferenceCause:
    """Return the likely cause if samples differ."""
    if hashes:
        facts = (
            "The data depends on the order of a set of strings, and Python's string hashes differ between processes."
        )
        return DifferenceCause("set-order", facts, "sort it: sorted(set(words)).")
    if name == REPEATED:
        facts = "Unseeded randomness in the data: two runs of one process see different samples."
        do = "draw from torch, numpy or random without a generator of your own, and avoid os.urandom."
        return DifferenceCause("unkeyed-data", facts, do)
    if name == OTHER_LOADER:
        facts = (
            "The data set depends on the loader worker that reads it; or the script changes it between steps, and "
            "workers, which have copies of it, do not see the change."
        )
        do = "remove torch.utils.data.get_worker_info from it, and do not change it after run.steps."
        return DifferenceCause("data-worker", facts, do)
    if any(trace.refetched for trace in traces):
        facts = (
            "The data set keeps state: it returns other samples for the same indices when it is read a second time "
            "(a generator of its own, a counter, a cache that is changed)."
        )
        do = "draw from torch, numpy or random without a generator of your own; they are seeded for each micro-batch."
        return DifferenceCause("data-state", facts, do)
    reads = _where(traces, lambda query: query.what in RANK_READS)
    facts = f"The data set depends on the process{f' ({reads})' if reads else ''}: samples differ between processes."
    do = "pass the whole data set on every process; each process reads its part by sample number."
    return DifferenceCause("data-process", facts, do)


def _where(traces: Sequence[TraceFile], wanted: Callable[[RankQuery], bool]) -> str:
    """Return the first few places of such queries."""
    found = sorted({(query.what, query.where) for trace in traces for query in trace.queries if wanted(query)})
    return ", ".join(f"{what} at {where}" for what, where in found[:3])
