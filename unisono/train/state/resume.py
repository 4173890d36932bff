"""Resume a run: compare it with its checkpoint, and adapt saved state to objects that have changed since."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from unisono.checkpoint.load import Checkpoint
from unisono.checkpoint.safetensors_reader import LazyTensor
from unisono.errors import SettingsError

LENGTHS = ("total_steps", "_schedule_phases", "T_max", "total_iters", "_milestones")
"""Attributes in which torch's schedules keep the number of steps that they were made for."""


def check_length(resumed: Checkpoint | None, length: int | str, accepted: Sequence[str]) -> list[dict[str, Any]]:
    """Return the change of bits if the number of samples differs from that at the beginning of the run.

    Args:
        resumed: the checkpoint from which the run is resumed.
        length: the number of samples now.
        accepted: changes that the user accepts.

    Raises:
        SettingsError: it differs, and `accepted` does not contain "length".
    """
    before = _identity(resumed, "length", length)
    if before == length:
        return []
    if "length" not in accepted:
        raise SettingsError(
            f"Cannot resume with {length} samples of training data.",
            f"The run was begun with {before}, and the order of all samples depends on it.",
            "resume with the same data set, or add --accept-change length.",
        )
    return _change(resumed, "length", before, length)


def check_kernels(resumed: Checkpoint | None, kernels: str, accepted: Sequence[str]) -> list[dict[str, Any]]:
    """Return the change of bits if formats of numbers or kinds of kernels differ from those of the run before.

    Args:
        resumed: the checkpoint from which the run is resumed.
        kernels: their description (train/guarantees/deterministic_kernels.py).
        accepted: changes that the user accepts.

    Raises:
        SettingsError: they differ, and `accepted` does not contain "kernels".
    """
    before = _identity(resumed, "kernels", kernels)
    if before == kernels:
        return []
    if "kernels" not in accepted:
        raise SettingsError(
            "Cannot resume with other kernels or formats of numbers.",
            f"The run was begun with {before}; now there are {kernels}. The result depends on them.",
            "set the same in the script, or add --accept-change kernels.",
        )
    return _change(resumed, "kernels", before, kernels)


def check_exchange(resumed: Checkpoint | None, name: str, accepted: Sequence[str]) -> list[dict[str, Any]]:
    """Return the change of bits if the script's own exchange is another one than at the beginning.

    Args:
        resumed: the checkpoint from which the run is resumed.
        name: of the exchange; "none": the script has none.
        accepted: changes that the user accepts.

    Raises:
        SettingsError: it differs, and `accepted` does not contain "exchange".
    """
    before = _identity(resumed, "own exchange", "none" if resumed else name)
    if before == name:
        return []
    if "exchange" not in accepted:
        raise SettingsError(
            f"Cannot resume with exchange={name} in run.steps.",
            f"The run was begun with {before}, and the result depends on how gradients are exchanged.",
            "resume with the same exchange, or add --accept-change exchange.",
        )
    return _change(resumed, "exchange", before, name)


def check_ties(resumed: Checkpoint | None, ties: str) -> list[dict[str, Any]]:
    """Return the change of bits if pipeline stages share other parameters now. It affects rounding only."""
    before = _identity(resumed, "ties", "none" if resumed else ties)
    return _change(resumed, "ties", before, ties) if before != ties else []


def _identity(resumed: Checkpoint | None, name: str, default: Any) -> Any:
    return resumed.about["identity"].get(name, default) if resumed else default


def _change(resumed: Checkpoint | None, field: str, before: Any, now: Any) -> list[dict[str, Any]]:
    return [{"step": resumed.steps if resumed else 0, "field": field, "from": before, "to": now}]


