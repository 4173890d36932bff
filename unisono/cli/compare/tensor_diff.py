"""How far what one placement computed is from what one process did: whole tensors, in float64, read one at a time.

    ||a - b|| / ||b||        of a loss, a gradient, its norm
    ||a - b|| / ||b - c||    of all weights together, which began at c, and of all buffers: of the way that they went

Two remarks on what float32 can show. Some gradients are sums that cancel: those of a bias before a batch norm, or of an
attention's keys, are zero but for rounding (5e-7 of the others, measured), and no digit of them is right anywhere. So a
tensor counts as no smaller than a tenth of what its size has of the whole gradient. And Adam makes a whole step even of
such a rest, so that some weights, and a batch norm's running mean behind them, differ by a whole step; therefore these
are measured all together (then it was 1e-2 of the way, where models without such weights had 1e-6), and a tenth of the
way is their limit. What an update does wrong shows in the next step's loss and gradients as well.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open

CANCELLED = 0.1
WAY = 0.1
BLOCK = 2**20
"""Elements that are made float64 at once: 8 MB of each of the two."""


class Limits(NamedTuple):
    """How large a relative error may be."""

    gradient: float = 1e-5
    loss: float = 1e-6
    weights: float = WAY

    @classmethod
    def of(cls, tolerance: float) -> Limits:
        return cls(tolerance, tolerance / 10)

    def __str__(self) -> str:
        return (
            f"gradients and their norm to {self.gradient:g}, losses to {self.loss:g}, "
            f"weights and buffers to {self.weights:g} of the way they went"
        )


class Deviation(NamedTuple):
    """Of one thing that was compared."""

    kind: str  # before, loss, gradient, norm, count, buffers, weights
    name: str
    step: int  # -1: of none
    walk: int  # the pass
    error: float
    limit: float
    equal: bool  # to the bit

    @property
    def is_beyond(self) -> bool:
        return not self.error <= self.limit

    def __str__(self) -> str:
        what = {
            "loss": "the loss",
            "gradient": f"the gradient of {self.name}",
            "norm": "the gradient's norm",
            "before": f"{self.name} before the first step",
            "count": f"the buffer {self.name} after the last step",
        }.get(self.kind, f"the {self.kind} after the last step{f' ({self.name})' * bool(self.name)}")
        of_pass = f", pass {self.walk}" if self.walk else ""
        return what + (f" in step {self.step}{of_pass}" if self.step >= 0 else "")


@dataclass(frozen=True)
class TensorAgreement:
    """All that was compared, in the order in which one follows from the other; gradients as backward makes them, the
    last layer's first."""

    errors: Sequence[Deviation]

    def worst(self, *kinds: str) -> Deviation | None:
        return max((e for e in self.errors if e.kind in kinds), key=lambda e: e.error, default=None)

    @property
    def first(self) -> Deviation | None:
        """The first thing that is beyond its limit."""
        return next((error for error in self.errors if error.is_beyond), None)

    @property
    def equal(self) -> bool:
        return all(error.equal for error in self.errors)


class DumpFile:
    """What one run has told (train/diagnostics/dump.py)."""

    def __init__(self, folder: Path) -> None:
        self.ranks: list[dict[str, Any]] = []
        self.files: dict[str, dict[str, list[Path | None]]] = {}
        """{part: {name: its file, or None where there is no such tensor}}; two, if two stretches hold it."""
        for path in sorted(folder.glob("rank-*.json"), key=lambda path: int(path.stem.removeprefix("rank-"))):
            told = json.loads(path.read_text(encoding="utf-8"))
            self.ranks.append(told)
            for part, names in told["written"].items():
                for number, (name, there) in enumerate(names):
                    file = path.with_suffix("") / part / f"{number}.safetensors"
                    self.files.setdefault(part, {}).setdefault(name, []).append(file if there else None)

    @property
    def main(self) -> dict[str, Any]:
        return self.ranks[0]

    @property
    def steps(self) -> list[str]:
        """The parts that hold gradients, in order."""
        return [part for part in self.main["written"] if part.startswith("step-")]

    def bytes(self, kind: str) -> int:
        """Of parameters, gradients or optimizer state, on the process that has most."""
        return max(told["bytes"][kind] for told in self.ranks)

    def part(self, rank: int, whole: DumpFile, kind: str = "parameters") -> float:
        """What this process's layers have of the elements of `whole`: 1, or less in a pipeline. What several stages use
        is in each."""
        of = "parameters" if kind == "parameters" else "trained"  # only these have a gradient, and a state
        elements: float = self.ranks[rank]["elements"][of]
        return elements / whole.main["elements"][of]

    def read(self, part: str, name: str) -> list[torch.Tensor | None]:
        return [_read(file) for file in self.files.get(part, {}).get(name, [])]


