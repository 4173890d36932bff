"""Options of optimizers and schedules, and what a resume with other settings makes of them.

The options of an optimizer (`lr`, `weight_decay`, `betas`) are in its state, and torch restores them with it. So new
settings of a resumed run would change nothing. A checkpoint therefore also holds the options that the script gave when
it built each object. A resume with an accepted change of settings compares them with the new ones:

    as built, with lr=0.1    in the checkpoint      as built now, with lr=0.02    after the resume
    lr            0.1        lr            0.05     lr            0.02            lr            0.01
    weight_decay  0.1        weight_decay  0.1      weight_decay  0.1             weight_decay  0.1

An option that has its first value in the checkpoint gets the new value. One that has changed since, as by a schedule,
keeps its proportion to the first value. A schedule continues as if the script had built it with the new settings.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from unisono.train.state.resume import LENGTHS, LongerSchedules

RATES = ("lr", "initial_lr", "max_lr", "min_lr")
"""Learning rates in the groups of an optimizer. They keep their proportions to each other."""

OF_GROUPS = ("base_lrs", "max_lrs", "_last_lr")
"""Learning rates in a schedule, one for each group of its optimizer."""

Options = Any
"""A list with a dict for each group of an optimizer, or the dict of a schedule."""

Ratios = Mapping[int, Sequence[float]]
"""The factor of the learning rate of each group, by the id of the optimizer."""


class TrackedOptions:
    """The options that the script gave to each tracked optimizer and schedule.

    Attributes:
        given: The options by the name of the object, as JSON can hold them.
        follows: Whether options follow the settings: a resume has accepted a change of these.
        changed: (name, value in the checkpoint, value now) of the options that have changed.
        schedules: Computes the learning rates of schedules that have changed.
    """

    def __init__(self) -> None:
        self.given: dict[str, Options] = {}
        self.follows = False
        self.changed: list[tuple[str, Any, Any]] = []
        self.schedules = LongerSchedules()

    def note(self, name: str, thing: Any) -> None:
        """Record the options of an object, before its state is loaded."""
        if (found := options_of(thing)) is not None:
            self.given[name] = found

    def apply(self, things: Mapping[str, Any], before: Mapping[str, Options]) -> None:
        """Change the options that depend on changed settings, after all states are loaded.

        Args:
            things: The tracked objects.
            before: The options that the script gave in the run that saved the checkpoint.
        """
        if not self.follows:
            return
        ratios: dict[int, Sequence[float]] = {}
        for name, thing in things.items():
            was, now = before.get(name), self.given.get(name)
            if isinstance(was, list) and isinstance(now, list):
                ratios[id(thing)] = self._change_groups(name, thing.param_groups, was, now)
        for name, thing in things.items():
            was, now = before.get(name), self.given.get(name)
            if isinstance(was, dict) and isinstance(now, dict):
                self._change_schedule(name, thing, was, now, ratios)

    def _change_groups(
        self, name: str, groups: Sequence[Any], before: Sequence[Any], now: Sequence[Any]
    ) -> list[float]:
        """Change the options of an optimizer's groups, and return the factor of the learning rate of each group."""
        found = []
        for number, group in enumerate(groups):
            was, want = (each[number] if number < len(each) else {} for each in (before, now))
            found.append(ratio := ratio_of(was, want))
            label = name if len(groups) == 1 else f"{name}[{number}]"
            for key in [key for key in group if key != "params"]:
                old = plain_option(group[key])
                if old is None or (key not in RATES and not (key in was and key in want)):
                    continue
                new = moved(old, was.get(key), want.get(key), ratio if key in RATES else None)
                if new != old:
                    self.changed.append((f"{label}.{key}", old, new))
                    _put(group, key, new)
        return found

    def _change_schedule(
        self, name: str, schedule: Any, was: Mapping[str, Any], want: Mapping[str, Any], ratios: Ratios
    ) -> None:
        """Change the options of a schedule, and the learning rates that it holds, for the new rates of its groups."""
        held, groups, factors = vars(schedule), schedule.optimizer.param_groups, ratios.get(id(schedule.optimizer), ())
        touched = any(factor != 1.0 for factor in factors)
        for key in sorted(was.keys() & want.keys() - {INNER, *OF_GROUPS, *LENGTHS}):
            if was[key] != want[key] and plain_option(held[key]) == was[key]:
                self.changed.append((f"{name}.{key}", was[key], want[key]))
                _put(held, key, want[key])
                touched = True
        pairs = zip(held.get(INNER, ()), was.get(INNER, ()), want.get(INNER, ()), strict=False)
        for number, (inner, was_inner, want_inner) in enumerate(pairs):
            self._change_schedule(f"{name}.{number}", inner, was_inner, want_inner, ratios)
        if not touched:
            return
        self.schedules.recompute(schedule)
        rates = {"base_lrs": "initial_lr", "_last_lr": "lr"}
        for key in OF_GROUPS:
            if isinstance(held.get(key), list) and len(held[key]) == len(groups) == len(factors):
                of = rates.get(key, "")
                held[key] = [
                    _copy(group[of]) if of in group else rate * factor
                    for group, rate, factor in zip(groups, held[key], factors, strict=True)
                ]