class LongerSchedules:
    """Learning-rate schedules that are longer than in the checkpoint, as with `--resume --set steps=N`.

    With its old length OneCycleLR would raise an error at its old end, and a cosine would rise again.

    Attributes:
        changes: (name, saved value, current value) of every length that differs.
    """

    def __init__(self) -> None:
        self.changes: list[tuple[str, Any, Any]] = []
        self._longer: list[Any] = []

    def adapt(self, name: str, schedule: Any, state: dict[str, Any]) -> dict[str, Any]:
        """Return the saved state of a schedule, with the length that the schedule has now."""
        new = {k: vars(schedule)[k] for k in LENGTHS if k in state and vars(schedule).get(k, state[k]) != state[k]}
        if new:
            self.recompute(schedule)
        self.changes += [(f"{name}.{k}", state[k], new[k]) for k in new if not k.startswith("_")]
        if "_schedulers" in state:  # of a SequentialLR, or a ChainedScheduler
            inner = zip(schedule._schedulers, state["_schedulers"], strict=False)
            new["_schedulers"] = [self.adapt(f"{name}.{i}", *pair) for i, pair in enumerate(inner)]
        return {**state, **new}

    def set_rates(self, things: Iterable[Any]) -> None:
        """Compute the learning rates of longer schedules, once everything is loaded.

        torch's schedules multiply the last learning rate, so one that has reached 0 would stay there.
        """
        for thing in things:
            active = _active_schedule(thing)
            if active in self._longer and hasattr(active, "_get_closed_form_lr"):
                active._last_lr = thing._last_lr = active._get_closed_form_lr()
                for group, lr in zip(active.optimizer.param_groups, active._last_lr, strict=True):
                    group["lr"] = lr
        self._longer = []

    def recompute(self, schedule: Any) -> None:
        """Let `set_rates` compute the learning rates of a schedule, because its options have changed."""
        if schedule not in self._longer:
            self._longer.append(schedule)


def check_kinds(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Check that saved values have the kind of those that they replace: torch takes any, and fails in a later step.

    Raises:
        TypeError: one has another kind.
    """
    for name in saved.keys() & now.keys():
        if not _fits(saved[name], now[name]):
            kinds = [type(value).__name__ for value in (saved[name], now[name])]
            raise TypeError(f"{name} is a {kinds[0]} there, and a {kinds[1]} here")


def _fits(saved: Any, now: Any) -> bool:
    if saved is None or now is None:
        return saved is now or not isinstance(now, float)
    if isinstance(saved, (list, tuple)) and isinstance(now, (list, tuple)):
        return not now or all(_fits(item, now[0]) for item in saved)
    return _kind(saved) == _kind(now)


def _kind(value: Any) -> str:
    kinds = {"a number": (int, float, torch.Tensor, LazyTensor), "a dict": (Mapping,), "a list": (list, tuple)}
    return next((kind for kind, types in kinds.items() if isinstance(value, types)), type(value).__name__)


def check_optimizer(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Check the saved state of an optimizer that loads it as torch's optimizers do, which drops what it does not know.

    Raises:
        TypeError, ValueError: it is the state of no such optimizer.
    """
    if type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict:
        return
    known: set[int] = set()
    for group, now in zip(saved["param_groups"], optimizer.param_groups, strict=False):  # torch reports other counts
        check_kinds({**group, "params": []}, now)
        if not isinstance(group["params"], list) or not all(type(number) is int for number in group["params"]):
            raise TypeError("the parameters of a group are not numbers")
        known |= {*group["params"]}
    if not saved["state"].keys() <= known:
        raise ValueError(f"it has a state of the parameters {sorted(saved['state'].keys() - known, key=str)[:3]}")


def keep_dtypes(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Restore the dtypes of an optimizer's saved state.

    torch loads floating-point state in the dtype of its parameter. State in float32 of a parameter in bfloat16 (NAdam's
    mu_product, or that of a custom optimizer) would lose bits.
    """
    loaded = optimizer.state_dict()["state"]
    for number, values in saved["state"].items():
        for name, value in values.items():
            now = loaded[number][name]
            if isinstance(value, torch.Tensor) and now.dtype != value.dtype:
                loaded[number][name] = value.to(now.device, copy=True)


def _active_schedule(schedule: Any) -> Any:
    """Return the schedule that sets the learning rate now: the active one of a SequentialLR."""
    while isinstance(schedule, torch.optim.lr_scheduler.SequentialLR):
        schedule = schedule._schedulers[bisect_right(schedule._milestones, schedule.last_epoch)]
    return schedule
