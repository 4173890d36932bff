"""Train with learning rates that grow from update to update, and record the loss after each of them.

    FOLDER/rank-N.json    {"points": [[rate, loss], ...], "start": loss, "ended": "diverged", "given": {"lr": 0.1}, ...}

The rate of an optimizer's step is set before it and restored after it, so schedules find the rates that they know. A
loss is that of all processes, so each of them ends the test after the same update.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from unisono.config.exchange_registry import EXCHANGES
from unisono.errors import LoopError, NotFiniteError, RunStopped, SettingsError
from unisono.security.file_modes import make_folder, write_text
from unisono.train.context import Inspection, LoopParts, RunContext
from unisono.train.extensions import Extension
from unisono.train.gradient_pass import GradientPass
from unisono.train.lr_range.rate_curve import DivergenceStop, growing_rates, smoothing
from unisono.train.step_state import StepState

GIVEN = ("lr", "initial_lr", "max_lr")
"""Entries of a parameter group that schedules of torch derive from the script's learning rate."""


class RateSweep(Extension):
    """Set the rate of each update, and end the run when all rates were tried, or the loss has diverged.

    Args:
        file: The file to write.
        rates: The rates of the first parameter group.
        context: The context of the run.
        parts: The parts of its loop.

    Raises:
        SettingsError: Processes of this exchange update models of their own.
    """

    def __init__(self, file: Path, rates: list[float], context: RunContext, parts: LoopParts) -> None:
        self._file, self._rates, self._stop = file, rates, DivergenceStop(smoothing(len(rates)))
        self._points: list[tuple[float, float]] = []
        self._start: float | None = None
        self._number = 0
        self._applied: set[int] = set()  # steps whose update was made
        self._optimizers: list[Any] = []
        self._given: dict[str, float] = {}
        self._refuse_unfit(context)

    def _refuse_unfit(self, context: RunContext) -> None:
        exchange = context.settings.exchange
        if EXCHANGES[exchange].loop:
            raise SettingsError(
                f"The range test is not possible with exchange={exchange}.",
                "Its processes update models of their own, so an update has no single loss after it.",
                "--set exchange=tree",
            )

    # -- the rates

    def before_step(self, step: StepState) -> None:
        self._number = step.number

    def stepping(self, optimizer: Any) -> Any:
        return self._with_rate(optimizer)

    @contextmanager
    def _with_rate(self, optimizer: Any) -> Iterator[None]:
        """Set the rates of an optimizer's groups, in the proportions that the script gave them."""
        if not any(known is optimizer for known in self._optimizers):
            self._add(optimizer)
        if self._number >= len(self._rates):
            yield
            return
        self._applied.add(self._number)
        base = self._given["lr"]
        held = [_number(group["lr"]) for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            _set(group, self._rates[self._number] * (given_rate(group) / base))
        try:
            yield
        finally:
            for group, rate in zip(optimizer.param_groups, held, strict=True):
                _set(group, rate)

    def _add(self, optimizer: Any) -> None:
        """Remember an optimizer, and of the first one the rate that the proportions of all groups refer to."""
        name = type(optimizer).__name__
        if not all("lr" in group for group in getattr(optimizer, "param_groups", [{}])):
            facts = "Its param_groups have no entry lr."
            raise LoopError(f"{name} has no learning rate to test.", facts, "use an optimizer of torch.optim.")
        if not self._optimizers:
            first = next((group for group in optimizer.param_groups if given_rate(group) > 0), None)
            if first is None:
                facts = "The test keeps the proportions of the groups, and all of their rates are 0."
                raise LoopError(f"{name} has no learning rate above 0.", facts, "give it one: lr=1e-3.")
            self._given = {entry: _number(first[entry]) for entry in GIVEN if entry in first} | {
                "lr": given_rate(first)
            }
        self._optimizers.append(optimizer)

    # -- the losses

    def gradient_ready(self, step: StepState, gradient: GradientPass) -> None:
        if step.passes:
            return
        if step.number == 0:
            self._start = step.loss
        elif self._add_point(step.number - 1, step.loss):
            self._end("diverged")
        elif step.number == len(self._rates):
            self._end("all rates")

    def _add_point(self, number: int, loss: float) -> bool:
        """Add the loss after update `number`, and return whether the test ends with it."""
        if number not in self._applied:  # fp16 skipped it
            return False
        self._points.append((self._rates[number], loss))
        return self._stop.diverges(loss)

    def _end(self, why: str) -> None:
        self._write(why)
        raise RunStopped

    def settle(self) -> None:
        self._write("the script left its loop")

    def ended(self, error: Exception | None) -> None:
        if not isinstance(error, NotFiniteError):
            return
        last = self._number - 1
        if last in self._applied and (not self._points or self._points[-1][0] != self._rates[last]):
            self._points.append((self._rates[last], math.nan))  # no loss of its step was added
        self._write("not finite")

    def _write(self, why: str) -> None:
        content = {
            "points": [[rate, loss if math.isfinite(loss) else None] for rate, loss in self._points],
            "start": self._start,
            "ended": why,
            "given": self._given,
            "groups": sum(len(optimizer.param_groups) for optimizer in self._optimizers),
            "optimizers": [type(optimizer).__name__ for optimizer in self._optimizers],
        }
        write_text(self._file, json.dumps(content) + "\n")


def given_rate(group: dict[str, Any]) -> float:
    """Return the learning rate that the script gave a group, before a schedule changed it."""
    return _number(group.get("initial_lr", group["lr"]))


def _number(rate: Any) -> float:
    return float(rate)


def _set(group: dict[str, Any], rate: float) -> None:
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def sweep_rates(request: str, rank: int) -> Inspection:
    """Return an inspection that tests rates. `request`: FIRST:LAST:COUNT:FOLDER; `rank`: of this process."""
    first, last, count, folder = request.split(":", 3)
    make_folder(Path(folder))
    rates = growing_rates(float(first), float(last), int(count))
    return Inspection(partial(RateSweep, Path(folder) / f"rank-{rank}.json", rates))
