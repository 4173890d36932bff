"""Mixed precision: forward under autocast, outputs in float32; for fp16 losses are scaled by a power of two.

See https://docs.pytorch.org/docs/stable/amp.html and Micikevicius et al., Mixed Precision Training, ICLR 2018.
Parameters, gradients and optimizer state stay float32.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: str, device: torch.device) -> torch.autocast:
    """Return the context in which torch computes with `precision`; with fp32 it changes nothing."""
    return torch.autocast(device.type, dtype=DTYPES.get(precision), enabled=precision in DTYPES)


def apply_precision(model: torch.nn.Module, precision: str, device: torch.device) -> None:
    """Run the model's forward under autocast, and return its floating-point outputs as float32."""
    if precision in DTYPES:
        model.forward = AutocastForward(model.forward, precision, device)


class AutocastForward:
    """Run a forward under autocast. It holds the bound method, so a deep copy of the model holds its own."""

    def __init__(self, forward: Callable[..., Any], precision: str, device: torch.device) -> None:
        self.forward, self.precision, self.device = forward, precision, device
        functools.update_wrapper(self, forward, updated=())  # so inspect.signature returns the model's own

    def __deepcopy__(self, memo: dict[int, Any]) -> AutocastForward:
        return AutocastForward(copy.deepcopy(self.forward, memo), self.precision, self.device)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with autocast(self.precision, self.device):
            out = self.forward(*args, **kwargs)
        return tree_map_only(torch.Tensor, as_float32, out)


def as_float32(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of half precision as float32, any other as it is."""
    return tensor.float() if tensor.dtype in DTYPES.values() else tensor


class LossScale:
    """Scale losses before backward, so that small gradients do not vanish in fp16.

    It is torch's GradScaler with its defaults, but one for all optimizers, updated by all processes together, and saved
    with the run. The scale is a power of two: scaling and unscaling change no bit of what stays in range. It halves at
    a step whose gradient is not finite, which is skipped, and doubles after 2,000 steps in a row without one.
    """

    FIRST, INTERVAL, LEAST = 2.0**16, 2000, 1.0

    def __init__(self, precision: str) -> None:
        self.on = precision == "fp16"
        self.value = self.FIRST if self.on else 1.0
        self.good = 0  # steps in a row whose gradients were finite
        self.skipped = 0  # steps whose gradients were not
        self._step = -1
        self._before = self.value, self.good, self.skipped

    @property
    def may_skip(self) -> bool:
        """Whether the scale may be the cause of a gradient that is not finite."""
        return self.on and self.value > self.LEAST

    def update(self, step: int, *, finite: bool) -> None:
        """Update the scale after a gradient of `step`. Of several gradients in one step, the worst counts."""
        if not self.on:
            return
        if step != self._step:
            self._step, self._before = step, (self.value, self.good, self.skipped)
        elif finite:
            return
        self.value, self.good, self.skipped = self._before
        if not finite:
            self.skipped += 1
            self.value, self.good = max(self.value / 2, self.LEAST), 0
        elif self.good + 1 < self.INTERVAL:
            self.good += 1
        else:
            self.value, self.good = (self.value * 2 if math.log2(self.value) < 127 else self.value), 0

    def state_dict(self) -> dict[str, Any]:
        return {"on": self.on, "value": self.value, "good": self.good, "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.on and state["on"]:  # the run may have had another precision
            self.value, self.good = max(float(state["value"]), self.LEAST), int(state["good"])
            self.skipped = int(state["skipped"])