INNER = "_schedulers"
"""The attribute of a SequentialLR and of a ChainedScheduler with the schedules in it."""


def options_of(thing: Any) -> Options | None:
    """Return the options of an optimizer or a schedule, as JSON can hold them; None for other objects."""
    if isinstance(thing, LRScheduler):
        found = _plain_items(vars(thing).items())
        return {**found, INNER: [options_of(inner) for inner in getattr(thing, INNER, ())]}
    groups = getattr(thing, "param_groups", None)
    if not isinstance(groups, list):
        return None
    return [_plain_items((key, value) for key, value in group.items() if key != "params") for group in groups]


def _plain_items(items: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    return {key: plain for key, value in items if (plain := plain_option(value)) is not None}


def plain_option(value: Any) -> Any:
    """Return a number, a truth value, a text or a list of numbers; None for other values."""
    if isinstance(value, torch.Tensor):
        value = value.item() if value.numel() == 1 and not value.is_complex() else None
    if isinstance(value, (list, tuple)):
        plain = [plain_option(each) for each in value]
        return plain if all(isinstance(each, (int, float)) for each in plain) else None
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, (bool, int, float, str)) else None


def ratio_of(was: Mapping[str, Any], want: Mapping[str, Any]) -> float:
    """Return the factor by which a group's learning rates change; 1 if it cannot be known.

    `initial_lr`, which schedules add, comes first: a warm-up may begin with a learning rate of 0.
    """
    for key in ("initial_lr", "lr"):
        if was.get(key) and want.get(key) is not None:
            return float(want[key] / was[key])
    return 1.0


def moved(now: Any, was: Any, want: Any, ratio: float | None) -> Any:
    """Return an option for the new settings.

    Args:
        now: Its value in the checkpoint.
        was: Its first value in the run that saved the checkpoint; None: not known.
        want: Its first value now; None: not known.
        ratio: The factor of a learning rate; None: it follows from `was` and `want`.
    """
    if isinstance(now, list) and isinstance(was, list) and isinstance(want, list) and len(now) == len(was) == len(want):
        return [moved(*each, ratio) for each in zip(now, was, want, strict=True)]
    if was is not None and want is not None and now == was != want:
        return want
    if isinstance(now, (bool, str, list)):
        return now if was == want else want
    if ratio is not None:
        return now * ratio
    if was == want:
        return now
    return now * (want / was) if was and isinstance(want, (int, float)) else want


def _put(holder: Any, key: str, value: Any) -> None:
    """Set an option, in the form that it has: a tensor is changed in place, because compiled steps hold it."""
    now = holder[key]
    if isinstance(now, torch.Tensor):
        now.fill_(value)
    else:
        holder[key] = tuple(value) if isinstance(now, tuple) else value


def _copy(rate: Any) -> Any:
    return rate.clone() if isinstance(rate, torch.Tensor) else rate
