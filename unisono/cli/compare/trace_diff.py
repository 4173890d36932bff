"""Two traces side by side: the first thing that differs, and why it probably does. Numbers and words only, no torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

KINDS = ("samples", "threads", "loss", "gradient", "total", "sum", "given", "update")
"""In the order in which one follows from the other, within a pass."""

NAMED = {
    "samples": "the samples",
    "threads": "the number of threads",
    "loss": "the loss",
    "gradient": "the gradient of {name}",
    "total": "the sum of all losses and weights",
    "sum": "the sum of the gradients of {name}",
    "given": "what the update was given as the gradient of {name}",
    "update": "what the update made of {name}",
}


class Key(NamedTuple):
    """Where something was noted; sorted as it happens."""

    step: int
    walk: int  # the pass
    kind: int  # in KINDS
    virtual_rank: int  # -1: of the step as a whole
    number: int
    order: int  # as the names of one place come
    name: str

    def __str__(self) -> str:
        what = NAMED[KINDS[self.kind]].format(name=self.name)
        of_pass = f", pass {self.walk}" if self.walk else ""
        at = f", virtual rank {self.virtual_rank}, micro-batch {self.number}" if self.virtual_rank >= 0 else ""
        return f"{what} in step {self.step}{of_pass}{at}"


class VerdictRequest(NamedTuple):
    """The script asked which process it is, or used a collective."""

    what: str
    where: str  # file:line
    in_rounds: bool


@dataclass(frozen=True)
class TraceFile:
    """What all processes of one run have noted."""

    values: Mapping[Key, frozenset[str]]
    asked: frozenset[VerdictRequest]
    remembers: Mapping[Key, str]
    """Micro-batches that a second fetch gave otherwise."""
    operators: frozenset[str]
    epoch: int = 0
    """Steps of one."""


def read(folder: Path) -> TraceFile:
    """The traces rank-N.jsonl of a folder."""
    values: dict[Key, set[str]] = {}
    asked, operators = set(), set()
    remembers, epoch = {}, 0
    for path in sorted(folder.glob("rank-*.jsonl")):
        names: dict[tuple[object, ...], int] = {}
        for text in path.read_text(encoding="utf-8").splitlines():
            kind, step, place, name, value = json.loads(text)
            walk, virtual_rank, number = [*place, -1, -1, -1][:3]
            if kind == "asked":
                asked.add(VerdictRequest(name, value, len(place) == 3))
            elif kind == "operator":
                operators.add(value)
            elif kind == "epoch":
                epoch = int(value)
            elif kind == "again":
                if value != "same":
                    remembers[Key(step, walk, 0, virtual_rank, number, 0, name)] = value
            else:
                here = (kind, step, *place)
                order = names[here] = names.get(here, -1) + 1
                key = Key(step, walk, KINDS.index(kind), virtual_rank, number, order, name)
                values.setdefault(key, set()).add(value)
    found = {key: frozenset(value) for key, value in values.items()}
    return TraceFile(found, frozenset(asked), remembers, frozenset(operators), epoch)


def first_difference(one: TraceFile, other: TraceFile) -> Key | None:
    """The first thing that is not the same in both, on every process that noted it; None: nothing."""
    for key in sorted({*one.values, *other.values}):
        a, b = one.values.get(key), other.values.get(key)
        if a != b or (a is not None and len(a) > 1):
            return key
    return None


class DifferenceCause(NamedTuple):
    """Why it probably differs: a short name, a sentence, and what to do."""

    name: str
    said: str
    do: str


def cause_of(first: Key, name: str, one: TraceFile, other: TraceFile, *, hashes: bool = False) -> DifferenceCause:
    """The likely cause of the first difference between a run on one process and another one.

    name    of the other run
    hashes  does nothing differ where Python's hashes are fixed?
    """
    kind, seen, by_chance = KINDS[first.kind], (one, other), name == AGAIN
    if kind == "samples":
        return _of_samples(seen, name, hashes=hashes)
    collective = _where(seen, lambda a: a.what.startswith("torch.distributed.") and a.what not in ASKING)
    # at the very first micro-batch there was nothing before it that could have left something behind
    anywhere = first[:5] == (0, 0, KINDS.index("loss"), 0, 0) or kind in ("given", "update")
    asking = _where(seen, lambda a: a.what in ASKING and (a.in_rounds or (anywhere and a.what != "run.is_main")))
    operators = sorted({name for traced in seen for name in traced.operators})
    if kind == "threads":
        counts = sorted({count for traced in seen for count in traced.values.get(first, ())})
        said = f"It is {' and '.join(counts)}, and bits depend on it."
        return DifferenceCause(
            "threads", said, "leave torch.set_num_threads alone; --set threads=N is the same everywhere."
        )
    if operators and by_chance:
        said = f"An operator without a deterministic kernel: {'; '.join(operators)}."
        return DifferenceCause("operator", said, "use another operator; two runs of one process differ already.")
    if by_chance:
        said = "Randomness that is not keyed: two runs of one process differ already, although their samples do not."
        do = "draw from torch, numpy or random as they are: no generator seeded by time, no os.urandom, no set's order."
        return DifferenceCause("unkeyed-loop", said, do)
    if collective:
        said = f"A collective of the script's own: {collective}. What it sums depends on how many processes there are."
        return DifferenceCause(
            "collective", said, "step.add(name, sum, weight) sums exactly; gradients are summed by the step."
        )
    if asking:
        said = f"The script asks which process it is: {asking}, and computes with the answer."
        return DifferenceCause(
            "asks-rank", said, "a result must not depend on rank or size; weights and means are the step's."
        )
    if kind == "sum":
        said = "The gradients of all virtual ranks agree, and their sum does not: it is added up in another order."
        return DifferenceCause("exchange", said, "--set exchange=tree")
    if kind == "gradient":
        said = "The losses agree, and the backward pass differs: a hook or an autograd function with state of its own."
        return DifferenceCause("backward", said, "let backward depend on its inputs only.")
    if kind in ("given", "update"):
        said = (
            "The sum agrees, and the script makes something else of it: an optimizer, a schedule or a change of p.grad "
            "that depends on the process, or on what earlier rounds left behind."
        )
        return DifferenceCause("own-update", said, "let it depend on p.grad, step.number and the settings only.")
    said = (
        "State outside the model: something that the rounds change (a counter, a running mean, a list, a generator of "
        "the script's own) goes from one micro-batch to the next, and each process has only its own micro-batches."
    )
    do = "keep it in step.add and step.mean, in a buffer of the model, or change it between two steps, and track it."
    return DifferenceCause("state", said, do)


AGAIN = "1 process, again"
WORKER = "1 process, the loader otherwise"
ASKING = ("run.rank", "run.size", "run.is_main", "torch.distributed.get_rank", "torch.distributed.get_world_size")


def _of_samples(seen: Sequence[TraceFile], name: str, *, hashes: bool) -> DifferenceCause:
    if hashes:
        said = (
            "The order of a set: Python's hash of a text differs from process to process, and the data depends on it."
        )
        return DifferenceCause("set-order", said, "sort it: sorted(set(words)).")
    if name == AGAIN:
        said = "Randomness that is not keyed, in the data: two runs of one process see other samples."
        do = "draw from torch, numpy or random as they are: no generator seeded by time, no os.urandom."
        return DifferenceCause("unkeyed-data", said, do)
    if name == WORKER:
        said = (
            "The data set depends on the worker that reads it: on its number or its process; or the script changes the "
            "set between steps, which workers, who have copies of it, never see."
        )
        do = "do not ask torch.utils.data.get_worker_info in it, and leave it as run.steps was given it."
        return DifferenceCause("data-worker", said, do)
    if any(traced.remembers for traced in seen):
        said = (
            "State in the data set: asked for the same samples twice, it gives others, so it depends on what it gave "
            "before (a generator of its own, a counter, a cache that is changed)."
        )
        return DifferenceCause(
            "data-state", said, "draw from torch, numpy or random as they are, which are seeded for each batch."
        )
    asking = _where(seen, lambda asked: asked.what in ASKING)
    where = f" ({asking})" if asking else ""
    said = f"The data set depends on the process{where}: the same samples are others elsewhere."
    return DifferenceCause(
        "data-process", said, "pass the whole set everywhere; each process gets its part by sample number."
    )


def _where(seen: Sequence[TraceFile], wanted: Callable[[VerdictRequest], bool]) -> str:
    """The first few places where the script asked for something."""
    found = sorted({(asked.what, asked.where) for traced in seen for asked in traced.asked if wanted(asked)})
    return ", ".join(f"{what} at {where}" for what, where in found[:3])
