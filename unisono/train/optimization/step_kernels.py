"""Choose how torch's optimizers compute their step: foreach, fused or compiled.

An optimizer's state_dict always has the options that the script gave it. So a checkpoint does not depend on this
choice, and a resume with another one (--accept-change speed.optimizer) uses the other one.

A compiled step is that of torch (https://docs.pytorch.org/tutorials/recipes/compiling_optimizer.html). Compiled code
contains the values of the options. Those that schedules change in every step, such as the learning rate, are tensors
while the step is computed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch

from unisono.errors import LoopError

WAYS = {"foreach": {"foreach": True, "fused": False}, "fused": {"foreach": False, "fused": True}}
WAYS["compiled"] = {"foreach": False, "fused": False}
"""For each choice, the options of an optimizer's groups that select torch's implementation."""

MOST_OPTIONS = 4
"""Sets of options for which the step of one optimizer is compiled."""


class StepKernels:
    """The choice for one optimizer.

    Attributes:
        choice: A value of the setting `speed.optimizer`, other than "script".
        given: For each group, the options of `WAYS` that the script gave it.
        tensors: By group and option, the tensors that a compiled step reads in place of numbers.
        options: The sets of options for which the step was compiled.
    """

    def __init__(self, choice: str) -> None:
        self.choice = choice
        self.given: list[dict[str, Any]] = []
        self.tensors: dict[tuple[int, str], Any] = {}
        self.options: list[Any] = []

    def apply(self, optimizer: torch.optim.Optimizer) -> None:
        """Set the options of the groups that are new since the last call."""
        ways = WAYS[self.choice]
        for group in optimizer.param_groups[len(self.given) :]:
            self.given.append({way: group[way] for way in ways if way in group})
            group |= {way: value for way, value in ways.items() if way in group}
        if self.choice == "fused":  # fused kernels read the number of the step on the device of the parameter
            for p, state in optimizer.state.items():
                if isinstance(state.get("step"), torch.Tensor):
                    state["step"] = state["step"].to(p.device)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Compute a compiled step.

        Raises:
            LoopError: options that are no learning rate have changed too often.
        """
        with self._as_tensors(optimizer):
            self._check_options(optimizer)
            compiled_step()(optimizer)

    @contextmanager
    def _as_tensors(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        held = []
        for number, group in enumerate(optimizer.param_groups):
            for name in _changing(optimizer):
                value = group.get(name)
                if isinstance(value, (int, float, tuple)):
                    held.append((group, name, value))
                    group[name] = self._tensor(number, name, value)
        try:
            yield
        finally:
            for group, name, value in held:
                group[name] = value

    def _tensor(self, number: int, name: str, value: Any) -> Any:
        """Return the tensors for an option, with its present value; the same ones in every step."""
        pair = isinstance(value, tuple)
        values = value if pair else (value,)
        known = self.tensors.setdefault((number, name), tuple(torch.zeros((), dtype=torch.float64) for _ in values))
        for tensor, number_now in zip(known, values, strict=True):
            tensor.fill_(number_now)
        return known if pair else known[0]

    def _check_options(self, optimizer: torch.optim.Optimizer) -> None:
        skipped = {"params", *_changing(optimizer)}
        now = [
            {name: value for name, value in group.items() if isinstance(value, (int, float)) and name not in skipped}
            for group in optimizer.param_groups
        ]
        if now in self.options:
            return
        self.options.append(now)
        if len(self.options) > MOST_OPTIONS:
            first, last = self.options[-2:]
            pairs = zip(first, last, strict=False)
            changed = sorted({name for one, two in pairs for name in two if one.get(name) != two[name]})
            raise LoopError(
                f"The compiled step of {type(optimizer).__name__} would be compiled again in every step.",
                f"{' and '.join(changed) or 'Its groups'} changed {MOST_OPTIONS} times, and compiled code contains it.",
                "keep it (OneCycleLR and CyclicLR: cycle_momentum=False), or --set speed.optimizer=script",
            )


_chosen: WeakKeyDictionary[torch.optim.Optimizer, StepKernels] = WeakKeyDictionary()


def choose_kernels(optimizer: Any, choice: str) -> None:
    """Let an optimizer compute its step in the chosen way from now on. Call it again when it has more groups.

    Args:
        optimizer: The optimizer.
        choice: The value of the setting `speed.optimizer`.

    Raises:
        LoopError: torch has no such kernel for this optimizer.
    """
    if choice == "script":
        return
    _check(optimizer, choice)
    known = _chosen.get(optimizer)
    if known is None:
        known = _chosen[optimizer] = StepKernels(choice)
        optimizer.register_state_dict_post_hook(_with_given_options)
        optimizer.register_load_state_dict_post_hook(_apply_again)
    known.apply(optimizer)


def compiled_step_of(optimizer: Any) -> StepKernels | None:
    """Return what computes the step of this optimizer, if it is compiled."""
    known = _chosen.get(optimizer) if _chosen and isinstance(optimizer, torch.optim.Optimizer) else None
    return known if known is not None and known.choice == "compiled" else None


def has_kernels(optimizer: Any, choice: str) -> bool:
    """Return whether torch has this kind of step for an optimizer: its own ones, with the option for it."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return False
    if choice == "compiled":
        return type(optimizer).__module__.startswith("torch.optim.")
    return all(choice in group and not group.get("differentiable") for group in optimizer.param_groups)


def _check(optimizer: Any, choice: str) -> None:
    """Raise LoopError if torch has no such step for this optimizer."""
    if not has_kernels(optimizer, choice):
        needed = "only torch's own optimizers are compiled" if choice == "compiled" else f"it takes no {choice}=True"
        raise LoopError(
            f"step.update cannot step {type(optimizer).__name__} with speed.optimizer={choice}.",
            f"torch has no such step for it: {needed}.",
            "--set speed.optimizer=script",
        )


def _changing(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """Return the options that are tensors in a compiled step. torch takes betas as tensors in Adam and AdamW."""
    return ("lr", "betas") if isinstance(optimizer, torch.optim.Adam) else ("lr",)


def _with_given_options(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Put the options of the script into a state_dict."""
    for group, given in zip(state["param_groups"], _chosen[optimizer].given, strict=False):
        group |= given


def _apply_again(optimizer: torch.optim.Optimizer) -> None:
    """Set the options again, after a state_dict was loaded."""
    _chosen[optimizer].given = []
    _chosen[optimizer].apply(optimizer)


def step_of(optimizer: torch.optim.Optimizer) -> None:
    """Compute the step of an optimizer. This function is compiled, once for all optimizers."""
    optimizer.step()


@functools.cache
def compiled_step() -> Callable[[torch.optim.Optimizer], None]:
    """Return `step_of`, compiled. It imports the compiler, which takes a second."""
    return torch.compile(step_of, dynamic=False)
