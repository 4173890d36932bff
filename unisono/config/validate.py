"""What is wrong with a request for a run: all of it, before any process starts."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from unisono.config import (
    UNASKED,
    CommandLine,
    LoadedSettings,
    ParallelSettings,
    SettingEntry,
    Settings,
    SettingsSources,
    entries_of,
    example_of,
    flatten,
    shown,
)
from unisono.config.conflicts import conflicts_among
from unisono.config.exchanges import DIVIDING_AXES
from unisono.config.limits import out_of_range
from unisono.config.mesh_shape import MeshShape
from unisono.config.validate_sizes import WITH_MESH, WITHOUT_MESH, choose_mesh
from unisono.config.value_types import ValueMismatch, typed
from unisono.errors import Problem, SettingsError


class ValidatedSettings(NamedTuple):
    """The settings, as far as they can be made, and everything that is wrong with them."""

    loaded: LoadedSettings[Any] | None
    problems: list[Problem]


def examine(gathered: SettingsSources[Any], size: int, *, only_given: bool = False) -> ValidatedSettings:
    """Look at gathered settings for `size` processes. What follows only from another problem is not told.

    only_given  the defaults are not the script's: only what was given counts
    """
    try:
        loaded = gathered.build()
    except SettingsError as error:
        return ValidatedSettings(None, gathered.problems or list(error.problems))
    unasked = {name for name, source in gathered.sources.items() if only_given and source in UNASKED}
    unknown = gathered.doubtful | unasked
    return ValidatedSettings(loaded, [*gathered.problems, *check(loaded.settings, size, gathered.line, unknown)])


def check(settings: Any, size: int, line: CommandLine, unknown: Collection[str] = ()) -> list[Problem]:
    """Everything that is wrong with these settings for `size` processes.

    line     what was typed, for the messages
    unknown  names of settings whose values do not count
    """
    entries = [entry for entry in entries_of(type(settings), settings) if entry.name not in unknown]
    problems = [problem for entry in entries if (problem := _misfit(entry, line))]
    if problems:
        return problems  # comparing values of the wrong type would only raise
    values = {name: value for name, value in flatten(settings).items() if name not in unknown}
    axes, wrong = choose_mesh(values, size, line)
    problems += out_of_range(values, line)
    found = _with_mesh(values, axes)
    problems += [conflict.problem(found, line) for conflict in conflicts_among(found)]
    problems += [problem for rule in WITHOUT_MESH for problem in rule(values, line)]
    problems += wrong or [problem for rule in WITH_MESH for problem in rule(values, axes, line)]
    return problems


def needs_dry_run(settings: Settings) -> bool:
    """Return whether these settings ask for something that not every model supports, so that a dry run must tell."""
    return settings.parallel != ParallelSettings() or settings.compress.kind != "none"


def _with_mesh(values: Mapping[str, Any], axes: MeshShape) -> dict[str, Any]:
    """Return the settings with sizes of dividing axes as the processes form them: 2, say, for -1."""
    sizes = {f"parallel.{axis}": max(getattr(axes, axis), values.get(f"parallel.{axis}", 1)) for axis in DIVIDING_AXES}
    return {**values, **{name: size for name, size in sizes.items() if name in values or size > 1}}


def _misfit(entry: SettingEntry, line: CommandLine) -> Problem | None:
    try:
        typed(entry.hint, entry.default)
    except ValueMismatch as misfit:
        do = str(line.setting(f"{entry.name}={example_of(entry)}"))
        return Problem(f"{entry.name} = {shown(entry.default)} has the wrong type.", f"It is not {misfit}.", do)
    return None
