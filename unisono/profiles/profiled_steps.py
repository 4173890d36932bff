"""The settings of a profile: which steps are recorded, on which ranks, and what is wrong with such a request."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from unisono.errors import Problem

ALL = "all"
"""The value of `profile.ranks` for all ranks."""

MORE = ("memory", "shapes", "stacks")
"""The settings of a profile that record more than times."""


class ProfiledSteps(NamedTuple):
    """The steps that are recorded: `first`, and those after it that come before `end`."""

    first: int
    end: int

    def covers(self, step: int) -> bool:
        """Return whether the step with this number is recorded."""
        return self.first <= step < self.end

    def __str__(self) -> str:
        return f"step {self.first}" if self.end - self.first == 1 else f"steps {self.first} to {self.end - 1}"


def parse_steps(text: str) -> ProfiledSteps | None:
    """Return the steps of a value of `profile.steps`, as in "20:23"; None for an empty one.

    Raises:
        ValueError: It has another form.
    """
    if not text.strip():
        return None
    found = re.fullmatch(r"\s*(\d+)\s*:\s*(\d+)\s*", text)
    if found is None:
        raise ValueError(text)
    return ProfiledSteps(int(found[1]), int(found[2]))


def parse_ranks(text: str) -> frozenset[int] | None:
    """Return the ranks of a value of `profile.ranks`, as in "0,3"; None for all.

    Raises:
        ValueError: It has another form.
    """
    if text.strip() == ALL:
        return None
    return frozenset(int(rank) for rank in text.split(",") if _is_number(rank))


def _is_number(text: str) -> bool:
    if not text.strip().isdecimal():
        raise ValueError(text)
    return True


def profile_problems(values: Mapping[str, Any], size: int, choose: Callable[[str], str]) -> list[Problem]:
    """Return what is wrong with the settings of a profile.

    Args:
        values: The settings by name.
        size: The number of processes.
        choose: Returns what to type for "profile.steps=20:23".
    """
    steps, ranks = values.get("profile.steps", ""), values.get("profile.ranks", ALL)
    problems = [*_wrong_steps(steps, choose), *_wrong_ranks(ranks, size, choose)]
    if "profile.steps" in values and not steps.strip():
        useless = [f"profile.{name}" for name in MORE if values.get(f"profile.{name}")]
        useless += ["profile.ranks"] * (ranks != ALL)
        for name in useless[:1] if not problems else ():
            error = f"{name} has no effect without profile.steps."
            problems.append(
                Problem(error, "profile.steps says which steps are recorded.", choose("profile.steps=20:23"))
            )
    return problems


def _wrong_steps(text: str, choose: Callable[[str], str]) -> list[Problem]:
    try:
        steps = parse_steps(text)
    except ValueError:
        number = text.strip()
        example = f"{number}:{int(number) + 1}" if number.isdecimal() else "20:23"
        facts = "It takes FIRST:END, two numbers of steps. END is the first step that is not recorded."
        return [Problem(f"profile.steps = {text} is no range of steps.", facts, choose(f"profile.steps={example}"))]
    if steps is None or steps.end > steps.first:
        return []
    example = f"{steps.end}:{steps.first}" if steps.end < steps.first else f"{steps.first}:{steps.first + 1}"
    facts = f"It takes FIRST:END, and no step from {steps.first} on comes before step {steps.end}."
    return [Problem(f"profile.steps = {text} names no step.", facts, choose(f"profile.steps={example}"))]


def _wrong_ranks(text: str, size: int, choose: Callable[[str], str]) -> list[Problem]:
    try:
        ranks = parse_ranks(text)
    except ValueError:
        facts = "It takes ranks, separated by commas, or all."
        return [Problem(f"profile.ranks = {text} names no ranks.", facts, choose("profile.ranks=0"))]
    strange = sorted(rank for rank in ranks or () if rank >= size)
    if not strange:
        return []
    known = ",".join(str(rank) for rank in sorted(ranks or ()) if rank < size) or "0"
    known_ranks = ("rank 0", "ranks 0 and 1")[size - 1] if size < 3 else f"ranks 0 to {size - 1}"
    facts = f"The run has {known_ranks}."
    error = f"profile.ranks = {text} names a rank that does not exist: {strange[0]}."
    return [Problem(error, facts, choose(f"profile.ranks={known}"))]
