"""The settings of a class as a flat list, each with its dotted name, type, default and description."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from typing import Any, NamedTuple, TypeGuard, TypeVar, get_type_hints

from unisono.config.schema import INFO, SECTIONS, Range, SettingInfo, Settings
from unisono.config.value_types import ValueMismatch, choices_of, plain, shown, typed, within
from unisono.security.masking import masked

T = TypeVar("T")


class SettingEntry(NamedTuple):
    """One setting of a class.

    Args:
        name: its dotted name, as in model.width.
        hint: its type annotation.
        default: its default value, or its value in an instance; MISSING if the script gives none.
        source: "default" if the default is the library's, "script" if it is the script's.
        changes_bits: whether results depend on it.
        help: one line that describes it; "" for a script's setting without one.
        limits: the allowed values of a numeric setting of the library.
    """

    name: str
    hint: Any
    default: Any
    source: str
    changes_bits: bool
    help: str
    limits: Range | None = None


def entries_of(cls: type, instance: Any = MISSING, prefix: str = "", source: str = "") -> Iterator[SettingEntry]:
    """Yield every setting of a class in the order of its fields, those of sections included.

    With an instance, its values replace the defaults.
    """
    for f, hint, default in fields_of(cls, instance):
        name = prefix + f.name
        owner = next(base for base in cls.__mro__ if f.name in inspect.get_annotations(base))
        origin = source or ("default" if owner in SECTIONS else "script")
        if is_section(hint):
            # A section that the script redefines is the script's as a whole.
            yield from entries_of(hint, default, name + ".", "script" if origin == "script" else "")
            continue
        known = library_settings().get(name)
        if known is not None and not within(hint, known[0]):
            hint = known[0]  # `precision: str` in a script still takes only what precision takes
        info = known[1] if known is not None else _script_info(f)
        yield SettingEntry(name, hint, default, origin, info.changes_bits, info.help, info.limits)


@cache
def library_settings() -> dict[str, tuple[Any, SettingInfo]]:
    """Return the type and the description of every setting that all runs have, by dotted name.

    A script that gives a field another default replaces the whole field, so its description is looked up here.
    """

    def walk(cls: type, prefix: str) -> Iterator[tuple[str, tuple[Any, SettingInfo]]]:
        for f, hint, _ in fields_of(cls):
            name = prefix + f.name
            yield from walk(hint, f"{name}.") if is_section(hint) else [(name, (hint, f.metadata[INFO]))]

    return dict(walk(Settings, ""))


def _script_info(f: Field[Any]) -> SettingInfo:
    """Return the description of a script's own field: field(..., metadata={"help": "...", "changes_bits": False})."""
    return f.metadata.get(INFO) or SettingInfo(f.metadata.get("help", ""), f.metadata.get("changes_bits", True))


def fields_of(cls: type, instance: Any = MISSING) -> Iterator[tuple[Field[Any], Any, Any]]:
    """Yield (field, type, value or default) of each setting. The type of a section is that of its default."""
    hints = get_type_hints(cls)
    for f in fields(cls):
        if not f.init:
            continue  # computed by the class itself
        value: Any = f.default
        factory: Any = f.default_factory
        if instance is not MISSING:
            value = getattr(instance, f.name)
        elif factory is not MISSING:
            value = factory()
        hint = hints[f.name]
        yield f, type(value) if is_section(hint) and is_section(type(value)) else hint, value


def is_section(hint: Any) -> TypeGuard[type]:
    """Return whether a type is a dataclass, that is, a group of settings."""
    return isinstance(hint, type) and is_dataclass(hint)


def build(cls: type[T], values: Mapping[str, Any], prefix: str = "", default: Any = MISSING) -> T:
    """Return an instance of a settings class with these values, by dotted name."""
    arguments = {}
    for f, hint, value in fields_of(cls, default):
        name = prefix + f.name
        arguments[f.name] = build(hint, values, name + ".", value) if is_section(hint) else values[name]
    return cls(**arguments)


def flatten(settings: Any) -> dict[str, Any]:
    """Return every value by its dotted name, in the order of the fields."""
    return {entry.name: entry.default for entry in entries_of(type(settings), settings)}


def result_settings(settings: Any) -> dict[str, Any]:
    """Return the values that results depend on, as JSON can hold them: a path as text, an Enum member as its name.

    Every setting that a script adds is among them, unless its field says metadata={"changes_bits": False}. Secrets are
    masked, since these values are stored.
    """
    return {e.name: masked(e.name, plain(e.default)) for e in entries_of(type(settings), settings) if e.changes_bits}


def example_of(entry: SettingEntry) -> str:
    """Return a valid value of the setting, as it is typed after `--set key=`."""
    return shown(example_value(entry))


def example_value(entry: SettingEntry) -> Any:
    """Return a valid value of the setting: its default if that is valid."""
    for candidate in (entry.default, *choices_of(entry.hint), 1, 0.1, True, "text", [1, 2], ["a", "b"]):
        if candidate is not None and candidate is not MISSING:
            try:
                return typed(entry.hint, candidate)
            except ValueMismatch:
                continue
    return "VALUE"
