"""The space of a search, as it is typed: --search 'lr=log(1e-4,1e-1)' --search 'model.depth=[2,4,8]'.

name=linear(low,high)         numbers from low to high; whole ones for a setting that takes whole numbers
name=linear(low,high,step)    low, low + step, low + 2 step, ...
name=log(low,high)            uniform in the logarithm
name=[a,b,c]                  one of these values
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from unisono.config import CommandLine, nearest_name, shown
from unisono.errors import Problem

RANGES = ("linear", "log")
"""Kinds of ranges."""

WHOLE, NUMBER = "a whole number", "a number"
"""Types of settings that may have a range, in the words of `config.kind`."""

CALL = re.compile(r"(\w+)\s*\((.*)\)")

Choice = bool | int | float | str


@dataclass(frozen=True)
class Dimension:
    """The values that one setting may have.

    Attributes:
        name: The dotted name of the setting.
        kind: "linear", "log" or "choices".
        low: The smallest number, and `high`, the largest one.
        step: The distance of two numbers; 0: any number.
        choices: The values of "choices". Values that are neither numbers, text nor booleans are here as text.
        whole: Whether the numbers are whole.
    """

    name: str
    kind: str
    low: float = 0.0
    high: float = 0.0
    step: float = 0.0
    choices: tuple[Choice, ...] = ()
    whole: bool = False

    def __str__(self) -> str:
        if self.kind == "choices":
            return f"{self.name}=[{','.join(map(shown, self.choices))}]"
        numbers = [self.low, self.high, *([self.step] if self.step else [])]
        return f"{self.name}={self.kind}({','.join(map(self._shown, numbers))})"

    def _shown(self, number: float) -> str:
        return str(int(number)) if self.whole or (number.is_integer() and abs(number) < 1e15) else repr(number)

    def setting(self, value: Choice) -> str:
        """Return `name=value` for --set."""
        return f"{self.name}={shown(value)}"

    @property
    def ends(self) -> tuple[Choice, Choice]:
        """The first and the last value."""
        if self.kind == "choices":
            return self.choices[0], self.choices[-1]
        return (int(self.low), int(self.high)) if self.whole else (self.low, self.high)


def dimension_of(text: str, line: CommandLine) -> Dimension | Problem:
    """Parse the value of a flag --search.

    Args:
        text: The value.
        line: The typed command, for messages.

    Returns:
        The dimension, or what is wrong with the text.
    """
    name, equals, spec = (word.strip() for word in text.partition("="))

    def problem(facts: str, instead: str) -> Problem:
        return Problem(f"Invalid value for --search: {text}", facts, str(line.flag("--search", instead, text)))

    if not equals or not name or not spec:
        return problem("--search takes the name of a setting and its values.", f"{name or 'lr'}=log(1e-4,1e-1)")
    if spec.startswith("["):
        return _list_of(name, spec, problem)
    call = CALL.fullmatch(spec)
    if call is None:
        facts = "Values are a range, linear(LOW,HIGH) or log(LOW,HIGH), or a list in brackets."
        return problem(facts, f"{name}=[{spec}]")
    kind, words = call[1], [word.strip() for word in call[2].split(",")]
    if kind not in RANGES:
        near = nearest_name(kind, RANGES) or "linear"
        return problem(f"There is no range {kind}; ranges are linear and log.", f"{name}={near}({call[2]})")
    try:
        numbers = [float(word) for word in words]
    except ValueError:
        return problem(f"{kind} takes numbers.", f"{name}={kind}({'1e-4,1e-1' if kind == 'log' else '0,1'})")
    return _range_of(name, kind, numbers, problem)


def _range_of(name: str, kind: str, numbers: Sequence[float], problem: Any) -> Dimension | Problem:
    """Return a range, or what is wrong with its numbers."""
    most = 3 if kind == "linear" else 2
    if not 2 <= len(numbers) <= most or not all(map(math.isfinite, numbers)):
        found: Problem = problem(
            f"{kind} takes {'LOW,HIGH or LOW,HIGH,STEP' if most == 3 else 'LOW,HIGH'}.",
            f"{name}={kind}({'1e-4,1e-1' if kind == 'log' else '0,1'})",
        )
        return found
    low, high, step = [*numbers, 0.0][:3]
    good = Dimension(name, kind, min(low, high), max(low, high), abs(step))
    if low > high:
        reversed_: Problem = problem(f"The range is reversed: {low:g} is more than {high:g}.", str(good))
        return reversed_
    if low == high:
        empty: Problem = problem(f"The range is empty: both ends are {low:g}.", f"{name}=[{low:g},{2 * low or 1:g}]")
        return empty
    if kind == "log" and low <= 0:
        least = replace(good, low=high / 1000) if high > 0 else replace(good, kind="linear")
        negative: Problem = problem(f"The logarithm needs positive numbers, and LOW is {low:g}.", str(least))
        return negative
    if step < 0 or (len(numbers) == 3 and not 0 < step <= high - low):
        wide: Problem = problem("STEP is positive, and at most HIGH - LOW.", str(replace(good, step=(high - low) / 4)))
        return wide
    return good


def _list_of(name: str, spec: str, problem: Any) -> Dimension | Problem:
    """Return a list of choices, or what is wrong with it. Words need no quotes: [sgd,adam]."""
    inner = spec[1:-1].strip().rstrip(",")
    if not spec.endswith("]") or not inner:
        facts = "The list is empty." if spec.endswith("]") else "The list has no closing bracket."
        found: Problem = problem(facts, f"{name}=[{inner or 'A,B'}]" if spec.endswith("]") else f"{name}={spec}]")
        return found
    try:
        values = tomllib.loads(f"value = {spec}")["value"]
    except tomllib.TOMLDecodeError:
        values = [_value_of(word.strip()) for word in inner.split(",")]
    choices = tuple(each if isinstance(each, Choice) and _is_finite(each) else shown(each) for each in values)
    if len({shown(choice) for choice in choices}) < len(choices):
        distinct = dict.fromkeys(map(shown, choices))
        twice: Problem = problem("A value is there twice.", f"{name}=[{','.join(distinct)}]")
        return twice
    return Dimension(name, "choices", choices=choices)


def _is_finite(value: Choice) -> bool:
    """Return whether a value equals itself after it was stored. TOML reads the words nan and inf as numbers."""
    return not isinstance(value, float) or math.isfinite(value)


def _value_of(word: str) -> Any:
    """Return a word as a value of TOML, or as text."""
    try:
        return tomllib.loads(f"value = {word}")["value"]
    except tomllib.TOMLDecodeError:
        return word.strip("\"'")


def fitted(
    dimension: Dimension, kinds: Mapping[str, str], names: Sequence[str], line: CommandLine
) -> Dimension | Problem:
    """Return a dimension for the type of its setting, or why it does not fit.

    Args:
        dimension: The dimension.
        kinds: The type of each setting of the script, as `config.kind` names it; {}: not known.
        names: The settings of the script; (): not known.
        line: The typed command, for messages.
    """
    text, name = str(dimension), dimension.name
    if names and name not in names:
        near = nearest_name(name, names)
        facts = f"The nearest name is {near}." if near else "The script has no such setting."
        do = line.flag("--search", f"{near}={text.partition('=')[2]}", _typed(line, name)) if near else line.help()
        return Problem(f"There is no setting {name}.", facts, str(do))
    kind = kinds.get(name, "")
    if not kind:
        return dimension

    def problem(what: str) -> Problem:
        facts = f"{name} takes {kind}, and {what}."
        example = {WHOLE: "[1,2,4]", NUMBER: "[0.1,0.2]", "true or false": "[true,false]"}.get(kind, "[A,B]")
        if kind.startswith("one of "):
            example = f"[{kind.removeprefix('one of ').replace(' ', '')}]"
        do = str(line.flag("--search", f"{name}={example}", _typed(line, name)))
        return Problem(f"--search {text} does not fit its setting.", facts, do)

    if dimension.kind == "choices":
        wrong = next((choice for choice in dimension.choices if not accepts(kind, choice)), None)
        return dimension if wrong is None else problem(f"{shown(wrong)} is something else")
    if WHOLE in kind:
        ends = (dimension.low, dimension.high, dimension.step)
        if not all(end.is_integer() for end in ends):
            return problem(f"{next(end for end in ends if not end.is_integer()):g} is none")
        return replace(dimension, whole=True)
    return dimension if NUMBER in kind else problem(f"a range has numbers: use a list, {name}=[A,B]")


def accepts(kind: str, value: Choice) -> bool:
    """Return whether a setting of this type, in the words of `config.kind`, may take a value."""
    if isinstance(value, bool):
        return "true or false" in kind or "text" in kind
    if isinstance(value, int):
        return WHOLE in kind or NUMBER in kind or "text" in kind or str(value) in re.split(r"[\s,]+", kind)
    if isinstance(value, float):
        return NUMBER in kind or "text" in kind
    if value == "none" and kind.endswith("none"):
        return True
    if "list" in kind or "text" in kind or "path" in kind:
        return True
    return value in re.split(r"[\s,]+", kind)


def _typed(line: CommandLine, name: str) -> str:
    """Return the value of --search for a setting, as it was typed."""
    return next((word for word in line.words if word.replace(" ", "").startswith(f"{name}=")), "")
