"""Relative errors between the tensors of one placement and those of one process, in float64, one tensor at a time.

    ||a - b|| / ||b||        for a loss, a gradient, and the norm of all gradients
    ||a - b|| / ||b - c||    for all weights together, which started at c, and for all buffers: relative to their change

Two limits of float32 matter. Some gradients are sums that cancel: those of a bias before a batch norm, or of the keys
of an attention, are zero but for rounding (5e-7 of the others, measured), and none of their digits is correct anywhere.
So the norm of a tensor counts as at least a tenth of its share of the whole gradient, by number of elements. And Adam
turns such a remainder into a full step, so that some weights, and the running mean of a batch norm after them, differ
by a full step. Therefore weights are compared all together (the error was then 1e-2 of their change; models without
such weights had 1e-6), with a tenth of their change as the limit. An error in an update also shows in the next step's
loss and gradients.
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

SMALLEST_NORM = 0.1
WEIGHTS_LIMIT = 0.1
BLOCK = 2**20
"""Elements that are converted to float64 at once: 8 MB of each tensor."""


class Limits(NamedTuple):
    """The largest allowed relative errors."""

    gradient: float = 1e-5
    loss: float = 1e-6
    weights: float = WEIGHTS_LIMIT

    @classmethod
    def of(cls, tolerance: float) -> Limits:
        return cls(tolerance, tolerance / 10)

    def __str__(self) -> str:
        return (
            f"gradients and their norm to {self.gradient:g}, losses to {self.loss:g}, "
            f"weights and buffers to {self.weights:g} of their change"
        )


class Deviation(NamedTuple):
    """The error of one value.

    Args:
        kind: before, loss, gradient, norm, count, buffers or weights.
        name: the tensor; "" for values without a name.
        step: the step; -1 for values of no step.
        walk: the pass.
        error: the relative error.
        limit: the largest allowed error.
        equal: whether it is equal to the bit.
    """

    kind: str
    name: str
    step: int
    walk: int
    error: float
    limit: float
    equal: bool

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
    """All errors, each after those of values that it depends on. Gradients of the last layer come first."""

    errors: Sequence[Deviation]

    def worst(self, *kinds: str) -> Deviation | None:
        return max((e for e in self.errors if e.kind in kinds), key=lambda e: e.error, default=None)

    @property
    def first(self) -> Deviation | None:
        """The first value whose error exceeds its limit."""
        return next((error for error in self.errors if error.is_beyond), None)

    @property
    def equal(self) -> bool:
        return all(error.equal for error in self.errors)


class DumpFile:
    """The tensors of one run (train/diagnostics/dump.py)."""

    def __init__(self, folder: Path) -> None:
        self.ranks: list[dict[str, Any]] = []
        self.files: dict[str, dict[str, list[Path | None]]] = {}
        """{part: {name: files}}; None for a tensor that does not exist, and two files if two stages hold it."""
        for path in sorted(folder.glob("rank-*.json"), key=lambda path: int(path.stem.removeprefix("rank-"))):
            record = json.loads(path.read_text(encoding="utf-8"))
            self.ranks.append(record)
            for part, names in record["written"].items():
                for number, (name, there) in enumerate(names):
                    file = path.with_suffix("") / part / f"{number}.safetensors"
                    self.files.setdefault(part, {}).setdefault(name, []).append(file if there else None)

    @property
    def main(self) -> dict[str, Any]:
        return self.ranks[0]

    @property
    def steps(self) -> list[str]:
        """The parts that contain gradients, in order."""
        return [part for part in self.main["written"] if part.startswith("step-")]

    def bytes(self, kind: str) -> int:
        """Return the bytes of parameters, gradients or optimizer state on the process that has most."""
        return max(record["bytes"][kind] for record in self.ranks)

    def part(self, rank: int, whole: DumpFile, kind: str = "parameters") -> float:
        """Return the fraction of the elements of `whole` in the layers of a process: 1, or less in a pipeline.

        Parameters that several stages use count in each of them.
        """
        of = "parameters" if kind == "parameters" else "trained"  # only these have gradients and optimizer state
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


class Distance(NamedTuple):
    """||a - b||, ||b||, the number of elements, and whether a and b are equal to the bit."""

    apart: float
    norm: float
    elements: int
    equal: bool


def distance(a: torch.Tensor | None, b: torch.Tensor | None) -> Distance:
    """Return the distance of two whole tensors. None is a tensor that does not exist."""
    if a is None or b is None or a.shape != b.shape:
        same = a is None and b is None
        return Distance(0.0 if same else math.inf, 0.0, 0, same)
    one, other = a.reshape(-1), b.reshape(-1)
    apart = norm = 0.0
    for start in range(0, len(one), BLOCK):
        x, y = one[start : start + BLOCK].double(), other[start : start + BLOCK].double()
        apart += float((x - y).square().sum())
        norm += float(y.square().sum())
    equal = a.dtype == b.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    return Distance(0.0 if equal else math.sqrt(apart), math.sqrt(norm), len(one), equal)


def compare(run: DumpFile, truth: DumpFile, limits: Limits) -> TensorAgreement:
    """Compare a run with the run on one process."""
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
    """Yield the errors of all tensors of a part, the last first, in the order of backward."""
    found: dict[str, list[Distance]] = {}
    for name in reversed(truth.files.get(part, {})):
        (true,) = truth.read(part, name)
        found[name] = [distance(mine, true) for mine in run.read(part, name) or [None]]
    elements = sum(each[0].elements for each in found.values())
    whole = math.sqrt(sum(each[0].norm ** 2 for each in found.values()))
    least = SMALLEST_NORM * whole / math.sqrt(max(elements, 1))
    for name, each in found.items():
        worst = max(_ratio(d.apart, max(d.norm, least * math.sqrt(d.elements))) for d in each)
        yield Deviation(kind, name, *_place(part), worst, limit, all(d.equal for d in each))


def _of_state(kind: str, run: DumpFile, truth: DumpFile, limit: float) -> Iterator[Deviation]:
    """Yield the error of all weights or buffers together, relative to their change. Integers must be equal."""
    apart = change = 0.0
    equal, missing = True, ""
    before, after = f"{kind}-before", f"{kind}-after"
    for name in truth.files.get(after, {}):
        (end,), (start,) = truth.read(after, name), truth.read(before, name) or [None]
        found = [distance(mine, end) for mine in run.read(after, name) or [None]]
        same = all(each.equal for each in found)
        if end is not None and not end.is_floating_point():
            yield Deviation("count", name, -1, 0, max(_ratio(each.apart, each.norm) for each in found), 0.0, same)
            continue
        change += distance(end if start is None else start, end).apart ** 2
        apart += max(each.apart for each in found) ** 2
        missing = missing or name * any(math.isinf(each.apart) for each in found)
        equal &= same
    yield Deviation(kind, missing, -1, 0, _ratio(math.sqrt(apart), math.sqrt(change)), limit, equal)


def _ratio(apart: float, norm: float) -> float:
    if apart == 0.0:
        return 0.0
    ratio = apart / norm if norm else math.inf
    return math.inf if math.isnan(ratio) else ratio


def _place(part: str) -> tuple[int, int]:
    """Return the step and the pass of "step-1-pass-2"; (-1, 0) for a part without a step."""
    words = part.split("-")
    return (int(words[1]), int(words[3]) if len(words) > 3 else 0) if words[0] == "step" else (-1, 0)
