"""Convert single values from typed text and TOML to Python types, and back."""

from __future__ import annotations

import json
import tomllib
import types
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin


class ValueMismatch(Exception):
    """A value does not have its type. The message describes the type: "a whole number"."""


def typed(hint: Any, value: Any, text: bool = False) -> Any:
    """Return `value` as a value of type `hint`. With `text`, it was typed on a command line. Raises ValueMismatch."""
    origin, inside = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return typed(inside[0], value, text)
    if origin in (Union, types.UnionType):
        if types.NoneType in inside and (value is None or (isinstance(value, str) and value.lower() == "none")):
            return None
        for choice in inside:
            if choice is not types.NoneType:
                try:
                    return typed(choice, value, text)
                except ValueMismatch:
                    continue
        raise ValueMismatch(kind(hint))
    if origin is Literal:
        for choice in inside:
            if (type(value) is type(choice) and value == choice) or (text and value == str(choice)):
                return choice
        raise ValueMismatch(kind(hint))
    if origin in (tuple, list) or hint in (tuple, list):
        return _typed_list(hint, value, text)
    if isinstance(hint, type) and issubclass(hint, Enum):
        for member in hint:
            if value is member or value == member.name or (isinstance(value, str) and value == str(member.value)):
                return member
        raise ValueMismatch(kind(hint))
    if text and hint in (int, float):
        try:
            return hint(value)
        except ValueError:
            raise ValueMismatch(kind(hint)) from None
    if text and hint is bool and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if hint is float and type(value) in (int, float):
        return float(value)
    if hint is Path and isinstance(value, str | Path):
        return Path(value)
    if hint in (int, bool, str) and type(value) is hint:
        return value
    raise ValueMismatch(kind(hint))


def _typed_list(hint: Any, value: Any, text: bool) -> Any:
    """Return a list or tuple. Typed text is TOML: [1, 2], or ["a", "b"]."""
    if text:
        try:
            value = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            raise ValueMismatch(kind(hint)) from None
    container, inside = get_origin(hint) or hint, get_args(hint)
    if not isinstance(value, list | tuple):
        raise ValueMismatch(kind(hint))
    if container is tuple and inside and inside[-1] is not Ellipsis:
        if len(value) != len(inside):
            raise ValueMismatch(kind(hint))
        return tuple(typed(each, v) for each, v in zip(inside, value, strict=True))
    return container(typed(inside[0], v) if inside else v for v in value)


def kind(hint: Any) -> str:
    """Describe a type: "a whole number", "one of tree, allreduce"."""
    origin, inside = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return kind(inside[0])
    if origin in (Union, types.UnionType):
        return " or ".join("none" if each is types.NoneType else kind(each) for each in inside)
    if origin is Literal:
        return ("one of " if len(inside) > 1 else "") + ", ".join(str(choice) for choice in inside)
    if origin is tuple and inside and inside[-1] is not Ellipsis:
        return f"a list of {len(inside)}: [{', '.join(kind(each) for each in inside)}]"
    if origin in (tuple, list) or hint in (tuple, list):
        return 'a list like ["a", "b"]' if inside and inside[0] is str else "a list like [1, 2]"
    if isinstance(hint, type) and issubclass(hint, Enum):
        return "one of " + ", ".join(member.name for member in hint)
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text", Path: "a path"}
    return words.get(hint, "a number, text, true or false, a path, a list of these, or one of a Literal's choices")


def choices_of(hint: Any) -> tuple[Any, ...]:
    """Return the choices of a Literal or an Enum; () for other types."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return tuple(hint)
    return ()


def within(hint: Any, other: Any) -> bool:
    """Return whether every value of type `hint` is also of type `other`."""

    def parts(hint: Any) -> tuple[Any, ...]:
        origin, inside = get_origin(hint), get_args(hint)
        if origin in (Union, types.UnionType):
            return tuple(part for each in inside for part in parts(each))
        return parts(inside[0]) if origin is Annotated else inside if origin is Literal else (hint,)

    others = parts(other)
    return all(part in others or type(part) in others or (part is int and float in others) for part in parts(hint))


def shown(value: Any) -> str:
    """Format a value as it is typed after `--set key=`."""
    value = "none" if value is None else plain(value)
    return value if isinstance(value, str) else toml(value)


def plain(value: Any) -> Any:
    """Convert a value to one that JSON and TOML can hold."""
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value


def toml(value: Any) -> str:
    """Format a value as TOML."""
    value = plain(value)
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace(
            "\x7f", "\\u007f"
        )  # JSON allows a plain DEL, TOML does not
    if isinstance(value, list):
        return "[" + ", ".join(toml(each) for each in value) + "]"
    return repr(value)