def _read(file: Path | None) -> torch.Tensor | None:
    if file is None:
        return None
    with safe_open(file, framework="pt") as tensors:
        (name,) = tensors.keys()
        tensor: torch.Tensor = tensors.get_tensor(name)
        return tensor


class DistanceOfRuns(NamedTuple):
    """||a - b|| and ||b||, and the number of elements."""

    apart: float
    norm: float
    elements: int
    equal: bool


def distance(a: torch.Tensor | None, b: torch.Tensor | None) -> DistanceOfRuns:
    """Of two whole tensors; None is one that is not there."""
    if a is None or b is None or a.shape != b.shape:
        same = a is None and b is None
        return DistanceOfRuns(0.0 if same else math.inf, 0.0, 0, same)
    one, other = a.reshape(-1), b.reshape(-1)
    apart = norm = 0.0
    for start in range(0, len(one), BLOCK):
        x, y = one[start : start + BLOCK].double(), other[start : start + BLOCK].double()
        apart += float((x - y).square().sum())
        norm += float(y.square().sum())
    equal = a.dtype == b.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    return DistanceOfRuns(0.0 if equal else math.sqrt(apart), math.sqrt(norm), len(one), equal)


def compare(run: DumpFile, truth: DumpFile, limits: Limits) -> TensorAgreement:
    """One run beside the one on one process."""
    return TensorAgreement(list(_errors(run, truth, limits)))


def _errors(run: DumpFile, truth: DumpFile, limits: Limits) -> Iterator[Deviation]:
    for part in ("weights-before", "buffers-before"):
        yield from _of_tensors("before", part, run, truth, limits.gradient)
    losses, norms = dict(run.main["losses"]), dict(run.main["norms"])
    true_losses, true_norms = dict(truth.main["losses"]), dict(truth.main["norms"])
    for part in truth.steps:
        yield _of_numbers("loss", part, losses, true_losses, limits.loss)
        yield from _of_tensors("gradient", part, run, truth, limits.gradient)
        if part in true_norms:
            yield _of_numbers("norm", part, norms, true_norms, limits.gradient)
    for kind in ("buffers", "weights"):
        yield from _of_state(kind, run, truth, limits.weights)


def _of_numbers(kind: str, part: str, run: Mapping[str, float], truth: Mapping[str, float], limit: float) -> Deviation:
    one, other = run.get(part, math.nan), truth[part]
    equal = repr(one) == repr(other)
    return Deviation(kind, "", *_place(part), 0.0 if equal else _ratio(abs(one - other), abs(other)), limit, equal)


def _of_tensors(kind: str, part: str, run: DumpFile, truth: DumpFile, limit: float) -> Iterator[Deviation]:
    """Of every tensor of a part, the last one first, as backward comes to them."""
    found: dict[str, list[DistanceOfRuns]] = {}
    for name in reversed(truth.files.get(part, {})):
        (true,) = truth.read(part, name)
        found[name] = [distance(mine, true) for mine in run.read(part, name) or [None]]
    elements = sum(each[0].elements for each in found.values())
    whole = math.sqrt(sum(each[0].norm ** 2 for each in found.values()))
    least = CANCELLED * whole / math.sqrt(max(elements, 1))
    for name, each in found.items():
        worst = max(_ratio(d.apart, max(d.norm, least * math.sqrt(d.elements))) for d in each)
        yield Deviation(kind, name, *_place(part), worst, limit, all(d.equal for d in each))


def _of_state(kind: str, run: DumpFile, truth: DumpFile, limit: float) -> Iterator[Deviation]:
    """Of all weights together, or all buffers, as a part of the way that they went; what counts is to be the same."""
    apart = way = 0.0
    equal, missing = True, ""
    before, after = f"{kind}-before", f"{kind}-after"
    for name in truth.files.get(after, {}):
        (end,), (start,) = truth.read(after, name), truth.read(before, name) or [None]
        found = [distance(mine, end) for mine in run.read(after, name) or [None]]
        same = all(each.equal for each in found)
        if end is not None and not end.is_floating_point():
            yield Deviation("count", name, -1, 0, max(_ratio(each.apart, each.norm) for each in found), 0.0, same)
            continue
        way += distance(end if start is None else start, end).apart ** 2
        apart += max(each.apart for each in found) ** 2
        missing = missing or name * any(math.isinf(each.apart) for each in found)
        equal &= same
    yield Deviation(kind, missing, -1, 0, _ratio(math.sqrt(apart), math.sqrt(way)), limit, equal)


def _ratio(apart: float, norm: float) -> float:
    if apart == 0.0:
        return 0.0
    ratio = apart / norm if norm else math.inf
    return math.inf if math.isnan(ratio) else ratio


def _place(part: str) -> tuple[int, int]:
    """The step and the pass of step-1-pass-2; (-1, 0) for what belongs to none."""
    words = part.split("-")
    return (int(words[1]), int(words[3]) if len(words) > 3 else 0) if words[0] == "step" else (-1, 0)
