"""Parse JSON that a crash or a stranger may have changed, and check the form of its values before a reader uses them.

A reader checks a line or a file as a whole: it skips a line of another form, and a file of another form counts as
absent.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

LARGEST = 1e30
"""Numbers are below it, so that sums and products of them stay finite."""

DEPTH = 200
"""Levels of lists and objects that `parse_value` accepts. Readers of JSON recurse, and Python allows 1,000 frames."""

Form = Callable[[Any], bool]
"""Returns whether a value has some form."""


def parse_value(text: bytes | str) -> Any:
    """Return a JSON value that may come from anywhere.

    Args:
        text: The text. Bytes are UTF-8.

    Raises:
        ValueError: The text is no JSON, is nested deeper than DEPTH, or has an object with two values of one name.
    """
    try:
        value = json.loads(text if isinstance(text, str) else text.decode("utf-8"), object_pairs_hook=_object_once)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if depth_of(value) > DEPTH:
        raise ValueError(f"it is nested deeper than {DEPTH} levels")
    return value


def depth_of(value: Any) -> int:
    """Return the number of lists and objects within each other, without recursion."""
    depth, level = 0, [value]
    while level := [item for item in level if isinstance(item, (list, dict))]:
        depth += 1
        level = [inner for item in level for inner in (item.values() if isinstance(item, dict) else item)]
    return depth


def _object_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has two values of one name")
    return found


def parse(text: bytes | str, *, finite: bool = False) -> dict[str, Any] | None:
    """Return a JSON object; None if the text is none.

    Args:
        text: The text. Bytes are UTF-8.
        finite: Refuse objects with a number that is not below `LARGEST`.
    """
    try:
        if finite:
            value = json.loads(text, parse_int=_finite_int, parse_float=_finite_float, parse_constant=_finite_float)
        else:
            value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def is_number(value: Any) -> bool:
    """Return whether a value is a number below `LARGEST`."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -LARGEST < value < LARGEST


def is_count(value: Any) -> bool:
    """Return whether a value is a whole number from 0 to 2**53."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 1 << 53


def is_size(value: Any) -> bool:
    """Return whether a value is a whole number from 1 to 2**53."""
    return is_count(value) and value > 0


def is_text(value: Any) -> bool:
    """Return whether a value is text."""
    return isinstance(value, str)


def is_printable(value: Any) -> bool:
    """Return whether a value is text that can be written as UTF-8, without control characters."""
    return isinstance(value, str) and value.isprintable()


def is_encodable(value: Any) -> bool:
    """Return whether all text in a value can be written as UTF-8 (JSON can escape halves of surrogate pairs)."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def is_object(value: Any) -> bool:
    """Return whether a value is an object."""
    return isinstance(value, dict)


def list_of(form: Form) -> Form:
    """Return the form of a list of such values."""
    return lambda value: isinstance(value, list) and all(map(form, value))


def object_of(form: Form) -> Form:
    """Return the form of an object of such values."""
    return lambda value: isinstance(value, dict) and all(map(form, value.values()))


def maybe(form: Form) -> Form:
    """Return the form of such a value, or null."""
    return lambda value: value is None or form(value)


def fits(content: Mapping[str, Any], forms: Mapping[str, Form]) -> bool:
    """Return whether all values that are there have the form of their name. Other names are not checked."""
    return all(form(content[name]) for name, form in forms.items() if name in content)


def _finite_int(text: str) -> int:
    value = int(text)
    if not is_number(value):
        raise ValueError(text)
    return value


def _finite_float(text: str) -> float:
    value = float(text)
    if not is_number(value):
        raise ValueError(text)
    return value
