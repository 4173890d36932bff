"""A placement as text, as in `unisono prove --parallel shard=2,reshard=step`: settings of `parallel` by name.

The number of processes is the product of the axes' sizes. An axis that is not named, `replicate` included, has size 1.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from math import prod

from unisono.config import CommandLine, ParallelSettings, entries_of, nearest_name
from unisono.config.conflicts import conflicts_among
from unisono.config.mesh_shape import MeshShape
from unisono.errors import SettingsError

NAMES = tuple(entry.name for entry in entries_of(ParallelSettings))
SECTION = "parallel."
DATA = ("replicate", "shard")
"""Axes that change no bit: the exchange sums along them in the order of the reduction tree."""


ALSO = {
    "tensor": {"sequence_parallel": "true", "loss_parallel": "true"},
    "pipeline": {"schedule": "Interleaved1F1B"},
}
"""Other ways to use an axis, which are compared on two processes."""


@dataclass(frozen=True)
class LayoutSpec:
    """Settings of `parallel` with their values as text, in the order in which they were typed."""

    values: Mapping[str, str]

    def __str__(self) -> str:
        return ",".join(f"{name}={value}" for name, value in self.values.items())

    @property
    def axes(self) -> MeshShape:
        return MeshShape(**{name: int(self.values.get(name, 1)) for name in MeshShape._fields})

    @property
    def processes(self) -> int:
        return self.axes.size

    @property
    def sets(self) -> tuple[str, ...]:
        """The values for `--set`, with every axis, whatever the script's own defaults are."""
        values = {**dict.fromkeys(MeshShape._fields, "1"), **self.values}
        return tuple(f"{SECTION}{name}={value}" for name, value in values.items())

    @property
    def is_exact(self) -> bool:
        """Whether it divides only samples and parameters, and no computation."""
        return prod(getattr(self.axes, name) for name in DATA) == self.processes

    def share(self, kind: str) -> float:
        """Return the expected fraction of parameters, gradients or optimizer state of its layers on each process."""
        axes, by_step = self.axes, self.values.get("reshard") == "step"
        gathered = by_step and kind != "optimizer"  # shards are whole during the step
        return 1 / (axes.tensor * (1 if gathered else axes.shard))


ALONE = LayoutSpec({})
"""One process, the baseline."""


def placement_of(text: str, line: CommandLine) -> LayoutSpec:
    """Parse a placement. `line` is the typed command, for messages. Raises SettingsError."""

    def instead(values: Mapping[str, str]) -> str:
        return str(line.flag("--parallel", str(LayoutSpec(values or {"shard": "2"})), instead_of=text))

    values: dict[str, str] = {}
    invalid = f"Invalid value for --parallel: {text}"
    for part in re.split(r",(?![^\[]*\])", text):  # not the commas of a list
        name, equals, value = (word.strip() for word in part.partition("="))
        name = name.removeprefix(SECTION)
        if not equals or not value:
            facts = "--parallel takes key=value, or several separated by commas."
            raise SettingsError(
                invalid, facts, instead({**values, **({name: "2"} if name in MeshShape._fields else {})})
            )
        if name not in NAMES:
            near = nearest_name(name, NAMES)
            facts = f"The nearest name is {near}." if near else f"The settings are {', '.join(NAMES)}."
            error = f"There is no setting {SECTION}{name}."
            raise SettingsError(error, facts, instead({**values, **({near: value} if near else {})}))
        if name in MeshShape._fields and not (value.isdecimal() and int(value) >= 1):
            facts = f"{name} takes a number of processes here, at least 1."
            raise SettingsError(invalid, facts, instead({**values, name: "2"}))
        values[name] = value
    return LayoutSpec(values)


def fitting(most: int = 4) -> Iterator[LayoutSpec]:
    """Yield placements on 2 and on `most` processes: each axis alone, two axes together, and variants of some axes."""
    axes = ["replicate", "shard", "tensor", "pipeline", "context"]
    sizes = sorted({2, most})
    found = [{name: str(size)} for name in axes for size in sizes]
    found += [{one: "2", other: str(most // 2)} for one, other in combinations(axes, 2) if most >= 4]
    found = [
        values for values in found if not any(conflicts_among({f"{SECTION}{n}": int(v) for n, v in values.items()}))
    ]
    for values in found:
        yield LayoutSpec(values)
        if "shard" in values:
            yield LayoutSpec({**values, "reshard": "step"})
        for axis, ways in ALSO.items():
            if values == {axis: "2"}:
                yield LayoutSpec({**values, **ways})


@dataclass(frozen=True)
class LayoutLine(CommandLine):
    """The command line of one placement: changes of settings of `parallel` are made in its --parallel."""

    placement: LayoutSpec = ALONE

    def setting(self, *pairs: str, instead_of: str = "") -> LayoutLine:
        ours = dict(pair.removeprefix(SECTION).split("=", 1) for pair in pairs if pair.startswith(SECTION))
        gone = instead_of.removeprefix(SECTION).partition("=")[0]
        kept = {name: value for name, value in self.placement.values.items() if name != gone}
        others = [pair for pair in pairs if not pair.startswith(SECTION)]
        line = super().setting(*others, instead_of=instead_of) if others or not ours else self
        return self._placed(line, LayoutSpec({**kept, **ours}) if ours else self.placement)

    def in_processes(self, count: int) -> LayoutLine:
        if count == self.placement.processes:
            return self
        long = [name for name, size in self.placement.axes._asdict().items() if size > 1]
        rest = {name: value for name, value in self.placement.values.items() if name not in MeshShape._fields}
        return self._placed(self, LayoutSpec({long[0] if len(long) == 1 else "replicate": str(count), **rest}))

    def _placed(self, line: CommandLine, placement: LayoutSpec) -> LayoutLine:
        changed = line.flag("--parallel", str(placement), instead_of=str(self.placement))
        return LayoutLine(changed.words, placement)
